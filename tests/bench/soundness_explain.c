/* soundness_explain.c - see soundness.h. */
#include "tests/bench/soundness.h"

#include "tests/mpi/parity.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
const char *const rule_text[] = {RULES(X)};
#undef X

/* No norm of the run is above the limit. */
static bool clips_nothing(const struct trial *t)
{
    double sum = 0;
    const struct moe_schedule *s = t->scene.s;
    for (int i = 0; i < s->n_buffers; i++) {
        int64_t n = 0;
        if (s->buffers[i].role != MOE_BUF_NORM) continue;
        const double *norm = moe_execute_buffer(t->after[0]->x, i, 0, &n);
        if (norm && n) sum += *norm;
    }
    return sqrt(sum) <= t->scene.sc->clip_norm;
}

static bool is_vector(const struct trial *t)
{
    for (int i = 0; i < t->m.op->n_dims; i++) {
        const struct moe_expr *e = &t->s->exprs[t->m.op->dims[i]];
        if (e->op == MOE_EXPR_CONST && e->value == 1) return true;
        if (e->op == MOE_EXPR_SYM && t->scene.s->tokens[t->m.rank] == 1) return true;
    }
    return false;
}

/* Is it about the operation that was changed, in whatever layer? */
static bool is_here(const struct trial *t, const struct moe_verdict *v)
{
    char label[2 * MOE_NAME];
    const int end = t->s->n_micro * moe_layers_each(t->s);
    if (!strcmp(v->op, t->m.op->name)) return true;
    for (int layer = 0; layer <= end; layer++) {
        moe_op_label(t->m.block, t->m.op, layer, label);
        if (!strcmp(label, v->op)) return true;
    }
    return false;
}

/* Is it about what undoes the operation that was changed? */
static bool is_reverse(const struct trial *t, const struct moe_verdict *v)
{
    char words[MOE_NAME + 32];
    snprintf(words, sizeof words, ", unlike '%s' that it undoes", t->m.op->name);
    return v->check_class == 14 && strstr(v->text, words);
}

/* Is it about what the rank that was changed alone computes? */
static bool is_of_rank(const struct trial *t, const struct moe_verdict *v)
{
    return v->n_ranks == 1 && v->ranks[0] == t->m.rank;
}

/* Is it about a contribution to a gradient, by the rank that was changed? */
static bool is_contribution(const struct trial *t, const struct moe_verdict *v)
{
    char words[64];
    snprintf(words, sizeof words, ", one of rank %d", t->m.rank);
    size_t n = strlen(v->text), length = strlen(words);
    return n >= length && !strcmp(v->text + n - length, words);
}

/* What is known before the step begins: no counts. */
static int64_t initial(void *ctx, int symbol, int rank, int layer, int index)
{
    const struct moe_schedule *s = ctx;
    if (s->symbols[symbol].buffer >= 0) return MOE_UNKNOWN;
    return moe_symbol_initial(s, (struct moe_env){initial, ctx, NULL}, symbol, rank, layer, index);
}

/* On the rank that was changed, in the schedule without the change. */
static int64_t known(const struct trial *t, int expr)
{
    struct moe_env env = {.value = initial, .ctx = t->scene.s};
    return moe_eval(t->scene.s, env, expr, t->m.rank, 0, 0);
}

/* What was changed, without the change. */
static const struct moe_op *original(const struct trial *t)
{
    const struct moe_schedule *s = t->scene.s;
    const struct moe_role *changed = &t->s->roles[t->s->role_of[t->m.rank]];
    return &s->roles[s->role_of[t->m.rank]]
                .blocks[t->m.block - changed->blocks]
                .ops[t->m.op - t->m.block->ops];
}

/* Was it to work on a part without elements? So of a bucket, where other ranks own all of a parameter. */
static bool works_on_nothing(const struct trial *t)
{
    const struct moe_op *op = original(t);
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        struct moe_ref ref = i < op->n_reads ? op->reads[i] : op->writes[i - op->n_reads];
        if (ref.n && known(t, ref.n) == 0) return true;
    }
    return false;
}

/* What an operation that measures adds is told of the norm, too. */
static bool is_of_norm(const struct trial *t, const struct moe_verdict *v)
{
    return !strncmp(t->m.op->name, "norm_", 5) && v->check_class == 5 && strstr(v->text, "norm");
}

/* A loss of few tokens, or an average over one rank. */
static bool divides_by_one(const struct trial *t)
{
    const struct moe_op *op = original(t);
    if (op->kind != MOE_KERNEL || op->kernel != MOE_K_SCALE) return false;
    int64_t by = op->divisor ? known(t, op->divisor) : 1, times = op->times ? known(t, op->times) : 1;
    return by == times && by != MOE_UNKNOWN;
}

/* Is it about a parameter by this name, which a layer may follow, or its update? */
static bool is_about(const struct moe_verdict *v, const char *param)
{
    const char *last = strrchr(v->op, ' ');
    last = last ? last + 1 : v->op;
    if (!strncmp(last, "update_", 7)) last += 7;
    size_t n = strlen(last);
    return !strncmp(last, param, n) && (!param[n] || (param[n] == '_' && isdigit(param[n + 1])));
}

/* About the one that the changed operation has in its name? */
static bool is_of_param(const struct trial *t, const struct moe_verdict *v)
{
    const char *name = strchr(t->m.op->name, '_');
    return name && v->check_class >= 3 && v->check_class <= 5 && is_about(v, name + 1);
}

/* Does it copy into a parameter what the rank itself has put there, since it updates all of it? */
static bool copies_own(const struct trial *t)
{
    const struct moe_schedule *s = t->scene.s;
    const struct moe_op *op = original(t);
    if (op->kernel != MOE_K_COPY || op->n_writes != 1) return false;
    for (int i = 0; i < s->n_params; i++) {
        int slot = moe_slot(s, op->writes[0], 0);
        if (s->params[i].buffer != op->writes[0].buffer) continue;
        int64_t n = known(t, s->buffers[op->writes[0].buffer].extent);
        return parity_update_of(s, t->m.rank, i, slot, n).n == n;
    }
    return false;
}

/* Is it about what the changed operation was to write or read, and now does? */
static bool is_of_buffer(const struct trial *t, const struct moe_verdict *v)
{
    enum mutation_field f = t->m.field;
    bool buffer = f == READ_BUFFER || f == WRITE_BUFFER;
    return buffer && !strstr(v->text, "another stream") &&
           (strstr(v->text, t->s->buffers[t->m.before].name) ||
            strstr(v->text, t->s->buffers[t->m.after].name));
}

/* One norm is for all: where one operation clips to another, that is told of the others. */
static bool is_of_limit(const struct trial *t, const struct moe_verdict *v)
{
    return t->m.field == FACTOR && v->check_class == 5 && strstr(v->text, "clips to a norm of");
}

/* Where every token has every expert, nothing depends on the choice; of one expert, nor on the router. */
static bool is_chosen(const struct trial *t, const struct moe_verdict *v)
{
    const struct moe_scenario *sc = t->scene.sc;
    const char *op = t->m.op->name;
    bool loss = strstr(op, "aux") || strstr(op, "counts"),
         router = strstr(op, "prob") || strstr(op, "topk") || strstr(op, "router");
    if (sc->experts != sc->top_k || !(loss || (router && sc->experts == 1))) return false;
    if (is_here(t, v) || is_reverse(t, v)) return true;
    if (loss && v->check_class == 7 && strstr(v->op, "aux")) return true;
    return sc->experts == 1 && (is_of_buffer(t, v) || is_of_limit(t, v) || is_of_norm(t, v) ||
                                (v->check_class >= 3 && v->check_class <= 5 && is_about(v, "router")));
}

/* follows: check says nothing of what an operation with a C14 writes, so the host does not know it later. */
enum rule explain_verdict(const struct trial *t, const struct moe_verdict *v)
{
    enum mutation_field f = t->m.field;
    const char *op = t->m.op->name;
    bool here = is_here(t, v), shape = (v->check_class == 14 && here) || is_reverse(t, v),
         follows = v->check_class == 2 && is_of_rank(t, v) && strstr(v->text, "the host does not know");
    if (v->check_class == 6 && order_is_open(t->s, v->ranks[0], v->op)) return RULE_RACE;
    if (t->o[1].end == END_REFUSED && v->check_class == 1) return RULE_MIXED;
    if ((f == TRANS_A || f == TRANS_B) && shape && is_vector(t)) return RULE_VECTOR;
    if (!strncmp(op, "clip_", 5) && clips_nothing(t) &&
        (here || is_of_limit(t, v) || (v->check_class == 5 && strstr(v->op, op + 5))))
        return RULE_CLIP;
    if (works_on_nothing(t) && (here || is_of_param(t, v))) return RULE_NOTHING;
    if (t->m.op->needs && strstr(v->text, t->m.op->needs) && here) return RULE_NEEDS;
    if (is_chosen(t, v)) return RULE_CHOSEN;
    if (f == DIM && (shape || follows)) return RULE_SIZES;
    if (f == LENGTH && (shape || is_of_param(t, v) || is_of_norm(t, v))) return RULE_SIZES;
    if (divides_by_one(t) && (here || is_of_param(t, v))) return RULE_ONE;
    if (here && copies_own(t)) return RULE_OWN;
    if (f == READ_BUFFER && t->m.place == 2 && !strcmp(op, "limit") && (shape || follows)) return RULE_COUNTS;
    if (f == TYPE && (shape || follows)) return RULE_TYPE;
    if (!t->scene.s->tokens[t->m.rank] &&
        ((is_of_rank(t, v) && (here || is_reverse(t, v) || is_of_buffer(t, v))) || is_contribution(t, v)))
        return RULE_EMPTY;
    return RULE_NONE;
}

enum rule explain_alarm(const struct trial *t)
{
    struct moe_verdicts v;
    enum rule rule = RULE_NONE;
    bool all = true;
    moe_check(t->s, t->r, &v);
    for (int i = 0; i < v.n && all; i++) {
        if (v.item[i].severity != MOE_SEVERITY_ERROR) continue;
        enum rule here = explain_verdict(t, &v.item[i]);
        if (rule == RULE_NONE) rule = here;
        all = here != RULE_NONE;
    }
    moe_verdicts_free(&v);
    return all ? rule : RULE_NONE;
}

enum rule explain_miss(const struct trial *t)
{
    bool setting = t->m.field == FACTOR || t->m.field == DECAY;
    return setting && (t->kind == ALIKE || t->scene.s->n_ranks == moe_n_stages(t->scene.s)) ? RULE_SETTING
                                                                                            : RULE_NONE;
}

/* A random operation of a rank, in its first instance. */
static void draw_label(const struct trial *t, struct draws *d, int rank, char out[2 * MOE_NAME])
{
    const struct moe_role *role = &t->s->roles[t->s->role_of[rank]];
    const struct moe_instance *in;
    do in = &role->itinerary[draw(d, role->n_instances)];
    while (!role->blocks[in->block].n_ops);
    const struct moe_block *block = &role->blocks[in->block];
    moe_op_label(block, &block->ops[draw(d, block->n_ops)], in->layer, out);
}

/* Not where they would be true, or about what the change cannot touch. */
int explain_planted(const struct trial *t, int *n)
{
    struct draws d = {.seed = moe_hash64((uint64_t)t->number)};
    int excused = 0;
    for (int i = 0; i < moe_check_n_classes; i++) {
        int rank = draw(&d, t->s->n_ranks);
        static char text[] = "reads what another stream may still be writing";
        struct moe_verdict v = {
            .check_class = moe_check_classes[i].number, .n_ranks = 1, .ranks = &rank, .text = text};
        do draw_label(t, &d, rank, v.op);
        while (is_here(t, &v) || (t->scene.sc->experts == 1 && is_about(&v, "router")) ||
               (v.check_class == 6 && order_is_open(t->s, rank, v.op)));
        ++*n;
        excused += explain_verdict(t, &v) != RULE_NONE;
    }
    return excused;
}
