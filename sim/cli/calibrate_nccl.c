/* calibrate_nccl.c - moesim calibrate on measured rows: the numbers of nccl.h, as a topology whose other
 * blocks are those of --topology; or, with --like, the means of other machines. */
#include "sim/cli/measured.h"
#include "sim/yaml.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { P = MOE_NCCL_N_PARAMS, WIDTH = 106 };

static const char *const class_text[MOE_NCCL_CLASSES] = {"p2p", "ring"};
static const char *const band_key[MOE_NCCL_BANDS] = {"small", "medium", "large"};
static const char fitted_by[] = "fitted by moesim calibrate", means_of[] = "means of other machines",
                  by_table[] = "prior: NCCL tuning table",
                  not_apart[] = "not told apart by these rows: add other numbers of GPUs",
                  default_name[] = "this_host"; /* of --name (main.c): the base's stays */

/* What goes into the topology. */
struct result {
    struct moe_nccl start; /* the facts, and the numbers before the fit */
    struct moe_nccl_fit fit;
    char *said;       /* how it was made: the end of its source */
    const char *base; /* name of the topology that it was; borrowed */
};

/* ---- the file ---- */

static const struct moe_yaml *item_of(const struct moe_yaml *map, const char *key)
{
    for (int i = 0; i < map->n; i++)
        if (!strcmp(map->key[i], key)) return &map->item[i];
    return NULL;
}

/* Is it a key that the fit writes? */
static bool is_written(const char *key)
{
    bool written = !strcmp(key, "fitted") || !strcmp(key, "source") || !strcmp(key, "tuning");
    for (int i = 0; i < P; i++) written |= !strcmp(key, moe_nccl_text[i]);
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++) {
        size_t n = strlen(class_text[class]);
        for (int band = 0; band < MOE_NCCL_BANDS; band++)
            written |=
                !strncmp(key, class_text[class], n) && key[n] == '_' && !strcmp(key + n + 1, band_key[band]);
    }
    return written;
}

/* Words in lines of WIDTH, up to `end` (NULL: all). *at: where the line is. */
static void write_words(FILE *f, const char *text, const char *end, int *at)
{
    while (*(text += strspn(text, " \n")) && (!end || text < end)) {
        int n = (int)strcspn(text, " \n");
        if (*at && *at + 1 + n > WIDTH) {
            fputs("\n    ", f);
            *at = 0;
        }
        *at += fprintf(f, "%s%.*s", *at ? " " : "", n, text);
        text += n;
    }
}

static void write_numbers(FILE *f, const struct moe_nccl *p)
{
    for (int i = 0; i < P; i++) {
        struct moe_nccl copy = *p;
        fprintf(f, "  %s: %.6g %s\n", moe_nccl_text[i], *moe_nccl_param(&copy, i) / moe_nccl_size[i],
                moe_nccl_unit[i]);
    }
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
        for (int band = 0; band < MOE_NCCL_BANDS; band++)
            if (p->error[class][band] > 0)
                fprintf(f, "  %s_%s: %.3g %%\n", class_text[class], band_key[band],
                        100 * p->error[class][band]);
    if (!p->fitted) return;
    fputs("  fitted:", f);
    for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
        for (int r = 0; r < MOE_PROTOCOL_COUNT; r++)
            if (p->fitted >> (a * MOE_PROTOCOL_COUNT + r) & 1)
                fprintf(f, " %s/%s", moe_algorithm_text[a], moe_protocol_text[r]);
    fputc('\n', f);
}

static void write_tables(FILE *f, const struct moe_nccl_tables *tables)
{
    char *text = NULL;
    size_t bytes;
    int at = 0;
    if (!tables->n) return;
    FILE *all = open_memstream(&text, &bytes);
    moe_nccl_tables_write(tables, all);
    fclose(all);
    fputs("  tuning: >-\n    ", f);
    write_words(f, text, NULL, &at);
    fputc('\n', f);
    free(text);
}

/* What the block says of an earlier fit is left out. */
static void write_block(FILE *f, const struct moe_yaml *block, const struct result *r)
{
    const char *source = item_of(block, "source")->text, *old = strstr(source, fitted_by);
    int at = 0;
    if (!old) old = strstr(source, means_of);
    fputs("nccl:\n", f);
    for (int i = 0; i < block->n; i++)
        if (!is_written(block->key[i])) fprintf(f, "  %s: %s\n", block->key[i], block->item[i].text);
    write_tables(f, &r->fit.value.tables);
    write_numbers(f, &r->fit.value);
    fputs("  source: >-\n    ", f);
    write_words(f, source, old, &at);
    write_words(f, r->said, NULL, &at);
    fputc('\n', f);
}

static int find_key(const char *base, const struct moe_yaml *root, const char *key, int *out)
{
    int k = 0;
    while (k < root->n && strcmp(root->key[k], key) != 0) k++;
    if (k == root->n)
        return moe_fail(MOE_EINPUT, "%s: no block nccl, which says version, arch, links and rings", base);
    *out = k;
    int line = root->key_line[k];
    if ((!k || root->key_line[k - 1] < line) && (k + 1 == root->n || root->key_line[k + 1] > line))
        return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s:%d: expected blocks on lines of their own", base, line);
}

/* Other lines stay as they are, so do notes between the block, key k, and the next; but not the notes that
 * the file begins with, which are of the base. name_line: 0 when the name stays. */
static void copy_lines(FILE *in, FILE *out, const struct moe_yaml *root, int k, int name_line,
                       const struct moe_args *args, const struct result *r)
{
    char *text = NULL;
    size_t cap = 0;
    int from = root->key_line[k], next = k + 1 < root->n ? root->key_line[k + 1] : INT_MAX;
    int end = from; /* its last line */
    bool begins = true;
    for (int line = 1; getline(&text, &cap, in) > 0 && line < next; line++)
        if (line > from && text[strspn(text, " \r\n")] && *text != '#') end = line;
    rewind(in);
    fprintf(out, "# %s, nccl %s by moesim calibrate.\n", r->base, args->like ? means_of : "calibrated");
    for (int line = 1; getline(&text, &cap, in) > 0; line++) {
        begins &= *text == '#';
        if (line == from) write_block(out, &root->item[k], r);
        if (line == name_line)
            fprintf(out, "name: %s\n", args->name);
        else if (!begins && (line < from || line > end))
            fputs(text, out);
    }
    free(text);
}

static int write_topology(const struct moe_args *args, const struct result *r)
{
    char base[PATH_MAX];
    struct moe_yaml *root = NULL;
    FILE *out, *in = NULL;
    int err, block = 0, name = 0;
    bool named = strcmp(args->name, default_name) != 0;
    MOE_TRY_GOTO(moe_topo_file(args->topology, base));
    MOE_TRY_GOTO(moe_yaml_load(base, &root));
    MOE_TRY_GOTO(find_key(base, root, "nccl", &block));
    if (named) MOE_TRY_GOTO(find_key(base, root, "name", &name));
    in = fopen(base, "r");
    if (!in) MOE_TRY_GOTO(moe_fail(MOE_EFAILED, "%s: %s", base, strerror(errno)));
    MOE_TRY_GOTO(moe_output_open(args->output, &out));
    copy_lines(in, out, root, block, named ? root->key_line[name] : 0, args, r);
    err = moe_output_close(args->output, out);
done:
    if (in) fclose(in);
    moe_yaml_free(root);
    return err;
}

/* ---- results ---- */

static const double most_spread = 10; /* that is said: above it tells nothing more */

static json_t *numbers_json(const struct result *r, bool fitted)
{
    json_t *list = json_array();
    for (int i = 0; i < P; i++) {
        struct moe_nccl value = r->fit.value, start = r->start;
        char source[128];
        double size = moe_nccl_size[i];
        if (!fitted || r->fit.told[i])
            snprintf(source, sizeof source, "%s", fitted ? "fitted" : means_of);
        else if (r->fit.prior[i])
            snprintf(source, sizeof source, "%s", by_table);
        else if (isinf(r->fit.spread[i]))
            snprintf(source, sizeof source, "as before: not told without %s", moe_nccl_rows[i]);
        else
            snprintf(source, sizeof source, "as before: %s", not_apart);
        json_array_append_new(
            list,
            json_pack(
                "{s:s, s:f, s:f, s:o, s:s, s:s}", "number", moe_nccl_text[i], "value",
                *moe_nccl_param(&value, i) / size, "before", *moe_nccl_param(&start, i) / size, "spread_pct",
                moe_json_known(fitted && r->fit.spread[i] <= most_spread ? 100 * r->fit.spread[i] : NAN),
                "unit", moe_nccl_unit[i], "source", source));
    }
    return list;
}

static json_t *residuals_json(const struct moe_nccl_fit *fit)
{
    json_t *list = json_array();
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
        for (int band = 0; band < MOE_NCCL_BANDS; band++)
            if (!isnan(fit->residual[class][band]))
                json_array_append_new(list, json_pack("{s:s, s:s, s:f, s:f}", "class", class_text[class],
                                                      "size", moe_band_text[band], "median_error_pct",
                                                      100 * fit->residual[class][band], "interval_pct",
                                                      100 * fit->value.error[class][band]));
    return list;
}

/* " What: a 2 %, b 3 %." of those of which a spread is known; nothing when there are none */
static void say_spreads(FILE *f, const char *what, const struct moe_nccl_fit *fit, const bool *which)
{
    const char *before = what;
    for (int i = 0; i < P; i++) {
        if (!which[i]) continue;
        fprintf(f, "%s %s %.2g %%", before, moe_nccl_text[i], 100 * fit->spread[i]);
        before = ",";
    }
    if (before != what) fputc('.', f);
}

static char *said_of_fit(const struct moe_args *args, const struct moe_nccl_fit *fit, const char *tables)
{
    char *text = NULL, names[PATH_MAX];
    size_t bytes;
    int n_untold = 0;
    FILE *f = open_memstream(&text, &bytes);
    fprintf(f, "%s to %s, rows %s, %d points.", fitted_by, moe_cli_file_names(args, names), args->rows,
            fit->n_rows);
    if (tables) fprintf(f, " NCCL's tuning tables: %s.", tables);
    say_spreads(f, " Spreads (standard deviations):", fit, fit->told);
    say_spreads(f, " Not told by these rows, so as NCCL's table has them:", fit, fit->prior);
    for (int i = 0; i < P; i++)
        if (!fit->told[i] && !fit->prior[i])
            fprintf(f, isinf(fit->spread[i]) ? "%s %s (%s tell it)" : "%s %s (%s)",
                    n_untold++ ? "," : " Not told by these rows, so as sim/cost/nccl.h has them:",
                    moe_nccl_text[i], isinf(fit->spread[i]) ? moe_nccl_rows[i] : not_apart);
    if (n_untold) fputc('.', f);
    fclose(f);
    return text;
}

static void print_error(const char *what, double error)
{
    if (!isnan(error)) printf("rows of %s left out of the fit: median error %.1f %%\n", what, 100 * error);
}

static void print_fit(const struct moe_args *args, const struct moe_cli_rows *rows,
                      const struct moe_cli_tuning *tuning, const struct result *r)
{
    char names[PATH_MAX];
    int n_told = 0;
    for (int i = 0; i < P; i++) n_told += r->fit.told[i];
    printf("%s: %d numbers fitted to %d points of %d rows (%s, %s)\n\n", args->output, n_told, r->fit.n_rows,
           rows->n, moe_cli_file_names(args, names), args->rows);
    moe_print_rows(numbers_json(r, true));
    putchar('\n');
    moe_print_rows(residuals_json(&r->fit));
    putchar('\n');
    print_error("a size", r->fit.without_size);
    print_error("a number of GPUs", r->fit.without_ranks);
    moe_cli_rows_print_left_out(rows);
    if (tuning->said || r->start.tables.n)
        printf("NCCL tuning tables: %s\n", tuning->said ? tuning->said : "the base's");
    if (tuning->n_repeated + tuning->n_unusable)
        printf("tuning tables not used: %d of a number of GPUs that had one; %d of several nodes, too many "
               "GPUs or an unknown number\n",
               tuning->n_repeated, tuning->n_unusable);
}

static void print_fit_json(const struct moe_args *args, const struct moe_cli_rows *rows,
                           const struct moe_cli_tuning *tuning, const struct result *r)
{
    char names[PATH_MAX];
    moe_print_json(json_pack(
        "{s:s, s:o, s:o, s:i, s:i, s:s*, s:o, s:o, s:o, s:o}", "schema", "moesim.calibrate_rows/1", "files",
        moe_json_text(moe_cli_file_names(args, names)), "chosen", moe_json_text(args->rows), "rows", rows->n,
        "points", r->fit.n_rows, "tuning", tuning->said, "numbers", numbers_json(r, true), "residuals",
        residuals_json(&r->fit), "without_size_pct", moe_json_known(100 * r->fit.without_size),
        "without_ranks_pct", moe_json_known(100 * r->fit.without_ranks)));
}

/* ---- the commands ---- */

static int load_base(const struct moe_args *args, struct moe_topo **topo, struct result *r)
{
    MOE_TRY(moe_topo_load(args->topology, topo));
    if (!(*topo)->nccl.release)
        return moe_fail(MOE_EINPUT, "%s: no block nccl, which says version, arch, links and rings",
                        args->topology);
    r->base = (*topo)->name;
    r->start = (*topo)->nccl;
    memset(r->start.error, 0, sizeof r->start.error);
    r->start.fitted = 0;
    moe_nccl_start(&r->start);
    return MOE_OK;
}

/* How far off the numbers of other machines are, with 80 % probability, as a logarithm: so far were those of
 * three of A100, H100, B200 and GB200 on the fourth (tests/bench/accuracy.sh prints it, and how often it
 * holds). */
static const double unlike = 0.4;

/* Geometric means of the files' numbers; that of port as a share of what NCCL says of the rings. */
static int take_means(const struct moe_args *args, struct result *r)
{
    double log_mean[P] = {0};
    FILE *f;
    size_t bytes;
    f = open_memstream(&r->said, &bytes);
    fprintf(f, "%s by moesim calibrate --like:", means_of);
    for (int i = 0; i < args->n_inputs; i++) {
        struct moe_topo *other;
        struct moe_nccl start;
        int err = moe_topo_load(args->inputs[i], &other);
        if (err >= 0 && !other->nccl.release)
            err = moe_fail(MOE_EINPUT, "%s: no block nccl to take means of", args->inputs[i]);
        if (err < 0) {
            moe_topo_free(other);
            fclose(f);
            return err;
        }
        start = other->nccl;
        moe_nccl_start(&start);
        for (int k = 0; k < P; k++) {
            bool port = moe_nccl_param(&start, k) == &start.port_Bps;
            double whole = port ? start.port_Bps : 1, to = port ? r->start.port_Bps : 1;
            log_mean[k] += log(*moe_nccl_param(&other->nccl, k) / whole * to) / args->n_inputs;
        }
        fprintf(f, "%s %s", i ? "," : "", other->name);
        moe_topo_free(other);
    }
    fputs("; port as the same share of the rings.", f);
    fclose(f);
    r->fit.value = r->start;
    for (int k = 0; k < P; k++) *moe_nccl_param(&r->fit.value, k) = exp(log_mean[k]);
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
        for (int band = 0; band < MOE_NCCL_BANDS; band++) r->fit.value.error[class][band] = unlike;
    return MOE_OK;
}

static int like(const struct moe_args *args)
{
    struct moe_topo *topo = NULL;
    struct result r = {0};
    int err;
    MOE_TRY_GOTO(load_base(args, &topo, &r));
    MOE_TRY_GOTO(take_means(args, &r));
    MOE_TRY_GOTO(write_topology(args, &r));
    if (args->json) {
        moe_print_json(
            json_pack("{s:s, s:o}", "schema", "moesim.calibrate_like/1", "numbers", numbers_json(&r, false)));
    } else {
        printf("%s: %d numbers, means of %d machines\n\n", args->output, P, args->n_inputs);
        moe_print_rows(numbers_json(&r, false));
    }
done:
    free(r.said);
    moe_topo_free(topo);
    return err;
}

/* Times in another unit are fitted by no number within its range. */
static int check_fit(const struct moe_args *args, const struct moe_nccl_fit *fit)
{
    int n_told = 0;
    for (int i = 0; i < P; i++) n_told += fit->told[i];
    if (n_told && fit->median <= 1) return MOE_OK;
    return moe_fail(MOE_EINPUT,
                    "%s: nothing to write: %d points tell %d of %d numbers and are %.0f %% off (median), "
                    "expected at most 100; are the times in us (time_us)?",
                    args->input, fit->n_rows, n_told, P, 100 * fit->median);
}

static int fit(const struct moe_args *args)
{
    struct moe_cli_rows rows = {0};
    struct moe_cli_tuning tuning = {0};
    struct moe_topo *topo = NULL;
    struct result r = {0};
    struct moe_nccl_row *row = NULL;
    int err, n = 0;
    MOE_TRY_GOTO(load_base(args, &topo, &r));
    MOE_TRY_GOTO(moe_cli_rows_load(args, topo, &rows));
    MOE_TRY_GOTO(moe_cli_tuning_load(args, topo, &tuning));
    if (tuning.said) r.start.tables = tuning.tables;
    row = moe_alloc((size_t)rows.n, sizeof *row);
    for (int i = 0; i < rows.n; i++) {
        if (rows.row[i].nccl.c.ranks > topo->gpus_per_node) continue;
        row[n] = rows.row[i].nccl;
        row[n].port_most_Bps = topo->bus_Bps / row[n].c.ranks;
        n++;
    }
    rows.n_elsewhere += rows.n - n;
    rows.n = n;
    n = moe_nccl_merge(row, n);
    if (n < P)
        MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "%s: %d points on one node (%d rows left out), expected %d or more",
                              args->input, n, rows.n_elsewhere + rows.n_host, P));
    MOE_TRY_GOTO(moe_nccl_calibrate(&r.start, row, n, &r.fit));
    MOE_TRY_GOTO(check_fit(args, &r.fit));
    r.said = said_of_fit(args, &r.fit, tuning.said ? tuning.said : r.start.tables.n ? "the base's" : NULL);
    if (args->plot) MOE_TRY_GOTO(moe_cli_plot_rows(args->plot, row, n, &r.fit.value));
    MOE_TRY_GOTO(write_topology(args, &r));
    (args->json ? print_fit_json : print_fit)(args, &rows, &tuning, &r);
done:
    moe_cli_tuning_free(&tuning);
    free(row);
    free(r.said);
    moe_cli_rows_free(&rows);
    moe_topo_free(topo);
    return err;
}

int moe_cli_calibrate_nccl(const struct moe_args *args)
{
    if (args->cores) return moe_fail(MOE_EUSAGE, "--cores is of a capture, and goes without --topology");
    if (args->like && (args->plot || args->op || args->tuning || strcmp(args->rows, "*@*") != 0))
        return moe_fail(MOE_EUSAGE, "--like reads topologies, expected no --rows, --op, --plot or --tuning");
    MOE_TRY(moe_output_check(args, "-o", args->output));
    if (args->plot) MOE_TRY(moe_output_check(args, "--plot", args->plot));
    return args->like ? like(args) : fit(args);
}
