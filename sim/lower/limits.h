/* limits - what the libraries and kernels of a framework take; check refuses what is above.
 *
 *   limits:
 *     rank_factor: 1.5   # rows that a rank has memory for, times its own tokens x top_k, without a fraction
 *                        # (Megatron: moe_expert_rank_capacity_factor)
 *     row_multiple: 16   # rows of an expert that a grouped product takes: multiples of this
 *     cuda_graph: true   # forward and backward passes are captured in a CUDA graph: no host sync in them
 *   max_dispatch_tokens: 128   # tokens of a rank that buffers of a fixed size have room for (DeepEP:
 *                              # num_max_dispatch_tokens_per_rank), which decides their layout; a list: of
 *                              # each user of the buffers (CUDA graphs, ranks), who must all say the same
 *   padding: {tokens: 16, masked: false}
 *
 * padding: so many of each rank's tokens_per_rank only fill up its batch. masked: the router sends them to no
 * expert; they are then left out of the whole step. Without it they take rows, capacity and part of the
 * load-balancing loss like others, which check refuses. capture has none of these limits. */
#ifndef MOE_LIMITS_H
#define MOE_LIMITS_H

#include "sim/base.h"

struct moe_yaml;

enum { MOE_BUFFER_USERS = 64 };
struct moe_limits {
    int n_users;
    int64_t max_tokens[MOE_BUFFER_USERS]; /* [n_users]; none: as many as there are */
    double rank_factor;                   /* 0: no such limit */
    int64_t row_multiple;                 /* 0: any number */
    int cuda_graph;
};
struct moe_padding {
    int64_t tokens;
    int masked;
};

/* Errors: MOE_EINPUT "file:line: ..." for unknown keys and numbers out of range. */
int moe_limits_read(const struct moe_yaml *node, struct moe_limits *out);
/* Reads max_dispatch_tokens; the rest of *out stays. */
int moe_dispatch_tokens_read(const struct moe_yaml *node, struct moe_limits *out);
/* The largest number of max_tokens; 0: none. */
int64_t moe_limits_most(const struct moe_limits *limits);
int moe_padding_read(const struct moe_yaml *node, struct moe_padding *out);

#endif
