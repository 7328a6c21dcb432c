// embed.cu - see cuda.h. A floor time is for 4,096 tokens with H = 7,168 of bf16 (58.7 MB an array [T,H]) at
// 4.8 TB/s.
#include "kernels/columns.cuh"

using namespace moe;

namespace {

constexpr int THREADS = 256, TILE = 256, AT_ONCE = 4;

// x = the rows of emb that tokens name. Bytes: 2 T H elements + 4 T; floor 24.5 us.
template <class L>
__global__ void embed(int64_t tokens, int64_t units, int64_t V, const int32_t *token, const L *emb, L *x,
                      struct moe_cuda_fault *fault)
{
    const int64_t c = of_column();
    if (c >= units) return;
    for (int64_t t = of_row(); t < tokens; t += rows_apart()) {
        const int64_t id = token[t];
        if (inside(id, V, fault)) x[t * units + c] = emb[id * units + c];
    }
}

template <class I> __global__ void clear(int64_t n, I *x)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) x[i] = 0;
}

// place [n] += for each token of a tile those of another tile that come before it, by id, then by t. Sums of
// integers: their order does not matter. n^2 comparisons: 17 million for 4,096 tokens, 5 us.
template <class I> __global__ void rank(int64_t n, int64_t tiles, const I *token, I *place)
{
    MOE_SHARED(I, other, TILE);
    for (int64_t b = blockIdx.x; b < tiles * tiles; b += gridDim.x) {
        const int64_t t = b / tiles * TILE + threadIdx.x, first = b % tiles * TILE;
        const int n_others = (int)(n - first < TILE ? n - first : TILE);
        __syncthreads(); // other is still read from the pair of tiles before
        if ((int)threadIdx.x < n_others) other[threadIdx.x] = token[first + threadIdx.x];
        __syncthreads();
        if (t >= n) continue;
        const I id = token[t];
        I before = 0;
        for (int i = 0; i < n_others; i++) before += other[i] < id || (other[i] == id && first + i < t);
        if (before) atomicAdd(&place[t], before);
    }
}

// In order of id, then t: row [n] the tokens, id [n] their ids.
template <class I> __global__ void sort(int64_t n, const I *token, const I *place, I *row, I *id)
{
    for (int64_t t = thread_of_grid(); t < n; t += threads_of_grid()) {
        row[place[t]] = (I)t;
        id[place[t]] = token[t];
    }
}

// The thread whose row of the order is the first of its id adds the column of all of them, in order of t.
// Bytes: T H elements, and for each id H (twice with add), 8 T; floor 24.5 us, when no token comes twice.
template <class T, class L>
__global__ void sum_rows(int64_t n, int64_t units, int64_t V, const int32_t *row, const int32_t *id,
                         const L *dx, L *demb, bool add, struct moe_cuda_fault *fault)
{
    const int64_t c = of_column();
    if (c >= units) return;
    for (int64_t first = of_row(); first < n; first += rows_apart()) {
        const int32_t own = id[first];
        if ((first > 0 && id[first - 1] == own) || !inside(own, V, fault)) continue;
        L *to = demb + own * units + c, out = {};
        wide_t<T> sum[L::N];
        if (add) out = *to;
        for (int j = 0; j < L::N; j++) sum[j] = load(&out.at[j]);
        for (int64_t i = first; i < n && id[i] == own; i += AT_ONCE) {
            L in[AT_ONCE] = {};
            bool here[AT_ONCE];
            for (int a = 0; a < AT_ONCE; a++) {
                here[a] = i + a < n && id[i + a] == own;
                if (here[a]) in[a] = dx[row[i + a] * units + c];
            }
            for (int a = 0; a < AT_ONCE; a++)
                for (int j = 0; j < L::N; j++)
                    if (here[a]) sum[j] += load(&in[a].at[j]);
        }
        for (int j = 0; j < L::N; j++) store(&out.at[j], sum[j]);
        *to = out;
    }
}

// For n tokens, as many as the workspace has room for.
template <class T>
int queue_bwd(const struct moe_cuda_queue *q, int64_t n, int64_t H, int64_t V, const int32_t *token,
              const T *dx, T *demb, bool add)
{
    int32_t *place = (int32_t *)q->workspace, *row = place + n, *id = row + n;
    const int64_t tiles = divide_up(n, TILE);
    MOE_OR_RETURN(MOE_LAUNCH(clear<int32_t>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, place));
    MOE_OR_RETURN(
        MOE_LAUNCH(rank<int32_t>, blocks_for(tiles * tiles, 1), TILE, 0, q->stream, n, tiles, token, place));
    MOE_OR_RETURN(MOE_LAUNCH(sort<int32_t>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, token,
                             (const int32_t *)place, row, id));
    return by_unit<T>(
        H,
        [=](auto unit) {
            using L = decltype(unit);
            const dim3 block = column_block(H / L::N);
            return MOE_LAUNCH((sum_rows<T, L>), column_grid(n, H / L::N, block), block, 0, q->stream, n,
                              H / L::N, V, (const int32_t *)row, (const int32_t *)id, (const L *)dx,
                              (L *)demb, add, q->fault);
        },
        dx, demb);
}

} // namespace

MOE_CUDA(embed, int64_t T, int64_t H, int64_t V, const int32_t *token, const void *emb, void *x)
{
    if (T == 0 || H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            H,
            [=](auto unit) {
                using L = decltype(unit);
                const dim3 block = column_block(H / L::N);
                return MOE_LAUNCH(embed<L>, column_grid(T, H / L::N, block), block, 0, q->stream, T, H / L::N,
                                  V, token, (const L *)emb, (L *)x, q->fault);
            },
            emb, x);
    });
}

// Without add, all of demb becomes 0 first: V H elements more. More tokens than the
// workspace has 12 bytes for (699,050) are taken by parts, after each of which bf16 is rounded.
MOE_CUDA(embed_bwd, int64_t T, int64_t H, int64_t V, const int32_t *token, const void *dx, void *demb,
         bool add)
{
    if (!add) MOE_OR_RETURN(moe_cuda_zero(q, type, V * H, demb));
    if (H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        const int64_t most = (int64_t)(q->workspace_bytes / (3 * sizeof(int32_t)));
        for (int64_t first = 0; first < T; first += most)
            MOE_OR_RETURN(queue_bwd<R>(q, T - first < most ? T - first : most, H, V, token + first,
                                       (const R *)dx + first * H, (R *)demb, add || first > 0));
        return 0;
    });
}
