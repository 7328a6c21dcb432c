/* test_execute_async - the executor on a device that runs later (later.h): the same bits as the CPU in every
 * order that the schedule's waits allow, observed in order of issue; what hangs and what fails is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/mpi/parity.h"
#include "tests/unit/later.h"

enum { N_TOKENS = 7, STEPS = 3, MOST_SEEN = 4096 };
static const int32_t token[N_TOKENS] = {1, 7, 7, 200, 3, 90, 14},
                     target[N_TOKENS] = {7, 7, 200, 3, 90, 14, 255};

struct run {
    struct moe_schedule *s;
    struct moe_device *cpu, *device;
    struct moe_communicator *world;
    struct moe_execute_options options;
    struct moe_execution *x;
};

static int n_seen;
static struct moe_executed seen[MOST_SEEN];
static void see(void *ctx, const struct moe_executed *e)
{
    (void)ctx;
    if (n_seen < MOST_SEEN) seen[n_seen++] = *e;
}

/* seed 0: on the CPU. Takes sc. */
static void open_scenario(struct run *r, uint64_t seed, struct moe_scenario *sc)
{
    *r = (struct run){.s = fixture_schedule(sc),
                      .options = {.timeout_s = 0.2, .seed = 11, .poison = seed % 2, .observe = see}};
    moe_scenario_free(sc);
    n_seen = 0;
    assert_int_equal(moe_device_cpu.open(&r->cpu), MOE_OK);
    r->device = seed ? later_open(r->cpu, seed) : r->cpu;
    r->world = later_world();
    if (!seed) r->world->table = &moe_comm_self;
    if (moe_execute_open(r->s, r->device, r->world, &r->options, &r->x) < 0) fail_msg("%s", moe_error());
}

static void open_run(struct run *r, uint64_t seed, const char *more)
{
    open_scenario(r, seed, fixture_scenario(1, 1, "7", more));
}

static void close_run(struct run *r)
{
    moe_execute_close(r->x);
    if (r->device != r->cpu) later_close();
    moe_comm_self.close(r->world);
    moe_device_cpu.close(r->cpu);
    moe_schedule_free(r->s);
}

/* Losses and, at the end, all parameters of both are the same bits. Result: whether they are. */
static bool same(struct run *a, struct run *b)
{
    bool equal = true;
    for (int step = 0; step < STEPS; step++) {
        double loss[2];
        assert_int_equal(moe_execute_step(a->x, token, target, &loss[0]), MOE_OK);
        int err = moe_execute_step(b->x, token, target, &loss[1]);
        if (err < 0) return false;
        equal &= memcmp(&loss[0], &loss[1], sizeof loss[0]) == 0;
    }
    for (int p = 0; p < a->s->n_params; p++) {
        const int buffer = a->s->params[p].buffer;
        for (int slot = 0; buffer >= 0 && slot < a->s->buffers[buffer].slots; slot++) {
            int64_t n;
            const void *pa = moe_execute_buffer(a->x, buffer, slot, &n),
                       *pb = moe_execute_buffer(b->x, buffer, slot, &n);
            equal &= memcmp(pa, pb, (size_t)n * sizeof(double)) == 0;
        }
    }
    return equal;
}

static const char keys[] = "dtype: float64\nlearning_rate: 0.05\naux_loss: 0.5";

static bool same_as_cpu(uint64_t seed, bool unordered)
{
    struct run a, b;
    open_run(&a, 0, keys);
    open_run(&b, seed, keys);
    later.unordered = unordered;
    bool equal = same(&a, &b);
    close_run(&a);
    close_run(&b);
    return equal;
}

static void test_any_order(void **state)
{
    (void)state;
    int different = 0;
    for (uint64_t seed = 1; seed <= 20; seed++)
        if (!same_as_cpu(seed, false)) fail_msg("other bits with seed %d: %s", (int)seed, moe_error());
    for (uint64_t seed = 1; seed <= 20; seed++) different += !same_as_cpu(seed, true);
    assert_true(different > 0); /* orders that the waits forbid do show */
}

/* Every operation once, in the order of the itinerary; each starts after it was reached, and ends later; on a
 * stream one after the other. */
static void test_observed(void **state)
{
    (void)state;
    struct run r;
    double loss;
    open_run(&r, 4, keys);
    assert_int_equal(moe_execute_step(r.x, token, target, &loss), MOE_OK);
    const struct moe_role *role = &r.s->roles[0];
    int n = 0;
    int64_t end[LATER_STREAMS] = {0};
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        for (int o = 0; o < block->n_ops; o++, n++) {
            assert_true(n < n_seen && seen[n].op == &block->ops[o]);
            assert_int_equal(seen[n].layer, role->itinerary[i].layer);
            assert_true(seen[n].start_ns <= seen[n].end_ns);
            if (seen[n].skipped || seen[n].op->kind == MOE_HOST_SYNC) continue;
            assert_true(seen[n].start_ns >= end[seen[n].op->stream]);
            end[seen[n].op->stream] = seen[n].end_ns;
        }
    }
    assert_int_equal(n, n_seen);
    close_run(&r);
}

static void must_say(struct run *r, int expected, const char *beginning, const char *end)
{
    double loss;
    assert_int_equal(moe_execute_step(r->x, token, target, &loss), expected);
    const size_t n = strlen(moe_error()), m = strlen(end);
    if (strncmp(moe_error(), beginning, strlen(beginning)) != 0 || n < m || strcmp(moe_error() + n - m, end))
        fail_msg("%s", moe_error());
}

static void test_what_hangs(void **state)
{
    (void)state;
    struct run r;
    open_run(&r, 2, keys);
    later.stuck_at = 1;
    must_say(&r, MOE_EPEER, "layer 0 forward ",
             "all 1 ranks are at layer 0 forward sum_counts"); /* and the sizes between */
    assert_non_null(strstr(moe_error(), "(ranks 0): no answer for 0.2 s; this rank sends "));
    close_run(&r);
}

/* A fault of the device shows with whatever is asked next. */
static void test_what_fails(void **state)
{
    (void)state;
    struct run r;
    open_run(&r, 2, keys);
    later.faulty_at = 5;
    must_say(&r, MOE_EFAILED, "in ", " or after it: an illegal access");
    close_run(&r);
}

/* Sizes that only the device knows are asked while operations run: what the device then reports is said, not
 * that the size is unknown, wherever it happens. */
static void test_what_fails_while_sizes_are_asked(void **state)
{
    (void)state;
    struct run r;
    double loss;
    int n = 1;
    for (int at = 1; at <= n; at++) {
        open_run(&r, 2, "dtype: float64\ndispatcher: deepep_low_latency");
        later.faulty_at = at;
        assert_int_equal(moe_execute_step(r.x, token, target, &loss), MOE_EFAILED);
        if (!strstr(moe_error(), "an illegal access")) fail_msg("kernel %d of %d: %s", at, n, moe_error());
        close_run(&r);
        if (at > 1) continue;
        open_run(&r, 2, "dtype: float64\ndispatcher: deepep_low_latency");
        assert_int_equal(moe_execute_step(r.x, token, target, &loss), MOE_OK);
        n = later.n_runs;
        close_run(&r);
    }
    assert_true(n > 20);
}

/* A schedule in which the host asks for no size does not fill the streams: 128 operations, each with its
 * start, its end and what it waits for. */
static void test_bounded(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_layout(8, 1, 1, NULL, "7", "dtype: float64\ncapacity: {rule: tutel, factor: 1}");
    struct run r;
    double loss;
    open_scenario(&r, 4, sc);
    assert_int_equal(moe_execute_step(r.x, token, target, &loss), MOE_OK);
    assert_true(later.most > 128 && later.most <= 129 * 4);
    close_run(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_observed),
        cmocka_unit_test(test_what_hangs),
        cmocka_unit_test(test_what_fails),
        cmocka_unit_test(test_what_fails_while_sizes_are_asked),
        cmocka_unit_test(test_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
