/* format - routing in the file formats of others: one file of code and one row in format.c for each.
 *
 * A trace is exported file by file and imported as a whole; each format reads and writes what one rank routed
 * in one step. Normalised: steps that some rank did not finish are left out of an export; everything but the
 * routing is left out of an import. Round trips are stated in traces/README.md. */
#ifndef MOE_FORMAT_H
#define MOE_FORMAT_H

#include "sim/base.h"

#include <stdio.h>

struct moe_store;

/* What one rank routed in one step. */
struct moe_routed_layer {
    int layer, cap; /* cap: of ids */
    int64_t n_tokens;
    int32_t *ids; /* [T, K] */
};
struct moe_routed {
    int64_t step;
    int rank, top_k, n_layers, cap;
    struct moe_routed_layer *layers; /* in the order in which they were added */
};
/* Adds tokens to a layer. ids [n_tokens, top_k]. Errors: MOE_EINPUT when top_k is not that of the others. */
int moe_routed_add(struct moe_routed *r, int layer, int64_t n_tokens, int top_k, const int32_t *ids);
void moe_routed_clear(struct moe_routed *r); /* frees its layers; step and rank stay */

/* An export in progress: files are written beside and renamed when all are complete. */
struct moe_export {
    struct moe_store *store;
    const struct moe_format *format; /* borrowed, as path is */
    const char *path;                /* a folder; the only file when it ends in the format's suffix */
    FILE *file;                      /* the last one, */
    char name[64];                   /* and how it is called */
    char **names;                    /* [n_files] with folders */
    int n_files, cap;
    bool made;    /* the folder */
    int n_layers; /* of the run */
    struct moe_routed routed;
    int64_t n_routings;
};
/* Ends the last file and begins one called `name` in the folder, unless that is the last one. */
int moe_export_begin(struct moe_export *e, const char *name);

/* An import in progress. */
struct moe_import {
    struct moe_store *store;
    int n_experts, n_layers, top_k; /* so far */
};
/* Adds a step of a rank to the store, and clears it. Errors: MOE_EINPUT when it is there already, or top_k is
 * another one than before. */
int moe_import_add(struct moe_import *in, struct moe_routed *r);
/* The size of a file; MOE_EINPUT when it is not a regular one or cannot be read. */
int moe_import_size(const char *path, int64_t *bytes);

struct moe_format {
    const char *name, *suffix;
    /* Writes e->routed, whose layers ascend; called in order of (rank, step). */
    int (*write)(struct moe_export *e);
    int (*read)(struct moe_import *in, const char *const *files, int n_files);
};
extern const struct moe_format moe_format_megatron, moe_format_npy; /* the rows of the table in format.c */
/* Errors: MOE_EUSAGE, naming the nearest format. */
int moe_format_find(const char *name, const struct moe_format **out);

/* Writes the routing of step `step` of a trace (-1: of all complete ones) to `path`.
 * n_files, n_routings: out, what was written. */
int moe_format_export(const struct moe_format *format, const char *trace, int64_t step, const char *path,
                      int *n_files, int64_t *n_routings);

/* Reads files into a new store at `path`, which appears whole or not at all. Layers are numbered from 0;
 * there are as many experts as the highest id says.
 *
 * Errors: MOE_EINPUT, as "file:line: what, expected what". */
int moe_format_import(const struct moe_format *format, const char *const *files, int n_files,
                      const char *path);

#endif
