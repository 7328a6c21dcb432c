/* tensors - fingerprints of parameters and gradients into the trace store. */
#ifndef MOE_TENSORS_H
#define MOE_TENSORS_H

#include "runtime/execute.h"
#include "traces/store.h"

/* What is kept of tensors. */
enum moe_tensors { MOE_TENSORS_NONE, MOE_TENSORS_HASHED, MOE_TENSORS_WHOLE };

/* Adds a row for each parameter that this rank holds, or its gradient, at present; parameters that are split
 * by expert have a row an expert. After a step the gradients are those that its update read.
 *   whole     with their content
 *   poisoned  the execution fills with NaN what nobody wrote
 * Cost: O(elements). Errors: those of the store and the device. */
int moe_tensors_add(struct moe_store *store, const struct moe_execution *x, int64_t step,
                    enum moe_tensor_role role, bool whole, bool poisoned);

#endif
