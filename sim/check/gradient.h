/* gradient - gradients, norms and parameters as vectors of contributions, for check.
 *
 * An element of a gradient on a rank is a sum of contributions, each with a coefficient: "what operation o
 * of rank r computed for element i of tensor t". Backward kernels add one, reductions add the vectors of
 * the members, scale divides, copies and gathers move. The gradient is right when every contribution of
 * every replica to that element is in it once, with coefficient 1 / divisor of the rank that it comes
 * from; what an operation computes from no row at all is 0, and may be missing. An element of a parameter
 * is right when it is its own, updated once.
 * Vectors are shared between ranks, and between neighbouring elements: an all-reduce over n ranks makes
 * one. */
#ifndef MOE_GRADIENT_H
#define MOE_GRADIENT_H

#include "sim/schedule.h"

struct moe_gradients;
struct moe_gradients *moe_gradients_new(const struct moe_schedule *s);
void moe_gradients_free(struct moe_gradients *g);

/* Elements of a slot of a buffer on a rank; only gradients, norms and parameters hold anything. */
struct moe_cell {
    int buffer, slot, rank;
    int64_t begin, n; /* n: MOE_CELL_ALL: all from 0 on, however many */
};
#define MOE_CELL_ALL INT64_MAX
/* `op` of block `block` wrote a contribution into a cell; again for each micro-batch. */
void moe_gradient_contribute(struct moe_gradients *g, struct moe_cell to, int block, const struct moe_op *op,
                             bool accumulate);
/* The sum of the cells from [n]: into each of the cells to [n], or (part [n]) one part after the other into
 * one of them, by `op`. Cost: O(entries * log entries) for each run of elements that hold the same. */
void moe_gradient_sum(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to, int n,
                      const int64_t *part, const struct moe_op *op);
/* The cells from [n], one behind the other, into each of the cells to [n]. */
void moe_gradient_gather(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to,
                         int n);
/* `op` divides what one cell holds into another, or into itself. */
void moe_gradient_divide(struct moe_gradients *g, struct moe_cell from, struct moe_cell to, double divisor,
                         const struct moe_op *op);
/* It is clipped by the norm; it is copied; it becomes the empty sum. */
void moe_gradient_clip(struct moe_gradients *g, struct moe_cell from, struct moe_cell to);
void moe_gradient_copy(struct moe_gradients *g, struct moe_cell from, struct moe_cell to);
void moe_gradient_zero(struct moe_gradients *g, struct moe_cell to);

/* Elements of a parameter are updated. Whether all are is known without this where no part ever was. */
void moe_gradient_update(struct moe_gradients *g, struct moe_cell of, bool part);
/* Was any part of the parameter updated, or copied? How many elements are not its own, updated once; of.n
 * says how many there are. */
bool moe_gradient_in_parts(const struct moe_gradients *g, struct moe_cell of);
int64_t moe_gradient_stale(const struct moe_gradients *g, struct moe_cell of);

/* Whose gradient a cell holds: the buffer and slot where it was computed, and the element that lies at the
 * cell's begin. Result: false when it holds none. */
bool moe_gradient_owner(const struct moe_gradients *g, struct moe_cell in, struct moe_cell *out);

/* How the gradient in a cell differs from what parameter `p` requires in a slot, whose element `first` should
 * lie at the cell's begin; env: what divisors are. Nothing missing or extra and a factor of 1: right. Of
 * several runs of elements the first that is not right or was not clipped `clips` times. Cost: what the first
 * rank asks of a vector is kept for those that share it. */
struct moe_gradient_fault {
    int missing, extra; /* contributions that should be there and are not; that should not be there */
    int missing_ranks, missing_rank; /* how many ranks' contributions are missing, and one of them */
    int extra_ranks, extra_rank;     /* whose contributions should not be there */
    double factor;   /* coefficient found / required, of one that is wrong; may be 0, infinite or NaN */
    int factor_rank; /* a rank whose contribution has it */
    bool uneven;     /* others have another */
    double divisor;  /* by which the last division divided, 0: there was none */
    const struct moe_op *divided_in;
    const struct moe_op *summed_in;  /* the last sum, NULL: there was none */
    const struct moe_op *doubled_in; /* the last sum of ranks that had one contribution more than once */
    int clips;                       /* how often it was clipped */
};
static inline bool moe_gradient_is_right(const struct moe_gradient_fault *f)
{
    return !f->missing && !f->extra && f->factor == 1;
}
struct moe_gradient_fault moe_gradient_judge(struct moe_gradients *g, struct moe_env env,
                                             const struct moe_param *p, int slot, struct moe_cell in,
                                             int64_t first, int clips);

/* Does an operation sum over no row at all on a rank, so that what it contributes is 0? */
bool moe_gradient_takes_nothing(const struct moe_schedule *s, struct moe_env env, const struct moe_op *op,
                                int rank, int layer);

#endif
