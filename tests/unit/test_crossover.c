/* Where all-gather stops winning against all-to-all: the simulator against the bytes that each must move.
 *
 * Derivation, for one rank, one direction and balanced routing, with P ranks in the group, T tokens, H
 * hidden, K choices: all-gather receives the tokens of P - 1 others, and reduce-scatter sends as much back:
 * 2 (P - 1) T H. All-to-all sends T K rows of which (P - 1) / P go to others, and gets them back:
 * 2 T K H (P - 1) / P. All-gather moves less while P < K, and they move the same at P = K: so it stops
 * winning at P = K, whatever T and H. (Probabilities and choices, gathered too, weigh (E + K) / H: they shift
 * it by less than one step of the powers of two tried here.) The backward pass moves the same again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/simulate.h"
#include "tests/fixture.h"

/* Own time of all collectives of a step; what the dispatchers share (gradient sums) is the same in both. */
static double comm_us(int ranks, int top_k, const char *dispatcher)
{
    char text[512];
    snprintf(text, sizeof text,
             "model: {layers: 1, hidden: 4096, ffn: 64, experts: 64, top_k: %d}\n"
             "layout: {ranks: %d, expert_parallel: %d}\ntokens_per_rank: 2048\ndispatcher: %s\n",
             top_k, ranks, ranks, dispatcher);
    struct moe_scenario *sc;
    struct moe_topo *t;
    struct moe_sim_result out;
    assert_int_equal(moe_scenario_parse("crossover.yaml", text, &sc), 0);
    assert_int_equal(moe_topo_load("gb200_nvl72", &t), 0); /* one domain for all sizes */
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    assert_int_equal(moe_simulate(s, r, t, &out), 0);
    double us = out.comm_us;
    moe_sim_free(&out);
    moe_topo_free(t);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return us;
}

/* log2 of the first group size at which all-gather does not win: 1 for 2 ranks, ..., 7 when it wins at 64. */
static int crossover(int top_k)
{
    int step = 1;
    for (; step <= 6; step++)
        if (comm_us(1 << step, top_k, "allgather") >= comm_us(1 << step, top_k, "alltoall")) break;
    return step;
}

static void test_moves_with_top_k(void **state)
{
    (void)state;
    int at[3];
    for (int i = 0; i < 3; i++) {
        static const int top_k[] = {1, 2, 8}, formula[] = {1, 1, 3}; /* P >= K, from 2 ranks on */
        at[i] = crossover(top_k[i]);
        print_message("top-%d: all-gather stops winning at %d ranks, by bytes at %d\n", top_k[i], 1 << at[i],
                      1 << formula[i]);
        assert_in_range(at[i], formula[i] - 1, formula[i] + 1);
    }
    assert_true(at[2] > at[1] && at[1] >= at[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_moves_with_top_k)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
