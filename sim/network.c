/* network.c - see network.h. */
#include "sim/network.h"

#include <math.h>
#include <stdlib.h>

enum { UNKNOWN = -1 };          /* first of a clock */
static const moe_ps STALE = -1; /* end of a clock: to be found */

_Static_assert((int)MOE_SHARE_PATH > (int)MOE_PATH_MAX, "a path and a limit must fit");

static void add_clocks(struct moe_network *net, int from)
{
    net->clock = moe_grow(net->clock, &net->cap_clocks, net->share.n_links, sizeof *net->clock);
    for (int l = from; l < net->share.n_links; l++)
        net->clock[l] = (struct moe_clock){.first = UNKNOWN, .end = MOE_NEVER};
}

void moe_network_init(struct moe_network *net, const struct moe_topo *topo)
{
    int n = topo->n_links + topo->n_ranks;
    double *cap = moe_alloc((size_t)n, sizeof *cap);
    *net = (struct moe_network){.topo = topo, .next = MOE_NEVER, .vacant = -1};
    for (int l = 0; l < n; l++) cap[l] = l < topo->n_links ? topo->link_Bps[l] : topo->memory_Bps / 2;
    moe_share_init(&net->share, n, cap);
    add_clocks(net, 0);
    net->first_limit = moe_alloc((size_t)topo->n_ranks, sizeof *net->first_limit);
    for (int rank = 0; rank < topo->n_ranks; rank++) net->first_limit[rank] = -1;
    free(cap);
}

void moe_network_free(struct moe_network *net)
{
    moe_share_free(&net->share);
    moe_heap_free(&net->starts);
    free(net->clock);
    free(net->travel);
    free(net->flow);
    free(net->limit);
    free(net->first_limit);
    free(net->plan);
    free(net->ended);
}

/* ---- starts ---- */

/* The link that holds flows from a rank at this rate. */
static int limit_of(struct moe_network *net, int rank, double rate_Bps)
{
    int *first = &net->first_limit[rank];
    for (int i = *first; i >= 0; i = net->limit[i].next)
        if (net->limit[i].rate_Bps == rate_Bps) return net->limit[i].link;
    int l = moe_share_add_limit(&net->share, rate_Bps);
    add_clocks(net, l);
    net->limit = moe_grow(net->limit, &net->cap_limits, net->n_limits + 1, sizeof *net->limit);
    net->limit[net->n_limits] = (struct moe_limit){rate_Bps, l, *first};
    *first = net->n_limits++;
    return l;
}

/* A flow that may go leaves as soon as its delay is over. */
static void release(struct moe_network *net, int f)
{
    moe_heap_push(&net->starts, (struct moe_event){.time = net->now + net->flow[f].delay, .a = f});
}

static int new_flow(struct moe_network *net)
{
    int f = net->vacant;
    if (f >= 0) {
        net->vacant = net->flow[f].next;
        return f;
    }
    f = net->n_flows++;
    net->flow = moe_grow(net->flow, &net->cap_flows, net->n_flows, sizeof *net->flow);
    return f;
}

void moe_network_add(struct moe_network *net, moe_ps now, int n, const struct moe_sent *plan, int tag)
{
    net->now = now;
    net->plan = moe_grow(net->plan, &net->cap_plan, n, sizeof *net->plan);
    for (int i = 0; i < n; i++) {
        const struct moe_sent *sent = &plan[i];
        int f = net->plan[i] = new_flow(net);
        moe_assert(sent->after < i && sent->bytes >= 0);
        net->flow[f] = (struct moe_flow){.from = sent->from,
                                         .to = sent->to,
                                         .tag = tag,
                                         .order = net->started++,
                                         .bytes = sent->bytes,
                                         .rate_Bps = sent->rate_Bps,
                                         .wire = sent->wire > 0 ? sent->wire : 1,
                                         .delay = moe_time(sent->delay_s, 1),
                                         .followers = -1};
        if (sent->after < 0) {
            release(net, f);
        } else {
            struct moe_flow *before = &net->flow[net->plan[sent->after]];
            net->flow[f].next = before->followers;
            before->followers = f;
        }
    }
}

static void set_out(struct moe_network *net, int f)
{
    const struct moe_flow *flow = &net->flow[f];
    int path[MOE_SHARE_PATH], n = moe_topo_path(net->topo, flow->from, flow->to, path);
    bool crosses[MOE_LINK_CLASS_COUNT] = {false};
    for (int i = 0; i < n; i++) crosses[net->topo->link_class[path[i]]] = true;
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++)
        if (crosses[c]) net->bytes[c] += flow->bytes;
    if (!n) path[n++] = net->topo->n_links + flow->from;
    if (flow->rate_Bps > 0) path[n++] = limit_of(net, flow->from, flow->rate_Bps);
    int place = moe_share_add(&net->share, n, path);
    net->travel = moe_grow(net->travel, &net->cap_travels, place + 1, sizeof *net->travel);
    net->travel[place] = (struct moe_travel){f, (double)flow->bytes * flow->wire};
}

/* ---- rates and ends ---- */

/* What the clock of link l, at this level since it was set, shows now. */
static double shown(const struct moe_network *net, int l, double level)
{
    const struct moe_clock *c = &net->clock[l];
    return c->bytes + level * 1e-12 * (double)(net->now - c->since);
}

/* When the flow at place f ends if its server keeps its level. */
static moe_ps end_of(const struct moe_network *net, int f)
{
    int l = net->share.flow[f].server;
    const struct moe_clock *c = &net->clock[l];
    moe_ps end = c->since + moe_time(fmax(net->travel[f].due - c->bytes, 0), net->share.link[l].level);
    return end > net->now ? end : net->now;
}

/* The flow at place f has a new server: what it has left is due on another clock. */
static void move(struct moe_network *net, int f)
{
    const struct moe_share_flow *w = &net->share.flow[f];
    struct moe_clock *to = &net->clock[w->server];
    double *due = &net->travel[f].due;
    if (w->was >= 0) {
        struct moe_clock *from = &net->clock[w->was];
        *due = fmax(*due - shown(net, w->was, net->share.link[w->was].level), 0);
        if (from->first == f) from->first = UNKNOWN;
        from->end = STALE;
    }
    *due += shown(net, w->server, net->share.link[w->server].level);
    if (to->first != UNKNOWN && *due < net->travel[to->first].due) to->first = f;
    to->end = STALE;
}

static void set_end(struct moe_network *net, int l)
{
    const struct moe_share_link *k = &net->share.link[l];
    struct moe_clock *c = &net->clock[l];
    int first = c->first;
    for (int e = 0; c->first == UNKNOWN && e < k->n_served; e++) {
        int f = k->flow[e].flow;
        if (first == UNKNOWN || net->travel[f].due < net->travel[first].due) first = f;
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
    moe_ps start = net->starts.n ? net->starts.event[0].time : MOE_NEVER;
    return start < net->next ? start : net->next;
}

static int by_order(const void *a, const void *b)
{
    uint64_t x = ((const struct moe_flow *)a)->order, y = ((const struct moe_flow *)b)->order;
    return (x > y) - (x < y);
}

/* A flow has ended: those that waited for it go on. */
static void end_flow(struct moe_network *net, int f)
{
    net->ended = moe_grow(net->ended, &net->cap_ended, net->n_ended + 1, sizeof *net->ended);
    net->ended[net->n_ended++] = net->flow[f];
    for (int i = net->flow[f].followers, next; i >= 0; i = next) {
        next = net->flow[i].next;
        release(net, i);
    }
    net->flow[f].next = net->vacant;
    net->vacant = f;
}

static void end_travels(struct moe_network *net, int l)
{
    const struct moe_share_link *k = &net->share.link[l];
    for (int e = k->n_served - 1; e >= 0; e--) { /* the last fills the place of one that is removed */
        int place = k->flow[e].flow;
        if (end_of(net, place) > net->now) continue;
        moe_share_remove(&net->share, place);
        end_flow(net, net->travel[place].flow);
    }
    net->clock[l].first = UNKNOWN;
    net->clock[l].end = STALE;
}

void moe_network_end(struct moe_network *net, moe_ps now)
{
    struct moe_event start;
    net->now = now;
    net->n_ended = 0;
    for (int l = 0; l < net->share.n_links; l++)
        if (net->clock[l].end <= now) end_travels(net, l);
    while (net->starts.n && net->starts.event[0].time <= now) {
        moe_heap_pop(&net->starts, &start);
        if (net->flow[start.a].bytes > 0)
            set_out(net, start.a);
        else
            end_flow(net, start.a);
    }
    if (net->n_ended) qsort(net->ended, (size_t)net->n_ended, sizeof *net->ended, by_order);
}

int moe_plan_add(struct moe_plan *plan, struct moe_sent flow)
{
    plan->flow = moe_grow(plan->flow, &plan->cap, plan->n + 1, sizeof *plan->flow);
    plan->flow[plan->n] = flow;
    return plan->n++;
}

moe_ps moe_plan_time(const struct moe_topo *topo, const struct moe_plan *plan)
{
    struct moe_network net;
    moe_network_init(&net, topo);
    moe_network_add(&net, 0, plan->n, plan->flow, 0);
    for (moe_ps next; (next = moe_network_next(&net)) != MOE_NEVER;) moe_network_end(&net, next);
    moe_ps end = net.now;
    moe_network_free(&net);
    return end;
}
