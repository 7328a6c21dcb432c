// rmsnorm.cu - see cuda.h. A block has a row at a time: what it reads twice is in a cache the second time. A
// floor time is for 4,096 rows with H = 7,168 of bf16 (58.7 MB an array [T,H]) at 4.8 TB/s.
#include "kernels/columns.cuh"

using namespace moe;

namespace {

constexpr int THREADS = 256, BWD_THREADS = 512, SUM_COLUMNS = 32, SUM_ROWS = 8;
constexpr int64_t MOST_BLOCKS_OF_ROWS = 2048, MOST_GAIN_BLOCKS = 256;
constexpr size_t MOST_GAIN_BYTES = 40 << 10; // of shared memory, for the gain's gradient of a block

// 1 / sqrt(mean of squares + 1e-5), of a row whose squares have this sum.
template <class C> __device__ inline C inverse_rms(C squares, int64_t columns)
{
    return (C)(1 / sqrt((double)squares / (double)columns + 1e-5));
}

// Bytes: 2 T H + H elements; floor 24.5 us.
template <class T, class L>
__global__ void rmsnorm(int64_t rows, int64_t units, const L *x, const L *gain, L *y)
{
    using C = wide_t<T>;
    MOE_SHARED(C, part, WARP);
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const L *row = x + r * units;
        C squares = 0;
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) {
            const L in = row[c];
            for (int i = 0; i < L::N; i++) squares += load(&in.at[i]) * load(&in.at[i]);
        }
        const C by = inverse_rms(block_sum(squares, part), units * L::N);
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) {
            const L in = row[c], g = gain[c];
            L out;
            for (int i = 0; i < L::N; i++) store(&out.at[i], load(&in.at[i]) * by * load(&g.at[i]));
            y[r * units + c] = out;
        }
    }
}

// dx of all columns, unless it is NULL, and of the units first .. first + here - 1 what the block's rows give
// to dgain: dgains [blocks, here * N]. Bytes: 3 T H elements (+ T H with add), 4 blocks H twice; floor 40 us.
// Every `here` units more read 2 T H again: with H above 10,240 (5,120 of double).
template <class T, class L>
__global__ void rmsnorm_bwd(int64_t rows, int64_t units, int64_t first, int64_t here, const L *x,
                            const L *gain, const L *dy, L *dx, bool add, wide_t<T> *dgains)
{
    using C = wide_t<T>;
    MOE_SHARED(C, part, WARP);
    MOE_SHARED_DYNAMIC(C, dgain); // [N, here]: each thread adds to its own columns
    for (int64_t i = threadIdx.x; i < here * L::N; i += blockDim.x) dgain[i] = 0;
    __syncthreads();
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const int64_t row = r * units;
        C squares = 0, mean = 0;
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) {
            const L in = x[row + c], d = dy[row + c], g = gain[c];
            for (int i = 0; i < L::N; i++) {
                squares += load(&in.at[i]) * load(&in.at[i]);
                mean += load(&d.at[i]) * load(&g.at[i]) * load(&in.at[i]);
            }
        }
        const C by = inverse_rms(block_sum(squares, part), units * L::N);
        const C back = by * by * block_sum(mean, part) / (C)(units * L::N);
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) {
            const int64_t own = c - first;
            const L in = x[row + c], d = dy[row + c], g = gain[c];
            L out = {};
            if (dx && add) out = dx[row + c];
            for (int i = 0; i < L::N; i++) {
                const C in_i = load(&in.at[i]), d_i = load(&d.at[i]);
                put(&out.at[i], by * (d_i * load(&g.at[i]) - in_i * back), add);
                if (own >= 0 && own < here) dgain[i * here + own] += d_i * in_i * by;
            }
            if (dx) dx[row + c] = out;
        }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < here * L::N; i += blockDim.x)
        dgains[(int64_t)blockIdx.x * here * L::N + i] = dgain[i % L::N * here + i / L::N];
}

// dgain [columns] = the sum over blocks of dgains [blocks, columns]: each of SUM_ROWS rows of threads takes
// every SUM_ROWS-th, and the first adds theirs in order.
template <class T>
__global__ void sum_gains(int64_t blocks, int64_t columns, const wide_t<T> *dgains, T *dgain, bool add)
{
    MOE_SHARED(double, part, WARP *SUM_COLUMNS);
    const int64_t c = (int64_t)blockIdx.x * SUM_COLUMNS + threadIdx.x;
    double sum = 0;
    for (int64_t b = threadIdx.y; c < columns && b < blocks; b += SUM_ROWS) sum += dgains[b * columns + c];
    part[threadIdx.y * SUM_COLUMNS + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= columns) return;
    for (int y = 1; y < SUM_ROWS; y++) sum += part[y * SUM_COLUMNS + threadIdx.x];
    put(&dgain[c], sum, add);
}

template <class T, class L>
int queue_bwd(const struct moe_cuda_queue *q, int64_t rows, int64_t units, const L *x, const L *gain,
              const L *dy, L *dx, T *dgain, bool add_x, bool add_gain)
{
    using C = wide_t<T>;
    C *dgains = (C *)q->workspace;
    const int64_t most = (int64_t)(MOST_GAIN_BYTES / sizeof(C)) / L::N;
    for (int64_t first = 0; first < units; first += most) {
        const int64_t here = units - first < most ? units - first : most, columns = here * L::N;
        const int64_t fit = (int64_t)(MOE_CUDA_WORKSPACE_BYTES / sizeof(C)) / columns; // 204 at least
        int64_t blocks = fit < MOST_GAIN_BLOCKS ? fit : MOST_GAIN_BLOCKS;
        if (rows < blocks) blocks = rows;
        if (blocks > 0)
            MOE_OR_RETURN(MOE_LAUNCH((rmsnorm_bwd<T, L>), (unsigned)blocks,
                                     threads_of_row(units, BWD_THREADS), (size_t)columns * sizeof(C),
                                     q->stream, rows, units, first, here, x, gain, dy, first ? (L *)NULL : dx,
                                     add_x, dgains));
        MOE_OR_RETURN(MOE_LAUNCH(sum_gains<T>, (unsigned)divide_up(columns, SUM_COLUMNS),
                                 dim3(SUM_COLUMNS, SUM_ROWS), 0, q->stream, blocks, columns,
                                 (const C *)dgains, dgain + first * L::N, add_gain));
    }
    return 0;
}

} // namespace

MOE_CUDA(rmsnorm, int64_t T, int64_t H, const void *x, const void *gain, void *y)
{
    if (T == 0 || H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            H,
            [=](auto unit) {
                using L = decltype(unit);
                return MOE_LAUNCH((rmsnorm<R, L>),
                                  (unsigned)(T < MOST_BLOCKS_OF_ROWS ? T : MOST_BLOCKS_OF_ROWS),
                                  threads_of_row(H / L::N, THREADS), 0, q->stream, T, H / L::N, (const L *)x,
                                  (const L *)gain, (L *)y);
            },
            x, gain, y);
    });
}

MOE_CUDA(rmsnorm_bwd, int64_t T, int64_t H, const void *x, const void *gain, const void *dy, void *dx,
         void *dgain, bool add_x, bool add_gain)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            H,
            [=](auto unit) {
                using L = decltype(unit);
                return queue_bwd<R, L>(q, T, H / L::N, (const L *)x, (const L *)gain, (const L *)dy, (L *)dx,
                                       (R *)dgain, add_x, add_gain);
            },
            x, gain, dy, dx);
    });
}
