/* 4 ranks compute what 1 rank computes: losses and gradients of the first step, with the same routing; run
 * for each layout in float and in double. Prints the largest difference of each tensor. */
#include "tests/mpi/parity.h"

static const struct {
    int ep;
    const char *tokens;
} layouts[] = {{4, "12"}, {2, "12"}, {1, "12"}, {4, "[20, 0, 7, 21]"}, {2, "[1, 30, 0, 17]"}};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

static void expect(struct moe_communicator *world, bool right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: FAILED: %s\n", world->rank, what);
    world->table->abort(world, 1);
}

/* The expert ids of this rank's tokens equal those of the same tokens in the one-rank run. */
static void same_routing(const struct moe_schedule *s, struct moe_communicator *world,
                         const struct moe_execution *many, const struct moe_execution *one,
                         int64_t first_token)
{
    for (int i = 0; i < s->n_buffers; i++) {
        if (s->buffers[i].role != MOE_BUF_INDEX || strcmp(s->buffers[i].name, "expert") != 0) continue;
        for (int layer = 0; layer < s->n_layers; layer++) {
            int64_t n, all;
            const int32_t *mine = moe_execute_buffer(many, i, layer, &n);
            const int32_t *whole = moe_execute_buffer(one, i, layer, &all);
            expect(world, n == s->tokens[world->rank] * s->top_k, "number of routed rows");
            expect(world, n == 0 || !memcmp(mine, whole + first_token * s->top_k, (size_t)n * sizeof *mine),
                   "same routing");
        }
        return;
    }
    expect(world, false, "no routing buffer");
}

static void compare_layout(struct moe_communicator *world, int ep, const char *tokens, const char *dtype,
                           double bound)
{
    struct moe_communicator *self;
    struct moe_scenario *sc4 = fixture_scenario(world->size, ep, tokens, dtype);
    int64_t total = 0, before = 0;
    for (int r = 0; r < world->size; r++) {
        total += sc4->tokens[r];
        if (r < world->rank) before += sc4->tokens[r];
    }
    char all[32];
    snprintf(all, sizeof all, "%lld", (long long)total);
    struct moe_scenario *sc1 = fixture_scenario(1, 1, all, dtype);
    struct moe_schedule *s4 = fixture_schedule(sc4), *s1 = fixture_schedule(sc1);
    struct parity_run many, one;
    if (moe_comm_self.open(&self) < 0) parity_die(world, MOE_EFAILED);
    int err = parity_step(s4, world, 10, &many);
    if (err < 0) parity_die(world, err);
    err = parity_step(s1, self, 10, &one);
    if (err < 0) parity_die(world, err);
    same_routing(s4, world, many.x, one.x, before);
    for (int i = 0; i < s4->n_params; i++) {
        const struct moe_param *p = &s4->params[i];
        for (int slot = 0; slot < s4->buffers[p->grad].slots; slot++) {
            int64_t n;
            moe_execute_buffer(many.x, p->grad, slot, &n);
            int64_t from = p->shard < 0 ? 0 : n * s4->comms[p->shard].index_of[world->rank];
            double d = parity_difference(s4, p->grad, slot, many.x, one.x, from);
            if (world->rank == 0 || !(d <= bound))
                printf("%s ep %d tokens %s rank %d %s %d: %.2g\n", dtype, ep, tokens, world->rank, p->name,
                       slot, d);
            expect(world, d <= bound, "gradients equal those of one rank");
        }
    }
    parity_close(&many);
    parity_close(&one);
    self->table->close(self);
    moe_schedule_free(s4);
    moe_schedule_free(s1);
    moe_scenario_free(sc4);
    moe_scenario_free(sc1);
}

int main(void)
{
    struct moe_communicator *world;
    if (moe_communicator_here()->open(&world) < 0) return 1;
    expect(world, world->size == 4, "4 ranks");
    for (int i = 0; i < N_LAYOUTS; i++) {
        compare_layout(world, layouts[i].ep, layouts[i].tokens, "dtype: float64", 1e-12);
        compare_layout(world, layouts[i].ep, layouts[i].tokens, "dtype: float32", 1e-5);
    }
    if (world->rank == 0) printf("4 ranks equal 1 rank\n");
    world->table->close(world);
    return 0;
}
