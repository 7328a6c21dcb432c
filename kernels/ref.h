/* ref - the kernels of an MoE transformer in plain C: the truth that every device's version is compared with.
 *
 * Stands on nothing: no other folder is included. One source, two real types: declarations and definitions
 * are written once with moe_real and MOE_REAL(name); this header reads its own declarations twice, and ref*.c
 * are compiled twice, with MOE_REAL_F64 defined for double. So moe_ref_gemm_f32 and moe_ref_gemm_f64 both
 * exist.
 *
 * Everywhere: matrices are row major; an output is replaced completely (zeros included) unless `add` is true,
 * then the result is added to it; outputs do not overlap inputs unless said; an array without elements may be
 * any pointer; an index outside its range aborts, it is never used. A slot of -1 is a dropped row: nothing is
 * moved, its weight counts as 0, its expert is not looked at. The sums of a softmax, a loss, a squared norm
 * and moe_ref_gemm are kept in double for both types; those of other dot products (attention, rmsnorm,
 * gradients of probabilities) and of rows in the type of the data.
 * Costs count reals unless they say otherwise. */
#ifndef MOE_REF_H
#define MOE_REF_H

#include <stdbool.h>
#include <stdint.h>

/* Who stays of the choices that a group of tokens makes of an expert: the most probable (ties: the earlier
 * token); the first tokens; those with the lowest k, of these the first; the tokens with the largest hash. */
enum moe_ref_order { MOE_REF_BY_PROB, MOE_REF_BY_POSITION, MOE_REF_BY_CHOICE, MOE_REF_RANDOM };

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

/* x [T,H], gain [H] -> y [T,H] = x / sqrt(mean of x^2 over H + 1e-5) * gain.
 * Cost: reads T*H + H; writes T*H. Source: Zhang, Sennrich 2019 (RMSNorm). */
void MOE_REAL(moe_ref_rmsnorm)(int64_t T, int64_t H, const moe_real *x, const moe_real *gain, moe_real *y);

/* dy [T,H] and the inputs of rmsnorm -> dx [T,H], dgain [H].
 * Cost: reads 2*T*H + H (+ T*H with add_x, H with add_gain); writes T*H + H. */
void MOE_REAL(moe_ref_rmsnorm_bwd)(int64_t T, int64_t H, const moe_real *x, const moe_real *gain,
                                   const moe_real *dy, moe_real *dx, moe_real *dgain, bool add_x,
                                   bool add_gain);

/* qkv [T,3H] -> o [T,H]: causal attention of A heads of d = H / A (even) inside sequences of S > 0 tokens.
 * A row is [q | k | v], each A heads of d. Token t is at position t % S of sequence t / S; the last one may
 * be short. Rotary: with angle = position * 10000^(-2i/d) the pair (i, i + d/2) of every q and k becomes
 * (a cos - b sin, b cos + a sin). o = softmax over the token and those before it of (q . k / sqrt(d)), times
 * v. Cost: 2*T*S*H operations; reads 3*T*H; writes T*H; memory for 7*S*H/A + 2*S, aborts when there is none.
 * Source: Vaswani et al. 2017; Su et al. 2021 (rotary), pairs as in Llama. */
void MOE_REAL(moe_ref_attention)(int64_t T, int64_t H, int64_t A, int64_t S, const moe_real *qkv,
                                 moe_real *o);

/* qkv [T,3H], dout [T,H] (the gradient of o) -> dqkv [T,3H]. The probabilities are computed again.
 * Cost: 5*T*S*H operations; reads 4*T*H (+ 3*T*H with add); writes 3*T*H; memory as above. */
void MOE_REAL(moe_ref_attention_bwd)(int64_t T, int64_t H, int64_t A, int64_t S, const moe_real *qkv,
                                     const moe_real *dout, moe_real *dqkv, bool add);

/* a [n], b [n] -> y [n] = a + b; and dy [n] -> da [n] = dy, db [n] = dy.
 * Cost: reads 2*n; writes n. Backward: reads n (+ n for each add); writes 2*n. */
void MOE_REAL(moe_ref_add)(int64_t n, const moe_real *a, const moe_real *b, moe_real *y);
void MOE_REAL(moe_ref_add_bwd)(int64_t n, const moe_real *dy, moe_real *da, moe_real *db, bool add_a,
                               bool add_b);

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
 * Cost: reads T*E; writes T*E, 2*T*K int32, E int64; O(T*E*K) comparisons. */
void MOE_REAL(moe_ref_topk)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                            int32_t *expert, int32_t *slot, int64_t *counts);

/* As topk, but prob is the sigmoid of each logit by itself, 1 / (1 + exp(-logit)), computed in double and
 * rounded once; a token's do not sum to 1 (normalize makes weights of them).
 * Cost: as topk. Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 2.1.2 (affinity scores),
 * without its bias of the choices. */
void MOE_REAL(moe_ref_topk_sigmoid)(int64_t T, int64_t E, int64_t K, const moe_real *logits, moe_real *prob,
                                    int32_t *expert, int32_t *slot, int64_t *counts);

/* want [E], a number of tokens from 0 to T for each expert, T*K in all -> expert [T,K], slot [T,K], counts
 * [E] of topk for choices that somebody else made: with the tokens in a circle, the experts in order take as
 * many as they want, each from where the one before stopped. Aborts when they want anything else. Cost:
 * reads E int32; writes 2*T*K int32, E int64; O(T*K*E) comparisons. */
void MOE_REAL(moe_ref_force)(int64_t T, int64_t E, int64_t K, const int32_t *want, int32_t *expert,
                             int32_t *slot, int64_t *counts);

/* prob [T,E], dprob [T,E] -> dlogits [T,E]: the backward of the softmax, prob * (dprob - sum of prob *
 * dprob). Cost: reads 2*T*E (+ T*E with add); writes T*E. */
void MOE_REAL(moe_ref_topk_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                moe_real *dlogits, bool add);

/* The same of topk_sigmoid: dprob * prob * (1 - prob). Cost: as topk_bwd. */
void MOE_REAL(moe_ref_topk_sigmoid_bwd)(int64_t T, int64_t E, const moe_real *prob, const moe_real *dprob,
                                        moe_real *dlogits, bool add);

/* counts [E] -> largest [1], 0 without experts. Cost: reads E int64. */
void MOE_REAL(moe_ref_largest)(int64_t E, const int64_t *counts, int64_t *largest);

/* -> y [1] = value. */
void MOE_REAL(moe_ref_set)(int64_t value, int64_t *y);

/* prob [T,E], expert [T,K] -> slot [T,K], kept_expert [T,K], kept [E], arrive [E] (not touched unless pad):
 * a capacity of C rows for each expert and group of G consecutive tokens (G > 0 unless T is 0; the last group
 * may be short). A group keeps, of the choices of an expert, C by `order`; at random, token t has the hash of
 * seed + t.
 * Result: kept_expert is the expert, or -1 for a dropped choice. slot is the row of a kept choice, in order
 * of expert, then token; else -1. Rows are packed and kept[e] counts those of e; or, with pad, group g of
 * expert e starts at row (e * n_groups + g) * C, n_groups = max(1, ceil(T / G)), and kept[e] = arrive[e] =
 * C * n_groups for every expert. Cost: reads and writes 4*T*K int32, E int64; O(T*K*E) comparisons, and the
 * square of the choices of a group and expert. Source: Megatron-LM, apply_router_token_dropping. */
void MOE_REAL(moe_ref_limit)(int64_t T, int64_t E, int64_t K, int64_t C, int64_t G, enum moe_ref_order order,
                             bool pad, uint64_t seed, const moe_real *prob, const int32_t *expert,
                             int32_t *slot, int32_t *kept_expert, int64_t *kept, int64_t *arrive);

/* prob [T,E], expert [T,K] -> gate [T,E] = prob / s of the token's experts, 0 of others; s is the sum of prob
 * over the token's experts, 2^-23 at least; -1 is no expert. Cost: reads T*K, T*K int32; writes T*E.
 * Source: DeepSpeed, top2gating (clamp at the epsilon of float32); Tutel, extract_critical. */
void MOE_REAL(moe_ref_normalize)(int64_t T, int64_t E, int64_t K, const moe_real *prob, const int32_t *expert,
                                 moe_real *gate);

/* The inputs of normalize and dgate [T,E] -> dprob [T,E], zero where the token has no expert.
 * Cost: reads 2*T*K, T*K int32 (+ T*E with add); writes T*E. */
void MOE_REAL(moe_ref_normalize_bwd)(int64_t T, int64_t E, int64_t K, const moe_real *prob,
                                     const int32_t *expert, const moe_real *dgate, moe_real *dprob, bool add);

/* prob [T,E], all_counts [E] -> loss [1] = factor * sum over t, e of prob[t,e] * all_counts[e].
 * Cost: reads T*E, E int64; writes 1. */
void MOE_REAL(moe_ref_aux_loss)(int64_t T, int64_t E, double factor, const moe_real *prob,
                                const int64_t *all_counts, moe_real *loss);

/* all_counts [E] -> dprob [T,E] = factor * all_counts: the gradient of that loss.
 * Cost: reads E int64 (+ T*E with add); writes T*E. */
void MOE_REAL(moe_ref_aux_loss_bwd)(int64_t T, int64_t E, double factor, const int64_t *all_counts,
                                    moe_real *dprob, bool add);

/* expert [T,K] -> slot [T,K]: the place of each choice of the experts f .. f + e - 1 among these, in order of
 * expert, then token; -1 for all others. f >= 0, so -1 is never one. local [T,K] (may be NULL): expert - f of
 * these, -1 for all others. Cost: reads T*K int32, writes T*K int32 (2*T*K with local);
 * O(T*K*e) comparisons. */
void MOE_REAL(moe_ref_select)(int64_t T, int64_t e, int64_t K, int64_t f, const int32_t *expert,
                              int32_t *slot, int32_t *local);

/* expert [T,K] -> slot [T,P], tokens_for [P]: E experts in order, split evenly over P members of a group.
 * Result: slot[t,p] is the place of (t,p) when all pairs of a token and a member that has any of its experts
 * are sorted by member, then by token; else -1. tokens_for[p] is the number of pairs with member p.
 * Cost: reads T*K int32; writes T*P int32, P int64. */
void MOE_REAL(moe_ref_spread)(int64_t T, int64_t E, int64_t K, int64_t P, const int32_t *expert,
                              int32_t *slot, int64_t *tokens_for);

/* expert [T,K], slot [T,K] (rows packed in order of expert, then token; -1: dropped), counts [E] (rows of
 * each expert) -> aligned [E], aligned_slot [T,K]: the rows of every expert are padded to a multiple of A >
 * 0, as the tiles of grouped matrix products want them.
 * Result: aligned[e] is counts[e] rounded up to a multiple of A, 0 for 0; aligned_slot is slot moved so that
 * expert e begins at the sum of aligned[0] .. aligned[e - 1]; -1 stays. What permute then makes of n = sum of
 * aligned rows has zeros where it is padded. Cost: reads 2*T*K int32, E int64; writes T*K int32, E int64;
 * O(T*K*E) comparisons. Source: DeepGEMM, m-grouped GEMM of contiguous layout (A = 128); Megatron-LM,
 * moe-router-padding-for-quantization (A = 16, 32), which pads by routing more tokens instead. */
void MOE_REAL(moe_ref_align)(int64_t T, int64_t E, int64_t K, int64_t A, const int32_t *expert,
                             const int32_t *slot, const int64_t *counts, int32_t *aligned_slot,
                             int64_t *aligned);

/* x [T,H], slot [T,K] -> rows [n,H]: rows[slot[t,k]] = x[t]; rows that no slot names are 0. The float version
 * moves int32 as well.
 * Cost: reads T*H, T*K int32; writes n*H + T*K*H. */
void MOE_REAL(moe_ref_permute)(int64_t T, int64_t H, int64_t K, int64_t n, const moe_real *x,
                               const int32_t *slot, moe_real *rows);

/* drows [n,H], slot [T,K] -> dx [T,H]: dx[t] = sum over k of drows[slot[t,k]].
 * Cost: reads T*K*H, T*K int32 (+ T*H with add); writes T*H. */
void MOE_REAL(moe_ref_permute_bwd)(int64_t T, int64_t H, int64_t K, int64_t n, const moe_real *drows,
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

/* rows [n,H], prob [T,E], expert [T,K], slot [T,K] -> y [T,H]:
 * y[t] = sum over k of prob[t, expert[t,k]] * rows[slot[t,k]].
 * Cost: reads T*K*H + T*K, 2*T*K int32; writes T*H. */
void MOE_REAL(moe_ref_combine)(int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const moe_real *rows,
                               const moe_real *prob, const int32_t *expert, const int32_t *slot, moe_real *y);

/* The inputs of combine and dy [T,H] -> drows [n,H], zero where no slot points; dprob [T,E], zero where not
 * chosen or dropped, else the dot product of dy[t] and the row: by the fixed tree of all dot products here,
 * or by one that is chosen from the number of rows, as PyTorch's row sums do on a GPU. With P(x) the largest
 * power of two up to x, a block of P(n) rows, 512 / min(P(H), 32) at most, has min(P(H), 512 / that) threads
 * a row; each sums every so many-th product, by fours; then halves of the threads are added down to 32, and
 * these pairwise. So for H >= 32 a row has the same bits inside any 16 rows or more. Valid for H < 8192:
 * above, rows are split over warps too. Cost: reads T*H + T*K*H + T*K, 2*T*K int32; writes n*H + T*K*H +
 * T*E. Source: PyTorch, aten/src/ATen/native/cuda/Reduce.cuh (set_block_dimension, thread_reduce,
 * block_x_reduce); newer ones load a single row by vectors, which is not here. */
void MOE_REAL(moe_ref_combine_bwd)(int64_t T, int64_t H, int64_t K, int64_t E, int64_t n,
                                   const moe_real *rows, const moe_real *prob, const int32_t *expert,
                                   const int32_t *slot, const moe_real *dy, bool by_rows, moe_real *drows,
                                   moe_real *dprob);

/* prob [T,E], expert [T,K] -> taken [T,K] = prob[t, expert[t,k]], 0 for -1; and its backward: dtaken [T,K] ->
 * dprob [T,E]. Cost: reads T*K, T*K int32; writes T*K. Backward: writes T*E (not with add) + T*K. */
void MOE_REAL(moe_ref_take)(int64_t T, int64_t E, int64_t K, const moe_real *prob, const int32_t *expert,
                            moe_real *taken);
void MOE_REAL(moe_ref_take_bwd)(int64_t T, int64_t E, int64_t K, const int32_t *expert,
                                const moe_real *dtaken, moe_real *dprob, bool add);

/* rows [n,H], weight [n] -> y [n,H] = weight * row; and its backward: dy [n,H] -> drows [n,H] = weight * dy,
 * dweight [n], the dot products of combine_bwd. Cost: reads n*H + n; writes n*H. Backward: reads 2*n*H + n;
 * writes n*H + n. */
void MOE_REAL(moe_ref_weigh)(int64_t n, int64_t H, const moe_real *rows, const moe_real *weight, moe_real *y);
void MOE_REAL(moe_ref_weigh_bwd)(int64_t n, int64_t H, const moe_real *rows, const moe_real *weight,
                                 const moe_real *dy, bool by_rows, moe_real *drows, moe_real *dweight);

/* logits [T,V], target [T] in 0..V-1 -> dlogits [T,V], loss [1].
 * Result: loss is the sum (not the mean) over tokens of -log softmax(logits[t])[target[t]], nats; dlogits =
 * softmax - onehot(target), the gradient of that sum.
 * Cost: reads T*V, T int32; writes T*V + 1. */
void MOE_REAL(moe_ref_xent)(int64_t T, int64_t V, const moe_real *logits, const int32_t *target,
                            moe_real *dlogits, moe_real *loss);

/* -> y [n] = 0. Cost: writes n. */
void MOE_REAL(moe_ref_zero)(int64_t n, moe_real *y);

/* g [n] -> out [n] = g / divisor; out may be g.
 * Cost: reads n; writes n. */
void MOE_REAL(moe_ref_scale)(int64_t n, double divisor, const moe_real *g, moe_real *out);

/* x [n] -> y [n] = x; they do not overlap. Cost: reads n; writes n. */
void MOE_REAL(moe_ref_copy)(int64_t n, const moe_real *x, moe_real *y);

/* param [n], grad [n] -> out [n] = param - factor * grad; out may be param.
 * Cost: reads 2*n; writes n. */
void MOE_REAL(moe_ref_sgd)(int64_t n, double factor, const moe_real *param, const moe_real *grad,
                           moe_real *out);

/* g [n] -> norm [1] = sum of g^2, in double. Cost: reads n; writes 1 double. */
void MOE_REAL(moe_ref_sqnorm)(int64_t n, const moe_real *g, double *norm, bool add);

/* g [n], norm [1], other_norm [1] (sums of squares) -> out [n] = g * min(1, limit / sqrt(norm + other_norm));
 * out may be g. Cost: reads n, 2 double; writes n. */
void MOE_REAL(moe_ref_clip)(int64_t n, double limit, const moe_real *g, const double *norm,
                            const double *other_norm, moe_real *out);

/* param, grad, m, v [n] -> param_out, m_out, v_out [n], which may be param, m and v:
 * m = 0.9 m + 0.1 grad; v = 0.95 v + 0.05 grad^2; with mhat = m / (1 - 0.9^step), vhat = v / (1 - 0.95^step):
 * param - rate * (mhat / (sqrt(vhat) + 1e-8) + decay * param). step: 1 for the first; m and v start at 0.
 * Cost: reads 4*n; writes 3*n. Source: Loshchilov, Hutter 2019; the betas of Brown et al. 2020. */
void MOE_REAL(moe_ref_adamw)(int64_t n, double rate, double decay, int64_t step, const moe_real *param,
                             const moe_real *grad, const moe_real *m, const moe_real *v, moe_real *param_out,
                             moe_real *m_out, moe_real *v_out);

#endif
