/* compare.c - moesim compare: every combination of what --vary lists, the best of them, and why. */
#include "sim/cli/grid.h"
#include "traces/store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- why one is better ---- */

enum { DROPPING = MOE_PARTS, TERMS };

/* What a variant takes longer than the best for as many kept tokens as the best has in a step, in terms that
 * add up: the parts of its step, and what it has to do again for rows that it dropped. */
struct loss {
    double us, term_us[TERMS];
    int most;
};

static struct loss loss_of(const struct moe_variant *v, const struct moe_variant *best)
{
    double step_us = moe_step_us(&v->r);
    double scaled_us = moe_variant_cost_us(v) / moe_variant_cost_us(best) * moe_step_us(&best->r);
    struct loss loss = {.us = scaled_us - moe_step_us(&best->r)};
    for (int p = 0; p < MOE_PARTS; p++) loss.term_us[p] = moe_part_us(&v->r, p) - moe_part_us(&best->r, p);
    loss.term_us[DROPPING] = scaled_us - step_us;
    for (int t = 1; t < TERMS; t++)
        if (loss.term_us[t] > loss.term_us[loss.most]) loss.most = t;
    return loss;
}

static const char *term_text(int t)
{
    return t == DROPPING ? "dropped rows" : moe_parts[t].text;
}

static const char *term_key(int t)
{
    return t == DROPPING ? "dropping_us" : moe_parts[t].key;
}

static const struct moe_variant *ranked(const struct moe_grid *g, int place)
{
    return &g->variants[g->rank[place]];
}

/* The places that the best is compared with: the next and the last that is right. Result: how many. */
static int rivals(const struct moe_grid *g, int place[2])
{
    place[0] = 1;
    place[1] = g->n_right - 1;
    return g->n_right < 2 ? 0 : g->n_right == 2 ? 1 : 2;
}

/* There is a best where one is right. */
static double to_best(const struct moe_grid *g, const struct moe_variant *v)
{
    return moe_variant_cost_us(v) / moe_variant_cost_us(ranked(g, 0));
}

static int64_t kept_per_s(const struct moe_variant *v)
{
    double step_us = moe_step_us(&v->r);
    return step_us > 0 ? llround(1e6 * v->kept_tokens / step_us) : 0;
}

static double share(const struct moe_variant *v, int64_t rows)
{
    return v->kept.chosen ? (double)rows / (double)v->kept.chosen : 0;
}

/* ---- JSON ---- */

static json_t *variant_json(const struct moe_grid *g, const struct moe_variant *v)
{
    json_t *item = json_object();
    for (int key = 0; key < MOE_VARY_COUNT; key++)
        json_object_set_new(item, moe_vary[key].column, moe_json_text(v->value[key]));
    json_object_set_new(item, "verdicts", moe_verdicts_json(moe_variant_verdicts(g, v), &v->sc));
    if (v->err < 0) {
        json_object_set_new(item, "error", moe_json_text(v->error));
        return item;
    }
    json_object_set_new(item, "to_best", g->n_right ? json_real(to_best(g, v)) : json_null());
    json_object_set_new(item, "kept_tokens_per_s", json_integer(kept_per_s(v)));
    json_object_set_new(item, "dropped_share", json_real(share(v, v->kept.dropped)));
    json_object_set_new(item, "padded_share", json_real(share(v, v->kept.padded)));
    moe_result_json(&v->r, item);
    return item;
}

static void print_json(const struct moe_grid *g, const struct moe_input *in)
{
    json_t *results = json_array(), *why = json_array();
    int place[2], n = rivals(g, place);
    for (int i = 0; i < g->n; i++) json_array_append_new(results, variant_json(g, &g->variants[i]));
    for (int i = 0; i < n; i++) {
        struct loss loss = loss_of(ranked(g, place[i]), ranked(g, 0));
        json_t *item = json_pack("{s:i, s:f, s:s}", "against", g->rank[place[i]], "longer_us", loss.us,
                                 "term", term_key(loss.most));
        for (int t = 0; t < TERMS; t++) json_object_set_new(item, term_key(t), json_real(loss.term_us[t]));
        json_array_append_new(why, item);
    }
    moe_print_json(json_pack("{s:s, s:o, s:o, s:o, s:o}", "schema", "moesim.compare/4", "input",
                             moe_input_json(in), "results", results, "best",
                             g->n_right ? json_integer(g->rank[0]) : json_null(), "why", why));
}

/* ---- text ---- */

static const double NOTHING_US = 1e-3; /* differences below are not told */

static bool varies(const struct moe_grid *g, int key)
{
    return g->n_values[key] > 1;
}

/* "dgx_h100 with alltoall", and the other keys where they vary. */
static void print_name(const struct moe_grid *g, const struct moe_variant *v, FILE *out)
{
    fprintf(out, "%s with %s", v->value[MOE_VARY_TOPOLOGY], v->value[MOE_VARY_DISPATCHER]);
    for (int key = MOE_VARY_CAPACITY; key < MOE_VARY_COUNT; key++)
        if (varies(g, key))
            fprintf(out, ", %s%s%s", key == MOE_VARY_ORDER ? "" : moe_vary[key].column,
                    key == MOE_VARY_ORDER ? "" : " ", v->value[key]);
}

/* "wrong: C3,C5"; "" of one that is right. */
static json_t *wrong_json(const struct moe_grid *g, const struct moe_variant *v)
{
    const struct moe_verdicts *of = moe_variant_verdicts(g, v);
    char text[256] = "";
    size_t length = 0;
    for (int c = 0; c < moe_check_n_classes; c++)
        for (int i = 0; i < of->n; i++) {
            if (of->item[i].severity != MOE_SEVERITY_ERROR ||
                of->item[i].check_class != moe_check_classes[c].number)
                continue;
            length += (size_t)snprintf(text + length, sizeof text - length, "%sC%d",
                                       length ? "," : "wrong: ", moe_check_classes[c].number);
            break;
        }
    return json_string(text);
}

/* Only what varies, and times: the rest is in the JSON. Columns that are empty throughout are left out. */
static json_t *row_json(const struct moe_grid *g, const struct moe_variant *v, bool drops, bool pads,
                        bool sure)
{
    json_t *row = json_object();
    for (int key = 0; key < MOE_VARY_COUNT; key++)
        if (varies(g, key)) json_object_set_new(row, moe_vary[key].column, moe_json_text(v->value[key]));
    if (g->n_right < g->n_ok) json_object_set_new(row, "check", wrong_json(g, v));
    if (g->n_right) json_object_set_new(row, "to_best", json_real(to_best(g, v)));
    json_object_set_new(row, "kept_tok/s", json_integer(kept_per_s(v)));
    if (drops) json_object_set_new(row, "dropped_%", json_real(100 * share(v, v->kept.dropped)));
    if (pads) json_object_set_new(row, "padded_%", json_real(100 * share(v, v->kept.padded)));
    json_object_set_new(row, "step_us", json_integer(llround(moe_step_us(&v->r))));
    if (sure)
        json_object_set_new(row, "80_%",
                            isnan(v->r.step_error) ? json_string("not known")
                                                   : json_sprintf("+-%.0f %%", 100 * v->r.step_error));
    for (int p = 0; p < MOE_PARTS; p++)
        json_object_set_new(row, moe_parts[p].key, json_integer(llround(moe_part_us(&v->r, p))));
    return row;
}

static bool print_table(const struct moe_grid *g)
{
    json_t *rows = json_array();
    bool drops = false, pads = false, sure = false, unsure = false;
    for (int i = 0; i < g->n_ok; i++) {
        drops |= ranked(g, i)->kept.dropped > 0;
        pads |= ranked(g, i)->kept.padded > 0;
        sure |= !isnan(ranked(g, i)->r.step_error);
        unsure |= isnan(ranked(g, i)->r.step_error);
    }
    for (int i = 0; i < g->n_ok; i++)
        json_array_append_new(rows, row_json(g, ranked(g, i), drops, pads, sure));
    moe_print_rows(rows);
    if (sure && unsure)
        puts("\nnot known: the machine is not calibrated for it, so its place may be another.");
    return drops;
}

/* "+1.23 ms", "1.23 ms"; three digits. */
static void print_time(const char *before, double us, bool sign)
{
    double size_us = fabs(us), unit_us = size_us < 999.5 ? 1 : size_us < 999.5e3 ? 1e3 : 1e6;
    printf(sign ? "%s%+.3g %s" : "%s%.3g %s", before, us / unit_us,
           unit_us == 1     ? "us"
           : unit_us == 1e3 ? "ms"
                            : "s");
}

static void print_why(const struct moe_grid *g, const char *what, const struct moe_variant *v)
{
    struct loss loss = loss_of(v, ranked(g, 0));
    printf("%s: ", what);
    print_name(g, v, stdout);
    if (fabs(loss.us) < NOTHING_US) {
        puts(" is as fast");
        return;
    }
    if (log(to_best(g, v)) < hypot(v->r.step_error, ranked(g, 0)->r.step_error))
        printf(" may be as fast, by what is known of the errors;");
    printf(" takes %.2f times as long", to_best(g, v));
    print_time(loss.term_us[DROPPING] != 0 ? " for as many kept tokens, " : ", ", loss.us, true);
    printf("; what decides is %s", term_text(loss.most));
    print_time(" (", loss.term_us[loss.most], true);
    for (int t = 0; t < TERMS; t++) {
        if (t == loss.most || fabs(loss.term_us[t]) < NOTHING_US) continue;
        printf(", %s", term_text(t));
        print_time(" ", loss.term_us[t], true);
    }
    puts(").");
}

static void print_text(const struct moe_grid *g, const struct moe_input *in)
{
    static const char *const what[] = {"next", "worst"};
    int place[2], n = rivals(g, place);
    printf("%s\n", in->scenario->name);
    moe_input_print(in);
    putchar('\n');
    if (print_table(g))
        puts("\nRanked by time per kept token: of a token with dropped rows only the kept part counts.");
    for (int i = 0; i < g->n; i++) {
        if (g->variants[i].err == MOE_OK) continue;
        printf("\nno result: ");
        print_name(g, &g->variants[i], stdout);
        printf(": %s", g->variants[i].error);
    }
    printf("%s\nbest: ", g->n_ok < g->n ? "\n" : "");
    if (!g->n_right) {
        puts("none, what has a result is wrong");
        return;
    }
    print_name(g, ranked(g, 0), stdout);
    print_time(": ", moe_step_us(&ranked(g, 0)->r), false);
    printf(" a step, %lld kept tokens/s\n", (long long)kept_per_s(ranked(g, 0)));
    for (int i = 0; i < n; i++) print_why(g, what[i], ranked(g, place[i]));
}

/* One line of the first wrong variant that has a result, the best first. */
static void warn(const struct moe_grid *g, const char *input)
{
    if (g->n_right == g->n_ok) return;
    const struct moe_variant *v = ranked(g, g->n_right);
    char *first = moe_first_error(moe_variant_verdicts(g, v), &v->sc);
    fprintf(stderr, "moesim compare: warning: %s: %d of %d variants are wrong, ", input, g->n_ok - g->n_right,
            g->n_ok);
    print_name(g, v, stderr);
    fprintf(stderr, ": %s (run moesim check)\n", first);
    free(first);
}

/* ---- results ---- */

static int store_results(struct moe_store *store, const struct moe_grid *g, const struct moe_input *in)
{
    MOE_TRY(moe_store_begin(store));
    MOE_TRY(moe_store_clear_results(store));
    for (int i = 0; i < g->n; i++) {
        const struct moe_variant *v = &g->variants[i];
        struct moe_store_result row = {.step_us = moe_step_us(&v->r),
                                       .compute_us = v->r.compute_us,
                                       .exposed_us = v->r.exposed_us,
                                       .waiting_us = v->r.waiting_us,
                                       .host_us = v->r.host_us,
                                       .intra_bytes = v->r.bytes[MOE_LINK_INTRA],
                                       .inter_bytes = v->r.bytes[MOE_LINK_NIC],
                                       .expert_parallel = v->sc.expert_parallel,
                                       .dropped_share = share(v, v->kept.dropped)};
        if (v->err < 0) continue;
        if (strcmp(v->sc.capacity.rule, "dropless") != 0) row.capacity = v->sc.capacity.factor;
        snprintf(row.scenario, sizeof row.scenario, "%s", in->scenario->name);
        moe_copy_name(row.topology, v->value[MOE_VARY_TOPOLOGY]);
        moe_copy_name(row.dispatcher, v->value[MOE_VARY_DISPATCHER]);
        moe_copy_name(row.rank_order, v->value[MOE_VARY_ORDER]);
        MOE_TRY(moe_store_add_result(store, &row));
    }
    return moe_store_commit(store);
}

/* A store keeps a factor for each result and not the rule that it is of. */
static int check_rules(const struct moe_grid *g)
{
    const char *rule = NULL;
    for (int i = 0; i < g->n; i++) {
        const char *other = g->variants[i].sc.capacity.rule;
        if (!strcmp(other, "dropless")) continue;
        if (rule && strcmp(rule, other) != 0)
            return moe_fail(MOE_EUSAGE,
                            "--output: a store cannot tell capacity rules %s and %s apart, "
                            "expected one of them",
                            rule, other);
        rule = other;
    }
    return MOE_OK;
}

/* A store that is there keeps all but its results. */
static int write_results(const char *path, const struct moe_grid *g, const struct moe_input *in)
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
    struct moe_grid g = {0};
    int err;
    MOE_TRY_GOTO(moe_input_load(args, &in));
    MOE_TRY_GOTO(moe_grid_make(&g, args, &in));
    if (args->output) MOE_TRY_GOTO(check_rules(&g));
    err = moe_grid_run(&g, &in, args->threads);
    if (err == MOE_EVERDICT && args->json) print_json(&g, &in);
    MOE_TRY_GOTO(err);
    if (args->output) MOE_TRY_GOTO(write_results(args->output, &g, &in));
    if (args->json)
        print_json(&g, &in);
    else
        print_text(&g, &in);
    warn(&g, args->input);
done:
    moe_grid_free(&g);
    moe_input_free(&in);
    return err;
}
