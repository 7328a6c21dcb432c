/* execute.c - see execute.h.
 *
 * Operations run in host order. On a device that is not async each is complete before the next begins, so
 * every wait of the schedule holds by itself; on one that is, execute_async.c has streams wait as the
 * schedule says, and the host waits for all where it takes what operations may still use: memory that is
 * replaced, or filled with poison. A slot remembers how far its content can be relied on: `written` since the
 * step began, and `known` when the host holds the counts that the device holds. */
#include "runtime/execute_internal.h"

#include "kernels/bf16.h"
#include "runtime/agree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ELEMENTS ((int64_t)1 << 40) /* keeps sums over 2^14 peers in bytes below 2^63 */

int64_t moe_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

const char *moe_execute_label(struct moe_execution *x)
{
    if (!x->now.block) return "before the step";
    moe_op_label(x->now.block, x->now.op, x->now.layer, x->label);
    return x->label;
}

/* Parameters and the optimizer's state go from step to step. */
static bool persists(const struct moe_buffer *b)
{
    return b->role == MOE_BUF_PARAM || b->role == MOE_BUF_STATE;
}

/* The slot that a reference of the operation in hand means. */
static struct slot *slot_of(const struct moe_execution *x, struct moe_ref ref)
{
    return slot_at(x, ref.buffer, moe_slot(x->s, ref, x->now.layer));
}

/* ---- sizes ---- */

static int copy(const struct moe_execution *x, void *to, const void *from, size_t bytes)
{
    MOE_TRY(x->device->table->copy(x->device, to, from, bytes, MOE_STREAM_COMPUTE));
    return x->device->table->sync(x->device, MOE_STREAM_COMPUTE);
}

/* Reads a slot for the host; nothing that writes it is under way. */
static int fetch_now(const struct moe_execution *x, struct slot *slot, enum moe_type type)
{
    size_t bytes = (size_t)moe_type_bytes[type];
    if (!slot->host) slot->host = moe_alloc((size_t)slot->cap, bytes);
    return slot->borrowed ? MOE_OK : copy(x, slot->host, slot->data, (size_t)slot->n * bytes);
}

/* The same after what was issued on the streams. */
static int fetch(struct moe_execution *x, struct slot *slot, enum moe_type type, int streams)
{
    MOE_TRY(moe_async_drain(x, streams));
    return fetch_now(x, slot, type);
}

static int64_t value(void *ctx, int symbol, int rank, int layer, int index)
{
    struct moe_execution *x = ctx;
    const struct moe_symbol *y = &x->s->symbols[symbol];
    if (y->buffer < 0)
        return moe_symbol_initial(x->s, (struct moe_env){value, x}, symbol, rank, layer, index);
    int place = moe_slot(x->s, (struct moe_ref){.buffer = y->buffer}, layer);
    if (place >= 0 && place < x->s->buffers[y->buffer].slots &&
        index < moe_symbol_count(x->s, symbol, rank)) {
        struct slot *slot = slot_at(x, y->buffer, place);
        if (y->on_device && slot->written && !slot->known && x->failed >= 0) {
            x->failed = fetch(x, slot, MOE_I64, MOE_ALL_STREAMS);
            slot->known = x->failed >= 0;
        }
        if (slot->known && (int64_t)y->rows * y->cols <= slot->n)
            return moe_symbol_reduce(x->s, symbol, rank, slot->host, index);
    }
    x->unknown = symbol;
    return MOE_UNKNOWN;
}

static int check_size(struct moe_execution *x, const char *what, int64_t size)
{
    if (x->failed < 0) return x->failed;
    if (size == MOE_UNKNOWN && x->unknown >= 0) {
        const struct moe_symbol *y = &x->s->symbols[x->unknown];
        return moe_fail(MOE_EFAILED, "%s: %s needs %s, and no host sync has read %s", moe_execute_label(x),
                        what, y->name, x->s->buffers[y->buffer].name);
    }
    if (size < 0 || size > MAX_ELEMENTS)
        return moe_fail(MOE_EFAILED, "%s: %s is %lld", moe_execute_label(x), what, (long long)size);
    return MOE_OK;
}

static int evaluate(struct moe_execution *x, const char *what, int expr, int layer, int index, int64_t *out)
{
    x->unknown = -1;
    *out = moe_eval(x->s, (struct moe_env){value, x}, expr, x->rank, layer, index);
    return check_size(x, what, *out);
}

/* ---- buffers ---- */

static int poison(struct moe_execution *x, struct slot *slot, enum moe_type type, int64_t from)
{
    /* NaN, or negative but far from an overflow of the sums that sizes are made of. */
    static const uint64_t pattern[MOE_TYPE_COUNT] = {[MOE_F32] = 0x7fc000007fc00000u,
                                                     [MOE_F64] = 0x7ff8000000000000u,
                                                     [MOE_BF16] = 0x7fc07fc07fc07fc0u,
                                                     [MOE_I32] = 0xc0000000c0000000u,
                                                     [MOE_I64] = 0xffffff0000000000u};
    uint64_t chunk[512];
    for (size_t i = 0; i < sizeof chunk / sizeof *chunk; i++) chunk[i] = pattern[type];
    size_t end = (size_t)slot->n * (size_t)moe_type_bytes[type];
    if (from < slot->n) MOE_TRY(moe_async_drain(x, MOE_ALL_STREAMS));
    for (size_t at = (size_t)from * (size_t)moe_type_bytes[type]; at < end; at += sizeof chunk)
        MOE_TRY(copy(x, (char *)slot->data + at, chunk, end - at < sizeof chunk ? end - at : sizeof chunk));
    return MOE_OK;
}

static int grow(struct moe_execution *x, struct slot *slot, enum moe_type type, int64_t n)
{
    if (slot->data && n <= slot->cap) return MOE_OK;
    void *data;
    size_t bytes = (size_t)moe_type_bytes[type];
    /* Also before memory that is new: a device that has none left waits for all that is under way. */
    MOE_TRY(moe_async_drain(x, MOE_ALL_STREAMS));
    MOE_TRY(x->device->table->alloc(x->device, (size_t)(n ? n : 1) * bytes, &data));
    int err = slot->n ? copy(x, data, slot->data, (size_t)slot->n * bytes) : MOE_OK;
    x->device->table->free(x->device, slot->data);
    free(slot->host);
    slot->data = data;
    slot->host = NULL;
    slot->cap = n;
    slot->known = false;
    return err;
}

/* The layer of an instance that this slot would be of; of the operation in hand when it is of none. */
static int layer_of(const struct moe_execution *x, int buffer, int place)
{
    int each = moe_slots_each(x->s, buffer);
    int layer = each == 1 ? x->now.layer % moe_layers_each(x->s) : place % each;
    return x->s->n_micro > 1 ? moe_layer_of_micro(x->s, place / each, layer) : layer;
}

int moe_execute_make_room(struct moe_execution *x, struct moe_ref ref, bool keep, struct slot **out)
{
    const struct moe_buffer *b = &x->s->buffers[ref.buffer];
    int place = moe_slot(x->s, ref, x->now.layer);
    struct slot *slot = *out = slot_at(x, ref.buffer, place);
    int64_t n, kept = keep ? slot->n : 0;
    int err = evaluate(x, b->name, b->extent, layer_of(x, ref.buffer, place), 0, &n);
    if (err < 0) return keep && slot->written && x->failed >= 0 ? MOE_OK : err;
    slot->extent = n;
    slot->n = kept;
    MOE_TRY(grow(x, slot, b->type, n));
    if (n > kept) slot->n = n;
    return keep || x->options->poison ? poison(x, slot, b->type, kept) : MOE_OK;
}

/* ---- operations ---- */

static int resolve(struct moe_execution *x, struct slot **in, struct slot **out)
{
    const struct moe_op *op = x->now.op;
    for (int i = 0; i < op->n_reads; i++) {
        const struct moe_buffer *b = &x->s->buffers[op->reads[i].buffer];
        /* Kernels index by integers: they must never see what nobody wrote. */
        if ((b->role == MOE_BUF_INDEX || b->role == MOE_BUF_COUNTS) && !slot_of(x, op->reads[i])->written)
            return moe_fail(MOE_EFAILED, "%s: reads %s[%d], which nothing wrote", moe_execute_label(x),
                            b->name, moe_slot(x->s, op->reads[i], x->now.layer));
        MOE_TRY(moe_execute_make_room(x, op->reads[i], true, &in[i]));
    }
    for (int i = 0; i < op->n_writes; i++) {
        bool keep = op->writes[i].accumulate || op->writes[i].n;
        for (int j = 0; j < op->n_reads; j++) keep |= in[j] == slot_of(x, op->writes[i]);
        MOE_TRY(moe_execute_make_room(x, op->writes[i], keep, &out[i]));
    }
    return MOE_OK;
}

/* A slot has room for its buffer's extent: a range beyond is a fault of the schedule. A range of no element
 * has its place too, since an in-place collective of others may need it, unless it says none in the slot. */
static int locate(struct moe_execution *x, struct moe_ref ref, const struct slot *slot, struct operand *out)
{
    const struct moe_buffer *b = &x->s->buffers[ref.buffer];
    int64_t begin;
    *out = (struct operand){slot->data, slot->n, slot->extent, !ref.n && slot->known ? slot->host : NULL};
    if (!ref.n) return MOE_OK;
    MOE_TRY(evaluate(x, "a range", ref.n, x->now.layer, 0, &out->n));
    out->extent = out->n;
    int err = evaluate(x, "the begin of a range", ref.begin, x->now.layer, 0, &begin);
    if (!out->n && x->failed >= 0 && (err < 0 || begin > slot->n)) return MOE_OK;
    MOE_TRY(err);
    if (begin > slot->n - out->n)
        return moe_fail(MOE_EFAILED, "%s: elements %lld to %lld of %s, which holds %lld",
                        moe_execute_label(x), (long long)begin, (long long)(begin + out->n), b->name,
                        (long long)slot->n);
    out->data = (char *)slot->data + begin * moe_type_bytes[b->type];
    return MOE_OK;
}

static int run_kernel(struct moe_execution *x, struct slot **in, struct slot **out)
{
    const struct moe_op *op = x->now.op;
    struct moe_launch launch = {.op = op, .step = x->steps + 1, .layer = x->now.layer};
    struct operand operands[2 * MOE_REFS];
    for (int i = 0; i < op->n_reads; i++) {
        MOE_TRY(locate(x, op->reads[i], in[i], &operands[i]));
        launch.in[i] = operands[i].data;
    }
    for (int i = 0; i < op->n_writes; i++) {
        struct operand *o = &operands[op->n_reads + i];
        MOE_TRY(locate(x, op->writes[i], out[i], o));
        launch.out[i] = o->data;
    }
    for (int i = 0; i < op->n_dims; i++)
        MOE_TRY(evaluate(x, "a dimension", op->dims[i], x->now.layer, 0, &launch.dims[i]));
    if (op->kernel == MOE_K_TOPK && x->options->forced && x->steps == x->options->forced_step)
        launch.forced =
            x->options->forced +
            ((int64_t)moe_routed_layer(x->s, x->now.layer) * x->s->n_ranks + x->rank) * launch.dims[1];
    if (moe_kernel_cost[op->kernel] == MOE_COST_GROUPED) {
        int groups = moe_symbol_count(x->s, op->group, x->rank);
        if (launch.dims[0] != groups)
            return moe_fail(MOE_EFAILED, "%s: %lld groups, %s has %d", moe_execute_label(x),
                            (long long)launch.dims[0], x->s->symbols[op->group].name, groups);
        launch.rows = x->rows = moe_grow(x->rows, &x->cap_rows, groups, sizeof *x->rows);
        for (int g = 0; g < groups; g++) {
            x->unknown = -1;
            x->rows[g] = value(x, op->group, x->rank, x->now.layer, g);
            MOE_TRY(check_size(x, "a group", x->rows[g]));
        }
    }
    MOE_TRY(moe_execute_fit(x, &launch, operands));
    int64_t divisor = 1, times = 1;
    if (op->divisor) MOE_TRY(evaluate(x, "the divisor", op->divisor, x->now.layer, 0, &divisor));
    if (op->times) MOE_TRY(evaluate(x, "the factor", op->times, x->now.layer, 0, &times));
    launch.divisor = (double)divisor / (double)times;
    if (is_async(x)) MOE_TRY(moe_async_begin(x));
    x->now.start_ns = moe_now_ns();
    int err = x->device->table->run(x->device, &launch, op->stream);
    if (err >= 0)
        err = is_async(x) ? moe_async_end(x, true, 0, 0) : x->device->table->sync(x->device, op->stream);
    return err < 0 ? moe_fail(err, "%s: %s", moe_execute_label(x), moe_error()) : MOE_OK;
}

static int check_fit(struct moe_execution *x, const char *verb, int64_t n, int buffer, struct operand part)
{
    const struct moe_buffer *b = &x->s->buffers[buffer];
    if (n * moe_type_bytes[x->now.op->type] <= part.n * moe_type_bytes[b->type]) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s %lld %s, but %s holds %lld %s", moe_execute_label(x), verb,
                    (long long)n, moe_type_text[x->now.op->type], b->name, (long long)part.n,
                    moe_type_text[b->type]);
}

void moe_execute_ranks(char *out, size_t size, const int *ranks, int n)
{
    if (n > 1 && ranks[n - 1] - ranks[0] == n - 1) {
        snprintf(out, size, "%d-%d", ranks[0], ranks[n - 1]);
        return;
    }
    size_t used = 0;
    for (int i = 0; i < n && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%d", i ? "," : "", ranks[i]);
}

/* Evaluates `expr` for each member, or once; *sum: over them. */
static int count(struct moe_execution *x, const char *what, int expr, int n, int64_t *out, int64_t *sum)
{
    *sum = 0;
    for (int i = 0; i < n; i++) {
        MOE_TRY(evaluate(x, what, expr, x->now.layer, i, &out[i]));
        *sum += out[i];
    }
    return MOE_OK;
}

/* What the communicator says, with the operation in hand and its ranks before it. */
static int collective_failed(struct moe_execution *x, int err)
{
    const struct moe_comm *c = &x->s->comms[x->now.op->comm];
    const int group = c->group_of[x->rank];
    char ranks[64];
    moe_execute_ranks(ranks, sizeof ranks, c->members + c->first[group], moe_group_size(c, group));
    return moe_fail(err, "%s on communicator %s (ranks %s): %s", moe_execute_label(x), c->name, ranks,
                    moe_error());
}

static int agree(struct moe_execution *x, const struct moe_transfer *t)
{
    const struct moe_comm *c = &x->s->comms[t->op->comm];
    const int *ranks = c->members + c->first[c->group_of[x->rank]];
    if (x->steps_here >= x->options->agree_steps) return MOE_OK;
    MOE_TRY(moe_async_drain(x, MOE_ALL_STREAMS)); /* what hangs is named by itself */
    int err = moe_agree(x->comms[t->op->comm], t, moe_execute_label(x), ranks, x->options->timeout_s);
    return err < 0 && err != MOE_EVERDICT ? collective_failed(x, err) : err;
}

static int run_collective(struct moe_execution *x, struct slot *in, struct slot *out)
{
    const struct moe_op *op = x->now.op;
    const struct moe_comm *c = &x->s->comms[op->comm];
    const int size = moe_group_size(c, c->group_of[x->rank]), self = c->index_of[x->rank];
    const bool each_send = moe_send_per_peer[op->collective], each_recv = moe_recv_per_peer[op->collective];
    int64_t sent, received;
    struct operand from, to;
    MOE_TRY(locate(x, op->reads[0], in, &from));
    MOE_TRY(locate(x, op->writes[0], out, &to));
    const struct moe_transfer transfer = {op, from.data, to.data, x->send, x->recv, moe_execute_label(x)};
    MOE_TRY(count(x, "what it sends", op->send, each_send ? size : 1, x->send, &sent));
    MOE_TRY(count(x, "what it receives", op->recv, each_recv ? size : 1, x->recv, &received));
    /* Before what a rank finds wrong by itself, since that leaves the others waiting. */
    MOE_TRY(agree(x, &transfer));
    MOE_TRY(check_fit(x, "sends", sent, op->reads[0].buffer, from));
    MOE_TRY(check_fit(x, "receives", received, op->writes[0].buffer, to));
    const int64_t to_self = x->send[each_send ? self : 0], from_self = x->recv[each_recv ? self : 0];
    if (to_self != from_self)
        return moe_fail(MOE_EFAILED, "%s: sends itself %lld and receives %lld elements", moe_execute_label(x),
                        (long long)to_self, (long long)from_self);
    x->now.bytes = sent * moe_type_bytes[op->type];
    struct moe_communicator *comm = x->comms[op->comm];
    if (is_async(x)) MOE_TRY(moe_async_begin(x));
    x->now.start_ns = moe_now_ns();
    int err = comm->table->start(comm, &transfer);
    if (err >= 0)
        err = is_async(x) ? moe_async_end(x, true, sent, received)
                          : comm->table->wait(comm, x->options->timeout_s);
    return err < 0 ? collective_failed(x, err) : MOE_OK;
}

static int run_host_sync(struct moe_execution *x, struct slot **in)
{
    for (int i = 0; i < x->now.op->n_reads; i++) {
        if (x->s->buffers[x->now.op->reads[i].buffer].type != MOE_I64) continue;
        MOE_TRY(fetch(x, in[i], MOE_I64, (int)x->now.op->waits | 1 << MOE_STREAM_COMPUTE)); /* which copies */
        in[i]->known = true;
    }
    MOE_TRY(moe_async_drain(x, (int)x->now.op->waits));
    return is_async(x) ? moe_async_end(x, false, 0, 0) : MOE_OK;
}

/* *runs: does this rank enter the collective? */
static int is_run(struct moe_execution *x, bool *runs)
{
    const struct moe_op *op = x->now.op;
    int64_t when = 1;
    if (op->kind == MOE_COLLECTIVE && op->when)
        MOE_TRY(evaluate(x, "whether it runs", op->when, x->now.layer, 0, &when));
    *runs = when != 0;
    return MOE_OK;
}

static int run_op(struct moe_execution *x)
{
    const struct moe_op *op = x->now.op;
    struct slot *in[MOE_REFS], *out[MOE_REFS];
    if (op->kind == MOE_KERNEL) MOE_TRY(moe_execute_fit_form(x));
    MOE_TRY(resolve(x, in, out));
    switch (op->kind) {
    case MOE_KERNEL: MOE_TRY(run_kernel(x, in, out)); break;
    case MOE_COLLECTIVE: MOE_TRY(run_collective(x, in[0], out[0])); break;
    default: MOE_TRY(run_host_sync(x, in)); break;
    }
    for (int i = 0; i < op->n_writes; i++) {
        bool in_place = false;
        for (int j = 0; j < op->n_reads; j++) in_place |= in[j] == out[i];
        out[i]->given |= !in_place;
        out[i]->written = true;
        out[i]->known = false;
    }
    return MOE_OK;
}

/* ---- a step ---- */

static double get_real(enum moe_type type, const void *p, int64_t i)
{
    return type == MOE_F64    ? ((const double *)p)[i]
           : type == MOE_BF16 ? (double)moe_bf16_to_float(((const moe_bf16 *)p)[i])
                              : (double)((const float *)p)[i];
}

static int fill_input(struct moe_execution *x, int buffer, int micro, const int32_t *ids)
{
    struct slot *slot;
    MOE_TRY(moe_execute_make_room(x, (struct moe_ref){.buffer = buffer, .micro = micro}, false, &slot));
    if (x->s->buffers[buffer].type != MOE_I32 || slot->n != x->s->tokens[x->rank])
        return moe_fail(MOE_EFAILED, "malformed schedule: input %s is not one int32 per token",
                        x->s->buffers[buffer].name);
    slot->written = true;
    return copy(x, slot->data, ids, (size_t)slot->n * sizeof *ids);
}

static int begin_step(struct moe_execution *x, const int32_t *token, const int32_t *target)
{
    const int32_t *ids = token;
    memset(&x->now, 0, sizeof x->now);
    for (int b = 0; b < x->s->n_buffers; b++) {
        const struct moe_buffer *buffer = &x->s->buffers[b];
        for (int i = 0; i < buffer->slots; i++) {
            struct slot *slot = slot_at(x, b, i);
            if (slot->borrowed)
                MOE_TRY(
                    copy(x, slot->data, slot->host, (size_t)slot->n * (size_t)moe_type_bytes[buffer->type]));
            slot->borrowed = false;
            if (persists(buffer)) continue;
            slot->written = slot->given = slot->known = false;
            if (x->options->poison) MOE_TRY(poison(x, slot, buffer->type, 0));
        }
        if (buffer->role != MOE_BUF_INPUT) continue;
        for (int m = 0; m < x->s->n_micro; m++) MOE_TRY(fill_input(x, b, m, ids + m * x->s->tokens[x->rank]));
        ids = target;
    }
    return MOE_OK;
}

/* loss: all elements of the first output. */
static int end_step(struct moe_execution *x, double *loss)
{
    int first = -1;
    *loss = 0;
    for (int b = 0; b < x->s->n_buffers; b++) {
        const struct moe_buffer *buffer = &x->s->buffers[b];
        if (buffer->role != MOE_BUF_OUTPUT) continue;
        if (first < 0) first = b;
        for (int i = 0; i < buffer->slots; i++) {
            struct slot *slot = slot_at(x, b, i);
            if (!moe_holds(x->s, b, i, x->rank)) continue;
            if (!slot->written)
                return moe_fail(MOE_EFAILED, "the step ended, and nothing wrote %s[%d]", buffer->name, i);
            if (b != first) continue;
            MOE_TRY(fetch_now(x, slot, buffer->type));
            for (int64_t e = 0; e < slot->n; e++) *loss += get_real(buffer->type, slot->host, e);
        }
    }
    x->steps++;
    x->steps_here++;
    return MOE_OK;
}

int moe_execute_step(struct moe_execution *x, const int32_t *token, const int32_t *target, double *loss)
{
    const struct moe_role *role = &x->s->roles[x->s->role_of[x->rank]];
    MOE_TRY(begin_step(x, token, target));
    for (int n = 0; n < role->n_instances; n++) {
        const struct moe_instance *instance = &role->itinerary[n];
        const struct moe_block *block = &role->blocks[instance->block];
        for (int o = 0; o < block->n_ops; o++) {
            int64_t entry = moe_now_ns();
            x->now = (struct moe_executed){
                block, &block->ops[o], instance->block, instance->layer, entry, entry, 0, 0, false};
            bool runs;
            MOE_TRY(is_run(x, &runs));
            x->now.skipped = !runs;
            if (runs) MOE_TRY(run_op(x));
            x->now.end_ns = moe_now_ns();
            if (is_async(x) && !runs) MOE_TRY(moe_async_end(x, false, 0, 0));
            if (is_async(x) && x->options->observe_reads) MOE_TRY(moe_async_drain(x, MOE_ALL_STREAMS));
            if (!is_async(x) && x->options->observe) x->options->observe(x->options->ctx, &x->now);
        }
    }
    MOE_TRY(moe_async_drain(x, MOE_ALL_STREAMS));
    return end_step(x, loss);
}

int64_t moe_execute_steps(const struct moe_execution *x)
{
    return x->steps;
}

void moe_execute_set_steps(struct moe_execution *x, int64_t done)
{
    x->steps = done;
}

const struct moe_schedule *moe_execute_schedule(const struct moe_execution *x)
{
    return x->s;
}

int moe_execute_rank(const struct moe_execution *x)
{
    return x->rank;
}

const void *moe_execute_buffer(const struct moe_execution *x, int buffer, int place, int64_t *n)
{
    struct slot *slot = slot_at(x, buffer, place);
    *n = slot->n;
    return slot->data && fetch_now(x, slot, x->s->buffers[buffer].type) >= 0 ? slot->host : NULL;
}

bool moe_execute_given(const struct moe_execution *x, int buffer, int place)
{
    return slot_at(x, buffer, place)->given;
}

void *moe_execute_param(struct moe_execution *x, int buffer, int place, int64_t *n)
{
    moe_assert(persists(&x->s->buffers[buffer]));
    if (!moe_execute_buffer(x, buffer, place, n)) return NULL;
    struct slot *slot = slot_at(x, buffer, place);
    slot->borrowed = true;
    return slot->host;
}
