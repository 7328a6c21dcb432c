/* agree - asks, before a collective, whether all members mean the same one.
 *
 * A library takes sizes on trust: members that disagree crash, hang, or go on with wrong numbers. */
#ifndef MOE_AGREE_H
#define MOE_AGREE_H

#include "runtime/communicator.h"

/* Members tell each other, in one all-gather of fixed size on the communicator of the collective, what they
 * are about to start: its label, collective, reduction, element type and counts. Nothing of it has moved yet.
 *
 *   label      of the operation, below 2 * MOE_NAME bytes
 *   ranks [n]  of the members, for the message; n: c->size
 *
 * Result: MOE_OK when every member stands at this label and each pair of members agrees; else MOE_EVERDICT on
 * every member, with the same text: "layer 0 forward dispatch: rank 2 sends 24 float32 (alltoall) to rank 1,
 * which expects 48 float32 (alltoall)". The communicator can still be used.
 * Cost: one all-gather of 15 + 2 n numbers a member, of 8 bytes each; none in a group of one.
 * Errors: MOE_EPEER as for any collective, also when a member does not come within timeout_s. */
int moe_agree(struct moe_communicator *c, const struct moe_transfer *t, const char *label, const int *ranks,
              double timeout_s);

#endif
