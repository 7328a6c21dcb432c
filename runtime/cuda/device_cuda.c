/* device_cuda.c - see cuda_device.h and device.h: a GPU as a device.
 *
 * One GPU a rank, chosen by the place among the ranks of the host that the launcher says. What cannot be
 * known when an operation is issued, an index out of range, is noted by the kernels in memory that the host
 * sees, and reported by whatever waits next. */
#include "runtime/cuda/device_internal.h"

#include <stdlib.h>
#include <string.h>

int moe_cuda_check(cudaError_t code, const char *call)
{
    if (code == cudaSuccess) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s (%s)", call, cudaGetErrorString(code), cudaGetErrorName(code));
}

#define CHECK(name, ...) moe_cuda_check(name(__VA_ARGS__), #name)

int moe_cuda_count(void)
{
    int n = 0;
    /* Before CUDA begins: a kernel that is loaded when it is first launched waits for what is running, which
     * may be a collective whose peers wait for this rank. Source: CUDA programming guide, "Lazy Loading". */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code == cudaErrorInsufficientDriver)
        return moe_fail(MOE_EMISSING, "no NVIDIA driver, or one too old for CUDA %d.%d",
                        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && n < 1))
        return moe_fail(MOE_EMISSING, "no NVIDIA GPU");
    if (code != cudaSuccess)
        return moe_fail(MOE_EMISSING, "no GPU can be used: %s (%s)", cudaGetErrorString(code),
                        cudaGetErrorName(code));
    return n;
}

static struct moe_cuda *cuda(struct moe_device *d)
{
    return (struct moe_cuda *)d;
}

cudaStream_t moe_cuda_stream(struct moe_device *d, int stream)
{
    moe_assert(stream >= 0 && stream < MOE_STREAM_COUNT);
    return cuda(d)->streams[stream].stream;
}

/* ---- open and close ---- */

/* The GPU with the number of this rank among those of its host. */
static int choose_gpu(int *out)
{
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"};
    const int n = moe_cuda_count();
    *out = 0;
    if (n < 0) return n;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        char *end;
        if (!text || !*text) continue;
        long local = strtol(text, &end, 10);
        if (*end || local < 0)
            return moe_fail(MOE_EINPUT, "%s=%s: expected the number of this rank on its host", names[i],
                            text);
        if (local >= n)
            return moe_fail(MOE_EMISSING,
                            "%s=%s: there is no GPU %s: this host has %d, and each rank needs its own",
                            names[i], text, text, n);
        *out = (int)local;
        return MOE_OK;
    }
    return MOE_OK;
}

/* Collectives wait for others: they get what is free first. */
static int open_stream(struct moe_cuda *c, int stream)
{
    struct moe_cuda_stream *s = &c->streams[stream];
    const struct moe_cuda_queue *queue;
    void *fault;
    int least, greatest;
    MOE_TRY(CHECK(cudaDeviceGetStreamPriorityRange, &least, &greatest));
    MOE_TRY(CHECK(cudaStreamCreateWithPriority, &s->stream, cudaStreamNonBlocking,
                  stream == MOE_STREAM_COMM ? greatest : least));
    MOE_TRY(CHECK(cudaEventCreateWithFlags, &s->order, cudaEventDisableTiming));
    MOE_TRY(CHECK(cudaHostGetDevicePointer, &fault, c->fault, 0));
    s->queue.stream = s->stream;
    s->queue.fault = fault;
    return moe_cuda_workspace(c, stream, MOE_CUDA_WORKSPACE_BYTES, &queue);
}

static int open_parts(struct moe_cuda *c)
{
    const char *grouped = getenv("MOESIM_GROUPED");
    void *fault;
    MOE_TRY(choose_gpu(&c->gpu));
    MOE_TRY(CHECK(cudaSetDevice, c->gpu));
    if (grouped && strcmp(grouped, "loop") != 0)
        return moe_fail(MOE_EINPUT, "MOESIM_GROUPED=%s: expected loop, or nothing", grouped);
    c->loop = grouped != NULL;
    MOE_TRY(CHECK(cudaHostAlloc, &fault, sizeof *c->fault, cudaHostAllocMapped));
    c->fault = fault;
    *c->fault = (struct moe_cuda_fault){.index = INT64_MIN, .n = -1}; /* see noted */
    for (int i = 0; i < MOE_STREAM_COUNT; i++) MOE_TRY(open_stream(c, i));
    return MOE_OK;
}

/* Waits for what is running, unless the GPU is broken; communicators were closed before, and with them what
 * waits for others. */
static void cuda_close(struct moe_device *d)
{
    struct moe_cuda *c = cuda(d);
    if (!c) return;
    for (int i = 0; i < MOE_STREAM_COUNT; i++)
        if (c->streams[i].stream) cudaStreamSynchronize(c->streams[i].stream);
    for (int i = 0; i < MOE_STREAM_COUNT; i++) {
        struct moe_cuda_stream *s = &c->streams[i];
        moe_cuda_blas_close(s);
        moe_cuda_staging_close(&s->staging);
        if (s->order) cudaEventDestroy(s->order);
        if (s->stream) cudaStreamDestroy(s->stream);
    }
    for (int i = 0; i < c->n_marks; i++)
        if (c->marks[i]) cudaEventDestroy(c->marks[i]);
    moe_cuda_pool_close(&c->pool);
    if (c->fault) cudaFreeHost(c->fault);
    free(c->marks);
    free(c);
}

static int cuda_open(struct moe_device **out)
{
    struct moe_cuda *c = moe_alloc(1, sizeof *c);
    c->base.table = &moe_device_cuda;
    int err = open_parts(c);
    if (err < 0)
        cuda_close(&c->base);
    else
        *out = &c->base;
    return err;
}

/* ---- memory ---- */

static int cuda_alloc(struct moe_device *d, size_t bytes, void **out)
{
    return moe_cuda_pool_take(&cuda(d)->pool, bytes, out);
}

static void cuda_free(struct moe_device *d, void *p)
{
    moe_cuda_pool_give(&cuda(d)->pool, p);
}

/* What kernels noted first, from then on always: nothing after it can be trusted. A kernel may be about to
 * write the rest of it: it is then reported later. */
static int noted(const struct moe_cuda *c)
{
    const volatile struct moe_cuda_fault *f = c->fault;
    if (!f->set || f->index == INT64_MIN || f->n == -1) return MOE_OK;
    return moe_fail(MOE_EFAILED, "a kernel met index %lld outside [0, %lld)", (long long)f->index,
                    (long long)f->n);
}

static int cuda_copy(struct moe_device *d, void *to, const void *from, size_t bytes, int stream)
{
    struct moe_cuda *c = cuda(d);
    const cudaStream_t on = moe_cuda_stream(d, stream);
    struct moe_cuda_staging *staging = &c->streams[stream].staging;
    if (!bytes) return MOE_OK;
    const bool to_device = moe_cuda_pool_holds(&c->pool, to),
               from_device = moe_cuda_pool_holds(&c->pool, from);
    if (to_device && from_device)
        return CHECK(cudaMemcpyAsync, to, from, bytes, cudaMemcpyDeviceToDevice, on);
    if (to_device) return moe_cuda_to_device(staging, on, to, from, bytes);
    moe_assert(from_device);
    MOE_TRY(moe_cuda_to_host(staging, on, to, from, bytes));
    return noted(c);
}

/* ---- order and time ---- */

static int cuda_sync(struct moe_device *d, int stream)
{
    MOE_TRY(CHECK(cudaStreamSynchronize, moe_cuda_stream(d, stream)));
    return noted(cuda(d));
}

static int cuda_mark(struct moe_device *d, int stream, int slot)
{
    struct moe_cuda *c = cuda(d);
    moe_assert(slot >= 0);
    c->marks = moe_grow(c->marks, &c->n_marks, slot + 1, sizeof *c->marks);
    if (!c->marks[slot]) MOE_TRY(CHECK(cudaEventCreate, &c->marks[slot]));
    return CHECK(cudaEventRecord, c->marks[slot], moe_cuda_stream(d, stream));
}

static cudaEvent_t marked(const struct moe_cuda *c, int slot)
{
    moe_assert(slot >= 0 && slot < c->n_marks && c->marks[slot]);
    return c->marks[slot];
}

static int cuda_elapsed(struct moe_device *d, int from_slot, int to_slot, int64_t *ns)
{
    float ms;
    MOE_TRY(CHECK(cudaEventElapsedTime, &ms, marked(cuda(d), from_slot), marked(cuda(d), to_slot)));
    *ns = (int64_t)((double)ms * 1e6);
    return MOE_OK;
}

/* A wait is for what the event marked when the wait was issued, so that it can be recorded again. */
static int cuda_order(struct moe_device *d, int stream, int after)
{
    const cudaStream_t first = moe_cuda_stream(d, after);
    const cudaEvent_t event = cuda(d)->streams[after].order;
    MOE_TRY(CHECK(cudaEventRecord, event, first));
    return CHECK(cudaStreamWaitEvent, moe_cuda_stream(d, stream), event, 0);
}

static int cuda_done(struct moe_device *d, int slot)
{
    cudaError_t code = cudaEventQuery(marked(cuda(d), slot));
    if (code == cudaErrorNotReady) {
        cudaGetLastError(); /* it is no error, and a launch must not find it */
        return 0;
    }
    MOE_TRY(moe_cuda_check(code, "cudaEventQuery"));
    MOE_TRY(noted(cuda(d)));
    return 1;
}

const struct moe_device_table moe_device_cuda = {
    .name = "cuda",
    .async = true,
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .run = moe_cuda_run,
    .sync = cuda_sync,
    .mark = cuda_mark,
    .elapsed = cuda_elapsed,
    .order = cuda_order,
    .done = cuda_done,
};
