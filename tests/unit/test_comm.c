/* test_comm - the communicator of a job of one rank, and which communicator a process gets. */
#include "runtime/communicator.h"

#include <stdlib.h>
#include <string.h>

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

static struct moe_communicator *open_self(void)
{
    struct moe_communicator *world;
    assert_int_equal(moe_comm_self.open(NULL, 60, &world), MOE_OK);
    assert_int_equal(world->rank, 0);
    assert_int_equal(world->size, 1);
    return world;
}

/* Of one rank every collective is a copy of what it sends itself. */
static void test_collectives(void **state)
{
    (void)state;
    struct moe_communicator *world = open_self();
    for (int c = 0; c < MOE_COLLECTIVE_COUNT; c++) {
        const struct moe_op op = {.collective = (enum moe_collective)c, .type = MOE_I64};
        const int64_t in[] = {5, -6, 7};
        int64_t out[] = {0, 0, 0}, two = 2, three = 3;
        struct moe_transfer t = {&op, in, out, &two, &two};
        assert_int_equal(world->table->start(world, &t), MOE_OK);
        assert_int_equal(world->table->wait(world, 1), MOE_OK);
        assert_memory_equal(out, ((int64_t[]){5, -6, 0}), sizeof out);
        t.recv = &three;
        assert_int_equal(world->table->start(world, &t), MOE_EPEER);
        assert_string_equal(moe_error(), "sends 2 and receives 3 elements");
    }
    world->table->close(world);
}

static void test_in_place(void **state)
{
    (void)state;
    struct moe_communicator *world = open_self();
    const struct moe_op op = {.collective = MOE_ALLREDUCE, .type = MOE_F32};
    float numbers[] = {1.5f, -2};
    const int64_t two = 2;
    assert_int_equal(world->table->start(world, &(struct moe_transfer){&op, numbers, numbers, &two, &two}),
                     MOE_OK);
    assert_true(numbers[0] == 1.5f && numbers[1] == -2);
    world->table->close(world);
}

static void test_split(void **state)
{
    (void)state;
    struct moe_communicator *world = open_self(), *part;
    assert_int_equal(world->table->split(world, (int[]){0}, 1, 3, &part), MOE_OK);
    assert_ptr_not_equal(part, world);
    assert_true(part->rank == 0 && part->size == 1 && part->table == world->table);
    part->table->close(part);
    world->table->close(world);
}

static void test_find(void **state)
{
    (void)state;
    assert_ptr_equal(moe_communicator_find("self"), &moe_comm_self);
    assert_null(moe_communicator_find("carrier pigeon"));
}

/* A process that a launcher started gets "mpi" where that is built in. */
static void test_here(void **state)
{
    (void)state;
    const struct moe_communicator_table *mpi = moe_communicator_find("mpi");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    unsetenv("PMIX_RANK");
    unsetenv("PMI_RANK");
    assert_ptr_equal(moe_communicator_here(), &moe_comm_self);
    setenv("PMI_RANK", "0", 1);
    assert_ptr_equal(moe_communicator_here(), mpi ? mpi : &moe_comm_self);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_in_place), cmocka_unit_test(test_split),
        cmocka_unit_test(test_find),        cmocka_unit_test(test_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
