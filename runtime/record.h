/* record - what a capture keeps of each step, into the rank's trace store (traces/store.h). */
#ifndef MOE_RECORD_H
#define MOE_RECORD_H

#include "runtime/data.h"
#include "runtime/tensors.h"

/* A run: what every rank's store says about it. */
struct moe_run {
    const struct moe_schedule *s;
    const struct moe_data *data;
    const char *scenario; /* its text */
    const char *version;
    int64_t steps;
    uint64_t seed;
    enum moe_tensors tensors; /* what to keep of parameters and gradients */
    bool poison;              /* as moe_execute_options */
};

struct moe_recorder;

/* Creates path.rankN. Errors: those of the store. */
int moe_recorder_open(const char *path, const struct moe_run *run, int rank, struct moe_recorder **out);
void moe_recorder_close(struct moe_recorder *r);

/* Adds the parameters as they are before `step`, the first of this run. Nothing when the run keeps no
 * tensors. x is borrowed until close. Errors: those of the store. */
int moe_recorder_begin(struct moe_recorder *r, const struct moe_execution *x, int64_t step);

/* The observer of moe_execute_options, with the recorder as ctx: keeps the operation in memory, and the
 * gradients that it completed in the store. */
void moe_recorder_observe(void *recorder, const struct moe_executed *e);

/* Writes, as one transaction, the operations observed since the last call, the routing that the step's TOPK
 * kernels left in x, how many rows its LIMIT kernels dropped, what the run keeps of tensors, and the loss
 * (sum over local tokens, nats). Errors: those of the store; MOE_EFAILED when not every gradient was
 * complete before. */
int moe_recorder_step(struct moe_recorder *r, const struct moe_execution *x, int64_t step, double loss,
                      int64_t wall_ns);

#endif
