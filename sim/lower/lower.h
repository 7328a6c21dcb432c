/* lower - from a scenario to the schedule of one training step: model, layout, dispatcher, capacity rule.
 *
 * The model: byte embedding; L layers of causal attention (when heads > 0) and a mixture of experts, each
 * behind a norm and beside a residual; an output head tied to the embedding; cross entropy and auxiliary
 * loss, both summed over tokens; gradients summed over the right groups and divided by the tokens of the
 * world; clipping; update. A dispatcher, and a capacity rule, is one file with one function and one row of a
 * table, in lower.c and in rules.c. */
#ifndef MOE_LOWER_H
#define MOE_LOWER_H

#include "sim/lower/builder.h"
#include "sim/scenario.h"

/* Arithmetic of an element, in additions that take a core as long: a softmax with an exponential and a
 * division in float64, a sigmoid in float32 (kernels/ref.c). It decides on a CPU; on a GPU the bytes do. */
enum { MOE_SOFTMAX_FLOPS = 48, MOE_SIGMOID_FLOPS = 20 };

/* A mixture-of-experts layer as the capacity rule and the dispatcher see it. References are to buffers with
 * one slot a layer; sizes are expressions, but for the last line. */
struct moe_layer {
    struct moe_ref x;             /* [T, H] what the experts read */
    struct moe_ref y;             /* [T, H] out: sum over k of prob * expert's row */
    struct moe_ref prob;          /* [T, E] */
    struct moe_ref expert, slot;  /* [T, K] chosen expert, and row among those that leave; -1: dropped */
    struct moe_ref counts;        /* [E] rows for each expert that leave this rank */
    struct moe_ref w1, w2;        /* experts of this rank: [e, H, 2F], [e, F, H] */
    int n_rows;                   /* rows that leave this rank */
    bool n_rows_from_counts;      /* n_rows is known only once the host has read counts */
    struct moe_ref padded_arrive; /* [P, e] rows from each peer, when padded: sizes need no exchange */
    int padded_rows;              /* rows of each expert from each rank, when padded; else 0 */
    int most_tokens;              /* of a rank, that buffers of a fixed size hold; 0: as many as there are */
    int T, H, F, K, E;
    int n_layers, n_experts, ep_size, ep_comm;
    int stage_comm;       /* ranks that have different tokens: those of a stage */
    bool probs_at_expert; /* rows are weighed on the expert's rank */
    int row_dot;          /* mode of what weighs rows */
    const struct moe_limits *limits;
    bool probs_detached; /* what moves prob to other ranks is not differentiable */
    enum moe_type type;
};

/* Writes the operations from (x, prob, expert, slot, counts) to y into the present block, in between calling
 * moe_lower_experts with the rows that reached this rank. The backward pass follows by itself. */
struct moe_dispatcher {
    const char *name;
    void (*forward)(struct moe_builder *b, const struct moe_layer *m);
    bool pads;        /* moves padded rows when the capacity rule pads */
    bool dropless;    /* goes with rules that drop nothing only: counts do not tell what else it would send */
    bool always_pads; /* the capacity rule must pad; dropless pads to the largest count of the group */
    bool once;        /* sends a token once to a rank: counts by expert do not tell how many go there */
    bool bounded;     /* writes into buffers of a fixed size: max_dispatch_tokens */
    enum moe_apply_probs only; /* it can weigh rows here only; 0: on either rank, and by itself at home */
};
void moe_alltoall(struct moe_builder *b, const struct moe_layer *m);           /* alltoall.c */
void moe_allgather(struct moe_builder *b, const struct moe_layer *m);          /* allgather.c */
void moe_deepep(struct moe_builder *b, const struct moe_layer *m);             /* deepep.c */
void moe_deepep_low_latency(struct moe_builder *b, const struct moe_layer *m); /* low_latency.c */
void moe_nvlink_one_sided(struct moe_builder *b, const struct moe_layer *m);   /* one_sided.c */

/* What dispatchers are made of that differ in who moves the bytes. */
struct moe_carriers {
    enum moe_transport counts, rows, back; /* before a dispatch; it; and back */
    enum moe_transport beside;             /* moe_lower_once: what goes with each token */
    bool on_device;                        /* kernels read the counts: the host does not wait for them */
};
/* A row to each expert of a token: alltoall.c; a row to each rank that has any of them: deepep.c. */
void moe_lower_alltoall(struct moe_builder *b, const struct moe_layer *m, const struct moe_carriers *by);
void moe_lower_once(struct moe_builder *b, const struct moe_layer *m, const struct moe_carriers *by);
/* The n operations written last move probabilities to other ranks: with probs_detached they have no
 * backward. */
void moe_lower_probs_moved(struct moe_builder *b, const struct moe_layer *m, int n);

/* Decides which of the chosen rows leave: replaces expert, slot, counts and n_rows of the layer, and prob
 * where what is left is weighted otherwise. */
struct moe_capacity_rule {
    const char *name;
    void (*limit)(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity);
};
/* The row of this name, in rules.c. Errors: MOE_EINPUT for an unknown one, naming the nearest. */
int moe_capacity_rule(const char *name, const struct moe_capacity_rule **out);
void moe_limit_dropless(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity);
void moe_limit_megatron(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity);
void moe_limit_deepspeed(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity);
void moe_limit_tutel(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity);

/* What rules are made of: limit.c. Results are expressions.
 *
 * The largest count of an expert on this rank, or with `agree` over the expert-parallel group: a kernel, an
 * all-reduce of one number, a host sync. */
int moe_lower_largest(struct moe_builder *b, const struct moe_layer *m, bool agree);
/* The most tokens of any rank of the expert-parallel group, agreed on in the same way. */
int moe_lower_most_tokens(struct moe_builder *b, const struct moe_layer *m);
/* Of so many tokens those that share a capacity: all, or with group_tokens at most that many. The last group
 * of a rank may have fewer and has the same capacity. */
int moe_lower_group(struct moe_builder *b, const struct moe_capacity *capacity, int tokens);
struct moe_limiting {
    int capacity;      /* expression: C */
    int order;         /* MOE_LIMIT_...: who stays */
    int low, high;     /* as of moe_op */
    const char *needs; /* as of moe_op */
};
/* Keeps at most C rows of each expert, or pads to C. Tokens that are drawn at random are drawn by numbers:
 * those of a rank follow those of the ranks before it in its stage. */
void moe_lower_limit(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity,
                     struct moe_limiting limit);
/* From here on the layer weighs rows by prob / (its sum over the experts that a token has now). */
void moe_lower_normalize(struct moe_builder *b, struct moe_layer *m);

/* The experts: rows [n, H] by local expert, `group` the symbol with each expert's rows;
 * returns rows [n, H]. */
struct moe_ref moe_lower_experts(struct moe_builder *b, const struct moe_layer *m, struct moe_ref rows, int n,
                                 int group);
/* Tokens that reached a rank whole, with all their choices. */
struct moe_received {
    struct moe_ref x, prob, expert; /* [n, H]; [n, E], or of this rank's experts alone; [n, K], -1: none */
    int n, of_expert;               /* expression; symbol with the rows of each expert of this rank */
    bool own_probs;                 /* prob is of this rank's experts alone */
};
/* This rank's experts on them: returns [n, H], of each token the sum over its experts here of prob * row. */
struct moe_ref moe_lower_received(struct moe_builder *b, const struct moe_layer *m,
                                  const struct moe_received *in);
/* A buffer [n, width] of the layer's type with one slot a layer. */
struct moe_ref moe_rows(struct moe_builder *b, const struct moe_layer *m, const char *name, int n, int width);

/* An all-to-all over the expert-parallel group; the gradient of real rows goes back the same way. send, recv:
 * expressions, elements per peer. */
void moe_lower_move_by(enum moe_transport by, struct moe_builder *b, const struct moe_layer *m,
                       const char *name, struct moe_ref from, int send, struct moe_ref to, int recv);
static inline void moe_lower_move(struct moe_builder *b, const struct moe_layer *m, const char *name,
                                  struct moe_ref from, int send, struct moe_ref to, int recv)
{
    moe_lower_move_by(MOE_BY_NCCL, b, m, name, from, send, to, recv);
}

/* limits.c: what must hold before the step, and of the rows of experts, which operations `in` and `out` read:
 * n, an expression, in all, and the symbol of_expert. */
void moe_lower_claims(struct moe_builder *b, const struct moe_layer *m, const struct moe_padding *padding);
/* An operation that writes rows into buffers of a fixed size: they hold those of a rank's tokens. */
void moe_lower_bound(const struct moe_layer *m, struct moe_op *op);
void moe_lower_users(struct moe_builder *b, const struct moe_layer *m);
void moe_lower_unset_group(struct moe_builder *b, const struct moe_layer *m);
void moe_lower_row_limits(struct moe_builder *b, const struct moe_layer *m, int n, int of_expert,
                          struct moe_op *in, struct moe_op *out);

/* empty.c: which collectives of the block `backward`, that undoes `forward`, a rank without rows leaves out.
 * mode: enum moe_empty_rank. Returns the rows of the experts of a layer, an expression. */
int moe_lower_empty(struct moe_builder *b, int forward, int backward, int mode);

/* Communicators, and sizes, by the names of sync.h. */
struct moe_groups {
    int dp, ep, edp, pp, tied, ep_pp, sp, across_sp; /* communicators; -1: each rank is alone */
    int copies;               /* communicator: ranks that hold the embedding; dp where there is one stage */
    int tokens, world_tokens; /* expressions; of all micro-batches of a step */
};

/* layout.c: adds the communicators of the layout to the schedule. The ranks of a stage are a grid. */
void moe_lower_comms(struct moe_builder *b, const struct moe_scenario *sc, struct moe_groups *out);
/* aux_loss.c: the load-balancing loss `loss` of a layer, from its probabilities and counts; comm: whose
 * counts, -1: the rank's own; divisor, times, factor: expressions, by word. */
struct moe_lower_aux {
    int comm, divisor, times, factor[MOE_AUX_FACTOR_COUNT];
};
/* T, dp_tokens: tokens of a micro-batch on the rank, and on all of its stage. */
void moe_lower_aux_open(struct moe_builder *b, const struct moe_scenario *sc, const struct moe_groups *groups,
                        int T, int dp_tokens, struct moe_lower_aux *out);
void moe_lower_aux_loss(struct moe_builder *b, const struct moe_layer *y, const struct moe_lower_aux *a,
                        double coefficient, struct moe_ref loss);

/* checkpoint.c. Errors: MOE_ELAYOUT where the ranks that load cannot split the experts, MOE_EINPUT where
 * there are fewer than should. */
int moe_lower_checkpoint(struct moe_builder *b, const struct moe_scenario *sc);

/* gradient_sync.c: from gradients to updates. */
struct moe_buckets; /* buckets.h */
struct moe_lower_sync {
    const struct moe_scenario *sc; /* borrowed */
    struct moe_groups groups;
    struct moe_sync_order order; /* that of the scenario, or its default; what loss asks for before it */
    int n_early; /* of its steps: done for the parameters of layers behind their backward pass */
    int one;     /* expression */
    int rows;    /* expression: experts' gradients are summed where it is not 0; 0 itself: always */
    int shared_norm, expert_norm; /* buffers, 0: none */
    struct moe_buckets *buckets;  /* of the stage that is being written, NULL: not made yet */
};
/* Errors: MOE_EINPUT for a step that names no parameter. Free with moe_sync_free(&out->order). */
int moe_lower_sync_open(struct moe_builder *b, const struct moe_scenario *sc, const struct moe_groups *groups,
                        struct moe_lower_sync *out);
/* A block with the steps up to the last sum before any norm, for the parameters of a layer: to be run when
 * its backward pass is over. -1: there is no sum. */
int moe_lower_sync_early(struct moe_builder *b, struct moe_lower_sync *sync);
/* The same of buckets that are full behind a layer's backward pass: a block to be run once, or -1. */
int moe_lower_sync_bucket(struct moe_builder *b, struct moe_lower_sync *sync, int layer);
/* Does a step concern the parameter? The communicator of a step's group, or -1. */
bool moe_sync_is_of(const struct moe_sync_step *step, const struct moe_param *p);
int moe_sync_comm(const struct moe_lower_sync *sync, int group);
/* Does a step measure parameters of a kind? Those go into the norm of the kind. */
bool moe_sync_measures(const struct moe_schedule *s, const struct moe_sync_step *step, bool experts);
/* What the list that a scenario writes must keep to, beside its words: sync_check.c. Errors: MOE_EINPUT with
 * the line of the step. */
int moe_sync_check(const struct moe_builder *b, const struct moe_scenario *sc);
/* Does the stage that is being written hold the parameter? */
bool moe_lower_is_held(const struct moe_builder *b, const struct moe_param *p);
/* Blocks of all other steps, and their runs. */
void moe_lower_sync(struct moe_builder *b, struct moe_lower_sync *sync);

/* pipe.c: the stages of a pipeline pass activations of a micro-batch on, and their gradients back, and
 * take turns in an order: gpipe, all forward passes, then all backward passes; 1f1b, as many forward passes
 * as there are stages behind, then one backward for each forward pass, the transfers of both in one
 * (Narayanan et al. 2021, section 2.2). With one stage, the micro-batches one after the other. */
struct moe_lower_pipe {
    int n_stages, stage, n_micro;                            /* n_micro: that the role runs */
    int embed, layer, head, d_head, d_layer, d_embed, early; /* blocks of the stage; -1: it has none */
    int *full; /* [n_layers] block of the buckets that are full behind a layer; -1: none */
    /* Transfers: forward, backward, and both at once, to (or from) the next stage and the one before. */
    int next[3], previous[3];
    struct moe_ref stream, nothing; /* input of each layer, and of the head; no element */
    int n, comm[2];                 /* elements; even and odd neighbours */
};
/* stream: one slot a layer, and one; n: its elements (expression). */
void moe_lower_pipe_open(struct moe_builder *b, struct moe_ref stream, int n, int n_stages,
                         struct moe_lower_pipe *out);
/* Blocks that go before the forward, between the passes, and behind the backward pass. */
void moe_lower_pipe_before(struct moe_builder *b, struct moe_lower_pipe *pipe);
void moe_lower_pipe_between(struct moe_builder *b, struct moe_lower_pipe *pipe);
void moe_lower_pipe_after(struct moe_builder *b, struct moe_lower_pipe *pipe);
/* Appends the runs of a step's forward and backward passes. order: enum moe_pipeline. */
void moe_lower_pipe_run(struct moe_builder *b, const struct moe_lower_pipe *pipe, int order);

/* Errors: MOE_EINPUT for an unknown dispatcher or capacity rule, with the nearest known one, and for a pair
 * of them that does not go together. */
int moe_lower(const struct moe_scenario *sc, struct moe_schedule **out);
/* A dispatcher that counts of rows by expert do not tell the traffic of; false for an unknown name. */
bool moe_lower_sends_once(const char *name);
/* The same with a dispatcher of the caller's own. */
int moe_lower_with(const struct moe_scenario *sc, const struct moe_dispatcher *dispatcher,
                   struct moe_schedule **out);

#endif
