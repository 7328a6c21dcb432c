/* Topologies: the shipped files, the paths through both kinds of node, and what the loader refuses. */
#include "sim/share.h"
#include "sim/topology.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define NEAR(a, b) (fabs((a) - (b)) <= 1e-12 * (b))

static const char *const shipped[] = {"a100_sxm", "b200_sxm", "dgx_h100", "gb200", "gb200_nvl72",
                                      "h100_sxm", "h200_sxm", "hgx_4nic", "l40s",  "pcie_box"};

static struct moe_topo *load(const char *name)
{
    struct moe_topo *t;
    if (moe_topo_load(name, &t) != MOE_OK) fail_msg("%s", moe_error());
    return t;
}

static void shipped_files_load(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shipped / sizeof *shipped; i++) {
        struct moe_topo *t = load(shipped[i]);
        assert_string_equal(t->name, shipped[i]);
        moe_topo_free(t);
    }
    moe_topo_free(NULL);
    struct moe_topo *t = load("dgx_h100");
    assert_true(t->gpus_per_node == 8 && t->nics_per_node == 8 && t->intra_kind == MOE_INTRA_SWITCH);
    assert_true(t->matmul_float32_flops == 54e12 && t->matmul_float64_flops == 54e12 &&
                t->memory_Bps == 3e12);
    assert_true(NEAR(t->launch_s, 4e-6) && NEAR(t->host_sync_s, 10e-6));
    /* What is fitted stands in the place of the links' nominal rate. */
    assert_true(t->intra_Bps == t->nccl.port_Bps && t->bus_Bps == 0 && t->nic_Bps == 50e9);
    assert_true(t->intra_Bps > 0.9 * 370.8e9 && t->intra_Bps < 370.8e9);
    moe_topo_free(t);
    t = load("pcie_box");
    assert_true(t->nics_per_node == 1 && t->intra_kind == MOE_INTRA_SHARED && t->bus_Bps == 16e9);
    moe_topo_free(t);
}

static void assert_path(const struct moe_topo *t, int a, int b, const int *expected, int n)
{
    int path[MOE_PATH_MAX];
    assert_int_equal(moe_topo_path(t, a, b, path), n);
    for (int i = 0; i < n; i++) assert_int_equal(path[i], expected[i]);
}

/* 10 ranks on 2 nodes. Links: up 0..9, down 10..19, then NICs of node 0: out 20, 22, .. 34, in 21, .. 35;
 * node 1: out 36.., in 37... Rank 9 is GPU 1 of node 1. */
static void paths_through_a_switch(void **state)
{
    (void)state;
    struct moe_topo *t = load("dgx_h100");
    moe_topo_build(t, 10);
    assert_int_equal(t->n_links, 2 * 10 + 2 * 16);
    assert_path(t, 2, 7, (int[]){2, 17}, 2);
    assert_path(t, 3, 9, (int[]){26, 39}, 2);
    assert_path(t, 9, 3, (int[]){38, 27}, 2);
    assert_path(t, 9, 9, NULL, 0);
    assert_true(t->link_Bps[17] == t->intra_Bps && t->link_class[17] == MOE_LINK_INTRA);
    assert_true(t->link_Bps[26] == 50e9 && t->link_class[26] == MOE_LINK_NIC);
    assert_true(NEAR(moe_topo_latency_s(t, 2, 7), 8e-6) && NEAR(moe_topo_latency_s(t, 3, 9), 15e-6));
    assert_true(moe_topo_latency_s(t, 4, 4) == 0);
    moe_topo_free(t);
}

/* 16 ranks on 2 nodes. Links: up 0..15, down 16..31, buses 32, 33, NICs: out 34, in 35; out 36, in 37. Laid
 * out again for 8 ranks: up 0..7, down 8..15, bus 16, NIC 17, 18. */
static void paths_over_a_shared_bus(void **state)
{
    (void)state;
    struct moe_topo *t = load("pcie_box");
    moe_topo_build(t, 16);
    assert_int_equal(t->n_links, 38);
    assert_path(t, 2, 7, (int[]){2, 32, 23}, 3);
    assert_path(t, 3, 9, (int[]){3, 32, 34, 37, 33, 25}, 6);
    assert_true(t->link_Bps[33] == 16e9 && t->link_class[33] == MOE_LINK_BUS);
    moe_topo_build(t, 8);
    assert_int_equal(t->n_links, 19);
    assert_path(t, 2, 7, (int[]){2, 16, 15}, 3);
    moe_topo_free(t);
}

/* GPUs 6 and 7 of a node share its NIC 3; of 16 ranks its links are 2 * 16 + 2 * 3 and the next. */
static void pairs_share_a_nic(void **state)
{
    (void)state;
    struct moe_topo *t = load("hgx_4nic");
    moe_topo_build(t, 16);
    assert_int_equal(t->n_links, 2 * 16 + 2 * 8);
    assert_path(t, 6, 9, (int[]){38, 41}, 2);
    assert_path(t, 7, 8, (int[]){38, 41}, 2);
    assert_true(t->link_Bps[38] == 50e9);
    moe_topo_free(t);
}

/* 144 ranks in 2 racks: up 0..143, down 144..287, then NIC 0 of rack 0 at 288, of rack 1 at 288 + 2 * 72. */
static void racks_of_72(void **state)
{
    (void)state;
    struct moe_topo *t = load("gb200_nvl72");
    moe_topo_build(t, 144);
    assert_path(t, 0, 71, (int[]){0, 144 + 71}, 2);
    assert_path(t, 0, 72, (int[]){288, 288 + 144 + 1}, 2);
    assert_true(t->link_Bps[0] == 721.8e9 && t->link_Bps[288] == 50e9 && t->memory_Bps == 7.2e12);
    moe_topo_free(t);
}

/* Every GPU of a node uses one NIC, each NIC has as many GPUs as the others, give or take one. */
static void gpus_spread_over_nics(void **state)
{
    (void)state;
    static const int nic[] = {0, 0, 0, 1, 1, 1, 2, 2};
    struct moe_topo *t = load("dgx_h100");
    t->nics_per_node = 3;
    moe_topo_build(t, 16);
    for (int g = 0; g < 8; g++) assert_path(t, g, 8, (int[]){32 + 2 * nic[g], 39}, 2);
    moe_topo_free(t);
}

/* Equal all-to-all of 64 ranks, against the closed form. Inside a node 7 flows share a GPU's up link, between
 * nodes 56 flows share its NIC. */
static void alltoall_of_eight_nodes(void **state)
{
    (void)state;
    enum { R = 64 };
    struct moe_topo *t = load("dgx_h100");
    struct moe_share s;
    moe_topo_build(t, R);
    moe_share_init(&s, t->n_links, t->link_Bps);
    for (int a = 0; a < R; a++)
        for (int b = 0, path[MOE_PATH_MAX]; b < R; b++)
            if (a != b) moe_share_add(&s, moe_topo_path(t, a, b, path), path);
    moe_share_solve(&s);
    for (int a = 0, f = 0; a < R; a++) /* places are given in order */
        for (int b = 0; b < R; b++)
            if (a != b)
                assert_true(
                    NEAR(s.link[s.flow[f++].server].level, a / 8 == b / 8 ? t->intra_Bps / 7 : 50e9 / 56));
    moe_share_free(&s);
    moe_topo_free(t);
}

static const char top[] = "name: x\ngpus_per_node: 2\n";
static const char gpu[] =
    "gpu: {matmul_float32: 1 TFLOP/s, matmul_float64: 1 TFLOP/s, memory: 1 TB/s, launch: 0 us, "
    "host_sync: 0 us, source: made up}\n";
static const char intra[] = "intra: {kind: switch, bandwidth: 1 GB/s, latency: 0 us, source: made up}\n";
static const char inter[] = "inter: {nics_per_node: 1, bandwidth: 1 GB/s, latency: 0 us, source: made up}\n";

static int load_text(const char *a, const char *b, const char *c, const char *d, struct moe_topo **out)
{
    FILE *file = fopen("test_topology.tmp.yaml", "w");
    assert_non_null(file);
    fprintf(file, "%s%s%s%s", a, b, c, d);
    assert_int_equal(fclose(file), 0);
    int err = moe_topo_load("test_topology.tmp.yaml", out);
    unlink("test_topology.tmp.yaml");
    return err;
}

static void loader_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *top, *gpu, *intra, *inter, *message;
    } cases[] = {
        {"name: x\n", gpu, intra, inter, "yaml:1: key 'gpus_per_node' is missing"},
        {"name: x\ngpus_per_node: 0\n", gpu, intra, inter,
         "yaml:2: gpus_per_node: expected an integer from 1"},
        {top, "gpu: 8\n", intra, inter, "yaml:3: expected a mapping"},
        {top, gpu, intra, "", "key 'inter' is missing"},
        {top, gpu, intra, "inter: {nics_per_node: 1, bandwidth: 1 GB/s, latency: 0 us}\n",
         "yaml:5: key 'source' is missing"},
        {top, gpu, intra, "inter: {nics_per_node: 1, bandwidth: 1 GB/s, latency: 0 us, source: }\n",
         "yaml:5: source: expected a text"},
        {top, gpu, intra, "inter: {nics_per_node: 1, bandwidth: 1 GB/s, latency: 0 us, source: [a]}\n",
         "yaml:5: source: expected a text"},
        {top, gpu, intra, "inter: {nics_per_node: 1, bandwidth: 50, latency: 0 us, source: a}\n",
         "yaml:5: bandwidth: no unit in '50' (write 50 GB/s)"},
        {top, gpu, intra, "inter: {nics_per_node: 1, bandwith: 50 GB/s, latency: 0 us, source: a}\n",
         "yaml:5: unknown key 'bandwith' (did you mean 'bandwidth'?)"},
        {top, gpu, "intra: {kind: switch, bandwidth: 1 GB/s, latency: 0 us, source: a, gpus: 1}\n", inter,
         "yaml:4: unknown key 'gpus'"},
        {top, gpu, "intra: {kind: mesh, bandwidth: 1 GB/s, latency: 0 us, source: a}\n", inter,
         "yaml:4: kind: expected one of switch, shared"},
        {top, gpu, "intra: {kind: shared, bandwidth: 1 GB/s, latency: 0 us, source: a}\n", inter,
         "yaml:4: kind shared needs a bus"},
        {top, gpu, "intra: {kind: switch, bus: 1 GB/s, bandwidth: 1 GB/s, latency: 0 us, source: a}\n", inter,
         "yaml:4: kind switch has no bus"},
    };
    struct moe_topo *t;
    assert_int_equal(load_text(top, gpu, intra, inter, &t), MOE_OK);
    moe_topo_free(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(load_text(cases[i].top, cases[i].gpu, cases[i].intra, cases[i].inter, &t),
                         MOE_EINPUT);
        if (!strstr(moe_error(), cases[i].message))
            fail_msg("'%s' does not hold '%s'", moe_error(), cases[i].message);
        assert_null(t);
    }
}

/* What a file does not say of DeepEP is as on an H100. */
static void kernels_of_deepep(void **state)
{
    (void)state;
    static const struct {
        const char *block, *message;
    } cases[] = {
        {"deepep: {sms: 8}\n", "yaml:6: key 'source' is missing"},
        {"deepep: {sms: 1, source: a}\n", "yaml:6: sms: expected an integer from 2"},
        {"deepep: {one_node: {combin: {}}, source: a}\n",
         "yaml:6: unknown key 'combin' (did you mean 'combine'?)"},
        {"deepep: {nodes: {dispatch: {strat: 1 us}}, source: a}\n",
         "yaml:6: unknown key 'strat' (did you mean 'start'?)"},
        {"deepep: {nodes: {dispatch: {sm: 3 us}}, source: a}\n", "yaml:6: sm: "},
        {"deepep: {nodes: {combine: {serial: 101 %}}, source: a}\n", "yaml:6: serial: "},
        {"deepep: {nodes: {error: 8}, source: a}\n", "yaml:6: error: no unit in '8'"},
    };
    struct moe_topo *t;
    char text[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(text, sizeof text, "%s%s", inter, cases[i].block);
        assert_int_equal(load_text(top, gpu, intra, text, &t), MOE_EINPUT);
        if (!strstr(moe_error(), cases[i].message))
            fail_msg("'%s' does not hold '%s'", moe_error(), cases[i].message);
    }
    struct moe_deepep expected = moe_deepep_default;
    assert_int_equal(load_text(top, gpu, intra, inter, &t), MOE_OK);
    assert_memory_equal(&t->deepep, &expected, sizeof expected);
    moe_topo_free(t);
    snprintf(text, sizeof text,
             "%sdeepep: {sms: 24, one_node: {combine: {start: 0.000025 s, serial: 50 %%}, error: 25 %%},\n"
             "  nodes: {dispatch: {sm: 2000000000 B/s}}, source: made up}\n",
             inter);
    assert_int_equal(load_text(top, gpu, intra, text, &t), MOE_OK);
    expected.sms = 24;
    expected.one_node.kernel[1].start_s = 0.000025;
    expected.one_node.kernel[1].serial = 0.5;
    expected.one_node.error = 0.25;
    expected.nodes.kernel[0].sm_Bps = 2e9;
    assert_memory_equal(&t->deepep, &expected, sizeof expected);
    moe_topo_free(t);
    t = load("h100_sxm");
    assert_true(t->deepep.one_node.error > 0 && t->deepep.nodes.error == 0);
    moe_topo_free(t);
}

/* A file says all of low-latency and one-sided kernels, or nothing; of the latter rates may be without limit.
 * */
static void kernels_without_defaults(void **state)
{
    (void)state;
#define LOW "start: 14 us, remote: 2 us, expert: 20 ns, copy: 300 GB/s"
    static const struct {
        const char *block, *message;
    } cases[] = {
        {"deepep_low_latency: {dispatch: {" LOW ", serial: 12 %}, combine: {" LOW ", serial: 12 %}}\n",
         "yaml:6: key 'source' is missing"},
        {"deepep_low_latency: {dispatch: {" LOW ", serial: 12 %}, source: a}\n",
         "yaml:6: key 'combine' is missing"},
        {"deepep_low_latency: {dispatch: {" LOW "}, combine: {" LOW "}, source: a}\n",
         "yaml:6: key 'serial' is missing"},
        {"deepep_low_latency: {dispatch: {" LOW ", serial: 101 %}, combine: {}, source: a}\n",
         "yaml:6: serial: "},
        {"nvlink_one_sided: {dispatch: {target: 1 us}, combine: {start: 1 us}, source: a}\n",
         "yaml:6: key 'start' is missing"},
        {"nvlink_one_sided: {dispatch: {start: 1 us, link: 3 us}, combine: {start: 1 us}, source: a}\n",
         "yaml:6: link: "},
        {"nvlink_onesided: {source: a}\n",
         "unknown key 'nvlink_onesided' (did you mean 'nvlink_one_sided'?)"},
    };
    struct moe_topo *t;
    char text[640];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(text, sizeof text, "%s%s", inter, cases[i].block);
        assert_int_equal(load_text(top, gpu, intra, text, &t), MOE_EINPUT);
        if (!strstr(moe_error(), cases[i].message))
            fail_msg("'%s' does not hold '%s'", moe_error(), cases[i].message);
    }
    snprintf(text, sizeof text,
             "%sdeepep_low_latency: {dispatch: {" LOW
             ", serial: 12 %%}, nodes_error: 25 %%, one_node_error: 5 %%,\n"
             "  combine: {start: 3 us, remote: 1 us, expert: 1 ns, copy: 2 GB/s, serial: 50 %%}, source: "
             "made up}\n"
             "nvlink_one_sided: {dispatch: {start: 9 us, row: 5 ns}, combine: {start: 8 us, target: 1 us,\n"
             "  token: 2 ns, pair: 4 GB/s, link: 6 GB/s}, error: 75 %%, source: made up}\n",
             inter);
    assert_int_equal(load_text(top, gpu, intra, text, &t), MOE_OK);
    const struct moe_low_latency low = {{{14e-6, 2e-6, 20e-9, 300e9, 0.12}, {3e-6, 1e-6, 1e-9, 2e9, 0.5}},
                                        {0.05, 0.25}};
    const struct moe_one_sided one = {{{9e-6, 0, 0, 5e-9, 0, 0}, {8e-6, 1e-6, 2e-9, 0, 4e9, 6e9}}, 0.75};
    const double *want = (const double *)&low, *have = (const double *)&t->low_latency;
    for (size_t i = 0; i < sizeof low / sizeof *want; i++) assert_true(fabs(have[i] / want[i] - 1) < 1e-12);
    want = (const double *)&one;
    have = (const double *)&t->one_sided;
    for (size_t i = 0; i < sizeof one / sizeof *want; i++)
        assert_true(fabs(have[i] - want[i]) <= 1e-12 * want[i]);
    moe_topo_free(t);
    t = load("h100_sxm");
    assert_true(t->low_latency.kernel[0].copy_Bps > 0 && t->one_sided.kernel[0].start_s == 0);
    moe_topo_free(t);
}
#undef LOW

static const char host[] = "host: {cores: 2, slice: 3 ms, scalar: 5 GFLOP/s, call: 1 us, source: made up}\n";

static void a_host_has_cores(void **state)
{
    (void)state;
    struct moe_topo *t;
    char both[512];
    snprintf(both, sizeof both, "%s%s", inter, host);
    assert_int_equal(load_text(top, gpu, intra, both, &t), MOE_OK);
    assert_string_equal(t->source, "made up");
    assert_true(t->cores == 2 && NEAR(t->slice_s, 3e-3) && t->scalar_flops == 5e9 && NEAR(t->call_s, 1e-6));
    moe_topo_free(t);
    assert_int_equal(load_text(top, gpu, intra, inter, &t), MOE_OK);
    assert_int_equal(t->cores, 0);
    moe_topo_free(t);
    snprintf(both, sizeof both, "%shost: {cores: 0, source: a}\n", inter);
    assert_int_equal(load_text(top, gpu, intra, both, &t), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "yaml:6: cores: expected an integer from 1"));
    snprintf(both, sizeof both,
             "%shost: {cores: 1, slice: 1e-8 us, scalar: 5 GFLOP/s, call: 1 us, source: a}\n", inter);
    assert_int_equal(load_text(top, gpu, intra, both, &t), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "yaml:6: slice: expected 1 us or more, not '1e-8 us'"));
}

/* What a block nccl leaves out stands where a fit starts, unless it was fitted; port is
 * what the links have. */
static void a_machine_has_channels(void **state)
{
    (void)state;
    static const char facts[] =
        "version: 2.27.7, arch: 90, links: nvlink, ring_channels: 12, ring_channel: 30 GB/s";
    static const struct {
        const char *rest, *message;
    } cases[] = {
        {", p2p_small: 2000 %, source: a}\n", "yaml:6: p2p_small: '2000 %' is too much"},
        {", fitted: ring/ll, source: a}\n", "yaml:6: nccl is fitted, but has no ll_base"},
        {", fitted: ring/lll, source: a}\n", "yaml:6: nccl is fitted"},
        {", port: 300, source: a}\n", "yaml:6: port: no unit in '300' (write 300 GB/s)"},
        {", ll_bas: 3 us, source: a}\n", "yaml:6: unknown key 'll_bas' (did you mean 'll_base'?)"},
        {", source: a}\nexperts: {source: a}\n", "yaml:7: experts needs a block gemm"},
        {", source: a}\ngemm: {sms: 132, shared: 1 KiB, peak: 1 TFLOP/s, peak_memory: 1 TB/s, shared_rate: 1 "
         "TB/s,"
         " launch: 1 us, step: 1 us, matmul_share: 200 %}\n",
         "yaml:7: matmul_share: '200 %' is too much"},
    };
    struct moe_topo *t;
    char both[1024];
    snprintf(both, sizeof both, "%snccl: {%s, ll_step: 2 us, p2p_large: 5 %%, source: a}\n", inter, facts);
    assert_int_equal(load_text(top, gpu, intra, both, &t), MOE_OK);
    assert_true(t->nccl.release && t->nccl.arch == 90 && t->nccl.nvlink && t->nccl.ring_channels == 12);
    assert_true(NEAR(t->nccl.ll_step_s, 2e-6) && NEAR(t->nccl.ll_base_s, 6e-6));
    assert_true(NEAR(t->nccl.error[MOE_NCCL_P2P][2], 0.05) && NEAR(t->intra_Bps, 0.94 * 360e9));
    moe_topo_free(t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(both, sizeof both, "%snccl: {%s%s", inter, facts, cases[i].rest);
        assert_int_equal(load_text(top, gpu, intra, both, &t), MOE_EINPUT);
        if (!strstr(moe_error(), cases[i].message))
            fail_msg("'%s' does not hold '%s'", moe_error(), cases[i].message);
    }
}

static void names_are_looked_up(void **state)
{
    (void)state;
    struct moe_topo *t;
    assert_int_equal(moe_topo_load("dgx_h10", &t), MOE_EINPUT);
    assert_non_null(strstr(moe_error(), "unknown topology 'dgx_h10' in "));
    assert_non_null(strstr(moe_error(), ", did you mean dgx_h100"));
    assert_int_equal(moe_topo_load("nowhere/dgx_h100.yaml", &t), MOE_EINPUT);
    assert_string_equal(moe_error(), "nowhere/dgx_h100.yaml: cannot be read: No such file or directory");
    char *name = moe_alloc(100000, 1);
    memset(name, 'x', 99999);
    assert_int_equal(moe_topo_load(name, &t), MOE_EINPUT);
    assert_string_equal(moe_error(), "the name of the topology is too long");
    free(name);
    setenv("MOESIM_TOPOLOGIES", "nowhere", 1);
    assert_int_equal(moe_topo_load("dgx_h100", &t), MOE_EINPUT);
    assert_string_equal(moe_error(), "unknown topology 'dgx_h100' in nowhere");
    unsetenv("MOESIM_TOPOLOGIES");
    moe_topo_free(load("dgx_h100"));
}

int main(void)
{
    unsetenv("MOESIM_TOPOLOGIES");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped_files_load),
        cmocka_unit_test(paths_through_a_switch),
        cmocka_unit_test(paths_over_a_shared_bus),
        cmocka_unit_test(gpus_spread_over_nics),
        cmocka_unit_test(alltoall_of_eight_nodes),
        cmocka_unit_test(loader_refuses),
        cmocka_unit_test(kernels_without_defaults),
        cmocka_unit_test(kernels_of_deepep),
        cmocka_unit_test(a_host_has_cores),
        cmocka_unit_test(a_machine_has_channels),
        cmocka_unit_test(names_are_looked_up),
        cmocka_unit_test(pairs_share_a_nic),
        cmocka_unit_test(racks_of_72),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
