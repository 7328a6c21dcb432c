/* execute_internal - what an execution is made of: shared by execute.c, execute_open.c and fit.c. */
#ifndef MOE_EXECUTE_INTERNAL_H
#define MOE_EXECUTE_INTERNAL_H

#include "runtime/execute.h"
#include "sim/kernel_shapes.h"

struct slot {       /* of a buffer, on this rank */
    void *data;     /* on the device; NULL: no operation touched it yet */
    int64_t n;      /* elements of its content */
    int64_t extent; /* elements that its buffer has at present sizes, as last known */
    int64_t cap;    /* elements allocated */
    void *host;     /* [cap] copy, or NULL */
    bool written;   /* since the step began; what persists: always */
    bool given;     /* the same, by what did not only change what was there */
    bool known;     /* host is what was read for the host, and nothing was written since */
    bool borrowed;  /* host was handed out for writing: it goes to the device before the next step */
};

/* An operation that was issued on an async device, and not yet observed. */
struct issued {
    struct moe_executed e;
    int start_slot, end_slot; /* marks of the device; -1: it was complete when it was issued */
    int64_t sent, received;   /* elements, of a collective */
    bool done;
};

struct moe_execution {
    const struct moe_schedule *s;              /* borrowed */
    struct moe_device *device;                 /* borrowed */
    const struct moe_execute_options *options; /* borrowed */
    int rank;
    struct moe_kernel_shape *shapes; /* [MOE_K_COUNT] */
    struct moe_communicator **comms; /* [n_comms]; comms[0] is the world, borrowed */
    int *first;                      /* [n_buffers] into slots */
    struct slot *slots;
    int64_t *send, *recv; /* [R] of the collective in hand */
    int64_t *rows;        /* of the grouped kernel in hand */
    int cap_rows;
    struct moe_executed now; /* the operation in hand; no block outside of one */
    int unknown;             /* symbol that the last evaluation missed, or -1 */
    int failed;              /* what stopped an evaluation: a peer or the device, not an unknown size; or 0 */
    int64_t steps;           /* done */
    int64_t steps_here;      /* of them since open */
    /* Async devices: in order of issue, from first_issued on. Slot 0 is marked when nothing was under way;
     * times count from there. */
    struct issued *issued;
    int first_issued, n_issued, cap_issued, n_marks;
    int64_t base_ns;
    char label[2 * MOE_NAME];
};

static inline struct slot *slot_at(const struct moe_execution *x, int buffer, int place)
{
    return &x->slots[x->first[buffer] + place];
}

/* Is the device one that runs later? */
static inline bool is_async(const struct moe_execution *x)
{
    return x->device->table->async;
}

/* ---- execute_async.c: only for async devices, or doing nothing for others where it says so ---- */

enum { MOE_ALL_STREAMS = -1 };

/* Before the operation in hand is issued: its stream waits for those it names, and its start is marked. */
int moe_async_begin(struct moe_execution *x);
/* After it was issued (`ran`), or was complete at once: it is observed when it and all before it are done. */
int moe_async_end(struct moe_execution *x, bool ran, int64_t sent, int64_t received);
/* Waits until what was issued on the streams (bits) is complete; observes what is. Result: MOE_OK; MOE_EPEER
 * when nothing was completed for the timeout of collectives, with the operation, its sizes and who is
 * missing, or when a rank or the library reported a fault; MOE_EFAILED for a fault of the device. Nothing to
 * do, MOE_OK, for other devices. */
int moe_async_drain(struct moe_execution *x, int streams);

/* Gives a reference's slot its extent at present sizes. keep: what it holds stays and what is added is
 * poison; otherwise all of it is new. */
int moe_execute_make_room(struct moe_execution *x, struct moe_ref ref, bool keep, struct slot **out);
/* "0-3" or "0,2,4"; cut where it is full. */
void moe_execute_ranks(char *out, size_t size, const int *ranks, int n);
/* Of the operation in hand, with its block; until the next call. */
const char *moe_execute_label(struct moe_execution *x);

struct operand { /* of the kernel in hand */
    void *data;
    int64_t n, extent;   /* elements of the slot, and of its buffer; of the part of it that is named */
    const int64_t *host; /* [n] copy of counts; NULL: the host does not hold them */
};

/* Is the operation in hand one that its kernel can run: as many dims and operands, of its types? And, with
 * its dims, reads before writes, does it stay in its operands? MOE_EFAILED, naming it, where not. */
int moe_execute_fit_form(struct moe_execution *x);
int moe_execute_fit(struct moe_execution *x, const struct moe_launch *l, const struct operand *operands);

#endif
