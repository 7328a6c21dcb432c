/* cpu_kernels - a launch as a call on this host: BLAS for matrix products, kernels/ref.h for the rest. */
#ifndef MOE_CPU_KERNELS_H
#define MOE_CPU_KERNELS_H

#include "runtime/device.h"
#include "sim/kernel_shapes.h"

/* Runs the launch to its end; _f32 computes in float, _f64 in double (either, where nothing is real: SELECT).
 * Types: token, target, expert and slot are int32; counts are int64; sums of squares are float64; all other
 * tensors are of that real type. writes[i].accumulate is honoured for every gradient that several operations
 * may contribute to (the outputs of embed_bwd, rmsnorm_bwd, attention_bwd, add_bwd, gemm, topk_bwd,
 * aux_loss_bwd, permute_bwd, sort_rows, unsort_rows, grouped_gemm, grouped_wgrad, swiglu_bwd and
 * normalize_bwd) and for sqnorm.
 * Result: that of kernels/ref.h; matrix products up to the rounding of another order of additions.
 * Errors: none; accumulate elsewhere, or an index out of range, aborts. */
void moe_cpu_run_f32(const struct moe_launch *launch);
void moe_cpu_run_f64(const struct moe_launch *launch);

/* bfloat16, emulated: elements are bf16, all of them read as float; the float kernel computes; what it
 * writes is rounded to bf16 once, also where it adds to what is there, and what it leaves stays. COMBINE
 * alone rounds every product and every sum, as frameworks do, which store them; the products of a dot product
 * are not rounded. Collectives that reduce add two ranks' elements in float and round each sum. So loss,
 * parameters and the optimizer's state are bf16 too.
 *   shapes  moe_kernel_shapes()
 * Cost: copies of all operands. */
void moe_cpu_run_bf16(const struct moe_kernel_shape *shapes, const struct moe_launch *launch);

#endif
