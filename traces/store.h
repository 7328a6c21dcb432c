/* store - the trace store: what a capture recorded and what simulations predicted, in SQLite
 * (traces/SCHEMA.md).
 *
 * One file per rank while capturing (SQLite over shared file systems is unsafe for several writers), merged
 * afterwards. One transaction a step: a killed capture loses at most the steps since its last commit. Only
 * store*.c include sqlite3.h. */
#ifndef MOE_STORE_H
#define MOE_STORE_H

#include "sim/base.h"

struct moe_store;

/* CREATE replaces a file. BUILD too, and keeps no log: for a file that is thrown away when it fails. */
enum moe_store_mode { MOE_STORE_READ, MOE_STORE_WRITE, MOE_STORE_CREATE, MOE_STORE_BUILD };

/* Errors: MOE_EINPUT when the file is absent, no moesim store (application_id), or of a newer version (says
 * which); MOE_EFAILED for what SQLite reports. */
int moe_store_open(const char *path, enum moe_store_mode mode, struct moe_store **out);
void moe_store_close(struct moe_store *s);
bool moe_store_probe(const char *path);             /* is this file a moesim store? */
char *moe_store_part(const char *prefix, int rank); /* "prefix.rankN", the file of a rank; free() */
/* Gives the closed store `from` the name `to`, which it replaces, on disk. */
int moe_store_rename(const char *from, const char *to);
void moe_store_remove(const char *path); /* with its logs */

/* The run: key and value, e.g. "scenario" (YAML text), "seed", "data_bytes", "version"; the same on every
 * rank. moe_store_info reads "layers", "experts", "top_k", "steps" (asked for) and "ranks" (the merge writes
 * it, too). Replaces. */
int moe_store_put(struct moe_store *s, const char *key, const char *value);
int moe_store_get(struct moe_store *s, const char *key, char **value); /* *value NULL when absent; free() */

int moe_store_begin(struct moe_store *s); /* opens the transaction of a step */
int moe_store_commit(struct moe_store *s);

struct moe_store_rank {
    int rank;
    int64_t tokens;
    int64_t pid;
};
int moe_store_add_rank(struct moe_store *s, const struct moe_store_rank *r);

/* Expert ids of one (step, layer, rank), before dropping. ids [T, K]. Kept as little-endian uint16. */
int moe_store_add_routing(struct moe_store *s, int64_t step, int layer, int rank, int64_t n_tokens, int top_k,
                          const int32_t *ids);
/* *ids is [T, K], to be freed; NULL when absent. */
int moe_store_routing(struct moe_store *s, int64_t step, int layer, int rank, int64_t *n_tokens, int *top_k,
                      int32_t **ids);
/* Calls fn for every routing of the complete steps, in order of (rank, step, layer); stops at the first
 * negative result. fn may call moe_store_routing. Errors: MOE_EINPUT when a layer or rank is not 0 to
 * INT32_MAX; moe_store_each_op likewise. */
int moe_store_each_routing(struct moe_store *s, int64_t step_from, int64_t step_to,
                           int (*fn)(void *ctx, int64_t step, int layer, int rank), void *ctx);
/* Adds, for routing that no capture of ours recorded, its ranks (process id 0) and its steps (0 ns, loss
 * NaN). */
int moe_store_add_routed(struct moe_store *s);

/* Rows of (step, layer, rank) that its capacity rule dropped. */
int moe_store_add_dropped(struct moe_store *s, int64_t step, int layer, int rank, int64_t n_rows);

struct moe_store_op {
    int64_t step;
    int rank, layer, block, op;         /* key: block and op are schedule indices */
    char label[2 * MOE_NAME];           /* "layer 1 forward dispatch" */
    char kind[16];                      /* kernel, collective, host_sync */
    int64_t entry_ns, start_ns, end_ns; /* monotonic clock: ranks of one host share it */
    int64_t bytes;                      /* collective: sent by this rank, self part included */
};
int moe_store_add_op(struct moe_store *s, const struct moe_store_op *op);
/* Loss of a step on a rank: marks the step as done by the rank. loss in nats per token; NaN: not a
 * number, or a rank without tokens. */
int moe_store_add_step(struct moe_store *s, int64_t step, int rank, double loss, int64_t wall_ns);

/* Calls fn for every operation in order of (step, rank, rowid); stops at the first negative result. */
int moe_store_each_op(struct moe_store *s, int64_t step_from, int64_t step_to,
                      int (*fn)(void *ctx, const struct moe_store_op *op), void *ctx);

/* clang-format off */
/* INITIAL   a parameter before the first step of the run
 * GRADIENT  complete: after sums and divisions, before clipping
 * CLIPPED   as the update read it; where the step clips
 * PARAM     after the update */
#define MOE_TENSOR_ROLES(X) \
        X(INITIAL, "initial") X(GRADIENT, "gradient") X(CLIPPED, "clipped") \
        X(PARAM, "parameter")
/* PRESENT        it has elements that are not zero
 * ZERO           written in this step, and exactly zero
 * NONE           no operation computed it in this step, also if some scaled or summed it; without content
 * UNINITIALISED  it holds NaN, and buffers that nobody wrote had been filled with NaN
 * BUCKETED       a gradient that is summed in a bucket, part by part, and not kept; without content */
#define MOE_PRESENCES(X) \
        X(PRESENT, "present") X(ZERO, "zero") X(NONE, "none") X(UNINITIALISED, "uninitialised") \
        X(BUCKETED, "bucketed")
/* clang-format on */
#define X(name, text) MOE_TENSOR_##name,
enum moe_tensor_role { MOE_TENSOR_ROLES(X) MOE_TENSOR_ROLE_COUNT };
#undef X
#define X(name, text) MOE_IS_##name,
enum moe_presence { MOE_PRESENCES(X) MOE_PRESENCE_COUNT };
#undef X
extern const char *const moe_tensor_role_text[], *const moe_presence_text[];

/* Fingerprint of a parameter, or of one expert of it, on a rank. The name, layer and expert say which tensor
 * of the model it is, on any layout: rows that have them in common are copies. */
struct moe_store_tensor {
    int64_t step;
    int rank;
    int layer, expert; /* of the model, from 0; -1: of no layer, whole */
    int place;         /* in a role, rows go by this: gradients as the backward pass completes them */
    enum moe_tensor_role role;
    enum moe_presence presence;
    char name[MOE_NAME];
    int element_bytes;       /* 2: bfloat16, 4: float32, 8: float64 */
    int64_t n, n_nonfinite;  /* elements; of them NaN or infinite */
    double sum, sum_squares; /* of the finite ones */
    uint64_t hash;           /* of the bits of all, in order */
    const void *content;     /* [n] elements as they are in memory, or NULL: not kept */
};
int moe_store_add_tensor(struct moe_store *s, const struct moe_store_tensor *t);
/* Calls fn for every tensor in order of (step, rank, place), with content NULL; stops at the first negative
 * result. Errors: MOE_EINPUT for a row that cannot be. */
int moe_store_each_tensor(struct moe_store *s, int64_t step_from, int64_t step_to,
                          int (*fn)(void *ctx, const struct moe_store_tensor *t), void *ctx);
/* The content of this row: *out is [n] of element_bytes, to be freed; NULL when it was not kept. */
int moe_store_tensor_content(struct moe_store *s, const struct moe_store_tensor *t, void **out);

/* What the store holds. A step is complete when every rank of the run added it; rows of other steps are kept
 * and counted in n_routing and n_ops. Without complete steps losses and times are 0. */
struct moe_store_info {
    int n_ranks, n_layers, n_experts, top_k;
    int64_t steps_complete, first_step, last_step; /* of the complete ones; first > last: none */
    int64_t n_routing, n_ops, n_results;
    int64_t n_dropped;            /* rows, in all steps, layers and ranks */
    int64_t steps_asked;          /* "steps" of the run; 0: not a capture */
    bool complete;                /* steps_complete == steps_asked > 0 */
    double first_loss, last_loss; /* nats per token, of all ranks, in the first and last complete step */
    double median_step_us;        /* over complete steps, of the slowest rank */
};
int moe_store_info(struct moe_store *s, struct moe_store_info *out);

/* One simulation's outcome. */
struct moe_store_result {
    char scenario[2 * MOE_NAME], topology[MOE_NAME], dispatcher[MOE_NAME];
    double step_us, compute_us, exposed_us, waiting_us, host_us;
    int64_t intra_bytes, inter_bytes;
    int64_t expert_parallel;
    double capacity;      /* factor, of one rule in all results; 0: no limit */
    double dropped_share; /* of the rows that routing chose */
    char rank_order[MOE_NAME];
};
int moe_store_add_result(struct moe_store *s, const struct moe_store_result *r);
int moe_store_clear_results(struct moe_store *s);
int moe_store_each_result(struct moe_store *s, int (*fn)(void *ctx, const struct moe_store_result *r),
                          void *ctx);

/* Merges the files of the ranks (prefix.rank0, prefix.rank1, ...) into a new store at `path`, which appears
 * whole or not at all (written beside and renamed). The rank files are deleted only after that.
 *
 * Result: every row that a rank committed, also after the ranks were killed.
 *
 * Errors: MOE_EINPUT naming the rank file that is missing, broken or of another run; MOE_EUSAGE when `path`
 * is one of them; MOE_EFAILED when a rank still has its file open after 5 seconds, or the merged file cannot
 * be written. Then nothing changed. */
int moe_store_merge(const char *prefix, int n_ranks, const char *path);

#endif
