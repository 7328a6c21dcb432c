/* routing.c - see routing.h. */
#include "sim/routing.h"

#include "traces/store.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Can a group of P ranks split the experts? */
static bool is_group(const struct moe_routing *r, int P)
{
    return P > 0 && r->n_experts % P == 0 && r->n_ranks % P == 0;
}

static struct moe_routing *new_routing(int n_layers, int n_ranks, int n_experts, int top_k)
{
    struct moe_routing *r = moe_alloc(1, sizeof *r);
    r->n_layers = n_layers;
    r->n_ranks = n_ranks;
    r->n_experts = n_experts;
    r->top_k = top_k;
    r->n_stages = r->n_micro = 1;
    r->tokens = moe_alloc((size_t)n_ranks, sizeof *r->tokens);
    r->counts = moe_alloc((size_t)n_layers * (size_t)n_ranks * (size_t)n_experts, sizeof *r->counts);
    return r;
}

struct moe_routing *moe_routing_new(int n_layers, int n_ranks, int n_experts, int top_k)
{
    struct moe_routing *r = new_routing(n_layers, n_ranks, n_experts, top_k);
    for (int P = 1; P <= n_ranks && P < n_experts; P++) r->n_peers += is_group(r, P) ? P : 0;
    r->peers = moe_alloc((size_t)n_layers * (size_t)n_ranks * (size_t)r->n_peers, sizeof *r->peers);
    return r;
}

void moe_routing_free(struct moe_routing *r)
{
    if (!r) return;
    free(r->tokens);
    free(r->counts);
    free(r->peers);
    free(r);
}

/* Adds to out [P] the tokens that have any expert of each member; with a member for each expert they are the
 * counts. */
static void count(const struct moe_routing *r, int P, int64_t n_tokens, const int32_t *expert, int32_t *out)
{
    if (P == r->n_experts) {
        for (int64_t i = 0; i < n_tokens * r->top_k; i++) out[expert[i]]++;
        return;
    }
    int64_t *last = moe_alloc((size_t)P, sizeof *last); /* 1 + token that a member counted last */
    int32_t here = r->n_experts / P;
    for (int64_t t = 0; t < n_tokens; t++)
        for (int k = 0; k < r->top_k; k++) {
            int32_t p = expert[t * r->top_k + k] / here;
            out[p] += last[p] != t + 1;
            last[p] = t + 1;
        }
    free(last);
}

/* Where those of a routing that keeps them are: by size of the group, then by member. */
static int32_t *kept_peers(const struct moe_routing *r, int layer, int rank, int P)
{
    size_t at = ((size_t)layer * (size_t)r->n_ranks + (size_t)rank) * (size_t)r->n_peers;
    for (int smaller = 1; smaller < P; smaller++) at += is_group(r, smaller) ? (size_t)smaller : 0;
    return r->peers + at;
}

void moe_routing_add(struct moe_routing *r, int layer, int rank, int64_t n_tokens, const int32_t *expert)
{
    moe_assert(r->peers);
    count(r, r->n_experts, n_tokens, expert, moe_routing_counts(r, layer, rank));
    for (int P = 1; P <= r->n_ranks && P < r->n_experts; P++)
        if (is_group(r, P)) count(r, P, n_tokens, expert, kept_peers(r, layer, rank, P));
}

/* ---- generate ---- */

/* Streams of the generator: one a layer for the order of the experts, one a (layer, rank) for the draws. */
static uint64_t stream_of(int layer, int rank)
{
    return (uint64_t)layer << 32 | (uint32_t)(rank + 1);
}

/* weight [E] of each expert in this layer: the permutation is a Fisher-Yates shuffle of the weights. */
static void shuffle_weights(double *weight, int n_experts, double skew, uint64_t seed, int layer)
{
    for (int e = 0; e < n_experts; e++) {
        int other = (int)(moe_uniform(seed, stream_of(layer, -1), (uint64_t)e) * (e + 1));
        weight[e] = weight[other];
        weight[other] = pow(1 + e, -skew);
    }
}

/* Draws one of the experts that are not taken; u in [0, 1). Their weights are summed anew each time: what is
 * left of a heavy total after subtracting would be noise. */
static int draw(const double *weight, const bool *taken, int n_experts, double u)
{
    double left = 0;
    int chosen = -1;
    for (int e = 0; e < n_experts; e++) left += taken[e] ? 0 : weight[e];
    left *= u;
    for (int e = 0; e < n_experts; e++) {
        if (taken[e]) continue;
        /* Also the answer when rounding leaves something after the last. */
        if (chosen < 0 || weight[e] > 0) chosen = e;
        left -= weight[e];
        if (left < 0) break;
    }
    return chosen;
}

/* What the tokens of a layer are drawn with. */
struct draws {
    int layer;
    double *weight;  /* [E] */
    double total;    /* of the weights */
    double *bound;   /* [E] of this expert's numbers: the sum of weights up to it; infinite for the last */
    int32_t *guide;  /* [BUCKETS] where to start looking for a number of this bucket */
    bool *taken;     /* [E] */
    int32_t *chosen; /* [PART, K] tokens counted at a time */
};

enum { BUCKETS = 1 << 11 }; /* equal parts of [0, 1): a power of two, so that a number times it is exact */

/* The expert is the first whose cumulative weight is above a number in [0, their sum), or the last. */
static inline int find(const struct draws *d, double uniform)
{
    double u = uniform * d->total;
    int e = d->guide[(int)(uniform * BUCKETS)];
    e += d->bound[e] <= u; /* as often as not, which no branch can guess */
    while (d->bound[e] <= u) e++;
    return e;
}

/* A draw without replacement is a draw with replacement that is repeated while it hits what is taken. A few
 * tries find a free expert quickly; behind a very heavy one they would not, so then the rest is drawn from
 * directly. stream: as of moe_stream. */
static int draw_quickly(const struct draws *d, int n_experts, uint64_t stream, uint64_t index)
{
    enum { TRIES = 15 };
    for (uint64_t i = 0; i < TRIES; i++) {
        int e = find(d, moe_uniform_at(stream, index * (TRIES + 1) + i));
        if (!d->taken[e]) return e;
    }
    return draw(d->weight, d->taken, n_experts, moe_uniform_at(stream, index * (TRIES + 1) + TRIES));
}

enum { PART = 4096 };

static struct draws new_draws(const struct moe_routing *r)
{
    size_t E = (size_t)r->n_experts;
    return (struct draws){.weight = moe_alloc(E, sizeof(double)),
                          .bound = moe_alloc(E, sizeof(double)),
                          .guide = moe_alloc(BUCKETS, sizeof(int32_t)),
                          .taken = moe_alloc(E, sizeof(bool)),
                          .chosen = moe_alloc(PART * (size_t)r->top_k, sizeof(int32_t))};
}

static void free_draws(struct draws *d)
{
    free(d->weight);
    free(d->bound);
    free(d->guide);
    free(d->taken);
    free(d->chosen);
}

static void set_layer(const struct moe_routing *r, struct draws *d, int layer)
{
    d->layer = layer;
    shuffle_weights(d->weight, r->n_experts, r->skew, r->seed, layer);
    d->total = 0;
    for (int e = 0; e < r->n_experts; e++) d->bound[e] = d->total += d->weight[e];
    d->bound[r->n_experts - 1] = INFINITY;
    /* Rounding keeps order: no number of a bucket is below its first one, nor its expert
     * before that one's. */
    for (int b = 0, e = 0; b < BUCKETS; b++) {
        double first = (double)b / BUCKETS * d->total;
        while (d->bound[e] <= first) e++;
        d->guide[b] = e;
    }
}

/* Draws the tokens of a rank, always the same, and counts them in out [P]. */
static void draw_rank(const struct moe_routing *r, const struct draws *d, int rank, int P, int32_t *out)
{
    const uint64_t stream = moe_stream(r->seed, stream_of(d->layer, rank));
    const int K = r->top_k;
    for (int64_t first = 0; first < r->tokens[rank]; first += PART) {
        int64_t n = r->tokens[rank] - first < PART ? r->tokens[rank] - first : PART;
        for (int64_t t = 0; t < n; t++) {
            int32_t *chosen = d->chosen + t * K;
            for (int k = 0; k < K; k++) {
                chosen[k] = draw_quickly(d, r->n_experts, stream, (uint64_t)((first + t) * K + k));
                d->taken[chosen[k]] = true;
            }
            for (int k = 0; k < K; k++) d->taken[chosen[k]] = false;
        }
        count(r, P, n, d->chosen, out);
    }
}

/* The ranks whose stage has the layer: each of them, from the first. */
static int first_of_layer(const struct moe_routing *r, int layer, int *each)
{
    int n_layers = r->n_layers / r->n_micro;
    *each = r->n_ranks / r->n_stages;
    return layer % n_layers / (n_layers / r->n_stages) * *each;
}

struct moe_routing *moe_routing_generate_stages(int n_layers, int n_ranks, int n_experts, int top_k,
                                                const int64_t *tokens, double skew, uint64_t seed,
                                                int n_stages, int n_micro)
{
    moe_assert(top_k <= n_experts && n_layers % (n_stages * n_micro) == 0 && n_ranks % n_stages == 0);
    struct moe_routing *r = new_routing(n_layers, n_ranks, n_experts, top_k);
    memcpy(r->tokens, tokens, (size_t)n_ranks * sizeof *tokens);
    r->skew = skew;
    r->seed = seed;
    r->n_stages = n_stages;
    r->n_micro = n_micro;
    struct draws d = new_draws(r);
    for (int l = 0; l < n_layers; l++) {
        int each, first = first_of_layer(r, l, &each);
        set_layer(r, &d, l);
        for (int rank = first; rank < first + each; rank++)
            draw_rank(r, &d, rank, n_experts, moe_routing_counts(r, l, rank));
    }
    free_draws(&d);
    return r;
}

struct moe_routing *moe_routing_generate(int n_layers, int n_ranks, int n_experts, int top_k,
                                         const int64_t *tokens, double skew, uint64_t seed)
{
    return moe_routing_generate_stages(n_layers, n_ranks, n_experts, top_k, tokens, skew, seed, 1, 1);
}

void moe_routing_peers(const struct moe_routing *r, int layer, int rank, int P, int32_t *out)
{
    moe_assert(is_group(r, P));
    if (P == r->n_experts) {
        memcpy(out, moe_routing_counts(r, layer, rank), (size_t)P * sizeof *out);
    } else if (r->peers) {
        memcpy(out, kept_peers(r, layer, rank, P), (size_t)P * sizeof *out);
    } else {
        int each, first = first_of_layer(r, layer, &each);
        memset(out, 0, (size_t)P * sizeof *out);
        if (rank < first || rank >= first + each) return;
        struct draws d = new_draws(r);
        set_layer(r, &d, layer);
        draw_rank(r, &d, rank, P, out);
        free_draws(&d);
    }
}

/* ---- load ---- */

/* Adds the routing of one (layer, rank) to the counts. tokens: out. */
static int load_one(struct moe_store *store, int64_t step, int layer, int rank, struct moe_routing *r,
                    int64_t *tokens)
{
    int top_k = 0, err = MOE_OK;
    int32_t *ids;
    MOE_TRY(moe_store_routing(store, step, layer, rank, tokens, &top_k, &ids));
    if (!ids)
        return moe_fail(MOE_EINPUT, "step %lld of the trace has no routing for layer %d, rank %d",
                        (long long)step, layer, rank);
    if (top_k != r->top_k)
        err = moe_fail(
            MOE_EINPUT,
            "step %lld of the trace, layer %d, rank %d: tokens go to %d experts each, expected top_k %d",
            (long long)step, layer, rank, top_k, r->top_k);
    for (int64_t i = 0; i < *tokens * top_k && err == MOE_OK; i++)
        if (ids[i] >= r->n_experts)
            err = moe_fail(MOE_EINPUT, "step %lld of the trace, layer %d, rank %d: expert %d of %d",
                           (long long)step, layer, rank, ids[i], r->n_experts);
    if (err == MOE_OK) moe_routing_add(r, layer, rank, *tokens, ids);
    free(ids);
    return err;
}

/* The first stage with tokens in a layer; 0: none has. A stage is `each` consecutive ranks. */
static int stage_of_layer(const int64_t *tokens, int n_ranks, int each)
{
    for (int rank = 0; rank < n_ranks; rank++)
        if (tokens[rank]) return rank / each;
    return 0;
}

/* Ranks have as many tokens in every layer of their stage, and none in those of others. tokens [L, R]. Sets
 * those of r. */
static int check_tokens(struct moe_routing *r, int64_t step, const int64_t *tokens, int n_stages)
{
    int R = r->n_ranks, each = R / n_stages;
    for (int rank = 0; rank < R; rank++)
        for (int l = 0; l < r->n_layers && !r->tokens[rank]; l++)
            r->tokens[rank] = tokens[(size_t)l * (size_t)R + (size_t)rank];
    for (int l = 0; l < r->n_layers; l++, tokens += R) {
        int stage = stage_of_layer(tokens, R, each);
        for (int rank = 0; rank < R; rank++) {
            int64_t expected = rank / each == stage ? r->tokens[rank] : 0;
            if (tokens[rank] == expected) continue;
            return moe_fail(MOE_EINPUT,
                            "step %lld of the trace, layer %d, rank %d: %lld tokens, expected %lld",
                            (long long)step, l, rank, (long long)tokens[rank], (long long)expected);
        }
    }
    return MOE_OK;
}

/* Stages of the pipeline that a trace is of. */
static int load_stages(struct moe_store *store, int n_ranks, int *out)
{
    char *text = NULL, *end = NULL;
    MOE_TRY(moe_store_get(store, "stages", &text));
    long n = text ? strtol(text, &end, 10) : 1;
    bool right = (!end || (end != text && !*end)) && n >= 1 && n <= n_ranks && n_ranks % n == 0;
    *out = (int)n;
    int err = right ? MOE_OK
                    : moe_fail(MOE_EINPUT, "the trace says stages %.20s, expected a divisor of its ranks, %d",
                               text, n_ranks);
    free(text);
    return err;
}

static int found(void *ctx, int64_t step, int layer, int rank)
{
    (void)step, (void)layer, (void)rank;
    *(bool *)ctx = true;
    return MOE_OK;
}

int moe_routing_load(struct moe_store *store, int64_t step, struct moe_routing **out)
{
    struct moe_store_info info;
    *out = NULL;
    MOE_TRY(moe_store_info(store, &info));
    if (info.steps_complete == 0) return moe_fail(MOE_EINPUT, "the trace has no complete step");
    if (step < 0) step = info.last_step;
    /* A step between the first complete one and the last may be incomplete. */
    bool complete = step == info.last_step;
    if (!complete) MOE_TRY(moe_store_each_routing(store, step, step, found, &complete));
    if (!complete)
        return moe_fail(MOE_EINPUT, "the trace has no complete step %lld, expected %lld to %lld",
                        (long long)step, (long long)info.first_step, (long long)info.last_step);
    /* Every (layer, rank) of the step has a row: this bounds what is allocated by what is there. */
    if (info.n_layers < 1 || info.n_experts < 1 || info.top_k < 1 ||
        (int64_t)info.n_layers * info.n_ranks > info.n_routing)
        return moe_fail(MOE_EINPUT, "the trace has %lld routings and says layers %d, experts %d, top_k %d",
                        (long long)info.n_routing, info.n_layers, info.n_experts, info.top_k);
    int n_stages;
    MOE_TRY(load_stages(store, info.n_ranks, &n_stages));
    struct moe_routing *r = moe_routing_new(info.n_layers, info.n_ranks, info.n_experts, info.top_k);
    int64_t *tokens = moe_alloc((size_t)r->n_layers * (size_t)r->n_ranks, sizeof *tokens);
    int err = MOE_OK;
    for (int l = 0, i = 0; l < r->n_layers && err == MOE_OK; l++)
        for (int rank = 0; rank < r->n_ranks && err == MOE_OK; rank++, i++)
            err = load_one(store, step, l, rank, r, &tokens[i]);
    if (err == MOE_OK) err = check_tokens(r, step, tokens, n_stages);
    free(tokens);
    if (err < 0) {
        moe_routing_free(r);
        return err;
    }
    *out = r;
    return MOE_OK;
}
