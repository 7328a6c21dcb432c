/* network.c - see network.h.
 *
 * A flow whose rate did not change keeps its end to the picosecond: remaining_bytes is brought up to date
 * only when the rate changes, so rounding does not depend on how many other flows came and went. */
#include "sim/network.h"

#include "sim/share.h"

#include <stdlib.h>

void moe_network_init(struct moe_network *net, const struct moe_topo *topo)
{
    *net = (struct moe_network){.topo = topo, .next = MOE_NEVER};
}

static void set_rate(struct moe_flow *f, moe_ps now, double rate)
{
    if (rate == f->rate) return;
    double left = f->remaining_bytes - f->rate * 1e-12 * (double)(now - f->since);
    f->remaining_bytes = left > 0 ? left : 0;
    f->rate = rate;
    f->since = now;
    f->end = now + moe_time(f->remaining_bytes, rate);
}

void moe_network_add(struct moe_network *net, moe_ps now, int from, int to, int64_t bytes, int tag)
{
    net->flow = moe_grow(net->flow, &net->cap, net->n + 1, sizeof *net->flow);
    struct moe_flow *f = &net->flow[net->n++];
    *f =
        (struct moe_flow){.from = from, .to = to, .tag = tag, .remaining_bytes = (double)bytes, .since = now};
    f->n_links = moe_topo_path(net->topo, from, to, f->path);
    bool crosses[MOE_LINK_CLASS_COUNT] = {false};
    for (int i = 0; i < f->n_links; i++) crosses[net->topo->link_class[f->path[i]]] = true;
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++)
        if (crosses[c]) net->bytes[c] += bytes;
    if (!f->n_links) set_rate(f, now, net->topo->memory_Bps / 2);
    net->now = now;
    net->changed = true;
}

/* Flows without links keep their rate and stay out of the system. */
static void solve(struct moe_network *net)
{
    net->first = moe_grow(net->first, &net->cap_first, net->n + 1, sizeof *net->first);
    net->path = moe_grow(net->path, &net->cap_path, net->n * MOE_PATH_MAX, sizeof *net->path);
    net->rate = moe_grow(net->rate, &net->cap_rate, net->n, sizeof *net->rate);
    int n = 0, n_path = 0;
    for (int f = 0; f < net->n; f++) {
        const struct moe_flow *flow = &net->flow[f];
        if (!flow->n_links) continue;
        for (int i = 0; i < flow->n_links; i++) net->path[n_path++] = flow->path[i];
        net->first[++n] = n_path;
    }
    moe_share(net->topo->n_links, net->topo->link_Bps, n, net->first, net->path, NULL, net->rate);
    n = 0;
    net->next = MOE_NEVER;
    for (int f = 0; f < net->n; f++) {
        struct moe_flow *flow = &net->flow[f];
        if (flow->n_links) set_rate(flow, net->now, net->rate[n++]);
        if (flow->end < net->next) net->next = flow->end;
    }
}

moe_ps moe_network_next(struct moe_network *net)
{
    if (net->changed) solve(net);
    net->changed = false;
    return net->next;
}

void moe_network_end(struct moe_network *net, moe_ps now)
{
    int left = 0;
    net->n_ended = 0;
    net->next = MOE_NEVER;
    for (int f = 0; f < net->n; f++) {
        if (net->flow[f].end > now) {
            if (net->flow[f].end < net->next) net->next = net->flow[f].end;
            net->flow[left++] = net->flow[f];
            continue;
        }
        net->ended = moe_grow(net->ended, &net->cap_ended, net->n_ended + 1, sizeof *net->ended);
        net->ended[net->n_ended++] = net->flow[f];
        if (net->flow[f].n_links) net->changed = true;
    }
    net->n = left;
    net->now = now;
}

void moe_network_free(struct moe_network *net)
{
    free(net->flow);
    free(net->ended);
    free(net->first);
    free(net->path);
    free(net->rate);
}
