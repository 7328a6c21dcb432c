/* Kernels of one NVLink domain: plans beside closed forms, and cases solved by hand. */
#include "sim/cost/lsa.h"
#include "sim/cost/onesided.h"
#include "tests/unit/plan.h"

/* 4 ranks, 2 of them for a token: 1.5 others. 1000 tokens are 500 rows to each rank, of
 * 1000 bytes: 0.5 MB. */
static const struct moe_onesided_case four = {.ranks = 4, .top_k = 2, .tokens = 1000, .row_bytes = 1000};
static const struct moe_onesided latencies = {.start_s = 10e-6, .target_s = 2e-6, .token_s = 5e-9};

static void expect(const struct moe_onesided *p, const struct moe_onesided_case *c, double us)
{
    struct moe_topo t = plan_machine(c->ranks, 72, 72, 750e9, 50e9);
    struct moe_plan plan = {0};
    assert_true(fabs(moe_onesided_s(p, &t, c) - us * 1e-6) < 1e-15);
    moe_onesided_plan(p, &t, c, &plan);
    assert_int_equal(moe_plan_time(&t, &plan), llround(us * 1e6));
    plan_close(&t, &plan);
}

/* Latency 10 + 2 x 1.5, local work 5: 18 us. Then what is slowest: the machine's link, 3 pairs over 750 GB/s,
 * 2 us; the kernel's, 300 GB/s, 5 us; rows of 20 ns, 500 of them, 10 us; the pair's 25 GB/s, 20 us. */
static void solved_by_hand(void **state)
{
    (void)state;
    struct moe_onesided p = latencies;
    expect(&p, &four, 20);
    p.link_Bps = 300e9;
    expect(&p, &four, 23);
    p.row_s = 20e-9;
    expect(&p, &four, 28);
    p.pair_Bps = 25e9;
    expect(&p, &four, 38);
    /* No rows: latency and local work alone. More experts than ranks: all ranks, 3 others, 1000 rows of a
     * pair. One rank: no others, and the link is not used. */
    struct moe_onesided_case prepare = four, many = four, one = four;
    prepare.row_bytes = 0;
    many.top_k = 8;
    one.ranks = 1;
    expect(&p, &prepare, 18);
    expect(&p, &many, 10 + 2 * 3 + 5 + 40);
    expect(&p, &one, 10 + 5 + 40);
}

static void moves_what_it_must(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 72, 72, 750e9, 50e9);
    struct moe_plan plan = {0};
    struct moe_onesided p = {.link_Bps = 300e9};
    moe_onesided_plan(&p, &t, &four, &plan);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) assert_int_equal(plan_moved(&plan, from, to), 500 * 1000);
    plan.n = 0;
    p.token_s = 1e-9; /* local work moves nothing */
    moe_onesided_plan(&p, &t, &four, &plan);
    assert_int_equal(plan_moved(&plan, 1, 1), 500 * 1000);
    assert_int_equal(plan_moved(&plan, 1, 2), 500 * 1000);
    plan_close(&t, &plan);
}

/* 1e8 tokens or so, so that rounded bytes are less than 1e-9 of the time; and 1 to 1e4, where a pair's are
 * half a byte off. */
static void plans_take_what_closed_forms_say(void **state)
{
    (void)state;
    uint64_t seed = plan_seed();
    for (uint64_t i = 0; i < 300; i++) {
        struct moe_onesided p;
        double *member = (double *)&p, intra_Bps = plan_between(1e10, 1e12, seed, i, 50);
        for (int m = 0; m < MOE_ONESIDED_PARAMS; m++) {
            const struct moe_number *number = &moe_onesided_param[m];
            bool none = moe_uniform(seed, i, 20 + (uint64_t)m) < 0.3;
            member[m] = none ? 0 : plan_between(number->least, number->most, seed, i, (uint64_t)m);
        }
        struct moe_onesided_case c = {.ranks = 2 + (int)(moe_uniform(seed, i, 60) * 19),
                                      .top_k = 1 + (int)(moe_uniform(seed, i, 61) * 8),
                                      .row_bytes = 16 * (int)(moe_uniform(seed, i, 62) * 1000)};
        struct moe_topo t = plan_machine(c.ranks, 72, 72, intra_Bps, 50e9);
        struct moe_plan plan = {0};
        for (int large = 0; large < 2; large++) {
            c.tokens = (int64_t)plan_between(large ? 1e8 : 1, large ? 1e9 : 1e4, seed, i, 63);
            double rate =
                moe_onesided_s(&p, &t, &c); /* a pair moves 1e10 / 20 bytes/s or more, or row by row */
            plan.n = 0;
            moe_onesided_plan(&p, &t, &c, &plan);
            plan_takes(&t, &plan, rate, large ? 0 : fmax(20 / 1e10, p.row_s / 16));
        }
        plan_close(&t, &plan);
    }
}

/* 4 ranks, 2 CTAs at 10 GB/s. A barrier waits 1 + 1/2 + 1/3 signals of 6 us: 11 us. Stores: 4 pairs of 100 kB
 * over 20 GB/s, 20 us. Send and receive: 2 rounds of two hops of 1 us and 10 us. */
static void few_ctas_solved_by_hand(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 72, 72, 750e9, 50e9);
    struct moe_plan plan = {0};
    struct moe_lsa p = {.start_s = 3e-6, .signal_s = 6e-6, .channel_Bps = 10e9};
    struct moe_sendrecv q = {.start_s = 3e-6, .hop_s = 1e-6, .channel_Bps = 10e9};
    for (int barriers = 0; barriers < 3; barriers++) {
        struct moe_lsa_case c = {.ranks = 4, .ctas = 2, .barriers = barriers, .bytes = 100000};
        assert_true(fabs(moe_lsa_s(&p, &c) - (23 + 11 * barriers) * 1e-6) < 1e-15);
        plan.n = 0;
        moe_lsa_plan(&p, &c, &plan);
        assert_int_equal(moe_plan_time(&t, &plan), (23 + 11 * barriers) * 1000000);
    }
    for (int ctas = 1; ctas < 6; ctas++) { /* 4, 2, 2, 1, 1 rounds */
        struct moe_lsa_case c = {.ranks = 4, .ctas = ctas, .bytes = 100000};
        int us = 3 + 12 * (ctas == 1 ? 4 : ctas < 4 ? 2 : 1);
        assert_true(fabs(moe_sendrecv_s(&q, &c) - us * 1e-6) < 1e-15);
        plan.n = 0;
        moe_sendrecv_plan(&q, &c, &plan);
        assert_int_equal(moe_plan_time(&t, &plan), us * 1000000);
        for (int pair = 0; pair < 16; pair++) assert_int_equal(plan_moved(&plan, pair / 4, pair % 4), 100000);
    }
    plan_close(&t, &plan);
}

static void few_ctas_take_what_closed_forms_say(void **state)
{
    (void)state;
    uint64_t seed = plan_seed();
    for (uint64_t i = 0; i < 200; i++) {
        struct moe_lsa_case c = {.ranks = 1 + (int)(moe_uniform(seed, i, 60) * 30),
                                 .ctas = 1 + (int)(moe_uniform(seed, i, 61) * 9),
                                 .barriers = (int)(moe_uniform(seed, i, 62) * 3),
                                 .bytes = (int64_t)plan_between(1, 1e9, seed, i, 63)};
        struct moe_topo t = plan_machine(c.ranks, 72, 72, 1e15, 50e9); /* links are not the limit */
        struct moe_lsa p;
        struct moe_sendrecv q;
        struct moe_plan plan = {0};
        for (int m = 0; m < MOE_LSA_PARAMS; m++) {
            const struct moe_number *a = &moe_lsa_param[m], *b = &moe_sendrecv_param[m];
            ((double *)&p)[m] = plan_between(a->least, a->most, seed, i, (uint64_t)m);
            ((double *)&q)[m] = plan_between(b->least, b->most, seed, i, 10 + (uint64_t)m);
        }
        moe_lsa_plan(&p, &c, &plan);
        plan_takes(&t, &plan, moe_lsa_s(&p, &c), 0);
        plan.n = 0;
        moe_sendrecv_plan(&q, &c, &plan);
        plan_takes(&t, &plan, moe_sendrecv_s(&q, &c), 1e-12 * c.ranks); /* each flow's end is rounded */
        plan_close(&t, &plan);
    }
}

static void defaults_are_in_their_bounds(void **state)
{
    (void)state;
    for (int op = 0; op < MOE_ONESIDED_OP_COUNT; op++)
        plan_defaults_fit(moe_onesided_param, MOE_ONESIDED_PARAMS, (const double *)&moe_onesided_default[op]);
    plan_defaults_fit(moe_lsa_param, MOE_LSA_PARAMS, (const double *)&moe_lsa_default);
    plan_defaults_fit(moe_sendrecv_param, MOE_SENDRECV_PARAMS, (const double *)&moe_sendrecv_default);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(solved_by_hand),
        cmocka_unit_test(moves_what_it_must),
        cmocka_unit_test(plans_take_what_closed_forms_say),
        cmocka_unit_test(few_ctas_solved_by_hand),
        cmocka_unit_test(few_ctas_take_what_closed_forms_say),
        cmocka_unit_test(defaults_are_in_their_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
