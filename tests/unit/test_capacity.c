/* The capacity of rule `megatron`, against the vectors of the framework's formula. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

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

/* Read off the schedule: rows of a padded expert are C for each rank of the group. */
static void test_vectors(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 4, experts: %d, top_k: %d}\nlayout: {ranks: 1}\n"
                 "tokens_per_rank: %d\ncapacity: {rule: megatron, factor: %.17g, pad: true}\n",
                 vectors[i].experts, vectors[i].top_k, vectors[i].tokens, vectors[i].factor);
        struct moe_scenario *sc;
        assert_int_equal(moe_scenario_parse("vector.yaml", text, &sc), 0);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_values *v = moe_values_new(s, r);
        const struct moe_op *limit = fixture_op(&s->roles[0], MOE_FORWARD, "limit");
        assert_int_equal(moe_eval(s, moe_values_host(v), limit->dims[3], 0, 0, 0), vectors[i].capacity);
        moe_values_free(v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_vectors), cmocka_unit_test(test_kept)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
