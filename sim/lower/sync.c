/* sync.c - see sync.h. */
#include "sim/lower/sync.h"

#include "sim/yaml.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
static const char *const acts[] = {MOE_SYNC_ACTS(X) NULL};
const char *const moe_sync_group_text[] = {MOE_SYNC_GROUPS(X) NULL};
#undef X

static const char *const stages[] = {"all", "first", "last", NULL};

struct draft {
    struct moe_sync_step step;
    const struct moe_yaml *by, *times;
};
static const struct moe_key keys[] = {
    {"do", MOE_KEY_CHOICE, offsetof(struct draft, step.act), .required = true, .choices = acts},
    {"of", MOE_KEY_TEXT, offsetof(struct draft, step.of)},
    {"over", MOE_KEY_CHOICE, offsetof(struct draft, step.over), .choices = moe_sync_group_text},
    {"on", MOE_KEY_CHOICE, offsetof(struct draft, step.on), .choices = stages},
    {"by", MOE_KEY_NODE, offsetof(struct draft, by)},
    {"times", MOE_KEY_NODE, offsetof(struct draft, times)},
};

static int read_factor(const struct moe_yaml *node, struct moe_factor *out)
{
#define X(name, text) text,
    static const char *const names[] = {MOE_SYNC_GROUPS(X) "tokens", "world_tokens"};
#undef X
    enum { N = sizeof names / sizeof *names };
    const char *text = node->kind == MOE_YAML_SCALAR ? node->text : "";
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end != text && !*end && !errno && number >= 1 && number <= 1 << 30) {
        *out = (struct moe_factor){MOE_FACTOR_NUMBER, number};
        return MOE_OK;
    }
    for (int g = MOE_GROUP_NONE + 1; g < MOE_GROUP_COUNT; g++)
        if (!strcmp(moe_sync_group_text[g], text)) {
            *out = (struct moe_factor){MOE_FACTOR_GROUP, g};
            return MOE_OK;
        }
    bool world = !strcmp(text, "world_tokens");
    if (world || !strcmp(text, "tokens")) {
        out->kind = world ? MOE_FACTOR_WORLD_TOKENS : MOE_FACTOR_TOKENS;
        return MOE_OK;
    }
    char hint[MOE_HINT];
    return moe_fail(MOE_EINPUT, "%s:%d: expected a whole number from 1 to 2^30, or a name, not '%s'%s",
                    node->file, node->line, text,
                    moe_hint(text, names + 1, N - 1, hint)); /* none is no factor */
}

static int read_factors(const struct moe_yaml *node, int *n, struct moe_factor *out)
{
    bool list = node->kind == MOE_YAML_LIST;
    *n = list ? node->n : 1;
    if (*n < 1 || *n > MOE_SYNC_FACTORS)
        return moe_fail(MOE_EINPUT, "%s:%d: expected 1 to %d factors", node->file, node->line,
                        MOE_SYNC_FACTORS);
    for (int i = 0; i < *n; i++) MOE_TRY(read_factor(list ? &node->item[i] : node, &out[i]));
    return MOE_OK;
}

/* What a step needs and cannot use follows from what it does. */
static int check_step(const struct moe_yaml *node, const struct draft *d)
{
    int act = d->step.act, over = d->step.over;
    bool shares = act == MOE_SYNC_REDUCE_SCATTER || act == MOE_SYNC_ALL_GATHER || act == MOE_SYNC_BROADCAST;
    bool alike =
        over == MOE_GROUP_WORLD || over == MOE_GROUP_DP || over == MOE_GROUP_EP || over == MOE_GROUP_EDP;
    bool sums = act == MOE_SYNC_SUM || act == MOE_SYNC_AVERAGE;
    const char *fault = sums && d->step.over == MOE_GROUP_NONE ? "needs over: a group"
                        : shares && !alike                     ? "needs over: world, dp, ep or edp"
                        : !sums && !shares && act != MOE_SYNC_NORM && d->step.over ? "has no group to go over"
                        : act == MOE_SYNC_DIVIDE && !d->by && !d->times            ? "needs by or times"
                        : act != MOE_SYNC_DIVIDE && (d->by || d->times)            ? "cannot use by or times"
                        : shares && d->step.on                              ? "cannot be on some stages"
                        : act == MOE_SYNC_CLIP && strcmp(d->step.of, "all") ? "clips all or nothing"
                                                                            : NULL;
    return fault
               ? moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: %s %s", node->file, node->line, acts[act], fault)
               : MOE_OK;
}

static int read_step(const struct moe_yaml *node, struct moe_sync_step *out)
{
    struct draft d = {.step.of = "all", .step.line = node->line};
    MOE_TRY(moe_yaml_read(node, keys, sizeof keys / sizeof *keys, &d));
    MOE_TRY(check_step(node, &d));
    if (d.by) MOE_TRY(read_factors(d.by, &d.step.n_by, d.step.by));
    if (d.times) MOE_TRY(read_factors(d.times, &d.step.n_times, d.step.times));
    *out = d.step;
    return MOE_OK;
}

int moe_sync_read(const struct moe_yaml *node, struct moe_sync_order *out)
{
    enum { MOST = 256 };
    if (node->kind != MOE_YAML_LIST || !node->n || node->n > MOST)
        return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: expected a list of 1 to %d steps", node->file,
                        node->line, MOST);
    *out = (struct moe_sync_order){.n = node->n, .step = moe_alloc((size_t)node->n, sizeof *out->step)};
    int err = MOE_OK;
    for (int i = 0; i < node->n && err >= 0; i++) err = read_step(&node->item[i], &out->step[i]);
    if (err < 0) moe_sync_free(out);
    return err;
}

void moe_sync_free(struct moe_sync_order *order)
{
    free(order->step);
    *order = (struct moe_sync_order){0};
}

void moe_sync_default(bool mean_of_ranks, bool clips, bool distributed, struct moe_sync_order *out)
{
    struct moe_factor by = mean_of_ranks ? (struct moe_factor){MOE_FACTOR_GROUP, MOE_GROUP_DP}
                                         : (struct moe_factor){MOE_FACTOR_WORLD_TOKENS, 0};
    int sum = distributed ? MOE_SYNC_REDUCE_SCATTER : MOE_SYNC_SUM;
    const struct moe_sync_step steps[] = {
        {.act = sum, .of = "shared", .over = MOE_GROUP_DP},
        {.act = sum, .of = "experts", .over = MOE_GROUP_EDP},
        {.act = MOE_SYNC_SUM, .of = "embedding", .over = MOE_GROUP_TIED},
        {.act = MOE_SYNC_DIVIDE, .of = "all", .n_by = 1, .by = {by}},
        {.act = MOE_SYNC_NORM, .of = "shared", .over = distributed ? MOE_GROUP_WORLD : MOE_GROUP_PP},
        {.act = MOE_SYNC_NORM, .of = "experts", .over = distributed ? MOE_GROUP_WORLD : MOE_GROUP_EP_PP},
        {.act = MOE_SYNC_CLIP, .of = "all"},
        {.act = MOE_SYNC_UPDATE, .of = "all"},
        {.act = MOE_SYNC_ALL_GATHER, .of = "shared", .over = MOE_GROUP_DP},
        {.act = MOE_SYNC_ALL_GATHER, .of = "experts", .over = MOE_GROUP_EDP},
    };
    enum { N = sizeof steps / sizeof *steps };
    *out = (struct moe_sync_order){.step = moe_alloc(N, sizeof *out->step)};
    for (int i = 0; i < N; i++)
        if ((clips || (steps[i].act != MOE_SYNC_NORM && steps[i].act != MOE_SYNC_CLIP)) &&
            (distributed || steps[i].act != MOE_SYNC_ALL_GATHER))
            out->step[out->n++] = steps[i];
}
