/* lower - from a scenario to the schedule of one training step: the model, its layout, its dispatcher.
 *
 * The model: byte embedding; L layers of a mixture of experts with a residual; an output head tied to the
 * embedding; cross entropy summed over tokens; gradients summed over the right groups and divided by the
 * number of tokens of the world; SGD. A dispatcher is one file with two functions and one row of the table in
 * lower.c. */
#ifndef MOE_LOWER_H
#define MOE_LOWER_H

#include "sim/builder.h"
#include "sim/scenario.h"

/* What a dispatcher is given. References are to buffers with one slot a layer. */
struct moe_layer {
    struct moe_ref x;                          /* [T, H] input of the layer */
    struct moe_ref y;                          /* [T, H] out: x + sum over k of prob * expert's row */
    struct moe_ref prob, expert, slot, counts; /* of TOPK */
    struct moe_ref w1, w2;                     /* experts of this rank: [e, H, 2F], [e, F, H] */
    int T, H, F, K, E;                         /* expressions */
    int n_layers, n_experts, ep_size, ep_comm; /* numbers */
    enum moe_type type;
};

/* Writes the operations from (x, prob, expert, slot, counts) to y into the present block, in between calling
 * moe_lower_experts with the rows that reached this rank. The backward pass follows by itself. */
struct moe_dispatcher {
    const char *name;
    void (*forward)(struct moe_builder *b, const struct moe_layer *m);
};

/* The experts: rows [n, H] by local expert, `group` the symbol with each expert's rows; returns rows [n, H].
 */
struct moe_ref moe_lower_experts(struct moe_builder *b, const struct moe_layer *m, struct moe_ref rows, int n,
                                 int group);

void moe_alltoall(struct moe_builder *b, const struct moe_layer *m); /* lower_alltoall.c */

/* Blocks of the gradient sum over each parameter's replicas, its scaling and the update: per layer for
 * parameters of layers, once for the others. lower_sync.c */
void moe_lower_sync(struct moe_builder *b, double learning_rate);

/* Errors: MOE_EINPUT for an unknown dispatcher, with the nearest known one. */
int moe_lower(const struct moe_scenario *sc, struct moe_schedule **out);
/* The same with a dispatcher of the caller's own. */
struct moe_schedule *moe_lower_with(const struct moe_scenario *sc, const struct moe_dispatcher *dispatcher);

#endif
