/* The store of a job: real sockets on the loopback, clients in threads, and strangers. */
#include "runtime/tcp_message.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { JOB = 77, CLIENTS = 8 };
static const double timeout_s = 20;

static struct moe_tcp_server *new_server(void)
{
    struct moe_tcp_server *s;
    if (moe_tcp_serve("127.0.0.1", 0, JOB, &s) < 0) fail_msg("%s", moe_error());
    return s;
}

static struct moe_tcp_store *new_client(const struct moe_tcp_server *s)
{
    struct moe_tcp_store *c;
    if (moe_tcp_store_open("127.0.0.1", moe_tcp_server_port(s), JOB, timeout_s, &c) < 0)
        fail_msg("%s", moe_error());
    return c;
}

static void check_value(struct moe_tcp_store *c, const char *key, const char *expected)
{
    char value[64];
    size_t bytes;
    int found = moe_tcp_store_look(c, key, value, sizeof value, &bytes);
    if (found < 0) fail_msg("%s", moe_error());
    assert_int_equal(found, expected != NULL);
    if (!expected) return;
    assert_int_equal(bytes, strlen(expected));
    assert_memory_equal(value, expected, bytes);
}

static void values_are_kept_by_name(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *a = new_client(s), *b = new_client(s);
    check_value(b, "x", NULL);
    assert_int_equal(moe_tcp_store_set(a, "x", "one", 3), MOE_OK);
    check_value(b, "x", "one");
    check_value(b, "", NULL);
    check_value(b, "xx", NULL);
    assert_int_equal(moe_tcp_store_set_first(b, "x", "two", 3), MOE_OK);
    check_value(a, "x", "one");
    assert_int_equal(moe_tcp_store_set(b, "x", "three", 5), MOE_OK);
    check_value(a, "x", "three");
    assert_int_equal(moe_tcp_store_set_first(b, "y", NULL, 0), MOE_OK);
    check_value(a, "y", "");
    moe_tcp_store_close(a);
    moe_tcp_store_close(b);
    moe_tcp_server_close(s, timeout_s);
}

static void the_largest_values_come_whole(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *a = new_client(s), *b = new_client(s);
    unsigned char *value = moe_alloc(MOE_VALUE_BYTES, 1), *got = moe_alloc(MOE_VALUE_BYTES, 1);
    char key[MOE_KEY_BYTES] = "";
    size_t bytes;
    memset(key, 'k', sizeof key - 1);
    for (int i = 0; i < MOE_VALUE_BYTES; i++) value[i] = (unsigned char)moe_hash64((uint64_t)i);
    assert_int_equal(moe_tcp_store_set(a, key, value, MOE_VALUE_BYTES), MOE_OK);
    assert_int_equal(moe_tcp_store_get(b, key, timeout_s, got, MOE_VALUE_BYTES, &bytes), MOE_OK);
    assert_int_equal(bytes, MOE_VALUE_BYTES);
    assert_memory_equal(value, got, bytes);
    assert_int_equal(moe_tcp_store_look(b, key, got, MOE_VALUE_BYTES - 1, &bytes), MOE_EPEER);
    assert_non_null(strstr(moe_error(), "has 65536 bytes, expected up to 65535"));
    free(value);
    free(got);
    moe_tcp_store_close(a);
    moe_tcp_store_close(b);
    moe_tcp_server_close(s, timeout_s);
}

/* 64 MiB: of values of 64 KiB with their entries, not 1024. */
static void the_server_does_not_grow_without_end(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *c = new_client(s);
    char *value = moe_alloc(MOE_VALUE_BYTES, 1), key[16];
    int n = 0;
    for (;; n++) {
        snprintf(key, sizeof key, "%d", n);
        if (moe_tcp_store_set(c, key, value, MOE_VALUE_BYTES) < 0) break;
    }
    assert_in_range(n, 1000, 1023);
    assert_non_null(strstr(moe_error(), "no room for key"));
    check_value(c, "none", NULL);
    free(value);
    moe_tcp_store_close(c);
    moe_tcp_server_close(s, timeout_s);
}

struct rank {
    pthread_t thread;
    struct moe_tcp_server *server;
    int rank, wrong;
};

/* Everyone tells its square and hears all others'; 200 rounds. */
static void *all_gather(void *arg)
{
    struct rank *r = arg;
    struct moe_tcp_store *c;
    if (moe_tcp_store_open("127.0.0.1", moe_tcp_server_port(r->server), JOB, timeout_s, &c) < 0) {
        r->wrong = 1;
        return NULL;
    }
    for (int round = 0; round < 200; round++) {
        char key[MOE_KEY_BYTES];
        int value = r->rank * r->rank + round;
        snprintf(key, sizeof key, "%d/%d", round, r->rank);
        r->wrong += moe_tcp_store_set(c, key, &value, sizeof value) < 0;
        for (int p = 0; p < CLIENTS; p++) {
            size_t bytes;
            snprintf(key, sizeof key, "%d/%d", round, p);
            r->wrong += moe_tcp_store_get(c, key, timeout_s, &value, sizeof value, &bytes) < 0 ||
                        bytes != sizeof value || value != p * p + round;
        }
    }
    moe_tcp_store_close(c);
    return NULL;
}

static void many_clients_hear_each_other(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct rank ranks[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        ranks[i] = (struct rank){.server = s, .rank = i};
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, all_gather, &ranks[i]), 0);
    }
    for (int i = 0; i < CLIENTS; i++) pthread_join(ranks[i].thread, NULL);
    for (int i = 0; i < CLIENTS; i++) assert_int_equal(ranks[i].wrong, 0);
    moe_tcp_server_close(s, timeout_s);
}

static void *connect_late(void *arg)
{
    struct rank *r = arg;
    struct moe_tcp_store *c;
    r->wrong = moe_tcp_store_open(",127.0.0.1", r->rank, JOB, timeout_s, &c) < 0;
    if (!r->wrong) moe_tcp_store_close(c);
    return NULL;
}

static void clients_may_come_before_the_server(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct rank r = {.rank = moe_tcp_server_port(s)};
    moe_tcp_server_close(s, 0);
    assert_int_equal(pthread_create(&r.thread, NULL, connect_late, &r), 0);
    usleep(30000);
    assert_int_equal(moe_tcp_serve(NULL, r.rank, JOB, &s), MOE_OK);
    pthread_join(r.thread, NULL);
    assert_int_equal(r.wrong, 0);
    moe_tcp_server_close(s, timeout_s);
}

static void check_lost(int err, const char *key, const char *why)
{
    char end[128];
    snprintf(end, sizeof end, ": %s (key '%s')", why, key);
    assert_int_equal(err, MOE_EPEER);
    assert_non_null(strstr(moe_error(), "rank 0's store at 127.0.0.1:"));
    if (!strstr(moe_error(), end)) fail_msg("%s", moe_error());
}

static void who_waits_in_vain_says_for_what(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server(), *other;
    struct moe_tcp_store *c = new_client(s), *lost;
    char value[8], expected[128];
    const int port = moe_tcp_server_port(s);
    assert_int_equal(moe_tcp_store_get(c, "id", 0.05, value, sizeof value, NULL), MOE_EPEER);
    snprintf(expected, sizeof expected, "rank 0's store at 127.0.0.1:%d: nobody set key 'id' for 0.05 s",
             port);
    assert_string_equal(moe_error(), expected);
    assert_int_equal(moe_tcp_store_open("127.0.0.1", port, JOB + 1, 0.05, &lost), MOE_EPEER);
    snprintf(expected, sizeof expected,
             "rank 0's store at 127.0.0.1:%d: no answer for 0.05 s: another program, or another job, listens "
             "there",
             port);
    assert_string_equal(moe_error(), expected);
    assert_int_equal(moe_tcp_serve("127.0.0.1", port, JOB, &other), MOE_EFAILED);
    snprintf(expected, sizeof expected, "cannot listen at 127.0.0.1 port %d: Address already in use", port);
    assert_string_equal(moe_error(), expected);
    assert_int_equal(moe_tcp_serve("192.0.2.1", 0, JOB, &other), MOE_EFAILED);
    moe_tcp_server_close(s, 0); /* though a client is there */
    check_lost(moe_tcp_store_look(c, "abort", value, sizeof value, NULL), "abort",
               "the connection was closed");
    check_lost(moe_tcp_store_set(c, "x", "", 0), "x", "Transport endpoint is not connected");
    moe_tcp_store_close(c);
    assert_int_equal(moe_tcp_store_open("127.0.0.1", port, JOB, 0.05, &lost), MOE_EPEER);
    assert_non_null(strstr(moe_error(), "no answer for 0.05 s: Connection refused"));
}

/* ---- strangers ---- */

/* A plain socket at the server. */
static int stranger(const struct moe_tcp_server *s, const void *bytes, size_t n)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)moe_tcp_server_port(s)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
    if (n) assert_int_equal(send(fd, bytes, n, MSG_NOSIGNAL), n);
    return fd;
}

static void check_closed(int fd)
{
    char byte;
    assert_true(recv(fd, &byte, 1, 0) <= 0);
    close(fd);
}

static void strangers_are_dropped(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *c = new_client(s);
    static const struct moe_tcp_head bad[] = {{JOB + 1, MOE_TCP_LOOK, 1, 0},
                                              {JOB, MOE_TCP_SET, MOE_KEY_BYTES, 0},
                                              {JOB, MOE_TCP_SET, 1, MOE_VALUE_BYTES + 1},
                                              {JOB, MOE_TCP_SET, UINT32_MAX, UINT32_MAX},
                                              {JOB, MOE_TCP_BYE + 1, 0, 0}};
    char head[MOE_TCP_HEAD];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        moe_tcp_pack(bad[i], head);
        check_closed(stranger(s, head, sizeof head));
    }
    check_closed(stranger(s, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 35));
    moe_tcp_pack((struct moe_tcp_head){JOB, MOE_TCP_SET, 4, 4}, head);
    close(stranger(s, head, 7)); /* leaves within a head, and before key and value */
    close(stranger(s, head, sizeof head));
    for (int seed = 0; seed < 50; seed++) { /* SEED printed by the message of a failure: the loop's */
        unsigned char noise[200];
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (unsigned char)moe_hash64((uint64_t)seed << 8 | i);
        if (seed % 2) memcpy(noise, head, 8); /* of this job */
        close(stranger(s, noise, sizeof noise));
    }
    check_value(c, "x", NULL);
    moe_tcp_store_close(c);
    moe_tcp_server_close(s, timeout_s);
}

/* Those who only connect: the oldest goes when one too many comes. */
static void idle_strangers_do_not_keep_others_out(void **state)
{
    (void)state;
    enum { MANY = 100 };
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *before = new_client(s);
    int fds[MANY];
    for (int i = 0; i < MANY; i++) fds[i] = stranger(s, NULL, 0);
    struct moe_tcp_store *c = new_client(s);
    check_value(before, "x", NULL);
    check_closed(fds[0]);
    for (int i = 1; i < MANY; i++) close(fds[i]);
    moe_tcp_store_close(before);
    moe_tcp_store_close(c);
    moe_tcp_server_close(s, timeout_s);
}

/* 300 answers of 64 KiB, which no socket holds: they come when somebody reads. */
static void a_slow_reader_gets_all(void **state)
{
    (void)state;
    enum { MANY = 300 };
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *c = new_client(s);
    char *value = moe_alloc(MOE_VALUE_BYTES, 1), message[MOE_TCP_HEAD + 1];
    assert_int_equal(moe_tcp_store_set(c, "x", value, MOE_VALUE_BYTES), MOE_OK);
    moe_tcp_pack((struct moe_tcp_head){JOB, MOE_TCP_LOOK, 1, 0}, message);
    message[MOE_TCP_HEAD] = 'x';
    int fd = stranger(s, NULL, 0);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(send(fd, message, sizeof message, MSG_NOSIGNAL), sizeof message);
    check_value(c, "y", NULL); /* nobody else waits for that */
    for (int i = 0; i < MANY; i++) {
        struct moe_tcp_head h;
        assert_int_equal(recv(fd, message, MOE_TCP_HEAD, MSG_WAITALL), MOE_TCP_HEAD);
        assert_true(moe_tcp_unpack(message, JOB, &h) && h.what == MOE_TCP_FOUND);
        assert_int_equal(recv(fd, value, MOE_VALUE_BYTES, MSG_WAITALL), MOE_VALUE_BYTES);
    }
    close(fd);
    free(value);
    moe_tcp_store_close(c);
    moe_tcp_server_close(s, timeout_s);
}

/* Says hello by hand, leaves a will, and ends the connection without goodbye. */
static void die_with_will(const struct moe_tcp_server *s, const char *key, const char *value)
{
    char message[MOE_TCP_HEAD + 64];
    const size_t k = strlen(key), v = strlen(value);
    moe_tcp_pack((struct moe_tcp_head){JOB, MOE_TCP_WILL, (uint32_t)k, (uint32_t)v}, message);
    memcpy(message + MOE_TCP_HEAD, key, k);
    memcpy(message + MOE_TCP_HEAD + k, value, v);
    int fd = stranger(s, message, MOE_TCP_HEAD + k + v);
    assert_int_equal(recv(fd, message, MOE_TCP_HEAD, MSG_WAITALL), MOE_TCP_HEAD);
    close(fd);
}

static void a_will_holds_without_goodbye(void **state)
{
    (void)state;
    struct moe_tcp_server *s = new_server();
    struct moe_tcp_store *a = new_client(s), *b = new_client(s);
    char value[16];
    size_t bytes;
    assert_int_equal(moe_tcp_store_will(a, "polite", "no", 2), MOE_OK);
    moe_tcp_store_close(a);
    die_with_will(s, "abort", "rank 2");
    assert_int_equal(moe_tcp_store_get(b, "abort", timeout_s, value, sizeof value, &bytes), MOE_OK);
    assert_int_equal(bytes, 6);
    assert_memory_equal(value, "rank 2", 6);
    die_with_will(s, "abort", "rank 3");
    die_with_will(s, "last", "");
    assert_int_equal(moe_tcp_store_get(b, "last", timeout_s, value, sizeof value, &bytes), MOE_OK);
    check_value(b, "abort", "rank 2");
    check_value(b, "polite", NULL);
    moe_tcp_store_close(b);
    moe_tcp_server_close(s, timeout_s);
}

static void *close_late(void *arg)
{
    struct rank *r = arg;
    struct moe_tcp_store *c = new_client(r->server);
    __atomic_store_n(&r->rank, 1, __ATOMIC_RELEASE);
    usleep(50000);
    r->wrong = moe_tcp_store_set(c, "late", "", 0) < 0;
    moe_tcp_store_close(c);
    return NULL;
}

static void the_server_waits_for_goodbyes(void **state)
{
    (void)state;
    struct rank r = {.server = new_server()};
    assert_int_equal(pthread_create(&r.thread, NULL, close_late, &r), 0);
    while (!__atomic_load_n(&r.rank, __ATOMIC_ACQUIRE)) usleep(1000);
    moe_tcp_server_close(r.server, timeout_s);
    pthread_join(r.thread, NULL);
    assert_int_equal(r.wrong, 0);
}

/* ---- a server that stops answering ---- */

struct silent {
    pthread_t thread;
    int listener;
};

/* Answers one hello. */
static void *answer_once(void *arg)
{
    struct silent *s = arg;
    char head[MOE_TCP_HEAD];
    int fd = accept(s->listener, NULL, NULL);
    if (recv(fd, head, sizeof head, MSG_WAITALL) == sizeof head) send(fd, head, sizeof head, MSG_NOSIGNAL);
    while (recv(fd, head, sizeof head, 0) > 0) {
    }
    close(fd);
    return NULL;
}

static void a_silent_server_is_given_up(void **state)
{
    (void)state;
    struct silent s;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    struct moe_tcp_store *c;
    char value;
    s.listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(s.listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(s.listener, 4), 0);
    assert_int_equal(getsockname(s.listener, (struct sockaddr *)&at, &bytes), 0);
    assert_int_equal(pthread_create(&s.thread, NULL, answer_once, &s), 0);
    assert_int_equal(moe_tcp_store_open("127.0.0.1", ntohs(at.sin_port), JOB, 0.3, &c), MOE_OK);
    check_lost(moe_tcp_store_look(c, "abort", &value, 1, NULL), "abort", "Connection timed out");
    moe_tcp_store_close(c);
    pthread_join(s.thread, NULL);
    close(s.listener);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(values_are_kept_by_name),
                                       cmocka_unit_test(the_largest_values_come_whole),
                                       cmocka_unit_test(the_server_does_not_grow_without_end),
                                       cmocka_unit_test(many_clients_hear_each_other),
                                       cmocka_unit_test(clients_may_come_before_the_server),
                                       cmocka_unit_test(who_waits_in_vain_says_for_what),
                                       cmocka_unit_test(strangers_are_dropped),
                                       cmocka_unit_test(idle_strangers_do_not_keep_others_out),
                                       cmocka_unit_test(a_slow_reader_gets_all),
                                       cmocka_unit_test(a_will_holds_without_goodbye),
                                       cmocka_unit_test(the_server_waits_for_goodbyes),
                                       cmocka_unit_test(a_silent_server_is_given_up)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
