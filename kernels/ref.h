/* ref - the kernels of an MoE layer in plain C: the truth that every device's version is compared with.
 *
 * Stands on nothing: no other folder is included. One source, two real types: declarations and definitions
 * are written once with moe_real and MOE_REAL(name); this header reads its own declarations twice, and ref.c
 * is compiled twice, with MOE_REAL_F64 defined for double. So moe_ref_gemm_f32 and moe_ref_gemm_f64 both
 * exist.
 *
 * Everywhere: matrices are row major; an output is replaced completely (zeros included) unless `add` is true,
 * then the result is added to it; outputs do not overlap inputs unless said; an array without elements may be
 * any pointer; an index outside its range aborts, it is never used. Internal sums of a softmax, a dot product
 * and the loss are kept in double for both types. Costs count reals unless they say otherwise. */
#ifndef MOE_REF_H
#define MOE_REF_H

#include <stdbool.h>
#include <stdint.h>

#define moe_real float
#define MOE_REAL(name) name##_f32
#include "kernels/ref.h"
#undef moe_real
#undef MOE_REAL
#define moe_real double
#define MOE_REAL(name) name##_f64
#include "kernels/ref.h"
#ifndef MOE_REAL_F64 /* from here on both name the type of this compilation */
#undef moe_real
#undef MOE_REAL
#define moe_real float
#define MOE_REAL(name) name##_f32
#endif

#else

/* token [T] in 0..V-1, emb [V,H] -> x [T,H]: x[t] = emb[token[t]].
 * Cost: reads T int32, T*H; writes T*H. */
void MOE_REAL(moe_ref_embed)(int64_t T, int64_t H, int64_t V, const int32_t *token, const moe_real *emb,
                             moe_real *x);

/* token [T], dx [T,H] -> demb [V,H]: demb[v] = sum of dx[t] over the t with token[t] = v, in order of t.
 * Cost: reads T int32, 2*T*H; writes V*H (not with add) + T*H. */
void MOE_REAL(moe_ref_embed_bwd)(int64_t T, int64_t H, int64_t V, const int32_t *token, const moe_real *dx,
                                 moe_real *demb, bool add);

/* C [m,n] = op(A) op(B), with op(A) [m,k] stored as A [m,k], or as [k,m] when trans_a; op(B) [k,n] stored as
 * B [k,n], or as [n,k] when trans_b. k = 0 gives zeros.
 * Cost: 2*m*n*k operations; reads m*k + k*n (+ m*n with add); writes m*n. */
typedef void MOE_REAL(moe_gemm_fn)(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b,
                                   const moe_real *A, const moe_real *B, moe_real *C, bool add);
MOE_REAL(moe_gemm_fn) MOE_REAL(moe_ref_gemm);

/* logits [T,E] -> prob [T,E], expert [T,K], slot [T,K], counts [E]; K <= E.
 * Result: prob is the softmax over all E experts, not renormalised. expert[t] are the K largest of prob[t],
 * in descending order, ties to the lower id. slot[t,k] is the place of (t,k) when all T*K pairs are sorted by
 * expert, then by t: a permutation of 0..T*K-1. counts[e] is the number of pairs with expert e.
 * Cost: reads T*E; writes T*E, 2*T*K int32, E int64; O(T*E*K) comparisons at worst. */
void MOE_REAL(moe_ref_topk)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                            int32_t *expert, int32_t *slot, int64_t *counts);

/* prob [T,E], dprob [T,E] -> dlogits [T,E]: the backward of the softmax, prob * (dprob - sum of prob *
 * dprob). dprob is zero where an expert was not chosen. Cost: reads 2*T*E (+ T*E with add); writes T*E. */
void MOE_REAL(moe_ref_topk_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                moe_real *dlogits, bool add);

/* x [T,H], slot [T,K] -> rows [T*K,H]: rows[slot[t,k]] = x[t].
 * Cost: reads T*H, T*K int32; writes T*K*H. */
void MOE_REAL(moe_ref_permute)(int64_t T, int64_t H, int64_t K, const moe_real *x, const int32_t *slot,
                               moe_real *rows);

/* drows [T*K,H], slot [T,K] -> dx [T,H]: dx[t] = sum over k of drows[slot[t,k]].
 * Cost: reads T*K*H, T*K int32 (+ T*H with add); writes T*H. */
void MOE_REAL(moe_ref_permute_bwd)(int64_t T, int64_t H, int64_t K, const moe_real *drows,
                                   const int32_t *slot, moe_real *dx, bool add);

/* rows [N,H], counts [P,e] -> sorted [N,H], N = sum of counts. Source p sent counts[p,j] rows for local
 * expert j; they arrive packed by source, then expert, and leave packed by expert, then source. unsort_rows
 * is the inverse of sort_rows, and each is the backward of the other. Cost: reads N*H, P*e int64 (+ N*H with
 * add); writes N*H; O(P*e*e) additions. */
void MOE_REAL(moe_ref_sort_rows)(int64_t P, int64_t e, int64_t H, const moe_real *rows, const int64_t *counts,
                                 moe_real *sorted, bool add);
void MOE_REAL(moe_ref_unsort_rows)(int64_t P, int64_t e, int64_t H, const moe_real *sorted,
                                   const int64_t *counts, moe_real *rows, bool add);

/* A [N,k], B [e,k,n] ([e,n,k] when trans_b) -> C [N,n]: the rows of group g are multiplied by op(B[g]).
 *   gemm      what multiplies: moe_ref_gemm, or a library's with the same meaning; rows may be 0
 *   rows [e]  rows of each group, packed one group after the other; N = sum of rows
 * Cost: 2*N*n*k operations; reads N*k, and k*n for each group with rows (+ N*n with add); writes N*n. */
void MOE_REAL(moe_ref_grouped_gemm)(MOE_REAL(moe_gemm_fn) * gemm, int64_t e, int64_t n, int64_t k,
                                    const int64_t *rows, bool trans_b, const moe_real *A, const moe_real *B,
                                    moe_real *C, bool add);

/* A [N,k], dC [N,n] -> dB [e,k,n]: dB[g] = A_g^T dC_g, zeros for a group without rows. gemm, rows: as above.
 * Cost: 2*N*n*k operations; reads N*(k + n) (+ e*k*n with add); writes e*k*n. */
void MOE_REAL(moe_ref_grouped_wgrad)(MOE_REAL(moe_gemm_fn) * gemm, int64_t e, int64_t n, int64_t k,
                                     const int64_t *rows, const moe_real *A, const moe_real *dC, moe_real *dB,
                                     bool add);

/* h [rows,2F] -> a [rows,F] = silu(z) * u, with z = h[:, :F], u = h[:, F:], silu(z) = z / (1 + exp(-z)).
 * Cost: reads 2*rows*F; writes rows*F. */
void MOE_REAL(moe_ref_swiglu)(int64_t rows, int64_t F, const moe_real *h, moe_real *a);

/* h [rows,2F], da [rows,F] -> dh [rows,2F].
 * Cost: reads 3*rows*F (+ 2*rows*F with add); writes 2*rows*F. */
void MOE_REAL(moe_ref_swiglu_bwd)(int64_t rows, int64_t F, const moe_real *h, const moe_real *da,
                                  moe_real *dh, bool add);

/* x [T,H], rows [T*K,H], prob [T,E], expert [T,K], slot [T,K] -> y [T,H]:
 * y[t] = x[t] + sum over k of prob[t, expert[t,k]] * rows[slot[t,k]].
 * Cost: reads T*H + T*K*H + T*K, 2*T*K int32; writes T*H. */
void MOE_REAL(moe_ref_combine)(int64_t T, int64_t H, int64_t K, int64_t E, const moe_real *x,
                               const moe_real *rows, const moe_real *prob, const int32_t *expert,
                               const int32_t *slot, moe_real *y);

/* dy [T,H] and the inputs of combine -> dx [T,H] = dy, drows [T*K,H], dprob [T,E], zero where not chosen.
 * add concerns dx only: drows and dprob are replaced.
 * Cost: reads T*H + T*K*H + T*K, 2*T*K int32 (+ T*H with add); writes T*H + T*K*H + T*E. */
void MOE_REAL(moe_ref_combine_bwd)(int64_t T, int64_t H, int64_t K, int64_t E, const moe_real *dy,
                                   const moe_real *rows, const moe_real *prob, const int32_t *expert,
                                   const int32_t *slot, moe_real *dx, moe_real *drows, moe_real *dprob,
                                   bool add);

/* logits [T,V], target [T] in 0..V-1 -> dlogits [T,V], loss [1].
 * Result: loss is the sum (not the mean) over tokens of -log softmax(logits[t])[target[t]], nats; dlogits =
 * softmax - onehot(target), the gradient of that sum.
 * Cost: reads T*V, T int32; writes T*V + 1. */
void MOE_REAL(moe_ref_xent)(int64_t T, int64_t V, const moe_real *logits, const int32_t *target,
                            moe_real *dlogits, moe_real *loss);

/* g [n] -> out [n] = g / divisor; out may be g.
 * Cost: reads n; writes n. */
void MOE_REAL(moe_ref_scale)(int64_t n, double divisor, const moe_real *g, moe_real *out);

/* param [n], grad [n] -> out [n] = param - factor * grad; out may be param.
 * Cost: reads 2*n; writes n. */
void MOE_REAL(moe_ref_sgd)(int64_t n, double factor, const moe_real *param, const moe_real *grad,
                           moe_real *out);

#endif
