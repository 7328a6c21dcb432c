/* test_nccl_misuse - wrong uses of NCCL on 4 ranks: mpirun -n 4 test_nccl_misuse. Each never completes, is
 * reported, or aborts, as the real library hangs, reports, or leaves undefined. */
#include "tests/doubles/fixture_nccl.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 5 };

static ncclComm_t world, dead; /* dead: was destroyed */
static float *x, *y;           /* [RANKS, COUNT] of the device */

/* ---- what hangs ---- */

/* After a wrong use: nothing of it completes here (or, where `mine` says so, all of it), until the
 * communicator is aborted; then streams go on, and nothing was written. */
static void hangs(ncclComm_t c, const char *what, bool mine)
{
    float got[COUNT];
    const bool done = completes(one, 0.5);
    if (done != mine) {
        fprintf(stderr, "rank %d: %s: %s\n", me, what, done ? "completed" : "did not complete");
        failures++;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    expect(ncclCommAbort(c) == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(got, y, sizeof got);
    for (int i = 0; i < COUNT; i++) expect(got[i] == -1);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void check_counts_differ(void)
{
    ncclComm_t c = new_world();
    expect(ncclAllReduce(x, y, me == 2 ? 4 : 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    hangs(c, "AllReduce of other counts", false);
    c = new_world();
    expect(ncclAllReduce(x, y, me == 2 ? 0 : 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    hangs(c, "AllReduce of nothing on one rank, which goes on", me == 2);
    c = new_world();
    if (me == 0) expect(ncclSend(x, 5, ncclFloat, 1, c, one) == ncclSuccess);
    if (me == 1) expect(ncclRecv(y, 4, ncclFloat, 0, c, one) == ncclSuccess);
    hangs(c, "send 5, receive 4", me > 1);
    c = new_world();
    if (me == 0) expect(ncclSend(x, 4, ncclFloat, 1, c, one) == ncclSuccess);
    if (me == 1) expect(ncclRecv(y, 5, ncclFloat, 0, c, one) == ncclSuccess);
    hangs(c, "send 4, receive 5", me > 1);
    c = new_world();
    if (me == 0) expect(ncclSend(x, 0, ncclFloat, 1, c, one) == ncclSuccess);
    hangs(c, "send 0, no receive", me > 0);
}

static void check_calls_differ(void)
{
    ncclComm_t c = new_world();
    if (me) expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    if (!me) expect(ncclReduceScatter(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    hangs(c, "another collective", false);
    c = new_world();
    expect(ncclAllReduce(x, y, 5, me == 1 ? ncclInt32 : ncclFloat, ncclSum, c, one) == ncclSuccess);
    hangs(c, "another type", false);
    c = new_world();
    expect(ncclAllReduce(x, y, 5, ncclFloat, me == 3 ? ncclMax : ncclSum, c, one) == ncclSuccess);
    hangs(c, "another reduction", false);
    c = new_world();
    expect(ncclBroadcast(x, y, 5, ncclFloat, me / 3, c, one) == ncclSuccess);
    hangs(c, "another root", false);
    c = new_world();
    if (me != 3) expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    hangs(c, "a rank is missing", me == 3);
}

static void check_order(void)
{
    ncclComm_t c = new_world();
    if (me < 2) {
        expect(ncclSend(x, 5, ncclFloat, !me, c, one) == ncclSuccess);
        expect(ncclRecv(y, 5, ncclFloat, !me, c, one) == ncclSuccess);
    }
    hangs(c, "both send first, and no group", me > 1);
    c = new_world();
    if (me == 0) expect(ncclSend(x, 5, ncclFloat, 1, c, one) == ncclSuccess);
    expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    if (me == 1) expect(ncclRecv(y, 5, ncclFloat, 0, c, one) == ncclSuccess);
    hangs(c, "a send before and its receive after a collective", false);
    c = new_world();
    if (!me) expect(ncclGroupStart() == ncclSuccess);
    if (me == 0) expect(ncclSend(x, 5, ncclFloat, 1, c, one) == ncclSuccess);
    if (me == 1) expect(ncclRecv(x + COUNT, 5, ncclFloat, 0, c, one) == ncclSuccess);
    expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    if (!me) expect(ncclGroupEnd() == ncclSuccess);
    hangs(c, "a receive before a collective that has its send in a group", false);
    c = new_world();
    if (me < 2) {
        expect(ncclGroupStart() == ncclSuccess);
        expect(me || ncclSend(x, 5, ncclFloat, 1, c, one) == ncclSuccess);
        expect(me || ncclSend(x, 4, ncclFloat, 1, c, one) == ncclSuccess);
        expect(!me || ncclRecv(y, 4, ncclFloat, 0, c, one) == ncclSuccess);
        expect(!me || ncclRecv(y + COUNT, 5, ncclFloat, 0, c, one) == ncclSuccess);
        expect(ncclGroupEnd() == ncclSuccess);
    }
    hangs(c, "two receives in the other order", me > 1);
}

/* Members that do not all take part in a split. */
static void check_split_missing(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t c, half = world;
    ncclResult_t state;
    config.blocking = 0;
    expect(ncclCommInitRankConfig(&c, RANKS, shared_id(), me, &config) == ncclInProgress);
    expect(polled(c) == ncclSuccess);
    MPI_Barrier(MPI_COMM_WORLD);
    if (me != 1) expect(ncclCommSplit(c, me % 2, 0, &half, NULL) == ncclSuccess);
    for (const double end = MPI_Wtime() + 0.5; me != 1 && MPI_Wtime() < end;)
        expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclInProgress);
    expect(me == 1 || !half);
    MPI_Barrier(MPI_COMM_WORLD);
    expect(ncclCommAbort(c) == ncclSuccess);
}

/* Rank 0 forgets the end of a group: it has issued nothing, and the others wait until it ends. */
static void check_no_group_end(void)
{
    ncclComm_t c = new_world();
    float got;
    if (!me) expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x, x + COUNT, 1, ncclFloat, ncclSum, c, one) == ncclSuccess);
    expect(completes(one, 0.5) == !me);
    MPI_Barrier(MPI_COMM_WORLD);
    if (!me) expect(ncclGroupEnd() == ncclSuccess);
    expect(cudaStreamSynchronize(one) == cudaSuccess);
    read_back(&got, x + COUNT, sizeof got);
    expect(got == 6);
    expect(ncclCommDestroy(c) == ncclSuccess);
}

/* ---- what is reported ---- */

static void check_reported(void)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t c = NULL;
    ncclUniqueId id = shared_id();
    int n;
    expect(ncclGroupEnd() == ncclInvalidUsage);
    expect(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, NULL, one) == ncclInvalidArgument);
    expect(ncclCommCount(NULL, &n) == ncclInvalidArgument);
    expect(ncclCommCount(world, NULL) == ncclInvalidArgument);
    expect(ncclBroadcast(x, y, 1, ncclFloat, RANKS, world, one) == ncclInvalidArgument);
    expect(ncclSend(x, 1, ncclFloat, -1, world, one) == ncclInvalidArgument);
    expect(ncclAllReduce(x, y, 1, ncclNumTypes, ncclSum, world, one) == ncclInvalidArgument);
    expect(ncclSend(x, 1, ncclFloat, me, world, one) == ncclInvalidUsage);
    expect(ncclRecv(x, 1, ncclFloat, me, world, one) == ncclInvalidUsage);
    expect(ncclCommInitRank(&c, RANKS, id, RANKS) == ncclInvalidArgument && !c);
    config.magic = 0;
    expect(ncclCommInitRankConfig(&c, RANKS, id, me, &config) == ncclInvalidArgument && !c);
    config = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    config.blocking = 2;
    expect(ncclCommInitRankConfig(&c, RANKS, id, me, &config) == ncclInvalidArgument && !c);
    expect(ncclCommSplit(world, 0, 0, NULL, NULL) == ncclInvalidArgument);
    expect(strcmp(ncclGetErrorString(ncclInProgress), "NCCL operation in progress") == 0);

    /* an error inside of a group: its end says so, and nothing of it is issued */
    expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one) == ncclSuccess);
    expect(ncclSend(x, 1, ncclFloat, RANKS, world, one) == ncclInvalidArgument);
    expect(ncclGroupEnd() == ncclInvalidArgument);
    expect(cudaStreamQuery(one) == cudaSuccess);
    expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one) == ncclSuccess);
    expect(ncclCommInitRank(&c, RANKS, id, me) == ncclSuccess);
    expect(ncclGroupEnd() == ncclInvalidUsage);
    expect(ncclCommAbort(c) == ncclSuccess);
    config.blocking = 0;
    expect(ncclGroupStart() == ncclSuccess);
    expect(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one) == ncclSuccess);
    expect(ncclCommInitRankConfig(&c, RANKS, shared_id(), me, &config) == ncclInvalidArgument);
    expect(ncclGroupEnd() == ncclInvalidArgument);
    expect(cudaStreamQuery(one) == cudaSuccess);
}

/* ---- what is undefined ---- */

/* In a child: it must die of this signal, and say `text`. */
static void dies(void (*body)(void), int of, const char *text)
{
    char said[4096] = "";
    size_t n = 0;
    ssize_t got;
    int ends[2], status;
    fflush(NULL);
    expect(pipe(ends) == 0);
    const pid_t child = fork();
    if (!child) {
        signal(SIGABRT, SIG_DFL); // MPI has its own
        dup2(ends[1], 2);
        body();
        _exit(0);
    }
    close(ends[1]);
    while ((got = read(ends[0], said + n, sizeof said - 1 - n)) > 0) n += (size_t)got;
    close(ends[0]);
    expect(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == of && strstr(said, text)) return;
    fprintf(stderr, "rank %d: expected: %s\nsaid (status %d): %s\n", me, text, status, said);
    failures++;
}

static void host_memory(void)
{
    static float host[COUNT];
    ncclAllReduce(host, y, COUNT, ncclFloat, ncclSum, world, one);
}

static void too_short(void)
{
    ncclAllGather(x + 1, y, COUNT * RANKS, ncclFloat, world, one);
}

static void freed(void)
{
    float *z = device(COUNT * sizeof *z);
    cudaFree(z);
    ncclSend(z, COUNT, ncclFloat, !me, world, one);
}

static void overlaps(void)
{
    ncclAllReduce(x, x + 1, 2, ncclFloat, ncclSum, world, one);
}

static void wrong_place(void)
{
    ncclAllGather(x + (me + 1) % RANKS, x, 1, ncclFloat, world, one);
}

static void wrong_part(void)
{
    ncclReduceScatter(x, x + (me + 1) % RANKS, 1, ncclFloat, ncclSum, world, one);
}

static void group_overlaps(void)
{
    ncclGroupStart();
    ncclSend(x, 3, ncclFloat, !me, world, one);
    ncclRecv(x + 2, 3, ncclFloat, !me, world, one);
    ncclGroupEnd();
}

static void destroyed(void)
{
    ncclAllReduce(x, y, 1, ncclFloat, ncclSum, dead, one);
}

static void destroyed_twice(void)
{
    ncclCommDestroy(dead);
}

static void destroyed_in_group(void)
{
    ncclGroupStart();
    ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one);
    ncclCommDestroy(world);
}

static void foreign_id(void)
{
    ncclUniqueId id = {{1, 2, 3}};
    ncclComm_t c;
    ncclCommInitRank(&c, 1, id, 0);
}

static ncclUniqueId used_id;

static void id_twice(void)
{
    ncclComm_t c;
    ncclCommInitRank(&c, RANKS, used_id, me);
}

static void after_finalize(void)
{
    ncclCommFinalize(world);
    ncclAllReduce(x, y, 1, ncclFloat, ncclSum, world, one);
}

static void killed(void)
{
    setenv("MOE_DOUBLE_NCCL", "dead:2", 1);
    ncclGroupStart();
    for (int i = 0; i < 2; i++) {
        ncclSend(x, 1, ncclFloat, !me, world, one);
        fprintf(stderr, "%d done;", i + 1);
    }
}

static void check_undefined(void)
{
    dies(killed, SIGKILL, "1 done;"); // first of all: it counts operations
    dies(host_memory, SIGABRT, "ncclAllReduce reads 20 bytes");
    dies(too_short, SIGABRT, "ncclAllGather reads 80 bytes");
    dies(freed, SIGABRT, "");
    dies(overlaps, SIGABRT, "buffers overlap");
    dies(wrong_place, SIGABRT, "buffers overlap");
    dies(wrong_part, SIGABRT, "buffers overlap");
    dies(group_overlaps, SIGABRT, "ncclRecv of a group writes what its ncclSend uses");
    dies(destroyed, SIGABRT, "was destroyed");
    dies(destroyed_twice, SIGABRT, "was destroyed");
    dies(destroyed_in_group, SIGABRT, "inside of a group");
    dies(foreign_id, SIGABRT, "not from ncclGetUniqueId");
    dies(id_twice, SIGABRT, "a second communicator");
    dies(after_finalize, SIGABRT, "after ncclCommFinalize");
}

/* ---- planted faults ---- */

static void check_planted(void)
{
    ncclComm_t c = new_world();
    ncclResult_t state;
    expect(setenv("MOE_DOUBLE_NCCL", "error:1:2", 1) == 0);
    expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == (me == 2 ? ncclSystemError : ncclSuccess));
    hangs(c, "an operation failed on rank 2", me == 2);
    c = new_world();
    expect(setenv("MOE_DOUBLE_NCCL", "remote:2:1", 1) == 0);
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess && state == ncclSuccess);
    expect(ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclSuccess);
    expect(ncclCommGetAsyncError(c, &state) == ncclSuccess);
    expect(state == (me == 1 ? ncclRemoteError : ncclSuccess));
    expect(me != 1 || ncclAllReduce(x, y, 5, ncclFloat, ncclSum, c, one) == ncclRemoteError);
    hangs(c, "a remote error", false);
    unsetenv("MOE_DOUBLE_NCCL");
}

int main(void)
{
    float ones[RANKS * COUNT], marks[RANKS * COUNT];
    open_all();
    for (int i = 0; i < RANKS * COUNT; i++) {
        ones[i] = (float)me;
        marks[i] = -1;
    }
    x = device_copy(ones, sizeof ones);
    y = device_copy(marks, sizeof marks);
    used_id = shared_id();
    expect(ncclCommInitRank(&world, RANKS, used_id, me) == ncclSuccess);
    dead = new_world();
    expect(ncclCommDestroy(dead) == ncclSuccess);
    check_undefined();
    check_planted();
    check_reported();
    check_counts_differ();
    check_calls_differ();
    check_order();
    check_split_missing();
    check_no_group_end();
    expect(ncclCommDestroy(world) == ncclSuccess);
    return close_all();
}
