/* DeepEP: how routing spreads, plans beside closed forms, and cases solved by hand. */
#include "sim/cost/deepep.h"
#include "tests/unit/plan.h"

#include <string.h>

/* Expected nodes and ranks of the first K experts of a random order that are on the first G nodes of it: over
 * all orders. E experts one after the other on R ranks, P of a node. */
struct orders {
    int E, R, P, G, K;
    int order[8];
    double nodes, ranks, n;
};

static void count_order(struct orders *o)
{
    bool node[8] = {false}, rank[8] = {false};
    int nodes = 0, ranks = 0, taken = 0;
    for (int i = 0; i < o->E && taken < o->K; i++) {
        int r = o->order[i] / (o->E / o->R), n = r / o->P;
        if (!node[n] && nodes == o->G) continue;
        nodes += !node[n];
        ranks += !rank[r];
        node[n] = rank[r] = true;
        taken++;
    }
    o->nodes += nodes;
    o->ranks += ranks;
    o->n++;
}

static void all_orders(struct orders *o, int from)
{
    if (from == o->E) count_order(o);
    for (int i = from; i < o->E; i++) {
        int swap = o->order[from];
        o->order[from] = o->order[i];
        o->order[i] = swap;
        all_orders(o, from + 1);
        o->order[i] = o->order[from];
        o->order[from] = swap;
    }
}

static void spread_is_that_of_all_orders(void **state)
{
    (void)state;
    static const int shape[][4] = {/* R, P, G, K */
                                   {8, 2, 2, 4}, {8, 2, 2, 3}, {4, 1, 2, 3}, {4, 2, 1, 3}, {8, 4, 0, 5},
                                   {8, 1, 3, 3}, {2, 8, 0, 2}, {4, 1, 9, 2}, {1, 1, 0, 1}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        const int *s = shape[i];
        struct orders o = {.E = 8, .R = s[0], .P = s[1], .G = s[2] ? s[2] : 8, .K = s[3]};
        struct moe_deepep_case c = {.ranks = s[0], .experts = 8, .top_k = s[3], .node_limit = s[2]};
        double nodes, ranks;
        for (int e = 0; e < 8; e++) o.order[e] = e;
        all_orders(&o, 0);
        moe_deepep_spread(&c, s[1], &nodes, &ranks);
        if (!(fabs(nodes - o.nodes / o.n) < 1e-12 && fabs(ranks - o.ranks / o.n) < 1e-12))
            fail_msg("case %zu: %g nodes, %g ranks; of all orders %g, %g", i, nodes, ranks, o.nodes / o.n,
                     o.ranks / o.n);
    }
}

/* Without a limit and with many groups there is a formula: groups x the chance that one has any of the k.
 * DeepSeek-V3 on 8 nodes: 256 experts, 8 of a token, 4 nodes at most: nodes as the distinct ones of 8 draws,
 * 4 at most; ranks from 100,000 draws. */
static void spread_of_large_cases(void **state)
{
    (void)state;
    double nodes, ranks, none_node = 1, none_rank = 1;
    struct moe_deepep_case c = {.ranks = 64, .experts = 256, .top_k = 8};
    for (int i = 0; i < 8; i++) {
        none_node *= (224.0 - i) / (256 - i);
        none_rank *= (252.0 - i) / (256 - i);
    }
    moe_deepep_spread(&c, 8, &nodes, &ranks);
    assert_true(fabs(nodes - 8 * (1 - none_node)) < 1e-12 && fabs(ranks - 64 * (1 - none_rank)) < 1e-12);
    c.node_limit = 4;
    moe_deepep_spread(&c, 8, &nodes, &ranks);
    assert_true(fabs(nodes - 3.9830818) < 1e-7 && fabs(ranks - 7.47) < 0.005);
}

/* 2 nodes of 2 GPUs, 4 experts, each token to all 4: D = 2, R = 4. 1000 tokens of 1000 x 2 bytes (combine) to
 * the other node once: 2 MB over 100 GB/s, 20 us. To the other rank of a node 2 rows of 4 as many: 4 MB over
 * 200 GB/s, 20 us. SMs: no lanes but one, whose excess is sqrt(2 ln 1) = 0: R + D = 6 copies of 2 MB by 1 SM
 * at 40 GB/s: 300 us; and 4 messages of 1 ns: 4 us. */
static const double copy_us = 304, network_us = 20, nvlink_us = 20;

static void solved_by_hand(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 2, 2, 200e9, 100e9);
    struct moe_plan plan = {0};
    struct moe_deepep_normal p = {
        .start_s = 5e-6, .doubling_s = 3e-6, .row_Bps = 1e9, .sm_Bps = 40e9, .message_s = 1e-9};
    struct moe_deepep_case c = {
        .combine = true, .ranks = 4, .tokens = 1000, .hidden = 1000, .experts = 4, .top_k = 4, .sms = 1};
    for (int i = 0; i < 3; i++) { /* 5 + 3 + 2 us of latency */
        p.serial = i / 2.0;
        double all = copy_us + network_us + nvlink_us, us = 10 + (1 - p.serial) * copy_us + p.serial * all;
        assert_true(fabs(moe_deepep_normal_s(&p, &t, &c) - us * 1e-6) < 1e-15);
        plan.n = 0;
        moe_deepep_normal_plan(&p, &t, &c, &plan);
        assert_int_equal(moe_plan_time(&t, &plan), llround(us * 1e6));
    }
    c.sms = 4; /* 4 lanes, and the busiest has more than the mean of 1000 rows */
    assert_true(fabs(moe_deepep_normal_s(&p, &t, &c) * 1e6 - 10 - network_us - nvlink_us -
                     copy_us / 4 * (1 + sqrt(2 * log(4) / 1000))) < 1e-9);
    c.sms = 0; /* without copies the links are the limit, and with half of the link NVLink alone */
    p.serial = 0;
    assert_true(fabs(moe_deepep_normal_s(&p, &t, &c) - 30e-6) < 1e-15);
    p.nvlink_Bps = 50e9;
    assert_true(fabs(moe_deepep_normal_s(&p, &t, &c) - 90e-6) < 1e-15);
    plan_close(&t, &plan);
}

/* The same machine, 2 experts of 4 a token: 4 MB of rows, of which half leave the node, 20 us, and half of
 * the rest the rank, 5 us; copied at 40 GB/s, 100 us. 2 experts of the other node are 1 us. */
static void low_latency_solved_by_hand(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 2, 2, 200e9, 100e9);
    struct moe_plan plan = {0};
    struct moe_deepep_low_latency p = {5e-6, 3e-6, 0.5e-6, 40e9, 0.5};
    struct moe_deepep_case c = {
        .combine = true, .ranks = 4, .tokens = 1000, .hidden = 1000, .experts = 4, .top_k = 2};
    assert_true(fabs(moe_deepep_low_latency_s(&p, &t, &c) - 121.5e-6) < 1e-15);
    moe_deepep_low_latency_plan(&p, &t, &c, &plan);
    assert_int_equal(moe_plan_time(&t, &plan), 121500000);
    c.combine = false;
    c.hidden = 1024;
    assert_true(moe_deepep_row_bytes(&c, true) == 1072 && moe_deepep_row_bytes(&c, false) == 1056);
    plan_close(&t, &plan);
}

/* Both kinds on the machine above. Normal: a row to the rail, two to the other rank of the node; what the SMs
 * copy stays on the rank. Low latency: a quarter of the rows to each. */
static void moves_what_it_must(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 2, 2, 200e9, 100e9);
    struct moe_plan plan = {0};
    struct moe_deepep_normal p = {.sm_Bps = 40e9, .serial = 0.3};
    struct moe_deepep_low_latency q = {.copy_Bps = 40e9, .serial = 0.3};
    struct moe_deepep_case c = {
        .combine = true, .ranks = 4, .tokens = 1001, .hidden = 1000, .experts = 4, .top_k = 4, .sms = 1};
    const int64_t rows = 1001 * 2000;
    moe_deepep_normal_plan(&p, &t, &c, &plan);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            assert_int_equal(plan_moved(&plan, from, to), rows * (from == to           ? 6
                                                                  : from / 2 == to / 2 ? 2
                                                                  : from % 2 == to % 2 ? 1
                                                                                       : 0));
    plan.n = 0;
    moe_deepep_low_latency_plan(&q, &t, &c, &plan);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            assert_int_equal(plan_moved(&plan, from, to), rows * (from == to ? 4 : 1));
    plan_close(&t, &plan);
}

/* 3 nodes of 2; only rank 0 has tokens: 3 rows for rank 2, 1 for rank 4, 2 for rank 1. One stage after the
 * other: both flows over its NIC at 1 GB/s end after 4 us, the smaller after 2; NVLink follows the larger, 2
 * rows at 2 GB/s. Back the same. */
static void a_stage_follows_the_largest_flow(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(6, 2, 2, 2e9, 1e9);
    struct moe_plan plan = {0};
    const struct moe_deepep_normal p = {.serial = 1};
    const int rank[6] = {0, 1, 2, 3, 4, 5}, first[4] = {0, 2, 4, 6};
    const double to_rank[6 * 6] = {0, 2000, 3000, 0, 1000}, to_node[6 * 3] = {2000, 3000, 1000};
    for (int combine = 0; combine < 2; combine++) {
        struct moe_deepep_traffic x = {.combine = combine,
                                       .n = 6,
                                       .n_nodes = 3,
                                       .rank = rank,
                                       .first = first,
                                       .to_rank = to_rank,
                                       .to_node = to_node,
                                       .row_bytes = 1000};
        plan.n = 0;
        moe_deepep_traffic_plan(&p, &t, &x, &plan);
        assert_int_equal(moe_plan_time(&t, &plan), 5000000);
    }
    plan_close(&t, &plan);
}

/* ---- closed forms and plans ---- */

struct any {
    struct moe_deepep_normal normal;
    struct moe_deepep_low_latency low_latency;
    struct moe_deepep_case c;
    int gpus_per_node, nics_per_node;
    double intra_Bps, nic_Bps;
};

static void draw_members(const struct moe_number *table, int n, double *member, uint64_t seed,
                         uint64_t stream)
{
    for (int m = 0; m < n; m++)
        member[m] = plan_between(table[m].least, table[m].most, seed, stream, (uint64_t)m);
}

static struct any draw(uint64_t seed, uint64_t stream)
{
    uint64_t at = 100;
    struct any x;
#define DRAW(n) ((int)(moe_uniform(seed, stream, at++) * (n)))
    int P = 1 << DRAW(4), N = 1 + DRAW(5), e = 1 + DRAW(4);
    draw_members(moe_deepep_normal_param, MOE_DEEPEP_NORMAL_PARAMS, (double *)&x.normal, seed, stream);
    draw_members(moe_deepep_low_latency_param, MOE_DEEPEP_LOW_LATENCY_PARAMS, (double *)&x.low_latency, seed,
                 stream);
    if (DRAW(2)) x.normal.nvlink_Bps = 0;
    if (DRAW(2)) x.normal.row_Bps = 0;
    x.gpus_per_node = P;
    x.nics_per_node = DRAW(2) && P > 1 ? P / 2 : P;
    x.intra_Bps = plan_between(1e10, 1e12, seed, stream, at++);
    x.nic_Bps = plan_between(1e9, 1e11, seed, stream, at++);
    x.c = (struct moe_deepep_case){.ranks = N * P, .experts = N * P * e};
    x.c.combine = DRAW(2);
    x.c.hidden = 32 * (1 + DRAW(200));
    x.c.node_limit = DRAW(N + 1);
    x.c.sms = DRAW(3) * 4;
    int most = (x.c.node_limit ? x.c.node_limit : N) * P * e;
    x.c.top_k = 1 + DRAW(most < 8 ? most : 8);
    return x;
#undef DRAW
}

/* What rounded bytes may come to, half a byte of each flow twice: on links; and of copies, which are slower
 * than sm and copy by their messages, as a share of the time. */
static double rounded(const struct any *x, double closed_s)
{
    double links_s = 1 / x->nic_Bps + 1 / x->intra_Bps;
    if (x->normal.nvlink_Bps > 0) links_s += 1 / x->normal.nvlink_Bps;
    return 2 * x->c.ranks * links_s + closed_s / ((double)x->c.tokens * moe_deepep_row_bytes(&x->c, false));
}

/* 1e8 tokens or so, so that rounded bytes are less than 1e-9 of the time; and 1 to 1e4. */
static void plans_take_what_closed_forms_say(void **state)
{
    (void)state;
    uint64_t seed = plan_seed();
    for (uint64_t i = 0; i < 300; i++) {
        struct any x = draw(seed, i);
        struct moe_topo t = plan_machine(x.c.ranks, x.gpus_per_node, x.nics_per_node, x.intra_Bps, x.nic_Bps);
        struct moe_plan plan = {0};
        for (int large = 0; large < 2; large++) {
            x.c.tokens = (int64_t)plan_between(large ? 1e8 : 1, large ? 1e9 : 1e4, seed, i, 200);
            double normal_s = moe_deepep_normal_s(&x.normal, &t, &x.c),
                   low_latency_s = moe_deepep_low_latency_s(&x.low_latency, &t, &x.c);
            plan.n = 0;
            moe_deepep_normal_plan(&x.normal, &t, &x.c, &plan);
            plan_takes(&t, &plan, normal_s, large ? 0 : rounded(&x, normal_s));
            plan.n = 0;
            moe_deepep_low_latency_plan(&x.low_latency, &t, &x.c, &plan);
            plan_takes(&t, &plan, low_latency_s, large ? 0 : rounded(&x, low_latency_s));
        }
        plan_close(&t, &plan);
    }
}

/* On a shipped machine the memory of a GPU is not the limit of what its SMs copy. Defaults are in their
 * bounds, or are said to be none. */
static void defaults_on_a_shipped_machine(void **state)
{
    (void)state;
    struct moe_topo *t;
    assert_int_equal(moe_topo_load("dgx_h100", &t), MOE_OK);
    for (int combine = 0; combine < 2; combine++)
        for (int ranks = 8; ranks <= 32; ranks *= 2) {
            struct moe_deepep_case c = {combine, ranks, 4096, 7168, 256, 8, 4, 24};
            const struct moe_deepep_normal *p = &moe_deepep_default.nodes.kernel[combine];
            const struct moe_deepep_low_latency *q = &moe_deepep_low_latency_default[combine];
            struct moe_plan plan = {0};
            moe_topo_build(t, ranks);
            moe_deepep_normal_plan(p, t, &c, &plan);
            plan_takes(t, &plan, moe_deepep_normal_s(p, t, &c), 1e-9);
            plan.n = 0;
            moe_deepep_low_latency_plan(q, t, &c, &plan);
            plan_takes(t, &plan, moe_deepep_low_latency_s(q, t, &c), 1e-9);
            free(plan.flow);
        }
    for (int combine = 0; combine < 2; combine++) {
        plan_defaults_fit(moe_deepep_normal_param, MOE_DEEPEP_NORMAL_PARAMS,
                          (const double *)&moe_deepep_default.one_node.kernel[combine]);
        plan_defaults_fit(moe_deepep_normal_param, MOE_DEEPEP_NORMAL_PARAMS,
                          (const double *)&moe_deepep_default.nodes.kernel[combine]);
        plan_defaults_fit(moe_deepep_low_latency_param, MOE_DEEPEP_LOW_LATENCY_PARAMS,
                          (const double *)&moe_deepep_low_latency_default[combine]);
    }
    moe_topo_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(spread_is_that_of_all_orders),
        cmocka_unit_test(spread_of_large_cases),
        cmocka_unit_test(solved_by_hand),
        cmocka_unit_test(low_latency_solved_by_hand),
        cmocka_unit_test(moves_what_it_must),
        cmocka_unit_test(a_stage_follows_the_largest_flow),
        cmocka_unit_test(plans_take_what_closed_forms_say),
        cmocka_unit_test(defaults_on_a_shipped_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
