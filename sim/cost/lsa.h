/* lsa - two ways of NCCL to do a small all-to-all in one NVLink domain with few CTAs: kernels that store to
 * their peers' memory (device API, load-store accessible) and meet at barriers, and the host API's send and
 * receive.
 *
 * Stores: start + barriers * signal * (1 + 1/2 + ... + 1/(n-1)) + n bytes / (CTAs * rate of one). At a
 * barrier a rank waits for the last of n - 1 signals; were they exponential, of mean `signal`, that takes so
 * long. Send and receive: start + ceil(n / CTAs) * (2 hops + bytes / rate of a CTA): each CTA serves one peer
 * after the other, and with each says that it is ready and waits for the data. The own rank counts as a peer.
 * Source: NVIDIA/nccl contrib/custom_algos/alltoall. Sizes met: 8 to 64 ranks. */
#ifndef MOE_LSA_H
#define MOE_LSA_H

#include "sim/cost/number.h"
#include "sim/network.h"

/* clang-format off */
#define MOE_NCCL_CUSTOM "fitted: NVIDIA/nccl contrib/custom_algos/alltoall, 8 GPUs of a GB200 NVL72"
#define MOE_NCCL_GB200 "nccl-tests, ai-dynamo/aiconfigurator, gb200, "
/*        member         key        unit    size  least  most   source of the default */
#define MOE_LSA(X) \
        X(start_s,       "start",   "us",   1e-6, 1e-7,  1e-4,  MOE_NCCL_CUSTOM) \
        X(signal_s,      "signal",  "us",   1e-6, 1e-8,  1e-4,  MOE_NCCL_CUSTOM) \
        X(channel_Bps,   "channel", "GB/s", 1e9,  1e9,   1e12,  MOE_NCCL_GB200 "all-to-all of 2")
#define MOE_SENDRECV(X) \
        X(start_s,       "start",   "us",   1e-6, 1e-7,  1e-4,  MOE_NCCL_CUSTOM) \
        X(hop_s,         "hop",     "us",   1e-6, 1e-8,  1e-4,  MOE_NCCL_GB200 "all-reduce of 2") \
        X(channel_Bps,   "channel", "GB/s", 1e9,  1e9,   1e12,  MOE_NCCL_CUSTOM)
/* clang-format on */
#define X(member, key, unit, size, least, most, source) double member;
struct moe_lsa {
    MOE_LSA(X)
};
struct moe_sendrecv {
    MOE_SENDRECV(X)
};
#undef X
#define X(member, key, unit, size, least, most, source) +1
enum { MOE_LSA_PARAMS = MOE_LSA(X), MOE_SENDRECV_PARAMS = MOE_SENDRECV(X) };
#undef X
/* In the order of the members, which are doubles and nothing else. */
extern const struct moe_number moe_lsa_param[MOE_LSA_PARAMS], moe_sendrecv_param[MOE_SENDRECV_PARAMS];
extern const struct moe_lsa moe_lsa_default;
extern const struct moe_sendrecv moe_sendrecv_default;

struct moe_lsa_case {
    int ranks, ctas;
    int barriers;  /* stores: 2, or 1 where the data itself says that it has come; send and receive: 0 */
    int64_t bytes; /* of a pair */
};

/* Seconds on an idle machine whose node holds all ranks, of kind switch, whose links are not the limit. */
double moe_lsa_s(const struct moe_lsa *p, const struct moe_lsa_case *c);
double moe_sendrecv_s(const struct moe_sendrecv *p, const struct moe_lsa_case *c);

/* Adds the same as flows of ranks 0 to c->ranks - 1. */
void moe_lsa_plan(const struct moe_lsa *p, const struct moe_lsa_case *c, struct moe_plan *out);
void moe_sendrecv_plan(const struct moe_sendrecv *p, const struct moe_lsa_case *c, struct moe_plan *out);

#endif
