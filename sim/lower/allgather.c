/* allgather.c - the dispatcher `allgather`: every rank of the group gets all tokens and takes its own.
 *
 * Tokens, probabilities, choices and counts are gathered over the expert-parallel group; each rank computes
 * the rows of its experts, weights them, adds them up per token of the group, and a reduce-scatter sums the
 * parts at each token's home. Bytes do not depend on the routing: (P - 1) x T x H x element size of one rank
 * and direction, against about T x K x H x (P - 1) / P for alltoall. Padding has no meaning here: rows are
 * not sent. */
#include "sim/lower/lower.h"

/* Gathers `from` [T, width] of every member into [tokens of the group, width]. */
static struct moe_ref gather(struct moe_builder *b, const struct moe_layer *m, const char *name,
                             struct moe_ref from, int width, int tokens_of_peer, int group_tokens)
{
    const struct moe_buffer source = b->s->buffers[from.buffer];
    struct moe_ref to = moe_ref(
        moe_new_buffer(b, name, source.role, source.type, m->n_layers, moe_mul(b, group_tokens, width)));
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLGATHER,
                        .comm = m->ep_comm,
                        .type = source.type,
                        .stream = MOE_STREAM_COMM,
                        .send = moe_mul(b, m->T, width),
                        .recv = moe_mul(b, tokens_of_peer, width),
                        .needs_grad = source.role == MOE_BUF_ACTIVATION,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
    return to;
}

/* Counts of every member: [P, E]; the symbol with the rows of each expert of this rank. */
static int gather_counts(struct moe_builder *b, const struct moe_layer *m)
{
    struct moe_ref all = moe_ref(moe_new_buffer(b, "group_counts", MOE_BUF_INDEX, MOE_I64, m->n_layers,
                                                moe_mul(b, moe_const(b, m->ep_size), m->E)));
    struct moe_symbol y = {
        .scope = MOE_SCOPE_EXPERT, .comm = -1, .rows = m->ep_size, .cols = m->n_experts, .slice = m->ep_comm};
    moe_emit(b, (struct moe_op){.name = "gather_counts",
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_ALLGATHER,
                                .type = MOE_I64,
                                .comm = m->ep_comm,
                                .stream = MOE_STREAM_COMM,
                                .send = m->E,
                                .recv = m->E,
                                MOE_READS(m->counts),
                                MOE_WRITES(all)});
    moe_emit(b, (struct moe_op){.name = "read_counts", .kind = MOE_HOST_SYNC, MOE_READS(all)});
    return moe_new_symbol(b, "rows_of_expert", all.buffer, false, y);
}

void moe_allgather(struct moe_builder *b, const struct moe_layer *m)
{
    struct moe_symbol y = {.scope = MOE_SCOPE_PEER, .comm = m->ep_comm};
    int tokens = moe_new_symbol(b, "tokens_of_peer", -1, false, y);
    int of_peer = moe_sym(b, tokens), Tg = moe_sum(b, tokens);
    struct moe_ref x = gather(b, m, "gather_tokens", m->x, m->H, of_peer, Tg);
    struct moe_ref prob = gather(b, m, "gather_probs", m->prob, m->E, of_peer, Tg);
    moe_lower_probs_moved(b, m, 1);
    struct moe_ref expert = gather(b, m, "gather_experts", m->expert, m->K, of_peer, Tg);
    struct moe_received in = {x, prob, expert, Tg, gather_counts(b, m), false};
    struct moe_ref partial = moe_lower_received(b, m, &in);
    moe_emit(b, (struct moe_op){.name = "scatter_sums",
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_REDUCESCATTER,
                                .comm = m->ep_comm,
                                .type = m->type,
                                .stream = MOE_STREAM_COMM,
                                .send = moe_mul(b, of_peer, m->H),
                                .recv = moe_mul(b, m->T, m->H),
                                .needs_grad = 1,
                                MOE_READS(partial),
                                MOE_WRITES(m->y)});
}
