/* The trace store: what is written is read; wrong and broken files are refused; SCHEMA.md is right. */
#include "tests/unit/store_run.h"

/* ---- reading and writing ---- */

static int check_result(void *ctx, const struct moe_store_result *r)
{
    int n = ++*(int *)ctx;
    assert_string_equal(r->scenario, "mixtral");
    assert_string_equal(r->topology, "h100");
    assert_string_equal(r->dispatcher, n == 1 ? "alltoall" : "deepep");
    assert_true(r->step_us == n && r->compute_us == 2 && r->exposed_us == 3 && r->waiting_us == 4 &&
                r->host_us == 5.5);
    assert_int_equal(r->intra_bytes, INT64_C(1) << 40);
    assert_int_equal(r->inter_bytes, 6);
    assert_int_equal(r->expert_parallel, 7);
    assert_true(r->capacity == 1.25 && r->dropped_share == 0.125);
    assert_string_equal(r->rank_order, "strided");
    return n == 2 ? MOE_EFAILED : MOE_OK; /* stops here */
}

static void test_round_trip(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    put_run(s, 0);
    assert_int_equal(moe_store_put(s, "seed", "8"), MOE_OK);
    for (int step = 0; step < 3; step++) assert_int_equal(add_step(s, step, 0), MOE_OK);
    struct moe_store_result r = {"mixtral", "h100",           "alltoall", 1, 2,    3,     4,
                                 5.5,       INT64_C(1) << 40, 6,          7, 1.25, 0.125, "strided"};
    assert_int_equal(moe_store_add_result(s, &(struct moe_store_result){0}), MOE_OK);
    assert_int_equal(moe_store_clear_results(s), MOE_OK);
    for (int i = 0; i < 3; i++, r.step_us++, strcpy(r.dispatcher, "deepep"))
        assert_int_equal(moe_store_add_result(s, &r), MOE_OK);
    moe_store_close(s);
    assert_int_equal(n_files(), 1);
    assert_true(moe_store_probe("run.db"));

    s = open_store("run.db", MOE_STORE_READ);
    char *value;
    assert_int_equal(moe_store_get(s, "seed", &value), MOE_OK);
    assert_string_equal(value, "8");
    free(value);
    assert_int_equal(moe_store_get(s, "colour", &value), MOE_OK);
    assert_null(value);
    int64_t n_tokens;
    int top_k, n_results = 0;
    int32_t *ids;
    assert_int_equal(moe_store_routing(s, 2, 1, 0, &n_tokens, &top_k, &ids), MOE_OK);
    assert_int_equal(n_tokens, T);
    assert_int_equal(top_k, K);
    for (int i = 0; i < T * K; i++) assert_int_equal(ids[i], (2 + i) % E);
    free(ids);
    assert_int_equal(moe_store_routing(s, 3, 1, 0, &n_tokens, &top_k, &ids), MOE_OK);
    assert_null(ids);
    assert_ops(s, 0, 2, 3 * OPS);
    assert_ops(s, 1, 1, OPS);
    assert_int_equal(moe_store_each_result(s, check_result, &n_results), MOE_EFAILED);
    assert_int_equal(n_results, 2);
    struct moe_store_info info = info_of(s);
    assert_int_equal(info.n_ranks, 1);
    assert_int_equal(info.n_layers, 2);
    assert_int_equal(info.n_experts, 8);
    assert_int_equal(info.top_k, 2);
    assert_int_equal(info.n_routing, 6);
    assert_int_equal(info.n_ops, 15);
    assert_int_equal(info.n_results, 3);
    moe_store_close(s);
    moe_store_close(NULL);
}

/* wall_ns is 1000 (step + 1) + rank, loss 10 rank + step. Two ranks; rank 1 lacks steps 0 and 5.
 * Complete: 1 to 4; slowest rank: 2001, 3001, 4001, 5001 ns, median (3001 + 4001) / 2 = 3501 ns;
 * losses: (1 + 11) / 2 = 6 and (4 + 14) / 2 = 9. */
static void test_info(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    struct moe_store_info info = info_of(s);
    assert_int_equal(info.steps_complete, 0);
    assert_true(info.first_step > info.last_step && !info.complete);
    put_run(s, 0);
    put_run(s, 1);
    for (int step = 0; step < 6; step++) assert_int_equal(add_step(s, step, 0), MOE_OK);
    for (int step = 1; step < 5; step++) assert_int_equal(add_step(s, step, 1), MOE_OK);
    info = info_of(s);
    assert_int_equal(info.n_ranks, 2);
    assert_int_equal(info.steps_complete, 4);
    assert_int_equal(info.first_step, 1);
    assert_int_equal(info.last_step, 4);
    assert_int_equal(info.steps_asked, 40);
    assert_false(info.complete);
    assert_true(info.first_loss == 6 && info.last_loss == 9);
    assert_true(info.median_step_us == 3.501);

    assert_int_equal(moe_store_put(s, "steps", "4"), MOE_OK);
    assert_true(info_of(s).complete);
    /* A run that diverges on one rank: the mean over ranks says so. */
    assert_int_equal(moe_store_add_step(s, 6, 0, 1, 1), MOE_OK);
    assert_int_equal(moe_store_add_step(s, 6, 1, NAN, 1), MOE_OK);
    assert_true(isnan(info_of(s).last_loss));
    /* A rank without tokens has no loss; the others count by their tokens. */
    assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){.rank = 2}), MOE_OK);
    assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){.rank = 3, .tokens = 3 * T}), MOE_OK);
    for (int rank = 0; rank < 4; rank++)
        assert_int_equal(moe_store_add_step(s, 7, rank, rank == 2 ? (double)NAN : 1 + rank, 1), MOE_OK);
    assert_true(info_of(s).last_loss == (1 + 2 + 3 * 4) / 5.0);
    assert_int_equal(moe_store_put(s, "ranks", "3"), MOE_OK); /* one of them never began */
    assert_int_equal(info_of(s).steps_complete, 0);
    assert_int_equal(moe_store_put(s, "experts", "many"), MOE_OK);
    assert_int_equal(moe_store_info(s, &info), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "run.db: run key 'experts' is 'many'"));
    moe_store_close(s);
}

static void test_expert_ids(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    int32_t ids[] = {0, 65535, 256, 255}, *got;
    int64_t n_tokens;
    int top_k;
    assert_int_equal(moe_store_add_routing(s, 0, 0, 0, 2, 2, ids), MOE_OK);
    assert_int_equal(ask("run.db", "SELECT hex(ids) = '0000FFFF0001FF00' FROM routing"), 1);
    assert_int_equal(moe_store_routing(s, 0, 0, 0, &n_tokens, &top_k, &got), MOE_OK);
    assert_memory_equal(got, ids, sizeof ids);
    free(got);
    assert_int_equal(moe_store_add_routing(s, 1, 0, 0, 0, 2, ids), MOE_OK); /* a rank without tokens */
    assert_int_equal(moe_store_routing(s, 1, 0, 0, &n_tokens, &top_k, &got), MOE_OK);
    assert_non_null(got);
    assert_int_equal(n_tokens, 0);
    free(got);
    ids[3] = 65536;
    assert_int_equal(moe_store_add_routing(s, 2, 0, 0, 2, 2, ids), MOE_EINPUT);
    ids[3] = -1;
    assert_int_equal(moe_store_add_routing(s, 2, 0, 0, 2, 2, ids), MOE_EINPUT);
    /* 2^61 tokens to 4 experts would be 2^64 bytes. */
    sql("run.db", "UPDATE routing SET n_tokens = 1 << 61, top_k = 4 WHERE step = 0");
    assert_int_equal(moe_store_routing(s, 0, 0, 0, &n_tokens, &top_k, &got), MOE_EINPUT);
    sql("run.db", "UPDATE routing SET n_tokens = 0, top_k = 0 WHERE step = 0");
    assert_int_equal(moe_store_routing(s, 0, 0, 0, &n_tokens, &top_k, &got), MOE_EINPUT);
    moe_store_close(s);
}

static void test_read_never_writes(void **state)
{
    (void)state;
    write_rank("run.db", 0, 2);
    uint64_t before = hash_file("run.db");
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(moe_store_put(s, "seed", "9"), MOE_EFAILED);
    assert_int_equal(moe_store_clear_results(s), MOE_EFAILED);
    assert_ops(s, 0, 9, 2 * OPS);
    moe_store_close(s);
    assert_true(hash_file("run.db") == before);
    assert_int_equal(n_files(), 1);
}

/* ---- wrong and broken files ---- */

static void assert_refused(const char *path, const char *text)
{
    struct moe_store *s;
    for (enum moe_store_mode mode = MOE_STORE_READ; mode <= MOE_STORE_WRITE; mode++) {
        assert_int_equal(moe_store_open(path, mode, &s), MOE_EINPUT);
        assert_null(s);
        if (strncmp(moe_error(), path, strlen(path)) != 0 || !strstr(moe_error(), text))
            fail_msg("'%s' does not say '%s'", moe_error(), text);
    }
}

static void test_wrong_files(void **state)
{
    (void)state;
    assert_refused("absent.db", "No such file");
    assert_int_equal(mkdir("folder", 0700), 0);
    assert_refused("folder", "Is a directory");
    assert_int_equal(mkfifo("pipe", 0600), 0);
    assert_refused("pipe", "not an SQLite file");
    write_all("empty.db", "", 0);
    assert_refused("empty.db", "not an SQLite file");
    write_all("text.db", "model:\n  hidden: 4096\n", 22);
    assert_refused("text.db", "not an SQLite file");
    assert_false(moe_store_probe("text.db"));
    sql("foreign.db", "CREATE TABLE run(key, value); PRAGMA application_id = 7; PRAGMA user_version = 1");
    assert_refused("foreign.db", "another program");
    assert_false(moe_store_probe("foreign.db"));

    write_rank("run.db", 0, 2);
    sql("run.db", "PRAGMA user_version = 3");
    assert_refused("run.db", "store version 3, this program reads up to 2");
    assert_true(moe_store_probe("run.db"));
    sql("run.db", "PRAGMA user_version = 1; DROP TABLE op");
    assert_refused("run.db", "no such table: op");
    if (geteuid() == 0) return; /* whom nothing is unreadable to */
    assert_int_equal(chmod("run.db", 0), 0);
    assert_refused("run.db", "Permission denied");
    write_rank("locked.db", 0, 1);
    assert_int_equal(chmod("locked.db", 0400), 0);
    struct moe_store *s;
    assert_int_equal(moe_store_open("locked.db", MOE_STORE_WRITE, &s), MOE_EFAILED);
    assert_non_null(strstr(moe_error(), "not writable"));
}

static void test_truncated(void **state)
{
    (void)state;
    write_rank("run.db", 0, 20);
    size_t n;
    char *bytes = read_all("run.db", &n);
    assert_true(n > 8 * 4096);
    size_t kept[] = {1, 99, 100, 511, 4095, 4096, n / 2, n - 4096, n - 1};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        write_all("run.db", bytes, kept[i]);
        assert_refused("run.db", kept[i] < 100 ? "not an SQLite file" : "truncated");
    }
    free(bytes);
}

static int ignore_op(void *ctx, const struct moe_store_op *op)
{
    (void)ctx, (void)op;
    return MOE_OK;
}

/* Any answer will do, as long as it is an answer. */
static void test_garbled(void **state)
{
    (void)state;
    write_rank("run.db", 0, 20);
    size_t n;
    char *bytes = read_all("run.db", &n);
    int refused = 0;
    for (uint64_t trial = 0; trial < 24; trial++) {
        char *broken = moe_alloc(n, 1);
        memcpy(broken, bytes, n);
        for (uint64_t i = 0; i <= trial; i++) {
            size_t at = (size_t)(moe_uniform(trial, 0, i) * (double)n);
            broken[at] = (char)(256 * moe_uniform(trial, 1, i));
        }
        write_all("run.db.rank0", broken, n);
        free(broken);
        struct moe_store *s;
        struct moe_store_info info;
        int err = moe_store_open("run.db.rank0", MOE_STORE_READ, &s);
        if (err == MOE_OK) err = moe_store_each_op(s, 0, 99, ignore_op, NULL);
        if (err == MOE_OK) err = moe_store_info(s, &info);
        for (int step = 0; step < 20 && err == MOE_OK; step++) {
            int64_t n_tokens;
            int top_k;
            int32_t *ids;
            err = moe_store_routing(s, step, 0, 0, &n_tokens, &top_k, &ids);
            free(ids);
        }
        moe_store_close(s);
        refused += err < 0;
        if (moe_store_merge("run.db", 1, "merged.db") == MOE_OK) assert_sound("merged.db");
    }
    assert_true(refused > 5);
    free(bytes);
}

static int ignore_routing(void *ctx, int64_t step, int layer, int rank)
{
    (void)ctx, (void)step, (void)layer, (void)rank;
    return MOE_OK;
}

/* What numbers no layer, rank or block is neither cut to 32 bits nor handed on. */
static void test_wrong_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *change, *text;
    } wrong[] = {
        {"UPDATE routing SET layer = -5 WHERE layer = 1", "run.db: step 0: layer is -5, expected 0 to"},
        {"UPDATE routing SET rank = rank + 4294967296", "rank is 4294967296"},
        {"UPDATE op SET layer = layer + 4294967296", "run.db: step 0: layer is 4294967296, expected 0 to"},
        {"UPDATE op SET rank = -1", "rank is -1"},
        {"UPDATE op SET op = 2147483648 WHERE step = 1", "step 1: op is 2147483648"},
    };
    for (int i = 0; i < 5; i++) {
        write_rank("run.db", 0, 2);
        sql("run.db", wrong[i].change);
        struct moe_store *s = open_store("run.db", MOE_STORE_READ);
        assert_int_equal(i < 2 ? moe_store_each_routing(s, 0, 9, ignore_routing, NULL)
                               : moe_store_each_op(s, 0, 9, ignore_op, NULL),
                         MOE_EINPUT);
        if (!strstr(moe_error(), wrong[i].text))
            fail_msg("'%s' does not say '%s'", moe_error(), wrong[i].text);
        moe_store_close(s);
    }
}

/* ---- SCHEMA.md ---- */

static char *document(void)
{
    char path[1024];
    snprintf(path, sizeof path, "%s", __FILE__);
    char *end = strrchr(path, '/');
    assert_non_null(end);
    snprintf(end, (size_t)(path + sizeof path - end), "/../../traces/SCHEMA.md");
    size_t n;
    return read_all(path, &n);
}

static int documented(void *ctx, int n, char **text, char **names)
{
    (void)n, (void)names;
    char heading[64], row[64];
    snprintf(heading, sizeof heading, "\n`%s`: ", text[0]);
    snprintf(row, sizeof row, "\n| `%s` | %s |", text[1], text[2]);
    const char *table = strstr(ctx, heading), *column = table ? strstr(table, row) : NULL;
    const char *end = table ? strstr(table, "\n\n`") : NULL;
    if (!column || (end && column > end)) fail_msg("SCHEMA.md does not describe %s.%s", text[0], text[1]);
    return 0;
}

static int count_row(void *ctx, int n, char **text, char **names)
{
    (void)n, (void)text, (void)names;
    ++*(int *)ctx;
    return 0;
}

static void test_schema_document(void **state)
{
    (void)state;
    write_ranks(2, 3);
    assert_int_equal(moe_store_merge("run.db", 2, "run.db"), MOE_OK);
    struct moe_store *s = open_store("run.db", MOE_STORE_WRITE);
    assert_int_equal(moe_store_add_result(s, &(struct moe_store_result){.scenario = "a"}), MOE_OK);
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(moe_store_add_tensor(s, &(struct moe_store_tensor){.rank = rank,
                                                                            .role = MOE_TENSOR_GRADIENT,
                                                                            .element_bytes = 4,
                                                                            .hash = (uint64_t)rank}),
                         MOE_OK);
    moe_store_close(s);
    char *doc = document(), *block = doc, numbers[64];
    snprintf(numbers, sizeof numbers, "%lld (\"moes\")", (long long)ask("run.db", "PRAGMA application_id"));
    assert_non_null(strstr(doc, numbers));
    sqlite3 *db;
    assert_int_equal(sqlite3_open("run.db", &db), SQLITE_OK);
    assert_int_equal(
        sqlite3_exec(db,
                     "SELECT m.name, c.name, c.type FROM sqlite_schema AS m, pragma_table_info(m.name)"
                     " AS c WHERE m.type = 'table'",
                     documented, doc, NULL),
        SQLITE_OK);
    int blocks = 0;
    while ((block = strstr(block, "```sql\n"))) {
        block += 7;
        char *end = strstr(block, "```"), *message = NULL;
        *end = '\0';
        int n_rows = 0;
        if (sqlite3_exec(db, block, count_row, &n_rows, &message) != SQLITE_OK)
            fail_msg("%s: %s", block, message);
        if (n_rows == 0) fail_msg("%s: no rows", block);
        if (strstr(block, "AS expert")) assert_int_equal(n_rows, E);
        block = end + 1;
        blocks++;
    }
    assert_int_equal(blocks, 7);
    sqlite3_close(db);
    free(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),    TEST(test_info),      TEST(test_expert_ids), TEST(test_read_never_writes),
        TEST(test_wrong_files),   TEST(test_truncated), TEST(test_garbled),    TEST(test_schema_document),
        TEST(test_wrong_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
