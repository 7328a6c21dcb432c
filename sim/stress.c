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
    {"all tokens to a few experts", apart},
};
enum { EQUAL, ONE_LESS, ONE_ALONE, TOKEN_PATTERNS };
enum { N_ROUTINGS = sizeof routings / sizeof *routings, N_CLASSES = 32, MOST_STEPS = 64 };

struct trial { /* ranks of a stage; those of other stages do the same */
    int routing;
    int64_t *tokens;
    bool *adverse; /* it routes so, not evenly */
};

struct tried {
    uint64_t key;
    uint32_t classes;
};

struct stress {
    struct moe_scenario sc;
    int n;           /* ranks of a stage */
    int64_t least;   /* tokens of a rank */
    uint32_t always; /* classes of the scenario's own size with evenly spread rows */
    int n_tried, limit, cap_tried;
    struct tried *tried;          /* [n_tried] */
    int64_t too_small[N_CLASSES]; /* as of struct moe_stressed */
    bool cut;                     /* the limit was reached */
    bool unknown;                 /* and the last question was not answered for it */
};

static struct trial new_trial(const struct stress *st)
{
    return (struct trial){.tokens = moe_alloc((size_t)st->n, sizeof(int64_t)),
                          .adverse = moe_alloc((size_t)st->n, sizeof(bool))};
}
static void free_trial(struct trial *t)
{
    free(t->tokens);
    free(t->adverse);
}
static void copy_trial(const struct stress *st, struct trial *to, const struct trial *from)
{
    to->routing = from->routing;
    memcpy(to->tokens, from->tokens, (size_t)st->n * sizeof *to->tokens);
    memcpy(to->adverse, from->adverse, (size_t)st->n * sizeof *to->adverse);
}
static int64_t tokens_in(const struct stress *st, const struct trial *t)
{
    int64_t sum = 0;
    for (int r = 0; r < st->n; r++) sum += t->tokens[r];
    return sum;
}
static int adverse_in(const struct stress *st, const struct trial *t)
{
    int sum = 0;
    for (int r = 0; r < st->n; r++) sum += t->adverse[r];
    return sum;
}

static void make(const struct stress *st, int routing, int pattern, int64_t most, struct trial *out)
{
    out->routing = routing;
    for (int r = 0; r < st->n; r++) {
        out->tokens[r] = r < st->n - 1 || pattern == EQUAL ? most : pattern == ONE_LESS ? most - 1 : 1;
        out->adverse[r] = routing > 0;
    }
}

/* K rows of a token are on different experts when there are as many: row i goes to expert i of the range,
 * round and round. */
static bool set_counts(const struct moe_scenario *sc, struct range range, int64_t tokens, int32_t *counts)
{
    int E = (int)sc->experts, n = range.others ? E - range.n : range.n;
    int from = range.from + (range.others ? range.n : 0);
    if (n < sc->top_k) return false;
    memset(counts, 0, (size_t)E * sizeof *counts);
    for (int i = 0; i < n; i++)
        counts[from + i] = (int32_t)(tokens * sc->top_k / n + (i < tokens * sc->top_k % n));
    return true;
}

/* Result: false when there is no such scenario. */
static bool set_scenario(struct stress *st, const struct trial *t)
{
    struct moe_scenario *sc = &st->sc;
    size_t E = (size_t)sc->experts, each = (size_t)sc->ranks * E;
    bool any = false;
    for (int r = 0; r < sc->ranks; r++) {
        int of = r % st->n;
        sc->tokens[r] = t->tokens[of];
        if (sc->tokens[r] < st->least) return false;
        any |= sc->tokens[r] > 0;
        struct range range = routings[t->adverse[of] ? t->routing : 0].range(sc, of);
        if (!set_counts(sc, range, sc->tokens[r], sc->counts + (size_t)r * E)) return false;
    }
    for (int64_t l = 1; l < sc->layers * sc->micro_batches; l++)
        memcpy(sc->counts + (size_t)l * each, sc->counts, each * sizeof *sc->counts);
    return any;
}

/* Of tokens and counts; those of other layers and stages follow. */
static uint64_t key_of(const struct stress *st)
{
    uint64_t key = 0;
    for (int r = 0; r < st->n; r++) {
        key = moe_hash64(key ^ (uint64_t)st->sc.tokens[r]);
        for (int64_t e = 0; e < st->sc.experts; e++)
            key = moe_hash64(key ^ (uint64_t)st->sc.counts[r * st->sc.experts + e]);
    }
    return key;
}

static int check(struct stress *st, struct moe_verdicts *out)
{
    struct moe_schedule *s = NULL;
    MOE_TRY(moe_lower(&st->sc, &s));
    struct moe_routing *r = moe_scenario_routing(&st->sc);
    moe_check(s, r, out);
    moe_routing_free(r);
    moe_schedule_free(s);
    return MOE_OK;
}

/* *classes: bits of those with an error; none where there is no such scenario, or the limit is reached. */
static int try_one(struct stress *st, const struct trial *t, uint32_t *classes)
{
    struct moe_verdicts v;
    *classes = 0;
    if (!set_scenario(st, t)) return MOE_OK;
    uint64_t key = key_of(st);
    for (int i = 0; i < st->n_tried; i++)
        if (st->tried[i].key == key) {
            *classes = st->tried[i].classes;
            return MOE_OK;
        }
    if (st->n_tried >= st->limit) {
        st->cut = st->unknown = true;
        return MOE_OK;
    }
    MOE_TRY(check(st, &v));
    for (int i = 0; i < v.n; i++)
        if (v.item[i].severity == MOE_SEVERITY_ERROR) *classes |= 1u << v.item[i].check_class;
    moe_verdicts_free(&v);
    st->tried = moe_grow(st->tried, &st->cap_tried, st->n_tried + 1, sizeof *st->tried);
    st->tried[st->n_tried++] = (struct tried){key, *classes};
    return MOE_OK;
}

/* The same without the classes that its size alone is too small for. */
static int try_adverse(struct stress *st, const struct trial *t, uint32_t *classes)
{
    uint32_t plain = 0;
    int64_t most = 0;
    st->unknown = false;
    MOE_TRY(try_one(st, t, classes));
    if (!(*classes & ~st->always)) return MOE_OK;
    for (int r = 0; r < st->n; r++)
        if (t->tokens[r] > most) most = t->tokens[r];
    struct trial even = new_trial(st);
    make(st, 0, EQUAL, most, &even);
    int err = try_one(st, &even, &plain);
    free_trial(&even);
    plain &= ~st->always;
    for (int i = 0; i < N_CLASSES; i++)
        if (*classes & plain & 1u << i && most > st->too_small[i]) st->too_small[i] = most;
    *classes &= ~plain;
    if (st->unknown) *classes &= st->always;
    return err;
}

/* Takes `next` for `t` where it shows the class too. */
static int keep(struct stress *st, struct trial *t, const struct trial *next, uint32_t class, bool *kept)
{
    uint32_t classes;
    MOE_TRY(try_adverse(st, next, &classes));
    *kept = classes & class;
    if (*kept) copy_trial(st, t, next);
    return MOE_OK;
}

/* Bisection, then single steps, of the value at *at: tokens of one rank, or (rank < 0) the size. */
static int shrink_value(struct stress *st, struct trial *t, int pattern, int rank, int64_t high, int64_t low,
                        uint32_t class)
{
    struct trial next = new_trial(st);
    int err = MOE_OK, steps = 0;
    bool bisects = true, kept;
    while (!st->cut && high - low > 0) {
        int64_t at = bisects ? low + (high - low) / 2 : high - 1 - steps;
        if (!bisects && (steps++ == MOST_STEPS || at < st->least)) break;
        copy_trial(st, &next, t);
        if (rank < 0)
            make(st, t->routing, pattern, at, &next);
        else
            next.tokens[rank] = at;
        MOE_TRY_GOTO(keep(st, t, &next, class, &kept));
        if (kept) high = at, steps = 0;
        if (!kept && bisects) low = at + 1;
        if (high == low && bisects) bisects = false, low = -1;
    }
done:
    free_trial(&next);
    return err;
}

/* Half of the ranks, a quarter, ... one: without tokens, or evened out. */
static int shrink_groups(struct stress *st, struct trial *t, bool tokens, uint32_t class)
{
    struct trial next = new_trial(st);
    int err = MOE_OK;
    bool kept;
    for (int size = st->n; size > 0; size /= 2)
        for (int end = st->n; end > 0; end -= size) {
            bool changed = false;
            copy_trial(st, &next, t);
            for (int r = end > size ? end - size : 0; r < end; r++) {
                changed |= tokens ? next.tokens[r] > st->least : next.adverse[r];
                if (tokens)
                    next.tokens[r] = st->least;
                else
                    next.adverse[r] = false;
            }
            if (changed) MOE_TRY_GOTO(keep(st, t, &next, class, &kept));
        }
done:
    free_trial(&next);
    return err;
}

static int shrink(struct stress *st, struct trial *t, int pattern, int64_t size, uint32_t class)
{
    int64_t tokens;
    int adverse;
    MOE_TRY(shrink_value(st, t, pattern, -1, size, 0, class));
    do {
        tokens = tokens_in(st, t);
        adverse = adverse_in(st, t);
        MOE_TRY(shrink_groups(st, t, true, class));
        for (int r = st->n - 1; r >= 0; r--)
            if (t->tokens[r] > st->least)
                MOE_TRY(shrink_value(st, t, pattern, r, t->tokens[r], st->least, class));
        MOE_TRY(shrink_groups(st, t, false, class));
        for (int r = 0; r < st->n; r++) t->adverse[r] &= t->tokens[r] > 0;
    } while (tokens_in(st, t) < tokens || adverse_in(st, t) < adverse);
    if (!adverse_in(st, t)) t->routing = 0;
    return MOE_OK;
}

/* ---- the search ---- */

struct sweep {
    int n;
    int64_t *size;                                        /* [n] ascending */
    uint32_t seen[TOKEN_PATTERNS][N_ROUTINGS];            /* classes */
    int64_t first[N_CLASSES][TOKEN_PATTERNS][N_ROUTINGS]; /* the size that showed the class first; 0: none */
};

/* 1, 2, 3, 4, 6, 9, ... and the scenario's own; every other one of them where so many cannot be tried. */
static void choose_sizes(const struct stress *st, int64_t most, struct sweep *w)
{
    int cap = 0, room = st->limit / 3 / (TOKEN_PATTERNS * N_ROUTINGS);
    for (int64_t at = 1; at < most; at += at < 4 ? 1 : at / 2) {
        w->size = moe_grow(w->size, &cap, w->n + 2, sizeof *w->size);
        w->size[w->n++] = at;
    }
    w->size = moe_grow(w->size, &cap, w->n + 1, sizeof *w->size);
    w->size[w->n++] = most;
    while (w->n > 2 && w->n > room) {
        int kept = 0;
        for (int i = 0; i < w->n; i += 2) w->size[kept++] = w->size[i];
        w->n = kept;
        w->size[kept - 1] = most;
    }
}

static int sweep(struct stress *st, struct sweep *w, struct trial *t)
{
    for (int i = 0; i < w->n; i++)
        for (int pattern = 0; pattern < TOKEN_PATTERNS; pattern++)
            for (int k = 0; k < N_ROUTINGS; k++) {
                uint32_t classes;
                if (pattern && st->n == 1) continue; /* one rank has no last */
                make(st, k, pattern, w->size[i], t);
                MOE_TRY(try_adverse(st, t, &classes));
                for (int class = 0; class < N_CLASSES; class ++)
                    if (classes & ~w->seen[pattern][k] & 1u << class)
                        w->first[class][pattern][k] = w->size[i];
                w->seen[pattern][k] |= classes;
            }
    return MOE_OK;
}

struct smallest {
    bool any, complete;
    struct trial trial;
};

static bool is_smaller(const struct stress *st, const struct trial *a, const struct trial *b)
{
    int64_t x = tokens_in(st, a), y = tokens_in(st, b);
    return x < y || (x == y && adverse_in(st, a) < adverse_in(st, b));
}

/* Of all that showed the class, those first that did so at the smallest size. */
static int search(struct stress *st, const struct sweep *w, int class, struct trial *t, struct smallest *out)
{
    for (int i = 0; i < w->n; i++)
        for (int pattern = 0; pattern < TOKEN_PATTERNS; pattern++)
            for (int k = 0; k < N_ROUTINGS; k++) {
                if (w->first[class][pattern][k] != w->size[i]) continue;
                make(st, k, pattern, w->size[i], t);
                MOE_TRY(shrink(st, t, pattern, w->size[i], 1u << class));
                if (!out->any || is_smaller(st, t, &out->trial)) copy_trial(st, &out->trial, t);
                out->any = true;
            }
    out->complete = !st->cut;
    return MOE_OK;
}

/* What was found for one class may be smaller than what was found for another that it shows too; below one
 * token, or the least of each rank, there is nothing. */
static int share(struct stress *st, struct smallest *all)
{
    int64_t least = st->least ? st->n * st->least : 1;
    for (int from = 0; from < N_CLASSES; from++) {
        uint32_t classes = 0;
        if (all[from].any) MOE_TRY(try_adverse(st, &all[from].trial, &classes));
        for (int i = 0; i < N_CLASSES; i++)
            if (classes >> i & 1 && all[i].any && is_smaller(st, &all[from].trial, &all[i].trial))
                copy_trial(st, &all[i].trial, &all[from].trial);
    }
    for (int i = 0; i < N_CLASSES; i++)
        if (all[i].any && tokens_in(st, &all[i].trial) == least && !adverse_in(st, &all[i].trial))
            all[i].complete = true;
    return MOE_OK;
}

static bool is_same(const struct stress *st, const struct trial *a, const struct trial *b)
{
    return a->routing == b->routing && !memcmp(a->tokens, b->tokens, (size_t)st->n * sizeof *a->tokens) &&
           !memcmp(a->adverse, b->adverse, (size_t)st->n * sizeof *a->adverse);
}

/* Hands on the smallest of a class, with all others that it is the smallest of. */
static int tell(struct stress *st, const struct smallest *all, int class,
                void (*found)(void *ctx, const struct moe_stressed *s), void *ctx)
{
    const struct trial *t = &all[class].trial;
    struct moe_stressed out = {.routing = routings[t->routing].text,
                               .tokens = tokens_in(st, t),
                               .complete = true,
                               .scenario = &st->sc};
    struct moe_verdicts v;
    for (int i = 0; i < N_CLASSES; i++) {
        if (!all[i].any || !is_same(st, &all[i].trial, t)) continue;
        if (i < class) return MOE_OK; /* it was told with that */
        out.classes |= 1u << i;
        out.complete &= all[i].complete;
        if (st->too_small[i] > out.too_small) out.too_small = st->too_small[i];
    }
    set_scenario(st, t);
    MOE_TRY(check(st, &v));
    int *adverse = moe_alloc((size_t)st->n, sizeof *adverse);
    for (int r = 0; r < st->n; r++)
        if (t->adverse[r]) adverse[out.n_adverse++] = r;
    out.adverse = adverse;
    out.verdicts = &v;
    found(ctx, &out);
    free(adverse);
    moe_verdicts_free(&v);
    return MOE_OK;
}

/* Each class may use its share of the checks that are left. */
static int run(struct stress *st, int64_t most, void (*found)(void *ctx, const struct moe_stressed *s),
               void *ctx)
{
    struct sweep w = {0};
    struct smallest all[N_CLASSES] = {{0}};
    struct trial t = new_trial(st);
    const int limit = st->limit;
    uint32_t classes = 0;
    int err, left = 0;
    for (int i = 0; i < N_CLASSES; i++) all[i].trial = new_trial(st);
    make(st, 0, EQUAL, most, &t);
    MOE_TRY_GOTO(try_one(st, &t, &st->always));
    choose_sizes(st, most, &w);
    MOE_TRY_GOTO(sweep(st, &w, &t));
    bool cut = st->cut;
    for (int p = 0; p < TOKEN_PATTERNS; p++)
        for (int k = 0; k < N_ROUTINGS; k++) classes |= w.seen[p][k];
    for (int i = 0; i < N_CLASSES; i++) left += classes >> i & 1;
    for (int i = 0; i < N_CLASSES; i++) {
        if (!(classes >> i & 1)) continue;
        st->cut = cut;
        st->limit = st->n_tried + (limit - st->n_tried) / left--;
        MOE_TRY_GOTO(search(st, &w, i, &t, &all[i]));
    }
    MOE_TRY_GOTO(share(st, all));
    for (int i = 0; i < N_CLASSES; i++)
        if (all[i].any) MOE_TRY_GOTO(tell(st, all, i, found, ctx));
done:
    for (int i = 0; i < N_CLASSES; i++) free_trial(&all[i].trial);
    free_trial(&t);
    free(w.size);
    return err;
}

int moe_stress(const struct moe_scenario *sc, void (*found)(void *ctx, const struct moe_stressed *s),
               void *ctx, int *n_tried)
{
    struct stress st = {
        .sc = *sc, .n = (int)(sc->ranks / sc->pipeline_parallel), .least = sc->loss == MOE_MEAN_OF_RANKS};
    int64_t most = 1, layers = sc->layers * sc->micro_batches;
    st.limit = (int)((1 << 19) / (sc->ranks * layers));
    st.limit = st.limit < 60 ? 60 : st.limit > 3000 ? 3000 : st.limit;
    st.sc.tokens = moe_alloc((size_t)sc->ranks, sizeof *st.sc.tokens);
    st.sc.counts = moe_alloc((size_t)(layers * sc->ranks * sc->experts), sizeof *st.sc.counts);
    for (int r = 0; r < sc->ranks; r++)
        if (sc->tokens[r] > most) most = sc->tokens[r];
    int err = run(&st, most, found, ctx);
    free(st.sc.tokens);
    free(st.sc.counts);
    free(st.tried);
    *n_tried = st.n_tried;
    return err;
}
