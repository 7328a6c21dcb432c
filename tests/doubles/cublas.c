/* cublas.c - the double of cuBLAS: GEMMs of OpenBLAS as work on a stream.
 *
 * float and double are the calls of OpenBLAS with the same arguments, by columns. bf16 is widened to float,
 * multiplied and added to as float, and rounded once. Where TF32 is allowed, operands are rounded to it: who
 * allows it by mistake shall see it. Source of the checks: the reference of cuBLAS, of each function. */
#include <cublas_v2.h>

#include "kernels/bf16.h"
#include "tests/doubles/cuda_double.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cublasContext {
    struct cublasContext *next;
    bool alive;
    int device;
    cudaStream_t stream; /* NULL: never set */
    cublasMath_t math;
    cublasPointerMode_t mode;
    void *workspace; /* NULL: the library's own */
    size_t workspace_bytes;
};

/* Handles that were destroyed stay, to be told from those that live. */
static struct cublasContext *handles;

static bool alive(cublasHandle_t handle)
{
    for (const struct cublasContext *h = handles; h; h = h->next)
        if (h == handle) return h->alive;
    return false;
}

/* ---- the handle ---- */

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
    int device;
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    if (cudaGetDevice(&device)) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    if (!*handle) return CUBLAS_STATUS_ALLOC_FAILED;
    **handle = (struct cublasContext){.next = handles, .alive = true, .device = device};
    handles = *handle;
    return CUBLAS_STATUS_SUCCESS;
}

/* It waits for the device: what it gives back may be in use. */
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->alive = false;
    cudaDeviceSynchronize();
    return CUBLAS_STATUS_SUCCESS;
}

/* "unconditionally resets the workspace": what cublasSetWorkspace gave is of the stream before. */
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->stream = stream;
    handle->workspace = NULL;
    handle->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!stream) return CUBLAS_STATUS_INVALID_VALUE;
    *stream = handle->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if ((uintptr_t)workspace % 256) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes) {
        const struct moe_double_block b = moe_double_find(workspace, "cublasSetWorkspace");
        if (b.type != cudaMemoryTypeDevice || bytes > b.bytes - (size_t)((char *)workspace - b.at))
            moe_double_wrong("cublasSetWorkspace: no %zu bytes of the device", bytes);
    }
    handle->workspace = workspace;
    handle->workspace_bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    const unsigned known = CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (((unsigned)mode & ~known) > CUBLAS_TF32_TENSOR_OP_MATH) return CUBLAS_STATUS_INVALID_VALUE;
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!mode) return CUBLAS_STATUS_INVALID_VALUE;
    *mode = handle->math;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (mode != CUBLAS_POINTER_MODE_HOST && mode != CUBLAS_POINTER_MODE_DEVICE)
        return CUBLAS_STATUS_INVALID_VALUE;
    handle->mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode)
{
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!mode) return CUBLAS_STATUS_INVALID_VALUE;
    *mode = handle->mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
    (void)handle; // the real one takes NULL too
    if (!version) return CUBLAS_STATUS_INVALID_VALUE;
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

static const struct {
    cublasStatus_t code;
    const char *name, *text;
} statuses[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "the library was not initialized"},
    {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "the resource allocation failed"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE",
     "an unsupported value or parameter was passed to the function"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED",
     "the function failed to launch on the GPU"},
    {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "an internal operation failed"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "the functionality is not supported"},
};

const char *cublasGetStatusName(cublasStatus_t status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].code == status) return statuses[i].name;
    return "<unknown>";
}

const char *cublasGetStatusString(cublasStatus_t status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].code == status) return statuses[i].text;
    return "<unknown>";
}

/* ---- a GEMM ---- */

struct shape {
    cublasOperation_t trans_a, trans_b;
    int m, n, k, lda, ldb, ldc;
    double alpha, beta; /* a float is one too */
    int count;          /* problems of this shape, one after the other */
};

/* The matrices of one problem after the other: in memory at a stride, or in an array on the device. */
struct operand {
    char *first;
    long long stride;         /* in elements */
    const void *const *array; /* of all problems; NULL: first and stride */
};

struct gemm {
    cudaDataType_t in, out;
    bool tf32;
    struct operand a, b, c;
    const void *alpha, *beta; /* on the device, read when it runs; NULL: in the shapes */
    void *workspace;
    size_t workspace_bytes;
    int n_shapes;
    struct shape *shapes;
};

static size_t size_of(cudaDataType_t type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

static CBLAS_TRANSPOSE trans_of(cublasOperation_t op)
{
    return op == CUBLAS_OP_N ? CblasNoTrans : CblasTrans;
}

/* Is the matrix memory that lives? */
static bool there(const char *which, const void *p, cudaDataType_t type, int64_t rows, int64_t columns,
                  int64_t ld)
{
    if (!rows || !columns) return true;
    if ((uintptr_t)p % size_of(type) == 0 &&
        moe_double_is_device(p, (size_t)(ld * (columns - 1) + rows) * size_of(type)))
        return true;
    fprintf(stderr, "moesim double: gemm: %s [%lld x %lld] at %p is not in memory of the device\n", which,
            (long long)rows, (long long)columns, p);
    return false;
}

/* 10 bits of the mantissa, to the nearest even. */
static float to_tf32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0xfffu + (bits >> 13 & 1);
    bits &= ~0x1fffu;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* [rows x columns] as floats without gaps. */
static float *widen(const struct gemm *g, const void *p, cudaDataType_t type, int64_t rows, int64_t columns,
                    int64_t ld)
{
    float *wide = malloc((size_t)(rows * columns + 1) * sizeof *wide);
    if (!wide) moe_double_wrong("out of memory");
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = 0; i < rows; i++)
            wide[j * rows + i] = type == CUDA_R_16BF ? moe_bf16_to_float(((const moe_bf16 *)p)[j * ld + i])
                                 : g->tf32           ? to_tf32(((const float *)p)[j * ld + i])
                                                     : ((const float *)p)[j * ld + i];
    return wide;
}

/* Through float copies: of bf16, and of floats that are rounded first. */
static void multiply_wide(const struct gemm *g, const struct shape *s, const void *a, const void *b, void *c)
{
    const int a_rows = s->trans_a == CUBLAS_OP_N ? s->m : s->k,
              b_rows = s->trans_b == CUBLAS_OP_N ? s->k : s->n;
    const int a_columns = s->m + s->k - a_rows, b_columns = s->k + s->n - b_rows;
    const bool narrow = g->out == CUDA_R_16BF;
    float *wide_a = widen(g, a, g->in, a_rows, a_columns, s->lda),
          *wide_b = widen(g, b, g->in, b_rows, b_columns, s->ldb), *wide_c = c;
    moe_bf16 *to = c;
    if (narrow && s->beta != 0) // not read otherwise
        wide_c = widen(g, c, g->out, s->m, s->n, s->ldc);
    else if (narrow)
        wide_c = calloc((size_t)s->m * (size_t)s->n, sizeof *wide_c);
    if (!wide_c) moe_double_wrong("out of memory");
    cblas_sgemm(CblasColMajor, trans_of(s->trans_a), trans_of(s->trans_b), s->m, s->n, s->k, (float)s->alpha,
                wide_a, a_rows ? a_rows : 1, wide_b, b_rows ? b_rows : 1, (float)s->beta, wide_c,
                narrow ? s->m : s->ldc);
    for (int64_t j = 0; narrow && j < s->n; j++)
        for (int64_t i = 0; i < s->m; i++) to[j * s->ldc + i] = moe_bf16_from_float(wide_c[j * s->m + i]);
    if (narrow) free(wide_c);
    free(wide_a);
    free(wide_b);
}

static int multiply(const struct gemm *g, const struct shape *s, const void *a, const void *b, void *c)
{
    const CBLAS_TRANSPOSE ta = trans_of(s->trans_a), tb = trans_of(s->trans_b);
    const int a_rows = ta == CblasNoTrans ? s->m : s->k, b_rows = tb == CblasNoTrans ? s->k : s->n;
    if (!s->m || !s->n) return 1;
    if (!there("C", c, g->out, s->m, s->n, s->ldc)) return -cudaErrorIllegalAddress;
    if (s->alpha != 0 && (!there("A", a, g->in, a_rows, s->m + s->k - a_rows, s->lda) || // not read for 0
                          !there("B", b, g->in, b_rows, s->k + s->n - b_rows, s->ldb)))
        return -cudaErrorIllegalAddress;
    if (s->k && (a == c || b == c)) moe_double_wrong("gemm: its result is one of its operands");
    if (g->in == CUDA_R_64F)
        cblas_dgemm(CblasColMajor, ta, tb, s->m, s->n, s->k, s->alpha, a, s->lda, b, s->ldb, s->beta, c,
                    s->ldc);
    else if (g->in == CUDA_R_32F && !g->tf32)
        cblas_sgemm(CblasColMajor, ta, tb, s->m, s->n, s->k, (float)s->alpha, a, s->lda, b, s->ldb,
                    (float)s->beta, c, s->ldc);
    else
        multiply_wide(g, s, a, b, c);
    return 1;
}

static char *operand_at(const struct operand *o, cudaDataType_t type, int64_t i)
{
    if (o->array) return (char *)o->array[i];
    return o->first + (i ? i * o->stride * (long long)size_of(type) : 0);
}

static double number(const void *p, cudaDataType_t type)
{
    return type == CUDA_R_64F ? *(const double *)p : (double)*(const float *)p;
}

static bool arrays_there(const struct gemm *g, int64_t problems)
{
    const struct operand *all[] = {&g->a, &g->b, &g->c};
    for (int i = 0; i < 3; i++)
        if (all[i]->array && !moe_double_is_device(all[i]->array, (size_t)problems * sizeof(void *)))
            return false;
    return true;
}

static int gemm_step(void *ctx)
{
    struct gemm *g = ctx;
    const size_t number_bytes = g->in == CUDA_R_64F ? 8 : 4, most = 65536;
    int64_t problems = 0, done = 0;
    for (int i = 0; i < g->n_shapes; i++) problems += g->shapes[i].count;
    if (!arrays_there(g, problems) ||
        (g->workspace_bytes && !moe_double_is_device(g->workspace, g->workspace_bytes)))
        return -cudaErrorIllegalAddress;
    if (g->workspace_bytes) // it is the GEMM's alone: nobody's numbers outlive it there
        memset(g->workspace, 0x7f, g->workspace_bytes < most ? g->workspace_bytes : most);
    if (g->alpha) {
        if (!moe_double_is_device(g->alpha, number_bytes) || !moe_double_is_device(g->beta, number_bytes))
            return -cudaErrorIllegalAddress;
        g->shapes->alpha = number(g->alpha, g->in);
        g->shapes->beta = number(g->beta, g->in);
    }
    for (int i = 0; i < g->n_shapes; i++)
        for (int j = 0; j < g->shapes[i].count; j++, done++) {
            const int code = multiply(g, &g->shapes[i], operand_at(&g->a, g->in, done),
                                      operand_at(&g->b, g->in, done), operand_at(&g->c, g->out, done));
            if (code < 0) return code;
        }
    return 1;
}

static void gemm_drop(void *ctx)
{
    struct gemm *g = ctx;
    free(g->shapes);
    free(g);
}

/* ---- what may be asked ---- */

/* mixed: bf16 in, float out, which the grouped one does not take. */
static cublasStatus_t check_types(struct gemm *g, const struct cublasContext *handle, cudaDataType_t a,
                                  cudaDataType_t b, cudaDataType_t c, cublasComputeType_t compute, bool mixed)
{
    const bool as_float = compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC,
               as_double = compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC,
               as_tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const int math = (int)handle->math & ~(int)CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    const bool right = a == CUDA_R_64F    ? as_double && c == a
                       : a == CUDA_R_32F  ? (as_float || as_tf32) && c == a
                       : a == CUDA_R_16BF ? as_float && (c == a || (mixed && c == CUDA_R_32F))
                                          : false;
    if (!right || a != b) return CUBLAS_STATUS_NOT_SUPPORTED;
    g->in = a;
    g->out = c;
    g->tf32 =
        a == CUDA_R_32F && (as_tf32 || (compute == CUBLAS_COMPUTE_32F && math == CUBLAS_TF32_TENSOR_OP_MATH));
    return CUBLAS_STATUS_SUCCESS;
}

static bool known(cublasOperation_t op)
{
    return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C;
}

static cublasStatus_t check_shape(const struct shape *s)
{
    if (!known(s->trans_a) || !known(s->trans_b) || s->m < 0 || s->n < 0 || s->k < 0 || s->count < 0)
        return CUBLAS_STATUS_INVALID_VALUE;
    const int a = s->trans_a == CUBLAS_OP_N ? s->m : s->k, b = s->trans_b == CUBLAS_OP_N ? s->k : s->n;
    return s->lda < (a > 1 ? a : 1) || s->ldb < (b > 1 ? b : 1) || s->ldc < (s->m > 1 ? s->m : 1)
               ? CUBLAS_STATUS_INVALID_VALUE
               : CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t queue_gemm(cublasHandle_t handle, struct gemm what)
{
    struct gemm *g = malloc(sizeof *g);
    int device;
    if (!g) moe_double_wrong("out of memory");
    *g = what;
    g->workspace = handle->workspace;
    g->workspace_bytes = handle->workspace_bytes;
    if (!cudaGetDevice(&device) && device != handle->device)
        moe_double_wrong("cuBLAS: the handle is of device %d, the current one is %d", handle->device, device);
    if (moe_double_enqueue(handle->stream, &(struct moe_double_work){"gemm", gemm_step, gemm_drop, g})) {
        gemm_drop(g);
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* All that has one shape; alpha and beta as the pointer mode says. */
static cublasStatus_t one_shape(cublasHandle_t handle, struct gemm g, struct shape s, const void *alpha,
                                const void *beta)
{
    const cublasStatus_t code = check_shape(&s);
    if (code) return code;
    if (!alpha || !beta) return CUBLAS_STATUS_INVALID_VALUE;
    if (handle->mode == CUBLAS_POINTER_MODE_DEVICE) {
        g.alpha = alpha;
        g.beta = beta;
    } else {
        if (moe_double_find(alpha, "alpha").type == cudaMemoryTypeDevice ||
            moe_double_find(beta, "beta").type == cudaMemoryTypeDevice)
            moe_double_wrong("gemm: alpha or beta is on the device, the pointer mode says host");
        s.alpha = number(alpha, g.in);
        s.beta = number(beta, g.in);
    }
    if (!s.m || !s.n || !s.count) return CUBLAS_STATUS_SUCCESS;
    g.n_shapes = 1;
    g.shapes = malloc(sizeof s);
    if (!g.shapes) moe_double_wrong("out of memory");
    *g.shapes = s;
    return queue_gemm(handle, g);
}

/* ---- the API ---- */

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                          cublasOperation_t transb, int m, int n, int k, const void *alpha,
                                          const void *A, cudaDataType Atype, int lda, long long int strideA,
                                          const void *B, cudaDataType Btype, int ldb, long long int strideB,
                                          const void *beta, void *C, cudaDataType Ctype, int ldc,
                                          long long int strideC, int batchCount,
                                          cublasComputeType_t computeType, cublasGemmAlgo_t algo)
{
    struct gemm g = {
        .a = {(char *)A, strideA, NULL}, .b = {(char *)B, strideB, NULL}, .c = {C, strideC, NULL}};
    cublasStatus_t code;
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    code = check_types(&g, handle, Atype, Btype, Ctype, computeType, true);
    if (code) return code;
    if (algo != CUBLAS_GEMM_DEFAULT && algo != CUBLAS_GEMM_DEFAULT_TENSOR_OP)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (batchCount > 1 && !strideC) moe_double_wrong("gemm: the results of a batch are one");
    return one_shape(handle, g, (struct shape){transa, transb, m, n, k, lda, ldb, ldc, .count = batchCount},
                     alpha, beta);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m,
                            int n, int k, const void *alpha, const void *A, cudaDataType Atype, int lda,
                            const void *B, cudaDataType Btype, int ldb, const void *beta, void *C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb,
                                      0, beta, C, Ctype, ldc, 0, 1, computeType, algo);
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                              int m, int n, int k, const float *alpha, const float *A, int lda,
                              const float *B, int ldb, const float *beta, float *C, int ldc)
{
    return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_32F, lda, B, CUDA_R_32F, ldb, beta,
                        C, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                              int m, int n, int k, const double *alpha, const double *A, int lda,
                              const double *B, int ldb, const double *beta, double *C, int ldc)
{
    return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_64F, lda, B, CUDA_R_64F, ldb, beta,
                        C, CUDA_R_64F, ldc, CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}

/* Arrays of pointers are on the device; all else of the grouped one is on the host, and read at the call. */
static struct operand array_of(const void *const *array, const char *which)
{
    if (moe_double_find(array, which).type == cudaMemoryTypeUnregistered)
        moe_double_wrong("gemm: %s, the array of pointers, is not on the device", which);
    return (struct operand){.array = array};
}

cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                   int m, int n, int k, const void *alpha, const void *const Aarray[],
                                   cudaDataType Atype, int lda, const void *const Barray[],
                                   cudaDataType Btype, int ldb, const void *beta, void *const Carray[],
                                   cudaDataType Ctype, int ldc, int batchCount,
                                   cublasComputeType_t computeType, cublasGemmAlgo_t algo)
{
    struct gemm g = {.in = Atype};
    cublasStatus_t code;
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    code = check_types(&g, handle, Atype, Btype, Ctype, computeType, true);
    if (code) return code;
    if (algo != CUBLAS_GEMM_DEFAULT && algo != CUBLAS_GEMM_DEFAULT_TENSOR_OP)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (batchCount > 0) {
        g.a = array_of(Aarray, "Aarray");
        g.b = array_of(Barray, "Barray");
        g.c = array_of((const void *const *)Carray, "Carray");
    }
    return one_shape(handle, g, (struct shape){transa, transb, m, n, k, lda, ldb, ldc, .count = batchCount},
                     alpha, beta);
}

#if CUBLAS_VER_MAJOR > 12 || (CUBLAS_VER_MAJOR == 12 && CUBLAS_VER_MINOR >= 5)
cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t transa_array[],
                                          const cublasOperation_t transb_array[], const int m_array[],
                                          const int n_array[], const int k_array[], const void *alpha_array,
                                          const void *const Aarray[], cudaDataType_t Atype,
                                          const int lda_array[], const void *const Barray[],
                                          cudaDataType_t Btype, const int ldb_array[], const void *beta_array,
                                          void *const Carray[], cudaDataType_t Ctype, const int ldc_array[],
                                          int group_count, const int group_size[],
                                          cublasComputeType_t computeType)
{
    const void *on_host[] = {transa_array, transb_array, m_array,   n_array,    k_array,   alpha_array,
                             lda_array,    ldb_array,    ldc_array, beta_array, group_size};
    struct gemm g = {.in = Atype};
    cublasStatus_t code;
    int64_t problems = 0;
    if (!alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (handle->mode != CUBLAS_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
    code = check_types(&g, handle, Atype, Btype, Ctype, computeType, false);
    if (code) return code;
    if (group_count < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (!group_count) return CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof on_host / sizeof *on_host; i++) {
        if (!on_host[i]) return CUBLAS_STATUS_INVALID_VALUE;
        if (moe_double_find(on_host[i], "gemm").type == cudaMemoryTypeDevice)
            moe_double_wrong("gemm: an array that the host reads is on the device");
    }
    g.n_shapes = group_count;
    g.shapes = calloc((size_t)group_count, sizeof *g.shapes);
    if (!g.shapes) moe_double_wrong("out of memory");
    for (int i = 0; i < group_count && !code; i++) {
        const size_t at = (size_t)i * (g.in == CUDA_R_64F ? 8 : 4);
        g.shapes[i] = (struct shape){transa_array[i],
                                     transb_array[i],
                                     m_array[i],
                                     n_array[i],
                                     k_array[i],
                                     lda_array[i],
                                     ldb_array[i],
                                     ldc_array[i],
                                     number((const char *)alpha_array + at, g.in),
                                     number((const char *)beta_array + at, g.in),
                                     group_size[i]};
        code = check_shape(&g.shapes[i]);
        problems += group_size[i];
    }
    if (code || !problems) {
        free(g.shapes);
        return code;
    }
    g.a = array_of(Aarray, "Aarray");
    g.b = array_of(Barray, "Barray");
    g.c = array_of((const void *const *)Carray, "Carray");
    return queue_gemm(handle, g);
}
#endif
