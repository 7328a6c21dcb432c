/* gemm - how long matrix products take on a GPU: one by itself, or one for each expert.
 *
 * One product [m, k] x [k, n]: the library cuts it into tiles of bm x bn, and k into q parts where that gives
 * idle SMs work. An SM holds some tiles at once; a tile takes steps of 128 bytes of k, each the longest of
 *   step                             what its instructions wait for; tiles on one SM overlap in it
 *   2 bm bn / (matmul / SMs)         its arithmetic
 *   (bm + bn) bytes / (l2 / SMs)     its operands, from the cache
 * and then writes its bm x bn elements. The SM with the most tiles decides (wave quantisation):
 *   time = launch + max(that SM, operands and result once / memory) + with parts: split + bytes of sums / sum
 * Of all tiles and parts those with the least time are taken, as a library does that was tuned well. Source:
 * NVIDIA, Matrix Multiplication Background User's Guide (tiles, waves); shares and rates are to be fitted.
 *
 * Products of a group, [rows_e, k] x [k, n] for each expert e, in one kernel: persistent blocks take tiles of
 * all experts one after another, so that an expert takes max(c, m) + theta min(c, m): c the time of its tiles
 * on all SMs, m that of its weights and rows from memory; the end idles half of what the last wave leaves
 * free. An expert without rows costs nothing. Weights are the operand with 64 rows an instruction (operands
 * are swapped, so that few tokens fill a tile), and both operands pass shared memory. A wave is one tile on
 * each SM: where an expert's tiles are more, each wave reads its weights again, since those of a product (25
 * to 63 MB from 4,096 x 3,072 on) do not stay in the half of the cache that an SM is at (25 MB of H100, data
 * sheet: 50); with smaller weights, that would stay, the same is assumed, and no median changes. Kernels of
 * their own gather the rows, activate and sum them; they reach a smaller share of memory than products.
 *
 * That experts overlap was tried and refuted: max and min of the whole kernel in place of each expert's put
 * the slowdown of a power law 8 points further off. So was a time to start a tile: the fit gives none.
 *
 * No table over sizes: what a fit finds are the two structs. They were made for m of 1 to 8,192, n, k of 32
 * to 65,536; 1 to 512 experts of 0 to 16,384 rows (tests/bench/accuracy_compute.c). */
#ifndef MOE_GEMM_H
#define MOE_GEMM_H

#include "sim/base.h"

/* Data sheet. */
struct moe_gpu {
    int n_sms;
    int64_t shared_bytes; /* shared memory of an SM that a block can have */
    double matmul_flops;  /* dense, of the type that is multiplied */
    double memory_Bps;
    double shared_Bps; /* shared memory of all SMs, read and written */
};

/* clang-format off */
/*    member         key in the topology  unit, size; start, least, most; rows that would tell it */
#define MOE_GEMM_PARAMS(X) \
    X(launch_s,      "launch",       "us",   1e-6, 2.5,  0.1,  100, "n, k of 32 to 512, any m") \
    /* none where the cache always takes longer */ \
    X(step_s,        "step",         "us",   1e-6, 0.07, 1e-3, 10,  "few tiles: m 64, n 1,024, k 3,072") \
    X(matmul_share,  "matmul_share", "%",    0.01, 85,   10,   100, "m, n, k from 2,048") \
    X(memory_share,  "memory_share", "%",    0.01, 90,   10,   100, "m below 64, n, k from 4,096") \
    X(l2_Bps,        "l2",           "GB/s", 1e9,  8e3,  1e3,  1e6, "m, n of 256 to 4,096, k from 2,048") \
    X(split_s,       "split",        "us",   1e-6, 2,    0.01, 100, "m, n to 256, k from 2,048") \
    X(sum_Bps,       "sum",          "GB/s", 1e9,  4e3,  100,  1e6, "m, n of 256 to 2,048, k from 4,096") \
    X(write_Bps,     "write",        "GB/s", 1e9,  3e3,  100,  1e6, "m, n from 1,024, k to 512")
#define MOE_GROUPED_PARAMS(X) \
    /* of all kernels of the experts' layer */ \
    X(launch_s,      "launch",       "us",   1e-6, 20,   0.1,  1e3, "few experts with few rows") \
    X(memory_share,  "memory_share", "%",    0.01, 90,   10,   95,  "many experts with 1 to 16 rows") \
    /* of the kernels between the products */ \
    X(move_share,    "move_share",   "%",    0.01, 60,   10,   100, "few experts with 128 rows and more") \
    X(matmul_share,  "matmul_share", "%",    0.01, 90,   10,   100, "experts with 512 rows and more") \
    /* of the shorter time, that does not overlap */ \
    X(theta,         "theta",        "%",    0.01, 10,   0.1,  100, "experts with 64 to 384 rows") \
    /* of routing, with more than 128 experts or 8 for a token */ \
    X(route_s,       "route",        "us",   1e-6, 15,   0.01, 1e3, "256 experts, few tokens") \
    X(route_token_s, "route_token",  "ns",   1e-9, 10,   0.01, 1e3, "256 experts, from 6,144 tokens")
/* clang-format on */

#define X(member, key, unit, size, start, least, most, rows) double member;
struct moe_gemm {
    MOE_GEMM_PARAMS(X)
};
struct moe_grouped {
    MOE_GROUPED_PARAMS(X)
};
#undef X
#define X(member, key, unit, size, start, least, most, rows) +1
enum { MOE_GEMM_N_PARAMS = MOE_GEMM_PARAMS(X), MOE_GROUPED_N_PARAMS = MOE_GROUPED_PARAMS(X) };
#undef X

/* The experts of one GPU: y = down(act(gate(x)) * up(x)) for the rows that reach them, routing included. */
struct moe_experts_case {
    int64_t tokens, hidden, ffn; /* tokens: of all ranks that split the experts, before they are routed */
    int top_k, n_experts;        /* of the layer */
    int n_local;                 /* of them, on this GPU */
    const int64_t *rows;         /* [n_local] */
    const int64_t *tuned;        /* [n_local] for which the library chose its tiles; NULL: rows */
    int type_bytes;
};

/* Seconds on an idle GPU, sizes > 0. Result: never less than arithmetic at matmul_flops or operands and
 * result once at memory_Bps; never less for a larger m or n. Cost: O(tiles * splits), about 2 us. */
double moe_gemm_s(const struct moe_gpu *gpu, const struct moe_gemm *p, int64_t m, int64_t n, int64_t k,
                  int type_bytes);

/* The same for a group, but without launch. rows, tuned [n_groups] as above. Result: bounds as above, of the
 * groups that have rows; 0 without any. Cost: O(tiles * groups), equal neighbours count as one. */
double moe_grouped_s(const struct moe_gpu *gpu, const struct moe_grouped *p, int n_groups,
                     const int64_t *rows, const int64_t *tuned, int64_t n, int64_t k, int type_bytes);

double moe_experts_s(const struct moe_gpu *gpu, const struct moe_grouped *p,
                     const struct moe_experts_case *c);

#endif
