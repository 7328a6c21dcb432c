/* nccl_tuning.c - see nccl_tuning.h.
 *
 * Latencies in us and rates in GB/s inside, as NCCL has them. A rate starts as that of the wire ("bus") and
 * becomes that of the buffer in the end. */
#include "sim/cost/nccl_table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define X(name, text) text,
const char *const moe_algorithm_text[] = {MOE_ALGORITHMS(X)};
const char *const moe_protocol_text[] = {MOE_PROTOCOLS(X)};
#undef X

/* Release 2.minor or newer? The rules that changed are told apart by rows of the table. */
static bool since(const struct moe_nccl_machine *m, int minor)
{
    return m->release->number >= 20000 + 100 * minor;
}

const struct moe_nccl_release *moe_nccl_release(const char *version)
{
    int major, minor, patch, end = 0;
    size_t n = strspn(version, "0123456789.");
    const struct moe_nccl_release *oldest = moe_nccl_releases, *r = oldest + moe_nccl_n_releases - 1;
    if (sscanf(version, "%2d.%2d.%2d%n", &major, &minor, &patch, &end) != 3 || (size_t)end != n ||
        (version[n] && version[n] != '-' && version[n] != '+')) {
        moe_fail(MOE_EINPUT, "NCCL release '%s': expected three numbers, such as %d.%d.%d, the newest known",
                 version, r->number / 10000, r->number / 100 % 100, r->number % 100);
        return NULL;
    }
    int number = 10000 * major + 100 * minor + patch;
    if (number < oldest->number) {
        moe_fail(MOE_EINPUT, "NCCL release '%s': expected %d.%d.%d, the oldest known, or a newer one",
                 version, oldest->number / 10000, oldest->number / 100 % 100, oldest->number % 100);
        return NULL;
    }
    while (r->number > number) r--;
    return r;
}

static int arch_row(int arch)
{
    return (arch >= 80) + (arch >= 90) + (arch >= 100);
}

static int known_row(const struct moe_nccl_machine *m)
{
    int row = arch_row(m->arch), newest = arch_row(m->release->newest_arch);
    return row < newest ? row : newest;
}

static double most(const double (*table)[MOE_NCCL_SCALES], int row, int nodes)
{
    return table ? table[row][nodes < 3 ? nodes - 1 : 2] : INFINITY;
}

static double most_ll(const struct moe_nccl_machine *m)
{
    return most(m->release->ll, m->nodes == 1 ? known_row(m) : m->host == MOE_NCCL_AMD, m->nodes);
}

static int n_ranks(const struct moe_nccl_machine *m)
{
    return m->nodes * m->ranks_per_node;
}

static int log2_of(int64_t n)
{
    int log = 0;
    while (n >>= 1) log++;
    return log;
}

/* ---- what is offered ---- */

static bool has_ll128(const struct moe_nccl_machine *m)
{
    return arch_row(m->arch) == known_row(m) && m->arch >= 70 && (m->ranks_per_node == 1 || m->nvlink) &&
           (m->nodes == 1 || m->near_nic);
}

static bool has_nvls(const struct moe_nccl_machine *m)
{
    return m->arch >= 90 && m->nvlink && m->nvls.channels > 0 && m->ranks_per_node >= (since(m, 29) ? 2 : 3);
}

static bool offers(const struct moe_nccl_machine *m, enum moe_collective collective,
                   enum moe_algorithm algorithm, enum moe_protocol protocol)
{
    enum { NVLS_ARITY = 32 }; /* ranks that NVLS gathers from at most */
    bool allreduce = collective == MOE_ALLREDUCE, simple = protocol == MOE_PROTOCOL_SIMPLE;
    if (n_ranks(m) < 2 || collective == MOE_ALLTOALL) return false;
    if (protocol == MOE_PROTOCOL_LL128 && !has_ll128(m)) return false;
    switch (algorithm) {
    case MOE_ALGORITHM_RING: return true;
    case MOE_ALGORITHM_TREE: return allreduce;
    case MOE_ALGORITHM_NVLS:
        return simple && m->nodes == 1 && has_nvls(m) &&
               (allreduce ? since(m, 17) : since(m, 19) && m->ranks_per_node <= NVLS_ARITY);
    case MOE_ALGORITHM_NVLSTREE: return simple && m->nodes > 1 && has_nvls(m) && allreduce && since(m, 18);
    case MOE_ALGORITHM_PAT: return simple && !allreduce && m->ranks_per_node == 1 && since(m, 23);
    default: return false;
    }
}

/* ---- rates: GB/s of the buffer ---- */

/* As NCCL has it, on two nodes the rate in the node counts. */
static double bus_of(const struct moe_nccl_machine *m, const struct moe_nccl_graph *g)
{
    return g->channels * (m->nodes <= 2 ? g->intra_Bps : g->inter_Bps) / 1e9;
}

static double ring_rate(const struct moe_nccl_machine *m, bool allreduce, enum moe_protocol protocol)
{
    double bus = bus_of(m, &m->ring), n = n_ranks(m);
    if (protocol == MOE_PROTOCOL_LL) {
        double share = since(m, 21) ? 1.0 / 2 : m->nodes > 1 || allreduce ? 1.0 / 4 : 1.0 / 3;
        bus = fmin(bus * share, most_ll(m));
    } else if (protocol == MOE_PROTOCOL_LL128) {
        /* 120 of 128 bytes and some loss; older: more where one GPU feeds the NIC both ways. */
        double share = since(m, 23) || m->ranks_per_node > 1 ? 0.92 : 0.7;
        bus = fmin(bus * share, m->ring.channels * most(m->release->ring_ll128, known_row(m), m->nodes));
    }
    return bus * n / (allreduce ? 2 * (n - 1) : n - 1);
}

/* Up and down: what the wire does counts half. */
static double tree_rate(const struct moe_nccl_machine *m, enum moe_protocol protocol)
{
    const struct moe_nccl_release *r = m->release;
    int channels = m->tree.channels, row = known_row(m);
    double bus = fmin(bus_of(m, &m->tree) * 0.92, channels * most(r->tree, row, m->nodes));
    if (protocol == MOE_PROTOCOL_LL) bus = fmin(bus / 3.8, most_ll(m));
    if (protocol == MOE_PROTOCOL_LL128)
        bus = fmin(bus * (m->nodes == 1 ? 7.0 / 9 : 120.0 / 128),
                   channels * most(r->tree_ll128, row, m->nodes));
    return bus / 2 * (m->plain_tree || m->ranks_per_node == 1 ? 0.85 : 1);
}

/* From 2.28 on by what switches reach; before, by the rate that the search found and a fixed share. */
static double nvls_rate(const struct moe_nccl_machine *m, bool allreduce, bool tree)
{
    const struct moe_nccl_graph *g = &m->nvls;
    double intra = g->intra_Bps / 1e9, inter = g->inter_Bps / 1e9, n = n_ranks(m);
    double own = 1 - 1.0 / m->ranks_per_node; /* what is not the rank's own part */
    if (m->release->nvls_efficiency) {
        intra *= m->release->nvls_efficiency[known_row(m)] * (g->channels - 1) / g->channels;
        double rate = fmin(intra * (allreduce ? 2 : own), inter * (tree && m->nodes == 2 ? 2 : 1));
        if (tree) rate = fmin(rate, most(m->release->nvlstree, known_row(m), m->nodes));
        return g->channels * rate * (allreduce ? n / (2 * (n - 1)) : 1);
    }
    if (!since(m, 19)) {
        double share = tree ? 0.7 * m->nodes / (2 * (m->nodes - 1)) : 5.0 / 6;
        return bus_of(m, g) * share;
    }
    if (tree) return g->channels * fmin(intra, m->nodes == 2 ? inter : inter / 2) * 5 / 6;
    if (!allreduce && since(m, 27)) return g->channels * fmin(intra * own, inter * 0.9);
    return g->channels * fmin(intra, inter) * (allreduce || !since(m, 23) ? 5.0 / 6 : 1);
}

static double rate_of(const struct moe_nccl_machine *m, bool allreduce, enum moe_algorithm algorithm,
                      enum moe_protocol protocol)
{
    switch (algorithm) {
    case MOE_ALGORITHM_RING: return ring_rate(m, allreduce, protocol);
    case MOE_ALGORITHM_TREE: return tree_rate(m, protocol);
    case MOE_ALGORITHM_PAT: return bus_of(m, &m->tree) * (since(m, 24) ? 0.75 : 0.85);
    default: return nvls_rate(m, allreduce, algorithm == MOE_ALGORITHM_NVLSTREE);
    }
}

static double rate_of_channels(const struct moe_nccl_machine *m, bool allreduce, enum moe_algorithm algorithm,
                               enum moe_protocol protocol)
{
    const struct moe_nccl_release *r = m->release;
    double n = n_ranks(m), of_ring = n / (allreduce ? 2 * (n - 1) : n - 1);
    int row = known_row(m);
    if (protocol == MOE_PROTOCOL_LL) return most_ll(m) * (algorithm == MOE_ALGORITHM_RING ? of_ring : 0.5);
    switch (algorithm) {
    case MOE_ALGORITHM_RING:
        return protocol == MOE_PROTOCOL_LL128
                   ? m->ring.channels * most(r->ring_ll128, row, m->nodes) * of_ring
                   : INFINITY;
    case MOE_ALGORITHM_TREE:
        return m->tree.channels / 2.0 *
               fmin(most(r->tree, row, m->nodes),
                    protocol == MOE_PROTOCOL_LL128 ? most(r->tree_ll128, row, m->nodes) : INFINITY);
    case MOE_ALGORITHM_NVLSTREE: return m->nvls.channels * most(r->nvlstree, row, m->nodes) * of_ring;
    default: return INFINITY;
    }
}

double moe_nccl_most_Bps(const struct moe_nccl_machine *m, enum moe_collective collective,
                         enum moe_algorithm algorithm, enum moe_protocol protocol)
{
    return 1e9 * rate_of_channels(m, collective == MOE_ALLREDUCE, algorithm, protocol);
}

/* ---- latencies: us ---- */

/* Every step of a ring over several nodes pays at least what posting to the network costs the host. */
static double ring_latency(const struct moe_nccl_machine *m, bool allreduce, bool simple, double intra,
                           double inter)
{
    int passes = allreduce ? 2 : 1, steps = passes * (n_ranks(m) - 1), between = passes * (m->nodes - 1);
    if (m->nodes > 1) intra = fmax(intra, (m->host == MOE_NCCL_AMD ? 2 : 1) * (simple ? 3 : 1));
    if (m->nodes > 1 && allreduce && !since(m, 23)) between = 2 * m->nodes; /* as these releases count */
    return (steps - between) * intra + between * inter;
}

static double latency_of(const struct moe_nccl_machine *m, bool allreduce, enum moe_algorithm algorithm,
                         enum moe_protocol protocol)
{
    const double(*us)[MOE_ALGORITHM_COUNT][MOE_PROTOCOL_COUNT] = m->release->latency;
    bool simple = protocol == MOE_PROTOCOL_SIMPLE, exposed = m->ranks_per_node == 1 && since(m, 23);
    double base = us[MOE_NCCL_BASE][algorithm][protocol], nic = m->nic_latency_s * 1e6;
    double intra = us[m->nvlink ? MOE_NCCL_NVLINK : MOE_NCCL_PCI][algorithm][protocol];
    double inter = us[MOE_NCCL_NET][exposed ? MOE_ALGORITHM_TREE : algorithm][protocol];
    int hops = log2_of(m->nodes);
    double step = inter + nic * (simple ? 2 : 1); /* Simple flushes what it received */
    switch (algorithm) {
    case MOE_ALGORITHM_RING: return base + ring_latency(m, allreduce, simple, intra, step);
    case MOE_ALGORITHM_TREE: return base + 2 * ((m->ranks_per_node - 1) * intra + hops * step);
    case MOE_ALGORITHM_NVLS: return since(m, 19) ? intra : base;
    case MOE_ALGORITHM_NVLSTREE:
        return since(m, 19) ? base + intra + 2 * hops * step : base + 2 * (m->nodes - 1) * inter;
    default: return base + hops * step / 3.5 + n_ranks(m) * 2.8; /* PAT */
    }
}

/* What a table offers; what NCCL decides later, by the call, is as without one. */
static bool table_offers(const struct moe_nccl_machine *m, enum moe_algorithm algorithm)
{
    if (algorithm == MOE_ALGORITHM_NVLS) return m->nvls.channels > 0;
    if (algorithm == MOE_ALGORITHM_NVLSTREE) return m->nvls.channels > 0 && m->nodes > 1;
    return algorithm != MOE_ALGORITHM_PAT || m->ranks_per_node == 1;
}

/* ---- time ---- */

bool moe_nccl_estimate(const struct moe_nccl_machine *m, enum moe_collective collective,
                       enum moe_algorithm algorithm, enum moe_protocol protocol, double *latency_s,
                       double *rate_Bps)
{
    moe_assert(m->nodes > 0 && m->ranks_per_node > 0 && m->ring.channels > 0 && m->tree.channels > 0);
    if (m->table) {
        double found_Bps = m->table->cost[collective][algorithm][protocol].rate_Bps;
        if (!(found_Bps > 0) || !table_offers(m, algorithm)) return false;
        *latency_s = m->table->cost[collective][algorithm][protocol].latency_s;
        *rate_Bps = found_Bps;
        return true;
    }
    if (!offers(m, collective, algorithm, protocol)) return false;
    double rate = rate_of(m, collective == MOE_ALLREDUCE, algorithm, protocol);
    if (!(rate > 0)) return false;
    *latency_s = latency_of(m, collective == MOE_ALLREDUCE, algorithm, protocol) / 1e6;
    *rate_Bps = rate * 1e9;
    return true;
}

/* Trees do not keep to the model at medium sizes; NCCL has factors for them. */
static double correction(const struct moe_nccl_machine *m, enum moe_algorithm algorithm,
                         enum moe_protocol protocol, int64_t bytes)
{
    const struct moe_nccl_release *r = m->release;
    int size = bytes < 64 ? -1 : log2_of(bytes / 64), end = 0;
    if (algorithm == MOE_ALGORITHM_TREE) end = MOE_NCCL_CORRECTIONS - 1;
    if (algorithm == MOE_ALGORITHM_NVLSTREE && since(m, 29) && m->arch >= 100 &&
        m->host != MOE_NCCL_OTHER_HOST)
        end = MOE_NCCL_CORRECTIONS;
    return r->tree_correction && size >= 0 && size < end ? r->tree_correction[protocol][size] : 1;
}

/* Rings over several nodes: a plateau of latency once every rank has 64 bytes in every channel. */
static double plateau(const struct moe_nccl_machine *m, enum moe_collective collective,
                      enum moe_algorithm algorithm, enum moe_protocol protocol, int64_t bytes)
{
    bool rings = algorithm == MOE_ALGORITHM_RING && protocol == MOE_PROTOCOL_SIMPLE && m->nodes > 1;
    if (!rings || collective != MOE_ALLREDUCE) return 1;
    if (bytes / (2 * m->ring.channels * n_ranks(m)) < 64) return 1;
    return m->arch < 80 ? 1.9 : 1.4;
}

double moe_nccl_time_s(const struct moe_nccl_machine *m, enum moe_collective collective,
                       enum moe_algorithm algorithm, enum moe_protocol protocol, int64_t bytes)
{
    double latency_s, rate_Bps;
    moe_assert(bytes >= 0);
    if (!moe_nccl_estimate(m, collective, algorithm, protocol, &latency_s, &rate_Bps)) return INFINITY;
    return latency_s * plateau(m, collective, algorithm, protocol, bytes) +
           (double)bytes / (rate_Bps * correction(m, algorithm, protocol, bytes));
}

bool moe_nccl_choose(const struct moe_nccl_machine *m, enum moe_collective collective, int64_t bytes,
                     enum moe_algorithm *algorithm, enum moe_protocol *protocol)
{
    double least = INFINITY;
    for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
        for (int p = 0; p < MOE_PROTOCOL_COUNT; p++) {
            double time = moe_nccl_time_s(m, collective, a, p, bytes);
            if (!(time < least)) continue;
            least = time;
            *algorithm = a;
            *protocol = p;
        }
    return isfinite(least);
}
