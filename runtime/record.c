/* record.c - see record.h. */
#include "runtime/record.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct moe_recorder {
    const struct moe_schedule *s; /* borrowed */
    struct moe_store *store;
    int rank;
    enum moe_tensors tensors;
    struct moe_tensors_to to;
    const struct moe_execution *x; /* borrowed */
    int n_due, n_done,
        n_taken; /* gradients; operations of the step in hand, skipped ones too; gradients taken */
    struct moe_tensors_due *due;
    bool clips, begun;
    int err; /* what the observer could not report */
    int n_ops, cap_ops;
    struct moe_store_op *ops; /* of the step in hand */
};

static int put_number(struct moe_store *store, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, value);
    return moe_store_put(store, key, text);
}

/* Tokens of a step whose loss the rank computes: those of the last stage. */
static int64_t tokens_of(const struct moe_schedule *s, int rank)
{
    bool last = s->roles[s->role_of[rank]].end_layer == s->n_layers;
    return last ? s->tokens[rank] * s->n_micro : 0;
}

static int put_run(struct moe_store *store, const struct moe_run *run, int rank)
{
    char hash[17];
    snprintf(hash, sizeof hash, "%016" PRIx64, run->data->hash);
    MOE_TRY(moe_store_put(store, "version", run->version));
    MOE_TRY(moe_store_put(store, "scenario", run->scenario));
    MOE_TRY(moe_store_put(store, "data_hash", hash));
    MOE_TRY(put_number(store, "data_bytes", run->data->n));
    MOE_TRY(put_number(store, "seed", (int64_t)run->seed));
    MOE_TRY(put_number(store, "steps", run->steps));
    MOE_TRY(put_number(store, "ranks", run->s->n_ranks));
    MOE_TRY(put_number(store, "layers", run->s->n_layers * run->s->n_micro));
    MOE_TRY(put_number(store, "experts", run->s->n_experts));
    MOE_TRY(put_number(store, "top_k", run->s->top_k));
    MOE_TRY(put_number(store, "stages", moe_n_stages(run->s)));
    if (run->tensors) MOE_TRY(put_number(store, "poison", run->poison));
    return moe_store_add_rank(store, &(struct moe_store_rank){rank, tokens_of(run->s, rank), getpid()});
}

int moe_recorder_open(const char *path, const struct moe_run *run, int rank, struct moe_recorder **out)
{
    char *part = moe_store_part(path, rank);
    struct moe_recorder *r = moe_alloc(1, sizeof *r);
    r->s = run->s;
    r->rank = rank;
    r->tensors = run->tensors;
    int err = moe_store_open(part, MOE_STORE_CREATE, &r->store);
    free(part);
    r->to = (struct moe_tensors_to){r->store, 0, r->tensors == MOE_TENSORS_WHOLE, run->poison};
    if (err >= 0) err = put_run(r->store, run, rank);
    if (err < 0)
        moe_recorder_close(r);
    else
        *out = r;
    return err;
}

void moe_recorder_close(struct moe_recorder *r)
{
    if (!r) return;
    moe_store_close(r->store);
    free(r->ops);
    free(r->due);
    free(r);
}

/* Opens the transaction of the step in hand, unless it is open. */
static int begin(struct moe_recorder *r)
{
    if (!r->begun) MOE_TRY(moe_store_begin(r->store));
    r->begun = true;
    return MOE_OK;
}

static int commit(struct moe_recorder *r)
{
    r->begun = false;
    r->n_done = r->n_taken = 0;
    return moe_store_commit(r->store);
}

static int add_tensors(struct moe_recorder *r, const struct moe_execution *x, enum moe_tensor_role role)
{
    return r->tensors ? moe_tensors_add(&r->to, x, role) : MOE_OK;
}

int moe_recorder_begin(struct moe_recorder *r, const struct moe_execution *x, int64_t step)
{
    if (!r->tensors) return MOE_OK;
    r->x = x;
    r->to.step = step;
    r->n_due = moe_tensors_plan(r->s, r->rank, &r->due, &r->clips);
    MOE_TRY(begin(r));
    MOE_TRY(add_tensors(r, x, MOE_TENSOR_INITIAL));
    return commit(r);
}

/* The gradients that are complete; err: what went wrong before. */
static int take_gradients(struct moe_recorder *r, int err)
{
    for (; err >= 0 && r->n_taken < r->n_due && r->due[r->n_taken].done <= r->n_done; r->n_taken++) {
        const struct moe_tensors_due *due = &r->due[r->n_taken];
        err = begin(r);
        if (err >= 0) err = moe_tensors_add_slot(&r->to, r->x, MOE_TENSOR_GRADIENT, due->param, due->slot);
    }
    return err;
}

static void add_op(struct moe_recorder *r, const struct moe_executed *e)
{
    r->ops = moe_grow(r->ops, &r->cap_ops, r->n_ops + 1, sizeof *r->ops);
    struct moe_store_op *op = &r->ops[r->n_ops++];
    *op = (struct moe_store_op){.rank = r->rank,
                                .layer = e->layer,
                                .block = e->block_id,
                                .op = e->op->id,
                                .entry_ns = e->entry_ns,
                                .start_ns = e->start_ns,
                                .end_ns = e->end_ns,
                                .bytes = e->bytes};
    moe_op_label(e->block, e->op, e->layer, op->label);
    snprintf(op->kind, sizeof op->kind, "%s", moe_op_kind_text[e->op->kind]);
}

void moe_recorder_observe(void *recorder, const struct moe_executed *e)
{
    struct moe_recorder *r = recorder;
    if (!e->skipped) add_op(r, e);
    r->n_done++; /* those that are skipped too: when gradients are complete is a place in the itinerary */
    r->err = take_gradients(r, r->err);
}

/* The content of what `op` writes as its output i. */
static const void *written(const struct moe_recorder *r, const struct moe_execution *x,
                           const struct moe_op *op, int i, int layer, int64_t *n)
{
    return moe_execute_buffer(x, op->writes[i].buffer, moe_slot(r->s, op->writes[i], layer), n);
}

/* Routing enters where a TOPK kernel writes its second output, the expert ids... */
static int add_routing(struct moe_recorder *r, const struct moe_execution *x, int64_t step,
                       const struct moe_op *op, int layer)
{
    int64_t n;
    const int32_t *ids = written(r, x, op, 1, layer, &n);
    if (!ids) return MOE_EFAILED;
    return moe_store_add_routing(r->store, step, moe_routed_layer(r->s, layer), r->rank, n / r->s->top_k,
                                 r->s->top_k, ids);
}

/* ... and a LIMIT kernel marks the choices that it dropped in its second. */
static int add_dropped(struct moe_recorder *r, const struct moe_execution *x, int64_t step,
                       const struct moe_op *op, int layer)
{
    int64_t n, dropped = 0;
    const int32_t *kept_expert = written(r, x, op, 1, layer, &n);
    if (!kept_expert) return MOE_EFAILED;
    for (int64_t i = 0; i < n; i++) dropped += kept_expert[i] < 0;
    return moe_store_add_dropped(r->store, step, moe_routed_layer(r->s, layer), r->rank, dropped);
}

static int add_layer(struct moe_recorder *r, const struct moe_execution *x, int64_t step,
                     const struct moe_block *block, int layer)
{
    for (int o = 0; o < block->n_ops; o++) {
        const struct moe_op *op = &block->ops[o];
        if (op->kind != MOE_KERNEL) continue;
        if (op->kernel == MOE_K_TOPK) MOE_TRY(add_routing(r, x, step, op, layer));
        if (op->kernel == MOE_K_LIMIT) MOE_TRY(add_dropped(r, x, step, op, layer));
    }
    return MOE_OK;
}

/* Layers of other stages have no tokens here. */
static int add_other_layers(struct moe_recorder *r, int64_t step)
{
    const struct moe_role *role = &r->s->roles[r->s->role_of[r->rank]];
    for (int i = 0; i < r->s->n_layers * r->s->n_micro; i++) {
        int layer = i % r->s->n_layers;
        if (layer < role->first_layer || layer >= role->end_layer)
            MOE_TRY(moe_store_add_routing(r->store, step, i, r->rank, 0, r->s->top_k, NULL));
    }
    return MOE_OK;
}

int moe_recorder_step(struct moe_recorder *r, const struct moe_execution *x, int64_t step, double loss,
                      int64_t wall_ns)
{
    const struct moe_role *role = &r->s->roles[r->s->role_of[r->rank]];
    const int64_t tokens = tokens_of(r->s, r->rank);
    MOE_TRY(r->err);
    if (r->n_taken < r->n_due)
        return moe_fail(MOE_EFAILED, "step %" PRId64 ": %d of %d gradients were seen complete", step,
                        r->n_taken, r->n_due);
    MOE_TRY(begin(r));
    for (int i = 0; i < role->n_instances; i++)
        MOE_TRY(add_layer(r, x, step, &role->blocks[role->itinerary[i].block], role->itinerary[i].layer));
    MOE_TRY(add_other_layers(r, step));
    for (int i = 0; i < r->n_ops; i++) {
        r->ops[i].step = step;
        MOE_TRY(moe_store_add_op(r->store, &r->ops[i]));
    }
    r->n_ops = 0;
    if (r->clips) MOE_TRY(add_tensors(r, x, MOE_TENSOR_CLIPPED));
    MOE_TRY(add_tensors(r, x, MOE_TENSOR_PARAM));
    MOE_TRY(
        moe_store_add_step(r->store, step, r->rank, tokens ? loss / (double)tokens : (double)NAN, wall_ns));
    r->to.step = step + 1;
    return commit(r);
}
