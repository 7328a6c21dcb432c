/* lsa.c - see lsa.h. */
#include "sim/cost/lsa.h"

#define X(member, key, unit, size, least, most, source) {key, unit, size, least, most, source},
const struct moe_number moe_lsa_param[] = {MOE_LSA(X)}, moe_sendrecv_param[] = {MOE_SENDRECV(X)};
#undef X
const struct moe_lsa moe_lsa_default = {.start_s = 1.31e-6, .signal_s = 1.03e-6, .channel_Bps = 22.5e9};
const struct moe_sendrecv moe_sendrecv_default = {
    .start_s = 5.60e-6, .hop_s = 1.58e-6, .channel_Bps = 6.77e9};

static double barriers_s(const struct moe_lsa *p, const struct moe_lsa_case *c)
{
    double last = 0; /* of n - 1 exponential times of mean 1 */
    for (int i = 1; i < c->ranks; i++) last += 1.0 / i;
    return c->barriers * p->signal_s * last;
}

double moe_lsa_s(const struct moe_lsa *p, const struct moe_lsa_case *c)
{
    return p->start_s + barriers_s(p, c) + c->ranks * (double)c->bytes / (c->ctas * p->channel_Bps);
}

/* All peers at once, at their share of the CTAs. */
void moe_lsa_plan(const struct moe_lsa *p, const struct moe_lsa_case *c, struct moe_plan *out)
{
    for (int rank = 0; rank < c->ranks; rank++)
        for (int to = 0; to < c->ranks; to++)
            moe_plan_add(out, (struct moe_sent){.from = rank,
                                                .to = to,
                                                .bytes = c->bytes,
                                                .rate_Bps = c->ctas * p->channel_Bps / c->ranks,
                                                .delay_s = p->start_s + barriers_s(p, c),
                                                .after = -1});
}

double moe_sendrecv_s(const struct moe_sendrecv *p, const struct moe_lsa_case *c)
{
    int rounds = (c->ranks + c->ctas - 1) / c->ctas;
    return p->start_s + rounds * (2 * p->hop_s + (double)c->bytes / p->channel_Bps);
}

/* A CTA goes on to the rank that is as many places further as there are CTAs. */
void moe_sendrecv_plan(const struct moe_sendrecv *p, const struct moe_lsa_case *c, struct moe_plan *out)
{
    for (int rank = 0; rank < c->ranks; rank++)
        for (int i = 0; i < c->ranks; i++)
            moe_plan_add(out, (struct moe_sent){.from = rank,
                                                .to = (rank + i) % c->ranks,
                                                .bytes = c->bytes,
                                                .rate_Bps = p->channel_Bps,
                                                .delay_s = 2 * p->hop_s + (i < c->ctas ? p->start_s : 0),
                                                .after = i < c->ctas ? -1 : out->n - c->ctas});
}
