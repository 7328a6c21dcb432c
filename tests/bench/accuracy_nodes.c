/* accuracy_nodes.c - NCCL's all-to-all over several nodes, as the simulator plans it
 * (sim/cost/collective.h): the part in the nodes, then the part between them.
 *
 * In the nodes a GPU has the numbers that calibrate found for its kind (topologies/). Fitted are those of the
 * network; what a file's rows cannot tell is the data sheet's. Both forms were chosen with all rows in view.
 *
 * pplx: perplexityai/pplx-kernels' baseline. Every EP size moves the same padded buffer, 256 experts x tokens
 * x (7168 FP8 + 56 scales of 4 B). Fitted to EP 8 and 16: port, NIC, latency between nodes.
 *
 * tutel: A100, NCCL 2.10, no PXN (collisions in sim/cost/collective.c). 4 all-to-alls of 65,536 tokens x
 * top-2 x 4,096 float32: assumed, the paper does not say the type. Fitted to 16 GPUs: the NIC. */
#include "sim/cost/collective.h"
#include "sim/cost/regress.h"
#include "tests/bench/accuracy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PORT, NIC, LATENCY, PARAMS };
enum { MOST_ROWS = 16 };

struct row {
    int ranks;
    int64_t pair_bytes;
    double time_s, repeat; /* repeat: relative standard deviation, 0: not said */
    int tokens;
};

struct nodes {
    struct moe_topo *topo;
    double repeats; /* all-to-alls in a time */
    int n;
    struct row row[MOST_ROWS];
};

static void set(struct moe_topo *t, const double *param)
{
    t->intra_Bps = t->nccl.port_Bps = param[PORT];
    t->nic_Bps = param[NIC];
    t->inter_latency_s = param[LATENCY];
}

static void predict(void *ctx, const double *param, double *out)
{
    struct nodes *x = ctx;
    set(x->topo, param);
    for (int i = 0; i < x->n; i++)
        out[i] = x->repeats *
                 moe_collective_s(x->topo, MOE_ALLTOALL, x->row[i].ranks, x->row[i].pair_bytes, 1, false);
}

static double simulated_s(struct moe_topo *t, enum moe_collective kind, int n, int64_t block)
{
    struct moe_plan plan = {0};
    int *rank = moe_alloc((size_t)n, sizeof *rank);
    int64_t *bytes = moe_alloc((size_t)n * (size_t)n, sizeof *bytes);
    for (int i = 0; i < n; i++) rank[i] = i;
    for (int i = 0; i < n * n; i++) bytes[i] = block;
    moe_topo_build(t, n);
    moe_collective_plan(t, &(struct moe_moved){kind, n, rank, bytes, 4, true}, &plan);
    double time_s = (double)moe_plan_time(t, &plan) * 1e-12;
    free(plan.flow);
    free(rank);
    free(bytes);
    return time_s;
}

/* Fits the params from `first` to `last` to the rows of at most 16 ranks, predicts the others. What rows of
 * more ranks are further off is taken from GB200, as these files have too few fitted rows to tell. */
static void fit_and_predict(struct accuracy *a, struct nodes *x, const double *start, int first, int last,
                            const char *machine)
{
    double farther = accuracy_error_of_ranks(), least[PARAMS], most[PARAMS], param[PARAMS],
           measured[MOST_ROWS];
    bool skip[MOST_ROWS] = {false};
    for (int p = 0; p < PARAMS; p++) {
        bool fitted = p >= first && p <= last;
        least[p] = fitted ? start[p] / 30 : start[p];
        most[p] = fitted ? start[p] * 30 : start[p];
    }
    for (int i = 0; i < x->n; i++) {
        measured[i] = x->row[i].time_s;
        skip[i] = x->row[i].ranks > 16;
    }
    struct moe_regress r = {.n_rows = x->n,
                            .n_params = PARAMS,
                            .measured = measured,
                            .start = start,
                            .least = least,
                            .most = most,
                            .predict = predict,
                            .ctx = x};
    moe_regress_fit(&r, skip, param);
    set(x->topo, param);
    printf("%s: port %.1f GB/s, NIC %.2f GB/s, latency %.1f us\n", machine, param[PORT] / 1e9,
           param[NIC] / 1e9, param[LATENCY] * 1e6);
    for (int i = 0; i < x->n; i++) {
        const struct row *row = &x->row[i];
        double squares = 0;
        int n = 0;
        char band[MOE_NAME];
        if (row->ranks <= 16) continue;
        for (int j = 0; j < x->n; j++)
            if (skip[j] == false && x->row[j].tokens == row->tokens)
                squares += x->row[j].repeat * x->row[j].repeat, n++;
        double half = hypot(farther * log(row->ranks / 16.0), 1.2816 * sqrt(squares / (n ? n : 1)));
        double time_s = x->repeats * simulated_s(x->topo, MOE_ALLTOALL, row->ranks, row->pair_bytes);
        snprintf(band, sizeof band, "%d ranks", row->ranks);
        accuracy_row(a, machine, "alltoall", "", row->ranks, row->pair_bytes * row->ranks, band, row->time_s,
                     time_s, time_s * exp(-half), time_s * exp(half));
    }
    for (int ranks = 32; ranks <= 256; ranks *= 2) {
        char band[MOE_NAME];
        bool there = false;
        for (int i = 0; i < x->n; i++) there |= x->row[i].ranks == ranks;
        snprintf(band, sizeof band, "%d ranks", ranks);
        if (there) accuracy_line(a, machine, "alltoall", band, 25);
    }
}

static struct moe_topo *load(const char *name)
{
    struct moe_topo *t;
    if (moe_topo_load(name, &t) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    moe_assert(t->nccl.release);
    t->nics_per_node = 8;
    return t;
}

void accuracy_pplx(struct accuracy *a)
{
    struct accuracy_csv *csv = accuracy_csv_read("pplx_kernels.csv");
    struct nodes x = {.topo = load("h100_sxm"), .repeats = 1};
    for (int i = 0; i < csv->n_rows && x.n < MOST_ROWS; i++) {
        struct row *r = &x.row[x.n];
        if (strcmp(accuracy_csv_text(csv, i, "impl"), "Torch AtA") != 0) continue;
        r->ranks = (int)accuracy_csv_number(csv, i, "ep");
        r->tokens = (int)accuracy_csv_number(csv, i, "tokens_per_gpu");
        r->pair_bytes = 256 * (int64_t)r->tokens * (7168 + 4 * 56) / r->ranks;
        r->time_s = accuracy_csv_number(csv, i, "time_us") * 1e-6;
        r->repeat = accuracy_csv_number(csv, i, "std_us") * 1e-6 / r->time_s;
        x.n++;
    }
    fit_and_predict(a, &x, (double[]){x.topo->nccl.port_Bps, 50e9, 30e-6}, PORT, LATENCY, "pplx");
    moe_topo_free(x.topo);
    accuracy_csv_free(csv);
}

void accuracy_tutel(struct accuracy *a)
{
    struct accuracy_csv *csv = accuracy_csv_read("tutel_a2a_overhead.csv");
    struct nodes x = {.topo = load("a100_sxm"), .repeats = 4};
    x.topo->nccl.release = moe_nccl_release("2.10.3");
    for (int i = 0; i < csv->n_rows && x.n < MOST_ROWS; i++) {
        struct row *r = &x.row[x.n++];
        r->ranks = (int)accuracy_csv_number(csv, i, "gpus");
        r->pair_bytes = INT64_C(65536) * 2 * 4096 * 4 / r->ranks;
        r->time_s = accuracy_csv_number(csv, i, "a2a_ms") * 1e-3;
    }
    fit_and_predict(a, &x, (double[]){x.topo->nccl.port_Bps, 25e9, 20e-6}, NIC, NIC, "tutel");
    moe_topo_free(x.topo);
    accuracy_csv_free(csv);
}

/* All-reduces of `file` on `machine`, of 64 MiB and more: below that latency decides, which is the network's
 * own. */
static void clusters_of(struct accuracy *a, const char *file, const char *machine, const char *name,
                        struct moe_topo *t)
{
    struct accuracy_csv *csv = accuracy_csv_read(file);
    for (int i = 0; i < csv->n_rows; i++) {
        int ranks = (int)accuracy_csv_number(csv, i, "gpus");
        int64_t bytes = (int64_t)accuracy_csv_number(csv, i, "bytes");
        const char *found = accuracy_csv_text(csv, i, "machine");
        if (strncmp(found, machine, strlen(machine)) != 0 || bytes < 64 << 20) continue;
        double time_s = simulated_s(t, MOE_ALLREDUCE, ranks, bytes);
        accuracy_row(a, name, accuracy_csv_text(csv, i, "op"), accuracy_csv_text(csv, i, "dtype"), ranks,
                     bytes, "all", accuracy_csv_number(csv, i, "oop_time_us") * 1e-6, time_s, NAN, NAN);
    }
    accuracy_line(a, name, NULL, NULL, 0);
    accuracy_csv_free(csv);
    moe_topo_free(t);
}

/* NICs by the files: 8 of 400 Gb/s, 32 of 100 for 8 GPUs, 4 of 100. */
void accuracy_clusters(struct accuracy *a)
{
    struct moe_topo *t = load("h100_sxm");
    t->nic_Bps = 50e9;
    clusters_of(a, "nccltests_coreweave_h100_gb200.csv", "8x8 H100", "h100 x 64", t);
    t = load("h100_sxm");
    t->nic_Bps = 50e9;
    clusters_of(a, "nccltests_aws_p4de_p5.csv", "2x p5", "h100 x 16", t);
    t = load("a100_sxm");
    t->nics_per_node = 4;
    t->nic_Bps = 12.5e9;
    clusters_of(a, "nccltests_aws_p4de_p5.csv", "2x p4de", "a100 x 16", t);
}
