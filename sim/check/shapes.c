/* shapes.c - see internal.h.
 *
 * An operation is compared with its kernel's row of kernel_shapes.c. Most extents agree whatever the symbols
 * hold: that is seen once per operation of a role, by evaluating both sides at random values of the symbols
 * modulo the prime 2^61 - 1. Polynomials of degree d that differ there agree at d of 2^61 values (Schwartz
 * 1980), and what counts elements is far below the prime. Minima and roundings are symbols of their own: the
 * same of the same. The others are evaluated on each rank when the kernel runs. */
#include "sim/check/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNKNOWN, PROVED, EVALUATE };

/* ---- expressions at random values ---- */

static const uint64_t prime = ((uint64_t)1 << 61) - 1;

static uint64_t plus(uint64_t a, uint64_t b)
{
    return (a + b) % prime;
}
static uint64_t times(uint64_t a, uint64_t b)
{
    return (uint64_t)((unsigned __int128)a * b % prime);
}
static uint64_t of_number(int64_t x)
{
    return x < 0 ? prime - (0 - (uint64_t)x - 1) % prime - 1 : (uint64_t)x % prime;
}
/* The random value of a symbol. */
static uint64_t value_of(uint64_t a, uint64_t b)
{
    return moe_check_mix(a, b) % prime;
}

/* Layers from the instance's to that of a reference. */
static int away(const struct moe_schedule *s, struct moe_ref ref)
{
    return moe_slots_each(s, ref.buffer) == 1 ? 0 : ref.shift;
}

/* The sum of n int64 of a buffer in the slot of a layer. */
static uint64_t sign_total(int buffer, int shift, uint64_t n)
{
    return value_of(moe_check_mix((uint64_t)buffer, (uint64_t)(int64_t)shift), n);
}

static uint64_t sign_symbol(const struct moe_schedule *s, int symbol, int shift, bool sum)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    uint64_t all = (uint64_t)y->rows * (uint64_t)y->cols;
    if (y->buffer < 0 || moe_slots_each(s, y->buffer) == 1) shift = 0;
    if (y->buffer >= 0 && !y->slice && (sum || (y->by_row && y->rows == 1)))
        return sign_total(y->buffer, shift, all);
    if (y->buffer < 0 && y->expr && y->scope == MOE_SCOPE_EXPERT)
        return times(moe_check_sign(s, y->expr, 0), sum ? (uint64_t)y->cols : 1);
    if (sum && y->buffer < 0 && y->scope != MOE_SCOPE_PEER && y->scope != MOE_SCOPE_EXPERT) sum = false;
    return value_of(moe_check_mix((uint64_t)symbol + 1000003, (uint64_t)(int64_t)shift), sum);
}

uint64_t moe_check_sign(const struct moe_schedule *s, int expr, int shift)
{
    const struct moe_expr *e = &s->exprs[expr];
    uint64_t factor;
    switch (e->op) {
    case MOE_EXPR_CONST: return of_number(e->value);
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return value_of(2000003 + (uint64_t)e->op, (uint64_t)e->a);
    case MOE_EXPR_SYM: return sign_symbol(s, e->a, shift, false);
    case MOE_EXPR_SUM: return sign_symbol(s, e->a, shift, true);
    default: break;
    }
    uint64_t a = moe_check_sign(s, e->a, shift), b = moe_check_sign(s, e->b, shift);
    if (e->op == MOE_EXPR_ADD) return plus(a, b);
    if (e->op == MOE_EXPR_MUL) return times(a, b);
    memcpy(&factor, &e->factor, sizeof factor);
    return value_of(moe_check_mix(moe_check_mix(a, b), factor), (uint64_t)e->op);
}

/* ---- extents ---- */

static uint64_t sign_extent(const struct moe_checker *c, const struct moe_op *op, const struct moe_operand *o)
{
    uint64_t n = (uint64_t)o->times;
    for (int i = 0; i < o->n_dims; i++) n = times(n, moe_check_sign(c->s, op->dims[o->dims[i]], 0));
    if (o->by_rows) n = times(n, sign_symbol(c->s, op->group, 0, true));
    if (o->by_total)
        n = times(n, sign_total(op->reads[1].buffer, away(c->s, op->reads[1]),
                                sign_extent(c, op, &c->shapes[op->kernel].reads[1])));
    return n;
}

/* Elements that the kernel takes of an operand. MOE_UNKNOWN: *exceeds says that this is above 63 bits; else
 * another verdict says why. */
static int64_t extent_of(const struct moe_checker *c, int rank, const struct moe_here *h,
                         const struct moe_operand *o, bool *exceeds)
{
    const struct moe_op *op = h->op;
    int64_t n = o->times, rows = 1;
    *exceeds = false;
    for (int i = 0; i < o->n_dims; i++) {
        int64_t dim = moe_check_eval(c, c->device, op->dims[o->dims[i]], rank, h->layer);
        if (dim == MOE_UNKNOWN) return dim;
        n = moe_times(n, dim);
    }
    if (o->by_rows) rows = 0;
    for (int g = 0; o->by_rows && g < moe_symbol_count(c->s, op->group, rank); g++) {
        int64_t of_group = c->device.value(c->device.ctx, op->group, rank, h->layer, g);
        if (of_group == MOE_UNKNOWN) return of_group;
        rows = moe_plus(rows, of_group);
    }
    if (o->by_total) rows = moe_values_total(c->values, op->reads[1], rank, h->layer);
    if (o->by_total && rows == MOE_UNKNOWN) return rows;
    n = moe_times(n, rows);
    *exceeds = n == MOE_UNKNOWN;
    return n;
}

/* "x [TH], T = 6, H = 8" */
static void describe(const struct moe_checker *c, int rank, const struct moe_here *h,
                     const struct moe_operand *o, char out[128])
{
    const struct moe_kernel_shape *k = &c->shapes[h->op->kernel];
    int at = snprintf(out, 128, "%s", o->name);
    for (int i = 0; i < o->n_dims && at < 128; i++)
        at += snprintf(out + at, 128 - (size_t)at, ", %c = %" PRId64, k->dim[o->dims[i]],
                       moe_check_eval(c, c->device, h->op->dims[o->dims[i]], rank, h->layer));
}

int64_t moe_check_room(const struct moe_checker *c, int rank, struct moe_ref ref, int layer)
{
    const struct moe_buffer *b = &c->s->buffers[ref.buffer];
    int micro = b->per_micro ? ref.micro * (c->s->n_layers + 1) : 0;
    return moe_eval(c->s, c->device, ref.n ? ref.n : b->extent, rank, layer + away(c->s, ref) + micro, 0);
}

bool moe_check_idle(const struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    bool reads = false;
    if (op->kind != MOE_KERNEL) return false;
    for (int i = 0; i < op->n_reads; i++) reads |= moe_check_room(c, rank, op->reads[i], h->layer) != 0;
    for (int i = 0; i < op->n_writes; i++)
        if (moe_check_room(c, rank, op->writes[i], h->layer) != 0 &&
            (reads || !op->n_reads || !op->writes[i].accumulate))
            return false;
    return true;
}

bool moe_check_is_vector(const struct moe_checker *c, int rank, int layer, int rows, int columns)
{
    int64_t r = moe_eval(c->s, c->device, rows, rank, layer, 0),
            n = moe_eval(c->s, c->device, columns, rank, layer, 0);
    return r == 0 || r == 1 || n == 0 || n == 1;
}

bool moe_check_at_least(const struct moe_checker *c, int rank, int layer, int expr, int least)
{
    int64_t a = moe_eval(c->s, c->device, expr, rank, layer, 0),
            b = moe_eval(c->s, c->device, least, rank, layer, 0);
    return a != MOE_UNKNOWN && b != MOE_UNKNOWN && a >= b;
}

bool moe_check_ignores(const struct moe_op *op, int read)
{
    return op->kind == MOE_KERNEL && op->kernel == MOE_K_LIMIT && read == 0 &&
           (op->mode & MOE_LIMIT_ORDER) != MOE_LIMIT_BY_PROB;
}

/* What a collective fills may have more room than comes, but not a part that is named. */
static bool check_extent(struct moe_checker *c, int rank, const struct moe_here *h,
                         const struct moe_operand *o, struct moe_ref ref, bool reads)
{
    bool exceeds;
    int64_t takes = extent_of(c, rank, h, o, &exceeds), room = moe_check_room(c, rank, ref, h->layer);
    if (exceeds) {
        moe_check_verdict(c, 14, rank, moe_check_label(h), "%s elements of %s that exceed 64 bits",
                          reads ? "reads" : "writes", c->s->buffers[ref.buffer].name);
        return false;
    }
    if (takes == MOE_UNKNOWN || room == MOE_UNKNOWN || takes == room) return true;
    const struct moe_operand *first = c->shapes[h->op->kernel].reads;
    if (reads && !ref.n && takes >= 0 && takes < room &&
        (c->roomy[ref.buffer] || moe_check_ignores(h->op, (int)(o - first)) || moe_check_idle(c, rank, h)))
        return true;
    char text[128];
    describe(c, rank, h, o, text);
    moe_check_verdict(c, 14, rank, moe_check_label(h),
                      "%s another number of elements than %s holds, so on rank %d: %" PRId64 " for %" PRId64
                      " (%s)",
                      reads ? "reads" : "writes", c->s->buffers[ref.buffer].name, rank, takes, room, text);
    return false;
}

/* ---- what does not depend on the rank ---- */

static bool is_real(enum moe_type type)
{
    return type == MOE_F32 || type == MOE_F64 || type == MOE_BF16;
}

static bool role_fits(const struct moe_operand *o, const struct moe_buffer *b, bool reads)
{
    switch (o->kind) {
    case MOE_OPERAND_ANY:
        return b->role != MOE_BUF_PARAM && b->role != MOE_BUF_INPUT && b->role != MOE_BUF_STATE;
    case MOE_OPERAND_INDEX: return b->role == MOE_BUF_INDEX;
    case MOE_OPERAND_INPUT: return b->role == MOE_BUF_INPUT;
    case MOE_OPERAND_COUNT: return b->role == MOE_BUF_INDEX || (reads && b->role == MOE_BUF_COUNTS);
    case MOE_OPERAND_ROUTED: return b->role == MOE_BUF_COUNTS;
    case MOE_OPERAND_NORM: return b->role == MOE_BUF_NORM;
    case MOE_OPERAND_PARAM: return b->role == MOE_BUF_PARAM;
    case MOE_OPERAND_STATE: return b->role == MOE_BUF_STATE;
    case MOE_OPERAND_OUTPUT: return b->role == MOE_BUF_OUTPUT;
    default:
        if (o->kind == MOE_OPERAND_MOVED && b->type == MOE_I32) return b->role == MOE_BUF_INDEX;
        if (o->kind == MOE_OPERAND_HELD) return b->role == MOE_BUF_PARAM || b->role == MOE_BUF_GRAD;
        return b->role == MOE_BUF_ACTIVATION || b->role == MOE_BUF_GRAD ||
               (reads && b->role == MOE_BUF_PARAM);
    }
}

/* A write overlaps no read and no other write, unless the row says so; d_NAME belongs to NAME. */
static bool check_overlap(struct moe_checker *c, int rank, const struct moe_here *h, int w)
{
    const struct moe_op *op = h->op;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    const struct moe_operand *o = &k->writes[w];
    const char *name = c->s->buffers[op->writes[w].buffer].name, *other;
    const char *wrong = moe_kernel_overlap(c->s, k, op, w, &other);
    for (int i = 0; i < op->n_reads && !wrong; i++) {
        int grad = c->s->buffers[op->reads[i].buffer].grad;
        struct moe_ref expected = op->reads[i];
        expected.buffer = grad;
        if (o->name[0] != 'd' || strcmp(o->name + 1, k->reads[i].name) != 0 || moe_check_idle(c, rank, h) ||
            (grad == op->writes[w].buffer && moe_same_slot(c->s, expected, op->writes[w])))
            continue;
        wrong = "is not the gradient of";
        other = k->reads[i].name;
    }
    if (wrong)
        moe_check_verdict(c, 14, rank, moe_check_label(h), "writes %s, which %s %s", name, wrong, other);
    return !wrong;
}

static bool check_operand(struct moe_checker *c, int rank, const struct moe_here *h,
                          const struct moe_operand *o, struct moe_ref ref, bool reads)
{
    const struct moe_buffer *b = &c->s->buffers[ref.buffer];
    enum moe_type type = o->type == MOE_TYPE_COUNT ? h->op->type : o->type;
    struct moe_label at = moe_check_label(h);
    if (b->type != type || (o->kind == MOE_OPERAND_REAL && !is_real(type)))
        moe_check_verdict(c, 14, rank, at, "%s %s of %s as %s, expected %s", reads ? "reads" : "writes",
                          moe_type_text[b->type], b->name, o->name,
                          is_real(type) || o->kind != MOE_OPERAND_REAL ? moe_type_text[type]
                                                                       : "real numbers");
    else if (!role_fits(o, b, reads) && !moe_check_idle(c, rank, h))
        moe_check_verdict(c, 14, rank, at, "%s %s as %s, which is not for that", reads ? "reads" : "writes",
                          b->name, o->name);
    else if (!reads && ref.accumulate && !o->adds)
        moe_check_verdict(c, 14, rank, at, "adds to %s, and %s only replaces its %s", b->name,
                          moe_kernel_text[h->op->kernel], o->name);
    else
        return true;
    return false;
}

static bool check_lists(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    int least;
    if (moe_kernel_has_lists(k, op, &least)) return true;
    moe_check_verdict(c, 14, rank, moe_check_label(h),
                      "has %d dims, %d reads and %d writes, and %s needs %d, %d and %d", op->n_dims,
                      op->n_reads, op->n_writes, moe_kernel_text[op->kernel], k->n_dims, k->n_reads, least);
    return false;
}

static bool check_form(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    if (!check_lists(c, rank, h)) return false;
    bool right = true;
    for (int i = 0; i < op->n_reads; i++)
        right &= check_operand(c, rank, h, &k->reads[i], op->reads[i], true);
    for (int i = 0; i < op->n_writes; i++) {
        right &= check_operand(c, rank, h, &k->writes[i], op->writes[i], false);
        right = right && check_overlap(c, rank, h, i);
    }
    const enum moe_type type = moe_kernel_type(k);
    if (type != MOE_TYPE_COUNT && op->type != type) {
        moe_check_verdict(c, 14, rank, moe_check_label(h), "computes %s, expected %s",
                          moe_type_text[op->type], moe_type_text[type]);
        right = false;
    }
    return right;
}

static bool is_proved(const struct moe_checker *c, const struct moe_op *op)
{
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        bool reads = i < op->n_reads;
        struct moe_ref ref = reads ? op->reads[i] : op->writes[i - op->n_reads];
        const struct moe_buffer *b = &c->s->buffers[ref.buffer];
        const struct moe_operand *o = reads ? &k->reads[i] : &k->writes[i - op->n_reads];
        if ((ref.micro && b->per_micro) ||
            sign_extent(c, op, o) != moe_check_sign(c->s, ref.n ? ref.n : b->extent, away(c->s, ref)))
            return false;
    }
    return true;
}

/* ---- what no extent tells ---- */

static bool expect_dim(struct moe_checker *c, int rank, const struct moe_here *h, int dim, int64_t expected,
                       const char *why)
{
    int64_t found = moe_check_eval(c, c->device, h->op->dims[dim], rank, h->layer);
    if (found == MOE_UNKNOWN || found == expected) return true;
    moe_check_verdict(c, 14, rank, moe_check_label(h),
                      "has another %c than %s, so on rank %d: %" PRId64 ", expected %" PRId64,
                      c->shapes[h->op->kernel].dim[dim], why, rank, found, expected);
    return false;
}

/* SELECT takes the experts whose weights are on this rank. */
static bool check_experts(struct moe_checker *c, int rank, const struct moe_here *h)
{
    for (int i = 0; i < c->s->n_params; i++) {
        int shard = c->s->params[i].shard;
        if (shard < 0) continue;
        const struct moe_comm *m = &c->s->comms[shard];
        int64_t e = c->s->n_experts / moe_group_size(m, m->group_of[rank]);
        const int64_t first = e * m->index_of[rank];
        const bool last = first + e == c->s->n_experts; /* behind it there are none */
        return ((last && moe_eval(c->s, c->device, h->op->dims[1], rank, h->layer, 0) > e) ||
                expect_dim(c, rank, h, 1, e, "experts of a rank")) &&
               expect_dim(c, rank, h, 3, first, "the first expert of this rank");
    }
    return true;
}

static bool check_others(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    if (op->kernel == MOE_K_SELECT) return check_experts(c, rank, h);
    if (op->kernel == MOE_K_SPREAD) return expect_dim(c, rank, h, 1, c->s->n_experts, "all experts");
    if (moe_kernel_cost[op->kernel] == MOE_COST_GROUPED)
        return expect_dim(c, rank, h, 0, moe_symbol_count(c->s, op->group, rank), "its groups");
    return true;
}

/* A run refuses what is negative, also where nothing is divided. */
static bool check_factor(struct moe_checker *c, int rank, const struct moe_here *h, int expr,
                         const char *what)
{
    int64_t value = expr ? moe_check_eval(c, c->device, expr, rank, h->layer) : 1;
    if (value >= 0 || value == MOE_UNKNOWN) return true;
    moe_check_verdict(c, 14, rank, moe_check_label(h), "has a negative %s, so on rank %d: %" PRId64, what,
                      rank, value);
    return false;
}

/* Parts lie in their slots, and what is changed in place is one part. */
static bool check_parts(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    bool right = true;
    for (int i = 0; i < op->n_reads; i++)
        if (op->reads[i].n) right &= moe_check_range(c, 14, rank, h, op->reads[i]);
    for (int w = 0; w < op->n_writes; w++) {
        struct moe_ref to = op->writes[w];
        if (!to.n) continue;
        right &= moe_check_range(c, 14, rank, h, to);
        for (int i = 0; i < op->n_reads && right; i++) {
            struct moe_ref from = op->reads[i];
            if (!moe_same_slot(c->s, from, to) || moe_check_eval(c, c->device, to.n, rank, h->layer) == 0 ||
                moe_check_eval(c, c->device, from.begin, rank, h->layer) ==
                    moe_check_eval(c, c->device, to.begin, rank, h->layer))
                continue;
            moe_check_verdict(c, 14, rank, moe_check_label(h), "writes another part of %s than it reads",
                              c->s->buffers[to.buffer].name);
            right = false;
        }
    }
    return right;
}

bool moe_check_shapes(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    unsigned char *state = &c->proved[c->first_op[c->first_block[c->s->role_of[rank]] + h->block_id] +
                                      (int)(op - h->block->ops)];
    if (*state == UNKNOWN && !check_form(c, rank, h)) return false;
    /* Of an idle operation not all of its form was asked: the next rank is asked, too. */
    if (*state == UNKNOWN && !moe_check_idle(c, rank, h)) *state = is_proved(c, op) ? PROVED : EVALUATE;
    bool right = check_parts(c, rank, h), evaluate = *state != PROVED;
    for (int i = 0; evaluate && i < op->n_reads; i++)
        right &= check_extent(c, rank, h, &k->reads[i], op->reads[i], true);
    for (int i = 0; evaluate && i < op->n_writes; i++)
        right &= check_extent(c, rank, h, &k->writes[i], op->writes[i], false);
    right = right && check_factor(c, rank, h, op->divisor, "divisor");
    right = right && check_factor(c, rank, h, op->times, "factor");
    return right && check_others(c, rank, h);
}

/* ---- opening ---- */

void moe_check_shapes_open(struct moe_checker *c)
{
    const struct moe_schedule *s = c->s;
    int n_blocks = 0, n_ops = 0;
    c->shapes = moe_kernel_shapes();
    c->roomy = moe_alloc((size_t)s->n_buffers, sizeof *c->roomy);
    c->first_block = moe_alloc((size_t)s->n_roles, sizeof *c->first_block);
    for (int r = 0; r < s->n_roles; r++) {
        c->first_block[r] = n_blocks;
        n_blocks += s->roles[r].n_blocks;
    }
    c->first_op = moe_alloc((size_t)n_blocks, sizeof *c->first_op);
    for (int r = 0, b = 0; r < s->n_roles; r++)
        for (int i = 0; i < s->roles[r].n_blocks; i++, b++) {
            const struct moe_block *block = &s->roles[r].blocks[i];
            c->first_op[b] = n_ops;
            n_ops += block->n_ops;
            for (int o = 0; o < block->n_ops; o++)
                if (block->ops[o].kind == MOE_COLLECTIVE && !moe_reduces[block->ops[o].collective])
                    c->roomy[block->ops[o].writes[0].buffer] = true;
        }
    c->proved = moe_alloc((size_t)n_ops, sizeof *c->proved);
}

void moe_check_shapes_close(struct moe_checker *c)
{
    free(c->shapes);
    free(c->roomy);
    free(c->first_block);
    free(c->first_op);
    free(c->proved);
}
