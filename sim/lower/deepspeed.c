/* deepspeed.c - the capacity rule `deepspeed`: that of DeepSpeed's gates, deepspeed/moe/sharded_moe.py.
 *
 * S local tokens, E experts, K choices. With drop_tokens: true
 *   C = max(ceil((S / E) * (factor * K)), min_capacity), the product in float32, from the rank's own
 *   tokens: ranks do not agree on it, unequal S give unequal C.
 * With drop_tokens: false
 *   C = the largest count of an expert, over the expert-parallel group (agree: true) or of the rank alone
 *   (agree: false: the gate has no group, as under init_inference); then min(C, S) with clamp: true, which
 *   makes it the rank's own again. The default clamps for K = 1 alone, as the source does.
 *
 * Who stays: of K = 1 tokens drawn at random (random_tokens, by a seed), else the first; of K = 2 all first
 * choices before all second ones; of K > 2 the most probable or the first (drop: probs, position), at most S
 * of them where C is above S, as since #8155 (releases before it stop there: their topk is asked for more
 * than there are). Gates: of K = 1 as they are, else normalised over the experts that are left. K = 1 stops
 * with fewer tokens than min_capacity. With group_tokens S is a group's; counts stay the rank's, so that with
 * drop_tokens: false nothing is dropped, and padding is that of one group as large as the rank.
 *
 * Not expressed: noise on logits (RSample, Gumbel second choice), used_token masks, C rounded up to a
 * multiple of the tensor-parallel size (there is none here), l_aux. Random tokens are uniform, but not those
 * of torch's generator. Source: founding_cases.md A.1; vectors in tests/unit/test_capacity.c. */
#include "sim/lower/lower.h"

static int order_of(const struct moe_capacity *capacity, int top_k)
{
    if (top_k == 1) return capacity->random_tokens ? MOE_LIMIT_RANDOM : MOE_LIMIT_BY_POSITION;
    if (top_k == 2) return MOE_LIMIT_BY_CHOICE;
    return capacity->by_position ? MOE_LIMIT_BY_POSITION : MOE_LIMIT_BY_PROB;
}

void moe_limit_deepspeed(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity)
{
    int K = b->s->top_k, S = moe_lower_group(b, capacity, m->T), least = moe_const(b, capacity->min_capacity);
    struct moe_limiting limit = {.order = order_of(capacity, K)};
    if (capacity->drop_tokens) {
        limit.capacity = moe_max(b, moe_ceil_f32(b, S, m->E, capacity->factor * K), least);
    } else {
        limit.capacity = moe_lower_largest(b, m, capacity->agree);
        if (capacity->clamp == MOE_CLAMP_TOP1 ? K == 1 : capacity->clamp == MOE_CLAMP_YES)
            limit.capacity = moe_min(b, limit.capacity, S);
    }
    if (K == 1) {
        limit.low = least;
        limit.high = S;
        limit.needs = "a top-1 gate needs min_capacity tokens on every rank";
    }
    moe_lower_limit(b, m, capacity, limit);
    if (K > 1) moe_lower_normalize(b, m);
}
