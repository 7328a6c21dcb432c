/* execute - runs a schedule for real on this process's rank: real buffers, real collectives, real numbers.
 *
 * The executor knows operations, not models: it resolves sizes from the counts that host syncs read, hands
 * kernels to the device and collectives to the communicator, and tells the observer when each began and
 * ended. */
#ifndef MOE_EXECUTE_H
#define MOE_EXECUTE_H

#include "runtime/communicator.h"
#include "runtime/device.h"
#include "sim/schedule.h"

/* One executed operation, or one that was skipped. Times: nanoseconds of the monotonic clock. entry: the
 * host reached it; start: handed to the device or the communicator (async devices: its stream reached it);
 * end: complete. */
struct moe_executed {
    const struct moe_block *block;
    const struct moe_op *op;
    int block_id, layer;
    int64_t entry_ns, start_ns, end_ns;
    int64_t bytes; /* collective: sent by this rank, self part included; else 0 */
    bool skipped;  /* a collective that this rank does not enter: nothing ran */
};

int64_t moe_now_ns(void); /* the clock of these times */

struct moe_execute_options {
    double timeout_s;    /* a collective that takes longer is reported, > 0 */
    int64_t agree_steps; /* before every collective of the first so many steps since open: moe_agree */
    uint64_t seed;       /* initial parameters */
    bool poison;         /* fill buffers that nobody wrote with NaN (integers: a large negative number) */
    /* For each operation of the itinerary, also where it was skipped, in this order and after it is complete.
     * May be NULL. */
    void (*observe)(void *ctx, const struct moe_executed *e);
    void *ctx;
    /* Choices of experts of one step, whose number counts from 0: counts [layers of each micro-batch, ranks,
     * E] in place of what routers choose; probabilities stay those of the routers. NULL: none. Borrowed. */
    const int32_t *forced;
    int64_t forced_step;
    bool observe_reads; /* observe reads buffers: nothing is issued until it was told of all before */
};

struct moe_execution;

/* Allocates parameters (init_mean + init_std * normal, a function of seed, tensor name and global element:
 * the same on any layout), the optimizer's state (0) and communicators. s, d, world and options are borrowed
 * until moe_execute_close. Errors: MOE_EUSAGE when the world has not the schedule's number of ranks; those of
 * the device and the communicator. */
int moe_execute_open(const struct moe_schedule *s, struct moe_device *d, struct moe_communicator *world,
                     const struct moe_execute_options *options, struct moe_execution **out);
void moe_execute_close(struct moe_execution *x);

/* Runs one step of this rank's itinerary.
 *   token, target [M, T]  ids of the local tokens of each micro-batch and of their successors: the schedule's
 *                         two INPUT buffers
 *   loss                  out: the schedule's first OUTPUT buffer, cross entropy summed over local tokens,
 *                         nats; 0 on a rank that does not hold it
 * Errors: MOE_EVERDICT of moe_agree; MOE_EPEER "layer 1 forward dispatch on communicator ep (ranks 0-3): no
 * answer for 10 s" for a collective that does not finish, or whose library reports an error (a truncated
 * message); MOE_EFAILED for a size that the host does not know, a collective larger than its buffers, counts
 * or indices that nothing wrote in this step, an output that nothing wrote. After an error the communicators
 * are unusable: abort. */
int moe_execute_step(struct moe_execution *x, const int32_t *token, const int32_t *target, double *loss);

/* Steps done, since open or since the run that a checkpoint began (which sets them). The optimizer corrects
 * by the number of the step. */
int64_t moe_execute_steps(const struct moe_execution *x);
void moe_execute_set_steps(struct moe_execution *x, int64_t done);
const struct moe_schedule *moe_execute_schedule(const struct moe_execution *x);
int moe_execute_rank(const struct moe_execution *x);

/* The content of a buffer's slot on the host: element count in *n, type of the buffer. Borrowed until the
 * next step or close. NULL when no operation ever touched it. */
const void *moe_execute_buffer(const struct moe_execution *x, int buffer, int slot, int64_t *n);
/* Has the slot got content since the last step began? Not by what changes in place what was there: scales,
 * sums. */
bool moe_execute_given(const struct moe_execution *x, int buffer, int slot);
/* Writable view of a slot that persists, of a parameter or of the optimizer's state; it counts from the next
 * step on. */
void *moe_execute_param(struct moe_execution *x, int buffer, int slot, int64_t *n);

#endif
