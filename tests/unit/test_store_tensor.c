/* test_store_tensor - rows of parameters and gradients: what goes in comes out, also of a merge and of files
 * that are older than the table. */
#include "tests/unit/store_run.h"

static const float values[] = {1, -2, 0.5f, 4};

/* A row whose every member depends on (step, rank, role). */
static struct moe_store_tensor tensor_of(int64_t step, int rank, enum moe_tensor_role role)
{
    struct moe_store_tensor t = {.step = step,
                                 .rank = rank,
                                 .layer = rank ? -1 : 1,
                                 .expert = rank ? 3 : -1,
                                 .place = 10 - (int)role,
                                 .role = role,
                                 .presence =
                                     (enum moe_presence)((role + (unsigned)rank) % MOE_PRESENCE_COUNT),
                                 .element_bytes = 4,
                                 .n = 4,
                                 .n_nonfinite = role,
                                 .sum = -1.5 - rank,
                                 .sum_squares = 1e300,
                                 .hash = UINT64_MAX - (uint64_t)step,
                                 .content = role == MOE_TENSOR_PARAM ? values : NULL};
    snprintf(t.name, sizeof t.name, "router%d", rank);
    return t;
}

static void write_tensors(const char *path, int rank)
{
    struct moe_store *s = open_store(path, MOE_STORE_CREATE);
    put_run(s, rank);
    for (int step = 0; step < 2; step++)
        for (int role = 0; role < MOE_TENSOR_ROLE_COUNT; role++) {
            const struct moe_store_tensor t = tensor_of(step, rank, (enum moe_tensor_role)role);
            assert_int_equal(moe_store_add_tensor(s, &t), MOE_OK);
        }
    moe_store_close(s);
}

struct seen {
    struct moe_store *s;
    int n;
    int64_t last;
};

static int see(void *ctx, const struct moe_store_tensor *t)
{
    struct seen *seen = ctx;
    const struct moe_store_tensor want = tensor_of(t->step, t->rank, t->role);
    const int64_t order = (t->step * 10 + t->rank) * 100 + t->place;
    void *content;
    assert_true(order > seen->last);
    seen->last = order;
    seen->n++;
    assert_int_equal(t->layer, want.layer);
    assert_int_equal(t->expert, want.expert);
    assert_int_equal(t->presence, want.presence);
    assert_int_equal(t->element_bytes, want.element_bytes);
    assert_int_equal(t->n, want.n);
    assert_int_equal(t->n_nonfinite, want.n_nonfinite);
    assert_true(t->sum == want.sum && t->sum_squares == want.sum_squares && t->hash == want.hash);
    assert_string_equal(t->name, want.name);
    assert_int_equal(moe_store_tensor_content(seen->s, t, &content), MOE_OK);
    assert_int_equal(content != NULL, want.content != NULL);
    if (content) assert_memory_equal(content, values, sizeof values);
    free(content);
    return MOE_OK;
}

static int count_tensors(struct moe_store *s, int64_t from, int64_t to)
{
    struct seen seen = {s, 0, -1};
    assert_int_equal(moe_store_each_tensor(s, from, to, see, &seen), MOE_OK);
    return seen.n;
}

static void test_merged(void **state)
{
    (void)state;
    write_tensors("run.db.rank0", 0);
    write_tensors("run.db.rank1", 1);
    assert_int_equal(moe_store_merge("run.db", 2, "run.db"), MOE_OK);
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(count_tensors(s, 0, 9), 16);
    assert_int_equal(count_tensors(s, 1, 1), 8);
    moe_store_close(s);
}

static void make_old(const char *path)
{
    sql(path, "DROP TABLE tensor; PRAGMA user_version = 1");
}

/* Reading leaves an older file as it is; writing and merging bring it to this version. */
static void test_older_file(void **state)
{
    (void)state;
    write_rank("run.db", 0, 2);
    make_old("run.db");
    const uint64_t before = hash_file("run.db");
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(count_tensors(s, 0, 9), 0);
    assert_ops(s, 0, 9, 2 * OPS);
    moe_store_close(s);
    assert_true(hash_file("run.db") == before);

    s = open_store("run.db", MOE_STORE_WRITE);
    const struct moe_store_tensor t = tensor_of(1, 0, MOE_TENSOR_GRADIENT);
    assert_int_equal(moe_store_add_tensor(s, &t), MOE_OK);
    moe_store_close(s);
    assert_int_equal(ask("run.db", "PRAGMA user_version"), 2);
    assert_sound("run.db");
    s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(count_tensors(s, 0, 9), 1);
    assert_ops(s, 0, 9, 2 * OPS);
    moe_store_close(s);

    write_ranks(2, 3);
    make_old("run.db.rank1");
    assert_int_equal(moe_store_merge("run.db", 2, "run.db"), MOE_OK);
    s = open_store("run.db", MOE_STORE_READ);
    assert_ops(s, 0, 9, 2 * 3 * OPS);
    moe_store_close(s);
}

static int accept(void *ctx, const struct moe_store_tensor *t)
{
    (void)ctx, (void)t;
    return MOE_OK;
}

/* A row that cannot be is the file's fault, and says where. */
static void test_broken_rows(void **state)
{
    /* clang-format off */
    static const char *const change[] = {
        "role = 'weight'", "presence = ''", "n = -1",
        "n_nonfinite = 5", "layer = -2", "expert = -2",
        "element_bytes = 3", "sum_squares = -1", "rank = 1 << 40",
        "layer = 65536", "expert = 1 << 32", "name = ''",
        "name = 'a' || char(10)", "n = 'abc'", "n = 1 << 60",
        "n = 1 << 61", "place = 1 << 32", "place = -1",
        "element_bytes = 4 + (1 << 32)", "hash = x'00'", "sum = 'abc'",
        "expert = 0.5", "name = x'41'",
    };
    /* clang-format on */
    (void)state;
    for (size_t i = 0; i < sizeof change / sizeof *change; i++) {
        char text[128];
        write_tensors("run.db", 0);
        snprintf(text, sizeof text, "UPDATE tensor SET %s WHERE step = 1 AND role = 'parameter'", change[i]);
        sql("run.db", text);
        struct moe_store *s = open_store("run.db", MOE_STORE_READ);
        assert_int_equal(moe_store_each_tensor(s, 0, 9, accept, NULL), MOE_EINPUT);
        assert_non_null(strstr(moe_error(), "run.db: step 1"));
        moe_store_close(s);
    }
    write_tensors("run.db", 0);
    sql("run.db", "UPDATE tensor SET content = x'00' WHERE role = 'parameter'");
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    const struct moe_store_tensor t = tensor_of(1, 0, MOE_TENSOR_PARAM);
    void *content;
    assert_int_equal(moe_store_tensor_content(s, &t, &content), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "holds 1 bytes, expected 4 x 4"));
    /* 2^62 + 1 elements of 4 bytes are as many bytes as one, modulo 2^64. */
    sql("run.db", "UPDATE tensor SET content = x'00000000' WHERE role = 'parameter'");
    struct moe_store_tensor more = t;
    more.n = ((int64_t)1 << 62) + 1;
    assert_int_equal(moe_store_tensor_content(s, &more, &content), MOE_EINPUT);
    moe_store_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(test_merged), TEST(test_older_file), TEST(test_broken_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
