/* buckets.c - see buckets.h. */
#include "sim/lower/buckets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the layout ---- */

enum { TENSOR_ALIGN = 64, BUCKET_ALIGN = 128 };

static int64_t up_to(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static int64_t lcm(int64_t a, int64_t b)
{
    int64_t x = a, y = b;
    while (y) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

int moe_bucket_layout(const struct moe_bucket_rules *rules, int parts, int n,
                      struct moe_bucket_tensor *tensor, int64_t size[])
{
    int64_t end = 0, tensor_align = rules->pad ? TENSOR_ALIGN : 1,
            bucket_align = rules->pad ? lcm(parts, BUCKET_ALIGN) : 1;
    int k = 0;
    for (int i = 0; i < n; i++) {
        bool apart = rules->separate_tied && tensor[i].tied;
        if (apart && end) size[k++] = up_to(end, bucket_align), end = 0;
        tensor[i].bucket = k;
        tensor[i].begin = up_to(end, tensor_align);
        end = tensor[i].begin + tensor[i].n;
        if (apart || (rules->bucket_size && end >= rules->bucket_size))
            size[k++] = up_to(end, bucket_align), end = 0;
    }
    if (end) size[k++] = up_to(end, bucket_align);
    return k;
}

/* ---- the buckets of a stage ---- */

static int64_t extent_of(const struct moe_schedule *s, const struct moe_param *p)
{
    return moe_eval(s, (struct moe_env){0}, s->buffers[p->grad].extent, 0, 0, 0); /* sizes of the model */
}

static void place(struct moe_buckets *out, int param, int layer)
{
    out->placed = realloc(out->placed, ((size_t)out->n_placed + 1) * sizeof *out->placed);
    moe_assert(out->placed);
    out->placed[out->n_placed++] = (struct moe_placed){param, layer, 0, 0};
}

/* Appends what a step shares out, in reverse order of the forward pass: the embedding comes first where it is
 * the head alone, and last where tokens enter by it. */
static void place_all(const struct moe_builder *b, const struct moe_sync_step *step, struct moe_buckets *out)
{
    const struct moe_schedule *s = b->s;
    const struct moe_role *role = &s->roles[b->role];
    for (int entry = 0; entry < 2; entry++) {
        for (int i = 0; i < s->n_params; i++) { /* the head's gain is made behind the embedding */
            const struct moe_param *p = &s->params[i];
            bool enters = s->buffers[p->grad].where == MOE_WHERE_ENDS && role->first_layer == 0;
            if (p->buffer >= 0 && !p->per_layer && enters == entry && moe_lower_is_held(b, p) &&
                moe_sync_is_of(step, p))
                place(out, i, -1);
        }
        for (int layer = role->end_layer - 1; layer >= role->first_layer && !entry; layer--)
            for (int i = s->n_params - 1; i >= 0; i--)
                if (s->params[i].buffer >= 0 && s->params[i].per_layer && moe_sync_is_of(step, &s->params[i]))
                    place(out, i, layer);
    }
}

static struct moe_bucket_rules rules_of(const struct moe_builder *b, const struct moe_lower_sync *sync,
                                        int parts)
{
    const struct moe_scenario *sc = sync->sc;
    struct moe_bucket_rules rules = {sc->distributed.bucket_size, sc->distributed.separate_tied,
                                     sc->distributed.pad};
    int64_t least = 40000000, of_parts = (int64_t)1000000 * parts;
    /* Megatron-LM's own choice: one bucket where nothing overlaps, and behind the first stage. */
    if (!rules.bucket_size && sc->overlap_grad_reduce && b->s->roles[b->role].first_layer == 0)
        rules.bucket_size = of_parts > least ? of_parts : least;
    return rules;
}

static int new_buffer(struct moe_builder *b, const char *what, int number, enum moe_buffer_role role,
                      enum moe_type type, int extent)
{
    char name[MOE_NAME];
    int stage = b->s->roles[b->role].first_layer;
    snprintf(name, sizeof name, b->role ? "%s_%d_of_stage_%d" : "%s_%d", what, number, b->role);
    int buffer = moe_new_buffer(b, name, role, type, 1, extent);
    b->s->buffers[buffer].where = MOE_WHERE_STAGE;
    b->s->buffers[buffer].stage = stage;
    return buffer;
}

/* The bucket that begins with a placed tensor; its buffers. */
static struct moe_bucket make_bucket(struct moe_builder *b, const struct moe_lower_sync *sync, int number,
                                     struct moe_bucket of, int64_t size, enum moe_type type)
{
    int64_t part = size / of.parts;
    of.size = moe_const(b, size);
    of.part = moe_const(b, part);
    of.left = (int)(size - part * of.parts);
    of.first = of.parts > 1 ? moe_mul(b, moe_place(b, of.comm), of.part) : moe_const(b, 0);
    of.grads = new_buffer(b, "grads", number, MOE_BUF_GRAD, type, of.size);
    of.values = new_buffer(b, "values", number, MOE_BUF_GRAD, type, of.size);
    for (int i = 0; i < 2 && sync->sc->optimizer == MOE_ADAMW; i++)
        of.state[i] = new_buffer(b, i ? "v" : "m", number, MOE_BUF_STATE, type, of.part);
    return of;
}

/* Of one reduce_scatter: its tensors are the last that were placed, from `from` on. */
static void make_of_step(struct moe_builder *b, const struct moe_lower_sync *sync, int step, int comm,
                         struct moe_buckets *out, int from)
{
    int n = out->n_placed - from;
    struct moe_bucket_tensor *tensor = moe_alloc((size_t)n, sizeof *tensor);
    int64_t *size = moe_alloc((size_t)n, sizeof *size);
    struct moe_bucket like = {.step = step, .comm = comm, .parts = 1, .complete = b->s->n_layers};
    if (comm >= 0) like.parts = moe_group_size(&b->s->comms[comm], 0);
    struct moe_bucket_rules rules = rules_of(b, sync, like.parts);
    for (int i = 0; i < n; i++) {
        const struct moe_param *p = &b->s->params[out->placed[from + i].param];
        tensor[i].n = extent_of(b->s, p);
        tensor[i].tied = b->s->buffers[p->grad].where == MOE_WHERE_ENDS && sync->groups.tied >= 0;
    }
    int n_buckets = moe_bucket_layout(&rules, like.parts, n, tensor, size);
    out->bucket = realloc(out->bucket, (size_t)(out->n + n_buckets) * sizeof *out->bucket);
    moe_assert(out->bucket || !(out->n + n_buckets));
    for (int k = 0; k < n_buckets; k++)
        out->bucket[out->n + k] = make_bucket(b, sync, out->n + k, like, size[k],
                                              b->s->buffers[b->s->params[out->placed[from].param].grad].type);
    for (int i = 0; i < n; i++) {
        struct moe_placed *placed = &out->placed[from + i];
        placed->bucket = out->n + tensor[i].bucket;
        placed->begin = tensor[i].begin;
        int *complete = &out->bucket[placed->bucket].complete;
        bool enters = b->s->buffers[b->s->params[placed->param].grad].where == MOE_WHERE_ENDS;
        if (enters) *complete = -1;
        if (placed->layer >= 0 && placed->layer < *complete) *complete = placed->layer;
    }
    for (int k = 0; k < n_buckets; k++) /* none of a layer */
        if (out->bucket[out->n + k].complete == b->s->n_layers) out->bucket[out->n + k].complete = -1;
    out->n += n_buckets;
    free(tensor);
    free(size);
}

void moe_buckets_make(struct moe_builder *b, const struct moe_lower_sync *sync, struct moe_buckets *out)
{
    *out = (struct moe_buckets){0};
    for (int i = 0; i < sync->order.n; i++) {
        const struct moe_sync_step *step = &sync->order.step[i];
        int from = out->n_placed;
        if (step->act != MOE_SYNC_REDUCE_SCATTER) continue;
        place_all(b, step, out);
        if (out->n_placed > from) make_of_step(b, sync, i, moe_sync_comm(sync, step->over), out, from);
    }
}

void moe_buckets_free(struct moe_buckets *buckets)
{
    free(buckets->bucket);
    free(buckets->placed);
    *buckets = (struct moe_buckets){0};
}

/* ---- operations ---- */

static int minus(struct moe_builder *b, int x, int y)
{
    return moe_add(b, x, moe_mul(b, moe_const(b, -1), y));
}

/* Elements of a buffer, all of a tensor's in a bucket. */
static struct moe_ref range(struct moe_builder *b, int buffer, const struct moe_placed *t, int n)
{
    return (struct moe_ref){.buffer = buffer, .begin = moe_const(b, t->begin), .n = n};
}

struct moe_target moe_bucket_target(struct moe_builder *b, const struct moe_buckets *buckets, int placed,
                                    bool of_layer)
{
    const struct moe_placed *t = &buckets->placed[placed];
    const struct moe_bucket *k = &buckets->bucket[t->bucket];
    struct moe_target out = {.p = b->s->params[t->param], .layer = t->layer, .named = !of_layer};
    int shift = of_layer || t->layer < 0 ? 0 : t->layer;
    out.value = (struct moe_ref){.buffer = out.p.buffer, .shift = shift};
    out.n = b->s->buffers[out.p.grad].extent;
    if (!k->reduced) {
        out.whole = out.own = (struct moe_ref){.buffer = out.p.grad, .shift = shift};
        return out;
    }
    int begin = moe_const(b, t->begin), end = moe_const(b, t->begin + extent_of(b->s, &out.p));
    int from = moe_max(b, begin, k->first), to = moe_min(b, end, moe_add(b, k->first, k->part));
    out.whole = range(b, k->grads, t, out.n);
    out.n = moe_max(b, moe_const(b, 0), minus(b, to, from));
    out.own = (struct moe_ref){.buffer = k->grads, .begin = from, .n = out.n};
    out.value.begin = minus(b, from, begin);
    out.value.n = out.n;
    for (int i = 0; i < 2; i++)
        out.state[i] = (struct moe_ref){.buffer = k->state[i], .begin = minus(b, from, k->first), .n = out.n};
    return out;
}

static void emit_copy(struct moe_builder *b, const char *verb, const struct moe_target *t,
                      struct moe_ref from, struct moe_ref to, const struct moe_bucket *shared)
{
    struct moe_op op = {.kernel = MOE_K_COPY,
                        .type = b->s->buffers[from.buffer].type,
                        MOE_READS(from),
                        MOE_WRITES(to),
                        MOE_SIZES(to.n ? to.n : from.n)};
    if (shared && shared->left) {
        op.needs = "elements of a bucket that are left when its ranks share it";
        op.low = moe_const(b, shared->left);
        op.high = moe_const(b, 0);
    }
    if (t->layer < 0)
        snprintf(op.name, sizeof op.name, "%s_%.32s", verb, t->p.name);
    else
        snprintf(op.name, sizeof op.name, "%s_%.24s_%d", verb, t->p.name, t->layer);
    moe_emit(b, op);
}

static void emit_shared(struct moe_builder *b, const char *verb, int number, enum moe_collective collective,
                        int comm, struct moe_ref from, struct moe_ref to, int part)
{
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = collective,
                        .comm = comm,
                        .type = b->s->buffers[from.buffer].type,
                        .stream = MOE_STREAM_COMM,
                        .send = part,
                        .recv = part,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    snprintf(op.name, sizeof op.name, "%s_%d", verb, number);
    moe_emit(b, op);
}

void moe_bucket_reduce(struct moe_builder *b, struct moe_buckets *buckets, int bucket)
{
    struct moe_bucket *k = &buckets->bucket[bucket];
    for (int i = 0; i < buckets->n_placed; i++) {
        if (buckets->placed[i].bucket != bucket) continue;
        struct moe_target t = moe_bucket_target(b, buckets, i, false);
        emit_copy(b, "pack", &t, t.whole, range(b, k->grads, &buckets->placed[i], t.n), k);
    }
    if (k->parts > 1)
        emit_shared(b, "reduce_scatter", bucket, MOE_REDUCESCATTER, k->comm, moe_ref(k->grads),
                    (struct moe_ref){.buffer = k->grads, .begin = k->first, .n = k->part}, k->part);
    k->reduced = true;
}

void moe_bucket_gather(struct moe_builder *b, struct moe_buckets *buckets, int bucket, int comm)
{
    struct moe_bucket *k = &buckets->bucket[bucket];
    if (comm < 0 || moe_group_size(&b->s->comms[comm], 0) == 1) return;
    for (int i = 0; i < buckets->n_placed; i++) {
        if (buckets->placed[i].bucket != bucket) continue;
        struct moe_target t = moe_bucket_target(b, buckets, i, false);
        struct moe_ref to = t.own;
        to.buffer = k->values;
        emit_copy(b, "pack", &t, t.value, to, NULL);
    }
    emit_shared(b, "all_gather", bucket, MOE_ALLGATHER, comm,
                (struct moe_ref){.buffer = k->values, .begin = k->first, .n = k->part}, moe_ref(k->values),
                k->part);
    for (int i = 0; i < buckets->n_placed; i++) {
        if (buckets->placed[i].bucket != bucket) continue;
        struct moe_target t = moe_bucket_target(b, buckets, i, false);
        struct moe_ref whole = {.buffer = t.value.buffer, .shift = t.value.shift};
        emit_copy(b, "unpack", &t, range(b, k->values, &buckets->placed[i], b->s->buffers[t.p.grad].extent),
                  whole, NULL);
    }
}
