/* test_combine - what the order of arrival can change, over all orders of up to five rows, and what it
 * cannot; threads; bounds of the error against sums in double. */
#include "kernels/combine.h"
#include "kernels/ref.h"
#include "sim/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

enum { T = 4, H = 150, K_MAX = 6, N = T * K_MAX, THREADS = 4, RUNS = 100 };
enum form { F32, BF16, WIDE, UNSORT_F32, UNSORT_BF16, FORMS }; /* in this order: how exact each is, below */

/* The rows as float and rounded to bf16; start: what y begins with, bf16. */
struct world {
    struct moe_combine c;
    int32_t slot[N], arrival[N];
    float weight[N], rows32[N * H], start[T * H];
    moe_bf16 rows16[N * H];
};

/* +-[1, 2) * 2^-4 .. 2^3: sums cancel, nothing over- or underflows. */
static float draw(uint64_t stream, uint64_t i)
{
    uint64_t x = moe_hash64(i * 64 + stream);
    float size = ldexpf(1 + (float)(x >> 40) * 0x1p-24f, (int)(x % 8) - 4);
    return x & 0x800 ? -size : size;
}

static void place(struct world *w, int K)
{
    w->c = (struct moe_combine){T, H, K, N, w->slot, w->arrival, w->weight, 1};
}

/* Choice i in row 5i + 3 modulo N, which 5 does not divide; every choice in its own order of arrival. */
static struct world *world(int K, uint64_t seed)
{
    struct world *w = moe_alloc(1, sizeof *w);
    place(w, K);
    for (int i = 0; i < N; i++) {
        w->slot[i] = (5 * i + 3) % N;
        w->arrival[i] = i;
        w->weight[i] = fabsf(draw(seed, 1000000 + (uint64_t)i)) / 16;
    }
    for (int i = 0; i < N * H; i++) {
        w->rows32[i] = draw(seed, (uint64_t)i);
        w->rows16[i] = moe_bf16_from_float(w->rows32[i]);
    }
    for (int i = 0; i < T * H; i++)
        w->start[i] = moe_bf16_to_float(moe_bf16_from_float(draw(seed, 2000000 + (uint64_t)i)));
    return w;
}

/* y [T,H], a bf16 as the float that it is; on top of start when `add`. */
static void combine(enum form form, const struct world *w, bool add, float *y)
{
    static moe_bf16 y16[T * H], apart16[N * H];
    static float sum[T * H], apart32[N * H];
    for (int i = 0; i < T * H; i++) { /* without `add` what was there must not matter */
        y[i] = add ? w->start[i] : 77;
        y16[i] = moe_bf16_from_float(y[i]);
        sum[i] = 99;
    }
    if (form == F32) moe_combine_scatter_f32(&w->c, w->rows32, y, add);
    if (form == BF16) moe_combine_scatter_bf16(&w->c, w->rows16, y16, add);
    if (form == WIDE) moe_combine_scatter_wide(&w->c, w->rows16, sum, y16, add);
    if (form == UNSORT_F32) moe_combine_unsort_f32(&w->c, w->rows32, apart32, y, add);
    if (form == UNSORT_BF16) moe_combine_unsort_bf16(&w->c, w->rows16, apart16, y16, add);
    for (int i = 0; i < T * H && form != F32 && form != UNSORT_F32; i++) y[i] = moe_bf16_to_float(y16[i]);
}

static void must_be_same(const float *got, const float *expected, int n, const char *what, int form)
{
    if (!memcmp(got, expected, (size_t)n * sizeof *got)) return;
    for (int i = 0; i < n; i++)
        if (memcmp(&got[i], &expected[i], sizeof *got))
            fail_msg("%s, form %d: element %d is %.9g, expected %.9g", what, form, i, got[i], expected[i]);
}

/* ---- all orders ---- */

/* The next permutation in lexical order; false after the last. */
static bool next(int n, int *p)
{
    int i = n - 2, j = n - 1;
    while (i >= 0 && p[i] > p[i + 1]) i--;
    if (i < 0) return false;
    while (p[j] < p[i]) j--;
    int swap = p[i];
    p[i] = p[j], p[j] = swap;
    for (i++, j = n - 1; i < j; i++, j--) swap = p[i], p[i] = p[j], p[j] = swap;
    return true;
}

/* The choice p[0] of every token comes first, then p[1] of every token, ... */
static void order(struct world *w, const int *p)
{
    for (int j = 0; j < w->c.K; j++)
        for (int t = 0; t < T; t++) w->arrival[j * T + t] = (int32_t)(t * w->c.K + p[j]);
}

/* How many orders give other bits than the first. */
static int orders_that_differ(struct world *w, enum form form, bool add)
{
    static float first[T * H], y[T * H];
    int p[] = {0, 1, 2, 3, 4, 5}, differ = 0;
    order(w, p);
    combine(form, w, add, first);
    while (next((int)w->c.K, p)) {
        order(w, p);
        combine(form, w, add, y);
        differ += memcmp(y, first, sizeof y) != 0;
    }
    return differ;
}

/* a + b = b + a: one row anywhere and two on top of zero have no order, in no form; unsort never has one.
 * From two on top of a value and three on top of zero on, scatter-add has. */
static void test_all_orders(void **state)
{
    (void)state;
    for (int K = 1; K <= 5; K++)
        for (uint64_t seed = 1; seed <= 5; seed++) {
            struct world *w = world(K, seed);
            for (int form = 0; form < FORMS; form++)
                for (int add = 0; add < 2; add++) {
                    int differ = orders_that_differ(w, (enum form)form, add);
                    bool ordered = (form == F32 || form == BF16) && K + add > 2;
                    if (form != WIDE && ordered != (differ > 0))
                        fail_msg("K %d, seed %d, form %d, add %d: %d orders differ", K, (int)seed, form, add,
                                 differ);
                    if (form == WIDE && K + add <= 2) assert_int_equal(differ, 0);
                }
            free(w);
        }
}

/* From zero, the first two of any order may change places. */
static void test_first_two_may_change(void **state)
{
    (void)state;
    static float one[T * H], other[T * H];
    for (int K = 2; K <= 5; K++) {
        struct world *w = world(K, 7);
        for (int form = F32; form <= WIDE; form++) {
            int p[] = {0, 1, 2, 3, 4};
            do {
                int changed[] = {p[1], p[0], p[2], p[3], p[4]};
                order(w, p);
                combine((enum form)form, w, false, one);
                order(w, changed);
                combine((enum form)form, w, false, other);
                must_be_same(other, one, T * H, "first two changed", form);
            } while (next(K, p));
        }
        free(w);
    }
}

/* A shared expert's value is one row more, weight 1, that comes first: K rows on top of it are K + 1 on top
 * of zero, in all orders, which is why K = 2 is then like K = 3. */
static void test_shared_is_first_row(void **state)
{
    (void)state;
    static float one[T * H], other[T * H];
    for (int K = 1; K <= 4; K++)
        for (int form = F32; form <= WIDE; form++) {
            struct world *w = world(K, 11), *more = world(K + 1, 11);
            for (int i = 0; i < T * (K + 1); i++) {
                int t = i / (K + 1), k = i % (K + 1);
                more->slot[i] =
                    k ? w->slot[t * K + k - 1] : w->slot[T * K + t]; /* a row that w does not use */
                more->weight[i] = k ? w->weight[t * K + k - 1] : 1;
                for (int h = 0; h < H && !k; h++) {
                    more->rows32[more->slot[i] * H + h] = w->start[t * H + h];
                    more->rows16[more->slot[i] * H + h] = moe_bf16_from_float(w->start[t * H + h]);
                }
            }
            int p[] = {0, 1, 2, 3};
            do {
                int after[] = {0, p[0] + 1, p[1] + 1, p[2] + 1, p[3] + 1};
                order(w, p);
                order(more, after);
                combine((enum form)form, w, true, one);
                combine((enum form)form, more, false, other);
                must_be_same(other, one, T * H, "shared value as a row", form);
            } while (next(K, p));
            free(more);
            free(w);
        }
}

/* bf16 steps by 2 from 256 on, float from 2^24 on. To such a value 1 and 2 are added: 256 + 1 is halfway,
 * back to 256 which is even in units of 2, + 2 = 258; 256 + 2 = 258, + 1 is halfway, on to 260. The exact 259
 * is halfway too and becomes 260, whatever the order, when it is rounded once. */
static void test_by_hand(void **state)
{
    (void)state;
    const int32_t slot[] = {0, 1}, up[] = {0, 1}, down[] = {1, 0};
    const float weight[] = {1, 1}, rows32[] = {1, 2};
    const moe_bf16 rows16[] = {moe_bf16_from_float(1), moe_bf16_from_float(2)};
    for (int turn = 0; turn < 2; turn++) {
        struct moe_combine c = {1, 1, 2, 2, slot, turn ? down : up, weight, 1};
        float y32 = 0x1p24f, sum, apart32[2];
        moe_combine_scatter_f32(&c, rows32, &y32, true);
        assert_true(y32 == 0x1p24f + (turn ? 4 : 2));
        moe_bf16 y = moe_bf16_from_float(256), apart[2];
        moe_combine_scatter_bf16(&c, rows16, &y, true);
        assert_true(moe_bf16_to_float(y) == (turn ? 260 : 258));
        y = moe_bf16_from_float(256);
        moe_combine_scatter_wide(&c, rows16, &sum, &y, true);
        assert_true(moe_bf16_to_float(y) == 260);
        y = moe_bf16_from_float(256);
        moe_combine_unsort_bf16(&c, rows16, apart, &y, true);
        assert_true(moe_bf16_to_float(y) == 260);
        moe_combine_scatter_bf16(&c, rows16, &y, false);
        assert_true(moe_bf16_to_float(y) == 3);
        y32 = 0x1p24f;
        moe_combine_unsort_f32(&c, rows32, apart32, &y32, true);
        assert_true(y32 == 0x1p24f + 2);
    }
}

/* 1 + 2^-8 is halfway between two bf16 and even is 1: as a product that is rounded, on top of -1, it leaves
 * 0. */
static void test_products_are_rounded(void **state)
{
    (void)state;
    const int32_t zero[] = {0};
    const float weight[] = {1 + 0x1p-8f};
    const moe_bf16 row[] = {moe_bf16_from_float(1)};
    const struct moe_combine c = {1, 1, 1, 1, zero, zero, weight, 1};
    moe_bf16 y = moe_bf16_from_float(-1), apart;
    float sum;
    moe_combine_scatter_bf16(&c, row, &y, true);
    assert_true(moe_bf16_to_float(y) == 0);
    y = moe_bf16_from_float(-1);
    moe_combine_scatter_wide(&c, row, &sum, &y, true);
    assert_true(moe_bf16_to_float(y) == 0x1p-8f);
    y = moe_bf16_from_float(-1);
    moe_combine_unsort_bf16(&c, row, &apart, &y, true);
    assert_true(moe_bf16_to_float(y) == 0x1p-8f);
}

/* ---- threads ---- */

/* Arrival in an order drawn from the seed (Fisher, Yates). */
static void shuffle(struct world *w, uint64_t seed)
{
    for (int n = (int)(T * w->c.K); n > 1; n--) {
        int i = (int)(moe_uniform(seed, 5, (uint64_t)n) * n);
        int32_t swap = w->arrival[i];
        w->arrival[i] = w->arrival[n - 1], w->arrival[n - 1] = swap;
    }
}

/* Some choices dropped; drawn orders, one thread and several. */
static void test_unsort_is_the_same_every_time(void **state)
{
    (void)state;
    static float first[T * H], y[T * H];
    struct world *w = world(K_MAX, 3);
    w->slot[4] = w->slot[13] = -1;
    for (int form = UNSORT_F32; form <= UNSORT_BF16; form++)
        for (int add = 0; add < 2; add++)
            for (uint64_t run = 0; run < RUNS; run++) {
                w->c.n_threads = run % 2 ? THREADS : 1;
                combine((enum form)form, w, add, run ? y : first);
                if (run) must_be_same(y, first, T * H, "unsort", form);
                shuffle(w, run);
            }
    free(w);
}

/* Two rows on top of zero have one result, also where threads race for it. */
static void test_two_by_threads(void **state)
{
    (void)state;
    static float alone[T * H], y[T * H];
    struct world *w = world(2, 9);
    for (int form = F32; form <= WIDE; form++) {
        w->c.n_threads = 1;
        combine((enum form)form, w, false, alone);
        w->c.n_threads = THREADS;
        for (uint64_t run = 0; run < RUNS; run++) {
            shuffle(w, run);
            combine((enum form)form, w, false, y);
            must_be_same(y, alone, T * H, "two rows by threads", form);
        }
    }
    free(w);
}

/* Integers add exactly, so that nothing that is lost between threads goes unseen: many rows, one token each
 * at a time for all of them. Sums of 24 rows of -7..8 stay below 256, where bf16 is exact too. */
static void test_no_row_is_lost(void **state)
{
    (void)state;
    enum { ROWS = 24, WIDE_H = 8192 }; /* long enough that threads meet */
    static moe_bf16 rows16[ROWS * WIDE_H], y16[WIDE_H];
    static float rows32[ROWS * WIDE_H], y32[WIDE_H], sum[WIDE_H], expected[WIDE_H];
    int32_t slot[ROWS], arrival[ROWS];
    float weight[ROWS];
    memset(expected, 0, sizeof expected);
    for (int i = 0; i < ROWS; i++) {
        slot[i] = arrival[i] = i, weight[i] = 1;
        for (int h = 0; h < WIDE_H; h++) {
            float value = (float)(moe_hash64((uint64_t)(i * WIDE_H + h)) % 16) - 7;
            rows32[i * WIDE_H + h] = value;
            rows16[i * WIDE_H + h] = moe_bf16_from_float(value);
            expected[h] += value;
        }
    }
    struct moe_combine c = {1, WIDE_H, ROWS, ROWS, slot, arrival, weight, THREADS};
    for (int run = 0; run < RUNS; run++) {
        moe_combine_scatter_f32(&c, rows32, y32, false);
        must_be_same(y32, expected, WIDE_H, "integers", F32);
        for (int form = BF16; form <= WIDE; form++) {
            if (form == BF16)
                moe_combine_scatter_bf16(&c, rows16, y16, false);
            else
                moe_combine_scatter_wide(&c, rows16, sum, y16, false);
            for (int h = 0; h < WIDE_H; h++) y32[h] = moe_bf16_to_float(y16[h]);
            must_be_same(y32, expected, WIDE_H, "integers", form);
        }
    }
}

/* ---- the values ---- */

/* The sum in double, and that of the absolute values. Products of 24 bits by 24 are exact; the sums' own
 * errors are below 2^-50 of the bounds. */
static double exactly(const struct world *w, bool wide_rows, bool add, int at, double *size)
{
    double sum = add ? w->start[at] : 0;
    *size = fabs(sum);
    for (int64_t i = at / H * w->c.K; i < (at / H + 1) * w->c.K; i++) {
        if (w->slot[i] == -1) continue;
        int from = w->slot[i] * H + at % H;
        double p = (double)w->weight[i] * (wide_rows ? w->rows32[from] : moe_bf16_to_float(w->rows16[from]));
        sum += p;
        *size += fabs(p);
    }
    return sum;
}

/* The bounds that combine.h states; derived there, none is fitted. */
static void test_error_bounds(void **state)
{
    (void)state;
    const double u = 0x1p-24, v = 0x1p-8;
    static float y[T * H];
    for (int K = 1; K <= K_MAX; K++)
        for (int run = 0; run < 40 * FORMS; run++) {
            enum form form = (enum form)(run % FORMS);
            bool add = run / FORMS % 2;
            struct world *w = world(K, (uint64_t)(100 + run / FORMS));
            w->c.n_threads = run / FORMS % 4 == 3 ? THREADS : 1;
            if (K > 2) w->slot[K + 1] = -1;
            shuffle(w, (uint64_t)run);
            combine(form, w, add, y);
            for (int i = 0; i < T * H; i++) {
                double size, exact = exactly(w, form == F32 || form == UNSORT_F32, add, i, &size);
                double sums = (pow(1 + u, K + add) - 1) * size;
                double bound = form == BF16 ? ((1 + u) * pow(1 + v, K + add) - 1) * size
                               : form == WIDE || form == UNSORT_BF16 ? v * fabs(exact) + (1 + v) * sums
                                                                     : sums;
                if (!(fabs(y[i] - exact) <= bound * (1 + 0x1p-40)))
                    fail_msg("K %d, run %d, form %d: %.9g for %.17g, bound %g", K, run, form, y[i], exact,
                             bound);
            }
            free(w);
        }
}

/* In one step, by the kernel that runs. */
static void test_as_ref(void **state)
{
    (void)state;
    enum { E = 7 };
    static float y[T * H], expected[T * H], prob[T * E];
    int32_t expert[N];
    for (int K = 1; K <= K_MAX; K++) {
        struct world *w = world(K, 21);
        if (K > 1) w->slot[K - 1] = -1;
        for (int i = 0; i < T * K; i++) {
            expert[i] = (i / K + i % K) % E;
            prob[i / K * E + expert[i]] = w->weight[i];
        }
        moe_ref_combine_f32(T, H, K, E, N, w->rows32, prob, expert, w->slot, expected);
        combine(UNSORT_F32, w, false, y);
        must_be_same(y, expected, T * H, "moe_ref_combine_f32", UNSORT_F32);
        combine(F32, w, false, y); /* arriving in the order of k */
        must_be_same(y, expected, T * H, "moe_ref_combine_f32", F32);
        free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_orders),           cmocka_unit_test(test_first_two_may_change),
        cmocka_unit_test(test_shared_is_first_row),  cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_products_are_rounded), cmocka_unit_test(test_unsort_is_the_same_every_time),
        cmocka_unit_test(test_two_by_threads),       cmocka_unit_test(test_no_row_is_lost),
        cmocka_unit_test(test_error_bounds),         cmocka_unit_test(test_as_ref),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
