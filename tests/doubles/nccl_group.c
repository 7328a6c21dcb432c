/* nccl_group.c - see nccl_double.h: groups, and the operations that they collect.
 *
 * A call outside of a group is a group of its own. Nothing happens before the outermost end; then each
 * communicator gets one unit of what was collected for it. */
#include "tests/doubles/nccl_double.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    int depth, blocking; /* blocking: -1 before the first communicator */
    ncclResult_t error;
    struct nccl_op *ops;
    int n_ops;
    struct nccl_join *joins;
} group = {.blocking = -1};

static int n_issued; /* operations of this process, for planted faults */

void nccl_group_start(void)
{
    group.depth++;
}

ncclResult_t nccl_group_error(ncclResult_t result)
{
    if (result && result != ncclInProgress && group.depth) group.error = result;
    return result;
}

void nccl_group_without(const struct ncclComm *comm, const char *call)
{
    bool some = false;
    for (int i = 0; i < group.n_ops; i++) some = some || group.ops[i].comm == comm;
    for (const struct nccl_join *j = group.joins; j; j = j->next)
        some = some || j->comm == comm || j->parent == comm;
    if (some) moe_double_wrong("%s inside of a group that uses the communicator", call);
}

/* All communicators of a group block, or none does. */
static ncclResult_t same_blocking(const struct ncclComm *c)
{
    if (group.blocking < 0) group.blocking = c->blocking;
    if (group.blocking == c->blocking) return ncclSuccess;
    return nccl_fail(ncclInvalidArgument,
                     "Blocking and nonblocking communicators are not allowed in the same group.");
}

static const struct ncclComm *owner(const struct nccl_join *join)
{
    return join->parent ? join->parent : join->comm;
}

ncclResult_t nccl_group_join(struct nccl_join *join)
{
    const ncclResult_t result = same_blocking(owner(join));
    if (result) {
        nccl_join_free(join);
        return result;
    }
    struct nccl_join **at = &group.joins;
    while (*at) at = &(*at)->next;
    *at = join;
    return ncclSuccess;
}

static bool overlap(const void *a, size_t n, const void *b, size_t m)
{
    const char *x = a, *y = b;
    return n && m && x < y + m && y < x + n;
}

static const char *name(const struct nccl_op *op)
{
    return nccl_kind_name[op->kind];
}

/* What an operation reads and writes lies apart, or is "in place" as nccl.h says. */
static void check_in_place(const struct nccl_op *op)
{
    const size_t mine = (size_t)op->comm->rank * op->count * nccl_type_bytes(op->type);
    const char *send = op->send, *recv = op->recv;
    if (!overlap(send, nccl_op_reads(op), recv, nccl_op_writes(op))) return;
    const bool in_place = op->kind == NCCL_ALLGATHER       ? send == recv + mine
                          : op->kind == NCCL_REDUCESCATTER ? recv == send + mine
                                                           : send == recv;
    if (!in_place) moe_double_wrong("nccl%s: buffers overlap and are not in place", name(op));
}

/* What a group does is in no order: none of it may write what another of it reads or writes. */
static void check_apart(const struct nccl_op *ops, int n)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            const struct nccl_op *a = &ops[i], *b = &ops[j];
            if (i == j || (a->self == b && a->recv == b->send)) continue;
            const size_t writes = nccl_op_writes(a);
            if (overlap(a->recv, writes, b->send, nccl_op_reads(b)) ||
                overlap(a->recv, writes, b->recv, nccl_op_writes(b)))
                moe_double_wrong("nccl%s of a group writes what its nccl%s uses", name(a), name(b));
        }
}

/* Sends of a rank to itself and its receives, in order. */
static ncclResult_t pair_selves(struct nccl_op *ops, int n)
{
    for (int i = 0; i < n; i++) ops[i].self = NULL;
    for (int i = 0; i < n; i++) {
        struct nccl_op *to = &ops[i], *from = ops;
        if (to->kind != NCCL_RECV || to->root != to->comm->rank) continue;
        for (; from < ops + n; from++)
            if (from->kind == NCCL_SEND && from->root == from->comm->rank && from->comm == to->comm &&
                !from->self)
                break;
        if (from == ops + n)
            return nccl_fail(ncclInvalidUsage, "Trying to recv to self without a matching send");
        if (from->count != to->count || from->type != to->type)
            return nccl_fail(ncclInvalidUsage, "Sendrecv to self: %zu x type %d, received as %zu x type %d",
                             from->count, (int)from->type, to->count, (int)to->type);
        to->self = from;
        from->self = to;
    }
    for (int i = 0; i < n; i++)
        if (ops[i].kind == NCCL_SEND && ops[i].root == ops[i].comm->rank && !ops[i].self)
            return nccl_fail(ncclInvalidUsage, "Trying to send to self without a matching recv");
    return ncclSuccess;
}

/* Takes the operations of the first communicator that has any left; NULL: none has. */
static struct nccl_unit *next_unit(void)
{
    int i = 0, n = 0;
    while (i < group.n_ops && !group.ops[i].comm) i++;
    if (i == group.n_ops) return NULL;
    struct nccl_unit *u = calloc(1, sizeof *u);
    if (u) u->ops = calloc((size_t)group.n_ops, sizeof *u->ops);
    if (!u || !u->ops) moe_double_wrong("no memory for a group");
    u->comm = group.ops[i].comm;
    for (; i < group.n_ops; i++) {
        if (group.ops[i].comm != u->comm) continue;
        u->ops[n++] = group.ops[i];
        group.ops[i].comm = NULL;
    }
    u->n_ops = n;
    pair_selves(u->ops, n); /* again, in their new place */
    return u;
}

static ncclResult_t issue_ops(void)
{
    ncclResult_t result = ncclSuccess;
    for (struct nccl_unit *u; (u = next_unit());) {
        struct ncclComm *c = u->comm;
        if (c->blocking) {
            const ncclResult_t one = nccl_unit_issue(u);
            if (one) result = one;
        } else {
            c->prepared = u;
            c->polls = 1;
            result = ncclInProgress;
        }
    }
    return result;
}

static ncclResult_t issue_joins(void)
{
    const int blocking = group.blocking;
    ncclResult_t result = ncclSuccess;
    struct nccl_join *joins = group.joins;
    enum { MOST = 256 };
    struct ncclComm *owners[MOST];
    int n = 0;
    group.joins = NULL;
    while (joins) {
        struct nccl_join *next = joins->next;
        joins->next = NULL;
        if (n == MOST) moe_double_wrong("more than %d communicators in one group", MOST);
        owners[n++] = joins->parent ? joins->parent : joins->comm;
        nccl_join_start(joins);
        joins = next;
    }
    for (int i = 0; i < n; i++) {
        if (!blocking) {
            owners[i]->polls = 1;
            result = ncclInProgress;
            continue;
        }
        while (nccl_join_pending(owners[i])) nccl_progress();
        if (owners[i]->state) result = owners[i]->state;
    }
    return result;
}

/* The group is over; after an error nothing of it happens, and its non-blocking communicators say so. */
static void forget(ncclResult_t error)
{
    for (int i = 0; i < group.n_ops; i++)
        if (error && group.ops[i].comm && !group.ops[i].comm->blocking) group.ops[i].comm->state = error;
    for (struct nccl_join *j = group.joins, *next; j; j = next) {
        next = j->next;
        struct ncclComm *c = j->parent ? j->parent : j->comm;
        if (error && !c->blocking) c->state = error;
        nccl_join_free(j);
    }
    free(group.ops);
    group.ops = NULL;
    group.n_ops = 0;
    group.joins = NULL;
    group.error = ncclSuccess;
    group.blocking = -1;
}

ncclResult_t nccl_group_end(void)
{
    if (!group.depth) return nccl_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth) return ncclSuccess;
    ncclResult_t result = group.error;
    if (!result && group.n_ops && group.joins)
        result = nccl_fail(ncclInvalidUsage, "collectives and ncclCommInitRank in one group");
    if (!result) result = pair_selves(group.ops, group.n_ops);
    if (result) {
        forget(result);
        return result;
    }
    check_apart(group.ops, group.n_ops);
    result = group.joins ? issue_joins() : issue_ops();
    forget(ncclSuccess);
    return result;
}

/* nccl.h declares these two without parameters, which C takes for "any". */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclGroupStart(void)
{
    nccl_group_start();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    return nccl_group_end();
}

size_t nccl_type_bytes(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclFloat64: return 8;
    default: return 0;
    }
}

/* Does the n-th operation have the fault `what`, as MOE_DOUBLE_NCCL="what:n[:rank]" says? */
static bool planted(const char *what)
{
    const char *text = getenv("MOE_DOUBLE_NCCL");
    char kind[16];
    int n, rank, me;
    const int fields = text ? sscanf(text, "%15[a-z]:%d:%d", kind, &n, &rank) : 0;
    if (!text) return false;
    if (fields < 2 ||
        (strcmp(kind, "remote") != 0 && strcmp(kind, "error") != 0 && strcmp(kind, "dead") != 0))
        moe_double_wrong("MOE_DOUBLE_NCCL=%s: expected remote, error or dead:n[:rank]", text);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    return n == n_issued && (fields < 3 || rank == me) && strcmp(kind, what) == 0;
}

static ncclResult_t check_args(const struct nccl_op *op)
{
    if (op->root < 0 || op->root >= op->comm->n)
        return nccl_fail(ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)",
                         name(op), op->root, op->comm->n);
    if ((int)op->type < 0 || op->type >= ncclNumTypes)
        return nccl_fail(ncclInvalidArgument, "%s : invalid type %d", name(op), (int)op->type);
    if ((int)op->reduction < 0)
        return nccl_fail(ncclInvalidArgument, "%s : invalid reduction operation %d", name(op),
                         (int)op->reduction);
    if (op->comm->finalized) moe_double_wrong("nccl%s after ncclCommFinalize", name(op));
    if (!nccl_type_bytes(op->type)) moe_double_wrong("type %d is not in the double of NCCL", (int)op->type);
    if (op->reduction != ncclSum && op->reduction != ncclMax)
        moe_double_wrong("reduction %d is not in the double of NCCL", (int)op->reduction);
    if (op->count > INT_MAX / (size_t)op->comm->n)
        moe_double_wrong("nccl%s of %zu: more than MPI counts", name(op), op->count);
    return ncclSuccess;
}

static ncclResult_t add(struct nccl_op op)
{
    ncclResult_t result = nccl_usable(op.comm, name(&op));
    if (result) return result;
    result = check_args(&op);
    if (result) return result;
    if (!op.count && op.kind != NCCL_SEND && op.kind != NCCL_RECV)
        return ncclSuccess; /* says no word to others */
    n_issued++;
    if (planted("dead")) kill(getpid(), SIGKILL);
    if (planted("error")) return nccl_fail(ncclSystemError, "nccl%s: planted error", name(&op));
    result = same_blocking(op.comm);
    if (result) return result;
    nccl_op_live(&op);
    check_in_place(&op);
    op.never = planted("remote");
    group.ops = realloc(group.ops, ((size_t)group.n_ops + 1) * sizeof op);
    if (!group.ops) moe_double_wrong("no memory for a group");
    group.ops[group.n_ops++] = op;
    return ncclSuccess;
}

static ncclResult_t operation(struct nccl_op op)
{
    const ncclResult_t known = nccl_known(op.comm, name(&op));
    if (known) return nccl_group_error(known);
    nccl_group_start();
    const ncclResult_t result = nccl_group_error(add(op));
    if (result && !op.comm->blocking) op.comm->state = result;
    const ncclResult_t end = nccl_group_end();
    return result ? result : end;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_ALLREDUCE,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .recv = recv,
                                      .count = count,
                                      .type = type,
                                      .reduction = op});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_REDUCESCATTER,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .recv = recv,
                                      .count = count,
                                      .type = type,
                                      .reduction = op});
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_ALLGATHER,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .recv = recv,
                                      .count = count,
                                      .type = type});
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_BROADCAST,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .recv = recv,
                                      .count = count,
                                      .type = type,
                                      .root = root});
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_REDUCE,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .recv = recv,
                                      .count = count,
                                      .type = type,
                                      .reduction = op,
                                      .root = root});
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_SEND,
                                      .comm = comm,
                                      .stream = stream,
                                      .send = send,
                                      .count = count,
                                      .type = type,
                                      .root = peer});
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return operation((struct nccl_op){.kind = NCCL_RECV,
                                      .comm = comm,
                                      .stream = stream,
                                      .recv = recv,
                                      .count = count,
                                      .type = type,
                                      .root = peer});
}
