/* autograd.c - the backward operations of each forward operation: moe_emit_backward of builder.h.
 *
 * One rule per kernel, one for collectives. A rule sees only the forward operation: a dispatcher that is
 * written forward has its backward pass. */
#include "sim/lower/builder.h"

#include <stdio.h>
#include <string.h>

/* A backward operation of `f` that serves the reads in the mask; the rule fills in what differs. */
static struct moe_op backward_of(struct moe_builder *b, int forward, const struct moe_op *f, uint32_t serves,
                                 const char *suffix)
{
    struct moe_op op = {.kind = f->kind, .kernel = f->kernel, .collective = f->collective, .comm = f->comm};
    op.type = f->type;
    op.stream = f->stream;
    op.group = f->group;
    op.n_dims = f->n_dims;
    memcpy(op.dims, f->dims, sizeof op.dims);
    op.flops = f->flops ? moe_mul(b, f->flops, moe_const(b, 2)) : MOE_UNSET; /* two products for one */
    op.divisor = f->divisor;
    op.times = f->times;
    op.factor = f->factor;
    op.mode = f->mode;
    op.of_block = forward;
    op.of_id = f->id;
    op.serves = serves;
    snprintf(op.name, sizeof op.name, "d_%.40s%s", f->name, suffix);
    return op;
}

static void set_lists(struct moe_op *op, struct moe_op lists)
{
    op->n_reads = lists.n_reads;
    op->n_writes = lists.n_writes;
    memcpy(op->reads, lists.reads, sizeof op->reads);
    memcpy(op->writes, lists.writes, sizeof op->writes);
}
#define LISTS(...) ((struct moe_op){__VA_ARGS__})

static void set_dims(struct moe_op *op, int m, int n, int k)
{
    op->dims[0] = m, op->dims[1] = n, op->dims[2] = k;
}

/* C [m,n] = A [m,k] B, with B [k,n], or [n,k] when trans_b. */
static void backward_gemm(struct moe_builder *b, int block, const struct moe_op *f)
{
    moe_assert(!f->trans_a);
    struct moe_ref dc = moe_grad_in(b, f->writes[0]);
    int m = f->dims[0], n = f->dims[1], k = f->dims[2];
    if (f->needs_grad & 1) {
        struct moe_op op = backward_of(b, block, f, 1, "");
        set_lists(&op, LISTS(MOE_READS(dc, f->reads[1]), MOE_WRITES(moe_grad_out(b, f->reads[0]))));
        set_dims(&op, m, k, n);
        op.trans_b = !f->trans_b;
        moe_emit(b, op);
    }
    if (f->needs_grad & 2) {
        struct moe_op op = backward_of(b, block, f, 2, "_w");
        struct moe_ref left = f->trans_b ? dc : f->reads[0], right = f->trans_b ? f->reads[0] : dc;
        set_lists(&op, LISTS(MOE_READS(left, right), MOE_WRITES(moe_grad_out(b, f->reads[1]))));
        set_dims(&op, f->trans_b ? n : k, f->trans_b ? k : n, m);
        op.trans_a = true;
        moe_emit(b, op);
    }
}

/* C [rows,n] = A [rows,k] B_g [k,n] for each group g. */
static void backward_grouped(struct moe_builder *b, int block, const struct moe_op *f)
{
    moe_assert(!f->trans_b);
    struct moe_ref dc = moe_grad_in(b, f->writes[0]);
    if (f->needs_grad & 1) {
        struct moe_op op = backward_of(b, block, f, 1, "");
        set_lists(&op, LISTS(MOE_READS(dc, f->reads[1]), MOE_WRITES(moe_grad_out(b, f->reads[0]))));
        set_dims(&op, f->dims[0], f->dims[2], f->dims[1]);
        op.trans_b = true;
        moe_emit(b, op);
    }
    if (f->needs_grad & 2) {
        struct moe_op op = backward_of(b, block, f, 2, "_w");
        op.kernel = MOE_K_GROUPED_WGRAD;
        set_lists(&op, LISTS(MOE_READS(f->reads[0], dc), MOE_WRITES(moe_grad_out(b, f->reads[1]))));
        moe_emit(b, op);
    }
}

/* Other kernels: what undoes them, what that reads, and which reads of the forward its writes are gradients
 * of. */
enum { R0, R1, R2, R3, W0, DW0, END }; /* a read, the first write, or its gradient */
static const struct rule {
    enum moe_kernel forward, backward;
    int reads[MOE_REFS], writes[3];
} rules[] = {
    {MOE_K_EMBED, MOE_K_EMBED_BWD, {R0, DW0, END}, {1, END}},
    {MOE_K_RMSNORM, MOE_K_RMSNORM_BWD, {R0, R1, DW0, END}, {0, 1, END}},
    {MOE_K_ATTENTION, MOE_K_ATTENTION_BWD, {R0, DW0, END}, {0, END}},
    {MOE_K_ADD, MOE_K_ADD_BWD, {DW0, END}, {0, 1, END}},
    {MOE_K_TOPK, MOE_K_TOPK_BWD, {W0, DW0, END}, {0, END}},
    {MOE_K_NORMALIZE, MOE_K_NORMALIZE_BWD, {R0, R1, DW0, END}, {0, END}},
    {MOE_K_AUX_LOSS, MOE_K_AUX_LOSS_BWD, {R1, END}, {0, END}},
    {MOE_K_PERMUTE, MOE_K_PERMUTE_BWD, {DW0, R1, END}, {0, END}},
    {MOE_K_PERMUTE_BWD, MOE_K_PERMUTE, {DW0, R1, END}, {0, END}},
    {MOE_K_SORT_ROWS, MOE_K_UNSORT_ROWS, {DW0, R1, END}, {0, END}},
    {MOE_K_UNSORT_ROWS, MOE_K_SORT_ROWS, {DW0, R1, END}, {0, END}},
    {MOE_K_SWIGLU, MOE_K_SWIGLU_BWD, {R0, DW0, END}, {0, END}},
    {MOE_K_TAKE, MOE_K_TAKE_BWD, {R1, DW0, END}, {0, END}},
    {MOE_K_WEIGH, MOE_K_WEIGH_BWD, {R0, R1, DW0, END}, {0, 1, END}},
    {MOE_K_COMBINE, MOE_K_COMBINE_BWD, {R0, R1, R2, R3, DW0, END}, {0, 1, END}},
};

static void backward_by_rule(struct moe_builder *b, int block, const struct moe_op *f,
                             const struct rule *rule)
{
    struct moe_op op = backward_of(b, block, f, 0, "");
    op.kernel = rule->backward;
    if (op.kernel == MOE_K_TOPK_BWD) op.n_dims = 2; /* however many were chosen */
    for (int i = 0; rule->reads[i] != END; i++)
        op.reads[op.n_reads++] = rule->reads[i] == DW0  ? moe_grad_in(b, f->writes[0])
                                 : rule->reads[i] == W0 ? f->writes[0]
                                                        : f->reads[rule->reads[i]];
    for (int i = 0; rule->writes[i] != END; i++) {
        op.writes[op.n_writes++] = moe_grad_out(b, f->reads[rule->writes[i]]);
        op.serves |= 1u << rule->writes[i];
    }
    moe_emit(b, op);
}

/* Gradients go back the way the data came: what was gathered is summed where it came
 * from, and the reverse. */
static void backward_collective(struct moe_builder *b, int block, const struct moe_op *f)
{
    static const enum moe_collective reverse[] = {[MOE_ALLTOALL] = MOE_ALLTOALL,
                                                  [MOE_ALLGATHER] = MOE_REDUCESCATTER,
                                                  [MOE_REDUCESCATTER] = MOE_ALLGATHER};
    moe_assert(f->collective != MOE_ALLREDUCE);
    struct moe_op op = backward_of(b, block, f, 1, "");
    op.collective = reverse[f->collective];
    op.transport = moe_transport_reverse[f->transport];
    op.send = f->recv;
    op.recv = f->send;
    struct moe_ref from = moe_grad_in(b, f->writes[0]), to = moe_grad_out(b, f->reads[0]);
    if (!to.accumulate) {
        set_lists(&op, LISTS(MOE_READS(from), MOE_WRITES(to)));
        moe_emit(b, op);
        return;
    }
    /* A collective replaces what it writes: what comes is added to what other operations gave. */
    struct moe_buffer like = b->s->buffers[to.buffer];
    struct moe_ref came = {.shift = to.shift};
    came.buffer = moe_new_buffer(b, op.name, like.role, like.type, like.slots, like.extent);
    to.accumulate = false;
    set_lists(&op, LISTS(MOE_READS(from), MOE_WRITES(came)));
    moe_emit(b, op);
    struct moe_op add = {.kernel = MOE_K_ADD,
                         .type = op.type,
                         MOE_READS(to, came),
                         MOE_WRITES(to),
                         MOE_SIZES(like.extent),
                         .of_block = op.of_block,
                         .of_id = op.of_id,
                         .serves = op.serves};
    snprintf(add.name, sizeof add.name, "add_%.40s", op.name);
    moe_emit(b, add);
}

static void backward_op(struct moe_builder *b, int block, const struct moe_op *f)
{
    if (f->kind == MOE_COLLECTIVE) {
        backward_collective(b, block, f);
        return;
    }
    switch (f->kernel) {
    case MOE_K_GEMM: backward_gemm(b, block, f); return;
    case MOE_K_GROUPED_GEMM: backward_grouped(b, block, f); return;
    default: break;
    }
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (rules[i].forward != f->kernel) continue;
        backward_by_rule(b, block, f, &rules[i]);
        return;
    }
    moe_bug(__FILE__, __LINE__, "a forward operation without a backward rule");
}

void moe_emit_backward(struct moe_builder *b, int forward)
{
    for (int i = b->s->roles[b->role].blocks[forward].n_ops - 1; i >= 0; i--) {
        struct moe_op f = b->s->roles[b->role].blocks[forward].ops[i]; /* a copy: emitting moves the array */
        if (f.needs_grad) backward_op(b, forward, &f);
    }
}
