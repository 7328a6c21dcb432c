/* tensors - fingerprints of parameters and gradients into the trace store. */
#ifndef MOE_TENSORS_H
#define MOE_TENSORS_H

#include "runtime/execute.h"
#include "traces/store.h"

/* What is kept of tensors. */
enum moe_tensors { MOE_TENSORS_NONE, MOE_TENSORS_HASHED, MOE_TENSORS_WHOLE };

struct moe_tensors_to { /* where rows go, and what is in them */
    struct moe_store *store;
    int64_t step;
    bool whole;    /* with their content */
    bool poisoned; /* the execution fills with NaN what nobody wrote */
};

/* Adds the row of a parameter's slot as it is now, or of its gradient (role); one an expert where it is split
 * by expert. Cost: O(elements). Errors: those of the store and the device. */
int moe_tensors_add_slot(const struct moe_tensors_to *to, const struct moe_execution *x,
                         enum moe_tensor_role role, int param, int slot);
/* The same for every slot that the rank holds. */
int moe_tensors_add(const struct moe_tensors_to *to, const struct moe_execution *x,
                    enum moe_tensor_role role);

/* When the gradients of a rank are complete in a step: `done` operations into it, ascending. Of one that
 * nothing writes before it is clipped or read by an update: at the end. */
struct moe_tensors_due {
    int done, param, slot;
};
/* *out [n], to be freed. clips: does the rank clip? */
int moe_tensors_plan(const struct moe_schedule *s, int rank, struct moe_tensors_due **out, bool *clips);

#endif
