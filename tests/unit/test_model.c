/* The whole model's backward pass against finite differences, in double, on one rank. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "tests/mpi/parity.h"

static const int32_t token[] = {1, 7, 7, 200, 3, 90, 14}, target[] = {7, 7, 200, 3, 90, 14, 255};
enum { N_TOKENS = sizeof token / sizeof *token };

struct model {
    struct moe_schedule *s;
    struct moe_communicator *world;
    struct moe_device *device;
    struct moe_execute_options options;
    int aux, expert; /* buffers */
};

/* Cross entropy and auxiliary loss per token after one step from the initial parameters with one element
 * moved by `by`; the routing of both layers goes to `ids`. A learning rate of 0 keeps the parameters. */
static double loss_at(struct model *m, int buffer, int slot, int64_t element, double by,
                      int32_t ids[2][2 * N_TOKENS], double *gradient, int grad)
{
    struct moe_execution *x;
    double loss;
    assert_int_equal(moe_execute_open(m->s, m->device, m->world, &m->options, &x), 0);
    int64_t n;
    ((double *)moe_execute_param(x, buffer, slot, &n))[element] += by;
    assert_int_equal(moe_execute_step(x, token, target, &loss), 0);
    for (int layer = 0; layer < 2; layer++)
        memcpy(ids[layer], moe_execute_buffer(x, m->expert, layer, &n), sizeof ids[layer]);
    if (gradient) *gradient = ((const double *)moe_execute_buffer(x, grad, slot, &n))[element];
    for (int layer = 0; layer < 2; layer++) loss += *(const double *)moe_execute_buffer(x, m->aux, layer, &n);
    moe_execute_close(x);
    return loss / N_TOKENS;
}

/* Central differences with h = 1e-5: truncation and cancellation both stay under 1e-8 for values of order 1.
 * Elements whose move changes the routing are skipped; at least 90 % must remain. */
static void test_gradients_equal_finite_differences(void **state)
{
    (void)state;
    struct moe_scenario *sc =
        fixture_scenario(1, 1, "7", "dtype: float64\nlearning_rate: 0\nclip_norm: 0\naux_loss: 0.5");
    struct model m = {.s = fixture_schedule(sc), .options = {.timeout_s = 1, .seed = 11, .poison = true}};
    const double h = 1e-5;
    int tried = 0, kept = 0;
    assert_int_equal(moe_comm_self.open(NULL, 60, &m.world), 0);
    assert_int_equal(moe_device_cpu.open(&m.device), 0);
    for (int i = 0; i < m.s->n_buffers; i++)
        if (!strcmp(m.s->buffers[i].name, "expert"))
            m.expert = i;
        else if (!strcmp(m.s->buffers[i].name, "aux_loss"))
            m.aux = i;
    for (int i = 0; i < m.s->n_params; i++) {
        const struct moe_param *p = &m.s->params[i];
        for (int slot = 0; slot < m.s->buffers[p->buffer].slots; slot++)
            for (int e = 0; e < 12; e++, tried++) {
                int32_t ids[3][2][2 * N_TOKENS];
                double gradient;
                int64_t n = moe_eval(m.s, (struct moe_env){0}, m.s->buffers[p->buffer].extent, 0, 0, 0);
                int64_t at = (int64_t)(moe_uniform(1, (uint64_t)i, (uint64_t)e) * (double)n);
                if (i == 0) at = token[e % N_TOKENS] * sc->hidden + e % sc->hidden; /* rows that are used */
                loss_at(&m, p->buffer, slot, at, 0, ids[0], &gradient, p->grad);
                double up = loss_at(&m, p->buffer, slot, at, h, ids[1], NULL, 0);
                double down = loss_at(&m, p->buffer, slot, at, -h, ids[2], NULL, 0);
                if (memcmp(ids[0], ids[1], sizeof ids[0]) || memcmp(ids[0], ids[2], sizeof ids[0])) continue;
                kept++;
                assert_float_equal(gradient, (up - down) / (2 * h), 1e-8);
            }
    }
    assert_true(kept >= 0.9 * tried);
    m.device->table->close(m.device);
    m.world->table->close(m.world);
    moe_schedule_free(m.s);
    moe_scenario_free(sc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients_equal_finite_differences)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
