/* cpu_kernels.c - see cpu_kernels.h. Compiled once per real type, like kernels/ref.c. */
#include "runtime/cpu_kernels.h"

#include "kernels/ref.h"
#include "sim/kernel_shapes.h"

#include <cblas.h>

#ifdef MOE_REAL_F64
#define cblas_gemm cblas_dgemm
#else
#define cblas_gemm cblas_sgemm
#endif

/* moe_ref_gemm by BLAS, which refuses leading dimensions of zero and so cannot be asked
 * for empty products. */
static void gemm(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, const moe_real *A,
                 const moe_real *B, moe_real *C, bool add)
{
    if (m == 0 || n == 0 || k == 0) {
        MOE_REAL(moe_ref_gemm)(m, n, k, trans_a, trans_b, A, B, C, add);
        return;
    }
    moe_assert(m <= INT32_MAX && n <= INT32_MAX && k <= INT32_MAX);
    cblas_gemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans,
               (int)m, (int)n, (int)k, 1, A, (int)(trans_a ? m : k), B, (int)(trans_b ? k : n), add ? 1 : 0,
               C, (int)n);
}

static const enum moe_ref_order order[] = {[MOE_LIMIT_BY_PROB] = MOE_REF_BY_PROB,
                                           [MOE_LIMIT_BY_POSITION] = MOE_REF_BY_POSITION,
                                           [MOE_LIMIT_BY_CHOICE] = MOE_REF_BY_CHOICE,
                                           [MOE_LIMIT_RANDOM] = MOE_REF_RANDOM};

/* Seed of the rank's first token in this step and layer; the next token has the next. */
static uint64_t drawn_from(const struct moe_launch *launch)
{
    uint64_t run = moe_hash64(launch->op->seed ^ moe_hash64((uint64_t)launch->step));
    return moe_hash64(run ^ (uint64_t)launch->layer) + (uint64_t)launch->dims[5];
}

void MOE_REAL(moe_cpu_run)(const struct moe_launch *launch)
{
    const struct moe_op *op = launch->op;
    const int64_t *d = launch->dims;
    const void *const *in = launch->in;
    void *const *out = launch->out;
    const bool by_rows = op->mode == MOE_DOT_BY_ROWS;
    bool add = op->writes[0].accumulate, add1 = op->writes[1].accumulate;
    for (int i = 0; i < op->n_writes; i++)
        moe_assert(!op->writes[i].accumulate || (moe_kernel_adds(op->kernel) >> i & 1));
    switch (op->kernel) {
/* clang-format off */
#define RUN(NAME, name, ...) case MOE_K_##NAME: MOE_REAL(moe_ref_##name)(__VA_ARGS__); break;
    RUN(EMBED, embed, d[0], d[1], d[2], in[0], in[1], out[0])
    RUN(EMBED_BWD, embed_bwd, d[0], d[1], d[2], in[0], in[1], out[0], add)
    RUN(RMSNORM, rmsnorm, d[0], d[1], in[0], in[1], out[0])
    RUN(RMSNORM_BWD, rmsnorm_bwd, d[0], d[1], in[0], in[1], in[2], out[0], out[1], add, add1)
    RUN(ATTENTION, attention, d[0], d[1], d[2], d[3], in[0], out[0])
    RUN(ATTENTION_BWD, attention_bwd, d[0], d[1], d[2], d[3], in[0], in[1], out[0], add)
    RUN(ADD, add, d[0], in[0], in[1], out[0])
    RUN(ADD_BWD, add_bwd, d[0], in[0], out[0], out[1], add, add1)
    RUN(TOPK_BWD, topk_bwd, d[0], d[1], in[0], in[1], out[0], add)
    RUN(LARGEST, largest, d[0], in[0], out[0])
    RUN(SET, set, d[0], out[0])
    RUN(LIMIT, limit, d[0], d[1], d[2], d[3], d[4], order[op->mode & MOE_LIMIT_ORDER],
        op->mode & MOE_LIMIT_PAD, drawn_from(launch), in[0], in[1], out[0], out[1], out[2], out[3])
    RUN(NORMALIZE, normalize, d[0], d[1], d[2], in[0], in[1], out[0])
    RUN(NORMALIZE_BWD, normalize_bwd, d[0], d[1], d[2], in[0], in[1], in[2], out[0], add)
    RUN(AUX_LOSS, aux_loss, d[0], d[1], op->factor / launch->divisor, in[0], in[1], out[0])
    RUN(AUX_LOSS_BWD, aux_loss_bwd, d[0], d[1], op->factor / launch->divisor, in[0], out[0], add)
    RUN(SELECT, select, d[0], d[1], d[2], d[3], in[0], out[0], out[1])
    RUN(SPREAD, spread, d[0], d[1], d[2], d[3], in[0], out[0], out[1])
    RUN(PERMUTE, permute, d[0], d[1], d[2], d[3], in[0], in[1], out[0])
    RUN(PERMUTE_BWD, permute_bwd, d[0], d[1], d[2], d[3], in[0], in[1], out[0], add)
    RUN(SORT_ROWS, sort_rows, d[0], d[1], d[2], in[0], in[1], out[0], add)
    RUN(UNSORT_ROWS, unsort_rows, d[0], d[1], d[2], in[0], in[1], out[0], add)
    RUN(GROUPED_GEMM, grouped_gemm, gemm, d[0], d[1], d[2], launch->rows, op->trans_b, in[0], in[1], out[0],
        add)
    RUN(GROUPED_WGRAD, grouped_wgrad, gemm, d[0], d[1], d[2], launch->rows, in[0], in[1], out[0], add)
    RUN(SWIGLU, swiglu, d[0], d[1], in[0], out[0])
    RUN(SWIGLU_BWD, swiglu_bwd, d[0], d[1], in[0], in[1], out[0], add)
    RUN(TAKE, take, d[0], d[1], d[2], in[0], in[1], out[0])
    RUN(TAKE_BWD, take_bwd, d[0], d[1], d[2], in[0], in[1], out[0], add)
    RUN(WEIGH, weigh, d[0], d[1], in[0], in[1], out[0])
    RUN(WEIGH_BWD, weigh_bwd, d[0], d[1], in[0], in[1], in[2], by_rows, out[0], out[1])
    RUN(COMBINE, combine, d[0], d[1], d[2], d[3], d[4], in[0], in[1], in[2], in[3], out[0])
    RUN(COMBINE_BWD, combine_bwd, d[0], d[1], d[2], d[3], d[4], in[0], in[1], in[2], in[3], in[4], by_rows,
        out[0], out[1])
    RUN(XENT, xent, d[0], d[1], in[0], in[1], out[0], out[1])
    RUN(ZERO, zero, d[0], out[0])
    RUN(SCALE, scale, d[0], launch->divisor, in[0], out[0])
    RUN(COPY, copy, d[0], in[0], out[0])
    RUN(SGD, sgd, d[0], op->factor, in[0], in[1], out[0])
    RUN(SQNORM, sqnorm, d[0], in[0], out[0], add)
    RUN(CLIP, clip, d[0], op->factor, in[0], in[1], in[2], out[0])
    RUN(ADAMW, adamw, d[0], op->factor, op->decay, launch->step, in[0], in[1], in[2], in[3], out[0], out[1],
        out[2])
#undef RUN
    /* clang-format on */
    case MOE_K_TOPK:
        MOE_REAL(moe_ref_topk)(d[0], d[1], d[2], in[0], out[0], out[1], out[2], out[3]);
        if (launch->forced) MOE_REAL(moe_ref_force)(d[0], d[1], d[2], launch->forced, out[1], out[2], out[3]);
        break;
    case MOE_K_GEMM: gemm(d[0], d[1], d[2], op->trans_a, op->trans_b, in[0], in[1], out[0], add); break;
    case MOE_K_COUNT: moe_assert(!"a kernel");
    }
}
