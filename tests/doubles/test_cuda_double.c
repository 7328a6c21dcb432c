/* test_cuda_double - the double of the CUDA runtime: right use does what the reference says, later. What is
 * wrong: test_cuda_misuse.c. */
#include "kernels/cuda.h"
#include "tests/doubles/fixture_double.h"
#include "tests/doubles/on_host.h"

enum { N = 1000, BYTES = N * 4 };

static cudaEvent_t open_event(void)
{
    cudaEvent_t event;
    if (cudaEventCreate(&event)) abort();
    return event;
}

/* ---- streams and events ---- */

static void test_nothing_runs_before_a_wait(void **state)
{
    (void)state;
    RIGHT(letter(one, "a"));
    RIGHT(letter(one, "b"));
    assert_string_equal(ran, "");
    RIGHT(cudaStreamSynchronize(one));
    assert_string_equal(ran, "ab");
    assert_false(moe_double_progress());
    RIGHT(letter(one, "c"));
    assert_true(moe_double_progress());
    assert_string_equal(ran, "abc");
}

static void test_query_moves_on(void **state)
{
    (void)state;
    cudaEvent_t event = open_event();
    RIGHT(cudaEventQuery(event)); // never recorded: nothing to wait for
    RIGHT(cudaEventSynchronize(event));
    RIGHT(letter(one, "a"));
    RIGHT(letter(one, "b"));
    RIGHT(cudaEventRecord(event, one));
    assert_int_equal(cudaStreamQuery(one), cudaErrorNotReady);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess); // not an error
    for (int i = 0; cudaEventQuery(event) == cudaErrorNotReady; i++) assert_true(i < 10);
    assert_string_equal(ran, "ab");
    RIGHT(cudaEventDestroy(event));
}

/* two waits for the place that was marked last when it was told to, whatever is marked after. */
static void test_events_order(void **state)
{
    (void)state;
    cudaEvent_t event = open_event();
    for (int i = 0; i < 50; i++) {
        ran[0] = 0;
        RIGHT(letter(one, "a"));
        RIGHT(cudaEventRecord(event, one));
        RIGHT(cudaStreamWaitEvent(two, event, 0));
        RIGHT(letter(one, "c"));
        RIGHT(cudaEventRecord(event, one));
        RIGHT(letter(two, "b"));
        RIGHT(cudaEventSynchronize(event));
        RIGHT(cudaDeviceSynchronize());
        assert_true(strchr(ran, 'a') < strchr(ran, 'b') && strchr(ran, 'a') < strchr(ran, 'c'));
        assert_int_equal(strlen(ran), 3);
    }
    RIGHT(cudaEventDestroy(event));
}

/* A wait for an event that was not recorded orders nothing; one of a destroyed event still holds. */
static void test_events_at_the_edge(void **state)
{
    (void)state;
    cudaEvent_t never = open_event(), gone = open_event();
    RIGHT(cudaStreamWaitEvent(one, never, 0));
    RIGHT(letter(two, "a"));
    RIGHT(cudaEventRecord(gone, two));
    RIGHT(cudaStreamWaitEvent(one, gone, 0));
    RIGHT(cudaEventDestroy(gone));
    RIGHT(letter(one, "b"));
    RIGHT(cudaStreamSynchronize(one));
    assert_string_equal(ran, "ab");
    assert_int_equal(cudaEventRecord(gone, one), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaEventDestroy(gone), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    RIGHT(cudaEventDestroy(never));
}

static void test_elapsed(void **state)
{
    (void)state;
    cudaEvent_t from = open_event(), to = open_event(), untimed;
    float ms = -1;
    RIGHT(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
    RIGHT(cudaEventRecord(from, one));
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorInvalidResourceHandle);
    RIGHT(cudaEventRecord(to, one));
    RIGHT(cudaEventRecord(untimed, one));
    cudaGetLastError();
    assert_int_equal(cudaEventElapsedTime(&ms, from, to), cudaErrorNotReady);
    RIGHT(cudaEventSynchronize(to));
    RIGHT(cudaEventElapsedTime(&ms, from, to));
    assert_true(ms >= 0);
    RIGHT(cudaEventElapsedTime(&ms, to, from));
    assert_true(ms <= 0);
    assert_int_equal(cudaEventElapsedTime(&ms, from, untimed), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    RIGHT(cudaEventDestroy(from));
    RIGHT(cudaEventDestroy(to));
    RIGHT(cudaEventDestroy(untimed));
}

/* What is on a stream when it is destroyed still runs. */
static void test_destroyed_stream(void **state)
{
    (void)state;
    cudaStream_t stream = open_stream();
    RIGHT(letter(stream, "a"));
    RIGHT(cudaStreamDestroy(stream));
    assert_int_equal(letter(stream, "b"), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    RIGHT(cudaDeviceSynchronize());
    assert_string_equal(ran, "a");
}

/* ---- copies ---- */

/* Pageable memory is read at the call; pinned memory when the copy runs: whoever writes it before, loses. */
static void test_sources_of_copies(void **state)
{
    (void)state;
    char pageable[BYTES], *pinned, *device = device_memory(BYTES);
    RIGHT(cudaHostAlloc((void **)&pinned, BYTES, cudaHostAllocDefault));
    memset(pageable, 1, BYTES);
    RIGHT(cudaMemcpyAsync(device, pageable, BYTES, cudaMemcpyHostToDevice, one));
    memset(pageable, 2, BYTES);
    RIGHT(cudaMemcpyAsync(pageable, device, BYTES, cudaMemcpyDefault, one)); // returns with the bytes
    assert_int_equal(pageable[BYTES - 1], 1);
    memset(pinned, 3, BYTES);
    RIGHT(cudaMemcpyAsync(device, pinned, BYTES, cudaMemcpyHostToDevice, one));
    memset(pinned, 4, BYTES);
    RIGHT(cudaMemcpyAsync(pageable, device, BYTES, cudaMemcpyDeviceToHost, one));
    assert_int_equal(pageable[0], 4);
    RIGHT(cudaMemsetAsync(device, 5, BYTES, one));
    RIGHT(cudaMemcpyAsync(pinned, device, BYTES, cudaMemcpyDeviceToHost, one));
    assert_int_equal(pinned[0], 4);
    RIGHT(cudaStreamSynchronize(one));
    assert_int_equal(pinned[0], 5);
    RIGHT(cudaFree(device));
    RIGHT(cudaFreeHost(pinned));
}

/* The calls without a stream wait for streams that block, not for others. */
static void test_legacy_stream(void **state)
{
    (void)state;
    cudaStream_t blocking;
    char host[16] = "", *device = device_memory(16);
    RIGHT(cudaStreamCreate(&blocking));
    RIGHT(cudaMemset(device, 0, 16));
    RIGHT(cudaMemsetAsync(device, 'x', 8, blocking));
    RIGHT(cudaMemcpy(host, device, 16, cudaMemcpyDeviceToHost));
    assert_string_equal(host, "xxxxxxxx");
    RIGHT(cudaMemset(device, 'y', 8));
    RIGHT(cudaMemsetAsync(device, 'z', 4, blocking));
    RIGHT(cudaStreamSynchronize(blocking));
    RIGHT(cudaMemcpy(host, device, 16, cudaMemcpyDefault));
    assert_string_equal(host, "zzzzyyyy");
    RIGHT(letter(one, "a"));
    RIGHT(cudaMemcpy(device, host, 16, cudaMemcpyHostToDevice)); // staged: waits for nothing
    assert_string_equal(ran, "");
    RIGHT(cudaStreamDestroy(blocking));
    RIGHT(cudaDeviceSynchronize());
    RIGHT(cudaFree(device));
}

static void test_refused_copies(void **state)
{
    (void)state;
    char host[16] = "", *device = device_memory(16);
    assert_int_equal(cudaMemcpyAsync(device, host, 17, cudaMemcpyHostToDevice, one), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpyAsync(device + 8, host, 9, cudaMemcpyDefault, one), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpyAsync(NULL, host, 1, cudaMemcpyDefault, one), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpyAsync(device, host, 1, (enum cudaMemcpyKind)7, one),
                     cudaErrorInvalidMemcpyDirection);
    assert_int_equal(cudaMemsetAsync(host, 0, 16, one), cudaErrorInvalidValue);
    RIGHT(cudaMemcpyAsync(NULL, NULL, 0, cudaMemcpyDefault, one));
    cudaGetLastError();
    RIGHT(cudaFree(device));
}

/* ---- memory ---- */

static void test_memory(void **state)
{
    (void)state;
    struct cudaPointerAttributes a;
    void *device = device_memory(BYTES), *host, *mapped, *managed, *none = &a;
    size_t unused, total;
    RIGHT(cudaMallocHost(&host, BYTES));
    RIGHT(cudaMallocManaged(&managed, BYTES, cudaMemAttachGlobal));
    assert_int_equal((uintptr_t)device % 256, 0);
    assert_true(moe_double_is_device((char *)device + 8, BYTES - 8));
    assert_false(moe_double_is_device((char *)device + 8, BYTES - 7));
    assert_true(moe_double_is_device(host, BYTES));
    assert_false(moe_double_is_device(&a, 1));
    RIGHT(cudaPointerGetAttributes(&a, (char *)device + 5));
    assert_int_equal(a.type, cudaMemoryTypeDevice);
    RIGHT(cudaPointerGetAttributes(&a, host));
    assert_int_equal(a.type, cudaMemoryTypeHost);
    RIGHT(cudaPointerGetAttributes(&a, managed));
    assert_int_equal(a.type, cudaMemoryTypeManaged);
    RIGHT(cudaPointerGetAttributes(&a, &total));
    assert_int_equal(a.type, cudaMemoryTypeUnregistered);
    RIGHT(cudaHostGetDevicePointer(&mapped, host, 0));
    assert_int_equal(cudaHostGetDevicePointer(&mapped, device, 0), cudaErrorInvalidValue);
    float first; // not a number, whatever type is read
    memcpy(&first, host, sizeof first);
    assert_true(first != first);
    RIGHT(cudaMemGetInfo(&unused, &total));
    assert_int_equal(cudaMalloc(&none, total + 1), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMalloc(&none, unused + 1), cudaErrorMemoryAllocation);
    assert_null(none);
    assert_int_equal(cudaFree(host), cudaErrorInvalidValue);
    assert_int_equal(cudaFree((char *)device + 256), cudaErrorInvalidValue);
    assert_int_equal(cudaFreeHost(device), cudaErrorInvalidValue);
    RIGHT(cudaFree(NULL));
    RIGHT(cudaFree(device));
    assert_int_equal(cudaFree(device), cudaErrorInvalidValue);
    RIGHT(cudaFree(managed));
    RIGHT(cudaFreeHost(host));
    assert_false(moe_double_is_device(host, 1));
    cudaGetLastError();
}

static void test_pool(void **state)
{
    (void)state;
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    char *p, host[8] = "";
    RIGHT(cudaDeviceGetDefaultMemPool(&pool, 0));
    RIGHT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    for (int i = 0; i < 600; i++) { // more than what is remembered
        RIGHT(cudaMallocAsync((void **)&p, 8, one));
        assert_false(moe_double_is_device(p, 8)); // not yet
        RIGHT(cudaMemsetAsync(p, i % 100, 8, one));
        RIGHT(cudaMemcpyAsync(host, p, 8, cudaMemcpyDeviceToHost, one));
        RIGHT(cudaFreeAsync(p, one));
        assert_int_equal(host[7], i % 100);
        assert_int_equal(cudaFreeAsync(p, one), cudaErrorInvalidValue);
    }
    cudaGetLastError();
    p = device_memory(8);
    assert_int_equal(cudaFreeAsync(p, one), cudaErrorInvalidValue);
    cudaGetLastError();
    RIGHT(cudaFree(p));
}

/* ---- kernels, functions of the host ---- */

static void test_kernels_are_queued(void **state)
{
    (void)state;
    float *device = device_memory(BYTES), host[N];
    struct moe_cuda_fault *fault;
    RIGHT(cudaHostAlloc((void **)&fault, sizeof *fault, cudaHostAllocMapped));
    *fault = (struct moe_cuda_fault){0};
    const struct moe_cuda_queue q = {.stream = one, .fault = fault};
    for (int i = 0; i < N; i++) host[i] = (float)i;
    RIGHT(cudaMemcpyAsync(device, host, BYTES, cudaMemcpyHostToDevice, one));
    RIGHT(moe_cuda_scale(&q, MOE_CUDA_F32, N, 2, device, device));
    RIGHT(cudaMemcpyAsync(host, device, BYTES, cudaMemcpyDeviceToHost, one));
    for (int i = 0; i < N; i++) assert_true(host[i] == (float)i / 2);
    RIGHT(cudaFree(device));
    RIGHT(cudaFreeHost(fault));
}

static void write_letter(void *data)
{
    letter_step(data);
}

static void test_host_function(void **state)
{
    (void)state;
    RIGHT(cudaLaunchHostFunc(one, write_letter, (void *)"h"));
    assert_string_equal(ran, "");
    RIGHT(cudaStreamSynchronize(one));
    assert_string_equal(ran, "h");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STREAMS(test_nothing_runs_before_a_wait),
        WITH_STREAMS(test_query_moves_on),
        WITH_STREAMS(test_events_order),
        WITH_STREAMS(test_events_at_the_edge),
        WITH_STREAMS(test_elapsed),
        WITH_STREAMS(test_destroyed_stream),
        WITH_STREAMS(test_sources_of_copies),
        WITH_STREAMS(test_legacy_stream),
        WITH_STREAMS(test_refused_copies),
        WITH_STREAMS(test_memory),
        WITH_STREAMS(test_pool),
        WITH_STREAMS(test_kernels_are_queued),
        WITH_STREAMS(test_host_function),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
