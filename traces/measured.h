/* measured - times of collectives that somebody measured: CSV, and what nccl-tests prints or writes.
 *
 * Three sources, told apart by content and never by name:
 *   CSV   a header line names the columns, in any order: op, size_bytes (or bytes), num_gpus (or gpus),
 *         time_us (or oop_time_us, ip_time_us); dtype (or type), nodes and machine when there; others are
 *         ignored. Names in any case. Fields may be quoted. Lines that begin with # are notes.
 *   log   what nccl-tests prints since 2019, with mpirun's tags and NCCL's own lines between, several runs
 *         in a row. Columns are those of the table's header: error or #wrong, 4 or 8 values a block, time or
 *         cputime, a timestamp, an empty redop or out-of-place block.
 *   JSON  what nccl-tests -J writes, versions 1 to 3. Its `env` may hold secrets: nothing of it is kept, nor
 *         said in an error.
 * Sizes met: 10 to 1,000 rows, logs of 1 MB; files over 256 MB are refused.
 *
 * Source: nccl-tests 2.0 to 2.19.6, src/common.cu and src/util.cu. */
#ifndef MOE_MEASURED_H
#define MOE_MEASURED_H

#include "sim/base.h"

struct moe_measured_row {
    char op[MOE_NAME]; /* alltoall, allgather, reducescatter, allreduce: the text of an enum moe_collective */
    char type[MOE_NAME];    /* as written: half, int8, float, bfloat16; "" when not said */
    int ranks, nodes;       /* that take part; nodes: 0 when not said */
    char machine[MOE_NAME]; /* of a CSV; "" when not said */
    int64_t bytes;  /* nccl-tests' size: the larger of a rank's send and receive buffer, own part included */
    double time_s;  /* of one operation, out of place; in place when only that is there */
    bool host_time; /* time_s is what the host spends to start it (nccl-tests -C), not how long it takes */
    int line;       /* of JSON the place among the results, from 1 */
};

struct moe_measured {
    int n, cap;
    int n_skipped; /* other collectives; sizes or times that are not positive and finite; torn lines of a
                      table */
    int n_wrong;   /* whose results were wrong (#wrong) */
    struct moe_measured_row *rows; /* [n] in the order of the file */
    char file[MOE_NAME];           /* its name without folders */
};

/* Reads a file of one of the three sources.
 *
 *   op    the collective of logs and JSON that do not say it, in any spelling; else not used; may be NULL
 *   out   out: to be freed; empty after an error
 *
 * Result: out->n > 0. A log's row belongs to the run above it: its ranks are those of the group of the first
 * line "# Rank", nodes their hosts; its collective the last NAME_perf before the table.
 * Cost:   O(size of the file) time, and ten times its size in memory for JSON.
 * Errors: MOE_EINPUT, as "file:line: what, expected what"; also when no row can be used. MOE_EUSAGE when op
 * is unknown, naming the nearest. */
int moe_measured_read(const char *path, const char *op, struct moe_measured *out);
void moe_measured_free(struct moe_measured *m); /* what is in it; it is empty then */

/* Which rows are meant. Any op: "", any number of ranks: n_ranks 0. */
enum { MOE_ROW_TERMS = 16 };
struct moe_row_choice {
    int n;
    struct {
        char op[MOE_NAME];
        int n_ranks, ranks[MOE_ROW_TERMS];
    } terms[MOE_ROW_TERMS];
};
/* "*@2,4+allgather@8": all collectives of 2 and 4 ranks, and all-gathers of 8. A term is a collective, in any
 * spelling, or *, then @, then numbers of ranks or *. Errors: MOE_EUSAGE, naming the nearest collective. */
int moe_measured_parse_rows(const char *text, struct moe_row_choice *out);
bool moe_row_chosen(const struct moe_row_choice *choice, const struct moe_measured_row *row);

/* ---- what the readers of the sources share ---- */

/* A whole file. *text: to be freed; a zero is behind it. Errors: MOE_EINPUT as "file: what". */
int moe_measured_load(const char *path, char **text, size_t *bytes);
/* The collective of a name in any spelling (AllGather, ncclAllGather, all_gather_perf), as in a row; NULL: of
 * none. */
const char *moe_measured_op(const char *name);
/* Of the first program NAME_perf in a text: "" when it measures another collective; NULL: there is none. */
const char *moe_measured_program(const char *text);
/* Ends the next line of *at and returns it, without CR; NULL at the end of the text. */
char *moe_measured_line(char **at);
/* All of the text as a number; false when it is not one. "nan" and "inf" are. */
bool moe_measured_number(const char *text, double *out);
/* Adds row with op, bytes and time_s from op ("": another collective), bytes and us = out of place, in place;
 * or counts it as skipped. */
void moe_measured_add(struct moe_measured *out, struct moe_measured_row row, const char *op, double bytes,
                      const double us[2]);

/* The devices that a run says it has. Some lists name only the first of each process, or are cut. */
struct moe_measured_devices {
    int n, cap;
    int per_process; /* nThread x nGpus */
    struct moe_measured_device {
        int process, group; /* group: of NCCL_TESTS_SPLIT; only the first one's times are told */
        uint64_t host;      /* hash of its name */
    } * items;
};
enum { MOE_MEASURED_RANKS = 1 << 24 }; /* more is no number of ranks */
/* per_process of a product of two numbers that may be anything. */
int moe_measured_per_process(double threads, double gpus);
/* rank: of 0 to MOE_MEASURED_RANKS - 1, or else it is ignored. */
void moe_measured_add_device(struct moe_measured_devices *d, double rank, int group, const char *host);
/* Sorts them. ranks: out, those of the first device's group; nodes: out, its hosts. 0 without devices. */
void moe_measured_count(struct moe_measured_devices *d, int *ranks, int *nodes);

/* The readers. line: out, where an error is, 0 when that is the file as a whole; the message says no place.
 * text: ends with a zero; the log's is cut to pieces. */
int moe_measured_read_log(char *text, const char *op, struct moe_measured *out, int *line);
int moe_measured_read_json(const char *text, size_t bytes, const char *op, struct moe_measured *out,
                           int *line);

#endif
