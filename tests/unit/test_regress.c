/* Fits of a made-up machine: t = latency + steps * hop + max(bytes / link, bytes / copies). */
#include "sim/cost/regress.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { ROWS = 60, LATENCY = 0, HOP, LINK, COPIES, PARAMS };

static const double truth[PARAMS] = {8e-6, 1.5e-6, 300e9, 120e9};
static const double least[PARAMS] = {1e-7, 1e-8, 1e9, 1e9}, most[PARAMS] = {1e-3, 1e-3, 1e13, 1e13};
static const double start[PARAMS] = {1e-6, 1e-6, 50e9, 50e9};

struct machine {
    double bytes[ROWS];
    int ranks[ROWS];
};

static void predict(void *ctx, const double *param, double *out)
{
    const struct machine *m = ctx;
    for (int i = 0; i < ROWS; i++)
        out[i] = param[LATENCY] + m->ranks[i] * param[HOP] +
                 fmax((m->ranks[i] - 1) * m->bytes[i] / param[LINK], m->bytes[i] / param[COPIES]);
}

/* 20 sizes, 1 KiB to 512 MiB a peer, at 2, 4 and 8 ranks. */
static struct machine machine(void)
{
    struct machine m;
    for (int i = 0; i < ROWS; i++) {
        m.ranks[i] = 2 << i % 3;
        m.bytes[i] = ldexp(1024, i / 3);
    }
    return m;
}

static struct moe_regress problem(struct machine *m, double *measured)
{
    predict(m, truth, measured);
    return (struct moe_regress){.n_rows = ROWS,
                                .n_params = PARAMS,
                                .measured = measured,
                                .start = start,
                                .least = least,
                                .most = most,
                                .predict = predict,
                                .ctx = m};
}

static void assert_near(const double *param, double tolerance)
{
    for (int p = 0; p < PARAMS; p++)
        if (!(fabs(param[p] / truth[p] - 1) <= tolerance))
            fail_msg("parameter %d: %g, expected %g", p, param[p], truth[p]);
}

/* Far from the start, over the kink. */
static void finds_the_parameters(void **state)
{
    (void)state;
    struct machine m = machine();
    double measured[ROWS], param[PARAMS];
    struct moe_regress r = problem(&m, measured);
    moe_regress_fit(&r, NULL, param);
    assert_near(param, 0.002);
    assert_true(moe_regress_loss(&r, NULL, param) < moe_regress_loss(&r, NULL, start) / 20);
}

/* A tenth of the rows ten times as long: absolute errors do not follow them, squares would. Rows that are
 * skipped may be anything. */
static void outliers_do_not_count(void **state)
{
    (void)state;
    struct machine m = machine();
    double measured[ROWS], param[PARAMS], without[PARAMS];
    bool skip[ROWS] = {false};
    struct moe_regress r = problem(&m, measured);
    for (int i = 0; i < ROWS; i += 10) measured[i] *= 10;
    moe_regress_fit(&r, NULL, param);
    assert_near(param, 0.02);
    for (int i = 0; i < ROWS; i += 7) {
        measured[i] *= 1000;
        skip[i] = true;
    }
    moe_regress_fit(&r, skip, param);
    for (int i = 0; i < ROWS; i += 7) measured[i] /= 77;
    moe_regress_fit(&r, skip, without);
    for (int p = 0; p < PARAMS; p++) assert_true(param[p] == without[p]);
    assert_near(param, 0.02);
}

/* With 2 ranks alone neither the link, which never holds, nor hop and latency apart can be told. */
static void says_what_rows_do_not_tell(void **state)
{
    (void)state;
    struct machine m = machine();
    double measured[ROWS], doubt[PARAMS];
    struct moe_regress r = problem(&m, measured);
    moe_regress_doubt(&r, truth, 0.05, doubt);
    for (int p = 0; p < PARAMS; p++) assert_true(doubt[p] > 0.005 && doubt[p] < 0.2);
    for (int i = 0; i < ROWS; i++) m.ranks[i] = 2;
    predict(&m, truth, measured);
    moe_regress_doubt(&r, truth, 0.05, doubt);
    assert_true(isinf(doubt[LINK]));
    assert_true(doubt[LATENCY] > 1 && doubt[HOP] > 1);
    assert_true(doubt[COPIES] < 0.2);
    /* However much the rows weigh, the two that they do not tell apart do not hide the one that they tell. */
    double heavy[ROWS];
    for (int i = 0; i < ROWS; i++) heavy[i] = 1e6;
    r.weight = heavy;
    moe_regress_doubt(&r, truth, 0.05, doubt);
    assert_true(doubt[COPIES] < 0.2 && isinf(doubt[LINK]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(finds_the_parameters),
                                       cmocka_unit_test(outliers_do_not_count),
                                       cmocka_unit_test(says_what_rows_do_not_tell)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
