/* test_kernels - the reference kernels on vectors that are solved by hand, and what makes
 * attention causal. */
#include "kernels/ref.h"
#include "sim/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

static void must_be_near(const double *got, const double *expected, int n)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(got[i] - expected[i]) <= 1e-12 * fmax(1, fabs(expected[i]))))
            fail_msg("element %d is %.17g, expected %.17g", i, got[i], expected[i]);
}

/* Softmax of logarithms: weights 1 2 5 are 1/8 2/8 5/8, choices 2 1; three equal ones choose 0 1 (lower id);
 * weights 6 1 1 choose 0, then 1 of the equal two. Pairs sorted by expert, then token:
 * expert 0: (1,0) (2,0); expert 1: (0,1) (1,1) (2,1); expert 2: (0,0). */
static void test_topk(void **state)
{
    (void)state;
    const double logits[] = {log(1), log(2), log(5), 0, 0, 0, log(6), log(1), log(1)};
    double prob[9];
    int32_t expert[6], slot[6];
    int64_t counts[3];
    moe_ref_topk_f64(3, 3, 2, logits, prob, expert, slot, counts);
    must_be_near(prob, (double[]){.125, .25, .625, 1. / 3, 1. / 3, 1. / 3, .75, .125, .125}, 9);
    assert_memory_equal(expert, ((int32_t[]){2, 1, 0, 1, 0, 1}), sizeof expert);
    assert_memory_equal(slot, ((int32_t[]){5, 2, 0, 3, 1, 4}), sizeof slot);
    assert_memory_equal(counts, ((int64_t[]){2, 3, 1}), sizeof counts);
}

/* Logits of a broken run still give a routing that stays inside its buffers. */
static void test_topk_of_nan(void **state)
{
    (void)state;
    const double logits[] = {NAN, 0, NAN, 1};
    double prob[4];
    int32_t expert[3], slot[3];
    int64_t counts[4];
    moe_ref_topk_f64(1, 4, 3, logits, prob, expert, slot, counts);
    int64_t sum = 0;
    for (int e = 0; e < 4; e++) {
        assert_in_range(counts[e], 0, 1);
        sum += counts[e];
    }
    assert_int_equal(sum, 3);
}

/* Token 0 in row 5, its second choice dropped; token 1 in 0 and 3, token 2 in 1 and 4; nobody in row 2. */
static void test_permute(void **state)
{
    (void)state;
    const double x[] = {1, 2, 3}, drows[] = {1, 2, 4, 8, 16, 32};
    const int32_t slot[] = {5, -1, 0, 3, 1, 4};
    double rows[] = {9, 9, 9, 9, 9, 9}, dx[3];
    moe_ref_permute_f64(3, 1, 2, 6, x, slot, rows);
    assert_memory_equal(rows, ((double[]){2, 3, 0, 2, 3, 1}), sizeof rows);
    moe_ref_permute_bwd_f64(3, 1, 2, 6, drows, slot, dx, false);
    assert_memory_equal(dx, ((double[]){32, 1 + 8, 2 + 16}), sizeof dx);
}

/* Experts of 5 tokens with 2 choices each, and what makes two of three experts overflow a capacity of 2.
 *   token         0    1    2    3    4
 *   choices      0 1  0 1  1 0  0 2  0 1
 *   prob of 0    .5   .4   .3   .5   .5     5 choices
 *   prob of 1    .3   .4   .6   .2   .4     4 choices (token 3 did not choose it) */
static const double limit_prob[] = {.5, .3, .2, .4, .4, .2, .3, .6, .1, .5, .2, .3, .5, .4, .1};
static const int32_t limit_expert[] = {0, 1, 0, 1, 1, 0, 0, 2, 0, 1};

struct limit_case {
    const char *name;
    int64_t C, G;
    enum moe_ref_order order;
    bool pad;
    int32_t slot[10], kept_expert[10];
    int64_t kept[3];
};

/* clang-format off */
static const struct limit_case limit_cases[] = {
    /* 0 keeps tokens 0 and 3 (.5 three times: the earlier), 1 keeps 2 (.6) and 1 (.4, before token 4). */
    {"most probable", 2, 5, MOE_REF_BY_PROB, false,
     {0, -1, -1, 2, 3, -1, 1, 4, -1, -1}, {0, -1, -1, 1, 1, -1, 0, 2, -1, -1}, {2, 2, 1}},
    {"first", 2, 5, MOE_REF_BY_POSITION, false,
     {0, 2, 1, 3, -1, -1, -1, 4, -1, -1}, {0, 1, 0, 1, -1, -1, -1, 2, -1, -1}, {2, 2, 1}},
    /* 1 is the first choice of token 2, and the second of 0, 1 and 4. */
    {"by choice", 2, 5, MOE_REF_BY_CHOICE, false,
     {0, 2, 1, -1, 3, -1, -1, 4, -1, -1}, {0, 1, 0, -1, 1, -1, -1, 2, -1, -1}, {2, 2, 1}},
    {"most probable, padded", 2, 5, MOE_REF_BY_PROB, true,
     {0, -1, -1, 2, 3, -1, 1, 4, -1, -1}, {0, -1, -1, 1, 1, -1, 0, 2, -1, -1}, {2, 2, 2}},
    /* Groups of tokens 0 1, 2 3 and 4: each keeps the best of each expert. */
    {"groups", 1, 2, MOE_REF_BY_PROB, false,
     {0, -1, -1, 3, 4, -1, 1, 6, 2, 5}, {0, -1, -1, 1, 1, -1, 0, 2, 0, 1}, {3, 3, 1}},
    /* Group g of expert e is row 3 e + g. */
    {"groups, padded", 1, 2, MOE_REF_BY_PROB, true,
     {0, -1, -1, 3, 4, -1, 1, 7, 2, 5}, {0, -1, -1, 1, 1, -1, 0, 2, 0, 1}, {3, 3, 3}},
    {"first of groups, padded", 1, 2, MOE_REF_BY_POSITION, true,
     {0, 3, -1, -1, 4, 1, -1, 7, 2, 5}, {0, 1, -1, -1, 1, 0, -1, 2, 0, 1}, {3, 3, 3}},
    {"nothing fits", 0, 5, MOE_REF_BY_PROB, false,
     {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1}, {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1}, {0, 0, 0}},
    {"all fit", 6, 5, MOE_REF_BY_PROB, false,
     {0, 5, 1, 6, 7, 2, 3, 9, 4, 8}, {0, 1, 0, 1, 1, 0, 0, 2, 0, 1}, {5, 4, 1}},
    {"all fit, padded", 6, 5, MOE_REF_BY_PROB, true,
     {0, 6, 1, 7, 8, 2, 3, 12, 4, 9}, {0, 1, 0, 1, 1, 0, 0, 2, 0, 1}, {6, 6, 6}},
};
/* clang-format on */

static void test_limit(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof limit_cases / sizeof *limit_cases; i++) {
        const struct limit_case *c = &limit_cases[i];
        int32_t slot[10], kept_expert[10];
        int64_t kept[3], arrive[] = {-9, -9, -9}, untouched[] = {-9, -9, -9};
        moe_ref_limit_f64(5, 3, 2, c->C, c->G, c->order, c->pad, 7, limit_prob, limit_expert, slot,
                          kept_expert, kept, arrive);
        if (memcmp(slot, c->slot, sizeof slot)) fail_msg("%s: slot", c->name);
        if (memcmp(kept_expert, c->kept_expert, sizeof kept_expert)) fail_msg("%s: kept_expert", c->name);
        if (memcmp(kept, c->kept, sizeof kept)) fail_msg("%s: kept", c->name);
        assert_memory_equal(arrive, c->pad ? kept : untouched, sizeof arrive);
    }
}

/* A rank without tokens sends nothing. Probabilities of a broken run still keep no more than C rows. */
static void test_limit_edges(void **state)
{
    (void)state;
    const double prob[] = {1, NAN, 0};
    const int32_t expert[] = {0, 0, 0};
    int32_t slot[3], kept_expert[3];
    int64_t kept[] = {-9, -9}, arrive[] = {-9, -9};
    moe_ref_limit_f64(0, 2, 1, 0, 0, MOE_REF_BY_PROB, true, 0, NULL, NULL, NULL, NULL, kept, arrive);
    assert_memory_equal(kept, ((int64_t[]){0, 0}), sizeof kept);
    assert_memory_equal(arrive, ((int64_t[]){0, 0}), sizeof arrive);
    moe_ref_limit_f64(3, 1, 1, 2, 3, MOE_REF_BY_PROB, false, 0, prob, expert, slot, kept_expert, kept, NULL);
    assert_int_equal(kept[0], 2);
}

/* Four tokens want one place. Over 4,000 seeds each gets it about 1,000 times: three in a thousand such draws
 * are off by more than 3 standard deviations of 27. Token t with seed s is token 0 with seed s + t. */
static void test_limit_at_random(void **state)
{
    (void)state;
    const int32_t expert[] = {0, 0, 0, 0};
    const double prob[] = {1, 1, 1, 1};
    int times[4] = {0};
    for (uint64_t seed = 0; seed < 4000; seed++) {
        int32_t slot[4], kept_expert[4];
        int64_t kept;
        moe_ref_limit_f64(4, 1, 1, 1, 4, MOE_REF_RANDOM, false, 4 * seed, prob, expert, slot, kept_expert,
                          &kept, NULL);
        assert_int_equal(kept, 1);
        for (int t = 0; t < 4; t++) times[t] += slot[t] == 0;
    }
    for (int t = 0; t < 4; t++) assert_true(times[t] > 1000 - 3 * 27 && times[t] < 1000 + 3 * 27);
    int32_t all[4], part[2], kept_all[4], kept_part[2];
    int64_t kept;
    moe_ref_limit_f64(4, 1, 1, 1, 2, MOE_REF_RANDOM, false, 5, prob, expert, all, kept_all, &kept, NULL);
    moe_ref_limit_f64(2, 1, 1, 1, 2, MOE_REF_RANDOM, false, 7, prob, expert, part, kept_part, &kept, NULL);
    assert_memory_equal(kept_part, kept_all + 2, sizeof kept_part);
}

/* By hand: token 0 has .5 and .25 of its experts 2 and 0, token 1 only expert 1 left, token 2 none, and the
 * experts of token 3 have nothing: divided by 2^-23 instead. */
static void test_normalize(void **state)
{
    (void)state;
    const double prob[] = {.25, .25, .5, .1, .4, .5, .3, .3, .4, 0, 0, 1};
    const int32_t expert[] = {2, 0, -1, 1, -1, -1, 0, 1};
    const double dgate[] = {3, 7, 6, 7, 2, 7, 7, 7, 7, 1, 0, 7};
    double gate[12], dprob[12];
    moe_ref_normalize_f64(4, 3, 2, prob, expert, gate);
    const double want[] = {1 / 3.0, 0, 2 / 3.0, 0, 1, 0, 0, 0, 0, 0, 0, 0};
    must_be_near(gate, want, 12);
    moe_ref_normalize_bwd_f64(4, 3, 2, prob, expert, dgate, dprob, false);
    /* the mean of 3 and 6 by gate is 5; a gate of one expert is 1 whatever its probability is */
    const double dwant[] = {(3 - 5) / .75, 0, (6 - 5) / .75, 0, 0, 0, 0, 0, 0, 8388608, 0, 0};
    must_be_near(dprob, dwant, 12);
}

static void test_largest(void **state)
{
    (void)state;
    int64_t y = -9;
    moe_ref_largest_f32(4, (int64_t[]){3, 7, 0, 5}, &y);
    assert_int_equal(y, 7);
    moe_ref_largest_f32(0, NULL, &y);
    assert_int_equal(y, 0);
    moe_ref_set_f32(11, &y);
    assert_int_equal(y, 11);
}

/* Experts 1 and 2: expert 1 of tokens 0 and 2, then expert 2 of token 1. */
static void test_select(void **state)
{
    (void)state;
    const int32_t expert[] = {0, 1, 2, 3, -1, 1};
    int32_t slot[6];
    moe_ref_select_f64(3, 2, 2, 1, expert, slot, NULL);
    assert_memory_equal(slot, ((int32_t[]){-1, 0, 2, -1, -1, 1}), sizeof slot);
    int32_t local[6];
    moe_ref_select_f64(3, 2, 2, 1, expert, slot, local);
    assert_memory_equal(slot, ((int32_t[]){-1, 0, 2, -1, -1, 1}), sizeof slot);
    assert_memory_equal(local, ((int32_t[]){-1, 0, 1, -1, -1, 0}), sizeof local);
}

/* 6 experts on 3 members: token 0 has two of member 0, token 1 of members 2 and 0, token 2 one of member 2
 * and one dropped, token 3 both dropped. */
static void test_spread(void **state)
{
    (void)state;
    const int32_t expert[] = {1, 0, 4, 1, -1, 5, -1, -1};
    int32_t slot[12];
    int64_t tokens_for[3] = {9, 9, 9};
    moe_ref_spread_f64(4, 6, 2, 3, expert, slot, tokens_for);
    assert_memory_equal(slot, ((int32_t[]){0, -1, -1, 1, -1, 2, -1, -1, 3, -1, -1, -1}), sizeof slot);
    assert_memory_equal(tokens_for, ((int64_t[]){2, 0, 2}), sizeof tokens_for);
    moe_ref_spread_f64(0, 6, 2, 3, NULL, NULL, tokens_for);
    assert_memory_equal(tokens_for, ((int64_t[]){0, 0, 0}), sizeof tokens_for);
}

/* Integers are moved bit by bit, also those that are no numbers as float. */
static void test_permute_integers(void **state)
{
    (void)state;
    const int32_t ids[] = {-1, 3, INT32_MIN, 0x7f800001}, slot[] = {1, -1, 0, 2};
    int32_t rows[6];
    moe_ref_permute_f32(2, 2, 2, 3, (const float *)ids, slot, (float *)rows);
    assert_memory_equal(rows, ((int32_t[]){INT32_MIN, 0x7f800001, -1, 3, INT32_MIN, 0x7f800001}),
                        sizeof rows);
}

/* 1/2 * ((1/4 + 1/2) * 6 + (3/4 + 1/2) * 2) = 3.5; each prob costs half the count of its expert. */
static void test_aux_loss(void **state)
{
    (void)state;
    const double prob[] = {.25, .75, .5, .5};
    const int64_t counts[] = {6, 2};
    double loss, dprob[] = {10, 20, 30, 40};
    moe_ref_aux_loss_f64(2, 2, .5, prob, counts, &loss);
    assert_true(loss == 3.5);
    moe_ref_aux_loss_bwd_f64(2, 2, .5, counts, dprob, true);
    assert_memory_equal(dprob, ((double[]){13, 21, 33, 41}), sizeof dprob);
}

/* Source 0 sent row 0 for expert 0 and rows 1 2 for expert 2; source 1 sent row 3 for expert 0 and 4 5 for
 * expert 1. By expert: 0 3, 4 5, 1 2. */
static void test_sort_rows(void **state)
{
    (void)state;
    const double rows[] = {0, 1, 2, 3, 4, 5};
    const int64_t counts[] = {1, 0, 2, 1, 2, 0};
    double sorted[6], back[6];
    moe_ref_sort_rows_f64(2, 3, 1, rows, counts, sorted, false);
    assert_memory_equal(sorted, ((double[]){0, 3, 4, 5, 1, 2}), sizeof sorted);
    moe_ref_unsort_rows_f64(2, 3, 1, sorted, counts, back, false);
    assert_memory_equal(back, rows, sizeof back);
}

/* Token 0 chose expert 1 (3/4, row 2), then 0 (1/4, row 0); token 1 chose 0 (1/2, row 1), its second choice
 * is dropped; row 3 is padding. y0 = 3/4 * 30 + 1/4 * 10 = 25, y1 = 1/2 * 20 = 10. Backward with dy = 1 2: a
 * row gets prob * dy of its token, a chosen prob gets dy * row. */
static void test_combine(void **state)
{
    (void)state;
    const double rows[] = {10, 20, 30, 40}, prob[] = {.25, .75, 0, .5, 0, .5}, dy[] = {1, 2};
    const int32_t expert[] = {1, 0, 0, -1}, slot[] = {2, 0, 1, -1};
    double y[2], drows[4], dprob[6];
    moe_ref_combine_f64(2, 1, 2, 3, 4, rows, prob, expert, slot, y);
    assert_memory_equal(y, ((double[]){25, 10}), sizeof y);
    moe_ref_combine_bwd_f64(2, 1, 2, 3, 4, rows, prob, expert, slot, dy, false, drows, dprob);
    assert_memory_equal(drows, ((double[]){.25, 1, .75, 0}), sizeof drows);
    assert_memory_equal(dprob, ((double[]){10, 30, 0, 40, 0, 0}), sizeof dprob);
}

/* The same choices: dropped is 0. */
static void test_take(void **state)
{
    (void)state;
    const double prob[] = {.25, .75, 0, .5, 0, .5};
    const int32_t expert[] = {1, 0, 0, -1};
    double taken[4], dprob[6];
    moe_ref_take_f64(2, 3, 2, prob, expert, taken);
    assert_memory_equal(taken, ((double[]){.75, .25, .5, 0}), sizeof taken);
    moe_ref_take_bwd_f64(2, 3, 2, expert, (double[]){1, 2, 3, 4}, dprob, false);
    assert_memory_equal(dprob, ((double[]){2, 1, 0, 3, 0, 0}), sizeof dprob);
}

static void test_weigh(void **state)
{
    (void)state;
    const double rows[] = {1, 2, 3, 4}, weight[] = {2, 10}, dy[] = {1, 1, 1, 2};
    double y[4], drows[4], dweight[2];
    moe_ref_weigh_f64(2, 2, rows, weight, y);
    assert_memory_equal(y, ((double[]){2, 4, 30, 40}), sizeof y);
    moe_ref_weigh_bwd_f64(2, 2, rows, weight, dy, false, drows, dweight);
    assert_memory_equal(drows, ((double[]){2, 2, 10, 20}), sizeof drows);
    assert_memory_equal(dweight, ((double[]){3, 11}), sizeof dweight);
}

/* The dot product of row 0 by weigh_bwd and by combine_bwd, which must be the same, inside n rows of 256. */
static float dot_inside(int64_t n, bool by_rows, const float x[256], const float y[256])
{
    enum { H = 256 };
    float *rows = calloc((size_t)(n * H), sizeof *rows), *dy = calloc((size_t)(n * H), sizeof *dy);
    float *drows = calloc((size_t)(n * H), sizeof *drows), *weight = calloc((size_t)n, sizeof *weight);
    float *dweight = calloc((size_t)n, sizeof *dweight), *dprob = calloc((size_t)n, sizeof *dprob);
    int32_t *expert = calloc((size_t)n, sizeof *expert), *slot = calloc((size_t)n, sizeof *slot);
    assert_true(rows && dy && drows && weight && dweight && dprob && expert && slot);
    memcpy(rows, x, H * sizeof *x);
    memcpy(dy, y, H * sizeof *y);
    for (int32_t i = 0; i < n; i++) slot[i] = i;
    moe_ref_weigh_bwd_f32(n, H, rows, weight, dy, by_rows, drows, dweight);
    moe_ref_combine_bwd_f32(n, H, 1, 1, n, rows, weight, expert, slot, dy, by_rows, drows, dprob);
    assert_memory_equal(dprob, dweight, (size_t)n * sizeof *dprob);
    float dot = dweight[0];
    free(rows), free(dy), free(drows), free(weight), free(dweight), free(dprob), free(expert), free(slot);
    return dot;
}

/* With 16 rows or more, 32 threads have a row of 256. Thread 0 sums products 0, 32, 64, 96 (and 128 on)
 * apart, then 0 + 32 + 64 + 96: 2^24 + 1 + 0 + 1 = 2^24, since 2^24 + 1 is halfway and goes to the even one.
 * With 8 to 15 rows there are 64 threads; thread 32 has products 32, 96, ...: 2^24 + (1 + 1). With fewer
 * rows 128 or 256, and the same sum once they are halved to 64. */
static void test_row_dot_by_hand(void **state)
{
    (void)state;
    const int64_t n[] = {1, 2, 4, 8, 15, 16, 17, 64};
    float x[256] = {[0] = 0x1p24F, [32] = 1, [96] = 1}, one[256];
    for (int i = 0; i < 256; i++) one[i] = 1;
    for (int i = 0; i < 8; i++)
        assert_true(dot_inside(n[i], true, x, one) == (n[i] < 16 ? 0x1p24F + 2 : 0x1p24F));
    x[64] = 1,
    x[96] = 0; /* of one thread with 64 as with 32; with 128 products 0 and 64 are of two: 0 + 64 first */
    for (int i = 0; i < 8; i++) assert_true(dot_inside(n[i], true, x, one) == 0x1p24F);
}

/* Of 50 random rows: the bits inside 1, 8 and 15 rows often differ from those inside 4,096, those inside 16
 * never; with a fixed tree none does. */
static void test_row_dot_by_rows(void **state)
{
    (void)state;
    enum { N = 4096, H = 256, TRIED = 50 };
    const int64_t n[] = {1, 8, 15, 16};
    float *x = calloc((size_t)N * H, sizeof *x), *y = calloc((size_t)N * H, sizeof *y);
    float *dx = calloc((size_t)N * H, sizeof *dx), *ones = calloc(N, sizeof *ones),
          *all = calloc(N, sizeof *all);
    assert_true(x && y && dx && ones && all);
    for (uint64_t i = 0; i < (uint64_t)N * H; i++) {
        x[i] = (float)(moe_uniform(1, 0, i) - 0.5);
        y[i] = (float)(moe_uniform(1, 1, i) - 0.5);
    }
    for (int by = 0; by < 2; by++) {
        moe_ref_weigh_bwd_f32(N, H, x, ones, y, by, dx, all);
        for (int k = 0; k < 4; k++) {
            int differ = 0;
            for (int64_t i = 0; i < TRIED; i++) {
                float part[16];
                moe_ref_weigh_bwd_f32(n[k], H, x + i * H, ones, y + i * H, by, dx, part);
                differ += part[0] != all[i];
            }
            assert_in_range(differ, by && k < 3 ? 10 : 0, by && k < 3 ? TRIED : 0);
        }
    }
    free(x), free(y), free(dx), free(ones), free(all);
}

/* Three tokens with two choices each: expert 0 wants 1, expert 1 none, expert 2 all 3, expert 3 2. In a
 * circle: expert 0 takes token 0, expert 2 tokens 1, 2, 0, expert 3 tokens 1, 2. */
static void test_force(void **state)
{
    (void)state;
    int32_t expert[6], slot[6];
    int64_t counts[4];
    moe_ref_force_f32(3, 4, 2, (int32_t[]){1, 0, 3, 2}, expert, slot, counts);
    assert_memory_equal(expert, ((int32_t[]){0, 2, 2, 3, 2, 3}), sizeof expert);
    assert_memory_equal(slot, ((int32_t[]){0, 1, 2, 4, 3, 5}), sizeof slot);
    assert_memory_equal(counts, ((int64_t[]){1, 0, 3, 2}), sizeof counts);
}

/* Mean squares 12.5 and 0; the constant under the root keeps zeros zero. */
static void test_rmsnorm(void **state)
{
    (void)state;
    const double x[] = {3, 4, 0, 0}, gain[] = {1, 2};
    double y[4], r = 1 / sqrt(12.5 + 1e-5);
    moe_ref_rmsnorm_f64(2, 2, x, gain, y);
    must_be_near(y, (double[]){3 * r, 8 * r, 0, 0}, 4);
}

/* Two heads of 4, whose values name the token, so that the output shows how much goes to which token. Queries
 * and keys are the same at every position: what differs is the turn. Head 0: both are the first of the pair
 * (0, 2), so a score is cos(distance) / 2. Head 1: the first and the second of the pair (1, 3), which turns
 * 100 times slower: a score is sin(distance / 100) / 2. */
static void test_rotary(void **state)
{
    (void)state;
    enum { T = 5, S = 3, H = 8 };
    double qkv[T * 3 * H] = {0}, o[T * H];
    for (int t = 0; t < T; t++) {
        double *q = qkv + t * 3 * H, *k = q + H, *v = k + H;
        q[0] = k[0] = q[4 + 1] = k[4 + 3] = 1;
        v[t % S] = v[4 + t % S] = 1;
    }
    moe_ref_attention_f64(T, H, 2, S, qkv, o);
    for (int t = 0; t < T; t++) {
        double expected[H] = {0}, sum[2] = {0};
        for (int j = 0; j <= t % S; j++) {
            sum[0] += expected[j] = exp(cos(t % S - j) / 2);
            sum[1] += expected[4 + j] = exp(sin((t % S - j) / 100.) / 2);
        }
        for (int i = 0; i < H; i++) expected[i] /= sum[i / 4];
        must_be_near(o + t * H, expected, H);
    }
}

/* A token changes itself and what follows in its sequence (0 1 2, 3 4 5, 6), nothing else; both heads. */
static void test_causality(void **state)
{
    (void)state;
    enum { T = 7, S = 3, H = 4, HEADS = 2 };
    double qkv[T * 3 * H], before[T * H], after[T * H];
    for (int i = 0; i < T * 3 * H; i++) qkv[i] = sin(i * i);
    moe_ref_attention_f64(T, H, HEADS, S, qkv, before);
    for (int changed = 0; changed < T; changed++) {
        double kept[3 * H];
        memcpy(kept, qkv + changed * 3 * H, sizeof kept);
        for (int i = 0; i < 3 * H; i++) qkv[changed * 3 * H + i] += 1;
        moe_ref_attention_f64(T, H, HEADS, S, qkv, after);
        memcpy(qkv + changed * 3 * H, kept, sizeof kept);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < H; i++) {
                bool concerned = t / S == changed / S && t >= changed;
                if ((before[t * H + i] != after[t * H + i]) != concerned)
                    fail_msg("output %d of token %d, when token %d changes", i, t, changed);
            }
    }
}

/* Weights 1 3, target the 3: -log(3/4). Logits 1000 0, target the 0: 1000, and exp(1000) is never formed. */
static void test_xent(void **state)
{
    (void)state;
    const double logits[] = {0, log(3), 1000, 0};
    const int32_t target[] = {1, 1};
    double dlogits[4], loss;
    moe_ref_xent_f64(2, 2, logits, target, dlogits, &loss);
    must_be_near(&loss, (double[]){1000 + log(4. / 3)}, 1);
    must_be_near(dlogits, (double[]){.25, -.25, 1, -1}, 4);
    moe_ref_xent_f64(0, 2, NULL, NULL, NULL, &loss);
    assert_true(loss == 0);
}

/* silu(log 3) = 3/4 log 3; far out silu(z) is 0 or z, its slope 0 or 1, and nothing overflows. */
static void test_swiglu(void **state)
{
    (void)state;
    const double h[] = {log(3), -1000, 1000, 2, 3, 5}, da[] = {1, 1, 1};
    double a[3], dh[6];
    moe_ref_swiglu_f64(1, 3, h, a);
    must_be_near(a, (double[]){1.5 * log(3), 0, 5000}, 3);
    moe_ref_swiglu_bwd_f64(1, 3, h, da, dh, false);
    must_be_near(dh, (double[]){1.5 * (1 + log(3) / 4), 0, 5, .75 * log(3), 0, 1000}, 6);
}

/* In place, as schedules use them: 3 6 / 3 = 1 2; 1 2 - 1/2 * (2 -2) = 0 3. */
static void test_updates_in_place(void **state)
{
    (void)state;
    double g[] = {3, 6}, param[] = {1, 2};
    moe_ref_scale_f64(2, 3, g, g);
    assert_memory_equal(g, ((double[]){1, 2}), sizeof g);
    moe_ref_sgd_f64(2, .5, param, (double[]){2, -2}, param);
    assert_memory_equal(param, ((double[]){0, 3}), sizeof param);
}

/* 3 4 has the norm 5; 2 is put before, 144 comes from elsewhere: sqrt(25 + 144) = 13. */
static void test_clipping(void **state)
{
    (void)state;
    const float g[] = {3, 4};
    float clipped[] = {26, -13}, zero = 0;
    double norm = 2, other = 144, none = 0;
    moe_ref_sqnorm_f32(2, g, &norm, true);
    assert_true(norm == 27);
    moe_ref_sqnorm_f32(2, g, &norm, false);
    assert_true(norm == 25);
    moe_ref_clip_f32(2, 1, clipped, &norm, &other, clipped);
    assert_memory_equal(clipped, ((float[]){2, -1}), sizeof clipped);
    moe_ref_clip_f32(2, 14, clipped, &norm, &other, clipped);
    assert_memory_equal(clipped, ((float[]){2, -1}), sizeof clipped);
    moe_ref_clip_f32(1, 1, &zero, &none, &none, &zero);
    assert_true(zero == 0);
}

/* Squares are summed in double: that of 1e20 is no float, and a float loses small ones of a million. */
static void test_sqnorm_in_double(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    const float large = 1e20F;
    double norm, expected = 0;
    moe_ref_sqnorm_f32(1, &large, &norm, false);
    assert_true(fabs(norm / 1e40 - 1) < 1e-6);
    float *g = malloc(N * sizeof *g);
    assert_non_null(g);
    for (int i = 0; i < N; i++) {
        g[i] = i ? 1 / (float)(1 + i % 1000) : 1e4F;
        expected += (double)g[i] * g[i];
    }
    moe_ref_sqnorm_f32(N, g, &norm, false);
    free(g);
    assert_true(fabs(norm / expected - 1) < 1e-6);
}

/* Step 1, gradient 2: m = .2, v = .2, corrected 2 and 4, so the move is 1 (sign of the gradient) + 1/2 * 10.
 * Step 2, gradient -1: m = .18 - .1 = .08, v = .19 + .05 = .24, corrected .08 / .19 and .24 / .0975. */
static void test_adamw(void **state)
{
    (void)state;
    double param = 10, m = 0, v = 0, eps = 1e-8;
    moe_ref_adamw_f64(1, .1, .5, 1, &param, (double[]){2}, &m, &v, &param, &m, &v);
    double first = 10 - .1 * (2 / (2 + eps) + 5);
    must_be_near((double[]){param, m, v}, (double[]){first, .2, .2}, 3);
    moe_ref_adamw_f64(1, .1, .5, 2, &param, (double[]){-1}, &m, &v, &param, &m, &v);
    double second = first - .1 * (.08 / .19 / (sqrt(.24 / .0975) + eps) + .5 * first);
    must_be_near((double[]){param, m, v}, (double[]){second, .08, .24}, 3);
}

/* [1 2; 3 4] [5 6; 7 8] = [1*5+2*7 1*6+2*8; 3*5+4*7 3*6+4*8] = [19 22; 43 50].
 * Groups of 2, 0 and 1 rows with k = n = 1: C = 1*10, 2*10, 3*30; dB = 1*1 + 2*10, nothing, 3*100. */
static void test_products_by_hand(void **state)
{
    (void)state;
    const double A[] = {1, 2, 3, 4}, B[] = {5, 6, 7, 8}, weights[] = {10, 20, 30}, dC[] = {1, 10, 100};
    const int64_t rows[] = {2, 0, 1};
    double C[4], grouped[3], dB[3];
    moe_ref_gemm_f64(2, 2, 2, false, false, A, B, C, false);
    assert_memory_equal(C, ((double[]){19, 22, 43, 50}), sizeof C);
    moe_ref_grouped_gemm_f64(moe_ref_gemm_f64, 3, 1, 1, rows, false, A, weights, grouped, false);
    assert_memory_equal(grouped, ((double[]){10, 20, 90}), sizeof grouped);
    moe_ref_grouped_wgrad_f64(moe_ref_gemm_f64, 3, 1, 1, rows, A, dC, dB, false);
    assert_memory_equal(dB, ((double[]){21, 0, 300}), sizeof dB);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topk),
        cmocka_unit_test(test_topk_of_nan),
        cmocka_unit_test(test_permute),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_limit_edges),
        cmocka_unit_test(test_limit_at_random),
        cmocka_unit_test(test_normalize),
        cmocka_unit_test(test_largest),
        cmocka_unit_test(test_select),
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_permute_integers),
        cmocka_unit_test(test_aux_loss),
        cmocka_unit_test(test_sort_rows),
        cmocka_unit_test(test_combine),
        cmocka_unit_test(test_take),
        cmocka_unit_test(test_weigh),
        cmocka_unit_test(test_row_dot_by_hand),
        cmocka_unit_test(test_row_dot_by_rows),
        cmocka_unit_test(test_force),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_causality),
        cmocka_unit_test(test_xent),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_updates_in_place),
        cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_sqnorm_in_double),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_products_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
