/* test_data - batches of a text. */
#include "runtime/data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* Loads n bytes, byte i being i % 251: a byte names its place, up to multiples of 251. */
static int load(int n, int64_t window, struct moe_data *out)
{
    char path[] = "test_data.XXXXXX";
    int fd = mkstemp(path);
    FILE *file = fdopen(fd, "wb");
    assert_non_null(file);
    for (int i = 0; i < n; i++) fputc(i % 251, file);
    fclose(file);
    int err = moe_data_load(path, window, out);
    unlink(path);
    return err;
}

enum { T = 200, BYTES = 70000 };

/* Windows of successors, a target that is the next token; another step, another batch. */
static void test_batch(void **state)
{
    (void)state;
    struct moe_data data;
    int32_t token[T], target[T], other[T], ignored[T];
    assert_int_equal(load(BYTES, 48, &data), MOE_OK);
    assert_int_equal(data.n, BYTES);
    moe_data_batch(&data, 1, 5, 0, T, token, target);
    for (int i = 0; i < T; i++) {
        assert_int_equal(target[i], (token[i] + 1) % 251);
        if (i % 48) assert_int_equal(token[i], target[i - 1]);
    }
    assert_int_not_equal(token[48], target[47]);
    moe_data_batch(&data, 1, 6, 0, T, other, ignored);
    assert_memory_not_equal(token, other, sizeof token);
    moe_data_batch(&data, 2, 5, 0, T, other, ignored);
    assert_memory_not_equal(token, other, sizeof token);
    moe_data_free(&data);
}

/* Two ranks with 70 and 130 tokens see what one rank with 200 sees. */
static void test_batch_does_not_depend_on_ranks(void **state)
{
    (void)state;
    struct moe_data data;
    int32_t whole[T], parts[T], whole_target[T], parts_target[T];
    assert_int_equal(load(BYTES, 48, &data), MOE_OK);
    moe_data_batch(&data, 1, 0, 0, T, whole, whole_target);
    moe_data_batch(&data, 1, 0, 0, 70, parts, parts_target);
    moe_data_batch(&data, 1, 0, 70, 130, parts + 70, parts_target + 70);
    assert_memory_equal(whole, parts, sizeof whole);
    assert_memory_equal(whole_target, parts_target, sizeof whole);
    moe_data_free(&data);
}

/* The shortest text has one window; the sanitizer sees a read behind it. FNV-1a of "" is the offset basis,
 * and the hash of bytes 0 to 64 follows from its definition. */
static void test_shortest(void **state)
{
    (void)state;
    struct moe_data data;
    int32_t token[T], target[T];
    assert_int_equal(load(64, 64, &data), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "64 bytes, expected at least 65"));
    moe_data_free(&data);
    assert_int_equal(load(65, 64, &data), MOE_OK);
    moe_data_batch(&data, 1, 0, 0, T, token, target);
    assert_int_equal(token[0], 0);
    assert_int_equal(target[63], 64);
    uint64_t hash = 0xcbf29ce484222325u;
    for (unsigned i = 0; i < 65; i++) hash = (hash ^ i) * 0x100000001b3u;
    assert_true(data.hash == hash);
    moe_data_free(&data);
    assert_int_equal(moe_data_load("no such file", 64, &data), MOE_EINPUT);
    moe_data_free(&data);
}

/* A window may start at every byte that leaves room for it and a target: of 67 bytes, at the first three. */
static void test_every_start(void **state)
{
    (void)state;
    struct moe_data data;
    int32_t token, target;
    int starts[3] = {0};
    assert_int_equal(load(67, 64, &data), MOE_OK);
    for (int step = 0; step < 100; step++) {
        moe_data_batch(&data, 1, step, 0, 1, &token, &target);
        assert_in_range(token, 0, 2);
        starts[token]++;
    }
    assert_true(starts[0] && starts[1] && starts[2]);
    moe_data_free(&data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch),
        cmocka_unit_test(test_batch_does_not_depend_on_ranks),
        cmocka_unit_test(test_shortest),
        cmocka_unit_test(test_every_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
