// limit.cu - see cuda.h: what capacity rules keep, and rows of a part of the choices. Floor times are for
// 4,096 tokens, 256 experts, top-8 (0.13 MB an array of indices [T,K]) at 4.8 TB/s: all are below what a
// launch takes. Limits: MOST_KEYS experts or members, 2^31 - 1 pairs, 2^31 - 1 - TILE choices. By probability
// NaN comes after all numbers, and of NaN the earlier first (ref.h leaves NaN where its insertion does); C of
// them stay all the same.
#include "kernels/numbering.cuh"

using namespace moe;

namespace {

constexpr int THREADS = TILE;

// Bytes: 8 E.
__global__ void largest(int64_t E, const int64_t *counts, int64_t *to)
{
    MOE_SHARED(int64_t, part, WARP);
    int64_t most = 0;
    for (int64_t e = threadIdx.x; e < E; e += blockDim.x)
        if (counts[e] > most) most = counts[e];
    most = warp_max(most);
    if (lane() == 0) part[threadIdx.x / WARP] = most;
    __syncthreads();
    most = warp_max((unsigned)lane() < blockDim.x / WARP ? part[lane()] : int64_t(0));
    if (threadIdx.x == 0) *to = most;
}

// y [n] = value, and z [n] unless NULL.
__global__ void set(int64_t n, int64_t value, int64_t *y, int64_t *z)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) {
        y[i] = value;
        if (z) z[i] = value;
    }
}

// ---- limit ----

struct choices {
    int64_t E, K, C, G, n_groups;
    enum moe_ref_order order;
    uint64_t seed;
    const int32_t *expert; // [T,K]
    const int32_t *sorted; // [start[E]] choices in order of expert, then choice
    const int64_t *start;  // [E + 1] where an expert's begin
};

// sorted, in place of rows; a choice of no expert is dropped.
struct write_sorted {
    int32_t *sorted, *slot;

    __device__ void operator()(int64_t i, int32_t at) const
    {
        if (at >= 0)
            sorted[at] = (int32_t)i;
        else
            slot[i] = -1;
    }
};

// The finaliser of splitmix64 (Steele, Lea, Flood 2014), as in ref.h.
__device__ inline uint64_t hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
    x = (x ^ x >> 27) * 0x94d049bb133111ebU;
    return x ^ x >> 31;
}

// Rises with the number; NaN is below all numbers, and zeros are equal.
__device__ inline uint64_t rank_of(double x)
{
    if (x != x) return 0;
    if (x == 0) x = 0; // -0
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

// Of choices of the same expert, the larger comes first, and of equal ones the earlier.
template <class T> __device__ inline uint64_t key_of(const struct choices &c, const T *prob, int32_t i)
{
    const uint32_t K = (uint32_t)c.K, t = (uint32_t)i / K;
    switch (c.order) {
    case MOE_REF_BY_PROB: return rank_of((double)load(&prob[t * c.E + c.expert[i]]));
    case MOE_REF_BY_CHOICE: return UINT64_MAX - ((uint32_t)i - t * K);
    case MOE_REF_RANDOM: return hash(c.seed + t);
    default: return 0; // all equal: the earlier
    }
}

// The first of sorted [low .. high - 1] that is not below i.
__device__ inline int32_t find(const int32_t *sorted, int32_t low, int32_t high, int64_t i)
{
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (sorted[middle] < i)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Where, in sorted, the choices of one group and expert are.
struct segment {
    int32_t first, end;
    int64_t group;
};
__device__ inline struct segment segment_of(const struct choices &c, int32_t i)
{
    const int32_t e = c.expert[i];
    struct segment s = {(int32_t)c.start[e], (int32_t)c.start[e + 1], 0};
    if (c.n_groups == 1) return s;
    s.group = (uint32_t)i / (uint32_t)(c.G * c.K);
    s.first = find(c.sorted, s.first, s.end, s.group * c.G * c.K);
    s.end = find(c.sorted, s.first, s.end, (s.group + 1) * c.G * c.K);
    return s;
}

// Each thread of a block has a place `at` in sorted. Result: how many of its segment precede it:
// precedes(key, earlier) says so of each, of which the block brings the keys by tiles; key(i) is of choice i,
// earlier: before it in sorted.
template <class Key, class Precedes>
__device__ inline int32_t count_in_segment(const struct choices &c, int64_t n, int32_t at,
                                           const struct segment &s, Key key, Precedes precedes)
{
    MOE_SHARED(uint64_t, keys, TILE);
    MOE_SHARED(int32_t, window, 2);
    const int me = (int)threadIdx.x;
    int32_t count = 0;
    __syncthreads(); // both may still be read from the call before
    if (me == 0) window[0] = s.first;
    if (at == n - 1 || (at < n && me == TILE - 1)) window[1] = s.end; // the last place of the block
    __syncthreads();
    for (int32_t from = window[0]; from < window[1]; from += TILE) {
        if (from + me < window[1]) keys[me] = key(c.sorted[from + me]);
        __syncthreads();
        const int low = s.first > from ? s.first - from : 0, high = s.end - from < TILE ? s.end - from : TILE,
                  own = at - from < high ? at - from : high;
        int j = low;
        for (; j < own; j++) count += precedes(keys[j], true);
        for (; j < high; j++) count += precedes(keys[j], false);
        __syncthreads();
    }
    return count;
}

// slot = 0 for what stays, -1 for what is dropped. Bytes: 16 T K, and keys (for BY_PROB a sector of prob
// each) once for each tile of places that looks at them: floor 0.3 us where segments are as long as a tile.
// Comparisons: for each choice as many as its group makes of its expert.
template <class T> __global__ void keep(const struct choices c, const T *prob, int32_t *slot)
{
    const int64_t n = c.start[c.E];
    for (int64_t tile = (int64_t)blockIdx.x * TILE; tile < n; tile += (int64_t)gridDim.x * TILE) {
        const int32_t at = (int32_t)(tile + threadIdx.x);
        struct segment s = {0, 0, 0};
        int32_t i = 0, before = 0;
        uint64_t own = 0;
        if (at < n) {
            i = c.sorted[at];
            s = segment_of(c, i);
            own = key_of(c, prob, i);
        }
        if (c.order == MOE_REF_BY_POSITION)
            before = at - s.first;
        else
            before = count_in_segment(
                c, n, at, s, [&](int32_t j) { return key_of(c, prob, j); },
                [=](uint64_t key, bool earlier) { return earlier ? key >= own : key > own; });
        if (at < n) slot[i] = before < c.C ? 0 : -1;
    }
}

// slot = the row of what stays, where each group of each expert has C rows. Others may read a slot before or
// after it is written: it is not negative either way. Bytes: 16 T K; comparisons as above.
__global__ void place_padded(const struct choices c, int32_t *slot)
{
    const int64_t n = c.start[c.E];
    for (int64_t tile = (int64_t)blockIdx.x * TILE; tile < n; tile += (int64_t)gridDim.x * TILE) {
        const int32_t at = (int32_t)(tile + threadIdx.x);
        struct segment s = {0, 0, 0};
        int32_t i = 0;
        if (at < n) {
            i = c.sorted[at];
            s = segment_of(c, i);
        }
        const int32_t before = count_in_segment(
            c, n, at, s, [&](int32_t j) { return (uint64_t)(slot[j] >= 0); },
            [=](uint64_t stays, bool earlier) { return earlier && stays; });
        if (at < n && slot[i] >= 0) slot[i] = (int32_t)((c.expert[i] * c.n_groups + s.group) * c.C + before);
    }
}

// Bytes: 12 n.
__global__ void name_kept(int64_t n, const int32_t *expert, const int32_t *slot, int32_t *kept_expert)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid())
        kept_expert[i] = slot[i] >= 0 ? expert[i] : -1;
}

int queue_set(const struct moe_cuda_queue *q, int64_t n, int64_t value, int64_t *y, int64_t *z)
{
    return MOE_LAUNCH(set, blocks_for(n, THREADS), (unsigned)(n < THREADS ? n : THREADS), 0, q->stream, n,
                      value, y, z);
}

// ---- select and spread ----

// Experts first .. first + n - 1; all others have no row.
struct key_in_range {
    const int32_t *expert;
    int64_t first, n;

    __device__ int32_t operator()(int64_t i) const
    {
        const int64_t e = expert[i] - first;
        return e >= 0 && e < n ? (int32_t)e : -1;
    }
};
struct write_selected {
    const int32_t *expert;
    int64_t first;
    int32_t *slot, *local;

    __device__ void operator()(int64_t i, int32_t row) const
    {
        slot[i] = row;
        if (local) local[i] = row == -1 ? -1 : (int32_t)(expert[i] - first);
    }
};

// Item t * P + p is the pair of token t and member p: with a row where the member has any of the token's
// experts.
struct key_of_member {
    const int32_t *expert;
    int64_t E, K;
    uint32_t P;
    struct moe_cuda_fault *fault;

    __device__ int32_t operator()(int64_t i) const
    {
        const uint32_t t = (uint32_t)i / P, p = (uint32_t)i - t * P;
        const int64_t each = E / P, first = p * each;
        bool any = false;
        for (int64_t k = t * K; k < (t + 1) * K; k++) {
            const int32_t e = expert[k];
            if (e != -1 && inside(e, E, fault)) any = any || (e >= first && e < first + each);
        }
        return any ? (int32_t)p : -1;
    }
};

} // namespace

MOE_CUDA(largest, int64_t E, const int64_t *counts, int64_t *largest)
{
    (void)type; // nothing is real
    return MOE_LAUNCH(::largest, 1, THREADS, 0, q->stream, E, counts, largest);
}

MOE_CUDA(set, int64_t value, int64_t *y)
{
    (void)type; // nothing is real
    return queue_set(q, 1, value, y, nullptr);
}

// kept_expert holds the choices in order of expert until it is known what stays.
MOE_CUDA(limit, int64_t T, int64_t E, int64_t K, int64_t C, int64_t G, enum moe_ref_order order, bool pad,
         uint64_t seed, const void *prob, const int32_t *expert, int32_t *slot, int32_t *kept_expert,
         int64_t *kept, int64_t *arrive)
{
    const int64_t n = T * K, n_groups = T > G ? divide_up(T, G) : 1;
    int64_t *start = (int64_t *)((char *)q->workspace + NUMBERING_BYTES);
    const struct choices c = {E, K, C, G, n_groups, order, seed, expert, kept_expert, start};
    if (n > INT32_MAX - TILE) return NOT_NUMBERED; // places of a tile are int32, also behind the last
    if (q->workspace_bytes < NUMBERING_BYTES + (MOST_KEYS + 1) * sizeof *start) return NOT_NUMBERED;
    if (pad && (double)E * (double)n_groups * (double)C > INT32_MAX) return NOT_NUMBERED;
    MOE_OR_RETURN(number_items(q, n, E, key_of_expert{expert, E, false, q->fault},
                               write_sorted{kept_expert, slot}, nullptr, start));
    if (n > 0) {
        MOE_OR_RETURN(by_type(type, [=](auto t) {
            using R = decltype(t);
            return MOE_LAUNCH(keep<R>, blocks_for(n, TILE), TILE, 0, q->stream, c, (const R *)prob, slot);
        }));
        if (pad) MOE_OR_RETURN(MOE_LAUNCH(place_padded, blocks_for(n, TILE), TILE, 0, q->stream, c, slot));
        MOE_OR_RETURN(MOE_LAUNCH(name_kept, blocks_for(n, THREADS), THREADS, 0, q->stream, n, expert, slot,
                                 kept_expert));
    }
    if (!pad)
        return number_items(q, n, E, key_of_expert{kept_expert, E, true, q->fault}, write_slot{slot}, kept,
                            nullptr);
    return E > 0 ? queue_set(q, E, C * n_groups, kept, arrive) : 0;
}

// Bytes: 12 T K (16 with local); floor 0.1 us.
MOE_CUDA(select, int64_t T, int64_t e, int64_t K, int64_t f, const int32_t *expert, int32_t *slot,
         int32_t *local)
{
    (void)type; // nothing is real
    return number_items(q, T * K, e, key_in_range{expert, f, e}, write_selected{expert, f, slot, local},
                        nullptr, nullptr);
}

// Bytes: 4 T P, and 8 T K that the cache gives to all members; floor 0.3 us for 64 members.
MOE_CUDA(spread, int64_t T, int64_t E, int64_t K, int64_t P, const int32_t *expert, int32_t *slot,
         int64_t *tokens_for)
{
    (void)type; // nothing is real
    return number_items(q, T * P, P, key_of_member{expert, E, K, (uint32_t)P, q->fault}, write_slot{slot},
                        tokens_for, nullptr);
}
