/* ref_internal - what the files of the reference share: indices, writing, the order of rows, dot products. */
#ifndef MOE_REF_INTERNAL_H
#define MOE_REF_INTERNAL_H

#include "kernels/ref.h"

#include <stdio.h>
#include <stdlib.h>

/* The index, proved to be in 0..n-1. */
static inline int64_t checked(int64_t index, int64_t n)
{
    if (index < 0 || index >= n) {
        fprintf(stderr, "moesim: bug: kernel index %lld is not in [0, %lld)\n", (long long)index,
                (long long)n);
        abort();
    }
    return index;
}

/* Adding and replacing differ here, and where an output is cleared first and then added to. */
static inline void put(moe_real *to, double value, bool add)
{
    *to = (moe_real)(add ? *to + value : value);
}

static inline void clear(int64_t n, moe_real *x)
{
    for (int64_t i = 0; i < n; i++) x[i] = 0;
}

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The choices first .. end - 1 of expert e get the rows from `row` on; returns the row after them. */
static inline int64_t number(int64_t first, int64_t end, int64_t e, const int32_t *expert, int64_t row,
                             int32_t *slot)
{
    for (int64_t i = first; i < end; i++)
        if (expert[i] == e) slot[i] = (int32_t)row++;
    return row;
}

/* Eight sums, so that an addition need not wait for the one before, and several fit one instruction. */
static inline double dot(int64_t n, const moe_real *x, const moe_real *y)
{
    moe_real sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t j = 0; j < 8; j++) sum[j] += x[i + j] * y[i + j];
    for (; i < n; i++) sum[0] += x[i] * y[i];
    return (double)sum[0] + sum[1] + sum[2] + sum[3] + ((double)sum[4] + sum[5] + sum[6] + sum[7]);
}

/* y [n] += factor * x [n] */
static inline void add_scaled(int64_t n, moe_real factor, const moe_real *x, moe_real *y)
{
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

#endif
