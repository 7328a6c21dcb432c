/* execute_async.c - see execute_internal.h: operations that a device runs later. */
#include "runtime/execute_internal.h"

#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BASE_SLOT, SPINS = 200, PAUSE_US = 20 }; /* after SPINS looks in vain, sleep between them */
/* Operations under way at most. A stream holds about 1,000 launches, and one more waits in the driver, where
 * no timeout is looked at and no peer is heard; an operation is a few of them. */
enum { MOST_OPEN = 128 };

/* How long, after its own timeout, a rank hears what others have to say. */
static const double grace_s = 1.5;

static const struct moe_device_table *device(const struct moe_execution *x)
{
    return x->device->table;
}

static int *next_mark(struct moe_execution *x, int *slot)
{
    *slot = x->n_marks++;
    return slot;
}

/* Nothing is under way, so the device passes the base at once, and the host's clock says when. */
static int begin_marks(struct moe_execution *x)
{
    if (x->n_marks) return MOE_OK;
    MOE_TRY(device(x)->mark(x->device, MOE_STREAM_COMPUTE, BASE_SLOT));
    MOE_TRY(device(x)->sync(x->device, MOE_STREAM_COMPUTE));
    x->base_ns = moe_now_ns();
    x->n_marks = BASE_SLOT + 1;
    return MOE_OK;
}

/* Room for the operation in hand behind those that were issued. */
static struct issued *last(struct moe_execution *x)
{
    x->issued = moe_grow(x->issued, &x->cap_issued, x->n_issued + 1, sizeof *x->issued);
    return &x->issued[x->n_issued];
}

static int wait_until(struct moe_execution *x, int streams, int most_open);

int moe_async_begin(struct moe_execution *x)
{
    const struct moe_op *op = x->now.op;
    MOE_TRY(wait_until(x, 0, MOST_OPEN));
    MOE_TRY(begin_marks(x));
    for (int stream = 0; op->waits >> stream; stream++)
        if (op->waits >> stream & 1 && stream != op->stream)
            MOE_TRY(device(x)->order(x->device, op->stream, stream));
    return device(x)->mark(x->device, op->stream, *next_mark(x, &last(x)->start_slot));
}

int moe_async_end(struct moe_execution *x, bool ran, int64_t sent, int64_t received)
{
    struct issued *i = last(x);
    i->e = x->now;
    i->sent = sent;
    i->received = received;
    i->done = !ran;
    if (ran) {
        MOE_TRY(device(x)->mark(x->device, x->now.op->stream, *next_mark(x, &i->end_slot)));
    } else {
        i->start_slot = i->end_slot = -1;
        i->e.end_ns = moe_now_ns();
    }
    x->n_issued++;
    return MOE_OK;
}

/* ---- what went wrong ---- */

static const char *label_of(const struct issued *i, char *out)
{
    moe_op_label(i->e.block, i->e.op, i->e.layer, out);
    return out;
}

/* The first that is not done; a collective, where there is one: a kernel may only wait for it. */
static int first_open(const struct moe_execution *x, const struct issued **first)
{
    *first = NULL;
    for (int i = x->first_issued; i < x->n_issued; i++) {
        const struct issued *one = &x->issued[i];
        int done = one->done ? 1 : device(x)->done(x->device, one->end_slot);
        if (done < 0) return done;
        if (done || (*first && one->e.op->kind != MOE_COLLECTIVE)) continue;
        *first = one;
        if (one->e.op->kind == MOE_COLLECTIVE) break;
    }
    return MOE_OK;
}

/* The device reports a fault with whatever is asked next: it happened in what was not done yet. */
static int broken(struct moe_execution *x, int err)
{
    char label[2 * MOE_NAME];
    if (x->first_issued == x->n_issued) return err;
    return moe_fail(err, "in %s or after it: %s", label_of(&x->issued[x->first_issued], label), moe_error());
}

static int stalled(struct moe_execution *x)
{
    const struct issued *one;
    char label[2 * MOE_NAME], ranks[64], who[256] = "";
    int err = first_open(x, &one);
    if (err < 0) return broken(x, err);
    if (!one) return MOE_OK; /* it came while we asked */
    label_of(one, label);
    if (one->e.op->kind != MOE_COLLECTIVE)
        return moe_fail(MOE_EPEER, "%s: the device did not finish it in %g s", label, x->options->timeout_s);
    const struct moe_op *op = one->e.op;
    const struct moe_comm *c = &x->s->comms[op->comm];
    const int group = c->group_of[x->rank], n = moe_group_size(c, group);
    const int *members = c->members + c->first[group];
    moe_execute_ranks(ranks, sizeof ranks, members, n);
    const struct moe_communicator_table *world = x->comms[0]->table;
    if (world->blame) world->blame(x->comms[0], members, n, label, grace_s, who, sizeof who);
    return moe_fail(MOE_EPEER,
                    "%s on communicator %s (ranks %s): no answer for %g s; this rank sends %lld and receives "
                    "%lld %s%s%s",
                    label, c->name, ranks, x->options->timeout_s, (long long)one->sent,
                    (long long)one->received, moe_type_text[op->type], *who ? "; " : "", who);
}

/* ---- waiting ---- */

static int is_done(struct moe_execution *x, struct issued *i)
{
    if (i->done) return 1;
    int done = device(x)->done(x->device, i->end_slot);
    i->done = done == 1;
    return done;
}

static int observe(struct moe_execution *x, struct issued *i)
{
    int64_t start = 0, end = 0;
    if (i->end_slot >= 0) {
        MOE_TRY(device(x)->elapsed(x->device, BASE_SLOT, i->start_slot, &start));
        MOE_TRY(device(x)->elapsed(x->device, BASE_SLOT, i->end_slot, &end));
        i->e.start_ns = x->base_ns + start;
        i->e.end_ns = x->base_ns + end;
    }
    if (x->options->observe) x->options->observe(x->options->ctx, &i->e);
    return MOE_OK;
}

/* Observes what is complete, in order of issue. *over: nothing is under way on the streams. *moved: something
 * was completed. */
static int advance(struct moe_execution *x, int streams, bool *over, bool *moved)
{
    *over = true;
    *moved = false;
    for (int n = x->first_issued; n < x->n_issued && *over; n++) {
        struct issued *i = &x->issued[n];
        if (i->done || !(streams >> i->e.op->stream & 1)) continue;
        int done = is_done(x, i);
        if (done < 0) return done;
        *over = done != 0;
        *moved |= *over;
    }
    for (; x->first_issued < x->n_issued; x->first_issued++) {
        struct issued *i = &x->issued[x->first_issued];
        int done = is_done(x, i);
        if (done < 0) return done;
        if (!done) break;
        MOE_TRY(observe(x, i));
        *moved = true;
    }
    if (x->first_issued == x->n_issued) x->first_issued = x->n_issued = x->n_marks = 0;
    return MOE_OK;
}

static int poll_peers(struct moe_execution *x)
{
    for (int c = 0; c < x->s->n_comms; c++)
        if (x->comms[c] && x->comms[c]->table->poll) MOE_TRY(x->comms[c]->table->poll(x->comms[c]));
    return MOE_OK;
}

/* Until what was issued on the streams is complete, and most_open operations at most are not observed. */
static int wait_until(struct moe_execution *x, int streams, int most_open)
{
    const int64_t timeout_ns = (int64_t)(x->options->timeout_s * 1e9);
    int64_t since_ns = moe_now_ns();
    if (!streams && x->n_issued - x->first_issued <= most_open) return MOE_OK;
    for (int looks = 0;; looks++) {
        bool over, moved;
        int err = advance(x, streams, &over, &moved);
        if (err < 0) return broken(x, err);
        if (over && x->n_issued - x->first_issued <= most_open) return MOE_OK;
        if (moved) {
            since_ns = moe_now_ns();
            looks = 0;
        }
        MOE_TRY(poll_peers(x));
        if (moe_now_ns() - since_ns > timeout_ns) MOE_TRY(stalled(x));
        if (looks < SPINS)
            sched_yield();
        else
            usleep(PAUSE_US);
    }
}

int moe_async_drain(struct moe_execution *x, int streams)
{
    return is_async(x) ? wait_until(x, streams, INT_MAX) : MOE_OK;
}
