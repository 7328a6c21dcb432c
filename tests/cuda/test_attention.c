/* test_attention - kernels/attention.cu against ref.h.
 *
 * Bounds in unit roundoffs, for sequences of n tokens and heads of d. norm(x): the largest of a head's rows.
 *   turn     of a turned element, of its pair: 2 products, a sum, the table's 2 ulp; and in double, where the
 *            angle is no better than the numbers, 5 for each position
 *   score    norm(q) norm(k) / sqrt(d) times: the turned rows of both sides, 4 sqrt(2) turn; the products and
 *            sums of kernel and reference, d + d / 8 + 10, and 3 for sqrt(d)
 *   p        2 score (one of its own, one in the sum), the difference to the largest or the logarithm of the
 *            sum, 8 norm(q) norm(k) / sqrt(d); 24 for exponentials, quotients, roundings; 8 for each tile of
 *            keys, after which sums are scaled; 2 n for sums of doubles
 *   o, dv    p, then n additions on either side, and 2 for each tile
 *   dscore   p (dp - mean), of 2 p norm(dout) norm(v): p twice, 2 dot products, n, and 30 for the rest
 *   dq, dk   dscore, 2 n additions, 3 turns, 10 */
#include "tests/cuda/both.h"

/* Numbers of qkv are up to range, and v_range times that in v. */
static const struct shape {
    int64_t T, H, A, S;
    double range, v_range;
} shapes[] = {
    {5, 8, 2, 5, 1, 1},    {37, 24, 2, 33, 1, 200}, /* the exponentials of other rows' statistics overflow */
    {0, 8, 2, 4, 1, 1},    {3, 2, 1, 1, 1, 1},
    {9, 80, 1, 100, 1, 1}, {4, 528, 2, 4, 1, 1}, /* heads of more than 256 */
    {70, 12, 1, 70, 1, 1}, {130, 4, 1, 130, 8, 1}};
enum { N_SHAPES = FEW ? 1 : sizeof shapes / sizeof *shapes };

static struct both open_qkv(enum moe_cuda_type type, const struct shape *s)
{
    struct both qkv = both_open(type, s->T * 3 * s->H, 0, (uint64_t)s->T, -s->range, s->range);
    for (int64_t i = 0; i < qkv.n; i++)
        if (i / s->H % 3 == 2) both_set(&qkv, i, both_at(&qkv, i) * s->v_range);
    return qkv;
}

/* The largest norm of a head's rows in x [rows, H]: of n_parts such matrices side by side, number `part`. */
static double norm(const struct both *x, const struct shape *s, int n_parts, int part)
{
    const int64_t d = s->H / s->A;
    double most = 0;
    for (int64_t i = 0; i < s->T * s->A; i++) {
        const int64_t at = (i / s->A * n_parts + part) * s->H + i % s->A * d;
        double sum = 0;
        for (int64_t c = at; c < at + d; c++) sum += both_at(x, c) * both_at(x, c);
        most = fmax(most, sqrt(sum));
    }
    return most;
}

struct bounds {
    double o, dqk, dv; /* roundings */
};

static struct bounds bounds_of(const struct both *qkv, const struct shape *s)
{
    const bool wide = fixture_is_double(qkv->type);
    const double d = (double)(s->H / s->A), n = (double)(s->S < s->T ? s->S : s->T),
                 tiles = ceil(n / (wide ? 32 : 64)), turn = 7 + (wide ? 5 * n : 0),
                 size = norm(qkv, s, 3, 0) * norm(qkv, s, 3, 1) / sqrt(d),
                 score = size * (4 * sqrt(2) * turn + 1.125 * d + 13),
                 p = 2 * score + 8 * size + 24 + 8 * tiles + 2 * n, sum = p + 2 * n + 2 * tiles;
    return (struct bounds){
        .o = sum + 4, .dv = sum + 4, .dqk = 2 * p + 2.25 * d + n + 30 + 2 * n + 3 * turn + 10};
}

/* x with the absolute values of its part of three. */
static double *with_absolute(const struct both *x, const struct shape *s, int n_parts, int part)
{
    double *y = both_scale(x->n);
    for (int64_t i = 0; i < x->n; i++) {
        y[i] = both_at(x, i);
        if (i / s->H % n_parts == part) y[i] = fabs(y[i]);
    }
    return y;
}

static void forward(enum moe_cuda_type type, const struct shape *s)
{
    struct both qkv = open_qkv(type, s), o = both_open(type, s->T * s->H, 0, 2, -1, 1);
    double *absolute = with_absolute(&qkv, s, 3, 2), *scale = both_scale(o.n);
    moe_ref_attention_f64(s->T, s->H, s->A, s->S, absolute, scale); /* sums of p |v| */
    FIXTURE_REF(type, attention, s->T, s->H, s->A, s->S, qkv.ref, o.ref);
    const struct moe_cuda_queue *q = fixture_queue(moe_cuda_attention_bytes(s->T, s->H, s->A, s->S));
    assert_int_equal(moe_cuda_attention(q, type, s->T, s->H, s->A, s->S, qkv.kernel, o.kernel), 0);
    fixture_wait_right();
    both_expect(&o, "attention", scale, bounds_of(&qkv, s).o);
    free(absolute);
    free(scale);
    both_close(&qkv);
    both_close(&o);
}

static void test_forward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++)
            forward((enum moe_cuda_type)type, &shapes[i]);
}

/* scale [T,3H]; dv: the sums of p |dout|. Its roundings are other ones, so its scale is in those of dqk. */
static void scales(const struct both *qkv, const struct both *dout, const struct shape *s, struct bounds b,
                   double *scale)
{
    double *of = with_absolute(qkv, s, 3, 2), *absolute = with_absolute(dout, s, 1, 0),
           dscore = 2 * sqrt(2) * norm(dout, s, 1, 0) * norm(qkv, s, 3, 2) / sqrt((double)(s->H / s->A));
    moe_ref_attention_bwd_f64(s->T, s->H, s->A, s->S, of, absolute, scale, false);
    for (int64_t i = 0; i < qkv->n; i++) {
        const int64_t part = i / s->H % 3; /* p of the queries of a key add up to their number at most */
        scale[i] = part == 0   ? dscore * norm(qkv, s, 3, 1)
                   : part == 1 ? dscore * norm(qkv, s, 3, 0) * (double)(s->S < s->T ? s->S : s->T)
                               : scale[i] * b.dv / b.dqk;
    }
    free(of);
    free(absolute);
}

static void backward(enum moe_cuda_type type, const struct shape *s, bool add)
{
    struct both qkv = open_qkv(type, s), dout = both_open(type, s->T * s->H, 0, 2, -1, 1),
                dqkv = both_open(type, qkv.n, 0, 3, -1, 1);
    const struct bounds b = bounds_of(&qkv, s);
    double *scale = both_scale(qkv.n);
    scales(&qkv, &dout, s, b, scale);
    for (int64_t i = 0; add && i < qkv.n; i++) scale[i] += fabs(both_at(&dqkv, i));
    FIXTURE_REF(type, attention_bwd, s->T, s->H, s->A, s->S, qkv.ref, dout.ref, dqkv.ref, add);
    const struct moe_cuda_queue *q = fixture_queue(moe_cuda_attention_bytes(s->T, s->H, s->A, s->S));
    assert_int_equal(
        moe_cuda_attention_bwd(q, type, s->T, s->H, s->A, s->S, qkv.kernel, dout.kernel, dqkv.kernel, add),
        0);
    fixture_wait_right();
    both_expect(&dqkv, add ? "attention_bwd, added" : "attention_bwd", scale, b.dqk);
    free(scale);
    both_close(&qkv);
    both_close(&dout);
    both_close(&dqkv);
}

static void test_backward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++)
            backward((enum moe_cuda_type)type, &shapes[i], i % 2);
}

/* Heads of an odd size, and a workspace that is too small. */
static void test_refused(void **state)
{
    (void)state;
    struct both x = both_open(MOE_CUDA_F32, 3 * 6, 0, 1, -1, 1), y = both_open(x.type, 6, 0, 1, -1, 1);
    struct moe_cuda_queue q = *fixture_queue(0);
    assert_int_equal(moe_cuda_attention(&q, x.type, 1, 6, 2, 1, x.kernel, y.kernel), 1);
    assert_int_equal(moe_cuda_attention(&q, x.type, 1, 6, 4, 1, x.kernel, y.kernel), 1);
    q.workspace_bytes = moe_cuda_attention_bytes(1, 6, 1, 1) - 1;
    assert_int_equal(moe_cuda_attention(&q, x.type, 1, 6, 1, 1, x.kernel, y.kernel), 1);
    both_close(&x);
    both_close(&y);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_refused),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
