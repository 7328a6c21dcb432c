/* What check says of right schedules and of broken ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check.h"
#include "sim/lower.h"
#include "tests/fixture.h"

static const struct layout {
    int ranks, ep;
    const char *tokens;
} layouts[] = {{1, 1, "5"},
               {2, 2, "7"},
               {4, 4, "6"},
               {4, 2, "6"},
               {4, 1, "3"},
               {8, 4, "9"},
               {4, 4, "[3, 0, 8, 1]"},
               {4, 2, "[0, 0, 0, 0]"}};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

static void print_verdicts(const struct moe_verdicts *v)
{
    for (int i = 0; i < v->n; i++)
        print_message("  C%d rank %d.. %s: %s\n", v->item[i].check_class, v->item[i].ranks[0], v->item[i].op,
                      v->item[i].text);
}

static int errors_of(const struct moe_schedule *s, const struct moe_scenario *sc)
{
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    int n = v.n;
    moe_verdicts_free(&v);
    moe_routing_free(r);
    return n;
}

/* Fails when a verdict is given to a schedule that is right. */
static void test_right_schedules_have_no_verdicts(void **state)
{
    (void)state;
    for (int i = 0; i < N_LAYOUTS; i++) {
        struct moe_scenario *sc = fixture_scenario(layouts[i].ranks, layouts[i].ep, layouts[i].tokens, "");
        struct moe_schedule *s = fixture_schedule(sc), *toy = moe_lower_with(sc, &toy_dispatcher);
        assert_int_equal(errors_of(s, sc), 0);
        assert_int_equal(errors_of(toy, sc), 0);
        moe_schedule_free(s);
        moe_schedule_free(toy);
        moe_scenario_free(sc);
    }
}

/* One fault on rank 2: the verdict has the class, names rank 2 alone and the operation. */
static void expect_fault(const char *fault, int check_class)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    const char *op = fixture_mutate(s, fault, 2);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    if (v.n != 1) print_verdicts(&v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, check_class);
    assert_int_equal(v.item[0].n_ranks, 1);
    assert_int_equal(v.item[0].ranks[0], 2);
    assert_non_null(strstr(v.item[0].op, op));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void test_dropped_collective(void **state)
{
    (void)state;
    expect_fault("drop", 2);
    expect_fault("drop_sum", 2);
}

static void test_other_size(void **state)
{
    (void)state;
    expect_fault("size", 1);
}

static void test_other_group(void **state)
{
    (void)state;
    expect_fault("group", 2);
}

static void test_other_scale(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    fixture_mutate(s, "scale", 2);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 2); /* layers 0 and 1 */
    for (int i = 0; i < v.n; i++) {
        assert_int_equal(v.item[i].check_class, 3);
        assert_int_equal(v.item[i].n_ranks, 1);
        assert_int_equal(v.item[i].ranks[0], 2);
        assert_non_null(strstr(v.item[i].text, "3.42857 times")); /* 24 tokens / 7 */
        assert_non_null(strstr(v.item[i].text, "scale_router divided by 7"));
    }
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Experts summed over all ranks instead of over their replicas; shared parameters over their replicas only:
 * the same on every rank, so nothing hangs. */
static void test_wrong_group_everywhere(void **state)
{
    (void)state;
    const struct {
        const char *op;
        int comm;
    } wrong[] = {{"sum_w1", 0}, {"sum_router", 2}, {"sum_router", 1}, {"sum_embedding", 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        fixture_op(&s->roles[0], MOE_SYNC, wrong[i].op)->comm = wrong[i].comm;
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_true(v.n >= 1);
        for (int j = 0; j < v.n; j++) {
            assert_int_equal(v.item[j].check_class, 4);
            assert_non_null(strstr(v.item[j].op, strchr(wrong[i].op, '_')));
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

static void expect_deletions_noticed(const struct moe_dispatcher *dispatcher, bool one_rank)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, "[6, 3, 5, 4]", "");
    struct moe_schedule *whole = moe_lower_with(sc, dispatcher);
    int tried = 0;
    for (int b = 0; b < whole->roles[0].n_blocks; b++)
        for (int o = 0; o < whole->roles[0].blocks[b].n_ops; o++, tried++) {
            struct moe_schedule *s = moe_lower_with(sc, dispatcher);
            struct moe_role *role = one_rank ? moe_schedule_split_role(s, 1) : &s->roles[0];
            moe_block_delete(&role->blocks[b], role->blocks[b].ops[o].id);
            if (errors_of(s, sc) == 0)
                fail_msg("deleting %s from %s is not noticed", whole->roles[0].blocks[b].ops[o].name,
                         whole->roles[0].blocks[b].name);
            moe_schedule_free(s);
        }
    assert_true(tried > 40);
    moe_schedule_free(whole);
    moe_scenario_free(sc);
}

static const struct moe_dispatcher alltoall = {"alltoall", moe_alltoall};

static void test_every_deletion_is_noticed(void **state)
{
    (void)state;
    expect_deletions_noticed(&alltoall, false);
    expect_deletions_noticed(&alltoall, true);
    expect_deletions_noticed(&toy_dispatcher, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_schedules_have_no_verdicts),
        cmocka_unit_test(test_dropped_collective),
        cmocka_unit_test(test_other_size),
        cmocka_unit_test(test_other_group),
        cmocka_unit_test(test_other_scale),
        cmocka_unit_test(test_wrong_group_everywhere),
        cmocka_unit_test(test_every_deletion_is_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
