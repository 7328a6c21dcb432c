/* fixture_host.c - see fixture.h: kernels run when they are launched, in this process. */
#include "tests/cuda/fixture.h"

#include <time.h>

enum { PATTERN = 0xa5 };

static struct moe_cuda_fault fault;
static struct moe_cuda_queue queue = {.fault = &fault};

void *fixture_alloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    return memset(p, PATTERN, bytes);
}

void fixture_free(void *p)
{
    free(p);
}

const struct moe_cuda_queue *fixture_queue(size_t at_least)
{
    const size_t bytes = at_least > MOE_CUDA_WORKSPACE_BYTES ? at_least : MOE_CUDA_WORKSPACE_BYTES;
    free(queue.workspace);
    queue.workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
    assert_non_null(queue.workspace);
    memset(queue.workspace, PATTERN, bytes);
    queue.workspace_bytes = bytes;
    return &queue;
}

struct moe_cuda_fault fixture_wait(void)
{
    struct moe_cuda_fault was = fault;
    fault = (struct moe_cuda_fault){0};
    return was;
}

double fixture_time_ns(void (*queue_work)(void *ctx), void *ctx, int runs)
{
    double ns[FIXTURE_MOST_RUNS];
    for (int i = -1; i < runs; i++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        queue_work(ctx);
        clock_gettime(CLOCK_MONOTONIC, &end);
        if (i >= 0) ns[i] = (double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec);
    }
    return fixture_median(ns, runs);
}

static void close_queue(void)
{
    free(queue.workspace);
}

void fixture_open(void)
{
    atexit(close_queue);
}
