/* accuracy_study.c - see accuracy_study.h. */
#include "tests/bench/accuracy_study.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void study_fit_member(struct study *s, int member, int first, int last)
{
    int p = s->n_params++;
    s->member[p] = member;
    s->least[p] = s->table[member].least;
    s->most[p] = s->table[member].most;
    s->start[p] = sqrt(s->least[p] * s->most[p]);
    for (int op = first; op <= last; op++) s->param[op][member] = p + 1;
}

static void set_members(const struct study *s, const double *param, int op, double *member)
{
    for (int m = 0; m < s->n_members; m++) {
        int p = s->param[op][m];
        member[m] = p ? param[p - 1] : s->value[op][m];
    }
}

static double predict(const struct study *s, const double *param, const struct row *row,
                      struct moe_plan *plan)
{
    double member[STUDY_MEMBERS];
    set_members(s, param, row->op, member);
    return s->time_s(s, member, row, plan);
}

void study_expect(const struct study *s, const double *param, int op, const double *said)
{
    double member[STUDY_MEMBERS], off = 0;
    set_members(s, param, op, member);
    for (int m = 0; m < s->n_members; m++) off = fmax(off, fabs(said[m] - member[m]) - 0.001 * member[m]);
    if (off > 0) printf("topologies/%s.yaml holds another fit\n", s->topo->name);
}

static void predict_fitted(void *ctx, const double *param, double *out)
{
    const struct study *s = ctx;
    for (int i = 0; i < s->n_fitted; i++) out[i] = predict(s, param, &s->row[i], NULL);
}

double study_time_s(const struct study *s, const double *param, const struct row *row)
{
    return predict(s, param, row, NULL);
}

double study_error(const struct study *s, const double *param, const struct row *row)
{
    return log(study_time_s(s, param, row) / row->time_s);
}

/* skip [n_fitted], NULL: none. start: NULL: the middle of the bounds. */
static void fit(const struct study *s, const bool *skip, const double *start, double *param)
{
    double *measured = moe_alloc((size_t)s->n_fitted, sizeof *measured);
    for (int i = 0; i < s->n_fitted; i++) measured[i] = s->row[i].time_s;
    struct moe_regress r = {.n_rows = s->n_fitted,
                            .n_params = s->n_params,
                            .measured = measured,
                            .start = start ? start : s->start,
                            .least = s->least,
                            .most = s->most,
                            .predict = predict_fitted,
                            .ctx = (void *)s};
    moe_regress_fit(&r, skip, param);
    free(measured);
}

/* Sets left_out of all fitted rows. */
static void cross_validate(struct study *s, const double *param)
{
    bool *skip = moe_alloc((size_t)s->n_fitted, sizeof *skip),
         *done = moe_alloc((size_t)s->n_fitted, sizeof *done);
    for (int i = 0; i < s->n_fitted; i++) {
        double without[MOE_REGRESS_PARAMS];
        if (done[i]) continue;
        for (int j = 0; j < s->n_fitted; j++) skip[j] = s->row[j].key == s->row[i].key;
        fit(s, skip, param, without);
        for (int j = i; j < s->n_fitted; j++) {
            if (!skip[j]) continue;
            s->row[j].left_out = fabs(study_error(s, without, &s->row[j]));
            done[j] = true;
        }
    }
    free(skip);
    free(done);
}

double study_left_out(const struct study *s, int ranks, const char *band, double q)
{
    double *value = moe_alloc((size_t)s->n_fitted, sizeof *value);
    int n = 0;
    for (int i = 0; i < s->n_fitted; i++)
        if ((!ranks || s->row[i].ranks == ranks) && (!band || !strcmp(s->row[i].band, band)))
            value[n++] = s->row[i].left_out;
    double found = accuracy_quantile(value, n, q);
    free(value);
    return found;
}

static int by_fitted(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    return y->fitted != x->fitted ? y->fitted - x->fitted : x->order - y->order;
}

void study_fit(struct study *s, double *param)
{
    qsort(s->row, (size_t)s->n, sizeof *s->row, by_fitted);
    for (s->n_fitted = 0; s->n_fitted < s->n && s->row[s->n_fitted].fitted;) s->n_fitted++;
    fit(s, NULL, NULL, param);
    cross_validate(s, param);
}

void study_print(const struct study *s, const double *param)
{
    printf("  %d rows fitted:", s->n_fitted);
    for (int p = 0; p < s->n_params; p++) {
        const struct moe_number *what = &s->table[s->member[p]];
        printf("%s %s %.4g%s%s", p ? "," : "", what->key, param[p] / what->size, *what->unit ? " " : "",
               what->unit);
    }
    printf("\n");
}

static double plan_s(const struct study *s, const double *param, const struct row *row)
{
    struct moe_plan plan = {0};
    moe_topo_build(s->topo, row->ranks);
    predict(s, param, row, &plan);
    double time_s = (double)moe_plan_time(s->topo, &plan) * 1e-12;
    free(plan.flow);
    return time_s;
}

void study_report(const struct study *s, const double *param, struct accuracy *a)
{
    for (int i = s->n_fitted; i < s->n; i++) {
        const struct row *row = &s->row[i];
        double t = plan_s(s, param, row), spread = exp(row->half);
        accuracy_row(a, s->machine, row->name, row->dtype, row->ranks, row->bytes, row->band, row->time_s, t,
                     t / spread, t * spread);
    }
}

struct row *study_add(struct study *s)
{
    s->row = moe_grow(s->row, &s->cap, s->n + 1, sizeof *s->row);
    s->row[s->n].order = s->n;
    return &s->row[s->n++];
}

struct study study_new(const char *machine, const char *topology)
{
    struct study s = {.machine = machine};
    int err = moe_topo_load(topology, &s.topo);
    if (err < 0) accuracy_stop(err);
    return s;
}

void study_free(struct study *s)
{
    moe_topo_free(s->topo);
    free(s->row);
}
