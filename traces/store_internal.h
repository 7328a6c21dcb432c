/* store_internal - what store.c (connection, rows), store_tensor.c (rows of tensors) and store_file.c (files,
 * merge) share; nobody else includes it. */
#ifndef MOE_STORE_INTERNAL_H
#define MOE_STORE_INTERNAL_H

#include "traces/store.h"

#include <sqlite3.h>

#define MOE_STORE_APPLICATION_ID 1836017011 /* "moes" */
#define MOE_STORE_VERSION 2

/* clang-format off */
/* Since version 2. */
#define MOE_STORE_TENSOR_COLUMNS \
    "TABLE IF NOT EXISTS tensor(step INTEGER NOT NULL, rank INTEGER NOT NULL, layer INTEGER NOT NULL," \
    " expert INTEGER NOT NULL, place INTEGER NOT NULL, element_bytes INTEGER NOT NULL, n INTEGER NOT NULL," \
    " n_nonfinite INTEGER NOT NULL, hash INTEGER NOT NULL, sum REAL NOT NULL, sum_squares REAL NOT NULL," \
    " role TEXT NOT NULL, name TEXT NOT NULL, presence TEXT NOT NULL, content BLOB," \
    " PRIMARY KEY(step, rank, role, name, layer, expert))"

#define MOE_STORE_QUERIES(X) \
        X(PUT,          "REPLACE INTO run VALUES(?, ?)") \
        X(GET,          "SELECT value FROM run WHERE key = ?") \
        X(ADD_RANK,     "INSERT INTO rank VALUES(?, ?, ?)") \
        X(ADD_ROUTING,  "INSERT INTO routing VALUES(?, ?, ?, ?, ?, ?)") \
        X(ROUTING,      "SELECT n_tokens, top_k, ids FROM routing" \
                        " WHERE step = ? AND layer = ? AND rank = ?") \
        X(EACH_ROUTING, "SELECT step, layer, rank FROM routing WHERE step BETWEEN ? AND ? AND step IN" \
                        " (SELECT step FROM step GROUP BY step HAVING COUNT(*) = ?)" \
                        " ORDER BY rank, step, layer") \
        X(ADD_DROPPED,  "INSERT INTO dropped VALUES(?, ?, ?, ?)") \
        X(ADD_OP,       "INSERT INTO op VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)") \
        X(EACH_OP,      "SELECT step, rank, layer, block, op, entry_ns, start_ns, end_ns, bytes, label," \
                        " kind FROM op WHERE step BETWEEN ? AND ? ORDER BY step, rank, rowid") \
        X(ADD_STEP,     "INSERT INTO step VALUES(?, ?, ?, ?)") \
        X(COMPLETE,     "SELECT step, MAX(wall_ns), CASE WHEN SUM(loss IS NULL AND tokens > 0) = 0 THEN" \
                        " SUM(loss * tokens) / SUM(tokens) END FROM step LEFT JOIN rank USING(rank)" \
                        " GROUP BY step HAVING COUNT(*) = ? ORDER BY step") \
        X(COUNTS,       "SELECT (SELECT COUNT(*) FROM rank), (SELECT COUNT(*) FROM routing)," \
                        " (SELECT COUNT(*) FROM op), (SELECT COUNT(*) FROM result)," \
                        " (SELECT SUM(n_rows) FROM dropped)") \
        X(ADD_RESULT,   "INSERT INTO result VALUES(NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)") \
        X(CLEAR_RESULTS,"DELETE FROM result") \
        X(EACH_RESULT,  "SELECT intra_bytes, inter_bytes, expert_parallel, step_us, compute_us, exposed_us," \
                        " waiting_us, host_us, capacity, dropped_share, scenario, topology, dispatcher," \
                        " rank_order FROM result ORDER BY id") \
        X(ADD_TENSOR,   "INSERT INTO tensor VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)") \
        X(EACH_TENSOR,  "SELECT step, rank, layer, expert, place, element_bytes, n, n_nonfinite, hash, sum," \
                        " sum_squares, role, name, presence FROM tensor WHERE step BETWEEN ? AND ?" \
                        " ORDER BY step, rank, place, layer, expert, name, role") \
        X(VALUES,       "SELECT content FROM tensor WHERE step = ? AND rank = ? AND layer = ?" \
                        " AND expert = ? AND role = ? AND name = ?")
/* clang-format on */
#define X(name, text) Q_##name,
enum moe_store_query { MOE_STORE_QUERIES(X) MOE_STORE_QUERY_COUNT };
#undef X

struct moe_store {
    char *path;
    sqlite3 *db;
    sqlite3_stmt *query[MOE_STORE_QUERY_COUNT];
};

/* Runs statements. first: the first column of the first row as text, to be freed, NULL without a row; may be
 * NULL. Errors: MOE_EINPUT for a broken or foreign file, MOE_EFAILED for the rest. */
int moe_store_exec(struct moe_store *s, const char *sql, char **first);

/* A broken or foreign file is the user's input; the rest is the outside world. */
int moe_store_code(const struct moe_store *s, int rc);
/* The statement with its first n parameters bound. */
sqlite3_stmt *moe_store_bound(struct moe_store *s, enum moe_store_query id, int n, const int64_t *values);
/* clang-format off */
#define INTS(...) sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (const int64_t[]){__VA_ARGS__}
/* clang-format on */
/* Result: 1 with a row, 0 at the end, negative on an error; the statement is reset unless there is a row. */
int moe_store_next(struct moe_store *s, sqlite3_stmt *q);
void moe_store_bind_text(sqlite3_stmt *q, int i, const char *text);
void moe_store_copy_text(char *out, size_t size, sqlite3_stmt *q, int column);
/* Columns `from` to `to` of a row number ranks, layers, blocks: the file may hold anything there. */
int moe_store_check_indices(const struct moe_store *s, sqlite3_stmt *q, int from, int to);

char *moe_store_join(const char *path, const char *suffix); /* path and suffix in one, to be freed */
/* Errors: MOE_EINPUT when the file is no store that this program reads, or is shorter
 * than its header says. */
int moe_store_check_file(const char *path);

#endif
