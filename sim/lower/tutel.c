/* tutel.c - the capacity rule `tutel`: that of Tutel's gate, tutel/impls/fast_dispatch.py.
 *
 * S local tokens, or with unequal_tokens: true the most of any rank of the expert-parallel group; E experts,
 * K choices; spe = ceil(S / E):
 *   factor > 0   C = K * int(factor * spe), the product in double, its fraction cut off; 0 is possible
 *   factor = 0   C = the largest count of an expert over the group: nothing is dropped
 *   factor < 0   C = the smaller of both, with -factor
 * then up to a multiple of `align` (the framework's sharded_count x overlap degree; above 256 itself rounded
 * up to a multiple of 128). With a factor that is not 0, ranks of unequal tokens differ unless unequal_tokens
 * is true. Who stays: all first choices before all second ones, in order of tokens. Gates: of K = 1 as they
 * are, else normalised over all choices, before any is dropped (normalize_gate). With group_tokens S is that
 * of the largest group: of the rank, or with unequal_tokens of any rank; counts stay the rank's.
 *
 * Not expressed: batch-prioritised routing, a factor per step, megablocks, experts shared by ranks. Source:
 * founding_cases.md A.2; vectors in tests/unit/test_capacity.c. */
#include "sim/lower/lower.h"

void moe_limit_tutel(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity)
{
    int64_t align = capacity->align > 256 ? (capacity->align + 127) / 128 * 128 : capacity->align;
    double factor = capacity->factor;
    int C = MOE_UNSET, bound = MOE_UNSET;
    if (factor != 0) {
        int most = capacity->unequal_tokens ? moe_lower_most_tokens(b, m) : m->T;
        int S = moe_lower_group(b, capacity, most);
        int per_expert = moe_ceil(b, S, m->E, 1);
        bound = C = moe_mul(b, m->K, moe_trunc(b, per_expert, factor < 0 ? -factor : factor));
    }
    if (factor <= 0) C = moe_lower_largest(b, m, true);
    if (factor < 0) C = moe_min(b, C, bound);
    if (align > 1) {
        int parts = moe_const(b, align);
        C = moe_mul(b, moe_ceil(b, C, parts, 1), parts);
    }
    if (b->s->top_k > 1) moe_lower_normalize(b, m);
    moe_lower_limit(b, m, capacity, (struct moe_limiting){.capacity = C, .order = MOE_LIMIT_BY_CHOICE});
}
