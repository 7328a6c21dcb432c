/* builder - how a lowering writes a schedule: sizes, buffers, operations; backward passes follow from
 * forward.
 *
 * One builder writes one role after the other. Blocks are written in the order in which they first run. Only
 * lowerings and tests include this header. */
#ifndef MOE_BUILDER_H
#define MOE_BUILDER_H

#include "sim/schedule.h"

struct moe_track; /* what the builder remembers of a buffer */
struct moe_builder {
    struct moe_schedule *s;
    int role, block; /* being written */
    int line;        /* of the scenario: operations are emitted for the step there; 0: for none */
    int cap_track;
    struct moe_track *track; /* [cap_track] by buffer */
};

/* An empty schedule with comms[0] = "world", one role that all ranks share and one micro-batch; another
 * number of them is set before buffers are made. tokens [n_ranks]. */
void moe_builder_open(struct moe_builder *b, int n_ranks, const int64_t *tokens);
/* Hands the schedule over. It satisfies moe_schedule_check (asserted). */
struct moe_schedule *moe_builder_close(struct moe_builder *b);

/* Expressions. MOE_UNSET (0) is "none": operations leave members at 0 that do not concern them. */
enum { MOE_UNSET = 0 };
int moe_const(struct moe_builder *b, int64_t value);
int moe_sym(struct moe_builder *b, int symbol);
int moe_sum(struct moe_builder *b, int symbol);
int moe_add(struct moe_builder *b, int x, int y);
int moe_mul(struct moe_builder *b, int x, int y);
int moe_min(struct moe_builder *b, int x, int y);
int moe_other(struct moe_builder *b, int comm);
int moe_max(struct moe_builder *b, int x, int y);
int moe_place(struct moe_builder *b, int comm);
int moe_ceil(struct moe_builder *b, int x, int y, double factor); /* ceil(x / y * factor), 0 when y is 0 */
int moe_ceil_f32(struct moe_builder *b, int x, int y, double factor); /* the same, the product in float */
int moe_trunc(struct moe_builder *b, int x, double factor);           /* x * factor without its fraction */

/* A symbol over `buffer` (-1: known from the start); scope, comm, rows and cols as in `like`. */
int moe_new_symbol(struct moe_builder *b, const char *name, int buffer, bool by_row, struct moe_symbol like);
int moe_new_buffer(struct moe_builder *b, const char *name, enum moe_buffer_role role, enum moe_type type,
                   int slots, int extent);
/* A parameter: its buffer and the buffer of its gradient; the other members as in `like`.
 * Returns the buffer. */
int moe_new_param(struct moe_builder *b, const char *name, enum moe_type type, int slots, int extent,
                  struct moe_param like);
/* A sum of squares, float64 [1], that must cover the ranks of the group in `replicas`. Returns the buffer. */
int moe_new_norm(struct moe_builder *b, const char *name, int replicas);
/* Adds what must hold before the step. */
void moe_claim(struct moe_builder *b, struct moe_claim claim);
/* Ranks with the same key form a group, in ascending order. key [R], values 0 to n_groups - 1. */
int moe_new_comm(struct moe_builder *b, const char *name, int n_groups, const int *key);

/* Goes on with a role of its own, which no rank has yet. Buffers of the same name are those of the roles
 * before. */
void moe_new_role(struct moe_builder *b);

/* Starts a block; operations go there until the next call. */
int moe_new_block(struct moe_builder *b, const char *name, enum moe_pass pass, bool per_layer);
/* Appends block x layer to the itinerary. */
void moe_run_block(struct moe_builder *b, int block, int layer);

static inline struct moe_ref moe_ref(int buffer)
{
    return (struct moe_ref){.buffer = buffer};
}
static inline struct moe_ref moe_next(struct moe_ref r) /* the next layer's slot */
{
    r.shift++;
    return r;
}

/* Lists of an operation, with their number. */
#define MOE_LIST(type, member, count, ...)                                                                   \
    .member = {__VA_ARGS__}, .count = (int)(sizeof((type[]){__VA_ARGS__}) / sizeof(type))
#define MOE_READS(...) MOE_LIST(struct moe_ref, reads, n_reads, __VA_ARGS__)
#define MOE_WRITES(...) MOE_LIST(struct moe_ref, writes, n_writes, __VA_ARGS__)
#define MOE_SIZES(...) MOE_LIST(int, dims, n_dims, __VA_ARGS__)

/* Appends an operation. Sets id; derives `waits` from who wrote and read its buffers on other streams;
 * `bytes` of MEMORY kernels, when unset, is all that its buffers hold. Backward operations are those with
 * `serves` set. */
void moe_emit(struct moe_builder *b, struct moe_op op);

/* Writes the backward of forward block `forward` into the present block: for each operation that needs
 * gradients, latest first, the operations of its rule (autograd.c). A gradient that this pass has written
 * before is accumulated. */
void moe_emit_backward(struct moe_builder *b, int forward);

/* The gradient of what `r` refers to: made on first use, accumulating when written before in this pass. */
struct moe_ref moe_grad_out(struct moe_builder *b, struct moe_ref r); /* about to be written */
struct moe_ref moe_grad_in(struct moe_builder *b, struct moe_ref r);  /* to be read */

#endif
