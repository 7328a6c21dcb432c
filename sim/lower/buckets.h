/* buckets - how a distributed optimizer lays gradients out: buckets that are reduce-scattered, of which each
 * rank then owns one part, updates those parameters' elements, and gathers them.
 *
 * As Megatron-LM does it: tensors in reverse order of the forward pass, so that a bucket is full as soon as
 * the backward pass has come so far; with padding each tensor starts at a multiple of 64 elements and each
 * bucket ends at one of lcm(ranks, 128). A tensor that is tied over stages may have a bucket of its own, so
 * that it is split alike on both stages. Where a framework's gradients lie in the bucket, here they are
 * copied there.
 * Source: facts/founding_cases.md A.3, Megatron-LM optimizer/param_layout.py. */
#ifndef MOE_BUCKETS_H
#define MOE_BUCKETS_H

#include "sim/lower/lower.h"

struct moe_bucket_rules {
    int64_t bucket_size; /* elements from which a bucket is closed; 0: there is one */
    bool separate_tied, pad;
};
struct moe_bucket_tensor {
    int64_t n; /* elements */
    bool tied;
    int bucket;    /* out */
    int64_t begin; /* out: in the bucket */
};

/* Lays tensors [n] out, in the order given, for `parts` ranks.
 *
 *   size [n]   out: elements of each bucket
 *
 * Result: how many buckets; every tensor lies in one, behind the tensor before it; a bucket holds no more
 * behind the one that made it as large as bucket_size. Cost: O(n). Errors: none. */
int moe_bucket_layout(const struct moe_bucket_rules *rules, int parts, int n,
                      struct moe_bucket_tensor *tensor, int64_t size[]);

/* One slot of a parameter and its gradient, as operations take it. */
struct moe_target {
    struct moe_param p; /* a copy: new buffers move the array */
    int layer;          /* -1: of none */
    struct moe_ref whole,
        own;              /* its gradient: what is summed, and what the rank scales, clips and updates by */
    struct moe_ref value; /* what the rank updates of the parameter */
    struct moe_ref state[2]; /* the optimizer's, where it is in parts */
    int n;                   /* elements of own (expression) */
    bool named;              /* its layer stands in names of operations */
};

struct moe_bucket {
    int step;        /* of the order: the reduce_scatter that it is for */
    int comm, parts; /* communicator (parts 1: none), ranks that share it */
    int complete;   /* layer behind whose backward pass it is full; -1: the embedding is in it, or no layer */
    int size, part; /* expressions, elements */
    int left;       /* elements that no rank owns */
    bool reduced;   /* in what was written so far */
    int grads, values, state[2]; /* buffers; state 0: the optimizer has none */
    int first;                   /* expression: where the rank's part begins */
};
struct moe_placed { /* in a bucket: one slot of a parameter */
    int param, layer, bucket;
    int64_t begin;
};
struct moe_buckets { /* of a stage */
    int n, n_placed;
    struct moe_bucket *bucket;
    struct moe_placed *placed;
};

/* Buckets of the stage that is being written, for every reduce_scatter of the order. */
void moe_buckets_make(struct moe_builder *b, const struct moe_lower_sync *sync, struct moe_buckets *out);
void moe_buckets_free(struct moe_buckets *buckets);
/* What operations take of a placed tensor, before or behind its bucket's reduce-scatter. of_layer: in a block
 * that runs for the tensor's layer. */
struct moe_target moe_bucket_target(struct moe_builder *b, const struct moe_buckets *buckets, int placed,
                                    bool of_layer);
/* Copies gradients into a bucket and reduce-scatters it in place. */
void moe_bucket_reduce(struct moe_builder *b, struct moe_buckets *buckets, int bucket);
/* Copies the rank's part of the parameters into a bucket, gathers it in place, copies them out. */
void moe_bucket_gather(struct moe_builder *b, struct moe_buckets *buckets, int bucket, int comm);

#endif
