/* test_tensors - what a capture says of parameters and gradients, compared with the buffers themselves. */
#include "runtime/record.h"
#include "tests/fixture.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include <setjmp.h>

#include <cmocka.h>

enum { LAYERS = 2, EXPERTS = 8, TOKENS = 8, STEPS = 2 };

struct run {
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_device *device;
    struct moe_communicator *world;
    struct moe_execute_options options;
    struct moe_execution *x;
    struct moe_recorder *recorder;
};

/* The operation of the backward pass that computes the gradient of w2. */
static struct moe_op *find_w2(struct moe_schedule *s)
{
    const struct moe_param *p = s->params;
    while (strcmp(p->name, "w2") != 0) p++;
    for (int b = 0; b < s->roles[0].n_blocks; b++)
        for (int o = 0; o < s->roles[0].blocks[b].n_ops; o++) {
            struct moe_op *op = &s->roles[0].blocks[b].ops[o];
            if (s->roles[0].blocks[b].pass == MOE_BACKWARD && op->n_writes && op->writes[0].buffer == p->grad)
                return op;
        }
    fail_msg("no operation writes the gradient of w2");
    return NULL;
}

/* Puts a collective that no rank enters before the first CLIP, in place on what that clips. */
static void add_skipped(struct moe_schedule *s)
{
    struct moe_role *role = &s->roles[0];
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            struct moe_block *block = &role->blocks[b];
            const struct moe_op clip = block->ops[o];
            if (clip.kind != MOE_KERNEL || clip.kernel != MOE_K_CLIP) continue;
            block->ops = realloc(block->ops, (size_t)(block->n_ops + 1) * sizeof clip);
            assert_non_null(block->ops);
            memmove(&block->ops[o + 1], &block->ops[o], (size_t)(block->n_ops - o) * sizeof clip);
            block->ops[o] =
                (struct moe_op){.name = "left_out",
                                .id = block->n_ops++,
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_ALLREDUCE,
                                .type = clip.type,
                                .when = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 0}),
                                .group = -1,
                                .n_reads = 1,
                                .n_writes = 1,
                                .reads = {clip.reads[0]},
                                .writes = {clip.writes[0]}};
            return;
        }
    fail_msg("nothing is clipped");
}

enum change { NO_CHANGE, WITHOUT_W2, WITH_SKIPPED };

static void open_run(struct run *run, enum moe_tensors tensors, const char *clip, enum change change)
{
    const struct moe_data data = {.n = 1};
    char more[64];
    snprintf(more, sizeof more, "dtype: float64\nclip_norm: %s", clip);
    run->sc = fixture_scenario(1, 1, "8", more);
    run->s = fixture_schedule(run->sc);
    if (change == WITH_SKIPPED) add_skipped(run->s);
    if (change == WITHOUT_W2) {
        struct moe_op *op = find_w2(run->s);
        moe_block_delete(fixture_block(&run->s->roles[0], op), op->id);
    }
    assert_int_equal(moe_device_cpu.open(&run->device), MOE_OK);
    assert_int_equal(moe_comm_self.open(NULL, 60, &run->world), MOE_OK);
    run->options = (struct moe_execute_options){
        .timeout_s = 1, .seed = 3, .poison = true, .observe = moe_recorder_observe};
    assert_int_equal(moe_execute_open(run->s, run->device, run->world, &run->options, &run->x), MOE_OK);
    const struct moe_run facts = {run->s, &data, "", "0", STEPS, 3, tensors, true};
    assert_int_equal(moe_recorder_open("test_tensors.db", &facts, 0, &run->recorder), MOE_OK);
    run->options.ctx = run->recorder;
    assert_int_equal(moe_recorder_begin(run->recorder, run->x, 0), MOE_OK);
}

static void run_step(struct run *run, int step)
{
    int32_t token[TOKENS], target[TOKENS];
    double loss;
    for (int t = 0; t < TOKENS; t++) token[t] = (7 * t + step) % 5, target[t] = t;
    assert_int_equal(moe_execute_step(run->x, token, target, &loss), MOE_OK);
    assert_int_equal(moe_recorder_step(run->recorder, run->x, step, loss, 1), MOE_OK);
}

/* The store stays open for reading. */
static struct moe_store *close_run(struct run *run)
{
    struct moe_store *store;
    moe_recorder_close(run->recorder);
    moe_execute_close(run->x);
    run->world->table->close(run->world);
    run->device->table->close(run->device);
    moe_schedule_free(run->s);
    moe_scenario_free(run->sc);
    assert_int_equal(moe_store_open("test_tensors.db.rank0", MOE_STORE_READ, &store), MOE_OK);
    return store;
}

struct seen {
    const struct run *run;
    struct moe_store *store;
    int n[MOE_TENSOR_ROLE_COUNT], n_none, n_zero, last_place;
    uint64_t hashes;
};

/* The row against the buffer that the execution left: its elements, their sums in another order, its name. */
static int compare(void *ctx, const struct moe_store_tensor *t)
{
    struct seen *seen = ctx;
    const struct moe_schedule *s = seen->run->s;
    const struct moe_param *p = s->params;
    while (p->buffer < 0 || strcmp(p->name, t->name) != 0) p++;
    assert_int_equal(t->layer >= 0, p->per_layer);
    assert_int_equal(t->expert >= 0, p->shard >= 0);
    seen->n[t->role]++;
    if (t->role == MOE_TENSOR_INITIAL || t->step < STEPS - 1) return MOE_OK;
    int64_t n;
    const double *all = moe_execute_buffer(seen->run->x, t->role == MOE_TENSOR_GRADIENT ? p->grad : p->buffer,
                                           t->layer < 0 ? 0 : t->layer, &n);
    const int64_t first = t->expert < 0 ? 0 : t->expert * t->n;
    double sum = 0, squares = 0;
    void *content;
    assert_int_equal(t->expert < 0 ? n : n / EXPERTS, t->n);
    for (int64_t i = t->n - 1; i >= 0; i--) sum += all[first + i], squares += all[first + i] * all[first + i];
    assert_true(fabs(t->sum - sum) <= 1e-12 * sqrt(squares * (double)t->n));
    assert_true(fabs(t->sum_squares - squares) <= 1e-12 * squares);
    assert_int_equal(t->presence, squares > 0 ? MOE_IS_PRESENT : MOE_IS_ZERO);
    assert_int_equal(moe_store_tensor_content(seen->store, t, &content), MOE_OK);
    assert_memory_equal(content, all + first, (size_t)t->n * sizeof *all);
    free(content);
    return MOE_OK;
}

static void test_rows(void **state)
{
    struct run run;
    struct seen seen = {.run = &run};
    (void)state;
    open_run(&run, MOE_TENSORS_WHOLE, "0", NO_CHANGE);
    for (int step = 0; step < STEPS; step++) run_step(&run, step);
    assert_int_equal(moe_store_open("test_tensors.db.rank0", MOE_STORE_READ, &seen.store), MOE_OK);
    assert_int_equal(moe_store_each_tensor(seen.store, 0, 9, compare, &seen), MOE_OK);
    moe_store_close(seen.store);
    moe_store_close(close_run(&run));
    /* Embedding, last gain; two gains, router and attention's two a layer; two an expert. */
    const int each = 2 + LAYERS * (2 + 1 + 2 + 2 * EXPERTS);
    assert_int_equal(seen.n[MOE_TENSOR_INITIAL], each);
    assert_int_equal(seen.n[MOE_TENSOR_GRADIENT], STEPS * each);
    assert_int_equal(seen.n[MOE_TENSOR_PARAM], STEPS * each);
}

/* Gradients come as the backward pass completes them: from the last gain to the embedding. */
static int see_order(void *ctx, const struct moe_store_tensor *t)
{
    struct seen *seen = ctx;
    if (t->role != MOE_TENSOR_GRADIENT || t->step) return MOE_OK;
    if (!strcmp(t->name, "last_gain")) assert_true(seen->last_place == 0);
    if (!strcmp(t->name, "embedding")) assert_int_equal(seen->n[0], LAYERS * (5 + 2 * EXPERTS) + 1);
    seen->last_place = t->place;
    seen->n[0]++;
    return MOE_OK;
}

static int64_t empty_experts(struct moe_store *store)
{
    int64_t n_empty = 0, n_tokens;
    for (int layer = 0; layer < LAYERS; layer++) {
        int32_t *ids;
        int rows[EXPERTS] = {0}, top_k;
        assert_int_equal(moe_store_routing(store, 0, layer, 0, &n_tokens, &top_k, &ids), MOE_OK);
        for (int64_t i = 0; i < n_tokens * top_k; i++) rows[ids[i]]++;
        for (int e = 0; e < EXPERTS; e++) n_empty += !rows[e];
        free(ids);
    }
    return n_empty;
}

/* What no operation wrote is said to be so, and has no content; a zero is a zero. */
static int see_none(void *ctx, const struct moe_store_tensor *t)
{
    struct seen *seen = ctx;
    void *content;
    if (t->presence == MOE_IS_ZERO) seen->n_zero++;
    assert_int_equal(moe_store_tensor_content(seen->store, t, &content), MOE_OK);
    assert_null(content);
    if (t->presence != MOE_IS_NONE) return MOE_OK;
    assert_string_equal(t->name, "w2");
    assert_true(t->role == MOE_TENSOR_GRADIENT && t->n > 0 && t->sum_squares == 0);
    seen->n_none++;
    return MOE_OK;
}

static void test_presence(void **state)
{
    struct run run;
    struct seen seen = {0};
    (void)state;
    open_run(&run, MOE_TENSORS_HASHED, "0", NO_CHANGE);
    run_step(&run, 0);
    seen.store = close_run(&run);
    assert_int_equal(moe_store_each_tensor(seen.store, 0, 9, see_order, &seen), MOE_OK);
    assert_int_equal(moe_store_each_tensor(seen.store, 0, 9, see_none, &seen), MOE_OK);
    assert_int_equal(seen.n_none, 0);
    assert_true(empty_experts(seen.store) > 0);
    assert_int_equal(seen.n_zero, 2 * empty_experts(seen.store));
    moe_store_close(seen.store);

    open_run(&run, MOE_TENSORS_HASHED, "0", WITHOUT_W2);
    run_step(&run, 0);
    seen.store = close_run(&run);
    assert_int_equal(moe_store_each_tensor(seen.store, 0, 9, see_none, &seen), MOE_OK);
    assert_int_equal(seen.n_none, LAYERS * EXPERTS);
    moe_store_close(seen.store);
}

static int add_squares(void *ctx, const struct moe_store_tensor *t)
{
    ((double *)ctx)[t->role] += t->sum_squares;
    return MOE_OK;
}

/* Gradients are taken before they are clipped, and after: then their norm is the largest that is allowed. */
static void test_clipped(void **state)
{
    struct run run;
    double squares[MOE_TENSOR_ROLE_COUNT] = {0};
    (void)state;
    open_run(&run, MOE_TENSORS_HASHED, "0.01", NO_CHANGE);
    run_step(&run, 0);
    struct moe_store *store = close_run(&run);
    assert_int_equal(moe_store_each_tensor(store, 0, 0, add_squares, squares), MOE_OK);
    assert_true(fabs(sqrt(squares[MOE_TENSOR_CLIPPED]) - 0.01) <= 1e-5 * 0.01);
    assert_true(sqrt(squares[MOE_TENSOR_GRADIENT]) > 0.02);
    moe_store_close(store);
}

static int see_no_skipped(void *ctx, const struct moe_store_op *op)
{
    (void)ctx;
    assert_null(strstr(op->label, "left_out"));
    return MOE_OK;
}

/* A collective that is left out counts: the gradient before it is taken before it is clipped. */
static void test_skipped(void **state)
{
    double squares[2][MOE_TENSOR_ROLE_COUNT] = {0};
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct run run;
        open_run(&run, MOE_TENSORS_HASHED, "0.01", i ? WITH_SKIPPED : NO_CHANGE);
        run_step(&run, 0);
        struct moe_store *store = close_run(&run);
        assert_int_equal(moe_store_each_tensor(store, 0, 0, add_squares, squares[i]), MOE_OK);
        assert_int_equal(moe_store_each_op(store, 0, 0, see_no_skipped, NULL), MOE_OK);
        moe_store_close(store);
    }
    assert_true(squares[0][MOE_TENSOR_GRADIENT] == squares[1][MOE_TENSOR_GRADIENT]);
    assert_true(squares[0][MOE_TENSOR_CLIPPED] == squares[1][MOE_TENSOR_CLIPPED]);
}

/* Without the operations no gradient has been taken. */
static void test_not_run(void **state)
{
    struct run run;
    (void)state;
    open_run(&run, MOE_TENSORS_HASHED, "0", NO_CHANGE);
    assert_int_equal(moe_recorder_step(run.recorder, run.x, 0, 1, 1), MOE_EFAILED);
    assert_non_null(strstr(moe_error(), "step 0: 0 of "));
    moe_store_close(close_run(&run));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows), cmocka_unit_test(test_clipped),
                                       cmocka_unit_test(test_skipped), cmocka_unit_test(test_not_run),
                                       cmocka_unit_test(test_presence)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
