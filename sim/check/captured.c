/* captured.c - see captured.h: the rows of a store in the order in which they are judged, and verdicts. */
#include "sim/check/captured_internal.h"

#include "sim/check/internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows ---- */

static int by_number(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

int moe_captured_order(const struct moe_store_tensor *a, const struct moe_store_tensor *b)
{
    int order = by_number(a->step, b->step);
    if (!order) order = by_number(a->role, b->role);
    if (!order) order = strcmp(a->name, b->name);
    if (!order) order = by_number(a->layer, b->layer);
    return order ? order : by_number(a->expert, b->expert);
}

static int by_tensor(const void *a, const void *b)
{
    const struct moe_store_tensor *x = a, *y = b;
    int order = moe_captured_order(x, y);
    return order ? order : by_number(x->rank, y->rank);
}

static int by_place(const void *a, const void *b)
{
    const struct moe_copies *x = a, *y = b;
    int order = by_number(x->row->step, y->row->step);
    if (!order) order = by_number(x->row->role, y->row->role);
    if (!order) order = by_number(x->place, y->place);
    return order ? order : moe_captured_order(x->row, y->row);
}

static int keep(void *ctx, const struct moe_store_tensor *t)
{
    struct moe_captured *c = ctx;
    c->row = moe_grow(c->row, &c->cap_rows, c->n_rows + 1, sizeof *c->row);
    c->row[c->n_rows++] = *t;
    if (t->layer >= c->n_layers) c->n_layers = t->layer + 1;
    c->n_bucketed += t->presence == MOE_IS_BUCKETED;
    c->clips |= t->role == MOE_TENSOR_CLIPPED;
    return MOE_OK;
}

static void make_groups(struct moe_captured *c)
{
    c->group = moe_alloc((size_t)c->n_rows, sizeof *c->group);
    for (int i = 0; i < c->n_rows; i++) {
        const struct moe_store_tensor *t = &c->row[i];
        struct moe_copies *last = c->n_groups ? &c->group[c->n_groups - 1] : NULL;
        if (last && moe_captured_order(last->row, t) == 0) {
            last->n++;
            if (t->place < last->place) last->place = t->place;
        } else {
            c->group[c->n_groups++] = (struct moe_copies){t, 1, t->place};
        }
    }
}

int moe_captured_load(struct moe_store *s, struct moe_captured **out)
{
    struct moe_captured *c = *out = moe_alloc(1, sizeof *c);
    c->store = s;
    int err = moe_store_info(s, &c->info);
    if (err >= 0) err = moe_store_each_tensor(s, INT64_MIN, INT64_MAX, keep, c);
    for (int i = 0; i < c->n_rows && err >= 0; i++)
        if (c->row[i].rank < 0 || c->row[i].rank >= c->info.n_ranks)
            err = moe_fail(MOE_EINPUT, "tensor %s of rank %d in step %lld, expected a rank from 0 to %d",
                           c->row[i].name, c->row[i].rank, (long long)c->row[i].step, c->info.n_ranks - 1);
    if (err < 0) {
        moe_captured_free(c);
        *out = NULL;
        return err;
    }
    if (c->n_rows) qsort(c->row, (size_t)c->n_rows, sizeof *c->row, by_tensor);
    make_groups(c);
    if (c->n_groups) qsort(c->group, (size_t)c->n_groups, sizeof *c->group, by_place);
    return MOE_OK;
}

void moe_captured_free(struct moe_captured *c)
{
    if (!c) return;
    free(c->row);
    free(c->group);
    free(c);
}

int moe_captured_rows(const struct moe_captured *c)
{
    return c->n_rows;
}

bool moe_captured_is_whole(const struct moe_captured *c)
{
    int64_t *n_initial = moe_alloc((size_t)c->info.n_ranks, sizeof *n_initial),
            *n_updated = moe_alloc((size_t)c->info.n_ranks, sizeof *n_updated);
    bool whole = true;
    for (int i = 0; i < c->n_rows; i++) {
        const struct moe_store_tensor *t = &c->row[i];
        n_initial[t->rank] += t->role == MOE_TENSOR_INITIAL;
        n_updated[t->rank] +=
            t->role == MOE_TENSOR_PARAM && t->step >= c->info.first_step && t->step <= c->info.last_step;
    }
    for (int r = 0; r < c->info.n_ranks; r++)
        whole &= n_initial[r] && n_updated[r] == n_initial[r] * c->info.steps_complete;
    free(n_initial);
    free(n_updated);
    return whole;
}

int moe_captured_bucketed(const struct moe_captured *c)
{
    return c->n_bucketed;
}

const struct moe_store_tensor *moe_captured_find(const struct moe_captured *c,
                                                 const struct moe_store_tensor *t, enum moe_tensor_role role,
                                                 int rank)
{
    struct moe_store_tensor key = *t;
    int low = 0, high = c->n_rows;
    key.role = role;
    key.rank = rank;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (by_tensor(&c->row[middle], &key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == c->n_rows || moe_captured_order(&c->row[low], &key) != 0) return NULL;
    return rank < 0 || c->row[low].rank == rank ? &c->row[low] : NULL;
}

int moe_captured_stage(const struct moe_captured *c, int from)
{
    const struct moe_store_tensor *first = c->group[from].row;
    int i = from + 1;
    while (i < c->n_groups && c->group[i].row->step == first->step && c->group[i].row->role == first->role)
        i++;
    return i;
}

/* ---- numbers ---- */

double moe_captured_rounding(const struct moe_store_tensor *t)
{
    if (t->element_bytes == 2) return 16 * ldexp(1, -8); /* sums are of floats: what rounds is storing them */
    return 256 * ldexp(1, t->element_bytes == 8 ? -53 : -24);
}

bool moe_captured_near(const struct moe_store_tensor *a, const struct moe_store_tensor *b, double factor)
{
    const double norm = sqrt(a->sum_squares), other = fabs(factor) * sqrt(b->sum_squares),
                 most = norm > other ? norm : other, tolerance = moe_captured_rounding(a);
    if (a->n != b->n || a->element_bytes != b->element_bytes || a->n_nonfinite || b->n_nonfinite)
        return false;
    if (a->presence == MOE_IS_NONE || b->presence == MOE_IS_NONE) return false;
    /* Cauchy and Schwarz: the sum of what differs is at most its norm times the root of n. */
    return fabs(norm - other) <= tolerance * most &&
           fabs(a->sum - factor * b->sum) <= tolerance * most * sqrt((double)a->n);
}

/* ---- verdicts ---- */

struct moe_finding *moe_finding_add(struct moe_findings *f, int check_class, int kind, bool by_name,
                                    const struct moe_store_tensor *row, int n)
{
    struct moe_finding *found = NULL;
    for (int i = 0; i < f->n && !found; i++)
        if (f->item[i].check_class == check_class && f->item[i].kind == kind &&
            (!by_name || !strcmp(f->item[i].first->name, row->name)))
            found = &f->item[i];
    if (!found) {
        f->item = moe_grow(f->item, &f->cap, f->n + 1, sizeof *f->item);
        found = &f->item[f->n++];
        *found = (struct moe_finding){.check_class = check_class, .kind = kind, .first = row};
    }
    found->n_tensors++;
    for (int i = 0; i < n; i++) moe_check_insert(row[i].rank, &found->n_ranks, &found->ranks);
    if (row->layer >= 0) moe_check_insert(row->layer, &found->n_layers, &found->layers);
    return found;
}

static const char *const role_text[MOE_TENSOR_ROLE_COUNT] = {[MOE_TENSOR_INITIAL] = "initial",
                                                             [MOE_TENSOR_GRADIENT] = "gradient of",
                                                             [MOE_TENSOR_CLIPPED] = "clipped gradient of",
                                                             [MOE_TENSOR_PARAM] = "updated"};

/* "step 1 gradient of layer 0 w1 of expert 5" */
static void write_label(const struct moe_store_tensor *t, size_t size, char *out)
{
    char layer[24] = "", expert[24] = "";
    if (t->layer >= 0) snprintf(layer, sizeof layer, "layer %d ", t->layer);
    if (t->expert >= 0) snprintf(expert, sizeof expert, " of expert %d", t->expert);
    snprintf(out, size, "step %lld %s %s%s%s", (long long)t->step, role_text[t->role], layer, t->name,
             expert);
}

void moe_finding_report(struct moe_finding *f, struct moe_verdicts *out, const char *format, ...)
{
    char text[512], more[64] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (f->n_tensors > 1)
        snprintf(more, sizeof more, "; so it is with %d other tensor%s", f->n_tensors - 1,
                 f->n_tensors > 2 ? "s" : "");
    out->item = moe_grow(out->item, &out->cap, out->n + 1, sizeof *out->item);
    struct moe_verdict *v = &out->item[out->n++];
    *v = (struct moe_verdict){.check_class = f->check_class,
                              .severity = f->severity,
                              .captured = true,
                              .step = f->first->step,
                              .n_ranks = f->n_ranks,
                              .ranks = f->ranks,
                              .n_layers = f->n_layers,
                              .layers = f->layers,
                              .text = moe_alloc(strlen(text) + strlen(more) + 1, 1)};
    snprintf(v->text, strlen(text) + strlen(more) + 1, "%s%s", text, more);
    write_label(f->first, sizeof v->op, v->op);
}
