/* stress.c - moesim check --stress: the smallest routings that break a scenario, each as a scenario. */
#include "sim/stress.h"

#include "sim/cli/cli.h"
#include "sim/yaml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A value that reads as it was read, on one line. */
static void write_value(const struct moe_yaml *node, FILE *f)
{
    if (node->kind == MOE_YAML_SCALAR) {
        bool plain =
            *node->text && node->text[strspn(node->text, "abcdefghijklmnopqrstuvwxyz"
                                                         "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-")] == 0;
        json_t *text = moe_json_text(node->text);
        char *quoted = json_dumps(text, JSON_ENCODE_ANY);
        fputs(plain ? node->text : quoted, f);
        free(quoted);
        json_decref(text);
        return;
    }
    bool map = node->kind == MOE_YAML_MAP;
    fputc(map ? '{' : '[', f);
    for (int i = 0; i < node->n; i++) {
        fprintf(f, "%s", i ? ", " : "");
        if (map) fprintf(f, "%s: ", node->key[i]);
        write_value(&node->item[i], f);
    }
    fputc(map ? '}' : ']', f);
}

static void write_counts(const struct moe_scenario *sc, FILE *f)
{
    const int32_t *count = sc->counts;
    fprintf(f, "routing:\n  counts:  # by layer, rank, expert\n");
    for (int64_t l = 0; l < sc->layers * sc->micro_batches; l++) {
        fprintf(f, "    -");
        for (int64_t r = 0; r < sc->ranks; r++) {
            fprintf(f, "%s- [", r ? "      " : " ");
            for (int64_t e = 0; e < sc->experts; e++) fprintf(f, "%s%d", e ? ", " : "", *count++);
            fprintf(f, "]\n");
        }
    }
}

/* What was given, but for tokens and routing. */
static void write_scenario(const struct moe_scenario *sc, FILE *f)
{
    struct moe_yaml *root = NULL;
    if (moe_yaml_parse(sc->name, sc->text, strlen(sc->text), &root) < 0) /* it was read before */
        moe_bug(__FILE__, __LINE__, moe_error());
    for (int i = 0; i < root->n; i++) {
        if (!strcmp(root->key[i], "tokens_per_rank") || !strcmp(root->key[i], "routing")) continue;
        fprintf(f, "%s: ", root->key[i]);
        write_value(&root->item[i], f);
        fputc('\n', f);
    }
    moe_yaml_free(root);
    int64_t masked = sc->padding.masked ? sc->padding.tokens : 0;
    fprintf(f, "tokens_per_rank: [");
    for (int64_t r = 0; r < sc->ranks; r++)
        fprintf(f, "%s%lld", r ? ", " : "", (long long)(sc->tokens[r] + masked));
    fprintf(f, "]\n");
    write_counts(sc, f);
}

/* What was found so far; items [n]: NULL when text is printed. */
struct printed {
    int n;
    json_t *items;
};

static void add_json(json_t *items, const struct moe_stressed *s)
{
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    write_scenario(s->scenario, f);
    fclose(f);
    json_t *list = json_array();
    for (int i = 0; i < s->verdicts->n; i++)
        json_array_append_new(list, moe_verdict_json(&s->verdicts->item[i], s->scenario));
    json_t *classes = json_array(), *adverse = json_array();
    for (int i = 0; i < 32; i++)
        if (s->classes >> i & 1) json_array_append_new(classes, json_sprintf("C%d", i));
    for (int i = 0; i < s->n_adverse; i++) json_array_append_new(adverse, json_integer(s->adverse[i]));
    json_array_append_new(items, json_pack("{s:o, s:o, s:s, s:o, s:I, s:b, s:I, s:o}", "classes", classes,
                                           "verdicts", list, "routing", s->routing, "adverse_ranks", adverse,
                                           "tokens", (json_int_t)s->tokens, "complete", s->complete,
                                           "too_small_tokens_per_rank", (json_int_t)s->too_small, "scenario",
                                           moe_json_text(text)));
    free(text);
}

static void print_found(void *ctx, const struct moe_stressed *s)
{
    struct printed *p = ctx;
    p->n++;
    if (p->items) {
        add_json(p->items, s);
        return;
    }
    if (p->n > 1) puts("---");
    for (int i = 0; i < s->verdicts->n; i++) {
        printf("# ");
        moe_print_verdict(&s->verdicts->item[i], s->scenario, stdout);
        putchar('\n');
    }
    printf("# the smallest of");
    for (int i = 0; i < 32; i++)
        if (s->classes >> i & 1) printf(" C%d", i);
    if (s->too_small) printf(" of sizes that evenly spread rows do not break");
    printf("%s: %lld token%s", s->complete ? "" : " so far (the search was cut short)", (long long)s->tokens,
           s->tokens == 1 ? "" : "s");
    if (s->n_adverse) printf(", on rank%s ", s->n_adverse == 1 ? "" : "s");
    moe_print_numbers(s->adverse, s->n_adverse, stdout);
    printf("%s %s\n", s->n_adverse ? "" : ",", s->n_adverse ? s->routing : "rows spread evenly");
    if (s->too_small)
        printf("# with %lld token%s on every rank, and maybe fewer, evenly spread rows break it too\n",
               (long long)s->too_small, s->too_small == 1 ? "" : "s");
    write_scenario(s->scenario, stdout);
}

int moe_check_stress(const struct moe_args *args)
{
    struct moe_scenario *sc = NULL;
    struct printed p = {.items = args->json ? json_array() : NULL};
    int n_tried = 0, err;
    if (moe_input_is_trace(args->input) || args->routing || args->step >= 0)
        MOE_TRY_GOTO(moe_fail(MOE_EUSAGE, "--stress: expected a scenario, whose routing it replaces"));
    MOE_TRY_GOTO(moe_scenario_load(args->input, &sc));
    if (moe_lower_sends_once(sc->dispatcher))
        MOE_TRY_GOTO(moe_fail(MOE_EINPUT,
                              "%s: --stress cannot be used with dispatcher %s: it tries numbers of rows of "
                              "each expert, which do not say how many tokens go to a rank",
                              sc->name, sc->dispatcher));
    err = moe_stress(sc, print_found, &p, &n_tried);
    if (err < 0) goto done;
    if (args->json) {
        moe_print_json(
            json_pack("{s:s, s:i, s:O}", "schema", "moesim.stress/2", "tried", n_tried, "found", p.items));
    } else if (p.n)
        printf("# %d routings tried, %d shown\n", n_tried, p.n);
    else
        printf("# %d routings tried, nothing breaks it\n", n_tried);
    err = p.n ? moe_exit_code(MOE_EVERDICT) : MOE_OK;
done:
    if (p.items) json_decref(p.items);
    moe_scenario_free(sc);
    return err;
}
