/* transport - the flows of a collective as its transport moves them (schedule.h).
 *
 * NCCL: collective.h. DeepEP: deepep.h, with the parameters of the topology. How many different tokens a rank
 * has for a node says the routing, when the group has as many members on each of its nodes; else, and for
 * counts, as many bytes go to a node as to all of its ranks, which is the most that there can be.
 *
 * DeepEP's low-latency kernels: deepep.h; those of an NVLink domain, in which all ranks of the group must be:
 * onesided.h. Where the topology says their numbers.
 *
 * A group of one rank, and ranks that are processes of a host, move everything as NCCL's collectives
 * would. */
#ifndef MOE_TRANSPORT_H
#define MOE_TRANSPORT_H

#include "sim/cost/collective.h"
#include "sim/values.h"

/* s: of which the collective is; values: of the routing, NULL: not known; layer: the collective's. out:
 * replaced, as by moe_collective_plan; error: out, half of the interval that holds 80 % of measurements, as a
 * logarithm, 0: not known. Errors: MOE_EINPUT when the machine cannot run it. Cost: O(n^2), and what
 * moe_values_peers takes. */
int moe_transport_plan(const struct moe_topo *t, enum moe_transport by, const struct moe_moved *m,
                       const struct moe_schedule *s, struct moe_values *values, int layer,
                       struct moe_plan *out, double *error);

#endif
