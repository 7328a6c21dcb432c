/* Transports: what each moves, for how long, and where it cannot run.
 *
 * By hand: 2 nodes of 2 GPUs, one expert a rank, top-2, rows of 1000 bytes. Tokens of
 *   rank 0   {2,3} {2,3} {1,2} {0,3}: 1, 1, 3, 3 rows for the ranks; 2 tokens for node 0, all 4 for node 1
 *   rank 1   {2,3}: 0, 0, 1, 1; 0 and 1
 *   rank 2   {0,1}: 1, 1, 0, 0; 1 and 0
 *   rank 3   none
 * A dispatch sends 4 rows from 0 to its rail 2, 1 from 1 to 3 and 1 from 2 to 0. Then 0 hands 1 what 0 and 2
 * have for it, 2 rows; 2 hands 3 what 0 has, 3 rows; 3 hands 2 what 1 has, 1 row. SMs of 0 copy 2 + 4 rows to
 * nodes and 2 + 2 to ranks. */
#include "sim/cost/transport.h"

#include "sim/cost/deepep.h"
#include "sim/cost/onesided.h"
#include "tests/unit/plan.h"

#include <string.h>

enum { ROW = 1000 };

static struct moe_routing *by_hand(void)
{
    static const int32_t of0[] = {2, 3, 2, 3, 1, 2, 0, 3}, of1[] = {2, 3}, of2[] = {0, 1};
    static const int64_t tokens[] = {4, 1, 1, 0};
    struct moe_routing *r = moe_routing_new(1, 4, 4, 2);
    memcpy(r->tokens, tokens, sizeof tokens);
    moe_routing_add(r, 0, 0, 4, of0);
    moe_routing_add(r, 0, 1, 1, of1);
    moe_routing_add(r, 0, 2, 1, of2);
    return r;
}

/* Values of a schedule that has nothing but its ranks. */
struct world {
    struct moe_schedule s;
    struct moe_values *values;
    int rank[64];
    int64_t *bytes;
    struct moe_moved m;
};

/* Each rank sends `row` bytes for each token to each rank that has any of its experts; back: it is sent
 * those. */
static void open_world(struct world *w, const struct moe_routing *r, int64_t row, bool back)
{
    int n = r->n_ranks;
    int32_t tokens[64];
    *w = (struct world){.s = {.n_ranks = n, .n_layers = 1, .n_experts = r->n_experts, .tokens = r->tokens}};
    w->values = moe_values_new(&w->s, r);
    w->bytes = moe_alloc((size_t)n * (size_t)n, sizeof *w->bytes);
    for (int i = 0; i < n; i++) {
        w->rank[i] = i;
        moe_routing_peers(r, 0, i, n, tokens);
        for (int j = 0; j < n; j++) w->bytes[back ? j * n + i : i * n + j] = row * tokens[j];
    }
    w->m = (struct moe_moved){MOE_ALLTOALL, n, w->rank, w->bytes, 2, true};
}

static void close_world(struct world *w)
{
    moe_values_free(w->values);
    free(w->bytes);
}

static double planned(const struct world *w, const struct moe_topo *t, enum moe_transport by,
                      struct moe_plan *plan)
{
    double error;
    assert_int_equal(moe_transport_plan(t, by, &w->m, &w->s, w->values, 0, plan, &error), MOE_OK);
    return error;
}

static void expect_moved(const struct moe_plan *plan, int64_t rows[4][4], bool back)
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (plan_moved(plan, back ? j : i, back ? i : j) != ROW * rows[i][j])
                fail_msg("%d to %d: %lld bytes, expected %lld rows", i, j,
                         (long long)plan_moved(plan, back ? j : i, back ? i : j), (long long)rows[i][j]);
}

static void moves_rows_by_rails(void **state)
{
    (void)state;
    /* Copies: of 1, 1 to a node, and 1 forwards for none: ranks 1 and 3 have rows of 1 and 3 only. */
    int64_t rows[4][4] = {{10, 2, 4, 0}, {0, 1, 0, 1}, {1, 0, 7, 3}, {0, 0, 1, 2}};
    struct moe_topo t = plan_machine(4, 2, 2, 200e9, 100e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    t.deepep = moe_deepep_default;
    for (int back = 0; back < 2; back++) {
        struct world w;
        open_world(&w, r, ROW, back);
        planned(&w, &t, back ? MOE_BY_DEEPEP_COMBINE : MOE_BY_DEEPEP_DISPATCH, &plan);
        expect_moved(&plan, rows, back);
        planned(&w, &t, back ? MOE_BY_DEEPEP_COMBINED : MOE_BY_DEEPEP_DISPATCHED, &plan);
        expect_moved(&plan, rows, back);
        close_world(&w);
    }
    moe_routing_free(r);
    plan_close(&t, &plan);
}

/* Counts go to a node once for each of its ranks. So do rows where nodes have different numbers of members: 0
 * and 1 of the first, 2 of the second, which is the rail of both. */
static void else_a_node_gets_what_its_ranks_get(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 2, 2, 200e9, 100e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    struct world w;
    open_world(&w, r, ROW, false);
    planned(&w, &t, MOE_BY_DEEPEP_NOTIFY, &plan);
    assert_int_equal(plan_moved(&plan, 0, 2), 6 * ROW);
    w.m.n = 3;
    const int64_t bytes[9] = {9, 9, 5, 9, 9, 7, 3, 4, 9};
    w.m.bytes = bytes;
    planned(&w, &t, MOE_BY_DEEPEP_DISPATCH, &plan);
    assert_int_equal(plan_moved(&plan, 0, 2), 5);
    assert_int_equal(plan_moved(&plan, 1, 2), 7);
    assert_int_equal(plan_moved(&plan, 2, 0), 3 + 4);
    assert_int_equal(plan_moved(&plan, 0, 1), 9 + 4); /* 1's from 0, and from 2 over 0 */
    assert_int_equal(plan_moved(&plan, 2, 1) + plan_moved(&plan, 2, 2), 0);
    close_world(&w);
    moe_routing_free(r);
    plan_close(&t, &plan);
}

/* One SM that copies at once, but takes 1 us for each of the 6 rows that 2 hands to ranks (0: 4 of 4); links:
 * 4 rows from 0 over its NIC at 1 GB/s are 4 us, all else is shorter; behind 5 us of latency and 3 us for a
 * doubling of nodes. What rides pays neither latency nor messages. All serial: 0 takes 4 us for messages, 4
 * us over its NIC and 1 us for 2 rows at 2 GB/s to 1 (2: 6 us, 1 us for its row to 0, 1.5 us for 3 rows to
 * 3), without messages 5 us. */
static void what_rides_pays_no_latency(void **state)
{
    (void)state;
    static const double us[2][2] = {{14, 4}, {17, 5}};
    struct moe_topo t = plan_machine(4, 2, 2, 2e9, 1e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    struct world w;
    open_world(&w, r, ROW, false);
    t.deepep.sms = 1;
    for (int serial = 0; serial < 2; serial++)
        for (int rides = 0; rides < 2; rides++) {
            t.deepep.nodes.kernel[0] = (struct moe_deepep_normal){
                .start_s = 5e-6, .doubling_s = 3e-6, .sm_Bps = 1e18, .message_s = 1e-6, .serial = serial};
            planned(&w, &t, rides ? MOE_BY_DEEPEP_DISPATCHED : MOE_BY_DEEPEP_DISPATCH, &plan);
            double off_ps = (double)moe_plan_time(&t, &plan) - us[serial][rides] * 1e6;
            if (!(fabs(off_ps) < 3)) fail_msg("serial %d, rides %d: off by %g ps", serial, rides, off_ps);
        }
    close_world(&w);
    moe_routing_free(r);
    plan_close(&t, &plan);
}

/* Every token to every expert: the traffic is even, and a plan takes what the closed form says. 1e5 tokens,
 * so that rounded bytes are less than 1e-9 of the time. */
static void even_traffic_takes_the_closed_form(void **state)
{
    (void)state;
    static const int shape[][2] = {{1, 4}, {1, 8}, {2, 2}, {2, 4}, {4, 2}, {8, 1}};
    enum { TOKENS = 100000, E = 8 };
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int combine = 0; combine < 2; combine++) {
            int N = shape[i][0], P = shape[i][1], n = N * P;
            struct moe_deepep_case c = {combine, n, TOKENS, 7168, E, E, 0, 20};
            struct moe_topo t = plan_machine(n, P, P, 365e9, 50e9);
            int64_t tokens[64];
            struct moe_plan plan = {0};
            struct world w;
            t.deepep = moe_deepep_default;
            for (int k = 0; k < n; k++) tokens[k] = TOKENS;
            struct moe_routing *r = moe_routing_generate(1, n, E, E, tokens, 0, 1);
            open_world(&w, r, llround(moe_deepep_row_bytes(&c, false)), combine);
            planned(&w, &t, combine ? MOE_BY_DEEPEP_COMBINE : MOE_BY_DEEPEP_DISPATCH, &plan);
            const struct moe_deepep_kernels *k = N == 1 ? &t.deepep.one_node : &t.deepep.nodes;
            plan_takes(&t, &plan, moe_deepep_normal_s(&k->kernel[combine], &t, &c), 0);
            close_world(&w);
            moe_routing_free(r);
            plan_close(&t, &plan);
        }
}

static void expect_us(const struct moe_topo *t, const struct moe_plan *plan, const char *what, double us)
{
    double off_ps = (double)moe_plan_time(t, plan) - us * 1e6;
    if (!(fabs(off_ps) < 3)) fail_msg("%s: off by %g ps", what, off_ps);
}

/* Rank 0 has 1 row for itself, 2 for its neighbour, 4 and 3 for the other node: copied at 1 GB/s, 10 us; over
 * its NIC at 1 GB/s the larger flow ends after 7; NVLink, 2 rows at 2 GB/s, 1. Latency: 5 us, 3 for the other
 * node, and of 4 experts the half is there, 0.5 us each; combine starts after 6. What rides pays none. */
static void low_latency_by_hand(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 2, 2, 2e9, 1e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    struct world w;
    const int64_t bytes[16] = {1 * ROW, 2 * ROW, 4 * ROW, 3 * ROW};
    open_world(&w, r, ROW, false);
    w.m.bytes = bytes;
    t.low_latency.error[1] = 0.25;
    for (int serial = 0; serial < 2; serial++) {
        for (int i = 0; i < 2; i++)
            t.low_latency.kernel[i] =
                (struct moe_deepep_low_latency){(5 + i) * 1e-6, 3e-6, 0.5e-6, 1e9, serial};
        assert_true(planned(&w, &t, MOE_BY_LOW_DISPATCH, &plan) == 0.25);
        expect_us(&t, &plan, "dispatch", serial ? 27 : 19);
        for (int to = 0; to < 4; to++) assert_int_equal(plan_moved(&plan, 0, to), to ? bytes[to] : 10 * ROW);
        planned(&w, &t, MOE_BY_LOW_COMBINE, &plan);
        expect_us(&t, &plan, "combine", serial ? 28 : 20);
        planned(&w, &t, MOE_BY_LOW_NOTIFY, &plan);
        expect_us(&t, &plan, "notify", serial ? 18 : 10);
    }
    t.gpus_per_node = 4;
    moe_topo_build(&t, 4);
    assert_true(planned(&w, &t, MOE_BY_LOW_DISPATCH, &plan) == 0);
    expect_us(&t, &plan, "one node", 5 + 10 + 4.5); /* 9 rows over its link */
    close_world(&w);
    moe_routing_free(r);
    plan_close(&t, &plan);
}

/* The tokens above in one domain: rank 0 has 1, 3, 3 rows for others, each token for 1.75 of them: 5 + 2 x
 * 1.75 us, then 7 rows over its link at 2 GB/s, 3.5 us, though no pair does more than a row in 1 us. The
 * others are done sooner: 2 others for their token, 5 + 4 us, and a row for each. Where the kernel's link is
 * at 1 GB/s, 7 us. Back the same. What rides pays no latency, and rows of it no time. */
static void one_sided_by_hand(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 4, 4, 2e9, 1e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    struct world w;
    int64_t rows[4][4] = {{1, 1, 3, 3}, {0, 0, 1, 1}, {1, 1, 0, 0}, {0, 0, 0, 0}};
    t.one_sided.error = 0.25;
    for (int back = 0; back < 2; back++) {
        open_world(&w, r, ROW, back);
        for (int link = 0; link < 2; link++) {
            t.one_sided.kernel[!back] = (struct moe_onesided){.start_s = 1};
            t.one_sided.kernel[back] = (struct moe_onesided){
                .start_s = 5e-6, .target_s = 2e-6, .row_s = 1e-6, .link_Bps = link * 1e9};
            assert_true(planned(&w, &t, back ? MOE_BY_ONE_COMBINE : MOE_BY_ONE_DISPATCH, &plan) == 0.25);
            expect_us(&t, &plan, back ? "combine" : "dispatch", link ? 15.5 : 12);
            expect_moved(&plan, rows, back);
            t.one_sided.kernel[back].row_s = 1e-3;
            planned(&w, &t, back ? MOE_BY_ONE_COMBINED : MOE_BY_ONE_DISPATCHED, &plan);
            expect_us(&t, &plan, "what rides", link ? 7 : 3.5);
            expect_moved(&plan, rows, back);
        }
        close_world(&w);
    }
    moe_routing_free(r);
    plan_close(&t, &plan);
}

/* Every token to every expert, as above. */
static void even_traffic_of_other_libraries(void **state)
{
    (void)state;
    static const int shape[][2] = {{1, 4}, {1, 8}, {2, 2}, {2, 4}, {8, 1}};
    enum { TOKENS = 100000, E = 8 };
    int32_t *expert = moe_alloc(TOKENS * E, sizeof *expert);
    for (int k = 0; k < TOKENS * E; k++) expert[k] = k % E;
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int combine = 0; combine < 2; combine++) {
            int N = shape[i][0], P = shape[i][1], n = N * P;
            struct moe_deepep_case c = {combine, n, TOKENS, 7168, E, E, 0, 0};
            struct moe_onesided_case one = {n, E, TOKENS, 4032};
            struct moe_topo t = plan_machine(n, P, P, 365e9, 50e9);
            struct moe_plan plan = {0};
            struct world w;
            for (int k = 0; k < 2; k++) {
                t.low_latency.kernel[k] = moe_deepep_low_latency_default[k];
                t.one_sided.kernel[k] = moe_onesided_default[MOE_ONESIDED_ONE_DISPATCH + k];
            }
            struct moe_routing *r = moe_routing_new(1, n, E, E);
            for (int k = 0; k < n; k++) {
                r->tokens[k] = TOKENS;
                moe_routing_add(r, 0, k, TOKENS, expert);
            }
            open_world(&w, r, llround(moe_deepep_row_bytes(&c, true)) * E / n, combine);
            planned(&w, &t, combine ? MOE_BY_LOW_COMBINE : MOE_BY_LOW_DISPATCH, &plan);
            plan_takes(&t, &plan, moe_deepep_low_latency_s(&t.low_latency.kernel[combine], &t, &c), 0);
            close_world(&w);
            if (N == 1) {
                open_world(&w, r, llround(one.row_bytes), combine);
                planned(&w, &t, combine ? MOE_BY_ONE_COMBINE : MOE_BY_ONE_DISPATCH, &plan);
                plan_takes(&t, &plan, moe_onesided_s(&t.one_sided.kernel[combine], &t, &one), 0);
                close_world(&w);
            }
            moe_routing_free(r);
            plan_close(&t, &plan);
        }
    free(expert);
}

/* Whatever the traffic: each pair gets its bytes, and no link moves more than it can. */
static void any_traffic_moves_what_it_must(void **state)
{
    (void)state;
    uint64_t seed = plan_seed();
    for (uint64_t i = 0; i < 100; i++) {
        int P = 1 + (int)(moe_uniform(seed, i, 0) * 4), n = P * (1 + (int)(moe_uniform(seed, i, 1) * 3));
        int64_t bytes[144], tokens[12];
        struct moe_topo t = plan_machine(n, P, P, 365e9, 50e9);
        struct moe_routing *r = moe_routing_new(1, n, n, 1);
        struct moe_plan plan = {0};
        struct world w;
        for (int k = 0; k < n; k++) tokens[k] = 100;
        memcpy(r->tokens, tokens, (size_t)n * sizeof *tokens);
        for (int k = 0; k < n * n; k++) { /* some have nothing for each other */
            double u = moe_uniform(seed, i, 10 + (uint64_t)k);
            bytes[k] = u < 0.3 ? 0 : (int64_t)(1e8 * u * u);
        }
        for (int k = 0; k < 2; k++) {
            t.low_latency.kernel[k] = moe_deepep_low_latency_default[k];
            t.one_sided.kernel[k] = moe_onesided_default[MOE_ONESIDED_ONE_DISPATCH + k];
        }
        open_world(&w, r, ROW, false);
        w.m.bytes = bytes;
        for (int by = 0; by < MOE_TRANSPORT_COUNT; by++) {
            bool low = moe_transport_library[by] == MOE_LIBRARY_LOW_LATENCY,
                 one = moe_transport_library[by] == MOE_LIBRARY_ONE_SIDED && n <= P;
            if ((!low && !one) || n == 1) continue;
            planned(&w, &t, (enum moe_transport)by, &plan);
            for (int from = 0; from < n; from++)
                for (int to = 0; to < n; to++)
                    if (from != to || one)
                        assert_int_equal(plan_moved(&plan, from, to), bytes[from * n + to]);
            assert_true((double)moe_plan_time(&t, &plan) * 1e-12 >= plan_bound_s(&t, &plan) - 1e-11);
        }
        close_world(&w);
        moe_routing_free(r);
        plan_close(&t, &plan);
    }
}

static void expect_nccl(const struct world *w, const struct moe_topo *t, enum moe_transport by)
{
    struct moe_plan plan = {0}, nccl = {0};
    assert_true(planned(w, t, by, &plan) == moe_collective_error(t, &w->m));
    moe_collective_plan(t, &w->m, &nccl);
    assert_int_equal(plan.n, nccl.n);
    for (int i = 0; i < nccl.n; i++) { /* not as memory: a flow ends with bytes that nobody writes */
        const struct moe_sent *a = &plan.flow[i], *b = &nccl.flow[i];
        assert_true(a->from == b->from && a->to == b->to && a->bytes == b->bytes && a->after == b->after);
        assert_true(a->rate_Bps == b->rate_Bps && a->wire == b->wire && a->delay_s == b->delay_s);
    }
    free(plan.flow);
    free(nccl.flow);
}

/* Errors are those of the kernels that run; a host, a rank alone and NCCL have NCCL's
 * plans; a bus has none. */
static void where_it_runs(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 4, 4, 200e9, 100e9);
    struct moe_routing *r = by_hand();
    struct moe_plan plan = {0};
    struct world w;
    double error;
    open_world(&w, r, ROW, false);
    t.intra_error = 0.3;
    t.deepep.one_node.error = 0.1;
    t.deepep.nodes.error = 0.2;
    assert_true(planned(&w, &t, MOE_BY_DEEPEP_DISPATCH, &plan) == 0.1);
    assert_true(planned(&w, &t, MOE_BY_DEEPEP_DISPATCHED, &plan) == 0.1);
    expect_nccl(&w, &t, MOE_BY_NCCL);
    t.gpus_per_node = 2;
    moe_topo_build(&t, 4);
    assert_true(planned(&w, &t, MOE_BY_DEEPEP_DISPATCH, &plan) == 0.2);
    t.intra_kind = MOE_INTRA_SHARED;
    t.bus_Bps = 1e9;
    moe_topo_build(&t, 4);
    assert_int_equal(moe_transport_plan(&t, MOE_BY_DEEPEP_COMBINE, &w.m, &w.s, w.values, 0, &plan, &error),
                     MOE_EINPUT);
    assert_string_equal(moe_error(), "intra is of kind shared, DeepEP needs NVLink: expected kind switch");
    t.cores = 2;
    expect_nccl(&w, &t, MOE_BY_DEEPEP_DISPATCH);
    t.cores = 0;
    w.m.n = 1;
    expect_nccl(&w, &t, MOE_BY_DEEPEP_DISPATCH);
    close_world(&w);
    moe_routing_free(r);
    plan_close(&t, &plan);
}

static void expect_refused(const struct world *w, const struct moe_topo *t, enum moe_transport by,
                           const char *message)
{
    struct moe_plan plan = {0};
    double error;
    assert_int_equal(moe_transport_plan(t, by, &w->m, &w->s, w->values, 0, &plan, &error), MOE_EINPUT);
    assert_string_equal(moe_error(), message);
    free(plan.flow);
}

static void where_it_does_not_run(void **state)
{
    (void)state;
    struct moe_topo t = plan_machine(4, 4, 4, 200e9, 100e9);
    struct moe_routing *r = by_hand();
    struct world w;
    open_world(&w, r, ROW, false);
    expect_refused(&w, &t, MOE_BY_LOW_NOTIFY,
                   "it has no block deepep_low_latency, which says what those kernels take");
    expect_refused(&w, &t, MOE_BY_ONE_COMBINE,
                   "it has no block nvlink_one_sided, which says what those kernels take");
    t.low_latency.kernel[0].copy_Bps = 1e9;
    t.one_sided.kernel[0].start_s = 1e-6;
    t.gpus_per_node = 2;
    moe_topo_build(&t, 4);
    expect_refused(
        &w, &t, MOE_BY_ONE_NOTIFY,
        "ranks 0 and 3 are in different NVLink domains of 2, expected all 4 that split the experts "
        "in one for one-sided kernels");
    t.intra_kind = MOE_INTRA_SHARED;
    t.bus_Bps = 1e9;
    moe_topo_build(&t, 4);
    expect_refused(&w, &t, MOE_BY_ONE_DISPATCH,
                   "intra is of kind shared, nvlink_one_sided needs NVLink: expected kind switch");
    expect_refused(&w, &t, MOE_BY_LOW_DISPATCH,
                   "intra is of kind shared, DeepEP needs NVLink: expected kind switch");
    t.cores = 2;
    expect_nccl(&w, &t, MOE_BY_LOW_DISPATCH);
    expect_nccl(&w, &t, MOE_BY_ONE_DISPATCH);
    free(t.link_Bps);
    free(t.link_class);
    close_world(&w);
    moe_routing_free(r);
}

/* Whichever group is asked for first, and however often. */
static void peers_are_those_of_the_routing(void **state)
{
    (void)state;
    const int64_t tokens[4] = {9, 0, 5, 7};
    struct moe_routing *r = moe_routing_generate(2, 4, 8, 3, tokens, 1, 1);
    struct moe_schedule s = {.n_ranks = 4, .n_layers = 2, .tokens = r->tokens};
    struct moe_values *v = moe_values_new(&s, r), *none = moe_values_new(&s, NULL);
    const int32_t *kept = moe_values_peers(v, 3, 1, 4);
    for (int P = 1; P <= 4; P *= 2)
        for (int layer = 0; layer < 2; layer++)
            for (int rank = 0; rank < 4; rank++) {
                int32_t expected[4];
                moe_routing_peers(r, layer, rank, P, expected);
                assert_memory_equal(moe_values_peers(v, rank, layer, P), expected,
                                    (size_t)P * sizeof *expected);
            }
    assert_ptr_equal(moe_values_peers(v, 3, 1, 4), kept);
    assert_null(moe_values_peers(v, 0, 0, 3));
    assert_null(moe_values_peers(none, 0, 0, 2));
    moe_values_free(v);
    moe_values_free(none);
    moe_routing_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(moves_rows_by_rails),
        cmocka_unit_test(else_a_node_gets_what_its_ranks_get),
        cmocka_unit_test(what_rides_pays_no_latency),
        cmocka_unit_test(even_traffic_takes_the_closed_form),
        cmocka_unit_test(low_latency_by_hand),
        cmocka_unit_test(one_sided_by_hand),
        cmocka_unit_test(even_traffic_of_other_libraries),
        cmocka_unit_test(any_traffic_moves_what_it_must),
        cmocka_unit_test(where_it_runs),
        cmocka_unit_test(where_it_does_not_run),
        cmocka_unit_test(peers_are_those_of_the_routing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
