/* tcp_store.c - see tcp_store.h: a client. One request at a time; one that is not answered in time ends the
 * connection, as its answer could still come. */
#include "runtime/tcp_store.h"

#include "runtime/execute.h"
#include "runtime/job.h"
#include "runtime/tcp_message.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* One attempt to connect; the pauses between attempts, and between looks. */
enum { ATTEMPT_MS = 2000, LEAST_PAUSE_MS = 1, MOST_PAUSE_MS = 50 };

static const double goodbye_s = 2;

struct moe_tcp_store {
    int fd;
    uint64_t job;
    double timeout_s;
    char name[MOE_HOST + 16]; /* "gpu1:29500" */
};

static int64_t in_ns(double seconds)
{
    return moe_now_ns() + (int64_t)(seconds * 1e9);
}

/* ---- bytes ---- */

/* Result: 0, or errno; ETIMEDOUT when nothing happened until end_ns. */
static int ready(int fd, short events, int64_t end_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    for (;;) {
        const int64_t left_ns = end_ns - moe_now_ns();
        const int n = poll(&p, 1, left_ns > 0 ? (int)(left_ns / 1000000 + 1) : 0);
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return errno;
        if (n == 0 && left_ns <= 0) return ETIMEDOUT;
    }
}

/* Sends or receives all of it. Result as of ready; ECONNRESET at the end of the connection. */
static int move(int fd, char *at, size_t bytes, bool out, int64_t end_ns)
{
    while (bytes) {
        const ssize_t n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (n > 0) {
            at += n;
            bytes -= (size_t)n;
        } else if (n == 0) {
            return ECONNRESET;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
            const int code = ready(fd, out ? POLLOUT : POLLIN, end_ns);
            if (code) return code;
        } else {
            return errno;
        }
    }
    return 0;
}

/* Sends a request and receives the head of its answer. Result as of move; EPROTO: it is none of ours. */
static int ask(int fd, struct moe_tcp_head h, const char *key, const void *value, int64_t end_ns,
               struct moe_tcp_head *answered)
{
    const size_t bytes = MOE_TCP_HEAD + h.key_bytes + h.value_bytes;
    char *message = moe_alloc(bytes, 1), head[MOE_TCP_HEAD];
    moe_tcp_pack(h, message);
    memcpy(message + MOE_TCP_HEAD, key, h.key_bytes);
    if (h.value_bytes) memcpy(message + MOE_TCP_HEAD + h.key_bytes, value, h.value_bytes);
    int code = move(fd, message, bytes, true, end_ns);
    free(message);
    if (!code) code = move(fd, head, sizeof head, false, end_ns);
    if (!code && !moe_tcp_unpack(head, h.job, answered)) code = EPROTO;
    return code;
}

/* ---- connecting ---- */

/* Result: errno, or 0. */
static int attempt(const struct addrinfo *at, uint64_t job, int64_t end_ns, int *out)
{
    const int on = 1, fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct moe_tcp_head answered;
    socklen_t bytes = sizeof(int);
    if (fd < 0) return errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    int code = connect(fd, at->ai_addr, at->ai_addrlen) ? errno : 0;
    if (code == EINPROGRESS) {
        code = ready(fd, POLLOUT, end_ns);
        if (!code) getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &bytes);
    }
    if (!code) {
        code = ask(fd, (struct moe_tcp_head){job, MOE_TCP_HELLO, 0, 0}, "", NULL, end_ns, &answered);
        if (code) code = EPROTO;
    }
    if (code)
        close(fd);
    else
        *out = fd;
    return code;
}

/* Tries all addresses of a host. why: of the last failure. */
static bool try_host(struct moe_tcp_store *s, const char *host, int port, int64_t end_ns, const char **why)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *all;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    int code = getaddrinfo(host, service, &hints, &all);
    if (code) {
        *why = gai_strerror(code);
        return false;
    }
    for (struct addrinfo *at = all; at && s->fd < 0; at = at->ai_next) {
        const int64_t one_ns = moe_now_ns() + ATTEMPT_MS * (int64_t)1000000;
        code = attempt(at, s->job, one_ns < end_ns ? one_ns : end_ns, &s->fd);
        *why = code == EPROTO ? "another program, or another job, listens there" : strerror(code);
    }
    freeaddrinfo(all);
    snprintf(s->name, sizeof s->name, "%s:%d", host, port);
    return s->fd >= 0;
}

static bool try_hosts(struct moe_tcp_store *s, const char *hosts, int port, int64_t end_ns, const char **why)
{
    for (const char *at = hosts; *at; at += *at == ',') {
        char host[MOE_HOST];
        const size_t n = strcspn(at, ",");
        snprintf(host, sizeof host, "%.*s", (int)n, at);
        if (n && try_host(s, host, port, end_ns, why)) return true;
        at += n;
    }
    return false;
}

int moe_tcp_store_open(const char *hosts, int port, uint64_t job, double timeout_s,
                       struct moe_tcp_store **out)
{
    struct moe_tcp_store *s = moe_alloc(1, sizeof *s);
    const int64_t end_ns = in_ns(timeout_s);
    const char *why = "no host";
    *s = (struct moe_tcp_store){.fd = -1, .job = job, .timeout_s = timeout_s};
    for (int pause = LEAST_PAUSE_MS; !try_hosts(s, hosts, port, end_ns, &why);) {
        if (moe_now_ns() > end_ns) {
            free(s);
            return moe_fail(MOE_EPEER, "rank 0's store at %s:%d: no answer for %g s: %s", hosts, port,
                            timeout_s, why);
        }
        usleep((useconds_t)pause * 1000);
        pause = pause * 2 < MOST_PAUSE_MS ? pause * 2 : MOST_PAUSE_MS;
    }
    *out = s;
    return MOE_OK;
}

/* ---- requests ---- */

static int lost(struct moe_tcp_store *s, int code, const char *key)
{
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    return moe_fail(MOE_EPEER, "rank 0's store at %s: %s (key '%s')", s->name,
                    code == ECONNRESET ? "the connection was closed" : strerror(code), key);
}

/* Result: an enum moe_tcp_answer. The value goes to `to` [cap], its size to *bytes. */
static int request(struct moe_tcp_store *s, enum moe_tcp_request what, const char *key, const void *value,
                   size_t value_bytes, void *to, size_t cap, size_t *bytes)
{
    struct moe_tcp_head h = {s->job, what, (uint32_t)strlen(key), (uint32_t)value_bytes}, answered;
    const int64_t end_ns = in_ns(s->timeout_s);
    moe_assert(h.key_bytes < MOE_KEY_BYTES && value_bytes <= MOE_VALUE_BYTES);
    if (s->fd < 0) return lost(s, ENOTCONN, key);
    int code = ask(s->fd, h, key, value, end_ns, &answered);
    if (!code && answered.value_bytes > cap) {
        lost(s, EMSGSIZE, key);
        return moe_fail(MOE_EPEER, "rank 0's store at %s: key '%s' has %u bytes, expected up to %zu", s->name,
                        key, answered.value_bytes, cap);
    }
    if (!code) code = move(s->fd, to, answered.value_bytes, false, end_ns);
    if (code) return lost(s, code, key);
    if (answered.what == MOE_TCP_FULL)
        return moe_fail(MOE_EPEER, "rank 0's store at %s: no room for key '%s'", s->name, key);
    if (bytes) *bytes = answered.value_bytes;
    return (int)answered.what;
}

static int order(struct moe_tcp_store *s, enum moe_tcp_request what, const char *key, const void *value,
                 size_t bytes)
{
    const int answered = request(s, what, key, value, bytes, NULL, 0, NULL);
    return answered < 0 ? answered : MOE_OK;
}

int moe_tcp_store_set(struct moe_tcp_store *s, const char *key, const void *value, size_t bytes)
{
    return order(s, MOE_TCP_SET, key, value, bytes);
}

int moe_tcp_store_set_first(struct moe_tcp_store *s, const char *key, const void *value, size_t bytes)
{
    return order(s, MOE_TCP_SET_FIRST, key, value, bytes);
}

int moe_tcp_store_will(struct moe_tcp_store *s, const char *key, const void *value, size_t bytes)
{
    return order(s, MOE_TCP_WILL, key, value, bytes);
}

int moe_tcp_store_look(struct moe_tcp_store *s, const char *key, void *value, size_t cap, size_t *bytes)
{
    const int answered = request(s, MOE_TCP_LOOK, key, NULL, 0, value, cap, bytes);
    return answered < 0 ? answered : answered == MOE_TCP_FOUND;
}

int moe_tcp_store_get(struct moe_tcp_store *s, const char *key, double timeout_s, void *value, size_t cap,
                      size_t *bytes)
{
    const int64_t end_ns = in_ns(timeout_s);
    for (int pause = LEAST_PAUSE_MS;;) {
        const int found = moe_tcp_store_look(s, key, value, cap, bytes);
        if (found) return found < 0 ? found : MOE_OK;
        if (moe_now_ns() > end_ns)
            return moe_fail(MOE_EPEER, "rank 0's store at %s: nobody set key '%s' for %g s", s->name, key,
                            timeout_s);
        usleep((useconds_t)pause * 1000);
        pause = pause * 2 < MOST_PAUSE_MS ? pause * 2 : MOST_PAUSE_MS;
    }
}

void moe_tcp_store_close(struct moe_tcp_store *s)
{
    if (!s) return;
    if (s->timeout_s > goodbye_s) s->timeout_s = goodbye_s;
    if (s->fd >= 0) order(s, MOE_TCP_BYE, "", NULL, 0);
    if (s->fd >= 0) close(s->fd);
    free(s);
}
