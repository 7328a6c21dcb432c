/* test_limit - kernels/limit.cu against ref.h: who stays, rows and counts are the reference's exactly. */
#include "tests/cuda/routing.h"

struct shape {
    int64_t T, E, K;
};

static void test_largest(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 3, 32, 33, 257, 1000};
    for (size_t s = FEW ? 5 : 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int64_t at = 0; at < (sizes[s] < 2 ? 1 : 2); at++) { /* the largest is the first or the last */
            int64_t *counts = routing_longs(sizes[s]), *y = routing_longs(1), want;
            for (int64_t e = 0; e < sizes[s]; e++) counts[e] = ((int64_t)1 << 40) + (e * 7919) % 1000;
            if (sizes[s]) counts[at ? sizes[s] - 1 : 0] = (int64_t)1 << 41;
            moe_ref_largest_f32(sizes[s], counts, &want);
            assert_int_equal(moe_cuda_largest(fixture_used_queue(), MOE_CUDA_F32, sizes[s], counts, y), 0);
            fixture_wait_right();
            routing_expect_longs("largest", 1, &want, y);
            assert_int_equal(
                moe_cuda_set(fixture_used_queue(), MOE_CUDA_F32, -sizes[s] - ((int64_t)1 << 40), y), 0);
            fixture_wait_right();
            assert_int_equal(y[0], -sizes[s] - ((int64_t)1 << 40));
            fixture_free(counts);
            fixture_free(y);
        }
}

struct rule {
    int64_t C, G;
    enum moe_ref_order order;
    bool pad;
};

/* prob [T,E] of `steps` different values, so that many are equal, of both signs of zero too; 0: all
 * different. */
static void *open_prob(enum moe_cuda_type type, int64_t n, int steps)
{
    void *prob = fixture_random(type, n, 40, -1, 1);
    for (int64_t i = 0; i < n && steps; i++)
        fixture_set(type, prob, i, floor(steps * moe_uniform(41, 0, (uint64_t)i)) / steps - .5);
    for (int64_t i = 0; i < n; i++)
        if (fixture_at(type, prob, i) == 0) fixture_set(type, prob, i, i % 2 ? 0. : -0.);
    return prob;
}

static void check_limit(enum moe_cuda_type type, struct shape s, struct rule r, enum routing_kind kind,
                        int steps)
{
    const int64_t n = s.T * s.K;
    void *prob = open_prob(type, s.T * s.E, steps), *prob_ref = fixture_for_reference(type, prob, s.T * s.E);
    int32_t *expert = routing_experts(kind, s.T, s.E, s.K), *slot = routing_ints(n),
            *kept_expert = routing_ints(n), *slot_ref = routing_ints(n), *kept_expert_ref = routing_ints(n);
    int64_t *kept = routing_longs(s.E), *arrive = routing_longs(s.E), *kept_ref = routing_longs(s.E),
            *arrive_ref = routing_longs(s.E);
    assert_int_equal(moe_cuda_limit(fixture_used_queue(), type, s.T, s.E, s.K, r.C, r.G, r.order, r.pad, 77,
                                    prob, expert, slot, kept_expert, kept, arrive),
                     0);
    fixture_wait_right();
    FIXTURE_REF(type, limit, s.T, s.E, s.K, r.C, r.G, r.order, r.pad, 77, prob_ref, expert, slot_ref,
                kept_expert_ref, kept_ref, arrive_ref);
    routing_expect_ints("kept_expert", n, kept_expert_ref, kept_expert);
    routing_expect_ints("slot", n, slot_ref, slot);
    routing_expect_longs("kept", s.E, kept_ref, kept);
    routing_expect_longs("arrive", s.E, arrive_ref, arrive);
    void *all[] = {prob, expert, slot,     kept_expert, slot_ref, kept_expert_ref,
                   kept, arrive, kept_ref, arrive_ref};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
    free(prob_ref);
}

/* No token, one, fewer than a tile of choices, several tiles; groups shorter and longer than a tile, a short
 * last one, one of all tokens, and one longer than all. */
static const struct {
    struct shape s;
    int64_t G;
} groups[] = {
    {{0, 4, 2}, 1},      {{0, 4, 2}, 0},      {{1, 1, 1}, 1},     {{7, 5, 3}, 1},
    {{7, 5, 3}, 3},      {{40, 9, 8}, 7},     {{90, 6, 4}, 90},   {{90, 6, 4}, 64},
    {{200, 64, 6}, 150}, {{300, 2, 2}, 1000}, {{700, 3, 1}, 400}, {{33, 512, 8}, 20},
};
enum { N_GROUPS = sizeof groups / sizeof *groups, N_FEW_GROUPS = 6 };

static void test_limit(void **state)
{
    (void)state;
    for (int i = 0; i < (FEW ? N_FEW_GROUPS : N_GROUPS); i++)
        for (int order = MOE_REF_BY_PROB; order <= MOE_REF_RANDOM; order++)
            for (int pad = 0; pad < 2; pad++) {
                const struct shape s = groups[i].s;
                const int64_t n_groups = s.T > groups[i].G ? (s.T + groups[i].G - 1) / groups[i].G : 1,
                              mean = s.T * s.K / (s.E * n_groups);
                const int64_t C[] = {mean / 2 + 1, 0, s.T + 1};
                for (int c = 0; c < (i % 3 || FEW ? 1 : 3); c++) {
                    const enum moe_cuda_type type = (enum moe_cuda_type)((i + order + pad + c) % 3);
                    const enum routing_kind kind = (i + c) % 3 == 0   ? ANY
                                                   : (i + c) % 3 == 1 ? SKEWED
                                                                      : THE_SAME;
                    if (FEW && (i + 2 * order + pad) % 6) continue;
                    check_limit(type, s, (struct rule){C[c], groups[i].G, order, pad}, kind,
                                order % 2 ? 3 : 4);
                }
            }
}

/* Every type, probabilities all different or nearly all equal, and the order of their bits. */
static void test_by_prob(void **state)
{
    (void)state;
    for (int steps = 0; steps < 3; steps++) EACH_TYPE(type)
        {
            if (routing_skips(steps, type)) continue;
            const struct shape s = {FEW ? 20 : 100, 4, 3};
            check_limit(type, s, (struct rule){11, s.T, MOE_REF_BY_PROB, false}, ANY, steps * 2);
            check_limit(type, s, (struct rule){3, 13, MOE_REF_BY_PROB, true}, SKEWED, steps * 2);
        }
}

/* Of 20 choices of an expert all but tokens 6, 10, 14 and 18 have a NaN: these 4 stay, and the first 3 of the
 * others. */
static void test_nan(void **state)
{
    (void)state;
    enum { T = 20, C = 7 };
    const int32_t want[T] = {0, 1, 2, -1, -1, -1, 3, -1, -1, -1, 4, -1, -1, -1, 5, -1, -1, -1, 6, -1};
    EACH_TYPE(type)
    {
        if (routing_skips(0, type)) continue;
        void *prob = fixture_random(type, T, 1, -1, 0);
        int32_t *expert = routing_ints(T), *slot = routing_ints(T), *kept_expert = routing_ints(T);
        int64_t *kept = routing_longs(1);
        for (int t = 0; t < T; t++) {
            expert[t] = 0;
            if (t < 6 || t % 4 != 2) fixture_set(type, prob, t, t % 2 ? NAN : -NAN);
        }
        assert_int_equal(moe_cuda_limit(fixture_used_queue(), type, T, 1, 1, C, T, MOE_REF_BY_PROB, false, 0,
                                        prob, expert, slot, kept_expert, kept, NULL),
                         0);
        fixture_wait_right();
        routing_expect_ints("slot", T, want, slot);
        assert_int_equal(kept[0], C);
        for (int t = 0; t < T; t++) assert_int_equal(kept_expert[t], want[t] == -1 ? -1 : 0);
        void *all[] = {prob, expert, slot, kept_expert, kept};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
    }
}

static void check_select(enum routing_kind kind, struct shape s, int64_t e, int64_t f)
{
    const int64_t n = s.T * s.K;
    int32_t *expert = routing_experts(kind, s.T, s.E, s.K), *slot = routing_ints(n), *local = routing_ints(n),
            *slot_ref = routing_ints(n), *local_ref = routing_ints(n);
    moe_ref_select_f32(s.T, e, s.K, f, expert, slot_ref, local_ref);
    for (int with_local = 0; with_local < 2; with_local++) {
        assert_int_equal(moe_cuda_select(fixture_used_queue(), MOE_CUDA_F32, s.T, e, s.K, f, expert, slot,
                                         with_local ? local : NULL),
                         0);
        fixture_wait_right();
        routing_expect_ints("select", n, slot_ref, slot);
        if (s.T > 1000) break;
    }
    if (s.T <= 1000) routing_expect_ints("local", n, local_ref, local);
    void *all[] = {expert, slot, local, slot_ref, local_ref};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
}

/* No token, no expert; a part of them at either end; all; chunks of one tile, and of two, of which the last
 * is short. */
static void test_select(void **state)
{
    (void)state;
    for (enum routing_kind kind = 0; kind < N_ROUTING_KINDS; kind++) {
        check_select(kind, (struct shape){9, 8, 2}, kind == ANY ? 0 : 4, 3);
        if (FEW) break;
        check_select(kind, (struct shape){0, 8, 2}, 4, 4);
        check_select(kind, (struct shape){50, 11, 3}, 5, 0);
        check_select(kind, (struct shape){130, 12, 8}, 5, 7);
        check_select(kind, (struct shape){100, 512, 8}, 512, 0);
    }
    if (FEW) return;
    check_select(SKEWED, (struct shape){20, 4096, 8}, 4096, 0);
    check_select(SKEWED, (struct shape){8293, 16, 8}, 15, 1);
}

static void check_spread(enum routing_kind kind, struct shape s, int64_t P)
{
    int32_t *expert = routing_experts(kind, s.T, s.E, s.K), *slot = routing_ints(s.T * P),
            *slot_ref = routing_ints(s.T * P);
    int64_t *tokens_for = routing_longs(P), *tokens_for_ref = routing_longs(P);
    moe_ref_spread_f32(s.T, s.E, s.K, P, expert, slot_ref, tokens_for_ref);
    assert_int_equal(
        moe_cuda_spread(fixture_used_queue(), MOE_CUDA_F32, s.T, s.E, s.K, P, expert, slot, tokens_for), 0);
    fixture_wait_right();
    routing_expect_ints("spread", s.T * P, slot_ref, slot);
    routing_expect_longs("tokens_for", P, tokens_for_ref, tokens_for);
    void *all[] = {expert, slot, slot_ref, tokens_for, tokens_for_ref};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
}

static void test_spread(void **state)
{
    (void)state;
    for (enum routing_kind kind = 0; kind < N_ROUTING_KINDS; kind++) {
        check_spread(kind, (struct shape){23, 12, 5}, 3);
        if (FEW) break;
        check_spread(kind, (struct shape){0, 8, 2}, 4);
        check_spread(kind, (struct shape){1, 1, 1}, 1);
        check_spread(kind, (struct shape){100, 64, 8}, 64);
        check_spread(kind, (struct shape){300, 512, 8}, 2);
    }
}

/* -1 is nobody's in a spread, and wrong where choices are limited. Nothing is written outside of the arrays.
 * */
static void test_wrong_expert(void **state)
{
    (void)state;
    enum { T = 30, E = 6, K = 3, P = 2 };
    const int32_t wrong[] = {E, -2, INT32_MAX, INT32_MIN, -1};
    const struct moe_cuda_queue *q = fixture_used_queue();
    void *prob = fixture_random(MOE_CUDA_F32, T * E, 1, 0, 1);
    int32_t *slot = routing_ints(T * K), *kept_expert = routing_ints(T * K);
    int64_t *kept = routing_longs(E), *arrive = routing_longs(E);
    for (int i = 0; i < (FEW ? 1 : 5); i++) {
        int32_t *expert = routing_experts(ANY, T, E, K);
        expert[T] = wrong[i];
        for (int pad = FEW; pad < 2; pad++) {
            slot[T] = 5;
            assert_int_equal(moe_cuda_limit(q, MOE_CUDA_F32, T, E, K, 4, 11, MOE_REF_BY_PROB, pad, 1, prob,
                                            expert, slot, kept_expert, kept, arrive),
                             0);
            routing_expect_fault(wrong[i], E);
            assert_int_equal(slot[T], -1);
            assert_int_equal(kept_expert[T], -1);
        }
        assert_int_equal(moe_cuda_spread(q, MOE_CUDA_F32, T, E, K, P, expert, slot, kept), 0);
        if (wrong[i] == -1)
            fixture_wait_right();
        else
            routing_expect_fault(wrong[i], E);
        fixture_free(expert);
    }
    assert_int_not_equal(moe_cuda_select(q, MOE_CUDA_F32, 0, 4097, K, 0, kept_expert, slot, NULL), 0);
    assert_int_not_equal(moe_cuda_limit(q, MOE_CUDA_F32, T, E, K, (int64_t)1 << 31, 11, MOE_REF_BY_PROB, true,
                                        1, prob, slot, slot, kept_expert, kept, arrive),
                         0);
    assert_int_not_equal(moe_cuda_limit(q, MOE_CUDA_F32, INT32_MAX - 100, 1, 1, 1, 1, MOE_REF_BY_PROB, false,
                                        1, NULL, NULL, NULL, NULL, kept, arrive),
                         0); /* nothing is looked at */
    void *all[] = {prob, slot, kept_expert, kept, arrive};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_largest),      cmocka_unit_test(test_limit),  cmocka_unit_test(test_by_prob),
        cmocka_unit_test(test_nan),          cmocka_unit_test(test_select), cmocka_unit_test(test_spread),
        cmocka_unit_test(test_wrong_expert),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
