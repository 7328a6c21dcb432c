/* calibrate_nccl - the parameters of nccl.h, fitted to measured collectives of one node.
 *
 * Least absolute log errors (regress.h); each parameter is also held near where it starts, as strongly as one
 * to seven rows hold it that are 15 % off, so that what the rows hardly tell stays plausible. What they do
 * not tell at all keeps its start and is said to; where NCCL's log has a table (nccl_table.h), six of them
 * take its value instead: launch and step of LL, launch of Simple, channels of LL and LL128, port. Of several
 * tables that of the most GPUs counts. What the rows tell starts as ever. Pure: no files. Sizes met: 100 to
 * 500 rows. */
#ifndef MOE_CALIBRATE_NCCL_H
#define MOE_CALIBRATE_NCCL_H

#include "sim/cost/nccl.h"

struct moe_nccl_row {
    struct moe_nccl_case c;
    double time_s;
    double port_most_Bps; /* what the node's bus leaves to each of the GPUs; 0: there is none */
};

struct moe_nccl_fit {
    struct moe_nccl value;
    int n_rows;                       /* that were fitted, after moe_nccl_merge */
    double spread[MOE_NCCL_N_PARAMS]; /* standard deviation of the logarithm; INFINITY: no row
                                         depends on it */
    bool told[MOE_NCCL_N_PARAMS];     /* by the rows */
    bool prior[MOE_NCCL_N_PARAMS];    /* not told, so as NCCL's table has it; spread: of moe_nccl_prior */
    double residual[MOE_NCCL_CLASSES][MOE_NCCL_BANDS]; /* median absolute error; NAN: no rows */
    double median;                                     /* of all rows that were fitted */
    double without_size, without_ranks; /* median error of rows of a size, a number of GPUs, left out of the
                                           fit; NAN: there is only one */
};

/* Do they measure the same? Data that is only moved counts by its bytes, sums also by their type. */
bool moe_nccl_same(const struct moe_nccl_case *a, const struct moe_nccl_case *b);
/* Of rows that measure the same, of several types or repeated, the fastest stays. Result: the number left, in
 * the order of the first. */
int moe_nccl_merge(struct moe_nccl_row *rows, int n);

/* facts: release, arch, rings, links; rows: merged. Errors: MOE_EINPUT with fewer than 12 rows. Cost: about
 * 30 fits, 10 s for 300 rows. */
int moe_nccl_calibrate(const struct moe_nccl *facts, const struct moe_nccl_row *rows, int n,
                       struct moe_nccl_fit *out);

extern const char *const moe_nccl_text[], *const moe_nccl_unit[], *const moe_nccl_rows[]; /* of parameters */
extern const double moe_nccl_size[];
double *moe_nccl_param(struct moe_nccl *p, int i);

/* What facts' tables say of parameter i: *value; *spread: how far off it is, as a standard deviation of the
 * logarithm. false: nothing. */
bool moe_nccl_prior(const struct moe_nccl *facts, int i, double *value, double *spread);

/* Sorts them: the q-quantile (0 to 1), between neighbours by their distance; NAN without values. */
double moe_quantile(double *values, int n, double q);

#endif
