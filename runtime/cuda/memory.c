/* memory.c - see device_internal.h: a pool over cudaMalloc. */
#include "runtime/cuda/device_internal.h"

#include <stdlib.h>
#include <string.h>

/* The first block that begins behind `at`. */
static int place_of(const struct moe_cuda_pool *p, const void *at)
{
    int low = 0, high = p->n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if ((const char *)at < p->blocks[mid].at)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

/* The block in use that it is in, or NULL. */
static struct moe_cuda_block *find(const struct moe_cuda_pool *p, const void *at)
{
    int i = place_of(p, at) - 1;
    if (i < 0 || !p->blocks[i].used) return NULL;
    return (size_t)((const char *)at - p->blocks[i].at) < p->blocks[i].bytes ? &p->blocks[i] : NULL;
}

static struct moe_cuda_block *cached(const struct moe_cuda_pool *p, size_t bytes)
{
    struct moe_cuda_block *best = NULL;
    for (struct moe_cuda_block *b = p->blocks; b < p->blocks + p->n; b++)
        if (!b->used && b->bytes >= bytes && b->bytes - bytes <= bytes / 8 &&
            (!best || b->bytes < best->bytes))
            best = b;
    return best;
}

static int give_back(struct moe_cuda_pool *p, bool also_used)
{
    int kept = 0, err = MOE_OK;
    for (int i = 0; i < p->n; i++)
        if (p->blocks[i].used && !also_used)
            p->blocks[kept++] = p->blocks[i];
        else if (moe_cuda_check(cudaFree(p->blocks[i].at), "cudaFree") < 0)
            err = MOE_EFAILED;
    p->n = kept;
    return err;
}

static int new_block(struct moe_cuda_pool *p, size_t bytes, void **out)
{
    cudaError_t code = cudaMalloc(out, bytes);
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* a launch would find it */
        MOE_TRY(give_back(p, false));
        code = cudaMalloc(out, bytes);
    }
    if (code == cudaErrorMemoryAllocation) {
        size_t unused = 0, all = 0;
        cudaGetLastError();
        cudaMemGetInfo(&unused, &all);
        return moe_fail(MOE_EFAILED, "no GPU memory for a buffer of %zu bytes: %zu of %zu are free", bytes,
                        unused, all);
    }
    MOE_TRY(moe_cuda_check(code, "cudaMalloc"));
    p->blocks = moe_grow(p->blocks, &p->cap, p->n + 1, sizeof *p->blocks);
    int i = place_of(p, *out);
    memmove(&p->blocks[i + 1], &p->blocks[i], (size_t)(p->n - i) * sizeof *p->blocks);
    p->blocks[i] = (struct moe_cuda_block){*out, bytes, true};
    p->n++;
    return MOE_OK;
}

int moe_cuda_pool_take(struct moe_cuda_pool *p, size_t bytes, void **out)
{
    const size_t n = bytes ? (bytes + MOE_CUDA_ALIGNMENT - 1) / MOE_CUDA_ALIGNMENT : 1;
    struct moe_cuda_block *b = cached(p, n * MOE_CUDA_ALIGNMENT);
    if (!b) return new_block(p, n * MOE_CUDA_ALIGNMENT, out);
    b->used = true;
    *out = b->at;
    return MOE_OK;
}

void moe_cuda_pool_give(struct moe_cuda_pool *p, void *at)
{
    if (!at) return;
    struct moe_cuda_block *b = find(p, at);
    moe_assert(b && b->at == at);
    b->used = false;
}

bool moe_cuda_pool_holds(const struct moe_cuda_pool *p, const void *at)
{
    return find(p, at) != NULL;
}

void moe_cuda_pool_close(struct moe_cuda_pool *p)
{
    give_back(p, true);
    free(p->blocks);
}
