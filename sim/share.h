/* share - max-min fair rates: how flows share links.
 *
 * A rate vector is max-min fair when every flow either runs at its own cap or crosses a bottleneck: a full
 * link on which no flow is faster than it. That vector exists and is unique. Found by progressive filling:
 * raise all rates together; when a link fills or a flow meets its cap, freeze the flows concerned, go on with
 * the rest.
 * Worked example: links A = 10, B = 4; flow 1 on A, flow 2 on A and B, flow 3 on B. B fills first at 2 each;
 * flow 1 then gets 10 - 2 = 8.
 * Sizes met: 10 to 100,000 flows on 2 to 6 links each. */
#ifndef MOE_SHARE_H
#define MOE_SHARE_H

#include "sim/base.h"

/* One-shot solver.
 *   cap   [L]           capacity of a link, bytes/s, > 0
 *   first [F + 1]       flow f crosses links path[first[f] .. first[f+1]-1]
 *   path  [first[F]]    link indices, each at most once per flow
 *   limit [F] or NULL   own cap of a flow, bytes/s, > 0; INFINITY for none. A flow without links needs one
 *   rate  [F]           out: bytes/s, > 0
 * Result: the max-min fair vector (property above) to 1e-9 relative; independent of the order of flows but
 * for rounding; a function of its arguments. Flows that fill links at the same level get the same bits.
 * Cost: O((sum of path lengths) log L + F log F + L) time; O(sum of path lengths + F + L) memory. */
void moe_share(int n_links, const double *cap, int n_flows, const int *first, const int *path,
               const double *limit, double *rate);

#endif
