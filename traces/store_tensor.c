/* store_tensor.c - see store.h: fingerprints of parameters and gradients. */
#include "traces/store_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
const char *const moe_tensor_role_text[] = {MOE_TENSOR_ROLES(X)};
const char *const moe_presence_text[] = {MOE_PRESENCES(X)};
#undef X

int moe_store_add_tensor(struct moe_store *s, const struct moe_store_tensor *t)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_ADD_TENSOR,
                                      INTS(t->step, t->rank, t->layer, t->expert, t->place, t->element_bytes,
                                           t->n, t->n_nonfinite, (int64_t)t->hash));
    sqlite3_bind_double(q, 10, t->sum);
    sqlite3_bind_double(q, 11, t->sum_squares);
    moe_store_bind_text(q, 12, moe_tensor_role_text[t->role]);
    moe_store_bind_text(q, 13, t->name);
    moe_store_bind_text(q, 14, moe_presence_text[t->presence]);
    int rc = t->content
                 ? sqlite3_bind_blob64(q, 15, t->content,
                                       (sqlite3_uint64)t->n * (sqlite3_uint64)t->element_bytes, SQLITE_STATIC)
                 : sqlite3_bind_null(q, 15);
    MOE_TRY(moe_store_code(s, rc));
    return moe_store_next(s, q);
}

/* The place of a word in a list, or -1. */
static int place_of(const char *word, const char *const *list, int n)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(word, list[i])) return i;
    return -1;
}

/* It stands in messages and in JSON. */
static bool is_printable(const char *name)
{
    for (const char *p = name; *p; p++)
        if (*p <= ' ' || *p > '~') return false;
    return *name != '\0';
}

/* Integers, reals, text: the file may hold anything there. */
static bool has_types(sqlite3_stmt *q)
{
    for (int i = 0; i <= 13; i++) {
        const int type = sqlite3_column_type(q, i), expected = i < 9    ? SQLITE_INTEGER
                                                               : i < 11 ? SQLITE_FLOAT
                                                                        : SQLITE_TEXT;
        if (type != expected) return false;
    }
    return true;
}

static bool is_within(sqlite3_stmt *q, int column, int64_t low, int64_t high)
{
    const int64_t value = sqlite3_column_int64(q, column);
    return value >= low && value <= high;
}

/* What does not fit into the fields of a row, or makes no number of bytes. */
static bool fits(sqlite3_stmt *q)
{
    return is_within(q, 1, 0, INT32_MAX) && is_within(q, 2, -1, UINT16_MAX) &&
           is_within(q, 3, -1, UINT16_MAX) && is_within(q, 4, 0, INT32_MAX) && is_within(q, 5, 2, 8) &&
           is_within(q, 6, 0, INT64_MAX / 8);
}

static int read_row(struct moe_store *s, sqlite3_stmt *q, struct moe_store_tensor *t)
{
    char role[MOE_NAME], presence[MOE_NAME];
    const bool right = has_types(q) && fits(q); /* before text is made of it */
    *t = (struct moe_store_tensor){
        .step = sqlite3_column_int64(q, 0),
        .rank = sqlite3_column_int(q, 1),
        .layer = sqlite3_column_int(q, 2),
        .expert = sqlite3_column_int(q, 3),
        .place = sqlite3_column_int(q, 4),
        .element_bytes = sqlite3_column_int(q, 5),
        .n = sqlite3_column_int64(q, 6),
        .n_nonfinite = sqlite3_column_int64(q, 7),
        .hash = (uint64_t)sqlite3_column_int64(q, 8),
        .sum = sqlite3_column_double(q, 9),
        .sum_squares = sqlite3_column_double(q, 10),
    };
    moe_store_copy_text(role, sizeof role, q, 11);
    moe_store_copy_text(t->name, sizeof t->name, q, 12);
    moe_store_copy_text(presence, sizeof presence, q, 13);
    const int r = place_of(role, moe_tensor_role_text, MOE_TENSOR_ROLE_COUNT),
              p = place_of(presence, moe_presence_text, MOE_PRESENCE_COUNT);
    if (!right || r < 0 || p < 0 || !is_printable(t->name) || t->n_nonfinite < 0 || t->n_nonfinite > t->n ||
        (t->element_bytes != 2 && t->element_bytes != 4 && t->element_bytes != 8) || !(t->sum_squares >= 0))
        return moe_fail(MOE_EINPUT, "%s: step %lld, rank %lld: the row of tensor %s '%s' (%s) cannot be",
                        s->path, (long long)t->step, (long long)sqlite3_column_int64(q, 1), role, t->name,
                        presence);
    t->role = (enum moe_tensor_role)r;
    t->presence = (enum moe_presence)p;
    return MOE_OK;
}

int moe_store_each_tensor(struct moe_store *s, int64_t step_from, int64_t step_to,
                          int (*fn)(void *ctx, const struct moe_store_tensor *t), void *ctx)
{
    sqlite3_stmt *q = moe_store_bound(s, Q_EACH_TENSOR, INTS(step_from, step_to));
    int more;
    while ((more = moe_store_next(s, q)) > 0) {
        struct moe_store_tensor t;
        more = read_row(s, q, &t);
        if (more >= 0) more = fn(ctx, &t);
        if (more < 0) break;
    }
    sqlite3_reset(q);
    return more;
}

int moe_store_tensor_content(struct moe_store *s, const struct moe_store_tensor *t, void **out)
{
    *out = NULL;
    sqlite3_stmt *q = moe_store_bound(s, Q_VALUES, INTS(t->step, t->rank, t->layer, t->expert));
    moe_store_bind_text(q, 5, moe_tensor_role_text[t->role]);
    moe_store_bind_text(q, 6, t->name);
    int more = moe_store_next(s, q);
    if (more <= 0) return more;
    const void *blob = sqlite3_column_blob(q, 0);
    const int64_t bytes = sqlite3_column_bytes(q, 0);
    int err = MOE_OK;
    if (blob && (bytes % t->element_bytes || bytes / t->element_bytes != t->n)) {
        err = moe_fail(MOE_EINPUT, "%s: step %lld, rank %d: %s holds %lld bytes, expected %lld x %d", s->path,
                       (long long)t->step, t->rank, t->name, (long long)bytes, (long long)t->n,
                       t->element_bytes);
    } else if (blob) {
        *out = moe_alloc((size_t)bytes, 1);
        memcpy(*out, blob, (size_t)bytes);
    }
    sqlite3_reset(q);
    return err;
}
