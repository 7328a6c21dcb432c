/* onesided.c - see onesided.h. */
#include "sim/cost/onesided.h"

#include <math.h>

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

enum { CHOICE_BYTES = 4 }; /* the number of an expert */

/* What a rank does. Rates: infinite where nothing limits. */
struct work {
    double latency_s, local_s, pair_bytes, pair_Bps;
};

static struct work work_of(const struct moe_onesided *p, const struct moe_onesided_case *c)
{
    double n = c->ranks, tokens = (double)c->tokens, targets = c->top_k < c->ranks ? c->top_k : n;
    struct work w = {.latency_s = p->start_s + p->target_s * targets * (n - 1) / n,
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

void moe_onesided_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                       const struct moe_onesided_case *c, struct moe_plan *out)
{
    struct work w = work_of(p, c);
    int64_t pair = llround(w.pair_bytes),
            local = llround((double)c->tokens * fmax(c->row_bytes, (double)c->top_k * CHOICE_BYTES));
    double rate_Bps = isfinite(w.pair_Bps) ? w.pair_Bps : 0;
    moe_assert(c->ranks <= topo->gpus_per_node);
    for (int rank = 0; rank < c->ranks; rank++) {
        struct moe_sent work = {rank, rank, w.local_s > 0 ? local : 0, .delay_s = w.latency_s, .after = -1};
        if (work.bytes) work.rate_Bps = (double)local / w.local_s;
        int before = moe_plan_add(out, work);
        for (int to = 0; pair && to < c->ranks; to++)
            moe_plan_add(out, (struct moe_sent){rank, to, pair, .rate_Bps = rate_Bps, .after = before});
    }
}
