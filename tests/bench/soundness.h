/* soundness - what the parts of the bench share: scenarios, and real runs that may end in any way. */
#ifndef MOE_BENCH_SOUNDNESS_H
#define MOE_BENCH_SOUNDNESS_H

#include "runtime/execute.h"
#include "sim/check/check.h"
#include "sim/scenario.h"
#include "tests/mutation.h"

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
 * default gradient_sync and another order that is right. telling: nothing of it is multiplied by what is
 * always 0 or 1: clipping clips, no token has every expert, so that the router has a gradient, no token
 * attends to itself alone, and ranks that have tokens have some more. */
void scenario_draw(struct draws *d, int most_ranks, bool telling, char out[TEXT], char alone[TEXT]);

/* ---- soundness_run.c ---- */

/* How a step ended on one rank, and the worst of all: in this order. */
/* clang-format off */
#define ENDS(X) \
    X(EQUAL,     "equal")                     /* bit for bit */ \
    X(ROUNDED,   "equal but for rounding")    /* within the bounds of test_parity */ \
    X(DIFFERS,   "other results") \
    X(RACED,     "others by stream order")    /* or two touch an element in no order */ \
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
    bool distinct;     /* no two tokens of a micro-batch are the same */
};
struct run *run_steps(const struct moe_schedule *s, int id, struct how how);
/* failed: on any of its ranks. NULL is fine. */
void run_close(struct run *r, bool failed);

/* What persists, or is asked for, in both: gradients, parameters, optimizer's state, losses.
 * before: the parameters that both began with. Result: EQUAL, ROUNDED or DIFFERS; `a`'s own end when that was
 * no good one. */
enum end run_compare(const struct run *a, const struct run *b, const struct run *before);
/* The same for gradients, norms and parameters of a rank of many and the one that has all tokens: the largest
 * difference relative to the largest element. *params: of updated parameters. */
double run_bound(const struct moe_schedule *s, enum moe_buffer_role role); /* above it, they differ */
double run_difference(const struct run *many, const struct run *one, int rank, double *params);

/* ---- soundness_order.c ---- */

/* Makes the host order of all roles one in which a machine may run what they issue: the stream `first` as
 * soon as it may, collectives as they come. No backward operation names its forward one any more. */
void order_streams(struct moe_schedule *s, int first);
/* Do two operations of a rank that no order of its streams puts one before the other touch one element, which
 * either writes? What such a step computes is not defined, whatever it was in the orders that were tried.
 * text: which two. */
bool order_races(const struct moe_schedule *s, int rank, char text[], size_t size);

/* ---- soundness_explain.c ---- */

enum kind { SCENARIOS, MUTATIONS, ALIKE, KIND_COUNT };
struct scene {
    char text[TEXT], alone[TEXT]; /* YAML */
    struct moe_scenario *sc, *sc1;
    struct moe_schedule *s;
};

struct outcome {
    enum end end;
    char error[512];
};

struct trial {
    enum kind kind;
    int64_t number;
    struct scene scene;
    struct mutation m;
    struct mutation_draws changes; /* that m was drawn from */
    struct moe_schedule *s;        /* with the change */
    struct run *before, *after[2]; /* no step, one and two without it */
    struct moe_routing *r;
    struct outcome o[2]; /* as it is, and with members that ask */
    bool same;           /* what the operation reads instead was the same to the bit without the change */
};

/* Why check may say something else than a run: a rule excuses a verdict, and an alarm is explained when each
 * of its verdicts is. */
/* clang-format off */
#define RULES(X) \
    X(NONE,    "not explained") \
    X(MIXED,   "C1: members enter another collective each; nothing moves, and MPI lets it pass") \
    X(COUNTS,  "C14 of limit: the counts that it reads tell the simulator; the kernel counts again") \
    X(NEEDS,   "C8 of the operation: the framework would stop here; the executor has no such test") \
    X(ORDER,   "C8 of limit: nothing is above the capacity, so that no order of dropping shows") \
    X(OWN,     "a copy of what the rank updated itself, to where it is") \
    X(SAME,    "C14 of the operation: what it reads instead is a copy, the same to the bit") \
    X(SETTING, "a decay, order of dropping or seed that the schedule says nowhere else")
/* clang-format on */
#define X(name, text) RULE_##name,
enum rule { RULES(X) RULE_COUNT };
#undef X
extern const char *const rule_text[];

/* Of an alarm of a run without fault: the first of the rules; none when a verdict has none. */
enum rule explain_alarm(const struct trial *t);
/* The same of one verdict. */
enum rule explain_verdict(const struct trial *t, const struct moe_verdict *v);
/* Of a run with a fault, and no error of check. */
enum rule explain_miss(const struct trial *t);
/* Verdicts made up for a run without fault, one of every class about an operation that was not changed, and
 * of those classes that no rule has about the one that was: how many a rule would excuse. */
int explain_planted(const struct trial *t, int *n);

#endif
