/* deepep.c - see deepep.h. */
#include "sim/cost/deepep.h"

#include <math.h>
#include <stdlib.h>

#define X(member, key, unit, size, least, most, source) {key, unit, size, least, most, source},
const struct moe_number moe_deepep_normal_param[] = {MOE_DEEPEP_NORMAL(X)},
                        moe_deepep_low_latency_param[] = {MOE_DEEPEP_LOW_LATENCY(X)};
#undef X
const struct moe_deepep moe_deepep_default = {
    .sms = 20,
    .one_node.kernel =
        {{.start_s = 22.64e-6, .row_Bps = 9.36e9, .sm_Bps = 38.7e9, .message_s = 0.111e-6, .serial = 0.252},
         {.start_s = 23.91e-6,
          .row_Bps = 0.798e9,
          .sm_Bps = 31.5e9,
          .message_s = 0.0371e-6,
          .serial = 0.306}},
    .nodes.kernel = {{.start_s = 23.5e-6, .doubling_s = 31.1e-6, .sm_Bps = 18.9e9, .serial = 0.082},
                     {.start_s = 41.7e-6, .doubling_s = 32.3e-6, .sm_Bps = 13.8e9, .serial = 0.0072}}};
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

static double latency_of(const struct moe_deepep_normal *p, int nodes, double row_bytes)
{
    return p->start_s + p->doubling_s * log2(nodes) + (p->row_Bps > 0 ? row_bytes / p->row_Bps : 0);
}

/* A row is copied to each node and to each rank. The kernel ends with the busiest of its lanes, channels
 * times ranks of a node: rows fall on them as they come, so the most of them has about this much more than
 * the mean (of many Poisson numbers). rows: of those to ranks. */
static double busiest(int sms, double ranks_per_node, double rows)
{
    double lanes = fmax(sms / 2.0 * ranks_per_node, 1);
    return 1 + (rows > 0 ? sqrt(2 * log(lanes) * lanes / rows) : 0);
}

static struct work normal(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                          const struct moe_deepep_case *c)
{
    struct work w = new_work(topo, c);
    double row = moe_deepep_row_bytes(c, false), tokens = (double)c->tokens, D, R;
    moe_deepep_spread(c, w.ranks_per_node, &D, &R);
    w.latency_s = latency_of(p, w.nodes, row);
    w.serial = p->serial;
    w.network_bytes = tokens * D * (w.nodes - 1) / w.nodes * row;
    w.nvlink_bytes = tokens * R * (w.ranks_per_node - 1) / w.ranks_per_node * row;
    if (p->nvlink_Bps > 0) w.nvlink_Bps = fmin(w.nvlink_Bps, p->nvlink_Bps);
    w.copy_Bps = INFINITY;
    if (!c->sms || !c->tokens) return w;
    double of_token_s = (R * (p->message_s + row / p->sm_Bps) + D * row / p->sm_Bps) / c->sms *
                        busiest(c->sms, w.ranks_per_node, tokens * R);
    w.copied_bytes = tokens * (R + D) * row;
    w.copy_Bps = (R + D) * row / of_token_s;
    return w;
}

/* What a rank waits for before its rows: `other` of the n ranks are on other nodes. */
static double low_latency_of(const struct moe_deepep_low_latency *p, int other, int n, int experts)
{
    return p->start_s + (other ? p->remote_s : 0) + p->expert_s * experts * other / n;
}

static struct work low_latency(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                               const struct moe_deepep_case *c)
{
    struct work w = new_work(topo, c);
    double other = (w.nodes - 1.0) / w.nodes,
           sent = (double)c->tokens * c->top_k * moe_deepep_row_bytes(c, true);
    w.latency_s = low_latency_of(p, c->ranks - w.ranks_per_node, c->ranks, c->experts);
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
static int64_t part_of(double share, double bytes, bool serial)
{
    int64_t first = llround(share * bytes);
    return serial ? first : llround(bytes) - first;
}

static int send_to(struct moe_plan *out, int from, int to, int64_t bytes, double rate_Bps, int after)
{
    if (!bytes) return after;
    return moe_plan_add(out, (struct moe_sent){from, to, bytes, .rate_Bps = rate_Bps, .after = after});
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

/* ---- flows of low latency ---- */

/* A stage of member i: what it has for others of its node, or of other nodes. Result: its largest flow, or
 * `after`. */
static int low_latency_stage(const struct moe_low_latency_traffic *x, int64_t per_node, int i, bool remote,
                             double share, bool serial, int after, struct moe_plan *out)
{
    int largest = after;
    for (int to = 0; to < x->n; to++) {
        int64_t bytes = part_of(share, x->bytes[(size_t)i * (size_t)x->n + (size_t)to], serial);
        if (to == i || remote == (x->rank[to] / per_node == x->rank[i] / per_node)) continue;
        int at = send_to(out, x->rank[i], x->rank[to], bytes, 0, after);
        if (at != after && (largest == after || bytes > out->flow[largest].bytes)) largest = at;
    }
    return largest;
}

void moe_low_latency_traffic_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                  const struct moe_low_latency_traffic *x, struct moe_plan *out)
{
    int64_t P = topo->gpus_per_node;
    for (int i = 0; i < x->n; i++) {
        double copied = 0;
        int other = 0;
        for (int to = 0; to < x->n; to++) {
            copied += x->bytes[(size_t)i * (size_t)x->n + (size_t)to];
            other += x->rank[to] / P != x->rank[i] / P;
        }
        struct moe_sent first = {.from = x->rank[i],
                                 .to = x->rank[i],
                                 .bytes = part_of(p->serial, copied, true),
                                 .rate_Bps = p->copy_Bps,
                                 .delay_s = x->rides ? 0 : low_latency_of(p, other, x->n, x->experts),
                                 .after = -1};
        int last = moe_plan_add(out, first);
        last = low_latency_stage(x, P, i, true, p->serial, true, last, out);
        last = low_latency_stage(x, P, i, false, p->serial, true, last, out);
        send_to(out, x->rank[i], x->rank[i], part_of(p->serial, copied, false), p->copy_Bps, last);
        low_latency_stage(x, P, i, true, p->serial, false, last, out);
        low_latency_stage(x, P, i, false, p->serial, false, last, out);
    }
}

void moe_deepep_low_latency_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                 const struct moe_deepep_case *c, struct moe_plan *out)
{
    size_t n = (size_t)c->ranks;
    int *rank = moe_alloc(n, sizeof *rank);
    double *bytes = moe_alloc(n * n, sizeof *bytes);
    for (int i = 0; i < c->ranks; i++) rank[i] = i;
    for (size_t i = 0; i < n * n; i++) bytes[i] = low_latency(p, topo, c).copied_bytes / c->ranks;
    const struct moe_low_latency_traffic x = {
        .n = c->ranks, .experts = c->experts, .rank = rank, .bytes = bytes};
    moe_low_latency_traffic_plan(p, topo, &x, out);
    free(rank);
    free(bytes);
}

/* ---- flows of normal kernels ---- */

/* What the plan of a traffic is made from. */
struct paths {
    const struct moe_deepep_normal *p;
    const struct moe_topo *topo;
    const struct moe_deepep_traffic *x;
    int *node;         /* [n] of each member */
    double *forwarded; /* [n, n] bytes that a member hands to a rank of its node, itself among them */
};

/* Who takes a token of `home` at another node, or gives it back: the member at its place there. */
static int rail(const struct paths *w, int home, int node)
{
    const int *first = w->x->first;
    return first[node] + (home - first[w->node[home]]) % (first[node + 1] - first[node]);
}

static void free_paths(struct paths *w)
{
    free(w->node);
    free(w->forwarded);
}

static struct paths paths_of(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                             const struct moe_deepep_traffic *x)
{
    size_t n = (size_t)x->n;
    struct paths w = {p, topo, x, moe_alloc(n, sizeof(int)), moe_alloc(n * n, sizeof(double))};
    for (int d = 0; d < x->n_nodes; d++)
        for (int i = x->first[d]; i < x->first[d + 1]; i++) w.node[i] = d;
    for (size_t home = 0; home < n; home++)
        for (size_t to = 0; to < n; to++)
            w.forwarded[(size_t)rail(&w, (int)home, w.node[to]) * n + to] += x->to_rank[home * n + to];
    return w;
}

/* A flow of what leaves home; what comes home takes the same way back. Result: the larger of this and
 * `largest`, which a next stage follows. */
static int flow(const struct paths *w, int from, int to, int64_t bytes, double rate_Bps, int after,
                int largest, struct moe_plan *out)
{
    const int *rank = w->x->rank;
    bool back = w->x->combine;
    int at = send_to(out, rank[back ? to : from], rank[back ? from : to], bytes, rate_Bps, after);
    return at == after || (largest != after && out->flow[largest].bytes > bytes) ? largest : at;
}

static int network_stage(const struct paths *w, int home, bool serial, int after, struct moe_plan *out)
{
    int largest = after;
    for (int d = 0; d < w->x->n_nodes; d++) {
        double bytes = w->x->to_node[(size_t)home * (size_t)w->x->n_nodes + (size_t)d];
        if (d != w->node[home])
            largest =
                flow(w, home, rail(w, home, d), part_of(w->p->serial, bytes, serial), 0, after, largest, out);
    }
    return largest;
}

static int nvlink_stage(const struct paths *w, int member, bool serial, int after, struct moe_plan *out)
{
    const int *first = w->x->first + w->node[member];
    const double *bytes = w->forwarded + (size_t)member * (size_t)w->x->n;
    double all = 0, most_Bps = w->p->nvlink_Bps;
    int largest = after;
    if (most_Bps >= w->topo->intra_Bps) most_Bps = 0;
    for (int to = first[0]; to < first[1]; to++) all += to == member ? 0 : bytes[to];
    for (int to = first[0]; to < first[1]; to++)
        if (to != member && bytes[to] > 0)
            largest = flow(w, member, to, part_of(w->p->serial, bytes[to], serial),
                           most_Bps * bytes[to] / all, after, largest, out);
    return largest;
}

/* What the SMs of a member copy: of its own tokens a row for each node, of those that it forwards one for
 * each rank. */
static double copied(const struct paths *w, int member, double *rate_Bps)
{
    const struct moe_deepep_traffic *x = w->x;
    const int *first = x->first + w->node[member];
    double to_nodes = 0, to_ranks = 0;
    for (int d = 0; d < x->n_nodes; d++)
        to_nodes += x->to_node[(size_t)member * (size_t)x->n_nodes + (size_t)d];
    for (int to = first[0]; to < first[1]; to++)
        to_ranks += w->forwarded[(size_t)member * (size_t)x->n + (size_t)to];
    double bytes = to_nodes + to_ranks, rows = x->row_bytes > 0 ? to_ranks / x->row_bytes : 0,
           message_s = x->rides ? 0 : rows * w->p->message_s;
    *rate_Bps = 0;
    if (!x->sms || bytes <= 0) return 0;
    *rate_Bps = bytes * x->sms / (message_s + bytes / w->p->sm_Bps) /
                busiest(x->sms, (double)x->n / x->n_nodes, rows);
    return bytes;
}

void moe_deepep_traffic_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                             const struct moe_deepep_traffic *x, struct moe_plan *out)
{
    struct paths w = paths_of(p, topo, x);
    for (int i = 0; i < x->n; i++) {
        double rate_Bps, bytes = copied(&w, i, &rate_Bps);
        struct moe_sent first = {.from = x->rank[i],
                                 .to = x->rank[i],
                                 .bytes = part_of(p->serial, bytes, true),
                                 .rate_Bps = rate_Bps,
                                 .delay_s = x->rides ? 0 : latency_of(p, x->n_nodes, x->row_bytes),
                                 .after = -1};
        int last = moe_plan_add(out, first);
        last = network_stage(&w, i, true, last, out);
        last = nvlink_stage(&w, i, true, last, out);
        send_to(out, x->rank[i], x->rank[i], part_of(p->serial, bytes, false), rate_Bps, last);
        network_stage(&w, i, false, last, out);
        nvlink_stage(&w, i, false, last, out);
    }
    free_paths(&w);
}

void moe_deepep_normal_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                            const struct moe_deepep_case *c, struct moe_plan *out)
{
    int n = c->ranks, P = new_work(topo, c).ranks_per_node, N = n / P;
    double row = moe_deepep_row_bytes(c, false), D, R;
    size_t to_ranks = (size_t)n * (size_t)n, to_nodes = (size_t)n * (size_t)N;
    int *rank = moe_alloc((size_t)n, sizeof *rank), *first = moe_alloc((size_t)N + 1, sizeof *first);
    double *to_rank = moe_alloc(to_ranks, sizeof *to_rank), *to_node = moe_alloc(to_nodes, sizeof *to_node);
    moe_deepep_spread(c, P, &D, &R);
    for (int i = 0; i < n; i++) rank[i] = i;
    for (int d = 0; d <= N; d++) first[d] = d * P;
    for (size_t i = 0; i < to_ranks; i++) to_rank[i] = (double)c->tokens * R / n * row;
    for (size_t i = 0; i < to_nodes; i++) to_node[i] = (double)c->tokens * D / N * row;
    moe_deepep_traffic_plan(p, topo,
                            &(struct moe_deepep_traffic){.combine = c->combine,
                                                         .n = n,
                                                         .n_nodes = N,
                                                         .sms = c->sms,
                                                         .rank = rank,
                                                         .first = first,
                                                         .to_rank = to_rank,
                                                         .to_node = to_node,
                                                         .row_bytes = row},
                            out);
    free(rank);
    free(first);
    free(to_rank);
    free(to_node);
}
