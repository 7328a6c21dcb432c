/* check_internal - what the files of check share: check.c runs the ranks, collectives.c compares what
 * they meet with, gradients.c follows gradients, norms and updates. */
#ifndef MOE_CHECK_INTERNAL_H
#define MOE_CHECK_INTERNAL_H

#include "sim/check/check.h"
#include "sim/check/gradient.h"
#include "sim/kernel_shapes.h"
#include "sim/values.h"

struct moe_parts {         /* what a rank sends or receives in a collective, as its host knows it */
    int n;                 /* one for each peer, or 1 */
    int64_t total, factor; /* part i: factor * part[i] */
    const int64_t *part;   /* NULL: all are `factor` */
    const struct moe_symbol_row *row; /* whose values part are, when it had this id; NULL: part is `own` */
    uint64_t id;
    int cap;
    int64_t *own;
};

struct moe_agreed { /* rows of a member, of which all pairs were seen to agree with those of the others */
    uint64_t send, recv;
};

struct moe_taken { /* of a tensor into a norm, by a rank that updates a part of it */
    int64_t begin, n;
    int norm;                /* buffer */
    int times;               /* 0: nothing */
    const struct moe_op *by; /* what measures it, right or wrong; NULL: nothing does */
    bool part;               /* it updates a part */
    bool reported;           /* the gradient of the part is wrong */
};

struct moe_fits { /* a norm to a parameter, on a rank */
    int norm;     /* 1 + buffer; 0: nothing asked yet */
    bool fits;
};

struct moe_number { /* an expression without symbols: one value on a rank, whatever it runs */
    bool is_fixed;
    int rank; /* 1 + that which asked last */
    int64_t value;
};

struct moe_place { /* where a rank stands */
    int instance, op;
    bool waiting; /* at a collective, which moves these: */
    struct moe_parts send, recv;
};

struct moe_checker {
    const struct moe_schedule *s;
    struct moe_values *values;
    struct moe_gradients *gradients;
    struct moe_env device, host;
    struct moe_verdicts *out;
    const struct moe_check_watch *watch; /* NULL: nobody */
    struct moe_place *place;             /* [R] */
    struct moe_number *numbers;          /* [n_exprs] */
    int *first_slot;                     /* [n_buffers] */
    size_t n_slots;
    /* By slot, then by rank: ranks run the same operation one after the other. */
    unsigned char *written; /* [n_slots, R] */
    /* [n_slots, R] of a parameter: how often it was updated; of a gradient: how often a norm took it when it
     * was right. Stops at 255. */
    unsigned char *times;
    struct moe_taken *taken;                    /* [n_slots, R] of a gradient; NULL: no part of any yet */
    bool stop;                                  /* a collective cannot complete */
    bool refused;                               /* a rank stopped at what its framework refuses */
    const struct moe_op *clips;                 /* that was seen first: all have one norm */
    const struct moe_op **updates;              /* [n_params] that was seen first of any layer and rank */
    const struct moe_op *first_update;          /* of any parameter */
    int clips_on, *updates_on, first_update_on; /* their ranks; [n_params] */
    struct moe_fits *fits;                      /* [n_params, R] of the norm that was asked for last */
    struct moe_kernel_shape *shapes;            /* [MOE_K_COUNT] */
    bool *roomy;                                /* [n_buffers] filled by what moves data */
    struct moe_agreed *agreed;                  /* [n_comms, R] */
    bool *covered;                              /* [n_roles] nothing lacks its backward */
    int *first_block, *first_op;                /* [n_roles] into first_op; [all blocks] into proved */
    unsigned char *proved;                      /* [all operations] */
};

struct moe_here { /* the operation a rank stands at */
    const struct moe_block *block;
    const struct moe_op *op; /* NULL: the rank is done */
    int block_id, layer;
};

/* The place of a slot of a rank in `written`, `times` and `taken`. */
static inline size_t moe_check_place(const struct moe_checker *c, int rank, int buffer, int slot)
{
    return (size_t)(c->first_slot[buffer] + slot) * (size_t)c->s->n_ranks + (size_t)rank;
}

/* The number of a slot, below n_slots. */
static inline int moe_check_slot(const struct moe_checker *c, struct moe_ref ref, int layer)
{
    return c->first_slot[ref.buffer] + moe_slot(c->s, ref, layer);
}

/* moe_eval at index 0. A rank asks for what parts of a bucket are made of again and again. */
int64_t moe_check_eval(const struct moe_checker *c, struct moe_env env, int expr, int rank, int layer);

/* Puts a number into an ascending list, once. */
void moe_check_insert(int number, int *n, int **list);

/* One number of two: other pairs have other numbers, but by chance. */
static inline uint64_t moe_check_mix(uint64_t a, uint64_t b)
{
    return moe_hash64(a ^ moe_hash64(b + 0x9e3779b97f4a7c15u));
}

struct moe_label {           /* of what a verdict is about */
    char text[2 * MOE_NAME]; /* "layer 1 forward dispatch" */
    char key[2 * MOE_NAME];  /* the same in every layer and micro-batch */
    int layer;               /* -1: of none */
    int line;                /* as of moe_verdict */
    const char *of, *param;  /* the same; NULL: of no parameter */
};
struct moe_label moe_check_label(const struct moe_here *h);
struct moe_label moe_check_named(const char *name, int layer); /* of no operation */
/* The same of a parameter: what is said of several in the same words is one verdict. The text goes on behind
 * `of` and the name. */
struct moe_label moe_check_about(struct moe_label at, const char *of, const struct moe_param *p, int line);
/* Completes the texts, when all is said. */
void moe_check_name_params(struct moe_verdicts *v);

/* Adds a verdict, or rank and layer to the one that says the same. What the text says behind ", one of rank"
 * or ", so on rank" is an example, and may be another on each. */
struct moe_verdict *moe_check_verdict(struct moe_checker *c, int check_class, int rank, struct moe_label at,
                                      const char *format, ...) __attribute__((format(printf, 5, 6)));

/* The same, of what this routing does not show. */
struct moe_verdict *moe_check_possible(struct moe_checker *c, int check_class, int rank, struct moe_label at,
                                       const char *format, ...) __attribute__((format(printf, 5, 6)));

/* All members of a group stand at a collective of this communicator: h [group size]. Compares what they issue
 * and moves the integers and the gradients; c->stop when it cannot complete. */
void moe_check_collective(struct moe_checker *c, const struct moe_here *h, int comm, int group);
/* Evaluates what a rank that comes to a collective sends and receives, into its place. Result: false when its
 * host does not know it. */
bool moe_check_enter(struct moe_checker *c, int rank, const struct moe_here *h);
/* Where it does not: is that because a size, or all of them together, are above 63 bits? */
bool moe_check_exceeds(struct moe_checker *c, int rank, const struct moe_here *h);

/* A kernel runs on a rank; a collective completes on ranks [n], where they stand at h [n]. */
void moe_check_kernel(struct moe_checker *c, int rank, const struct moe_here *h);
void moe_check_sum(struct moe_checker *c, const struct moe_here *h, const int *ranks, int n);
/* Groups of `rank` in two communicators: the same members? */
bool moe_check_same_group(const struct moe_checker *c, int rank, int a, int b);
bool moe_check_is_summed(const struct moe_checker *c, struct moe_ref ref); /* gradients and norms */
/* The elements that a reference names: from `begin` on, *n of them. Result: false where they are not in its
 * slot, with a verdict of this class. */
bool moe_check_range(struct moe_checker *c, int check_class, int rank, const struct moe_here *h,
                     struct moe_ref ref);
/* What is wrong with the gradient of a parameter, or (buffer < 0) a norm, where `h` uses it; nothing when
 * nothing is. */
void moe_check_gradient(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p,
                        const struct moe_gradient_fault *f);
/* The last kernel of its kind that a rank runs which reads a buffer and writes one (-1: any), NULL: none.
 * Cost: O(operations of the role). */
const struct moe_op *moe_check_last(const struct moe_checker *c, int rank, enum moe_kernel kernel, int reads,
                                    int writes);
/* The line of its step in the scenario; that of the list of steps where there is none. */
int moe_check_line(const struct moe_checker *c, const struct moe_op *op);
/* What norms took of tensors that several ranks update in parts covers each once. */
void moe_check_coverage(struct moe_checker *c);

/* A kernel of a rank against its row of kernel_shapes.c, before it runs. Result: false with a verdict, and
 * then nothing follows from what it writes. */
bool moe_check_shapes(struct moe_checker *c, int rank, const struct moe_here *h);
/* Whatever a kernel computes, nothing comes of it on a rank: it writes no element, or adds what was computed
 * of none. So where a rank has no tokens, or owns nothing of a bucket. */
bool moe_check_idle(const struct moe_checker *c, int rank, const struct moe_here *h);
/* Does a kernel not look at what it reads there? Only some orders of dropping ask the probabilities. */
bool moe_check_ignores(const struct moe_op *op, int read);
/* Elements that a reference names: of its part, or of its buffer. MOE_UNKNOWN: nobody knows. */
int64_t moe_check_room(const struct moe_checker *c, int rank, struct moe_ref ref, int layer);
/* Is a matrix of so many rows and columns its own transpose: has it one of either, or none? */
bool moe_check_is_vector(const struct moe_checker *c, int rank, int layer, int rows, int columns);
/* Are both known, and the first not below the second? */
bool moe_check_at_least(const struct moe_checker *c, int rank, int layer, int expr, int least);
void moe_check_shapes_open(struct moe_checker *c);
void moe_check_shapes_close(struct moe_checker *c);
/* Equal for expressions that have one value whatever the symbols hold; shift: of the layer, where symbols
 * count. */
uint64_t moe_check_sign(const struct moe_schedule *s, int expr, int shift);
/* The streams of a role: what touches one buffer on two of them is in order; contributions are not lost. */
void moe_check_streams(struct moe_checker *c, int role);
void moe_check_runs(struct moe_checker *c, int role);
/* Before the step: what is claimed of it, and that a captured graph has no host sync; that a broadcast gives
 * no rank the experts of another; that all ranks create one list of groups; that every expert is stored once
 * and found again. */
void moe_check_claims(struct moe_checker *c);
void moe_check_start(struct moe_checker *c);
void moe_check_creation(struct moe_checker *c);
void moe_check_checkpoint(struct moe_checker *c);
/* Collectives of a role whose sizes nothing makes agree. */
void moe_check_agreement(struct moe_checker *c, int role);
/* Each backward operation of a role undoes the forward operation that it names. */
void moe_check_backward(struct moe_checker *c, int role);
/* Ranks compute the same function of their data. */
void moe_check_alike(struct moe_checker *c);

/* Every operation of a rank has its backward, and every parameter was updated and measured. */
void moe_check_complete(struct moe_checker *c, int rank);

#endif
