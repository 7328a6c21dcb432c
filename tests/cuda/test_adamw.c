/* test_adamw - kernels/adamw.cu against ref.h. adamw and clip do the operations of the reference one by one,
 * so the results are equal. */
#include "tests/cuda/both.h"

static const struct shape {
    int64_t n, off;
} shapes[] = {{33, 0}, {64, 1}, {64, 0}, {0, 0}, {1, 0}, {7, 0}, {8, 0}, {257, 0}, {1000, 3}, {5001, 0}};
/* More than the grid has threads for. */
static const struct shape most_elements = {1024 * 256 + 300, 1}, most_lumps = {1024 * 256 * 2 + 515, 0};
enum { N_SHAPES = FEW ? 2 : sizeof shapes / sizeof *shapes };

static void for_all(void (*check)(enum moe_cuda_type type, const struct shape *s))
{
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) check((enum moe_cuda_type)type, &shapes[i]);
}

/* Doubles for all types. The squares of floats are exact, of doubles off by 1 unit; the reference's eight
 * sums have n / 8 + 8 and 7 additions, the kernel's threads n / 256 + 8 at most, and 10 in their block,
 * twice; one more with add. */
static void check_sqnorm(enum moe_cuda_type type, const struct shape *s)
{
    struct both g = both_open(type, s->n, s->off, (uint64_t)s->n, -2, 2);
    double *norm = fixture_alloc(sizeof *norm), want;
    if (s->n > 1 && type != MOE_CUDA_F64) both_set(&g, 1, 1e30); /* whose square is no float */
    for (int add = 0; add < 2; add++) {
        *norm = want = 3.25;
        FIXTURE_REF(type, sqnorm, s->n, g.ref, &want, add);
        assert_int_equal(moe_cuda_sqnorm(fixture_queue(0), type, s->n, g.kernel, norm, add), 0);
        fixture_wait_right();
        fixture_expect(MOE_CUDA_F64, add ? "sqnorm, added" : "sqnorm", 1, &want, NULL, norm,
                       (double)s->n / 8 + (double)s->n / 256 + 2 + 15 + 8 + 20 + 2);
    }
    both_close(&g);
    fixture_free(norm);
}

static void test_sqnorm(void **state)
{
    (void)state;
    for_all(check_sqnorm);
    const struct shape blocks = {257 * 256, 1}; /* more sums than the second kernel has threads */
    if (!FEW) check_sqnorm(MOE_CUDA_F64, &blocks);
}

static void check_clip(enum moe_cuda_type type, const struct shape *s)
{
    double *norm = fixture_alloc(2 * sizeof *norm);
    norm[0] = 5;
    for (int kind = 0; kind < 4; kind++) { /* to another array or in place; shrunk, not shrunk */
        struct both g = both_open(type, s->n, s->off, (uint64_t)s->n, -2, 2),
                    other = both_open(type, s->n, s->off, 2, -2, 2), *out = kind % 2 ? &g : &other;
        norm[1] = kind / 2 ? 7 : 0.25;
        FIXTURE_REF(type, clip, s->n, 3, g.ref, norm, norm + 1, out->ref);
        assert_int_equal(
            moe_cuda_clip(fixture_queue(0), type, s->n, 3, g.kernel, norm, norm + 1, out->kernel), 0);
        fixture_wait_right();
        both_expect(out, "clip", NULL, 0);
        both_close(&g);
        both_close(&other);
    }
    fixture_free(norm);
}

static void test_clip(void **state)
{
    (void)state;
    for_all(check_clip);
    if (FEW) return;
    check_clip(MOE_CUDA_F32, &most_elements);
    check_clip(MOE_CUDA_F64, &most_lumps);
}

/* Without gradients there is nothing to shrink: 3 / 0 is more than 1. */
static void test_clip_zero_norm(void **state)
{
    (void)state;
    double *norm = fixture_alloc(sizeof *norm);
    struct both g = both_open(MOE_CUDA_F32, 33, 0, 1, -2, 2);
    *norm = 0;
    assert_int_equal(moe_cuda_clip(fixture_queue(0), g.type, g.n, 3, g.kernel, norm, norm, g.kernel), 0);
    fixture_wait_right();
    both_expect(&g, "clip of a zero norm", NULL, 0);
    both_close(&g);
    fixture_free(norm);
}

/* Three steps from zero, the second to other arrays. */
static void check_adamw(enum moe_cuda_type type, const struct shape *s)
{
    struct both x[6], grad; /* param, m, v, and others of them */
    for (int i = 0; i < 6; i++) {
        x[i] = both_open(type, s->n, s->off, (uint64_t)i, -2, 2);
        for (int64_t j = 0; (i == 1 || i == 2) && j < s->n; j++) both_set(&x[i], j, 0);
    }
    for (int step = 1; step <= 3; step++) {
        struct both *in = &x[step == 3 ? 3 : 0], *out = &x[step == 1 ? 0 : 3];
        grad = both_open(type, s->n, s->off, (uint64_t)(10 + step), -1, 1);
        FIXTURE_REF(type, adamw, s->n, 1e-3, 0.1, step, in[0].ref, grad.ref, in[1].ref, in[2].ref, out[0].ref,
                    out[1].ref, out[2].ref);
        assert_int_equal(moe_cuda_adamw(fixture_queue(0), type, s->n, 1e-3, 0.1, step, in[0].kernel,
                                        grad.kernel, in[1].kernel, in[2].kernel, out[0].kernel, out[1].kernel,
                                        out[2].kernel),
                         0);
        fixture_wait_right();
        static const char *const names[] = {"param", "m", "v"};
        for (int i = 0; i < 3; i++) {
            both_expect(&out[i], names[i], NULL, 0);
            for (int64_t j = 0; j < s->n; j++) /* the next step begins with equal numbers */
                both_set(&out[i], j, fixture_at(type, out[i].kernel, j));
        }
        both_close(&grad);
    }
    for (int i = 0; i < 6; i++) both_close(&x[i]);
}

static void test_adamw(void **state)
{
    (void)state;
    for_all(check_adamw);
    if (FEW) return;
    check_adamw(MOE_CUDA_F32, &most_elements);
    check_adamw(MOE_CUDA_F64, &most_lumps);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sqnorm),
        cmocka_unit_test(test_clip),
        cmocka_unit_test(test_clip_zero_norm),
        cmocka_unit_test(test_adamw),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
