/* store.c - see store.h: the connection and the rows. Tables, columns and rules of the file are in SCHEMA.md.
 *
 * A new file is built beside and renamed, so that a store has its tables or is not there. While open for
 * writing it is in WAL mode with one transaction a step; closing leaves a single file. There is never a
 * rollback journal on disk: one left by a killed writer would stop readers, who may not write. The switches
 * into and out of WAL mode change one page, in one write. */
#include "traces/store_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

/* clang-format off */
static const char schema[] =
    "PRAGMA page_size = 16384; PRAGMA journal_mode = MEMORY; BEGIN;" /* a file that fails is thrown away */
    "PRAGMA application_id = " TEXT(MOE_STORE_APPLICATION_ID) ";"
    "PRAGMA user_version = " TEXT(MOE_STORE_VERSION) ";"
    "CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE rank(rank INTEGER PRIMARY KEY, tokens INTEGER NOT NULL, pid INTEGER NOT NULL);"
    "CREATE TABLE routing(step INTEGER NOT NULL, layer INTEGER NOT NULL, rank INTEGER NOT NULL,"
    " n_tokens INTEGER NOT NULL, top_k INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY(step, layer, rank));"
    "CREATE TABLE dropped(step INTEGER NOT NULL, layer INTEGER NOT NULL, rank INTEGER NOT NULL,"
    " n_rows INTEGER NOT NULL, PRIMARY KEY(step, layer, rank)) WITHOUT ROWID;"
    "CREATE TABLE op(step INTEGER NOT NULL, rank INTEGER NOT NULL, layer INTEGER NOT NULL,"
    " block INTEGER NOT NULL, op INTEGER NOT NULL, entry_ns INTEGER NOT NULL, start_ns INTEGER NOT NULL,"
    " end_ns INTEGER NOT NULL, bytes INTEGER NOT NULL, label TEXT NOT NULL, kind TEXT NOT NULL);"
    "CREATE INDEX op_by_step ON op(step, rank);"
    "CREATE TABLE step(step INTEGER NOT NULL, rank INTEGER NOT NULL, wall_ns INTEGER NOT NULL, loss REAL,"
    " PRIMARY KEY(step, rank)) WITHOUT ROWID;"
    "CREATE TABLE result(id INTEGER PRIMARY KEY, intra_bytes INTEGER NOT NULL, inter_bytes INTEGER NOT NULL,"
    " expert_parallel INTEGER NOT NULL, step_us REAL NOT NULL, compute_us REAL NOT NULL,"
    " exposed_us REAL NOT NULL, waiting_us REAL NOT NULL, host_us REAL NOT NULL, capacity REAL NOT NULL,"
    " dropped_share REAL NOT NULL, scenario TEXT NOT NULL, topology TEXT NOT NULL, dispatcher TEXT NOT NULL,"
    " rank_order TEXT NOT NULL);"
    "CREATE " MOE_STORE_TENSOR_COLUMNS ";"
    "COMMIT; PRAGMA journal_mode = WAL";

#define X(name, text) text,
static const char *const query_text[] = {MOE_STORE_QUERIES(X)};
#undef X
/* clang-format on */

/* ---- SQLite's answers ---- */

int moe_store_code(const struct moe_store *s, int rc)
{
    int kind = rc & 0xff; /* without the extended part */
    if (kind == SQLITE_OK || kind == SQLITE_ROW || kind == SQLITE_DONE) return MOE_OK;
    bool content =
        kind == SQLITE_CORRUPT || kind == SQLITE_NOTADB || kind == SQLITE_ERROR || kind == SQLITE_CONSTRAINT;
    int os = kind == SQLITE_CANTOPEN || kind == SQLITE_IOERR ? sqlite3_system_errno(s->db) : 0;
    return moe_fail(content ? MOE_EINPUT : MOE_EFAILED, "%s: %s%s%s", s->path, sqlite3_errmsg(s->db),
                    os ? ": " : "", os ? strerror(os) : "");
}

static int keep_first(void *first, int n, char **text, char **names)
{
    (void)n, (void)names;
    char **kept = first;
    if (kept && !*kept) *kept = moe_store_join(text[0] ? text[0] : "", "");
    return 0;
}

int moe_store_exec(struct moe_store *s, const char *sql, char **first)
{
    return moe_store_code(s, sqlite3_exec(s->db, sql, keep_first, first, NULL));
}

sqlite3_stmt *moe_store_bound(struct moe_store *s, enum moe_store_query id, int n, const int64_t *values)
{
    sqlite3_stmt *q = s->query[id];
    moe_assert(!sqlite3_stmt_busy(q)); /* a callback of each_op may not call each_op */
    for (int i = 0; i < n; i++) sqlite3_bind_int64(q, i + 1, values[i]);
    return q;
}

int moe_store_next(struct moe_store *s, sqlite3_stmt *q)
{
    int rc = sqlite3_step(q);
    if (rc == SQLITE_ROW) return 1;
    int err = moe_store_code(s, rc);
    sqlite3_reset(q);
    return err;
}

void moe_store_bind_text(sqlite3_stmt *q, int i, const char *text)
{
    sqlite3_bind_text(q, i, text, -1, SQLITE_STATIC);
}

void moe_store_copy_text(char *out, size_t size, sqlite3_stmt *q, int column)
{
    const unsigned char *text = sqlite3_column_text(q, column);
    snprintf(out, size, "%s", text ? (const char *)text : "");
}

/* ---- open and close ---- */

static int create(const char *path)
{
    struct moe_store s = {.path = moe_store_join(path, ".new")};
    moe_store_remove(s.path);
    int err =
        moe_store_code(&s, sqlite3_open_v2(s.path, &s.db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL));
    if (err == MOE_OK) err = moe_store_exec(&s, schema, NULL);
    sqlite3_close(s.db);
    if (err == MOE_OK) err = moe_store_rename(s.path, path);
    if (err < 0) moe_store_remove(s.path);
    free(s.path);
    return err;
}

/* Reads at once: only then does the connection hold the lock that tells a merge that the file is in use. */
static int enter_wal(struct moe_store *s)
{
    char *journal = NULL;
    int err = moe_store_exec(s, "PRAGMA journal_mode", &journal);
    if (err == MOE_OK && journal && strcmp(journal, "wal") != 0)
        err = moe_store_exec(s, "PRAGMA journal_mode = MEMORY; PRAGMA journal_mode = WAL", NULL);
    free(journal);
    return err < 0 ? err : moe_store_exec(s, "PRAGMA synchronous = NORMAL; PRAGMA user_version", NULL);
}

/* What an older file lacks. Who only reads has the empty table beside the file. */
static int migrate(struct moe_store *s, enum moe_store_mode mode)
{
    char *version = NULL;
    MOE_TRY(moe_store_exec(s, "PRAGMA user_version", &version));
    const bool old = version && atoi(version) < MOE_STORE_VERSION;
    free(version);
    if (!old) return MOE_OK;
    if (mode == MOE_STORE_READ) return moe_store_exec(s, "CREATE TEMP " MOE_STORE_TENSOR_COLUMNS, NULL);
    MOE_TRY(moe_store_exec(s, "BEGIN IMMEDIATE", NULL));
    return moe_store_exec(
        s, "CREATE " MOE_STORE_TENSOR_COLUMNS ";PRAGMA user_version = " TEXT(MOE_STORE_VERSION) "; COMMIT",
        NULL);
}

int moe_store_open(const char *path, enum moe_store_mode mode, struct moe_store **out)
{
    *out = NULL;
    if (mode >= MOE_STORE_CREATE) MOE_TRY(create(path));
    MOE_TRY(moe_store_check_file(path));
    struct moe_store *s = moe_alloc(1, sizeof *s);
    s->path = moe_store_join(path, "");
    int flags = mode == MOE_STORE_READ ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE, err;
    MOE_TRY_GOTO(moe_store_code(s, sqlite3_open_v2(path, &s->db, flags, NULL)));
    sqlite3_busy_timeout(s->db, 5000);
    /* SQLite falls back to reading when it may not write. */
    if (mode != MOE_STORE_READ && sqlite3_db_readonly(s->db, "main"))
        MOE_TRY_GOTO(moe_fail(MOE_EFAILED, "%s: not writable", path));
    if (mode == MOE_STORE_BUILD)
        MOE_TRY_GOTO(moe_store_exec(s, "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = FULL", NULL));
    else if (mode != MOE_STORE_READ)
        MOE_TRY_GOTO(enter_wal(s));
    MOE_TRY_GOTO(migrate(s, mode));
    for (int i = 0; i < MOE_STORE_QUERY_COUNT; i++) /* also finds out whether the tables are there */
        MOE_TRY_GOTO(moe_store_code(
            s, sqlite3_prepare_v3(s->db, query_text[i], -1, SQLITE_PREPARE_PERSISTENT, &s->query[i], NULL)));
    *out = s;
    return MOE_OK;
done:
    moe_store_close(s);
    return err;
}

void moe_store_close(struct moe_store *s)
{
    if (!s) return;
    for (int i = 0; i < MOE_STORE_QUERY_COUNT; i++) sqlite3_finalize(s->query[i]);
    if (s->db && !sqlite3_db_readonly(s->db, "main")) {
        sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL); /* of a step that was not committed */
        sqlite3_exec(s->db, "PRAGMA journal_mode = MEMORY", NULL, NULL, NULL);
    }
    sqlite3_close(s->db);
    free(s->path);
    free(s);
}

/* ---- the run ---- */

int moe_store_put(struct moe_store *s, const char *key, const char *value)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_PUT, 0, NULL);
    moe_store_bind_text(q, 1, key);
    moe_store_bind_text(q, 2, value);
    return moe_store_next(s, q);
}

int moe_store_get(struct moe_store *s, const char *key, char **value)
{
    *value = NULL;
    sqlite3_stmt *q = moe_store_bound(s, Q_GET, 0, NULL);
    moe_store_bind_text(q, 1, key);
    int more = moe_store_next(s, q);
    if (more <= 0) return more;
    const unsigned char *text = sqlite3_column_text(q, 0);
    *value = moe_store_join(text ? (const char *)text : "", "");
    sqlite3_reset(q);
    return MOE_OK;
}

/* A whole number of the run; *out stays when the key is absent. */
static int get_number(struct moe_store *s, const char *key, int64_t limit, int64_t *out)
{
    char *text, *end;
    MOE_TRY(moe_store_get(s, key, &text));
    if (!text) return MOE_OK;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    int err = MOE_OK;
    if (errno || end == text || *end || number < 0 || number > limit)
        err =
            moe_fail(MOE_EINPUT, "%s: run key '%s' is '%.40s', expected a whole number", s->path, key, text);
    else
        *out = number;
    free(text);
    return err;
}

/* ---- a step ---- */

int moe_store_begin(struct moe_store *s)
{
    return moe_store_exec(s, "BEGIN IMMEDIATE", NULL);
}

int moe_store_commit(struct moe_store *s)
{
    return moe_store_exec(s, "COMMIT", NULL);
}

int moe_store_add_rank(struct moe_store *s, const struct moe_store_rank *r)
{
    return moe_store_next(s, moe_store_bound(s, Q_ADD_RANK, INTS(r->rank, r->tokens, r->pid)));
}

int moe_store_add_routing(struct moe_store *s, int64_t step, int layer, int rank, int64_t n_tokens, int top_k,
                          const int32_t *ids)
{
    size_t n = (size_t)n_tokens * (size_t)top_k;
    unsigned char *blob = moe_alloc(n, 2);
    int err = MOE_OK;
    for (size_t i = 0; i < n && err == MOE_OK; i++) {
        if (ids[i] < 0 || ids[i] > UINT16_MAX)
            err = moe_fail(MOE_EINPUT, "%s: expert %d, expected 0 to 65535", s->path, ids[i]);
        blob[2 * i] = (unsigned char)ids[i];
        blob[2 * i + 1] = (unsigned char)(ids[i] >> 8);
    }
    if (err == MOE_OK) {
        sqlite3_stmt *q = moe_store_bound(s, Q_ADD_ROUTING, INTS(step, layer, rank, n_tokens, top_k));
        err = moe_store_code(s, sqlite3_bind_blob64(q, 6, blob, 2 * n, SQLITE_STATIC));
        if (err == MOE_OK) err = moe_store_next(s, q);
    }
    free(blob);
    return err;
}

int moe_store_routing(struct moe_store *s, int64_t step, int layer, int rank, int64_t *n_tokens, int *top_k,
                      int32_t **ids)
{
    *ids = NULL;
    sqlite3_stmt *q = moe_store_bound(s, Q_ROUTING, INTS(step, layer, rank));
    int more = moe_store_next(s, q);
    if (more <= 0) return more;
    int64_t tokens = sqlite3_column_int64(q, 0), k = sqlite3_column_int64(q, 1);
    const unsigned char *blob = sqlite3_column_blob(q, 2);
    int64_t bytes = sqlite3_column_bytes(q, 2);
    int err = MOE_OK;
    if (k < 1 || k > UINT16_MAX || bytes % (2 * k) || bytes / (2 * k) != tokens) {
        err = moe_fail(
            MOE_EINPUT, "%s: routing of step %lld, layer %d, rank %d: %lld bytes, expected %lld x %lld ids",
            s->path, (long long)step, layer, rank, (long long)bytes, (long long)tokens, (long long)k);
    } else {
        *n_tokens = tokens;
        *top_k = (int)k;
        *ids = moe_alloc((size_t)bytes / 2, sizeof **ids);
        for (int64_t i = 0; i < bytes / 2; i++) (*ids)[i] = blob[2 * i] | blob[2 * i + 1] << 8;
    }
    sqlite3_reset(q);
    return err;
}

int moe_store_check_indices(const struct moe_store *s, sqlite3_stmt *q, int from, int to)
{
    for (int i = from; i <= to; i++) {
        int64_t value = sqlite3_column_int64(q, i);
        if (value < 0 || value > INT32_MAX)
            return moe_fail(MOE_EINPUT, "%s: step %lld: %s is %lld, expected 0 to %d", s->path,
                            (long long)sqlite3_column_int64(q, 0), sqlite3_column_name(q, i),
                            (long long)value, INT32_MAX);
    }
    return MOE_OK;
}

int moe_store_each_routing(struct moe_store *s, int64_t step_from, int64_t step_to,
                           int (*fn)(void *ctx, int64_t step, int layer, int rank), void *ctx)
{
    struct moe_store_info info;
    MOE_TRY(moe_store_info(s, &info));
    sqlite3_stmt *q = moe_store_bound(s, Q_EACH_ROUTING, INTS(step_from, step_to, info.n_ranks));
    int more;
    while ((more = moe_store_next(s, q)) > 0) {
        more = moe_store_check_indices(s, q, 1, 2);
        if (more >= 0)
            more = fn(ctx, sqlite3_column_int64(q, 0), sqlite3_column_int(q, 1), sqlite3_column_int(q, 2));
        if (more < 0) break;
    }
    sqlite3_reset(q);
    return more;
}

int moe_store_add_routed(struct moe_store *s)
{
    return moe_store_exec(s,
                          "INSERT INTO rank SELECT rank, MAX(n_tokens), 0 FROM routing GROUP BY rank;"
                          "INSERT INTO step SELECT DISTINCT step, rank, 0, NULL FROM routing",
                          NULL);
}

int moe_store_add_dropped(struct moe_store *s, int64_t step, int layer, int rank, int64_t n_rows)
{
    return moe_store_next(s, moe_store_bound(s, Q_ADD_DROPPED, INTS(step, layer, rank, n_rows)));
}

int moe_store_add_op(struct moe_store *s, const struct moe_store_op *op)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_ADD_OP,
                                      INTS(op->step, op->rank, op->layer, op->block, op->op, op->entry_ns,
                                           op->start_ns, op->end_ns, op->bytes));
    moe_store_bind_text(q, 10, op->label);
    moe_store_bind_text(q, 11, op->kind);
    return moe_store_next(s, q);
}

int moe_store_add_step(struct moe_store *s, int64_t step, int rank, double loss, int64_t wall_ns)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_ADD_STEP, INTS(step, rank, wall_ns));
    sqlite3_bind_double(q, 4, loss); /* SQLite keeps NaN as NULL */
    return moe_store_next(s, q);
}

int moe_store_each_op(struct moe_store *s, int64_t step_from, int64_t step_to,
                      int (*fn)(void *ctx, const struct moe_store_op *op), void *ctx)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_EACH_OP, INTS(step_from, step_to));
    int more;
    while ((more = moe_store_next(s, q)) > 0) {
        more = moe_store_check_indices(s, q, 1, 4);
        if (more < 0) break;
        struct moe_store_op op = {
            .step = sqlite3_column_int64(q, 0),
            .rank = sqlite3_column_int(q, 1),
            .layer = sqlite3_column_int(q, 2),
            .block = sqlite3_column_int(q, 3),
            .op = sqlite3_column_int(q, 4),
            .entry_ns = sqlite3_column_int64(q, 5),
            .start_ns = sqlite3_column_int64(q, 6),
            .end_ns = sqlite3_column_int64(q, 7),
            .bytes = sqlite3_column_int64(q, 8),
        };
        moe_store_copy_text(op.label, sizeof op.label, q, 9);
        moe_store_copy_text(op.kind, sizeof op.kind, q, 10);
        bool in_order = 0 <= op.entry_ns && op.entry_ns <= op.start_ns && op.start_ns <= op.end_ns;
        more = in_order ? fn(ctx, &op)
                        : moe_fail(MOE_EINPUT, "%s: step %lld, rank %d: '%s' ends before it begins", s->path,
                                   (long long)op.step, op.rank, op.label);
        if (more < 0) break;
    }
    sqlite3_reset(q);
    return more;
}

/* ---- what the store holds ---- */

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int complete_steps(struct moe_store *s, struct moe_store_info *out)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_COMPLETE, INTS(out->n_ranks));
    int64_t *wall_ns = NULL;
    int n = 0, cap = 0, more;
    while ((more = moe_store_next(s, q)) > 0) {
        wall_ns = moe_grow(wall_ns, &cap, n + 1, sizeof *wall_ns);
        wall_ns[n++] = sqlite3_column_int64(q, 1);
        out->last_step = sqlite3_column_int64(q, 0);
        /* The mean of a loss that is not a number is none either. */
        out->last_loss = sqlite3_column_type(q, 2) == SQLITE_NULL ? (double)NAN : sqlite3_column_double(q, 2);
        if (n > 1) continue;
        out->first_step = out->last_step;
        out->first_loss = out->last_loss;
    }
    if (n) {
        qsort(wall_ns, (size_t)n, sizeof *wall_ns, by_value);
        out->median_step_us = ((double)wall_ns[(n - 1) / 2] + (double)wall_ns[n / 2]) / 2 / 1e3;
    }
    out->steps_complete = n;
    free(wall_ns);
    return more;
}

int moe_store_info(struct moe_store *s, struct moe_store_info *out)
{
    *out = (struct moe_store_info){.last_step = -1};
    sqlite3_stmt *q = moe_store_bound(s, Q_COUNTS, 0, NULL);
    int more = moe_store_next(s, q);
    if (more < 0) return more;
    int64_t ranks = sqlite3_column_int64(q, 0), layers = 0, experts = 0, top_k = 0;
    out->n_routing = sqlite3_column_int64(q, 1);
    out->n_ops = sqlite3_column_int64(q, 2);
    out->n_results = sqlite3_column_int64(q, 3);
    out->n_dropped = sqlite3_column_int64(q, 4);
    sqlite3_reset(q);
    MOE_TRY(get_number(s, "ranks", INT32_MAX, &ranks));
    MOE_TRY(get_number(s, "layers", INT32_MAX, &layers));
    MOE_TRY(get_number(s, "experts", UINT16_MAX + 1, &experts));
    MOE_TRY(get_number(s, "top_k", UINT16_MAX, &top_k));
    MOE_TRY(get_number(s, "steps", INT64_MAX, &out->steps_asked));
    out->n_ranks = (int)ranks;
    out->n_layers = (int)layers;
    out->n_experts = (int)experts;
    out->top_k = (int)top_k;
    MOE_TRY(complete_steps(s, out));
    out->complete = out->steps_asked > 0 && out->steps_complete == out->steps_asked;
    return MOE_OK;
}

/* ---- results ---- */

int moe_store_add_result(struct moe_store *s, const struct moe_store_result *r)
{
    sqlite3_stmt *q =
        moe_store_bound(s, Q_ADD_RESULT, INTS(r->intra_bytes, r->inter_bytes, r->expert_parallel));
    const double real[] = {r->step_us, r->compute_us, r->exposed_us,   r->waiting_us,
                           r->host_us, r->capacity,   r->dropped_share};
    const char *const text[] = {r->scenario, r->topology, r->dispatcher, r->rank_order};
    for (int i = 0; i < 7; i++) sqlite3_bind_double(q, 4 + i, real[i]);
    for (int i = 0; i < 4; i++) moe_store_bind_text(q, 11 + i, text[i]);
    return moe_store_next(s, q);
}

int moe_store_clear_results(struct moe_store *s)
{
    return moe_store_next(s, moe_store_bound(s, Q_CLEAR_RESULTS, 0, NULL));
}

int moe_store_each_result(struct moe_store *s, int (*fn)(void *ctx, const struct moe_store_result *r),
                          void *ctx)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_EACH_RESULT, 0, NULL);
    int more;
    while ((more = moe_store_next(s, q)) > 0) {
        struct moe_store_result r = {
            .intra_bytes = sqlite3_column_int64(q, 0),
            .inter_bytes = sqlite3_column_int64(q, 1),
            .expert_parallel = sqlite3_column_int64(q, 2),
            .step_us = sqlite3_column_double(q, 3),
            .compute_us = sqlite3_column_double(q, 4),
            .exposed_us = sqlite3_column_double(q, 5),
            .waiting_us = sqlite3_column_double(q, 6),
            .host_us = sqlite3_column_double(q, 7),
            .capacity = sqlite3_column_double(q, 8),
            .dropped_share = sqlite3_column_double(q, 9),
        };
        moe_store_copy_text(r.scenario, sizeof r.scenario, q, 10);
        moe_store_copy_text(r.topology, sizeof r.topology, q, 11);
        moe_store_copy_text(r.dispatcher, sizeof r.dispatcher, q, 12);
        moe_store_copy_text(r.rank_order, sizeof r.rank_order, q, 13);
        more = fn(ctx, &r);
        if (more < 0) break;
    }
    sqlite3_reset(q);
    return more;
}
