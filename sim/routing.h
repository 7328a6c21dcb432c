/* routing - which experts the tokens of a step go to: as counts, and, when a trace holds it, token by token.
 *
 * Sizes met: 2 to 60 layers, 4 to 16,384 ranks, 8 to 256 experts. */
#ifndef MOE_ROUTING_H
#define MOE_ROUTING_H

#include "sim/base.h"

struct moe_routing {
    int n_layers, n_ranks, n_experts, top_k;
    int n_stages, n_micro; /* of the pipeline that it was drawn for, or 1 */
    int64_t *tokens;       /* [R] local tokens */
    int32_t *counts;       /* [L, R, E] rows that the tokens of rank r send to expert e in layer l */
    int32_t *peers;        /* [L, R, n_peers] see moe_routing_peers; NULL: drawn again by those who ask */
    int n_peers;           /* sum of the sizes that a group may have, less than E */
    double skew;           /* it was drawn with these */
    uint64_t seed;
};

/* Draws a routing: every token takes K different experts, drawn one after the other without replacement with
 * weights 1 / (1 + place)^skew, where the order of the experts is a permutation of its own per layer.
 *   tokens  [R]     local tokens
 *   skew            0: uniform; 1: Zipf
 * Result: sum over e of counts[l, r, e] = tokens[r] * K; a function of the arguments alone.
 * Cost: O(L * R * T * K), 4 to 8 ns each, with a factor E where one expert has nearly all the weight. */
struct moe_routing *moe_routing_generate(int n_layers, int n_ranks, int n_experts, int top_k,
                                         const int64_t *tokens, double skew, uint64_t seed);
/* The same of a pipeline: its stages are consecutive ranks and layers, and layers of n_micro micro-batches
 * follow each other. In the layers of other stages a rank draws nothing, and its counts are 0. */
struct moe_routing *moe_routing_generate_stages(int n_layers, int n_ranks, int n_experts, int top_k,
                                                const int64_t *tokens, double skew, uint64_t seed,
                                                int n_stages, int n_micro);
struct moe_routing *moe_routing_new(int n_layers, int n_ranks, int n_experts, int top_k);
void moe_routing_free(struct moe_routing *r);
/* Counts more tokens of (layer, rank) of a routing that was not drawn. expert [n_tokens, K], each different
 * within a token, all in 0..E-1. */
void moe_routing_add(struct moe_routing *r, int layer, int rank, int64_t n_tokens, const int32_t *expert);

static inline int32_t *moe_routing_counts(const struct moe_routing *r, int layer, int rank)
{
    return r->counts + ((size_t)layer * (size_t)r->n_ranks + (size_t)rank) * (size_t)r->n_experts;
}

/* out [P]: for each member of a group of P ranks over which the experts are split in order, the tokens of
 * `rank` that have any expert of it. Aborts unless P divides both experts and ranks. Counts by expert do not
 * tell this. Cost: O(P); of a routing that was drawn, that of drawing the tokens of (layer, rank). */
void moe_routing_peers(const struct moe_routing *r, int layer, int rank, int P, int32_t *out);

/* Step `step` of a trace store (-1: the last step that every rank committed).
 * Errors: MOE_EINPUT when the trace has no such complete step, naming those it has; when what it holds is not
 * of its own layers, ranks, experts and top_k; when a rank has other tokens in a layer of its stage than in
 * the rest of them, or any in a layer of another stage. */
struct moe_store;
int moe_routing_load(struct moe_store *store, int64_t step, struct moe_routing **out);

#endif
