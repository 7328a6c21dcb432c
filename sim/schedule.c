/* schedule.c - see schedule.h. */
#include "sim/schedule.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text, bytes) text,
const char *const moe_type_text[] = {MOE_TYPES(X)};
#undef X
#define X(name, text, bytes) bytes,
const int moe_type_bytes[] = {MOE_TYPES(X)};
#undef X
#define X(name, text, cost) text,
const char *const moe_kernel_text[] = {MOE_KERNELS(X)};
#undef X
#define X(name, text, cost) MOE_COST_##cost,
const enum moe_cost moe_kernel_cost[] = {MOE_KERNELS(X)};
#undef X
#define X(name, text, send_per_peer, recv_per_peer, reduces) text,
const char *const moe_collective_text[] = {MOE_COLLECTIVES(X)};
#undef X
#define X(name, text, send_per_peer, recv_per_peer, reduces) send_per_peer,
const bool moe_send_per_peer[] = {MOE_COLLECTIVES(X)};
#undef X
#define X(name, text, send_per_peer, recv_per_peer, reduces) recv_per_peer,
const bool moe_recv_per_peer[] = {MOE_COLLECTIVES(X)};
#undef X
#define X(name, text, send_per_peer, recv_per_peer, reduces) reduces,
const bool moe_reduces[] = {MOE_COLLECTIVES(X)};
#undef X
#define X(name, text) text,
const char *const moe_op_kind_text[] = {MOE_OP_KINDS(X)};
const char *const moe_pass_text[] = {MOE_PASSES(X)};
#undef X

static void free_role(struct moe_role *role)
{
    for (int b = 0; b < role->n_blocks; b++) free(role->blocks[b].ops);
    free(role->blocks);
    free(role->itinerary);
}

void moe_schedule_free(struct moe_schedule *s)
{
    if (!s) return;
    for (int i = 0; i < s->n_roles; i++) free_role(&s->roles[i]);
    for (int c = 0; c < s->n_comms; c++) {
        free(s->comms[c].group_of);
        free(s->comms[c].index_of);
        free(s->comms[c].first);
        free(s->comms[c].members);
    }
    free(s->roles);
    free(s->comms);
    free(s->symbols);
    free(s->exprs);
    free(s->buffers);
    free(s->params);
    free(s->tokens);
    free(s->role_of);
    free(s);
}

static void *copy_of(const void *items, size_t n, size_t size)
{
    void *p = moe_alloc(n, size);
    if (n) memcpy(p, items, n * size);
    return p;
}

struct moe_role *moe_schedule_split_role(struct moe_schedule *s, int rank)
{
    struct moe_role *roles = moe_alloc((size_t)s->n_roles + 1, sizeof *roles);
    memcpy(roles, s->roles, (size_t)s->n_roles * sizeof *roles);
    free(s->roles);
    s->roles = roles;
    const struct moe_role *from = &roles[s->role_of[rank]];
    struct moe_role *to = &roles[s->n_roles];
    *to = *from;
    to->blocks = copy_of(from->blocks, (size_t)from->n_blocks, sizeof *from->blocks);
    to->itinerary = copy_of(from->itinerary, (size_t)from->n_instances, sizeof *from->itinerary);
    for (int b = 0; b < to->n_blocks; b++) {
        struct moe_block *block = &to->blocks[b];
        block->ops = copy_of(block->ops, (size_t)block->n_ops, sizeof *block->ops);
        block->cap = block->n_ops;
    }
    s->role_of[rank] = s->n_roles++;
    return to;
}

void moe_block_delete(struct moe_block *b, int id)
{
    for (int i = 0; i < b->n_ops; i++) {
        if (b->ops[i].id != id) continue;
        memmove(&b->ops[i], &b->ops[i + 1], (size_t)(b->n_ops - i - 1) * sizeof *b->ops);
        b->n_ops--;
        return;
    }
    moe_assert(!"no operation with this id");
}

int moe_symbol_count(const struct moe_schedule *s, int symbol, int rank)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    if (y->buffer >= 0) {
        const struct moe_comm *slice = !y->slice ? NULL : &s->comms[y->slice];
        return y->by_row ? y->rows : slice ? y->cols / moe_group_size(slice, slice->group_of[rank]) : y->cols;
    }
    if (y->scope == MOE_SCOPE_PEER)
        return moe_group_size(&s->comms[y->comm], s->comms[y->comm].group_of[rank]);
    return y->scope == MOE_SCOPE_EXPERT ? y->cols : 1;
}

int64_t moe_symbol_reduce(const struct moe_schedule *s, int symbol, int rank, const int64_t *content,
                          int index)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    int64_t sum = 0;
    if (y->slice) index += s->comms[y->slice].index_of[rank] * moe_symbol_count(s, symbol, rank);
    if (y->by_row)
        for (int c = 0; c < y->cols; c++) sum += content[(size_t)index * (size_t)y->cols + (size_t)c];
    else
        for (int r = 0; r < y->rows; r++) sum += content[(size_t)r * (size_t)y->cols + (size_t)index];
    return sum;
}

int64_t moe_symbol_initial(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int index)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    if (y->expr) return moe_eval(s, env, y->expr, rank, 0, index);
    if (y->scope == MOE_SCOPE_RANK) return s->tokens[rank];
    if (y->scope == MOE_SCOPE_PEER) {
        const struct moe_comm *c = &s->comms[y->comm];
        return s->tokens[c->members[c->first[c->group_of[rank]] + index]];
    }
    int64_t sum = 0;
    for (int r = 0; r < s->n_ranks; r++) sum += s->tokens[r];
    return sum;
}

/* In double, as the framework computes it (founding_cases.md A.0b: 100 x 1.1 gives 111 in double, 110 in
 * float). */
static int64_t ceil_of(int64_t a, int64_t b, double factor)
{
    double value = b ? ceil((double)a / (double)b * factor) : 0;
    return value < 9e18 ? (int64_t)value : MOE_UNKNOWN;
}

int64_t moe_eval(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer, int index)
{
    const struct moe_expr *e = &s->exprs[expr];
    int64_t a, b;
    switch (e->op) {
    case MOE_EXPR_CONST: return e->value;
    case MOE_EXPR_PLACE: return s->comms[e->a].index_of[rank];
    case MOE_EXPR_SYM: return env.value(env.ctx, e->a, rank, layer, index);
    case MOE_EXPR_SUM:
        for (a = 0, b = 0; b < moe_symbol_count(s, e->a, rank); b++) {
            int64_t value = env.value(env.ctx, e->a, rank, layer, (int)b);
            if (value == MOE_UNKNOWN) return value;
            a += value;
        }
        return a;
    default: break;
    }
    a = moe_eval(s, env, e->a, rank, layer, index);
    b = moe_eval(s, env, e->b, rank, layer, index);
    if (a == MOE_UNKNOWN || b == MOE_UNKNOWN) return MOE_UNKNOWN;
    switch (e->op) {
    case MOE_EXPR_ADD: return a + b;
    case MOE_EXPR_MUL: return a * b;
    case MOE_EXPR_MIN: return a < b ? a : b;
    default: return ceil_of(a, b, e->factor);
    }
}

void moe_op_label(const struct moe_block *b, const struct moe_op *op, int layer, char out[2 * MOE_NAME])
{
    if (b->per_layer)
        snprintf(out, 2 * MOE_NAME, "%.20s %d %s %s", b->name, layer, moe_pass_text[b->pass], op->name);
    else
        snprintf(out, 2 * MOE_NAME, "%.20s %s %s", b->name, moe_pass_text[b->pass], op->name);
}

/* ---- the invariant ---- */

static bool in_range(int i, int n)
{
    return i >= 0 && i < n;
}

static int check_op(const struct moe_schedule *s, const struct moe_role *role, const struct moe_block *b,
                    const struct moe_op *op)
{
    const char *wrong = NULL;
    bool collective = op->kind == MOE_COLLECTIVE;
    if (op->n_reads < 0 || op->n_reads > MOE_REFS || op->n_writes < 0 || op->n_writes > MOE_REFS)
        wrong = "number of references";
    else if (!in_range(op->stream, MOE_STREAM_COUNT) || op->waits >> MOE_STREAM_COUNT)
        wrong = "stream";
    else if (collective && (!in_range(op->comm, s->n_comms) || op->n_reads != 1 || op->n_writes != 1))
        wrong = "communicator or buffers of a collective";
    else if (collective && (!in_range(op->send, s->n_exprs) || !in_range(op->recv, s->n_exprs)))
        wrong = "send or recv";
    else if (op->n_dims < 0 || op->n_dims > MOE_DIMS)
        wrong = "number of dims";
    else if (op->kind == MOE_KERNEL && moe_kernel_cost[op->kernel] == MOE_COST_MEMORY &&
             !in_range(op->bytes, s->n_exprs))
        wrong = "bytes";
    else if (op->kind == MOE_KERNEL && moe_kernel_cost[op->kernel] == MOE_COST_GROUPED &&
             !in_range(op->group, s->n_symbols))
        wrong = "group";
    else if (op->of_block >= 0 && !in_range(op->of_block, role->n_blocks))
        wrong = "of_block";
    for (int i = 0; !wrong && i < op->n_dims; i++)
        if (!in_range(op->dims[i], s->n_exprs)) wrong = "dims";
    for (int i = 0; !wrong && i < op->n_reads; i++)
        if (!in_range(op->reads[i].buffer, s->n_buffers)) wrong = "reads";
    for (int i = 0; !wrong && i < op->n_writes; i++)
        if (!in_range(op->writes[i].buffer, s->n_buffers)) wrong = "writes";
    if (wrong) return moe_fail(MOE_EFAILED, "malformed schedule: %s %s: %s", b->name, op->name, wrong);
    return MOE_OK;
}

static int check_slots(const struct moe_schedule *s, const struct moe_block *b, const struct moe_op *op,
                       int layer)
{
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        struct moe_ref ref = i < op->n_reads ? op->reads[i] : op->writes[i - op->n_reads];
        if (!in_range(moe_slot(s, ref, layer), s->buffers[ref.buffer].slots))
            return moe_fail(MOE_EFAILED, "malformed schedule: %s %d %s: slot of %s", b->name, layer, op->name,
                            s->buffers[ref.buffer].name);
    }
    return MOE_OK;
}

int moe_schedule_check(const struct moe_schedule *s)
{
    for (int r = 0; r < s->n_ranks; r++)
        if (!in_range(s->role_of[r], s->n_roles))
            return moe_fail(MOE_EFAILED, "malformed schedule: role of rank %d", r);
    for (int i = 0; i < s->n_exprs; i++) {
        const struct moe_expr *e = &s->exprs[i];
        bool symbol = e->op == MOE_EXPR_SYM || e->op == MOE_EXPR_SUM;
        bool leaf = symbol || e->op == MOE_EXPR_CONST || e->op == MOE_EXPR_PLACE;
        if ((symbol && !in_range(e->a, s->n_symbols)) ||
            (!leaf && (!in_range(e->a, i) || !in_range(e->b, i))) ||
            (e->op == MOE_EXPR_PLACE && !in_range(e->a, s->n_comms)))
            return moe_fail(MOE_EFAILED, "malformed schedule: expression %d", i);
    }
    for (int i = 0; i < s->n_roles; i++) {
        const struct moe_role *role = &s->roles[i];
        for (int b = 0; b < role->n_blocks; b++)
            for (int o = 0; o < role->blocks[b].n_ops; o++)
                MOE_TRY(check_op(s, role, &role->blocks[b], &role->blocks[b].ops[o]));
        for (int n = 0; n < role->n_instances; n++) {
            if (!in_range(role->itinerary[n].block, role->n_blocks))
                return moe_fail(MOE_EFAILED, "malformed schedule: itinerary entry %d", n);
            const struct moe_block *block = &role->blocks[role->itinerary[n].block];
            for (int o = 0; o < block->n_ops; o++)
                MOE_TRY(check_slots(s, block, &block->ops[o], role->itinerary[n].layer));
        }
    }
    return MOE_OK;
}
