/* test_execute - the executor on schedules of a few operations whose numbers are solved by hand. */
#include "tests/unit/rig.h"

/* ---- a model: x = emb[token]; logits = x emb^T; loss; emb -= 0.5 * (its first two dlogits) ---- */

enum { EMB = 2, DLOGITS = 5, X = 6 };
static struct rig *model(void)
{
    struct moe_builder b;
    moe_builder_open(&b, 1, (int64_t[]){2});
    int T =
        moe_sym(&b, moe_new_symbol(&b, "tokens", -1, false, (struct moe_symbol){.scope = MOE_SCOPE_RANK}));
    int H = moe_const(&b, 1), V = moe_const(&b, 2), TV = moe_mul(&b, T, V);
    struct moe_ref token = moe_ref(moe_new_buffer(&b, "token", MOE_BUF_INPUT, MOE_I32, 1, T));
    struct moe_ref target = moe_ref(moe_new_buffer(&b, "target", MOE_BUF_INPUT, MOE_I32, 1, T));
    struct moe_ref emb = moe_ref(moe_new_param(&b, "emb", MOE_F64, 1, V, (struct moe_param){.shard = -1}));
    struct moe_ref logits = moe_ref(moe_new_buffer(&b, "logits", MOE_BUF_ACTIVATION, MOE_F64, 1, TV));
    struct moe_ref dlogits = moe_ref(moe_new_buffer(&b, "dlogits", MOE_BUF_ACTIVATION, MOE_F64, 1, TV));
    struct moe_ref x = moe_ref(moe_new_buffer(&b, "x", MOE_BUF_ACTIVATION, MOE_F64, 1, T));
    struct moe_ref loss = moe_ref(moe_new_buffer(&b, "loss", MOE_BUF_OUTPUT, MOE_F64, 1, H));
    assert_int_equal(emb.buffer, EMB);
    assert_int_equal(dlogits.buffer, DLOGITS);
    assert_int_equal(x.buffer, X);
    moe_new_block(&b, "model", MOE_FORWARD, false);
    moe_emit(&b, (struct moe_op){.name = "embed",
                                 .kernel = MOE_K_EMBED,
                                 .type = MOE_F64,
                                 MOE_READS(token, emb),
                                 MOE_WRITES(x),
                                 MOE_SIZES(T, H, V)});
    moe_emit(&b, (struct moe_op){.name = "head",
                                 .kernel = MOE_K_GEMM,
                                 .type = MOE_F64,
                                 .trans_b = true,
                                 MOE_READS(x, emb),
                                 MOE_WRITES(logits),
                                 MOE_SIZES(T, V, H)});
    moe_emit(&b, (struct moe_op){.name = "xent",
                                 .kernel = MOE_K_XENT,
                                 .type = MOE_F64,
                                 MOE_READS(logits, target),
                                 MOE_WRITES(dlogits, loss),
                                 MOE_SIZES(T, V)});
    moe_emit(&b, (struct moe_op){.name = "update",
                                 .kernel = MOE_K_SGD,
                                 .type = MOE_F64,
                                 .factor = 0.5,
                                 MOE_READS(emb, dlogits),
                                 MOE_WRITES(emb),
                                 MOE_SIZES(V)});
    moe_run_block(&b, 0, 0);
    static struct rig rig;
    open_rig(&rig, moe_builder_close(&b));
    return &rig;
}

static void set_emb(struct rig *rig)
{
    int64_t n;
    double *emb = moe_execute_param(rig->x, EMB, 0, &n);
    assert_int_equal(n, 2);
    emb[0] = 0;
    emb[1] = 1;
}

struct seen {
    int n;
    int64_t last_ns;
    const struct moe_op *op[8];
};

static void see(void *ctx, const struct moe_executed *e)
{
    struct seen *seen = ctx;
    assert_true(seen->last_ns <= e->entry_ns && e->entry_ns <= e->start_ns && e->start_ns <= e->end_ns);
    seen->last_ns = e->end_ns;
    seen->op[seen->n++] = e->op;
}

/* emb = [0, 1]. Token 1: x = 1, logits [0, 1], target 0: loss ln(1 + e) - 0. Token 0: x = 0, logits [0, 0],
 * target 1: ln 2. dlogits of the first: [1/(1+e) - 1, e/(1+e)], so emb becomes [0, 1] - 0.5 * that. */
static void test_step(void **state)
{
    (void)state;
    struct rig *rig = model();
    struct seen seen = {0};
    rig->options.observe = see;
    rig->options.ctx = &seen;
    start_rig(rig);
    set_emb(rig);
    double loss;
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
    must_be_near(loss, log(1 + exp(1)) + log(2), 1e-12);
    int64_t n;
    const double *emb = moe_execute_buffer(rig->x, EMB, 0, &n);
    must_be_near(emb[0], 0.5 * exp(1) / (1 + exp(1)), 1e-12);
    must_be_near(emb[1], 1 - 0.5 * exp(1) / (1 + exp(1)), 1e-12);
    assert_int_equal(seen.n, 4);
    for (int i = 0; i < 4; i++) assert_ptr_equal(seen.op[i], &block_of(rig)->ops[i]);
    close_rig(rig);
}

/* x [1, 0] as the first output, which the loss is, and the cross entropy as the second. */
static void test_outputs(void **state)
{
    (void)state;
    struct rig *rig = model();
    rig->s->buffers[X].role = MOE_BUF_OUTPUT;
    start_rig(rig);
    set_emb(rig);
    double loss;
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
    must_be_near(loss, 1, 0);
    moe_block_delete(block_of(rig), 2);
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_EFAILED);
    assert_string_equal(moe_error(), "the step ended, and nothing wrote loss[0]");
    close_rig(rig);
}

static int64_t launched; /* step of the last launch */
static int run_and_see(struct moe_device *d, const struct moe_launch *launch, int stream)
{
    launched = launch->step;
    return moe_device_cpu.run(d, launch, stream);
}

/* The first step is 1; a checkpoint may set how many were done. */
static void test_number_of_the_step(void **state)
{
    (void)state;
    struct rig *rig = model();
    struct moe_device_table table = moe_device_cpu;
    table.run = run_and_see;
    rig->device->table = &table;
    start_rig(rig);
    double loss;
    for (int step = 1; step <= 2; step++) {
        assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
        assert_int_equal(launched, step);
        assert_int_equal(moe_execute_steps(rig->x), step);
    }
    moe_execute_set_steps(rig->x, 10);
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
    assert_int_equal(launched, 11);
    close_rig(rig);
}

/* Without embed, x of the second step is what nobody wrote: NaN when poisoned, else what
 * the first step left. */
static void test_poison(void **state)
{
    (void)state;
    for (int poison = 0; poison < 2; poison++) {
        struct rig *rig = model();
        rig->options.poison = poison;
        start_rig(rig);
        double first, second;
        set_emb(rig);
        assert_int_equal(moe_execute_step(rig->x, tokens, targets, &first), MOE_OK);
        moe_block_delete(block_of(rig), 0);
        set_emb(rig);
        assert_int_equal(moe_execute_step(rig->x, tokens, targets, &second), MOE_OK);
        if (poison)
            assert_true(isnan(second));
        else
            must_be_near(first, second, 0);
        close_rig(rig);
    }
}

/* A buffer that no operation ever wrote is poison even when poisoning is off. */
static void test_never_written(void **state)
{
    (void)state;
    struct rig *rig = model();
    rig->options.poison = false;
    start_rig(rig);
    moe_block_delete(block_of(rig), 0);
    double loss;
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
    assert_true(isnan(loss));
    close_rig(rig);
}

static void test_output_not_written(void **state)
{
    (void)state;
    struct rig *rig = model();
    start_rig(rig);
    double loss;
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_OK);
    moe_block_delete(block_of(rig), 2);
    assert_int_equal(moe_execute_step(rig->x, tokens, targets, &loss), MOE_EFAILED);
    assert_string_equal(moe_error(), "the step ended, and nothing wrote loss[0]");
    close_rig(rig);
}

static void test_wrong_number_of_ranks(void **state)
{
    (void)state;
    struct rig *rig = model();
    rig->world->size = 3;
    assert_int_equal(moe_execute_open(rig->s, rig->device, rig->world, &rig->options, &rig->x), MOE_EUSAGE);
    assert_string_equal(moe_error(), "3 ranks were started, the scenario has 1");
    close_rig(rig);
}

/* ---- an exchange: 2 tokens choose 1 of 2 experts; the host reads the counts; `rows` (one per token) move to
 * `moved`, whose extent is the sum of the counts ---- */

enum { SELECT, READ, MOVE };
enum { PROB = 2, MOVED = 7 };
static struct rig *exchange_with(const struct moe_communicator_table *table)
{
    struct moe_builder b;
    moe_builder_open(&b, 1, (int64_t[]){2});
    int T = moe_const(&b, 2), E = moe_const(&b, 2), K = moe_const(&b, 1), TE = moe_const(&b, 4);
    struct moe_ref logits =
        moe_ref(moe_new_param(&b, "logits", MOE_F32, 1, TE, (struct moe_param){.shard = -1, .init_std = 1}));
    struct moe_ref prob = moe_ref(moe_new_buffer(&b, "prob", MOE_BUF_ACTIVATION, MOE_F32, 1, TE));
    struct moe_ref expert = moe_ref(moe_new_buffer(&b, "expert", MOE_BUF_INDEX, MOE_I32, 1, T));
    struct moe_ref slot = moe_ref(moe_new_buffer(&b, "slot", MOE_BUF_INDEX, MOE_I32, 1, T));
    struct moe_ref counts = moe_ref(moe_new_buffer(&b, "counts", MOE_BUF_COUNTS, MOE_I64, 1, E));
    struct moe_symbol all = {.scope = MOE_SCOPE_PEER, .comm = 0, .rows = 1, .cols = 2};
    int n = moe_sym(&b, moe_new_symbol(&b, "rows_to_peer", counts.buffer, true, all));
    moe_new_buffer(&b, "unused", MOE_BUF_INPUT, MOE_I32, 1, T);
    struct moe_ref moved = moe_ref(moe_new_buffer(&b, "moved", MOE_BUF_ACTIVATION, MOE_F32, 1, n));
    assert_int_equal(prob.buffer, PROB);
    assert_int_equal(moved.buffer, MOVED);
    moe_new_block(&b, "layer", MOE_FORWARD, true);
    moe_emit(&b, (struct moe_op){.name = "select",
                                 .kernel = MOE_K_TOPK,
                                 .type = MOE_F32,
                                 MOE_READS(logits),
                                 MOE_WRITES(prob, expert, slot, counts),
                                 MOE_SIZES(T, E, K)});
    moe_emit(&b, (struct moe_op){.name = "read", .kind = MOE_HOST_SYNC, MOE_READS(counts)});
    moe_emit(&b, (struct moe_op){.name = "move",
                                 .kind = MOE_COLLECTIVE,
                                 .collective = MOE_ALLTOALL,
                                 .type = MOE_F32,
                                 .send = n,
                                 .recv = n,
                                 MOE_READS(prob),
                                 MOE_WRITES(moved)});
    moe_run_block(&b, 0, 0);
    static struct rig rig;
    open_rig(&rig, moe_builder_close(&b));
    rig.world->table = table;
    start_rig(&rig);
    return &rig;
}

static struct rig *exchange(void)
{
    return exchange_with(&moe_comm_self);
}

static int step(struct rig *rig)
{
    double loss;
    return moe_execute_step(rig->x, tokens, targets, &loss);
}

static void must_fail(struct rig *rig, enum moe_err err, const char *text)
{
    assert_int_equal(step(rig), err);
    assert_string_equal(moe_error(), text);
    close_rig(rig);
}

static int constant(struct rig *rig, int64_t value)
{
    struct moe_schedule *s = rig->s;
    s->exprs = moe_grow(s->exprs, &s->cap_exprs, s->n_exprs + 1, sizeof *s->exprs);
    s->exprs[s->n_exprs] = (struct moe_expr){.op = MOE_EXPR_CONST, .value = value};
    return s->n_exprs++;
}

/* Both tokens choose one expert each, so two elements move, whatever the logits. */
static void test_exchange(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    assert_int_equal(step(rig), MOE_OK);
    int64_t n, n_prob;
    const float *prob = moe_execute_buffer(rig->x, PROB, 0, &n_prob),
                *moved = moe_execute_buffer(rig->x, MOVED, 0, &n);
    assert_int_equal(n, 2);
    assert_int_equal(n_prob, 4);
    assert_memory_equal(moved, prob, 2 * sizeof *moved);
    assert_true(moved[0] > 0);
    close_rig(rig);
}

static void test_unknown_size(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    assert_int_equal(step(rig), MOE_OK); /* what the first step knew is no excuse for the second */
    moe_block_delete(block_of(rig), READ);
    must_fail(rig, MOE_EFAILED,
              "layer 0 forward move: moved needs rows_to_peer, and no host sync has read counts");
}

/* Nor is it one when the counts of the first step were not even replaced. */
static void test_size_of_the_step_before(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    assert_int_equal(step(rig), MOE_OK);
    moe_block_delete(block_of(rig), READ);
    moe_block_delete(block_of(rig), SELECT);
    must_fail(rig, MOE_EFAILED,
              "layer 0 forward move: moved needs rows_to_peer, and no host sync has read counts");
}

/* Counts that change after the host read them are unknown again. */
static void test_stale_size(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    struct moe_op *ops = block_of(rig)->ops, select = ops[SELECT];
    memmove(&ops[READ + 2], &ops[READ + 1], sizeof *ops);
    ops[READ + 1] = select;
    block_of(rig)->n_ops++;
    must_fail(rig, MOE_EFAILED,
              "layer 0 forward move: moved needs rows_to_peer, and no host sync has read counts");
}

static void test_counts_not_written(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    assert_int_equal(step(rig), MOE_OK);
    moe_block_delete(block_of(rig), SELECT);
    must_fail(rig, MOE_EFAILED, "layer 0 forward read: reads counts[0], which nothing wrote");
}

static void test_sends_too_much(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    block_of(rig)->ops[MOVE].send = constant(rig, 5);
    must_fail(rig, MOE_EFAILED, "layer 0 forward move: sends 5 float32, but prob holds 4 float32");
}

static void test_receives_too_much(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    block_of(rig)->ops[MOVE].recv = constant(rig, 3);
    must_fail(rig, MOE_EFAILED, "layer 0 forward move: receives 3 float32, but moved holds 2 float32");
}

static void test_negative_size(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    block_of(rig)->ops[MOVE].send = constant(rig, -1);
    must_fail(rig, MOE_EFAILED, "layer 0 forward move: what it sends is -1");
}

static void test_own_part_disagrees(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    block_of(rig)->ops[MOVE].recv = constant(rig, 1);
    must_fail(rig, MOE_EFAILED, "layer 0 forward move: sends itself 2 and receives 1 elements");
}

/* A communicator of one rank that notes where the last collective began to read. */
static struct moe_communicator_table watching;
static const char *read_from;

static int start_watching(struct moe_communicator *c, const struct moe_transfer *t)
{
    read_from = t->in;
    return moe_comm_self.start(c, t);
}

static int split_watching(struct moe_communicator *world, const int *ranks, int n, int id,
                          struct moe_communicator **out)
{
    int err = moe_comm_self.split(world, ranks, n, id, out);
    (*out)->table = &watching;
    return err;
}

/* Of the 4 elements, n from `begin` on are sent. Result: that of the step. */
static int step_with_range(struct rig *rig, int64_t begin, int64_t n)
{
    struct moe_op *move = &block_of(rig)->ops[MOVE];
    move->reads[0].begin = constant(rig, begin);
    move->reads[0].n = move->send = move->recv = constant(rig, n);
    read_from = NULL;
    return step(rig);
}

/* A range begins where it says, also one of no element; what that says beyond the buffer is no fault. */
static void test_ranges(void **state)
{
    (void)state;
    watching = moe_comm_self;
    watching.start = start_watching;
    watching.split = split_watching;
    struct rig *rig = exchange_with(&watching);
    assert_int_equal(step_with_range(rig, 0, 2), MOE_OK);
    const char *first = read_from;
    assert_int_equal(step_with_range(rig, 3, 1), MOE_OK);
    assert_ptr_equal(read_from, first + 3 * sizeof(float));
    assert_int_equal(step_with_range(rig, 3, 0), MOE_OK);
    assert_ptr_equal(read_from, first + 3 * sizeof(float));
    assert_int_equal(step_with_range(rig, 4, 0), MOE_OK);
    assert_ptr_equal(read_from, first + 4 * sizeof(float));
    for (int64_t begin = -1; begin < 6; begin += 6) {
        assert_int_equal(step_with_range(rig, begin, 0), MOE_OK);
        assert_ptr_equal(read_from, first);
    }
    assert_int_equal(step_with_range(rig, 4, 1), MOE_EFAILED);
    assert_string_equal(moe_error(), "layer 0 forward move: elements 4 to 5 of prob, which holds 4");
    close_rig(rig);
}

/* Of two elements only one arrives: the other is poison. */
static void test_partly_received(void **state)
{
    (void)state;
    struct rig *rig = exchange();
    block_of(rig)->ops[MOVE].send = block_of(rig)->ops[MOVE].recv = constant(rig, 1);
    assert_int_equal(step(rig), MOE_OK);
    int64_t n;
    const float *moved = moe_execute_buffer(rig->x, MOVED, 0, &n);
    assert_true(n == 2 && !isnan(moved[0]) && isnan(moved[1]));
    close_rig(rig);
}

/* m += w, twice: state starts at 0 and stays, whatever is poisoned. A norm is no tensor. */
static void test_state_persists(void **state)
{
    (void)state;
    struct moe_builder b;
    moe_builder_open(&b, 1, (int64_t[]){1});
    int two = moe_const(&b, 2);
    moe_new_norm(&b, "norm", 0);
    struct moe_ref w =
        moe_ref(moe_new_param(&b, "w", MOE_F64, 1, two, (struct moe_param){.shard = -1, .init_mean = 4}));
    struct moe_ref m = moe_ref(moe_new_buffer(&b, "m", MOE_BUF_STATE, MOE_F64, 1, two));
    moe_new_block(&b, "all", MOE_UPDATE, false);
    moe_emit(&b, (struct moe_op){.name = "add",
                                 .kernel = MOE_K_SGD,
                                 .type = MOE_F64,
                                 .factor = -1,
                                 MOE_READS(m, w),
                                 MOE_WRITES(m),
                                 MOE_SIZES(two)});
    moe_run_block(&b, 0, 0);
    struct rig rig;
    open_rig(&rig, moe_builder_close(&b));
    start_rig(&rig);
    double loss;
    for (int step = 1; step <= 2; step++) {
        int64_t n;
        assert_int_equal(moe_execute_step(rig.x, tokens, targets, &loss), MOE_OK);
        const double *content = moe_execute_buffer(rig.x, m.buffer, 0, &n);
        assert_int_equal(n, 2);
        assert_true(content[0] == 4 * step && content[1] == 4 * step);
    }
    close_rig(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step),
        cmocka_unit_test(test_outputs),
        cmocka_unit_test(test_number_of_the_step),
        cmocka_unit_test(test_poison),
        cmocka_unit_test(test_never_written),
        cmocka_unit_test(test_output_not_written),
        cmocka_unit_test(test_wrong_number_of_ranks),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_unknown_size),
        cmocka_unit_test(test_size_of_the_step_before),
        cmocka_unit_test(test_stale_size),
        cmocka_unit_test(test_counts_not_written),
        cmocka_unit_test(test_sends_too_much),
        cmocka_unit_test(test_receives_too_much),
        cmocka_unit_test(test_negative_size),
        cmocka_unit_test(test_own_part_disagrees),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_partly_received),
        cmocka_unit_test(test_state_persists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
