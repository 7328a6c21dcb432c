/* check_internal - what the files of check share: check.c runs the ranks, check_collective.c compares what
 * they meet with, check_gradient.c follows gradients, norms and updates. */
#ifndef MOE_CHECK_INTERNAL_H
#define MOE_CHECK_INTERNAL_H

#include "sim/check.h"
#include "sim/gradient.h"
#include "sim/values.h"

struct moe_checker {
    const struct moe_schedule *s;
    struct moe_values *values;
    struct moe_gradients *gradients;
    struct moe_env device, host;
    struct moe_verdicts *out;
    struct moe_place *place; /* [R] */
    int *first_slot;         /* [n_buffers] */
    size_t n_slots;
    unsigned char *written; /* [R, n_slots] */
    /* [R, n_slots] of a parameter: how often it was updated; of a gradient: how often a norm took it when it
     * was right. Stops at 255. */
    unsigned char *times;
    bool stop; /* a collective cannot complete */
};

struct moe_here { /* the operation a rank stands at */
    const struct moe_block *block;
    const struct moe_op *op; /* NULL: the rank is done */
    int block_id, layer;
};

/* The place in `written` and `times`. */
static inline size_t moe_check_slot(const struct moe_checker *c, int rank, struct moe_ref ref, int layer)
{
    return (size_t)rank * c->n_slots + (size_t)(c->first_slot[ref.buffer] + moe_slot(c->s, ref, layer));
}

struct moe_label {
    char text[2 * MOE_NAME];
};
struct moe_label moe_check_label(const struct moe_here *h);

/* Adds a verdict, or the rank to the one that says the same of this operation. */
void moe_check_verdict(struct moe_checker *c, int check_class, int rank, const char *op, const char *format,
                       ...) __attribute__((format(printf, 5, 6)));

/* All members of a group stand at a collective of this communicator: h [group size]. Compares what they issue
 * and moves the integers and the gradients; c->stop when it cannot complete. */
void moe_check_collective(struct moe_checker *c, const struct moe_here *h, int comm, int group);
/* Number of parts that a rank sends or receives: one for each peer, or 1. */
int moe_check_parts(const struct moe_checker *c, int rank, const struct moe_op *op, bool sends);

/* A kernel runs on a rank; a collective completes on ranks [n], where they stand at h [n]. */
void moe_check_kernel(struct moe_checker *c, int rank, const struct moe_here *h);
void moe_check_sum(struct moe_checker *c, const struct moe_here *h, const int *ranks, int n);
bool moe_check_is_summed(const struct moe_checker *c, struct moe_ref ref); /* gradients and norms */
/* Every operation of a rank has its backward, and every parameter was updated and measured. */
void moe_check_complete(struct moe_checker *c, int rank);

#endif
