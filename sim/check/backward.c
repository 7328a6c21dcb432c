/* backward.c - see internal.h.
 *
 * What a backward operation must read, write and compute with follows from the forward operation that it
 * names. Of most kernels the names in kernel_shapes.c say it: NAME is the same tensor, dNAME its gradient.
 * Matrix products: C = A op(B) gives dA = dC op(B)^T and dB = A^T dC, or dC^T A where B is stored transposed.
 * Collectives: gradients go back the way the data came. */
#include "sim/check/internal.h"

#include <stdio.h>
#include <string.h>

struct pair {
    struct moe_checker *c;
    int role;
    struct moe_here h; /* the backward operation, in its first instance */
    const struct moe_op *f, *b;
};

static void say(const struct pair *p, int check_class, const char *what, const char *name)
{
    const struct moe_schedule *s = p->c->s;
    for (int r = 0; r < s->n_ranks; r++)
        if (s->role_of[r] == p->role && !moe_check_idle(p->c, r, &p->h))
            moe_check_verdict(p->c, check_class, r, moe_check_label(&p->h),
                              "%s%s%s, unlike '%s' that it undoes", what, *name ? " " : "", name, p->f->name);
}

static struct moe_ref gradient_of(const struct pair *p, struct moe_ref r)
{
    return (struct moe_ref){.buffer = p->c->s->buffers[r.buffer].grad, .shift = r.shift, .micro = r.micro};
}

static void expect(const struct pair *p, struct moe_ref found, struct moe_ref expected, bool reads)
{
    if (expected.buffer < 0 || !moe_same_slot(p->c->s, found, expected))
        say(p, 14, reads ? "reads" : "writes", p->c->s->buffers[found.buffer].name);
}

/* Does it hold of two expressions wherever the block runs on a rank of the role? */
static bool everywhere(const struct pair *p, int a, int b,
                       bool (*holds)(const struct moe_checker *c, int rank, int layer, int a, int b))
{
    const struct moe_schedule *s = p->c->s;
    const struct moe_role *role = &s->roles[p->role];
    for (int r = 0; r < s->n_ranks; r++)
        for (int n = 0; n < role->n_instances && s->role_of[r] == p->role; n++)
            if (role->itinerary[n].block == p->h.block_id && !holds(p->c, r, role->itinerary[n].layer, a, b))
                return false;
    return true;
}

static bool is_equal(const struct moe_checker *c, int rank, int layer, int a, int b)
{
    return moe_eval(c->s, c->device, a, rank, layer, 0) == moe_eval(c->s, c->device, b, rank, layer, 0);
}

static bool same_value(const struct pair *p, int a, int b)
{
    return moe_check_sign(p->c->s, a, 0) == moe_check_sign(p->c->s, b, 0) || everywhere(p, a, b, is_equal);
}

static bool is_vector(const struct pair *p, int rows, int columns)
{
    return everywhere(p, rows, columns, moe_check_is_vector);
}

/* Does nothing come of the forward operation, on any rank of the role? */
static bool is_idle(const struct pair *p)
{
    const struct moe_schedule *s = p->c->s;
    const struct moe_role *role = &s->roles[p->role];
    struct moe_here e = {.block_id = p->b->of_block, .block = &role->blocks[p->b->of_block], .op = p->f};
    for (int r = 0; r < s->n_ranks; r++)
        for (int n = 0; n < role->n_instances && s->role_of[r] == p->role; n++) {
            if (role->itinerary[n].block != e.block_id) continue;
            e.layer = role->itinerary[n].layer;
            if (!moe_check_idle(p->c, r, &e)) return false;
        }
    return true;
}

/* Is a dim of the backward kernel that of the forward one? A sequence that is longer than the tokens is one
 * sequence, however long. */
static bool same_dim(const struct pair *p, int i, int j)
{
    if (same_value(p, p->b->dims[i], p->f->dims[j])) return true;
    if (p->f->kernel != MOE_K_ATTENTION || p->c->shapes[MOE_K_ATTENTION].dim[j] != 'S') return false;
    return everywhere(p, p->b->dims[i], p->f->dims[0], moe_check_at_least) &&
           everywhere(p, p->f->dims[j], p->f->dims[0], moe_check_at_least);
}

static bool same_groups(const struct pair *p, int a, int b)
{
    const struct moe_schedule *s = p->c->s;
    const struct moe_role *role = &s->roles[p->role];
    struct moe_env env = p->c->device;
    for (int r = 0; r < s->n_ranks && a != b; r++)
        for (int n = 0; n < role->n_instances && s->role_of[r] == p->role; n++) {
            if (role->itinerary[n].block != p->h.block_id) continue;
            int layer = role->itinerary[n].layer, of_a = moe_symbol_count(s, a, r);
            if (of_a != moe_symbol_count(s, b, r)) return false;
            for (int i = 0; i < of_a; i++)
                if (env.value(env.ctx, a, r, layer, i) != env.value(env.ctx, b, r, layer, i)) return false;
        }
    return true;
}

static void expect_dims(const struct pair *p, int m, int n, int k)
{
    int expected[] = {m, n, k};
    for (int i = 0; i < 3; i++)
        if (!same_value(p, p->b->dims[i], expected[i])) {
            say(p, 14, "has other dims", "");
            return;
        }
}

static void check_product(const struct pair *p)
{
    const struct moe_op *f = p->f, *b = p->b;
    struct moe_ref dc = gradient_of(p, f->writes[0]), a = f->reads[0], w = f->reads[1];
    int m = f->dims[0], n = f->dims[1], k = f->dims[2];
    bool grouped = f->kernel == MOE_K_GROUPED_GEMM, of_w = b->serves & 2, stored = f->trans_b;
    if (stored != (b->n_reads > 0 && moe_same_slot(p->c->s, b->reads[0], dc)) && of_w && is_vector(p, k, n))
        stored = !stored;
    bool swapped = of_w && stored && !grouped;
    enum moe_kernel kernel = grouped && of_w ? MOE_K_GROUPED_WGRAD : f->kernel;
    if (b->kernel != kernel || b->n_reads != 2 || b->n_writes != 1 || b->n_dims < 3) {
        say(p, 14, "is", moe_kernel_text[b->kernel]);
        return;
    }
    expect(p, b->reads[0], swapped || !of_w ? dc : a, true);
    expect(p, b->reads[1], !of_w ? w : swapped ? a : dc, true);
    expect(p, b->writes[0], gradient_of(p, of_w ? w : a), false);
    if (grouped)
        expect_dims(p, m, of_w ? n : k, of_w ? k : n);
    else if (of_w)
        expect_dims(p, swapped ? n : k, swapped ? k : n, m);
    else
        expect_dims(p, m, k, n);
    bool trans_a = of_w && !grouped, trans_b = !of_w && !f->trans_b;
    bool wrong_a = !grouped && ((b->trans_a != trans_a && !is_vector(p, b->dims[0], b->dims[2])) ||
                                (f->trans_a && !is_vector(p, m, k)));
    bool wrong_b = kernel == MOE_K_GROUPED_WGRAD
                       ? f->trans_b && !is_vector(p, k, n)
                       : b->trans_b != trans_b && !is_vector(p, b->dims[2], b->dims[1]);
    if ((wrong_a || wrong_b) && !is_idle(p)) say(p, 14, "takes a matrix transposed, or not", "");
    if (grouped && !same_groups(p, b->group, f->group))
        say(p, 14, "has the groups of", p->c->s->symbols[b->group].name);
}

/* What NAME of the backward kernel is to the forward operation; false: it does not say. */
static bool find(const struct pair *p, const char *name, struct moe_ref *out)
{
    const struct moe_kernel_shape *k = &p->c->shapes[p->f->kernel];
    for (int derived = 0; derived < 3; derived++)
        for (int i = 0; i < k->n_reads + p->f->n_writes; i++) {
            bool reads = i < k->n_reads;
            const char *of = reads ? k->reads[i].name : k->writes[i - k->n_reads].name;
            struct moe_ref ref = reads ? p->f->reads[i] : p->f->writes[i - k->n_reads];
            if (derived == 0   ? strcmp(of, name) != 0
                : derived == 1 ? *name != 'd' || strcmp(of, name + 1) != 0
                               : *of != 'd' || strcmp(of + 1, name) != 0)
                continue;
            *out = derived ? gradient_of(p, ref) : ref;
            return true;
        }
    return false;
}

/* Rows of one peer, or for one expert, are in both orders at once. */
static bool is_sorted(const struct pair *p)
{
    const enum moe_kernel f = p->f->kernel, b = p->b->kernel;
    return f == b && (f == MOE_K_SORT_ROWS || f == MOE_K_UNSORT_ROWS) && p->f->n_dims == 3 &&
           p->b->n_dims == 3 && p->f->n_reads == 2 && p->b->n_reads == 2 &&
           is_vector(p, p->f->dims[0], p->f->dims[1]) && is_vector(p, p->b->dims[0], p->b->dims[1]);
}

static void check_by_name(const struct pair *p)
{
    const struct moe_kernel_shape *kf = &p->c->shapes[p->f->kernel], *kb = &p->c->shapes[p->b->kernel];
    struct moe_ref expected;
    if (is_sorted(p)) { /* under the names of the other direction */
        expect(p, p->b->reads[0], gradient_of(p, p->f->writes[0]), true);
        expect(p, p->b->writes[0], gradient_of(p, p->f->reads[0]), false);
        return;
    }
    if (p->b->kernel != kf->backward || p->f->n_reads != kf->n_reads || p->b->n_reads != kb->n_reads ||
        p->b->n_dims != kb->n_dims || p->f->n_dims != kf->n_dims || p->b->n_writes > kb->n_writes) {
        say(p, 14, "is", moe_kernel_text[p->b->kernel]);
        return;
    }
    for (int i = 0; i < p->b->n_reads; i++)
        if (find(p, kb->reads[i].name, &expected)) expect(p, p->b->reads[i], expected, true);
    for (int i = 0; i < p->b->n_writes; i++)
        if (find(p, kb->writes[i].name, &expected)) expect(p, p->b->writes[i], expected, false);
    for (int i = 0; i < kb->n_dims; i++) {
        const char *at = memchr(kf->dim, kb->dim[i], (size_t)kf->n_dims);
        if (at && !same_dim(p, i, (int)(at - kf->dim))) {
            say(p, 14, "has other dims", "");
            break;
        }
    }
    if (kb->uses & MOE_USES_FACTOR && p->b->factor != p->f->factor) say(p, 7, "has another coefficient", "");
    if (kb->uses & MOE_USES_DIVISOR &&
        (!same_value(p, p->b->divisor, p->f->divisor) || !same_value(p, p->b->times, p->f->times)))
        say(p, 7, "has another divisor", "");
}

/* Another backward operation of the same forward one, of this kind. */
static const struct moe_op *sibling(const struct pair *p, enum moe_op_kind kind)
{
    for (int i = 0; i < p->h.block->n_ops; i++) {
        const struct moe_op *o = &p->h.block->ops[i];
        if (o != p->b && o->serves && o->kind == kind && o->of_block == p->b->of_block &&
            o->of_id == p->b->of_id)
            return o;
    }
    return NULL;
}

/* Over the same ranks, in every group of the role; alone: of one rank each, where all collectives copy. */
static bool same_ranks(const struct pair *p, int a, int b, bool *alone)
{
    const struct moe_schedule *s = p->c->s;
    bool same = true;
    *alone = true;
    for (int r = 0; r < s->n_ranks; r++) {
        if (s->role_of[r] != p->role) continue;
        same &= moe_check_same_group(p->c, r, a, b);
        *alone &= moe_group_size(&s->comms[a], s->comms[a].group_of[r]) == 1;
    }
    return same;
}

/* A collective replaces what it writes: beside other contributions an ADD follows. */
static void check_move(const struct pair *p)
{
    static const enum moe_collective reverse[] = {[MOE_ALLTOALL] = MOE_ALLTOALL,
                                                  [MOE_ALLREDUCE] = MOE_ALLREDUCE,
                                                  [MOE_ALLGATHER] = MOE_REDUCESCATTER,
                                                  [MOE_REDUCESCATTER] = MOE_ALLGATHER};
    const struct moe_op *f = p->f, *b = p->b, *other;
    struct moe_ref to = gradient_of(p, f->reads[0]);
    if (b->kind == MOE_COLLECTIVE) {
        bool alone, same = same_ranks(p, f->comm, b->comm, &alone);
        if (!same) say(p, 14, "goes over", p->c->s->comms[b->comm].name);
        if (!alone && b->collective != reverse[f->collective])
            say(p, 14, "is", moe_collective_text[b->collective]);
        expect(p, b->reads[0], gradient_of(p, f->writes[0]), true);
        other = sibling(p, MOE_KERNEL);
        if (!other) expect(p, b->writes[0], to, false);
        return;
    }
    other = sibling(p, MOE_COLLECTIVE);
    if (b->kernel != MOE_K_ADD || b->n_reads != 2 || b->n_writes != 1 || !other) {
        say(p, 14, "is", moe_kernel_text[b->kernel]);
        return;
    }
    expect(p, b->reads[0], to, true);
    expect(p, b->reads[1], other->writes[0], true);
    expect(p, b->writes[0], to, false);
}

static void check_one(struct pair *p)
{
    const struct moe_block *forward = &p->c->s->roles[p->role].blocks[p->b->of_block];
    p->f = NULL;
    for (int i = 0; i < forward->n_ops; i++)
        if (forward->ops[i].id == p->b->of_id) p->f = &forward->ops[i];
    if (!p->f) return; /* moe_check_complete says so */
    if (p->f->kind == MOE_COLLECTIVE)
        check_move(p);
    else if (p->f->kind != MOE_KERNEL || p->b->kind != MOE_KERNEL)
        say(p, 14, "is", moe_op_kind_text[p->b->kind]);
    else if (p->f->kernel == MOE_K_GEMM || p->f->kernel == MOE_K_GROUPED_GEMM)
        check_product(p);
    else
        check_by_name(p);
}

void moe_check_backward(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    for (int b = 0; b < y->n_blocks; b++) {
        struct pair p = {.c = c, .role = role, .h = {.block = &y->blocks[b], .block_id = b}};
        int n = 0;
        while (n < y->n_instances && y->itinerary[n].block != b) n++;
        if (n == y->n_instances) continue; /* never runs */
        p.h.layer = y->itinerary[n].layer;
        for (int o = 0; o < p.h.block->n_ops; o++) {
            p.h.op = p.b = &p.h.block->ops[o];
            if (p.b->serves) check_one(&p);
        }
    }
}
