/* Plans of collectives against their closed forms on idle machines, bounds of the links, and bytes. */
#include "sim/cost/collective_nodes.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

/* A machine of 8 GPUs a node, from 80 on of 4 or 1; with nccl parameters near those of an H100, drawn a
 * factor of two around them. */
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
    t.nics_per_node = 1 << (stream / 4 % 4);
    if (stream >= 80) t.gpus_per_node = stream % 2 ? 4 : 1;
    if (t.nics_per_node > t.gpus_per_node) t.nics_per_node = t.gpus_per_node;
    if (stream % 16 > 7) t.nic_Bps = 400e9; /* channels are slower */
    t.nccl.release = moe_nccl_release(stream % 4 == 1 ? "2.10.3" : stream % 8 == 3 ? "2.30.7" : "2.27.7");
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

struct outcome {
    double plan_s, bytes;        /* bytes between different ranks */
    double busiest_s, nic_bytes; /* of the busiest link by its rate; of the busiest NIC */
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
    for (int i = 0; i < plan.n; i++) {
        const struct moe_sent *f = &plan.flow[i];
        int path[MOE_PATH_MAX], m = moe_topo_path(t, f->from, f->to, path);
        for (int l = 0; l < m; l++) link[path[l]] += (double)f->bytes;
        if (f->from != f->to) out.bytes += (double)f->bytes;
    }
    for (int l = 0; l < t->n_links; l++) {
        out.busiest_s = fmax(out.busiest_s, link[l] / t->link_Bps[l]);
        if (t->link_class[l] == MOE_LINK_NIC) out.nic_bytes = fmax(out.nic_bytes, link[l]);
    }
    free(plan.flow);
    free(link);
    free(bytes);
    free(rank);
    return out;
}

/* What must move. */
struct must {
    enum moe_algorithm algorithm;
    enum moe_protocol protocol;
    double bytes, nic_bytes; /* between different ranks; over the busiest NIC, one way */
};

/* All-reduce of S: 2 (n - 1) S, up and down a tree or around rings. Through switches n S, and for all what
 * each head has, which makes S a node, then 2 S for each edge of a tree. A NIC of a ring carries what a
 * member sends; in trees the busiest node has 2, 3 or 4 edges of S / 2. */
static struct must must(const struct moe_topo *t, enum moe_collective kind, int n, double block)
{
    bool reduce = kind == MOE_ALLREDUCE;
    int P = n < t->gpus_per_node ? n : (int)t->gpus_per_node, N = n / P;
    double R = fmin(P, (double)t->nics_per_node), ring = reduce ? 2 * (n - 1) * block / n : (n - 1) * block;
    struct must out = {MOE_ALGORITHM_RING, MOE_PROTOCOL_SIMPLE, n * ring, N > 1 ? ring / R : 0};
    if (kind == MOE_ALLTOALL) out.nic_bytes = NAN;
    if (kind == MOE_ALLTOALL || !t->nccl.release) return out;
    struct moe_nccl_case c = {kind, n, (int64_t)block * (reduce ? 1 : n), 2, true};
    if (N == 1) {
        struct moe_nccl_ring one = moe_nccl_ring(&t->nccl, &c);
        out.algorithm = one.algorithm;
        out.protocol = one.protocol;
        if (one.algorithm == MOE_ALGORITHM_NVLS) out.bytes = (n + 1) * block;
        return out;
    }
    struct moe_nccl_far far = moe_nccl_far(&t->nccl, &c, N, (int)R, t->nic_Bps);
    bool nvls = far.algorithm == MOE_ALGORITHM_NVLSTREE;
    out.algorithm = far.algorithm;
    out.protocol = far.protocol;
    if (nvls) out.bytes = (n + (P > 1 ? N : 0) + 2 * (N - 1)) * block;
    if (nvls || far.algorithm == MOE_ALGORITHM_TREE)
        out.nic_bytes = (N == 2 ? 2 : N == 3 ? 3 : 4) * block / 2 / R;
    return out;
}

/* Every collective, 2 to 32 ranks, blocks of 1 kB to 1 GB, 40 machines without NCCL's channels and 80 with.
 * Sizes are such that rails share them without a rest. Times of plans are in ps, one rounding for each flow
 * that follows another. */
static void plans_equal_closed_forms(void **state)
{
    (void)state;
    int seen[MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT] = {{0}}, far[MOE_ALGORITHM_COUNT] = {0};
    for (uint64_t stream = 0; stream < 120; stream++) {
        struct moe_topo t = machine(stream, stream >= 40);
        for (int kind = 0; kind < MOE_COLLECTIVE_COUNT; kind++)
            for (int n = 2; n <= 32; n *= 2)
                for (int64_t block = 3200; block < 2000000000; block *= 17) {
                    struct outcome o = run(&t, (enum moe_collective)kind, n, block, 2);
                    double closed_s = moe_collective_s(&t, (enum moe_collective)kind, n, block, 2, true);
                    struct must m = must(&t, (enum moe_collective)kind, n, (double)block);
                    const char *what = moe_collective_text[kind], *how = moe_algorithm_text[m.algorithm];
                    seen[m.algorithm][m.protocol]++;
                    far[m.algorithm] += n > t.gpus_per_node;
                    if (!(fabs(o.plan_s - closed_s) <= 1e-9 * closed_s + 12e-12))
                        fail_msg("machine %d, %s of %d by %s, %lld B: plan %.17g s, closed form %.17g",
                                 (int)stream, what, n, how, (long long)block, o.plan_s, closed_s);
                    if (!(o.plan_s >= o.busiest_s * (1 - 1e-12)))
                        fail_msg("%s of %d by %s: faster than its links", what, n, how);
                    if (!(fabs(o.bytes - m.bytes) <= n)) /* a ring's share of an odd number */
                        fail_msg("%s of %d by %s, %lld B: moves %.0f B, not %.0f", what, n, how,
                                 (long long)block, o.bytes, m.bytes);
                    if (fabs(o.nic_bytes - m.nic_bytes) > 1)
                        fail_msg("machine %d: %s of %d by %s, %lld B: a NIC carries %.0f B, not %.0f",
                                 (int)stream, what, n, how, (long long)block, o.nic_bytes, m.nic_bytes);
                }
        close_machine(&t);
    }
    for (int p = 0; p < MOE_PROTOCOL_COUNT; p++)
        assert_true(seen[MOE_ALGORITHM_RING][p] > 0 && seen[MOE_ALGORITHM_TREE][p] > 0);
    for (int a = 0; a < MOE_ALGORITHM_COUNT; a++) assert_true(a == MOE_ALGORITHM_NVLS || far[a] > 10);
    assert_true(seen[MOE_ALGORITHM_NVLS][MOE_PROTOCOL_SIMPLE] > 10);
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

/* 14 nodes, where the second tree is the first one mirrored, and 13, where it is shifted: what ncclGetDtree
 * of src/graph/trees.cc gives. */
static void trees_are_those_of_nccl(void **state)
{
    (void)state;
    const int even[2][14] = {{-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12},
                             {1, 5, 3, 1, 3, 13, 7, 9, 7, 5, 11, 9, 11, -1}};
    const int odd[2][13] = {{-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8},
                            {9, -1, 3, 5, 3, 9, 7, 5, 7, 1, 11, 0, 11}};
    for (int tree = 0; tree < 2; tree++) {
        for (int i = 0; i < 14; i++) assert_int_equal(moe_tree_parent(14, tree, i), even[tree][i]);
        for (int i = 0; i < 13; i++) assert_int_equal(moe_tree_parent(13, tree, i), odd[tree][i]);
    }
}

/* Of 2 to 300 nodes: both are trees no deeper than log2, and no node has more edges than an inner node of one
 * that is a leaf of the other. */
static void trees_share_the_load(void **state)
{
    (void)state;
    for (int n = 2; n <= 300; n++) {
        int edges[300] = {0}, most = 0, steps = 0;
        while (1 << steps < n) steps++;
        for (int tree = 0; tree < 2; tree++)
            for (int i = 0; i < n; i++) {
                int depth = 0, above = moe_tree_parent(n, tree, i);
                if (above >= 0) edges[i]++, edges[above]++;
                for (; above >= 0; above = moe_tree_parent(n, tree, above)) assert_true(++depth <= steps);
            }
        for (int i = 0; i < n; i++) most = edges[i] > most ? edges[i] : most;
        assert_int_equal(most, n < 4 ? n : 4);
    }
}

/* What comes in to, and goes out from, each rank. */
static void count(const struct moe_plan *plan, int64_t *in, int64_t *out)
{
    for (int i = 0; i < plan->n; i++) {
        const struct moe_sent *f = &plan->flow[i];
        if (f->from == f->to) continue;
        in[f->to] += f->bytes;
        out[f->from] += f->bytes;
    }
}

/* The blocks that flows move, a bit each. All-gather: the sender has its own and what came until the flow
 * that this one follows ended; no block comes twice. Reduce-scatter: nothing is added to what has been
 * sent. */
static void replay(const struct moe_plan *plan, enum moe_collective kind, const int64_t *own)
{
    int64_t came[10] = {0}, after[64];
    for (int i = 0; i < plan->n; i++) {
        const struct moe_sent *f = &plan->flow[i];
        int64_t has = own[f->from] | (f->after < 0 ? 0 : after[f->after]);
        if (f->after >= 0) assert_int_equal(plan->flow[f->after].to, f->from);
        if (kind == MOE_ALLGATHER) {
            assert_int_equal(f->bytes & ~has, 0);
            assert_int_equal(f->bytes & came[f->to], 0);
        }
        for (int later = i; later < plan->n && kind == MOE_REDUCESCATTER; later++)
            assert_true(plan->flow[later].to != f->from || !(plan->flow[later].bytes & f->bytes));
        after[i] = came[f->to] |= f->bytes;
    }
}

/* PAT of blocks of different sizes, some empty, on 2 to 9 nodes: a member gets each block but its own once,
 * and gives away one sum for each other. */
static void pat_moves_blocks_of_any_size(void **state)
{
    (void)state;
    struct moe_topo t = machine(82, true);
    t.nic_Bps = 400e9; /* so that NCCL takes PAT for 300 KB to 1 MB on so few nodes */
    moe_topo_build(&t, 10);
    for (int n = 2; n <= 9; n++)
        for (int kind = MOE_ALLGATHER; kind <= MOE_REDUCESCATTER; kind++) {
            struct moe_plan plan = {0};
            int rank[9];
            int64_t block[9], own[10] = {0}, in[10] = {0}, out[10] = {0}, all = 0;
            for (int i = 0; i < n; i++) rank[i] = (3 * i + 1) % 10; /* in any order */
            for (int i = 0; i < n; i++) all += own[rank[i]] = block[i] = i % 4 == 2 ? 0 : 1 << (19 - i);
            struct moe_nccl_case c = {(enum moe_collective)kind, n, all, 2, true};
            assert_int_equal(moe_nccl_far(&t.nccl, &c, n, 1, t.nic_Bps).algorithm, MOE_ALGORITHM_PAT);
            moe_collective_plan(&t, &(struct moe_moved){c.kind, n, rank, block, 2, true}, &plan);
            count(&plan, in, out);
            replay(&plan, c.kind, own);
            for (int i = 0; i < n; i++)
                assert_int_equal((kind == MOE_ALLGATHER ? in : out)[rank[i]], all - block[i]);
            free(plan.flow);
        }
    close_machine(&t);
}

/* What channels move at most, GB/s: 2 nodes of 8 H100, 12 channels, NVLS 8; constants of 2.30.7. */
static void channels_have_a_most(void **state)
{
    (void)state;
    const struct moe_nccl_graph ring = {12, 30e9, 30e9}, nvls = {8, 45e9, 48e9};
    const struct moe_nccl_machine m = {moe_nccl_release("2.30.7"), 90, 2, 8, ring, ring, nvls, true, true};
    const struct {
        enum moe_algorithm algorithm;
        enum moe_protocol protocol;
        double GBps;
    } by_hand[] = {
        {MOE_ALGORITHM_RING, MOE_PROTOCOL_LL, 39 * 16 / 30.0}, /* all channels, Intel */
        {MOE_ALGORITHM_RING, MOE_PROTOCOL_LL128, 12 * 36.7 * 16 / 30},
        {MOE_ALGORITHM_RING, MOE_PROTOCOL_SIMPLE, INFINITY},
        {MOE_ALGORITHM_TREE, MOE_PROTOCOL_LL, 39 / 2.0}, /* up and down */
        {MOE_ALGORITHM_TREE, MOE_PROTOCOL_LL128, 12 * 36.7 / 2},
        {MOE_ALGORITHM_TREE, MOE_PROTOCOL_SIMPLE, 12 * 41.4 / 2},
        {MOE_ALGORITHM_NVLSTREE, MOE_PROTOCOL_SIMPLE, 8 * 57.7 * 16 / 30},
        {MOE_ALGORITHM_PAT, MOE_PROTOCOL_SIMPLE, INFINITY},
    };
    for (size_t i = 0; i < sizeof by_hand / sizeof *by_hand; i++) {
        double most = moe_nccl_most_Bps(&m, MOE_ALLREDUCE, by_hand[i].algorithm, by_hand[i].protocol) / 1e9;
        if (!(most == by_hand[i].GBps || fabs(most - by_hand[i].GBps) < 1e-9))
            fail_msg("row %d: %.12g, not %.12g", (int)i, most, by_hand[i].GBps);
    }
    double most = moe_nccl_most_Bps(&m, MOE_ALLGATHER, MOE_ALGORITHM_RING, MOE_PROTOCOL_LL128) / 1e9;
    assert_true(fabs(most - 12 * 36.7 * 16 / 15) < 1e-9);
}

/* Large sums of 2 nodes of 8 H100: switches add up floats, not
 * integers, and not before Hopper. */
static void switches_over_nodes(void **state)
{
    (void)state;
    struct moe_topo t = machine(47, true);
    struct moe_nccl_case c = {MOE_ALLREDUCE, 16, INT64_C(4) << 30, 4, true};
    assert_int_equal(t.nccl.release->number, 22703);
    assert_int_equal(moe_nccl_far(&t.nccl, &c, 2, 8, 50e9).algorithm, MOE_ALGORITHM_NVLSTREE);
    t.nccl.release = moe_nccl_release("2.30.7");
    struct moe_nccl_far far = moe_nccl_far(&t.nccl, &c, 2, 8, 50e9);
    assert_int_equal(far.algorithm, MOE_ALGORITHM_NVLSTREE);
    assert_true(fabs(far.most_Bps - 8 * 57.7e9 * 16 / 30) < 1 && far.wire == 1);
    c.is_float = false;
    assert_int_not_equal(moe_nccl_far(&t.nccl, &c, 2, 8, 50e9).algorithm, MOE_ALGORITHM_NVLSTREE);
    c.is_float = true;
    t.nccl.arch = 80;
    assert_int_not_equal(moe_nccl_far(&t.nccl, &c, 2, 8, 50e9).algorithm, MOE_ALGORITHM_NVLSTREE);
}

/* 12 channels over NICs of 50 GB/s in all have 4.2 GB/s between nodes, rings in nodes too, trees 8.3 there,
 * which NCCL counts on two nodes. 2 x 8: 12 x 4.2 x 16/30 = 27 GB/s by rings, 12 x 8.3 x 0.92 / 2 = 46 by
 * trees. 2 x 1: 12 x 4.2 x 2 = 100 by rings, 12 x 8.3 x 0.75 = 75 by PAT. */
static void rings_are_as_slow_as_their_nics(void **state)
{
    (void)state;
    struct moe_topo t = machine(42, true);
    struct moe_nccl_case sum = {MOE_ALLREDUCE, 16, INT64_C(4) << 30, 4, true};
    struct moe_nccl_case gather = {MOE_ALLGATHER, 2, INT64_C(4) << 30, 4, true};
    assert_int_equal(moe_nccl_far(&t.nccl, &sum, 2, 4, 12.5e9).algorithm, MOE_ALGORITHM_TREE);
    assert_int_equal(moe_nccl_far(&t.nccl, &sum, 2, 8, 50e9).algorithm, MOE_ALGORITHM_RING);
    assert_int_equal(moe_nccl_far(&t.nccl, &gather, 2, 1, 50e9).algorithm, MOE_ALGORITHM_RING);
}

/* One member on each of 2 nodes of 8 NICs has one: what runs is what NCCL takes for that, also where it would
 * take another protocol for 8. */
static void a_member_has_its_own_nic(void **state)
{
    (void)state;
    struct moe_topo t = machine(44, true);
    const int rank[2] = {0, 8};
    int n_other = 0;
    t.nics_per_node = 8;
    t.nic_Bps = 5e9;
    moe_topo_build(&t, 16);
    for (int64_t bytes = 4096; bytes < 64 << 20; bytes += bytes / 16) {
        struct moe_plan plan = {0};
        struct moe_nccl_case c = {MOE_ALLREDUCE, 2, bytes, 4, true};
        struct moe_nccl_far far = moe_nccl_far(&t.nccl, &c, 2, 1, t.nic_Bps);
        n_other += moe_nccl_far(&t.nccl, &c, 2, 8, t.nic_Bps).wire != far.wire;
        moe_collective_plan(&t, &(struct moe_moved){MOE_ALLREDUCE, 2, rank, &bytes, 4, true}, &plan);
        assert_true(plan.n > 0 && plan.flow[0].wire == far.wire && plan.flow[0].delay_s == far.latency_s);
        free(plan.flow);
    }
    assert_true(n_other > 0);
    close_machine(&t);
}

/* Nodes of 8, 5, 1 and 3 members, in two orders: a sum goes up and comes down at all but one, 2 (n - 1) S in
 * all, and as much comes in as goes out. */
static void trees_of_uneven_nodes(void **state)
{
    (void)state;
    struct moe_topo t = machine(42, true);
    int rank[17], mixed[17], n = 0;
    const int sizes[] = {8, 5, 1, 3};
    const int64_t bytes = 1234567;
    for (int node = 0; node < 4; node++)
        for (int i = 0; i < sizes[node]; i++) rank[n++] = 8 * node + i;
    const int first[] = {0, 8, 13, 14}; /* of each node; then all others */
    for (int i = 0; i < 4; i++) mixed[i] = rank[first[i]];
    for (int i = 0, at = 4; i < n; i++)
        if (i != 0 && i != 8 && i != 13 && i != 14) mixed[at++] = rank[i];
    moe_topo_build(&t, 32);
    struct moe_nccl_case c = {MOE_ALLREDUCE, n, bytes, 4, true};
    assert_int_equal(moe_nccl_far(&t.nccl, &c, 4, 1, t.nic_Bps).algorithm, MOE_ALGORITHM_TREE);
    struct moe_plan plan = {0};
    int64_t in[32] = {0}, out[32] = {0}, moved = 0;
    moe_collective_plan(&t, &(struct moe_moved){MOE_ALLREDUCE, n, rank, &bytes, 4, true}, &plan);
    count(&plan, in, out);
    for (int i = 0; i < 32; i++) {
        moved += out[i];
        assert_int_equal(in[i], out[i]);
    }
    assert_int_equal(moved, 2 * (n - 1) * bytes);
    assert_true(time_of(&t, MOE_ALLREDUCE, n, rank, &bytes) == time_of(&t, MOE_ALLREDUCE, n, mixed, &bytes));
    free(plan.flow);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(plans_equal_closed_forms),
                                       cmocka_unit_test(unequal_blocks),
                                       cmocka_unit_test(nodes_of_different_sizes),
                                       cmocka_unit_test(members_out_of_order),
                                       cmocka_unit_test(trees_are_those_of_nccl),
                                       cmocka_unit_test(trees_share_the_load),
                                       cmocka_unit_test(pat_moves_blocks_of_any_size),
                                       cmocka_unit_test(trees_of_uneven_nodes),
                                       cmocka_unit_test(channels_have_a_most),
                                       cmocka_unit_test(switches_over_nodes),
                                       cmocka_unit_test(rings_are_as_slow_as_their_nics),
                                       cmocka_unit_test(a_member_has_its_own_nic),
                                       cmocka_unit_test(more_bytes_take_no_less)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
