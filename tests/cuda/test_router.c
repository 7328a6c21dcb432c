/* test_router - kernels/router.cu against ref.h. Choices are judged by the kernel's own probabilities, slots
 * and counts by its choices; all of these exactly. */
#include "tests/cuda/routing.h"

enum router { SOFTMAX, SIGMOID, N_ROUTERS };
static const char *const router_text[] = {"topk", "topk_sigmoid"};

struct shape {
    int64_t T, E, K;
};
/* No token, no choice, one expert; rows by lumps and not; several lumps to a lane, and lanes without; more
 * choices than lanes; all experts chosen. */
static const struct shape shapes[] = {{0, 8, 2},     {3, 5, 0},   {1, 1, 1},   {6, 7, 3},   {4, 8, 1},
                                      {9, 33, 8},    {3, 64, 6},  {3, 256, 8}, {2, 512, 8}, {2, 1000, 8},
                                      {1, 1024, 40}, {1, 64, 64}, {40, 8, 2}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, N_FEW = 4 };

/* Spread over an interval of 2 limits; few different ones, so that many are equal; all equal; far apart. */
enum logits { SPREAD, COARSE, EQUAL, EXTREME, N_LOGITS };
static const double limit[] = {12, 2, 0, 1000};

static void *open_logits(enum moe_cuda_type type, enum logits kind, int64_t n, uint64_t seed)
{
    void *logits = fixture_random(type, n, seed, -limit[kind], limit[kind]);
    for (int64_t i = 0; i < n; i++) {
        const double u = moe_uniform(seed + 1, 0, (uint64_t)i);
        if (kind == COARSE) fixture_set(type, logits, i, floor(5 * u) - 2);
        if (kind == EXTREME)
            fixture_set(type, logits, i, u < .1 ? -INFINITY : u < .5 ? -1000 : 1000 * floor(3 * u - 1));
    }
    return logits;
}

/* Of prob against the reference, in unit roundoffs u of what is computed in. An exponential is 2 u off in
 * double (1 ulp: glibc, CUDA's table), 4 u in float (2 ulp), and there |z - max| u more, of the difference.
 *   softmax  double: exponentials 2 * 2, sums of E terms in either order 2 (E + 2), quotients 2
 *            float: rounded twice on each side; what doubles before that add is below one
 *            bf16, in float: the exponential and the sum of such 2 (4 + |z - max|), 1 / sum and product 2,
 * and the
 *            reference's 4
 *   sigmoid  exponential 4, sum 1, quotient 1 (double 2 + 2, twice), and the reference's */
static double prob_roundings(enum moe_cuda_type type, enum router router, enum logits kind, int64_t E)
{
    if (router == SIGMOID) return 8;
    return type == MOE_CUDA_F64 ? 2. * (double)E + 10 : type == MOE_CUDA_F32 ? 5 : 14 + 4 * limit[kind];
}

/* expert [K] are the K largest of prob [E], ties to the lower id. NaN: after all numbers. bf16 is chosen by
 * the float that is written, of which a tie says nothing: any of the largest. */
static void expect_largest(enum moe_cuda_type type, int64_t E, int64_t K, const void *prob, int64_t t,
                           const int32_t *expert)
{
    bool *chosen = calloc((size_t)E + 1, sizeof *chosen);
    for (int64_t k = 0; k < K; k++) {
        int64_t best = -1;
        double most = -2;
        for (int64_t e = 0; e < E; e++) {
            const double p = fixture_at(type, prob, t * E + e), at = isnan(p) ? -1 : p;
            if (!chosen[e] && at > most) {
                most = at;
                best = e;
            }
        }
        const int32_t e = expert[k];
        if (type == MOE_CUDA_BF16 && e >= 0 && e < E && !chosen[e]) {
            const double p = fixture_at(type, prob, t * E + e);
            if ((isnan(p) ? -1 : p) == most) best = e;
        }
        chosen[best] = true;
        if (e != best)
            fail_msg("%s token %lld of %lld experts, choice %lld: %d, expected %lld", fixture_type_text[type],
                     (long long)t, (long long)E, (long long)k, e, (long long)best);
    }
    free(chosen);
}

/* Where choices are not the reference's, its own probabilities of both are nearer than twice the bound. */
static void expect_chosen_alike(enum moe_cuda_type type, int64_t T, int64_t E, int64_t K, const void *prob,
                                const int32_t *want, const int32_t *got, double roundings)
{
    for (int64_t i = 0; i < T * K; i++) {
        const double a = fixture_at(type, prob, i / K * E + want[i]),
                     b = fixture_at(type, prob, i / K * E + got[i]);
        if (fabs(a - b) > 2 * roundings * fixture_unit(type) * fmax(a, b))
            fail_msg("choice %lld: %d, expected %d", (long long)i, got[i], want[i]);
    }
}

static int run_topk(enum router router, enum moe_cuda_type type, struct shape s, const void *logits,
                    void *prob, int32_t *expert, int32_t *slot, int64_t *counts)
{
    const struct moe_cuda_queue *q = fixture_used_queue();
    return router == SIGMOID
               ? moe_cuda_topk_sigmoid(q, type, s.T, s.E, s.K, logits, prob, expert, slot, counts)
               : moe_cuda_topk(q, type, s.T, s.E, s.K, logits, prob, expert, slot, counts);
}

/* shift: elements by which logits and prob are off a lump. */
static void check_topk(enum router router, enum moe_cuda_type type, struct shape s, enum logits kind,
                       int64_t shift)
{
    const int64_t n = s.T * s.E, choices = s.T * s.K;
    const size_t off = (size_t)shift * fixture_bytes(type);
    char *logits = open_logits(type, kind, n + shift, (uint64_t)(s.E + s.T)),
         *prob = fixture_random(type, n + shift, 1, 2, 3);
    void *logits_ref = fixture_for_reference(type, logits + off, n),
         *prob_ref = fixture_for_reference(type, prob + off, n);
    int32_t *expert = routing_ints(choices), *slot = routing_ints(choices),
            *expert_ref = routing_ints(choices), *slot_ref = routing_ints(choices);
    int64_t *counts = routing_longs(s.E), *counts_ref = routing_longs(s.E);
    assert_int_equal(run_topk(router, type, s, logits + off, prob + off, expert, slot, counts), 0);
    fixture_wait_right();
    if (router == SIGMOID)
        FIXTURE_REF(type, topk_sigmoid, s.T, s.E, s.K, logits_ref, prob_ref, expert_ref, slot_ref,
                    counts_ref);
    else
        FIXTURE_REF(type, topk, s.T, s.E, s.K, logits_ref, prob_ref, expert_ref, slot_ref, counts_ref);
    const double roundings = prob_roundings(type, router, kind, s.E);
    fixture_expect(type, router_text[router], n, prob_ref, NULL, prob + off, roundings);
    for (int64_t t = 0; t < s.T; t++) expect_largest(type, s.E, s.K, prob + off, t, expert + t * s.K);
    expect_chosen_alike(type == MOE_CUDA_BF16 ? MOE_CUDA_F32 : type, s.T, s.E, s.K, prob_ref, expert_ref,
                        expert, roundings);
    routing_expect_numbered(choices, s.E, expert, slot, counts);
    void *all[] = {logits, prob, expert, slot, expert_ref, slot_ref, counts, counts_ref};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
    free(logits_ref);
    free(prob_ref);
}

static void test_topk(void **state)
{
    (void)state;
    for (enum router router = 0; router < N_ROUTERS; router++)
        for (int s = 0; s < (FEW ? N_FEW : N_SHAPES); s++) EACH_TYPE(type)
    if (!routing_skips(s, type)) check_topk(router, type, shapes[s], SPREAD, 0);
}

/* Equal probabilities go to the lower id, in a lane and over lanes; rows that do not begin at a lump. */
static void test_ties(void **state)
{
    (void)state;
    for (enum router router = 0; router < N_ROUTERS; router++)
        for (enum logits kind = COARSE; kind < (FEW ? EQUAL : N_LOGITS); kind++) EACH_TYPE(type)
            {
                if (routing_skips(router, type)) continue;
                check_topk(router, type, (struct shape){2, 13, 13}, kind, 0);
                if (FEW) continue;
                check_topk(router, type, (struct shape){1, 512, 8}, kind, 0);
                check_topk(router, type, (struct shape){2, 64, 5}, kind, 1);
            }
}

/* Logits of a broken run still give a routing that stays inside its buffers; NaN comes last. */
static void test_nan(void **state)
{
    (void)state;
    const double broken[] = {NAN, INFINITY, -INFINITY, 0};
    enum { T = 4, E = 40, K = 8 };
    for (enum router router = 0; router < N_ROUTERS; router++) EACH_TYPE(type)
        {
            if (routing_skips(router, type)) continue;
            void *logits = open_logits(type, SPREAD, T * E, 3), *prob = open_logits(type, EQUAL, T * E, 3);
            int32_t *expert = routing_ints(T * K), *slot = routing_ints(T * K);
            int64_t *counts = routing_longs(E);
            for (int t = 0; t < T; t++) /* of all experts but 4 */
                for (int e = 0; e < E - 4; e++) fixture_set(type, logits, t * E + (e * 7 + t) % E, broken[t]);
            assert_int_equal(
                run_topk(router, type, (struct shape){T, E, K}, logits, prob, expert, slot, counts), 0);
            fixture_wait_right();
            for (int64_t t = 0; t < T; t++) expect_largest(type, E, K, prob, t, expert + t * K);
            routing_expect_numbered(T * K, E, expert, slot, counts);
            void *all[] = {logits, prob, expert, slot, counts};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
        }
}

/* More choices than experts, more experts than can be numbered. */
static void test_not_possible(void **state)
{
    (void)state;
    double room[8];
    int64_t counts[8];
    int32_t expert[8], slot[8];
    const struct moe_cuda_queue *q = fixture_used_queue();
    assert_int_not_equal(moe_cuda_topk(q, MOE_CUDA_F32, 1, 3, 4, room, room, expert, slot, counts), 0);
    assert_int_not_equal(moe_cuda_topk(q, MOE_CUDA_F32, 0, 4097, 1, room, room, expert, slot, counts), 0);
    fixture_wait_right();
}

/* want [i] = |p| (|d| + sum over its row of |p d|) + |old|: what the errors of softmax's backward are
 * relative to. */
static double *bwd_scale(enum moe_cuda_type type, int64_t T, int64_t E, const void *p, const void *d,
                         const void *old)
{
    double *scale = malloc((size_t)(T * E + 1) * sizeof *scale);
    for (int64_t t = 0; t < T; t++) {
        double sum = 0;
        for (int64_t i = t * E; i < (t + 1) * E; i++)
            sum += fabs(fixture_at(type, p, i) * fixture_at(type, d, i));
        for (int64_t i = t * E; i < (t + 1) * E; i++)
            scale[i] = fabs(fixture_at(type, p, i)) * (fabs(fixture_at(type, d, i)) + sum) +
                       fabs(fixture_at(type, old, i));
    }
    return scale;
}

/* Softmax: dot products of E terms in either order (E + 1 each), a difference, a product and a sum, twice.
 * Sigmoid: the same operations in the same order, so the same bits. */
static void check_bwd(enum moe_cuda_type type, struct shape s, bool add)
{
    const int64_t n = s.T * s.E;
    void *prob = fixture_random(type, n, 5, 0, 1), *dprob = fixture_random(type, n, 6, -2, 2), *ref[3];
    ref[0] = fixture_for_reference(type, prob, n);
    ref[1] = fixture_for_reference(type, dprob, n);
    for (enum router router = 0; router < N_ROUTERS; router++) {
        void *dlogits = fixture_random(type, n, 7, -2, 2);
        double *scale = bwd_scale(type, s.T, s.E, prob, dprob, dlogits);
        ref[2] = fixture_for_reference(type, dlogits, n);
        if (router == SOFTMAX) {
            assert_int_equal(
                moe_cuda_topk_bwd(fixture_used_queue(), type, s.T, s.E, prob, dprob, dlogits, add), 0);
            FIXTURE_REF(type, topk_bwd, s.T, s.E, ref[0], ref[1], ref[2], add);
        } else {
            assert_int_equal(
                moe_cuda_topk_sigmoid_bwd(fixture_used_queue(), type, s.T, s.E, prob, dprob, dlogits, add),
                0);
            FIXTURE_REF(type, topk_sigmoid_bwd, s.T, s.E, ref[0], ref[1], ref[2], add);
        }
        fixture_wait_right();
        if (router == SOFTMAX)
            fixture_expect(type, "topk_bwd", n, ref[2], scale, dlogits, 2. * (double)(s.E + 1) + 6);
        else
            fixture_expect(type, "topk_sigmoid_bwd", n, ref[2], NULL, dlogits, 0);
        fixture_free(dlogits);
        free(scale);
        free(ref[2]);
    }
    fixture_free(prob);
    fixture_free(dprob);
    free(ref[0]);
    free(ref[1]);
}

static void test_bwd(void **state)
{
    (void)state;
    for (int s = 0; s < (FEW ? N_FEW : N_SHAPES); s++) EACH_TYPE(type)
        {
            if (routing_skips(s, type)) continue;
            check_bwd(type, shapes[s], false);
            check_bwd(type, shapes[s], true);
        }
}

/* The sums of a token are added in the order of the reference, in double: the same bits. low: of prob, so
 * small that the least sum divides. */
static void check_normalize(enum moe_cuda_type type, struct shape s, enum routing_kind kind, double most)
{
    const int64_t n = s.T * s.E;
    const struct moe_cuda_queue *q = fixture_used_queue();
    int32_t *expert = routing_experts(kind, s.T, s.E, s.K);
    void *x[4], *ref[4];
    for (int i = 0; i < 4; i++) { /* prob, gate, dgate, dprob */
        x[i] = fixture_random(type, n, (uint64_t)(20 + i), i == 0 ? 0 : -2, i == 0 ? most : 2);
        ref[i] = fixture_for_reference(type, x[i], n);
    }
    assert_int_equal(moe_cuda_normalize(q, type, s.T, s.E, s.K, x[0], expert, x[1]), 0);
    fixture_wait_right();
    FIXTURE_REF(type, normalize, s.T, s.E, s.K, ref[0], expert, ref[1]);
    fixture_expect(type, "normalize", n, ref[1], NULL, x[1], 0);
    for (int add = 1; add >= 0; add--) {
        assert_int_equal(moe_cuda_normalize_bwd(q, type, s.T, s.E, s.K, x[0], expert, x[2], x[3], add), 0);
        fixture_wait_right();
        FIXTURE_REF(type, normalize_bwd, s.T, s.E, s.K, ref[0], expert, ref[2], ref[3], add);
        fixture_expect(type, "normalize_bwd", n, ref[3], NULL, x[3], 0);
    }
    for (int i = 0; i < 4; i++) {
        fixture_free(x[i]);
        free(ref[i]);
    }
    fixture_free(expert);
}

static void test_normalize(void **state)
{
    (void)state;
    for (int s = 0; s < (FEW ? N_FEW : N_SHAPES); s++) EACH_TYPE(type)
        {
            if (routing_skips(s, type)) continue;
            check_normalize(type, shapes[s], ANY, 1);
            check_normalize(type, shapes[s], HALF_DROPPED, 1);
            check_normalize(type, shapes[s], THE_SAME, 1e-9);
        }
}

static void test_wrong_expert(void **state)
{
    (void)state;
    enum { T = 3, E = 5, K = 2 };
    const int32_t wrong[] = {E, -2, INT32_MAX};
    for (int i = 0; i < 3; i++) EACH_TYPE(type)
        {
            int32_t *expert = routing_experts(ANY, T, E, K);
            void *prob = fixture_random(type, T * E, 1, 0, 1), *gate = fixture_random(type, T * E, 2, 0, 1);
            expert[3] = wrong[i];
            assert_int_equal(moe_cuda_normalize(fixture_used_queue(), type, T, E, K, prob, expert, gate), 0);
            routing_expect_fault(wrong[i], E);
            assert_int_equal(
                moe_cuda_normalize_bwd(fixture_used_queue(), type, T, E, K, prob, expert, prob, gate, true),
                0);
            routing_expect_fault(wrong[i], E);
            fixture_free(expert);
            fixture_free(prob);
            fixture_free(gate);
        }
}

/* The sum is in double on both sides: of n terms, n roundings of double each, and of a float the last one,
 * twice; the roundings of double are less than one of float as long as n < 2^28. */
static void check_aux_loss(enum moe_cuda_type type, struct shape s, bool twice)
{
    const int64_t n = s.T * s.E;
    const double factor = 0.01 / (double)(s.T + 1);
    void *prob = fixture_random(type, n, 30, 0, 1), *loss = fixture_random(type, 1, 1, 2, 3),
         *again = fixture_random(type, 1, 1, 4, 5), *dprob = fixture_random(type, n, 31, -2, 2);
    void *prob_ref = fixture_for_reference(type, prob, n), *loss_ref = fixture_for_reference(type, loss, 1),
         *dprob_ref = fixture_for_reference(type, dprob, n);
    int64_t *counts = routing_longs(s.E);
    double scale = 0;
    for (int64_t e = 0; e < s.E; e++) counts[e] = (int64_t)(1000 * moe_uniform(32, 0, (uint64_t)e));
    for (int64_t i = 0; i < n; i++) scale += factor * fixture_at(type, prob, i) * (double)counts[i % s.E];
    assert_int_equal(moe_cuda_aux_loss(fixture_used_queue(), type, s.T, s.E, factor, prob, counts, loss), 0);
    if (twice) {
        assert_int_equal(moe_cuda_aux_loss(fixture_used_queue(), type, s.T, s.E, factor, prob, counts, again),
                         0);
        fixture_wait_right();
        assert_memory_equal(again, loss, fixture_bytes(type));
    }
    fixture_wait_right();
    FIXTURE_REF(type, aux_loss, s.T, s.E, factor, prob_ref, counts, loss_ref);
    fixture_expect(type, "aux_loss", 1, loss_ref, &scale, loss,
                   type == MOE_CUDA_F64 ? 2. * (double)n + 4 : 3);
    for (int add = 1; add >= 0; add--) { /* one rounding of the same double */
        assert_int_equal(
            moe_cuda_aux_loss_bwd(fixture_used_queue(), type, s.T, s.E, factor, counts, dprob, add), 0);
        fixture_wait_right();
        FIXTURE_REF(type, aux_loss_bwd, s.T, s.E, factor, counts, dprob_ref, add);
        fixture_expect(type, "aux_loss_bwd", n, dprob_ref, NULL, dprob, 0);
    }
    void *all[] = {prob, loss, again, dprob, counts}, *refs[] = {prob_ref, loss_ref, dprob_ref};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
    for (size_t i = 0; i < sizeof refs / sizeof *refs; i++) free(refs[i]);
}

static void test_aux_loss(void **state)
{
    (void)state;
    for (int s = FEW ? N_FEW - 1 : 0; s < (FEW ? N_FEW : N_SHAPES); s++) EACH_TYPE(type)
    if (!routing_skips(s, type)) check_aux_loss(type, shapes[s], true);
    if (!FEW)
        check_aux_loss(MOE_CUDA_F64, (struct shape){611, 111, 1}, false); /* units for some threads twice */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topk),         cmocka_unit_test(test_ties),
        cmocka_unit_test(test_nan),          cmocka_unit_test(test_not_possible),
        cmocka_unit_test(test_bwd),          cmocka_unit_test(test_normalize),
        cmocka_unit_test(test_wrong_expert), cmocka_unit_test(test_aux_loss),
    };
    fixture_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
