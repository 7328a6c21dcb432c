/* test_swiglu - kernels/swiglu.cu against ref.h.
 *
 * Bounds in unit roundoffs: an exponential is within 2 ulp (4 units) on a device (CUDA C++ Programming Guide,
 * mathematical functions) and within 1 (2 units) on the host; every other operation has one rounding on
 * either side. */
#include "tests/cuda/both.h"

/* off: elements by which arrays miss the alignment of lumps. */
static const struct shape {
    int64_t rows, F, off;
} shapes[] = {{5, 7, 0},  {9, 64, 0},  {9, 64, 1},  {0, 8, 0},    {3, 0, 0},     {1, 1, 0},
              {3, 33, 0}, {40, 16, 0}, {3, 300, 1}, {4, 2056, 0}, {4099, 129, 0}};
enum { N_SHAPES = FEW ? 3 : sizeof shapes / sizeof *shapes };

/* Some z are where the exponential, or its inverse, leaves the range of the type. */
static struct both open_h(enum moe_cuda_type type, const struct shape *s)
{
    static const double special[] = {0, -1000, 1000, -95, 95, -87, 87, -20};
    struct both h = both_open(type, s->rows * 2 * s->F, s->off, (uint64_t)(s->rows + s->F), -4, 4);
    for (int i = 0; i < 8 && i < s->F; i++)
        if (s->rows > 1) both_set(&h, 2 * s->F + i, special[i]);
    return h;
}

static void test_forward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) {
            const struct shape s = shapes[i];
            struct both h = open_h((enum moe_cuda_type)type, &s),
                        a = both_open(h.type, s.rows * s.F, s.off, 3, 0, 1);
            FIXTURE_REF(type, swiglu, s.rows, s.F, h.ref, a.ref);
            assert_int_equal(moe_cuda_swiglu(fixture_queue(0), h.type, s.rows, s.F, h.kernel, a.kernel), 0);
            fixture_wait_right();
            both_expect(&a, "swiglu", NULL, 13); /* 4 + 2 of exp; sum, quotient, product: 2 each */
            both_close(&h);
            both_close(&a);
        }
}

/* s = 1 / (1 + exp(-z)) is off by 10 units of itself. dh of u is d z s: 10, 2 products of 2, and the sum, 2.
 * dh of z is d u s (1 + z (1 - s)): the product 16, what is in brackets 12 (1 + |z|), and the sum, 2. */
static void backward(enum moe_cuda_type type, const struct shape *s, bool add)
{
    struct both h = open_h(type, s), da = both_open(type, s->rows * s->F, s->off, 4, -2, 2),
                dh = both_open(type, h.n, s->off, 5, -2, 2);
    double *scale = both_scale(h.n);
    for (int64_t i = 0; i < da.n; i++) {
        const int64_t at = i / s->F * 2 * s->F + i % s->F;
        const double z = both_at(&h, at), u = both_at(&h, at + s->F), d = both_at(&da, i),
                     sigmoid = 1 / (1 + exp(-z));
        scale[at] = fabs(d * u) * sigmoid * (1 + fabs(z)) + (add ? fabs(both_at(&dh, at)) : 0);
        scale[at + s->F] = fabs(d * z) * sigmoid + (add ? fabs(both_at(&dh, at + s->F)) : 0);
    }
    FIXTURE_REF(type, swiglu_bwd, s->rows, s->F, h.ref, da.ref, dh.ref, add);
    assert_int_equal(
        moe_cuda_swiglu_bwd(fixture_queue(0), type, s->rows, s->F, h.kernel, da.kernel, dh.kernel, add), 0);
    fixture_wait_right();
    both_expect(&dh, add ? "swiglu_bwd, added" : "swiglu_bwd", scale, 31);
    free(scale);
    both_close(&h);
    both_close(&da);
    both_close(&dh);
}

static void test_backward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) {
            backward((enum moe_cuda_type)type, &shapes[i], false);
            backward((enum moe_cuda_type)type, &shapes[i], true);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
