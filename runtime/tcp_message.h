/* tcp_message - what clients and server of tcp_store.h send: a head of five numbers in network order, the
 * key, the value. An answer has no key. */
#ifndef MOE_TCP_MESSAGE_H
#define MOE_TCP_MESSAGE_H

#include "runtime/tcp_store.h"

#include <arpa/inet.h>
#include <string.h>

enum moe_tcp_request {
    MOE_TCP_HELLO,
    MOE_TCP_SET,
    MOE_TCP_SET_FIRST,
    MOE_TCP_WILL,
    MOE_TCP_LOOK,
    MOE_TCP_BYE
};
enum moe_tcp_answer { MOE_TCP_DONE, MOE_TCP_FOUND, MOE_TCP_ABSENT, MOE_TCP_FULL };

enum { MOE_TCP_HEAD = 20 };
struct moe_tcp_head {
    uint64_t job;
    uint32_t what, key_bytes, value_bytes;
};

static inline void moe_tcp_pack(struct moe_tcp_head h, void *out)
{
    const uint32_t words[] = {htonl((uint32_t)(h.job >> 32)), htonl((uint32_t)h.job), htonl(h.what),
                              htonl(h.key_bytes), htonl(h.value_bytes)};
    memcpy(out, words, sizeof words);
}

/* False: of another job or program. */
static inline bool moe_tcp_unpack(const void *from, uint64_t job, struct moe_tcp_head *out)
{
    uint32_t words[5];
    memcpy(words, from, sizeof words);
    for (int i = 0; i < 5; i++) words[i] = ntohl(words[i]);
    *out = (struct moe_tcp_head){(uint64_t)words[0] << 32 | words[1], words[2], words[3], words[4]};
    return out->job == job && out->key_bytes < MOE_KEY_BYTES && out->value_bytes <= MOE_VALUE_BYTES;
}

#endif
