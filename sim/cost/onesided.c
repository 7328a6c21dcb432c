/* onesided.c - see onesided.h. */
#include "sim/cost/onesided.h"

#include <math.h>
#include <stdlib.h>

#define X(member, key, unit, size, least, most, source) {key, unit, size, least, most, source},
const struct moe_number moe_onesided_param[] = {MOE_ONESIDED(X)};
#undef X
#define X(name, text) text,
const char *const moe_onesided_op_text[] = {MOE_ONESIDED_OPS(X)};
#undef X
const struct moe_onesided moe_onesided_default[MOE_ONESIDED_OP_COUNT] = {
    [MOE_ONESIDED_TWO_PREPARE] = {11.2e-6, 0.318e-6, 7.10e-9, 25.0e-9, 370e9, 650e9},
    [MOE_ONESIDED_TWO_DISPATCH] = {10.0e-6, 0.318e-6, 14.1e-9, 25.0e-9, 370e9, 650e9},
    [MOE_ONESIDED_TWO_COMBINE] = {11.1e-6, 0.318e-6, 42.4e-9, 25.0e-9, 370e9, 650e9},
    [MOE_ONESIDED_TWO_COMBINE_LOW] = {14.1e-6, 0.318e-6, 113e-9, 25.0e-9, 370e9, 650e9},
    [MOE_ONESIDED_ONE_DISPATCH] = {12.8e-6, 0.757e-6, 0, 10.3e-9, 0, 666e9},
    [MOE_ONESIDED_ONE_COMBINE] = {14.6e-6, 0.980e-6, 0, 10.3e-9, 0, 666e9},
};

/* What a rank does. Rates: infinite where nothing limits. */
struct work {
    double latency_s, local_s, pair_bytes, pair_Bps;
};

/* How many other ranks a token goes to. */
static double others_of(const struct moe_onesided_case *c)
{
    double n = c->ranks, targets = c->top_k < c->ranks ? c->top_k : n;
    return targets * (n - 1) / n;
}

static struct work work_of(const struct moe_onesided *p, const struct moe_onesided_case *c)
{
    double n = c->ranks, tokens = (double)c->tokens, targets = c->top_k < c->ranks ? c->top_k : n;
    struct work w = {.latency_s = p->start_s + p->target_s * others_of(c),
                     .local_s = p->token_s * tokens,
                     .pair_bytes = tokens * targets / n * c->row_bytes,
                     .pair_Bps = INFINITY};
    if (p->row_s > 0) w.pair_Bps = fmin(w.pair_Bps, c->row_bytes / p->row_s);
    if (p->pair_Bps > 0) w.pair_Bps = fmin(w.pair_Bps, p->pair_Bps);
    if (p->link_Bps > 0 && n > 1) w.pair_Bps = fmin(w.pair_Bps, p->link_Bps / (n - 1));
    return w;
}

double moe_onesided_s(const struct moe_onesided *p, const struct moe_topo *topo,
                      const struct moe_onesided_case *c)
{
    struct work w = work_of(p, c);
    double rate = c->ranks > 1 ? fmin(w.pair_Bps, topo->intra_Bps / (c->ranks - 1)) : w.pair_Bps;
    return w.latency_s + w.local_s + (w.pair_bytes > 0 ? w.pair_bytes / rate : 0);
}

/* What a member has for others. */
static double remote_bytes(const struct moe_onesided_traffic *x, int home)
{
    double all = 0;
    for (int to = 0; to < x->n; to++)
        if (to != home) all += x->bytes[(size_t)home * (size_t)x->n + (size_t)to];
    return all;
}

/* What a pair moves at most; 0: as much as the links allow. */
static double pair_rate(const struct moe_onesided *p, const struct moe_onesided_traffic *x, double bytes,
                        double all_bytes)
{
    double rate_Bps = INFINITY;
    if (p->row_s > 0 && x->row_bytes > 0 && !x->rides) rate_Bps = x->row_bytes / p->row_s;
    if (p->pair_Bps > 0) rate_Bps = fmin(rate_Bps, p->pair_Bps);
    if (p->link_Bps > 0 && all_bytes > 0) rate_Bps = fmin(rate_Bps, p->link_Bps * bytes / all_bytes);
    return isfinite(rate_Bps) ? rate_Bps : 0;
}

void moe_onesided_traffic_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                               const struct moe_onesided_traffic *x, struct moe_plan *out)
{
    for (int home = 0; home < x->n; home++) {
        const double *bytes = x->bytes + (size_t)home * (size_t)x->n;
        double all_bytes = remote_bytes(x, home);
        struct moe_sent before = {x->rank[home], x->rank[home], 0, .after = -1};
        moe_assert(x->rank[home] / topo->gpus_per_node == x->rank[0] / topo->gpus_per_node);
        if (!x->rides)
            before.delay_s = p->start_s + p->target_s * x->others[home] + p->token_s * (double)x->token[home];
        int first = moe_plan_add(out, before);
        for (int to = 0; to < x->n; to++) {
            struct moe_sent rows = {x->rank[home], x->rank[to], llround(bytes[to]), .after = first};
            if (!rows.bytes) continue;
            if (x->combine) rows.from = x->rank[to], rows.to = x->rank[home];
            rows.rate_Bps = pair_rate(p, x, bytes[to], all_bytes);
            moe_plan_add(out, rows);
        }
    }
}

void moe_onesided_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                       const struct moe_onesided_case *c, struct moe_plan *out)
{
    size_t n = (size_t)c->ranks;
    int *rank = moe_alloc(n, sizeof *rank);
    int64_t *token = moe_alloc(n, sizeof *token);
    double *bytes = moe_alloc(n * n, sizeof *bytes), *others = moe_alloc(n, sizeof *others);
    for (int i = 0; i < c->ranks; i++) {
        rank[i] = i;
        token[i] = c->tokens;
        others[i] = others_of(c);
    }
    for (size_t i = 0; i < n * n; i++) bytes[i] = work_of(p, c).pair_bytes;
    moe_onesided_traffic_plan(p, topo,
                              &(struct moe_onesided_traffic){.n = c->ranks,
                                                             .rank = rank,
                                                             .token = token,
                                                             .others = others,
                                                             .bytes = bytes,
                                                             .row_bytes = c->row_bytes},
                              out);
    free(rank);
    free(token);
    free(others);
    free(bytes);
}
