// columns.cuh - rows whose columns threads share: a unit of a row is 16 bytes where rows allow it, else an
// element; a block is x threads along a row and y rows, so that no thread divides.
#ifndef MOE_COLUMNS_CUH
#define MOE_COLUMNS_CUH

#include "kernels/cuda.cuh"

namespace moe {

constexpr int COLUMN_THREADS = 256; // of a block
constexpr int64_t MOST_ROW_BLOCKS = 1 << 12;

// Threads: a power of two along the row, no more than it has units.
inline dim3 column_block(int64_t units)
{
    unsigned x = 1;
    while (x < units && x < COLUMN_THREADS) x *= 2;
    return dim3(x, COLUMN_THREADS / x);
}

// Valid for up to 65,535 * 256 units, else the launch fails. Many rows: a thread takes several.
inline dim3 column_grid(int64_t rows, int64_t units, dim3 block)
{
    const int64_t x = divide_up(rows, block.y);
    return dim3((unsigned)(x < MOST_ROW_BLOCKS ? x : MOST_ROW_BLOCKS), (unsigned)divide_up(units, block.x));
}

// What the thread has: the unit of_column, and the rows of_row, + rows_apart, ...
__device__ inline int64_t of_column()
{
    return (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
}
__device__ inline int64_t of_row()
{
    return (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
}
__device__ inline int64_t rows_apart()
{
    return (int64_t)gridDim.x * blockDim.y;
}

// Threads of a block that has a row at a time: a multiple of WARP, `most` at most.
inline unsigned threads_of_row(int64_t units, unsigned most)
{
    const int64_t threads = divide_up(units, WARP) * WARP;
    return threads > most ? most : threads < WARP ? WARP : (unsigned)threads;
}

// In the type of its argument, as the CPU runtime's.
__host__ __device__ inline float exponential(float x)
{
    return expf(x);
}
__host__ __device__ inline double exponential(double x)
{
    return exp(x);
}

} // namespace moe

#endif
