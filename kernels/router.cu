// router.cu - see cuda.h: from logits to choices and slots, weights of chosen experts, the load-balancing
// loss, and their gradients. A warp has a token, by lumps where rows allow it. Floor times are for 4,096
// tokens, 256 experts, top-8, bf16 (2.1 MB an array [T,E], 0.13 MB one of indices [T,K]) at 4.8 TB/s: all are
// below what a launch takes. Limits: MOST_KEYS experts where slots are numbered. A token's experts are
// different ones. Of probabilities NaN comes after all numbers, and of NaN the lower ids first: with softmax,
// where one makes all of them NaN, that is ref.h; with sigmoids ref.h leaves NaN where its insertion does.
#include "kernels/numbering.cuh"

#include <climits>

using namespace moe;

namespace {

constexpr int THREADS = 256;
constexpr size_t MOST_SHARED = 48 << 10;
constexpr int MOST_PARTS = 256; // of a sum over the grid

// ---- units: a lump of a row, or an element ----

__device__ inline int64_t warp_of_grid()
{
    return thread_of_grid() / WARP;
}
__device__ inline int64_t warps_of_grid()
{
    return threads_of_grid() / WARP;
}

// A block of a warp for each token, of THREADS at most.
inline unsigned threads_for(int64_t n_tokens)
{
    return (unsigned)(n_tokens < THREADS / WARP ? n_tokens * WARP : THREADS);
}

// ---- top-k ----

// exp, in what ref.h computes it in; bf16 in float.
template <class T> __device__ inline double exponential(wide_t<T> z, wide_t<T> max)
{
    return exp((double)z - (double)max);
}
template <> __device__ inline double exponential<bf16>(float z, float max)
{
    return expf(z - max);
}
template <class T> __device__ inline wide_t<T> sigmoid(wide_t<T> z)
{
    return (wide_t<T>)(1 / (1 + exp(-(double)z)));
}
template <> __device__ inline float sigmoid<bf16>(float z)
{
    return 1 / (1 + expf(-z));
}
template <class T> __device__ inline wide_t<T> share(wide_t<T> exponential, double sum)
{
    return (wide_t<T>)((double)exponential / sum);
}
template <> __device__ inline float share<bf16>(float exponential, double sum)
{
    return exponential * (float)(1 / sum);
}

// What a lane keeps of its token, in shared memory that no other lane looks at: entry n, at own[n * WARP], is
// of expert (n / N * WARP + lane) * N + n % N, so that ids rise with n.
template <int N> __device__ inline int expert_of(int n)
{
    return (n / N * WARP + lane()) * N + n % N;
}

// Below any probability: NaN comes after all numbers; then what has been chosen, then nothing at all.
enum { RANK_OF_NAN = -1, CHOSEN = -2, NOTHING = -3 };

// The first of the lane's largest entries.
template <class W> __device__ inline void find_best(const W *own, int n_own, W *best, int *at)
{
    *best = NOTHING;
    *at = 0;
    for (int n = 0; n < n_own; n++)
        if (own[n * WARP] > *best) {
            *best = own[n * WARP];
            *at = n;
        }
}

// The lowest of the lanes' ids.
__device__ inline int lowest(int id)
{
    return -warp_max(-id);
}

// expert [K] = the K largest of what the lanes own, descending, ties to the lower id.
template <int N, class W> __device__ inline void choose(W *own, int n_own, int K, int32_t *expert)
{
    W best;
    int at, chosen = 0;
    find_best(own, n_own, &best, &at);
    for (int k = 0; k < K; k++) {
        const W top = warp_max(best);
        const int mine = best == top ? expert_of<N>(at) : INT_MAX;
        const unsigned holders = __ballot_sync(ALL_LANES, best == top);
        const int id =
            holders & (holders - 1) ? lowest(mine) : __shfl_sync(ALL_LANES, mine, __ffs((int)holders) - 1);
        if (id == mine) {
            own[at * WARP] = CHOSEN;
            find_best(own, n_own, &best, &at);
        }
        if (lane() == k % WARP) chosen = id;
        const int slot = k / WARP * WARP + lane();
        if ((k % WARP == WARP - 1 || k == K - 1) && slot <= k) expert[slot] = chosen;
    }
}

// Probabilities and choices. Bytes: 2 T E elements, 4 T K; floor 0.9 us.
template <class T, class L, bool SIGMOID>
__global__ void route(int64_t n_tokens, int units, int K, const L *logits, L *prob, int32_t *expert)
{
    using W = wide_t<T>;
    constexpr int N = L::N;
    MOE_SHARED_DYNAMIC(W, kept); // [warps][lumps of a lane][N][WARP]
    W *own = kept + (int)threadIdx.x / WARP * ((units + WARP - 1) / WARP) * N * WARP + lane();
    for (int64_t t = warp_of_grid(); t < n_tokens; t += warps_of_grid()) {
        int n_own = 0;
        W max = -INFINITY;
        double sum = 0;
        for (int u = lane(); u < units; u += WARP, n_own += N) {
            const L part = logits[t * units + u];
            for (int j = 0; j < N; j++) {
                const W z = load(&part.at[j]);
                own[(n_own + j) * WARP] = z;
                if (z > max) max = z;
            }
        }
        if (!SIGMOID) {
            max = warp_max(max);
            for (int n = 0; n < n_own; n++) {
                const double e = exponential<T>(own[n * WARP], max);
                own[n * WARP] = (W)e;
                sum += e;
            }
            sum = warp_sum(sum);
        }
        for (int n = 0, u = lane(); n < n_own; n += N, u += WARP) {
            L out;
            for (int j = 0; j < N; j++) {
                W *const at = &own[(n + j) * WARP];
                const W p = (W)(SIGMOID ? sigmoid<T>(*at) : share<T>(*at, sum)); // chosen by it
                store(&out.at[j], p); // of bf16 many would be alike, and low ids win
                *at = p == p ? p : W(RANK_OF_NAN);
            }
            prob[t * units + u] = out;
        }
        choose<N>(own, n_own, K, expert + t * K);
    }
}

template <bool SIGMOID>
int queue_topk(const struct moe_cuda_queue *q, enum moe_cuda_type type, int64_t T, int64_t E, int64_t K,
               const void *logits, void *prob, int32_t *expert, int32_t *slot, int64_t *counts)
{
    if (K > E || E > MOST_KEYS) return NOT_NUMBERED;
    if (T > 0 && E > 0)
        MOE_OR_RETURN(by_type(type, [=](auto t) {
            using R = decltype(t);
            return by_unit<R>(
                E,
                [=](auto unit) {
                    using L = decltype(unit);
                    const int64_t units = E / L::N;
                    const size_t bytes = (size_t)divide_up(units, WARP) * WARP * L::N * sizeof(wide_t<R>);
                    int warps = THREADS / WARP;
                    while (warps > 1 && (warps * bytes > MOST_SHARED || warps / 2 >= T)) warps /= 2;
                    return MOE_LAUNCH((route<R, L, SIGMOID>), blocks_for(T, warps), warps * WARP,
                                      warps * bytes, q->stream, T, (int)units, (int)K, (const L *)logits,
                                      (L *)prob, expert);
                },
                logits, prob);
        }));
    return number_items(q, T * K, E, key_of_expert{expert, E, false, q->fault}, write_slot{slot}, counts,
                        nullptr);
}

// Bytes: 3 T E elements (4 with add); floor 1.3 us. The second look at a row finds it in the cache.
template <class T, class L>
__global__ void topk_bwd(int64_t n_tokens, int units, const L *prob, const L *dprob, L *dlogits, bool add)
{
    using W = wide_t<T>;
    for (int64_t t = warp_of_grid(); t < n_tokens; t += warps_of_grid()) {
        W mean = 0;
        for (int u = lane(); u < units; u += WARP) {
            const L p = prob[t * units + u], d = dprob[t * units + u];
            for (int j = 0; j < L::N; j++) mean += load(&p.at[j]) * load(&d.at[j]);
        }
        mean = warp_sum(mean);
        for (int u = lane(); u < units; u += WARP) {
            const int64_t i = t * units + u;
            const L p = prob[i], d = dprob[i];
            L out = {};
            if (add) out = dlogits[i];
            for (int j = 0; j < L::N; j++) put(&out.at[j], load(&p.at[j]) * (load(&d.at[j]) - mean), add);
            dlogits[i] = out;
        }
    }
}

// Bytes: 3 n elements (4 with add); floor 1.3 us.
template <class T, class L>
__global__ void topk_sigmoid_bwd(int64_t n, const L *prob, const L *dprob, L *dlogits, bool add)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) {
        const L p = prob[i], d = dprob[i];
        L out = {};
        if (add) out = dlogits[i];
        for (int j = 0; j < L::N; j++)
            put(&out.at[j], load(&d.at[j]) * load(&p.at[j]) * (1 - load(&p.at[j])), add);
        dlogits[i] = out;
    }
}

// ---- weights of chosen experts ----

// f(e) of each of a token's experts, in order of k.
template <class F>
__device__ inline void each_expert(int64_t E, int64_t K, const int32_t *expert, struct moe_cuda_fault *fault,
                                   F f)
{
    for (int64_t k = 0; k < K; k++) {
        const int32_t e = expert[k];
        if (e != -1 && inside(e, E, fault)) f(e);
    }
}

// f(e) of those experts that are the lane's.
template <class F>
__device__ inline void own_experts(int64_t E, int64_t K, const int32_t *expert, struct moe_cuda_fault *fault,
                                   F f)
{
    for (int64_t k = lane(); k < K; k += WARP) {
        const int32_t e = expert[k];
        if (e != -1 && inside(e, E, fault)) f(e);
    }
}

// The sum that a token's probabilities are divided by, which does not vary where it is the least one: every
// lane adds them in the order of ref.h, so it has its bits.
constexpr double LEAST_SUM = 1.1920928955078125e-7; // 2^-23

// A row becomes 0, before any lane of the warp goes on.
template <class L> __device__ inline void zero_row(int units, L *row)
{
    const L zeros = {};
    for (int u = lane(); u < units; u += WARP) row[u] = zeros;
    __syncwarp();
}

// Bytes: T E elements; 8 T K sectors of prob, and 4 T K; floor 0.5 us.
template <class T, class L>
__global__ void normalize(int64_t n_tokens, int64_t E, int64_t K, const T *prob, const int32_t *expert,
                          T *gate, struct moe_cuda_fault *fault)
{
    for (int64_t t = warp_of_grid(); t < n_tokens; t += warps_of_grid()) {
        const T *p = prob + t * E;
        double sum = 0;
        zero_row((int)(E / L::N), (L *)(gate + t * E));
        each_expert(E, K, expert + t * K, fault, [&](int32_t e) { sum += load(&p[e]); });
        if (!(sum > LEAST_SUM)) sum = LEAST_SUM;
        own_experts(E, K, expert + t * K, fault,
                    [&](int32_t e) { store(&gate[t * E + e], load(&p[e]) / sum); });
    }
}

// Bytes: T E elements (none with add); of prob, dgate (and dprob with add) the sectors of 8 T K, and 4 T K;
// floor 0.5 us.
template <class T, class L>
__global__ void normalize_bwd(int64_t n_tokens, int64_t E, int64_t K, const T *prob, const int32_t *expert,
                              const T *dgate, T *dprob, bool add, struct moe_cuda_fault *fault)
{
    for (int64_t t = warp_of_grid(); t < n_tokens; t += warps_of_grid()) {
        const T *p = prob + t * E, *d = dgate + t * E;
        double sum = 0, mean = 0;
        if (!add) zero_row((int)(E / L::N), (L *)(dprob + t * E));
        each_expert(E, K, expert + t * K, fault, [&](int32_t e) { sum += load(&p[e]); });
        const bool varies = sum > LEAST_SUM;
        if (!varies) sum = LEAST_SUM;
        if (varies)
            each_expert(E, K, expert + t * K, fault,
                        [&](int32_t e) { mean += load(&d[e]) * (double)load(&p[e]) / sum; });
        own_experts(E, K, expert + t * K, fault,
                    [&](int32_t e) { put(&dprob[t * E + e], (load(&d[e]) - mean) / sum, true); });
    }
}

// ---- the load-balancing loss ----

// Which unit of its row a thread of the grid is at, without a division each time.
struct column {
    int at, step, units;

    __device__ explicit column(int units_)
        : at((int)(thread_of_grid() % units_)), step((int)(threads_of_grid() % units_)), units(units_)
    {
    }
    __device__ void next()
    {
        at += step;
        if (at >= units) at -= units;
    }
};

// part [blocks]: sums in double of a block's share. Bytes: n elements; floor 0.4 us.
template <class T, class L>
__global__ void sum_loss(int64_t n, int units, const L *prob, const int64_t *all_counts, double *part)
{
    MOE_SHARED(double, sums, WARP);
    double sum = 0;
    column c(units);
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid(), c.next()) {
        const L p = prob[i];
        for (int j = 0; j < L::N; j++) sum += load(&p.at[j]) * (double)all_counts[c.at * L::N + j];
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

template <class T> __global__ void write_loss(int n_parts, double factor, const double *part, T *loss)
{
    MOE_SHARED(double, sums, WARP);
    const double sum = block_sum((int)threadIdx.x < n_parts ? part[threadIdx.x] : 0, sums);
    if (threadIdx.x == 0) store(loss, factor * sum);
}

// Bytes: n elements (2 n with add); floor 0.4 us.
template <class T, class L>
__global__ void aux_loss_bwd(int64_t n, int units, double factor, const int64_t *all_counts, L *dprob,
                             bool add)
{
    column c(units);
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid(), c.next()) {
        L out = {};
        if (add) out = dprob[i];
        for (int j = 0; j < L::N; j++) put(&out.at[j], factor * (double)all_counts[c.at * L::N + j], add);
        dprob[i] = out;
    }
}

} // namespace

MOE_CUDA(topk, int64_t T, int64_t E, int64_t K, const void *logits, void *prob, int32_t *expert,
         int32_t *slot, int64_t *counts)
{
    return queue_topk<false>(q, type, T, E, K, logits, prob, expert, slot, counts);
}

MOE_CUDA(topk_sigmoid, int64_t T, int64_t E, int64_t K, const void *logits, void *prob, int32_t *expert,
         int32_t *slot, int64_t *counts)
{
    return queue_topk<true>(q, type, T, E, K, logits, prob, expert, slot, counts);
}

MOE_CUDA(topk_bwd, int64_t T, int64_t E, const void *prob, const void *dprob, void *dlogits, bool add)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            E,
            [=](auto unit) {
                using L = decltype(unit);
                return MOE_LAUNCH((topk_bwd<R, L>), blocks_for(T, THREADS / WARP), threads_for(T), 0,
                                  q->stream, T, (int)(E / L::N), (const L *)prob, (const L *)dprob,
                                  (L *)dlogits, add);
            },
            prob, dprob, dlogits);
    });
}

MOE_CUDA(topk_sigmoid_bwd, int64_t T, int64_t E, const void *prob, const void *dprob, void *dlogits, bool add)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            T * E,
            [=](auto unit) {
                using L = decltype(unit);
                return MOE_LAUNCH((topk_sigmoid_bwd<R, L>), blocks_for(T * E / L::N, THREADS), THREADS, 0,
                                  q->stream, T * E / L::N, (const L *)prob, (const L *)dprob, (L *)dlogits,
                                  add);
            },
            prob, dprob, dlogits);
    });
}

MOE_CUDA(normalize, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert, void *gate)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            E,
            [=](auto unit) {
                using L = decltype(unit);
                return MOE_LAUNCH((normalize<R, L>), blocks_for(T, THREADS / WARP), threads_for(T), 0,
                                  q->stream, T, E, K, (const R *)prob, expert, (R *)gate, q->fault);
            },
            gate);
    });
}

MOE_CUDA(normalize_bwd, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert,
         const void *dgate, void *dprob, bool add)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            E,
            [=](auto unit) {
                using L = decltype(unit);
                return MOE_LAUNCH((normalize_bwd<R, L>), blocks_for(T, THREADS / WARP), threads_for(T), 0,
                                  q->stream, T, E, K, (const R *)prob, expert, (const R *)dgate, (R *)dprob,
                                  add, q->fault);
            },
            dprob);
    });
}

MOE_CUDA(aux_loss, int64_t T, int64_t E, double factor, const void *prob, const int64_t *all_counts,
         void *loss)
{
    double *part = (double *)q->workspace;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            E,
            [=](auto unit) {
                using L = decltype(unit);
                const int64_t n = T * (E / L::N), blocks = divide_up(n, THREADS);
                const int parts = (int)(blocks < MOST_PARTS ? blocks : MOST_PARTS);
                if (parts > 0)
                    MOE_OR_RETURN(MOE_LAUNCH((sum_loss<R, L>), parts, THREADS, 0, q->stream, n,
                                             (int)(E / L::N), (const L *)prob, all_counts, part));
                return MOE_LAUNCH(write_loss<R>, 1, MOST_PARTS, 0, q->stream, parts, factor, part, (R *)loss);
            },
            prob);
    });
}

MOE_CUDA(aux_loss_bwd, int64_t T, int64_t E, double factor, const int64_t *all_counts, void *dprob, bool add)
{
    if (T * E == 0) return 0;
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        return by_unit<R>(
            E,
            [=](auto unit) {
                using L = decltype(unit);
                const int64_t n = T * (E / L::N);
                return MOE_LAUNCH((aux_loss_bwd<R, L>), blocks_for(n, THREADS), THREADS, 0, q->stream, n,
                                  (int)(E / L::N), factor, all_counts, (L *)dprob, add);
            },
            dprob);
    });
}
