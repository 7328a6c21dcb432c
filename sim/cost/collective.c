/* collective.c - see collective.h. */
#include "sim/cost/collective_nodes.h"

#include <math.h>

static int node_of(const struct moe_topo *t, int rank)
{
    return rank / (int)t->gpus_per_node;
}

static bool on_one_node(const struct moe_topo *t, const struct moe_moved *m)
{
    bool one = true;
    for (int i = 1; i < m->n; i++) one &= node_of(t, m->rank[i]) == node_of(t, m->rank[0]);
    return one;
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

static bool has_nccl(const struct moe_topo *t, bool one_node, int n)
{
    return t->nccl.release && one_node && n > 1;
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

/* ---- one node ---- */

/* What a member sends in all; through switches all of its own, for the sum, and its part of it for all. */
static int64_t sent_by(const struct moe_moved *m, bool switches, int64_t all, int next, int member)
{
    double n = m->n;
    if (switches) return llround((double)all * (n + 1) / n);
    if (m->kind == MOE_ALLREDUCE) return llround(2 * (n - 1) / n * (double)all);
    return all - m->bytes[m->kind == MOE_ALLGATHER ? next : member];
}

/* By NCCL's channels. */
static void channels(const struct moe_topo *t, const struct moe_moved *m, int64_t all, struct moe_plan *out)
{
    struct moe_nccl_case c = case_of(m, all);
    struct moe_nccl_ring ring = moe_nccl_ring(&t->nccl, &c);
    bool switches = ring.algorithm == MOE_ALGORITHM_NVLS;
    double faster = switches ? (m->n + 1.0) / m->n : 1; /* rates are those of the member's own */
    for (int i = 0; i < m->n; i++) {
        int next = (i + 1) % m->n, after = -1;
        int64_t left = sent_by(m, switches, all, next, i);
        for (int p = 0; p < ring.n_parts; p++) {
            const struct moe_nccl_part *part = &ring.part[p];
            int64_t bytes = p == ring.n_parts - 1 ? left : llround((double)left * ring.share[p]);
            left -= bytes;
            after =
                moe_plan_add(out, (struct moe_sent){m->rank[i], m->rank[next], bytes, part->rate_Bps * faster,
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
    if (has_nccl(t, on_one_node(t, m), m->n))
        channels(t, m, all, out);
    else
        moe_nodes_plan(t, m, all, out);
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
    if (!on_one_node(t, m)) return t->inter_error;
    if (!has_nccl(t, true, m->n)) return t->intra_error;
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
    int per_node = n < t->gpus_per_node ? n : (int)t->gpus_per_node, nodes = n / per_node;
    if (kind == MOE_ALLTOALL) return alltoall_s(t, n, per_node, bytes);
    if (n < 2 || !bytes) return 0;
    struct moe_nccl_case c = {kind, n, bytes * (kind == MOE_ALLREDUCE ? 1 : n), type_bytes, is_float};
    return has_nccl(t, nodes == 1, n) ? moe_nccl_s(&t->nccl, &c) : moe_nodes_s(t, &c, nodes, per_node);
}
