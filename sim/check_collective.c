/* check_collective.c - see check_internal.h. */
#include "sim/check_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

int moe_check_parts(const struct moe_checker *c, int rank, const struct moe_op *op, bool sends)
{
    const struct moe_comm *comm = &c->s->comms[op->comm];
    bool per_peer = sends ? moe_send_per_peer[op->collective] : moe_recv_per_peer[op->collective];
    return per_peer ? moe_group_size(comm, comm->group_of[rank]) : 1;
}

/* What a rank sends or receives in all must fit its buffer, and be all of it where elements are added up. */
static void check_extent(struct moe_checker *c, int rank, const struct moe_here *h, bool sends)
{
    struct moe_ref ref = sends ? h->op->reads[0] : h->op->writes[0];
    int64_t total = 0;
    for (int i = 0; i < moe_check_parts(c, rank, h->op, sends); i++)
        total += moe_eval(c->s, c->host, sends ? h->op->send : h->op->recv, rank, h->layer, i);
    int64_t extent = moe_eval(c->s, c->device, c->s->buffers[ref.buffer].extent, rank, h->layer, 0);
    bool whole = moe_reduces[h->op->collective] || moe_check_is_summed(c, ref);
    if (total == extent || (!whole && total < extent)) return;
    moe_check_verdict(c, 1, rank, moe_check_label(h).text, "%s %" PRId64 " elements, but %s holds %" PRId64,
                      sends ? "sends" : "receives", total, c->s->buffers[ref.buffer].name, extent);
}

/* Ranks that issue the same list as this one: few have a fault of their own. */
static int alike(const struct moe_checker *c, int rank)
{
    int n = 0;
    for (int r = 0; r < c->s->n_ranks; r++) n += c->s->role_of[r] == c->s->role_of[rank];
    return n;
}

/* Do two ranks stand at what has the same label? */
static bool same_place(const struct moe_here *a, const struct moe_here *b)
{
    if (a->layer != b->layer) return false;
    return a->op == b->op || (a->op->id == b->op->id && a->block->pass == b->block->pass &&
                              !strcmp(a->op->name, b->op->name) && !strcmp(a->block->name, b->block->name));
}

/* The member to name: it stands where the fewest stand, and issues what the fewest issue. */
static int odd_member(const struct moe_checker *c, const struct moe_here *h, const int *ranks, int n)
{
    int odd = 0, fewest = INT32_MAX, fewest_alike = 0;
    for (int i = 0; i < n; i++) {
        int same = 0, like = alike(c, ranks[i]);
        for (int j = 0; j < n; j++) same += same_place(&h[i], &h[j]);
        if (same > fewest || (same == fewest && like >= fewest_alike)) continue;
        fewest = same;
        fewest_alike = like;
        odd = i;
    }
    return odd;
}

static void check_order(struct moe_checker *c, const struct moe_here *h, const int *ranks, int n,
                        const char *comm)
{
    bool same = true;
    for (int i = 1; i < n; i++) same &= same_place(&h[i], &h[0]);
    if (same) return;
    int odd = odd_member(c, h, ranks, n);
    for (int i = 0; i < n; i++) {
        if (same_place(&h[i], &h[odd])) continue;
        for (int j = 0; j < n; j++)
            if (same_place(&h[j], &h[odd]))
                moe_check_verdict(c, 2, ranks[j], moe_check_label(&h[i]).text,
                                  "enters '%s' on communicator %s where rank %d enters '%s'",
                                  moe_check_label(&h[odd]).text, comm, ranks[i], moe_check_label(&h[i]).text);
        c->stop = true;
        return;
    }
}

static void check_pair(struct moe_checker *c, const struct moe_here *h, const int *ranks, int i, int j)
{
    static const char *const outcomes[] = {MOE_OUTCOMES};
    const struct moe_op *a = h[i].op, *b = h[j].op;
    int64_t sends = moe_eval(c->s, c->host, a->send, ranks[i], h[i].layer, j);
    int64_t expects = moe_eval(c->s, c->host, b->recv, ranks[j], h[j].layer, i);
    if (sends == expects && a->type == b->type && a->collective == b->collective &&
        a->reduction == b->reduction)
        return;
    int named = alike(c, ranks[j]) < alike(c, ranks[i]) ? j : i;
    moe_check_verdict(c, 1, ranks[named], moe_check_label(&h[named]).text,
                      "rank %d sends %" PRId64 " %s (%s%s) to rank %d, which expects %" PRId64
                      " %s (%s%s); the outcome is one of: %s, %s, %s, %s",
                      ranks[i], sends, moe_type_text[a->type], moe_collective_text[a->collective],
                      moe_reduction_text[a->reduction], ranks[j], expects, moe_type_text[b->type],
                      moe_collective_text[b->collective], moe_reduction_text[b->reduction], outcomes[0],
                      outcomes[1], outcomes[2], outcomes[3]);
    c->out->item[c->out->n - 1].undefined = true;
    c->stop = true;
}

void moe_check_collective(struct moe_checker *c, const struct moe_here *h, int comm, int group)
{
    const struct moe_comm *m = &c->s->comms[comm];
    const int *ranks = m->members + m->first[group];
    int n = moe_group_size(m, group);
    check_order(c, h, ranks, n, m->name);
    /* Where no side counts by peer, all agree when all agree with the first. */
    bool per_peer = moe_send_per_peer[h[0].op->collective] || moe_recv_per_peer[h[0].op->collective];
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (per_peer || i == 0 ? n : 1) && !c->stop; j++) check_pair(c, h, ranks, i, j);
    for (int i = 0; i < n && !c->stop; i++) {
        check_extent(c, ranks[i], &h[i], true);
        check_extent(c, ranks[i], &h[i], false);
    }
    if (c->stop) return;
    const struct moe_op **ops = moe_alloc((size_t)n, sizeof *ops);
    for (int i = 0; i < n; i++) ops[i] = h[i].op;
    moe_values_collective(c->values, ops, comm, group, h[0].layer);
    free(ops);
    moe_check_sum(c, h, ranks, n);
}
