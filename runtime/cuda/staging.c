/* staging.c - see device_internal.h. The driver copies from other host memory too, but may wait for the
 * stream first. */
#include "runtime/cuda/device_internal.h"

#include <string.h>

static int open_staging(struct moe_cuda_staging *s)
{
    void *memory;
    for (int i = 0; i < MOE_STAGING_PARTS; i++)
        if (!s->left[i])
            MOE_TRY(moe_cuda_check(cudaEventCreateWithFlags(&s->left[i], cudaEventDisableTiming),
                                   "cudaEventCreateWithFlags"));
    MOE_TRY(moe_cuda_check(
        cudaHostAlloc(&memory, (size_t)MOE_STAGING_PARTS * MOE_STAGING_BYTES, cudaHostAllocDefault),
        "cudaHostAlloc"));
    s->memory = memory;
    return MOE_OK;
}

/* The next part, when nothing is copied from it any more. An event that was never recorded is complete. */
static int turn(struct moe_cuda_staging *s, cudaStream_t stream)
{
    MOE_TRY(moe_cuda_check(cudaEventRecord(s->left[s->part], stream), "cudaEventRecord"));
    s->part = (s->part + 1) % MOE_STAGING_PARTS;
    s->used = 0;
    return moe_cuda_check(cudaEventSynchronize(s->left[s->part]), "cudaEventSynchronize");
}

/* Room for what fits of the bytes, at least for one; or the next part, whole. */
static int room(struct moe_cuda_staging *s, cudaStream_t stream, size_t bytes, char **out, size_t *n)
{
    if (!s->memory) MOE_TRY(open_staging(s));
    if (s->used == MOE_STAGING_BYTES || (s->used && bytes > MOE_STAGING_BYTES - s->used))
        MOE_TRY(turn(s, stream));
    *out = s->memory + (size_t)s->part * MOE_STAGING_BYTES + s->used;
    *n = bytes < MOE_STAGING_BYTES - s->used ? bytes : MOE_STAGING_BYTES - s->used;
    s->used += (*n + MOE_CUDA_ALIGNMENT - 1) / MOE_CUDA_ALIGNMENT * MOE_CUDA_ALIGNMENT;
    return MOE_OK;
}

int moe_cuda_to_device(struct moe_cuda_staging *s, cudaStream_t stream, void *to, const void *from,
                       size_t bytes)
{
    size_t n;
    for (size_t at = 0; at < bytes; at += n) {
        char *part;
        MOE_TRY(room(s, stream, bytes - at, &part, &n));
        memcpy(part, (const char *)from + at, n);
        MOE_TRY(moe_cuda_check(cudaMemcpyAsync((char *)to + at, part, n, cudaMemcpyHostToDevice, stream),
                               "cudaMemcpyAsync"));
    }
    return MOE_OK;
}

int moe_cuda_to_host(struct moe_cuda_staging *s, cudaStream_t stream, void *to, const void *from,
                     size_t bytes)
{
    size_t n;
    for (size_t at = 0; at < bytes; at += n) {
        char *part;
        MOE_TRY(room(s, stream, bytes - at, &part, &n));
        MOE_TRY(
            moe_cuda_check(cudaMemcpyAsync(part, (const char *)from + at, n, cudaMemcpyDeviceToHost, stream),
                           "cudaMemcpyAsync"));
        MOE_TRY(moe_cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"));
        memcpy((char *)to + at, part, n);
    }
    return MOE_OK;
}

void moe_cuda_staging_close(struct moe_cuda_staging *s)
{
    for (int i = 0; i < MOE_STAGING_PARTS; i++)
        if (s->left[i]) cudaEventDestroy(s->left[i]);
    if (s->memory) cudaFreeHost(s->memory);
}
