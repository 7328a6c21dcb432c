/* simulate.c - see simulate.h.
 *
 * Nothing is queued: the host and each stream of a rank are cursors over the same list in host order. A
 * cursor counts what it passed on each lane (a stream or a communicator); an operation is issued when the
 * host's cursor is past it, and may start when what is done on the lanes it depends on has caught up with
 * what its cursor passed there. A collective also depends on its own communicator, so a rank is in one
 * collective of a communicator at a time, and at most two of them overlap in a group: one that some members
 * have left and the next, which they already entered. */
#include "sim/simulate.h"

#include "sim/heap.h"
#include "sim/network.h"
#include "sim/simulate_cost.h"
#include "sim/simulate_rows.h"
#include "sim/turns.h"
#include "sim/values.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COMPUTE, EXPOSED, WAITING, HOST, SPENT_COUNT }; /* what a rank's time counts as, first that applies */
enum { EVENT_HOST, EVENT_DONE };                       /* rank a's host is free; its stream b has finished */

struct cursor {
    int instance, op;
    int *passed; /* [lanes] */
};

/* An operation of a rank, as a cursor finds it. */
struct job {
    const struct moe_block *block;
    const struct moe_op *op;
    int layer;
    struct moe_sim_row *row; /* its times are sums over ranks in ps until the end */
    moe_ps since;            /* start; entry into a collective */
    moe_ps wait;             /* in a collective, for the latest member */
    struct meet *meet;
};

struct rank {
    struct cursor host, stream[MOE_STREAM_COUNT];
    struct job job[MOE_STREAM_COUNT]; /* running, or the last that ran */
    int *done;                        /* [lanes] */
    bool host_busy;
    int turn;          /* on a host: the stream of the operation that has a core or waits for one */
    moe_ps host_since; /* since when it is at its present operation */
    int active[HOST];  /* kernels running; collectives in flight; collectives waiting for members */
    moe_ps since, spent[SPENT_COUNT];
};

struct member {
    bool here;
    int stream, pending; /* flows from and to it */
};

/* A collective of one group, from the first entry to the last exit. */
struct meet {
    int comm, group, size;
    int arrived, left, flows;
    bool together; /* as in moe_plan */
    moe_ps start;
    double error;          /* of its time */
    struct member *member; /* [size] */
};

struct sim {
    const struct moe_schedule *s;
    const struct moe_topo *topo;
    struct moe_sim_result *out;
    struct moe_heap heap;
    struct moe_network net;
    struct moe_turns turns; /* of a host */
    struct moe_values *values;
    moe_ps now;
    struct rank *rank;
    struct meet *meet;         /* [comms, ranks, 2]: two for each group */
    int *lanes;                /* all `passed` and `done` */
    struct member *members;    /* all members of meets */
    const struct moe_op **ops; /* of the collective that starts */
    struct moe_plan plan;
    struct moe_rows rows;
    void (*see)(void *ctx, const struct moe_sim_seen *seen);
    void *ctx;
};

static int lane_of_comm(int comm)
{
    return MOE_STREAM_COUNT + comm;
}

static struct meet *meet_at(const struct sim *sim, int comm, int group, int nth)
{
    return &sim->meet[2 * ((size_t)comm * (size_t)sim->s->n_ranks + (size_t)group) + (size_t)(nth % 2)];
}

/* ---- accounts ---- */

/* A rank's time since its last change counts as the first thing that it was doing. */
static void change(struct sim *sim, int rank, int what, int by)
{
    struct rank *r = &sim->rank[rank];
    int was = COMPUTE;
    while (was < HOST && !r->active[was]) was++;
    r->spent[was] += sim->now - r->since;
    r->since = sim->now;
    r->active[what] += by;
}

static bool on_host(const struct sim *sim)
{
    return sim->topo->cores > 0;
}

static void take_turn(struct sim *sim, int rank, int stream, moe_ps work)
{
    sim->rank[rank].turn = stream;
    moe_turns_work(&sim->turns, sim->now, rank, work);
}

static void after(struct sim *sim, moe_ps delay, int kind, int rank, int stream)
{
    moe_heap_push(&sim->heap,
                  (struct moe_event){.time = sim->now + delay, .kind = kind, .a = rank, .b = stream});
}

/* ---- collectives ---- */

static int rank_at(const struct sim *sim, const struct meet *m, int place)
{
    const struct moe_comm *comm = &sim->s->comms[m->comm];
    return comm->members[comm->first[m->group] + place];
}

static struct job *job_at(const struct sim *sim, const struct meet *m, int place)
{
    return &sim->rank[rank_at(sim, m, place)].job[m->member[place].stream];
}

static struct moe_asked asked(const struct sim *sim, const struct job *job, int rank)
{
    return (struct moe_asked){
        sim->s, moe_values_device(sim->values), job->block, job->op, rank, job->layer, sim->values};
}

/* Member `place` leaves when the flows that concern it have ended. */
static void leave_if_over(struct sim *sim, struct meet *m, int place)
{
    if (m->together ? m->flows : m->member[place].pending) return;
    after(sim, 0, EVENT_DONE, rank_at(sim, m, place), m->member[place].stream);
}

static int check_same(const struct sim *sim, const struct meet *m)
{
    const struct job *first = job_at(sim, m, 0);
    for (int i = 1; i < m->size; i++) {
        const struct job *other = job_at(sim, m, i);
        if (other->op->collective == first->op->collective && other->op->type == first->op->type &&
            other->layer == first->layer)
            continue;
        char a[2 * MOE_NAME], b[2 * MOE_NAME];
        moe_op_label(first->block, first->op, first->layer, a);
        moe_op_label(other->block, other->op, other->layer, b);
        return moe_fail(MOE_EVERDICT, "rank %d is in %s where rank %d is in %s (run check)",
                        rank_at(sim, m, 0), a, rank_at(sim, m, i), b);
    }
    return MOE_OK;
}

static int start_flows(struct sim *sim, struct meet *m)
{
    const struct moe_comm *comm = &sim->s->comms[m->comm];
    struct moe_asked first = asked(sim, job_at(sim, m, 0), rank_at(sim, m, 0));
    MOE_TRY(moe_asked_plan(&first, sim->topo, sim->ops, &sim->plan, &m->error));
    moe_network_add(&sim->net, sim->now, sim->plan.n, sim->plan.flow, (int)(m - sim->meet));
    for (int i = 0; i < sim->plan.n; i++) {
        const struct moe_sent *f = &sim->plan.flow[i];
        int from = comm->index_of[f->from], to = comm->index_of[f->to];
        m->member[from].pending++;
        m->member[to].pending++;
        if (from != to) job_at(sim, m, from)->row->bytes += f->bytes;
    }
    m->flows = sim->plan.n;
    m->together = sim->plan.together;
    return MOE_OK;
}

/* All members are there. */
static int start_collective(struct sim *sim, struct meet *m)
{
    MOE_TRY(check_same(sim, m));
    m->start = sim->now;
    m->left = 0;
    for (int i = 0; i < m->size; i++) {
        struct job *job = job_at(sim, m, i);
        change(sim, rank_at(sim, m, i), WAITING, -1);
        change(sim, rank_at(sim, m, i), EXPOSED, 1);
        job->wait = sim->now - job->since;
        job->row->wait_us += (double)job->wait;
        sim->ops[i] = job->op;
    }
    MOE_TRY(start_flows(sim, m));
    /* Now, not at the end: a member that leaves early knows what it received. */
    moe_values_collective(sim->values, sim->ops, m->comm, m->group, job_at(sim, m, 0)->layer);
    for (int i = 0; i < m->size; i++) leave_if_over(sim, m, i);
    return MOE_OK;
}

static int enter(struct sim *sim, int rank, int stream)
{
    struct job *job = &sim->rank[rank].job[stream];
    int c = job->op->comm;
    const struct moe_comm *comm = &sim->s->comms[c];
    int nth = sim->rank[rank].done[lane_of_comm(c)];
    struct meet *m = job->meet = meet_at(sim, c, comm->group_of[rank], nth);
    m->member[comm->index_of[rank]] = (struct member){.here = true, .stream = stream};
    change(sim, rank, WAITING, 1);
    if (on_host(sim)) moe_turns_leave(&sim->turns, sim->now, rank);
    return ++m->arrived == m->size ? start_collective(sim, m) : MOE_OK;
}

static void end_flow(struct sim *sim, const struct moe_flow *f)
{
    struct meet *m = &sim->meet[f->tag];
    const struct moe_comm *comm = &sim->s->comms[m->comm];
    int from = comm->index_of[f->from], to = comm->index_of[f->to];
    m->flows--;
    m->member[from].pending--;
    m->member[to].pending--;
    if (!m->together) {
        leave_if_over(sim, m, from);
        if (to != from) leave_if_over(sim, m, to);
    } else if (!m->flows)
        for (int i = 0; i < m->size; i++) leave_if_over(sim, m, i);
}

/* ---- ranks ---- */

static bool is_left_out(const struct sim *sim, int rank, const struct moe_op *op, int layer)
{
    return op->kind == MOE_COLLECTIVE && op->when &&
           !moe_eval(sim->s, moe_values_device(sim->values), op->when, rank, layer, 0);
}

/* The operation at a cursor; false at the end of the itinerary. */
static bool at(const struct sim *sim, int rank, struct cursor *c, struct job *out)
{
    int role_id = sim->s->role_of[rank];
    const struct moe_role *role = &sim->s->roles[role_id];
    for (; c->instance < role->n_instances; c->instance++, c->op = 0) {
        struct moe_instance instance = role->itinerary[c->instance];
        const struct moe_block *block = &role->blocks[instance.block];
        while (c->op < block->n_ops && is_left_out(sim, rank, &block->ops[c->op], instance.layer)) c->op++;
        if (c->op == block->n_ops) continue;
        *out = (struct job){.block = block,
                            .op = &block->ops[c->op],
                            .layer = instance.layer,
                            .row = &sim->out->rows[*moe_rows_at(&sim->rows, role_id, instance.block, c->op)],
                            .since = sim->now};
        return true;
    }
    return false;
}

static void pass(struct cursor *c, const struct moe_op *op)
{
    if (op->kind != MOE_HOST_SYNC) c->passed[op->stream]++;
    if (op->kind == MOE_COLLECTIVE) c->passed[lane_of_comm(op->comm)]++;
    c->op++;
}

static bool caught_up(const struct rank *r, const struct cursor *c, int lane)
{
    return r->done[lane] >= c->passed[lane];
}

static bool waits_over(const struct rank *r, const struct cursor *c, const struct moe_op *op)
{
    for (int s = 0; s < MOE_STREAM_COUNT; s++)
        if (op->waits >> s & 1 && !caught_up(r, c, s)) return false;
    return true;
}

/* Starts the next operation of a stream if it may. */
static int try_stream(struct sim *sim, int rank, int stream)
{
    struct rank *r = &sim->rank[rank];
    struct cursor *c = &r->stream[stream];
    struct job job;
    for (;;) {
        if (!at(sim, rank, c, &job)) return MOE_OK;
        if (job.op->kind != MOE_HOST_SYNC && job.op->stream == stream) break;
        pass(c, job.op);
    }
    bool issued = r->host.passed[stream] > c->passed[stream];
    if (!issued || !caught_up(r, c, stream) || !waits_over(r, c, job.op)) return MOE_OK;
    if (job.op->kind == MOE_COLLECTIVE && !caught_up(r, c, lane_of_comm(job.op->comm))) return MOE_OK;
    pass(c, job.op);
    r->job[stream] = job;
    if (job.op->kind == MOE_COLLECTIVE) return enter(sim, rank, stream);
    moe_ps time;
    struct moe_asked kernel = asked(sim, &job, rank);
    MOE_TRY(moe_kernel_time(&kernel, sim->topo, &time));
    change(sim, rank, COMPUTE, 1);
    if (on_host(sim))
        take_turn(sim, rank, stream, time);
    else
        after(sim, time, EVENT_DONE, rank, stream);
    return MOE_OK;
}

/* Sets the host to its next operation if it is free to. */
static void try_host(struct sim *sim, int rank)
{
    struct rank *r = &sim->rank[rank];
    struct job job;
    if (r->host_busy) return;
    for (int s = 0; on_host(sim) && s < MOE_STREAM_COUNT; s++)
        if (!caught_up(r, &r->host, s)) return;
    if (!at(sim, rank, &r->host, &job)) {
        if (on_host(sim)) moe_turns_leave(&sim->turns, sim->now, rank);
        return;
    }
    bool sync = job.op->kind == MOE_HOST_SYNC;
    if (sync && !waits_over(r, &r->host, job.op)) return;
    if (sync) job.row->wait_us += (double)(sim->now - r->host_since);
    r->host_busy = true;
    r->host_since = sim->now;
    after(sim, moe_time(sync ? sim->topo->host_sync_s : sim->topo->launch_s, 1), EVENT_HOST, rank, 0);
}

/* Starts whatever a rank can start now. */
static int go_on(struct sim *sim, int rank)
{
    for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) MOE_TRY(try_stream(sim, rank, stream));
    try_host(sim, rank);
    return MOE_OK;
}

/* An operation has ended: its own time began at `since`, or when a collective began. */
static void account(struct sim *sim, int rank, const struct job *job)
{
    moe_ps own = sim->now - (job->op->kind == MOE_COLLECTIVE ? job->meet->start : job->since);
    job->row->own_us += (double)own;
    if (job->op->kind == MOE_COLLECTIVE && own)
        job->row->error_us += (double)own * (job->meet->error > 0 ? job->meet->error : NAN);
    if (sim->see)
        sim->see(sim->ctx, &(struct moe_sim_seen){rank, job->layer, job->block, job->op, own, job->wait});
}

static void host_is_free(struct sim *sim, int rank)
{
    struct rank *r = &sim->rank[rank];
    struct job job;
    at(sim, rank, &r->host, &job);
    job.since = r->host_since;
    if (job.op->kind == MOE_HOST_SYNC) account(sim, rank, &job);
    pass(&r->host, job.op);
    r->host_busy = false;
    r->host_since = sim->now;
}

static void op_is_done(struct sim *sim, int rank, int stream)
{
    struct rank *r = &sim->rank[rank];
    const struct job *job = &r->job[stream];
    r->done[stream]++;
    account(sim, rank, job);
    if (job->op->kind == MOE_KERNEL) {
        change(sim, rank, COMPUTE, -1);
        moe_values_kernel(sim->values, job->op, rank, job->layer);
        return;
    }
    struct meet *m = job->meet;
    change(sim, rank, EXPOSED, -1);
    r->done[lane_of_comm(m->comm)]++;
    m->member[sim->s->comms[m->comm].index_of[rank]].here = false;
    if (++m->left == m->size) m->arrived = 0;
}

/* ---- the loop ---- */

/* Nothing happens any more: every rank has passed its whole itinerary, and each stream has done its part. */
static int check_finished(const struct sim *sim)
{
    struct job job;
    for (int rank = 0; rank < sim->s->n_ranks; rank++) {
        struct rank *r = &sim->rank[rank];
        bool more = at(sim, rank, &r->host, &job);
        for (int s = 0; s < MOE_STREAM_COUNT; s++) more |= !caught_up(r, &r->host, s);
        if (more) return moe_fail(MOE_EVERDICT, "rank %d stops in the middle of its step (run check)", rank);
    }
    return MOE_OK;
}

/* The first operation that a rank issued and did not finish is a collective that others have not entered,
 * since all before it is done: so if anyone waits for ever, there is a group that is not complete. */
static int check_hang(const struct sim *sim)
{
    const struct meet *m = sim->meet, *end = meet_at(sim, sim->s->n_comms, 0, 0);
    while (m < end && (m->arrived == 0 || m->arrived == m->size)) m++;
    if (m == end) return check_finished(sim);
    char label[2 * MOE_NAME], missing[256] = "";
    size_t length = 0;
    for (int i = 0; i < m->size; i++)
        if (m->member[i].here) {
            const struct job *job = job_at(sim, m, i);
            moe_op_label(job->block, job->op, job->layer, label);
        } else if (length < sizeof missing - 16)
            length += (size_t)sprintf(missing + length, " %d", rank_at(sim, m, i));
        else
            strcpy(missing + length, " ...");
    return moe_fail(MOE_EVERDICT, "%s: %d of %d ranks wait for ever; missing:%s (run check)", label,
                    m->arrived, m->size, missing);
}

static int end_turns(struct sim *sim)
{
    moe_turns_end(&sim->turns, sim->now);
    for (int i = 0; i < sim->turns.n_ended; i++) {
        int rank = sim->turns.ended[i];
        op_is_done(sim, rank, sim->rank[rank].turn);
        MOE_TRY(go_on(sim, rank));
    }
    return MOE_OK;
}

/* Events of one time come first, then the network is solved once for all that they changed. */
static int run(struct sim *sim)
{
    for (int rank = 0; rank < sim->s->n_ranks; rank++) MOE_TRY(go_on(sim, rank));
    for (;; sim->out->events++) {
        moe_ps event = sim->heap.n ? sim->heap.event[0].time : MOE_NEVER;
        moe_ps turn = on_host(sim) ? moe_turns_next(&sim->turns) : MOE_NEVER;
        moe_ps first = event < turn ? event : turn;
        moe_ps flow = first > sim->now ? moe_network_next(&sim->net) : MOE_NEVER;
        if (first == MOE_NEVER && flow == MOE_NEVER) return check_hang(sim);
        sim->now = flow <= first ? flow : first;
        if (sim->now >= INT64_MAX / 2) return moe_fail(MOE_EINPUT, "the step lasts more than 50 days");
        if (flow <= first) {
            moe_network_end(&sim->net, flow);
            for (int f = 0; f < sim->net.n_ended; f++) end_flow(sim, &sim->net.ended[f]);
            continue;
        }
        if (turn <= event) {
            MOE_TRY(end_turns(sim));
            continue;
        }
        struct moe_event e;
        moe_heap_pop(&sim->heap, &e);
        if (e.kind == EVENT_HOST)
            host_is_free(sim, e.a);
        else if (on_host(sim)) { /* a collective: to leave it takes a core */
            take_turn(sim, e.a, e.b, 0);
            continue;
        } else
            op_is_done(sim, e.a, e.b);
        MOE_TRY(go_on(sim, e.a));
    }
}

static void make_meets(struct sim *sim)
{
    const struct moe_schedule *s = sim->s;
    size_t n = 2 * (size_t)s->n_comms * (size_t)s->n_ranks;
    sim->meet = moe_alloc(n, sizeof *sim->meet);
    sim->members = moe_alloc(n, sizeof *sim->members);
    for (int c = 0; c < s->n_comms; c++)
        for (int g = 0; g < s->comms[c].n_groups; g++)
            for (int nth = 0; nth < 2; nth++) {
                struct meet *m = meet_at(sim, c, g, nth);
                *m = (struct meet){.comm = c, .group = g, .size = moe_group_size(&s->comms[c], g)};
                m->member =
                    &sim->members[(size_t)(2 * c + nth) * (size_t)s->n_ranks + (size_t)s->comms[c].first[g]];
            }
}

static void make_ranks(struct sim *sim)
{
    size_t n_ranks = (size_t)sim->s->n_ranks, lanes = (size_t)lane_of_comm(sim->s->n_comms);
    sim->rank = moe_alloc(n_ranks, sizeof *sim->rank);
    sim->lanes = moe_alloc(n_ranks * (MOE_STREAM_COUNT + 2) * lanes, sizeof(int));
    sim->ops = moe_alloc(n_ranks, sizeof *sim->ops);
    int *next = sim->lanes;
    for (size_t i = 0; i < n_ranks; i++) {
        struct rank *r = &sim->rank[i];
        r->done = next;
        r->host.passed = next += lanes;
        for (int s = 0; s < MOE_STREAM_COUNT; s++) r->stream[s].passed = next += lanes;
        next += lanes;
    }
}

/* Errors of one kind go the same way, those of kernels and collectives their own; of these only the exposed
 * part is seen. Members wait for what kernels of others take longer. */
static double step_error(const struct moe_sim_result *out, double comm_error_us, double kernels_error)
{
    double comm_us = out->comm_us > 0 ? comm_error_us / out->comm_us * out->exposed_us : 0;
    double us = out->compute_us + out->waiting_us,
           kernels_us = us * (kernels_error > 0 || !us ? kernels_error : NAN);
    return out->step ? hypot(comm_us, kernels_us) / ((double)out->step * 1e-6) : 0;
}

/* How far off kernels may be; 0: not known. */
static double kernel_error(const struct sim *sim)
{
    for (int i = 0; i < sim->s->n_roles; i++)
        for (int b = 0; b < sim->s->roles[i].n_blocks; b++)
            for (int o = 0; o < sim->s->roles[i].blocks[b].n_ops; o++)
                if (sim->s->roles[i].blocks[b].ops[o].type == MOE_BF16) return sim->topo->gemm_error;
    return sim->topo->kernel_error;
}

static void make_result(struct sim *sim)
{
    struct moe_sim_result *out = sim->out;
    double error_us = 0;
    double to_us = 1e-6 / sim->s->n_ranks; /* of a sum over ranks, in ps */
    double spent[SPENT_COUNT] = {0};       /* sums over up to 16,384 ranks do not fit 63 bits of ps */
    out->step = sim->now;
    for (int rank = 0; rank < sim->s->n_ranks; rank++) {
        change(sim, rank, COMPUTE, 0); /* the last interval */
        for (int what = 0; what < SPENT_COUNT; what++) spent[what] += (double)sim->rank[rank].spent[what];
    }
    out->compute_us = spent[COMPUTE] * to_us;
    out->exposed_us = spent[EXPOSED] * to_us;
    out->waiting_us = spent[WAITING] * to_us;
    out->host_us = spent[HOST] * to_us;
    for (int i = 0; i < out->n_rows; i++) {
        out->rows[i].own_us *= to_us;
        out->rows[i].wait_us *= to_us;
        out->rows[i].error_us *= to_us;
        if (out->rows[i].kind == MOE_COLLECTIVE) out->comm_us += out->rows[i].own_us;
        error_us += out->rows[i].error_us;
    }
    out->step_error = step_error(out, error_us, kernel_error(sim));
    memcpy(out->bytes, sim->net.bytes, sizeof out->bytes);
}

int moe_simulate(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                 struct moe_sim_result *out)
{
    return moe_simulate_seen(s, r, t, NULL, NULL, out);
}

int moe_simulate_seen(const struct moe_schedule *s, const struct moe_routing *r, struct moe_topo *t,
                      void (*see)(void *ctx, const struct moe_sim_seen *seen), void *ctx,
                      struct moe_sim_result *out)
{
    struct sim sim = {.s = s, .topo = t, .out = out, .see = see, .ctx = ctx};
    *out = (struct moe_sim_result){0};
    moe_topo_build(t, s->n_ranks);
    moe_network_init(&sim.net, t);
    if (t->cores)
        moe_turns_init(&sim.turns, s->n_ranks, (int)t->gpus_per_node, (int)t->cores, moe_time(t->slice_s, 1));
    sim.values = moe_values_new(s, r);
    moe_rows_make(&sim.rows, s, out);
    make_meets(&sim);
    make_ranks(&sim);
    int err = run(&sim);
    if (err == MOE_OK) make_result(&sim);
    moe_heap_free(&sim.heap);
    moe_network_free(&sim.net);
    moe_turns_free(&sim.turns);
    moe_values_free(sim.values);
    free(sim.rank);
    free(sim.lanes);
    free(sim.ops);
    free(sim.plan.flow);
    free(sim.meet);
    free(sim.members);
    free(sim.rows.of);
    return err;
}

void moe_sim_free(struct moe_sim_result *out)
{
    free(out->rows);
    *out = (struct moe_sim_result){0};
}
