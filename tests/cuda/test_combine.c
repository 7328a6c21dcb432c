/* test_combine - kernels/combine.cu against ref.h, and for bf16 against combine.h. What is summed in the
 * order of the reference is compared by bits; dot products over a tree of their own are bounded. */
#include "kernels/combine.h"
#include "tests/cuda/choices.h"

static const int64_t widths[] = {1, 7, 8, 33, 64, 257, 1025, 4104};
enum { N_WIDTHS = sizeof widths / sizeof *widths };

#define FOR_TYPES(type) for (enum moe_cuda_type type = MOE_CUDA_F32; type <= MOE_CUDA_BF16; type++)

/* Random numbers, and what the reference makes its own of. */
struct array {
    void *kernel, *ref;
};

static struct array open_array(enum moe_cuda_type type, int64_t n, uint64_t seed)
{
    void *p = fixture_random(type, n, seed, -2, 2);
    return (struct array){p, fixture_for_reference(type, p, n)};
}

static void close_array(struct array a)
{
    fixture_free(a.kernel);
    free(a.ref);
}

/* ---- take ---- */

static void check_take(enum moe_cuda_type type, enum kind kind, int64_t T, int64_t E, int64_t K)
{
    struct choices c = open_choices(kind, T, K, E);
    struct array prob = open_array(type, T * E, 1), taken = open_array(type, T * K, 2);
    assert_int_equal(moe_cuda_take(fixture_used_queue(), type, T, E, K, prob.kernel, c.expert, taken.kernel),
                     0);
    fixture_wait_right();
    FIXTURE_REF(type, take, T, E, K, prob.ref, c.expert, taken.ref);
    expect_same(type, "take", T * K, taken.ref, taken.kernel);
    for (int add = 1; add >= 0; add--) {
        assert_int_equal(
            moe_cuda_take_bwd(fixture_used_queue(), type, T, E, K, c.expert, taken.kernel, prob.kernel, add),
            0);
        fixture_wait_right();
        FIXTURE_REF(type, take_bwd, T, E, K, c.expert, taken.ref, prob.ref, add);
        expect_same(type, "take_bwd", T * E, prob.ref, prob.kernel);
    }
    close_array(prob);
    close_array(taken);
    close_choices(&c);
}

static void test_take(void **state)
{
    (void)state;
    for (int kind = PLAIN; kind <= ONE; kind++) FOR_TYPES(type)
        {
            check_take(type, kind, FEW ? 4 : 21, 7, 3);
            if (FEW) continue;
            check_take(type, kind, 5, 512, 8);
            check_take(type, kind, 9, 1, 1);
            check_take(type, kind, 0, 4, 2);
            check_take(type, kind, 4, 4, 0);
        }
}

/* ---- weigh, combine ---- */

static void check_weigh(enum moe_cuda_type type, int64_t n, int64_t H)
{
    struct array rows = open_array(type, n * H, 1), weight = open_array(type, n, 2),
                 y = open_array(type, n * H, 3);
    assert_int_equal(moe_cuda_weigh(fixture_used_queue(), type, n, H, rows.kernel, weight.kernel, y.kernel),
                     0);
    fixture_wait_right();
    FIXTURE_REF(type, weigh, n, H, rows.ref, weight.ref, y.ref);
    expect_same(type, "weigh", n * H, y.ref, y.kernel);
    close_array(rows);
    close_array(weight);
    close_array(y);
}

static void test_weigh(void **state)
{
    (void)state;
    for (int w = 0; w < (FEW ? 3 : N_WIDTHS); w++) FOR_TYPES(type)
        {
            check_weigh(type, widths[w] > 1000 || FEW ? 3 : 19, widths[w]);
            check_weigh(type, 0, widths[w]);
        }
}

/* The arguments of combine and of its backward. */
struct combined {
    enum moe_cuda_type type;
    struct choices c;
    int64_t H;
    struct array rows, prob, y; /* [n,H], [T,E], [T,H]: y is dy backward */
};

static struct combined open_combined(enum moe_cuda_type type, enum kind kind, int64_t T, int64_t H, int64_t K,
                                     int64_t E)
{
    struct combined m = {type, open_choices(kind, T, K, E), H, {0}, {0}, {0}};
    m.rows = open_array(type, m.c.n * H, 4);
    m.prob = open_array(type, T * E, 5);
    m.y = open_array(type, T * H, 6);
    return m;
}

static void close_combined(struct combined *m)
{
    close_array(m->rows);
    close_array(m->prob);
    close_array(m->y);
    close_choices(&m->c);
}

/* The same for combine.h: rows arrive in order of choices. */
static struct moe_combine as_moe_combine(const struct combined *m)
{
    const struct choices *c = &m->c;
    const size_t n = (size_t)(c->T * c->K) + 1;
    int32_t *arrival = test_malloc(n * sizeof *arrival);
    float *weight = test_malloc(n * sizeof *weight);
    for (int64_t i = 0; i < c->T * c->K; i++) {
        arrival[i] = (int32_t)i;
        weight[i] =
            c->slot[i] == -1 ? 0 : (float)fixture_at(m->type, m->prob.kernel, i / c->K * c->E + c->expert[i]);
    }
    return (struct moe_combine){c->T, m->H, c->K, c->n, c->slot, arrival, weight, 1};
}

static void close_moe_combine(struct moe_combine *c)
{
    test_free((void *)c->arrival);
    test_free((void *)c->weight);
}

static int combine(const struct combined *m, void *y)
{
    return moe_cuda_combine(fixture_used_queue(), m->type, m->c.T, m->H, m->c.K, m->c.E, m->c.n,
                            m->rows.kernel, m->prob.kernel, m->c.expert, m->c.slot, y);
}

static void check_combine(struct combined *m)
{
    const int64_t n = m->c.T * m->H;
    assert_int_equal(combine(m, m->y.kernel), 0);
    fixture_wait_right();
    FIXTURE_REF(m->type, combine, m->c.T, m->H, m->c.K, m->c.E, m->c.n, m->rows.ref, m->prob.ref, m->c.expert,
                m->c.slot, m->y.ref);
    expect_same(m->type, "combine", n, m->y.ref, m->y.kernel);
    if (m->type != MOE_CUDA_BF16) return;
    struct moe_combine c = as_moe_combine(m);
    moe_bf16 *apart = test_malloc((size_t)(m->c.T * m->c.K * m->H) * 2 + 1),
             *y = test_malloc((size_t)n * 2 + 1);
    moe_combine_unsort_bf16(&c, m->rows.kernel, apart, y, false);
    assert_memory_equal(m->y.kernel, y, (size_t)n * sizeof *y);
    test_free(apart);
    test_free(y);
    close_moe_combine(&c);
}

static void test_combine(void **state)
{
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int w = 0; w < (FEW ? 3 : N_WIDTHS); w++) FOR_TYPES(type)
            {
                const int64_t K = 1 + (w + kind + (int)type) % 8, T = widths[w] > 1000 ? 3 : FEW ? 4 : 29;
                if (FEW && (kind + w) % 3 != (int)type) continue;
                struct combined m = open_combined(type, kind, T, widths[w], K, 11);
                check_combine(&m);
                close_combined(&m);
            }
    FOR_TYPES(type)
    {
        struct combined many = open_combined(type, DROPPED, 5, 16, 19, 40),
                        none = open_combined(type, PLAIN, 0, 8, 2, 3),
                        without = open_combined(type, PLAIN, 4, 8, 0, 3);
        check_combine(&many);
        check_combine(&none);
        check_combine(&without); /* y is 0 */
        close_combined(&many);
        close_combined(&none);
        close_combined(&without);
    }
}

/* ---- gradients ---- */

/* Additions that a term of a dot product of H may go through, and its product. A thread of 32 or more adds at
 * most 8 ceil(H / 256) products (lumps of 8, or fewer elements of each), a warp 5 times, 8 warps 8 times, and
 * one rounding more is the result's. The reference: H / 8 and 7 that are left over, 8 sums, the result. */
static double roundings(int64_t H)
{
    const int64_t kernel = 1 + 8 * ((H + 255) / 256) + 5 + 8 + 1, reference = 1 + H / 8 + 7 + 8 + 1;
    return (double)(kernel + reference + 1); /* 1: of second order, as they are far from 1 / unit */
}

static void check_weigh_bwd(enum moe_cuda_type type, int64_t n, int64_t H, bool by_rows)
{
    struct array rows = open_array(type, n * H, 1), weight = open_array(type, n, 2),
                 dy = open_array(type, n * H, 3), drows = open_array(type, n * H, 4),
                 dweight = open_array(type, n, 5);
    double *scale = test_calloc((size_t)n + 1, sizeof *scale);
    assert_int_equal(moe_cuda_weigh_bwd(fixture_used_queue(), type, n, H, rows.kernel, weight.kernel,
                                        dy.kernel, by_rows, drows.kernel, dweight.kernel),
                     0);
    fixture_wait_right();
    FIXTURE_REF(type, weigh_bwd, n, H, rows.ref, weight.ref, dy.ref, by_rows, drows.ref, dweight.ref);
    expect_same(type, "weigh_bwd drows", n * H, drows.ref, drows.kernel);
    for (int64_t i = 0; i < n * H; i++)
        scale[i / H] += fabs(fixture_at(type, rows.kernel, i) * fixture_at(type, dy.kernel, i));
    if (by_rows)
        expect_same(type, "weigh_bwd dweight, by rows", n, dweight.ref, dweight.kernel);
    else
        fixture_expect(type, "weigh_bwd dweight", n, dweight.ref, scale, dweight.kernel, roundings(H));
    test_free(scale);
    const struct array all[] = {rows, weight, dy, drows, dweight};
    for (int i = 0; i < 5; i++) close_array(all[i]);
}

/* By rows: as many rows as PyTorch has another order for. */
static void test_weigh_bwd(void **state)
{
    (void)state;
    static const int64_t n_rows[] = {0, 1, 2, 5, 8, 19};
    for (int w = 0; w < (FEW ? 4 : N_WIDTHS); w++)
        for (int r = 0; r < (int)(sizeof n_rows / sizeof *n_rows); r++) FOR_TYPES(type)
            {
                if (FEW && (r != w + 1 || (w + r) % 3 != (int)type)) continue;
                check_weigh_bwd(type, n_rows[r], widths[w], true);
                check_weigh_bwd(type, n_rows[r], widths[w], false);
            }
}

static int combine_bwd(const struct moe_cuda_queue *q, const struct combined *m, bool by_rows, void *drows,
                       void *dprob)
{
    return moe_cuda_combine_bwd(q, m->type, m->c.T, m->H, m->c.K, m->c.E, m->c.n, m->rows.kernel,
                                m->prob.kernel, m->c.expert, m->c.slot, m->y.kernel, by_rows, drows, dprob);
}

static void check_combine_bwd(const struct moe_cuda_queue *q, const struct combined *m, bool by_rows)
{
    const struct choices *c = &m->c;
    const int64_t H = m->H;
    struct array drows = open_array(m->type, c->n * H, 7), dprob = open_array(m->type, c->T * c->E, 8);
    double *scale = test_calloc((size_t)(c->T * c->E) + 1, sizeof *scale);
    assert_int_equal(combine_bwd(q, m, by_rows, drows.kernel, dprob.kernel), 0);
    fixture_wait_right();
    FIXTURE_REF(m->type, combine_bwd, c->T, H, c->K, c->E, c->n, m->rows.ref, m->prob.ref, c->expert, c->slot,
                m->y.ref, by_rows, drows.ref, dprob.ref);
    expect_same(m->type, "combine_bwd drows", c->n * H, drows.ref, drows.kernel);
    for (int64_t i = 0; i < c->T * c->K; i++)
        for (int64_t h = 0; h < H && c->slot[i] != -1; h++)
            scale[i / c->K * c->E + c->expert[i]] +=
                fabs(fixture_at(m->type, m->rows.kernel, c->slot[i] * H + h) *
                     fixture_at(m->type, m->y.kernel, i / c->K * H + h));
    if (by_rows)
        expect_same(m->type, "combine_bwd dprob, by rows", c->T * c->E, dprob.ref, dprob.kernel);
    else
        fixture_expect(m->type, "combine_bwd dprob", c->T * c->E, dprob.ref, scale, dprob.kernel,
                       roundings(H));
    test_free(scale);
    close_array(drows);
    close_array(dprob);
}

static void test_combine_bwd(void **state)
{
    (void)state;
    for (int kind = FEW ? ONE : 0; kind < N_KINDS; kind++)
        for (int w = 0; w < (FEW ? 3 : N_WIDTHS); w++) FOR_TYPES(type)
            {
                const int64_t K = 1 + (w + kind + (int)type) % 8, T = widths[w] > 200 || FEW ? 2 : 5;
                if (FEW && (kind + w) % 3 != (int)type) continue;
                struct combined m = open_combined(type, kind, T, widths[w], K, 11);
                if (!FEW || kind != ONE) check_combine_bwd(fixture_used_queue(), &m, false);
                if (!FEW || kind == ONE) check_combine_bwd(fixture_used_queue(), &m, true);
                close_combined(&m);
            }
}

/* More choices than a block takes at once; few rows, of which a block sums each with up to 512 threads; no
 * token, no width, no choice; a workspace for 5 owners. */
static void test_combine_bwd_edges(void **state)
{
    (void)state;
    enum { WIDE = FEW ? 70 : 600 };
    static const int64_t shapes[][4] = {/* T, H, K, E */
                                        {3, 16, 19, 40}, {1, WIDE, 1, 2}, {3, WIDE, 1, 2}, {1, WIDE, 5, 8},
                                        {0, 8, 2, 3},    {3, 0, 2, 3},    {3, 8, 0, 3}};
    for (int i = 0; i < 7 * 3 * 2; i++) {
        const int s = i / 6, by_rows = i % 2;
        const enum moe_cuda_type type = (enum moe_cuda_type)(i / 2 % 3);
        const int64_t *d = shapes[s];
        if (FEW && (s < 1 || s > 2 || s % 3 != (int)type)) continue;
        struct combined m = open_combined(type, DROPPED, d[0], d[1], d[2], d[3]);
        check_combine_bwd(fixture_used_queue(), &m, by_rows);
        struct moe_cuda_queue q = *fixture_used_queue();
        q.workspace_bytes = 5 * sizeof(int32_t);
        if (s == 0) check_combine_bwd(&q, &m, by_rows);
        close_combined(&m);
    }
}

/* No undefined behaviour where a caller is wrong: the last choice has the row, or the expert's dprob. */
static void test_named_twice(void **state)
{
    (void)state;
    enum { T = 6, H = 40, K = 2, E = 4 };
    for (int by_rows = 0; by_rows < 2; by_rows++) {
        struct combined m = open_combined(MOE_CUDA_F64, PLAIN, T, H, K, E);
        double *drows = fixture_alloc((size_t)m.c.n * H * sizeof *drows),
               *dprob = fixture_alloc(T * E * sizeof *dprob);
        m.c.slot[1] = m.c.slot[2 * T - 2] = m.c.slot[2 * T - 1];
        m.c.expert[2] = m.c.expert[3];
        const int32_t last = m.c.slot[2 * T - 1];
        assert_int_equal(combine_bwd(fixture_used_queue(), &m, by_rows, drows, dprob), 0);
        fixture_wait_right();
        const double *dy = m.y.kernel, *prob = m.prob.kernel, *rows = m.rows.kernel;
        double dot = 0;
        for (int h = 0; h < H; h++) {
            assert_true(drows[last * H + h] ==
                        prob[(T - 1) * E + m.c.expert[2 * T - 1]] * dy[(T - 1) * H + h]);
            dot += dy[H + h] * rows[m.c.slot[3] * H + h];
        }
        /* |terms| <= 4; the error of each sum: H + 1 roundings at most, of a scale of 4 H */
        assert_true(fabs(dprob[E + m.c.expert[3]] - dot) <= 2 * (H + 2) * (DBL_EPSILON / 2) * 4 * H);
        fixture_free(drows);
        fixture_free(dprob);
        close_combined(&m);
    }
}

/* ---- scatter ---- */

static int scatter(const struct combined *m, void *y)
{
    return moe_cuda_combine_scatter(fixture_used_queue(), m->type, m->c.T, m->H, m->c.K, m->c.E, m->c.n,
                                    m->rows.kernel, m->prob.kernel, m->c.expert, m->c.slot, y);
}

/* In any order: |y - exact| <= ((1 + u) (1 + v)^K - 1) S of combine.h with v the unit of what is stored (for
 * float and double the product is rounded to it at once); `exact` is itself off by K roundings of double. */
static void check_scatter(const struct combined *m)
{
    const struct choices *c = &m->c;
    const double v = fixture_unit(m->type), u = m->type == MOE_CUDA_BF16 ? FLT_EPSILON / 2 : 0,
                 factor = (1 + u) * pow(1 + v, (double)c->K) - 1 + (double)c->K * (DBL_EPSILON / 2);
    assert_int_equal(scatter(m, m->y.kernel), 0);
    fixture_wait_right();
    for (int64_t t = 0; t < c->T; t++)
        for (int64_t h = 0; h < m->H; h++) {
            double exact = 0, S = 0;
            for (int64_t i = t * c->K; i < (t + 1) * c->K; i++) {
                if (c->slot[i] == -1) continue;
                const double p = fixture_at(m->type, m->prob.kernel, t * c->E + c->expert[i]) *
                                 fixture_at(m->type, m->rows.kernel, c->slot[i] * m->H + h);
                exact += p;
                S += fabs(p);
            }
            const double got = fixture_at(m->type, m->y.kernel, t * m->H + h);
            if (!(fabs(got - exact) <= factor * S))
                fail_msg("%s scatter [%lld,%lld]: %.17g, expected %.17g within %g",
                         fixture_type_text[m->type], (long long)t, (long long)h, got, exact, factor * S);
        }
    if (m->type != MOE_CUDA_BF16 || c->K > 2) return;
    struct moe_combine all = as_moe_combine(m); /* of two terms, in any order: the same bits */
    moe_bf16 *y = test_malloc((size_t)(c->T * m->H) * 2 + 1);
    moe_combine_scatter_bf16(&all, m->rows.kernel, y, false);
    assert_memory_equal(m->y.kernel, y, (size_t)(c->T * m->H) * sizeof *y);
    test_free(y);
    close_moe_combine(&all);
}

static void test_scatter(void **state)
{
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int64_t K = 1; K <= 8; K++) FOR_TYPES(type)
            {
                const int64_t H = widths[((int)K + kind) % 6];
                if (FEW && (H > 33 || K > 3 || (kind + (int)K) % 3 != (int)type)) continue;
                struct combined m = open_combined(type, kind, FEW ? 3 : 13, H, K, 11);
                check_scatter(&m);
                close_combined(&m);
            }
    struct combined none = open_combined(MOE_CUDA_BF16, PLAIN, 3, 7, 0, 2);
    check_scatter(&none); /* y is 0 */
    close_combined(&none);
}

/* ---- indices ---- */

/* A choice with an expert, and one with a slot, that there is not. */
static void test_wrong_index(void **state)
{
    (void)state;
    enum { T = 9, H = 8, K = 2, E = 3 };
    struct combined m = open_combined(MOE_CUDA_F32, PLAIN, T, H, K, E);
    void *drows = open_output(MOE_CUDA_F32, m.c.n * H), *dprob = open_output(MOE_CUDA_F32, T * E);
    for (int i = 0; i < 4; i++) {
        int32_t *at = i % 2 ? &m.c.expert[7] : &m.c.slot[7];
        const int32_t right = *at, n = i % 2 ? E : (int32_t)m.c.n, wrong = i / 2 ? n : -2;
        *at = wrong;
        assert_int_equal(combine(&m, m.y.kernel), 0);
        expect_fault(wrong, n);
        assert_int_equal(combine_bwd(fixture_used_queue(), &m, false, drows, dprob), 0);
        expect_fault(wrong, n);
        assert_int_equal(combine_bwd(fixture_used_queue(), &m, true, drows, dprob), 0);
        expect_fault(wrong, n);
        assert_int_equal(scatter(&m, m.y.kernel), 0);
        expect_fault(wrong, n);
        if (i % 2) {
            assert_int_equal(
                moe_cuda_take(fixture_used_queue(), MOE_CUDA_F32, T, E, K, m.prob.kernel, m.c.expert, drows),
                0);
            expect_fault(wrong, n);
            assert_int_equal(moe_cuda_take_bwd(fixture_used_queue(), MOE_CUDA_F32, T, E, K, m.c.expert, drows,
                                               dprob, false),
                             0);
            expect_fault(wrong, n);
        }
        *at = right;
    }
    fixture_free(drows);
    fixture_free(dprob);
    close_combined(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_take),        cmocka_unit_test(test_weigh),
        cmocka_unit_test(test_combine),     cmocka_unit_test(test_weigh_bwd),
        cmocka_unit_test(test_combine_bwd), cmocka_unit_test(test_combine_bwd_edges),
        cmocka_unit_test(test_named_twice), cmocka_unit_test(test_scatter),
        cmocka_unit_test(test_wrong_index),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
