/* nccl_double - the parts of the double of NCCL: its ranks are the processes of one MPI job.
 *
 * Written from nccl.h and the documentation, not from what our runtime does. Operations run on the streams of
 * the CUDA double (queue.h) and move their bytes by MPI. What the real library turns into a hang hangs here
 * too: before any data, the members tell each other what they are about to do (struct nccl_header), and where
 * two headers differ, or one never comes, the operation never completes. What it leaves undefined ends in
 * moe_double_wrong: an overlap, memory of the host, a handle after its end, an id for a second communicator.
 *
 * In memory only a test has: copies of what is sent and received, so that an aborted operation writes
 * nowhere; communicators are never freed, so that one is known after its end.
 *
 * MPI is initialised where it is not yet, and then finalised at exit. Notes between processes go through
 * MPI_COMM_WORLD with the tags below: a copy of it would be collective, and a rank that never comes must not
 * hold the others. Nothing progresses but inside calls of the doubles; a process that waits elsewhere (for a
 * message of its own) keeps the others from building a communicator with it.
 *
 * MOE_DOUBLE_NCCL, for the n-th operation (collective, send or receive) that a process issues, from 1, in all
 * processes or in the one with this rank in MPI_COMM_WORLD:
 *   remote:n[:rank]   it never completes, and its communicator reports ncclRemoteError
 *   error:n[:rank]    the call returns ncclSystemError and issues nothing
 *   dead:n[:rank]     SIGKILL
 * MOE_DOUBLE_NCCL_SAY, if set: why an operation never completes is told on stderr. */
#ifndef MOE_NCCL_DOUBLE_H
#define MOE_NCCL_DOUBLE_H

#include "tests/doubles/queue.h"

#include <mpi.h>
#include <nccl.h>
#include <stdint.h>

enum nccl_kind {
    NCCL_ALLREDUCE,
    NCCL_REDUCESCATTER,
    NCCL_ALLGATHER,
    NCCL_BROADCAST,
    NCCL_REDUCE,
    NCCL_SEND,
    NCCL_RECV,
    NCCL_KIND_COUNT
};
extern const char *const nccl_kind_name[NCCL_KIND_COUNT];

/* Tags in MPI_COMM_WORLD (32767 is the least that MPI allows as largest), then those in a communicator. */
enum { NCCL_TAG_NOTE = 32700, NCCL_TAG_CREATE, NCCL_CREATE_TAGS = 64 };
enum { NCCL_TAG_COLLECTIVE = 1, NCCL_TAG_SEND, NCCL_TAG_RECV, NCCL_TAG_DATA, NCCL_DATA_TAGS = 16384 };

/* What the members of an operation must agree on, in 48 bytes without holes. */
struct nccl_header {
    uint64_t sequence; /* of the communicator's collectives, or of the sends from one rank to another */
    uint64_t count;
    int32_t kind, type, reduction, root; /* a receive says NCCL_SEND */
};

struct nccl_op {
    enum nccl_kind kind;
    struct ncclComm *comm;
    cudaStream_t stream;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int root;             /* or the peer */
    bool never;           /* a planted fault */
    struct nccl_op *self; /* of a receive from itself: the send */
    /* while it runs */
    enum { NCCL_WAITS, NCCL_GREETS, NCCL_MOVES, NCCL_STUCK, NCCL_DONE } stage;
    struct nccl_header own, *heard; /* heard [members] */
    MPI_Request *requests;          /* [2, members]: sends and receives of headers; then [0] is the data's */
    int n_requests;
    char *in, *out; /* copies; equal in place */
    int *counts;
};

/* What one group issues to one communicator: it starts when all its streams have come to it, and holds all of
 * them until it is complete. */
struct nccl_unit {
    struct nccl_unit *next; /* in the communicator, or among those that an abort left in flight */
    struct ncclComm *comm;
    struct nccl_op *ops;
    int n_ops, n_streams, arrived, works; /* works: on streams, not dropped yet */
    bool done, dropped;                   /* dropped: by its stream, after an error of the device */
};

struct ncclComm {
    struct ncclComm *next;
    bool alive, ready; /* ready: all its ranks have come */
    bool blocking, finalized;
    int rank, n, device;
    int polls;          /* how often it still says ncclInProgress */
    ncclResult_t state; /* of ncclCommGetAsyncError */
    uint64_t key[2];    /* the same on its ranks, and on no other communicator */
    uint64_t n_splits, n_collectives;
    uint64_t *sent, *received; /* [n] */
    int *world;                /* [n] ranks in MPI_COMM_WORLD */
    MPI_Comm mpi;
    struct nccl_unit *units;    /* on streams, in order */
    struct nccl_unit *prepared; /* of a non-blocking one: not on streams before somebody asks */
};

/* A communicator that waits for its ranks. nccl_join.c */
struct nccl_join {
    struct nccl_join *next;  /* of those started, or of a group */
    struct ncclComm *comm;   /* NULL: split without colour */
    struct ncclComm *parent; /* of a split */
    struct ncclComm **out;   /* of a split: NULL until done */
    uint64_t key[2];
    int n, rank, color, order; /* n: who must come; order: the key of a split */
    struct nccl_note *came;    /* [n], by rank in what is split; kind 0: not yet */
    bool passed;               /* has passed the token on */
};

/* nccl.c: keeps the text for ncclGetLastError and returns result. */
ncclResult_t nccl_fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* ncclInvalidArgument for NULL; aborts for one that is no more. */
ncclResult_t nccl_known(const struct ncclComm *comm, const char *call);
/* Also an error unless it may be used now: the last call was done, and nothing has failed. */
ncclResult_t nccl_usable(const struct ncclComm *comm, const char *call);
/* Lets streams and communicators go on, as they do by themselves while a program waits. */
void nccl_progress(void);
/* Has a communicator that is alive operations that are not complete? */
bool nccl_outstanding(void);
/* The communicators of MPI, when it ends: until then their numbers stay theirs, and what a rank tells one
 * that another has destroyed reaches no new one. */
void nccl_free_mpi(void);

/* nccl_group.c: what ncclGroupStart and ncclGroupEnd do, for calls that are a group of their own. */
void nccl_group_start(void);
ncclResult_t nccl_group_end(void);
/* A call inside the group has failed: all of the group is dropped at its end. Result: result. */
ncclResult_t nccl_group_error(ncclResult_t result);
/* Adds to the group, which owns it from here on, also when this fails. */
ncclResult_t nccl_group_join(struct nccl_join *join);
/* Aborts where the group holds something of this communicator. */
void nccl_group_without(const struct ncclComm *comm, const char *call);
/* The bytes of one element; 0: not among the types of this double. */
size_t nccl_type_bytes(ncclDataType_t type);

/* nccl_join.c. Initialises MPI where nobody has. */
void nccl_mpi(void);
struct nccl_join *nccl_join_new(struct ncclComm *comm, struct ncclComm *parent, const uint64_t key[2], int n,
                                int rank, int color, int order);
/* Tells the others that this rank has come. */
void nccl_join_start(struct nccl_join *join);
void nccl_join_free(struct nccl_join *join); /* one that was not started */
/* Goes on with all that were started; what fails is in the state of nccl_join_pending's communicator. */
void nccl_join_progress(void);
/* Forgets those of a communicator that is aborted. */
void nccl_join_abort(const struct ncclComm *comm);
/* Is one in progress that `comm` waits for: its own, or a split of it? */
bool nccl_join_pending(const struct ncclComm *comm);

/* nccl_run.c. The bytes that an operation reads and writes on this rank. */
size_t nccl_op_reads(const struct nccl_op *op);
size_t nccl_op_writes(const struct nccl_op *op);
/* Aborts where that is not live memory of the device. */
void nccl_op_live(const struct nccl_op *op);
/* Puts a unit on the streams of its operations, which it then owns. */
ncclResult_t nccl_unit_issue(struct nccl_unit *unit);
/* Ends the units of an aborted communicator: streams go on. */
void nccl_unit_abort(struct ncclComm *comm);
void nccl_unit_free(struct nccl_unit *unit);
/* Before MPI_Finalize: what aborts left in flight. False: some of it does not end. */
bool nccl_unit_settle(void);

#endif
