/* What check follows of gradients (sim/check/gradient.h): contributions to one cell that others have copied,
 * and a bucket that is summed part by part, against sums by hand. */
#include "sim/check/gradient.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

enum { R = 3 };

struct rig {
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_gradients *g;
    const struct moe_param *a, *b, *bucket; /* whose gradients the cells are in */
    const struct moe_param *asked;          /* none of them is a contribution to it */
};

static const struct moe_param *param_of(const struct moe_schedule *s, const char *name)
{
    for (int i = 0; i < s->n_params; i++)
        if (!strcmp(s->params[i].name, name)) return &s->params[i];
    moe_bug(__FILE__, __LINE__, name);
}

static struct rig open_rig(void)
{
    struct rig x = {.sc = fixture_scenario(R, 1, "4", "")};
    x.s = fixture_schedule(x.sc);
    x.g = moe_gradients_new(x.s);
    x.a = param_of(x.s, "wqkv");
    x.b = param_of(x.s, "wo");
    x.bucket = param_of(x.s, "router");
    x.asked = param_of(x.s, "shared_norm"); /* its divisor is a number */
    return x;
}

static void close_rig(struct rig *x)
{
    moe_gradients_free(x->g);
    moe_schedule_free(x->s);
    moe_scenario_free(x->sc);
}

/* Operations that the schedule does not have: each contribution is one too many. */
enum { BLOCK = 1000 };

static void contribute(struct rig *x, struct moe_cell to, int id, bool accumulate)
{
    moe_gradient_contribute(x->g, to, BLOCK, &(struct moe_op){.id = id}, accumulate);
}

/* Every symbol: no operation is of no row. */
static int64_t one(void *ctx, int symbol, int rank, int layer, int index)
{
    (void)ctx, (void)symbol, (void)rank, (void)layer, (void)index;
    return 1;
}

/* How many contributions an element holds. */
static int n_held(struct rig *x, struct moe_cell in)
{
    return moe_gradient_judge(x->g, (struct moe_env){.value = one}, x->asked, 0, in, 0, 0).extra;
}

static struct moe_cell cell(const struct moe_param *p, int rank, int64_t begin, int64_t n)
{
    return (struct moe_cell){p->grad, 0, rank, begin, n};
}

/* Each adds one; what was copied, gathered or divided before keeps as many as it took. */
static void test_contributions(void **state)
{
    (void)state;
    struct rig x = open_rig();
    struct moe_cell a = cell(x.a, 0, 0, MOE_CELL_ALL), b = cell(x.b, 0, 0, MOE_CELL_ALL);
    struct moe_cell c = cell(x.bucket, 0, 0, 8), of_a = cell(x.a, 0, 0, 8);
    contribute(&x, a, 5, false);
    assert_int_equal(n_held(&x, a), 1);
    contribute(&x, a, 3, true);
    assert_int_equal(n_held(&x, a), 2);
    contribute(&x, a, 5, true); /* the same of another micro-batch */
    contribute(&x, a, 7, true);
    assert_int_equal(n_held(&x, a), 3);
    moe_gradient_copy(x.g, a, b);
    contribute(&x, a, 8, true);
    assert_int_equal(n_held(&x, a), 4);
    assert_int_equal(n_held(&x, b), 3);
    contribute(&x, b, 9, true);
    contribute(&x, b, 10, true);
    assert_int_equal(n_held(&x, a), 4);
    assert_int_equal(n_held(&x, b), 5);
    moe_gradient_gather(x.g, &of_a, &c, 1);
    contribute(&x, a, 11, true);
    assert_int_equal(n_held(&x, a), 5);
    assert_int_equal(n_held(&x, c), 4);
    contribute(&x, a, 1, false); /* in place of all */
    assert_int_equal(n_held(&x, a), 1);
    close_rig(&x);
}

/* To some elements: the others of the cell keep what they had. */
static void test_part_of_a_cell(void **state)
{
    (void)state;
    struct rig x = open_rig();
    contribute(&x, cell(x.a, 0, 0, 10), 1, false);
    contribute(&x, cell(x.a, 0, 4, 2), 2, true);
    contribute(&x, cell(x.a, 0, 0, 4), 3, true);
    contribute(&x, cell(x.a, 0, 4, 2), 4, true);
    static const int expected[10] = {2, 2, 2, 2, 3, 3, 1, 1, 1, 1};
    for (int i = 0; i < 10; i++) assert_int_equal(n_held(&x, cell(x.a, 0, i, 1)), expected[i]);
    close_rig(&x);
}

/* Ranks put 5 elements of one tensor and 7 of another into a bucket, of which rank 0 then has the sum of the
 * first 4, rank 1 of 5 and rank 2 of 3. On rank 2 two operations contributed to the second tensor. */
static void test_parts_of_a_bucket(void **state)
{
    (void)state;
    static const int64_t part[R] = {4, 5, 3};
    struct rig x = open_rig();
    struct moe_cell from[R], to[R];
    int64_t begin = 0;
    for (int r = 0; r < R; r++) {
        contribute(&x, cell(x.a, r, 0, MOE_CELL_ALL), 1, false);
        contribute(&x, cell(x.b, r, 0, MOE_CELL_ALL), 2, false);
        if (r == 2) contribute(&x, cell(x.b, r, 0, MOE_CELL_ALL), 3, true);
        moe_gradient_copy(x.g, cell(x.a, r, 0, 5), cell(x.bucket, r, 0, 5));
        moe_gradient_copy(x.g, cell(x.b, r, 0, 7), cell(x.bucket, r, 5, 7));
        from[r] = cell(x.bucket, r, 0, MOE_CELL_ALL);
        to[r] = cell(x.bucket, r, begin, part[r]);
        begin += part[r];
    }
    moe_gradient_sum(x.g, from, to, R, part, &(struct moe_op){0});
    for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < 12; i++) {
            struct moe_cell in = cell(x.bucket, r, i, 1), of;
            bool first = i < 5, own = i >= to[r].begin && i < to[r].begin + part[r];
            assert_int_equal(n_held(&x, in), own ? first ? R : R + 1 : !first && r == 2 ? 2 : 1);
            assert_true(moe_gradient_owner(x.g, in, &of));
            assert_int_equal(of.buffer, first ? x.a->grad : x.b->grad);
            assert_int_equal(of.begin, first ? i : i - 5);
        }
    close_rig(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_contributions),
        cmocka_unit_test(test_part_of_a_cell),
        cmocka_unit_test(test_parts_of_a_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
