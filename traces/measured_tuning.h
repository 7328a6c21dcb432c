/* measured_tuning - the tables of NCCL's own cost model in a log of NCCL_DEBUG=INFO.
 *
 * With TUNING among NCCL_DEBUG_SUBSYS the first rank of each communicator prints what it expects of every
 * collective, algorithm and protocol: a latency and a rate, of which it runs the fastest. Two layouts:
 *
 *   to 2.17    Latency/AlgBw |    Tree/    LL | ... all algorithms in a row, from 2.6 on with Max NThreads
 *   from 2.18  Algorithm |, Protocol |, Max NThreads |: blocks of three algorithms, the last may have fewer,
 *              with protocols for three
 *
 * Then a line "AllReduce |   16.6/  1.2 | ..." for each collective, us and GB/s of nccl-tests' size
 * ("algbw"), 0.0 for a rate where it is not offered. Lines of other threads may stand between: a line belongs
 * to the host:pid:tid before it. A table does not say how many GPUs it is of; what does, in this order: the
 * same thread's "nRanks N nNodes M" above it (INIT, from 2.20 on), or the rates of rings, since those
 * of an all-gather and a broadcast differ by n / (n - 1). Sizes met: 1 to 100 tables, logs of 1 MB.
 *
 * Source: NVIDIA/nccl src/graph/tuning.cc, 2.5.6 to 2.30.7. */
#ifndef MOE_MEASURED_TUNING_H
#define MOE_MEASURED_TUNING_H

#include "sim/base.h"

enum { MOE_TUNING_COSTS = 3 * 5 * 3 }; /* collectives, algorithms, protocols */

struct moe_tuning_table {
    int line;         /* where it begins */
    int ranks, nodes; /* 0: not known */
    int n;            /* of what is offered */
    struct moe_tuning_cost {
        const char *op, *algorithm, *protocol; /* as sim/ calls them: allgather, nvlstree, ll128; static */
        double latency_s, rate_Bps;
    } cost[MOE_TUNING_COSTS];
};

struct moe_tuning {
    int n, cap;
    struct moe_tuning_table *tables; /* [n] in the order of the file */
};

/* Result: the tables of a file, none when it holds none; CollNet and collectives that a measured row cannot
 * be are left out. Cost: O(size of the file).
 * Errors: MOE_EINPUT as "file:line: ..." of the first table that is cut short or has a line that does not
 * fit its heading; "file: ..." when it cannot be read. *out is empty then. */
int moe_tuning_read(const char *path, struct moe_tuning *out);
void moe_tuning_free(struct moe_tuning *t);

#endif
