/* dispatchers_run.c - see dispatchers.h. Every step leaves nothing but what its operations wrote: buffers are
 * poisoned, so that a gradient that nothing computed shows as NaN. */
#include "tests/bench/dispatchers.h"

#include "kernels/bf16.h"
#include "kernels/ref.h"
#include "sim/lower/lower.h"
#include "tests/mpi/parity.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct watch {
    struct run *run;
    struct step *step;
    const struct moe_execution *x;
    struct moe_communicator *world;
};

/* ---- one step ---- */

static struct tensor *tensor_of(struct watch *w, int buffer, int slot)
{
    struct step *step = w->step;
    const struct moe_schedule *s = w->run->s;
    for (int i = 0; i < step->n_tensors; i++)
        if (step->tensors[i].buffer == buffer && step->tensors[i].slot == slot) {
            struct tensor moved = step->tensors[i]; /* to the end: order is that of the last write */
            memmove(&step->tensors[i], &step->tensors[i + 1],
                    (size_t)(step->n_tensors - i - 1) * sizeof moved);
            step->tensors[step->n_tensors - 1] = moved;
            return &step->tensors[step->n_tensors - 1];
        }
    step->tensors = moe_grow(step->tensors, &step->cap_tensors, step->n_tensors + 1, sizeof *step->tensors);
    struct tensor *t = &step->tensors[step->n_tensors++];
    *t = (struct tensor){.buffer = buffer, .slot = slot, .type = s->buffers[buffer].type, .shard = -1};
    moe_copy_name(t->name, s->buffers[buffer].name);
    for (int p = 0; p < s->n_params; p++)
        if (s->params[p].buffer >= 0 && s->params[p].grad == buffer) {
            t->of_param = true;
            t->shard = s->params[p].shard;
        }
    return t;
}

/* What runs can be compared by, whatever their dispatcher is: each layer's output, the gradients of its
 * probabilities, and those of parameters. */
static bool is_kept(const struct moe_schedule *s, int buffer, enum moe_pass pass)
{
    const struct moe_buffer *b = &s->buffers[buffer];
    if (pass == MOE_FORWARD) return !strcmp(b->name, "stream");
    return b->role == MOE_BUF_GRAD || !strcmp(b->name, "d_prob");
}

static void keep_writes(struct watch *w, const struct moe_executed *e)
{
    for (int i = 0; i < e->op->n_writes; i++) {
        const int buffer = e->op->writes[i].buffer, slot = moe_slot(w->run->s, e->op->writes[i], e->layer);
        if (!is_kept(w->run->s, buffer, e->block->pass)) continue;
        struct tensor *t = tensor_of(w, buffer, slot);
        const void *content = moe_execute_buffer(w->x, buffer, slot, &t->n);
        size_t bytes = (size_t)t->n * (size_t)moe_type_bytes[t->type];
        t->layer = e->layer;
        t->pass = e->block->pass;
        free(t->content);
        t->content = moe_alloc(1, bytes + 1);
        if (bytes) memcpy(t->content, content, bytes);
    }
}

static uint64_t hash_of(const unsigned char *p, size_t n)
{
    uint64_t h = 1;
    for (size_t i = 0; i < n; i++) h = moe_hash64(h ^ p[i]);
    return h;
}

/* What a product of groups reads, row by row, under the number that the expert has among all. */
static void keep_rows(struct watch *w, const struct moe_executed *e)
{
    const struct moe_schedule *s = w->run->s;
    const struct moe_symbol *y = &s->symbols[e->op->group];
    const struct moe_buffer *b = &s->buffers[e->op->reads[0].buffer];
    const struct moe_comm *ep = NULL;
    int64_t n, n_counts;
    const unsigned char *row =
        moe_execute_buffer(w->x, e->op->reads[0].buffer, moe_slot(s, e->op->reads[0], e->layer), &n);
    const int64_t *counts = moe_execute_buffer(
        w->x, y->buffer, moe_slot(s, (struct moe_ref){.buffer = y->buffer}, e->layer), &n_counts);
    size_t bytes = (size_t)w->run->hidden * (size_t)moe_type_bytes[b->type];
    const int here = moe_symbol_count(s, e->op->group, w->world->rank);
    for (int p = 0; p < s->n_params; p++)
        if (s->params[p].shard >= 0) ep = &s->comms[s->params[p].shard];
    struct expert_rows *to = &w->step->rows[e->layer * s->n_experts + ep->index_of[w->world->rank] * here];
    for (int g = 0; g < here; g++) {
        to[g].n = moe_symbol_reduce(s, e->op->group, w->world->rank, counts, g);
        uint64_t in_order = 1, in_any = 0;
        for (int64_t i = 0; i < to[g].n; i++, row += bytes) {
            uint64_t h = hash_of(row, bytes);
            in_order = moe_hash64(in_order ^ h);
            in_any += h >> 8; /* a sum over few ranks stays below 2^63 */
        }
        to[g].in_order = (int64_t)(in_order >> 8);
        to[g].in_any = (int64_t)(in_any >> 8);
    }
}

static void watch(void *ctx, const struct moe_executed *e)
{
    struct watch *w = ctx;
    const struct moe_schedule *s = w->run->s;
    if (e->skipped || e->block->pass > MOE_BACKWARD) return;
    keep_writes(w, e);
    if (e->op->kind != MOE_KERNEL) return;
    if (!strcmp(e->op->name, "expert_in") && e->block->pass == MOE_FORWARD) keep_rows(w, e);
    if (e->op->kernel != MOE_K_COMBINE_BWD && e->op->kernel != MOE_K_WEIGH_BWD) return;
    int64_t n;
    moe_execute_buffer(w->x, e->op->reads[0].buffer, moe_slot(s, e->op->reads[0], e->layer), &n);
    w->step->dots[e->layer * s->n_ranks + w->world->rank] = n / w->run->hidden;
    w->run->dot_by_rows = e->op->mode == MOE_DOT_BY_ROWS;
}

/* ---- from every rank ---- */

static void over_ranks(struct moe_communicator *world, enum moe_reduction how, int64_t *x, int64_t n)
{
    const struct moe_op op = {
        .kind = MOE_COLLECTIVE, .collective = MOE_ALLREDUCE, .reduction = how, .type = MOE_I64};
    int err = world->table->start(world, &(struct moe_transfer){&op, x, x, &n, &n});
    if (err >= 0) err = world->table->wait(world, 60);
    if (err < 0) parity_die(world, err);
}

void most_of_all(struct moe_communicator *world, int64_t *x, int64_t n)
{
    over_ranks(world, MOE_REDUCE_MAX, x, n);
}

void *content_at(struct moe_communicator *world, const struct run *r, const struct tensor *t, int place)
{
    const struct moe_op op = {.kind = MOE_COLLECTIVE, .collective = MOE_ALLGATHER, .type = t->type};
    const size_t bytes = (size_t)t->n * (size_t)moe_type_bytes[t->type];
    int64_t *n = moe_alloc((size_t)world->size, sizeof *n);
    char *all = moe_alloc((size_t)world->size, bytes + 1), *out = moe_alloc(1, bytes + 1);
    for (int rank = 0; rank < world->size; rank++) n[rank] = t->n;
    int err = world->table->start(world, &(struct moe_transfer){&op, t->content, all, n, n});
    if (err >= 0) err = world->table->wait(world, 60);
    if (err < 0) parity_die(world, err);
    for (int rank = 0; rank < world->size; rank++)
        if (r->s->comms[t->shard].index_of[rank] == place) memcpy(out, all + (size_t)rank * bytes, bytes);
    free(all);
    free(n);
    return out;
}

/* ---- a run ---- */

static int skipping_run(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    char *out = launch->out[0];
    const int64_t *dims = launch->dims;
    size_t each = (size_t)(dims[1] * dims[2] * moe_type_bytes[launch->op->type]);
    if (launch->op->kernel != MOE_K_GROUPED_WGRAD) return moe_device_cpu.run(d, launch, stream);
    char *before = moe_alloc((size_t)dims[0], each);
    memcpy(before, out, (size_t)dims[0] * each);
    MOE_TRY(moe_device_cpu.run(d, launch, stream));
    for (int64_t g = 0; g < dims[0]; g++)
        if (!launch->rows[g]) memcpy(out + (size_t)g * each, before + (size_t)g * each, each);
    free(before);
    return MOE_OK;
}

static int plain_run(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    const int64_t *n = launch->dims, *rows = launch->rows;
    const void *const *in = launch->in;
    const bool add = launch->op->writes[0].accumulate;
    if (launch->op->type != MOE_F64 || !rows) return moe_device_cpu.run(d, launch, stream);
    if (launch->op->kernel == MOE_K_GROUPED_GEMM)
        moe_ref_grouped_gemm_f64(moe_ref_gemm_f64, n[0], n[1], n[2], rows, launch->op->trans_b, in[0], in[1],
                                 launch->out[0], add);
    else
        moe_ref_grouped_wgrad_f64(moe_ref_gemm_f64, n[0], n[1], n[2], rows, in[0], in[1], launch->out[0],
                                  add);
    return MOE_OK;
}

static void reverse_peers(struct moe_schedule *s)
{
    for (int p = 0; p < s->n_params; p++) {
        if (s->params[p].shard < 0) continue;
        struct moe_comm *c = &s->comms[s->params[p].shard];
        for (int r = 0; r < s->n_ranks; r++) c->members[r] = s->n_ranks - 1 - r;
        for (int r = 0; r < s->n_ranks; r++) c->index_of[r] = s->n_ranks - 1 - r;
        return;
    }
}

static void leave_out(struct moe_schedule *s, const char *name)
{
    struct moe_role *role = moe_schedule_split_role(s, s->n_ranks - 1);
    struct moe_op *op = fixture_op(role, MOE_BACKWARD, name);
    moe_block_delete(fixture_block(role, op), op->id);
}

static void train(struct run *r, const struct moe_scenario *sc, struct watch *w, int plant)
{
    struct moe_execute_options options = {
        .timeout_s = 60, .seed = 3, .poison = true, .observe = watch, .ctx = w};
    struct moe_device *device;
    struct moe_execution *x = NULL;
    struct moe_device_table table = moe_device_cpu;
    const struct moe_schedule *s = r->s;
    int32_t *token = moe_alloc((size_t)s->tokens[w->world->rank], sizeof *token),
            *target = moe_alloc((size_t)s->tokens[w->world->rank], sizeof *target);
    parity_tokens(s, w->world->rank, token, target);
    options.forced = sc->counts;
    options.forced_step = sc->counts_step;
    if (plant & PLANT_SKIP) table.run = skipping_run;
    if (plant & PLAIN_PRODUCTS) table.run = plain_run;
    int err = moe_device_cpu.open(&device);
    if (err >= 0) device->table = &table;
    if (err >= 0) err = moe_execute_open(s, device, w->world, &options, &x);
    w->x = x;
    for (int i = 0; i < r->n_steps && err >= 0; i++) {
        double loss;
        w->step = &r->steps[i];
        err = moe_execute_step(x, token, target, &loss);
    }
    if (err < 0) parity_die(w->world, err);
    moe_execute_close(x);
    device->table->close(device);
    free(token);
    free(target);
}

struct run *run_open(const struct moe_scenario *sc, struct moe_communicator *world, int n_steps, int plant)
{
    struct run *r = moe_alloc(1, sizeof *r);
    *r = (struct run){.hidden = (int)sc->hidden, .n_steps = n_steps};
    if (moe_lower(sc, &r->s) < 0) parity_die(world, MOE_EINPUT);
    if (plant & PLANT_PEERS) reverse_peers(r->s);
    if (plant & PLANT_ABSENT) leave_out(r->s, "d_expert_in_w");
    if (plant & PLANT_ABSENT) leave_out(r->s, "d_expert_out_w");
    const int L = r->s->n_layers, R = r->s->n_ranks, E = r->s->n_experts;
    r->steps = moe_alloc((size_t)n_steps, sizeof *r->steps);
    for (int i = 0; i < n_steps; i++) {
        r->steps[i].rows = moe_alloc((size_t)(L * E), sizeof *r->steps[i].rows);
        r->steps[i].dots = moe_alloc((size_t)(L * R), sizeof *r->steps[i].dots);
    }
    train(r, sc, &(struct watch){.run = r, .world = world}, plant);
    for (int i = 0; i < n_steps; i++) {
        struct step *step = &r->steps[i];
        over_ranks(world, MOE_REDUCE_SUM, &step->rows[0].n,
                   (int64_t)L * E * (int64_t)(sizeof *step->rows / sizeof step->rows->n));
        over_ranks(world, MOE_REDUCE_SUM, step->dots, (int64_t)L * R);
    }
    return r;
}

void run_close(struct run *r)
{
    for (int i = 0; i < r->n_steps; i++) {
        for (int t = 0; t < r->steps[i].n_tensors; t++) {
            free(r->steps[i].tensors[t].content);
        }
        free(r->steps[i].tensors);
        free(r->steps[i].rows);
        free(r->steps[i].dots);
    }
    moe_schedule_free(r->s);
    free(r->steps);
    free(r);
}

/* ---- the gradients of an expert ---- */

const char *const gradient_text[] = {"present, zero", "present", "absent", "uninitialised"};

static enum gradient_verdict look(const struct tensor *t, int64_t first, int64_t n)
{
    enum gradient_verdict v = PRESENT_AND_ZERO;
    for (int64_t i = first; i < first + n; i++) {
        double x = t->type == MOE_F64    ? ((const double *)t->content)[i]
                   : t->type == MOE_BF16 ? (double)moe_bf16_to_float(((const moe_bf16 *)t->content)[i])
                                         : (double)((const float *)t->content)[i];
        if (isnan(x)) return UNINITIALISED;
        if (x != 0) v = PRESENT;
    }
    return v;
}

enum gradient_verdict expert_gradient(const struct run *r, struct moe_communicator *world, int step,
                                      int expert)
{
    int64_t worst = PRESENT_AND_ZERO;
    for (int p = 0; p < r->s->n_params; p++) {
        const struct moe_param *y = &r->s->params[p];
        if (y->shard < 0) continue;
        const struct moe_comm *ep = &r->s->comms[y->shard];
        const int here = r->s->n_experts / moe_group_size(ep, 0);
        for (int slot = 0; slot < r->s->n_layers && ep->index_of[world->rank] == expert / here; slot++) {
            int64_t v = ABSENT;
            for (int t = 0; t < r->steps[step].n_tensors; t++) {
                const struct tensor *of = &r->steps[step].tensors[t];
                if (of->buffer == y->grad && of->slot == slot)
                    v = look(of, expert % here * (of->n / here), of->n / here);
            }
            if (v > worst) worst = v;
        }
    }
    most_of_all(world, &worst, 1);
    return (enum gradient_verdict)worst;
}
