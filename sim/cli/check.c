/* check.c - moesim check: verdicts, or what was proven. */
#include "sim/check/captured.h"

#include "sim/cli/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Was anything said that an absent verdict of the class could prove? */
static bool is_asked(int check_class, const struct moe_input *in)
{
    if (check_class == 11) return in->scenario->limits.rank_factor > 0;
    if (check_class == 15) return in->scenario->checkpoint.given;
    return true;
}

/* The same of a run that kept its tensors. */
static const struct {
    const char *name, *seen;
} seen[] = {
    {"C6", "run: no gradient is absent, and every tensor is finite (capture --poison: and was written)"},
    {"C16", "run: copies of a tensor are the same to the bit in every step, and experts differ"},
};
enum { SEEN_COUNT = sizeof seen / sizeof *seen };

void moe_print_numbers(const int *number, int n, FILE *out)
{
    for (int first = 0, last; first < n; first = last + 1) {
        for (last = first; last + 1 < n && number[last + 1] == number[last] + 1;) last++;
        fprintf(out, "%s%d", first ? "," : "", number[first]);
        if (last > first) fprintf(out, "-%d", number[last]);
    }
}

/* "error C1 ranks 0-3,7: layer 0 forward dispatch: ..."; FILE:LINE before the operation if known. */
void moe_print_verdict(const struct moe_verdict *v, const struct moe_scenario *sc, FILE *out)
{
    fprintf(out, "%s C%d ranks ", moe_severity_text[v->severity], v->check_class);
    moe_print_numbers(v->ranks, v->n_ranks, out);
    if (v->line)
        fprintf(out, ": %s%s:%d", moe_input_is_trace(sc->name) ? "scenario in " : "", sc->name, v->line);
    fprintf(out, ": %s: %s", v->op, v->text);
    if (v->n_layers < 2) return;
    fprintf(out, " (so in layers ");
    moe_print_numbers(v->layers, v->n_layers, out);
    fprintf(out, ")");
}

void moe_print_classes(const struct moe_input *in)
{
    for (int i = 0; i < moe_check_n_classes; i++)
        if (!in || is_asked(moe_check_classes[i].number, in))
            printf("  C%d %s\n", moe_check_classes[i].number, moe_check_classes[i].text);
}

void moe_print_verdicts_help(void)
{
    puts("\nWhat no error means:");
    moe_print_classes(NULL);
    puts("and of a run that kept its tensors (capture --tensors):");
    for (int i = 0; i < SEEN_COUNT; i++) printf("  %s %s\n", seen[i].name, seen[i].seen);
    puts(
        "  C9 equality: with --against, tensors of both runs are the same to the bit, or differ by rounding\n"
        "\n"
        "error     this step is wrong with this routing, or this run was; exit code 5\n"
        "possible  it can go wrong, and nothing here shows that it does or does not\n"
        "note      what was seen, and is not wrong: of C9 a difference by rounding, or none");
}

/* "C1" */
static json_t *class_json(int number)
{
    return json_sprintf("C%d", number);
}

struct shown { /* of the tensors that a run kept */
    int rows, bucketed;
    bool whole;  /* rows of every rank in every step */
    bool differ; /* copies do, which is no error */
};

static bool is_seen(const struct shown *run, int i)
{
    return run->rows && run->whole && !(run->differ && !strcmp(seen[i].name, "C16"));
}

static void print_text(const struct moe_verdicts *verdicts, int errors, const struct moe_input *in,
                       const struct shown *run)
{
    for (int i = 0; i < verdicts->n; i++) {
        moe_print_verdict(&verdicts->item[i], in->scenario, stdout);
        putchar('\n');
    }
    if (errors)
        printf("%d error%s: ", errors, errors == 1 ? "" : "s");
    else
        printf("no errors: ");
    moe_input_print(in);
    if (!errors) moe_print_classes(in);
    for (int i = 0; i < SEEN_COUNT && !errors; i++)
        if (is_seen(run, i)) printf("  %s %s\n", seen[i].name, seen[i].seen);
    if (run->rows && !run->whole)
        printf("  run: rows of some rank or step are missing: of tensors nothing is said that holds in every "
               "step\n");
    if (run->bucketed)
        printf("  run: %d of %d rows are of gradients in buckets, which were not kept\n", run->bucketed,
               run->rows);
}

static json_t *outcomes_json(void)
{
    static const char *const outcomes[] = {MOE_OUTCOMES};
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof outcomes / sizeof *outcomes; i++)
        json_array_append_new(list, json_string(outcomes[i]));
    return list;
}

/* How many parameters it is said of, and the first of their names. */
static void add_params(const struct moe_verdict *v, json_t *out)
{
    enum { SHOWN = 16 };
    json_t *names = json_array();
    for (int i = 0; i < v->n_params && i < SHOWN; i++)
        json_array_append_new(names, json_string(v->params[i]));
    json_object_set_new(out, "n_parameters", json_integer(v->n_params));
    json_object_set_new(out, "parameters", names);
}

json_t *moe_verdict_json(const struct moe_verdict *v, const struct moe_scenario *sc)
{
    json_t *ranks = json_array(), *layers = json_array();
    for (int i = 0; i < v->n_ranks; i++) json_array_append_new(ranks, json_integer(v->ranks[i]));
    for (int i = 0; i < v->n_layers; i++) json_array_append_new(layers, json_integer(v->layers[i]));
    json_t *out = json_pack("{s:o, s:s, s:o, s:o, s:[s], s:s}", "class", class_json(v->check_class),
                            "severity", moe_severity_text[v->severity], "ranks", ranks, "layers", layers,
                            "ops", v->op, "text", v->text);
    if (v->n_params) add_params(v, out);
    if (v->line) {
        json_object_set_new(out, "file", moe_json_text(sc->name));
        json_object_set_new(out, "line", json_integer(v->line));
    }
    if (v->undefined) json_object_set_new(out, "outcomes", outcomes_json());
    if (v->captured) json_object_set_new(out, "step", json_integer(v->step));
    return out;
}

json_t *moe_verdicts_json(const struct moe_verdicts *v, const struct moe_scenario *sc)
{
    json_t *list = json_array();
    for (int i = 0; i < v->n; i++) json_array_append_new(list, moe_verdict_json(&v->item[i], sc));
    return list;
}

static void print_json(const struct moe_verdicts *verdicts, int errors, const struct moe_input *in,
                       const struct shown *shown)
{
    json_t *proven = json_array();
    for (int i = 0; i < moe_check_n_classes && !errors; i++)
        if (is_asked(moe_check_classes[i].number, in))
            json_array_append_new(proven, class_json(moe_check_classes[i].number));
    json_t *out =
        json_pack("{s:s, s:o, s:i, s:o, s:o}", "schema", "moesim.check/1", "input", moe_input_json(in),
                  "errors", errors, "verdicts", moe_verdicts_json(verdicts, in->scenario), "proven", proven);
    json_t *run = json_array();
    for (int i = 0; i < SEEN_COUNT && !errors; i++)
        if (is_seen(shown, i)) json_array_append_new(run, json_string(seen[i].name));
    if (shown->rows)
        json_object_set_new(
            out, "run",
            json_pack("{s:i, s:i, s:o}", "tensors", shown->rows, "bucketed", shown->bucketed, "seen", run));
    else
        json_decref(run);
    moe_print_json(out);
}

char *moe_first_error(const struct moe_verdicts *v, const struct moe_scenario *sc)
{
    char *text = NULL;
    size_t size;
    int i = 0;
    while (i < v->n && v->item[i].severity != MOE_SEVERITY_ERROR) i++;
    if (i == v->n) return NULL;
    FILE *f = open_memstream(&text, &size);
    moe_print_verdict(&v->item[i], sc, f);
    fclose(f);
    return text;
}

int moe_check_input(const struct moe_args *args, const struct moe_input *in)
{
    struct moe_verdicts verdicts = {0};
    moe_check(in->schedule, in->routing, &verdicts);
    char *text = moe_first_error(&verdicts, in->scenario);
    int err = text ? moe_fail(MOE_EVERDICT, "%s: %s (run moesim check)", args->input, text) : MOE_OK;
    free(text);
    moe_verdicts_free(&verdicts);
    return err;
}

/* Sizes of a layout that do not go together: there is no schedule, and this is the only verdict. */
static void print_layout(const struct moe_args *args)
{
    char text[512];
    snprintf(text, sizeof text, "%s", moe_error());
    if (!args->json) {
        printf("error C13: layout: %s\n1 error\n", text);
        return;
    }
    json_t *verdict = json_pack("{s:s, s:s, s:[], s:[], s:[s], s:o}", "class", "C13", "severity", "error",
                                "ranks", "layers", "ops", "layout", "text", moe_json_text(text));
    moe_print_json(json_pack("{s:s, s:{s:o}, s:i, s:[o], s:[]}", "schema", "moesim.check/1", "input", "name",
                             moe_json_text(args->input), "errors", 1, "verdicts", verdict, "proven"));
}

static int load_run(const char *path, struct moe_store **store, struct moe_captured **out)
{
    MOE_TRY(moe_input_check_merged(path));
    MOE_TRY(moe_store_open(path, MOE_STORE_READ, store));
    int err = moe_captured_load(*store, out);
    return err < 0 ? moe_fail_in(path, err) : MOE_OK;
}

static int64_t tokens_of_micro(const struct moe_schedule *s)
{
    int64_t all = 0;
    for (int r = 0; r < s->n_ranks; r++) all += s->role_of[r] == s->role_of[0] ? s->tokens[r] : 0;
    return all;
}

/* Tokens of the i-th sequence of a micro-batch, 0 behind the last: a rank begins a new one. */
static int64_t sequence_tokens(const struct moe_input *in, int64_t i)
{
    const struct moe_schedule *s = in->schedule;
    const int64_t whole = in->scenario->sequence;
    for (int r = 0; r < s->n_ranks; r++) {
        const int64_t n = s->role_of[r] == s->role_of[0] ? (s->tokens[r] + whole - 1) / whole : 0;
        if (i < n) return i < n - 1 ? whole : s->tokens[r] - i * whole;
        i -= n;
    }
    return 0;
}

/* Batches are a function of text, seed and sequences: do two runs have the same? On how many ranks does not
 * matter. */
static int check_batches(const struct moe_args *args, const struct moe_input *a, const struct moe_input *b)
{
    const struct {
        const char *what;
        int64_t a, b;
    } same[] = {{"tokens a sequence", a->scenario->sequence, b->scenario->sequence},
                {"micro-batches a step", a->schedule->n_micro, b->schedule->n_micro},
                {"tokens a micro-batch", tokens_of_micro(a->schedule), tokens_of_micro(b->schedule)}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].a != same[i].b)
            return moe_fail(MOE_EINPUT,
                            "%s: %lld %s on %d ranks, %s has %lld on %d, expected the same batches",
                            args->against, (long long)same[i].b, same[i].what, b->schedule->n_ranks,
                            args->input, (long long)same[i].a, a->schedule->n_ranks);
    for (int64_t i = 0, n = 1; n; i++) {
        n = sequence_tokens(a, i);
        if (n != sequence_tokens(b, i))
            return moe_fail(
                MOE_EINPUT, "%s: %lld tokens in sequence %lld, %s has %lld, expected the same batches",
                args->against, (long long)sequence_tokens(b, i), (long long)i, args->input, (long long)n);
    }
    return MOE_OK;
}

/* Keys on which two scenarios differ. */
struct apart {
    struct moe_scenario_difference model; /* the first that makes it another model; key NULL: none does */
    char text[400];                       /* the others: "optimizer (adamw, other run sgd), ..." */
};

static void tell_apart(void *ctx, const struct moe_scenario_difference *d)
{
    struct apart *a = ctx;
    const size_t used = strlen(a->text), left = sizeof a->text - used;
    if (!strcmp(d->map, "model") || !strcmp(d->key, "dtype")) {
        if (!a->model.key) a->model = *d;
        return;
    }
    const char *before = used ? ", " : "";
    if (!strcmp(d->a, d->b)) /* two that are too long to show */
        snprintf(a->text + used, left, "%s%s", before, d->key);
    else
        snprintf(a->text + used, left, "%s%s (%s, other run %s)", before, d->key, d->a, d->b);
}

/* Says beside C9, the last verdict, what is not the same in the scenarios. */
static void add_apart(const struct apart *apart, struct moe_verdict *v)
{
    char *text = NULL;
    size_t size;
    if (!*apart->text) return;
    FILE *f = open_memstream(&text, &size);
    fprintf(f, "%s; the scenarios differ in %s", v->text, apart->text);
    fclose(f);
    free(v->text);
    v->text = text;
}

static int check_other(const struct moe_args *args, const struct moe_input *in, struct apart *apart)
{
    struct moe_args its = {.input = args->against, .step = -1};
    struct moe_input other;
    int err = moe_input_load(&its, &other);
    if (err >= 0) moe_scenario_compare(in->scenario, other.scenario, tell_apart, apart);
    if (err >= 0) err = check_batches(args, in, &other);
    if (err >= 0 && apart->model.key)
        err = moe_fail(MOE_EINPUT, "%s: %s %s, %s has %s, expected the same model", args->against,
                       apart->model.key, apart->model.b, args->input, apart->model.a);
    moe_input_free(&other);
    return err;
}

/* What a capture itself shows, and beside another one. */
static int check_run(const struct moe_args *args, const struct moe_input *in, struct moe_verdicts *out,
                     struct shown *shown)
{
    struct moe_store *store = NULL, *other_store = NULL;
    struct moe_captured *run = NULL, *other = NULL;
    int err;
    struct apart apart = {0};
    const int n_before = out->n;
    if (!moe_input_is_trace(args->input))
        return args->against ? moe_fail(MOE_EUSAGE, "--against: %s is not a trace", args->input) : MOE_OK;
    MOE_TRY_GOTO(load_run(args->input, &store, &run));
    *shown = (struct shown){.rows = moe_captured_rows(run),
                            .bucketed = moe_captured_bucketed(run),
                            .whole = moe_captured_is_whole(run)};
    if (shown->rows) MOE_TRY_GOTO(moe_check_captured(run, out));
    for (int i = n_before; i < out->n; i++) shown->differ |= out->item[i].severity == MOE_SEVERITY_POSSIBLE;
    if (!args->against) goto done;
    MOE_TRY_GOTO(load_run(args->against, &other_store, &other));
    if (!shown->rows || !moe_captured_rows(other))
        MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "%s: no tensors, expected a capture with --tensors",
                              shown->rows ? args->against : args->input));
    MOE_TRY_GOTO(check_other(args, in, &apart));
    err = moe_check_against(run, other, out);
    if (err < 0) err = moe_fail_in(args->input, err);
    if (err >= 0) add_apart(&apart, &out->item[out->n - 1]);
done:
    moe_captured_free(run);
    moe_captured_free(other);
    moe_store_close(store);
    moe_store_close(other_store);
    return err;
}

/* A line on the terminal that the next one replaces; ctx: the per cent that it says. */
static void print_progress(void *ctx, double share)
{
    int *said = ctx, percent = (int)(100 * share);
    if (percent == *said) return;
    *said = percent;
    fprintf(stderr, "\rchecked %d %%", percent);
}

static void check_input(const struct moe_input *in, struct moe_verdicts *out)
{
    int said = 0;
    struct moe_check_watch watch = {print_progress, &said};
    moe_check_watched(in->schedule, in->routing, isatty(STDERR_FILENO) ? &watch : NULL, out);
    if (said) fprintf(stderr, "\r%*s\r", (int)sizeof "checked 100 %", "");
}

int moe_cli_check(const struct moe_args *args)
{
    struct moe_input in;
    struct moe_verdicts verdicts = {0};
    struct shown shown = {0};
    int errors = 0, err;
    if (args->stress && args->against) return moe_fail(MOE_EUSAGE, "--against: not with --stress");
    if (args->stress) return moe_check_stress(args);
    err = moe_input_load(args, &in);
    if (err == MOE_ELAYOUT) {
        print_layout(args);
        errors = 1;
    }
    if (err < 0) goto done;
    check_input(&in, &verdicts);
    MOE_TRY_GOTO(check_run(args, &in, &verdicts, &shown));
    for (int i = 0; i < verdicts.n; i++) errors += verdicts.item[i].severity == MOE_SEVERITY_ERROR;
    (args->json ? print_json : print_text)(&verdicts, errors, &in, &shown);
done:
    moe_verdicts_free(&verdicts);
    moe_input_free(&in);
    return errors ? moe_exit_code(MOE_EVERDICT) : err;
}
