/* Turns on cores: schedules worked out by hand. */
#include "sim/turns.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

/* The next event is at `time`, and the work of these ranks ends then. */
static void assert_end(struct moe_turns *t, moe_ps time, const int *ranks, int n)
{
    assert_int_equal(moe_turns_next(t), time);
    moe_turns_end(t, time);
    assert_int_equal(t->n_ended, n);
    for (int i = 0; i < n; i++) assert_int_equal(t->ended[i], ranks[i]);
}

/* The example of turns.h; then rank 1 alone is not interrupted. */
static void two_ranks_on_one_core(void **state)
{
    struct moe_turns t;
    (void)state;
    moe_turns_init(&t, 2, 2, 1, 4);
    moe_turns_work(&t, 0, 0, 6);
    moe_turns_work(&t, 0, 1, 3);
    assert_end(&t, 4, NULL, 0);
    assert_end(&t, 7, (int[]){1}, 1);
    moe_turns_leave(&t, 7, 1);
    assert_end(&t, 9, (int[]){0}, 1);
    moe_turns_leave(&t, 9, 0);
    assert_int_equal(moe_turns_next(&t), INT64_MAX);
    moe_turns_work(&t, 20, 1, 100);
    assert_end(&t, 120, (int[]){1}, 1);
    moe_turns_free(&t);
}

/* A rank keeps its core between two pieces of work, until its slice is over and another waits; who comes
 * after a slice that is over gets the core at once. */
static void a_turn_is_several_pieces_of_work(void **state)
{
    struct moe_turns t;
    (void)state;
    moe_turns_init(&t, 2, 2, 1, 10);
    moe_turns_work(&t, 0, 0, 4);
    moe_turns_work(&t, 1, 1, 5);
    assert_end(&t, 4, (int[]){0}, 1);
    moe_turns_work(&t, 4, 0, 4);
    assert_end(&t, 8, (int[]){0}, 1);
    moe_turns_work(&t, 11, 0, 4);
    assert_end(&t, 16, (int[]){1}, 1);
    moe_turns_leave(&t, 16, 1);
    assert_end(&t, 20, (int[]){0}, 1);
    moe_turns_work(&t, 20, 0, 30);
    moe_turns_work(&t, 40, 1, 0);
    assert_end(&t, 40, (int[]){1}, 1);
    moe_turns_leave(&t, 40, 1);
    assert_end(&t, 50, (int[]){0}, 1);
    moe_turns_free(&t);
}

/* 3 ranks and 2 cores on node 0, rank 3 alone on node 1. At 5 rank 0 gives way to 2, and then 1 to 0. */
static void nodes_have_cores_of_their_own(void **state)
{
    struct moe_turns t;
    (void)state;
    moe_turns_init(&t, 4, 3, 2, 5);
    for (int rank = 0; rank < 4; rank++) moe_turns_work(&t, 0, rank, 8);
    assert_end(&t, 5, NULL, 0);
    assert_end(&t, 8, (int[]){0, 3}, 2);
    moe_turns_leave(&t, 8, 0);
    assert_end(&t, 11, (int[]){1}, 1);
    assert_end(&t, 13, (int[]){2}, 1);
    moe_turns_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_on_one_core),
        cmocka_unit_test(a_turn_is_several_pieces_of_work),
        cmocka_unit_test(nodes_have_cores_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
