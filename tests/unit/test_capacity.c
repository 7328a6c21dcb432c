/* Capacities of every rule, against the vectors of the frameworks' formulas: read off the schedule, so that
 * there is no second formula here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check/check.h"
#include "tests/fixture.h"

/* Source: founding_cases.md A.0b, "Capacity test vectors"; the last is its ceil trap: T / E = 100, factor 1.1
 * gives ceil(110.00000000000001) = 111 in double (110 in float). */
static const struct {
    int tokens, experts, top_k;
    double factor;
    int64_t capacity;
} vectors[] = {{2048, 8, 2, 1.0, 512}, {2048, 8, 2, 1.25, 640}, {4096, 64, 6, 1.0, 384},
               {100, 8, 2, 1.0, 25},   {7, 4, 2, 1.0, 4},       {3, 8, 1, 1.0, 1},
               {1, 8, 1, 1.0, 1},      {10, 8, 2, 4.0, 10},     {4096, 256, 8, 1.1, 141},
               {800, 8, 1, 1.1, 111}};

/* A scenario with one layer and everything that its ranks compute from its counts. */
struct lowered {
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_routing *r;
    struct moe_values *v;
    const struct moe_op *limit;
};

/* Runs the operations up to LIMIT on all ranks. */
static struct lowered lowered(const char *layout, int experts, int top_k, const char *tokens,
                              const char *more)
{
    char text[1024];
    snprintf(text, sizeof text,
             "model: {layers: 1, hidden: 8, ffn: 4, experts: %d, top_k: %d}\nlayout: %s\n"
             "tokens_per_rank: %s\n%s\n",
             experts, top_k, layout, tokens, more);
    struct lowered out;
    if (moe_scenario_parse("vector.yaml", text, &out.sc) < 0) fail_msg("%s", moe_error());
    out.s = fixture_schedule(out.sc);
    out.r = fixture_routing(out.sc);
    out.v = moe_values_new(out.s, out.r);
    out.limit = fixture_op(&out.s->roles[0], MOE_FORWARD, "limit");
    const struct moe_op **ops = moe_alloc((size_t)out.s->n_ranks, sizeof *ops);
    for (const struct moe_op *op = fixture_block(&out.s->roles[0], out.limit)->ops; op < out.limit; op++) {
        for (int rank = 0; rank < out.s->n_ranks; rank++) {
            ops[rank] = op;
            if (op->kind == MOE_KERNEL) moe_values_kernel(out.v, op, rank, 0);
            if (op->kind == MOE_HOST_SYNC) moe_values_host_sync(out.v, op, rank, 0);
        }
        for (int g = 0; op->kind == MOE_COLLECTIVE && g < out.s->comms[op->comm].n_groups; g++)
            moe_values_collective(out.v, ops, op->comm, g, 0);
    }
    free(ops);
    return out;
}

static int64_t capacity_of(const struct lowered *l, int rank)
{
    return moe_eval(l->s, moe_values_host(l->v), l->limit->dims[3], rank, 0, 0);
}

static void release(struct lowered *l)
{
    moe_values_free(l->v);
    moe_routing_free(l->r);
    moe_schedule_free(l->s);
    moe_scenario_free(l->sc);
}

static int64_t one_capacity(int experts, int top_k, int tokens, const char *more)
{
    char number[24];
    snprintf(number, sizeof number, "%d", tokens);
    struct lowered l = lowered("{ranks: 1}", experts, top_k, number, more);
    int64_t C = capacity_of(&l, 0);
    release(&l);
    return C;
}

static void test_megatron(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        char more[128];
        snprintf(more, sizeof more, "capacity: {rule: megatron, factor: %.17g, pad: true}",
                 vectors[i].factor);
        assert_int_equal(one_capacity(vectors[i].experts, vectors[i].top_k, vectors[i].tokens, more),
                         vectors[i].capacity);
    }
}

/* Source: founding_cases.md A.1, "Test vectors", and the ceil trap of A.0b. The framework's test asks for the
 * capacity of (3, 4, 1, 8.0) with min_capacity 4, which a top-1 gate would refuse: here 3. */
static void test_deepspeed(void **state)
{
    (void)state;
    static const struct {
        int tokens, experts, top_k;
        double factor;
        int min_capacity;
        int64_t capacity;
    } of[] = {{8, 4, 1, 1.0, 4, 4},    {8, 4, 1, 1.25, 0, 3},      {100, 128, 1, 10.0, 4, 8},
              {5, 4, 1, 1.0, 4, 4},    {4096, 8, 2, 1.0, 4, 1024}, {3, 4, 1, 8.0, 3, 6},
              {8, 2, 2, 2.0, 0, 16},   {8, 2, 1, 4.0, 0, 16},      {10, 4, 2, 1.0, 0, 5},
              {800, 8, 1, 1.1, 0, 110}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        char more[128];
        snprintf(more, sizeof more, "capacity: {rule: deepspeed, factor: %.17g, min_capacity: %d}",
                 of[i].factor, of[i].min_capacity);
        assert_int_equal(one_capacity(of[i].experts, of[i].top_k, of[i].tokens, more), of[i].capacity);
    }
}

/* Source: founding_cases.md A.2: vectors, int trap (100 tokens an expert; 0.29 x 100 is 28.999999999999996
 * and 1.15 x 100 114.99999999999999 in double), and a capacity of 0. */
static void test_tutel(void **state)
{
    (void)state;
    static const struct {
        int tokens, experts, top_k;
        double factor;
        int64_t capacity;
    } of[] = {{8, 4, 2, 1.0, 4},     {8, 4, 2, 1.25, 4},     {10, 4, 2, 1.25, 6},
              {10, 4, 1, 1.0, 3},    {7, 4, 1, 1, 2},        {9, 4, 1, 1, 3},
              {800, 8, 1, 0.29, 28}, {800, 8, 1, 1.15, 114}, {3, 8, 2, 0.5, 0}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        char more[128];
        snprintf(more, sizeof more, "capacity: {rule: tutel, factor: %.17g}", of[i].factor);
        assert_int_equal(one_capacity(of[i].experts, of[i].top_k, of[i].tokens, more), of[i].capacity);
    }
}

/* Capacities that follow from counts, of two ranks that split the experts: {rank 0, rank 1}.
 * Source: founding_cases.md, corrections to case 1, A.1 (no-drop vectors) and A.2 (factors 0 and below,
 * unequal tokens); 512 tokens of 8 experts top-2 are 1,024 rows, 128 an expert. */
static const struct agreed {
    const char *name;
    int experts, top_k;
    const char *tokens, *capacity_rule, *counts;
    int64_t capacity[2];
} agreed[] = {
#define NO_DROP "rule: deepspeed, drop_tokens: false, min_capacity: 3"
#define FULL "[211, 200, 200, 160, 100, 80, 50, 23]"
#define EVEN "[128, 128, 128, 128, 128, 128, 128, 128]"
    {"a: no maximum", 4, 1, "[4, 3]", NO_DROP ", agree: false", "[4, 0, 0, 0], [3, 0, 0, 0]", {4, 3}},
    {"a: the clamp is not what differs",
     4,
     1,
     "8",
     NO_DROP ", agree: false",
     "[6, 2, 0, 0], [2, 2, 2, 2]",
     {6, 2}},
    {"b: maximum, then clamp", 4, 1, "[4, 3]", NO_DROP, "[4, 0, 0, 0], [1, 1, 1, 0]", {4, 3}},
    {"c: without the clamp", 4, 1, "[4, 3]", NO_DROP ", clamp: false", "[4, 0, 0, 0], [1, 1, 1, 0]", {4, 4}},
    {"d: factor 10",
     4,
     1,
     "[4, 3]",
     "rule: deepspeed, factor: 10, min_capacity: 3",
     "[4, 0, 0, 0], [1, 1, 1, 0]",
     {10, 8}},
    {"top-2: both choices count", 2, 2, "5", NO_DROP, "[5, 5], [5, 5]", {5, 5}},
    {"top-2: no clamp", 4, 2, "[5, 1]", NO_DROP, "[5, 3, 2, 0], [1, 1, 0, 0]", {5, 5}},
    {"factor above 0: own tokens",
     4,
     1,
     "[7, 9]",
     "rule: tutel, factor: 1",
     "[7, 0, 0, 0], [0, 9, 0, 0]",
     {2, 3}},
    {"factor above 0: the most tokens",
     4,
     1,
     "[7, 9]",
     "rule: tutel, factor: 1, unequal_tokens: true",
     "[7, 0, 0, 0], [0, 9, 0, 0]",
     {3, 3}},
    {"factor 0", 8, 2, "512", "rule: tutel, factor: 0", FULL ", " EVEN, {211, 211}},
    {"factor 0, aligned", 8, 2, "512", "rule: tutel, factor: 0, align: 8", FULL ", " EVEN, {216, 216}},
    {"factor below 0: the bound", 8, 2, "512", "rule: tutel, factor: -1", FULL ", " EVEN, {128, 128}},
    {"factor below 0: the largest count",
     4,
     1,
     "[8, 1]",
     "rule: tutel, factor: -2, unequal_tokens: true",
     "[3, 3, 1, 1], [0, 0, 0, 1]",
     {3, 3}},
    {"factor below 0: own bounds",
     4,
     1,
     "[9, 7]",
     "rule: tutel, factor: -2",
     "[9, 0, 0, 0], [7, 0, 0, 0]",
     {6, 4}},
    {"an alignment above 256 is rounded up itself",
     4,
     1,
     "8",
     "rule: tutel, factor: 1, align: 257",
     "[8, 0, 0, 0], [8, 0, 0, 0]",
     {384, 384}},
};

static void test_from_counts(void **state)
{
    (void)state;
    for (const struct agreed *a = agreed; a < agreed + sizeof agreed / sizeof *agreed; a++) {
        char more[512];
        snprintf(more, sizeof more, "capacity: {%s}\nrouting: {counts: [[%s]]}", a->capacity_rule, a->counts);
        struct lowered l = lowered("{ranks: 2}", a->experts, a->top_k, a->tokens, more);
        for (int rank = 0; rank < 2; rank++)
            if (capacity_of(&l, rank) != a->capacity[rank])
                fail_msg("%s: rank %d: %d", a->name, rank, (int)capacity_of(&l, rank));
        release(&l);
    }
}

/* By hand: 2 ranks, 4 experts, top-1, 8 and 4 tokens, factor 1: C is 2 and 1. Rank 0 sends 5, 2, 1, 0 rows,
 * drops 3 and pads 0 + 0 + 1 + 2; rank 1 sends 0, 4, 0, 0, drops 3 and pads 1 + 0 + 1 + 1. Twice, for two
 * layers. */
static void test_kept(void **state)
{
    (void)state;
    static const int32_t counts[2][4] = {{5, 2, 1, 0}, {0, 4, 0, 0}};
    for (int pad = 0; pad < 3; pad++) { /* 2: a dispatcher that does not pad */
        char text[512];
        snprintf(text, sizeof text,
                 "model: {layers: 2, hidden: 8, ffn: 4, experts: 4, top_k: 1}\nlayout: {ranks: 2}\n"
                 "tokens_per_rank: [8, 4]\ndispatcher: %s\ncapacity: {rule: megatron, pad: %s}\n",
                 pad == 2 ? "allgather" : "alltoall", pad ? "true" : "false");
        struct moe_scenario *sc;
        assert_int_equal(moe_scenario_parse("kept.yaml", text, &sc), 0);
        struct moe_routing *r = moe_routing_new(2, 2, 4, 1);
        for (int l = 0; l < 2; l++)
            for (int rank = 0; rank < 2; rank++)
                memcpy(moe_routing_counts(r, l, rank), counts[rank], sizeof counts[rank]);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_kept kept = moe_values_kept(s, r);
        assert_int_equal(kept.chosen, 2 * 12);
        assert_int_equal(kept.dropped, 2 * 6);
        assert_int_equal(kept.padded, pad == 1 ? 2 * 6 : 0);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* Who stays, and over which choices probabilities are normalised, which combine then weighs rows by.
 * Source: founding_cases.md A.0b 3, A.1 2 to 4, A.2 2. */
static void test_order_and_gates(void **state)
{
    (void)state;
    static const struct {
        int top_k;
        const char *rule;
        int order;
        const char *over; /* NULL: probabilities stay as they are */
    } of[] = {{1, "deepspeed", MOE_LIMIT_RANDOM, NULL},
              {1, "deepspeed, random_tokens: false", MOE_LIMIT_BY_POSITION, NULL},
              {2, "deepspeed", MOE_LIMIT_BY_CHOICE, "kept_expert"},
              {3, "deepspeed", MOE_LIMIT_BY_PROB, "kept_expert"},
              {3, "deepspeed, drop: position", MOE_LIMIT_BY_POSITION, "kept_expert"},
              {1, "tutel", MOE_LIMIT_BY_CHOICE, NULL},
              {2, "tutel", MOE_LIMIT_BY_CHOICE, "expert"},
              {2, "megatron", MOE_LIMIT_BY_PROB, NULL}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        char more[128];
        snprintf(more, sizeof more, "capacity: {rule: %s}", of[i].rule);
        struct lowered l = lowered("{ranks: 1}", 4, of[i].top_k, "8", more);
        struct moe_role *role = &l.s->roles[0];
        int by = fixture_op(role, MOE_FORWARD, "unpermute")->reads[1].buffer;
        assert_int_equal(l.limit->mode & MOE_LIMIT_ORDER, of[i].order);
        assert_string_equal(l.s->buffers[by].name, of[i].over ? "gate" : "prob");
        if (of[i].over) {
            const struct moe_op *normalize = fixture_op(role, MOE_FORWARD, "normalize");
            assert_int_equal(normalize->writes[0].buffer, by);
            assert_string_equal(l.s->buffers[normalize->reads[1].buffer].name, of[i].over);
        }
        release(&l);
    }
}

/* By hand: 2 ranks, 4 experts, top-1, 8 tokens each, padded by gshard. The largest counts are 5 and 4: with
 * factor 0 C is 5 on both, which keeps all and pads 2 x 4 x 5 - 16; with factor -1 the bound int(1 x 2) is
 * below, drops 3 + 2 + 2 and pads to 2. Dropless padded is as factor 0. */
static void test_kept_by_agreement(void **state)
{
    (void)state;
    static const struct {
        const char *rule;
        int64_t dropped, padded;
    } of[] = {
        {"rule: tutel, factor: 0", 0, 24}, {"rule: tutel, factor: -1", 7, 7}, {"rule: dropless", 0, 24}};
    for (int i = 0; i < 3; i++) {
        char more[256];
        snprintf(more, sizeof more,
                 "dispatcher: gshard\ncapacity: {%s}\nrouting: {counts: [[[5, 2, 1, 0], [0, 4, 0, 4]]]}",
                 of[i].rule);
        struct lowered l = lowered("{ranks: 2}", 4, 1, "8", more);
        struct moe_kept kept = moe_values_kept(l.s, l.r);
        assert_int_equal(kept.chosen, 16);
        assert_int_equal(kept.dropped, of[i].dropped);
        assert_int_equal(kept.padded, of[i].padded);
        release(&l);
    }
}

/* A capacity of its own in every layer: 5 rows an expert in layer 0, 8 in layer 1, of each of 2 ranks. */
static void test_layers_differ(void **state)
{
    (void)state;
    static const char text[] =
        "model: {layers: 2, hidden: 8, ffn: 4, experts: 4, top_k: 1}\n"
        "layout: {ranks: 2}\ntokens_per_rank: 8\ndispatcher: gshard\n"
        "routing: {counts: [[[5, 2, 1, 0], [2, 2, 2, 2]], [[2, 2, 2, 2], [0, 0, 0, 8]]]}\n";
    static const int64_t C[] = {5, 8};
    struct moe_scenario *sc;
    assert_int_equal(moe_scenario_parse("layers.yaml", text, &sc), 0);
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_values *v = moe_values_new(s, r);
    const struct moe_op *experts = fixture_op(&s->roles[0], MOE_FORWARD, "expert_in");
    const struct moe_block *block = fixture_block(&s->roles[0], experts);
    struct moe_env env = moe_values_host(v);
    for (int layer = 0; layer < 2; layer++) {
        for (const struct moe_op *op = block->ops; op < experts; op++) {
            for (int rank = 0; rank < 2 && op->kind == MOE_KERNEL; rank++)
                moe_values_kernel(v, op, rank, layer);
            const struct moe_op *both[] = {op, op};
            if (op->kind == MOE_COLLECTIVE) moe_values_collective(v, both, op->comm, 0, layer);
            if (op->kind == MOE_HOST_SYNC) moe_values_host_sync(v, op, 1, layer);
        }
        for (int e = 0; e < 2; e++)
            assert_int_equal(env.value(env.ctx, experts->group, 1, layer, e), 2 * C[layer]);
    }
    moe_values_free(v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Rank 2 takes the sum where the others take the largest; and a maximum of what is no
 * integer is malformed. */
static void test_other_reduction(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_scenario(4, 2, "6", "dispatcher: gshard\ncapacity: {rule: tutel, factor: 0}");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    fixture_op(moe_schedule_split_role(s, 2), MOE_FORWARD, "group_largest_count")->reduction = MOE_REDUCE_SUM;
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 1);
    assert_int_equal(v.item[0].ranks[0], 2);
    assert_true(v.item[0].undefined);
    assert_non_null(
        strstr(v.item[0].text, "1 int64 (allreduce) to rank 3, which expects 1 int64 (allreduce max)"));
    moe_verdicts_free(&v);
    assert_int_equal(moe_schedule_check(s), MOE_OK);
    fixture_op(&s->roles[0], MOE_SYNC, "sum_router")->reduction = MOE_REDUCE_MAX;
    assert_int_equal(moe_schedule_check(s), MOE_EFAILED);
    assert_string_equal(moe_error(), "malformed schedule: layer sum_router: reduction");
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Groups of G tokens: S is G, or the tokens of a rank that has fewer. By hand, 4 experts, top-1, 3 and 7
 * tokens; a top-1 gate that needs 4 tokens stops on rank 0, whatever G is, and on both where G is 2. */
static void test_groups(void **state)
{
    (void)state;
    static const struct {
        const char *rule;
        int64_t capacity[2];
        bool stops[2];
    } of[] = {{"rule: megatron, factor: 2, group_tokens: 8", {2, 4}},
              {"rule: megatron, factor: 2, group_tokens: 5", {2, 3}},
              {"rule: deepspeed, factor: 2, min_capacity: 0, group_tokens: 8", {2, 4}},
              {"rule: deepspeed, factor: 2, group_tokens: 8", {4, 4}, {true, false}},
              {"rule: deepspeed, factor: 2, group_tokens: 5", {4, 4}, {true, false}},
              {"rule: deepspeed, factor: 2, group_tokens: 2", {4, 4}, {true, true}},
              {"rule: deepspeed, drop_tokens: false, group_tokens: 8, min_capacity: 3", {3, 7}},
              {"rule: deepspeed, drop_tokens: false, group_tokens: 5, min_capacity: 3", {3, 5}},
              {"rule: tutel, factor: 2, group_tokens: 8", {2, 4}},
              {"rule: tutel, factor: 2, group_tokens: 8, unequal_tokens: true", {4, 4}},
              {"rule: tutel, factor: 2, group_tokens: 4, unequal_tokens: true", {2, 2}}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        char more[256];
        snprintf(more, sizeof more, "capacity: {%s}\nrouting: {counts: [[[3, 0, 0, 0], [7, 0, 0, 0]]]}",
                 of[i].rule);
        struct lowered l = lowered("{ranks: 2}", 4, 1, "[3, 7]", more);
        struct moe_env host = moe_values_host(l.v);
        for (int rank = 0; rank < 2; rank++) {
            if (capacity_of(&l, rank) != of[i].capacity[rank])
                fail_msg("%s: rank %d: %d", of[i].rule, rank, (int)capacity_of(&l, rank));
            bool stops = l.limit->needs && moe_eval(l.s, host, l.limit->low, rank, 0, 0) >
                                               moe_eval(l.s, host, l.limit->high, rank, 0, 0);
            if (stops != of[i].stops[rank]) fail_msg("%s: rank %d: stops %d", of[i].rule, rank, stops);
        }
        release(&l);
    }
}

/* Random tokens are drawn by their numbers: no two ranks of a stage have the same, however many they have,
 * and a token has the same in every stage. */
static void test_numbers_of_tokens(void **state)
{
    (void)state;
    static const struct {
        const char *layout, *tokens;
        int64_t first[4];
    } of[] = {{"expert_parallel: 2", "[5, 0, 3, 6]", {0, 5, 5, 8}},
              {"pipeline_parallel: 2", "[5, 4, 5, 4]", {0, 5, 0, 5}}};
    for (int i = 0; i < 2; i++) {
        char text[256];
        snprintf(text, sizeof text,
                 "model: {layers: 2, hidden: 8, ffn: 4, experts: 4, top_k: 1}\nlayout: {ranks: 4, %s}\n"
                 "tokens_per_rank: %s\ncapacity: {rule: deepspeed, min_capacity: 0}\n",
                 of[i].layout, of[i].tokens);
        struct moe_scenario *sc;
        assert_int_equal(moe_scenario_parse("numbers.yaml", text, &sc), 0);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_values *v = moe_values_new(s, r);
        for (int rank = 0; rank < 4; rank++) {
            const struct moe_op *limit = fixture_op(&s->roles[s->role_of[rank]], MOE_FORWARD, "limit");
            assert_int_equal(moe_eval(s, moe_values_host(v), limit->dims[5], rank, 0, 0), of[i].first[rank]);
        }
        moe_values_free(v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups),         cmocka_unit_test(test_numbers_of_tokens),
        cmocka_unit_test(test_megatron),       cmocka_unit_test(test_deepspeed),
        cmocka_unit_test(test_tutel),          cmocka_unit_test(test_from_counts),
        cmocka_unit_test(test_kept),           cmocka_unit_test(test_kept_by_agreement),
        cmocka_unit_test(test_layers_differ),  cmocka_unit_test(test_other_reduction),
        cmocka_unit_test(test_order_and_gates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
