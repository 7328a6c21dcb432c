/* ref_combine.c - see ref.h: rows of experts and their probabilities. Compiled once per real type.
 */
#include "kernels/ref_internal.h"

enum { BLOCK = 512, WARP = 32, AT_ONCE = 4 };

/* The largest power of two that is at most n, and at most `most`. */
static int64_t power(int64_t n, int64_t most)
{
    int64_t p = 1;
    while (2 * p <= least(n, most)) p *= 2;
    return p;
}

/* Threads of a block that share a row, when it reduces so many rows of H. */
static int64_t width(int64_t n, int64_t H)
{
    int64_t most = power(H, BLOCK), height = power(n, BLOCK / least(most, WARP));
    return least(most, BLOCK / height);
}

/* The dot product of W threads, each with AT_ONCE sums, halved down to a warp, whose lanes then add up their
 * neighbours. W = 0: the fixed tree. */
static double row_dot(int64_t W, int64_t H, const moe_real *x, const moe_real *y)
{
    moe_real sum[BLOCK];
    if (!W) return dot(H, x, y);
    for (int64_t t = 0; t < W; t++) {
        moe_real own[AT_ONCE] = {0};
        for (int64_t i = t, j = 0; i < H; i += W, j++) own[j % AT_ONCE] += x[i] * y[i];
        sum[t] = own[0] + own[1] + own[2] + own[3];
    }
    for (int64_t half = W / 2; half >= WARP; half /= 2)
        for (int64_t t = 0; t < half; t++) sum[t] += sum[t + half];
    for (int64_t apart = 1; apart < least(W, WARP); apart *= 2)
        for (int64_t t = 0; t + apart < least(W, WARP); t++) sum[t] += sum[t + apart];
    return sum[0];
}

void MOE_REAL(moe_ref_take)(int64_t T, int64_t E, int64_t K, const moe_real *prob, const int32_t *expert,
                            moe_real *taken)
{
    for (int64_t i = 0; i < T * K; i++)
        taken[i] = expert[i] == -1 ? 0 : prob[i / K * E + checked(expert[i], E)];
}

void MOE_REAL(moe_ref_take_bwd)(int64_t T, int64_t E, int64_t K, const int32_t *expert,
                                const moe_real *dtaken, moe_real *dprob, bool add)
{
    if (!add) clear(T * E, dprob);
    for (int64_t i = 0; i < T * K; i++)
        if (expert[i] != -1) dprob[i / K * E + checked(expert[i], E)] += dtaken[i];
}

void MOE_REAL(moe_ref_weigh)(int64_t n, int64_t H, const moe_real *rows, const moe_real *weight, moe_real *y)
{
    for (int64_t i = 0; i < n * H; i++) y[i] = weight[i / H] * rows[i];
}

void MOE_REAL(moe_ref_weigh_bwd)(int64_t n, int64_t H, const moe_real *rows, const moe_real *weight,
                                 const moe_real *dy, bool by_rows, moe_real *drows, moe_real *dweight)
{
    const int64_t W = by_rows ? width(n, H) : 0;
    for (int64_t i = 0; i < n; i++) dweight[i] = (moe_real)row_dot(W, H, dy + i * H, rows + i * H);
    for (int64_t i = 0; i < n * H; i++) drows[i] = weight[i / H] * dy[i];
}

void MOE_REAL(moe_ref_combine)(int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const moe_real *rows,
                               const moe_real *prob, const int32_t *expert, const int32_t *slot, moe_real *y)
{
    clear(T * H, y);
    for (int64_t i = 0; i < T * K; i++)
        if (slot[i] != -1)
            add_scaled(H, prob[i / K * E + checked(expert[i], E)], rows + checked(slot[i], n) * H,
                       y + i / K * H);
}

void MOE_REAL(moe_ref_combine_bwd)(int64_t T, int64_t H, int64_t K, int64_t E, int64_t n,
                                   const moe_real *rows, const moe_real *prob, const int32_t *expert,
                                   const int32_t *slot, const moe_real *dy, bool by_rows, moe_real *drows,
                                   moe_real *dprob)
{
    const int64_t W = by_rows ? width(n, H) : 0;
    clear(n * H, drows);
    clear(T * E, dprob);
    for (int64_t i = 0; i < T * K; i++) {
        if (slot[i] == -1) continue;
        int64_t row = checked(slot[i], n) * H, choice = i / K * E + checked(expert[i], E);
        dprob[choice] = (moe_real)row_dot(W, H, dy + i / K * H, rows + row);
        add_scaled(H, prob[choice], dy + i / K * H, drows + row);
    }
}
