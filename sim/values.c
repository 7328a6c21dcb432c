/* values.c - see values.h.
 *
 * A cell is the content of one int64 buffer in one slot on one rank; without content (NULL) it was never
 * written, or from something unknown. In-place collectives are right because all outputs are built before the
 * first is stored. */
#include "sim/values.h"

#include <stdlib.h>
#include <string.h>

struct cell {
    int64_t *content;
    int n, cap;
    bool host_knows;
};

/* What tokens have for the members of groups of P. */
struct peers {
    int P;
    bool *is_known;  /* [L, R] */
    int32_t *tokens; /* [L, R, P] */
};

struct moe_values {
    const struct moe_schedule *s; /* borrowed */
    const struct moe_routing *r;  /* borrowed */
    struct cell *cells;
    size_t n_cells;
    size_t *first; /* [n_buffers] the buffer's first cell: then slot by slot, rank by rank */
    int n_peers, cap_peers;
    struct peers *peers; /* [n_peers] of each P that was asked for */
};

struct moe_values *moe_values_new(const struct moe_schedule *s, const struct moe_routing *r)
{
    struct moe_values *v = moe_alloc(1, sizeof *v);
    v->s = s;
    v->r = r;
    v->first = moe_alloc((size_t)s->n_buffers, sizeof *v->first);
    for (int b = 0; b < s->n_buffers; b++) {
        v->first[b] = v->n_cells;
        if (s->buffers[b].type == MOE_I64) v->n_cells += (size_t)s->buffers[b].slots * (size_t)s->n_ranks;
    }
    v->cells = moe_alloc(v->n_cells, sizeof *v->cells);
    return v;
}

void moe_values_free(struct moe_values *v)
{
    if (!v) return;
    for (size_t i = 0; i < v->n_cells; i++) free(v->cells[i].content);
    for (int i = 0; i < v->n_peers; i++) {
        free(v->peers[i].is_known);
        free(v->peers[i].tokens);
    }
    free(v->peers);
    free(v->cells);
    free(v->first);
    free(v);
}

/* NULL when the buffer does not hold int64. */
static struct cell *cell_of(const struct moe_values *v, struct moe_ref ref, int rank, int layer)
{
    if (v->s->buffers[ref.buffer].type != MOE_I64) return NULL;
    size_t slot = (size_t)moe_slot(v->s, ref, layer);
    return &v->cells[v->first[ref.buffer] + slot * (size_t)v->s->n_ranks + (size_t)rank];
}

/* Replaces the content; the host knows nothing of the new one. */
static void store_cell(struct cell *cell, struct cell with)
{
    if (!cell) {
        free(with.content);
        return;
    }
    free(cell->content);
    *cell = with;
}

/* Appends n elements of from->content, from `offset` on. Result: false when they are not there. */
static bool append(struct cell *to, const struct cell *from, int64_t offset, int64_t n)
{
    if (!from || !from->content || n < 0 || n > from->n - offset) return false;
    int need = to->n + (int)n;
    to->content = moe_grow(to->content, &to->cap, need ? need : 1, sizeof *to->content);
    memcpy(to->content + to->n, from->content + offset, (size_t)n * sizeof *to->content);
    to->n = need;
    return true;
}

static struct cell routed_counts(const struct moe_values *v, int rank, int layer)
{
    layer = moe_routed_layer(v->s, layer);
    moe_assert(v->r && layer < v->r->n_layers && rank < v->r->n_ranks);
    const int32_t *counts = moe_routing_counts(v->r, layer, rank);
    struct cell with = {.n = v->r->n_experts, .cap = v->r->n_experts};
    with.content = moe_alloc((size_t)with.n, sizeof *with.content);
    for (int e = 0; e < with.n; e++) with.content[e] = counts[e];
    return with;
}

static struct peers *peers_of(struct moe_values *v, int P)
{
    size_t n = (size_t)v->r->n_layers * (size_t)v->r->n_ranks;
    for (int i = 0; i < v->n_peers; i++)
        if (v->peers[i].P == P) return &v->peers[i];
    v->peers = moe_grow(v->peers, &v->cap_peers, v->n_peers + 1, sizeof *v->peers);
    v->peers[v->n_peers] =
        (struct peers){P, moe_alloc(n, sizeof(bool)), moe_alloc(n * (size_t)P, sizeof(int32_t))};
    return &v->peers[v->n_peers++];
}

const int32_t *moe_values_peers(struct moe_values *v, int rank, int layer, int P)
{
    if (!v->r || v->r->n_experts % P || v->r->n_ranks % P) return NULL;
    layer = moe_routed_layer(v->s, layer);
    moe_assert(layer < v->r->n_layers && rank < v->r->n_ranks);
    struct peers *peers = peers_of(v, P);
    size_t at = (size_t)layer * (size_t)v->r->n_ranks + (size_t)rank;
    int32_t *tokens = peers->tokens + at * (size_t)P;
    if (!peers->is_known[at]) moe_routing_peers(v->r, layer, rank, P, tokens);
    peers->is_known[at] = true;
    return tokens;
}

/* What SPREAD counts: all choices leave, so what the routing says. */
static struct cell routed_peers(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    int P = (int)moe_eval(v->s, moe_values_device(v), op->dims[3], rank, layer, 0);
    const int32_t *peers = moe_values_peers(v, rank, layer, P);
    moe_assert(peers);
    struct cell with = {.n = P, .cap = P};
    with.content = moe_alloc((size_t)P, sizeof *with.content);
    for (int p = 0; p < P; p++) with.content[p] = peers[p];
    return with;
}

/* Rows of one expert that LIMIT lets leave a rank. When several groups of tokens have a capacity of their
 * own, counts cannot say how the rows spread over them: an upper bound. */
static int64_t limit_of(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    struct moe_env env = moe_values_device(v);
    int64_t T = moe_eval(v->s, env, op->dims[0], rank, layer, 0),
            C = moe_eval(v->s, env, op->dims[3], rank, layer, 0);
    int64_t G = moe_eval(v->s, env, op->dims[4], rank, layer, 0);
    if (C == MOE_UNKNOWN) return C;
    return T > G && G > 0 ? C * ((T + G - 1) / G) : C;
}

/* What LIMIT keeps of each expert: at most the limit, or exactly that when padded. */
static struct cell limited_counts(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    const struct cell *counts = cell_of(v, op->reads[2], rank, layer);
    struct cell with = {0};
    if (!counts || !append(&with, counts, 0, counts->n)) return with;
    int64_t most = limit_of(v, op, rank, layer);
    if (most == MOE_UNKNOWN) {
        free(with.content);
        return (struct cell){0};
    }
    for (int e = 0; e < with.n; e++)
        if (op->mode & MOE_LIMIT_PAD || with.content[e] > most) with.content[e] = most;
    return with;
}

/* One number: the largest of what LARGEST reads, or what SET is told. */
static struct cell one_number(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    struct cell with = {.n = 1, .cap = 1}, *counts = NULL;
    int64_t value = op->kernel == MOE_K_SET
                        ? moe_eval(v->s, moe_values_device(v), op->dims[0], rank, layer, 0)
                        : MOE_UNKNOWN;
    if (op->kernel == MOE_K_LARGEST) counts = cell_of(v, op->reads[0], rank, layer);
    for (int e = 0; counts && counts->content && e < counts->n; e++)
        if (counts->content[e] > value) value = counts->content[e];
    if (value == MOE_UNKNOWN) return (struct cell){0};
    with.content = moe_alloc(1, sizeof *with.content);
    *with.content = value;
    return with;
}

void moe_values_kernel(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    for (int i = 0; i < op->n_writes; i++) {
        struct cell *cell = cell_of(v, op->writes[i], rank, layer);
        if (!cell) continue;
        if (v->s->buffers[op->writes[i].buffer].role == MOE_BUF_COUNTS)
            store_cell(cell, routed_counts(v, rank, layer));
        else if (op->kernel == MOE_K_LIMIT)
            store_cell(cell, limited_counts(v, op, rank, layer));
        else if (op->kernel == MOE_K_LARGEST || op->kernel == MOE_K_SET)
            store_cell(cell, one_number(v, op, rank, layer));
        else if (op->kernel == MOE_K_SPREAD)
            store_cell(cell, routed_peers(v, op, rank, layer));
        else
            store_cell(cell, (struct cell){0});
    }
}

/* All build what the members receive in out [n] and return false when a part of it is unknown: then so is
 * the whole, since every member receives from every other. Sizes are those of the senders. */
static bool alltoall(struct moe_values *v, const struct moe_op *const *ops, const int *members, int n,
                     int layer, struct cell *out)
{
    for (int i = 0; i < n; i++) {
        const struct cell *from = cell_of(v, ops[i]->reads[0], members[i], layer);
        int64_t offset = 0;
        for (int peer = 0; peer < n; peer++) {
            int64_t count = moe_eval(v->s, moe_values_device(v), ops[i]->send, members[i], layer, peer);
            if (!append(&out[peer], from, offset, count)) return false;
            offset += count;
        }
    }
    return true;
}

static bool allreduce(struct moe_values *v, const struct moe_op *const *ops, const int *members, int n,
                      int layer, struct cell *out)
{
    for (int i = 0; i < n; i++) {
        const struct cell *from = cell_of(v, ops[i]->reads[0], members[i], layer);
        int64_t count = moe_eval(v->s, moe_values_device(v), ops[i]->send, members[i], layer, 0);
        if (i > 0 && (count != out[0].n || !from || !from->content || count > from->n)) return false;
        if (i == 0 && !append(&out[0], from, 0, count)) return false;
        for (int64_t e = 0; i > 0 && e < count; e++) {
            int64_t *to = &out[0].content[e], with = from->content[e];
            *to = ops[0]->reduction == MOE_REDUCE_SUM ? *to + with : *to > with ? *to : with;
        }
    }
    for (int i = 1; i < n; i++) append(&out[i], &out[0], 0, out[0].n);
    return true;
}

static bool allgather(struct moe_values *v, const struct moe_op *const *ops, const int *members, int n,
                      int layer, struct cell *out)
{
    for (int i = 0; i < n; i++) {
        const struct cell *from = cell_of(v, ops[i]->reads[0], members[i], layer);
        int64_t count = moe_eval(v->s, moe_values_device(v), ops[i]->send, members[i], layer, 0);
        for (int to = 0; to < n; to++)
            if (!append(&out[to], from, 0, count)) return false;
    }
    return true;
}

static bool (*const movers[MOE_COLLECTIVE_COUNT])(struct moe_values *v, const struct moe_op *const *ops,
                                                  const int *members, int n, int layer, struct cell *out) = {
    [MOE_ALLTOALL] = alltoall, [MOE_ALLREDUCE] = allreduce, [MOE_ALLGATHER] = allgather};

void moe_values_collective(struct moe_values *v, const struct moe_op *const *ops, int comm, int group,
                           int layer)
{
    if (ops[0]->type != MOE_I64) return;
    const struct moe_comm *c = &v->s->comms[comm];
    const int *members = c->members + c->first[group];
    int n = moe_group_size(c, group);
    struct cell *out = moe_alloc((size_t)n, sizeof *out);
    bool (*mover)(struct moe_values *, const struct moe_op *const *, const int *, int, int, struct cell *) =
        movers[ops[0]->collective];
    bool known = mover && mover(v, ops, members, n, layer, out);
    for (int i = 0; i < n; i++) {
        if (!known) {
            free(out[i].content);
            out[i] = (struct cell){0};
        }
        store_cell(cell_of(v, ops[i]->writes[0], members[i], layer), out[i]);
    }
    free(out);
}

void moe_values_host_sync(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    for (int i = 0; i < op->n_reads; i++) {
        struct cell *cell = cell_of(v, op->reads[i], rank, layer);
        if (cell) cell->host_knows = true; /* without content there is still nothing to know */
    }
}

static int64_t host_value(void *ctx, int symbol, int rank, int layer, int index);
static int64_t device_value(void *ctx, int symbol, int rank, int layer, int index);

static int64_t value_of(struct moe_values *v, bool host, int symbol, int rank, int layer, int index)
{
    const struct moe_symbol *y = &v->s->symbols[symbol];
    struct moe_env env = {.value = host ? host_value : device_value, .ctx = v};
    if (y->buffer < 0) return moe_symbol_initial(v->s, env, symbol, rank, layer, index);
    int each = moe_slots_each(v->s, y->buffer), in_micro = layer % (v->s->n_layers + 1);
    if (each > 1 && in_micro >= each) return MOE_UNKNOWN; /* outside of the layers */
    const struct cell *cell = cell_of(v, (struct moe_ref){.buffer = y->buffer}, rank, layer);
    if (!cell || !cell->content || cell->n < y->rows * y->cols || (host && !cell->host_knows))
        return MOE_UNKNOWN;
    return moe_symbol_reduce(v->s, symbol, rank, cell->content, index);
}

int64_t moe_values_total(const struct moe_values *v, struct moe_ref ref, int rank, int layer)
{
    const struct cell *cell = cell_of(v, ref, rank, layer);
    if (!cell || !cell->content) return MOE_UNKNOWN;
    int64_t sum = 0;
    for (int i = 0; i < cell->n; i++) sum += cell->content[i];
    return sum;
}

static int64_t host_value(void *ctx, int symbol, int rank, int layer, int index)
{
    return value_of(ctx, true, symbol, rank, layer, index);
}

static int64_t device_value(void *ctx, int symbol, int rank, int layer, int index)
{
    return value_of(ctx, false, symbol, rank, layer, index);
}

struct moe_env moe_values_host(struct moe_values *v)
{
    return (struct moe_env){.value = host_value, .ctx = v};
}

struct moe_env moe_values_device(struct moe_values *v)
{
    return (struct moe_env){.value = device_value, .ctx = v};
}

static void add_kept(struct moe_values *v, const struct moe_op *op, int rank, int layer,
                     struct moe_kept *kept)
{
    const int32_t *counts = moe_routing_counts(v->r, moe_routed_layer(v->s, layer), rank);
    int64_t most = limit_of(v, op, rank, layer);
    moe_assert(most != MOE_UNKNOWN);
    for (int e = 0; e < v->r->n_experts; e++) {
        if (counts[e] > most) kept->dropped += counts[e] - most;
        if (counts[e] < most && op->mode & MOE_LIMIT_PAD) kept->padded += most - counts[e];
    }
}

/* All ranks of a role run an operation that moves or makes counts, which only they do together. */
static void run_op(struct moe_values *v, const struct moe_op *op, int role, int layer)
{
    for (int rank = 0; rank < v->s->n_ranks && op->kind == MOE_KERNEL; rank++)
        if (v->s->role_of[rank] == role) moe_values_kernel(v, op, rank, layer);
    if (op->kind != MOE_COLLECTIVE || op->type != MOE_I64) return;
    const struct moe_comm *c = &v->s->comms[op->comm];
    const struct moe_op **ops = moe_alloc((size_t)v->s->n_ranks, sizeof *ops);
    for (int rank = 0; rank < v->s->n_ranks; rank++) ops[rank] = op;
    for (int g = 0; g < c->n_groups; g++)
        if (v->s->role_of[c->members[c->first[g]]] == role) moe_values_collective(v, ops, op->comm, g, layer);
    free(ops);
}

static bool limits(const struct moe_op *op)
{
    return op->kind == MOE_KERNEL && op->kernel == MOE_K_LIMIT;
}

static void add_role(struct moe_values *v, int role_id, struct moe_kept *kept)
{
    const struct moe_schedule *s = v->s;
    const struct moe_role *role = &s->roles[role_id];
    int64_t layers = (int64_t)(role->end_layer - role->first_layer) * s->n_micro;
    for (int rank = 0; rank < s->n_ranks; rank++)
        if (s->role_of[rank] == role_id) kept->chosen += s->tokens[rank] * s->top_k * layers;
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        int n = block->n_ops, layer = role->itinerary[i].layer;
        while (n > 0 && !limits(&block->ops[n - 1])) n--; /* what comes later moves what is kept */
        for (int o = 0; o < n; o++) {
            for (int rank = 0; rank < s->n_ranks && limits(&block->ops[o]); rank++)
                if (s->role_of[rank] == role_id) add_kept(v, &block->ops[o], rank, layer, kept);
            run_op(v, &block->ops[o], role_id, layer);
        }
    }
}

struct moe_kept moe_values_kept(const struct moe_schedule *s, const struct moe_routing *r)
{
    struct moe_values *v = moe_values_new(s, r);
    struct moe_kept kept = {0};
    for (int role = 0; role < s->n_roles; role++) add_role(v, role, &kept);
    moe_values_free(v);
    return kept;
}
