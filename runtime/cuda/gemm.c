/* gemm.c - see device_internal.h.
 *
 * cuBLAS reads matrices by columns. What is [r,c] by rows is [c,r] by columns, its transpose, with the
 * leading dimension c: so C = op(A) op(B) of [m,n] by rows is C^T = op(B)^T op(A)^T of [n,m] by columns.
 * Hence operands are passed in the other order, m and n too, and a matrix is transposed there when it is
 * here. */
#include "runtime/cuda/device_internal.h"

#include <stdlib.h>

enum { BLAS_WORKSPACE_BYTES = 32 << 20 }; /* what the manual asks for on Hopper */

struct product { /* C [m,n] = op(A) [m,k] op(B) [k,n], by rows */
    int m, n, k;
    const void *a, *b;
    void *c;
};

/* Products of one operation. All or none of them add, and are transposed. */
struct products {
    enum moe_cuda_type type;
    bool trans_a, trans_b, add;
    int n;
    struct product *list;
};

static int check(cublasStatus_t code, const char *call)
{
    if (code == CUBLAS_STATUS_SUCCESS) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s (%s)", call, cublasGetStatusString(code), cublasGetStatusName(code));
}

static cudaDataType_t data_type(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64 ? CUDA_R_64F : type == MOE_CUDA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static cublasComputeType_t compute_type(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
}

static size_t bytes_of(enum moe_cuda_type type)
{
    return type == MOE_CUDA_F64 ? 8 : type == MOE_CUDA_BF16 ? 2 : 4;
}

static int leading_a(const struct products *p, int i)
{
    return p->trans_a ? p->list[i].m : p->list[i].k;
}

static int leading_b(const struct products *p, int i)
{
    return p->trans_b ? p->list[i].k : p->list[i].n;
}

static cublasOperation_t operation(bool transposed)
{
    return transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/* Setting the stream takes the workspace away, so that comes first. */
static int open_blas(struct moe_cuda *c, struct moe_cuda_stream *s)
{
    void *workspace;
    MOE_TRY(check(cublasCreate(&s->blas), "cublasCreate"));
    MOE_TRY(moe_cuda_pool_take(&c->pool, BLAS_WORKSPACE_BYTES, &workspace));
    MOE_TRY(check(cublasSetStream(s->blas, s->stream), "cublasSetStream"));
    MOE_TRY(check(cublasSetWorkspace(s->blas, workspace, BLAS_WORKSPACE_BYTES), "cublasSetWorkspace"));
    /* Parts of a sum that is split are added in float, not in bf16. */
    return check(
        cublasSetMathMode(s->blas, CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
        "cublasSetMathMode");
}

void moe_cuda_blas_close(struct moe_cuda_stream *s)
{
    if (s->blas) cublasDestroy(s->blas);
}

/* ---- products with elements, and k > 0 ---- */

static int one(cublasHandle_t blas, const struct products *p, int i)
{
    const struct product *x = &p->list[i];
    const cudaDataType_t type = data_type(p->type);
    const double alpha_f64 = 1, beta_f64 = p->add;
    const float alpha_f32 = 1, beta_f32 = p->add;
    const bool wide = p->type == MOE_CUDA_F64;
    return check(cublasGemmEx(blas, operation(p->trans_b), operation(p->trans_a), x->n, x->m, x->k,
                              wide ? (const void *)&alpha_f64 : &alpha_f32, x->b, type, leading_b(p, i), x->a,
                              type, leading_a(p, i), wide ? (const void *)&beta_f64 : &beta_f32, x->c, type,
                              x->n, compute_type(p->type), CUBLAS_GEMM_DEFAULT),
                 "cublasGemmEx");
}

static int one_by_one(cublasHandle_t blas, const struct products *p)
{
    for (int i = 0; i < p->n; i++) MOE_TRY(one(blas, p, i));
    return MOE_OK;
}

#if CUBLAS_VERSION >= 120500 /* where cublasGemmGroupedBatchedEx came: of float, double, bf16 */

/* What the call takes as arrays, of the host but for pointers. */
struct arrays {
    cublasOperation_t *trans_a, *trans_b;
    int *m, *n, *k, *lead_a, *lead_b, *ones;
    void *alpha, *beta;
    const void **pointers; /* [3][n]: b, a, c */
};

static struct arrays open_arrays(const struct products *p)
{
    const size_t n = (size_t)p->n;
    struct arrays a = {
        moe_alloc(n, sizeof *a.trans_a), moe_alloc(n, sizeof *a.trans_b),     moe_alloc(n, sizeof *a.m),
        moe_alloc(n, sizeof *a.n),       moe_alloc(n, sizeof *a.k),           moe_alloc(n, sizeof *a.lead_a),
        moe_alloc(n, sizeof *a.lead_b),  moe_alloc(n, sizeof *a.ones),        moe_alloc(n, sizeof(double)),
        moe_alloc(n, sizeof(double)),    moe_alloc(3 * n, sizeof *a.pointers)};
    for (int i = 0; i < p->n; i++) {
        const struct product *x = &p->list[i];
        a.trans_a[i] = operation(p->trans_a);
        a.trans_b[i] = operation(p->trans_b);
        a.m[i] = x->m, a.n[i] = x->n, a.k[i] = x->k;
        a.lead_a[i] = leading_a(p, i);
        a.lead_b[i] = leading_b(p, i);
        a.ones[i] = 1;
        if (p->type == MOE_CUDA_F64)
            ((double *)a.alpha)[i] = 1, ((double *)a.beta)[i] = p->add;
        else
            ((float *)a.alpha)[i] = 1, ((float *)a.beta)[i] = p->add;
        a.pointers[i] = x->b, a.pointers[p->n + i] = x->a, a.pointers[2 * p->n + i] = x->c;
    }
    return a;
}

static void close_arrays(struct arrays *a)
{
    free(a->trans_a), free(a->trans_b), free(a->m), free(a->n), free(a->k), free(a->lead_a), free(a->lead_b);
    free(a->ones), free(a->alpha), free(a->beta), free(a->pointers);
}

/* The manual asks this of every pointer for bf16; the others' own size is enough. */
static bool aligned(const struct products *p)
{
    for (int i = 0; i < p->n && p->type == MOE_CUDA_BF16; i++) {
        const struct product *x = &p->list[i];
        if (((uintptr_t)x->a | (uintptr_t)x->b | (uintptr_t)x->c) % 16) return false;
    }
    return true;
}

/* All at once. The pointers are read on the device: they lie in the workspace of the stream, whose kernels
 * before are done with it then. *took: false where cuBLAS cannot do it on this GPU. */
static int grouped(struct moe_cuda *c, const struct products *p, int stream, bool *took)
{
    struct moe_cuda_stream *s = &c->streams[stream];
    const struct moe_cuda_queue *queue;
    const cudaDataType_t type = data_type(p->type);
    struct arrays a = open_arrays(p);
    const size_t bytes = 3 * (size_t)p->n * sizeof *a.pointers;
    int err = MOE_OK;
    MOE_TRY_GOTO(moe_cuda_workspace(c, stream, bytes, &queue));
    MOE_TRY_GOTO(moe_cuda_to_device(&s->staging, s->stream, queue->workspace, a.pointers, bytes));
    void **pointers = queue->workspace;
    cublasStatus_t code = cublasGemmGroupedBatchedEx(
        s->blas, a.trans_b, a.trans_a, a.n, a.m, a.k, a.alpha, (const void *const *)pointers, type, a.lead_b,
        (const void *const *)(pointers + p->n), type, a.lead_a, a.beta, pointers + 2 * p->n, type, a.n, p->n,
        a.ones, compute_type(p->type));
    *took = code != CUBLAS_STATUS_NOT_SUPPORTED && code != CUBLAS_STATUS_ARCH_MISMATCH;
    if (*took) err = check(code, "cublasGemmGroupedBatchedEx");
done:
    close_arrays(&a);
    return err;
}

static int multiply(struct moe_cuda *c, const struct products *p, int stream)
{
    bool took = false;
    if (p->n > 1 && !c->loop && aligned(p)) MOE_TRY(grouped(c, p, stream, &took));
    return took ? MOE_OK : one_by_one(c->streams[stream].blas, p);
}

#else

static int multiply(struct moe_cuda *c, const struct products *p, int stream)
{
    return one_by_one(c->streams[stream].blas, p);
}

#endif

/* ---- operations ---- */

static int dimension(int64_t n)
{
    moe_assert(n >= 0 && n <= INT32_MAX);
    return (int)n;
}

/* C = 0, where it is a sum of nothing and not added to. */
static int clear(struct moe_cuda *c, const struct products *p, int64_t n, void *at, int stream)
{
    if (p->add || !n) return MOE_OK;
    return moe_cuda_check((cudaError_t)moe_cuda_zero(&c->streams[stream].queue, p->type, n, at), "zero");
}

/* Adds a product to the list, where it has elements and a sum. */
static int append(struct moe_cuda *c, struct products *p, int64_t m, int64_t n, int64_t k, const void *a,
                  const void *b, void *out, int stream)
{
    if (!m || !n) return MOE_OK;
    if (!k) return clear(c, p, m * n, out, stream);
    p->list[p->n++] = (struct product){dimension(m), dimension(n), dimension(k), a, b, out};
    return MOE_OK;
}

static const char *at(const void *base, enum moe_cuda_type type, int64_t elements)
{
    return elements ? (const char *)base + (size_t)elements * bytes_of(type) : base;
}

static int list(struct moe_cuda *c, const struct moe_launch *l, struct products *p, int stream)
{
    const int64_t *d = l->dims, n = d[1], k = d[2];
    int64_t row = 0;
    if (l->op->kernel == MOE_K_GEMM)
        return append(c, p, d[0], d[1], d[2], l->in[0], l->in[1], l->out[0], stream);
    const bool wgrad = l->op->kernel == MOE_K_GROUPED_WGRAD;
    for (int64_t g = 0; g < d[0]; row += l->rows[g], g++) {
        const void *rows = at(l->in[0], p->type, row * k);
        if (wgrad) /* dB[g] = A_g^T dC_g */
            MOE_TRY(append(c, p, k, n, l->rows[g], rows, at(l->in[1], p->type, row * n),
                           (void *)at(l->out[0], p->type, g * k * n), stream));
        else
            MOE_TRY(append(c, p, l->rows[g], n, k, rows, at(l->in[1], p->type, g * k * n),
                           (void *)at(l->out[0], p->type, row * n), stream));
    }
    return MOE_OK;
}

int moe_cuda_products(struct moe_cuda *c, const struct moe_launch *launch, enum moe_cuda_type type,
                      int stream)
{
    const struct moe_op *op = launch->op;
    const bool grouped_op = op->kernel != MOE_K_GEMM;
    struct moe_cuda_stream *s = &c->streams[stream];
    if (!s->blas) MOE_TRY(open_blas(c, s));
    struct products p = {type, grouped_op ? op->kernel == MOE_K_GROUPED_WGRAD : op->trans_a,
                         op->kernel != MOE_K_GROUPED_WGRAD && op->trans_b, op->writes[0].accumulate};
    p.list = moe_alloc((size_t)(grouped_op ? launch->dims[0] : 1), sizeof *p.list);
    int err = list(c, launch, &p, stream);
    if (err >= 0 && p.n) err = multiply(c, &p, stream);
    free(p.list);
    return err;
}
