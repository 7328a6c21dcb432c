/* fixture - what the tests of kernels share: memory that host and kernels see, a queue, typed arrays, bounds.
 *
 * A test is linked twice: with fixture_host.c and the kernels on the host (every build), and with
 * fixture_gpu.c and the real ones (preset cuda; it skips without a GPU). */
#ifndef MOE_TEST_FIXTURE_H
#define MOE_TEST_FIXTURE_H

#include "kernels/bf16.h"
#include "kernels/cuda.h"
#include "sim/base.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Under thread sanitizer each thread of a block is one of this machine: a few shapes have to do. */
#ifdef __SANITIZE_THREAD__
enum { FEW = 1 };
#else
enum { FEW = 0 };
#endif

/* Memory of exactly so many bytes, filled with a pattern: -1 as an integer's sign, tiny as a real. */
void *fixture_alloc(size_t bytes);
void fixture_free(void *p);
/* The one queue: its workspace is filled with the pattern again. at_least: bytes of workspace. */
const struct moe_cuda_queue *fixture_queue(size_t at_least);
/* The queue, filled with the pattern once: what earlier kernels left in the workspace is no better. */
static inline const struct moe_cuda_queue *fixture_used_queue(void)
{
    static const struct moe_cuda_queue *q;
    if (!q) q = fixture_queue(0);
    return q;
}
/* Waits for what was queued. Result: the fault that kernels noted since the last call (set: 0 or 1). */
struct moe_cuda_fault fixture_wait(void);
/* Nanoseconds that what `queue_work` queues takes on the device (on the host: it runs when it is queued): the
 * median of `runs`, after one that is not counted. */
double fixture_time_ns(void (*queue_work)(void *ctx), void *ctx, int runs);
/* The test program: main() of a test returns it. Prints the reason and exits with 77 without a GPU. */
void fixture_open(void);

enum { FIXTURE_MOST_RUNS = 101 };

static inline int fixture_rising(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}
static inline double fixture_median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, fixture_rising);
    return x[n / 2];
}

/* ---- arrays of a real type ---- */

static const char *const fixture_type_text[] = {"f32", "f64", "bf16"};

static inline size_t fixture_bytes(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64 ? 8 : type == MOE_CUDA_F32 ? 4 : 2;
}

/* Half the distance of 1 to the next number. */
static inline double fixture_unit(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64 ? DBL_EPSILON / 2 : type == MOE_CUDA_F32 ? FLT_EPSILON / 2 : 0x1p-8;
}

static inline double fixture_at(enum moe_cuda_type type, const void *p, int64_t i)
{
    return type == MOE_CUDA_F64   ? ((const double *)p)[i]
           : type == MOE_CUDA_F32 ? (double)((const float *)p)[i]
                                  : (double)moe_bf16_to_float(((const moe_bf16 *)p)[i]);
}

static inline void fixture_set(enum moe_cuda_type type, void *p, int64_t i, double value)
{
    if (type == MOE_CUDA_F64) ((double *)p)[i] = value;
    if (type == MOE_CUDA_F32) ((float *)p)[i] = (float)value;
    if (type == MOE_CUDA_BF16) ((moe_bf16 *)p)[i] = moe_bf16_from_float((float)value);
}

/* [n] of the type: low + (high - low) * uniform, a function of seed and index. */
static inline void *fixture_random(enum moe_cuda_type type, int64_t n, uint64_t seed, double low, double high)
{
    void *p = fixture_alloc((size_t)n * fixture_bytes(type));
    for (int64_t i = 0; i < n; i++)
        fixture_set(type, p, i, low + (high - low) * moe_uniform(seed, 0, (uint64_t)i));
    return p;
}

/* The type that the reference computes in, and a copy of p [n] in it: doubles for F64, floats for others. */
static inline bool fixture_is_double(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64;
}
static inline void *fixture_for_reference(enum moe_cuda_type type, const void *p, int64_t n)
{
    const enum moe_cuda_type as = fixture_is_double(type) ? MOE_CUDA_F64 : MOE_CUDA_F32;
    void *copy = malloc((size_t)(n ? n : 1) * fixture_bytes(as));
    for (int64_t i = 0; i < n; i++) fixture_set(as, copy, i, fixture_at(type, p, i));
    return copy;
}

/* got [n] of `type` against want [n], as the reference left it (double or float): the difference is at most
 * `roundings` unit roundoffs of what was computed in, times scale [n] (NULL: |want|), and for bf16 one
 * rounding of its own (two for a number that its scale does not bound). Names the first element that is not.
 * */
static inline void fixture_expect(enum moe_cuda_type type, const char *what, int64_t n, const void *want,
                                  const double *scale, const void *got, double roundings)
{
    const bool wide = fixture_is_double(type);
    const double unit = fixture_unit(wide ? MOE_CUDA_F64 : MOE_CUDA_F32);
    for (int64_t i = 0; i < n; i++) {
        double w = wide ? ((const double *)want)[i] : (double)((const float *)want)[i],
               g = fixture_at(type, got, i), s = scale ? scale[i] : fabs(w), bound = roundings * unit * s;
        if (type == MOE_CUDA_BF16) bound += fixture_unit(type) * (fabs(w) + bound);
        if (fabs(g - w) <= bound || (isnan(w) && isnan(g)) || w == g) continue;
        fail_msg("%s %s [%lld]: %.17g, expected %.17g within %g", fixture_type_text[type], what, (long long)i,
                 g, w, bound);
    }
}

/* Calls moe_ref_NAME_f64 or _f32 with the same arguments, where pointers are void. */
#define FIXTURE_REF(type, name, ...)                                                                         \
    do {                                                                                                     \
        if (fixture_is_double(type))                                                                         \
            moe_ref_##name##_f64(__VA_ARGS__);                                                               \
        else                                                                                                 \
            moe_ref_##name##_f32(__VA_ARGS__);                                                               \
    } while (0)

/* Waits; nothing was out of range. */
static inline void fixture_wait_right(void)
{
    struct moe_cuda_fault f = fixture_wait();
    if (f.set) fail_msg("index %lld is not in [0, %lld)", (long long)f.index, (long long)f.n);
}

#endif
