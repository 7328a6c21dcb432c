/* summary.c - see summary.h: from the store to numbers. The words are in findings.c.
 *
 * A capture keeps operations by their place in the schedule, so the store's own scenario is lowered again to
 * learn each operation's pass and the group of each collective. */
#include "reports/summary.h"

#include "sim/cost/calibrate.h"
#include "sim/lower/lower.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FORWARD, BACKWARD, UPDATE, COLLECTIVES, WAITING, REST }; /* parts of a measured step */
static const char *const measured_parts[MOE_MEASURED_PARTS] = {
    "forward", "backward", "update", "collectives", "waiting for others", "host and idle"};
static const char *const simulated_parts[MOE_SIMULATED_PARTS] = {
    "compute", "exposed collectives", "waiting for others", "host and idle", "dropped rows"};

enum { MAX_MEASURED = 17, MAX_SIMULATED = 12 }; /* bars in figures and tables; the CSV has all */

/* ---- routing ---- */

static struct moe_matrix new_matrix(const char *from, int n_from, const char *to, int n_to)
{
    size_t n = (size_t)n_from * (size_t)n_to;
    return (struct moe_matrix){
        from, to, n_from, n_to, moe_alloc(n, sizeof(int64_t)), moe_alloc(n, sizeof(double)),
        2}; /* at least, so that balance looks so */
}

/* partners: how many of the columns can be more than 0. */
static void complete_matrix(struct moe_matrix *m, int partners)
{
    for (int from = 0; from < m->n_from; from++) {
        const int64_t *count = m->count + from * m->n_to;
        int64_t total = 0;
        for (int to = 0; to < m->n_to; to++) total += count[to];
        for (int to = 0; to < m->n_to && total; to++) {
            double relative = (double)(count[to] * partners) / (double)total;
            m->relative[from * m->n_to + to] = relative;
            m->max = fmax(m->max, relative);
        }
    }
}

static int load_routing(struct moe_store *s, int64_t step, struct moe_load *out)
{
    MOE_TRY(moe_routing_load(s, step, &out->routing));
    const struct moe_routing *r = out->routing;
    const int E = r->n_experts;
    out->step = step;
    out->tokens = new_matrix("layer", r->n_layers, "expert", E);
    for (int l = 0; l < r->n_layers; l++)
        for (int i = 0; i < r->n_ranks * E; i++)
            out->tokens.count[l * E + i % E] += moe_routing_counts(r, l, 0)[i];
    complete_matrix(&out->tokens, E);
    return MOE_OK;
}

double moe_dropped_share(const struct moe_routing *r, int layer, double factor)
{
    int64_t chosen = 0, dropped = 0;
    for (int i = 0; i < r->n_layers * r->n_ranks; i++) {
        int l = i / r->n_ranks, rank = i % r->n_ranks;
        if (layer >= 0 && l != layer) continue;
        int64_t rows = r->tokens[rank] * r->top_k;
        int64_t capacity = (int64_t)ceil((double)rows / r->n_experts * factor);
        chosen += rows;
        for (int e = 0; e < r->n_experts; e++) {
            int64_t over = moe_routing_counts(r, l, rank)[e] - capacity;
            dropped += over > 0 ? over : 0;
        }
    }
    return chosen ? (double)dropped / (double)chosen : 0;
}

/* The experts are split over the communicator "ep", in the order of its members. */
static void load_traffic(const struct moe_schedule *s, struct moe_summary *m)
{
    const struct moe_routing *r = m->last.routing;
    const struct moe_comm *ep = s->comms;
    const int size = (int)m->scenario->expert_parallel, per_rank = r->n_experts / size;
    m->traffic = new_matrix("from rank", r->n_ranks, "to rank", r->n_ranks);
    m->row_bytes = m->scenario->hidden * moe_type_bytes[m->scenario->dtype];
    while (strcmp(ep->name, "ep") != 0) ep++;
    for (int i = 0; i < r->n_layers * r->n_ranks; i++) {
        int from = i % r->n_ranks;
        const int *members = ep->members + ep->first[ep->group_of[from]];
        for (int e = 0; e < r->n_experts; e++)
            m->traffic.count[from * r->n_ranks + members[e / per_rank]] +=
                moe_routing_counts(r, i / r->n_ranks, from)[e];
    }
    complete_matrix(&m->traffic, size);
}

/* ---- which step is the median one ---- */

struct span {
    int64_t step, ns; /* from the first entry to the last end on the slowest rank */
};
struct spans {
    int n, cap, rank; /* rank: the one that is being read */
    int64_t begin_ns;
    struct span *items;
};

/* Operations come ordered by step and rank. */
static int add_to_span(void *ctx, const struct moe_store_op *op)
{
    struct spans *s = ctx;
    bool new_step = !s->n || s->items[s->n - 1].step != op->step;
    if (new_step) {
        s->items = moe_grow(s->items, &s->cap, s->n + 1, sizeof *s->items);
        s->items[s->n++].step = op->step;
    }
    if (new_step || s->rank != op->rank) {
        s->rank = op->rank;
        s->begin_ns = op->entry_ns;
    }
    struct span *span = &s->items[s->n - 1];
    if (op->end_ns - s->begin_ns > span->ns) span->ns = op->end_ns - s->begin_ns;
    return MOE_OK;
}

static int by_duration(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->ns != y->ns) return x->ns < y->ns ? -1 : 1;
    return (x->step > y->step) - (x->step < y->step);
}

static int find_median_step(struct moe_store *s, const struct moe_store_info *info, struct span *out)
{
    struct spans spans = {0};
    int err = moe_store_each_op(s, info->first_step, info->last_step, add_to_span, &spans);
    if (err >= 0 && !spans.n) err = moe_fail(MOE_EINPUT, "no operation was recorded");
    if (err >= 0) {
        qsort(spans.items, (size_t)spans.n, sizeof *spans.items, by_duration);
        *out = spans.items[(spans.n - 1) / 2];
    }
    free(spans.items);
    return err;
}

/* ---- where its time went ---- */

/* A collective of one rank. Those with the same key and group are one collective; all
 * ranks share one role. */
struct entry {
    int layer, block, op, group, rank;
    int64_t entry_ns, end_ns;
};
struct breakdown {
    const struct moe_schedule *schedule;
    struct moe_bar *bars; /* [R] */
    int n, cap;
    struct entry *entries;
};

static const struct moe_op *find_op(const struct moe_schedule *s, const struct moe_store_op *op,
                                    enum moe_pass *pass)
{
    if (op->rank < 0 || op->rank >= s->n_ranks) return NULL;
    const struct moe_role *role = &s->roles[s->role_of[op->rank]];
    if (op->block < 0 || op->block >= role->n_blocks) return NULL;
    const struct moe_block *block = &role->blocks[op->block];
    *pass = block->pass;
    for (int i = 0; i < block->n_ops; i++)
        if (block->ops[i].id == op->op) return &block->ops[i];
    return NULL;
}

static int add_to_breakdown(void *ctx, const struct moe_store_op *op)
{
    struct breakdown *d = ctx;
    enum moe_pass pass;
    const struct moe_op *planned = find_op(d->schedule, op, &pass);
    if (!planned)
        return moe_fail(MOE_EINPUT, "'%s' of rank %d is not in the schedule of the scenario", op->label,
                        op->rank);
    if (planned->kind == MOE_COLLECTIVE) {
        d->entries = moe_grow(d->entries, &d->cap, d->n + 1, sizeof *d->entries);
        d->entries[d->n++] = (struct entry){
            op->layer, op->block,    op->op,    d->schedule->comms[planned->comm].group_of[op->rank],
            op->rank,  op->entry_ns, op->end_ns};
    } else if (planned->kind == MOE_KERNEL) {
        int part = pass == MOE_FORWARD ? FORWARD : pass == MOE_BACKWARD ? BACKWARD : UPDATE;
        d->bars[op->rank].part_us[part] += (double)(op->end_ns - op->entry_ns) / 1e3;
    }
    return MOE_OK;
}

static int by_collective(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->layer != y->layer) return x->layer - y->layer;
    if (x->block != y->block) return x->block - y->block;
    if (x->op != y->op) return x->op - y->op;
    return x->group - y->group;
}

/* Own time is exit minus latest entry of the group, waiting the rest; a rank that had nothing to receive may
 * leave before the latest one enters. */
static void split_collectives(struct breakdown *d)
{
    if (d->n) qsort(d->entries, (size_t)d->n, sizeof *d->entries, by_collective);
    for (int i = 0, end; i < d->n; i = end) {
        int64_t latest_ns = d->entries[i].entry_ns;
        for (end = i; end < d->n && by_collective(&d->entries[i], &d->entries[end]) == 0; end++)
            if (d->entries[end].entry_ns > latest_ns) latest_ns = d->entries[end].entry_ns;
        for (int j = i; j < end; j++) {
            const struct entry *e = &d->entries[j];
            int64_t met_ns = latest_ns < e->end_ns ? latest_ns : e->end_ns;
            d->bars[e->rank].part_us[WAITING] += (double)(met_ns - e->entry_ns) / 1e3;
            d->bars[e->rank].part_us[COLLECTIVES] += (double)(e->end_ns - met_ns) / 1e3;
        }
    }
}

/* bars[0] becomes the mean of the others; what no part holds is the rest. */
static void complete_bars(struct moe_bars *b, double step_us)
{
    struct moe_bar *mean = &b->bars[0];
    snprintf(mean->name, sizeof mean->name, "mean of ranks");
    for (int i = b->n - 1; i >= 0; i--) {
        struct moe_bar *bar = &b->bars[i];
        bar->step_us = bar->part_us[REST] = step_us;
        for (int p = 0; p < REST; p++) {
            bar->part_us[REST] -= bar->part_us[p];
            mean->part_us[p] += i ? bar->part_us[p] / (b->n - 1) : 0;
        }
        if (i) snprintf(bar->name, sizeof bar->name, "rank %d", i - 1);
    }
}

static int load_measured(struct moe_store *s, struct moe_summary *m)
{
    struct moe_bars *b = &m->measured;
    struct moe_schedule *schedule;
    struct span median;
    MOE_TRY(find_median_step(s, &m->info, &median));
    MOE_TRY(moe_lower(m->scenario, &schedule));
    m->median_step = median.step;
    b->n = schedule->n_ranks + 1;
    b->n_shown = b->n < MAX_MEASURED ? b->n : MAX_MEASURED;
    b->bars = moe_grow(NULL, &b->cap, b->n, sizeof *b->bars);
    struct breakdown d = {.schedule = schedule, .bars = b->bars + 1};
    int err = moe_store_each_op(s, median.step, median.step, add_to_breakdown, &d);
    load_traffic(schedule, m);
    split_collectives(&d);
    complete_bars(b, (double)median.ns / 1e3);
    free(d.entries);
    moe_schedule_free(schedule);
    return err;
}

/* ---- simulated ---- */

struct results {
    int n, cap;
    struct moe_store_result *items;
};

static int add_result(void *ctx, const struct moe_store_result *r)
{
    struct results *all = ctx;
    all->items = moe_grow(all->items, &all->cap, all->n + 1, sizeof *all->items);
    all->items[all->n++] = *r;
    return MOE_OK;
}

enum { KEYS = 5 }; /* what may differ between results */

static const char *key_text(const struct moe_store_result *r, int key, char text[MOE_NAME])
{
    switch (key) {
    case 0: return r->topology;
    case 1: return r->dispatcher;
    case 2: snprintf(text, MOE_NAME, r->capacity != 0 ? "capacity %g" : "dropless", r->capacity); return text;
    case 3: snprintf(text, MOE_NAME, "EP %lld", (long long)r->expert_parallel); return text;
    default: return r->rank_order;
    }
}

/* Only what varies; the topology where nothing does. */
static void name_results(const struct results *all, struct moe_bar *bars)
{
    char text[MOE_NAME], other[MOE_NAME];
    for (int key = 0; key < KEYS; key++) {
        bool varies = false;
        for (int i = 1; i < all->n; i++)
            varies |= strcmp(key_text(&all->items[i], key, text), key_text(all->items, key, other)) != 0;
        for (int i = 0; i < all->n && varies; i++) {
            size_t used = strlen(bars[i].name);
            snprintf(bars[i].name + used, sizeof bars->name - used, "%s%s", used ? ", " : "",
                     key_text(&all->items[i], key, text));
        }
    }
    for (int i = 0; i < all->n; i++)
        if (!*bars[i].name) moe_copy_name(bars[i].name, all->items[i].topology);
}

static int by_cost(const void *a, const void *b)
{
    const struct moe_bar *x = a, *y = b;
    if (x->kept_us != y->kept_us) return x->kept_us < y->kept_us ? -1 : 1;
    return x->id - y->id;
}

static int load_simulated(struct moe_store *s, struct moe_bars *b)
{
    struct results all = {0};
    int err = moe_store_each_result(s, add_result, &all);
    b->bars = moe_grow(NULL, &b->cap, all.n, sizeof *b->bars);
    b->n = all.n;
    b->n_shown = b->n < MAX_SIMULATED ? b->n : MAX_SIMULATED;
    for (int i = 0; i < all.n; i++) {
        const struct moe_store_result *r = &all.items[i];
        double kept_us = r->step_us / (1 - r->dropped_share);
        b->bars[i] = (struct moe_bar){
            .step_us = r->step_us,
            .part_us = {r->compute_us, r->exposed_us, r->waiting_us, r->host_us, kept_us - r->step_us},
            .kept_us = kept_us,
            .dropped = r->dropped_share,
            .id = i};
    }
    name_results(&all, b->bars);
    if (b->n) qsort(b->bars, (size_t)b->n, sizeof *b->bars, by_cost);
    free(all.items);
    return err;
}

/* ---- validated ---- */

/* The step is the sum of its phases, and stays first where one phase is all of it. */
static int by_length(const void *a, const void *b)
{
    const struct moe_phase *x = a, *y = b;
    const bool x_step = !strcmp(x->name, "step"), y_step = !strcmp(y->name, "step");
    if (x_step != y_step) return y_step - x_step;
    const double x_us = fmax(x->measured_us, x->predicted_us), y_us = fmax(y->measured_us, y->predicted_us);
    if (x_us != y_us) return x_us < y_us ? 1 : -1;
    return strcmp(x->name, y->name);
}

static int read_phases(const char *path, FILE *f, struct moe_phases *out)
{
    char *line = NULL;
    size_t size = 0;
    bool good = getline(&line, &size, f) >= 0;
    out->fitted = good && !strcmp(line, "phase,measured_us,fitted_us\n");
    good = out->fitted || (good && !strcmp(line, "phase,measured_us,predicted_us\n"));
    while (good && getline(&line, &size, f) >= 0) {
        struct moe_phase p = {0};
        int used = 0;
        sscanf(line, "\"%47[^\"]\",%lf,%lf\n%n", p.name, &p.measured_us, &p.predicted_us, &used);
        good = used > 0 && !line[used] && p.measured_us >= 0 && isfinite(p.measured_us) &&
               p.predicted_us >= 0 && isfinite(p.predicted_us);
        out->items = moe_grow(out->items, &out->cap, out->n + 1, sizeof *out->items);
        out->items[out->n++] = p;
    }
    free(line);
    if (good && out->n > 1) {
        qsort(out->items, (size_t)out->n, sizeof *out->items, by_length);
        const struct moe_phase *step = out->items, *longest = step + 1;
        if (!strcmp(step->name, "step") && step->measured_us > 0 &&
            fmax(longest->measured_us, longest->predicted_us) > 0)
            return MOE_OK;
    }
    return moe_fail(MOE_EINPUT, "%s: expected a table of moesim validate -o", path);
}

static void conclude_phases(struct moe_phases *all)
{
    double *error = moe_alloc((size_t)all->n, sizeof *error);
    const double step_us = all->items[0].measured_us;
    for (int i = 0; i < all->n; i++) {
        struct moe_phase *p = &all->items[i];
        p->share_pct = 100 * p->measured_us / step_us;
        p->error_pct = 100 * moe_off(p->measured_us, p->predicted_us);
        if (!i || !moe_phase_counts(p->measured_us, p->predicted_us, step_us)) continue;
        if (!all->n_counted || fabs(p->error_pct) > fabs(all->items[all->worst].error_pct)) all->worst = i;
        error[all->n_counted++] = fabs(p->error_pct);
    }
    if (all->n_counted) all->median_error_pct = moe_median(error, all->n_counted);
    free(error);
}

int moe_summary_load_phases(const char *path, struct moe_summary *m)
{
    FILE *f = fopen(path, "r");
    if (!f) return moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    int err = read_phases(path, f, &m->phases);
    fclose(f);
    MOE_TRY(err);
    conclude_phases(&m->phases);
    return MOE_OK;
}

/* ---- all of it ---- */

static int load_run(struct moe_store *s, struct moe_summary *m)
{
    char *text;
    MOE_TRY(moe_store_info(s, &m->info));
    if (m->info.first_step > m->info.last_step || !m->info.steps_complete)
        return moe_fail(MOE_EINPUT, "no step that every rank completed: nothing to report (moesim capture)");
    MOE_TRY(moe_store_get(s, "scenario", &text));
    if (!text) return moe_fail(MOE_EINPUT, "the run has no scenario");
    int err = moe_scenario_parse("scenario", text, &m->scenario);
    free(text);
    MOE_TRY(err);
    const struct moe_scenario *sc = m->scenario;
    if (sc->ranks != m->info.n_ranks || sc->layers != m->info.n_layers || sc->experts != m->info.n_experts)
        return moe_fail(MOE_EINPUT,
                        "%d ranks, %d layers, %d experts recorded, the scenario has %lld, %lld, %lld",
                        m->info.n_ranks, m->info.n_layers, m->info.n_experts, (long long)sc->ranks,
                        (long long)sc->layers, (long long)sc->experts);
    MOE_TRY(moe_store_get(s, "version", &m->version));
    MOE_TRY(moe_store_get(s, "data_bytes", &m->data_bytes));
    return moe_store_get(s, "seed", &m->seed);
}

int moe_summary_load(const char *store_path, struct moe_summary *out)
{
    struct moe_store *s;
    int err;
    *out = (struct moe_summary){.measured = {.n_parts = MOE_MEASURED_PARTS, .parts = measured_parts},
                                .simulated = {.n_parts = MOE_SIMULATED_PARTS, .parts = simulated_parts}};
    MOE_TRY(moe_store_open(store_path, MOE_STORE_READ, &s)); /* its message names the file */
    MOE_TRY_GOTO(load_run(s, out));
    MOE_TRY_GOTO(load_routing(s, out->info.first_step, &out->first));
    MOE_TRY_GOTO(load_routing(s, out->info.last_step, &out->last));
    MOE_TRY_GOTO(load_measured(s, out));
    MOE_TRY_GOTO(load_simulated(s, &out->simulated));
done:
    moe_store_close(s);
    /* The store's own messages begin with the file, the others do not yet. */
    if (err < 0 && strncmp(moe_error(), store_path, strlen(store_path)) != 0)
        return moe_fail(err, "%s: %s", store_path, moe_error());
    return err;
}

static void free_matrix(struct moe_matrix *m)
{
    free(m->count);
    free(m->relative);
}

void moe_summary_free(struct moe_summary *m)
{
    moe_scenario_free(m->scenario);
    free(m->version);
    free(m->data_bytes);
    free(m->seed);
    moe_routing_free(m->first.routing);
    moe_routing_free(m->last.routing);
    free_matrix(&m->first.tokens);
    free_matrix(&m->last.tokens);
    free_matrix(&m->traffic);
    free(m->measured.bars);
    free(m->simulated.bars);
    free(m->phases.items);
}
