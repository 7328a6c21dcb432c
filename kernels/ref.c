/* ref.c - see ref.h. Compiled once per real type. No pointer is moved for an array without elements: adding
 * even zero to a null pointer is undefined. */
#include "kernels/ref.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* The index, proved to be in 0..n-1. */
static int64_t checked(int64_t index, int64_t n)
{
    if (index < 0 || index >= n) {
        fprintf(stderr, "moesim: bug: kernel index %lld is not in [0, %lld)\n", (long long)index,
                (long long)n);
        abort();
    }
    return index;
}

/* Adding and replacing differ here, and in embed_bwd, which may meet an output never or twice. */
static void put(moe_real *to, double value, bool add)
{
    *to = (moe_real)(add ? *to + value : value);
}

/* p [n] = softmax(z [n]); returns log(sum(exp(z))). The maximum is taken out, so nothing overflows. */
static double softmax(int64_t n, const moe_real *z, moe_real *p)
{
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (z[i] > max) max = z[i];
    for (int64_t i = 0; i < n; i++) {
        double exponential = exp(z[i] - max);
        sum += exponential;
        p[i] = (moe_real)exponential;
    }
    for (int64_t i = 0; i < n; i++) p[i] = (moe_real)(p[i] / sum);
    return max + log(sum);
}

void MOE_REAL(moe_ref_embed)(int64_t T, int64_t H, int64_t V, const int32_t *token, const moe_real *emb,
                             moe_real *x)
{
    for (int64_t t = 0; t < T; t++) {
        const moe_real *from = emb + checked(token[t], V) * H;
        for (int64_t h = 0; h < H; h++) x[t * H + h] = from[h];
    }
}

void MOE_REAL(moe_ref_embed_bwd)(int64_t T, int64_t H, int64_t V, const int32_t *token, const moe_real *dx,
                                 moe_real *demb, bool add)
{
    for (int64_t i = 0; !add && i < V * H; i++) demb[i] = 0;
    for (int64_t t = 0; t < T; t++) {
        moe_real *to = demb + checked(token[t], V) * H;
        for (int64_t h = 0; h < H; h++) to[h] += dx[t * H + h];
    }
}

void MOE_REAL(moe_ref_gemm)(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, const moe_real *A,
                            const moe_real *B, moe_real *C, bool add)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)A[trans_a ? l * m + i : i * k + l] * B[trans_b ? j * k + l : l * n + j];
            put(&C[i * n + j], sum, add);
        }
}

/* best [K] = the K largest of p [E], descending. Inserting in order of e with a strict comparison gives ties
 * to the lower id, and K different ids even when p holds NaN. */
static void largest(int64_t E, int64_t K, const moe_real *p, int32_t *best)
{
    for (int64_t e = 0; e < E; e++) {
        int64_t k = e < K ? e : K; /* entries filled */
        for (; k > 0 && p[e] > p[best[k - 1]]; k--)
            if (k < K) best[k] = best[k - 1];
        if (k < K) best[k] = (int32_t)e;
    }
}

/* A counting sort in place: counts[e] is in turn the number of pairs of e, the first slot of e, and, once all
 * slots are given out, the first slot of e + 1. */
void MOE_REAL(moe_ref_topk)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                            int32_t *expert, int32_t *slot, int64_t *counts)
{
    checked(K, E + 1);
    for (int64_t e = 0; e < E; e++) counts[e] = 0;
    for (int64_t t = 0; t < T; t++) {
        softmax(E, logits + t * E, prob + t * E);
        largest(E, K, prob + t * E, expert + t * K);
        for (int64_t k = 0; k < K; k++) counts[expert[t * K + k]]++;
    }
    int64_t first = 0;
    for (int64_t e = 0; e < E; e++) {
        int64_t count = counts[e];
        counts[e] = first;
        first += count;
    }
    for (int64_t i = 0; i < T * K; i++) slot[i] = (int32_t)counts[expert[i]]++;
    for (int64_t e = E - 1; e > 0; e--) counts[e] -= counts[e - 1];
}

void MOE_REAL(moe_ref_topk_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                moe_real *dlogits, bool add)
{
    for (int64_t t = 0; t < T; t++) {
        double dot = 0;
        for (int64_t i = t * E; i < (t + 1) * E; i++) dot += (double)prob[i] * dprob[i];
        for (int64_t i = t * E; i < (t + 1) * E; i++) put(&dlogits[i], prob[i] * (dprob[i] - dot), add);
    }
}

void MOE_REAL(moe_ref_permute)(int64_t T, int64_t H, int64_t K, const moe_real *x, const int32_t *slot,
                               moe_real *rows)
{
    for (int64_t i = 0; i < T * K; i++) {
        moe_real *to = rows + checked(slot[i], T * K) * H;
        for (int64_t h = 0; h < H; h++) to[h] = x[i / K * H + h];
    }
}

void MOE_REAL(moe_ref_permute_bwd)(int64_t T, int64_t H, int64_t K, const moe_real *drows,
                                   const int32_t *slot, moe_real *dx, bool add)
{
    for (int64_t i = 0; i < T * K; i++) {
        const moe_real *from = drows + checked(slot[i], T * K) * H;
        for (int64_t h = 0; h < H; h++) put(&dx[i / K * H + h], from[h], add || i % K > 0);
    }
}

/* Walks the (expert, source) order; `packed` is the row in (source, expert) order. */
static void reorder(int64_t P, int64_t e, int64_t H, const moe_real *from, const int64_t *counts,
                    moe_real *to, bool unsort, bool add)
{
    int64_t sorted = 0;
    for (int64_t j = 0; j < e; j++) {
        int64_t packed = 0;
        for (int64_t p = 0; p < P; p++)
            for (int64_t i = 0; i < e; i++) {
                int64_t n = checked(counts[p * e + i], INT32_MAX);
                for (int64_t r = 0; i == j && r < n * H; r++) {
                    int64_t at_sorted = sorted * H + r, at_packed = packed * H + r;
                    put(&to[unsort ? at_packed : at_sorted], from[unsort ? at_sorted : at_packed], add);
                }
                sorted += i == j ? n : 0;
                packed += n;
            }
    }
}

void MOE_REAL(moe_ref_sort_rows)(int64_t P, int64_t e, int64_t H, const moe_real *rows, const int64_t *counts,
                                 moe_real *sorted, bool add)
{
    reorder(P, e, H, rows, counts, sorted, false, add);
}

void MOE_REAL(moe_ref_unsort_rows)(int64_t P, int64_t e, int64_t H, const moe_real *sorted,
                                   const int64_t *counts, moe_real *rows, bool add)
{
    reorder(P, e, H, sorted, counts, rows, true, add);
}

void MOE_REAL(moe_ref_grouped_gemm)(MOE_REAL(moe_gemm_fn) * gemm, int64_t e, int64_t n, int64_t k,
                                    const int64_t *rows, bool trans_b, const moe_real *A, const moe_real *B,
                                    moe_real *C, bool add)
{
    for (int64_t g = 0; g < e; g++) {
        gemm(rows[g], n, k, false, trans_b, A, B + g * k * n, C, add);
        if (rows[g] == 0) continue;
        A += rows[g] * k;
        C += rows[g] * n;
    }
}

void MOE_REAL(moe_ref_grouped_wgrad)(MOE_REAL(moe_gemm_fn) * gemm, int64_t e, int64_t n, int64_t k,
                                     const int64_t *rows, const moe_real *A, const moe_real *dC, moe_real *dB,
                                     bool add)
{
    for (int64_t g = 0; g < e; g++) {
        gemm(k, n, rows[g], true, false, A, dC, dB + g * k * n, add);
        if (rows[g] == 0) continue;
        A += rows[g] * k;
        dC += rows[g] * n;
    }
}

void MOE_REAL(moe_ref_swiglu)(int64_t rows, int64_t F, const moe_real *h, moe_real *a)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t f = 0; f < F; f++) {
            double z = h[r * 2 * F + f], u = h[r * 2 * F + F + f];
            a[r * F + f] = (moe_real)(z / (1 + exp(-z)) * u);
        }
}

void MOE_REAL(moe_ref_swiglu_bwd)(int64_t rows, int64_t F, const moe_real *h, const moe_real *da,
                                  moe_real *dh, bool add)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t f = 0; f < F; f++) {
            int64_t at = r * 2 * F + f;
            double z = h[at], u = h[at + F], s = 1 / (1 + exp(-z)), d = da[r * F + f];
            put(&dh[at], d * u * s * (1 + z * (1 - s)), add);
            put(&dh[at + F], d * z * s, add);
        }
}

void MOE_REAL(moe_ref_combine)(int64_t T, int64_t H, int64_t K, int64_t E, const moe_real *x,
                               const moe_real *rows, const moe_real *prob, const int32_t *expert,
                               const int32_t *slot, moe_real *y)
{
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < H; h++) y[t * H + h] = x[t * H + h];
        for (int64_t i = t * K; i < (t + 1) * K; i++) {
            const moe_real *row = rows + checked(slot[i], T * K) * H;
            moe_real p = prob[t * E + checked(expert[i], E)];
            for (int64_t h = 0; h < H; h++) y[t * H + h] += p * row[h];
        }
    }
}

void MOE_REAL(moe_ref_combine_bwd)(int64_t T, int64_t H, int64_t K, int64_t E, const moe_real *dy,
                                   const moe_real *rows, const moe_real *prob, const int32_t *expert,
                                   const int32_t *slot, moe_real *dx, moe_real *drows, moe_real *dprob,
                                   bool add)
{
    for (int64_t t = 0; t < T; t++) {
        for (int64_t h = 0; h < H; h++) put(&dx[t * H + h], dy[t * H + h], add);
        for (int64_t e = 0; e < E; e++) dprob[t * E + e] = 0;
        for (int64_t i = t * K; i < (t + 1) * K; i++) {
            int64_t row = checked(slot[i], T * K) * H, choice = t * E + checked(expert[i], E);
            double dot = 0;
            for (int64_t h = 0; h < H; h++) {
                dot += (double)dy[t * H + h] * rows[row + h];
                drows[row + h] = prob[choice] * dy[t * H + h];
            }
            dprob[choice] = (moe_real)dot;
        }
    }
}

void MOE_REAL(moe_ref_xent)(int64_t T, int64_t V, const moe_real *logits, const int32_t *target,
                            moe_real *dlogits, moe_real *loss)
{
    double sum = 0;
    for (int64_t t = 0; t < T; t++) {
        double log_sum = softmax(V, logits + t * V, dlogits + t * V);
        int64_t at = t * V + checked(target[t], V);
        sum += log_sum - logits[at];
        dlogits[at] -= 1;
    }
    *loss = (moe_real)sum;
}

void MOE_REAL(moe_ref_scale)(int64_t n, double divisor, const moe_real *g, moe_real *out)
{
    for (int64_t i = 0; i < n; i++) out[i] = (moe_real)(g[i] / divisor);
}

void MOE_REAL(moe_ref_sgd)(int64_t n, double factor, const moe_real *param, const moe_real *grad,
                           moe_real *out)
{
    for (int64_t i = 0; i < n; i++) out[i] = (moe_real)(param[i] - factor * grad[i]);
}
