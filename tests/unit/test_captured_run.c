/* test_captured_run - faults of a real run that its capture shows: kernels that write nothing for an expert
 * without tokens, and sums that begin with what a buffer held before. */
#include "runtime/record.h"
#include "sim/check/captured.h"
#include "tests/fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { TOKENS = 64, EXPERTS = 8, LAYERS = 2, STEPS = 2, MICRO = 2 };
#define PATH "test_captured_run.db"

/* The host as a device, but for one fault: a gradient of experts' weights is left as it was where an expert
 * has no rows. Reported of several grouped GEMMs. */
static struct moe_device_table skipping_table;
static struct moe_device *real;

static int run_skipping(struct moe_device *d, const struct moe_launch *l, int stream)
{
    (void)d;
    const bool gradient = l->op->kernel == MOE_K_GROUPED_WGRAD;
    const size_t each = gradient ? (size_t)(l->dims[1] * l->dims[2] * moe_type_bytes[l->op->type]) : 0;
    char *before = gradient ? moe_alloc((size_t)l->dims[0], each) : NULL;
    if (gradient) memcpy(before, l->out[0], (size_t)l->dims[0] * each);
    int err = real->table->run(real, l, stream);
    for (int e = 0; gradient && e < l->dims[0]; e++)
        if (!l->rows[e]) memcpy((char *)l->out[0] + (size_t)e * each, before + (size_t)e * each, each);
    free(before);
    return err;
}

struct plan {
    bool skips, poison;
    const char *without; /* a ZERO of this gradient is left out; with micro-batches */
};

/* The second step has one token, over and over: all go to the same experts. */
static void run(const struct plan *plan)
{
    struct moe_device skipping = {&skipping_table};
    struct moe_communicator *world;
    struct moe_execution *x;
    struct moe_recorder *recorder;
    struct moe_scenario *sc =
        fixture_layout(LAYERS, 1, 1, plan->without ? "micro_batches: 2" : NULL, "64", "dtype: float64");
    struct moe_schedule *s = fixture_schedule(sc);
    const struct moe_data data = {.n = 1};
    int32_t token[MICRO * TOKENS], target[MICRO * TOKENS];
    double loss;
    if (plan->without) {
        struct moe_op *op = fixture_op(&s->roles[0], MOE_FORWARD, plan->without);
        moe_block_delete(fixture_block(&s->roles[0], op), op->id);
    }
    assert_int_equal(moe_device_cpu.open(&real), MOE_OK);
    skipping_table = *real->table;
    skipping_table.run = run_skipping;
    assert_int_equal(moe_comm_self.open(NULL, 60, &world), MOE_OK);
    struct moe_execute_options options = {
        .timeout_s = 1, .seed = 3, .poison = plan->poison, .observe = moe_recorder_observe};
    assert_int_equal(moe_execute_open(s, plan->skips ? &skipping : real, world, &options, &x), MOE_OK);
    const struct moe_run facts = {s, &data, "", "0", STEPS, 3, MOE_TENSORS_HASHED, plan->poison};
    assert_int_equal(moe_recorder_open(PATH, &facts, 0, &recorder), MOE_OK);
    options.ctx = recorder;
    assert_int_equal(moe_recorder_begin(recorder, x, 0), MOE_OK);
    for (int step = 0; step < STEPS; step++) {
        for (int t = 0; t < MICRO * TOKENS; t++) token[t] = step ? 7 : 37 * t % 256, target[t] = t;
        assert_int_equal(moe_execute_step(x, token, target, &loss), MOE_OK);
        assert_int_equal(moe_recorder_step(recorder, x, step, loss, 1), MOE_OK);
    }
    moe_recorder_close(recorder);
    moe_execute_close(x);
    world->table->close(world);
    real->table->close(real);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static struct moe_verdicts judge(void)
{
    struct moe_verdicts out = {0};
    struct moe_store *store;
    struct moe_captured *c;
    assert_int_equal(moe_store_open(PATH ".rank0", MOE_STORE_READ, &store), MOE_OK);
    assert_int_equal(moe_captured_load(store, &c), MOE_OK);
    assert_int_equal(moe_check_captured(c, &out), MOE_OK);
    moe_captured_free(c);
    moe_store_close(store);
    return out;
}

/* Rows of experts that are exactly zero, in a step. */
static int count_zero(void *ctx, const struct moe_store_tensor *t)
{
    int *n = ctx;
    if (t->role == MOE_TENSOR_GRADIENT && t->expert >= 0) n[t->step] += t->presence == MOE_IS_ZERO;
    return MOE_OK;
}

/* Every expert has tokens in the first step, 2 of 8 in the second: 6 gradients of w1 and w2 in each layer are
 * zero, which is right. */
static void test_starved_experts(void **state)
{
    (void)state;
    for (int poison = 0; poison < 2; poison++) {
        struct moe_store *store;
        int n_zero[STEPS] = {0};
        run(&(struct plan){.poison = poison});
        struct moe_verdicts out = judge();
        if (out.n) fail_msg("%s: %s", out.item[0].op, out.item[0].text);
        assert_int_equal(moe_store_open(PATH ".rank0", MOE_STORE_READ, &store), MOE_OK);
        assert_int_equal(moe_store_each_tensor(store, 0, 9, count_zero, n_zero), MOE_OK);
        moe_store_close(store);
        assert_int_equal(n_zero[0], 0);
        assert_int_equal(n_zero[1], 2 * LAYERS * (EXPERTS - 2));
    }
}

/* The first step is clean. Without poison the second repeats what the first left, and nothing shows. */
static void test_skipped_experts(void **state)
{
    (void)state;
    run(&(struct plan){.skips = true});
    struct moe_verdicts out = judge();
    assert_int_equal(out.n, 0);
    run(&(struct plan){.skips = true, .poison = true});
    out = judge();
    assert_int_equal(out.n, 2);
    for (int i = 0; i < 2; i++) {
        const struct moe_verdict *v = &out.item[i];
        assert_int_equal(v->check_class, 6);
        assert_int_equal(v->severity, MOE_SEVERITY_ERROR);
        assert_int_equal(v->step, 1);
        assert_int_equal(v->n_layers, LAYERS);
        assert_non_null(
            strstr(v->op, i ? "step 1 gradient of layer 1 w1 of" : "step 1 gradient of layer 1 w2 of"));
        assert_non_null(strstr(v->text, "uninitialised on rank 0"));
        assert_non_null(strstr(v->text, "its expert had 0 tokens in this step"));
        assert_non_null(strstr(v->text, "so it is with 11 other tensors"));
    }
    moe_verdicts_free(&out);
}

/* Gradients of micro-batches add up from zero, or from anything. */
static void test_deleted_zero(void **state)
{
    (void)state;
    run(&(struct plan){.poison = true, .without = "clear_w1"});
    struct moe_verdicts out = judge();
    assert_int_equal(out.n, 1);
    assert_int_equal(out.item[0].check_class, 6);
    assert_non_null(strstr(out.item[0].op, "step 0 gradient of layer 1 w1 of expert 0"));
    assert_non_null(strstr(out.item[0].text, "so it is with 15 other tensors"));
    moe_verdicts_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_starved_experts),
                                       cmocka_unit_test(test_skipped_experts),
                                       cmocka_unit_test(test_deleted_zero)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
