/* cuda_double - what the files of the CUDA double share: the device's error, planted faults, memory, waiting.
 *
 *   cuda.c         devices, errors, planted faults, launches
 *   cuda_stream.c  streams, events, and what runs next
 *   cuda_memory.c  allocations and who may touch them
 *   cuda_copy.c    copies and fills */
#ifndef MOE_DOUBLE_CUDA_DOUBLE_H
#define MOE_DOUBLE_CUDA_DOUBLE_H

#include "tests/doubles/queue.h"

#include <stdint.h>

/* ---- cuda.c ---- */

/* Every function of the API returns through this: the error of the device if there is one, else code; what is
 * not success is what cudaGetLastError returns next. */
cudaError_t moe_double_return(cudaError_t code);
cudaError_t moe_double_sticky(void);
void moe_double_set_sticky(cudaError_t code);
/* The error with which the next `what` fails, or cudaSuccess; counts. */
cudaError_t moe_double_planted(const char *what);
int moe_double_device(void); /* the current one */

/* ---- cuda_stream.c ---- */

/* The next value of the seeded generator, in [0, n). */
uint64_t moe_double_draw(uint64_t n);
/* NULL and the two names of default streams abort: the runtime has no business there. */
cudaError_t moe_double_stream_check(cudaStream_t stream);
int moe_double_stream_device(cudaStream_t stream);
/* Waits until the stream is empty (NULL: until every stream is), or the device has an error: returns that. */
cudaError_t moe_double_wait(cudaStream_t stream);
/* The legacy default stream, for the calls that have no stream: work on it comes after what is on blocking
 * streams now, and before what they are given later. Those with cudaStreamNonBlocking it does not know. */
cudaStream_t moe_double_legacy_begin(void);
void moe_double_legacy_end(void);

/* ---- cuda_memory.c ---- */

struct moe_double_block {
    enum cudaMemoryType type; /* Unregistered: not of the double */
    int device;
    char *at; /* of `bytes` bytes */
    size_t bytes;
};
/* The allocation that p is in, also one whose cudaMallocAsync has not run yet. Memory that was freed aborts:
 * who names `use`. */
struct moe_double_block moe_double_find(const void *p, const char *use);
/* Between these two, work may touch memory of the device (MOE_DOUBLE_PROTECT=1: the program may not). */
void moe_double_work_begins(const char *what);
void moe_double_work_ends(void);

#endif
