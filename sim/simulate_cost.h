/* simulate_cost - what one operation asks of the machine: a kernel's time, a collective's flows.
 *
 * Kernels are rooflines: the slower of arithmetic and memory, on cores their sum (topology.h). What the flows
 * of a collective are says collective.h. */
#ifndef MOE_SIMULATE_COST_H
#define MOE_SIMULATE_COST_H

#include "sim/cost/collective.h"
#include "sim/schedule.h"
#include "sim/values.h"

/* An operation of a rank, and what its sizes are. */
struct moe_asked {
    const struct moe_schedule *s;
    struct moe_env env;
    const struct moe_block *block;
    const struct moe_op *op;
    int rank, layer;
    struct moe_values *values; /* whose routing tells how tokens spread over nodes; NULL: that is not known */
};

/* *out: on a core of its own. Errors of both: MOE_EVERDICT when a size is unknown. */
int moe_kernel_time(const struct moe_asked *asked, const struct moe_topo *t, moe_ps *out);

/* The flows of the collective that `first`, a member, is in; ops [group size] as each
 * member issued it, all of one kind and type. *out: replaced, its memory used again; free(out->flow) in the
 * end. Errors: MOE_EVERDICT also when members do not agree on a size. Cost: O(n^2) evaluations of sizes, O(n)
 * for allreduce. */
/* error: out, as of moe_collective_error. */
int moe_asked_plan(const struct moe_asked *first, const struct moe_topo *t, const struct moe_op *const *ops,
                   struct moe_plan *out, double *error);

#endif
