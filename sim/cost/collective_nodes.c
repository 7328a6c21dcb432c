/* collective_nodes.c - see collective_nodes.h. */
#include "sim/cost/collective_nodes.h"

#include <math.h>
#include <stdlib.h>

/* Where the members are. */
struct shape {
    int n, nodes, rails, fewest; /* fewest: members of a node */
    int *member;                 /* [n] places in the group, node by node, as they come */
    int *first;                  /* [nodes + 1] of each node, in member */
};

static int node_of(const struct moe_topo *t, int rank)
{
    return rank / (int)t->gpus_per_node;
}

static struct shape shape_of(const struct moe_topo *t, int n, const int *rank)
{
    struct shape s = {.n = n, .fewest = n};
    int n_nodes = 0;
    for (int i = 0; i < n; i++)
        if (node_of(t, rank[i]) >= n_nodes) n_nodes = node_of(t, rank[i]) + 1;
    int *count = moe_alloc((size_t)n_nodes, sizeof *count), *at = moe_alloc((size_t)n_nodes, sizeof *at);
    s.member = moe_alloc((size_t)n, sizeof *s.member);
    s.first = moe_alloc((size_t)n + 1, sizeof *s.first);
    for (int i = 0; i < n; i++) count[node_of(t, rank[i])]++;
    for (int i = 0; i < n; i++) {
        int node = node_of(t, rank[i]);
        if (count[node] > 0) { /* its first member */
            at[node] = s.first[s.nodes];
            s.first[++s.nodes] = at[node] + count[node];
            if (count[node] < s.fewest) s.fewest = count[node];
            count[node] = 0;
        }
        s.member[at[node]++] = i;
    }
    s.rails = s.nodes == 1 ? 1 : t->nics_per_node < s.fewest ? (int)t->nics_per_node : s.fewest;
    free(count);
    free(at);
    return s;
}

static void free_shape(struct shape *s)
{
    free(s->member);
    free(s->first);
}

/* The members in the order of a rail: in each node they are turned, so that the first is next to the rail's
 * NIC. order [n]. */
static void order_of(const struct shape *s, int rail, int *order)
{
    for (int node = 0; node < s->nodes; node++) {
        int first = s->first[node], n = s->first[node + 1] - first;
        for (int i = 0; i < n; i++) order[first + i] = s->member[first + (i + rail * n / s->rails) % n];
    }
}

static int passes(enum moe_collective kind)
{
    return kind == MOE_ALLREDUCE ? 2 : 1;
}

/* What runs, with as many NICs as rails. Without NCCL's numbers rings, whose latencies are those of all steps
 * one after the other. */
static struct moe_nccl_far far_of(const struct moe_topo *t, const struct moe_nccl_case *c, int nodes,
                                  int rails)
{
    if (t->nccl.release && nodes > 1) return moe_nccl_far(&t->nccl, c, nodes, rails, t->nic_Bps);
    double once_s = (c->ranks - nodes) * t->intra_latency_s + (nodes - 1) * t->inter_latency_s;
    return (struct moe_nccl_far){.algorithm = MOE_ALGORITHM_RING,
                                 .protocol = MOE_PROTOCOL_SIMPLE,
                                 .latency_s = passes(c->kind) * once_s,
                                 .wire = 1,
                                 .most_Bps = INFINITY};
}

/* ---- plans ---- */

/* What a plan is made from. */
struct draft {
    const struct moe_moved *m;
    const struct shape *s;
    struct moe_nccl_far far;
    int64_t all;
    struct moe_plan *out;
};

/* Part i of n of the bytes, whose parts differ by one at most. */
static int64_t part(int64_t bytes, int i, int n)
{
    return bytes / n + (i < bytes % n);
}

/* From one place in the group to another; share: of all bytes, for the channels' rate, or one of its own. */
static int add(const struct draft *d, int from, int to, int64_t bytes, double share, double own_Bps)
{
    double rate_Bps = fmin(d->far.most_Bps * share * d->far.wire, own_Bps);
    if (!bytes) return -1;
    return moe_plan_add(d->out, (struct moe_sent){.from = d->m->rank[from],
                                                  .to = d->m->rank[to],
                                                  .bytes = bytes,
                                                  .rate_Bps = isfinite(rate_Bps) ? rate_Bps : 0,
                                                  .wire = d->far.wire,
                                                  .delay_s = d->far.latency_s,
                                                  .after = -1});
}

/* What a member hands on to the next, in all. */
static int64_t handed_on(const struct moe_moved *m, int64_t all, int member, int next)
{
    if (m->kind == MOE_ALLREDUCE) return llround(2.0 * (m->n - 1) / m->n * (double)all);
    return all - m->bytes[m->kind == MOE_ALLGATHER ? next : member];
}

static void ring(const struct draft *d, int rail, const int *order)
{
    int n = d->s->n;
    double share = passes(d->m->kind) * (n - 1.0) / n / d->s->rails;
    for (int place = 0; place < n; place++) {
        int i = order[place], next = order[(place + 1) % n];
        add(d, i, next, part(handed_on(d->m, d->all, i, next), rail, d->s->rails), share, INFINITY);
    }
}

/* Both trees of a rail between the first members of nodes. */
static void trees(const struct draft *d, int rail, const int *order)
{
    int nodes = d->s->nodes, parts = 2 * d->s->rails;
    for (int tree = 0; tree < 2; tree++)
        for (int node = 0; node < nodes; node++) {
            int above = moe_tree_parent(nodes, tree, node);
            if (above < 0) continue;
            int low = order[d->s->first[node]], high = order[d->s->first[above]];
            int64_t bytes = part(d->all, 2 * rail + tree, parts);
            add(d, low, high, bytes, 1.0 / parts, INFINITY);
            add(d, high, low, bytes, 1.0 / parts, INFINITY);
        }
}

static void chains(const struct draft *d, int rail, const int *order)
{
    const struct shape *s = d->s;
    int64_t bytes = part(d->all, 2 * rail, 2 * s->rails) + part(d->all, 2 * rail + 1, 2 * s->rails);
    for (int node = 0; node < s->nodes; node++)
        for (int i = s->first[node] + 1; i < s->first[node + 1]; i++) {
            add(d, order[i], order[i - 1], bytes, 1.0 / s->rails, INFINITY);
            add(d, order[i - 1], order[i], bytes, 1.0 / s->rails, INFINITY);
        }
}

/* To and from the switches of a node. A port is shared by what a head sends for all and what each sends. */
static void switches(const struct draft *d, double port_Bps)
{
    const struct shape *s = d->s;
    int rails = s->rails;
    for (int node = 0; node < s->nodes; node++) {
        int first = s->first[node], n = s->first[node + 1] - first;
        for (int i = 0; i < n && n > 1; i++)
            add(d, s->member[first + i], s->member[first + (i + 1) % n], d->all, INFINITY,
                port_Bps * rails / (rails + 1));
        for (int rail = 0; rail < rails && rails > 1; rail++) /* heads: where order_of begins */
            add(d, s->member[first + rail * n / rails], s->member[first + (rail + 1) % rails * n / rails],
                part(d->all, rail, rails), INFINITY, port_Bps / (rails + 1));
    }
}

/* Blocks that those at i, i + 2d, i + 4d ... have, `blocks` of them. */
static int64_t behind(const struct moe_moved *m, int i, int d, int blocks)
{
    int64_t bytes = 0;
    for (int b = 0; b < blocks; b++) bytes += m->bytes[(i + 2 * (int64_t)d * b) % m->n];
    return bytes;
}

/* Of 1 to n - 1 those whose lowest bit is d. */
static int odd_multiples(int n, int d)
{
    return (n - 1 + d) / (2 * d);
}

static int steps_of_pat(int n)
{
    int steps = 0;
    while (1 << steps < n) steps++;
    return steps;
}

/* Members of a group are its nodes. last, now: the flow that came to a member with the step before, with this
 * one. */
static void pat(struct draft *d)
{
    int n = d->s->n, steps = steps_of_pat(n);
    bool gather = d->m->kind == MOE_ALLGATHER;
    int *came = moe_alloc(2 * (size_t)n, sizeof *came), *last = came, *now = came + n;
    for (int i = 0; i < n; i++) last[i] = -1;
    d->far.latency_s /= steps;
    for (int step = 0; step < steps; step++) {
        int distance = 1 << (gather ? steps - 1 - step : step);
        for (int i = 0; i < n; i++) {
            int below = (i - distance + n) % n, from = gather ? i : below, to = gather ? below : i;
            int64_t bytes = behind(d->m, i, distance, odd_multiples(n, distance));
            int flow = add(d, from, to, bytes, INFINITY, INFINITY);
            if (flow >= 0) d->out->flow[flow].after = last[from];
            now[to] = flow >= 0 ? flow : last[to];
        }
        int *before = last;
        last = now;
        now = before;
    }
    free(came);
}

void moe_nodes_plan(const struct moe_topo *t, const struct moe_moved *m, int64_t all, struct moe_plan *out)
{
    struct shape s = shape_of(t, m->n, m->rank);
    struct moe_nccl_case c = {m->kind, m->n, all, m->type_bytes, m->is_float};
    struct draft d = {m, &s, far_of(t, &c, s.nodes, s.rails), all, out};
    int *order = moe_alloc((size_t)s.n, sizeof *order);
    bool tree = d.far.algorithm == MOE_ALGORITHM_TREE, nvls = d.far.algorithm == MOE_ALGORITHM_NVLSTREE;
    if (nvls) s.rails = s.fewest;
    if (nvls) switches(&d, moe_nccl_switch_Bps(&t->nccl));
    if (d.far.algorithm == MOE_ALGORITHM_PAT) pat(&d);
    for (int rail = 0; rail < s.rails && d.far.algorithm != MOE_ALGORITHM_PAT; rail++) {
        order_of(&s, rail, order);
        if (tree) chains(&d, rail, order);
        if (tree || nvls)
            trees(&d, rail, order);
        else
            ring(&d, rail, order);
    }
    free(order);
    free_shape(&s);
}

/* NCCL's tree over 0 to n - 1, root 0: the parent of i has i's lowest bit cleared and the next one set; where
 * that is too far, only cleared. The other tree is this one mirrored, or shifted by one where n is odd. */
int moe_tree_parent(int nodes, int tree, int i)
{
    bool odd = nodes % 2;
    if (tree) i = odd ? (i + nodes - 1) % nodes : nodes - 1 - i;
    if (!i) return -1;
    int bit = i & -i, up = (i ^ bit) | 2 * bit;
    if (up >= nodes) up = i ^ bit;
    if (!tree) return up;
    return odd ? (up + 1) % nodes : nodes - 1 - up;
}

/* ---- closed forms ---- */

/* Bytes that the busiest GPU sends in its node, for one that a ring hands on, or else for one of all; R
 * rails, P members. */
static double near_bytes(enum moe_algorithm algorithm, int R, int P)
{
    if (P == 1) return 0;
    if (algorithm == MOE_ALGORITHM_NVLSTREE) return 1 + 1.0 / P;
    if (algorithm == MOE_ALGORITHM_RING) return R == P ? (P - 1.0) / P : 1; /* all hops of a rail but one */
    /* Up and down in every rail, but one of them where it is an end of the chain: with as many rails as GPUs
     * twice, with half as many once. */
    int ends = P == 2 ? R : R == P ? 2 : 2 * R >= P ? 1 : 0;
    return (2.0 * R - ends) / R;
}

double moe_nodes_s(const struct moe_topo *t, const struct moe_nccl_case *c, int nodes, int per_node)
{
    int R = nodes == 1 ? 1 : per_node < t->nics_per_node ? per_node : (int)t->nics_per_node;
    struct moe_nccl_far far = far_of(t, c, nodes, R);
    bool tree = far.algorithm == MOE_ALGORITHM_TREE, nvls = far.algorithm == MOE_ALGORITHM_NVLSTREE;
    double S = (double)c->bytes * far.wire, sent = S * passes(c->kind) * (c->ranks - 1) / c->ranks;
    double far_bytes = nodes == 1 ? 0 : tree || nvls ? fmin(nodes, 4) / 2 * S : sent;
    double near_Bps = nvls ? moe_nccl_switch_Bps(&t->nccl) : t->intra_Bps;
    double near_s = near_bytes(far.algorithm, R, per_node) * (tree || nvls ? S : sent) / near_Bps;
    double own_s = (double)c->bytes / far.most_Bps;
    double heads =
        nvls ? ceil((double)per_node / R) * R / per_node : 1; /* of a NIC, if not all have as many */
    return far.latency_s + fmax(own_s, fmax(near_s, heads * far_bytes / R / t->nic_Bps));
}
