/* test_kernels - the reference kernels on vectors that are solved by hand. */
#include "kernels/ref.h"

#include <math.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

static void must_be_near(const double *got, const double *expected, int n)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(got[i] - expected[i]) <= 1e-12 * fmax(1, fabs(expected[i]))))
            fail_msg("element %d is %.17g, expected %.17g", i, got[i], expected[i]);
}

/* Softmax of logarithms: weights 1 2 5 are 1/8 2/8 5/8, choices 2 1; three equal ones choose 0 1 (lower id);
 * weights 6 1 1 choose 0, then 1 of the equal two. Pairs sorted by expert, then token:
 * expert 0: (1,0) (2,0); expert 1: (0,1) (1,1) (2,1); expert 2: (0,0). */
static void test_topk(void **state)
{
    (void)state;
    const double logits[] = {log(1), log(2), log(5), 0, 0, 0, log(6), log(1), log(1)};
    double prob[9];
    int32_t expert[6], slot[6];
    int64_t counts[3];
    moe_ref_topk_f64(3, 3, 2, logits, prob, expert, slot, counts);
    must_be_near(prob, (double[]){.125, .25, .625, 1. / 3, 1. / 3, 1. / 3, .75, .125, .125}, 9);
    assert_memory_equal(expert, ((int32_t[]){2, 1, 0, 1, 0, 1}), sizeof expert);
    assert_memory_equal(slot, ((int32_t[]){5, 2, 0, 3, 1, 4}), sizeof slot);
    assert_memory_equal(counts, ((int64_t[]){2, 3, 1}), sizeof counts);
}

/* Logits of a broken run still give a routing that stays inside its buffers. */
static void test_topk_of_nan(void **state)
{
    (void)state;
    const double logits[] = {NAN, 0, NAN, 1};
    double prob[4];
    int32_t expert[3], slot[3];
    int64_t counts[4];
    moe_ref_topk_f64(1, 4, 3, logits, prob, expert, slot, counts);
    int64_t sum = 0;
    for (int e = 0; e < 4; e++) {
        assert_in_range(counts[e], 0, 1);
        sum += counts[e];
    }
    assert_int_equal(sum, 3);
}

/* The slots of test_topk: token 0 in rows 5 and 2, token 1 in 0 and 3, token 2 in 1 and 4. */
static void test_permute(void **state)
{
    (void)state;
    const double x[] = {1, 2, 3}, drows[] = {1, 2, 4, 8, 16, 32};
    const int32_t slot[] = {5, 2, 0, 3, 1, 4};
    double rows[6], dx[3];
    moe_ref_permute_f64(3, 1, 2, x, slot, rows);
    assert_memory_equal(rows, ((double[]){2, 3, 1, 2, 3, 1}), sizeof rows);
    moe_ref_permute_bwd_f64(3, 1, 2, drows, slot, dx, false);
    assert_memory_equal(dx, ((double[]){32 + 4, 1 + 8, 2 + 16}), sizeof dx);
}

/* Source 0 sent row 0 for expert 0 and rows 1 2 for expert 2; source 1 sent row 3 for expert 0 and 4 5 for
 * expert 1. By expert: 0 3, 4 5, 1 2. */
static void test_sort_rows(void **state)
{
    (void)state;
    const double rows[] = {0, 1, 2, 3, 4, 5};
    const int64_t counts[] = {1, 0, 2, 1, 2, 0};
    double sorted[6];
    moe_ref_sort_rows_f64(2, 3, 1, rows, counts, sorted, false);
    assert_memory_equal(sorted, ((double[]){0, 3, 4, 5, 1, 2}), sizeof sorted);
}

/* Token 0 chose expert 1 (3/4, row 2), then 0 (1/4, row 0); token 1 chose 0 (1/2, row 1), then 2 (1/2, row
 * 3). y0 = 1 + 3/4 * 30 + 1/4 * 10 = 26, y1 = 2 + 1/2 * 20 + 1/2 * 40 = 32. Backward with dy = 1 2: a row
 * gets prob * dy of its token, a chosen prob gets dy * row. */
static void test_combine(void **state)
{
    (void)state;
    const double x[] = {1, 2}, rows[] = {10, 20, 30, 40}, prob[] = {.25, .75, 0, .5, 0, .5}, dy[] = {1, 2};
    const int32_t expert[] = {1, 0, 0, 2}, slot[] = {2, 0, 1, 3};
    double y[2], dx[2], drows[4], dprob[6];
    moe_ref_combine_f64(2, 1, 2, 3, x, rows, prob, expert, slot, y);
    assert_memory_equal(y, ((double[]){26, 32}), sizeof y);
    moe_ref_combine_bwd_f64(2, 1, 2, 3, dy, rows, prob, expert, slot, dx, drows, dprob, false);
    assert_memory_equal(dx, dy, sizeof dx);
    assert_memory_equal(drows, ((double[]){.25, 1, .75, 1}), sizeof drows);
    assert_memory_equal(dprob, ((double[]){10, 30, 0, 40, 0, 80}), sizeof dprob);
}

/* Weights 1 3, target the 3: -log(3/4). Logits 1000 0, target the 0: 1000, and exp(1000) is never formed. */
static void test_xent(void **state)
{
    (void)state;
    const double logits[] = {0, log(3), 1000, 0};
    const int32_t target[] = {1, 1};
    double dlogits[4], loss;
    moe_ref_xent_f64(2, 2, logits, target, dlogits, &loss);
    must_be_near(&loss, (double[]){1000 + log(4. / 3)}, 1);
    must_be_near(dlogits, (double[]){.25, -.25, 1, -1}, 4);
    moe_ref_xent_f64(0, 2, NULL, NULL, NULL, &loss);
    assert_true(loss == 0);
}

/* silu(log 3) = 3/4 log 3; far out silu(z) is 0 or z, its slope 0 or 1, and nothing overflows. */
static void test_swiglu(void **state)
{
    (void)state;
    const double h[] = {log(3), -1000, 1000, 2, 3, 5}, da[] = {1, 1, 1};
    double a[3], dh[6];
    moe_ref_swiglu_f64(1, 3, h, a);
    must_be_near(a, (double[]){1.5 * log(3), 0, 5000}, 3);
    moe_ref_swiglu_bwd_f64(1, 3, h, da, dh, false);
    must_be_near(dh, (double[]){1.5 * (1 + log(3) / 4), 0, 5, .75 * log(3), 0, 1000}, 6);
}

/* In place, as schedules use them: 3 6 / 3 = 1 2; 1 2 - 1/2 * (2 -2) = 0 3. */
static void test_updates_in_place(void **state)
{
    (void)state;
    double g[] = {3, 6}, param[] = {1, 2};
    moe_ref_scale_f64(2, 3, g, g);
    assert_memory_equal(g, ((double[]){1, 2}), sizeof g);
    moe_ref_sgd_f64(2, .5, param, (double[]){2, -2}, param);
    assert_memory_equal(param, ((double[]){0, 3}), sizeof param);
}

/* [1 2; 3 4] [5 6; 7 8] = [1*5+2*7 1*6+2*8; 3*5+4*7 3*6+4*8] = [19 22; 43 50].
 * Groups of 2, 0 and 1 rows with k = n = 1: C = 1*10, 2*10, 3*30; dB = 1*1 + 2*10, nothing, 3*100. */
static void test_products_by_hand(void **state)
{
    (void)state;
    const double A[] = {1, 2, 3, 4}, B[] = {5, 6, 7, 8}, weights[] = {10, 20, 30}, dC[] = {1, 10, 100};
    const int64_t rows[] = {2, 0, 1};
    double C[4], grouped[3], dB[3];
    moe_ref_gemm_f64(2, 2, 2, false, false, A, B, C, false);
    assert_memory_equal(C, ((double[]){19, 22, 43, 50}), sizeof C);
    moe_ref_grouped_gemm_f64(moe_ref_gemm_f64, 3, 1, 1, rows, false, A, weights, grouped, false);
    assert_memory_equal(grouped, ((double[]){10, 20, 90}), sizeof grouped);
    moe_ref_grouped_wgrad_f64(moe_ref_gemm_f64, 3, 1, 1, rows, A, dC, dB, false);
    assert_memory_equal(dB, ((double[]){21, 0, 300}), sizeof dB);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topk),
        cmocka_unit_test(test_topk_of_nan),
        cmocka_unit_test(test_permute),
        cmocka_unit_test(test_sort_rows),
        cmocka_unit_test(test_combine),
        cmocka_unit_test(test_xent),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_updates_in_place),
        cmocka_unit_test(test_products_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
