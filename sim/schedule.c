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
#define X(name, library, reverse, rides, home) MOE_BY_##reverse,
const enum moe_transport moe_transport_reverse[] = {MOE_TRANSPORTS(X)};
#undef X
#define X(name, library, reverse, rides, home) MOE_LIBRARY_##library,
const enum moe_library moe_transport_library[] = {MOE_TRANSPORTS(X)};
#undef X
#define X(name, library, reverse, rides, home) rides,
const bool moe_transport_rides[] = {MOE_TRANSPORTS(X)};
#undef X
#define X(name, library, reverse, rides, home) home,
const bool moe_transport_home[] = {MOE_TRANSPORTS(X)};
#undef X
#define X(name, text) text,
const char *const moe_reduction_text[] = {MOE_REDUCTIONS(X)};
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
    free(s->claims);
    free(s->checkpoint.saved);
    free(s->checkpoint.loaded);
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

int moe_n_stages(const struct moe_schedule *s)
{
    int n = 0;
    for (int i = 0, j; i < s->n_roles; i++) {
        for (j = 0; s->roles[j].first_layer != s->roles[i].first_layer; j++) continue;
        n += j == i; /* the first role of its stage */
    }
    return n;
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
        for (int c = 0; c < y->cols; c++)
            sum = moe_plus(sum, content[(size_t)index * (size_t)y->cols + (size_t)c]);
    else
        for (int r = 0; r < y->rows; r++)
            sum = moe_plus(sum, content[(size_t)r * (size_t)y->cols + (size_t)index]);
    return sum;
}

int64_t moe_symbol_initial(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int layer,
                           int index)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    if (y->expr) return moe_eval(s, env, y->expr, rank, layer, index);
    if (y->scope == MOE_SCOPE_RANK) return s->tokens[rank];
    if (y->scope == MOE_SCOPE_PEER) {
        const struct moe_comm *c = &s->comms[y->comm];
        return s->tokens[c->members[c->first[c->group_of[rank]] + index]];
    }
    int64_t sum = 0;
    if (y->scope == MOE_SCOPE_BEFORE) {
        const struct moe_comm *c = &s->comms[y->comm];
        const int *members = c->members + c->first[c->group_of[rank]];
        for (int i = 0; i < c->index_of[rank]; i++) sum = moe_plus(sum, s->tokens[members[i]]);
        return sum;
    }
    for (int r = 0; r < s->n_ranks; r++) sum = moe_plus(sum, s->tokens[r]);
    return sum;
}

/* Does a symbol say something of this peer or expert? Other scopes have one value, whatever the index. */
static bool has_value(const struct moe_schedule *s, int symbol, int rank, int index)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    bool indexed = y->buffer >= 0 || y->scope == MOE_SCOPE_PEER;
    return !indexed || index < moe_symbol_count(s, symbol, rank);
}

/* In double, as the framework computes it (founding_cases.md A.0b: 100 x 1.1 gives 111 in double, 110 in
 * float). */
static int64_t ceil_of(int64_t a, int64_t b, double factor)
{
    double value = b ? ceil((double)a / (double)b * factor) : 0;
    return fabs(value) < 9e18 ? (int64_t)value : MOE_UNKNOWN;
}

/* torch: a quotient of Python numbers, a float64, times a tensor of float32, is a float32 (founding_cases.md
 * A.1 1: 100 x 1.1 gives 110). */
static int64_t ceil_f32_of(int64_t a, int64_t b, double factor)
{
    float ratio = b ? (float)((double)a / (double)b) : 0, value = ceilf(ratio * (float)factor);
    return fabsf(value) < 9e18F ? (int64_t)value : MOE_UNKNOWN;
}

/* int() of Python (founding_cases.md A.2: 0.29 x 100 gives 28). */
static int64_t trunc_of(int64_t a, double factor)
{
    double value = trunc((double)a * factor);
    return fabs(value) < 9e18 ? (int64_t)value : MOE_UNKNOWN;
}

/* Has it one value, whatever the index? */
static bool is_uniform(const struct moe_schedule *s, int expr)
{
    const struct moe_expr *e = &s->exprs[expr];
    const struct moe_symbol *y;
    switch (e->op) {
    case MOE_EXPR_CONST:
    case MOE_EXPR_PLACE:
    case MOE_EXPR_SUM: return true;
    case MOE_EXPR_OTHER: return false;
    case MOE_EXPR_SYM:
        y = &s->symbols[e->a];
        return y->buffer < 0 && (y->expr ? is_uniform(s, y->expr) : y->scope != MOE_SCOPE_PEER);
    default: return is_uniform(s, e->a) && is_uniform(s, e->b);
    }
}

static int64_t sum_of(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int layer)
{
    const struct moe_symbol_row *row = env.row ? env.row(env.ctx, symbol, rank, layer) : NULL;
    if (row) return row->sum;
    int n = moe_symbol_count(s, symbol, rank);
    bool one = s->symbols[symbol].buffer < 0 && s->symbols[symbol].expr &&
               is_uniform(s, s->symbols[symbol].expr); /* n times the same */
    int64_t sum = 0;
    for (int i = 0; i < (one && n ? 1 : n) && sum != MOE_UNKNOWN; i++)
        sum = moe_plus(sum, env.value(env.ctx, symbol, rank, layer, i));
    return one ? moe_times(n, sum) : sum;
}

static inline int64_t combine(const struct moe_expr *e, int64_t a, int64_t b)
{
    if (a == MOE_UNKNOWN || b == MOE_UNKNOWN) return MOE_UNKNOWN;
    switch (e->op) {
    case MOE_EXPR_ADD: return moe_plus(a, b);
    case MOE_EXPR_MUL: return moe_times(a, b);
    case MOE_EXPR_MIN: return a < b ? a : b;
    case MOE_EXPR_MAX: return a > b ? a : b;
    case MOE_EXPR_CEIL_F32: return ceil_f32_of(a, b, e->factor);
    case MOE_EXPR_TRUNC: return trunc_of(a, e->factor);
    default: return ceil_of(a, b, e->factor);
    }
}

int64_t moe_eval(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer, int index)
{
    const struct moe_expr *e = &s->exprs[expr];
    switch (e->op) {
    case MOE_EXPR_CONST: return e->value;
    case MOE_EXPR_PLACE: return s->comms[e->a].index_of[rank];
    case MOE_EXPR_OTHER: return index != s->comms[e->a].index_of[rank];
    case MOE_EXPR_SYM:
        return has_value(s, e->a, rank, index) ? env.value(env.ctx, e->a, rank, layer, index) : MOE_UNKNOWN;
    case MOE_EXPR_SUM: return sum_of(s, env, e->a, rank, layer);
    default:
        return combine(e, moe_eval(s, env, e->a, rank, layer, index),
                       moe_eval(s, env, e->b, rank, layer, index));
    }
}

/* Of a symbol: at an index, or (index < 0) the sum of all. */
static bool symbol_exceeds(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int layer,
                           int index)
{
    const struct moe_symbol_row *row = env.row ? env.row(env.ctx, symbol, rank, layer) : NULL;
    int expr = s->symbols[symbol].buffer < 0 ? s->symbols[symbol].expr : 0, n;
    if (row) return index < row->n && (index < 0 ? row->sum : row->value[index]) == MOE_UNKNOWN;
    if (!expr) return false;
    if (index >= 0) return moe_eval_exceeds(s, env, expr, rank, layer, index);
    n = moe_symbol_count(s, symbol, rank);
    for (int i = 0; i < n; i++) {
        if (moe_eval_exceeds(s, env, expr, rank, layer, i)) return true;
        if (moe_eval(s, env, expr, rank, layer, i) == MOE_UNKNOWN) return false;
    }
    return sum_of(s, env, symbol, rank, layer) == MOE_UNKNOWN;
}

bool moe_eval_exceeds(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer,
                      int index)
{
    const struct moe_expr *e = &s->exprs[expr];
    switch (e->op) {
    case MOE_EXPR_CONST:
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return false;
    case MOE_EXPR_SYM: return symbol_exceeds(s, env, e->a, rank, layer, index);
    case MOE_EXPR_SUM: return symbol_exceeds(s, env, e->a, rank, layer, -1);
    default: break;
    }
    int64_t a = moe_eval(s, env, e->a, rank, layer, index), b = moe_eval(s, env, e->b, rank, layer, index);
    if (a != MOE_UNKNOWN && b != MOE_UNKNOWN) return combine(e, a, b) == MOE_UNKNOWN;
    return moe_eval_exceeds(s, env, e->a, rank, layer, index) ||
           moe_eval_exceeds(s, env, e->b, rank, layer, index);
}

bool moe_eval_product(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer,
                      struct moe_product *out)
{
    const struct moe_expr *e = &s->exprs[expr];
    if (is_uniform(s, expr)) {
        *out = (struct moe_product){-1, moe_eval(s, env, expr, rank, layer, 0)};
        return out->factor != MOE_UNKNOWN;
    }
    if (e->op == MOE_EXPR_SYM) {
        *out = (struct moe_product){e->a, 1};
        return true;
    }
    if (e->op != MOE_EXPR_MUL) return false;
    struct moe_product a, b;
    if (!moe_eval_product(s, env, e->a, rank, layer, &a) ||
        !moe_eval_product(s, env, e->b, rank, layer, &b) || (a.symbol >= 0 && b.symbol >= 0))
        return false;
    *out = (struct moe_product){a.symbol >= 0 ? a.symbol : b.symbol, moe_times(a.factor, b.factor)};
    return out->factor != MOE_UNKNOWN && out->factor; /* 0 times what is above 63 bits is not 0 */
}

static void eval_symbol(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int layer,
                        int n, int64_t *out)
{
    const struct moe_symbol_row *row = env.row ? env.row(env.ctx, symbol, rank, layer) : NULL;
    int known = row && row->n < n ? row->n : row ? n : 0;
    if (known) memcpy(out, row->value, (size_t)known * sizeof *out);
    for (int i = known; i < n; i++)
        out[i] = has_value(s, symbol, rank, i) ? env.value(env.ctx, symbol, rank, layer, i) : MOE_UNKNOWN;
}

/* out[i]: combined with b. The product is what sizes are made of. */
static void combine_all(const struct moe_expr *e, int n, int64_t *out, int64_t b)
{
    if (e->op == MOE_EXPR_MUL && b != MOE_UNKNOWN)
        for (int i = 0; i < n; i++) out[i] = moe_times(out[i], b);
    else
        for (int i = 0; i < n; i++) out[i] = combine(e, out[i], b);
}

void moe_eval_all(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer, int n,
                  int64_t *out)
{
    const struct moe_expr *e = &s->exprs[expr];
    if (n == 1 || is_uniform(s, expr)) {
        int64_t value = n ? moe_eval(s, env, expr, rank, layer, 0) : 0;
        for (int i = 0; i < n; i++) out[i] = value;
    } else if (e->op == MOE_EXPR_OTHER) {
        for (int i = 0; i < n; i++) out[i] = i != s->comms[e->a].index_of[rank];
    } else if (e->op == MOE_EXPR_SYM) {
        eval_symbol(s, env, e->a, rank, layer, n, out);
    } else {
        moe_eval_all(s, env, e->a, rank, layer, n, out);
        if (is_uniform(s, e->b)) {
            combine_all(e, n, out, moe_eval(s, env, e->b, rank, layer, 0));
            return;
        }
        int64_t *b = moe_alloc((size_t)n, sizeof *b);
        moe_eval_all(s, env, e->b, rank, layer, n, b);
        for (int i = 0; i < n; i++) out[i] = combine(e, out[i], b[i]);
        free(b);
    }
}

void moe_op_label(const struct moe_block *b, const struct moe_op *op, int layer, char out[2 * MOE_NAME])
{
    char micro[32] = "", number[16] = "";
    if (b->stride) {
        snprintf(micro, sizeof micro, "micro-batch %d ", layer / b->stride);
        layer %= b->stride;
    }
    if (b->per_layer) snprintf(number, sizeof number, " %d", layer);
    /* What does not fit is cut. */
    int length = snprintf(out, 2 * MOE_NAME, "%s%.20s%s %s %s", micro, b->name, number,
                          moe_pass_text[b->pass], op->name);
    moe_assert(length > 0);
}

/* ---- the invariant ---- */

static bool in_range(int i, int n)
{
    return i >= 0 && i < n;
}

static const char *wrong_kernel(const struct moe_schedule *s, const struct moe_op *op)
{
    if (!in_range((int)op->kernel, MOE_K_COUNT)) return "kernel";
    enum moe_cost cost = moe_kernel_cost[op->kernel];
    if (cost == MOE_COST_MEMORY && !in_range(op->bytes, s->n_exprs)) return "bytes";
    if (cost == MOE_COST_MEMORY && !in_range(op->flops, s->n_exprs)) return "flops";
    if (cost == MOE_COST_GROUPED && !in_range(op->group, s->n_symbols)) return "group";
    if (!in_range(op->divisor, s->n_exprs)) return "divisor";
    if (!in_range(op->times, s->n_exprs)) return "times";
    if (!in_range(op->low, s->n_exprs) || !in_range(op->high, s->n_exprs)) return "low or high";
    if (op->kernel == MOE_K_LARGEST && op->n_reads < 1) return "reads of largest";
    if (op->kernel == MOE_K_SET && op->n_dims < 1) return "dims of set";
    if (op->kernel == MOE_K_LIMIT && (op->n_reads < 3 || op->n_dims < 6)) return "reads or dims of limit";
    if (op->kernel == MOE_K_SPREAD && op->n_dims < 4) return "dims of spread";
    if (op->kernel == MOE_K_SQNORM && (op->n_reads < 1 || op->n_writes < 1)) return "buffers of sqnorm";
    return NULL;
}

static const char *wrong_collective(const struct moe_schedule *s, const struct moe_op *op)
{
    if (!in_range((int)op->collective, MOE_COLLECTIVE_COUNT)) return "collective";
    if (!in_range((int)op->reduction, MOE_REDUCTION_COUNT) ||
        (op->reduction == MOE_REDUCE_MAX && (op->collective != MOE_ALLREDUCE || op->type != MOE_I64)))
        return "reduction";
    if (!in_range((int)op->transport, MOE_TRANSPORT_COUNT) ||
        (op->transport != MOE_BY_NCCL && op->collective != MOE_ALLTOALL))
        return "transport";
    if (!in_range(op->comm, s->n_comms)) return "communicator";
    if (op->n_reads != 1 || op->n_writes != 1) return "buffers of a collective";
    if (!in_range(op->when, s->n_exprs)) return "when";
    if (!in_range(op->send, s->n_exprs) || !in_range(op->recv, s->n_exprs)) return "send or recv";
    if (s->buffers[op->reads[0].buffer].type != op->type || s->buffers[op->writes[0].buffer].type != op->type)
        return "type of a collective's buffers";
    return op->writes[0].accumulate ? "a collective that accumulates" : NULL;
}

static const char *wrong_op(const struct moe_schedule *s, const struct moe_role *role,
                            const struct moe_op *op)
{
    if (op->n_reads < 0 || op->n_reads > MOE_REFS || op->n_writes < 0 || op->n_writes > MOE_REFS)
        return "number of references";
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        bool reads = i < op->n_reads;
        struct moe_ref ref = reads ? op->reads[i] : op->writes[i - op->n_reads];
        if (!in_range(ref.buffer, s->n_buffers)) return reads ? "reads" : "writes";
        if (!in_range(ref.begin, s->n_exprs) || !in_range(ref.n, s->n_exprs)) return "a range";
    }
    if (!in_range(op->stream, MOE_STREAM_COUNT) || op->waits >> MOE_STREAM_COUNT) return "stream";
    if (!in_range((int)op->type, MOE_TYPE_COUNT)) return "type";
    if (op->n_dims < 0 || op->n_dims > MOE_DIMS) return "number of dims";
    for (int i = 0; i < op->n_dims; i++)
        if (!in_range(op->dims[i], s->n_exprs)) return "dims";
    if (op->serves ? !in_range(op->of_block, role->n_blocks) : op->of_block >= role->n_blocks)
        return "of_block";
    switch (op->kind) {
    case MOE_KERNEL: return wrong_kernel(s, op);
    case MOE_COLLECTIVE: return wrong_collective(s, op);
    case MOE_HOST_SYNC: return NULL;
    default: return "kind";
    }
}

static int check_slots(const struct moe_schedule *s, const struct moe_block *b, const struct moe_op *op,
                       int layer)
{
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        struct moe_ref ref = i < op->n_reads ? op->reads[i] : op->writes[i - op->n_reads];
        if (!in_range(moe_slot(s, ref, layer), s->buffers[ref.buffer].slots))
            return moe_fail(MOE_EFAILED, "malformed schedule: %s %d %s: %s has no such layer", b->name, layer,
                            op->name, s->buffers[ref.buffer].name);
    }
    return MOE_OK;
}

static int check_role(const struct moe_schedule *s, const struct moe_role *role)
{
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            const char *wrong = wrong_op(s, role, op);
            if (wrong)
                return moe_fail(MOE_EFAILED, "malformed schedule: %s %s: %s", role->blocks[b].name, op->name,
                                wrong);
        }
    for (int n = 0; n < role->n_instances; n++) {
        if (!in_range(role->itinerary[n].block, role->n_blocks))
            return moe_fail(MOE_EFAILED, "malformed schedule: itinerary entry %d", n);
        const struct moe_block *block = &role->blocks[role->itinerary[n].block];
        for (int o = 0; o < block->n_ops; o++)
            MOE_TRY(check_slots(s, block, &block->ops[o], role->itinerary[n].layer));
    }
    return MOE_OK;
}

static bool is_expr(const struct moe_schedule *s, int i)
{
    const struct moe_expr *e = &s->exprs[i];
    switch (e->op) {
    case MOE_EXPR_CONST: return true;
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return in_range(e->a, s->n_comms);
    case MOE_EXPR_SYM:
    case MOE_EXPR_SUM: return in_range(e->a, s->n_symbols);
    default: return in_range((int)e->op, MOE_EXPR_OP_COUNT) && in_range(e->a, i) && in_range(e->b, i);
    }
}

/* Does an expression name only symbols before this one? Else a value could depend on itself. */
static bool names_earlier(const struct moe_schedule *s, int expr, int symbol)
{
    const struct moe_expr *e = &s->exprs[expr];
    switch (e->op) {
    case MOE_EXPR_CONST:
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return true;
    case MOE_EXPR_SYM:
    case MOE_EXPR_SUM: return e->a < symbol;
    default: return names_earlier(s, e->a, symbol) && names_earlier(s, e->b, symbol);
    }
}

static bool is_symbol(const struct moe_schedule *s, int i)
{
    const struct moe_symbol *y = &s->symbols[i];
    if (!in_range(y->slice, s->n_comms) || !in_range(y->expr, s->n_exprs) || !names_earlier(s, y->expr, i))
        return false;
    if (y->buffer >= 0)
        return y->buffer < s->n_buffers && s->buffers[y->buffer].type == MOE_I64 && y->rows > 0 &&
               !(y->slice && y->by_row) && y->cols > 0;
    return (y->scope != MOE_SCOPE_PEER && y->scope != MOE_SCOPE_BEFORE) || in_range(y->comm, s->n_comms);
}

static bool is_buffer(const struct moe_schedule *s, const struct moe_buffer *b)
{
    return in_range((int)b->role, MOE_BUF_ROLE_COUNT) && in_range((int)b->type, MOE_TYPE_COUNT) &&
           b->slots > 0 && (!b->per_micro || b->slots % s->n_micro == 0) && in_range(b->extent, s->n_exprs) &&
           b->grad >= -1 && b->grad < s->n_buffers;
}

static bool is_param(const struct moe_schedule *s, const struct moe_param *p)
{
    if (!in_range(p->grad, s->n_buffers) || !in_range(p->replicas, s->n_comms) || p->shard < -1 ||
        p->shard >= s->n_comms || !in_range(p->divisor, s->n_exprs) ||
        !in_range(p->broadcast_comm, s->n_comms))
        return false;
    const struct moe_buffer *grad = &s->buffers[p->grad];
    if (p->buffer < 0) return grad->role == MOE_BUF_NORM && grad->slots == 1;
    return p->buffer < s->n_buffers && s->buffers[p->buffer].role == MOE_BUF_PARAM &&
           grad->role == MOE_BUF_GRAD && grad->slots == s->buffers[p->buffer].slots;
}

int moe_schedule_check(const struct moe_schedule *s)
{
    if (s->n_micro < 1) return moe_fail(MOE_EFAILED, "malformed schedule: micro-batches");
    for (int r = 0; r < s->n_ranks; r++)
        if (!in_range(s->role_of[r], s->n_roles))
            return moe_fail(MOE_EFAILED, "malformed schedule: role of rank %d", r);
    for (int i = 0; i < s->n_exprs; i++)
        if (!is_expr(s, i)) return moe_fail(MOE_EFAILED, "malformed schedule: expression %d", i);
    for (int i = 0; i < s->n_buffers; i++)
        if (!is_buffer(s, &s->buffers[i]))
            return moe_fail(MOE_EFAILED, "malformed schedule: buffer %s", s->buffers[i].name);
    for (int i = 0; i < s->n_symbols; i++)
        if (!is_symbol(s, i))
            return moe_fail(MOE_EFAILED, "malformed schedule: symbol %s", s->symbols[i].name);
    for (int i = 0; i < s->n_params; i++)
        if (!is_param(s, &s->params[i]))
            return moe_fail(MOE_EFAILED, "malformed schedule: parameter %s", s->params[i].name);
    for (int i = 0; i < s->n_claims; i++)
        if (!in_range(s->claims[i].low, s->n_exprs) || !in_range(s->claims[i].high, s->n_exprs))
            return moe_fail(MOE_EFAILED, "malformed schedule: claim %d", i);
    for (int i = 0; i < s->n_roles; i++) MOE_TRY(check_role(s, &s->roles[i]));
    return MOE_OK;
}
