/* test_sigmoid - the sigmoid router of the reference: vectors solved by hand, its gradient by differences,
 * its choices against the softmax router's, which orders logits alike. */
#include "kernels/ref.h"
#include "sim/base.h"

#include <math.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

static void must_be_near(const double *got, const double *expected, int n, double within)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(got[i] - expected[i]) <= within))
            fail_msg("element %d is %.17g, expected %.17g", i, got[i], expected[i]);
}

/* sigmoid(log(a)) = a / (a + 1): 1/2 2/3 5/6, not a token's share. Token 0 chooses 2 1; three equal ones 0 1
 * (lower id); weights 3, 1/3, 1/3 choose 0, then 1 of the equal two. Pairs by expert, then token: expert 0:
 * (1,0) (2,0); expert 1: (0,1) (1,1) (2,1); expert 2: (0,0). */
static void test_choices(void **state)
{
    (void)state;
    const double logits[] = {log(1), log(2), log(5), 0, 0, 0, log(3), -log(3), -log(3)};
    double prob[9];
    int32_t expert[6], slot[6];
    int64_t counts[3];
    moe_ref_topk_sigmoid_f64(3, 3, 2, logits, prob, expert, slot, counts);
    must_be_near(prob, (double[]){1. / 2, 2. / 3, 5. / 6, .5, .5, .5, .75, .25, .25}, 9, 1e-15);
    assert_memory_equal(expert, ((int32_t[]){2, 1, 0, 1, 0, 1}), sizeof expert);
    assert_memory_equal(slot, ((int32_t[]){5, 2, 0, 3, 1, 4}), sizeof slot);
    assert_memory_equal(counts, ((int64_t[]){2, 3, 1}), sizeof counts);
}

/* Nothing overflows on the way: exp(1000) is infinite, and 1 / infinity the right 0. Floats are rounded once.
 * */
static void test_extremes(void **state)
{
    (void)state;
    const double logits[] = {1000, -1000, 0, -30};
    const float narrow[] = {1000, -1000, 0, -30};
    double prob[4];
    float rounded[4];
    int32_t expert[4], slot[4];
    int64_t counts[4];
    moe_ref_topk_sigmoid_f64(1, 4, 4, logits, prob, expert, slot, counts);
    must_be_near(prob, (double[]){1, 0, .5, exp(-30)}, 4, 1e-25);
    assert_memory_equal(expert, ((int32_t[]){0, 2, 3, 1}), sizeof expert);
    moe_ref_topk_sigmoid_f32(1, 4, 4, narrow, rounded, expert, slot, counts);
    for (int i = 0; i < 4; i++) assert_true(rounded[i] == (float)prob[i]);
}

enum { T = 40, E = 13, K = 4 };

/* A sigmoid rises, and so does a softmax: both choose the experts of the largest logits. */
static void test_like_softmax(void **state)
{
    (void)state;
    double logits[T * E], prob[2][T * E];
    int32_t expert[2][T * K], slot[2][T * K];
    int64_t counts[2][E];
    for (int i = 0; i < T * E; i++) logits[i] = 6 * moe_uniform(1, 0, (uint64_t)i) - 3;
    moe_ref_topk_f64(T, E, K, logits, prob[0], expert[0], slot[0], counts[0]);
    moe_ref_topk_sigmoid_f64(T, E, K, logits, prob[1], expert[1], slot[1], counts[1]);
    assert_memory_equal(expert[1], expert[0], sizeof expert[0]);
    assert_memory_equal(slot[1], slot[0], sizeof slot[0]);
    assert_memory_equal(counts[1], counts[0], sizeof counts[0]);
}

/* sum of dprob * prob, by a central difference of 1e-5: off by its square times a third derivative below 1/8,
 * and by 2^-53 / 1e-5 in rounding: 3e-11 in all. */
static void test_gradient(void **state)
{
    (void)state;
    double logits[E], dprob[E], prob[E], high[E], low[E], dlogits[E], want[E];
    int32_t expert[1], slot[1];
    int64_t counts[E];
    for (int i = 0; i < E; i++) {
        logits[i] = 6 * moe_uniform(2, 0, (uint64_t)i) - 3;
        dprob[i] = 2 * moe_uniform(3, 0, (uint64_t)i) - 1;
    }
    moe_ref_topk_sigmoid_f64(1, E, 1, logits, prob, expert, slot, counts);
    for (int i = 0; i < E; i++) logits[i] += 1e-5;
    moe_ref_topk_sigmoid_f64(1, E, 1, logits, high, expert, slot, counts);
    for (int i = 0; i < E; i++) logits[i] -= 2e-5;
    moe_ref_topk_sigmoid_f64(1, E, 1, logits, low, expert, slot, counts);
    for (int i = 0; i < E; i++) want[i] = dprob[i] * (high[i] - low[i]) / 2e-5;
    moe_ref_topk_sigmoid_bwd_f64(1, E, prob, dprob, dlogits, false);
    must_be_near(dlogits, want, E, 3e-11);
    moe_ref_topk_sigmoid_bwd_f64(1, E, prob, dprob, dlogits, true);
    for (int i = 0; i < E; i++) want[i] *= 2;
    must_be_near(dlogits, want, E, 6e-11);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_like_softmax),
        cmocka_unit_test(test_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
