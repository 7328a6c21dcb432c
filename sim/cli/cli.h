/* cli - what the subcommands of moesim share: their arguments, what they read, how they print.
 *
 * A command builds its results as JSON and prints that, or tables and lines made of the same values, so both
 * name things alike. Results go to standard output, and nothing else does; main reports errors. */
#ifndef MOE_CLI_H
#define MOE_CLI_H

#include "sim/lower/lower.h"
#include "sim/simulate.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>

enum { MOE_MAX_VARY = 8, MOE_EXIT_INTERRUPTED = 130 };

/* What the command line said, or the default of the option (main.c). Borrowed from argv. */
struct moe_args {
    const char *input;         /* SCENARIO, TRACE or RUN.db */
    const char *const *inputs; /* FILE...; the first is `input` */
    int n_inputs;
    const char *output, *data, *save, *load, *topology, *format, *name, *phases, *routing, *rows, *op, *plot,
        *tuning, *tensors, *against, *device;
    int64_t ranks, steps, seed, timeout_s, step, threads, cores, max_step_error, max_phase_error, max_error;
    bool json, help, like, no_agreement, stress, poison, unchecked;
    int n_vary;
    const char *vary[MOE_MAX_VARY]; /* "key=value,value" */
};

/* Result of a command: its exit code, or a negative enum moe_err. */
int moe_cli_capture(const struct moe_args *args);
int moe_cli_check(const struct moe_args *args);
int moe_cli_simulate(const struct moe_args *args);
int moe_cli_compare(const struct moe_args *args);
int moe_cli_calibrate(const struct moe_args *args);
int moe_cli_validate(const struct moe_args *args);
int moe_cli_trace_info(const struct moe_args *args);
int moe_cli_trace_merge(const struct moe_args *args);
int moe_cli_trace_export(const struct moe_args *args);
int moe_cli_trace_import(const struct moe_args *args);
int moe_cli_report(const struct moe_args *args);

/* ---- input.c: a scenario, or the scenario and one step of a trace, or each from its own file ---- */

struct moe_input {
    struct moe_scenario *scenario;
    struct moe_schedule *schedule;
    struct moe_routing *routing;
    const char *topology; /* --topology, or the scenario's; "" without either; borrowed */
    int64_t step;         /* of the trace; -1: the routing was drawn */
    int64_t tokens;       /* of all ranks */
};
/* Errors: those of the loaders; MOE_EINPUT when the routing of a trace does not fit its scenario; MOE_EUSAGE
 * for --step without a trace. Freed with moe_input_free in any case. */
int moe_input_load(const struct moe_args *args, struct moe_input *in);
void moe_input_free(struct moe_input *in);
bool moe_input_is_trace(const char *path); /* a trace store, or called so */
/* MOE_EINPUT that says how to merge, when `path` is the run of a capture that was killed, which left files of
 * its ranks alone, or the file of a rank. */
int moe_input_check_merged(const char *path);
/* "4 ranks, 2 layers, ...; routing drawn with skew 0.5, seed 1" and the same for --json. */
void moe_input_print(const struct moe_input *in);
json_t *moe_input_json(const struct moe_input *in);

/* ---- simulate.c: what compare needs of it ---- */

/* The parts that add up to a step: their words, JSON key, and place in moe_sim_result. */
enum { MOE_PARTS = 4 };
struct moe_part {
    const char *text, *key;
    size_t offset;
};
extern const struct moe_part moe_parts[MOE_PARTS];
double moe_part_us(const struct moe_sim_result *r, int part);
double moe_step_us(const struct moe_sim_result *r);
/* Simulates on the topology of this name; MOE_EUSAGE when it is "". out is freed with moe_sim_free in any
 * case. */
int moe_predict(const struct moe_schedule *s, const struct moe_routing *r, const char *topology,
                struct moe_sim_result *out);
/* Adds step_us, the parts and the bytes that links of each class carried. */
void moe_result_json(const struct moe_sim_result *r, json_t *object);

/* ---- check.c ---- */

struct moe_verdict;
struct moe_verdicts;
void moe_print_numbers(const int *number, int n, FILE *out); /* rising: "0-3,7" */
/* Lines of verdicts are those of the scenario. Without the end of the line. */
void moe_print_verdict(const struct moe_verdict *v, const struct moe_scenario *sc, FILE *out);
json_t *moe_verdict_json(const struct moe_verdict *v, const struct moe_scenario *sc);
json_t *moe_verdicts_json(const struct moe_verdicts *v, const struct moe_scenario *sc); /* a list */
/* The first error, as moe_print_verdict writes it, to be freed; NULL: there is none. */
char *moe_first_error(const struct moe_verdicts *v, const struct moe_scenario *sc);
/* What check proves, a line each: what it was asked, or all without an input. */
void moe_print_classes(const struct moe_input *in);
void moe_print_verdicts_help(void);                /* all classes, those of runs too, and severities */
int moe_check_stress(const struct moe_args *args); /* stress.c */
/* MOE_EVERDICT and the first error that check finds, or MOE_OK. */
int moe_check_input(const struct moe_args *args, const struct moe_input *in);

/* ---- output.c ---- */

int moe_fail_in(const char *path, int err); /* the last error, which names its file when it did not */
json_t *moe_json_known(double value);       /* null when it is not finite */
json_t *moe_json_text(const char *text);    /* bytes that are not UTF-8 become '?' */
void moe_print_json(json_t *root);          /* and gives up root, as the next two do */
void moe_print_fields(json_t *object);      /* a line a key */
void moe_print_rows(json_t *list);          /* a table of objects with the same keys, which are its heads */
/* MOE_EUSAGE when the file that this option says is a trace store, or an input or the topology. */
int moe_output_check(const struct moe_args *args, const char *option, const char *path);
/* A file is written to path.partial, and has its name when it is whole; what is there and no file, as a pipe
 * or a link, is written at once. */
int moe_output_open(const char *path, FILE **out);
int moe_output_close(const char *path, FILE *f); /* in any case */

/* ---- trace_info.c ---- */

/* Prints what a trace store holds, as text or as JSON of this schema. */
int moe_print_trace(const char *path, const char *schema, bool json);

/* ---- trace.c ---- */

/* MOE_EINPUT when there is something at `path`, or at path.partial where it is built, that is no trace
 * store. */
int moe_check_replaceable(const char *path);

/* ---- process.c: the only place that starts processes ---- */

/* The path of a program beside this one, or its name when there is none. */
const char *moe_program_beside(const char *name, char out[PATH_MAX]);
/* Runs argv (NULL-ended) in dir (NULL: here), without standard input, its output on standard error, or each
 * line of it, without its end, given to hear(ctx, line). SIGINT, SIGTERM and SIGHUP reach it as SIGTERM, and
 * so does the end of this process, also when that is killed.
 * Result: its exit code; 128 + the signal that killed it; MOE_EXIT_INTERRUPTED when one was passed on.
 * Errors: MOE_EMISSING when there is no such program, naming its Debian package. */
int moe_program_run(const char *const argv[], const char *package, const char *dir,
                    void (*hear)(void *ctx, char *line), void *ctx);
int moe_program_gnuplot(const char *script, const char *dir); /* MOE_OK, or an error */

#endif
