/* tcp_store - values by name that the ranks of a job tell each other, kept by a thread of rank 0.
 *
 * For what is small and rare: who is here, the id of a communicator, why a rank stopped. Some keys a rank, a
 * request of one a few times a second; a request on one host takes about 30 us, in a cluster one round trip.
 * Like torch's TCPStore neither secret nor guarded: who knows job and port can read and write. Whatever else
 * connects is bounded in bytes and in number, and dropped.
 *
 * job: a number that server and clients must share, so that jobs that meet at one port tell each other apart.
 * */
#ifndef MOE_TCP_STORE_H
#define MOE_TCP_STORE_H

#include "sim/base.h"

enum { MOE_KEY_BYTES = 64, MOE_VALUE_BYTES = 1 << 16 }; /* at most; of a key the closing zero included */

struct moe_tcp_server;
/* Listens, in a thread of its own that takes no signals. host: the address to listen at, where it is a number
 * or "localhost"; a name, which its own host may take for the loopback, or NULL: at all. port: 0 for any.
 * Errors: MOE_EFAILED with address and reason: the port is in use, or the address is another host's. */
int moe_tcp_serve(const char *host, int port, uint64_t job, struct moe_tcp_server **out);
int moe_tcp_server_port(const struct moe_tcp_server *s);
/* Ends when all clients have closed, or after grace_s. */
void moe_tcp_server_close(struct moe_tcp_server *s, double grace_s);

struct moe_tcp_store; /* of one thread */
/* Connects, and tries again until timeout_s, which is also how long an answer to any later request may take.
 * hosts: names or addresses, split by commas: the first at which this job's server answers.
 * Errors: MOE_EPEER: "rank 0's store at gpu1:29500: no answer for 60 s: Connection refused". */
int moe_tcp_store_open(const char *hosts, int port, uint64_t job, double timeout_s,
                       struct moe_tcp_store **out);
void moe_tcp_store_close(struct moe_tcp_store *s); /* says goodbye */

/* Each is one request, and MOE_EPEER with address and key when it is not answered: the server is gone, and
 * with it the store: all later calls fail at once. */
int moe_tcp_store_set(struct moe_tcp_store *s, const char *key, const void *value, size_t bytes);
int moe_tcp_store_set_first(struct moe_tcp_store *s, const char *key, const void *value,
                            size_t bytes); /* unless the key is set */
/* What the server sets, unless the key is set, when this client's connection ends without goodbye. */
int moe_tcp_store_will(struct moe_tcp_store *s, const char *key, const void *value, size_t bytes);
/* 1 and the value [*bytes], 0 when nobody has set it, or an error; also MOE_EPEER when the value has more
 * than `cap` bytes. Does not wait for anybody but the server. */
int moe_tcp_store_look(struct moe_tcp_store *s, const char *key, void *value, size_t cap, size_t *bytes);
/* Waits until somebody has set it; looks every 1 to 50 ms. Errors: MOE_EPEER after timeout_s. */
int moe_tcp_store_get(struct moe_tcp_store *s, const char *key, double timeout_s, void *value, size_t cap,
                      size_t *bytes);

#endif
