/* nccl_table - what NCCL's log says of its own cost model on a machine, in place of nccl_tuning.h's
 * constants.
 *
 * Of one node, a table for each number of GPUs that was logged; a topology keeps them as text:
 *
 *   tuning: 8 allreduce ring/ll 15 us 80.6 GB/s, 8 allreduce nvls/simple 25 us 273.3 GB/s, ...
 *
 * Sizes met: 1 to 4 tables of 5 to 15 costs. */
#ifndef MOE_NCCL_TABLE_H
#define MOE_NCCL_TABLE_H

#include "sim/cost/nccl_tuning.h"

#include <stdio.h>

struct moe_nccl_table {
    int ranks;
    struct {
        double latency_s, rate_Bps; /* of nccl-tests' size; rate 0: not offered */
    } cost[MOE_COLLECTIVE_COUNT][MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT];
};
struct moe_nccl_tables {
    int n, cap;
    struct moe_nccl_table *table; /* [n] of one number of ranks each */
};

/* Adds a cost to the table of so many ranks, which may be new. The names are those of moe_collective_text and
 * the texts of MOE_ALGORITHMS and MOE_PROTOCOLS. Errors: MOE_EINPUT for others, naming the nearest, for ranks
 * below 2, and for a latency or rate that is not finite or below 0, or a rate of 0. */
int moe_nccl_tables_add(struct moe_nccl_tables *t, int ranks, const char *collective, const char *algorithm,
                        const char *protocol, double latency_s, double rate_Bps);
/* NULL: none of so many. */
const struct moe_nccl_table *moe_nccl_table_of(const struct moe_nccl_tables *t, int ranks);

/* The text above. Result: *out, to be freed; it is empty after an error, MOE_EINPUT. */
int moe_nccl_tables_parse(const char *text, struct moe_nccl_tables *out);
/* The text, with six digits: what a log says has fewer. */
void moe_nccl_tables_write(const struct moe_nccl_tables *t, FILE *f);
void moe_nccl_tables_free(struct moe_nccl_tables *t);

/* What a table says of rings, each from an all-reduce of 2 (n - 1) steps and an all-gather of n - 1: seconds
 * without steps and of a step, bytes per second of the wire. false: they are not offered, or say less than
 * nothing. */
bool moe_nccl_table_ring(const struct moe_nccl_table *t, enum moe_protocol protocol, double *base_s,
                         double *step_s, double *wire_Bps);

#endif
