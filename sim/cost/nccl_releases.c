/* nccl_releases.c - the constants of NCCL's releases; see nccl_tuning.h.
 *
 * Source: NVIDIA/nccl src/graph/tuning.cc at the tag of each row, the first with its constants; v2.30.7-1 is
 * the newest seen. CollNet's are left out. A table serves several releases where these differ only in GPUs
 * that the older ones did not know (newest_arch), or in sizes that they did not correct (factor 1). */
#include "sim/cost/nccl_tuning.h"

enum { A = MOE_ALGORITHM_COUNT, P = MOE_PROTOCOL_COUNT, N = MOE_NCCL_SCALES, C = MOE_NCCL_CORRECTIONS };

/* clang-format off */

/* us: {LL, LL128, Simple} of tree, ring, NVLS, NVLSTree, PAT. */
static const double latency_2_5[][A][P] = {
    [MOE_NCCL_BASE]   = {{4.4, 4.4,  0}, {3.6, 3.6, 8.4}},
    [MOE_NCCL_NVLINK] = {{0.5, 1.9, 28}, {0.4, 2.5, 5.7}},
    [MOE_NCCL_PCI]    = {{1.0, 1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0, 7.5, 50}, {0.9, 2.5, 6.6}},
};
static const double latency_2_7[][A][P] = {
    [MOE_NCCL_BASE]   = {{4.4, 4.4,  0}, {3.6,  10, 8.4}},
    [MOE_NCCL_NVLINK] = {{.52, 1.2, 28}, {.47, 1.9, 3.4}},
    [MOE_NCCL_PCI]    = {{1.0, 1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0, 8.5, 50}, {2.7, 4.0, 9.6}},
};
static const double latency_2_8[][A][P] = {
    [MOE_NCCL_BASE]   = {{4.4,  4.4,  0}, {3.6,  10, 8.4}},
    [MOE_NCCL_NVLINK] = {{.52, 1.25, 28}, {.47, 1.9, 3.4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 28}, {2.7, 4.0, 9.6}},
};
static const double latency_2_12[][A][P] = {
    [MOE_NCCL_BASE]   = {{4.4,  4.4,  0}, {3.6,  10, 8.4}},
    [MOE_NCCL_NVLINK] = {{.52, 1.25, 28}, {.47, 1.9, 3.4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 28}, {2.7, 4.0,  28}},
};
static const double latency_2_17[][A][P] = {
    [MOE_NCCL_BASE]   = {{4.4,  4.4,  0}, {3.6,  10, 8.4}, {0, 0, 40}},
    [MOE_NCCL_NVLINK] = {{.52, 1.25, 28}, {.47, 1.9, 3.4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 28}, {2.7, 4.0, 9.6}},
};
static const double latency_2_18[][A][P] = {
    [MOE_NCCL_BASE]   = {{6.8,   14,  0}, {6.6,  14, 8.4}, {0, 0, 23}, {0, 0, 23}},
    [MOE_NCCL_NVLINK] = {{0.6, 1.25,  4}, {0.6, 1.9, 3.4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9,  6}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 14}, {2.7, 4.0,  14}, {0, 0, 18}, {0, 0, 19}},
};
static const double latency_2_19[][A][P] = {
    [MOE_NCCL_BASE]   = {{6.8,   14,  0}, {6.6,  14, 8.4}},
    [MOE_NCCL_NVLINK] = {{0.6, 1.25, 28}, {0.6, 1.9, 3.4}, {0, 0, 23}, {0, 0, 23}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 28}, {2.7, 4.0,  14}, {0, 0, 18}, {0, 0, 14}},
};
static const double latency_2_21[][A][P] = {
    [MOE_NCCL_BASE]   = {{6.8,   14,  0}, {6.6,  14, 8.4}},
    [MOE_NCCL_NVLINK] = {{0.6, 1.25, 28}, {0.6, 1.9, 3.4}, {0, 0, 25}, {0, 0, 25}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 28}, {1.0, 2.5, 5.7}},
    [MOE_NCCL_NET]    = {{5.0,  8.5, 28}, {2.7, 4.0,  14}, {0, 0, 18}, {0, 0, 14}},
};
static const double latency_2_23[][A][P] = {
    [MOE_NCCL_BASE]   = {{6.8,   14, 8.4}, {6.6,  14, 8.4}, {0, 0,  0}, {0, 0,  0}, {8, 8,  8}},
    [MOE_NCCL_NVLINK] = {{0.6, 1.25, 4.0}, {0.6, 1.9, 3.4}, {0, 0, 25}, {0, 0, 25}, {0, 0,  4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 4.0}, {1.0, 2.5, 5.7}, {0, 0,  0}, {0, 0,  0}, {0, 0,  4}},
    [MOE_NCCL_NET]    = {{5.0,  8.5,  14}, {2.7, 4.0,  14}, {0, 0, 18}, {0, 0, 14}, {0, 0, 14}},
};
static const double latency_2_28_9[][A][P] = {
    [MOE_NCCL_BASE]   = {{6.8,   14, 8.4}, {6.6,  14, 8.4}, {0, 0,  0}, {0, 0,    0}, {8, 8,  8}},
    [MOE_NCCL_NVLINK] = {{0.6, 1.25, 4.0}, {0.6, 1.9, 3.4}, {0, 0, 25}, {0, 0,   25}, {0, 0,  4}},
    [MOE_NCCL_PCI]    = {{1.0,  1.9, 4.0}, {1.0, 2.5, 5.7}, {0, 0,  0}, {0, 0,    0}, {0, 0,  4}},
    [MOE_NCCL_NET]    = {{5.0,  8.5,  14}, {2.7, 4.0,  14}, {0, 0, 18}, {0, 0, 20.9}, {0, 0, 14}},
};

/* GB/s of all channels: LL */
static const double ll_2_8[][N]  = {{39, 39, 20.4}, {87.7, 22.5, 19}, {87.7, 22.5, 19}};
static const double ll_2_21[][N] = {{39, 39, 20.4}, {87.7, 22.5, 19}, {141, 45, 35}, {282, 90, 70}};

/* GB/s of a channel: LL128 of rings, and of trees before 2.18. Those before 2.10 are of all-reduce; NCCL had
 * others for other collectives. */
static const double ring128_2_7[][N] = {{16.7, 16.7, 16.7}, {16.7, 16.7, 16.7}};
static const double ring128_2_8[][N] = {{16.9, 16.9, 16.9}, {16.9, 16.9, 16.9}};
static const double ring128_2_10[][N] = {{20, 20, 20}, {20, 20, 20}, {20, 20, 20}};
static const double ring128_2_17[][N] = {{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {73.4, 73.4, 73.4}};
static const double ring128_2_28_9[][N] = {
    {20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {73.4, 34.6, 73.4}};
static const double ring128_2_29[][N] = {{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {40, 40, 40}};

/* GB/s of a channel: LL128 of trees */
static const double tree128_2_18[][N] = {{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 29}, {73.4, 73.4, 58}};
static const double tree128_2_28[][N] = {{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 29}, {55.6, 31.67, 20}};

/* GB/s of a channel: trees */
static const double tree_2_8[][N]  = {{26.5, 18.5, 10}, {24, 22.5, 16}};
static const double tree_2_10[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {24, 23.6, 17.8}};
static const double tree_2_17[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 33}};
static const double tree_2_18[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 36}, {77.4, 82.8, 72}};
static const double tree_2_28[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 36}, {70, 42.8, 24}};

/* GB/s of a channel: NVLSTree, which needs two nodes */
static const double nvlstree_2_28[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {0, 57.7, 45.5}, {0, 96, 43.1}};
static const double nvlstree_2_28_9[][N] = {
    {26.5, 18.5, 10}, {24, 23.6, 17.8}, {0, 57.7, 45.5}, {0, 96, 43.8}};
static const double nvlstree_2_30[][N] = {{26.5, 18.5, 10}, {24, 23.6, 17.8}, {0, 57.7, 45.5}, {0, 96, 80}};

static const double efficiency_2_28[] = {0, 0, 0.85, 0.74};

/* Factors of a tree's rate: LL, LL128, Simple; 64 B, 128 B ... 512 MB. */
static const double correction_2_7[][C] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, 1, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .5, .5, .6, .6, .7, .8, .9, 1, 1},
};
static const double correction_2_8[][C] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .5, .6, .6, .7, .7, .8, .9, .9, .92, .92, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, 1},
};
static const double correction_2_10[][C] = {
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, .9},
};

/* 2.24.3 and 2.27.3 changed rules, not constants. */
const struct moe_nccl_release moe_nccl_releases[] = {
    {20506,  70, latency_2_5},
    {20703,  80, latency_2_7, correction_2_7, NULL, ring128_2_7, ring128_2_7},
    {20803,  80, latency_2_8, correction_2_8, ll_2_8, ring128_2_8, ring128_2_8, tree_2_8},
    {21003,  80, latency_2_8, correction_2_10, ll_2_8, ring128_2_10, ring128_2_10, tree_2_10},
    {21207,  80, latency_2_12, correction_2_10, ll_2_8, ring128_2_10, ring128_2_10, tree_2_10},
    {21403,  80, latency_2_8, correction_2_10, ll_2_8, ring128_2_10, ring128_2_10, tree_2_10},
    {21501,  90, latency_2_8, correction_2_10, ll_2_8, ring128_2_10, ring128_2_10, tree_2_10},
    {21701,  90, latency_2_17, correction_2_10, ll_2_8, ring128_2_17, ring128_2_17, tree_2_17},
    {21803,  90, latency_2_18, correction_2_10, ll_2_8, ring128_2_17, tree128_2_18, tree_2_18},
    {21901,  90, latency_2_19, correction_2_10, ll_2_8, ring128_2_17, tree128_2_18, tree_2_18},
    {22105,  90, latency_2_21, correction_2_10, ll_2_21, ring128_2_17, tree128_2_18, tree_2_18},
    {22304,  90, latency_2_23, correction_2_10, ll_2_21, ring128_2_17, tree128_2_18, tree_2_18},
    {22403,  90, latency_2_23, correction_2_10, ll_2_21, ring128_2_17, tree128_2_18, tree_2_18},
    {22501, 100, latency_2_23, correction_2_10, ll_2_21, ring128_2_17, tree128_2_18, tree_2_18},
    {22703, 100, latency_2_23, correction_2_10, ll_2_21, ring128_2_17, tree128_2_18, tree_2_18},
    {22803, 100, latency_2_23, correction_2_10, ll_2_21, ring128_2_17, tree128_2_28, tree_2_28,
     nvlstree_2_28, efficiency_2_28},
    {22809, 100, latency_2_28_9, correction_2_10, ll_2_21, ring128_2_28_9, tree128_2_28, tree_2_28,
     nvlstree_2_28_9, efficiency_2_28},
    {22907, 100, latency_2_28_9, correction_2_10, ll_2_21, ring128_2_29, tree128_2_28, tree_2_28,
     nvlstree_2_28_9, efficiency_2_28},
    {23003, 100, latency_2_28_9, correction_2_10, ll_2_21, ring128_2_29, tree128_2_28, tree_2_28,
     nvlstree_2_30, efficiency_2_28},
};
/* clang-format on */
const int moe_nccl_n_releases = sizeof moe_nccl_releases / sizeof *moe_nccl_releases;
