// xent.cu - see cuda.h. A block has a token at a time. A floor time is for 4,096 tokens with V = 129,280 of
// bf16 (1.06 GB an array [T,V]) at 4.8 TB/s.
#include "kernels/columns.cuh"

using namespace moe;

namespace {

constexpr int MOST_THREADS = 512, SUM_THREADS = 256;
constexpr int64_t MOST_TOKEN_BLOCKS = 1024;

// A part of a row's softmax: its largest logit, and the sum of exp(logit - largest).
template <class C> struct softmax {
    C largest;
    double sum;
};

// Takes logits in, of which only a NaN or another infinity than -inf makes the sum NaN.
template <class T, class L> __device__ inline void take_in(const L &logits, softmax<wide_t<T>> *s)
{
    using C = wide_t<T>;
    C largest = s->largest;
    for (int i = 0; i < L::N; i++)
        if (load(&logits.at[i]) > largest) largest = load(&logits.at[i]);
    if (largest > s->largest) {
        if (s->sum != 0) s->sum *= (double)exponential(s->largest - largest);
        s->largest = largest;
    }
    for (int i = 0; i < L::N; i++) {
        const C z = load(&logits.at[i]);
        if (z != -INFINITY) s->sum += (double)exponential(z - largest);
    }
}

// The softmax of all threads' parts. The block's sum keeps this row's reading of `part` from the next one's
// writing.
template <class C> __device__ inline softmax<C> merge(softmax<C> own, C *part, double *sums)
{
    C largest = warp_max(own.largest);
    if (lane() == 0) part[threadIdx.x / WARP] = largest;
    __syncthreads();
    largest = warp_max((unsigned)lane() < blockDim.x / WARP ? part[lane()] : -(C)INFINITY);
    if (own.sum != 0) own.sum *= (double)exponential(own.largest - largest);
    return {largest, block_sum(own.sum, sums)};
}

// loss [blocks] = the sum over the block's tokens, in order. Bytes: 2 T V elements, and T V more where a row
// has left the caches when it is read again (3 T V: floor 662 us); floor 442 us.
template <class T, class L>
__global__ void xent(int64_t tokens, int64_t units, const L *logits, const int32_t *target, L *dlogits,
                     double *loss, struct moe_cuda_fault *fault)
{
    using C = wide_t<T>;
    MOE_SHARED(C, part, WARP);
    MOE_SHARED(double, sums, WARP);
    double lost = 0;
    for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
        const L *row = logits + t * units;
        softmax<C> s = {-(C)INFINITY, 0};
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) take_in<T>(row[c], &s);
        s = merge(s, part, sums);
        const int64_t right = target[t];
        const C by = (C)(1 / s.sum);
        for (int64_t c = threadIdx.x; c < units; c += blockDim.x) {
            const L in = row[c];
            L out;
            for (int i = 0; i < L::N; i++) {
                const C p = exponential(load(&in.at[i]) - s.largest) * by;
                store(&out.at[i], c * L::N + i == right ? p - 1 : p);
            }
            dlogits[t * units + c] = out;
        }
        if (threadIdx.x == 0 && inside(right, units * L::N, fault))
            lost += s.largest + log(s.sum) - load(&row[right / L::N].at[right % L::N]);
    }
    if (threadIdx.x == 0) loss[blockIdx.x] = lost;
}

// loss = the sum of n parts.
template <class T> __global__ void sum_losses(int64_t n, const double *parts, T *loss)
{
    MOE_SHARED(double, part, WARP);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) store(loss, sum);
}

} // namespace

MOE_CUDA(xent, int64_t T, int64_t V, const void *logits, const int32_t *target, void *dlogits, void *loss)
{
    return by_type(type, [=](auto t) {
        using R = decltype(t);
        double *parts = (double *)q->workspace;
        const int64_t blocks = T < MOST_TOKEN_BLOCKS ? T : MOST_TOKEN_BLOCKS;
        if (blocks > 0)
            MOE_OR_RETURN(by_unit<R>(
                V,
                [=](auto unit) {
                    using L = decltype(unit);
                    return MOE_LAUNCH((xent<R, L>), (unsigned)blocks, threads_of_row(V / L::N, MOST_THREADS),
                                      0, q->stream, T, V / L::N, (const L *)logits, target, (L *)dlogits,
                                      parts, q->fault);
                },
                logits, dlogits));
        return MOE_LAUNCH(sum_losses<R>, 1, SUM_THREADS, 0, q->stream, blocks, (const double *)parts,
                          (R *)loss);
    });
}
