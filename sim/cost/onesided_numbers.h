/* onesided_numbers - the parameters of one domain's kernels (onesided.h), and what a machine says of them. */
#ifndef MOE_ONESIDED_NUMBERS_H
#define MOE_ONESIDED_NUMBERS_H

#include "sim/cost/number.h"

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

/* One-sided kernels of a machine. */
struct moe_one_sided {
    struct moe_onesided kernel[2]; /* dispatch, combine; start_s 0: the machine says nothing of them */
    double error; /* how far off they may be with 80 % probability, as a logarithm; 0: not known */
};

#endif
