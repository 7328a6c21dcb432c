/* Deleting any one operation, on all ranks, changes the result of all three readers; and the toy dispatcher,
 * which no reader knows, is checked, timed and executed: it computes bit for bit what alltoall computes. */
#include "sim/check/check.h"
#include "sim/simulate.h"
#include "tests/mpi/parity.h"

static void expect(struct moe_communicator *world, bool right, const char *what, const char *op)
{
    if (right) return;
    fprintf(stderr, "rank %d: FAILED: %s: %s\n", world->rank, what, op);
    world->table->abort(world, 1);
}

/* One number that depends on every loss, gradient and updated parameter of this rank, bit by bit; 0 when the
 * executor refuses (on all ranks alike: the schedule is the same everywhere). */
static uint64_t executed(const struct moe_schedule *s, struct moe_communicator *world)
{
    struct parity_run run;
    uint64_t h = 0;
    if (parity_step(s, world, 10, &run) >= 0) {
        uint64_t bits;
        memcpy(&bits, &run.loss, sizeof bits);
        h = moe_hash64(1 + bits);
        for (int i = 0; i < s->n_buffers; i++) {
            enum moe_buffer_role role = s->buffers[i].role;
            if (role != MOE_BUF_PARAM && role != MOE_BUF_GRAD && role != MOE_BUF_OUTPUT) continue;
            for (int slot = 0; slot < s->buffers[i].slots; slot++) {
                int64_t n;
                const unsigned char *p = moe_execute_buffer(run.x, i, slot, &n);
                for (int64_t k = 0; k < n * moe_type_bytes[s->buffers[i].type] && p; k++)
                    h = moe_hash64(h ^ p[k]);
            }
        }
    }
    parity_close(&run);
    return h;
}

struct seen {
    int verdicts;
    int64_t bytes;
    struct moe_sim_result time;
    uint64_t numbers;
};

static struct seen look(const struct moe_schedule *s, const struct moe_routing *r,
                        struct moe_communicator *world)
{
    struct seen out = {0};
    struct moe_verdicts v;
    moe_check(s, r, &v);
    out.verdicts = v.n;
    moe_verdicts_free(&v);
    struct moe_topo *t;
    if (moe_topo_load("dgx_h100", &t) < 0) parity_die(world, MOE_EINPUT);
    t->one_sided.kernel[0] = t->one_sided.kernel[1] = moe_onesided_default[MOE_ONESIDED_ONE_DISPATCH];
    struct moe_sim_result time;
    if (moe_simulate(s, r, t, &time) < 0) time.step = -1;
    out.time = time; /* without its rows */
    for (int i = 0; i < time.n_rows; i++) out.bytes += time.rows[i].bytes;
    moe_sim_free(&time);
    moe_topo_free(t);
    out.numbers = executed(s, world);
    return out;
}

/* Busy times and bytes count: an operation off the critical path leaves the step's length alone. */
static bool same_time(const struct moe_sim_result *a, const struct moe_sim_result *b)
{
    return a->step == b->step && a->compute_us == b->compute_us && a->comm_us == b->comm_us &&
           a->host_us == b->host_us && a->events == b->events && a->waiting_us == b->waiting_us;
}

static void delete_each(const struct moe_scenario *sc, const struct moe_dispatcher *d,
                        const struct moe_routing *r, struct moe_communicator *world)
{
    struct moe_schedule *whole = fixture_lower(sc, d);
    struct seen right = look(whole, r, world);
    int tried = 0;
    expect(world, right.verdicts == 0 && right.time.step > 0 && right.numbers != 0, "valid schedule",
           d->name);
    for (int b = 0; b < whole->roles[0].n_blocks; b++)
        for (int o = 0; o < whole->roles[0].blocks[b].n_ops; o++, tried++) {
            struct moe_schedule *s = fixture_lower(sc, d);
            const char *name = whole->roles[0].blocks[b].ops[o].name;
            moe_block_delete(&s->roles[0].blocks[b], s->roles[0].blocks[b].ops[o].id);
            struct seen now = look(s, r, world);
            expect(world, now.verdicts > 0, "check does not see the deletion of", name);
            expect(world, !same_time(&now.time, &right.time), "simulate does not see the deletion of", name);
            expect(world, now.numbers != right.numbers, "execute does not see the deletion of", name);
            moe_schedule_free(s);
        }
    if (world->rank == 0) printf("%s: %d deletions seen by check, simulate and execute\n", d->name, tried);
    moe_schedule_free(whole);
}

int main(void)
{
    static const struct moe_dispatcher alltoall = {"alltoall", moe_alltoall, true},
                                       allgather = {"allgather", moe_allgather, false},
                                       deepep = {"deepep", moe_deepep, false, true},
                                       low = {"deepep_low_latency", moe_deepep_low_latency, false, true},
                                       one = {"nvlink_one_sided", moe_nvlink_one_sided, false, true},
                                       gshard = {"gshard", moe_alltoall, true, false, true};
    struct moe_communicator *world;
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    struct moe_scenario *sc = fixture_scenario(4, 2, "[6, 3, 5, 4]", "");
    struct moe_routing *r = fixture_routing(sc);
    struct moe_schedule *s = fixture_lower(sc, &alltoall), *toy = fixture_lower(sc, &toy_dispatcher);
    struct seen known = look(s, r, world), tried = look(toy, r, world);
    expect(world, known.numbers == tried.numbers, "the toy computes what alltoall computes", "toy");
    expect(world, tried.time.step > known.time.step, "the toy takes longer", "toy");
    expect(world, tried.bytes > known.bytes, "the toy moves more", "toy");
    moe_schedule_free(s);
    moe_schedule_free(toy);
    delete_each(sc, &alltoall, r, world);
    delete_each(sc, &allgather, r, world);
    delete_each(sc, &deepep, r, world);
    delete_each(sc, &low, r, world);
    delete_each(sc, &one, r, world);
    delete_each(sc, &toy_dispatcher, r, world);
    moe_scenario_free(sc);
    sc = fixture_scenario(4, 2, "[6, 3, 5, 4]", "capacity: {rule: tutel, factor: -1, unequal_tokens: true}");
    delete_each(sc, &gshard, r, world);
    moe_routing_free(r);
    moe_scenario_free(sc);
    world->table->close(world);
    return 0;
}
