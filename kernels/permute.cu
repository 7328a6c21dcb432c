// permute.cu - see cuda.h: rows go to their slots and come back. A floor time is for 4,096 tokens x 7,168 x
// top-8 of bf16 (58.7 MB for a row of each token, 470 MB for a row of each choice) at 4.8 TB/s.
#include "kernels/rows.cuh"

using namespace moe;

namespace {

constexpr int C = 8;             // choices of a token whose places a thread holds
constexpr int SCAN = 256;        // threads of a block that sums up
constexpr int WALKERS = 1 << 11; // rows that are moved at the same time where their number is not known

// Each row of x is read once, and written wherever its token has a row of its own.
// Bytes: T H + n H elements, 4 (3 T K + 3 n); floor 110 us (n = T K).
template <class L>
__global__ void permute(int64_t n_tokens, int64_t units, int64_t K, int64_t first, int64_t here, const L *x,
                        const int32_t *slot, const int32_t *owner, L *rows)
{
    const int step = (int)blockDim.x;
    for (int64_t t = row_of_grid(); t < n_tokens; t += rows_of_grid())
        for (int64_t k = 0; k < K; k += C) {
            int32_t row[C];
            for (int c = 0; c < C; c++) row[c] = k + c < K ? slot[t * K + k + c] : -1;
            for (int c = 0; c < C; c++)
                if (row[c] < first || row[c] >= first + here || owner[row[c] - first] != t * K + k + c)
                    row[c] = -1;
            for (int64_t u = threadIdx.x; u < units; u += AT_ONCE * step) {
                const int64_t left = units - u;
                L part[AT_ONCE] = {};
                for (int a = 0; a < AT_ONCE; a++)
                    if (a * step < left) part[a] = x[t * units + u + a * step];
                for (int c = 0; c < C; c++)
                    for (int a = 0; a < AT_ONCE; a++)
                        if (row[c] >= 0 && a * step < left) rows[row[c] * units + u + a * step] = part[a];
            }
        }
}

// start [n + 1] = the sums of count(0) .. count(i - 1), by one block of SCAN threads; sums [SCAN] is shared.
template <class F> __device__ void running_sums(int64_t n, F count, int64_t *start, int64_t *sums)
{
    const int me = (int)threadIdx.x;
    const int64_t each = (n + SCAN - 1) / SCAN, first = me * each < n ? me * each : n,
                  end = first + each < n ? first + each : n;
    int64_t own = 0;
    for (int64_t i = first; i < end; i++) own += count(i);
    __syncthreads(); // sums may still be read from the call before
    sums[me] = own;
    for (int by = 1; by < SCAN; by *= 2) {
        __syncthreads();
        const int64_t before = me >= by ? sums[me - by] : 0;
        __syncthreads();
        sums[me] += before;
    }
    int64_t at = sums[me] - own;
    for (int64_t i = first; i < end; i++) {
        start[i] = at;
        at += count(i);
    }
    if (me == SCAN - 1) start[n] = at;
}

// Where the rows of each expert j and source p begin: sorted_start by (j, p), packed_start by (p, j).
// Bytes: 8 * 5 P e.
__global__ void find_starts(int64_t P, int64_t e, const int64_t *counts, int64_t *sorted_start,
                            int64_t *packed_start, struct moe_cuda_fault *fault)
{
    MOE_SHARED(int64_t, sums, SCAN);
    const auto packed = [=](int64_t i) { return inside(counts[i], INT32_MAX, fault) ? counts[i] : 0; };
    running_sums(P * e, packed, packed_start, sums);
    running_sums(
        P * e, [=](int64_t i) { return packed(i % P * e + i / P); }, sorted_start, sums);
}

// Every walker has its share of the sorted rows, one after the other: it looks for the first one's expert and
// source, and then they follow each other. Bytes: 2 N H elements (3 N H with add); floor 196 us (N = 32,768
// rows; 294 us).
template <class T, class L>
__global__ void reorder(int64_t P, int64_t e, int64_t units, const L *from, const int64_t *sorted_start,
                        const int64_t *packed_start, L *to, bool unsort, bool add)
{
    const int64_t n = sorted_start[P * e], walkers = rows_of_grid(), end = n * (row_of_grid() + 1) / walkers;
    const int step = (int)blockDim.x;
    int64_t row = n * row_of_grid() / walkers, q = 0, next = 0, ahead = 0;
    if (row == end) return;
    for (int64_t high = P * e; high - q > 1;) { // sorted_start[q] <= row < sorted_start[high]
        const int64_t middle = q + (high - q) / 2;
        (sorted_start[middle] <= row ? q : high) = middle;
    }
    for (; row < end; row++) {
        if (row >= next) {
            while (row >= (next = sorted_start[q + 1])) q++;
            ahead = packed_start[q % P * e + q / P] - sorted_start[q];
        }
        const L *source = from + (unsort ? row : row + ahead) * units;
        L *sink = to + (unsort ? row + ahead : row) * units;
        for (int64_t u = threadIdx.x; u < units; u += AT_ONCE * step) {
            const int64_t left = units - u;
            L part[AT_ONCE] = {}, old[AT_ONCE] = {};
            for (int a = 0; a < AT_ONCE; a++)
                if (a * step < left) part[a] = source[u + a * step];
            for (int a = 0; a < AT_ONCE; a++)
                if (add && a * step < left) old[a] = sink[u + a * step];
            for (int a = 0; a < AT_ONCE; a++)
                for (int j = 0; j < L::N; j++)
                    if (add) store(&part[a].at[j], (wide_t<T>)(load(&old[a].at[j]) + load(&part[a].at[j])));
            for (int a = 0; a < AT_ONCE; a++)
                if (a * step < left) sink[u + a * step] = part[a];
        }
    }
}

int queue_reorder(const struct moe_cuda_queue *q, enum moe_cuda_type type, int64_t P, int64_t e, int64_t H,
                  const void *from, const int64_t *counts, void *to, bool unsort, bool add)
{
    int64_t *sorted_start = (int64_t *)q->workspace, *packed_start = sorted_start + P * e + 1;
    if (P * e == 0 || H == 0) return 0;
    if ((size_t)(P * e + 1) * 2 * sizeof(int64_t) > q->workspace_bytes) return NOT_POSSIBLE;
    MOE_OR_RETURN(
        MOE_LAUNCH(find_starts, 1, SCAN, 0, q->stream, P, e, counts, sorted_start, packed_start, q->fault));
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return by_unit<T>(
            H,
            [=](auto unit) {
                using L = decltype(unit);
                const dim3 block = block_of_rows(WALKERS, H / L::N);
                return MOE_LAUNCH((reorder<T, L>), WALKERS / block.y, block, 0, q->stream, P, e, H / L::N,
                                  (const L *)from, sorted_start, packed_start, (L *)to, unsort, add);
            },
            from, to);
    });
}

// start [E + 1] and aligned_start [E + 1]: the first rows of every expert before and after. Bytes: 8 * 6 E.
__global__ void align_starts(int64_t E, int64_t A, const int64_t *counts, int64_t *aligned, int64_t *start,
                             int64_t *aligned_start, struct moe_cuda_fault *fault)
{
    MOE_SHARED(int64_t, sums, SCAN);
    const auto rows = [=](int64_t e) { return inside(counts[e], INT32_MAX, fault) ? counts[e] : 0; };
    const auto aligned_rows = [=](int64_t e) { return (rows(e) + A - 1) / A * A; };
    running_sums(E, rows, start, sums);
    running_sums(E, aligned_rows, aligned_start, sums);
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x) aligned[e] = aligned_rows(e);
}

// Bytes: 12 T K (and starts, which the cache holds); floor 0.1 us.
__global__ void align_slots(int64_t choices, int64_t E, const int32_t *expert, const int32_t *slot,
                            const int64_t *start, const int64_t *aligned_start, int32_t *aligned_slot,
                            struct moe_cuda_fault *fault)
{
    for (int64_t i = thread_of_grid(); i < choices; i += threads_of_grid()) {
        const int32_t e = expert[i];
        int64_t to = -1;
        if (slot[i] != -1 && inside(e, E, fault) &&
            inside(slot[i] - start[e], start[e + 1] - start[e], fault)) {
            to = aligned_start[e] + slot[i] - start[e];
            if (!inside(to, INT32_MAX, fault)) to = -1;
        }
        aligned_slot[i] = (int32_t)to;
    }
}

} // namespace

MOE_CUDA(align, int64_t T, int64_t E, int64_t K, int64_t A, const int32_t *expert, const int32_t *slot,
         const int64_t *counts, int32_t *aligned_slot, int64_t *aligned)
{
    (void)type; // nothing is real
    int64_t *start = (int64_t *)q->workspace, *aligned_start = start + E + 1;
    if ((size_t)(E + 1) * 2 * sizeof(int64_t) > q->workspace_bytes || A < 1) return NOT_POSSIBLE;
    if (E > 0 || T * K > 0)
        MOE_OR_RETURN(MOE_LAUNCH(align_starts, 1, SCAN, 0, q->stream, E, A, counts, aligned, start,
                                 aligned_start, q->fault));
    if (T * K == 0) return 0;
    return MOE_LAUNCH(align_slots, blocks_for(T * K, ROW_THREADS), threads_for(T * K), 0, q->stream, T * K, E,
                      expert, slot, start, aligned_start, aligned_slot, q->fault);
}

MOE_CUDA(permute, int64_t T, int64_t H, int64_t K, int64_t n, const void *x, const int32_t *slot, void *rows)
{
    if (H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return fill_rows(
            q, T * K, H, n, slot, (R *)rows, [=](int64_t first, int64_t here, const int32_t *owner) {
                if (T * K == 0 || n == 0) return 0;
                return by_unit<R>(
                    H,
                    [=](auto unit) {
                        using L = decltype(unit);
                        const dim3 block = block_of_rows(T, H / L::N);
                        return MOE_LAUNCH(permute<L>, blocks_for(T, block.y), block, 0, q->stream, T,
                                          H / L::N, K, first, here, (const L *)x, slot, owner, (L *)rows);
                    },
                    x, rows);
            });
    });
}

// Bytes: T K H + T H elements (+ T H with add), 4 T K; floor 110 us.
MOE_CUDA(permute_bwd, int64_t T, int64_t H, int64_t K, int64_t n, const void *drows, const int32_t *slot,
         void *dx, bool add)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const struct chosen<R> of = {
            K, 1, n, nullptr, nullptr, slot
        };
        return queue_sum_rows(q, T, H, of, (const R *)drows, (R *)dx, add);
    });
}

MOE_CUDA(sort_rows, int64_t P, int64_t e, int64_t H, const void *rows, const int64_t *counts, void *sorted,
         bool add)
{
    return queue_reorder(q, type, P, e, H, rows, counts, sorted, false, add);
}

MOE_CUDA(unsort_rows, int64_t P, int64_t e, int64_t H, const void *sorted, const int64_t *counts, void *rows,
         bool add)
{
    return queue_reorder(q, type, P, e, H, sorted, counts, rows, true, add);
}
