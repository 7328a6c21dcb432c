/* share.c - see share.h.
 *
 * The level of a link is what is left of it divided by its flows that are not frozen: the common rate at
 * which it would fill. Freezing flows at the lowest level never lowers the level of another link. So the heap
 * may hold levels that are out of date: they are too low, and are corrected when they come to the top. A link
 * is corrected at most once per flow that was frozen on it. */
#include "sim/share.h"

#include "sim/heap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Levels this close (relative) are one, so that rounding does not tell apart links that fill together. */
static const double TIE = 1e-12;

struct system {
    int n_links, n_flows;
    const int *first, *path; /* links of a flow */
    double *rate;            /* [F] 0: not frozen */
    double *left;            /* [L] capacity that no frozen flow uses */
    int *active;             /* [L] flows that are not frozen */
    int *flow_first, *flow;  /* [L + 1] flows of a link, as first and path are links of a flow */
    double level;            /* reached so far */
    struct moe_heap heap;    /* of links with active flows, lowest level first */
};

/* Not below the level reached, which rounding could do. */
static double link_level(const struct system *s, int link)
{
    double level = s->left[link] / s->active[link];
    return level > s->level ? level : s->level;
}

/* Doubles above 0 sort like their bit patterns, so a level can be the time of an event. */
static void push_link(struct system *s, int link, double level)
{
    struct moe_event e = {.a = link};
    memcpy(&e.time, &level, sizeof level);
    moe_heap_push(&s->heap, e);
}

/* Takes the link with the lowest level out of the heap; -1 and INFINITY when there is none. */
static int pop_link(struct system *s, double *level)
{
    struct moe_event e;
    while (moe_heap_pop(&s->heap, &e)) {
        double noted;
        if (!s->active[e.a]) continue;
        memcpy(&noted, &e.time, sizeof noted);
        *level = link_level(s, e.a);
        if (*level <= noted) return e.a;
        push_link(s, e.a, *level);
    }
    *level = INFINITY;
    return -1;
}

static void freeze(struct system *s, int f, double rate)
{
    if (s->rate[f] > 0) return;
    s->rate[f] = s->level = rate;
    for (int i = s->first[f]; i < s->first[f + 1]; i++) {
        s->left[s->path[i]] -= rate;
        s->active[s->path[i]]--;
    }
}

/* Freezes the flows of `link` and of all links that fill at the same level. */
static void fill_links(struct system *s, int link, double level, int *tied)
{
    double next = level;
    int n = 0;
    for (; link >= 0 && next <= level * (1 + TIE); link = pop_link(s, &next)) tied[n++] = link;
    if (link >= 0) push_link(s, link, next);
    for (int t = 0; t < n; t++)
        for (int i = s->flow_first[tied[t]]; i < s->flow_first[tied[t] + 1]; i++)
            freeze(s, s->flow[i], level);
}

static int by_limit(const void *a, const void *b, void *limit)
{
    int fa = *(const int *)a, fb = *(const int *)b;
    double la = ((const double *)limit)[fa], lb = ((const double *)limit)[fb];
    return la != lb ? (la > lb) - (la < lb) : fa - fb;
}

/* Flows with a limit, lowest first; returns their number. */
static int sort_limited(const struct system *s, const double *limit, int *limited)
{
    int n = 0;
    for (int f = 0; f < s->n_flows; f++) {
        bool is_limited = limit && isfinite(limit[f]);
        moe_assert(!limit || limit[f] > 0);
        moe_assert(is_limited || s->first[f] < s->first[f + 1]);
        if (is_limited) limited[n++] = f;
    }
    qsort_r(limited, (size_t)n, sizeof *limited, by_limit, (void *)limit);
    return n;
}

static void init(struct system *s, const double *cap)
{
    size_t n_links = (size_t)s->n_links;
    int n_path = s->first[s->n_flows];
    s->left = moe_alloc(n_links, sizeof *s->left);
    s->active = moe_alloc(n_links, sizeof *s->active);
    s->flow_first = moe_alloc(n_links + 1, sizeof *s->flow_first);
    s->flow = moe_alloc((size_t)n_path, sizeof *s->flow);
    for (int i = 0; i < n_path; i++) {
        moe_assert(s->path[i] >= 0 && s->path[i] < s->n_links);
        s->active[s->path[i]]++;
    }
    int end = 0;
    for (int l = 0; l < s->n_links; l++) {
        moe_assert(cap[l] > 0 && isfinite(cap[l]));
        s->left[l] = cap[l];
        s->flow_first[l] = end += s->active[l]; /* its end; filling it backwards leaves its start */
        if (s->active[l]) push_link(s, l, link_level(s, l));
    }
    s->flow_first[s->n_links] = end;
    for (int f = s->n_flows - 1; f >= 0; f--) {
        s->rate[f] = 0;
        for (int i = s->first[f]; i < s->first[f + 1]; i++) s->flow[--s->flow_first[s->path[i]]] = f;
    }
}

void moe_share(int n_links, const double *cap, int n_flows, const int *first, const int *path,
               const double *limit, double *rate)
{
    struct system s = {.n_links = n_links, .n_flows = n_flows, .first = first, .path = path, .rate = rate};
    int *limited = moe_alloc((size_t)n_flows, sizeof *limited);
    int *tied = moe_alloc((size_t)n_links, sizeof *tied);
    int n_limited = sort_limited(&s, limit, limited);
    init(&s, cap);
    for (int i = 0;;) {
        double level;
        int link = pop_link(&s, &level);
        if (i < n_limited && limit[limited[i]] <= level) {
            freeze(&s, limited[i], limit[limited[i]]);
            i++;
            if (link >= 0) push_link(&s, link, level);
        } else if (link >= 0) {
            fill_links(&s, link, level, tied);
        } else {
            break;
        }
    }
    moe_heap_free(&s.heap);
    free(s.left);
    free(s.active);
    free(s.flow_first);
    free(s.flow);
    free(limited);
    free(tied);
}
