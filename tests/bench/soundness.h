/* soundness - what the parts of the bench share: scenarios, and real runs that may end in any way. */
#ifndef MOE_BENCH_SOUNDNESS_H
#define MOE_BENCH_SOUNDNESS_H

#include "runtime/execute.h"
#include "sim/scenario.h"

/* ---- soundness_scenario.c ---- */

struct draws {
    uint64_t seed, n; /* n: drawn so far */
};
int draw(struct draws *d, int n);                       /* 0 .. n - 1 */
int draw_between(struct draws *d, int least, int most); /* both included */

enum { TEXT = 2048 };
/* A valid scenario of at most most_ranks ranks, as YAML, and what one rank alone computes the same gradients
 * with: all tokens of a stage, capacity for each part that was a rank's. All of double precision. A function
 * of the draws. Every key of a scenario that changes what is computed is drawn; a coin decides between the
 * default gradient_sync and another order that is right. */
void scenario_draw(struct draws *d, int most_ranks, char out[TEXT], char alone[TEXT]);

/* ---- soundness_run.c ---- */

/* How a step ended on one rank, and the worst of all: in this order. */
/* clang-format off */
#define ENDS(X) \
    X(EQUAL,     "equal")                     /* bit for bit */ \
    X(ROUNDED,   "equal but for rounding")    /* within the bounds of test_parity */ \
    X(DIFFERS,   "other results") \
    X(NO_ANSWER, "no answer in time") \
    X(LIBRARY,   "error of the MPI library") \
    X(REFUSED,   "refused by the executor") \
    X(CRASHED,   "crash")                     /* a signal: memory of no buffer, an abort, no end */
/* clang-format on */
#define X(name, text) END_##name,
enum end { ENDS(X) END_COUNT };
#undef X
extern const char *const end_text[];

/* Steps of a schedule on a communicator of its own. Its buffers lie in memory that it owns, each with its
 * end at memory that nobody may touch, so that a kernel that reads or writes outside of them ends in a signal
 * and harms nothing. What a collective that never ended may still write stays mapped until
 * the program ends. */
struct run {
    struct moe_communicator *comm;
    struct moe_device *device;
    struct moe_execution *x;
    struct moe_execute_options options; /* of x, which borrows them */
    const struct moe_schedule *s;       /* borrowed */
    char *memory;
    size_t used;
    double loss;
    enum end end;    /* EQUAL: it ended well; what that means tells a comparison */
    char error[512]; /* of the executor */
};

/* Once, before any run. shared: a file of a page or more, that all ranks of the job have open. */
void run_open_machine(int shared);

/* Collective over ranks 0 .. s->n_ranks - 1 of the world, or on this rank alone. id: of the run, from 1 on
 * and never used before. A collective ends after timeout_s, or soon after another rank failed. NULL where
 * this rank has no part. */
struct how {
    int n_steps;
    double timeout_s;
    bool alone, agree; /* agree: members ask each other first */
};
struct run *run_steps(const struct moe_schedule *s, int id, struct how how);
/* failed: on any of its ranks. NULL is fine. */
void run_close(struct run *r, bool failed);

/* What persists, or is asked for, in both: gradients, parameters, optimizer's state, norms, losses.
 * Result: EQUAL, ROUNDED or DIFFERS; `a`'s own end when that was no good one. */
enum end run_compare(const struct run *a, const struct run *b);
/* The same for gradients, norms and parameters of a rank of many and the one that has all tokens: the largest
 * difference relative to the largest element. *params: of updated parameters. */
double run_bound(const struct moe_schedule *s, enum moe_buffer_role role); /* above it, they differ */
double run_difference(const struct run *many, const struct run *one, int rank, double *params);

#endif
