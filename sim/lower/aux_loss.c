/* aux_loss.c - see aux_loss.h, and lower.h for what it makes of a schedule. Source: founding_cases.md A.0b
 * 7. */
#include "sim/lower/aux_loss.h"

#include "sim/lower/lower.h"
#include "sim/yaml.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
static const char *const words[] = {MOE_AUX_FACTORS(X)};
#undef X
static const char *const overs[] = {"dp", "ep", "edp", "sp", "none", NULL};

struct draft {
    struct moe_aux_loss aux;
    const struct moe_yaml *times, *by;
};
static const struct moe_key keys[] = {
    {"coefficient", MOE_KEY_REAL, offsetof(struct draft, aux.coefficient), .required = true, .max = 1e6},
    {"over", MOE_KEY_CHOICE, offsetof(struct draft, aux.over), .choices = overs},
    {"times", MOE_KEY_NODE, offsetof(struct draft, times)},
    {"by", MOE_KEY_NODE, offsetof(struct draft, by)},
};

static int read_factor(const struct moe_yaml *node, struct moe_aux_product *out)
{
    const char *text = node->kind == MOE_YAML_SCALAR ? node->text : "";
    char *end, hint[MOE_HINT];
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end != text && !*end && !errno && number >= 1 && number <= 1 << 10) {
        out->number *= number;
        return MOE_OK;
    }
    for (int w = 0; w < MOE_AUX_FACTOR_COUNT; w++)
        if (!strcmp(words[w], text)) {
            out->word[out->n++] = w;
            return MOE_OK;
        }
    return moe_fail(MOE_EINPUT,
                    "%s:%d: aux_loss: expected a whole number from 1 to 2^10, or a name, not '%s'%s",
                    node->file, node->line, text, moe_hint(text, words, MOE_AUX_FACTOR_COUNT, hint));
}

static int read_product(const struct moe_yaml *node, struct moe_aux_product *out)
{
    bool list = node->kind == MOE_YAML_LIST;
    int n = list ? node->n : 1;
    if (n < 1 || n > MOE_AUX_WORDS)
        return moe_fail(MOE_EINPUT, "%s:%d: aux_loss: expected 1 to %d factors", node->file, node->line,
                        MOE_AUX_WORDS);
    for (int i = 0; i < n; i++) MOE_TRY(read_factor(list ? &node->item[i] : node, out));
    return MOE_OK;
}

int moe_aux_loss_read(const struct moe_yaml *node, struct moe_aux_loss *out)
{
    struct draft d = {.aux = {.times = {.number = 1}, .by = {.number = 1}}};
    if (node->kind == MOE_YAML_SCALAR) {
        char *end;
        d.aux.coefficient = moe_decimal(node->text, &end);
        if (end == node->text || *end || !(d.aux.coefficient >= 0 && d.aux.coefficient <= 1e6))
            return moe_fail(MOE_EINPUT, "%s:%d: aux_loss: expected a number from 0 to 1e+06, or a mapping",
                            node->file, node->line);
    } else {
        MOE_TRY(moe_yaml_read(node, keys, sizeof keys / sizeof *keys, &d));
    }
    d.aux.scaled = d.times || d.by;
    if (d.times) MOE_TRY(read_product(d.times, &d.aux.times));
    if (d.by) MOE_TRY(read_product(d.by, &d.aux.by));
    *out = d.aux;
    return MOE_OK;
}

static int product(struct moe_builder *b, const struct moe_lower_aux *a, const struct moe_aux_product *of)
{
    int out = moe_const(b, of->number);
    for (int i = 0; i < of->n; i++) out = moe_mul(b, out, a->factor[of->word[i]]);
    return out;
}

static int group_tokens(struct moe_builder *b, int comm)
{
    struct moe_symbol peers = {.scope = MOE_SCOPE_PEER, .comm = comm};
    return moe_sum(b, moe_new_symbol(b, "tokens_of_group", -1, false, peers));
}

void moe_lower_aux_open(struct moe_builder *b, const struct moe_scenario *sc, const struct moe_groups *groups,
                        int T, int dp_tokens, struct moe_lower_aux *out)
{
    const struct moe_aux_loss *aux = &sc->aux_loss;
    const int comms[] = {groups->dp, groups->ep, groups->edp, groups->sp, -1};
    int comm = comms[aux->over];
    int tokens = comm < 0 ? T : comm == groups->dp ? dp_tokens : group_tokens(b, comm);
    *out = (struct moe_lower_aux){.comm = comm, .divisor = tokens};
    if (!aux->scaled) return;
    for (int i = MOE_AUX_DP; i <= MOE_AUX_SP; i++)
        out->factor[i] = moe_const(b, comms[i] < 0 ? 1 : moe_group_size(&b->s->comms[comms[i]], 0));
    out->factor[MOE_AUX_TOKENS] = T;
    out->factor[MOE_AUX_GROUP_TOKENS] = tokens;
    out->factor[MOE_AUX_SEQUENCES] = moe_ceil(b, T, moe_const(b, sc->sequence), 1);
    out->factor[MOE_AUX_MICRO_BATCHES] = moe_const(b, sc->micro_batches);
    int by = product(b, out, &aux->by);
    out->times = product(b, out, &aux->times);
    out->divisor = moe_mul(b, moe_mul(b, tokens, tokens), by);
    moe_claim(
        b, (struct moe_claim){
               .check_class = 7,
               .of = "aux_loss",
               .why = "its weight depends on the layout, unless times is the tokens of the group, times by",
               .low = out->times,
               .high = moe_mul(b, tokens, by),
               .exact = true});
}

/* Choice i of a token costs the square of how popular expert i is. */
void moe_lower_aux_loss(struct moe_builder *b, const struct moe_layer *y, const struct moe_lower_aux *a,
                        double coefficient, struct moe_ref loss)
{
    struct moe_ref all = y->counts;
    if (a->comm >= 0) {
        all = moe_ref(moe_new_buffer(b, "all_counts", MOE_BUF_INDEX, MOE_I64, y->n_layers, y->E));
        moe_emit(b, (struct moe_op){.name = "sum_counts",
                                    .kind = MOE_COLLECTIVE,
                                    .collective = MOE_ALLREDUCE,
                                    .comm = a->comm,
                                    .type = MOE_I64,
                                    .stream = MOE_STREAM_COMM,
                                    .send = y->E,
                                    .recv = y->E,
                                    MOE_READS(y->counts),
                                    MOE_WRITES(all)});
    }
    moe_emit(b, (struct moe_op){.name = "aux_loss",
                                .kernel = MOE_K_AUX_LOSS,
                                .type = y->type,
                                .needs_grad = 1,
                                .divisor = a->divisor,
                                .times = a->times,
                                .factor = coefficient * (double)b->s->n_experts / (double)b->s->top_k,
                                MOE_READS(y->prob, all),
                                MOE_WRITES(loss),
                                MOE_SIZES(y->T, y->E)});
}
