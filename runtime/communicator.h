/* communicator - how ranks exchange data: one of the two tables of functions (the other: device.h). */
#ifndef MOE_COMMUNICATOR_H
#define MOE_COMMUNICATOR_H

#include "sim/schedule.h"

/* A collective with everything resolved. Counts in elements of op->type.
 *   send, recv   one number, or one per member where moe_send_per_peer, moe_recv_per_peer say so; parts are
 *                packed in member order; what a rank sends to itself is what it receives from itself
 *   in, out      may be equal for ALLREDUCE; of a REDUCESCATTER out may be the rank's part of in, of an
 *                ALLGATHER in its part of out; else they do not overlap
 * All members of a REDUCESCATTER pass the same `send`; those of another collective may disagree, and wait()
 * reports what the library notices, if it does not crash: agree.h asks before.
 * Sums: MPI adds in an order that the library fixes by element count and group size, not by who comes last,
 * so that equal runs give equal bits (tests/mpi/test_comm_mpi.c). Open MPI 4.1 adds in pairs, (0 + 1) + (2 +
 * 3), for both; another library or group size may add otherwise. */
struct moe_transfer {
    const struct moe_op *op;
    const void *in;
    void *out;
    const int64_t *send, *recv;
};

struct moe_communicator {
    const struct moe_communicator_table *table;
    int rank, size;
};

struct moe_communicator_table {
    const char *name;
    int (*open)(struct moe_communicator **out); /* the world of this job */
    /* The world last. Does not wait for peers where a collective failed. */
    void (*close)(struct moe_communicator *c);
    /* The group of `world` with these ranks [n] (in order of their places, this rank among them); collective
     * over the ranks. id: the same number on all members, different for every communicator of the job. */
    int (*split)(struct moe_communicator *world, const int *ranks, int n, int id,
                 struct moe_communicator **out);
    /* Starts; one collective in flight per communicator. Buffers stay untouched until wait. */
    int (*start)(struct moe_communicator *c, const struct moe_transfer *t);
    /* MOE_OK when done; MOE_EPEER with the library's reason, or when timeout_s passed (the collective goes
     * on: wait again, or abort). */
    int (*wait)(struct moe_communicator *c, double timeout_s);
    void (*abort)(struct moe_communicator *c, int exit_code); /* ends the whole job; does not return */
};

extern const struct moe_communicator_table moe_comm_self;
extern const struct moe_communicator_table moe_comm_mpi; /* where MPI is built in */
/* Communicators built in, by name ("self", "mpi"): NULL when unknown or not built in. backends.c */
const struct moe_communicator_table *moe_communicator_find(const char *name);
/* "mpi" when this process was started by mpirun and it is built in, else "self". */
const struct moe_communicator_table *moe_communicator_here(void);

#endif
