/* collectives.c - see internal.h. */
#include "sim/check/internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Parts as a row of a symbol times a factor, or all the same. */
static bool as_product(struct moe_checker *c, int rank, int layer, int expr, struct moe_parts *out)
{
    struct moe_product product;
    if (!moe_eval_product(c->s, c->host, expr, rank, layer, &product)) return false;
    out->factor = product.factor;
    out->total = moe_times(out->n, product.factor);
    if (product.symbol < 0) return out->total != MOE_UNKNOWN;
    out->row = c->host.row(c->host.ctx, product.symbol, rank, layer);
    if (!out->row || out->row->n != out->n) return false;
    out->id = out->row->id;
    out->part = out->row->value;
    out->total = moe_times(out->row->sum, product.factor);
    return out->total != MOE_UNKNOWN;
}

/* Whoever does not count by peer has one number, that at index 0. */
static bool evaluate(struct moe_checker *c, int rank, const struct moe_here *h, bool sends,
                     struct moe_parts *out)
{
    const struct moe_op *op = h->op;
    const struct moe_comm *comm = &c->s->comms[op->comm];
    bool per_peer = sends ? moe_send_per_peer[op->collective] : moe_recv_per_peer[op->collective];
    *out = (struct moe_parts){.own = out->own, .cap = out->cap};
    out->n = per_peer ? moe_group_size(comm, comm->group_of[rank]) : 1;
    if (as_product(c, rank, h->layer, sends ? op->send : op->recv, out)) return true;
    out->row = NULL;
    out->factor = 1;
    out->total = 0;
    out->part = out->own = moe_grow(out->own, &out->cap, out->n, sizeof *out->own);
    moe_eval_all(c->s, c->host, sends ? op->send : op->recv, rank, h->layer, out->n, out->own);
    for (int i = 0; i < out->n; i++) out->total = moe_plus(out->total, out->own[i]);
    return out->total != MOE_UNKNOWN;
}

bool moe_check_enter(struct moe_checker *c, int rank, const struct moe_here *h)
{
    struct moe_place *p = &c->place[rank];
    return evaluate(c, rank, h, true, &p->send) && evaluate(c, rank, h, false, &p->recv);
}

bool moe_check_exceeds(struct moe_checker *c, int rank, const struct moe_here *h)
{
    for (int sends = 0; sends < 2; sends++) {
        struct moe_parts *p = sends ? &c->place[rank].send : &c->place[rank].recv;
        int expr = sends ? h->op->send : h->op->recv, known = 0;
        evaluate(c, rank, h, sends, p);
        for (int i = 0; i < p->n; i++) {
            if (moe_eval_exceeds(c->s, c->host, expr, rank, h->layer, i)) return true;
            known += moe_eval(c->s, c->host, expr, rank, h->layer, i) != MOE_UNKNOWN;
        }
        if (known == p->n && p->total == MOE_UNKNOWN) return true;
    }
    return false;
}

/* Rows hold until something else is asked of the rank. */
static void renew(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_parts *send = &c->place[rank].send, *recv = &c->place[rank].recv;
    if ((send->row && send->row->id != send->id) || (recv->row && recv->row->id != recv->id))
        moe_assert(moe_check_enter(c, rank, h));
}

static int64_t part_of(const struct moe_parts *p, int peer)
{
    return p->part ? moe_times(p->factor, p->part[p->n > 1 ? peer : 0]) : p->factor;
}

bool moe_check_same_group(const struct moe_checker *c, int rank, int a, int b)
{
    const struct moe_comm *x = &c->s->comms[a], *y = &c->s->comms[b];
    int g = x->group_of[rank], h = y->group_of[rank], n = moe_group_size(x, g);
    return n == moe_group_size(y, h) &&
           !memcmp(x->members + x->first[g], y->members + y->first[h], (size_t)n * sizeof *x->members);
}

bool moe_check_range(struct moe_checker *c, int check_class, int rank, const struct moe_here *h,
                     struct moe_ref ref)
{
    const struct moe_buffer *b = &c->s->buffers[ref.buffer];
    if (!ref.n) return true;
    int64_t begin = moe_check_eval(c, c->device, ref.begin, rank, h->layer),
            n = moe_check_eval(c, c->device, ref.n, rank, h->layer),
            room = moe_check_eval(c, c->device, b->extent, rank, h->layer);
    if (n == 0 || (n > 0 && n <= room && begin >= 0 && begin <= room - n)) return true;
    moe_check_verdict(c, check_class, rank, moe_check_label(h),
                      "takes %" PRId64 " elements from %" PRId64 " on of %s, which holds %" PRId64, n, begin,
                      b->name, room);
    return false;
}

/* What a rank sends or receives in all must fit its buffer, and be all of it where elements are added up. */
static void check_extent(struct moe_checker *c, int rank, const struct moe_here *h, bool sends)
{
    struct moe_ref ref = sends ? h->op->reads[0] : h->op->writes[0];
    int64_t total = sends ? c->place[rank].send.total : c->place[rank].recv.total;
    int64_t extent =
        moe_check_eval(c, c->device, ref.n ? ref.n : c->s->buffers[ref.buffer].extent, rank, h->layer);
    moe_check_range(c, 1, rank, h, ref);
    bool whole = moe_reduces[h->op->collective] || moe_check_is_summed(c, ref);
    if (total == extent || (!whole && total < extent)) return;
    if (total == 0 && !moe_reduces[h->op->collective]) return; /* what it writes is nothing */
    moe_check_verdict(c, 1, rank, moe_check_label(h),
                      "%s another number of elements than %s holds, so on rank %d: %" PRId64 " for %" PRId64,
                      sends ? "sends" : "receives", c->s->buffers[ref.buffer].name, rank, total, extent);
}

/* Ranks that issue the same list as this one: few have a fault of their own. */
static int alike(const struct moe_checker *c, int rank)
{
    int n = 0;
    for (int r = 0; r < c->s->n_ranks; r++) n += c->s->role_of[r] == c->s->role_of[rank];
    return n;
}

/* How many operations before it in its block have its name. */
static int namesakes(const struct moe_here *h)
{
    int n = 0;
    for (int i = 0; h->block->ops + i < h->op; i++) n += !strcmp(h->block->ops[i].name, h->op->name);
    return n;
}

/* Do two ranks stand at what has the same label? A stage may leave steps out, so that places in a
 * block tell nothing. */
static bool same_place(const struct moe_here *a, const struct moe_here *b)
{
    if (a->layer != b->layer) return false;
    return a->op == b->op || (a->block->pass == b->block->pass && !strcmp(a->op->name, b->op->name) &&
                              !strcmp(a->block->name, b->block->name) && namesakes(a) == namesakes(b));
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
                moe_check_verdict(c, 2, ranks[j], moe_check_label(&h[i]),
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
    int64_t sends = part_of(&c->place[ranks[i]].send, j), expects = part_of(&c->place[ranks[j]].recv, i);
    if (sends == expects && a->type == b->type && a->collective == b->collective &&
        a->reduction == b->reduction)
        return;
    int named = alike(c, ranks[j]) < alike(c, ranks[i]) ? j : i;
    struct moe_verdict *v =
        moe_check_verdict(c, 1, ranks[named], moe_check_label(&h[named]),
                          "rank %d sends %" PRId64 " %s (%s%s) to rank %d, which expects %" PRId64
                          " %s (%s%s); the outcome is one of: %s, %s, %s, %s",
                          ranks[i], sends, moe_type_text[a->type], moe_collective_text[a->collective],
                          moe_reduction_text[a->reduction], ranks[j], expects, moe_type_text[b->type],
                          moe_collective_text[b->collective], moe_reduction_text[b->reduction], outcomes[0],
                          outcomes[1], outcomes[2], outcomes[3]);
    v->undefined = true;
    c->stop = true;
}

/* ---- all pairs at once ---- */

enum form { SAME, ROWS, OTHER }; /* of the parts of all members, by side */

static const struct moe_parts *side(const struct moe_checker *c, int rank, bool sends)
{
    return sends ? &c->place[rank].send : &c->place[rank].recv;
}

/* SAME: each has one number for all peers. ROWS: each has a row, all times one factor. */
static enum form form_of(const struct moe_checker *c, const int *ranks, int n, bool sends)
{
    const struct moe_parts *first = side(c, ranks[0], sends);
    for (int i = 0; i < n; i++) {
        const struct moe_parts *p = side(c, ranks[i], sends);
        if (!p->part != !first->part) return OTHER;
        if (p->part && (p->factor != first->factor || p->n != n)) return OTHER;
    }
    return first->part ? ROWS : SAME;
}

enum { TILE = 32 }; /* senders at a time: lines of cache of what each of the others expects, read once */

/* Do members i to i + TILE - 1 send what all others expect? */
static bool tile_agrees(const int64_t *const *send, const int64_t *const *recv, int n, int i)
{
    int tile = n - i < TILE ? n - i : TILE;
    int64_t wrong = 0;
    for (int j = 0; j < n; j++)
        for (int k = i; k < i + tile; k++) wrong |= send[k][j] ^ recv[j][k];
    return wrong == 0;
}

static bool all_agree(const struct moe_checker *c, const int *ranks, int n)
{
    const int64_t **send = moe_alloc((size_t)n, sizeof *send), **recv = moe_alloc((size_t)n, sizeof *recv);
    for (int i = 0; i < n; i++) {
        send[i] = c->place[ranks[i]].send.part;
        recv[i] = c->place[ranks[i]].recv.part;
    }
    bool agree = true;
    for (int i = 0; i < n && agree; i += TILE) agree = tile_agrees(send, recv, n, i);
    free(send);
    free(recv);
    return agree;
}

/* Were these rows compared before? Back the same way is the same pairs. */
static bool seen_to_agree(const struct moe_checker *c, const struct moe_agreed *seen, const int *ranks, int n)
{
    bool there = true, back = true;
    for (int i = 0; i < n && (there || back); i++) {
        const struct moe_place *p = &c->place[ranks[i]];
        const struct moe_agreed *a = &seen[ranks[i]];
        if (!p->send.id || !p->recv.id) return false;
        there &= p->send.id == a->send && p->recv.id == a->recv;
        back &= p->send.id == a->recv && p->recv.id == a->send;
    }
    return there || back;
}

static bool rows_agree(struct moe_checker *c, int comm, const int *ranks, int n)
{
    struct moe_agreed *seen = c->agreed + (size_t)comm * (size_t)c->s->n_ranks;
    if (c->place[ranks[0]].send.factor != c->place[ranks[0]].recv.factor) return false;
    if (seen_to_agree(c, seen, ranks, n)) return true;
    if (!all_agree(c, ranks, n)) return false;
    for (int i = 0; i < n; i++)
        seen[ranks[i]] = (struct moe_agreed){c->place[ranks[i]].send.id, c->place[ranks[i]].recv.id};
    return true;
}

/* Each member has one number; the row of each other one says it. Members that share a row are asked once. */
static bool row_says(const struct moe_checker *c, const int *ranks, int n, bool rows_send)
{
    const int64_t *asked = NULL;
    for (int j = 0; j < n; j++) {
        const struct moe_parts *p = side(c, ranks[j], rows_send);
        if (p->part == asked) continue;
        asked = p->part;
        for (int i = 0; i < n; i++)
            if (moe_times(p->factor, p->part[i]) != side(c, ranks[i], !rows_send)->factor) return false;
    }
    return true;
}

static bool all_the_same(const struct moe_checker *c, const int *ranks, int n)
{
    int64_t number = c->place[ranks[0]].send.factor;
    for (int i = 0; i < n; i++)
        if (c->place[ranks[i]].send.factor != number || c->place[ranks[i]].recv.factor != number)
            return false;
    return true;
}

/* Does it follow at once that all pairs agree? Else they are asked one by one. */
static bool all_pairs_agree(struct moe_checker *c, const struct moe_here *h, int comm, const int *ranks,
                            int n)
{
    for (int i = 1; i < n; i++)
        if (h[i].op->type != h[0].op->type || h[i].op->collective != h[0].op->collective ||
            h[i].op->reduction != h[0].op->reduction)
            return false;
    enum form send = form_of(c, ranks, n, true), recv = form_of(c, ranks, n, false);
    if (send == SAME && recv == SAME) return all_the_same(c, ranks, n);
    if (send == ROWS && recv == ROWS) return rows_agree(c, comm, ranks, n);
    return send != OTHER && recv != OTHER && row_says(c, ranks, n, send == ROWS);
}

void moe_check_collective(struct moe_checker *c, const struct moe_here *h, int comm, int group)
{
    const struct moe_comm *m = &c->s->comms[comm];
    const int *ranks = m->members + m->first[group];
    int n = moe_group_size(m, group);
    check_order(c, h, ranks, n, m->name);
    /* Where no side counts by peer, all agree when all agree with the first. */
    bool per_peer = moe_send_per_peer[h[0].op->collective] || moe_recv_per_peer[h[0].op->collective];
    for (int i = 0; i < n; i++) renew(c, ranks[i], &h[i]);
    bool agreed = !c->stop && all_pairs_agree(c, h, comm, ranks, n);
    for (int i = 0; i < n && !agreed; i++)
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
