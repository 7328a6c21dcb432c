/* copies.c - see captured.h: what one run says of itself. */
#include "sim/check/captured_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- C6: what is missing or not a number ---- */

enum fault { FINE, NEVER_WRITTEN, NOT_FINITE, MISSING };

static enum fault fault_of(const struct moe_store_tensor *t)
{
    if (t->presence == MOE_IS_UNINITIALISED) return NEVER_WRITTEN;
    if (t->presence == MOE_IS_NONE) return MISSING;
    return t->n_nonfinite ? NOT_FINITE : FINE;
}

/* Tokens that routing sent to an expert in a step, from all ranks and in all micro-batches. */
static int count_tokens(const struct moe_captured *c, const struct moe_store_tensor *t, int64_t *out)
{
    *out = 0;
    for (int64_t layer = t->layer; layer < c->info.n_layers; layer += c->n_layers)
        for (int rank = 0; rank < c->info.n_ranks; rank++) {
            int64_t n_tokens = 0;
            int top_k = 0;
            int32_t *ids;
            MOE_TRY(moe_store_routing(c->store, t->step, (int)layer, rank, &n_tokens, &top_k, &ids));
            for (int64_t i = 0; ids && i < n_tokens * top_k; i++) *out += ids[i] == t->expert;
            free(ids);
        }
    return MOE_OK;
}

static int report_fault(const struct moe_captured *c, struct moe_finding *f, int well, int all,
                        struct moe_verdicts *out)
{
    const struct moe_store_tensor *t = f->first;
    char what[128], tokens[64] = "";
    int64_t n = 0;
    if (t->expert >= 0 && t->layer >= 0) {
        MOE_TRY(count_tokens(c, t, &n));
        snprintf(tokens, sizeof tokens, " its expert had %lld tokens in this step;", (long long)n);
    }
    if (f->kind == MISSING)
        snprintf(what, sizeof what, "absent: no operation of rank %d computed it in this step", t->rank);
    else
        snprintf(what, sizeof what, "%s on rank %d: %lld of %lld elements are %s",
                 f->kind == NEVER_WRITTEN ? "uninitialised" : "not finite", t->rank,
                 (long long)t->n_nonfinite, (long long)t->n,
                 f->kind == NEVER_WRITTEN ? "what buffers are filled with that nobody wrote"
                                          : "infinite or no number");
    moe_finding_report(f, out, "%s;%s %d of %d tensors of this step and stage are well", what, tokens, well,
                       all);
    return MOE_OK;
}

/* Result: 1 when it found something. */
static int check_content(const struct moe_captured *c, int from, int to, struct moe_verdicts *out)
{
    struct moe_findings findings = {0};
    int well = 0, all = 0, err = MOE_OK;
    for (int g = from; g < to; g++)
        for (int i = 0; i < c->group[g].n; i++) {
            const enum fault fault = fault_of(&c->group[g].row[i]);
            if (c->group[g].row[i].presence == MOE_IS_BUCKETED) continue;
            all++;
            if (fault == FINE) well++;
            if (fault != FINE) moe_finding_add(&findings, 6, (int)fault, true, &c->group[g].row[i], 1);
        }
    for (int i = 0; i < findings.n; i++)
        if (err >= 0) err = report_fault(c, &findings.item[i], well, all, out);
    const bool found = findings.n > 0;
    free(findings.item);
    return err < 0 ? err : found;
}

/* A step of a rank is written as one: where it has one row of a tensor it has those of the other stages.
 * Result: 1 when it found something. */
static int check_missing(const struct moe_captured *c, int from, int to, struct moe_verdicts *out)
{
    static const char *const text[MOE_TENSOR_ROLE_COUNT] = {[MOE_TENSOR_GRADIENT] = "gradient",
                                                            [MOE_TENSOR_CLIPPED] = "clipped gradient",
                                                            [MOE_TENSOR_PARAM] = "updated value"};
    struct moe_findings findings = {0};
    for (int g = from; g < to && c->group[from].row->role != MOE_TENSOR_INITIAL; g++)
        for (int i = 0; i < c->group[g].n; i++)
            for (int role = MOE_TENSOR_GRADIENT; role < MOE_TENSOR_ROLE_COUNT; role++) {
                const struct moe_store_tensor *t = &c->group[g].row[i];
                if ((c->clips || role != MOE_TENSOR_CLIPPED) &&
                    !moe_captured_find(c, t, (enum moe_tensor_role)role, t->rank))
                    moe_finding_add(&findings, 6, role, true, t, 1);
            }
    for (int i = 0; i < findings.n; i++)
        moe_finding_report(&findings.item[i], out, "the store has no row of its %s on rank %d in this step",
                           text[findings.item[i].kind], findings.item[i].first->rank);
    free(findings.item);
    return findings.n > 0;
}

/* ---- copies that differ ---- */

static double norm_of(const struct moe_store_tensor *t)
{
    return sqrt(t->sum_squares);
}

/* The first row that is not as the first is; NULL without one. */
static const struct moe_store_tensor *other_copy(const struct moe_copies *g)
{
    for (int i = 1; i < g->n; i++)
        if (g->row[i].hash != g->row->hash || g->row[i].n != g->row->n) return &g->row[i];
    return NULL;
}

/* The norm of a clipped gradient over that of the gradient, on its rank; 1 without that. */
static double clipped_to(const struct moe_captured *c, const struct moe_store_tensor *t)
{
    const struct moe_store_tensor *g = moe_captured_find(c, t, MOE_TENSOR_GRADIENT, t->rank);
    return g ? norm_of(t) / norm_of(g) : 1;
}

static void report_copies(const struct moe_captured *c, struct moe_finding *f, const struct moe_copies *g,
                          struct moe_verdicts *out)
{
    const struct moe_store_tensor *a = g->row, *b = other_copy(g);
    if (f->severity == MOE_SEVERITY_POSSIBLE)
        moe_finding_report(f, out, "copies on ranks %d and %d differ, by no more than rounding", a->rank,
                           b->rank);
    else if (a->role == MOE_TENSOR_GRADIENT)
        moe_finding_report(f, out,
                           "copies differ: norm %.6g on rank %d, %.6g on rank %d; it was not summed over all"
                           " ranks that hold a copy",
                           norm_of(a), a->rank, norm_of(b), b->rank);
    else if (a->role == MOE_TENSOR_CLIPPED)
        moe_finding_report(
            f, out,
            "copies were the same until clipped: rank %d by the factor %.6g, rank %d by %.6g; their"
            " norms differ",
            a->rank, clipped_to(c, a), b->rank, clipped_to(c, b));
    else if (a->role == MOE_TENSOR_INITIAL)
        moe_finding_report(f, out, "copies begin different: norm %.6g on rank %d, %.6g on rank %d",
                           norm_of(a), a->rank, norm_of(b), b->rank);
    else
        moe_finding_report(
            f, out,
            "copies part here: norm %.6g on rank %d, %.6g on rank %d, after gradients that are the"
            " same",
            norm_of(a), a->rank, norm_of(b), b->rank);
}

/* *near: some differed by rounding, which the first of them says; what follows from it is left out.
 * Result: 1 when some differ by more. */
static int check_copies(const struct moe_captured *c, int from, int to, bool *near, struct moe_verdicts *out)
{
    static const int class_of[MOE_TENSOR_ROLE_COUNT] = {[MOE_TENSOR_INITIAL] = 16,
                                                        [MOE_TENSOR_GRADIENT] = 4,
                                                        [MOE_TENSOR_CLIPPED] = 5,
                                                        [MOE_TENSOR_PARAM] = 16};
    struct moe_findings findings = {0};
    const struct moe_copies *first = NULL;
    bool all_near = true;
    for (int g = from; g < to; g++) {
        const struct moe_copies *copies = &c->group[g];
        if (!other_copy(copies)) continue;
        if (!first) first = copies;
        for (int i = 1; i < copies->n; i++) all_near &= moe_captured_near(&copies->row[i], copies->row, 1);
        moe_finding_add(&findings, class_of[copies->row->role], 0, false, copies->row, copies->n);
    }
    const bool found = findings.n && !all_near;
    if (findings.n && (found || !*near)) {
        findings.item->severity = found ? MOE_SEVERITY_ERROR : MOE_SEVERITY_POSSIBLE;
        report_copies(c, findings.item, first, out); /* which takes its lists */
    } else if (findings.n) {
        free(findings.item->ranks);
        free(findings.item->layers);
    }
    *near |= findings.n && all_near;
    free(findings.item);
    return found;
}

/* ---- experts that are the same ---- */

/* Zeros and constants are the same for good reasons. */
static bool tells_apart(const struct moe_store_tensor *t)
{
    const double most = t->sum_squares * (double)t->n;
    return t->expert >= 0 && most - t->sum * t->sum > 1e-9 * most;
}

static int by_content(const void *a, const void *b)
{
    const struct moe_copies *x = *(const struct moe_copies *const *)a,
                            *y = *(const struct moe_copies *const *)b;
    int order = strcmp(x->row->name, y->row->name);
    if (!order) order = (x->row->layer > y->row->layer) - (x->row->layer < y->row->layer);
    if (!order) order = (x->row->hash > y->row->hash) - (x->row->hash < y->row->hash);
    return order ? order : x->row->expert - y->row->expert;
}

static bool same_content(const struct moe_copies *x, const struct moe_copies *y)
{
    return !strcmp(x->row->name, y->row->name) && x->row->layer == y->row->layer && x->row->n == y->row->n &&
           x->row->hash == y->row->hash;
}

static void report_experts(struct moe_finding *f, const char *experts, struct moe_verdicts *out)
{
    switch (f->first->role) {
    case MOE_TENSOR_GRADIENT:
        moe_finding_report(
            f, out, "experts %s have the same gradient: it was summed over ranks that hold other experts",
            experts);
        break;
    case MOE_TENSOR_INITIAL:
        moe_finding_report(f, out,
                           "experts %s begin as copies of one: parameters were broadcast to ranks that hold"
                           " other experts",
                           experts);
        break;
    default: moe_finding_report(f, out, "experts %s have become copies of one", experts);
    }
}

/* "0,2,4,6" */
static void write_experts(const struct moe_copies *const *same, int n, size_t size, char *out)
{
    size_t used = 0;
    for (int e = 0; e < n && used < size; e++)
        used += (size_t)snprintf(out + used, size - used, "%s%d", e ? "," : "", same[e]->row->expert);
}

/* Result: 1 when it found something. */
static int check_experts(const struct moe_captured *c, int from, int to, struct moe_verdicts *out)
{
    const struct moe_copies **order = moe_alloc((size_t)(to - from), sizeof *order), *first = NULL;
    const int check_class = c->group[from].row->role == MOE_TENSOR_GRADIENT ? 4 : 16;
    struct moe_findings findings = {0};
    char experts[64] = "";
    int n = 0;
    for (int g = from; g < to; g++)
        if (tells_apart(c->group[g].row)) order[n++] = &c->group[g];
    qsort(order, (size_t)n, sizeof *order, by_content);
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && same_content(order[i], order[end]);) end++;
        if (end == i + 1) continue;
        for (int e = i; e < end; e++)
            moe_finding_add(&findings, check_class, 0, false, order[e]->row, order[e]->n);
        if (first && first < order[i]) continue;
        first = order[i];
        write_experts(order + i, end - i, sizeof experts, experts);
    }
    if (findings.n) {
        findings.item->first = first->row;
        report_experts(findings.item, experts, out);
    }
    free(findings.item);
    free(order);
    return findings.n;
}

int moe_check_captured(const struct moe_captured *c, struct moe_verdicts *out)
{
    bool same_experts = false, near = false;
    for (int from = 0, to; from < c->n_groups; from = to) {
        const enum moe_tensor_role role = c->group[from].row->role;
        to = moe_captured_stage(c, from);
        int found = check_missing(c, from, to, out);
        if (found) return MOE_OK;
        found = check_content(c, from, to, out);
        if (found) return found < 0 ? found : MOE_OK;
        found = check_copies(c, from, to, &near, out);
        if (!same_experts && role != MOE_TENSOR_CLIPPED && check_experts(c, from, to, out)) {
            same_experts = true;
            found |= role == MOE_TENSOR_GRADIENT; /* those that begin alike may part */
        }
        if (found) return MOE_OK;
    }
    return MOE_OK;
}
