// rows.cuh - what permute.cu and combine.cu share: rows by lumps or by elements, blocks that fit rows, which
// choice a row belongs to, and the sum of a token's rows.
//
// A unit is a lump of a row, or an element where lumps do not fit. A block is x threads along a row and y
// rows. A choice i = t * K + k has the row slot[i] and the weight prob[t, expert[i]].
#ifndef MOE_ROWS_CUH
#define MOE_ROWS_CUH

#include "kernels/cuda.cuh"

namespace moe {

constexpr int ROW_THREADS = 256; // of a block
constexpr int AT_ONCE = 4;       // units of a row that a thread reads before it writes
constexpr int NOT_POSSIBLE = 1;  // cudaErrorInvalidValue

// ---- blocks ----

// A multiple of WARP, no more than n asks for.
inline unsigned threads_for(int64_t n)
{
    n = divide_up(n, WARP) * WARP;
    return (unsigned)(n < WARP ? WARP : n > ROW_THREADS ? ROW_THREADS : n);
}

// Threads for one row, with AT_ONCE units each where that is enough.
inline unsigned threads_of_row(int64_t units)
{
    return threads_for(divide_up(units, AT_ONCE));
}

// Short rows: several share a warp.
inline dim3 block_of_rows(int64_t n, int64_t units)
{
    unsigned x = 1, y = 1;
    if (units > WARP * AT_ONCE)
        x = threads_of_row(units);
    else
        while (x < units && x < WARP) x *= 2;
    while (x * y < WARP || (y < n && 2 * x * y <= ROW_THREADS)) y *= 2;
    return dim3(x, y);
}

__device__ inline int64_t row_of_grid()
{
    return (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
}
__device__ inline int64_t rows_of_grid()
{
    return (int64_t)gridDim.x * blockDim.y;
}

// ---- who owns a row: the last choice whose slot it is ----

// Templates, so that the files that include this may have the same kernel. (nvcc takes no second namespace
// without a name beside that of a .cu file.)
template <class I> __global__ void no_owners(int64_t n, I *owner)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) owner[i] = -1;
}

// The largest choice is the same in whatever order they come.
template <class I>
__global__ void find_owners(int64_t choices, int64_t n, int64_t first, int64_t here, const I *slot, I *owner,
                            struct moe_cuda_fault *fault)
{
    for (int64_t i = thread_of_grid(); i < choices; i += threads_of_grid()) {
        const I row = slot[i];
        if (row == -1 || !inside(row, n, fault)) continue;
        if (row >= first && row < first + here) atomicMax(&owner[row - first], (I)i);
    }
}

// A block looks at 32 rows at once, so that n owners cost little where no row is without.
template <class L> __global__ void zero_unowned(int64_t n, int64_t units, const int32_t *owner, L *rows)
{
    const L zeros = {};
    for (int64_t first = (int64_t)blockIdx.x * WARP; first < n; first += (int64_t)gridDim.x * WARP) {
        const int64_t own = first + lane();
        for (unsigned left = __ballot_sync(ALL_LANES, own < n && owner[own] < 0); left; left &= left - 1) {
            const int64_t row = first + __ffs((int)left) - 1;
            for (int64_t u = threadIdx.x; u < units; u += blockDim.x) rows[row * units + u] = zeros;
        }
    }
}

// Rows [n,H] of which f fills those that a slot names; the others become 0. A row that several slots name has
// one owner, so nothing is written twice. f(first, here, owner) queues the work for the rows first .. first +
// here - 1, with owner [here] their choices (-1: none); it is called once, unless the workspace is short of
// owners. Bytes: 4 (3 n + 2 choices), of which a device's cache holds most, and the rows that are zeroed.
template <class T, class F>
int fill_rows(const struct moe_cuda_queue *q, int64_t choices, int64_t H, int64_t n, const int32_t *slot,
              T *rows, F f)
{
    const int64_t most = (int64_t)(q->workspace_bytes / sizeof(int32_t));
    int32_t *owner = (int32_t *)q->workspace;
    if (choices > INT32_MAX || most == 0) return NOT_POSSIBLE;
    int64_t first = 0;
    do {
        const int64_t here = n - first < most ? n - first : most;
        if (here)
            MOE_OR_RETURN(MOE_LAUNCH(no_owners<int32_t>, blocks_for(here, ROW_THREADS), threads_for(here), 0,
                                     q->stream, here, owner));
        if (choices)
            MOE_OR_RETURN(MOE_LAUNCH(find_owners<int32_t>, blocks_for(choices, ROW_THREADS),
                                     threads_for(choices), 0, q->stream, choices, n, first, here, slot, owner,
                                     q->fault));
        MOE_OR_RETURN(f(first, here, (const int32_t *)owner));
        if (here && H)
            MOE_OR_RETURN(by_unit<T>(
                H,
                [=](auto unit) {
                    using L = decltype(unit);
                    return MOE_LAUNCH(zero_unowned<L>, blocks_for(here, WARP), threads_of_row(H / L::N), 0,
                                      q->stream, here, H / L::N, owner, (L *)(rows + first * H));
                },
                rows));
        first += here;
    } while (first < n);
    return 0;
}

// ---- choices ----

// Where a kernel's choices are told. slot NULL: choice i has row i; expert NULL: expert 0; prob NULL: weight
// 1.
template <class T> struct chosen {
    int64_t K, E, n;
    const T *prob;
    const int32_t *expert, *slot;
};

// Of token t, the choices k .. k + C - 1 as far as there are such: row -1 where nothing is to be done.
template <class T, int C> struct choices {
    int32_t row[C], expert[C];
    wide_t<T> weight[C];

    __device__ void look_up(const struct chosen<T> &of, int64_t t, int64_t k, struct moe_cuda_fault *fault)
    {
        const int64_t i = t * of.K + k, left = of.K - k;
        for (int c = 0; c < C; c++) {
            row[c] = c >= left ? -1 : of.slot ? of.slot[i + c] : (int32_t)(i + c);
            expert[c] = c < left && of.expert ? of.expert[i + c] : 0;
        }
        for (int c = 0; c < C; c++) {
            weight[c] = 1;
            if (row[c] == -1) continue;
            if (!inside(row[c], of.n, fault) || !inside(expert[c], of.E, fault))
                row[c] = -1;
            else if (of.prob)
                weight[c] = load(&of.prob[t * of.E + expert[c]]);
        }
    }
};

// ---- sums ----

// y [T, units] = the weighted sum of each token's rows (on top of y with add), in order of k, rounded once.
// A product is rounded before it is added (-fmad=false), so float and double have the bits of ref.h. C rows
// of A units are read before the first is added.
template <class T, class L, int C, int A>
__global__ void sum_rows(int64_t n_tokens, int64_t units, const struct chosen<T> of, const L *rows, L *y,
                         bool add, struct moe_cuda_fault *fault)
{
    const int step = (int)blockDim.x;
    for (int64_t t = row_of_grid(); t < n_tokens; t += rows_of_grid()) {
        choices<T, C> c;
        c.look_up(of, t, 0, fault);
        for (int64_t u = threadIdx.x; u < units; u += A * step) {
            const int64_t left = units - u;
            L *to = y + t * units + u, part[C][A] = {}, out[A] = {};
            wide_t<T> sum[A][L::N];
            for (int a = 0; a < A; a++)
                if (add && a * step < left) out[a] = to[a * step];
            for (int a = 0; a < A; a++)
                for (int j = 0; j < L::N; j++) sum[a][j] = add ? load(&out[a].at[j]) : wide_t<T>(0);
            for (int64_t k = 0; k < of.K; k += C) {
                if (of.K > C) c.look_up(of, t, k, fault);
                for (int i = 0; i < C; i++)
                    for (int a = 0; a < A; a++)
                        if (c.row[i] >= 0 && a * step < left)
                            part[i][a] = rows[c.row[i] * units + u + a * step];
                for (int i = 0; i < C; i++)
                    for (int a = 0; a < A; a++)
                        for (int j = 0; j < L::N; j++)
                            if (c.row[i] >= 0) sum[a][j] += c.weight[i] * load(&part[i][a].at[j]);
            }
            for (int a = 0; a < A; a++)
                for (int j = 0; j < L::N; j++) store(&out[a].at[j], sum[a][j]);
            for (int a = 0; a < A; a++)
                if (a * step < left) to[a * step] = out[a];
        }
    }
}

// Bytes in flight are what the memory's speed asks for: 8 rows at once, or 4 units of one or two.
template <class T>
int queue_sum_rows(const struct moe_cuda_queue *q, int64_t n_tokens, int64_t H, const struct chosen<T> &of,
                   const T *rows, T *y, bool add)
{
    if (n_tokens == 0 || H == 0) return 0;
    return by_unit<T>(
        H,
        [=](auto unit) {
            using L = decltype(unit);
            const dim3 block = block_of_rows(n_tokens, H / L::N);
            return MOE_LAUNCH((of.K > 2 ? sum_rows<T, L, 8, 1> : sum_rows<T, L, 2, 4>),
                              blocks_for(n_tokens, block.y), block, 0, q->stream, n_tokens, H / L::N, of,
                              (const L *)rows, (L *)y, add, q->fault);
        },
        rows, y);
}

} // namespace moe

#endif
