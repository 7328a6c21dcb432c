/* layout.c - which ranks form groups: the communicators of a layout (lower.h). */
#include "sim/lower/lower.h"

#include <stdlib.h>

/* What joins stages; key [ranks]: to work with. */
static void make_stage_comms(struct moe_builder *b, const struct moe_scenario *sc, struct moe_groups *out,
                             int *key)
{
    int n = (int)sc->ranks, each = n / (int)sc->pipeline_parallel, last = n / each - 1;
    const struct moe_comm *ep = &b->s->comms[out->ep];
    int rows = ep->n_groups / (last + 1);
    for (int r = 0; r < n; r++) key[r] = ep->group_of[r] % rows;
    out->ep_pp = moe_new_comm(b, "ep_pp", rows, key);
    for (int r = 0; r < n; r++) key[r] = r / each;
    out->dp = moe_new_comm(b, "dp", last + 1, key);
    for (int r = 0; r < n; r++) key[r] = r % each;
    out->pp = moe_new_comm(b, "pp", each, key);
    /* Ranks between the ends are alone in both. */
    for (int r = 0; r < n; r++) key[r] = r < each ? r : r / each == last ? r % each : r;
    out->tied = moe_new_comm(b, "tied", last * each, key);
    for (int r = 0; r < n; r++) key[r] = r < each || r / each == last ? 0 : r - each + 1;
    out->copies = moe_new_comm(b, "tied_dp", (last - 1) * each + 1, key);
}

static void make_sequence_comms(struct moe_builder *b, const struct moe_scenario *sc, struct moe_groups *out,
                                int *key)
{
    int n = (int)sc->ranks, split = (int)sc->sequence_parallel, each = n / (int)sc->pipeline_parallel;
    for (int r = 0; r < n; r++) key[r] = r / split;
    out->sp = moe_new_comm(b, "sp", n / split, key);
    for (int r = 0; r < n; r++) key[r] = r / each * split + r % split;
    out->across_sp = moe_new_comm(b, "across_sp", n / each * split, key);
}

/* The ranks of a stage as a grid: its rows are consecutive ranks, its columns ranks at the stride of a row.
 * Rows split the experts and columns hold copies; with rank order strided it is the other way round. */
void moe_lower_comms(struct moe_builder *b, const struct moe_scenario *sc, struct moe_groups *out)
{
    int n = (int)sc->ranks, size = (int)sc->expert_parallel, each = n / (int)sc->pipeline_parallel;
    bool strided = sc->rank_order == MOE_STRIDED;
    int *key = moe_alloc((size_t)n, sizeof *key);
    for (int r = 0; r < n; r++) {
        int i = r % each;
        key[r] = r / each * (each / size) + (strided ? i % (each / size) : i / size);
    }
    out->ep = moe_new_comm(b, "ep", n / size, key);
    for (int r = 0; r < n; r++) {
        int i = r % each;
        key[r] = r / each * size + (strided ? i / (each / size) : i % size);
    }
    out->edp = moe_new_comm(b, "edp", n / each * size, key);
    out->dp = out->copies = 0;
    out->pp = out->tied = -1;
    out->ep_pp = out->ep;
    if (n > each) make_stage_comms(b, sc, out, key);
    out->sp = -1;
    out->across_sp = out->dp;
    if (sc->sequence_parallel > 1) make_sequence_comms(b, sc, out, key);
    free(key);
}
