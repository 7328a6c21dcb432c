/* queue - the streams of the CUDA double: what is queued runs later, in any order that events allow.
 *
 * Nothing runs when it is queued. Whenever the program waits (a synchronise, a query, a blocking copy), or
 * asks by moe_double_progress, the double picks, by a seeded generator (MOE_DOUBLE_SEED, default 1), a stream
 * whose head may run, and runs one step of it; so two streams that no event orders run in another order with
 * another seed. Single-threaded. Used by the doubles of cuBLAS and NCCL and by kernels on the host.
 *
 * MOE_DOUBLE_FAIL="what:n:code[:rank]": the n-th work (from 1) of that name that this process queues ends
 * with that cudaError_t instead of being done; with "malloc", the n-th allocation returns it. rank: only
 * where OMPI_COMM_WORLD_RANK is this. MOE_DOUBLE_GPUS: devices of this machine (default 1; 0: none; -1: not
 * even a driver). MOE_DOUBLE_PROTECT=1: only work can touch memory of the device, the program cannot. */
#ifndef MOE_DOUBLE_QUEUE_H
#define MOE_DOUBLE_QUEUE_H

#include <cuda_runtime_api.h>

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Work on a stream, a copy of it. step() does what can be done without waiting for others and returns 1 when
 * complete, 0 to be called again later, or a negative cudaError_t (it is then the sticky error of the
 * device, as an error inside a kernel is). It calls nothing of the CUDA double but moe_double_is_device and
 * moe_double_wrong. drop() releases ctx: called once, after the last step or when the work is given up; both
 * ends of its life may come during any call that waits. what: "kernel", "copy", "gemm", "nccl" ...: for
 * MOE_DOUBLE_FAIL and messages. */
struct moe_double_work {
    const char *what;
    int (*step)(void *ctx);
    void (*drop)(void *ctx); /* may be NULL */
    void *ctx;
};

/* Errors: cudaErrorInvalidResourceHandle when the stream is not alive; the sticky error. With an error the
 * work was not taken: ctx is still the caller's. */
cudaError_t moe_double_enqueue(cudaStream_t stream, const struct moe_double_work *work);
/* Runs one step of something that may run. Result: false when nothing can move now. */
bool moe_double_progress(void);
/* Is [p, p + bytes) inside one live allocation of the double (device or pinned)? Work that was queued before
 * a cudaFree and runs after it asks this: use after free is reported, never done. */
bool moe_double_is_device(const void *p, size_t bytes);
/* Prints "moesim double: WRONG USE: ..." and aborts: what the real library would leave undefined. */
void moe_double_wrong(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

#ifdef __cplusplus
}
#endif

#endif
