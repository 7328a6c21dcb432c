/* one_sided.c - the dispatcher `nvlink_one_sided`: a token is written once to each rank that has any of its
 * experts, within one NVLink domain.
 *
 * The rows of `deepep`. But senders write into buffers of their peers that have as many places for each rank
 * as a rank may have tokens (max_dispatch_tokens), and for the sums home reads from those: no counts are
 * needed before, and no host waits. A rank with more tokens writes past its places: check says so (C10).
 * Source: NVIDIA/TensorRT-LLM, NVLinkOneSided of its MoE communication. */
#include "sim/lower/lower.h"

void moe_nvlink_one_sided(struct moe_builder *b, const struct moe_layer *m)
{
    static const struct moe_carriers by = {.counts = MOE_BY_ONE_NOTIFY,
                                           .rows = MOE_BY_ONE_DISPATCH,
                                           .back = MOE_BY_ONE_COMBINE,
                                           .beside = MOE_BY_ONE_DISPATCHED,
                                           .on_device = true};
    moe_lower_once(b, m, &by);
}
