/* Kernels by hand. The machine: memory 4000 B/us; float32 10^6 FLOP/us, float64 half and bfloat16
 * twice of it. */
#include "sim/lower/builder.h"
#include "sim/simulate_cost.h"
#include "sim/values.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static const struct moe_topo machine = {.matmul_float32_flops = 1e12,
                                        .matmul_float64_flops = 0.5e12,
                                        .matmul_bfloat16_flops = 2e12,
                                        .memory_Bps = 4e9};

static void open_step(struct moe_builder *b)
{
    moe_builder_open(b, 1, (int64_t[]){0});
    moe_run_block(b, moe_new_block(b, "step", MOE_FORWARD, false), 0);
}

/* Time of the last operation, after those before have run. */
static void expect_s(struct moe_builder *b, const struct moe_routing *r, const struct moe_topo *t,
                     double expected_s)
{
    struct moe_schedule *s = moe_builder_close(b);
    struct moe_values *v = moe_values_new(s, r);
    const struct moe_block *block = &s->roles[0].blocks[0];
    for (int o = 0; o < block->n_ops - 1; o++) moe_values_kernel(v, &block->ops[o], 0, 0);
    moe_ps time;
    struct moe_asked asked = {s, moe_values_device(v), block, &block->ops[block->n_ops - 1], 0, 0};
    assert_int_equal(moe_kernel_time(&asked, t, &time), MOE_OK);
    assert_int_equal(time, moe_time(expected_s, 1));
    moe_values_free(v);
    moe_schedule_free(s);
}

static void expect_us(struct moe_builder *b, const struct moe_routing *r, int us)
{
    expect_s(b, r, &machine, us * 1e-6);
}

/* 8000 B take 2 us; 5 * 10^6 FLOP beside them 5 us in float32, 10 us in float64, and 10^6
 * make no difference. */
static void test_memory(void **state)
{
    (void)state;
    static const struct {
        enum moe_type type;
        int64_t flops;
        int us;
    } cases[] = {{MOE_F32, 0, 2}, {MOE_F32, 1000000, 2}, {MOE_F32, 5000000, 5}, {MOE_F64, 5000000, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_builder b;
        open_step(&b);
        moe_emit(&b, (struct moe_op){.kernel = MOE_K_ATTENTION,
                                     .type = cases[i].type,
                                     .bytes = moe_const(&b, 8000),
                                     .flops = moe_const(&b, cases[i].flops)});
        expect_us(&b, NULL, cases[i].us);
    }
}

/* [N, N] x [N, N]: 2 N^3 FLOP, 3 N^2 elements.
 * N = 3000: 54 * 10^9 FLOP: 54,000 us in float32 (memory: 27,000), 108,000 us in float64.
 * N = 300: 54 us of arithmetic, but 1.08 MB: 270 us in float32, 540 us in float64; half
 * of 270 in bfloat16. */
static void test_product(void **state)
{
    (void)state;
    static const struct {
        enum moe_type type;
        int64_t n;
        int us;
    } cases[] = {{MOE_F32, 3000, 54000}, {MOE_F64, 3000, 108000}, {MOE_F32, 300, 270},
                 {MOE_F64, 300, 540},    {MOE_BF16, 3000, 27000}, {MOE_BF16, 300, 135}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_builder b;
        open_step(&b);
        int n = moe_const(&b, cases[i].n);
        moe_emit(&b, (struct moe_op){.kernel = MOE_K_GEMM, .type = cases[i].type, MOE_SIZES(n, n, n)});
        expect_us(&b, NULL, cases[i].us);
    }
}

/* Groups of 0, 300 and 3000 rows times [3000, 3000], one after the other:
 *      0: nothing is called                                             0 us
 *    300: 5.4 * 10^9 FLOP take 5,400 us, 43.2 MB                   10,800 us
 *   3000: 54 * 10^9 FLOP                                           54,000 us */
static void test_grouped_product(void **state)
{
    (void)state;
    struct moe_routing *r = moe_routing_new(1, 1, 3, 1);
    memcpy(r->counts, (int32_t[]){0, 300, 3000}, 3 * sizeof *r->counts);
    struct moe_builder b;
    open_step(&b);
    int n = moe_const(&b, 3000), e = moe_const(&b, 3);
    struct moe_ref counts = moe_ref(moe_new_buffer(&b, "counts", MOE_BUF_COUNTS, MOE_I64, 1, e));
    struct moe_symbol y = {.scope = MOE_SCOPE_EXPERT, .comm = -1, .rows = 1, .cols = 3};
    int group = moe_new_symbol(&b, "rows", counts.buffer, false, y);
    moe_emit(&b, (struct moe_op){.kernel = MOE_K_TOPK, .bytes = moe_const(&b, 0), MOE_WRITES(counts)});
    moe_emit(&b, (struct moe_op){.kernel = MOE_K_GROUPED_GEMM, .group = group, MOE_SIZES(e, n, n)});
    expect_us(&b, r, 64800);
    moe_routing_free(r);
}

/* A GPU whose tiles are known: bfloat16 products, alone and of a group, are those of gemm.h; gradients of
 * weights are one product an expert; float32 and memory stay as they are. */
static void test_tiles(void **state)
{
    (void)state;
    static const struct moe_gpu gpu = {132, 227 << 10, 989e12, 3.35e12, 33e12};
    struct moe_topo t = machine;
    t.gpu = gpu;
    t.gemm = (struct moe_gemm){2.5e-6, 1e-7, 0.9, 0.85, 20e12, 3e-6, 5e12, 4e12};
    t.experts = (struct moe_grouped){20e-6, 0.95, 0.9, 0.2, 15e-6, 1e-8};
    const int64_t rows[3] = {0, 300, 3000};
    double alone_s[3];
    for (int i = 0; i < 3; i++) alone_s[i] = rows[i] ? moe_gemm_s(&gpu, &t.gemm, rows[i], 512, 1024, 2) : 0;
    const struct {
        enum moe_kernel kernel;
        enum moe_type type;
        double s;
    } cases[] = {
        {MOE_K_GEMM, MOE_BF16, alone_s[2]},
        {MOE_K_GROUPED_GEMM, MOE_BF16, 2.5e-6 + moe_grouped_s(&gpu, &t.experts, 3, rows, NULL, 512, 1024, 2)},
        {MOE_K_GROUPED_WGRAD, MOE_BF16, alone_s[1] + alone_s[2] + 2 * 512 * 1024 / 4e9},
        {MOE_K_GEMM, MOE_F32, 4.0 * (3000 * 1024 + 1024 * 512 + 3000 * 512) / 4e9},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_routing *r = moe_routing_new(1, 1, 3, 1);
        for (int g = 0; g < 3; g++) r->counts[g] = (int32_t)rows[g];
        struct moe_builder b;
        open_step(&b);
        int n = moe_const(&b, 512), k = moe_const(&b, 1024), e = moe_const(&b, 3), m = moe_const(&b, 3000);
        struct moe_ref counts = moe_ref(moe_new_buffer(&b, "counts", MOE_BUF_COUNTS, MOE_I64, 1, e));
        struct moe_symbol y = {.scope = MOE_SCOPE_EXPERT, .comm = -1, .rows = 1, .cols = 3};
        int group = moe_new_symbol(&b, "rows", counts.buffer, false, y);
        moe_emit(&b, (struct moe_op){.kernel = MOE_K_TOPK, .bytes = moe_const(&b, 0), MOE_WRITES(counts)});
        struct moe_op op = {.kernel = cases[i].kernel, .type = cases[i].type, .group = group};
        op.n_dims = 3;
        op.dims[0] = op.kernel == MOE_K_GEMM ? m : e;
        op.dims[1] = n;
        op.dims[2] = k;
        moe_emit(&b, op);
        expect_s(&b, r, &t, cases[i].s);
        moe_routing_free(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_product),
        cmocka_unit_test(test_grouped_product),
        cmocka_unit_test(test_tiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
