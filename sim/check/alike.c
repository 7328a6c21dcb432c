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

static uint64_t of_kernel(const struct moe_checker *c, int rank, const struct moe_here *h, bool same_tokens)
{
    const struct moe_op *op = h->op;
    const struct moe_kernel_shape *k = &c->shapes[op->kernel];
    uint64_t n = moe_check_mix(1, (uint64_t)op->kernel);
    if (k->uses & MOE_USES_FACTOR) n = moe_check_mix(n, of_double(op->factor));
    if (k->uses & MOE_USES_DECAY) n = moe_check_mix(n, of_double(op->decay));
    if (k->uses & MOE_USES_MODE) n = moe_check_mix(n, (uint64_t)op->mode);
    if (k->uses & MOE_USES_MODE && (op->mode & MOE_LIMIT_ORDER) == MOE_LIMIT_RANDOM)
        n = moe_check_mix(n, op->seed);
    if (k->uses & MOE_USES_TRANS) n = moe_check_mix(n, (uint64_t)(op->trans_a * 2 + op->trans_b));
    if (k->uses & MOE_USES_DIVISOR)
        n = moe_check_mix(moe_check_mix(n, of_factor(c, rank, op->divisor, h->layer)),
                          of_factor(c, rank, op->times, h->layer));
    for (int i = 0; i < op->n_dims && op->kernel != MOE_K_SELECT && same_tokens; i++)
        if (k->free_dims >> i & 1 && !is_place(op, i))
            n = moe_check_mix(n, of_expr(c, rank, op->dims[i], h->layer));
    return n;
}

/* In a group of one, all of them copy. */
static uint64_t of_collective(const struct moe_checker *c, int rank, const struct moe_op *op)
{
    const struct moe_comm *m = &c->s->comms[op->comm];
    if (moe_group_size(m, m->group_of[rank]) == 1) return 3;
    return moe_check_mix(moe_check_mix(3, (uint64_t)op->collective), (uint64_t)op->comm);
}

/* Numbers of all operations of a role; returns how many. */
static int number(const struct moe_checker *c, int rank, bool same_tokens, struct made **out)
{
    const struct moe_role *y = &c->s->roles[c->s->role_of[rank]];
    uint64_t *slots = moe_alloc(c->n_slots, sizeof *slots);
    int n = 0, cap = 0;
    *out = NULL;
    for (size_t i = 0; i < c->n_slots; i++) slots[i] = moe_check_mix(2, i); /* what the step starts from */
    for (int k = 0; k < y->n_instances; k++) {
        struct moe_here h = {.block_id = y->itinerary[k].block, .layer = y->itinerary[k].layer};
        h.block = &y->blocks[h.block_id];
        for (int o = 0; o < h.block->n_ops; o++) {
            const struct moe_op *op = h.op = &h.block->ops[o];
            if (op->kind == MOE_HOST_SYNC) continue;
            uint64_t made =
                op->kind == MOE_KERNEL ? of_kernel(c, rank, &h, same_tokens) : of_collective(c, rank, op);
            for (int i = 0; i < op->n_reads; i++)
                made = moe_check_mix(made, slots[moe_check_slot(c, op->reads[i], h.layer)]);
            bool zero = op->kind == MOE_KERNEL && op->kernel == MOE_K_ZERO; /* adding to it is replacing it */
            uint64_t all = made;
            for (int i = 0; i < op->n_writes; i++) {
                uint64_t *slot = &slots[moe_check_slot(c, op->writes[i], h.layer)],
                         fresh = zero ? 0 : moe_check_mix(made, (uint64_t)i);
                if (op->writes[i].n)
                    fresh = moe_check_mix(*slot, fresh); /* by place: gradients tell whether rightly */
                *slot = op->writes[i].accumulate ? *slot + fresh : fresh;
                all = moe_check_mix(moe_check_mix(all, *slot),
                                    (uint64_t)moe_check_slot(c, op->writes[i], h.layer));
            }
            *out = moe_grow(*out, &cap, n + 1, sizeof **out);
            (*out)[n++] = (struct made){h, all};
        }
    }
    free(slots);
    return n;
}

static bool same_label(const struct made *a, const struct made *b)
{
    return a->h.layer == b->h.layer && a->h.op->id == b->h.op->id && a->h.block->pass == b->h.block->pass &&
           !strcmp(a->h.op->name, b->h.op->name) && !strcmp(a->h.block->name, b->h.block->name);
}

static int first_of(const struct moe_schedule *s, int role)
{
    for (int r = 0; r < s->n_ranks; r++)
        if (s->role_of[r] == role) return r;
    return -1;
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

static void compare(struct moe_checker *c, int role, int like, const struct made *a, int n_a,
                    const struct made *b, int n_b)
{
    for (int i = 0, j = 0; i < n_a; i++) {
        int tried = 0;
        while (tried < n_b && !same_label(&a[i], &b[j])) j = (j + 1) % n_b, tried++;
        if (tried == n_b || a[i].number == b[j].number) continue;
        for (int r = 0; r < c->s->n_ranks; r++)
            if (c->s->role_of[r] == role)
                moe_check_verdict(
                    c, class_of(a[i].h.op), r, moe_check_label(&a[i].h),
                    "computes another function than on rank %d, where the same parameters are trained",
                    first_of(c->s, like));
        return;
    }
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
        int here = first_of(s, i), there = first_of(s, most);
        if (i == most || here < 0) continue;
        struct made *a, *b;
        bool same_tokens = s->tokens[here] == s->tokens[there];
        int n_a = number(c, here, same_tokens, &a), n_b = number(c, there, same_tokens, &b);
        if (n_b) compare(c, i, most, a, n_a, b, n_b);
        free(a);
        free(b);
    }
    free(n);
}
