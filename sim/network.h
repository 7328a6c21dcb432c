/* network - flows in flight: each moves its bytes at its max-min fair share of the links (share.h).
 *
 * A flow starts `delay` after the flow that it follows has ended, or after its plan was given; it has a rate
 * of its own at most (what its channels, or the SMs that copy it, move), whatever the links would allow.
 * Rates change only when a flow starts or ends; all changes of one instant are solved together, once. A flow
 * from a rank to itself is a copy on the device: alone on a link of its rank's own, of half the memory rate
 * (one read, one write).
 * A link has a clock: the bytes that a flow it serves has moved so far. A flow ends when the clock of its
 * server shows its `due`, and flows of one server end in the order of their dues whatever becomes of their
 * rate. So a new level touches one clock, not all its flows, and a flow is touched only when it starts, ends
 * or gets another server. Sizes met: 2 to 16,000 flows at once. */
#ifndef MOE_NETWORK_H
#define MOE_NETWORK_H

#include "sim/heap.h"
#include "sim/share.h"
#include "sim/topology.h"

#define MOE_NEVER INT64_MAX

/* A flow of a plan. */
struct moe_sent {
    int from, to;    /* ranks */
    int64_t bytes;   /* >= 0; one of 0 lasts its delay alone */
    double rate_Bps; /* its own, 0: as the links allow */
    double wire;     /* bytes on the way for each of these, at rate_Bps too: flags, gaps; 0: one */
    double delay_s;  /* >= 0 */
    int after;       /* an earlier flow of the plan, -1: none */
};

struct moe_plan {
    int n, cap;
    struct moe_sent *flow; /* [n] */
    bool together; /* no member leaves before all flows have ended; else when those that concern it have */
};

struct moe_flow {
    int from, to, tag; /* the caller's */
    uint64_t order;    /* of its plan, and in it */
    int64_t bytes;
    double rate_Bps, wire;
    moe_ps delay;
    int followers, next; /* flows that wait for its end; the next that waits for the same, or is vacant */
};

/* A flow on its way, by its place in share. */
struct moe_travel {
    int flow;
    double due; /* on its server's clock; without server: its bytes */
};

struct moe_limit {
    double rate_Bps;
    int link, next; /* another limit of the rank, or -1 */
};

struct moe_clock {
    double bytes; /* at `since`, when the level of the link last changed */
    moe_ps since, end;
    int first; /* flow of the link that ends first, at `end`; -1: to be found */
};

struct moe_network {
    const struct moe_topo *topo; /* borrowed */
    struct moe_share share;      /* links of the topology, one for the copies of each rank, then limits */
    moe_ps now;
    struct moe_clock *clock;   /* [links of share] */
    int n_stale, *stale;       /* links whose end is to be found */
    int n_leaves;              /* a power of 2, at least the links */
    moe_ps *first_end;         /* [2 n_leaves] a tree of ends, 1 its root; valid but for what is stale */
    struct moe_travel *travel; /* [places of share] */
    struct moe_flow *flow;     /* all that have not ended */
    struct moe_heap starts;    /* of flow a */
    struct moe_limit *limit;   /* of flows from one rank at one rate, then at another */
    int *first_limit;          /* [ranks] -1: none */
    int n_flows, vacant;       /* vacant: a flow that has ended, they form a list; or -1 */
    int n_limits, n_ended;
    int cap_clocks, cap_stale, cap_travels, cap_flows, cap_limits, cap_ended, cap_plan;
    int *plan; /* flows of the one that is being added */
    uint64_t started;
    struct moe_flow *ended;              /* the last to end */
    int64_t bytes[MOE_LINK_CLASS_COUNT]; /* of all flows so far; a flow counts once per class it crosses */
};

void moe_network_init(struct moe_network *net, const struct moe_topo *topo); /* topo: laid out, borrowed */
void moe_network_free(struct moe_network *net);                              /* what it holds */

/* Gives a plan of n flows at time now; time never goes back. Cost: O(n log flows). */
void moe_network_add(struct moe_network *net, moe_ps now, int n, const struct moe_sent *plan, int tag);

/* When the next flow starts or ends, MOE_NEVER when none is left. Cost: O(1), after a change that of
 * moe_share_solve and O(log links) for each link that it touched. */
moe_ps moe_network_next(struct moe_network *net);

/* Goes on to `now`, the value of moe_network_next: ended [n_ended], in the order in which they were given.
 * Cost: O(log links and its flows) for each link where one ends. */
void moe_network_end(struct moe_network *net, moe_ps now);

/* Appends a flow; returns its number. */
int moe_plan_add(struct moe_plan *plan, struct moe_sent flow);
/* How long the plan takes on an idle machine that is laid out. */
moe_ps moe_plan_time(const struct moe_topo *topo, const struct moe_plan *plan);

#endif
