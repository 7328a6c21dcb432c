/* simulate - how long a step takes on a topology, and where the time goes.
 *
 * Discrete events. Each rank's host issues operations in order (launch time each) into streams; an operation
 * starts when it is at the head of its stream, its waits are over and, for a collective, when all members of
 * the group have reached it; a host sync stops the host. How long kernels last and what collectives send:
 * simulate_cost.h. Flows share links by max-min fairness (share.h), exactly: their rates are right at every
 * instant. On a host (topology.h) an operation is issued when the one before has ended, and ranks take turns
 * on the cores (turns.h). Same input, same bytes out. */
#ifndef MOE_SIMULATE_H
#define MOE_SIMULATE_H

#include "sim/routing.h"
#include "sim/schedule.h"
#include "sim/topology.h"

/* One line of the breakdown: all instances of one operation of one block, over layers.
 * own and waiting are means over ranks of sums over instances. */
struct moe_sim_row {
    char op[2 * MOE_NAME]; /* "layer forward dispatch" */
    enum moe_op_kind kind;
    int instances;  /* a rank; the most that any rank has */
    double own_us;  /* kernel: end minus start; collective: exit minus latest entry; host sync: host_sync_s */
    double wait_us; /* collective: latest entry minus own entry; host sync: for its streams; kernel: 0 */
    double error_us; /* collective: what own_us may be off, 80 % of the time; NAN: not known; kernel: 0 */
    int64_t bytes;   /* collective: sent by all ranks, self part excluded; kernel: 0 */
};

/* Every moment of a rank's step counts once, as the first that applies: compute, exposed, waiting, host. So
 * the four add up to the step. */
struct moe_sim_result {
    moe_ps step;       /* last completion on any rank */
    double step_error; /* half of the interval that holds 80 % of measurements, as a part of the step: NAN
                          when the topology does not say it of all that takes time */
    double compute_us; /* a kernel runs, mean over ranks */
    double exposed_us; /* a collective is in flight (all members there), mean */
    double waiting_us; /* in a collective, waiting for its latest member, mean */
    double host_us;    /* the rest of the step: launch gaps, host syncs, idle; mean */
    double comm_us;    /* own time of collectives, hidden or not, mean over ranks */
    int64_t bytes[MOE_LINK_CLASS_COUNT]; /* carried by links of each class; a flow counts once per class */
    int64_t events;                      /* processed, for budgets in tests */
    int n_rows, cap_rows;
    struct moe_sim_row *rows; /* in host order */
};

/* s: satisfies moe_schedule_check; r: read by kernels that write COUNTS (NULL when there are none); t: is
 * laid out for the schedule's ranks; out: to be freed with moe_sim_free in any case. Errors: MOE_EVERDICT,
 * naming operation and ranks, when ranks wait for ever, do not agree on a collective, or start something
 * before its size is known (run check for the reasons); MOE_EINPUT when the step lasts more than 50 days. */
int moe_simulate(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                 struct moe_sim_result *out);

/* One operation of a rank, when it has ended; times as in a row. */
struct moe_sim_seen {
    int rank, layer;
    const struct moe_block *block;
    const struct moe_op *op;
    moe_ps own, wait; /* wait of a host sync: 0 */
};
/* The same; `see`, when not NULL, is called for every operation of every rank. */
int moe_simulate_seen(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                      void (*see)(void *ctx, const struct moe_sim_seen *seen), void *ctx,
                      struct moe_sim_result *out);
void moe_sim_free(struct moe_sim_result *out);

#endif
