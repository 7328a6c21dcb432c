/* sync - the order in which gradients become updates, as a list that a user writes and a lowering follows.
 *
 *   gradient_sync:
 *     - {do: sum, of: shared, over: dp}
 *     - {do: sum, of: experts, over: edp}
 *     - {do: sum, of: embedding, over: tied}
 *     - {do: divide, of: all, by: world_tokens}
 *     - {do: norm, of: shared, over: pp}
 *     - {do: norm, of: experts, over: ep_pp}
 *     - {do: clip}
 *     - {do: update}
 *
 *   do    broadcast   once, before the first step: parameters become those of the first rank of the group
 *         sum      all-reduce
 *         average  the same, divided by the ranks that it sums over
 *         divide   by a product, and times another; each a name or number, or a list of them
 *         norm     squares are added up on the rank, then over the group `over` (none: they are not), once
 *                  behind the last step that measures shared parameters, and once for experts
 *         clip     by clip_norm and all norms
 *         update   the optimizer's step
 *         reduce_scatter, all_gather   of a distributed optimizer: gradients are laid out in buckets
 *                  (buckets.h), each summed so that every rank of the group has one part of it; from there on
 *                  a rank divides, measures, clips and updates its part, and sums over other groups take all
 *                  that lies in the bucket, what it does not own too; the gather spreads the parameters
 *   of    all, shared (what every rank of the group dp holds), experts, or a parameter by its name
 *   over  world, dp (ranks of a stage, which hold the same shared parameters), ep (ranks that split its
 *         experts), edp (ranks that hold the same experts), pp (the ranks of a pipeline, one of each stage),
 *         tied (its first and last, which hold the embedding), ep_pp (all stages of ep), sp (ranks of dp that
 *         split a sequence), across_sp (ranks of dp at the same place of it), none
 *   on    all stages of a pipeline, or the first or last alone: ranks of others leave the step out (not with
 *         broadcast, reduce_scatter and all_gather)
 *   by, times   a group: its size; tokens: those of the rank; world_tokens: of all ranks; or a number
 *
 * Steps are carried out in this order for each parameter; sums, averages and divisions that follow each other
 * go parameter by parameter, and so do updates and the squares of norms that follow each other. Of the two
 * copies of the embedding in a pipeline the first is in the norm. The example is what a scenario without the
 * key does when loss is per_token. With mean_of_ranks every rank's gradient is divided by its own tokens
 * before the first step, and the fourth line divides by dp. Without a pipeline pp and tied hold each rank
 * alone: there is nothing to sum, and a list that names them goes for any number of stages. */
#ifndef MOE_SYNC_H
#define MOE_SYNC_H

#include "sim/base.h"

struct moe_yaml;

/* clang-format off */
#define MOE_SYNC_ACTS(X) \
        X(BROADCAST, "broadcast") X(SUM, "sum") X(AVERAGE, "average") X(DIVIDE, "divide") \
        X(NORM, "norm") X(CLIP, "clip") X(UPDATE, "update") \
        X(REDUCE_SCATTER, "reduce_scatter") X(ALL_GATHER, "all_gather")
#define MOE_SYNC_GROUPS(X) X(NONE, "none") X(WORLD, "world") X(DP, "dp") X(EP, "ep") X(EDP, "edp") \
        X(PP, "pp") X(TIED, "tied") X(EP_PP, "ep_pp") X(SP, "sp") X(ACROSS_SP, "across_sp")
/* clang-format on */
#define X(name, text) MOE_SYNC_##name,
enum moe_sync_act { MOE_SYNC_ACTS(X) MOE_SYNC_ACT_COUNT };
#undef X
#define X(name, text) MOE_GROUP_##name,
enum moe_sync_group { MOE_SYNC_GROUPS(X) MOE_GROUP_COUNT };
#undef X
extern const char *const moe_sync_group_text[]; /* ends with NULL */

enum moe_sync_on { MOE_ON_ALL, MOE_ON_FIRST, MOE_ON_LAST };
enum { MOE_SYNC_FACTORS = 4 };
enum moe_factor_kind { MOE_FACTOR_NUMBER, MOE_FACTOR_GROUP, MOE_FACTOR_TOKENS, MOE_FACTOR_WORLD_TOKENS };
struct moe_factor {
    enum moe_factor_kind kind;
    int64_t number; /* NUMBER: from 1; GROUP: enum moe_sync_group */
};

struct moe_sync_step {
    int act; /* enum moe_sync_act */
    char of[MOE_NAME];
    int over; /* enum moe_sync_group */
    int on;   /* enum moe_sync_on */
    int n_by, n_times;
    struct moe_factor by[MOE_SYNC_FACTORS], times[MOE_SYNC_FACTORS];
    int line; /* of the file, 0: nobody wrote it */
};

struct moe_sync_order {
    int n;
    struct moe_sync_step *step; /* [n]; NULL: none was written */
    int line;                   /* of the key, 0: nobody wrote it */
};

/* Reads the list. Errors: MOE_EINPUT "file:line: ..." for what is no such list, unknown keys, words and
 * groups (with the nearest), a step that lacks what it needs or has what it cannot use. Names of parameters
 * are left to the lowering. */
int moe_sync_read(const struct moe_yaml *node, struct moe_sync_order *out);
void moe_sync_free(struct moe_sync_order *order);
/* What a scenario does that writes no list. mean_of_ranks: see above. distributed: as Megatron-LM does,
 * shared parameters are shared out over dp and experts over edp, before the tied embedding is summed. */
void moe_sync_default(bool mean_of_ranks, bool clips, bool distributed, struct moe_sync_order *out);

#endif
