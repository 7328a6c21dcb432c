/* test_comm_nccl - the communicator "nccl" on 4 ranks: mpirun -n 4 test_comm_nccl mpi|env all|ENDING. `mpi`
 * and `env` say how ranks meet; `all`: every collective, exit code 0; else how a job ends, see
 * test_comm_nccl_ends.c. */
#include "tests/cuda/mpi/fixture.h"

#include "kernels/bf16.h"
#include "runtime/agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static cudaStream_t streams[MOE_STREAM_COUNT];
struct moe_communicator *world;
int failures;

void report(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: rank %d: not so: %s (last error: %s)\n", file, line, world ? world->rank : -1,
            what, moe_error());
    failures++;
}

/* ---- the device ---- */

cudaStream_t moe_cuda_stream(struct moe_device *d, int stream)
{
    expect(d == &test_device);
    return streams[stream];
}

int moe_cuda_check(cudaError_t code, const char *call)
{
    if (code == cudaSuccess) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code));
}

static int device_alloc(struct moe_device *d, size_t bytes, void **out)
{
    (void)d;
    return moe_cuda_check(cudaMalloc(out, bytes), "cudaMalloc");
}

static void device_free(struct moe_device *d, void *p)
{
    (void)d;
    cudaFree(p);
}

static const struct moe_device_table device_table = {
    .name = "cuda", .async = true, .alloc = device_alloc, .free = device_free};
struct moe_device test_device = {&device_table};

void *on_device(const void *from, size_t bytes)
{
    void *p = NULL;
    expect(cudaMalloc(&p, bytes ? bytes : 1) == cudaSuccess);
    /* cudaMemcpy from pageable memory may return before the copy is done, which no other stream waits for. */
    expect(cudaMemcpyAsync(p, from, bytes, cudaMemcpyHostToDevice, streams[0]) == cudaSuccess);
    expect(cudaStreamSynchronize(streams[0]) == cudaSuccess);
    return p;
}

static int start_and_wait(struct moe_communicator *c, const struct moe_transfer *t)
{
    MOE_TRY(c->table->start(c, t));
    return c->table->wait(c, 20);
}

int run(struct moe_communicator *c, const struct moe_op *op, const void *in, size_t in_bytes, void *out,
        size_t out_bytes, const int64_t *send, const int64_t *recv)
{
    void *from = on_device(in, in_bytes), *to = on_device(out, out_bytes);
    MOE_TRY(start_and_wait(c, &(struct moe_transfer){op, from, to, send, recv}));
    expect(cudaMemcpy(out, to, out_bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    expect(cudaFree(from) == cudaSuccess && cudaFree(to) == cudaSuccess);
    return MOE_OK;
}

int run_in(struct moe_communicator *c, const struct moe_op *op, void *all, size_t bytes, size_t in_at,
           size_t out_at, const int64_t *send, const int64_t *recv)
{
    char *p = on_device(all, bytes);
    MOE_TRY(start_and_wait(c, &(struct moe_transfer){op, p + in_at, p + out_at, send, recv}));
    expect(cudaMemcpy(all, p, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    expect(cudaFree(p) == cudaSuccess);
    return MOE_OK;
}

/* ---- collectives ---- */

/* Rank r sends (r + p) % 3 elements to rank p, each 100 * r + p: what arrives from p is 100 * p + r. On
 * either stream. */
static void check_alltoall(int stream)
{
    const struct moe_op op = {.collective = MOE_ALLTOALL, .type = MOE_I32, .stream = stream};
    int64_t count[RANKS];
    int32_t in[2 * RANKS] = {0}, out[2 * RANKS + 1];
    int n = 0, r = world->rank, at = 0;
    for (int p = 0; p < RANKS; p++) {
        count[p] = (r + p) % 3;
        for (int i = 0; i < count[p]; i++) in[n++] = 100 * r + p;
    }
    memset(out, 0xff, sizeof out);
    expect(run(world, &op, in, sizeof in, out, sizeof out, count, count) == MOE_OK); /* it is symmetric */
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
        expect(run(world, &op, in, sizeof in, out, sizeof out, &two, &two) == MOE_OK);                       \
        expect(out[0] == 10 && out[1] == 30);                                                                \
        expect(run_in(world, &op, in, sizeof in, 0, 0, &two, &two) == MOE_OK);                               \
        expect(in[0] == 10 && in[1] == 30);                                                                  \
    } while (0)

/* Of -1, 0, 1, 2 and 3, 2, 1, 0; sums would be 2 and 6. */
static void check_max(void)
{
    static const struct moe_op op = {
        .collective = MOE_ALLREDUCE, .reduction = MOE_REDUCE_MAX, .type = MOE_I64};
    int64_t in[] = {world->rank - 1, 3 - world->rank}, out[] = {-9, -9};
    const int64_t two = 2;
    expect(run(world, &op, in, sizeof in, out, sizeof out, &two, &two) == MOE_OK);
    expect(out[0] == 2 && out[1] == 3);
}

/* Sums of 1, 2, 4 and 8 are exact. */
static void check_bf16(void)
{
    static const int64_t four = RANKS, ones[RANKS] = {1, 1, 1, 1};
    for (int i = 0; i < 2; i++) {
        const struct moe_op op = {.collective = i ? MOE_REDUCESCATTER : MOE_ALLREDUCE, .type = MOE_BF16};
        moe_bf16 in[RANKS], out[RANKS] = {0};
        for (int k = 0; k < RANKS; k++) in[k] = moe_bf16_from_float((float)(1 << world->rank));
        expect(run(world, &op, in, sizeof in, out, sizeof out, i ? ones : &four, i ? ones : &four) == MOE_OK);
        for (int k = 0; k < (i ? 1 : RANKS); k++) expect(moe_bf16_to_float(out[k]) == 15);
    }
}

static void check_allreduce(void)
{
    static const struct moe_op sum = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t none = 0;
    check_max();
    check_bf16();
    CHECK_SUM(int32_t, MOE_I32);
    CHECK_SUM(int64_t, MOE_I64);
    CHECK_SUM(float, MOE_F32);
    CHECK_SUM(double, MOE_F64);
    expect(run(world, &sum, NULL, 0, NULL, 0, &none, &none) == MOE_OK);
}

/* Rank r gives counts[r] elements, each 10 * r. */
static void check_allgather(const int64_t recv[RANKS])
{
    static const struct moe_op op = {.collective = MOE_ALLGATHER, .type = MOE_F64};
    const double r = 10 * world->rank, in[] = {r, r, r};
    double out[RANKS * 3 + 1];
    int at = 0;
    for (int i = 0; i <= RANKS * 3; i++) out[i] = -1;
    expect(run(world, &op, in, sizeof in, out, sizeof out, &recv[world->rank], recv) == MOE_OK);
    for (int p = 0; p < RANKS; p++)
        for (int i = 0; i < recv[p]; i++) expect(out[at++] == 10 * p);
    expect(out[at] == -1);
}

/* Element i of rank r is 1000 * r + i, and over all 6000 + 4 * i. In bf16, other numbers that are exact. */
static int64_t element(int r, int64_t i)
{
    return r == RANKS ? 6000 + 4 * i : 1000 * r + i;
}

static moe_bf16 element_bf16(int r, int64_t i)
{
    return moe_bf16_from_float((float)(r == RANKS ? 6 + 4 * i : r + i));
}

static void check_reducescatter(const int64_t send[RANKS])
{
    static const struct moe_op op = {.collective = MOE_REDUCESCATTER, .type = MOE_I64};
    const int64_t recv = send[world->rank];
    int64_t in[12], out[] = {-1, -1, -1, -1}, first = 0;
    for (int p = 0; p < world->rank; p++) first += send[p];
    for (int i = 0; i < 12; i++) in[i] = element(world->rank, i);
    expect(run(world, &op, in, sizeof in, out, sizeof out, send, &recv) == MOE_OK);
    for (int64_t i = 0; i < recv; i++) expect(out[i] == element(RANKS, first + i));
    expect(out[recv] == -1);
}

/* Rank p's sum goes where its part of what it sends lies, beside which nothing changes; then its part is
 * gathered from where it arrives. */
#define CHECK_IN_PLACE(type_name, moe_type_id, value, parts)                                                 \
    do {                                                                                                     \
        const struct moe_op scatter = {.collective = MOE_REDUCESCATTER, .type = moe_type_id},                \
                            gather = {.collective = MOE_ALLGATHER, .type = moe_type_id};                     \
        const int64_t own = (parts)[world->rank];                                                            \
        int64_t first = 0;                                                                                   \
        type_name all[8];                                                                                    \
        for (int p = 0; p < world->rank; p++) first += (parts)[p];                                           \
        const size_t at = (size_t)first * sizeof *all;                                                       \
        for (int i = 0; i < 8; i++) all[i] = (type_name)value(world->rank, i);                               \
        expect(run_in(world, &scatter, all, sizeof all, 0, at, parts, &own) == MOE_OK);                      \
        for (int64_t i = 0; i < 8; i++)                                                                      \
            expect(all[i] == (type_name)value(i >= first && i < first + own ? RANKS : world->rank, i));      \
        expect(run_in(world, &gather, all, sizeof all, at, 0, &own, parts) == MOE_OK);                       \
        for (int64_t i = 0; i < 8; i++) expect(all[i] == (type_name)value(RANKS, i));                        \
    } while (0)

static void check_in_place(void)
{
    static const int64_t parts[][RANKS] = {
        {1, 2, 2, 3}, {2, 0, 6, 0}, {4, 0, 0, 4}, {8, 0, 0, 0}, {2, 2, 2, 2}};
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++) {
        CHECK_IN_PLACE(int64_t, MOE_I64, element, parts[k]);
        CHECK_IN_PLACE(float, MOE_F32, element, parts[k]);
        CHECK_IN_PLACE(double, MOE_F64, element, parts[k]);
        CHECK_IN_PLACE(moe_bf16, MOE_BF16, element_bf16, parts[k]);
    }
}

/* ---- groups ---- */

/* Pairs {2, 0} and {3, 1}, places as told: the sum of the ranks is 2 and 4. */
static void check_split(void)
{
    static const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = MOE_I32},
                               move = {.collective = MOE_ALLTOALL, .type = MOE_I32};
    const int64_t one = 1, ones[] = {1, 1};
    const int odd = world->rank % 2;
    struct moe_communicator *pair, *alone;
    expect(world->table->split(world, (int[]){odd + 2, odd}, 2, 1, &pair) == MOE_OK);
    expect(world->table->split(world, &world->rank, 1, 2, &alone) == MOE_OK);
    expect(pair->size == 2 && pair->rank == (world->rank < 2) && alone->size == 1 && alone->rank == 0);
    int32_t sum = world->rank, own = world->rank, both[] = {10 * world->rank, 10 * world->rank + 1}, got[2];
    expect(run_in(pair, &op, &sum, sizeof sum, 0, 0, &one, &one) == MOE_OK);
    expect(sum == 2 + 2 * odd);
    if (odd) expect(run_in(pair, &op, &sum, sizeof sum, 0, 0, &one, &one) == MOE_OK);
    expect(run(pair, &move, both, sizeof both, got, sizeof got, ones, ones) == MOE_OK);
    expect(got[0] == 10 * (odd + 2) + pair->rank && got[1] == 10 * odd + pair->rank);
    expect(run_in(alone, &op, &own, sizeof own, 0, 0, &one, &one) == MOE_OK);
    expect(own == world->rank);
    pair->table->close(pair);
    alone->table->close(alone);
}

static void check_gather(void)
{
    for (size_t bytes = 0; bytes < 5000; bytes = bytes * 7 + 1) {
        char *own = moe_alloc(bytes, 1), *all = moe_alloc(bytes * RANKS, 1);
        memset(own, 'a' + world->rank, bytes);
        expect(world->table->gather(world, own, all, bytes, 20) == MOE_OK);
        for (size_t i = 0; i < bytes * RANKS; i++) expect(all[i] == 'a' + (int)(i / bytes));
        free(own);
        free(all);
    }
}

/* What they mean, and a rank that means another count. */
static void check_agreement(void)
{
    static const struct moe_op op = {.collective = MOE_ALLTOALL, .type = MOE_I64};
    static const int ranks[] = {0, 1, 2, 3};
    const int64_t ones[] = {1, 1, 1, 1}, more[] = {1, 3, 1, 1};
    struct moe_transfer t = {&op, NULL, NULL, ones, ones};
    expect(moe_agree(world, &t, "a", ranks, 20) == MOE_OK);
    if (world->rank == 2) t.send = more;
    expect(moe_agree(world, &t, "a", ranks, 20) == MOE_EVERDICT);
    expect(!strcmp(moe_error(),
                   "a: rank 2 sends 3 int64 (alltoall) to rank 1, which expects 1 int64 (alltoall)"));
}

/* The last rank comes late: the others give up after a tenth of a second, and may wait again. */
static void check_late(void)
{
    static const struct moe_op op = {.name = "late", .collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t one = 1;
    int32_t sum = 1;
    void *p = on_device(&sum, sizeof sum);
    char text[128];
    if (world->rank == RANKS - 1) sleep(1);
    expect(world->table->start(world, &(struct moe_transfer){&op, p, p, &one, &one}) == MOE_OK);
    if (world->rank != RANKS - 1) {
        expect(world->table->wait(world, 0.1) == MOE_EPEER);
        expect(!strcmp(moe_error(), "no answer for 0.1 s"));
        world->table->blame(world, (int[]){0, 1, 2, 3}, RANKS, "late", 0.1, text, sizeof text);
        expect(!strcmp(text, "rank 3 does not answer"));
        expect(world->table->poll(world) == MOE_OK);
    }
    expect(world->table->wait(world, 20) == MOE_OK);
    expect(cudaMemcpy(&sum, p, sizeof sum, cudaMemcpyDeviceToHost) == cudaSuccess && sum == RANKS);
    expect(cudaFree(p) == cudaSuccess);
}

static void check_all(void)
{
    static const int64_t rising[] = {0, 1, 2, 3}, equal[] = {2, 2, 2, 2}, none[RANKS] = {0},
                         last[] = {0, 0, 0, 3};
    check_alltoall(MOE_STREAM_COMPUTE);
    check_alltoall(MOE_STREAM_COMM);
    check_allreduce();
    check_allgather(rising);
    check_allgather(equal);
    check_allgather(none);
    check_allgather(last);
    check_reducescatter(rising);
    check_reducescatter(equal);
    check_reducescatter(none);
    check_reducescatter(last);
    check_in_place();
    check_split();
    check_gather();
    check_agreement();
    check_late();
}

/* As torchrun does; the port is a number that the ranks of a job have in common. */
static void meet_by_environment(void)
{
    char port[16];
    snprintf(port, sizeof port, "%d", 20000 + getppid() % 12000);
    setenv("RANK", getenv("OMPI_COMM_WORLD_RANK"), 1);
    setenv("WORLD_SIZE", getenv("OMPI_COMM_WORLD_SIZE"), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port, 1);
}

int main(int argc, char **argv)
{
    double timeout_s = 60;
    ending end = argc == 3 ? find_ending(argv[2], &timeout_s) : NULL;
    if (!getenv("OMPI_COMM_WORLD_RANK") || argc != 3 || (!end && strcmp(argv[2], "all") != 0)) {
        fprintf(stderr, "usage: mpirun -n %d test_comm_nccl mpi|env all|ENDING\n", RANKS);
        return 1;
    }
    if (!strcmp(argv[1], "env")) meet_by_environment();
    for (int i = 0; i < MOE_STREAM_COUNT; i++)
        expect(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking) == cudaSuccess);
    if (end) end(timeout_s);
    if (moe_comm_nccl.open(&test_device, timeout_s, &world) < 0) {
        fprintf(stderr, "test_comm_nccl: %s\n", moe_error());
        return 1;
    }
    expect(world->size == RANKS);
    check_all();
    int all[RANKS] = {0}, sum = 0;
    if (world->table->gather(world, &failures, all, sizeof failures, 20) < 0) sum = 1;
    for (int p = 0; p < RANKS; p++) sum += all[p];
    world->table->close(world);
    return sum > 0 || failures;
}
