/* test_embed - kernels/embed.cu against ref.h: sums are in the order of tokens, so the results are equal. */
#include "tests/cuda/both.h"

static const struct shape {
    int64_t T, H, V, off;
} shapes[] = {{5, 33, 7, 0}, {9, 64, 3, 0}, {9, 64, 3, 1}, {0, 8, 5, 0},    {4, 0, 3, 0},
              {0, 0, 0, 0},  {1, 1, 1, 0},  {6, 7, 90, 0}, {300, 16, 9, 0}, {600, 8, 1, 0}};
enum { N_SHAPES = FEW ? 2 : sizeof shapes / sizeof *shapes };

static int32_t *open_tokens(const struct shape *s)
{
    int32_t *token = fixture_alloc((size_t)s->T * sizeof *token);
    for (int64_t t = 0; t < s->T; t++)
        token[t] = (int32_t)(moe_uniform((uint64_t)s->T, 1, (uint64_t)t) * (double)s->V);
    return token;
}

static void test_forward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++) {
            const struct shape s = shapes[i];
            int32_t *token = open_tokens(&s);
            struct both emb = both_open((enum moe_cuda_type)type, s.V * s.H, s.off, 1, -2, 2),
                        x = both_open(emb.type, s.T * s.H, s.off, 2, -2, 2);
            FIXTURE_REF(type, embed, s.T, s.H, s.V, token, emb.ref, x.ref);
            assert_int_equal(
                moe_cuda_embed(fixture_queue(0), emb.type, s.T, s.H, s.V, token, emb.kernel, x.kernel), 0);
            fixture_wait_right();
            both_expect(&x, "embed", NULL, 0);
            both_close(&emb);
            both_close(&x);
            fixture_free(token);
        }
}

/* most: bytes of the workspace that are told. */
static void backward(enum moe_cuda_type type, const struct shape *s, bool add, size_t most)
{
    int32_t *token = open_tokens(s);
    struct both dx = both_open(type, s->T * s->H, s->off, 1, -2, 2),
                demb = both_open(type, s->V * s->H, s->off, 2, -2, 2);
    struct moe_cuda_queue q = *fixture_queue(0);
    q.workspace_bytes = most;
    FIXTURE_REF(type, embed_bwd, s->T, s->H, s->V, token, dx.ref, demb.ref, add);
    assert_int_equal(moe_cuda_embed_bwd(&q, type, s->T, s->H, s->V, token, dx.kernel, demb.kernel, add), 0);
    fixture_wait_right();
    both_expect(&demb, add ? "embed_bwd, added" : "embed_bwd", NULL, 0);
    both_close(&dx);
    both_close(&demb);
    fixture_free(token);
}

static void test_backward(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int type = MOE_CUDA_F32; type <= LAST_TYPE; type++)
            for (int add = 0; add < 2; add++)
                backward((enum moe_cuda_type)type, &shapes[i], add, MOE_CUDA_WORKSPACE_BYTES);
}

static void test_more_rows_than_blocks(void **state)
{
    (void)state;
    const struct shape s = {4099, 129, 9000, 0};
    if (!FEW) backward(MOE_CUDA_BF16, &s, false, MOE_CUDA_WORKSPACE_BYTES);
}

static void test_by_parts(void **state)
{
    (void)state;
    const struct shape s = {50, 5, 4, 0};
    backward(MOE_CUDA_F32, &s, false, 12 * (FEW ? 30 : 7));
    if (!FEW) backward(MOE_CUDA_F64, &s, true, 12 * 7 + 11);
}

static void test_out_of_range(void **state)
{
    (void)state;
    static const int32_t wrong[] = {-1, 3, INT32_MIN, INT32_MAX};
    for (int i = 0; i < (FEW ? 1 : 4); i++) {
        const struct shape s = {4, 9, 3, 0};
        int32_t *token = open_tokens(&s);
        token[1] = wrong[i];
        struct both x = both_open(MOE_CUDA_F32, s.T * s.H, 0, 1, -2, 2),
                    emb = both_open(MOE_CUDA_F32, s.V * s.H, 0, 2, -2, 2);
        for (int back = 0; back < 2; back++) {
            const int err =
                back ? moe_cuda_embed_bwd(fixture_queue(0), x.type, s.T, s.H, s.V, token, x.kernel,
                                          emb.kernel, true)
                     : moe_cuda_embed(fixture_queue(0), x.type, s.T, s.H, s.V, token, emb.kernel, x.kernel);
            assert_int_equal(err, 0);
            const struct moe_cuda_fault f = fixture_wait();
            assert_true(f.set);
            assert_int_equal(f.index, wrong[i]);
            assert_int_equal(f.n, 3);
        }
        both_close(&x);
        both_close(&emb);
        fixture_free(token);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_backward),
        cmocka_unit_test(test_more_rows_than_blocks),
        cmocka_unit_test(test_by_parts),
        cmocka_unit_test(test_out_of_range),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
