/* Time and memory of one training step by number of GPUs: 16 layers, 4,096 tokens a rank, all ranks one
 * expert-parallel group on dgx_h100 nodes, every pair of ranks a different size, all flows at once. Beside it
 * one such all-to-all alone: as it is, and with the rates of all flows solved anew at every end.
 * Each line comes from a process of its own; times are user CPU time, memory is the peak.
 * Then all-reduce and all-gather alone, of equal blocks, by the algorithms of several nodes. */
#include "sim/cost/collective.h"
#include "sim/lower/lower.h"
#include "sim/simulate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LAYERS = 16, TOKENS = 4096, ROW_BYTES = 4096 };

static double user_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec;
}

/* One expert on each of n ranks, top n / 2, so that a rank sends 2,048 rows to each on average: for the k-th
 * of them, in an order of its own, a number that is different for every (rank, k). */
static int32_t rows_of(int n, int rank, int k)
{
    int wide = TOKENS / n, step = wide / n;
    return wide * k + step * ((rank + k) % n) + (k >= n / 2 ? step : 0);
}

static struct moe_routing *draw(int n)
{
    struct moe_routing *r = moe_routing_new(LAYERS, n, n, n / 2);
    for (int l = 0; l < LAYERS; l++)
        for (int rank = 0; rank < n; rank++) {
            int32_t *counts = moe_routing_counts(r, l, rank);
            for (int k = 0; k < n; k++) {
                int other = (int)(moe_uniform(1, (uint64_t)(l * n + rank), (uint64_t)k) * (k + 1));
                counts[k] = counts[other];
                counts[other] = rows_of(n, rank, k);
            }
        }
    return r;
}

/* The flows of layer 0, to the last end; returns when that is. */
static moe_ps exchange(const struct moe_topo *t, const struct moe_routing *r)
{
    struct moe_network net;
    moe_network_init(&net, t);
    for (int a = 0; a < t->n_ranks; a++)
        for (int b = 0; b < t->n_ranks; b++) {
            int64_t rows = moe_routing_counts(r, 0, a)[b];
            struct moe_sent sent = {.from = a, .to = b, .bytes = ROW_BYTES * rows, .after = -1};
            moe_network_add(&net, 0, 1, &sent, 0);
        }
    for (moe_ps end; (end = moe_network_next(&net)) != MOE_NEVER;) moe_network_end(&net, end);
    moe_ps last = net.now;
    moe_network_free(&net);
    return last;
}

struct pair {
    int n, path[MOE_PATH_MAX];
    double left;
};

/* The same, but for the copies on the device, with a system made and solved for every end; in ps. */
static double exchange_anew(const struct moe_topo *t, const struct moe_routing *r)
{
    struct pair *pair = moe_alloc((size_t)(t->n_ranks * t->n_ranks), sizeof *pair);
    double now_s = 0;
    int n = 0;
    for (int a = 0; a < t->n_ranks; a++)
        for (int b = 0; b < t->n_ranks; b++) {
            pair[n].left = (double)ROW_BYTES * moe_routing_counts(r, 0, a)[b];
            pair[n].n = moe_topo_path(t, a, b, pair[n].path);
            if (a != b && pair[n].left > 0) n++;
        }
    for (int first = 0; n > 0; pair[first] = pair[--n]) {
        struct moe_share s;
        double step_s = INFINITY;
        moe_share_init(&s, t->n_links, t->link_Bps);
        for (int f = 0; f < n; f++) moe_share_add(&s, pair[f].n, pair[f].path);
        moe_share_solve(&s);
        for (int f = 0; f < n; f++) {
            double end_s = pair[f].left / s.link[s.flow[f].server].level;
            if (end_s < step_s) first = f;
            step_s = fmin(step_s, end_s);
        }
        for (int f = 0; f < n; f++) pair[f].left -= step_s * s.link[s.flow[f].server].level;
        now_s += step_s;
        moe_share_free(&s);
    }
    free(pair);
    return 1e12 * now_s;
}

static void simulate(int n, struct moe_topo *t, const struct moe_routing *r, struct moe_sim_result *out)
{
    char text[512];
    struct moe_scenario *sc;
    struct moe_schedule *s;
    snprintf(
        text, sizeof text,
        "model: {layers: %d, hidden: 1024, ffn: 512, experts: %d, top_k: %d, heads: 16, sequence: 1024}\n"
        "layout: {ranks: %d, expert_parallel: %d}\ntokens_per_rank: %d\n",
        LAYERS, n, n / 2, n, n, TOKENS);
    if (moe_scenario_parse("scale", text, &sc) < 0 || moe_lower(sc, &s) < 0 || moe_simulate(s, r, t, out) < 0)
        moe_bug(__FILE__, __LINE__, moe_error());
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void print_line(int n)
{
    struct moe_sim_result out;
    struct moe_topo *t;
    struct rusage usage;
    if (moe_topo_load("dgx_h100", &t) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    moe_topo_build(t, n);
    struct moe_routing *r = draw(n);
    double start_s = user_s();
    simulate(n, t, r, &out);
    double step_s = user_s() - start_s;
    getrusage(RUSAGE_SELF, &usage);
    start_s = user_s();
    double end = (double)exchange(t, r);
    double one_s = user_s() - start_s;
    start_s = user_s();
    double anew = exchange_anew(t, r);
    double anew_s = user_s() - start_s;
    if (fabs(anew - end) > 1e-9 * end + 2) /* ends, and so changes of rates, are rounded to ps */
        moe_bug(__FILE__, __LINE__, "the two all-to-alls take different times");
    printf("%4d %10.3f %9lld %7.2f %7.1f %12.1f %12.1f %7.1f\n", n, (double)out.step * 1e-9,
           (long long)out.events, step_s, (double)usage.ru_maxrss / 1024, 1e3 * one_s, 1e3 * anew_s,
           anew_s / one_s);
    moe_sim_free(&out);
    moe_routing_free(r);
    moe_topo_free(t);
}

/* One collective alone, of `bytes` in all, on nodes of per_node GPUs with a NIC each. */
static void print_collective(const char *topology, int per_node, int n, enum moe_collective kind,
                             int64_t bytes)
{
    struct moe_topo *t;
    struct moe_plan plan = {0};
    if (moe_topo_load(topology, &t) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    t->gpus_per_node = per_node;
    t->nics_per_node = per_node;
    moe_topo_build(t, n);
    int *rank = moe_alloc((size_t)n, sizeof *rank);
    int64_t *block = moe_alloc((size_t)n, sizeof *block);
    for (int i = 0; i < n; i++) rank[i] = i;
    for (int i = 0; i < n; i++) block[i] = kind == MOE_ALLREDUCE ? bytes : bytes / n;
    struct moe_nccl_case c = {kind, n, bytes, 2, true};
    enum moe_algorithm how = moe_nccl_far(&t->nccl, &c, n / per_node, per_node, t->nic_Bps).algorithm;
    double start_s = user_s();
    moe_collective_plan(t, &(struct moe_moved){kind, n, rank, block, 2, true}, &plan);
    double time_ms = 1e-9 * (double)moe_plan_time(t, &plan);
    printf("%5d %-13s %-8s %11lld %7d %10.3f %7.1f\n", n, moe_collective_text[kind], moe_algorithm_text[how],
           (long long)bytes, plan.n, time_ms, 1e3 * (user_s() - start_s));
    free(plan.flow);
    free(rank);
    free(block);
    moe_topo_free(t);
}

static void print_collectives(void)
{
    printf("\n GPUs collective    by             bytes   flows         ms took ms\n");
    for (int n = 256; n <= 4096; n *= 4) {
        print_collective("a100_sxm", 8, n, MOE_ALLREDUCE, INT64_C(4) << 30);
        print_collective("a100_sxm", 8, n, MOE_ALLREDUCE, 16 << 20);
        print_collective("h100_sxm", 8, n, MOE_ALLREDUCE, INT64_C(4) << 30);
        print_collective("h100_sxm", 1, n, MOE_ALLGATHER, 1 << 20);
    }
}

int main(void)
{
    printf("GPUs    step ms    events  time s  mem MiB  all-to-all ms   anew ms   ratio\n");
    for (int n = 8; n <= 64; n *= 2) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            print_line(n);
            return 0;
        }
        int status = -1;
        if (waitpid(child, &status, 0) != child || status) return 1;
    }
    print_collectives();
    return 0;
}
