/* The orders of tests/cases/tied_embedding on 4 real ranks: the embedding's gradient is 1, 10, 100 and 1000
 * on ranks 0 to 3, two of each stage. Its mean over the copies of a stage, summed over both, is 555.5.
 * Where the sum over stages adds what another rank owns, it is
 *   first stage   rank 1 owns all: (1 + 10) / 2 = 5.5, and 1000 of rank 3 as it was, or halved before: 1005.5
 *                 or 505.5
 *   last stage    rank 2 owns all: (100 + 1000) / 2 = 550, and 1 of rank 0, or half of it: 551 or 550.5
 * What the owners update by must be that, and with a rate of 1 what all ranks then hold of the parameter.
 * Source: facts/founding_cases.md A.3. */
#include "tests/mpi/parity.h"

static const struct order {
    const char *file;
    double stage[2]; /* first, last */
    int owned[4];    /* elements of the embedding that a rank owns, of 8192 */
} orders[] = {
    {"sum_first", {555.5, 555.5}, {0, 8192, 8192, 0}},
    {"sum_first_scaled", {555.5, 555.5}, {0, 8192, 8192, 0}},
    {"separate_bucket", {555.5, 555.5}, {4096, 4096, 4096, 4096}},
    {"separate_bucket_scaled", {555.5, 555.5}, {4096, 4096, 4096, 4096}},
    {"single_bucket", {1005.5, 551}, {0, 8192, 8192, 0}},
    {"single_bucket_scaled", {505.5, 550.5}, {0, 8192, 8192, 0}},
};
enum { N_ORDERS = sizeof orders / sizeof *orders, ELEMENTS = 8192 };

static int failures;

static void expect(const char *file, int rank, const char *what, double found, double wanted)
{
    if (fabs(found - wanted) <= 1e-9) return; /* doubles hold 1005.5 to 1e-13 */
    fprintf(stderr, "FAILED: %s: rank %d: %s is %.17g, expected %.17g\n", file, rank, what, found, wanted);
    failures++;
}

static int new_buffer(struct moe_schedule *s, struct moe_buffer like)
{
    s->buffers = moe_grow(s->buffers, &s->cap_buffers, s->n_buffers + 1, sizeof *s->buffers);
    s->buffers[s->n_buffers] = like;
    return s->n_buffers++;
}

/* What computes the embedding's gradient copies it from a buffer instead; returns the buffer. */
static int give_gradient(struct moe_schedule *s, const struct moe_param *p)
{
    struct moe_buffer like = s->buffers[p->buffer];
    like.role = MOE_BUF_STATE;
    int given = new_buffer(s, like);
    for (int r = 0; r < s->n_roles; r++)
        for (int b = 0; b < s->roles[r].n_blocks; b++)
            for (int o = 0; o < s->roles[r].blocks[b].n_ops; o++) {
                struct moe_op *op = &s->roles[r].blocks[b].ops[o];
                if (!op->serves || op->writes[0].buffer != p->grad) continue;
                op->kernel = MOE_K_COPY;
                op->n_reads = op->n_dims = 1;
                op->reads[0] = (struct moe_ref){.buffer = given};
                op->dims[0] = like.extent;
            }
    return given;
}

static const struct moe_op *update_of(const struct moe_schedule *s, int rank, int buffer)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            if (op->kind == MOE_KERNEL && op->kernel == MOE_K_SGD && op->writes[0].buffer == buffer)
                return op;
        }
    moe_bug(__FILE__, __LINE__, "no update");
}

static const struct moe_param *embedding(const struct moe_schedule *s)
{
    int i = 0;
    while (strcmp(s->params[i].name, "embedding") != 0) i++;
    return &s->params[i];
}

static void run(struct moe_communicator *world, const struct order *y)
{
    char path[256];
    struct moe_scenario *sc;
    struct moe_device *device;
    struct moe_execution *x = NULL;
    struct moe_execute_options options = {
        .timeout_s = 20, .agree_steps = INT64_MAX, .seed = 3, .poison = true};
    int32_t token = 7, target = 8;
    double loss, before[ELEMENTS];
    int64_t n, all;
    snprintf(path, sizeof path, MOESIM_CASES "/tied_embedding/%s.yaml", y->file);
    int err = moe_scenario_load(path, &sc), rank = world->rank;
    if (err < 0) parity_die(world, err);
    struct moe_schedule *s = fixture_schedule(sc);
    const struct moe_param p = *embedding(s);
    int given = give_gradient(s, &p);
    err = moe_device_cpu.open(&device);
    if (err >= 0) err = moe_execute_open(s, device, world, &options, &x);
    if (err < 0) parity_die(world, err);
    double *gradient = moe_execute_param(x, given, 0, &n);
    expect(y->file, rank, "elements of the embedding", (double)n, ELEMENTS);
    for (int i = 0; i < ELEMENTS; i++) gradient[i] = pow(10, rank);
    memcpy(before, moe_execute_buffer(x, p.buffer, 0, &n), sizeof before);
    err = moe_execute_step(x, &token, &target, &loss);
    if (err < 0) parity_die(world, err);
    double wanted = y->stage[s->role_of[rank]];
    const struct moe_op *op = update_of(s, rank, p.buffer);
    int64_t begin = moe_eval(s, (struct moe_env){0}, op->reads[1].begin, rank, 0, 0);
    n = moe_eval(s, (struct moe_env){0}, op->reads[1].n, rank, 0, 0);
    expect(y->file, rank, "owned elements", (double)n, y->owned[rank]);
    const double *reduced = moe_execute_buffer(x, op->reads[1].buffer, 0, &all);
    for (int64_t i = 0; i < n; i++) expect(y->file, rank, "owned gradient", reduced[begin + i], wanted);
    const double *after = moe_execute_buffer(x, p.buffer, 0, &all);
    for (int i = 0; i < ELEMENTS; i++)
        expect(y->file, rank, "update of the parameter", before[i] - after[i], wanted);
    if (rank % 2 == 0) printf("%s: stage %d: %g\n", y->file, s->role_of[rank], before[0] - after[0]);
    moe_execute_close(x);
    device->table->close(device);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

int main(void)
{
    struct moe_communicator *world;
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    for (int i = 0; i < N_ORDERS; i++) run(world, &orders[i]);
    if (failures) world->table->abort(world, 1);
    if (world->rank == 0) printf("%d orders on 4 ranks\n", N_ORDERS);
    world->table->close(world);
    return 0;
}
