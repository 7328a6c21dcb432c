/* The event queue: order by time, then by push. */
#include "sim/heap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static void equal_times_keep_the_order_of_pushes(void **state)
{
    (void)state;
    struct moe_heap h = {0};
    struct moe_event e;
    for (int i = 0; i < 100; i++)
        moe_heap_push(
            &h, (struct moe_event){.time = i % 3, .kind = 7, .a = i, .b = -i, .c = UINT64_MAX - (uint64_t)i});
    for (int t = 0; t < 3; t++)
        for (int i = t; i < 100; i += 3) {
            assert_true(moe_heap_pop(&h, &e));
            assert_true(e.time == t && e.a == i);
            assert_true(e.kind == 7 && e.b == -i && e.c == UINT64_MAX - (uint64_t)i);
        }
    assert_false(moe_heap_pop(&h, &e));
    moe_heap_free(&h);
}

/* Against the slow way: the earliest of a list, the first pushed among equals. */
static void random_pushes_and_pops_match_a_list(void **state)
{
    (void)state;
    enum { STEPS = 20000 };
    struct moe_heap h = {0};
    struct moe_event *list = moe_alloc(STEPS, sizeof *list), e;
    int n = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        if (moe_uniform(1, 0, step) < 0.505) {
            e = (struct moe_event){.time = (moe_ps)(moe_uniform(1, 1, step) * 50) - 25, .a = (int)step};
            moe_heap_push(&h, e);
            list[n++] = e;
            continue;
        }
        int first = 0;
        for (int i = 1; i < n; i++)
            if (list[i].time < list[first].time) first = i;
        assert_int_equal(moe_heap_pop(&h, &e), n > 0);
        if (!n) continue;
        assert_true(e.time == list[first].time && e.a == list[first].a);
        for (int i = first; i + 1 < n; i++) list[i] = list[i + 1];
        n--;
        assert_int_equal(h.n, n);
    }
    assert_true(h.n > 20);
    moe_heap_free(&h);
    assert_int_equal(h.n, 0);
    free(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_times_keep_the_order_of_pushes),
        cmocka_unit_test(random_pushes_and_pops_match_a_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
