/* Products on a GPU of 4 SMs, each 1 TFLOP/s: times worked out by hand, and bounds on random ones. */
#include "sim/cost/gemm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* An SM holds one tile: the smallest needs (64 + 8) rows of 128 B, 4 times. */
static const struct moe_gpu small = {.n_sms = 4,
                                     .shared_bytes = 32 << 10,
                                     .matmul_flops = 4e12,
                                     .memory_Bps = INFINITY,
                                     .shared_Bps = INFINITY};
/* Nothing but steps of 1 us and arithmetic; k is never split. */
static const struct moe_gemm plain = {.launch_s = 0,
                                      .step_s = 1e-6,
                                      .matmul_share = 1,
                                      .memory_share = 1,
                                      .l2_Bps = INFINITY,
                                      .split_s = INFINITY,
                                      .sum_Bps = INFINITY,
                                      .write_Bps = INFINITY};
static const struct moe_grouped even = {.launch_s = 0,
                                        .memory_share = 1,
                                        .move_share = 1,
                                        .matmul_share = 1,
                                        .theta = 0,
                                        .route_s = 0,
                                        .route_token_s = 0};

static void assert_us(double s, double us)
{
    if (!(fabs(s * 1e6 - us) <= 1e-9 * us)) fail_msg("%.9g us, expected %.9g", s * 1e6, us);
}

/* ---- one product ---- */

/* 128 elements of 2 bytes are two steps of 128 bytes, of 1 byte one. */
static void one_tile(void **state)
{
    struct moe_gemm p = plain;
    (void)state;
    p.launch_s = 3e-6;
    assert_us(moe_gemm_s(&small, &p, 64, 16, 128, 2), 3 + 2);
    assert_us(moe_gemm_s(&small, &p, 64, 16, 129, 2), 3 + 3);
    assert_us(moe_gemm_s(&small, &p, 64, 16, 128, 1), 3 + 1);
}

/* 256 x 256 are 4 tiles of 128 x 128, one for each SM: 2 * 128^2 * 64 FLOP take 2.097152 us. Of 128 x 64 (or
 * 64 x 128, 32 x 256), half as long, there are 8: the same. Smaller ones take 1 us a step, 4 after another.
 * With one row more they are 12 (10, 9), and one SM does 3. Double the rows are two rounds. */
static void waves(void **state)
{
    struct moe_gemm p = plain;
    (void)state;
    assert_us(moe_gemm_s(&small, &p, 256, 256, 64, 2), 2.097152);
    assert_us(moe_gemm_s(&small, &p, 257, 256, 64, 2), 3 * 1.048576);
    assert_us(moe_gemm_s(&small, &p, 512, 256, 64, 2), 2 * 2.097152);
    p.matmul_share = 0.5;
    assert_us(moe_gemm_s(&small, &p, 256, 256, 64, 2), 2 * 2.097152);
    p.matmul_share = 1;
    p.write_Bps = 1e11; /* 128 x 128 x 2 B at a quarter of it: 1.31072 us */
    assert_us(moe_gemm_s(&small, &p, 256, 256, 64, 2), 2.097152 + 1.31072);
}

/* 512 x 512 are 8 tiles of 256 x 128, two for each SM; smaller ones are more. One needs 384 * 128 B * 4 = 192
 * KiB: an SM with the double of it does both at once, when steps wait. What they load or multiply does not
 * overlap: 384 * 128 B at a quarter of l2 are 1.96608 us each. */
static void tiles_on_one_sm_overlap(void **state)
{
    struct moe_gpu gpu = small;
    struct moe_gemm p = plain;
    (void)state;
    gpu.matmul_flops = 1e18;
    gpu.shared_bytes = 192 << 10;
    assert_us(moe_gemm_s(&gpu, &p, 512, 512, 64, 2), 2);
    gpu.shared_bytes = 384 << 10;
    assert_us(moe_gemm_s(&gpu, &p, 512, 512, 64, 2), 1);
    p.l2_Bps = 1e11;
    assert_us(moe_gemm_s(&gpu, &p, 512, 512, 64, 2), 2 * 1.96608);
}

/* 2 B * (k n + m k + m n) at 80 % of 1 TB/s. */
static void memory_bound(void **state)
{
    struct moe_gpu gpu = small;
    struct moe_gemm p = plain;
    (void)state;
    gpu.matmul_flops = 1e15;
    gpu.memory_Bps = 1e12;
    p.memory_share = 0.8;
    p.launch_s = 3e-6;
    p.step_s = 1e-9;
    assert_us(moe_gemm_s(&gpu, &p, 1, 4096, 4096, 2), 3 + 2 * (4096.0 * 4096 + 2 * 4096) / 0.8e6);
}

/* 64 steps on one SM; in 4 parts 16 and the sums: 4 * 64^2 * 8 B at 100 GB/s. 3 parts of 22 steps take longer
 * for all that they save in sums, and so do 5 and more, of which an SM does two. */
static void split_k(void **state)
{
    struct moe_gemm p = plain;
    (void)state;
    assert_us(moe_gemm_s(&small, &p, 64, 64, 4096, 2), 64);
    p.split_s = 3e-6;
    p.sum_Bps = 1e11;
    assert_us(moe_gemm_s(&small, &p, 64, 64, 4096, 2), 16 + 3 + 1.31072);
    p.split_s = 50e-6;
    assert_us(moe_gemm_s(&small, &p, 64, 64, 4096, 2), 64);
}

static uint64_t seed = 1;

/* A power of two of 1 to 2^bits, or near it. */
static int64_t draw(uint64_t stream, int bits)
{
    double u = moe_uniform(seed, stream, (uint64_t)bits);
    int64_t about = (int64_t)exp2(u * bits);
    return moe_uniform(seed, stream, 100 + (uint64_t)bits) < 0.5 ? about : (int64_t)1 << (int)(u * bits);
}

static struct moe_gemm draw_gemm(uint64_t stream)
{
    struct moe_gemm p;
    double *value = (double *)&p;
    const double start[] = {
#define X(member, key, unit, size, first, least, most, rows) (first) * (size),
        MOE_GEMM_PARAMS(X)
#undef X
    };
    for (int i = 0; i < MOE_GEMM_N_PARAMS; i++)
        value[i] = start[i] * exp2(4 * moe_uniform(seed, stream, 200 + (uint64_t)i) - 2);
    p.matmul_share = fmin(p.matmul_share, 1);
    p.memory_share = fmin(p.memory_share, 1);
    return p;
}

static const struct moe_gpu large = {.n_sms = 132,
                                     .shared_bytes = 227 << 10,
                                     .matmul_flops = 989e12,
                                     .memory_Bps = 3.35e12,
                                     .shared_Bps = 31e12};

/* Never faster than arithmetic and memory allow; more rows or columns never take less. */
static void bounds_and_order(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 2000; i++) {
        struct moe_gemm p = draw_gemm(i);
        int64_t m = draw(3 * i, 14), n = draw(3 * i + 1, 15), k = draw(3 * i + 2, 16);
        double s = moe_gemm_s(&large, &p, m, n, k, 2), M = (double)m, N = (double)n, K = (double)k;
        double flops_s = 2 * M * N * K / large.matmul_flops,
               bytes_s = 2 * (M * N + M * K + N * K) / large.memory_Bps;
        if (!(s >= flops_s && s >= bytes_s))
            fail_msg("seed %d, %lld x %lld x %lld: %g s", (int)seed, (long long)m, (long long)n, (long long)k,
                     s);
        if (!(moe_gemm_s(&large, &p, m + draw(i, 9), n, k, 2) >= s))
            fail_msg("seed %d, %lld x %lld x %lld: more rows take less", (int)seed, (long long)m,
                     (long long)n, (long long)k);
        if (!(moe_gemm_s(&large, &p, m, n + draw(i, 9), k, 2) >= s))
            fail_msg("seed %d, %lld x %lld x %lld: more columns take less", (int)seed, (long long)m,
                     (long long)n, (long long)k);
    }
}

/* ---- a group ---- */

/* A tile of 16 rows and 128 columns: 2 * 16 * 128 * 64 FLOP take 0.262144 us. One alone takes that; 5 are a
 * round and a quarter, and half of the 3 idle SMs' time is lost. Larger tiles take longer. */
static void grouped_tiles(void **state)
{
    struct moe_grouped p = even;
    (void)state;
    assert_us(moe_grouped_s(&small, &even, 1, (int64_t[]){16}, NULL, 128, 64, 2), 0.262144);
    assert_us(moe_grouped_s(&small, &even, 1, (int64_t[]){16}, NULL, 5 * 128, 64, 2),
              (1.25 + 0.75 / 2) * 0.262144);
    assert_us(moe_grouped_s(&small, &even, 2, (int64_t[]){7, 16}, NULL, 4 * 128, 128, 2), 4 * 0.262144);
    p.matmul_share = 0.5;
    assert_us(moe_grouped_s(&small, &p, 1, (int64_t[]){16}, NULL, 128, 64, 2), 2 * 0.262144);
}

/* Each: 2 B * (512 * 64 weights + 16 * (512 + 64)) at 100 GB/s are 0.83968 us, and a quarter of its tiles,
 * one round of 0.262144 us. Experts without rows are not there. */
static void grouped_memory(void **state)
{
    struct moe_gpu gpu = small;
    struct moe_grouped p = even;
    (void)state;
    gpu.memory_Bps = 2e11;
    p.memory_share = 0.5;
    p.theta = 0.25;
    double each = 0.83968 + 0.262144 / 4;
    assert_us(moe_grouped_s(&gpu, &p, 2, (int64_t[]){16, 16}, NULL, 512, 64, 2), 2 * each);
    assert_us(moe_grouped_s(&gpu, &p, 5, (int64_t[]){0, 16, 0, 0, 16}, NULL, 512, 64, 2), 2 * each);
    assert_true(moe_grouped_s(&gpu, &p, 2, (int64_t[]){0, 0}, NULL, 512, 64, 2) == 0);
    assert_true(moe_grouped_s(&gpu, &p, 0, NULL, NULL, 512, 64, 2) == 0);
}

/* 256 rows and 512 columns are 4 tiles of 256 rows, a wave: 2 B * (512 * 64 weights + 256 * (512 + 64)) at
 * 1 GB/s. 512 rows are 8 of the largest tiles, 2 waves: the weights twice. */
static void grouped_weights_are_read_by_each_wave(void **state)
{
    struct moe_gpu gpu = small;
    (void)state;
    gpu.memory_Bps = 1e9;
    assert_us(moe_grouped_s(&gpu, &even, 1, (int64_t[]){256}, NULL, 512, 64, 2), 360.448);
    assert_us(moe_grouped_s(&gpu, &even, 1, (int64_t[]){512}, NULL, 512, 64, 2), 720.896);
}

/* Shared memory of 25 GB/s for each SM. A tile of 16 rows moves (2 * (64 + 16) + 16 + 128) * 128 B: 1.55648
 * us; of 128 rows (2 * (64 + 128) + 128 + 128) * 128 B: 3.2768 us, and 8 times the rows. */
static void grouped_tiles_are_chosen_before(void **state)
{
    struct moe_gpu gpu = small;
    const int64_t few[] = {16}, many[] = {128};
    (void)state;
    gpu.shared_Bps = 1e11;
    assert_us(moe_grouped_s(&gpu, &even, 1, few, NULL, 512, 64, 2), 1.55648);
    assert_us(moe_grouped_s(&gpu, &even, 1, many, NULL, 512, 64, 2), 3.2768);
    assert_us(moe_grouped_s(&gpu, &even, 1, many, few, 512, 64, 2), 8 * 1.55648);
    assert_us(moe_grouped_s(&gpu, &even, 1, few, many, 512, 64, 2), 3.2768);
}

static void grouped_bounds(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 500; i++) {
        enum { E = 12 };
        struct moe_gemm g = draw_gemm(i);
        struct moe_grouped p = {.memory_share = g.memory_share,
                                .matmul_share = g.matmul_share,
                                .theta = moe_uniform(seed, i, 300)};
        int64_t n = draw(3 * i, 13), k = draw(3 * i + 1, 13), rows[E];
        double N = (double)n, K = (double)k, flops = 0, bytes = 0;
        for (uint64_t e = 0; e < E; e++) {
            rows[e] = moe_uniform(seed, i, 400 + e) < 0.3 ? 0 : draw(E * i + e, 12);
            flops += 2 * (double)rows[e] * N * K;
            bytes += rows[e] ? 2 * (N * K + (double)rows[e] * (N + K)) : 0;
        }
        double s = moe_grouped_s(&large, &p, E, rows, NULL, n, k, 2);
        if (!(s >= flops / large.matmul_flops * (1 - 1e-12) && s >= bytes / large.memory_Bps * (1 - 1e-12)))
            fail_msg("seed %d, case %d: %g s", (int)seed, (int)i, s);
    }
}

/* Launch, both products (64 to 2 * 128 and 128 to 64), what is moved: 2 B * (16 rows * 3 * (64 + 128) + 2 *
 * 32 tokens * 64) at half of 1 GB/s, and routing of 32 tokens with many experts, or many for a token. */
static void experts(void **state)
{
    struct moe_gpu gpu = small;
    struct moe_grouped p = even;
    const int64_t rows[] = {16};
    struct moe_experts_case c = {.tokens = 32,
                                 .hidden = 64,
                                 .ffn = 128,
                                 .top_k = 8,
                                 .n_experts = 128,
                                 .n_local = 1,
                                 .rows = rows,
                                 .type_bytes = 2};
    (void)state;
    gpu.memory_Bps = 1e9;
    p.launch_s = 5e-6;
    p.move_share = 0.5;
    p.route_s = 7e-6;
    p.route_token_s = 1e-8;
    double products_s = moe_grouped_s(&gpu, &p, 1, rows, NULL, 256, 64, 2) +
                        moe_grouped_s(&gpu, &p, 1, rows, NULL, 64, 128, 2);
    double us = 5 + products_s * 1e6 + 2 * (16 * 3 * 192 + 2 * 32 * 64) / 0.5e3;
    assert_us(moe_experts_s(&gpu, &p, &c), us);
    c.n_experts = 129;
    assert_us(moe_experts_s(&gpu, &p, &c), us + 7 + 0.32);
    c.n_experts = 128;
    c.top_k = 9;
    assert_us(moe_experts_s(&gpu, &p, &c), us + 7 + 0.32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_tile),
        cmocka_unit_test(waves),
        cmocka_unit_test(tiles_on_one_sm_overlap),
        cmocka_unit_test(memory_bound),
        cmocka_unit_test(split_k),
        cmocka_unit_test(bounds_and_order),
        cmocka_unit_test(grouped_tiles),
        cmocka_unit_test(grouped_memory),
        cmocka_unit_test(grouped_weights_are_read_by_each_wave),
        cmocka_unit_test(grouped_tiles_are_chosen_before),
        cmocka_unit_test(grouped_bounds),
        cmocka_unit_test(experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
