/* low_latency.c - the dispatcher `deepep_low_latency`: one copy of a row per chosen expert, by DeepEP's low-
 * latency kernels.
 *
 * The rows of `alltoall`, and home weights and adds them up. But the buffers that rows are written to have a
 * place for every rank and expert, of as many rows as a rank may have tokens (max_dispatch_tokens, the same
 * on all ranks: DeepEP's num_max_dispatch_tokens_per_rank). So the sender needs no counts of others,
 * receivers read them beside the rows, and no host waits. A rank with more tokens writes past its place:
 * check says so (C10). The kernels are made for inference; the backward pass is timed as if it used them too.
 * Source: DeepEP, deep_ep/buffer.py (low_latency_dispatch, low_latency_combine). */
#include "sim/lower/lower.h"

void moe_deepep_low_latency(struct moe_builder *b, const struct moe_layer *m)
{
    static const struct moe_carriers by = {.counts = MOE_BY_LOW_NOTIFY,
                                           .rows = MOE_BY_LOW_DISPATCH,
                                           .back = MOE_BY_LOW_COMBINE,
                                           .on_device = true};
    moe_lower_alltoall(b, m, &by);
}
