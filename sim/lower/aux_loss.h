/* aux_loss - the load-balancing loss of a layer as a user writes it.
 *
 *   aux_loss: 0.01           # the coefficient c; 0: none; or
 *   aux_loss: {coefficient: 0.01, over: dp, times: group_tokens, by: 1}
 *
 * For each expert the rows that it got of all ranks of the group `over`, n, and the sum of its probabilities
 * over the rank's own tokens, p; of T tokens of the group
 *   L = c * experts / (top_k * T * T) * sum(n * p) * times / by
 * is added to the cross entropy, which is a sum over tokens. So its weight is the same on any layout when
 * times / by is T (a loss that is a mean over the tokens of a rank divides both later); check says what
 * another product makes of it. Counts are those before any row is dropped.
 *   over       dp, ep, edp, sp: as in sync.h; none: the rank alone
 *   times, by  a product of: numbers, tokens (of the rank), group_tokens, sequences (of the rank: its tokens
 *              divided by model.sequence, rounded up), micro_batches, dp, ep, edp, sp (the ranks in such a
 *              group) */
#ifndef MOE_AUX_LOSS_H
#define MOE_AUX_LOSS_H

#include "sim/base.h"

struct moe_yaml;

/* clang-format off */
#define MOE_AUX_FACTORS(X) \
        X(DP, "dp") X(EP, "ep") X(EDP, "edp") X(SP, "sp") X(TOKENS, "tokens") \
        X(GROUP_TOKENS, "group_tokens") X(SEQUENCES, "sequences") X(MICRO_BATCHES, "micro_batches")
/* clang-format on */
#define X(name, text) MOE_AUX_##name,
enum moe_aux_factor { MOE_AUX_FACTORS(X) MOE_AUX_FACTOR_COUNT };
#undef X
enum moe_aux_over { MOE_AUX_OVER_DP, MOE_AUX_OVER_EP, MOE_AUX_OVER_EDP, MOE_AUX_OVER_SP, MOE_AUX_OVER_NONE };

enum { MOE_AUX_WORDS = 4 };
struct moe_aux_product {
    int64_t number;
    int n, word[MOE_AUX_WORDS]; /* enum moe_aux_factor */
};
struct moe_aux_loss {
    double coefficient;
    int over;    /* enum moe_aux_over */
    bool scaled; /* times or by is given */
    struct moe_aux_product times, by;
};

/* Errors: MOE_EINPUT "file:line: ..." for what is neither a coefficient nor such a mapping. */
int moe_aux_loss_read(const struct moe_yaml *node, struct moe_aux_loss *out);

#endif
