/* test_cuda_misuse - the double of the CUDA runtime: planted faults, machines without GPUs, orders by seed;
 * and wrong use, which aborts with a line of what it was. All in children: they have an environment of their
 * own. */
#include "kernels/cuda.h"
#include "tests/doubles/fixture_double.h"
#include "tests/doubles/on_host.h"

/* In which orders two streams of twelve letters run, by seed: any, but each in its own. */
static void run_two(void)
{
    for (int i = 0; i < 12; i++) {
        letter(one, "a");
        letter(two, "b");
    }
    CHILD_EXPECTS(!cudaDeviceSynchronize());
    fprintf(stderr, "%s", ran);
    abort();
}

static void test_seeds(void **state)
{
    (void)state;
    bool first = false, last = false, mixed = false;
    for (int seed = 0; seed < 40; seed++) {
        char text[16];
        snprintf(text, sizeof text, "%d", seed);
        FILE *f = tmpfile();
        pid_t child = fork();
        if (!child) {
            setenv("MOE_DOUBLE_SEED", text, 1);
            signal(SIGABRT, SIG_DFL);
            dup2(fileno(f), 2);
            run_two();
        }
        waitpid(child, NULL, 0);
        rewind(f);
        char order[32] = "";
        assert_non_null(fgets(order, sizeof order, f));
        fclose(f);
        if (!strcmp(order, "aaaaaaaaaaaabbbbbbbbbbbb"))
            first = true;
        else if (!strcmp(order, "bbbbbbbbbbbbaaaaaaaaaaaa"))
            last = true;
        else
            mixed = true;
        assert_int_equal(strlen(order), 24);
    }
    assert_true(first && last && mixed);
}

/* ---- devices ---- */

static void two_devices(void)
{
    struct cudaDeviceProp prop;
    cudaEvent_t event;
    cudaStream_t stream;
    int n = 0;
    CHILD_EXPECTS(!cudaGetDeviceCount(&n) && n == 2);
    CHILD_EXPECTS(cudaSetDevice(2) == cudaErrorInvalidDevice && !cudaSetDevice(1));
    CHILD_EXPECTS(!cudaGetDevice(&n) && n == 1);
    CHILD_EXPECTS(!cudaGetDeviceProperties(&prop, 1) && prop.warpSize == 32);
    CHILD_EXPECTS(!cudaEventCreate(&event) && !cudaStreamCreate(&stream));
    CHILD_EXPECTS(!cudaEventRecord(event, stream));
    CHILD_EXPECTS(cudaEventRecord(event, one) == cudaErrorInvalidResourceHandle);
    const struct moe_cuda_queue q = {.stream = one};
    float *device = device_memory(4); // launched on a stream of another device than the current one
    CHILD_EXPECTS(moe_cuda_zero(&q, MOE_CUDA_F32, 1, device) == cudaErrorInvalidResourceHandle);
}

static void no_device(void)
{
    int n = 7;
    void *p;
    CHILD_EXPECTS(cudaGetDeviceCount(&n) == cudaErrorNoDevice);
    CHILD_EXPECTS(cudaMalloc(&p, 1) == cudaErrorNoDevice && cudaSetDevice(0) == cudaErrorNoDevice);
}

static void no_driver(void)
{
    int n = 7, version = 7;
    CHILD_EXPECTS(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver && n == 7);
    CHILD_EXPECTS(!cudaDriverGetVersion(&version) && version == 0);
}

static void test_devices(void **state)
{
    (void)state;
    int value = 0;
    RIGHT(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    assert_int_equal(value, 9);
    RIGHT(cudaRuntimeGetVersion(&value));
    assert_int_equal(value, CUDART_VERSION);
    assert_string_equal(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady");
    assert_string_equal(cudaGetErrorString(cudaErrorNotReady), "device not ready");
    in_child("MOE_DOUBLE_GPUS", "2", two_devices, NULL);
    in_child("MOE_DOUBLE_GPUS", "0", no_device, NULL);
    in_child("MOE_DOUBLE_GPUS", "-1", no_driver, NULL);
}

/* ---- faults ---- */

/* The second copy fails: all that comes after has its error, and nothing more runs. */
static void failing_copy(void)
{
    char host[4] = "", *device = device_memory(4);
    cudaEvent_t event;
    CHILD_EXPECTS(!cudaEventCreate(&event));
    for (int i = 0; i < 3; i++) CHILD_EXPECTS(!cudaMemcpyAsync(device, host, 4, cudaMemcpyHostToDevice, one));
    CHILD_EXPECTS(!letter(one, "a") && !cudaEventRecord(event, one));
    CHILD_EXPECTS(!cudaPeekAtLastError());
    CHILD_EXPECTS(cudaStreamSynchronize(one) == cudaErrorECCUncorrectable);
    CHILD_EXPECTS(!*ran && !moe_double_progress());
    CHILD_EXPECTS(cudaEventQuery(event) == cudaErrorECCUncorrectable);
    CHILD_EXPECTS(cudaGetLastError() == cudaErrorECCUncorrectable);
    CHILD_EXPECTS(cudaGetLastError() == cudaErrorECCUncorrectable); // stays
    CHILD_EXPECTS(cudaFree(device) == cudaErrorECCUncorrectable);
    CHILD_EXPECTS(letter(one, "a") == cudaErrorECCUncorrectable);
}

/* The query that meets the error says so. */
static void failing_query(void)
{
    cudaError_t code;
    CHILD_EXPECTS(!letter(one, "a") && !letter(one, "b"));
    while ((code = cudaStreamQuery(one)) == cudaErrorNotReady) continue;
    CHILD_EXPECTS(code == cudaErrorLaunchFailure && !strcmp(ran, "a"));
}

static void failing_malloc(void)
{
    void *p;
    CHILD_EXPECTS(!cudaMalloc(&p, 4));
    CHILD_EXPECTS(cudaMalloc(&p, 4) == cudaErrorMemoryAllocation && !p);
    CHILD_EXPECTS(cudaGetLastError() == cudaErrorMemoryAllocation && !cudaGetLastError());
    CHILD_EXPECTS(!cudaMalloc(&p, 4));
}

static void failing_elsewhere(void)
{
    void *p;
    setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    CHILD_EXPECTS(!cudaMalloc(&p, 4));
}

static void test_planted_faults(void **state)
{
    (void)state;
    in_child("MOE_DOUBLE_FAIL", "copy:2:214", failing_copy, NULL);
    in_child("MOE_DOUBLE_FAIL", "letter:2:719", failing_query, NULL);
    in_child("MOE_DOUBLE_FAIL", "malloc:2:2", failing_malloc, NULL);
    in_child("MOE_DOUBLE_FAIL", "malloc:1:2:2", failing_elsewhere, NULL);
    in_child("MOE_DOUBLE_FAIL", "copy:2", failing_malloc, "not what:n:code[:rank]");
}

static void copy_after_free(void)
{
    char *pinned, *device = device_memory(4);
    CHILD_EXPECTS(!cudaMallocHost((void **)&pinned, 4));
    CHILD_EXPECTS(!cudaMemcpyAsync(device, pinned, 4, cudaMemcpyDefault, one));
    CHILD_EXPECTS(!cudaFreeHost(pinned));
    CHILD_EXPECTS(cudaStreamSynchronize(one) == cudaErrorIllegalAddress);
}

static void test_copy_after_free(void **state)
{
    (void)state;
    in_child(NULL, NULL, copy_after_free, NULL);
}

/* ---- wrong use ---- */

static void on_default_stream(void)
{
    cudaMemsetAsync(device_memory(4), 0, 4, NULL);
}

static void named_after_free(void)
{
    void *p = device_memory(4);
    cudaFree(p);
    cudaMemsetAsync(p, 0, 4, one);
}

static void wrong_direction(void)
{
    char host[4];
    cudaMemcpyAsync(device_memory(4), host, 4, cudaMemcpyDeviceToHost, one);
}

static void overlapping(void)
{
    char *p = device_memory(8);
    cudaMemcpyAsync(p, p + 2, 4, cudaMemcpyDefault, one);
}

/* A kernel that writes 4 bytes at `work`. */
static void run_write(void *work)
{
    memset(work, 0, 4);
}

static void drop_nothing(void *work)
{
    (void)work;
}

static void kernel_after_free(void)
{
    void *p, *q = device_memory(1 << 20);
    cudaMallocAsync(&p, 4, one);
    cudaStreamSynchronize(one);
    moe_on_host_submit(one, run_write, drop_nothing, p);
    cudaFree(p); // does not wait for what is from a pool
    cudaMemsetAsync(q, 0, 4, one);
    cudaStreamSynchronize(one);
}

/* Nothing orders stream two after the allocation; the step below is the first of stream two. */
static void kernel_before_allocation(void)
{
    void *p;
    cudaMallocAsync(&p, 4, one);
    moe_on_host_submit(two, run_write, drop_nothing, p);
    for (int i = 0; i < 100; i++) { // of these one has another order
        cudaDeviceSynchronize();
        cudaMallocAsync(&p, 4, one);
        moe_on_host_submit(two, run_write, drop_nothing, p);
    }
}

/* Beyond the end, but in the last page or the rest of an aligned line: seen when it is freed. */
__attribute__((no_sanitize_address)) static void beyond_the_end(void)
{
    volatile char *p = device_memory(100);
    p[100] = 1;
    cudaFree((void *)p);
}

static void far_beyond_the_end(void)
{
    volatile char *p = device_memory(4096);
    p[4096] = 1;
}

static void host_reads_device(void)
{
    volatile char *p = device_memory(4);
    cudaMemsetAsync((void *)p, 0, 4, one);
    cudaStreamSynchronize(one);
    fprintf(stderr, "%d", p[0]);
}

static void host_reads_host(void)
{
    char *p, *device = device_memory(4), back[4] = "";
    CHILD_EXPECTS(!cudaMallocHost((void **)&p, 4));
    memcpy(p, "abc", 4);
    CHILD_EXPECTS(!cudaMemcpyAsync(device, p, 4, cudaMemcpyDefault, one));
    CHILD_EXPECTS(!cudaMemcpyAsync(back, device, 4, cudaMemcpyDefault, one) && !strcmp(back, "abc"));
    CHILD_EXPECTS(!strcmp(p, "abc")); // still, after work was done
    CHILD_EXPECTS(!cudaFree(device));
}

static void calls_the_runtime(void *data)
{
    (void)data;
    cudaDeviceSynchronize();
}

static void work_waits(void)
{
    cudaLaunchHostFunc(one, calls_the_runtime, NULL);
    cudaStreamSynchronize(one);
}

static void test_wrong_use(void **state)
{
    (void)state;
    in_child(NULL, NULL, on_default_stream, "WRONG USE: work on a default stream");
    in_child(NULL, NULL, named_after_free, "in memory that was freed");
    in_child(NULL, NULL, wrong_direction, "not of that direction");
    in_child(NULL, NULL, overlapping, "overlap");
    in_child(NULL, NULL, kernel_after_free, "kernel touches");
    in_child(NULL, NULL, kernel_before_allocation, "whose cudaMallocAsync has not run");
    in_child(NULL, NULL, beyond_the_end, "written beyond memory of 100 bytes: byte 100");
    in_child(NULL, NULL, far_beyond_the_end, "the program touches");
    in_child("MOE_DOUBLE_PROTECT", "1", host_reads_device, "the program touches");
    in_child("MOE_DOUBLE_PROTECT", "1", host_reads_host, NULL);
    in_child(NULL, NULL, work_waits, "work calls the CUDA runtime");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_STREAMS(test_seeds),           WITH_STREAMS(test_devices),   WITH_STREAMS(test_planted_faults),
        WITH_STREAMS(test_copy_after_free), WITH_STREAMS(test_wrong_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
