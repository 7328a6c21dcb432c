/* gradient_check.c - see internal.h. */
#include "sim/check/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool moe_check_is_summed(const struct moe_checker *c, struct moe_ref ref)
{
    enum moe_buffer_role role = c->s->buffers[ref.buffer].role;
    return role == MOE_BUF_GRAD || role == MOE_BUF_NORM;
}

/* Of a whole slot nobody asks how large it is. */
static struct moe_cell cell_of(const struct moe_checker *c, int rank, struct moe_ref ref, int layer)
{
    struct moe_cell out = {ref.buffer, moe_slot(c->s, ref, layer), rank, 0, MOE_CELL_ALL};
    if (!ref.n) return out;
    out.begin = moe_check_eval(c, c->device, ref.begin, rank, layer);
    out.n = moe_check_eval(c, c->device, ref.n, rank, layer);
    return out;
}

/* Of all elements where the backward pass computes it, or of a norm. */
static struct moe_gradient_fault judge(struct moe_checker *c, int rank, const struct moe_param *p, int slot,
                                       int clips)
{
    struct moe_cell in = cell_of(c, rank, (struct moe_ref){.buffer = p->grad}, 0);
    in.slot = slot;
    return moe_gradient_judge(c->gradients, c->device, p, slot, in, 0, clips);
}

static unsigned char *times(struct moe_checker *c, int rank, int buffer, int slot)
{
    return &c->times[moe_check_place(c, rank, buffer, slot)];
}

static void count(unsigned char *n)
{
    if (*n < 255) ++*n;
}

/* How often an operation reads a slot. */
static int n_reads(const struct moe_checker *c, const struct moe_here *h, int buffer, int slot)
{
    int n = 0;
    for (int r = 0; r < h->op->n_reads; r++)
        n += h->op->reads[r].buffer == buffer && moe_slot(c->s, h->op->reads[r], h->layer) == slot;
    return n;
}

/* One rate for all, and for every layer and copy of a parameter one optimizer and decay. Which of two is
 * wrong nobody knows: both are named. */
static void compare_update(struct moe_checker *c, int rank, const struct moe_here *h, int param)
{
    const struct moe_op *op = h->op, *first;
    if ((op->kernel != MOE_K_SGD && op->kernel != MOE_K_ADAMW) || moe_check_idle(c, rank, h)) return;
    if (!c->updates[param]) c->updates[param] = op, c->updates_on[param] = rank;
    if (!c->first_update) c->first_update = op, c->first_update_on = rank;
    first = c->first_update;
    if (first->factor != op->factor)
        moe_check_verdict(c, 16, rank, moe_check_label(h), "has a rate of %.6g, '%s' on rank %d has %.6g",
                          op->factor, first->name, c->first_update_on, first->factor);
    first = c->updates[param];
    if (first->kernel != op->kernel || first->decay != op->decay)
        moe_check_verdict(c, 16, rank, moe_check_label(h),
                          "is %s with a decay of %.6g, on rank %d it is %s with %.6g",
                          moe_kernel_text[op->kernel], op->decay, c->updates_on[param],
                          moe_kernel_text[first->kernel], first->decay);
}

static struct moe_taken taken(const struct moe_checker *c, int rank, int buffer, int slot)
{
    return c->taken ? c->taken[moe_check_place(c, rank, buffer, slot)] : (struct moe_taken){0};
}

/* Most schedules have no parts. */
static struct moe_taken *take(struct moe_checker *c, int rank, int buffer, int slot)
{
    if (!c->taken) c->taken = moe_alloc((size_t)c->s->n_ranks * c->n_slots, sizeof *c->taken);
    return &c->taken[moe_check_place(c, rank, buffer, slot)];
}

/* A part of a parameter is updated by the same part of its gradient, wherever that was reduced. */
static void update_part(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p,
                        struct moe_ref ref)
{
    struct moe_cell of = cell_of(c, rank, ref, h->layer), in = cell_of(c, rank, h->op->reads[1], h->layer);
    struct moe_gradient_fault f =
        moe_gradient_judge(c->gradients, c->device, p, of.slot, in, of.begin, p->clips);
    struct moe_taken *t = take(c, rank, p->grad, of.slot);
    moe_check_gradient(c, rank, h, p, &f);
    t->part = true;
    t->reported |= !moe_gradient_is_right(&f);
    moe_gradient_update(c->gradients, of, true);
}

/* A parameter is updated from itself and from its own gradient, which is judged here. */
static void update(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p,
                   struct moe_ref ref)
{
    int slot = moe_slot(c->s, ref, h->layer);
    bool part = h->op->n_reads > 1 && ref.n;
    if (h->op->kernel == MOE_K_COPY) return; /* moe_check_complete looks at what it left */
    count(times(c, rank, p->buffer, slot));
    if (((!part && n_reads(c, h, p->grad, slot) != 1) || n_reads(c, h, p->buffer, slot) != 1) &&
        !moe_check_idle(c, rank, h))
        moe_check_verdict(c, 4, rank, moe_check_label(h), "does not read %s and its gradient", p->name);
    compare_update(c, rank, h, (int)(p - c->s->params));
    if (part) {
        update_part(c, rank, h, p, ref);
        return;
    }
    struct moe_gradient_fault f = judge(c, rank, p, slot, p->clips);
    moe_check_gradient(c, rank, h, p, &f);
    moe_gradient_update(c->gradients, cell_of(c, rank, ref, h->layer), false);
    if (!moe_gradient_is_right(&f))
        *times(c, rank, p->grad, slot) =
            !moe_is_copy(c->s, p->buffer, rank); /* the norm took what is reported here */
}

/* Of the ranks of its own stage, a norm covers those that split the parameter, or the rank alone where every
 * rank holds all of it. */
static bool find_norm(const struct moe_checker *c, int rank, int buffer, const struct moe_param *p)
{
    const struct moe_schedule *s = c->s;
    int stage = s->roles[s->role_of[rank]].first_layer, i = 0;
    while (i < s->n_params && (s->params[i].buffer >= 0 || s->params[i].grad != buffer)) i++;
    if (i == s->n_params) return true;
    const struct moe_comm *over = &s->comms[s->params[i].replicas],
                          *split = p->shard < 0 ? NULL : &s->comms[p->shard];
    int g = over->group_of[rank], n = 0;
    for (int m = over->first[g]; m < over->first[g + 1]; m++) {
        int member = over->members[m];
        if (s->roles[s->role_of[member]].first_layer != stage) continue;
        n++;
        if (split ? split->group_of[member] != split->group_of[rank] : member != rank) return false;
    }
    return n == (split ? moe_group_size(split, split->group_of[rank]) : 1);
}

/* The same in every layer. */
static bool norm_is_for(struct moe_checker *c, int rank, int buffer, const struct moe_param *p)
{
    struct moe_fits *f = &c->fits[(p - c->s->params) * c->s->n_ranks + rank];
    if (f->norm != buffer + 1) *f = (struct moe_fits){buffer + 1, find_norm(c, rank, buffer, p)};
    return f->fits;
}

/* A norm takes a gradient that is right and not clipped yet; others do not count. */
static void measure(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p)
{
    struct moe_ref from = h->op->reads[0];
    if (from.buffer != p->grad || c->s->buffers[h->op->writes[0].buffer].role != MOE_BUF_NORM) return;
    int slot = moe_slot(c->s, from, h->layer);
    if (!norm_is_for(c, rank, h->op->writes[0].buffer, p)) {
        moe_check_verdict(
            c, 5, rank, moe_check_label(h),
            "measures %s by %s, which is summed over other ranks than those that hold a part of it", p->name,
            c->s->buffers[h->op->writes[0].buffer].name);
        return;
    }
    struct moe_gradient_fault f = judge(c, rank, p, slot, 0);
    if (moe_gradient_is_right(&f) && f.clips == 0) count(times(c, rank, p->grad, slot));
}

/* The same of a part, which lies where it was reduced. */
static void measure_part(struct moe_checker *c, int rank, const struct moe_here *h)
{
    struct moe_cell in = cell_of(c, rank, h->op->reads[0], h->layer), of;
    int norm = h->op->writes[0].buffer;
    if (c->s->buffers[norm].role != MOE_BUF_NORM || !moe_gradient_owner(c->gradients, in, &of)) return;
    for (int i = 0; i < c->s->n_params; i++) {
        const struct moe_param *p = &c->s->params[i];
        if (p->buffer < 0 || p->grad != of.buffer) continue;
        struct moe_gradient_fault f =
            moe_gradient_judge(c->gradients, c->device, p, of.slot, in, of.begin, 0);
        struct moe_taken *t = take(c, rank, of.buffer, of.slot);
        t->by = h->op;
        if (!moe_gradient_is_right(&f) || f.clips) continue;
        t->begin = of.begin;
        t->n = of.n;
        t->norm = norm;
        t->times++;
    }
}

/* Clipping reads every norm once, each judged where it is read first. */
static void clip(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p)
{
    int n = n_reads(c, h, p->grad, 0);
    if (n != 1 && !moe_check_idle(c, rank, h))
        moe_check_verdict(c, 5, rank, moe_check_label(h), "reads %s %d times, expected once", p->name, n);
    if (!c->written[moe_check_place(c, rank, p->grad, 0)]) return; /* that is said where it is read */
    unsigned char *seen = times(c, rank, p->grad, 0);
    struct moe_gradient_fault f = judge(c, rank, p, 0, 0);
    if (!*seen) moe_check_gradient(c, rank, h, p, &f);
    *seen = 1;
    if (moe_check_idle(c, rank, h)) return;
    if (!c->clips) c->clips = h->op, c->clips_on = rank;
    if (c->clips->factor != h->op->factor)
        moe_check_verdict(c, 5, rank, moe_check_label(h), "clips to a norm of %.6g, rank %d to %.6g",
                          h->op->factor, c->clips_on, c->clips->factor);
}

/* A factor: one that is not there is 1. */
static double number(const struct moe_checker *c, const struct moe_here *h, int rank, int expr)
{
    return expr ? (double)moe_check_eval(c, c->device, expr, rank, h->layer) : 1;
}

static void track_write(struct moe_checker *c, int rank, const struct moe_here *h, struct moe_ref ref)
{
    const struct moe_op *op = h->op;
    struct moe_cell from = cell_of(c, rank, op->n_reads ? op->reads[0] : ref, h->layer),
                    to = cell_of(c, rank, ref, h->layer);
    switch (op->kernel) {
    case MOE_K_SCALE:
        moe_gradient_divide(c->gradients, from, to,
                            number(c, h, rank, op->divisor) / number(c, h, rank, op->times), op);
        return;
    case MOE_K_CLIP: moe_gradient_clip(c->gradients, from, to); return;
    case MOE_K_COPY: moe_gradient_copy(c->gradients, from, to); return;
    case MOE_K_ZERO: moe_gradient_zero(c->gradients, to); return;
    default: moe_gradient_contribute(c->gradients, to, h->block_id, op, ref.accumulate);
    }
}

/* A product of tokens and factors may be too large a number to divide, or to multiply, by. */
static void check_factor(struct moe_checker *c, int rank, const struct moe_here *h, int expr,
                         const char *what)
{
    if (!expr || moe_eval(c->s, c->device, expr, rank, h->layer, 0) != MOE_UNKNOWN) return;
    bool exceeds = moe_eval_exceeds(c->s, c->device, expr, rank, h->layer, 0);
    moe_check_verdict(c, h->op->kernel == MOE_K_SCALE ? 3 : 7, rank, moe_check_label(h), "its %s %s", what,
                      exceeds ? "exceeds 64 bits" : "is not known");
}

void moe_check_kernel(struct moe_checker *c, int rank, const struct moe_here *h)
{
    const struct moe_op *op = h->op;
    check_factor(c, rank, h, op->divisor, "divisor");
    check_factor(c, rank, h, op->times, "factor");
    bool judges = op->kernel == MOE_K_SQNORM || op->kernel == MOE_K_CLIP;
    for (int i = 0; i < op->n_writes; i++)
        judges |= c->s->buffers[op->writes[i].buffer].role == MOE_BUF_PARAM;
    for (int i = 0; i < c->s->n_params && judges; i++) {
        const struct moe_param *p = &c->s->params[i];
        for (int w = 0; w < op->n_writes && p->buffer >= 0; w++)
            if (op->writes[w].buffer == p->buffer) update(c, rank, h, p, op->writes[w]);
        if (op->kernel == MOE_K_SQNORM && p->buffer >= 0) measure(c, rank, h, p);
        if (op->kernel == MOE_K_CLIP && p->buffer < 0) clip(c, rank, h, p);
    }
    if (op->kernel == MOE_K_SQNORM && op->reads[0].n) measure_part(c, rank, h);
    for (int i = 0; i < op->n_writes; i++)
        if (moe_check_is_summed(c, op->writes[i]) || op->kernel == MOE_K_COPY)
            track_write(c, rank, h, op->writes[i]);
}

/* How many a cell has; 0 where nobody knows, or where it is more or less than a slot can hold. */
static int64_t elements(const struct moe_checker *c, int rank, struct moe_cell cell, int layer)
{
    int64_t n = cell.n == MOE_CELL_ALL
                    ? moe_check_eval(c, c->device, c->s->buffers[cell.buffer].extent, rank, layer)
                    : cell.n;
    return n > 0 && n < INT64_MAX >> 16 ? n : 0; /* sums over 2^14 ranks stay below 2^63 */
}

/* Each member sums or gathers into its own; what an all-to-all leaves in a gradient is no sum. */
void moe_check_sum(struct moe_checker *c, const struct moe_here *h, const int *ranks, int n)
{
    bool summed = false;
    for (int i = 0; i < n; i++)
        summed |= moe_check_is_summed(c, h[i].op->writes[0]) ||
                  c->s->buffers[h[i].op->writes[0].buffer].role == MOE_BUF_PARAM;
    if (!summed) return;
    struct moe_cell *from = moe_alloc((size_t)n, sizeof *from), *to = moe_alloc((size_t)n, sizeof *to);
    int64_t *part = moe_alloc((size_t)n, sizeof *part);
    for (int i = 0; i < n; i++) {
        from[i] = cell_of(c, ranks[i], h[i].op->reads[0], h[i].layer);
        to[i] = cell_of(c, ranks[i], h[i].op->writes[0], h[i].layer);
        if (h[0].op->collective == MOE_ALLGATHER) from[i].n = elements(c, ranks[i], from[i], h[i].layer);
        part[i] = elements(c, ranks[i], to[i], h[i].layer);
    }
    switch (h[0].op->collective) {
    case MOE_ALLREDUCE: moe_gradient_sum(c->gradients, from, to, n, NULL, h[0].op); break;
    case MOE_REDUCESCATTER: moe_gradient_sum(c->gradients, from, to, n, part, h[0].op); break;
    case MOE_ALLGATHER: moe_gradient_gather(c->gradients, from, to, n); break;
    default:
        for (int i = 0; i < n; i++) moe_gradient_zero(c->gradients, to[i]);
    }
    free(from);
    free(to);
    free(part);
}

static uint32_t served(const struct moe_role *role, int block, int id)
{
    uint32_t mask = 0;
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++)
            if (role->blocks[b].ops[o].of_block == block && role->blocks[b].ops[o].of_id == id)
                mask |= role->blocks[b].ops[o].serves;
    return mask;
}

/* Every differentiable read of a forward operation has its backward, and every backward its forward. Result:
 * false when a verdict says otherwise. */
static bool is_covered(struct moe_checker *c, int rank, struct moe_here *h)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    const struct moe_op *op = h->op;
    uint32_t lacks = op->needs_grad & ~served(role, h->block_id, op->id);
    bool orphan = op->serves != 0, covered = true;
    for (int i = 0; i < op->n_reads; i++)
        if (lacks >> i & 1) {
            moe_check_verdict(c, 4, rank, moe_check_label(h), "has no backward operation for %s",
                              c->s->buffers[op->reads[i].buffer].name);
            covered = false;
        }
    for (int f = 0; orphan && f < role->blocks[op->of_block].n_ops; f++)
        orphan = role->blocks[op->of_block].ops[f].id != op->of_id;
    if (orphan)
        moe_check_verdict(c, 4, rank, moe_check_label(h),
                          "is the backward of an operation that is not there");
    return covered && !orphan;
}

/* Ranks of a role have the same verdicts: where there were none, there are none. */
static void check_coverage(struct moe_checker *c, int rank)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    bool *seen = &c->covered[c->s->role_of[rank]], covered = true;
    for (int n = 0; n < role->n_instances && !*seen; n++) {
        struct moe_here h = {.block_id = role->itinerary[n].block, .layer = role->itinerary[n].layer};
        h.block = &role->blocks[h.block_id];
        for (int o = 0; o < h.block->n_ops; o++) {
            h.op = &h.block->ops[o];
            covered &= is_covered(c, rank, &h);
        }
    }
    *seen |= covered;
}

static struct moe_label label_of(const struct moe_checker *c, const struct moe_param *p, int slot,
                                 const struct moe_op *by)
{
    struct moe_label at = moe_check_named(p->name, c->s->buffers[p->grad].slots > 1 ? slot : -1);
    return moe_check_about(at, "", p, moe_check_line(c, by));
}

/* Every slot is updated once. */
static void check_updates(struct moe_checker *c, int rank, const struct moe_param *p)
{
    for (int slot = 0; slot < c->s->buffers[p->buffer].slots; slot++) {
        int n = *times(c, rank, p->buffer, slot);
        if (n == 1 || !moe_holds(c->s, p->buffer, slot, rank)) continue;
        const struct moe_op *by = moe_check_last(c, rank, MOE_K_SGD, -1, p->buffer);
        if (!by) by = moe_check_last(c, rank, MOE_K_ADAMW, -1, p->buffer);
        moe_check_verdict(c, 4, rank, label_of(c, p, slot, by),
                          "is updated %d times in a step, expected once", n);
    }
}

/* Why a gradient that is right where it is clipped is in no norm. */
static const char *not_measured(const struct moe_op *by)
{
    return by ? "is clipped by a norm of what its gradient was before a later sum or division: measure it "
                "behind them"
              : "is clipped by a norm that leaves its gradient out: no step measures it";
}

/* Every gradient is in the norm once; of a copy, not at all. Of parts: moe_check_coverage. */
static void check_measured(struct moe_checker *c, int rank, const struct moe_param *p)
{
    int expected = !moe_is_copy(c->s, p->buffer, rank);
    for (int slot = 0; slot < c->s->buffers[p->grad].slots; slot++) {
        int n = *times(c, rank, p->grad, slot);
        if (n == expected || !moe_holds(c->s, p->grad, slot, rank) || taken(c, rank, p->grad, slot).part)
            continue;
        const struct moe_op *by = moe_check_last(c, rank, MOE_K_SQNORM, p->grad, -1);
        const struct moe_op *clip = moe_check_last(c, rank, MOE_K_CLIP, -1, p->grad);
        struct moe_label at = label_of(c, p, slot, by);
        if (n == 0 && by && clip && clip->line < by->line)
            moe_check_verdict(c, 5, rank, at, "is clipped by line %d before its norm is measured",
                              clip->line);
        else if (n == 0)
            moe_check_verdict(c, 5, rank, at, "%s", not_measured(by));
        else
            moe_check_verdict(c, 5, rank, at, "is in the norm %d time%s, expected %s", n, n == 1 ? "" : "s",
                              expected ? "once" : "only where tokens enter");
    }
}

/* After parts were updated on several ranks and gathered, every element has its own update. */
static void check_values(struct moe_checker *c, int rank, const struct moe_param *p)
{
    for (int slot = 0; slot < c->s->buffers[p->buffer].slots; slot++) {
        struct moe_cell of = {p->buffer, slot, rank, 0, MOE_CELL_ALL};
        if (!moe_holds(c->s, p->buffer, slot, rank) ||
            (!taken(c, rank, p->grad, slot).part && !moe_gradient_in_parts(c->gradients, of)))
            continue;
        of.n = moe_check_eval(c, c->device, c->s->buffers[p->buffer].extent, rank, 0);
        int64_t stale = moe_gradient_stale(c->gradients, of);
        if (stale)
            moe_check_verdict(c, 4, rank,
                              label_of(c, p, slot, moe_check_last(c, rank, MOE_K_COPY, -1, p->buffer)),
                              "ends the step with %" PRId64 " of %" PRId64
                              " elements that were not updated once, on one rank, and gathered from there",
                              stale, of.n);
    }
}

/* Every parameter was updated and is in the norm it is clipped by; every output was written. */
static void check_results(struct moe_checker *c, int rank)
{
    for (int i = 0; i < c->s->n_params; i++) {
        const struct moe_param *p = &c->s->params[i];
        if (p->buffer < 0) continue;
        check_updates(c, rank, p);
        check_values(c, rank, p);
        if (p->clips) check_measured(c, rank, p);
    }
    for (int i = 0; i < c->s->n_buffers; i++)
        for (int slot = 0; slot < c->s->buffers[i].slots && c->s->buffers[i].role == MOE_BUF_OUTPUT; slot++)
            if (moe_holds(c->s, i, slot, rank) && !c->written[moe_check_place(c, rank, i, slot)])
                moe_check_verdict(c, 6, rank, moe_check_named(c->s->buffers[i].name, -1), "is never written");
}

struct span { /* of a tensor */
    int tensor;
    int64_t begin, end;
};

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    if (x->tensor != y->tensor) return x->tensor < y->tensor ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Is every element of 0..extent-1 of each of the tensors in one span, and in no other? */
static bool is_tiled(struct span *span, int n, int tensors, int64_t extent)
{
    int i = 0;
    if (n) qsort(span, (size_t)n, sizeof *span, by_begin);
    for (int k = 0; k < tensors; k++) {
        int64_t end = 0;
        for (; i < n && span[i].tensor == k; i++) {
            if (span[i].begin != end) return false;
            end = span[i].end;
        }
        if (end != extent) return false;
    }
    return true;
}

/* Where the embedding counts, on the ranks that hold the slot. */
static bool counts(const struct moe_checker *c, const struct moe_param *p, int slot, int rank)
{
    return moe_holds(c->s, p->grad, slot, rank) && !moe_is_copy(c->s, p->buffer, rank);
}

/* What a group's norm took of a slot, of each of the tensors that its ranks' stage splits it into. */
static void check_group(struct moe_checker *c, const struct moe_param *p, int slot, int norm,
                        const struct moe_op *by, const int *ranks, int n)
{
    const struct moe_comm *split = p->shard < 0 ? NULL : &c->s->comms[p->shard];
    struct span *span = moe_alloc((size_t)(2 * n), sizeof *span);
    int first = 0;
    while (first < n && !counts(c, p, slot, ranks[first])) first++;
    int tensors = first == n ? 0 : split ? moe_group_size(split, split->group_of[ranks[first]]) : 1;
    int n_spans = 0;
    int64_t extent =
        tensors ? moe_check_eval(c, c->device, c->s->buffers[p->grad].extent, ranks[first], 0) : 0;
    for (int i = 0; i < n && tensors; i++) {
        struct moe_taken t = taken(c, ranks[i], p->grad, slot);
        if (!counts(c, p, slot, ranks[i]) || t.norm != norm) continue;
        for (int twice = 0; twice < 2 && twice < t.times; twice++)
            span[n_spans++] = (struct span){split ? split->index_of[ranks[i]] : 0, t.begin, t.begin + t.n};
    }
    bool tiled = is_tiled(span, n_spans, tensors, extent);
    for (int i = 0; i < n && !tiled; i++)
        if (counts(c, p, slot, ranks[i]))
            moe_check_verdict(c, 5, ranks[i], label_of(c, p, slot, by),
                              "is not in %s once: the ranks that this is summed over measured some part of "
                              "its gradient twice or not at all",
                              c->s->buffers[norm].name);
    free(span);
}

void moe_check_coverage(struct moe_checker *c)
{
    const struct moe_schedule *s = c->s;
    for (int i = 0; i < s->n_params && c->taken; i++) {
        const struct moe_param *p = &s->params[i];
        for (int slot = 0; p->clips && p->buffer >= 0 && slot < s->buffers[p->grad].slots; slot++) {
            int norm = -1;
            const struct moe_op *by = NULL;
            bool parts = false, reported = false;
            for (int r = 0; r < s->n_ranks; r++) {
                struct moe_taken t = taken(c, r, p->grad, slot);
                parts |= t.part;
                reported |= t.reported;
                if (t.by) by = t.by;
                if (t.times && norm < 0) norm = t.norm;
            }
            if (!parts || reported) continue;
            for (int r = 0; r < s->n_ranks && norm < 0; r++)
                if (taken(c, r, p->grad, slot).part)
                    moe_check_verdict(c, 5, r, label_of(c, p, slot, by), "%s", not_measured(by));
            for (int k = 0; k < s->n_params && norm >= 0; k++) {
                if (s->params[k].buffer >= 0 || s->params[k].grad != norm) continue;
                const struct moe_comm *over = &s->comms[s->params[k].replicas];
                for (int g = 0; g < over->n_groups; g++)
                    check_group(c, p, slot, norm, by, over->members + over->first[g],
                                moe_group_size(over, g));
            }
        }
    }
}

/* Does a block hold the backward of another? */
static bool undoes(const struct moe_block *b, int forward)
{
    for (int o = 0; o < b->n_ops; o++)
        if (b->ops[o].serves && b->ops[o].of_block == forward) return true;
    return false;
}

/* Each run of a forward block has one of the block that undoes it, for the same layer and micro-batch. */
void moe_check_runs(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    int span = (c->s->n_layers + 1) * c->s->n_micro, *runs = moe_alloc((size_t)span, sizeof *runs);
    for (int back = 0; back < y->n_blocks; back++)
        for (int forward = 0; forward < y->n_blocks; forward++) {
            if (!undoes(&y->blocks[back], forward)) continue;
            memset(runs, 0, (size_t)span * sizeof *runs);
            for (int n = 0; n < y->n_instances; n++) {
                struct moe_instance at = y->itinerary[n];
                if (at.layer < span) runs[at.layer] += (at.block == forward) - (at.block == back);
            }
            for (int layer = 0; layer < span; layer++) {
                struct moe_here h = {.block = &y->blocks[back], .op = y->blocks[back].ops, .layer = layer};
                for (int r = 0; r < c->s->n_ranks && runs[layer]; r++)
                    if (c->s->role_of[r] == role)
                        moe_check_verdict(c, 4, r, moe_check_label(&h),
                                          "its backward pass runs %d time%s %s often than its forward pass, "
                                          "expected as often",
                                          abs(runs[layer]), abs(runs[layer]) == 1 ? "" : "s",
                                          runs[layer] > 0 ? "less" : "more");
            }
        }
    free(runs);
}

void moe_check_complete(struct moe_checker *c, int rank)
{
    check_coverage(c, rank);
    check_results(c, rank);
}
