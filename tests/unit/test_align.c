/* moe_ref_align: rows of experts padded to multiples. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/ref.h"

/* Four tokens of two choices, three experts, multiples of 4. Rows in order of expert, then token:
 *   expert 0: tokens 0, 1, 2 -> rows 0, 1, 2, and 3 is padding;
 *   expert 1: none -> no row;
 *   expert 2: tokens 0, 1, 2, 3 and, once more, a choice that is dropped -> packed 3..6, aligned 4..7. */
static void test_solved_by_hand(void **state)
{
    (void)state;
    const int32_t expert[8] = {0, 2, 2, 0, 0, 2, 2, 2}, slot[8] = {0, 3, 4, 1, 2, 5, -1, 6};
    const int64_t counts[3] = {3, 0, 4};
    const int32_t want[8] = {0, 4, 5, 1, 2, 6, -1, 7};
    const int64_t want_aligned[3] = {4, 0, 4};
    int32_t got[8];
    int64_t aligned[3];
    moe_ref_align_f32(4, 3, 2, 4, expert, slot, counts, got, aligned);
    assert_memory_equal(got, want, sizeof want);
    assert_memory_equal(aligned, want_aligned, sizeof want_aligned);
    moe_ref_align_f64(4, 3, 2, 1, expert, slot, counts, got, aligned); /* of 1: nothing moves */
    assert_memory_equal(got, slot, sizeof slot);
    assert_memory_equal(aligned, counts, sizeof counts);
}

/* What permute makes of it: every expert's rows begin at a multiple, and what pads them is 0. */
static void test_permuted(void **state)
{
    (void)state;
    enum { T = 5, E = 4, A = 3, n = 9 };
    const float x[T] = {1, 2, 3, 4, 5};
    const int32_t expert[T] = {3, 1, 3, 3, 3}, slot[T] = {1, 0, 2, 3, 4};
    const int64_t counts[E] = {0, 1, 0, 4};
    const float want[n] = {2, 0, 0, 1, 3, 4, 5, 0, 0};
    int32_t aligned_slot[T];
    int64_t aligned[E];
    float rows[n];
    moe_ref_align_f32(T, E, 1, A, expert, slot, counts, aligned_slot, aligned);
    assert_int_equal(aligned[0] + aligned[1] + aligned[2] + aligned[3], n);
    moe_ref_permute_f32(T, 1, 1, n, x, aligned_slot, rows);
    assert_memory_equal(rows, want, sizeof want);
}

static void test_nothing(void **state)
{
    (void)state;
    const int64_t counts[2] = {0, 0};
    int64_t aligned[2] = {7, 7};
    moe_ref_align_f32(0, 2, 2, 8, NULL, NULL, counts, NULL, aligned);
    assert_memory_equal(aligned, counts, sizeof counts);
    moe_ref_align_f32(0, 0, 2, 8, NULL, NULL, NULL, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_solved_by_hand),
        cmocka_unit_test(test_permuted),
        cmocka_unit_test(test_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
