/* check.c - see check.h.
 *
 * Ranks advance in turn, each as far as it can; when all members of a group stand at a collective of the same
 * communicator, the collective is compared and done. No progress while some rank is unfinished: a hang. */
#include "sim/check/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define X(name, text) text,
const char *const moe_severity_text[] = {MOE_SEVERITIES(X)};
#undef X
#define X(number, text) {number, text},
const struct moe_check_class moe_check_classes[] = {MOE_CHECK_CLASSES(X)};
#undef X
const int moe_check_n_classes = sizeof moe_check_classes / sizeof *moe_check_classes;

static struct moe_number *new_numbers(const struct moe_schedule *s)
{
    struct moe_number *numbers = moe_alloc((size_t)s->n_exprs, sizeof *numbers);
    for (int i = 0; i < s->n_exprs; i++) {
        const struct moe_expr *e = &s->exprs[i];
        bool leaf = e->op == MOE_EXPR_CONST || e->op == MOE_EXPR_PLACE,
             named = e->op == MOE_EXPR_SYM || e->op == MOE_EXPR_SUM || e->op == MOE_EXPR_OTHER;
        numbers[i].is_fixed = leaf || (!named && numbers[e->a].is_fixed && numbers[e->b].is_fixed);
    }
    return numbers;
}

int64_t moe_check_eval(const struct moe_checker *c, struct moe_env env, int expr, int rank, int layer)
{
    struct moe_number *n = &c->numbers[expr];
    if (!n->is_fixed) return moe_eval(c->s, env, expr, rank, layer, 0);
    if (n->rank != rank + 1)
        *n = (struct moe_number){true, rank + 1, moe_eval(c->s, env, expr, rank, layer, 0)};
    return n->value;
}

/* ---- where a rank is ---- */

static struct moe_here here_of(const struct moe_checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    int instance = c->place[rank].instance, op = c->place[rank].op;
    struct moe_here h = {0};
    while (instance < role->n_instances && op >= role->blocks[role->itinerary[instance].block].n_ops) {
        instance++;
        op = 0;
    }
    if (instance == role->n_instances) return h;
    h.block_id = role->itinerary[instance].block;
    h.layer = role->itinerary[instance].layer;
    h.block = &role->blocks[h.block_id];
    h.op = &h.block->ops[op];
    return h;
}

static void step_over(struct moe_checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    struct moe_place *p = &c->place[rank];
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

/* Has the rank no element of it, which a collective that it leaves out would have brought? */
static bool is_left_empty(const struct moe_checker *c, int rank, const struct moe_here *h, struct moe_ref ref)
{
    return !ref.shift && !ref.micro &&
           moe_check_eval(c, c->device, c->s->buffers[ref.buffer].extent, rank, h->layer) == 0;
}

static unsigned char *written(const struct moe_checker *c, int rank, struct moe_ref ref, int layer)
{
    return &c->written[moe_check_place(c, rank, ref.buffer, moe_slot(c->s, ref, layer))];
}

/* Does an operation that reads what nothing wrote not look at it? */
static bool looks_away(struct moe_checker *c, int rank, const struct moe_here *h, int read)
{
    if (h->op->kind == MOE_COLLECTIVE) {
        const struct moe_buffer *b = &c->s->buffers[h->op->reads[0].buffer];
        if (b->role == MOE_BUF_INDEX || b->role == MOE_BUF_COUNTS ||
            moe_eval(c->s, c->host, b->extent, rank, h->layer, 0) == MOE_UNKNOWN)
            return false; /* a run would ask for it */
        return read >= 0 && moe_check_enter(c, rank, h) && !c->place[rank].send.total;
    }
    return moe_check_ignores(h->op, read) || moe_check_idle(c, rank, h);
}

/* Steps of the list go parameter by parameter: one verdict for all of a step. */
static struct moe_label step_label(const struct moe_checker *c, const struct moe_here *h)
{
    struct moe_label at = moe_check_label(h);
    for (int i = 0; i < c->s->n_params && h->op->line && h->op->n_writes; i++) {
        const struct moe_param *p = &c->s->params[i];
        int to = h->op->writes[0].buffer;
        if (p->buffer >= 0 && (to == p->grad || to == p->buffer))
            return moe_check_about(at, "the step for ", p, h->op->line);
    }
    return at;
}

static void check_reads(struct moe_checker *c, int rank, const struct moe_here *h)
{
    for (int i = 0; i < h->op->n_reads + h->op->n_writes; i++) {
        bool write = i >= h->op->n_reads;
        struct moe_ref ref = write ? h->op->writes[i - h->op->n_reads] : h->op->reads[i];
        if ((write && !ref.accumulate) || *written(c, rank, ref, h->layer)) continue;
        if (is_left_empty(c, rank, h, ref) || looks_away(c, rank, h, write ? -1 : i)) continue;
        moe_check_verdict(c, 6, rank, step_label(c, h), "%s %s, which nothing wrote before",
                          write ? "adds to" : "reads", c->s->buffers[ref.buffer].name);
    }
}

/* Adding nothing to what nothing wrote leaves it so. */
static void mark_writes(struct moe_checker *c, int rank, const struct moe_here *h)
{
    for (int i = 0; i < h->op->n_writes; i++) {
        unsigned char *w = written(c, rank, h->op->writes[i], h->layer);
        if (!*w && !(h->op->writes[i].accumulate && moe_check_idle(c, rank, h))) *w = 1;
    }
}

/* Does the rank enter it at all? What it does not write, others do not read without a verdict. */
static bool is_left_out(const struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    return op->kind == MOE_COLLECTIVE && op->when && !moe_eval(c->s, c->host, op->when, rank, h->layer, 0);
}

/* One that is above 63 bits is told where it divides. */
static bool lacks_factor(struct moe_checker *c, int rank, const struct moe_here *h, int expr)
{
    return expr && moe_check_eval(c, c->host, expr, rank, h->layer) == MOE_UNKNOWN &&
           !moe_eval_exceeds(c->s, c->host, expr, rank, h->layer, 0);
}

static bool sizes_known(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    if (op->kind == MOE_COLLECTIVE && op->when &&
        moe_eval(c->s, c->host, op->when, rank, h->layer, 0) == MOE_UNKNOWN)
        return false;
    if (op->kind == MOE_COLLECTIVE) return moe_check_enter(c, rank, h);
    for (int i = 0; i < op->n_dims && op->kind == MOE_KERNEL; i++)
        if (moe_check_eval(c, c->host, op->dims[i], rank, h->layer) == MOE_UNKNOWN) return false;
    if (op->kind == MOE_KERNEL &&
        (lacks_factor(c, rank, h, op->divisor) || lacks_factor(c, rank, h, op->times)))
        return false;
    bool grouped = op->kind == MOE_KERNEL && moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    return !grouped || c->host.value(c->host.ctx, op->group, rank, h->layer, 0) != MOE_UNKNOWN;
}

/* Are sizes that are not known known to be above 63 bits? */
static bool sizes_exceed(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    if (op->kind == MOE_COLLECTIVE) return moe_check_exceeds(c, rank, h);
    for (int i = 0; i < op->n_dims; i++)
        if (moe_eval_exceeds(c->s, c->host, op->dims[i], rank, h->layer, 0)) return true;
    return false;
}

/* The host needs the sizes to launch a kernel or to enter a collective. */
static bool check_known(struct moe_checker *c, int rank, const struct moe_here *h)
{
    if (sizes_known(c, rank, h)) return true;
    if (sizes_exceed(c, rank, h)) {
        moe_check_verdict(c, 1, rank, moe_check_label(h), "its sizes exceed 64 bits");
        c->refused = true;
        return false;
    }
    moe_check_verdict(
        c, 2, rank, moe_check_label(h),
        "the host does not know its sizes: no host sync has read the counts, or they say nothing of a peer");
    c->stop = true;
    return false;
}

/* i: of the groups of a grouped product. */
static bool check_need(struct moe_checker *c, int rank, const struct moe_here *h, int i)
{
    const struct moe_op *op = h->op;
    int64_t low = moe_eval(c->s, c->host, op->low, rank, h->layer, i),
            high = moe_eval(c->s, c->host, op->high, rank, h->layer, i);
    int class = op->needs_class ? op->needs_class : 8;
    bool known = low != MOE_UNKNOWN && high != MOE_UNKNOWN;
    if (known && low <= high) return true;
    if (known)
        moe_check_verdict(c, class, rank, moe_check_label(h),
                          "%s, so on rank %d: %" PRId64 " is above %" PRId64, op->needs, rank, low, high);
    else if (moe_eval_exceeds(c->s, c->host, low == MOE_UNKNOWN ? op->low : op->high, rank, h->layer, i))
        moe_check_verdict(c, class, rank, moe_check_label(h), "%s: one of the two exceeds 64 bits",
                          op->needs);
    else
        moe_check_verdict(c, class, rank, moe_check_label(h),
                          "%s: the host does not know one of the two, no host sync has read it", op->needs);
    return false;
}

/* Does the framework go on here? */
static bool check_needs(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    if (op->kind != MOE_KERNEL || !op->needs) return true;
    bool grouped = moe_kernel_cost[op->kernel] == MOE_COST_GROUPED;
    int n = grouped ? moe_symbol_count(c->s, op->group, rank) : 1;
    for (int i = 0; i < n; i++)
        if (!check_need(c, rank, h, i)) {
            c->refused = true;
            return false;
        }
    return true;
}

/* What a buffer holds is counted in 63 bits. The first that holds more is said, on all ranks: others follow
 * from the same numbers. */
static void check_room(struct moe_checker *c)
{
    int said = -1;
    for (int i = 0; i < c->s->n_buffers && said < 0; i++)
        for (int rank = 0; rank < c->s->n_ranks; rank++) {
            int layer = c->s->roles[c->s->role_of[rank]].first_layer;
            if (!moe_holds(c->s, i, moe_slots_each(c->s, i) > 1 ? layer : 0, rank) ||
                !moe_eval_exceeds(c->s, c->device, c->s->buffers[i].extent, rank, layer, 0))
                continue;
            moe_check_verdict(c, 14, rank, moe_check_named(c->s->buffers[i].name, -1),
                              "its elements exceed 64 bits");
            said = i;
        }
    c->stop = said >= 0;
}

/* ---- the run ---- */

/* Runs a rank up to its next collective. */
static bool advance(struct moe_checker *c, int rank)
{
    bool moved = false;
    while (!c->stop && !c->place[rank].waiting) {
        struct moe_here h = here_of(c, rank);
        if (!h.op) break;
        moved = true;
        if (is_left_out(c, rank, &h)) {
            step_over(c, rank);
            continue;
        }
        check_reads(c, rank, &h);
        if (!check_known(c, rank, &h) || !check_needs(c, rank, &h)) break;
        if (h.op->kind == MOE_COLLECTIVE) {
            c->place[rank].waiting = true;
            break;
        }
        if (h.op->kind == MOE_HOST_SYNC) moe_values_host_sync(c->values, h.op, rank, h.layer);
        if (h.op->kind == MOE_KERNEL && moe_check_shapes(c, rank, &h)) {
            moe_values_kernel(c->values, h.op, rank, h.layer);
            moe_check_kernel(c, rank, &h);
        }
        mark_writes(c, rank, &h);
        step_over(c, rank);
    }
    return moved;
}

/* Is every member of the group at a collective of its communicator? */
static bool complete(const struct moe_checker *c, int comm, int group)
{
    const struct moe_comm *m = &c->s->comms[comm];
    for (int i = m->first[group]; i < m->first[group + 1]; i++)
        if (!c->place[m->members[i]].waiting || here_of(c, m->members[i]).op->comm != comm) return false;
    return true;
}

static void meet(struct moe_checker *c, int comm, int group)
{
    const struct moe_comm *m = &c->s->comms[comm];
    const int *ranks = m->members + m->first[group];
    int n = moe_group_size(m, group);
    struct moe_here *h = moe_alloc((size_t)n, sizeof *h);
    for (int i = 0; i < n; i++) h[i] = here_of(c, ranks[i]);
    moe_check_collective(c, h, comm, group);
    for (int i = 0; i < n && !c->stop; i++) {
        mark_writes(c, ranks[i], &h[i]);
        if (!c->place[ranks[i]].recv.total && moe_check_is_summed(c, h[i].op->writes[0]))
            *written(c, ranks[i], h[i].op->writes[0], h[i].layer) = 0; /* what was there is lost */
        step_over(c, ranks[i]);
    }
    free(h);
}

/* Does a rank, where it stands or later, come to a collective that is called so? */
static bool comes_to(const struct moe_checker *c, int rank, const struct moe_here *at, const char *text)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    const struct moe_place *p = &c->place[rank];
    for (int n = p->instance; n < role->n_instances; n++) {
        struct moe_here h = {.block_id = role->itinerary[n].block, .layer = role->itinerary[n].layer};
        h.block = &role->blocks[h.block_id];
        for (int o = n == p->instance ? p->op : 0; o < h.block->n_ops && h.layer == at->layer; o++) {
            h.op = &h.block->ops[o];
            if (h.op->kind == MOE_COLLECTIVE && h.op->comm == at->op->comm && !is_left_out(c, rank, &h) &&
                !strcmp(moe_check_label(&h).text, text))
                return true;
        }
    }
    return false;
}

static bool stands_alike(const struct moe_here *a, const struct moe_here *b)
{
    if (!a->op || !b->op) return a->op == b->op;
    return a->op->comm == b->op->comm && !strcmp(moe_check_label(a).text, moe_check_label(b).text);
}

/* Of the group of a rank that waits at `h`: its members that are elsewhere. One is said; those who stand
 * where it does, or do not come to `h` any more, are added to it; others may wait for them. */
static void add_absent(struct moe_checker *c, int rank, const struct moe_here *h, struct moe_here *first,
                       struct moe_verdict **said)
{
    const struct moe_comm *m = &c->s->comms[h->op->comm];
    const struct moe_label at = moe_check_label(h);
    int group = m->group_of[rank];
    for (int i = m->first[group]; i < m->first[group + 1]; i++) {
        int absent = m->members[i];
        struct moe_here other = here_of(c, absent);
        if (other.op && c->place[absent].waiting && other.op->comm == h->op->comm) continue;
        if (!*said) {
            *first = other;
            *said = moe_check_verdict(
                c, 2, absent, at,
                "never enters it on communicator %s, where rank %d waits: rank %d %s%s%s%s%s", m->name, rank,
                absent, other.op ? "waits at '" : "comes to ", moe_check_label(&other).text,
                other.op ? "'" : "", other.op ? " on communicator " : "",
                other.op ? c->s->comms[other.op->comm].name : "");
        } else if (stands_alike(&other, first) || !comes_to(c, absent, h, at.text))
            moe_check_insert(absent, &(*said)->n_ranks, &(*said)->ranks);
    }
}

/* The first collective that some wait at and others do not enter, with all of those: the rest follows from
 * it. */
static void report_hang(struct moe_checker *c)
{
    struct moe_here at = {0}, first = {0};
    struct moe_verdict *said = NULL;
    bool *seen = NULL; /* [groups of the communicator] */
    for (int r = 0; r < c->s->n_ranks; r++) {
        struct moe_here h = here_of(c, r);
        if (!c->place[r].waiting) continue;
        if (said && !stands_alike(&h, &at)) continue;
        const struct moe_comm *m = &c->s->comms[h.op->comm];
        if (!seen) seen = moe_alloc((size_t)m->n_groups, sizeof *seen), at = h;
        if (seen[m->group_of[r]]) continue;
        add_absent(c, r, &h, &first, &said);
        seen[m->group_of[r]] = true;
        if (said) continue;
        free(seen); /* its group is there: another says what is wrong */
        seen = NULL;
    }
    free(seen);
}

static void tell(const struct moe_checker *c)
{
    double done = 0, all = 0;
    for (int r = 0; r < c->s->n_ranks && c->watch; r++) {
        done += c->place[r].instance;
        all += c->s->roles[c->s->role_of[r]].n_instances;
    }
    if (all > 0) c->watch->moved(c->watch->ctx, done / all);
}

static void run(struct moe_checker *c)
{
    bool moved = true;
    while (moved && !c->stop) {
        moved = false;
        tell(c);
        for (int r = 0; r < c->s->n_ranks; r++) moved |= advance(c, r);
        c->stop |= c->refused; /* when every rank has come as far */
        for (int r = 0; r < c->s->n_ranks && !c->stop; r++) {
            if (!c->place[r].waiting) continue;
            int comm = here_of(c, r).op->comm, group = c->s->comms[comm].group_of[r];
            /* The first member asks for its group. */
            if (c->s->comms[comm].index_of[r] != 0 || !complete(c, comm, group)) continue;
            meet(c, comm, group);
            moved = true;
        }
    }
    for (int r = 0; r < c->s->n_ranks && !c->stop; r++) {
        if (!here_of(c, r).op) continue;
        report_hang(c);
        c->stop = true;
    }
}

/* Where a collective cannot complete, whatever else was seen may follow from it. */
static void keep_causes(struct moe_verdicts *v)
{
    int kept = 0;
    for (int i = 0; i < v->n; i++) {
        int class = v->item[i].check_class;
        bool follows = (class > 2 && class < 7) || class == 16;
        if (!follows) {
            v->item[kept++] = v->item[i];
            continue;
        }
        moe_verdict_free(&v->item[i]);
    }
    v->n = kept;
}

void moe_check(const struct moe_schedule *s, const struct moe_routing *r, struct moe_verdicts *out)
{
    moe_check_watched(s, r, NULL, out);
}

void moe_check_watched(const struct moe_schedule *s, const struct moe_routing *r,
                       const struct moe_check_watch *watch, struct moe_verdicts *out)
{
    moe_assert(s->n_ranks == r->n_ranks && s->n_layers * s->n_micro == r->n_layers &&
               s->n_experts == r->n_experts && s->top_k == r->top_k);
    moe_assert(!memcmp(s->tokens, r->tokens, (size_t)s->n_ranks * sizeof *s->tokens));
    *out = (struct moe_verdicts){0};
    struct moe_checker c = {.s = s,
                            .out = out,
                            .watch = watch,
                            .values = moe_values_new(s, r),
                            .gradients = moe_gradients_new(s)};
    c.device = moe_values_device(c.values);
    c.host = moe_values_host(c.values);
    c.numbers = new_numbers(s);
    c.place = moe_alloc((size_t)s->n_ranks, sizeof *c.place);
    c.first_slot = moe_alloc((size_t)s->n_buffers, sizeof *c.first_slot);
    for (int i = 0; i < s->n_buffers; i++) {
        c.first_slot[i] = (int)c.n_slots;
        c.n_slots += (size_t)s->buffers[i].slots;
    }
    c.written = moe_alloc((size_t)s->n_ranks * c.n_slots, 1);
    c.times = moe_alloc((size_t)s->n_ranks * c.n_slots, 1);
    c.agreed = moe_alloc((size_t)s->n_comms * (size_t)s->n_ranks, sizeof *c.agreed);
    c.covered = moe_alloc((size_t)s->n_roles, sizeof *c.covered);
    c.updates = moe_alloc((size_t)s->n_params, sizeof *c.updates);
    c.fits = moe_alloc((size_t)s->n_params * (size_t)s->n_ranks, sizeof *c.fits);
    c.updates_on = moe_alloc((size_t)s->n_params, sizeof *c.updates_on);
    for (int i = 0; i < s->n_buffers; i++)
        if (s->buffers[i].role == MOE_BUF_INPUT || s->buffers[i].role == MOE_BUF_PARAM ||
            s->buffers[i].role == MOE_BUF_STATE)
            memset(c.written + moe_check_place(&c, 0, i, 0), 1,
                   (size_t)s->buffers[i].slots * (size_t)s->n_ranks);
    moe_check_shapes_open(&c);
    moe_check_claims(&c);
    moe_check_start(&c);
    moe_check_creation(&c);
    moe_check_checkpoint(&c);
    run(&c);
    if (!c.stop) check_room(&c);
    for (int role = 0; role < s->n_roles && !c.stop; role++) {
        moe_check_streams(&c, role);
        moe_check_backward(&c, role);
        moe_check_runs(&c, role);
    }
    for (int rank = 0; rank < s->n_ranks; rank++) moe_check_complete(&c, rank);
    moe_check_coverage(&c);
    if (out->n == 0) moe_check_alike(&c); /* else it says once more what was said */
    bool errors = out->n > 0;
    for (int role = 0; role < s->n_roles && !errors; role++) moe_check_agreement(&c, role);
    if (c.stop) keep_causes(out);
    moe_check_name_params(out);
    moe_check_shapes_close(&c);
    moe_values_free(c.values);
    moe_gradients_free(c.gradients);
    for (int rank = 0; rank < s->n_ranks; rank++) {
        free(c.place[rank].send.own);
        free(c.place[rank].recv.own);
    }
    free(c.numbers);
    free(c.place);
    free(c.first_slot);
    free(c.written);
    free(c.times);
    free(c.taken);
    free(c.agreed);
    free(c.covered);
    free(c.updates);
    free(c.updates_on);
    free(c.fits);
}
