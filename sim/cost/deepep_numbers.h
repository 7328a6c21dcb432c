/* deepep_numbers - the parameters of DeepEP's kernels (deepep.h), and what a machine says of them. */
#ifndef MOE_DEEPEP_NUMBERS_H
#define MOE_DEEPEP_NUMBERS_H

#include "sim/cost/number.h"

/* clang-format off */
#define MOE_DEEPEP_H100 "fitted: ai-dynamo/aiconfigurator, h100_sxm, 4 to 24 SMs, "
#define MOE_DEEPEP_NONE "on one node as start; on more none: one row size does not tell it"
/*        member       key         unit    size  least  most   source of the default */
#define MOE_DEEPEP_NORMAL(X) \
        X(start_s,     "start",    "us",   1e-6, 1e-6,  1e-3,  MOE_DEEPEP_H100 "1 node; 1 and 2 nodes") \
        X(doubling_s,  "doubling", "us",   1e-6, 1e-8,  1e-3,  MOE_DEEPEP_H100 "1 and 2 nodes") \
        X(row_Bps,     "row",      "GB/s", 1e9,  2e8,   1e12,  MOE_DEEPEP_NONE) \
        X(sm_Bps,      "sm",       "GB/s", 1e9,  1e9,   3e11,  MOE_DEEPEP_H100 "1 node; 2 nodes") \
        X(message_s,   "message",  "us",   1e-6, 1e-10, 2e-6,  MOE_DEEPEP_NONE) \
        X(nvlink_Bps,  "nvlink",   "GB/s", 1e9,  1e10,  1e12,  "the topology's") \
        X(serial,      "serial",   "",     1,    1e-3,  1,     MOE_DEEPEP_H100 "1 node; 2 nodes")
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
extern const struct moe_deepep_low_latency moe_deepep_low_latency_default[2];

/* Low-latency kernels of a machine; copy_Bps 0: it says nothing of them. */
struct moe_low_latency {
    struct moe_deepep_low_latency kernel[2]; /* dispatch, combine */
    double error[2];                         /* on one node, on more: as below */
};
/* Normal kernels of a machine. */
struct moe_deepep_kernels {
    struct moe_deepep_normal kernel[2]; /* dispatch, combine */
    double error; /* how far off they may be with 80 % probability, as a logarithm; 0: not known */
};
struct moe_deepep {
    int sms;                                   /* of a kernel; 0: enough that copies take no time */
    struct moe_deepep_kernels one_node, nodes; /* on one node other ones run than over several */
};
/* As the tables above say, and 20 SMs. Source: deepseek-ai/DeepEP deep_ep/buffer.py (num_sms). */
extern const struct moe_deepep moe_deepep_default;

#endif
