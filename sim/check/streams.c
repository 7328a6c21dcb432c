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

struct part {
    struct moe_ref ref;
    int layer, stream, at; /* what its stream had issued */
    bool writes;
};

struct touch { /* how often a stream had issued when it last touched a slot; 0: never */
    int wrote[MOE_STREAM_COUNT], read[MOE_STREAM_COUNT];
    const struct moe_op *writer;
    bool unread;       /* since it was last written */
    bool used;         /* read at all */
    struct part *part; /* all touches, of a buffer of which parts are named */
    int n_parts, cap;
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
    bool *in_parts;      /* [n_buffers] parts of it are named */
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

static void say(struct walk *w, int check_class, struct moe_label at, const char *what, const char *buffer,
                const char *other)
{
    for (int r = 0; r < w->c->s->n_ranks; r++)
        if (w->c->s->role_of[r] == w->role)
            moe_check_verdict(w->c, check_class, r, at, "%s %s%s", what, buffer, other);
}

/* Have two references to one slot an element in common on a rank? */
static bool meet(const struct moe_checker *c, int rank, struct moe_ref a, int layer_a, struct moe_ref b,
                 int layer_b)
{
    if (!a.n || !b.n) return true;
    int64_t n_a = moe_eval(c->s, c->device, a.n, rank, layer_a, 0),
            n_b = moe_eval(c->s, c->device, b.n, rank, layer_b, 0),
            from_a = moe_eval(c->s, c->device, a.begin, rank, layer_a, 0),
            from_b = moe_eval(c->s, c->device, b.begin, rank, layer_b, 0);
    if (n_a == 0 || n_b == 0) return false;
    if (n_a == MOE_UNKNOWN || n_b == MOE_UNKNOWN || from_a == MOE_UNKNOWN || from_b == MOE_UNKNOWN)
        return true;
    return from_a < moe_plus(from_b, n_b) && from_b < moe_plus(from_a, n_a);
}

/* Tells the ranks on which what was written before, or else read, is in no order with an operation's. Result:
 * is there any? */
static bool conflict(struct walk *w, const struct moe_here *h, int self, struct moe_ref ref, bool wrote,
                     const char *what, const char *doing)
{
    const struct moe_schedule *s = w->c->s;
    const struct touch *t = &w->slots[moe_check_slot(w->c, ref, h->layer)];
    const int *known = w->clocks.known[self];
    bool any = false;
    if (in_order(wrote ? t->wrote : t->read, known)) return false;
    for (int r = 0; r < s->n_ranks; r++) {
        if (s->role_of[r] != w->role || moe_check_idle(w->c, r, h)) continue;
        bool meets = !w->in_parts[ref.buffer];
        for (int i = 0; i < t->n_parts && !meets; i++) {
            const struct part *p = &t->part[i];
            meets = p->writes == wrote && p->at > known[p->stream] &&
                    meet(w->c, r, p->ref, p->layer, ref, h->layer);
        }
        any |= meets;
        if (meets)
            moe_check_verdict(w->c, 6, r, moe_check_label(h), "%s %s, which another stream may still be %s",
                              what, s->buffers[ref.buffer].name, doing);
    }
    return any;
}

/* An operation's own touches are in order with themselves. */
static void note_part(struct walk *w, const struct moe_here *h, int self, struct moe_ref ref, bool writes)
{
    struct touch *t = &w->slots[moe_check_slot(w->c, ref, h->layer)];
    if (!w->in_parts[ref.buffer] || self == MOE_STREAM_COUNT) return;
    t->part = moe_grow(t->part, &t->cap, t->n_parts + 1, sizeof *t->part);
    t->part[t->n_parts++] = (struct part){ref, h->layer, self, w->clocks.issued[self], writes};
}

static void touch(struct walk *w, const struct moe_here *h, int self, struct moe_ref ref, bool writes)
{
    const struct moe_schedule *s = w->c->s;
    struct touch *t = &w->slots[moe_check_slot(w->c, ref, h->layer)];
    const char *name = s->buffers[ref.buffer].name;
    if (!conflict(w, h, self, ref, true, writes ? "overwrites" : "reads", "writing") && writes)
        conflict(w, h, self, ref, false, "writes", "reading");
    note_part(w, h, self, ref, writes);
    if (!writes) {
        t->unread = false;
        t->used = true;
        w->input[ref.buffer] = true;
        if (self < MOE_STREAM_COUNT) t->read[self] = w->clocks.issued[self];
        return;
    }
    bool lost = t->unread && !ref.accumulate && t->writer && t->writer->serves && h->op->serves;
    if (lost) say(w, 4, moe_check_label(h), "overwrites", name, ", to which another operation contributed");
    t->unread = true;
    t->writer = h->op;
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
            if (!t->unread || !t->writer || !t->writer->serves) continue;
            say(w, 4, moe_check_named(t->writer->name, -1), "computes the gradient of", s->buffers[b].name,
                ", which nothing passes on: it ends there");
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
            if (!t->writer || t->used || !of_grad->used) continue;
            say(w, 4, moe_check_named(t->writer->name, -1), "computes", s->buffers[b].name,
                ", which nothing reads, though its gradient is used");
            break;
        }
    }
}

static void find_parts(struct walk *w, const struct moe_op *op)
{
    for (int i = 0; i < op->n_reads; i++) w->in_parts[op->reads[i].buffer] |= op->reads[i].n != 0;
    for (int i = 0; i < op->n_writes; i++) w->in_parts[op->writes[i].buffer] |= op->writes[i].n != 0;
}

void moe_check_streams(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    struct walk w = {.c = c, .role = role};
    w.slots = moe_alloc(c->n_slots, sizeof *w.slots);
    w.input = moe_alloc((size_t)c->s->n_buffers, sizeof *w.input);
    w.in_parts = moe_alloc((size_t)c->s->n_buffers, sizeof *w.in_parts);
    for (int b = 0; b < y->n_blocks; b++)
        for (int o = 0; o < y->blocks[b].n_ops; o++) find_parts(&w, &y->blocks[b].ops[o]);
    for (int n = 0; n < y->n_instances; n++) {
        struct moe_here h = {.block_id = y->itinerary[n].block, .layer = y->itinerary[n].layer};
        h.block = &y->blocks[h.block_id];
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
            say(&w, 6, moe_check_named(c->s->buffers[b].name, -1), "is an input that nothing reads", "", "");
    for (size_t i = 0; i < c->n_slots; i++) free(w.slots[i].part);
    free(w.slots);
    free(w.input);
    free(w.in_parts);
}
