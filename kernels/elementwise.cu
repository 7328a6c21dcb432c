// elementwise.cu - see cuda.h: element by element. Each thread takes elements a grid apart; a floor time is
// for 4,096 x 7,168 elements of bf16 (58.7 MB an array) at 4.8 TB/s.
#include "kernels/cuda.cuh"

using namespace moe;

namespace {

constexpr int THREADS = 256;

// y = a + b. Bytes: 3 n elements; floor 36.7 us.
template <class T> __global__ void add(int64_t n, const T *a, const T *b, T *y)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid())
        store(&y[i], (wide_t<T>)(load(&a[i]) + load(&b[i])));
}

// Bytes: 3 n elements (+ n for each add); floor 36.7 us.
template <class T> __global__ void add_bwd(int64_t n, const T *dy, T *da, T *db, bool add_a, bool add_b)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) {
        const wide_t<T> d = load(&dy[i]);
        put(&da[i], d, add_a);
        put(&db[i], d, add_b);
    }
}

// Bytes: n elements; floor 12.2 us.
template <class T> __global__ void zero(int64_t n, T *y)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) store(&y[i], 0);
}

// Bytes: 2 n elements; floor 24.5 us.
template <class T> __global__ void scale(int64_t n, double factor, const T *g, T *out)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) store(&out[i], load(&g[i]) * factor);
}

// Bytes: 2 n elements; floor 24.5 us.
template <class T> __global__ void copy(int64_t n, const T *x, T *y)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid()) y[i] = x[i];
}

// Bytes: 3 n elements; floor 36.7 us.
template <class T> __global__ void sgd(int64_t n, double factor, const T *param, const T *grad, T *out)
{
    for (int64_t i = thread_of_grid(); i < n; i += threads_of_grid())
        store(&out[i], load(&param[i]) - factor * load(&grad[i]));
}

} // namespace

MOE_CUDA(add, int64_t n, const void *a, const void *b, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(add<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, (const T *)a,
                          (const T *)b, (T *)y);
    });
}

MOE_CUDA(add_bwd, int64_t n, const void *dy, void *da, void *db, bool add_a, bool add_b)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(add_bwd<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, (const T *)dy,
                          (T *)da, (T *)db, add_a, add_b);
    });
}

MOE_CUDA(zero, int64_t n, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(zero<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, (T *)y);
    });
}

MOE_CUDA(scale, int64_t n, double divisor, const void *g, void *out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(scale<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, 1 / divisor,
                          (const T *)g, (T *)out);
    });
}

MOE_CUDA(copy, int64_t n, const void *x, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(copy<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, (const T *)x, (T *)y);
    });
}

MOE_CUDA(sgd, int64_t n, double factor, const void *param, const void *grad, void *out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return MOE_LAUNCH(sgd<T>, blocks_for(n, THREADS), THREADS, 0, q->stream, n, factor, (const T *)param,
                          (const T *)grad, (T *)out);
    });
}
