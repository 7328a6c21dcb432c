/* steps.c - see steps.h. */
#include "sim/cli/steps.h"
#include "traces/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FEWEST = 5, MOST = 20 };

struct span {
    int64_t step, first_ns, last_ns, n_ops;
};

struct reader {
    struct moe_capture *c;
    int n, cap;
    struct span *span;             /* of each step in the trace */
    struct moe_times *times;       /* of the step being read */
    struct moe_clock_times *clock; /* [place] */
    int64_t n_clock;
};

static int add_to_span(void *ctx, const struct moe_store_op *op)
{
    struct reader *r = ctx;
    if (!r->n || r->span[r->n - 1].step != op->step) {
        r->span = moe_grow(r->span, &r->cap, r->n + 1, sizeof *r->span);
        r->span[r->n++] = (struct span){.step = op->step, .first_ns = op->entry_ns, .last_ns = op->end_ns};
    }
    struct span *s = &r->span[r->n - 1];
    if (op->entry_ns < s->first_ns) s->first_ns = op->entry_ns;
    if (op->end_ns > s->last_ns) s->last_ns = op->end_ns;
    s->n_ops++;
    return MOE_OK;
}

static int by_duration(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    int64_t x_ns = x->last_ns - x->first_ns, y_ns = y->last_ns - y->first_ns;
    return x_ns != y_ns ? (x_ns > y_ns) - (x_ns < y_ns) : (x->step > y->step) - (x->step < y->step);
}

static int64_t ops_of_step(const struct moe_schedule *s)
{
    int64_t n = 0;
    for (int i = 0; i < s->roles->n_instances; i++) n += s->roles->blocks[s->roles->itinerary[i].block].n_ops;
    return n * s->n_ranks;
}

/* Where the schedule has the operation; -1: nowhere. */
static int64_t place_of(const struct reader *r, const struct moe_store_op *op)
{
    const struct moe_schedule *s = r->c->in.schedule;
    const struct moe_role *role = s->roles;
    char label[2 * MOE_NAME];
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *b = &role->blocks[role->itinerary[i].block];
        if (role->itinerary[i].block != op->block || role->itinerary[i].layer != op->layer) continue;
        if (op->rank < 0 || op->rank >= s->n_ranks || op->op < 0 || op->op >= b->n_ops) return -1;
        moe_op_label(b, &b->ops[op->op], op->layer, label);
        return strcmp(label, op->label) ? -1 : (int64_t)moe_times_place(r->times, op->rank, i, op->op);
    }
    return -1;
}

static int add_clock(void *ctx, const struct moe_store_op *op)
{
    struct reader *r = ctx;
    int64_t place = place_of(r, op);
    if (place < 0 || r->clock[place].entry_s > 0 || op->entry_ns == 0)
        return moe_fail(MOE_EINPUT, "step %lld, rank %d: '%s' is not what this version does there",
                        (long long)op->step, op->rank, op->label);
    r->clock[place] = (struct moe_clock_times){(double)op->entry_ns * 1e-9, (double)op->start_ns * 1e-9,
                                               (double)op->end_ns * 1e-9};
    return MOE_OK;
}

static int add_step(struct reader *r, struct moe_store *store, int64_t step)
{
    struct moe_capture *c = r->c;
    struct moe_steps *steps = &c->steps;
    struct moe_routing *routing;
    MOE_TRY(moe_routing_load(store, step, &routing));
    int i = steps->n++;
    steps->routing[i] = routing;
    r->times = steps->times[i] = moe_times_new(c->in.schedule);
    if (memcmp(routing->tokens, c->in.routing->tokens, (size_t)routing->n_ranks * sizeof *routing->tokens) !=
        0)
        return moe_fail(MOE_EINPUT, "step %lld has other tokens than the last", (long long)step);
    size_t places = moe_times_place(r->times, r->times->n_ranks, 0, 0);
    r->clock = moe_alloc(places, sizeof *r->clock);
    int err = moe_store_each_op(store, step, step, add_clock, r);
    if (err >= 0) moe_times_measure(c->in.schedule, r->clock, r->times);
    free(r->clock);
    if (err >= 0 && !(r->times->step_s > 0))
        return moe_fail(MOE_EINPUT, "step %lld took no time", (long long)step);
    return err;
}

/* Leaves the steps from this one on that have all operations. */
static void keep_steps(struct reader *r, int64_t from, int64_t n_ops)
{
    int n = 0;
    for (int i = 0; i < r->n; i++)
        if (r->span[i].step >= from && r->span[i].n_ops == n_ops) r->span[n++] = r->span[i];
    r->n = n;
}

static double median_s(const struct reader *r)
{
    double *duration = moe_alloc((size_t)r->n, sizeof *duration);
    for (int i = 0; i < r->n; i++) duration[i] = (double)(r->span[i].last_ns - r->span[i].first_ns) * 1e-9;
    double median = r->n ? moe_median(duration, r->n) : 0;
    free(duration);
    return median;
}

/* Captures with the same data and seed begin at other times. */
static int identify(struct moe_store *store, int64_t begin_ns, char id[17])
{
    char *seed, *data, text[128];
    MOE_TRY(moe_store_get(store, "seed", &seed));
    int err = moe_store_get(store, "data_hash", &data);
    if (err >= 0) {
        snprintf(text, sizeof text, "%.32s %.32s %" PRId64, seed ? seed : "", data ? data : "", begin_ns);
        snprintf(id, 17, "%016" PRIx64, moe_hash_name(text));
        free(data);
    }
    free(seed);
    return err;
}

static int read_steps(struct reader *r, struct moe_store *store)
{
    struct moe_capture *c = r->c;
    struct moe_store_info info;
    int64_t n_ops = ops_of_step(c->in.schedule);
    MOE_TRY(moe_store_info(store, &info));
    int64_t warm = info.first_step + info.steps_complete / 10;
    MOE_TRY(moe_store_each_op(store, info.first_step, info.last_step, add_to_span, r));
    MOE_TRY(identify(store, r->n ? r->span[0].first_ns : 0, c->id));
    keep_steps(r, info.first_step, n_ops);
    c->step_all_s = median_s(r);
    keep_steps(r, warm, n_ops);
    int n = r->n;
    if (n < FEWEST)
        return moe_fail(MOE_EINPUT, "%d steps with all %lld operations, expected %d or more after step %lld",
                        n, (long long)n_ops, FEWEST, (long long)warm);
    qsort(r->span, (size_t)n, sizeof *r->span, by_duration);
    c->n_complete = info.steps_complete;
    int quarter = n / 4 < FEWEST ? FEWEST : n / 4 > MOST ? MOST : n / 4;
    c->steps = (struct moe_steps){.s = c->in.schedule};
    c->steps.routing = moe_alloc((size_t)quarter, sizeof *c->steps.routing);
    c->steps.times = moe_alloc((size_t)quarter, sizeof(struct moe_times *));
    for (int i = 0; i < quarter; i++) MOE_TRY(add_step(r, store, r->span[i].step));
    return MOE_OK;
}

int moe_capture_load(const struct moe_args *args, struct moe_capture *c)
{
    struct reader r = {.c = c};
    struct moe_store *store;
    *c = (struct moe_capture){0};
    MOE_TRY(moe_input_load(args, &c->in));
    MOE_TRY(moe_store_open(args->input, MOE_STORE_READ, &store));
    int err = read_steps(&r, store);
    moe_store_close(store);
    free(r.span);
    return err < 0 ? moe_fail_in(args->input, err) : MOE_OK;
}

void moe_capture_free(struct moe_capture *c)
{
    for (int i = 0; i < c->steps.n; i++) {
        moe_routing_free(c->steps.routing[i]);
        moe_times_free(c->steps.times[i]);
    }
    free(c->steps.routing);
    free(c->steps.times);
    moe_input_free(&c->in);
}
