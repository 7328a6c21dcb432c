/* summary - what a report says about a trace store: each number of METRICS.md, computed once, in memory.
 *
 * Sizes met: 2 to 64 ranks, 2 to 60 layers, 8 to 256 experts, 10^2 to 10^6 operations a step, of which only
 * the median step is held. */
#ifndef MOE_SUMMARY_H
#define MOE_SUMMARY_H

#include "sim/routing.h"
#include "sim/scenario.h"
#include "traces/store.h"

#include <stdio.h>

/* Rows of one step from somewhere to somewhere, by the routing of all ranks, before any dropping. */
struct moe_matrix {
    const char *from, *to; /* what rows and columns are */
    int n_from, n_to;
    int64_t *count;   /* [from, to] */
    double *relative; /* [from, to] count / mean of those of this `from` that can be more than 0; or 0 */
    double max;       /* where a scale of relative ends */
};

struct moe_load {
    int64_t step;
    struct moe_routing *routing;
    struct moe_matrix tokens; /* from a layer to an expert */
};

enum { MOE_BAR_PARTS = 6, MOE_MEASURED_PARTS = 6, MOE_SIMULATED_PARTS = 5 };

/* Step times split into parts: one stacked bar each. */
struct moe_bar {
    char name[4 * MOE_NAME];
    double step_us, part_us[MOE_BAR_PARTS];
    double dropped; /* simulated: of the rows that routing chose, 0 to 1 */
    double kept_us; /* step_us / (1 - dropped), the sum of the parts */
    int id;         /* place in the store */
};
struct moe_bars {
    int n_parts, n, cap, n_shown; /* n_shown: the first ones, in figures and tables */
    const char *const *parts;     /* [n_parts] names */
    struct moe_bar *bars;
};

/* Predicted and measured times of a step, as moesim validate found them. */
struct moe_phase {
    char name[MOE_NAME];
    double measured_us, predicted_us;
    double error_pct; /* predicted / measured - 1; infinite where nothing was measured */
    double share_pct; /* measured, of the measured step */
};
struct moe_phases {
    int n, cap;
    struct moe_phase *items; /* items[0] is the step; then the longest, measured or predicted, first */
    bool fitted;             /* to these very steps: then it is no prediction */
    int n_counted;           /* phases, as moe_phase_counts says (sim/cost/calibrate.h) */
    int worst;               /* of these: the furthest off */
    double median_error_pct; /* over these, of magnitudes */
};

struct moe_summary {
    struct moe_store_info info;
    struct moe_scenario *scenario;
    char *version, *data_bytes, *seed; /* of the run; NULL when absent */
    struct moe_load first, last;       /* of the complete steps */
    struct moe_matrix traffic;         /* of the last step, from rank to rank, all layers together */
    int64_t row_bytes;                 /* of a row that moves */
    int64_t median_step;               /* a step of median duration, the shorter one of two */
    struct moe_bars measured;          /* of that step: bars[0] is the mean over ranks, then each rank */
    struct moe_bars simulated;         /* one per result, the least time per kept token first */
    struct moe_phases phases;          /* none before moe_summary_load_phases */
};

/* Errors: MOE_EINPUT for what is no trace store, holds no complete step, or contradicts its own scenario. out
 * is freed with moe_summary_free in any case. */
int moe_summary_load(const char *store_path, struct moe_summary *out);
/* Adds the table that moesim validate wrote. Errors: MOE_EFAILED for what cannot be read, MOE_EINPUT for what
 * is no such table. */
int moe_summary_load_phases(const char *path, struct moe_summary *m);
void moe_summary_free(struct moe_summary *m);

/* Of the rows that the tokens of a step chose in a layer (-1: in all of them), the share that stays behind
 * when each rank keeps ceil(T * K / E * factor) of its own for each expert. Source: sim/lower/megatron.c. */
double moe_dropped_share(const struct moe_routing *r, int layer, double factor);

/* What the numbers say, in plain words, one sentence or two a line. */
void moe_summary_findings(const struct moe_summary *m, FILE *out);
/* "1.15 times as long; what decides is exposed collectives (+615 us, all else -290 us)": bar i of the
 * simulated ones against the first. */
void moe_write_against_best(const struct moe_bars *b, int i, FILE *out);

/* The unit in which a time up to max_us reads well: its name, and in *unit_us its length. */
const char *moe_time_unit(double max_us, double *unit_us);

#endif
