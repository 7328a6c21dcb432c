/* cuda.c - see cuda_double.h: devices, errors, planted faults and launches of the CUDA double. */
#include "tests/doubles/cuda_double.h"
#include "tests/doubles/on_host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRIVER = CUDART_VERSION, MOST_GPUS = 64 };

static struct {
    cudaError_t sticky, last;
    int device;
} state;

void moe_double_wrong(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "moesim double: WRONG USE: ");
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    abort();
}

/* ---- errors ---- */

cudaError_t moe_double_sticky(void)
{
    return state.sticky;
}

void moe_double_set_sticky(cudaError_t code)
{
    if (!state.sticky) state.sticky = code;
}

cudaError_t moe_double_return(cudaError_t code)
{
    if (state.sticky) code = state.sticky;
    // "not considered an error": the programming guide about what cudaGetLastError reports
    if (code && code != cudaErrorNotReady) state.last = code;
    return code;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t was = cudaPeekAtLastError();
    state.last = cudaSuccess;
    return was;
}

cudaError_t cudaPeekAtLastError(void)
{
    return state.sticky ? state.sticky : state.last;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(cudaError_t code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "unrecognized error code";
}

/* ---- planted faults ---- */

cudaError_t moe_double_planted(const char *what)
{
    static long seen; // of the name that MOE_DOUBLE_FAIL has
    const char *plan = getenv("MOE_DOUBLE_FAIL"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    char name[16];
    long n;
    int code, only, parts;
    if (!plan) return cudaSuccess;
    parts = sscanf(plan, "%15[a-z]:%ld:%d:%d", name, &n, &code, &only);
    if (parts < 3 || n < 1 || code < 1) moe_double_wrong("MOE_DOUBLE_FAIL=%s: not what:n:code[:rank]", plan);
    if (strcmp(name, what) || ++seen != n) return cudaSuccess;
    if (parts == 4 && (!rank || atoi(rank) != only)) return cudaSuccess;
    return (cudaError_t)code;
}

/* ---- devices ---- */

static cudaError_t count_devices(int *count)
{
    const char *said = getenv("MOE_DOUBLE_GPUS");
    const int n = said ? atoi(said) : 1;
    if (n < 0) return cudaErrorInsufficientDriver; // *count is left as it was, as the real one does
    if (n > MOST_GPUS) moe_double_wrong("MOE_DOUBLE_GPUS=%s: at most %d", said, MOST_GPUS);
    *count = n;
    return n ? cudaSuccess : cudaErrorNoDevice;
}

/* Calls that make the context of the current device: they fail where there is none. */
static cudaError_t device_check(int device)
{
    int n = 0;
    const cudaError_t code = count_devices(&n);
    if (code) return code;
    return device < 0 || device >= n ? cudaErrorInvalidDevice : cudaSuccess;
}

int moe_double_device(void)
{
    return state.device;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    return count ? moe_double_return(count_devices(count)) : moe_double_return(cudaErrorInvalidValue);
}

cudaError_t cudaSetDevice(int device)
{
    const cudaError_t code = device_check(device);
    if (!code) state.device = device;
    return moe_double_return(code);
}

cudaError_t cudaGetDevice(int *device)
{
    const cudaError_t code = device ? device_check(state.device) : cudaErrorInvalidValue;
    if (!code) *device = state.device;
    return moe_double_return(code);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    const char *said = getenv("MOE_DOUBLE_GPUS");
    if (!version) return moe_double_return(cudaErrorInvalidValue);
    *version = said && atoi(said) < 0 ? 0 : DRIVER; // "If no driver is installed, then 0 is returned"
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    if (!version) return moe_double_return(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    const cudaError_t code = prop ? device_check(device) : cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    *prop = (struct cudaDeviceProp){
        .name = "moesim double",
        .totalGlobalMem = (size_t)4 << 30,
        .sharedMemPerBlock = 48 << 10,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .major = 9,
        .multiProcessorCount = 4,
        .unifiedAddressing = 1,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .asyncEngineCount = 2,
        .memoryPoolsSupported = 1,
        .pciBusID = device + 1,
    };
    return moe_double_return(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    static const struct {
        enum cudaDeviceAttr attr;
        int value;
    } known[] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, 4},
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrCanMapHostMemory, 1},
        {cudaDevAttrMemoryPoolsSupported, 1},
        {cudaDevAttrStreamPrioritiesSupported, 1},
        {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrManagedMemory, 1},
        {cudaDevAttrAsyncEngineCount, 2},
        {cudaDevAttrConcurrentManagedAccess, 0},
    };
    const cudaError_t code = value ? device_check(device) : cudaErrorInvalidValue;
    if (code) return moe_double_return(code);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attr == attr) {
            *value = known[i].value;
            return moe_double_return(cudaSuccess);
        }
    moe_double_wrong("cudaDeviceGetAttribute(%d): the double knows no such attribute", (int)attr);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device)
{
    const cudaError_t code = id && len > 12 ? device_check(device) : cudaErrorInvalidValue;
    if (!code) snprintf(id, (size_t)len, "0000:%02x:00.0", (unsigned)device + 1);
    return moe_double_return(code);
}

cudaError_t cudaDeviceSynchronize(void)
{
    const cudaError_t code = device_check(state.device);
    return moe_double_return(code ? code : moe_double_wait(NULL));
}

/* ---- launches of kernels on the host ---- */

struct launch {
    void (*run)(void *), (*drop)(void *);
    void *work;
};

static int launch_step(void *ctx)
{
    struct launch *l = ctx;
    l->run(l->work);
    return 1;
}

static void launch_drop(void *ctx)
{
    struct launch *l = ctx;
    l->drop(l->work);
    free(l);
}

static int submit(void *stream, void (*run)(void *), void (*drop)(void *), void *work)
{
    cudaError_t code = moe_double_stream_check(stream);
    if (!code && moe_double_stream_device(stream) != state.device) code = cudaErrorInvalidResourceHandle;
    if (!code) {
        struct launch *l = malloc(sizeof *l);
        *l = (struct launch){run, drop, work};
        code = moe_double_enqueue(stream, &(struct moe_double_work){"kernel", launch_step, launch_drop, l});
        if (code) free(l);
    }
    if (code) drop(work);
    return moe_double_return(code);
}

// Weak: a program may use the double without kernels on the host.
#pragma weak moe_on_host_submit
__attribute__((constructor)) static void take_launches(void)
{
    if (&moe_on_host_submit) moe_on_host_submit = submit;
}
