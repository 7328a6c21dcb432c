/* values - the integer side of a schedule: what the count buffers hold on every rank, given a routing.
 *
 * check and simulate run kernels and collectives on int64 buffers for real, since sizes depend on them.
 * Capacities follow from counts: LARGEST and SET are computed. A COUNTS buffer, and what SPREAD counts, get
 * the routing of (layer, rank) when a kernel writes them; collectives move int64 content as MPI would;
 * nothing is known before. Memory: 4 bytes per element of int64 buffers, rank and layer, where they fit (else
 * 8); what all members of a group get is kept once for them. */
#ifndef MOE_VALUES_H
#define MOE_VALUES_H

#include "sim/routing.h"
#include "sim/schedule.h"

struct moe_values;
struct moe_values *moe_values_new(const struct moe_schedule *s, const struct moe_routing *r);
void moe_values_free(struct moe_values *v);

/* A kernel ran on a rank. */
void moe_values_kernel(struct moe_values *v, const struct moe_op *op, int rank, int layer);
/* A collective on int64 data completed in `group` of communicator `comm`; ops [group size], as each member
 * issued it (sizes already agreed). Other element types are ignored. */
void moe_values_collective(struct moe_values *v, const struct moe_op *const *ops, int comm, int group,
                           int layer);
/* A host sync ran on a rank: the symbols of the buffers it reads become known there. */
void moe_values_host_sync(struct moe_values *v, const struct moe_op *op, int rank, int layer);

/* Symbols as the host of each rank knows them (MOE_UNKNOWN before the host sync, but where it need not
 * know)... */
struct moe_env moe_values_host(struct moe_values *v);
/* ...and as the device knows them (kernels need no host sync). */
struct moe_env moe_values_device(struct moe_values *v);

/* The sum of an int64 buffer, as the device knows it. */
int64_t moe_values_total(const struct moe_values *v, struct moe_ref ref, int rank, int layer);
/* [P]: moe_routing_peers of (layer, rank), found once and kept; NULL without a routing, or where P does not
 * divide experts and ranks. */
const int32_t *moe_values_peers(struct moe_values *v, int rank, int layer, int P);

/* Rows of one expert that LIMIT lets leave a rank. When several groups of tokens have a capacity of their
 * own, counts cannot say how the rows spread over them: an upper bound. MOE_UNKNOWN when the capacity is. */
int64_t moe_values_limit(struct moe_values *v, const struct moe_op *op, int rank, int layer);

/* What capacity rules make of the rows that tokens chose, over all ranks and layers of the step: `dropped` of
 * `chosen` stay behind, `padded` empty ones travel besides. Where tokens have several capacities (see LIMIT)
 * counts cannot say how rows spread over them: dropped is a lower bound, dropped and padded still make the
 * number that travels. Cost: O(L * R * E). */
struct moe_kept {
    int64_t chosen, dropped, padded;
};
struct moe_kept moe_values_kept(const struct moe_schedule *s, const struct moe_routing *r);

#endif
