/* comm_self.c - see communicator.h: a job of one rank, without any library. */
#include "runtime/communicator.h"

#include <stdlib.h>
#include <string.h>

static int self_open(struct moe_device *device, double timeout_s, struct moe_communicator **out)
{
    (void)device, (void)timeout_s;
    *out = moe_alloc(1, sizeof **out);
    **out = (struct moe_communicator){.table = &moe_comm_self, .size = 1};
    return MOE_OK;
}

static void self_close(struct moe_communicator *c)
{
    free(c);
}

static int self_split(struct moe_communicator *world, const int *ranks, int n, int id,
                      struct moe_communicator **out)
{
    (void)world, (void)id;
    moe_assert(n == 1 && ranks[0] == 0);
    return self_open(NULL, 0, out);
}

static int self_start(struct moe_communicator *c, const struct moe_transfer *t)
{
    (void)c;
    if (t->send[0] != t->recv[0])
        return moe_fail(MOE_EPEER, "sends %lld and receives %lld elements", (long long)t->send[0],
                        (long long)t->recv[0]);
    memmove(t->out, t->in, (size_t)t->send[0] * (size_t)moe_type_bytes[t->op->type]);
    return MOE_OK;
}

static int self_wait(struct moe_communicator *c, double timeout_s)
{
    (void)c, (void)timeout_s;
    return MOE_OK;
}

static int self_gather(struct moe_communicator *c, const void *own, void *all, size_t bytes, double timeout_s)
{
    (void)c, (void)timeout_s;
    memcpy(all, own, bytes);
    return MOE_OK;
}

static void self_abort(struct moe_communicator *c, int exit_code)
{
    (void)c;
    exit(exit_code);
}

const struct moe_communicator_table moe_comm_self = {.name = "self",
                                                     .open = self_open,
                                                     .close = self_close,
                                                     .split = self_split,
                                                     .start = self_start,
                                                     .wait = self_wait,
                                                     .gather = self_gather,
                                                     .abort = self_abort};
