/* network - flows in flight: each moves its bytes at its max-min fair share of the links (share.h).
 *
 * Rates change only when a flow starts or ends; all changes of one instant are solved together, once. A flow
 * from a rank to itself is a copy on the device: alone on a link of its rank's own, of half the memory rate
 * (one read, one write).
 * A link has a clock: the bytes that a flow it serves has moved so far. A flow ends when the clock of its
 * server shows its `due`, and flows of one server end in the order of their dues whatever becomes of their
 * rate. So a new level touches one clock, not all its flows, and a flow is touched only when it starts, ends
 * or gets another server. Sizes met: 2 to 16,000 flows at once. */
#ifndef MOE_NETWORK_H
#define MOE_NETWORK_H

#include "sim/share.h"
#include "sim/topology.h"

#define MOE_NEVER INT64_MAX

struct moe_flow {
    int from, to, tag; /* the caller's */
    uint64_t order;    /* of its start */
    double due;        /* on its server's clock; without server: its bytes */
};

struct moe_clock {
    double bytes; /* at `since`, when the level of the link last changed */
    moe_ps since, end;
    int first; /* flow of the link that ends first, at `end`; -1: to be found */
};

struct moe_network {
    const struct moe_topo *topo; /* borrowed */
    struct moe_share share;      /* links of the topology, then one for the copies of each rank */
    moe_ps now, next;            /* next: first end; valid unless there are changes to solve */
    struct moe_clock *clock;     /* [links of share] */
    struct moe_flow *flow;       /* [places of share] */
    int n, cap, n_ended, cap_ended;
    uint64_t started;
    struct moe_flow *ended;              /* the last to end */
    int64_t bytes[MOE_LINK_CLASS_COUNT]; /* of all flows so far; a flow counts once per class it crosses */
};

void moe_network_init(struct moe_network *net, const struct moe_topo *topo); /* topo: laid out, borrowed */
void moe_network_free(struct moe_network *net);                              /* what it holds */

/* Starts a flow of bytes > 0 at time now; time never goes back. Cost: O(1). */
void moe_network_add(struct moe_network *net, moe_ps now, int from, int to, int64_t bytes, int tag);

/* When the next flow ends, MOE_NEVER when none is in flight. Cost: O(1), after a change that of
 * moe_share_solve and O(links). */
moe_ps moe_network_next(struct moe_network *net);

/* Removes the flows that end at `now`, the value of moe_network_next: ended [n_ended], in order of their
 * start. Cost: O(links, and flows of those where one ends). */
void moe_network_end(struct moe_network *net, moe_ps now);

#endif
