/* gradient - gradients and norms as vectors of contributions, for check.
 *
 * A gradient on a rank is a sum of contributions, each with a coefficient: "what operation o of rank r
 * computed". Backward kernels add one, all-reduce adds the vectors of the members, scale divides. The
 * gradient is right when every contribution of every replica is in it once, with coefficient 1 / divisor of
 * the rank that it comes from.
 * Vectors are shared between ranks: an all-reduce over n ranks makes one. */
#ifndef MOE_GRADIENT_H
#define MOE_GRADIENT_H

#include "sim/schedule.h"

struct moe_gradients;
struct moe_gradients *moe_gradients_new(const struct moe_schedule *s);
void moe_gradients_free(struct moe_gradients *g);

struct moe_cell { /* a slot of a buffer on a rank; only gradients and norms hold anything */
    int buffer, slot, rank;
};
/* `op` of block `block` wrote a contribution into a cell; again for each micro-batch. */
void moe_gradient_contribute(struct moe_gradients *g, struct moe_cell to, int block, const struct moe_op *op,
                             bool accumulate);
/* An all-reduce (sum) of the cells from [n] into the cells to [n]. Cost: O(entries * log entries). */
void moe_gradient_sum(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to, int n);
/* `op` divides what one cell holds into another, or into itself. */
void moe_gradient_divide(struct moe_gradients *g, struct moe_cell from, struct moe_cell to, double divisor,
                         const struct moe_op *op);
/* It is clipped by the norm; it becomes the empty sum. */
void moe_gradient_clip(struct moe_gradients *g, struct moe_cell from, struct moe_cell to);
void moe_gradient_zero(struct moe_gradients *g, struct moe_cell to);

/* How the gradient on a rank differs from what parameter `p` requires; env: what divisors are. Nothing
 * missing or extra and a factor of 1: right. Cost: what the first rank asks of a vector is kept for those
 * that share it. */
struct moe_gradient_fault {
    int missing, extra; /* contributions that should be there and are not; that should not be there */
    int missing_rank;   /* a rank whose contribution is missing */
    int extra_rank;     /* a rank whose contribution should not be there */
    double factor;      /* coefficient found / required, of one that is wrong; may be 0, infinite or NaN */
    int factor_rank;    /* a rank whose contribution has it */
    bool uneven;        /* others have another */
    double divisor;     /* by which the last division divided, 0: there was none */
    const struct moe_op *divided_in;
    int clips; /* how often it was clipped */
};
struct moe_gradient_fault moe_gradient_judge(struct moe_gradients *g, struct moe_env env,
                                             const struct moe_param *p, int slot, int rank);

#endif
