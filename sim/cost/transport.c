/* transport.c - see transport.h. */
#include "sim/cost/transport.h"

#include "sim/cost/deepep.h"

#include <stdlib.h>

/* The traffic of a collective, with what it points to. */
struct traffic {
    struct moe_deepep_traffic x;
    int *first;
    double *to_rank, *to_node;
};

static bool goes_home(enum moe_transport by)
{
    return by == MOE_BY_DEEPEP_COMBINE || by == MOE_BY_DEEPEP_COMBINED;
}

static struct traffic new_traffic(const struct moe_topo *t, const struct moe_moved *m, enum moe_transport by)
{
    size_t n = (size_t)m->n;
    struct traffic f = {.x = {.combine = goes_home(by), .rides = moe_transport_rides[by], .n = m->n}};
    f.x.sms = t->deepep.sms;
    f.x.rank = m->rank;
    f.x.first = f.first = moe_alloc(n + 1, sizeof *f.first);
    for (int i = 1; i < m->n; i++) {
        int64_t node = m->rank[i] / t->gpus_per_node, before = m->rank[i - 1] / t->gpus_per_node;
        moe_assert(node >= before); /* members are in order */
        if (node > before) f.first[++f.x.n_nodes] = i;
    }
    f.first[++f.x.n_nodes] = m->n;
    f.x.to_rank = f.to_rank = moe_alloc(n * n, sizeof *f.to_rank);
    f.x.to_node = f.to_node = moe_alloc(n * (size_t)f.x.n_nodes, sizeof *f.to_node);
    return f;
}

static void free_traffic(struct traffic *f)
{
    free(f->first);
    free(f->to_rank);
    free(f->to_node);
}

static bool is_even(const struct moe_deepep_traffic *x)
{
    for (int d = 0; d < x->n_nodes; d++)
        if ((x->first[d + 1] - x->first[d]) * x->n_nodes != x->n) return false;
    return true;
}

/* What tokens of a member there are for each node in the place of those for each of its ranks. Result: how
 * many there are for all ranks, 0: not known. */
static int64_t share_nodes(struct traffic *f, int home, struct moe_values *values, int layer)
{
    const int32_t *to_rank = moe_values_peers(values, f->x.rank[home], layer, f->x.n),
                  *to_node = moe_values_peers(values, f->x.rank[home], layer, f->x.n_nodes);
    int64_t all = 0;
    if (!to_rank || !to_node) return 0;
    for (int d = 0; d < f->x.n_nodes; d++) {
        int64_t rows = 0;
        for (int i = f->first[d]; i < f->first[d + 1]; i++) rows += to_rank[i];
        if (rows) f->to_node[home * f->x.n_nodes + d] *= (double)to_node[d] / (double)rows;
        all += rows;
    }
    return all;
}

static void set_traffic(struct traffic *f, const struct moe_moved *m, struct moe_values *values, int layer)
{
    int n = f->x.n, nodes = f->x.n_nodes;
    double bytes = 0;
    int64_t rows = 0;
    for (int home = 0; home < n; home++)
        for (int d = 0; d < nodes; d++)
            for (int i = f->first[d]; i < f->first[d + 1]; i++) {
                double b = (double)m->bytes[f->x.combine ? i * (int64_t)n + home : home * (int64_t)n + i];
                f->to_rank[home * (int64_t)n + i] = b;
                f->to_node[home * nodes + d] += b;
                bytes += b;
            }
    if (!values) return;
    for (int home = 0; home < n; home++) rows += share_nodes(f, home, values, layer);
    if (rows) f->x.row_bytes = bytes / (double)rows;
}

int moe_transport_plan(const struct moe_topo *t, enum moe_transport by, const struct moe_moved *m,
                       struct moe_values *values, int layer, struct moe_plan *out, double *error)
{
    if (by == MOE_BY_NCCL || m->n == 1 || t->cores) {
        moe_collective_plan(t, m, out);
        *error = moe_collective_error(t, m);
        return MOE_OK;
    }
    if (t->intra_kind != MOE_INTRA_SWITCH)
        return moe_fail(MOE_EINPUT, "intra is of kind shared, DeepEP needs NVLink: expected kind switch");
    struct traffic f = new_traffic(t, m, by);
    set_traffic(&f, m, by != MOE_BY_DEEPEP_NOTIFY && is_even(&f.x) ? values : NULL, layer);
    out->n = 0;
    out->together = false;
    const struct moe_deepep_kernels *kernels = f.x.n_nodes == 1 ? &t->deepep.one_node : &t->deepep.nodes;
    moe_deepep_traffic_plan(&kernels->kernel[f.x.combine], t, &f.x, out);
    free_traffic(&f);
    *error = kernels->error;
    return MOE_OK;
}
