/* deepep.c - the dispatcher `deepep`: a token is sent once to each rank that has any of its experts.
 *
 * As DeepEP does: rows leave by rank, not by expert, with the choices of the token and its probabilities of
 * the experts there. The receiver computes all of its experts for the row, weights and sums them, and one row
 * comes back; home adds up the rows of a token. The host reads rows by rank and rows by expert before
 * anything moves. Capacities are refused: how many tokens still have an expert on a rank after some choices
 * were dropped does not follow from counts.
 *
 * Rows of T tokens that go to other ranks when routing is uniform:
 *   T x (P - 1) x (1 - C(E - E/P, K) / C(E, K)),  against T x K x (P - 1) / P for alltoall.
 * Each is H + E/P numbers and K int32; H numbers come back. Backward the same, without the int32.
 * Kernels of DeepEP move them: one, after it has told the counts, tokens and what goes with them; here these
 * are operations of their own, of which one pays the latency. Packing and adding up are operations too, where
 * its kernels do them on the way: their time is too much. The backward pass's dispatch tells no counts, but
 * its latency is that of one that does. Source: DeepEP, deep_ep/buffer.py (get_dispatch_layout, dispatch,
 * combine). */
#include "sim/lower/lower.h"

#include <stdio.h>

/* What a rank knows of the tokens that come. */
struct arrivals {
    int to_peer, from_peer; /* expressions: tokens, per peer */
    int n_sent, n;          /* expressions: tokens in all */
    int of_expert;          /* symbol: rows of each local expert */
};

static struct moe_ref counts(struct moe_builder *b, const struct moe_layer *m, const char *name, int extent)
{
    return moe_ref(moe_new_buffer(b, name, MOE_BUF_INDEX, MOE_I64, m->n_layers, extent));
}

static struct moe_ref ids(struct moe_builder *b, const struct moe_layer *m, const char *name, int n,
                          int width)
{
    return moe_ref(moe_new_buffer(b, name, MOE_BUF_INDEX, MOE_I32, m->n_layers, moe_mul(b, n, width)));
}

/* Finds where tokens go, tells the receivers, and hands the host what both sides know; slot: [T, P]. */
static struct arrivals spread(struct moe_builder *b, const struct moe_layer *m, const struct moe_carriers *by,
                              struct moe_ref slot)
{
    int here = m->n_experts / m->ep_size, e = moe_const(b, here), P = moe_const(b, m->ep_size),
        one = moe_const(b, 1);
    struct moe_ref to = counts(b, m, "tokens_for", P), from = counts(b, m, "tokens_from", P);
    struct moe_ref rows = counts(b, m, "peer_counts", m->E);
    struct moe_symbol y = {.scope = MOE_SCOPE_PEER,
                           .comm = m->ep_comm,
                           .rows = m->ep_size,
                           .cols = 1,
                           .on_device = by->on_device};
    int to_peer = moe_new_symbol(b, "tokens_to_peer", to.buffer, true, y);
    int from_peer = moe_new_symbol(b, "tokens_from_peer", from.buffer, true, y);
    y.scope = MOE_SCOPE_EXPERT;
    y.cols = here;
    int of_expert = moe_new_symbol(b, "rows_of_expert", rows.buffer, false, y);
    struct moe_op spread = {.name = "spread",
                            .kernel = MOE_K_SPREAD,
                            .type = MOE_I32,
                            MOE_READS(m->expert),
                            MOE_WRITES(slot, to),
                            MOE_SIZES(m->T, m->E, m->K, P)};
    if (by->on_device) moe_lower_bound(m, &spread);
    moe_emit(b, spread);
    moe_lower_move_by(by->counts, b, m, "exchange_counts", m->counts, e, rows, e);
    moe_lower_move_by(by->counts, b, m, "exchange_tokens", to, one, from, one);
    struct moe_op read_counts = {.name = "read_counts", .kind = MOE_HOST_SYNC, MOE_READS(to, from, rows)};
    if (!by->on_device) moe_emit(b, read_counts);
    return (struct arrivals){moe_sym(b, to_peer), moe_sym(b, from_peer), moe_sum(b, to_peer),
                             moe_sum(b, from_peer), of_expert};
}

static void set_name(char out[MOE_NAME], const char *what, const char *of)
{
    snprintf(out, MOE_NAME, "%s_%s", what, of);
}

/* Sends `width` elements of a token to each rank for which slot [T, P] has a row. from: [T, width]; or, with
 * something else for every rank, [T, P, width]. Returns what comes, [in->n, width]. */
static struct moe_ref dispatch(enum moe_transport by, struct moe_builder *b, const struct moe_layer *m,
                               const struct arrivals *in, const char *what, struct moe_ref from, bool by_rank,
                               int width, struct moe_ref slot)
{
    const struct moe_buffer source = b->s->buffers[from.buffer];
    int P = moe_const(b, m->ep_size), T = by_rank ? moe_mul(b, m->T, P) : m->T;
    char name[MOE_NAME];
    set_name(name, "sent", what);
    struct moe_ref sent = moe_ref(
        moe_new_buffer(b, name, source.role, source.type, m->n_layers, moe_mul(b, in->n_sent, width)));
    set_name(name, "arrived", what);
    struct moe_ref arrived =
        moe_ref(moe_new_buffer(b, name, source.role, source.type, m->n_layers, moe_mul(b, in->n, width)));
    struct moe_op pack = {.kernel = MOE_K_PERMUTE,
                          .type = source.type,
                          .needs_grad = source.role == MOE_BUF_ACTIVATION,
                          MOE_READS(from, slot),
                          MOE_WRITES(sent),
                          MOE_SIZES(T, width, by_rank ? moe_const(b, 1) : P, in->n_sent)};
    set_name(pack.name, "pack", what);
    moe_emit(b, pack);
    set_name(name, "dispatch", what);
    moe_lower_move_by(by, b, m, name, sent, moe_mul(b, in->to_peer, width), arrived,
                      moe_mul(b, in->from_peer, width));
    return arrived;
}

void moe_lower_once(struct moe_builder *b, const struct moe_layer *m, const struct moe_carriers *by)
{
    int P = moe_const(b, m->ep_size), e = moe_const(b, m->n_experts / m->ep_size);
    struct moe_ref peer_slot = ids(b, m, "peer_row_of_choice", m->T, P);
    struct arrivals in = spread(b, m, by, peer_slot);
    struct moe_ref expert = dispatch(by->beside, b, m, &in, "experts", m->expert, false, m->K, peer_slot);
    struct moe_ref prob = dispatch(by->beside, b, m, &in, "probs", m->prob, true, e, peer_slot);
    moe_lower_probs_moved(b, m, 2);
    struct moe_ref x = dispatch(by->rows, b, m, &in, "tokens", m->x, false, m->H, peer_slot);
    struct moe_received received = {x, prob, expert, in.n, in.of_expert, true};
    struct moe_ref partial = moe_lower_received(b, m, &received);
    struct moe_ref back = moe_rows(b, m, "back", in.n_sent, m->H);
    moe_lower_move_by(by->back, b, m, "combine", partial, moe_mul(b, in.from_peer, m->H), back,
                      moe_mul(b, in.to_peer, m->H));
    moe_emit(b, (struct moe_op){.name = "sum_parts",
                                .kernel = MOE_K_PERMUTE_BWD,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(back, peer_slot),
                                MOE_WRITES(m->y),
                                MOE_SIZES(m->T, m->H, P, in.n_sent)});
}

void moe_deepep(struct moe_builder *b, const struct moe_layer *m)
{
    static const struct moe_carriers by = {.counts = MOE_BY_DEEPEP_NOTIFY,
                                           .rows = MOE_BY_DEEPEP_DISPATCH,
                                           .back = MOE_BY_DEEPEP_COMBINE,
                                           .beside = MOE_BY_DEEPEP_DISPATCHED};
    moe_lower_once(b, m, &by);
}
