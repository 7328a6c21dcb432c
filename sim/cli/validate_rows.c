/* validate_rows.c - moesim validate on measured rows: collectives, predicted as simulate does on an idle
 * machine, and measured. */
#include "sim/cli/measured.h"
#include "sim/cost/collective.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rows that measure the same. */
struct point {
    struct moe_nccl_case c;
    double predicted_s, least_s, most_s;
    double interval; /* its half, as a logarithm; 0: not known */
    int n;
};

struct outcome {
    const struct moe_cli_rows *rows;
    int n;
    struct point *point; /* [n] in the order of their first rows */
    int *of;             /* [rows] */
};

static void predict(struct moe_topo *t, struct point *p, struct moe_plan *plan)
{
    const struct moe_nccl_case *c = &p->c;
    int n = c->ranks, *rank = moe_alloc((size_t)n, sizeof *rank);
    int64_t *bytes = moe_alloc((size_t)n * (size_t)n, sizeof *bytes);
    for (int i = 0; i < n; i++) {
        rank[i] = i;
        bytes[i] = c->kind == MOE_ALLREDUCE ? c->bytes : c->bytes * (i + 1) / n - c->bytes * i / n;
    }
    for (int i = 0; i < n * n && c->kind == MOE_ALLTOALL; i++) bytes[i] = c->bytes < n ? 1 : c->bytes / n;
    struct moe_moved moved = {c->kind, n, rank, bytes, c->type_bytes, c->is_float};
    moe_topo_build(t, n);
    moe_collective_plan(t, &moved, plan);
    p->predicted_s = (double)moe_plan_time(t, plan) * 1e-12;
    p->interval = moe_collective_error(t, &moved);
    free(bytes);
    free(rank);
}

static void validate(struct moe_topo *t, struct outcome *o)
{
    struct moe_plan plan = {0};
    o->point = moe_alloc((size_t)o->rows->n, sizeof *o->point);
    o->of = moe_alloc((size_t)o->rows->n, sizeof *o->of);
    for (int i = 0; i < o->rows->n; i++) {
        const struct moe_nccl_row *row = &o->rows->row[i].nccl;
        int p = 0;
        while (p < o->n && !moe_nccl_same(&o->point[p].c, &row->c)) p++;
        o->of[i] = p;
        if (p == o->n) {
            o->point[o->n++] = (struct point){.c = row->c, .least_s = row->time_s};
            predict(t, &o->point[p], &plan);
        }
        o->point[p].least_s = fmin(o->point[p].least_s, row->time_s);
        o->point[p].most_s = fmax(o->point[p].most_s, row->time_s);
        o->point[p].n++;
    }
    free(plan.flow);
}

/* ---- the table ---- */

/* Of a collective (-1: all) in a band; NULL: there is none. */
static json_t *line_json(const struct outcome *o, int kind, int band)
{
    double *error = moe_alloc((size_t)o->n, sizeof *error), *repeat = moe_alloc((size_t)o->n, sizeof *repeat);
    int n = 0, n_repeated = 0, n_known = 0, n_inside = 0;
    for (int i = 0; i < o->n; i++) {
        const struct point *p = &o->point[i];
        if ((kind >= 0 && (int)p->c.kind != kind) || !moe_in_band(p->c.bytes, band)) continue;
        error[n++] = 100 * fabs(p->predicted_s / p->least_s - 1);
        if (p->n > 1) repeat[n_repeated++] = 100 * (p->most_s / p->least_s - 1);
        n_known += p->interval > 0;
        n_inside += p->interval > 0 && fabs(log(p->predicted_s / p->least_s)) <= p->interval;
    }
    json_t *line = NULL;
    if (n)
        line = json_pack("{s:s, s:s, s:i, s:f, s:f, s:o, s:i, s:o}", "op",
                         kind < 0 ? "all" : moe_collective_text[kind], "size", moe_band_text[band], "points",
                         n, "median_error_pct", moe_quantile(error, n, 0.5), "p90_error_pct",
                         moe_quantile(error, n, 0.9), "inside_pct",
                         moe_json_known(n_known ? 100.0 * n_inside / n_known : NAN), "inside_points", n_known,
                         "repeat_pct", moe_json_known(moe_quantile(repeat, n_repeated, 0.5)));
    free(error);
    free(repeat);
    return line;
}

static json_t *lines_json(const struct outcome *o)
{
    json_t *list = json_array(), *line;
    for (int kind = 0; kind <= MOE_COLLECTIVE_COUNT; kind++)
        for (int band = 0; band < MOE_BAND_TEXTS; band++)
            if ((line = line_json(o, kind < MOE_COLLECTIVE_COUNT ? kind : -1, band)))
                json_array_append_new(list, line);
    return list;
}

/* "100.000 (5)" where 5 of the points have an interval. */
static json_t *lines_text(const struct outcome *o)
{
    json_t *list = lines_json(o), *line;
    size_t i;
    json_array_foreach(list, i, line)
    {
        json_int_t n = json_integer_value(json_object_get(line, "inside_points"));
        double pct = json_real_value(json_object_get(line, "inside_pct"));
        if (n && n < json_integer_value(json_object_get(line, "points")))
            json_object_set_new(line, "inside_pct", json_sprintf("%.3f (%lld)", pct, (long long)n));
        json_object_del(line, "inside_points");
    }
    return list;
}

/* Median of a collective over the sizes from 64 KiB on: whether one is above the limit (< 0: none). */
static bool is_within(const struct outcome *o, int64_t limit_pct)
{
    bool within = true;
    for (int kind = 0; kind < MOE_COLLECTIVE_COUNT; kind++) {
        json_t *line = line_json(o, kind, MOE_BAND_FROM_64K);
        if (line && limit_pct >= 0)
            within &= json_real_value(json_object_get(line, "median_error_pct")) <= (double)limit_pct;
        json_decref(line);
    }
    return within;
}

/* Every row, also those that are not the fastest of their point. */
static int write_csv(const char *path, const char *machine, const struct outcome *o)
{
    FILE *f;
    MOE_TRY(moe_output_open(path, &f));
    fputs("machine,op,dtype,num_gpus,size_bytes,predicted_us,low_us,high_us\n", f);
    for (int i = 0; i < o->rows->n; i++) {
        const struct moe_measured_row *row = &o->rows->row[i].said;
        const struct point *p = &o->point[o->of[i]];
        double us = p->predicted_s * 1e6;
        fprintf(f, "%s,%s,%s,%d,%lld,%.3f,", machine, row->op, row->type, row->ranks, (long long)row->bytes,
                us);
        if (p->interval > 0)
            fprintf(f, "%.3f,%.3f\n", us * exp(-p->interval), us * exp(p->interval));
        else
            fputs(",\n", f);
    }
    return moe_output_close(path, f);
}

static int check_options(const struct moe_args *args)
{
    if (args->max_step_error >= 0 || args->max_phase_error >= 0)
        return moe_fail(MOE_EUSAGE, "%s holds no steps: expected --max-error", args->input);
    return args->output ? moe_output_check(args, "-o", args->output) : MOE_OK;
}

int moe_cli_validate_rows(const struct moe_args *args)
{
    char names[PATH_MAX];
    struct moe_cli_rows rows = {0};
    struct moe_topo *topo = NULL;
    struct outcome o = {.rows = &rows};
    int err;
    MOE_TRY_GOTO(check_options(args));
    MOE_TRY_GOTO(moe_topo_load(args->topology, &topo));
    MOE_TRY_GOTO(moe_cli_rows_load(args, topo, &rows));
    validate(topo, &o);
    if (args->output) MOE_TRY_GOTO(write_csv(args->output, topo->name, &o));
    bool passed = is_within(&o, args->max_error);
    moe_cli_file_names(args, names);
    if (args->json) {
        moe_print_json(json_pack("{s:s, s:o, s:o, s:o, s:i, s:i, s:o, s:b}", "schema",
                                 "moesim.validate_rows/1", "files", moe_json_text(names), "topology",
                                 moe_json_text(args->topology), "chosen", moe_json_text(args->rows), "rows",
                                 rows.n, "points", o.n, "lines", lines_json(&o), "passed", passed));
    } else {
        printf("%s, %s, on %s: %d rows, %d points\n\n", names, args->rows, args->topology, rows.n, o.n);
        moe_print_rows(lines_text(&o));
        moe_cli_rows_print_left_out(&rows);
        if (!passed) puts("failed: further off than asked for");
    }
    err = passed ? MOE_OK : moe_exit_code(MOE_EVERDICT);
done:
    free(o.point);
    free(o.of);
    moe_cli_rows_free(&rows);
    moe_topo_free(topo);
    return err;
}
