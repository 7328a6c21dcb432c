/* network - flows in flight: each moves its bytes at its max-min fair share of the links (share.h).
 *
 * Rates change only when a flow starts or ends; all changes of one instant are solved together, once. A flow
 * from a rank to itself is a copy on the device: no link, half of the memory rate (one read, one write).
 * Sizes met: 2 to 16,000 flows at once. */
#ifndef MOE_NETWORK_H
#define MOE_NETWORK_H

#include "sim/topology.h"

#define MOE_NEVER INT64_MAX

struct moe_flow {
    int from, to, tag; /* the caller's */
    int n_links, path[MOE_PATH_MAX];
    double rate, remaining_bytes; /* bytes/s since `since`; bytes left at `since` */
    moe_ps since, end;            /* end: at this rate */
};

struct moe_network {
    const struct moe_topo *topo; /* borrowed */
    moe_ps now, next;            /* next: first end; valid unless changed */
    bool changed;                /* since the rates were solved */
    int n, cap, n_ended, cap_ended;
    struct moe_flow *flow, *ended;       /* in flight, in order of their start; ended last */
    int64_t bytes[MOE_LINK_CLASS_COUNT]; /* of all flows so far; a flow counts once per class it crosses */
    int cap_first, cap_path, cap_rate;
    int *first, *path; /* arguments of moe_share */
    double *rate;
};

void moe_network_init(struct moe_network *net, const struct moe_topo *topo); /* topo: laid out, borrowed */
void moe_network_free(struct moe_network *net);                              /* what it holds */

/* Starts a flow of bytes > 0 at time now; time never goes back. Cost: O(1). */
void moe_network_add(struct moe_network *net, moe_ps now, int from, int to, int64_t bytes, int tag);

/* When the next flow ends, MOE_NEVER when none is in flight. Cost: O(1), after a change that of moe_share. */
moe_ps moe_network_next(struct moe_network *net);

/* Removes the flows that end at `now`, the value of moe_network_next: ended [n_ended], in order of their
 * start. Cost: O(flows). */
void moe_network_end(struct moe_network *net, moe_ps now);

#endif
