/* Values: count buffers hold what kernels and collectives put there; the host knows it after a sync.
 *
 * The schedule by hand: 4 ranks, 4 experts, 1 expert a rank, 2 layers. Communicator 0 is the world, 1 "ep"
 * has the groups {0, 2} and {1, 3}.
 *   counts       [2 peers, 2]  COUNTS, a slot a layer: what this rank sends to the experts of each peer
 *   peer_counts  [2 peers, 2]  what arrives, through an all-to-all of 2 elements a peer over ep
 *   sums         [4]           all-reduce of counts over the world
 *   ragged                     through an all-to-all whose sizes are the symbol "to"
 *   rows                       float32: of no concern here
 * Symbols: to (PEER, row sums of counts), from (PEER, row sums of peer_counts), by_expert (column sums of
 * peer_counts), all (tokens). */
#include "sim/values.h"

#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { COUNTS, PEER_COUNTS, SUMS, RAGGED, ROWS, N_BUFFERS };
enum { TO, FROM, BY_EXPERT, ALL, SUM_OF, FIRST, ARRIVED, N_SYMBOLS };
enum { TWO, FOUR, SYM_TO, SYM_FROM, SUM_FROM, N_EXPRS };

static int64_t tokens[] = {5, 6, 7, 8};
static int role_of[4];
static struct moe_comm comms[] = {
    {.name = "world",
     .n_groups = 1,
     .group_of = (int[]){0, 0, 0, 0},
     .index_of = (int[]){0, 1, 2, 3},
     .first = (int[]){0, 4},
     .members = (int[]){0, 1, 2, 3}},
    {.name = "ep",
     .n_groups = 2,
     .group_of = (int[]){0, 1, 0, 1},
     .index_of = (int[]){0, 0, 1, 1},
     .first = (int[]){0, 2, 4},
     .members = (int[]){0, 2, 1, 3}},
};
static struct moe_buffer buffers[] = {
    [COUNTS] = {.name = "counts", .role = MOE_BUF_COUNTS, .type = MOE_I64, .slots = 2, .extent = FOUR},
    [PEER_COUNTS] =
        {.name = "peer_counts", .role = MOE_BUF_INDEX, .type = MOE_I64, .slots = 2, .extent = FOUR},
    [SUMS] = {.name = "sums", .role = MOE_BUF_INDEX, .type = MOE_I64, .slots = 1, .extent = FOUR},
    [RAGGED] = {.name = "ragged", .role = MOE_BUF_INDEX, .type = MOE_I64, .slots = 1, .extent = FOUR},
    [ROWS] = {.name = "rows", .role = MOE_BUF_ACTIVATION, .type = MOE_F32, .slots = 1, .extent = FOUR},
};
static struct moe_symbol symbols[] = {
    [TO] = {"to", MOE_SCOPE_PEER, 1, COUNTS, 2, 2, true},
    [FROM] = {"from", MOE_SCOPE_PEER, 1, PEER_COUNTS, 2, 2, true},
    [BY_EXPERT] = {"by_expert", MOE_SCOPE_EXPERT, -1, PEER_COUNTS, 2, 2, false},
    [ALL] = {"all", MOE_SCOPE_GLOBAL, -1, -1, 0, 0, false},
    [SUM_OF] = {"sum_of", MOE_SCOPE_EXPERT, -1, SUMS, 1, 4, false},
    [FIRST] = {"first", MOE_SCOPE_EXPERT, -1, RAGGED, 1, 1, true},
    [ARRIVED] = {"arrived", MOE_SCOPE_EXPERT, -1, RAGGED, 7, 1, true},
};
static struct moe_expr exprs[] = {
    [TWO] = {MOE_EXPR_CONST, 0, 0, 2},       [FOUR] = {MOE_EXPR_CONST, 0, 0, 4},
    [SYM_TO] = {MOE_EXPR_SYM, TO, 0, 0},     [SYM_FROM] = {MOE_EXPR_SYM, FROM, 0, 0},
    [SUM_FROM] = {MOE_EXPR_SUM, FROM, 0, 0},
};
static struct moe_schedule schedule = {
    .n_ranks = 4,
    .n_layers = 2,
    .n_experts = 4,
    .top_k = 1,
    .tokens = tokens,
    .role_of = role_of,
    .n_comms = 2,
    .n_symbols = N_SYMBOLS,
    .n_exprs = N_EXPRS,
    .n_buffers = N_BUFFERS,
    .comms = comms,
    .symbols = symbols,
    .exprs = exprs,
    .buffers = buffers,
};

static const struct moe_op route = {.kind = MOE_KERNEL,
                                    .kernel = MOE_K_TOPK,
                                    .n_writes = 2,
                                    .writes = {{.buffer = ROWS}, {.buffer = COUNTS}}};
static const struct moe_op exchange = {.kind = MOE_COLLECTIVE,
                                       .collective = MOE_ALLTOALL,
                                       .comm = 1,
                                       .type = MOE_I64,
                                       .send = TWO,
                                       .recv = TWO,
                                       .n_reads = 1,
                                       .n_writes = 1,
                                       .reads = {{.buffer = COUNTS}},
                                       .writes = {{.buffer = PEER_COUNTS}}};
static const struct moe_op sync_counts = {
    .kind = MOE_HOST_SYNC, .n_reads = 2, .reads = {{.buffer = ROWS}, {.buffer = PEER_COUNTS}}};

struct fixture {
    struct moe_routing *r;
    struct moe_values *v;
};

/* counts[layer, rank, e] = 100 layer + 10 rank + e */
static int set_up(void **state)
{
    struct fixture *f = moe_alloc(1, sizeof *f);
    f->r = moe_routing_new(2, 4, 4, 1);
    for (int i = 0; i < 32; i++) f->r->counts[i] = 100 * (i / 16) + 10 * (i / 4 % 4) + i % 4;
    f->v = moe_values_new(&schedule, f->r);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    moe_values_free(f->v);
    moe_routing_free(f->r);
    free(f);
    moe_values_free(NULL);
    return 0;
}

static int64_t device(struct fixture *f, int symbol, int rank, int layer, int index)
{
    struct moe_env env = moe_values_device(f->v);
    return env.value(env.ctx, symbol, rank, layer, index);
}

static int64_t host(struct fixture *f, int symbol, int rank, int layer, int index)
{
    struct moe_env env = moe_values_host(f->v);
    return env.value(env.ctx, symbol, rank, layer, index);
}

static void route_all(struct fixture *f)
{
    for (int layer = 0; layer < 2; layer++)
        for (int rank = 0; rank < 4; rank++) moe_values_kernel(f->v, &route, rank, layer);
}

/* The same operation on all members of a group. */
static void collective(struct fixture *f, const struct moe_op *op, int group, int layer)
{
    const struct moe_op *ops[] = {op, op, op, op};
    moe_values_collective(f->v, ops, op->comm, group, layer);
}

static void test_kernel(void **state)
{
    struct fixture *f = *state;
    assert_true(device(f, TO, 1, 0, 0) == MOE_UNKNOWN);
    assert_int_equal(device(f, ALL, 1, 0, 0), 26);
    assert_int_equal(host(f, ALL, 1, 0, 0), 26);
    moe_values_kernel(f->v, &route, 1, 1);
    assert_true(device(f, TO, 1, 0, 0) == MOE_UNKNOWN); /* the other layer, the other ranks */
    assert_true(device(f, TO, 0, 1, 0) == MOE_UNKNOWN);
    assert_int_equal(device(f, TO, 1, 1, 0), 110 + 111);
    assert_int_equal(device(f, TO, 1, 1, 1), 112 + 113);
    assert_true(host(f, TO, 1, 1, 0) == MOE_UNKNOWN);
    /* Something that is no routing overwrites it. */
    struct moe_op other = {.kind = MOE_KERNEL, .n_writes = 1, .writes = {{.buffer = PEER_COUNTS}}};
    route_all(f);
    collective(f, &exchange, 0, 0);
    assert_int_equal(device(f, BY_EXPERT, 0, 0, 0), 0 + 20);
    moe_values_kernel(f->v, &other, 0, 0);
    assert_true(device(f, BY_EXPERT, 0, 0, 0) == MOE_UNKNOWN);
}

/* Rank 1, layer 1, tokens with the experts 0, 1, 3: two for the first of two members. With four members there
 * is one for each expert, so these are the counts: 111 and so on, with the three. As many as the dimension P
 * says. */
static void test_spread(void **state)
{
    struct fixture *f = *state;
    struct moe_op spread = {.kind = MOE_KERNEL, .kernel = MOE_K_SPREAD, .n_writes = 1, .n_dims = 4};
    moe_routing_add(f->r, 1, 1, 3, (int32_t[]){0, 1, 3});
    spread.dims[3] = TWO;
    spread.writes[0].buffer = RAGGED;
    moe_values_kernel(f->v, &spread, 1, 1);
    assert_int_equal(device(f, FIRST, 1, 1, 0), 2);
    assert_true(host(f, FIRST, 1, 1, 0) == MOE_UNKNOWN);
    spread.writes[0].buffer = SUMS;
    moe_values_kernel(f->v, &spread, 1, 1);
    assert_true(device(f, SUM_OF, 1, 1, 0) == MOE_UNKNOWN); /* fewer than the symbol has */
    spread.dims[3] = FOUR;
    moe_values_kernel(f->v, &spread, 1, 1);
    const int64_t want[] = {111, 112, 112, 114};
    for (int p = 0; p < 4; p++) assert_int_equal(device(f, SUM_OF, 1, 1, p), want[p]);
}

/* Group {0, 2}, layer 1. Rank 0 sends [100 101 | 102 103], rank 2 [120 121 | 122 123]: rank 2 gets
 * [102 103 | 122 123], rank 0 [100 101 | 120 121]. */
static void test_alltoall(void **state)
{
    struct fixture *f = *state;
    route_all(f);
    collective(f, &exchange, 0, 1);
    assert_int_equal(device(f, FROM, 2, 1, 0), 102 + 103);
    assert_int_equal(device(f, FROM, 2, 1, 1), 122 + 123);
    assert_int_equal(device(f, BY_EXPERT, 2, 1, 0), 102 + 122);
    assert_int_equal(device(f, BY_EXPERT, 0, 1, 1), 101 + 121);
    assert_int_equal(moe_eval(&schedule, moe_values_device(f->v), SUM_FROM, 0, 1, 0), 100 + 101 + 120 + 121);
    assert_true(device(f, FROM, 1, 1, 0) == MOE_UNKNOWN); /* the other group */
    assert_true(device(f, FROM, 2, 0, 0) == MOE_UNKNOWN);
    /* In place: as if all sent before any received. */
    struct moe_op in_place = exchange;
    in_place.writes[0] = in_place.reads[0];
    collective(f, &in_place, 1, 0);
    assert_int_equal(device(f, TO, 1, 0, 1), 30 + 31);
    assert_int_equal(device(f, TO, 3, 0, 0), 12 + 13);
    /* Other types are none of this module's business. */
    struct moe_op floats = exchange;
    floats.type = MOE_F32;
    collective(f, &floats, 0, 0);
    assert_true(device(f, FROM, 0, 0, 0) == MOE_UNKNOWN);
}

/* Sizes from a symbol. Layer 0 with other counts: rank 1 sends 1 row to itself and 3 to rank 3; rank 3 sends
 * 0 and
 * 4. Content of counts: rank 1 [1 0 1 2], rank 3 [0 0 4 0]: rank 1 gets [1], rank 3 [0 1 2 | 0 0 4 0]. */
static void test_ragged(void **state)
{
    struct fixture *f = *state;
    memcpy(moe_routing_counts(f->r, 0, 1), (int32_t[]){1, 0, 1, 2}, 16);
    memcpy(moe_routing_counts(f->r, 0, 3), (int32_t[]){0, 0, 4, 0}, 16);
    struct moe_op ragged = exchange;
    ragged.send = SYM_TO;
    ragged.recv = SYM_FROM;
    ragged.writes[0].buffer = RAGGED;
    collective(f, &ragged, 1, 0); /* sizes unknown */
    assert_true(device(f, FIRST, 1, 0, 0) == MOE_UNKNOWN);
    route_all(f);
    collective(f, &ragged, 1, 0);
    assert_int_equal(device(f, FIRST, 1, 0, 0), 1);
    assert_true(device(f, ARRIVED, 1, 0, 0) == MOE_UNKNOWN); /* more than there is */
    const int64_t want[] = {0, 1, 2, 0, 0, 4, 0};
    for (int i = 0; i < 7; i++) assert_int_equal(device(f, ARRIVED, 3, 0, i), want[i]);
    /* Ranks 0 and 2 would send more than their buffers hold: nothing is known of what arrives. */
    collective(f, &ragged, 0, 1);
    assert_true(device(f, FIRST, 0, 0, 0) == MOE_UNKNOWN);
}

/* Layer 0, expert e over ranks: e + (10 + e) + (20 + e) + (30 + e) = 60 + 4 e. */
static void test_allreduce(void **state)
{
    struct fixture *f = *state;
    struct moe_op reduce = exchange;
    reduce.collective = MOE_ALLREDUCE;
    reduce.comm = 0;
    reduce.send = reduce.recv = FOUR;
    reduce.writes[0].buffer = SUMS;
    for (int rank = 0; rank < 3; rank++) moe_values_kernel(f->v, &route, rank, 0);
    collective(f, &reduce, 0, 0);
    for (int rank = 0; rank < 4; rank++) assert_true(device(f, SUM_OF, rank, 0, 0) == MOE_UNKNOWN);
    moe_values_kernel(f->v, &route, 3, 0);
    collective(f, &reduce, 0, 0);
    for (int rank = 0; rank < 4; rank++)
        for (int e = 0; e < 4; e++) assert_int_equal(device(f, SUM_OF, rank, 0, e), 60 + 4 * e);
    assert_int_equal(device(f, TO, 2, 0, 1), 22 + 23); /* what was read stays */
}

static void test_host_sync(void **state)
{
    struct fixture *f = *state;
    moe_values_host_sync(f->v, &sync_counts, 0, 0); /* before anything is there */
    assert_true(host(f, FROM, 0, 0, 0) == MOE_UNKNOWN);
    route_all(f);
    collective(f, &exchange, 0, 0);
    assert_true(host(f, FROM, 0, 0, 0) == MOE_UNKNOWN);
    assert_int_equal(device(f, FROM, 0, 0, 1), 20 + 21);
    symbols[FROM].on_device = true; /* the host need not read it; */
    assert_int_equal(host(f, FROM, 0, 0, 1), 20 + 21);
    assert_true(host(f, FROM, 1, 0, 1) == MOE_UNKNOWN); /* but it must be there */
    symbols[FROM].on_device = false;
    moe_values_host_sync(f->v, &sync_counts, 0, 0);
    assert_int_equal(host(f, FROM, 0, 0, 1), 20 + 21);
    assert_int_equal(host(f, BY_EXPERT, 0, 0, 0), 0 + 20);
    assert_true(host(f, TO, 0, 0, 0) == MOE_UNKNOWN);   /* another buffer, */
    assert_true(host(f, FROM, 2, 0, 0) == MOE_UNKNOWN); /* another rank, */
    collective(f, &exchange, 0, 1);
    assert_true(host(f, FROM, 0, 1, 0) == MOE_UNKNOWN); /* another layer */
    collective(f, &exchange, 0, 0);
    assert_true(host(f, FROM, 0, 0, 0) == MOE_UNKNOWN); /* written since */
}

/* A reference with a shift: layer 0 reads and writes the slot of layer 1. */
static void test_shift(void **state)
{
    struct fixture *f = *state;
    route_all(f);
    struct moe_op shifted = exchange;
    shifted.reads[0].shift = shifted.writes[0].shift = 1;
    collective(f, &shifted, 0, 0);
    assert_true(device(f, FROM, 0, 0, 0) == MOE_UNKNOWN);
    assert_int_equal(device(f, FROM, 0, 1, 1), 120 + 121);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_kernel),    TEST(test_alltoall), TEST(test_ragged), TEST(test_allreduce),
        TEST(test_host_sync), TEST(test_spread),   TEST(test_shift),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
