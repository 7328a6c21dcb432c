/* check.c - see check.h.
 *
 * Ranks advance in turn, each as far as it can; when all members of a group stand at a collective of the same
 * communicator, the collective is compared and done. No progress while some rank is unfinished: a hang. */
#include "sim/check.h"

#include "sim/gradient.h"
#include "sim/values.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
const char *const moe_severity_text[] = {MOE_SEVERITIES(X)};
#undef X

struct place { /* where a rank stands */
    int instance, op;
    bool waiting; /* at a collective */
};
struct checker {
    const struct moe_schedule *s;
    struct moe_values *values;
    struct moe_gradients *gradients;
    struct moe_env device, host;
    struct moe_verdicts *out;
    struct place *place; /* [R] */
    int *first_slot;     /* [n_buffers] */
    size_t n_slots;
    unsigned char *written; /* [R, n_slots] */
    bool stop;              /* a collective cannot complete */
};

void moe_verdicts_free(struct moe_verdicts *v)
{
    for (int i = 0; i < v->n; i++) {
        free(v->item[i].ranks);
        free(v->item[i].text);
    }
    free(v->item);
    *v = (struct moe_verdicts){0};
}

/* Adds a verdict, or the rank to the one that says the same of this operation. */
__attribute__((format(printf, 5, 6))) static void add_verdict(struct checker *c, int check_class, int rank,
                                                              const char *op, const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct moe_verdict *v = NULL;
    for (int i = 0; i < c->out->n && !v; i++)
        if (c->out->item[i].check_class == check_class && !strcmp(c->out->item[i].op, op) &&
            !strcmp(c->out->item[i].text, text))
            v = &c->out->item[i];
    if (!v) {
        c->out->item = moe_grow(c->out->item, &c->out->cap, c->out->n + 1, sizeof *c->out->item);
        v = &c->out->item[c->out->n++];
        *v = (struct moe_verdict){
            .check_class = check_class, .severity = MOE_SEVERITY_ERROR, .text = strdup(text)};
        snprintf(v->op, sizeof v->op, "%s", op);
    }
    for (int i = 0; i < v->n_ranks; i++)
        if (v->ranks[i] == rank) return;
    v->ranks = realloc(v->ranks, ((size_t)v->n_ranks + 1) * sizeof *v->ranks);
    moe_assert(v->ranks);
    int i = v->n_ranks++;
    for (; i > 0 && v->ranks[i - 1] > rank; i--) v->ranks[i] = v->ranks[i - 1];
    v->ranks[i] = rank;
}

/* ---- where a rank is ---- */

struct here { /* the operation a rank stands at */
    const struct moe_block *block;
    const struct moe_op *op; /* NULL: the rank is done */
    int block_id, layer;
    char label[2 * MOE_NAME];
};

static struct here here_of(const struct checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    struct place p = c->place[rank];
    struct here h = {.label = "the end of its step"};
    while (p.instance < role->n_instances && p.op >= role->blocks[role->itinerary[p.instance].block].n_ops) {
        p.instance++;
        p.op = 0;
    }
    if (p.instance == role->n_instances) return h;
    h.block_id = role->itinerary[p.instance].block;
    h.layer = role->itinerary[p.instance].layer;
    h.block = &role->blocks[h.block_id];
    h.op = &h.block->ops[p.op];
    moe_op_label(h.block, h.op, h.layer, h.label);
    return h;
}

static void step_over(struct checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    struct place *p = &c->place[rank];
    while (p->op >= role->blocks[role->itinerary[p->instance].block].n_ops) { /* empty blocks */
        p->instance++;
        p->op = 0;
    }
    if (++p->op >= role->blocks[role->itinerary[p->instance].block].n_ops) {
        p->instance++;
        p->op = 0;
    }
    p->waiting = false;
}

/* ---- content: written or not ---- */

static unsigned char *written(struct checker *c, int rank, struct moe_ref ref, int layer)
{
    size_t slot = (size_t)(c->first_slot[ref.buffer] + moe_slot(c->s, ref, layer));
    return &c->written[(size_t)rank * c->n_slots + slot];
}

static void check_reads(struct checker *c, int rank, const struct here *h)
{
    for (int i = 0; i < h->op->n_reads + h->op->n_writes; i++) {
        bool write = i >= h->op->n_reads;
        struct moe_ref ref = write ? h->op->writes[i - h->op->n_reads] : h->op->reads[i];
        if ((write && !ref.accumulate) || *written(c, rank, ref, h->layer)) continue;
        add_verdict(c, 6, rank, h->label, "%s %s, which nothing wrote before", write ? "adds to" : "reads",
                    c->s->buffers[ref.buffer].name);
    }
}

static void mark_writes(struct checker *c, int rank, const struct here *h)
{
    for (int i = 0; i < h->op->n_writes; i++) *written(c, rank, h->op->writes[i], h->layer) = 1;
}

/* ---- gradients ---- */

/* Gradients and norms are followed as sums of contributions. */
static bool is_summed(const struct checker *c, struct moe_ref ref)
{
    enum moe_buffer_role role = c->s->buffers[ref.buffer].role;
    return role == MOE_BUF_GRAD || role == MOE_BUF_NORM;
}

static void judge(struct checker *c, int rank, const struct here *h, const struct moe_param *p, int slot)
{
    double divisor = (double)moe_eval(c->s, c->device, p->divisor, rank, h->layer, 0);
    struct moe_gradient_fault f = moe_gradient_judge(c->gradients, p, slot, rank, divisor);
    bool norm = p->buffer < 0;
    char what[2 * MOE_NAME];
    snprintf(what, sizeof what, "%s%s", norm ? "" : "the gradient of ", p->name);
    if (f.missing)
        add_verdict(c, norm ? 5 : 4, rank, h->label, "%s lacks %d contributions, one of rank %d", what,
                    f.missing, f.missing_rank);
    if (f.extra)
        add_verdict(c, norm ? 5 : 4, rank, h->label,
                    "%s holds %d contributions that are not its own, one of rank %d", what, f.extra,
                    f.extra_rank);
    if (f.factor != 0 && f.divided_in)
        add_verdict(c, norm ? 5 : 3, rank, h->label, "%s is %.6g times what it should be: %s divided by %.6g",
                    what, f.factor, f.divided_in->name, f.divisor);
    else if (f.factor != 0)
        add_verdict(c, norm ? 5 : 3, rank, h->label, "%s is %.6g times what it should be", what, f.factor);
    if (f.clips != 0)
        add_verdict(c, 5, rank, h->label, "%s was clipped %d times too %s", what, abs(f.clips),
                    f.clips > 0 ? "often" : "rarely");
}

static void track_write(struct checker *c, int rank, const struct here *h, struct moe_ref ref)
{
    const struct moe_op *op = h->op;
    int slot = moe_slot(c->s, ref, h->layer);
    switch (op->kernel) {
    case MOE_K_SCALE:
        moe_gradient_divide(c->gradients, ref.buffer, slot, rank,
                            (double)moe_eval(c->s, c->device, op->divisor, rank, h->layer, 0), op);
        return;
    case MOE_K_CLIP: moe_gradient_clip(c->gradients, ref.buffer, slot, rank); return;
    case MOE_K_ZERO: moe_gradient_zero(c->gradients, ref.buffer, slot, rank); return;
    default: moe_gradient_contribute(c->gradients, ref.buffer, slot, rank, h->block_id, op, ref.accumulate);
    }
}

/* A gradient is judged where the update reads it, a norm where the clipping does. */
static void track_gradients(struct checker *c, int rank, const struct here *h)
{
    const struct moe_op *op = h->op;
    bool update = h->block->pass == MOE_UPDATE, clip = op->kernel == MOE_K_CLIP;
    for (int i = 0; i < c->s->n_params && (update || clip); i++)
        for (int r = 0; r < op->n_reads; r++)
            if (op->reads[r].buffer == c->s->params[i].grad && (c->s->params[i].buffer >= 0 ? update : clip))
                judge(c, rank, h, &c->s->params[i], moe_slot(c->s, op->reads[r], h->layer));
    for (int i = 0; i < op->n_writes; i++)
        if (is_summed(c, op->writes[i])) track_write(c, rank, h, op->writes[i]);
}

/* ---- collectives ---- */

static int64_t size_of(const struct checker *c, int expr, int rank, int layer, int index)
{
    return moe_eval(c->s, c->host, expr, rank, layer, index);
}

static int parts(const struct checker *c, int rank, const struct moe_op *op, bool sends)
{
    const struct moe_comm *comm = &c->s->comms[op->comm];
    bool per_peer = sends ? moe_send_per_peer[op->collective] : moe_recv_per_peer[op->collective];
    return per_peer ? moe_group_size(comm, comm->group_of[rank]) : 1;
}

static bool sizes_known(const struct checker *c, int rank, const struct here *h)
{
    const struct moe_op *op = h->op;
    for (int side = 0; side < 2 && op->kind == MOE_COLLECTIVE; side++)
        for (int i = 0; i < parts(c, rank, op, side); i++)
            if (size_of(c, side ? op->send : op->recv, rank, h->layer, i) == MOE_UNKNOWN) return false;
    for (int i = 0; i < op->n_dims && op->kind == MOE_KERNEL; i++)
        if (size_of(c, op->dims[i], rank, h->layer, 0) == MOE_UNKNOWN) return false;
    bool grouped = op->kind == MOE_KERNEL && moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    return !grouped || c->host.value(c->host.ctx, op->group, rank, h->layer, 0) != MOE_UNKNOWN;
}

/* The host needs the sizes to launch a kernel or to enter a collective. */
static void check_known(struct checker *c, int rank, const struct here *h)
{
    if (sizes_known(c, rank, h)) return;
    add_verdict(c, 2, rank, h->label,
                "the host does not know its sizes yet: no host sync has read the counts");
    c->stop = true;
}

/* What a rank sends and receives in all must be what its buffers hold. */
static void check_extent(struct checker *c, int rank, const struct here *h, bool sends)
{
    struct moe_ref ref = sends ? h->op->reads[0] : h->op->writes[0];
    int64_t total = 0;
    for (int i = 0; i < parts(c, rank, h->op, sends); i++)
        total += size_of(c, sends ? h->op->send : h->op->recv, rank, h->layer, i);
    int64_t extent = moe_eval(c->s, c->device, c->s->buffers[ref.buffer].extent, rank, h->layer, 0);
    if (total == extent) return;
    add_verdict(c, 1, rank, h->label, "%s %" PRId64 " elements, but %s holds %" PRId64,
                sends ? "sends" : "receives", total, c->s->buffers[ref.buffer].name, extent);
}

/* Ranks that issue the same list as this one: few have a fault of their own. */
static int alike(const struct checker *c, int rank)
{
    int n = 0;
    for (int r = 0; r < c->s->n_ranks; r++) n += c->s->role_of[r] == c->s->role_of[rank];
    return n;
}

/* The member to name: it stands where the fewest stand, and issues what the fewest issue. */
static int odd_member(const struct checker *c, const struct here *h, const int *ranks, int n)
{
    int odd = 0, fewest = INT32_MAX, fewest_alike = 0;
    for (int i = 0; i < n; i++) {
        int same = 0, like = alike(c, ranks[i]);
        for (int j = 0; j < n; j++) same += !strcmp(h[i].label, h[j].label);
        if (same > fewest || (same == fewest && like >= fewest_alike)) continue;
        fewest = same;
        fewest_alike = like;
        odd = i;
    }
    return odd;
}

static void check_order(struct checker *c, const struct here *h, const int *ranks, int n, const char *comm)
{
    bool same = true;
    for (int i = 1; i < n; i++) same &= !strcmp(h[i].label, h[0].label);
    if (same) return;
    int odd = odd_member(c, h, ranks, n);
    for (int i = 0; i < n; i++) {
        if (!strcmp(h[i].label, h[odd].label)) continue;
        for (int j = 0; j < n; j++)
            if (!strcmp(h[j].label, h[odd].label))
                add_verdict(c, 2, ranks[j], h[i].label,
                            "enters '%s' on communicator %s where rank %d enters '%s'", h[odd].label, comm,
                            ranks[i], h[i].label);
        c->stop = true;
        return;
    }
}

static void check_pair(struct checker *c, const struct here *h, const int *ranks, int i, int j)
{
    int64_t sends = size_of(c, h[i].op->send, ranks[i], h[i].layer, j);
    int64_t expects = size_of(c, h[j].op->recv, ranks[j], h[j].layer, i);
    if (sends == expects && h[i].op->type == h[j].op->type && h[i].op->collective == h[j].op->collective)
        return;
    int named = alike(c, ranks[j]) < alike(c, ranks[i]) ? j : i;
    add_verdict(c, 1, ranks[named], h[named].label,
                "rank %d sends %" PRId64 " %s (%s) to rank %d, which expects %" PRId64 " %s (%s)", ranks[i],
                sends, moe_type_text[h[i].op->type], moe_collective_text[h[i].op->collective], ranks[j],
                expects, moe_type_text[h[j].op->type], moe_collective_text[h[j].op->collective]);
    c->stop = true;
}

static void apply(struct checker *c, const struct here *h, const int *ranks, int n, int comm, int group)
{
    const struct moe_op **ops = moe_alloc((size_t)n, sizeof *ops);
    for (int i = 0; i < n; i++) ops[i] = h[i].op;
    moe_values_collective(c->values, ops, comm, group, h[0].layer);
    free(ops);
    struct moe_ref to = h[0].op->writes[0];
    if (is_summed(c, to) && h[0].op->collective == MOE_ALLREDUCE)
        moe_gradient_sum(c->gradients, to.buffer, moe_slot(c->s, to, h[0].layer), ranks, n);
    for (int i = 0; i < n; i++) {
        mark_writes(c, ranks[i], &h[i]);
        step_over(c, ranks[i]);
    }
}

/* All members stand at a collective of this communicator. */
static void meet(struct checker *c, int comm, int group)
{
    const struct moe_comm *m = &c->s->comms[comm];
    const int *ranks = m->members + m->first[group];
    int n = moe_group_size(m, group);
    struct here *h = moe_alloc((size_t)n, sizeof *h);
    for (int i = 0; i < n; i++) h[i] = here_of(c, ranks[i]);
    check_order(c, h, ranks, n, m->name);
    for (int i = 0; i < n && !c->stop; i++)
        for (int j = 0; j < n && !c->stop; j++) check_pair(c, h, ranks, i, j);
    for (int i = 0; i < n && !c->stop; i++) {
        check_extent(c, ranks[i], &h[i], true);
        check_extent(c, ranks[i], &h[i], false);
    }
    if (!c->stop) apply(c, h, ranks, n, comm, group);
    free(h);
}

/* ---- the run ---- */

/* Runs a rank up to its next collective. */
static bool advance(struct checker *c, int rank)
{
    bool moved = false;
    while (!c->stop && !c->place[rank].waiting) {
        struct here h = here_of(c, rank);
        if (!h.op) break;
        moved = true;
        check_reads(c, rank, &h);
        check_known(c, rank, &h);
        if (c->stop) break;
        if (h.op->kind == MOE_COLLECTIVE) {
            c->place[rank].waiting = true;
            break;
        }
        if (h.op->kind == MOE_HOST_SYNC) moe_values_host_sync(c->values, h.op, rank, h.layer);
        if (h.op->kind == MOE_KERNEL) {
            moe_values_kernel(c->values, h.op, rank, h.layer);
            track_gradients(c, rank, &h);
        }
        mark_writes(c, rank, &h);
        step_over(c, rank);
    }
    return moved;
}

/* Is every member of the rank's group at a collective of the rank's communicator? Asked once a group. */
static bool complete(const struct checker *c, int rank, int comm)
{
    const struct moe_comm *m = &c->s->comms[comm];
    int group = m->group_of[rank];
    for (int i = m->first[group]; i < m->first[group + 1]; i++)
        if (!c->place[m->members[i]].waiting || here_of(c, m->members[i]).op->comm != comm) return false;
    return true;
}

static void report_hang(struct checker *c)
{
    for (int r = 0; r < c->s->n_ranks; r++) {
        struct here h = here_of(c, r);
        if (!c->place[r].waiting) continue;
        const struct moe_comm *m = &c->s->comms[h.op->comm];
        int group = m->group_of[r];
        for (int i = m->first[group]; i < m->first[group + 1]; i++) {
            struct here other = here_of(c, m->members[i]);
            if (other.op && c->place[m->members[i]].waiting && other.op->comm == h.op->comm) continue;
            add_verdict(c, 2, m->members[i], h.label,
                        "never enters it on communicator %s, where rank %d waits: it waits at '%s'%s%s",
                        m->name, r, other.label, other.op ? " on communicator " : "",
                        other.op ? c->s->comms[other.op->comm].name : "");
            return; /* the first one: the rest follows from it */
        }
    }
}

static void run(struct checker *c)
{
    bool moved = true;
    while (moved && !c->stop) {
        moved = false;
        for (int r = 0; r < c->s->n_ranks; r++) moved |= advance(c, r);
        for (int r = 0; r < c->s->n_ranks && !c->stop; r++) {
            if (!c->place[r].waiting) continue;
            int comm = here_of(c, r).op->comm;
            if (!complete(c, r, comm)) continue;
            meet(c, comm, c->s->comms[comm].group_of[r]);
            moved = true;
        }
    }
    for (int r = 0; r < c->s->n_ranks && !c->stop; r++) {
        if (!here_of(c, r).op) continue;
        report_hang(c);
        c->stop = true;
    }
}

/* ---- what must be there whatever the routing ---- */

static uint32_t served(const struct moe_role *role, int block, int id)
{
    uint32_t mask = 0;
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++)
            if (role->blocks[b].ops[o].of_block == block && role->blocks[b].ops[o].of_id == id)
                mask |= role->blocks[b].ops[o].serves;
    return mask;
}

/* Every differentiable read of a forward operation has its backward, and every backward its forward. */
static void check_coverage(struct checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    for (int n = 0; n < role->n_instances; n++) {
        int b = role->itinerary[n].block;
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            char label[2 * MOE_NAME];
            moe_op_label(&role->blocks[b], op, role->itinerary[n].layer, label);
            uint32_t lacks = op->needs_grad & ~served(role, b, op->id);
            for (int i = 0; i < op->n_reads; i++)
                if (lacks >> i & 1)
                    add_verdict(c, 4, rank, label, "has no backward operation for %s",
                                c->s->buffers[op->reads[i].buffer].name);
            bool orphan = op->serves != 0;
            for (int f = 0; orphan && f < role->blocks[op->of_block].n_ops; f++)
                orphan = role->blocks[op->of_block].ops[f].id != op->of_id;
            if (orphan) add_verdict(c, 4, rank, label, "is the backward of an operation that is not there");
        }
    }
}

/* How often a step of this role runs a kernel that passes the test. */
static int runs(const struct moe_role *role, const struct moe_param *p,
                bool (*test)(const struct moe_block *b, const struct moe_op *op, const struct moe_param *p))
{
    int n = 0;
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        for (int o = 0; o < block->n_ops; o++) n += test(block, &block->ops[o], p);
    }
    return n;
}

static bool updates(const struct moe_block *b, const struct moe_op *op, const struct moe_param *p)
{
    return b->pass == MOE_UPDATE && op->n_writes && op->writes[0].buffer == p->buffer;
}

static bool measures(const struct moe_block *b, const struct moe_op *op, const struct moe_param *p)
{
    return b->pass == MOE_CLIPPING && op->kernel == MOE_K_SQNORM && op->reads[0].buffer == p->grad;
}

/* Every parameter was updated and is in the norm it is clipped by; every output was written. */
static void check_results(struct checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    for (int i = 0; i < c->s->n_params; i++) {
        const struct moe_param *p = &c->s->params[i];
        if (p->buffer < 0) continue;
        int n = runs(role, p, updates), slots = c->s->buffers[p->buffer].slots;
        if (n != slots)
            add_verdict(c, 4, rank, p->name, "is updated %d times in a step, expected %d", n, slots);
        n = p->clips ? runs(role, p, measures) : slots;
        if (n != slots)
            add_verdict(c, 5, rank, p->name, "is %d times in the norm of the gradient, expected %d", n,
                        slots);
    }
    for (int i = 0; i < c->s->n_buffers; i++)
        for (int slot = 0; slot < c->s->buffers[i].slots && c->s->buffers[i].role == MOE_BUF_OUTPUT; slot++)
            if (!*written(c, rank, (struct moe_ref){.buffer = i}, slot))
                add_verdict(c, 6, rank, c->s->buffers[i].name, "is never written");
}

/* Where a collective cannot complete, whatever else was seen may follow from it. */
static void keep_causes(struct moe_verdicts *v)
{
    int kept = 0;
    for (int i = 0; i < v->n; i++) {
        if (v->item[i].check_class <= 2) {
            v->item[kept++] = v->item[i];
            continue;
        }
        free(v->item[i].ranks);
        free(v->item[i].text);
    }
    v->n = kept;
}

void moe_check(const struct moe_schedule *s, const struct moe_routing *r, struct moe_verdicts *out)
{
    *out = (struct moe_verdicts){0};
    struct checker c = {
        .s = s, .out = out, .values = moe_values_new(s, r), .gradients = moe_gradients_new(s)};
    c.device = moe_values_device(c.values);
    c.host = moe_values_host(c.values);
    c.place = moe_alloc((size_t)s->n_ranks, sizeof *c.place);
    c.first_slot = moe_alloc((size_t)s->n_buffers, sizeof *c.first_slot);
    for (int i = 0; i < s->n_buffers; i++) {
        c.first_slot[i] = (int)c.n_slots;
        c.n_slots += (size_t)s->buffers[i].slots;
    }
    c.written = moe_alloc((size_t)s->n_ranks * c.n_slots, 1);
    for (int rank = 0; rank < s->n_ranks; rank++)
        for (int i = 0; i < s->n_buffers; i++)
            if (s->buffers[i].role == MOE_BUF_INPUT || s->buffers[i].role == MOE_BUF_PARAM ||
                s->buffers[i].role == MOE_BUF_STATE)
                memset(c.written + (size_t)rank * c.n_slots + c.first_slot[i], 1,
                       (size_t)s->buffers[i].slots);
    run(&c);
    for (int rank = 0; rank < s->n_ranks; rank++) {
        check_coverage(&c, rank);
        check_results(&c, rank);
    }
    if (c.stop) keep_causes(out);
    moe_values_free(c.values);
    moe_gradients_free(c.gradients);
    free(c.place);
    free(c.first_slot);
    free(c.written);
}
