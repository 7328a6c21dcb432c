/* simulate_cost.c - see simulate_cost.h. */
#include "sim/simulate_cost.h"

#include <math.h>
#include <stdlib.h>

/* Relays a size; one that is not known yet becomes an error. */
static int64_t known(const struct moe_asked *asked, int rank, int64_t size)
{
    if (size >= 0) return size;
    char label[2 * MOE_NAME];
    moe_op_label(asked->block, asked->op, asked->layer, label);
    return moe_fail(MOE_EVERDICT, "%s: rank %d starts it before its size is known (run check)", label, rank);
}

static int64_t size_of(const struct moe_asked *asked, int expr, int rank, int index)
{
    return known(asked, rank, moe_eval(asked->s, asked->env, expr, rank, asked->layer, index));
}

/* ---- kernels ---- */

static double matmul_flops(const struct moe_topo *t, enum moe_type type)
{
    return type == MOE_F64 ? t->matmul_float64_flops : t->matmul_float32_flops;
}

/* Seconds of `flops` at `rate` and of `bytes`: a core does one after the other. */
static double work_s(const struct moe_topo *t, double flops, double rate, double bytes)
{
    double arithmetic_s = flops / rate, memory_s = bytes / t->memory_Bps;
    return t->cores ? t->call_s + arithmetic_s + memory_s : fmax(arithmetic_s, memory_s);
}

/* Seconds of an [m, k] x [k, n] product. */
static double product_s(const struct moe_topo *t, enum moe_type type, double m, double n, double k)
{
    return work_s(t, 2 * m * n * k, matmul_flops(t, type), moe_type_bytes[type] * (m * k + k * n + m * n));
}

static int products_s(const struct moe_asked *asked, const struct moe_topo *t, double *total_s)
{
    const struct moe_op *op = asked->op;
    bool grouped = moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    int groups = grouped ? moe_symbol_count(asked->s, op->group, asked->rank) : 1;
    int64_t n = size_of(asked, op->dims[1], asked->rank, 0), k = size_of(asked, op->dims[2], asked->rank, 0);
    *total_s = 0;
    for (int g = 0; g < groups; g++) {
        int64_t m = grouped ? known(asked, asked->rank,
                                    asked->env.value(asked->env.ctx, op->group, asked->rank, asked->layer, g))
                            : size_of(asked, op->dims[0], asked->rank, 0);
        if (m < 0 || n < 0 || k < 0) return MOE_EVERDICT;
        if (m == 0 && op->kernel == MOE_K_GROUPED_GEMM) continue; /* an empty expert is not even called */
        *total_s += product_s(t, op->type, (double)m, (double)n, (double)k);
    }
    return MOE_OK;
}

int moe_kernel_time(const struct moe_asked *asked, const struct moe_topo *t, moe_ps *out)
{
    double time_s;
    if (moe_kernel_cost[asked->op->kernel] == MOE_COST_MEMORY) {
        int64_t bytes = size_of(asked, asked->op->bytes, asked->rank, 0);
        int64_t flops = size_of(asked, asked->op->flops, asked->rank, 0);
        if (bytes < 0 || flops < 0) return MOE_EVERDICT;
        double rate = t->cores ? t->scalar_flops : matmul_flops(t, asked->op->type);
        time_s = work_s(t, (double)flops, rate, (double)bytes);
    } else {
        MOE_TRY(products_s(asked, t, &time_s));
    }
    *out = moe_time(time_s, 1);
    return MOE_OK;
}

/* ---- collectives ---- */

struct meeting {
    const struct moe_asked *first;
    const struct moe_topo *topo;
    const struct moe_op *const *ops; /* [n] */
    const int *rank;                 /* [n] */
    int n;
};

/* What members `from` and `to` both say the first has for the second, in bytes; or an error. */
static int64_t agreed_bytes(const struct meeting *m, int from, int to)
{
    const struct moe_asked *first = m->first;
    enum moe_collective kind = first->op->collective;
    int a = m->rank[from], b = m->rank[to];
    int64_t sent = size_of(first, m->ops[from]->send, a, moe_send_per_peer[kind] ? to : 0);
    if (sent < 0) return sent;
    int64_t received = size_of(first, m->ops[to]->recv, b, moe_recv_per_peer[kind] ? from : 0);
    if (received < 0) return received;
    if (sent == received) return sent * moe_type_bytes[first->op->type];
    char label[2 * MOE_NAME];
    moe_op_label(first->block, first->op, first->layer, label);
    return moe_fail(MOE_EVERDICT, "%s: rank %d sends %lld elements, rank %d expects %lld (run check)", label,
                    a, (long long)sent, b, (long long)received);
}

/* From one member to another, behind `hops` latencies of the way. */
static void add_flow(const struct meeting *m, struct moe_plan *out, int from, int to, int64_t bytes, int hops)
{
    if (!bytes) return;
    int a = m->rank[from], b = m->rank[to];
    out->flow = moe_grow(out->flow, &out->cap, out->n + 1, sizeof *out->flow);
    out->flow[out->n++] = (struct moe_sent){
        .from = a, .to = b, .bytes = bytes, .delay_s = hops * moe_topo_latency_s(m->topo, a, b), .after = -1};
}

static int alltoall(const struct meeting *m, struct moe_plan *out)
{
    for (int from = 0; from < m->n; from++)
        for (int to = 0; to < m->n; to++) {
            int64_t bytes = agreed_bytes(m, from, to);
            if (bytes < 0) return (int)bytes;
            add_flow(m, out, from, to, bytes, 1);
        }
    return MOE_OK;
}

/* All blocks but one go from each member to the next: that of the next, or the member's own. */
static int ring(const struct meeting *m, struct moe_plan *out, bool scatters)
{
    int64_t *block = moe_alloc((size_t)m->n, sizeof *block), total = 0, bytes = 0;
    for (int i = 0; i < m->n && bytes >= 0; i++) {
        for (int other = 0; other < m->n && bytes >= 0; other++)
            bytes = scatters ? agreed_bytes(m, other, i) : agreed_bytes(m, i, other);
        total += block[i] = bytes;
    }
    for (int i = 0; i < m->n && bytes >= 0; i++) {
        int next = (i + 1) % m->n;
        add_flow(m, out, i, next, total - block[scatters ? i : next], m->n - 1);
    }
    free(block);
    return bytes < 0 ? (int)bytes : MOE_OK;
}

static int allgather(const struct meeting *m, struct moe_plan *out)
{
    return ring(m, out, false);
}

static int reducescatter(const struct meeting *m, struct moe_plan *out)
{
    return ring(m, out, true);
}

static int allreduce(const struct meeting *m, struct moe_plan *out)
{
    for (int from = 0; from < m->n; from++) {
        int to = (from + 1) % m->n;
        int64_t bytes = agreed_bytes(m, from, to);
        if (bytes < 0) return (int)bytes;
        add_flow(m, out, from, to, llround(2.0 * (m->n - 1) / m->n * (double)bytes), 2 * (m->n - 1));
    }
    return MOE_OK;
}

static const struct {
    int (*plan)(const struct meeting *m, struct moe_plan *out);
    bool together;
} collectives[MOE_COLLECTIVE_COUNT] = {
    [MOE_ALLTOALL] = {alltoall, false},
    [MOE_ALLREDUCE] = {allreduce, true},
    [MOE_ALLGATHER] = {allgather, true},
    [MOE_REDUCESCATTER] = {reducescatter, true},
};

int moe_collective_plan(const struct moe_asked *first, const struct moe_topo *t,
                        const struct moe_op *const *ops, struct moe_plan *out)
{
    const struct moe_comm *comm = &first->s->comms[first->op->comm];
    int group = comm->group_of[first->rank];
    struct meeting m = {.first = first,
                        .topo = t,
                        .ops = ops,
                        .rank = comm->members + comm->first[group],
                        .n = moe_group_size(comm, group)};
    out->n = 0;
    out->together = collectives[first->op->collective].together;
    return collectives[first->op->collective].plan(&m, out);
}
