/* parity - running a schedule inside a test, and comparing what it computed. */
#ifndef MOE_TEST_PARITY_H
#define MOE_TEST_PARITY_H

#include "runtime/execute.h"
#include "tests/fixture.h"

#include <math.h>

/* Ids of this rank's slice of one batch that does not depend on the number of ranks. */
static inline void parity_tokens(const struct moe_schedule *s, int rank, int32_t *token, int32_t *target)
{
    int64_t at = 0;
    for (int r = 0; r < rank; r++) at += s->tokens[r];
    for (int64_t t = 0; t < s->tokens[rank]; t++) {
        token[t] = (int32_t)(moe_uniform(5, 0, (uint64_t)(at + t)) * 256);
        target[t] = (int32_t)(moe_uniform(5, 0, (uint64_t)(at + t + 1)) * 256);
    }
}

static inline void parity_die(struct moe_communicator *world, int err)
{
    fprintf(stderr, "rank %d: %s\n", world->rank, moe_error());
    world->table->abort(world, moe_exit_code(err));
}

static int64_t parity_agree_steps = INT64_MAX; /* of the executor's options */

struct parity_run {
    struct moe_device *device;
    struct moe_execution *x;
    double loss;
};

/* Opens, runs one step. Returns the step's result: negative when the executor refused. */
static inline int parity_step(const struct moe_schedule *s, struct moe_communicator *world, double timeout_s,
                              struct parity_run *out)
{
    struct moe_execute_options options = {
        .timeout_s = timeout_s, .agree_steps = parity_agree_steps, .seed = 3, .poison = true};
    size_t n = (size_t)s->tokens[world->rank];
    int32_t *token = moe_alloc(n, sizeof *token), *target = moe_alloc(n, sizeof *target);
    parity_tokens(s, world->rank, token, target);
    int err = moe_device_cpu.open(&out->device);
    if (err >= 0) err = moe_execute_open(s, out->device, world, &options, &out->x);
    if (err < 0) parity_die(world, err);
    err = moe_execute_step(out->x, token, target, &out->loss);
    free(token);
    free(target);
    return err;
}

static inline void parity_close(struct parity_run *run)
{
    moe_execute_close(run->x);
    run->device->table->close(run->device);
}

static inline double parity_at(const struct moe_schedule *s, int buffer, const void *p, int64_t i)
{
    return s->buffers[buffer].type == MOE_F64 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}

/* max |a - b| / max |b| over a tensor of a rank, a slice of the whole tensor in `b`, its buffer `whole`, that
 * starts at element `from`. */
static inline double parity_difference(const struct moe_schedule *s, int buffer, int slot,
                                       const struct moe_execution *a, const struct moe_execution *b,
                                       int whole, int64_t from)
{
    int64_t n_a, n_b;
    const void *pa = moe_execute_buffer(a, buffer, slot, &n_a),
               *pb = moe_execute_buffer(b, whole, slot, &n_b);
    double most = 0, scale = 0;
    for (int64_t i = 0; i < n_b; i++) {
        double v = fabs(parity_at(s, buffer, pb, i));
        if (v > scale) scale = v;
    }
    for (int64_t i = 0; i < n_a; i++) {
        double d = fabs(parity_at(s, buffer, pa, i) - parity_at(s, buffer, pb, from + i));
        if (!(d <= most)) most = d; /* NaN counts as the largest */
    }
    return scale > 0 ? most / scale : most;
}

#endif
