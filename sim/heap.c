/* heap.c - see heap.h. A binary heap: event i comes before its children 2i + 1 and 2i + 2. */
#include "sim/heap.h"

#include <stdlib.h>

static bool before(const struct moe_event *a, const struct moe_event *b)
{
    return a->time != b->time ? a->time < b->time : a->order < b->order;
}

void moe_heap_push(struct moe_heap *h, struct moe_event e)
{
    h->event = moe_grow(h->event, &h->cap, h->n + 1, sizeof *h->event);
    e.order = h->pushed++;
    int i = h->n++;
    for (int parent; i > 0 && before(&e, &h->event[parent = (i - 1) / 2]); i = parent)
        h->event[i] = h->event[parent];
    h->event[i] = e;
}

bool moe_heap_pop(struct moe_heap *h, struct moe_event *out)
{
    if (!h->n) return false;
    *out = h->event[0];
    struct moe_event last = h->event[--h->n]; /* takes the free place at the top and sinks */
    int i = 0;
    for (int child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && before(&h->event[child + 1], &h->event[child])) child++;
        if (!before(&h->event[child], &last)) break;
        h->event[i] = h->event[child];
    }
    h->event[i] = last;
    return true;
}

void moe_heap_free(struct moe_heap *h)
{
    free(h->event);
    *h = (struct moe_heap){0};
}
