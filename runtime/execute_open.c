/* execute_open.c - see execute.h: communicators, initial parameters and states. */
#include "runtime/execute_internal.h"

#include "kernels/bf16.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void set_real(enum moe_type type, void *p, int64_t i, double value)
{
    if (type == MOE_F64)
        ((double *)p)[i] = value;
    else if (type == MOE_BF16)
        ((moe_bf16 *)p)[i] = moe_bf16_from_float((float)value);
    else
        ((float *)p)[i] = (float)value;
}

/* Box-Muller. */
static double normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    double u = 1 - moe_uniform(seed, stream, 2 * index), v = moe_uniform(seed, stream, 2 * index + 1);
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

/* Makes a slot that persists; *content: all zero, on the host. */
static int make_persistent(struct moe_execution *x, int buffer, int place, void **content, int64_t *n)
{
    struct slot *slot;
    MOE_TRY(moe_execute_make_room(x, (struct moe_ref){.buffer = buffer, .shift = place}, false, &slot));
    *content = moe_execute_param(x, buffer, place, n);
    if (!*content) return MOE_EFAILED;
    slot->written = true;
    memset(*content, 0, (size_t)*n * (size_t)moe_type_bytes[x->s->buffers[buffer].type]);
    return MOE_OK;
}

/* The rank whose initial value this one begins with: its own, or that of who broadcasts. Values are a
 * function of the part of the tensor, so that nothing need be sent. */
static int root_of(const struct moe_execution *x, const struct moe_param *p)
{
    const struct moe_comm *over = &x->s->comms[p->broadcast_comm];
    return p->broadcast ? over->members[over->first[over->group_of[x->rank]]] : x->rank;
}

static int fill_param(struct moe_execution *x, const struct moe_param *p)
{
    const struct moe_buffer *b = &x->s->buffers[p->buffer];
    const int shard = p->shard < 0 ? 0 : x->s->comms[p->shard].index_of[root_of(x, p)];
    for (int place = 0; place < b->slots; place++) {
        void *content;
        int64_t n;
        if (!moe_holds(x->s, p->buffer, place, x->rank)) continue;
        MOE_TRY(make_persistent(x, p->buffer, place, &content, &n));
        const uint64_t stream = moe_hash64(moe_hash_name(p->name) + (uint64_t)place);
        for (int64_t i = 0; i < n; i++) {
            double e =
                p->init_mean + p->init_std * normal(x->options->seed, stream, (uint64_t)(shard * n + i));
            set_real(b->type, content, i, e);
        }
    }
    return MOE_OK;
}

static int fill_state(struct moe_execution *x, int buffer)
{
    void *content;
    int64_t n;
    for (int place = 0; place < x->s->buffers[buffer].slots; place++)
        if (moe_holds(x->s, buffer, place, x->rank)) MOE_TRY(make_persistent(x, buffer, place, &content, &n));
    return MOE_OK;
}

static int set_up(struct moe_execution *x, struct moe_communicator *world)
{
    const struct moe_schedule *s = x->s;
    x->comms[0] = world;
    for (int c = 1; c < s->n_comms; c++) {
        const struct moe_comm *comm = &s->comms[c];
        const int group = comm->group_of[x->rank];
        MOE_TRY(world->table->split(world, comm->members + comm->first[group], moe_group_size(comm, group), c,
                                    &x->comms[c]));
    }
    for (int p = 0; p < s->n_params; p++)
        if (s->params[p].buffer >= 0) MOE_TRY(fill_param(x, &s->params[p]));
    for (int b = 0; b < s->n_buffers; b++)
        if (s->buffers[b].role == MOE_BUF_STATE) MOE_TRY(fill_state(x, b));
    return MOE_OK;
}

int moe_execute_open(const struct moe_schedule *s, struct moe_device *d, struct moe_communicator *world,
                     const struct moe_execute_options *options, struct moe_execution **out)
{
    MOE_TRY(moe_schedule_check(s));
    if (world->size != s->n_ranks)
        return moe_fail(MOE_EUSAGE, "%d ranks were started, the scenario has %d", world->size, s->n_ranks);
    struct moe_execution *x = moe_alloc(1, sizeof *x);
    *x = (struct moe_execution){.s = s, .device = d, .options = options, .rank = world->rank};
    x->shapes = moe_kernel_shapes();
    x->comms = moe_alloc((size_t)s->n_comms, sizeof *x->comms);
    x->send = moe_alloc((size_t)s->n_ranks, sizeof *x->send);
    x->recv = moe_alloc((size_t)s->n_ranks, sizeof *x->recv);
    x->first = moe_alloc((size_t)s->n_buffers + 1, sizeof *x->first);
    for (int b = 0; b < s->n_buffers; b++) x->first[b + 1] = x->first[b] + s->buffers[b].slots;
    x->slots = moe_alloc((size_t)x->first[s->n_buffers], sizeof *x->slots);
    int err = set_up(x, world);
    if (err < 0)
        moe_execute_close(x);
    else
        *out = x;
    return err;
}

void moe_execute_close(struct moe_execution *x)
{
    if (!x) return;
    for (int c = 1; c < x->s->n_comms; c++)
        if (x->comms[c]) x->comms[c]->table->close(x->comms[c]);
    for (int i = 0; i < x->first[x->s->n_buffers]; i++) {
        if (x->slots[i].data) x->device->table->free(x->device, x->slots[i].data);
        free(x->slots[i].host);
    }
    free(x->shapes);
    free(x->comms);
    free(x->send);
    free(x->recv);
    free(x->rows);
    free(x->issued);
    free(x->first);
    free(x->slots);
    free(x);
}
