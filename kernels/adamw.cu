// adamw.cu - see cuda.h: what the optimizer does with flat arrays (flat.cuh). A floor time is for 4,096 x
// 7,168 elements of bf16 (58.7 MB an array) at 4.8 TB/s.
#include "kernels/flat.cuh"

#include <cmath>

using namespace moe;

namespace {

// sums [blocks]: each block's squares of g. Bytes: n elements; floor 12.2 us.
template <class T> __global__ void sqnorm(int64_t n, int64_t lumps, const T *g, double *sums)
{
    MOE_SHARED(double, part, WARP);
    double sum = 0;
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) {
        const auto in = *(const decltype(unit) *)&g[at];
        for (int j = 0; j < unit.N; j++) sum += (double)load(&in.at[j]) * (double)load(&in.at[j]);
    });
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// norm (+)= the n sums. One block.
template <class C> __global__ void sum_squares(int64_t n, const C *sums, C *norm, bool add)
{
    MOE_SHARED(C, part, WARP);
    C sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) *norm = (add ? *norm : 0) + sum;
}

// Bytes: 2 n elements; floor 24.5 us.
template <class T>
__global__ void clip(int64_t n, int64_t lumps, double limit, const T *g, const double *norm,
                     const double *other_norm, T *out)
{
    double shrink = limit / sqrt(*norm + *other_norm);
    if (!(shrink < 1)) shrink = 1;
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) {
        auto x = *(const decltype(unit) *)&g[at];
        for (int j = 0; j < unit.N; j++) store(&x.at[j], load(&x.at[j]) * shrink);
        *(decltype(unit) *)&out[at] = x;
    });
}

// The constants of ref.c's adamw, in the type of computation.
template <class C> struct adamw_by {
    C correct1, correct2, rate, shrink;
};

template <class T> struct adamw_at {
    const T *param, *grad, *m, *v;
    T *param_out, *m_out, *v_out;
};

__device__ inline float root(float x)
{
    return sqrtf(x);
}
__device__ inline double root(double x)
{
    return sqrt(x);
}

// The operations of ref.c one by one, each rounded, so that float and double have its bits; outputs may be
// the inputs. Bytes: 7 n elements; floor 85.6 us.
template <class T>
__global__ void adamw(int64_t n, int64_t lumps, const struct adamw_by<wide_t<T>> by,
                      const struct adamw_at<T> x)
{
    using C = wide_t<T>;
    const C beta1 = (C)0.9, beta2 = (C)0.95, eps = (C)1e-8;
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) {
        using L = decltype(unit);
        L param = *(const L *)&x.param[at], m = *(const L *)&x.m[at], v = *(const L *)&x.v[at];
        const L grad = *(const L *)&x.grad[at];
        for (int j = 0; j < L::N; j++) {
            const C g = load(&grad.at[j]), p = load(&param.at[j]);
            const C first = beta1 * load(&m.at[j]) + (1 - beta1) * g,
                    second = beta2 * load(&v.at[j]) + (1 - beta2) * g * g;
            store(&param.at[j],
                  p - (by.rate * (first * by.correct1 / (root(second * by.correct2) + eps)) + by.shrink * p));
            store(&m.at[j], first);
            store(&v.at[j], second);
        }
        *(L *)&x.param_out[at] = param;
        *(L *)&x.m_out[at] = m;
        *(L *)&x.v_out[at] = v;
    });
}

} // namespace

MOE_CUDA(sqnorm, int64_t n, const void *g, double *norm, bool add)
{
    double *sums = (double *)q->workspace;
    const int64_t blocks = by_type(type, [=](auto t) {
        using T = decltype(t);
        return (int)flat_blocks<T>(n, lumps_in<T>(n, g));
    });
    if (blocks > 0)
        MOE_OR_RETURN(by_type(type, [=](auto t) {
            using T = decltype(t);
            return MOE_LAUNCH(sqnorm<T>, (unsigned)blocks, FLAT_THREADS, 0, q->stream, n, lumps_in<T>(n, g),
                              (const T *)g, sums);
        }));
    return MOE_LAUNCH(sum_squares<double>, 1, FLAT_THREADS, 0, q->stream, blocks, (const double *)sums, norm,
                      add);
}

MOE_CUDA(clip, int64_t n, double limit, const void *g, const double *norm, const double *other_norm,
         void *out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, g, out);
        return MOE_LAUNCH(clip<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps, limit,
                          (const T *)g, norm, other_norm, (T *)out);
    });
}

MOE_CUDA(adamw, int64_t n, double rate, double decay, int64_t step, const void *param, const void *grad,
         const void *m, const void *v, void *param_out, void *m_out, void *v_out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        using C = wide_t<T>;
        const struct adamw_by<C> by = {
            (C)(1 / (1 - std::pow(0.9, (double)step))), (C)(1 / (1 - std::pow(0.95, (double)step))), (C)rate,
                (C)(rate *decay),
        };
        const struct adamw_at<T> x = {
            (const T *)param, (const T *)grad, (const T *)m, (const T *)v, (T *)param_out, (T *)m_out,
                (T *)v_out
        };
        const int64_t lumps = lumps_in<T>(n, param, grad, m, v, param_out, m_out, v_out);
        return MOE_LAUNCH(adamw<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps, by, x);
    });
}
