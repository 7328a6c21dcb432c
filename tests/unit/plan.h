/* plan - what every plan of flows must do, whichever model made it. */
#ifndef MOE_TEST_PLAN_H
#define MOE_TEST_PLAN_H

#include "sim/cost/number.h"
#include "sim/network.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

static inline uint64_t plan_seed(void)
{
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

/* Evenly in the logarithm. */
static inline double plan_between(double least, double most, uint64_t seed, uint64_t stream, uint64_t index)
{
    return least * pow(most / least, moe_uniform(seed, stream, index));
}

/* A machine laid out for the ranks, of kind switch, with copies that never are the limit. */
static inline struct moe_topo plan_machine(int ranks, int gpus_per_node, int nics_per_node, double intra_Bps,
                                           double nic_Bps)
{
    struct moe_topo t = {.gpus_per_node = gpus_per_node,
                         .nics_per_node = nics_per_node,
                         .memory_Bps = 1e18,
                         .intra_Bps = intra_Bps,
                         .nic_Bps = nic_Bps};
    moe_topo_build(&t, ranks);
    return t;
}

static inline void plan_close(struct moe_topo *t, struct moe_plan *plan)
{
    free(t->link_Bps);
    free(t->link_class);
    free(plan->flow);
}

/* Bytes from one rank to another. */
static inline int64_t plan_moved(const struct moe_plan *plan, int from, int to)
{
    int64_t bytes = 0;
    for (int i = 0; i < plan->n; i++)
        if (plan->flow[i].from == from && plan->flow[i].to == to) bytes += plan->flow[i].bytes;
    return bytes;
}

/* How long the busiest link needs, of which no plan can be faster. */
static inline double plan_bound_s(const struct moe_topo *t, const struct moe_plan *plan)
{
    double *bytes = moe_alloc((size_t)t->n_links, sizeof *bytes), bound_s = 0;
    for (int i = 0; i < plan->n; i++) {
        int path[MOE_PATH_MAX], n = moe_topo_path(t, plan->flow[i].from, plan->flow[i].to, path);
        for (int l = 0; l < n; l++) bytes[path[l]] += (double)plan->flow[i].bytes;
    }
    for (int l = 0; l < t->n_links; l++) bound_s = fmax(bound_s, bytes[l] / t->link_Bps[l]);
    free(bytes);
    return bound_s;
}

/* The plan takes as long as the closed form says, but for 1e-9 of it, picoseconds, and `rounded_s` for bytes
 * that are rounded; and no less than its links allow. */
static inline void plan_takes(const struct moe_topo *t, const struct moe_plan *plan, double closed_s,
                              double rounded_s)
{
    double plan_s = (double)moe_plan_time(t, plan) * 1e-12, bound_s = plan_bound_s(t, plan);
    if (!(fabs(plan_s - closed_s) <= 1e-9 * closed_s + 1e-11 + rounded_s))
        fail_msg("the plan takes %.12g s, the closed form says %.12g s", plan_s, closed_s);
    if (plan_s < bound_s - 1e-11) fail_msg("%.12g s is less than the links allow, %.12g s", plan_s, bound_s);
}

/* Each default is in the bounds of a fit, or 0, which says none. */
static inline void plan_defaults_fit(const struct moe_number *table, int n, const double *value)
{
    for (int i = 0; i < n; i++)
        if (value[i] != 0 && !(value[i] >= table[i].least && value[i] <= table[i].most))
            fail_msg("%s: %g is not in %g to %g", table[i].key, value[i], table[i].least, table[i].most);
}

#endif
