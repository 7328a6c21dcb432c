/* cpu_kernels - a launch as a call on this host: BLAS for matrix products, kernels/ref.h for the rest. */
#ifndef MOE_CPU_KERNELS_H
#define MOE_CPU_KERNELS_H

#include "runtime/device.h"

/* Runs the launch to its end; moe_cpu_run_f32 when op->type is float32, moe_cpu_run_f64 when it is float64.
 * Types: token, target, expert and slot are int32; counts are int64; all other tensors are op->type.
 * writes[i].accumulate is honoured for every gradient (embed_bwd, gemm, topk_bwd, permute_bwd, sort_rows,
 * unsort_rows, grouped_gemm, grouped_wgrad, swiglu_bwd, dx of combine_bwd).
 * Result: that of kernels/ref.h; matrix products up to the rounding of another order of additions.
 * Errors: none; accumulate elsewhere, or an index out of range, aborts. */
void moe_cpu_run_f32(const struct moe_launch *launch);
void moe_cpu_run_f64(const struct moe_launch *launch);

#endif
