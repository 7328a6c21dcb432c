/* combine - two ways to bring the rows of the experts home to their tokens, in the precision of training.
 *
 * A token has chosen K experts; y[t] = sum over k of weight[t,k] * rows[slot[t,k]]. Scatter-add adds each row
 * to its token when it arrives, so that the order of arrival is the order of the sum. Unsort puts each row
 * into a place of its own, and then every token sums its K places, always in the order of k. moe_ref_combine
 * (ref.h) is unsort in one step, for rows that are all there. Beside that truth this says what frameworks do:
 * where they round, and how the order of arrival shows.
 *
 * Elements are float or bf16 (bf16.h). A sum or a product of bf16 is computed in float; what is then stored
 * as bf16 is rounded. Threads share one output without data races: an element is added to by
 * compare-and-exchange. Stands on nothing but bf16.h. Indices are checked before they are used; a wrong one
 * aborts. */
#ifndef MOE_COMBINE_H
#define MOE_COMBINE_H

#include "kernels/bf16.h"

#include <stdbool.h>
#include <stdint.h>

/* What is combined; all arrays are borrowed.
 *
 *   T H K n          tokens, hidden size, experts per token, rows
 *   slot    [T,K]    the row of choice (t,k), in 0..n-1; -1: dropped, counts as 0
 *   arrival [T*K]    a permutation of the choices t * K + k: their rows come in this order
 *   weight  [T,K]    1 where the experts have weighted their rows already
 *   n_threads        1: rows come in the order of arrival. More: thread i of P brings the i-th P-th of
 *                    arrival in its order, all at the same time, and the scheduler decides who comes first */
struct moe_combine {
    int64_t T, H, K, n;
    const int32_t *slot, *arrival;
    const float *weight;
    int n_threads;
};

/* rows [n,H] -> y [T,H], replaced, or added to when `add` (a shared expert's value). In order of arrival:
 *   f32    y = y + weight * row, both rounded to float
 *   bf16   y = y + weight * row, both rounded to bf16: scatter_add into a bf16 output
 *   wide   sum = sum + weight * row in float, and y = sum rounded to bf16 when all have come
 * sum [T,H] is workspace of 4 * T * H bytes; f32 and bf16 need none.
 *
 * Result: up to two rows on top of zero, or one on top of y, give the same bits in every order (a + b =
 * b + a; bits of NaN excepted); more do not. With u = 2^-24 for float, v = 2^-8 for bf16, and S the
 * sum of the absolute values of the exact products (and of y, with `add`), where nothing over- or
 * underflows:
 *   f32    |y - exact| <= ((1 + u)^m - 1) * S, where m = K from zero, K + 1 with `add`: the roundings
 *          of a term
 *   bf16   |y - exact| <= ((1 + u) * (1 + v)^m - 1) * S: a product is rounded to float before
 *   wide   |y - exact| <= v * |exact| + (1 + v) * ((1 + u)^m - 1) * S
 * Cost: reads T*K*H rows, 2*T*K int32, T*K weights; reads and writes T*K*H sums (wide: and T*H).
 * Errors: none; aborts when a thread cannot be started.
 * Source: Higham, Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 4.2. */
void moe_combine_scatter_f32(const struct moe_combine *c, const float *rows, float *y, bool add);
void moe_combine_scatter_bf16(const struct moe_combine *c, const moe_bf16 *rows, moe_bf16 *y, bool add);
void moe_combine_scatter_wide(const struct moe_combine *c, const moe_bf16 *rows, float *sum, moe_bf16 *y,
                              bool add);

/* rows [n,H] -> apart [T*K,H] = each row at its choice (nothing where dropped); then y [T,H] = the weighted
 * sum over k = 0..K-1 (on top of y when `add`), in float; bf16 rounds it once. apart is workspace of
 * T * K * H elements.
 *
 * Result: the same bits for every arrival and n_threads. |y - exact| is bounded as above, f32 as f32,
 * bf16 as wide. f32 from zero gives the bits of moe_ref_combine_f32.
 * Cost: reads and writes T*K*H to unsort; reads T*K*H, T*K weights and writes T*H to sum.
 * Errors: none; aborts when a thread cannot be started. */
void moe_combine_unsort_f32(const struct moe_combine *c, const float *rows, float *apart, float *y, bool add);
void moe_combine_unsort_bf16(const struct moe_combine *c, const moe_bf16 *rows, moe_bf16 *apart, moe_bf16 *y,
                             bool add);

#endif
