/* test_cublas_double - the double of cuBLAS: against OpenBLAS, and against sums by hand; what it refuses. */
#include "tests/doubles/fixture_double.h"

#include "kernels/bf16.h"
#include "sim/base.h"

#include <cblas.h>
#include <cublas_v2.h>
#include <math.h>

static cublasHandle_t handle;

static int open_handle(void **state)
{
    open_streams(state);
    RIGHT(cublasCreate(&handle));
    RIGHT(cublasSetStream(handle, one));
    return 0;
}

static int close_handle(void **state)
{
    RIGHT(cublasDestroy(handle));
    assert_int_equal(cublasSetStream(handle, one), CUBLAS_STATUS_NOT_INITIALIZED);
    return close_streams(state);
}

/* [n] numbers of a seed, all of them bf16. */
static double value(uint64_t seed, int i)
{
    return moe_bf16_to_float(moe_bf16_from_float((float)moe_uniform(seed, 0, (uint64_t)i) * 2 - 1));
}

static size_t size_of(cudaDataType_t type)
{
    return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2;
}

static void put_at(cudaDataType_t type, void *p, int i, double x)
{
    if (type == CUDA_R_64F) ((double *)p)[i] = x;
    if (type == CUDA_R_32F) ((float *)p)[i] = (float)x;
    if (type == CUDA_R_16BF) ((moe_bf16 *)p)[i] = moe_bf16_from_float((float)x);
}

static double get_at(cudaDataType_t type, const void *p, int i)
{
    return type == CUDA_R_64F   ? ((const double *)p)[i]
           : type == CUDA_R_32F ? (double)((const float *)p)[i]
                                : (double)moe_bf16_to_float(((const moe_bf16 *)p)[i]);
}

static void *matrix(cudaDataType_t type, int n, uint64_t seed)
{
    char host[8 * 1024], *device = device_memory((size_t)n * size_of(type));
    for (int i = 0; i < n; i++) put_at(type, host, i, value(seed, i));
    if (cudaMemcpyAsync(device, host, (size_t)n * size_of(type), cudaMemcpyHostToDevice, one)) abort();
    return device;
}

static void read_back(cudaDataType_t type, const void *device, int n, void *host)
{
    RIGHT(cudaMemcpyAsync(host, device, (size_t)n * size_of(type), cudaMemcpyDeviceToHost, one));
}

/* Sums of values that are bf16, of at most 16 terms: all roundings of float together are far below half a
 * unit of bf16, yet the last may fall the other way: one unit of the type that is written. */
static double bound(cudaDataType_t out, double magnitude)
{
    return magnitude * (out == CUDA_R_64F ? 0x1p-48 : out == CUDA_R_32F ? 0x1p-19 : 0x1p-7);
}

enum { M = 5, NN = 7, K = 11, LD = 13, CELLS = LD * LD };

struct types {
    cudaDataType_t in, out;
    cublasComputeType_t compute;
};
static const struct types all_types[] = {{CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F},
                                         {CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F},
                                         {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F},
                                         {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F}};
enum { N_TYPES = sizeof all_types / sizeof *all_types };

static void expect_product(struct types t, const void *c, bool ta, bool tb, double alpha, double beta)
{
    for (int i = 0; i < CELLS; i++) {
        const int row = i % LD, column = i / LD;
        double want = value(3, i), sum = 0;
        for (int k = 0; k < K; k++)
            sum +=
                value(1, ta ? row * LD + k : k * LD + row) * value(2, tb ? k * LD + column : column * LD + k);
        if (row >= M || column >= NN) // not C's
            assert_true(get_at(t.out, c, i) == want);
        else if (fabs(get_at(t.out, c, i) - (alpha * sum + beta * want)) > bound(t.out, 2 * K))
            fail_msg("C[%d, %d] is %g, expected %g", row, column, get_at(t.out, c, i),
                     alpha * sum + beta * want);
    }
}

static void test_products(void **state)
{
    (void)state;
    for (int i = 0; i < N_TYPES; i++)
        for (int trans = 0; trans < 4; trans++)
            for (int add = 0; add < 2; add++) {
                const struct types t = all_types[i];
                const bool ta = trans & 1, tb = trans & 2;
                char host[8 * CELLS], alpha[8], beta[8];
                void *a = matrix(t.in, CELLS, 1), *b = matrix(t.in, CELLS, 2), *c = matrix(t.out, CELLS, 3);
                put_at(t.in == CUDA_R_64F ? t.in : CUDA_R_32F, alpha, 0, 0.5);
                put_at(t.in == CUDA_R_64F ? t.in : CUDA_R_32F, beta, 0, add);
                RIGHT(cublasGemmEx(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, M,
                                   NN, K, alpha, a, t.in, LD, b, t.in, LD, beta, c, t.out, LD, t.compute,
                                   CUBLAS_GEMM_DEFAULT));
                put_at(CUDA_R_64F, alpha, 0, NAN); // was read
                read_back(t.out, c, CELLS, host);
                expect_product(t, host, ta, tb, 0.5, add);
                RIGHT(cudaFree(a));
                RIGHT(cudaFree(b));
                RIGHT(cudaFree(c));
            }
}

/* C = A B by rows is C' = B' A' by columns: the same bits as OpenBLAS by rows. */
static void test_bits_of_rows(void **state)
{
    (void)state;
    float a[M * K], b[K * NN], want[M * NN], got[M * NN];
    const float unit = 1, none = 0;
    for (int i = 0; i < M * K; i++) a[i] = (float)moe_uniform(1, 0, (uint64_t)i);
    for (int i = 0; i < K * NN; i++) b[i] = (float)moe_uniform(2, 0, (uint64_t)i);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, M, NN, K, 1, a, K, b, NN, 0, want, NN);
    float *da = device_memory(sizeof a), *db = device_memory(sizeof b), *dc = device_memory(sizeof got);
    RIGHT(cudaMemcpyAsync(da, a, sizeof a, cudaMemcpyHostToDevice, one));
    RIGHT(cudaMemcpyAsync(db, b, sizeof b, cudaMemcpyHostToDevice, one));
    RIGHT(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, NN, M, K, &unit, db, NN, da, K, &none, dc, NN));
    read_back(CUDA_R_32F, dc, M * NN, got);
    assert_memory_equal(got, want, sizeof want);
    // whoever allows TF32 gets 11 bits
    RIGHT(cublasSetMathMode(handle, CUBLAS_TF32_TENSOR_OP_MATH));
    RIGHT(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, NN, M, K, &unit, db, NN, da, K, &none, dc, NN));
    read_back(CUDA_R_32F, dc, M * NN, got);
    float far = 0;
    for (int i = 0; i < M * NN; i++) far = fmaxf(far, fabsf(got[i] - want[i]) / want[i]);
    assert_true(far > 0x1p-20f && far < 0x1p-10f);
    RIGHT(cudaFree(da));
    RIGHT(cudaFree(db));
    RIGHT(cudaFree(dc));
}

/* 512 ones: a sum in bf16 would stop at 256. */
static void test_one_rounding(void **state)
{
    (void)state;
    enum { TERMS = 512 };
    const float unit = 1, none = 0;
    moe_bf16 ones[TERMS], sum;
    for (int i = 0; i < TERMS; i++) ones[i] = moe_bf16_from_float(1);
    moe_bf16 *a = device_memory(sizeof ones), *c = device_memory(sizeof sum);
    RIGHT(cudaMemcpyAsync(a, ones, sizeof ones, cudaMemcpyHostToDevice, one));
    RIGHT(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, 1, 1, TERMS, &unit, a, CUDA_R_16BF, TERMS, a,
                       CUDA_R_16BF, TERMS, &none, c, CUDA_R_16BF, 1, CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT));
    read_back(CUDA_R_16BF, c, 1, &sum);
    assert_true(moe_bf16_to_float(sum) == TERMS);
    RIGHT(cudaFree(a));
    RIGHT(cudaFree(c));
}

/* ---- several at once ---- */

static void test_strided(void **state)
{
    (void)state;
    enum { BATCH = 3 };
    const float unit = 1, none = 0;
    float got[4 * BATCH];
    float *a = matrix(CUDA_R_32F, 4 * BATCH, 1), *b = matrix(CUDA_R_32F, 4, 2),
          *c = device_memory(sizeof got);
    RIGHT(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &unit, a, CUDA_R_32F, 2, 4, b,
                                     CUDA_R_32F, 2, 0, &none, c, CUDA_R_32F, 2, 4, BATCH, CUBLAS_COMPUTE_32F,
                                     CUBLAS_GEMM_DEFAULT));
    read_back(CUDA_R_32F, c, 4 * BATCH, got);
    for (int i = 0; i < 4 * BATCH; i++) {
        const int of = i / 4 * 4, row = i % 2, column = i % 4 / 2;
        const double want =
            value(1, of + row) * value(2, 2 * column) + value(1, of + 2 + row) * value(2, 2 * column + 1);
        assert_true(fabs((double)got[i] - want) <= bound(CUDA_R_32F, 2));
    }
    RIGHT(cudaFree(a));
    RIGHT(cudaFree(b));
    RIGHT(cudaFree(c));
}

#if CUBLAS_VER_MAJOR > 12 || (CUBLAS_VER_MAJOR == 12 && CUBLAS_VER_MINOR >= 5)
/* Groups of 2 and of 1 problems of another size, one of 0 and one of 0 rows. Arrays of the host may be
 * changed after the call, those of the device not before it ran. */
static void grouped(struct types t)
{
    const bool wide = t.in == CUDA_R_64F;
    cublasOperation_t none[] = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N};
    int m[] = {1, 3, 2, 0}, n[] = {2, 2, 2, 2}, k[] = {2, 3, 2, 2}, lda[] = {1, 3, 2, 1},
        ldb[] = {2, 3, 2, 2}, ldc[] = {1, 3, 2, 1}, size[] = {2, 1, 0, 1};
    float alpha[] = {1, 2, 1, 1}, beta[] = {0, 0, 0, 0};
    double alpha64[] = {1, 2, 1, 1}, beta64[] = {0, 0, 0, 0};
    void *a = matrix(t.in, 30, 1), *b = matrix(t.in, 30, 2),
         *c[3] = {matrix(t.out, 9, 3), matrix(t.out, 9, 3), matrix(t.out, 9, 3)};
    const void *pa[4] = {a, (char *)a + 2 * size_of(t.in), (char *)a + 4 * size_of(t.in), a},
               *pb[4] = {b, b, b, b};
    void *pc[4] = {c[0], c[1], c[2], NULL}, **arrays = device_memory(3 * sizeof pa);
    char host[8 * 9];
    RIGHT(cudaMemcpyAsync(arrays, pa, sizeof pa, cudaMemcpyHostToDevice, one));
    RIGHT(cudaMemcpyAsync(arrays + 4, pb, sizeof pb, cudaMemcpyHostToDevice, one));
    RIGHT(cudaMemcpyAsync(arrays + 8, pc, sizeof pc, cudaMemcpyHostToDevice, one));
    RIGHT(cublasGemmGroupedBatchedEx(
        handle, none, none, m, n, k, wide ? (void *)alpha64 : alpha, (const void *const *)arrays, t.in, lda,
        (const void *const *)(arrays + 4), t.in, ldb, wide ? (void *)beta64 : beta, arrays + 8, t.out, ldc, 4,
        size, t.compute));
    memset(m, 9, sizeof m);
    memset(lda, 9, sizeof lda);
    memset(alpha, 9, sizeof alpha);
    memset(size, 9, sizeof size);
    for (int p = 0; p < 3; p++) {
        const int rows = p < 2 ? 1 : 3, inner = p < 2 ? 2 : 3;
        read_back(t.out, c[p], 9, host);
        for (int i = 0; i < rows * 2; i++) {
            double want = 0;
            for (int j = 0; j < inner; j++)
                want +=
                    (p < 2 ? 1 : 2) * value(1, 2 * p + j * rows + i % rows) * value(2, i / rows * inner + j);
            assert_true(fabs(get_at(t.out, host, i) - want) <= bound(t.out, 6));
        }
        assert_true(get_at(t.out, host, rows * 2) == value(3, rows * 2));
        RIGHT(cudaFree(c[p]));
    }
    RIGHT(cudaFree(a));
    RIGHT(cudaFree(b));
    RIGHT(cudaFree(arrays));
}
#else
static void grouped(struct types t) /* cuBLAS has it since 12.5 */
{
    (void)t;
}
#endif

static void test_grouped(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) grouped(all_types[i]);
}

/* ---- what is refused ---- */

struct call { /* one GemmEx that is right, to be spoiled */
    cublasOperation_t ta, tb;
    int m, n, k, lda, ldb, ldc;
    cudaDataType_t in, out;
    cublasComputeType_t compute;
    cublasGemmAlgo_t algo;
    const void *alpha;
};

static const float half = 0.5f;
static const struct call right_call = {
    CUBLAS_OP_N,        CUBLAS_OP_T,         3,    2, 4, 3, 2, 3, CUDA_R_32F, CUDA_R_32F,
    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, &half};
static void *a_matrix, *c_matrix;

static cublasStatus_t ask(struct call s)
{
    return cublasGemmEx(handle, s.ta, s.tb, s.m, s.n, s.k, s.alpha, a_matrix, s.in, s.lda, a_matrix, s.in,
                        s.ldb, &half, c_matrix, s.out, s.ldc, s.compute, s.algo);
}

#define REFUSED(status, field, wrong)                                                                        \
    do {                                                                                                     \
        struct call spoiled = right_call;                                                                    \
        spoiled.field = wrong;                                                                               \
        assert_int_equal(ask(spoiled), CUBLAS_STATUS_##status);                                              \
    } while (0)

static void test_refused(void **state)
{
    (void)state;
    a_matrix = matrix(CUDA_R_32F, 100, 1);
    c_matrix = matrix(CUDA_R_32F, 100, 1);
    RIGHT(ask(right_call));
    REFUSED(INVALID_VALUE, m, -1);
    REFUSED(INVALID_VALUE, k, -1);
    REFUSED(INVALID_VALUE, lda, 2);
    REFUSED(INVALID_VALUE, ldb, 1);
    REFUSED(INVALID_VALUE, ldc, 2);
    REFUSED(INVALID_VALUE, ta, CUBLAS_OP_T); // rows of A are k then
    REFUSED(INVALID_VALUE, ta, (cublasOperation_t)9);
    REFUSED(INVALID_VALUE, alpha, NULL);
    REFUSED(NOT_SUPPORTED, in, CUDA_R_64F);
    REFUSED(NOT_SUPPORTED, out, CUDA_R_16BF);
    REFUSED(NOT_SUPPORTED, compute, CUBLAS_COMPUTE_64F);
    REFUSED(NOT_SUPPORTED, algo, CUBLAS_GEMM_ALGO3);
    struct call empty = right_call;
    empty.m = 0;
    RIGHT(ask(empty));
    assert_int_equal(cublasSetWorkspace(handle, (char *)a_matrix + 4, 4), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(cublasSetMathMode(handle, (cublasMath_t)64), CUBLAS_STATUS_INVALID_VALUE);
    assert_string_equal(cublasGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");
    int version;
    RIGHT(cublasGetVersion(handle, &version));
    assert_int_equal(version, CUBLAS_VERSION);
    RIGHT(cudaDeviceSynchronize());
    RIGHT(cudaFree(a_matrix));
    RIGHT(cudaFree(c_matrix));
}

/* ---- in children: what fails when it runs, and wrong use ---- */

static void open_matrices(void)
{
    a_matrix = matrix(CUDA_R_32F, 12, 1); // all of A, and half of B
    cudaMallocAsync(&c_matrix, 6 * sizeof(float), one);
}

static void freed_before_it_runs(void)
{
    open_matrices();
    const struct call s = right_call;
    CHILD_EXPECTS(!ask(s) && !cudaStreamSynchronize(one));
    CHILD_EXPECTS(!ask(s) && !cudaFree(c_matrix)); // from a pool: waits for nothing
    CHILD_EXPECTS(cudaStreamSynchronize(one) == cudaErrorIllegalAddress);
    CHILD_EXPECTS(ask(s) == CUBLAS_STATUS_EXECUTION_FAILED);
}

static void too_short(void)
{
    open_matrices();
    struct call s = right_call;
    s.ldc = 4;
    CHILD_EXPECTS(!ask(s) && cudaStreamSynchronize(one) == cudaErrorIllegalAddress);
}

static void planted(void)
{
    open_matrices();
    CHILD_EXPECTS(!ask(right_call) && cudaStreamSynchronize(one) == cudaErrorLaunchFailure);
}

/* What is in the workspace is the GEMM's; and cublasSetStream takes it away. */
static void workspace(void)
{
    int *space = device_memory(4096), back = 0;
    open_matrices();
    CHILD_EXPECTS(!cublasSetWorkspace(handle, space, 4096));
    CHILD_EXPECTS(!cudaMemsetAsync(space, 0, 4096, one) && !ask(right_call));
    CHILD_EXPECTS(!cudaMemcpyAsync(&back, space, 4, cudaMemcpyDefault, one) && back);
    CHILD_EXPECTS(!cublasSetStream(handle, one));
    CHILD_EXPECTS(!cudaMemsetAsync(space, 0, 4096, one) && !ask(right_call));
    CHILD_EXPECTS(!cudaMemcpyAsync(&back, space, 4, cudaMemcpyDefault, one) && !back);
}

static void without_stream(void)
{
    open_matrices();
    cublasSetStream(handle, NULL);
    ask(right_call);
}

static void alpha_on_device(void)
{
    open_matrices();
    struct call s = right_call;
    s.alpha = a_matrix;
    ask(s);
}

static void pointers_on_host(void)
{
    open_matrices();
    const void *p[] = {a_matrix};
    void *c[] = {c_matrix};
    cublasGemmBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_T, 1, 1, 1, &half, p, CUDA_R_32F, 1, p, CUDA_R_32F, 1,
                        &half, c, CUDA_R_32F, 1, 1, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

static void in_place(void)
{
    open_matrices();
    c_matrix = a_matrix;
    ask(right_call);
    cudaStreamSynchronize(one);
}

static void test_misuse(void **state)
{
    (void)state;
    in_child(NULL, NULL, freed_before_it_runs, NULL);
    in_child(NULL, NULL, too_short, NULL);
    in_child("MOE_DOUBLE_FAIL", "gemm:1:719", planted, NULL);
    in_child(NULL, NULL, workspace, NULL);
    in_child(NULL, NULL, without_stream, "work on a default stream");
    in_child(NULL, NULL, alpha_on_device, "the pointer mode says host");
    in_child(NULL, NULL, pointers_on_host, "Aarray, the array of pointers, is not on the device");
    in_child(NULL, NULL, in_place, "its result is one of its operands");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_handle, close_handle)
    const struct CMUnitTest tests[] = {
        TEST(test_misuse),  TEST(test_products), TEST(test_bits_of_rows), TEST(test_one_rounding),
        TEST(test_strided), TEST(test_grouped),  TEST(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
