/* validate.c - moesim validate: the steps of a capture, predicted and measured, phase by phase. */
#include "sim/cli/measured.h"
#include "sim/cli/steps.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Seconds; the last line is the step. */
enum { STEP = MOE_PHASE_COUNT, LINES };
struct outcome {
    double measured[LINES], predicted[LINES];
    double step_error, step_all_error; /* relative; the latter against the median of all steps */
    double median_error, worst_error;  /* of the phases that count; infinite when none does */
    int worst;                         /* the phase, or -1: none counts */
    double covered;                    /* share of the measured step that these phases are */
    bool fitted;                       /* the topology, to this very capture */
};

static double error_of(const struct outcome *o, int line)
{
    return moe_off(o->measured[line], o->predicted[line]);
}

static bool counts(const struct outcome *o, int line)
{
    return line != STEP && moe_phase_counts(o->measured[line], o->predicted[line], o->measured[STEP]);
}

static void add_times(const struct moe_schedule *s, const struct moe_times *t, double *line, int n)
{
    double phase[MOE_PHASE_COUNT];
    moe_phases(s, t, phase);
    for (int p = 0; p < MOE_PHASE_COUNT; p++) line[p * n] = phase[p];
    line[STEP * n] = t->step_s;
}

static int simulate_steps(const struct moe_capture *c, struct moe_topo *topo, double *measured,
                          double *predicted)
{
    const struct moe_steps *steps = &c->steps;
    int err = MOE_OK;
    for (int i = 0; i < steps->n && err >= 0; i++) {
        struct moe_times *times = moe_times_new(steps->s);
        err = moe_times_predict(steps->s, steps->routing[i], topo, times);
        add_times(steps->s, steps->times[i], measured + i, steps->n);
        add_times(steps->s, times, predicted + i, steps->n);
        moe_times_free(times);
    }
    return err;
}

static void conclude(struct outcome *o, double step_all_s)
{
    double error[MOE_PHASE_COUNT];
    int n = 0;
    o->worst = -1;
    for (int p = 0; p < MOE_PHASE_COUNT; p++) {
        if (!counts(o, p)) continue;
        error[n] = fabs(error_of(o, p));
        if (o->worst < 0 || error[n] > o->worst_error) o->worst = p, o->worst_error = error[n];
        o->covered += o->measured[p] / o->measured[STEP];
        n++;
    }
    o->median_error = n ? moe_median(error, n) : INFINITY;
    if (!n) o->worst_error = INFINITY;
    o->step_error = fabs(error_of(o, STEP));
    o->step_all_error = fabs(moe_off(step_all_s, o->predicted[STEP]));
}

static int validate(const struct moe_capture *c, struct moe_topo *topo, struct outcome *o)
{
    int n = c->steps.n;
    double *measured = moe_alloc((size_t)(LINES * n), sizeof *measured),
           *predicted = moe_alloc((size_t)(LINES * n), sizeof *predicted);
    int err = simulate_steps(c, topo, measured, predicted);
    for (int line = 0; line < LINES; line++) {
        o->measured[line] = moe_median(measured + line * n, n);
        o->predicted[line] = moe_median(predicted + line * n, n);
    }
    free(measured);
    free(predicted);
    conclude(o, c->step_all_s);
    o->fitted = strstr(topo->source, c->id);
    return err;
}

/* ---- output ---- */

/* JSON has no infinity, and tables show null as "-". */
static json_t *pct_json(double relative)
{
    return isfinite(relative) ? json_real(100 * relative) : json_null();
}

static const char *pct_text(double relative, char out[MOE_NAME])
{
    snprintf(out, MOE_NAME, isfinite(relative) ? "%.1f %%" : "infinitely far", 100 * relative);
    return out;
}

static void line_name(int line, char out[MOE_NAME])
{
    if (line == STEP)
        moe_copy_name(out, "step");
    else
        moe_phase_name(line, out);
}

static bool is_shown(const struct outcome *o, int line)
{
    return o->measured[line] > 0 || o->predicted[line] > 0;
}

static json_t *lines_json(const struct outcome *o)
{
    json_t *list = json_array();
    for (int line = 0; line < LINES; line++) {
        char name[MOE_NAME];
        double share = o->measured[line] / o->measured[STEP];
        line_name(line, name);
        if (!is_shown(o, line)) continue;
        json_array_append_new(list,
                              json_pack("{s:s, s:f, s:f, s:o, s:f, s:b}", "phase", name, "measured_us",
                                        o->measured[line] * 1e6, "predicted_us", o->predicted[line] * 1e6,
                                        "error_pct", pct_json(error_of(o, line)), "share_pct", 100 * share,
                                        "counts", counts(o, line)));
    }
    return list;
}

static int write_csv(const char *path, const struct outcome *o)
{
    FILE *f;
    MOE_TRY(moe_output_open(path, &f));
    fprintf(f, "phase,measured_us,%s_us\n", o->fitted ? "fitted" : "predicted");
    for (int line = 0; line < LINES; line++) {
        char name[MOE_NAME];
        line_name(line, name);
        if (is_shown(o, line))
            fprintf(f, "\"%s\",%.3f,%.3f\n", name, o->measured[line] * 1e6, o->predicted[line] * 1e6);
    }
    return moe_output_close(path, f);
}

static void print_json(const struct moe_args *args, const struct moe_capture *c, const struct outcome *o,
                       bool passed)
{
    moe_print_json(json_pack("{s:s, s:o, s:o, s:b, s:i, s:o, s:f, s:f, s:f, s:o, s:o, s:f, s:b}", "schema",
                             "moesim.validate/1", "input", moe_input_json(&c->in), "topology",
                             moe_json_text(args->topology), "fitted", o->fitted, "steps", c->steps.n,
                             "phases", lines_json(o), "step_error_pct", 100 * o->step_error, "step_all_us",
                             c->step_all_s * 1e6, "step_all_error_pct", 100 * o->step_all_error,
                             "median_phase_error_pct", pct_json(o->median_error), "worst_phase_error_pct",
                             pct_json(o->worst_error), "covered_pct", 100 * o->covered, "passed", passed));
}

static void print_text(const struct moe_args *args, const struct moe_capture *c, const struct outcome *o,
                       bool passed)
{
    printf("%s on %s: medians of the quickest %d of %lld steps\n\n", args->input, args->topology, c->steps.n,
           (long long)c->n_complete);
    moe_print_rows(lines_json(o));
    printf("\nstep: %.1f %% off; phases of %d %% of it or more: ", 100 * o->step_error, MOE_COUNTED_PCT);
    if (o->worst >= 0) {
        char worst[MOE_NAME], median_off[MOE_NAME], worst_off[MOE_NAME];
        line_name(o->worst, worst);
        printf("median %s, worst %s off (%s); they are %.1f %% of it\n",
               pct_text(o->median_error, median_off), pct_text(o->worst_error, worst_off), worst,
               100 * o->covered);
    } else {
        puts("none");
    }
    printf("all steps: their median is %.0f us, from which the predicted step is %.1f %% off\n",
           c->step_all_s * 1e6, 100 * o->step_all_error);
    if (o->fitted) puts("these steps were fitted: how near they are is no prediction");
    if (!passed) puts("failed: further off than asked for");
}

/* limit_pct < 0: none. */
static bool within(double error, int64_t limit_pct)
{
    return limit_pct < 0 || 100 * error <= (double)limit_pct;
}

static int check_trace(const struct moe_args *args)
{
    if (args->n_inputs == 1 && !args->op && args->max_error < 0) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "%s: is a trace: expected it alone, and no option of measured collectives",
                    args->input);
}

int moe_cli_validate(const struct moe_args *args)
{
    struct moe_capture c;
    struct moe_topo *topo = NULL;
    struct outcome o = {0};
    int err;
    if (!moe_input_is_trace(args->input)) return moe_cli_validate_rows(args);
    MOE_TRY(check_trace(args));
    if (args->output) MOE_TRY(moe_output_check(args, "-o", args->output));
    MOE_TRY_GOTO(moe_capture_load(args, &c));
    MOE_TRY_GOTO(moe_topo_load(args->topology, &topo));
    MOE_TRY_GOTO(validate(&c, topo, &o));
    if (args->output) MOE_TRY_GOTO(write_csv(args->output, &o));
    bool passed = within(o.step_error, args->max_step_error) && within(o.worst_error, args->max_phase_error);
    (args->json ? print_json : print_text)(args, &c, &o, passed);
    err = passed ? MOE_OK : moe_exit_code(MOE_EVERDICT);
done:
    moe_topo_free(topo);
    moe_capture_free(&c);
    return err;
}
