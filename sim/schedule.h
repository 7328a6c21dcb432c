/* schedule - what every rank issues in one training step: the one structure that check, simulate and execute
 * read. Produced by a lowering (lower.h); its readers know neither the scenario nor each other.
 *
 * Ranks that issue the same list share a role. A role holds blocks (a layer's pass, written once) and an
 * itinerary (which block runs for which layer of which micro-batch, in host order). Host order is primary:
 * streams and communicator order follow from it. Sizes are expressions over symbols; a symbol is a row or
 * column sum of an int64 buffer (token counts) that the host knows once a host sync has read that buffer.
 * Sizes met: 4 to 16,384 ranks, 1 to 20 roles, up to 20 blocks of up to 60 operations each,
 * 2 to 60 layers. */
#ifndef MOE_SCHEDULE_H
#define MOE_SCHEDULE_H

#include "sim/base.h"

/* clang-format off */
/*                      text      bytes */
#define MOE_TYPES(X) \
        X(F32, "float32", 4) X(F64, "float64", 8) X(BF16, "bfloat16", 2) X(I32, "int32", 4) X(I64, "int64", 8)

/* How long a kernel takes depends on its class only:
 * MEMORY moves `bytes`; GEMM is [m, k] x [k, n]; GROUPED is one GEMM per group with rows from `group`. */
#define MOE_COSTS(X) X(MEMORY) X(GEMM) X(GROUPED)

/* Computations. What each reads and writes, in dims: kernel_shapes.c, one row each. What it computes, in
 * plain C: kernels/ref.h. A slot of -1 is a dropped row: nothing is moved, its weight counts as 0. */
#define MOE_KERNELS(X) \
   X(EMBED,        "embed",        MEMORY) \
   X(EMBED_BWD,    "embed_bwd",    MEMORY) \
   X(RMSNORM,      "rmsnorm",      MEMORY) \
   X(RMSNORM_BWD,  "rmsnorm_bwd",  MEMORY) \
   X(ATTENTION,    "attention",    MEMORY) \
   X(ATTENTION_BWD,"attention_bwd",MEMORY) \
   X(ADD,          "add",          MEMORY) \
   X(ADD_BWD,      "add_bwd",      MEMORY) \
   X(GEMM,         "gemm",         GEMM) \
   X(TOPK,         "topk",         MEMORY) \
   X(TOPK_BWD,     "topk_bwd",     MEMORY) \
   X(LARGEST,      "largest",      MEMORY) \
   X(SET,          "set",          MEMORY) \
   X(LIMIT,        "limit",        MEMORY) \
   X(NORMALIZE,    "normalize",    MEMORY) \
   X(NORMALIZE_BWD,"normalize_bwd",MEMORY) \
   X(AUX_LOSS,     "aux_loss",     MEMORY) \
   X(AUX_LOSS_BWD, "aux_loss_bwd", MEMORY) \
   X(SELECT,       "select",       MEMORY) \
   X(SPREAD,       "spread",       MEMORY) \
   X(PERMUTE,      "permute",      MEMORY) \
   X(PERMUTE_BWD,  "permute_bwd",  MEMORY) \
   X(SORT_ROWS,    "sort_rows",    MEMORY) \
   X(UNSORT_ROWS,  "unsort_rows",  MEMORY) \
   X(GROUPED_GEMM, "grouped_gemm", GROUPED) \
   X(GROUPED_WGRAD,"grouped_wgrad",GROUPED) \
   X(SWIGLU,       "swiglu",       MEMORY) \
   X(SWIGLU_BWD,   "swiglu_bwd",   MEMORY) \
   X(TAKE,         "take",         MEMORY) \
   X(TAKE_BWD,     "take_bwd",     MEMORY) \
   X(WEIGH,        "weigh",        MEMORY) \
   X(WEIGH_BWD,    "weigh_bwd",    MEMORY) \
   X(COMBINE,      "combine",      MEMORY) \
   X(COMBINE_BWD,  "combine_bwd",  MEMORY) \
   X(XENT,         "xent",         MEMORY) \
   X(ZERO,         "zero",         MEMORY) \
   X(SCALE,        "scale",        MEMORY) \
   X(COPY,         "copy",         MEMORY) \
   X(SQNORM,       "sqnorm",       MEMORY) \
   X(CLIP,         "clip",         MEMORY) \
   X(SGD,          "sgd",          MEMORY) \
   X(ADAMW,        "adamw",        MEMORY)

/* Who counts what, and whether elements are added up. Per peer: send (or recv) is evaluated at index = the
 * peer's place in the group, and the buffer holds the parts in that order; else it is one number.
 *                      text            send per peer, recv per peer, reduces */
#define MOE_COLLECTIVES(X) \
        X(ALLTOALL,      "alltoall",      true,  true,  false) \
        X(ALLREDUCE,     "allreduce",     false, false, true) \
        X(ALLGATHER,     "allgather",     false, true,  false) \
        X(REDUCESCATTER, "reducescatter", true,  false, true)
/* What a collective that reduces makes of the elements; text goes behind its name. */
#define MOE_REDUCTIONS(X) X(SUM, "") X(MAX, " max")
/* Who moves the bytes of a collective: how long that takes, not what arrives. Gradients go back by
 * `reverse`. What rides is moved by the kernel of another operation, which pays its latency. Home: bytes go
 * to the rank whose tokens they are of. All but NCCL move pairs only, of the group that splits the experts.
 * Each library has a dispatch and a combine, and what rides: counts before a dispatch (NOTIFY); where a
 * token goes once to each rank that has any of its experts, what goes with it (DISPATCHED), or comes back
 * with it (COMBINED).
 *        name               library      reverse           rides  home */
#define MOE_TRANSPORTS(X) \
        X(NCCL,              NCCL,        NCCL,              false, false) \
        X(DEEPEP_DISPATCH,   DEEPEP,      DEEPEP_COMBINE,    false, false) \
        X(DEEPEP_COMBINE,    DEEPEP,      DEEPEP_DISPATCH,   false, true) \
        X(DEEPEP_NOTIFY,     DEEPEP,      DEEPEP_NOTIFY,     true,  false) \
        X(DEEPEP_DISPATCHED, DEEPEP,      DEEPEP_COMBINED,   true,  false) \
        X(DEEPEP_COMBINED,   DEEPEP,      DEEPEP_DISPATCHED, true,  true) \
        X(LOW_DISPATCH,      LOW_LATENCY, LOW_COMBINE,       false, false) \
        X(LOW_COMBINE,       LOW_LATENCY, LOW_DISPATCH,      false, true) \
        X(LOW_NOTIFY,        LOW_LATENCY, LOW_NOTIFY,        true,  false) \
        X(ONE_DISPATCH,      ONE_SIDED,   ONE_COMBINE,       false, false) \
        X(ONE_COMBINE,       ONE_SIDED,   ONE_DISPATCH,      false, true) \
        X(ONE_NOTIFY,        ONE_SIDED,   ONE_NOTIFY,        true,  false) \
        X(ONE_DISPATCHED,    ONE_SIDED,   ONE_COMBINED,      true,  false) \
        X(ONE_COMBINED,      ONE_SIDED,   ONE_DISPATCHED,    true,  true)
/* DEEPEP, LOW_LATENCY: its normal and low-latency kernels. ONE_SIDED: kernels that write to their peers in
 * one NVLink domain. */
#define MOE_LIBRARIES(X) X(NCCL) X(DEEPEP) X(LOW_LATENCY) X(ONE_SIDED)
#define MOE_OP_KINDS(X) X(KERNEL, "kernel") X(COLLECTIVE, "collective") X(HOST_SYNC, "host_sync")
#define MOE_PASSES(X) \
        X(FORWARD, "forward") X(BACKWARD, "backward") X(SYNC, "sync") \
        X(CLIPPING, "clipping") X(UPDATE, "update")

/* INPUT   filled by the runtime before the step (token ids, targets)
 * COUNTS  int64 [E]: rows of this rank for every expert; the kernel that writes it is where routing enters
 *         (and SPREAD, which counts tokens by member of the group)
 * INDEX   other integers that kernels hand to kernels
 * STATE   of the optimizer: kept from step to step, zero at first
 * NORM    float64 [1]: a sum of squares that must cover the right ranks (a moe_param without a buffer)
 * OUTPUT  must be written when the step ends (the loss) */
#define MOE_BUFFER_ROLES(X) \
        X(INPUT) X(PARAM) X(GRAD) X(STATE) X(NORM) X(ACTIVATION) X(COUNTS) X(INDEX) X(OUTPUT)
#define MOE_EXPR_OPS(X) \
        X(CONST)  /* value */ \
        X(PLACE)  /* the rank's place in its group of communicator a */ \
        X(OTHER)  /* 1 at an index other than the rank's place in its group of communicator a, else 0 */ \
        X(SYM)    /* symbol a at the index under evaluation */ \
        X(SUM)    /* sum of symbol a over all its indices on the rank */ \
        X(ADD)    /* a + b */ \
        X(MUL)    /* a * b */ \
        X(MIN)    /* the smaller of a and b */ \
        X(MAX)    /* the larger of a and b */ \
        X(CEIL)   /* ceil((double)a / (double)b * factor), all in double */ \
        X(CEIL_F32) /* ceil((float)((double)a / (double)b) * (float)factor), the product in float */ \
        X(TRUNC)  /* a * factor in double, without its fraction; b stays 0 */
/* clang-format on */

#define X(name, text, bytes) MOE_##name,
enum moe_type { MOE_TYPES(X) MOE_TYPE_COUNT };
#undef X
#define X(name) MOE_COST_##name,
enum moe_cost { MOE_COSTS(X) MOE_COST_COUNT };
#undef X
#define X(name, text, cost) MOE_K_##name,
enum moe_kernel { MOE_KERNELS(X) MOE_K_COUNT };
#undef X
#define X(name, text, send_per_peer, recv_per_peer, reduces) MOE_##name,
enum moe_collective { MOE_COLLECTIVES(X) MOE_COLLECTIVE_COUNT };
#undef X
#define X(name, text) MOE_REDUCE_##name,
enum moe_reduction { MOE_REDUCTIONS(X) MOE_REDUCTION_COUNT };
#undef X
#define X(name, library, reverse, rides, home) MOE_BY_##name,
enum moe_transport { MOE_TRANSPORTS(X) MOE_TRANSPORT_COUNT };
#undef X
#define X(name) MOE_LIBRARY_##name,
enum moe_library { MOE_LIBRARIES(X) MOE_LIBRARY_COUNT };
#undef X
#define X(name, text) MOE_##name,
enum moe_op_kind { MOE_OP_KINDS(X) MOE_OP_KIND_COUNT };
enum moe_pass { MOE_PASSES(X) MOE_PASS_COUNT };
#undef X
#define X(name) MOE_BUF_##name,
enum moe_buffer_role { MOE_BUFFER_ROLES(X) MOE_BUF_ROLE_COUNT };
#undef X
#define X(name) MOE_EXPR_##name,
enum moe_expr_op { MOE_EXPR_OPS(X) MOE_EXPR_OP_COUNT };
#undef X

extern const char *const moe_type_text[], *const moe_kernel_text[], *const moe_collective_text[];
extern const char *const moe_reduction_text[], *const moe_op_kind_text[], *const moe_pass_text[];
extern const bool moe_send_per_peer[], moe_recv_per_peer[], moe_reduces[], moe_transport_rides[],
    moe_transport_home[];
extern const enum moe_transport moe_transport_reverse[];
extern const enum moe_library moe_transport_library[];
extern const int moe_type_bytes[];
extern const enum moe_cost moe_kernel_cost[];

/* A partition of the ranks into groups; "communicator c of rank r" is the group of c that holds r. Two
 * communicators over the same ranks are distinct. The id (place in schedule.comms) is the creation order. */
struct moe_comm {
    char name[MOE_NAME];
    int n_groups;
    int *group_of; /* [R] */
    int *index_of; /* [R] place of the rank in its group */
    int *first;    /* [n_groups + 1] into members */
    int *members;  /* [R] ranks, group by group, in order */
};

struct moe_expr {
    enum moe_expr_op op;
    int a, b; /* expression or symbol indices */
    int64_t value;
    double factor;
};

enum moe_scope { MOE_SCOPE_GLOBAL, MOE_SCOPE_RANK, MOE_SCOPE_BEFORE, MOE_SCOPE_PEER, MOE_SCOPE_EXPERT };

/* buffer < 0: known from the start. `expr` when set; else the tokens of the rank (RANK), of member i of its
 * group (PEER), of all members before it there (BEFORE) or of all ranks (GLOBAL). EXPERT without buffer has
 * `cols` values. Otherwise the buffer is seen as [rows, cols] and value i is the sum of row i (by_row) or
 * of column i. With a `slice` the columns are split over the members of that communicator: only the rank's
 * own count, from 0 on. */
struct moe_symbol {
    char name[MOE_NAME];
    enum moe_scope scope;
    int comm; /* BEFORE, and PEER: index i is member i of the rank's group here; else -1 */
    int buffer, rows, cols;
    bool by_row;
    int slice;      /* communicator, 0: none */
    int expr;       /* expression, or 0 */
    bool on_device; /* kernels read the counts where they are: the host need not know them */
};

/* Which ranks hold a slot: those whose role has its layer; of a buffer that is of no layer, these: stages
 * of a pipeline, or (STAGE) that whose first layer is `stage`. */
enum moe_where { MOE_WHERE_ALL, MOE_WHERE_FIRST, MOE_WHERE_LAST, MOE_WHERE_ENDS, MOE_WHERE_STAGE };

/* One slot, or one slot a layer (a reference adds its shift to the layer); per_micro: so many for each
 * micro-batch, one after the other. */
struct moe_buffer {
    char name[MOE_NAME];
    enum moe_buffer_role role;
    enum moe_type type;
    int slots;
    bool per_micro;
    enum moe_where where;
    int stage;
    int extent; /* expression: elements of a slot on a rank */
    int grad;   /* buffer that holds its gradient, or -1 */
};

/* A trained tensor, or (buffer < 0) a norm that `grad` holds. Its gradient must arrive at the update as the
 * sum over all members of the rank's group in `replicas` of every contribution of the backward pass, each
 * divided by what `divisor` is on the rank that contributes. */
struct moe_param {
    char name[MOE_NAME];
    int buffer, grad;
    bool per_layer;             /* one tensor a layer: one slot each */
    int replicas;               /* communicator whose group holds copies of the same tensor */
    int shard;                  /* communicator that splits the global tensor by place in the group, or -1 */
    int divisor;                /* expression: what the sum must be divided by */
    int clips;                  /* how often it must have been clipped */
    double init_mean, init_std; /* of the initial values */
    bool broadcast;             /* before the first step, of the first member of the group here: */
    int broadcast_comm, broadcast_line; /* line: as of moe_op */
};

/* What must hold before the step begins: on no rank is low above high (expressions, known from the start). */
struct moe_claim {
    int check_class; /* of the verdict */
    const char *of;  /* what it is claimed of */
    const char *why; /* in words */
    int low, high;
    bool exact; /* low is not below high either: what is found, and what is expected */
};

/* The parameters of an expert in a checkpoint: a rank saves them into, or asks for them in, `name` of `file`.
 */
struct moe_stored {
    int rank, expert; /* of all experts of its layers */
    int file, name;
};
enum moe_absent { MOE_ABSENT_STOPS, MOE_ABSENT_KEEPS_INITIAL, MOE_ABSENT_IS_ZERO }; /* on loading */
struct moe_checkpoint {
    int n_saved, n_loaded;
    struct moe_stored *saved, *loaded; /* [n_saved], [n_loaded] */
    enum moe_absent absent;
};

/* Which groups a rank creates, communicator by communicator: all in one order; all, its own first; its own,
 * in a call that all ranks must enter; its own, in one that its members must enter. */
enum moe_creation { MOE_CREATE_ALL, MOE_CREATE_OWN_FIRST, MOE_CREATE_OWN, MOE_CREATE_OWN_LOCALLY };

/* A slot, or some of its elements. */
struct moe_ref {
    int buffer;
    int shift;       /* slot = layer + shift, where the buffer has more than one slot */
    int micro;       /* the slots of another micro-batch, so many away */
    bool accumulate; /* writes: adds to what is there instead of replacing it */
    int begin, n; /* expressions: n elements from `begin` on; n 0: all. Of no element begin may be anything */
};

enum { MOE_REFS = 6, MOE_DIMS = 6 };
/* Mode of LIMIT. Who stays of the choices of an expert: the most probable; the first tokens; the first, with
 * all first choices before all second ones; or tokens drawn anew in every step and layer. */
enum {
    MOE_LIMIT_BY_PROB,
    MOE_LIMIT_BY_POSITION,
    MOE_LIMIT_BY_CHOICE,
    MOE_LIMIT_RANDOM,
    MOE_LIMIT_ORDER = 3, /* these bits */
    MOE_LIMIT_PAD = 4
};
/* Mode of COMBINE, WEIGH and their backward: the tree of the dot product of a row, one gradient of a
 * probability; the same for every number of rows, or chosen by it (moe_ref_combine_bwd). */
enum { MOE_DOT_FIXED, MOE_DOT_BY_ROWS };
enum { MOE_STREAM_COMPUTE, MOE_STREAM_COMM, MOE_STREAM_COUNT };

struct moe_op {
    char name[MOE_NAME];
    int id;   /* place in the block as lowered: stays when others are deleted */
    int line; /* of the scenario, where the step stands that asks for it; 0: none does */
    enum moe_op_kind kind;
    enum moe_kernel kernel;         /* KERNEL */
    enum moe_collective collective; /* COLLECTIVE */
    enum moe_reduction reduction;   /* ALLREDUCE: MAX of int64 alone */
    enum moe_transport transport;   /* COLLECTIVE: simulate alone reads it */
    int comm;                       /* COLLECTIVE */
    enum moe_type type;             /* element type of the data moved or computed */
    int stream;
    uint32_t waits; /* bit s: starts after all issued before it on stream s; HOST_SYNC: the host waits */
    int when;       /* COLLECTIVE: expression; a rank enters it only where this is not 0; 0 itself: always */
    int send, recv; /* COLLECTIVE: expressions, elements, as this rank believes them */
    int n_reads, n_writes;
    struct moe_ref reads[MOE_REFS], writes[MOE_REFS];
    int n_dims;
    int dims[MOE_DIMS]; /* KERNEL: expressions, in the order of kernel_shapes.c */
    bool trans_a, trans_b;
    int group;     /* GROUPED: symbol with the rows of each group; of no use to others */
    int bytes;     /* KERNEL of class MEMORY: expression, bytes read and written */
    int flops;     /* KERNEL of class MEMORY: expression, arithmetic beside the bytes; 0: it does not count */
    int mode;      /* LIMIT: order and padding; COMBINE, WEIGH: the dots of its backward */
    uint64_t seed; /* LIMIT at random */
    int low, high; /* KERNEL: expressions; where low is above high the framework stops, or worse */
    const char
        *needs;      /* why low must not be above high, in words; NULL: nothing is compared. GROUPED: of each
                          group, which is the index */
    int needs_class; /* of the verdict; 0: C8 */
    int divisor;     /* SCALE, AUX_LOSS: expression */
    int times;       /* SCALE: expression; 0: one */
    double factor;   /* SGD, ADAMW: learning rate; AUX_LOSS: coefficient; CLIP: largest norm */
    double decay;    /* ADAMW: weight decay */
    /* Differentiation: a forward operation says which of its reads need a gradient; a backward operation says
     * of which operation it is the backward and which of those reads it serves. */
    uint32_t needs_grad;
    int of_block, of_id; /* -1: not a backward operation */
    uint32_t serves;
};

struct moe_block {
    char name[MOE_NAME];
    enum moe_pass pass;
    bool per_layer; /* runs once a layer: the label names it */
    int stride;     /* of micro-batches in the layer of instances: the label names them; 0: there is one */
    int n_ops, cap;
    struct moe_op *ops; /* host order */
};

/* layer: of a micro-batch, as moe_layer_of_micro has it. The layer is 0 where the block is not part of one,
 * n_layers behind the last. */
struct moe_instance {
    int block, layer;
};

struct moe_role {
    int first_layer, end_layer; /* layers that its ranks hold: of a stage, or all */
    int n_micro;                /* micro-batches that they run: the first ones; 0: all of the step */
    int n_blocks, n_instances;
    struct moe_block *blocks;
    struct moe_instance *itinerary; /* one step, host order */
};

struct moe_schedule {
    int n_ranks, n_layers, n_experts, top_k, n_micro; /* n_micro: micro-batches of a step */
    int64_t *tokens;                                  /* [R] local tokens of a micro-batch */
    int *role_of;                                     /* [R] */
    int n_roles, n_comms, n_symbols, n_exprs, n_buffers, n_params;
    struct moe_role *roles;
    struct moe_comm *comms; /* comms[0] is the world */
    struct moe_symbol *symbols;
    struct moe_expr *exprs;
    struct moe_buffer *buffers;
    struct moe_param *params;
    int cap_exprs, cap_symbols, cap_buffers, cap_params, cap_comms; /* allocated */
    int n_claims, cap_claims;
    struct moe_claim *claims;
    struct moe_checkpoint checkpoint; /* check alone reads it */
    enum moe_creation creation;       /* check alone reads it */
    bool graph;    /* passes are captured in a CUDA graph: no host sync; check alone reads it */
    int sync_line; /* of the scenario, where the steps from gradients to updates are listed; 0: nowhere */
};

void moe_schedule_free(struct moe_schedule *s);

/* Gives `rank` a role of its own (a deep copy of its present one) and returns it, so that a test can change
 * what one rank issues. Cost: O(operations). */
struct moe_role *moe_schedule_split_role(struct moe_schedule *s, int rank);

/* Removes the operation with this id from a block; ids of the others stay. */
void moe_block_delete(struct moe_block *b, int id);

/* Result: MOE_OK, or MOE_EFAILED with what is malformed (an index or enum out of range, a slot outside its
 * buffer, a symbol that depends on itself, a collective that accumulates or whose buffers have another type):
 * the invariant that lowerings keep and that every reader relies on. Not a verdict about the schedule's
 * meaning. */
int moe_schedule_check(const struct moe_schedule *s);

/* Where the values of symbols come from: real counts (execute) or a routing (check, simulate).
 * value() returns MOE_UNKNOWN when the content of the buffer is not known to the host. */
#define MOE_UNKNOWN INT64_MIN
/* a + b and a * b; MOE_UNKNOWN when either is, or the result is above 63 bits. */
static inline int64_t moe_plus(int64_t a, int64_t b)
{
    int64_t out;
    return a == MOE_UNKNOWN || b == MOE_UNKNOWN || __builtin_add_overflow(a, b, &out) ? MOE_UNKNOWN : out;
}
static inline int64_t moe_times(int64_t a, int64_t b)
{
    int64_t out;
    return a == MOE_UNKNOWN || b == MOE_UNKNOWN || __builtin_mul_overflow(a, b, &out) ? MOE_UNKNOWN : out;
}
struct moe_symbol_row { /* all values of a symbol on a rank */
    uint64_t id;        /* changes with them; no two rows have the same */
    int n;
    int64_t sum, *value; /* value [n]; MOE_UNKNOWN: above 63 bits */
};
struct moe_env {
    int64_t (*value)(void *ctx, int symbol, int rank, int layer, int index);
    void *ctx;
    /* The same for all indices at once, valid until the next call; NULL where value() must be asked for each
     * of them. May be left out. */
    const struct moe_symbol_row *(*row)(void *ctx, int symbol, int rank, int layer);
};

/* Value of expression `expr` on `rank` in an instance of `layer`, at `index` (peer or expert). MOE_UNKNOWN is
 * contagious, and the value of a symbol at an index that it does not have (a peer of a larger group), and
 * that of a sum or product above 63 bits. Cost: O(size of the expression + group size for SUM). */
int64_t moe_eval(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer, int index);
/* Is the value MOE_UNKNOWN only because it, or something that it is made of, is above 63 bits? */
bool moe_eval_exceeds(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer,
                      int index);
/* out[i] = what moe_eval says at index i, for all i < n. Cost: O(n * size of the expression), of which what
 * does not depend on the index is evaluated once. */
void moe_eval_all(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer, int n,
                  int64_t *out);
/* Is an expression a symbol times what has one value whatever the index (symbol < 0: that value alone)?
 * Result: false when it is neither, or a factor is unknown, or of a symbol is 0. */
struct moe_product {
    int symbol;
    int64_t factor;
};
bool moe_eval_product(const struct moe_schedule *s, struct moe_env env, int expr, int rank, int layer,
                      struct moe_product *out);

/* Number of values a symbol has on a rank (1, group size, or experts). */
int moe_symbol_count(const struct moe_schedule *s, int symbol, int rank);
/* Value i of a symbol on a rank, from the content of its buffer. content [rows * cols]. */
int64_t moe_symbol_reduce(const struct moe_schedule *s, int symbol, int rank, const int64_t *content,
                          int index);
/* Value i of a symbol that is known from the start (buffer < 0), or follows by its expression. */
int64_t moe_symbol_initial(const struct moe_schedule *s, struct moe_env env, int symbol, int rank, int layer,
                           int index);

/* Stages of a pipeline: sets of layers that ranks hold. */
int moe_n_stages(const struct moe_schedule *s);
/* How many layers of instances a micro-batch has: those of the model and what is behind the last. */
static inline int moe_layers_each(const struct moe_schedule *s)
{
    return s->n_layers + 1;
}
/* The layer of an instance, from that of the model and the micro-batch; and back. */
static inline int moe_layer_of_micro(const struct moe_schedule *s, int micro, int layer)
{
    return micro * moe_layers_each(s) + layer;
}
static inline int moe_micro_of(const struct moe_schedule *s, int layer)
{
    return s->n_micro > 1 ? layer / moe_layers_each(s) : 0;
}
/* Slots of a micro-batch, or all. */
static inline int moe_slots_each(const struct moe_schedule *s, int buffer)
{
    const struct moe_buffer *b = &s->buffers[buffer];
    return b->per_micro ? b->slots / s->n_micro : b->slots;
}
static inline int moe_slot(const struct moe_schedule *s, struct moe_ref ref, int layer)
{
    int each = moe_slots_each(s, ref.buffer), micro = moe_micro_of(s, layer);
    int slot = each == 1 ? 0 : layer - moe_layer_of_micro(s, micro, 0) + ref.shift;
    return s->buffers[ref.buffer].per_micro ? (micro + ref.micro) * each + slot : slot;
}
/* Do two references of one instance mean the same slot? */
static inline bool moe_same_slot(const struct moe_schedule *s, struct moe_ref a, struct moe_ref b)
{
    return a.buffer == b.buffer && moe_slot(s, a, 0) == moe_slot(s, b, 0);
}
/* The layer of an instance as a routing counts them: those of all micro-batches, one after the other. */
static inline int moe_routed_layer(const struct moe_schedule *s, int layer)
{
    return layer - moe_micro_of(s, layer);
}
/* Does the rank hold this slot of a parameter, its gradient, a state, an input or an output? */
static inline bool moe_holds(const struct moe_schedule *s, int buffer, int slot, int rank)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    int each = moe_slots_each(s, buffer), layer = slot % each;
    bool first = role->first_layer == 0, last = role->end_layer == s->n_layers;
    if (s->buffers[buffer].per_micro && role->n_micro && slot / each >= role->n_micro) return false;
    if (each > 1) return layer >= role->first_layer && layer < role->end_layer;
    switch (s->buffers[buffer].where) {
    case MOE_WHERE_FIRST: return first;
    case MOE_WHERE_LAST: return last;
    case MOE_WHERE_ENDS: return first || last;
    case MOE_WHERE_STAGE: return role->first_layer == s->buffers[buffer].stage;
    default: return true;
    }
}
/* Is what the rank holds of a tensor at both ends of a pipeline the copy of the last stage? */
static inline bool moe_is_copy(const struct moe_schedule *s, int buffer, int rank)
{
    return s->buffers[buffer].where == MOE_WHERE_ENDS && s->roles[s->role_of[rank]].first_layer > 0;
}
static inline int moe_group_size(const struct moe_comm *c, int group)
{
    return c->first[group + 1] - c->first[group];
}

/* "layer 1 forward dispatch": the operation's key in words, without step and rank. */
void moe_op_label(const struct moe_block *b, const struct moe_op *op, int layer, char out[2 * MOE_NAME]);

#endif
