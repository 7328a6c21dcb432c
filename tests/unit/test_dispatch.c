/* What dispatchers send, against bytes counted by hand; and what check says when one rank sends something
 * else.
 *
 * One layer, 4 ranks, groups of 2 (ranks 0 1 and 2 3), 4 experts, two on each member, top-2, hidden 8,
 * float32. Every rank has the tokens {0 1}, {2 3}, {1 2} but rank 3, which has none. The members 0 1 of the
 * first group send rows to each other, not to themselves; of the second, only rank 2 has something to send.
 *   alltoall  Of the choices, three are of member 0 and three of member 1: each of ranks 0, 1, 2 sends 3 rows
 *             of 8. Together 9 rows x 8 x 4 bytes = 288.
 *   deepep    Member 0 has a choice of the tokens 0 and 2, member 1 of 1 and 2: each sends 2 rows. Together
 *             6 rows x 8 x 4 = 192 bytes; with each row the probabilities of 2 experts, 6 x 2 x 4 = 48, and
 *             2 choices, 48. Back as many rows of 8, and as much again backward. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check/check.h"
#include "sim/cost/deepep.h"
#include "sim/cost/onesided.h"
#include "sim/simulate.h"
#include "tests/fixture.h"

static struct moe_sim_result simulated(const char *dispatcher)
{
    static const int32_t expert[] = {0, 1, 2, 3, 1, 2};
    char text[512];
    snprintf(text, sizeof text,
             "model: {layers: 1, hidden: 8, ffn: 4, experts: 4, top_k: 2}\n"
             "layout: {ranks: 4, expert_parallel: 2}\ntokens_per_rank: [3, 3, 3, 0]\ndispatcher: %s\n",
             dispatcher);
    struct moe_scenario *sc;
    struct moe_topo *t;
    struct moe_sim_result out;
    assert_int_equal(moe_scenario_parse("dispatch.yaml", text, &sc), 0);
    assert_int_equal(moe_topo_load("dgx_h100", &t), 0);
    t->one_sided.kernel[0] = t->one_sided.kernel[1] = moe_onesided_default[MOE_ONESIDED_ONE_DISPATCH];
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = moe_routing_new(1, 4, 4, 2);
    for (int rank = 0; rank < 3; rank++) moe_routing_add(r, 0, rank, 3, expert);
    assert_int_equal(moe_simulate(s, r, t, &out), 0);
    moe_topo_free(t);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return out;
}

static int64_t bytes_of(const struct moe_sim_result *out, const char *op)
{
    for (int i = 0; i < out->n_rows; i++)
        if (!strcmp(out->rows[i].op, op)) return out->rows[i].bytes;
    fail_msg("no %s", op);
    return -1;
}

static double own_us_of(const struct moe_sim_result *out, const char *op)
{
    for (int i = 0; i < out->n_rows; i++)
        if (!strcmp(out->rows[i].op, op)) return out->rows[i].own_us;
    fail_msg("no %s", op);
    return -1;
}

static void test_bytes(void **state)
{
    (void)state;
    struct moe_sim_result out = simulated("alltoall");
    assert_int_equal(bytes_of(&out, "layer forward dispatch"), 288);
    assert_int_equal(bytes_of(&out, "layer forward combine"), 288);
    moe_sim_free(&out);
    out = simulated("deepep");
    static const struct {
        const char *op;
        int64_t bytes;
    } sent[] = {{"layer forward dispatch_tokens", 192},   {"layer forward dispatch_probs", 48},
                {"layer forward dispatch_experts", 48},   {"layer forward combine", 192},
                {"layer backward d_combine", 192},        {"layer backward d_dispatch_tokens", 192},
                {"layer backward d_dispatch_probs", 48},  {"layer forward exchange_tokens", 4 * 8},
                {"layer forward exchange_counts", 4 * 16}};
    for (size_t i = 0; i < sizeof sent / sizeof *sent; i++)
        assert_int_equal(bytes_of(&out, sent[i].op), sent[i].bytes);
    moe_sim_free(&out);
}

/* Rank 2 sends back rows counted as elements, tells other ranks than its group, sends what it should receive,
 * or sums what nothing wrote. */
static void test_faults_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *op;
        int check_class;
    } fault[] = {{"combine", 1}, {"exchange_tokens", 2}, {"dispatch_probs", 1}, {"sum_parts", 6}};
    for (int i = 0; i < 4; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "dispatcher: deepep");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_op *op = fixture_op(moe_schedule_split_role(s, 2), MOE_FORWARD, fault[i].op);
        if (i == 0) op->send = s->exprs[op->send].a;
        if (i == 1) op->comm = 2; /* edp */
        if (i == 2) op->send = op->recv;
        if (i == 3) op->reads[0] = fixture_op(&s->roles[0], MOE_BACKWARD, "d_sum_parts")->writes[0];
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_true(v.n >= 1);
        assert_int_equal(v.item[0].check_class, fault[i].check_class);
        assert_int_equal(v.item[0].n_ranks, 1);
        assert_int_equal(v.item[0].ranks[0], 2);
        assert_true(strstr(v.item[0].op, fault[i].op) || strstr(v.item[0].text, fault[i].op));
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* Who moves the bytes changes none of them: rows as of alltoall, or as of deepep. And no host waits. */
static void test_other_carriers(void **state)
{
    (void)state;
    static const struct {
        const char *dispatcher, *like, *op;
    } cases[] = {{"deepep_low_latency", "alltoall", "layer forward dispatch"},
                 {"deepep_low_latency", "alltoall", "layer forward exchange_counts"},
                 {"deepep_low_latency", "alltoall", "layer backward d_dispatch"},
                 {"deepep_low_latency", "alltoall", "layer forward combine"},
                 {"nvlink_one_sided", "deepep", "layer forward dispatch_tokens"},
                 {"nvlink_one_sided", "deepep", "layer forward dispatch_probs"},
                 {"nvlink_one_sided", "deepep", "layer backward d_combine"},
                 {"nvlink_one_sided", "deepep", "layer forward combine"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_sim_result out = simulated(cases[i].dispatcher), like = simulated(cases[i].like);
        assert_int_equal(bytes_of(&out, cases[i].op), bytes_of(&like, cases[i].op));
        assert_int_equal(out.n_rows, like.n_rows - 1); /* read_counts */
        for (int k = 0; k < out.n_rows; k++) assert_int_not_equal(out.rows[k].kind, MOE_HOST_SYNC);
        moe_sim_free(&out);
        moe_sim_free(&like);
    }
}

/* Every token goes to every expert, so that traffic is even: in a step that is simulated a combine takes what
 * its closed form says, rows of 2 bytes an element. */
static void test_even_traffic_takes_the_closed_form(void **state)
{
    (void)state;
    enum { TOKENS = 40000, HIDDEN = 4096, E = 16 }; /* rounded bytes are less than 1e-9 of the time */
    for (int one = 0; one < 2; one++)
        for (int ranks = 8; ranks <= (one ? 8 : 16); ranks += 8) {
            char text[512];
            struct moe_scenario *sc;
            struct moe_topo *t;
            struct moe_sim_result out;
            snprintf(text, sizeof text,
                     "model: {layers: 1, hidden: %d, ffn: 1, experts: %d, top_k: %d}\nlayout: {ranks: %d}\n"
                     "tokens_per_rank: %d\ndtype: bfloat16\ndispatcher: %s\n",
                     HIDDEN, E, E, ranks, TOKENS, one ? "nvlink_one_sided" : "deepep_low_latency");
            assert_int_equal(moe_scenario_parse("even.yaml", text, &sc), 0);
            assert_int_equal(moe_topo_load(one ? "gb200_nvl72" : "h100_sxm", &t), 0);
            struct moe_schedule *s = fixture_schedule(sc);
            struct moe_routing *r = fixture_routing(sc);
            assert_int_equal(moe_simulate(s, r, t, &out), 0);
            struct moe_deepep_case low_case = {true, ranks, TOKENS, HIDDEN, E, E, 0, 0};
            struct moe_onesided_case one_case = {ranks, E, TOKENS, 2 * HIDDEN};
            double closed_s = one ? moe_onesided_s(&t->one_sided.kernel[1], t, &one_case)
                                  : moe_deepep_low_latency_s(&t->low_latency.kernel[1], t, &low_case);
            double own_s = 1e-6 * own_us_of(&out, "layer forward combine");
            if (!(fabs(own_s / closed_s - 1) < 1e-9 + 3e-12 / closed_s))
                fail_msg("%d ranks: %.12g s, closed form %.12g s", ranks, own_s, closed_s);
            moe_sim_free(&out);
            moe_topo_free(t);
            moe_routing_free(r);
            moe_schedule_free(s);
            moe_scenario_free(sc);
        }
}

/* Rank 2 has 7 tokens, where the buffers hold 6, or 7. Others, that compare puts in their place, have no such
 * buffers. */
static void test_buffers_hold_the_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *dispatcher;
        int most, n;
        const char *varied;
    } cases[] = {{"deepep_low_latency", 6, 1},         {"deepep_low_latency", 7, 0},
                 {"nvlink_one_sided", 6, 1},           {"nvlink_one_sided", 7, 0},
                 {"nvlink_one_sided", 6, 0, "deepep"}, {"deepep_low_latency", 6, 0, "alltoall"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char more[96];
        snprintf(more, sizeof more, "dispatcher: %s\nmax_dispatch_tokens: %d", cases[i].dispatcher,
                 cases[i].most);
        struct moe_scenario *sc = fixture_scenario(4, 2, "[6, 6, 7, 5]", more);
        if (cases[i].varied) moe_copy_name(sc->dispatcher, cases[i].varied);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_int_equal(v.n, cases[i].n);
        for (int k = 0; k < v.n; k++) {
            assert_int_equal(v.item[k].check_class, 10);
            assert_true(v.item[k].n_ranks == 1 && v.item[k].ranks[0] == 2);
            assert_non_null(strstr(v.item[k].text, "buffers of others hold, so on rank 2: 7 is above 6"));
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* Gradients of what is dispatched come home, those of what comes home are dispatched; counts have none. */
static void test_transports(void **state)
{
    (void)state;
    static const struct {
        enum moe_pass pass;
        const char *op;
        enum moe_transport by;
    } ops[] = {{MOE_FORWARD, "exchange_counts", MOE_BY_DEEPEP_NOTIFY},
               {MOE_FORWARD, "exchange_tokens", MOE_BY_DEEPEP_NOTIFY},
               {MOE_FORWARD, "dispatch_experts", MOE_BY_DEEPEP_DISPATCHED},
               {MOE_FORWARD, "dispatch_probs", MOE_BY_DEEPEP_DISPATCHED},
               {MOE_FORWARD, "dispatch_tokens", MOE_BY_DEEPEP_DISPATCH},
               {MOE_FORWARD, "combine", MOE_BY_DEEPEP_COMBINE},
               {MOE_BACKWARD, "d_combine", MOE_BY_DEEPEP_DISPATCH},
               {MOE_BACKWARD, "d_dispatch_tokens", MOE_BY_DEEPEP_COMBINE},
               {MOE_BACKWARD, "d_dispatch_probs", MOE_BY_DEEPEP_COMBINED},
               {MOE_SYNC, "sum_router", MOE_BY_NCCL}};
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "dispatcher: deepep");
    struct moe_schedule *s = fixture_schedule(sc);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        assert_int_equal(fixture_op(&s->roles[0], ops[i].pass, ops[i].op)->transport, ops[i].by);
    for (int t = 0; t < MOE_TRANSPORT_COUNT; t++) {
        int reverse = moe_transport_reverse[t];
        assert_int_equal(moe_transport_reverse[reverse], t);
        assert_int_equal(moe_transport_rides[reverse], moe_transport_rides[t]);
        assert_int_equal(moe_transport_library[reverse], moe_transport_library[t]);
        assert_true(moe_transport_home[reverse] != moe_transport_home[t] || reverse == t);
    }
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void test_malformed(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "dispatcher: deepep");
    struct moe_schedule *s = fixture_schedule(sc);
    fixture_op(&s->roles[0], MOE_FORWARD, "spread")->n_dims = 3;
    assert_int_equal(moe_schedule_check(s), MOE_EFAILED);
    assert_string_equal(moe_error(), "malformed schedule: layer spread: dims of spread");
    fixture_op(&s->roles[0], MOE_FORWARD, "spread")->n_dims = 4;
    fixture_op(&s->roles[0], MOE_FORWARD, "combine")->transport = MOE_TRANSPORT_COUNT;
    assert_int_equal(moe_schedule_check(s), MOE_EFAILED);
    assert_string_equal(moe_error(), "malformed schedule: layer combine: transport");
    fixture_op(&s->roles[0], MOE_FORWARD, "combine")->transport = MOE_BY_NCCL;
    fixture_op(&s->roles[0], MOE_SYNC, "sum_router")->transport = MOE_BY_DEEPEP_COMBINE;
    assert_int_equal(moe_schedule_check(s), MOE_EFAILED);
    assert_non_null(strstr(moe_error(), "sum_router: transport"));
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void test_refuses_capacity(void **state)
{
    (void)state;
    static const char *const dispatcher[] = {"deepep", "deepep_low_latency", "nvlink_one_sided"};
    for (int i = 0; i < 3; i++) {
        char more[96], message[160];
        snprintf(more, sizeof more, "dispatcher: %s\ncapacity: {rule: megatron}", dispatcher[i]);
        snprintf(message, sizeof message,
                 "fixture.yaml: dispatcher %s does not go with capacity rule megatron, expected dropless",
                 dispatcher[i]);
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", more);
        struct moe_schedule *s;
        assert_int_equal(moe_lower(sc, &s), MOE_EINPUT);
        assert_string_equal(moe_error(), message);
        moe_scenario_free(sc);
    }
}

/* Counts by expert say what goes to a rank only where a row goes to each expert. */
static void test_routing_by_counts(void **state)
{
    (void)state;
    static const char *const dispatcher[] = {"deepep_low_latency", "deepep", "nvlink_one_sided"};
    for (int i = 0; i < 3; i++) {
        struct moe_scenario *sc;
        struct moe_schedule *s = NULL;
        char text[512];
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 4, experts: 4, top_k: 2}\nlayout: {ranks: 2}\n"
                 "tokens_per_rank: 3\nrouting: {counts: [[[3, 3, 0, 0], [1, 2, 2, 1]]]}\ndispatcher: %s\n",
                 dispatcher[i]);
        assert_int_equal(moe_scenario_parse("counts.yaml", text, &sc), MOE_OK);
        assert_int_equal(moe_lower(sc, &s), i ? MOE_EINPUT : MOE_OK);
        if (i) assert_non_null(strstr(moe_error(), dispatcher[i]));
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes),
                                       cmocka_unit_test(test_faults_are_named),
                                       cmocka_unit_test(test_other_carriers),
                                       cmocka_unit_test(test_even_traffic_takes_the_closed_form),
                                       cmocka_unit_test(test_buffers_hold_the_tokens),
                                       cmocka_unit_test(test_transports),
                                       cmocka_unit_test(test_malformed),
                                       cmocka_unit_test(test_refuses_capacity),
                                       cmocka_unit_test(test_routing_by_counts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
