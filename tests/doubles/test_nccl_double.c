/* test_nccl_double - right uses of the double of NCCL on 4 ranks: mpirun -n 4 test_nccl_double. What arrives
 * is compared with arithmetic or with what MPI itself makes of the same numbers. With the argument "alone":
 * where nobody but the double initialises MPI. */
#include "kernels/bf16.h"
#include "tests/doubles/fixture_nccl.h"
#include "tests/doubles/queue.h"

#include <stdint.h>
#include <unistd.h>

enum { MANY = 40000 }; /* x 4 bytes x ranks: where Open MPI adds in a ring, not in a tree */

static ncclComm_t world;

/* Between the double and MPI, whose results need not show what it is asked. */
static int n_in_place;

int MPI_Iallreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request *request)
{
    n_in_place += in == MPI_IN_PLACE;
    return PMPI_Iallreduce(in, out, n, type, op, comm, request);
}

static void check_ids(void)
{
    ncclUniqueId a, b;
    int mpi, version;
    expect(ncclGetUniqueId(&a) == ncclSuccess && ncclGetUniqueId(&b) == ncclSuccess);
    expect(memcmp(&a, &b, sizeof a) != 0);
    MPI_Initialized(&mpi);
    expect(!mpi);
    expect(ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE);
}

static void sum_bf16(void *from, void *to, int *n, MPI_Datatype *type)
{
    moe_bf16 *x = from, *y = to;
    (void)type;
    for (int i = 0; i < *n; i++)
        y[i] = moe_bf16_from_float(moe_bf16_to_float(x[i]) + moe_bf16_to_float(y[i]));
}

/* Sums are those of MPI to the bit, apart and in place. in [4 n] */
static void check_sums(const void *in, int n, ncclDataType_t type, size_t each, MPI_Datatype mpi, MPI_Op sum)
{
    const size_t bytes = (size_t)n * each;
    const int counts[RANKS] = {n, n, n, n};
    char *want = malloc(RANKS * bytes), *got = malloc(RANKS * bytes);
    char *x = device_copy(in, RANKS * bytes), *y = device(RANKS * bytes);
    MPI_Request request;

    expect(ncclAllReduce(x, y, (size_t)n, type, ncclSum, world, one) == ncclSuccess);
    MPI_Iallreduce(in, want, n, mpi, sum, MPI_COMM_WORLD, &request);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    read_back(got, y, bytes);
    expect(memcmp(got, want, bytes) == 0);

    expect(ncclReduceScatter(x, y, (size_t)n, type, ncclSum, world, one) == ncclSuccess);
    MPI_Ireduce_scatter(in, want, counts, mpi, sum, MPI_COMM_WORLD, &request);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    read_back(got, y, bytes);
    expect(memcmp(got, want, bytes) == 0);

    char *mine = x + (size_t)me * bytes; // a copy of x stays in `in`
    expect(ncclReduceScatter(x, mine, (size_t)n, type, ncclSum, world, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(got, mine, bytes);
    expect(memcmp(got, want, bytes) == 0);

    MPI_Iallreduce(in, want, n, mpi, sum, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (int root = 0; root < RANKS; root++) { // what all get, at one of them
        put(x, in, bytes);
        expect(ncclReduce(x, me == root ? x : NULL, (size_t)n, type, ncclSum, root, world, one) ==
               ncclSuccess);
        expect(cudaStreamSynchronize(one) == cudaSuccess);
        read_back(got, x, bytes);
        expect(memcmp(got, me == root ? (const void *)want : (const void *)in, bytes) == 0);
    }

    put(x, in, bytes);
    expect(ncclAllReduce(x, x, (size_t)n, type, ncclSum, world, one) == ncclSuccess);
    memcpy(want, in, bytes);
    MPI_Iallreduce(MPI_IN_PLACE, want, n, mpi, sum, MPI_COMM_WORLD, &request);
    n_in_place = 0;
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    expect(n_in_place == 1); // which MPI may add in another order
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    read_back(got, x, bytes);
    expect(memcmp(got, want, bytes) == 0);
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
    free(want);
    free(got);
}

static void check_all_sums(void)
{
    static float f[RANKS * MANY];
    static double d[RANKS * 50];
    static moe_bf16 b[RANKS * MANY];
    MPI_Op bf16;
    MPI_Op_create(sum_bf16, 1, &bf16);
    for (int i = 0; i < RANKS * MANY; i++) {
        f[i] = 1 / (float)(1 + (i * 7 + me * 13) % 1001);
        b[i] = moe_bf16_from_float(f[i]);
        if (i < RANKS * 50) d[i] = 1 / (double)(1 + i + me * 17);
    }
    check_sums(f, 1, ncclFloat, 4, MPI_FLOAT, MPI_SUM);
    check_sums(f, 33, ncclFloat, 4, MPI_FLOAT, MPI_SUM);
    check_sums(f, MANY, ncclFloat, 4, MPI_FLOAT, MPI_SUM);
    check_sums(d, 50, ncclDouble, 8, MPI_DOUBLE, MPI_SUM);
    check_sums(b, 33, ncclBfloat16, 2, MPI_UINT16_T, bf16);
    check_sums(b, MANY, ncclBfloat16, 2, MPI_UINT16_T, bf16);
    MPI_Op_free(&bf16);
}

/* 256 + 1 + 1 + 1 in bf16, whose step there is 2: rounded after each addition 256 or 258, by the order;
 * rounded once it would be 260. The largest of 3 - 2 r is rank 0's, also where bits as integers would say
 * otherwise. */
static void check_bf16(void)
{
    const moe_bf16 in[2] = {moe_bf16_from_float(me ? 1 : 256), moe_bf16_from_float(3 - 2 * (float)me)};
    moe_bf16 sum, max;
    moe_bf16 *x = device_copy(in, sizeof in), *y = device(sizeof in);
    expect(ncclAllReduce(x, y, 1, ncclBfloat16, ncclSum, world, one) == ncclSuccess);
    expect(ncclAllReduce(x + 1, y + 1, 1, ncclBfloat16, ncclMax, world, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(&sum, y, sizeof sum);
    read_back(&max, y + 1, sizeof max);
    expect(moe_bf16_to_float(sum) == 256 || moe_bf16_to_float(sum) == 258);
    expect(moe_bf16_to_float(max) == 3);
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
}

static void check_max(void)
{
    const int64_t in[2] = {me == 2 ? (int64_t)1 << 40 : -me, -5 - me};
    const int8_t bytes[2] = {(int8_t)-me, (int8_t)me};
    int64_t out[2];
    int8_t out_bytes[2];
    int64_t *x = device_copy(in, sizeof in);
    int8_t *y = device_copy(bytes, sizeof bytes);
    expect(ncclAllReduce(x, x, 2, ncclInt64, ncclMax, world, one) == ncclSuccess);
    expect(ncclAllReduce(y, y, 2, ncclInt8, ncclSum, world, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(out, x, sizeof out);
    read_back(out_bytes, y, sizeof out_bytes);
    expect(out[0] == (int64_t)1 << 40 && out[1] == -5);
    expect(out_bytes[0] == -6 && out_bytes[1] == 6);
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
}

/* Rank r gives 10 r, 10 r + 1: apart and in place; then rank 2's go to all. */
static void check_moves(void)
{
    const int32_t in[2] = {10 * me, 10 * me + 1};
    int32_t out[2 * RANKS], *x = device_copy(in, sizeof in), *y = device(sizeof out);
    for (int in_place = 0; in_place < 2; in_place++) {
        int32_t *from = in_place ? y + 2 * me : x;
        memset(out, 0xff, sizeof out);
        put(y, out, sizeof out);
        if (in_place) put(from, in, sizeof in);
        expect(ncclAllGather(from, y, 2, ncclInt32, world, one) == ncclSuccess);
        expect(cudaStreamSynchronize(one) == cudaSuccess);
        read_back(out, y, sizeof out);
        for (int i = 0; i < 2 * RANKS; i++) expect(out[i] == 10 * (i / 2) + i % 2);
    }
    /* sendbuff counts on the root alone */
    expect(ncclBroadcast(me == 2 ? x : NULL, y, 2, ncclInt32, 2, world, one) == ncclSuccess);
    expect(ncclBroadcast(x, x, 2, ncclInt32, 1, world, one) == ncclSuccess);
    expect(ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, world, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(out, y, sizeof in);
    expect(out[0] == 20 && out[1] == 21);
    read_back(out, x, sizeof in);
    expect(out[0] == 10 && out[1] == 11);
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
}

/* Rank r sends (r + p) % 3 elements to rank p, also to itself and where that is none: what arrives from p is
 * 100 p + r. Twice in one group, so that order tells the two apart; in nested groups. */
static void check_alltoall(void)
{
    int32_t in[2][2 * RANKS], out[2][2 * RANKS];
    int n = 0;
    for (int p = 0; p < RANKS; p++)
        for (int i = 0; i < (me + p) % 3; i++, n++) {
            in[0][n] = 100 * me + p;
            in[1][n] = -in[0][n] - 1;
        }
    int32_t *x = device_copy(in, sizeof in), *y = device(sizeof out);
    expect(ncclGroupStart() == ncclSuccess);
    for (int twice = 0; twice < 2; twice++) {
        size_t at = (size_t)twice * 2 * RANKS;
        expect(ncclGroupStart() == ncclSuccess);
        for (int p = 0; p < RANKS; p++) {
            const size_t count = (size_t)((me + p) % 3);
            expect(ncclSend(x + at, count, ncclInt32, p, world, one) == ncclSuccess);
            expect(ncclRecv(y + at, count, ncclInt32, p, world, one) == ncclSuccess);
            at += count;
        }
        expect(ncclGroupEnd() == ncclSuccess);
        expect(cudaStreamQuery(one) == cudaSuccess); // nothing is issued inside
    }
    expect(ncclGroupEnd() == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(out, y, sizeof out);
    n = 0;
    for (int p = 0; p < RANKS; p++)
        for (int i = 0; i < (me + p) % 3; i++, n++)
            expect(out[0][n] == 100 * p + me && out[1][n] == -(100 * p + me) - 1);
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
}

/* Large messages, one direction at a time, ungrouped: MPI must not need the peer's other calls. */
static void check_ring(void)
{
    static float in[MANY], out[MANY];
    for (int i = 0; i < MANY; i++) in[i] = (float)(i + me);
    float *x = device_copy(in, sizeof in), *y = device(sizeof out);
    const int next = (me + 1) % RANKS, last = (me + RANKS - 1) % RANKS;
    for (int odd = 0; odd < 2; odd++)
        if ((me + odd) % 2) {
            expect(ncclSend(x, MANY, ncclFloat, next, world, one) == ncclSuccess);
        } else {
            expect(ncclRecv(y, MANY, ncclFloat, last, world, one) == ncclSuccess);
        }
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(out, y, sizeof out);
    for (int i = 0; i < MANY; i++) expect(out[i] == (float)(i + last));
    expect(cudaFree(x) == cudaSuccess && cudaFree(y) == cudaSuccess);
}

static int sum_in(ncclComm_t c, int32_t value)
{
    int32_t *x = device_copy(&value, sizeof value);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, c, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(&value, x, sizeof value);
    expect(cudaFree(x) == cudaSuccess);
    return value;
}

/* Odd and even ranks, the later ones first; then all but rank 3. */
static void check_split(void)
{
    ncclComm_t half, three = world;
    int n = 0, rank = -1, gpu = -1;
    expect(ncclCommSplit(world, me % 2, -me, &half, NULL) == ncclSuccess);
    expect(ncclCommCount(half, &n) == ncclSuccess && n == 2);
    expect(ncclCommUserRank(half, &rank) == ncclSuccess && rank == (me < 2));
    expect(ncclCommCuDevice(half, &gpu) == ncclSuccess && gpu == 0);
    expect(sum_in(half, 1 << me) == (me % 2 ? 2 + 8 : 1 + 4));
    expect(ncclCommSplit(world, me == 3 ? NCCL_SPLIT_NOCOLOR : 7, 0, &three, NULL) == ncclSuccess);
    expect(me == 3 ? three == NULL : sum_in(three, 1 << me) == 7);
    if (three) expect(ncclCommUserRank(three, &rank) == ncclSuccess && rank == me); // keys are equal
    expect(sum_in(world, 1 << me) == 15);
    expect(ncclCommDestroy(half) == ncclSuccess);
    expect(ncclCommDestroy(three) == ncclSuccess); // NULL is no error
}

/* Several communicators in one group, in another order on each rank. */
static void check_many_inits(void)
{
    ncclComm_t c[3] = {NULL};
    ncclUniqueId id[3];
    for (int i = 0; i < 3; i++) id[i] = shared_id();
    expect(ncclGroupStart() == ncclSuccess);
    for (int i = 0; i < 3; i++) {
        const int k = (i + me) % 3;
        expect(ncclCommInitRank(&c[k], RANKS, id[k], k == 1 ? RANKS - 1 - me : me) == ncclSuccess);
    }
    expect(ncclGroupEnd() == ncclSuccess);
    for (int i = 0; i < 3; i++) expect(sum_in(c[i], i + me) == RANKS * i + 6);
    for (int i = 0; i < 3; i++) expect(ncclCommDestroy(c[i]) == ncclSuccess);
}

/* Two communicators that share ranks 0 and 1, who join them in opposite orders, and ask so rarely that what
 * ranks 2 and 3 say of each comes together: they must not build one each. */
static void check_crossed_inits(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t c[2] = {NULL};
    const ncclUniqueId id[2] = {shared_id(), shared_id()};
    config.blocking = 0;
    for (int i = 0; i < 2; i++) {
        const int k = me == 1 ? 1 - i : i; // 0: ranks 0, 1, 2; 1: ranks 0, 1, 3
        if (me < 2 || me == 2 + k)
            expect(ncclCommInitRankConfig(&c[k], 3, id[k], me < 2 ? me : 2, &config) == ncclInProgress);
    }
    for (int i = 0; i < 2; i++) {
        ncclResult_t state = ncclInProgress;
        while (c[i] && state == ncclInProgress) {
            usleep(me < 2 ? 40000 : 1000);
            expect(ncclCommGetAsyncError(c[i], &state) == ncclSuccess);
        }
        expect(!c[i] || (state == ncclSuccess && ncclCommDestroy(c[i]) == ncclSuccess));
    }
}

/* A rank that comes late: the others are told so, and can go on with other things. */
static void check_non_blocking(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    const ncclUniqueId id = shared_id();
    ncclComm_t c = NULL, half = NULL;
    ncclResult_t state;
    int n = -1, value = 1 << me, sum = 0;
    config.blocking = 0;
    if (me == 3) usleep(200000);
    expect(ncclCommInitRankConfig(&c, RANKS, id, me, &config) == ncclInProgress && c);
    expect(ncclCommCount(c, &n) == ncclInvalidArgument && n == -1);
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInProgress);
    if (me != 3)
        for (const double end = MPI_Wtime() + 0.1; MPI_Wtime() < end;)
            expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInProgress);
    expect(polled(c) == ncclSuccess);
    expect(ncclCommCount(c, &n) == ncclSuccess && n == RANKS);

    int *x = device_copy(&value, sizeof value);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, c, one) == ncclInProgress);
    expect(cudaStreamQuery(one) == cudaSuccess); // it is not on its stream yet
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, c, one) == ncclInvalidArgument);
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInvalidArgument);
    expect(ncclCommAbort(c) == ncclSuccess);

    config.blocking = 0;
    expect(ncclCommInitRankConfig(&c, RANKS, shared_id(), me, &config) == ncclInProgress);
    expect(polled(c) == ncclSuccess);
    expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, c, one) == ncclSuccess);
    expect(ncclGroupEnd() == ncclInProgress);
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInProgress);
    expect(polled(c) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(&sum, x, sizeof sum);
    expect(sum == 15);
    half = c;
    expect(ncclCommSplit(c, me / 2, 0, &half, NULL) == ncclSuccess); // as the real one says
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInProgress && !half);
    expect(polled(c) == ncclSuccess && half);
    expect(ncclCommCount(half, &n) == ncclSuccess && n == 2);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, half, one) == ncclInProgress);
    expect(polled(half) == ncclSuccess); // on its stream, not complete
    expect(ncclCommFinalize(half) == ncclInProgress);
    expect(ncclCommDestroy(half) == ncclInvalidArgument);
    expect(polled(half) == ncclSuccess);
    expect(cudaStreamQuery(one) == cudaSuccess);
    expect(ncclCommDestroy(half) == ncclSuccess && ncclCommDestroy(c) == ncclSuccess);
    expect(cudaFree(x) == cudaSuccess);
}

/* Work that is done when *ctx says so. */
static int gate(void *ctx)
{
    return *(int *)ctx;
}

/* Operations of a communicator run in the order of their calls, whatever their streams; a group on two
 * streams starts when both have come to it and holds both. */
static void check_streams(void)
{
    int open = me != 0, *x = device(4 * sizeof *x), mine = me + 1, got[4];
    for (int i = 0; i < 4; i++) put(x + i, &mine, sizeof mine);
    expect(moe_double_enqueue(one, &(struct moe_double_work){"gate", gate, NULL, &open}) == cudaSuccess);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, world, one) == ncclSuccess);
    expect(ncclAllReduce(x + 1, x + 1, 1, ncclInt32, ncclMax, world, two) == ncclSuccess);
    expect(!completes(two, 0.3)); // rank 0 holds the first one
    open = 1;
    MPI_Barrier(MPI_COMM_WORLD);
    expect(cudaStreamSynchronize(two) == cudaSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);

    open = me != 0;
    expect(moe_double_enqueue(one, &(struct moe_double_work){"gate", gate, NULL, &open}) == cudaSuccess);
    expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x + 2, x + 2, 1, ncclInt32, ncclSum, world, two) == ncclSuccess);
    expect(ncclAllReduce(x + 3, x + 3, 1, ncclInt32, ncclMax, world, one) == ncclSuccess);
    expect(ncclGroupEnd() == ncclSuccess);
    expect(!completes(two, 0.3)); // a part of the group is on `one`
    open = 1;
    MPI_Barrier(MPI_COMM_WORLD);
    expect(cudaStreamSynchronize(two) == cudaSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(got, x, sizeof got);
    expect(got[0] == 10 && got[1] == 4 && got[2] == 10 && got[3] == 4);
    expect(cudaFree(x) == cudaSuccess);
}

/* ncclCommDestroy waits for what was issued. */
static void check_destroy(void)
{
    ncclComm_t c = new_world();
    int value = 1 << me, *x = device_copy(&value, sizeof value);
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, c, one) == ncclSuccess);
    expect(ncclCommDestroy(c) == ncclSuccess);
    expect(cudaStreamQuery(one) == cudaSuccess);
    read_back(&value, x, sizeof value);
    expect(value == 15);
    c = new_world();
    expect(ncclAllReduce(x, x, 1, ncclInt32, ncclMax, c, one) == ncclSuccess);
    expect(ncclCommFinalize(c) == ncclSuccess);
    expect(cudaStreamQuery(one) == cudaSuccess);
    expect(ncclCommFinalize(c) == ncclInvalidArgument);
    expect(ncclCommDestroy(c) == ncclSuccess);
    expect(cudaFree(x) == cudaSuccess);
}

/* A machine of several GPUs: ranks take one each, or are told. */
static void check_devices(void)
{
    ncclComm_t c;
    int gpu;
    expect(setenv("MOE_DOUBLE_GPUS", "4", 1) == 0);
    expect(ncclCommInitRank(&c, RANKS, shared_id(), me) == ncclInvalidUsage);
    expect(strstr(ncclGetLastError(NULL), "Duplicate GPU") != NULL);
    expect(ncclCommAbort(c) == ncclSuccess);
    expect(cudaSetDevice(me) == cudaSuccess);
    c = new_world();
    expect(ncclCommCuDevice(c, &gpu) == ncclSuccess && gpu == me);
    expect(ncclCommDestroy(c) == ncclSuccess);
    expect(cudaSetDevice(0) == cudaSuccess);
}

/* One rank, and no call of MPI but the double's. */
static int alone(void)
{
    ncclUniqueId id;
    float value = 2.5f, *x = device_copy(&value, sizeof value), *y = device(sizeof value);
    expect(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking) == cudaSuccess);
    expect(ncclGetUniqueId(&id) == ncclSuccess);
    expect(ncclCommInitRank(&world, 1, id, 0) == ncclSuccess);
    expect(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    value = 0;
    read_back(&value, y, sizeof value);
    expect(value == 2.5f);
    expect(ncclCommDestroy(world) == ncclSuccess);
    return failures > 0; // MPI is finalised at exit: mpirun complains otherwise
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "alone") == 0) return alone();
    check_ids();
    open_all();
    world = new_world();
    check_all_sums();
    check_bf16();
    check_max();
    check_moves();
    check_alltoall();
    check_ring();
    check_split();
    check_many_inits();
    check_crossed_inits();
    check_non_blocking();
    check_streams();
    check_destroy();
    expect(ncclCommDestroy(world) == ncclSuccess);
    check_devices();
    return close_all();
}
