/* transport.c - see transport.h. */
#include "sim/cost/transport.h"

#include "sim/cost/deepep.h"
#include "sim/cost/onesided.h"

#include <stdlib.h>

/* The traffic of a collective, with what it points to. */
struct traffic {
    struct moe_deepep_traffic x;
    int *first;
    double *to_rank, *to_node;
};

static struct traffic new_traffic(const struct moe_topo *t, const struct moe_moved *m, enum moe_transport by)
{
    size_t n = (size_t)m->n;
    struct traffic f = {
        .x = {.combine = moe_transport_home[by], .rides = moe_transport_rides[by], .n = m->n}};
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

/* A collective as its transport moves it. */
struct asked {
    const struct moe_topo *t;
    enum moe_transport by;
    const struct moe_moved *m;
    const struct moe_schedule *s;
    struct moe_values *values;
    int layer;
};

static double deepep(const struct asked *a, struct moe_plan *out)
{
    struct traffic f = new_traffic(a->t, a->m, a->by);
    set_traffic(&f, a->m, a->by != MOE_BY_DEEPEP_NOTIFY && is_even(&f.x) ? a->values : NULL, a->layer);
    const struct moe_deepep_kernels *kernels =
        f.x.n_nodes == 1 ? &a->t->deepep.one_node : &a->t->deepep.nodes;
    moe_deepep_traffic_plan(&kernels->kernel[f.x.combine], a->t, &f.x, out);
    free_traffic(&f);
    return kernels->error;
}

static bool one_node(const struct asked *a)
{
    return a->m->rank[0] / a->t->gpus_per_node == a->m->rank[a->m->n - 1] / a->t->gpus_per_node;
}

static double low_latency(const struct asked *a, struct moe_plan *out)
{
    size_t pairs = (size_t)a->m->n * (size_t)a->m->n;
    double *bytes = moe_alloc(pairs, sizeof *bytes);
    for (size_t i = 0; i < pairs; i++) bytes[i] = (double)a->m->bytes[i];
    const struct moe_low_latency_traffic x = {.rides = moe_transport_rides[a->by],
                                              .n = a->m->n,
                                              .experts = a->s->n_experts,
                                              .rank = a->m->rank,
                                              .bytes = bytes};
    moe_low_latency_traffic_plan(&a->t->low_latency.kernel[moe_transport_home[a->by]], a->t, &x, out);
    free(bytes);
    return a->t->low_latency.error[!one_node(a)];
}

/* How many other ranks a token of a member goes to; where the routing is not known, all that get anything. */
static double others_of(const struct asked *a, int home, const double *bytes, int64_t *rows)
{
    const int32_t *to_rank =
        a->values ? moe_values_peers(a->values, a->m->rank[home], a->layer, a->m->n) : NULL;
    int64_t tokens = a->s->tokens[a->m->rank[home]], others = 0;
    for (int i = 0; i < a->m->n; i++) {
        int64_t here = to_rank ? to_rank[i] : bytes[i] > 0 ? tokens : 0;
        if (i != home) others += here;
        if (to_rank) *rows += here;
    }
    return tokens > 0 ? (double)others / (double)tokens : 0;
}

static double one_sided(const struct asked *a, struct moe_plan *out)
{
    size_t n = (size_t)a->m->n;
    double *bytes = moe_alloc(n * n, sizeof *bytes), *others = moe_alloc(n, sizeof *others), all = 0;
    int64_t *token = moe_alloc(n, sizeof *token), rows = 0;
    bool home = moe_transport_home[a->by];
    for (size_t i = 0; i < n; i++) {
        for (size_t to = 0; to < n; to++)
            all += bytes[i * n + to] = (double)a->m->bytes[home ? to * n + i : i * n + to];
        token[i] = a->s->tokens[a->m->rank[i]];
        others[i] = others_of(a, (int)i, bytes + i * n, &rows);
    }
    const struct moe_onesided_traffic x = {.combine = home,
                                           .rides = moe_transport_rides[a->by],
                                           .n = a->m->n,
                                           .rank = a->m->rank,
                                           .token = token,
                                           .others = others,
                                           .bytes = bytes,
                                           .row_bytes = rows ? all / (double)rows : 0};
    moe_onesided_traffic_plan(&a->t->one_sided.kernel[home], a->t, &x, out);
    free(bytes);
    free(others);
    free(token);
    return a->t->one_sided.error;
}

/* What moves the bytes where it is not NCCL; which block of the topology it needs, and whether one is there.
 * */
static int check_machine(const struct asked *a, enum moe_library library)
{
    const struct moe_topo *t = a->t;
    if (t->intra_kind != MOE_INTRA_SWITCH)
        return moe_fail(MOE_EINPUT, "intra is of kind shared, %s needs NVLink: expected kind switch",
                        library == MOE_LIBRARY_ONE_SIDED ? "nvlink_one_sided" : "DeepEP");
    if (library == MOE_LIBRARY_LOW_LATENCY && !(t->low_latency.kernel[0].copy_Bps > 0))
        return moe_fail(MOE_EINPUT, "it has no block deepep_low_latency, which says what those kernels take");
    if (library != MOE_LIBRARY_ONE_SIDED) return MOE_OK;
    if (!(t->one_sided.kernel[0].start_s > 0))
        return moe_fail(MOE_EINPUT, "it has no block nvlink_one_sided, which says what those kernels take");
    if (!one_node(a))
        return moe_fail(MOE_EINPUT,
                        "ranks %d and %d are in different NVLink domains of %lld, expected all %d that split "
                        "the experts in one for one-sided kernels",
                        a->m->rank[0], a->m->rank[a->m->n - 1], (long long)t->gpus_per_node, a->m->n);
    return MOE_OK;
}

int moe_transport_plan(const struct moe_topo *t, enum moe_transport by, const struct moe_moved *m,
                       const struct moe_schedule *s, struct moe_values *values, int layer,
                       struct moe_plan *out, double *error)
{
    static double (*const plan[MOE_LIBRARY_COUNT])(const struct asked *, struct moe_plan *) = {
        [MOE_LIBRARY_DEEPEP] = deepep,
        [MOE_LIBRARY_LOW_LATENCY] = low_latency,
        [MOE_LIBRARY_ONE_SIDED] = one_sided};
    const struct asked a = {t, by, m, s, values, layer};
    if (by == MOE_BY_NCCL || m->n == 1 || t->cores) {
        moe_collective_plan(t, m, out);
        *error = moe_collective_error(t, m);
        return MOE_OK;
    }
    MOE_TRY(check_machine(&a, moe_transport_library[by]));
    out->n = 0;
    out->together = false;
    *error = plan[moe_transport_library[by]](&a, out);
    return MOE_OK;
}
