/* alltoall.c - the dispatchers `alltoall` and `gshard`: one copy of a row per chosen expert.
 *
 * Rows leave sorted by expert, hence by rank of the expert-parallel group; the ranks first exchange counts,
 * the host reads them, then an all-to-all-v moves the rows; each rank sorts what it got by local expert. Back
 * the same way, where rows are weighed; or (apply_probs: expert) their probabilities travel with them and
 * weigh them there. A padded capacity fixes all sizes: no exchange, no host sync; kernels that read the
 * counts on the device need no host sync either. Bytes of one rank and direction: rows to other ranks x H x
 * element size.
 *
 * `gshard` is the same with rows that are always padded, [E, C, H], as GShard, DeepSpeed and Tutel send them:
 * each rank takes for granted that the others have its C. The capacity rule says what C is; `dropless` makes
 * it the largest count of the group. Bytes of one rank and direction: C x E x (P - 1) / P x H x element size,
 * whatever the routing is. Not expressed: DeepSpeed's dispatch as a product with a mask [S, E, C], which
 * takes longer than moving rows. Source: Lepikhin et al. 2020 (GShard); founding_cases.md A.1 5, A.2 5. */
#include "sim/lower/lower.h"

/* What a rank knows of the rows that come. */
struct arrivals {
    struct moe_ref counts;  /* [P, e] */
    int to_peer, from_peer; /* expressions: rows, per peer */
    int n, of_expert;       /* expression: rows in all; symbol: rows of each local expert */
};

static struct arrivals exchange_counts(struct moe_builder *b, const struct moe_layer *m,
                                       const struct moe_carriers *by)
{
    int here = m->n_experts / m->ep_size, e = moe_const(b, here);
    struct moe_ref got = moe_ref(moe_new_buffer(b, "peer_counts", MOE_BUF_INDEX, MOE_I64, m->n_layers, m->E));
    struct moe_symbol y = {.scope = MOE_SCOPE_PEER,
                           .comm = m->ep_comm,
                           .rows = m->ep_size,
                           .cols = here,
                           .on_device = by->on_device};
    int to_peer = moe_new_symbol(b, "rows_to_peer", m->counts.buffer, true, y);
    int from_peer = moe_new_symbol(b, "rows_from_peer", got.buffer, true, y);
    y.scope = MOE_SCOPE_EXPERT;
    int of_expert = moe_new_symbol(b, "rows_of_expert", got.buffer, false, y);
    moe_lower_move_by(by->counts, b, m, "exchange_counts", m->counts, e, got, e);
    return (struct arrivals){got, moe_sym(b, to_peer), moe_sym(b, from_peer), moe_sum(b, from_peer),
                             of_expert};
}

/* Every rank believes that the others pad to its own capacity. A group that was not set has other peers than
 * those that split the experts, and splits the rows among them. */
static struct arrivals padded_arrivals(struct moe_builder *b, const struct moe_layer *m)
{
    int here = m->n_experts / m->ep_size, peers = moe_group_size(&b->s->comms[m->ep_comm], 0);
    int of_peer = moe_mul(b, m->padded_rows, moe_const(b, m->n_experts / peers));
    struct moe_symbol y = {.scope = MOE_SCOPE_EXPERT, .comm = -1, .cols = here};
    y.expr = moe_mul(b, m->padded_rows, moe_const(b, m->ep_size));
    int of_expert = moe_new_symbol(b, "padded_rows_of_expert", -1, false, y);
    return (struct arrivals){m->padded_arrive, of_peer, of_peer, moe_sum(b, of_expert), of_expert};
}

/* Each row's probability goes with it: returns them [n], sorted as the rows are. */
static struct moe_ref send_probs(struct moe_builder *b, const struct moe_layer *m, const struct arrivals *in)
{
    int one = moe_const(b, 1), TK = moe_mul(b, m->T, m->K);
    struct moe_ref taken = moe_rows(b, m, "row_prob", TK, one),
                   sent = moe_rows(b, m, "sent_probs", m->n_rows, one);
    struct moe_ref arrived = moe_rows(b, m, "arrived_probs", in->n, one),
                   sorted = moe_rows(b, m, "probs", in->n, one);
    moe_emit(b, (struct moe_op){.name = "take_probs",
                                .kernel = MOE_K_TAKE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(m->prob, m->expert),
                                MOE_WRITES(taken),
                                MOE_SIZES(m->T, m->E, m->K)});
    moe_emit(b, (struct moe_op){.name = "permute_probs",
                                .kernel = MOE_K_PERMUTE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(taken, m->slot),
                                MOE_WRITES(sent),
                                MOE_SIZES(TK, one, one, m->n_rows)});
    moe_lower_move(b, m, "dispatch_probs", sent, in->to_peer, arrived, in->from_peer);
    moe_lower_probs_moved(b, m, 3);
    moe_emit(b, (struct moe_op){
                    .name = "sort_probs",
                    .kernel = MOE_K_SORT_ROWS,
                    .type = m->type,
                    .needs_grad = 1,
                    MOE_READS(arrived, in->counts),
                    MOE_WRITES(sorted),
                    MOE_SIZES(moe_const(b, m->ep_size), moe_const(b, m->n_experts / m->ep_size), one)});
    return sorted;
}

static struct moe_ref weigh(struct moe_builder *b, const struct moe_layer *m, struct moe_ref rows,
                            struct moe_ref probs, int n)
{
    struct moe_ref weighed = moe_rows(b, m, "weighed", n, m->H);
    moe_emit(b, (struct moe_op){.name = "weigh",
                                .kernel = MOE_K_WEIGH,
                                .type = m->type,
                                .mode = m->row_dot,
                                .needs_grad = 3,
                                MOE_READS(rows, probs),
                                MOE_WRITES(weighed),
                                MOE_SIZES(n, m->H)});
    return weighed;
}

/* At home: the sum of a token's rows, weighed here unless they were on the expert's rank. */
static void add_up(struct moe_builder *b, const struct moe_layer *m, struct moe_ref back)
{
    struct moe_op sum = {.name = "unpermute",
                         .kernel = MOE_K_PERMUTE_BWD,
                         .type = m->type,
                         .needs_grad = 1,
                         MOE_READS(back, m->slot),
                         MOE_WRITES(m->y),
                         MOE_SIZES(m->T, m->H, m->K, m->n_rows)};
    struct moe_op combine = {.name = "unpermute",
                             .kernel = MOE_K_COMBINE,
                             .type = m->type,
                             .mode = m->row_dot,
                             .needs_grad = 3,
                             MOE_READS(back, m->prob, m->expert, m->slot),
                             MOE_WRITES(m->y),
                             MOE_SIZES(m->T, m->H, m->K, m->E, m->n_rows)};
    moe_emit(b, m->probs_at_expert ? sum : combine);
}

void moe_lower_alltoall(struct moe_builder *b, const struct moe_layer *m, const struct moe_carriers *by)
{
    int P = moe_const(b, m->ep_size), e = moe_const(b, m->n_experts / m->ep_size);
    struct arrivals in = m->padded_rows ? padded_arrivals(b, m) : exchange_counts(b, m, by);
    struct moe_op permute = {.name = "permute",
                             .kernel = MOE_K_PERMUTE,
                             .type = m->type,
                             .needs_grad = 1,
                             MOE_SIZES(m->T, m->H, m->K, m->n_rows)};
    struct moe_op read_counts = {
        .name = "read_counts", .kind = MOE_HOST_SYNC, MOE_READS(m->counts, in.counts)};
    struct moe_ref sent = moe_rows(b, m, "sent", m->n_rows, m->H),
                   arrived = moe_rows(b, m, "arrived", in.n, m->H);
    struct moe_ref rows = moe_rows(b, m, "rows", in.n, m->H), leaving = moe_rows(b, m, "leaving", in.n, m->H);
    struct moe_ref back = moe_rows(b, m, "back", m->n_rows, m->H);
    int send = moe_mul(b, in.to_peer, m->H), recv = moe_mul(b, in.from_peer, m->H);
    permute.reads[permute.n_reads++] = m->x;
    permute.reads[permute.n_reads++] = m->slot;
    permute.writes[permute.n_writes++] = sent;
    if (by->on_device) moe_lower_bound(m, &permute);
    if (!m->n_rows_from_counts) moe_emit(b, permute); /* runs while the counts travel */
    if (!m->padded_rows && !by->on_device) moe_emit(b, read_counts);
    if (m->n_rows_from_counts) moe_emit(b, permute);
    moe_lower_move_by(by->rows, b, m, "dispatch", sent, send, arrived, recv);
    struct moe_ref probs = m->probs_at_expert ? send_probs(b, m, &in) : m->prob;
    moe_emit(b, (struct moe_op){.name = "sort",
                                .kernel = MOE_K_SORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(arrived, in.counts),
                                MOE_WRITES(rows),
                                MOE_SIZES(P, e, m->H)});
    struct moe_ref done = moe_lower_experts(b, m, rows, in.n, in.of_expert);
    if (m->probs_at_expert) done = weigh(b, m, done, probs, in.n);
    moe_emit(b, (struct moe_op){.name = "unsort",
                                .kernel = MOE_K_UNSORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(done, in.counts),
                                MOE_WRITES(leaving),
                                MOE_SIZES(P, e, m->H)});
    moe_lower_move_by(by->back, b, m, "combine", leaving, recv, back, send);
    add_up(b, m, back);
}

void moe_alltoall(struct moe_builder *b, const struct moe_layer *m)
{
    moe_lower_alltoall(b, m, &(struct moe_carriers){0}); /* NCCL */
}
