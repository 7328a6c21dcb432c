/* captured - what a run did, judged by the tensors in its store: no schedule, no scenario.
 *
 * Rows that name the same tensor of the model (name, layer, expert) are copies of it. What is looked for
 * (class, after the check classes of the bug atlas):
 *   C6 content   a parameter or gradient that is absent, never written or not finite, or has no row beside
 *                the tensor's others of a rank in a step
 *   C16 copies   copies differ, or experts are copies of one
 *   C4 reduction copies of a gradient differ before clipping: it was not summed over all of them; or
 *                different experts have the same gradient: it was summed over ranks with other experts
 *   C5 norms     copies of a gradient differ only since they were clipped
 * and, against another run from the same parameters:
 *   C3 scale     a gradient is a whole multiple, or fraction, of the other run's
 *   C4 reduction possible: the norm is about the square root of a number of ranks times the other's
 *   C9 repeat    the first tensor that differs, and whether by more than rounding
 * A fault spreads: the first step and stage (initial parameters, gradients, clipped ones, parameters) that
 * shows an error is reported, and none after it. Of gradients in buckets nothing is said. Sizes met: 1 to
 * 64 ranks, 20 to 10,000 tensors, 1 to 1,000 steps.
 */
#ifndef MOE_CAPTURED_H
#define MOE_CAPTURED_H

#include "sim/check/check.h"
#include "traces/store.h"

struct moe_captured;

/* Reads the fingerprints of a store, which is borrowed until _free. Errors: those of the store.
 * MOE_EINPUT for a row of a rank that the run has not. Cost: O(rows * log rows) time, 200 bytes a row. */
int moe_captured_load(struct moe_store *s, struct moe_captured **out);
void moe_captured_free(struct moe_captured *c);
int moe_captured_rows(const struct moe_captured *c);     /* 0: the run kept no tensors */
int moe_captured_bucketed(const struct moe_captured *c); /* of them gradients in buckets: nothing is known */

/* Does every rank have as many rows of parameters in every complete step as of those that it began with? What
 * is not there was not seen. */
bool moe_captured_is_whole(const struct moe_captured *c);

/* Adds verdicts about one run: C4, C5, C6, C16.
 *
 * Result: none when no row is missing, every tensor is finite and written, copies are the same to the bit in
 * every step, and experts differ. Zeros and constants do not count as the same. The first copies that differ
 * by no more than rounding are a possible error, which ends nothing.
 * Errors: those of the store. */
int moe_check_captured(const struct moe_captured *c, struct moe_verdicts *out);

/* Adds verdicts of a run against another of the same model and batches, on any layout: C3, C4, C9.
 *
 * Every copy of either run is compared: with the one that the same rank of the other run holds, or the first
 * where that has none. Ranks of the verdicts are those of the run on which it differs.
 *
 * Result: one C9, which also counts tensors that only one of the runs has: a note when all tensors in
 * common are the same to the bit, when rounding or a factor explains what differs in the first stage that
 * does, or when `out` holds an error, which then explains it; else an error. Rounding is up to 256 units in
 * the last place of a tensor's norm (bfloat16: 16), what a random walk makes of 65,536 additions; of
 * tensors without content it is judged by norm and sum.
 * Errors: those of the stores; MOE_EINPUT when seed
 * or text differ, or no tensor is in common. */
int moe_check_against(const struct moe_captured *run, const struct moe_captured *other,
                      struct moe_verdicts *out);

#endif
