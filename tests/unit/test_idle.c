/* What check makes of operations from which nothing comes on a rank: without tokens, or without a part of a
 * bucket. What they do wrong is no fault there, and hides none elsewhere. */
#include "sim/check/check.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* Changes the list of one rank. */
typedef void change(const struct moe_schedule *s, struct moe_role *role);

/* The classes of the errors, in their order, as digits: "4 5". */
static void must_tell(struct moe_scenario *sc, int rank, change *make, const char *expected)
{
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    char found[256] = "";
    make(s, moe_schedule_split_role(s, rank));
    assert_int_equal(moe_schedule_check(s), MOE_OK);
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++)
        snprintf(found + strlen(found), sizeof found - strlen(found), "%s%d", i ? " " : "",
                 v.item[i].check_class);
    assert_string_equal(found, expected);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void transpose_wo(const struct moe_schedule *s, struct moe_role *role)
{
    int w = 0, n = 0;
    while (strcmp(s->buffers[w].name, "wo") != 0) w++;
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops && role->blocks[b].pass <= MOE_BACKWARD; o++) {
            struct moe_op *op = &role->blocks[b].ops[o];
            if (op->kind != MOE_KERNEL || op->kernel != MOE_K_GEMM) continue;
            if (op->reads[1].buffer == w) {
                op->trans_b = !op->trans_b;
                n++;
            } else if (op->writes[0].buffer == s->buffers[w].grad) {
                struct moe_ref left = op->reads[0];
                op->reads[0] = op->reads[1];
                op->reads[1] = left;
                int m = op->dims[0];
                op->dims[0] = op->dims[1];
                op->dims[1] = m;
                n++;
            }
        }
    assert_int_equal(n, 3);
}

/* Rank 3 multiplies by the transpose, forward and back, where other ranks of its kind have no tokens. */
static void test_another_function(void **state)
{
    (void)state;
    static const char *const tokens[] = {"[6,6,6,6,6,6,6,6]", "[6,0,6,6,6,0,6,6]", "[0,6,6,6,0,6,6,6]",
                                         "[0,0,0,6,0,0,0,6]"};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        const bool alone = i == 3; /* nobody computes anything else then */
        must_tell(fixture_layout(2, 8, 2, "pipeline_parallel: 2, micro_batches: 2", tokens[i], ""), 3,
                  transpose_wo, alone ? "" : "14");
    }
    must_tell(fixture_layout(2, 8, 2, "pipeline_parallel: 2, micro_batches: 2", tokens[2], ""), 0,
              transpose_wo, ""); /* it has no tokens itself */
}

static void one_head(const struct moe_schedule *s, struct moe_role *role)
{
    (void)s;
    struct moe_op *forward = fixture_op(role, MOE_FORWARD, "attention"),
                  *back = fixture_op(role, MOE_BACKWARD, "d_attention");
    forward->dims[2] = back->dims[2] = forward->dims[3]; /* as many heads as tokens in a sequence: 4, not 2 */
}

/* The number of heads is one number, however many tokens there are. */
static void test_heads(void **state)
{
    (void)state;
    must_tell(fixture_scenario(4, 2, "[8,8,8,8]", ""), 3, one_head, "14");
    must_tell(fixture_scenario(4, 2, "[0,8,4,8]", ""), 3, one_head, "14");
    must_tell(fixture_scenario(4, 2, "[8,4,8,0]", ""), 3, one_head, "");
}

static void replace_norm(const struct moe_schedule *s, struct moe_role *role)
{
    (void)s;
    struct moe_op *op = fixture_op(role, MOE_CLIPPING, "norm_wqkv");
    assert_true(op->writes[0].accumulate);
    op->writes[0].accumulate = false;
}

/* The squares of sums are not nothing where the rank had no tokens itself. */
static void test_norm(void **state)
{
    (void)state;
    static const char *const tokens[] = {"[6,6,6,6]", "[0,6,6,6]"};
    for (int i = 0; i < 2; i++)
        must_tell(
            fixture_scenario(4, 2, tokens[i], "clip_norm: 1.0\ndistributed_optimizer: {bucket_size: 300}\n"),
            0, replace_norm, "5");
}

static void other_rate(const struct moe_schedule *s, struct moe_role *role)
{
    (void)s;
    fixture_op(role, MOE_UPDATE, "update_last_gain")->factor *= 2;
}

/* Of a bucket of 300 elements the last gain, of 8, is one rank's: the rate of the others says nothing. */
static void test_rate(void **state)
{
    (void)state;
    int told = 0;
    for (int rank = 0; rank < 4; rank++) {
        struct moe_scenario *sc =
            fixture_scenario(4, 2, "6", "clip_norm: 0\ndistributed_optimizer: {bucket_size: 300}\n");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        other_rate(s, moe_schedule_split_role(s, rank));
        moe_check(s, r, &v);
        for (int i = 0; i < v.n; i++) assert_int_equal(v.item[i].check_class, 16);
        told += v.n > 0;
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
    assert_in_range(told, 1, 2); /* or two, where it lies across their parts */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_another_function),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
