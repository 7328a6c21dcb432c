/* scenario - what the user asks about: model, layout, dispatcher, routing and machine, in YAML.
 *
 *   model:            {layers: 2, hidden: 64, ffn: 128, experts: 8, top_k: 2}
 *   layout:           {ranks: 4, expert_parallel: 4}
 *   tokens_per_rank:  256             # or a list with one number per rank
 *   dispatcher:       alltoall
 *   dtype:            float32         # or float64
 *   learning_rate:    0.1
 *   routing:          {skew: 0.5, seed: 1}   # for check and simulate; a trace brings its own
 *   topology:         dgx_h100        # for simulate; may be named on the command line
 *
 * Only model, layout and tokens_per_rank are required. */
#ifndef MOE_SCENARIO_H
#define MOE_SCENARIO_H

#include "sim/base.h"

enum { MOE_VOCAB = 256 }; /* the model reads and predicts bytes */

struct moe_scenario {
    char name[2 * MOE_NAME]; /* file name, for messages and tables */
    int64_t layers, hidden, ffn, experts, top_k;
    int64_t ranks, expert_parallel;
    int64_t *tokens; /* [ranks] */
    char dispatcher[MOE_NAME], topology[MOE_NAME];
    int dtype; /* enum moe_type: MOE_F32 or MOE_F64 */
    double learning_rate, skew;
    int64_t seed;
    char *text; /* the YAML itself, kept with a capture */
};

/* Errors: MOE_EINPUT "file:line: ..." for YAML errors, unknown keys, values out of range, expert_parallel
 * that does not divide ranks or experts, top_k above experts, a token list of another length than ranks. The
 * dispatcher's name is checked by moe_lower, which owns their table. */
int moe_scenario_load(const char *path, struct moe_scenario **out);
int moe_scenario_parse(const char *name, const char *text, struct moe_scenario **out);
void moe_scenario_free(struct moe_scenario *sc);

#endif
