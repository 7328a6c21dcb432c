/* peers.c - see peers.h.
 *
 * Keys: "stopped", "rank 2 stopped: why"; "here/2", the place that rank 2 has come to; "at/2", where it
 * waited in vain; "gone/2". */
#include "runtime/peers.h"

#include "runtime/execute_internal.h"
#include "runtime/tcp_store.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WHY_BYTES = 1024, PLACE_BYTES = 2 * MOE_NAME, PAUSE_US = 2000 };
static const int64_t check_ns = 50000000;

struct moe_peers {
    int rank, size;
    double timeout_s;
    int64_t checked_ns;
    struct moe_tcp_server *server; /* rank 0 */
    struct moe_tcp_store *store;
};

/* Where rank 0 listens, as it tells through MPI; port 0: it could not. */
struct address {
    char name[MOE_HOST], hosts[MOE_HOST]; /* its host's name; that and its addresses, split by commas */
    uint64_t job;
    int port;
};

/* ---- meeting ---- */

/* A job is known by its size at a port; by a number of its own where rank 0 chooses the port. */
static uint64_t job_number(int port, int size)
{
    return moe_hash64(moe_hash64((uint64_t)port) + (uint64_t)size);
}

static void add_host(char hosts[MOE_HOST], const char *host)
{
    const size_t used = strlen(hosts), n = strlen(host);
    if (used + n + 2 <= MOE_HOST) snprintf(hosts + used, MOE_HOST - used, "%s%s", used ? "," : "", host);
}

/* The name may be unknown to others, or mean the loopback: so its addresses too. */
static void find_addresses(char hosts[MOE_HOST])
{
    struct ifaddrs *all;
    if (getifaddrs(&all)) return;
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        char text[INET_ADDRSTRLEN];
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || i->ifa_flags & IFF_LOOPBACK ||
            !(i->ifa_flags & IFF_UP))
            continue;
        const struct sockaddr_in *at = (const struct sockaddr_in *)(const void *)i->ifa_addr;
        if (inet_ntop(AF_INET, &at->sin_addr, text, sizeof text)) add_host(hosts, text);
    }
    freeifaddrs(all);
}

/* Rank 0 listens at any port and tells all where. */
static int meet_by(struct moe_communicator *mpi, struct moe_peers *p, struct address *out)
{
    struct address own = {0}, *all = moe_alloc((size_t)mpi->size, sizeof *all);
    int err = MOE_OK, served = MOE_OK;
    gethostname(own.name, sizeof own.name - 1);
    if (p->rank == 0) {
        own.job = moe_hash64((uint64_t)moe_now_ns() ^ (uint64_t)getpid() << 40);
        served = moe_tcp_serve(NULL, 0, own.job, &p->server);
        if (served >= 0) own.port = moe_tcp_server_port(p->server);
        add_host(own.hosts, own.name);
        find_addresses(own.hosts);
    }
    err = mpi->table->gather(mpi, &own, all, sizeof own, p->timeout_s);
    if (err < 0) return err; /* `all` may still be written to */
    *out = all[0];
    if (!strcmp(own.name, all[0].name)) /* most likely this host */
        snprintf(out->hosts, sizeof out->hosts, "127.0.0.1,%.*s", MOE_HOST - 11, all[0].hosts);
    free(all);
    if (served < 0) return served;
    return out->port ? MOE_OK : moe_fail(MOE_EPEER, "rank 0 on %s cannot listen at any port", out->name);
}

static int meet_at(const struct moe_job *job, struct moe_peers *p, struct address *out)
{
    const bool alone = job->size == 1;
    *out = (struct address){.port = alone ? 0 : job->port};
    strcpy(out->hosts, alone ? "127.0.0.1" : job->host);
    out->job = job_number(out->port, job->size);
    if (p->rank == 0) MOE_TRY(moe_tcp_serve(out->hosts, out->port, out->job, &p->server));
    if (alone) out->port = moe_tcp_server_port(p->server);
    return MOE_OK;
}

static int set(struct moe_peers *p, const char *key, const char *text)
{
    char own[MOE_KEY_BYTES];
    snprintf(own, sizeof own, "%s/%d", key, p->rank);
    return moe_tcp_store_set(p->store, own, text, strnlen(text, PLACE_BYTES - 1));
}

/* The text of another's key. Result as of moe_tcp_store_look. */
static int look(struct moe_peers *p, const char *key, int rank, char *out, size_t size)
{
    char other[MOE_KEY_BYTES];
    size_t bytes = 0;
    snprintf(other, sizeof other, "%s/%d", key, rank);
    const int found = moe_tcp_store_look(p->store, other, out, size - 1, &bytes);
    out[found > 0 ? bytes : 0] = 0;
    return found;
}

static int meet(const struct moe_job *job, struct moe_communicator *mpi, struct moe_peers *p)
{
    struct address at;
    char will[MOE_NAME];
    MOE_TRY(mpi && !job->port && job->size > 1 ? meet_by(mpi, p, &at) : meet_at(job, p, &at));
    MOE_TRY(moe_tcp_store_open(at.hosts, at.port, at.job, p->timeout_s, &p->store));
    snprintf(will, sizeof will, "rank %d stopped: its process ended", p->rank);
    return moe_tcp_store_will(p->store, "stopped", will, strlen(will));
}

int moe_peers_open(const struct moe_job *job, struct moe_communicator *mpi, double timeout_s,
                   struct moe_peers **out)
{
    struct moe_peers *p = moe_alloc(1, sizeof *p);
    *p = (struct moe_peers){.rank = job->rank, .size = job->size, .timeout_s = timeout_s};
    const int err = meet(job, mpi, p);
    if (err < 0)
        moe_peers_close(p, 0);
    else
        *out = p;
    return err;
}

void moe_peers_close(struct moe_peers *p, double grace_s)
{
    if (!p) return;
    moe_tcp_store_close(p->store);
    moe_tcp_server_close(p->server, grace_s);
    free(p);
}

int moe_peers_share(struct moe_peers *p, const char *name, void *value, size_t bytes)
{
    size_t got;
    if (p->rank == 0) return moe_tcp_store_set(p->store, name, value, bytes);
    MOE_TRY(moe_tcp_store_get(p->store, name, p->timeout_s, value, bytes, &got));
    if (got != bytes)
        return moe_fail(MOE_EPEER, "rank 0 tells %zu bytes of %s, expected %zu: is it another program?", got,
                        name, bytes);
    return MOE_OK;
}

/* ---- who is where ---- */

int moe_peers_arrive(struct moe_peers *p, const char *place)
{
    return set(p, "here", place);
}

static void append(char *out, size_t size, const char *text)
{
    const size_t used = strlen(out);
    snprintf(out + used, size - used, "%s%s", used ? "; " : "", text);
}

/* "ranks 1,2 VERBS" */
static void append_ranks(char *out, size_t size, const int *ranks, int n, const char *one, const char *many)
{
    char list[128], text[256];
    moe_execute_ranks(list, sizeof list, ranks, n);
    snprintf(text, sizeof text, "rank%s %s %s", n > 1 ? "s" : "", list, n > 1 ? many : one);
    append(out, size, text);
}

void moe_peers_missing(struct moe_peers *p, const char *place, const int *ranks, int n, char *out,
                       size_t size)
{
    int *missing = moe_alloc((size_t)n, sizeof *missing), n_missing = 0, found = 0;
    *out = 0;
    for (int i = 0; i < n && found >= 0; i++) {
        char text[PLACE_BYTES];
        found = look(p, "here", ranks[i], text, sizeof text);
        if (found >= 0 && strncmp(text, place, PLACE_BYTES - 1) != 0) missing[n_missing++] = ranks[i];
    }
    if (n_missing && found >= 0) append_ranks(out, size, missing, n_missing, "has not come", "have not come");
    free(missing);
}

/* How many of them have told, of which the labels are kept; or an error. */
static int hear(struct moe_peers *p, const int *ranks, int n, char (*labels)[PLACE_BYTES])
{
    int told = 0;
    for (int i = 0; i < n; i++) {
        if (!*labels[i]) MOE_TRY(look(p, "at", ranks[i], labels[i], PLACE_BYTES));
        told += *labels[i] != 0;
    }
    return told;
}

/* The rank that has stopped, or -1: nobody has. Result: text, or as of moe_tcp_store_look. */
static int who_stopped(struct moe_peers *p, char text[WHY_BYTES], int *rank)
{
    size_t bytes = 0;
    const int found = moe_tcp_store_look(p->store, "stopped", text, WHY_BYTES - 1, &bytes);
    text[found > 0 ? bytes : 0] = 0;
    if (sscanf(text, "rank %d stopped", rank) != 1) *rank = -1;
    return found;
}

/* Until all have told, or one has stopped that has not: it never will. Result: as of hear; its rank or -1. */
static int hear_until(struct moe_peers *p, const int *ranks, int n, char (*labels)[PLACE_BYTES],
                      int64_t end_ns, char text[WHY_BYTES], int *stopped)
{
    for (*stopped = -1;; usleep(PAUSE_US)) {
        const int told = hear(p, ranks, n, labels);
        if (told < 0 || told == n) return told;
        MOE_TRY(who_stopped(p, text, stopped));
        for (int i = 0; i < n; i++)
            if (ranks[i] == *stopped && !*labels[i]) return told;
        *stopped = -1;
        if (moe_now_ns() > end_ns) return told;
    }
}

void moe_peers_blame(struct moe_peers *p, const int *ranks, int n, const char *label, double grace_s,
                     char *out, size_t size)
{
    const int64_t end_ns = moe_now_ns() + (int64_t)(grace_s * 1e9);
    char(*labels)[PLACE_BYTES] = moe_alloc((size_t)n, sizeof *labels), text[WHY_BYTES] = "";
    int *silent = moe_alloc((size_t)n, sizeof *silent), n_silent = 0, stopped = -1,
        told = set(p, "at", label);
    *out = 0;
    if (told >= 0) told = hear_until(p, ranks, n, labels, end_ns, text, &stopped);
    for (int i = 0; i < n; i++)
        if (!*labels[i] && ranks[i] != stopped) silent[n_silent++] = ranks[i];
    if (told < 0)
        append(out, size, moe_error());
    else if (n_silent)
        append_ranks(out, size, silent, n_silent, "does not answer", "do not answer");
    for (int i = 0; i < n; i++) {
        char one[PLACE_BYTES + 32];
        snprintf(one, sizeof one, "rank %d is at %s", ranks[i], labels[i]);
        if (*labels[i] && strncmp(labels[i], label, PLACE_BYTES - 1) != 0) append(out, size, one);
    }
    if (stopped >= 0) append(out, size, text);
    free(labels);
    free(silent);
}

/* ---- the end ---- */

void moe_peers_stop(struct moe_peers *p, const char *why)
{
    char text[WHY_BYTES - 1]; /* with the closing zero of who reads it */
    snprintf(text, sizeof text, "rank %d stopped: %s", p->rank, why);
    moe_tcp_store_set_first(p->store, "stopped", text, strlen(text));
}

int moe_peers_check(struct moe_peers *p)
{
    char text[WHY_BYTES];
    int rank;
    if (moe_now_ns() - p->checked_ns < check_ns) return MOE_OK;
    const int found = who_stopped(p, text, &rank);
    p->checked_ns = moe_now_ns();
    return found > 0 ? moe_fail(MOE_EPEER, "%s", text) : found;
}

bool moe_peers_leave(struct moe_peers *p, double grace_s)
{
    const int64_t end_ns = moe_now_ns() + (int64_t)(grace_s * 1e9);
    int found = set(p, "gone", "") < 0 ? -1 : 1;
    for (int r = 0; r < p->size && found >= 0;) {
        char none[1];
        found = look(p, "gone", r, none, sizeof none);
        r += found == 1;
        if (found == 0 && moe_now_ns() > end_ns) break;
        if (found == 0) usleep(PAUSE_US);
    }
    return found == 1;
}
