/* communicator - how ranks exchange data: one of the two tables of functions (the other: device.h). */
#ifndef MOE_COMMUNICATOR_H
#define MOE_COMMUNICATOR_H

#include "sim/schedule.h"

/* A collective with everything resolved. Counts in elements of op->type.
 *   ALLTOALL   send, recv [group size]: elements to and from each member, packed in member order
 *   ALLREDUCE  send[0] = recv[0]: elements; in and out may be equal */
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
    /* The group of `world` with these ranks [n] (ascending, this rank among them); collective over the ranks.
     * id: the same number on all members, different for every communicator of the job. */
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
