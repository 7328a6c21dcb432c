/* nccl_tuning - NCCL's own cost model: what it expects a collective to take, and hence what it runs.
 *
 * An algorithm with a protocol takes latency + bytes / rate, both from constants of the release, the number
 * of ranks and nodes and what NCCL's search found of the machine; NCCL runs the fastest. This is its
 * expectation, not a prediction: it knows no contention. All-to-all is not in it.
 * Left out: CollNet, and with it NVLS over several nodes (both need a network that adds up); operations that
 * NCCL groups; float8; what environment variables force.
 * The rules are those of each release from 2.18 on; older ones follow 2.18's with their own constants.
 * Source: NVIDIA/nccl src/graph/tuning.cc and src/enqueue.cc at the releases' tags. */
#ifndef MOE_NCCL_TUNING_H
#define MOE_NCCL_TUNING_H

#include "sim/schedule.h"

/* clang-format off */
/* In NCCL's order, which breaks ties: the first of equals is run. */
#define MOE_ALGORITHMS(X) \
        X(TREE,     "tree")     /* all-reduce up and down a tree of nodes, chains of GPUs in them */ \
        X(RING,     "ring") \
        X(NVLS,     "nvls")     /* NVSwitches add up and multiply; one node */ \
        X(NVLSTREE, "nvlstree") /* the same in the nodes, a tree between them */ \
        X(PAT,      "pat")      /* all-gather and reduce-scatter by trees; one GPU a node */
#define MOE_PROTOCOLS(X) \
        X(LL,     "ll")     /* 4 bytes of data with 4 of flag: no fences, half the rate */ \
        X(LL128,  "ll128")  /* 120 bytes of data with 8 of flag; where 128 bytes arrive together */ \
        X(SIMPLE, "simple") /* whole chunks, then a fence */
/* Latencies of a release: once an operation; and each step over this. */
#define MOE_NCCL_LATENCIES(X) X(BASE) X(NVLINK) X(PCI) X(NET)
/* clang-format on */

#define X(name, text) MOE_ALGORITHM_##name,
enum moe_algorithm { MOE_ALGORITHMS(X) MOE_ALGORITHM_COUNT };
#undef X
#define X(name, text) MOE_PROTOCOL_##name,
enum moe_protocol { MOE_PROTOCOLS(X) MOE_PROTOCOL_COUNT };
#undef X
#define X(name) MOE_NCCL_##name,
enum moe_nccl_latency { MOE_NCCL_LATENCIES(X) MOE_NCCL_LATENCY_COUNT };
#undef X
extern const char *const moe_algorithm_text[], *const moe_protocol_text[];

enum moe_nccl_host { MOE_NCCL_INTEL, MOE_NCCL_AMD, MOE_NCCL_OTHER_HOST }; /* other: not x86 */

/* Rows of rates: Volta, Ampere, Hopper, Blackwell (compute capability 7x, 8x, 9x, 10x and more); columns: one
 * node, two, more. Columns of corrections: the powers of two from 64 bytes on. */
enum { MOE_NCCL_ARCHS = 4, MOE_NCCL_SCALES = 3, MOE_NCCL_CORRECTIONS = 24 };

/* Constants of a release and those after it up to the next row: microseconds, and GB/s (10^9) at most, of all
 * channels (ll) or of one. NULL: not in this release. */
struct moe_nccl_release {
    int number;      /* 2.18.3: 21803 */
    int newest_arch; /* newer GPUs count as this one, but do not get LL128 */
    const double (*latency)[MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT]; /* [MOE_NCCL_LATENCY_COUNT] */
    const double (*tree_correction)[MOE_NCCL_CORRECTIONS]; /* [MOE_PROTOCOL_COUNT] factors of the rate */
    const double (*ll)[MOE_NCCL_SCALES]; /* on several nodes the row is the host's: 1 for AMD, else 0 */
    const double (*ring_ll128)[MOE_NCCL_SCALES], (*tree_ll128)[MOE_NCCL_SCALES];
    const double (*tree)[MOE_NCCL_SCALES], (*nvlstree)[MOE_NCCL_SCALES];
    const double *nvls_efficiency; /* [MOE_NCCL_ARCHS] share of the NVLink rate */
};
extern const struct moe_nccl_release moe_nccl_releases[]; /* oldest first */
extern const int moe_nccl_n_releases;

/* The newest row of the table that is not newer than `version`: "2.27.7", also as NCCL's log and tags have it
 * ("2.27.7+cuda12.9", "2.27.7-1"). Errors: NULL with MOE_EINPUT recorded when it is not such a version or
 * older than the first row; the message names the nearest. */
const struct moe_nccl_release *moe_nccl_release(const char *version);

/* What the search found for a pattern, as NCCL_DEBUG_SUBSYS=GRAPH logs it: "nChannels 12, bw 30.0/30.0" (in
 * the node, between nodes). NCCL then runs two channels for each of the ring's and the tree's. NVLS takes the
 * smaller of its two rates on one node too, where the search may have raised the second. */
struct moe_nccl_graph {
    int channels;
    double intra_Bps, inter_Bps; /* of one channel */
};

struct moe_nccl_table; /* nccl_table.h */
struct moe_nccl_machine {
    const struct moe_nccl_release *release; /* borrowed */
    int arch;                               /* compute capability times 10, as 90 */
    int nodes, ranks_per_node;              /* one NVLink domain is one node */
    struct moe_nccl_graph ring, tree, nvls; /* PAT uses the tree's; nvls.channels 0: no NVLS */
    bool nvlink;                            /* the GPUs of a node meet over NVLink, else over PCIe */
    bool near_nic;   /* GPU and NIC meet in a PCIe switch (PXB at most; from Hopper on PXN does too) */
    bool plain_tree; /* the search fell back to pattern 3; with one GPU a node it always does */
    enum moe_nccl_host host;
    double nic_latency_s; /* as the network plug-in reports it; 0 for InfiniBand and sockets */
    const struct moe_nccl_table
        *table; /* borrowed: its latencies and rates in place of the model's, or NULL */
};

/* latency_s, rate_Bps: out, before the corrections by size (moe_nccl_time_s); not written when NCCL does not
 * offer this: the result is then false. The rate is of nccl-tests' size ("algbw"). */
bool moe_nccl_estimate(const struct moe_nccl_machine *m, enum moe_collective collective,
                       enum moe_algorithm algorithm, enum moe_protocol protocol, double *latency_s,
                       double *rate_Bps);

/* Seconds for `bytes` in all, nccl-tests' size: the buffer of an all-reduce, what a rank receives of an
 * all-gather, what it sends of a reduce-scatter. Result: INFINITY when NCCL does not offer this. Grows with
 * bytes, but may fall where a tree's correction rises at a power of two. */
double moe_nccl_time_s(const struct moe_nccl_machine *m, enum moe_collective collective,
                       enum moe_algorithm algorithm, enum moe_protocol protocol, int64_t bytes);

/* The most that all channels move, bytes of nccl-tests' size a second, whatever the links have: the release's
 * rates of a channel. INFINITY: it says none. */
double moe_nccl_most_Bps(const struct moe_nccl_machine *m, enum moe_collective collective,
                         enum moe_algorithm algorithm, enum moe_protocol protocol);

/* What NCCL runs: the first with the least time. Result: false when there is nothing to run (a single rank,
 * an all-to-all). */
bool moe_nccl_choose(const struct moe_nccl_machine *m, enum moe_collective collective, int64_t bytes,
                     enum moe_algorithm *algorithm, enum moe_protocol *protocol);

#endif
