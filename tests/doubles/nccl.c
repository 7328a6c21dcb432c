/* nccl.c - see nccl_double.h: the communicators of NCCL, from an id to their end. */
#include "tests/doubles/nccl_double.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static struct ncclComm *all; /* that there ever were */
static char last_error[512];

static const uint64_t id_magic = 0x64697563636e6d6f; /* at the start of an id that ncclGetUniqueId made */

ncclResult_t nccl_fail(ncclResult_t result, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return result;
}

ncclResult_t nccl_known(const struct ncclComm *comm, const char *call)
{
    if (!comm) return nccl_fail(ncclInvalidArgument, "%s : comm argument is NULL", call);
    const struct ncclComm *c = all;
    while (c && c != comm) c = c->next;
    if (!c) moe_double_wrong("%s: %p is not a communicator", call, (const void *)comm);
    if (!c->alive) moe_double_wrong("%s: the communicator was destroyed or aborted", call);
    return ncclSuccess;
}

/* Would ncclCommGetAsyncError say ncclInProgress? */
static bool in_progress(const struct ncclComm *c)
{
    return !c->ready || c->polls || c->prepared || nccl_join_pending(c) ||
           (c->finalized && !c->blocking && c->units);
}

ncclResult_t nccl_usable(const struct ncclComm *c, const char *call)
{
    const ncclResult_t known = nccl_known(c, call);
    if (known) return known;
    if (c->state) return nccl_fail(c->state, "%s: the communicator has failed", call);
    if (in_progress(c))
        return nccl_fail(ncclInvalidArgument,
                         "%s: Attempt to use communicator before the previous operation returned ncclSuccess",
                         call);
    return ncclSuccess;
}

void nccl_progress(void)
{
    nccl_join_progress();
    if (!moe_double_progress()) sched_yield();
}

bool nccl_outstanding(void)
{
    for (const struct ncclComm *c = all; c; c = c->next)
        if (c->alive && c->units) return true;
    return false;
}

void nccl_free_mpi(void)
{
    for (struct ncclComm *c = all; c; c = c->next)
        if (c->ready) MPI_Comm_free(&c->mpi);
}

ncclResult_t ncclGetVersion(int *version)
{
    if (!version) return nccl_fail(ncclInvalidArgument, "GetVersion : version argument is NULL");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm; /* "currently unused and can be set to NULL" */
    return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    if (!id) return nccl_fail(ncclInvalidArgument, "GetUniqueId : uniqueId argument is NULL");
    *id = (ncclUniqueId){{0}};
    memcpy(id->internal, &id_magic, sizeof id_magic);
    if (getrandom(id->internal + sizeof id_magic, 16, 0) != 16)
        return nccl_fail(ncclSystemError, "no random number for an id");
    return ncclSuccess;
}

/* blocking: what holds where the configuration does not say. */
static ncclResult_t read_config(const ncclConfig_t *config, struct ncclComm *c, bool blocking)
{
    c->blocking = blocking;
    if (!config) return ncclSuccess;
    if (config->magic != 0xcafebeef)
        return nccl_fail(ncclInvalidArgument,
                         "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1)
        return nccl_fail(ncclInvalidArgument, "Invalid config blocking attribute value %d", config->blocking);
    c->blocking = config->blocking == NCCL_CONFIG_UNDEF_INT || config->blocking;
    return ncclSuccess;
}

static struct ncclComm *comm_new(void)
{
    struct ncclComm *c = calloc(1, sizeof *c);
    if (!c) moe_double_wrong("no memory for a communicator");
    c->alive = true;
    c->next = all;
    return all = c;
}

static ncclResult_t join_world(ncclComm_t *comm, int n, const ncclUniqueId *id, int rank,
                               const ncclConfig_t *config)
{
    uint64_t magic, key[2];
    if (!comm) return nccl_fail(ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
    *comm = NULL;
    if (n < 1 || rank < 0 || rank >= n)
        return nccl_fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, n);
    memcpy(&magic, id->internal, sizeof magic);
    memcpy(key, id->internal + sizeof magic, sizeof key);
    if (magic != id_magic) moe_double_wrong("ncclCommInitRank: this id is not from ncclGetUniqueId");
    for (const struct ncclComm *c = all; c; c = c->next)
        if (memcmp(c->key, key, sizeof key) == 0)
            moe_double_wrong("ncclCommInitRank: a second communicator with the same id");
    struct ncclComm *c = comm_new();
    const ncclResult_t result = read_config(config, c, true);
    if (result) {
        c->alive = false;
        return result;
    }
    memcpy(c->key, key, sizeof key);
    cudaGetDevice(&c->device);
    *comm = c;
    return nccl_group_join(nccl_join_new(c, NULL, key, n, rank, 0, rank));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    nccl_group_start();
    ncclResult_t result = nccl_group_error(join_world(comm, n, &id, rank, config));
    const ncclResult_t end = nccl_group_end();
    if (comm && *comm && !(*comm)->blocking && end == ncclInProgress) result = end;
    return result ? result : end;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, n, id, rank, NULL);
}

/* splitmix64 */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static ncclResult_t join_split(struct ncclComm *parent, int color, int order, ncclComm_t *out,
                               const ncclConfig_t *config)
{
    ncclResult_t result = nccl_known(parent, "CommSplit");
    if (result) return result;
    if (!out) return nccl_fail(ncclInvalidArgument, "CommSplit : newcomm argument is NULL");
    *out = NULL;
    result = nccl_usable(parent, "CommSplit");
    if (result) return result;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        moe_double_wrong("ncclCommSplit: color %d is neither positive nor NCCL_SPLIT_NOCOLOR", color);
    struct ncclComm *c = NULL;
    const uint64_t number = mix(++parent->n_splits);
    const uint64_t key[2] = {mix(parent->key[0] ^ number), mix(parent->key[1] + number)};
    if (color != NCCL_SPLIT_NOCOLOR) {
        c = comm_new();
        result = read_config(config, c, parent->blocking);
        if (result) {
            c->alive = false;
            return result;
        }
        c->device = parent->device;
        c->key[0] = key[0];
        c->key[1] = mix(key[1] + (uint64_t)color + 1);
    }
    struct nccl_join *join = nccl_join_new(c, parent, key, parent->n, parent->rank, color, order);
    join->out = out;
    return nccl_group_join(join);
}

/* As NCCL does, a non-blocking split says ncclSuccess outside of a group: the parent's state tells. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
{
    nccl_group_start();
    const ncclResult_t result = nccl_group_error(join_split(comm, color, key, newcomm, config));
    const ncclResult_t end = nccl_group_end();
    if (result) return result;
    return end == ncclInProgress ? ncclSuccess : end;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
    const ncclResult_t known = nccl_known(c, "GetAsyncError");
    if (known) return known;
    if (!error) return nccl_fail(ncclInvalidArgument, "GetAsyncError : asyncError argument is NULL");
    nccl_join_progress();
    if (c->finalized) moe_double_progress();
    *error = c->state;
    if (c->state) return ncclSuccess;
    if (c->polls) {
        c->polls--;
        *error = ncclInProgress;
        return ncclSuccess;
    }
    if (c->prepared) {
        struct nccl_unit *u = c->prepared;
        c->prepared = NULL;
        const ncclResult_t result = nccl_unit_issue(u);
        if (result) c->state = result;
        *error = c->state;
    } else if (in_progress(c)) {
        *error = ncclInProgress;
    }
    return ncclSuccess;
}

/* Waits for what was issued. Where an error of the device ended the streams, it can only be aborted. */
static ncclResult_t drain(const struct ncclComm *c)
{
    while (c->units) {
        if (c->units->dropped) return nccl_fail(ncclUnhandledCudaError, "the device has failed");
        nccl_progress();
    }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    if (!c) return ncclSuccess;
    const ncclResult_t result = nccl_usable(c, "CommFinalize");
    if (result) return result;
    nccl_group_without(c, "ncclCommFinalize");
    if (c->finalized) return nccl_fail(ncclInvalidArgument, "CommFinalize: called before");
    c->finalized = true;
    if (c->blocking) return drain(c);
    c->polls = 1;
    return ncclInProgress;
}

static void end(struct ncclComm *c)
{
    c->alive = false;
    free(c->world);
    free(c->sent);
    free(c->received);
    c->world = NULL;
    c->sent = c->received = NULL;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    if (!c) return ncclSuccess;
    ncclResult_t result = nccl_usable(c, "CommDestroy");
    if (result) return result;
    nccl_group_without(c, "ncclCommDestroy");
    result = drain(c);
    if (!result) end(c);
    return result;
}

ncclResult_t ncclCommAbort(ncclComm_t c)
{
    if (!c) return ncclSuccess;
    nccl_known(c, "ncclCommAbort");
    nccl_group_without(c, "ncclCommAbort");
    nccl_join_abort(c);
    nccl_unit_abort(c);
    if (c->prepared) nccl_unit_free(c->prepared);
    c->prepared = NULL;
    end(c);
    return ncclSuccess;
}

static ncclResult_t ask(const struct ncclComm *c, const char *call, int *out, int value)
{
    if (!out) return nccl_fail(ncclInvalidArgument, "%s : argument is NULL", call);
    const ncclResult_t result = nccl_usable(c, call);
    if (!result) *out = value;
    return result;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *count)
{
    const ncclResult_t known = nccl_known(c, "CommCount");
    return known ? known : ask(c, "CommCount", count, c->n);
}

ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank)
{
    const ncclResult_t known = nccl_known(c, "CommUserRank");
    return known ? known : ask(c, "CommUserRank", rank, c->rank);
}

ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *device)
{
    const ncclResult_t known = nccl_known(c, "CommCuDevice");
    return known ? known : ask(c, "CommCuDevice", device, c->device);
}
