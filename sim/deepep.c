/* deepep.c - see deepep.h. */
#include "sim/deepep.h"

#include <math.h>
#include <stdlib.h>

#define X(member, key, unit, size, least, most, source) {key, unit, size, least, most, source},
const struct moe_number moe_deepep_normal_param[] = {MOE_DEEPEP_NORMAL(X)},
                        moe_deepep_low_latency_param[] = {MOE_DEEPEP_LOW_LATENCY(X)};
#undef X
const struct moe_deepep_normal moe_deepep_normal_default[2] = {
    {.start_s = 23.5e-6, .doubling_s = 31.1e-6, .sm_Bps = 18.9e9, .serial = 0.082},
    {.start_s = 41.7e-6, .doubling_s = 32.3e-6, .sm_Bps = 13.8e9, .serial = 0.0072}};
const struct moe_deepep_low_latency moe_deepep_low_latency_default[2] = {
    {.start_s = 14.6e-6, .remote_s = 2.3e-6, .expert_s = 0.0253e-6, .copy_Bps = 310e9, .serial = 0.123},
    {.start_s = 10.8e-6, .remote_s = 13.8e-6, .expert_s = 0.0010e-6, .copy_Bps = 252e9, .serial = 0.118}};

/* What a rank does. Rates: infinite where there is none. */
struct work {
    double latency_s, serial;
    double copied_bytes, copy_Bps;
    double network_bytes, network_Bps; /* to all other nodes together; of its NIC its share */
    double nvlink_bytes, nvlink_Bps;   /* to all others of its node together */
    int nodes, ranks_per_node;
    bool rails; /* to other nodes it sends to the rank at its place only */
};

double moe_deepep_row_bytes(const struct moe_deepep_case *c, bool low_latency)
{
    if (c->combine) return 2.0 * c->hidden;
    return c->hidden * (1 + 4 / 128.0) + (low_latency ? 16 : 0);
}

/* Experts are taken one after the other, evenly of those that may still be taken. What counts of those taken
 * before is on how many nodes and ranks they are, to which chance [nodes, ranks] gives the probability: once
 * no node may be added, only experts of those that are there may be taken. */
void moe_deepep_spread(const struct moe_deepep_case *c, int ranks_per_node, double *nodes, double *ranks)
{
    int P = ranks_per_node < c->ranks ? ranks_per_node : c->ranks, N = c->ranks / P,
        G = c->node_limit && c->node_limit < N ? c->node_limit : N, e = c->experts / c->ranks,
        width = G * P + 1;
    double *chance = moe_alloc((size_t)((G + 1) * width), sizeof *chance);
    moe_assert(N * P == c->ranks && e * c->ranks == c->experts && c->top_k <= G * P * e);
    chance[0] = 1;
    for (int taken = 0; taken < c->top_k; taken++)
        for (int n = G; n >= 0; n--) /* downwards: what is added to is done */
            for (int r = n * P; r >= n; r--) {
                double *here = &chance[n * width + r], all = *here, left = (n < G ? N : G) * P * e - taken;
                if (all == 0) continue;
                double new_node = n < G ? (N - n) * P * e / left : 0, new_rank = (n * P - r) * e / left;
                *here = all * fmax(1 - new_node - new_rank, 0);
                if (new_rank > 0) here[1] += all * new_rank;
                if (new_node > 0) here[width + 1] += all * new_node;
            }
    *nodes = *ranks = 0;
    for (int n = 0; n <= G; n++)
        for (int r = 0; r < width; r++) {
            *nodes += n * chance[n * width + r];
            *ranks += r * chance[n * width + r];
        }
    free(chance);
}

/* ---- the two kinds of kernels ---- */

static struct work new_work(const struct moe_topo *topo, const struct moe_deepep_case *c)
{
    int P = topo->gpus_per_node < c->ranks ? (int)topo->gpus_per_node : c->ranks;
    moe_assert(c->ranks % P == 0);
    return (struct work){.network_Bps = topo->nic_Bps *
                                        fmin(1, (double)topo->nics_per_node / (double)topo->gpus_per_node),
                         .nvlink_Bps = topo->intra_Bps,
                         .ranks_per_node = P,
                         .nodes = c->ranks / P};
}

static struct work normal(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                          const struct moe_deepep_case *c)
{
    struct work w = new_work(topo, c);
    double row = moe_deepep_row_bytes(c, false), tokens = (double)c->tokens, D, R;
    moe_deepep_spread(c, w.ranks_per_node, &D, &R);
    w.latency_s = p->start_s + p->doubling_s * log2(w.nodes) + (p->row_Bps > 0 ? row / p->row_Bps : 0);
    w.serial = p->serial;
    w.rails = true;
    w.network_bytes = tokens * D * (w.nodes - 1) / w.nodes * row;
    w.nvlink_bytes = tokens * R * (w.ranks_per_node - 1) / w.ranks_per_node * row;
    if (p->nvlink_Bps > 0) w.nvlink_Bps = fmin(w.nvlink_Bps, p->nvlink_Bps);
    w.copy_Bps = INFINITY;
    if (!c->sms || !c->tokens) return w;
    /* A row is copied to each node and to each rank. The kernel ends with the busiest of its lanes, channels
     * times ranks of a node: rows fall on them as they come, so the most of them has about this much more
     * than the mean (of many Poisson numbers). */
    double lanes = fmax(c->sms / 2.0 * w.ranks_per_node, 1),
           busiest = 1 + sqrt(2 * log(lanes) * lanes / (tokens * R)),
           of_token_s = (R * (p->message_s + row / p->sm_Bps) + D * row / p->sm_Bps) / c->sms * busiest;
    w.copied_bytes = tokens * (R + D) * row;
    w.copy_Bps = (R + D) * row / of_token_s;
    return w;
}

static struct work low_latency(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                               const struct moe_deepep_case *c)
{
    struct work w = new_work(topo, c);
    double other = (w.nodes - 1.0) / w.nodes,
           sent = (double)c->tokens * c->top_k * moe_deepep_row_bytes(c, true);
    w.latency_s = p->start_s + (w.nodes > 1 ? p->remote_s : 0) + p->expert_s * c->experts * other;
    w.serial = p->serial;
    w.copied_bytes = sent;
    w.copy_Bps = p->copy_Bps;
    w.network_bytes = sent * other;
    w.nvlink_bytes = sent / w.nodes * (w.ranks_per_node - 1) / w.ranks_per_node;
    return w;
}

/* ---- closed form and flows ---- */

static double time_of(const struct work *w)
{
    double copy_s = w->copied_bytes / w->copy_Bps, network_s = w->network_bytes / w->network_Bps,
           nvlink_s = w->nvlink_bytes / w->nvlink_Bps;
    return w->latency_s + (1 - w->serial) * fmax(copy_s, fmax(network_s, nvlink_s)) +
           w->serial * (copy_s + network_s + nvlink_s);
}

/* The serial part of the bytes, or what is left. */
static int64_t part_of(const struct work *w, double bytes, bool serial)
{
    int64_t first = llround(w->serial * bytes);
    return serial ? first : llround(bytes) - first;
}

static int send_to(struct moe_plan *out, int from, int to, int64_t bytes, double rate_Bps, int after)
{
    if (!bytes) return after;
    return moe_plan_add(out, (struct moe_sent){from, to, bytes, .rate_Bps = rate_Bps, .after = after});
}

static int send_network(const struct work *w, int rank, bool serial, int after, struct moe_plan *out)
{
    int P = w->ranks_per_node, last = after, peers = (w->nodes - 1) * (w->rails ? 1 : P);
    for (int i = w->rails ? rank % P : 0; i < w->nodes * P; i += w->rails ? P : 1)
        if (i / P != rank / P)
            last = send_to(out, rank, i, part_of(w, w->network_bytes / peers, serial), 0, after);
    return last;
}

static int send_nvlink(const struct work *w, const struct moe_topo *topo, int rank, bool serial, int after,
                       struct moe_plan *out)
{
    int P = w->ranks_per_node, node = rank / P, last = after;
    double rate_Bps = w->nvlink_Bps < topo->intra_Bps ? w->nvlink_Bps / (P - 1) : 0;
    for (int i = node * P; i < (node + 1) * P; i++)
        if (i != rank)
            last = send_to(out, rank, i, part_of(w, w->nvlink_bytes / (P - 1), serial), rate_Bps, after);
    return last;
}

static void plan_of(const struct work *w, const struct moe_topo *topo, struct moe_plan *out)
{
    double copy_Bps = isfinite(w->copy_Bps) ? w->copy_Bps : 0;
    for (int rank = 0; rank < w->nodes * w->ranks_per_node; rank++) {
        struct moe_sent first = {.from = rank,
                                 .to = rank,
                                 .bytes = part_of(w, w->copied_bytes, true),
                                 .rate_Bps = copy_Bps,
                                 .delay_s = w->latency_s,
                                 .after = -1};
        int last = moe_plan_add(out, first);
        last = send_network(w, rank, true, last, out);
        last = send_nvlink(w, topo, rank, true, last, out);
        send_to(out, rank, rank, part_of(w, w->copied_bytes, false), copy_Bps, last);
        send_network(w, rank, false, last, out);
        send_nvlink(w, topo, rank, false, last, out);
    }
}

double moe_deepep_normal_s(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                           const struct moe_deepep_case *c)
{
    struct work w = normal(p, topo, c);
    return time_of(&w);
}

double moe_deepep_low_latency_s(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                const struct moe_deepep_case *c)
{
    struct work w = low_latency(p, topo, c);
    return time_of(&w);
}

void moe_deepep_normal_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                            const struct moe_deepep_case *c, struct moe_plan *out)
{
    struct work w = normal(p, topo, c);
    plan_of(&w, topo, out);
}

void moe_deepep_low_latency_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                 const struct moe_deepep_case *c, struct moe_plan *out)
{
    struct work w = low_latency(p, topo, c);
    plan_of(&w, topo, out);
}
