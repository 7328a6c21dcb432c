/* Numbers above 63 bits: check says so, of what a scenario may ask for and of each place that makes sizes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check/check.h"
#include "tests/fixture.h"

/* 2^40 * 2^40 */
static int above(struct moe_schedule *s)
{
    int a = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = (int64_t)1 << 40});
    return fixture_expr(s, (struct moe_expr){MOE_EXPR_MUL, .a = a, .b = a});
}

static struct moe_op *op_of(struct moe_schedule *s, enum moe_kernel kernel)
{
    for (int b = 0; b < s->roles[0].n_blocks; b++)
        for (int o = 0; o < s->roles[0].blocks[b].n_ops; o++) {
            struct moe_op *op = &s->roles[0].blocks[b].ops[o];
            if (op->kind == MOE_KERNEL && op->kernel == kernel) return op;
        }
    moe_bug(__FILE__, __LINE__, moe_kernel_text[kernel]);
}

/* The one verdict is of this class, names all ranks and says these words. */
static void expect(struct moe_schedule *s, const struct moe_scenario *sc, int check_class, const char *words)
{
    struct moe_routing *r = moe_scenario_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++)
        print_message("C%d %s: %s\n", v.item[i].check_class, v.item[i].op, v.item[i].text);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, check_class);
    assert_int_equal(v.item[0].n_ranks, s->n_ranks);
    assert_non_null(strstr(v.item[0].text, words));
    moe_verdicts_free(&v);
    moe_routing_free(r);
}

/* 64 choices of 2^24 tokens, each with a million rows of 2^16 elements. */
static void test_scenario(void **state)
{
    (void)state;
    struct moe_scenario *sc = NULL;
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    fprintf(f, "model: {layers: 1, hidden: 65536, ffn: 8, experts: 64, top_k: 64, heads: 0}\n"
               "layout: {ranks: 2, expert_parallel: 2}\ntokens_per_rank: 16777216\ndispatcher: gshard\n"
               "capacity: {rule: tutel, factor: 1e6}\nrouting:\n  counts:\n    -");
    for (int r = 0; r < 2; r++) {
        fprintf(f, "%s- [16777216", r ? "      " : " ");
        for (int e = 1; e < 64; e++) fprintf(f, ", 16777216");
        fprintf(f, "]\n");
    }
    fclose(f);
    if (moe_scenario_parse("large.yaml", text, &sc) < 0) fail_msg("%s", moe_error());
    struct moe_schedule *s = fixture_schedule(sc);
    expect(s, sc, 1, "its sizes exceed 64 bits");
    moe_schedule_free(s);
    moe_scenario_free(sc);
    free(text);
}

/* Of 2^32 tokens the square is above 63 bits. */
static void test_divisors(void **state)
{
    (void)state;
    static const struct {
        const char *more;
        int check_class;
    } cases[] = {{"aux_loss: {coefficient: 1, times: group_tokens}", 7},
                 {"gradient_sync: [{do: sum, of: shared, over: dp}, {do: sum, of: experts, over: edp}, "
                  "{do: divide, by: [world_tokens, ep, world_tokens], times: [ep, world_tokens]}, "
                  "{do: norm, of: shared}, {do: norm, of: experts, over: ep}, {do: clip}, {do: update}]",
                  3},
                 {"aux_loss: 1", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_scenario *sc = fixture_scenario(1024, 2, "4194304", cases[i].more);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = moe_routing_new(s->n_layers, s->n_ranks, s->n_experts, s->top_k);
        memcpy(r->tokens, sc->tokens, (size_t)s->n_ranks * sizeof *r->tokens);
        for (int64_t k = 0; k < (int64_t)s->n_layers * s->n_ranks * s->n_experts; k++)
            r->counts[k] =
                (int32_t)(sc->tokens[0] * s->top_k / s->n_experts); /* to draw them takes minutes */
        struct moe_verdicts v;
        bool told = !cases[i].check_class;
        moe_check(s, r, &v);
        for (int k = 0; k < v.n; k++) {
            assert_int_equal(v.item[k].check_class, cases[i].check_class);
            told |= !strcmp(v.item[k].text, "its divisor exceeds 64 bits");
        }
        assert_true(told);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

enum place { SIZE, NEED, NUMBER_OF_DEVICE, ALL_SENT, ROOM, CLAIM, PLACES };
static const struct {
    const char *scenario;
    int check_class;
    const char *words;
} places[PLACES] = {
    [SIZE] = {"dispatcher: alltoall", 1, "its sizes exceed 64 bits"},
    [NEED] = {"capacity: {rule: megatron, factor: 0.5, pad: true}", 8, "one of the two exceeds 64 bits"},
    [NUMBER_OF_DEVICE] = {"dispatcher: gshard\ncapacity: {rule: tutel, factor: 1.0, unequal_tokens: true}", 1,
                          "its sizes exceed 64 bits"},
    [ALL_SENT] = {"dispatcher: alltoall", 1, "its sizes exceed 64 bits"},
    [ROOM] = {"dispatcher: alltoall", 14, "its elements exceed 64 bits"},
    [CLAIM] = {"dispatcher: deepep_low_latency\nmax_dispatch_tokens: [8, 9]", 10,
               "one of the two exceeds 64 bits"},
};

static void plant(struct moe_schedule *s, enum place place)
{
    struct moe_op *op;
    switch (place) {
    case SIZE: op_of(s, MOE_K_PERMUTE)->dims[3] = above(s); break;
    case NEED: op_of(s, MOE_K_LIMIT)->low = above(s); break;
    case NUMBER_OF_DEVICE: op_of(s, MOE_K_SET)->dims[0] = above(s); break;
    case ALL_SENT: /* each peer's part is in range, their sum is not */
        op = fixture_op(&s->roles[0], MOE_FORWARD, "dispatch");
        op->send = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = INT64_MAX / 2});
        break;
    case CLAIM: s->claims[0].high = above(s); break;
    default: s->buffers[op_of(s, MOE_K_RMSNORM)->writes[0].buffer].extent = above(s); break;
    }
}

static void test_places(void **state)
{
    (void)state;
    for (int i = 0; i < PLACES; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 4, "6", places[i].scenario);
        struct moe_schedule *s = fixture_schedule(sc);
        plant(s, (enum place)i);
        expect(s, sc, places[i].check_class, places[i].words);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_scenario), cmocka_unit_test(test_divisors),
                                       cmocka_unit_test(test_places)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
