/* What ranks tell each other: four ranks, a thread each, or processes where one must end. */
#include "runtime/peers.h"

#include "runtime/tcp_store.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { RANKS = 4 };
static const double timeout_s = 20;
static const int all_ranks[RANKS] = {0, 1, 2, 3};

struct rank {
    pthread_t thread;
    struct moe_job job;
    struct moe_communicator mpi;
    bool has_mpi;
    struct moe_peers *peers;
    void (*body)(struct rank *r);
    char wrong[256]; /* the first thing that was not so */
};

#define require(r, cond) ((cond) ? (void)0 : note(r, __LINE__, #cond))
static void note(struct rank *r, int line, const char *what)
{
    if (!*r->wrong) snprintf(r->wrong, sizeof r->wrong, "%d: not so: %s (%s)", line, what, moe_error());
}

static void *run(void *arg)
{
    struct rank *r = arg;
    if (moe_peers_open(&r->job, r->has_mpi ? &r->mpi : NULL, timeout_s, &r->peers) < 0)
        note(r, __LINE__, "open");
    else
        r->body(r);
    moe_peers_close(r->peers, timeout_s);
    return NULL;
}

/* One that was free. */
static int any_port(void)
{
    struct moe_tcp_server *s;
    assert_int_equal(moe_tcp_serve("127.0.0.1", 0, 0, &s), MOE_OK);
    const int port = moe_tcp_server_port(s);
    moe_tcp_server_close(s, 0);
    return port;
}

static void on_ranks_by(const struct moe_communicator_table *mpi, void (*body)(struct rank *r))
{
    struct rank ranks[RANKS];
    const int port = mpi ? 0 : any_port();
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (struct rank){.job = {.rank = i, .size = RANKS, .port = port},
                                 .mpi = {mpi, i, RANKS},
                                 .has_mpi = mpi != NULL,
                                 .body = body};
        strcpy(ranks[i].job.host, mpi ? "" : "127.0.0.1");
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) pthread_join(ranks[i].thread, NULL);
    for (int i = 0; i < RANKS; i++)
        if (*ranks[i].wrong) fail_msg("rank %d: line %s", i, ranks[i].wrong);
}

/* ---- meeting ---- */

static void hears_rank_0(struct rank *r)
{
    int value = r->job.rank == 0 ? 42 : 0;
    char more[8] = "";
    require(r, moe_peers_share(r->peers, "id", &value, sizeof value) == MOE_OK && value == 42);
    if (r->job.rank == 1) require(r, moe_peers_share(r->peers, "id", more, sizeof more) == MOE_EPEER);
    require(r, moe_peers_leave(r->peers, timeout_s));
}

/* A gather among threads. */
static struct {
    pthread_barrier_t barrier;
    const void *own[RANKS];
} meeting;

static int gather(struct moe_communicator *c, const void *own, void *all, size_t bytes, double seconds)
{
    (void)seconds;
    meeting.own[c->rank] = own;
    pthread_barrier_wait(&meeting.barrier);
    for (int i = 0; i < RANKS; i++) memcpy((char *)all + (size_t)i * bytes, meeting.own[i], bytes);
    pthread_barrier_wait(&meeting.barrier);
    return MOE_OK;
}

static void ranks_meet_where_the_launcher_says(void **state)
{
    (void)state;
    on_ranks_by(NULL, hears_rank_0);
}

static void ranks_meet_where_mpi_says(void **state)
{
    (void)state;
    static const struct moe_communicator_table mpi = {.name = "threads", .gather = gather};
    assert_int_equal(pthread_barrier_init(&meeting.barrier, NULL, RANKS), 0);
    on_ranks_by(&mpi, hears_rank_0);
    pthread_barrier_destroy(&meeting.barrier);
}

static void one_rank_needs_nobody(void **state)
{
    (void)state;
    const struct moe_job job = {.size = 1};
    struct moe_peers *p;
    char text[64];
    assert_int_equal(moe_peers_open(&job, NULL, timeout_s, &p), MOE_OK);
    assert_int_equal(moe_peers_check(p), MOE_OK);
    moe_peers_blame(p, all_ranks, 1, "here", 0, text, sizeof text);
    assert_string_equal(text, "");
    moe_peers_stop(p, "done");
    assert_true(moe_peers_leave(p, timeout_s));
    moe_peers_close(p, timeout_s);
}

static void jobs_of_other_sizes_do_not_meet(void **state)
{
    (void)state;
    struct moe_job job = {.size = 2, .port = any_port(), .host = "127.0.0.1"};
    struct moe_peers *zero, *other;
    assert_int_equal(moe_peers_open(&job, NULL, timeout_s, &zero), MOE_OK);
    job.size = 3;
    job.rank = 1;
    assert_int_equal(moe_peers_open(&job, NULL, 0.1, &other), MOE_EPEER);
    assert_non_null(strstr(moe_error(), "another program, or another job, listens there"));
    moe_peers_close(zero, 0);
}

/* ---- who is where ---- */

/* Ranks 1 and 3 come to a place, rank 2 to another. */
static void comes_to_some_place(struct rank *r)
{
    char text[64];
    if (r->job.rank == 1 || r->job.rank == 3) moe_peers_arrive(r->peers, "split 1");
    if (r->job.rank == 2) moe_peers_arrive(r->peers, "split 2");
    require(r, moe_peers_share(r->peers, "told", text, 0) == MOE_OK);
    moe_peers_leave(r->peers, timeout_s); /* all have told */
    moe_peers_missing(r->peers, "split 1", all_ranks, RANKS, text, sizeof text);
    require(r, !strcmp(text, "ranks 0,2 have not come"));
    moe_peers_missing(r->peers, "split 1", all_ranks + 1, 3, text, sizeof text);
    require(r, !strcmp(text, "rank 2 has not come"));
    moe_peers_missing(r->peers, "split 2", all_ranks + 2, 1, text, sizeof text);
    require(r, !strcmp(text, ""));
    moe_peers_missing(r->peers, "split 1", all_ranks, RANKS, text, 8);
    require(r, !strcmp(text, "ranks 0"));
}

static void missing_ranks_are_named(void **state)
{
    (void)state;
    on_ranks_by(NULL, comes_to_some_place);
}

/* Ranks 0 and 1 wait in vain at one place, rank 2 at another, rank 3 is busy. */
static void waits_in_vain(struct rank *r)
{
    char text[128];
    if (r->job.rank < 3) {
        moe_peers_blame(r->peers, all_ranks, RANKS, r->job.rank < 2 ? "dispatch" : "combine", 0.3, text,
                        sizeof text);
        require(r,
                !strcmp(text, r->job.rank < 2 ? "rank 3 does not answer; rank 2 is at combine"
                                              : "rank 3 does not answer; rank 0 is at dispatch; rank 1 is at "
                                                "dispatch"));
    }
    if (r->job.rank < 2) {
        moe_peers_blame(r->peers, all_ranks, 2, "dispatch", timeout_s, text, sizeof text);
        require(r, !strcmp(text, ""));
    }
    moe_peers_leave(r->peers, timeout_s);
}

static void those_who_do_not_answer_are_named(void **state)
{
    (void)state;
    on_ranks_by(NULL, waits_in_vain);
}

/* Rank 3 has stopped, which ends the hearing. */
static void blames_who_stopped(struct rank *r)
{
    char text[128], none[1];
    if (r->job.rank == 3) moe_peers_stop(r->peers, "no memory");
    if (r->job.rank == 1) {
        moe_peers_blame(r->peers, all_ranks + 1, 3, "x", timeout_s, text, sizeof text);
        require(r, !strcmp(text, "rank 2 does not answer; rank 3 stopped: no memory"));
        moe_peers_blame(r->peers, all_ranks, 2, "x", 0, text, sizeof text);
        require(r, !strcmp(text, "rank 0 does not answer"));
    }
    require(r, moe_peers_share(r->peers, "told", none, 0) == MOE_OK);
    moe_peers_leave(r->peers, timeout_s);
}

static void who_stopped_is_blamed(void **state)
{
    (void)state;
    on_ranks_by(NULL, blames_who_stopped);
}

/* ---- the end ---- */

/* Until somebody has stopped. */
static void wait_for_stop(struct rank *r, const char *expected)
{
    int err;
    while ((err = moe_peers_check(r->peers)) == MOE_OK) usleep(2000);
    require(r, err == MOE_EPEER && !strcmp(moe_error(), expected));
}

static void hears_of_a_stop(struct rank *r)
{
    char none[1];
    require(r, moe_peers_share(r->peers, "begun", none, 0) == MOE_OK);
    if (r->job.rank == 2) require(r, moe_peers_check(r->peers) == MOE_OK); /* nobody has stopped yet */
    if (r->job.rank == 2) moe_peers_stop(r->peers, "no memory");
    if (r->job.rank != 2) wait_for_stop(r, "rank 2 stopped: no memory");
    moe_peers_stop(r->peers, "heard of it"); /* later than the first */
    wait_for_stop(r, "rank 2 stopped: no memory");
    require(r, moe_peers_leave(r->peers, timeout_s));
}

static void all_hear_why_one_stops(void **state)
{
    (void)state;
    on_ranks_by(NULL, hears_of_a_stop);
}

static void does_not_leave(struct rank *r)
{
    if (r->job.rank != 3) require(r, !moe_peers_leave(r->peers, 0.05));
    if (r->job.rank == 3) usleep(100000);
}

static void leaving_waits_no_longer_than_told(void **state)
{
    (void)state;
    on_ranks_by(NULL, does_not_leave);
}

/* A process that ends without a word, as when it is killed. */
static void a_dead_process_is_told_of(void **state)
{
    (void)state;
    struct rank r = {.job = {.size = 2, .port = any_port(), .host = "127.0.0.1"}};
    pid_t child = fork();
    if (child == 0) {
        struct moe_peers *p;
        r.job.rank = 1;
        _exit(moe_peers_open(&r.job, NULL, timeout_s, &p) < 0);
    }
    assert_int_equal(moe_peers_open(&r.job, NULL, timeout_s, &r.peers), MOE_OK);
    wait_for_stop(&r, "rank 1 stopped: its process ended");
    assert_string_equal(r.wrong, "");
    moe_peers_close(r.peers, timeout_s);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

/* ... and one in which rank 0 ends. */
static void a_dead_rank_0_is_noticed(void **state)
{
    (void)state;
    struct rank r = {.job = {.rank = 1, .size = 2, .port = any_port(), .host = "127.0.0.1"}};
    char none[1], text[256];
    int status, err;
    pid_t child = fork();
    if (child == 0) {
        struct moe_peers *p;
        r.job.rank = 0;
        if (moe_peers_open(&r.job, NULL, timeout_s, &p) < 0) _exit(1);
        moe_peers_share(p, "begun", none, 0);
        _exit(!moe_peers_leave(p, timeout_s));
    }
    assert_int_equal(moe_peers_open(&r.job, NULL, timeout_s, &r.peers), MOE_OK);
    assert_int_equal(moe_peers_share(r.peers, "begun", none, 0), MOE_OK);
    moe_peers_leave(r.peers, 0); /* rank 0 may end now, also before it answers this */
    while ((err = moe_peers_check(r.peers)) == MOE_OK) usleep(2000);
    assert_int_equal(err, MOE_EPEER);
    moe_peers_blame(r.peers, all_ranks, 2, "x", 0, text, sizeof text);
    assert_non_null(strstr(text, "rank 0's store at 127.0.0.1:"));
    moe_peers_missing(r.peers, "x", all_ranks, 2, text, sizeof text);
    assert_string_equal(text, "");
    moe_peers_close(r.peers, timeout_s);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_dead_process_is_told_of), /* before there are threads */
        cmocka_unit_test(a_dead_rank_0_is_noticed),
        cmocka_unit_test(ranks_meet_where_the_launcher_says),
        cmocka_unit_test(ranks_meet_where_mpi_says),
        cmocka_unit_test(one_rank_needs_nobody),
        cmocka_unit_test(jobs_of_other_sizes_do_not_meet),
        cmocka_unit_test(missing_ranks_are_named),
        cmocka_unit_test(those_who_do_not_answer_are_named),
        cmocka_unit_test(who_stopped_is_blamed),
        cmocka_unit_test(all_hear_why_one_stops),
        cmocka_unit_test(leaving_waits_no_longer_than_told)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
