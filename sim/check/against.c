/* against.c - see captured.h: one run against another. */
#include "sim/check/captured_internal.h"

#include "sim/check/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the elements of two tensors say; without them the fingerprints. */
struct difference {
    bool known;      /* the elements are there */
    bool near;       /* no more than rounding */
    uint64_t units;  /* in the last place, most of any element */
    int64_t element; /* that one */
    double a, b;     /* its values */
};

struct
    pair { /* copies of a tensor that differ; others with the same two contents are not in the list again */
    const struct moe_store_tensor *a, *b;
    int tensor;          /* of those that differ */
    int n_ranks, *ranks; /* of the run, where it is so */
    struct difference d;
    double factor; /* a whole number, or one over it, that a is times b; 0: none */
};

struct comparison {
    const struct moe_captured *run, *other;
    int n, cap; /* pairs of the first stage that differs */
    struct pair *pair;
    int n_tensors;                 /* in them */
    int n_same;                    /* tensors in common before and beside them */
    const struct moe_copies *last; /* the last in common that was compared */
};

/* The row of the tensor that a run holds, or NULL: also where the gradient was not kept. */
static const struct moe_store_tensor *find(const struct moe_captured *c, const struct moe_store_tensor *t)
{
    const struct moe_store_tensor *row = moe_captured_find(c, t, t->role, -1);
    return row && row->presence != MOE_IS_BUCKETED ? row : NULL;
}

/* Tensors of one run that the other has not. */
static int count_alone(const struct moe_captured *c, const struct moe_captured *other)
{
    int n = 0;
    for (int g = 0; g < c->n_groups; g++)
        n += c->group[g].row->presence != MOE_IS_BUCKETED && !find(other, c->group[g].row);
    return n;
}

static bool same(const struct moe_store_tensor *a, const struct moe_store_tensor *b)
{
    return a->hash == b->hash && a->n == b->n && a->element_bytes == b->element_bytes &&
           (a->presence == MOE_IS_NONE) == (b->presence == MOE_IS_NONE);
}

/* A copy of the tensor `g` that a rank of one run holds, and one of the other run: on the same rank, or the
 * first where that has none. Every copy of either run is in one of the pairs from 0 on. Result: is there an
 * i-th? */
static bool pair_at(const struct comparison *c, const struct moe_copies *g,
                    const struct moe_store_tensor *others, int i, struct pair *out)
{
    const struct moe_store_tensor *end = c->other->row + c->other->n_rows,
                                  *row = &others[i < g->n ? 0 : i - g->n];
    const bool ours = i < g->n;
    if (!ours && (row >= end || moe_captured_order(row, others) != 0)) return false;
    const struct moe_store_tensor *same_rank =
        ours ? moe_captured_find(c->other, others, others->role, g->row[i].rank)
             : moe_captured_find(c->run, g->row, g->row->role, row->rank);
    *out = (struct pair){.a = ours        ? &g->row[i]
                              : same_rank ? same_rank
                                          : g->row,
                         .b = !ours       ? row
                              : same_rank ? same_rank
                                          : others};
    return true;
}

static void add_pair(struct comparison *c, const struct pair *found)
{
    int i = c->n - 1;
    while (i >= 0 && c->pair[i].tensor == found->tensor &&
           !(same(c->pair[i].a, found->a) && same(c->pair[i].b, found->b)))
        i--;
    if (i < 0 || c->pair[i].tensor != found->tensor) {
        c->pair = moe_grow(c->pair, &c->cap, c->n + 1, sizeof *c->pair);
        i = c->n++;
        c->pair[i] = *found;
    }
    moe_check_insert(found->a->rank, &c->pair[i].n_ranks, &c->pair[i].ranks);
}

/* Up to the first step and stage that differs, on any rank. */
static void compare(struct comparison *c)
{
    for (int from = 0, to; from < c->run->n_groups && !c->n; from = to) {
        to = moe_captured_stage(c->run, from);
        for (int g = from; g < to; g++) {
            const struct moe_copies *copies = &c->run->group[g];
            const struct moe_store_tensor *others = find(c->other, copies->row);
            const int n = c->n;
            struct pair p;
            if (!others || !find(c->run, copies->row)) continue;
            c->last = copies;
            for (int i = 0; pair_at(c, copies, others, i, &p); i++) {
                p.tensor = c->n_tensors;
                if (!same(p.a, p.b)) add_pair(c, &p);
            }
            if (c->n > n)
                c->n_tensors++;
            else
                c->n_same++;
        }
    }
}

/* ---- elements ---- */

/* A float's place among all of its type, so that neighbours are one apart. */
static uint64_t place_of(const void *content, int64_t i, int bytes, double *value)
{
    uint64_t bits = 0, sign = (uint64_t)1 << (8 * bytes - 1);
    if (bytes == 8) {
        memcpy(&bits, (const char *)content + 8 * i, 8);
        memcpy(value, &bits, 8);
    } else {
        uint32_t word = 0;
        uint16_t half;
        float f;
        if (bytes == 2) { /* bfloat16: the upper half of a float */
            memcpy(&half, (const char *)content + 2 * i, 2);
            word = (uint32_t)half << 16;
        } else {
            memcpy(&word, (const char *)content + 4 * i, 4);
        }
        memcpy(&f, &word, 4);
        bits = bytes == 2 ? word >> 16 : word;
        *value = (double)f;
    }
    return bits & sign ? sign - (bits & (sign - 1)) : sign + bits;
}

static void compare_elements(const struct moe_store_tensor *t, const void *a, const void *b,
                             struct difference *d)
{
    double squares = 0, norm = 0;
    for (int64_t i = 0; i < t->n; i++) {
        double x, y;
        const uint64_t p = place_of(a, i, t->element_bytes, &x), q = place_of(b, i, t->element_bytes, &y),
                       units = p > q ? p - q : q - p;
        squares += (x - y) * (x - y);
        norm += y * y;
        if (units <= d->units) continue;
        *d = (struct difference){true, false, units, i, x, y};
    }
    const double tolerance = moe_captured_rounding(t);
    d->known = true;
    d->near = squares <= tolerance * tolerance * norm; /* never with NaN */
}

static int look(const struct comparison *c, struct pair *p)
{
    void *a = NULL, *b = NULL;
    p->d = (struct difference){.near = moe_captured_near(p->a, p->b, 1)};
    if (p->a->n != p->b->n || p->a->element_bytes != p->b->element_bytes) return MOE_OK;
    int err = moe_store_tensor_content(c->run->store, p->a, &a);
    if (err >= 0) err = moe_store_tensor_content(c->other->store, p->b, &b);
    if (err >= 0 && a && b) compare_elements(p->a, a, b, &p->d);
    free(a);
    free(b);
    return err;
}

/* ---- C3, C4: what the norms tell ---- */

static double scale_of(const struct moe_store_tensor *a, const struct moe_store_tensor *b)
{
    const double ratio = sqrt(a->sum_squares) / sqrt(b->sum_squares),
                 whole = nearbyint(ratio < 1 ? 1 / ratio : ratio);
    if (!(whole >= 2) || whole > 1e6) return 0; /* nor without a number */
    const double factor = ratio < 1 ? 1 / whole : whole;
    return moe_captured_near(a, b, factor) ? factor : 0;
}

static bool is_unlike(const struct pair *p)
{
    return !p->d.near && p->factor == 0;
}

static void add_ranks(const struct pair *p, struct moe_finding *f)
{
    for (int r = 0; r < p->n_ranks; r++) moe_check_insert(p->ranks[r], &f->n_ranks, &f->ranks);
}

/* Adds the i-th pair, of a tensor that another pair may have counted. */
static void add_finding(const struct comparison *c, int i, int check_class, int kind,
                        struct moe_findings *findings)
{
    const struct pair *p = &c->pair[i];
    struct moe_finding *f = moe_finding_add(findings, check_class, kind, false, p->a, 0);
    add_ranks(p, f);
    for (int j = i - 1; j >= 0 && c->pair[j].tensor == p->tensor; j--) {
        if (c->pair[j].factor != p->factor || is_unlike(&c->pair[j]) != is_unlike(p)) continue;
        f->n_tensors--;
        return;
    }
    f->n_split += p->a->expert >= 0;
}

/* One verdict a factor. */
static void report_scales(const struct comparison *c, struct moe_verdicts *out)
{
    struct moe_findings findings = {0};
    for (int i = 0; i < c->n; i++) {
        const struct pair *p = &c->pair[i];
        if (p->factor == 0) continue;
        const int times = (int)nearbyint(p->factor > 1 ? p->factor : -1 / p->factor);
        add_finding(c, i, 3, times, &findings);
    }
    for (int i = 0; i < findings.n; i++) {
        struct moe_finding *f = &findings.item[i];
        moe_finding_report(f, out, "%s%d times that of the other run%s", f->kind < 0 ? "1/" : "",
                           abs(f->kind), f->n_split == f->n_tensors ? ", and so of experts alone" : "");
    }
    free(findings.item);
}

/* A size of a group of ranks whose square root a ratio is about, or 0: n addends that do not depend on each
 * other have a sum whose norm is sqrt(n) times that of one. */
static int group_of(double ratio, int n_ranks)
{
    for (int n = 2; n <= n_ranks; n++) {
        const double part = (ratio < 1 ? 1 / ratio : ratio) / sqrt(n);
        if (n_ranks % n == 0 && part > 0.95 && part < 1.05) return n;
    }
    return 0;
}

static void report_root(const struct comparison *c, struct moe_verdicts *out)
{
    struct moe_findings findings = {0};
    double a = 0, b = 0;
    for (int i = 0; i < c->n; i++) {
        if (!is_unlike(&c->pair[i])) continue;
        a += c->pair[i].a->sum_squares;
        b += c->pair[i].b->sum_squares;
    }
    const double ratio = sqrt(a) / sqrt(b);
    const int group = group_of(ratio, c->run->info.n_ranks);
    for (int i = 0; i < c->n && group; i++)
        if (is_unlike(&c->pair[i])) add_finding(c, i, 4, 0, &findings);
    if (findings.n) {
        findings.item->severity = MOE_SEVERITY_POSSIBLE;
        moe_finding_report(
            findings.item, out,
            "the norm of all that differ is %.4g times the other run's, about %sthe square root of %d: "
            "sums over %d ranks may have lost or gained addends",
            ratio, ratio < 1 ? "one over " : "", group, group);
    }
    free(findings.item);
}

/* ---- C9: the first that differs ---- */

static void report_first(const struct comparison *c, bool explained, struct moe_verdicts *out)
{
    struct moe_findings findings = {0};
    const struct moe_store_tensor *t = c->n ? c->pair->a : c->last->row;
    char what[256], alone[96] = "", on[64];
    const int here = count_alone(c->run, c->other), there = count_alone(c->other, c->run);
    int n_unlike = 0;
    for (int i = 0, tensor = -1; i < c->n; i++) {
        if (!is_unlike(&c->pair[i]) || c->pair[i].tensor == tensor) continue;
        tensor = c->pair[i].tensor;
        n_unlike++;
    }
    struct moe_finding *f = moe_finding_add(&findings, 9, 0, false, t, c->n ? 0 : c->last->n);
    for (int i = 0; i < c->n && c->pair[i].tensor == c->pair->tensor; i++) add_ranks(&c->pair[i], f);
    f->severity = n_unlike && !explained ? MOE_SEVERITY_ERROR : MOE_SEVERITY_NOTE;
    if (here || there)
        snprintf(alone, sizeof alone, "; %d tensors are in this run alone, %d in the other alone", here,
                 there);
    if (!c->n) {
        moe_finding_report(f, out, "all %d tensors up to here are the same to the bit%s", c->n_same, alone);
        free(findings.item);
        return;
    }
    const struct pair *p = c->pair;
    snprintf(on, sizeof on, "on rank %d", p->a->rank);
    if (p->b->rank != p->a->rank)
        snprintf(on, sizeof on, "on rank %d, other run's rank %d", p->a->rank, p->b->rank);
    if (p->a->element_bytes != p->b->element_bytes)
        snprintf(what, sizeof what, "elements of %d bytes, other run %d", p->a->element_bytes,
                 p->b->element_bytes);
    else if (p->d.known)
        snprintf(what, sizeof what,
                 "by up to %llu units in the last place (element %lld: %.9g, other run %.9g)",
                 (unsigned long long)p->d.units, (long long)p->d.element, p->d.a, p->d.b);
    else
        snprintf(what, sizeof what, "norm %.9g, other run %.9g", sqrt(p->a->sum_squares),
                 sqrt(p->b->sum_squares));
    moe_finding_report(
        f, out,
        "the first that differs, %s, %s; in this stage %d differ, %d of them by more than rounding "
        "or a factor; %d up to it are the same to the bit%s%s",
        on, what, c->n_tensors, n_unlike, c->n_same,
        t->role == MOE_TENSOR_INITIAL ? "; the runs begin with other parameters" : "", alone);
    free(findings.item);
}

/* Runs of other seeds or text have nothing to compare. */
static int check_same(const struct comparison *c, const char *key)
{
    char *a = NULL, *b = NULL;
    int err = moe_store_get(c->run->store, key, &a);
    if (err >= 0) err = moe_store_get(c->other->store, key, &b);
    if (err >= 0 && a && b && strcmp(a, b) != 0)
        err = moe_fail(MOE_EINPUT, "%s is %.40s, in the other run %.40s, expected the same", key, a, b);
    free(a);
    free(b);
    return err;
}

static int judge(struct comparison *c, struct moe_verdicts *out)
{
    bool explained = false;
    for (int i = 0; i < out->n; i++) explained |= out->item[i].severity == MOE_SEVERITY_ERROR;
    MOE_TRY(check_same(c, "seed"));
    MOE_TRY(check_same(c, "data_hash"));
    compare(c);
    if (!c->last) return moe_fail(MOE_EINPUT, "no tensor of a step in common with the other run");
    for (int i = 0; i < c->n; i++) {
        struct pair *p = &c->pair[i];
        MOE_TRY(look(c, p));
        if (!p->d.near && p->a->role == MOE_TENSOR_GRADIENT) p->factor = scale_of(p->a, p->b);
    }
    if (c->n && c->pair->a->role == MOE_TENSOR_GRADIENT) {
        report_scales(c, out);
        report_root(c, out);
    }
    report_first(c, explained, out);
    return MOE_OK;
}

int moe_check_against(const struct moe_captured *run, const struct moe_captured *other,
                      struct moe_verdicts *out)
{
    struct comparison c = {.run = run, .other = other};
    int err = judge(&c, out);
    for (int i = 0; i < c.n; i++) free(c.pair[i].ranks);
    free(c.pair);
    return err;
}
