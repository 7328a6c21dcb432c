/* accuracy - how far predictions are from what others measured: parts of the program bench_accuracy.
 *
 * A part reads rows of a file, fits a model to some of them (sim/cost/regress.h), predicts others, gives
 * each of those to accuracy_row, and asks for lines that sum them up. What is read is
 * $MOESIM_DATA/measured/FILE; a file that is not there ends the program with exit code 4, one that is wrong
 * with 3 and its line. */
#ifndef MOE_ACCURACY_H
#define MOE_ACCURACY_H

#include "sim/base.h"

#include <stdio.h>

/* Their parameters are fitted to other rows, but the formulas were written with all rows known. */
#define ACCURACY_SEEN "; not held out: these rows were in view when the form was chosen"

/* clang-format off */
/*        name (function accuracy_NAME)  what it predicts */
#define ACCURACY_PARTS(X) \
        X(deepep_h800,      "DeepEP on 4 and 8 nodes from 1 and 2") \
        X(deepep_h100_sms,  "DeepEP on 2 nodes with 8, 16 and 20 SMs from 4, 12 and 24") \
        X(deepep_node,      "DeepEP on 1 node: other sizes, experts and SMs") \
        X(deepep_lowlatency,"DeepEP low latency on 2 nodes from 1 and every other size; on 8 nodes") \
        X(nvlink_gb200,     "one- and two-sided kernels in NVL72, 16 ranks from 2, 4 and 8") \
        X(ep_simulated,     "DeepEP low latency and one-sided kernels, as above, but in simulated steps") \
        X(custom_gb200,     "NCCL's all-to-all with 4 CTAs in NVL72, 32 and 64 GPUs from 8" ACCURACY_SEEN) \
        X(pplx,             "NCCL's all-to-all of padded buffers, 4 to 16 nodes from 1 and 2" ACCURACY_SEEN) \
        X(tutel,            "NCCL 2.10's all-to-all, 8 and 32 nodes from 2" ACCURACY_SEEN) \
        X(clusters,         "all-reduce of 64 MiB and more on 8 and 2 nodes, nothing fitted" ACCURACY_SEEN) \
        X(gemm_h100,        "dense products, half of the shapes from the other half") \
        X(gemm_a100,        "dense products, half of the shapes from the other half") \
        X(experts_h100,     "experts with balanced rows, half of the shapes from the other half") \
        X(skew_h100,        "slowdown of experts by a power law, over 1,024 tokens, in points")
/* clang-format on */

/* One predicted row. */
struct accuracy_point {
    char machine[MOE_NAME], op[MOE_NAME], band[MOE_NAME];
    double error;          /* predicted / measured - 1, of ratios their difference */
    bool interval, inside; /* has one; measured is in it */
};

struct accuracy {
    FILE *csv;   /* of all rows, NULL: none is written */
    FILE *out;   /* the same of rows that are times, with the columns of accuracy.sh */
    bool ratios; /* rows of this part are ratios, as if in us, and their errors points */
    int n, cap, n_missed;
    struct accuracy_point *point; /* [n] of this part */
};

#define X(name, text) void accuracy_##name(struct accuracy *a);
ACCURACY_PARTS(X)
#undef X

/* A row that was not fitted. bytes: of one rank's message, as the model takes them, 0: none. band: "small",
 * "64+ tokens": what the lines tell apart. low, high: the interval in which 80 % of measurements should be,
 * NAN: none is predicted. */
void accuracy_row(struct accuracy *a, const char *machine, const char *op, const char *dtype, int ranks,
                  int64_t bytes, const char *band, double measured_s, double predicted_s, double low_s,
                  double high_s);

/* Prints how the rows so far of this part do, of one machine, op and band (NULL: of all): their number,
 * median and 90th percentile of |error|, share in the interval ("-": no row has one), beside the most that
 * the median may be (percent; 0: no bar). A median above it, or no row at all, is a miss, and in the end exit
 * code 5. Result: the median. */
double accuracy_line(struct accuracy *a, const char *machine, const char *op, const char *band, double bar);

/* How far off predictions are for each e-fold of ranks beyond the fitted ones, as a logarithm: the 80 %
 * quantile for GB200's one- and two-sided kernels on 8 ranks, predicted from those on 2 and 4. */
double accuracy_error_of_ranks(void);

/* Prints moe_error() and ends the program with the code of err. */
_Noreturn void accuracy_stop(int err);

/* The q-quantile (0 to 1) of value [n], n > 0, between neighbours by their distance. */
double accuracy_quantile(const double *value, int n, double q);

/* A file of comma-separated values: lines that begin with '#' are notes, the first other names the columns.
 * Fields may be "quoted, with ""quotes""". */
struct accuracy_csv {
    char *path, *text;
    int n_columns, n_rows, cap_cells, cap_lines;
    char **cell; /* [1 + n_rows, n_columns], the names first */
    int *line;   /* [1 + n_rows] */
};

struct accuracy_csv *accuracy_csv_read(const char *file);
void accuracy_csv_free(struct accuracy_csv *csv);
const char *accuracy_csv_text(const struct accuracy_csv *csv, int row, const char *column);
double accuracy_csv_number(const struct accuracy_csv *csv, int row, const char *column);

#endif
