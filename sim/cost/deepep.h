/* deepep - what dispatch and combine of DeepEP take: in closed form, and as flows.
 *
 * The normal kernels send a token's row once to each node that has experts of it, to the GPU at the sender's
 * place (its rail), and on over NVLink to each rank that has. The low-latency kernels send a row for every
 * expert, straight to its rank. Three stages move the bytes: SMs copy, S; NICs send to other nodes, N; NVLink
 * carries within nodes, V. They overlap but for a part of their work:
 *   latency + (1 - serial) * max(S, N, V) + serial * (S + N + V)
 * In closed form tokens choose experts evenly: counts of nodes and ranks are expectations. Plans are of any
 * traffic.
 * Source: deepseek-ai/DeepEP csrc/kernels, tests/test_internode.py. Sizes met: 8 to 256 ranks. */
#ifndef MOE_DEEPEP_H
#define MOE_DEEPEP_H

#include "sim/cost/deepep_numbers.h"
#include "sim/network.h"

struct moe_deepep_case {
    bool combine;   /* else dispatch */
    int ranks;      /* 1 to a node's, or whole nodes */
    int64_t tokens; /* of a rank */
    int hidden, experts, top_k;
    int node_limit; /* normal: most nodes of a token's experts, which are those of its best; 0: any */
    int sms;        /* normal: of the kernel, two a channel; 0: enough that copies take no time */
};

/* What a token's row is on the wire: dispatch FP8 with a float scale for 128, of low latency with 16 bytes
 * before it; combine BF16. */
double moe_deepep_row_bytes(const struct moe_deepep_case *c, bool low_latency);

/* How many nodes and ranks the experts of a token are on, expected: nodes are chosen by their best expert,
 * and experts from these. Exact. Cost: O(top_k * nodes * ranks). */
void moe_deepep_spread(const struct moe_deepep_case *c, int ranks_per_node, double *nodes, double *ranks);

/* Seconds on an idle machine of kind switch. */
double moe_deepep_normal_s(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                           const struct moe_deepep_case *c);
double moe_deepep_low_latency_s(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                const struct moe_deepep_case *c);

/* What the members of a group have for each other, whatever tokens choose. Rows go from their home, for
 * combine back to it the same way: to each node once, to the member at the home's place there, who hands them
 * to each rank; to its own node the home does. */
struct moe_deepep_traffic {
    bool combine;
    bool rides; /* moved by the kernel of another operation, which pays latency and messages */
    int n, n_nodes, sms;
    const int *rank;       /* [n] members, node by node */
    const int *first;      /* [n_nodes + 1] of each node */
    const double *to_rank; /* [n, n] bytes: home, rank, the home itself among them */
    const double *to_node; /* [n, n_nodes] bytes: home, node, a row once */
    double row_bytes;      /* of a row; 0: these are not rows, and fall evenly on the SMs */
};

/* Adds its flows, in the order of moe_deepep_normal_plan. Where traffic is not even a stage follows the
 * largest flow of the one before. Cost: O(n^2). */
void moe_deepep_traffic_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                             const struct moe_deepep_traffic *x, struct moe_plan *out);

/* The same of low-latency kernels, whose rows go straight from rank to rank. */
struct moe_low_latency_traffic {
    bool rides; /* as above */
    int n, experts;
    const int *rank;     /* [n] members, node by node */
    const double *bytes; /* [n, n] from, to */
};
void moe_low_latency_traffic_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                  const struct moe_low_latency_traffic *x, struct moe_plan *out);

/* Adds the same as flows of ranks 0 to c->ranks - 1: of each rank the serial part of the three stages, one
 * after the other, then what is left of them side by side. A stage follows the last flow of the one before,
 * which on an idle machine ends with the others. Bytes of a pair are rounded. */
void moe_deepep_normal_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                            const struct moe_deepep_case *c, struct moe_plan *out);
void moe_deepep_low_latency_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                 const struct moe_deepep_case *c, struct moe_plan *out);

#endif
