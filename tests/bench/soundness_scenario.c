/* soundness_scenario.c - see soundness.h. */
#include "tests/bench/soundness.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int draw(struct draws *d, int n)
{
    return (int)(moe_uniform(d->seed, 0, d->n++) * n);
}

int draw_between(struct draws *d, int least, int most)
{
    return least + draw(d, most - least + 1);
}

static const char *choose(struct draws *d, int n, const char *const *words)
{
    return words[draw(d, n)];
}

static int divisor(struct draws *d, int n)
{
    int i;
    do i = draw_between(d, 1, n);
    while (n % i);
    return i;
}

static void add(char out[TEXT], const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(char out[TEXT], const char *format, ...)
{
    size_t used = strlen(out);
    va_list args;
    va_start(args, format);
    int n = vsnprintf(out + used, TEXT - used, format, args);
    va_end(args);
    moe_assert(n >= 0 && (size_t)n < TEXT - used);
}

struct shape {
    int ranks, ep, pp, micro, each; /* each: ranks of a stage */
    int heads, sequence, tokens[8]; /* [each] */
    bool equal;                     /* as many tokens on every rank */
    int group;                      /* tokens that share a capacity, 0: all of the rank */
    int experts, top_k;
    bool limits, mean, clips, shares; /* shares: distributed optimizer */
    bool telling;                     /* see scenario_draw */
};

/* A sequence does not span ranks: the tokens of a rank are whole ones where attention looks at them. */
static void draw_tokens(struct draws *d, struct shape *y)
{
    int unit = y->heads && y->each > 1 ? y->sequence : 1, sum = 0;
    y->equal = y->limits || y->mean || draw(d, 2);
    if (y->limits && !y->mean && draw(d, 4) == 0) { /* of whole groups, so unequal is no other rule */
        y->group = unit * draw_between(d, 1, 3);
        unit = y->group;
        y->equal = draw(d, 2);
    }
    do {
        sum = 0;
        for (int r = 0; r < y->each; r++) {
            int least = y->mean ? 1 : 0, n = unit * draw_between(d, least, 12 / unit + 1);
            if (y->telling && n) n += unit * (3 / unit + 1); /* some are kept in every layer */
            y->tokens[r] = r && y->equal ? y->tokens[0] : n;
            sum += y->tokens[r];
        }
    } while (!sum);
}

static void add_tokens(const struct shape *y, char out[TEXT])
{
    if (y->equal) {
        add(out, "tokens_per_rank: %d\n", y->tokens[0]);
        return;
    }
    add(out, "tokens_per_rank: [");
    for (int r = 0; r < y->ranks; r++) add(out, "%s%d", r ? ", " : "", y->tokens[r % y->each]);
    add(out, "]\n");
}

static void shuffle(struct draws *d, int n, const char **words)
{
    for (int i = n - 1; i > 0; i--) {
        int j = draw(d, i + 1);
        const char *word = words[i];
        words[i] = words[j];
        words[j] = word;
    }
}

/* Sums and divisions commute; so do those of different parameters, and norms. */
static void add_sync(struct draws *d, const struct shape *y, char out[TEXT])
{
    static const char *const by_tokens[] = {"{do: divide, by: world_tokens}",
                                            "{do: divide, by: [world_tokens, ep], times: ep}",
                                            "{do: divide, by: [2, world_tokens], times: 2}"};
    const char *part[8],
        *norm[2] = {"{do: norm, of: shared, over: pp}", "{do: norm, of: experts, over: ep_pp}"};
    int n = 0;
    bool averages = y->mean && draw(d, 2);
    part[n++] = averages ? "{do: average, of: shared, over: dp}" : "{do: sum, of: shared, over: dp}";
    part[n++] = averages ? "{do: average, of: experts, over: edp}" : "{do: sum, of: experts, over: edp}";
    part[n++] = "{do: sum, of: embedding, over: tied}";
    if (averages)
        part[n++] = "{do: divide, of: experts, by: ep}";
    else if (y->mean)
        part[n++] = "{do: divide, by: dp}";
    else if (draw(d, 2)) {
        part[n++] = choose(d, 3, by_tokens);
    } else {
        part[n++] = "{do: divide, of: shared, by: world_tokens}";
        part[n++] = "{do: divide, of: experts, by: [world_tokens, ep], times: ep}";
    }
    shuffle(d, n, part);
    shuffle(d, 2, norm);
    add(out, "gradient_sync: [");
    if (draw(d, 3) == 0)
        add(out, "{do: broadcast, of: shared, over: dp}, {do: broadcast, of: experts, over: edp}, ");
    for (int i = 0; i < n; i++) add(out, "%s, ", part[i]);
    if (y->clips) add(out, "%s, %s, {do: clip}, ", norm[0], norm[1]);
    add(out, "{do: update}]\n");
}

static void add_model(struct draws *d, struct shape *y, int layers, char out[TEXT])
{
    /* Of one number RMSNorm leaves the sign alone, and nothing before it would have a gradient. */
    int hidden = y->heads ? y->heads * 2 * draw_between(d, 1, 3) : draw_between(d, 2, 10);
    y->experts = y->ep * draw_between(d, 1, 3);
    if (y->telling && y->experts == 1) y->experts = 2;
    y->top_k = draw_between(d, 1, y->experts < 4 ? y->experts : 4);
    if (y->telling && y->top_k == y->experts) y->top_k--;
    add(out, "model: {layers: %d, hidden: %d, ffn: %d, experts: %d, top_k: %d, heads: %d, sequence: %d}\n",
        layers, hidden, draw_between(d, 1, 9), y->experts, y->top_k, y->heads, y->sequence);
}

/* Of its part of tokens the framework picks as many as a padded capacity: there must be so many. */
static bool may_pad(const struct shape *y, int part, const char *factor)
{
    return y->equal && ceil((double)(part * y->top_k) / y->experts * strtod(factor, NULL)) <= part;
}

static const char *yes_or_no(struct draws *d)
{
    return draw(d, 2) ? "true" : "false";
}

/* Padding moves zeros: `alone` has the same rule without. Result: the dispatcher; gshard pads too. */
static const char *add_megatron(struct draws *d, const struct shape *y, char out[TEXT], char alone[TEXT])
{
    static const char *const drops[] = {"probs", "position"},
                             *const factors[] = {"0.5", "1.0", "1.25", "2.0"},
                             *const dispatchers[] = {"alltoall", "allgather", "gshard"};
    const char *factor = choose(d, 4, factors), *drop = choose(d, 2, drops);
    int part = y->group ? y->group : y->tokens[0];
    bool pads = may_pad(y, part, factor);
    add(out, "capacity: {rule: megatron, factor: %s, drop: %s, pad: %s", factor, drop,
        pads ? yes_or_no(d) : "false");
    add(alone, "capacity: {rule: megatron, factor: %s, drop: %s, group_tokens: %d}\n", factor, drop, part);
    if (y->group) add(out, ", group_tokens: %d", y->group);
    add(out, "}\n");
    return choose(d, pads ? 3 : 2, dispatchers);
}

static const char *add_others(struct draws *d, const struct shape *y, char out[TEXT], char alone[TEXT])
{
    static const char *const above[] = {"0.5", "1.0", "1.25", "2.0"},
                             *const any[] = {"-1.5", "0", "0.7", "2.0"},
                             *const dispatchers[] = {"alltoall", "allgather", "gshard"};
    char rule[TEXT] = "";
    int part = y->tokens[0];
    if (draw(d, 2)) {
        add(rule, "rule: tutel, factor: %s, unequal_tokens: %s, align: %d", choose(d, 4, any), yes_or_no(d),
            draw_between(d, 1, 4));
    } else {
        int least = part < 4 ? part : 4; /* a top-1 gate needs so many tokens */
        add(rule, "rule: deepspeed, min_capacity: %d", draw_between(d, 0, least));
        if (draw(d, 3))
            add(rule, ", factor: %s", choose(d, 4, above));
        else
            add(rule, ", drop_tokens: false, clamp: %s", yes_or_no(d));
        if (y->top_k == 1) add(rule, ", random_tokens: %s, seed: %d", yes_or_no(d), draw(d, 100));
        if (y->top_k > 2) add(rule, ", drop: %s", draw(d, 2) ? "probs" : "position");
    }
    add(out, "capacity: {%s}\n", rule);
    add(alone, "capacity: {%s, group_tokens: %d}\n", rule, part);
    return choose(d, 3, dispatchers);
}

/* The dispatchers beside those of rules that limit; their buffers hold the tokens of any rank. */
static void add_dropless(struct draws *d, const struct shape *y, char out[TEXT])
{
    static const char *const dispatchers[] = {"alltoall", "allgather",          "gshard",
                                              "deepep",   "deepep_low_latency", "nvlink_one_sided"};
    int i = draw(d, 6), most = 1;
    for (int r = 0; r < y->each; r++)
        if (y->tokens[r] > most) most = y->tokens[r];
    add(out, "dispatcher: %s\n", dispatchers[i]);
    if (i >= 4 && draw(d, 2)) add(out, "max_dispatch_tokens: %d\n", most + draw(d, 3));
    if (i == 0 && draw(d, 2)) add(out, "apply_probs: %s\n", draw(d, 2) ? "expert" : "home");
}

/* What both, many ranks and one, are told in the same words. */
static void add_rules(struct draws *d, const struct shape *y, char out[TEXT])
{
    static const char *const optimizers[] = {"adamw", "sgd"}, *const norms[] = {"0.01", "1.0", "100"},
                             *const rates[] = {"0.003", "0.01"}, *const aux[] = {"0", "0.01", "0.5"};
    add(out, "dtype: float64\noptimizer: %s\nlearning_rate: %s\n", choose(d, 2, optimizers),
        choose(d, 2, rates));
    add(out, "aux_loss: %s\nloss: %s\n", choose(d, 3, aux), y->mean ? "mean_of_ranks" : "per_token");
    add(out, "clip_norm: %s\n", !y->clips ? "0" : y->telling ? "0.001" : choose(d, 3, norms));
}

void scenario_draw(struct draws *d, int most_ranks, bool telling, char out[TEXT], char alone[TEXT])
{
    static const char *const pipelines[] = {"1f1b", "gpipe"};
    struct shape y = {
        .ranks = draw_between(d, 1, most_ranks), .micro = draw_between(d, 1, 3), .telling = telling};
    y.pp = draw(d, 2) ? divisor(d, y.ranks) : 1;
    y.each = y.ranks / y.pp;
    y.ep = divisor(d, y.each);
    y.heads = draw(d, 2) ? draw_between(d, 1, 3) : 0;
    y.sequence = draw_between(d, telling ? 2 : 1, 5);
    y.limits = draw(d, 2);
    y.mean = draw(d, 3) == 0;
    y.clips = draw(d, 3) > 0;
    y.shares = draw(d, 4) == 0;
    draw_tokens(d, &y);
    char model[TEXT] = "", rules[TEXT] = "";
    int sum = 0, layers = y.pp * draw_between(d, 1, y.pp > 2 ? 1 : 2);
    for (int r = 0; r < y.each; r++) sum += y.tokens[r];
    add_model(d, &y, layers, model);
    add_rules(d, &y, rules);
    *alone = *out = 0;
    add(alone, "%slayout: {ranks: 1, micro_batches: %d}\ntokens_per_rank: %d\n%s", model, y.micro, sum,
        rules);
    add(out,
        "%slayout: {ranks: %d, expert_parallel: %d, pipeline_parallel: %d, micro_batches: %d, pipeline: %s, ",
        model, y.ranks, y.ep, y.pp, y.micro, choose(d, 2, pipelines));
    add(out, "rank_order: %s}\n", moe_rank_order_text[draw(d, MOE_RANK_ORDER_COUNT)]);
    add_tokens(&y, out);
    add(out, "%srow_dot: %s\n", rules, draw(d, 4) ? "fixed" : "by_rows");
    if (!y.limits)
        add_dropless(d, &y, out);
    else
        add(out, "dispatcher: %s\n",
            y.group || draw(d, 2) ? add_megatron(d, &y, out, alone) : add_others(d, &y, out, alone));
    add(out, "overlap_grad_reduce: %s\n", yes_or_no(d));
    if (y.shares)
        add(out, "distributed_optimizer: {bucket_size: %d}\n", 100 * draw(d, 6));
    else if (draw(d, 2))
        add_sync(d, &y, out);
}
