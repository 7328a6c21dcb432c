/* check - proves or refutes that a schedule is right for a routing, before anything runs.
 *
 * Runs the schedule without time: every rank issues in host order and stops at a collective until all members
 * of its group are there. Integers are real, gradients are vectors of contributions, other data is written or
 * not. What it proves: MOE_CHECK_CLASSES.
 * Cost: O(operations * ranks + int64 elements moved). */
#ifndef MOE_CHECK_H
#define MOE_CHECK_H

#include "sim/routing.h"
#include "sim/schedule.h"

/* clang-format off */
/* What the absence of a verdict of a class means, with the numbers of the bug atlas (tests/cases/README.md):
 * those that a schedule and a routing decide. Where ranks have lists of their own, C7, C8 and C14 also say
 * that all compute the same function of their data. C2: a size is known to the host when it is needed. C6:
 * nothing else orders two streams of one schedule, so a race is an error; every input is read.
 *    number, text */
#define MOE_CHECK_CLASSES(X) \
   X(1, "sizes: the members of every collective agree on kind, type and sizes, pair by pair") \
   X(2, "order: every collective is entered by all its members in one order; no rank waits for ever") \
   X(3, "scale: every gradient has the coefficient that it should have") \
   X(4, "reduction: every gradient is the sum of every contribution of the right ranks, once") \
   X(5, "norms: the norm that gradients are clipped by covers every parameter's gradient, once") \
   X(6, "content: nothing is read before it is written, or while it is; every output is written") \
   X(7, "auxiliary loss: it and its gradient have one coefficient and divisor") \
   X(8, "capacity: what the capacity rule needs of tokens and capacity holds on every rank") \
   X(10, "buffers: what is sent fits the buffers of the library, and nothing waits in a captured graph") \
   X(11, "memory: no more rows reach a rank than it has room for") \
   X(13, "groups: sizes of the layout go together; groups are created in one order, and set where used") \
   X(14, "shapes: kernels fit what they read and write; each backward operation undoes its forward one") \
   X(15, "checkpoint: every expert is stored once, and found by the rank that asks for it") \
   X(16, "update: all copies of a parameter begin and are updated alike, and all parameters at one rate")
#define MOE_SEVERITIES(X) X(ERROR, "error") X(POSSIBLE, "possible") X(NOTE, "note")
/* clang-format on */
#define X(name, text) MOE_SEVERITY_##name,
enum moe_severity { MOE_SEVERITIES(X) MOE_SEVERITY_COUNT };
#undef X
extern const char *const moe_severity_text[];

extern const struct moe_check_class {
    int number; /* 1: C1 */
    const char *text;
} moe_check_classes[];
extern const int moe_check_n_classes;

/* What a library may do when members disagree on a size: it takes sizes on trust. Source: nccl#1417 (of two
 * all-reduces, 409600 elements against 32768000 hang, against 409598 add up wrong), pytorch#158016 (an
 * all-to-all gives other data and no error), founding_cases.md, corrections of case 1 (a rank passes, the
 * next collective stalls). */
#define MOE_OUTCOMES "hang", "silent wrong data", "truncated", "desynchronised"

struct moe_verdict {
    int check_class; /* number of one of MOE_CHECK_CLASSES */
    enum moe_severity severity;
    bool undefined; /* any of MOE_OUTCOMES may follow */
    bool captured;  /* seen in a run (captured.h), not proved of the schedule; then */
    int64_t step;   /* where it was seen first */
    int line;       /* of the scenario, of the step or list that it is about; 0: none is known */
    int n_ranks;
    int *ranks;            /* [n_ranks] those concerned, ascending */
    int n_layers;          /* 0: the operation is of no layer */
    int *layers;           /* [n_layers] where it is the same, ascending */
    char op[3 * MOE_NAME]; /* "layer 1 forward dispatch", or a tensor: where it was seen first */
    int n_params, cap_params;
    char **params;  /* [n_params] of which it is said, as found; n_params 0: of none */
    const char *of; /* what it says of a parameter: "the gradient of " */
    char *text;     /* one sentence: ranks, operation, numbers */
    char *cause;    /* class, line, operation or `of`, and text without its example: one verdict each */
};

struct moe_verdicts {
    int n, cap;
    struct moe_verdict *item;
};

/* Result: verdicts (none: the schedule is right for this routing); at most one per (class, operation, cause),
 * whatever the rank and layer; of parameters one per (class, line, cause).
 * Stops at the first operation that cannot complete: what follows it would be noise.
 * Errors: none; the schedule must satisfy moe_schedule_check and fit the routing (asserted). */
void moe_check(const struct moe_schedule *s, const struct moe_routing *r, struct moe_verdicts *out);
/* The same, which says now and then how far it is: the share of what ranks issue, which grows to 1. */
struct moe_check_watch {
    void (*moved)(void *ctx, double share);
    void *ctx;
};
void moe_check_watched(const struct moe_schedule *s, const struct moe_routing *r,
                       const struct moe_check_watch *watch, struct moe_verdicts *out);
void moe_verdicts_free(struct moe_verdicts *v);
void moe_verdict_free(struct moe_verdict *v); /* what it holds */

#endif
