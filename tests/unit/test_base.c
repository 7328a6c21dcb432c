/* test_base - messages, names, numbers and times that everything else stands on. */
#include "sim/base.h"

#include <math.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* A name with a line break or an escape sequence stays on its line and leaves the terminal alone. */
static void test_message_is_one_line(void **state)
{
    (void)state;
    assert_int_equal(moe_fail(MOE_EINPUT, "%s: no file", "a\nb\033[2J\177\303\244"), MOE_EINPUT);
    assert_string_equal(moe_error(), "a?b?[2J?\303\244: no file");
}

/* Closer than half the length of the word: 1 of 3 or 4 letters, 2 of 5; or the only one that begins so. */
static void test_nearest(void **state)
{
    (void)state;
    static const struct {
        const char *word, *nearest;
    } cases[] = {{"hiden", "hidden"}, {"hdde", NULL},  {"hddenx", "hidden"}, {"abc", NULL}, {"npx", "npy"},
                 {"nyp", NULL},       {"h", "hidden"}, {"x", NULL},          {"", NULL}};
    static const char *const names[] = {"hidden", "npy", "q"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *nearest = moe_nearest(cases[i].word, names, 3);
        assert_int_equal(!nearest, !cases[i].nearest);
        if (nearest) assert_string_equal(nearest, cases[i].nearest);
    }
}

static void test_time(void **state)
{
    (void)state;
    assert_int_equal(moe_time(1, 2), 500000000000);
    assert_int_equal(moe_time(1e6, 1), 1000000000000000000);
    moe_ps before = 0;
    for (double amount = 1e6; amount < 1e8; amount *= 1.1) {
        assert_true(moe_time(amount, 1) >= before);
        before = moe_time(amount, 1);
    }
    assert_int_equal(before, INT64_MAX / 2);
    assert_int_equal(moe_time(INFINITY, 1), INT64_MAX / 2);
}

static void test_decimal(void **state)
{
    (void)state;
    static const char *const refused[] = {"0x10 GB/s", " -0X1p3 GB/s", "\t0x1 GB/s", "GB/s"};
    double value;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        assert_int_equal(moe_parse_quantity(refused[i], MOE_UNIT_BPS, &value), MOE_EINPUT);
        assert_non_null(strstr(moe_error(), "is not a quantity"));
    }
    assert_int_equal(moe_parse_quantity("0.5e2 GB/s", MOE_UNIT_BPS, &value), MOE_OK);
    assert_true(value == 5e10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_message_is_one_line),
        cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_time),
        cmocka_unit_test(test_decimal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
