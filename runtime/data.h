/* data - a text file as batches of byte ids: what the model is trained on. Sizes met: 100 B to 100 MB. */
#ifndef MOE_DATA_H
#define MOE_DATA_H

#include "sim/base.h"

struct moe_data {
    unsigned char *bytes;
    int64_t n, window; /* bytes; consecutive ones in a batch */
    uint64_t hash;     /* FNV-1a of the content */
};

/* window: the length of the model's sequences. Errors: MOE_EINPUT when the file cannot be read or is shorter
 * than window + 1 bytes. moe_data_free in any case. */
int moe_data_load(const char *path, int64_t window, struct moe_data *out);
void moe_data_free(struct moe_data *d);

/* Positions first .. first + n - 1 of the batch of a step.
 *   token, target [n]  out: a byte of the text and its successor
 * Result: a function of (text, seed, step, position): the batch of all ranks is the same on any number of
 * them. It is made of windows of consecutive bytes, each at a random place of the text. */
void moe_data_batch(const struct moe_data *d, uint64_t seed, int64_t step, int64_t first, int64_t n,
                    int32_t *token, int32_t *target);

#endif
