/* agreement.c - see internal.h.
 *
 * Sizes that agree for the routing at hand may not for the next: those that a rank makes of its own counts,
 * and that no other rank is told. A count by peer is told by an exchange, the largest over the group by an
 * all-reduce; what remains is said to be possible. Tokens are not counted: the scenario says them. The same
 * holds for whether a rank enters a collective at all. */
#include "sim/check/internal.h"

/* Does an all-reduce over this communicator write the buffer? */
static bool is_agreed(const struct moe_role *role, int buffer, int comm)
{
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            if (op->kind == MOE_COLLECTIVE && op->collective == MOE_ALLREDUCE && op->comm == comm &&
                op->writes[0].buffer == buffer)
                return true;
        }
    return false;
}

/* A symbol in the expression that each rank counts for itself, or -1. */
static int own_count(const struct moe_schedule *s, const struct moe_role *role, int expr, int comm)
{
    const struct moe_expr *e = &s->exprs[expr];
    switch (e->op) {
    case MOE_EXPR_CONST:
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return -1;
    case MOE_EXPR_SYM:
    case MOE_EXPR_SUM: {
        const struct moe_symbol *y = &s->symbols[e->a];
        if (y->buffer < 0) return y->expr ? own_count(s, role, y->expr, comm) : -1;
        return y->scope == MOE_SCOPE_PEER || is_agreed(role, y->buffer, comm) ? -1 : e->a;
    }
    default: {
        int of_a = own_count(s, role, e->a, comm);
        return of_a >= 0 ? of_a : own_count(s, role, e->b, comm);
    }
    }
}

/* A symbol of the expression that is read from a buffer, or -1: each rank has another value of it. */
static int first_symbol(const struct moe_schedule *s, int expr)
{
    const struct moe_expr *e = &s->exprs[expr];
    switch (e->op) {
    case MOE_EXPR_CONST:
    case MOE_EXPR_PLACE:
    case MOE_EXPR_OTHER: return -1;
    case MOE_EXPR_SYM:
    case MOE_EXPR_SUM: return s->symbols[e->a].buffer >= 0 ? e->a : -1;
    default: {
        int of_a = first_symbol(s, e->a);
        return of_a >= 0 ? of_a : first_symbol(s, e->b);
    }
    }
}

/* Ranks of the role whose group has others. */
static void say(struct moe_checker *c, int role, const struct moe_here *h, int check_class, const char *what,
                int symbol)
{
    const struct moe_schedule *s = c->s;
    const struct moe_comm *comm = &s->comms[h->op->comm];
    for (int r = 0; r < s->n_ranks; r++)
        if (s->role_of[r] == role && moe_group_size(comm, comm->group_of[r]) > 1)
            moe_check_possible(c, check_class, r, moe_check_label(h),
                               "%s from %s, which each rank of communicator %s counts for itself: "
                               "that they agree is by chance of this routing",
                               what, s->buffers[s->symbols[symbol].buffer].name, comm->name);
}

void moe_check_agreement(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    for (int n = 0; n < y->n_instances; n++) {
        struct moe_here h = {.block_id = y->itinerary[n].block, .layer = y->itinerary[n].layer};
        h.block = &y->blocks[h.block_id];
        for (int o = 0; o < h.block->n_ops; o++) {
            h.op = &h.block->ops[o];
            if (h.op->kind != MOE_COLLECTIVE) continue;
            int symbol = h.op->when ? first_symbol(c->s, h.op->when) : -1;
            if (symbol >= 0) say(c, role, &h, 2, "whether ranks enter it follows", symbol);
            symbol = own_count(c->s, y, h.op->send, h.op->comm);
            /* Receivers that count by peer were told. */
            if (symbol < 0 || own_count(c->s, y, h.op->recv, h.op->comm) < 0) continue;
            say(c, role, &h, 1, "its sizes follow", symbol);
        }
    }
}
