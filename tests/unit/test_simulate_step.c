/* A whole lowered step with skewed routing, on two nodes of four: what must hold whatever the numbers are. */
#include "sim/lower/lower.h"
#include "sim/simulate.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>

#include <cmocka.h>

enum { L = 2, H = 32, R = 8, E = 16 };

struct step {
    struct moe_schedule *s;
    struct moe_routing *r;
    struct moe_topo *t;
    struct moe_sim_result out;
};

static void open_step(struct step *step)
{
    struct moe_scenario *sc;
    const char *text = "model: {layers: 2, hidden: 32, ffn: 8, experts: 16, top_k: 2}\n"
                       "layout: {ranks: 8, expert_parallel: 8}\n"
                       "tokens_per_rank: [1000, 2000, 500, 1000, 1000, 31, 1000, 1000]\n";
    assert_int_equal(moe_scenario_parse("test", text, &sc), MOE_OK);
    assert_int_equal(moe_lower(sc, &step->s), MOE_OK);
    step->r = moe_routing_generate(L, R, E, 2, sc->tokens, 1, 1);
    moe_scenario_free(sc);
    assert_int_equal(moe_topo_load("dgx_h100", &step->t), MOE_OK);
    step->t->gpus_per_node = step->t->nics_per_node = 4;
}

static int simulate(struct step *step)
{
    return moe_simulate(step->s, step->r, step->t, &step->out);
}

static void close_step(struct step *step)
{
    moe_sim_free(&step->out);
    moe_topo_free(step->t);
    moe_routing_free(step->r);
    moe_schedule_free(step->s);
}

static char *text_of(const struct moe_sim_result *r)
{
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    fprintf(f, "%lld %a %a %a %a %a %lld\n", (long long)r->step, r->compute_us, r->comm_us, r->exposed_us,
            r->waiting_us, r->host_us, (long long)r->events);
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++) fprintf(f, "%lld\n", (long long)r->bytes[c]);
    for (int i = 0; i < r->n_rows; i++)
        fprintf(f, "%s %d %a %a %lld\n", r->rows[i].op, r->rows[i].instances, r->rows[i].own_us,
                r->rows[i].wait_us, (long long)r->rows[i].bytes);
    fclose(f);
    return text;
}

static void test_same_bytes_twice(void **state)
{
    (void)state;
    char *text[2];
    for (int i = 0; i < 2; i++) {
        struct step step;
        open_step(&step);
        assert_int_equal(simulate(&step), MOE_OK);
        text[i] = text_of(&step.out);
        close_step(&step);
    }
    assert_string_equal(text[0], text[1]);
    free(text[0]);
    free(text[1]);
}

/* Compute, exposed, waiting and host are the whole step; kernels are the whole compute, as they share a
 * stream. */
static void test_times_add_up(void **state)
{
    (void)state;
    struct step step;
    open_step(&step);
    assert_int_equal(simulate(&step), MOE_OK);
    const struct moe_sim_result *out = &step.out;
    double sum_us = out->compute_us + out->exposed_us + out->waiting_us + out->host_us, kernels_us = 0;
    for (int i = 0; i < out->n_rows; i++)
        if (out->rows[i].kind == MOE_KERNEL) kernels_us += out->rows[i].own_us;
    assert_true(fabs(sum_us - (double)out->step * 1e-6) < 1e-9 * sum_us);
    assert_true(fabs(kernels_us - out->compute_us) < 1e-9 * kernels_us);
    assert_true(out->exposed_us > 0 && out->exposed_us < out->comm_us && out->waiting_us > 0);
    close_step(&step);
}

/* Rows that rank a sends to rank b in a layer: two experts live on a rank. */
static int64_t rows_between(const struct step *step, int layer, int a, int b)
{
    const int32_t *counts = moe_routing_counts(step->r, layer, a);
    return (int64_t)counts[2 * b] + counts[2 * b + 1];
}

static bool moves_rows(const struct moe_sim_row *row)
{
    return row->kind == MOE_COLLECTIVE && (strstr(row->op, "dispatch") || strstr(row->op, "combine"));
}

/* What is sent arrives: dispatch, combine and their backward each move every row that changes its rank, H
 * float32; the bytes of collectives are those on links (a flow crosses links of one class
 * on this machine). */
static void test_conservation(void **state)
{
    (void)state;
    struct step step;
    open_step(&step);
    assert_int_equal(simulate(&step), MOE_OK);
    int64_t moved = 0, rows = 0, links = 0;
    int moves = 0;
    for (int l = 0; l < L; l++)
        for (int a = 0; a < R; a++)
            for (int b = 0; b < R; b++)
                if (a != b) moved += rows_between(&step, l, a, b) * H * 4;
    for (int i = 0; i < step.out.n_rows; i++) {
        rows += step.out.rows[i].bytes;
        if (!moves_rows(&step.out.rows[i])) continue;
        assert_int_equal(step.out.rows[i].bytes, moved);
        assert_int_equal(step.out.rows[i].instances, L);
        moves++;
    }
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++) links += step.out.bytes[c];
    assert_int_equal(moves, 4);
    assert_int_equal(links, rows);
    close_step(&step);
}

/* Seconds of the busiest link when every rank a sends the rows of (a, b) or, back, of (b, a) to every b. */
static double busiest_s(const struct step *step, int layer, bool back)
{
    const struct moe_topo *t = step->t;
    double *bytes = moe_alloc((size_t)t->n_links, sizeof *bytes), most = 0;
    for (int a = 0; a < R; a++)
        for (int b = 0; b < R; b++) {
            int path[MOE_PATH_MAX], n = moe_topo_path(t, a, b, path);
            int64_t rows = back ? rows_between(step, layer, b, a) : rows_between(step, layer, a, b);
            for (int i = 0; i < n; i++) bytes[path[i]] += (double)(rows * H * 4);
        }
    for (int l = 0; l < t->n_links; l++)
        if (bytes[l] / t->link_Bps[l] > most) most = bytes[l] / t->link_Bps[l];
    free(bytes);
    return most;
}

/* Dispatch and combine of all layers, forward and backward, follow one another, and none is faster than its
 * busiest link. On a machine that computes in no time, by its links alone, the rest of the step is counts and
 * gradients, and with this routing one link is busy throughout each move: the bound is reached. */
static void test_lower_bound(void **state)
{
    (void)state;
    struct step step;
    open_step(&step);
    step.t->nccl.release = NULL;
    step.t->launch_s = step.t->host_sync_s = step.t->intra_latency_s = step.t->inter_latency_s = 0;
    step.t->memory_Bps = step.t->matmul_float32_flops = 1e18;
    assert_int_equal(simulate(&step), MOE_OK);
    double bound_us = 0, other_us = 0;
    for (int l = 0; l < L; l++) bound_us += 2e6 * (busiest_s(&step, l, false) + busiest_s(&step, l, true));
    for (int i = 0; i < step.out.n_rows; i++)
        if (!moves_rows(&step.out.rows[i])) other_us += step.out.rows[i].own_us;
    double step_us = (double)step.out.step * 1e-6;
    assert_true(step_us >= bound_us);
    assert_true(fabs(step_us - bound_us - other_us) < 1e-3 * step_us);
    close_step(&step);
}

/* No operation is there in vain: without it the step is another one, or none. */
static void test_every_operation_counts(void **state)
{
    (void)state;
    struct step whole;
    open_step(&whole);
    assert_int_equal(simulate(&whole), MOE_OK);
    int deleted = 0;
    for (int b = 0; b < whole.s->roles[0].n_blocks; b++)
        for (int o = 0; o < whole.s->roles[0].blocks[b].n_ops; o++, deleted++) {
            struct step part;
            open_step(&part);
            struct moe_block *block = &part.s->roles[0].blocks[b];
            moe_block_delete(block, block->ops[o].id);
            if (simulate(&part) == MOE_OK) {
                assert_int_equal(part.out.n_rows, whole.out.n_rows - 1);
                assert_true(part.out.step != whole.out.step || part.out.events != whole.out.events);
            }
            close_step(&part);
        }
    assert_int_equal(deleted, whole.out.n_rows);
    close_step(&whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes_twice),       cmocka_unit_test(test_times_add_up),
        cmocka_unit_test(test_conservation),           cmocka_unit_test(test_lower_bound),
        cmocka_unit_test(test_every_operation_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
