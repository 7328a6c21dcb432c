/* The trace store: killed writers and killed or failing merges lose nothing that was committed. */
#include "tests/unit/store_run.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

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

static void copy_file(const char *from, const char *to)
{
    size_t n;
    char *bytes = read_all(from, &n);
    write_all(to, bytes, n);
    free(bytes);
}

/* A writer that is killed while SQLite moves its log into the file: the header is there, pages are only in
 * the log. Done here by hand: 1,000 pages, says the header. */
static void test_interrupted_checkpoint(void **state)
{
    (void)state;
    struct moe_store *s = open_store("run.db", MOE_STORE_CREATE);
    put_run(s, 0);
    /* Enough for new pages: then the header is in the log, too. */
    for (int step = 0; step < 60; step++) assert_int_equal(add_step(s, step, 0), MOE_OK);
    copy_file("run.db", "killed.db");
    copy_file("run.db-wal", "killed.db-wal");
    moe_store_close(s);
    FILE *f = fopen("killed.db", "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, 28, SEEK_SET), 0);
    assert_int_equal(fwrite("\0\0\3\350", 1, 4, f), 4);
    fclose(f);
    s = open_store("killed.db", MOE_STORE_READ);
    assert_int_equal(info_of(s).steps_complete, 60);
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
    assert_int_equal(moe_store_merge("run.db", 3, "run.db"), MOE_OK);
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
        if (moe_store_merge("run.db", 3, "run.db") < 0) fail_msg("%s", moe_error());
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
    assert_int_equal(moe_store_merge("run.db", n_ranks, "run.db"), MOE_EINPUT);
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
    memset(bytes + 16384, 0x55, 16384);
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
    assert_int_equal(moe_store_merge("run.db", 3, "run.db"), MOE_OK);
    struct moe_store *s = open_store("run.db", MOE_STORE_READ);
    assert_int_equal(info_of(s).n_ranks, 3);
    assert_int_equal(info_of(s).steps_complete, 0);
    moe_store_close(s);
}

/* The merged file would be removed with the parts. */
static void test_merge_over_part(void **state)
{
    (void)state;
    static const char *const target[] = {"run.db.rank0", "./run.db.rank1", "link"};
    write_ranks(2, 3);
    assert_int_equal(symlink("run.db.rank1", "link"), 0);
    uint64_t before = hash_file("run.db.rank0") ^ hash_file("run.db.rank1");
    for (int i = 0; i < 3; i++) {
        assert_int_equal(moe_store_merge("run.db", 2, target[i]), MOE_EUSAGE);
        assert_non_null(strstr(moe_error(), "a rank file of this merge"));
        assert_int_equal(n_files(), 3);
        assert_true((hash_file("run.db.rank0") ^ hash_file("run.db.rank1")) == before);
    }
}

/* A rank that lives on for a moment: what it commits meanwhile is merged, too. */
static void test_merge_waits(void **state)
{
    (void)state;
    int fd[2];
    char byte;
    write_ranks(2, 3);
    assert_int_equal(pipe(fd), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct moe_store *s;
        if (moe_store_open("run.db.rank1", MOE_STORE_WRITE, &s) < 0 || write(fd[1], "", 1) != 1) _exit(1);
        usleep(200000);
        _exit(add_step(s, 3, 1) < 0);
    }
    assert_int_equal(read(fd[0], &byte, 1), 1);
    close(fd[0]);
    close(fd[1]);
    if (moe_store_merge("run.db", 2, "run.db") < 0) fail_msg("%s", moe_error());
    assert_int_equal(wait_for(pid), 0);
    assert_int_equal(ask("run.db", "SELECT COUNT(*) FROM step WHERE rank = 1"), 4);
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
        _exit(moe_store_merge("run.db", 3, "run.db") == MOE_EFAILED && n_files() == 3 ? 0 : 1);
    }
    assert_int_equal(wait_for(pid), 0);
    assert_int_equal(n_files(), 3);
    assert_int_equal(moe_store_merge("run.db", 3, "run.db"), MOE_OK);
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
        if (pid == 0) _exit(moe_store_merge("run.db", 3, "run.db") < 0);
        if (trial > 0) {
            usleep((unsigned)(merge_us * moe_uniform(3, trial, 0)));
            kill(pid, SIGKILL);
        }
        wait_for(pid);
        if (trial == 0) merge_us = now_us() - start_us;
        if (!exists("run.db")) assert_int_equal(moe_store_merge("run.db", 3, "run.db"), MOE_OK);
        assert_sound("run.db");
        assert_int_equal(ask("run.db", "SELECT COUNT(*) FROM step"), 30);
    }
    for (int r = 0; r < 3; r++) free(bytes[r]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_killed_writer),       TEST(test_killed_anywhere), TEST(test_interrupted_checkpoint),
        TEST(test_uncommitted_is_lost), TEST(test_create_replaces), TEST(test_merge),
        TEST(test_merge_killed_ranks),  TEST(test_merge_refuses),   TEST(test_merge_disk_full),
        TEST(test_merge_killed),        TEST(test_merge_waits),     TEST(test_merge_over_part),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
