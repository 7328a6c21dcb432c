/* streams.c - see internal.h.
 *
 * What of a role's operations is in order: those of one stream, what a host sync waited for before what is
 * issued later, and what `waits` names. Each stream, and the host, knows how many operations of each stream
 * are done before its next one starts (vector clocks: Fidge, Mattern 1988). Two operations on one slot, one
 * of which writes, are in order when the later one's stream knows the earlier one done. That holds for all
 * ranks of the role and every routing; of a bucket, each rank has parts of its own, and only parts that meet
 * need be in order. */
#include "sim/check/internal.h"

#include <stdlib.h>
#include <string.h>

struct touch { /* how often a stream had issued when it last touched a slot; 0: never */
    int wrote[MOE_STREAM_COUNT], read[MOE_STREAM_COUNT];
    struct moe_here by; /* the last that wrote it */
    bool unread;        /* since it was last written */
    bool used;          /* read at all */
};

struct clocks {
    int issued[MOE_STREAM_COUNT];
    int known[MOE_STREAM_COUNT + 1][MOE_STREAM_COUNT]; /* by stream, and by the host */
};

struct walk {
    struct moe_checker *c;
    int role;
    struct clocks clocks;
    struct touch *slots; /* [n_slots] */
    bool *input;         /* [n_buffers] read */
    int instance;        /* in hand */
};

static void learn(int to[MOE_STREAM_COUNT], const int from[MOE_STREAM_COUNT])
{
    for (int s = 0; s < MOE_STREAM_COUNT; s++)
        if (from[s] > to[s]) to[s] = from[s];
}

/* Moves the clocks to the start of an operation; returns who runs it: a stream, or the host. */
static int start(struct clocks *k, const struct moe_op *op)
{
    int self = op->kind == MOE_HOST_SYNC ? MOE_STREAM_COUNT : op->stream;
    learn(k->known[self], k->known[MOE_STREAM_COUNT]);
    for (int s = 0; s < MOE_STREAM_COUNT; s++) {
        if (!(op->waits >> s & 1)) continue;
        learn(k->known[self], k->known[s]); /* what it waited for is done too */
        k->known[self][s] = k->issued[s];
    }
    if (self < MOE_STREAM_COUNT) k->known[self][self] = ++k->issued[self]; /* itself: it may work in place */
    return self;
}

static bool in_order(const int touched[MOE_STREAM_COUNT], const int known[MOE_STREAM_COUNT])
{
    for (int s = 0; s < MOE_STREAM_COUNT; s++)
        if (touched[s] > known[s]) return false;
    return true;
}

/* On the ranks where the buffer has elements at this layer, and something was contributed by an operation, or
 * NULL. */
static void say(struct walk *w, int check_class, int buffer_id, int layer, const struct moe_here *by,
                struct moe_label at, const char *what, const char *buffer, const char *other)
{
    for (int r = 0; r < w->c->s->n_ranks; r++)
        if (w->c->s->role_of[r] == w->role &&
            moe_check_room(w->c, r, (struct moe_ref){.buffer = buffer_id}, layer) != 0 &&
            !(by && moe_gradient_takes_nothing(w->c->s, w->c->device, by->op, r, by->layer)))
            moe_check_verdict(w->c, check_class, r, at, "%s %s%s", what, buffer, other);
}

struct span {
    int64_t begin, end;
};

/* The elements that a reference names; all that may be where nobody knows. */
static struct span span_of(const struct moe_checker *c, int rank, struct moe_ref ref, int layer)
{
    int64_t n = moe_check_room(c, rank, ref, layer),
            begin = ref.n ? moe_eval(c->s, c->device, ref.begin, rank, layer, 0) : 0;
    if (n == MOE_UNKNOWN || begin == MOE_UNKNOWN || begin > INT64_MAX - n) return (struct span){0, INT64_MAX};
    return (struct span){begin, begin + n};
}

/* Have two references to one slot an element in common on a rank? */
static bool meet(const struct moe_checker *c, int rank, struct moe_ref a, int layer_a, struct moe_ref b,
                 int layer_b)
{
    struct span x = span_of(c, rank, a, layer_a), y = span_of(c, rank, b, layer_b);
    return x.begin < x.end && y.begin < y.end && x.begin < y.end && y.begin < x.end;
}

/* Does an operation touch elements of a reference on a rank, where it is not idle? */
static bool touches(const struct moe_checker *c, int rank, const struct moe_here *e, bool writes,
                    struct moe_ref ref, int layer)
{
    int n = writes ? e->op->n_writes : e->op->n_reads, slot = moe_check_slot(c, ref, layer);
    for (int i = 0; i < n; i++) {
        struct moe_ref r = writes ? e->op->writes[i] : e->op->reads[i];
        if (r.buffer == ref.buffer && moe_check_slot(c, r, e->layer) == slot &&
            meet(c, rank, r, e->layer, ref, layer))
            return !moe_check_idle(c, rank, e);
    }
    return false;
}

/* Operations before the one in hand that are not known done and touch the slot of a reference: [*n], to be
 * freed. Looked for only where the clocks of the whole slot say that there are some. */
static struct moe_here *in_the_way(const struct walk *w, const struct moe_here *h, int self, bool wrote,
                                   struct moe_ref ref, int *n)
{
    const struct moe_role *y = &w->c->s->roles[w->role];
    int issued[MOE_STREAM_COUNT] = {0}, cap = 0, slot = moe_check_slot(w->c, ref, h->layer);
    struct moe_here *out = NULL;
    *n = 0;
    for (int i = 0; i <= w->instance; i++) {
        struct moe_here e = {.block_id = y->itinerary[i].block, .layer = y->itinerary[i].layer};
        e.block = &y->blocks[e.block_id];
        for (int o = 0; o < e.block->n_ops; o++) {
            e.op = &e.block->ops[o];
            if (i == w->instance && e.op == h->op) break;
            if (e.op->kind == MOE_HOST_SYNC || ++issued[e.op->stream] <= w->clocks.known[self][e.op->stream])
                continue;
            const struct moe_ref *list = wrote ? e.op->writes : e.op->reads;
            for (int k = 0; k < (wrote ? e.op->n_writes : e.op->n_reads); k++) {
                if (list[k].buffer != ref.buffer || moe_check_slot(w->c, list[k], e.layer) != slot) continue;
                out = moe_grow(out, &cap, *n + 1, sizeof *out);
                out[(*n)++] = e;
                break;
            }
        }
    }
    return out;
}

/* Tells the ranks on which what was written before, or else read, is in no order with an operation's. Result:
 * is there any? */
static bool conflict(struct walk *w, const struct moe_here *h, int self, struct moe_ref ref, bool wrote,
                     const char *what, const char *doing)
{
    const struct moe_schedule *s = w->c->s;
    const struct touch *t = &w->slots[moe_check_slot(w->c, ref, h->layer)];
    bool any = false;
    int n;
    if (in_order(wrote ? t->wrote : t->read, w->clocks.known[self])) return false;
    struct moe_here *before = in_the_way(w, h, self, wrote, ref, &n);
    for (int r = 0; r < s->n_ranks; r++) {
        if (s->role_of[r] != w->role || moe_check_idle(w->c, r, h)) continue;
        bool meets = false;
        for (int i = 0; i < n && !meets; i++) meets = touches(w->c, r, &before[i], wrote, ref, h->layer);
        any |= meets;
        if (meets)
            moe_check_verdict(w->c, 6, r, moe_check_label(h), "%s %s, which another stream may still be %s",
                              what, s->buffers[ref.buffer].name, doing);
    }
    free(before);
    return any;
}

static void touch(struct walk *w, const struct moe_here *h, int self, struct moe_ref ref, bool writes)
{
    const struct moe_schedule *s = w->c->s;
    struct touch *t = &w->slots[moe_check_slot(w->c, ref, h->layer)];
    const char *name = s->buffers[ref.buffer].name;
    if (!conflict(w, h, self, ref, true, writes ? "overwrites" : "reads", "writing") && writes)
        conflict(w, h, self, ref, false, "writes", "reading");
    if (!writes) {
        t->unread = false;
        t->used = true;
        w->input[ref.buffer] = true;
        if (self < MOE_STREAM_COUNT) t->read[self] = w->clocks.issued[self];
        return;
    }
    bool lost = t->unread && !ref.accumulate && t->by.op && t->by.op->serves && h->op->serves;
    if (lost)
        say(w, 4, ref.buffer, h->layer, &t->by, moe_check_label(h), "overwrites", name,
            ", to which another operation contributed");
    t->unread = true;
    t->by = *h;
    if (self < MOE_STREAM_COUNT) t->wrote[self] = w->clocks.issued[self];
}

/* What was computed of an activation's gradient goes on to what computed the activation. */
static void check_passed_on(struct walk *w)
{
    const struct moe_schedule *s = w->c->s;
    for (int b = 0; b < s->n_buffers; b++) {
        int grad = s->buffers[b].role == MOE_BUF_ACTIVATION ? s->buffers[b].grad : -1;
        for (int slot = 0; grad >= 0 && slot < s->buffers[grad].slots; slot++) {
            const struct touch *t = &w->slots[w->c->first_slot[grad] + slot];
            if (!t->unread || !t->by.op || !t->by.op->serves) continue;
            say(w, 4, grad, t->by.layer, NULL, moe_check_named(t->by.op->name, -1),
                "computes the gradient of", s->buffers[b].name, ", which nothing passes on: it ends there");
            break;
        }
    }
}

/* What an activation's gradient is taken of has read the activation: else what passes it on took another. */
static void check_taken(struct walk *w)
{
    const struct moe_schedule *s = w->c->s;
    for (int b = 0; b < s->n_buffers; b++) {
        int grad = s->buffers[b].role == MOE_BUF_ACTIVATION ? s->buffers[b].grad : -1;
        for (int slot = 0; grad >= 0 && slot < s->buffers[grad].slots; slot++) {
            const struct touch *t = &w->slots[w->c->first_slot[b] + slot],
                               *of_grad = &w->slots[w->c->first_slot[grad] + slot];
            if (!t->by.op || t->used || !of_grad->used) continue;
            say(w, 4, b, t->by.layer, NULL, moe_check_named(t->by.op->name, -1), "computes",
                s->buffers[b].name, ", which nothing reads, though its gradient is used");
            break;
        }
    }
}

void moe_check_streams(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    struct walk w = {.c = c, .role = role};
    w.slots = moe_alloc(c->n_slots, sizeof *w.slots);
    w.input = moe_alloc((size_t)c->s->n_buffers, sizeof *w.input);
    for (int n = 0; n < y->n_instances; n++) {
        struct moe_here h = {.block_id = y->itinerary[n].block, .layer = y->itinerary[n].layer};
        h.block = &y->blocks[h.block_id];
        w.instance = n;
        for (int o = 0; o < h.block->n_ops; o++) {
            h.op = &h.block->ops[o];
            int self = start(&w.clocks, h.op);
            for (int i = 0; i < h.op->n_reads; i++) touch(&w, &h, self, h.op->reads[i], false);
            for (int i = 0; i < h.op->n_writes; i++) touch(&w, &h, self, h.op->writes[i], true);
        }
    }
    check_passed_on(&w);
    check_taken(&w);
    int first = 0;
    while (first < c->s->n_ranks && c->s->role_of[first] != role) first++;
    for (int b = 0; b < c->s->n_buffers && first < c->s->n_ranks; b++)
        if (c->s->buffers[b].role == MOE_BUF_INPUT && !w.input[b] && moe_holds(c->s, b, 0, first))
            say(&w, 6, b, 0, NULL, moe_check_named(c->s->buffers[b].name, -1),
                "is an input that nothing reads", "", "");
    free(w.slots);
    free(w.input);
}
