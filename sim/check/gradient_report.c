/* gradient_report.c - see internal.h: what is wrong with a gradient, in words, and which step makes it so. */
#include "sim/check/internal.h"

#include <math.h>
#include <stdio.h>

struct finding { /* of a parameter's gradient, or of a norm */
    struct moe_checker *c;
    int rank;
    const struct moe_here *h;
    const struct moe_param *p;
    const struct moe_gradient_fault *f;
    char norm[MOE_NAME + 1]; /* "shared_norm ": the text begins so; "" of a parameter, which has a subject */
};

static struct moe_label about(const struct finding *y, int line)
{
    struct moe_label at = moe_check_label(y->h);
    at.line = line;
    return y->norm[0] ? at : moe_check_about(at, "the gradient of ", y->p, line);
}

/* Are two ranks in one group of the last sum? */
static bool are_summed(const struct finding *y, int other)
{
    const struct moe_comm *m = &y->c->s->comms[y->f->summed_in->comm];
    return m->group_of[y->rank] == m->group_of[other];
}

/* Ranks of the rank's group. */
static int size_of(const struct finding *y, int comm)
{
    const struct moe_comm *m = &y->c->s->comms[comm];
    return moe_group_size(m, m->group_of[y->rank]);
}

static int copies(const struct finding *y)
{
    return size_of(y, y->p->replicas);
}

/* A step of the list that sums, or divides, the gradient behind the update that uses it. NULL: there is none,
 * or the list is on one line. */
static const struct moe_op *find_late(const struct finding *y, bool sum)
{
    const struct moe_role *role = &y->c->s->roles[y->c->s->role_of[y->rank]];
    for (int b = 0; b < role->n_blocks && !y->norm[0] && y->h->op->line; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            bool is_one = sum ? op->kind == MOE_COLLECTIVE && op->collective == MOE_ALLREDUCE
                              : op->kind == MOE_KERNEL && op->kernel == MOE_K_SCALE;
            if (is_one && op->line > y->h->op->line && op->writes[0].buffer == y->p->grad) return op;
        }
    return NULL;
}

static void report_missing(const struct finding *y)
{
    const struct moe_gradient_fault *f = y->f;
    const struct moe_op *late = f->summed_in ? NULL : find_late(y, true);
    char why[96] = "";
    if (late)
        snprintf(why, sizeof why, ": the sum of line %d comes after the update of line %d", late->line,
                 y->h->op->line);
    else if (!f->summed_in)
        snprintf(why, sizeof why, ": no step sums it over them");
    else if (!are_summed(y, f->missing_rank))
        snprintf(why, sizeof why, ": the last sum of it, over %d ranks, does not bring them",
                 size_of(y, f->summed_in->comm));
    moe_check_verdict(
        y->c, 4, y->rank, about(y, moe_check_line(y->c, late ? late : f->summed_in)),
        "lacks the contributions of %d of the %d ranks that hold a copy of it%s, so on rank %d: "
        "of rank %d",
        f->missing_ranks, copies(y), why, y->rank, f->missing_rank);
}

static void report_extra(const struct finding *y)
{
    const struct moe_gradient_fault *f = y->f;
    const struct moe_comm *own = &y->c->s->comms[y->p->replicas];
    struct moe_label at = about(y, moe_check_line(y->c, f->summed_in));
    char expected[64] = "not to be summed: no other rank holds a copy of it";
    if (copies(y) > 1) snprintf(expected, sizeof expected, "over the %d that hold a copy of it", copies(y));
    if (!f->summed_in || own->group_of[y->rank] == own->group_of[f->extra_rank])
        moe_check_verdict(y->c, 4, y->rank, at,
                          "also holds %d contributions to another tensor, so on rank %d: one of rank %d",
                          f->extra, y->rank, f->extra_rank);
    else
        moe_check_verdict(y->c, 4, y->rank, at,
                          "also holds the contributions of %d ranks that hold %s: it is summed over %d "
                          "ranks, expected %s, so on rank %d: of rank %d",
                          f->extra_ranks, y->p->shard < 0 ? "no copy of it" : "other experts",
                          size_of(y, f->summed_in->comm), expected, y->rank, f->extra_rank);
}

/* A factor that all contributions have. */
static void report_factor(const struct finding *y)
{
    const struct moe_gradient_fault *f = y->f;
    const struct moe_op *op = f->doubled_in ? f->doubled_in : f->divided_in;
    bool divided = f->divided_in && (f->divided_in->line || !y->c->s->sync_line);
    const struct moe_op *late = divided || f->doubled_in ? NULL : find_late(y, false);
    char why[128 + MOE_NAME] = "";
    if (late) op = late;
    if (f->doubled_in)
        snprintf(why, sizeof why, ": this sum over %d ranks adds up copies of one sum", size_of(y, op->comm));
    else if (divided && isfinite(f->divisor * f->factor))
        snprintf(why, sizeof why,
                 ": the last division of it is by %.6g, expected by %.6g, so on rank %d: by %s", f->divisor,
                 f->divisor * f->factor, y->rank, op->name);
    else if (late)
        snprintf(why, sizeof why, ": the division of line %d comes after the update of line %d", late->line,
                 y->h->op->line);
    else if (!divided && isfinite(f->factor))
        snprintf(why, sizeof why, ": no step divides it, expected by %.6g", f->factor);
    moe_check_verdict(y->c, y->norm[0] ? 5 : 3, y->rank, about(y, moe_check_line(y->c, op)),
                      "%sis %.6g times what it should be%s", y->norm, f->factor, why);
}

/* A norm covers every parameter once: of ranks that hold copies, one. */
static void report_norm(const struct finding *y)
{
    const struct moe_gradient_fault *f = y->f;
    const struct moe_op *by =
        f->summed_in ? f->summed_in : moe_check_last(y->c, y->rank, MOE_K_SQNORM, -1, y->p->grad);
    struct moe_label at = about(y, moe_check_line(y->c, by));
    const struct moe_comm *over = &y->c->s->comms[y->p->replicas];
    char sum[48] = "it is summed over no other rank";
    if (f->summed_in) snprintf(sum, sizeof sum, "it is summed over %d ranks", size_of(y, f->summed_in->comm));
    if (f->missing)
        moe_check_verdict(
            y->c, 5, y->rank, at,
            "%slacks the squares of %d of the %d ranks that together hold every parameter once, and "
            "others clip by another norm: %s, so on rank %d: of rank %d",
            y->norm, f->missing_ranks, copies(y), sum, y->rank, f->missing_rank);
    if (f->extra && over->group_of[y->rank] != over->group_of[f->extra_rank])
        moe_check_verdict(y->c, 5, y->rank, at,
                          "%scounts parameters more than once: %s, expected over %d that together hold every "
                          "parameter once, so on rank %d: rank %d holds copies",
                          y->norm, sum, copies(y), y->rank, f->extra_rank);
    else if (f->extra)
        moe_check_verdict(
            y->c, 5, y->rank, at,
            "%sholds %d squares of other tensors than it must cover, so on rank %d: one of rank %d", y->norm,
            f->extra, y->rank, f->extra_rank);
}

static void report_clips(const struct finding *y)
{
    int n = y->f->clips, expected = y->p->clips;
    const struct moe_op *by = moe_check_last(y->c, y->rank, MOE_K_CLIP, -1, -1);
    const char *advice = !by ? ": no step clips it" : n > expected ? ": leave this one out" : "";
    moe_check_verdict(y->c, 5, y->rank, about(y, moe_check_line(y->c, by)),
                      "%sis clipped %d time%s before it is used, expected %d%s", y->norm, n,
                      n == 1 ? "" : "s", expected, advice);
}

void moe_check_gradient(struct moe_checker *c, int rank, const struct moe_here *h, const struct moe_param *p,
                        const struct moe_gradient_fault *f)
{
    struct finding y = {c, rank, h, p, f, ""};
    bool norm = p->buffer < 0;
    if (moe_gradient_is_right(f) && f->clips == p->clips) return;
    if (norm) snprintf(y.norm, sizeof y.norm, "%s ", p->name);
    if (norm) report_norm(&y);
    if (f->missing && !norm) report_missing(&y);
    if (f->extra && !norm) report_extra(&y);
    if (f->factor != 1 && f->uneven && (f->missing || f->extra))
        return; /* a partial sum: that is the cause */
    if (f->factor != 1 && f->uneven)
        moe_check_verdict(
            c, norm ? 5 : 3, rank, about(&y, moe_check_line(c, f->divided_in)),
            "%sweighs the contributions of its ranks by several factors, so on rank %d: that of "
            "rank %d is %.6g times what it should be",
            y.norm, rank, f->factor_rank, f->factor);
    else if (f->factor != 1)
        report_factor(&y);
    if (f->clips != p->clips) report_clips(&y);
}

/* Does an operation read, or write, a buffer? */
static bool touches(const struct moe_ref *ref, int n, int buffer)
{
    for (int i = 0; i < n; i++)
        if (ref[i].buffer == buffer) return true;
    return buffer < 0;
}

const struct moe_op *moe_check_last(const struct moe_checker *c, int rank, enum moe_kernel kernel, int reads,
                                    int writes)
{
    const struct moe_role *role = &c->s->roles[c->s->role_of[rank]];
    const struct moe_op *last = NULL;
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            if (op->kind == MOE_KERNEL && op->kernel == kernel && touches(op->reads, op->n_reads, reads) &&
                touches(op->writes, op->n_writes, writes))
                last = op;
        }
    return last;
}

int moe_check_line(const struct moe_checker *c, const struct moe_op *op)
{
    return op && op->line ? op->line : c->s->sync_line;
}
