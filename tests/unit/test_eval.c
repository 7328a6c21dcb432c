/* All values of an expression at once are what moe_eval says one by one, for random expressions over random
 * symbols, some of which the environment knows as rows, some value by value, some not at all. */
#include "sim/schedule.h"

#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { RANKS = 6, LAYERS = 2, N_SYMBOLS = 10, N_EXPRS = 40, MOST = 9, ROUNDS = 4000 };

static struct moe_comm comms[] = {
    {.name = "world",
     .n_groups = 1,
     .group_of = (int[]){0, 0, 0, 0, 0, 0},
     .index_of = (int[]){0, 1, 2, 3, 4, 5},
     .first = (int[]){0, 6},
     .members = (int[]){0, 1, 2, 3, 4, 5}},
    {.name = "uneven", /* groups of 4 and 2 */
     .n_groups = 2,
     .group_of = (int[]){0, 1, 0, 0, 1, 0},
     .index_of = (int[]){0, 0, 1, 2, 1, 3},
     .first = (int[]){0, 4, 6},
     .members = (int[]){0, 2, 3, 5, 1, 4}},
};
static int64_t tokens[] = {5, 0, 7, 8, 3, 9};
static struct moe_buffer buffers[] = {{.name = "counts", .type = MOE_I64, .slots = LAYERS}};
/* The last two are expressions, set anew each round. */
static struct moe_symbol symbols[N_SYMBOLS] = {
    {"rows", MOE_SCOPE_PEER, 1, 0, 4, 3, true},      {"columns", MOE_SCOPE_EXPERT, -1, 0, 4, 3, false},
    {"few", MOE_SCOPE_PEER, 1, 0, 2, 6, true},       {"one", MOE_SCOPE_RANK, -1, 0, 1, 12, true},
    {"tokens", MOE_SCOPE_RANK, -1, -1, 0, 0, false}, {"of_peer", MOE_SCOPE_PEER, 1, -1, 0, 0, false},
    {"all", MOE_SCOPE_GLOBAL, -1, -1, 0, 0, false},  {"before", MOE_SCOPE_BEFORE, 1, -1, 0, 0, false},
    {"made", MOE_SCOPE_EXPERT, -1, -1, 0, 5, false}, {"made_too", MOE_SCOPE_RANK, -1, -1, 0, 0, false},
};
static struct moe_expr exprs[N_EXPRS];
static struct moe_schedule schedule = {.n_ranks = RANKS,
                                       .n_layers = LAYERS,
                                       .n_micro = 1,
                                       .tokens = tokens,
                                       .n_comms = 2,
                                       .comms = comms,
                                       .n_symbols = N_SYMBOLS,
                                       .symbols = symbols,
                                       .n_buffers = 1,
                                       .buffers = buffers,
                                       .n_exprs = N_EXPRS,
                                       .exprs = exprs};

struct world {
    uint64_t round;
    bool rows;  /* some symbols come as rows */
    bool known; /* all have values: what is unknown is above 63 bits */
    struct moe_symbol_row row;
    int64_t value[12];
};

static int64_t value(void *ctx, int symbol, int rank, int layer, int index)
{
    struct world *w = ctx;
    struct moe_env env = {value, w};
    if (symbols[symbol].buffer < 0) return moe_symbol_initial(&schedule, env, symbol, rank, layer, index);
    uint64_t key = moe_hash64(w->round * 64 + (uint64_t)(symbol * RANKS + rank) * 4 + (uint64_t)layer);
    if (key % 7 == 0 && !w->known) return MOE_UNKNOWN; /* nobody wrote the buffer */
    return (int64_t)(moe_hash64(key + (uint64_t)index) % 11);
}

static const struct moe_symbol_row *row(void *ctx, int symbol, int rank, int layer)
{
    struct world *w = ctx;
    if (!w->rows || moe_hash64(w->round + (uint64_t)symbol) % 3 == 0) return NULL;
    w->row = (struct moe_symbol_row){.n = moe_symbol_count(&schedule, symbol, rank), .value = w->value};
    for (int i = 0; i < w->row.n; i++) {
        w->value[i] = value(ctx, symbol, rank, layer, i);
        if (w->value[i] == MOE_UNKNOWN) return NULL;
        w->row.sum = moe_plus(w->row.sum, w->value[i]);
    }
    return &w->row;
}

static int draw(uint64_t round, int place, int n)
{
    return (int)(moe_uniform(round, 3, (uint64_t)place) * n);
}

/* Small, but for one in 4. */
static int64_t constant(uint64_t round, int i)
{
    if (draw(round, 5000 + i, 4)) return draw(round, 4 * i + 3, 9) - 2;
    int64_t large = (int64_t)(moe_hash64(round + (uint64_t)i) >> (1 + draw(round, 6000 + i, 30)));
    return draw(round, 7000 + i, 2) ? large : -large;
}

/* Expressions name earlier ones and any symbol; symbols that are expressions come after those they name. */
static void make_exprs(uint64_t round)
{
    for (int i = 0; i < N_EXPRS; i++) {
        int op = i < 6 ? draw(round, 4 * i, MOE_EXPR_ADD) : draw(round, 4 * i, MOE_EXPR_OP_COUNT);
        bool leaf = op < MOE_EXPR_ADD, of_comm = op == MOE_EXPR_PLACE || op == MOE_EXPR_OTHER;
        int n = of_comm ? 2 : !leaf ? i : i < N_EXPRS / 2 ? N_SYMBOLS - 2 : N_SYMBOLS;
        exprs[i] = (struct moe_expr){.op = (enum moe_expr_op)op,
                                     .a = draw(round, 4 * i + 1, n),
                                     .b = leaf ? 0 : draw(round, 4 * i + 2, i),
                                     .value = constant(round, i),
                                     .factor = 0.5 * draw(round, 4 * i + 3, 5)};
        if (i < N_EXPRS / 2) continue;
        symbols[N_SYMBOLS - 2].expr = 1 + draw(round, 1000, N_EXPRS / 2 - 1);
        symbols[N_SYMBOLS - 1].expr = 1 + draw(round, 1001, N_EXPRS / 2 - 1);
    }
}

/* At index 0 every symbol has a value; in a sum over indices of one that is an expression, some have not. */
static bool has_all(int expr)
{
    const struct moe_expr *e = &exprs[expr];
    if (e->op < MOE_EXPR_SYM) return true;
    if (e->op == MOE_EXPR_SYM) return !symbols[e->a].expr || has_all(symbols[e->a].expr);
    return e->op == MOE_EXPR_SUM ? !symbols[e->a].expr : has_all(e->a) && has_all(e->b);
}

static int n_exceeding; /* seen */

/* Result: 1 when the expression is a product of a symbol. */
static int compare(struct world *w, int expr, int rank, int layer, int n)
{
    struct moe_env one = {value, w}, all = {value, w, row};
    int64_t out[MOST + 1] = {[MOST] = 0};
    out[n] = 4711;
    moe_eval_all(&schedule, all, expr, rank, layer, n, out);
    assert_int_equal(out[n], 4711);
    struct moe_product p;
    bool product = moe_eval_product(&schedule, all, expr, rank, layer, &p);
    for (int i = 0; i < n; i++) {
        int64_t want = moe_eval(&schedule, one, expr, rank, layer, i);
        if (out[i] != want || moe_eval(&schedule, all, expr, rank, layer, i) != want)
            fail_msg("round %d, expression %d, rank %d, index %d: %lld, expected %lld", (int)w->round, expr,
                     rank, i, (long long)out[i], (long long)want);
        if (!product) continue;
        bool ends =
            p.symbol >= 0 && (symbols[p.symbol].buffer >= 0 || symbols[p.symbol].scope == MOE_SCOPE_PEER);
        bool there = !ends || i < moe_symbol_count(&schedule, p.symbol, rank);
        int64_t base = p.symbol < 0 ? 1 : there ? value(w, p.symbol, rank, layer, i) : MOE_UNKNOWN;
        assert_int_equal(moe_times(base, p.factor), want);
    }
    w->known = true;
    bool exceeds = moe_eval_exceeds(&schedule, all, expr, rank, layer, 0);
    if (has_all(expr)) {
        assert_int_equal(exceeds, moe_eval(&schedule, all, expr, rank, layer, 0) == MOE_UNKNOWN);
        n_exceeding += exceeds;
    }
    w->known = false;
    if (moe_eval_exceeds(&schedule, all, expr, rank, layer, 0))
        assert_true(moe_eval(&schedule, all, expr, rank, layer, 0) == MOE_UNKNOWN);
    return product && p.symbol >= 0;
}

static void test_all_at_once(void **state)
{
    (void)state;
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    int products = 0;
    for (int k = 0; k < ROUNDS; k++) {
        struct world w = {.round = moe_hash64(seed) % 1000000 + (uint64_t)k, .rows = k % 4 != 0};
        make_exprs(w.round);
        for (int i = 0; i < N_EXPRS; i++)
            products +=
                compare(&w, i, draw(w.round, 2000 + i, RANKS), i % LAYERS, draw(w.round, 3000 + i, MOST + 1));
    }
    assert_true(products > ROUNDS); /* they are not only numbers */
    assert_true(n_exceeding > 100);
}

/* 0 times what is above 63 bits is not 0, however it is asked for. */
static void test_zero_times_too_much(void **state)
{
    (void)state;
    struct world w = {.known = true};
    struct moe_env all = {value, &w, row};
    struct moe_product p;
    int64_t out[2];
    exprs[0] = (struct moe_expr){.op = MOE_EXPR_SYM, .a = 5}; /* tokens of a peer: above 1 */
    exprs[1] = (struct moe_expr){.op = MOE_EXPR_CONST, .value = INT64_MAX};
    exprs[2] = (struct moe_expr){.op = MOE_EXPR_CONST, .value = 0};
    exprs[3] = (struct moe_expr){.op = MOE_EXPR_MUL, .a = 0, .b = 1};
    exprs[4] = (struct moe_expr){.op = MOE_EXPR_MUL, .a = 3, .b = 2};
    assert_true(moe_eval(&schedule, all, 4, 0, 0, 0) == MOE_UNKNOWN);
    assert_true(moe_eval_exceeds(&schedule, all, 4, 0, 0, 0));
    assert_false(moe_eval_product(&schedule, all, 4, 0, 0, &p));
    moe_eval_all(&schedule, all, 4, 0, 0, 2, out);
    assert_true(out[0] == MOE_UNKNOWN && out[1] == MOE_UNKNOWN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_at_once),
                                       cmocka_unit_test(test_zero_times_too_much)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
