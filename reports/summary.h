/* summary - what a report says about a trace store: each number of METRICS.md, computed once, in memory.
 *
 * Sizes met: 2 to 64 ranks, 2 to 60 layers, 8 to 256 experts, 10^2 to 10^6 operations a step, of which only
 * the median step is held. */
#ifndef MOE_SUMMARY_H
#define MOE_SUMMARY_H

#include "sim/scenario.h"
#include "traces/store.h"

#include <stdio.h>

/* How much each expert was asked for in one step, by the routing of all ranks, before any dropping. */
struct moe_load {
    int64_t step;
    int64_t *tokens;  /* [L, E] choices of the expert */
    double *relative; /* [L, E] tokens / mean of the layer; 0 where the layer has none */
    int *top;         /* [L] the most loaded expert, the lowest id among equals */
};

enum { MOE_BAR_PARTS = 6, MOE_MEASURED_PARTS = 6, MOE_SIMULATED_PARTS = 4 };

/* Step times split into parts: one stacked bar each. */
struct moe_bar {
    char name[3 * MOE_NAME];
    double step_us, part_us[MOE_BAR_PARTS];
};
struct moe_bars {
    int n_parts, n, cap;
    const char *const *parts; /* [n_parts] names */
    struct moe_bar *bars;
};

struct moe_summary {
    struct moe_store_info info;
    struct moe_scenario *scenario;
    char *version, *data_bytes, *seed; /* of the run; NULL when absent */
    struct moe_load first, last;       /* of the complete steps */
    int64_t median_step;               /* a step of median duration, the shorter one of two */
    struct moe_bars measured;          /* of that step: bars[0] is the mean over ranks, then each rank */
    struct moe_bars simulated;         /* one per result, in the order of the store */
};

/* Errors: MOE_EINPUT for what is no trace store, holds no complete step, or contradicts its own scenario. out
 * is freed with moe_summary_free in any case. */
int moe_summary_load(const char *store_path, struct moe_summary *out);
void moe_summary_free(struct moe_summary *m);

/* What the numbers say, in plain words, one sentence or two a line. */
void moe_summary_findings(const struct moe_summary *m, FILE *out);

/* The unit in which a time up to max_us reads well: its name, and in *unit_us its length. */
const char *moe_time_unit(double max_us, double *unit_us);

#endif
