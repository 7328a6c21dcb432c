/* Calibration: numbers are found again from steps that were simulated with them; times of clocks by hand. */
#include "sim/cost/calibrate.h"
#include "tests/fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { STEPS = 5 };

static const double truth[MOE_FIT_COUNT] = {
    [MOE_FIT_MATMUL] = 50e9,   [MOE_FIT_SCALAR] = 4e9,     [MOE_FIT_MEMORY] = 10e9,
    [MOE_FIT_CALL] = 0.5e-6,   [MOE_FIT_LATENCY] = 8e-6,   [MOE_FIT_BANDWIDTH] = 2e9,
    [MOE_FIT_LAUNCH] = 1.5e-6, [MOE_FIT_HOST_SYNC] = 1e-6, [MOE_FIT_SLICE] = 2e-3,
    [MOE_FIT_CROWDING] = 1,
};

/* n steps with other routings each, on a host with these numbers and cores. */
static void simulate_steps(const struct moe_schedule *s, int n, const double *value, int64_t cores,
                           struct moe_steps *steps)
{
    struct moe_topo t = moe_fit_topo(value, cores);
    *steps = (struct moe_steps){.s = s, .n = n};
    steps->routing = moe_alloc((size_t)n, sizeof(struct moe_routing *));
    steps->times = moe_alloc((size_t)n, sizeof(struct moe_times *));
    for (int i = 0; i < n; i++) {
        steps->routing[i] = moe_routing_generate(s->n_layers, s->n_ranks, s->n_experts, s->top_k, s->tokens,
                                                 0.5, (uint64_t)i);
        steps->times[i] = moe_times_new(s);
        if (moe_times_predict(s, steps->routing[i], &t, steps->times[i]) < 0) fail_msg("%s", moe_error());
        steps->times[i]->launch_s = value[MOE_FIT_LAUNCH];
    }
    free(t.link_Bps);
    free(t.link_class);
}

static void free_steps(struct moe_steps *steps)
{
    for (int i = 0; i < steps->n; i++) {
        moe_routing_free(steps->routing[i]);
        moe_times_free(steps->times[i]);
    }
    free(steps->routing);
    free(steps->times);
}

/* A core for every rank: all but the slice, which has no effect then, is found to 2 %. */
static void numbers_are_found_again(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 4, "64", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_steps steps;
    struct moe_fit fit;
    simulate_steps(s, STEPS, truth, 4, &steps);
    assert_int_equal(moe_calibrate(&steps, 4, &fit), MOE_OK);
    for (int i = 0; i < MOE_FIT_COUNT; i++) {
        if (i == MOE_FIT_SLICE) continue;
        if (!(fabs(fit.value[i] / truth[i] - 1) < 0.02))
            fail_msg("%s: %g, expected %g", moe_fitted_text[i], fit.value[i], truth[i]);
        assert_true(fit.spread[i] < 0.02 * truth[i]);
    }
    for (int c = 0; c < MOE_CLASS_COUNT; c++)
        if (!(fit.class_samples[c] > 0 && fit.class_error[c] < 0.02))
            fail_msg("%s: %g off", moe_op_class_text[c], fit.class_error[c]);
    free_steps(&steps);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* 4 ranks on 2 cores: what waits for a core does not count as slow. The prediction of another scenario (other
 * dispatcher, half the ranks) is near the truth. */
static void a_crowded_host_predicts_another_scenario(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 4, "512", ""),
                        *other = fixture_scenario(2, 2, "512", "dispatcher: allgather");
    struct moe_schedule *s = fixture_schedule(sc), *o = fixture_schedule(other);
    struct moe_steps steps, others;
    struct moe_fit fit;
    simulate_steps(s, STEPS, truth, 2, &steps);
    simulate_steps(o, STEPS, truth, 2, &others);
    assert_int_equal(moe_calibrate(&steps, 2, &fit), MOE_OK);
    struct moe_topo t = moe_fit_topo(fit.value, 2);
    struct moe_times *predicted = moe_times_new(o);
    assert_int_equal(moe_times_predict(o, others.routing[0], &t, predicted), MOE_OK);
    double off = predicted->step_s / others.times[0]->step_s - 1;
    if (!(fabs(off) < 0.1)) fail_msg("the step is %g off", off);
    moe_times_free(predicted);
    free(t.link_Bps);
    free(t.link_class);
    free_steps(&steps);
    free_steps(&others);
    moe_schedule_free(s);
    moe_schedule_free(o);
    moe_scenario_free(sc);
    moe_scenario_free(other);
}

/* Multiplies own times of operations of this kind with what factor says of (rank, operation, step). */
static void change_times(struct moe_steps *steps, enum moe_op_kind kind,
                         double (*factor)(int rank, int op, int step))
{
    const struct moe_role *role = steps->s->roles;
    for (int step = 0; step < steps->n; step++)
        for (int i = 0, n = 0; i < role->n_instances; i++) {
            const struct moe_block *b = &role->blocks[role->itinerary[i].block];
            for (int o = 0; o < b->n_ops; o++, n++)
                for (int rank = 0; rank < steps->s->n_ranks && b->ops[o].kind == kind; rank++)
                    steps->times[step]->own_s[moe_times_place(steps->times[step], rank, i, o)] *=
                        factor(rank, n, step);
        }
}

/* Numbers that lie this near to the true ones, relatively. */
static void assert_near(const struct moe_fit *fit, enum moe_fitted from, enum moe_fitted to,
                        const double *value, double tolerance)
{
    for (int i = (int)from; i <= (int)to; i++)
        if (!(fabs(fit->value[i] / value[i] - 1) < tolerance))
            fail_msg("%s: %g, expected %g", moe_fitted_text[i], fit->value[i], value[i]);
}

/* A fifth of the kernels takes 2.5 times as long in a step: 1.3 times in the mean, while the medians stay. */
static double disturb(int rank, int op, int step)
{
    return (moe_uniform(7, (uint64_t)(rank * 100000 + op), (uint64_t)step) < 0.2 ? 2.5 : 1) / 1.3;
}

/* A host a fifth as fast, so that 4 ranks take turns on 2 cores 10 times in a step, or more: crowding is
 * found to a step of its grid, and the slice, which is on its grid. */
static void crowding_and_slice_are_found_again(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 4, "512", "");
    struct moe_schedule *s = fixture_schedule(sc);
    double slow[MOE_FIT_COUNT];
    memcpy(slow, truth, sizeof slow);
    for (int i = 0; i <= MOE_FIT_MEMORY; i++) slow[i] /= 5;
    slow[MOE_FIT_CROWDING] = 1.3;
    for (int quick = 0; quick < 2; quick++) {
        struct moe_steps steps;
        struct moe_fit fit;
        slow[MOE_FIT_SLICE] = quick ? 1e-3 : 4e-3;
        simulate_steps(s, 10, slow, 2, &steps);
        change_times(&steps, MOE_KERNEL, disturb);
        assert_int_equal(moe_calibrate(&steps, 2, &fit), MOE_OK);
        assert_near(&fit, 0, MOE_FIT_SLICE, slow, 0.02);
        assert_near(&fit, MOE_FIT_CROWDING, MOE_FIT_CROWDING, slow, 0.045);
        for (int i = 0; i < MOE_FIT_COUNT; i++) assert_true(fit.determined[i]);
        free_steps(&steps);
    }
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Up to 20 % off either way, and in one step 4 times as long. */
static double shake(int rank, int op, int step)
{
    uint64_t which = (uint64_t)(rank * 100000 + op);
    bool slow = moe_hash64(which) % 15 == (uint64_t)step;
    return (0.8 + 0.4 * moe_uniform(7, which, (uint64_t)step)) * (slow ? 4 : 1);
}

static double shake_all(int rank, int op, int step)
{
    (void)rank;
    return shake(99, op, step);
}

/* Medians are near the truth, and the errors say what the noise was: its median is 10 %. A sample is an
 * operation, not each of its 15 times. */
static void noise_is_seen_and_does_not_bias(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 4, "512", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_steps steps;
    struct moe_fit fit;
    simulate_steps(s, 15, truth, 4, &steps);
    change_times(&steps, MOE_KERNEL, shake);
    change_times(&steps, MOE_COLLECTIVE, shake_all);
    assert_int_equal(moe_calibrate(&steps, 4, &fit), MOE_OK);
    assert_near(&fit, 0, MOE_FIT_BANDWIDTH, truth, 0.05);
    for (int i = 0; i < MOE_FIT_TERMS; i++)
        assert_true(fit.spread[i] > 0.001 * truth[i] && fit.spread[i] < 0.1 * truth[i]);
    for (int c = 0; c < MOE_CLASS_COUNT; c++)
        if (!(fit.class_error[c] > 0.08 && fit.class_error[c] < 0.13))
            fail_msg("%s: %g off", moe_op_class_text[c], fit.class_error[c]);
    const struct moe_role *role = s->roles;
    int n = 0, n_of_classes = 0;
    for (int i = 0; i < role->n_instances; i++)
        for (int o = 0; o < role->blocks[role->itinerary[i].block].n_ops; o++) {
            enum moe_op_kind kind = role->blocks[role->itinerary[i].block].ops[o].kind;
            n += kind == MOE_KERNEL ? 4 : kind == MOE_COLLECTIVE;
        }
    for (int c = 0; c < MOE_CLASS_COUNT; c++) n_of_classes += fit.class_samples[c];
    assert_int_equal(fit.n_samples, n);
    assert_int_equal(n_of_classes, n);
    free_steps(&steps);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Of 5 steps one tells of another bandwidth, and one that launching takes no time. */
static void a_fifth_that_disagrees_is_told(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 4, "64", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_steps steps, other;
    struct moe_fit fit;
    double quick[MOE_FIT_COUNT];
    memcpy(quick, truth, sizeof quick);
    quick[MOE_FIT_BANDWIDTH] *= 50;
    simulate_steps(s, STEPS, truth, 4, &steps);
    simulate_steps(s, STEPS, quick, 4, &other);
    moe_times_free(steps.times[0]);
    steps.times[0] = other.times[0];
    other.times[0] = NULL;
    steps.times[1]->launch_s = 0;
    assert_int_equal(moe_calibrate(&steps, 4, &fit), MOE_OK);
    assert_near(&fit, 0, MOE_FIT_HOST_SYNC, truth, 0.02);
    assert_true(fit.spread[MOE_FIT_LAUNCH] < truth[MOE_FIT_LAUNCH]);
    assert_true(fit.determined[MOE_FIT_MEMORY] && fit.determined[MOE_FIT_LATENCY]);
    assert_false(fit.determined[MOE_FIT_BANDWIDTH]);
    assert_false(fit.determined[MOE_FIT_LAUNCH]);
    for (int i = 0; i < STEPS; i++) steps.times[i]->launch_s = -1;
    assert_int_equal(moe_calibrate(&steps, 4, &fit), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "one after another"));
    free_steps(&steps);
    free_steps(&other);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Two ranks: a kernel, then an all-reduce. Rank 1 is late: rank 0 waits for it. The other way round in the
 * second all-reduce, which rank 1 leaves before rank 0 has entered. */
static void clocks_become_times(void **state)
{
    (void)state;
    struct moe_builder b;
    moe_builder_open(&b, 2, (int64_t[]){0, 0});
    moe_run_block(&b, moe_new_block(&b, "step", MOE_FORWARD, false), 0);
    int one = moe_const(&b, 1);
    struct moe_ref x = moe_ref(moe_new_buffer(&b, "x", MOE_BUF_ACTIVATION, MOE_F32, 1, one));
    moe_emit(&b, (struct moe_op){.name = "zero", .kernel = MOE_K_ZERO, MOE_WRITES(x), MOE_SIZES(one)});
    for (int i = 0; i < 2; i++)
        moe_emit(&b, (struct moe_op){.name = "sum",
                                     .kind = MOE_COLLECTIVE,
                                     .collective = MOE_ALLREDUCE,
                                     .stream = MOE_STREAM_COMM,
                                     .send = one,
                                     .recv = one,
                                     MOE_READS(x),
                                     MOE_WRITES(x)});
    struct moe_schedule *s = moe_builder_close(&b);
    struct moe_times *t = moe_times_new(s);
    const struct moe_clock_times clock[] = {{10, 11, 13}, {14, 15, 22}, {30, 30, 32},  /* rank 0 */
                                            {10, 11, 16}, {18, 19, 23}, {24, 25, 29}}; /* rank 1 */
    moe_times_measure(s, clock, t);
    const double own[] = {2, 4, 2, 5, 5, 0}, wait[] = {0, 4, 0, 0, 0, 5};
    for (int i = 0; i < 6; i++) {
        assert_true(t->own_s[i] == own[i]);
        assert_true(t->wait_s[i] == wait[i]);
    }
    assert_true(t->step_s == 22 && t->launch_s == 2.5); /* gaps 2, 8, 3, 2 */
    double phase_s[MOE_PHASE_COUNT], sum = 0;
    moe_phases(s, t, phase_s);
    assert_true(phase_s[MOE_CLASS_OTHER * MOE_PASS_COUNT + MOE_FORWARD] == 3.5);
    assert_true(phase_s[MOE_CLASS_COLLECTIVE * MOE_PASS_COUNT + MOE_FORWARD] == 5.5);
    assert_true(phase_s[MOE_PHASE_WAITING] == 4.5);
    for (int p = 0; p < MOE_PHASE_COUNT; p++) sum += phase_s[p];
    assert_true(sum == t->step_s);
    moe_times_free(t);
    moe_schedule_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_found_again),
        cmocka_unit_test(a_crowded_host_predicts_another_scenario),
        cmocka_unit_test(crowding_and_slice_are_found_again),
        cmocka_unit_test(noise_is_seen_and_does_not_bias),
        cmocka_unit_test(a_fifth_that_disagrees_is_told),
        cmocka_unit_test(clocks_become_times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
