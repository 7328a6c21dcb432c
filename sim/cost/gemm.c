/* gemm.c - see gemm.h. */
#include "sim/cost/gemm.h"

#include <math.h>

enum {
    STEP_BYTES = 128, /* of k: what a block loads at once, one line of shared memory */
    TILE_LEAST = 8,   /* Tiles are powers of two: */
    TILE_SIDE = 64,   /* the longer side at least, */
    TILE_MOST = 256,
    TILE_AREA = 256 * 128, /* accumulators fill the registers */
    STAGES = 4,            /* steps that are loaded ahead */
    SM_TILES = 4,          /* at once, at most */
    PART_STEPS = 4,        /* of a part of k, at least */
    PART_WAVES = 2,        /* with parts, at most */
    SUM_BYTES = 8,         /* a float written and read for each element and part */
};
static const int splits[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32};

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* ---- one product ---- */

struct product {
    const struct moe_gpu *gpu;
    const struct moe_gemm *p;
    int64_t m, n, k_steps;
    int type_bytes;
    double memory_s;
};

/* With tiles of bm x bn and the best split; `most` where none is faster. */
static double tiled_s(const struct product *x, int bm, int bn, double most)
{
    const struct moe_gpu *gpu = x->gpu;
    const struct moe_gemm *p = x->p;
    double step_elements = STEP_BYTES / x->type_bytes;
    double step_s = larger(2.0 * bm * bn * step_elements / (gpu->matmul_flops * p->matmul_share),
                           (bm + bn) * STEP_BYTES / p->l2_Bps) *
                    gpu->n_sms;
    double slow_step_s = larger(p->step_s, step_s);
    double write_s = (double)bm * bn * x->type_bytes / p->write_Bps * gpu->n_sms;
    int64_t at_once = gpu->shared_bytes / ((bm + bn) * STEP_BYTES * STAGES);
    int64_t tiles = ceil_div(x->m, bm) * ceil_div(x->n, bn);
    at_once = at_once < 1 ? 1 : at_once > SM_TILES ? SM_TILES : at_once;
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        int q = splits[i];
        double sums_s =
            q > 1 ? p->split_s + (double)q * (double)x->m * (double)x->n * SUM_BYTES / p->sum_Bps : 0;
        if (q > 1 && (q > x->k_steps / PART_STEPS || tiles * q > PART_WAVES * gpu->n_sms)) break;
        if (x->memory_s + sums_s >= most) break; /* more parts only add to them */
        double steps = (double)ceil_div(x->k_steps, q);
        int64_t fullest = ceil_div(tiles * q, gpu->n_sms), waves = ceil_div(fullest, at_once);
        double sm_s = larger((double)waves * (steps * slow_step_s + write_s),
                             (double)fullest * (steps * step_s + write_s));
        double s = larger(sm_s, x->memory_s) + sums_s;
        if (s < most) most = s;
    }
    return most;
}

double moe_gemm_s(const struct moe_gpu *gpu, const struct moe_gemm *p, int64_t m, int64_t n, int64_t k,
                  int type_bytes)
{
    moe_assert(m > 0 && n > 0 && k > 0);
    double M = (double)m, N = (double)n, K = (double)k, best = INFINITY;
    struct product x = {gpu,
                        p,
                        m,
                        n,
                        ceil_div(k * type_bytes, STEP_BYTES),
                        type_bytes,
                        type_bytes * (M * N + M * K + N * K) / (gpu->memory_Bps * p->memory_share)};
    for (int bm = TILE_LEAST; bm <= TILE_MOST; bm *= 2)
        for (int bn = TILE_LEAST; bn <= TILE_MOST; bn *= 2)
            if (bm * bn <= TILE_AREA && (bm >= TILE_SIDE || bn >= TILE_SIDE))
                best = tiled_s(&x, bm, bn, best);
    return p->launch_s + best;
}

/* ---- a group ---- */

/* Token rows, weight columns. Source: TensorRT-LLM, moe_gemm_tma_ws, operands swapped. */
static const struct tile {
    int rows, columns;
} tiles[] = {{16, 128}, {32, 128}, {64, 128}, {128, 128}, {256, 128}, {128, 256}};
enum { N_TILES = sizeof tiles / sizeof *tiles, WEIGHT_ROWS = 64 };

static double grouped_tile_s(const struct moe_gpu *gpu, const struct moe_grouped *p, int n_groups,
                             const int64_t *rows, int64_t n, int64_t k, int type_bytes, struct tile t)
{
    double elements = STEP_BYTES / type_bytes, steps = (double)ceil_div(k * type_bytes, STEP_BYTES);
    double flops = 2.0 * t.rows * t.columns * elements;
    /* An instruction reads its 64 rows of weights and all rows of tokens; each was written once. */
    double shared =
        (t.columns / WEIGHT_ROWS * (WEIGHT_ROWS + t.rows) + t.rows + t.columns) * (double)STEP_BYTES;
    /* Both rates by the clock, which sinks under load. */
    double tile_s =
        steps * gpu->n_sms / p->matmul_share * larger(flops / gpu->matmul_flops, shared / gpu->shared_Bps);
    double memory_Bps = gpu->memory_Bps * p->memory_share, weights = (double)n * (double)k;
    int64_t columns = ceil_div(n, t.columns), all = 0;
    double sum_s = 0;
    for (int from = 0, to; from < n_groups; from = to) {
        for (to = from + 1; to < n_groups && rows[to] == rows[from];) to++;
        if (!rows[from]) continue;
        int64_t count = ceil_div(rows[from], t.rows) * columns;
        double tiles_s = (double)count * tile_s / gpu->n_sms;
        double waves = larger((double)count / gpu->n_sms, 1); /* each reads the weights */
        double memory_s = type_bytes * (waves * weights + (double)rows[from] * (double)(n + k)) / memory_Bps;
        bool bound = memory_s > tiles_s;
        sum_s += (to - from) * ((bound ? memory_s : tiles_s) + p->theta * (bound ? tiles_s : memory_s));
        all += (to - from) * count;
    }
    double idle = (double)(ceil_div(all, gpu->n_sms) * gpu->n_sms - all) / gpu->n_sms;
    return all ? larger(sum_s + idle / 2 * tile_s, tile_s) : 0;
}

double moe_grouped_s(const struct moe_gpu *gpu, const struct moe_grouped *p, int n_groups,
                     const int64_t *rows, const int64_t *tuned, int64_t n, int64_t k, int type_bytes)
{
    double best = INFINITY;
    int chosen = 0;
    moe_assert(n > 0 && k > 0);
    for (int i = 0; i < N_TILES; i++) {
        double s = grouped_tile_s(gpu, p, n_groups, tuned ? tuned : rows, n, k, type_bytes, tiles[i]);
        if (s >= best) continue;
        best = s;
        chosen = i;
    }
    return tuned ? grouped_tile_s(gpu, p, n_groups, rows, n, k, type_bytes, tiles[chosen]) : best;
}

/* What TensorRT-LLM's own routing kernel takes; else PyTorch's are used (_torch/modules/fused_moe/routing.py,
 * version 1.0). */
enum { ROUTE_EXPERTS = 128, ROUTE_TOP_K = 8 };

double moe_experts_s(const struct moe_gpu *gpu, const struct moe_grouped *p, const struct moe_experts_case *c)
{
    double H = (double)c->hidden, F = (double)c->ffn, tokens = (double)c->tokens, rows = 0;
    for (int i = 0; i < c->n_local; i++) rows += (double)c->rows[i];
    /* Rows are gathered (read, written) and summed (read); the activation reads two halves and writes one;
     * the sums are cleared and written. */
    double moved_bytes = c->type_bytes * (rows * 3 * (H + F) + 2 * tokens * H);
    bool many = c->n_experts > ROUTE_EXPERTS || c->top_k > ROUTE_TOP_K;
    return p->launch_s + (many ? p->route_s + p->route_token_s * tokens : 0) +
           moved_bytes / (gpu->memory_Bps * p->move_share) +
           moe_grouped_s(gpu, p, c->n_local, c->rows, c->tuned, 2 * c->ffn, c->hidden, c->type_bytes) +
           moe_grouped_s(gpu, p, c->n_local, c->rows, c->tuned, c->hidden, c->ffn, c->type_bytes);
}
