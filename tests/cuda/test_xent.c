/* test_xent - kernels/xent.cu against ref.h.
 *
 * Bounds in unit roundoffs. An exponential of z - largest is off by |z - largest| (the difference) and 4 (2
 * ulp: CUDA C++ Programming Guide). A thread's sum is scaled when a larger logit comes: the differences add
 * up to the range of the logits, and each time has 4 more. So the sum is off by 2 ranges + 4 (times + 2) of
 * itself, the softmax by that and range + 4 + 2 products + 2 of the reference; the sums of doubles, where
 * they are not wider than the type, by V and V / 32 + 12 additions. */
#include "tests/cuda/both.h"

static const struct shape {
    int64_t T, V, off;
} shapes[] = {{5, 33, 0}, {4, 64, 0}, {4, 64, 1}, {0, 8, 0},    {1, 1, 0},
              {3, 7, 0},  {9, 2, 0},  {3, 65, 0}, {3, 5000, 0}, {2, 5001, 0}};
enum { N_SHAPES = FEW ? 3 : sizeof shapes / sizeof *shapes, RANGE = 60 };

/* Row 1 ascends, row 2 holds -infinity. */
static struct both open_logits(enum moe_cuda_type type, const struct shape *s)
{
    struct both z = both_open(type, s->T * s->V, s->off, (uint64_t)(s->T + s->V), -RANGE / 2., RANGE / 2.);
    for (int64_t v = 0; s->T > 1 && v < s->V; v++)
        both_set(&z, s->V + v, -RANGE / 2. + RANGE * (double)v / (double)s->V);
    for (int64_t v = 0; s->T > 2 && v < s->V - 1; v++)
        if (v < 40 || v % 3 == 0) both_set(&z, 2 * s->V + v, -INFINITY);
    return z;
}

static int32_t *open_targets(const struct shape *s) /* the last of row 2, where it is finite */
{
    int32_t *target = fixture_alloc((size_t)s->T * sizeof *target);
    for (int64_t t = 0; t < s->T; t++)
        target[t] = (int32_t)(t == 2 ? s->V - 1 : moe_uniform((uint64_t)s->T, 1, (uint64_t)t) * (double)s->V);
    return target;
}

static double off_sum(enum moe_cuda_type type, const struct shape *s)
{
    const double v = (double)s->V, times = v / 512 + 1;
    return 2 * RANGE + 4 * (times + 2) + (fixture_is_double(type) ? v + v / 32 + 12 : 0);
}

static void check(enum moe_cuda_type type, const struct shape *s)
{
    struct both z = open_logits(type, s), d = both_open(type, s->T * s->V, s->off, 2, -2, 2),
                loss = both_open(type, 1, 0, 3, -2, 2);
    int32_t *target = open_targets(s);
    double *scale = both_scale(d.n), loss_scale = 0;
    FIXTURE_REF(type, xent, s->T, s->V, z.ref, target, d.ref, loss.ref);
    assert_int_equal(
        moe_cuda_xent(fixture_queue(0), type, s->T, s->V, z.kernel, target, d.kernel, loss.kernel), 0);
    fixture_wait_right();
    for (int64_t i = 0; i < d.n; i++) {
        const bool right = target[i / s->V] == i % s->V;
        scale[i] = fabs(both_at(&d, i) + right) + right;
        /* the largest logit, the sum's logarithm (one is what a relative difference of the sum adds), the
         * target's logit, and their sum over tokens */
        if (right) loss_scale += 1 + RANGE + log((double)s->V) + fabs(both_at(&z, i));
    }
    both_expect(&d, "dlogits", scale, off_sum(type, s) + RANGE + 4 + 2 + 2);
    both_expect(&loss, "loss", &loss_scale, off_sum(type, s) + 8 + (double)s->T);
    free(scale);
    both_close(&z);
    both_close(&d);
    both_close(&loss);
    fixture_free(target);
}

static void test_xent(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) check((enum moe_cuda_type)type, &shapes[i]);
}

static void test_more_tokens_than_blocks(void **state)
{
    (void)state;
    const struct shape s = {1027, 3, 0};
    if (!FEW) check(MOE_CUDA_F32, &s);
}

/* Nothing finite, a NaN, +infinity: NaN in the row and the loss, the other row as it would be. */
static void test_not_finite(void **state)
{
    (void)state;
    const struct shape s = {2, 40, 0};
    for (int kind = 0; kind < (FEW ? 1 : 3); kind++) {
        struct both z = both_open(MOE_CUDA_F32, 80, 0, 1, -2, 2), d = both_open(z.type, 80, 0, 2, -2, 2),
                    loss = both_open(z.type, 1, 0, 3, -2, 2);
        int32_t *target = open_targets(&s);
        for (int64_t v = 0; v < 40; v++)
            if (kind == 0 || v == 33)
                both_set(&z, v, kind == 1 ? (double)NAN : kind == 2 ? INFINITY : -INFINITY);
        FIXTURE_REF(z.type, xent, s.T, s.V, z.ref, target, d.ref, loss.ref);
        assert_int_equal(
            moe_cuda_xent(fixture_queue(0), z.type, s.T, s.V, z.kernel, target, d.kernel, loss.kernel), 0);
        fixture_wait_right();
        assert_true(isnan(fixture_at(z.type, loss.kernel, 0)));
        double scale[80];
        for (int i = 0; i < 80; i++) scale[i] = 1;
        both_expect(&d, "not finite", scale, off_sum(z.type, &s) + RANGE + 8);
        both_close(&z);
        both_close(&d);
        both_close(&loss);
        fixture_free(target);
    }
}

static void test_out_of_range(void **state)
{
    (void)state;
    static const int32_t wrong[] = {-1, 7, INT32_MIN, INT32_MAX};
    for (int i = 0; i < (FEW ? 1 : 4); i++) {
        struct both z = both_open(MOE_CUDA_F32, 21, 0, 1, -2, 2), d = both_open(z.type, 21, 0, 2, -2, 2),
                    loss = both_open(z.type, 1, 0, 3, -2, 2);
        int32_t *target = fixture_alloc(3 * sizeof *target);
        target[0] = target[2] = 6;
        target[1] = wrong[i];
        assert_int_equal(
            moe_cuda_xent(fixture_queue(0), z.type, 3, 7, z.kernel, target, d.kernel, loss.kernel), 0);
        const struct moe_cuda_fault f = fixture_wait();
        assert_true(f.set && f.index == wrong[i] && f.n == 7);
        both_close(&z);
        both_close(&d);
        both_close(&loss);
        fixture_free(target);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_xent),
        cmocka_unit_test(test_more_tokens_than_blocks),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_out_of_range),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
