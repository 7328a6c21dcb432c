/* test_execute_ranks - the executor as one of several ranks: sizes, counts and initial parameters. */
#include "tests/unit/rig.h"

/* The other ranks: a communicator that moves nothing. */
static int split_fake(struct moe_communicator *world, const int *ranks, int n, int id,
                      struct moe_communicator **out)
{
    (void)ranks, (void)n, (void)id;
    *out = moe_alloc(1, sizeof **out);
    **out = *world;
    return MOE_OK;
}

static void close_fake(struct moe_communicator *c)
{
    free(c);
}

static int starts;
static int64_t seen_send[2], seen_recv[2];
static int start_fake(struct moe_communicator *c, const struct moe_transfer *t)
{
    (void)c;
    starts++;
    for (int i = 0; i < (moe_send_per_peer[t->op->collective] ? 2 : 1); i++) seen_send[i] = t->send[i];
    for (int i = 0; i < (moe_recv_per_peer[t->op->collective] ? 2 : 1); i++) seen_recv[i] = t->recv[i];
    return MOE_OK;
}

static int wait_fake(struct moe_communicator *c, double timeout_s)
{
    (void)c, (void)timeout_s;
    return MOE_OK;
}

/* Members that say nothing agree. */
static int gather_fake(struct moe_communicator *c, const void *own, void *all, size_t bytes, double timeout_s)
{
    (void)c, (void)own, (void)all, (void)bytes, (void)timeout_s;
    starts++;
    return MOE_OK;
}

static const struct moe_communicator_table fake = {
    .split = split_fake, .close = close_fake, .start = start_fake, .wait = wait_fake, .gather = gather_fake};

static int64_t seen_bytes;
static void see_bytes(void *ctx, const struct moe_executed *e)
{
    (void)ctx;
    seen_bytes = e->bytes;
}

/* Rank 1 of 2, with 5 tokens beside 3: `own` numbers here, `all` from everyone, one collective. */
static void run_collective(enum moe_collective collective)
{
    struct moe_builder b;
    const bool gathers = collective == MOE_ALLGATHER;
    moe_builder_open(&b, 2, (int64_t[]){3, 5});
    struct moe_symbol peer = {.scope = MOE_SCOPE_PEER};
    int symbol = moe_new_symbol(&b, "tokens_of_peer", -1, false, peer);
    int own = moe_const(&b, 5), of_peer = moe_sym(&b, symbol), all = moe_sum(&b, symbol);
    struct moe_ref from =
        moe_ref(moe_new_buffer(&b, "from", MOE_BUF_ACTIVATION, MOE_F32, 1, gathers ? own : all));
    struct moe_ref to =
        moe_ref(moe_new_buffer(&b, "to", MOE_BUF_ACTIVATION, MOE_F32, 1, gathers ? all : own));
    moe_new_block(&b, "layer", MOE_FORWARD, true);
    moe_emit(&b, (struct moe_op){.name = "move",
                                 .kind = MOE_COLLECTIVE,
                                 .collective = collective,
                                 .type = MOE_F32,
                                 .send = gathers ? own : of_peer,
                                 .recv = gathers ? of_peer : own,
                                 MOE_READS(from),
                                 MOE_WRITES(to)});
    moe_run_block(&b, 0, 0);
    struct rig rig;
    struct moe_communicator world = {&fake, 1, 2};
    double loss;
    open_rig(&rig, moe_builder_close(&b));
    rig.options.observe = see_bytes;
    rig.options.agree_steps = 1;
    starts = 0;
    assert_int_equal(moe_execute_open(rig.s, rig.device, &world, &rig.options, &rig.x), MOE_OK);
    assert_int_equal(moe_execute_step(rig.x, tokens, targets, &loss), MOE_OK);
    const int64_t *one = gathers ? seen_send : seen_recv, *each = gathers ? seen_recv : seen_send;
    assert_int_equal(one[0], 5);
    assert_true(each[0] == 3 && each[1] == 5);
    assert_int_equal(seen_bytes, gathers ? 5 * 4 : 8 * 4);
    assert_int_equal(starts, 2); /* the members asked each other first */
    assert_int_equal(moe_execute_step(rig.x, tokens, targets, &loss), MOE_OK);
    assert_int_equal(starts, 3);
    block_of(&rig)->ops[0].recv = block_of(&rig)->ops[0].send = gathers ? of_peer : own;
    assert_int_equal(moe_execute_step(rig.x, tokens, targets, &loss), MOE_EFAILED);
    assert_string_equal(moe_error(),
                        gathers ? "layer 0 forward move: sends itself 3 and receives 5 elements"
                                : "layer 0 forward move: sends 10 float32, but from holds 8 float32");
    close_rig(&rig);
}

static void test_gather_and_scatter(void **state)
{
    (void)state;
    run_collective(MOE_ALLGATHER);
    run_collective(MOE_REDUCESCATTER);
}

/* Rank 1 of 2 has experts 2 and 3 of 4: its rows are a slice of the counts. Padded, they need no counts. */
static void test_sizes_of_symbols(void **state)
{
    (void)state;
    enum { EXPERT = 3, SLICED = 6, PADDED };
    struct moe_builder b;
    moe_builder_open(&b, 2, (int64_t[]){9, 9});
    int T = moe_const(&b, 9), E = moe_const(&b, 4), K = moe_const(&b, 1), TE = moe_const(&b, 36);
    int all = moe_new_comm(&b, "all", 1, (int[]){0, 0});
    struct moe_ref logits =
        moe_ref(moe_new_param(&b, "logits", MOE_F32, 1, TE, (struct moe_param){.shard = -1, .init_std = 1}));
    struct moe_ref prob = moe_ref(moe_new_buffer(&b, "prob", MOE_BUF_ACTIVATION, MOE_F32, 1, TE));
    struct moe_ref expert = moe_ref(moe_new_buffer(&b, "expert", MOE_BUF_INDEX, MOE_I32, 1, T));
    struct moe_ref slot = moe_ref(moe_new_buffer(&b, "slot", MOE_BUF_INDEX, MOE_I32, 1, T));
    struct moe_ref counts = moe_ref(moe_new_buffer(&b, "counts", MOE_BUF_COUNTS, MOE_I64, 1, E));
    struct moe_symbol mine = {.scope = MOE_SCOPE_EXPERT, .comm = -1, .rows = 1, .cols = 4, .slice = all};
    struct moe_symbol padded = {.scope = MOE_SCOPE_EXPERT, .comm = -1, .cols = 2};
    padded.expr = moe_mul(&b, moe_const(&b, 7), moe_const(&b, 2));
    int n = moe_sum(&b, moe_new_symbol(&b, "mine", counts.buffer, false, mine));
    int n_padded = moe_sum(&b, moe_new_symbol(&b, "padded", -1, false, padded));
    struct moe_ref sliced = moe_ref(moe_new_buffer(&b, "sliced", MOE_BUF_ACTIVATION, MOE_F32, 1, n));
    struct moe_ref wide = moe_ref(moe_new_buffer(&b, "padded", MOE_BUF_ACTIVATION, MOE_F32, 1, n_padded));
    assert_true(expert.buffer == EXPERT && sliced.buffer == SLICED && wide.buffer == PADDED);
    moe_new_block(&b, "layer", MOE_FORWARD, true);
    moe_emit(&b, (struct moe_op){.name = "select",
                                 .kernel = MOE_K_TOPK,
                                 .type = MOE_F32,
                                 MOE_READS(logits),
                                 MOE_WRITES(prob, expert, slot, counts),
                                 MOE_SIZES(T, E, K)});
    moe_emit(&b, (struct moe_op){.name = "read", .kind = MOE_HOST_SYNC, MOE_READS(counts)});
    moe_emit(&b, (struct moe_op){.name = "clear", /* gives the buffer its size, as the next does */
                                 .kernel = MOE_K_ZERO,
                                 .type = MOE_F32,
                                 MOE_WRITES(sliced),
                                 MOE_SIZES(n)});
    moe_emit(&b, (struct moe_op){.name = "clear_wide",
                                 .kernel = MOE_K_ZERO,
                                 .type = MOE_F32,
                                 MOE_WRITES(wide),
                                 MOE_SIZES(n_padded)});
    moe_run_block(&b, 0, 0);
    struct rig rig;
    struct moe_communicator world = {&fake, 1, 2};
    double loss;
    open_rig(&rig, moe_builder_close(&b));
    assert_int_equal(moe_execute_open(rig.s, rig.device, &world, &rig.options, &rig.x), MOE_OK);
    assert_int_equal(moe_execute_step(rig.x, tokens, targets, &loss), MOE_OK);
    int64_t got, tokens_here, rows = 0;
    const int32_t *ids = moe_execute_buffer(rig.x, EXPERT, 0, &tokens_here);
    for (int64_t t = 0; t < tokens_here; t++) rows += ids[t] >= 2;
    moe_execute_buffer(rig.x, SLICED, 0, &got);
    assert_true(tokens_here == 9 && rows > 0 && rows < 9);
    assert_int_equal(got, rows);
    moe_execute_buffer(rig.x, PADDED, 0, &got);
    assert_int_equal(got, 28);
    close_rig(&rig);
}

/* Runs nothing: the values [n] of slot 1 of parameter "w" on a rank of a world of n_ranks that shares 1200
 * elements of it. */
static void initial_values(int n_ranks, int rank, uint64_t seed, int n, double *out)
{
    struct moe_builder b;
    moe_builder_open(&b, n_ranks, (int64_t[]){0, 0});
    b.s->n_layers = 2;
    moe_new_param(&b, "w", MOE_F64, 2, moe_const(&b, n),
                  (struct moe_param){.shard = 0, .init_mean = 5, .init_std = 3});
    moe_new_comm(&b, "copy of world", 1, (int[]){0, 0});
    struct rig rig;
    open_rig(&rig, moe_builder_close(&b));
    struct moe_communicator world = {&fake, rank, n_ranks};
    rig.options.seed = seed;
    assert_int_equal(moe_execute_open(rig.s, rig.device, &world, &rig.options, &rig.x), MOE_OK);
    int64_t got;
    const double *w = moe_execute_buffer(rig.x, 0, 1, &got);
    assert_int_equal(got, n);
    memcpy(out, w, (size_t)n * sizeof *w);
    close_rig(&rig);
}

static void test_parameters_do_not_depend_on_layout(void **state)
{
    (void)state;
    static double whole[1200], halves[1200], other[1200];
    initial_values(1, 0, 7, 1200, whole);
    initial_values(2, 0, 7, 600, halves);
    initial_values(2, 1, 7, 600, halves + 600);
    initial_values(1, 0, 8, 1200, other);
    assert_memory_equal(whole, halves, sizeof whole);
    assert_memory_not_equal(whole, other, sizeof whole);
    double sum = 0, squares = 0;
    for (int i = 0; i < 1200; i++) {
        sum += whole[i];
        squares += (whole[i] - 5) * (whole[i] - 5);
    }
    /* Normal around 5 with deviation 3: the mean of 1200 spreads by 3 / sqrt(1200) = 0.09, the deviation by
     * 0.06. */
    must_be_near(sum / 1200, 5, 0.4);
    must_be_near(sqrt(squares / 1200), 3, 0.25);
}

/* A collective that a rank leaves out: the library is not asked, and nothing is written. */
static void test_left_out(void **state)
{
    (void)state;
    for (int when = 0; when < 2; when++) {
        struct moe_builder b;
        moe_builder_open(&b, 2, (int64_t[]){3, 5});
        int n = moe_const(&b, 5), entered = moe_const(&b, when);
        struct moe_ref from = moe_ref(moe_new_buffer(&b, "from", MOE_BUF_ACTIVATION, MOE_F32, 1, n)),
                       to = moe_ref(moe_new_buffer(&b, "to", MOE_BUF_ACTIVATION, MOE_F32, 1, n)),
                       all = moe_ref(moe_new_buffer(&b, "all", MOE_BUF_OUTPUT, MOE_F32, 1, n));
        moe_new_block(&b, "layer", MOE_FORWARD, true);
        moe_emit(&b,
                 (struct moe_op){
                     .name = "fill", .kernel = MOE_K_ZERO, .type = MOE_F32, MOE_WRITES(from), MOE_SIZES(n)});
        moe_emit(&b, (struct moe_op){.name = "move",
                                     .kind = MOE_COLLECTIVE,
                                     .collective = MOE_ALLREDUCE,
                                     .type = MOE_F32,
                                     .when = entered,
                                     .send = n,
                                     .recv = n,
                                     MOE_READS(from),
                                     MOE_WRITES(to)});
        moe_emit(&b, (struct moe_op){.name = "out",
                                     .kernel = MOE_K_ADD,
                                     .type = MOE_F32,
                                     MOE_READS(when ? to : from, from),
                                     MOE_WRITES(all),
                                     MOE_SIZES(n)});
        moe_run_block(&b, 0, 0);
        struct rig rig;
        struct moe_communicator world = {&fake, 1, 2};
        double loss;
        open_rig(&rig, moe_builder_close(&b));
        starts = 0;
        assert_int_equal(moe_execute_open(rig.s, rig.device, &world, &rig.options, &rig.x), MOE_OK);
        int err = moe_execute_step(rig.x, tokens, targets, &loss);
        if (err < 0) fail_msg("%s", moe_error());
        assert_int_equal(starts, when);
        close_rig(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_gather_and_scatter),
        cmocka_unit_test(test_sizes_of_symbols),
        cmocka_unit_test(test_parameters_do_not_depend_on_layout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
