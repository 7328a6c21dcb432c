/* topology.c - see topology.h.
 *
 * Links in order: up of each rank; down of each rank; with kind shared the bus of each node; out and in of
 * each NIC, node by node. */
#include "sim/topology.h"

#include "sim/yaml.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define X(name, text) text,
const char *const moe_link_class_text[] = {MOE_LINK_CLASSES(X)};
#undef X

struct draft {
    struct moe_topo topo;
    const struct moe_yaml *gpu, *intra, *inter, *host, *nccl, *deepep, *gemm, *experts;
    const struct moe_yaml *low_latency, *one_sided, *dispatch, *combine;
    char version[MOE_NAME]; /* of the block nccl */
    int64_t arch, ring_channels;
    int64_t sms;        /* of the block gemm */
    int64_t deepep_sms; /* of the block deepep */
    const struct moe_yaml *one_node, *nodes;
    double shared_bytes;
    int links;
    const struct moe_yaml *fitted, *tuning;
    const struct moe_yaml *source; /* of the block being read */
};

#define FIELD(member) offsetof(struct draft, member)
#define BLOCK(name)                                                                                          \
    {                                                                                                        \
#name, MOE_KEY_NODE, FIELD(name), .required = true                                                   \
    }
/* least is -1 where 0 is a meaningful value. */
#define QUANTITY(name, member, unit_, least)                                                                 \
    {                                                                                                        \
        name, MOE_KEY_QUANTITY, FIELD(topo.member), .required = true, .min = least, .unit = MOE_UNIT_##unit_ \
    }
#define COUNT(name, most)                                                                                    \
    {                                                                                                        \
#name, MOE_KEY_INT, FIELD(topo.name), .required = true, .min = 1, .max = most                        \
    }

#define ERROR_OF(member)                                                                                     \
    {                                                                                                        \
        "error", MOE_KEY_QUANTITY, FIELD(topo.member), .max = 10, .unit = MOE_UNIT_SHARE                     \
    }

static const char *const intra_kinds[] = {"switch", "shared", NULL};
static const struct moe_key top_keys[] = {
    {"name", MOE_KEY_TEXT, FIELD(topo.name), .required = true},
    COUNT(gpus_per_node, 1024),
    BLOCK(gpu),
    BLOCK(intra),
    BLOCK(inter),
    {"nccl", MOE_KEY_NODE, FIELD(nccl)},
    {"deepep", MOE_KEY_NODE, FIELD(deepep)},
    {"deepep_low_latency", MOE_KEY_NODE, FIELD(low_latency)},
    {"nvlink_one_sided", MOE_KEY_NODE, FIELD(one_sided)},
    {"gemm", MOE_KEY_NODE, FIELD(gemm)},
    {"experts", MOE_KEY_NODE, FIELD(experts)},
    {"host", MOE_KEY_NODE, FIELD(host)},
};
static const struct moe_key gpu_keys[] = {
    QUANTITY("matmul_float32", matmul_float32_flops, FLOPS, 0),
    QUANTITY("matmul_float64", matmul_float64_flops, FLOPS, 0),
    {"matmul_bfloat16", MOE_KEY_QUANTITY, FIELD(topo.matmul_bfloat16_flops), .unit = MOE_UNIT_FLOPS},
    QUANTITY("memory", memory_Bps, BPS, 0),
    QUANTITY("launch", launch_s, SECONDS, -1),
    QUANTITY("host_sync", host_sync_s, SECONDS, -1),
    ERROR_OF(kernel_error),
    BLOCK(source),
};
static const struct moe_key intra_keys[] = {
    {"kind", MOE_KEY_CHOICE, FIELD(topo.intra_kind), .required = true, .choices = intra_kinds},
    {"bus", MOE_KEY_QUANTITY, FIELD(topo.bus_Bps), .unit = MOE_UNIT_BPS},
    QUANTITY("bandwidth", intra_Bps, BPS, 0),
    QUANTITY("latency", intra_latency_s, SECONDS, -1),
    ERROR_OF(intra_error),
    BLOCK(source),
};
static const struct moe_key inter_keys[] = {
    COUNT(nics_per_node, 1024),
    QUANTITY("bandwidth", nic_Bps, BPS, 0),
    QUANTITY("latency", inter_latency_s, SECONDS, -1),
    ERROR_OF(inter_error),
    BLOCK(source),
};

static const struct moe_key host_keys[] = {
    COUNT(cores, 1024),
    QUANTITY("slice", slice_s, SECONDS, 0),
    QUANTITY("scalar", scalar_flops, FLOPS, 0),
    QUANTITY("call", call_s, SECONDS, -1),
    BLOCK(source),
};

static const char *const link_kinds[] = {"nvlink", "pcie", NULL};
#define PARAM(member, key, unit_, size, start, rows)                                                         \
    {key, MOE_KEY_QUANTITY, FIELD(topo.nccl.member), .unit = (size) < 1 ? MOE_UNIT_SECONDS : MOE_UNIT_BPS},
#define ERROR(key, class, band)                                                                              \
    {                                                                                                        \
        key, MOE_KEY_QUANTITY, FIELD(topo.nccl.error[class][band]), .max = 10, .unit = MOE_UNIT_SHARE        \
    }
static const struct moe_key nccl_keys[] = {
    {"version", MOE_KEY_TEXT, FIELD(version), .required = true},
    {"arch", MOE_KEY_INT, FIELD(arch), .required = true, .min = 70, .max = 129},
    {"links", MOE_KEY_CHOICE, FIELD(links), .required = true, .choices = link_kinds},
    {"ring_channels", MOE_KEY_INT, FIELD(ring_channels), .required = true, .min = 1, .max = 32},
    {"ring_channel", MOE_KEY_QUANTITY, FIELD(topo.nccl.ring_Bps), .required = true, .unit = MOE_UNIT_BPS},
    {"ll128_most", MOE_KEY_QUANTITY, FIELD(topo.nccl.ll128_most_Bps), .unit = MOE_UNIT_BPS},
    MOE_NCCL_PARAMS(PARAM) ERROR("p2p_small", MOE_NCCL_P2P, 0),
    ERROR("p2p_medium", MOE_NCCL_P2P, 1),
    ERROR("p2p_large", MOE_NCCL_P2P, 2),
    ERROR("ring_small", MOE_NCCL_RING, 0),
    ERROR("ring_medium", MOE_NCCL_RING, 1),
    ERROR("ring_large", MOE_NCCL_RING, 2),
    {"fitted", MOE_KEY_NODE, FIELD(fitted)},
    {"tuning", MOE_KEY_NODE, FIELD(tuning)},
    BLOCK(source),
};

#define UNIT_OF(size) ((size) > 1 ? MOE_UNIT_BPS : (size) == 0.01 ? MOE_UNIT_SHARE : MOE_UNIT_SECONDS)
#define GEMM_PARAM(member, key, unit_, size, start, least, most, rows)                                       \
    {key,                                                                                                    \
     MOE_KEY_QUANTITY,                                                                                       \
     FIELD(topo.gemm.member),                                                                                \
     .required = true,                                                                                       \
     .max = (most) * (size),                                                                                 \
     .unit = UNIT_OF(size)},
#define EXPERTS_PARAM(member, key, unit_, size, start, least, most, rows)                                    \
    {key,                                                                                                    \
     MOE_KEY_QUANTITY,                                                                                       \
     FIELD(topo.experts.member),                                                                             \
     .required = true,                                                                                       \
     .max = (most) * (size),                                                                                 \
     .unit = UNIT_OF(size)},
static const struct moe_key gemm_keys[] = {
    {"sms", MOE_KEY_INT, FIELD(sms), .required = true, .min = 1, .max = 4096},
    {"shared", MOE_KEY_QUANTITY, FIELD(shared_bytes), .required = true, .unit = MOE_UNIT_BYTES},
    QUANTITY("peak", gpu.matmul_flops, FLOPS, 0),
    QUANTITY("peak_memory", gpu.memory_Bps, BPS, 0),
    QUANTITY("shared_rate", gpu.shared_Bps, BPS, 0),
    MOE_GEMM_PARAMS(GEMM_PARAM) ERROR_OF(gemm_error),
    BLOCK(source),
};
static const struct moe_key experts_keys[] = {
    MOE_GROUPED_PARAMS(EXPERTS_PARAM) BLOCK(source),
};

static const struct moe_key deepep_keys[] = {
    {"sms", MOE_KEY_INT, FIELD(deepep_sms), .min = 2, .max = 4096},
    {"one_node", MOE_KEY_NODE, FIELD(one_node)},
    {"nodes", MOE_KEY_NODE, FIELD(nodes)},
    BLOCK(source),
};
/* On one node, or over several. */
struct kernels {
    const struct moe_yaml *dispatch, *combine;
    double error;
};
static const struct moe_key kernels_keys[] = {
    {"dispatch", MOE_KEY_NODE, offsetof(struct kernels, dispatch)},
    {"combine", MOE_KEY_NODE, offsetof(struct kernels, combine)},
    {"error", MOE_KEY_QUANTITY, offsetof(struct kernels, error), .max = 10, .unit = MOE_UNIT_SHARE},
};
#define KERNEL_KEY(type, member, key, size, most_, must)                                                     \
    {key,                                                                                                    \
     MOE_KEY_QUANTITY,                                                                                       \
     offsetof(struct type, member),                                                                          \
     .required = (must),                                                                                     \
     .max = (most_),                                                                                         \
     .unit = (size) > 1    ? MOE_UNIT_BPS                                                                    \
             : (size) == 1 ? MOE_UNIT_SHARE                                                                  \
                           : MOE_UNIT_SECONDS},
#define NORMAL(member, key, unit_, size, least, most_, source)                                               \
    KERNEL_KEY(moe_deepep_normal, member, key, size, most_, false)
#define LOW_LATENCY(member, key, unit_, size, least, most_, source)                                          \
    KERNEL_KEY(moe_deepep_low_latency, member, key, size, most_, true)
#define ONE_SIDED(member, key, unit_, size, least, most_, source)                                            \
    KERNEL_KEY(moe_onesided, member, key, size, most_, offsetof(struct moe_onesided, member) == 0)
static const struct moe_key kernel_keys[] = {MOE_DEEPEP_NORMAL(NORMAL)};
static const struct moe_key low_latency_keys[] = {MOE_DEEPEP_LOW_LATENCY(LOW_LATENCY)};
static const struct moe_key one_sided_keys[] = {MOE_ONESIDED(ONE_SIDED)};
#define BOTH BLOCK(dispatch), BLOCK(combine), BLOCK(source)
static const struct moe_key low_latency_block[] = {
    BOTH,
    {"one_node_error", MOE_KEY_QUANTITY, FIELD(topo.low_latency.error[0]), .max = 10, .unit = MOE_UNIT_SHARE},
    {"nodes_error", MOE_KEY_QUANTITY, FIELD(topo.low_latency.error[1]), .max = 10, .unit = MOE_UNIT_SHARE},
};
static const struct moe_key one_sided_block[] = {BOTH, ERROR_OF(one_sided.error)};

static int read_block(const struct moe_yaml *block, const struct moe_key *keys, size_t n, struct draft *d)
{
    MOE_TRY(moe_yaml_read(block, keys, (int)n, d));
    if (d->source->kind == MOE_YAML_SCALAR && *d->source->text) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s:%d: source: expected a text that says where the numbers come from",
                    d->source->file, d->source->line);
}

/* A turn is an event or more: shorter ones would take for ever to simulate, and one of 0 ps never ends. */
static int check_slice(const struct moe_yaml *host, const struct moe_topo *t)
{
    int i = 0;
    if (t->slice_s >= 1e-6) return MOE_OK;
    while (strcmp(host->key[i], "slice") != 0) i++;
    return moe_fail(MOE_EINPUT, "%s:%d: slice: expected 1 us or more, not '%s'", host->file,
                    host->key_line[i], host->item[i].text);
}

/* "ring/ll ring/simple": algorithms and protocols, as bits of moe_nccl_bit. */
static int read_fitted(const struct moe_yaml *node, unsigned *bits)
{
    char text[MOE_NAME];
    const char *names[MOE_ALGORITHM_COUNT * MOE_PROTOCOL_COUNT],
        *from = node->kind == MOE_YAML_SCALAR ? node->text : "";
    char name[MOE_ALGORITHM_COUNT * MOE_PROTOCOL_COUNT][MOE_NAME], hint[MOE_HINT];
    int n = 0;
    for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
        for (int p = 0; p < MOE_PROTOCOL_COUNT; p++, n++) {
            snprintf(name[n], sizeof name[n], "%s/%s", moe_algorithm_text[a], moe_protocol_text[p]);
            names[n] = name[n];
        }
    while (*(from += strspn(from, " "))) {
        size_t length = strcspn(from, " ");
        int i = 0;
        snprintf(text, sizeof text, "%.*s", (int)length, from);
        while (i < n && strcmp(names[i], text) != 0) i++;
        if (i == n)
            return moe_fail(MOE_EINPUT, "%s:%d: fitted: '%s' is no algorithm and protocol%s", node->file,
                            node->line, text, moe_hint(text, names, n, hint));
        *bits |= 1u << i;
        from += length;
    }
    return MOE_OK;
}

static int read_tuning(const struct moe_yaml *node, struct moe_nccl_tables *out)
{
    int err = moe_nccl_tables_parse(node->kind == MOE_YAML_SCALAR ? node->text : "", out);
    return err < 0 ? moe_fail(err, "%s:%d: tuning: %s", node->file, node->line, moe_error()) : MOE_OK;
}

static int read_nccl(struct draft *d)
{
    struct moe_nccl *p = &d->topo.nccl, start = {0};
    MOE_TRY(moe_yaml_read(d->nccl, nccl_keys, sizeof nccl_keys / sizeof *nccl_keys, d));
#define X(member, key, unit, size, start_, rows)                                                             \
    if (d->fitted && p->member == 0)                                                                         \
        return moe_fail(MOE_EINPUT, "%s:%d: nccl is fitted, but has no %s", d->nccl->file, d->nccl->line,    \
                        key);
    MOE_NCCL_PARAMS(X)
#undef X
    start.ring_channels = (int)d->ring_channels;
    start.ring_Bps = p->ring_Bps;
    moe_nccl_start(&start);
    *p = start; /* where nothing is said */
    MOE_TRY(read_block(d->nccl, nccl_keys, sizeof nccl_keys / sizeof *nccl_keys, d));
    p->release = moe_nccl_release(d->version);
    if (!p->release) {
        char why[256];
        snprintf(why, sizeof why, "%s", moe_error());
        return moe_fail(MOE_EINPUT, "%s:%d: version: %s", d->nccl->file, d->nccl->line, why);
    }
    p->arch = (int)d->arch;
    p->nvlink = d->links == 0;
    d->topo.intra_Bps = p->port_Bps;
    if (d->tuning) MOE_TRY(read_tuning(d->tuning, &p->tables));
    return d->fitted ? read_fitted(d->fitted, &p->fitted) : MOE_OK;
}

/* What the file says of kernels; node: NULL where that is nothing. */
static int read_kernels(const struct moe_yaml *node, struct moe_deepep_kernels *out)
{
    struct kernels k = {0};
    if (!node) return MOE_OK;
    MOE_TRY(moe_yaml_read(node, kernels_keys, sizeof kernels_keys / sizeof *kernels_keys, &k));
    const struct moe_yaml *of[2] = {k.dispatch, k.combine};
    for (int i = 0; i < 2; i++)
        if (of[i])
            MOE_TRY(
                moe_yaml_read(of[i], kernel_keys, sizeof kernel_keys / sizeof *kernel_keys, &out->kernel[i]));
    out->error = k.error;
    return MOE_OK;
}

#define READ_BLOCK(block, keys) read_block(block, keys, sizeof keys / sizeof *keys, d)
static int read_deepep(struct draft *d)
{
    struct moe_deepep *p = &d->topo.deepep;
    *p = moe_deepep_default; /* where nothing is said */
    d->deepep_sms = p->sms;
    if (d->deepep) MOE_TRY(READ_BLOCK(d->deepep, deepep_keys));
    p->sms = (int)d->deepep_sms;
    MOE_TRY(read_kernels(d->one_node, &p->one_node));
    return read_kernels(d->nodes, &p->nodes);
}

/* Numbers of the two kernels of a block. */
#define READ_PAIR(block, block_keys, keys, out)                                                              \
    do {                                                                                                     \
        MOE_TRY(READ_BLOCK(block, block_keys));                                                              \
        MOE_TRY(moe_yaml_read(d->dispatch, keys, sizeof keys / sizeof *keys, &(out)[0]));                    \
        MOE_TRY(moe_yaml_read(d->combine, keys, sizeof keys / sizeof *keys, &(out)[1]));                     \
    } while (0)
static int read_low_latency(struct draft *d)
{
    READ_PAIR(d->low_latency, low_latency_block, low_latency_keys, d->topo.low_latency.kernel);
    return MOE_OK;
}

static int read_one_sided(struct draft *d)
{
    READ_PAIR(d->one_sided, one_sided_block, one_sided_keys, d->topo.one_sided.kernel);
    return MOE_OK;
}

static int read_topo(const struct moe_yaml *root, struct draft *d)
{
    MOE_TRY(moe_yaml_read(root, top_keys, sizeof top_keys / sizeof *top_keys, d));
    MOE_TRY(READ_BLOCK(d->gpu, gpu_keys));
    const char *source = d->source->text;
    MOE_TRY(READ_BLOCK(d->intra, intra_keys));
    MOE_TRY(READ_BLOCK(d->inter, inter_keys));
    if (d->host) MOE_TRY(READ_BLOCK(d->host, host_keys));
    if (d->host) MOE_TRY(check_slice(d->host, &d->topo));
    if (d->nccl) MOE_TRY(read_nccl(d));
    MOE_TRY(read_deepep(d));
    if (d->low_latency) MOE_TRY(read_low_latency(d));
    if (d->one_sided) MOE_TRY(read_one_sided(d));
    if (d->gemm) MOE_TRY(READ_BLOCK(d->gemm, gemm_keys));
    d->topo.gpu.n_sms = (int)d->sms;
    d->topo.gpu.shared_bytes = (int64_t)d->shared_bytes;
    if (d->experts && !d->gemm)
        return moe_fail(MOE_EINPUT, "%s:%d: experts needs a block gemm", d->experts->file, d->experts->line);
    if (d->experts) MOE_TRY(READ_BLOCK(d->experts, experts_keys));
    bool shared = d->topo.intra_kind == MOE_INTRA_SHARED;
    if (shared != (d->topo.bus_Bps > 0))
        return moe_fail(MOE_EINPUT, "%s:%d: kind %s %s", d->intra->file, d->intra->line,
                        intra_kinds[d->topo.intra_kind], shared ? "needs a bus" : "has no bus");
    d->topo.source = strdup(source);
    return MOE_OK;
}

static int is_topology(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);
    return n > 5 && strcmp(entry->d_name + n - 5, ".yaml") == 0;
}

static int unknown_name(const char *folder, const char *name)
{
    struct dirent **entry = NULL;
    int n = scandir(folder, &entry, is_topology, alphasort);
    const char **names = moe_alloc(n > 0 ? (size_t)n : 0, sizeof *names);
    for (int i = 0; i < n; i++) {
        entry[i]->d_name[strlen(entry[i]->d_name) - 5] = 0;
        names[i] = entry[i]->d_name;
    }
    char hint[MOE_HINT];
    int err =
        moe_fail(MOE_EINPUT, "unknown topology '%s' in %s%s", name, folder, moe_hint(name, names, n, hint));
    for (int i = 0; i < n; i++) free(entry[i]);
    free(entry);
    free(names);
    return err;
}

int moe_topo_file(const char *name, char path[PATH_MAX])
{
    const char *folder = getenv("MOESIM_TOPOLOGIES");
    if (!folder) folder = MOESIM_TOPOLOGIES_DIR;
    bool is_path = strchr(name, '/') || strstr(name, ".yaml");
    int length =
        is_path ? snprintf(path, PATH_MAX, "%s", name) : snprintf(path, PATH_MAX, "%s/%s.yaml", folder, name);
    if (length >= PATH_MAX) return moe_fail(MOE_EINPUT, "the name of the topology is too long");
    return is_path || access(path, F_OK) == 0 ? MOE_OK : unknown_name(folder, name);
}

int moe_topo_load(const char *name, struct moe_topo **out)
{
    char path[PATH_MAX];
    struct draft d = {0};
    struct moe_yaml *root;
    *out = NULL;
    MOE_TRY(moe_topo_file(name, path));
    MOE_TRY(moe_yaml_load(path, &root));
    int err = read_topo(root, &d);
    moe_yaml_free(root);
    if (err < 0) moe_nccl_tables_free(&d.topo.nccl.tables);
    MOE_TRY(err);
    *out = moe_alloc(1, sizeof **out);
    **out = d.topo;
    return MOE_OK;
}

void moe_topo_free(struct moe_topo *t)
{
    if (!t) return;
    free(t->source);
    moe_nccl_tables_free(&t->nccl.tables);
    free(t->link_Bps);
    free(t->link_class);
    free(t);
}

static void add_links(struct moe_topo *t, int n, double rate_Bps, enum moe_link_class class)
{
    for (int l = t->n_links; l < t->n_links + n; l++) {
        t->link_Bps[l] = rate_Bps;
        t->link_class[l] = class;
    }
    t->n_links += n;
}

static int n_buses(const struct moe_topo *t, int n_nodes)
{
    return t->intra_kind == MOE_INTRA_SHARED ? n_nodes : 0;
}

static int node_of(const struct moe_topo *t, int rank)
{
    return rank / (int)t->gpus_per_node;
}

void moe_topo_build(struct moe_topo *t, int n_ranks)
{
    moe_assert(n_ranks > 0);
    int n_nodes = node_of(t, n_ranks - 1) + 1;
    int64_t n_nics = n_nodes * t->nics_per_node;
    int64_t n_links = 2 * (n_ranks + n_nics) + n_buses(t, n_nodes);
    moe_assert(n_links <= INT_MAX);
    free(t->link_Bps);
    free(t->link_class);
    t->link_Bps = moe_alloc((size_t)n_links, sizeof *t->link_Bps);
    t->link_class = moe_alloc((size_t)n_links, sizeof *t->link_class);
    t->n_ranks = n_ranks;
    t->n_links = 0;
    add_links(t, 2 * n_ranks, t->intra_Bps, MOE_LINK_INTRA);
    add_links(t, n_buses(t, n_nodes), t->bus_Bps, MOE_LINK_BUS);
    add_links(t, 2 * (int)n_nics, t->nic_Bps, MOE_LINK_NIC);
}

/* The out link of the rank's NIC; its in link is the next one. */
static int nic_link(const struct moe_topo *t, int rank)
{
    int n_nodes = node_of(t, t->n_ranks - 1) + 1;
    int64_t gpu = rank % t->gpus_per_node, nic = gpu * t->nics_per_node / t->gpus_per_node;
    return 2 * t->n_ranks + n_buses(t, n_nodes) + 2 * (int)(node_of(t, rank) * t->nics_per_node + nic);
}

int moe_topo_path(const struct moe_topo *t, int a, int b, int path[MOE_PATH_MAX])
{
    int n = 0, node_a = node_of(t, a), node_b = node_of(t, b);
    bool shared = t->intra_kind == MOE_INTRA_SHARED, intra = node_a == node_b;
    moe_assert(a >= 0 && a < t->n_ranks && b >= 0 && b < t->n_ranks);
    if (a == b) return 0;
    if (shared || intra) path[n++] = a;
    if (shared) path[n++] = 2 * t->n_ranks + node_a;
    if (!intra) path[n++] = nic_link(t, a);
    if (!intra) path[n++] = nic_link(t, b) + 1;
    if (shared && !intra) path[n++] = 2 * t->n_ranks + node_b;
    if (shared || intra) path[n++] = t->n_ranks + b;
    return n;
}

double moe_topo_latency_s(const struct moe_topo *t, int a, int b)
{
    if (a == b) return 0;
    return node_of(t, a) == node_of(t, b) ? t->intra_latency_s : t->inter_latency_s;
}
