/* network.c - see network.h. */
#include "sim/network.h"

#include <math.h>
#include <stdlib.h>

enum { UNKNOWN = -1 };          /* first of a clock */
static const moe_ps STALE = -1; /* end of a clock: to be found */

_Static_assert((int)MOE_SHARE_PATH >= (int)MOE_PATH_MAX, "a path must fit");

void moe_network_init(struct moe_network *net, const struct moe_topo *topo)
{
    int n = topo->n_links + topo->n_ranks;
    double *cap = moe_alloc((size_t)n, sizeof *cap);
    *net = (struct moe_network){.topo = topo, .next = MOE_NEVER};
    for (int l = 0; l < n; l++) cap[l] = l < topo->n_links ? topo->link_Bps[l] : topo->memory_Bps / 2;
    moe_share_init(&net->share, n, cap);
    net->clock = moe_alloc((size_t)n, sizeof *net->clock);
    for (int l = 0; l < n; l++) net->clock[l] = (struct moe_clock){.first = UNKNOWN, .end = MOE_NEVER};
    free(cap);
}

void moe_network_free(struct moe_network *net)
{
    moe_share_free(&net->share);
    free(net->clock);
    free(net->flow);
    free(net->ended);
}

void moe_network_add(struct moe_network *net, moe_ps now, int from, int to, int64_t bytes, int tag)
{
    int path[MOE_PATH_MAX], n = moe_topo_path(net->topo, from, to, path);
    bool crosses[MOE_LINK_CLASS_COUNT] = {false};
    for (int i = 0; i < n; i++) crosses[net->topo->link_class[path[i]]] = true;
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++)
        if (crosses[c]) net->bytes[c] += bytes;
    if (!n) path[n++] = net->topo->n_links + from;
    int f = moe_share_add(&net->share, n, path);
    net->flow = moe_grow(net->flow, &net->cap, f + 1, sizeof *net->flow);
    net->flow[f] = (struct moe_flow){from, to, tag, net->started++, (double)bytes};
    net->now = now;
}

/* What the clock of link l, at this level since it was set, shows now. */
static double shown(const struct moe_network *net, int l, double level)
{
    const struct moe_clock *c = &net->clock[l];
    return c->bytes + level * 1e-12 * (double)(net->now - c->since);
}

/* When flow f ends if its server keeps its level. */
static moe_ps end_of(const struct moe_network *net, int f)
{
    int l = net->share.flow[f].server;
    const struct moe_clock *c = &net->clock[l];
    moe_ps end = c->since + moe_time(fmax(net->flow[f].due - c->bytes, 0), net->share.link[l].level);
    return end > net->now ? end : net->now;
}

/* Flow f has a new server: what it has left is due on another clock. */
static void move(struct moe_network *net, int f)
{
    const struct moe_share_flow *w = &net->share.flow[f];
    struct moe_clock *to = &net->clock[w->server];
    double *due = &net->flow[f].due;
    if (w->was >= 0) {
        struct moe_clock *from = &net->clock[w->was];
        *due = fmax(*due - shown(net, w->was, net->share.link[w->was].level), 0);
        if (from->first == f) from->first = UNKNOWN;
        from->end = STALE;
    }
    *due += shown(net, w->server, net->share.link[w->server].level);
    if (to->first != UNKNOWN && *due < net->flow[to->first].due) to->first = f;
    to->end = STALE;
}

static void set_end(struct moe_network *net, int l)
{
    const struct moe_share_link *k = &net->share.link[l];
    struct moe_clock *c = &net->clock[l];
    int first = c->first;
    for (int e = 0; c->first == UNKNOWN && e < k->n_served; e++) {
        int f = k->flow[e].flow;
        if (first == UNKNOWN || net->flow[f].due < net->flow[first].due) first = f;
    }
    c->first = first;
    c->end = first == UNKNOWN ? MOE_NEVER : end_of(net, first);
}

static void solve(struct moe_network *net)
{
    struct moe_share *s = &net->share;
    moe_share_solve(s);
    for (int i = 0; i < s->n_changed; i++) {
        int l = s->changed[i];
        struct moe_clock *c = &net->clock[l];
        c->bytes = s->link[l].was > 0 ? shown(net, l, s->link[l].was) : 0;
        c->since = net->now;
        c->end = STALE;
    }
    for (int i = 0; i < s->n_moved; i++) move(net, s->moved[i]);
    net->next = MOE_NEVER;
    for (int l = 0; l < s->n_links; l++) {
        if (net->clock[l].end == STALE) set_end(net, l);
        if (net->clock[l].end < net->next) net->next = net->clock[l].end;
    }
}

moe_ps moe_network_next(struct moe_network *net)
{
    if (net->share.n_dirty) solve(net);
    return net->next;
}

static int by_order(const void *a, const void *b)
{
    uint64_t x = ((const struct moe_flow *)a)->order, y = ((const struct moe_flow *)b)->order;
    return (x > y) - (x < y);
}

void moe_network_end(struct moe_network *net, moe_ps now)
{
    net->now = now;
    net->n_ended = 0;
    for (int l = 0; l < net->share.n_links; l++) {
        const struct moe_share_link *k = &net->share.link[l];
        if (net->clock[l].end > now) continue;
        for (int e = k->n_served - 1; e >= 0; e--) { /* the last fills the place of one that is removed */
            int f = k->flow[e].flow;
            if (end_of(net, f) > now) continue;
            net->ended = moe_grow(net->ended, &net->cap_ended, net->n_ended + 1, sizeof *net->ended);
            net->ended[net->n_ended++] = net->flow[f];
            moe_share_remove(&net->share, f);
        }
        net->clock[l].first = UNKNOWN;
        net->clock[l].end = STALE;
    }
    qsort(net->ended, (size_t)net->n_ended, sizeof *net->ended, by_order);
}
