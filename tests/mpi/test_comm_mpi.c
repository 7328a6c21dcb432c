/* test_comm_mpi - the MPI communicator on 4 ranks: mpirun -n 4 test_comm_mpi. Exit code 0: all ranks agree
 * that nothing failed. The last check breaks a communicator, so the job ends with its abort(). */
#include "kernels/bf16.h"
#include "runtime/agree.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 4 };

static struct moe_communicator *world;
static int failures;

#define expect(cond) ((cond) ? (void)0 : report(__LINE__, #cond))
static void report(int line, const char *what)
{
    fprintf(stderr, "test_comm_mpi.c:%d: rank %d: not so: %s (last error: %s)\n", line, world->rank, what,
            moe_error());
    failures++;
}

/* MPI forbids a buffer to lie in another, also where a library takes it: these stand before its functions. */
static void must_be_apart(const void *a, size_t n, const void *b, size_t m)
{
    const char *x = a, *y = b;
    expect(!n || !m || x + n <= y || y + m <= x);
}

/* What parts for all ranks hold together. */
static size_t bytes_of(const int *counts, MPI_Datatype type)
{
    int size, n = 0;
    MPI_Type_size(type, &size);
    for (int p = 0; p < RANKS; p++) n += counts[p];
    return (size_t)n * (size_t)size;
}

int MPI_Ireduce_scatter(const void *in, void *out, const int counts[], MPI_Datatype type, MPI_Op op,
                        MPI_Comm comm, MPI_Request *request)
{
    int size;
    MPI_Type_size(type, &size);
    must_be_apart(in, bytes_of(counts, type), out, (size_t)counts[world->rank] * (size_t)size);
    return PMPI_Ireduce_scatter(in, out, counts, type, op, comm, request);
}

int MPI_Iallgatherv(const void *in, int n, MPI_Datatype type, void *out, const int counts[], const int at[],
                    MPI_Datatype out_type, MPI_Comm comm, MPI_Request *request)
{
    int size;
    MPI_Type_size(type, &size);
    if (in != MPI_IN_PLACE) must_be_apart(in, (size_t)n * (size_t)size, out, bytes_of(counts, out_type));
    return PMPI_Iallgatherv(in, n, type, out, counts, at, out_type, comm, request);
}

static int run(struct moe_communicator *c, const struct moe_op *op, const void *in, void *out,
               const int64_t *send, const int64_t *recv)
{
    MOE_TRY(c->table->start(c, &(struct moe_transfer){op, in, out, send, recv}));
    return c->table->wait(c, 20);
}

/* Rank r sends (r + p) % 3 elements to rank p, each 100 * r + p: what arrives from p is 100 * p + r. */
static void check_alltoall(void)
{
    static const struct moe_op op = {.collective = MOE_ALLTOALL, .type = MOE_I32};
    int64_t count[RANKS];
    int32_t in[2 * RANKS], out[2 * RANKS + 1];
    int n = 0, r = world->rank, at = 0;
    for (int p = 0; p < RANKS; p++) {
        count[p] = (r + p) % 3;
        for (int i = 0; i < count[p]; i++) in[n++] = 100 * r + p;
    }
    memset(out, 0xff, sizeof out);
    expect(run(world, &op, in, out, count, count) == MOE_OK); /* (r + p) is symmetric: recv = send */
    for (int p = 0; p < RANKS; p++)
        for (int i = 0; i < count[p]; i++) expect(out[at++] == 100 * p + r);
    expect(at == n && out[at] == -1);
}

/* 1 + 2 + 3 + 4 = 10 and the sum of squares 30, in every type, in place and not. */
#define CHECK_SUM(type_name, moe_type_id)                                                                    \
    do {                                                                                                     \
        static const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = moe_type_id};                  \
        type_name r = (type_name)(world->rank + 1), in[] = {r, r * r}, out[] = {0, 0};                       \
        const int64_t two = 2;                                                                               \
        expect(run(world, &op, in, out, &two, &two) == MOE_OK);                                              \
        expect(out[0] == 10 && out[1] == 30 && in[0] == r);                                                  \
        expect(run(world, &op, in, in, &two, &two) == MOE_OK);                                               \
        expect(in[0] == 10 && in[1] == 30);                                                                  \
    } while (0)
/* Of -1, 0, 1, 2 and 3, 2, 1, 0 in place and not; sums would be 2 and 6. */
static void check_max(void)
{
    static const struct moe_op op = {
        .collective = MOE_ALLREDUCE, .reduction = MOE_REDUCE_MAX, .type = MOE_I64};
    int64_t in[] = {world->rank - 1, 3 - world->rank}, out[] = {-9, -9};
    const int64_t two = 2;
    expect(run(world, &op, in, out, &two, &two) == MOE_OK);
    expect(out[0] == 2 && out[1] == 3);
    expect(run(world, &op, in, in, &two, &two) == MOE_OK);
    expect(in[0] == 2 && in[1] == 3);
}

/* 256 + 3 is halfway between 258 and 260, whose last bit is even; zeros make it the same in every order. */
static void check_bf16(void)
{
    static const float part[RANKS] = {256, 0, 0, 3};
    static const int64_t four = RANKS, ones[RANKS] = {1, 1, 1, 1};
    for (int i = 0; i < 2; i++) {
        const struct moe_op op = {.collective = i ? MOE_REDUCESCATTER : MOE_ALLREDUCE, .type = MOE_BF16};
        moe_bf16 in[RANKS], out[RANKS] = {0};
        for (int k = 0; k < RANKS; k++) in[k] = moe_bf16_from_float(part[world->rank]);
        expect(run(world, &op, in, out, i ? ones : &four, i ? ones : &four) == MOE_OK);
        for (int k = 0; k < (i ? 1 : RANKS); k++) expect(moe_bf16_to_float(out[k]) == 260);
    }
}

static void check_allreduce(void)
{
    check_max();
    check_bf16();
    CHECK_SUM(int32_t, MOE_I32);
    CHECK_SUM(int64_t, MOE_I64);
    CHECK_SUM(float, MOE_F32);
    CHECK_SUM(double, MOE_F64);
}

/* Rank r gives r elements, each 10 * r: everyone gets 10, 20, 20, 30, 30, 30. */
static void check_allgather(void)
{
    static const struct moe_op op = {.collective = MOE_ALLGATHER, .type = MOE_F64};
    const int64_t recv[] = {0, 1, 2, 3}, send = world->rank;
    const double r = 10 * world->rank, in[] = {r, r, r}, expected[] = {10, 20, 20, 30, 30, 30, -1};
    double out[] = {-1, -1, -1, -1, -1, -1, -1};
    expect(run(world, &op, in, out, &send, recv) == MOE_OK);
    expect(memcmp(out, expected, sizeof out) == 0);
}

/* Element i of rank r is 1000 * r + i, so the sum over ranks is 6000 + 4 * i; rank p gets p of the 6. */
static void check_reducescatter(void)
{
    static const struct moe_op op = {.collective = MOE_REDUCESCATTER, .type = MOE_I64};
    const int64_t send[] = {0, 1, 2, 3}, recv = world->rank, first = (int64_t[]){0, 0, 1, 3}[world->rank];
    int64_t in[6], out[] = {-1, -1, -1, -1};
    for (int i = 0; i < 6; i++) in[i] = 1000 * world->rank + i;
    expect(run(world, &op, in, out, send, &recv) == MOE_OK);
    for (int64_t i = 0; i < recv; i++) expect(out[i] == 6000 + 4 * (first + i));
    expect(out[recv] == -1 && in[5] == 1000 * world->rank + 5);
}

/* Element i of rank r, as in check_reducescatter; of RANKS: of the sum. In bf16 all are exact, too. */
static int64_t element(int r, int64_t i)
{
    return r == RANKS ? 6000 + 4 * i : 1000 * r + i;
}

static moe_bf16 element_bf16(int r, int64_t i)
{
    return moe_bf16_from_float((float)(r == RANKS ? 6 + 4 * i : r + i));
}

/* Rank p's sum goes where its part of what it sends lies, beside which nothing changes; then its part is
 * gathered from where it arrives. */
#define CHECK_IN_PLACE(type_name, moe_type_id, value, parts)                                                 \
    do {                                                                                                     \
        const struct moe_op scatter = {.collective = MOE_REDUCESCATTER, .type = moe_type_id},                \
                            gather = {.collective = MOE_ALLGATHER, .type = moe_type_id};                     \
        const int64_t own = (parts)[world->rank];                                                            \
        int64_t first = 0;                                                                                   \
        type_name all[6];                                                                                    \
        for (int p = 0; p < world->rank; p++) first += (parts)[p];                                           \
        for (int i = 0; i < 6; i++) all[i] = (type_name)value(world->rank, i);                               \
        expect(run(world, &scatter, all, all + first, parts, &own) == MOE_OK);                               \
        for (int64_t i = 0; i < 6; i++)                                                                      \
            expect(all[i] == (type_name)value(i >= first && i < first + own ? RANKS : world->rank, i));      \
        expect(run(world, &gather, all + first, all, &own, parts) == MOE_OK);                                \
        for (int64_t i = 0; i < 6; i++) expect(all[i] == (type_name)value(RANKS, i));                        \
    } while (0)

static void check_in_place(void)
{
    static const int64_t parts[][RANKS] = {{0, 1, 2, 3}, {2, 0, 4, 0}, {3, 0, 0, 3}, {6, 0, 0, 0}};
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
        CHECK_IN_PLACE(int64_t, MOE_I64, element, parts[k]);
        CHECK_IN_PLACE(float, MOE_F32, element, parts[k]);
        CHECK_IN_PLACE(double, MOE_F64, element, parts[k]);
        CHECK_IN_PLACE(moe_bf16, MOE_BF16, element_bf16, parts[k]);
    }
}

/* A sum that depends on the order, of 1, 2^53, -2^53 and -1, has the same bits whoever comes last. */
static void check_order(enum moe_collective collective)
{
    const struct moe_op op = {.collective = collective, .type = MOE_F64};
    const int64_t four = RANKS, ones[] = {1, 1, 1, 1};
    const double big = 9007199254740992.0, part[] = {1, big, -big, -1};
    const double e = part[world->rank], in[] = {e, e, e, e};
    double out[RANKS], before = 0;
    for (int late = 0; late < RANKS; late++) {
        if (world->rank == late) usleep(20000);
        expect(run(world, &op, in, out, moe_send_per_peer[collective] ? ones : &four,
                   moe_send_per_peer[collective] ? ones : &four) == MOE_OK);
        expect(late == 0 || out[0] == before);
        before = out[0];
    }
}

/* Pairs {0, 2} and {1, 3}: the sum of the ranks is 2 and 4, and a pair of its own does not wait for the
 * other. */
static void check_split(void)
{
    static const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t one = 1;
    const int odd = world->rank % 2;
    struct moe_communicator *pair, *alone;
    expect(world->table->split(world, (int[]){odd, odd + 2}, 2, 1, &pair) == MOE_OK);
    expect(world->table->split(world, &world->rank, 1, 2, &alone) == MOE_OK);
    expect(pair->size == 2 && pair->rank == world->rank / 2 && alone->size == 1 && alone->rank == 0);
    int32_t sum = world->rank, own = world->rank;
    expect(run(pair, &op, &sum, &sum, &one, &one) == MOE_OK);
    expect(sum == 2 + 2 * odd);
    if (odd) expect(run(pair, &op, &sum, &sum, &one, &one) == MOE_OK);
    expect(run(alone, &op, &own, &own, &one, &one) == MOE_OK);
    expect(own == world->rank);
    pair->table->close(pair);
    alone->table->close(alone);
}

/* The last rank comes late: the others give up after a tenth of a second, and may wait again. */
static void check_timeout(void)
{
    static const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t one = 1;
    int32_t sum = 1;
    struct moe_transfer t = {&op, &sum, &sum, &one, &one};
    if (world->rank == RANKS - 1) sleep(1);
    expect(world->table->start(world, &t) == MOE_OK);
    if (world->rank != RANKS - 1) {
        expect(world->table->wait(world, 0.1) == MOE_EPEER);
        expect(strcmp(moe_error(), "no answer for 0.1 s") == 0);
    }
    expect(world->table->wait(world, 20) == MOE_OK);
    expect(sum == RANKS);
}

static void check_too_large(void)
{
    static const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t many = (int64_t)1 << 31;
    int32_t none = 0;
    expect(run(world, &op, &none, &none, &many, &many) == MOE_EFAILED);
}

/* Rank 0 sends 3 elements to rank 1, which expects 2; other pairs exchange 1. */
static void check_truncation(void)
{
    static const struct moe_op op = {.collective = MOE_ALLTOALL, .type = MOE_I64};
    struct moe_communicator *copy;
    const int all[] = {0, 1, 2, 3};
    int64_t send[] = {1, 1, 1, 1}, recv[] = {1, 1, 1, 1}, in[6] = {0}, out[5];
    if (world->rank == 0) send[1] = 3;
    if (world->rank == 1) recv[0] = 2;
    expect(world->table->split(world, all, RANKS, 3, &copy) == MOE_OK);
    int err = run(copy, &op, in, out, send, recv);
    expect(err == (world->rank == 1 ? MOE_EPEER : MOE_OK));
    if (err < 0) expect(strstr(moe_error(), "truncated") != NULL);
    copy->table->close(copy); /* must not wait for the others */
}

/* Members whose beliefs are those of a transfer learn `expected`, or (NULL) that they
 * agree; nothing moved. */
static void expect_agreement(const struct moe_op *op, const char *label, const int64_t *send,
                             const int64_t *recv, const char *expected)
{
    static const int ranks[] = {0, 1, 2, 3};
    int64_t in[6] = {0}, out[6] = {-1, -1, -1, -1, -1, -1};
    int err = moe_agree(world, &(struct moe_transfer){op, in, out, send, recv}, label, ranks, 20);
    expect(err == (expected ? MOE_EVERDICT : MOE_OK));
    if (expected) expect(strcmp(moe_error(), expected) == 0);
    for (int i = 0; i < 6; i++) expect(out[i] == -1);
}

static void check_agreement(void)
{
    const struct moe_op even[] = {{.collective = MOE_ALLTOALL, .type = MOE_I64},
                                  {.collective = MOE_ALLREDUCE, .type = MOE_I64},
                                  {.collective = MOE_ALLGATHER, .type = MOE_I64},
                                  {.collective = MOE_REDUCESCATTER, .type = MOE_I64}};
    const int64_t one = 1, five = 5, r = world->rank, rising[] = {0, 1, 2, 3};
    const bool is_two = r == 2;
    int64_t count[RANKS], more[RANKS] = {1, 1, 1, 1};
    for (int p = 0; p < RANKS; p++) count[p] = (r + p) % 3;
    expect_agreement(&even[MOE_ALLTOALL], "a", count, count, NULL);
    expect_agreement(&even[MOE_ALLREDUCE], "a", &five, &five, NULL);
    expect_agreement(&even[MOE_ALLGATHER], "a", &r, rising, NULL);
    expect_agreement(&even[MOE_REDUCESCATTER], "a", rising, &r, NULL);

    if (is_two) more[1] = 3;
    expect_agreement(&even[MOE_ALLTOALL], "a", more, (int64_t[]){1, 1, 1, 1},
                     "a: rank 2 sends 3 int64 (alltoall) to rank 1, which expects 1 int64 (alltoall)");
    expect_agreement(&even[MOE_REDUCESCATTER], "a", more, &one,
                     "a: rank 2 sends 3 int64 (reducescatter) to rank 1, which expects 1 int64 "
                     "(reducescatter)");
    expect_agreement(&even[MOE_ALLGATHER], "a", is_two ? &five : &one, (int64_t[]){1, 1, 1, 1},
                     "a: rank 2 sends 5 int64 (allgather) to rank 3, which expects 1 int64 (allgather)");
    expect_agreement(&even[MOE_ALLREDUCE], "a", is_two ? &five : &one, is_two ? &five : &one,
                     "a: rank 1 sends 1 int64 (allreduce) to rank 2, which expects 5 int64 (allreduce)");
    struct moe_op odd = even[MOE_ALLREDUCE];
    if (is_two) odd.type = MOE_F64;
    expect_agreement(&odd, "a", &one, &one,
                     "a: rank 1 sends 1 int64 (allreduce) to rank 2, which expects 1 float64 (allreduce)");
    odd = even[MOE_ALLREDUCE];
    if (is_two) odd.reduction = MOE_REDUCE_MAX;
    expect_agreement(&odd, "a", &one, &one,
                     "a: rank 1 sends 1 int64 (allreduce) to rank 2, which expects 1 int64 (allreduce max)");
    expect_agreement(is_two ? &even[MOE_ALLGATHER] : &even[MOE_ALLREDUCE], "a", &one, (int64_t[]){1, 1, 1, 1},
                     "a: rank 1 sends 1 int64 (allreduce) to rank 2, which expects 1 int64 (allgather)");
    expect_agreement(&even[MOE_ALLREDUCE], is_two ? "b" : "a", &one, &one,
                     "a: rank 0 enters it where rank 2 enters b");
    /* A rank that disagrees with itself only. */
    expect_agreement(&even[MOE_ALLTOALL], "a", (int64_t[]){1, 1, is_two ? 4 : 1, 1}, (int64_t[]){1, 1, 1, 1},
                     "a: rank 2 sends 4 int64 (alltoall) to rank 2, which expects 1 int64 (alltoall)");
}

int main(void)
{
    const struct moe_communicator_table *table = moe_communicator_here();
    if (strcmp(table->name, "mpi") != 0 || table->open(NULL, 60, &world) < 0) {
        fprintf(stderr, "test_comm_mpi: start it with mpirun -n %d\n", RANKS);
        return 1;
    }
    expect(world->size == RANKS);
    check_alltoall();
    check_allreduce();
    check_allgather();
    check_reducescatter();
    check_in_place();
    check_order(MOE_ALLREDUCE);
    check_order(MOE_REDUCESCATTER);
    check_split();
    check_agreement();
    check_timeout();
    check_too_large();
    check_truncation();
    static const struct moe_op sum = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t one = 1;
    int32_t all_failures = failures;
    if (run(world, &sum, &all_failures, &all_failures, &one, &one) < 0) all_failures = 1;
    world->table->abort(world, all_failures ? 1 : 0);
}
