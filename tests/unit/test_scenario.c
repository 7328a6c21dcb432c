/* Scenarios: presets of models, and the rank order as the lowering lays it out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/fixture.h"

/* A scenario with this model and layout; NULL when it is refused. */
static struct moe_scenario *scenario(const char *model, const char *layout)
{
    char text[512];
    struct moe_scenario *sc = NULL;
    snprintf(text, sizeof text, "tokens_per_rank: 8\nlayout: {%s}\nmodel: {%s}\n", layout, model);
    moe_scenario_parse("s.yaml", text, &sc);
    return sc;
}

/* Parameters of the experts, 3 matrices of hidden x ffn each, in 10^9, against those of the whole model as
 * its paper gives them, which are more: Mixtral 46.7, DeepSeek-V3 671, Qwen3 235, OLMoE 6.9. Switch has 7.4
 * with experts of 2 matrices: 10.87 x 2 / 3 = 7.25. */
static void test_presets(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        double expert_params;
        int top_k, head_size;
    } cases[] = {{"mixtral_8x7b", 45.1, 2, 128},
                 {"deepseek_v3", 653.9, 8, 56},
                 {"qwen3_moe_235b", 227.1, 8, 64},
                 {"olmoe_1b_7b", 6.44, 8, 128},
                 {"switch_base_128", 10.87, 1, 64}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char model[64];
        snprintf(model, sizeof model, "preset: %s", cases[i].name);
        struct moe_scenario *sc = scenario(model, "ranks: 8");
        if (!sc) fail_msg("%s", moe_error());
        double params = 3e-9 * (double)(sc->layers * sc->experts * sc->hidden * sc->ffn);
        if (params < 0.999 * cases[i].expert_params || params > 1.001 * cases[i].expert_params)
            fail_msg("%s: %g billion parameters", cases[i].name, params);
        assert_int_equal(sc->top_k, cases[i].top_k);
        assert_int_equal(sc->hidden / sc->heads, cases[i].head_size);
        moe_schedule_free(fixture_schedule(sc));
        moe_scenario_free(sc);
    }
}

static void test_preset_with_keys(void **state)
{
    (void)state;
    struct moe_scenario *sc = scenario("top_k: 3, preset: mixtral_8x7b, layers: 4, heads: 0", "ranks: 8");
    if (!sc) fail_msg("%s", moe_error());
    assert_true(sc->layers == 4 && sc->top_k == 3 && sc->heads == 0);
    assert_true(sc->hidden == 4096 && sc->ffn == 14336 && sc->experts == 8 && sc->sequence == 4096);
    moe_scenario_free(sc);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *model, *layout, *message;
    } cases[] = {
        {"preset: mixtral_8x7", "ranks: 1",
         "s.yaml:3: unknown preset 'mixtral_8x7' (did you mean 'mixtral_8x7b'?)"},
        {"preset: gpt", "ranks: 1", "s.yaml:3: unknown preset 'gpt'"},
        {"layers: 4, hidden: 8", "ranks: 1", "s.yaml:3: key 'ffn' is missing"},
        {"preset: olmoe_1b_7b, layers: 0", "ranks: 1", "s.yaml:3: layers: expected an integer from 1"},
        {"preset: olmoe_1b_7b, top_k: 64, experts: 8", "ranks: 1", "s.yaml:3: top_k 64 is above experts 8"},
        {"preset: olmoe_1b_7b, heads: 3", "ranks: 1", "s.yaml:3: hidden 2048 does not split into 3 heads"},
        {"preset: mixtral_8x7b", "ranks: 16", "s.yaml:2: expert_parallel 16 does not divide experts 8"},
        {"preset: mixtral_8x7b", "ranks: 6, expert_parallel: 4",
         "s.yaml:2: expert_parallel 4 does not divide ranks 6"},
        {"preset: mixtral_8x7b", "ranks: 8, rank_order: rows",
         "s.yaml:2: rank_order: expected one of consecutive, strided"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_null(scenario(cases[i].model, cases[i].layout));
        if (!strstr(moe_error(), cases[i].message))
            fail_msg("'%s' does not hold '%s'", moe_error(), cases[i].message);
    }
}

/* Keys of capacity belong to a rule (and DeepSpeed's gates, by top_k); counts are those of the tokens. */
static void test_refused_capacity(void **state)
{
    (void)state;
    static const struct {
        int top_k;
        const char *more, *message; /* "": accepted */
    } cases[] = {
        {1, "capacity: {rule: deepspeed, factor: 0}", "s.yaml:4: factor: expected"},
        {1, "capacity: {rule: megatron, factor: -1}", "s.yaml:4: factor: expected"},
        {1, "capacity: {rule: tutel, factor: -1.5}", ""},
        {1, "capacity: {rule: tutel, factor: 0, align: 0}", "s.yaml:4: align: expected"},
        {1, "capacity: {rule: megatron, min_capacity: 4}",
         "s.yaml:4: key 'min_capacity' belongs to rule deepspeed, not megatron"},
        {1, "capacity: {rule: tutel, pad: true}", "s.yaml:4: key 'pad' belongs to rule megatron, not tutel"},
        {1, "capacity: {rule: dropless, factor: 2}",
         "s.yaml:4: key 'factor' belongs to rule megatron, deepspeed, tutel, not dropless"},
        {1, "capacity: {rule: deepspeed, unequal_tokens: true}",
         "s.yaml:4: key 'unequal_tokens' belongs to rule tutel, not deepspeed"},
        {1, "capacity: {rule: deepspeed, drop_token: true}",
         "s.yaml:4: unknown key 'drop_token' (did you mean 'drop_tokens'?)"},
        {1, "capacity: {rule: deepspeed, random_tokens: false, seed: 3}", ""},
        {2, "capacity: {rule: deepspeed, random_tokens: false}",
         "s.yaml:4: key 'random_tokens' of rule deepspeed needs top_k: 1, not 2"},
        {2, "capacity: {rule: deepspeed, drop: probs}",
         "s.yaml:4: key 'drop' of rule deepspeed needs a top_k of 3 or more, not 2"},
        {3, "capacity: {rule: deepspeed, drop: probs}", ""},
        {3, "capacity: {rule: deepspeed, clamp: maybe}", "s.yaml:4: clamp: expected one of false, true"},
        {1, "capacity: {rule: tutl, min_capacity: 4}",
         "s.yaml:4: unknown capacity rule 'tutl', did you mean tutel"},
        {1, "dispatcher: altoall", "s.yaml:4: unknown dispatcher 'altoall', did you mean alltoall"},
        {1, "capacity: {factor: 1}", "s.yaml:4: key 'rule' is missing"},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 2, 2]]]}", ""},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 2, 1]]]}",
         "s.yaml:4: counts: layer 0, rank 1: their sum is 7, expected 8 tokens x top_k 1"},
        {2, "routing: {counts: [[[9, 7, 0, 0], [4, 4, 4, 4]]]}",
         "s.yaml:4: counts: layer 0, rank 0, expert 0: expected a whole number from 0 to 8, the rank's "
         "tokens"},
        {1, "routing: {counts: [[[8, 0, 0, x], [2, 2, 2, 2]]]}",
         "s.yaml:4: counts: layer 0, rank 0, expert 3: expected a whole number"},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 4]]]}",
         "s.yaml:4: counts: layer 0, rank 1: expected a list with one entry per expert (4), but it has 3"},
        {1, "routing: {counts: [[[8, 0, 0, 0]]]}",
         "s.yaml:4: counts: layer 0: expected a list with one entry per rank (2), but it has 1"},
        {1, "routing: {counts: 8}",
         "s.yaml:4: counts: expected a list with one entry per layer (1), but it is no list"},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 2, 2]]], skew: 1}", "s.yaml:4: unknown key 'skew'"},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 2, 2]]], step: 3}", ""},
        {1, "routing: {counts: [[[8, 0, 0, 0], [2, 2, 2, 2]]], step: -1}", "s.yaml:4: step: expected"},
        {1, "routing: {skew: 1, step: 3}", "s.yaml:4: unknown key 'step'"},
        {1, "apply_probs: away", "s.yaml:4: apply_probs: expected one of dispatcher, home, expert"},
        {1, "padding: {tokens: 8, masked: true}",
         "s.yaml:2: tokens_per_rank: no rank has a token that is no padding, and the loss"},
        {1, "padding: {tokens: 7, masked: true}", ""},
        {1, "row_dot: by_row", "s.yaml:4: row_dot: expected one of fixed, by_rows"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        struct moe_scenario *sc = NULL;
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 8, experts: 4, top_k: %d}\ntokens_per_rank: 8\n"
                 "layout: {ranks: 2}\n%s\n",
                 cases[i].top_k, cases[i].more);
        int err = moe_scenario_parse("s.yaml", text, &sc);
        if ((err == MOE_OK) != !*cases[i].message || (err < 0 && !strstr(moe_error(), cases[i].message)))
            fail_msg("%s: '%s' does not hold '%s'", cases[i].more, err < 0 ? moe_error() : "accepted",
                     cases[i].message);
        moe_scenario_free(sc);
    }
}

/* 8 ranks, 4 split the experts. Consecutive: {0 1 2 3} {4 5 6 7}, copies {0 4} {1 5} {2 6} {3 7}; strided:
 * {0 2 4 6} {1 3 5 7}, copies {0 1} {2 3} {4 5} {6 7}. */
static void test_rank_order(void **state)
{
    (void)state;
    static const int members[2][2][8] = {{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 4, 1, 5, 2, 6, 3, 7}},
                                         {{0, 2, 4, 6, 1, 3, 5, 7}, {0, 1, 2, 3, 4, 5, 6, 7}}};
    for (int order = 0; order < MOE_RANK_ORDER_COUNT; order++) {
        char layout[96];
        snprintf(layout, sizeof layout, "ranks: 8, expert_parallel: 4, rank_order: %s",
                 moe_rank_order_text[order]);
        struct moe_scenario *sc = scenario("preset: mixtral_8x7b, layers: 1", layout);
        if (!sc) fail_msg("%s", moe_error());
        struct moe_schedule *s = fixture_schedule(sc);
        for (int c = 0; c < 2; c++) {
            const struct moe_comm *comm = &s->comms[1 + c];
            assert_string_equal(comm->name, c == 0 ? "ep" : "edp");
            assert_int_equal(comm->n_groups, c == 0 ? 2 : 4);
            assert_memory_equal(comm->members, members[order][c], sizeof members[order][c]);
        }
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets),    cmocka_unit_test(test_preset_with_keys),
        cmocka_unit_test(test_refused),    cmocka_unit_test(test_refused_capacity),
        cmocka_unit_test(test_rank_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
