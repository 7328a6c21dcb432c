/* nccl.c - see nccl.h. */
#include "sim/cost/nccl.h"

#include <math.h>

/* Set on rows of 2 and 4 GPUs of A100, H100, B200 and GB200 together: moved by a third they change the errors
 * there by less than a tenth, so they are not fitted again for each machine. */
static const double spread = 0.5;         /* of a second block's launch, that a wide collective waits for */
static const double p2p_setup_s = 0.5e-6; /* of a group of point-to-point operations */
static const double p2p_ll_Bps = 5.6e9;   /* of a channel */
static const double first_chunk = 0.4;    /* of it, is not overlapped */
static const double self_share = 0.3;     /* of the port, that copying the own part costs, in peers */
static const double sum_Bps = 32e9;       /* of a channel, adding up the last block */
static const double sum_bytes_Bps = 24e9; /* the same for elements of one byte */
static const double ll_sum_bytes_Bps = 80e9;

/* NVIDIA/nccl src/enqueue.cc and src/include/device.h, 2.18 to 2.30. */
enum {
    LL_BYTES = 4096,    /* a channel and rank is added for each of these */
    LL128_BYTES = 5120, /* a channel for each of these */
    P2P_CHANNELS = 32,
    P2P_PART = 64 << 10,   /* a channel of a peer is added for each of these */
    P2P_LL = 16 << 10,     /* of a channel, up to which LL is used */
    P2P_CHUNK = 512 << 10, /* over NVLink */
    NVLS_CHANNELS = 16,
    NVLS_CHUNK = 128 << 10,
};
static const double ll_wire = 2, ll128_wire = 16 / 15.0; /* with flags */

const double moe_nccl_usable = 0.94;

void moe_nccl_start(struct moe_nccl *p)
{
#define X(member, key, unit, size, start, rows) p->member = (start) * (size);
    MOE_NCCL_PARAMS(X)
#undef X
    p->port_Bps = moe_nccl_usable * p->ring_channels * p->ring_Bps;
}

static int64_t clamp(int64_t value, int64_t least, int64_t most)
{
    return value < least ? least : value > most ? most : value;
}

/* The first of NCCL's rates, GB/s, of which n fit. */
static double rate_of(const double *rate, double usable_Bps, int n)
{
    while (rate[1] > 0 && *rate * 1e9 * n > usable_Bps) rate++;
    return *rate * 1e9;
}

/* NVLS as NCCL's search finds it (src/graph/search.cc): each GPU of a node is a head and has a channel, over
 * several nodes at a rate that its NIC has for each of its heads. */
static struct moe_nccl_graph nvls_graph(const struct moe_nccl *p, int ranks, int nodes, int nics,
                                        double nic_Bps)
{
    static const double hopper[] = {60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3, 0},
                        blackwell[] = {90, 80, 70, 60, 50, 40, 30, 24, 20, 19, 18, 0},
                        far_hopper[] = {48, 45, 42, 40, 30,  24,  22,  20,  17.5,
                                        15, 12, 6,  3,  2.4, 1.2, .24, .12, 0},
                        far_blackwell[] = {96,   86, 80, 48, 45.1, 42,  40,  30,  24,  22, 20,
                                           17.5, 15, 12, 6,  3,    2.4, 1.2, .24, .12, 0};
    double usable_Bps = p->ring_channels * p->ring_Bps;
    int heads = (ranks + nodes - 1) / nodes;
    if (nodes == 1) /* there is no other node */
        return (struct moe_nccl_graph){ranks, rate_of(p->arch < 100 ? hopper : blackwell, usable_Bps, ranks),
                                       INFINITY};
    const double *rates = p->arch < 100 ? far_hopper : far_blackwell;
    double inter_Bps = rate_of(rates, nic_Bps * fmin(nics, heads), heads);
    return (struct moe_nccl_graph){heads, fmin(rate_of(rates, usable_Bps, heads), inter_Bps), inter_Bps};
}

/* What NCCL runs, as it chooses it; without bytes on the wire. */
static struct moe_nccl_far choose(const struct moe_nccl *p, const struct moe_nccl_case *c, int nodes,
                                  int nics, double nic_Bps)
{
    struct moe_nccl_release release = *p->release;
    double limit[MOE_NCCL_ARCHS][MOE_NCCL_SCALES], rate_Bps;
    struct moe_nccl_graph ring = {p->ring_channels, p->ring_Bps, p->ring_Bps}, tree = ring, nvls = {0};
    struct moe_nccl_far out = {.algorithm = MOE_ALGORITHM_RING, .protocol = MOE_PROTOCOL_SIMPLE};
    if (nodes > 1) { /* NCCL's search finds one rate for both, then for trees in a node up to twice as much */
        ring.intra_Bps = ring.inter_Bps = tree.inter_Bps =
            fmin(p->ring_Bps, nics * nic_Bps / p->ring_channels);
        tree.intra_Bps = fmin(p->ring_Bps, 2 * tree.inter_Bps);
    }
    /* Without registered buffers NCCL takes NVLS for all-reduce alone; two GPUs have nothing to add up
     * there. */
    if (p->arch >= 90 && c->is_float && c->ranks > 2 && c->kind == MOE_ALLREDUCE)
        nvls = nvls_graph(p, c->ranks, nodes, nics, nic_Bps);
    if (p->ll128_most_Bps > 0) {
        for (int arch = 0; arch < MOE_NCCL_ARCHS; arch++)
            for (int scale = 0; scale < MOE_NCCL_SCALES; scale++)
                limit[arch][scale] = p->ll128_most_Bps / 1e9;
        release.ring_ll128 = (const double(*)[MOE_NCCL_SCALES])limit;
    }
    struct moe_nccl_machine machine = {.release = &release,
                                       .table = nodes == 1 ? moe_nccl_table_of(&p->tables, c->ranks) : NULL,
                                       .arch = p->arch,
                                       .nodes = nodes,
                                       .ranks_per_node =
                                           (c->ranks + nodes - 1) / nodes, /* uneven nodes: as the fullest */
                                       .ring = ring,
                                       .tree = tree,
                                       .nvls = nvls,
                                       .nvlink = p->nvlink,
                                       .near_nic = true};
    moe_nccl_choose(&machine, c->kind, c->bytes, &out.algorithm, &out.protocol);
    moe_nccl_estimate(&machine, c->kind, out.algorithm, out.protocol, &out.latency_s, &rate_Bps);
    out.most_Bps = moe_nccl_most_Bps(&machine, c->kind, out.algorithm, out.protocol);
    return out;
}

struct moe_nccl_far moe_nccl_far(const struct moe_nccl *p, const struct moe_nccl_case *c, int nodes, int nics,
                                 double nic_Bps)
{
    struct moe_nccl_far out = choose(p, c, nodes, nics, nic_Bps);
    out.wire = out.protocol == MOE_PROTOCOL_LL      ? ll_wire
               : out.protocol == MOE_PROTOCOL_LL128 ? ll128_wire
                                                    : 1;
    return out;
}

static double hop_s(const struct moe_nccl *p, enum moe_protocol protocol)
{
    return 1e-6 *
           p->release->latency[p->nvlink ? MOE_NCCL_NVLINK : MOE_NCCL_PCI][MOE_ALGORITHM_RING][protocol];
}

double moe_nccl_switch_Bps(const struct moe_nccl *p)
{
    /* What switches do is theirs, whichever release says it first. */
    const struct moe_nccl_release *newest = &moe_nccl_releases[moe_nccl_n_releases - 1];
    return newest->nvls_efficiency[p->arch < 100 ? 2 : 3] * p->port_Bps;
}

/* One flow: all of it goes to the switches and comes back. */
static void nvls(const struct moe_nccl *p, const struct moe_nccl_case *c, struct moe_nccl_ring *out)
{
    double n = c->ranks, rate_Bps = moe_nccl_switch_Bps(p) * n / (n + 1), lines = NVLS_CHANNELS * n;
    int64_t chunk = NVLS_CHUNK;
    if ((double)c->bytes < 64 * lines * NVLS_CHUNK) chunk = 64 << 10;
    if ((double)c->bytes < 8 * lines * (64 << 10)) chunk = 32 << 10;
    if ((double)c->bytes < 2 * lines * (32 << 10)) chunk = 16 << 10;
    double latency_s = 1e-6 * p->release->latency[MOE_NCCL_NVLINK][MOE_ALGORITHM_NVLS][MOE_PROTOCOL_SIMPLE];
    out->n_parts = 1;
    out->share[0] = 1;
    out->part[0] =
        (struct moe_nccl_part){.delay_s = p->simple_base_s + latency_s + lines * (double)chunk / rate_Bps,
                               .wire = 1,
                               .rate_Bps = rate_Bps};
}

/* A ring of LL or LL128: `adds` of its steps add up, `steps` in all. */
static void lines(const struct moe_nccl *p, const struct moe_nccl_case *c, int adds, int steps,
                  struct moe_nccl_ring *out)
{
    bool ll = out->protocol == MOE_PROTOCOL_LL;
    int64_t most = 2 * (int64_t)p->ring_channels;
    int64_t channels = clamp(ll ? c->bytes / (LL_BYTES * c->ranks) : c->bytes / LL128_BYTES, 1, most);
    double n = (double)channels, x = (double)c->bytes / c->ranks / n, wire = ll ? ll_wire : ll128_wire;
    double rate_Bps = ll ? p->ll_Bps : p->ll128_Bps;
    double step_s = ll ? p->ll_step_s : hop_s(p, MOE_PROTOCOL_LL128);
    double base_s = p->ll_base_s + spread * p->block_s * (1 - 1 / n);
    const int of[2] = {adds, steps - adds};
    double tail_s = x / rate_Bps + (c->type_bytes == 1 ? adds * x / ll_sum_bytes_Bps : 0);
    for (int i = 0; i < 2; i++) {
        if (!of[i]) continue;
        out->share[out->n_parts] = (double)of[i] / steps;
        out->part[out->n_parts++] = (struct moe_nccl_part){
            .delay_s = base_s + of[i] * step_s, .wire = wire, .rate_Bps = wire * n * rate_Bps * (i ? 1 : 2)};
        base_s = 0;
    }
    out->part[out->n_parts - 1].tail_s = tail_s;
}

static void chunks(const struct moe_nccl *p, const struct moe_nccl_case *c, int adds, int steps,
                   struct moe_nccl_ring *out)
{
    double n = 2.0 * p->ring_channels, x = (double)c->bytes / c->ranks / n;
    double last_Bps = !adds ? p->simple_Bps : c->type_bytes == 1 ? sum_bytes_Bps : sum_Bps;
    out->n_parts = 1;
    out->share[0] = 1;
    out->part[0] = (struct moe_nccl_part){.delay_s = p->simple_base_s + steps * hop_s(p, out->protocol),
                                          .wire = 1,
                                          .rate_Bps = n * x / (p->simple_sync_s + x / p->simple_Bps),
                                          .tail_s = x / last_Bps};
}

struct moe_nccl_ring moe_nccl_ring(const struct moe_nccl *p, const struct moe_nccl_case *c)
{
    struct moe_nccl_ring out = {0};
    int n = c->ranks, adds = c->kind == MOE_ALLGATHER ? 0 : n - 1;
    int steps = c->kind == MOE_ALLREDUCE ? 2 * (n - 1) : n - 1;
    struct moe_nccl_far chosen = choose(p, c, 1, 0, 0);
    out.algorithm = chosen.algorithm;
    out.protocol = chosen.protocol;
    if (out.algorithm == MOE_ALGORITHM_NVLS)
        nvls(p, c, &out);
    else if (out.protocol == MOE_PROTOCOL_SIMPLE)
        chunks(p, c, adds, steps, &out);
    else
        lines(p, c, adds, steps, &out);
    return out;
}

struct moe_nccl_part moe_nccl_pair(const struct moe_nccl *p, int ranks, int64_t bytes, bool itself)
{
    double b = (double)bytes, peers = ranks - 1, most = 1;
    while (2 * most * ranks <= P2P_CHANNELS) most *= 2;
    double parts = fmin(most, fmax(ceil(b / P2P_PART), 1)), x = b / parts;
    struct moe_nccl_part out = {.delay_s = p->ll_base_s + p2p_setup_s + p->block_s * (2 - 2.0 / ranks)};
    if (b <= P2P_LL * parts) {
        out.wire = 1;
        out.rate_Bps = parts * p2p_ll_Bps;
        return out;
    }
    double alone = 1 + first_chunk * fmin(1, P2P_CHUNK / x), port = itself ? 1 : 1 + self_share / peers;
    out.delay_s += p->p2p_base_s + p->p2p_part_s * parts * ranks;
    out.wire = alone * port;
    out.rate_Bps = parts * p->p2p_Bps * port;
    return out;
}

/* Time of a part that is sent to `others` over the port. */
static double part_s(const struct moe_nccl *p, const struct moe_nccl_part *part, double bytes, double others)
{
    double wire = bytes * part->wire;
    return part->delay_s + fmax(wire / part->rate_Bps, others * wire / p->port_Bps) + part->tail_s;
}

double moe_nccl_s(const struct moe_nccl *p, const struct moe_nccl_case *c)
{
    double n = c->ranks, S = (double)c->bytes, all_s = 0;
    if (c->kind == MOE_ALLTOALL) {
        struct moe_nccl_part pair = moe_nccl_pair(p, c->ranks, c->bytes / c->ranks, false);
        return part_s(p, &pair, S / n, n - 1);
    }
    struct moe_nccl_ring ring = moe_nccl_ring(p, c);
    double sent =
        ring.algorithm == MOE_ALGORITHM_NVLS ? S : S / n * (n - 1) * (c->kind == MOE_ALLREDUCE ? 2 : 1);
    for (int i = 0; i < ring.n_parts; i++) all_s += part_s(p, &ring.part[i], ring.share[i] * sent, 1);
    return all_s;
}

int moe_nccl_class(const struct moe_nccl_case *c)
{
    return c->kind == MOE_ALLTOALL ? MOE_NCCL_P2P : MOE_NCCL_RING;
}

int moe_nccl_band(int64_t bytes)
{
    return (bytes >= 64 << 10) + (bytes >= 2 << 20);
}

unsigned moe_nccl_bit(const struct moe_nccl *p, const struct moe_nccl_case *c)
{
    if (c->kind == MOE_ALLTOALL) return 0;
    struct moe_nccl_ring ring = moe_nccl_ring(p, c);
    return 1u << ((int)ring.algorithm * MOE_PROTOCOL_COUNT + (int)ring.protocol);
}

double moe_nccl_error(const struct moe_nccl *p, const struct moe_nccl_case *c)
{
    static const double never_seen = 0.3; /* of NCCL's own constants for NVLS, where rows were kept back */
    double error = p->error[moe_nccl_class(c)][moe_nccl_band(c->bytes)];
    return error > 0 && moe_nccl_bit(p, c) & ~p->fitted ? fmax(error, never_seen) : error;
}
