/* grid.c - see grid.h. Threads take variants by number and write into their own variant only. */
#include "sim/cli/grid.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- keys ---- */

/* Its names are shorter than paths; moe_predict takes the value. */
static int set_topology(struct moe_scenario *sc, const char *value)
{
    struct moe_topo *t;
    (void)sc;
    MOE_TRY(moe_topo_load(value, &t));
    moe_topo_free(t);
    return MOE_OK;
}

static int set_dispatcher(struct moe_scenario *sc, const char *value)
{
    MOE_TRY(moe_dispatcher_check(value));
    moe_copy_name(sc->dispatcher, value);
    return MOE_OK;
}

static int set_capacity(struct moe_scenario *sc, const char *value)
{
    return moe_capacity_set(value, &sc->capacity);
}

static int set_expert_parallel(struct moe_scenario *sc, const char *value)
{
    char *end;
    sc->expert_parallel = strtoll(value, &end, 10);
    return !*end && sc->expert_parallel >= 1 ? MOE_OK : moe_fail(MOE_EINPUT, "expected a number of ranks");
}

static int set_rank_order(struct moe_scenario *sc, const char *value)
{
    for (sc->rank_order = 0; sc->rank_order < MOE_RANK_ORDER_COUNT; sc->rank_order++)
        if (!strcmp(value, moe_rank_order_text[sc->rank_order])) return MOE_OK;
    return moe_fail(MOE_EINPUT, "expected consecutive or strided");
}

const struct moe_vary moe_vary[MOE_VARY_COUNT] = {
    [MOE_VARY_TOPOLOGY] = {"topology", "topology", set_topology},
    [MOE_VARY_DISPATCHER] = {"dispatcher", "dispatcher", set_dispatcher},
    [MOE_VARY_CAPACITY] = {"capacity.factor", "capacity", set_capacity},
    [MOE_VARY_EP] = {"layout.expert_parallel", "ep", set_expert_parallel},
    [MOE_VARY_ORDER] = {"layout.rank_order", "rank_order", set_rank_order},
};

/* ---- what to compare ---- */

static void add_value(struct moe_grid *g, int key, const char *text, size_t length)
{
    int cap = g->n_values[key];
    g->value[key] = moe_grow(g->value[key], &cap, cap + 1, sizeof *g->value[key]);
    g->value[key][g->n_values[key]++] = strndup(text, length);
}

/* "1.25" of rule megatron becomes "megatron:1.25". */
static void show_rule(const struct moe_capacity *c, char **value)
{
    char rule[MOE_CAPACITY_TEXT], *end, *text = *value;
    moe_decimal(text, &end);
    if (end == text || *end) return; /* it names its rule */
    snprintf(rule, sizeof rule, "%s:%s", c->rule, text);
    *value = strdup(rule);
    free(text);
}

/* Values that no variant could have are errors of the command line. A capacity is shown with its rule, which
 * sets it again. */
static int check_value(const struct moe_input *in, int key, const char *text, char **value)
{
    struct moe_scenario sc = *in->scenario;
    if (!**value) return moe_fail(MOE_EUSAGE, "--vary %s: an empty value", text);
    int err = moe_vary[key].set(&sc, *value);
    if (err < 0 && key == MOE_VARY_TOPOLOGY) return err; /* a file */
    if (err < 0) return moe_fail(MOE_EUSAGE, "--vary %s: no value '%s': %s", text, *value, moe_error());
    if (key == MOE_VARY_CAPACITY) show_rule(&sc.capacity, value);
    return MOE_OK;
}

/* "key=value[,value...]" */
static int read_vary(struct moe_grid *g, const struct moe_input *in, const char *text)
{
    const char *names[MOE_VARY_COUNT];
    char name[MOE_NAME], hint[MOE_HINT];
    int key = 0;
    size_t length = strcspn(text, "=");
    snprintf(name, sizeof name, "%.*s", (int)length, text);
    for (; key < MOE_VARY_COUNT; key++) {
        names[key] = moe_vary[key].column;
        if (!strcmp(name, names[key]) || !strcmp(name, moe_vary[key].name)) break;
    }
    if (key == MOE_VARY_COUNT)
        return moe_fail(MOE_EUSAGE, "--vary %s: unknown key%s", text, moe_hint(name, names, key, hint));
    const char *value = text + length;
    do {
        value += *value != 0; /* past '=' or ',' */
        length = strcspn(value, ",");
        add_value(g, key, value, length);
        MOE_TRY(check_value(in, key, text, &g->value[key][g->n_values[key] - 1]));
        value += length;
    } while (*value);
    return MOE_OK;
}

/* What the scenario itself says. */
static void add_own_values(struct moe_grid *g, const struct moe_input *in)
{
    const struct moe_scenario *sc = in->scenario;
    char capacity[MOE_CAPACITY_TEXT], ep[MOE_NAME];
    moe_capacity_text(&sc->capacity, capacity);
    snprintf(ep, sizeof ep, "%lld", (long long)sc->expert_parallel);
    const char *own[MOE_VARY_COUNT] = {in->topology, sc->dispatcher, capacity, ep,
                                       moe_rank_order_text[sc->rank_order]};
    for (int key = 0; key < MOE_VARY_COUNT; key++) {
        if (g->n_values[key]) continue;
        add_value(g, key, own[key], strlen(own[key]));
        g->own[key] = true;
    }
}

int moe_grid_make(struct moe_grid *g, const struct moe_args *args, const struct moe_input *in)
{
    *g = (struct moe_grid){.n = 1};
    for (int i = 0; i < args->n_vary; i++) MOE_TRY(read_vary(g, in, args->vary[i]));
    add_own_values(g, in);
    for (int key = 0; key < MOE_VARY_COUNT; key++) g->n *= g->n_values[key];
    g->variants = moe_alloc((size_t)g->n, sizeof *g->variants);
    g->rank = moe_alloc((size_t)g->n, sizeof *g->rank);
    for (int i = 0; i < g->n; i++) {
        struct moe_variant *v = &g->variants[i];
        v->sc = *in->scenario;
        for (int key = MOE_VARY_COUNT - 1, rest = i; key >= 0; rest /= g->n_values[key--]) {
            v->value[key] = g->value[key][rest % g->n_values[key]];
            if (!g->own[key]) moe_vary[key].set(&v->sc, v->value[key]);
        }
    }
    return MOE_OK;
}

void moe_grid_free(struct moe_grid *g)
{
    for (int i = 0; g->variants && i < g->n; i++) {
        moe_sim_free(&g->variants[i].r);
        moe_verdicts_free(&g->variants[i].verdicts);
        free(g->variants[i].error);
    }
    for (int key = 0; key < MOE_VARY_COUNT; key++) {
        for (int i = 0; i < g->n_values[key]; i++) free(g->value[key][i]);
        free(g->value[key]);
    }
    free(g->variants);
    free(g->rank);
}

/* ---- run ---- */

/* Variants of one topology: that key varies slowest. */
static int per_topology(const struct moe_grid *g)
{
    return g->n / g->n_values[MOE_VARY_TOPOLOGY];
}

const struct moe_verdicts *moe_variant_verdicts(const struct moe_grid *g, const struct moe_variant *v)
{
    return &g->variants[(v - g->variants) % per_topology(g)].verdicts;
}

static int run_variant(const struct moe_grid *g, struct moe_variant *v, const struct moe_input *in)
{
    struct moe_schedule *s;
    MOE_TRY(moe_scenario_check_layout(&v->sc));
    MOE_TRY(moe_lower(&v->sc, &s));
    v->kept = moe_values_kept(s, in->routing);
    v->kept_tokens = (double)in->tokens;
    if (v->kept.chosen) v->kept_tokens *= 1 - (double)v->kept.dropped / (double)v->kept.chosen;
    if (v - g->variants < per_topology(g)) moe_check(s, in->routing, &v->verdicts);
    int err = moe_predict(s, in->routing, v->value[MOE_VARY_TOPOLOGY], &v->r);
    moe_schedule_free(s);
    return err;
}

struct work {
    struct moe_grid *g;
    const struct moe_input *in;
    atomic_int next;
};

static void *run_some(void *arg)
{
    struct work *w = arg;
    for (int i; (i = atomic_fetch_add(&w->next, 1)) < w->g->n;) {
        struct moe_variant *v = &w->g->variants[i];
        v->err = run_variant(w->g, v, w->in);
        if (v->err < 0) v->error = strdup(moe_error());
    }
    return NULL;
}

double moe_variant_cost_us(const struct moe_variant *v)
{
    return moe_step_us(&v->r) / (v->kept_tokens > 0 ? v->kept_tokens : 1);
}

static int by_cost(const void *a, const void *b, void *variants)
{
    int i = *(const int *)a, j = *(const int *)b;
    const struct moe_variant *all = variants;
    double x = moe_variant_cost_us(&all[i]), y = moe_variant_cost_us(&all[j]);
    if (all[i].wrong != all[j].wrong) return all[i].wrong - all[j].wrong;
    return x != y ? (x > y) - (x < y) : i - j;
}

static bool is_wrong(const struct moe_verdicts *v)
{
    int i = 0;
    while (i < v->n && v->item[i].severity != MOE_SEVERITY_ERROR) i++;
    return i < v->n;
}

int moe_grid_run(struct moe_grid *g, const struct moe_input *in, int64_t n_threads)
{
    struct work w = {.g = g, .in = in};
    int n = 0, cores = (int)sysconf(_SC_NPROCESSORS_ONLN),
        most = n_threads && n_threads < g->n ? (int)n_threads : g->n;
    if (!n_threads && cores < most) most = cores;
    pthread_t *threads = moe_alloc((size_t)most, sizeof *threads);
    while (n < most - 1 && pthread_create(&threads[n], NULL, run_some, &w) == 0) n++;
    run_some(&w); /* this thread is one of them */
    while (n > 0) pthread_join(threads[--n], NULL);
    free(threads);
    for (int i = 0; i < g->n; i++) {
        struct moe_variant *v = &g->variants[i];
        v->wrong = is_wrong(moe_variant_verdicts(g, v));
        if (v->err < 0) continue;
        g->rank[g->n_ok++] = i;
        g->n_right += !v->wrong;
    }
    if (!g->n_ok) return moe_fail(g->variants[0].err, "%s", g->variants[0].error);
    qsort_r(g->rank, (size_t)g->n_ok, sizeof *g->rank, by_cost, g->variants);
    return MOE_OK;
}
