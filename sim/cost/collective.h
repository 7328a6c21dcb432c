/* collective - the flows of a collective, from the bytes of its members.
 *
 *   alltoall       one flow per pair, all launched together.
 *   allgather      a ring: block i starts at member i and is passed on n - 1 times. The one link that it does
 *                  not cross leads back to i, so member i sends on all blocks but that of the next.
 *   reducescatter  the same ring with sums: block i starts at the member after i and ends at i. The one link
 *                  that it does not cross leads from i, so member i sends on all blocks but its own.
 *   allreduce      both, one after the other, with equal blocks; or through the switches (NVLS): each member
 *                  sends all of it once, and its part of the sum for all.
 * In a ring every block is cut so finely that all links are busy from start to end, so a member's part is one
 * flow. Over several nodes NCCL may run trees, NVLS with trees, or PAT instead: collective_nodes.h.
 * Machines whose topology has a block `nccl` take the latencies and rates of nccl.h on one node; over several
 * the latency, protocol and channels' rates of what NCCL runs there. Else a flow takes its path's latency,
 * once or for each step of a ring. */
#ifndef MOE_COLLECTIVE_H
#define MOE_COLLECTIVE_H

#include "sim/network.h"

struct moe_moved {
    enum moe_collective kind;
    int n;
    const int *rank;      /* [n] members, in order */
    const int64_t *bytes; /* alltoall [n, n]: from, to; allreduce [1]: the buffer; else [n]: each block */
    int type_bytes;       /* of an element */
    bool is_float;
};

/* out: replaced, its memory used again; free(out->flow) in the end. Flows of no bytes only where a latency
 * ends a member's part. Cost: O(n^2) for alltoall, O(n x NICs of a node) else. */
void moe_collective_plan(const struct moe_topo *t, const struct moe_moved *m, struct moe_plan *out);

/* Half of the interval that holds 80 % of measurements of such a collective, as a logarithm; 0: not known. */
double moe_collective_error(const struct moe_topo *t, const struct moe_moved *m);

/* Seconds on an idle machine when all blocks (pairs, self included) are `bytes`: the closed form of the plan,
 * equal to it within 1 ps a flow. Members are ranks 0 to n - 1, of one node, or of nodes that are full. */
double moe_collective_s(const struct moe_topo *t, enum moe_collective kind, int n, int64_t bytes,
                        int type_bytes, bool is_float);

#endif
