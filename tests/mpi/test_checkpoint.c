/* A run that goes on from a checkpoint computes what the run that wrote it computes, also with another
 * expert-parallel size; files that do not belong there are refused. In double, on 4 ranks. */
#include "runtime/checkpoint.h"
#include "tests/mpi/parity.h"

#include <unistd.h>

static struct moe_communicator *world;

static void expect(bool right, const char *what)
{
    if (right) return;
    fprintf(stderr, "rank %d: FAILED: %s (last error: %s)\n", world->rank, what, moe_error());
    world->table->abort(world, 1);
}

struct run {
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_device *device;
    struct moe_execute_options options;
    struct moe_execution *x;
};

static struct run *start(int ep, uint64_t seed, int heads, const char *more)
{
    struct run *run = moe_alloc(1, sizeof *run);
    run->sc = fixture_scenario(world->size, ep, "12", more);
    run->sc->heads = heads;
    run->s = fixture_schedule(run->sc);
    run->options = (struct moe_execute_options){.timeout_s = 10, .seed = seed, .poison = true};
    int err = moe_device_cpu.open(&run->device);
    if (err >= 0) err = moe_execute_open(run->s, run->device, world, &run->options, &run->x);
    if (err < 0) parity_die(world, err);
    return run;
}

static void stop(struct run *run)
{
    moe_execute_close(run->x);
    run->device->table->close(run->device);
    moe_schedule_free(run->s);
    moe_scenario_free(run->sc);
    free(run);
}

static double step(struct run *run)
{
    int32_t token[12], target[12];
    double loss;
    parity_tokens(run->s, world->rank, token, target);
    int err = moe_execute_step(run->x, token, target, &loss);
    if (err < 0) parity_die(world, err);
    return loss;
}

/* All ranks get here before one goes on. */
static void meet(void)
{
    static const struct moe_op sum = {.collective = MOE_ALLREDUCE, .type = MOE_I32};
    const int64_t one = 1;
    int32_t n = 1;
    expect(world->table->start(world, &(struct moe_transfer){&sum, &n, &n, &one, &one}) == MOE_OK &&
               world->table->wait(world, 10) == MOE_OK,
           "a barrier");
}

static const char double_precision[] = "dtype: float64";

/* The first step after loading shows the parameters, the second the state and the number of the step. */
static void check_going_on(int ep, const double *expected)
{
    struct run *run = start(ep, 99, 2, double_precision);
    int err = moe_checkpoint_load("test_checkpoint", run->x);
    if (err < 0) parity_die(world, err);
    expect(moe_execute_steps(run->x) == 2, "the number of steps");
    for (int i = 0; i < 2; i++) {
        const double d = fabs(step(run) - expected[i]) / expected[i];
        if (world->rank == 0) printf("ep %d, step %d: %.2g\n", ep, 3 + i, d);
        expect(d <= 1e-12, "the loss goes on");
    }
    stop(run);
}

static void check_refused(struct run *run, const char *prefix, const char *reason)
{
    int err = moe_checkpoint_load(prefix, run->x);
    expect(err == MOE_EINPUT && strstr(moe_error(), reason), reason);
}

/* A copy of rank 1's file under another prefix, changed: `length` bytes, byte `at` another one. */
static void copy_file(const char *to, long length, long at)
{
    static char content[1 << 20];
    FILE *file = fopen("test_checkpoint.ckpt1", "rb");
    expect(file != NULL, "the file of rank 1");
    size_t n = fread(content, 1, sizeof content, file);
    fclose(file);
    if (at >= 0) content[at] ^= 1;
    file = fopen(to, "wb");
    expect(file != NULL && n < sizeof content && fwrite(content, 1, n + (size_t)length, file) > 0, "a copy");
    fclose(file);
}

/* By one rank, which loads alone. */
static void check_files(struct run *run)
{
    static const struct {
        long length, at;
        const char *reason;
    } faults[] = {{-1, -1, "truncated: "},
                  {0, 0, "no moesim checkpoint"},
                  {0, 8, "checkpoint version 0, this program reads 1"},
                  {0, 16, "4 ranks after 3 steps, rank 0 saved 4 ranks after 2"},
                  {0, 24, "of another model"}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        expect(link("test_checkpoint.ckpt0", "test_broken.ckpt0") == 0, "a link");
        copy_file("test_broken.ckpt1", faults[i].length, faults[i].at);
        check_refused(run, "test_broken", faults[i].reason);
        unlink("test_broken.ckpt0");
        unlink("test_broken.ckpt1");
    }
    check_refused(run, "test_none", "test_none.ckpt0: No such file");
}

int main(void)
{
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    expect(world->size == 4, "4 ranks");
    struct run *run = start(4, 3, 2, double_precision);
    double expected[2];
    step(run);
    step(run);
    expect(moe_checkpoint_save("test_checkpoint", run->x) == MOE_OK, "saved");
    for (int i = 0; i < 2; i++) expected[i] = step(run);
    stop(run);
    check_going_on(4, expected);
    check_going_on(2, expected);
    check_going_on(1, expected);
    run = start(4, 3, 2, double_precision);
    if (world->rank == 0) check_files(run);
    meet();
    stop(run);
    run = start(4, 3, 2, "dtype: float64\noptimizer: sgd");
    check_refused(run, "test_checkpoint", "of another model");
    stop(run);
    run = start(4, 3, 4, double_precision);
    check_refused(run, "test_checkpoint", "of another model");
    stop(run);
    meet();
    char path[32];
    snprintf(path, sizeof path, "test_checkpoint.ckpt%d", world->rank);
    unlink(path);
    if (world->rank == 0) printf("checkpoints go on\n");
    world->table->close(world);
    return 0;
}
