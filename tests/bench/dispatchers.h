/* dispatchers - two runs of the same training, told apart: what every rank wrote in each step, and the
 * verdict. */
#ifndef MOE_TEST_DISPATCHERS_H
#define MOE_TEST_DISPATCHERS_H

#include "runtime/execute.h"
#include "sim/scenario.h"

/* A layer's output, the gradient of its probabilities or that of a parameter, as a step's forward or backward
 * pass wrote it last on this rank, before gradients are summed over ranks. */
struct tensor {
    char name[MOE_NAME];
    int buffer, slot, layer;
    enum moe_pass pass;
    enum moe_type type;
    int shard; /* communicator of the parameter that it is the gradient of; -1: none */
    bool of_param;
    int64_t n; /* elements */
    void *content;
};

/* Rows that reached an expert, as numbers: how many, their bits in order, and in any order. */
struct expert_rows {
    int64_t n, in_order, in_any;
};

struct step {
    int n_tensors, cap_tensors;
    struct tensor *tensors;
    struct expert_rows *rows; /* [L, E] */
    int64_t *dots;            /* [L, R] rows of the dot products that are the gradients of probabilities */
};

struct run {
    struct moe_schedule *s;
    int hidden;
    bool dot_by_rows;
    int n_steps;
    struct step *steps;
};

/* What is done to a run beside its scenario; the first three are what a right one never shows. */
enum {
    PLANT_PEERS = 1,   /* the peers of the expert-parallel group are numbered from the last rank on */
    PLANT_ABSENT = 2,  /* the last rank does not compute the gradients of its experts */
    PLANT_SKIP = 4,    /* the kernel of these gradients leaves alone those of an expert without rows */
    PLAIN_PRODUCTS = 8 /* of experts, by kernels/ref.h: those of BLAS depend on the place of a row */
};

/* Trains n_steps; the same bytes on every rank. Aborts the job when a rank cannot go on. */
struct run *run_open(const struct moe_scenario *sc, struct moe_communicator *world, int n_steps, int plant);
void run_close(struct run *r);

enum rows_verdict { SAME_ROWS, OTHER_ORDER, OTHER_ROWS };
/* The gradient that differs first, in the order in which run a wrote them. */
struct difference {
    bool any;
    char name[MOE_NAME];
    int step, layer, rank;
    int64_t ulps; /* the most of any element of the tensor */
    /* Gradients of parameters that differ, of all. */
    int n, n_compared;
};
struct comparison {
    bool forward_equal;     /* up to the step of the first difference, and in it */
    enum rows_verdict rows; /* of the experts, in the first layer where they or its output differ */
    bool other_tree;        /* of a row dot, in any step up to it */
    struct difference gradient;
};
struct comparison compare_runs(struct moe_communicator *world, const struct run *a, const struct run *b);
/* The content that the tensor has on the rank with this place in the group that it is split over. To be
 * freed. */
void *content_at(struct moe_communicator *world, const struct run *r, const struct tensor *t, int place);
/* The largest of every number over all ranks. */
void most_of_all(struct moe_communicator *world, int64_t *x, int64_t n);

/* Of the gradients of an expert's parameters in one step: */
enum gradient_verdict { PRESENT_AND_ZERO, PRESENT, ABSENT, UNINITIALISED };
extern const char *const gradient_text[];
enum gradient_verdict expert_gradient(const struct run *r, struct moe_communicator *world, int step,
                                      int expert);

#endif
