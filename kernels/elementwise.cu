// elementwise.cu - see cuda.h: element by element (flat.cuh). A floor time is for 4,096 x 7,168 elements of
// bf16 (58.7 MB an array) at 4.8 TB/s.
#include "kernels/flat.cuh"

using namespace moe;

namespace {

// y = f(a, b), which may be the same arrays; where f looks at one alone, b is a.
template <class T, class F>
__device__ inline void each(int64_t n, int64_t lumps, const T *a, const T *b, T *y, F f)
{
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) {
        using L = decltype(unit);
        const L x = *(const L *)&a[at], z = *(const L *)&b[at];
        L out;
        for (int j = 0; j < L::N; j++) store(&out.at[j], f(load(&x.at[j]), load(&z.at[j])));
        *(L *)&y[at] = out;
    });
}

// y = a + b. Bytes: 3 n elements; floor 36.7 us.
template <class T> __global__ void add(int64_t n, int64_t lumps, const T *a, const T *b, T *y)
{
    each(n, lumps, a, b, y, [](wide_t<T> x, wide_t<T> z) { return x + z; });
}

// Bytes: 3 n elements (+ n for each add); floor 36.7 us.
template <class T>
__global__ void add_bwd(int64_t n, int64_t lumps, const T *dy, T *da, T *db, bool add_a, bool add_b)
{
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) {
        using L = decltype(unit);
        const L d = *(const L *)&dy[at];
        L a = d, b = d; // what replaces; what is added to is read
        if (add_a) a = *(const L *)&da[at];
        if (add_b) b = *(const L *)&db[at];
        for (int j = 0; j < L::N; j++) {
            put(&a.at[j], load(&d.at[j]), add_a);
            put(&b.at[j], load(&d.at[j]), add_b);
        }
        *(L *)&da[at] = a;
        *(L *)&db[at] = b;
    });
}

// Bytes: n elements; floor 12.2 us.
template <class T> __global__ void zero(int64_t n, int64_t lumps, T *y)
{
    each_unit<T>(n, lumps, [&](int64_t at, auto unit) { *(decltype(unit) *)&y[at] = decltype(unit)(); });
}

// Bytes: 2 n elements; floor 24.5 us.
template <class T> __global__ void scale(int64_t n, int64_t lumps, double factor, const T *g, T *out)
{
    each(n, lumps, g, g, out, [=](wide_t<T> x, wide_t<T>) { return x * factor; });
}

// Bytes: 2 n elements; floor 24.5 us.
template <class T> __global__ void copy(int64_t n, int64_t lumps, const T *x, T *y)
{
    each_unit<T>(n, lumps,
                 [&](int64_t at, auto unit) { *(decltype(unit) *)&y[at] = *(const decltype(unit) *)&x[at]; });
}

// Bytes: 3 n elements; floor 36.7 us.
template <class T>
__global__ void sgd(int64_t n, int64_t lumps, double factor, const T *param, const T *grad, T *out)
{
    each(n, lumps, param, grad, out, [=](wide_t<T> x, wide_t<T> g) { return x - factor * g; });
}

} // namespace

MOE_CUDA(add, int64_t n, const void *a, const void *b, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, a, b, y);
        return MOE_LAUNCH(add<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps,
                          (const T *)a, (const T *)b, (T *)y);
    });
}

MOE_CUDA(add_bwd, int64_t n, const void *dy, void *da, void *db, bool add_a, bool add_b)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, dy, da, db);
        return MOE_LAUNCH(add_bwd<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps,
                          (const T *)dy, (T *)da, (T *)db, add_a, add_b);
    });
}

MOE_CUDA(zero, int64_t n, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, y);
        return MOE_LAUNCH(zero<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps, (T *)y);
    });
}

MOE_CUDA(scale, int64_t n, double divisor, const void *g, void *out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, g, out);
        return MOE_LAUNCH(scale<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps,
                          1 / divisor, (const T *)g, (T *)out);
    });
}

MOE_CUDA(copy, int64_t n, const void *x, void *y)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, x, y);
        return MOE_LAUNCH(copy<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps,
                          (const T *)x, (T *)y);
    });
}

MOE_CUDA(sgd, int64_t n, double factor, const void *param, const void *grad, void *out)
{
    if (n == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        const int64_t lumps = lumps_in<T>(n, param, grad, out);
        return MOE_LAUNCH(sgd<T>, flat_blocks<T>(n, lumps), FLAT_THREADS, 0, q->stream, n, lumps, factor,
                          (const T *)param, (const T *)grad, (T *)out);
    });
}
