/* calibrate_nccl.c - see calibrate_nccl.h. */
#include "sim/cost/calibrate_nccl.h"

#include "sim/cost/calibrate.h"
#include "sim/cost/regress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { P = MOE_NCCL_N_PARAMS, FOLDS = 4 };
#define X(member, key, unit, size, start, rows) key,
const char *const moe_nccl_text[] = {MOE_NCCL_PARAMS(X)};
#undef X
#define X(member, key, unit, size, start, rows) unit,
const char *const moe_nccl_unit[] = {MOE_NCCL_PARAMS(X)};
#undef X
#define X(member, key, unit, size, start, rows) rows,
const char *const moe_nccl_rows[] = {MOE_NCCL_PARAMS(X)};
#undef X
#define X(member, key, unit, size, start, rows) size,
const double moe_nccl_size[] = {MOE_NCCL_PARAMS(X)};
#undef X
#define X(member, key, unit, size, start, rows) offsetof(struct moe_nccl, member),
static const size_t offset[] = {MOE_NCCL_PARAMS(X)};
#undef X

/* How strongly a parameter is held near its start, in rows. Ports differ least from what NCCL says of them,
 * and a second block's launch is told by few rows. */
static const double held = 0.15, held_block = 0.3, held_port = 0.5;
static const double range = 50;     /* a parameter may be this many times its start, or a part of it */
static const double doubtful = 0.7; /* a factor of two: with such a spread rows do not tell a parameter */

double *moe_nccl_param(struct moe_nccl *p, int i)
{
    return (double *)((char *)p + offset[i]);
}

bool moe_nccl_prior(const struct moe_nccl *facts, int i, double *value, double *spread)
{
    /* Root of the mean square of log(fitted / NCCL's value) over the shipped topologies that are fitted to
     * rows of their own, those of tests/unit/test_nccl.c (priors_are_so_far_off). */
    static const struct {
        size_t offset;
        enum moe_protocol protocol;
        enum { BASE, STEP, CHANNEL, PORT } of;
        double spread;
    } prior[] = {
        {offsetof(struct moe_nccl, ll_base_s), MOE_PROTOCOL_LL, BASE, 0.28},
        {offsetof(struct moe_nccl, ll_step_s), MOE_PROTOCOL_LL, STEP, 0.48},
        {offsetof(struct moe_nccl, ll_Bps), MOE_PROTOCOL_LL, CHANNEL, 0.41},
        {offsetof(struct moe_nccl, ll128_Bps), MOE_PROTOCOL_LL128, CHANNEL, 0.31},
        {offsetof(struct moe_nccl, simple_base_s), MOE_PROTOCOL_SIMPLE, BASE, 0.7},
        {offsetof(struct moe_nccl, port_Bps), MOE_PROTOCOL_SIMPLE, PORT, 0.065},
    };
    const struct moe_nccl_table *most = facts->tables.table;
    double base_s, step_s, wire_Bps;
    for (int k = 1; k < facts->tables.n; k++)
        if (facts->tables.table[k].ranks > most->ranks) most = &facts->tables.table[k];
    for (size_t k = 0; most && k < sizeof prior / sizeof *prior; k++) {
        if (prior[k].offset != offset[i] ||
            !moe_nccl_table_ring(most, prior[k].protocol, &base_s, &step_s, &wire_Bps))
            continue;
        *value = prior[k].of == BASE      ? base_s
                 : prior[k].of == STEP    ? step_s
                 : prior[k].of == CHANNEL ? wire_Bps / (2 * facts->ring_channels)
                                          : moe_nccl_usable * wire_Bps;
        *spread = prior[k].spread;
        return true;
    }
    return false;
}

bool moe_nccl_same(const struct moe_nccl_case *a, const struct moe_nccl_case *b)
{
    bool moved = a->kind == MOE_ALLTOALL || a->kind == MOE_ALLGATHER;
    return a->kind == b->kind && a->ranks == b->ranks && a->bytes == b->bytes &&
           (moved || (a->type_bytes == b->type_bytes && a->is_float == b->is_float));
}

int moe_nccl_merge(struct moe_nccl_row *rows, int n)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        int same = 0;
        while (same < kept && !moe_nccl_same(&rows[same].c, &rows[i].c)) same++;
        if (same == kept)
            rows[kept++] = rows[i];
        else if (rows[i].time_s < rows[same].time_s)
            rows[same].time_s = rows[i].time_s;
    }
    return kept;
}

/* ---- one fit ---- */

struct problem {
    const struct moe_nccl *facts;
    const struct moe_nccl_row *rows;
    int n; /* then one row for each parameter: its start */
    double start[P], least[P], most[P];
    double *measured, *weight; /* [n + P] */
};

static void predict(void *ctx, const double *param, double *out)
{
    const struct problem *x = ctx;
    struct moe_nccl p = *x->facts;
    for (int i = 0; i < P; i++) *moe_nccl_param(&p, i) = param[i];
    double port_Bps = p.port_Bps;
    for (int i = 0; i < x->n; i++) {
        double most_Bps = x->rows[i].port_most_Bps;
        p.port_Bps = most_Bps > 0 ? fmin(port_Bps, most_Bps) : port_Bps;
        out[i] = moe_nccl_s(&p, &x->rows[i].c);
    }
    for (int i = 0; i < P; i++) out[x->n + i] = param[i];
}

static struct problem open_problem(const struct moe_nccl *facts, const struct moe_nccl_row *rows, int n)
{
    struct problem x = {.facts = facts, .rows = rows, .n = n};
    struct moe_nccl start = *facts;
    x.measured = moe_alloc((size_t)(n + P), sizeof *x.measured);
    x.weight = moe_alloc((size_t)(n + P), sizeof *x.weight);
    moe_nccl_start(&start);
    for (int i = 0; i < n; i++) {
        x.measured[i] = rows[i].time_s;
        x.weight[i] = 1;
    }
    for (int i = 0; i < P; i++) {
        x.start[i] = x.measured[n + i] = *moe_nccl_param(&start, i);
        x.least[i] = x.start[i] / range;
        x.most[i] = x.start[i] * range;
        bool block = offset[i] == offsetof(struct moe_nccl, block_s);
        bool port = offset[i] == offsetof(struct moe_nccl, port_Bps);
        x.weight[n + i] = block ? held_block : port ? held_port : held;
    }
    return x;
}

static void close_problem(struct problem *x)
{
    free(x->measured);
    free(x->weight);
}

static struct moe_regress regress(struct problem *x)
{
    return (struct moe_regress){.n_rows = x->n + P,
                                .n_params = P,
                                .measured = x->measured,
                                .weight = x->weight,
                                .start = x->start,
                                .least = x->least,
                                .most = x->most,
                                .predict = predict,
                                .ctx = x};
}

/* ---- errors ---- */

/* error [n]: of each row by a fit without the rows of its group (group [n], those of `groups` numbers). */
static void leave_out(struct problem *x, const double *param, const int64_t *group, double *error)
{
    bool *skip = moe_alloc((size_t)(x->n + P), sizeof *skip), *done = moe_alloc((size_t)x->n, sizeof *done);
    double *out = moe_alloc((size_t)(x->n + P), sizeof *out), start[P];
    memcpy(start, x->start, sizeof start);
    memcpy(x->start, param, sizeof start); /* near: the fit is short */
    struct moe_regress r = regress(x);
    for (int i = 0; i < x->n; i++) {
        double left[P];
        if (done[i]) continue;
        for (int j = 0; j < x->n; j++) skip[j] = group[j] == group[i];
        moe_regress_fit(&r, skip, left);
        predict(x, left, out);
        for (int j = i; j < x->n; j++) {
            if (!skip[j]) continue;
            error[j] = fabs(log(out[j] / x->rows[j].time_s));
            done[j] = true;
        }
    }
    memcpy(x->start, start, sizeof start);
    free(skip);
    free(done);
    free(out);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double moe_quantile(double *values, int n, double q)
{
    if (!n) return NAN;
    double at = q * (n - 1);
    int below = (int)at, above = below + 1 < n ? below + 1 : below;
    qsort(values, (size_t)n, sizeof *values, by_size);
    return values[below] + (values[above] - values[below]) * (at - below);
}

/* Of the errors of one class and band. */
static double quantile(const struct problem *x, const double *error, int class, int band, double q)
{
    double *some = moe_alloc((size_t)x->n, sizeof *some);
    int n = 0;
    for (int i = 0; i < x->n; i++)
        if ((class < 0 || moe_nccl_class(&x->rows[i].c) == class) &&
            (band < 0 || moe_nccl_band(x->rows[i].c.bytes) == band))
            some[n++] = error[i];
    double found = moe_quantile(some, n, q);
    free(some);
    return found;
}

/* Medians over the rows that were fitted. */
static void set_residuals(struct problem *x, const double *param, struct moe_nccl_fit *out)
{
    double *error = moe_alloc((size_t)(x->n + P), sizeof *error);
    predict(x, param, error);
    for (int i = 0; i < x->n; i++) error[i] = fabs(log(error[i] / x->rows[i].time_s));
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
        for (int band = 0; band < MOE_NCCL_BANDS; band++)
            out->residual[class][band] = quantile(x, error, class, band, 0.5);
    out->median = quantile(x, error, -1, -1, 0.5);
    free(error);
}

/* What the rows alone do not tell stays where it starts, or where NCCL's table has it. How far they are off
 * differs by class and size. */
static void fix_what_is_not_told(struct problem *x, const double *param, struct moe_nccl_fit *out)
{
    static const double to_deviation = 1.4826, least = 1e-3; /* of the median of normal errors */
    double weight[P];
    struct moe_regress r = regress(x);
    memcpy(weight, x->weight + x->n, sizeof weight);
    memset(x->weight + x->n, 0, sizeof weight);
    for (int i = 0; i < x->n; i++) {
        const struct moe_nccl_case *c = &x->rows[i].c;
        double off = fmax(to_deviation * out->residual[moe_nccl_class(c)][moe_nccl_band(c->bytes)], least);
        x->weight[i] = 1 / (off * off);
    }
    moe_regress_doubt(&r, param, 1, out->spread);
    for (int i = 0; i < x->n; i++) x->weight[i] = 1;
    memcpy(x->weight + x->n, weight, sizeof weight);
    for (int i = 0; i < P; i++) {
        out->told[i] = out->spread[i] < doubtful;
        if (out->told[i]) continue;
        out->prior[i] = moe_nccl_prior(x->facts, i, &x->start[i], &out->spread[i]);
        x->least[i] = x->most[i] = x->start[i];
    }
}

/* How far off predictions may be: errors of the rows of one number of GPUs by a fit to the others. The next
 * number asked for is as far again; and half and int8 of the same bytes differ by 3.6 % (root of the mean
 * square over four machines), so what a measurement repeats to is about 3 %. */
static void set_errors(struct problem *x, const double *param, struct moe_nccl_fit *out)
{
    static const double farther = 1.41421356, repeat = 0.03;
    int64_t *group = moe_alloc((size_t)x->n, sizeof *group);
    double *error = moe_alloc((size_t)x->n, sizeof *error);
    bool one_size = true, one_ranks = true;
    for (int i = 0; i < x->n; i++) {
        group[i] = x->rows[i].c.bytes;
        one_size &= group[i] == group[0];
        one_ranks &= x->rows[i].c.ranks == x->rows[0].c.ranks;
    }
    if (!one_size) leave_out(x, param, group, error);
    out->without_size = one_size ? NAN : quantile(x, error, -1, -1, 0.5);
    /* All-gathers of the most GPUs alone do not make up for rows of all kinds. */
    int smallest = 1 << 30, most = 0;
    for (int i = 0; i < x->n; i++)
        if (x->rows[i].c.kind == MOE_ALLTOALL) {
            if (x->rows[i].c.ranks > most) most = x->rows[i].c.ranks;
            if (x->rows[i].c.ranks < smallest) smallest = x->rows[i].c.ranks;
        }
    for (int i = 0; i < x->n; i++) group[i] = x->rows[i].c.ranks;
    if (!one_ranks) leave_out(x, param, group, error);
    out->without_ranks = one_ranks ? NAN : quantile(x, error, -1, -1, 0.5);
    if (smallest >= most) { /* sizes in quarters instead */
        for (int i = 0; i < x->n; i++) group[i] = ilogb((double)x->rows[i].c.bytes) % FOLDS;
        leave_out(x, param, group, error);
    }
    for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
        for (int band = 0; band < MOE_NCCL_BANDS; band++) {
            double q = quantile(x, error, class, band, 0.8);
            out->value.error[class][band] = isnan(q) ? 0 : hypot(farther * q, repeat);
        }
    free(group);
    free(error);
}

int moe_nccl_calibrate(const struct moe_nccl *facts, const struct moe_nccl_row *rows, int n,
                       struct moe_nccl_fit *out)
{
    if (n < P) return moe_fail(MOE_EINPUT, "%d rows, expected %d or more", n, P);
    struct problem x = open_problem(facts, rows, n);
    struct moe_regress r = regress(&x);
    double param[P];
    *out = (struct moe_nccl_fit){.value = *facts, .n_rows = n};
    moe_regress_fit(&r, NULL, param);
    set_residuals(&x, param, out);
    fix_what_is_not_told(&x, param, out);
    moe_regress_fit(&r, NULL, param);
    set_residuals(&x, param, out);
    for (int i = 0; i < P; i++) *moe_nccl_param(&out->value, i) = param[i];
    for (int i = 0; i < n; i++) out->value.fitted |= moe_nccl_bit(&out->value, &rows[i].c);
    set_errors(&x, param, out);
    close_problem(&x);
    return MOE_OK;
}
