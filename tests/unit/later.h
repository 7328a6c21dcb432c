/* later - a device that runs what it is asked later, in any order that order() allows, on top of the CPU; and
 * the communicator of one rank on its streams. Single-threaded: operations run while the host waits. */
#ifndef MOE_TEST_LATER_H
#define MOE_TEST_LATER_H

#include "runtime/execute.h"
#include "sim/kernel_shapes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LATER_STREAMS = 2, LATER_ITEMS = 4096, LATER_MARKS = 4096 };

struct later_item {
    enum { LATER_RUN, LATER_MOVE, LATER_MARK, LATER_ORDER, LATER_NEVER, LATER_FAULT } kind;
    struct moe_launch launch; /* RUN */
    int64_t *rows;
    struct moe_transfer transfer; /* MOVE */
    int64_t count;
    int slot, after, until; /* MARK; ORDER: until so many items of the stream are done */
};

/* The one device. What tests change: seed, and one that breaks it. */
static struct later {
    struct moe_device base;
    struct moe_device *cpu;
    struct later_item items[LATER_STREAMS][LATER_ITEMS];
    int done[LATER_STREAMS], n[LATER_STREAMS];
    int64_t passed_ns[LATER_MARKS]; /* 0: not yet */
    uint64_t seed, draws;
    bool unordered;                           /* order() does nothing */
    int most;                                 /* items under way at a time */
    int stuck_at, faulty_at, n_moves, n_runs; /* the move that never ends, the kernel that fails: 1.. */
    bool broken;
} later;

static struct later_item *later_issue(int stream, int kind)
{
    moe_assert(later.n[stream] < LATER_ITEMS);
    struct later_item *i = &later.items[stream][later.n[stream]++];
    *i = (struct later_item){.kind = kind};
    const int under_way = later.n[0] - later.done[0] + later.n[1] - later.done[1];
    if (under_way > later.most) later.most = under_way;
    return i;
}

/* Runs the next item of the stream, if it may. */
static bool later_advance(int stream)
{
    if (later.done[stream] == later.n[stream] || later.broken) return false;
    struct later_item *i = &later.items[stream][later.done[stream]];
    if (i->kind == LATER_NEVER || (i->kind == LATER_ORDER && later.done[i->after] < i->until)) return false;
    if (i->kind == LATER_RUN) {
        later.cpu->table->run(later.cpu, &i->launch, stream);
        free(i->rows);
    }
    if (i->kind == LATER_MOVE)
        memmove(i->transfer.out, i->transfer.in,
                (size_t)i->count * (size_t)moe_type_bytes[i->transfer.op->type]);
    if (i->kind == LATER_MARK) later.passed_ns[i->slot] = moe_now_ns();
    if (i->kind == LATER_FAULT) later.broken = true;
    later.done[stream]++;
    return true;
}

static bool later_progress(void)
{
    int first = (int)(moe_hash64(later.seed + later.draws++) % LATER_STREAMS);
    for (int s = 0; s < LATER_STREAMS; s++)
        if (later_advance((first + s) % LATER_STREAMS)) return true;
    return false;
}

static int later_state(void)
{
    return later.broken ? moe_fail(MOE_EFAILED, "an illegal access") : MOE_OK;
}

static int later_alloc(struct moe_device *d, size_t bytes, void **out)
{
    (void)d;
    return later.cpu->table->alloc(later.cpu, bytes, out);
}

static void later_free(struct moe_device *d, void *p)
{
    (void)d;
    later.cpu->table->free(later.cpu, p);
}

static int later_sync(struct moe_device *d, int stream)
{
    (void)d;
    while (later.done[stream] < later.n[stream] && later_progress()) continue;
    return later_state();
}

static int later_copy(struct moe_device *d, void *to, const void *from, size_t bytes, int stream)
{
    MOE_TRY(later_sync(d, stream));
    if (bytes) memcpy(to, from, bytes);
    return MOE_OK;
}

static int later_run(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    (void)d;
    MOE_TRY(later_state());
    struct later_item *i = later_issue(stream, ++later.n_runs == later.faulty_at ? LATER_FAULT : LATER_RUN);
    i->launch = *launch;
    if (launch->rows && i->kind == LATER_RUN) {
        const size_t bytes = (size_t)launch->dims[0] * sizeof *i->rows;
        i->launch.rows = i->rows = moe_alloc(bytes + 1, 1);
        memcpy(i->rows, launch->rows, bytes);
    }
    return MOE_OK;
}

static int later_mark(struct moe_device *d, int stream, int slot)
{
    (void)d;
    moe_assert(slot < LATER_MARKS);
    later.passed_ns[slot] = 0;
    later_issue(stream, LATER_MARK)->slot = slot;
    return later_state();
}

static int later_elapsed(struct moe_device *d, int from_slot, int to_slot, int64_t *ns)
{
    (void)d;
    moe_assert(later.passed_ns[from_slot] && later.passed_ns[to_slot]);
    *ns = later.passed_ns[to_slot] - later.passed_ns[from_slot];
    return MOE_OK;
}

static int later_order(struct moe_device *d, int stream, int after)
{
    (void)d;
    if (later.unordered) return MOE_OK;
    struct later_item *i = later_issue(stream, LATER_ORDER);
    i->after = after;
    i->until = later.n[after];
    return MOE_OK;
}

static int later_done(struct moe_device *d, int slot)
{
    (void)d;
    for (uint64_t n = moe_hash64(later.seed ^ later.draws++) % 4; n; n--) later_progress();
    MOE_TRY(later_state());
    if (later.done[0] == later.n[0] && later.done[1] == later.n[1])
        later.done[0] = later.done[1] = later.n[0] = later.n[1] = 0;
    return later.passed_ns[slot] != 0;
}

static const struct moe_device_table later_table = {.name = "later",
                                                    .async = true,
                                                    .alloc = later_alloc,
                                                    .free = later_free,
                                                    .copy = later_copy,
                                                    .run = later_run,
                                                    .sync = later_sync,
                                                    .mark = later_mark,
                                                    .elapsed = later_elapsed,
                                                    .order = later_order,
                                                    .done = later_done};

static struct moe_device *later_open(struct moe_device *cpu, uint64_t seed)
{
    memset(&later, 0, sizeof later);
    later.base.table = &later_table;
    later.cpu = cpu;
    later.seed = seed;
    return &later.base;
}

/* Gives back what was not run. */
static void later_close(void)
{
    for (int s = 0; s < LATER_STREAMS; s++)
        for (; later.done[s] < later.n[s]; later.done[s]++) free(later.items[s][later.done[s]].rows);
}

/* ---- the communicator of one rank ---- */

static int later_start(struct moe_communicator *c, const struct moe_transfer *t)
{
    (void)c;
    struct later_item *i =
        later_issue(t->op->stream, ++later.n_moves == later.stuck_at ? LATER_NEVER : LATER_MOVE);
    i->transfer = *t;
    i->count = t->send[0];
    return MOE_OK;
}

static void later_blame(struct moe_communicator *c, const int *ranks, int n, const char *label,
                        double grace_s, char *out, size_t size)
{
    (void)c, (void)ranks, (void)grace_s;
    snprintf(out, size, "all %d ranks are at %s", n, label);
}

static int later_split(struct moe_communicator *world, const int *ranks, int n, int id,
                       struct moe_communicator **out)
{
    int err = moe_comm_self.split(world, ranks, n, id, out);
    if (err >= 0) (*out)->table = world->table;
    return err;
}

static struct moe_communicator_table later_comm_table;

static struct moe_communicator *later_world(void)
{
    struct moe_communicator *world;
    later_comm_table = moe_comm_self;
    later_comm_table.split = later_split;
    later_comm_table.start = later_start;
    later_comm_table.blame = later_blame;
    moe_assert(moe_comm_self.open(NULL, 60, &world) >= 0);
    world->table = &later_comm_table;
    return world;
}

#endif
