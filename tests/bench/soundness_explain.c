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

/* follows: check says nothing of what an operation with a C14 writes, so the host does not know it later. */
enum rule explain_verdict(const struct trial *t, const struct moe_verdict *v)
{
    const char *op = t->m.op->name;
    bool here = is_here(t, v), shape = (v->check_class == 14 && here) || is_reverse(t, v),
         follows = v->check_class == 2 && is_of_rank(t, v) && strstr(v->text, "the host does not know");
    if (t->o[1].end == END_REFUSED && v->check_class == 1 && here) return RULE_MIXED;
    if (t->m.op->needs && strstr(v->text, t->m.op->needs) && here) return RULE_NEEDS;
    if (shape && copies_own(t)) return RULE_OWN;
    if (t->m.field == READ_BUFFER && t->m.place == 2 && !strcmp(op, "limit") && (shape || follows))
        return RULE_COUNTS;
    if (t->same && shape) return RULE_SAME;
    if (t->m.field == MODE && v->check_class == 8 && here && !strcmp(t->scene.sc->capacity.rule, "dropless"))
        return RULE_ORDER;
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

/* Of a part of a bucket: one rank alone updates it. */
enum rule explain_miss(const struct trial *t)
{
    const enum mutation_field f = t->m.field;
    const bool alone = t->kind == ALIKE || t->scene.s->n_ranks == moe_n_stages(t->scene.s) ||
                       (t->m.op->n_writes && t->m.op->writes[0].n);
    return alone && (f == DECAY || f == DRAW_SEED || f == MODE) ? RULE_SETTING : RULE_NONE;
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

/* Not where they would be true: about other operations; and about the changed one, of classes that are no
 * rule's. */
int explain_planted(const struct trial *t, int *n)
{
    struct draws d = {.seed = moe_hash64((uint64_t)t->number)};
    int excused = 0;
    for (int i = 0; i < 2 * moe_check_n_classes; i++) {
        const bool elsewhere = i < moe_check_n_classes;
        int rank = elsewhere ? draw(&d, t->s->n_ranks) : t->m.rank;
        static char text[] = "reads what another stream may still be writing";
        struct moe_verdict v = {.check_class = moe_check_classes[i % moe_check_n_classes].number,
                                .n_ranks = 1,
                                .ranks = &rank,
                                .text = text};
        if (!elsewhere && (v.check_class == 1 || v.check_class == 8 || v.check_class == 14)) continue;
        if (elsewhere) do
                draw_label(t, &d, rank, v.op);
            while (is_here(t, &v));
        else
            snprintf(v.op, sizeof v.op, "%s", t->m.op->name);
        ++*n;
        excused += explain_verdict(t, &v) != RULE_NONE;
    }
    return excused;
}
