/* soundness_order.c - see soundness.h.
 *
 * The executor runs operations one after the other in host order. A machine runs what each stream was handed
 * in order, and apart from that only what `waits` and host syncs name. Two orders are tried: always the
 * compute stream first, and always the other one. Of two operations that nothing orders, each comes first in
 * one of the two: a stream that goes first runs what it has, and as much of the other as it must wait for. */
#include "tests/bench/soundness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct issued {
    const struct moe_block *block;
    const struct moe_op *op;
    int layer, block_id;         /* of its instance; in the new role */
    int needs[MOE_STREAM_COUNT]; /* so many of a stream must be done before */
    int collectives;             /* so many of them are before it in host order */
};

struct queue {
    int n, done;
    int *at; /* [n] into the list */
};

static int count_ops(const struct moe_role *role)
{
    int n = 0;
    for (int i = 0; i < role->n_instances; i++) n += role->blocks[role->itinerary[i].block].n_ops;
    return n;
}

/* A step in host order. Operations are numbered by block and place. */
static struct issued *list_ops(const struct moe_role *role)
{
    struct issued *list = moe_alloc((size_t)count_ops(role), sizeof *list), *next = list;
    int collectives = 0;
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_instance *in = &role->itinerary[i];
        int first = 0;
        for (int b = 0; b < in->block; b++) first += role->blocks[b].n_ops;
        for (int o = 0; o < role->blocks[in->block].n_ops; o++) {
            const struct moe_block *block = &role->blocks[in->block];
            *next++ = (struct issued){block, &block->ops[o], in->layer, first + o, {0}, collectives};
            collectives += block->ops[o].kind == MOE_COLLECTIVE;
        }
    }
    return list;
}

/* met: collectives that are done; -1: they need not be in order. */
static bool is_ready(const struct issued *y, const struct queue q[MOE_STREAM_COUNT], int met)
{
    if (y->op->kind == MOE_COLLECTIVE && met >= 0 && met < y->collectives) return false;
    for (int s = 0; s < MOE_STREAM_COUNT; s++)
        if (q[s].done < y->needs[s]) return false;
    return true;
}

/* in_order: collectives stay in host order. */
static int *order_of(const struct moe_role *role, int first, bool in_order, int *n)
{
    struct issued *list = list_ops(role);
    struct queue q[MOE_STREAM_COUNT] = {{0}};
    *n = count_ops(role);
    int *out = moe_alloc((size_t)*n, sizeof *out), done = 0, at = 0, met = in_order ? 0 : -1;
    for (int s = 0; s < MOE_STREAM_COUNT; s++) q[s].at = moe_alloc((size_t)*n, sizeof *q[s].at);
    while (done < *n) {
        struct issued *y = at < *n ? &list[at] : NULL;
        for (int s = 0; y && s < MOE_STREAM_COUNT; s++) y->needs[s] = y->op->waits >> s & 1 ? q[s].n : 0;
        if (y && y->op->kind != MOE_HOST_SYNC) {
            q[y->op->stream].at[q[y->op->stream].n++] = at++;
            continue;
        }
        if (y && is_ready(y, q, met)) {
            out[done++] = at++;
            continue;
        }
        int s = first;
        if (q[s].done == q[s].n || !is_ready(&list[q[s].at[q[s].done]], q, met)) s = !first;
        moe_assert(q[s].done < q[s].n); /* what was issued first can always run */
        int next = q[s].at[q[s].done++];
        met += in_order && list[next].op->kind == MOE_COLLECTIVE;
        out[done++] = next;
    }
    for (int s = 0; s < MOE_STREAM_COUNT; s++) free(q[s].at);
    free(list);
    return out;
}

/* Each operation becomes a block of its own. */
static void reorder(struct moe_role *role, int first)
{
    int n, n_blocks = 0, b = 0, *order = order_of(role, first, true, &n);
    struct issued *list = list_ops(role);
    for (int i = 0; i < role->n_blocks; i++) n_blocks += role->blocks[i].n_ops;
    struct moe_block *blocks = moe_alloc((size_t)n_blocks, sizeof *blocks);
    struct moe_instance *itinerary = moe_alloc((size_t)n, sizeof *itinerary);
    for (int i = 0; i < n; i++)
        itinerary[i] = (struct moe_instance){list[order[i]].block_id, list[order[i]].layer};
    for (int i = 0; i < role->n_blocks; i++) {
        for (int o = 0; o < role->blocks[i].n_ops; o++, b++) {
            blocks[b] = role->blocks[i];
            blocks[b].ops = moe_alloc(1, sizeof *blocks[b].ops);
            *blocks[b].ops = role->blocks[i].ops[o];
            blocks[b].n_ops = blocks[b].cap = 1;
        }
        free(role->blocks[i].ops);
    }
    free(role->blocks);
    free(role->itinerary);
    role->blocks = blocks;
    role->itinerary = itinerary;
    role->n_blocks = n_blocks;
    role->n_instances = n;
    free(order);
    free(list);
}

void order_streams(struct moe_schedule *s, int first)
{
    for (int r = 0; r < s->n_roles; r++) reorder(&s->roles[r], first);
}

/* What is known before the step begins: places in buckets are. */
static int64_t initial(void *ctx, int symbol, int rank, int layer, int index)
{
    const struct moe_schedule *s = ctx;
    if (s->symbols[symbol].buffer >= 0) return MOE_UNKNOWN;
    return moe_symbol_initial(s, (struct moe_env){initial, ctx, NULL}, symbol, rank, layer, index);
}

struct span {
    int64_t begin, end;
};

static struct span span_of(const struct moe_schedule *s, int rank, struct moe_ref ref, int layer)
{
    struct moe_env env = {.value = initial, .ctx = (void *)s};
    int64_t n = moe_eval(s, env, ref.n ? ref.n : s->buffers[ref.buffer].extent, rank, layer, 0);
    int64_t begin = ref.n ? moe_eval(s, env, ref.begin, rank, layer, 0) : 0;
    return n == MOE_UNKNOWN || begin == MOE_UNKNOWN ? (struct span){0, INT64_MAX}
                                                    : (struct span){begin, begin + n};
}

static bool is_empty(const struct moe_schedule *s, int rank, struct moe_ref ref, int layer)
{
    struct span x = span_of(s, rank, ref, layer);
    return x.begin >= x.end;
}

/* A kernel that writes no element, or adds what it computes of none, looks at nothing. */
static bool is_idle(const struct moe_schedule *s, int rank, const struct issued *y)
{
    bool reads = false;
    if (y->op->kind != MOE_KERNEL) return false;
    for (int i = 0; i < y->op->n_reads; i++) reads |= !is_empty(s, rank, y->op->reads[i], y->layer);
    for (int i = 0; i < y->op->n_writes; i++) {
        struct moe_ref to = y->op->writes[i];
        if (!is_empty(s, rank, to, y->layer) && (reads || !y->op->n_reads || !to.accumulate)) return false;
    }
    return true;
}

/* Does `a` write an element that `b` reads or writes? */
static bool touches(const struct moe_schedule *s, int rank, const struct issued *a, const struct issued *b)
{
    for (int i = 0; i < a->op->n_writes; i++) {
        struct moe_ref to = a->op->writes[i];
        struct span x = span_of(s, rank, to, a->layer);
        for (int j = 0; j < b->op->n_reads + b->op->n_writes; j++) {
            struct moe_ref ref = j < b->op->n_reads ? b->op->reads[j] : b->op->writes[j - b->op->n_reads];
            if (ref.buffer != to.buffer || moe_slot(s, ref, b->layer) != moe_slot(s, to, a->layer)) continue;
            struct span y = span_of(s, rank, ref, b->layer);
            if (x.begin < x.end && y.begin < y.end && x.begin < y.end && y.begin < x.end) return true;
        }
    }
    return false;
}

bool order_races(const struct moe_schedule *s, int rank, char text[], size_t size)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    struct issued *list = list_ops(role);
    int n, *order[2], *place = NULL;
    bool race = false;
    for (int first = 0; first < 2; first++) order[first] = order_of(role, first, false, &n);
    place = moe_alloc((size_t)n, sizeof *place);
    for (int i = 0; i < n; i++) place[order[1][i]] = i;
    for (int i = 0; i < n && !race; i++)
        for (int k = i + 1; k < n && !race; k++) {
            const struct issued *a = &list[order[0][i]], *b = &list[order[0][k]];
            if (place[order[0][i]] < place[order[0][k]]) continue; /* in both orders */
            race = (touches(s, rank, a, b) || touches(s, rank, b, a)) && !is_idle(s, rank, a) &&
                   !is_idle(s, rank, b);
            char name[2][2 * MOE_NAME];
            moe_op_label(a->block, a->op, a->layer, name[0]);
            moe_op_label(b->block, b->op, b->layer, name[1]);
            if (race) snprintf(text, size, "rank %d: nothing orders %s and %s", rank, name[0], name[1]);
        }
    for (int first = 0; first < 2; first++) free(order[first]);
    free(place);
    free(list);
    return race;
}
