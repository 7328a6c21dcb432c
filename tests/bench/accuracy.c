/* accuracy.c - see accuracy.h.
 *
 * Usage: bench_accuracy [--csv FILE] [--out FILE] [PART...]; without PART all. Exit code 5 when a bar is
 * missed. --csv: all predicted rows. --out: those that are times, with the columns of accuracy.sh (machine,
 * op, dtype, num_gpus, size_bytes, predicted_us), appended without a header once all parts are done. */
#include "tests/bench/accuracy.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const struct part {
    const char *name, *text;
    void (*run)(struct accuracy *a);
} parts[] = {
#define X(name, text) {#name, text, accuracy_##name},
    ACCURACY_PARTS(X)
#undef X
        {0}};

void accuracy_stop(int err)
{
    fflush(stdout);
    fprintf(stderr, "bench_accuracy: %s\n", moe_error());
    exit(moe_exit_code(err));
}

/* ---- rows and lines ---- */

void accuracy_row(struct accuracy *a, const char *machine, const char *op, const char *dtype, int ranks,
                  int64_t bytes, const char *band, double measured_s, double predicted_s, double low_s,
                  double high_s)
{
    bool interval = !isnan(low_s);
    moe_assert(measured_s > 0 && predicted_s > 0 && (interval ? low_s <= high_s : isnan(high_s)));
    a->point = moe_grow(a->point, &a->cap, a->n + 1, sizeof *a->point);
    struct accuracy_point *p = &a->point[a->n++];
    moe_copy_name(p->machine, machine);
    moe_copy_name(p->op, op);
    moe_copy_name(p->band, band);
    p->error = a->ratios ? (predicted_s - measured_s) * 1e6 : predicted_s / measured_s - 1;
    p->interval = interval;
    p->inside = low_s <= measured_s && measured_s <= high_s;
    if (a->csv) {
        fprintf(a->csv, "\"%s\",\"%s\",\"%s\",%d,%lld,\"%s\",%.4f,%.4f,", machine, op, dtype, ranks,
                (long long)bytes, band, measured_s * 1e6, predicted_s * 1e6);
        if (interval)
            fprintf(a->csv, "%.4f,%.4f\n", low_s * 1e6, high_s * 1e6);
        else
            fputs(",\n", a->csv);
    }
    if (a->out && !a->ratios)
        fprintf(a->out, "%s,%s,%s,%d,%lld,%.4f\n", machine, op, dtype, ranks, (long long)bytes,
                predicted_s * 1e6);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double accuracy_quantile(const double *value, int n, double q)
{
    double *sorted = moe_alloc((size_t)n, sizeof *sorted), at = q * (n - 1);
    int below = (int)at, above = below + 1 < n ? below + 1 : below;
    moe_assert(n > 0 && q >= 0 && q <= 1);
    memcpy(sorted, value, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    double found = sorted[below] + (sorted[above] - sorted[below]) * (at - below);
    free(sorted);
    return found;
}

static bool fits(const char *want, const char *have)
{
    return !want || !strcmp(want, have);
}

double accuracy_line(struct accuracy *a, const char *machine, const char *op, const char *band, double bar)
{
    double *error = moe_alloc((size_t)a->n, sizeof *error), median = INFINITY, most = INFINITY;
    int n = 0, n_intervals = 0, inside = 0;
    for (int i = 0; i < a->n; i++) {
        const struct accuracy_point *p = &a->point[i];
        if (!fits(machine, p->machine) || !fits(op, p->op) || !fits(band, p->band)) continue;
        error[n++] = 100 * fabs(p->error);
        n_intervals += p->interval;
        inside += p->inside;
    }
    if (n) {
        median = accuracy_quantile(error, n, 0.5);
        most = accuracy_quantile(error, n, 0.9);
    }
    bool missed = !(median <= (bar > 0 ? bar : INFINITY)) || !n;
    printf("%-12s %-22s %-18s %5d %8.1f %7.1f", machine ? machine : "all", op ? op : "all",
           band ? band : "all", n, median, most);
    if (n_intervals)
        printf(" %6.0f", 100.0 * inside / n_intervals);
    else
        printf(" %6s", "-");
    if (bar > 0) printf(" %6.0f", bar);
    /* Of all rows of a part, and enough of them to tell; no bar. */
    bool judged = !machine && !op && !band && n_intervals >= 30;
    if (judged && (inside < 0.7 * n_intervals || inside > 0.9 * n_intervals)) printf("%9soutside 70-90", "");
    printf("%s\n", missed ? "  missed" : "");
    a->n_missed += missed;
    free(error);
    return median;
}

/* ---- files ---- */

/* Cuts the field at *at out of the text, to which it writes a closing zero; *at: behind it and its comma.
 * True when it was the last of its line. */
static bool cut_field(char **at, char **field, int *line)
{
    char *from = *at, *to = *at;
    bool quoted = false;
    *field = to;
    for (; *from && (quoted || (*from != ',' && *from != '\n')); from++) {
        if (*from == '\n') ++*line;
        if (*from == '"' && quoted && from[1] == '"')
            *to++ = *from++;
        else if (*from == '"')
            quoted = !quoted;
        else if (*from != '\r' || from[1] != '\n')
            *to++ = *from;
    }
    bool last = *from != ',';
    if (*from == '\n') ++*line;
    *at = *from ? from + 1 : from;
    *to = 0;
    return last;
}

static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    int cap = 0, n = 0;
    if (!f)
        accuracy_stop(moe_fail(MOE_EMISSING, "no %s (MOESIM_DATA names the folder of measured data)", path));
    for (size_t got = 1; got; n += (int)got) {
        text = moe_grow(text, &cap, n + 65537, 1);
        got = fread(text + n, 1, 65536, f);
    }
    text[n] = 0;
    if (ferror(f)) accuracy_stop(moe_fail(MOE_EFAILED, "%s: cannot be read", path));
    fclose(f);
    return text;
}

struct accuracy_csv *accuracy_csv_read(const char *file)
{
    struct accuracy_csv *csv = moe_alloc(1, sizeof *csv);
    const char *folder = getenv("MOESIM_DATA");
    if (!folder) folder = MOESIM_DATA;
    if (asprintf(&csv->path, "%s/measured/%s", folder, file) < 0) abort();
    csv->text = read_text(csv->path);
    int n_cells = 0, n_lines = 0, line = 1;
    for (char *at = csv->text; *at;) {
        int from = n_cells, begins = line;
        if (*at == '#' || *at == '\n' || !strncmp(at, "\r\n", 2)) { /* a note may hold any quotes */
            at += strcspn(at, "\n");
            at += *at == '\n';
            line++;
            continue;
        }
        for (bool last = false; !last;) {
            csv->cell = moe_grow(csv->cell, &csv->cap_cells, n_cells + 1, sizeof *csv->cell);
            last = cut_field(&at, &csv->cell[n_cells++], &line);
        }
        if (!from) csv->n_columns = n_cells;
        if (n_cells - from != csv->n_columns)
            accuracy_stop(moe_fail(MOE_EINPUT, "%s:%d: %d fields, expected %d", csv->path, begins,
                                   n_cells - from, csv->n_columns));
        csv->line = moe_grow(csv->line, &csv->cap_lines, n_lines + 1, sizeof *csv->line);
        csv->line[n_lines++] = begins;
    }
    if (n_lines < 2) accuracy_stop(moe_fail(MOE_EINPUT, "%s: no rows", csv->path));
    csv->n_rows = n_lines - 1;
    return csv;
}

void accuracy_csv_free(struct accuracy_csv *csv)
{
    if (!csv) return;
    free(csv->path);
    free(csv->text);
    free(csv->cell);
    free(csv->line);
    free(csv);
}

const char *accuracy_csv_text(const struct accuracy_csv *csv, int row, const char *column)
{
    char hint[MOE_HINT];
    for (int c = 0; c < csv->n_columns; c++)
        if (!strcmp(csv->cell[c], column)) return csv->cell[(size_t)(row + 1) * (size_t)csv->n_columns + c];
    accuracy_stop(moe_fail(MOE_EINPUT, "%s:%d: no column '%s'%s", csv->path, csv->line[0], column,
                           moe_hint(column, (const char *const *)csv->cell, csv->n_columns, hint)));
}

double accuracy_csv_number(const struct accuracy_csv *csv, int row, const char *column)
{
    const char *text = accuracy_csv_text(csv, row, column);
    char *end;
    double value = moe_decimal(text, &end);
    if (end == text || *end || !isfinite(value))
        accuracy_stop(moe_fail(MOE_EINPUT, "%s:%d: %s '%s', expected a number", csv->path, csv->line[row + 1],
                               column, text));
    return value;
}

/* ---- the program ---- */

static void run(struct accuracy *a, const struct part *part)
{
    printf("\n%s: %s\n%-12s %-22s %-18s %5s %8s %7s %6s %6s\n", part->name, part->text, "machine", "op",
           "band", "rows", "median_%", "p90_%", "in80_%", "bar_%");
    part->run(a);
    accuracy_line(a, NULL, NULL, NULL, 0);
    a->n = 0;
    a->ratios = false;
}

static const struct part *find(const char *name)
{
    const char *names[sizeof parts / sizeof *parts] = {0};
    char hint[MOE_HINT];
    int n = 0;
    for (const struct part *p = parts; p->name; p++) {
        if (!strcmp(p->name, name)) return p;
        names[n++] = p->name;
    }
    accuracy_stop(moe_fail(MOE_EUSAGE, "unknown part '%s'%s", name, moe_hint(name, names, n, hint)));
}

/* Takes option `name` and its file when they are what comes next, at *arg. */
static bool take_file(const char *name, int argc, char **argv, int *arg, const char **file)
{
    if (*arg >= argc || strcmp(argv[*arg], name) != 0) return false;
    if (*arg + 1 >= argc) accuracy_stop(moe_fail(MOE_EUSAGE, "%s needs a file", name));
    *file = argv[*arg + 1];
    *arg += 2;
    return true;
}

static FILE *open_file(const char *path, const char *mode)
{
    FILE *f = fopen(path, mode);
    if (!f) accuracy_stop(moe_fail(MOE_EFAILED, "%s: cannot be written", path));
    return f;
}

static void close_file(FILE *f, const char *path)
{
    if (fclose(f)) accuracy_stop(moe_fail(MOE_EFAILED, "%s: cannot be written", path));
}

int main(int argc, char **argv)
{
    struct accuracy a = {0};
    int arg = 1;
    char *rows = NULL;
    size_t n_bytes;
    const char *csv = NULL, *out = NULL;
    while (take_file("--csv", argc, argv, &arg, &csv) || take_file("--out", argc, argv, &arg, &out)) continue;
    for (int i = arg; i < argc; i++) find(argv[i]); /* before the first, which may take long */
    if (csv) {
        a.csv = open_file(csv, "w");
        fputs("machine,op,dtype,ranks,bytes,band,measured_us,predicted_us,low_us,high_us\n", a.csv);
    }
    FILE *to = out ? open_file(out, "a") : NULL;
    if (out && !(a.out = open_memstream(&rows, &n_bytes))) abort();
    for (int i = arg; i < argc; i++) run(&a, find(argv[i]));
    for (const struct part *p = parts; arg == argc && p->name; p++) run(&a, p);
    free(a.point);
    if (csv) close_file(a.csv, csv);
    if (out) {
        close_file(a.out, out);
        fwrite(rows, 1, n_bytes, to);
        close_file(to, out);
        free(rows);
    }
    if (a.n_missed) accuracy_stop(moe_fail(MOE_EVERDICT, "%d lines miss their bar", a.n_missed));
    return 0;
}
