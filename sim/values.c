/* values.c - see values.h.
 *
 * A cell is one int64 buffer in one slot on one rank; without content (NULL) it was never written, or from
 * something unknown. Content never changes, so that members of a group share what they all get. In-place
 * collectives are right because all outputs are built before the first is stored. What symbols make of
 * content is kept for each rank until it asks of other content: it asks often, and of one layer at a time. */
#include "sim/values.h"

#include <stdlib.h>
#include <string.h>

struct content {
    int refs, n;
    uint64_t serial; /* no two are the same */
    int64_t sum;
    int64_t *columns; /* [n_columns] sums over n_rows, for symbols that take a slice of them, or NULL */
    int n_rows, n_columns;
    int64_t *wide;         /* [n] MOE_UNKNOWN: above 63 bits; or NULL where all fit into */
    const int32_t *narrow; /* [n] own, or of the routing, which stays */
    int32_t own[];
};

struct cell {
    struct content *content;
    uint64_t serial; /* of the content: what was kept of it is found without looking into it */
    bool host_knows;
};

/* What tokens have for the members of groups of P. */
struct peers {
    int P;
    bool *is_known;  /* [L, R] */
    int32_t *tokens; /* [L, R, P] */
};

struct memo {        /* of a symbol on a rank */
    uint64_t serial; /* of the content that row is of */
    struct moe_symbol_row row;
};

struct moe_values {
    const struct moe_schedule *s; /* borrowed */
    const struct moe_routing *r;  /* borrowed */
    struct cell *cells;
    size_t n_cells;
    size_t *first; /* [n_buffers] the buffer's first cell: then slot by slot, rank by rank */
    int n_peers, cap_peers;
    struct peers *peers; /* [n_peers] of each P that was asked for */
    uint64_t serial;     /* the last of a content or a row */
    int64_t world_tokens;
    struct memo *memos; /* [n_symbols, R] */
};

struct moe_values *moe_values_new(const struct moe_schedule *s, const struct moe_routing *r)
{
    struct moe_values *v = moe_alloc(1, sizeof *v);
    v->s = s;
    v->r = r;
    v->first = moe_alloc((size_t)s->n_buffers, sizeof *v->first);
    for (int b = 0; b < s->n_buffers; b++) {
        v->first[b] = v->n_cells;
        if (s->buffers[b].type == MOE_I64) v->n_cells += (size_t)s->buffers[b].slots * (size_t)s->n_ranks;
    }
    v->cells = moe_alloc(v->n_cells, sizeof *v->cells);
    v->memos = moe_alloc((size_t)s->n_symbols * (size_t)s->n_ranks, sizeof *v->memos);
    for (int rank = 0; rank < s->n_ranks; rank++)
        v->world_tokens = moe_plus(v->world_tokens, s->tokens[rank]);
    return v;
}

/* ---- content ---- */

static struct content *empty_content(struct moe_values *v, int n, bool wide)
{
    struct content *c = moe_alloc(1, sizeof *c + (wide ? 0 : (size_t)n * sizeof *c->own));
    if (wide) c->wide = moe_alloc((size_t)n, sizeof *c->wide);
    c->narrow = c->own;
    c->n = n;
    c->refs = 1;
    c->serial = ++v->serial;
    return c;
}

static struct content *new_content(struct moe_values *v, const int64_t *x, int n)
{
    bool wide = false;
    for (int i = 0; i < n; i++) wide |= x[i] != (int32_t)x[i];
    struct content *c = empty_content(v, n, wide);
    for (int i = 0; i < n; i++) c->sum = moe_plus(c->sum, x[i]);
    if (wide) memcpy(c->wide, x, (size_t)n * sizeof *x);
    for (int i = 0; i < n && !wide; i++) c->own[i] = (int32_t)x[i];
    return c;
}

static struct content *content_of(struct moe_values *v, const int32_t *x, int n)
{
    struct content *c = empty_content(v, 0, false);
    c->n = n;
    c->narrow = x;
    for (int i = 0; i < n; i++) c->sum += x[i];
    return c;
}

static inline int64_t element(const struct content *c, int64_t i)
{
    return c->wide ? c->wide[i] : c->narrow[i];
}

static void drop(struct content *c)
{
    if (!c || --c->refs) return;
    free(c->columns);
    free(c->wide);
    free(c);
}

void moe_values_free(struct moe_values *v)
{
    if (!v) return;
    for (int i = 0; i < v->n_peers; i++) free(v->peers[i].is_known), free(v->peers[i].tokens);
    free(v->peers);
    for (size_t i = 0; i < v->n_cells; i++) drop(v->cells[i].content);
    for (size_t i = 0; i < (size_t)v->s->n_symbols * (size_t)v->s->n_ranks; i++) free(v->memos[i].row.value);
    free(v->memos);
    free(v->cells);
    free(v->first);
    free(v);
}

/* NULL when the buffer does not hold int64. */
static struct cell *cell_of(const struct moe_values *v, struct moe_ref ref, int rank, int layer)
{
    if (v->s->buffers[ref.buffer].type != MOE_I64) return NULL;
    size_t slot = (size_t)moe_slot(v->s, ref, layer), n_ranks = (size_t)v->s->n_ranks;
    return &v->cells[v->first[ref.buffer] + slot * n_ranks + (size_t)rank];
}

static struct content *read_cell(const struct moe_values *v, struct moe_ref ref, int rank, int layer)
{
    const struct cell *cell = cell_of(v, ref, rank, layer);
    return cell ? cell->content : NULL;
}

/* Replaces the content; the host knows nothing of the new one. */
static void store_cell(struct cell *cell, struct content *with)
{
    drop(cell ? cell->content : with);
    if (cell) *cell = (struct cell){.content = with, .serial = with ? with->serial : 0};
}

/* Are there n elements from `offset` on? */
static bool holds(const struct content *c, int64_t offset, int64_t n)
{
    return c && n >= 0 && n <= c->n - offset;
}

/* ---- kernels ---- */

static struct content *routed_counts(struct moe_values *v, int rank, int layer)
{
    layer = moe_routed_layer(v->s, layer);
    moe_assert(v->r && layer < v->r->n_layers && rank < v->r->n_ranks);
    return content_of(v, moe_routing_counts(v->r, layer, rank), v->r->n_experts);
}

static struct peers *peers_of(struct moe_values *v, int P)
{
    size_t n = (size_t)v->r->n_layers * (size_t)v->r->n_ranks;
    for (int i = 0; i < v->n_peers; i++)
        if (v->peers[i].P == P) return &v->peers[i];
    v->peers = moe_grow(v->peers, &v->cap_peers, v->n_peers + 1, sizeof *v->peers);
    v->peers[v->n_peers] =
        (struct peers){P, moe_alloc(n, sizeof(bool)), moe_alloc(n * (size_t)P, sizeof(int32_t))};
    return &v->peers[v->n_peers++];
}

const int32_t *moe_values_peers(struct moe_values *v, int rank, int layer, int P)
{
    if (!v->r || v->r->n_experts % P || v->r->n_ranks % P) return NULL;
    layer = moe_routed_layer(v->s, layer);
    moe_assert(layer < v->r->n_layers && rank < v->r->n_ranks);
    if (P == v->r->n_experts) return moe_routing_counts(v->r, layer, rank);
    struct peers *peers = peers_of(v, P);
    size_t at = (size_t)layer * (size_t)v->r->n_ranks + (size_t)rank;
    int32_t *tokens = peers->tokens + at * (size_t)P;
    if (!peers->is_known[at]) moe_routing_peers(v->r, layer, rank, P, tokens);
    peers->is_known[at] = true;
    return tokens;
}

/* What SPREAD counts: all choices leave, so what the routing says. */
static struct content *routed_peers(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    int P = (int)moe_eval(v->s, moe_values_device(v), op->dims[3], rank, layer, 0);
    const int32_t *peers = moe_values_peers(v, rank, layer, P);
    moe_assert(peers);
    return content_of(v, peers, P);
}

int64_t moe_values_limit(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    struct moe_env env = moe_values_device(v);
    int64_t T = moe_eval(v->s, env, op->dims[0], rank, layer, 0),
            C = moe_eval(v->s, env, op->dims[3], rank, layer, 0);
    int64_t G = moe_eval(v->s, env, op->dims[4], rank, layer, 0);
    return T > G && G > 0 ? moe_times(C, (T - 1) / G + 1) : C;
}

/* What LIMIT keeps of each expert: at most the limit, or exactly that when padded. */
static struct content *limited_counts(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    const struct content *counts = read_cell(v, op->reads[2], rank, layer);
    if (!counts) return NULL;
    int64_t most = moe_values_limit(v, op, rank, layer), *kept;
    if (most == MOE_UNKNOWN) return NULL;
    kept = moe_alloc((size_t)counts->n, sizeof *kept);
    for (int e = 0; e < counts->n; e++) {
        kept[e] = element(counts, e);
        if (op->mode & MOE_LIMIT_PAD || kept[e] > most) kept[e] = most;
    }
    struct content *with = new_content(v, kept, counts->n);
    free(kept);
    return with;
}

/* What is above 63 bits stays so. */
static int64_t larger(int64_t a, int64_t b)
{
    return a == MOE_UNKNOWN || b == MOE_UNKNOWN ? MOE_UNKNOWN : a > b ? a : b;
}

/* One number: the largest of what LARGEST reads, or what SET is told. */
static struct content *one_number(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    struct moe_env env = moe_values_device(v);
    int64_t value;
    if (op->kernel == MOE_K_SET) {
        value = moe_eval(v->s, env, op->dims[0], rank, layer, 0);
        bool made = value != MOE_UNKNOWN || moe_eval_exceeds(v->s, env, op->dims[0], rank, layer, 0);
        return made ? new_content(v, &value, 1) : NULL;
    }
    const struct content *counts = read_cell(v, op->reads[0], rank, layer);
    if (!counts || !counts->n) return NULL;
    value = element(counts, 0);
    for (int e = 1; e < counts->n; e++) value = larger(value, element(counts, e));
    return new_content(v, &value, 1);
}

void moe_values_kernel(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    for (int i = 0; i < op->n_writes; i++) {
        struct cell *cell = cell_of(v, op->writes[i], rank, layer);
        if (!cell) continue;
        if (v->s->buffers[op->writes[i].buffer].role == MOE_BUF_COUNTS)
            store_cell(cell, routed_counts(v, rank, layer));
        else if (op->kernel == MOE_K_LIMIT)
            store_cell(cell, limited_counts(v, op, rank, layer));
        else if (op->kernel == MOE_K_LARGEST || op->kernel == MOE_K_SET)
            store_cell(cell, one_number(v, op, rank, layer));
        else if (op->kernel == MOE_K_SPREAD)
            store_cell(cell, routed_peers(v, op, rank, layer));
        else
            store_cell(cell, NULL);
    }
}

/* ---- collectives ---- */

struct move {
    const struct moe_op *const *ops; /* [n] */
    const int *members;              /* [n] ranks */
    int n, layer;
    const struct content **from; /* [n] */
};

static int64_t sent(struct moe_values *v, const struct move *m, int i)
{
    return moe_eval(v->s, moe_values_device(v), m->ops[i]->send, m->members[i], m->layer, 0);
}

/* Adds n elements to the end of what a member receives. */
static void append(struct content *to, int *used, const struct content *from, int64_t offset, int64_t n)
{
    int64_t sum = 0;
    int at = *used;
    for (int64_t k = offset; k < offset + n; k++) {
        int64_t x = element(from, k);
        if (to->wide)
            to->wide[at++] = x;
        else
            to->own[at++] = (int32_t)x;
        sum = moe_plus(sum, x);
    }
    to->sum = moe_plus(to->sum, sum);
    *used = at;
}

struct sends {      /* of a member */
    int64_t offset; /* behind what was taken so far */
    int64_t each;   /* elements to each peer, */
    int64_t *count; /* or [n] to each, when not NULL */
};

static int64_t count_for(const struct sends *s, int peer)
{
    return s->count ? s->count[peer] : s->each;
}

/* Result: false when something is unknown or not there. */
static bool plan_sends(struct moe_values *v, const struct move *m, int i, struct sends *out)
{
    struct moe_env env = moe_values_device(v);
    struct moe_product product;
    bool same =
        moe_eval_product(v->s, env, m->ops[i]->send, m->members[i], m->layer, &product) && product.symbol < 0;
    if (same) {
        out->each = product.factor;
        return holds(m->from[i], 0, out->each) && holds(m->from[i], 0, out->each * m->n);
    }
    out->count = moe_alloc((size_t)m->n, sizeof *out->count);
    moe_eval_all(v->s, env, m->ops[i]->send, m->members[i], m->layer, m->n, out->count);
    int64_t offset = 0;
    for (int peer = 0; peer < m->n; offset += out->count[peer++])
        if (!holds(m->from[i], offset, out->count[peer])) return false;
    return true;
}

enum { BLOCK = 16 }; /* receivers at a time, so that what a member sends to them is near */

static void receive(struct moe_values *v, const struct move *m, struct sends *sends, int first, bool wide,
                    struct content **out)
{
    int64_t room[BLOCK] = {0};
    int used[BLOCK] = {0}, n = m->n - first < BLOCK ? m->n - first : BLOCK;
    for (int i = 0; i < m->n; i++)
        for (int k = 0; k < n; k++) room[k] += count_for(&sends[i], first + k);
    for (int k = 0; k < n; k++) {
        moe_assert(room[k] <= INT32_MAX);
        out[first + k] = empty_content(v, (int)room[k], wide);
    }
    for (int i = 0; i < m->n; i++)
        for (int k = 0; k < n; k++) {
            int64_t count = count_for(&sends[i], first + k);
            append(out[first + k], &used[k], m->from[i], sends[i].offset, count);
            sends[i].offset += count;
        }
}

/* How many elements every member sends to every other, where that is one number and all are narrow; else
 * -1. */
static int64_t even(const struct move *m, const struct sends *sends)
{
    for (int i = 0; i < m->n; i++)
        if (sends[i].count || sends[i].each != sends[0].each || m->from[i]->wide) return -1;
    return sends[0].each;
}

enum { TILE = 64 }; /* receivers at a time, each with a line of cache that is written to */

/* receive() of all, where they are even. */
static void transpose(struct moe_values *v, const struct move *m, int64_t each, struct content **out)
{
    moe_assert(each * m->n <= INT32_MAX);
    int n = (int)each;
    for (int first = 0; first < m->n; first += TILE) {
        int32_t *to[TILE];
        int tile = m->n - first < TILE ? m->n - first : TILE;
        for (int k = 0; k < tile; k++) to[k] = (out[first + k] = empty_content(v, n * m->n, false))->own;
        for (int i = 0; i < m->n; i++) {
            const int32_t *from = m->from[i]->narrow + first * n;
            for (int k = 0; k < tile && n == 1; k++) to[k][i] = from[k];
            for (int k = 0; k < tile && n > 1; k++)
                memcpy(to[k] + i * n, from + k * n, (size_t)n * sizeof *from);
        }
        for (int k = 0; k < tile; k++)
            for (int i = 0; i < n * m->n; i++) out[first + k]->sum += to[k][i];
    }
}

static bool alltoall(struct moe_values *v, const struct move *m, struct content **out)
{
    struct sends *sends = moe_alloc((size_t)m->n, sizeof *sends);
    bool known = true, wide = false;
    for (int i = 0; i < m->n && known; i++) {
        known = plan_sends(v, m, i, &sends[i]);
        wide |= known && m->from[i]->wide;
    }
    int64_t each = known ? even(m, sends) : -1;
    if (each >= 0) transpose(v, m, each, out);
    for (int peer = 0; peer < m->n && known && each < 0; peer += BLOCK) receive(v, m, sends, peer, wide, out);
    for (int i = 0; i < m->n; i++) free(sends[i].count);
    free(sends);
    return known;
}

/* All members get the same. */
static void share(const struct move *m, struct content **out, struct content *all)
{
    all->refs = m->n;
    for (int i = 0; i < m->n; i++) out[i] = all;
}

static bool allreduce(struct moe_values *v, const struct move *m, struct content **out)
{
    int64_t n = sent(v, m, 0);
    for (int i = 0; i < m->n; i++)
        if (sent(v, m, i) != n || !holds(m->from[i], 0, n)) return false;
    int64_t *sum = moe_alloc((size_t)n, sizeof *sum);
    bool adds = m->ops[0]->reduction == MOE_REDUCE_SUM;
    for (int i = 0; i < m->n; i++)
        for (int64_t e = 0; e < n; e++) {
            int64_t with = element(m->from[i], e);
            sum[e] = i == 0 ? with : adds ? moe_plus(sum[e], with) : larger(sum[e], with);
        }
    share(m, out, new_content(v, sum, (int)n));
    free(sum);
    return true;
}

static bool allgather(struct moe_values *v, const struct move *m, struct content **out)
{
    int64_t room = 0;
    bool wide = false;
    for (int i = 0; i < m->n; i++) {
        int64_t n = sent(v, m, i);
        if (!holds(m->from[i], 0, n)) return false;
        wide |= m->from[i]->wide != NULL;
        room += n;
    }
    moe_assert(room <= INT32_MAX);
    struct content *all = empty_content(v, (int)room, wide);
    for (int i = 0, used = 0; i < m->n; i++) append(all, &used, m->from[i], 0, sent(v, m, i));
    share(m, out, all);
    return true;
}

/* All build what the members receive in out [n] and return false when a part of it is unknown: then so is
 * the whole, since every member receives from every other. Sizes are those of the senders. */
typedef bool mover(struct moe_values *v, const struct move *m, struct content **out);
static mover *const movers[MOE_COLLECTIVE_COUNT] = {
    [MOE_ALLTOALL] = alltoall, [MOE_ALLREDUCE] = allreduce, [MOE_ALLGATHER] = allgather};

void moe_values_collective(struct moe_values *v, const struct moe_op *const *ops, int comm, int group,
                           int layer)
{
    if (ops[0]->type != MOE_I64) return;
    const struct moe_comm *c = &v->s->comms[comm];
    struct move m = {ops, c->members + c->first[group], moe_group_size(c, group), layer, NULL};
    struct content **out = moe_alloc((size_t)m.n, sizeof *out);
    m.from = moe_alloc((size_t)m.n, sizeof *m.from);
    for (int i = 0; i < m.n; i++) m.from[i] = read_cell(v, ops[i]->reads[0], m.members[i], layer);
    mover *move = m.n == 1 ? allgather : movers[ops[0]->collective]; /* alone, all of them copy */
    if (move) move(v, &m, out); /* out stays empty where something is unknown */
    for (int i = 0; i < m.n; i++) store_cell(cell_of(v, ops[i]->writes[0], m.members[i], layer), out[i]);
    free(m.from);
    free(out);
}

void moe_values_host_sync(struct moe_values *v, const struct moe_op *op, int rank, int layer)
{
    for (int i = 0; i < op->n_reads; i++) {
        struct cell *cell = cell_of(v, op->reads[i], rank, layer);
        if (cell) cell->host_knows = true; /* without content there is still nothing to know */
    }
}

/* ---- symbols ---- */

static const int64_t *column_sums(struct content *c, int rows, int cols)
{
    if (c->columns && c->n_rows == rows && c->n_columns == cols) return c->columns;
    free(c->columns);
    c->columns = moe_alloc((size_t)cols, sizeof *c->columns);
    c->n_rows = rows;
    c->n_columns = cols;
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < cols; i++)
            c->columns[i] = moe_plus(c->columns[i], element(c, (int64_t)row * cols + i));
    return c->columns;
}

/* out [n]: as moe_symbol_reduce, for all indices. */
static void reduce_all(const struct moe_schedule *s, int symbol, int rank, struct content *c, int n,
                       int64_t *out)
{
    const struct moe_symbol *y = &s->symbols[symbol];
    if (y->slice) { /* the others have something of the same content */
        const int64_t *columns = column_sums(c, y->rows, y->cols);
        memcpy(out, columns + s->comms[y->slice].index_of[rank] * n, (size_t)n * sizeof *out);
        return;
    }
    int sums = y->by_row ? y->rows : y->cols, terms = y->by_row ? y->cols : y->rows;
    int next = y->by_row ? y->cols : 1, step = y->by_row ? 1 : y->cols; /* from sum to sum, term to term */
    if (sums == 1 && c->n == terms) {
        *out = c->sum;
        return;
    }
    for (int i = 0; i < sums; i++) out[i] = element(c, (int64_t)i * next);
    for (int k = 1; k < terms; k++)
        for (int i = 0; i < sums; i++) {
            int64_t at = (int64_t)i * next + (int64_t)k * step;
            out[i] = c->wide ? moe_plus(out[i], c->wide[at]) : out[i] + c->narrow[at]; /* these fit */
        }
}

/* Tokens of the members are the same for all of them: kept for the first. */
static const struct moe_symbol_row *keep_tokens(struct moe_values *v, int symbol, int rank)
{
    const struct moe_comm *comm = &v->s->comms[v->s->symbols[symbol].comm];
    int first = comm->members[comm->first[comm->group_of[rank]]];
    struct memo *memo = &v->memos[(size_t)symbol * (size_t)v->s->n_ranks + (size_t)first];
    struct moe_symbol_row *row = &memo->row;
    if (row->value) return row;
    *row = (struct moe_symbol_row){.id = ++v->serial, .n = moe_symbol_count(v->s, symbol, rank)};
    row->value = moe_alloc((size_t)row->n, sizeof *row->value);
    for (int i = 0; i < row->n; i++) {
        row->value[i] = moe_symbol_initial(v->s, (struct moe_env){0}, symbol, rank, 0, i);
        row->sum = moe_plus(row->sum, row->value[i]);
    }
    return row;
}

static void keep_row(struct moe_values *v, struct memo *memo, int symbol, int rank, struct content *c)
{
    struct moe_symbol_row *row = &memo->row;
    memo->serial = c->serial;
    row->id = ++v->serial;
    row->n = moe_symbol_count(v->s, symbol, rank); /* always the same */
    if (!row->value) row->value = moe_alloc((size_t)row->n, sizeof *row->value);
    reduce_all(v->s, symbol, rank, c, row->n, row->value);
    const struct moe_symbol *y = &v->s->symbols[symbol];
    bool all = !c->wide && !y->slice && c->n == y->rows * y->cols;
    row->sum = all ? c->sum : 0;
    for (int i = 0; i < row->n && !all; i++)
        row->sum = c->wide ? moe_plus(row->sum, row->value[i]) : row->sum + row->value[i];
}

/* NULL: unknown; or a symbol without buffer that is one number, or an expression. */
static const struct moe_symbol_row *row_of(struct moe_values *v, bool host, int symbol, int rank, int layer)
{
    const struct moe_symbol *y = &v->s->symbols[symbol];
    if (y->buffer < 0) return !y->expr && y->scope == MOE_SCOPE_PEER ? keep_tokens(v, symbol, rank) : NULL;
    int each = moe_slots_each(v->s, y->buffer), in_micro = layer % moe_layers_each(v->s);
    if (each > 1 && in_micro >= each) return NULL; /* outside of the layers */
    const struct cell *cell = cell_of(v, (struct moe_ref){.buffer = y->buffer}, rank, layer);
    if (!cell || !cell->content || (host && !cell->host_knows && !y->on_device)) return NULL;
    struct memo *memo = &v->memos[(size_t)symbol * (size_t)v->s->n_ranks + (size_t)rank];
    if (memo->serial == cell->serial) return &memo->row;
    if (cell->content->n < y->rows * y->cols) return NULL;
    keep_row(v, memo, symbol, rank, cell->content);
    return &memo->row;
}

static int64_t value_of(struct moe_values *v, bool host, int symbol, int rank, int layer, int index)
{
    const struct moe_symbol *y = &v->s->symbols[symbol];
    const struct moe_symbol_row *row = row_of(v, host, symbol, rank, layer);
    if (row) return row->value[index];
    if (y->buffer >= 0) return MOE_UNKNOWN;
    if (!y->expr && y->scope == MOE_SCOPE_GLOBAL) return v->world_tokens;
    struct moe_env env = host ? moe_values_host(v) : moe_values_device(v);
    return moe_symbol_initial(v->s, env, symbol, rank, layer, index);
}

int64_t moe_values_total(const struct moe_values *v, struct moe_ref ref, int rank, int layer)
{
    const struct content *content = read_cell(v, ref, rank, layer);
    return content ? content->sum : MOE_UNKNOWN;
}

static int64_t host_value(void *ctx, int symbol, int rank, int layer, int index)
{
    return value_of(ctx, true, symbol, rank, layer, index);
}

static int64_t device_value(void *ctx, int symbol, int rank, int layer, int index)
{
    return value_of(ctx, false, symbol, rank, layer, index);
}

static const struct moe_symbol_row *host_row(void *ctx, int symbol, int rank, int layer)
{
    return row_of(ctx, true, symbol, rank, layer);
}

static const struct moe_symbol_row *device_row(void *ctx, int symbol, int rank, int layer)
{
    return row_of(ctx, false, symbol, rank, layer);
}

struct moe_env moe_values_host(struct moe_values *v)
{
    return (struct moe_env){.value = host_value, .ctx = v, .row = host_row};
}

struct moe_env moe_values_device(struct moe_values *v)
{
    return (struct moe_env){.value = device_value, .ctx = v, .row = device_row};
}
