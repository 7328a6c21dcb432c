/* What stress finds is the smallest there is, of all routings and tokens of a small scenario, tried one by
 * one; and no class is missed. */
#include "sim/stress.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

#define HEAD                                                                                                 \
    "model: {layers: 1, hidden: 8, ffn: 8, experts: 4, top_k: 1}\nlayout: {ranks: 2, expert_parallel: 2}\n"

enum { E = 4, CLASSES = 32 };

struct results { /* by class: the fewest tokens that show it, 0: none do */
    int64_t tokens[CLASSES];
    int adverse[CLASSES], n_tried;
    bool complete;
};

static void note(void *ctx, const struct moe_stressed *s)
{
    struct results *out = ctx;
    int64_t sum = 0;
    for (int64_t r = 0; r < s->scenario->ranks; r++) sum += s->scenario->tokens[r];
    assert_int_equal(sum, s->tokens * s->scenario->pipeline_parallel);
    for (int c = 0; c < CLASSES; c++) {
        if (!(s->classes >> c & 1)) continue;
        assert_int_equal(out->tokens[c], 0); /* told once */
        out->tokens[c] = s->tokens;
        out->adverse[c] = s->n_adverse;
        bool shown = false;
        for (int i = 0; i < s->verdicts->n; i++) shown |= s->verdicts->item[i].check_class == c;
        assert_true(shown);
    }
    out->complete &= s->complete;
}

static struct moe_scenario *parse(const char *more)
{
    struct moe_scenario *sc = NULL;
    char text[1024];
    snprintf(text, sizeof text, HEAD "%s", more);
    if (moe_scenario_parse("x.yaml", text, &sc) != MOE_OK) fail_msg("%s", moe_error());
    return sc;
}

static struct results stress(const char *more)
{
    struct results out = {.complete = true};
    struct moe_scenario *sc = parse(more);
    if (moe_stress(sc, note, &out, &out.n_tried) != MOE_OK) fail_msg("%s", moe_error());
    moe_scenario_free(sc);
    return out;
}

/* Classes of errors of two ranks with these counts. */
static uint32_t classes_of(const struct moe_scenario *sc, const int32_t counts[2][E])
{
    struct moe_scenario at = *sc;
    int64_t tokens[2] = {0};
    for (int r = 0; r < 2; r++)
        for (int e = 0; e < E; e++) tokens[r] += counts[r][e];
    at.tokens = tokens;
    at.counts = (int32_t *)counts;
    struct moe_schedule *s = fixture_schedule(&at);
    struct moe_routing *r = moe_scenario_routing(&at);
    struct moe_verdicts v;
    uint32_t classes = 0;
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++)
        if (v.item[i].severity == MOE_SEVERITY_ERROR) classes |= 1u << v.item[i].check_class;
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    return classes;
}

static void spread(int64_t tokens, int32_t counts[E])
{
    for (int e = 0; e < E; e++) counts[e] = (int32_t)(tokens / E + (e < tokens % E));
}

/* The next counts of `tokens` rows; false behind the last, which are all of the last expert. */
static bool next_counts(int32_t c[E])
{
    int e = 0;
    while (e < E && c[e] == 0) e++;
    if (e >= E - 1) return false;
    int32_t rest = c[e] - 1;
    c[e] = 0;
    c[e + 1]++;
    c[0] = rest;
    return true;
}

/* Every pair of counts of up to `most` tokens. */
static struct results try_all(const char *more, int most, int least)
{
    struct results out = {0};
    struct moe_scenario *sc = parse(more);
    uint32_t even[16], always;
    int32_t c[2][E];
    for (int t = 1; t <= most; t++) {
        for (int r = 0; r < 2; r++) spread(t, c[r]);
        even[t] = classes_of(sc, c);
    }
    always = even[most];
    for (int a = least; a <= most; a++)
        for (int b = least; b <= most; b++) {
            if (!(a + b)) continue;
            uint32_t small = even[a > b ? a : b] & ~always, classes = 0;
            memset(c, 0, sizeof c);
            c[0][0] = a;
            do {
                memset(c[1], 0, sizeof c[1]);
                c[1][0] = b;
                do classes |= classes_of(sc, c);
                while (next_counts(c[1]));
            } while (next_counts(c[0]));
            for (int i = 0; i < CLASSES; i++)
                if (classes & ~small & 1u << i && (!out.tokens[i] || a + b < out.tokens[i]))
                    out.tokens[i] = a + b;
        }
    moe_scenario_free(sc);
    return out;
}

static void test_smallest(void **state)
{
    (void)state;
    static const struct {
        const char *more;
        int most, least;
    } of[] = {
        {"tokens_per_rank: 3\ndispatcher: gshard\ncapacity: {rule: deepspeed, drop_tokens: false, agree: "
         "false, "
         "min_capacity: 2}\n",
         3, 0},
        {"tokens_per_rank: 3\ndispatcher: gshard\ncapacity: {rule: deepspeed, drop_tokens: false, clamp: "
         "true, "
         "min_capacity: 2}\n",
         3, 0},
        {"tokens_per_rank: 3\ndispatcher: gshard\ncapacity: {rule: deepspeed, factor: 10, min_capacity: 2}\n",
         3, 0},
        {"tokens_per_rank: 4\nlimits: {row_multiple: 2}\nloss: mean_of_ranks\n", 4, 1},
        {"tokens_per_rank: 4\nlimits: {row_multiple: 2, rank_factor: 1.3}\n", 4, 0},
        {"tokens_per_rank: 4\nlimits: {rank_factor: 1.5}\n", 4, 0},
        {"tokens_per_rank: 3\ngradient_sync: [{do: update}]\nclip_norm: 0\nlimits: {rank_factor: 1.5}\n", 3,
         0},
        {"tokens_per_rank: 3\n", 3, 0},
    };
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        struct results found = stress(of[i].more), all = try_all(of[i].more, of[i].most, of[i].least);
        assert_true(found.complete);
        for (int c = 0; c < CLASSES; c++)
            if (found.tokens[c] != all.tokens[c])
                fail_msg("scenario %zu: C%d with %d tokens, of all it takes %d", i, c, (int)found.tokens[c],
                         (int)all.tokens[c]);
    }
}

/* Rows of an expert by 4, of evenly spread tokens 2 x tokens / 4: sizes that this takes at all are 8, 16, 24,
 * of which the sweep (1, 2, 3, 4, 6, 9, 13, 19, 24) has the last; at 8 it breaks when a rank is empty. */
static void test_multiples(void **state)
{
    (void)state;
    struct results found = stress("tokens_per_rank: 24\nlimits: {row_multiple: 4}\n");
    assert_int_equal(found.tokens[8], 8);
    assert_int_equal(found.adverse[8], 0);
}

/* No more than 1.5 rows a token of the rank, experts 0 and 1 on rank 0. Evenly spread, 2 tokens a rank are 4
 * rows on rank 0, above 3: too small. 3 are 4 rows, not above 4. From there on the fewest are 1 token and 3:
 * rank 0 gets 1 row and 2, above 1. No rank need be adverse for that. */
static void test_one_rank(void **state)
{
    (void)state;
    struct results found = stress("tokens_per_rank: 4096\nloss: mean_of_ranks\nlimits: {rank_factor: 1.5}\n");
    for (int c = 0; c < CLASSES; c++) assert_int_equal(found.tokens[c] > 0, c == 11);
    assert_int_equal(found.tokens[11], 4);
    assert_int_equal(found.adverse[11], 0);
    /* Ranks with as many tokens, evenly spread, take one capacity: one must do otherwise. The rule takes 2
     * tokens or more. */
    found = stress("tokens_per_rank: 500\ndispatcher: gshard\n"
                   "capacity: {rule: deepspeed, drop_tokens: false, agree: false, min_capacity: 2}\n");
    assert_int_equal(found.tokens[1], 4);
    assert_int_equal(found.adverse[1], 1);
    /* The sweep has 18,207 and 27,310. */
    found = stress("tokens_per_rank: 65536\ndispatcher: gshard\n"
                   "capacity: {rule: deepspeed, factor: 1, min_capacity: 20000}\n");
    assert_int_equal(found.tokens[8], 20000);
    assert_true(found.complete);
}

/* 64 layers of 64 ranks: 128 checks, and what was found so far. */
static void test_bound(void **state)
{
    (void)state;
    struct results out = {.complete = true};
    struct moe_scenario *sc = NULL;
    static const char text[] = "model: {layers: 64, hidden: 8, ffn: 8, experts: 64, top_k: 1}\n"
                               "layout: {ranks: 64, expert_parallel: 64}\n"
                               "tokens_per_rank: 1000000\nlimits: {rank_factor: 1.5}\n";
    assert_int_equal(moe_scenario_parse("x.yaml", text, &sc), MOE_OK);
    assert_int_equal(moe_stress(sc, note, &out, &out.n_tried), MOE_OK);
    assert_true(out.n_tried <= (1 << 19) / 4096);
    assert_true(out.tokens[11] > 0);
    assert_false(out.complete);
    moe_scenario_free(sc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_smallest), cmocka_unit_test(test_multiples),
                                       cmocka_unit_test(test_one_rank), cmocka_unit_test(test_bound)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
