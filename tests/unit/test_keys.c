/* Keys that say what a framework does otherwise (limits, padding, aux_loss, checkpoint, empty_rank, groups of
 * a layout): what check says of each value, right or wrong, and what is refused. */
#include "sim/check/check.h"
#include "sim/simulate.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* Classes of the errors as bits; says: what a verdict says, NULL: nothing in particular. */
static unsigned classes_of(struct moe_scenario *sc, const char *says)
{
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    unsigned classes = 0;
    bool said = !says;
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++) {
        if (v.item[i].severity == MOE_SEVERITY_ERROR) classes |= 1u << v.item[i].check_class;
        said |= says && (strstr(v.item[i].text, says) || strstr(v.item[i].op, says));
    }
    if (!said) fail_msg("no verdict says '%s'", says);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    return classes;
}

#define C(class) (1u << (class))
#define EMPTY "routing: {counts: [[[8, 8, 0, 0, 0, 0, 0, 0], [8, 8, 0, 0, 0, 0, 0, 0]]]}\n"
#define SPREAD "routing: {counts: [[[8, 0, 0, 0, 8, 0, 0, 0], [0, 8, 0, 0, 0, 8, 0, 0]]]}\n"
#define UNEVEN "routing: {counts: [[[8, 4, 4, 0, 0, 0, 0, 0], [0, 0, 0, 0, 8, 4, 4, 0]]]}\n"
#define EMPTY_ROW "[8, 8, 0, 0, 0, 0, 0, 0]"
#define EMPTY_ON_4 "routing: {counts: [[" EMPTY_ROW ", " EMPTY_ROW ", " EMPTY_ROW ", " EMPTY_ROW "]]}\n"
#define UNSUMMED                                                                                             \
    "gradient_sync: [{do: sum, of: shared, over: dp}, {do: divide, of: all, by: world_tokens}, "             \
    "{do: norm, of: shared, over: pp}, {do: norm, of: experts, over: ep_pp}, {do: clip}, {do: update}]\n"
#define LOW "dispatcher: deepep_low_latency\nmax_dispatch_tokens: "
#define UNSET "expert_group: unset"
#define PADS "dispatcher: gshard\ncapacity: {rule: megatron, factor: 1}\n"
static const struct {
    int ranks, ep;
    const char *layout, *more, *says;
    unsigned classes;
} verdicts[] = {
    {2, 2, NULL, LOW "8\n", NULL, 0},
    {2, 2, NULL, LOW "7\n", "8 is above 7", C(10)},
    {2, 2, NULL, LOW "[9, 9]\n", NULL, 0},
    {2, 2, NULL, LOW "[9, 8]\n", "9 is above 8", C(10)},
    {2, 2, NULL, "limits: {cuda_graph: false}\n", NULL, 0},
    {2, 2, NULL, "limits: {cuda_graph: true}\n", "cannot be captured", C(10)},
    {2, 2, NULL, "limits: {cuda_graph: true}\n" PADS, NULL, 0},
    /* 16 rows leave each rank; 32 reach rank 0, or 16 each. */
    {2, 2, NULL, "limits: {rank_factor: 2}\n" EMPTY, NULL, 0},
    {2, 2, NULL, "limits: {rank_factor: 1.9}\n" EMPTY, "32 is above 30", C(11)},
    {2, 2, NULL, "limits: {rank_factor: 1}\n" SPREAD, NULL, 0},
    {2, 2, NULL, "limits: {row_multiple: 8}\n" SPREAD, NULL, 0},
    {2, 2, NULL, "limits: {row_multiple: 16}\n" SPREAD, "16 is above 8", C(8)},
    {2, 2, NULL, "limits: {row_multiple: 8}\n" UNEVEN, "8 is above 4", C(8)},
    {2, 2, NULL, "padding: {tokens: 3, masked: true}\n", NULL, 0},
    {2, 2, NULL, "padding: {tokens: 3}\n", "6 is above 0", C(8)},
    {2, 2, NULL, "padding: {tokens: 0}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, times: group_tokens}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, times: [tokens, dp]}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, times: [tokens, ep, edp], by: 1}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, times: tokens}\n", "8, expected 32", C(7)},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, times: [tokens, ep]}\n", "16, expected 32", C(7)},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, over: ep, times: [tokens, ep]}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, over: edp, times: [tokens, 2]}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, over: none, times: tokens}\n", NULL, 0},
    {4, 2, NULL, "aux_loss: {coefficient: 0.1, over: none, times: group_tokens, by: sequences}\n",
     "8, expected 16", C(7)}, /* sequences of 4 */
    {4, 2, "micro_batches: 3", "aux_loss: {coefficient: 0.1, times: group_tokens, by: micro_batches}\n",
     "32, expected 96", C(7)},
    {2, 2, NULL, "empty_rank: detach\n" SPREAD, "whether ranks enter it follows from", 0},
    {2, 2, NULL, "empty_rank: detach\n" EMPTY, "backward d_combine", C(2)},
    {2, 2, NULL, "empty_rank: bypass\n" EMPTY, "rank 1 waits at 'layer 0 sync sum_moe_gain'", C(2)},
    {2, 2, NULL, "empty_rank: run\n" EMPTY, NULL, 0},
    {2, 2, NULL, "dispatcher: allgather\nempty_rank: detach\n" EMPTY, "never enters it", C(2)},
    {2, 2, NULL, "dispatcher: allgather\nempty_rank: bypass\n" EMPTY, "enters", C(2)},
    {2, 2, NULL, "empty_rank: skip_weights\n" EMPTY, NULL, 0}, /* nobody holds a copy */
    {2, 1, NULL, "empty_rank: skip_weights\n" EMPTY, NULL, 0}, /* all ranks have rows */
    /* All copies of an expert: what nobody computes from any row needs no sum, and nothing else does. */
    {4, 2, NULL, "empty_rank: skip_weights\n" EMPTY_ON_4, NULL, 0},
    {4, 2, NULL, "empty_rank: skip_weights\ndispatcher: allgather\n" EMPTY_ON_4, NULL, 0},
    {4, 1, NULL, UNSUMMED EMPTY_ON_4, "lacks the contributions of 3 of the 4 ranks", C(4)},
    {4, 2, NULL, UNSUMMED EMPTY_ON_4,
     "lacks the contributions of 1 of the 2 ranks that hold a copy of it: no step sums it over them, so on "
     "rank 0: of rank 2",
     C(4)},
    {2, 2, NULL, "dispatcher: allgather\nprobs_gradient: returned\n", NULL, 0},
    {2, 2, NULL, "dispatcher: allgather\nprobs_gradient: lost\n",
     "gradient of gather_probs, which nothing passes on", C(4)},
    {2, 2, NULL, "dispatcher: deepep\nprobs_gradient: lost\n",
     "gradient of arrived_probs, which nothing passes on", C(4)},
    {2, 2, NULL, "dispatcher: nvlink_one_sided\nprobs_gradient: lost\n",
     "gradient of arrived_probs, which nothing passes on", C(4)},
    {2, 2, NULL, "apply_probs: expert\nprobs_gradient: lost\n",
     "gradient of arrived_probs, which nothing passes on", C(4)},
    {2, 2, NULL, "apply_probs: expert\nprobs_gradient: returned\n", NULL, 0},
    {4, 2, "group_creation: in_order", "", NULL, 0},
    {4, 2, "group_creation: own_first", "", "group {2,3} where rank 0 enters that of {0,1}", C(13)},
    {4, 2, "group_creation: own_only", "", "group {2,3} where rank 0 enters that of {0,1}", C(13)},
    {4, 2, "group_creation: own_locally", "", NULL, 0},
    {4, 4, "group_creation: own_first", "", NULL, 0}, /* all ranks, or each alone */
    {4, 4, "group_creation: own_only", "", NULL, 0},
    {4, 1, "group_creation: own_only", "", NULL, 0},
    {4, 1, "group_creation: own_first, sequence_parallel: 2", "",
     "group {2,3} where rank 0 enters that of {0,1}", C(13)},
    {2, 2, UNSET, PADS, NULL, 0}, /* all ranks split the experts */
    {2, 1, UNSET, PADS, "2, expected 1", C(13)},
    {4, 2, UNSET, PADS, "4, expected 2", C(13)},
    {4, 2, "micro_batches: [2, 2, 1, 1]", "aux_loss: 0\n", NULL, 0},
    {4, 2, "micro_batches: [2, 1, 2, 1]", "aux_loss: 0\n", "never enters it on communicator ep", C(2)},
    {4, 2, "micro_batches: [2, 2, 1, 1]", "", "sum_counts", C(2)}, /* the loss sums counts of all ranks */
    {2, 1, "micro_batches: [3, 2], " UNSET, "aux_loss: 0\ndispatcher: gshard\n", "on communicator world",
     C(2) | C(13)},
    {4, 2, "sequence_parallel: 2", "", NULL, 0},
};

static void test_verdicts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof verdicts / sizeof *verdicts; i++) {
        char text[1024];
        struct moe_scenario *sc = NULL;
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 6, experts: 8, top_k: 2, heads: 0, sequence: 4}\n"
                 "layout: {ranks: %d, expert_parallel: %d%s%s}\ntokens_per_rank: 8\n%s",
                 verdicts[i].ranks, verdicts[i].ep, verdicts[i].layout ? ", " : "",
                 verdicts[i].layout ? verdicts[i].layout : "", verdicts[i].more);
        if (moe_scenario_parse("x.yaml", text, &sc) < 0) fail_msg("%zu: %s", i, moe_error());
        unsigned classes = classes_of(sc, verdicts[i].says);
        if (classes != verdicts[i].classes)
            fail_msg("%zu (%s): classes %x, expected %x", i, verdicts[i].more, classes, verdicts[i].classes);
        moe_scenario_free(sc);
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *layout, *more, *error;
        int err;
    } bad[] = {
        {"", "limits: {max_tokens: 8}",
         "x.yaml:4: unknown key 'max_tokens' (did you mean 'max_dispatch_tokens'", MOE_EINPUT},
        {"", "max_dispatch_token: 8", "did you mean 'max_dispatch_tokens'?", MOE_EINPUT},
        {"", LOW "0", "x.yaml:5: max_dispatch_tokens: expected a whole number from 1 to", MOE_EINPUT},
        {"", LOW "[]", "x.yaml:5: max_dispatch_tokens: expected 1 to 64 numbers", MOE_EINPUT},
        {"", "max_dispatch_tokens: 8",
         "x.yaml:4: key 'max_dispatch_tokens' belongs to dispatcher deepep_low_latency, nvlink_one_sided, "
         "not "
         "alltoall",
         MOE_EINPUT},
        {"", "padding: {tokens: 9}", "x.yaml:3: tokens_per_rank: fewer than the 9 of padding", MOE_EINPUT},
        {"", "padding: {masked: true}", "key 'tokens' is missing", MOE_EINPUT},
        {"", "aux_loss: -1", "x.yaml:4: aux_loss: expected a number from 0", MOE_EINPUT},
        {"", "aux_loss: {times: tokens}", "key 'coefficient' is missing", MOE_EINPUT},
        {"", "aux_loss: {coefficient: 1, times: tokns}", "not 'tokns', did you mean tokens", MOE_EINPUT},
        {"", "aux_loss: {coefficient: 1, by: [1, 1, 1, 1, 1]}", "expected 1 to 4 factors", MOE_EINPUT},
        {"", "checkpoint: {save: {by: frst}}", "by: expected one of owners, all, first, not 'frst'",
         MOE_EINPUT},
        {"", "checkpoint: {lod: {}}", "did you mean 'load'?", MOE_EINPUT},
        {"", "checkpoint:\n  load:\n    expert_parallel: 8",
         "x.yaml:6: checkpoint.load.expert_parallel: expected at most the ranks of a stage, 4,", MOE_EINPUT},
        {"", "checkpoint: {load: {expert_parallel: 3}}",
         "x.yaml:4: checkpoint.load.expert_parallel 3 does not divide the ranks of a stage, 4", MOE_ELAYOUT},
        {"", "empty_rank: skip", "empty_rank: expected one of run, detach, bypass, skip_weights", MOE_EINPUT},
        {", micro_batches: 2", "empty_rank: skip_weights", "goes with one micro-batch", MOE_EINPUT},
        {"", "probs_gradient: lost", "dispatcher alltoall weighs rows at home", MOE_EINPUT},
        {", expert_group: unset", "dispatcher: alltoall", "expected dispatcher gshard", MOE_EINPUT},
        {", micro_batches: [1, 2]", "", "micro_batches lists 2 numbers, expected one per rank (4)",
         MOE_EINPUT},
        {", micro_batches: [1, 2, 0, 1]", "", "micro_batches: expected a whole number from 1 to 4096",
         MOE_EINPUT},
        {", micro_batches: [1, 2, 1, 1]", "loss: mean_of_ranks", "go with one stage and loss per_token",
         MOE_EINPUT},
        {", data_parallel: 2", "", "x.yaml:2: data_parallel 2 is not ranks 4 / pipeline_parallel 1",
         MOE_ELAYOUT},
        {", data_parallel: 4, expert_data_parallel: 1", "", "expert_data_parallel 1 is not ranks 4",
         MOE_ELAYOUT},
        {", data_parallel: 4, expert_data_parallel: 2", "", "", MOE_OK},
        {", sequence_parallel: 3", "", "sequence_parallel 3 does not divide the 4 ranks of a stage",
         MOE_ELAYOUT},
        {", sequence_parallel: 2", "", "sequence_parallel goes with heads: 0", MOE_EINPUT},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[1024];
        struct moe_scenario *sc = NULL;
        struct moe_schedule *s = NULL;
        bool attention = strstr(bad[i].error, "heads") != NULL;
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 6, experts: 8, top_k: 2, heads: %d}\n"
                 "layout: {ranks: 4, expert_parallel: 2%s}\ntokens_per_rank: 8\n%s\n",
                 attention ? 2 : 0, bad[i].layout, bad[i].more);
        int err = moe_scenario_parse("x.yaml", text, &sc);
        if (err >= 0) err = moe_lower(sc, &s);
        if (err != bad[i].err || (err < 0 && !strstr(moe_error(), bad[i].error)))
            fail_msg("%zu: %d %s", i, err, moe_error());
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* ---- checkpoints, told by writing and reading them ---- */

static const char *const names[] = {"global", "local"}, *const writers[] = {"owners", "all", "first"},
                         *const files[] = {"one", "ranks", "merged"};

/* Ranks 0 to 7, consecutive: place r % ep among those that split 8 experts. Each writes its experts into a
 * store [file][name], ranks in order, and then reads: is every expert there that is asked for, and was none
 * written over by another? */
static bool survives(int ep, int later, int save_names, int by, int file_rule, int load_names)
{
    enum { R = 8, E = 8, NOTHING = -1 };
    int store[R][E];
    bool right = true;
    memset(store, NOTHING, sizeof store);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < E / ep; i++) {
            int place = r % ep, expert = place * (E / ep) + i;
            bool writes = by == 1 || (by == 0 && r < ep) || r == 0;
            int *at = &store[file_rule == 1 ? place : 0][save_names ? i : expert];
            if (!writes) continue;
            right &= *at == NOTHING || *at == expert;
            *at = expert;
        }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < E / later; i++) {
            int place = r % later, expert = place * (E / later) + i;
            right &= store[file_rule == 1 ? place : 0][load_names ? i : expert] == expert;
        }
    return right;
}

static void test_checkpoints(void **state)
{
    (void)state;
    static const int sizes[][2] = {{1, 1}, {2, 2}, {4, 4}, {4, 2}, {2, 8}, {8, 1}};
    int n_right = 0, n = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int rule = 0; rule < 2 * 3 * 3 * 2; rule++) {
            int save = rule % 2, by = rule / 2 % 3, file = rule / 6 % 3, load = rule / 18;
            char more[256];
            snprintf(
                more, sizeof more,
                "checkpoint: {save: {names: %s, by: %s, files: %s}, load: {names: %s, expert_parallel: %d}}",
                names[save], writers[by], files[file], names[load], sizes[s][1]);
            struct moe_scenario *sc = fixture_scenario(8, sizes[s][0], "2", more);
            bool right = survives(sizes[s][0], sizes[s][1], save, by, file, load);
            unsigned classes = classes_of(sc, NULL);
            if (classes != (right ? 0 : C(15))) fail_msg("ep %d, %s: classes %x", sizes[s][0], more, classes);
            moe_scenario_free(sc);
            n_right += right;
            n++;
        }
    assert_true(n_right > n / 10 && n_right < n / 2);
}

/* What is done with an expert that is not there is said. */
static void test_absent(void **state)
{
    (void)state;
    static const char *const absent[][2] = {
        {"stop", "stops"}, {"initial", "keeps its initial values"}, {"zero", "filled with zeros"}};
    for (int i = 0; i < 3; i++) {
        char more[128];
        snprintf(more, sizeof more, "checkpoint: {save: {by: first}, load: {absent: %s}}", absent[i][0]);
        struct moe_scenario *sc = fixture_scenario(4, 2, "2", more);
        assert_int_equal(classes_of(sc, absent[i][1]), C(15));
        moe_scenario_free(sc);
    }
    /* What is lost on saving is said, not what is then found in its place. */
    struct moe_scenario *sc =
        fixture_scenario(4, 2, "2", "checkpoint: {save: {names: local}, load: {names: local}}");
    assert_int_equal(classes_of(sc, "experts 0 and 4, of ranks 0 and 1, are stored under one name: of 4"),
                     C(15));
    moe_scenario_free(sc);
}

/* The second half of the experts is with ranks 2 and 3 of 4 where ranks are strided, else with 1 and 3; in
 * each stage. */
static void test_places(void **state)
{
    (void)state;
    static const int expected[2][4] = {{1, 3, 5, 7}, {2, 3, 6, 7}};
    for (int strided = 0; strided < 2; strided++) {
        struct moe_scenario *sc = fixture_layout(
            2, 8, 2, strided ? "pipeline_parallel: 2, rank_order: strided" : "pipeline_parallel: 2", "2",
            "checkpoint: {save: {by: first}}");
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_int_equal(v.n, 1);
        assert_int_equal(v.item[0].n_ranks, 4);
        assert_memory_equal(v.item[0].ranks, expected[strided], sizeof expected[strided]);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

#define AT_END                                                                                               \
    "{do: divide, of: all, by: world_tokens}, {do: norm, of: shared, over: pp}, "                            \
    "{do: norm, of: experts, over: ep_pp}, {do: clip}, {do: update}]"
#define SPLIT(of, over) "{do: reduce_scatter, of: " of ", over: " over "}, "
#define GATHER(of, over) "{do: all_gather, of: " of ", over: " over "}"
static const struct {
    int ranks, ep;
    const char *layout, *more;
    int class;
    unsigned on; /* bits of ranks */
} whole[] = {
    /* Ranks 0 to 3 wait for those of the last stage, which have no such sum. */
    {4, 2, "pipeline_parallel: 2, micro_batches: 4",
     "gradient_sync: [{do: sum, of: embedding, over: tied, on: first}, {do: sum, of: shared, over: dp}, "
     "{do: sum, of: experts, over: edp}, " AT_END,
     2, 0xf0},
    /* Of both groups that split the experts the second rank got no row. */
    {4, 2, NULL, "empty_rank: detach\n" EMPTY_ON_4, 2, 0xa},
    /* No norm of experts: each rank clips its part of them by that of the rest. */
    {8, 4, NULL,
     "distributed_optimizer: {}\ngradient_sync: [" SPLIT("shared", "dp") SPLIT(
         "experts",
         "edp") "{do: divide, of: all, by: world_tokens}, {do: norm, of: shared, over: dp}, {do: clip}, "
                "{do: update}, " GATHER("shared", "dp") ", " GATHER("experts", "edp") "]",
     5, 0xff},
};

/* A verdict names all ranks that it holds for. */
static void test_ranks(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++) {
        int stages = whole[i].layout ? 2 : 1;
        struct moe_scenario *sc =
            fixture_layout(stages, stages * whole[i].ranks, whole[i].ep, whole[i].layout, "8", whole[i].more);
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        unsigned on = 0;
        moe_check(s, r, &v);
        assert_int_equal(v.n, 1);
        assert_int_equal(v.item[0].check_class, whole[i].class);
        for (int k = 0; k < v.item[0].n_ranks; k++) on |= 1u << v.item[0].ranks[k];
        if (on != whole[i].on) fail_msg("%zu: ranks %x: %s", i, on, v.item[0].text);
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* Tokens of a step: without padding that is masked; of the micro-batches that each rank runs. */
static void test_tokens(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(2, 2, "8", "padding: {tokens: 3, masked: true}");
    assert_true(sc->tokens[0] == 5 && sc->tokens[1] == 5);
    moe_scenario_free(sc);
    sc = fixture_layout(2, 4, 2, "micro_batches: [2, 2, 1, 1]", "8", "aux_loss: 0");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_values *v = moe_values_new(s, r);
    assert_int_equal(moe_scenario_tokens(sc), 48);
    assert_int_equal(moe_eval(s, moe_values_host(v), s->params[0].divisor, 0, 0, 0), 48);
    moe_values_free(v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* ---- what the other readers make of it ---- */

/* The coefficient of the loss is what the default has, when its factors are right: c * E / K / T. */
static void test_aux_coefficient(void **state)
{
    (void)state;
    static const char *const same[] = {"aux_loss: 0.5", "aux_loss: {coefficient: 0.5, times: [tokens, dp]}",
                                       "aux_loss: {coefficient: 0.5, times: [group_tokens, 3], by: 3}"};
    for (int i = 0; i < 3; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "8", same[i]);
        struct moe_schedule *s = fixture_schedule(sc);
        for (int back = 0; back < 2; back++) {
            const struct moe_op *op =
                fixture_op(&s->roles[0], back ? MOE_BACKWARD : MOE_FORWARD, back ? "d_aux_loss" : "aux_loss");
            struct moe_routing *r = fixture_routing(sc);
            struct moe_values *v = moe_values_new(s, r);
            struct moe_env env = moe_values_host(v);
            double times = op->times ? (double)moe_eval(s, env, op->times, 1, 0, 0) : 1;
            double found = op->factor * times / (double)moe_eval(s, env, op->divisor, 1, 0, 0);
            assert_float_equal(found, 0.5 * 8 / 2 / 32, 1e-15);
            moe_values_free(v);
            moe_routing_free(r);
        }
        moe_schedule_free(s);
        moe_scenario_free(sc);
    }
}

/* The gradient is scaled like the loss. */
static void test_aux_gradient(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_scenario(4, 2, "8", "aux_loss: {coefficient: 0.5, times: [tokens, dp]}");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    fixture_op(&s->roles[0], MOE_BACKWARD, "d_aux_loss")->times =
        fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 8});
    moe_check(s, r, &v);
    assert_int_equal(v.n, 1);
    assert_int_equal(v.item[0].check_class, 7);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Where check says that a rank waits for ever, it does; where it says possible, it does not. */
static void test_empty_rank_in_time(void **state)
{
    (void)state;
    static const char *const mode[] = {"run", "detach", "bypass", "skip_weights"};
    struct moe_topo *t = NULL;
    assert_int_equal(moe_topo_load("dgx_h100", &t), MOE_OK);
    for (int m = 0; m < 4; m++)
        for (int empty = 0; empty < 2; empty++) {
            char more[256];
            const char *row = empty ? "[8, 8, 0, 0, 0, 0, 0, 0]" : "[4, 0, 4, 0, 4, 0, 4, 0]";
            snprintf(more, sizeof more,
                     "empty_rank: %s\nrouting: {counts: [[%s, %s, [2,2,2,2,2,2,2,2], [2,2,2,2,2,2,2,2]]]}",
                     mode[m], row, row);
            struct moe_scenario *sc = fixture_layout(1, 4, 2, NULL, "8", more);
            struct moe_schedule *s = fixture_schedule(sc);
            struct moe_routing *r = fixture_routing(sc);
            struct moe_sim_result out = {0};
            int err = moe_simulate(s, r, t, &out);
            assert_int_equal(err, m && empty ? MOE_EVERDICT : MOE_OK);
            assert_int_equal(classes_of(sc, NULL), m && empty ? C(2) : 0);
            moe_sim_free(&out);
            moe_routing_free(r);
            moe_schedule_free(s);
            moe_scenario_free(sc);
        }
    moe_topo_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verdicts),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_checkpoints),  cmocka_unit_test(test_absent),
        cmocka_unit_test(test_places),       cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_tokens),       cmocka_unit_test(test_aux_coefficient),
        cmocka_unit_test(test_aux_gradient), cmocka_unit_test(test_empty_rank_in_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
