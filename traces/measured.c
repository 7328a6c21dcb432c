/* measured.c - see measured.h: the file, CSV, and what the sources share. */
#include "traces/measured.h"

#include "traces/format.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const char *const ops[] = {"alltoall", "allgather", "reducescatter", "allreduce"};
enum { N_OPS = sizeof ops / sizeof *ops };

/* ---- what the sources share ---- */

const char *moe_measured_op(const char *name)
{
    char plain[MOE_NAME];
    size_t n = 0;
    for (; *name && n + 1 < sizeof plain; name++)
        if (*name != '_' && *name != '-') plain[n++] = (char)tolower((unsigned char)*name);
    plain[n] = '\0';
    if (n > 4 && !strcmp(plain + n - 4, "perf")) plain[n - 4] = '\0';
    const char *bare = strstr(plain, "nccl") == plain ? plain + 4 : plain;
    for (int i = 0; i < N_OPS && !*name; i++)
        if (!strcmp(bare, ops[i])) return ops[i];
    return NULL;
}

const char *moe_measured_program(const char *text)
{
    static const char *const others[] = {"alltoallv", "broadcast", "gather",   "hypercube",
                                         "reduce",    "scatter",   "sendrecv", NULL};
    for (const char *end = text; (end = strchr(end, '_')); end++) {
        if (strncmp(end, "_perf", 5) != 0) continue;
        char name[MOE_NAME];
        const char *start = end;
        while (start > text && end - start < MOE_NAME - 1 &&
               (isalpha((unsigned char)start[-1]) || start[-1] == '_'))
            start--;
        snprintf(name, sizeof name, "%.*s", (int)(end - start), start);
        const char *op = moe_measured_op(name);
        for (int i = 0; !op && others[i]; i++)
            if (!strcmp(name, others[i])) op = "";
        if (op) return op;
    }
    return NULL;
}

char *moe_measured_line(char **at)
{
    char *line = *at;
    if (!*line) return NULL;
    size_t n = strcspn(line, "\n");
    *at = line + n + (line[n] == '\n');
    line[n] = '\0';
    if (n > 0 && line[n - 1] == '\r') line[n - 1] = '\0';
    return line;
}

bool moe_measured_number(const char *text, double *out)
{
    char *end;
    *out = moe_decimal(text, &end);
    return end != text && !*end;
}

void moe_measured_add(struct moe_measured *out, struct moe_measured_row row, const char *op, double bytes,
                      const double us[2])
{
    double time_us = isfinite(us[0]) && us[0] > 0 ? us[0] : us[1];
    bool good = *op && bytes >= 1 && bytes < 0x1p53 && bytes == floor(bytes);
    row.time_s = time_us * 1e-6;
    if (!good || !isfinite(row.time_s) || !(row.time_s > 0)) {
        out->n_skipped++;
        return;
    }
    moe_copy_name(row.op, op);
    row.bytes = (int64_t)bytes;
    out->rows = moe_grow(out->rows, &out->cap, out->n + 1, sizeof *out->rows);
    out->rows[out->n++] = row;
}

int moe_measured_per_process(double threads, double gpus)
{
    double n = threads * gpus;
    return n >= 1 && n < MOE_MEASURED_RANKS ? (int)n : 1;
}

void moe_measured_add_device(struct moe_measured_devices *d, double rank, int group, const char *host)
{
    if (!(rank >= 0 && rank < MOE_MEASURED_RANKS)) return;
    int process = (int)rank / (d->per_process ? d->per_process : 1);
    d->items = moe_grow(d->items, &d->cap, d->n + 1, sizeof *d->items);
    d->items[d->n++] = (struct moe_measured_device){process, group, moe_hash_name(host)};
}

static int by_process(const void *a, const void *b)
{
    const struct moe_measured_device *x = a, *y = b;
    return (x->process > y->process) - (x->process < y->process);
}

static int by_host(const void *a, const void *b)
{
    const struct moe_measured_device *x = a, *y = b;
    return (x->host > y->host) - (x->host < y->host);
}

static int count_distinct(struct moe_measured_device *items, int n,
                          int (*compare)(const void *, const void *))
{
    int n_distinct = n > 0;
    qsort(items, (size_t)n, sizeof *items, compare);
    for (int i = 1; i < n; i++) n_distinct += compare(&items[i - 1], &items[i]) != 0;
    return n_distinct;
}

void moe_measured_count(struct moe_measured_devices *d, int *ranks, int *nodes)
{
    int n = 0;
    for (int i = 0; i < d->n; i++)
        if (d->items[i].group == d->items[0].group) d->items[n++] = d->items[i];
    d->n = n;
    *nodes = n ? count_distinct(d->items, n, by_host) : 0;
    *ranks = n ? count_distinct(d->items, n, by_process) * (d->per_process ? d->per_process : 1) : 0;
}

/* ---- CSV ---- */

enum column { OP, TYPE, RANKS, NODES, SIZE, OUT_OF_PLACE, IN_PLACE, MACHINE, N_COLUMNS };
static const char *const column_names[N_COLUMNS][2] = {
    {"op"},
    {"dtype", "type"},
    {"num_gpus", "gpus"},
    {"nodes"},
    {"size_bytes", "bytes"},
    {"time_us", "oop_time_us"},
    {"ip_time_us"},
    {"machine"},
};
enum { MOST_FIELDS = 64 };

/* Cuts a line into its fields, without quotes and outer spaces. -1 when a quote has no end, or there are too
 * many. */
static int split_fields(char *p, char *field[MOST_FIELDS])
{
    int n = 0;
    for (bool last = false; !last; p++) {
        bool quoted = false;
        if (n == MOST_FIELDS) return -1;
        p += strspn(p, " \t");
        char *to = field[n++] = p;
        for (; *p && (quoted || *p != ','); p++) {
            if (*p == '"' && !(quoted && p[1] == '"')) {
                quoted = !quoted;
                continue;
            }
            if (*p == '"') p++;
            *to++ = *p;
        }
        if (quoted) return -1;
        last = !*p;
        while (to > field[n - 1] && isblank((unsigned char)to[-1])) to--;
        *to = '\0';
    }
    return n;
}

static int column_of(const char *name)
{
    for (int c = 0; c < N_COLUMNS; c++)
        for (int i = 0; i < 2 && column_names[c][i]; i++)
            if (!strcasecmp(name, column_names[c][i])) return c;
    return -1;
}

/* Whether the first line that is no note has a column that we know: a log's has none. */
static bool is_csv(const char *text)
{
    char *field[MOST_FIELDS];
    bool found = false;
    while (*text == '#' || *text == '\n' || *text == '\r') {
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    char *line = strndup(text, strcspn(text, "\r\n"));
    int n = split_fields(line, field);
    for (int i = 0; n > 1 && i < n && !found; i++) found = column_of(field[i]) >= 0;
    free(line);
    return found;
}

/* *out: NAN when nothing is there. */
static int read_number(enum column c, char *const *field, const int *place, double *out)
{
    const char *text = place[c] < 0 ? "" : field[place[c]];
    *out = NAN;
    if (!*text || !strcmp(text, "N/A") || moe_measured_number(text, out)) return MOE_OK;
    return moe_fail(MOE_EINPUT, "'%.40s' in column %s, expected a number", text, column_names[c][0]);
}

static int read_row(char *const *field, const int *place, struct moe_measured *out, int line)
{
    struct moe_measured_row row = {.line = line};
    const char *op = moe_measured_op(field[place[OP]]);
    double ranks, nodes, bytes, us[2];
    MOE_TRY(read_number(RANKS, field, place, &ranks));
    MOE_TRY(read_number(NODES, field, place, &nodes));
    MOE_TRY(read_number(SIZE, field, place, &bytes));
    MOE_TRY(read_number(OUT_OF_PLACE, field, place, &us[0]));
    MOE_TRY(read_number(IN_PLACE, field, place, &us[1]));
    if (!(ranks >= 1 && ranks <= MOE_MEASURED_RANKS && ranks == floor(ranks)))
        return moe_fail(MOE_EINPUT, "'%.40s' in column num_gpus, expected a number of ranks",
                        field[place[RANKS]]);
    if (!isnan(nodes) && !(nodes >= 1 && nodes <= ranks && nodes == floor(nodes)))
        return moe_fail(MOE_EINPUT, "'%.40s' in column nodes, expected a number from 1 to num_gpus",
                        field[place[NODES]]);
    row.ranks = (int)ranks;
    row.nodes = isnan(nodes) ? 0 : (int)nodes;
    if (place[TYPE] >= 0) moe_copy_name(row.type, field[place[TYPE]]);
    if (place[MACHINE] >= 0) moe_copy_name(row.machine, field[place[MACHINE]]);
    moe_measured_add(out, row, op ? op : "", bytes, us);
    return MOE_OK;
}

static int read_header(char *const *field, int n, int *place)
{
    for (int c = 0; c < N_COLUMNS; c++) place[c] = -1;
    for (int i = 0; i < n; i++) {
        int c = column_of(field[i]);
        if (c >= 0 && place[c] < 0) place[c] = i;
    }
    if (place[OUT_OF_PLACE] < 0) place[OUT_OF_PLACE] = place[IN_PLACE];
    for (enum column c = 0; c < N_COLUMNS; c++)
        if (place[c] < 0 && (c == OP || c == RANKS || c == SIZE || c == OUT_OF_PLACE))
            return moe_fail(MOE_EINPUT,
                            "no column %s, expected op, size_bytes (or bytes), num_gpus (or gpus) and time_us"
                            " (or oop_time_us, ip_time_us)",
                            column_names[c][0]);
    return MOE_OK;
}

static int read_csv(char *text, struct moe_measured *out, int *line)
{
    int place[N_COLUMNS], n_columns = 0;
    char *field[MOST_FIELDS];
    for (char *p; (p = moe_measured_line(&text));) {
        ++*line;
        if (*p == '#' || !p[strspn(p, " \t")]) continue;
        int n = split_fields(p, field);
        if (n < 0)
            return moe_fail(MOE_EINPUT, "a quote without an end, or more than %d columns", MOST_FIELDS);
        if (!n_columns) {
            n_columns = n;
            MOE_TRY(read_header(field, n, place));
            continue;
        }
        if (n != n_columns) return moe_fail(MOE_EINPUT, "%d columns, expected %d", n, n_columns);
        MOE_TRY(read_row(field, place, out, *line));
    }
    return MOE_OK;
}

/* ---- the file ---- */

enum { MAX_BYTES = 256 << 20 };

int moe_measured_load(const char *path, char **text, size_t *bytes)
{
    int64_t size;
    MOE_TRY(moe_import_size(path, &size));
    if (size > MAX_BYTES) return moe_fail(MOE_EINPUT, "%s: over %d MB", path, MAX_BYTES >> 20);
    FILE *f = fopen(path, "rb");
    if (!f) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno));
    *text = moe_alloc((size_t)size + 1, 1);
    *bytes = fread(*text, 1, (size_t)size, f);
    int err = ferror(f) ? moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno)) : MOE_OK;
    fclose(f);
    if (err < 0) free(*text);
    return err;
}

static int read_text(char *text, size_t bytes, const char *op, struct moe_measured *out, int *line)
{
    static const char byte_order_mark[] = "\xef\xbb\xbf";
    size_t skip = strncmp(text, byte_order_mark, 3) ? 0 : 3;
    text += skip;
    bytes -= skip;
    if (text[strspn(text, " \t\r\n")] == '{') return moe_measured_read_json(text, bytes, op, out, line);
    for (size_t i = 0; i < bytes; i++) /* so that what follows a zero is not lost */
        if (!text[i]) text[i] = ' ';
    return is_csv(text) ? read_csv(text, out, line) : moe_measured_read_log(text, op, out, line);
}

int moe_measured_read(const char *path, const char *op, struct moe_measured *out)
{
    const char *slash = strrchr(path, '/'), *known = op ? moe_measured_op(op) : NULL;
    char *text = NULL, hint[MOE_HINT];
    size_t bytes = 0;
    int line = 0;
    *out = (struct moe_measured){0};
    moe_copy_name(out->file, slash ? slash + 1 : path);
    if (op && !known)
        return moe_fail(MOE_EUSAGE, "unknown collective '%.40s'%s", op, moe_hint(op, ops, N_OPS, hint));
    MOE_TRY(moe_measured_load(path, &text, &bytes));
    int err = read_text(text, bytes, known, out, &line);
    if (err < 0 && line > 0)
        moe_fail(err, "%s:%d: %s", path, line, moe_error());
    else if (err < 0)
        moe_fail(err, "%s: %s", path, moe_error());
    else if (out->n == 0)
        err = moe_fail(MOE_EINPUT,
                       "%s: no measurement (%d rows skipped), expected some of alltoall, allgather,"
                       " reducescatter or allreduce, as CSV of op,size_bytes,num_gpus,time_us,"
                       " or as nccl-tests prints or writes them",
                       path, out->n_skipped + out->n_wrong);
    free(text);
    if (err < 0) moe_measured_free(out);
    return err;
}

void moe_measured_free(struct moe_measured *m)
{
    free(m->rows);
    *m = (struct moe_measured){0};
}

/* ---- which rows ---- */

static int parse_ranks(const char **at, int *ranks, int *n)
{
    const char *p = *at;
    for (bool more = *p != '*'; more; p += more) {
        char *end;
        long value = isdigit((unsigned char)*p) ? strtol(p, &end, 10) : 0;
        if (value < 1 || value > MOE_MEASURED_RANKS)
            return moe_fail(MOE_EUSAGE, "'%.40s': expected numbers of ranks, as in 2,4, or *", p);
        if (*n == MOE_ROW_TERMS) return moe_fail(MOE_EUSAGE, "more than %d numbers of ranks", MOE_ROW_TERMS);
        ranks[(*n)++] = (int)value;
        p = end;
        more = *p == ',';
    }
    *at = p + (*p == '*');
    return MOE_OK;
}

int moe_measured_parse_rows(const char *text, struct moe_row_choice *out)
{
    char name[MOE_NAME], hint[MOE_HINT];
    *out = (struct moe_row_choice){0};
    for (const char *p = text;; p++) {
        size_t n = strcspn(p, "@+");
        if (p[n] != '@')
            return moe_fail(MOE_EUSAGE, "'%.40s': expected COLLECTIVE@RANKS, as in *@2,4+allgather@8", p);
        if (out->n == MOE_ROW_TERMS) return moe_fail(MOE_EUSAGE, "more than %d terms", MOE_ROW_TERMS);
        snprintf(name, sizeof name, "%.*s", (int)(n < MOE_NAME ? n : MOE_NAME), p);
        const char *op = strcmp(name, "*") ? moe_measured_op(name) : "";
        if (!op)
            return moe_fail(MOE_EUSAGE, "unknown collective '%s'%s", name, moe_hint(name, ops, N_OPS, hint));
        moe_copy_name(out->terms[out->n].op, op);
        p += n + 1;
        MOE_TRY(parse_ranks(&p, out->terms[out->n].ranks, &out->terms[out->n].n_ranks));
        out->n++;
        if (!*p) return MOE_OK;
        if (*p != '+') return moe_fail(MOE_EUSAGE, "'%.40s': expected + and another term, or the end", p);
    }
}

bool moe_row_chosen(const struct moe_row_choice *choice, const struct moe_measured_row *row)
{
    for (int t = 0; t < choice->n; t++) {
        bool chosen = choice->terms[t].n_ranks == 0;
        for (int i = 0; i < choice->terms[t].n_ranks; i++) chosen |= choice->terms[t].ranks[i] == row->ranks;
        if (chosen && (!choice->terms[t].op[0] || !strcmp(choice->terms[t].op, row->op))) return true;
    }
    return false;
}
