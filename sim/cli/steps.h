/* steps - the steps of a capture that calibrate and validate look at. */
#ifndef MOE_CLI_STEPS_H
#define MOE_CLI_STEPS_H

#include "sim/cli/cli.h"
#include "sim/cost/calibrate.h"

struct moe_capture {
    struct moe_input in;
    struct moe_steps steps; /* in order of their duration */
    int64_t n_complete;
    double step_all_s; /* median of all complete steps, also of the first tenth */
    char id[17];       /* of this capture and no other, on any host */
};
/* Of the complete steps of the trace the quickest quarter, 5 to 20 of them, without the first tenth (caches,
 * pages, clocks warm up): other programs on the host only ever make a step longer. Errors: MOE_EINPUT when
 * the operations of the trace are not those of its scenario, or took no time, or it holds fewer than 5 steps.
 * Freed with moe_capture_free in any case. */
int moe_capture_load(const struct moe_args *args, struct moe_capture *c);
void moe_capture_free(struct moe_capture *c);

#endif
