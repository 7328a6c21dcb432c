/* The YAML tree with its lines, the table-driven reader, and what both must refuse. */
#include "sim/yaml.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char sample[] = "name: box # comment\n"
                             "count: 8\n"
                             "ratio: 2.5\n"
                             "rate:\n"
                             "  450 GB/s\n"
                             "kind: shared\n"
                             "list: [1, 'two', {three: 3}]\n"
                             "text: >-\n"
                             "  folded\n"
                             "  lines\n";

static struct moe_yaml *parse(const char *text)
{
    struct moe_yaml *root;
    assert_int_equal(moe_yaml_parse("x.yaml", text, strlen(text), &root), MOE_OK);
    return root;
}

static void assert_refused(int err, const char *message)
{
    assert_int_equal(err, MOE_EINPUT);
    if (!strstr(moe_error(), message)) fail_msg("'%s' does not hold '%s'", moe_error(), message);
}

static void refused(const char *text, size_t bytes, const char *message)
{
    struct moe_yaml *root = (void *)1;
    assert_refused(moe_yaml_parse("x.yaml", text, bytes, &root), message);
    assert_null(root);
}

static void tree_keeps_lines(void **state)
{
    (void)state;
    struct moe_yaml *root = parse(sample);
    assert_int_equal(root->kind, MOE_YAML_MAP);
    assert_int_equal(root->n, 7);
    assert_string_equal(root->file, "x.yaml");
    assert_string_equal(root->key[3], "rate");
    assert_int_equal(root->key_line[3], 4);
    assert_int_equal(root->item[3].line, 5);
    assert_string_equal(root->item[3].text, "450 GB/s");
    const struct moe_yaml *list = &root->item[5];
    assert_int_equal(list->kind, MOE_YAML_LIST);
    assert_int_equal(list->n, 3);
    assert_int_equal(list->line, 7);
    assert_string_equal(list->item[1].text, "two");
    assert_string_equal(list->item[2].key[0], "three");
    assert_string_equal(list->item[2].item[0].file, "x.yaml");
    assert_string_equal(root->item[6].text, "folded lines");
    moe_yaml_free(root);
    moe_yaml_free(NULL);
    root = parse("\xef\xbb\xbfname: x\nother: y\n"); /* as some editors write UTF-8 */
    assert_string_equal(root->key[0], "name");
    assert_int_equal(root->key_line[1], 2);
    moe_yaml_free(root);
}

static void tree_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "x.yaml:1: an empty document"},
        {"# only\n# comments\n", "an empty document"},
        {"---\n", "an empty document"},
        {"a: 1\n---\nb: 2\n", "x.yaml:2: a second document"},
        {"a: 1\nb: 2\na: 3\n", "x.yaml:3: key 'a' is already in line 1"},
        {"a:\n  - &x 1\n", "x.yaml:2: anchors"},
        {"a: &x {b: 1}\n", "x.yaml:1: anchors"},
        {"a: &x [1]\nb: *x\n", "x.yaml:1: anchors"},
        {"a: 1\nb: *x\n", "x.yaml:2: anchors"},
        {"&x a: 1\n", "x.yaml:1: anchors"},
        {"*x : 1\n", "x.yaml:1: anchors"},
        {"a: !!int 1\n", "x.yaml:1: tags"},
        {"!t a: 1\n", "x.yaml:1: tags"},
        {"%TAG !a! x\n---\na: 1\n", "x.yaml: %TAG"},
        {"a: !t [1]\n", "x.yaml:1: tags"},
        {"a: 1\n[b]: 2\n", "x.yaml:2: a key that is no"},
        {"a: 1\n? {b: c}\n: 2\n", "x.yaml:2: a key that is no"},
        {"a: 1\nb: \"\\0\"\n", "x.yaml:2: a zero byte"},
        {"a: 1\n\"b\\0\": 2\n", "x.yaml:2: a zero byte"},
        {"a: 'open\nb: 2\n", "x.yaml:3: found unexpected end of stream"},
        {"a: [1, 2\n", "x.yaml:2: did not find expected"},
        {"a: 1\n b: 2\n", "x.yaml:2: mapping values are not allowed"},
        {"a: 1\n\tb: 2\n", "x.yaml:2:"},
        {"a: 1\nb: \x01\n", "x.yaml:2: control characters"},
        {"a: 1\nb: 2\nc: \xff\xfe\n", "x.yaml:3: invalid leading UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(cases[i].text, strlen(cases[i].text), cases[i].message);
    refused("a: 1\nb: \0\n", 10, "x.yaml:2: control characters");
}

/* Text `head`, then `part` as often as it fits, in `bytes` bytes. */
static char *repeated(const char *head, const char *part, size_t bytes)
{
    char *text = moe_alloc(bytes + 1, 1);
    size_t n = strlen(part), at = strlen(head);
    memcpy(text, head, at);
    for (; at + n <= bytes; at += n) memcpy(text + at, part, n);
    memset(text + at, ' ', bytes - at);
    return text;
}

/* Each would take gigabytes, minutes, or the stack without its bound. */
static void bombs_are_bounded(void **state)
{
    (void)state;
    static const struct {
        const char *head, *part, *message;
        size_t bytes;
    } cases[] = {
        {"", "[", "over 32 levels", 4000000},           {"", "{a: ", "over 32 levels", 4000000},
        {"", "- ", "over 32 levels", 4000000},          {"", "? ", "a key that is no", 4000000},
        {"[", "1,", "over 1,000,000 values", 15000000}, {"", "a: 1\n", "is already in line", 4000000},
        {"", "#", "an empty document", 15000000},       {"a: ", "x", "over 16 MB", 16000001},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = repeated(cases[i].head, cases[i].part, cases[i].bytes);
        refused(text, cases[i].bytes, cases[i].message);
        free(text);
    }
    char keys[16 * 1001] = "";
    for (int i = 0, at = 0; i <= 1000; i++)
        at += snprintf(keys + at, sizeof keys - (size_t)at, "k%d: 1\n", i);
    refused(keys, strlen(keys), "x.yaml:1001: over 1,000 keys");
}

struct values {
    int64_t count;
    double ratio, rate, latency, absent;
    char name[MOE_NAME];
    int kind;
    const struct moe_yaml *list;
};

static const char *const kinds[] = {"switch", "shared", NULL};
static const struct moe_key keys[] = {
    {"name", MOE_KEY_TEXT, offsetof(struct values, name), .required = true},
    {"count", MOE_KEY_INT, offsetof(struct values, count), .min = -5, .max = 1e19},
    {"ratio", MOE_KEY_REAL, offsetof(struct values, ratio), .min = 0, .max = 10},
    {"rate", MOE_KEY_QUANTITY, offsetof(struct values, rate), .unit = MOE_UNIT_BPS},
    {"latency", MOE_KEY_QUANTITY, offsetof(struct values, latency), .min = -1, .unit = MOE_UNIT_SECONDS},
    {"kind", MOE_KEY_CHOICE, offsetof(struct values, kind), .choices = kinds},
    {"list", MOE_KEY_NODE, offsetof(struct values, list)},
    {"text", MOE_KEY_TEXT, offsetof(struct values, name)},
    {"absent", MOE_KEY_REAL, offsetof(struct values, absent), .max = 1},
};
enum { N_KEYS = sizeof keys / sizeof *keys };

static void reader_fills_the_struct(void **state)
{
    (void)state;
    struct values v = {.absent = 0.25, .latency = 7};
    struct moe_yaml *root = parse(sample);
    assert_int_equal(moe_yaml_read(root, keys, N_KEYS, &v), MOE_OK);
    assert_int_equal(v.count, 8);
    assert_true(v.ratio == 2.5 && v.rate == 450e9 && v.absent == 0.25 && v.latency == 7);
    assert_int_equal(v.kind, 1);
    assert_string_equal(v.name, "folded lines");
    assert_ptr_equal(v.list, &root->item[5]);
    moe_yaml_free(root);

    root = parse("{name: x, count: -5, latency: 0 us, ratio: 1e1}");
    assert_int_equal(moe_yaml_read(root, keys, N_KEYS, &v), MOE_OK);
    assert_true(v.count == -5 && v.latency == 0 && v.ratio == 10);
    moe_yaml_free(root);
}

static void reader_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"[1]", "x.yaml:1: expected a mapping"},
        {"count: 1", "x.yaml:1: key 'name' is missing"},
        {"name: x\nconut: 1", "x.yaml:2: unknown key 'conut' (did you mean 'count'?)"},
        {"name: x\nzzzzzzzz: 1", "x.yaml:2: unknown key 'zzzzzzzz'"},
        {"name: x\ncount: 0x10", "x.yaml:2: count: expected an integer"},
        {"name: x\ncount: 12abc", "count: expected an integer"},
        {"name: x\ncount: 1e3", "count: expected an integer"},
        {"name: x\ncount: 1.0", "count: expected an integer"},
        {"name: x\ncount: ' 1'", "count: expected an integer"},
        {"name: x\ncount: '1 '", "count: expected an integer"},
        {"name: x\ncount:", "count: expected an integer"},
        {"name: x\ncount: 99999999999999999999", "count: expected an integer"},
        {"name: x\ncount: -6", "count: expected an integer from -5"},
        {"name: x\ncount: [1]", "count: expected one value"},
        {"name: x\nratio: 10.5", "ratio: expected a number from 0 to 10, not '10.5'"},
        {"name: x\nratio: -1", "ratio: expected a number"},
        {"name: x\nratio: nan", "ratio: expected a number"},
        {"name: x\nratio: inf", "ratio: expected a number"},
        {"name: x\nratio: 0x1p1", "ratio: expected a number"},
        {"name: x\nratio: 1 GB", "ratio: expected a number"},
        {"name: x\nratio: ''", "ratio: expected a number"},
        {"name: x\n\nrate:\n  50", "x.yaml:3: rate: no unit in '50' (write 50 GB/s)"},
        {"name: x\nrate: 50 us", "rate: unknown unit 'us'"},
        {"name: x\nrate: 0 GB/s", "rate: expected more than 0"},
        {"name: x\nrate: -1 GB/s", "rate: '-1 GB/s' is negative"},
        {"name: x\nrate: 0x10 GB/s", "rate: '0x10 GB/s' is not a quantity"},
        {"name: x\nrate: {a: 1}", "rate: expected one value"},
        {"name: ''", "name: expected a text"},
        {"name: 0123456789012345678901234567890123456789abcdefgh", "name: '01234"},
        {"name: x\nkind: swich",
         "kind: expected one of switch, shared, not 'swich' (did you mean 'switch'?)"},
        {"name: x\nkind: 7", "kind: expected one of switch, shared, not '7'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct values v = {0};
        struct moe_yaml *root = parse(cases[i].text);
        assert_refused(moe_yaml_read(root, keys, N_KEYS, &v), cases[i].message);
        moe_yaml_free(root);
    }
}

/* The sample cut at every length, and with bytes changed at random: read, or refused in one named line. */
static void broken_input_is_read_or_refused(void **state)
{
    (void)state;
    static const char bytes[] = "\0\n\t :-?[]{},&*!|>'\"%@`#x0\x80\xff";
    int n_read = 0, n_refused = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        char text[sizeof sample];
        size_t length = i < sizeof sample ? i : sizeof sample - 1;
        memcpy(text, sample, sizeof sample);
        for (uint64_t change = 0; i >= sizeof sample && change < 1 + i % 4; change++) {
            size_t at = (size_t)(moe_uniform(1, i, 2 * change) * (double)length);
            text[at] = bytes[(size_t)(moe_uniform(1, i, 2 * change + 1) * (double)sizeof bytes)];
        }
        struct values v = {0};
        struct moe_yaml *root;
        int err = moe_yaml_parse("x.yaml", text, length, &root);
        if (err == MOE_OK) err = moe_yaml_read(root, keys, N_KEYS, &v);
        if (err != MOE_OK) assert_refused(err, "x.yaml:");
        *(err == MOE_OK ? &n_read : &n_refused) += 1;
        moe_yaml_free(root);
    }
    assert_true(n_read > 1000 && n_refused > 1000);
}

static void files_that_cannot_be_read(void **state)
{
    (void)state;
    struct moe_yaml *root = (void *)1;
    assert_refused(moe_yaml_load("no_such_file.yaml", &root), "no_such_file.yaml: cannot be read: No such");
    assert_null(root);
    assert_refused(moe_yaml_load(".", &root), ".: cannot be read: Is a directory");
    assert_refused(moe_yaml_load("/dev/zero", &root), "/dev/zero: over 16 MB");
    assert_null(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tree_keeps_lines),
        cmocka_unit_test(tree_refuses),
        cmocka_unit_test(bombs_are_bounded),
        cmocka_unit_test(reader_fills_the_struct),
        cmocka_unit_test(reader_refuses),
        cmocka_unit_test(broken_input_is_read_or_refused),
        cmocka_unit_test(files_that_cannot_be_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
