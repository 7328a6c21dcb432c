/* mutate FAULT [no-agreement] - plants one fault on rank 2 of a valid schedule, checks and executes it.
 *
 * Prints what check says, then how the run ended: "stopped: ..." when the members did not agree, or the
 * watchdog (2 s) or the library gave up, or "wrong gradients: ..." when the step ended with other gradients
 * than the valid schedule's. Exit code 5 when check named rank 2 and the operation and the run went wrong in
 * one of these ways; 1 otherwise. */
#include "sim/check/check.h"
#include "tests/mpi/parity.h"

#include <unistd.h>

static int check_names_it(const struct moe_schedule *s, const struct moe_scenario *sc, const char *op,
                          bool print)
{
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    int named = 0;
    for (int i = 0; i < v.n; i++) {
        named += v.item[i].n_ranks == 1 && v.item[i].ranks[0] == 2 &&
                 (strstr(v.item[i].op, op) || strstr(v.item[i].text, op));
        if (print)
            printf("check: C%d rank %d: %s %s\n", v.item[i].check_class, v.item[i].ranks[0], v.item[i].op,
                   v.item[i].text);
    }
    moe_verdicts_free(&v);
    moe_routing_free(r);
    return named;
}

static double largest_difference(const struct moe_schedule *s, const struct moe_execution *a,
                                 const struct moe_execution *b)
{
    double most = 0;
    for (int i = 0; i < s->n_params; i++)
        for (int slot = 0; slot < s->buffers[s->params[i].grad].slots; slot++) {
            int grad = s->params[i].grad;
            most = parity_larger(most, parity_difference(s, grad, slot, a, b, grad, 0));
        }
    return most;
}

int main(int argc, char **argv)
{
    struct moe_communicator *world;
    if (argc < 2 || argc > 3 || moe_communicator_here()->open(NULL, 60, &world) < 0) return 2;
    struct moe_scenario *sc = fixture_scenario(4, 2, "6", "");
    struct moe_schedule *right = fixture_schedule(sc), *wrong = fixture_schedule(sc);
    const char *op = fixture_mutate(wrong, argv[1], 2);
    if (!check_names_it(wrong, sc, op, world->rank == 0)) world->table->abort(world, 1);
    fflush(stdout);
    if (argc == 3) parity_agree_steps = 0;
    struct parity_run reference, run;
    int err = parity_step(right, world, 10, &reference);
    if (err < 0) parity_die(world, err);
    err = parity_step(wrong, world, 2, &run);
    if (err < 0) {
        printf("stopped: rank %d: %s\n", world->rank, moe_error());
        fflush(stdout);
        usleep(500000); /* let the other ranks report before the job ends */
        world->table->abort(world, 5);
    }
    double d = largest_difference(wrong, run.x, reference.x);
    if (!(d <= 1e-6))
        printf("wrong gradients: rank %d: they differ by %.3g of the largest\n", world->rank, d);
    parity_close(&run);
    parity_close(&reference);
    moe_schedule_free(right);
    moe_schedule_free(wrong);
    moe_scenario_free(sc);
    world->table->close(world);
    return d <= 1e-6 ? 0 : 5;
}
