/* test_comm_nccl_ends.c - see test_comm_nccl.c: jobs that fail. Each rank must hear why, in time, print a
 * line that ends in "right", and end by abort, with exit code 3. */
#include "tests/cuda/mpi/fixture.h"

#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_CODE = 3 };

static void open_world(double timeout_s)
{
    if (moe_comm_nccl.open(&test_device, timeout_s, &world) == MOE_OK) return;
    fprintf(stderr, "test_comm_nccl: %s\n", moe_error());
    _exit(1);
}

static void say(int rank)
{
    printf("rank %d: %s: %s\n", rank, moe_error(), failures ? "wrong" : "right");
    fflush(stdout);
}

static void end(void)
{
    say(world->rank);
    world->table->abort(world, EXIT_CODE);
}

static int sum_of(struct moe_communicator *c, double timeout_s)
{
    static const struct moe_op op = {.name = "sum", .collective = MOE_ALLREDUCE, .type = MOE_I32};
    static int32_t value = 1;
    const int64_t one = 1;
    void *p = on_device(&value, sizeof value);
    MOE_TRY(c->table->start(c, &(struct moe_transfer){&op, p, p, &one, &one}));
    return c->table->wait(c, timeout_s);
}

/* Rank 2 has no memory; the others are in a collective. */
static void stop(double timeout_s)
{
    open_world(timeout_s);
    expect(sum_of(world, 20) == MOE_OK);
    if (world->rank == 2)
        moe_fail(MOE_EFAILED, "no memory");
    else
        expect(sum_of(world, 20) == MOE_EPEER && !strcmp(moe_error(), "rank 2 stopped: no memory"));
    end();
}

/* Rank 3 is busy: the others name it, and it hears of them. */
static void absent(double timeout_s)
{
    char text[256];
    int err;
    open_world(timeout_s);
    expect(sum_of(world, 20) == MOE_OK);
    if (world->rank == 3) {
        while ((err = world->table->poll(world)) == MOE_OK) usleep(1000);
        expect(err == MOE_EPEER && strstr(moe_error(), "stopped: sum: no answer for 0.3 s; rank 3 does not"));
    } else {
        expect(sum_of(world, 0.3) == MOE_EPEER && !strcmp(moe_error(), "no answer for 0.3 s"));
        world->table->blame(world, (int[]){0, 1, 2, 3}, RANKS, "sum", 0.5, text, sizeof text);
        expect(!strcmp(text, "rank 3 does not answer"));
        moe_fail(MOE_EPEER, "sum: no answer for 0.3 s; %s", text);
    }
    end();
}

/* Rank 3 comes to a split when the others have given it up, and rank 1 is in a gather. */
static void late_split(double timeout_s)
{
    struct moe_communicator *all = NULL;
    open_world(timeout_s);
    char own = 0, said[RANKS];
    if (world->rank == 3) usleep((useconds_t)((timeout_s + 1) * 1e6));
    const int err = world->rank == 1 ? world->table->gather(world, &own, said, 1, timeout_s)
                                     : world->table->split(world, (int[]){0, 1, 2, 3}, RANKS, 5, &all);
    expect(err == MOE_EPEER && !all); /* nothing that would be closed again */
    if (world->rank == 3) expect(strstr(moe_error(), " stopped: ") != NULL);
    if (world->rank != 3 && !strstr(moe_error(), " stopped: "))
        expect(!strcmp(moe_error(), world->rank == 1
                                        ? "no answer for 1 s; ranks 0,2-3 do not answer"
                                        : "ncclCommSplit: no answer for 1 s; ranks 1,3 have not come"));
    end();
}

/* Rank 3 comes to open when the others have given it up. Who has no world ends by itself. */
static void late_open(double timeout_s)
{
    const int rank = atoi(getenv("OMPI_COMM_WORLD_RANK"));
    const bool by_env = getenv("RANK") != NULL;
    const struct moe_communicator_table *table = moe_communicator_find("mpi");
    struct moe_communicator *mpi; /* which waits for all, so that the rest need not */
    expect(table->open(NULL, timeout_s, &mpi) == MOE_OK);
    if (rank == 3) usleep((useconds_t)((timeout_s + 0.5) * 1e6));
    expect(moe_comm_nccl.open(&test_device, timeout_s, &world) == MOE_EPEER && !world);
    if (by_env) expect(strstr(moe_error(), "ncclCommInitRankConfig: no answer for 1 s; rank 3 has not come"));
    say(rank);
    usleep(2000000); /* mpirun ends all when the first does */
    _exit(EXIT_CODE);
}

/* The double plants a fault in rank 1's second operation: an asynchronous one, or one in the call. */
static void remote(double timeout_s)
{
    open_world(timeout_s);
    expect(sum_of(world, 20) == MOE_OK);
    expect(sum_of(world, 20) == MOE_EPEER);
    expect(strstr(moe_error(), world->rank == 1 ? "remote process exited or there was a network error"
                                                : "rank 1 stopped: ncclGroupEnd: remote process exited"));
    end();
}

static void error(double timeout_s)
{
    open_world(timeout_s);
    expect(sum_of(world, 20) == MOE_OK);
    expect(sum_of(world, 20) == MOE_EPEER);
    expect(ncclGroupEnd() == ncclInvalidUsage); /* no group was left open */
    expect(strstr(moe_error(), world->rank == 1 ? "allreduce: unhandled system error"
                                                : "rank 1 stopped: allreduce: unhandled system error"));
    end();
}

ending find_ending(const char *name, double *timeout_s)
{
    static const struct {
        const char *name;
        ending end;
        double timeout_s;
    } endings[] = {{"stop", stop, 60},          {"absent", absent, 60}, {"late_split", late_split, 1},
                   {"late_open", late_open, 1}, {"remote", remote, 60}, {"error", error, 60}};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (!strcmp(endings[i].name, name)) {
            *timeout_s = endings[i].timeout_s;
            return endings[i].end;
        }
    return NULL;
}
