/* calibrate.c - see calibrate.h. */
#include "sim/cost/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
const char *const moe_op_class_text[] = {MOE_OP_CLASSES(X)};
#undef X
#define X(name, key, unit, size, rate) key,
const char *const moe_fitted_text[] = {MOE_FITTED(X)};
#undef X
#define X(name, key, unit, size, rate) unit,
const char *const moe_fitted_unit[] = {MOE_FITTED(X)};
#undef X
#define X(name, key, unit, size, rate) size,
const double moe_fitted_size[] = {MOE_FITTED(X)};
#undef X
#define X(name, key, unit, size, rate) rate,
static const bool is_rate[] = {MOE_FITTED(X)};
#undef X

static const enum moe_op_class kernel_class[MOE_K_COUNT] = {
    [MOE_K_GEMM] = MOE_CLASS_DENSE,
    [MOE_K_ATTENTION] = MOE_CLASS_ATTENTION,
    [MOE_K_ATTENTION_BWD] = MOE_CLASS_ATTENTION,
    [MOE_K_GROUPED_GEMM] = MOE_CLASS_EXPERTS,
    [MOE_K_GROUPED_WGRAD] = MOE_CLASS_EXPERTS,
    [MOE_K_SWIGLU] = MOE_CLASS_EXPERTS,
    [MOE_K_SWIGLU_BWD] = MOE_CLASS_EXPERTS,
    [MOE_K_TOPK] = MOE_CLASS_ROUTING,
    [MOE_K_TOPK_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_LARGEST] = MOE_CLASS_ROUTING,
    [MOE_K_SET] = MOE_CLASS_ROUTING,
    [MOE_K_LIMIT] = MOE_CLASS_ROUTING,
    [MOE_K_NORMALIZE] = MOE_CLASS_ROUTING,
    [MOE_K_NORMALIZE_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_AUX_LOSS] = MOE_CLASS_ROUTING,
    [MOE_K_AUX_LOSS_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_SELECT] = MOE_CLASS_ROUTING,
    [MOE_K_SPREAD] = MOE_CLASS_ROUTING,
    [MOE_K_PERMUTE] = MOE_CLASS_ROUTING,
    [MOE_K_PERMUTE_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_SORT_ROWS] = MOE_CLASS_ROUTING,
    [MOE_K_UNSORT_ROWS] = MOE_CLASS_ROUTING,
    [MOE_K_TAKE] = MOE_CLASS_ROUTING,
    [MOE_K_TAKE_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_WEIGH] = MOE_CLASS_ROUTING,
    [MOE_K_WEIGH_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_COMBINE] = MOE_CLASS_ROUTING,
    [MOE_K_COMBINE_BWD] = MOE_CLASS_ROUTING,
    [MOE_K_EMBED] = MOE_CLASS_OTHER,
    [MOE_K_EMBED_BWD] = MOE_CLASS_OTHER,
    [MOE_K_RMSNORM] = MOE_CLASS_OTHER,
    [MOE_K_RMSNORM_BWD] = MOE_CLASS_OTHER,
    [MOE_K_ADD] = MOE_CLASS_OTHER,
    [MOE_K_ADD_BWD] = MOE_CLASS_OTHER,
    [MOE_K_XENT] = MOE_CLASS_OTHER,
    [MOE_K_ZERO] = MOE_CLASS_OTHER,
    [MOE_K_SCALE] = MOE_CLASS_OTHER,
    [MOE_K_COPY] = MOE_CLASS_OTHER,
    [MOE_K_SQNORM] = MOE_CLASS_OTHER,
    [MOE_K_CLIP] = MOE_CLASS_OTHER,
    [MOE_K_SGD] = MOE_CLASS_OTHER,
    [MOE_K_ADAMW] = MOE_CLASS_OTHER,
};

static enum moe_op_class class_of(const struct moe_op *op)
{
    return op->kind == MOE_COLLECTIVE ? MOE_CLASS_COLLECTIVE : kernel_class[op->kernel];
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double moe_median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, by_value);
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/* ---- times of a step ---- */

struct moe_times *moe_times_new(const struct moe_schedule *s)
{
    struct moe_times *t = moe_alloc(1, sizeof *t);
    moe_assert(s->n_roles == 1);
    t->n_ranks = s->n_ranks;
    t->n_instances = s->roles->n_instances;
    for (int b = 0; b < s->roles->n_blocks; b++)
        if (s->roles->blocks[b].n_ops > t->n_ops) t->n_ops = s->roles->blocks[b].n_ops;
    size_t n = moe_times_place(t, t->n_ranks, 0, 0);
    t->own_s = moe_alloc(n, sizeof *t->own_s);
    t->wait_s = moe_alloc(n, sizeof *t->wait_s);
    return t;
}

void moe_times_free(struct moe_times *t)
{
    if (!t) return;
    free(t->own_s);
    free(t->wait_s);
    free(t);
}

/* An operation of a step, whatever the rank. */
struct at {
    int instance, op;
    const struct moe_block *block;
    const struct moe_op *it;
};

/* Goes to the next operation, from {.op = -1}; false at the end. */
static bool next_op(const struct moe_schedule *s, struct at *at)
{
    const struct moe_role *role = s->roles;
    for (at->op++; at->instance < role->n_instances; at->instance++, at->op = 0) {
        at->block = &role->blocks[role->itinerary[at->instance].block];
        if (at->op == at->block->n_ops) continue;
        at->it = &at->block->ops[at->op];
        return true;
    }
    return false;
}
#define EACH_OP(s, at)                                                                                       \
    struct at at = {.op = -1};                                                                               \
    next_op(s, &(at));

static void measure_collective(const struct moe_comm *comm, const struct moe_clock_times *clock, struct at at,
                               struct moe_times *out)
{
    for (int rank = 0; rank < out->n_ranks; rank++) {
        int group = comm->group_of[rank];
        size_t own = moe_times_place(out, rank, at.instance, at.op);
        double latest = clock[own].entry_s;
        for (int m = comm->first[group]; m < comm->first[group + 1]; m++)
            latest = fmax(latest, clock[moe_times_place(out, comm->members[m], at.instance, at.op)].entry_s);
        double begin = fmin(latest, clock[own].end_s);
        out->own_s[own] = clock[own].end_s - begin;
        out->wait_s[own] = begin - clock[own].entry_s;
    }
}

void moe_times_measure(const struct moe_schedule *s, const struct moe_clock_times *clock,
                       struct moe_times *out)
{
    double first = INFINITY, last = -INFINITY,
           *gap = moe_alloc(moe_times_place(out, out->n_ranks, 0, 0), sizeof *gap);
    double *before = moe_alloc((size_t)out->n_ranks, sizeof *before);
    int n_gaps = 0;
    for (EACH_OP(s, at)) {
        for (int rank = 0; rank < out->n_ranks; rank++) {
            size_t place = moe_times_place(out, rank, at.instance, at.op);
            const struct moe_clock_times *c = &clock[place];
            out->own_s[place] = c->end_s - c->start_s;
            if (before[rank] > 0) gap[n_gaps++] = c->start_s - before[rank];
            before[rank] = c->end_s;
            first = fmin(first, c->entry_s);
            last = fmax(last, c->end_s);
        }
        if (at.it->kind == MOE_COLLECTIVE) measure_collective(&s->comms[at.it->comm], clock, at, out);
    }
    out->step_s = last - first;
    out->launch_s = n_gaps ? moe_median(gap, n_gaps) : 0;
    free(gap);
    free(before);
}

struct sight {
    const struct moe_schedule *s;
    struct moe_times *times;
};

static int instance_of(const struct moe_role *role, int block, int layer)
{
    int i = 0;
    while (role->itinerary[i].block != block || role->itinerary[i].layer != layer) i++;
    return i;
}

static void see(void *ctx, const struct moe_sim_seen *seen)
{
    const struct sight *sight = ctx;
    const struct moe_role *role = sight->s->roles;
    int instance = instance_of(role, (int)(seen->block - role->blocks), seen->layer);
    size_t place = moe_times_place(sight->times, seen->rank, instance, (int)(seen->op - seen->block->ops));
    sight->times->own_s[place] = (double)seen->own * 1e-12;
    sight->times->wait_s[place] = (double)seen->wait * 1e-12;
}

int moe_times_predict(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                      struct moe_times *out)
{
    struct sight sight = {s, out};
    struct moe_sim_result result;
    int err = moe_simulate_seen(s, r, t, see, &sight, &result);
    out->step_s = (double)result.step * 1e-12;
    moe_sim_free(&result);
    return err;
}

/* ---- phases ---- */

void moe_phases(const struct moe_schedule *s, const struct moe_times *t, double phase_s[MOE_PHASE_COUNT])
{
    double all = 0;
    memset(phase_s, 0, MOE_PHASE_COUNT * sizeof *phase_s);
    for (EACH_OP(s, at))
        for (int rank = 0; rank < t->n_ranks && at.it->kind != MOE_HOST_SYNC; rank++) {
            size_t place = moe_times_place(t, rank, at.instance, at.op);
            phase_s[class_of(at.it) * MOE_PASS_COUNT + at.block->pass] += t->own_s[place] / t->n_ranks;
            phase_s[MOE_PHASE_WAITING] += t->wait_s[place] / t->n_ranks;
        }
    for (int p = 0; p < MOE_PHASE_HOST; p++) all += phase_s[p];
    phase_s[MOE_PHASE_HOST] = t->step_s - all;
}

void moe_phase_name(int phase, char out[MOE_NAME])
{
    if (phase == MOE_PHASE_WAITING)
        moe_copy_name(out, "waiting for others");
    else if (phase == MOE_PHASE_HOST)
        moe_copy_name(out, "host and idle");
    else
        snprintf(out, MOE_NAME, "%s, %s", moe_op_class_text[phase / MOE_PASS_COUNT],
                 moe_pass_text[phase % MOE_PASS_COUNT]);
}

double moe_off(double measured, double predicted)
{
    return measured > 0 ? predicted / measured - 1 : INFINITY;
}

bool moe_phase_counts(double measured, double predicted, double measured_step)
{
    return 100 * fmax(measured, predicted) >= MOE_COUNTED_PCT * measured_step;
}

/* ---- the fit ---- */

struct moe_topo moe_fit_topo(const double value[MOE_FIT_COUNT], int64_t cores)
{
    double crowding = value[MOE_FIT_CROWDING];
    return (struct moe_topo){
        .gpus_per_node = 1024,
        .nics_per_node = 1,
        .matmul_float32_flops = value[MOE_FIT_MATMUL] / crowding,
        .matmul_float64_flops = value[MOE_FIT_MATMUL] / crowding,
        .memory_Bps = value[MOE_FIT_MEMORY] / crowding,
        .launch_s = value[MOE_FIT_LAUNCH],
        .host_sync_s = value[MOE_FIT_HOST_SYNC],
        .intra_Bps = value[MOE_FIT_BANDWIDTH],
        .nic_Bps = value[MOE_FIT_BANDWIDTH],
        .intra_latency_s = value[MOE_FIT_LATENCY],
        .inter_latency_s = value[MOE_FIT_LATENCY],
        .cores = cores,
        .slice_s = value[MOE_FIT_SLICE],
        .scalar_flops = value[MOE_FIT_SCALAR] / crowding,
        .call_s = value[MOE_FIT_CALL] * crowding,
    };
}

static int simulate(const struct moe_steps *steps, int step, const double *value, int64_t cores,
                    struct moe_times *out)
{
    struct moe_topo t = moe_fit_topo(value, cores);
    int err = moe_times_predict(steps->s, steps->routing[step], &t, out);
    free(t.link_Bps);
    free(t.link_class);
    return err;
}

/* Operations of one kind of some steps: y = sum over terms of x * factor. */
struct samples {
    int first, n_terms; /* terms first .. first + n_terms - 1 */
    int n, cap;
    struct sample {
        double y, x[MOE_FIT_TERMS];
        enum moe_op_class class;
    } * it;
};
enum { FIFTHS = 5 };
static const double most_rate = 1e6; /* in units: an unused term takes no time */

/* What a step takes where only this term takes time, one unit of it; [place] of *out. */
static int ask_for_term(const struct moe_steps *steps, int step, int term, struct moe_times *out)
{
    double value[MOE_FIT_COUNT];
    for (int i = 0; i < MOE_FIT_COUNT; i++) value[i] = is_rate[i] ? 1e30 : 0;
    value[term] = moe_fitted_size[term];
    value[MOE_FIT_SLICE] = value[MOE_FIT_CROWDING] = 1;
    return simulate(steps, step, value, steps->s->n_ranks, out);
}

static void add_sample(struct samples *samples, struct sample s)
{
    samples->it = moe_grow(samples->it, &samples->cap, samples->n + 1, sizeof *samples->it);
    samples->it[samples->n++] = s;
}

/* Adds a step's kernels, each rank's, and collectives, those that leave first. */
static void add_samples(const struct moe_steps *steps, int step, struct moe_times *const *term,
                        struct samples *kernels, struct samples *collectives)
{
    const struct moe_times *t = steps->times[step];
    for (EACH_OP(steps->s, at)) {
        struct sample least = {.y = INFINITY, .class = class_of(at.it)};
        if (at.it->kind == MOE_HOST_SYNC) continue;
        for (int rank = 0; rank < t->n_ranks; rank++) {
            size_t place = moe_times_place(t, rank, at.instance, at.op);
            struct sample s = least;
            s.y = t->own_s[place];
            for (int i = 0; i < MOE_FIT_TERMS; i++) s.x[i] = term[i]->own_s[place];
            if (at.it->kind == MOE_KERNEL) add_sample(kernels, s);
            if (s.y < least.y) least = s;
        }
        if (at.it->kind == MOE_COLLECTIVE) add_sample(collectives, least);
    }
}

static double fitted(const struct samples *s, int i, const double *factor)
{
    double sum = 0;
    for (int t = s->first; t < s->first + s->n_terms; t++) sum += s->it[i].x[t] * factor[t];
    return sum;
}

/* Minimises the squares of y - fitted with these weights, no factor below its least: one factor at a time. */
static void least_squares(const struct samples *s, const double *weight, double *factor)
{
    double gram[MOE_FIT_TERMS][MOE_FIT_TERMS] = {{0}}, right[MOE_FIT_TERMS] = {0};
    int end = s->first + s->n_terms;
    for (int i = 0; i < s->n; i++)
        for (int a = s->first; a < end && weight[i] > 0; a++) {
            right[a] += weight[i] * s->it[i].x[a] * s->it[i].y;
            for (int b = s->first; b < end; b++) gram[a][b] += weight[i] * s->it[i].x[a] * s->it[i].x[b];
        }
    for (int sweep = 0; sweep < 200; sweep++)
        for (int a = s->first; a < end; a++) {
            double rest = right[a], least = is_rate[a] ? 1 / most_rate : 0;
            for (int b = s->first; b < end; b++) rest -= a == b ? 0 : gram[a][b] * factor[b];
            factor[a] = gram[a][a] > 0 ? fmax(rest / gram[a][a], least) : least;
        }
}

static int by_time(const void *a, const void *b)
{
    const struct sample *x = a, *y = b;
    return (x->y > y->y) - (x->y < y->y);
}

/* Of each operation the median over the steps, the shorter one of two. */
static struct samples pick(const struct samples *s, int n_steps, int fifth)
{
    struct samples picked = {.first = s->first, .n_terms = s->n_terms};
    struct sample *same = moe_alloc((size_t)n_steps, sizeof *same);
    int of_step = s->n / n_steps; /* every step added the same operations, in the same order */
    for (int i = 0; i < of_step; i++) {
        int n = 0;
        for (int step = 0; step < n_steps; step++)
            if (fifth < 0 || step % FIFTHS == fifth) same[n++] = s->it[step * of_step + i];
        qsort(same, (size_t)n, sizeof *same, by_time);
        add_sample(&picked, same[(n - 1) / 2]);
    }
    free(same);
    return picked;
}

/* Least absolute errors by reweighted least squares; a sample counts by the root of its time, so that neither
 * the many short ones decide nor the few long ones. */
static void fit_terms(const struct samples *s, double *factor)
{
    double *weight = moe_alloc((size_t)s->n, sizeof *weight);
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < s->n; i++) {
            double y = s->it[i].y, off = round ? fabs(y - fitted(s, i, factor)) : y;
            weight[i] = y > 0 ? 1 / sqrt(y) / fmax(off, 1e-3 * y) : 0;
        }
        least_squares(s, weight, factor);
    }
    free(weight);
}

/* How far the phases of a simulated step are from the measured ones, long ones counting more. */
static int distance(const struct moe_steps *steps, int step, const double *value, int64_t cores,
                    struct moe_times *times, double *sum)
{
    double measured[MOE_PHASE_COUNT], predicted[MOE_PHASE_COUNT];
    MOE_TRY(simulate(steps, step, value, cores, times));
    moe_phases(steps->s, steps->times[step], measured);
    moe_phases(steps->s, times, predicted);
    for (int p = 0; p < MOE_PHASE_COUNT; p++)
        *sum += fabs(predicted[p] - measured[p]) / steps->times[step]->step_s;
    return MOE_OK;
}

/* What is tried of a number: low, low * by, ... up to high. */
static const struct {
    double low, high, by;
} grid[MOE_FIT_COUNT] = {[MOE_FIT_SLICE] = {0.5e-3, 17e-3, 1.41421356}, [MOE_FIT_CROWDING] = {1, 1.7, 1.04}};

/* Sets a number to the one of its grid with which the phases are nearest. */
static int search(const struct moe_steps *steps, int64_t cores, int fifth, enum moe_fitted number,
                  double *value)
{
    struct moe_times *times = moe_times_new(steps->s);
    double least = INFINITY, best = grid[number].low;
    int err = MOE_OK;
    for (double tried = best; tried < grid[number].high && err >= 0; tried *= grid[number].by) {
        double sum = 0;
        value[number] = tried;
        for (int i = 0; i < steps->n && err >= 0; i++)
            if (fifth < 0 || i % FIFTHS == fifth) err = distance(steps, i, value, cores, times, &sum);
        if (sum < least) least = sum, best = tried;
    }
    value[number] = best;
    moe_times_free(times);
    return err;
}

/* Medians of what is measured by itself. */
static int fit_host(const struct moe_steps *steps, int fifth, double *value)
{
    double *launch = moe_alloc((size_t)steps->n, sizeof *launch), *sync = NULL;
    int n_launch = 0, n_sync = 0, cap_sync = 0;
    for (int i = 0; i < steps->n; i++) {
        if (fifth >= 0 && i % FIFTHS != fifth) continue;
        launch[n_launch++] = steps->times[i]->launch_s;
        for (EACH_OP(steps->s, at))
            for (int rank = 0; rank < steps->s->n_ranks && at.it->kind == MOE_HOST_SYNC; rank++) {
                sync = moe_grow(sync, &cap_sync, n_sync + 1, sizeof *sync);
                sync[n_sync++] =
                    steps->times[i]->own_s[moe_times_place(steps->times[i], rank, at.instance, at.op)];
            }
    }
    value[MOE_FIT_LAUNCH] = n_launch ? moe_median(launch, n_launch) : 0;
    value[MOE_FIT_HOST_SYNC] = n_sync ? moe_median(sync, n_sync) : 0;
    free(launch);
    free(sync);
    if (value[MOE_FIT_LAUNCH] >= 0 && value[MOE_FIT_HOST_SYNC] >= 0) return MOE_OK;
    return moe_fail(MOE_EINPUT,
                    "launch %g us, host_sync %g us: expected operations of a rank one after another",
                    value[MOE_FIT_LAUNCH] * 1e6, value[MOE_FIT_HOST_SYNC] * 1e6);
}

static int fit(const struct moe_steps *steps, const struct samples *kernels,
               const struct samples *collectives, int64_t cores, int fifth, double *value)
{
    double factor[MOE_FIT_TERMS] = {0};
    struct samples quick = pick(kernels, steps->n, fifth), first = pick(collectives, steps->n, fifth);
    fit_terms(&quick, factor);
    fit_terms(&first, factor);
    free(quick.it);
    free(first.it);
    for (int i = 0; i < MOE_FIT_TERMS; i++)
        value[i] = is_rate[i] ? moe_fitted_size[i] / factor[i] : moe_fitted_size[i] * factor[i];
    MOE_TRY(fit_host(steps, fifth, value));
    value[MOE_FIT_CROWDING] = 1;
    for (int round = 0; round < 2; round++) {
        MOE_TRY(search(steps, cores, fifth, MOE_FIT_SLICE, value));
        MOE_TRY(search(steps, cores, fifth, MOE_FIT_CROWDING, value));
    }
    return MOE_OK;
}

/* Is a number inside what was tried? No host is quicker than its medians: crowding may be 1. */
static bool is_inside(enum moe_fitted number, double value)
{
    bool above = number == MOE_FIT_CROWDING || value > grid[number].low;
    if (is_rate[number]) return value < 0.999 * most_rate * moe_fitted_size[number];
    return above && (grid[number].high == 0 || value * grid[number].by < grid[number].high);
}

static void count_samples(const struct samples *s, int n_steps, struct moe_fit *out)
{
    struct samples picked = pick(s, n_steps, -1);
    for (int i = 0; i < picked.n; i++) {
        if (!(picked.it[i].y > 0)) continue; /* has no weight */
        out->class_samples[picked.it[i].class]++;
        out->n_samples++;
    }
    free(picked.it);
}

static void fit_errors(const struct samples *s, struct moe_fit *out)
{
    double *error = moe_alloc((size_t)s->n, sizeof *error), factor[MOE_FIT_TERMS];
    for (int i = 0; i < MOE_FIT_TERMS; i++)
        factor[i] = is_rate[i] ? moe_fitted_size[i] / out->value[i] : out->value[i] / moe_fitted_size[i];
    for (int class = 0; class < MOE_CLASS_COUNT; class ++) {
        int n = 0;
        for (int i = 0; i < s->n; i++)
            if ((int)s->it[i].class == class && s->it[i].y > 0)
                error[n++] = fabs(fitted(s, i, factor) / s->it[i].y - 1);
        if (n) out->class_error[class] = moe_median(error, n);
    }
    free(error);
}

static int collect(const struct moe_steps *steps, struct samples *kernels, struct samples *collectives)
{
    struct moe_times *term[MOE_FIT_TERMS];
    int err = MOE_OK;
    for (int i = 0; i < MOE_FIT_TERMS; i++) term[i] = moe_times_new(steps->s);
    for (int step = 0; step < steps->n && err >= 0; step++) {
        for (int i = 0; i < MOE_FIT_TERMS && err >= 0; i++) err = ask_for_term(steps, step, i, term[i]);
        if (err >= 0) add_samples(steps, step, term, kernels, collectives);
    }
    for (int i = 0; i < MOE_FIT_TERMS; i++) moe_times_free(term[i]);
    return err;
}

int moe_calibrate(const struct moe_steps *steps, int64_t cores, struct moe_fit *out)
{
    struct samples kernels = {.first = MOE_FIT_MATMUL, .n_terms = MOE_FIT_LATENCY - MOE_FIT_MATMUL};
    struct samples collectives = {.first = MOE_FIT_LATENCY, .n_terms = MOE_FIT_TERMS - MOE_FIT_LATENCY};
    double part[FIFTHS][MOE_FIT_COUNT];
    int n_parts = steps->n < FIFTHS ? 0 : FIFTHS, err;
    *out = (struct moe_fit){0};
    MOE_TRY_GOTO(collect(steps, &kernels, &collectives));
    MOE_TRY_GOTO(fit(steps, &kernels, &collectives, cores, -1, out->value));
    for (int p = 0; p < n_parts; p++) MOE_TRY_GOTO(fit(steps, &kernels, &collectives, cores, p, part[p]));
    for (int i = 0; i < MOE_FIT_COUNT; i++) {
        double mean = 0, squares = 0;
        bool inside = is_inside((enum moe_fitted)i, out->value[i]);
        for (int p = 0; p < n_parts; p++) mean += part[p][i] / n_parts;
        for (int p = 0; p < n_parts; p++) {
            squares += (part[p][i] - mean) * (part[p][i] - mean);
            inside &= is_inside((enum moe_fitted)i, part[p][i]);
        }
        out->spread[i] = n_parts ? sqrt(squares / (n_parts - 1)) : 0;
        out->determined[i] = inside && out->spread[i] <= out->value[i];
    }
    count_samples(&kernels, steps->n, out);
    count_samples(&collectives, steps->n, out);
    fit_errors(&kernels, out);
    fit_errors(&collectives, out);
done:
    free(kernels.it);
    free(collectives.it);
    return err;
}
