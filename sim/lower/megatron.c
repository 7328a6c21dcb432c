/* megatron.c - the capacity rule `megatron`: each rank keeps at most C rows of its own for each expert.
 *
 * C = ceil(T * K / E * factor) in double, from the rank's own tokens, no agreement with other ranks
 * (founding_cases.md A.0b 1; vectors in tests/unit/test_capacity.c). Above C rows the most probable stay, or
 * the first. Padded: every expert gets exactly C rows of each rank, the rest zero; the framework picks C of T
 * columns, so that C must not be above T there (A.0b 2). Probabilities are not renormalised. */
#include "sim/lower/lower.h"

void moe_limit_megatron(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity)
{
    int G = moe_lower_group(b, capacity, m->T), C = moe_ceil(b, moe_mul(b, G, m->K), m->E, capacity->factor);
    struct moe_limiting limit = {.capacity = C,
                                 .order = capacity->by_position ? MOE_LIMIT_BY_POSITION : MOE_LIMIT_BY_PROB};
    if (capacity->pad) {
        limit.low = C;
        limit.high = G;
        limit.needs = "a padded capacity must not be above the tokens of the rank, of which it picks rows";
    }
    moe_lower_limit(b, m, capacity, limit);
}
