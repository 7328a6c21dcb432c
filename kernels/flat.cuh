// flat.cuh - flat arrays: a thread takes lumps a grid apart, then elements that no lump holds.
#ifndef MOE_FLAT_CUH
#define MOE_FLAT_CUH

#include "kernels/cuda.cuh"

namespace moe {

constexpr int FLAT_THREADS = 256;
constexpr int64_t MOST_FLAT_BLOCKS = 1024; // 8 for each of 128 multiprocessors

// How many lumps n elements at these pointers begin with; none when they are not aligned.
template <class T, class... P> inline int64_t lumps_in(int64_t n, P... pointers)
{
    return by_lumps<T>(0, pointers...) ? n / lump<T>::N : 0;
}

// Blocks of FLAT_THREADS for n elements that begin with so many lumps; 0 for none.
template <class T> inline unsigned flat_blocks(int64_t n, int64_t lumps)
{
    const int64_t blocks = divide_up(n, (int64_t)FLAT_THREADS * (lumps ? lump<T>::N : 1));
    return (unsigned)(blocks < MOST_FLAT_BLOCKS ? blocks : MOST_FLAT_BLOCKS);
}

// f(at, unit) for every unit of n elements that is this thread's: the first `lumps` lumps, at their first
// element, then elements one by one. unit: a lump<T>() or a single<T>(), for its type.
template <class T, class F> __device__ inline void each_unit(int64_t n, int64_t lumps, F f)
{
    for (int64_t i = thread_of_grid(); i < lumps; i += threads_of_grid()) f(i * lump<T>::N, lump<T>());
    for (int64_t i = lumps * lump<T>::N + thread_of_grid(); i < n; i += threads_of_grid()) f(i, single<T>());
}

} // namespace moe

#endif
