/* device - where kernels run: one of the two tables of functions (the other: communicator.h).
 *
 * Kernels are values (the schedule's operations), so the table does not grow with them. */
#ifndef MOE_DEVICE_H
#define MOE_DEVICE_H

#include "sim/schedule.h"

/* A kernel call with everything resolved.
 *   in, out   device pointers of reads and writes, in the operation's order
 *   dims      values of the operation's dims; they and the rows of groups are what sizes are known by
 *   rows      [groups] for operations of class GROUPED (groups = dims[0]), else NULL
 *   divisor   SCALE, AUX_LOSS and its backward
 *   forced    [E], on the host, TOPK: how many choices each expert gets, whatever prob says; NULL: the
 *             largest
 *   step      of the optimizer, for ADAMW; the first is 1; it and layer for what LIMIT draws */
struct moe_launch {
    const struct moe_op *op;
    const void *in[MOE_REFS];
    void *out[MOE_REFS];
    int64_t dims[MOE_DIMS];
    const int64_t *rows;
    const int32_t *forced;
    double divisor;
    int64_t step;
    int layer;
};

struct moe_device {
    const struct moe_device_table *table;
};

/* Streams are MOE_STREAM_*; slots of marks count from 0, a slot can be marked again. An `async` device has
 * issued what it was asked for when a call returns, and finishes it later, stream by stream in order of
 * issue; errors of what was issued may be reported by any later call. Then
 *   alloc, free  may be called while operations are running, as long as none of them uses the memory
 *   copy         either side may be host memory: what is written there is there on return, and what is read
 *                there may be changed on return. From device to host it waits for `stream`, without a timeout
 *   run          reads the launch, its rows and forced before it returns */
struct moe_device_table {
    const char *name;
    bool async;
    int (*open)(struct moe_device **out);
    void (*close)(struct moe_device *d);
    int (*alloc)(struct moe_device *d, size_t bytes, void **out); /* aligned to 64 bytes, not cleared */
    void (*free)(struct moe_device *d, void *p);
    int (*copy)(struct moe_device *d, void *to, const void *from, size_t bytes, int stream);
    int (*run)(struct moe_device *d, const struct moe_launch *launch, int stream);
    int (*sync)(struct moe_device *d, int stream); /* host waits for what was issued on the stream */
    int (*mark)(struct moe_device *d, int stream, int slot); /* an event after what was issued so far */
    int (*elapsed)(struct moe_device *d, int from_slot, int to_slot, int64_t *ns); /* both are done */
    /* What is issued on `stream` from now on starts after what was issued on `after` until now. */
    int (*order)(struct moe_device *d, int stream, int after);
    int (*done)(struct moe_device *d,
                int slot); /* 1: what the slot marks is complete; 0: not yet; or an error */
};

extern const struct moe_device_table moe_device_cpu;

#endif
