/* Stages of a pipeline: right in every order, time that grows as the orders say, and what check says when
 * neighbours disagree. That they compute what one rank computes is shown by tests/mpi/test_parity.c. */
#include "sim/check/check.h"
#include "sim/simulate.h"
#include "tests/fixture.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

struct piped {
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_routing *r;
};

static struct piped open_piped(int stages, int ranks_each, int micro, const char *order, const char *more)
{
    char layout[96];
    struct piped p;
    snprintf(layout, sizeof layout, "pipeline_parallel: %d, micro_batches: %d, pipeline: %s", stages, micro,
             order);
    p.sc = fixture_layout(4, stages * ranks_each, ranks_each, layout, "8", more);
    p.s = fixture_schedule(p.sc);
    p.r = fixture_routing(p.sc);
    return p;
}

static void close_piped(struct piped *p)
{
    moe_routing_free(p->r);
    moe_schedule_free(p->s);
    moe_scenario_free(p->sc);
}

/* Classes of the verdicts, as bits. */
static unsigned check(const struct piped *p, const char *says)
{
    struct moe_verdicts v;
    unsigned classes = 0;
    bool said = !says;
    moe_check(p->s, p->r, &v);
    for (int i = 0; i < v.n; i++) {
        classes |= 1u << v.item[i].check_class;
        said |= says && strstr(v.item[i].text, says);
    }
    if (!said)
        fail_msg("none of %d verdicts says '%s', the first: %s", v.n, says, v.n ? v.item[0].text : "-");
    moe_verdicts_free(&v);
    return classes;
}

static void test_orders_are_right(void **state)
{
    (void)state;
    static const char *const order[] = {"1f1b", "gpipe"};
    for (int stages = 1; stages <= 4; stages *= 2)
        for (int micro = 1; micro <= 6; micro++)
            for (int o = 0; o < 2; o++) {
                struct piped p = open_piped(stages, 2, micro, order[o], "overlap_grad_reduce: true");
                unsigned classes = check(&p, NULL);
                if (classes)
                    fail_msg("%d stages, %d micro-batches, %s: %x", stages, micro, order[o], classes);
                moe_schedule_split_role(p.s, 1); /* more roles, but of no other layers */
                assert_int_equal(moe_n_stages(p.s), stages);
                close_piped(&p);
            }
}

/* Neighbours that take turns in different orders: the first stage passes two micro-batches on before it takes
 * a gradient back, the second wants to give one back after the first. */
static void test_neighbours_disagree(void **state)
{
    (void)state;
    struct piped a = open_piped(2, 2, 3, "1f1b", ""), b = open_piped(2, 2, 3, "gpipe", "");
    struct moe_role *role = &a.s->roles[0];
    free(role->itinerary);
    role->itinerary = moe_alloc((size_t)b.s->roles[0].n_instances, sizeof *role->itinerary);
    role->n_instances = b.s->roles[0].n_instances;
    memcpy(role->itinerary, b.s->roles[0].itinerary, (size_t)role->n_instances * sizeof *role->itinerary);
    assert_int_equal(moe_schedule_check(a.s), MOE_OK);
    assert_int_equal(check(&a, "on communicator pipe_even where rank"), 1u << 2);
    close_piped(&a);
    close_piped(&b);
}

/* Every transfer, and the clearing of every gradient, matters. */
static void test_deletions(void **state)
{
    (void)state;
    struct piped whole = open_piped(2, 2, 3, "1f1b", "");
    int n = 0;
    for (int role = 0; role < 2; role++)
        for (int block = 0; block < whole.s->roles[role].n_blocks; block++) {
            const struct moe_block *at = &whole.s->roles[role].blocks[block];
            for (int op = 0; op < at->n_ops; op++) {
                if (strncmp(at->ops[op].name, "pass_", 5) && strncmp(at->ops[op].name, "clear_", 6)) continue;
                struct piped p = open_piped(2, 2, 3, "1f1b", "");
                moe_block_delete(&p.s->roles[role].blocks[block], at->ops[op].id);
                if (!check(&p, NULL)) fail_msg("stage %d without %s: no verdict", role, at->ops[op].name);
                close_piped(&p);
                n++;
            }
        }
    assert_true(n > 20);
    /* One micro-batch's part of the embedding's gradient: that of the last, which nothing waits for. */
    struct moe_role *first = &whole.s->roles[0];
    for (int i = 0; i < first->n_instances; i++) {
        const struct moe_block *block = &first->blocks[first->itinerary[i].block];
        if (block->pass != MOE_BACKWARD || strcmp(block->name, "embedding") || first->itinerary[i].layer < 10)
            continue;
        memmove(&first->itinerary[i], &first->itinerary[i + 1],
                (size_t)(--first->n_instances - i) * sizeof *first->itinerary);
        break;
    }
    assert_true(1u << 4 & check(&whole, "its backward pass runs 1 time less often than its forward pass"));
    close_piped(&whole);
}

/* A stage passes on what it got, or another activation of that size. */
static void test_passes_on_another(void **state)
{
    (void)state;
    for (int fault = 0; fault < 2; fault++) {
        struct piped p = open_piped(4, 1, 3, fault ? "1f1b" : "gpipe", "");
        struct moe_role *second = &p.s->roles[1];
        for (int b = 0; b < second->n_blocks; b++)
            for (int o = 0; o < second->blocks[b].n_ops; o++) {
                struct moe_op *op = &second->blocks[b].ops[o];
                if (op->kind != MOE_COLLECTIVE || strcmp(op->name, "pass_on") || op->send == op->recv)
                    continue;
                if (!strcmp(p.s->buffers[op->reads[0].buffer].name, "nothing")) continue;
                if (fault)
                    op->reads[0].buffer = fixture_op(second, MOE_FORWARD, "moe_norm")->writes[0].buffer;
                op->reads[0].shift = -1;
            }
        assert_int_equal(check(&p, "stream, which nothing reads, though its gradient is used"), 1u << 4);
        close_piped(&p);
    }
}

/* Lists that are right for one stage forget what several share. */
static void test_sums_over_stages(void **state)
{
    (void)state;
    struct piped p =
        open_piped(2, 2, 2, "1f1b",
                   "gradient_sync: [{do: sum, of: shared, over: dp}, {do: divide, by: world_tokens}, "
                   "{do: norm, of: shared, over: pp}, {do: norm, of: experts, over: ep_pp}, "
                   "{do: clip}, {do: update}]");
    assert_int_equal(check(&p, "the gradient of embedding lacks"), 1u << 4);
    close_piped(&p);
    p = open_piped(
        2, 2, 2, "1f1b",
        "gradient_sync: [{do: sum, of: shared, over: dp}, {do: sum, of: embedding, over: tied}, "
        "{do: divide, by: world_tokens}, {do: norm, of: shared}, {do: norm, of: experts, over: ep}, "
        "{do: clip}, {do: update}]");
    assert_int_equal(check(&p, "shared_norm lacks"), 1u << 5);
    close_piped(&p);
}

static double step_us(int stages, int micro, const char *order)
{
    char text[512];
    struct moe_scenario *sc = NULL;
    struct moe_topo *t;
    struct moe_sim_result out;
    snprintf(
        text, sizeof text,
        "model: {layers: 4, hidden: 2048, ffn: 4096, experts: 4, top_k: 2}\n"
        "layout: {ranks: %d, expert_parallel: 2, pipeline_parallel: %d, micro_batches: %d, pipeline: %s}\n"
        "tokens_per_rank: 4096\n",
        2 * stages, stages, micro, order);
    assert_int_equal(moe_scenario_parse("x.yaml", text, &sc), MOE_OK);
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    assert_int_equal(moe_topo_load("dgx_h100", &t), MOE_OK);
    assert_int_equal(moe_simulate(s, r, t, &out), MOE_OK);
    double us = (double)out.step * 1e-6;
    moe_sim_free(&out);
    moe_topo_free(t);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return us;
}

/* One micro-batch meets all layers one after the other, however many stages hold them. Every further one
 * takes what the slowest stage takes: a quarter of the layers. Of orders only memory differs. */
static void test_time(void **state)
{
    (void)state;
    double one = step_us(1, 1, "1f1b"), each = step_us(1, 3, "1f1b") - step_us(1, 2, "1f1b");
    double t[2][7];
    for (int o = 0; o < 2; o++)
        for (int micro = 1; micro <= 6; micro++) t[o][micro] = step_us(4, micro, o ? "gpipe" : "1f1b");
    for (int o = 0; o < 2; o++) {
        /* Less: each stage sums and updates its own layers. More: six transfers. */
        assert_true(fabs(t[o][1] / one - 1) < 0.05);
        double more = t[o][6] - t[o][5];
        assert_true(fabs((t[o][5] - t[o][4]) / more - 1) < 0.01);
        assert_true(more > each / 4 && more < each / 4 * 1.15); /* the last stage has the head, too */
    }
    assert_true(fabs(t[0][6] / t[1][6] - 1) < 0.02);
}

static void test_bad_layouts(void **state)
{
    (void)state;
    static const struct {
        const char *layout, *tokens, *error;
    } bad[] = {
        {"{ranks: 6, pipeline_parallel: 4}", "4", "x.yaml:2: pipeline_parallel 4 does not divide ranks 6"},
        {"{ranks: 6, pipeline_parallel: 3}", "4", "x.yaml:2: pipeline_parallel 3 does not divide layers 4"},
        {"{ranks: 4, pipeline_parallel: 2, expert_parallel: 4}", "4",
         "x.yaml:2: expert_parallel 4 does not divide the 2 ranks of a stage"},
        {"{ranks: 4, pipeline_parallel: 2}", "[4, 8, 4, 4]",
         "x.yaml:3: tokens_per_rank: rank 3 has 4 where rank 1 of the stage before it in its pipeline has 8"},
        {"{ranks: 4, pipeline: 1f1c}", "4",
         "x.yaml:2: pipeline: expected one of 1f1b, gpipe, not '1f1c' (did you mean '1f1b'?)"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_scenario *sc = NULL;
        char text[256];
        snprintf(text, sizeof text,
                 "model: {layers: 4, hidden: 8, ffn: 8, experts: 4, top_k: 1}\nlayout: %s\n"
                 "tokens_per_rank: %s\n",
                 bad[i].layout, bad[i].tokens);
        int err =
            moe_scenario_parse("x.yaml", text, &sc); /* sizes that do not divide have a code of their own */
        assert_int_equal(err, strstr(bad[i].error, "does not divide") ? MOE_ELAYOUT : MOE_EINPUT);
        assert_string_equal(moe_error(), bad[i].error);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_orders_are_right), cmocka_unit_test(test_neighbours_disagree),
        cmocka_unit_test(test_deletions),        cmocka_unit_test(test_passes_on_another),
        cmocka_unit_test(test_sums_over_stages), cmocka_unit_test(test_time),
        cmocka_unit_test(test_bad_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
