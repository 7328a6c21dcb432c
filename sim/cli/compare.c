/* compare.c - moesim compare: every combination of what --vary lists, the best of them, and why. */
#include "sim/cli/cli.h"
#include "traces/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TOPOLOGY, DISPATCHER, KEY_COUNT };
static const char *const keys[] = {"topology", "dispatcher"};

struct variant {
    const char *value[KEY_COUNT]; /* borrowed from the grid */
    struct moe_sim_result r;
};

struct grid {
    int n_values[KEY_COUNT];
    char **value[KEY_COUNT];
    int n, best;
    struct variant *variants; /* [n], the last key varies fastest */
};

/* ---- what to compare ---- */

static void add_value(struct grid *g, int key, const char *text, size_t length)
{
    int cap = g->n_values[key];
    g->value[key] = moe_grow(g->value[key], &cap, cap + 1, sizeof *g->value[key]);
    g->value[key][g->n_values[key]++] = strndup(text, length);
}

/* "key=value[,value...]" */
static int read_vary(struct grid *g, const char *text)
{
    size_t length = strcspn(text, "=");
    int key = 0;
    while (key < KEY_COUNT && (strlen(keys[key]) != length || strncmp(text, keys[key], length) != 0)) key++;
    if (key == KEY_COUNT)
        return moe_fail(MOE_EUSAGE, "--vary %s: unknown key, expected %s or %s", text, keys[TOPOLOGY],
                        keys[DISPATCHER]);
    const char *value = text + length;
    do {
        value += *value != 0; /* past '=' or ',' */
        length = strcspn(value, ",");
        if (!length)
            return moe_fail(MOE_EUSAGE, "--vary %s: an empty value, expected %s=VALUE[,VALUE...]", text,
                            keys[key]);
        add_value(g, key, value, length);
        value += length;
    } while (*value);
    return MOE_OK;
}

static int make_grid(struct grid *g, const struct moe_args *args, const struct moe_input *in)
{
    for (int i = 0; i < args->n_vary; i++) MOE_TRY(read_vary(g, args->vary[i]));
    const char *own[] = {in->topology, in->scenario->dispatcher};
    for (int key = 0; key < KEY_COUNT; key++)
        if (!g->n_values[key]) add_value(g, key, own[key], strlen(own[key]));
    g->n = g->n_values[TOPOLOGY] * g->n_values[DISPATCHER];
    g->variants = moe_alloc((size_t)g->n, sizeof *g->variants);
    for (int i = 0; i < g->n; i++) {
        g->variants[i].value[TOPOLOGY] = g->value[TOPOLOGY][i / g->n_values[DISPATCHER]];
        g->variants[i].value[DISPATCHER] = g->value[DISPATCHER][i % g->n_values[DISPATCHER]];
    }
    return MOE_OK;
}

static void free_grid(struct grid *g)
{
    for (int i = 0; i < g->n; i++) moe_sim_free(&g->variants[i].r);
    for (int key = 0; key < KEY_COUNT; key++) {
        for (int i = 0; i < g->n_values[key]; i++) free(g->value[key][i]);
        free(g->value[key]);
    }
    free(g->variants);
}

static int run_variant(struct variant *v, const struct moe_input *in)
{
    struct moe_scenario sc = *in->scenario;
    struct moe_schedule *s;
    moe_copy_name(sc.dispatcher, v->value[DISPATCHER]);
    MOE_TRY(moe_lower(&sc, &s));
    int err = moe_predict(s, in->routing, v->value[TOPOLOGY], &v->r);
    moe_schedule_free(s);
    return err;
}

static int run_all(struct grid *g, const struct moe_input *in)
{
    for (int i = 0; i < g->n; i++) {
        MOE_TRY(run_variant(&g->variants[i], in));
        if (g->variants[i].r.step < g->variants[g->best].r.step) g->best = i;
    }
    return MOE_OK;
}

/* ---- which is best, and why ---- */

static json_t *results_json(const struct grid *g)
{
    json_t *list = json_array();
    for (int i = 0; i < g->n; i++) {
        const struct variant *v = &g->variants[i];
        json_t *item = json_object();
        for (int key = 0; key < KEY_COUNT; key++)
            json_object_set_new(item, keys[key], moe_json_text(v->value[key]));
        json_object_set_new(item, "to_best",
                            json_real((double)v->r.step / (double)g->variants[g->best].r.step));
        moe_result_json(&v->r, item);
        json_array_append_new(list, item);
    }
    return list;
}

/* The fastest after the best, or NULL. */
static const struct variant *runner_up(const struct grid *g)
{
    const struct variant *next = NULL;
    for (int i = 0; i < g->n; i++)
        if (i != g->best && (!next || g->variants[i].r.step < next->r.step)) next = &g->variants[i];
    return next;
}

/* What a part takes longer in v than in the best. */
static double more_us(const struct grid *g, const struct variant *v, int part)
{
    return moe_part_us(&v->r, part) - moe_part_us(&g->variants[g->best].r, part);
}

static int deciding_part(const struct grid *g, const struct variant *v)
{
    int most = 0;
    for (int p = 1; p < MOE_PARTS; p++)
        if (more_us(g, v, p) > more_us(g, v, most)) most = p;
    return most;
}

static void print_json(const struct grid *g, const struct moe_input *in)
{
    const struct variant *next = runner_up(g);
    json_t *why = next ? json_pack("{s:i, s:s}", "next", (int)(next - g->variants), "part",
                                   moe_parts[deciding_part(g, next)].key)
                       : json_null();
    for (int p = 0; p < MOE_PARTS && next; p++)
        json_object_set_new(why, moe_parts[p].key, json_real(more_us(g, next, p)));
    moe_print_json(json_pack("{s:s, s:o, s:o, s:i, s:o}", "schema", "moesim.compare/1", "input",
                             moe_input_json(in), "results", results_json(g), "best", g->best, "why", why));
}

static void print_text(const struct grid *g, const struct moe_input *in)
{
    const struct variant *best = &g->variants[g->best], *next = runner_up(g);
    printf("%s\n", in->scenario->name);
    moe_input_print(in);
    putchar('\n');
    moe_print_rows(results_json(g));
    printf("\nbest: %s with %s, %.1f us\n", best->value[TOPOLOGY], best->value[DISPATCHER],
           moe_step_us(&best->r));
    if (!next) return;
    int most = deciding_part(g, next);
    printf("next: %s with %s, %.1f us longer, mostly %s (%+.1f us)", next->value[TOPOLOGY],
           next->value[DISPATCHER], moe_step_us(&next->r) - moe_step_us(&best->r), moe_parts[most].text,
           more_us(g, next, most));
    for (int p = 0; p < MOE_PARTS; p++)
        if (p != most) printf(", %s %+.1f us", moe_parts[p].text, more_us(g, next, p));
    putchar('\n');
}

/* ---- results ---- */

static int store_results(struct moe_store *store, const struct grid *g, const struct moe_input *in)
{
    MOE_TRY(moe_store_begin(store));
    MOE_TRY(moe_store_clear_results(store));
    for (int i = 0; i < g->n; i++) {
        const struct moe_sim_result *r = &g->variants[i].r;
        struct moe_store_result row = {.step_us = moe_step_us(r),
                                       .compute_us = r->compute_us,
                                       .exposed_us = r->exposed_us,
                                       .waiting_us = r->waiting_us,
                                       .host_us = r->host_us,
                                       .intra_bytes = r->bytes[MOE_LINK_INTRA],
                                       .inter_bytes = r->bytes[MOE_LINK_NIC]};
        snprintf(row.scenario, sizeof row.scenario, "%s", in->scenario->name);
        moe_copy_name(row.topology, g->variants[i].value[TOPOLOGY]);
        moe_copy_name(row.dispatcher, g->variants[i].value[DISPATCHER]);
        MOE_TRY(moe_store_add_result(store, &row));
    }
    return moe_store_commit(store);
}

/* A store that is there keeps all but its results. */
static int write_results(const char *path, const struct grid *g, const struct moe_input *in)
{
    struct moe_store *store;
    bool there = access(path, F_OK) == 0;
    MOE_TRY(moe_store_open(path, there ? MOE_STORE_WRITE : MOE_STORE_CREATE, &store));
    int err = store_results(store, g, in);
    moe_store_close(store);
    return err;
}

int moe_cli_compare(const struct moe_args *args)
{
    struct moe_input in;
    struct grid g = {0};
    int err;
    MOE_TRY_GOTO(moe_input_load(args, &in));
    MOE_TRY_GOTO(make_grid(&g, args, &in));
    MOE_TRY_GOTO(run_all(&g, &in));
    if (args->output) MOE_TRY_GOTO(write_results(args->output, &g, &in));
    if (args->json)
        print_json(&g, &in);
    else
        print_text(&g, &in);
done:
    free_grid(&g);
    moe_input_free(&in);
    return err;
}
