/* parity - running a schedule inside a test, and comparing what it computed. */
#ifndef MOE_TEST_PARITY_H
#define MOE_TEST_PARITY_H

#include "runtime/execute.h"
#include "tests/fixture.h"

#include <math.h>

/* Tokens of the ranks of this one's stage: of all, or of those before it. */
static inline int64_t parity_stage_tokens(const struct moe_schedule *s, int rank, int before)
{
    int64_t sum = 0;
    for (int r = 0; r < before; r++)
        if (s->roles[s->role_of[r]].first_layer == s->roles[s->role_of[rank]].first_layer)
            sum += s->tokens[r];
    return sum;
}

/* Ids of this rank's slice of one batch that does not depend on the number of ranks: micro-batch by
 * micro-batch. */
static inline void parity_tokens(const struct moe_schedule *s, int rank, int32_t *token, int32_t *target)
{
    int64_t all = parity_stage_tokens(s, rank, s->n_ranks), at = parity_stage_tokens(s, rank, rank);
    for (int m = 0; m < s->n_micro; m++)
        for (int64_t t = 0; t < s->tokens[rank]; t++) {
            uint64_t place = (uint64_t)(m * all + at + t);
            *token++ = (int32_t)(moe_uniform(5, 0, place) * 256);
            *target++ = (int32_t)(moe_uniform(5, 0, place + 1) * 256);
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
    size_t n = (size_t)(s->tokens[world->rank] * s->n_micro);
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

/* The larger one; NaN is larger than any number. */
static inline double parity_larger(double a, double b)
{
    return isnan(a) || b <= a ? a : b;
}

/* max |a - b| / max |b|, of n elements of a slot of `a` from `begin` on, which in `b` begin at `from` of slot
 * `of` of its buffer `whole`; the largest of all that is there. least: max |b| is not taken for less. */
static inline double parity_part(const struct moe_schedule *s, int buffer, int slot,
                                 const struct moe_execution *a, int64_t begin, int64_t n,
                                 const struct moe_execution *b, int whole, int of, int64_t from, double least)
{
    int64_t n_a, n_b;
    const void *pa = moe_execute_buffer(a, buffer, slot, &n_a), *pb = moe_execute_buffer(b, whole, of, &n_b);
    double most = 0, scale = least;
    for (int64_t i = 0; i < n_b; i++) {
        double v = fabs(parity_at(s, buffer, pb, i));
        if (v > scale) scale = v;
    }
    for (int64_t i = 0; i < n; i++)
        most = parity_larger(most,
                             fabs(parity_at(s, buffer, pa, begin + i) - parity_at(s, buffer, pb, from + i)));
    return scale > 0 ? most / scale : most;
}

/* The same of all that `a` holds. */
static inline double parity_difference(const struct moe_schedule *s, int buffer, int slot,
                                       const struct moe_execution *a, const struct moe_execution *b,
                                       int whole, int64_t from)
{
    int64_t n;
    moe_execute_buffer(a, buffer, slot, &n);
    return parity_part(s, buffer, slot, a, 0, n, b, whole, slot, from, 0);
}

/* An operation that updates a slot of a parameter, or a part of it, and what it takes. */
struct parity_update {
    const struct moe_op *op;
    int slot, grad_slot;  /* of the parameter, and of the buffer where its gradient lies */
    int64_t first, at, n; /* elements: of the parameter, of that buffer; how many */
};

static inline bool parity_is_update(const struct moe_schedule *s, int rank, const struct moe_op *op,
                                    int layer, int param, int64_t extent, struct parity_update *out)
{
    const struct moe_ref *value = &op->writes[0], *grad = &op->reads[1];
    struct moe_env none = {0};
    if (op->kind != MOE_KERNEL || (op->kernel != MOE_K_SGD && op->kernel != MOE_K_ADAMW) ||
        value->buffer != s->params[param].buffer)
        return false;
    *out = (struct parity_update){op, moe_slot(s, *value, layer), moe_slot(s, *grad, layer), 0, 0, extent};
    if (!value->n) return true;
    out->first = moe_eval(s, none, value->begin, rank, 0, 0);
    out->at = moe_eval(s, none, grad->begin, rank, 0, 0);
    out->n = moe_eval(s, none, value->n, rank, 0, 0);
    return true;
}

/* The one of a slot in what a rank issues. */
static inline struct parity_update parity_update_of(const struct moe_schedule *s, int rank, int param,
                                                    int slot, int64_t extent)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    struct parity_update out;
    for (int k = 0; k < role->n_instances; k++) {
        const struct moe_block *block = &role->blocks[role->itinerary[k].block];
        for (int o = 0; o < block->n_ops; o++)
            if (parity_is_update(s, rank, &block->ops[o], role->itinerary[k].layer, param, extent, &out) &&
                out.slot == slot)
                return out;
    }
    moe_bug(__FILE__, __LINE__, s->params[param].name);
}

#endif
