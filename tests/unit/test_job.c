/* Who a process is, from the environments of launchers. */
#include "runtime/job.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const *environment; /* "NAME=value", closed by NULL */

static char *look(const char *name)
{
    const size_t n = strlen(name);
    for (const char *const *e = environment; *e; e++)
        if (!strncmp(*e, name, n) && (*e)[n] == '=') return (char *)(uintptr_t)(*e + n + 1);
    return NULL;
}

#define ENV(...) ((const char *const[]){__VA_ARGS__, NULL})

static void check(const char *const *e, struct moe_job expected)
{
    struct moe_job job;
    environment = e;
    if (moe_job_find(look, &job) < 0) fail_msg("%s: %s", e[0], moe_error());
    if (job.launcher != expected.launcher || job.rank != expected.rank || job.size != expected.size ||
        strcmp(job.host, expected.host) != 0 || job.port != expected.port)
        fail_msg("%s: launcher %d, rank %d of %d, %s:%d", e[0], job.launcher, job.rank, job.size, job.host,
                 job.port);
}

static void check_error(const char *const *e, const char *expected)
{
    struct moe_job job;
    environment = e;
    assert_int_equal(moe_job_find(look, &job), MOE_EUSAGE);
    assert_string_equal(moe_error(), expected);
}

static void launchers_tell_rank_size_and_where_rank_0_is(void **state)
{
    (void)state;
    check(ENV("NOTHING=1"), (struct moe_job){MOE_LAUNCHED_ALONE, 0, 1, "", 0});
    check(ENV("RANK=3", "WORLD_SIZE=8", "MASTER_ADDR=node7", "MASTER_PORT=29500"),
          (struct moe_job){MOE_LAUNCHED_BY_ENV, 3, 8, "node7", 29500});
    check(ENV("RANK=3", "WORLD_SIZE=8", "MASTER_ADDR=::1", "MASTER_PORT=29500",
              "TORCHELASTIC_USE_AGENT_STORE=True"),
          (struct moe_job){MOE_LAUNCHED_BY_ENV, 3, 8, "::1", 29501});
    check(ENV("RANK=3", "WORLD_SIZE=8", "MASTER_ADDR=node7", "MASTER_PORT=29500",
              "TORCHELASTIC_USE_AGENT_STORE=False"),
          (struct moe_job){MOE_LAUNCHED_BY_ENV, 3, 8, "node7", 29500});
    check(ENV("RANK=0", "WORLD_SIZE=1"), (struct moe_job){MOE_LAUNCHED_BY_ENV, 0, 1, "", 0});
    check(ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4"),
          (struct moe_job){MOE_LAUNCHED_BY_MPI, 1, 4, "", 0});
    check(ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "MASTER_ADDR=a", "MASTER_PORT=5"),
          (struct moe_job){MOE_LAUNCHED_BY_MPI, 1, 4, "a", 5});
    check(ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "MASTER_ADDR=a"),
          (struct moe_job){MOE_LAUNCHED_BY_MPI, 1, 4, "", 0});
    check(ENV("PMI_RANK=1", "PMI_SIZE=4"), (struct moe_job){MOE_LAUNCHED_BY_MPI, 1, 4, "", 0});
}

/* 20000 + (7 * 1001 + 2) % 12000 = 27009. */
static void slurm_names_nodes_in_a_list(void **state)
{
    (void)state;
    static const char *const lists[][2] = {
        {"gpu1", "gpu1"},     {"gpu1,gpu2", "gpu1"}, {"gpu[003-010,014],cpu1", "gpu003"},
        {"gpu[7,9]", "gpu7"}, {"gpu[5]", "gpu5"},    {"rack[1-2]gpu[3-4]x,a", "rack1gpu3x"}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        char list[64] = "SLURM_STEP_NODELIST=";
        struct moe_job job = {MOE_LAUNCHED_BY_SLURM, 5, 16, "", 27009};
        strcat(list, lists[i][0]);
        strcpy(job.host, lists[i][1]);
        check(ENV(list, "SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_JOB_ID=1001", "SLURM_STEP_ID=2",
                  "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"),
              job);
    }
    check(
        ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_JOB_ID=4294967294",
            "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"),
        (struct moe_job){MOE_LAUNCHED_BY_SLURM, 5, 16, "10.0.0.1", 20000 + (int)(7 * 4294967294LL % 12000)});
    check(
        ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "MASTER_PORT=77", "MASTER_ADDR=m", "SLURM_STEP_NODELIST=n"),
        (struct moe_job){MOE_LAUNCHED_BY_SLURM, 5, 16, "m", 77});
    check(ENV("SLURM_PROCID=0", "SLURM_NTASKS=1"), (struct moe_job){MOE_LAUNCHED_BY_SLURM, 0, 1, "", 0});
}

/* RANK before mpirun before srun before PMI_RANK, which srun may set too. */
static void the_nearest_launcher_holds(void **state)
{
    (void)state;
    check(ENV("RANK=3", "WORLD_SIZE=8", "MASTER_ADDR=a", "MASTER_PORT=5", "OMPI_COMM_WORLD_RANK=1",
              "OMPI_COMM_WORLD_SIZE=4", "SLURM_PROCID=2", "SLURM_NTASKS=16"),
          (struct moe_job){MOE_LAUNCHED_BY_ENV, 3, 8, "a", 5});
    check(ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "SLURM_PROCID=2", "SLURM_NTASKS=16"),
          (struct moe_job){MOE_LAUNCHED_BY_MPI, 1, 4, "", 0});
    check(ENV("PMI_RANK=1", "PMI_SIZE=4", "SLURM_PROCID=2", "SLURM_NTASKS=16", "SLURM_JOB_ID=0",
              "SLURM_STEP_NODELIST=n"),
          (struct moe_job){MOE_LAUNCHED_BY_SLURM, 2, 16, "n", 20000});
}

static void wrong_values_are_one_clear_line(void **state)
{
    (void)state;
    check_error(ENV("RANK=3"), "WORLD_SIZE is not set: expected 1 to 16777216");
    check_error(ENV("RANK=8", "WORLD_SIZE=8"), "RANK=8: expected a number from 0 to 7");
    check_error(ENV("RANK=-1", "WORLD_SIZE=8"), "RANK=-1: expected a number from 0 to 7");
    check_error(ENV("RANK=1x", "WORLD_SIZE=8"), "RANK=1x: expected a number from 0 to 7");
    check_error(ENV("RANK=0", "WORLD_SIZE=0"), "WORLD_SIZE=0: expected a number from 1 to 16777216");
    check_error(ENV("RANK=1", "WORLD_SIZE=2", "MASTER_PORT=5"),
                "MASTER_ADDR is not set: expected the host of rank 0, for 2 ranks");
    check_error(ENV("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=a"),
                "MASTER_PORT is not set: expected 1 to 65535");
    check_error(ENV("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=a", "MASTER_PORT=65535",
                    "TORCHELASTIC_USE_AGENT_STORE=True"),
                "MASTER_PORT=65535: expected a number from 1 to 65534");
    check_error(ENV("OMPI_COMM_WORLD_RANK=1"), "OMPI_COMM_WORLD_SIZE is not set: expected 1 to 16777216");
    check_error(ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "MASTER_ADDR=a"),
                "SLURM_JOB_ID is not set: expected 0 to 4294967295");
    check_error(ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_JOB_ID=1"),
                "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set: expected the host of rank 0");
    check_error(ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_JOB_ID=1", "SLURM_STEP_NODELIST=a[1"),
                "SLURM_STEP_NODELIST=a[1: expected a list of nodes, '[' is not closed");
    check_error(ENV("SLURM_PROCID=5", "SLURM_NTASKS=16", "SLURM_JOB_ID=1", "SLURM_STEP_NODELIST=,a"),
                "SLURM_STEP_NODELIST=,a: expected a host of up to 255 bytes");
}

static void long_hosts_are_refused(void **state)
{
    (void)state;
    char host[400] = "MASTER_ADDR=", list[400] = "SLURM_STEP_NODELIST=a[";
    memset(host + strlen(host), 'h', 300);
    memset(list + strlen(list), '0', 300);
    strcat(list, "]");
    struct moe_job job;
    environment = ENV(host, "RANK=0", "WORLD_SIZE=2", "MASTER_PORT=1");
    assert_int_equal(moe_job_find(look, &job), MOE_EUSAGE);
    environment = ENV(list, "SLURM_PROCID=0", "SLURM_NTASKS=2", "SLURM_JOB_ID=1");
    assert_int_equal(moe_job_find(look, &job), MOE_EUSAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launchers_tell_rank_size_and_where_rank_0_is),
        cmocka_unit_test(slurm_names_nodes_in_a_list), cmocka_unit_test(the_nearest_launcher_holds),
        cmocka_unit_test(wrong_values_are_one_clear_line), cmocka_unit_test(long_hosts_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
