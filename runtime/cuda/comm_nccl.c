/* comm_nccl.c - see communicator.h: collectives of NCCL, on the streams of the device "cuda".
 *
 * Ranks meet as job.h and peers.h say. Communicators are non-blocking: a call that waits for others says
 * ncclInProgress and is asked again until it is done, another rank has stopped, or the timeout of open is
 * over; so no call of the library can keep a rank for ever. Sums are added in the order of the library.
 *
 * What a collective becomes: ALLTOALL a group of sends and receives; ALLGATHER and REDUCESCATTER with equal
 * parts one call, else a group of a broadcast, or a reduction, to each part. Parts of no elements are left
 * out. */
#include "runtime/cuda/cuda_device.h"
#include "runtime/execute.h"
#include "runtime/peers.h"

#include <nccl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 21, 0)
#error "moesim needs NCCL 2.21 or newer"
#endif

enum { SPINS = 200, PAUSE_US = 50 }; /* after so many looks in vain, sleep between them */

/* To say goodbye when something failed; to hear who is where; to finalize; and a process that cannot end by
 * itself after its abort is ended. */
static const double leave_s = 3, blame_s = 1.5, finalize_s = 5;
enum { WATCHDOG_S = 8 };

struct nccl_communicator {
    struct moe_communicator base;
    struct nccl_communicator *world, *next; /* next: all of a world, which comes last */
    ncclComm_t comm;
    int *ranks;          /* [size] in the world */
    cudaStream_t stream; /* of the last start; NULL: none yet */
    cudaEvent_t done;
    /* of the world */
    struct moe_device *device; /* borrowed */
    struct moe_peers *peers;
    struct moe_communicator *mpi; /* NULL: ranks meet without it */
    double timeout_s;
    bool failed; /* something of any communicator did: the library is not waited for any more */
    /* What gathers move, one after the other: bytes of page-locked host memory and of the device. */
    char *staging, *staged;
    size_t staging_bytes;
};

static struct nccl_communicator *nccl_of(struct moe_communicator *c)
{
    return (struct nccl_communicator *)c; /* base comes first */
}

#define CUDA(name, ...) moe_cuda_check(name(__VA_ARGS__), #name)

/* ---- errors and waiting ---- */

/* The texts of the library name what it met last, which need not be this. */
static int check(ncclComm_t comm, ncclResult_t code, const char *call)
{
    if (code == ncclSuccess || code == ncclInProgress) return MOE_OK;
    const char *last = ncclGetLastError(comm);
    return moe_fail(code == ncclRemoteError || code == ncclSystemError ? MOE_EPEER : MOE_EFAILED,
                    "%s: %s%s%s", call, ncclGetErrorString(code), last && *last ? ": " : "",
                    last ? last : "");
}

static void rest(int *looks)
{
    if (++*looks < SPINS)
        sched_yield();
    else
        usleep(PAUSE_US);
}

static int64_t in_ns(double seconds)
{
    return moe_now_ns() + (int64_t)(seconds * 1e9);
}

/* Goes on until what `comm` was asked for is done. code: what the call said; a non-blocking communicator may
 * say ncclSuccess and be in progress. *late: the time was over. */
static int finish(struct nccl_communicator *world, ncclComm_t comm, ncclResult_t code, const char *call,
                  double timeout_s, bool *late)
{
    const int64_t end_ns = in_ns(timeout_s);
    int looks = 0;
    if (late) *late = false;
    MOE_TRY(check(comm, code, call));
    for (;;) {
        MOE_TRY(check(comm, ncclCommGetAsyncError(comm, &code), "ncclCommGetAsyncError"));
        if (code != ncclInProgress) return check(comm, code, call);
        MOE_TRY(moe_peers_check(world->peers));
        if (moe_now_ns() > end_ns) {
            if (late) *late = true;
            return moe_fail(MOE_EPEER, "%s: no answer for %g s", call, timeout_s);
        }
        rest(&looks);
    }
}

/* Adds who has not come to `place` to what moe_error() says. */
static int missing(struct nccl_communicator *world, int err, const char *place)
{
    char text[512], who[256];
    snprintf(text, sizeof text, "%s", moe_error());
    moe_peers_missing(world->peers, place, world->ranks, world->base.size, who, sizeof who);
    return moe_fail(err, "%s%s%s", text, *who ? "; " : "", who);
}

/* Adds which members wait elsewhere, or nowhere. */
static int blamed(struct nccl_communicator *c, int err, const char *label)
{
    char text[512], who[256];
    snprintf(text, sizeof text, "%s", moe_error());
    moe_peers_blame(c->world->peers, c->ranks, c->base.size, label, blame_s, who, sizeof who);
    return moe_fail(err, "%s%s%s", text, *who ? "; " : "", who);
}

static int failed(struct nccl_communicator *c, int err)
{
    if (err < 0) c->world->failed = true;
    return err;
}

/* ---- open ---- */

static struct nccl_communicator *new_communicator(struct nccl_communicator *world, int rank, int size)
{
    struct nccl_communicator *c = moe_alloc(1, sizeof *c);
    c->base = (struct moe_communicator){&moe_comm_nccl, rank, size};
    c->world = world ? world : c;
    c->ranks = moe_alloc((size_t)size, sizeof *c->ranks);
    if (world) {
        c->next = world->next;
        world->next = c;
    }
    return c;
}

static int check_version(void)
{
    int version = 0;
    MOE_TRY(check(NULL, ncclGetVersion(&version), "ncclGetVersion"));
    if (version < NCCL_VERSION(2, 21, 0) || version / 10000 != NCCL_MAJOR)
        return moe_fail(MOE_EMISSING,
                        "NCCL %d.%d.%d is installed: expected %d.21 or newer (built with %d.%d.%d)",
                        version / 10000, version / 100 % 100, version % 100, NCCL_MAJOR, NCCL_MAJOR,
                        NCCL_MINOR, NCCL_PATCH);
    return version;
}

/* Where mpirun started this, MPI is opened: it may have to tell where rank 0 is, and ends the job. */
static int open_mpi(struct nccl_communicator *w, const struct moe_job *job)
{
    const struct moe_communicator_table *mpi = moe_communicator_find("mpi");
    if (job->launcher != MOE_LAUNCHED_BY_MPI) return MOE_OK;
    if (!mpi && !job->port && job->size > 1)
        return moe_fail(MOE_EMISSING, "mpirun started this, but MPI is not built in: set MASTER_ADDR and "
                                      "MASTER_PORT to where rank 0 may listen");
    if (!mpi) return MOE_OK;
    MOE_TRY(mpi->open(w->device, w->timeout_s, &w->mpi));
    if (w->mpi->rank == job->rank && w->mpi->size == job->size) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "MPI says rank %d of %d, its launcher rank %d of %d: is it the same MPI?",
                    w->mpi->rank, w->mpi->size, job->rank, job->size);
}

static int open_comm(struct nccl_communicator *w)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    const int version = check_version();
    struct {
        ncclUniqueId id;
        int version;
    } begin = {.version = version};
    bool late;
    if (version < 0) return version;
    if (w->base.rank == 0) MOE_TRY(check(NULL, ncclGetUniqueId(&begin.id), "ncclGetUniqueId"));
    MOE_TRY(moe_peers_share(w->peers, "begin", &begin, sizeof begin));
    if (begin.version != version)
        return moe_fail(MOE_EMISSING, "NCCL %d is installed here, %d where rank 0 runs: expected the same",
                        version, begin.version);
    MOE_TRY(moe_peers_arrive(w->peers, "open"));
    config.blocking = 0;
    ncclResult_t code = ncclCommInitRankConfig(&w->comm, w->base.size, begin.id, w->base.rank, &config);
    int err = finish(w, w->comm, code, "ncclCommInitRankConfig", w->timeout_s, &late);
    return err < 0 && late ? missing(w, err, "open") : err;
}

static int open_world(struct nccl_communicator *w, const struct moe_job *job)
{
    MOE_TRY(open_mpi(w, job));
    MOE_TRY(moe_peers_open(job, w->mpi, w->timeout_s, &w->peers));
    MOE_TRY(CUDA(cudaEventCreateWithFlags, &w->done, cudaEventDisableTiming));
    return open_comm(w);
}

static void nccl_close(struct moe_communicator *c);

static int nccl_open(struct moe_device *device, double timeout_s, struct moe_communicator **out)
{
    struct moe_job job;
    char text[512];
    MOE_TRY(moe_job_find(getenv, &job));
    struct nccl_communicator *w = new_communicator(NULL, job.rank, job.size);
    for (int r = 0; r < job.size; r++) w->ranks[r] = r;
    w->device = device;
    w->timeout_s = timeout_s;
    int err = failed(w, open_world(w, &job));
    if (err >= 0) {
        *out = &w->base;
        return MOE_OK;
    }
    snprintf(text, sizeof text, "%s", moe_error());
    if (w->peers) moe_peers_stop(w->peers, text); /* others hear of it, and nobody waits */
    nccl_close(&w->base);
    return moe_fail(err, "%s", text);
}

/* ---- close ---- */

/* Is nothing of it in flight? */
static bool idle(const struct nccl_communicator *c)
{
    if (!c->stream) return true;
    const bool is = cudaStreamQuery(c->stream) == cudaSuccess;
    if (!is) cudaGetLastError(); /* not ready is no error, and a launch must not find it */
    return is;
}

static void end_comm(struct nccl_communicator *c)
{
    struct nccl_communicator *w = c->world;
    const double seconds = w->timeout_s < finalize_s ? w->timeout_s : finalize_s;
    if (!c->comm) return;
    const bool clean = !w->failed && idle(c) &&
                       finish(w, c->comm, ncclCommFinalize(c->comm), "ncclCommFinalize", seconds, NULL) >= 0;
    w->failed |= !clean;
    const ncclResult_t code = clean ? ncclCommDestroy(c->comm) : ncclCommAbort(c->comm);
    w->failed |= code != ncclSuccess && code != ncclInProgress; /* gone in any case */
    c->comm = NULL;
}

/* The world: when all went well, rank 0 stays until all others are here, and MPI ends. After a failure others
 * may never come: then MPI is left as it is. */
static void end_world(struct nccl_communicator *w)
{
    const bool together = w->peers && (!w->failed || moe_peers_leave(w->peers, leave_s));
    moe_peers_close(w->peers, w->failed ? leave_s : w->timeout_s);
    if (w->mpi && together) w->mpi->table->close(w->mpi);
    if (w->staging) cudaFreeHost(w->staging);
    if (w->staged) w->device->table->free(w->device, w->staged);
}

static void nccl_close(struct moe_communicator *c)
{
    if (!c) return;
    struct nccl_communicator *n = nccl_of(c), *w = n->world;
    end_comm(n);
    while (n == w && w->next) nccl_close(&w->next->base); /* whose split failed */
    if (n == w) end_world(w);
    for (struct nccl_communicator *i = w; i != n && i; i = i->next)
        if (i->next == n) i->next = n->next;
    if (n->done) cudaEventDestroy(n->done);
    free(n->ranks);
    free(n);
}

/* ---- split ---- */

/* All ranks of the world call it: who does not come is named. */
static int split_comm(struct nccl_communicator *c, int id)
{
    struct nccl_communicator *w = c->world;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    char place[MOE_NAME];
    bool late;
    snprintf(place, sizeof place, "split %d", id);
    MOE_TRY(moe_peers_arrive(w->peers, place));
    MOE_TRY(CUDA(cudaEventCreateWithFlags, &c->done, cudaEventDisableTiming));
    config.blocking = 0;
    const ncclResult_t code = ncclCommSplit(w->comm, c->ranks[0], c->base.rank, &c->comm, &config);
    int err = finish(w, w->comm, code, "ncclCommSplit", w->timeout_s, &late);
    if (err >= 0) err = finish(w, c->comm, ncclSuccess, "ncclCommSplit", w->timeout_s, &late);
    return err < 0 && late ? missing(w, err, place) : err;
}

static int nccl_split(struct moe_communicator *world, const int *ranks, int n, int id,
                      struct moe_communicator **out)
{
    int place = 0;
    while (place < n && ranks[place] != world->rank) place++;
    moe_assert(place < n);
    struct nccl_communicator *c = new_communicator(nccl_of(world), place, n);
    memcpy(c->ranks, ranks, (size_t)n * sizeof *ranks);
    MOE_TRY(failed(c, split_comm(c, id))); /* the library may yet write where it is: the world closes it */
    *out = &c->base;
    return MOE_OK;
}

/* ---- collectives ---- */

static const ncclDataType_t types[MOE_TYPE_COUNT] = {[MOE_F32] = ncclFloat32,
                                                     [MOE_F64] = ncclFloat64,
                                                     [MOE_BF16] = ncclBfloat16,
                                                     [MOE_I32] = ncclInt32,
                                                     [MOE_I64] = ncclInt64};

static bool equal(const int64_t *counts, int n)
{
    for (int i = 1; i < n; i++)
        if (counts[i] != counts[0]) return false;
    return true;
}

/* Within a group, of which later calls go on after a failure: the first that is none of success. */
static void keep(ncclResult_t *first, ncclResult_t code)
{
    if (*first == ncclSuccess && code != ncclInProgress) *first = code;
}

static ncclResult_t all_to_all(struct nccl_communicator *c, const struct moe_transfer *t, cudaStream_t stream)
{
    const ncclDataType_t type = types[t->op->type];
    const int64_t bytes = moe_type_bytes[t->op->type];
    const char *in = t->in;
    char *out = t->out;
    ncclResult_t first = ncclSuccess;
    for (int p = 0; p < c->base.size; p++) {
        if (t->send[p]) keep(&first, ncclSend(in, (size_t)t->send[p], type, p, c->comm, stream));
        if (t->recv[p]) keep(&first, ncclRecv(out, (size_t)t->recv[p], type, p, c->comm, stream));
        in += t->send[p] * bytes;
        out += t->recv[p] * bytes;
    }
    return first;
}

static ncclResult_t all_gather(struct nccl_communicator *c, const struct moe_transfer *t, cudaStream_t stream)
{
    const ncclDataType_t type = types[t->op->type];
    const int64_t bytes = moe_type_bytes[t->op->type];
    char *out = t->out;
    ncclResult_t first = ncclSuccess;
    if (equal(t->recv, c->base.size) && t->recv[0])
        return ncclAllGather(t->in, out, (size_t)t->recv[0], type, c->comm, stream);
    for (int p = 0; p < c->base.size; p++) {
        const void *in = p == c->base.rank ? t->in : out;
        if (t->recv[p]) keep(&first, ncclBroadcast(in, out, (size_t)t->recv[p], type, p, c->comm, stream));
        out += t->recv[p] * bytes;
    }
    return first;
}

/* Of parts that a rank does not get, NCCL lets it say NULL for where they would arrive. */
static ncclResult_t reduce_scatter(struct nccl_communicator *c, const struct moe_transfer *t,
                                   cudaStream_t stream)
{
    const ncclDataType_t type = types[t->op->type];
    const int64_t bytes = moe_type_bytes[t->op->type];
    const char *in = t->in;
    ncclResult_t first = ncclSuccess;
    if (equal(t->send, c->base.size) && t->send[0])
        return ncclReduceScatter(in, t->out, (size_t)t->send[0], type, ncclSum, c->comm, stream);
    for (int p = 0; p < c->base.size; p++) {
        if (t->send[p])
            keep(&first, ncclReduce(in, p == c->base.rank ? t->out : NULL, (size_t)t->send[p], type, ncclSum,
                                    p, c->comm, stream));
        in += t->send[p] * bytes;
    }
    return first;
}

static ncclResult_t issue(struct nccl_communicator *c, const struct moe_transfer *t, cudaStream_t stream)
{
    const ncclRedOp_t reduction = t->op->reduction == MOE_REDUCE_MAX ? ncclMax : ncclSum;
    switch (t->op->collective) {
    case MOE_ALLTOALL: return all_to_all(c, t, stream);
    case MOE_ALLGATHER: return all_gather(c, t, stream);
    case MOE_REDUCESCATTER: return reduce_scatter(c, t, stream);
    default:
        if (!t->send[0]) return ncclSuccess;
        return ncclAllReduce(t->in, t->out, (size_t)t->send[0], types[t->op->type], reduction, c->comm,
                             stream);
    }
}

/* A group that was begun is ended, whatever happens in it. Also what is one call is in one: errors come the
 * same way. The first collective of some members connects them, and waits for them. */
static int nccl_start(struct moe_communicator *base, const struct moe_transfer *t)
{
    struct nccl_communicator *c = nccl_of(base);
    bool late;
    c->stream = moe_cuda_stream(c->world->device, t->op->stream);
    MOE_TRY(failed(c, check(c->comm, ncclGroupStart(), "ncclGroupStart")));
    const ncclResult_t inside = issue(c, t, c->stream), end = ncclGroupEnd();
    int err = check(c->comm, inside, moe_collective_text[t->op->collective]);
    if (err >= 0)
        err = finish(c->world, c->comm, end, "ncclGroupEnd", c->world->timeout_s, &late);
    else
        late = false;
    if (err < 0 && late) err = blamed(c, err, t->label ? t->label : t->op->name);
    return failed(c, err);
}

/* Until all that is on the stream is done. *late: the time was over. */
static int wait_for(struct nccl_communicator *c, cudaStream_t stream, double timeout_s, bool *late)
{
    const int64_t end_ns = in_ns(timeout_s);
    *late = false;
    MOE_TRY(CUDA(cudaEventRecord, c->done, stream));
    for (int looks = 0;; rest(&looks)) {
        const cudaError_t code = cudaEventQuery(c->done);
        if (code == cudaSuccess) return MOE_OK;
        if (code != cudaErrorNotReady) return moe_cuda_check(code, "cudaEventQuery");
        cudaGetLastError(); /* no error: see idle */
        MOE_TRY(c->base.table->poll(&c->base));
        *late = moe_now_ns() > end_ns;
        if (*late) return moe_fail(MOE_EPEER, "no answer for %g s", timeout_s);
    }
}

static int nccl_wait(struct moe_communicator *base, double timeout_s)
{
    struct nccl_communicator *c = nccl_of(base);
    bool late;
    return c->stream ? wait_for(c, c->stream, timeout_s, &late) : MOE_OK;
}

static int nccl_poll(struct moe_communicator *base)
{
    struct nccl_communicator *c = nccl_of(base);
    ncclResult_t code = ncclSuccess;
    MOE_TRY(failed(c, check(c->comm, ncclCommGetAsyncError(c->comm, &code), "ncclCommGetAsyncError")));
    MOE_TRY(failed(c, check(c->comm, code, "NCCL")));
    return failed(c, moe_peers_check(c->world->peers));
}

/* ---- gather ---- */

static int make_room(struct nccl_communicator *w, size_t bytes)
{
    void *host = NULL, *device = NULL;
    if (bytes <= w->staging_bytes) return MOE_OK;
    if (w->staging) MOE_TRY(CUDA(cudaFreeHost, w->staging));
    w->staging = NULL;
    if (w->staged) w->device->table->free(w->device, w->staged);
    w->staged = NULL;
    w->staging_bytes = 0;
    MOE_TRY(CUDA(cudaHostAlloc, &host, bytes, cudaHostAllocDefault));
    w->staging = host;
    MOE_TRY(w->device->table->alloc(w->device, bytes, &device));
    w->staged = device;
    w->staging_bytes = bytes;
    return MOE_OK;
}

/* Four steps on the communication stream, behind what it has to do: a copy to the device, an all-gather in
 * place, a copy back, and the host waits for it. */
static int gather(struct nccl_communicator *c, const void *own, void *all, size_t bytes, double timeout_s)
{
    struct nccl_communicator *w = c->world;
    const cudaStream_t stream = moe_cuda_stream(w->device, MOE_STREAM_COMM);
    const size_t sum = bytes * (size_t)c->base.size, at = bytes * (size_t)c->base.rank;
    bool late;
    c->stream = stream;
    MOE_TRY(make_room(w, sum));
    memcpy(w->staging + at, own, bytes);
    MOE_TRY(CUDA(cudaMemcpyAsync, w->staged + at, w->staging + at, bytes, cudaMemcpyHostToDevice, stream));
    const ncclResult_t code = ncclAllGather(w->staged + at, w->staged, bytes, ncclInt8, c->comm, stream);
    int err = finish(w, c->comm, code, "ncclAllGather", timeout_s, &late);
    if (err >= 0) {
        MOE_TRY(CUDA(cudaMemcpyAsync, w->staging, w->staged, sum, cudaMemcpyDeviceToHost, stream));
        err = wait_for(c, stream, timeout_s, &late);
    }
    if (err < 0) return late ? blamed(c, err, "a gather") : err;
    memcpy(all, w->staging, sum);
    return MOE_OK;
}

static int nccl_gather(struct moe_communicator *base, const void *own, void *all, size_t bytes,
                       double timeout_s)
{
    struct nccl_communicator *c = nccl_of(base);
    if (base->size == 1 || !bytes) {
        memcpy(all, own, bytes);
        return MOE_OK;
    }
    return failed(c, gather(c, own, all, bytes, timeout_s));
}

/* ---- the end ---- */

static void nccl_blame(struct moe_communicator *base, const int *ranks, int n, const char *label,
                       double grace_s, char *out, size_t size)
{
    moe_peers_blame(nccl_of(base)->world->peers, ranks, n, label, grace_s, out, size);
}

static void *end_process(void *exit_code)
{
    sleep(WATCHDOG_S);
    _exit((int)(intptr_t)exit_code);
}

/* The library's abort ends its kernels on the GPU; it has hung in some versions. */
static void nccl_abort(struct moe_communicator *base, int exit_code)
{
    struct nccl_communicator *w = nccl_of(base)->world;
    pthread_t watchdog;
    pthread_create(&watchdog, NULL, end_process, (void *)(intptr_t)exit_code);
    moe_peers_stop(w->peers, moe_error());
    for (struct nccl_communicator *c = w; c; c = c->next)
        if (c->comm) ncclCommAbort(c->comm);
    const bool all = moe_peers_leave(w->peers, leave_s);
    moe_peers_close(w->peers, all ? leave_s : 0);
    if (!all && w->mpi) w->mpi->table->abort(w->mpi, exit_code);
    _exit(exit_code);
}

const struct moe_communicator_table moe_comm_nccl = {.name = "nccl",
                                                     .open = nccl_open,
                                                     .close = nccl_close,
                                                     .split = nccl_split,
                                                     .start = nccl_start,
                                                     .wait = nccl_wait,
                                                     .gather = nccl_gather,
                                                     .poll = nccl_poll,
                                                     .blame = nccl_blame,
                                                     .abort = nccl_abort};
