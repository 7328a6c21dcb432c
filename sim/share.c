/* share.c - see share.h.
 *
 * The level of a link is what is left of it divided by its flows that are not settled: the common rate at
 * which it would fill; that of a limit is its cap. Settling flows at the lowest level never lowers the level
 * of another link. So the heap may hold levels that are out of date: they are too low, and are corrected when
 * they come to the top. A link is corrected at most once per flow that was settled on it.
 *
 * Parts are a union-find that only joins; one falls apart when its last flow has left. So a part may be
 * larger than need be, which costs time and changes nothing. */
#include "sim/share.h"

#include <math.h>
#include <stdlib.h>

/* Levels this close (relative) are one, so that rounding does not tell apart links that fill together. */
static const double TIE = 1e-12;

/* Link l alone. */
static void start_part(struct moe_share_link *k, int l)
{
    k->parent = k->next = l;
    k->part_flows = 0;
    k->part_level = INFINITY;
}

static int add_link(struct moe_share *s, double cap, bool limit)
{
    int l = s->n_links++, room = s->cap_links;
    moe_assert(cap > 0 && isfinite(cap));
    s->link = moe_grow(s->link, &s->cap_links, s->n_links, sizeof *s->link);
    if (s->cap_links > room) { /* what a solve needs of each link */
        free(s->filling);
        free(s->heap);
        free(s->tied);
        s->filling = moe_alloc((size_t)s->cap_links, sizeof *s->filling);
        s->heap = moe_alloc((size_t)s->cap_links, sizeof *s->heap);
        s->tied = moe_alloc((size_t)s->cap_links, sizeof *s->tied);
    }
    s->link[l] = (struct moe_share_link){.cap = cap, .limit = limit};
    start_part(&s->link[l], l);
    return l;
}

void moe_share_init(struct moe_share *s, int n_links, const double *cap)
{
    *s = (struct moe_share){.vacant = -1};
    for (int l = 0; l < n_links; l++) add_link(s, cap[l], false);
}

int moe_share_add_limit(struct moe_share *s, double cap)
{
    return add_link(s, cap, true);
}

void moe_share_set_limit(struct moe_share *s, int limit, double cap)
{
    struct moe_share_link *k = &s->link[limit];
    moe_assert(k->limit && !k->n && k->level == 0);
    moe_assert(cap > 0 && isfinite(cap));
    k->cap = cap;
}

void moe_share_free(struct moe_share *s)
{
    for (int l = 0; l < s->n_links; l++) free(s->link[l].flow);
    free(s->link);
    free(s->flow);
    free(s->dirty);
    free(s->changed);
    free(s->moved);
    free(s->filling);
    free(s->heap);
    free(s->tied);
}

static void append(int **items, int *n, int *cap, int item)
{
    *items = moe_grow(*items, cap, *n + 1, sizeof **items);
    (*items)[(*n)++] = item;
}

/* ---- parts ---- */

static int root_of(struct moe_share *s, int l)
{
    struct moe_share_link *k = s->link;
    while (k[l].parent != l) l = k[l].parent = k[k[l].parent].parent;
    return l;
}

static void join(struct moe_share *s, int l, int m)
{
    struct moe_share_link *a = &s->link[root_of(s, l)], *b = &s->link[root_of(s, m)];
    if (a == b) return;
    int next = a->next;
    a->next = b->next;
    b->next = next;
    b->parent = a->parent;
    a->part_flows += b->part_flows;
    a->part_level = fmin(a->part_level, b->part_level);
}

/* A flow over link l and of this rate joins (by 1) or leaves (by -1) its part. */
static void change(struct moe_share *s, int l, int by, double rate)
{
    struct moe_share_link *root = &s->link[root_of(s, l)];
    if (isinf(root->part_level)) append(&s->dirty, &s->n_dirty, &s->cap_dirty, l);
    root->part_level = fmin(root->part_level, rate);
    root->part_flows += by;
}

/* ---- lists ---- */

static void swap_entries(struct moe_share *s, struct moe_share_link *k, int a, int b)
{
    struct moe_share_entry entry = k->flow[a];
    k->flow[a] = k->flow[b];
    k->flow[b] = entry;
    s->flow[k->flow[a].flow].place[k->flow[a].i] = a;
    s->flow[k->flow[b].flow].place[k->flow[b].i] = b;
}

/* Link l, -1: none, serves flow f from now on. */
static void set_server(struct moe_share *s, int f, int l)
{
    struct moe_share_flow *w = &s->flow[f];
    for (int i = 0; i < w->n_links; i++) {
        struct moe_share_link *k = &s->link[w->link[i]];
        if (w->link[i] == w->server) swap_entries(s, k, w->place[i], --k->n_served);
        if (w->link[i] == l) swap_entries(s, k, w->place[i], k->n_served++);
    }
    w->was = w->server;
    w->server = l;
}

int moe_share_add(struct moe_share *s, int n, const int *path)
{
    int f = s->vacant;
    if (f < 0) {
        f = s->n_places++;
        s->flow = moe_grow(s->flow, &s->cap_flows, s->n_places, sizeof *s->flow);
    } else {
        s->vacant = s->flow[f].place[0];
    }
    struct moe_share_flow *w = &s->flow[f];
    moe_assert(n > 0 && n <= MOE_SHARE_PATH);
    *w = (struct moe_share_flow){.n_links = n, .server = -1};
    for (int i = 0; i < n; i++) {
        moe_assert(path[i] >= 0 && path[i] < s->n_links);
        struct moe_share_link *k = &s->link[w->link[i] = path[i]];
        k->flow = moe_grow(k->flow, &k->cap_flows, k->n + 1, sizeof *k->flow);
        struct moe_share_entry *entry = &k->flow[w->place[i] = k->n++];
        *entry = (struct moe_share_entry){f, i, 0, {0}};
        for (int o = 0; o < n; o++)
            if (o != i) entry->other[entry->n_others++] = path[o];
        join(s, path[0], path[i]);
    }
    change(s, path[0], 1, 0);
    return f;
}

void moe_share_remove(struct moe_share *s, int f)
{
    struct moe_share_flow *w = &s->flow[f];
    change(s, w->link[0], -1, w->server < 0 ? 0 : s->link[w->server].level);
    set_server(s, f, -1);
    for (int i = 0; i < w->n_links; i++) {
        struct moe_share_link *k = &s->link[w->link[i]];
        swap_entries(s, k, w->place[i], --k->n);
    }
    w->place[0] = s->vacant;
    s->vacant = f;
}

/* ---- filling ---- */

/* Not below the level reached, which rounding could do. */
static double link_level(const struct moe_share *s, int l)
{
    double level = s->link[l].limit ? s->link[l].cap : s->filling[l].left / s->filling[l].active;
    return level > s->level ? level : s->level;
}

/* Lets the key at i sink to where none below it is lower. */
static void sink(struct moe_share *s, int i)
{
    struct moe_share_key key = s->heap[i];
    for (int child; (child = 2 * i + 1) < s->n_heap; i = child) {
        if (child + 1 < s->n_heap && s->heap[child + 1].level < s->heap[child].level) child++;
        if (s->heap[child].level >= key.level) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = key;
}

static void drop_lowest(struct moe_share *s)
{
    s->heap[0] = s->heap[--s->n_heap];
    sink(s, 0);
}

/* The link with the lowest level; -1 when there is none. */
static int lowest(struct moe_share *s, double *level)
{
    while (s->n_heap) {
        int l = s->heap[0].link;
        if (!s->filling[l].active) {
            drop_lowest(s);
            continue;
        }
        *level = link_level(s, l);
        if (*level <= s->heap[0].level) return l;
        s->heap[0].level = *level;
        sink(s, 0);
    }
    return -1;
}

/* A flow stays at the level of a link; what that leaves of its other links. */
static void settle(struct moe_share *s, const struct moe_share_entry *entry, double level)
{
    for (int i = 0; i < entry->n_others; i++) {
        struct moe_share_filling *other = &s->filling[entry->other[i]];
        other->left -= level;
        other->active--;
    }
}

/* Settles all flows of link l that are not. */
static void serve(struct moe_share *s, int l)
{
    const struct moe_share_link *k = &s->link[l];
    int *active = &s->filling[l].active;
    for (int e = 0; *active > 0; e++) { /* its own come first: what is left of the list is settled */
        int f = k->flow[e].flow, server = s->flow[f].server;
        if (s->flow[f].solve == s->solves || (server >= 0 && s->filling[server].kept)) continue;
        s->flow[f].solve = s->solves;
        settle(s, &k->flow[e], k->level);
        --*active;
        if (s->flow[f].server == l) continue;
        set_server(s, f, l);
        append(&s->moved, &s->n_moved, &s->cap_moved, f);
    }
}

/* Fills link l and all that fill at the same level. */
static void fill_links(struct moe_share *s, int l, double level)
{
    double next = level;
    int n = 0;
    s->level = level;
    for (; l >= 0 && next <= level * (1 + TIE); l = lowest(s, &next)) {
        s->tied[n++] = l;
        s->link[l].level = level;
        drop_lowest(s);
    }
    for (int t = 0; t < n; t++) serve(s, s->tied[t]);
}

/* Puts the links of a part back to where they were when the level came to that of the changes: flows of links
 * that filled before stay as they are. */
static void rewind_part(struct moe_share *s, int root)
{
    int l = root;
    s->level = 0;
    s->n_heap = 0;
    do {
        struct moe_share_link *k = &s->link[l];
        k->was = k->level;
        if (k->was >= s->link[root].part_level) k->level = 0;
        s->filling[l] = (struct moe_share_filling){k->cap, k->n, k->level > 0};
    } while ((l = s->link[l].next) != root);
    do {
        const struct moe_share_link *k = &s->link[l];
        for (int e = 0; k->level > 0 && e < k->n_served; e++) settle(s, &k->flow[e], k->level);
    } while ((l = s->link[l].next) != root);
    do {
        if (s->link[l].level == 0 && s->filling[l].active)
            s->heap[s->n_heap++] = (struct moe_share_key){link_level(s, l), l};
    } while ((l = s->link[l].next) != root);
    for (int i = s->n_heap / 2; i-- > 0;) sink(s, i);
}

static void solve_part(struct moe_share *s, int root)
{
    double level;
    rewind_part(s, root);
    for (int l; (l = lowest(s, &level)) >= 0;) fill_links(s, l, level);
    s->link[root].part_level = INFINITY;
    bool empty = !s->link[root].part_flows;
    int l = root, next;
    do {
        struct moe_share_link *k = &s->link[l];
        if (k->level != k->was) append(&s->changed, &s->n_changed, &s->cap_changed, l);
        next = k->next;
        if (empty) start_part(k, l);
    } while ((l = next) != root);
}

void moe_share_solve(struct moe_share *s)
{
    s->n_changed = s->n_moved = 0;
    s->solves++;
    for (int d = 0; d < s->n_dirty; d++) {
        int root = root_of(s, s->dirty[d]);
        if (!isinf(s->link[root].part_level)) solve_part(s, root);
    }
    s->n_dirty = 0;
}
