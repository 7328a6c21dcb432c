/* lower_alltoall.c - the dispatcher `alltoall`: dropless, one copy of a row per chosen expert.
 *
 * Rows leave sorted by expert, hence by rank of the expert-parallel group; the ranks first exchange counts,
 * the host reads them, then an all-to-all-v moves the rows; each rank sorts what it got by local expert. Back
 * the same way. Bytes of one rank and direction: rows to other ranks x H x element size. */
#include "sim/lower.h"

/* rows [n, H] with one slot a layer */
static struct moe_ref row_buffer(struct moe_builder *b, const struct moe_layer *m, const char *name, int n)
{
    return moe_ref(moe_new_buffer(b, name, MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n, m->H)));
}

static void emit_move(struct moe_builder *b, const struct moe_layer *m, const char *name, struct moe_ref from,
                      int send, struct moe_ref to, int recv)
{
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLTOALL,
                        .comm = m->ep_comm,
                        .type = m->type,
                        .stream = MOE_STREAM_COMM,
                        .send = send,
                        .recv = recv,
                        .needs_grad = 1,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

void moe_alltoall(struct moe_builder *b, const struct moe_layer *m)
{
    int experts_here = m->n_experts / m->ep_size; /* e */
    int P = moe_const(b, m->ep_size), e = moe_const(b, experts_here);
    struct moe_ref got = moe_ref(
        moe_new_buffer(b, "peer_counts", MOE_BUF_INDEX, MOE_I64, m->n_layers, moe_const(b, m->n_experts)));
    struct moe_symbol y = {
        .scope = MOE_SCOPE_PEER, .comm = m->ep_comm, .rows = m->ep_size, .cols = experts_here};
    int to_peer = moe_new_symbol(b, "rows_to_peer", m->counts.buffer, true, y);
    int from_peer = moe_new_symbol(b, "rows_from_peer", got.buffer, true, y);
    y.scope = MOE_SCOPE_EXPERT;
    int of_expert = moe_new_symbol(b, "rows_of_expert", got.buffer, false, y);
    int n_sent = moe_mul(b, m->T, m->K), n_got = moe_sum(b, from_peer);
    int sent_elems = moe_mul(b, moe_sym(b, to_peer), m->H),
        got_elems = moe_mul(b, moe_sym(b, from_peer), m->H);

    struct moe_ref sent = row_buffer(b, m, "sent", n_sent), arrived = row_buffer(b, m, "arrived", n_got);
    struct moe_ref rows = row_buffer(b, m, "rows", n_got), leaving = row_buffer(b, m, "leaving", n_got);
    struct moe_ref back = row_buffer(b, m, "back", n_sent);
    moe_emit(b, (struct moe_op){.name = "exchange_counts",
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_ALLTOALL,
                                .type = MOE_I64,
                                .comm = m->ep_comm,
                                .stream = MOE_STREAM_COMM,
                                .send = e,
                                .recv = e,
                                MOE_READS(m->counts),
                                MOE_WRITES(got)});
    moe_emit(b, (struct moe_op){.name = "permute",
                                .kernel = MOE_K_PERMUTE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(m->x, m->slot),
                                MOE_WRITES(sent),
                                MOE_SIZES(m->T, m->H, m->K)});
    moe_emit(b, (struct moe_op){.name = "read_counts", .kind = MOE_HOST_SYNC, MOE_READS(m->counts, got)});
    emit_move(b, m, "dispatch", sent, sent_elems, arrived, got_elems);
    moe_emit(b, (struct moe_op){.name = "sort",
                                .kernel = MOE_K_SORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(arrived, got),
                                MOE_WRITES(rows),
                                MOE_SIZES(P, e, m->H)});
    struct moe_ref done = moe_lower_experts(b, m, rows, n_got, of_expert);
    moe_emit(b, (struct moe_op){.name = "unsort",
                                .kernel = MOE_K_UNSORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(done, got),
                                MOE_WRITES(leaving),
                                MOE_SIZES(P, e, m->H)});
    emit_move(b, m, "combine", leaving, got_elems, back, sent_elems);
    moe_emit(b, (struct moe_op){.name = "unpermute",
                                .kernel = MOE_K_COMBINE,
                                .type = m->type,
                                .needs_grad = 7,
                                MOE_READS(m->x, back, m->prob, m->expert, m->slot),
                                MOE_WRITES(m->y),
                                MOE_SIZES(m->T, m->H, m->K, m->E)});
}
