/* The trace store: what is written is read; kills, broken files and failing merges lose nothing. */
#include "traces/store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { L = 2, T = 6, K = 2, E = 8, OPS = 5 };

/* Every test has an empty folder as working directory. */
static int enter_folder(void **state)
{
    char name[] = "store.XXXXXX";
    if (!mkdtemp(name) || chdir(name) < 0) return -1;
    *state = strdup(name);
    return 0;
}

static int for_each_file(void (*fn)(const char *name))
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

static int n_files(void)
{
    return for_each_file(NULL);
}

static void remove_any(const char *name)
{
    remove(name);
}

static int leave_folder(void **state)
{
    for_each_file(remove_any);
    int failed = chdir("..") < 0 || rmdir(*state) < 0;
    free(*state);
    return failed;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static char *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *text = moe_alloc(1 << 22, 1);
    *n = fread(text, 1, (1 << 22) - 1, f);
    fclose(f);
    return text;
}

static void write_all(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static uint64_t hash_file(const char *path)
{
    size_t n;
    char *bytes = read_all(path, &n);
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = moe_hash64(h ^ (unsigned char)bytes[i]);
    free(bytes);
    return h;
}

static struct moe_store *open_store(const char *path, enum moe_store_mode mode)
{
    struct moe_store *s;
    int err = moe_store_open(path, mode, &s);
    if (err < 0) fail_msg("%s", moe_error());
    return s;
}

static void sql(const char *path, const char *statements)
{
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    char *message = NULL;
    if (sqlite3_exec(db, statements, NULL, NULL, &message) != SQLITE_OK)
        fail_msg("%s: %s", statements, message);
    sqlite3_close(db);
}

/* A number out of the file, past the store's own code. */
static int64_t ask(const char *path, const char *question)
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

static void assert_sound(const char *path)
{
    assert_int_equal(ask(path, "SELECT integrity_check = 'ok' FROM pragma_integrity_check"), 1);
}

/* ---- a run of made-up content: a function of (step, rank) ---- */

static struct moe_store_op op_of(int64_t step, int rank, int o)
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

static void put_run(struct moe_store *s, int rank)
{
    static const char *const run[][2] = {
        {"layers", "2"}, {"experts", "8"}, {"top_k", "2"}, {"steps", "40"}, {"seed", "7"}};
    for (int i = 0; i < 5; i++) assert_int_equal(moe_store_put(s, run[i][0], run[i][1]), MOE_OK);
    assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){rank, T, 100 + rank}), MOE_OK);
}

static int add_step(struct moe_store *s, int64_t step, int rank)
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

static void write_rank(const char *path, int rank, int n_steps)
{
    struct moe_store *s = open_store(path, MOE_STORE_CREATE);
    put_run(s, rank);
    for (int step = 0; step < n_steps; step++) assert_int_equal(add_step(s, step, rank), MOE_OK);
    moe_store_close(s);
}

static void write_ranks(int n_ranks, int n_steps)
{
    for (int r = 0; r < n_ranks; r++) {
        char path[32];
        snprintf(path, sizeof path, "run.db.rank%d", r);
        write_rank(path, r, n_steps);
    }
}

/* Counts operations in [0] and checks order and content; [1]: the last (step, rank, op) as one number. */
static int check_op(void *ctx, const struct moe_store_op *op)
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

static void assert_ops(struct moe_store *s, int64_t from, int64_t to, int64_t n)
{
    int64_t seen[2] = {0, -1};
    assert_int_equal(moe_store_each_op(s, from, to, check_op, seen), MOE_OK);
    assert_int_equal(seen[0], n);
}

static struct moe_store_info info_of(struct moe_store *s)
{
    struct moe_store_info info;
    if (moe_store_info(s, &info) < 0) fail_msg("%s", moe_error());
    return info;
}

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
    return n == 2 ? MOE_EFAILED : MOE_OK; /* stops here */
}

static void test_round_trip(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    put_run(s, 0);
    assert_int_equal(moe_store_put(s, "seed", "8"), MOE_OK);
    for (int step = 0; step < 3; step++) assert_int_equal(add_step(s, step, 0), MOE_OK);
    struct moe_store_result r = {"mixtral", "h100", "alltoall", 1, 2, 3, 4, 5.5, INT64_C(1) << 40, 6};
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
    sql("run.db", "PRAGMA user_version = 2");
    assert_refused("run.db", "store version 2, this program reads up to 1");
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
        if (moe_store_merge("merged.db", 1) == MOE_OK) assert_sound("merged.db");
    }
    assert_true(refused > 5);
    free(bytes);
}

/* ---- kills ---- */

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int wait_for(pid_t pid)
{
    int status;
    assert_true(pid > 0);
    waitpid(pid, &status, 0);
    return status;
}

/* Writes steps for ever; a byte goes to fd after each commit. */
static _Noreturn void write_for_ever(const char *path, int rank, int fd)
{
    struct moe_store *s;
    if (moe_store_open(path, MOE_STORE_CREATE, &s) < 0) _exit(1);
    put_run(s, rank);
    for (int64_t step = 0;; step++)
        if (add_step(s, step, rank) < 0 || write(fd, "", 1) != 1) _exit(1);
}

/* Runs a writer and kills it somewhere after `n` commits. Result: the number of commits it acknowledged. */
static int64_t kill_writer(const char *path, int rank, int n, unsigned wait_us)
{
    int fd[2];
    char buffer[4096];
    assert_int_equal(pipe(fd), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) write_for_ever(path, rank, fd[1]);
    close(fd[1]);
    int64_t acknowledged = 0;
    while (acknowledged < n && read(fd[0], buffer, 1) == 1) acknowledged++;
    assert_int_equal(acknowledged, n);
    usleep(wait_us);
    kill(pid, SIGKILL);
    assert_true(WIFSIGNALED(wait_for(pid)));
    for (ssize_t more; (more = read(fd[0], buffer, sizeof buffer)) > 0;) acknowledged += more;
    close(fd[0]);
    return acknowledged;
}

static void test_killed_writer(void **state)
{
    (void)state;
    for (uint64_t trial = 0; trial < 10; trial++) {
        int n = (int)(60 * moe_uniform(1, trial, 0));
        int64_t acknowledged = kill_writer("run.db", 0, n, (unsigned)(3000 * moe_uniform(1, trial, 1)));
        struct moe_store *s = open_store("run.db", MOE_STORE_READ);
        struct moe_store_info info = info_of(s);
        /* Killed between a commit and its acknowledgement: one more. */
        assert_in_range(info.steps_complete, acknowledged, acknowledged + 1);
        assert_int_equal(info.n_ops, OPS * info.steps_complete);
        assert_int_equal(info.n_routing, L * info.steps_complete);
        assert_ops(s, 0, info.last_step, OPS * info.steps_complete);
        moe_store_close(s);
        assert_sound("run.db");
    }
}

/* From the creation to the close: there is no file, or one that a reader opens. The first writer is left
 * alone and says how long that takes. */
static void test_killed_anywhere(void **state)
{
    (void)state;
    double life_us = 0;
    for (uint64_t trial = 0; trial < 40; trial++) {
        for_each_file(remove_any);
        double start_us = now_us();
        pid_t pid = fork();
        if (pid == 0) {
            write_rank("run.db", 0, 3);
            _exit(0);
        }
        if (trial > 0) {
            usleep((unsigned)(life_us * moe_uniform(4, trial, 0)));
            kill(pid, SIGKILL);
        }
        wait_for(pid);
        if (trial == 0) life_us = now_us() - start_us;
        if (!exists("run.db")) continue;
        struct moe_store *s = open_store("run.db", MOE_STORE_READ);
        struct moe_store_info info = info_of(s);
        assert_int_equal(info.n_ops, OPS * info.steps_complete);
        moe_store_close(s);
        assert_sound("run.db");
    }
}

/* A writer that is killed while SQLite moves its log into the file: the header is there, pages are only in
 * the log. Done here by hand: 1,000 pages, says the header. */
static void test_interrupted_checkpoint(void **state)
{
    (void)state;
    kill_writer("run.db", 0, 10, 0);
    FILE *f = fopen("run.db", "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, 28, SEEK_SET), 0);
    assert_int_equal(fwrite("\0\0\3\350", 1, 4, f), 4);
    fclose(f);
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_true(info_of(s).steps_complete >= 10);
    moe_store_close(s);
}

static void test_uncommitted_is_lost(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    put_run(s, 0);
    assert_int_equal(add_step(s, 0, 0), MOE_OK);
    assert_int_equal(moe_store_begin(s), MOE_OK);
    struct moe_store_op op = op_of(1, 0, 0);
    assert_int_equal(moe_store_add_op(s, &op), MOE_OK);
    moe_store_close(s);
    assert_int_equal(n_files(), 1);
    s = open_store("run.db", MOE_STORE_READ);
    assert_ops(s, 0, 9, OPS);
    moe_store_close(s);
}

static void test_create_replaces(void **state)
{
    (void)state;
    kill_writer("run.db", 0, 3, 0);
    assert_true(exists("run.db-wal")); /* with its steps */
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    assert_int_equal(info_of(s).n_ops, 0);
    moe_store_close(s);
    assert_int_equal(n_files(), 1);
    /* Where it cannot be created the old file stays. */
    assert_int_equal(mkdir("folder", 0700), 0);
    assert_int_equal(moe_store_open("folder", MOE_STORE_CREATE, &s), MOE_EFAILED);
    assert_int_equal(moe_store_open("absent/run.db", MOE_STORE_CREATE, &s), MOE_EFAILED);
    assert_non_null(strstr(moe_error(), "No such file or directory"));
    assert_null(s);
    assert_int_equal(n_files(), 2);
}

/* ---- merging ---- */

static void test_merge(void **state)
{
    (void)state;
    write_ranks(3, 4);
    assert_int_equal(moe_store_merge("run.db", 3), MOE_OK);
    assert_int_equal(n_files(), 1);
    assert_sound("run.db");
    assert_int_equal(ask("run.db", "SELECT journal_mode = 'delete' FROM pragma_journal_mode"), 1);
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_ops(s, 0, 3, 3 * 4 * OPS);
    assert_ops(s, 2, 3, 3 * 2 * OPS);
    struct moe_store_info info = info_of(s);
    assert_int_equal(info.n_ranks, 3);
    assert_int_equal(info.steps_complete, 4);
    assert_int_equal(info.n_routing, 3 * 4 * L);
    assert_true(info.first_loss == 10); /* (0 + 10 + 20) / 3 */
    for (int rank = 0; rank < 3; rank++) {
        int64_t n_tokens;
        int top_k;
        int32_t *ids;
        assert_int_equal(moe_store_routing(s, 3, 1, rank, &n_tokens, &top_k, &ids), MOE_OK);
        for (int i = 0; i < T * K; i++) assert_int_equal(ids[i], (3 + rank + i) % E);
        free(ids);
    }
    char *value;
    assert_int_equal(moe_store_get(s, "seed", &value), MOE_OK);
    assert_string_equal(value, "7");
    free(value);
    moe_store_close(s);
    assert_int_equal(ask("run.db", "SELECT SUM(pid) FROM rank"), 303);
}

static void test_merge_killed_ranks(void **state)
{
    (void)state;
    for (uint64_t trial = 0; trial < 3; trial++) {
        int64_t least = INT64_MAX, all = 0;
        for (int rank = 0; rank < 3; rank++) {
            char path[32];
            snprintf(path, sizeof path, "run.db.rank%d", rank);
            int n = 1 + (int)(30 * moe_uniform(2, trial, (uint64_t)rank));
            int64_t acknowledged = kill_writer(path, rank, n, 500);
            all += acknowledged;
            if (acknowledged < least) least = acknowledged;
        }
        if (moe_store_merge("run.db", 3) < 0) fail_msg("%s", moe_error());
        assert_int_equal(n_files(), 1);
        assert_sound("run.db");
        struct moe_store *s = open_store("run.db", MOE_STORE_READ);
        assert_int_equal(moe_store_put(s, "steps", "100000"), MOE_EFAILED);
        struct moe_store_info info = info_of(s);
        assert_in_range(info.steps_complete, least, least + 1);
        assert_in_range(info.n_ops, OPS * all, OPS * (all + 3)); /* kept: steps of some ranks */
        moe_store_close(s);
    }
}

static void merge_refused(int n_ranks, const char *text)
{
    int files = n_files();
    uint64_t before = hash_file("run.db");
    assert_int_equal(moe_store_merge("run.db", n_ranks), MOE_EINPUT);
    if (!strstr(moe_error(), text)) fail_msg("'%s' does not say '%s'", moe_error(), text);
    assert_true(hash_file("run.db") == before);
    assert_int_equal(n_files(), files);
}

static void test_merge_refuses(void **state)
{
    (void)state;
    write_rank("run.db", 0, 1); /* of an earlier run: stays */
    write_ranks(3, 4);
    merge_refused(4, "run.db.rank3: No such file");
    sql("run.db.rank1", "UPDATE run SET value = '8' WHERE key = 'seed'");
    merge_refused(3, "run.db.rank1: not merged: not of the same run: run key seed is '8', expected '7'");
    write_rank("run.db.rank1", 0, 4);
    merge_refused(3, "run.db.rank1: not merged");
    write_all("run.db.rank1", "", 0);
    merge_refused(3, "run.db.rank1: no moesim store");
    write_rank("run.db.rank1", 1, 20);
    size_t n;
    char *bytes = read_all("run.db.rank1", &n);
    memset(bytes + 5 * 4096, 0x55, 4096);
    write_all("run.db.rank1", bytes, n);
    free(bytes);
    merge_refused(3, "run.db.rank1: ");
    write_rank("run.db.rank1", 1, 4); /* every row can be read, yet pages are lost */
    sql("run.db.rank1", "PRAGMA writable_schema = ON; DELETE FROM sqlite_schema WHERE name = 'op_by_step'");
    merge_refused(3, "run.db.rank1: broken: ");
    write_rank("run.db.rank1", 1, 4);
    sql("run.db.rank2", "INSERT INTO run VALUES('ranks', '4')");
    merge_refused(3, "run key ranks is '4', expected '3'");
    sql("run.db.rank2", "DELETE FROM run"); /* killed before it wrote anything */
    sql("run.db.rank2", "DELETE FROM step");
    assert_int_equal(moe_store_merge("run.db", 3), MOE_OK);
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(info_of(s).n_ranks, 3);
    assert_int_equal(info_of(s).steps_complete, 0);
    moe_store_close(s);
}

/* A limit on the file size stands for a full disk. */
static void test_merge_disk_full(void **state)
{
    (void)state;
    write_ranks(3, 40);
    struct stat st;
    assert_int_equal(stat("run.db.rank0", &st), 0);
    pid_t pid = fork();
    if (pid == 0) {
        rlim_t bytes = (rlim_t)st.st_size + 8192; /* one rank fits, three do not */
        struct rlimit limit = {bytes, bytes};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        _exit(moe_store_merge("run.db", 3) == MOE_EFAILED && n_files() == 3 ? 0 : 1);
    }
    assert_int_equal(wait_for(pid), 0);
    assert_int_equal(n_files(), 3);
    assert_int_equal(moe_store_merge("run.db", 3), MOE_OK);
    assert_int_equal(ask("run.db", "SELECT COUNT(*) FROM step"), 120);
}

/* The first merge runs to its end and says how long one takes. */
static void test_merge_killed(void **state)
{
    (void)state;
    static const char *const part[] = {"run.db.rank0", "run.db.rank1", "run.db.rank2"};
    char *bytes[3];
    size_t n[3];
    write_ranks(3, 10);
    for (int r = 0; r < 3; r++) bytes[r] = read_all(part[r], &n[r]);
    double merge_us = 0;
    for (uint64_t trial = 0; trial < 20; trial++) {
        remove_any("run.db");
        for (int r = 0; r < 3; r++) write_all(part[r], bytes[r], n[r]);
        double start_us = now_us();
        pid_t pid = fork();
        if (pid == 0) _exit(moe_store_merge("run.db", 3) < 0);
        if (trial > 0) {
            usleep((unsigned)(merge_us * moe_uniform(3, trial, 0)));
            kill(pid, SIGKILL);
        }
        wait_for(pid);
        if (trial == 0) merge_us = now_us() - start_us;
        if (!exists("run.db")) assert_int_equal(moe_store_merge("run.db", 3), MOE_OK);
        assert_sound("run.db");
        assert_int_equal(ask("run.db", "SELECT COUNT(*) FROM step"), 30);
    }
    for (int r = 0; r < 3; r++) free(bytes[r]);
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
    assert_int_equal(moe_store_merge("run.db", 2), MOE_OK);
    struct moe_store *s = open_store("run.db", MOE_STORE_WRITE);
    assert_int_equal(moe_store_add_result(s, &(struct moe_store_result){.scenario = "a"}), MOE_OK);
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
        if (strstr(block, "expert")) assert_int_equal(n_rows, E);
        block = end + 1;
        blocks++;
    }
    assert_int_equal(blocks, 6);
    sqlite3_close(db);
    free(doc);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, enter_folder, leave_folder)
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),
        TEST(test_info),
        TEST(test_expert_ids),
        TEST(test_read_never_writes),
        TEST(test_create_replaces),
        TEST(test_wrong_files),
        TEST(test_truncated),
        TEST(test_garbled),
        TEST(test_killed_writer),
        TEST(test_killed_anywhere),
        TEST(test_interrupted_checkpoint),
        TEST(test_uncommitted_is_lost),
        TEST(test_merge),
        TEST(test_merge_killed_ranks),
        TEST(test_merge_refuses),
        TEST(test_merge_disk_full),
        TEST(test_merge_killed),
        TEST(test_schema_document),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
