/* onesided - all-to-all kernels of one NVLink domain, that write to their peers (or, two-sided, to buffers
 * that these empty): in closed form, and as flows.
 *
 *   start + target * others + token * tokens + slowest of the pairs and the link
 * Routing is balanced: the rows of a token go to min(top_k, ranks) different ranks, evenly; `others` are
 * those but the own rank, expected; plans are of any traffic. A pair's rows go one after the other and take
 * row each, or longer at the pair's rate. Source: NVIDIA/TensorRT-LLM, NVLinkOneSided and NVLinkTwoSided of
 * its MoE communication. Sizes met: 2 to 72 ranks. */
#ifndef MOE_ONESIDED_H
#define MOE_ONESIDED_H

#include "sim/cost/onesided_numbers.h"
#include "sim/network.h"

struct moe_onesided_case {
    int ranks, top_k;
    int64_t tokens; /* of a rank */
    double
        row_bytes; /* what a token's row is on the wire; 0: no rows are moved, the token's choice is read */
};

/* Seconds on an idle machine whose node holds all ranks, of kind switch. */
double moe_onesided_s(const struct moe_onesided *p, const struct moe_topo *topo,
                      const struct moe_onesided_case *c);

/* What the members of a group have for each other, whatever tokens choose. */
struct moe_onesided_traffic {
    bool combine; /* rows go home, to the rank whose tokens they are of */
    bool rides;   /* moved by the kernel of another operation, which pays latency and takes row after row */
    int n;
    const int *rank;      /* [n] members */
    const int64_t *token; /* [n] tokens of each */
    const double *others; /* [n] other ranks that a token goes to, in the mean */
    const double *bytes;  /* [n, n] home, other, home itself among them */
    double row_bytes;     /* of a row; 0: not known, then a row takes no time but for its bytes */
};

/* Adds its flows: of each home its rows to (or from) all ranks, its own among them, once it has done what
 * each of its tokens takes. Where traffic is not even the link is shared as rows are. Cost: O(n^2). */
void moe_onesided_traffic_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                               const struct moe_onesided_traffic *x, struct moe_plan *out);

/* Adds the same as flows of ranks 0 to c->ranks - 1. Bytes of a pair are rounded. */
void moe_onesided_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                       const struct moe_onesided_case *c, struct moe_plan *out);

#endif
