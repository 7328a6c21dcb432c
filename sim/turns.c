/* turns.c - see turns.h. */
#include "sim/turns.h"

#include <stdlib.h>

void moe_turns_init(struct moe_turns *t, int n_ranks, int per_node, int cores, moe_ps slice)
{
    int n_nodes = (n_ranks + per_node - 1) / per_node;
    moe_assert(cores > 0 && slice > 0);
    *t = (struct moe_turns){.n_ranks = n_ranks, .per_node = per_node, .slice = slice};
    t->rank = moe_alloc((size_t)n_ranks, sizeof *t->rank);
    t->ended = moe_alloc((size_t)n_ranks, sizeof *t->ended);
    t->node = moe_alloc((size_t)n_nodes, sizeof *t->node);
    for (int n = 0; n < n_nodes; n++) t->node[n] = (struct moe_turn_node){.idle = cores, .first = -1};
}

void moe_turns_free(struct moe_turns *t)
{
    free(t->rank);
    free(t->ended);
    free(t->node);
}

static struct moe_turn_node *node_of(const struct moe_turns *t, int rank)
{
    return &t->node[rank / t->per_node];
}

static void queue(struct moe_turns *t, int rank)
{
    struct moe_turn_node *node = node_of(t, rank);
    t->rank[rank].state = MOE_TURN_QUEUED;
    t->rank[rank].next = -1;
    *(node->first < 0 ? &node->first : &t->rank[node->last].next) = rank;
    node->last = rank;
}

/* Gives idle cores to those that wait. */
static void grant(struct moe_turns *t, struct moe_turn_node *node)
{
    for (; node->idle && node->first >= 0; node->idle--) {
        struct moe_turn *r = &t->rank[node->first];
        node->first = r->next;
        r->state = MOE_TURN_HOLDS;
        r->since = r->resumed = t->now;
    }
}

static bool is_over(const struct moe_turns *t, int rank)
{
    return node_of(t, rank)->first >= 0 && t->now - t->rank[rank].since >= t->slice;
}

/* Puts a rank that holds a core behind those that wait. */
static void yield(struct moe_turns *t, int rank)
{
    struct moe_turn_node *node = node_of(t, rank);
    queue(t, rank);
    node->idle++;
    grant(t, node);
}

void moe_turns_work(struct moe_turns *t, moe_ps now, int rank, moe_ps work)
{
    struct moe_turn *r = &t->rank[rank];
    moe_assert(!r->working);
    t->now = r->resumed = now;
    r->working = true;
    r->left = work;
    if (r->state == MOE_TURN_AWAY) {
        queue(t, rank);
        grant(t, node_of(t, rank));
    } else if (is_over(t, rank)) {
        yield(t, rank);
    }
}

void moe_turns_leave(struct moe_turns *t, moe_ps now, int rank)
{
    struct moe_turn *r = &t->rank[rank];
    moe_assert(!r->working);
    t->now = now;
    if (r->state == MOE_TURN_AWAY) return;
    r->state = MOE_TURN_AWAY;
    node_of(t, rank)->idle++;
    grant(t, node_of(t, rank));
}

moe_ps moe_turns_next(const struct moe_turns *t)
{
    moe_ps next = INT64_MAX;
    for (int i = 0; i < t->n_ranks; i++) {
        const struct moe_turn *r = &t->rank[i];
        if (r->state != MOE_TURN_HOLDS || !r->working) continue;
        moe_ps end = r->resumed + r->left, over = r->since + t->slice;
        if (node_of(t, i)->first >= 0 && over < end) end = over < t->now ? t->now : over;
        if (end < next) next = end;
    }
    return next;
}

void moe_turns_end(struct moe_turns *t, moe_ps now)
{
    t->now = now;
    t->n_ended = 0;
    for (int i = 0; i < t->n_ranks; i++) {
        struct moe_turn *r = &t->rank[i];
        if (r->state != MOE_TURN_HOLDS || !r->working) continue;
        if (r->resumed + r->left <= now) {
            r->working = false;
            t->ended[t->n_ended++] = i;
        } else if (is_over(t, i)) {
            r->left -= now - r->resumed;
            yield(t, i);
        }
    }
}
