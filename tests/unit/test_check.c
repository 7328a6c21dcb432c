/* What check says of right schedules and of broken ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim/check/check.h"
#include "sim/lower/lower.h"
#include "tests/fixture.h"

static const struct layout {
    int ranks, ep;
    const char *tokens;
} layouts[] = {{1, 1, "5"},
               {2, 2, "7"},
               {4, 4, "6"},
               {4, 2, "6"},
               {4, 1, "3"},
               {8, 4, "9"},
               {4, 4, "[3, 0, 8, 1]"},
               {4, 2, "[0, 1, 0, 0]"}};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

static void print_verdicts(const struct moe_verdicts *v)
{
    for (int i = 0; i < v->n; i++)
        print_message("  C%d rank %d.. %s: %s\n", v->item[i].check_class, v->item[i].ranks[0], v->item[i].op,
                      v->item[i].text);
}

static int errors_of(const struct moe_schedule *s, const struct moe_scenario *sc)
{
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    int n = v.n;
    moe_verdicts_free(&v);
    moe_routing_free(r);
    return n;
}

/* What a scenario may add; each must be right in every layout. */
static const char *const variants[] = {
    "",
    "dispatcher: allgather",
    "capacity: {rule: megatron, factor: 1.0}",
    "capacity: {rule: megatron, factor: 1.25, drop: position}\ndispatcher: allgather",
    "optimizer: sgd\nclip_norm: 0\naux_loss: 0",
    "dispatcher: deepep",
    "dispatcher: gshard",
    "dispatcher: gshard\ncapacity: {rule: deepspeed, drop_tokens: false}",
    "dispatcher: gshard\ncapacity: {rule: tutel, factor: 0, align: 3}",
    "dispatcher: gshard\ncapacity: {rule: tutel, factor: 1.0, unequal_tokens: true}",
    "dispatcher: allgather\ncapacity: {rule: deepspeed, factor: 0.5, min_capacity: 0}",
    "dispatcher: alltoall\ncapacity: {rule: tutel, factor: -0.7}",
    "dispatcher: deepep\nrouting: {skew: 2}\naux_loss: 0",
    "dispatcher: deepep_low_latency",
    "dispatcher: nvlink_one_sided\nmax_dispatch_tokens: 1000",
};
enum { N_VARIANTS = sizeof variants / sizeof *variants };

/* Fails when a verdict is given to a schedule that is right. */
static void test_right_schedules_have_no_verdicts(void **state)
{
    (void)state;
    for (int i = 0; i < N_LAYOUTS; i++)
        for (int k = 0; k < N_VARIANTS; k++) {
            struct moe_scenario *sc =
                fixture_scenario(layouts[i].ranks, layouts[i].ep, layouts[i].tokens, variants[k]);
            struct moe_schedule *s = fixture_schedule(sc), *toy = fixture_lower(sc, &toy_dispatcher);
            assert_int_equal(errors_of(s, sc), 0);
            assert_int_equal(errors_of(toy, sc), 0);
            moe_schedule_free(s);
            moe_schedule_free(toy);
            moe_scenario_free(sc);
        }
}

/* Padded buffers have the size that each rank computes from its own tokens, and nobody agrees on it: equal
 * tokens are fine; 6 and 3 tokens give capacities ceil(12 / 8) = 2 and ceil(6 / 8) = 1 (founding_cases.md
 * A.0b 4). */
static void test_padded_capacity_needs_equal_tokens(void **state)
{
    (void)state;
    const char *padded = "capacity: {rule: megatron, factor: 1.0, pad: true}";
    for (int unequal = 0; unequal < 2; unequal++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, unequal ? "[6, 6, 6, 3]" : "6", padded);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_int_equal(v.n, unequal);
        if (unequal) {
            assert_int_equal(v.item[0].check_class, 1);
            /* 4 experts a rank x 2 or 1 rows x hidden 8 */
            assert_non_null(
                strstr(v.item[0].text, "rank 2 sends 64 float32 (alltoall) to rank 3, which expects 32"));
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* One fault on rank 2: the verdict has the class, names rank 2 alone and the operation. */
static void expect_fault(const char *fault, int check_class)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    const char *op = fixture_mutate(s, fault, 2);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    if (v.n != 1) print_verdicts(&v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, check_class);
    assert_int_equal(v.item[0].n_ranks, 1);
    assert_int_equal(v.item[0].ranks[0], 2);
    assert_non_null(strstr(v.item[0].op, op));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

static void test_dropped_collective(void **state)
{
    (void)state;
    expect_fault("drop", 2);
    expect_fault("drop_sum", 2);
}

static void test_other_size(void **state)
{
    (void)state;
    expect_fault("size", 1);
}

static void test_other_group(void **state)
{
    (void)state;
    expect_fault("group", 2);
}

static void test_other_scale(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    fixture_mutate(s, "scale", 2);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 3);
    assert_int_equal(v.item[0].n_ranks, 1);
    assert_int_equal(v.item[0].ranks[0], 2);
    assert_int_equal(v.item[0].n_layers, 2); /* 0 and 1, ascending, though 1 is seen first */
    assert_int_equal(v.item[0].layers[0], 0);
    assert_non_null(strstr(v.item[0].text, "3.42857 times")); /* 24 tokens / 7 */
    assert_non_null(strstr(v.item[0].text, "the last division of it is by 7, expected by 24"));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Experts summed over all ranks instead of over their replicas; shared parameters over their replicas only:
 * the same on every rank, so nothing hangs. */
static void test_wrong_group_everywhere(void **state)
{
    (void)state;
    const struct {
        const char *op;
        int comm;
    } wrong[] = {{"sum_w1", 0}, {"sum_router", 2}, {"sum_router", 1}, {"sum_embedding", 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        fixture_op(&s->roles[0], MOE_SYNC, wrong[i].op)->comm = wrong[i].comm;
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_true(v.n >= 1);
        for (int j = 0; j < v.n; j++) {
            assert_int_equal(v.item[j].check_class, 4);
            assert_non_null(strstr(v.item[j].op, strchr(wrong[i].op, '_')));
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* The clipping of an expert-parallel run: the experts' part of the norm summed over other ranks than those
 * that split the experts, one parameter not in the norm, one rank that does not clip. */
static void test_norms(void **state)
{
    (void)state;
    for (int fault = 0; fault < 3; fault++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_role *role = fault == 2 ? moe_schedule_split_role(s, 1) : &s->roles[0];
        struct moe_op *op = fixture_op(role, MOE_CLIPPING,
                                       fault == 0   ? "sum_expert_norm"
                                       : fault == 1 ? "norm_router"
                                                    : "clip_w1");
        if (fault == 0)
            op->comm = 2; /* edp */
        else
            moe_block_delete(fixture_block(role, op), op->id);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_true(v.n >= 1);
        for (int i = 0; i < v.n; i++) assert_int_equal(v.item[i].check_class, 5);
        if (fault > 0) assert_int_equal(v.item[0].n_ranks, fault == 1 ? 4 : 1);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

static void expect_deletions_noticed(const struct moe_dispatcher *dispatcher, const char *more, bool one_rank)
{
    struct moe_scenario *sc = fixture_scenario(4, 2, "[6, 3, 5, 4]", more);
    struct moe_schedule *whole = fixture_lower(sc, dispatcher);
    int tried = 0;
    for (int b = 0; b < whole->roles[0].n_blocks; b++)
        for (int o = 0; o < whole->roles[0].blocks[b].n_ops; o++, tried++) {
            struct moe_schedule *s = fixture_lower(sc, dispatcher);
            struct moe_role *role = one_rank ? moe_schedule_split_role(s, 1) : &s->roles[0];
            moe_block_delete(&role->blocks[b], role->blocks[b].ops[o].id);
            if (errors_of(s, sc) == 0)
                fail_msg("deleting %s from %s is not noticed", whole->roles[0].blocks[b].ops[o].name,
                         whole->roles[0].blocks[b].name);
            moe_schedule_free(s);
        }
    assert_true(tried > 80);
    moe_schedule_free(whole);
    moe_scenario_free(sc);
}

static void test_every_deletion_is_noticed(void **state)
{
    (void)state;
    static const struct moe_dispatcher alltoall = {"alltoall", moe_alltoall, true},
                                       allgather = {"allgather", moe_allgather, false},
                                       deepep = {"deepep", moe_deepep, false, true},
                                       low = {"deepep_low_latency", moe_deepep_low_latency, false, true},
                                       one = {"nvlink_one_sided", moe_nvlink_one_sided, false, true};
    expect_deletions_noticed(&alltoall, "", false);
    expect_deletions_noticed(&alltoall, "", true);
    expect_deletions_noticed(&alltoall, variants[2], false);
    expect_deletions_noticed(&allgather, "", false);
    expect_deletions_noticed(&deepep, "", false);
    expect_deletions_noticed(&deepep, "", true);
    expect_deletions_noticed(&low, "", false);
    expect_deletions_noticed(&low, "", true);
    expect_deletions_noticed(&one, "", false);
    expect_deletions_noticed(&toy_dispatcher, "", false);
}

/* Capacities that follow from counts are the same function on ranks that got other rows. */
static void test_a_role_of_its_own_is_no_fault(void **state)
{
    (void)state;
    static const char *const rules[] = {"dispatcher: gshard", "capacity: {rule: tutel, factor: 0}",
                                        "capacity: {rule: tutel, factor: -1.5, unequal_tokens: true}",
                                        "capacity: {rule: deepspeed, drop_tokens: false}"};
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (int ep = 1; ep <= 4; ep += 3) {
            struct moe_scenario *sc = fixture_scenario(4, ep, "8", rules[i]);
            struct moe_schedule *s = fixture_schedule(sc);
            moe_schedule_split_role(s, 1);
            assert_int_equal(errors_of(s, sc), 0);
            moe_schedule_free(s);
            moe_scenario_free(sc);
        }
}

/* ---- faults that leave every size and every order as it is ---- */

static struct moe_op *rank_2(struct moe_schedule *s, enum moe_pass pass, const char *name)
{
    return fixture_op(moe_schedule_split_role(s, 2), pass, name);
}

static int gradient_of(const struct moe_schedule *s, const char *param)
{
    for (int i = 0; i < s->n_params; i++)
        if (!strcmp(s->params[i].name, param)) return s->params[i].grad;
    moe_bug(__FILE__, __LINE__, param);
}

/* attention_gain and moe_gain have the same size and are summed over the same ranks. */
static void sum_reads_another(struct moe_schedule *s)
{
    rank_2(s, MOE_SYNC, "sum_moe_gain")->reads[0].buffer = gradient_of(s, "attention_gain");
}

static void sum_writes_elsewhere(struct moe_schedule *s)
{
    rank_2(s, MOE_SYNC, "sum_moe_gain")->writes[0].buffer = gradient_of(s, "attention_gain");
}

static void scale_reads_another(struct moe_schedule *s)
{
    fixture_op(&s->roles[0], MOE_SYNC, "scale_moe_gain")->reads[0].buffer = gradient_of(s, "attention_gain");
}

static void clip_reads_another(struct moe_schedule *s)
{
    fixture_op(&s->roles[0], MOE_CLIPPING, "clip_attention_gain")->reads[0].buffer =
        gradient_of(s, "moe_gain");
}

static void update_reads_another(struct moe_schedule *s)
{
    rank_2(s, MOE_UPDATE, "update_moe_gain")->reads[1].buffer = gradient_of(s, "attention_gain");
}

static void one_layer_updated_twice(struct moe_schedule *s)
{
    struct moe_role *role = moe_schedule_split_role(s, 2);
    for (int i = 0; i < role->n_instances; i++)
        if (role->blocks[role->itinerary[i].block].pass == MOE_UPDATE) role->itinerary[i].layer = 0;
}

static void clip_reads_one_norm_twice(struct moe_schedule *s)
{
    struct moe_op *op = rank_2(s, MOE_CLIPPING, "clip_router");
    op->reads[2] = op->reads[1];
}

/* Every block with a pass in SYNC goes to where the norms are complete but for their sum over ranks. */
static void norms_before_sums(struct moe_schedule *s)
{
    struct moe_role *role = &s->roles[0];
    const struct moe_block *sum = fixture_block(role, fixture_op(role, MOE_CLIPPING, "sum_expert_norm"));
    struct moe_instance *order = moe_alloc((size_t)role->n_instances, sizeof *order);
    int n = 0, end = 0;
    while (&role->blocks[role->itinerary[end].block] != sum) end++;
    for (int sync = 0; sync < 2; sync++)
        for (int i = 0; i < end; i++)
            if ((role->blocks[role->itinerary[i].block].pass == MOE_SYNC) == sync)
                order[n++] = role->itinerary[i];
    memcpy(role->itinerary, order, (size_t)n * sizeof *order);
    free(order);
}

static void no_scale(struct moe_schedule *s)
{
    struct moe_role *role = moe_schedule_split_role(s, 2);
    struct moe_op *op = fixture_op(role, MOE_SYNC, "scale_router");
    moe_block_delete(fixture_block(role, op), op->id);
}

static void test_silent_faults(void **state)
{
    (void)state;
    static const struct {
        void (*plant)(struct moe_schedule *s);
        int check_class;
        const char *tokens, *text; /* of a verdict */
    } faults[] = {{sum_reads_another, 4, "6", "the gradient of moe_gain lacks"},
                  {sum_writes_elsewhere, 4, "6", "the gradient of moe_gain lacks"},
                  {scale_reads_another, 4, "6", "the gradient of moe_gain lacks"},
                  {clip_reads_another, 4, "6", "the gradient of attention_gain lacks"},
                  {update_reads_another, 4, "6", "does not read moe_gain and its gradient"},
                  {one_layer_updated_twice, 4, "6", "is updated 2 times in a step, expected once"},
                  {clip_reads_one_norm_twice, 5, "6", "reads expert_norm 0 times, expected once"},
                  {norms_before_sums, 5, "6", "before a later sum or division"},
                  {no_scale, 3, "6", "the gradient of router is 24 times"}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, faults[i].tokens, "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        faults[i].plant(s);
        assert_int_equal(moe_schedule_check(s), MOE_OK);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        bool told = false;
        for (int j = 0; j < v.n; j++) {
            told |= strstr(v.item[j].text, faults[i].text) != NULL;
            if (v.item[j].check_class == 6 || v.item[j].check_class == faults[i].check_class) continue;
            print_verdicts(&v);
            fail_msg("fault %zu: C%d", i, v.item[j].check_class);
        }
        if (!told) {
            print_verdicts(&v);
            fail_msg("fault %zu: no '%s'", i, faults[i].text);
        }
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* A buffer may hold more than arrives, but not less; what is added up is all of it. */
static void test_room_in_buffers(void **state)
{
    (void)state;
    static const struct {
        enum moe_pass pass;
        const char *op;
        int more;
        bool right;
    } cases[] = {{MOE_FORWARD, "dispatch", 8, true},
                 {MOE_FORWARD, "dispatch", -8, false},
                 {MOE_SYNC, "sum_router", 8, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        int buffer = fixture_op(&s->roles[0], cases[i].pass, cases[i].op)->writes[0].buffer;
        int more = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = cases[i].more});
        s->buffers[buffer].extent =
            fixture_expr(s, (struct moe_expr){MOE_EXPR_ADD, .a = s->buffers[buffer].extent, .b = more});
        assert_int_equal(errors_of(s, sc) == 0, cases[i].right);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* Rows for the peers of another group: the counts have no row for ranks 2 and 3. */
static void test_group_larger_than_counts(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    fixture_op(&s->roles[0], MOE_FORWARD, "dispatch")->comm = 0;
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 2);
    assert_non_null(strstr(v.item[0].text, "say nothing of a peer"));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Members of an all-reduce are compared with the first one: what rank 2 sends or expects is seen there. */
static void test_other_size_of_sum(void **state)
{
    (void)state;
    for (int sends = 0; sends < 2; sends++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_op *op = rank_2(s, MOE_SYNC, "sum_router");
        *(sends ? &op->send : &op->recv) = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 7});
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_int_equal(v.n, 1);
        assert_int_equal(v.item[0].check_class, 1);
        assert_int_equal(v.item[0].n_ranks, 1);
        assert_int_equal(v.item[0].ranks[0], 2);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* 128 ranks share sums; judged once for all of them, each still gets the answer. */
static void test_large_layout(void **state)
{
    (void)state;
    struct moe_scenario *sc = NULL;
    const char *text =
        "model: {layers: 16, hidden: 8, ffn: 6, experts: 128, top_k: 2, heads: 2, sequence: 4}\n"
        "layout: {ranks: 128, expert_parallel: 128}\ntokens_per_rank: 8\n";
    assert_int_equal(moe_scenario_parse("cost.yaml", text, &sc), MOE_OK);
    struct moe_schedule *s = fixture_schedule(sc);
    assert_int_equal(errors_of(s, sc), 0);
    struct moe_op *scale = fixture_op(moe_schedule_split_role(s, 77), MOE_SYNC, "scale_router");
    scale->divisor = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 7});
    assert_int_equal(errors_of(s, sc), 1); /* one rank, every layer */
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* The routing of another model or of another layout is a bug of the caller. */
static void test_routing_must_fit(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", ""),
                        *other[] = {fixture_scenario(2, 2, "6", ""), fixture_scenario(4, 2, "5", "")};
    struct moe_schedule *s = fixture_schedule(sc);
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (child == 0) {
            assert_non_null(freopen("/dev/null", "w", stderr));
            errors_of(s, other[i]);
            _exit(0);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        moe_scenario_free(other[i]);
    }
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Numbers of a rank are an example: one cause is one verdict, in whatever order ranks and layers are met. */
static void test_one_verdict_for_a_cause(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_scenario(4, 4, "[6, 5, 4, 3]", "capacity: {rule: megatron, factor: 100, pad: true}");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    print_verdicts(&v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 8);
    assert_int_equal(v.item[0].n_ranks, 4);
    for (int i = 0; i < 4; i++) assert_int_equal(v.item[0].ranks[i], i);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_schedules_have_no_verdicts),
        cmocka_unit_test(test_dropped_collective),
        cmocka_unit_test(test_other_size),
        cmocka_unit_test(test_other_group),
        cmocka_unit_test(test_other_scale),
        cmocka_unit_test(test_wrong_group_everywhere),
        cmocka_unit_test(test_padded_capacity_needs_equal_tokens),
        cmocka_unit_test(test_norms),
        cmocka_unit_test(test_every_deletion_is_noticed),
        cmocka_unit_test(test_a_role_of_its_own_is_no_fault),
        cmocka_unit_test(test_silent_faults),
        cmocka_unit_test(test_room_in_buffers),
        cmocka_unit_test(test_other_size_of_sum),
        cmocka_unit_test(test_group_larger_than_counts),
        cmocka_unit_test(test_large_layout),
        cmocka_unit_test(test_routing_must_fit),
        cmocka_unit_test(test_one_verdict_for_a_cause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
