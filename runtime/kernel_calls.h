/* kernel_calls - a launch as the arguments of a kernel: one row for each, shared by the devices, whose
 * functions (moe_ref_*, moe_cuda_*) take the same arguments in the same order.
 *
 * Matrix products (GEMM, GROUPED_GEMM, GROUPED_WGRAD) are a library's, and TOPK can be forced: they have no
 * row. */
#ifndef MOE_KERNEL_CALLS_H
#define MOE_KERNEL_CALLS_H

#include "kernels/ref.h"
#include "runtime/device.h"

static inline enum moe_ref_order moe_limit_order(const struct moe_op *op)
{
    static const enum moe_ref_order order[] = {[MOE_LIMIT_BY_PROB] = MOE_REF_BY_PROB,
                                               [MOE_LIMIT_BY_POSITION] = MOE_REF_BY_POSITION,
                                               [MOE_LIMIT_BY_CHOICE] = MOE_REF_BY_CHOICE,
                                               [MOE_LIMIT_RANDOM] = MOE_REF_RANDOM};
    return order[op->mode & MOE_LIMIT_ORDER];
}

/* Seed of the rank's first token in this step and layer; the next token has the next. */
static inline uint64_t moe_limit_seed(const struct moe_launch *launch)
{
    uint64_t run = moe_hash64(launch->op->seed ^ moe_hash64((uint64_t)launch->step));
    return moe_hash64(run ^ (uint64_t)launch->layer) + (uint64_t)launch->dims[5];
}

/* RUN(kernel, function, arguments), which name what is in scope where they are used:
 *   launch, op, d, in, out  of struct moe_launch: itself, its op, dims, in and out
 *   add, add1               does the first write, the second one, accumulate?
 *   by_rows                 are dot products summed as MOE_DOT_BY_ROWS says? */
/* clang-format off */
#define MOE_KERNEL_CALLS(RUN) \
    RUN(EMBED, embed, d[0], d[1], d[2], in[0], in[1], out[0]) \
    RUN(EMBED_BWD, embed_bwd, d[0], d[1], d[2], in[0], in[1], out[0], add) \
    RUN(RMSNORM, rmsnorm, d[0], d[1], in[0], in[1], out[0]) \
    RUN(RMSNORM_BWD, rmsnorm_bwd, d[0], d[1], in[0], in[1], in[2], out[0], out[1], add, add1) \
    RUN(ATTENTION, attention, d[0], d[1], d[2], d[3], in[0], out[0]) \
    RUN(ATTENTION_BWD, attention_bwd, d[0], d[1], d[2], d[3], in[0], in[1], out[0], add) \
    RUN(ADD, add, d[0], in[0], in[1], out[0]) \
    RUN(ADD_BWD, add_bwd, d[0], in[0], out[0], out[1], add, add1) \
    RUN(TOPK_BWD, topk_bwd, d[0], d[1], in[0], in[1], out[0], add) \
    RUN(LARGEST, largest, d[0], in[0], out[0]) \
    RUN(SET, set, d[0], out[0]) \
    RUN(LIMIT, limit, d[0], d[1], d[2], d[3], d[4], moe_limit_order(op), \
        op->mode & MOE_LIMIT_PAD, moe_limit_seed(launch), in[0], in[1], out[0], out[1], out[2], out[3]) \
    RUN(NORMALIZE, normalize, d[0], d[1], d[2], in[0], in[1], out[0]) \
    RUN(NORMALIZE_BWD, normalize_bwd, d[0], d[1], d[2], in[0], in[1], in[2], out[0], add) \
    RUN(AUX_LOSS, aux_loss, d[0], d[1], op->factor / launch->divisor, in[0], in[1], out[0]) \
    RUN(AUX_LOSS_BWD, aux_loss_bwd, d[0], d[1], op->factor / launch->divisor, in[0], out[0], add) \
    RUN(SELECT, select, d[0], d[1], d[2], d[3], in[0], out[0], out[1]) \
    RUN(SPREAD, spread, d[0], d[1], d[2], d[3], in[0], out[0], out[1]) \
    RUN(PERMUTE, permute, d[0], d[1], d[2], d[3], in[0], in[1], out[0]) \
    RUN(PERMUTE_BWD, permute_bwd, d[0], d[1], d[2], d[3], in[0], in[1], out[0], add) \
    RUN(SORT_ROWS, sort_rows, d[0], d[1], d[2], in[0], in[1], out[0], add) \
    RUN(UNSORT_ROWS, unsort_rows, d[0], d[1], d[2], in[0], in[1], out[0], add) \
    RUN(SWIGLU, swiglu, d[0], d[1], in[0], out[0]) \
    RUN(SWIGLU_BWD, swiglu_bwd, d[0], d[1], in[0], in[1], out[0], add) \
    RUN(TAKE, take, d[0], d[1], d[2], in[0], in[1], out[0]) \
    RUN(TAKE_BWD, take_bwd, d[0], d[1], d[2], in[0], in[1], out[0], add) \
    RUN(WEIGH, weigh, d[0], d[1], in[0], in[1], out[0]) \
    RUN(WEIGH_BWD, weigh_bwd, d[0], d[1], in[0], in[1], in[2], by_rows, out[0], out[1]) \
    RUN(COMBINE, combine, d[0], d[1], d[2], d[3], d[4], in[0], in[1], in[2], in[3], out[0]) \
    RUN(COMBINE_BWD, combine_bwd, d[0], d[1], d[2], d[3], d[4], in[0], in[1], in[2], in[3], in[4], \
        by_rows, out[0], out[1]) \
    RUN(XENT, xent, d[0], d[1], in[0], in[1], out[0], out[1]) \
    RUN(ZERO, zero, d[0], out[0]) \
    RUN(SCALE, scale, d[0], launch->divisor, in[0], out[0]) \
    RUN(COPY, copy, d[0], in[0], out[0]) \
    RUN(SGD, sgd, d[0], op->factor, in[0], in[1], out[0]) \
    RUN(SQNORM, sqnorm, d[0], in[0], out[0], add) \
    RUN(CLIP, clip, d[0], op->factor, in[0], in[1], in[2], out[0]) \
    RUN(ADAMW, adamw, d[0], op->factor, op->decay, launch->step, in[0], in[1], in[2], in[3], out[0], \
        out[1], out[2])
/* clang-format on */

#endif
