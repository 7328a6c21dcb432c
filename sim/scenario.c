/* scenario.c - see scenario.h. */
#include "sim/scenario.h"

#include "sim/routing.h"
#include "sim/yaml.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nodes {
    const struct moe_yaml *model, *layout, *tokens, *batches, *routing, *counts, *capacity, *sync, *aux,
        *limits, *padding, *checkpoint, *distributed, *max_tokens;
};
struct draft {
    struct moe_scenario sc;
    struct nodes node;
    char preset[MOE_NAME];
};

const char *const moe_rank_order_text[] = {"consecutive", "strided", NULL};

#define FIELD(member) offsetof(struct draft, member)
const char *const moe_apply_probs_text[] = {"dispatcher", "home", "expert", NULL};
static const char *const row_dots[] = {"fixed", "by_rows", NULL};
static const char *const dtypes[] = {"float32", "float64", "bfloat16", NULL};
static const char *const optimizers[] = {"adamw", "sgd", NULL};
static const char *const pipelines[] = {"1f1b", "gpipe", NULL};
static const char *const probs_gradients[] = {"returned", "lost", NULL};
static const char *const empty_ranks[] = {"run", "detach", "bypass", "skip_weights", NULL};
static const char *const creations[] = {"in_order", "own_first", "own_only", "own_locally", NULL};
static const char *const expert_groups[] = {"set", "unset", NULL};
static const char *const losses[] = {"per_token", "mean_of_ranks", NULL};
static const char *const booleans[] = {"false", "true", NULL};
static const struct moe_key top_keys[] = {
    {"model", MOE_KEY_NODE, FIELD(node.model), .required = true},
    {"layout", MOE_KEY_NODE, FIELD(node.layout), .required = true},
    {"tokens_per_rank", MOE_KEY_NODE, FIELD(node.tokens), .required = true},
    {"routing", MOE_KEY_NODE, FIELD(node.routing)},
    {"capacity", MOE_KEY_NODE, FIELD(node.capacity)},
    {"dispatcher", MOE_KEY_TEXT, FIELD(sc.dispatcher)},
    {"max_dispatch_tokens", MOE_KEY_NODE, FIELD(node.max_tokens)},
    {"topology", MOE_KEY_TEXT, FIELD(sc.topology)},
    {"apply_probs", MOE_KEY_CHOICE, FIELD(sc.apply_probs), .choices = moe_apply_probs_text},
    {"row_dot", MOE_KEY_CHOICE, FIELD(sc.row_dot), .choices = row_dots},
    {"dtype", MOE_KEY_CHOICE, FIELD(sc.dtype), .choices = dtypes},
    {"optimizer", MOE_KEY_CHOICE, FIELD(sc.optimizer), .choices = optimizers},
    {"learning_rate", MOE_KEY_REAL, FIELD(sc.learning_rate), .min = 0, .max = 1e6},
    {"clip_norm", MOE_KEY_REAL, FIELD(sc.clip_norm), .min = 0, .max = 1e6},
    {"loss", MOE_KEY_CHOICE, FIELD(sc.loss), .choices = losses},
    {"gradient_sync", MOE_KEY_NODE, FIELD(node.sync)},
    {"distributed_optimizer", MOE_KEY_NODE, FIELD(node.distributed)},
    {"overlap_grad_reduce", MOE_KEY_CHOICE, FIELD(sc.overlap_grad_reduce), .choices = booleans},
    {"aux_loss", MOE_KEY_NODE, FIELD(node.aux)},
    {"limits", MOE_KEY_NODE, FIELD(node.limits)},
    {"probs_gradient", MOE_KEY_CHOICE, FIELD(sc.probs_detached), .choices = probs_gradients},
    {"empty_rank", MOE_KEY_CHOICE, FIELD(sc.empty_rank), .choices = empty_ranks},
    {"padding", MOE_KEY_NODE, FIELD(node.padding)},
    {"checkpoint", MOE_KEY_NODE, FIELD(node.checkpoint)},
};
static const struct moe_key model_keys[] = {
    {"preset", MOE_KEY_TEXT, FIELD(preset)},
    {"layers", MOE_KEY_INT, FIELD(sc.layers), .required = true, .min = 1, .max = 1024},
    {"hidden", MOE_KEY_INT, FIELD(sc.hidden), .required = true, .min = 1, .max = 65536},
    {"ffn", MOE_KEY_INT, FIELD(sc.ffn), .required = true, .min = 1, .max = 262144},
    {"experts", MOE_KEY_INT, FIELD(sc.experts), .required = true, .min = 1, .max = 4096},
    {"top_k", MOE_KEY_INT, FIELD(sc.top_k), .required = true, .min = 1, .max = 64},
    {"heads", MOE_KEY_INT, FIELD(sc.heads), .min = 0, .max = 1024},
    {"sequence", MOE_KEY_INT, FIELD(sc.sequence), .min = 1, .max = 1 << 20},
};
static const struct moe_key layout_keys[] = {
    {"ranks", MOE_KEY_INT, FIELD(sc.ranks), .required = true, .min = 1, .max = 16384},
    {"expert_parallel", MOE_KEY_INT, FIELD(sc.expert_parallel), .min = 1, .max = 16384},
    {"pipeline_parallel", MOE_KEY_INT, FIELD(sc.pipeline_parallel), .min = 1, .max = 1024},
    {"micro_batches", MOE_KEY_NODE, FIELD(node.batches)},
    {"sequence_parallel", MOE_KEY_INT, FIELD(sc.sequence_parallel), .min = 1, .max = 16384},
    {"data_parallel", MOE_KEY_INT, FIELD(sc.data_parallel), .min = 1, .max = 16384},
    {"expert_data_parallel", MOE_KEY_INT, FIELD(sc.expert_data_parallel), .min = 1, .max = 16384},
    {"expert_group", MOE_KEY_CHOICE, FIELD(sc.expert_group_unset), .choices = expert_groups},
    {"group_creation", MOE_KEY_CHOICE, FIELD(sc.creation), .choices = creations},
    {"pipeline", MOE_KEY_CHOICE, FIELD(sc.pipeline), .choices = pipelines},
    {"rank_order", MOE_KEY_CHOICE, FIELD(sc.rank_order), .choices = moe_rank_order_text},
};
static const struct moe_key distributed_keys[] = {
    {"bucket_size", MOE_KEY_INT, FIELD(sc.distributed.bucket_size), .min = 0,
     .max = (double)((int64_t)1 << 40)},
    {"separate_tied", MOE_KEY_CHOICE, FIELD(sc.distributed.separate_tied), .choices = booleans},
    {"pad", MOE_KEY_CHOICE, FIELD(sc.distributed.pad), .choices = booleans},
};
static const struct moe_key routing_keys[] = {
    {"skew", MOE_KEY_REAL, FIELD(sc.skew), .min = 0, .max = 10},
    {"seed", MOE_KEY_INT, FIELD(sc.seed), .min = 0, .max = 1e15},
};
static const struct moe_key counts_keys[] = {
    {"counts", MOE_KEY_NODE, FIELD(node.counts), .required = true},
    {"step", MOE_KEY_INT, FIELD(sc.counts_step), .min = 0, .max = 1e9},
};
#define COUNT(keys) ((int)(sizeof(keys) / sizeof *(keys)))

/* One number for all ranks, or a list with one per rank. out [ranks] */
static int read_per_rank(const struct moe_yaml *node, const char *key, int64_t least, int64_t most,
                         const struct moe_scenario *sc, int64_t *out)
{
    if (node->kind == MOE_YAML_LIST && node->n != sc->ranks)
        return moe_fail(MOE_EINPUT, "%s:%d: %s lists %d numbers, expected one per rank (%lld)", node->file,
                        node->line, key, node->n, (long long)sc->ranks);
    for (int r = 0; r < sc->ranks; r++) {
        const struct moe_yaml *value = node->kind == MOE_YAML_LIST ? &node->item[r] : node;
        char *end = NULL;
        long long number = value->kind == MOE_YAML_SCALAR ? strtoll(value->text, &end, 10) : least - 1;
        if (!end || end == value->text || *end || number < least || number > most)
            return moe_fail(MOE_EINPUT, "%s:%d: %s: expected a whole number from %lld to %lld", value->file,
                            value->line, key, (long long)least, (long long)most);
        out[r] = number;
    }
    return MOE_OK;
}

static const struct moe_yaml *of_rank(const struct moe_yaml *node, int rank)
{
    return node->kind == MOE_YAML_LIST ? &node->item[rank] : node;
}

static int read_tokens(const struct moe_yaml *node, struct moe_scenario *sc)
{
    int64_t sum = 0;
    sc->tokens = moe_alloc((size_t)sc->ranks, sizeof *sc->tokens);
    MOE_TRY(read_per_rank(node, "tokens_per_rank", 0, 1 << 24, sc, sc->tokens));
    for (int r = 0; r < sc->ranks; r++) {
        const struct moe_yaml *value = of_rank(node, r);
        if (sc->padding.tokens > sc->tokens[r])
            return moe_fail(MOE_EINPUT, "%s:%d: tokens_per_rank: fewer than the %lld of padding", value->file,
                            value->line, (long long)sc->padding.tokens);
        if (sc->padding.masked) sc->tokens[r] -= sc->padding.tokens;
        if (!sc->tokens[r] && sc->loss == MOE_MEAN_OF_RANKS)
            return moe_fail(MOE_EINPUT, "%s:%d: tokens_per_rank: loss mean_of_ranks has no mean of 0 tokens",
                            value->file, value->line);
        sum += sc->tokens[r];
        int64_t before = r - sc->ranks / sc->pipeline_parallel;
        if (before >= 0 && sc->tokens[before] != sc->tokens[r])
            return moe_fail(
                MOE_EINPUT,
                "%s:%d: tokens_per_rank: rank %d has %lld where rank %lld of the stage before it in "
                "its pipeline has %lld",
                value->file, value->line, r, (long long)sc->tokens[r], (long long)before,
                (long long)sc->tokens[before]);
    }
    if (!sum)
        return moe_fail(
            MOE_EINPUT,
            "%s:%d: tokens_per_rank: no rank has a token%s, and the loss of a step is a mean over "
            "its tokens",
            node->file, node->line, sc->padding.tokens ? " that is no padding" : "");
    return MOE_OK;
}

/* micro_batches becomes the most that any rank runs. */
static int read_batches(const struct moe_yaml *node, struct moe_scenario *sc)
{
    int64_t *batches = sc->batches = moe_alloc((size_t)sc->ranks, sizeof *batches);
    bool equal = true;
    MOE_TRY(read_per_rank(node, "micro_batches", 1, 4096, sc, batches));
    for (int r = 0; r < sc->ranks; r++) {
        equal &= batches[r] == batches[0];
        if (batches[r] > sc->micro_batches) sc->micro_batches = batches[r];
    }
    if (equal) {
        free(batches);
        sc->batches = NULL;
    } else if (sc->pipeline_parallel > 1 || sc->loss != MOE_PER_TOKEN) {
        return moe_fail(MOE_EINPUT,
                        "%s:%d: micro_batches that differ by rank go with one stage and loss per_token",
                        node->file, node->line);
    }
    return MOE_OK;
}

int64_t moe_scenario_tokens(const struct moe_scenario *sc)
{
    int64_t sum = 0;
    for (int64_t r = 0; r < sc->ranks / sc->pipeline_parallel; r++)
        sum += sc->tokens[r] * (sc->batches ? sc->batches[r] : sc->micro_batches);
    return sum;
}

int moe_scenario_check_layout(const struct moe_scenario *sc)
{
    long long ep = sc->expert_parallel, pp = sc->pipeline_parallel, ranks = sc->ranks, each = ranks / pp;
    if (ranks % pp)
        return moe_fail(MOE_ELAYOUT, "pipeline_parallel %lld does not divide ranks %lld", pp, ranks);
    if (sc->layers % pp)
        return moe_fail(MOE_ELAYOUT, "pipeline_parallel %lld does not divide layers %lld", pp,
                        (long long)sc->layers);
    if (each % ep && pp > 1)
        return moe_fail(MOE_ELAYOUT, "expert_parallel %lld does not divide the %lld ranks of a stage", ep,
                        each);
    if (ranks % ep)
        return moe_fail(MOE_ELAYOUT, "expert_parallel %lld does not divide ranks %lld", ep, ranks);
    if (sc->experts % ep)
        return moe_fail(MOE_ELAYOUT, "expert_parallel %lld does not divide experts %lld", ep,
                        (long long)sc->experts);
    if (each % sc->sequence_parallel)
        return moe_fail(MOE_ELAYOUT, "sequence_parallel %lld does not divide the %lld ranks of a stage",
                        (long long)sc->sequence_parallel, each);
    if (sc->data_parallel && sc->data_parallel != each / sc->sequence_parallel)
        return moe_fail(
            MOE_ELAYOUT,
            "data_parallel %lld is not ranks %lld / pipeline_parallel %lld / sequence_parallel %lld",
            (long long)sc->data_parallel, ranks, pp, (long long)sc->sequence_parallel);
    if (sc->expert_data_parallel && sc->expert_data_parallel != each / ep)
        return moe_fail(
            MOE_ELAYOUT,
            "expert_data_parallel %lld is not ranks %lld / pipeline_parallel %lld / expert_parallel %lld",
            (long long)sc->expert_data_parallel, ranks, pp, ep);
    return MOE_OK;
}

/* Puts the place of a node before an error that has none. */
static int at(const struct moe_yaml *node, int err)
{
    return err < 0 ? moe_fail(err, "%s:%d: %s", node->file, node->line, moe_error()) : err;
}

static int check_model(const struct moe_yaml *model, const struct moe_scenario *sc)
{
    if (sc->top_k > sc->experts)
        return moe_fail(MOE_EINPUT, "%s:%d: top_k %lld is above experts %lld", model->file, model->line,
                        (long long)sc->top_k, (long long)sc->experts);
    if (sc->heads && sc->sequence_parallel > 1)
        return moe_fail(MOE_EINPUT,
                        "%s:%d: sequence_parallel goes with heads: 0 (attention needs whole sequences)",
                        model->file, model->line);
    if (sc->heads && (sc->hidden % sc->heads || sc->hidden / sc->heads % 2))
        return moe_fail(MOE_EINPUT, "%s:%d: hidden %lld does not split into %lld heads of an even size",
                        model->file, model->line, (long long)sc->hidden, (long long)sc->heads);
    return MOE_OK;
}

/* A preset makes every other key optional. */
static int read_model(const struct moe_yaml *node, struct draft *d)
{
    struct moe_key keys[COUNT(model_keys)];
    for (int i = 0; i < COUNT(keys); i++) {
        keys[i] = model_keys[i];
        keys[i].required = false;
    }
    MOE_TRY(moe_yaml_read(node, keys, COUNT(keys), d)); /* finds the preset */
    if (!*d->preset) return moe_yaml_read(node, model_keys, COUNT(model_keys), d);
    MOE_TRY(at(node, moe_scenario_preset(&d->sc, d->preset)));
    return moe_yaml_read(node, keys, COUNT(keys), d);
}

static const struct moe_yaml *value_of(const struct moe_yaml *map, const char *key)
{
    for (int i = 0; map->kind == MOE_YAML_MAP && i < map->n; i++)
        if (!strcmp(map->key[i], key)) return &map->item[i];
    return NULL;
}

static int read_routing(const struct moe_yaml *node, struct draft *d)
{
    if (value_of(node, "counts")) return moe_yaml_read(node, counts_keys, COUNT(counts_keys), d);
    return moe_yaml_read(node, routing_keys, COUNT(routing_keys), d);
}

/* layer, rank: whose list it is; -1: it is of all. */
static int expect_list(const struct moe_yaml *node, int64_t n, const char *of, int layer, int rank)
{
    char of_layer[24] = "", of_rank[24] = "", found[32] = "is no list";
    if (node->kind == MOE_YAML_LIST && node->n == n) return MOE_OK;
    if (layer >= 0) snprintf(of_layer, sizeof of_layer, " layer %d%s", layer, rank < 0 ? ":" : ",");
    if (rank >= 0) snprintf(of_rank, sizeof of_rank, " rank %d:", rank);
    if (node->kind == MOE_YAML_LIST) snprintf(found, sizeof found, "has %d", node->n);
    return moe_fail(MOE_EINPUT, "%s:%d: counts:%s%s expected a list with one entry per %s (%lld), but it %s",
                    node->file, node->line, of_layer, of_rank, of, (long long)n, found);
}

/* Rows of a rank for every expert: each token has top_k different experts. */
static int read_rank_counts(const struct moe_yaml *node, int layer, int rank, const struct moe_scenario *sc,
                            int32_t *out)
{
    int64_t sum = 0, tokens = sc->tokens[rank], top_k = sc->top_k;
    for (int e = 0; e < node->n; e++) {
        const struct moe_yaml *value = &node->item[e];
        char *end = NULL;
        long long count = value->kind == MOE_YAML_SCALAR ? strtoll(value->text, &end, 10) : -1;
        if (!end || end == value->text || *end || count < 0 || count > tokens)
            return moe_fail(MOE_EINPUT,
                            "%s:%d: counts: layer %d, rank %d, expert %d: expected a whole number from 0 to "
                            "%lld, the rank's tokens",
                            value->file, value->line, layer, rank, e, (long long)tokens);
        out[e] = (int32_t)count;
        sum += count;
    }
    if (sum == tokens * top_k) return MOE_OK;
    return moe_fail(MOE_EINPUT,
                    "%s:%d: counts: layer %d, rank %d: their sum is %lld, expected %lld tokens x top_k %lld",
                    node->file, node->line, layer, rank, (long long)sum, (long long)tokens, (long long)top_k);
}

/* counts[layer][rank][expert] */
static int read_counts(const struct moe_yaml *node, struct moe_scenario *sc)
{
    int64_t layers = sc->layers * sc->micro_batches;
    MOE_TRY(expect_list(node, layers, sc->micro_batches > 1 ? "layer of each micro-batch" : "layer", -1, -1));
    for (int l = 0; l < node->n; l++) {
        MOE_TRY(expect_list(&node->item[l], sc->ranks, "rank", l, -1));
        for (int r = 0; r < node->item[l].n; r++)
            MOE_TRY(expect_list(&node->item[l].item[r], sc->experts, "expert", l, r));
    }
    sc->counts = moe_alloc((size_t)layers * (size_t)sc->ranks * (size_t)sc->experts, sizeof *sc->counts);
    int32_t *out = sc->counts;
    for (int l = 0; l < node->n; l++)
        for (int r = 0; r < node->item[l].n; r++, out += sc->experts)
            MOE_TRY(read_rank_counts(&node->item[l].item[r], l, r, sc, out));
    return MOE_OK;
}

struct moe_routing *moe_scenario_routing(const struct moe_scenario *sc)
{
    int L = (int)(sc->layers * sc->micro_batches), R = (int)sc->ranks, E = (int)sc->experts,
        K = (int)sc->top_k;
    if (!sc->counts)
        return moe_routing_generate_stages(L, R, E, K, sc->tokens, sc->skew, (uint64_t)sc->seed,
                                           (int)sc->pipeline_parallel, (int)sc->micro_batches);
    struct moe_routing *r = moe_routing_new(L, R, E, K);
    memcpy(r->tokens, sc->tokens, (size_t)R * sizeof *r->tokens);
    memcpy(r->counts, sc->counts, (size_t)L * (size_t)R * (size_t)E * sizeof *r->counts);
    return r;
}

/* How buckets are laid out says nothing where there are none. */
static int read_distributed(const struct moe_yaml *node, struct draft *d)
{
    bool shares = !d->sc.sync.n;
    for (int i = 0; i < d->sc.sync.n; i++) shares |= d->sc.sync.step[i].act == MOE_SYNC_REDUCE_SCATTER;
    d->sc.distributed.on = true;
    if (!shares)
        return moe_fail(MOE_EINPUT, "%s:%d: distributed_optimizer: gradient_sync has no reduce_scatter",
                        node->file, node->line);
    return moe_yaml_read(node, distributed_keys, COUNT(distributed_keys), d);
}

static int read_all(const struct moe_yaml *root, struct draft *d)
{
    struct moe_scenario *sc = &d->sc;
    moe_copy_name(sc->dispatcher, "alltoall");
    moe_capacity_default(&sc->capacity);
    sc->distributed.separate_tied = sc->distributed.pad = 1;
    sc->sequence = 64;
    sc->pipeline_parallel = sc->micro_batches = sc->sequence_parallel = 1;
    sc->learning_rate = 0.003;
    sc->clip_norm = 1;
    sc->aux_loss.coefficient = 0.01;
    sc->counts_step = -1;
    MOE_TRY(moe_yaml_read(root, top_keys, COUNT(top_keys), d));
    int known = moe_dispatcher_check(sc->dispatcher);
    if (known < 0) return at(value_of(root, "dispatcher"), known);
    MOE_TRY(read_model(d->node.model, d));
    MOE_TRY(moe_yaml_read(d->node.layout, layout_keys, COUNT(layout_keys), d));
    if (d->node.routing) MOE_TRY(read_routing(d->node.routing, d));
    if (d->node.capacity) MOE_TRY(moe_capacity_read(d->node.capacity, sc->top_k, &sc->capacity));
    if (d->node.sync) MOE_TRY(moe_sync_read(d->node.sync, &sc->sync));
    if (d->node.sync) sc->sync.line = root->key_line[d->node.sync - root->item];
    if (d->node.aux) MOE_TRY(moe_aux_loss_read(d->node.aux, &sc->aux_loss));
    if (d->node.limits) MOE_TRY(moe_limits_read(d->node.limits, &sc->limits));
    if (d->node.max_tokens) {
        MOE_TRY(at(d->node.max_tokens, moe_dispatcher_bounds(sc->dispatcher, "max_dispatch_tokens")));
        MOE_TRY(moe_dispatch_tokens_read(d->node.max_tokens, &sc->limits));
    }
    if (d->node.padding) MOE_TRY(moe_padding_read(d->node.padding, &sc->padding));
    if (d->node.checkpoint) MOE_TRY(moe_checkpoint_read(d->node.checkpoint, &sc->checkpoint));
    if (d->node.distributed) MOE_TRY(read_distributed(d->node.distributed, d));
    if (!sc->expert_parallel && sc->ranks % sc->pipeline_parallel == 0)
        sc->expert_parallel = sc->ranks / sc->pipeline_parallel;
    if (!sc->expert_parallel) sc->expert_parallel = 1;
    MOE_TRY(at(d->node.layout, moe_scenario_check_layout(sc)));
    MOE_TRY(check_model(d->node.model, sc));
    MOE_TRY(read_tokens(d->node.tokens, sc));
    if (d->node.batches) MOE_TRY(read_batches(d->node.batches, sc));
    return d->node.counts ? read_counts(d->node.counts, sc) : MOE_OK;
}

/* ---- two scenarios ---- */

static void write_value(const struct moe_key *k, const struct moe_scenario *sc, char out[MOE_NAME])
{
    const char *at = (const char *)sc + k->offset;
    switch (k->kind) {
    case MOE_KEY_INT: snprintf(out, MOE_NAME, "%lld", (long long)*(const int64_t *)(const void *)at); break;
    case MOE_KEY_CHOICE: snprintf(out, MOE_NAME, "%s", k->choices[*(const int *)(const void *)at]); break;
    case MOE_KEY_TEXT: snprintf(out, MOE_NAME, "%s", at); break;
    default: snprintf(out, MOE_NAME, "%.9g", *(const double *)(const void *)at);
    }
}

static bool same_node(const struct moe_yaml *a, const struct moe_yaml *b)
{
    bool same = a && b && a->kind == b->kind && a->n == b->n;
    if (!same) return !a && !b;
    if (a->kind == MOE_YAML_SCALAR) return !strcmp(a->text, b->text);
    for (int i = 0; i < a->n && same; i++)
        same =
            (a->kind != MOE_YAML_MAP || !strcmp(a->key[i], b->key[i])) && same_node(&a->item[i], &b->item[i]);
    return same;
}

static void write_node(const struct moe_yaml *node, char out[MOE_NAME])
{
    snprintf(out, MOE_NAME, "%s", !node ? "absent" : node->kind == MOE_YAML_SCALAR ? node->text : "...");
}

/* Does the key of a map differ, in the scenarios [2] that were read from roots [2]? */
static bool differs(const struct moe_key *k, const struct moe_scenario *const sc[2],
                    const struct moe_yaml *const root[2], struct moe_scenario_difference *d)
{
    static const char *const left_out[] = {"model", "layout", "topology", "routing", "preset"};
    const struct moe_yaml *node[2];
    for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
        if (!strcmp(k->name, left_out[i])) return false;
    if (k->kind != MOE_KEY_NODE) {
        write_value(k, sc[0], d->a);
        write_value(k, sc[1], d->b);
        return strcmp(d->a, d->b) != 0;
    }
    for (int i = 0; i < 2; i++) {
        node[i] = value_of(*d->map ? value_of(root[i], d->map) : root[i], k->name);
        write_node(node[i], i ? d->b : d->a);
    }
    return !same_node(node[0], node[1]);
}

void moe_scenario_compare(const struct moe_scenario *a, const struct moe_scenario *b,
                          void (*fn)(void *ctx, const struct moe_scenario_difference *d), void *ctx)
{
    static const struct {
        const char *name;
        const struct moe_key *key;
        int n;
    } maps[] = {{"model", model_keys, COUNT(model_keys)},
                {"layout", layout_keys, COUNT(layout_keys)},
                {"", top_keys, COUNT(top_keys)}};
    const struct moe_scenario *const sc[2] = {a, b};
    struct moe_yaml *root[2];
    for (int i = 0; i < 2; i++) {
        const int err = moe_yaml_parse(sc[i]->name, sc[i]->text, strlen(sc[i]->text), &root[i]);
        moe_assert(err >= 0); /* it was read from this text */
    }
    for (size_t m = 0; m < sizeof maps / sizeof *maps; m++)
        for (int i = 0; i < maps[m].n; i++) {
            struct moe_scenario_difference d = {.map = maps[m].name, .key = maps[m].key[i].name};
            if (differs(&maps[m].key[i], sc, (const struct moe_yaml *const *)root, &d)) fn(ctx, &d);
        }
    for (int i = 0; i < 2; i++) moe_yaml_free(root[i]);
}

int moe_scenario_check_capture(const struct moe_scenario *sc, bool checkpoints)
{
    const char *what = sc->batches                                ? "micro_batches that differ by rank"
                       : checkpoints && sc->pipeline_parallel > 1 ? "checkpoints of pipelines"
                       : checkpoints && sc->distributed.on        ? "checkpoints of a distributed optimizer"
                                                                  : NULL;
    return what ? moe_fail(MOE_EMISSING, "%s: %s cannot be captured", sc->name, what) : MOE_OK;
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
    if (err < 0) {
        free(d.sc.tokens);
        free(d.sc.batches);
        moe_sync_free(&d.sc.sync);
        free(d.sc.counts);
    }
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
    free(sc->batches);
    moe_sync_free(&sc->sync);
    free(sc->counts);
    free(sc->text);
    free(sc);
}
