/* choices - what the tests of permute.cu and combine.cu share: choices of experts, and exact comparison. */
#ifndef MOE_TEST_CHOICES_H
#define MOE_TEST_CHOICES_H

#include "tests/cuda/fixture.h"

/* All rows in order of expert, then token; a third of the choices dropped; all tokens choose the same
 * experts; experts padded to multiples of 4, so that rows are left out. */
enum kind { PLAIN, DROPPED, ONE, PADDED, N_KINDS };

struct choices {
    int64_t T, K, E, n;
    int32_t *expert, *slot; /* [T,K] */
    int64_t *counts;        /* [E] */
};

static inline struct choices open_choices(enum kind kind, int64_t T, int64_t K, int64_t E)
{
    struct choices c = {.T = T, .K = K, .E = E};
    c.expert = fixture_alloc((size_t)(T * K) * sizeof *c.expert);
    c.slot = fixture_alloc((size_t)(T * K) * sizeof *c.slot);
    c.counts = fixture_alloc((size_t)E * sizeof *c.counts);
    for (int64_t i = 0; i < T * K; i++) {
        int64_t first = kind == ONE ? 0 : (int64_t)(moe_uniform(1, 0, (uint64_t)(i / K)) * (double)E);
        c.expert[i] = (int32_t)((first + i % K) % E);
        if (kind == DROPPED && moe_uniform(2, 0, (uint64_t)i) < 1. / 3) c.expert[i] = -1;
        c.slot[i] = -1;
    }
    for (int64_t e = 0; e < E; e++) {
        const int64_t before = c.n;
        for (int64_t i = 0; i < T * K; i++)
            if (c.expert[i] == e) c.slot[i] = (int32_t)c.n++;
        c.counts[e] = c.n - before;
        if (kind == PADDED) c.n = (c.n + 3) / 4 * 4;
    }
    return c;
}

static inline void close_choices(struct choices *c)
{
    fixture_free(c->expert);
    fixture_free(c->slot);
    fixture_free(c->counts);
}

/* got [n] has the bits of want [n], as the reference left it, rounded once where the type is bf16. */
static inline void expect_same(enum moe_cuda_type type, const char *what, int64_t n, const void *want,
                               const void *got)
{
    const size_t bytes = fixture_bytes(type);
    for (int64_t i = 0; i < n; i++) {
        const double w = fixture_at(fixture_is_double(type) ? MOE_CUDA_F64 : MOE_CUDA_F32, want, i);
        unsigned char rounded[8];
        fixture_set(type, rounded, 0, w);
        if (memcmp(rounded, (const char *)got + (size_t)i * bytes, bytes) != 0)
            fail_msg("%s %s [%lld]: %.17g, expected %.17g", fixture_type_text[type], what, (long long)i,
                     fixture_at(type, got, i), w);
    }
}

/* [n] of the type, without values: kernels must write all of it. */
static inline void *open_output(enum moe_cuda_type type, int64_t n)
{
    return fixture_alloc((size_t)n * fixture_bytes(type));
}

/* Waits; this index of these was out of range. */
static inline void expect_fault(int64_t index, int64_t n)
{
    const struct moe_cuda_fault f = fixture_wait();
    assert_int_equal(f.set, 1);
    assert_int_equal(f.index, index);
    assert_int_equal(f.n, n);
}

#endif
