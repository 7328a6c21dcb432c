/* Any number of ranks computes what 1 rank computes: gradients and norms of the first step, with the same
 * routing, for each layout, dispatcher and capacity rule, in float and in double. The one-rank reference
 * holds all tokens and counts capacity per part of them, as large as a rank's: the same parts as
 * micro-batches, with the auxiliary loss over all. Stages of a pipeline are held to it layer by layer, with
 * as many micro-batches. Prints the largest difference of each run. */
#include "tests/mpi/parity.h"

static const struct layout {
    int ranks, ep;
    const char *tokens, *pipeline; /* more of the layout */
    int layers;                    /* 0: 2 */
} layouts[] = {{4, 4, "12"},
               {4, 2, "12"},
               {4, 1, "12"},
               {2, 2, "12"},
               {2, 1, "12"},
               {1, 1, "12"},
               {4, 4, "[20, 0, 8, 20]"},
               {4, 2, "[4, 28, 0, 16]"},
               {2, 2, "12", "micro_batches: 3"},
               {2, 1, "12", "pipeline_parallel: 2"},
               {2, 1, "12", "pipeline_parallel: 2, micro_batches: 3, pipeline: gpipe"},
               {4, 1, "12", "pipeline_parallel: 2, micro_batches: 2"},
               {4, 2, "12", "pipeline_parallel: 2, micro_batches: 3"},
               {4, 2, "[8, 0, 8, 0]", "pipeline_parallel: 2, micro_batches: 2, pipeline: gpipe"},
               {4, 1, "12", "pipeline_parallel: 4, micro_batches: 5", 4},
               {4, 1, "8", "pipeline_parallel: 4, micro_batches: 2", 4}};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

/* Orders of the gradient sum that must all be right. */
#define SUMS "gradient_sync: [{do: sum, of: shared, over: dp}, {do: sum, of: experts, over: edp}, " TIED
#define TIED "{do: sum, of: embedding, over: tied}, "
#define NORMS                                                                                                \
    "{do: norm, of: experts, over: ep_pp}, {do: norm, of: shared, over: pp}, {do: clip}, {do: update}]\n"
#define SHARED "{do: reduce_scatter, of: shared, over: dp}, {do: reduce_scatter, of: experts, over: edp}, "
#define WORLD_NORMS "{do: norm, of: experts, over: world}, {do: norm, of: shared, over: world}, {do: clip}, "
#define GATHERS                                                                                              \
    "{do: update}, {do: all_gather, of: shared, over: dp}, {do: all_gather, of: experts, over: edp}]\n"
static const struct variant {
    const char *capacity; /* or another part of a scenario */
    bool equal_tokens;    /* needs as many tokens on every rank */
} variants[] = {
    {"", false},
    {"capacity: {rule: megatron, factor: 1.0%s}", true},
    {"capacity: {rule: megatron, factor: 1.25%s}", true},
    {"capacity: {rule: megatron, factor: 1.25, drop: position%s}", true},
    {"capacity: {rule: megatron, factor: 1.0, pad: true%s}", true},
    {"capacity: {rule: megatron, factor: 1.25, pad: true%s}", true},
    {"overlap_grad_reduce: true\n", false},
    {SUMS "{do: divide, by: world_tokens}, " NORMS, false},
    {SUMS "{do: divide, of: experts, by: [world_tokens, ep], times: ep}, "
          "{do: divide, of: shared, by: world_tokens}, " NORMS "overlap_grad_reduce: true\n",
     false},
    {SUMS "{do: divide, of: shared, by: world_tokens}, {do: norm, of: shared, over: pp}, "
          "{do: divide, of: experts, by: world_tokens}, {do: norm, of: w1, over: ep_pp}, "
          "{do: norm, of: w2, over: ep_pp}, {do: clip}, {do: update}]\n",
     false},
    {"apply_probs: expert\n", false},
    {"apply_probs: expert\ncapacity: {rule: megatron, factor: 1.0%s}", true},
    {"apply_probs: expert\ncapacity: {rule: megatron, factor: 1.25, pad: true%s}", true},
    {"row_dot: by_rows\n", false},
    {"loss: mean_of_ranks\noverlap_grad_reduce: true\n", true},
    {"aux_loss: {coefficient: 0.01, times: [tokens, dp]}\n", true},
    {"loss: mean_of_ranks\ngradient_sync: [{do: average, of: shared, over: dp}, "
     "{do: average, of: experts, over: edp}, " TIED "{do: divide, of: experts, by: ep}, " NORMS,
     true},
    {"optimizer: sgd\ndistributed_optimizer: {bucket_size: 300}\n", false},
    {"optimizer: sgd\noverlap_grad_reduce: true\ndistributed_optimizer: {bucket_size: 300}\n", false},
    {"optimizer: sgd\ndistributed_optimizer: {separate_tied: false}\n"
     "gradient_sync: [" TIED "{do: divide, of: shared, by: world_tokens}, " SHARED
     "{do: divide, of: experts, "
     "by: world_tokens}, " WORLD_NORMS GATHERS,
     false},
    {"optimizer: sgd\nloss: mean_of_ranks\noverlap_grad_reduce: true\n"
     "gradient_sync: [{do: divide, by: dp}, " SHARED TIED WORLD_NORMS GATHERS,
     true},
    /* Within the ranks that split the experts, after a sum over their copies. */
    {"optimizer: sgd\ngradient_sync: [{do: sum, of: shared, over: edp}, "
     "{do: reduce_scatter, of: shared, over: ep}, {do: sum, of: experts, over: edp}, " TIED
     "{do: divide, by: world_tokens}, {do: norm, of: shared, over: ep_pp}, {do: norm, of: experts, over: "
     "ep_pp}, "
     "{do: clip}, {do: update}, {do: all_gather, of: shared, over: ep}]\ndistributed_optimizer: {}\n",
     false},
    {"capacity: {rule: deepspeed, factor: 1.0%s}", true},
    {"capacity: {rule: deepspeed, drop_tokens: false%s}", false},
    {"capacity: {rule: tutel, factor: 1.0%s}", true},
    {"capacity: {rule: tutel, factor: 0%s}", false},
    {"capacity: {rule: tutel, factor: -1.5, align: 4, unequal_tokens: true%s}", true},
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

static void expect(struct moe_communicator *world, bool right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: FAILED: %s\n", world->rank, what);
    world->table->abort(world, 1);
}

static int buffer_of(const struct moe_schedule *s, const char *name)
{
    for (int i = 0; i < s->n_buffers; i++)
        if (!strcmp(s->buffers[i].name, name)) return i;
    moe_bug(__FILE__, __LINE__, name);
}

/* The chosen experts of this rank's tokens, and those that were kept, equal those of the same tokens in the
 * one-rank run. */
static void same_routing(struct moe_communicator *world, const char *name, const struct moe_schedule *s,
                         const struct moe_execution *many, const struct moe_schedule *s1,
                         const struct moe_execution *one, int64_t first_token)
{
    int a = buffer_of(s, name), b = buffer_of(s1, name);
    const struct moe_role *role = &s->roles[s->role_of[world->rank]];
    for (int layer = 0; layer < s->n_layers * s->n_micro; layer++) {
        int64_t n, all;
        if (layer % s->n_layers < role->first_layer || layer % s->n_layers >= role->end_layer) continue;
        const int32_t *mine = moe_execute_buffer(many, a, layer, &n),
                      *whole = moe_execute_buffer(one, b, layer, &all);
        expect(world, n == s->tokens[world->rank] * s->top_k, "number of routed rows");
        expect(world, n == 0 || !memcmp(mine, whole + first_token * s->top_k, (size_t)n * sizeof *mine),
               name);
    }
}

/* What this rank counted for its peers is what the routing says of the experts that it chose. */
static void same_peers(struct moe_communicator *world, const struct moe_scenario *sc,
                       const struct moe_schedule *s, const struct moe_execution *x)
{
    int P = (int)sc->expert_parallel, a = buffer_of(s, "expert"), b = buffer_of(s, "tokens_for");
    const struct moe_role *role = &s->roles[s->role_of[world->rank]];
    struct moe_routing *r = moe_routing_new(s->n_layers * s->n_micro, s->n_ranks, s->n_experts, s->top_k);
    int32_t *peers = moe_alloc((size_t)P, sizeof *peers);
    for (int layer = 0; layer < s->n_layers * s->n_micro; layer++) {
        int64_t n;
        if (layer % s->n_layers < role->first_layer || layer % s->n_layers >= role->end_layer) continue;
        const int32_t *expert = moe_execute_buffer(x, a, layer, &n);
        moe_routing_add(r, layer, world->rank, s->tokens[world->rank], expert);
        const int64_t *counted = moe_execute_buffer(x, b, layer, &n);
        expect(world, n == P, "number of peers");
        moe_routing_peers(r, layer, world->rank, P, peers);
        for (int p = 0; p < P; p++) expect(world, counted[p] == peers[p], "tokens for a peer");
    }
    free(peers);
    moe_routing_free(r);
}

/* What a rank updates a slot by, and (SGD, which does not divide by what may be near 0) what that gives. */
static double compare_slot(const struct moe_schedule *s, int rank, const struct moe_execution *many,
                           const struct moe_execution *one, int param, int slot)
{
    const struct moe_schedule *s1 = moe_execute_schedule(one); /* of another dispatcher: other buffers */
    const struct moe_param *p = &s->params[param];
    int64_t n;
    moe_execute_buffer(many, p->buffer, slot, &n);
    struct parity_update mine = parity_update_of(s, rank, param, slot, n);
    int64_t from = p->shard < 0 ? 0 : n * s->comms[p->shard].index_of[rank];
    double most = parity_part(s, mine.op->reads[1].buffer, mine.grad_slot, many, mine.at, mine.n, one,
                              s1->params[param].grad, slot, from + mine.first, 0);
    return mine.op->kernel == MOE_K_ADAMW
               ? most
               : parity_larger(
                     most, parity_difference(s, p->buffer, slot, many, one, s1->params[param].buffer, from));
}

static double compare_gradients(const struct moe_schedule *s, int rank, const struct moe_execution *many,
                                const struct moe_execution *one)
{
    const struct moe_schedule *s1 = moe_execute_schedule(one);
    double most = 0;
    for (int i = 0; i < s->n_params; i++) {
        const struct moe_param *p = &s->params[i];
        if (p->buffer < 0) /* norms are of all that a rank clips */
            most = parity_larger(most, parity_difference(s, p->grad, 0, many, one, s1->params[i].grad, 0));
        for (int slot = 0; p->buffer >= 0 && slot < s->buffers[p->grad].slots; slot++)
            if (moe_holds(s, p->grad, slot, rank))
                most = parity_larger(most, compare_slot(s, rank, many, one, i, slot));
    }
    return most;
}

static struct moe_scenario *scenario(const struct layout *layout, const char *dispatcher,
                                     const char *capacity, int64_t group_tokens, const char *dtype)
{
    char group[48] = "", rule[640], more[768];
    if (group_tokens) snprintf(group, sizeof group, ", group_tokens: %lld", (long long)group_tokens);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(rule, sizeof rule, capacity, group);
#pragma GCC diagnostic pop
    snprintf(more, sizeof more, "dtype: %s\ndispatcher: %s\n%s", dtype, dispatcher, rule);
    return fixture_layout(layout->layers ? layout->layers : 2, layout->ranks, layout->ep, layout->pipeline,
                          layout->tokens, more);
}

static void compare(struct moe_communicator *world, const struct layout *layout,
                    const struct variant *variant, const char *dispatcher, const char *dtype, double bound)
{
    struct moe_communicator *self;
    struct moe_scenario *sc = scenario(layout, dispatcher, variant->capacity, 0, dtype);
    struct moe_schedule *s = fixture_schedule(sc);
    char all[32], micro[32];
    snprintf(all, sizeof all, "%lld", (long long)parity_stage_tokens(s, world->rank, s->n_ranks));
    snprintf(micro, sizeof micro, "micro_batches: %d", s->n_micro);
    const struct layout alone = {1, 1, all, micro, layout->layers};
    struct moe_scenario *sc1 = scenario(&alone, "alltoall", variant->capacity, sc->tokens[0], dtype);
    sc1->capacity.pad = false; /* padding moves zeros, and no gradient */
    sc1->distributed.on = false;
    moe_sync_free(&sc1->sync); /* whatever the order: the reference has that of every scenario */
    sc1->apply_probs = MOE_PROBS_AT_HOME;
    struct moe_schedule *s1 = fixture_schedule(sc1);
    int64_t before = parity_stage_tokens(s, world->rank, world->rank);
    struct parity_run many, one;
    if (moe_comm_self.open(NULL, 60, &self) < 0) parity_die(world, MOE_EFAILED);
    int err = parity_step(s, world, 10, &many);
    if (err < 0) parity_die(world, err);
    err = parity_step(s1, self, 10, &one);
    if (err < 0) parity_die(world, err);
    same_routing(world, "expert", s, many.x, s1, one.x, before);
    if (strstr(variant->capacity, "rule")) same_routing(world, "kept_expert", s, many.x, s1, one.x, before);
    if (!strcmp(dispatcher, "deepep") || !strcmp(dispatcher, "nvlink_one_sided"))
        same_peers(world, sc, s, many.x);
    double d = compare_gradients(s, world->rank, many.x, one.x);
    if (world->rank == 0)
        printf("%d ranks ep %d %s tokens %s %s %s %s: %.2g\n", layout->ranks, layout->ep,
               layout->pipeline ? layout->pipeline : "", layout->tokens, dispatcher, variant->capacity, dtype,
               d);
    expect(world, d <= bound, "gradients equal those of one rank");
    parity_close(&many);
    parity_close(&one);
    self->table->close(self);
    moe_schedule_free(s);
    moe_schedule_free(s1);
    moe_scenario_free(sc);
    moe_scenario_free(sc1);
}

static void compare_layout(struct moe_communicator *world, const struct layout *layout)
{
    static const char *const dispatchers[] = {"alltoall", "allgather",          "gshard",
                                              "deepep",   "deepep_low_latency", "nvlink_one_sided"};
    bool equal = layout->tokens[0] != '[';
    for (int v = 0; v < N_VARIANTS; v++)
        for (int d = 0; d < 6; d++) {
            bool limits = strstr(variants[v].capacity, "rule"), moves = strstr(variants[v].capacity, "apply"),
                 syncs = *variants[v].capacity && (!limits || moves);
            if ((d >= 3 && limits) || (d > 0 && syncs)) continue; /* from deepep on they drop nothing */
            if (variants[v].equal_tokens && !equal) continue;
            compare(world, layout, &variants[v], dispatchers[d], "float64", 1e-12);
            compare(world, layout, &variants[v], dispatchers[d], "float32", 1e-5);
        }
}

int main(void)
{
    struct moe_communicator *world;
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    expect(world, world->size == 4, "4 ranks");
    for (int i = 0; i < N_LAYOUTS; i++) {
        if (world->rank >= layouts[i].ranks) continue;
        struct moe_communicator *part = world;
        static const int ranks[] = {0, 1};
        if (layouts[i].ranks < world->size &&
            world->table->split(world, ranks, layouts[i].ranks, 100 + i, &part) < 0)
            parity_die(world, MOE_EFAILED);
        compare_layout(part, &layouts[i]);
        if (part != world) part->table->close(part);
    }
    if (world->rank == 0) printf("any number of ranks equals 1 rank\n");
    world->table->close(world);
    return 0;
}
