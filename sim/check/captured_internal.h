/* captured_internal - what the files of captured.h share: captured.c loads and reports, copies.c judges one
 * run, against.c compares two. */
#ifndef MOE_CAPTURED_INTERNAL_H
#define MOE_CAPTURED_INTERNAL_H

#include "sim/check/captured.h"

struct moe_copies {                     /* the rows of one tensor in one step and role */
    const struct moe_store_tensor *row; /* [n], by rank */
    int n, place;                       /* the first place of any */
};

struct moe_captured {
    struct moe_store *store; /* borrowed */
    struct moe_store_info info;
    int n_rows, cap_rows, n_groups;
    int n_layers;                 /* of the model, as tensors name them */
    int n_bucketed;               /* rows */
    bool clips;                   /* some row is of a clipped gradient */
    struct moe_store_tensor *row; /* [n_rows] by step, role, name, layer, expert, rank */
    struct moe_copies *group;     /* [n_groups] by step, role, place, layer, expert */
};

/* The groups from `from` on that are of its step and role end before this one. */
int moe_captured_stage(const struct moe_captured *c, int from);
/* Orders the rows by tensor: negative, 0, positive. */
int moe_captured_order(const struct moe_store_tensor *a, const struct moe_store_tensor *b);

/* The row of this tensor in the same step, in a role, on a rank or (-1) the first of any; NULL without. */
const struct moe_store_tensor *moe_captured_find(const struct moe_captured *c,
                                                 const struct moe_store_tensor *t, enum moe_tensor_role role,
                                                 int rank);

/* Several tensors that have one fault: the first names it. */
struct moe_finding {
    int check_class;
    enum moe_severity severity;
    const struct moe_store_tensor *first;
    int n_tensors, n_ranks, n_layers;
    int *ranks, *layers; /* ascending */
    int kind;            /* the caller's: findings of one kind, or of one kind and name, are one */
    int n_split;         /* the caller's: tensors that belong to an expert */
};
struct moe_findings {
    int n, cap;
    struct moe_finding *item;
};
/* The finding of this class, kind and, by_name, tensor name; a new one when there is none. Adds the tensor,
 * and the ranks of its rows [n]. */
struct moe_finding *moe_finding_add(struct moe_findings *f, int check_class, int kind, bool by_name,
                                    const struct moe_store_tensor *row, int n);
/* Makes a verdict of a finding, with the number of its other tensors behind the text; takes its lists. */
void moe_finding_report(struct moe_finding *f, struct moe_verdicts *out, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What rounding may make of a sum, as a part of its norm. */
double moe_captured_rounding(const struct moe_store_tensor *t);
/* May two fingerprints be those of one tensor, a = factor * b up to rounding? Necessary, not sufficient. */
bool moe_captured_near(const struct moe_store_tensor *a, const struct moe_store_tensor *b, double factor);

#endif
