/* tensors.c - see tensors.h. */
#include "runtime/tensors.h"

#include <math.h>
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

struct tensors { /* the arguments of moe_tensors_add */
    struct moe_store *store;
    const struct moe_execution *x;
    int64_t step;
    enum moe_tensor_role role;
    bool whole, poisoned;
};

static int add_slot(const struct tensors *a, const struct moe_param *p, int slot)
{
    const struct moe_schedule *s = moe_execute_schedule(a->x);
    const int rank = moe_execute_rank(a->x), buffer = a->role == MOE_TENSOR_GRADIENT ? p->grad : p->buffer;
    const struct moe_comm *split = p->shard < 0 ? NULL : &s->comms[p->shard];
    const int experts = split ? s->n_experts / moe_group_size(split, split->group_of[rank]) : 1;
    struct moe_store_tensor t = {.step = a->step,
                                 .rank = rank,
                                 .layer = p->per_layer ? slot : -1,
                                 .role = a->role,
                                 .element_bytes = moe_type_bytes[s->buffers[p->buffer].type]};
    int64_t n;
    const bool written = a->role != MOE_TENSOR_GRADIENT || moe_execute_given(a->x, buffer, slot);
    if (!moe_execute_buffer(a->x, p->buffer, slot, &n)) return MOE_EFAILED;
    const char *content = written ? moe_execute_buffer(a->x, buffer, slot, &n) : NULL;
    if (written && !content) return MOE_EFAILED;
    t.place = place_of(s, &s->roles[s->role_of[rank]], buffer, slot, a->role == MOE_TENSOR_GRADIENT);
    t.n = n / experts;
    moe_copy_name(t.name, p->name);
    for (int e = 0; e < experts; e++) {
        const char *part = content ? content + e * t.n * t.element_bytes : NULL;
        t.expert = split ? split->index_of[rank] * experts + e : -1;
        t.sum = t.sum_squares = 0;
        t.n_nonfinite = 0;
        t.hash = (uint64_t)t.n;
        t.presence = MOE_IS_NONE;
        if (part) take(&t, part, a->poisoned);
        t.content = a->whole ? part : NULL;
        MOE_TRY(moe_store_add_tensor(a->store, &t));
    }
    return MOE_OK;
}

int moe_tensors_add(struct moe_store *store, const struct moe_execution *x, int64_t step,
                    enum moe_tensor_role role, bool whole, bool poisoned)
{
    const struct tensors a = {store, x, step, role, whole, poisoned};
    const struct moe_schedule *s = moe_execute_schedule(x);
    for (int p = 0; p < s->n_params; p++) {
        const struct moe_param *param = &s->params[p];
        if (param->buffer < 0) continue;
        for (int slot = 0; slot < s->buffers[param->buffer].slots; slot++)
            if (moe_holds(s, param->buffer, slot, moe_execute_rank(x))) MOE_TRY(add_slot(&a, param, slot));
    }
    return MOE_OK;
}
