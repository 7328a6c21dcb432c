// cuda.cuh - what the kernels share: types, launches, sums over a warp and a block, indices.
//
// The same source is compiled by nvcc for GPUs and, in tests, by a C++ compiler for the host: there
// tests/doubles/on_host.h is included before this file and brings threadIdx, __syncthreads and the like. So a
// launch is MOE_LAUNCH, shared memory is MOE_SHARED, and nothing else of CUDA is used than what on_host.h
// has.
#ifndef MOE_CUDA_CUH
#define MOE_CUDA_CUH

#include "kernels/bf16.h"
#include "kernels/cuda.h"

#ifndef MOE_LAUNCH
#include <cuda_runtime.h>
// Queues kernel(...) with `shared` bytes of dynamic shared memory. Result: 0 or a cudaError_t. grid is at
// least 1: a caller with nothing to do does not launch. Parenthesise a kernel's name that has a comma.
#define MOE_LAUNCH(kernel, grid, block, shared, stream, ...)                                                 \
    (kernel<<<(grid), (block), (shared), (cudaStream_t)(stream)>>>(__VA_ARGS__), (int)cudaGetLastError())
// name [n] of T in the block's shared memory, not cleared; n is a constant. Once a place: several of the same
// name in a kernel are several arrays.
#define MOE_SHARED(T, name, n) __shared__ T name[n]
// name [as many as the launch's shared bytes hold] of T; once in a kernel.
#define MOE_SHARED_DYNAMIC(T, name)                                                                          \
    extern __shared__ __align__(16) unsigned char moe_dynamic[];                                             \
    T *name = reinterpret_cast<T *>(moe_dynamic)
#endif

#define MOE_OR_RETURN(call)                                                                                  \
    do {                                                                                                     \
        int moe_error_ = (call);                                                                             \
        if (moe_error_) return moe_error_;                                                                   \
    } while (0)

// A loop whose indices are constants, so that what they index can be registers.
#ifdef __CUDACC__
#define MOE_UNROLL _Pragma("unroll")
#else
#define MOE_UNROLL
#endif

namespace moe {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// ---- types ----

struct bf16 {
    moe_bf16 bits;
};

template <class T> struct wide {
    using type = T;
};
template <> struct wide<bf16> {
    using type = float;
};
template <class T> using wide_t = typename wide<T>::type; // what T is computed in

template <class T> __host__ __device__ inline wide_t<T> load(const T *from)
{
    return *from;
}
template <> __host__ __device__ inline float load<bf16>(const bf16 *from)
{
    return moe_bf16_to_float(from->bits);
}

// Stores a value, rounded once (from double, to float; bf16 is rounded from float, as its sums are floats).
template <class T> __host__ __device__ inline void store(T *to, double value)
{
    *to = (T)value;
}
template <> __host__ __device__ inline void store<bf16>(bf16 *to, double value)
{
    to->bits = moe_bf16_from_float((float)value);
}

// Replaces, or adds and rounds the sum once.
template <class T> __host__ __device__ inline void put(T *to, double value, bool add)
{
    store(to, add ? load(to) + value : value);
}

// f(T()) with the type that `type` names; f returns int.
template <class F> int by_type(enum moe_cuda_type type, F f)
{
    switch (type) {
    case MOE_CUDA_F64: return f(double());
    case MOE_CUDA_BF16: return f(bf16());
    default: return f(float());
    }
}

// 16 bytes at once. N elements of T; only for addresses and counts that are multiples.
template <class T> struct alignas(16) lump {
    static constexpr int N = 16 / sizeof(T);
    T at[N];
};
// Can rows of `elements` at these pointers be read and written by lumps?
template <class T, class... P> inline bool by_lumps(int64_t elements, P... pointers)
{
    bool aligned = elements % lump<T>::N == 0;
    const void *list[] = {pointers...};
    for (const void *p : list) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    return aligned;
}

// An element, where lumps do not fit. Kernels take either as L, and walk over L::N elements at a time.
template <class T> struct single {
    static constexpr int N = 1;
    T at[N];
};

// f(lump<T>()) where rows of `elements` at these pointers allow it, else f(single<T>()); f returns int.
template <class T, class F, class... P> int by_unit(int64_t elements, F f, P... pointers)
{
    return by_lumps<T>(elements, pointers...) ? f(lump<T>()) : f(single<T>());
}

// ---- grids ----

constexpr int64_t MOST_BLOCKS = 1 << 16; // kernels walk by strides of the grid: more blocks bring nothing

inline int64_t divide_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

// Blocks of `per_block` items for n items: at least 1, at most MOST_BLOCKS.
inline unsigned blocks_for(int64_t n, int64_t per_block)
{
    int64_t blocks = divide_up(n, per_block);
    return (unsigned)(blocks < 1 ? 1 : blocks > MOST_BLOCKS ? MOST_BLOCKS : blocks);
}

__device__ inline int64_t thread_of_grid()
{
    return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ inline int64_t threads_of_grid()
{
    return (int64_t)gridDim.x * blockDim.x;
}
__device__ inline int lane()
{
    return (int)(threadIdx.x % WARP);
}

// ---- sums: every thread of the warp or block calls them, and gets the same result ----

template <class T> __device__ inline T warp_sum(T x)
{
    for (int apart = WARP / 2; apart; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}

template <class T> __device__ inline T warp_max(T x)
{
    for (int apart = WARP / 2; apart; apart /= 2) {
        T other = __shfl_xor_sync(ALL_LANES, x, apart);
        if (other > x) x = other;
    }
    return x;
}

// part [WARP]: shared memory of the caller. The block is one-dimensional, of a multiple of WARP threads.
template <class T> __device__ inline T block_sum(T x, T *part)
{
    x = warp_sum(x);
    __syncthreads(); // part may still be read from the call before
    if (lane() == 0) part[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum((unsigned)lane() < blockDim.x / WARP ? part[lane()] : T(0));
}

// ---- indices ----

// Is the index in 0 .. n-1? Else notes it, if it is the first.
__device__ inline bool inside(int64_t index, int64_t n, struct moe_cuda_fault *fault)
{
    if (index >= 0 && index < n) return true;
    if (atomicCAS(&fault->set, 0, 1) == 0) {
        fault->index = index;
        fault->n = n;
    }
    return false;
}

} // namespace moe

#endif
