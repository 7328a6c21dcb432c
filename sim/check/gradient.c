/* gradient.c - see gradient.h. */
#include "sim/check/gradient.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* key: rank, block and operation that contributed, so that entries sort by rank. */
struct entry {
    uint64_t key;
    double coefficient;
};
struct question { /* what a judgement depends on beside the vector */
    int param, slot, group;
    double coefficient;
};
struct vector {
    int n;
    struct entry *entry;   /* ascending keys */
    struct question asked; /* last; all ranks that share the vector ask the same */
    struct moe_gradient_fault answer;
};
struct state {
    int vector;                  /* 0: the empty sum */
    double coefficient, divisor; /* divisor, op: the last division */
    const struct moe_op *op;
    int clips;
};
struct written { /* by an operation of its own into a gradient or norm; again for each instance that does */
    int place;   /* of the slot, as `first` counts */
    int block, id;
};
struct all_written { /* by a role */
    int n;
    struct written *by; /* ascending place, block, id; NULL: nothing */
    int *first;         /* [n_places + 1] into by; NULL: not asked for yet */
};
struct moe_gradients {
    const struct moe_schedule *s;
    int n_places;
    struct all_written *written; /* [n_roles] */
    int n_vectors, cap_vectors;
    struct vector *vectors;
    int *first;          /* [n_buffers] place of a buffer's slot 0 in state */
    struct state *state; /* [slots of gradient buffers, R] */
};

static bool is_followed(const struct moe_schedule *s, int buffer)
{
    return s->buffers[buffer].role == MOE_BUF_GRAD || s->buffers[buffer].role == MOE_BUF_NORM;
}

static int by_key(const void *a, const void *b)
{
    uint64_t x = ((const struct entry *)a)->key, y = ((const struct entry *)b)->key;
    return (x > y) - (x < y);
}

/* Most come in order. */
static bool is_sorted(const struct entry *entry, int n)
{
    for (int i = 1; i < n; i++)
        if (entry[i - 1].key > entry[i].key) return false;
    return true;
}

/* Sorts entries and adds those of one key; returns how many are left. */
static int merge(struct entry *entry, int n)
{
    int kept = 0;
    if (!is_sorted(entry, n)) qsort(entry, (size_t)n, sizeof *entry, by_key);
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
    g->vectors[g->n_vectors] = (struct vector){.n = merge(entry, n), .entry = entry, .asked.param = -1};
    return g->n_vectors++;
}

static int append(const struct moe_gradients *g, struct state s, struct entry *out)
{
    const struct vector *v = &g->vectors[s.vector];
    for (int i = 0; i < v->n; i++)
        out[i] = (struct entry){v->entry[i].key, v->entry[i].coefficient * s.coefficient};
    return v->n;
}

struct moe_gradients *moe_gradients_new(const struct moe_schedule *s)
{
    struct moe_gradients *g = moe_alloc(1, sizeof *g);
    g->s = s;
    g->first = moe_alloc((size_t)s->n_buffers, sizeof *g->first);
    for (int i = 0; i < s->n_buffers; i++) {
        g->first[i] = g->n_places;
        if (is_followed(s, i)) g->n_places += s->buffers[i].slots;
    }
    g->state = moe_alloc((size_t)g->n_places * (size_t)s->n_ranks, sizeof *g->state);
    g->written = moe_alloc((size_t)s->n_roles, sizeof *g->written);
    new_vector(g, NULL, 0);
    return g;
}

void moe_gradients_free(struct moe_gradients *g)
{
    if (!g) return;
    for (int i = 0; i < g->n_vectors; i++) free(g->vectors[i].entry);
    for (int i = 0; i < g->s->n_roles; i++) {
        free(g->written[i].by);
        free(g->written[i].first);
    }
    free(g->written);
    free(g->vectors);
    free(g->first);
    free(g->state);
    free(g);
}

static struct state *at(struct moe_gradients *g, struct moe_cell cell)
{
    moe_assert(is_followed(g->s, cell.buffer));
    return &g->state[(size_t)(g->first[cell.buffer] + cell.slot) * (size_t)g->s->n_ranks + (size_t)cell.rank];
}

/* Other buffers hold no contributions. */
static struct state state_of(struct moe_gradients *g, struct moe_cell cell)
{
    return is_followed(g->s, cell.buffer) ? *at(g, cell) : (struct state){0};
}

static void set_state(struct moe_gradients *g, struct moe_cell cell, struct state with)
{
    if (is_followed(g->s, cell.buffer)) *at(g, cell) = with;
}

static uint64_t key_of(int rank, int block, int id)
{
    return (uint64_t)rank << 32 | (uint64_t)block << 16 | (uint64_t)id;
}
static int rank_of(uint64_t key)
{
    return (int)(key >> 32);
}

void moe_gradient_contribute(struct moe_gradients *g, struct moe_cell to, int block, const struct moe_op *op,
                             bool accumulate)
{
    struct state s = accumulate ? state_of(g, to) : (struct state){0};
    struct entry *entry = moe_alloc((size_t)g->vectors[s.vector].n + 1, sizeof *entry);
    int n = append(g, s, entry);
    entry[n] = (struct entry){key_of(to.rank, block, op->id), 1};
    set_state(g, to, (struct state){.vector = new_vector(g, entry, n + 1), .coefficient = 1});
}

void moe_gradient_sum(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to, int n)
{
    int total = 0;
    for (int i = 0; i < n; i++) total += g->vectors[state_of(g, from[i]).vector].n;
    struct entry *entry = moe_alloc((size_t)total, sizeof *entry);
    for (int i = 0, used = 0; i < n; i++) used += append(g, state_of(g, from[i]), entry + used);
    struct state sum = {.vector = new_vector(g, entry, total), .coefficient = 1};
    for (int i = 0; i < n; i++) set_state(g, to[i], sum);
}

void moe_gradient_divide(struct moe_gradients *g, struct moe_cell from, struct moe_cell to, double divisor,
                         const struct moe_op *op)
{
    struct state s = state_of(g, from);
    s.coefficient /= divisor;
    s.divisor = divisor;
    s.op = op;
    set_state(g, to, s);
}

void moe_gradient_clip(struct moe_gradients *g, struct moe_cell from, struct moe_cell to)
{
    struct state s = state_of(g, from);
    s.clips++;
    set_state(g, to, s);
}

void moe_gradient_zero(struct moe_gradients *g, struct moe_cell to)
{
    set_state(g, to, (struct state){0});
}

static int by_place(const void *a, const void *b)
{
    const struct written *x = a, *y = b;
    if (x->place != y->place) return x->place < y->place ? -1 : 1;
    if (x->block != y->block) return x->block < y->block ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Adds each slot that an operation adds something of its own to. */
static void add_written(const struct moe_gradients *g, struct all_written *all, int *cap,
                        const struct moe_op *op, struct moe_instance at)
{
    if (op->kind != MOE_KERNEL || (op->kernel != MOE_K_SQNORM && !op->serves)) return;
    int before = all->n;
    for (int w = 0; w < op->n_writes; w++) {
        struct moe_ref ref = op->writes[w];
        if (!is_followed(g->s, ref.buffer)) continue;
        int place = g->first[ref.buffer] + moe_slot(g->s, ref, at.layer), same = before;
        while (same < all->n && all->by[same].place != place) same++;
        if (same < all->n) continue; /* one contribution, however often it is written */
        all->by = moe_grow(all->by, cap, all->n + 1, sizeof *all->by);
        all->by[all->n++] = (struct written){place, at.block, op->id};
    }
}

static const struct all_written *written_by(struct moe_gradients *g, int role)
{
    const struct moe_role *y = &g->s->roles[role];
    struct all_written *all = &g->written[role];
    if (all->first) return all;
    int cap = 0;
    for (int k = 0; k < y->n_instances; k++) {
        const struct moe_block *block = &y->blocks[y->itinerary[k].block];
        for (int o = 0; o < block->n_ops; o++) add_written(g, all, &cap, &block->ops[o], y->itinerary[k]);
    }
    if (all->n) qsort(all->by, (size_t)all->n, sizeof *all->by, by_place);
    all->first = moe_alloc((size_t)g->n_places + 1, sizeof *all->first);
    for (int i = 0; i < all->n; i++) all->first[all->by[i].place + 1]++;
    for (int i = 0; i < g->n_places; i++) all->first[i + 1] += all->first[i];
    return all;
}

/* What a slot of parameter p requires: for each member of the group, an entry for each operation of its role
 * that contributes, as often as its instances write the slot. Unordered. */
static struct entry *required(struct moe_gradients *g, struct moe_env env, const struct moe_param *p,
                              int slot, int group, int *n)
{
    const struct moe_schedule *s = g->s;
    const struct moe_comm *c = &s->comms[p->replicas];
    int cap = 0, place = g->first[p->grad] + slot;
    struct entry *entry = NULL;
    *n = 0;
    for (int i = c->first[group]; i < c->first[group + 1]; i++) {
        const struct all_written *all = written_by(g, s->role_of[c->members[i]]);
        double divisor = (double)moe_eval(s, env, p->divisor, c->members[i], 0, 0);
        for (int k = all->first[place]; k < all->first[place + 1]; k++) {
            entry = moe_grow(entry, &cap, *n + 1, sizeof *entry);
            entry[(*n)++] =
                (struct entry){key_of(c->members[i], all->by[k].block, all->by[k].id), 1 / divisor};
        }
    }
    return entry;
}

/* Is the coefficient the required one? Where no rank has a token, the divisor is 0 and both are infinite. */
static bool is_right(double have, double want)
{
    return have == want || fabs(have / want - 1) <= 1e-9; /* doubles hold the few factors to 1e-15 */
}

static struct moe_gradient_fault compare(const struct entry *want, int n_want, const struct vector *have,
                                         double coefficient)
{
    struct moe_gradient_fault fault = {.factor = 1};
    int w = 0, h = 0, n_both = 0;
    double last = 1;
    while (w < n_want || h < have->n) {
        if (h == have->n || (w < n_want && want[w].key < have->entry[h].key)) {
            fault.missing++;
            fault.missing_rank = rank_of(want[w++].key);
        } else if (w == n_want || have->entry[h].key < want[w].key) {
            fault.extra++;
            fault.extra_rank = rank_of(have->entry[h++].key);
        } else {
            double found = have->entry[h++].coefficient * coefficient, required = want[w++].coefficient;
            double factor = is_right(found, required) ? 1 : found / required;
            if (n_both++ && !is_right(factor, last)) fault.uneven = true;
            last = factor;
            if (factor != 1) fault.factor = factor, fault.factor_rank = rank_of(want[w - 1].key);
        }
    }
    return fault;
}

struct moe_gradient_fault moe_gradient_judge(struct moe_gradients *g, struct moe_env env,
                                             const struct moe_param *p, int slot, int rank)
{
    struct state s = *at(g, (struct moe_cell){p->grad, slot, rank});
    struct vector *v = &g->vectors[s.vector];
    struct question q = {(int)(p - g->s->params), slot, g->s->comms[p->replicas].group_of[rank],
                         s.coefficient};
    if (q.param != v->asked.param || q.slot != v->asked.slot || q.group != v->asked.group ||
        q.coefficient != v->asked.coefficient) {
        int n;
        struct entry *want = required(g, env, p, slot, q.group, &n);
        v->answer = compare(want, merge(want, n), v, s.coefficient);
        v->asked = q;
        free(want);
    }
    struct moe_gradient_fault fault = v->answer;
    fault.divisor = s.divisor;
    fault.divided_in = s.op;
    fault.clips = s.clips;
    return fault;
}
