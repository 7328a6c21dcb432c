/* gradient.c - see gradient.h. */
#include "sim/gradient.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* key: rank, block and operation that contributed, so that entries sort by rank. */
struct entry {
    uint64_t key;
    double coefficient;
};
struct vector {
    int n;
    struct entry *entry; /* ascending keys */
};
struct state {
    int vector;                  /* -1: nothing yet */
    double coefficient, divisor; /* divisor, op: the last division */
    const struct moe_op *op;
    int clips;
};
struct moe_gradients {
    const struct moe_schedule *s;
    int n_vectors, cap_vectors;
    struct vector *vectors;
    int *first;          /* [n_buffers] place of a buffer's slot 0 in state */
    struct state *state; /* [slots of gradient buffers, R] */
    /* The last question that was answered "right": all ranks of a group ask the same. */
    int right_vector, right_group, right_param;
    double right_coefficient;
};

static bool is_followed(const struct moe_schedule *s, int buffer)
{
    return s->buffers[buffer].role == MOE_BUF_GRAD || s->buffers[buffer].role == MOE_BUF_NORM;
}

struct moe_gradients *moe_gradients_new(const struct moe_schedule *s)
{
    struct moe_gradients *g = moe_alloc(1, sizeof *g);
    g->s = s;
    g->right_vector = -1;
    g->first = moe_alloc((size_t)s->n_buffers, sizeof *g->first);
    int slots = 0;
    for (int i = 0; i < s->n_buffers; i++) {
        g->first[i] = slots;
        if (is_followed(s, i)) slots += s->buffers[i].slots;
    }
    size_t n = (size_t)slots * (size_t)s->n_ranks;
    g->state = moe_alloc(n, sizeof *g->state);
    for (size_t i = 0; i < n; i++) g->state[i].vector = -1;
    return g;
}

void moe_gradients_free(struct moe_gradients *g)
{
    if (!g) return;
    for (int i = 0; i < g->n_vectors; i++) free(g->vectors[i].entry);
    free(g->vectors);
    free(g->first);
    free(g->state);
    free(g);
}

static struct state *at(struct moe_gradients *g, int buffer, int slot, int rank)
{
    moe_assert(is_followed(g->s, buffer));
    return &g->state[(size_t)(g->first[buffer] + slot) * (size_t)g->s->n_ranks + (size_t)rank];
}

static int by_key(const void *a, const void *b)
{
    uint64_t x = ((const struct entry *)a)->key, y = ((const struct entry *)b)->key;
    return (x > y) - (x < y);
}

/* Sorts entries and adds those of one key; returns how many are left. */
static int merge(struct entry *entry, int n)
{
    int kept = 0;
    if (n) qsort(entry, (size_t)n, sizeof *entry, by_key);
    for (int i = 0; i < n; i++) {
        if (kept && entry[kept - 1].key == entry[i].key)
            entry[kept - 1].coefficient += entry[i].coefficient;
        else
            entry[kept++] = entry[i];
    }
    return kept;
}

static int new_vector(struct moe_gradients *g, struct entry *entry, int n)
{
    g->vectors = moe_grow(g->vectors, &g->cap_vectors, g->n_vectors + 1, sizeof *g->vectors);
    g->vectors[g->n_vectors] = (struct vector){merge(entry, n), entry};
    return g->n_vectors++;
}

static int entries(const struct moe_gradients *g, struct state s)
{
    return s.vector < 0 ? 0 : g->vectors[s.vector].n;
}

static int append(const struct moe_gradients *g, struct state s, struct entry *out)
{
    for (int i = 0; i < entries(g, s); i++) {
        out[i] = g->vectors[s.vector].entry[i];
        out[i].coefficient *= s.coefficient;
    }
    return entries(g, s);
}

static uint64_t key_of(int rank, int block, int id)
{
    return (uint64_t)rank << 32 | (uint64_t)block << 16 | (uint64_t)id;
}

void moe_gradient_contribute(struct moe_gradients *g, int buffer, int slot, int rank, int block,
                             const struct moe_op *op, bool accumulate)
{
    struct state *s = at(g, buffer, slot, rank);
    int n = accumulate ? entries(g, *s) : 0;
    struct entry *entry = moe_alloc((size_t)n + 1, sizeof *entry);
    if (accumulate) append(g, *s, entry);
    entry[n] = (struct entry){key_of(rank, block, op->id), 1};
    *s = (struct state){.vector = new_vector(g, entry, n + 1), .coefficient = 1};
}

void moe_gradient_sum(struct moe_gradients *g, int buffer, int slot, const int *ranks, int n)
{
    int total = 0;
    for (int i = 0; i < n; i++) total += entries(g, *at(g, buffer, slot, ranks[i]));
    struct entry *entry = moe_alloc((size_t)total, sizeof *entry);
    for (int i = 0, used = 0; i < n; i++) used += append(g, *at(g, buffer, slot, ranks[i]), entry + used);
    int vector = new_vector(g, entry, total);
    for (int i = 0; i < n; i++)
        *at(g, buffer, slot, ranks[i]) = (struct state){.vector = vector, .coefficient = 1};
}

void moe_gradient_divide(struct moe_gradients *g, int buffer, int slot, int rank, double divisor,
                         const struct moe_op *op)
{
    struct state *s = at(g, buffer, slot, rank);
    s->coefficient /= divisor;
    s->divisor = divisor;
    s->op = op;
}

void moe_gradient_clip(struct moe_gradients *g, int buffer, int slot, int rank)
{
    at(g, buffer, slot, rank)->clips++;
}

void moe_gradient_zero(struct moe_gradients *g, int buffer, int slot, int rank)
{
    *at(g, buffer, slot, rank) = (struct state){.vector = -1};
}

/* Does the operation add something of its own to the gradient or norm? */
static bool contributes(const struct moe_op *op, const struct moe_param *p)
{
    if (op->kind != MOE_KERNEL || (op->kernel != MOE_K_SQNORM && !op->serves)) return false;
    for (int w = 0; w < op->n_writes; w++)
        if (op->writes[w].buffer == p->grad) return true;
    return false;
}

/* What a slot of parameter p requires: for each member of the group, an entry for each operation of its role
 * that contributes, as often as its instances write the slot. Unordered. */
static struct entry *required(const struct moe_gradients *g, const struct moe_param *p, int slot, int group,
                              double divisor, int *n)
{
    const struct moe_schedule *s = g->s;
    const struct moe_comm *c = &s->comms[p->replicas];
    int slots = s->buffers[p->grad].slots, cap = 0;
    struct entry *entry = NULL;
    *n = 0;
    for (int i = c->first[group]; i < c->first[group + 1]; i++) {
        const struct moe_role *role = &s->roles[s->role_of[c->members[i]]];
        for (int k = 0; k < role->n_instances; k++) {
            int b = role->itinerary[k].block;
            if (slots > 1 && role->itinerary[k].layer != slot) continue;
            for (int o = 0; o < role->blocks[b].n_ops; o++) {
                const struct moe_op *op = &role->blocks[b].ops[o];
                if (!contributes(op, p)) continue;
                entry = moe_grow(entry, &cap, *n + 1, sizeof *entry);
                entry[(*n)++] = (struct entry){key_of(c->members[i], b, op->id), 1 / divisor};
            }
        }
    }
    return entry;
}

static void compare(struct moe_gradient_fault *fault, const struct entry *want, int n_want,
                    struct vector have, double coefficient)
{
    int w = 0, h = 0;
    while (w < n_want || h < have.n) {
        if (h == have.n || (w < n_want && want[w].key < have.entry[h].key)) {
            fault->missing++;
            fault->missing_rank = (int)(want[w++].key >> 32);
        } else if (w == n_want || have.entry[h].key < want[w].key) {
            fault->extra++;
            fault->extra_rank = (int)(have.entry[h++].key >> 32);
        } else {
            double factor = have.entry[h++].coefficient * coefficient / want[w++].coefficient;
            if (fabs(factor - 1) > 1e-9) fault->factor = factor; /* doubles hold the few factors to 1e-15 */
        }
    }
}

struct moe_gradient_fault moe_gradient_judge(struct moe_gradients *g, const struct moe_param *p, int slot,
                                             int rank, double divisor)
{
    struct state s = *at(g, p->grad, slot, rank);
    struct moe_gradient_fault fault = {.divisor = s.divisor, .divided_in = s.op};
    int group = g->s->comms[p->replicas].group_of[rank], param = (int)(p - g->s->params);
    if (s.vector >= 0 && s.vector == g->right_vector && group == g->right_group && param == g->right_param &&
        s.coefficient == g->right_coefficient && s.clips == p->clips)
        return fault;
    int n;
    struct entry *want = required(g, p, slot, group, divisor, &n);
    n = merge(want, n);
    fault.clips = s.clips - p->clips;
    compare(&fault, want, n, s.vector < 0 ? (struct vector){0} : g->vectors[s.vector], s.coefficient);
    free(want);
    if (!fault.missing && !fault.extra && fault.factor == 0) {
        g->right_vector = s.vector;
        g->right_group = group;
        g->right_param = param;
        g->right_coefficient = s.coefficient;
    }
    return fault;
}
