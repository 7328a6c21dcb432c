// attention.cu - see cuda.h. Simple: products by tiles in shared memory, without tensor cores. A block has a
// tile of ROWS rows (queries, or keys) of one head and sequence, and walks over the tiles of the others that
// the causal mask leaves; 16 x 16 threads have R x R numbers of a product each. A row is taken by chunks of
// PAIRS pairs (i, i + d/2), which the rotary embedding turns together. Forward: the softmax with the largest
// score so far. Backward: one kernel for the sums of each row (statistics), one for each of dq, dk and dv,
// which make the scores again: 10 T S H operations, where 5 would do, and no atomics. Other than in ref.h, a
// number that is not finite also reaches the tokens before it that share its tile: it is multiplied with a
// weight of 0.
#include "kernels/columns.cuh"

using namespace moe;

namespace {

constexpr int SIDE = 16, THREADS = SIDE * SIDE, PAIRS = 16, CHUNK = 2 * PAIRS, CHUNKS = 8;
constexpr int NOT_POSSIBLE = 1; // cudaErrorInvalidValue

// Rows of a tile: what 48 KiB hold.
template <class C> struct tile {
    static constexpr int R = sizeof(C) == 8 ? 2 : 4, ROWS = SIDE * R;
};

// Where everything is: q, k and v are rows of 3 H; turn [positions, d] the cosines, then the sines.
template <class T> struct attention {
    int64_t tokens, H, d, S, tiles; // tiles: of a sequence
    const T *qkv, *dout;
    const wide_t<T> *turn;
    double *log_sum, *mean; // [tokens, heads]: of exp(score), and of p * dp
};

// Rows of one head and sequence: [n], `apart` elements from one to the next; turned unless turn is NULL.
template <class T> struct part {
    const T *at;
    int64_t n, apart, d;
    const wide_t<T> *turn;
};

// The block's head, sequence and tile.
template <class T> struct place {
    int64_t head, first, n, row; // of the sequence: first token, tokens; row: the tile's first

    __device__ place(const attention<T> &a)
    {
        head = blockIdx.y;
        first = blockIdx.x / a.tiles * a.S;
        n = a.tokens - first < a.S ? a.tokens - first : a.S;
        row = (int64_t)(blockIdx.x % a.tiles) * tile<wide_t<T>>::ROWS;
    }
    __device__ part<T> of_qkv(const attention<T> &a, int which) const
    {
        return {a.qkv + (first * 3 + which) * a.H + head * a.d, n, 3 * a.H, a.d, which < 2 ? a.turn : NULL};
    }
    __device__ part<T> of_dout(const attention<T> &a) const
    {
        return {a.dout + first * a.H + head * a.d, n, a.H, a.d, NULL};
    }
    // Of a row of this sequence: its entry of log_sum and mean.
    __device__ int64_t entry(const attention<T> &a, int64_t i) const
    {
        return (first + i) * (a.H / a.d) + head;
    }
};

// to [ROWS, CHUNK + 1] = the pairs pair .. pair + PAIRS - 1 of the rows row .., first halves before second
// ones; zeros beyond the end. The odd width keeps columns in different banks.
template <class T> __device__ void stage(const part<T> &from, int64_t row, int64_t pair, wide_t<T> *to)
{
    using C = wide_t<T>;
    const int64_t half = from.d / 2;
    for (int i = (int)threadIdx.x; i < tile<C>::ROWS * PAIRS; i += THREADS) {
        const int64_t r = row + i / PAIRS, p = pair + i % PAIRS;
        C a = 0, b = 0;
        if (r < from.n && p < half) {
            const T *at = from.at + r * from.apart + p;
            a = load(at);
            b = load(at + half);
            if (from.turn) {
                const C *turn = from.turn + r * from.d + p, cosine = turn[0], sine = turn[half];
                const C turned = a * cosine - b * sine;
                b = b * cosine + a * sine;
                a = turned;
            }
        }
        to[i / PAIRS * (CHUNK + 1) + i % PAIRS] = a;
        to[i / PAIRS * (CHUNK + 1) + PAIRS + i % PAIRS] = b;
    }
}

// s [R][R]: the dot products of rows row + y + SIDE i of x with rows column + x + SIDE j of y. left, right:
// shared, as stage fills them; they are free when all threads come here.
template <class T, int R = tile<wide_t<T>>::R>
__device__ void dots(const part<T> &x, int64_t row, const part<T> &y, int64_t column, wide_t<T> *left,
                     wide_t<T> *right, wide_t<T> (&s)[R][R])
{
    using C = wide_t<T>;
    const int at_x = (int)threadIdx.x % SIDE, at_y = (int)threadIdx.x / SIDE;
    for (int i = 0; i < R; i++)
        for (int j = 0; j < R; j++) s[i][j] = 0;
    for (int64_t pair = 0; pair < x.d / 2; pair += PAIRS) {
        stage(x, row, pair, left);
        stage(y, column, pair, right);
        __syncthreads();
        for (int k = 0; k < CHUNK; k++) {
            C a[R], b[R];
            for (int i = 0; i < R; i++) a[i] = left[(at_y + SIDE * i) * (CHUNK + 1) + k];
            for (int j = 0; j < R; j++) b[j] = right[(at_x + SIDE * j) * (CHUNK + 1) + k];
            for (int i = 0; i < R; i++)
                for (int j = 0; j < R; j++) s[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
}

// A thread's columns of the result: of chunk c the pair pair + PAIRS c + x, its two halves.
template <class C> struct sums {
    C at[CHUNKS][tile<C>::R][2];

    __device__ void clear()
    {
        MOE_UNROLL for (int c = 0; c < CHUNKS; c++) for (int i = 0; i < tile<C>::R; i++) at[c][i][0] =
            at[c][i][1] = 0;
    }
    __device__ void scale(const C (&by)[tile<C>::R])
    {
        MOE_UNROLL for (int c = 0; c < CHUNKS; c++) for (int i = 0; i < tile<C>::R;
                                                         i++) for (int j = 0; j < 2; j++) at[c][i][j] *=
            by[i];
    }

    // += weight [ROWS, ROWS + 1] times the rows `column` .. of y. left: shared. All threads have written
    // their weights; when this returns, all have read them.
    template <class T>
    __device__ void add(const C *weight, const part<T> &y, int64_t column, int64_t pair, C *left)
    {
        constexpr int R = tile<C>::R, ROWS = tile<C>::ROWS;
        const int at_x = (int)threadIdx.x % SIDE, at_y = (int)threadIdx.x / SIDE;
        MOE_UNROLL for (int c = 0; c < CHUNKS; c++)
        {
            if (c > 0 && pair + c * PAIRS >= y.d / 2) break;
            stage(y, column, pair + c * PAIRS, left);
            __syncthreads();
            for (int k = 0; k < ROWS; k++) {
                const C a = left[k * (CHUNK + 1) + at_x], b = left[k * (CHUNK + 1) + PAIRS + at_x];
                for (int i = 0; i < R; i++) {
                    const C w = weight[(at_y + SIDE * i) * (ROWS + 1) + k];
                    at[c][i][0] += w * a;
                    at[c][i][1] += w * b;
                }
            }
            __syncthreads();
        }
    }

    // to: the first row of the head, `apart` elements from one row to the next, n rows from `row` on; turned
    // back unless turn is NULL.
    template <class T>
    __device__ void write(const part<T> &like, int64_t row, int64_t pair, T *to, int64_t apart, bool add_to)
    {
        const int64_t half = like.d / 2;
        MOE_UNROLL for (int c = 0; c < CHUNKS; c++) for (int i = 0; i < tile<C>::R; i++)
        {
            const int64_t r = row + threadIdx.x / SIDE + SIDE * i, p = pair + c * PAIRS + threadIdx.x % SIDE;
            if (r >= like.n || p >= half) continue;
            C a = at[c][i][0], b = at[c][i][1];
            if (like.turn) {
                const C *turn = like.turn + r * like.d + p, cosine = turn[0], sine = turn[half];
                a = at[c][i][0] * cosine + at[c][i][1] * sine;
                b = at[c][i][1] * cosine - at[c][i][0] * sine;
            }
            put(&to[r * apart + p], a, add_to);
            put(&to[r * apart + p + half], b, add_to);
        }
    }
};

// Of a thread's rows, as far as it has come: the largest score, which its 16 threads share, and its own part
// of the sum of exp(score - largest).
template <class C> struct running {
    C largest[tile<C>::R];
    double sum[tile<C>::R];

    __device__ void clear()
    {
        for (int i = 0; i < tile<C>::R; i++) {
            largest[i] = -(C)INFINITY;
            sum[i] = 0;
        }
    }

    // s = exp(s - largest), of the keys up to the query; by: what sums so far are multiplied with.
    __device__ void take_in(int64_t query, int64_t key, C scale, C (&s)[tile<C>::R][tile<C>::R],
                            C (&by)[tile<C>::R])
    {
        for (int i = 0; i < tile<C>::R; i++) {
            C top = largest[i];
            for (int j = 0; j < tile<C>::R; j++) {
                const int64_t after =
                    key + threadIdx.x % SIDE + SIDE * j - query - threadIdx.x / SIDE - SIDE * i;
                s[i][j] = after > 0 ? -(C)INFINITY : s[i][j] * scale;
                if (s[i][j] > top) top = s[i][j];
            }
            for (int apart = SIDE / 2; apart; apart /= 2) {
                const C other = __shfl_xor_sync(ALL_LANES, top, apart);
                if (other > top) top = other;
            }
            by[i] = top == largest[i] ? C(1) : exponential(largest[i] - top);
            largest[i] = top;
            sum[i] *= (double)by[i];
            for (int j = 0; j < tile<C>::R; j++) { // a NaN stays one, -inf is nothing
                s[i][j] = s[i][j] == -(C)INFINITY ? C(0) : exponential(s[i][j] - top);
                sum[i] += (double)s[i][j];
            }
        }
    }
};

// Over the 16 threads of a row.
template <class C> __device__ inline C row_sum(C x)
{
    for (int apart = SIDE / 2; apart; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}

// turn [n, d]: of each position and pair the angle's cosine, and half a row later its sine.
template <class C> __global__ void turns(int64_t n, int64_t d, C *turn)
{
    const int64_t half = d / 2;
    for (int64_t i = thread_of_grid(); i < n * half; i += threads_of_grid()) {
        const int64_t t = i / half, p = i % half;
        const double angle = (double)t * pow(10000., -2. * (double)p / (double)d);
        turn[t * d + p] = (C)cos(angle);
        turn[t * d + half + p] = (C)sin(angle);
    }
}

// Bytes: 4 T H elements (and k and v again for each tile of queries, from caches); floor 49 us. It is bound
// by 2 T S H operations, which take longer.
template <class T> __global__ void forward(const attention<T> a, T *o)
{
    using C = wide_t<T>;
    constexpr int R = tile<C>::R, ROWS = tile<C>::ROWS;
    MOE_SHARED(C, left, ROWS * (CHUNK + 1));
    MOE_SHARED(C, right, ROWS * (CHUNK + 1));
    MOE_SHARED(C, weight, ROWS * (ROWS + 1));
    const place<T> here(a);
    const part<T> q = here.of_qkv(a, 0), k = here.of_qkv(a, 1), v = here.of_qkv(a, 2);
    const int64_t pair = (int64_t)blockIdx.z * CHUNKS * PAIRS;
    const C scale = (C)(1 / sqrt((double)a.d));
    running<C> row;
    sums<C> out;
    C s[R][R], by[R];
    if (here.row >= here.n) return;
    row.clear();
    out.clear();
    for (int64_t key = 0; key <= here.row; key += ROWS) {
        dots(q, here.row, k, key, left, right, s);
        row.take_in(here.row, key, scale, s, by);
        for (int i = 0; i < R; i++)
            for (int j = 0; j < R; j++)
                weight[(threadIdx.x / SIDE + SIDE * i) * (ROWS + 1) + threadIdx.x % SIDE + SIDE * j] =
                    s[i][j];
        out.scale(by);
        out.add(weight, v, key, pair, left);
    }
    for (int i = 0; i < R; i++) by[i] = (C)(1 / row_sum(row.sum[i]));
    out.scale(by);
    out.write(v, here.row, pair, o + here.first * a.H + here.head * a.d, a.H, false);
}

// Of each query: the logarithm of its sum of exp(score), and the mean of dp = dout . v by its softmax.
template <class T> __global__ void statistics(const attention<T> a)
{
    using C = wide_t<T>;
    constexpr int R = tile<C>::R, ROWS = tile<C>::ROWS;
    MOE_SHARED(C, left, ROWS * (CHUNK + 1));
    MOE_SHARED(C, right, ROWS * (CHUNK + 1));
    const place<T> here(a);
    const C scale = (C)(1 / sqrt((double)a.d));
    running<C> row;
    double mean[R] = {};
    C s[R][R], dp[R][R], by[R];
    if (here.row >= here.n) return;
    row.clear();
    for (int64_t key = 0; key <= here.row; key += ROWS) {
        dots(here.of_qkv(a, 0), here.row, here.of_qkv(a, 1), key, left, right, s);
        dots(here.of_dout(a), here.row, here.of_qkv(a, 2), key, left, right, dp);
        row.take_in(here.row, key, scale, s, by);
        for (int i = 0; i < R; i++) {
            mean[i] *= (double)by[i];
            for (int j = 0; j < R; j++) mean[i] += (double)(s[i][j] * dp[i][j]);
        }
    }
    for (int i = 0; i < R; i++) {
        const double sum = row_sum(row.sum[i]), all = row_sum(mean[i]);
        const int64_t query = here.row + threadIdx.x / SIDE + SIDE * i;
        if (threadIdx.x % SIDE != 0 || query >= here.n) continue;
        a.log_sum[here.entry(a, query)] = row.largest[i] + log(sum);
        a.mean[here.entry(a, query)] = all / sum;
    }
}

enum gradient { OF_Q, OF_K, OF_V };

// dq: rows are queries; its sum is over keys, of dscore times k. dk, dv: rows are keys; the sums are over
// queries, of dscore times q, and p times dout. dscore = p (dp - mean) / sqrt(d).
// Bytes: 5 T H elements (+ T H with add), of dv 3 T H (+ T H), once more for each tile; floor 61 us. They are
// bound by 3, 3 and 2 times T S H operations (p: 1, dp: 1), after 2 of the statistics.
template <class T, enum gradient G> __global__ void backward(const attention<T> a, T *dqkv, bool add)
{
    using C = wide_t<T>;
    constexpr int R = tile<C>::R, ROWS = tile<C>::ROWS;
    MOE_SHARED(C, left, ROWS * (CHUNK + 1));
    MOE_SHARED(C, right, ROWS * (CHUNK + 1));
    MOE_SHARED(C, weight, ROWS * (ROWS + 1));
    const place<T> here(a);
    const part<T> q = here.of_qkv(a, 0), k = here.of_qkv(a, 1), v = here.of_qkv(a, 2), d = here.of_dout(a);
    const int64_t pair = (int64_t)blockIdx.z * CHUNKS * PAIRS;
    const int64_t begin = G == OF_Q ? 0 : here.row, end = G == OF_Q ? here.row + 1 : here.n;
    const C scale = (C)(1 / sqrt((double)a.d));
    sums<C> out;
    C s[R][R], dp[R][R];
    if (here.row >= here.n) return;
    out.clear();
    for (int64_t other = begin; other < end; other += ROWS) {
        dots(G == OF_Q ? q : k, here.row, G == OF_Q ? k : q, other, left, right, s);
        if (G != OF_V) dots(G == OF_Q ? d : v, here.row, G == OF_Q ? v : d, other, left, right, dp);
        for (int i = 0; i < R; i++)
            for (int j = 0; j < R; j++) {
                const int64_t own = here.row + threadIdx.x / SIDE + SIDE * i,
                              its = other + threadIdx.x % SIDE + SIDE * j, query = G == OF_Q ? own : its,
                              key = G == OF_Q ? its : own;
                C w = 0;
                if (key <= query && query < here.n) {
                    const int64_t entry = here.entry(a, query);
                    w = exponential((C)((double)(s[i][j] * scale) - a.log_sum[entry]));
                    if (G != OF_V) w *= (C)(dp[i][j] - a.mean[entry]) * scale;
                }
                weight[(threadIdx.x / SIDE + SIDE * i) * (ROWS + 1) + threadIdx.x % SIDE + SIDE * j] = w;
            }
        out.add(weight, G == OF_Q ? k : G == OF_K ? q : d, other, pair, left);
    }
    out.write(G == OF_Q   ? q
              : G == OF_K ? k
                          : v,
              here.row, pair, dqkv + (here.first * 3 + (int)G) * a.H + here.head * a.d, 3 * a.H, add);
}

// ---- host ----

int64_t positions(int64_t T, int64_t S)
{
    return S < T ? S : T;
}

// What the kernels get; the workspace begins with log_sum and mean, then turn, which is queued.
template <class T>
int prepare(const struct moe_cuda_queue *q, int64_t tokens, int64_t H, int64_t A, int64_t S, const void *qkv,
            const void *dout, attention<T> *a)
{
    using C = wide_t<T>;
    if (A <= 0 || S <= 0 || H % A || H / A % 2 ||
        q->workspace_bytes < moe_cuda_attention_bytes(tokens, H, A, S))
        return NOT_POSSIBLE;
    double *stats = (double *)q->workspace;
    C *turn = (C *)(stats + 2 * tokens * A);
    const int64_t n = positions(tokens, S), d = H / A;
    *a = {tokens,
          H,
          d,
          S,
          divide_up(n, tile<C>::ROWS),
          (const T *)qkv,
          (const T *)dout,
          turn,
          stats,
          stats + tokens * A};
    return MOE_LAUNCH(turns<C>, blocks_for(n * (d / 2), THREADS), THREADS, 0, q->stream, n, d, turn);
}

template <class T> dim3 blocks_of(const attention<T> &a)
{
    return dim3((unsigned)(divide_up(a.tokens, a.S) * a.tiles), (unsigned)(a.H / a.d),
                (unsigned)divide_up(a.d, 2 * PAIRS * CHUNKS));
}

} // namespace

size_t moe_cuda_attention_bytes(int64_t T, int64_t H, int64_t A, int64_t S)
{
    const int64_t doubles = A > 0 ? 2 * T * A + positions(T, S) * (H / A) : 0;
    return (size_t)doubles * sizeof(double);
}

MOE_CUDA(attention, int64_t T, int64_t H, int64_t A, int64_t S, const void *qkv, void *o)
{
    if (T == 0 || H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        attention<R> a;
        MOE_OR_RETURN(prepare(q, T, H, A, S, qkv, NULL, &a));
        return MOE_LAUNCH(forward<R>, blocks_of(a), THREADS, 0, q->stream, a, (R *)o);
    });
}

MOE_CUDA(attention_bwd, int64_t T, int64_t H, int64_t A, int64_t S, const void *qkv, const void *dout,
         void *dqkv, bool add)
{
    if (T == 0 || H == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        attention<R> a;
        MOE_OR_RETURN(prepare(q, T, H, A, S, qkv, dout, &a));
        const dim3 blocks = blocks_of(a);
        const dim3 once(blocks.x, blocks.y);
        MOE_OR_RETURN(MOE_LAUNCH(statistics<R>, once, THREADS, 0, q->stream, a));
        MOE_OR_RETURN(MOE_LAUNCH((backward<R, OF_Q>), blocks, THREADS, 0, q->stream, a, (R *)dqkv, add));
        MOE_OR_RETURN(MOE_LAUNCH((backward<R, OF_K>), blocks, THREADS, 0, q->stream, a, (R *)dqkv, add));
        return MOE_LAUNCH((backward<R, OF_V>), blocks, THREADS, 0, q->stream, a, (R *)dqkv, add);
    });
}
