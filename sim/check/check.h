/* check - proves or refutes that a schedule is right for a routing, before anything runs.
 *
 * Runs the schedule without time: every rank issues in host order and stops at a collective until all members
 * of its group are there. Integers are real, gradients are vectors of contributions, other data is written or
 * not. What it proves (class, after the check classes of the bug atlas):
 *   C1 sizes     members of a collective agree on kind, type, reduction and sizes, pair by pair
 *   C2 order     every collective is entered by all members in one order; no rank waits for ever; a size is
 *                known to the host when it is needed
 *   C3 scale     every gradient has the coefficient it should have
 *   C4 reduction every gradient element is the sum over the right ranks of every contribution, once
 *   C5 norms     the norm that gradients are clipped by covers the whole gradient of every parameter of the
 *                right ranks, once
 *   C6 content   nothing is read before it was written, or while another stream may be writing it (in one
 *                schedule that is an error: nothing else orders the two); every output is written, every
 *                input is read
 *   C7 aux loss  the auxiliary loss and its gradient have one coefficient and divisor
 *   C8 capacity  what a capacity rule needs of tokens and capacity holds on every rank; where ranks have
 *                lists of their own, they have one rule
 *   C10 buffers  those of a fixed size hold the tokens of every rank
 *   C14 shapes   kernels fit what they read and write (kernel_shapes.c); backward operations undo the
 *                forward ones; ranks compute the same function of their data
 *   C16 update   where ranks have lists of their own, copies of a parameter are updated alike
 * Cost: O(operations * ranks + int64 elements moved). */
#ifndef MOE_CHECK_H
#define MOE_CHECK_H

#include "sim/routing.h"
#include "sim/schedule.h"

/* clang-format off */
#define MOE_SEVERITIES(X) X(ERROR, "error") X(POSSIBLE, "possible") X(NOTE, "note")
/* clang-format on */
#define X(name, text) MOE_SEVERITY_##name,
enum moe_severity { MOE_SEVERITIES(X) MOE_SEVERITY_COUNT };
#undef X
extern const char *const moe_severity_text[];

/* What a library may do when members disagree on a size: it takes sizes on trust. Source: reports of NCCL and
 * PyTorch; in one, a rank passes and the next collective of the communicator stalls. */
#define MOE_OUTCOMES "hang", "silent wrong data", "truncated", "desynchronised"

struct moe_verdict {
    int check_class; /* 1: C1, ... */
    enum moe_severity severity;
    bool undefined; /* any of MOE_OUTCOMES may follow */
    int n_ranks;
    int *ranks;            /* [n_ranks] those concerned, ascending */
    int n_layers;          /* 0: the operation is of no layer */
    int *layers;           /* [n_layers] where it is the same, ascending */
    char op[2 * MOE_NAME]; /* "layer 1 forward dispatch": where it was seen first */
    char *text;            /* one sentence: ranks, operation, numbers */
};

struct moe_verdicts {
    int n, cap;
    struct moe_verdict *item;
};

/* Result: verdicts (none: the schedule is right for this routing); at most one per (class, operation, cause),
 * whatever the rank and layer.
 * Stops at the first operation that cannot complete: what follows it would be noise.
 * Errors: none; the schedule must satisfy moe_schedule_check and fit the routing (asserted). */
void moe_check(const struct moe_schedule *s, const struct moe_routing *r, struct moe_verdicts *out);
void moe_verdicts_free(struct moe_verdicts *v);

#endif
