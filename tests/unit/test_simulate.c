/* Steps solved by hand. The machine: launch 1 us, host sync 10 us; memory 4000 B/us, so a copy 2000 B/us; a
 * GPU's links 1000 B/us and 2 us; its NIC 100 B/us and 5 us. */
#include "sim/lower/builder.h"
#include "sim/simulate.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>

#include <cmocka.h>

enum { US = 1000000 }; /* ps */
enum { ON_COMPUTE = 1 << MOE_STREAM_COMPUTE, ON_COMM = 1 << MOE_STREAM_COMM };

static const struct moe_topo node_of_4 = {.gpus_per_node = 4,
                                          .nics_per_node = 4,
                                          .matmul_float32_flops = 1e12,
                                          .matmul_float64_flops = 0.5e12,
                                          .memory_Bps = 4e9,
                                          .launch_s = 1e-6,
                                          .host_sync_s = 10e-6,
                                          .intra_Bps = 1e9,
                                          .nic_Bps = 1e8,
                                          .intra_latency_s = 2e-6,
                                          .inter_latency_s = 5e-6};

static void assert_near(double a, double b)
{
    if (fabs(a - b) > 1e-9 * (1 + fabs(b))) fail_msg("%.12g is not %.12g", a, b);
}

/* ---- schedules of one block ---- */

static void open_step(struct moe_builder *b, int n_ranks)
{
    int64_t *tokens = moe_alloc((size_t)n_ranks, sizeof *tokens);
    moe_builder_open(b, n_ranks, tokens);
    moe_run_block(b, moe_new_block(b, "step", MOE_FORWARD, false), 0);
    free(tokens);
}

static void kernel(struct moe_builder *b, const char *name, uint32_t waits, int64_t bytes)
{
    struct moe_op op = {
        .kernel = MOE_K_SCALE, .waits = waits, .bytes = moe_const(b, bytes), .stream = MOE_STREAM_COMPUTE};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

/* On buffers of its own, so that it waits only as told. */
static void collective(struct moe_builder *b, const char *name, enum moe_collective collective, int comm,
                       uint32_t waits, int send, int recv)
{
    struct moe_ref from = moe_ref(moe_new_buffer(b, "from", MOE_BUF_ACTIVATION, MOE_F32, 1, send));
    struct moe_ref to = moe_ref(moe_new_buffer(b, "to", MOE_BUF_ACTIVATION, MOE_F32, 1, recv));
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = collective,
                        .comm = comm,
                        .type = MOE_F32,
                        .stream = MOE_STREAM_COMM,
                        .waits = waits,
                        .send = send,
                        .recv = recv,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

static void alltoall(struct moe_builder *b, const char *name, uint32_t waits, int64_t elements)
{
    int n = moe_const(b, elements);
    collective(b, name, MOE_ALLTOALL, 0, waits, n, n);
}

static void sync_host(struct moe_builder *b, uint32_t waits)
{
    moe_emit(b, (struct moe_op){.name = "sync", .kind = MOE_HOST_SYNC, .waits = waits});
}

/* A kernel without cost that writes counts [R, 1], their exchange, and an all-to-all of 250 float32 a row. */
static void counted_alltoall(struct moe_builder *b, int n_ranks)
{
    int one = moe_const(b, 1), E = moe_const(b, n_ranks);
    struct moe_ref counts = moe_ref(moe_new_buffer(b, "counts", MOE_BUF_COUNTS, MOE_I64, 1, E));
    struct moe_ref got = moe_ref(moe_new_buffer(b, "got", MOE_BUF_INDEX, MOE_I64, 1, E));
    struct moe_symbol y = {.scope = MOE_SCOPE_PEER, .comm = 0, .rows = n_ranks, .cols = 1};
    int to = moe_sym(b, moe_new_symbol(b, "to", counts.buffer, true, y));
    int from = moe_sym(b, moe_new_symbol(b, "from", got.buffer, true, y));
    int row = moe_const(b, 250);
    moe_emit(b, (struct moe_op){
                    .name = "count", .kernel = MOE_K_TOPK, .bytes = moe_const(b, 0), MOE_WRITES(counts)});
    moe_emit(b, (struct moe_op){.name = "exchange",
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_ALLTOALL,
                                .type = MOE_I64,
                                .stream = MOE_STREAM_COMM,
                                .send = one,
                                .recv = one,
                                MOE_READS(counts),
                                MOE_WRITES(got)});
    collective(b, "move", MOE_ALLTOALL, 0, 0, moe_mul(b, to, row), moe_mul(b, from, row));
}

static struct moe_routing *routing_of(int n_ranks, int n_experts, const int32_t *counts)
{
    struct moe_routing *r = moe_routing_new(1, n_ranks, n_experts, 1);
    memcpy(r->counts, counts, (size_t)n_ranks * (size_t)n_experts * sizeof *counts);
    return r;
}

/* ---- running them ---- */

static int simulate(const struct moe_schedule *s, const struct moe_routing *r, const struct moe_topo *machine,
                    struct moe_sim_result *out)
{
    struct moe_topo t = *machine;
    int err = moe_simulate(s, r, &t, out);
    free(t.link_Bps);
    free(t.link_class);
    if (err < 0) return err;
    double sum = out->compute_us + out->exposed_us + out->waiting_us + out->host_us;
    assert_near(sum, (double)out->step * 1e-6);
    return err;
}

static struct moe_sim_result run(struct moe_builder *b, const struct moe_routing *r, const struct moe_topo *t)
{
    struct moe_sim_result out;
    struct moe_schedule *s = moe_builder_close(b);
    assert_int_equal(simulate(s, r, t, &out), MOE_OK);
    moe_schedule_free(s);
    return out;
}

static void expect_verdict(struct moe_schedule *s, const struct moe_routing *r, const char *text)
{
    struct moe_sim_result out;
    assert_int_equal(simulate(s, r, &node_of_4, &out), MOE_EVERDICT);
    if (!strstr(moe_error(), text)) fail_msg("'%s' is not in '%s'", text, moe_error());
    moe_sim_free(&out);
    moe_schedule_free(s);
}

static void expect_time(const struct moe_sim_result *out, double compute_us, double exposed_us,
                        double waiting_us, double host_us)
{
    assert_near(out->compute_us, compute_us);
    assert_near(out->exposed_us, exposed_us);
    assert_near(out->waiting_us, waiting_us);
    assert_near(out->host_us, host_us);
}

static void expect_row(const struct moe_sim_result *out, int row, const char *op, double own_us,
                       double wait_us, int64_t bytes)
{
    assert_true(row < out->n_rows);
    assert_string_equal(out->rows[row].op, op);
    assert_near(out->rows[row].own_us, own_us);
    assert_near(out->rows[row].wait_us, wait_us);
    assert_int_equal(out->rows[row].bytes, bytes);
}

/* ---- kernels ---- */

/* Issued at 1 us, 8000 B at 4000 B/us: ends at 3 us. */
static void test_one_kernel(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 1);
    kernel(&b, "scale", 0, 8000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 3 * US);
    assert_int_equal(out.events, 2);
    assert_int_equal(out.rows[0].instances, 1);
    expect_time(&out, 2, 0, 0, 1);
    expect_row(&out, 0, "step forward scale", 2, 0, 0);
    moe_sim_free(&out);
}

/* A waits for nothing and runs from 1 to 3 us, when the host begins to sync: until 13 us. B is issued at 14
 * us. */
static void test_host_sync(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 1);
    kernel(&b, "a", 0, 8000);
    sync_host(&b, ON_COMPUTE);
    kernel(&b, "b", 0, 8000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 16 * US);
    expect_time(&out, 4, 0, 0, 12);
    expect_row(&out, 1, "step forward sync", 10, 2, 0);
    moe_sim_free(&out);
}

/* A sync on a stream that is done does not wait for the other: A runs from 1 to 21 us, the host syncs from 1
 * to 11 us, B is issued at 12 us and runs from 21 to 23 us. */
static void test_host_sync_on_one_stream(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 1);
    kernel(&b, "a", 0, 80000);
    sync_host(&b, ON_COMM);
    kernel(&b, "b", 0, 8000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 23 * US);
    moe_sim_free(&out);
}

/* ---- collectives ---- */

/* 4000 B each way on links of their own: 4 us and 2 us of latency (the copies take 2 us), from 1 us on. */
static void test_alltoall(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "move", 0, 1000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 7 * US);
    expect_time(&out, 0, 6, 0, 1);
    expect_row(&out, 0, "step forward move", 6, 0, 8000);
    assert_near(out.comm_us, 6);
    moe_sim_free(&out);
}

/* An all-to-all of one member is a copy: 4000 B at 2000 B/us, no latency, no bytes on links. */
static void test_alltoall_alone(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 1);
    alltoall(&b, "move", 0, 1000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 3 * US);
    expect_row(&out, 0, "step forward move", 2, 0, 0);
    assert_int_equal(out.bytes[MOE_LINK_INTRA], 0);
    moe_sim_free(&out);
}

/* No launch time, no latency. Counts: 3 flows of 8 B on each link: 0.024 us. Then 0 -> 1: 4000 B, 0 -> 3:
 * 1000, 1 -> 3: 1000, 2 -> 3: 2000. The way into 3 is full at 333 B/us each, 0 -> 1 gets the other 667.
 *   3 us   0 -> 3 and 1 -> 3 end; left are 1000 B of 2 -> 3 and 2000 B of 0 -> 1, at 1000 B/us each
 *   4 us   2 -> 3 ends; ranks 2 and 3 leave
 *   5 us   0 -> 1 ends; ranks 0 and 1 leave
 * The block runs twice: the second time ranks 2 and 3 wait 1 us for the exchange, while the first move is
 * still going on, and all is as before: 2 x 5.024 us. */
static void test_unequal_alltoall(void **state)
{
    (void)state;
    struct moe_topo t = node_of_4;
    t.launch_s = t.intra_latency_s = 0;
    struct moe_routing *r = routing_of(4, 4, (int32_t[]){0, 4, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0});
    struct moe_builder b;
    open_step(&b, 4);
    counted_alltoall(&b, 4);
    moe_run_block(&b, 0, 0);
    struct moe_sim_result out = run(&b, r, &t);
    assert_int_equal(out.step, 10048000);
    expect_row(&out, 1, "step forward exchange", 2 * 0.024, 0.5, 2 * 12 * 8);
    expect_row(&out, 2, "step forward move", 2 * 4.5, 0, 2 * 8000);
    assert_int_equal(out.rows[2].instances, 2);
    expect_time(&out, 0, 2 * 4.524, 0.5, 0.5); /* ranks 2 and 3 idle in the last us */
    moe_sim_free(&out);
    moe_routing_free(r);
}

/* Issued at 1 us, the kernel ends at 3 us on rank 0 and at 6 us on rank 1; both then exchange for 6 us. Rank
 * 0 waits for 3 us. */
static void test_late_rank(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    kernel(&b, "scale", 0, 8000);
    alltoall(&b, "move", ON_COMPUTE, 1000);
    moe_schedule_split_role(b.s, 1)->blocks[0].ops[0].bytes = moe_const(&b, 20000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 12 * US);
    expect_time(&out, 3.5, 6, 1.5, 1);
    expect_row(&out, 0, "step forward scale", 3.5, 0, 0);
    expect_row(&out, 1, "step forward move", 6, 1.5, 8000);
    assert_int_equal(out.n_rows, 2);
    moe_sim_free(&out);
}

/* The move runs from 1 to 7 us; A, issued at 2 us, hides 2 us of it; B waits for it and
 * runs from 7 to 9 us. */
static void test_overlap(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "move", 0, 1000);
    kernel(&b, "a", 0, 8000);
    kernel(&b, "b", ON_COMM, 8000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 9 * US);
    expect_time(&out, 4, 4, 0, 1);
    assert_near(out.comm_us, 6);
    moe_sim_free(&out);
}

/* "After everything issued before on that stream", nothing later: B waits for the first move (1 to 7 us), not
 * for the second (7 to 13 us), and runs from 7 to 9 us. */
static void test_wait_is_for_what_came_before(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "first", 0, 1000);
    kernel(&b, "b", ON_COMM, 8000);
    alltoall(&b, "second", 0, 1000);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 13 * US);
    expect_time(&out, 2, 10, 0, 1);
    moe_sim_free(&out);
}

/* Two collectives of one communicator follow one another even on two streams: 1 to 7 us and 7 to 13 us. */
static void test_one_communicator_on_two_streams(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "x", 0, 1000);
    alltoall(&b, "y", 0, 1000);
    b.s->roles[0].blocks[0].ops[1].stream = MOE_STREAM_COMPUTE;
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 13 * US);
    expect_time(&out, 0, 12, 0, 1);
    moe_sim_free(&out);
}

/* 4000 B: each member sends 2 * 3/4 of them, 6 us, in 6 steps of 2 us of latency; three
 * times, from 1 us on. */
static void test_allreduce(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 4);
    int n = moe_const(&b, 1000);
    collective(&b, "sum", MOE_ALLREDUCE, 0, 0, n, n);
    for (int more = 0; more < 2; more++) moe_run_block(&b, 0, 0);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 55 * US);
    expect_row(&out, 0, "step forward sum", 54, 0, 72000);
    moe_sim_free(&out);
}

/* Two nodes of three, 4800 B: each member sends 2 * 5/6 of them, a third on each of three rings, which cross
 * different NICs: 26.67 us for 2,667 B. Before it, twice 4 steps of 2 us and one of 5 us. */
static void test_allreduce_over_nodes(void **state)
{
    (void)state;
    struct moe_topo t = node_of_4;
    t.gpus_per_node = t.nics_per_node = 3;
    struct moe_builder b;
    open_step(&b, 6);
    int n = moe_const(&b, 1200);
    collective(&b, "sum", MOE_ALLREDUCE, 0, 0, n, n);
    struct moe_sim_result out = run(&b, NULL, &t);
    assert_int_equal(out.step, 53670000);
    expect_row(&out, 0, "step forward sum", 52.67, 0, 48000);
    assert_int_equal(out.bytes[MOE_LINK_INTRA], 32000);
    assert_int_equal(out.bytes[MOE_LINK_NIC], 16000);
    moe_sim_free(&out);
}

/* Blocks of 1000, 2000, 3000 and 4000 float32, by the tokens of the ranks. */
static void ring_of_blocks(struct moe_builder *b, enum moe_collective kind)
{
    struct moe_symbol of_rank = {.scope = MOE_SCOPE_RANK, .comm = -1}, of_peer = {.scope = MOE_SCOPE_PEER};
    moe_builder_open(b, 4, (int64_t[]){100, 200, 300, 400});
    moe_run_block(b, moe_new_block(b, "step", MOE_FORWARD, false), 0);
    int ten = moe_const(b, 10);
    int own = moe_mul(b, moe_sym(b, moe_new_symbol(b, "own", -1, false, of_rank)), ten);
    int each = moe_mul(b, moe_sym(b, moe_new_symbol(b, "each", -1, false, of_peer)), ten);
    bool scatters = kind == MOE_REDUCESCATTER;
    collective(b, "ring", kind, 0, 0, scatters ? each : own, scatters ? own : each);
}

/* Two nodes of two and two rings with half of each block, 0 1 2 3 and 1 0 3 2, each NIC crossed by one, at
 * 100 B/us. Of 40,000 B
 *   allgather      1 -> 2 all but block 2: 14,000; 3 -> 0 18,000, 180 us; 0 -> 3 12,000; 2 -> 1 16,000
 *   reducescatter  1 -> 2 all but block 1: 16,000; 3 -> 0 12,000; 0 -> 3 18,000; 2 -> 1 14,000
 * behind 2 steps of 2 us and one of 5 us. All leave together. */
static void test_rings_of_unequal_blocks(void **state)
{
    (void)state;
    static const struct {
        enum moe_collective collective;
        double us;
        int64_t nic_bytes;
    } cases[] = {{MOE_ALLGATHER, 189, 60000}, {MOE_REDUCESCATTER, 189, 60000}};
    struct moe_topo t = node_of_4;
    t.gpus_per_node = t.nics_per_node = 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_builder b;
        ring_of_blocks(&b, cases[i].collective);
        struct moe_sim_result out = run(&b, NULL, &t);
        expect_time(&out, 0, cases[i].us, 0, 1);
        expect_row(&out, 0, "step forward ring", cases[i].us, 0, 120000);
        assert_int_equal(out.bytes[MOE_LINK_NIC], cases[i].nic_bytes);
        moe_sim_free(&out);
    }
}

/* 8 us of kernels that may be 10 % off and 6 us of an all-to-all, 20 %: sqrt(0.8^2 + 1.2^2) of 15 us. Without
 * one of the two it is not known. */
static void test_interval(void **state)
{
    (void)state;
    struct moe_topo t = node_of_4;
    t.kernel_error = 0.1;
    t.intra_error = 0.2;
    for (int known = 2; known >= 0; known--) {
        struct moe_builder b;
        open_step(&b, 4);
        alltoall(&b, "move", 0, 1000);
        kernel(&b, "work", 1u << MOE_STREAM_COMM, 32000);
        if (known < 2) *(known ? &t.kernel_error : &t.intra_error) = 0;
        struct moe_sim_result out = run(&b, NULL, &t);
        if (known == 2)
            assert_near(out.step_error * (double)out.step / US,
                        hypot(0.1 * (out.compute_us + out.waiting_us), 0.2 * out.exposed_us));
        assert_int_equal(isnan(out.step_error) != 0, known < 2);
        moe_sim_free(&out);
        t.kernel_error = 0.1;
    }
}

/* Two nodes of two, 4000 B a pair: 4 pairs within nodes, 8 between; a NIC sends 8000 B in 80 us, 5 us
 * latency. */
static void test_link_classes(void **state)
{
    (void)state;
    struct moe_topo t = node_of_4;
    t.gpus_per_node = t.nics_per_node = 2;
    struct moe_builder b;
    open_step(&b, 4);
    alltoall(&b, "move", 0, 1000);
    struct moe_sim_result out = run(&b, NULL, &t);
    assert_int_equal(out.step, 86 * US);
    assert_int_equal(out.bytes[MOE_LINK_INTRA], 16000);
    assert_int_equal(out.bytes[MOE_LINK_BUS], 0);
    assert_int_equal(out.bytes[MOE_LINK_NIC], 32000);
    assert_int_equal(out.rows[0].bytes, 48000);
    moe_sim_free(&out);
}

/* Pairs 0-1 and 2-3 of a second communicator exchange at once: 1 + 6 us. */
static void test_groups(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 4);
    int pairs = moe_new_comm(&b, "pairs", 2, (int[]){0, 0, 1, 1}), n = moe_const(&b, 1000);
    collective(&b, "move", MOE_ALLTOALL, pairs, 0, n, n);
    struct moe_sim_result out = run(&b, NULL, &node_of_4);
    assert_int_equal(out.step, 7 * US);
    expect_row(&out, 0, "step forward move", 6, 0, 16000);
    moe_sim_free(&out);
}

/* ---- what cannot be timed ---- */

/* Rank 1 takes part twice and not the third time. */
static void test_missing_member(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 3);
    alltoall(&b, "first", 0, 1000);
    alltoall(&b, "second", 0, 1000);
    alltoall(&b, "third", 0, 1000);
    moe_block_delete(&moe_schedule_split_role(b.s, 1)->blocks[0], 2);
    expect_verdict(moe_builder_close(&b), NULL,
                   "step forward third: 2 of 3 ranks wait for ever; missing: 1 (");
}

/* Rank 0 enters x then y, rank 1 y then x, on one stream. */
static void test_opposite_orders(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    int other = moe_new_comm(&b, "other", 1, (int[]){0, 0}), n = moe_const(&b, 1);
    collective(&b, "x", MOE_ALLTOALL, 0, 0, n, n);
    collective(&b, "y", MOE_ALLTOALL, other, 0, n, n);
    struct moe_op *ops = moe_schedule_split_role(b.s, 1)->blocks[0].ops, first = ops[0];
    ops[0] = ops[1];
    ops[1] = first;
    expect_verdict(moe_builder_close(&b), NULL, "step forward x: 1 of 2 ranks wait for ever; missing: 1 (");
}

static void test_different_collectives(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "move", 0, 1000);
    moe_schedule_split_role(b.s, 1)->blocks[0].ops[0].collective = MOE_ALLREDUCE;
    expect_verdict(moe_builder_close(&b), NULL, "rank 0 is in step forward move where rank 1 is in");
    open_step(&b, 2);
    alltoall(&b, "move", 0, 1000);
    moe_schedule_split_role(b.s, 1)->itinerary[0].layer = 1;
    expect_verdict(moe_builder_close(&b), NULL, "rank 0 is in step forward move where rank 1 is in");
}

static void test_different_sizes(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 2);
    alltoall(&b, "move", 0, 1000);
    moe_schedule_split_role(b.s, 1)->blocks[0].ops[0].recv = moe_const(&b, 999);
    expect_verdict(moe_builder_close(&b), NULL,
                   "step forward move: rank 0 sends 1000 elements, rank 1 expects 999");
    ring_of_blocks(&b, MOE_ALLGATHER); /* members that are not neighbours */
    moe_schedule_split_role(b.s, 2)->blocks[0].ops[0].recv = moe_const(&b, 999);
    expect_verdict(moe_builder_close(&b), NULL,
                   "step forward ring: rank 0 sends 1000 elements, rank 2 expects 999");
    ring_of_blocks(&b, MOE_REDUCESCATTER);
    moe_schedule_split_role(b.s, 2)->blocks[0].ops[0].send = moe_const(&b, 999);
    expect_verdict(moe_builder_close(&b), NULL,
                   "step forward ring: rank 2 sends 999 elements, rank 0 expects 1000");
}

/* Without the kernel that counts, the exchange moves what nobody knows, and the move has no size. */
static void test_unknown_size(void **state)
{
    (void)state;
    struct moe_routing *r = routing_of(2, 2, (int32_t[]){1, 1, 1, 1});
    struct moe_builder b;
    open_step(&b, 2);
    counted_alltoall(&b, 2);
    moe_block_delete(&b.s->roles[0].blocks[0], 0);
    expect_verdict(moe_builder_close(&b), r, "step forward move: rank 0 starts it before its size is known");
    moe_routing_free(r);
}

static void test_endless_step(void **state)
{
    (void)state;
    struct moe_builder b;
    open_step(&b, 1);
    kernel(&b, "a", 0, INT64_MAX);
    kernel(&b, "b", 0, INT64_MAX);
    struct moe_topo t = node_of_4;
    t.memory_Bps = 1;
    struct moe_sim_result out;
    struct moe_schedule *s = moe_builder_close(&b);
    assert_int_equal(simulate(s, NULL, &t, &out), MOE_EINPUT);
    moe_sim_free(&out);
    moe_schedule_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_kernel),
        cmocka_unit_test(test_host_sync),
        cmocka_unit_test(test_host_sync_on_one_stream),
        cmocka_unit_test(test_alltoall),
        cmocka_unit_test(test_alltoall_alone),
        cmocka_unit_test(test_unequal_alltoall),
        cmocka_unit_test(test_late_rank),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_wait_is_for_what_came_before),
        cmocka_unit_test(test_one_communicator_on_two_streams),
        cmocka_unit_test(test_allreduce),
        cmocka_unit_test(test_allreduce_over_nodes),
        cmocka_unit_test(test_rings_of_unequal_blocks),
        cmocka_unit_test(test_interval),
        cmocka_unit_test(test_link_classes),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_missing_member),
        cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_different_collectives),
        cmocka_unit_test(test_different_sizes),
        cmocka_unit_test(test_unknown_size),
        cmocka_unit_test(test_endless_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
