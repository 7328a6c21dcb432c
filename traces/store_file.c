/* store_file.c - see store.h: the store as a file, and the merge.
 *
 * A merge may be killed at any point: the rank files stay until the merged file, complete and synced, has its
 * name. */
#include "traces/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *moe_store_join(const char *path, const char *suffix)
{
    size_t size = strlen(path) + strlen(suffix) + 1;
    char *p = moe_alloc(size, 1);
    snprintf(p, size, "%s%s", path, suffix);
    return p;
}

static void remove_logs(const char *path)
{
    static const char *const suffix[] = {"-wal", "-shm", "-journal"};
    for (int i = 0; i < 3; i++) {
        char *p = moe_store_join(path, suffix[i]);
        unlink(p);
        free(p);
    }
}

void moe_store_remove(const char *path)
{
    remove_logs(path);
    unlink(path);
}

/* What was renamed is on disk when its folder is. Best effort, as in SQLite: some file systems refuse. */
static void sync_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = moe_store_join(slash ? path : ".", "");
    if (slash) folder[slash - path + 1] = '\0';
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(folder);
}

int moe_store_rename(const char *from, const char *to)
{
    /* The log of a killed writer would be applied to whatever file has the name next. */
    remove_logs(to);
    if (rename(from, to) < 0) return moe_fail(MOE_EFAILED, "%s: %s", to, strerror(errno));
    sync_folder(to);
    return MOE_OK;
}

/* ---- the file's header: sqlite.org/fileformat.html ---- */

struct header {
    unsigned char raw[100];
    int64_t file_bytes;
};

static uint32_t field(const struct header *h, int offset)
{
    const unsigned char *p = h->raw + offset;
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static int read_header(const char *path, struct header *h)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block */
    if (fd < 0) return moe_fail(MOE_EINPUT, "%s: %s", path, strerror(errno));
    ssize_t n = read(fd, h->raw, sizeof h->raw);
    int error = n < 0 || fstat(fd, &st) < 0 ? errno : 0;
    close(fd);
    if (error) return moe_fail(MOE_EINPUT, "%s: %s", path, strerror(error));
    h->file_bytes = st.st_size;
    if (n != sizeof h->raw || memcmp(h->raw, "SQLite format 3", 16) != 0)
        return moe_fail(MOE_EINPUT, "%s: no moesim store (not an SQLite file)", path);
    if (field(h, 68) != MOE_STORE_APPLICATION_ID)
        return moe_fail(MOE_EINPUT, "%s: no moesim store (an SQLite file of another program)", path);
    return MOE_OK;
}

bool moe_store_probe(const char *path)
{
    struct header h;
    return read_header(path, &h) == MOE_OK;
}

int moe_store_check_file(const char *path)
{
    struct header h;
    MOE_TRY(read_header(path, &h));
    uint32_t version = field(&h, 60);
    if (version > MOE_STORE_VERSION)
        return moe_fail(MOE_EINPUT, "%s: store version %u, this program reads up to %d", path, version,
                        MOE_STORE_VERSION);
    /* With a log beside it the file may be short: the log holds the rest. */
    char *log = moe_store_join(path, "-wal");
    bool logged = access(log, F_OK) == 0;
    free(log);
    int64_t page_bytes = h.raw[16] << 8 | h.raw[17];
    int64_t need = (page_bytes == 1 ? 65536 : page_bytes) * field(&h, 28);
    if (!logged && h.file_bytes < need)
        return moe_fail(MOE_EINPUT, "%s: truncated: %lld bytes, expected %lld", path, (long long)h.file_bytes,
                        (long long)need);
    return MOE_OK;
}

/* ---- merge ---- */

char *moe_store_part(const char *prefix, int rank)
{
    char suffix[24];
    snprintf(suffix, sizeof suffix, ".rank%d", rank);
    return moe_store_join(prefix, suffix);
}

/* Opening for writing lets SQLite recover what a killed writer left. Then the file leaves WAL mode, which it
 * does only when nobody else has it open: ranks live on for a moment when their mpirun is killed, and for
 * long when only moesim is. */
static int open_alone(const char *part, struct moe_store **out)
{
    enum { TRIES = 100, WAIT_US = 50000 };
    MOE_TRY(moe_store_open(part, MOE_STORE_WRITE, out));
    int err = moe_store_exec(*out, "PRAGMA journal_mode = MEMORY", NULL);
    for (int i = 1; err == MOE_EFAILED && i < TRIES; i++) {
        usleep(WAIT_US);
        err = moe_store_exec(*out, "PRAGMA journal_mode = MEMORY", NULL);
    }
    if (err < 0) moe_store_close(*out);
    return err == MOE_EFAILED ? moe_fail(err, "%s (is its rank still running?)", moe_error()) : err;
}

static int check_part(const char *part)
{
    struct moe_store *s;
    char *text = NULL;
    MOE_TRY(open_alone(part, &s));
    int err = moe_store_exec(s, "PRAGMA quick_check(1)", &text);
    if (err == MOE_OK && (!text || strcmp(text, "ok") != 0))
        err = moe_fail(MOE_EINPUT, "%s: broken: %s", part, text ? text : "no answer");
    free(text);
    moe_store_close(s);
    return err;
}

static int merge_part(struct moe_store *out, const char *part)
{
    char *text = NULL, *attach = sqlite3_mprintf("ATTACH %Q AS part", part);
    int err;
    MOE_TRY_GOTO(moe_store_exec(out, attach, NULL));
    MOE_TRY_GOTO(moe_store_exec(out,
                                "SELECT 'run key ' || key || ' is ' || quote(substr(p.value, 1, 40))"
                                " || ', expected ' || quote(substr(m.value, 1, 40))"
                                " FROM part.run AS p JOIN main.run AS m USING (key)"
                                " WHERE p.value <> m.value LIMIT 1",
                                &text));
    if (text) MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "not of the same run: %s", text));
    /* In order: a plain copy would take the part's indexes too, at which quick_check does not look. */
    MOE_TRY_GOTO(moe_store_exec(out,
                                "BEGIN;"
                                "INSERT OR IGNORE INTO run SELECT * FROM part.run;"
                                "INSERT INTO rank SELECT * FROM part.rank;"
                                "INSERT INTO routing SELECT * FROM part.routing ORDER BY rowid;"
                                "INSERT INTO dropped SELECT * FROM part.dropped;"
                                "INSERT INTO op SELECT * FROM part.op ORDER BY rowid;"
                                "INSERT INTO step SELECT * FROM part.step;"
                                "INSERT INTO tensor SELECT * FROM part.tensor ORDER BY rowid;"
                                "COMMIT; DETACH part",
                                NULL));
done:
    sqlite3_free(attach);
    free(text);
    return err < 0 ? moe_fail(err, "%s: not merged: %s", part, moe_error()) : err;
}

/* A merged file with the name of a part, in whatever words or links, would be removed with the parts. */
static int check_target(const char *path, const char *prefix, int n_ranks)
{
    struct stat target, st;
    if (stat(path, &target) < 0) return MOE_OK;
    bool same = false;
    for (int r = 0; r < n_ranks && !same; r++) {
        char *part = moe_store_part(prefix, r);
        same = stat(part, &st) == 0 && st.st_dev == target.st_dev && st.st_ino == target.st_ino;
        free(part);
    }
    return same ? moe_fail(MOE_EUSAGE, "%s: a rank file of this merge, expected another name", path) : MOE_OK;
}

int moe_store_merge(const char *prefix, int n_ranks, const char *path)
{
    MOE_TRY(check_target(path, prefix, n_ranks));
    char *partial = moe_store_join(path, ".partial"), ranks[16];
    struct moe_store *out = NULL;
    snprintf(ranks, sizeof ranks, "%d", n_ranks);
    int err;
    /* Without a log every failure shows at a commit and none at the close. */
    MOE_TRY_GOTO(moe_store_open(partial, MOE_STORE_BUILD, &out));
    MOE_TRY_GOTO(moe_store_put(out, "ranks", ranks));
    for (int r = 0; r < n_ranks; r++) {
        char *part = moe_store_part(prefix, r);
        err = check_part(part);
        if (err == MOE_OK) err = merge_part(out, part);
        free(part);
        if (err < 0) goto done;
    }
    moe_store_close(out);
    out = NULL;
    MOE_TRY_GOTO(moe_store_rename(partial, path));
    for (int r = 0; r < n_ranks; r++) {
        char *part = moe_store_part(prefix, r);
        moe_store_remove(part);
        free(part);
    }
done:
    moe_store_close(out);
    if (err < 0) moe_store_remove(partial);
    free(partial);
    return err;
}
