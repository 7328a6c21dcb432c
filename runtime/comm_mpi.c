/* comm_mpi.c - see communicator.h: collectives of an MPI library, on memory of the host.
 *
 * Non-blocking calls and MPI_Test, because a blocking one could not give up on a dead peer. A collective that
 * did not end well leaves the library unable to finalise without waiting for ever: the world counts those. */
#include "kernels/bf16.h"
#include "runtime/communicator.h"

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPINS = 200, PAUSE_US = 50 }; /* ranks share cores: after SPINS tests, sleep between them */

struct mpi_communicator {
    struct moe_communicator base;
    struct mpi_communicator *world; /* itself for the world */
    MPI_Comm comm;
    MPI_Request request;
    int *sizes;     /* [4, size]: send counts and places, receive counts and places; in use while in flight */
    int unfinished; /* world: collectives in flight or failed, on any communicator split from it */
    bool owns_mpi;  /* world: MPI_Init was called here */
    /* In place: what arrives lies in what is sent, which MPI forbids. It arrives here, and goes there. */
    char *scratch, *to;
    size_t bytes;
    MPI_Op sum_bf16; /* world's: MPI has no such type */
};

static int check(int code, const char *call)
{
    if (code == MPI_SUCCESS) return MOE_OK;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(code, text, &length);
    return moe_fail(MOE_EPEER, "%s: %s", call, text);
}

static struct mpi_communicator *mpi_of(struct moe_communicator *c)
{
    return (struct mpi_communicator *)c; /* base comes first */
}

/* Takes comm over; world NULL makes it the world. */
static int wrap(MPI_Comm comm, struct mpi_communicator *world, struct mpi_communicator **out)
{
    struct mpi_communicator *m = moe_alloc(1, sizeof *m);
    m->base.table = &moe_comm_mpi;
    m->world = world ? world : m;
    m->comm = comm;
    m->request = MPI_REQUEST_NULL;
    m->sum_bf16 = MPI_OP_NULL;
    *out = m;
    MOE_TRY(check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"));
    MOE_TRY(check(MPI_Comm_rank(comm, &m->base.rank), "MPI_Comm_rank"));
    MOE_TRY(check(MPI_Comm_size(comm, &m->base.size), "MPI_Comm_size"));
    m->sizes = moe_alloc((size_t)m->base.size * 4, sizeof *m->sizes);
    return MOE_OK;
}

/* to[i] += from[i], rounded. */
static void sum_bf16(void *from, void *to, int *n, MPI_Datatype *type)
{
    const moe_bf16 *x = from;
    moe_bf16 *y = to;
    (void)type;
    for (int i = 0; i < *n; i++)
        y[i] = moe_bf16_from_float(moe_bf16_to_float(x[i]) + moe_bf16_to_float(y[i]));
}

static void mpi_close(struct moe_communicator *c)
{
    if (!c) return;
    struct mpi_communicator *m = mpi_of(c);
    bool clean = !m->world->unfinished;
    if (clean && m->world != m) MPI_Comm_free(&m->comm);
    if (clean && m->sum_bf16 != MPI_OP_NULL) MPI_Op_free(&m->sum_bf16);
    if (clean && m->owns_mpi) MPI_Finalize();
    free(m->sizes);
    free(m->scratch);
    free(m);
}

static int mpi_open(struct moe_device *device, double timeout_s, struct moe_communicator **out)
{
    int before, provided;
    (void)device, (void)timeout_s;
    MPI_Initialized(&before);
    if (!before)
        MOE_TRY(check(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread"));
    struct mpi_communicator *m;
    int err = wrap(MPI_COMM_WORLD, NULL, &m);
    m->owns_mpi = !before;
    if (err >= 0) err = check(MPI_Op_create(sum_bf16, 1, &m->sum_bf16), "MPI_Op_create");
    if (err < 0)
        mpi_close(&m->base);
    else
        *out = &m->base;
    return err;
}

static int mpi_split(struct moe_communicator *world, const int *ranks, int n, int id,
                     struct moe_communicator **out)
{
    MPI_Group all, group;
    MPI_Comm comm;
    MOE_TRY(check(MPI_Comm_group(mpi_of(world)->comm, &all), "MPI_Comm_group"));
    int err = check(MPI_Group_incl(all, n, ranks, &group), "MPI_Group_incl");
    MPI_Group_free(&all);
    if (err < 0) return err;
    err = check(MPI_Comm_create_group(mpi_of(world)->comm, group, id, &comm), "MPI_Comm_create_group");
    MPI_Group_free(&group);
    if (err < 0) return err;
    struct mpi_communicator *m;
    err = wrap(comm, mpi_of(world), &m);
    if (err < 0)
        mpi_close(&m->base);
    else
        *out = &m->base;
    return err;
}

/* MPI counts and places are int. */
static int narrow(int *counts, int *places, const int64_t *from, int n)
{
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        if (sum + from[i] > INT_MAX)
            return moe_fail(MOE_EFAILED, "more than %d elements in one MPI call", INT_MAX);
        places[i] = (int)sum;
        counts[i] = (int)from[i];
        sum += from[i];
    }
    return MOE_OK;
}

/* Where the sum of a reduce-scatter may arrive. */
static void *sum_in(struct mpi_communicator *m, const struct moe_transfer *t, const int *at)
{
    const size_t each = (size_t)moe_type_bytes[t->op->type];
    const char *in = t->in;
    m->to = t->out;
    m->bytes = (size_t)t->recv[0] * each;
    m->scratch = NULL;
    const size_t sent = (size_t)(at[m->base.size - 1] + t->send[m->base.size - 1]) * each;
    if (m->to + m->bytes <= in || in + sent <= m->to) return t->out;
    return m->scratch = moe_alloc(m->bytes ? m->bytes : 1, 1);
}

static int mpi_start(struct moe_communicator *c, const struct moe_transfer *t)
{
    const MPI_Datatype types[MOE_TYPE_COUNT] = {[MOE_F32] = MPI_FLOAT,
                                                [MOE_F64] = MPI_DOUBLE,
                                                [MOE_BF16] = MPI_UINT16_T,
                                                [MOE_I32] = MPI_INT32_T,
                                                [MOE_I64] = MPI_INT64_T};
    struct mpi_communicator *m = mpi_of(c);
    const MPI_Datatype type = types[t->op->type];
    const MPI_Op sum = t->op->type == MOE_BF16 ? m->world->sum_bf16 : MPI_SUM;
    const int n_send = moe_send_per_peer[t->op->collective] ? c->size : 1,
              n_recv = moe_recv_per_peer[t->op->collective] ? c->size : 1;
    bool in_place;
    int *send = m->sizes, *send_at = send + n_send, *recv = send_at + n_send, *recv_at = recv + n_recv;
    moe_assert(m->request == MPI_REQUEST_NULL);
    MOE_TRY(narrow(send, send_at, t->send, n_send));
    MOE_TRY(narrow(recv, recv_at, t->recv, n_recv));
    m->world->unfinished++;
    switch (t->op->collective) {
    case MOE_ALLTOALL:
        return check(
            MPI_Ialltoallv(t->in, send, send_at, type, t->out, recv, recv_at, type, m->comm, &m->request),
            "MPI_Ialltoallv");
    case MOE_ALLGATHER:
        in_place = t->in == (char *)t->out + (size_t)recv_at[c->rank] * (size_t)moe_type_bytes[t->op->type];
        return check(MPI_Iallgatherv(in_place ? MPI_IN_PLACE : t->in, send[0], type, t->out, recv, recv_at,
                                     type, m->comm, &m->request),
                     "MPI_Iallgatherv");
    case MOE_REDUCESCATTER:
        return check(MPI_Ireduce_scatter(t->in, sum_in(m, t, send_at), send, type, sum, m->comm, &m->request),
                     "MPI_Ireduce_scatter");
    default:
        return check(MPI_Iallreduce(t->in == t->out ? MPI_IN_PLACE : t->in, t->out, send[0], type,
                                    t->op->reduction == MOE_REDUCE_MAX ? MPI_MAX : sum, m->comm, &m->request),
                     "MPI_Iallreduce");
    }
}

static int mpi_wait(struct moe_communicator *c, double timeout_s)
{
    struct mpi_communicator *m = mpi_of(c);
    const double give_up = MPI_Wtime() + timeout_s;
    for (int tests = 0, done = 0;;) {
        MOE_TRY(check(MPI_Test(&m->request, &done, MPI_STATUS_IGNORE), "MPI_Test"));
        if (done) break;
        if (MPI_Wtime() > give_up) return moe_fail(MOE_EPEER, "no answer for %g s", timeout_s);
        if (tests < SPINS) {
            tests++;
            sched_yield();
        } else {
            usleep(PAUSE_US);
        }
    }
    m->world->unfinished--;
    if (m->scratch) memcpy(m->to, m->scratch, m->bytes);
    free(m->scratch);
    m->scratch = NULL;
    return MOE_OK;
}

static int mpi_gather(struct moe_communicator *c, const void *own, void *all, size_t bytes, double timeout_s)
{
    struct mpi_communicator *m = mpi_of(c);
    moe_assert(m->request == MPI_REQUEST_NULL && bytes <= INT_MAX);
    m->world->unfinished++;
    MOE_TRY(check(MPI_Iallgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, m->comm, &m->request),
                  "MPI_Iallgather"));
    return mpi_wait(c, timeout_s);
}

static void mpi_abort(struct moe_communicator *c, int exit_code)
{
    MPI_Abort(mpi_of(c)->comm, exit_code);
    _exit(exit_code);
}

const struct moe_communicator_table moe_comm_mpi = {.name = "mpi",
                                                    .open = mpi_open,
                                                    .close = mpi_close,
                                                    .split = mpi_split,
                                                    .start = mpi_start,
                                                    .wait = mpi_wait,
                                                    .gather = mpi_gather,
                                                    .abort = mpi_abort};
