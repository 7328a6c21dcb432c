/* fixture_double - what the tests of doubles share: a child process in which a double may abort, and work
 * that writes down when it ran. */
#ifndef MOE_TEST_FIXTURE_DOUBLE_H
#define MOE_TEST_FIXTURE_DOUBLE_H

#include "tests/doubles/queue.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define RIGHT(call) assert_int_equal(call, 0)

/* Runs body in a child with NAME=VALUE set (NULL: nothing). It must abort, and say `text`; or, when text is
 * NULL, end by itself: an assertion in it fails there, with what it said. */
static inline void in_child(const char *name, const char *value, void (*body)(void), const char *text)
{
    char said[4096] = "";
    size_t n = 0;
    ssize_t got;
    int ends[2], status;
    pid_t child;
    fflush(NULL);
    RIGHT(pipe(ends));
    child = fork();
    assert_true(child >= 0);
    if (!child) {
        signal(SIGABRT, SIG_DFL); // cmocka's own would go on
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        if (name) setenv(name, value, 1);
        body();
        _exit(0);
    }
    close(ends[1]);
    while ((got = read(ends[0], said + n, sizeof said - 1 - n)) > 0) n += (size_t)got;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (text) {
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || !strstr(said, text))
            fail_msg("status %d, said: %s\nexpected an abort and: %s", status, said, text);
    } else if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        fail_msg("status %d, said: %s", status, said);
    }
}

/* In a child, where cmocka's assertions have nowhere to go. */
#define CHILD_EXPECTS(what)                                                                                  \
    do {                                                                                                     \
        if (!(what)) {                                                                                       \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                       \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

static inline cudaStream_t open_stream(void)
{
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) abort();
    return stream;
}

static inline void *device_memory(size_t bytes)
{
    void *p;
    if (cudaMalloc(&p, bytes)) abort();
    return p;
}

/* ---- work that appends its letter to `ran` ---- */

static char ran[4096];

static inline int letter_step(void *ctx)
{
    const size_t n = strlen(ran);
    ran[n] = *(const char *)ctx;
    ran[n + 1] = 0;
    return 1;
}

static inline cudaError_t letter(cudaStream_t stream, const char *which)
{
    return moe_double_enqueue(stream, &(struct moe_double_work){"letter", letter_step, NULL, (void *)which});
}

/* ---- two streams for each test ---- */

static cudaStream_t one, two;

static inline int open_streams(void **state)
{
    (void)state;
    ran[0] = 0;
    one = open_stream();
    two = open_stream();
    return 0;
}

static inline int close_streams(void **state)
{
    (void)state;
    RIGHT(cudaDeviceSynchronize());
    RIGHT(cudaStreamDestroy(one));
    RIGHT(cudaStreamDestroy(two));
    RIGHT(cudaGetLastError());
    return 0;
}

#define WITH_STREAMS(test) cmocka_unit_test_setup_teardown(test, open_streams, close_streams)

#endif
