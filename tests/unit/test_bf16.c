/* test_bf16 - every bf16, every point halfway between two of them, and what is special; and kernels in bf16
 * around a float kernel that leaves a part of its output as it was. */
#include "kernels/bf16.h"
#include "runtime/cpu_kernels.h"

#include <math.h>

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <setjmp.h>

#include <cmocka.h>

static float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void must_round(uint32_t from, moe_bf16 expected)
{
    moe_bf16 got = moe_bf16_from_float(of_bits(from));
    if (got != expected) fail_msg("0x%08x becomes 0x%04x, expected 0x%04x", from, got, expected);
}

/* What a bf16 holds comes back; a NaN comes back as a quiet one. */
static void test_all_come_back(void **state)
{
    (void)state;
    for (uint32_t x = 0; x < 0x10000; x++) {
        bool nan = (x & 0x7fff) > 0x7f80;
        assert_true(nan == isnan(moe_bf16_to_float((moe_bf16)x)));
        must_round(x << 16, (moe_bf16)(nan ? x | 0x40 : x));
    }
}

/* From denormal to the last before infinity, both signs: halfway goes to the even one, beside it to the
 * nearer. */
static void test_halfway(void **state)
{
    (void)state;
    for (uint32_t x = 0; x < 0x7f80; x++)
        for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
            uint32_t half = (x | sign) << 16 | 0x8000;
            must_round(half - 1, (moe_bf16)(x | sign));
            must_round(half, (moe_bf16)((x + (x & 1)) | sign));
            must_round(half + 1, (moe_bf16)((x + 1) | sign));
        }
}

/* 1 = 0x3f80; 1 + 2^-8 is halfway to 1 + 2^-7 and even is 1; 1 + 3 * 2^-8 is halfway to 1 + 2^-6. The
 * smallest denormal bf16 is 2^-133: half of it becomes 0. Infinity begins halfway from 0x7f7f = 2^128 -
 * 2^120. */
static void test_by_hand(void **state)
{
    (void)state;
    assert_int_equal(moe_bf16_from_float(1), 0x3f80);
    assert_int_equal(moe_bf16_from_float(1 + 0x1p-8f), 0x3f80);
    assert_int_equal(moe_bf16_from_float(1 + 0x1p-8f + 0x1p-23f), 0x3f81);
    assert_int_equal(moe_bf16_from_float(1 + 3 * 0x1p-8f), 0x3f82);
    assert_int_equal(moe_bf16_from_float(-0.f), 0x8000);
    assert_int_equal(moe_bf16_from_float(0x1p-134f), 0);
    assert_int_equal(moe_bf16_from_float(0x1.8p-134f), 1);
    assert_int_equal(moe_bf16_from_float(-0x1.8p-133f), 0x8002);
    assert_int_equal(moe_bf16_from_float(0x1.fffffcp-127f), 0x0080); /* denormal to normal */
    assert_int_equal(moe_bf16_from_float(0x1.fefffep127f), 0x7f7f);
    assert_int_equal(moe_bf16_from_float(0x1.ffp127f), 0x7f80);
    assert_int_equal(moe_bf16_from_float(-0x1.fffffep127f), 0xff80);
    assert_true(moe_bf16_to_float(1) == 0x1p-133f);
    assert_true(moe_bf16_to_float(0x4049) == 3.140625f);
}

/* A NaN whose payload is in the lower half alone must not become an infinity, nor a full one a zero. */
static void test_nan(void **state)
{
    (void)state;
    must_round(0x7f800001, 0x7fc0);
    must_round(0xff80ffff, 0xffc0);
    must_round(0x7fffffff, 0x7fff);
    must_round(0xffffffff, 0xffff);
    must_round(0x7f800000, 0x7f80);
}

/* Another way to the nearest: no neighbour is nearer, in double, where these differences are exact. */
static void test_no_neighbour_is_nearer(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 200000; i++) {
        float x = of_bits((uint32_t)moe_hash64(i));
        if (!(fabsf(x) < 0x1.fep127f)) continue;
        moe_bf16 y = moe_bf16_from_float(x);
        double far = fabs((double)moe_bf16_to_float(y) - x);
        assert_true(!signbit(x) == !(y >> 15));
        assert_true(far <= fabs((double)moe_bf16_to_float((moe_bf16)(y + 1)) - x));
        if (y & 0x7fff) assert_true(far <= fabs((double)moe_bf16_to_float((moe_bf16)(y - 1)) - x));
    }
}

enum { GROUPS = 3, EACH = 2, POISON = 0x7fc0 };

/* Instead of the runtime's: of GROUPED_WGRAD only groups with rows are written, 3 an element, or 3 added. */
void moe_cpu_run_f32(const struct moe_launch *launch)
{
    float *y = launch->out[0];
    for (int i = 0; i < GROUPS * EACH; i++)
        if (launch->rows[i / EACH]) y[i] = launch->op->writes[0].accumulate ? y[i] + 3 : 3;
}

/* What a kernel does not write stays poison, or what it was; 1 + 3 = 4 where it adds. */
static void test_unwritten_stays(void **state)
{
    (void)state;
    struct moe_kernel_shape *shapes = moe_kernel_shapes();
    const int64_t rows[GROUPS] = {1, 0, 2};
    const moe_bf16 A[3] = {0}, dC[6] = {0}, one = moe_bf16_from_float(1);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        const struct moe_op op = {.kernel = MOE_K_GROUPED_WGRAD,
                                  .type = MOE_BF16,
                                  .n_reads = 2,
                                  .n_writes = 1,
                                  .writes = {{.accumulate = accumulate}}};
        moe_bf16 y[GROUPS * EACH + 1] = {one, one, POISON, 0x8001, one, one, POISON};
        const struct moe_launch launch = {
            .op = &op, .in = {A, dC}, .out = {y}, .dims = {GROUPS, EACH, 1}, .rows = rows};
        moe_cpu_run_bf16(shapes, &launch);
        const moe_bf16 sum = moe_bf16_from_float(accumulate ? 4 : 3),
                       expected[] = {sum, sum, POISON, 0x8001, sum, sum, POISON};
        assert_memory_equal(y, expected, sizeof y);
    }
    free(shapes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unwritten_stays),
        cmocka_unit_test(test_all_come_back),
        cmocka_unit_test(test_halfway),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_no_neighbour_is_nearer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
