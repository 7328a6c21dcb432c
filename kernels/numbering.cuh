// numbering.cuh - rows of items in order of key, then item: what topk, limit, select and spread have in
// common.
//
// A stable counting sort in three passes. Each of at most MOST_CHUNKS blocks has a chunk of consecutive items
// and counts its keys; the counts of a key are summed over the chunks; then each block goes through its chunk
// again, by tiles, and an item's row is where its key begins, plus those of its key in earlier chunks and
// tiles, plus those before it in the tile, which it counts. Atomic additions are of integers, and no order
// shows in their sums. Limits: MOST_KEYS keys, 2^31 - 1 items.
#ifndef MOE_NUMBERING_CUH
#define MOE_NUMBERING_CUH

#include "kernels/cuda.cuh"

namespace moe {

constexpr int TILE = 256; // items that a block looks at at once, and its threads
constexpr int MOST_CHUNKS = 256;
constexpr int64_t MOST_KEYS = 4096;
constexpr int NOT_NUMBERED = 1; // cudaErrorInvalidValue
// Of the workspace, from its start; what follows is the caller's.
constexpr size_t NUMBERING_BYTES = MOST_KEYS * (MOST_CHUNKS * sizeof(int32_t) + sizeof(int64_t));

// key [i] in 0 .. n-1, or -1: an item without a row; others are noted, and without.
struct key_of_expert {
    const int32_t *expert;
    int64_t n;
    bool may_lack; // -1 is allowed
    struct moe_cuda_fault *fault;

    __device__ int32_t operator()(int64_t i) const
    {
        const int32_t e = expert[i];
        return (may_lack && e == -1) || !inside(e, n, fault) ? -1 : e;
    }
};

struct write_slot {
    int32_t *slot;

    __device__ void operator()(int64_t i, int32_t row) const { slot[i] = row; }
};

// part [n_keys, chunks]: how many items of each key each block's chunk of `tiles` tiles has.
template <class Key>
__global__ void count_keys(int64_t n, int64_t tiles, int64_t n_keys, const Key key, int32_t *part)
{
    MOE_SHARED_DYNAMIC(int32_t, count); // [n_keys]
    const int64_t first = blockIdx.x * tiles * TILE,
                  end = first + tiles * TILE < n ? first + tiles * TILE : n;
    for (int64_t k = threadIdx.x; k < n_keys; k += TILE) count[k] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < end; i += TILE) {
        const int32_t k = key(i);
        if (k >= 0) atomicAdd(&count[k], 1);
    }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < n_keys; k += TILE) part[k * gridDim.x + blockIdx.x] = count[k];
}

// Of each key, part becomes the sum over the chunks before, and total the sum over all: a thread each, which
// reads several before it adds the first.
template <class I> __global__ void sum_chunks(int64_t n_keys, int chunks, I *part, int64_t *total)
{
    constexpr int AT_ONCE = 16;
    for (int64_t k = thread_of_grid(); k < n_keys; k += threads_of_grid()) {
        I *const own = part + k * chunks;
        I before = 0, count[AT_ONCE];
        for (int first = 0; first < chunks; first += AT_ONCE) {
            for (int c = 0; c < AT_ONCE; c++) count[c] = first + c < chunks ? own[first + c] : I(0);
            for (int c = 0; c < AT_ONCE; c++) {
                if (first + c < chunks) own[first + c] = before;
                before += count[c];
            }
        }
        total[k] = before;
    }
}

// next [n_keys] = sum of total[0] .. total[k - 1]; start [n_keys + 1], of global memory, too, unless NULL.
__device__ inline void find_starts_of_keys(int64_t n_keys, const int64_t *total, int32_t *next,
                                           int64_t *start)
{
    MOE_SHARED(int32_t, sums, TILE);
    const int me = (int)threadIdx.x;
    const int64_t each = (n_keys + TILE - 1) / TILE, first = me * each < n_keys ? me * each : n_keys,
                  end = first + each < n_keys ? first + each : n_keys;
    int32_t own = 0;
    for (int64_t k = first; k < end; k++) own += (int32_t)total[k];
    sums[me] = own;
    for (int by = 1; by < TILE; by *= 2) {
        __syncthreads();
        const int32_t before = me >= by ? sums[me - by] : 0;
        __syncthreads();
        sums[me] += before;
    }
    int32_t at = sums[me] - own;
    for (int64_t k = first; k < end; k++) {
        next[k] = at;
        if (start) start[k] = at;
        at += (int32_t)total[k];
    }
    if (start && me == TILE - 1) start[n_keys] = at;
    __syncthreads();
}

// write(i, row of item i, or -1). start: as above, or NULL.
template <class Key, class Write>
__global__ void place_items(int64_t n, int64_t tiles, int64_t n_keys, const Key key, const Write write,
                            const int32_t *part, const int64_t *total, int64_t *start)
{
    MOE_SHARED_DYNAMIC(int32_t, next); // [n_keys] the next row of each
    MOE_SHARED(lump<int32_t>, tile, TILE / lump<int32_t>::N);
    constexpr int N = lump<int32_t>::N;
    const int me = (int)threadIdx.x;
    const int64_t first = blockIdx.x * tiles * TILE,
                  end = first + tiles * TILE < n ? first + tiles * TILE : n;
    find_starts_of_keys(n_keys, total, next, blockIdx.x == 0 ? start : nullptr);
    for (int64_t k = me; k < n_keys; k += TILE) next[k] += part[k * gridDim.x + blockIdx.x];
    for (int64_t at = first; at < end; at += TILE) {
        const int64_t i = at + me;
        const int32_t own = i < end ? key(i) : -1;
        tile[me / N].at[me % N] = own;
        __syncthreads();
        int32_t before = 0;
        for (int j = 0; j < me / N; j++) {
            const lump<int32_t> four = tile[j];
            for (int l = 0; l < N; l++) before += four.at[l] == own;
        }
        for (int l = 0; l < me % N; l++) before += tile[me / N].at[l] == own;
        if (i < end) write(i, own < 0 ? -1 : next[own] + before);
        __syncthreads();
        if (own >= 0) atomicAdd(&next[own], 1);
    }
}

// Queues the passes; counts [n_keys] (NULL: not wanted) is how many items each key has. Uses NUMBERING_BYTES
// of the workspace. Bytes: twice what the keys are read from, and what is written; 8 n_keys chunks, in the
// cache.
template <class Key, class Write>
int number_items(const struct moe_cuda_queue *q, int64_t n, int64_t n_keys, const Key &key,
                 const Write &write, int64_t *counts, int64_t *start)
{
    int64_t *total = counts ? counts : (int64_t *)q->workspace;
    int32_t *part = (int32_t *)((int64_t *)q->workspace + MOST_KEYS);
    const int64_t all_tiles = divide_up(n, TILE), tiles = divide_up(all_tiles, MOST_CHUNKS),
                  chunks = tiles ? divide_up(all_tiles, tiles) : 0;
    const size_t shared = (size_t)n_keys * sizeof(int32_t);
    if (n > INT32_MAX || n_keys > MOST_KEYS || q->workspace_bytes < NUMBERING_BYTES) return NOT_NUMBERED;
    if (n > 0)
        MOE_OR_RETURN(MOE_LAUNCH(count_keys<Key>, (unsigned)chunks, TILE, shared, q->stream, n, tiles, n_keys,
                                 key, part));
    if (n_keys > 0)
        MOE_OR_RETURN(MOE_LAUNCH(sum_chunks<int32_t>, blocks_for(n_keys, TILE / WARP), TILE, 0, q->stream,
                                 n_keys, (int)chunks, part, total));
    if (n > 0)
        MOE_OR_RETURN(MOE_LAUNCH((place_items<Key, Write>), (unsigned)chunks, TILE, shared, q->stream, n,
                                 tiles, n_keys, key, write, part, total, start));
    return 0;
}

} // namespace moe

#endif
