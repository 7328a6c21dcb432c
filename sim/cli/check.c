/* check.c - moesim check: verdicts, or what was proven. */
#include "sim/check/check.h"

#include "sim/cli/cli.h"

#include <stdio.h>
#include <stdlib.h>

/* Was anything said that an absent verdict of the class could prove? */
static bool is_asked(int check_class, const struct moe_input *in)
{
    if (check_class == 11) return in->scenario->limits.rank_factor > 0;
    if (check_class == 15) return in->scenario->checkpoint.given;
    return true;
}

static void print_numbers(const int *number, int n, FILE *out)
{
    for (int first = 0, last; first < n; first = last + 1) {
        for (last = first; last + 1 < n && number[last + 1] == number[last] + 1;) last++;
        fprintf(out, "%s%d", first ? "," : "", number[first]);
        if (last > first) fprintf(out, "-%d", number[last]);
    }
}

/* "error C1 ranks 0-3,7: layer 0 forward dispatch: ..." */
void moe_print_verdict(const struct moe_verdict *v, FILE *out)
{
    fprintf(out, "%s C%d ranks ", moe_severity_text[v->severity], v->check_class);
    print_numbers(v->ranks, v->n_ranks, out);
    fprintf(out, ": %s: %s", v->op, v->text);
    if (v->n_layers < 2) return;
    fprintf(out, " (so in layers ");
    print_numbers(v->layers, v->n_layers, out);
    fprintf(out, ")");
}

void moe_print_classes(const struct moe_input *in)
{
    for (int i = 0; i < moe_check_n_classes; i++)
        if (!in || is_asked(moe_check_classes[i].number, in))
            printf("  C%d %s\n", moe_check_classes[i].number, moe_check_classes[i].text);
}

/* "C1" */
static json_t *class_json(int number)
{
    return json_sprintf("C%d", number);
}

static void print_text(const struct moe_verdicts *verdicts, int errors, const struct moe_input *in)
{
    for (int i = 0; i < verdicts->n; i++) {
        moe_print_verdict(&verdicts->item[i], stdout);
        putchar('\n');
    }
    if (errors)
        printf("%d error%s: ", errors, errors == 1 ? "" : "s");
    else
        printf("no errors: ");
    moe_input_print(in);
    if (!errors) moe_print_classes(in);
}

static json_t *outcomes_json(void)
{
    static const char *const outcomes[] = {MOE_OUTCOMES};
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof outcomes / sizeof *outcomes; i++)
        json_array_append_new(list, json_string(outcomes[i]));
    return list;
}

json_t *moe_verdict_json(const struct moe_verdict *v)
{
    json_t *ranks = json_array(), *layers = json_array();
    for (int i = 0; i < v->n_ranks; i++) json_array_append_new(ranks, json_integer(v->ranks[i]));
    for (int i = 0; i < v->n_layers; i++) json_array_append_new(layers, json_integer(v->layers[i]));
    json_t *out = json_pack("{s:o, s:s, s:o, s:o, s:[s], s:s}", "class", class_json(v->check_class),
                            "severity", moe_severity_text[v->severity], "ranks", ranks, "layers", layers,
                            "ops", v->op, "text", v->text);
    if (v->undefined) json_object_set_new(out, "outcomes", outcomes_json());
    return out;
}

static void print_json(const struct moe_verdicts *verdicts, int errors, const struct moe_input *in)
{
    json_t *list = json_array(), *proven = json_array();
    for (int i = 0; i < verdicts->n; i++) json_array_append_new(list, moe_verdict_json(&verdicts->item[i]));
    for (int i = 0; i < moe_check_n_classes && !errors; i++)
        if (is_asked(moe_check_classes[i].number, in))
            json_array_append_new(proven, class_json(moe_check_classes[i].number));
    moe_print_json(json_pack("{s:s, s:o, s:i, s:o, s:o}", "schema", "moesim.check/1", "input",
                             moe_input_json(in), "errors", errors, "verdicts", list, "proven", proven));
}

int moe_check_input(const struct moe_args *args, const struct moe_input *in)
{
    struct moe_verdicts verdicts = {0};
    int err = MOE_OK;
    moe_check(in->schedule, in->routing, &verdicts);
    for (int i = 0; i < verdicts.n && err == MOE_OK; i++) {
        char *text;
        size_t size;
        if (verdicts.item[i].severity != MOE_SEVERITY_ERROR) continue;
        FILE *f = open_memstream(&text, &size);
        moe_print_verdict(&verdicts.item[i], f);
        fclose(f);
        err = moe_fail(MOE_EVERDICT, "%s: %s (run moesim check)", args->input, text);
        free(text);
    }
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

int moe_cli_check(const struct moe_args *args)
{
    struct moe_input in;
    struct moe_verdicts verdicts = {0};
    int errors = 0, err;
    if (args->stress) return moe_check_stress(args);
    err = moe_input_load(args, &in);
    if (err == MOE_ELAYOUT) {
        print_layout(args);
        errors = 1;
    }
    if (err < 0) goto done;
    moe_check(in.schedule, in.routing, &verdicts);
    for (int i = 0; i < verdicts.n; i++) errors += verdicts.item[i].severity == MOE_SEVERITY_ERROR;
    (args->json ? print_json : print_text)(&verdicts, errors, &in);
done:
    moe_verdicts_free(&verdicts);
    moe_input_free(&in);
    return errors ? moe_exit_code(MOE_EVERDICT) : err;
}
