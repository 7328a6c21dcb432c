/* builder.c - see builder.h. */
#include "sim/lower/builder.h"

#include <stdlib.h>
#include <string.h>

struct moe_track {
    int writer;           /* stream of the last write, -1: none */
    uint32_t readers;     /* streams that read since */
    int grad_block;       /* block in which grad_shifts was set (activations) */
    uint32_t grad_shifts; /* bit i: gradient at shift i is written */
    int role;             /* last one that made it */
};

/* Room for one more item; the place of the new one. */
#define APPEND(array, count, cap)                                                                            \
    ((array) = moe_grow((array), &(cap), (count) + 1, sizeof *(array)), (count)++)

void moe_builder_open(struct moe_builder *b, int n_ranks, const int64_t *tokens)
{
    struct moe_schedule *s = moe_alloc(1, sizeof *s);
    *b = (struct moe_builder){.s = s};
    s->n_ranks = n_ranks;
    s->tokens = moe_alloc((size_t)n_ranks, sizeof *s->tokens);
    memcpy(s->tokens, tokens, (size_t)n_ranks * sizeof *tokens);
    s->role_of = moe_alloc((size_t)n_ranks, sizeof *s->role_of);
    s->n_roles = s->n_micro = 1;
    s->roles = moe_alloc(1, sizeof *s->roles);
    int *key = moe_alloc((size_t)n_ranks, sizeof *key);
    moe_new_comm(b, "world", 1, key);
    free(key);
    moe_const(b, 0); /* expression MOE_UNSET */
}

struct moe_schedule *moe_builder_close(struct moe_builder *b)
{
    struct moe_schedule *s = b->s;
    free(b->track);
    for (int i = 0; i < s->n_roles; i++)
        if (!s->roles[i].end_layer) s->roles[i].end_layer = s->n_layers;
    *b = (struct moe_builder){0};
    if (moe_schedule_check(s) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    return s;
}

static int new_expr(struct moe_builder *b, struct moe_expr e)
{
    struct moe_schedule *s = b->s;
    int i = APPEND(s->exprs, s->n_exprs, s->cap_exprs);
    s->exprs[i] = e;
    return i;
}

int moe_const(struct moe_builder *b, int64_t value)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_CONST, .value = value});
}

int moe_sym(struct moe_builder *b, int symbol)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_SYM, .a = symbol});
}

int moe_sum(struct moe_builder *b, int symbol)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_SUM, .a = symbol});
}

int moe_add(struct moe_builder *b, int x, int y)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_ADD, .a = x, .b = y});
}

int moe_mul(struct moe_builder *b, int x, int y)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_MUL, .a = x, .b = y});
}

int moe_min(struct moe_builder *b, int x, int y)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_MIN, .a = x, .b = y});
}

int moe_other(struct moe_builder *b, int comm)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_OTHER, .a = comm});
}

int moe_max(struct moe_builder *b, int x, int y)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_MAX, .a = x, .b = y});
}

int moe_place(struct moe_builder *b, int comm)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_PLACE, .a = comm});
}

int moe_ceil(struct moe_builder *b, int x, int y, double factor)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_CEIL, .a = x, .b = y, .factor = factor});
}

int moe_ceil_f32(struct moe_builder *b, int x, int y, double factor)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_CEIL_F32, .a = x, .b = y, .factor = factor});
}

int moe_trunc(struct moe_builder *b, int x, double factor)
{
    return new_expr(b, (struct moe_expr){MOE_EXPR_TRUNC, .a = x, .factor = factor});
}

int moe_new_symbol(struct moe_builder *b, const char *name, int buffer, bool by_row, struct moe_symbol like)
{
    struct moe_schedule *s = b->s;
    int i = APPEND(s->symbols, s->n_symbols, s->cap_symbols);
    like.buffer = buffer;
    like.by_row = by_row;
    moe_copy_name(like.name, name);
    s->symbols[i] = like;
    return i;
}

/* What a role makes the roles before it made too, in this order of those of one name; or -1. */
static int made_before(const struct moe_builder *b, const char *name, enum moe_buffer_role role,
                       enum moe_type type)
{
    for (int i = 0; i < b->s->n_buffers && b->role > 0; i++) {
        const struct moe_buffer *made = &b->s->buffers[i];
        if (b->track[i].role < b->role && made->role == role && made->type == type &&
            !strcmp(made->name, name))
            return i;
    }
    return -1;
}

int moe_new_buffer(struct moe_builder *b, const char *name, enum moe_buffer_role role, enum moe_type type,
                   int slots, int extent)
{
    struct moe_schedule *s = b->s;
    int i = made_before(b, name, role, type);
    if (i >= 0) {
        b->track[i].role = b->role;
        return i;
    }
    i = APPEND(s->buffers, s->n_buffers, s->cap_buffers);
    bool per_micro =
        role != MOE_BUF_PARAM && role != MOE_BUF_GRAD && role != MOE_BUF_STATE && role != MOE_BUF_NORM;
    s->buffers[i] = (struct moe_buffer){.role = role,
                                        .type = type,
                                        .slots = slots * (per_micro ? s->n_micro : 1),
                                        .per_micro = per_micro,
                                        .extent = extent,
                                        .grad = -1};
    moe_copy_name(s->buffers[i].name, name);
    b->track = moe_grow(b->track, &b->cap_track, s->n_buffers, sizeof *b->track);
    b->track[i] = (struct moe_track){.writer = -1, .grad_block = -1, .role = b->role};
    return i;
}

void moe_new_role(struct moe_builder *b)
{
    struct moe_schedule *s = b->s;
    s->roles = realloc(s->roles, ((size_t)s->n_roles + 1) * sizeof *s->roles);
    moe_assert(s->roles);
    s->roles[s->n_roles] = (struct moe_role){0};
    b->role = s->n_roles++;
    for (int i = 0; i < s->n_buffers; i++)
        b->track[i] = (struct moe_track){.writer = -1, .grad_block = -1, .role = b->track[i].role};
}

static void add_param(struct moe_builder *b, const char *name, struct moe_param p)
{
    struct moe_schedule *s = b->s;
    moe_copy_name(p.name, name);
    int i = APPEND(s->params, s->n_params, s->cap_params);
    s->params[i] = p;
}

int moe_new_param(struct moe_builder *b, const char *name, enum moe_type type, int slots, int extent,
                  struct moe_param like)
{
    like.buffer = moe_new_buffer(b, name, MOE_BUF_PARAM, type, slots, extent);
    like.grad = moe_grad_in(b, moe_ref(like.buffer)).buffer;
    add_param(b, name, like);
    return like.buffer;
}

int moe_new_norm(struct moe_builder *b, const char *name, int replicas)
{
    int one = moe_const(b, 1), buffer = moe_new_buffer(b, name, MOE_BUF_NORM, MOE_F64, 1, one);
    add_param(
        b, name,
        (struct moe_param){.buffer = -1, .grad = buffer, .replicas = replicas, .shard = -1, .divisor = one});
    return buffer;
}

void moe_claim(struct moe_builder *b, struct moe_claim claim)
{
    int i = APPEND(b->s->claims, b->s->n_claims, b->s->cap_claims);
    b->s->claims[i] = claim;
}

int moe_new_comm(struct moe_builder *b, const char *name, int n_groups, const int *key)
{
    struct moe_schedule *s = b->s;
    size_t n_ranks = (size_t)s->n_ranks;
    int i = APPEND(s->comms, s->n_comms, s->cap_comms);
    struct moe_comm *c = &s->comms[i];
    moe_copy_name(c->name, name);
    c->n_groups = n_groups;
    c->group_of = moe_alloc(n_ranks, sizeof(int));
    c->index_of = moe_alloc(n_ranks, sizeof(int));
    c->members = moe_alloc(n_ranks, sizeof(int));
    c->first = moe_alloc((size_t)n_groups + 1, sizeof(int));
    for (int r = 0; r < s->n_ranks; r++) {
        c->group_of[r] = key[r];
        c->index_of[r] = c->first[key[r] + 1]++; /* first holds sizes, shifted by one, until summed */
    }
    for (int g = 0; g < n_groups; g++) c->first[g + 1] += c->first[g];
    for (int r = 0; r < s->n_ranks; r++) c->members[c->first[key[r]] + c->index_of[r]] = r;
    return i;
}

int moe_new_block(struct moe_builder *b, const char *name, enum moe_pass pass, bool per_layer)
{
    struct moe_role *role = &b->s->roles[b->role];
    role->blocks = realloc(role->blocks, ((size_t)role->n_blocks + 1) * sizeof *role->blocks);
    moe_assert(role->blocks);
    struct moe_block *block = &role->blocks[role->n_blocks];
    bool of_micro = (pass == MOE_FORWARD || pass == MOE_BACKWARD) && b->s->n_micro > 1;
    *block = (struct moe_block){
        .pass = pass, .per_layer = per_layer, .stride = of_micro ? moe_layers_each(b->s) : 0};
    moe_copy_name(block->name, name);
    return b->block = role->n_blocks++;
}

void moe_run_block(struct moe_builder *b, int block, int layer)
{
    struct moe_role *role = &b->s->roles[b->role];
    role->itinerary = realloc(role->itinerary, ((size_t)role->n_instances + 1) * sizeof *role->itinerary);
    moe_assert(role->itinerary);
    role->itinerary[role->n_instances++] = (struct moe_instance){block, layer};
}

static int buffer_bytes(struct moe_builder *b, struct moe_ref r)
{
    const struct moe_buffer *buffer = &b->s->buffers[r.buffer];
    return moe_mul(b, r.n ? r.n : buffer->extent, moe_const(b, moe_type_bytes[buffer->type]));
}

/* Reading and writing on one stream is in order; across streams the later operation waits. */
static void derive_waits(struct moe_builder *b, struct moe_op *op)
{
    uint32_t own = op->kind == MOE_HOST_SYNC ? 0 : 1u << op->stream;
    for (int i = 0; i < op->n_reads; i++) {
        struct moe_track *t = &b->track[op->reads[i].buffer];
        if (t->writer >= 0) op->waits |= 1u << t->writer;
        t->readers |= own;
    }
    for (int i = 0; i < op->n_writes; i++) {
        struct moe_track *t = &b->track[op->writes[i].buffer];
        if (t->writer >= 0) op->waits |= 1u << t->writer;
        op->waits |= t->readers;
        t->writer = op->stream;
        t->readers = 0;
    }
    op->waits &= ~own;
}

void moe_emit(struct moe_builder *b, struct moe_op op)
{
    struct moe_block *block = &b->s->roles[b->role].blocks[b->block];
    op.id = block->n_ops;
    op.line = b->line;
    if (!op.serves) op.of_block = op.of_id = -1;
    derive_waits(b, &op);
    if (op.kind == MOE_KERNEL && op.bytes == MOE_UNSET && moe_kernel_cost[op.kernel] == MOE_COST_MEMORY) {
        for (int i = 0; i < op.n_reads; i++) op.bytes = moe_add(b, op.bytes, buffer_bytes(b, op.reads[i]));
        for (int i = 0; i < op.n_writes; i++) op.bytes = moe_add(b, op.bytes, buffer_bytes(b, op.writes[i]));
    }
    int i = APPEND(block->ops, block->n_ops, block->cap);
    block->ops[i] = op;
}

struct moe_ref moe_grad_in(struct moe_builder *b, struct moe_ref r)
{
    struct moe_schedule *s = b->s;
    if (s->buffers[r.buffer].grad < 0) {
        struct moe_buffer of = s->buffers[r.buffer];
        char name[MOE_NAME + 2] = "d_";
        strcat(name, of.name);
        int grad = moe_new_buffer(b, name, of.role == MOE_BUF_PARAM ? MOE_BUF_GRAD : MOE_BUF_ACTIVATION,
                                  of.type, moe_slots_each(s, r.buffer), of.extent);
        s->buffers[r.buffer].grad = grad;
    }
    return (struct moe_ref){.buffer = s->buffers[r.buffer].grad, .shift = r.shift};
}

struct moe_ref moe_grad_out(struct moe_builder *b, struct moe_ref r)
{
    struct moe_ref grad = moe_grad_in(b, r);
    struct moe_track *t = &b->track[grad.buffer];
    /* A parameter may collect contributions from several blocks; an activation's belong to one. */
    if (b->s->buffers[grad.buffer].role != MOE_BUF_GRAD && t->grad_block != b->block) t->grad_shifts = 0;
    t->grad_block = b->block;
    /* Of several micro-batches all are added to a parameter's gradient, which the step clears first. */
    grad.accumulate = t->grad_shifts >> grad.shift & 1 ||
                      (b->s->buffers[grad.buffer].role == MOE_BUF_GRAD && b->s->n_micro > 1);
    t->grad_shifts |= 1u << grad.shift;
    return grad;
}
