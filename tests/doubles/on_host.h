// on_host.h - what nvcc gives to kernels, for a C++ compiler: the .cu sources run on the host, in tests only.
// Included before the source (-include). Blocks run one after the other. The threads of a block are fibers of
// one thread (the order is fixed; address and undefined-behaviour sanitizers see every access), or, with
// MOE_ON_HOST_THREADS, threads (thread sanitizer sees races). Shared memory is filled with a pattern before a
// block begins. A barrier that not all threads reach, a lane that its mask does not name, and a launch that
// no GPU takes are errors: the first two abort with a line of why, the last returns
// cudaErrorInvalidConfiguration.
#ifndef MOE_ON_HOST_H
#define MOE_ON_HOST_H

#ifdef __cplusplus
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

extern "C" {
#endif

/* Where launches go: by default they run at once. The CUDA double sets it, and queues. run(work) executes the
 * grid; drop(work) releases it, once. Result: 0 or a cudaError_t. */
extern int (*moe_on_host_submit)(void *stream, void (*run)(void *work), void (*drop)(void *work), void *work);

#ifdef __cplusplus
}

#ifndef __CUDA_RUNTIME_API_H__
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#endif

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__ __restrict

namespace moe_on_host {

struct index {
    unsigned x, y, z;
};
struct place {
    index thread, block;
    dim3 block_dim, grid_dim;
};
const place &here();

void sync_block();
// Every lane of the mask brings a value; result: what lane `from` brought (itself when it is not in the
// mask). all: a bit for each lane whose value is not 0.
uint64_t exchange(unsigned mask, uint64_t value, unsigned from);
unsigned vote(unsigned mask, bool value);
unsigned lane();
void *dynamic();
// A static array of the program that serves as shared memory: filled again before every block.
struct site {
    site(void *at, size_t bytes);
};

int launch(dim3 grid, dim3 block, size_t shared, void *stream, std::function<void()> body);

// Arguments are converted to the kernel's parameters now, as a real launch does, not when it runs.
template <class... P, class... A>
int call(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, void *stream, A... arguments)
{
    std::tuple<P...> held(static_cast<P>(arguments)...);
    return launch(grid, block, shared, stream, [kernel, held] { std::apply(kernel, held); });
}

template <class T> T from_bits(uint64_t bits)
{
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T> T shuffle(unsigned mask, T value, unsigned from)
{
    static_assert(sizeof(T) <= 8, "a register or two");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return from_bits<T>(exchange(mask, bits, from));
}

// The new value goes in only where the old one still stands.
template <class T, class F> T atomically(T *to, F next)
{
    T old, wanted;
    __atomic_load(to, &old, __ATOMIC_RELAXED);
    do wanted = next(old);
    while (!__atomic_compare_exchange(to, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

} // namespace moe_on_host

#define threadIdx (moe_on_host::here().thread)
#define blockIdx (moe_on_host::here().block)
#define blockDim (moe_on_host::here().block_dim)
#define gridDim (moe_on_host::here().grid_dim)

static inline void __syncthreads()
{
    moe_on_host::sync_block();
}
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    moe_on_host::vote(mask, false);
}
static inline void __threadfence()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
template <class T> static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32)
{
    const unsigned base = moe_on_host::lane() & ~(unsigned)(width - 1);
    return moe_on_host::shuffle(mask, value, base | ((unsigned)from & (unsigned)(width - 1)));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32)
{
    return moe_on_host::shuffle(mask, value, moe_on_host::lane() ^ (unsigned)bits);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    const unsigned own = moe_on_host::lane();
    return moe_on_host::shuffle(mask, value, (own & (unsigned)(width - 1)) < by ? own : own - by);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    const unsigned own = moe_on_host::lane();
    return moe_on_host::shuffle(mask, value,
                                (own & (unsigned)(width - 1)) + by >= (unsigned)width ? own : own + by);
}
static inline unsigned __ballot_sync(unsigned mask, int value)
{
    return moe_on_host::vote(mask, value != 0);
}
static inline int __any_sync(unsigned mask, int value)
{
    return moe_on_host::vote(mask, value != 0) != 0;
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

template <class T> static inline T atomicAdd(T *to, T value)
{
    return moe_on_host::atomically(to, [=](T old) { return (T)(old + value); });
}
template <class T> static inline T atomicMax(T *to, T value)
{
    return moe_on_host::atomically(to, [=](T old) { return old < value ? value : old; });
}
template <class T> static inline T atomicCAS(T *to, T expected, T value)
{
    return moe_on_host::atomically(to, [=](T old) { return old == expected ? value : old; });
}

#define MOE_LAUNCH(kernel, grid, block, shared, stream, ...)                                                 \
    moe_on_host::call(kernel, grid, block, shared, stream, __VA_ARGS__)
#define MOE_SHARED(T, name, n)                                                                               \
    static T name[n];                                                                                        \
    static moe_on_host::site name##_site(name, sizeof name)
#define MOE_SHARED_DYNAMIC(T, name) T *name = static_cast<T *>(moe_on_host::dynamic())
#endif

#endif
