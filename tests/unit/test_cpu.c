/* The host as a device: matrix products of BLAS against plain loops; memory and marks. */
#include "kernels/ref.h"
#include "runtime/device.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static struct moe_device *cpu;

static double get(const void *reals, enum moe_type type, int64_t i)
{
    return type == MOE_F64 ? ((const double *)reals)[i] : (double)((const float *)reals)[i];
}

/* Whole numbers up to 8 in magnitude: every sum is exact in both types, so the answers must be equal. */
static void *whole_numbers(int64_t n, enum moe_type type, uint64_t stream)
{
    void *p = moe_alloc((size_t)n, (size_t)moe_type_bytes[type]);
    for (int64_t i = 0; i < n; i++) {
        double x = floor(17 * moe_uniform(3, stream, (uint64_t)i)) - 8;
        if (type == MOE_F64)
            ((double *)p)[i] = x;
        else
            ((float *)p)[i] = (float)x;
    }
    return p;
}

static void compare_gemm(int64_t m, int64_t n, int64_t k, int flags, enum moe_type type)
{
    struct moe_op op = {.kind = MOE_KERNEL, .kernel = MOE_K_GEMM, .type = type, .n_reads = 2, .n_writes = 1};
    op.trans_a = flags & 1;
    op.trans_b = flags & 2;
    op.writes[0].accumulate = flags & 4;
    void *A = whole_numbers(m * k, type, 1), *B = whole_numbers(k * n, type, 2);
    void *C = whole_numbers(m * n, type, 3), *plain = whole_numbers(m * n, type, 3);
    struct moe_launch launch = {.op = &op, .in = {A, B}, .out = {C}, .dims = {m, n, k}};
    assert_int_equal(moe_device_cpu.run(cpu, &launch, MOE_STREAM_COMPUTE), MOE_OK);
    if (type == MOE_F64)
        moe_ref_gemm_f64(m, n, k, op.trans_a, op.trans_b, A, B, plain, flags & 4);
    else
        moe_ref_gemm_f32(m, n, k, op.trans_a, op.trans_b, A, B, plain, flags & 4);
    for (int64_t i = 0; i < m * n; i++)
        if (get(C, type, i) != get(plain, type, i))
            fail_msg("gemm %dx%dx%d flags %d: element %d is %g, not %g", (int)m, (int)n, (int)k, flags,
                     (int)i, get(C, type, i), get(plain, type, i));
    free(A), free(B), free(C), free(plain);
}

static void test_blas_against_plain(void **state)
{
    (void)state;
    const int64_t sizes[] = {0, 1, 5, 67};
    for (int i = 0; i < 64; i++)
        for (int flags = 0; flags < 8; flags++)
            for (enum moe_type type = MOE_F32; type <= MOE_F64; type++)
                compare_gemm(sizes[i / 16], sizes[i / 4 % 4], sizes[i % 4], flags, type);
}

static void test_device(void **state)
{
    (void)state;
    void *p[2];
    int64_t ns = -1, back = -1;
    char text[] = "0123456789";
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(moe_device_cpu.alloc(cpu, i * sizeof text, &p[i]), MOE_OK);
        assert_int_equal((uintptr_t)p[i] % 64, 0);
    }
    assert_int_equal(moe_device_cpu.copy(cpu, p[1], "abcdefghij", sizeof text, MOE_STREAM_COMM), MOE_OK);
    assert_int_equal(moe_device_cpu.copy(cpu, text, p[1], sizeof text, MOE_STREAM_COMM), MOE_OK);
    assert_string_equal(text, "abcdefghij");
    assert_int_equal(moe_device_cpu.copy(cpu, NULL, NULL, 0, MOE_STREAM_COMM), MOE_OK);
    assert_int_equal(openblas_get_num_threads(), 1);
    for (int i = 0; i < 2; i++) moe_device_cpu.free(cpu, p[i]);
    assert_int_equal(moe_device_cpu.mark(cpu, MOE_STREAM_COMPUTE, 0), MOE_OK);
    usleep(2000);
    assert_int_equal(moe_device_cpu.mark(cpu, MOE_STREAM_COMM, 1000), MOE_OK);
    assert_int_equal(moe_device_cpu.sync(cpu, MOE_STREAM_COMM), MOE_OK);
    assert_int_equal(moe_device_cpu.elapsed(cpu, 0, 1000, &ns), MOE_OK);
    assert_int_equal(moe_device_cpu.elapsed(cpu, 1000, 0, &back), MOE_OK);
    assert_true(ns >= 2000000);
    assert_int_equal(back, -ns);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_blas_against_plain),
                                       cmocka_unit_test(test_device)};
    if (moe_device_cpu.open(&cpu) < 0) return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    moe_device_cpu.close(NULL);
    moe_device_cpu.close(cpu);
    return failed;
}
