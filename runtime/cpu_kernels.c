/* cpu_kernels.c - see cpu_kernels.h. Compiled once per real type, like kernels/ref.c. */
#include "runtime/cpu_kernels.h"

#include "kernels/ref.h"
#include "runtime/kernel_calls.h"
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
#define RUN(NAME, name, ...)                                                                                 \
    case MOE_K_##NAME: MOE_REAL(moe_ref_##name)(__VA_ARGS__); break;
        MOE_KERNEL_CALLS(RUN)
#undef RUN
    case MOE_K_TOPK:
        MOE_REAL(moe_ref_topk)(d[0], d[1], d[2], in[0], out[0], out[1], out[2], out[3]);
        if (launch->forced) MOE_REAL(moe_ref_force)(d[0], d[1], d[2], launch->forced, out[1], out[2], out[3]);
        break;
    case MOE_K_GEMM: gemm(d[0], d[1], d[2], op->trans_a, op->trans_b, in[0], in[1], out[0], add); break;
    case MOE_K_GROUPED_GEMM:
        MOE_REAL(moe_ref_grouped_gemm)
        (gemm, d[0], d[1], d[2], launch->rows, op->trans_b, in[0], in[1], out[0], add);
        break;
    case MOE_K_GROUPED_WGRAD:
        MOE_REAL(moe_ref_grouped_wgrad)(gemm, d[0], d[1], d[2], launch->rows, in[0], in[1], out[0], add);
        break;
    case MOE_K_COUNT: moe_assert(!"a kernel");
    }
}
