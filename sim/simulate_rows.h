/* simulate_rows - the lines of the breakdown: one for each operation of a block, whatever
 * the layer and role. */
#ifndef MOE_SIMULATE_ROWS_H
#define MOE_SIMULATE_ROWS_H

#include "sim/simulate.h"

struct moe_rows {
    int *of, max_blocks, max_ops; /* of [role, block, op]: number of its line */
};

/* Adds the lines of all operations to out, in the order in which they first run;
 * free(rows->of) in the end. */
void moe_rows_make(struct moe_rows *rows, const struct moe_schedule *s, struct moe_sim_result *out);
int *moe_rows_at(const struct moe_rows *rows, int role, int block, int op);

#endif
