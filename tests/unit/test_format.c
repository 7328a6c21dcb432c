/* Routing in the formats of others: round trips to the same bytes, in both directions; wrong files are
 * refused and leave nothing behind. */
#include "tests/unit/store_run.h"
#include "traces/format.h"

static const char *const example[] = {"router_trace_rank0.jsonl", "routed_experts_5x3x2.npy"};
static char data[1024]; /* the folder of foreign files */

static void import_file(const struct moe_format *format, const char *file, const char *trace)
{
    if (moe_format_import(format, &file, 1, trace) < 0) fail_msg("%s", moe_error());
}

static void export_trace(const struct moe_format *format, const char *trace, const char *path, int files)
{
    int n;
    int64_t n_routings;
    if (moe_format_export(format, trace, -1, path, &n, &n_routings) < 0) fail_msg("%s", moe_error());
    assert_int_equal(n, files);
}

static void assert_same(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *text_a = read_all(a, &n_a), *text_b = read_all(b, &n_b);
    assert_int_equal(n_a, n_b);
    assert_memory_equal(text_a, text_b, n_a);
    free(text_a);
    free(text_b);
}

/* ---- files of others ---- */

static void test_examples(void **state)
{
    (void)state;
    const struct moe_format *const format[] = {&moe_format_megatron, &moe_format_npy};
    for (int i = 0; i < 2; i++) {
        char path[1200], copy[64];
        snprintf(path, sizeof path, "%s/%s", data, example[i]);
        snprintf(copy, sizeof copy, "copy%s", format[i]->suffix);
        import_file(format[i], path, "run.db");
        export_trace(format[i], "run.db", copy, 1);
        assert_same(path, copy);
    }
    assert_int_equal(n_files(), 3);
    assert_int_equal(ask("run.db", "SELECT hex(ids) = '06000F000E00070007000C00030002000D000800'"
                                   " FROM routing WHERE layer = 0"),
                     1); /* tokens 0 to 4 of the first of 3 layers */
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    struct moe_store_info info = info_of(s);
    moe_store_close(s);
    assert_int_equal(info.n_ranks, 1);
    assert_int_equal(info.n_layers, 3);
    assert_int_equal(info.n_experts, 16);
    assert_int_equal(info.top_k, 2);
    assert_int_equal(info.steps_complete, 1);
    assert_true(isnan(info.last_loss));
}

/* Two micro-batches of layers 2, 5 and one of an MTP head; then without a block, with other spaces. */
static const char trace[] =
    "{\"step\": 7, \"stage\": \"pre_dispatch\", \"block\": \"mtp\", \"layer\": 999999999, \"rank\": 1,"
    " \"num_tokens\": 1, \"topk\": 1, \"mtp_idx\": 0, \"top_indices\": [[9]]}\n"
    "{\"step\": 7, \"block\": \"decoder\", \"layer\": 5, \"rank\": 1, \"num_tokens\": 2, \"topk\": 1,"
    " \"hs_offset\": 0, \"top_indices\": [[1], [2]]}\n"
    "{\"step\":7,\"layer\":2,\"rank\":1,\"num_tokens\":0,\"topk\":1,\"top_indices\":[]}\n"
    "{\"step\":7,\"layer\":5,\"rank\":1,\"num_tokens\":1,\"topk\":1,\"top_indices\":[[3]]}\n";
#define HEAD "{\"step\": 7, \"stage\": \"pre_dispatch\", \"block\": "
static const char normalised[] =
    HEAD "\"decoder\", \"layer\": 2, \"rank\": 1, \"num_tokens\": 0, \"topk\": 1, \"top_indices\": []}\n" HEAD
         "\"decoder\", \"layer\": 5, \"rank\": 1, \"num_tokens\": 3, \"topk\": 1,"
         " \"top_indices\": [[1], [2], [3]]}\n" HEAD
         "\"mtp\", \"layer\": 999999999, \"rank\": 1, \"num_tokens\": 1, \"topk\": 1, \"mtp_idx\": 0,"
         " \"top_indices\": [[9]]}\n";

static void test_megatron_normalised(void **state)
{
    (void)state;
    write_all("a.jsonl", trace, sizeof trace - 1);
    import_file(&moe_format_megatron, "a.jsonl", "run.db");
    assert_int_equal(
        ask("run.db", "SELECT value = '2 5 mtp0.999999999' FROM run WHERE key = 'megatron_layers'"), 1);
    export_trace(&moe_format_megatron, "run.db", "b.jsonl", 1);
    write_all("c.jsonl", normalised, sizeof normalised - 1);
    assert_same("b.jsonl", "c.jsonl");
}

/* ---- traces of ours ---- */

/* A large and a small id: npy says unsigned then. Ranks of one, four and no tokens; steps 3 and 10. */
static void write_trace(const char *path)
{
    const int32_t ids[] = {0, 65535, 1, 2, 3, 300, 256, 255};
    struct moe_store *s = open_store(path, MOE_STORE_CREATE);
    assert_int_equal(moe_store_put(s, "layers", "2"), MOE_OK);
    for (int i = 0; i < 12; i++)
        assert_int_equal(
            moe_store_add_routing(s, i / 6 ? 10 : 3, i % 2, i / 2 % 3, (int[]){1, 4, 0}[i / 2 % 3], 2, ids),
            MOE_OK);
    assert_int_equal(moe_store_add_routed(s), MOE_OK);
    assert_int_equal(moe_store_add_routing(s, 11, 0, 0, 1, 2, ids), MOE_OK); /* of a step that not all did */
    moe_store_close(s);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void round_trip(const struct moe_format *format, int n)
{
    char *files[16];
    write_trace("run.db");
    export_trace(format, "run.db", "out", n);
    DIR *d = opendir("out");
    int found = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        assert_true(found < n && asprintf(&files[found++], "out/%s", e->d_name) > 0);
    }
    closedir(d);
    assert_int_equal(found, n);
    qsort(files, (size_t)n, sizeof *files, by_name);
    if (moe_format_import(format, (const char *const *)files, n, "back.db") < 0) fail_msg("%s", moe_error());
    sql("back.db",
        "ATTACH 'run.db' AS run; CREATE TEMP TABLE differing(n CHECK(n = 0));"
        "DELETE FROM run.routing WHERE step = 11;"
        "INSERT INTO differing SELECT COUNT(*) FROM (SELECT step, layer, rank, n_tokens, top_k, ids"
        " FROM run.routing EXCEPT SELECT step, layer, rank, n_tokens, top_k, ids FROM main.routing);"
        "INSERT INTO differing SELECT (SELECT COUNT(*) FROM run.routing) - COUNT(*)"
        " FROM main.routing;"
        "INSERT INTO differing SELECT COUNT(*) - 12 FROM main.routing");
    for (int i = 0; i < n; i++) {
        unlink(files[i]);
        free(files[i]);
    }
}

static void test_round_trip(void **state)
{
    (void)state;
    round_trip(&moe_format_megatron, 3);
    round_trip(&moe_format_npy, 6);
}

static void test_export_one_step(void **state)
{
    (void)state;
    int n_written;
    int64_t n_routings;
    write_trace("run.db");
    assert_int_equal(moe_format_export(&moe_format_npy, "run.db", 10, "out", &n_written, &n_routings),
                     MOE_OK);
    assert_int_equal(n_written, 3);
    assert_int_equal(n_routings, 6);
    size_t n;
    char *bytes = read_all("out/routed_experts_step10_rank1.npy", &n);
    assert_int_equal(n, 128 + 4 * 2 * 2 * 2);
    assert_non_null(strstr(bytes + 10, "'<u2', 'fortran_order': False, 'shape': (4, 2, 2), }  "));
    assert_memory_equal(bytes + 126, " \n\0\0\377\377\0\0\377\377\1\0\2\0", 14);
    free(bytes);
    for (int rank = 0; rank < 3; rank++) {
        char path[64];
        snprintf(path, sizeof path, "out/routed_experts_step10_rank%d.npy", rank);
        assert_int_equal(unlink(path), 0);
    }
}

static void export_refused(const struct moe_format *format, int64_t step, const char *path, int code,
                           const char *text)
{
    int n_written, files = n_files();
    int64_t n_routings;
    assert_int_equal(moe_format_export(format, "run.db", step, path, &n_written, &n_routings), code);
    if (!strstr(moe_error(), text)) fail_msg("'%s' does not say '%s'", moe_error(), text);
    assert_int_equal(n_files(), files);
}

static void test_export_refuses(void **state)
{
    (void)state;
    write_trace("run.db");
    export_refused(&moe_format_npy, 4, "out", MOE_EINPUT, "run.db: no complete step 4 with routing");
    export_refused(&moe_format_npy, 11, "out", MOE_EINPUT, "run.db: no complete step 11 with routing");
    export_refused(&moe_format_npy, -1, "a.npy", MOE_EUSAGE, "a.npy: one file is not enough");
    export_refused(&moe_format_npy, -1, "absent/out", MOE_EFAILED, "No such file");
    sql("run.db", "UPDATE routing SET n_tokens = 5 WHERE rank = 2 AND step = 10");
    export_refused(&moe_format_megatron, -1, "out", MOE_EINPUT, "expected 5 x 2 ids");
    sql("run.db", "UPDATE routing SET n_tokens = 1, ids = x'00000000' WHERE rank = 2 AND layer = 1");
    export_refused(&moe_format_npy, -1, "out", MOE_EINPUT, "layers of 0 and 1 tokens");
    sql("run.db", "UPDATE routing SET layer = 'x' WHERE rank = 0 AND layer = 0");
    export_refused(&moe_format_npy, -1, "out", MOE_EINPUT, "no routing for layer 0, rank 0");
    /* A folder has the name of the second file: the first does not stay either. */
    write_trace("run.db");
    assert_int_equal(mkdir("out", 0700) | mkdir("out/router_trace_rank1.jsonl", 0700), 0);
    export_refused(&moe_format_megatron, -1, "out", MOE_EFAILED, "out/router_trace_rank1.jsonl: Is a dir");
    assert_int_equal(rmdir("out/router_trace_rank1.jsonl") | rmdir("out"), 0);
}

#define LINE(step, layer)                                                                                    \
    "{\"step\": " step ", \"layer\": " layer                                                                 \
    ", \"rank\": 0, \"num_tokens\": 1, \"topk\": 1, \"top_indices\": [[1]]}\n"

/* An array numbers its layers from 0, whatever they were. */
static void test_npy_layers(void **state)
{
    (void)state;
    static const char lines[] = LINE("0", "2") LINE("0", "5") LINE("0", "7") LINE("1", "2") LINE("1", "5");
    write_all("a.jsonl", lines, sizeof lines - 1);
    import_file(&moe_format_megatron, "a.jsonl", "run.db");
    export_refused(&moe_format_npy, -1, "out", MOE_EINPUT,
                   "step1_rank0.npy: has 2 layers up to layer 1, expected each of the run's 3");
    sql("run.db", "DELETE FROM routing WHERE layer = 1; UPDATE run SET value = 2 WHERE key = 'layers'");
    export_refused(&moe_format_npy, -1, "out", MOE_EINPUT, "step0_rank0.npy: has 2 layers up to layer 2");
}

/* ---- wrong files ---- */

static void refused(const struct moe_format *format, const char *bytes, size_t n, const char *text)
{
    const char *const file = "wrong";
    write_all(file, bytes, n);
    assert_int_equal(moe_format_import(format, &file, 1, "run.db"), MOE_EINPUT);
    if (strncmp(moe_error(), "wrong:", 6) != 0 || !strstr(moe_error(), text))
        fail_msg("'%s' does not say '%s'", moe_error(), text);
    assert_int_equal(n_files(), 1);
}

static void test_wrong_megatron(void **state)
{
    (void)state;
    static const struct {
        const char *layer, *rest, *text; /* of a second line */
    } wrong[] = {
        {"4", "\"topk\": 2, \"top_indices\": [[1, 2]", "wrong:2: not JSON: "},
        {"4", "\"topk\": 2}", "wrong:2: Object item not found: top_indices"},
        {"\"4\"", "\"topk\": 1, \"top_indices\": [[1]]}", "wrong:2: Expected integer, got string"},
        {"4", "\"topk\": 2, \"top_indices\": [[1]]}", "wrong:2: token 0: 1 of topk 2 experts"},
        {"4", "\"topk\": 2, \"top_indices\": [[1, 2], [1, 2]]}", "2: top_indices has 2 rows, expected"},
        {"4", "\"topk\": 2, \"top_indices\": [[1, -1]]}", "2: token 0: expected experts from 0 to 65535"},
        {"4", "\"topk\": 2, \"top_indices\": [[1, 65536]]}", "2: token 0: expected experts"},
        {"4", "\"topk\": 2, \"top_indices\": [[1, \"2\"]]}", "2: token 0: expected experts"},
        {"4", "\"topk\": 2, \"top_indices\": [7]}", "2: token 0: 0 of topk 2 experts"},
        {"4", "\"topk\": 2, \"top_indices\": {}}", "2: top_indices has 0 rows"},
        {"4", "\"topk\": 0, \"top_indices\": [[]]}", "2: a step, layer, rank, num_tokens or topk"},
        {"4294967296", "\"topk\": 1, \"top_indices\": [[1]]}", "2: a step, layer, rank"},
        {"1000000000", "\"topk\": 1, \"top_indices\": [[1]]}", "2: a step, layer, rank"},
        {"4", "\"block\": \"mtp\", \"topk\": 2, \"top_indices\": [[1, 2]]}", "expected mtp_idx"},
        {"4", "\"block\": \"encoder\", \"topk\": 1, \"top_indices\": [[1]]}", "2: block is 'encoder'"},
        {"4", "\"topk\": 1, \"top_indices\": [[1]]}", "2: layer 1: top-1, expected top-2"},
    };
    char text[512];
    const char *const first = "{\"step\": 0, \"layer\": 3, \"rank\": 0, \"num_tokens\": 1, \"topk\": 2,"
                              " \"top_indices\": [[1, 2]]}\n";
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int n =
            snprintf(text, sizeof text, "%s{\"step\": 0, \"layer\": %s, \"rank\": 0, \"num_tokens\": 1, %s\n",
                     first, wrong[i].layer, wrong[i].rest);
        refused(&moe_format_megatron, text, (size_t)n, wrong[i].text);
    }
    refused(&moe_format_megatron, "", 0, "wrong: no routing");
    refused(&moe_format_megatron, "\0\n", 2, "wrong:1: not JSON");
    /* A run that began anew and added to its files. */
    int n = snprintf(text, sizeof text, "%s%.9s1%s%s", first, first, first + 10, first);
    refused(&moe_format_megatron, text, (size_t)n, "wrong:3: step 0 of rank 0 is there twice");
    /* Empty rows that say 65,535 experts each: 79 GB of ids are not even asked for. */
    char *line;
    size_t size;
    FILE *f = open_memstream(&line, &size);
    fputs("{\"step\": 0, \"layer\": 3, \"rank\": 0, \"num_tokens\": 300000, \"topk\": 65535,"
          " \"top_indices\": [[]",
          f);
    for (int i = 1; i < 300000; i++) fputs(",[]", f);
    fputs("]}\n", f);
    fclose(f);
    refused(&moe_format_megatron, line, size, "wrong:1: token 0: 0 of topk 65535 experts");
    free(line);
}

static size_t make_npy(char *out, const char *header, int version, size_t data_bytes)
{
    size_t n = strlen(header), start = version > 1 ? 12 : 10;
    memcpy(out, "\x93NUMPY", 6);
    memset(out + 6, 0, start - 6);
    out[6] = (char)version;
    out[8] = (char)(n + 1);
    memcpy(out + start, header, n);
    out[start + n] = '\n';
    memset(out + start + n + 1, 0, data_bytes);
    return start + n + 1 + data_bytes;
}
#define NPY(descr, order, shape) "{'descr': " descr ", 'fortran_order': " order ", 'shape': " shape ", }"

static void test_wrong_npy(void **state)
{
    (void)state;
    static const struct {
        const char *header, *text;
    } wrong[] = {
        {NPY("'<f4'", "False", "(2, 2)"), "expected little-endian integers"},
        {NPY("'>i4'", "False", "(2, 2)"), "expected little-endian integers"},
        {NPY("'|O'", "False", "(2, 2)"), "expected little-endian integers"},
        {NPY("[('a', '<i4')]", "False", "(2, 2)"), "expected little-endian integers"},
        {NPY("'<i4'", "True", "(2, 2)"), "expected C order"},
        {NPY("'<i4'", "False", "()"), "expected an array"},
        {NPY("'<i4'", "False", "(4,)"), "expected an array"},
        {NPY("'<i4'", "False", "(1, 2, 2, 1)"), "expected an array"},
        {NPY("'<i4'", "False", "(2, 3)"), "16 bytes of data do not fit its shape"},
        {NPY("'<i4'", "False", "(4611686018427387904, 4)"), "do not fit its shape"},
        {NPY("'<i4'", "False", "(-1, 4)"), "do not fit its shape"},
        {NPY("'<i4'", "False", "(4, 0)"), "do not fit its shape"},
        {"", "expected little-endian integers"},
    };
    char bytes[512];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        refused(&moe_format_npy, bytes, make_npy(bytes, wrong[i].header, 1, 16), wrong[i].text);
    const char *const good = NPY("'<i4'", "False", "(2, 2)");
    size_t n = make_npy(bytes, good, 1, 16);
    refused(&moe_format_npy, bytes, 11, "not a .npy file");
    refused(&moe_format_npy, bytes, 40, "its header has no end");
    refused(&moe_format_npy, bytes, n - 1, "15 bytes of data");
    n = make_npy(bytes, NPY("'<i2'", "False", "(2, 2)"), 1, 8);
    memset(bytes + n - 2, -1, 2); /* vLLM: a position from the prefix cache */
    refused(&moe_format_npy, bytes, n, "token 1, layer 0: expected experts from 0 to 65535");
    refused(&moe_format_npy, bytes, make_npy(bytes, good, 4, 16), "not a .npy file");
}

static void test_other_npy(void **state)
{
    (void)state;
    static const char *const header[] = {NPY("'<i8'", "False", "(2, 1, 1)"), NPY("'|u1'", "False", "(2, 1)"),
                                         "{'shape': (2, 1, 1), 'fortran_order': False, 'descr': '<u4'}"};
    static const size_t width[] = {8, 1, 4};
    char bytes[512];
    for (int i = 0; i < 3; i++) {
        size_t n = make_npy(bytes, header[i], i + 1, 2 * width[i]);
        bytes[n - width[i]] = (char)200;
        write_all("a.npy", bytes, n);
        import_file(&moe_format_npy, "a.npy", "run.db");
        assert_int_equal(ask("run.db", "SELECT hex(ids) = '0000C800' FROM routing"), 1);
    }
    /* Files with other names are ranks in their order; the step and rank of a name hold. */
    write_all("run_step5_rank1.npy", bytes, make_npy(bytes, header[1], 1, 2));
    const char *const files[] = {"run_step5_rank1.npy", "a.npy"};
    assert_int_equal(moe_format_import(&moe_format_npy, files, 2, "run.db"), MOE_OK);
    assert_int_equal(ask("run.db", "SELECT SUM(10 * step + rank) FROM routing"), 52);
    const char *const twice[] = {"a.npy", "./run_step0_rank0.npy"};
    write_all("run_step0_rank0.npy", bytes, make_npy(bytes, header[1], 1, 2));
    assert_int_equal(moe_format_import(&moe_format_npy, twice, 2, "run.db"), MOE_EINPUT);
    assert_string_equal(moe_error(), "./run_step0_rank0.npy: step 0 of rank 0 is there twice");
    const char *const negative[] = {"x_step-3_rank2.npy", "x_step3_rank-2.npy"};
    for (int i = 0; i < 2; i++) {
        write_all(negative[i], bytes, make_npy(bytes, header[1], 1, 2));
        assert_int_equal(moe_format_import(&moe_format_npy, &negative[i], 1, "run.db"), MOE_EINPUT);
        assert_non_null(
            strstr(moe_error(), i ? ".npy: is step 3 of rank -2," : ".npy: is step -3 of rank 2,"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_examples),        TEST(test_megatron_normalised), TEST(test_round_trip),
        TEST(test_export_one_step), TEST(test_export_refuses),      TEST(test_wrong_megatron),
        TEST(test_wrong_npy),       TEST(test_other_npy),           TEST(test_npy_layers),
    };
    const char *folder = getenv("MOESIM_DATA");
    snprintf(data, sizeof data, "%s/examples/synthetic", folder ? folder : "");
    if (!exists(data)) {
        puts("skip: no example files (MOESIM_DATA)");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
