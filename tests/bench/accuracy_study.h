/* accuracy_study - a model fitted to some rows of a file, which predicts the others: what the parts of
 * accuracy_ep.c share.
 *
 * Rows that may be fitted are, in closed form; the others are predicted by the plan of flows. */
#ifndef MOE_ACCURACY_STUDY_H
#define MOE_ACCURACY_STUDY_H

#include "sim/cost/deepep.h"
#include "sim/cost/lsa.h"
#include "sim/cost/onesided.h"
#include "sim/cost/regress.h"
#include "tests/bench/accuracy.h"

enum { STUDY_MEMBERS = 8, STUDY_OPS = MOE_ONESIDED_OP_COUNT };

struct row {
    int op; /* whose parameters hold */
    const char *dtype;
    char name[MOE_NAME], band[MOE_NAME];
    bool fitted;
    int order;   /* in which it was read */
    int64_t key; /* rows of one key are left out of a fit together */
    int ranks;
    int64_t bytes;
    double time_s;
    double half;     /* of the interval, as a logarithm */
    double left_out; /* of a fitted row: how far off it is in a fit without its key, as a logarithm */
    union {
        struct moe_deepep_case deepep;
        struct moe_onesided_case onesided;
        struct moe_lsa_case lsa;
    };
};

/* Seconds with these members in closed form, or, when plan is not NULL, what it makes of them. */
struct study;
typedef double study_time(const struct study *s, const double *member, const struct row *row,
                          struct moe_plan *plan);

/* A model, rows, and which of its parameters they tell. */
struct study {
    const char *machine;
    struct moe_topo *topo;
    int n, cap, n_fitted; /* fitted rows come first once they are sorted */
    struct row *row;
    const struct moe_number *table; /* of members */
    int n_members, n_params;
    double value[STUDY_OPS][STUDY_MEMBERS]; /* what is not fitted keeps this */
    int param[STUDY_OPS][STUDY_MEMBERS];    /* 1 + which fitted parameter sets this member, 0: none */
    int member[MOE_REGRESS_PARAMS];         /* which each fitted parameter sets */
    double start[MOE_REGRESS_PARAMS], least[MOE_REGRESS_PARAMS], most[MOE_REGRESS_PARAMS];
    study_time *time_s;
};
#define MEMBER(type, member) ((int)(offsetof(struct type, member) / sizeof(double)))

struct study study_new(const char *machine, const char *topology);
void study_free(struct study *s); /* what it holds */
struct row *study_add(struct study *s);

/* This member is a parameter of the fit, one for operations first to last; it starts in the middle of its
 * bounds. */
void study_fit_member(struct study *s, int member, int first, int last);
/* Fits the rows that may be, sorted to the front. Result: param, n_fitted, left_out. */
void study_fit(struct study *s, double *param);
void study_print(const struct study *s, const double *param);

/* Says so when what the topology says of an operation, said [n_members], is another fit. */
void study_expect(const struct study *s, const double *param, int op, const double *said);

/* Seconds in closed form; log(those / measured). */
double study_time_s(const struct study *s, const double *param, const struct row *row);
double study_error(const struct study *s, const double *param, const struct row *row);
/* The q-quantile of left_out of fitted rows with so many ranks (0: any), in this band (NULL: any). */
double study_left_out(const struct study *s, int ranks, const char *band, double q);
/* Predicts the rows that were not fitted, and gives them to accuracy_row. */
void study_report(const struct study *s, const double *param, struct accuracy *a);

/* Seconds that operation `op` of a forward pass takes in a simulated step, in the mean over ranks: one layer,
 * a token's row of so many bytes, routing drawn evenly. */
double accuracy_simulated_s(struct moe_topo *t, const char *dispatcher, int ranks, int64_t tokens,
                            int experts, int top_k, double row_bytes, const char *op);

#endif
