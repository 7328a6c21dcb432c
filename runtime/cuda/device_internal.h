/* device_internal - what the device "cuda" is made of: shared by device_cuda.c, memory.c, staging.c, gemm.c
 * and launch.c. */
#ifndef MOE_CUDA_DEVICE_INTERNAL_H
#define MOE_CUDA_DEVICE_INTERNAL_H

#include "kernels/cuda.h"
#include "runtime/cuda/cuda_device.h"

#include <cublas_v2.h>

/* ---- memory.c: device memory, kept until close ---- */

struct moe_cuda_block {
    char *at;
    size_t bytes; /* a multiple of MOE_CUDA_ALIGNMENT */
    bool used;
};

/* Blocks are not given back to the driver: cudaFree waits for the whole GPU, so also for collectives whose
 * peers may wait for this rank. Who frees a block no longer uses it (device.h), so any stream may get it
 * next. */
struct moe_cuda_pool {
    struct moe_cuda_block *blocks; /* by address */
    int n, cap;
};

enum { MOE_CUDA_ALIGNMENT = 256 };

/* A cached block that is at most an eighth larger than asked for, the smallest of these, or a new one; where
 * there is no memory for that, once more without what is cached. Errors: MOE_EFAILED. Cost: one look at each
 * block. */
int moe_cuda_pool_take(struct moe_cuda_pool *p, size_t bytes, void **out);
void moe_cuda_pool_give(struct moe_cuda_pool *p, void *at); /* NULL: nothing to do */
/* Is it in a block that is in use? All else is host memory. Cost: O(log blocks). */
bool moe_cuda_pool_holds(const struct moe_cuda_pool *p, const void *at);
void moe_cuda_pool_close(struct moe_cuda_pool *p); /* nothing is running */

/* ---- staging.c: page-locked memory that copies between host and device pass ---- */

enum { MOE_STAGING_PARTS = 4, MOE_STAGING_BYTES = 1 << 20 };

/* Of one stream. Parts are filled one after the other; `left` follows the last copy from a part on the
 * stream, and is waited for before the part is written again. */
struct moe_cuda_staging {
    char *memory; /* [PARTS][BYTES]; NULL until the first copy */
    cudaEvent_t left[MOE_STAGING_PARTS];
    int part;
    size_t used; /* bytes of that part */
};

/* From and to memory of the host, in order on the stream. to_device: on return `from` may change, and the
 * copy may still be on its way. to_host: complete on return. */
int moe_cuda_to_device(struct moe_cuda_staging *s, cudaStream_t stream, void *to, const void *from,
                       size_t bytes);
int moe_cuda_to_host(struct moe_cuda_staging *s, cudaStream_t stream, void *to, const void *from,
                     size_t bytes);
void moe_cuda_staging_close(struct moe_cuda_staging *s); /* nothing is running */

/* ---- the device ---- */

struct moe_cuda_stream {
    cudaStream_t stream;
    struct moe_cuda_queue queue; /* its workspace is of the pool */
    cublasHandle_t blas; /* NULL until the first product; one a stream, since its workspace is one's */
    cudaEvent_t order;
    struct moe_cuda_staging staging;
};

struct moe_cuda {
    struct moe_device base;
    int gpu;
    bool loop; /* MOESIM_GROUPED=loop */
    struct moe_cuda_stream streams[MOE_STREAM_COUNT];
    struct moe_cuda_fault *fault; /* as the host sees it */
    struct moe_cuda_pool pool;
    cudaEvent_t *marks; /* [n_marks] by slot; NULL: never marked */
    int n_marks;
};

/* launch.c: moe_device_table.run. */
int moe_cuda_run(struct moe_device *d, const struct moe_launch *launch, int stream);
/* The stream's queue with a workspace of so many bytes at least. One that is too small is kept until close,
 * since kernels may be using it: at most as much again, as the new one is at least twice as large. */
int moe_cuda_workspace(struct moe_cuda *c, int stream, size_t bytes, const struct moe_cuda_queue **out);

/* ---- gemm.c: matrix products, by cuBLAS ---- */

/* GEMM, GROUPED_GEMM and GROUPED_WGRAD as ref.h says, of elements of `type`; sums are kept in float for bf16,
 * and products of float are not shortened (no TF32). The same call gives the same bits: a handle serves one
 * stream, with a workspace of its own. Source: cuBLAS manual, "Results reproducibility". */
int moe_cuda_products(struct moe_cuda *c, const struct moe_launch *launch, enum moe_cuda_type type,
                      int stream);
void moe_cuda_blas_close(struct moe_cuda_stream *s); /* nothing is running */

#endif
