/* tcp_server.c - see tcp_store.h: the thread of rank 0. Nothing is shared with other threads but a pipe that
 * tells it to end; it answers one request of a connection after the other. */
#include "runtime/execute.h"
#include "runtime/tcp_message.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Of all values together; connections that have not said what job they are of; a look whether there are file
 * descriptors again. */
enum { MOST_BYTES = 64 << 20, STRANGERS = 64, RETRY_MS = 50 };

struct entry {
    char key[MOE_KEY_BYTES], *value;
    uint64_t hash;
    size_t bytes;
};

/* in [n_in] of what is asked, out [n_out] of what is answered, of which out_at are gone. */
struct client {
    int fd;
    bool known;
    char *in, *out;
    int n_in, cap_in, n_out, cap_out, out_at;
    struct entry will;
};

struct moe_tcp_server {
    pthread_t thread;
    int listener, stop[2]; /* stop[1] gets the grace in seconds */
    uint64_t job;
    struct client *clients;
    struct pollfd *polls; /* [2 + n_clients] */
    int n_clients, cap_clients, cap_polls;
    struct entry *entries;
    int n_entries, cap_entries;
    size_t bytes;
};

/* ---- values ---- */

static struct entry *find(struct moe_tcp_server *s, const char *key)
{
    const uint64_t hash = moe_hash_name(key);
    for (int i = 0; i < s->n_entries; i++)
        if (s->entries[i].hash == hash && !strcmp(s->entries[i].key, key)) return &s->entries[i];
    return NULL;
}

static void fill(struct entry *e, const char *key, const char *value, size_t bytes)
{
    free(e->value);
    snprintf(e->key, sizeof e->key, "%s", key);
    e->hash = moe_hash_name(key);
    e->value = moe_alloc(bytes, 1);
    memcpy(e->value, value, bytes);
    e->bytes = bytes;
}

static enum moe_tcp_answer put(struct moe_tcp_server *s, const char *key, const char *value, size_t bytes)
{
    struct entry *e = find(s, key);
    const size_t more = sizeof *e + bytes;
    if (s->bytes + more > MOST_BYTES) return MOE_TCP_FULL;
    if (!e) {
        s->entries = moe_grow(s->entries, &s->cap_entries, s->n_entries + 1, sizeof *s->entries);
        e = &s->entries[s->n_entries++];
    } else {
        s->bytes -= sizeof *e + e->bytes;
    }
    s->bytes += more;
    fill(e, key, value, bytes);
    return MOE_TCP_DONE;
}

/* ---- connections ---- */

static void drop(struct moe_tcp_server *s, int i)
{
    struct client *c = &s->clients[i];
    if (c->will.value && !find(s, c->will.key)) put(s, c->will.key, c->will.value, c->will.bytes);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c->will.value);
    memmove(c, c + 1, (size_t)(s->n_clients - i - 1) * sizeof *c); /* the oldest stays first */
    s->n_clients--;
}

static int count(const struct moe_tcp_server *s, bool known)
{
    int n = 0;
    for (int i = 0; i < s->n_clients; i++) n += s->clients[i].known == known;
    return n;
}

/* False: there are no file descriptors for now. */
static bool add(struct moe_tcp_server *s)
{
    const int on = 1, fd = accept4(s->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (int i = 0; i < s->n_clients && count(s, false) >= STRANGERS; i++)
        if (!s->clients[i].known) drop(s, i);
    s->clients = moe_grow(s->clients, &s->cap_clients, s->n_clients + 1, sizeof *s->clients);
    s->clients[s->n_clients++] = (struct client){.fd = fd};
    return true;
}

static void answer(struct moe_tcp_server *s, struct client *c, enum moe_tcp_answer what,
                   const struct entry *e)
{
    const size_t bytes = e ? e->bytes : 0;
    c->n_out = (int)(MOE_TCP_HEAD + bytes);
    c->out_at = 0;
    c->out = moe_grow(c->out, &c->cap_out, c->n_out, 1);
    moe_tcp_pack((struct moe_tcp_head){s->job, what, 0, (uint32_t)bytes}, c->out);
    if (e) memcpy(c->out + MOE_TCP_HEAD, e->value, bytes);
}

/* Does what is asked. False: it was none of our requests. */
static bool serve(struct moe_tcp_server *s, struct client *c, struct moe_tcp_head h)
{
    char key[MOE_KEY_BYTES] = {0};
    memcpy(key, c->in + MOE_TCP_HEAD, h.key_bytes);
    const char *value = c->in + MOE_TCP_HEAD + h.key_bytes;
    const struct entry *e = find(s, key);
    c->known = true;
    switch (h.what) {
    case MOE_TCP_HELLO: answer(s, c, MOE_TCP_DONE, NULL); return true;
    case MOE_TCP_SET: answer(s, c, put(s, key, value, h.value_bytes), NULL); return true;
    case MOE_TCP_SET_FIRST:
        answer(s, c, e ? MOE_TCP_DONE : put(s, key, value, h.value_bytes), NULL);
        return true;
    case MOE_TCP_WILL:
        fill(&c->will, key, value, h.value_bytes);
        answer(s, c, MOE_TCP_DONE, NULL);
        return true;
    case MOE_TCP_LOOK: answer(s, c, e ? MOE_TCP_FOUND : MOE_TCP_ABSENT, e); return true;
    case MOE_TCP_BYE:
        free(c->will.value);
        c->will.value = NULL;
        answer(s, c, MOE_TCP_DONE, NULL);
        return true;
    default: return false;
    }
}

static bool again(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

/* Reads no more than the request in hand. False: the connection is over. */
static bool receive(struct moe_tcp_server *s, struct client *c)
{
    for (;;) {
        struct moe_tcp_head h = {0};
        const bool headed = c->n_in >= MOE_TCP_HEAD;
        if (headed && !moe_tcp_unpack(c->in, s->job, &h)) return false;
        const int need = MOE_TCP_HEAD + (int)(h.key_bytes + h.value_bytes);
        if (headed && c->n_in == need) {
            c->n_in = 0;
            return serve(s, c, h);
        }
        c->in = moe_grow(c->in, &c->cap_in, need, 1);
        ssize_t n = recv(c->fd, c->in + c->n_in, (size_t)(need - c->n_in), 0);
        if (n == 0 || (n < 0 && !again())) return false;
        if (n < 0) return true;
        c->n_in += (int)n;
    }
}

static bool transmit(struct client *c)
{
    while (c->out_at < c->n_out) {
        ssize_t n = send(c->fd, c->out + c->out_at, (size_t)(c->n_out - c->out_at), MSG_NOSIGNAL);
        if (n < 0) return again();
        c->out_at += (int)n;
    }
    c->out_at = c->n_out = 0;
    return true;
}

static bool attend(struct moe_tcp_server *s, struct client *c)
{
    return (c->n_out || receive(s, c)) && transmit(c);
}

/* ---- the thread ---- */

static void watch(struct moe_tcp_server *s, bool accepts)
{
    s->polls = moe_grow(s->polls, &s->cap_polls, s->n_clients + 2, sizeof *s->polls);
    s->polls[0] = (struct pollfd){.fd = s->stop[0], .events = POLLIN};
    s->polls[1] = (struct pollfd){.fd = accepts ? s->listener : -1, .events = POLLIN};
    for (int i = 0; i < s->n_clients; i++)
        s->polls[i + 2] =
            (struct pollfd){.fd = s->clients[i].fd, .events = s->clients[i].n_out ? POLLOUT : POLLIN};
}

static void *run(void *server)
{
    struct moe_tcp_server *s = server;
    bool accepts = true, ends = false;
    int64_t end_ns = INT64_MAX;
    double grace_s;
    while (!ends || (count(s, true) && moe_now_ns() < end_ns)) {
        watch(s, accepts);
        if (ends) s->polls[0].fd = -1;
        if (poll(s->polls, (nfds_t)s->n_clients + 2, ends || !accepts ? RETRY_MS : -1) < 0) continue;
        for (int i = s->n_clients - 1; i >= 0; i--)
            if (s->polls[i + 2].revents && !attend(s, &s->clients[i])) drop(s, i);
        accepts = !s->polls[1].revents || add(s);
        if (!ends && s->polls[0].revents && read(s->stop[0], &grace_s, sizeof grace_s) == sizeof grace_s) {
            end_ns = moe_now_ns() + (int64_t)(grace_s * 1e9);
            ends = true;
        }
    }
    return NULL;
}

/* ---- open and close ---- */

static bool is_address(const char *host)
{
    char address[16];
    return host && (!strcmp(host, "localhost") || inet_pton(AF_INET, host, address) == 1 ||
                    inet_pton(AF_INET6, host, address) == 1);
}

/* Of both versions where the system has them. Result: errno, or 0. */
static int listen_at(int family, const struct addrinfo *at, int *out)
{
    const int on = 1, off = 0;
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (!bind(fd, at->ai_addr, at->ai_addrlen) && !listen(fd, SOMAXCONN)) {
        *out = fd;
        return 0;
    }
    const int code = errno;
    close(fd);
    return code;
}

static int start_listening(const char *host, int port, int *out)
{
    static const int families[] = {AF_INET6, AF_INET};
    const char *address = is_address(host) ? host : NULL;
    char service[16];
    int code = EADDRNOTAVAIL;
    snprintf(service, sizeof service, "%d", port);
    for (int i = 0; i < 2; i++) {
        const struct addrinfo hints = {
            .ai_family = families[i], .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
        struct addrinfo *at;
        if (getaddrinfo(address, service, &hints, &at)) continue;
        code = listen_at(families[i], at, out);
        freeaddrinfo(at);
        if (!code) return MOE_OK;
    }
    return moe_fail(MOE_EFAILED, "cannot listen at %s port %d: %s", address ? address : "any address", port,
                    strerror(code));
}

/* Signals are for the thread that runs the job. */
static int start_thread(struct moe_tcp_server *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&s->thread, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return code ? moe_fail(MOE_EFAILED, "pthread_create: %s", strerror(code)) : MOE_OK;
}

static void release(struct moe_tcp_server *s)
{
    while (s->n_clients) drop(s, s->n_clients - 1);
    for (int i = 0; i < s->n_entries; i++) free(s->entries[i].value);
    if (s->listener >= 0) close(s->listener);
    for (int i = 0; i < 2; i++)
        if (s->stop[i] >= 0) close(s->stop[i]);
    free(s->clients);
    free(s->polls);
    free(s->entries);
    free(s);
}

int moe_tcp_serve(const char *host, int port, uint64_t job, struct moe_tcp_server **out)
{
    struct moe_tcp_server *s = moe_alloc(1, sizeof *s);
    s->job = job;
    s->listener = s->stop[0] = s->stop[1] = -1;
    int err = start_listening(host, port, &s->listener);
    if (err >= 0 && pipe2(s->stop, O_CLOEXEC)) err = moe_fail(MOE_EFAILED, "pipe2: %s", strerror(errno));
    if (err >= 0) err = start_thread(s);
    if (err < 0)
        release(s);
    else
        *out = s;
    return err;
}

int moe_tcp_server_port(const struct moe_tcp_server *s)
{
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    const int code = getsockname(s->listener, (struct sockaddr *)&at, &bytes);
    moe_assert(code == 0);
    return ntohs(at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&at)->sin6_port
                                          : ((struct sockaddr_in *)&at)->sin_port);
}

void moe_tcp_server_close(struct moe_tcp_server *s, double grace_s)
{
    if (!s) return;
    const ssize_t n = write(s->stop[1], &grace_s, sizeof grace_s);
    moe_assert(n == sizeof grace_s);
    pthread_join(s->thread, NULL);
    release(s);
}
