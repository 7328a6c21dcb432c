/* deepep - what dispatch and combine of DeepEP take: in closed form, and as flows.
 *
 * The normal kernels send a token's row once to each node that has experts of it, to the GPU at the sender's
 * place (its rail), and on over NVLink to each rank that has. The low-latency kernels send a row for every
 * expert, straight to its rank. Three stages move the bytes: SMs copy, S; NICs send to other nodes, N; NVLink
 * carries within nodes, V. They overlap but for a part of their work:
 *   latency + (1 - serial) * max(S, N, V) + serial * (S + N + V)
 * Tokens choose experts evenly: counts of nodes and ranks are expectations.
 * Source: deepseek-ai/DeepEP csrc/kernels, tests/test_internode.py. Sizes met: 8 to 256 ranks. */
#ifndef MOE_DEEPEP_H
#define MOE_DEEPEP_H

#include "sim/network.h"
#include "sim/number.h"

/* clang-format off */
#define MOE_DEEPEP_H100 "fitted: ai-dynamo/aiconfigurator, h100_sxm, "
/*        member       key         unit    size  least  most   source of the default */
#define MOE_DEEPEP_NORMAL(X) \
        X(start_s,     "start",    "us",   1e-6, 1e-6,  1e-3,  MOE_DEEPEP_H100 "1 node") \
        X(doubling_s,  "doubling", "us",   1e-6, 1e-8,  1e-3,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(row_Bps,     "row",      "GB/s", 1e9,  2e8,   1e12,  "none: one row size does not tell it") \
        X(sm_Bps,      "sm",       "GB/s", 1e9,  1e9,   3e11,  MOE_DEEPEP_H100 "2 nodes, 4 to 24 SMs") \
        X(message_s,   "message",  "us",   1e-6, 1e-10, 2e-6,  "none: one row size does not tell it") \
        X(nvlink_Bps,  "nvlink",   "GB/s", 1e9,  1e10,  1e12,  "the topology's") \
        X(serial,      "serial",   "",     1,    1e-3,  1,     MOE_DEEPEP_H100 "2 nodes, 4 to 24 SMs")
/* start: latency on one node; doubling: and for each doubling of the nodes; row: rate of the last row, behind
 * all others; sm: copies of one SM; message: of an SM, for each row to a rank; nvlink: of a rank, at most. A
 * rate of 0: no such limit. */
#define MOE_DEEPEP_LOW_LATENCY(X) \
        X(start_s,     "start",    "us",   1e-6, 1e-6,  1e-4,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(remote_s,    "remote",   "us",   1e-6, 1e-8,  1e-4,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(expert_s,    "expert",   "us",   1e-6, 1e-9,  2e-6,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(copy_Bps,    "copy",     "GB/s", 1e9,  3e10,  3e12,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(serial,      "serial",   "",     1,    1e-3,  1,     MOE_DEEPEP_H100 "1 and 2 nodes")
/* start: latency on one node; remote: more on several; expert: and for each expert of other nodes; copy: of
 * all SMs of a rank. */
/* clang-format on */
#define X(member, key, unit, size, least, most, source) double member;
struct moe_deepep_normal {
    MOE_DEEPEP_NORMAL(X)
};
struct moe_deepep_low_latency {
    MOE_DEEPEP_LOW_LATENCY(X)
};
#undef X
#define X(member, key, unit, size, least, most, source) +1
enum {
    MOE_DEEPEP_NORMAL_PARAMS = MOE_DEEPEP_NORMAL(X),
    MOE_DEEPEP_LOW_LATENCY_PARAMS = MOE_DEEPEP_LOW_LATENCY(X)
};
#undef X
/* In the order of the members, which are doubles and nothing else; defaults of dispatch and of combine. */
extern const struct moe_number moe_deepep_normal_param[MOE_DEEPEP_NORMAL_PARAMS],
    moe_deepep_low_latency_param[MOE_DEEPEP_LOW_LATENCY_PARAMS];
extern const struct moe_deepep_normal moe_deepep_normal_default[2];
extern const struct moe_deepep_low_latency moe_deepep_low_latency_default[2];

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

/* Adds the same as flows of ranks 0 to c->ranks - 1: of each rank the serial part of the three stages, one
 * after the other, then what is left of them side by side. A stage follows the last flow of the one before,
 * which on an idle machine ends with the others. Bytes of a pair are rounded. */
void moe_deepep_normal_plan(const struct moe_deepep_normal *p, const struct moe_topo *topo,
                            const struct moe_deepep_case *c, struct moe_plan *out);
void moe_deepep_low_latency_plan(const struct moe_deepep_low_latency *p, const struct moe_topo *topo,
                                 const struct moe_deepep_case *c, struct moe_plan *out);

#endif
