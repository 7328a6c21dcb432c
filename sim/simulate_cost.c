/* simulate_cost.c - see simulate_cost.h. */
#include "sim/simulate_cost.h"

#include "sim/cost/transport.h"

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
    return type == MOE_F64    ? t->matmul_float64_flops
           : type == MOE_BF16 ? t->matmul_bfloat16_flops
                              : t->matmul_float32_flops;
}

/* Seconds of `flops` at `rate` and of `bytes`: a core does one after the other. */
static double work_s(const struct moe_topo *t, double flops, double rate, double bytes)
{
    double arithmetic_s = flops / rate, memory_s = bytes / t->memory_Bps;
    return t->cores ? t->call_s + arithmetic_s + memory_s : fmax(arithmetic_s, memory_s);
}

/* Does the topology know how products of this type are cut into tiles? */
static bool has_tiles(const struct moe_topo *t, enum moe_type type)
{
    return t->gpu.n_sms && type == MOE_BF16;
}

/* Seconds of an [m, k] x [k, n] product. */
static double product_s(const struct moe_topo *t, enum moe_type type, int64_t m, int64_t n, int64_t k)
{
    double M = (double)m, N = (double)n, K = (double)k;
    if (has_tiles(t, type) && m && n && k)
        return moe_gemm_s(&t->gpu, &t->gemm, m, n, k, moe_type_bytes[type]);
    return work_s(t, 2 * M * N * K, matmul_flops(t, type), moe_type_bytes[type] * (M * K + K * N + M * N));
}

/* Products of a group: rows [groups] are known. */
static double group_s(const struct moe_asked *asked, const struct moe_topo *t, int groups,
                      const int64_t *rows, int64_t n, int64_t k)
{
    const struct moe_op *op = asked->op;
    double total_s = 0;
    if (has_tiles(t, op->type) && t->experts.launch_s > 0 && op->kernel == MOE_K_GROUPED_GEMM)
        return t->gemm.launch_s +
               moe_grouped_s(&t->gpu, &t->experts, groups, rows, NULL, n, k, moe_type_bytes[op->type]);
    for (int g = 0; g < groups; g++)
        if (rows[g] || op->kernel != MOE_K_GROUPED_GEMM) /* an empty expert is not even called */
            total_s += product_s(t, op->type, rows[g], n, k);
    return total_s;
}

static int products_s(const struct moe_asked *asked, const struct moe_topo *t, double *total_s)
{
    const struct moe_op *op = asked->op;
    bool grouped = moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    int groups = grouped ? moe_symbol_count(asked->s, op->group, asked->rank) : 1;
    int64_t n = size_of(asked, op->dims[1], asked->rank, 0), k = size_of(asked, op->dims[2], asked->rank, 0);
    int64_t *rows = moe_alloc((size_t)groups, sizeof *rows);
    bool is_known = n >= 0 && k >= 0;
    for (int g = 0; g < groups && is_known; g++) {
        rows[g] = grouped ? known(asked, asked->rank,
                                  asked->env.value(asked->env.ctx, op->group, asked->rank, asked->layer, g))
                          : size_of(asked, op->dims[0], asked->rank, 0);
        is_known = rows[g] >= 0;
    }
    if (is_known && grouped) *total_s = group_s(asked, t, groups, rows, n, k);
    if (is_known && !grouped) *total_s = product_s(t, op->type, rows[0], n, k);
    free(rows);
    return is_known ? MOE_OK : MOE_EVERDICT;
}

int moe_kernel_time(const struct moe_asked *asked, const struct moe_topo *t, moe_ps *out)
{
    double time_s = 0;
    if (asked->op->type == MOE_BF16 && !t->matmul_bfloat16_flops)
        return moe_fail(MOE_EINPUT,
                        "topology %s: gpu has no matmul_bfloat16, which the scenario's dtype needs", t->name);
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

/* What the members of a meeting say that they move (collective.h), in bytes; or an error. */
static int moved_bytes(const struct meeting *m, enum moe_collective kind, int64_t *bytes)
{
    for (int i = 0; i < m->n; i++) {
        int next = (i + 1) % m->n;
        for (int j = 0; j < m->n; j++) {
            if (kind == MOE_ALLREDUCE && j != next) continue;
            int64_t agreed = kind == MOE_REDUCESCATTER ? agreed_bytes(m, j, i) : agreed_bytes(m, i, j);
            if (agreed < 0) return (int)agreed;
            bytes[kind == MOE_ALLTOALL ? i * m->n + j : kind == MOE_ALLREDUCE ? 0 : i] = agreed;
        }
    }
    return MOE_OK;
}

int moe_asked_plan(const struct moe_asked *first, const struct moe_topo *t, const struct moe_op *const *ops,
                   struct moe_plan *out, double *error)
{
    const struct moe_comm *comm = &first->s->comms[first->op->comm];
    enum moe_collective kind = first->op->collective;
    enum moe_type type = first->op->type;
    int group = comm->group_of[first->rank], n = moe_group_size(comm, group);
    struct meeting m = {.first = first, .ops = ops, .rank = comm->members + comm->first[group], .n = n};
    int64_t *bytes = moe_alloc((size_t)n * (size_t)(kind == MOE_ALLTOALL ? n : 1), sizeof *bytes);
    int err = moved_bytes(&m, kind, bytes);
    struct moe_moved moved = {
        kind, n, m.rank, bytes, moe_type_bytes[type], type != MOE_I32 && type != MOE_I64};
    out->n = 0;
    if (err >= 0)
        err = moe_transport_plan(t, first->op->transport, &moved, first->s, first->values, first->layer, out,
                                 error);
    free(bytes);
    return err;
}
