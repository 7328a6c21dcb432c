/* communicator - how ranks exchange data: one of the two tables of functions (the other: device.h). */
#ifndef MOE_COMMUNICATOR_H
#define MOE_COMMUNICATOR_H

#include "runtime/device.h"

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
    const char *label; /* what to call it; NULL: by its operation's name */
};

struct moe_communicator {
    const struct moe_communicator_table *table;
    int rank, size;
};

/* With a device that is `async`, start() issues the collective on the stream of its operation, and marks of
 * the device tell when it is complete; wait() is not called. Otherwise start() and wait() go in pairs. */
struct moe_communicator_table {
    const char *name;
    /* The world of this job. device: whose memory is exchanged; borrowed until close. */
    int (*open)(struct moe_device *device, double timeout_s, struct moe_communicator **out);
    /* The world last. Does not wait for peers where a collective failed. */
    void (*close)(struct moe_communicator *c);
    /* The group of `world` with these ranks [n] (in order of their places, this rank among them). All ranks
     * of the world call it, each with its own group, and the same number of times (mpi: those of a group are
     * enough). id: the same number on all of them, different for every call. */
    int (*split)(struct moe_communicator *world, const int *ranks, int n, int id,
                 struct moe_communicator **out);
    /* Starts; one collective in flight per communicator (async: they queue). Buffers stay untouched until it
     * is complete. */
    int (*start)(struct moe_communicator *c, const struct moe_transfer *t);
    /* MOE_OK when done; MOE_EPEER with the library's reason, or when timeout_s passed (the collective goes
     * on: wait again, or abort). */
    int (*wait)(struct moe_communicator *c, double timeout_s);
    /* own [bytes] of every member -> all [size, bytes] on every member, in member order; host memory, small.
     * Complete on return; after an error the library may still write into `all`. Errors as of wait. */
    int (*gather)(struct moe_communicator *c, const void *own, void *all, size_t bytes, double timeout_s);
    /* Async only. MOE_OK, or MOE_EPEER with what the library or another rank reported since; does not wait.
     * */
    int (*poll)(struct moe_communicator *c);
    /* Async only; `c` is the world. Tells the job that this rank has waited in vain at `label`, hears for up
     * to grace_s what the ranks [n] tell, and writes which of them told nothing or another label, such as
     * "ranks 2,3 do not answer; rank 1 is at layer 0 forward combine". Result: out, cut at size. */
    void (*blame)(struct moe_communicator *c, const int *ranks, int n, const char *label, double grace_s,
                  char *out, size_t size);
    void (*abort)(struct moe_communicator *c, int exit_code); /* ends the whole job; does not return */
};

extern const struct moe_communicator_table moe_comm_self;
extern const struct moe_communicator_table moe_comm_mpi; /* where MPI is built in */
/* Communicators built in, by name ("self", "mpi"): NULL when unknown or not built in. backends.c */
const struct moe_communicator_table *moe_communicator_find(const char *name);
/* "mpi" when this process was started by mpirun and it is built in, else "self". */
const struct moe_communicator_table *moe_communicator_here(void);

#endif
