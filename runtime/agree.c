/* agree.c - see agree.h.
 *
 * Every member compares the same gathered words in the same order, so all come to the same result. */
#include "runtime/agree.h"

#include <stdlib.h>
#include <string.h>

/* Words of a member. After these: what it sends to each member, then what it expects from each. */
enum {
    COLLECTIVE,
    REDUCTION,
    TYPE,
    LABEL,
    LABEL_BYTES = 2 * MOE_NAME,
    COUNTS = LABEL + LABEL_BYTES / sizeof(int64_t)
};

static const char *label_of(const int64_t *said)
{
    return (const char *)&said[LABEL];
}

static void say(int64_t *said, const struct moe_transfer *t, const char *label, int n)
{
    const enum moe_collective collective = t->op->collective;
    said[COLLECTIVE] = collective;
    said[REDUCTION] = t->op->reduction;
    said[TYPE] = t->op->type;
    strncpy((char *)&said[LABEL], label, LABEL_BYTES - 1);
    for (int i = 0; i < n; i++) {
        said[COUNTS + i] = t->send[moe_send_per_peer[collective] ? i : 0];
        said[COUNTS + n + i] = t->recv[moe_recv_per_peer[collective] ? i : 0];
    }
}

/* said [n, words] */
static int compare(const int64_t *said, const int *ranks, int n)
{
    const int words = COUNTS + 2 * n;
    for (int i = 1; i < n; i++)
        if (strcmp(label_of(said), label_of(said + i * words)) != 0)
            return moe_fail(MOE_EVERDICT, "%s: rank %d enters it where rank %d enters %s", label_of(said),
                            ranks[0], ranks[i], label_of(said + i * words));
    for (int apart = 1; apart <= n; apart++) /* with itself last */
        for (int i = 0; i < n; i++) {
            const int j = (i + apart) % n;
            const int64_t *a = said + i * words, *b = said + j * words;
            const int64_t sends = a[COUNTS + j], expects = b[COUNTS + n + i];
            if (sends == expects && a[TYPE] == b[TYPE] && a[COLLECTIVE] == b[COLLECTIVE] &&
                a[REDUCTION] == b[REDUCTION])
                continue;
            return moe_fail(MOE_EVERDICT,
                            "%s: rank %d sends %lld %s (%s%s) to rank %d, which expects %lld %s (%s%s)",
                            label_of(a), ranks[i], (long long)sends, moe_type_text[a[TYPE]],
                            moe_collective_text[a[COLLECTIVE]], moe_reduction_text[a[REDUCTION]], ranks[j],
                            (long long)expects, moe_type_text[b[TYPE]], moe_collective_text[b[COLLECTIVE]],
                            moe_reduction_text[b[REDUCTION]]);
        }
    return MOE_OK;
}

int moe_agree(struct moe_communicator *c, const struct moe_transfer *t, const char *label, const int *ranks,
              double timeout_s)
{
    const int n = c->size;
    const int64_t words = COUNTS + 2 * n;
    if (n == 1) return MOE_OK;
    int64_t *own = moe_alloc((size_t)words, sizeof *own);
    int64_t *said = moe_alloc((size_t)(n * words), sizeof *said);
    say(own, t, label, n);
    int err = c->table->gather(c, own, said, (size_t)words * sizeof *own, timeout_s);
    if (err >= 0) err = compare(said, ranks, n);
    /* In flight after a failure: the library may still write into it. */
    if (err >= 0 || err == MOE_EVERDICT) {
        free(own);
        free(said);
    }
    return err;
}
