/* heap - the event queue: smallest time first, events of equal time in the order they were pushed.
 *
 * The tie rule makes a simulation repeatable. Sizes met: 10 to 100,000 pending events. */
#ifndef MOE_HEAP_H
#define MOE_HEAP_H

#include "sim/base.h"

struct moe_event {
    moe_ps time;
    uint64_t order; /* set by push */
    int kind, a, b; /* the caller's */
    uint64_t c;
};

struct moe_heap {
    struct moe_event *event;
    int n, cap;
    uint64_t pushed;
};

void moe_heap_push(struct moe_heap *h, struct moe_event e);   /* O(log n) */
bool moe_heap_pop(struct moe_heap *h, struct moe_event *out); /* false when empty; O(log n) */
void moe_heap_free(struct moe_heap *h);

#endif
