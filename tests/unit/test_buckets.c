/* Buckets of a distributed optimizer: how they are laid out, which part of them a rank works on, what check
 * says of orders that are right or wrong, and what they cost. */
#include "sim/check/check.h"
#include "sim/cost/collective.h"
#include "sim/lower/buckets.h"
#include "sim/simulate.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* ---- the layout ---- */

enum { MOST = 4 };
static const struct vector {
    struct moe_bucket_rules rules;
    int parts, n;
    struct moe_bucket_tensor tensor[MOST]; /* elements, tied, and expected: bucket, begin */
    int n_buckets;
    int64_t size[MOST];
} vectors[] = {
    /* 100 is padded to 128, 64 ends at 192, 10 at 202; 202 to a multiple of lcm(2, 128). */
    {{0, true, true}, 2, 3, {{100, false, 0, 0}, {64, false, 0, 128}, {10, false, 0, 192}}, 1, {256}},
    /* lcm(3, 128) = 384, lcm(64, 128) = 128. */
    {{0, true, true}, 3, 1, {{10, false, 0, 0}}, 1, {384}},
    {{0, true, true}, 64, 1, {{10, false, 0, 0}}, 1, {128}},
    /* Closed when it has as many or more, so the bucket that 64 ends at 192 is closed there. */
    {{192, true, true}, 2, 3, {{100, false, 0, 0}, {64, false, 0, 128}, {10, false, 1, 0}}, 2, {256, 128}},
    {{193, true, true}, 2, 3, {{100, false, 0, 0}, {64, false, 0, 128}, {10, false, 0, 192}}, 1, {256}},
    /* A tied tensor has a bucket to itself; what is before it is closed; none is empty. */
    {{0, true, true}, 2, 3, {{100, false, 0, 0}, {300, true, 1, 0}, {50, false, 2, 0}}, 3, {128, 384, 128}},
    {{0, true, true}, 2, 2, {{300, true, 0, 0}, {50, false, 1, 0}}, 2, {384, 128}},
    {{0, true, true}, 2, 2, {{50, false, 0, 0}, {300, true, 1, 0}}, 2, {128, 384}},
    {{0, false, true}, 2, 2, {{50, false, 0, 0}, {300, true, 0, 64}}, 1, {384}},
    {{100, true, true}, 2, 2, {{100, false, 0, 0}, {300, true, 1, 0}}, 2, {128, 384}},
    /* Without padding three ranks cannot share 10 elements, nor those of the separate bucket behind them. */
    {{0, true, false}, 3, 2, {{10, false, 0, 0}, {7, true, 1, 0}}, 2, {10, 7}},
};

static void test_layout(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const struct vector *y = &vectors[i];
        struct moe_bucket_tensor tensor[MOST];
        int64_t size[MOST];
        for (int k = 0; k < y->n; k++)
            tensor[k] = (struct moe_bucket_tensor){y->tensor[k].n, y->tensor[k].tied, -1, -1};
        int n = moe_bucket_layout(&y->rules, y->parts, y->n, tensor, size);
        if (n != y->n_buckets) fail_msg("vector %zu: %d buckets", i, n);
        for (int k = 0; k < n; k++)
            if (size[k] != y->size[k]) fail_msg("vector %zu: bucket %d has %lld", i, k, (long long)size[k]);
        for (int k = 0; k < y->n; k++)
            if (tensor[k].bucket != y->tensor[k].bucket || tensor[k].begin != y->tensor[k].begin)
                fail_msg("vector %zu: tensor %d is in %d at %lld", i, k, tensor[k].bucket,
                         (long long)tensor[k].begin);
    }
}

/* ---- what a rank works on ---- */

/* The update of a parameter in a layer, 0 for those of none. */
static const struct moe_op *update_of(const struct moe_schedule *s, const char *name, int layer)
{
    const struct moe_role *role = &s->roles[0];
    for (int n = 0; n < role->n_instances; n++) {
        const struct moe_block *b = &role->blocks[role->itinerary[n].block];
        for (int o = 0; o < b->n_ops && b->pass == MOE_UPDATE && role->itinerary[n].layer == layer; o++)
            if (!strcmp(b->ops[o].name, name)) return &b->ops[o];
    }
    moe_bug(__FILE__, __LINE__, name);
}

static int64_t value(const struct moe_schedule *s, int expr, int rank)
{
    return moe_eval(s, (struct moe_env){0}, expr, rank, 0, 0);
}

/* The bucket of four ranks: last_gain (8 elements) at 0; of layer 1 router (64) at 64, moe_gain (8) at
 * 128, wo (64) at 192, wqkv (192) at 256, attention_gain (8) at 448; of layer 0 the same from 512 on,
 * wqkv at 704; the embedding (2048) at 960, the next multiple of 64 behind 904. It ends at 3008, padded
 * to 3072, of which each rank owns 768: rank 1 begins inside layer 0's wqkv. */
static void test_parts(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(4, 1, "12", "distributed_optimizer: {}");
    struct moe_schedule *s = fixture_schedule(sc);
    static const struct {
        const char *name;
        int layer;
        int64_t n[4], begin[4], first[4]; /* begin: in the bucket; first: of the tensor */
    } part[] = {{"update_last_gain", 0, {8, 0, 0, 0}, {0}, {0}},
                {"update_router", 1, {64, 0, 0, 0}, {64}, {0}},
                {"update_wqkv", 1, {192, 0, 0, 0}, {256}, {0}},
                {"update_wqkv", 0, {64, 128, 0, 0}, {704, 768}, {0, 64}},
                {"update_embedding", 0, {0, 576, 768, 704}, {0, 960, 1536, 2304}, {0, 0, 576, 1344}}};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        for (int r = 0; r < 4; r++) {
            const struct moe_op *op = update_of(s, part[i].name, part[i].layer);
            int64_t n = value(s, op->dims[0], r);
            assert_int_equal(op->kernel, MOE_K_ADAMW);
            assert_int_equal(value(s, s->buffers[op->reads[2].buffer].extent, r), 768);
            if (n != part[i].n[r] || value(s, op->writes[0].n, r) != n)
                fail_msg("%s: rank %d has %lld", part[i].name, r, (long long)n);
            if (!n) continue;
            assert_int_equal(value(s, op->bytes, r), 7 * 4 * n); /* 3 written, 4 read */
            assert_int_equal(value(s, op->reads[1].begin, r), part[i].begin[r]);
            assert_int_equal(value(s, op->reads[2].begin, r), part[i].begin[r] - r * 768);
            assert_int_equal(value(s, op->writes[0].begin, r), part[i].first[r]);
        }
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* ---- check ---- */

/* Classes of the verdicts, as bits; what says otherwise: no verdict names it. */
static unsigned classes_of(int ranks, int ep, const char *layout, const char *more, const char *says)
{
    struct moe_scenario *sc = fixture_layout(2, ranks, ep, layout, "4", more);
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    unsigned classes = 0;
    bool said = !says;
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++) {
        classes |= 1u << v.item[i].check_class;
        said |= says && strstr(v.item[i].text, says);
    }
    if (!said)
        for (int i = 0; i < v.n; i++) print_message("%s: %s\n", v.item[i].op, v.item[i].text);
    if (!said) fail_msg("no verdict says '%s'", says);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return classes;
}

#define SHARE "{do: reduce_scatter, of: shared, over: dp}, {do: reduce_scatter, of: experts, over: edp}, "
#define TIED "{do: sum, of: embedding, over: tied}, "
#define DIVIDE "{do: divide, by: world_tokens}, "
#define NORMS "{do: norm, of: shared, over: world}, {do: norm, of: experts, over: world}, {do: clip}, "
#define GATHER                                                                                               \
    "{do: update}, {do: all_gather, of: shared, over: dp}, {do: all_gather, of: experts, over: edp}]\n"
#define SINGLE "distributed_optimizer: {separate_tied: false}\n"

static const char pp[] = "pipeline_parallel: 2";
static const struct {
    int ranks, ep;
    const char *layout, *list, *says;
    unsigned classes;
} order[] = {
    {4, 2, NULL, "distributed_optimizer: {}\n", NULL, 0},
    {4, 1, NULL, "distributed_optimizer: {bucket_size: 200}\noverlap_grad_reduce: true\n", NULL, 0},
    {4, 4, NULL, "distributed_optimizer: {}\nloss: mean_of_ranks\n", NULL, 0},
    {4, 1, pp, "distributed_optimizer: {}\n", NULL, 0},
    {4, 2, "pipeline_parallel: 2, micro_batches: 3",
     "distributed_optimizer: {bucket_size: 200}\noverlap_grad_reduce: true\n", NULL, 0},
    {3, 1, NULL, "distributed_optimizer: {}\n", NULL, 0},
    /* One bucket, and the sum over stages before it is shared out, or behind. */
    {4, 1, pp, SINGLE "gradient_sync: [" TIED SHARE DIVIDE NORMS GATHER, NULL, 0},
    {4, 1, pp, SINGLE "gradient_sync: [" SHARE TIED DIVIDE NORMS GATHER,
     "the gradient of embedding lacks the contributions of 1 of the 4 ranks", 1u << 4},
    {4, 1, NULL, SINGLE, NULL, 0},
    /* Experts by the names of their parameters, beside shared parameters or without. */
    {4, 2, NULL,
     "gradient_sync: [{do: reduce_scatter, of: shared, over: dp}, {do: reduce_scatter, of: w1, over: "
     "edp}, "
     "{do: reduce_scatter, of: w2, over: edp}, " DIVIDE NORMS "{do: update}, "
     "{do: all_gather, of: shared, over: dp}, {do: all_gather, of: w1, over: edp}, "
     "{do: all_gather, of: w2, over: edp}]\n",
     NULL, 0},
    {4, 2, NULL,
     "gradient_sync: [{do: sum, of: shared, over: dp}, {do: reduce_scatter, of: w1, over: edp}, "
     "{do: reduce_scatter, of: w2, over: edp}, " DIVIDE "{do: norm, of: shared}, "
     "{do: norm, of: experts, over: world}, {do: clip}, {do: update}, "
     "{do: all_gather, of: w1, over: edp}, {do: all_gather, of: w2, over: edp}]\n",
     NULL, 0},
    /* Shared out among the ranks that split the experts, summed over their copies before. */
    {4, 2, NULL,
     "gradient_sync: [{do: sum, of: shared, over: edp}, {do: reduce_scatter, of: shared, over: ep}, "
     "{do: sum, of: experts, over: edp}, " DIVIDE "{do: norm, of: shared, over: ep}, "
     "{do: norm, of: experts, over: ep}, {do: clip}, {do: update}, "
     "{do: all_gather, of: shared, over: ep}]\n",
     NULL, 0},
    /* The same without that sum. */
    {4, 2, NULL,
     "gradient_sync: [{do: reduce_scatter, of: shared, over: ep}, "
     "{do: sum, of: experts, over: edp}, " DIVIDE "{do: norm, of: shared, over: ep}, "
     "{do: norm, of: experts, over: ep}, {do: clip}, {do: update}, "
     "{do: all_gather, of: shared, over: ep}]\n",
     "lacks", 1u << 4},
    /* Nothing is gathered, or experts are not. */
    {4, 2, NULL, "gradient_sync: [" SHARE DIVIDE NORMS "{do: update}]\n",
     "elements that were not updated once, on one rank", 1u << 4},
    {4, 2, NULL,
     "gradient_sync: [" SHARE DIVIDE NORMS "{do: update}, {do: all_gather, of: shared, over: dp}]\n",
     "elements that were not updated once, on one rank", 1u << 4},
    /* Gathered before the update. */
    {4, 2, NULL,
     "gradient_sync: [" SHARE DIVIDE NORMS
     "{do: all_gather, of: shared, over: dp}, {do: all_gather, of: experts, over: edp}, {do: update}]\n",
     "elements that were not updated once, on one rank", 1u << 4},
    /* Gathered over ranks that have not all parts. */
    {4, 2, NULL,
     "gradient_sync: [" SHARE DIVIDE NORMS "{do: update}, {do: all_gather, of: shared, over: ep}, "
     "{do: all_gather, of: experts, over: edp}]\n",
     "elements than values_0 holds", 1u << 1 | 1u << 4},
    /* Norms of the parts alone, or of what other ranks divide yet. */
    {4, 1, NULL,
     "gradient_sync: [" SHARE DIVIDE "{do: norm, of: shared}, {do: norm, of: experts, over: world}, "
     "{do: clip}, " GATHER,
     "shared_norm lacks", 1u << 5},
    {4, 1, NULL, "gradient_sync: [" SHARE NORMS DIVIDE GATHER, "before a later sum or division", 1u << 5},
    /* Twice. */
    {4, 1, NULL, "gradient_sync: [" SHARE DIVIDE "{do: norm, of: router, over: world}, " NORMS GATHER,
     "is not in shared_norm once", 1u << 5},
    /* Divided by the ranks that share, twice. */
    {4, 1, NULL, "gradient_sync: [{do: divide, by: dp}, " SHARE DIVIDE NORMS GATHER,
     "is 0.25 times what it should be", 1u << 3},
    /* Experts shared out among ranks that have others. */
    {4, 2, NULL,
     "gradient_sync: [{do: reduce_scatter, over: dp}, " DIVIDE NORMS
     "{do: update}, {do: all_gather, over: dp}]\n",
     "ranks that hold other experts: it is summed over 4 ranks", 1u << 4},
    /* Three ranks cannot share a bucket that is not padded. */
    {3, 1, NULL, "distributed_optimizer: {pad: false}\n",
     "elements of a bucket that are left when its ranks share it, so on rank 0: 1 is above 0", 1u << 8},
    {4, 1, NULL, "distributed_optimizer: {pad: false}\n", NULL, 0},
};

static void test_orders(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        unsigned classes =
            classes_of(order[i].ranks, order[i].ep, order[i].layout, order[i].list, order[i].says);
        if (classes != order[i].classes)
            fail_msg("order %zu: classes %x, not %x", i, classes, order[i].classes);
    }
}

/* Every operation of gradient sync matters: without it on the ranks of a stage there is an error. */
static void test_deletions(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_layout(2, 4, 1, "pipeline_parallel: 2", "4", "distributed_optimizer: {}");
    struct moe_routing *r = fixture_routing(sc);
    int tried = 0;
    for (int role = 0; role < 2; role++)
        for (int block = 0, more = 1; more; block++) {
            for (int op = 0, next = 1; next; op++) {
                struct moe_schedule *s = fixture_schedule(sc);
                more = block + 1 < s->roles[role].n_blocks;
                struct moe_block *b = &s->roles[role].blocks[block];
                next = op + 1 < b->n_ops;
                struct moe_verdicts v = {0};
                bool of_sync = b->pass == MOE_SYNC || b->pass == MOE_CLIPPING || b->pass == MOE_UPDATE;
                if (op < b->n_ops && of_sync) {
                    char name[MOE_NAME];
                    moe_copy_name(name, b->ops[op].name);
                    moe_block_delete(b, b->ops[op].id);
                    moe_check(s, r, &v);
                    if (!v.n) fail_msg("stage %d: nothing is said without %s", role, name);
                    tried++;
                }
                moe_verdicts_free(&v);
                moe_schedule_free(s);
            }
        }
    print_message("%d deletions\n", tried);
    assert_true(tried > 100);
    moe_routing_free(r);
    moe_scenario_free(sc);
}

/* ---- simulate ---- */

static struct moe_sim_result simulate(const char *more)
{
    struct moe_scenario *sc = NULL;
    struct moe_sim_result out;
    struct moe_topo *t;
    char text[512];
    snprintf(text, sizeof text,
             "model: {layers: 4, hidden: 1024, ffn: 1024, experts: 4, top_k: 2}\n"
             "layout: {ranks: 8, expert_parallel: 1}\ntokens_per_rank: 1024\nclip_norm: 0\n%s",
             more);
    if (moe_scenario_parse("x.yaml", text, &sc) < 0) fail_msg("%s", moe_error());
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_routing *r = fixture_routing(sc);
    assert_int_equal(moe_topo_load("a100_sxm", &t), MOE_OK);
    assert_int_equal(moe_simulate(s, r, t, &out), MOE_OK);
    moe_topo_free(t);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return out;
}

static double own_us(const struct moe_sim_result *result, const char *op)
{
    double sum = 0;
    for (int i = 0; i < result->n_rows; i++)
        if (strstr(result->rows[i].op, op)) sum += result->rows[i].own_us;
    assert_true(sum > 0);
    return sum;
}

/* A ring's reduce-scatter and all-gather carry what its all-reduce does; 8 ranks divide all sizes here. The
 * bucket of the experts takes what NCCL takes on idle links, in each of the two: 4 layers of 4 experts of
 * 3 x 2^20 elements, of which each rank has an eighth. An eighth of the optimizer's work takes less than a
 * quarter of the time, launches being as many. */
static void test_time(void **state)
{
    (void)state;
    struct moe_sim_result all = simulate(""), parts = simulate("distributed_optimizer: {pad: false}\n");
    struct moe_topo *t;
    for (int k = 0; k < MOE_LINK_CLASS_COUNT; k++) assert_int_equal(all.bytes[k], parts.bytes[k]);
    const int64_t part_bytes = 4 * 4 * 3 * (1 << 20) / 8 * 4;
    assert_int_equal(moe_topo_load("a100_sxm", &t), MOE_OK);
    for (int gathers = 0; gathers < 2; gathers++) {
        enum moe_collective kind = gathers ? MOE_ALLGATHER : MOE_REDUCESCATTER;
        double found_us = own_us(&parts, gathers ? "all_gather_1" : "reduce_scatter_1"),
               idle_us = 1e6 * moe_collective_s(t, kind, 8, part_bytes, 4, true);
        print_message("%s: %.4f us, idle %.4f us\n", moe_collective_text[kind], found_us, idle_us);
        assert_true(found_us > idle_us - 1e-3 && found_us < idle_us + 1e-3); /* 1 ps a flow */
    }
    assert_true(own_us(&parts, "update update_w") < 0.25 * own_us(&all, "update update_w"));
    moe_topo_free(t);
    moe_sim_free(&all);
    moe_sim_free(&parts);
}

/* Runs of blocks that reduce buckets before the last layer's backward pass. */
static int early_runs(const char *more)
{
    struct moe_scenario *sc = fixture_layout(4, 4, 1, "micro_batches: 2", "4", more);
    struct moe_schedule *s = fixture_schedule(sc);
    const struct moe_role *role = &s->roles[0];
    int runs = 0, before = 0;
    for (int n = 0; n < role->n_instances; n++) {
        const struct moe_block *b = &role->blocks[role->itinerary[n].block];
        if (b->pass == MOE_SYNC && !strcmp(b->name, "buckets")) runs++;
        if (b->pass == MOE_BACKWARD && b->per_layer) before = runs;
    }
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return before;
}

/* Those of layers 3, 2 and 1, each full with the layer's first tensor. Where one bucket holds all, there is
 * none; a second one is that of the experts. */
static void test_overlap(void **state)
{
    (void)state;
    assert_int_equal(early_runs("distributed_optimizer: {bucket_size: 400}\noverlap_grad_reduce: true\n"), 3);
    assert_int_equal(early_runs("distributed_optimizer: {bucket_size: 400}\n"), 0);
    assert_int_equal(early_runs("distributed_optimizer: {}\noverlap_grad_reduce: true\n"), 0);
}

/* ---- bad input ---- */

static void test_bad_lists(void **state)
{
    (void)state;
    static const struct {
        const char *list, *error;
    } bad[] = {
        {"distributed_optimizer: true\n", "x.yaml:4: "},
        {"distributed_optimizer: {bucket: 3}\n", "unknown key 'bucket' (did you mean 'bucket_size'?)"},
        {"distributed_optimizer: {bucket_size: -1}\n", "bucket_size"},
        {"gradient_sync: [{do: update}]\ndistributed_optimizer: {}\n",
         "x.yaml:5: distributed_optimizer: gradient_sync has no reduce_scatter"},
        {"gradient_sync: [{do: reduce_scatter}]\n",
         "x.yaml:4: gradient_sync: reduce_scatter needs over: world, dp, ep or edp"},
        {"gradient_sync: [{do: all_gather, over: tied}]\n",
         "x.yaml:4: gradient_sync: all_gather needs over: world, dp, ep or edp"},
        {"gradient_sync: [{do: reduce_scatter, over: dp, by: dp}]\n",
         "reduce_scatter cannot use by or times"},
        {"gradient_sync:\n  - {do: reduce_scatter, over: dp}\n  - {do: all_gather, of: shared, over: dp}\n",
         "x.yaml:6: gradient_sync: all_gather of shared: no reduce_scatter of shared before it"},
        {"gradient_sync:\n  - {do: reduce_scatter, over: dp}\n"
         "  - {do: reduce_scatter, of: experts, over: edp}\n",
         "x.yaml:6: gradient_sync: line 5 reduce-scatters w1 already"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct moe_scenario *sc = NULL;
        struct moe_schedule *s = NULL;
        char text[512];
        snprintf(text, sizeof text,
                 "model: {layers: 1, hidden: 8, ffn: 8, experts: 2, top_k: 1}\n"
                 "layout: {ranks: 2}\ntokens_per_rank: 4\n%s",
                 bad[i].list);
        int err = moe_scenario_parse("x.yaml", text, &sc);
        if (err >= 0) err = moe_lower(sc, &s);
        assert_int_equal(err, MOE_EINPUT);
        if (!strstr(moe_error(), bad[i].error)) fail_msg("list %zu: %s", i, moe_error());
        if (sc) moe_scenario_free(sc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),    cmocka_unit_test(test_parts), cmocka_unit_test(test_orders),
        cmocka_unit_test(test_deletions), cmocka_unit_test(test_time),  cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_bad_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
