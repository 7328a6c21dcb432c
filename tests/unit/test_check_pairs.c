/* Sizes of all pairs of a large group: one pair that does not agree is found, whichever it is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check/check.h"
#include "sim/lower/lower.h"
#include "tests/fixture.h"

enum { N = 20 }; /* ranks, experts, tokens of a rank: one line of cache holds 8 sizes */

static struct moe_schedule *lower(const char *more)
{
    char text[512];
    struct moe_scenario *sc = NULL;
    struct moe_schedule *s;
    snprintf(text, sizeof text,
             "model: {layers: 2, hidden: 8, ffn: 6, experts: %d, top_k: 1, heads: 2, sequence: 4}\n"
             "layout: {ranks: %d, expert_parallel: %d}\ntokens_per_rank: %d\n%s\n",
             N, N, N, N, more);
    if (moe_scenario_parse("pairs.yaml", text, &sc) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    s = fixture_schedule(sc);
    moe_scenario_free(sc);
    return s;
}

/* Token t goes to expert t, but for one of `from` in layer 1, that goes to expert `to` too. */
static struct moe_routing *route(int from, int to)
{
    struct moe_routing *r = moe_routing_new(2, N, N, 1);
    for (int l = 0; l < 2; l++)
        for (int rank = 0; rank < N; rank++) {
            int32_t expert[N];
            for (int t = 0; t < N; t++) expert[t] = t;
            if (l == 1 && rank == from) expert[(to + 1) % N] = to;
            r->tokens[rank] = N;
            moe_routing_add(r, l, rank, N, expert);
        }
    return r;
}

static void expect(struct moe_schedule *s, int from, int to, int rank, const char *op, const char *text)
{
    struct moe_routing *r = route(from, to);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 1);
    assert_int_equal(v.item[0].n_ranks, 1);
    assert_int_equal(v.item[0].ranks[0], rank);
    assert_string_equal(v.item[0].op, op);
    assert_int_equal(strncmp(v.item[0].text, text, strlen(text)), 0);
    assert_true(v.item[0].undefined);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
}

/* Capacity ceil(20 x 1 / 20) = 1: the second token for `to` stays. A rank that sends what its tokens chose,
 * not what was kept, sends 2 rows of 8 elements there, and to all others what they expect. */
static void test_each_pair(void **state)
{
    (void)state;
    for (int from = 0; from < N; from += 3)
        for (int to = 0; to < N; to++) {
            struct moe_schedule *s = lower("capacity: {rule: megatron, factor: 1.0}");
            struct moe_op *op = fixture_op(moe_schedule_split_role(s, from), MOE_FORWARD, "dispatch");
            int counts = 0, hidden = s->exprs[op->send].b, y = s->n_symbols;
            while (s->buffers[counts].role != MOE_BUF_COUNTS) counts++;
            s->symbols = moe_grow(s->symbols, &s->cap_symbols, y + 1, sizeof *s->symbols);
            s->symbols[y] = s->symbols[s->exprs[s->exprs[op->send].a].a];
            s->symbols[s->n_symbols++].buffer = counts;
            /* Its host must have read them. */
            struct moe_op *sync = fixture_op(&s->roles[s->role_of[from]], MOE_FORWARD, "read_counts");
            sync->reads[sync->n_reads++] = (struct moe_ref){.buffer = counts};
            int chosen = fixture_expr(s, (struct moe_expr){MOE_EXPR_SYM, .a = y});
            op->send = fixture_expr(s, (struct moe_expr){MOE_EXPR_MUL, .a = chosen, .b = hidden});
            char text[128];
            snprintf(text, sizeof text,
                     "rank %d sends 16 float32 (alltoall) to rank %d, which expects 8 float32 (alltoall)",
                     from, to);
            assert_int_equal(moe_schedule_check(s), MOE_OK);
            expect(s, from, to, from, "layer 1 forward dispatch", text);
        }
}

/* Rows go back over pairs that agreed when they came: with another row than then, one does not. In layer 1
 * rank 9 sends two rows to 4 and none to 5; it then believes that as many come back as it got: 1 of each. */
static void test_way_back(void **state)
{
    (void)state;
    struct moe_schedule *s = lower("");
    struct moe_role *role = moe_schedule_split_role(s, 9);
    fixture_op(role, MOE_FORWARD, "combine")->recv = fixture_op(role, MOE_FORWARD, "dispatch")->recv;
    expect(s, 9, 4, 9, "layer 1 forward combine",
           "rank 4 sends 16 float32 (alltoall) to rank 9, which expects 8 float32 (alltoall)");
}

/* The same for one number each, and for one number each that rows of tokens say: 20 x 8 elements, or twice.
 */
static void test_one_number(void **state)
{
    (void)state;
    static const char *const ops[] = {"gather_counts", "gather_tokens"};
    for (int i = 0; i < 2; i++) {
        struct moe_schedule *s = lower("dispatcher: allgather");
        struct moe_op *op = fixture_op(moe_schedule_split_role(s, 13), MOE_FORWARD, ops[i]);
        int two = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 2});
        op->send = fixture_expr(s, (struct moe_expr){MOE_EXPR_MUL, .a = op->send, .b = two});
        expect(s, 0, 0, 13, i ? "layer 0 forward gather_tokens" : "layer 0 forward gather_counts",
               i ? "rank 13 sends 320 float32 (allgather) to rank 0, which expects 160 float32 (allgather)"
                 : "rank 13 sends 40 int64 (allgather) to rank 0, which expects 20 int64 (allgather)");
    }
}

/* What a role lacks, all its ranks lack. */
static void test_ranks_of_a_role(void **state)
{
    (void)state;
    struct moe_schedule *s = lower("");
    struct moe_routing *r = route(0, 0);
    struct moe_verdicts v;
    fixture_op(&s->roles[0], MOE_FORWARD, "read_counts")->needs_grad = 1;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 4);
    assert_int_equal(v.item[0].n_ranks, N);
    assert_int_equal(v.item[0].n_layers, 2);
    assert_non_null(strstr(v.item[0].text, "has no backward operation for "));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_pair), cmocka_unit_test(test_way_back),
                                       cmocka_unit_test(test_one_number),
                                       cmocka_unit_test(test_ranks_of_a_role)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
