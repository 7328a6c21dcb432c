/* What the executor refuses of an operation that its kernel cannot run, by one rank alone. */
#include "tests/fixture.h"
#include "tests/unit/rig.h"

static struct rig *layer(enum moe_pass pass, const char *name, struct moe_op **op)
{
    static struct rig rig;
    struct moe_scenario *sc = fixture_scenario(1, 1, "4", "dtype: float64\n");
    open_rig(&rig, fixture_schedule(sc));
    moe_scenario_free(sc);
    *op = fixture_op(&rig.s->roles[0], pass, name);
    start_rig(&rig);
    return &rig;
}

/* The step stops at the operation that was changed, and no signal came of it. */
static void must_refuse(struct rig *rig, const char *expected)
{
    double loss;
    const int32_t ids[4] = {0, 1, 2, 3};
    assert_int_equal(moe_execute_step(rig->x, ids, ids, &loss), MOE_EFAILED);
    assert_string_equal(moe_error(), expected);
    close_rig(rig);
}

static int constant(struct rig *rig, int64_t value)
{
    rig->s->exprs = realloc(rig->s->exprs, (size_t)(rig->s->n_exprs + 1) * sizeof *rig->s->exprs);
    assert_non_null(rig->s->exprs);
    rig->s->exprs[rig->s->n_exprs] = (struct moe_expr){.op = MOE_EXPR_CONST, .value = value};
    return rig->s->n_exprs++;
}

static void test_right(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    double loss;
    const int32_t ids[4] = {0, 1, 2, 3};
    assert_int_equal(moe_execute_step(rig->x, ids, ids, &loss), MOE_OK);
    close_rig(rig);
}

static void test_lists(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->kernel = MOE_K_PERMUTE;
    must_refuse(rig,
                "layer 0 forward moe_norm: has 2 dims, 2 reads and 1 writes, and permute needs 4, 2 and 1");
}

static void test_types(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->type = MOE_BF16;
    must_refuse(rig, "layer 0 forward moe_norm: x of attended is float64, expected bfloat16");
    rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->type = MOE_I32;
    must_refuse(rig, "layer 0 forward moe_norm: x of attended is float64, expected real numbers");
}

static void test_adds(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->writes[0].accumulate = true;
    must_refuse(rig, "layer 0 forward moe_norm: adds to moe_in, and rmsnorm only replaces its y");
}

/* Reading 5 rows of 8 where there are 4, or 3: of a part that is named, too. */
static void test_extents(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->dims[0] = constant(rig, 5);
    must_refuse(rig, "layer 0 forward moe_norm: reads 40 elements of attended as x, which holds 32");
    rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->dims[0] = constant(rig, 3);
    must_refuse(rig, "layer 0 forward moe_norm: writes 24 elements of moe_in as y, which holds 32");
    rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->dims[0] = constant(rig, 3);
    op->reads[0].begin = constant(rig, 0);
    op->reads[0].n = constant(rig, 32);
    must_refuse(rig, "layer 0 forward moe_norm: reads 24 elements of attended as x, which holds 32");
    rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->dims[0] = constant(rig, INT64_C(1) << 39);
    op->dims[1] = constant(rig, INT64_C(1) << 39);
    must_refuse(rig, "layer 0 forward moe_norm: reads more elements of attended as x than 63 bits hold");
}

/* What is read as x must not be what is written as y; what is changed in place must. */
static void test_overlap(void **state)
{
    (void)state;
    struct moe_op *op;
    struct rig *rig = layer(MOE_FORWARD, "moe_norm", &op);
    op->writes[0] = op->reads[0];
    must_refuse(rig, "layer 0 forward moe_norm: writes attended, which is also read, as x");
    rig = layer(MOE_UPDATE, "update_wqkv", &op);
    op->writes[0].shift = 1;
    must_refuse(rig, "layer 1 update update_wqkv: writes wqkv, which is not what it reads as param");
}

int main(void)
{
    const struct CMUnitTest all[] = {
        cmocka_unit_test(test_right), cmocka_unit_test(test_lists),   cmocka_unit_test(test_types),
        cmocka_unit_test(test_adds),  cmocka_unit_test(test_extents), cmocka_unit_test(test_overlap),
    };
    return cmocka_run_group_tests(all, NULL, NULL);
}
