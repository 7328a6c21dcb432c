/* values_kept.c - what capacity rules make of a routing: moe_values_kept of values.h. */
#include "sim/values.h"

#include <stdlib.h>

struct counting {
    const struct moe_schedule *s;
    const struct moe_routing *r;
    struct moe_values *v;
    struct moe_kept kept;
};

/* n from 0 on; what is above 63 bits stays the largest number. */
static void add_rows(int64_t *sum, int64_t n)
{
    if (__builtin_add_overflow(*sum, n, sum)) *sum = INT64_MAX;
}

static void add_kept(struct counting *k, const struct moe_op *op, int rank, int layer)
{
    const int32_t *counts = moe_routing_counts(k->r, moe_routed_layer(k->s, layer), rank);
    int64_t most = moe_values_limit(k->v, op, rank, layer);
    moe_assert(most != MOE_UNKNOWN);
    for (int e = 0; e < k->r->n_experts; e++) {
        if (counts[e] > most) add_rows(&k->kept.dropped, counts[e] - most);
        if (counts[e] < most && op->mode & MOE_LIMIT_PAD) add_rows(&k->kept.padded, most - counts[e]);
    }
}

/* All ranks of a role run an operation that moves or makes counts, which only they do together. */
static void run_op(const struct counting *k, const struct moe_op *op, int role, int layer)
{
    const struct moe_schedule *s = k->s;
    for (int rank = 0; rank < s->n_ranks && op->kind == MOE_KERNEL; rank++)
        if (s->role_of[rank] == role) moe_values_kernel(k->v, op, rank, layer);
    if (op->kind != MOE_COLLECTIVE || op->type != MOE_I64) return;
    const struct moe_comm *c = &s->comms[op->comm];
    const struct moe_op **ops = moe_alloc((size_t)s->n_ranks, sizeof *ops);
    for (int rank = 0; rank < s->n_ranks; rank++) ops[rank] = op;
    for (int g = 0; g < c->n_groups; g++)
        if (s->role_of[c->members[c->first[g]]] == role) moe_values_collective(k->v, ops, op->comm, g, layer);
    free(ops);
}

static bool limits(const struct moe_op *op)
{
    return op->kind == MOE_KERNEL && op->kernel == MOE_K_LIMIT;
}

static void add_role(struct counting *k, int role_id)
{
    const struct moe_schedule *s = k->s;
    const struct moe_role *role = &s->roles[role_id];
    int64_t layers =
        (int64_t)(role->end_layer - role->first_layer) * (role->n_micro ? role->n_micro : s->n_micro);
    for (int rank = 0; rank < s->n_ranks; rank++)
        if (s->role_of[rank] == role_id) k->kept.chosen += s->tokens[rank] * s->top_k * layers;
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        int n = block->n_ops, layer = role->itinerary[i].layer;
        while (n > 0 && !limits(&block->ops[n - 1])) n--; /* what comes later moves what is kept */
        for (int o = 0; o < n; o++) {
            for (int rank = 0; rank < s->n_ranks && limits(&block->ops[o]); rank++)
                if (s->role_of[rank] == role_id) add_kept(k, &block->ops[o], rank, layer);
            run_op(k, &block->ops[o], role_id, layer);
        }
    }
}

struct moe_kept moe_values_kept(const struct moe_schedule *s, const struct moe_routing *r)
{
    struct counting k = {.s = s, .r = r, .v = moe_values_new(s, r)};
    for (int role = 0; role < s->n_roles; role++) add_role(&k, role);
    moe_values_free(k.v);
    return k.kept;
}
