/* What moe_schedule_check refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/fixture.h"

static void expect_malformed(const struct moe_schedule *s, void *field, int value, const char *what)
{
    int kept;
    memcpy(&kept, field, sizeof kept);
    memcpy(field, &value, sizeof value);
    if (moe_schedule_check(s) == MOE_OK) fail_msg("%d is taken for a value of %s", value, what);
    memcpy(field, &kept, sizeof kept);
    assert_int_equal(moe_schedule_check(s), MOE_OK);
}
#define MALFORMED(field, value) expect_malformed(s, &(field), value, #field)

/* Readers use every one of these as an index, or as something of that kind. */
static void test_malformed_schedules(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "capacity: {rule: megatron}");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_role *role = &s->roles[0];
    struct moe_op *sum = fixture_op(role, MOE_SYNC, "sum_router"),
                  *limit = fixture_op(role, MOE_FORWARD, "limit"),
                  *norm = fixture_op(role, MOE_CLIPPING, "norm_router");
    MALFORMED(norm->kind, MOE_OP_KIND_COUNT);
    MALFORMED(norm->kernel, MOE_K_COUNT);
    MALFORMED(norm->type, MOE_TYPE_COUNT);
    MALFORMED(norm->flops, s->n_exprs);
    MALFORMED(norm->divisor, -1);
    MALFORMED(norm->n_reads, 0);
    MALFORMED(limit->n_reads, 2);
    MALFORMED(limit->n_dims, 5);
    MALFORMED(sum->collective, MOE_COLLECTIVE_COUNT);
    MALFORMED(sum->type, MOE_I64);
    MALFORMED(sum->writes[0].buffer, limit->writes[2].buffer); /* int64 */
    sum->writes[0].accumulate = true;
    assert_true(moe_schedule_check(s) < 0);
    sum->writes[0].accumulate = false;
    struct moe_buffer *buffer = &s->buffers[sum->writes[0].buffer];
    MALFORMED(buffer->role, MOE_BUF_ROLE_COUNT);
    MALFORMED(buffer->type, -1);
    MALFORMED(buffer->slots, 0);
    MALFORMED(buffer->extent, s->n_exprs);
    MALFORMED(buffer->grad, s->n_buffers);
    struct moe_symbol *symbol = NULL;
    for (int i = 0; i < s->n_symbols && !symbol; i++)
        if (s->symbols[i].buffer >= 0) symbol = &s->symbols[i];
    MALFORMED(symbol->buffer, s->n_buffers);
    MALFORMED(symbol->buffer, sum->writes[0].buffer); /* not int64 */
    MALFORMED(symbol->slice, s->n_comms);
    MALFORMED(symbol->expr, -1);
    int itself = fixture_expr(s, (struct moe_expr){MOE_EXPR_SYM, .a = (int)(symbol - s->symbols)});
    MALFORMED(symbol->expr, itself);
    symbol->scope = MOE_SCOPE_PEER;
    int kept = symbol->buffer;
    symbol->buffer = -1;
    symbol->comm = 0;
    MALFORMED(symbol->comm, -1);
    symbol->buffer = kept;
    MALFORMED(s->params[0].buffer, sum->writes[0].buffer);
    MALFORMED(s->params[0].grad, s->params[0].buffer);
    MALFORMED(s->params[0].replicas, s->n_comms);
    MALFORMED(s->params[0].shard, -2);
    MALFORMED(s->params[0].divisor, s->n_exprs);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_malformed_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
