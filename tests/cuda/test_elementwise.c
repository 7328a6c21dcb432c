/* test_elementwise - kernels/elementwise.cu against ref.h. Every result is one rounding of the same
 * operations, so floats and doubles agree to the bit. */
#include "tests/cuda/fixture.h"

static const int64_t sizes[] = {0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 70001, 300001, 600003};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

struct arrays { /* of n elements: what the kernel gets, and the reference */
    enum moe_cuda_type type;
    int64_t n;
    void *kernel[4], *ref[4], *begin[4];
};

/* shift: elements that the kernel's arrays are off a lump. */
static void open_arrays(struct arrays *a, enum moe_cuda_type type, int64_t n, int64_t shift)
{
    *a = (struct arrays){type, n, {0}, {0}, {0}};
    for (int i = 0; i < 4; i++) {
        a->begin[i] = fixture_random(type, n + shift, (uint64_t)(10 * n + i), -2, 2);
        a->kernel[i] = (char *)a->begin[i] + (size_t)shift * fixture_bytes(type);
        a->ref[i] = fixture_for_reference(type, a->kernel[i], n);
    }
}

static void close_arrays(struct arrays *a, const char *what, int err)
{
    assert_int_equal(err, 0);
    fixture_wait_right();
    for (int i = 0; i < 4; i++) {
        fixture_expect(a->type, what, a->n, a->ref[i], NULL, a->kernel[i], 0);
        fixture_free(a->begin[i]);
        free(a->ref[i]);
    }
}

/* CALL: `name` with arguments in which x[0..3] are the arrays. */
#define CHECK(name, ...)                                                                                     \
    for (int s = 0; s < N_SIZES; s++)                                                                        \
        for (int type = MOE_CUDA_F32; type <= MOE_CUDA_BF16; type++) {                                       \
            const int64_t n = sizes[s];                                                                      \
            struct arrays a;                                                                                 \
            open_arrays(&a, (enum moe_cuda_type)type, n, s % 2);                                             \
            void **x = a.ref;                                                                                \
            FIXTURE_REF(type, name, n, __VA_ARGS__);                                                         \
            x = a.kernel;                                                                                    \
            int err = moe_cuda_##name(fixture_queue(0), (enum moe_cuda_type)type, n, __VA_ARGS__);           \
            close_arrays(&a, #name, err);                                                                    \
        }

static void test_add(void **state)
{
    (void)state;
    CHECK(add, x[0], x[1], x[2])
    CHECK(add_bwd, x[0], x[1], x[2], false, true)
    CHECK(add_bwd, x[0], x[1], x[2], true, false)
}

static void test_moves(void **state)
{
    (void)state;
    CHECK(zero, x[0])
    CHECK(copy, x[0], x[1])
}

static void test_scaled(void **state)
{
    (void)state;
    CHECK(scale, 3, x[0], x[1])
    CHECK(scale, 3, x[0], x[0])
    CHECK(sgd, 0.1, x[0], x[1], x[2])
    CHECK(sgd, 0.1, x[0], x[1], x[0])
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_add),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_scaled),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
