/* topology - the machine: GPUs, the links between them, and the path a flow takes.
 *
 * Read from YAML (topologies/ holds examples). Ranks fill nodes in order: rank r is GPU r % gpus_per_node of
 * node r / gpus_per_node. Sizes met: 1 to 2,048 nodes of 1 to 72 GPUs.
 *
 *   name: dgx_h100
 *   gpus_per_node: 8
 *   gpu:     {matmul_float32: 54 TFLOP/s, matmul_float64: 54 TFLOP/s, matmul_bfloat16: 794 TFLOP/s,
 *             memory: 3 TB/s, launch: 4 us, host_sync: 10 us, error: 15 %, source: ...}
 *   intra:   {kind: switch | shared, bandwidth: 370.8 GB/s, bus: 16 GB/s, latency: 8 us, source: ...}
 *   inter:   {nics_per_node: 8, bandwidth: 50 GB/s, latency: 15 us, source: ...}
 *   nccl:    {version: 2.27.7, arch: 90, ring_channels: 12, ring_channel: 30 GB/s, links: nvlink | pcie,
 *             ll_base: 4.7 us, ... (nccl.h), p2p_small: 8 %, ... ring_large: 10 %, fitted: ring/ll,
 *             tuning: 8 allreduce ring/ll 15 us 80.6 GB/s, ..., source: ...}
 *   gemm:    {sms: 132, shared: 227 KiB, peak: 989 TFLOP/s, peak_memory: 3.35 TB/s, shared_rate: 33 TB/s,
 *             launch: 2.5 us, ... (gemm.h), source: ...}
 *   experts: {memory_share: 95 %, ... (gemm.h), source: ...}
 *   deepep:  {sms: 20, one_node: {dispatch: {start: 22.6 us, ... (deepep_numbers.h)}, combine: {...},
 *             error: 8 %}, nodes: {dispatch: {...}, combine: {...}}, source: ...}
 *   deepep_low_latency: {dispatch: {start: 14.6 us, ... (deepep_numbers.h)}, combine: {...},
 *             one_node_error: 8 %, nodes_error: 10 %, source: ...}
 *   nvlink_one_sided: {dispatch: {start: 12.8 us, ... (onesided_numbers.h)}, combine: {...}, error: 8 %,
 *             source: ...}
 *   host:    {cores: 2, slice: 3 ms, scalar: 5 GFLOP/s, call: 1 us, source: ...}
 *
 * All keys are required but for error, bus (of kind shared only), matmul_bfloat16 where it is not used, and
 * the blocks from nccl on; source says where the numbers of its block come from. error, in gpu, gemm,
 * intra and inter: half of the interval that holds 80 % of measurements.
 *
 * kind switch: each GPU has an up and a down link of `bandwidth` to a non-blocking switch (NVSwitch).
 *
 * kind shared: these links end at the node's one bus of `bus` (a PCIe root), as do its NICs; what enters or
 * leaves a GPU crosses it once, whatever the direction.
 *
 * Between nodes a flow leaves by the NIC of its source GPU (GPU g uses NIC g * nics / gpus_per_node), crosses
 * a non-blocking fabric, and enters by the NIC of its target GPU; with kind switch the NICs are next to their
 * GPUs and such a flow does not load the switch.
 *
 * nccl: how NCCL's collectives do on one node. Parameters that are left out stand where a fit would start
 * (moesim calibrate writes them all); port takes the place of intra's bandwidth. Percentages are of its fit,
 * as error, by class and size (below 64 KiB, 2 MiB, the rest). tuning: what NCCL's log says of its own cost
 * model (nccl_table.h).
 *
 * gemm: how long bfloat16 products take, by tiles and waves; experts: those of a group. Without them, and for
 * other types, a kernel is the slower of its arithmetic and its memory.
 *
 * deepep: its normal kernels, on one node and over several; what is left out is as on an H100. As their error
 * counts the largest 90th percentile of measured rows that were not fitted, since all those are of even
 * traffic.
 *
 * deepep_low_latency, nvlink_one_sided: kernels that the machine has numbers of; without the block it cannot
 * run them. All parameters are said; those of nvlink_one_sided that are left out limit nothing.
 *
 * host: the ranks are processes that take turns of `slice` (1 us or more) on the `cores` of their node.
 * Operations of a rank run one after the other; a kernel needs a core, and so does a rank to leave a
 * collective. A kernel lasts `call` (for each of its products), and its products at matmul, its other
 * arithmetic at scalar, its bytes at memory, one after the other. Without host a rank is a GPU. */
#ifndef MOE_TOPOLOGY_H
#define MOE_TOPOLOGY_H

#include "sim/cost/deepep_numbers.h"
#include "sim/cost/gemm.h"
#include "sim/cost/nccl.h"
#include "sim/cost/onesided_numbers.h"

#include <limits.h>

/* clang-format off */
#define MOE_LINK_CLASSES(X) X(INTRA, "intra-node") X(BUS, "node bus") X(NIC, "inter-node")
/* clang-format on */
#define X(name, text) MOE_LINK_##name,
enum moe_link_class { MOE_LINK_CLASSES(X) MOE_LINK_CLASS_COUNT };
#undef X
extern const char *const moe_link_class_text[];

enum moe_intra_kind { MOE_INTRA_SWITCH, MOE_INTRA_SHARED };

struct moe_topo {
    char name[MOE_NAME];
    char *source; /* of gpu, as the file says; NULL: not from a file */
    int64_t gpus_per_node, nics_per_node;
    enum moe_intra_kind intra_kind;
    double matmul_float32_flops, matmul_float64_flops; /* dense matrix rate that is reached, FLOP/s */
    double matmul_bfloat16_flops;                      /* 0: not said */
    double memory_Bps;                                 /* device memory rate that is reached */
    double launch_s;                                   /* host time to issue one operation */
    double host_sync_s;        /* device to host copy of a few counts, and the wake-up */
    double intra_Bps, bus_Bps; /* one direction of one GPU; the whole bus of a node */
    double nic_Bps;            /* one direction of one NIC */
    int64_t cores;             /* of a node of a host; 0: ranks are GPUs, and the next three are not set */
    double slice_s, scalar_flops, call_s;
    double intra_latency_s, inter_latency_s;
    /* How far off kernels, and collectives in and between nodes, may be with 80 % probability, as a
     * logarithm; 0: not known. In a node nccl says it itself. */
    double kernel_error, intra_error, inter_error;
    double gemm_error;    /* of kernels, where bfloat16 is what is multiplied */
    struct moe_nccl nccl; /* without release: not set */
    struct moe_deepep deepep;
    struct moe_low_latency low_latency;
    struct moe_one_sided one_sided;
    struct moe_gpu gpu;              /* without SMs: not set, nor are the next two */
    struct moe_gemm gemm;            /* of bfloat16 products */
    struct moe_grouped experts;      /* of those of a group; without launch: not set */
    int n_ranks, n_links;            /* set by moe_topo_build */
    double *link_Bps;                /* [n_links] */
    enum moe_link_class *link_class; /* [n_links] */
};

enum { MOE_PATH_MAX = 6 };

/* Loads the file, or, when `name` has no '/' and no ".yaml", NAME.yaml of the folder MOESIM_TOPOLOGIES
 * (default: the folder set at configure time). Errors: MOE_EINPUT "file:line: ..."; an unknown name lists the
 * nearest. */
int moe_topo_load(const char *name, struct moe_topo **out);
int moe_topo_file(const char *name, char path[PATH_MAX]); /* which file that is; it need not be there */
void moe_topo_free(struct moe_topo *t);

/* Lays out the links for n_ranks ranks, whatever was laid out before; the last node may be partly filled.
 * Result: n_ranks, n_links, link_Bps, link_class. Cost: O(ranks). */
void moe_topo_build(struct moe_topo *t, int n_ranks);

/* Links that a flow from rank a to rank b crosses, in this order. path [MOE_PATH_MAX]; returns their number,
 * 0 when a == b (a copy on the device, bounded by memory_Bps, not by a link). */
int moe_topo_path(const struct moe_topo *t, int a, int b, int path[MOE_PATH_MAX]);
double moe_topo_latency_s(const struct moe_topo *t, int a, int b); /* 0 when a == b */

#endif
