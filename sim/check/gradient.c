/* gradient.c - see gradient.h. */
#include "sim/check/gradient.h"

#include "sim/check/pieces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* key: rank, block and operation that contributed, so that entries sort by rank; tag: to which element, as of
 * moe_content. */
struct entry {
    uint64_t key, tag;
    double coefficient;
};
struct question { /* what a judgement depends on beside the vector */
    int param, slot, group;
    uint64_t tag;
    double coefficient;
};
struct vector {
    int n, cap;
    bool alone;          /* one contribution to a cell after the other made it, and no other cell has it */
    struct entry *entry; /* ascending keys */
    const struct moe_op *summed_in, *doubled_in; /* as of moe_gradient_fault */
    const struct moe_op *divided_in;             /* before the sum, and by which */
    double divisor;
    struct question asked; /* last; all ranks that share the vector ask the same */
    struct moe_gradient_fault answer;
};
struct written { /* by an operation of its own into a gradient or norm; again for each instance that does */
    int place;   /* of the slot, as `first` counts */
    int block, id;
    const struct moe_op *op;
    int layer; /* of the instance */
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
    int *first;                /* [n_buffers] place of a buffer's slot 0 in pieces */
    struct moe_pieces *pieces; /* [slots of followed buffers, R] */
    struct moe_pieces list;    /* being made */
    bool params;               /* something was put into a parameter */
};

static bool is_followed(const struct moe_schedule *s, int buffer)
{
    enum moe_buffer_role role = s->buffers[buffer].role;
    return role == MOE_BUF_GRAD || role == MOE_BUF_NORM || role == MOE_BUF_PARAM;
}

static int by_key(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return (x->tag > y->tag) - (x->tag < y->tag);
}

/* Most come in order. */
static bool is_sorted(const struct entry *entry, int n)
{
    for (int i = 1; i < n; i++)
        if (by_key(&entry[i - 1], &entry[i]) > 0) return false;
    return true;
}

/* Sorts entries and adds those of one key and tag; returns how many are left. */
static int merge(struct entry *entry, int n)
{
    int kept = 0;
    if (!is_sorted(entry, n)) qsort(entry, (size_t)n, sizeof *entry, by_key);
    for (int i = 0; i < n; i++) {
        if (kept && by_key(&entry[kept - 1], &entry[i]) == 0)
            entry[kept - 1].coefficient += entry[i].coefficient;
        else
            entry[kept++] = entry[i];
    }
    return kept;
}

static int new_vector(struct moe_gradients *g, struct entry *entry, int n)
{
    g->vectors = moe_grow(g->vectors, &g->cap_vectors, g->n_vectors + 1, sizeof *g->vectors);
    g->vectors[g->n_vectors] =
        (struct vector){.n = merge(entry, n), .cap = n, .entry = entry, .asked.param = -1};
    return g->n_vectors++;
}

static int append(const struct moe_gradients *g, struct moe_content c, struct entry *out)
{
    const struct vector *v = &g->vectors[c.vector];
    for (int i = 0; i < v->n; i++)
        out[i] =
            (struct entry){v->entry[i].key, v->entry[i].tag + c.tag, v->entry[i].coefficient * c.coefficient};
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
    g->pieces = moe_alloc((size_t)g->n_places * (size_t)s->n_ranks, sizeof *g->pieces);
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
    for (size_t i = 0; i < (size_t)g->n_places * (size_t)g->s->n_ranks; i++) moe_pieces_free(&g->pieces[i]);
    moe_pieces_free(&g->list);
    free(g->written);
    free(g->vectors);
    free(g->first);
    free(g->pieces);
    free(g);
}

static struct moe_pieces *pieces_of(const struct moe_gradients *g, struct moe_cell cell)
{
    return &g->pieces[(size_t)(g->first[cell.buffer] + cell.slot) * (size_t)g->s->n_ranks +
                      (size_t)cell.rank];
}

static uint64_t tag_of(const struct moe_gradients *g, int buffer, int slot)
{
    return (uint64_t)(g->first[buffer] + slot) << MOE_TAG_BITS;
}

/* What lies at an element of a cell and those behind it, up to *end, which may come nearer. Elements and tags
 * count from the cell's begin. Where nothing was put, a parameter is as the step found it. */
static struct moe_content content_at(const struct moe_gradients *g, struct moe_cell cell, int64_t element,
                                     int64_t *end)
{
    struct moe_content out = {0};
    if (!is_followed(g->s, cell.buffer)) return out;
    const struct moe_pieces *p = pieces_of(g, cell);
    int i = moe_pieces_find(p, cell.begin + element);
    int64_t until = INT64_MAX;
    if (g->s->buffers[cell.buffer].role == MOE_BUF_PARAM)
        out = (struct moe_content){.is_value = true, .tag = tag_of(g, cell.buffer, cell.slot)};
    if (i < p->n && p->piece[i].begin <= cell.begin + element) {
        until = p->piece[i].end;
        out = p->piece[i].content;
    } else if (i < p->n) {
        until = p->piece[i].begin;
    }
    if (until - cell.begin < *end) *end = until - cell.begin;
    out.tag += (uint64_t)cell.begin;
    return out;
}

/* Starts the list anew with what a cell holds, as much as the other takes. */
static void list_cell(struct moe_gradients *g, struct moe_cell from, struct moe_cell *to)
{
    g->list.n = 0;
    if (from.n > to->n) from.n = to->n;
    to->n = from.n;
    for (int64_t at = 0, end; at < from.n; at = end) {
        end = from.n;
        struct moe_content c = content_at(g, from, at, &end);
        g->vectors[c.vector].alone = false;
        moe_pieces_add(&g->list, at, end, c);
    }
}

static void put_list(struct moe_gradients *g, struct moe_cell to)
{
    if (!is_followed(g->s, to.buffer)) return;
    g->params |= g->s->buffers[to.buffer].role == MOE_BUF_PARAM;
    moe_pieces_put(pieces_of(g, to), to.begin, to.begin + to.n, &g->list);
}

static uint64_t key_of(int rank, int block, int id)
{
    return (uint64_t)rank << 32 | (uint64_t)block << 16 | (uint64_t)id;
}
static int rank_of(uint64_t key)
{
    return (int)(key >> 32);
}
static int place_of(uint64_t tag)
{
    return (int)((tag + ((uint64_t)1 << (MOE_TAG_BITS - 1))) >> MOE_TAG_BITS);
}

/* The vector of all that a cell holds, where no other cell has it: a norm gets one contribution after the
 * other, which need not be copied each time. */
static struct vector *own_vector(const struct moe_gradients *g, struct moe_cell of)
{
    const struct moe_pieces *p = pieces_of(g, of);
    if (p->n != 1 || p->piece->begin != of.begin || p->piece->end - of.begin != of.n) return NULL;
    struct vector *v = &g->vectors[p->piece->content.vector];
    return v->alone ? v : NULL;
}

static void add_entry(struct vector *v, struct entry own)
{
    v->entry = moe_grow(v->entry, &v->cap, v->n + 1, sizeof own);
    v->entry[v->n++] = own;
    if (by_key(&v->entry[v->n - 2], &own) >= 0) v->n = merge(v->entry, v->n); /* most come in order */
    v->asked.param = -1;
}

void moe_gradient_contribute(struct moe_gradients *g, struct moe_cell to, int block, const struct moe_op *op,
                             bool accumulate)
{
    struct entry own = {key_of(to.rank, block, op->id), tag_of(g, to.buffer, to.slot) + (uint64_t)to.begin,
                        1};
    struct vector *v = accumulate ? own_vector(g, to) : NULL;
    if (v) {
        add_entry(v, own);
        return;
    }
    g->list.n = 0;
    for (int64_t at = 0, end; at < to.n; at = end) {
        end = to.n;
        struct moe_content c = {0};
        if (accumulate) c = content_at(g, to, at, &end);
        struct entry *entry = moe_alloc((size_t)g->vectors[c.vector].n + 1, sizeof *entry);
        int n = append(g, c, entry);
        entry[n] = own;
        moe_pieces_add(&g->list, at, end,
                       (struct moe_content){.vector = new_vector(g, entry, n + 1), .coefficient = 1});
        g->vectors[g->n_vectors - 1].alone = true;
    }
    put_list(g, to);
}

/* The vector that `op` makes of those of n contents. */
static int sum_of(struct moe_gradients *g, const struct moe_content *c, int n, const struct moe_op *op)
{
    struct vector like = {0};
    int total = 0, used = 0;
    for (int i = 0; i < n; i++) {
        const struct vector *v = &g->vectors[c[i].vector];
        total += v->n;
        if (!like.doubled_in) like.doubled_in = v->doubled_in;
        if (like.divided_in) continue;
        like.divided_in = c[i].op ? c[i].op : v->divided_in;
        like.divisor = c[i].op ? c[i].divisor : v->divisor;
    }
    struct entry *entry = moe_alloc((size_t)total, sizeof *entry);
    for (int i = 0; i < n; i++) used += append(g, c[i], entry + used);
    int vector = new_vector(g, entry, total);
    struct vector *out = &g->vectors[vector];
    out->summed_in = op;
    out->doubled_in = out->n < total ? op : like.doubled_in;
    out->divided_in = like.divided_in;
    out->divisor = like.divisor;
    return vector;
}

/* Sets out to the sum of elements 0..end-1 of all cells. */
static void list_sum(struct moe_gradients *g, const struct moe_cell *from, int n, int64_t end,
                     const struct moe_op *op, struct moe_pieces *out)
{
    struct moe_content *c = moe_alloc((size_t)n, sizeof *c);
    out->n = 0;
    for (int64_t at = 0, until; at < end; at = until) {
        until = end;
        for (int i = 0; i < n; i++) c[i] = content_at(g, from[i], at, &until);
        moe_pieces_add(out, at, until, (struct moe_content){.vector = sum_of(g, c, n, op), .coefficient = 1});
    }
    free(c);
}

/* Starts the list anew with elements begin..end-1 of a sum. */
static void list_part(struct moe_gradients *g, const struct moe_pieces *sum, int64_t begin, int64_t end)
{
    g->list.n = 0;
    for (int k = moe_pieces_find(sum, begin); k < sum->n && sum->piece[k].begin < end; k++) {
        struct moe_piece p = sum->piece[k];
        p.content.tag += (uint64_t)begin;
        moe_pieces_add(&g->list, (p.begin > begin ? p.begin : begin) - begin,
                       (p.end < end ? p.end : end) - begin, p.content);
    }
}

void moe_gradient_sum(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to, int n,
                      const int64_t *part, const struct moe_op *op)
{
    if (!part) {
        list_sum(g, from, n, from[0].n, op, &g->list);
        for (int i = 0; i < n; i++) put_list(g, to[i]);
        return;
    }
    int64_t end = 0;
    struct moe_pieces sum = {0}; /* of all parts: those of one tensor share a vector */
    for (int i = 0; i < n; i++) end += part[i];
    list_sum(g, from, n, end, op, &sum);
    for (int64_t i = 0, at = 0; i < n; at += part[i], i++) {
        list_part(g, &sum, at, at + part[i]);
        put_list(g, to[i]);
    }
    moe_pieces_free(&sum);
}

void moe_gradient_gather(struct moe_gradients *g, const struct moe_cell *from, const struct moe_cell *to,
                         int n)
{
    int64_t begin = 0;
    g->list.n = 0;
    for (int i = 0; i < n; begin += from[i].n, i++)
        for (int64_t at = 0, end; at < from[i].n; at = end) {
            end = from[i].n;
            struct moe_content c = content_at(g, from[i], at, &end);
            g->vectors[c.vector].alone = false;
            c.tag -= (uint64_t)begin;
            moe_pieces_add(&g->list, begin + at, begin + end, c);
        }
    for (int i = 0; i < n; i++) put_list(g, to[i]);
}

void moe_gradient_divide(struct moe_gradients *g, struct moe_cell from, struct moe_cell to, double divisor,
                         const struct moe_op *op)
{
    list_cell(g, from, &to);
    for (int i = 0; i < g->list.n; i++) {
        struct moe_content *c = &g->list.piece[i].content;
        c->coefficient /= divisor;
        c->divisor = divisor;
        c->op = op;
    }
    put_list(g, to);
}

void moe_gradient_clip(struct moe_gradients *g, struct moe_cell from, struct moe_cell to)
{
    list_cell(g, from, &to);
    for (int i = 0; i < g->list.n; i++) g->list.piece[i].content.times++;
    put_list(g, to);
}

void moe_gradient_copy(struct moe_gradients *g, struct moe_cell from, struct moe_cell to)
{
    list_cell(g, from, &to);
    put_list(g, to);
}

void moe_gradient_zero(struct moe_gradients *g, struct moe_cell to)
{
    g->list.n = 0;
    moe_pieces_add(&g->list, 0, to.n, (struct moe_content){0});
    put_list(g, to);
}

bool moe_gradient_in_parts(const struct moe_gradients *g, struct moe_cell of)
{
    return g->params && pieces_of(g, of)->n > 0;
}

void moe_gradient_update(struct moe_gradients *g, struct moe_cell of, bool part)
{
    if (part || moe_gradient_in_parts(g, of)) moe_gradient_clip(g, of, of); /* counts the same */
}

int64_t moe_gradient_stale(const struct moe_gradients *g, struct moe_cell of)
{
    int64_t stale = 0, end;
    for (int64_t at = 0; at < of.n; at = end) {
        end = of.n;
        struct moe_content c = content_at(g, of, at, &end);
        bool right =
            c.is_value && c.times == 1 && c.tag == tag_of(g, of.buffer, of.slot) + (uint64_t)of.begin;
        stale += right ? 0 : end - at;
    }
    return stale;
}

bool moe_gradient_owner(const struct moe_gradients *g, struct moe_cell in, struct moe_cell *out)
{
    for (int64_t at = 0, end; at < in.n; at = end) {
        end = in.n;
        struct moe_content c = content_at(g, in, at, &end);
        if (!g->vectors[c.vector].n) continue;
        uint64_t tag = g->vectors[c.vector].entry[0].tag + c.tag;
        int place = place_of(tag), buffer = 0;
        while (buffer < g->s->n_buffers && (!is_followed(g->s, buffer) || place < g->first[buffer] ||
                                            place >= g->first[buffer] + g->s->buffers[buffer].slots))
            buffer++;
        if (buffer == g->s->n_buffers) return false;
        *out = (struct moe_cell){buffer, place - g->first[buffer], in.rank,
                                 (int64_t)(tag - ((uint64_t)place << MOE_TAG_BITS)), in.n};
        return true;
    }
    return false;
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
        all->by[all->n++] = (struct written){place, at.block, op->id, op, at.layer};
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
            entry[(*n)++] = (struct entry){key_of(c->members[i], all->by[k].block, all->by[k].id),
                                           tag_of(g, p->grad, slot), 1 / divisor};
        }
    }
    return entry;
}

/* Is the coefficient the required one, or a factor another? Factors may be infinite. */
static bool is_right(double have, double want)
{
    return have == want || fabs(have / want - 1) <= 1e-9; /* doubles hold the few factors to 1e-15 */
}

bool moe_gradient_takes_nothing(const struct moe_schedule *s, struct moe_env env, const struct moe_op *op,
                                int rank, int layer)
{
    const bool grouped = moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    int64_t rows = 0;
    for (int i = 0; grouped && i < moe_symbol_count(s, op->group, rank); i++)
        rows = moe_plus(rows, env.value(env.ctx, op->group, rank, layer, i));
    if (grouped) return rows == 0;
    for (int i = 0; i < op->n_reads; i++) {
        struct moe_ref ref = op->reads[i];
        if (moe_eval(s, env, ref.n ? ref.n : s->buffers[ref.buffer].extent, rank, layer, 0) == 0) return true;
    }
    return false;
}

/* Is a contribution a sum over no row, of whichever instance? It is exactly 0, and may be anywhere or nowhere
 * with any coefficient that does not make NaN of it. */
static bool is_nothing(struct moe_gradients *g, struct moe_env env, struct entry e)
{
    int rank = rank_of(e.key), block = (int)(e.key >> 16 & 0xffff), id = (int)(e.key & 0xffff);
    const struct all_written *all = written_by(g, g->s->role_of[rank]);
    int place = place_of(e.tag), n = 0;
    if (!isfinite(e.coefficient) || place < 0 || place >= g->n_places) return false;
    for (int k = all->first[place]; k < all->first[place + 1]; k++) {
        const struct written *by = &all->by[k];
        if (by->block != block || by->id != id) continue;
        if (!moe_gradient_takes_nothing(g->s, env, by->op, rank, by->layer)) return false;
        n++;
    }
    return n > 0;
}

/* Of what does not agree, what is nothing does not count. tag, coefficient: of what the vector is part of. */
static struct moe_gradient_fault compare(struct moe_gradients *g, struct moe_env env,
                                         const struct entry *want, int n_want, const struct vector *have,
                                         uint64_t tag, double coefficient)
{
    struct moe_gradient_fault fault = {.factor = 1};
    int w = 0, h = 0, n_both = 0;
    double last = 1;
    while (w < n_want || h < have->n) {
        struct entry next = h < have->n ? have->entry[h] : (struct entry){.key = UINT64_MAX};
        next.tag += tag;
        next.coefficient *= coefficient;
        int order = h == have->n ? -1 : w == n_want ? 1 : by_key(&want[w], &next);
        if (order < 0) {
            struct entry lacks = want[w++];
            if (is_nothing(g, env, lacks)) continue;
            fault.missing_ranks += !fault.missing++ || rank_of(lacks.key) != fault.missing_rank;
            fault.missing_rank = rank_of(lacks.key);
        } else if (order > 0) {
            h++;
            if (is_nothing(g, env, next)) continue;
            fault.extra_ranks += !fault.extra++ || rank_of(next.key) != fault.extra_rank;
            fault.extra_rank = rank_of(next.key);
        } else {
            double required = want[w++].coefficient;
            double factor = is_right(next.coefficient, required) ? 1 : next.coefficient / required;
            h++;
            if (factor != 1 && is_nothing(g, env, next)) continue;
            if (n_both++ && !is_right(factor, last)) fault.uneven = true;
            last = factor;
            if (factor != 1) fault.factor = factor, fault.factor_rank = rank_of(want[w - 1].key);
        }
    }
    return fault;
}

static struct moe_gradient_fault judge(struct moe_gradients *g, struct moe_env env, struct question q,
                                       struct moe_content c)
{
    const struct moe_param *p = &g->s->params[q.param];
    struct vector *v = &g->vectors[c.vector];
    q.coefficient = c.coefficient;
    if (q.param != v->asked.param || q.slot != v->asked.slot || q.group != v->asked.group ||
        q.tag != v->asked.tag || q.coefficient != v->asked.coefficient) {
        int n;
        struct entry *want = required(g, env, p, q.slot, q.group, &n);
        v->answer = compare(g, env, want, merge(want, n), v, q.tag, c.coefficient);
        v->asked = q;
        free(want);
    }
    struct moe_gradient_fault fault = v->answer;
    fault.divisor = c.op ? c.divisor : v->divisor;
    fault.divided_in = c.op ? c.op : v->divided_in;
    fault.summed_in = v->summed_in;
    fault.doubled_in = v->doubled_in;
    fault.clips = c.times;
    return fault;
}

struct moe_gradient_fault moe_gradient_judge(struct moe_gradients *g, struct moe_env env,
                                             const struct moe_param *p, int slot, struct moe_cell in,
                                             int64_t first, int clips)
{
    struct question q = {(int)(p - g->s->params), slot, g->s->comms[p->replicas].group_of[in.rank], 0, 0};
    struct moe_gradient_fault fault = {.factor = 1, .clips = clips};
    for (int64_t at = 0, end; at < in.n; at = end) {
        end = in.n;
        struct moe_content c = content_at(g, in, at, &end);
        q.tag = c.tag - (uint64_t)first;
        fault = judge(g, env, q, c);
        if (fault.missing || fault.extra || fault.factor != 1 || fault.clips != clips) break;
    }
    return fault;
}
