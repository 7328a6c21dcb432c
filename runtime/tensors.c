/* tensors.c - see tensors.h. */
#include "runtime/tensors.h"

#include "kernels/bf16.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where in the rank's step the first operation stands that reads a parameter's slot, or the last one of the
 * backward pass that writes a gradient's; the end without one. */
static int place_of(const struct moe_schedule *s, const struct moe_role *role, int buffer, int slot,
                    bool gradient)
{
    int place = 0, last = -1;
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_instance *instance = &role->itinerary[i];
        const struct moe_block *block = &role->blocks[instance->block];
        for (int o = 0; o < block->n_ops; o++, place++) {
            const struct moe_op *op = &block->ops[o];
            const int n = gradient ? op->n_writes : op->n_reads;
            if (gradient && block->pass != MOE_BACKWARD) continue;
            for (int r = 0; r < n; r++) {
                const struct moe_ref ref = gradient ? op->writes[r] : op->reads[r];
                if (ref.buffer != buffer || moe_slot(s, ref, instance->layer) != slot) continue;
                if (!gradient) return place;
                last = place;
            }
        }
    }
    return last < 0 ? place : last;
}

static bool touches(const struct moe_schedule *s, const struct moe_ref *refs, int n, int layer, int buffer,
                    int slot)
{
    for (int r = 0; r < n; r++)
        if (refs[r].buffer == buffer && moe_slot(s, refs[r], layer) == slot) return true;
    return false;
}

static bool updates(const struct moe_op *op)
{
    return op->kind == MOE_KERNEL && (op->kernel == MOE_K_SGD || op->kernel == MOE_K_ADAMW);
}

/* Does the update read the gradient elsewhere? */
static bool is_bucketed(const struct moe_schedule *s, const struct moe_role *role, const struct moe_param *p,
                        int slot)
{
    for (int i = 0; i < role->n_instances; i++) {
        const int layer = role->itinerary[i].layer;
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        for (int o = 0; o < block->n_ops; o++) {
            const struct moe_op *op = &block->ops[o];
            if (updates(op) && touches(s, op->writes, op->n_writes, layer, p->buffer, slot))
                return !touches(s, op->reads, op->n_reads, layer, p->grad, slot);
        }
    }
    return false;
}

static void add_element(struct moe_store_tensor *t, double value, uint64_t bits)
{
    t->hash = moe_hash64(t->hash ^ bits);
    if (isfinite(value)) {
        t->sum += value;
        t->sum_squares += value * value;
    } else {
        t->n_nonfinite++;
    }
}

/* Fills in what follows from the content. */
static void take(struct moe_store_tensor *t, const void *content, bool poisoned)
{
    bool zero = true, nan = false;
    for (int64_t i = 0; i < t->n; i++) {
        double value;
        if (t->element_bytes == 8) {
            uint64_t bits;
            memcpy(&bits, (const char *)content + 8 * i, 8);
            memcpy(&value, &bits, 8);
            add_element(t, value, bits);
        } else if (t->element_bytes == 2) {
            moe_bf16 bits = ((const moe_bf16 *)content)[i];
            value = (double)moe_bf16_to_float(bits);
            add_element(t, value, bits);
        } else {
            uint32_t bits;
            float f;
            memcpy(&bits, (const char *)content + 4 * i, 4);
            memcpy(&f, &bits, 4);
            value = (double)f;
            add_element(t, value, bits);
        }
        zero &= value == 0;
        nan |= isnan(value);
    }
    t->presence = poisoned && nan ? MOE_IS_UNINITIALISED : zero ? MOE_IS_ZERO : MOE_IS_PRESENT;
}

int moe_tensors_add_slot(const struct moe_tensors_to *to, const struct moe_execution *x,
                         enum moe_tensor_role role, int param, int slot)
{
    const struct moe_schedule *s = moe_execute_schedule(x);
    const struct moe_param *p = &s->params[param];
    const bool gradient = role == MOE_TENSOR_GRADIENT || role == MOE_TENSOR_CLIPPED;
    const int rank = moe_execute_rank(x), buffer = gradient ? p->grad : p->buffer;
    const struct moe_comm *split = p->shard < 0 ? NULL : &s->comms[p->shard];
    const int experts = split ? s->n_experts / moe_group_size(split, split->group_of[rank]) : 1;
    struct moe_store_tensor t = {.step = to->step,
                                 .rank = rank,
                                 .layer = p->per_layer ? slot : -1,
                                 .role = role,
                                 .element_bytes = moe_type_bytes[s->buffers[p->buffer].type]};
    int64_t n;
    const bool given = !gradient || moe_execute_given(x, buffer, slot),
               bucketed = gradient && is_bucketed(s, &s->roles[s->role_of[rank]], p, slot);
    if (!moe_execute_buffer(x, p->buffer, slot, &n)) return MOE_EFAILED;
    const char *content = given && !bucketed ? moe_execute_buffer(x, buffer, slot, &n) : NULL;
    if (given && !bucketed && !content) return MOE_EFAILED;
    t.place = place_of(s, &s->roles[s->role_of[rank]], buffer, slot, gradient);
    t.n = n / experts;
    moe_copy_name(t.name, p->name);
    for (int e = 0; e < experts; e++) {
        const char *part = content ? content + e * t.n * t.element_bytes : NULL;
        t.expert = split ? split->index_of[rank] * experts + e : -1;
        t.sum = t.sum_squares = 0;
        t.n_nonfinite = 0;
        t.hash = (uint64_t)t.n;
        t.presence = given ? MOE_IS_BUCKETED : MOE_IS_NONE;
        if (part) take(&t, part, to->poisoned);
        t.content = to->whole ? part : NULL;
        MOE_TRY(moe_store_add_tensor(to->store, &t));
    }
    return MOE_OK;
}

int moe_tensors_add(const struct moe_tensors_to *to, const struct moe_execution *x, enum moe_tensor_role role)
{
    const struct moe_schedule *s = moe_execute_schedule(x);
    for (int p = 0; p < s->n_params; p++) {
        const int buffer = s->params[p].buffer;
        for (int slot = 0; buffer >= 0 && slot < s->buffers[buffer].slots; slot++)
            if (moe_holds(s, buffer, slot, moe_execute_rank(x)))
                MOE_TRY(moe_tensors_add_slot(to, x, role, p, slot));
    }
    return MOE_OK;
}

/* ---- when gradients are complete ---- */

static bool consumes(const struct moe_op *op)
{
    return updates(op) || (op->kind == MOE_KERNEL && op->kernel == MOE_K_CLIP);
}

/* The operations until the last one that writes the gradient before it is consumed. */
static int done_with(const struct moe_schedule *s, const struct moe_role *role, int buffer, int slot)
{
    int done = 0, written = 0;
    for (int i = 0; i < role->n_instances; i++) {
        const int layer = role->itinerary[i].layer;
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        for (int o = 0; o < block->n_ops; o++) {
            const struct moe_op *op = &block->ops[o];
            done++;
            if (written && consumes(op) && touches(s, op->reads, op->n_reads, layer, buffer, slot))
                return written;
            if (touches(s, op->writes, op->n_writes, layer, buffer, slot)) written = done;
        }
    }
    return done;
}

static int by_done(const void *a, const void *b)
{
    const struct moe_tensors_due *x = a, *y = b;
    return x->done != y->done     ? (x->done > y->done) - (x->done < y->done)
           : x->param != y->param ? x->param - y->param
                                  : x->slot - y->slot;
}

int moe_tensors_plan(const struct moe_schedule *s, int rank, struct moe_tensors_due **out, bool *clips)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    int n = 0, cap = 0;
    *out = NULL;
    *clips = false;
    for (int p = 0; p < s->n_params; p++) {
        const int buffer = s->params[p].buffer;
        for (int slot = 0; buffer >= 0 && slot < s->buffers[buffer].slots; slot++) {
            if (!moe_holds(s, buffer, slot, rank)) continue;
            *out = moe_grow(*out, &cap, n + 1, sizeof **out);
            (*out)[n++] = (struct moe_tensors_due){done_with(s, role, s->params[p].grad, slot), p, slot};
        }
    }
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++)
            *clips |=
                role->blocks[b].ops[o].kind == MOE_KERNEL && role->blocks[b].ops[o].kernel == MOE_K_CLIP;
    if (n) qsort(*out, (size_t)n, sizeof **out, by_done);
    return n;
}
