// swiglu.cu - see cuda.h. A thread has a unit of columns of z and the same of u. A floor time is for 32,768
// rows (4,096 tokens x top-8) with F = 2,048 of bf16 (134 MB an array [rows,F]) at 4.8 TB/s.
#include "kernels/columns.cuh"

using namespace moe;

namespace {

// h [rows, 2 units], a [rows, units]. Bytes: 3 rows F elements; floor 83.9 us.
template <class T, class L> __global__ void swiglu(int64_t rows, int64_t units, const L *h, L *a)
{
    const int64_t c = of_column();
    if (c >= units) return;
    for (int64_t r = of_row(); r < rows; r += rows_apart()) {
        const L zs = h[2 * r * units + c], us = h[(2 * r + 1) * units + c];
        L out;
        for (int i = 0; i < L::N; i++) {
            const wide_t<T> z = load(&zs.at[i]), u = load(&us.at[i]);
            store(&out.at[i], z / (1 + exponential(-z)) * u);
        }
        a[r * units + c] = out;
    }
}

// Bytes: 5 rows F elements (+ 2 with add); floor 140 us.
template <class T, class L>
__global__ void swiglu_bwd(int64_t rows, int64_t units, const L *h, const L *da, L *dh, bool add)
{
    const int64_t c = of_column();
    if (c >= units) return;
    for (int64_t r = of_row(); r < rows; r += rows_apart()) {
        const int64_t at_z = 2 * r * units + c, at_u = at_z + units;
        const L zs = h[at_z], us = h[at_u], ds = da[r * units + c];
        L dz = {}, du = {};
        if (add) {
            dz = dh[at_z];
            du = dh[at_u];
        }
        for (int i = 0; i < L::N; i++) {
            const wide_t<T> z = load(&zs.at[i]), u = load(&us.at[i]), d = load(&ds.at[i]);
            const wide_t<T> s = 1 / (1 + exponential(-z));
            put(&dz.at[i], d * u * s * (1 + z * (1 - s)), add);
            put(&du.at[i], d * z * s, add);
        }
        dh[at_z] = dz;
        dh[at_u] = du;
    }
}

} // namespace

MOE_CUDA(swiglu, int64_t rows, int64_t F, const void *h, void *a)
{
    if (rows == 0 || F == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return by_unit<T>(
            F,
            [=](auto unit) {
                using L = decltype(unit);
                const dim3 block = column_block(F / L::N);
                return MOE_LAUNCH((swiglu<T, L>), column_grid(rows, F / L::N, block), block, 0, q->stream,
                                  rows, F / L::N, (const L *)h, (L *)a);
            },
            h, a);
    });
}

MOE_CUDA(swiglu_bwd, int64_t rows, int64_t F, const void *h, const void *da, void *dh, bool add)
{
    if (rows == 0 || F == 0) return 0;
    return by_type(type, [=](auto t) {
        using T = decltype(t);
        return by_unit<T>(
            F,
            [=](auto unit) {
                using L = decltype(unit);
                const dim3 block = column_block(F / L::N);
                return MOE_LAUNCH((swiglu_bwd<T, L>), column_grid(rows, F / L::N, block), block, 0, q->stream,
                                  rows, F / L::N, (const L *)h, (const L *)da, (L *)dh, add);
            },
            h, da, dh);
    });
}
