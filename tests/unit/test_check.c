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

/* What a scenario may add; each must be right in every layout. */
static const char *const variants[] = {
    "",
    "dispatcher: allgather",
    "capacity: {rule: megatron, factor: 1.0}",
    "capacity: {rule: megatron, factor: 1.25, drop: position}\ndispatcher: allgather",
    "optimizer: sgd\nclip_norm: 0\naux_loss: 0",
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

/* Fails when a verdict is given to a schedule that is right. */
static void test_right_schedules_have_no_verdicts(void **state)
{
    (void)state;
    for (int i = 0; i < N_LAYOUTS; i++)
        for (int k = 0; k < N_VARIANTS; k++) {
            struct moe_scenario *sc =
                fixture_scenario(layouts[i].ranks, layouts[i].ep, layouts[i].tokens, variants[k]);
            struct moe_schedule *s = fixture_schedule(sc), *toy = fixture_lower(sc, &toy_dispatcher);
            assert_int_equal(errors_of(s, sc), 0);
            assert_int_equal(errors_of(toy, sc), 0);
            moe_schedule_free(s);
            moe_schedule_free(toy);
            moe_scenario_free(sc);
        }
}

/* Padded buffers have the size that each rank computes from its own tokens, and nobody agrees on it: equal
 * tokens are fine; 6 and 3 tokens give capacities ceil(12 / 8) = 2 and ceil(6 / 8) = 1 (founding_cases.md
 * A.0b 4). */
static void test_padded_capacity_needs_equal_tokens(void **state)
{
    (void)state;
    const char *padded = "capacity: {rule: megatron, factor: 1.0, pad: true}";
    for (int unequal = 0; unequal < 2; unequal++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, unequal ? "[6, 6, 6, 3]" : "6", padded);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_int_equal(v.n, unequal);
        if (unequal) {
            assert_int_equal(v.item[0].check_class, 1);
            /* 4 experts a rank x 2 or 1 rows x hidden 8 */
            assert_non_null(
                strstr(v.item[0].text, "rank 2 sends 64 float32 (alltoall) to rank 3, which expects 32"));
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
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

/* The clipping of an expert-parallel run: the experts' part of the norm summed over other ranks than those
 * that split the experts, one parameter not in the norm, one rank that does not clip. */
static void test_norms(void **state)
{
    (void)state;
    for (int fault = 0; fault < 3; fault++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_role *role = fault == 2 ? moe_schedule_split_role(s, 1) : &s->roles[0];
        struct moe_op *op = fixture_op(role, MOE_CLIPPING,
                                       fault == 0   ? "sum_expert_norm"
                                       : fault == 1 ? "norm_router"
                                                    : "clip_w1");
        if (fault == 0)
            op->comm = 2; /* edp */
        else
            moe_block_delete(fixture_block(role, op), op->id);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_true(v.n >= 1);
        for (int i = 0; i < v.n; i++) assert_int_equal(v.item[i].check_class, 5);
        if (fault > 0) assert_int_equal(v.item[0].n_ranks, fault == 1 ? 4 : 1);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

static void expect_deletions_noticed(const struct moe_dispatcher *dispatcher, const char *more, bool one_rank)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, "[6, 3, 5, 4]", more);
    struct moe_schedule *whole = fixture_lower(sc, dispatcher);
    int tried = 0;
    for (int b = 0; b < whole->roles[0].n_blocks; b++)
        for (int o = 0; o < whole->roles[0].blocks[b].n_ops; o++, tried++) {
            struct moe_schedule *s = fixture_lower(sc, dispatcher);
            struct moe_role *role = one_rank ? moe_schedule_split_role(s, 1) : &s->roles[0];
            moe_block_delete(&role->blocks[b], role->blocks[b].ops[o].id);
            if (errors_of(s, sc) == 0)
                fail_msg("deleting %s from %s is not noticed", whole->roles[0].blocks[b].ops[o].name,
                         whole->roles[0].blocks[b].name);
            moe_schedule_free(s);
        }
    assert_true(tried > 80);
    moe_schedule_free(whole);
    moe_scenario_free(sc);
}

static void test_every_deletion_is_noticed(void **state)
{
    (void)state;
    static const struct moe_dispatcher alltoall = {"alltoall", moe_alltoall, true},
                                       allgather = {"allgather", moe_allgather, false};
    expect_deletions_noticed(&alltoall, "", false);
    expect_deletions_noticed(&alltoall, "", true);
    expect_deletions_noticed(&alltoall, variants[2], false);
    expect_deletions_noticed(&allgather, "", false);
    expect_deletions_noticed(&toy_dispatcher, "", false);
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
        cmocka_unit_test(test_padded_capacity_needs_equal_tokens),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_every_deletion_is_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
