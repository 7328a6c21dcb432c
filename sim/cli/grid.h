/* grid - every combination of what --vary lists, simulated on all cores. */
#ifndef MOE_CLI_GRID_H
#define MOE_CLI_GRID_H

#include "sim/check/check.h"
#include "sim/cli/cli.h"
#include "sim/values.h"

enum moe_vary_key {
    MOE_VARY_TOPOLOGY,
    MOE_VARY_DISPATCHER,
    MOE_VARY_CAPACITY,
    MOE_VARY_EP,
    MOE_VARY_ORDER,
    MOE_VARY_COUNT
};

/* A key of --vary. */
struct moe_vary {
    const char *name, *column; /* as in a scenario; in tables and JSON, and also on the command line */
    /* Puts a value into the scenario. Errors: negative, when it is none. */
    int (*set)(struct moe_scenario *sc, const char *value);
};
extern const struct moe_vary moe_vary[MOE_VARY_COUNT];

struct moe_variant {
    char *value[MOE_VARY_COUNT]; /* borrowed from the grid */
    struct moe_scenario sc;      /* the one asked about, with these values; owns nothing */
    int err;                     /* enum moe_err; below 0: error says why there is no result */
    char *error;
    struct moe_sim_result r;
    struct moe_kept kept;
    struct moe_verdicts verdicts; /* of its schedule; moe_variant_verdicts */
    bool wrong;                   /* there is an error among them */
    double kept_tokens;           /* of the step: the tokens, less 1 / top_k for each row that was dropped */
};

struct moe_grid {
    int n_values[MOE_VARY_COUNT];
    char **value[MOE_VARY_COUNT]; /* of capacity with the rule: as moe_capacity_text */
    bool own[MOE_VARY_COUNT];     /* one value, that of the scenario, which has it */
    int n, n_ok, n_right;         /* variants; with a result; with one and without an error */
    struct moe_variant *variants; /* [n], the last key varies fastest */
    int *rank; /* [n_ok] those with a result: n_right, then the wrong; the least time per kept token first */
};

/* Reads args->vary; a key that is not there has the value of the scenario. Result: *g, to be freed in any
 * case. Errors: MOE_EUSAGE for an unknown key or dispatcher, an empty or impossible value; MOE_EINPUT for
 * an unknown topology. */
int moe_grid_make(struct moe_grid *g, const struct moe_args *args, const struct moe_input *in);
/* Simulates the variants on n_threads threads (0: as many as there are cores). Result: does not depend on
 * n_threads. Errors: when no variant has a result, that of the first. */
int moe_grid_run(struct moe_grid *g, const struct moe_input *in, int64_t n_threads);
void moe_grid_free(struct moe_grid *g);

/* What check says of a variant: the same on every topology, so it is asked for the first one. */
const struct moe_verdicts *moe_variant_verdicts(const struct moe_grid *g, const struct moe_variant *v);

/* us a kept token; the number by which variants are ranked. */
double moe_variant_cost_us(const struct moe_variant *v);

#endif
