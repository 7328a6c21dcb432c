/* checkpoint - parameters and optimizer state between runs: one file a rank, PREFIX.ckptN.
 *
 * A file holds a header and pieces: (tensor, layer, global expert) with their values, tensors without experts
 * whole. A run finds its pieces in the files of any number of ranks and any expert-parallel size. Numbers are
 * in the host's byte order; a file of the other one is refused. */
#ifndef MOE_CHECKPOINT_H
#define MOE_CHECKPOINT_H

#include "runtime/execute.h"

/* Writes PREFIX.ckptN of this rank, beside and renamed: the file is whole or as it was before. Between steps.
 * Errors: MOE_EFAILED when it cannot be written. Cost: writes the bytes of what persists on the rank. */
int moe_checkpoint_save(const char *prefix, struct moe_execution *x);

/* Replaces all parameters, state and the number of steps done. Reads the files of all ranks that saved.
 * Errors: MOE_EINPUT naming the file that is missing, foreign, truncated, of another model (tensors, heads,
 * sequence, type or optimizer differ) or of another step than PREFIX.ckpt0. Then the
 * execution is of no use. */
int moe_checkpoint_load(const char *prefix, struct moe_execution *x);

#endif
