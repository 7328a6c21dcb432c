/* fixture - what the parts of test_comm_nccl share: a device of two streams, and collectives between buffers
 * of the host. */
#ifndef MOE_TEST_CUDA_MPI_FIXTURE_H
#define MOE_TEST_CUDA_MPI_FIXTURE_H

#include "runtime/cuda/cuda_device.h"

enum { RANKS = 4 };

extern struct moe_device test_device;
extern struct moe_communicator *world;
extern int failures;

#define expect(cond) ((cond) ? (void)0 : report(__FILE__, __LINE__, #cond))
void report(const char *file, int line, const char *what);

/* The collective from `in` to `out`, complete on return; device memory of their sizes is new. */
int run(struct moe_communicator *c, const struct moe_op *op, const void *in, size_t in_bytes, void *out,
        size_t out_bytes, const int64_t *send, const int64_t *recv);
/* The same from one place of `all` to another. */
int run_in(struct moe_communicator *c, const struct moe_op *op, void *all, size_t bytes, size_t in_at,
           size_t out_at, const int64_t *send, const int64_t *recv);
void *on_device(const void *from, size_t bytes);

/* How a job ends by that name; does not return. NULL where there is none. */
typedef void (*ending)(double timeout_s);
ending find_ending(const char *name, double *timeout_s);

#endif
