// combine.cu - see cuda.h: rows of experts, weighted, become tokens. A floor time is for 4,096 tokens x 7,168
// x top-8 of bf16 and 256 experts (58.7 MB for a row of each token, 470 MB for a row of each choice) at 4.8
// TB/s.
#include "kernels/rows.cuh"

using namespace moe;

namespace {

constexpr int C = 8; // choices of a token that are computed at once
constexpr int MOST_WARPS = ROW_THREADS / WARP;
constexpr int TORCH_BLOCK = 512; // threads, in PyTorch's order of sums
constexpr int TORCH_SUMS = 4;    // of a thread

// Bytes: 2 T K elements, 4 T K; floor 0.1 us.
template <class T>
__global__ void take(int64_t choices, int64_t E, int64_t K, const T *prob, const int32_t *expert, T *taken,
                     struct moe_cuda_fault *fault)
{
    for (int64_t i = thread_of_grid(); i < choices; i += threads_of_grid()) {
        const int32_t e = expert[i];
        if (e == -1 || !inside(e, E, fault))
            store(&taken[i], 0);
        else
            taken[i] = prob[i / K * E + e];
    }
}

// A thread is asked about one element: which of the token's choices are it?
// Bytes: T E + T K elements (with add: 3 T K), 4 T K; floor 0.5 us.
template <class T>
__global__ void take_bwd(int64_t n_tokens, int64_t E, int64_t K, const int32_t *expert, const T *dtaken,
                         T *dprob, bool add, struct moe_cuda_fault *fault)
{
    for (int64_t t = row_of_grid(); t < n_tokens; t += rows_of_grid())
        for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
            wide_t<T> sum = 0;
            bool any = false;
            for (int64_t i = t * K; i < (t + 1) * K; i++) {
                const int32_t is = expert[i];
                if (e == 0 && is != -1) inside(is, E, fault);
                if (is != e) continue;
                sum = (any ? sum : add ? load(&dprob[t * E + e]) : wide_t<T>(0)) + load(&dtaken[i]);
                any = true;
            }
            if (any || !add) store(&dprob[t * E + e], sum);
        }
}

// Does a later choice of the token have the expert too? Then that one says what dprob is.
template <class T> __device__ bool again(const struct chosen<T> &of, int64_t t, int64_t k, int32_t expert)
{
    for (int64_t i = t * of.K + k + 1; of.expert && i < (t + 1) * of.K; i++)
        if (of.expert[i] == expert && of.slot[i] != -1) return true;
    return false;
}

// Choices of whom the block writes the row of the gradient: those that own it.
__device__ inline bool owns(const int32_t *owner, int64_t choice, int64_t row, int64_t first, int64_t here)
{
    return !owner || (row >= first && row < first + here && owner[row - first] == choice);
}

// A block has a token: dy is read once for N of its choices. dprob [T,E] is 0 before.
// Bytes: T H + T K H + n H elements, T E + 2 T K, 8 T K; floor 208 us (n = T K).
template <class T, class L, int N>
__global__ void combine_bwd(int64_t n_tokens, int64_t units, const struct chosen<T> of, const L *rows,
                            const L *dy, const int32_t *owner, int64_t first, int64_t here, L *drows,
                            T *dprob, struct moe_cuda_fault *fault)
{
    MOE_SHARED(wide_t<T>, part, MOST_WARPS * N);
    const int warp = (int)threadIdx.x / WARP, n_warps = (int)blockDim.x / WARP, me = (int)threadIdx.x;
    for (int64_t t = blockIdx.x; t < n_tokens; t += gridDim.x)
        for (int64_t k = 0; k < of.K; k += N) {
            choices<T, N> c;
            wide_t<T> dot[N] = {};
            bool own[N];
            c.look_up(of, t, k, fault);
            for (int i = 0; i < N; i++)
                own[i] = c.row[i] >= 0 && owns(owner, t * of.K + k + i, c.row[i], first, here);
            for (int64_t u = me; u < units; u += blockDim.x) {
                const L d = dy[t * units + u];
                L row[N] = {};
                for (int i = 0; i < N; i++)
                    if (c.row[i] >= 0) row[i] = rows[c.row[i] * units + u];
                for (int i = 0; i < N; i++) {
                    L out;
                    for (int j = 0; j < L::N; j++) {
                        dot[i] += load(&d.at[j]) * load(&row[i].at[j]);
                        store(&out.at[j], c.weight[i] * load(&d.at[j]));
                    }
                    if (own[i]) drows[c.row[i] * units + u] = out;
                }
            }
            for (int i = 0; i < N; i++) {
                const wide_t<T> sum = warp_sum(dot[i]);
                if (lane() == 0) part[i * n_warps + warp] = sum;
            }
            __syncthreads();
            if (me < N) { // each choice of its own thread, which looks it up again: registers have no index
                choices<T, 1> mine;
                mine.look_up(of, t, k + me, fault);
                wide_t<T> sum = 0;
                for (int w = 0; w < n_warps; w++) sum += part[me * n_warps + w];
                if (mine.row[0] >= 0 && !again(of, t, k + me, mine.expert[0]))
                    store(&dprob[t * of.E + mine.expert[0]], sum);
            }
            __syncthreads();
        }
}

// The dot product of two rows by W threads, whose number in the block begins at a multiple of W: in the order
// of PyTorch (see moe_ref_combine_bwd; products are rounded before they are added: -fmad=false). x NULL: no
// row. part [threads of the block]. Result: in the first of the W threads.
template <class T> __device__ wide_t<T> torch_dot(int W, int64_t H, const T *x, const T *y, wide_t<T> *part)
{
    const int me = (int)threadIdx.x, t = me % W, lanes = W < WARP ? W : WARP;
    wide_t<T> own[TORCH_SUMS] = {};
    for (int64_t h = t; x && h < H; h += TORCH_SUMS * W)
        for (int j = 0; j < TORCH_SUMS; j++)
            if (h + j * W < H) own[j] += load(&x[h + j * W]) * load(&y[h + j * W]);
    wide_t<T> sum = own[0] + own[1] + own[2] + own[3];
    for (int half = W / 2; half >= WARP; half /= 2) {
        part[me] = sum;
        __syncthreads();
        if (t < half) sum += part[me + half];
        __syncthreads();
    }
    for (int apart = 1; apart < lanes; apart *= 2)
        sum += __shfl_down_sync(ALL_LANES, sum, (unsigned)apart, lanes);
    return sum;
}

// As combine_bwd; W threads have a choice. Bytes: as there, but the cache gives dy to all but the first
// choice of a token; elements of 2 bytes are read one by one.
template <class T>
__global__ void combine_bwd_by_rows(int W, int64_t n_choices, int64_t H, const struct chosen<T> of,
                                    const T *rows, const T *dy, const int32_t *owner, int64_t first,
                                    int64_t here, T *drows, T *dprob, struct moe_cuda_fault *fault)
{
    MOE_SHARED(wide_t<T>, part, TORCH_BLOCK);
    const int64_t side_by_side = blockDim.x / (unsigned)W;
    for (int64_t next = blockIdx.x * side_by_side; next < n_choices; next += gridDim.x * side_by_side) {
        const int64_t i = next + (int)threadIdx.x / W, t = i / of.K, k = i % of.K;
        choices<T, 1> c;
        if (i < n_choices)
            c.look_up(of, t, k, fault);
        else
            c.row[0] = -1;
        const int64_t row = c.row[0];
        const wide_t<T> dot =
            torch_dot(W, H, row < 0 ? (const T *)nullptr : dy + t * H, rows + row * H, part);
        if (row < 0) continue; // together: the rest waits for nobody
        if (threadIdx.x % (unsigned)W == 0 && !again(of, t, k, c.expert[0]))
            store(&dprob[t * of.E + c.expert[0]], dot);
        if (owns(owner, i, row, first, here))
            for (int64_t h = threadIdx.x % (unsigned)W; h < H; h += W)
                store(&drows[row * H + h], c.weight[0] * load(&dy[t * H + h]));
    }
}

// How many threads PyTorch gives to a row when it sums n rows of H: see moe_ref_combine_bwd.
int64_t power(int64_t n, int64_t most)
{
    int64_t p = 1;
    while (2 * p <= n && 2 * p <= most) p *= 2;
    return p;
}
int torch_width(int64_t n, int64_t H)
{
    const int64_t most = power(H, TORCH_BLOCK), height = power(n, TORCH_BLOCK / (most < WARP ? most : WARP));
    return (int)(most < TORCH_BLOCK / height ? most : TORCH_BLOCK / height);
}

// Both ways to get gradients of rows and of weights; dprob is 0 before, or has no choice that is dropped.
template <class T>
int queue_bwd(const struct moe_cuda_queue *q, int64_t n_tokens, int64_t H, const struct chosen<T> &of,
              const T *rows, const T *dy, bool by_rows, const int32_t *owner, int64_t first, int64_t here,
              T *drows, T *dprob)
{
    const int64_t n_choices = n_tokens * of.K;
    const int W = torch_width(of.n, H), threads = W < ROW_THREADS ? (int)threads_for(W * n_choices) : W;
    if (n_choices == 0) return 0;
    if (by_rows)
        return MOE_LAUNCH(combine_bwd_by_rows<T>, blocks_for(n_choices, threads / W), threads, 0, q->stream,
                          W, n_choices, H, of, rows, dy, owner, first, here, drows, dprob, q->fault);
    return by_unit<T>(
        H,
        [=](auto unit) {
            using L = decltype(unit);
            return MOE_LAUNCH((of.K > 1 ? combine_bwd<T, L, C> : combine_bwd<T, L, 1>),
                              blocks_for(n_tokens, 1), threads_of_row(H / L::N), 0, q->stream, n_tokens,
                              H / L::N, of, (const L *)rows, (const L *)dy, owner, first, here, (L *)drows,
                              dprob, q->fault);
        },
        rows, dy, drows);
}

// ---- in whatever order ----

template <class T> __device__ void add_at_once(T *to, T value)
{
    atomicAdd(to, value);
}
// Old and new sum are compared as bits, so that NaN ends the loop too.
__device__ inline void add_at_once(bf16 *to, float value)
{
    bf16 product, sum;
    moe_bf16 was = *(volatile moe_bf16 *)&to->bits, seen;
    store(&product, value);
    for (;; was = seen) {
        store(&sum, moe_bf16_to_float(was) + load(&product));
        seen = atomicCAS(&to->bits, was, sum.bits);
        if (seen == was) return;
    }
}

// Bytes: T K H elements, T K of y read and written H elements at a time, 2 T K, 8 T K; floor 306 us where
// every addition goes to memory, 110 us where the cache holds y.
template <class T>
__global__ void scatter(int64_t n_choices, int64_t H, const struct chosen<T> of, const T *rows, T *y,
                        struct moe_cuda_fault *fault)
{
    for (int64_t i = row_of_grid(); i < n_choices; i += rows_of_grid()) {
        const int64_t t = i / of.K;
        choices<T, 1> c;
        c.look_up(of, t, i % of.K, fault);
        if (c.row[0] < 0) continue;
        for (int64_t h = threadIdx.x; h < H; h += blockDim.x)
            add_at_once(&y[t * H + h], c.weight[0] * load(&rows[c.row[0] * H + h]));
    }
}

} // namespace

MOE_CUDA(take, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert, void *taken)
{
    if (T * K == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return MOE_LAUNCH(take<R>, blocks_for(T * K, ROW_THREADS), threads_for(T * K), 0, q->stream, T * K, E,
                          K, (const R *)prob, expert, (R *)taken, q->fault);
    });
}

MOE_CUDA(take_bwd, int64_t T, int64_t E, int64_t K, const int32_t *expert, const void *dtaken, void *dprob,
         bool add)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const dim3 block = block_of_rows(T, E);
        return MOE_LAUNCH(take_bwd<R>, blocks_for(T, block.y), block, 0, q->stream, T, E, K, expert,
                          (const R *)dtaken, (R *)dprob, add, q->fault);
    });
}

// Bytes: 2 n H + n elements; floor 196 us (n = T K).
MOE_CUDA(weigh, int64_t n, int64_t H, const void *rows, const void *weight, void *y)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const struct chosen<R> of = {
            1, 1, n, (const R *)weight, nullptr, nullptr
        };
        return queue_sum_rows(q, n, H, of, (const R *)rows, (R *)y, false);
    });
}

// Bytes: 3 n H + 2 n elements; floor 294 us (n = T K).
MOE_CUDA(weigh_bwd, int64_t n, int64_t H, const void *rows, const void *weight, const void *dy, bool by_rows,
         void *drows, void *dweight)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const struct chosen<R> of = {
            1, 1, n, (const R *)weight, nullptr, nullptr
        };
        return queue_bwd(q, n, H, of, (const R *)rows, (const R *)dy, by_rows, nullptr, 0, n, (R *)drows,
                         (R *)dweight);
    });
}

// Bytes: T K H + T H elements, T K, 8 T K; floor 110 us.
MOE_CUDA(combine, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows, const void *prob,
         const int32_t *expert, const int32_t *slot, void *y)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const struct chosen<R> of = {
            K, E, n, (const R *)prob, expert, slot
        };
        return queue_sum_rows(q, T, H, of, (const R *)rows, (R *)y, false);
    });
}

MOE_CUDA(combine_bwd, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows,
         const void *prob, const int32_t *expert, const int32_t *slot, const void *dy, bool by_rows,
         void *drows, void *dprob)
{
    MOE_OR_RETURN(moe_cuda_zero(q, type, T * E, dprob));
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const struct chosen<R> of = {
            K, E, n, (const R *)prob, expert, slot
        };
        return fill_rows(q, T * K, H, n, slot, (R *)drows,
                         [=](int64_t first, int64_t here, const int32_t *owner) {
                             return queue_bwd(q, T, H, of, (const R *)rows, (const R *)dy, by_rows, owner,
                                              first, here, (R *)drows, (R *)dprob);
                         });
    });
}

MOE_CUDA(combine_scatter, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows,
         const void *prob, const int32_t *expert, const int32_t *slot, void *y)
{
    MOE_OR_RETURN(moe_cuda_zero(q, type, T * H, y));
    if (T * K == 0 || H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const dim3 block = block_of_rows(T * K, H);
        const struct chosen<R> of = {
            K, E, n, (const R *)prob, expert, slot
        };
        return MOE_LAUNCH(scatter<R>, blocks_for(T * K, block.y), block, 0, q->stream, T * K, H, of,
                          (const R *)rows, (R *)y, q->fault);
    });
}
