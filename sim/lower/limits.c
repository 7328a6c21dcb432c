/* limits.c - see limits.h, and lower.h for what it makes of a schedule. */
#include "sim/lower/limits.h"

#include "sim/lower/lower.h"
#include "sim/yaml.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TOKENS = 1 << 24 };
static const char *const booleans[] = {"false", "true", NULL};
static const struct moe_key limit_keys[] = {
    {"rank_factor", MOE_KEY_REAL, offsetof(struct moe_limits, rank_factor), .min = 1e-6, .max = 1e6},
    {"row_multiple", MOE_KEY_INT, offsetof(struct moe_limits, row_multiple), .min = 1, .max = 1 << 16},
    {"cuda_graph", MOE_KEY_CHOICE, offsetof(struct moe_limits, cuda_graph), .choices = booleans},
};
static const struct moe_key padding_keys[] = {
    {"tokens", MOE_KEY_INT, offsetof(struct moe_padding, tokens), .required = true, .max = MOST_TOKENS},
    {"masked", MOE_KEY_CHOICE, offsetof(struct moe_padding, masked), .choices = booleans},
};
#define COUNT(keys) ((int)(sizeof(keys) / sizeof *(keys)))

int moe_dispatch_tokens_read(const struct moe_yaml *node, struct moe_limits *out)
{
    bool list = node->kind == MOE_YAML_LIST;
    out->n_users = list ? node->n : 1;
    if (out->n_users < 1 || out->n_users > MOE_BUFFER_USERS)
        return moe_fail(MOE_EINPUT, "%s:%d: max_dispatch_tokens: expected 1 to %d numbers", node->file,
                        node->line, MOE_BUFFER_USERS);
    for (int i = 0; i < out->n_users; i++) {
        const struct moe_yaml *value = list ? &node->item[i] : node;
        char *end = NULL;
        long long number = value->kind == MOE_YAML_SCALAR ? strtoll(value->text, &end, 10) : 0;
        if (!end || end == value->text || *end || number < 1 || number > MOST_TOKENS)
            return moe_fail(MOE_EINPUT, "%s:%d: max_dispatch_tokens: expected a whole number from 1 to %d",
                            value->file, value->line, MOST_TOKENS);
        out->max_tokens[i] = number;
    }
    return MOE_OK;
}

int64_t moe_limits_most(const struct moe_limits *limits)
{
    int64_t most = 0;
    for (int i = 0; i < limits->n_users; i++)
        if (limits->max_tokens[i] > most) most = limits->max_tokens[i];
    return most;
}

int moe_limits_read(const struct moe_yaml *node, struct moe_limits *out)
{
    for (int i = 0; node->kind == MOE_YAML_MAP && i < node->n; i++)
        if (!strcmp(node->key[i], "max_tokens"))
            return moe_fail(
                MOE_EINPUT,
                "%s:%d: unknown key 'max_tokens' (did you mean 'max_dispatch_tokens', beside limits "
                "and not in it?)",
                node->file, node->key_line[i]);
    return moe_yaml_read(node, limit_keys, COUNT(limit_keys), out);
}

int moe_padding_read(const struct moe_yaml *node, struct moe_padding *out)
{
    return moe_yaml_read(node, padding_keys, COUNT(padding_keys), out);
}

void moe_lower_claims(struct moe_builder *b, const struct moe_layer *m, const struct moe_padding *padding)
{
    const struct moe_limits *l = m->limits;
    b->s->graph = l->cuda_graph;
    if (padding->tokens && !padding->masked)
        moe_claim(b, (struct moe_claim){.check_class = 8,
                                        .of = "router",
                                        .why = "padding is routed like tokens: rows of experts that it takes",
                                        .low = moe_mul(b, moe_const(b, padding->tokens), m->K),
                                        .high = moe_const(b, 0)});
}

void moe_lower_users(struct moe_builder *b, const struct moe_layer *m)
{
    int64_t most = moe_limits_most(m->limits), least = most;
    for (int i = 0; i < m->limits->n_users; i++)
        if (m->limits->max_tokens[i] < least) least = m->limits->max_tokens[i];
    if (least == most) return;
    moe_claim(b, (struct moe_claim){.check_class = 10,
                                    .of = "dispatch buffers",
                                    .why = "max_dispatch_tokens decides their layout, and all that use them "
                                           "must say the same",
                                    .low = moe_const(b, most),
                                    .high = moe_const(b, least)});
}

void moe_lower_bound(const struct moe_layer *m, struct moe_op *op)
{
    if (!m->most_tokens) return;
    op->low = m->T;
    op->high = m->most_tokens;
    op->needs = "a rank has more tokens than the max_dispatch_tokens that the buffers of others hold";
    op->needs_class = 10;
}

void moe_lower_unset_group(struct moe_builder *b, const struct moe_layer *m)
{
    moe_claim(b, (struct moe_claim){
                     .check_class = 13,
                     .of = "expert_group",
                     .why = "it is unset, so that its collectives go over all ranks instead of those "
                            "that split the experts",
                     .low = moe_const(b, b->s->n_ranks),
                     .high = moe_const(b, m->ep_size),
                     .exact = true});
}

/* What is claimed of the rows that reach a rank is checked at `in`, of those of each expert at `out`. */
void moe_lower_row_limits(struct moe_builder *b, const struct moe_layer *m, int n, int of_expert,
                          struct moe_op *in, struct moe_op *out)
{
    const struct moe_limits *l = m->limits;
    if (l->rank_factor > 0) {
        in->low = n;
        in->high = moe_trunc(b, moe_mul(b, m->T, m->K), l->rank_factor);
        in->needs = "more rows reach the rank than rank_factor gives it memory for";
        in->needs_class = 11;
    }
    if (l->row_multiple > 1) {
        int rows = moe_sym(b, of_expert), part = moe_const(b, l->row_multiple);
        out->low = moe_mul(b, moe_ceil(b, rows, part, 1), part);
        out->high = rows;
        out->needs = "the next multiple of row_multiple is above the rows of an expert, which nothing pads";
    }
}
