/* network.c - see network.h. */
#include "sim/network.h"

#include <math.h>
#include <stdlib.h>

enum { UNKNOWN = -1 };          /* first of a clock */
static const moe_ps STALE = -1; /* end of a clock: to be found */

_Static_assert((int)MOE_SHARE_PATH > (int)MOE_PATH_MAX, "a path and a limit must fit");

/* ---- ends of links: a tree whose node i has the first end below its children 2i and 2i + 1 ---- */

/* The end of link l is as its clock says. */
static void lift_end(struct moe_network *net, int l)
{
    int i = net->n_leaves + l;
    moe_ps end = net->clock[l].end;
    for (net->first_end[i] = end; i > 1; i /= 2) {
        moe_ps other = net->first_end[i ^ 1];
        if (other < end) end = other;
        if (net->first_end[i / 2] == end) break;
        net->first_end[i / 2] = end;
    }
}

/* The next link after l that ends by `now`, in the order of their numbers; -1: none. */
static int next_to_end(const struct moe_network *net, int l, moe_ps now)
{
    int i = l < 0 ? 1 : net->n_leaves + l;
    if (l >= 0) { /* up to the first node on the right */
        while (i > 1 && (i % 2 || net->first_end[i + 1] > now)) i /= 2;
        if (i == 1) return -1;
        i++;
    } else if (net->first_end[1] > now) {
        return -1;
    }
    while (i < net->n_leaves) i = 2 * i + (net->first_end[2 * i] > now);
    return i - net->n_leaves;
}

/* The end of link l is to be found. */
static void set_stale(struct moe_network *net, int l)
{
    if (net->clock[l].end == STALE) return;
    net->clock[l].end = STALE;
    net->stale[net->n_stale++] = l;
}

static void add_clocks(struct moe_network *net, int from)
{
    int n = net->share.n_links, leaves = net->n_leaves ? net->n_leaves : 1;
    net->clock = moe_grow(net->clock, &net->cap_clocks, n, sizeof *net->clock);
    net->stale = moe_grow(net->stale, &net->cap_stale, n, sizeof *net->stale);
    for (int l = from; l < n; l++) net->clock[l] = (struct moe_clock){.first = UNKNOWN, .end = MOE_NEVER};
    if (n <= net->n_leaves) return;
    while (leaves < n) leaves *= 2;
    net->n_leaves = leaves;
    free(net->first_end);
    net->first_end = moe_alloc(2 * (size_t)leaves, sizeof *net->first_end);
    for (int i = 0; i < leaves; i++) net->first_end[leaves + i] = i < n ? net->clock[i].end : MOE_NEVER;
    for (int i = leaves - 1; i > 0; i--) {
        moe_ps left = net->first_end[2 * i], right = net->first_end[2 * i + 1];
        net->first_end[i] = left < right ? left : right;
    }
}

void moe_network_init(struct moe_network *net, const struct moe_topo *topo)
{
    int n = topo->n_links + topo->n_ranks;
    double *cap = moe_alloc((size_t)n, sizeof *cap);
    *net = (struct moe_network){.topo = topo, .vacant = -1};
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
    free(net->stale);
    free(net->first_end);
    free(net->travel);
    free(net->flow);
    free(net->limit);
    free(net->first_limit);
    free(net->plan);
    free(net->ended);
}

/* ---- starts ---- */

/* The link that holds flows from a rank at this rate: one of the rank that has it, else one that has had no
 * flow since the last solve, or a new one. */
static int limit_of(struct moe_network *net, int rank, double rate_Bps)
{
    int *first = &net->first_limit[rank];
    struct moe_limit *idle = NULL;
    for (int i = *first; i >= 0; i = net->limit[i].next) {
        struct moe_limit *limit = &net->limit[i];
        const struct moe_share_link *k = &net->share.link[limit->link];
        if (limit->rate_Bps == rate_Bps) return limit->link;
        if (!k->n && k->level == 0) idle = limit;
    }
    if (idle) {
        moe_share_set_limit(&net->share, idle->link, rate_Bps);
        idle->rate_Bps = rate_Bps;
        return idle->link;
    }
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
        set_stale(net, w->was);
    }
    *due += shown(net, w->server, net->share.link[w->server].level);
    if (to->first != UNKNOWN && *due < net->travel[to->first].due) to->first = f;
    set_stale(net, w->server);
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
    lift_end(net, l);
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
        set_stale(net, l);
    }
    for (int i = 0; i < s->n_moved; i++) move(net, s->moved[i]);
    for (int i = 0; i < net->n_stale; i++) set_end(net, net->stale[i]);
    net->n_stale = 0;
}

moe_ps moe_network_next(struct moe_network *net)
{
    if (net->share.n_dirty) solve(net);
    moe_ps start = net->starts.n ? net->starts.event[0].time : MOE_NEVER;
    return start < net->first_end[1] ? start : net->first_end[1];
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
    set_stale(net, l);
}

void moe_network_end(struct moe_network *net, moe_ps now)
{
    struct moe_event start;
    net->now = now;
    net->n_ended = 0;
    for (int l = -1; (l = next_to_end(net, l, now)) >= 0;) end_travels(net, l);
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
