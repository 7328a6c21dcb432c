/* fixture_gpu.c - see fixture.h: kernels run on the GPU; memory is managed, so host and device both see it.
 * */
#include "tests/cuda/fixture.h"

#include <cuda_runtime_api.h>

enum { PATTERN = 0xa5, SKIPPED = 77 };

static struct moe_cuda_queue queue;

static void check(cudaError_t code)
{
    if (code != cudaSuccess) fail_msg("%s: %s", cudaGetErrorName(code), cudaGetErrorString(code));
}

void *fixture_alloc(size_t bytes)
{
    void *p;
    check(cudaMallocManaged(&p, bytes ? bytes : 1, cudaMemAttachGlobal));
    return memset(p, PATTERN, bytes);
}

void fixture_free(void *p)
{
    check(cudaFree(p));
}

const struct moe_cuda_queue *fixture_queue(size_t at_least)
{
    const size_t bytes = at_least > MOE_CUDA_WORKSPACE_BYTES ? at_least : MOE_CUDA_WORKSPACE_BYTES;
    if (bytes != queue.workspace_bytes) {
        check(cudaFree(queue.workspace));
        check(cudaMalloc(&queue.workspace, bytes));
        queue.workspace_bytes = bytes;
    }
    check(cudaMemset(queue.workspace, PATTERN, bytes));
    check(cudaDeviceSynchronize());
    return &queue;
}

struct moe_cuda_fault fixture_wait(void)
{
    check(cudaDeviceSynchronize());
    struct moe_cuda_fault was = *queue.fault;
    memset(queue.fault, 0, sizeof *queue.fault);
    return was;
}

double fixture_time_ns(void (*queue_work)(void *ctx), void *ctx, int runs)
{
    double ns[FIXTURE_MOST_RUNS];
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    for (int i = -1; i < runs; i++) {
        float ms;
        check(cudaEventRecord(begin, queue.stream));
        queue_work(ctx);
        check(cudaEventRecord(end, queue.stream));
        check(cudaEventSynchronize(end));
        check(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 0) ns[i] = ms * 1e6;
    }
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    return fixture_median(ns, runs);
}

void fixture_open(void)
{
    int n;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess) {
        printf("skip: no GPU: %s\n", cudaGetErrorString(code));
        exit(SKIPPED);
    }
    cudaStream_t stream;
    void *fault;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaHostAlloc(&fault, sizeof *queue.fault, cudaHostAllocMapped));
    queue.stream = stream;
    queue.fault = memset(fault, 0, sizeof *queue.fault);
}
