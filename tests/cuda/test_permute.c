/* test_permute - kernels/permute.cu against ref.h. Rows are copied, or summed in the order of the reference:
 * every comparison is of bits, for bf16 after its one rounding. */
#include "tests/cuda/choices.h"

/* Shorter than a lump, whole lumps or not, several to a warp or a block, and more than a block has threads
 * for (units of a row: 1025 and 4104 / 4). */
static const int64_t widths[] = {1, 7, 8, 33, 64, 257, 1025, 4104};
enum { N_WIDTHS = sizeof widths / sizeof *widths };

#define FOR_TYPES(type) for (enum moe_cuda_type type = MOE_CUDA_F32; type <= MOE_CUDA_BF16; type++)

/* Both ways, with `q` as it is. shift: elements by which rows are off a lump. */
static void check_permute(const struct moe_cuda_queue *q, enum moe_cuda_type type, const struct choices *c,
                          int64_t H, int64_t shift)
{
    const size_t off = (size_t)shift * fixture_bytes(type);
    void *x = fixture_random(type, c->T * H, 7, -2, 2), *x_ref = fixture_for_reference(type, x, c->T * H),
         *rows = open_output(type, shift + c->n * H), *drows = fixture_random(type, c->n * H, 8, -2, 2),
         *rows_ref = fixture_for_reference(type, rows, c->n * H),
         *drows_ref = fixture_for_reference(type, drows, c->n * H);
    assert_int_equal(moe_cuda_permute(q, type, c->T, H, c->K, c->n, x, c->slot, (char *)rows + off), 0);
    fixture_wait_right();
    FIXTURE_REF(type, permute, c->T, H, c->K, c->n, x_ref, c->slot, rows_ref);
    expect_same(type, "permute", c->n * H, rows_ref, (char *)rows + off);
    for (int add = 0; add < 2; add++) {
        assert_int_equal(moe_cuda_permute_bwd(q, type, c->T, H, c->K, c->n, drows, c->slot, x, add), 0);
        fixture_wait_right();
        FIXTURE_REF(type, permute_bwd, c->T, H, c->K, c->n, drows_ref, c->slot, x_ref, add);
        expect_same(type, add ? "permute_bwd, add" : "permute_bwd", c->T * H, x_ref, x);
        free(x_ref);
        x_ref = fixture_for_reference(type, x, c->T * H);
    }
    void *kernel[] = {x, rows, drows}, *ref[] = {x_ref, rows_ref, drows_ref};
    for (int i = 0; i < 3; i++) {
        fixture_free(kernel[i]);
        free(ref[i]);
    }
}

static void test_permute(void **state)
{
    (void)state;
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int w = 0; w < (FEW ? 3 : N_WIDTHS); w++) FOR_TYPES(type)
            {
                const int64_t K = FEW ? 2 : 1 + (w + kind + (int)type) % 8, T = widths[w] > 1000 ? 3
                                                                                : FEW            ? 6
                                                                                                 : 37;
                if (FEW && (kind + w) % 3 != (int)type) continue;
                struct choices c = open_choices(kind, T, K, 11);
                check_permute(fixture_used_queue(), type, &c, widths[w], 0);
                close_choices(&c);
            }
}

/* More choices than a thread holds; no token; no row; rows that do not begin at a lump. */
static void test_edges(void **state)
{
    (void)state;
    FOR_TYPES(type)
    {
        struct choices many = open_choices(DROPPED, 5, 19, 40), none = open_choices(PLAIN, 0, 2, 3),
                       plain = open_choices(PLAIN, 9, 2, 3);
        check_permute(fixture_used_queue(), type, &many, 16, 0);
        check_permute(fixture_used_queue(), type, &none, 8, 0);
        none.n = 5; /* of which all are 0 */
        check_permute(fixture_used_queue(), type, &none, 8, 0);
        check_permute(fixture_used_queue(), type, &plain, 8, 1);
        check_permute(fixture_used_queue(), type, &plain, 0, 0);
        for (int64_t i = 0; i < plain.T * plain.K; i++) plain.slot[i] = -1;
        plain.n = 0;
        check_permute(fixture_used_queue(), type, &plain, 8, 0);
        close_choices(&many);
        close_choices(&none);
        close_choices(&plain);
    }
}

/* A workspace for 5 owners: rows are filled 5 at a time. */
static void test_little_workspace(void **state)
{
    (void)state;
    for (int kind = FEW ? PADDED : 0; kind < N_KINDS; kind++) {
        struct choices c = open_choices(kind, FEW ? 4 : 9, 2, 6);
        struct moe_cuda_queue q = *fixture_used_queue();
        q.workspace_bytes = 5 * sizeof(int32_t);
        check_permute(&q, MOE_CUDA_F32, &c, 7, 0);
        check_permute(&q, MOE_CUDA_BF16, &c, 8, 0);
        close_choices(&c);
    }
}

/* The last choice of a row has it, as in the reference; integers are moved as they are. */
static void test_named_twice(void **state)
{
    (void)state;
    enum { T = 40, H = 8, n = 3 };
    int32_t *x = fixture_alloc(T * H * sizeof *x), *slot = fixture_alloc(T * sizeof *slot),
            *rows = fixture_alloc(n * H * sizeof *rows);
    for (int i = 0; i < T * H; i++) x[i] = (int32_t)(0x7f800001u + (uint32_t)i); /* as a float: signals */
    for (int t = 0; t < T; t++) slot[t] = t % 2;
    assert_int_equal(moe_cuda_permute(fixture_used_queue(), MOE_CUDA_F32, T, H, 1, n, x, slot, rows), 0);
    fixture_wait_right();
    assert_memory_equal(rows, x + (T - 2) * H, 2 * H * sizeof *x);
    for (int h = 0; h < H; h++) assert_int_equal(rows[2 * H + h], 0);
    fixture_free(x);
    fixture_free(slot);
    fixture_free(rows);
}

static void test_wrong_slot(void **state)
{
    (void)state;
    static const int32_t wrong[] = {INT32_MIN, -2, 18, INT32_MAX};
    enum { T = 9, H = 8, K = 2, n = 18 };
    struct choices c = open_choices(PLAIN, T, K, 3);
    float *x = fixture_alloc(T * H * sizeof *x), *rows = fixture_alloc(n * H * sizeof *rows);
    for (int i = 0; i < 4; i++) {
        const int32_t right = c.slot[5];
        c.slot[5] = wrong[i];
        assert_int_equal(moe_cuda_permute(fixture_used_queue(), MOE_CUDA_F32, T, H, K, n, x, c.slot, rows),
                         0);
        expect_fault(wrong[i], n);
        assert_int_equal(
            moe_cuda_permute_bwd(fixture_used_queue(), MOE_CUDA_F32, T, H, K, n, rows, c.slot, x, true), 0);
        expect_fault(wrong[i], n);
        c.slot[5] = right;
    }
    assert_int_equal(moe_cuda_permute(fixture_used_queue(), MOE_CUDA_F32, T, H, K, 0, x, c.slot, rows), 0);
    assert_int_equal(fixture_wait().set, 1); /* no row at all */
    close_choices(&c);
    fixture_free(x);
    fixture_free(rows);
}

/* ---- sort_rows, unsort_rows ---- */

/* counts [P,e] of rows, in all N: none, of one source, or random with a third of 0. */
static int64_t *open_counts(int64_t P, int64_t e, int64_t most, int64_t *N)
{
    int64_t *counts = fixture_alloc((size_t)(P * e) * sizeof *counts);
    *N = 0;
    for (int64_t i = 0; i < P * e; i++) {
        counts[i] = (int64_t)(moe_uniform(3, 0, (uint64_t)i) * 1.5 * (double)(most + 1)) - (most + 1) / 2;
        if (counts[i] < 0) counts[i] = 0;
        *N += counts[i];
    }
    return counts;
}

typedef int sort_fn(const struct moe_cuda_queue *q, enum moe_cuda_type type, int64_t P, int64_t e, int64_t H,
                    const void *from, const int64_t *counts, void *to, bool add);

static void check_sort(enum moe_cuda_type type, int64_t P, int64_t e, int64_t H, int64_t most)
{
    int64_t N;
    int64_t *counts = open_counts(P, e, most, &N);
    void *from = fixture_random(type, N * H, 4, -2, 2), *from_ref = fixture_for_reference(type, from, N * H);
    for (int i = 0; i < 4; i += FEW ? 3 : 1) {
        const bool unsort = i / 2, add = i % 2;
        sort_fn *kernel = unsort ? moe_cuda_unsort_rows : moe_cuda_sort_rows;
        void *to = fixture_random(type, N * H, 5, -2, 2), *to_ref = fixture_for_reference(type, to, N * H);
        assert_int_equal(kernel(fixture_used_queue(), type, P, e, H, from, counts, to, add), 0);
        fixture_wait_right();
        if (unsort)
            FIXTURE_REF(type, unsort_rows, P, e, H, from_ref, counts, to_ref, add);
        else
            FIXTURE_REF(type, sort_rows, P, e, H, from_ref, counts, to_ref, add);
        expect_same(type, unsort ? "unsort_rows" : "sort_rows", N * H, to_ref, to);
        fixture_free(to);
        free(to_ref);
    }
    fixture_free(from);
    free(from_ref);
    fixture_free(counts);
}

static void test_sort(void **state)
{
    (void)state;
    FOR_TYPES(type)
    {
        if (FEW && type != MOE_CUDA_BF16) continue;
        check_sort(type, 4, 3, FEW ? 1 : 7, 9);
        if (FEW) continue;
        check_sort(type, 1, 1, 64, 70);
        check_sort(type, 8, 2, 33, 40);
        check_sort(type, 3, 5, 8, 0); /* no row */
        check_sort(type, 2, 4, 257, 6);
        check_sort(type, 2, 2, 4104, 2);
        check_sort(type, 0, 4, 8, 2);
        check_sort(type, 2, 4, 0, 2);
    }
    if (FEW) return;
    check_sort(MOE_CUDA_F32, 64, 8, 1, 20);   /* more parts than the block that sums them has threads */
    check_sort(MOE_CUDA_BF16, 2, 2, 8, 4000); /* more rows than walkers */
}

static void test_wrong_count(void **state)
{
    (void)state;
    int64_t *counts = fixture_alloc(4 * sizeof *counts);
    float *rows = fixture_alloc(3 * sizeof *rows), *sorted = fixture_alloc(3 * sizeof *sorted);
    const int64_t some[4] = {1, 1, -5, 1};
    memcpy(counts, some, sizeof some);
    assert_int_equal(
        moe_cuda_sort_rows(fixture_used_queue(), MOE_CUDA_F32, 2, 2, 1, rows, counts, sorted, false), 0);
    expect_fault(-5, INT32_MAX);
    fixture_free(counts);
    fixture_free(rows);
    fixture_free(sorted);
}

/* ---- align ---- */

static int align(const struct choices *c, int64_t A, int32_t *aligned_slot, int64_t *aligned)
{
    return moe_cuda_align(fixture_used_queue(), MOE_CUDA_F32, c->T, c->E, c->K, A, c->expert, c->slot,
                          c->counts, aligned_slot, aligned);
}

static void check_align(enum kind kind, int64_t T, int64_t K, int64_t E, int64_t A)
{
    struct choices c = open_choices(kind, T, K, E);
    const size_t n = (size_t)(T * K) * sizeof(int32_t), bytes = (size_t)E * sizeof(int64_t);
    int32_t *slot = fixture_alloc(n), *slot_ref = test_malloc(n + 1);
    int64_t *aligned = fixture_alloc(bytes), *aligned_ref = test_malloc(bytes + 1);
    assert_int_equal(align(&c, A, slot, aligned), 0);
    fixture_wait_right();
    moe_ref_align_f32(T, E, K, A, c.expert, c.slot, c.counts, slot_ref, aligned_ref);
    assert_memory_equal(slot, slot_ref, n);
    assert_memory_equal(aligned, aligned_ref, bytes);
    fixture_free(slot);
    fixture_free(aligned);
    test_free(slot_ref);
    test_free(aligned_ref);
    close_choices(&c);
}

static void test_align(void **state)
{
    (void)state;
    static const int64_t multiples[] = {1, 2, 16, 128};
    for (int i = FEW ? 3 : 0; i < 4; i++)
        for (int kind = FEW ? ONE : PLAIN; kind <= ONE; kind++) {
            check_align(kind, FEW ? 8 : 50, 4, 7, multiples[i]);
            if (FEW) continue;
            check_align(kind, 33, 1, 1, multiples[i]);
            check_align(kind, 100, 8, 512, multiples[i]);
            check_align(kind, 0, 8, 5, multiples[i]);
        }
}

static void test_align_wrong(void **state)
{
    (void)state;
    struct choices c = open_choices(PLAIN, 9, 2, 3);
    int32_t *slot = fixture_alloc(18 * sizeof *slot);
    int64_t *aligned = fixture_alloc(3 * sizeof *aligned);
    const int32_t expert = c.expert[4], row = c.slot[4];
    int64_t before = 0;
    for (int e = 0; e < expert; e++) before += c.counts[e];
    c.expert[4] = 3;
    assert_int_equal(align(&c, 4, slot, aligned), 0);
    expect_fault(3, 3);
    c.expert[4] = expert;
    c.slot[4] = (int32_t)(before + c.counts[expert]); /* the first row of the next expert */
    assert_int_equal(align(&c, 4, slot, aligned), 0);
    expect_fault(c.counts[expert], c.counts[expert]);
    c.slot[4] = row;
    c.counts[2] = -1;
    assert_int_equal(align(&c, 4, slot, aligned), 0);
    assert_int_equal(fixture_wait().set, 1);
    assert_int_not_equal(align(&c, 0, slot, aligned), 0); /* no multiple of 0 */
    fixture_free(slot);
    fixture_free(aligned);
    close_choices(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_permute),     cmocka_unit_test(test_edges),
        cmocka_unit_test(test_named_twice), cmocka_unit_test(test_little_workspace),
        cmocka_unit_test(test_wrong_slot),  cmocka_unit_test(test_sort),
        cmocka_unit_test(test_wrong_count), cmocka_unit_test(test_align),
        cmocka_unit_test(test_align_wrong),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
