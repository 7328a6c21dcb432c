/* measured - collectives that somebody measured (traces/measured.h): moesim calibrate fits nccl.h's numbers
 * to them, moesim validate predicts them. */
#ifndef MOE_CLI_MEASURED_H
#define MOE_CLI_MEASURED_H

#include "sim/cli/cli.h"
#include "sim/cost/calibrate_nccl.h"
#include "traces/measured.h"

/* A row of a file, as it says it, and what it measures. */
struct moe_cli_row {
    struct moe_measured_row said;
    struct moe_nccl_row nccl;
};

struct moe_cli_rows {
    int n, cap;
    struct moe_cli_row *row; /* [n] */
    /* What was left out: not a time of a collective of known size; of the host alone; nodes filled otherwise
     * than the topology's, or one GPU. */
    int n_skipped, n_host, n_elsewhere;
    int n_wrong;            /* their results were */
    char machine[MOE_NAME]; /* the first that a row says; "" when none does */
};

/* Rows of all files of the command line that --rows chooses and that the topology can lay out: on nodes that
 * are filled one after the other. Warns on standard error of points whose rows are far apart. Errors: those
 * of the reader; MOE_EINPUT "file:line: ..." for a sum of an unknown type and for a second machine, and when
 * no row is left. Freed with moe_cli_rows_free in any case. */
int moe_cli_rows_load(const struct moe_args *args, const struct moe_topo *t, struct moe_cli_rows *out);
void moe_cli_rows_free(struct moe_cli_rows *rows);
/* "12 rows of the host's time, ... left out", or nothing. */
void moe_cli_rows_print_left_out(const struct moe_cli_rows *rows);
/* The files' names without folders, with a comma between. */
const char *moe_cli_file_names(const struct moe_args *args, char out[PATH_MAX]);

/* Sizes as the tables name them: bands of nccl.h, then all from 64 KiB and all. */
enum { MOE_BAND_FROM_64K = MOE_NCCL_BANDS, MOE_BAND_ALL, MOE_BAND_TEXTS };
extern const char *const moe_band_text[MOE_BAND_TEXTS];
bool moe_in_band(int64_t bytes, int band);

/* An SVG at path: a panel for each collective, time over size, the rows and what the numbers say. Errors:
 * those of gnuplot. */
int moe_cli_plot_rows(const char *path, const struct moe_nccl_row *row, int n, const struct moe_nccl *p);

/* NCCL's tuning tables of one node, from --tuning, then the files of the command line: of each number of GPUs
 * the first. */
struct moe_cli_tuning {
    struct moe_nccl_tables tables;
    char *said;     /* "nccl.log:12, 8 GPUs; ...": where they are from; NULL: there are none */
    int n_repeated; /* tables of a number of GPUs that had one */
    int n_unusable; /* of several nodes, more GPUs than a node has, or an unknown number */
};
/* Errors: those of the reader; MOE_EINPUT when --tuning holds none that can be used. To be
 * freed in any case. */
int moe_cli_tuning_load(const struct moe_args *args, const struct moe_topo *t, struct moe_cli_tuning *out);
void moe_cli_tuning_free(struct moe_cli_tuning *t);

/* The commands for measured rows. */
int moe_cli_calibrate_nccl(const struct moe_args *args);
int moe_cli_validate_rows(const struct moe_args *args);

#endif
