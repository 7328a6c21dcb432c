/* fit.c - see execute_internal.h: what a kernel is handed, against its row of kernel_shapes.c.
 *
 * Kernels believe their dims. A schedule that is wrong would have them read and write what belongs to others:
 * it is refused here, by name, as check does by C14. */
#include "runtime/execute_internal.h"

static int64_t sum_rows(const int64_t *x, int64_t n)
{
    int64_t all = 0;
    for (int64_t i = 0; i < n; i++) all = moe_plus(all, x[i]);
    return all;
}

/* Elements that the kernel takes of an operand; MOE_UNKNOWN: more than 63 bits hold. */
static int64_t extent_of(const struct moe_kernel_shape *k, const struct moe_operand *o,
                         const struct moe_launch *l, const struct operand *reads)
{
    int64_t n = o->times;
    for (int i = 0; i < o->n_dims; i++) n = moe_times(n, l->dims[o->dims[i]]);
    if (o->by_rows) n = moe_times(n, sum_rows(l->rows, l->dims[0]));
    for (int i = 0; o->by_total && i < k->n_reads; i++)
        if (k->reads[i].kind == MOE_OPERAND_COUNT) n = moe_times(n, sum_rows(reads[i].host, reads[i].n));
    return n;
}

/* Of some kernels only counts tell, which the host need not hold. */
static bool is_known(const struct moe_kernel_shape *k, const struct moe_operand *o,
                     const struct operand *reads)
{
    for (int i = 0; o->by_total && i < k->n_reads; i++)
        if (k->reads[i].kind == MOE_OPERAND_COUNT && !reads[i].host) return false;
    return true;
}

static int check_lists(struct moe_execution *x, const struct moe_kernel_shape *k)
{
    const struct moe_op *op = x->now.op;
    int least;
    if (moe_kernel_has_lists(k, op, &least)) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: has %d dims, %d reads and %d writes, and %s needs %d, %d and %d",
                    moe_execute_label(x), op->n_dims, op->n_reads, op->n_writes, moe_kernel_text[op->kernel],
                    k->n_dims, k->n_reads, least);
}

/* Integers alone, or real numbers of the operation's type. */
static int check_type(struct moe_execution *x, const struct moe_operand *o, struct moe_ref ref)
{
    const struct moe_buffer *b = &x->s->buffers[ref.buffer];
    const enum moe_type type = o->type == MOE_TYPE_COUNT ? x->now.op->type : o->type;
    const bool real = type == MOE_F32 || type == MOE_F64 || type == MOE_BF16;
    if (b->type == type && (real || o->kind != MOE_OPERAND_REAL)) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s of %s is %s, expected %s", moe_execute_label(x), o->name, b->name,
                    moe_type_text[b->type],
                    real || o->kind != MOE_OPERAND_REAL ? moe_type_text[type] : "real numbers");
}

int moe_execute_fit_form(struct moe_execution *x)
{
    const struct moe_op *op = x->now.op;
    const struct moe_kernel_shape *k = &x->shapes[op->kernel];
    const enum moe_type type = moe_kernel_type(k);
    MOE_TRY(check_lists(x, k));
    if (type != MOE_TYPE_COUNT && op->type != type)
        return moe_fail(MOE_EFAILED, "%s: computes %s, expected %s", moe_execute_label(x),
                        moe_type_text[op->type], moe_type_text[type]);
    for (int i = 0; i < op->n_reads; i++) MOE_TRY(check_type(x, &k->reads[i], op->reads[i]));
    for (int i = 0; i < op->n_writes; i++) {
        MOE_TRY(check_type(x, &k->writes[i], op->writes[i]));
        if (op->writes[i].accumulate && !k->writes[i].adds)
            return moe_fail(MOE_EFAILED, "%s: adds to %s, and %s only replaces its %s", moe_execute_label(x),
                            x->s->buffers[op->writes[i].buffer].name, moe_kernel_text[op->kernel],
                            k->writes[i].name);
        const char *other, *wrong = moe_kernel_overlap(x->s, k, op, i, &other);
        if (wrong)
            return moe_fail(MOE_EFAILED, "%s: writes %s, which %s %s", moe_execute_label(x),
                            x->s->buffers[op->writes[i].buffer].name, wrong, other);
    }
    return MOE_OK;
}

/* Of a whole buffer fewer elements may be read than it holds. */
int moe_execute_fit(struct moe_execution *x, const struct moe_launch *l, const struct operand *operands)
{
    const struct moe_op *op = l->op;
    const struct moe_kernel_shape *k = &x->shapes[op->kernel];
    for (int i = 0; i < op->n_reads + op->n_writes; i++) {
        const bool reads = i < op->n_reads;
        const struct moe_operand *o = reads ? &k->reads[i] : &k->writes[i - op->n_reads];
        const struct moe_ref ref = reads ? op->reads[i] : op->writes[i - op->n_reads];
        if (!is_known(k, o, operands)) continue;
        const int64_t takes = extent_of(k, o, l, operands), holds = operands[i].extent;
        const char *verb = reads ? "reads" : "writes", *buffer = x->s->buffers[ref.buffer].name;
        if (takes == MOE_UNKNOWN)
            return moe_fail(MOE_EFAILED, "%s: %s more elements of %s as %s than 63 bits hold",
                            moe_execute_label(x), verb, buffer, o->name);
        if (reads && !ref.n ? takes > holds : takes != holds)
            return moe_fail(MOE_EFAILED, "%s: %s %lld elements of %s as %s, which holds %lld",
                            moe_execute_label(x), verb, (long long)takes, buffer, o->name, (long long)holds);
    }
    return MOE_OK;
}
