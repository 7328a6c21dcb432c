/* both - an array that a kernel and its reference both have: what is drawn for one the other gets too. */
#ifndef MOE_TEST_BOTH_H
#define MOE_TEST_BOTH_H

#include "tests/cuda/fixture.h"

enum { LAST_TYPE = FEW ? MOE_CUDA_F32 : MOE_CUDA_BF16 };

struct both {
    enum moe_cuda_type type;
    int64_t n;
    void *block, *kernel, *ref; /* kernel [n]: the end of block; ref [n]: double or float */
};

/* [n] of low + (high - low) * uniform. off: elements by which it misses the alignment of an allocation. */
static inline struct both both_open(enum moe_cuda_type type, int64_t n, int64_t off, uint64_t seed,
                                    double low, double high)
{
    struct both a = {.type = type, .n = n, .block = fixture_random(type, n + off, seed, low, high)};
    a.kernel = (char *)a.block + (size_t)off * fixture_bytes(type);
    a.ref = fixture_for_reference(type, a.kernel, n);
    return a;
}

/* Both get the value, as the type has it. */
static inline void both_set(const struct both *a, int64_t i, double value)
{
    fixture_set(a->type, a->kernel, i, value);
    fixture_set(fixture_is_double(a->type) ? MOE_CUDA_F64 : MOE_CUDA_F32, a->ref, i,
                fixture_at(a->type, a->kernel, i));
}

static inline double both_at(const struct both *a, int64_t i)
{
    return fixture_is_double(a->type) ? ((const double *)a->ref)[i] : (double)((const float *)a->ref)[i];
}

/* As fixture_expect. */
static inline void both_expect(const struct both *a, const char *what, const double *scale, double roundings)
{
    fixture_expect(a->type, what, a->n, a->ref, scale, a->kernel, roundings);
}

static inline void both_close(struct both *a)
{
    fixture_free(a->block);
    free(a->ref);
}

static inline double *both_scale(int64_t n)
{
    double *scale = calloc((size_t)(n ? n : 1), sizeof *scale);
    assert_non_null(scale);
    return scale;
}

#endif
