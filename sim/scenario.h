/* scenario - what the user asks about: model, layout, dispatcher, routing and machine, in YAML.
 *
 *   model:            {layers: 2, hidden: 64, ffn: 128, experts: 8, top_k: 2, heads: 4, sequence: 64}
 *                                   # or {preset: mixtral_8x7b, layers: 4}: keys beside it replace its own
 *   layout:           {ranks: 4, expert_parallel: 4, rank_order: consecutive,   # or strided
 *                      pipeline_parallel: 1, micro_batches: 1, pipeline: 1f1b}   # or gpipe
 *   tokens_per_rank:  256             # of a micro-batch; or a list with one number per rank, not all 0
 *   dispatcher:       alltoall        # or allgather, deepep, deepep_low_latency, nvlink_one_sided, gshard
 *   max_dispatch_tokens: 128        # of a rank, that the buffers of deepep_low_latency and nvlink_one_sided
 *                                   # hold (others have none, and not the key); or a list (limits.h)
 *   capacity:         {rule: megatron, factor: 1.25, drop: probs, pad: false}   # default: rule dropless
 *   apply_probs:      dispatcher      # rows are weighed where its framework does; or home, expert
 *   row_dot:          fixed           # tree of a probability's gradient; or by_rows, chosen by their number
 *   dtype:            float32         # or float64, bfloat16 (emulated by capture)
 *   optimizer:        adamw           # or sgd
 *   learning_rate:    0.003
 *   clip_norm:        1.0             # 0: gradients are not clipped
 *   aux_loss:         0.01            # coefficient of the load-balancing loss, 0: none; or more (aux_loss.h)
 *   loss:             per_token       # divided by all tokens; or mean_of_ranks: the mean of each rank's mean
 *   gradient_sync:    [{do: sum, of: shared, over: dp}, ...]   # the order of sync.h, when not the default
 *   distributed_optimizer: {bucket_size: 0, separate_tied: true, pad: true}   # absent: each rank updates all
 *   overlap_grad_reduce: false        # sum a layer's gradients as soon as its backward pass is over
 *   routing:          {skew: 0.5, seed: 1}   # for check and simulate; a trace brings its own
 *                                   # or {counts: [[[8, 0, 4], ...], ...], step: 3}: by layer, rank, expert
 *   topology:         dgx_h100        # for simulate; may be named on the command line
 *   limits:           {row_multiple: 16}          # of libraries and kernels (limits.h)
 *   padding:          {tokens: 16, masked: true}  # of tokens_per_rank (limits.h)
 *   checkpoint:       {save: {names: global}}     # how experts are stored, for check (checkpoint.h)
 *   probs_gradient:   returned        # or lost: what moves probabilities to other ranks has no backward
 *                                   # (where rows are weighed at the expert)
 *   empty_rank:       run             # or detach, bypass, skip_weights: a rank whose experts got no row
 *
 * Only model (heads and sequence excepted), layout and tokens_per_rank are required. heads: 0 leaves
 * attention out. Presets (presets.c, which says what of them our model cannot express): mixtral_8x7b,
 * deepseek_v3, qwen3_moe_235b, olmoe_1b_7b, switch_base_128. layout.rank_order: the ranks that split the
 * experts are neighbours (consecutive), or as far from each other as can be (strided), so that the copies of
 * an expert are neighbours. layout.pipeline_parallel: stages, each of as many layers and of consecutive
 * ranks; the first holds the embedding, the last its copy for the output head. routing.counts are by layer of
 * every micro-batch, one after the other; in that step, counted from 0, capture gives experts these counts in
 * place of its routers' choices (without step it leaves them alone), weighed by the routers' probabilities.
 * apply_probs: on the rank of the token, or of the expert, with the dispatchers that can do both.
 *
 * distributed_optimizer shares gradients, optimizer state and updates out (buckets.h); its keys say how
 * buckets are laid out for the reduce_scatter steps of gradient_sync. bucket_size: elements from which a
 * bucket is closed; 0: one bucket, or with overlap_grad_reduce max(40e6, 1e6 x ranks) on the first stage.
 * With overlap a bucket is reduced as soon as it is full, one that holds the embedding of a pipeline at the
 * end.
 *
 * empty_rank: what a rank does when no row reached its experts. run: as with rows. detach: what it returns
 * hangs on nothing, so that its backward pass leaves out the collectives from the combine to the dispatch.
 * bypass: it returns what it had before the dispatch, and leaves out those of the dispatch alone.
 * skip_weights: its experts get no gradient, and it does not enter the sums of those (one micro-batch).
 *
 * layout.sequence_parallel: 2   so many neighbours split a sequence (tensor parallelism with sequence
 * parallelism, or context parallelism), and hold all parameters but the experts; not with attention, which
 * needs whole sequences.
 *
 * What a framework may get wrong in a layout, for check:
 *   layout.micro_batches   a list says how many each rank runs (one stage, loss per_token; not captured)
 *   layout.data_parallel, expert_data_parallel   what the user expects of ranks / pipeline_parallel /
 *                          sequence_parallel, and of ranks / pipeline_parallel / expert_parallel
 *   layout.expert_group    set; or unset: the group of the dispatcher's collectives is None, which means all
 *                          ranks (dispatcher gshard)
 *   layout.group_creation  which groups a rank creates, communicator by communicator. in_order: all, in one
 *                          order; own_first: all, its own first; own_only: its own, although all ranks must
 *                          enter the call; own_locally: its own, in a call that only members enter
 *                          (use_local_synchronization)
 *
 * Keys of capacity, by rule (what they do: lower/RULE.c; their table: lower/rules.c):
 *   megatron    factor: 1, drop: probs (or position), pad: false
 *   deepspeed   factor: 1, min_capacity: 4, drop_tokens: true, agree: true, clamp: true for top-1 alone,
 *               drop: probs (top_k above 2), random_tokens: true and seed: 0 (top_k 1)
 *   tutel       factor: 1 (0 or below: from counts), unequal_tokens: false, align: 1
 *   all three   group_tokens: the tokens that share a capacity, where a rank has more (for one rank that
 *               stands for several); capacities that follow from counts follow from the rank's */
#ifndef MOE_SCENARIO_H
#define MOE_SCENARIO_H

#include "sim/lower/aux_loss.h"
#include "sim/lower/checkpoint.h"
#include "sim/lower/limits.h"
#include "sim/lower/sync.h"

enum { MOE_VOCAB = 256 }; /* the model reads and predicts bytes */

enum moe_clamp { MOE_CLAMP_NO, MOE_CLAMP_YES, MOE_CLAMP_TOP1 };
struct moe_capacity {
    char rule[MOE_NAME];
    double factor;
    int by_position; /* 0: keep the most probable */
    int pad;
    int64_t group_tokens; /* 0: all tokens of the rank */
    int64_t min_capacity, seed, align;
    int drop_tokens, agree, random_tokens, unequal_tokens;
    int clamp; /* enum moe_clamp */
};
struct moe_yaml;
/* Errors: MOE_EINPUT for an unknown dispatcher, naming the nearest or all: lower/lower.c. */
int moe_dispatcher_check(const char *name);
/* Does it write into buffers of a fixed size, so that the key counts? Errors: MOE_EINPUT, naming those that
 * do. */
int moe_dispatcher_bounds(const char *name, const char *key);
/* The rule that limits nothing, and what the keys of the others are when nobody says it. */
void moe_capacity_default(struct moe_capacity *out);
/* Reads the keys of the rule that the mapping names; others stay. Errors: MOE_EINPUT "file:line: ..." for an
 * unknown rule, a key of another rule or top_k (naming it), and those of moe_yaml_read. */
int moe_capacity_read(const struct moe_yaml *node, int64_t top_k, struct moe_capacity *out);
/* "RULE", "RULE:FACTOR", or "FACTOR" of the rule that *out has (of the first that limits, if it has none).
 * Another rule starts with its defaults. Errors: MOE_EINPUT for a rule that is unknown or has no factor, and
 * for a factor that it cannot have; then *out is untouched. */
int moe_capacity_set(const char *text, struct moe_capacity *out);
/* The rule, and its factor if that counts: as moe_capacity_set reads it, with six digits. */
enum { MOE_CAPACITY_TEXT = 2 * MOE_NAME };
void moe_capacity_text(const struct moe_capacity *c, char out[MOE_CAPACITY_TEXT]);

struct moe_distributed { /* optimizer */
    bool on;
    int64_t bucket_size;
    int separate_tied, pad;
};

enum moe_optimizer { MOE_ADAMW, MOE_SGD };
enum moe_loss { MOE_PER_TOKEN, MOE_MEAN_OF_RANKS };
enum moe_apply_probs { MOE_PROBS_BY_DISPATCHER, MOE_PROBS_AT_HOME, MOE_PROBS_AT_EXPERT };
extern const char *const moe_apply_probs_text[]; /* ends with NULL */
enum moe_rank_order { MOE_CONSECUTIVE, MOE_STRIDED, MOE_RANK_ORDER_COUNT };
enum moe_empty_rank { MOE_EMPTY_RUNS, MOE_EMPTY_DETACHES, MOE_EMPTY_BYPASSES, MOE_EMPTY_SKIPS_WEIGHTS };
enum moe_pipeline { MOE_1F1B, MOE_GPIPE };
extern const char *const moe_rank_order_text[]; /* ends with NULL */

struct moe_scenario {
    char name[2 * MOE_NAME]; /* file name, for messages and tables */
    int64_t layers, hidden, ffn, experts, top_k, heads, sequence;
    int64_t ranks, expert_parallel, pipeline_parallel, micro_batches;
    int pipeline;   /* enum moe_pipeline */
    int rank_order; /* enum moe_rank_order */
    int creation;   /* enum moe_creation */
    int expert_group_unset;
    int64_t sequence_parallel;
    int64_t data_parallel, expert_data_parallel; /* as expected, 0: not said */
    int64_t *tokens;                             /* [ranks] */
    int64_t *batches;    /* [ranks] micro-batches, micro_batches of them the most; NULL: as many on all */
    int32_t *counts;     /* [layers, ranks, experts] of the routing, or NULL: it is drawn */
    int64_t counts_step; /* capture forces them in this step; -1: in none */
    char dispatcher[MOE_NAME], topology[MOE_NAME];
    struct moe_capacity capacity;
    int dtype;       /* enum moe_type: MOE_F32, MOE_F64 or MOE_BF16 */
    int optimizer;   /* enum moe_optimizer */
    int loss;        /* enum moe_loss */
    int apply_probs; /* enum moe_apply_probs */
    int row_dot;     /* MOE_DOT_... of schedule.h */
    struct moe_sync_order sync;
    struct moe_distributed distributed;
    int overlap_grad_reduce;
    struct moe_aux_loss aux_loss;
    struct moe_limits limits;
    int probs_detached;
    int empty_rank;             /* enum moe_empty_rank */
    struct moe_padding padding; /* tokens are without that which is masked */
    struct moe_checkpoint_keys checkpoint;
    double learning_rate, clip_norm, skew;
    int64_t seed;
    char *text; /* the YAML itself, kept with a capture */
};

/* Errors: MOE_ELAYOUT "file:line: ..." for what moe_scenario_check_layout refuses; MOE_EINPUT for YAML
 * errors, unknown keys, values out of range, top_k above experts, a token list of another length than ranks,
 * counts that are not those of the tokens, an unknown dispatcher or capacity rule, keys that the rule
 * does not know. */
int moe_scenario_load(const char *path, struct moe_scenario **out);
int moe_scenario_parse(const char *name, const char *text, struct moe_scenario **out);
void moe_scenario_free(struct moe_scenario *sc);

struct moe_scenario_difference {
    const char *map, *key; /* map "": the key stands by itself */
    char a[MOE_NAME], b[MOE_NAME];
};
/* Calls fn with every key on which two scenarios differ: of a number or word by its value, defaults too; of a
 * mapping or list when it is written otherwise, its value then "...", or "absent". Of topology and routing,
 * which a capture brings itself, nothing is said. Cost: reads both texts again. */
void moe_scenario_compare(const struct moe_scenario *a, const struct moe_scenario *b,
                          void (*fn)(void *ctx, const struct moe_scenario_difference *d), void *ctx);

/* Tokens of a step: those of all micro-batches of the ranks of a stage. */
int64_t moe_scenario_tokens(const struct moe_scenario *sc);

/* The routing that the scenario says: its counts, or drawn. */
struct moe_routing;
struct moe_routing *moe_scenario_routing(const struct moe_scenario *sc);

/* Does expert_parallel divide the ranks of a stage, and experts; and the stages ranks and layers; and are the
 * sizes that follow those that are expected? Errors: MOE_ELAYOUT, without file and line. */
int moe_scenario_check_layout(const struct moe_scenario *sc);
/* Can capture run it, and save or load its parameters where `checkpoints`? Errors: MOE_EMISSING. */
int moe_scenario_check_capture(const struct moe_scenario *sc, bool checkpoints);
/* Sets the sizes of the model to those of a preset. Errors: MOE_EINPUT for an unknown name, with the nearest
 * one, without file and line. Source: presets.c. */
int moe_scenario_preset(struct moe_scenario *sc, const char *name);

#endif
