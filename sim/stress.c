/* stress.c - see stress.h. */
#include "sim/stress.h"

#include "sim/lower/lower.h"

#include <stdlib.h>
#include <string.h>

/* Which experts a rank's rows may go to: `from` .. from + n - 1, all others when `others`. */
struct range {
    int from, n;
    bool others;
};

static struct range anywhere(const struct moe_scenario *sc, int rank)
{
    (void)rank;
    return (struct range){0, (int)sc->experts, false};
}
static struct range first_experts(const struct moe_scenario *sc, int rank)
{
    (void)rank;
    return (struct range){0, (int)sc->top_k, false};
}
static struct range experts_of_one_rank(const struct moe_scenario *sc, int rank)
{
    (void)rank;
    return (struct range){0, (int)(sc->experts / sc->expert_parallel), false};
}
static struct range not_the_first(const struct moe_scenario *sc, int rank)
{
    (void)rank, (void)sc;
    return (struct range){0, 1, true};
}
static struct range not_the_first_rank(const struct moe_scenario *sc, int rank)
{
    (void)rank;
    return (struct range){0, (int)(sc->experts / sc->expert_parallel), true};
}
/* Even ranks spread, odd ones do not. */
static struct range apart(const struct moe_scenario *sc, int rank)
{
    return rank % 2 ? (struct range){rank % (int)(sc->experts - sc->top_k + 1), (int)sc->top_k, false}
                    : anywhere(sc, rank);
}

static const struct routing {
    const char *text;
    struct range (*range)(const struct moe_scenario *sc, int rank);
} routings[] = {
    {"rows spread evenly", anywhere},
    {"all tokens to the first experts", first_experts},
    {"all tokens to the experts of one rank", experts_of_one_rank},
    {"no token to the first expert", not_the_first},
    {"no token to the experts of the first rank", not_the_first_rank},
    {"every other rank to a few experts", apart},
};
enum { EQUAL, ONE_LESS, ONE_ALONE, TOKEN_PATTERNS };
static const char *const token_text[] = {"as many tokens on all ranks", "one token less on the last rank",
                                         "one token on the last rank"};
enum { N_ROUTINGS = sizeof routings / sizeof *routings };

static int64_t tokens_of(const struct moe_scenario *sc, int rank, int64_t most, int pattern)
{
    int64_t each = sc->ranks / sc->pipeline_parallel;
    bool last = rank % each == each - 1;
    return !last || pattern == EQUAL ? most : pattern == ONE_LESS ? most - 1 : 1;
}

/* Row i of a rank goes to expert i of its range, round and round: K rows of a token are on different experts
 * when there are as many. */
static bool set_counts(const struct moe_scenario *sc, int rank, struct range range, int32_t *counts)
{
    int E = (int)sc->experts, n = range.others ? E - range.n : range.n;
    if (n < sc->top_k) return false;
    memset(counts, 0, (size_t)E * sizeof *counts);
    for (int64_t i = 0; i < sc->tokens[rank] * sc->top_k; i++)
        counts[range.from + (range.others ? range.n : 0) + (int)(i % n)]++;
    return true;
}

static bool make(struct moe_scenario *sc, int64_t most, int pattern, const struct routing *routing)
{
    size_t E = (size_t)sc->experts, each = (size_t)sc->ranks * E;
    for (int r = 0; r < sc->ranks; r++) {
        sc->tokens[r] = tokens_of(sc, r, most, pattern);
        if (!sc->tokens[r] && sc->loss == MOE_MEAN_OF_RANKS) return false;
        if (!set_counts(sc, r, routing->range(sc, r), sc->counts + (size_t)r * E)) return false;
    }
    for (int64_t l = 1; l < sc->layers * sc->micro_batches; l++)
        memcpy(sc->counts + (size_t)l * each, sc->counts, each * sizeof *sc->counts);
    return true;
}

struct stress {
    struct moe_scenario sc;
    uint32_t classes; /* seen */
    uint32_t always;  /* of the scenario's own size with evenly spread rows */
    int n_tried;
    void (*found)(void *ctx, const struct moe_stressed *s);
    void *ctx;
};

/* *classes: bits of those with an error. Verdicts of a new class are handed on, if asked. */
static int try_one(struct stress *st, const char *routing, const char *tokens, bool tell, uint32_t *classes)
{
    struct moe_schedule *s = NULL;
    struct moe_verdicts v;
    *classes = 0;
    MOE_TRY(moe_lower(&st->sc, &s));
    struct moe_routing *r = moe_scenario_routing(&st->sc);
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++)
        if (v.item[i].severity == MOE_SEVERITY_ERROR) *classes |= 1u << v.item[i].check_class;
    if (*classes & ~st->classes && tell) {
        st->found(st->ctx, &(struct moe_stressed){routing, tokens, &st->sc, &v});
        st->classes |= *classes;
    }
    st->n_tried++;
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    return MOE_OK;
}

static int try_size(struct stress *st, int64_t most)
{
    uint32_t plain = 0, classes;
    if (make(&st->sc, most, EQUAL, &routings[0]))
        MOE_TRY(try_one(st, routings[0].text, token_text[EQUAL], false, &plain));
    if (plain & ~st->always) return MOE_OK; /* the size alone is too small for it */
    for (int pattern = 0; pattern < TOKEN_PATTERNS; pattern++)
        for (int i = 0; i < N_ROUTINGS; i++) {
            if (pattern == EQUAL && i == 0 && !plain) continue; /* as above */
            /* One rank has no last; of one token one less is none, and one alone is equal. */
            if (pattern && st->sc.ranks == st->sc.pipeline_parallel) continue;
            if (pattern == ONE_ALONE && most <= 2) continue;
            if (!make(&st->sc, most, pattern, &routings[i])) continue;
            MOE_TRY(try_one(st, routings[i].text, token_text[pattern], true, &classes));
        }
    return MOE_OK;
}

int moe_stress(const struct moe_scenario *sc, void (*found)(void *ctx, const struct moe_stressed *s),
               void *ctx, int *n_tried)
{
    struct stress st = {.sc = *sc, .found = found, .ctx = ctx};
    int64_t most = 1;
    int err = MOE_OK;
    st.sc.tokens = moe_alloc((size_t)sc->ranks, sizeof *st.sc.tokens);
    st.sc.counts =
        moe_alloc((size_t)(sc->layers * sc->micro_batches * sc->ranks * sc->experts), sizeof *st.sc.counts);
    for (int r = 0; r < sc->ranks; r++)
        if (sc->tokens[r] > most) most = sc->tokens[r];
    if (make(&st.sc, most, EQUAL, &routings[0]))
        err = try_one(&st, routings[0].text, token_text[EQUAL], false, &st.always);
    for (int64_t at = 1; at <= most && err >= 0;) {
        err = try_size(&st, at);
        int64_t next = at + (at < 4 ? 1 : at / 2);
        at = at < most && next > most ? most : next;
    }
    free(st.sc.tokens);
    free(st.sc.counts);
    *n_tried = st.n_tried;
    return err;
}
