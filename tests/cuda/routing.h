/* routing - what the tests of router.cu and limit.cu share: the queue, how many shapes, experts to choose,
 * numbering.
 */
#ifndef MOE_TEST_ROUTING_H
#define MOE_TEST_ROUTING_H

#include "tests/cuda/fixture.h"

/* With few shapes, each has one type. */
static inline bool routing_skips(int shape, enum moe_cuda_type type)
{
    return FEW && shape % 3 != (int)type;
}

#define EACH_TYPE(type) for (enum moe_cuda_type type = MOE_CUDA_F32; type <= MOE_CUDA_BF16; type++)

static inline int32_t *routing_ints(int64_t n)
{
    return fixture_alloc((size_t)n * sizeof(int32_t));
}
static inline int64_t *routing_longs(int64_t n)
{
    return fixture_alloc((size_t)n * sizeof(int64_t));
}

/* Whom tokens choose: any; half of all choices dropped; low ids more than high ones; all the same K. */
enum routing_kind { ANY, HALF_DROPPED, SKEWED, THE_SAME, N_ROUTING_KINDS };

/* expert [T,K], of a token K different ones, in no order of ids. */
static inline int32_t *routing_experts(enum routing_kind kind, int64_t T, int64_t E, int64_t K)
{
    int32_t *expert = routing_ints(T * K);
    for (int64_t t = 0; t < T; t++)
        for (int64_t k = 0; k < K; k++) {
            const double u = moe_uniform(11, (uint64_t)t, (uint64_t)k);
            int64_t e = kind == THE_SAME ? k : (int64_t)((kind == SKEWED ? u * u * u : u) * (double)E);
            for (int64_t j = 0; j < k; j++)
                if (expert[t * K + j] == e) {
                    e = (e + 1) % E;
                    j = -1;
                }
            expert[t * K + k] = (int32_t)e;
        }
    for (int64_t i = 0; i < T * K && kind == HALF_DROPPED; i++)
        if (moe_uniform(12, 0, (uint64_t)i) < .5) expert[i] = -1;
    return expert;
}

static inline void routing_expect_ints(const char *what, int64_t n, const int32_t *want, const int32_t *got)
{
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i]) fail_msg("%s [%lld]: %d, expected %d", what, (long long)i, got[i], want[i]);
}
static inline void routing_expect_longs(const char *what, int64_t n, const int64_t *want, const int64_t *got)
{
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s [%lld]: %lld, expected %lld", what, (long long)i, (long long)got[i],
                     (long long)want[i]);
}

/* slot [n] and counts [E] are those of these choices: in order of expert, then choice; -1 has none. */
static inline void routing_expect_numbered(int64_t n, int64_t E, const int32_t *expert, const int32_t *slot,
                                           const int64_t *counts)
{
    int64_t *next = calloc((size_t)E + 2, sizeof *next); /* next [e]: the next row of e */
    for (int64_t i = 0; i < n; i++) next[expert[i] + 2]++;
    for (int64_t e = 0; e < E; e++)
        if (counts[e] != next[e + 2])
            fail_msg("counts [%lld]: %lld, expected %lld", (long long)e, (long long)counts[e],
                     (long long)next[e + 2]);
    next[0] = next[1] = 0;
    for (int64_t e = 0; e <= E; e++) next[e + 1] += next[e];
    for (int64_t i = 0; i < n; i++) {
        const int64_t want = expert[i] == -1 ? -1 : next[expert[i] + 1]++;
        if (slot[i] != want)
            fail_msg("slot [%lld]: %d, expected %lld", (long long)i, slot[i], (long long)want);
    }
    free(next);
}

/* Waits; this index of so many was out of range. */
static inline void routing_expect_fault(int64_t index, int64_t n)
{
    const struct moe_cuda_fault f = fixture_wait();
    assert_int_equal(f.set, 1);
    assert_int_equal(f.index, index);
    assert_int_equal(f.n, n);
}

#endif
