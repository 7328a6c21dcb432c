/* calibrate - measured times of operations beside predicted ones: phases and their errors, and the numbers of
 * a host (topology.h) fitted to them.
 *
 * A fitted number is the factor of one term of an operation's time, and what a term is for an operation the
 * simulator says: it is asked for the step on a machine where only this term takes time. So the fit knows
 * sizes alone, no operation, layer or scenario. Pure: no files, no clocks. Sizes met: 2 to 16 ranks, 2 to 8
 * layers, 5 to 20 steps, 1,000 operations of a rank. */
#ifndef MOE_CALIBRATE_H
#define MOE_CALIBRATE_H

#include "sim/simulate.h"

/* clang-format off */
/*        what an operation is; passes are kept apart */
#define MOE_OP_CLASSES(X) \
        X(DENSE,     "dense products") \
        X(ATTENTION, "attention") \
        X(EXPERTS,   "experts") \
        X(ROUTING,   "routing") \
        X(OTHER,     "other kernels") \
        X(COLLECTIVE,"collectives")

/*        key in the topology  unit of the term  text of the unit, its size   rate or time */
#define MOE_FITTED(X) \
        X(MATMUL,   "matmul",     "GFLOP/s", 1e9,  true) \
        X(SCALAR,   "scalar",     "GFLOP/s", 1e9,  true) \
        X(MEMORY,   "memory",     "GB/s",    1e9,  true) \
        X(CALL,     "call",       "us",      1e-6, false) \
        X(LATENCY,  "latency",    "us",      1e-6, false) \
        X(BANDWIDTH,"bandwidth",  "GB/s",    1e9,  true) \
        X(LAUNCH,   "launch",     "us",      1e-6, false) \
        X(HOST_SYNC,"host_sync",  "us",      1e-6, false) \
        X(SLICE,    "slice",      "us",      1e-6, false) \
        X(CROWDING, "crowding",   "times",   1,    false)
/* clang-format on */
#define X(name, text) MOE_CLASS_##name,
enum moe_op_class { MOE_OP_CLASSES(X) MOE_CLASS_COUNT };
#undef X
#define X(name, key, unit, size, rate) MOE_FIT_##name,
enum moe_fitted { MOE_FITTED(X) MOE_FIT_COUNT };
#undef X
enum { MOE_FIT_TERMS = MOE_FIT_LAUNCH }; /* the first are factors of terms */
extern const char *const moe_op_class_text[], *const moe_fitted_text[], *const moe_fitted_unit[];
extern const double moe_fitted_size[];

/* A step, operation by operation. place(rank, instance, op) as moe_times_place. */
struct moe_times {
    int n_ranks, n_instances, n_ops; /* n_ops: of the largest block */
    double *own_s, *wait_s;          /* [place] as in moe_sim_seen */
    double step_s;                   /* first entry to last end */
    double launch_s; /* measured: median from the end of an operation to the start of the next */
};
/* The schedules of a lowering have one role: all ranks have the same instances. */
struct moe_times *moe_times_new(const struct moe_schedule *s);
void moe_times_free(struct moe_times *t);
static inline size_t moe_times_place(const struct moe_times *t, int rank, int instance, int op)
{
    return ((size_t)rank * (size_t)t->n_instances + (size_t)instance) * (size_t)t->n_ops + (size_t)op;
}

struct moe_clock_times {
    double entry_s, start_s, end_s;
};
/* From the clock [place] of all ranks: kernels end minus start, collectives exit minus latest entry (0 where
 * a member left earlier), the rest of them waiting. */
void moe_times_measure(const struct moe_schedule *s, const struct moe_clock_times *clock,
                       struct moe_times *out);
/* From a simulation. Errors: those of moe_simulate. */
int moe_times_predict(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                      struct moe_times *out);

/* Where a step's time goes: seconds, means over ranks. host: the rest of the step. */
enum { MOE_PHASE_WAITING = MOE_CLASS_COUNT * MOE_PASS_COUNT, MOE_PHASE_HOST, MOE_PHASE_COUNT };
void moe_phases(const struct moe_schedule *s, const struct moe_times *t, double phase_s[MOE_PHASE_COUNT]);
void moe_phase_name(int phase, char out[MOE_NAME]); /* "experts, backward" */
/* How far a prediction is off, relative; infinite where nothing was measured. */
double moe_off(double measured, double predicted);
/* Phases that are, measured or predicted, this share of the measured step or more are those that count. */
enum { MOE_COUNTED_PCT = 5 };
bool moe_phase_counts(double measured, double predicted, double measured_step);

/* Steps of one capture. */
struct moe_steps {
    const struct moe_schedule *s;
    int n;
    struct moe_routing **routing; /* [n] */
    struct moe_times **times;     /* [n] measured */
};

struct moe_fit {
    double value[MOE_FIT_COUNT];    /* base units */
    double spread[MOE_FIT_COUNT];   /* standard deviation of the values fitted to fifths of the steps */
    bool determined[MOE_FIT_COUNT]; /* false: at the end of what was tried, of all steps or of a fifth, or
                                       spread above value, so the capture does not tell */
    int n_samples, class_samples[MOE_CLASS_COUNT]; /* that were fitted to */
    double class_error[MOE_CLASS_COUNT]; /* median of |fitted / measured - 1|, each on a core of its own, over
                                            kernels and first members to leave of all steps */
};
/* Samples are the medians over the steps: of each kernel of each rank, and of each collective the first
 * member to leave. What makes either longer are other processes on its core. Factors are those of the least
 * absolute errors. slice, and crowding, how many times as long kernels take in a whole step as their medians
 * say: those of a grid with which the simulated phases are nearest to the measured ones. Errors: those of
 * moe_simulate; MOE_EINPUT when operations of a rank overlap. Cost: 106 simulations a step: 6 terms, and 4
 * times the grids of 11 and 14. */
int moe_calibrate(const struct moe_steps *steps, int64_t cores, struct moe_fit *out);
/* A host with these numbers: one node for all ranks, matmul for both types; crowding is in its kernels. */
struct moe_topo moe_fit_topo(const double value[MOE_FIT_COUNT], int64_t cores);

double moe_median(double *values,
                  int n); /* sorts them; n > 0; of an even number the mean of the middle two */

#endif
