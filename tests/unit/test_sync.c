/* The order of the gradient sum as a user writes it: what is read, what wrong lists are told, and what check
 * says of orders that are right or wrong. */
#include "sim/check/check.h"
#include "sim/simulate.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

#define RIGHT_SUMS "  - {do: sum, of: shared, over: dp}\n  - {do: sum, of: experts, over: edp}\n"
#define RIGHT_NORMS "  - {do: norm, of: shared}\n  - {do: norm, of: experts, over: ep}\n"
#define END "  - {do: clip}\n  - {do: update}\n"
#define DIVIDE "  - {do: divide, by: world_tokens}\n"

/* Classes of the verdicts of a list, as bits; what says otherwise: no verdict names it. */
static unsigned classes_with(const char *tokens, const char *more, const char *says)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, tokens, more);
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r =
        moe_routing_generate(s->n_layers, s->n_ranks, s->n_experts, s->top_k, s->tokens, 0, 1);
    struct moe_verdicts v;
    unsigned classes = 0;
    bool said = !says;
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++) {
        classes |= 1u << v.item[i].check_class;
        said |= says && strstr(v.item[i].text, says);
    }
    if (!said) fail_msg("no verdict says '%s'", says);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return classes;
}

static unsigned classes_of(const char *more, const char *says)
{
    return classes_with("12", more, says);
}

struct order {
    const char *list, *says;
    unsigned classes;
};
static void expect_orders(const struct order *order, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned classes = classes_of(order[i].list, order[i].says);
        if (classes != order[i].classes)
            fail_msg("order %zu: classes %x, not %x", i, classes, order[i].classes);
    }
}

static void test_orders(void **state)
{
    (void)state;
    static const struct order order[] = {
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS END, NULL, 0},
        /* The same in other orders: divisions and sums change places, experts first. */
        {"gradient_sync:\n" DIVIDE RIGHT_SUMS RIGHT_NORMS END, NULL, 0},
        {"gradient_sync:\n" DIVIDE RIGHT_SUMS RIGHT_NORMS END "overlap_grad_reduce: true\n", NULL, 0},
        {"loss: mean_of_ranks\ngradient_sync:\n  - {do: average, of: shared, over: dp}\n"
         "  - {do: average, of: experts, over: edp}\n  - {do: divide, of: experts, by: ep}\n" RIGHT_NORMS END,
         NULL, 0},
        {"gradient_sync:\n" RIGHT_SUMS "  - {do: divide, by: [world_tokens, ep], times: 2}\n" RIGHT_NORMS END,
         NULL, 0},
        /* Sent to its copies at the start; experts sent to ranks with others. */
        {"gradient_sync:\n  - {do: broadcast, of: shared, over: dp}\n"
         "  - {do: broadcast, of: experts, over: edp}\n" RIGHT_SUMS DIVIDE RIGHT_NORMS END,
         NULL, 0},
        {"gradient_sync:\n  - {do: broadcast, over: world}\n" RIGHT_SUMS DIVIDE RIGHT_NORMS END,
         "each of 2 parameters (first w1, w2) begins as a copy of that of another rank, which holds other "
         "experts of it, so on rank 1: of "
         "rank 0",
         1u << 16},
        /* Norms in two goes; of each parameter by its name. */
        {"gradient_sync:\n" RIGHT_SUMS "  - {do: divide, of: shared, by: world_tokens}\n"
         "  - {do: norm, of: shared}\n  - {do: divide, of: experts, by: world_tokens}\n"
         "  - {do: norm, of: experts, over: ep}\n" END,
         NULL, 0},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE "  - {do: norm, of: w1, over: ep}\n"
         "  - {do: norm, of: shared}\n  - {do: norm, of: w2, over: ep}\n" END,
         NULL, 0},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE "  - {do: norm, of: w1, over: ep}\n"
         "  - {do: norm, of: shared}\n  - {do: divide, of: router, by: 1}\n"
         "  - {do: norm, of: w2, over: ep}\n" END,
         NULL, 0},
        /* Experts divided by the copies that they have: ep times too large. */
        {"loss: mean_of_ranks\ngradient_sync:\n  - {do: average, of: shared, over: dp}\n"
         "  - {do: average, of: experts, over: edp}\n" RIGHT_NORMS END,
         "(first w1, w2) is 2 times what it should be: the last division of it is by 2, expected by 4",
         1u << 3},
        /* Experts summed over all ranks: those of other experts are added. */
        {"gradient_sync:\n  - {do: sum, over: world}\n" DIVIDE RIGHT_NORMS END,
         "also holds the contributions of 2 ranks that hold other experts: it is summed over 4 ranks, "
         "expected "
         "over the 2 that hold a copy of it",
         1u << 4},
        {"gradient_sync:\n  - {do: sum, of: shared, over: dp}\n" DIVIDE RIGHT_NORMS END,
         "(first w1, w2) lacks the contributions of 1 of the 2 ranks that hold a copy of it: no step sums it",
         1u << 4},
        /* Behind the update: too late. */
        {"gradient_sync:\n" RIGHT_SUMS RIGHT_NORMS END DIVIDE,
         "should be: the division of line 11 comes after the update of line 10", 1u << 3},
        {"gradient_sync:\n" DIVIDE RIGHT_NORMS END RIGHT_SUMS,
         "copy of it: the sum of line 10 comes after the update of line 9, so on rank 0", 1u << 4},
        /* Clipped before there is a norm: once for all parameters. */
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE "  - {do: clip}\n" RIGHT_NORMS "  - {do: update}\n",
         "the step for each of 9 parameters (first", 1u << 5 | 1u << 6},
        /* One parameter forgotten. */
        {"gradient_sync:\n" RIGHT_SUMS "  - {do: divide, of: experts, by: world_tokens}\n"
         "  - {do: divide, of: router, by: world_tokens}\n" RIGHT_NORMS END,
         "(first attention_gain, wqkv, wo) is 48 times what it should be: no step divides it, expected by 48",
         1u << 3},
    };
    expect_orders(order, sizeof order / sizeof *order);
}

static void test_norms(void **state)
{
    (void)state;
    static const struct order order[] = {
        /* Clipped by what the rank's own experts have; then by shared parameters counted four times. */
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE "  - {do: norm}\n" END,
         "expert_norm lacks the squares of 1 of the 2 ranks that together hold every parameter once, and "
         "others "
         "clip by another norm: it is summed over no other rank, so on rank 0: of rank 1",
         1u << 5},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE "  - {do: norm, of: shared, over: world}\n"
         "  - {do: norm, of: experts, over: ep}\n" END,
         "shared_norm counts parameters more than once: it is summed over 4 ranks, expected over 1 that "
         "together "
         "hold every parameter once, so on rank 0: rank 3 holds copies",
         1u << 5},
        /* The norm is taken before the division; not clipped at all; clipped twice. */
        {"gradient_sync:\n" RIGHT_SUMS RIGHT_NORMS DIVIDE END,
         "before a later sum or division: measure it behind them", 1u << 5},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: update}\n",
         "is clipped 0 times before it is used, expected 1: no step clips it", 1u << 5},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: clip}\n" END,
         "is clipped 2 times before it is used, expected 1: leave this one out", 1u << 5},
        {"gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: clip}\n", "is updated 0 times", 1u << 4},
    };
    expect_orders(order, sizeof order / sizeof *order);
}

/* A rank without a token has nothing to add to shared parameters, but divided by its 0 tokens that is NaN. */
static void test_divided_by_no_tokens(void **state)
{
    (void)state;
    static const char *const list = "gradient_sync:\n  - {do: divide, of: shared, by: tokens}\n" RIGHT_SUMS
                                    "  - {do: divide, of: experts, by: world_tokens}\n" RIGHT_NORMS END;
    assert_int_equal(
        classes_with("[12, 0, 0, 0]", list, "by several factors, so on rank 0: that of rank 3 is inf times"),
        1u << 3);
    assert_int_equal(
        classes_with("[12, 0, 0, 0]", "gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS END, NULL), 0);
}

/* One mistake is one verdict, of all parameters that it concerns, and names the line of the step that makes
 * it, or of the list (line 4) where one is missing. */
static void test_lines(void **state)
{
    (void)state;
    static const struct {
        const char *list;
        int check_class, line, n_params;
        const char *first;
    } mistake[] = {
        {"  - {do: sum, over: world}\n" DIVIDE RIGHT_NORMS END, 4, 5, 2, "w1"},
        {"  - {do: sum, of: experts, over: edp}\n" DIVIDE RIGHT_NORMS END, 4, 4, 7, "attention_gain"},
        {"  - {do: sum, of: shared, over: ep}\n  - {do: sum, of: experts, over: edp}\n" DIVIDE RIGHT_NORMS
             END,
         4, 5, 7, "attention_gain"},
        {RIGHT_SUMS "  - {do: sum, of: shared, over: dp}\n" DIVIDE RIGHT_NORMS END, 3, 7, 7,
         "attention_gain"},
        {RIGHT_SUMS DIVIDE "  - {do: divide, of: w1, by: 2}\n" RIGHT_NORMS END, 3, 8, 1, "w1"},
        {RIGHT_SUMS "  - {do: divide, of: experts, by: world_tokens}\n" RIGHT_NORMS END, 3, 4, 7,
         "attention_gain"},
        {"  - {do: divide, by: dp}\n" RIGHT_SUMS RIGHT_NORMS END, 3, 5, 9, "attention_gain"},
        {RIGHT_SUMS DIVIDE "  - {do: norm}\n" END, 5, 8, 0, NULL},
        {RIGHT_SUMS DIVIDE
         "  - {do: norm, of: shared, over: world}\n  - {do: norm, of: experts, over: ep}\n" END,
         5, 8, 0, NULL},
        {RIGHT_SUMS DIVIDE "  - {do: norm, of: shared}\n" END, 5, 4, 2, "w1"},
        {RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: update}\n", 5, 4, 9, "attention_gain"},
        {RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: clip}\n" END, 5, 11, 9, "attention_gain"},
        {RIGHT_SUMS DIVIDE RIGHT_NORMS "  - {do: clip}\n", 4, 4, 9, "embedding"},
        {RIGHT_SUMS DIVIDE RIGHT_NORMS END "  - {do: update, of: wo}\n", 4, 12, 1, "wo"},
    };
    for (size_t i = 0; i < sizeof mistake / sizeof *mistake; i++) {
        char more[1024];
        snprintf(more, sizeof more, "gradient_sync:\n%s", mistake[i].list);
        struct moe_scenario *sc = fixture_scenario(4, 2, "12", more);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        const struct moe_verdict *at = NULL;
        for (int k = 0; k < v.n; k++) {
            if (v.item[k].check_class != mistake[i].check_class) continue;
            if (at) fail_msg("mistake %zu: '%s', and '%s'", i, at->text, v.item[k].text);
            at = &v.item[k];
        }
        if (!at) fail_msg("mistake %zu: no C%d", i, mistake[i].check_class);
        if (at->line != mistake[i].line || at->n_params != mistake[i].n_params)
            fail_msg("mistake %zu: line %d, of %d parameters: %s", i, at->line, at->n_params, at->text);
        if (mistake[i].first) assert_string_equal(at->params[0], mistake[i].first);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

static struct moe_sim_result simulate(struct moe_scenario *sc)
{
    struct moe_sim_result out;
    struct moe_topo *t;
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    assert_int_equal(moe_topo_load("dgx_h100", &t), MOE_OK);
    assert_int_equal(moe_simulate(s, r, t, &out), MOE_OK);
    moe_topo_free(t);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return out;
}

/* What is written out is what a scenario without a list does, to the last event. */
static void test_default(void **state)
{
    (void)state;
    static const char *const more[][2] = {{"", "gradient_sync:\n" RIGHT_SUMS DIVIDE RIGHT_NORMS END},
                                          {"loss: mean_of_ranks\n",
                                           "loss: mean_of_ranks\ngradient_sync:\n" RIGHT_SUMS
                                           "  - {do: divide, by: dp}\n" RIGHT_NORMS END}};
    for (int i = 0; i < 2; i++) {
        struct moe_sim_result result[2];
        for (int k = 0; k < 2; k++) result[k] = simulate(fixture_scenario(4, 2, "12", more[i][k]));
        assert_int_equal(result[0].step, result[1].step);
        assert_int_equal(result[0].events, result[1].events);
        assert_int_equal(result[0].n_rows, result[1].n_rows);
        for (int k = 0; k < 2; k++) moe_sim_free(&result[k]);
    }
}

/* Sums that start behind each layer's backward pass are partly hidden by the layers that follow. */
static void test_overlap(void **state)
{
    (void)state;
    static const char model[] = "model: {layers: 4, hidden: 1024, ffn: 4096, experts: 8, top_k: 2}\n"
                                "layout: {ranks: 8}\ntokens_per_rank: 4096\n";
    char text[512];
    struct moe_sim_result result[2];
    for (int overlap = 0; overlap < 2; overlap++) {
        snprintf(text, sizeof text, "%soverlap_grad_reduce: %s\n", model, overlap ? "true" : "false");
        struct moe_scenario *sc = NULL;
        assert_int_equal(moe_scenario_parse("x.yaml", text, &sc), MOE_OK);
        result[overlap] = simulate(sc);
    }
    assert_true(result[1].step < result[0].step);
    assert_true(result[1].exposed_us < result[0].exposed_us);
    assert_true(result[1].compute_us == result[0].compute_us);
    for (int k = 0; k < MOE_LINK_CLASS_COUNT; k++) assert_int_equal(result[0].bytes[k], result[1].bytes[k]);
    for (int k = 0; k < 2; k++) moe_sim_free(&result[k]);
}

static void test_bad_lists(void **state)
{
    (void)state;
    static const struct {
        const char *list, *error;
    } bad[] = {
        {"gradient_sync: sum\n", "gradient_sync: expected a list of 1 to 256 steps"},
        {"gradient_sync: []\n", "gradient_sync: expected a list of 1 to 256 steps"},
        {"gradient_sync: [{of: all}]\n", "key 'do' is missing"},
        {"gradient_sync: [{do: summ, over: dp}]\n",
         "do: expected one of broadcast, sum, average, divide, norm, clip, "},
        {"gradient_sync: [{do: sum}]\n", "gradient_sync: sum needs over: a group"},
        {"gradient_sync: [{do: sum, over: edq}]\n",
         "over: expected one of none, world, dp, ep, edp, pp, tied, ep_pp, sp, across_sp, not 'edq'"},
        {"gradient_sync: [{do: update, over: dp}]\n", "gradient_sync: update has no group to go over"},
        {"gradient_sync: [{do: divide}]\n", "gradient_sync: divide needs by or times"},
        {"gradient_sync: [{do: update, by: 3}]\n", "gradient_sync: update cannot use by or times"},
        {"gradient_sync: [{do: divide, by: 0}]\n",
         "expected a whole number from 1 to 2^30, or a name, not '0'"},
        {"gradient_sync: [{do: divide, by: world_token}]\n", "did you mean world_tokens"},
        {"gradient_sync: [{do: divide, by: tiet}]\n", "did you mean tied"},
        {"gradient_sync: [{do: divide, by: [2, 2, 2, 2, 2]}]\n", "expected 1 to 4 factors"},
        {"gradient_sync: [{do: clip, of: w1}]\n", "gradient_sync: clip clips all or nothing"},
        {"gradient_sync: [{do: broadcast, over: pp}]\n", "broadcast needs over: world, dp, ep or edp"},
        {"gradient_sync: [{do: update, off: w1}]\n", "unknown key 'off' (did you mean 'of'?)"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_scenario *sc = NULL;
        char text[512];
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 8, experts: 2, top_k: 1}\n"
                 "layout: {ranks: 2}\ntokens_per_rank: 4\n%s",
                 bad[i].list);
        assert_int_equal(moe_scenario_parse("x.yaml", text, &sc), MOE_EINPUT);
        if (strncmp(moe_error(), "x.yaml:4: ", 10) || !strstr(moe_error(), bad[i].error))
            fail_msg("list %zu: %s", i, moe_error());
    }
}

/* Names of parameters are known to the lowering alone. */
static void test_bad_names(void **state)
{
    (void)state;
    struct moe_schedule *s = NULL;
    struct moe_scenario *sc = fixture_scenario(2, 2, "4", "gradient_sync: [{do: update, of: rooter}]");
    assert_int_equal(moe_lower(sc, &s), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "gradient_sync: unknown parameter 'rooter', did you mean router"));
    moe_scenario_free(sc);
    sc = fixture_scenario(2, 2, "4", "clip_norm: 0\ngradient_sync: [{do: clip}]\n");
    assert_int_equal(moe_lower(sc, &s), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "clip needs a clip_norm above 0"));
    moe_scenario_free(sc);
    sc = fixture_scenario(4, 2, "4",
                          "gradient_sync:\n  - {do: broadcast, over: dp}\n"
                          "  - {do: broadcast, of: w1, over: edp}\n");
    assert_int_equal(moe_lower(sc, &s), MOE_EINPUT);
    assert_string_equal(moe_error(), "fixture.yaml:6: gradient_sync: w1 is broadcast already");
    moe_scenario_free(sc);
    sc = fixture_scenario(4, 2, "4",
                          "gradient_sync:\n  - {do: norm, of: w1, over: ep}\n  - {do: norm, over: world}\n");
    assert_int_equal(moe_lower(sc, &s), MOE_EINPUT);
    assert_string_equal(moe_error(), "fixture.yaml:6: gradient_sync: the norm of experts goes over world, on "
                                     "line 5 over ep");
    moe_scenario_free(sc);
    assert_int_equal(moe_scenario_parse("x.yaml",
                                        "model: {layers: 1, hidden: 8, ffn: 8, experts: 2, top_k: 1}\n"
                                        "layout: {ranks: 2}\ntokens_per_rank: [4, 0]\nloss: mean_of_ranks\n",
                                        &sc),
                     MOE_EINPUT);
    assert_string_equal(moe_error(), "x.yaml:3: tokens_per_rank: loss mean_of_ranks has no mean of 0 tokens");
    assert_int_equal(moe_scenario_parse("x.yaml",
                                        "model: {layers: 1, hidden: 8, ffn: 8, experts: 2, top_k: 1}\n"
                                        "layout: {ranks: 2}\ntokens_per_rank: [0, 0]\n",
                                        &sc),
                     MOE_EINPUT);
    assert_string_equal(moe_error(), "x.yaml:3: tokens_per_rank: no rank has a token, and the loss of a step "
                                     "is a mean over its tokens");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_divided_by_no_tokens),
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_default),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_bad_lists),
        cmocka_unit_test(test_bad_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
