/* nccl_run.c - see nccl_double.h: how operations run, once their streams have come to them.
 *
 * An operation greets (headers between its members), moves (one MPI operation on copies) and is done. Units
 * of a communicator run one after the other; in a unit the collectives in order, then sends and receives all
 * at once. Sums are those of runtime/comm_mpi.c: the same calls of MPI on the same members. */
#include "kernels/bf16.h"
#include "tests/doubles/nccl_double.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const nccl_kind_name[NCCL_KIND_COUNT] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast",
                                                     "Reduce",    "Send",          "Recv"};

static struct nccl_unit *in_flight; /* of aborted communicators */

static bool one_to_one(const struct nccl_op *op)
{
    return op->kind == NCCL_SEND || op->kind == NCCL_RECV;
}

size_t nccl_op_reads(const struct nccl_op *op)
{
    const size_t bytes = op->count * nccl_type_bytes(op->type);
    if (op->kind == NCCL_RECV || (op->kind == NCCL_BROADCAST && op->comm->rank != op->root)) return 0;
    return op->kind == NCCL_REDUCESCATTER ? bytes * (size_t)op->comm->n : bytes;
}

size_t nccl_op_writes(const struct nccl_op *op)
{
    const size_t bytes = op->count * nccl_type_bytes(op->type);
    if (op->kind == NCCL_SEND || (op->kind == NCCL_REDUCE && op->comm->rank != op->root)) return 0;
    return op->kind == NCCL_ALLGATHER ? bytes * (size_t)op->comm->n : bytes;
}

void nccl_op_live(const struct nccl_op *op)
{
    const size_t reads = nccl_op_reads(op), writes = nccl_op_writes(op);
    if (reads && !moe_double_is_device(op->send, reads))
        moe_double_wrong("nccl%s reads %zu bytes at %p, which is not live memory of the device",
                         nccl_kind_name[op->kind], reads, op->send);
    if (writes && !moe_double_is_device(op->recv, writes))
        moe_double_wrong("nccl%s writes %zu bytes at %p, which is not live memory of the device",
                         nccl_kind_name[op->kind], writes, op->recv);
}

static MPI_Datatype mpi_type(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8: return MPI_INT8_T;
    case ncclUint8: return MPI_UINT8_T;
    case ncclInt32: return MPI_INT32_T;
    case ncclInt64: return MPI_INT64_T;
    case ncclFloat32: return MPI_FLOAT;
    case ncclFloat64: return MPI_DOUBLE;
    default: return MPI_UINT16_T; /* bf16, which MPI does not have */
    }
}

static void sum_bf16(void *from, void *to, int *n, MPI_Datatype *type)
{
    const moe_bf16 *x = from;
    moe_bf16 *y = to;
    (void)type;
    for (int i = 0; i < *n; i++)
        y[i] = moe_bf16_from_float(moe_bf16_to_float(x[i]) + moe_bf16_to_float(y[i]));
}

static void max_bf16(void *from, void *to, int *n, MPI_Datatype *type)
{
    const moe_bf16 *x = from;
    moe_bf16 *y = to;
    (void)type;
    for (int i = 0; i < *n; i++)
        if (moe_bf16_to_float(x[i]) > moe_bf16_to_float(y[i])) y[i] = x[i];
}

static MPI_Op mpi_op(const struct nccl_op *op)
{
    static MPI_Op sum, max;
    static bool made;
    if (op->type != ncclBfloat16) return op->reduction == ncclMax ? MPI_MAX : MPI_SUM;
    if (!made) {
        MPI_Op_create(sum_bf16, 1, &sum);
        MPI_Op_create(max_bf16, 1, &max);
        made = true;
    }
    return op->reduction == ncclMax ? max : sum;
}

static void *need(size_t n, size_t each)
{
    void *p = calloc(n ? n : 1, each ? each : 1);
    if (!p) moe_double_wrong("no memory for %zu x %zu bytes", n, each);
    return p;
}

/* The operation tells its members what it is, and listens to what they are about to do. */
static void greet(struct nccl_op *op)
{
    struct ncclComm *c = op->comm;
    const int bytes = (int)sizeof op->own, me = c->rank;
    op->own = (struct nccl_header){.count = op->count, .kind = (int32_t)op->kind, .type = (int32_t)op->type};
    op->heard = need((size_t)c->n, sizeof *op->heard);
    op->requests = need((size_t)c->n * 2, sizeof(MPI_Request));
    op->n_requests = 0;
    op->stage = NCCL_GREETS;
    if (one_to_one(op)) {
        const bool sends = op->kind == NCCL_SEND;
        op->own.kind = NCCL_SEND;
        op->own.sequence = sends ? c->sent[op->root]++ : c->received[op->root]++;
        if (op->root == me) return;
        MPI_Irecv(op->heard, bytes, MPI_BYTE, op->root, sends ? NCCL_TAG_RECV : NCCL_TAG_SEND, c->mpi,
                  &op->requests[op->n_requests++]);
        MPI_Isend(&op->own, bytes, MPI_BYTE, op->root, sends ? NCCL_TAG_SEND : NCCL_TAG_RECV, c->mpi,
                  &op->requests[op->n_requests++]);
        return;
    }
    op->own.sequence = c->n_collectives++;
    op->own.reduction = (int32_t)op->reduction;
    op->own.root = op->root;
    for (int r = 0; r < c->n; r++) {
        if (r == me) continue;
        MPI_Irecv(&op->heard[r], bytes, MPI_BYTE, r, NCCL_TAG_COLLECTIVE, c->mpi,
                  &op->requests[op->n_requests++]);
        MPI_Isend(&op->own, bytes, MPI_BYTE, r, NCCL_TAG_COLLECTIVE, c->mpi, &op->requests[op->n_requests++]);
    }
}

/* Do the members do the same? */
static bool agreed(const struct nccl_op *op)
{
    const struct ncclComm *c = op->comm;
    if (one_to_one(op) && op->root == c->rank) return true; /* found in its group (nccl.c) */
    for (int r = 0; r < c->n; r++) {
        const int at = one_to_one(op) ? 0 : r, peer = one_to_one(op) ? op->root : r;
        const struct nccl_header *heard = &op->heard[at];
        if (!one_to_one(op) && r == c->rank) continue;
        if (memcmp(heard, &op->own, sizeof *heard) == 0) continue;
        if (getenv("MOE_DOUBLE_NCCL_SAY"))
            fprintf(
                stderr,
                "moesim double: nccl%s of %zu x type %d (number %llu) on rank %d of %d never completes: rank "
                "%d does %s of %llu x type %d (number %llu)\n",
                nccl_kind_name[op->kind], op->count, (int)op->type, (unsigned long long)op->own.sequence,
                c->rank, c->n, peer, nccl_kind_name[heard->kind], (unsigned long long)heard->count,
                heard->type, (unsigned long long)heard->sequence);
        return false;
    }
    return true;
}

/* Starts the one MPI operation that moves the data. */
static void move(struct nccl_op *op)
{
    struct ncclComm *c = op->comm;
    const MPI_Datatype type = mpi_type(op->type);
    const int n = (int)op->count, tag = NCCL_TAG_DATA + (int)(op->own.sequence % NCCL_DATA_TAGS);
    const size_t reads = nccl_op_reads(op), writes = nccl_op_writes(op);
    MPI_Request *request = op->requests;
    nccl_op_live(op);
    op->stage = NCCL_MOVES;
    op->n_requests = 1;
    op->in = need(reads, 1);
    if (reads) memcpy(op->in, op->send, reads);
    if (writes) op->out = op->kind == NCCL_ALLREDUCE && op->send == op->recv ? op->in : need(writes, 1);
    switch (op->kind) {
    case NCCL_ALLREDUCE: /* MPI may add in another order in place */
        MPI_Iallreduce(op->in == op->out ? MPI_IN_PLACE : op->in, op->out, n, type, mpi_op(op), c->mpi,
                       request);
        break;
    case NCCL_REDUCESCATTER:
        op->counts = need((size_t)c->n, sizeof *op->counts);
        for (int r = 0; r < c->n; r++) op->counts[r] = n;
        MPI_Ireduce_scatter(op->in, op->out, op->counts, type, mpi_op(op), c->mpi, request);
        break;
    case NCCL_ALLGATHER: MPI_Iallgather(op->in, n, type, op->out, n, type, c->mpi, request); break;
    case NCCL_REDUCE: /* all get the sum, as MPI adds in another order for another root */
        if (!op->out) op->out = need(reads, 1);
        MPI_Iallreduce(op->in, op->out, n, type, mpi_op(op), c->mpi, request);
        break;
    case NCCL_BROADCAST:
        if (reads) memcpy(op->out, op->in, reads);
        MPI_Ibcast(op->out, n, type, op->root, c->mpi, request);
        break;
    default:
        if (op->root == c->rank) {
            op->n_requests = 0;
            if (op->kind == NCCL_RECV && writes) memcpy(op->out, op->self->send, writes);
        } else if (op->kind == NCCL_SEND) {
            MPI_Isend(op->in, n, type, op->root, tag, c->mpi, request);
        } else {
            MPI_Irecv(op->out, n, type, op->root, tag, c->mpi, request);
        }
    }
}

static void op_step(struct nccl_op *op)
{
    int all = 0;
    if (op->never) op->stage = NCCL_STUCK;
    if (op->stage == NCCL_WAITS) greet(op);
    if (op->stage == NCCL_GREETS) {
        MPI_Testall(op->n_requests, op->requests, &all, MPI_STATUSES_IGNORE);
        if (!all) return;
        op->n_requests = 0;
        if (agreed(op)) {
            move(op);
        } else {
            op->stage = NCCL_STUCK;
        }
    }
    if (op->stage == NCCL_MOVES) {
        MPI_Testall(op->n_requests, op->requests, &all, MPI_STATUSES_IGNORE);
        if (!all) return;
        op->n_requests = 0;
        nccl_op_live(op);
        const size_t writes = nccl_op_writes(op);
        if (writes) memcpy(op->recv, op->out, writes);
        op->stage = NCCL_DONE;
    }
}

/* Of the operations of one kind (collectives, or the others): steps of all that may run. Result: all done. */
static bool unit_part(struct nccl_unit *u, bool collectives)
{
    bool all = true;
    for (int i = 0; i < u->n_ops; i++) {
        if (one_to_one(&u->ops[i]) == collectives) continue;
        op_step(&u->ops[i]);
        all = all && u->ops[i].stage == NCCL_DONE;
        if (collectives && !all) break;
    }
    return all;
}

/* Work on one stream for a unit. */
struct arrival {
    struct nccl_unit *unit;
    bool here;
};

static void leave(struct nccl_unit *u)
{
    for (struct nccl_unit **at = &u->comm->units; *at; at = &(*at)->next)
        if (*at == u) {
            *at = u->next;
            return;
        }
}

static int step(void *ctx)
{
    struct arrival *a = ctx;
    struct nccl_unit *u = a->unit;
    nccl_join_progress(); /* others may wait for this rank to build a communicator */
    if (u->done) return 1;
    if (!a->here) u->arrived++;
    a->here = true;
    if (u->dropped || u->arrived < u->n_streams || u->comm->units != u) return 0;
    if (!unit_part(u, true) || !unit_part(u, false)) return 0;
    u->done = true;
    leave(u);
    return 1;
}

static void drop(void *ctx)
{
    struct arrival *a = ctx;
    struct nccl_unit *u = a->unit;
    free(a);
    if (!u->done) u->dropped = true; /* the device has failed */
    if (--u->works == 0 && u->done) nccl_unit_free(u);
}

/* The streams of a unit's operations, each once. Result: their number. */
static int streams_of(const struct nccl_unit *u, cudaStream_t *streams)
{
    int n = 0;
    for (int i = 0; i < u->n_ops; i++) {
        int at = 0;
        while (at < n && streams[at] != u->ops[i].stream) at++;
        if (at == n) streams[n++] = u->ops[i].stream;
    }
    return n;
}

ncclResult_t nccl_unit_issue(struct nccl_unit *u)
{
    cudaStream_t *streams = need((size_t)u->n_ops, sizeof *streams);
    u->n_streams = streams_of(u, streams);
    struct nccl_unit **at = &u->comm->units;
    while (*at) at = &(*at)->next;
    *at = u;
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < u->n_ops; i++)
        if (u->ops[i].never)
            u->comm->state =
                nccl_fail(ncclRemoteError, "nccl%s: planted error", nccl_kind_name[u->ops[i].kind]);
    u->works = 1; /* this function's own */
    for (int i = 0; i < u->n_streams && !result; i++) {
        struct arrival *a = need(1, sizeof *a);
        a->unit = u;
        u->works++;
        const cudaError_t error =
            moe_double_enqueue(streams[i], &(struct moe_double_work){"nccl", step, drop, a});
        if (!error) continue;
        u->works--;
        free(a);
        result =
            nccl_fail(ncclUnhandledCudaError, "Cuda failure %d '%s'", (int)error, cudaGetErrorString(error));
    }
    if (result) { /* what is on other streams already goes by */
        u->done = true;
        leave(u);
    }
    free(streams);
    if (--u->works == 0) nccl_unit_free(u);
    return result;
}

static void op_cancel(struct nccl_op *op)
{
    if (op->stage != NCCL_GREETS) return;
    for (int i = 0; i < op->n_requests; i += 2) { /* receives of headers; what is sent is small, and gone */
        if (op->requests[i] == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&op->requests[i]);
        MPI_Wait(&op->requests[i], MPI_STATUS_IGNORE);
    }
}

static bool settled(struct nccl_unit *u)
{
    bool all = true;
    for (int i = 0; i < u->n_ops; i++) {
        int done = 1;
        if (u->ops[i].n_requests)
            MPI_Testall(u->ops[i].n_requests, u->ops[i].requests, &done, MPI_STATUSES_IGNORE);
        all = all && done;
    }
    return all;
}

void nccl_unit_abort(struct ncclComm *c)
{
    struct nccl_unit *u = c->units;
    c->units = NULL;
    for (struct nccl_unit *next; u; u = next) {
        next = u->next;
        for (int i = 0; i < u->n_ops; i++) op_cancel(&u->ops[i]);
        u->done = true;
        u->works++; /* kept among those in flight */
        u->next = in_flight;
        in_flight = u;
    }
}

bool nccl_unit_settle(void)
{
    for (struct nccl_unit **at = &in_flight, *u; (u = *at);) {
        if (!settled(u)) return false;
        *at = u->next;
        if (--u->works == 0) nccl_unit_free(u);
    }
    return true;
}

void nccl_unit_free(struct nccl_unit *u)
{
    for (int i = 0; i < u->n_ops; i++) {
        struct nccl_op *op = &u->ops[i];
        if (op->out != op->in) free(op->out);
        free(op->in);
        free(op->heard);
        free(op->requests);
        free(op->counts);
    }
    free(u->ops);
    free(u);
}
