/* test_record - what a capture of one rank leaves in its store, compared with the execution itself. */
#include "runtime/record.h"
#include "sim/lower/lower.h"
#include "traces/store.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

/* assert_float_equal lets NaN pass. */
static void must_be_near(double got, double expected, double tolerance)
{
    if (!(fabs(got - expected) <= tolerance)) fail_msg("%.17g, expected %.17g", got, expected);
}

#define SCENARIO(pad)                                                                                        \
    "model: {layers: 2, hidden: 4, ffn: 4, experts: 4, top_k: 2}\n"                                          \
    "layout: {ranks: 1}\n"                                                                                   \
    "tokens_per_rank: 10\n"                                                                                  \
    "capacity: {rule: megatron, factor: 0.5, pad: " pad "}\n"                                                \
    "dtype: float64\n"
enum { T = 10, K = 2, LAYERS = 2, STEPS = 2 };

struct seen {
    int n;
    int64_t last_ns;
};

static int see(void *ctx, const struct moe_store_op *op)
{
    struct seen *seen = ctx;
    if (seen->n == 0) {
        assert_string_equal(op->label, "embedding forward embed");
        assert_string_equal(op->kind, "kernel");
    }
    assert_true(op->entry_ns >= seen->last_ns && op->start_ns >= op->entry_ns && op->end_ns >= op->start_ns);
    /* On one rank: 4 counts, of 8 bytes. */
    if (strcmp(op->label, "layer 1 forward exchange_counts") == 0) assert_int_equal(op->bytes, 4 * 8);
    seen->last_ns = op->end_ns;
    seen->n++;
    return MOE_OK;
}

static int find_buffer(const struct moe_schedule *s, const char *name)
{
    for (int b = 0; b < s->n_buffers; b++)
        if (strcmp(s->buffers[b].name, name) == 0) return b;
    fail_msg("no buffer %s", name);
    return -1;
}

static void must_hold(struct moe_store *store, const char *key, const char *expected)
{
    char *value;
    assert_int_equal(moe_store_get(store, key, &value), MOE_OK);
    assert_non_null(value);
    assert_string_equal(value, expected);
    free(value);
}

/* Every operation of every instance of the itinerary, in every step. */
static int count_ops(const struct moe_schedule *s)
{
    int n = 0;
    for (int i = 0; i < s->roles[0].n_instances; i++)
        n += s->roles[0].blocks[s->roles[0].itinerary[i].block].n_ops;
    return n * STEPS;
}

/* Runs STEPS steps; ids [LAYERS, T, K] and loss of the last, and the rows dropped in all. */
static void capture(const char *path, const char *text, const struct moe_schedule *s, int32_t *ids,
                    double *loss, int64_t *dropped)
{
    struct moe_device *device;
    struct moe_communicator *world;
    struct moe_recorder *recorder;
    struct moe_execution *x;
    struct moe_data data = {.n = 3, .hash = 0xab};
    struct moe_run run = {s, &data, text, "0.0", STEPS, 9};
    assert_int_equal(moe_device_cpu.open(&device), MOE_OK);
    assert_int_equal(moe_comm_self.open(NULL, 60, &world), MOE_OK);
    assert_int_equal(moe_recorder_open(path, &run, 0, &recorder), MOE_OK);
    struct moe_execute_options options = {1, 0, 9, false, moe_recorder_observe, recorder};
    assert_int_equal(moe_execute_open(s, device, world, &options, &x), MOE_OK);
    for (int step = 0; step < STEPS; step++) {
        int32_t token[T], target[T];
        for (int t = 0; t < T; t++) token[t] = 7 * t + step, target[t] = t;
        assert_int_equal(moe_execute_step(x, token, target, loss), MOE_OK);
        for (int layer = 0; layer < LAYERS; layer++) {
            int64_t n;
            const int32_t *slot = moe_execute_buffer(x, find_buffer(s, "kept_row_of_choice"), layer, &n);
            for (int64_t i = 0; i < n; i++) *dropped += slot[i] < 0;
        }
        assert_int_equal(moe_recorder_step(recorder, x, step, *loss, 1000 * (step + 1)), MOE_OK);
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        int64_t n;
        const int32_t *expert = moe_execute_buffer(x, find_buffer(s, "expert"), layer, &n);
        assert_int_equal(n, T * K);
        memcpy(ids + layer * T * K, expert, T * K * sizeof *ids);
    }
    moe_execute_close(x);
    moe_recorder_close(recorder);
    world->table->close(world);
    device->table->close(device);
}

static void test_capture(void **state)
{
    const char *text = *state;
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_store *store;
    int32_t expected[LAYERS * T * K];
    double loss;
    int64_t dropped = 0;
    assert_int_equal(moe_scenario_parse("test", text, &sc), MOE_OK);
    assert_int_equal(moe_lower(sc, &s), MOE_OK);
    struct seen seen = {.last_ns = moe_now_ns()};
    capture("test_record.db", text, s, expected, &loss, &dropped);
    assert_int_equal(moe_store_merge("test_record.db", 1, "test_record.db"), MOE_OK);
    assert_int_equal(moe_store_open("test_record.db", MOE_STORE_READ, &store), MOE_OK);
    must_hold(store, "scenario", text);
    must_hold(store, "seed", "9");
    must_hold(store, "steps", "2");
    must_hold(store, "ranks", "1");
    must_hold(store, "layers", "2");
    must_hold(store, "experts", "4");
    must_hold(store, "top_k", "2");
    must_hold(store, "data_bytes", "3");
    must_hold(store, "data_hash", "00000000000000ab");
    must_hold(store, "version", "0.0");
    for (int layer = 0; layer < LAYERS; layer++) {
        int64_t n;
        int k;
        int32_t *ids;
        assert_int_equal(moe_store_routing(store, STEPS - 1, layer, 0, &n, &k, &ids), MOE_OK);
        assert_true(ids && n == T && k == K);
        assert_memory_equal(ids, expected + layer * T * K, T * K * sizeof *ids);
        free(ids);
    }
    assert_memory_not_equal(expected, expected + T * K, T * K * sizeof *expected);
    struct moe_store_info info;
    assert_int_equal(moe_store_info(store, &info), MOE_OK);
    assert_int_equal(info.steps_complete, STEPS);
    must_be_near(info.last_loss, loss / T, 1e-12);
    /* At most ceil(10 x 2 / 4 x 0.5) = 3 rows for each of 4 experts stay of 20. */
    assert_true(dropped >= LAYERS * STEPS * (T * K - 4 * 3));
    assert_int_equal(info.n_dropped, dropped);
    must_be_near(info.median_step_us, 1.5, 0.51); /* steps of 1 and 2 us */
    assert_int_equal(moe_store_each_op(store, 0, STEPS - 1, see, &seen), MOE_OK);
    assert_int_equal(seen.n, count_ops(s));
    assert_true(seen.last_ns <= moe_now_ns());
    moe_store_close(store);
    unlink("test_record.db");
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

int main(void)
{
    static char packed[] = SCENARIO("false"), padded[] = SCENARIO("true");
    const struct CMUnitTest tests[] = {cmocka_unit_test_prestate(test_capture, packed),
                                       cmocka_unit_test_prestate(test_capture, padded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
