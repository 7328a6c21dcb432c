/* empty.c - what a rank leaves out of its backward pass when no row reached its experts (scenario.h).
 *
 * Autograd runs what hangs on the result alone: where a framework returns something else for no rows, the
 * collectives of the dispatch, or those of the combine too, have no backward on that rank. */
#include "sim/lower/lower.h"

/* The first product of the experts: what comes before it is the dispatch. */
static const struct moe_op *first_product(const struct moe_block *block)
{
    int i = 0;
    while (block->ops[i].kind != MOE_KERNEL || block->ops[i].kernel != MOE_K_GROUPED_GEMM) i++;
    return &block->ops[i];
}

int moe_lower_empty(struct moe_builder *b, int forward, int backward, int mode)
{
    const struct moe_role *role = &b->s->roles[b->role];
    struct moe_op first = *first_product(&role->blocks[forward]);
    int rows = moe_sum(b, first.group);
    for (int i = 0; i < role->blocks[backward].n_ops && mode != MOE_EMPTY_SKIPS_WEIGHTS; i++) {
        struct moe_op *op = &role->blocks[backward].ops[i];
        bool undoes = op->kind == MOE_COLLECTIVE && op->serves && op->of_block == forward;
        if (undoes && (mode == MOE_EMPTY_DETACHES || op->of_id < first.id)) op->when = rows;
    }
    return rows;
}
