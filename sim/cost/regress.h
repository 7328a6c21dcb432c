/* regress - the parameters of a model with which its predictions are nearest to what was measured.
 *
 * Parameters and times are positive and are compared by their ratios: the error of a row is log(predicted /
 * measured), and what is minimised is the weighted sum of its absolute values, so that an outlier counts no
 * more than its distance. Found by reweighted Gauss-Newton steps, damped where they do not help, and then by
 * steps along one parameter at a time, which also pass the kinks of a maximum. Deterministic. Pure: no files,
 * no clocks. Sizes met: 20 to 5,000 rows, 1 to 12 parameters. */
#ifndef MOE_REGRESS_H
#define MOE_REGRESS_H

#include "sim/base.h"

enum { MOE_REGRESS_PARAMS = 16 };

struct moe_regress {
    int n_rows, n_params;               /* params: 1 to MOE_REGRESS_PARAMS */
    const double *measured;             /* [n_rows] > 0 */
    const double *weight;               /* [n_rows] >= 0; NULL: all 1 */
    const double *start, *least, *most; /* [n_params] 0 < least <= start <= most */
    /* out [n_rows] > 0: the times of all rows with these parameters. */
    void (*predict)(void *ctx, const double *param, double *out);
    void *ctx;
};

/* param [n_params]: the best found. skip [n_rows]: rows that do not count, NULL: none. Cost: about 60 x
 * n_params predictions of all rows. */
void moe_regress_fit(const struct moe_regress *r, const bool *skip, double *param);

/* Weighted mean of the absolute errors of the rows that count, infinite when a prediction is not a number. */
double moe_regress_loss(const struct moe_regress *r, const bool *skip, const double *param);

/* out [n_params]: how far each parameter's logarithm may be off when the errors of rows have a standard
 * deviation of `error`: large where the rows do not tell it, or not apart from another; INFINITY where none
 * depends on it, or at its bounds. */
void moe_regress_doubt(const struct moe_regress *r, const double *param, double error, double *out);

#endif
