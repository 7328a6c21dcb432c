/* ref.c - see ref.h. Compiled once per real type. No pointer is moved for an array without elements: adding
 * even zero to a null pointer is undefined. */
#include "kernels/ref_internal.h"

#include <math.h>
#include <string.h>

/* In the type of the data: the float functions take a third of the time. */
static moe_real real_exp(moe_real x)
{
    return sizeof x == sizeof(float) ? (moe_real)expf((float)x) : (moe_real)exp((double)x);
}

static moe_real real_sqrt(moe_real x)
{
    return sizeof x == sizeof(float) ? (moe_real)sqrtf((float)x) : (moe_real)sqrt((double)x);
}

/* p [n] = softmax(z [n]); p may be z. Returns log(sum(exp(z))). The maximum is taken out, so nothing
 * overflows. */
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
    if (!add) clear(V * H, demb);
    for (int64_t t = 0; t < T; t++) add_scaled(H, 1, dx + t * H, demb + checked(token[t], V) * H);
}

static double inverse_rms(int64_t H, const moe_real *x)
{
    return 1 / sqrt(dot(H, x, x) / (double)H + 1e-5);
}

void MOE_REAL(moe_ref_rmsnorm)(int64_t T, int64_t H, const moe_real *x, const moe_real *gain, moe_real *y)
{
    for (int64_t t = 0; t < T; t++) {
        double r = inverse_rms(H, x + t * H);
        for (int64_t h = 0; h < H; h++) y[t * H + h] = (moe_real)(x[t * H + h] * r * gain[h]);
    }
}

void MOE_REAL(moe_ref_rmsnorm_bwd)(int64_t T, int64_t H, const moe_real *x, const moe_real *gain,
                                   const moe_real *dy, moe_real *dx, moe_real *dgain, bool add_x,
                                   bool add_gain)
{
    if (!add_gain) clear(H, dgain);
    for (int64_t t = 0; t < T; t++) {
        const moe_real *in = x + t * H, *d = dy + t * H;
        double r = inverse_rms(H, in), mean = 0;
        for (int64_t h = 0; h < H; h++) mean += d[h] * (double)gain[h] * in[h] / (double)H;
        for (int64_t h = 0; h < H; h++) {
            put(&dx[t * H + h], r * (d[h] * (double)gain[h] - in[h] * r * r * mean), add_x);
            put(&dgain[h], d[h] * in[h] * r, true);
        }
    }
}

/* One head of one sequence of n tokens. */
struct head {
    int64_t H, d, n;
    moe_real *turn;               /* [S,d] of each position: the cosines, then the sines of its angles */
    moe_real *part[3], *dpart[3]; /* [S,d] queries, keys, values; the first two turned; their gradients */
    moe_real *p, *dp;             /* [S] */
};

/* S: the longest sequence. Everything is one block, which starts at `turn`. */
static struct head open_head(int64_t S, int64_t H, int64_t d)
{
    struct head w = {.H = H, .d = d, .turn = calloc((size_t)(S * d * 7 + S * 2 + 1), sizeof(moe_real))};
    if (!w.turn) {
        fprintf(stderr, "moesim: out of memory in attention\n");
        abort();
    }
    for (int64_t i = 0; i < 3; i++) {
        w.part[i] = w.turn + (i + 1) * S * d;
        w.dpart[i] = w.turn + (i + 4) * S * d;
    }
    w.p = w.turn + 7 * S * d;
    w.dp = w.p + S;
    for (int64_t t = 0; t < S; t++)
        for (int64_t i = 0; i < d / 2; i++) {
            double angle = (double)t * pow(10000, -2.0 * (double)i / (double)d);
            w.turn[t * d + i] = (moe_real)cos(angle);
            w.turn[t * d + d / 2 + i] = (moe_real)sin(angle);
        }
    return w;
}

/* Turns the pairs (i, i + d / 2) of x [n,d] by the angles of each position, or back. */
static void rotate(const struct head *w, bool back, moe_real *x)
{
    const moe_real *turn = w->turn;
    for (int64_t t = 0; t < w->n; t++, x += w->d, turn += w->d)
        for (int64_t i = 0; i < w->d / 2; i++) {
            int64_t j = i + w->d / 2;
            moe_real a = x[i], b = x[j], sine = back ? -turn[j] : turn[j];
            x[i] = a * turn[i] - b * sine;
            x[j] = b * turn[i] + a * sine;
        }
}

/* qkv: where the head's part of the first token begins. */
static void load_head(const struct head *w, const moe_real *qkv)
{
    for (int64_t i = 0; i < 3; i++)
        for (int64_t t = 0; t < w->n; t++)
            for (int64_t c = 0; c < w->d; c++) w->part[i][t * w->d + c] = qkv[(t * 3 + i) * w->H + c];
    rotate(w, false, w->part[0]);
    rotate(w, false, w->part[1]);
}

/* w->p [i + 1]: how much token i takes of each token up to itself. */
static void attend(const struct head *w, int64_t i)
{
    for (int64_t j = 0; j <= i; j++)
        w->p[j] = (moe_real)(dot(w->d, w->part[0] + i * w->d, w->part[1] + j * w->d) / sqrt((double)w->d));
    softmax(i + 1, w->p, w->p);
}

/* Adds to dpart what token i with output gradient dout [d] contributes; p is made again. */
static void attend_bwd(const struct head *w, int64_t i, const moe_real *dout)
{
    int64_t d = w->d;
    attend(w, i);
    for (int64_t j = 0; j <= i; j++) w->dp[j] = (moe_real)dot(d, dout, w->part[2] + j * d);
    double mean = dot(i + 1, w->p, w->dp);
    for (int64_t j = 0; j <= i; j++) {
        moe_real dscore = (moe_real)(w->p[j] * (w->dp[j] - mean) / sqrt((double)d));
        add_scaled(d, dscore, w->part[1] + j * d, w->dpart[0] + i * d);
        add_scaled(d, dscore, w->part[0] + i * d, w->dpart[1] + j * d);
        add_scaled(d, w->p[j], dout, w->dpart[2] + j * d);
    }
}

void MOE_REAL(moe_ref_attention)(int64_t T, int64_t H, int64_t A, int64_t S, const moe_real *qkv, moe_real *o)
{
    struct head w = open_head(least(S, T), H, H / A);
    for (int64_t first = 0; first < T; first += S)
        for (int64_t h = 0; h < H; h += w.d) {
            w.n = least(S, T - first);
            load_head(&w, qkv + first * 3 * H + h);
            for (int64_t i = 0; i < w.n; i++) {
                moe_real *to = o + (first + i) * H + h;
                attend(&w, i);
                clear(w.d, to);
                for (int64_t j = 0; j <= i; j++) add_scaled(w.d, w.p[j], w.part[2] + j * w.d, to);
            }
        }
    free(w.turn);
}

void MOE_REAL(moe_ref_attention_bwd)(int64_t T, int64_t H, int64_t A, int64_t S, const moe_real *qkv,
                                     const moe_real *dout, moe_real *dqkv, bool add)
{
    struct head w = open_head(least(S, T), H, H / A);
    for (int64_t first = 0; first < T; first += S)
        for (int64_t h = 0; h < H; h += w.d) {
            w.n = least(S, T - first);
            load_head(&w, qkv + first * 3 * H + h);
            for (int64_t i = 0; i < 3; i++) clear(w.n * w.d, w.dpart[i]);
            for (int64_t i = 0; i < w.n; i++) attend_bwd(&w, i, dout + (first + i) * H + h);
            rotate(&w, true, w.dpart[0]);
            rotate(&w, true, w.dpart[1]);
            for (int64_t i = 0; i < 3 * w.n; i++) /* part i % 3 of token i / 3 */
                for (int64_t c = 0; c < w.d; c++)
                    put(&dqkv[(first * 3 + i) * H + h + c], w.dpart[i % 3][i / 3 * w.d + c], add);
        }
    free(w.turn);
}

void MOE_REAL(moe_ref_add)(int64_t n, const moe_real *a, const moe_real *b, moe_real *y)
{
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

void MOE_REAL(moe_ref_add_bwd)(int64_t n, const moe_real *dy, moe_real *da, moe_real *db, bool add_a,
                               bool add_b)
{
    for (int64_t i = 0; i < n; i++) {
        put(&da[i], dy[i], add_a);
        put(&db[i], dy[i], add_b);
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

/* From choices to slots and counts: all pairs in order of expert, then token. */
static void place(int64_t n, int64_t E, const int32_t *expert, int32_t *slot, int64_t *counts)
{
    int64_t row = 0;
    for (int64_t e = 0; e < E; e++) {
        counts[e] = -row;
        row = number(0, n, e, expert, row, slot);
        counts[e] += row;
    }
}

void MOE_REAL(moe_ref_topk)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                            int32_t *expert, int32_t *slot, int64_t *counts)
{
    checked(K, E + 1);
    for (int64_t t = 0; t < T; t++) {
        softmax(E, logits + t * E, prob + t * E);
        largest(E, K, prob + t * E, expert + t * K);
    }
    place(T * K, E, expert, slot, counts);
}

void MOE_REAL(moe_ref_topk_sigmoid)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                                    int32_t *expert, int32_t *slot, int64_t *counts)
{
    checked(K, E + 1);
    for (int64_t i = 0; i < T * E; i++) prob[i] = (moe_real)(1 / (1 + exp(-(double)logits[i])));
    for (int64_t t = 0; t < T; t++) largest(E, K, prob + t * E, expert + t * K);
    place(T * K, E, expert, slot, counts);
}

void MOE_REAL(moe_ref_force)(int64_t T, int64_t E, int64_t K, const int32_t *want, int32_t *expert,
                             int32_t *slot, int64_t *counts)
{
    int64_t n = 0, row = 0;
    for (int64_t e = 0; e < E; e++) {
        counts[e] = checked(want[e], T + 1);
        for (int64_t i = 0; i < want[e]; i++, n++) expert[checked(n, T * K) % T * K + n / T] = (int32_t)e;
    }
    checked(n - T * K, 1); /* all choices */
    for (int64_t e = 0; e < E; e++) row = number(0, T * K, e, expert, row, slot);
}

void MOE_REAL(moe_ref_topk_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                moe_real *dlogits, bool add)
{
    for (int64_t t = 0; t < T; t++) {
        double mean = dot(E, prob + t * E, dprob + t * E);
        for (int64_t i = t * E; i < (t + 1) * E; i++) put(&dlogits[i], prob[i] * (dprob[i] - mean), add);
    }
}

void MOE_REAL(moe_ref_topk_sigmoid_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                        moe_real *dlogits, bool add)
{
    for (int64_t i = 0; i < T * E; i++) put(&dlogits[i], dprob[i] * prob[i] * (1 - prob[i]), add);
}

void MOE_REAL(moe_ref_aux_loss)(int64_t T, int64_t E, double factor, const moe_real *prob,
                                const int64_t *all_counts, moe_real *loss)
{
    double sum = 0;
    for (int64_t i = 0; i < T * E; i++) sum += prob[i] * (double)all_counts[i % E];
    *loss = (moe_real)(factor * sum);
}

void MOE_REAL(moe_ref_aux_loss_bwd)(int64_t T, int64_t E, double factor, const int64_t *all_counts,
                                    moe_real *dprob, bool add)
{
    for (int64_t i = 0; i < T * E; i++) put(&dprob[i], factor * (double)all_counts[i % E], add);
}

void MOE_REAL(moe_ref_select)(int64_t T, int64_t e, int64_t K, int64_t f, const int32_t *expert,
                              int32_t *slot, int32_t *local)
{
    int64_t row = 0;
    for (int64_t i = 0; i < T * K; i++) slot[i] = -1;
    for (int64_t j = 0; j < e; j++) row = number(0, T * K, f + j, expert, row, slot);
    for (int64_t i = 0; local && i < T * K; i++) local[i] = slot[i] == -1 ? -1 : (int32_t)(expert[i] - f);
}

void MOE_REAL(moe_ref_spread)(int64_t T, int64_t E, int64_t K, int64_t P, const int32_t *expert,
                              int32_t *slot, int64_t *tokens_for)
{
    int64_t row = 0;
    for (int64_t i = 0; i < T * P; i++) slot[i] = -1;
    for (int64_t i = 0; i < T * K; i++)
        if (expert[i] != -1) slot[i / K * P + checked(expert[i], E) / (E / P)] = 0;
    for (int64_t p = 0; p < P; p++) {
        tokens_for[p] = -row;
        for (int64_t t = 0; t < T; t++)
            if (slot[t * P + p] == 0) slot[t * P + p] = (int32_t)row++;
        tokens_for[p] += row;
    }
}

void MOE_REAL(moe_ref_align)(int64_t T, int64_t E, int64_t K, int64_t A, const int32_t *expert,
                             const int32_t *slot, const int64_t *counts, int32_t *aligned_slot,
                             int64_t *aligned)
{
    int64_t packed = 0, row = 0;
    for (int64_t i = 0; i < T * K; i++) {
        if (slot[i] != -1) checked(expert[i], E);
        aligned_slot[i] = -1;
    }
    for (int64_t e = 0; e < E; e++) {
        for (int64_t i = 0; i < T * K; i++)
            if (slot[i] != -1 && expert[i] == e)
                aligned_slot[i] = (int32_t)checked(row + checked(slot[i] - packed, counts[e]), INT32_MAX);
        packed += checked(counts[e], INT32_MAX);
        aligned[e] = (counts[e] + A - 1) / A * A;
        row += aligned[e];
    }
}

void MOE_REAL(moe_ref_permute)(int64_t T, int64_t H, int64_t K, int64_t n, const moe_real *x,
                               const int32_t *slot, moe_real *rows)
{
    clear(n * H, rows);
    for (int64_t i = 0; i < T * K; i++) {
        if (slot[i] == -1) continue;
        memcpy(rows + checked(slot[i], n) * H, x + i / K * H, (size_t)H * sizeof *x);
    }
}

void MOE_REAL(moe_ref_permute_bwd)(int64_t T, int64_t H, int64_t K, int64_t n, const moe_real *drows,
                                   const int32_t *slot, moe_real *dx, bool add)
{
    if (!add) clear(T * H, dx);
    for (int64_t i = 0; i < T * K; i++)
        if (slot[i] != -1) add_scaled(H, 1, drows + checked(slot[i], n) * H, dx + i / K * H);
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
            moe_real z = h[r * 2 * F + f], u = h[r * 2 * F + F + f];
            a[r * F + f] = z / (1 + real_exp(-z)) * u;
        }
}

void MOE_REAL(moe_ref_swiglu_bwd)(int64_t rows, int64_t F, const moe_real *h, const moe_real *da,
                                  moe_real *dh, bool add)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t f = 0; f < F; f++) {
            int64_t at = r * 2 * F + f;
            moe_real z = h[at], u = h[at + F], s = 1 / (1 + real_exp(-z)), d = da[r * F + f];
            put(&dh[at], d * u * s * (1 + z * (1 - s)), add);
            put(&dh[at + F], d * z * s, add);
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

void MOE_REAL(moe_ref_zero)(int64_t n, moe_real *y)
{
    clear(n, y);
}

void MOE_REAL(moe_ref_scale)(int64_t n, double divisor, const moe_real *g, moe_real *out)
{
    const double factor = 1 / divisor; /* a division takes as long as the memory of several elements */
    for (int64_t i = 0; i < n; i++) out[i] = (moe_real)(g[i] * factor);
}

void MOE_REAL(moe_ref_copy)(int64_t n, const moe_real *x, moe_real *y)
{
    for (int64_t i = 0; i < n; i++) y[i] = x[i];
}

void MOE_REAL(moe_ref_sgd)(int64_t n, double factor, const moe_real *param, const moe_real *grad,
                           moe_real *out)
{
    for (int64_t i = 0; i < n; i++) out[i] = (moe_real)(param[i] - factor * grad[i]);
}

void MOE_REAL(moe_ref_sqnorm)(int64_t n, const moe_real *g, double *norm, bool add)
{
    double sum[8] = {0}; /* as in dot, but the square of a float may be none */
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int64_t j = 0; j < 8; j++) sum[j] += (double)g[i + j] * g[i + j];
    for (; i < n; i++) sum[0] += (double)g[i] * g[i];
    for (int j = 1; j < 8; j++) sum[0] += sum[j];
    *norm = (add ? *norm : 0) + sum[0];
}

void MOE_REAL(moe_ref_clip)(int64_t n, double limit, const moe_real *g, const double *norm,
                            const double *other_norm, moe_real *out)
{
    double shrink = limit / sqrt(*norm + *other_norm);
    for (int64_t i = 0; i < n; i++) out[i] = (moe_real)(g[i] * (shrink < 1 ? shrink : 1));
}

/* Arrays of their own, which the compiler may take several elements of at once. */
static void adamw(int64_t n, double rate, double decay, int64_t step, const moe_real *restrict grad,
                  moe_real *restrict param, moe_real *restrict m, moe_real *restrict v)
{
    const moe_real beta1 = (moe_real)0.9, beta2 = (moe_real)0.95, eps = (moe_real)1e-8;
    const moe_real correct1 = (moe_real)(1 / (1 - pow(0.9, (double)step))),
                   correct2 = (moe_real)(1 / (1 - pow(0.95, (double)step)));
    const moe_real by = (moe_real)rate, shrink = (moe_real)(rate * decay);
    for (int64_t i = 0; i < n; i++) {
        moe_real g = grad[i], first = beta1 * m[i] + (1 - beta1) * g,
                 second = beta2 * v[i] + (1 - beta2) * g * g;
        param[i] -= by * (first * correct1 / (real_sqrt(second * correct2) + eps)) + shrink * param[i];
        m[i] = first;
        v[i] = second;
    }
}

void MOE_REAL(moe_ref_adamw)(int64_t n, double rate, double decay, int64_t step, const moe_real *param,
                             const moe_real *grad, const moe_real *m, const moe_real *v, moe_real *param_out,
                             moe_real *m_out, moe_real *v_out)
{
    size_t bytes = (size_t)n * sizeof *param;
    if (n && param_out != param) memcpy(param_out, param, bytes);
    if (n && m_out != m) memcpy(m_out, m, bytes);
    if (n && v_out != v) memcpy(v_out, v, bytes);
    adamw(n, rate, decay, step, grad, param_out, m_out, v_out);
}
