/* share - max-min fair rates: how flows share links, kept right while flows come and go.
 *
 * A rate vector is max-min fair when every flow crosses a bottleneck: a full link on which no flow is faster
 * than it. That vector exists and is unique. Found by progressive filling: raise all rates together; when a
 * link fills, its flows stay at that rate, the level of the link; go on with the rest. The link that a flow
 * stays at serves it. So rates are told by the levels of links, and flows with one server keep in step.
 * Worked example: links A = 10, B = 4; flow 1 on A, flow 2 on A and B, flow 3 on B. B fills first, at 2, and
 * serves flows 2 and 3; A fills at 10 - 2 = 8 and serves flow 1.
 *
 * A solve leaves out what the changes cannot reach: parts (links that no chain of flows joins to them), and,
 * where flows only left, links that filled below the rate of the slowest of these, since up to there the
 * filling goes as before.
 * A limit is a link that is not shared: each flow over it runs at its cap at most. In the filling it fills at
 * that level, however many flows it has.
 * Sizes met: 10 to 100,000 flows at once on 1 to 7 of 10 to 100,000 links. */
#ifndef MOE_SHARE_H
#define MOE_SHARE_H

#include "sim/base.h"

enum { MOE_SHARE_PATH = 7 };

struct moe_share_flow {
    uint32_t solve;                    /* the last that settled it anew */
    int n_links, link[MOE_SHARE_PATH]; /* in the order of its path */
    int place[MOE_SHARE_PATH];         /* in the lists of these links */
    int server, was;                   /* link, now and before the last solve; -1: none */
};

struct moe_share_entry {
    int flow, i;                             /* the list is that of link i of the flow */
    int n_others, other[MOE_SHARE_PATH - 1]; /* its other links, side by side for a solve */
};

struct moe_share_link {
    double cap, level, was; /* level: the rate of flows that it serves, now and before the last solve */
    bool limit;             /* cap is of each flow */
    int n, n_served, cap_flows;
    struct moe_share_entry *flow; /* [n] those that it serves come first */
    int parent, next;             /* in its part: towards the root; around the circle of all its links */
    int part_flows;               /* of a root: flows of the part */
    double part_level;            /* of a root: slowest rate among those that changed, INFINITY: none did */
};

struct moe_share_filling {
    double left; /* capacity that no settled flow uses */
    int active;  /* flows that are not settled */
    bool kept;   /* it filled before what changed: its flows stay as they are */
};

struct moe_share_key {
    double level;
    int link;
};

struct moe_share {
    int n_links, cap_links;
    int n_places, cap_flows, vacant; /* vacant: a place without a flow, they form a list; or -1 */
    struct moe_share_link *link;     /* [n_links] */
    struct moe_share_flow *flow;     /* [n_places] */
    int n_dirty, n_changed, n_moved; /* parts to solve; of the last solve: */
    int cap_dirty, cap_changed, cap_moved;
    int *dirty, *changed, *moved; /* a link of each part; links with a new level; flows with a new server */
    uint32_t solves;
    /* while solving: */
    double level;                      /* reached so far */
    struct moe_share_filling *filling; /* [n_links] */
    struct moe_share_key *heap;        /* [n_heap] links with active flows, lowest level first */
    int n_heap, *tied;                 /* [n_links] */
};

/* cap [n_links]: bytes/s, > 0 and finite. */
void moe_share_init(struct moe_share *s, int n_links, const double *cap);
void moe_share_free(struct moe_share *s); /* what it holds */
/* Adds a limit, cap as above. Returns its number, a link like the others. */
int moe_share_add_limit(struct moe_share *s, double cap);
/* A limit without flows, since the last solve or longer, has another cap from now on. */
void moe_share_set_limit(struct moe_share *s, int limit, double cap);

/* Adds a flow over n different links, 1 to MOE_SHARE_PATH. Returns its place, free again once it is removed.
 * Cost: O(n) and joining parts. */
int moe_share_add(struct moe_share *s, int n, const int *path);
void moe_share_remove(struct moe_share *s, int flow); /* O(n) */

/* Solves anew what changed since the last solve.
 * Result: flow f runs at link[flow[f].server].level, the max-min fair vector (property above) to 1e-9
 * relative; links of a part that fill at one level get the same bits; changed [n_changed] and moved [n_moved]
 * say what is new. Cost: O((P + L) log L) for the changed parts, L links and flows that cross P together. */
void moe_share_solve(struct moe_share *s);

#endif
