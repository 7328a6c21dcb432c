/* alike.c - see internal.h.
 *
 * Where ranks have roles of their own, each must still compute the same function of its data, or copies of a
 * parameter are trained by different losses and part. Every slot gets a number made of what computed it:
 * kernel, coefficients, and the numbers of what was read. Operations with the same label must make the same
 * number on all ranks; the first that does not is told. A label that one role lacks is no fault: what comes
 * of it is. Stages of a pipeline do other things: roles with the same layers and micro-batches are
 * compared. */
#include "sim/check/internal.h"

#include <stdlib.h>
#include <string.h>

struct made { /* by an operation */
    struct moe_here h;
    const struct moe_op *did; /* what it may be taken for */
    int trans;                /* with these matrices transposed: 2 the first, 1 the second */
    uint64_t number;
};

static uint64_t of_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* What is known before the step begins: no counts. */
static int64_t initial(void *ctx, int symbol, int rank, int layer, int index)
{
    const struct moe_schedule *s = ctx;
    if (s->symbols[symbol].buffer >= 0) return MOE_UNKNOWN;
    return moe_symbol_initial(s, (struct moe_env){initial, ctx, NULL}, symbol, rank, layer, index);
}

/* On the first rank of the role: its value, or what it is made of where it depends on what the rank got. */
static uint64_t of_expr(const struct moe_checker *c, int rank, int expr, int layer)
{
    struct moe_env env = {.value = initial, .ctx = (void *)c->s};
    int64_t value = moe_eval(c->s, env, expr, rank, layer, 0);
    return value == MOE_UNKNOWN ? moe_check_sign(c->s, expr, 0) : (uint64_t)value;
}

/* A factor that is not there is 1. */
static uint64_t of_factor(const struct moe_checker *c, int rank, int expr, int layer)
{
    return expr == 0 ? 1 : of_expr(c, rank, expr, layer);
}

/* The number of a rank's first token is another on each. */
static bool is_place(const struct moe_op *op, int dim)
{
    return op->kernel == MOE_K_LIMIT && dim == 5;
}

/* Does an expression say the same on every rank, whatever its tokens? */
static bool is_number(const struct moe_schedule *s, int expr)
{
    const struct moe_expr *e = &s->exprs[expr];
    if (e->op == MOE_EXPR_CONST) return true;
    if (e->op == MOE_EXPR_SYM || e->op == MOE_EXPR_SUM || e->op == MOE_EXPR_PLACE || e->op == MOE_EXPR_OTHER)
        return false;
    return is_number(s, e->a) && is_number(s, e->b);
}

/* A sequence that is longer than the tokens is one sequence, however long. */
static uint64_t of_dim(const struct moe_checker *c, int rank, const struct made *m, int dim)
{
    const struct moe_op *op = m->did;
    const bool sequence = c->shapes[op->kernel].dim[dim] == 'S';
    if (sequence && moe_check_at_least(c, rank, m->h.layer, op->dims[dim], op->dims[0])) dim = 0;
    return of_expr(c, rank, op->dims[dim], m->h.layer);
}

static uint64_t of_kernel(const struct moe_checker *c, int rank, const struct made *m, bool same_tokens)
{
    const struct moe_op *op = m->did;
    const int layer = m->h.layer;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    uint64_t n = moe_check_mix(1, (uint64_t)op->kernel);
    if (k->uses & MOE_USES_FACTOR) n = moe_check_mix(n, of_double(op->factor));
    if (k->uses & MOE_USES_DECAY) n = moe_check_mix(n, of_double(op->decay));
    if (k->uses & MOE_USES_MODE) n = moe_check_mix(n, (uint64_t)op->mode);
    if (k->uses & MOE_USES_MODE && (op->mode & MOE_LIMIT_ORDER) == MOE_LIMIT_RANDOM)
        n = moe_check_mix(n, op->seed);
    if (k->uses & MOE_USES_TRANS) n = moe_check_mix(n, (uint64_t)m->trans);
    if (k->uses & MOE_USES_DIVISOR)
        n = moe_check_mix(moe_check_mix(n, of_factor(c, rank, op->divisor, layer)),
                          of_factor(c, rank, op->times, layer));
    for (int i = 0; i < op->n_dims && op->kernel != MOE_K_SELECT; i++)
        if (k->free_dims >> i & 1 && !is_place(op, i) &&
            (same_tokens || (k->dim[i] != 'S' && is_number(c->s, op->dims[i]))))
            n = moe_check_mix(n, of_dim(c, rank, m, i));
    return n;
}

/* In a group of one, all of them copy. */
static uint64_t of_collective(const struct moe_checker *c, int rank, const struct moe_op *op)
{
    const struct moe_comm *m = &c->s->comms[op->comm];
    if (moe_group_size(m, m->group_of[rank]) == 1) return 3;
    return moe_check_mix(moe_check_mix(3, (uint64_t)op->collective), (uint64_t)op->comm);
}

static bool same_label(const struct made *a, const struct made *b)
{
    return a->h.layer == b->h.layer && a->h.op->id == b->h.op->id && a->h.block->pass == b->h.block->pass &&
           !strcmp(a->h.op->name, b->h.op->name) && !strcmp(a->h.block->name, b->h.block->name);
}

/* The number of what an operation makes, which is in the slots from then on. */
static uint64_t apply(const struct moe_checker *c, int rank, const struct made *m, bool same_tokens,
                      uint64_t *slots)
{
    const struct moe_op *op = m->did;
    const int layer = m->h.layer;
    uint64_t made = op->kind == MOE_KERNEL ? of_kernel(c, rank, m, same_tokens) : of_collective(c, rank, op);
    for (int i = 0; i < op->n_reads; i++)
        made = moe_check_mix(made, slots[moe_check_slot(c, op->reads[i], layer)]);
    bool zero = op->kind == MOE_KERNEL && op->kernel == MOE_K_ZERO; /* adding to it is replacing it */
    uint64_t all = made;
    for (int i = 0; i < op->n_writes; i++) {
        uint64_t *slot = &slots[moe_check_slot(c, op->writes[i], layer)],
                 fresh = zero ? 0 : moe_check_mix(made, (uint64_t)i);
        if (op->writes[i].n)
            fresh = moe_check_mix(*slot, fresh); /* by place: gradients tell whether rightly */
        *slot = op->writes[i].accumulate ? *slot + fresh : fresh;
        all = moe_check_mix(moe_check_mix(all, *slot), (uint64_t)moe_check_slot(c, op->writes[i], layer));
    }
    return all;
}

/* The one with this label, sought from *from on, which it becomes; NULL: none. */
static const struct made *find(const struct made *label, const struct made *list, int n, int *from)
{
    for (int tried = 0; tried < n; tried++, *from = (*from + 1) % n)
        if (same_label(label, &list[*from])) return &list[*from];
    return NULL;
}

/* Does a collective bring the rank nothing, whatever the routing? */
static bool brings_nothing(const struct moe_checker *c, int rank, const struct made *m)
{
    const struct moe_op *op = m->h.op;
    const struct moe_comm *comm = &c->s->comms[op->comm];
    if (op->kind != MOE_COLLECTIVE) return false;
    int n = moe_recv_per_peer[op->collective] ? moe_group_size(comm, comm->group_of[rank]) : 1;
    for (int i = 0; i < n; i++)
        if (moe_eval(c->s, (struct moe_env){initial, (void *)c->s}, op->recv, rank, m->h.layer, i) != 0)
            return false;
    return true;
}

/* Where nothing comes of an operation on any rank of the role, it may be taken for what the other rank does,
 * and so may a matrix that is its own transpose on all. like: NULL: not asked. */
static void take_for(const struct moe_checker *c, int role, struct made *m, const struct made *like)
{
    const struct moe_op *op = m->did = m->h.op;
    m->trans = op->trans_a * 2 + op->trans_b;
    if (!like) return;
    bool idle = true, same_a, same_b;
    const bool product = op->kind == MOE_KERNEL && op->kernel == like->did->kernel && op->n_dims >= 3 &&
                         c->shapes[op->kernel].uses & MOE_USES_TRANS;
    same_a = same_b = product;
    for (int r = 0; r < c->s->n_ranks && (idle || same_a || same_b); r++) {
        if (c->s->role_of[r] != role) continue;
        idle = idle && (moe_check_idle(c, r, &m->h) || brings_nothing(c, r, m));
        same_a = same_a && (op->kernel == MOE_K_GROUPED_GEMM ||
                            moe_check_is_vector(c, r, m->h.layer, op->dims[0], op->dims[2]));
        same_b = same_b && moe_check_is_vector(c, r, m->h.layer, op->dims[2], op->dims[1]);
    }
    if (idle) {
        m->did = like->did;
        m->trans = like->trans;
    } else if (product) {
        const int same = same_a * 2 + same_b;
        m->trans = (m->trans & ~same) | (like->trans & same);
    }
}

/* What is done with gradients and norms behind the backward pass is followed element by element. */
static bool gradients_tell(const struct moe_checker *c, const struct moe_here *h)
{
    if (h->block->pass <= MOE_BACKWARD) return false;
    for (int i = 0; i < h->op->n_writes; i++)
        if (!moe_check_is_summed(c, h->op->writes[i])) return false;
    return true;
}

/* Numbers of all operations of a role; returns how many. like [n_like]: of another rank. */
static int number(const struct moe_checker *c, int rank, bool same_tokens, const struct made *like,
                  int n_like, struct made **out)
{
    const struct moe_role *y = &c->s->roles[c->s->role_of[rank]];
    uint64_t *slots = moe_alloc(c->n_slots, sizeof *slots);
    int n = 0, cap = 0, from = 0;
    *out = NULL;
    for (size_t i = 0; i < c->n_slots; i++) slots[i] = moe_check_mix(2, i); /* what the step starts from */
    for (int k = 0; k < y->n_instances; k++) {
        struct made m = {.h = {.block_id = y->itinerary[k].block, .layer = y->itinerary[k].layer}};
        m.h.block = &y->blocks[m.h.block_id];
        for (int o = 0; o < m.h.block->n_ops; o++) {
            m.h.op = &m.h.block->ops[o];
            if (m.h.op->kind == MOE_HOST_SYNC || gradients_tell(c, &m.h)) continue;
            take_for(c, c->s->role_of[rank], &m, find(&m, like, n_like, &from));
            m.number = apply(c, rank, &m, same_tokens, slots);
            *out = moe_grow(*out, &cap, n + 1, sizeof **out);
            (*out)[n++] = m;
        }
    }
    free(slots);
    return n;
}

/* The first of those with the most tokens: of none, nothing shows. */
static int fullest_of(const struct moe_schedule *s, int role)
{
    int rank = -1;
    for (int r = 0; r < s->n_ranks; r++)
        if (s->role_of[r] == role && (rank < 0 || s->tokens[r] > s->tokens[rank])) rank = r;
    return rank;
}

/* The class that the atlas has for what this operation computes. */
static int class_of(const struct moe_op *op)
{
    if (op->kind != MOE_KERNEL) return 14;
    switch (op->kernel) {
    case MOE_K_AUX_LOSS:
    case MOE_K_AUX_LOSS_BWD: return 7;
    case MOE_K_CLIP: return 5;
    case MOE_K_SGD:
    case MOE_K_ADAMW: return 16;
    case MOE_K_LIMIT: return 8;
    default: return 14;
    }
}

/* The first of a that makes another number than the one of b with its label; NULL: none. */
static const struct made *differing(const struct made *a, int n_a, const struct made *b, int n_b)
{
    for (int i = 0, j = 0; i < n_a; i++) {
        const struct made *twin = find(&a[i], b, n_b, &j);
        if (twin && a[i].number != twin->number) return &a[i];
    }
    return NULL;
}

static void compare(struct moe_checker *c, int role, int like)
{
    const struct moe_schedule *s = c->s;
    const int here = fullest_of(s, role), there = fullest_of(s, like);
    const bool same_tokens = s->tokens[here] == s->tokens[there];
    struct made *a, *b;
    int n_a = number(c, here, same_tokens, NULL, 0, &a), n_b = number(c, there, same_tokens, NULL, 0, &b);
    const struct made *wrong = differing(a, n_a, b, n_b);
    if (wrong) { /* rare: then it is asked what may be taken for what */
        struct made *raw = a;
        free(b);
        n_b = number(c, there, same_tokens, raw, n_a, &b);
        n_a = number(c, here, same_tokens, b, n_b, &a);
        free(raw);
        wrong = differing(a, n_a, b, n_b);
    }
    for (int r = 0; r < s->n_ranks && wrong; r++)
        if (s->role_of[r] == role)
            moe_check_verdict(
                c, class_of(wrong->h.op), r, moe_check_label(&wrong->h),
                "computes another function than on rank %d, where the same parameters are trained", there);
    free(a);
    free(b);
}

void moe_check_alike(struct moe_checker *c)
{
    const struct moe_schedule *s = c->s;
    int *n = moe_alloc((size_t)s->n_roles, sizeof *n);
    for (int r = 0; r < s->n_ranks; r++) n[s->role_of[r]]++;
    for (int i = 0; i < s->n_roles; i++) {
        int most = i;
        for (int k = 0; k < s->n_roles; k++)
            if (s->roles[k].first_layer == s->roles[i].first_layer &&
                s->roles[k].n_micro == s->roles[i].n_micro &&
                (n[k] > n[most] || (n[k] == n[most] && k < most)))
                most = k;
        if (i != most && n[i]) compare(c, i, most);
    }
    free(n);
}
