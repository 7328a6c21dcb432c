/* Routing: generated counts add up, repeat and skew as asked; a trace gives back the counts of its tokens. */
#include "sim/routing.h"
#include "tests/fixture.h"
#include "traces/store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static size_t n_counts(const struct moe_routing *r)
{
    return (size_t)r->n_layers * (size_t)r->n_ranks * (size_t)r->n_experts;
}

static bool same(const struct moe_routing *a, const struct moe_routing *b)
{
    return n_counts(a) == n_counts(b) && !memcmp(a->counts, b->counts, n_counts(a) * sizeof *a->counts);
}

/* Rows of the busiest expert of a layer over all ranks, and which it is. */
static int64_t busiest(const struct moe_routing *r, int layer, int *expert)
{
    int64_t most = -1;
    *expert = 0;
    for (int e = 0; e < r->n_experts; e++) {
        int64_t rows = 0;
        for (int rank = 0; rank < r->n_ranks; rank++) rows += moe_routing_counts(r, layer, rank)[e];
        if (rows <= most) continue;
        most = rows;
        *expert = e;
    }
    return most;
}

static void test_sums(void **state)
{
    (void)state;
    const int64_t tokens[] = {100, 0, 7, 33};
    for (int skew = 0; skew < 40; skew += 13) {
        struct moe_routing *r = moe_routing_generate(3, 4, 16, 5, tokens, skew, 1);
        for (int l = 0; l < 3; l++)
            for (int rank = 0; rank < 4; rank++) {
                int64_t sum = 0;
                for (int e = 0; e < 16; e++) {
                    int32_t rows = moe_routing_counts(r, l, rank)[e];
                    assert_in_range(rows, 0, tokens[rank]); /* an expert at most once a token */
                    sum += rows;
                }
                assert_int_equal(sum, 5 * tokens[rank]);
                assert_int_equal(r->tokens[rank], tokens[rank]);
            }
        moe_routing_free(r);
    }
    moe_routing_free(NULL);
}

/* K = E: every token goes to every expert. K = 1 with a skew of 2000: the second expert has weight 2^-2000 =
 * 0, so all tokens go to one expert of the layer; with K = 3 it still takes every token, beside two without
 * weight. */
static void test_by_hand(void **state)
{
    (void)state;
    const int64_t tokens[] = {9, 4};
    struct moe_routing *r = moe_routing_generate(2, 2, 6, 6, tokens, 1, 1);
    for (int l = 0; l < 2; l++)
        for (int rank = 0; rank < 2; rank++)
            for (int e = 0; e < 6; e++) assert_int_equal(moe_routing_counts(r, l, rank)[e], tokens[rank]);
    moe_routing_free(r);
    int first, expert;
    r = moe_routing_generate(1, 2, 6, 1, tokens, 2000, 1);
    assert_int_equal(busiest(r, 0, &first), 13);
    moe_routing_free(r);
    r = moe_routing_generate(1, 2, 6, 3, tokens, 2000, 1);
    assert_int_equal(moe_routing_counts(r, 0, 1)[first], 4);
    moe_routing_free(r);
    /* No skew, K = 2 of E = 4, T = 40,000: each expert has T K / E = 20,000 rows; the deviation of a binomial
     * with p = 1/2 is 100, five of them 500. */
    const int64_t many = 40000;
    r = moe_routing_generate(1, 1, 4, 2, &many, 0, 5);
    for (int e = 0; e < 4; e++) assert_in_range(moe_routing_counts(r, 0, 0)[e], 19500, 20500);
    moe_routing_free(r);
    /* Skew 1, K = 2 of E = 3: weights 6, 3, 2 of 11. The heaviest is drawn first with 6/11, or second after
     * 3 (3/11 * 6/8) or 2 (2/11 * 6/9): 0.545 + 0.205 + 0.121 = 0.8712. Of 40,000: 34,848, deviation 67. */
    r = moe_routing_generate(1, 1, 3, 2, &many, 1, 5);
    assert_in_range(busiest(r, 0, &expert), 34848 - 335, 34848 + 335);
    moe_routing_free(r);
}

static void test_repeats(void **state)
{
    (void)state;
    const int64_t tokens[] = {64, 32, 64};
    struct moe_routing *a = moe_routing_generate(2, 3, 8, 2, tokens, 1, 7);
    struct moe_routing *b = moe_routing_generate(2, 3, 8, 2, tokens, 1, 7);
    struct moe_routing *c = moe_routing_generate(2, 3, 8, 2, tokens, 1, 8);
    assert_true(same(a, b));
    assert_false(same(a, c));
    /* Ranks and layers draw for themselves. */
    size_t row = 8 * sizeof(int32_t);
    assert_memory_not_equal(moe_routing_counts(a, 0, 0), moe_routing_counts(a, 0, 2), row);
    assert_memory_not_equal(moe_routing_counts(a, 0, 0), moe_routing_counts(a, 1, 0), row);
    moe_routing_free(a);
    moe_routing_free(b);
    moe_routing_free(c);
}

/* One draw, as the header says it, in the plainest way: the n-th number of the stream is laid along the
 * weights, again while it hits a taken expert, 15 times. After that the free ones are laid
 * out by themselves. */
static int drawn(const double *weight, const bool *taken, int E, uint64_t stream, uint64_t nth)
{
    double all = 0, before, u;
    for (int e = 0; e < E; e++) all += weight[e];
    for (uint64_t i = 0; i < 15; i++) {
        int e = 0;
        u = moe_uniform(3, stream, nth * 16 + i) * all;
        for (before = weight[0]; before <= u && e < E - 1; before += weight[++e]) {
        }
        if (!taken[e]) return e;
    }
    int last = -1;
    before = 0;
    for (int e = 0; e < E; e++) before += taken[e] ? 0 : weight[e];
    u = moe_uniform(3, stream, nth * 16 + 15) * before;
    for (int e = 0; e < E && (last < 0 || u >= 0); e++) {
        if (taken[e]) continue;
        if (last < 0 || weight[e] > 0) last = e;
        u -= weight[e];
    }
    return last;
}

/* 4,200 tokens are more than are counted at a time; with skew 60 all but one expert weigh next to nothing. */
static void test_draws_one_by_one(void **state)
{
    (void)state;
    enum { E = 24, K = 4 };
    const int64_t tokens[] = {4200, 33};
    const double skews[] = {0, 0.5, 1.5, 60};
    for (int s = 0; s < 4; s++) {
        struct moe_routing *r = moe_routing_generate(2, 2, E, K, tokens, skews[s], 3);
        for (int i = 0; i < 4; i++) {
            double weight[E];
            int32_t want[E] = {0};
            uint64_t layer = (uint64_t)(i / 2) << 32;
            for (int e = 0; e < E; e++) { /* Fisher and Yates */
                int other = (int)(moe_uniform(3, layer, (uint64_t)e) * (e + 1));
                weight[e] = weight[other];
                weight[other] = pow(1 + e, -skews[s]);
            }
            for (int64_t t = 0; t < tokens[i % 2]; t++) {
                bool taken[E] = {false};
                for (int k = 0; k < K; k++) {
                    int e = drawn(weight, taken, E, layer | (uint32_t)(i % 2 + 1), (uint64_t)(t * K + k));
                    taken[e] = true;
                    want[e]++;
                }
            }
            assert_memory_equal(moe_routing_counts(r, i / 2, i % 2), want, sizeof want);
        }
        moe_routing_free(r);
    }
}

/* Valid until the next call. */
static const int32_t *peers(const struct moe_routing *r, int layer, int rank, int P)
{
    static int32_t out[16];
    assert_true(P <= 16);
    memset(out, 0xff, sizeof out);
    moe_routing_peers(r, layer, rank, P, out);
    return out;
}

/* More tokens than are counted at a time, each to every expert. */
static void test_many_tokens(void **state)
{
    (void)state;
    const int64_t tokens[] = {10000, 4096};
    struct moe_routing *r = moe_routing_generate(1, 2, 4, 4, tokens, 1, 1);
    for (int rank = 0; rank < 2; rank++) {
        for (int e = 0; e < 4; e++) assert_int_equal(moe_routing_counts(r, 0, rank)[e], tokens[rank]);
        for (int p = 0; p < 2; p++) assert_int_equal(peers(r, 0, rank, 2)[p], tokens[rank]);
    }
    moe_routing_free(r);
}

/* Groups of 1, 2, 3 and 6 split 6 experts of 6 ranks. Tokens with the experts 0 1, 2 5 and 4 3, then 4 5: by
 * hand, with tokens counted in two calls. */
static void test_peers_by_hand(void **state)
{
    (void)state;
    const int32_t expert[] = {0, 1, 2, 5, 4, 3, 4, 5};
    struct moe_routing *r = moe_routing_new(2, 6, 6, 2);
    moe_routing_add(r, 1, 4, 3, expert);
    moe_routing_add(r, 1, 4, 1, expert + 6);
    assert_memory_equal(moe_routing_counts(r, 1, 4), ((int32_t[]){1, 1, 1, 1, 2, 2}), 24);
    assert_memory_equal(peers(r, 1, 4, 1), ((int32_t[]){4}), 4);
    assert_memory_equal(peers(r, 1, 4, 2), ((int32_t[]){2, 3}), 8);
    assert_memory_equal(peers(r, 1, 4, 3), ((int32_t[]){1, 2, 3}), 12);
    assert_memory_equal(peers(r, 1, 4, 6), ((int32_t[]){1, 1, 1, 1, 2, 2}), 24);
    for (int P = 1; P <= 3; P++) assert_memory_equal(peers(r, 1, 3, P), ((int32_t[3]){0}), (size_t)P * 4);
    moe_routing_free(r);
}

/* Where a token has one expert, the tokens of a member are the rows of its experts: so what is drawn again
 * for the peers is what was drawn for the counts. */
static void test_peers_are_drawn_as_counts(void **state)
{
    (void)state;
    const int64_t tokens[] = {5000, 70, 0, 300};
    struct moe_routing *r = moe_routing_generate(3, 4, 8, 1, tokens, 1, 5);
    assert_null(r->peers); /* none is kept */
    for (int at = 0; at < 12; at++)
        for (int P = 1; P <= 4; P *= 2) {
            int32_t rows[4] = {0};
            for (int e = 0; e < 8; e++) rows[e * P / 8] += moe_routing_counts(r, at / 4, at % 4)[e];
            assert_memory_equal(peers(r, at / 4, at % 4, P), rows, (size_t)P * sizeof *rows);
        }
    moe_routing_free(r);
}

/* 2 stages of 2 layers and 2 ranks, 3 micro-batches: in the layers of its stage, as the schedule has them, a
 * rank draws what it draws without a pipeline, in others nothing. */
static void test_stages(void **state)
{
    (void)state;
    enum { LAYERS = 4, MICRO = 3, E = 8 };
    struct moe_scenario *sc = fixture_layout(LAYERS, 4, 1, "pipeline_parallel: 2, micro_batches: 3",
                                             "[5, 3, 5, 3]", "routing: {skew: 1, seed: 4}");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = moe_scenario_routing(sc),
                       *all = moe_routing_generate(LAYERS * MICRO, 4, E, 2, sc->tokens, 1, 4);
    static const int32_t none[E];
    for (int l = 0; l < LAYERS * MICRO; l++)
        for (int rank = 0; rank < 4; rank++) {
            const struct moe_role *role = &s->roles[s->role_of[rank]];
            bool own = l % LAYERS >= role->first_layer && l % LAYERS < role->end_layer;
            int32_t expected[4] = {0};
            if (own) moe_routing_peers(all, l, rank, 4, expected);
            assert_memory_equal(moe_routing_counts(r, l, rank), own ? moe_routing_counts(all, l, rank) : none,
                                sizeof none);
            assert_memory_equal(peers(r, l, rank, 4), expected, sizeof expected);
        }
    moe_routing_free(r);
    moe_routing_free(all);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Without skew a token has an expert of a given member of P with probability 1 - C(E - E/P, K) / C(E, K).
 * With E = 16, K = 4, T = 40,000: P = 2: 1 - C(8,4) / C(16,4) = 1 - 70 / 1820 = 0.96154; P = 4: 1 - 495 /
 * 1820 = 0.72802; P = 8: 1 - 1001 / 1820 = 0.45. Five deviations are at most 500. */
static void test_peers_uniform(void **state)
{
    (void)state;
    const int64_t tokens[] = {40000, 0, 0, 0, 0, 0, 0, 0};
    static const int64_t expected[][2] = {{1, 40000}, {2, 38462}, {4, 29121}, {8, 18000}};
    struct moe_routing *r = moe_routing_generate(1, 8, 16, 4, tokens, 0, 9);
    for (int i = 0; i < 4; i++)
        for (int p = 0; p < expected[i][0]; p++)
            assert_in_range(peers(r, 0, 0, (int)expected[i][0])[p], expected[i][1] - (i ? 500 : 0),
                            expected[i][1] + (i ? 500 : 0));
    moe_routing_free(r);
}

/* 4,000 tokens, K = 4, E = 64. No skew: mean 250 rows an expert, deviation 15, the busiest of 64 some 3 of
 * them above. Zipf: one draw hits the heaviest with 1 / H(64) = 0.21, four rarely miss more than half.
 * Square: with 6 / pi^2 = 0.61 at once. */
static void test_skew(void **state)
{
    (void)state;
    const int64_t tokens[] = {2000, 2000};
    static const struct {
        double skew;
        int64_t low, high;
    } cases[] = {{0, 260, 330}, {1, 2000, 3200}, {2, 3600, 4000}};
    for (int i = 0; i < 3; i++) {
        int expert;
        struct moe_routing *r = moe_routing_generate(1, 2, 64, 4, tokens, cases[i].skew, 3);
        assert_in_range(busiest(r, 0, &expert), cases[i].low, cases[i].high);
        moe_routing_free(r);
    }
}

/* The busiest expert differs from layer to layer, and every expert is busiest somewhere. */
static void test_order_per_layer(void **state)
{
    (void)state;
    enum { LAYERS = 400, EXPERTS = 8 };
    const int64_t tokens = 200;
    int layers_of[EXPERTS] = {0};
    struct moe_routing *r = moe_routing_generate(LAYERS, 1, EXPERTS, 1, &tokens, 3, 11);
    for (int l = 0; l < LAYERS; l++) {
        int expert;
        assert_true(busiest(r, l, &expert) > 120);
        layers_of[expert]++;
    }
    /* 50 of 400 each; the deviation is 6.6. */
    for (int e = 0; e < EXPERTS; e++) assert_in_range(layers_of[e], 20, 80);
    moe_routing_free(r);
}

/* ---- traces ---- */

#define PATH "test_routing.db"

static struct moe_store *new_trace(int n_ranks, int n_steps)
{
    struct moe_store *s;
    assert_int_equal(moe_store_open(PATH, MOE_STORE_CREATE, &s), MOE_OK);
    const char *const run[][2] = {{"layers", "2"}, {"experts", "4"}, {"top_k", "2"}};
    for (int i = 0; i < 3; i++) assert_int_equal(moe_store_put(s, run[i][0], run[i][1]), MOE_OK);
    for (int r = 0; r < n_ranks; r++) {
        assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){.rank = r}), MOE_OK);
        for (int step = 0; step < n_steps - r; step++) { /* rank 1 lacks the last step */
            /* Two tokens: experts 0 1, r 3; in layer 1: 2 3, step 3. */
            int32_t ids[][4] = {{0, 1, r, 3}, {2, 3, step, 3}};
            for (int l = 0; l < 2; l++)
                assert_int_equal(moe_store_add_routing(s, step, l, r, 2, 2, ids[l]), MOE_OK);
            assert_int_equal(moe_store_add_step(s, step, r, 1, 1), MOE_OK);
        }
    }
    return s;
}

static void end_trace(struct moe_store *s)
{
    moe_store_close(s);
    remove(PATH);
}

static void test_load(void **state)
{
    (void)state;
    struct moe_store *s = new_trace(2, 3);
    struct moe_routing *r;
    assert_int_equal(moe_routing_load(s, -1, &r), MOE_OK); /* step 1: the last of both ranks */
    const int32_t counts[] = {2, 1, 0, 1, /* layer 0 rank 0 */ 1, 2, 0, 1,
                              0, 1, 1, 2, /* layer 1 */ 0,        1, 1, 2};
    assert_int_equal(n_counts(r), 16);
    assert_memory_equal(r->counts, counts, sizeof counts);
    assert_true(r->tokens[0] == 2 && r->tokens[1] == 2 && r->top_k == 2);
    /* Layer 0: experts 0 1, r 3, so two members each; layer 1: 2 3, 1 3. */
    assert_memory_equal(peers(r, 0, 0, 2), ((int32_t[]){2, 1}), 8);
    assert_memory_equal(peers(r, 1, 1, 2), ((int32_t[]){1, 2}), 8);
    moe_routing_free(r);
    assert_int_equal(moe_routing_load(s, 0, &r), MOE_OK);
    assert_int_equal(moe_routing_counts(r, 1, 0)[0], 1);
    moe_routing_free(r);
    assert_int_equal(moe_routing_load(s, 2, &r), MOE_EINPUT);
    assert_null(r);
    assert_string_equal(moe_error(), "the trace has no complete step 2, expected 0 to 1");
    /* Both ranks did step 3: step 2 is between complete ones, and incomplete all the same. */
    const int32_t ids[] = {0, 1};
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(moe_store_add_step(s, 3, rank, 1, 1), MOE_OK);
        for (int l = 0; l < 2; l++) {
            assert_int_equal(moe_store_add_routing(s, 3, l, rank, 1, 2, ids), MOE_OK);
            if (rank) assert_int_equal(moe_store_add_routing(s, 2, l, rank, 2, 2, (int32_t[4]){0}), MOE_OK);
        }
    }
    assert_int_equal(moe_routing_load(s, 3, &r), MOE_OK);
    moe_routing_free(r);
    assert_int_equal(moe_routing_load(s, 2, &r), MOE_EINPUT);
    assert_string_equal(moe_error(), "the trace has no complete step 2, expected 0 to 3");
    end_trace(s);
}

static void assert_refused(struct moe_store *s, const char *text)
{
    struct moe_routing *r;
    assert_int_equal(moe_routing_load(s, -1, &r), MOE_EINPUT);
    if (!strstr(moe_error(), text)) fail_msg("'%s' does not say '%s'", moe_error(), text);
}

static void test_load_refuses(void **state)
{
    (void)state;
    struct moe_store *s = new_trace(2, 1);
    assert_refused(s, "the trace has no complete step");
    end_trace(s);
    s = new_trace(2, 2);
    assert_int_equal(moe_store_put(s, "experts", "3"), MOE_OK);
    assert_refused(s, "step 0 of the trace, layer 0, rank 0: expert 3 of 3");
    assert_int_equal(moe_store_put(s, "experts", "4"), MOE_OK);
    assert_int_equal(moe_store_put(s, "top_k", "1"), MOE_OK);
    assert_refused(s, "step 0 of the trace, layer 0, rank 0: tokens go to 2 experts each, expected top_k 1");
    assert_int_equal(moe_store_put(s, "top_k", "2"), MOE_OK);
    assert_int_equal(moe_store_put(s, "layers", "3"), MOE_OK);
    assert_refused(s, "step 0 of the trace has no routing for layer 2, rank 0");
    assert_int_equal(moe_store_put(s, "layers", "2000000000"), MOE_OK);
    assert_refused(s, "says layers 2000000000");
    assert_int_equal(moe_store_put(s, "layers", "0"), MOE_OK);
    assert_refused(s, "says layers 0");
    /* A layer with other tokens than the first one. */
    const int32_t ids[2] = {0, 1};
    assert_int_equal(moe_store_put(s, "layers", "2"), MOE_OK);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(moe_store_add_routing(s, 2, 0, r, 1, 2, ids), MOE_OK);
        assert_int_equal(moe_store_add_routing(s, 2, 1, r, 0, 2, ids), MOE_OK);
        assert_int_equal(moe_store_add_step(s, 2, r, 1, 1), MOE_OK);
    }
    assert_refused(s, "step 2 of the trace, layer 1, rank 0: 0 tokens, expected 1");
    end_trace(s);
}

/* 2 stages of 2 ranks, of 2 tokens and 1; layers 0 and 2 are of the first, 1 and 3 of the second. tokens [L]:
 * one digit a rank. */
static void write_stages(struct moe_store *s, const char *const *tokens)
{
    const int32_t ids[4] = {0, 1, 2, 3};
    const char *const run[][2] = {{"layers", "4"}, {"experts", "4"}, {"top_k", "2"}, {"stages", "2"}};
    for (int i = 0; i < 4; i++) assert_int_equal(moe_store_put(s, run[i][0], run[i][1]), MOE_OK);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){.rank = rank}), MOE_OK);
        for (int l = 0; l < 4; l++)
            assert_int_equal(moe_store_add_routing(s, 0, l, rank, tokens[l][rank] - '0', 2, ids), MOE_OK);
        assert_int_equal(moe_store_add_step(s, 0, rank, 1, 1), MOE_OK);
    }
}

static void test_load_stages(void **state)
{
    (void)state;
    static const struct {
        const char *tokens[4], *said; /* NULL: right */
    } of[] = {{{"2100", "0021", "2100", "0021"}, NULL},
              {{"2000", "0020", "2000", "0020"}, NULL}, /* rank 1 has none anywhere */
              {{"0000", "0000", "0000", "0000"}, NULL},
              {{"2100", "0021", "0000", "0021"}, "layer 2, rank 0: 0 tokens, expected 2"},
              {{"2100", "0021", "2000", "0021"}, "layer 2, rank 1: 0 tokens, expected 1"},
              {{"2100", "0021", "2110", "0021"}, "layer 2, rank 2: 1 tokens, expected 0"},
              {{"2100", "0021", "2100", "0011"}, "layer 3, rank 2: 1 tokens, expected 2"}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
        struct moe_store *s;
        struct moe_routing *r;
        assert_int_equal(moe_store_open(PATH, MOE_STORE_CREATE, &s), MOE_OK);
        write_stages(s, of[i].tokens);
        if (of[i].said) {
            assert_refused(s, of[i].said);
        } else {
            assert_int_equal(moe_routing_load(s, 0, &r), MOE_OK);
            assert_int_equal(r->tokens[0], of[i].tokens[0][0] - '0');
            assert_int_equal(r->tokens[2], r->tokens[0]);
            moe_routing_free(r);
        }
        for (int bad = 0; bad < 3; bad++) {
            static const char *const stages[] = {"3", "0", "2x"};
            assert_int_equal(moe_store_put(s, "stages", stages[bad]), MOE_OK);
            assert_refused(s, "expected a divisor of its ranks, 4");
        }
        end_trace(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_repeats),
        cmocka_unit_test(test_draws_one_by_one),
        cmocka_unit_test(test_many_tokens),
        cmocka_unit_test(test_peers_by_hand),
        cmocka_unit_test(test_peers_are_drawn_as_counts),
        cmocka_unit_test(test_stages),
        cmocka_unit_test(test_peers_uniform),
        cmocka_unit_test(test_skew),
        cmocka_unit_test(test_order_per_layer),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_load_refuses),
        cmocka_unit_test(test_load_stages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
