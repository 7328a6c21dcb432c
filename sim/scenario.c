/* scenario.c - see scenario.h. */
#include "sim/scenario.h"

#include "sim/yaml.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nodes {
    const struct moe_yaml *model, *layout, *tokens, *routing;
};
struct draft {
    struct moe_scenario sc;
    struct nodes node;
};

#define FIELD(member) offsetof(struct draft, member)
static const char *const dtypes[] = {"float32", "float64", NULL};
static const struct moe_key top_keys[] = {
    {"model", MOE_KEY_NODE, FIELD(node.model), .required = true},
    {"layout", MOE_KEY_NODE, FIELD(node.layout), .required = true},
    {"tokens_per_rank", MOE_KEY_NODE, FIELD(node.tokens), .required = true},
    {"routing", MOE_KEY_NODE, FIELD(node.routing)},
    {"dispatcher", MOE_KEY_TEXT, FIELD(sc.dispatcher)},
    {"topology", MOE_KEY_TEXT, FIELD(sc.topology)},
    {"dtype", MOE_KEY_CHOICE, FIELD(sc.dtype), .choices = dtypes},
    {"learning_rate", MOE_KEY_REAL, FIELD(sc.learning_rate), .min = 0, .max = 1e6},
};
static const struct moe_key model_keys[] = {
    {"layers", MOE_KEY_INT, FIELD(sc.layers), .required = true, .min = 1, .max = 1024},
    {"hidden", MOE_KEY_INT, FIELD(sc.hidden), .required = true, .min = 1, .max = 65536},
    {"ffn", MOE_KEY_INT, FIELD(sc.ffn), .required = true, .min = 1, .max = 262144},
    {"experts", MOE_KEY_INT, FIELD(sc.experts), .required = true, .min = 1, .max = 4096},
    {"top_k", MOE_KEY_INT, FIELD(sc.top_k), .required = true, .min = 1, .max = 64},
};
static const struct moe_key layout_keys[] = {
    {"ranks", MOE_KEY_INT, FIELD(sc.ranks), .required = true, .min = 1, .max = 16384},
    {"expert_parallel", MOE_KEY_INT, FIELD(sc.expert_parallel), .min = 1, .max = 16384},
};
static const struct moe_key routing_keys[] = {
    {"skew", MOE_KEY_REAL, FIELD(sc.skew), .min = 0, .max = 10},
    {"seed", MOE_KEY_INT, FIELD(sc.seed), .min = 0, .max = 1e15},
};
#define COUNT(keys) ((int)(sizeof(keys) / sizeof *(keys)))

/* One number for all ranks, or a list with one per rank. */
static int read_tokens(const struct moe_yaml *node, struct moe_scenario *sc)
{
    if (node->kind == MOE_YAML_LIST && node->n != sc->ranks)
        return moe_fail(MOE_EINPUT, "%s:%d: tokens_per_rank lists %d numbers, expected one per rank (%lld)",
                        node->file, node->line, node->n, (long long)sc->ranks);
    sc->tokens = moe_alloc((size_t)sc->ranks, sizeof *sc->tokens);
    for (int r = 0; r < sc->ranks; r++) {
        const struct moe_yaml *value = node->kind == MOE_YAML_LIST ? &node->item[r] : node;
        char *end = NULL;
        long long tokens = value->kind == MOE_YAML_SCALAR ? strtoll(value->text, &end, 10) : -1;
        if (!end || end == value->text || *end || tokens < 0 || tokens > 1 << 24)
            return moe_fail(MOE_EINPUT, "%s:%d: tokens_per_rank: expected a whole number from 0 to %d",
                            value->file, value->line, 1 << 24);
        sc->tokens[r] = tokens;
    }
    return MOE_OK;
}

static int check_layout(const struct moe_yaml *layout, const struct moe_yaml *model,
                        const struct moe_scenario *sc)
{
    long long ep = sc->expert_parallel;
    if (sc->ranks % ep)
        return moe_fail(MOE_EINPUT, "%s:%d: expert_parallel %lld does not divide ranks %lld", layout->file,
                        layout->line, ep, (long long)sc->ranks);
    if (sc->experts % ep)
        return moe_fail(MOE_EINPUT, "%s:%d: expert_parallel %lld does not divide experts %lld", layout->file,
                        layout->line, ep, (long long)sc->experts);
    if (sc->top_k > sc->experts)
        return moe_fail(MOE_EINPUT, "%s:%d: top_k %lld is above experts %lld", model->file, model->line,
                        (long long)sc->top_k, (long long)sc->experts);
    return MOE_OK;
}

static int read_all(const struct moe_yaml *root, struct draft *d)
{
    struct moe_scenario *sc = &d->sc;
    moe_copy_name(sc->dispatcher, "alltoall");
    sc->learning_rate = 0.1;
    MOE_TRY(moe_yaml_read(root, top_keys, COUNT(top_keys), d));
    MOE_TRY(moe_yaml_read(d->node.model, model_keys, COUNT(model_keys), d));
    MOE_TRY(moe_yaml_read(d->node.layout, layout_keys, COUNT(layout_keys), d));
    if (d->node.routing) MOE_TRY(moe_yaml_read(d->node.routing, routing_keys, COUNT(routing_keys), d));
    if (!sc->expert_parallel) sc->expert_parallel = sc->ranks;
    MOE_TRY(check_layout(d->node.layout, d->node.model, sc));
    return read_tokens(d->node.tokens, sc);
}

int moe_scenario_parse(const char *name, const char *text, struct moe_scenario **out)
{
    struct draft d = {0};
    struct moe_yaml *root = NULL;
    int err;
    MOE_TRY_GOTO(moe_yaml_parse(name, text, strlen(text), &root));
    MOE_TRY_GOTO(read_all(root, &d));
    snprintf(d.sc.name, sizeof d.sc.name, "%s", name);
    d.sc.text = strdup(text);
    *out = moe_alloc(1, sizeof **out);
    **out = d.sc;
done:
    moe_yaml_free(root);
    if (err < 0) free(d.sc.tokens);
    return err;
}

int moe_scenario_load(const char *path, struct moe_scenario **out)
{
    FILE *file = fopen(path, "rb");
    if (!file) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno));
    enum { LIMIT = 1 << 20 };
    char *text = moe_alloc(LIMIT + 1, 1);
    size_t n = fread(text, 1, LIMIT, file);
    int err = ferror(file)         ? moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno))
              : n == LIMIT         ? moe_fail(MOE_EINPUT, "%s: larger than a scenario can be (1 MiB)", path)
              : memchr(text, 0, n) ? moe_fail(MOE_EINPUT, "%s: not a text file", path)
                                   : moe_scenario_parse(path, text, out);
    fclose(file);
    free(text);
    return err;
}

void moe_scenario_free(struct moe_scenario *sc)
{
    if (!sc) return;
    free(sc->tokens);
    free(sc->text);
    free(sc);
}
