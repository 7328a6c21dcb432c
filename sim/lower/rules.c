/* rules.c - the capacity rules: their table, and the keys that each of them has in a scenario. */
#include "sim/lower/lower.h"
#include "sim/yaml.h"

#include <stdio.h>
#include <string.h>

/* Bit i is row i of the table. */
enum { DROPLESS = 1, MEGATRON = 2, DEEPSPEED = 4, TUTEL = 8, LIMITING = MEGATRON | DEEPSPEED | TUTEL };
static const struct moe_capacity_rule rules[] = {
    {"dropless", moe_limit_dropless},
    {"megatron", moe_limit_megatron},
    {"deepspeed", moe_limit_deepspeed},
    {"tutel", moe_limit_tutel},
};
enum { N_RULES = sizeof rules / sizeof *rules };

/* Lists whose first word follows "[0]" are no tables to lint, which looks for names in them. */
static const char *const drops[] = {[0] = "probs", "position", NULL};
static const char *const booleans[] = {[0] = "false", "true", NULL};
enum { MOST_K = 64 };

/* clang-format off */
#define KEY(text, value, member, ...) \
        {.name = text, .kind = MOE_KEY_##value, .offset = offsetof(struct moe_capacity, member), __VA_ARGS__}
#define YES_OR_NO(text, member) KEY(text, CHOICE, member, .choices = booleans)
#define FACTOR(least) KEY("factor", REAL, factor, .min = (least), .max = 1e6)
#define DROP KEY("drop", CHOICE, by_position, .choices = drops)
static const struct capacity_key {
    struct moe_key key;
    unsigned rules;     /* that have it */
    int least_k, most_k; /* top_k with which they do; most_k 0: with any */
} all_keys[] = {
    {FACTOR(1e-6), MEGATRON | DEEPSPEED},
    {FACTOR(-1e6), TUTEL},
    {DROP, MEGATRON},
    {DROP, DEEPSPEED, 3, MOST_K},
    {YES_OR_NO("pad", pad), MEGATRON},
    {KEY("min_capacity", INT, min_capacity, .min = 0, .max = 1 << 24), DEEPSPEED},
    {YES_OR_NO("drop_tokens", drop_tokens), DEEPSPEED},
    {YES_OR_NO("agree", agree), DEEPSPEED},
    {YES_OR_NO("clamp", clamp), DEEPSPEED},
    {YES_OR_NO("random_tokens", random_tokens), DEEPSPEED, 1, 1},
    {KEY("seed", INT, seed, .min = 0, .max = 1e15), DEEPSPEED, 1, 1},
    {YES_OR_NO("unequal_tokens", unequal_tokens), TUTEL},
    {KEY("align", INT, align, .min = 1, .max = 1 << 24), TUTEL},
    {KEY("group_tokens", INT, group_tokens, .min = 0, .max = 1 << 24), LIMITING},
};
/* clang-format on */
enum { N_KEYS = sizeof all_keys / sizeof *all_keys };

static int find(const char *name)
{
    const char *names[N_RULES];
    char hint[MOE_HINT];
    for (int i = 0; i < N_RULES; i++) {
        names[i] = rules[i].name;
        if (!strcmp(name, names[i])) return i;
    }
    return moe_fail(MOE_EINPUT, "unknown capacity rule '%s'%s", name, moe_hint(name, names, N_RULES, hint));
}

int moe_capacity_rule(const char *name, const struct moe_capacity_rule **out)
{
    int i = find(name);
    MOE_TRY(i);
    *out = &rules[i];
    return MOE_OK;
}

void moe_capacity_default(struct moe_capacity *out)
{
    *out = (struct moe_capacity){.factor = 1,
                                 .min_capacity = 4,
                                 .drop_tokens = 1,
                                 .agree = 1,
                                 .random_tokens = 1,
                                 .clamp = MOE_CLAMP_TOP1,
                                 .align = 1};
    moe_copy_name(out->rule, rules[0].name);
}

/* ---- in a scenario ---- */

static bool has(const struct capacity_key *k, int rule, int64_t top_k)
{
    return k->rules >> rule & 1 && (!k->most_k || (top_k >= k->least_k && top_k <= k->most_k));
}

/* A key that the rule has with another top_k alone, or that others have. Result: MOE_OK when nobody has. */
static int check_owner(const struct moe_yaml *node, int i, int rule, int64_t top_k)
{
    char owners[MOE_HINT] = "";
    unsigned all = 0;
    for (int k = 0; k < N_KEYS; k++) {
        const struct capacity_key *key = &all_keys[k];
        if (strcmp(key->key.name, node->key[i]) != 0) continue;
        if (has(key, rule, top_k)) return MOE_OK;
        if (key->rules >> rule & 1 && key->most_k == key->least_k)
            return moe_fail(MOE_EINPUT, "%s:%d: key '%s' of rule %s needs top_k: %d, not %lld", node->file,
                            node->key_line[i], node->key[i], rules[rule].name, key->least_k,
                            (long long)top_k);
        if (key->rules >> rule & 1)
            return moe_fail(MOE_EINPUT, "%s:%d: key '%s' of rule %s needs a top_k of %d or more, not %lld",
                            node->file, node->key_line[i], node->key[i], rules[rule].name, key->least_k,
                            (long long)top_k);
        all |= key->rules;
    }
    if (!all) return MOE_OK;
    for (int r = 0; r < N_RULES; r++) {
        size_t used = strlen(owners);
        if (all >> r & 1)
            snprintf(owners + used, sizeof owners - used, "%s%s", used ? ", " : "", rules[r].name);
    }
    return moe_fail(MOE_EINPUT, "%s:%d: key '%s' belongs to rule %s, not %s", node->file, node->key_line[i],
                    node->key[i], owners, rules[rule].name);
}

int moe_capacity_read(const struct moe_yaml *node, int64_t top_k, struct moe_capacity *out)
{
    static const struct moe_key rule_key = KEY("rule", TEXT, rule, .required = true);
    struct moe_key keys[N_KEYS + 1] = {rule_key};
    int rule = -1, n = 1;
    for (int i = 0; node->kind == MOE_YAML_MAP && i < node->n; i++) {
        if (strcmp(node->key[i], rule_key.name) != 0 || node->item[i].kind != MOE_YAML_SCALAR) continue;
        rule = find(node->item[i].text);
        if (rule < 0) return moe_fail(rule, "%s:%d: %s", node->file, node->key_line[i], moe_error());
        for (int j = 0; j < node->n; j++) MOE_TRY(check_owner(node, j, rule, top_k));
        break;
    }
    for (int k = 0; k < N_KEYS; k++)
        if (rule < 0 || has(&all_keys[k], rule, top_k)) keys[n++] = all_keys[k].key;
    return moe_yaml_read(node, keys, n, out); /* without a rule it says so */
}

/* ---- on the command line ---- */

static int read_factor(const char *text, int rule, struct moe_capacity *c)
{
    const struct moe_key *key = NULL;
    char *end;
    double factor = moe_decimal(text, &end);
    for (int k = 0; k < N_KEYS && !key; k++)
        if (all_keys[k].rules >> rule & 1 && all_keys[k].key.offset == offsetof(struct moe_capacity, factor))
            key = &all_keys[k].key;
    if (!key) return moe_fail(MOE_EINPUT, "rule %s has no factor", rules[rule].name);
    if (!c->drop_tokens)
        return moe_fail(MOE_EINPUT, "rule %s has no factor with drop_tokens: false", rules[rule].name);
    if (end == text || *end || !(factor >= key->min && factor <= key->max))
        return moe_fail(MOE_EINPUT, "expected a factor from %g to %g of rule %s", key->min, key->max,
                        rules[rule].name);
    c->factor = factor;
    return MOE_OK;
}

int moe_capacity_set(const char *text, struct moe_capacity *out)
{
    char name[MOE_NAME], *end;
    struct moe_capacity c = *out;
    const char *colon = strchr(text, ':'), *factor = colon ? colon + 1 : NULL;
    moe_decimal(text, &end);
    if (end != text && !*end) { /* of the rule that is there, if it has one */
        factor = text;
        moe_copy_name(name, find(c.rule) == 0 ? rules[1].name : c.rule);
    } else {
        snprintf(name, sizeof name, "%.*s", colon ? (int)(colon - text) : MOE_NAME, text);
    }
    int rule = find(name);
    MOE_TRY(rule);
    if (strcmp(name, c.rule) != 0) moe_capacity_default(&c);
    moe_copy_name(c.rule, name);
    if (factor) MOE_TRY(read_factor(factor, rule, &c));
    *out = c;
    return MOE_OK;
}

void moe_capacity_text(const struct moe_capacity *c, char out[MOE_CAPACITY_TEXT])
{
    int rule = find(c->rule);
    bool factor = rule < 0 || rules[rule].limit != moe_limit_dropless;
    if (factor && c->drop_tokens)
        snprintf(out, MOE_CAPACITY_TEXT, "%s:%g", c->rule, c->factor);
    else
        snprintf(out, MOE_CAPACITY_TEXT, "%s", c->rule);
}
