/* NCCL's cost model: the constants against the published table, estimates and choices by hand. Derivations
 * are in the numbers: bytes per us of the wire, what the protocol leaves of it, then n / steps of n ranks. */
#include "sim/cost/nccl_tuning.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char constants[1024]; /* the file of them */

static const struct moe_nccl_release *release(const char *version)
{
    const struct moe_nccl_release *r = moe_nccl_release(version);
    if (!r) fail_msg("%s", moe_error());
    return r;
}

static void expect(double got, double by_hand, const char *what)
{
    if (!(fabs(got - by_hand) <= 1e-12 * fabs(by_hand))) fail_msg("%s: %.15g, not %.15g", what, got, by_hand);
}

/* ---- releases ---- */

static void test_release(void **state)
{
    (void)state;
    static const struct {
        const char *version;
        int number;
    } cases[] = {{"2.27.7", 22703},         {"2.27.2", 22501}, {"2.28.9+cuda13.0", 22809}, {"2.28.8", 22803},
                 {"2.30.7-1", 23003},       {"2.30.3", 23003}, {"2.99.9", 23003},          {"3.0.0", 23003},
                 {"2.5.6", 20506},          {"2.6.4", 20506},  {"2.18.1", 21701},          {"2.9.9", 20803},
                 {"2.22.3+cuda12.6", 22105}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(release(cases[i].version)->number, cases[i].number);
    static const char *const wrong[] = {"",          "2",       "2.27",   "2.27.",  "v2.27.7",
                                        "2.27.7.1",  " 2.27.7", "+2.8.3", "2.-8.3", "2.27.7rc",
                                        "2.100.111", "latest",  "2,27,7"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[128];
        snprintf(text, sizeof text,
                 "NCCL release '%s': expected three numbers, such as 2.30.3, the newest known", wrong[i]);
        assert_null(moe_nccl_release(wrong[i]));
        assert_string_equal(moe_error(), text);
    }
    assert_null(moe_nccl_release("2.5.5"));
    assert_string_equal(moe_error(),
                        "NCCL release '2.5.5': expected 2.5.6, the oldest known, or a newer one");
}

static void expect_row(const json_t *row, const double *ours, size_t n, const char *tag, const char *what)
{
    assert_int_equal(json_array_size(row), n);
    for (size_t i = 0; i < n; i++)
        if (json_number_value(json_array_get(row, i)) != ours[i])
            fail_msg("%s: %s: %.15g at %zu is not in the file", tag, what, ours[i], i);
}

static size_t known_archs(const struct moe_nccl_release *r)
{
    return (size_t)(r->newest_arch - 70) / 10 + 1;
}

/* rows [GPUs that the release knows, 3] */
static void expect_table(const json_t *rows, const double (*table)[MOE_NCCL_SCALES],
                         const struct moe_nccl_release *r, const char *tag, const char *what)
{
    assert_int_equal(json_array_size(rows), table ? known_archs(r) : 0);
    for (size_t a = 0; a < json_array_size(rows); a++)
        expect_row(json_array_get(rows, a), table[a], MOE_NCCL_SCALES, tag, what);
}

/* rows [algorithms of the release, 3], CollNet's one or two among them */
static void expect_latencies(const json_t *rows, const double (*us)[MOE_PROTOCOL_COUNT], const char *tag)
{
    static const size_t place[] = {0, 1, 4, 5, 6};
    for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
        if (place[a] < json_array_size(rows))
            expect_row(json_array_get(rows, place[a]), us[a], MOE_PROTOCOL_COUNT, tag, "latencies");
        else if (a !=
                 MOE_ALGORITHM_PAT) /* which has them from 2.28 on, the same outside of the table before */
            assert_true(us[a][MOE_PROTOCOL_SIMPLE] == 0);
}

static void expect_corrections(const json_t *rows, const struct moe_nccl_release *r, const char *tag)
{
    assert_int_equal(json_array_size(rows), r->tree_correction ? MOE_PROTOCOL_COUNT : 0);
    for (size_t p = 0; p < json_array_size(rows); p++) {
        size_t n = json_array_size(json_array_get(rows, p));
        expect_row(json_array_get(rows, p), r->tree_correction[p], n, tag, "corrections");
        assert_in_range(n, 22, MOE_NCCL_CORRECTIONS);
        if (n == 22) assert_true(r->tree_correction[p][22] == 1);
    }
}

/* Before 2.18, as C: "... = 20.0;", "... = { Volta, Ampere, Hopper };", or by collective, all-reduce last. */
static void expect_old_ll128(const json_t *text, const struct moe_nccl_release *r)
{
    double value[5];
    const char *at = strchr(json_string_value(text), '=') + 1;
    int n = 0;
    for (char *end; (at += strspn(at, " {,")), n < 5; at = end, n++) {
        value[n] = strtod(at, &end);
        if (end == at) break;
    }
    assert_true(n == 1 || n == 3 || n == 5);
    assert_ptr_equal(r->tree_ll128, r->ring_ll128);
    for (size_t a = 0; a < known_archs(r); a++)
        for (int s = 0; s < MOE_NCCL_SCALES; s++)
            assert_true(r->ring_ll128[a][s] == value[n == 3 ? (int)a : n - 1]);
}

static void expect_release(const char *tag, const json_t *c)
{
    const struct moe_nccl_release *r = release(tag + 1); /* without the v */
    const json_t *old = json_object_get(c, "ll128MaxBwPerCh"), *hw = json_object_get(c, "hwLat");
    expect_latencies(json_object_get(c, "baseLat"), r->latency[MOE_NCCL_BASE], tag);
    for (size_t h = 0; h < 3; h++)
        expect_latencies(json_array_get(hw, h), r->latency[MOE_NCCL_NVLINK + h], tag);
    expect_corrections(json_object_get(c, "treeCorrectionFactor_log2bytes_from_64B"), r, tag);
    expect_table(json_object_get(c, "llMaxBws"), r->ll, r, tag, "LL");
    expect_table(json_object_get(c, "perChMaxTreeBws"), r->tree, r, tag, "tree");
    expect_table(json_object_get(c, "perChMaxNVLSTreeBws"), r->nvlstree, r, tag, "NVLSTree");
    if (old) {
        expect_old_ll128(old, r);
    } else {
        expect_table(json_object_get(c, "perChMaxRingLL128Bws"), r->ring_ll128, r, tag, "Ring/LL128");
        expect_table(json_object_get(c, "perChMaxTreeLL128Bws"), r->tree_ll128, r, tag, "Tree/LL128");
    }
    expect_row(json_object_get(c, "nvlsEfficiency"), r->nvls_efficiency,
               r->nvls_efficiency ? MOE_NCCL_ARCHS : 0, tag, "NVLS efficiency");
}

/* Every release of the file has these constants, and every row is of one of them. */
static void test_table(void **state)
{
    (void)state;
    json_error_t error;
    json_t *file = json_load_file(constants, 0, &error), *c;
    if (!file) fail_msg("%s: %s", constants, error.text);
    const char *tag;
    const struct moe_nccl_release *last = moe_nccl_releases;
    json_object_foreach(json_object_get(file, "versions"), tag, c)
    {
        expect_release(tag, c);
        assert_in_range(release(tag + 1) - last, 0, 1);
        last = release(tag + 1);
    }
    assert_int_equal(json_object_size(json_object_get(file, "versions")), 28);
    assert_int_equal(last - moe_nccl_releases, moe_nccl_n_releases - 1);
    json_decref(file);
}

/* ---- estimates ---- */

static void expect_estimate(const struct moe_nccl_machine *m, enum moe_collective collective,
                            enum moe_algorithm algorithm, enum moe_protocol protocol, double us, double GBps)
{
    char what[128];
    snprintf(what, sizeof what, "%d: %s %s %s", m->release->number, moe_collective_text[collective],
             moe_algorithm_text[algorithm], moe_protocol_text[protocol]);
    double latency_s, rate_Bps;
    if (!moe_nccl_estimate(m, collective, algorithm, protocol, &latency_s, &rate_Bps))
        fail_msg("%s is not offered", what);
    expect(latency_s, us * 1e-6, what);
    expect(rate_Bps, GBps * 1e9, what);
}
#define EXPECT(m, collective, algorithm, protocol, us, GBps)                                                 \
    expect_estimate(m, MOE_##collective, MOE_ALGORITHM_##algorithm, MOE_PROTOCOL_##protocol, us, GBps)

/* 8 H100 on NVSwitch, as a search may find them: 12 channels of 30 GB/s, NVLS 8 of 50, 60 between nodes. */
static struct moe_nccl_machine h100(const char *version)
{
    return (struct moe_nccl_machine){release(version), 90,   1,   8, {12, 30e9, 30e9}, {12, 30e9, 30e9},
                                     {8, 50e9, 60e9},  true, true};
}

/* Several of them, with 8 NICs of 50 GB/s: 16 channels of 24. */
static struct moe_nccl_machine h100_nodes(const char *version, int nodes)
{
    struct moe_nccl_machine m = h100(version);
    m.nodes = nodes;
    m.ring = (struct moe_nccl_graph){16, 24e9, 24e9};
    m.tree = (struct moe_nccl_graph){16, 24e9, 12e9};
    m.nvls = (struct moe_nccl_graph){8, 48e9, 48e9};
    return m;
}

/* Rings and trees: 12 x 30 = 360. All-reduce takes 14 steps for 8 parts, the others 7. */
static void test_one_node(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.28.9");
    double tree = 360 * 0.92;                                               /* less than 12 x 38.7 */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 141 * 8 / 14.0);        /* less than 360 / 2 */
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 14 * 1.9, 360 * 0.92 * 8 / 14); /* less than 12 x 36.7 */
    EXPECT(&m, ALLREDUCE, RING, SIMPLE, 8.4 + 14 * 3.4, 360 * 8 / 14.0);
    EXPECT(&m, ALLREDUCE, TREE, LL, 6.8 + 14 * 0.6, tree / 3.8 / 2); /* less than 141 */
    EXPECT(&m, ALLREDUCE, TREE, LL128, 14 + 14 * 1.25, tree * 7 / 9 / 2);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 14 * 4.0, tree / 2);
    EXPECT(&m, ALLREDUCE, NVLS, SIMPLE, 25, 8 * 60 * 8 / 14.0); /* 60 < 50 x 0.85 x 7/8 x 2 = 74.375 */
    EXPECT(&m, ALLGATHER, RING, LL, 6.6 + 7 * 0.6, 141 * 8 / 7.0);
    EXPECT(&m, REDUCESCATTER, RING, SIMPLE, 8.4 + 7 * 3.4, 360 * 8 / 7.0);
    EXPECT(&m, ALLGATHER, NVLS, SIMPLE, 25, 8 * 50 * 0.85 * 7 / 8 * 7 / 8); /* 32.5 < 60 */
    m.nvls.inter_Bps = 80e9;
    EXPECT(&m, ALLREDUCE, NVLS, SIMPLE, 25, 8 * 74.375 * 8 / 14);
    m.ring.intra_Bps = m.tree.intra_Bps = 60e9; /* 720, more than the channels can */
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 14 * 1.9, 12 * 36.7 * 8 / 14);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 14 * 4.0, 12 * 38.7 / 2);
    EXPECT(&m, ALLREDUCE, TREE, LL128, 14 + 14 * 1.25, 12 * 38.7 * 7 / 9 / 2);
    m.plain_tree = true;
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 14 * 4.0, 12 * 38.7 / 2 * 0.85);
    m.nvlink = false; /* steps over PCIe */
    EXPECT(&m, ALLREDUCE, RING, SIMPLE, 8.4 + 14 * 5.7, 720 * 8 / 14.0);
}

/* The host tells LL's rate, and what a ring's step takes at least: 1 us, AMD 2, Simple thrice that. */
static void test_nodes(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100_nodes("2.28.9", 2); /* 16 x 24 = 384; 28 steps in nodes, 2 between */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 28 * 1.0 + 2 * 2.7, 39 * 16 / 30.0);
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 28 * 1.9 + 2 * 4, 384 * 0.92 * 16 / 30);
    EXPECT(&m, ALLREDUCE, RING, SIMPLE, 8.4 + 28 * 3.4 + 2 * 14, 384 * 16 / 30.0);
    EXPECT(&m, ALLREDUCE, TREE, LL, 6.8 + 2 * (7 * 0.6 + 5), 39 / 2.0);
    EXPECT(&m, ALLREDUCE, TREE, LL128, 14 + 2 * (7 * 1.25 + 8.5), 384 * 0.92 * 120 / 128 / 2);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 2 * (7 * 4.0 + 14), 384 * 0.92 / 2);
    EXPECT(&m, ALLREDUCE, NVLSTREE, SIMPLE, 25 + 2 * 20.9, 8 * 57.7 * 16 / 30); /* < 71.4, 2 x 48 */
    EXPECT(&m, ALLGATHER, RING, SIMPLE, 8.4 + 14 * 3.4 + 14, 384 * 16 / 15.0);
    m.host = MOE_NCCL_AMD;
    m.nic_latency_s = 1.5e-6; /* Simple pays it twice */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 28 * 2.0 + 2 * 4.2, 22.5 * 16 / 30);
    EXPECT(&m, ALLREDUCE, RING, SIMPLE, 8.4 + 28 * 6.0 + 2 * 17, 384 * 16 / 30.0);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 2 * (7 * 4.0 + 17), 384 * 0.92 / 2);
    EXPECT(&m, ALLREDUCE, NVLSTREE, SIMPLE, 25 + 2 * 23.9, 8 * 57.7 * 16 / 30);
    m = h100_nodes("2.28.9", 3); /* 42 steps in nodes, 4 between; trees: 16 x 12, one level */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 42 * 1.0 + 4 * 2.7, 20.4 * 24 / 46);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 2 * (7 * 4.0 + 14), 192 * 0.92 / 2);
    m = h100_nodes("2.28.9", 4); /* 56 steps in nodes, 6 between; trees: 16 x 12, two levels */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 56 * 1.0 + 6 * 2.7, 20.4 * 32 / 62);
    EXPECT(&m, ALLREDUCE, RING, SIMPLE, 8.4 + 56 * 3.4 + 6 * 14, 384 * 32 / 62.0);
    EXPECT(&m, ALLREDUCE, TREE, LL, 6.8 + 2 * (7 * 0.6 + 2 * 5), 20.4 / 2);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 2 * (7 * 4.0 + 2 * 14), 192 * 0.92 / 2);
    EXPECT(&m, ALLREDUCE, NVLSTREE, SIMPLE, 25 + 4 * 20.9, 8 * 45.5 * 32 / 62);
    m.nvls.inter_Bps = 40e9;
    EXPECT(&m, ALLREDUCE, NVLSTREE, SIMPLE, 25 + 4 * 20.9, 8 * 40 * 32 / 62.0);
    m.nvls.intra_Bps = 20e9;
    EXPECT(&m, ALLREDUCE, NVLSTREE, SIMPLE, 25 + 4 * 20.9, 8 * 20 * 0.85 * 7 / 8 * 2 * 32 / 62);
}

/* 4 nodes of one GPU: steps between nodes take a tree's latency, trees are plain. */
static void test_one_gpu_a_node(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100_nodes("2.28.9", 4);
    m.ranks_per_node = 1;
    m.ring = m.tree = (struct moe_nccl_graph){2, 48e9, 24e9};
    EXPECT(&m, ALLGATHER, PAT, SIMPLE, 8 + 2 * 14 / 3.5 + 4 * 2.8, 2 * 24 * 0.75);
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 6 * 8.5, 48 * 0.92 * 4 / 6);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 2 * 2 * 14, 48 * 0.92 * 0.85 / 2);
    m.release = release("2.23.4");
    EXPECT(&m, REDUCESCATTER, PAT, SIMPLE, 8 + 2 * 14 / 3.5 + 4 * 2.8, 2 * 24 * 0.85);
    m.release = release("2.22.3"); /* counts 8 of 6 steps between nodes */
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 - 2 * 1.9 + 8 * 4, 48 * 0.7 * 4 / 6);
}

/* The rules that releases changed, on the machines above. */
static void test_rules(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.18.3"), two = h100_nodes("2.18.3", 2), four = h100_nodes("2.18.3", 4);
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 87.7 * 8 / 14); /* less than 360 / 4 */
    EXPECT(&m, ALLREDUCE, NVLS, SIMPLE, 23, 8 * 50 * 5 / 6.0);
    EXPECT(&two, ALLREDUCE, RING, SIMPLE, 8.4 + 26 * 3.4 + 4 * 14, 384 * 16 / 30.0);
    EXPECT(&two, ALLREDUCE, NVLSTREE, SIMPLE, 23 + 2 * 19, 8 * 48 * 0.7 * 2 / 2);
    EXPECT(&four, ALLREDUCE, NVLSTREE, SIMPLE, 23 + 6 * 19, 8 * 48 * 0.7 * 4 / 6);
    m.ring.intra_Bps = 20e9; /* 240 */
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 240 / 4 * 8 / 14.0);
    EXPECT(&m, ALLGATHER, RING, LL, 6.6 + 7 * 0.6, 240 / 3 * 8 / 7.0);
    two.ring.intra_Bps = 6e9; /* 96 */
    EXPECT(&two, ALLGATHER, RING, LL, 6.6 + 14 * 1.0 + 2.7, 96 / 4 * 16 / 15.0);
    m.release = two.release = four.release = release("2.19.4");
    two.nvls.inter_Bps = four.nvls.inter_Bps = 40e9;
    EXPECT(&m, ALLREDUCE, NVLS, SIMPLE, 23, 8 * 50 * 5 / 6.0);
    EXPECT(&m, ALLGATHER, NVLS, SIMPLE, 23, 8 * 50 * 5 / 6.0);
    EXPECT(&two, ALLREDUCE, NVLSTREE, SIMPLE, 23 + 2 * 14, 8 * 40 * 5 / 6.0);
    EXPECT(&four, ALLREDUCE, NVLSTREE, SIMPLE, 23 + 4 * 14, 8 * 20 * 5 / 6.0);
    m.release = release("2.21.5");
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 240 / 2 * 8 / 14.0);
    m.release = release("2.23.4");
    EXPECT(&m, ALLGATHER, NVLS, SIMPLE, 25, 8 * 50);
    m.release = release("2.27.7");
    EXPECT(&m, ALLGATHER, NVLS, SIMPLE, 25, 8 * 50 * 7 / 8.0); /* 43.75 < 60 x 0.9 */
    m.nvls.inter_Bps = 40e9;
    EXPECT(&m, ALLGATHER, NVLS, SIMPLE, 25, 8 * 40 * 0.9);
    m.release = release("2.17.1");
    EXPECT(&m, ALLREDUCE, NVLS, SIMPLE, 40, 8 * 50 * 5 / 6.0);
    EXPECT(&m, ALLREDUCE, TREE, LL128, 4.4 + 14 * 1.25, 360 * 0.92 * 7 / 9 / 2);
    m.release = release("2.5.7"); /* no caps */
    EXPECT(&m, ALLREDUCE, RING, LL, 3.6 + 14 * 0.4, 240 / 4 * 8 / 14.0);
}

/* Blackwell on a release that does not know it is a Hopper without LL128. */
static void test_arch(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.24.3");
    m.ring.intra_Bps = m.tree.intra_Bps = 90e9;
    m.arch = 100;
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 141 * 8 / 14.0);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 14 * 4.0, 12 * 38.7 / 2);
    m.release = release("2.25.1");
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 282 * 8 / 14.0);
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 14 * 1.9, 12 * 73.4 * 8 / 14);
    EXPECT(&m, ALLREDUCE, TREE, SIMPLE, 8.4 + 14 * 4.0, 12 * 77.4 / 2);
    m.arch = 80;
    EXPECT(&m, ALLREDUCE, RING, LL, 6.6 + 14 * 0.6, 87.7 * 8 / 14);
    EXPECT(&m, ALLREDUCE, TREE, LL128, 14 + 14 * 1.25, 12 * 24 * 7 / 9 / 2.0);
    m.arch = 70;
    EXPECT(&m, ALLREDUCE, RING, LL128, 14 + 14 * 1.9, 12 * 20 * 8 / 14.0);
}

/* ---- what is offered ---- */

static bool offered(const struct moe_nccl_machine *m, enum moe_collective collective,
                    enum moe_algorithm algorithm, enum moe_protocol protocol)
{
    double latency_s = -1, rate_Bps = -1;
    bool yes = moe_nccl_estimate(m, collective, algorithm, protocol, &latency_s, &rate_Bps);
    assert_int_equal(yes, latency_s != -1);
    assert_int_equal(yes, rate_Bps != -1);
    assert_int_equal(yes, isfinite(moe_nccl_time_s(m, collective, algorithm, protocol, 1)));
    return yes;
}
#define OFFERED(m, collective, algorithm, protocol)                                                          \
    offered(m, MOE_##collective, MOE_ALGORITHM_##algorithm, MOE_PROTOCOL_##protocol)

static void test_nvls_offered(void **state)
{
    (void)state;
    static const struct {
        const char *version;
        int nodes, per_node, arch, channels, nvls, gather, tree;
    } cases[] = {
        {"2.28.9", 1, 8, 90, 8, 1, 1, 0},    {"2.28.9", 2, 8, 90, 8, 0, 0, 1},
        {"2.28.9", 1, 8, 80, 8, 0, 0, 0},    {"2.28.9", 1, 8, 90, 0, 0, 0, 0},
        {"2.27.7", 1, 8, 80, 8, 0, 0, 0},    {"2.28.9", 1, 8, 90, 1, 0, 0, 0},
        {"2.27.7", 1, 8, 90, 1, 1, 1, 0},    {"2.28.9", 1, 2, 90, 8, 0, 0, 0},
        {"2.28.9", 1, 3, 90, 8, 1, 1, 0},    {"2.29.7", 1, 2, 90, 8, 1, 1, 0},
        {"2.29.7", 1, 1, 90, 8, 0, 0, 0},    {"2.28.9", 1, 33, 100, 16, 1, 0, 0},
        {"2.28.9", 1, 32, 100, 16, 1, 1, 0}, {"2.18.3", 1, 8, 90, 8, 1, 0, 0},
        {"2.17.1", 2, 8, 90, 8, 0, 0, 0},    {"2.17.1", 1, 8, 90, 8, 1, 0, 0},
        {"2.16.5", 1, 8, 90, 8, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_nccl_machine m = h100(cases[i].version);
        m.nodes = cases[i].nodes;
        m.ranks_per_node = cases[i].per_node;
        m.arch = cases[i].arch;
        m.nvls.channels = cases[i].channels;
        assert_int_equal(OFFERED(&m, ALLREDUCE, NVLS, SIMPLE), cases[i].nvls);
        assert_int_equal(OFFERED(&m, ALLGATHER, NVLS, SIMPLE), cases[i].gather);
        assert_int_equal(OFFERED(&m, REDUCESCATTER, NVLS, SIMPLE), cases[i].gather);
        assert_int_equal(OFFERED(&m, ALLREDUCE, NVLSTREE, SIMPLE), cases[i].tree);
        assert_false(OFFERED(&m, ALLREDUCE, NVLS, LL) || OFFERED(&m, ALLREDUCE, NVLSTREE, LL128));
        assert_false(OFFERED(&m, ALLGATHER, NVLSTREE, SIMPLE));
        m.nvlink = false;
        assert_false(OFFERED(&m, ALLREDUCE, NVLS, SIMPLE) || OFFERED(&m, ALLREDUCE, NVLSTREE, SIMPLE));
    }
}

static void test_ll128_offered(void **state)
{
    (void)state;
    static const struct {
        const char *version;
        int arch, nodes, per_node, nvlink, near_nic, yes;
    } cases[] = {
        {"2.28.9", 90, 1, 8, 1, 0, 1},  {"2.28.9", 90, 1, 8, 0, 1, 0},  {"2.28.9", 90, 2, 8, 1, 1, 1},
        {"2.28.9", 90, 2, 8, 1, 0, 0},  {"2.28.9", 90, 2, 1, 0, 1, 1},  {"2.28.9", 60, 1, 8, 1, 1, 0},
        {"2.25.1", 100, 1, 8, 1, 1, 1}, {"2.24.3", 100, 1, 8, 1, 1, 0}, {"2.15.5", 90, 1, 8, 1, 1, 1},
        {"2.14.3", 90, 1, 8, 1, 1, 0},  {"2.5.7", 70, 1, 8, 1, 1, 1},   {"2.5.7", 80, 1, 8, 1, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_nccl_machine m = h100(cases[i].version);
        m.arch = cases[i].arch;
        m.nodes = cases[i].nodes;
        m.ranks_per_node = cases[i].per_node;
        m.nvlink = cases[i].nvlink;
        m.near_nic = cases[i].near_nic;
        assert_int_equal(OFFERED(&m, ALLREDUCE, RING, LL128), cases[i].yes);
        assert_int_equal(OFFERED(&m, ALLREDUCE, TREE, LL128), cases[i].yes);
        assert_true(OFFERED(&m, ALLGATHER, RING, LL) && OFFERED(&m, ALLREDUCE, TREE, SIMPLE));
        assert_false(OFFERED(&m, ALLGATHER, TREE, SIMPLE) || OFFERED(&m, ALLTOALL, RING, SIMPLE));
    }
}

static void test_pat_offered(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100_nodes("2.23.4", 4);
    assert_false(OFFERED(&m, ALLGATHER, PAT, SIMPLE));
    m.ranks_per_node = 1;
    assert_true(OFFERED(&m, ALLGATHER, PAT, SIMPLE) && OFFERED(&m, REDUCESCATTER, PAT, SIMPLE));
    assert_false(OFFERED(&m, ALLREDUCE, PAT, SIMPLE) || OFFERED(&m, ALLGATHER, PAT, LL));
    m.release = release("2.22.3");
    assert_false(OFFERED(&m, ALLGATHER, PAT, SIMPLE));
    m.ring.inter_Bps = 0; /* the search found nothing */
    assert_false(OFFERED(&m, ALLREDUCE, RING, SIMPLE));
}

/* ---- times ---- */

#define TIME_US(m, collective, algorithm, protocol, bytes)                                                   \
    (1e6 * moe_nccl_time_s(m, MOE_##collective, MOE_ALGORITHM_##algorithm, MOE_PROTOCOL_##protocol, bytes))

/* A tree's rate is corrected from 64 bytes to 512 MB, by powers of two; NVLSTree's on Blackwell with x86. */
static void test_correction(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.28.9");
    double ll = 360 * 0.92 / 3.8 / 2 * 1000, simple = 360 * 0.92 / 2 * 1000; /* bytes a us */
    static const struct {
        int64_t bytes;
        double ll, simple;
    } cases[] = {{0, 1, 1},
                 {63, 1, 1},
                 {64, 1, 0.9},
                 {1023, 1, 0.9},
                 {1024, 0.9, 0.9},
                 {1 << 18, 0.4, 0.5},
                 {(1 << 29) - 1, 1, 0.9},
                 {1 << 29, 1, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t n = cases[i].bytes;
        expect(TIME_US(&m, ALLREDUCE, TREE, LL, n), 15.2 + n / (ll * cases[i].ll), "LL");
        expect(TIME_US(&m, ALLREDUCE, TREE, SIMPLE, n), 64.4 + n / (simple * cases[i].simple), "Simple");
        expect(TIME_US(&m, ALLREDUCE, NVLS, SIMPLE, n), 25 + n / (8 * 60 * 8000 / 14.0), "NVLS");
    }
    m = h100_nodes("2.29.7", 2);
    m.arch = 100;
    double rate = 8 * 48 * 0.74 * 7 / 8 * 2 * 16 / 30 * 1000, us = 25 + 2 * 20.9; /* 62.16 < 96 */
    expect(TIME_US(&m, ALLREDUCE, NVLSTREE, SIMPLE, 1 << 18), us + (1 << 18) / (rate * 0.5), "x86");
    expect(TIME_US(&m, ALLREDUCE, NVLSTREE, SIMPLE, 1 << 29), us + (1 << 29) / (rate * 0.9), "x86, 512 MB");
    m.host = MOE_NCCL_OTHER_HOST;
    expect(TIME_US(&m, ALLREDUCE, NVLSTREE, SIMPLE, 1 << 18), us + (1 << 18) / rate, "Arm");
    m.host = MOE_NCCL_INTEL;
    m.release = release("2.28.9");
    expect(TIME_US(&m, ALLREDUCE, NVLSTREE, SIMPLE, 1 << 18), us + (1 << 18) / rate, "2.28");
}

/* 32 channels run and 16 ranks: 64 bytes for each are 32 KiB. */
static void test_plateau(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100_nodes("2.28.9", 2);
    double rate = 384 * 16 / 30.0 * 1000;
    expect(TIME_US(&m, ALLREDUCE, RING, SIMPLE, 32767), 131.6 + 32767 / rate, "below");
    expect(TIME_US(&m, ALLREDUCE, RING, SIMPLE, 32768), 131.6 * 1.4 + 32768 / rate, "from there");
    expect(TIME_US(&m, ALLREDUCE, RING, LL, 32768), 40 + 32768 / (39 * 16 / 30.0 * 1000), "LL");
    expect(TIME_US(&m, ALLGATHER, RING, SIMPLE, 1 << 20), 70 + (1 << 20) / (2 * rate), "all-gather");
    m.arch = 70;
    expect(TIME_US(&m, ALLREDUCE, RING, SIMPLE, 1 << 20), 131.6 * 1.9 + (1 << 20) / rate, "Volta");
}

/* ---- choices ---- */

static void expect_choice(const struct moe_nccl_machine *m, enum moe_collective collective, int64_t bytes,
                          enum moe_algorithm algorithm, enum moe_protocol protocol)
{
    enum moe_algorithm a = MOE_ALGORITHM_COUNT;
    enum moe_protocol p = MOE_PROTOCOL_COUNT;
    assert_true(moe_nccl_choose(m, collective, bytes, &a, &p));
    if (a != algorithm || p != protocol)
        fail_msg("%s of %lld bytes: %s %s, not %s %s", moe_collective_text[collective], (long long)bytes,
                 moe_algorithm_text[a], moe_protocol_text[p], moe_algorithm_text[algorithm],
                 moe_protocol_text[protocol]);
}
#define CHOICE(m, collective, bytes, algorithm, protocol)                                                    \
    expect_choice(m, MOE_##collective, bytes, MOE_ALGORITHM_##algorithm, MOE_PROTOCOL_##protocol)

/* Two lines latency + bytes / rate meet where the difference of latencies is that of bytes / rate. */
static int64_t meet(double us, double slow_GBps, double fast_GBps)
{
    return (int64_t)(us * 1e3 / (1 / slow_GBps - 1 / fast_GBps));
}

/* The lines are those of test_one_node. */
static void test_choices(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.28.9");
    int64_t last = meet(25 - 15.0, 141 * 8 / 14.0, 480 * 8 / 14.0);
    assert_in_range(last, 1140800, 1140900);
    CHOICE(&m, ALLREDUCE, 0, RING, LL);
    CHOICE(&m, ALLREDUCE, last, RING, LL);
    CHOICE(&m, ALLREDUCE, last + 1, NVLS, SIMPLE);
    CHOICE(&m, ALLREDUCE, INT64_C(1) << 33, NVLS, SIMPLE);
    last = meet(27.3 - 10.8, 141 * 8 / 7.0, 360 * 0.92 * 8 / 7);
    CHOICE(&m, ALLGATHER, 8, RING, LL);
    CHOICE(&m, ALLGATHER, last, RING, LL);
    CHOICE(&m, ALLGATHER, last + 1, RING, LL128);
    last = meet(32.2 - 27.3, 360 * 0.92 * 8 / 7, 360 * 8 / 7.0);
    CHOICE(&m, REDUCESCATTER, last, RING, LL128);
    CHOICE(&m, REDUCESCATTER, last + 2, RING, SIMPLE); /* at last + 1 both take the same */
    m = h100_nodes("2.28.9", 2);
    CHOICE(&m, ALLREDUCE, 8, TREE, LL);
    CHOICE(&m, ALLREDUCE, 1 << 30, NVLSTREE, SIMPLE);
    CHOICE(&m, ALLGATHER, 1 << 30, RING, SIMPLE);
    m.nvls.channels = 0;
    CHOICE(&m, ALLREDUCE, 1 << 30, RING, SIMPLE);
}

/* Nothing to run; and of equals the first. */
static void test_none_and_ties(void **state)
{
    (void)state;
    struct moe_nccl_machine m = h100("2.28.9");
    enum moe_algorithm a = MOE_ALGORITHM_COUNT;
    enum moe_protocol p = MOE_PROTOCOL_COUNT;
    assert_false(moe_nccl_choose(&m, MOE_ALLTOALL, 8, &a, &p));
    m.ranks_per_node = 1;
    assert_false(moe_nccl_choose(&m, MOE_ALLREDUCE, 8, &a, &p));
    assert_true(a == MOE_ALGORITHM_COUNT && p == MOE_PROTOCOL_COUNT);
    static const double nothing[MOE_NCCL_LATENCY_COUNT][MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT];
    struct moe_nccl_release idle = *m.release;
    idle.latency = nothing;
    m.ranks_per_node = 8;
    m.release = &idle;
    CHOICE(&m, ALLREDUCE, 0, TREE, LL);
    CHOICE(&m, ALLGATHER, 0, RING, LL);
}

/* The choice is offered and nothing is faster. More bytes take no less time: from 4, 8, 16 ... to the byte
 * before the next of these, and for what is no tree on to the next. */
static void expect_best(const struct moe_nccl_machine *m, enum moe_collective collective)
{
    double before[MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT] = {{0}};
    for (int64_t bytes = 4; bytes < INT64_C(1) << 34; bytes = bytes & 1 ? bytes + 1 : 2 * bytes - 1) {
        enum moe_algorithm best;
        enum moe_protocol protocol;
        assert_true(moe_nccl_choose(m, collective, bytes, &best, &protocol));
        double least = moe_nccl_time_s(m, collective, best, protocol, bytes);
        assert_true(isfinite(least));
        for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
            for (int p = 0; p < MOE_PROTOCOL_COUNT; p++) {
                bool corrected = a == MOE_ALGORITHM_TREE || a == MOE_ALGORITHM_NVLSTREE;
                double time = moe_nccl_time_s(m, collective, a, p, bytes);
                assert_true(time >= least);
                if (bytes & 1 || !corrected) assert_true(time >= before[a][p]);
                before[a][p] = time;
            }
    }
}

static void test_all_machines(void **state)
{
    (void)state;
    for (int r = 0; r < moe_nccl_n_releases; r++)
        for (int i = 0; i < 5 * 4 * 4; i++) {
            struct moe_nccl_machine m = h100_nodes("2.30.7", 1 << i % 5);
            m.release = &moe_nccl_releases[r];
            m.ranks_per_node = (const int[]){1, 2, 8, 72}[i / 5 % 4];
            m.arch = 70 + 10 * (i / 20);
            if (m.nodes * m.ranks_per_node == 1) continue;
            for (int c = MOE_ALLREDUCE; c <= MOE_REDUCESCATTER; c++) expect_best(&m, c);
        }
}

#define TEST(name) cmocka_unit_test(name)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_release),        TEST(test_table),         TEST(test_one_node),    TEST(test_nodes),
        TEST(test_one_gpu_a_node), TEST(test_rules),         TEST(test_arch),        TEST(test_nvls_offered),
        TEST(test_ll128_offered),  TEST(test_pat_offered),   TEST(test_correction),  TEST(test_plateau),
        TEST(test_choices),        TEST(test_none_and_ties), TEST(test_all_machines)};
    const char *folder = getenv("MOESIM_DATA");
    snprintf(constants, sizeof constants, "%s/measured/nccl_tuning_constants.json", folder ? folder : "");
    if (access(constants, R_OK) != 0) {
        puts("skip: no measured data (MOESIM_DATA)");
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
