/* rig - a schedule with the device and the communicator to run it on, for tests of the executor. */
#ifndef MOE_TEST_RIG_H
#define MOE_TEST_RIG_H

#include "runtime/execute.h"
#include "sim/lower/builder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

static const int32_t tokens[] = {1, 0}, targets[] = {0, 1};

/* assert_float_equal lets NaN pass. */
static inline void must_be_near(double got, double expected, double tolerance)
{
    if (!(fabs(got - expected) <= tolerance)) fail_msg("%.17g, expected %.17g", got, expected);
}

/* A schedule, the device and the communicator to run it on. */
struct rig {
    struct moe_schedule *s;
    struct moe_device *device;
    struct moe_communicator *world;
    struct moe_execute_options options;
    struct moe_execution *x;
};

static inline struct moe_block *block_of(struct rig *rig)
{
    return &rig->s->roles[0].blocks[0];
}

static inline void open_rig(struct rig *rig, struct moe_schedule *s)
{
    *rig = (struct rig){.s = s, .options = {.timeout_s = 1, .seed = 7, .poison = true}};
    assert_int_equal(moe_device_cpu.open(&rig->device), MOE_OK);
    assert_int_equal(moe_comm_self.open(NULL, 60, &rig->world), MOE_OK);
}

static inline void start_rig(struct rig *rig)
{
    int err = moe_execute_open(rig->s, rig->device, rig->world, &rig->options, &rig->x);
    if (err < 0) fail_msg("%s", moe_error());
}

static inline void close_rig(struct rig *rig)
{
    moe_execute_close(rig->x);
    moe_comm_self.close(rig->world);
    moe_device_cpu.close(rig->device);
    moe_schedule_free(rig->s);
}

#endif
