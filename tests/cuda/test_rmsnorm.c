/* test_rmsnorm - kernels/rmsnorm.cu against ref.h.
 *
 * Bounds in unit roundoffs, of which every operation has one. A sum of n positive products is off by n + 1 of
 * itself when one follows the other: the reference's eight sums have H / 8 + 8 products at most; the kernel's
 * threads, 32 at least, have H / 32 + 8, and add theirs in 10 steps. */
#include "tests/cuda/both.h"

static const struct shape {
    int64_t T, H, off;
} shapes[] = {{5, 33, 0}, {4, 64, 0}, {4, 64, 1}, {0, 16, 0}, {4, 0, 0},   {1, 1, 0},
              {2, 7, 0},  {3, 8, 0},  {9, 1, 0},  {3, 65, 0}, {2, 2056, 0}};
enum { N_SHAPES = FEW ? 3 : sizeof shapes / sizeof *shapes };

static double chain(int64_t H) /* of the kernel */
{
    return (double)H / 32 + 8 + 10;
}

static double off_squares(int64_t H) /* of kernel and reference together */
{
    return chain(H) + 1 + (double)H / 8 + 8 + 1;
}

static struct both open_x(enum moe_cuda_type type, const struct shape *s)
{
    struct both x = both_open(type, s->T * s->H, s->off, (uint64_t)(s->T + s->H), -3, 3);
    for (int64_t h = 0; h < s->H && s->T > 1; h++) both_set(&x, h, 0); /* a row of zeros */
    return x;
}

static void forward(enum moe_cuda_type type, const struct shape *s)
{
    struct both x = open_x(type, s), gain = both_open(type, s->H, s->off, 2, -2, 2),
                y = both_open(type, x.n, s->off, 3, 0, 1);
    FIXTURE_REF(type, rmsnorm, s->T, s->H, x.ref, gain.ref, y.ref);
    assert_int_equal(moe_cuda_rmsnorm(fixture_queue(0), type, s->T, s->H, x.kernel, gain.kernel, y.kernel),
                     0);
    fixture_wait_right();
    /* the inverse root: half of what the sum is off; it, 2 products, the reference's result: 4 */
    both_expect(&y, "rmsnorm", NULL, off_squares(s->H) / 2 + 5);
    both_close(&x);
    both_close(&gain);
    both_close(&y);
}

static void test_forward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++)
            forward((enum moe_cuda_type)type, &shapes[i]);
}

struct backward {
    struct both x, gain, dy, dx, dgain;
    double *x_scale, *gain_scale;
};

/* dx = r (dy gain - x r^2 mean), dgain = the sum of dy x r: each with its terms' absolute values. */
static void scales(const struct shape *s, struct backward *b, bool add_x, bool add_gain)
{
    for (int64_t h = 0; h < s->H; h++) b->gain_scale[h] = add_gain ? fabs(both_at(&b->dgain, h)) : 0;
    for (int64_t t = 0; t < s->T; t++) {
        double squares = 0, mean = 0;
        for (int64_t h = 0; h < s->H; h++) {
            const double x = both_at(&b->x, t * s->H + h), d = both_at(&b->dy, t * s->H + h);
            squares += x * x / (double)s->H;
            mean += fabs(d * both_at(&b->gain, h) * x) / (double)s->H;
        }
        const double r = 1 / sqrt(squares + 1e-5);
        for (int64_t h = 0; h < s->H; h++) {
            const int64_t at = t * s->H + h;
            const double x = both_at(&b->x, at), d = both_at(&b->dy, at);
            b->x_scale[at] = r * (fabs(d * both_at(&b->gain, h)) + fabs(x) * r * r * mean);
            if (add_x) b->x_scale[at] += fabs(both_at(&b->dx, at));
            b->gain_scale[h] += fabs(d * x) * r;
        }
    }
}

static void backward(enum moe_cuda_type type, const struct shape *s, bool add_x, bool add_gain)
{
    const int64_t n = s->T * s->H;
    struct backward b = {open_x(type, s),
                         both_open(type, s->H, s->off, 2, -2, 2),
                         both_open(type, n, s->off, 3, -2, 2),
                         both_open(type, n, s->off, 4, -1, 1),
                         both_open(type, s->H, s->off, 5, -1, 1),
                         both_scale(n),
                         both_scale(s->H)};
    scales(s, &b, add_x, add_gain);
    FIXTURE_REF(type, rmsnorm_bwd, s->T, s->H, b.x.ref, b.gain.ref, b.dy.ref, b.dx.ref, b.dgain.ref, add_x,
                add_gain);
    assert_int_equal(moe_cuda_rmsnorm_bwd(fixture_queue(0), type, s->T, s->H, b.x.kernel, b.gain.kernel,
                                          b.dy.kernel, b.dx.kernel, b.dgain.kernel, add_x, add_gain),
                     0);
    fixture_wait_right();
    /* r^3 is off by three halves of the squares; the mean by its chain and 3 for products and H; 10 for the
     * other operations of both. */
    both_expect(&b.dx, "dx", b.x_scale, 1.5 * off_squares(s->H) + chain(s->H) + 13);
    /* r, 4 products with it, and of either side an addition a row. */
    both_expect(&b.dgain, "dgain", b.gain_scale, off_squares(s->H) / 2 + 5 + 2 * ((double)s->T + 1));
    for (struct both *a = &b.x; a <= &b.dgain; a++) both_close(a);
    free(b.x_scale);
    free(b.gain_scale);
}

static void test_backward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) {
            const bool either = i % 2; /* both of the first two, which have all kinds of units */
            backward((enum moe_cuda_type)type, &shapes[i], either, !either);
            if (i < 2) backward((enum moe_cuda_type)type, &shapes[i], !either, either);
        }
}

static void test_more_rows_than_blocks(void **state)
{
    (void)state;
    const struct shape many = {2049, 3, 0}, some = {257, 9, 0};
    if (FEW) return;
    forward(MOE_CUDA_F32, &many);
    backward(MOE_CUDA_F32, &some, false, false);
}

/* 5,120 doubles of it fit a block's memory. */
static void test_gain_by_parts(void **state)
{
    (void)state;
    for (int64_t off = 0; !FEW && off < 2; off++) {
        const struct shape s = {2, 5122, off};
        backward(MOE_CUDA_F64, &s, true, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_more_rows_than_blocks),
        cmocka_unit_test(test_gain_by_parts),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
