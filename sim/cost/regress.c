/* regress.c - see regress.h. */
#include "sim/cost/regress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { P = MOE_REGRESS_PARAMS };
static const double least_error = 0.03; /* repeated measurements differ by this: below, squares count */
static const double small_step = 1e-4;  /* of a logarithm, for derivatives */

/* out [n_rows]: errors. */
static void errors(const struct moe_regress *r, const double *log_param, double *out)
{
    double param[P];
    for (int p = 0; p < r->n_params; p++) param[p] = exp(log_param[p]);
    r->predict(r->ctx, param, out);
    for (int i = 0; i < r->n_rows; i++) out[i] = log(out[i] / r->measured[i]);
}

static double weight_of(const struct moe_regress *r, const bool *skip, int row)
{
    return skip && skip[row] ? 0 : r->weight ? r->weight[row] : 1;
}

static double loss_of(const struct moe_regress *r, const bool *skip, const double *error)
{
    double sum = 0, all = 0;
    for (int i = 0; i < r->n_rows; i++) {
        double w = weight_of(r, skip, i), e = fabs(error[i]);
        if (w == 0) continue;
        sum += w * (e < least_error ? (e * e / least_error + least_error) / 2 : e);
        all += w;
    }
    return all == 0 ? 0 : isnan(sum) ? INFINITY : sum / all;
}

static double loss_at(const struct moe_regress *r, const bool *skip, const double *log_param, double *error)
{
    errors(r, log_param, error);
    return loss_of(r, skip, error);
}

double moe_regress_loss(const struct moe_regress *r, const bool *skip, const double *param)
{
    double log_param[P], *error = moe_alloc((size_t)r->n_rows, sizeof *error);
    for (int p = 0; p < r->n_params; p++) log_param[p] = log(param[p]);
    double loss = loss_at(r, skip, log_param, error);
    free(error);
    return loss;
}

static double clamp(const struct moe_regress *r, int p, double log_value)
{
    return fmin(fmax(log_value, log(r->least[p])), log(r->most[p]));
}

/* slope [n_params, n_rows]: of the errors, by each parameter's logarithm. */
static void slopes(const struct moe_regress *r, const double *log_param, double *slope)
{
    double at[P], *below = moe_alloc((size_t)r->n_rows, sizeof *below);
    memcpy(at, log_param, sizeof at);
    for (int p = 0; p < r->n_params; p++) {
        double *s = slope + (size_t)p * (size_t)r->n_rows;
        at[p] = log_param[p] - small_step;
        errors(r, at, below);
        at[p] = log_param[p] + small_step;
        errors(r, at, s);
        at[p] = log_param[p];
        for (int i = 0; i < r->n_rows; i++) s[i] = (s[i] - below[i]) / (2 * small_step);
    }
    free(below);
}

/* Solves a x = b, a [n, n] symmetric and positive definite; false when it is not. a becomes its factor. */
static bool solve(int n, double a[P][P], double *b)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            double sum = a[i][j];
            for (int k = 0; k < j; k++) sum -= a[i][k] * a[j][k];
            if (i == j && !(sum > 1e-12 * (1 + a[i][i]))) return false;
            a[i][j] = i == j ? sqrt(sum) : sum / a[j][j];
        }
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++) b[i] -= a[i][k] * b[k];
        b[i] /= a[i][i];
    }
    for (int i = n - 1; i >= 0; i--) {
        for (int k = i + 1; k < n; k++) b[i] -= a[k][i] * b[k];
        b[i] /= a[i][i];
    }
    return true;
}

/* The matrix of the slopes, row i counting by weight[i]; right: with the errors. */
static void normal(const struct moe_regress *r, const double *slope, const double *weight,
                   const double *error, double a[P][P], double *right)
{
    size_t n = (size_t)r->n_rows;
    for (int p = 0; p < r->n_params; p++) {
        right[p] = 0;
        for (size_t i = 0; i < n; i++) right[p] -= weight[i] * slope[(size_t)p * n + i] * error[i];
        for (int q = 0; q <= p; q++) {
            a[p][q] = 0;
            for (size_t i = 0; i < n; i++)
                a[p][q] += weight[i] * slope[(size_t)p * n + i] * slope[(size_t)q * n + i];
            a[q][p] = a[p][q];
        }
    }
}

static void gauss_newton(const struct moe_regress *r, const bool *skip, double *log_param)
{
    size_t n = (size_t)r->n_rows;
    double *slope = moe_alloc((size_t)r->n_params * n, sizeof *slope), *weight = moe_alloc(n, sizeof *weight),
           *error = moe_alloc(n, sizeof *error), damping = 1e-3;
    double loss = loss_at(r, skip, log_param, error);
    for (int round = 0; round < 30 && damping < 1e6; round++) {
        double a[P][P], right[P];
        slopes(r, log_param, slope);
        for (int i = 0; i < r->n_rows; i++)
            weight[i] = weight_of(r, skip, i) / fmax(fabs(error[i]), least_error);
        normal(r, slope, weight, error, a, right);
        for (bool better = false; !better && damping < 1e6;) {
            double trial[P], damped[P][P], step[P];
            memcpy(damped, a, sizeof damped);
            memcpy(step, right, sizeof step);
            for (int p = 0; p < r->n_params; p++) damped[p][p] += damping * a[p][p] + 1e-9;
            bool solved = solve(r->n_params, damped, step);
            for (int p = 0; p < r->n_params; p++)
                trial[p] = clamp(r, p, log_param[p] + (solved ? fmax(fmin(step[p], 1), -1) : 0));
            double now = loss_at(r, skip, trial, error);
            better = now < loss * (1 - 1e-6);
            damping = better ? fmax(damping / 5, 1e-6) : damping * 5;
            if (!better) continue;
            memcpy(log_param, trial, (size_t)r->n_params * sizeof *trial);
            loss = now;
        }
        loss = loss_at(r, skip, log_param, error);
    }
    free(slope);
    free(weight);
    free(error);
}

static void along_axes(const struct moe_regress *r, const bool *skip, double *log_param)
{
    double *error = moe_alloc((size_t)r->n_rows, sizeof *error), loss = loss_at(r, skip, log_param, error);
    for (double step = 0.2; step > 5e-4;) {
        bool better = false;
        for (int p = 0; p < r->n_params; p++)
            for (int sign = -1; sign <= 1; sign += 2) {
                double was = log_param[p];
                log_param[p] = clamp(r, p, was + sign * step);
                double now = loss_at(r, skip, log_param, error);
                if (now < loss * (1 - 1e-6)) {
                    loss = now;
                    better = true;
                    break;
                }
                log_param[p] = was;
            }
        if (!better) step /= 2;
    }
    free(error);
}

void moe_regress_fit(const struct moe_regress *r, const bool *skip, double *param)
{
    double log_param[P] = {0};
    moe_assert(r->n_params > 0 && r->n_params <= P);
    for (int p = 0; p < r->n_params; p++) log_param[p] = clamp(r, p, log(r->start[p]));
    double *error = moe_alloc((size_t)r->n_rows, sizeof *error), loss = INFINITY;
    for (double before = INFINITY; isinf(before) || loss < before * (1 - 1e-3);) {
        before = loss;
        gauss_newton(r, skip, log_param);
        along_axes(r, skip, log_param);
        loss = loss_at(r, skip, log_param, error);
    }
    free(error);
    for (int p = 0; p < r->n_params; p++) param[p] = exp(log_param[p]);
}

void moe_regress_doubt(const struct moe_regress *r, const double *param, double error, double *out)
{
    size_t n = (size_t)r->n_rows;
    double *slope = moe_alloc((size_t)r->n_params * n, sizeof *slope), *zero = moe_alloc(n, sizeof *zero),
           *weight = moe_alloc(n, sizeof *weight), log_param[P], a[P][P], right[P];
    for (int p = 0; p < r->n_params; p++) log_param[p] = log(param[p]);
    slopes(r, log_param, slope);
    for (size_t i = 0; i < n; i++) weight[i] = weight_of(r, NULL, (int)i);
    normal(r, slope, weight, zero, a, right);
    for (int p = 0; p < r->n_params; p++) {
        double copy[P][P], unit[P] = {0};
        bool bound = param[p] <= r->least[p] * (1 + 1e-6) || param[p] >= r->most[p] * (1 - 1e-6);
        memcpy(copy, a, sizeof copy);
        unit[p] = 1;
        /* Of no weight beside a row's; what no row depends on must not hinder the others. */
        for (int q = 0; q < r->n_params; q++) copy[q][q] += 1e-9 + 1e-9 * a[q][q];
        bool told = !bound && a[p][p] > 1e-6 && solve(r->n_params, copy, unit);
        out[p] = told ? error * sqrt(fmax(unit[p], 0)) : INFINITY;
    }
    free(slope);
    free(zero);
    free(weight);
}
