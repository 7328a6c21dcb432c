/* collective.c - see collective.h. */
#include "sim/cost/collective.h"

#include <math.h>
#include <stdlib.h>

/* Where the members are. */
struct shape {
    int n, nodes, rings;
    int *member; /* [n] places in the group, node by node, as they come */
    int *first;  /* [nodes + 1] of each node, in member */
};

static int node_of(const struct moe_topo *t, int rank)
{
    return rank / (int)t->gpus_per_node;
}

/* As many rings as every node has NICs and members for. */
static struct shape shape_of(const struct moe_topo *t, int n, const int *rank)
{
    struct shape s = {.n = n, .rings = n};
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
            if (count[node] < s.rings) s.rings = count[node];
            count[node] = 0;
        }
        s.member[at[node]++] = i;
    }
    if (t->nics_per_node < s.rings) s.rings = (int)t->nics_per_node;
    if (s.nodes == 1) s.rings = 1;
    free(count);
    free(at);
    return s;
}

static void free_shape(struct shape *s)
{
    free(s->member);
    free(s->first);
}

static int64_t sum(const int64_t *bytes, int n)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++) all += bytes[i];
    return all;
}

static struct moe_nccl_case case_of(const struct moe_moved *m, int64_t bytes)
{
    return (struct moe_nccl_case){m->kind, m->n, bytes, m->type_bytes, m->is_float};
}

static bool has_nccl(const struct moe_topo *t, int nodes, int n)
{
    return t->nccl.release && nodes == 1 && n > 1;
}

/* ---- all-to-all ---- */

/* How much longer a NIC is busy for what it receives. Before 2.12 NCCL had no PXN: each GPU sends to 8 of its
 * far peers at a time, in an order of its own, so a NIC now has more and now fewer than 8 senders, and is not
 * made up for what it missed: 1 / E min(1, X / 8), X binomial. (NVIDIA/nccl: 8 peers in a batch.) */
static double collisions(const struct moe_topo *t, int far)
{
    enum { PXN = 21200, AT_A_TIME = 8 };
    if (!t->nccl.release || t->nccl.release->number >= PXN || far <= AT_A_TIME) return 1;
    double w = AT_A_TIME, p = w / far, mode = lgamma(far + 1) - lgamma(w + 1) - lgamma(far - w + 1);
    mode = exp(mode + w * log(p) + (far - w) * log1p(-p));
    return 1 / (1 - (1 - p) * mode);
}

/* Pairs of all kinds are launched together. */
static double far_launch_s(const struct moe_topo *t, int n)
{
    return t->nccl.release ? moe_nccl_pair(&t->nccl, n, 1, false).delay_s : 0;
}

static void add_pair(const struct moe_topo *t, const struct moe_moved *m, int from, int to, double far_wire,
                     struct moe_plan *out)
{
    int a = m->rank[from], b = m->rank[to];
    struct moe_sent sent = {.from = a, .to = b, .after = -1, .bytes = m->bytes[from * (int64_t)m->n + to]};
    bool near = node_of(t, a) == node_of(t, b);
    if (t->nccl.release && m->n > 1) {
        struct moe_nccl_part part = moe_nccl_pair(&t->nccl, m->n, sent.bytes, a == b);
        sent.delay_s = part.delay_s;
        sent.rate_Bps = part.rate_Bps;
        sent.wire = part.wire;
    }
    if (!near) {
        sent.delay_s = moe_topo_latency_s(t, a, b) + far_launch_s(t, m->n);
        sent.rate_Bps = 0;
        sent.wire = far_wire;
    } else if (!t->nccl.release || m->n == 1) {
        sent.delay_s = moe_topo_latency_s(t, a, b);
    }
    moe_plan_add(out, sent);
}

static void alltoall(const struct moe_topo *t, const struct moe_moved *m, struct moe_plan *out)
{
    for (int from = 0; from < m->n; from++) {
        int far = 0;
        for (int to = 0; to < m->n; to++) far += node_of(t, m->rank[from]) != node_of(t, m->rank[to]);
        double far_wire = collisions(t, far);
        for (int i = 0; i < m->n; i++) {
            int to = (from + i) % m->n;
            if (m->bytes[from * (int64_t)m->n + to]) add_pair(t, m, from, to, far_wire, out);
        }
    }
}

/* ---- rings ---- */

/* The members in the order of a ring: in each node they are turned, so that the first is next to the ring's
 * NIC. order [n]. */
static void order_of(const struct shape *s, int ring, int *order)
{
    for (int node = 0; node < s->nodes; node++) {
        int first = s->first[node], n = s->first[node + 1] - first;
        for (int i = 0; i < n; i++) order[first + i] = s->member[first + (i + ring * n / s->rings) % n];
    }
}

/* What a member hands on to the next, in all. */
static int64_t handed_on(const struct moe_moved *m, int64_t all, int member, int next)
{
    if (m->kind == MOE_ALLREDUCE) return llround(2.0 * (m->n - 1) / m->n * (double)all);
    return all - m->bytes[m->kind == MOE_ALLGATHER ? next : member];
}

static int passes(enum moe_collective kind)
{
    return kind == MOE_ALLREDUCE ? 2 : 1;
}

/* What comes before the bytes of a ring, and how many bytes are on the wire for one. */
struct steps {
    double latency_s, wire;
};

/* Latencies of all steps, one after the other; over several nodes with NCCL those of what it runs: of a tree,
 * or of PAT, fewer than there are members. What these move over the links is as much as a ring does. */
static struct steps steps_of(const struct moe_topo *t, const struct moe_nccl_case *c, const struct shape *s)
{
    double node_Bps = t->nic_Bps * (double)t->nics_per_node;
    if (t->nccl.release && s->nodes > 1) {
        struct moe_nccl_far far = moe_nccl_far(&t->nccl, c, s->nodes, node_Bps);
        return (struct steps){far.latency_s, far.wire};
    }
    double once_s = (s->n - s->nodes) * t->intra_latency_s + (s->nodes - 1) * t->inter_latency_s;
    return (struct steps){passes(c->kind) * once_s, 1};
}

static void rings(const struct moe_topo *t, const struct moe_moved *m, const struct shape *s, int64_t all,
                  struct moe_plan *out)
{
    struct moe_nccl_case c = case_of(m, all);
    struct steps steps = steps_of(t, &c, s);
    int *order = moe_alloc((size_t)s->n, sizeof *order);
    for (int ring = 0; ring < s->rings; ring++) {
        order_of(s, ring, order);
        for (int place = 0; place < s->n; place++) {
            int i = order[place], next = order[(place + 1) % s->n];
            int64_t bytes = handed_on(m, all, i, next);
            struct moe_sent sent = {.from = m->rank[i], .to = m->rank[next], .after = -1};
            sent.bytes = bytes / s->rings + (ring < bytes % s->rings);
            sent.delay_s = steps.latency_s;
            sent.wire = steps.wire;
            if (sent.bytes) moe_plan_add(out, sent);
        }
    }
    free(order);
}

/* On one node, by NCCL's channels. */
static void channels(const struct moe_topo *t, const struct moe_moved *m, int64_t all, struct moe_plan *out)
{
    struct moe_nccl_case c = case_of(m, all);
    struct moe_nccl_ring ring = moe_nccl_ring(&t->nccl, &c);
    for (int i = 0; i < m->n; i++) {
        int next = (i + 1) % m->n, after = -1;
        bool switches = ring.algorithm == MOE_ALGORITHM_NVLS;
        int64_t left = switches ? all : handed_on(m, all, i, next);
        for (int p = 0; p < ring.n_parts; p++) {
            const struct moe_nccl_part *part = &ring.part[p];
            int64_t bytes = p == ring.n_parts - 1 ? left : llround((double)left * ring.share[p]);
            left -= bytes;
            after = moe_plan_add(out, (struct moe_sent){m->rank[i], m->rank[next], bytes, part->rate_Bps,
                                                        part->wire, part->delay_s, after});
            if (part->tail_s > 0) /* at home, without bytes of its own */
                after = moe_plan_add(
                    out, (struct moe_sent){
                             .from = m->rank[i], .to = m->rank[i], .delay_s = part->tail_s, .after = after});
        }
    }
}

void moe_collective_plan(const struct moe_topo *t, const struct moe_moved *m, struct moe_plan *out)
{
    out->n = 0;
    out->together = m->kind != MOE_ALLTOALL;
    if (m->kind == MOE_ALLTOALL) {
        alltoall(t, m, out);
        return;
    }
    int64_t all = m->kind == MOE_ALLREDUCE ? m->bytes[0] : sum(m->bytes, m->n);
    if (m->n < 2 || !all) return;
    struct shape s = shape_of(t, m->n, m->rank);
    if (has_nccl(t, s.nodes, s.n))
        channels(t, m, all, out);
    else
        rings(t, m, &s, all, out);
    free_shape(&s);
}

/* nccl-tests' size: the most that a member sends, or the whole buffer. */
static int64_t size_of(const struct moe_moved *m)
{
    int64_t most = 0;
    if (m->kind != MOE_ALLTOALL) return m->kind == MOE_ALLREDUCE ? m->bytes[0] : sum(m->bytes, m->n);
    for (int from = 0; from < m->n; from++) {
        int64_t sent = sum(m->bytes + (size_t)from * (size_t)m->n, m->n);
        if (sent > most) most = sent;
    }
    return most;
}

double moe_collective_error(const struct moe_topo *t, const struct moe_moved *m)
{
    bool one_node = true;
    for (int i = 1; i < m->n; i++) one_node &= node_of(t, m->rank[i]) == node_of(t, m->rank[0]);
    if (!one_node) return t->inter_error;
    if (!has_nccl(t, 1, m->n)) return t->intra_error;
    struct moe_nccl_case c = case_of(m, size_of(m));
    return moe_nccl_error(&t->nccl, &c);
}

/* ---- closed forms ---- */

static double alltoall_s(const struct moe_topo *t, int n, int per_node, int64_t bytes)
{
    double b = (double)bytes, near = per_node - 1, far = n - per_node;
    double nic_Bps = t->nic_Bps * (double)t->nics_per_node / (double)t->gpus_per_node;
    double far_s = far > 0 ? t->inter_latency_s + far * b * collisions(t, (int)far) / nic_Bps : 0;
    double self_s = 2 * b / t->memory_Bps;
    if (!t->nccl.release || n == 1)
        return fmax(far_s, fmax(near > 0 ? t->intra_latency_s + near * b / t->intra_Bps : 0, self_s));
    struct moe_nccl_part part = moe_nccl_pair(&t->nccl, n, bytes, per_node == 1);
    double wire = b * part.wire, own_s = fmax(wire / part.rate_Bps, near > 0 ? 0 : self_s);
    double near_s = part.delay_s + fmax(own_s, near * wire / t->intra_Bps);
    return far > 0 ? fmax(near_s, far_s + far_launch_s(t, n)) : near_s;
}

double moe_collective_s(const struct moe_topo *t, enum moe_collective kind, int n, int64_t bytes,
                        int type_bytes, bool is_float)
{
    int per_node = n < t->gpus_per_node ? n : (int)t->gpus_per_node;
    struct shape s = {.n = n, .nodes = n / per_node, .rings = 1};
    if (kind == MOE_ALLTOALL) return alltoall_s(t, n, per_node, bytes);
    if (n < 2 || !bytes) return 0;
    double all = (double)bytes * (kind == MOE_ALLREDUCE ? 1 : n);
    struct moe_nccl_case c = {kind, n, (int64_t)all, type_bytes, is_float};
    if (has_nccl(t, s.nodes, n)) return moe_nccl_s(&t->nccl, &c);
    struct steps steps = steps_of(t, &c, &s);
    if (s.nodes > 1) s.rings = (int)(per_node < t->nics_per_node ? per_node : t->nics_per_node);
    double sent = steps.wire * passes(kind) * all * (n - 1) / n;
    double far_s = s.nodes > 1 ? sent / s.rings / t->nic_Bps : 0;
    /* Of a node's rings all but one cross any link in it, where the GPU is not the last of its node. */
    double near = s.nodes > 1 && s.rings == per_node ? (double)(per_node - 1) / per_node : 1;
    return steps.latency_s + fmax(per_node > 1 ? near * sent / t->intra_Bps : 0, far_s);
}
