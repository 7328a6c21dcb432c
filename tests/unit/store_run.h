/* store_run - what the tests of the trace store share: a folder, files, and a run of made-up content. */
#ifndef MOE_TEST_STORE_RUN_H
#define MOE_TEST_STORE_RUN_H

#include "traces/store.h"

#include <dirent.h>
#include <math.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { L = 2, T = 6, K = 2, E = 8, OPS = 5 };

/* Every test has an empty folder as working directory. */
static inline int enter_folder(void **state)
{
    char name[] = "store.XXXXXX";
    if (!mkdtemp(name) || chdir(name) < 0) return -1;
    *state = strdup(name);
    return 0;
}

static inline int for_each_file(void (*fn)(const char *name))
{
    DIR *d = opendir(".");
    int n = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        n++;
        if (fn) fn(e->d_name);
    }
    closedir(d);
    return n;
}

static inline int n_files(void)
{
    return for_each_file(NULL);
}

static inline void remove_any(const char *name)
{
    remove(name);
}

static inline int leave_folder(void **state)
{
    for_each_file(remove_any);
    int failed = chdir("..") < 0 || rmdir(*state) < 0;
    free(*state);
    return failed;
}

static inline bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static inline char *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *text = moe_alloc(1 << 23, 1);
    *n = fread(text, 1, (1 << 23) - 1, f);
    fclose(f);
    return text;
}

static inline void write_all(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static inline uint64_t hash_file(const char *path)
{
    size_t n;
    char *bytes = read_all(path, &n);
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = moe_hash64(h ^ (unsigned char)bytes[i]);
    free(bytes);
    return h;
}

static inline struct moe_store *open_store(const char *path, enum moe_store_mode mode)
{
    struct moe_store *s;
    int err = moe_store_open(path, mode, &s);
    if (err < 0) fail_msg("%s", moe_error());
    return s;
}

static inline void sql(const char *path, const char *statements)
{
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    char *message = NULL;
    if (sqlite3_exec(db, statements, NULL, NULL, &message) != SQLITE_OK)
        fail_msg("%s: %s", statements, message);
    sqlite3_close(db);
}

/* A number out of the file, past the store's own code. */
static inline int64_t ask(const char *path, const char *question)
{
    sqlite3 *db;
    sqlite3_stmt *q;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, question, -1, &q, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(q), SQLITE_ROW);
    int64_t answer = sqlite3_column_int64(q, 0);
    sqlite3_finalize(q);
    sqlite3_close(db);
    return answer;
}

static inline void assert_sound(const char *path)
{
    assert_int_equal(ask(path, "SELECT integrity_check = 'ok' FROM pragma_integrity_check"), 1);
}

/* ---- a run of made-up content: a function of (step, rank) ---- */

static inline struct moe_store_op op_of(int64_t step, int rank, int o)
{
    struct moe_store_op op = {
        .step = step, .rank = rank, .layer = o % L, .block = 3, .op = o, .bytes = 100 + o};
    op.entry_ns = 1000 * step + 10 * o;
    op.start_ns = op.entry_ns + 1;
    op.end_ns = op.entry_ns + 7 + rank;
    snprintf(op.label, sizeof op.label, "layer %d forward op%d", o % L, o);
    snprintf(op.kind, sizeof op.kind, "%s", o % 2 ? "kernel" : "collective");
    return op;
}

static inline void put_run(struct moe_store *s, int rank)
{
    static const char *const run[][2] = {
        {"layers", "2"}, {"experts", "8"}, {"top_k", "2"}, {"steps", "40"}, {"seed", "7"}};
    for (int i = 0; i < 5; i++) assert_int_equal(moe_store_put(s, run[i][0], run[i][1]), MOE_OK);
    assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){rank, T, 100 + rank}), MOE_OK);
}

static inline int add_step(struct moe_store *s, int64_t step, int rank)
{
    int32_t ids[T * K];
    for (int i = 0; i < T * K; i++) ids[i] = (int32_t)((step + rank + i) % E);
    MOE_TRY(moe_store_begin(s));
    for (int l = 0; l < L; l++) MOE_TRY(moe_store_add_routing(s, step, l, rank, T, K, ids));
    for (int o = 0; o < OPS; o++) {
        struct moe_store_op op = op_of(step, rank, o);
        MOE_TRY(moe_store_add_op(s, &op));
    }
    MOE_TRY(moe_store_add_step(s, step, rank, (double)(10 * rank + step), 1000 * (step + 1) + rank));
    return moe_store_commit(s);
}

static inline void write_rank(const char *path, int rank, int n_steps)
{
    struct moe_store *s = open_store(path, MOE_STORE_CREATE);
    put_run(s, rank);
    for (int step = 0; step < n_steps; step++) assert_int_equal(add_step(s, step, rank), MOE_OK);
    moe_store_close(s);
}

static inline void write_ranks(int n_ranks, int n_steps)
{
    for (int r = 0; r < n_ranks; r++) {
        char path[32];
        snprintf(path, sizeof path, "run.db.rank%d", r);
        write_rank(path, r, n_steps);
    }
}

/* Counts operations in [0] and checks order and content; [1]: the last (step, rank, op) as one number. */
static inline int check_op(void *ctx, const struct moe_store_op *op)
{
    int64_t *seen = ctx, place = (op->step * 100 + op->rank) * 100 + op->op;
    struct moe_store_op want = op_of(op->step, op->rank, op->op);
    assert_true(place > seen[1]);
    assert_string_equal(op->label, want.label);
    assert_string_equal(op->kind, want.kind);
    assert_int_equal(op->layer, want.layer);
    assert_int_equal(op->block, want.block);
    assert_int_equal(op->bytes, want.bytes);
    assert_int_equal(op->entry_ns, want.entry_ns);
    assert_int_equal(op->start_ns, want.start_ns);
    assert_int_equal(op->end_ns, want.end_ns);
    seen[0]++;
    seen[1] = place;
    return MOE_OK;
}

static inline void assert_ops(struct moe_store *s, int64_t from, int64_t to, int64_t n)
{
    int64_t seen[2] = {0, -1};
    assert_int_equal(moe_store_each_op(s, from, to, check_op, seen), MOE_OK);
    assert_int_equal(seen[0], n);
}

static inline struct moe_store_info info_of(struct moe_store *s)
{
    struct moe_store_info info;
    if (moe_store_info(s, &info) < 0) fail_msg("%s", moe_error());
    return info;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, enter_folder, leave_folder)

#endif
