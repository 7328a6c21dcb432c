/* Plans of collectives against their closed forms on idle machines, bounds of the links, and bytes. */
#include "sim/cost/collective.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

/* A machine of 8 GPUs a node; with nccl parameters near those of an H100, drawn a factor
 * of two around them. */
static struct moe_topo machine(uint64_t stream, bool nccl)
{
    struct moe_topo t = {.gpus_per_node = 8,
                         .nics_per_node = 1 << (stream % 4),
                         .memory_Bps = 3e12,
                         .intra_Bps = 370e9,
                         .nic_Bps = 50e9,
                         .intra_latency_s = 3e-6,
                         .inter_latency_s = 15e-6};
    uint64_t at = 0;
    if (!nccl) return t;
    t.nccl.release = moe_nccl_release(stream % 4 == 1 ? "2.10.3" : "2.27.7");
    t.nccl.arch = stream % 2 ? 90 : 80;
    t.nccl.nvlink = true;
    t.nccl.ring_channels = 12;
    t.nccl.ring_Bps = 30e9;
    moe_nccl_start(&t.nccl);
#define X(member, key, unit, size, start, rows) t.nccl.member *= exp2(2 * moe_uniform(1, stream, at++) - 1);
    MOE_NCCL_PARAMS(X)
#undef X
    t.intra_Bps = t.nccl.port_Bps;
    return t;
}

static void close_machine(struct moe_topo *t)
{
    free(t->link_Bps);
    free(t->link_class);
}

/* What each of n members must send to others at least, in all. */
static double least_bytes(enum moe_collective kind, int n, double bytes)
{
    return kind == MOE_ALLREDUCE ? 2 * (n - 1) * bytes : (double)n * (n - 1) * bytes;
}

struct outcome {
    double plan_s, bytes,
        busiest_s; /* bytes between different ranks; bytes of the busiest link by its rate */
    int n;
};

static struct outcome run(struct moe_topo *t, enum moe_collective kind, int n, int64_t block, int type_bytes)
{
    struct moe_plan plan = {0};
    struct outcome out = {0};
    int64_t *bytes = moe_alloc((size_t)n * (size_t)n, sizeof *bytes);
    int *rank = moe_alloc((size_t)n, sizeof *rank);
    moe_topo_build(t, n);
    double *link = moe_alloc((size_t)t->n_links, sizeof *link);
    for (int i = 0; i < n * n; i++) bytes[i] = block;
    for (int i = 0; i < n; i++) rank[i] = i;
    moe_collective_plan(t, &(struct moe_moved){kind, n, rank, bytes, type_bytes, type_bytes > 1}, &plan);
    out.plan_s = (double)moe_plan_time(t, &plan) * 1e-12;
    out.n = plan.n;
    for (int i = 0; i < plan.n; i++) {
        const struct moe_sent *f = &plan.flow[i];
        int path[MOE_PATH_MAX], m = moe_topo_path(t, f->from, f->to, path);
        for (int l = 0; l < m; l++) link[path[l]] += (double)f->bytes;
        if (f->from != f->to) out.bytes += (double)f->bytes;
    }
    for (int l = 0; l < t->n_links; l++) out.busiest_s = fmax(out.busiest_s, link[l] / t->link_Bps[l]);
    free(plan.flow);
    free(link);
    free(bytes);
    free(rank);
    return out;
}

static bool is_nvls(const struct moe_topo *t, enum moe_collective kind, int n, int64_t block)
{
    struct moe_nccl_case c = {kind, n, block, 2, true};
    return t->nccl.release && kind == MOE_ALLREDUCE && n <= 8 &&
           moe_nccl_ring(&t->nccl, &c).algorithm == MOE_ALGORITHM_NVLS;
}

/* Every collective, 2 to 32 ranks, blocks of 1 kB to 1 GB, 40 machines with NCCL's channels and 40 without.
 * Sizes are such that rings of several nodes share them without a rest. Times of plans are in ps, one
 * rounding for each flow that follows another. */
static void plans_equal_closed_forms(void **state)
{
    (void)state;
    int n_nvls = 0;
    for (uint64_t stream = 0; stream < 80; stream++) {
        struct moe_topo t = machine(stream, stream % 80 >= 40);
        for (int kind = 0; kind < MOE_COLLECTIVE_COUNT; kind++)
            for (int n = 2; n <= 32; n *= 2)
                for (int64_t block = 3200; block < 2000000000; block *= 17) {
                    struct outcome o = run(&t, (enum moe_collective)kind, n, block, 2);
                    double closed_s = moe_collective_s(&t, (enum moe_collective)kind, n, block, 2, true);
                    bool nvls = is_nvls(&t, (enum moe_collective)kind, n, block);
                    double least = nvls ? (double)n * (double)block
                                        : least_bytes((enum moe_collective)kind, n, (double)block);
                    n_nvls += nvls;
                    if (!(fabs(o.plan_s - closed_s) <= 1e-9 * closed_s + 4e-12))
                        fail_msg("machine %d, %s of %d, %lld B: plan %.17g s, closed form %.17g", (int)stream,
                                 moe_collective_text[kind], n, (long long)block, o.plan_s, closed_s);
                    if (!(o.plan_s >= o.busiest_s * (1 - 1e-12)))
                        fail_msg("%s of %d: faster than its links", moe_collective_text[kind], n);
                    if (!(fabs(o.bytes - least) <= n)) /* a ring's share of an odd number */
                        fail_msg("%s of %d, %lld B: moves %.0f B, not %.0f", moe_collective_text[kind], n,
                                 (long long)block, o.bytes, least);
                }
        close_machine(&t);
    }
    assert_true(n_nvls > 10);
}

/* All members but one have nothing for the others: what they exchange is what they have. */
static void unequal_blocks(void **state)
{
    (void)state;
    struct moe_topo t = machine(41, true);
    int rank[4] = {3, 2, 1, 0};
    int64_t block[16] = {0, 0, 5000, 0}, pair[16] = {[1] = 70000, [7] = 900, [15] = 40};
    struct moe_plan plan = {0};
    int64_t sent[4] = {0};
    moe_topo_build(&t, 4);
    moe_collective_plan(&t, &(struct moe_moved){MOE_ALLGATHER, 4, rank, block, 2, true}, &plan);
    assert_true(plan.together);
    for (int i = 0; i < plan.n; i++)
        if (plan.flow[i].from != plan.flow[i].to) sent[plan.flow[i].from] += plan.flow[i].bytes;
    assert_int_equal(sent[1], 5000); /* the third member's, passed on by all but the one before it */
    assert_int_equal(sent[2], 0);
    assert_int_equal(sent[3] + sent[0], 10000);
    moe_collective_plan(&t, &(struct moe_moved){MOE_ALLTOALL, 4, rank, pair, 2, true}, &plan);
    assert_int_equal(plan.n, 3);
    assert_false(plan.together);
    assert_true(plan.flow[0].from == 3 && plan.flow[0].to == 2 && plan.flow[0].bytes == 70000);
    assert_true(plan.flow[1].from == 2 && plan.flow[1].to == 0 && plan.flow[1].bytes == 900);
    assert_true(plan.flow[2].from == 0 && plan.flow[2].to == 0 && plan.flow[2].bytes == 40);
    int64_t none[16] = {0};
    moe_collective_plan(&t, &(struct moe_moved){MOE_REDUCESCATTER, 4, rank, none, 2, true}, &plan);
    assert_int_equal(plan.n, 0);
    free(plan.flow);
    close_machine(&t);
}

static double time_of(const struct moe_topo *t, enum moe_collective kind, int n, const int *rank,
                      const int64_t *bytes)
{
    struct moe_plan plan = {0};
    moe_collective_plan(t, &(struct moe_moved){kind, n, rank, bytes, 4, true}, &plan);
    double time_s = (double)moe_plan_time(t, &plan) * 1e-12;
    free(plan.flow);
    return time_s;
}

/* Nodes of 8 and 7, of 8 and 6, ... have as many rings as the smaller one has members, each over a NIC of its
 * own: 2 (n - 1) / n of the buffer by rings at 50 GB/s, behind 2 (n - 2) steps of 3 us and 2 of 15 us. */
static void nodes_of_different_sizes(void **state)
{
    (void)state;
    struct moe_topo t = machine(3, false);
    const int64_t bytes = INT64_C(840) << 20;
    int rank[16];
    for (int i = 0; i < 16; i++) rank[i] = i;
    moe_topo_build(&t, 16);
    for (int n = 10; n <= 16; n++) {
        double expected_s = 2.0 * (n - 1) / n * (double)bytes / (n - 8) / 50e9 + 2 * ((n - 2) * 3e-6 + 15e-6);
        double near_s = 2.0 * (n - 1) / n * (double)bytes / 370e9;
        double time_s = time_of(&t, MOE_ALLREDUCE, n, rank, &bytes);
        if (fabs(time_s - expected_s) > 1e-6 * expected_s && time_s > near_s * 1.01)
            fail_msg("%d ranks: %g s, expected %g", n, time_s, expected_s);
    }
    close_machine(&t);
}

/* Members may come in any order: the rings go through them node by node. */
static void members_out_of_order(void **state)
{
    (void)state;
    struct moe_topo t = machine(3, false);
    int rank[8] = {0, 1, 2, 3, 8, 9, 10, 11}, mixed[8] = {0, 8, 1, 9, 2, 10, 3, 11};
    int64_t bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = 8000000;
    moe_topo_build(&t, 16);
    for (int kind = MOE_ALLREDUCE; kind < MOE_COLLECTIVE_COUNT; kind++)
        assert_true(time_of(&t, (enum moe_collective)kind, 8, rank, bytes) ==
                    time_of(&t, (enum moe_collective)kind, 8, mixed, bytes));
    close_machine(&t);
}

/* A byte more to a neighbour does not make a rank's large messages quicker. */
static void more_bytes_take_no_less(void **state)
{
    (void)state;
    for (uint64_t stream = 40; stream < 80; stream++) {
        struct moe_topo t = machine(stream, true);
        int rank[16];
        int64_t bytes[256] = {[1] = INT64_C(256) << 20, [8] = INT64_C(256) << 20};
        for (int i = 0; i < 16; i++) rank[i] = i;
        moe_topo_build(&t, 16);
        double before_s = time_of(&t, MOE_ALLTOALL, 16, rank, bytes);
        for (int i = 0; i < 16; i++) {
            bool there = bytes[i] > 0;
            bytes[i]++;
            assert_true(time_of(&t, MOE_ALLTOALL, 16, rank, bytes) >= before_s * (1 - 1e-9));
            if (!there) bytes[i] = 0;
        }
        close_machine(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_equal_closed_forms), cmocka_unit_test(unequal_blocks),
        cmocka_unit_test(nodes_of_different_sizes), cmocka_unit_test(members_out_of_order),
        cmocka_unit_test(more_bytes_take_no_less)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
