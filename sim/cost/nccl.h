/* nccl - how long NCCL's channels take on one node: the parameters, and the parts of a collective's time.
 *
 * A channel is a block of threads of a GPU that moves one share of a collective. What it moves a second is
 * its own, whatever the links allow; so are the latencies of a launch, of a step of a ring and of a peer.
 * NCCL runs the algorithm and protocol that its own cost model (nccl_tuning.h) expects to be fastest, by the
 * table of its log for so many GPUs where there is one (nccl_table.h).
 *
 * A ring has n - 1 steps, an all-reduce 2 (n - 1). In each a GPU hands on a block of S / n, split over the
 * channels, x bytes each:
 *
 *   LL, LL128  base + steps (step + max(x / channel, wire x channels / port)) + x / channel; twice the rate
 *              of a channel where a step adds up, since it writes once, and a step that hands on twice
 *   Simple     base + steps (hop + max(sync + x / channel, x channels / port)) + the last block
 *   NVLS       base + (S + what fills the pipeline) / (the switch's share of the port)
 *
 * In an all-to-all (point to point) peers share 32 channels, parts of 64 KiB each, x = b / parts:
 *
 *   LL         base + peers' latency + x / channel
 *   Simple     the same and a set-up for each part + max(x / channel, bytes / port), and what nothing
 *              overlaps of the first chunk
 *
 * Here are the numbers that do not depend on who else uses a link; plans of flows are in collective.h. Sizes
 * met: 2 to 8 ranks (GB200 4) of 512 B to 512 MiB, for which it was made (tests/bench/accuracy.sh). */
#ifndef MOE_NCCL_H
#define MOE_NCCL_H

#include "sim/cost/nccl_table.h"

/* clang-format off */
/*        member         key in the topology  unit, its size  before it is fitted; what would tell it */
#define MOE_NCCL_PARAMS(X) \
        /* launch to end of a collective without steps */ \
        X(ll_base_s,     "ll_base",        "us",   1e-6, 6,    "collectives below 4 KiB") \
        /* each step; NCCL's own value: 0.6 */ \
        X(ll_step_s,     "ll_step",        "us",   1e-6, 0.8,  "rings below 4 KiB of 2 and 4 GPUs") \
        X(ll_Bps,        "ll_channel",     "GB/s", 1e9,  7,    "rings of 16 to 256 KiB") \
        X(ll128_Bps,     "ll128_channel",  "GB/s", 1e9,  10,   "rings for which NCCL takes LL128") \
        X(simple_base_s, "simple_base",    "us",   1e-6, 12,   "rings of 1 to 8 MiB") \
        /* of a step; other channels use the wire meanwhile */ \
        X(simple_sync_s, "simple_sync",    "us",   1e-6, 4,    "rings of 4 to 64 MiB") \
        X(simple_Bps,    "simple_channel", "GB/s", 1e9,  30,   "rings of 8 to 128 MiB") \
        /* for a second block of threads, or a second peer */ \
        X(block_s,       "block",          "us",   1e-6, 1.5,  "all-to-alls below 4 KiB of 4 GPUs") \
        /* Simple over LL */ \
        X(p2p_base_s,    "p2p_base",       "us",   1e-6, 2,    "all-to-alls of 64 to 512 KiB") \
        /* each part of each peer */ \
        X(p2p_part_s,    "p2p_part",       "us",   1e-6, 0.08, "all-to-alls of 256 KiB to 4 MiB") \
        X(p2p_Bps,       "p2p_channel",    "GB/s", 1e9,  18,   "all-to-alls over 16 MiB of 2 GPUs") \
        /* one direction of a GPU's links; 0: 94 % of what the rings have */ \
        X(port_Bps,      "port",           "GB/s", 1e9,  0,    "rings of 64 MiB and more")
/* clang-format on */

enum { MOE_NCCL_P2P, MOE_NCCL_RING, MOE_NCCL_CLASSES };
enum { MOE_NCCL_BANDS = 3 }; /* below 64 KiB, below 2 MiB, the rest: other terms decide */

struct moe_nccl {
    const struct moe_nccl_release *release; /* borrowed; NULL: this machine has no such model */
    int arch;                               /* compute capability times 10 */
    int ring_channels;                      /* as NCCL's search finds them: "nChannels" of pattern 4 (ring) */
    double ring_Bps;                        /* of one of them, "bw" */
    bool nvlink;                            /* else PCIe */
    struct moe_nccl_tables tables; /* of NCCL's log: what it runs where there is one; the topology's */
    double ll128_most_Bps; /* what NCCL expects of a channel at most, where measurements show another than
                              the release's; 0: that */
    /* Of the fit: how far off a prediction may be, as a logarithm, with 80 % probability, 0: not known; and
     * which algorithms it saw, bits of moe_nccl_bit. */
    double error[MOE_NCCL_CLASSES][MOE_NCCL_BANDS];
    unsigned fitted;
#define X(member, key, unit, size, start, rows) double member;
    MOE_NCCL_PARAMS(X)
#undef X
};
#define X(member, key, unit, size, start, rows) +1
enum { MOE_NCCL_N_PARAMS = MOE_NCCL_PARAMS(X) };
#undef X

/* A collective of one node, all blocks equal. */
struct moe_nccl_case {
    enum moe_collective kind;
    int ranks;
    int64_t bytes;  /* nccl-tests' size: the buffer; all-gather: what a rank receives; else what it sends */
    int type_bytes; /* of an element */
    bool is_float;  /* switches add up float types alone */
};

/* What one member's part is made of. Sending `bytes` of them takes delay_s, then bytes * wire at rate_Bps or
 * what the links allow, then, once the member has received its own, tail_s. */
struct moe_nccl_part {
    double delay_s, wire, rate_Bps, tail_s;
};
/* A ring first adds up and then hands on; nvls and others do all in one. share: of the bytes. */
struct moe_nccl_ring {
    enum moe_algorithm algorithm;
    enum moe_protocol protocol;
    int n_parts;
    struct moe_nccl_part part[2];
    double share[2];
};

/* All-gather, reduce-scatter, all-reduce. */
struct moe_nccl_ring moe_nccl_ring(const struct moe_nccl *p, const struct moe_nccl_case *c);
/* `bytes` from one of `ranks` to another; itself: the port is not used. */
struct moe_nccl_part moe_nccl_pair(const struct moe_nccl *p, int ranks, int64_t bytes, bool itself);

/* Over several nodes: what NCCL runs, its latency by NCCL's own constants, bytes on the wire for one, and
 * what its channels move a second at most, of the case's bytes (INFINITY: not said). */
struct moe_nccl_far {
    enum moe_algorithm algorithm;
    enum moe_protocol protocol;
    double latency_s, wire, most_Bps;
};
/* nics: of a node, those of its members; nic_Bps: one direction of one; c->ranks: in all. */
struct moe_nccl_far moe_nccl_far(const struct moe_nccl *p, const struct moe_nccl_case *c, int nodes, int nics,
                                 double nic_Bps);
/* One direction of a GPU's port while switches add up and multiply (NVLS), bytes/s. */
double moe_nccl_switch_Bps(const struct moe_nccl *p);

/* Half of the interval that holds 80 % of measurements, as a logarithm; 0: not known. */
double moe_nccl_error(const struct moe_nccl *p, const struct moe_nccl_case *c);
unsigned moe_nccl_bit(const struct moe_nccl *p, const struct moe_nccl_case *c); /* 0: point to point */
int moe_nccl_class(const struct moe_nccl_case *c);
int moe_nccl_band(int64_t bytes);
/* What of the rings' rate a port reaches before anything is fitted. */
extern const double moe_nccl_usable;
/* Before anything is fitted: release, arch and the rings are set. */
void moe_nccl_start(struct moe_nccl *p);
/* Seconds on an idle node: the closed form of the plan. */
double moe_nccl_s(const struct moe_nccl *p, const struct moe_nccl_case *c);

#endif
