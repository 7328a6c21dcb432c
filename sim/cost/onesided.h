/* onesided - all-to-all kernels of one NVLink domain, that write to their peers (or, two-sided, to buffers
 * that these empty): in closed form, and as flows.
 *
 *   start + target * others + token * tokens + slowest of the pairs and the link
 * Routing is balanced: the rows of a token go to min(top_k, ranks) different ranks, evenly; `others` are
 * those but the own rank, expected. A pair's rows go one after the other and take row each, or longer at the
 * pair's rate. Source: NVIDIA/TensorRT-LLM, NVLinkOneSided and NVLinkTwoSided of its MoE communication. Sizes
 * met: 2 to 72 ranks. */
#ifndef MOE_ONESIDED_H
#define MOE_ONESIDED_H

#include "sim/cost/number.h"
#include "sim/network.h"

/* clang-format off */
#define MOE_GB200 "fitted: ai-dynamo/aiconfigurator, gb200"
/*        member     key       unit    size  least  most   source of the default */
#define MOE_ONESIDED(X) \
        X(start_s,   "start",  "us",   1e-6, 1e-6,  1e-4,  MOE_GB200) \
        X(target_s,  "target", "us",   1e-6, 1e-8,  1e-5,  MOE_GB200) \
        X(token_s,   "token",  "us",   1e-6, 1e-10, 1e-6,  MOE_GB200) \
        X(row_s,     "row",    "us",   1e-6, 1e-10, 1e-6,  MOE_GB200) \
        X(pair_Bps,  "pair",   "GB/s", 1e9,  1e10,  2e12,  MOE_GB200) \
        X(link_Bps,  "link",   "GB/s", 1e9,  1e10,  2e12,  MOE_GB200)
/* start: latency; target: and for each other rank that a token goes to; token: local work for one of the own;
 * row: from one to the next of a pair; pair, link: what a pair and a rank move at most. A rate of 0: no such
 * limit. */
/*        kernel and operation */
#define MOE_ONESIDED_OPS(X) \
        X(TWO_PREPARE,     "two-sided prepare") /* ranks tell each other how many rows come */ \
        X(TWO_DISPATCH,    "two-sided dispatch") \
        X(TWO_COMBINE,     "two-sided combine") \
        X(TWO_COMBINE_LOW, "two-sided low combine") /* low precision */ \
        X(ONE_DISPATCH,    "one-sided dispatch") \
        X(ONE_COMBINE,     "one-sided combine")
/* clang-format on */
#define X(member, key, unit, size, least, most, source) double member;
struct moe_onesided {
    MOE_ONESIDED(X)
};
#undef X
#define X(member, key, unit, size, least, most, source) +1
enum { MOE_ONESIDED_PARAMS = MOE_ONESIDED(X) };
#undef X
#define X(name, text) MOE_ONESIDED_##name,
enum moe_onesided_op { MOE_ONESIDED_OPS(X) MOE_ONESIDED_OP_COUNT };
#undef X
extern const char *const moe_onesided_op_text[];
/* In the order of the members, which are doubles and nothing else. */
extern const struct moe_number moe_onesided_param[MOE_ONESIDED_PARAMS];
extern const struct moe_onesided moe_onesided_default[MOE_ONESIDED_OP_COUNT];

struct moe_onesided_case {
    int ranks, top_k;
    int64_t tokens; /* of a rank */
    double
        row_bytes; /* what a token's row is on the wire; 0: no rows are moved, the token's choice is read */
};

/* Seconds on an idle machine whose node holds all ranks, of kind switch. */
double moe_onesided_s(const struct moe_onesided *p, const struct moe_topo *topo,
                      const struct moe_onesided_case *c);

/* Adds the same as flows of ranks 0 to c->ranks - 1: of each the local work, then its rows to all ranks, its
 * own among them. Bytes of a pair are rounded. */
void moe_onesided_plan(const struct moe_onesided *p, const struct moe_topo *topo,
                       const struct moe_onesided_case *c, struct moe_plan *out);

#endif
