/* mutation - single random changes of what ranks issue.
 *
 * Drawn uniformly over ranks, operations and the members that an operation of its kind computes with (a
 * kernel has no communicator, SORT no factor). A function of the seed and of how often was drawn before. */
#ifndef MOE_TEST_MUTATION_H
#define MOE_TEST_MUTATION_H

#include "sim/schedule.h"

/* clang-format off */
#define MUTATION_FIELDS(X) \
    X(KERNEL) X(COLLECTIVE) X(COMM) X(TYPE) X(STREAM) X(WAITS) X(SEND) X(RECV) X(READ_BUFFER) X(READ_SHIFT) \
    X(WRITE_BUFFER) X(WRITE_SHIFT) X(ACCUMULATE) X(DIM) X(TRANS_A) X(TRANS_B) X(GROUP) X(MODE) X(DIVISOR) \
    X(FACTOR) X(DECAY) X(READ_MICRO) X(WRITE_MICRO) X(TIMES) X(REDUCTION) X(DRAW_SEED) X(LOW) X(HIGH) \
    X(BEGIN) X(LENGTH)
/* clang-format on */
#define X(name) name,
enum mutation_field { MUTATION_FIELDS(X) FIELD_COUNT };
#undef X
#define X(name) #name,
static const char *const mutation_field_text[] = {MUTATION_FIELDS(X)};
#undef X

struct mutation_draws {
    uint64_t seed, n; /* n: drawn so far */
};

static inline int mutation_draw(struct mutation_draws *d, int n) /* 0 .. n - 1 */
{
    return (int)(moe_uniform(d->seed, 0, d->n++) * n);
}

/* The first reference behind number *i that names a part of its slot; *i: which, of reads and writes. NULL:
 * none. */
static inline struct moe_ref *mutation_range(struct moe_op *op, int *i)
{
    for (++*i; *i < op->n_reads + op->n_writes; ++*i) {
        struct moe_ref *ref = *i < op->n_reads ? &op->reads[*i] : &op->writes[*i - op->n_reads];
        if (ref->n) return ref;
    }
    return NULL;
}

/* Does an operation of this kind compute with the member? */
static inline bool mutation_applies(struct moe_op *op, enum mutation_field f)
{
    int first = -1;
    enum moe_kernel k = op->kernel;
    bool kernel = op->kind == MOE_KERNEL, collective = op->kind == MOE_COLLECTIVE;
    bool aux = k == MOE_K_AUX_LOSS || k == MOE_K_AUX_LOSS_BWD;
    switch (f) {
    case WAITS: return op->waits != 0;
    case BEGIN:
    case LENGTH: return mutation_range(op, &first) != NULL;
    case READ_BUFFER:
    case READ_MICRO:
    case READ_SHIFT: return op->n_reads > 0;
    case WRITE_BUFFER:
    case WRITE_MICRO:
    case WRITE_SHIFT: return op->n_writes > 0;
    case STREAM:
    case TYPE: return kernel || collective;
    case COLLECTIVE:
    case COMM:
    case REDUCTION:
    case SEND:
    case RECV: return collective;
    case KERNEL:
    case DIM: return kernel;
    case ACCUMULATE: return kernel && op->n_writes > 0;
    case TRANS_A: return kernel && k == MOE_K_GEMM;
    case TRANS_B: return kernel && (k == MOE_K_GEMM || k == MOE_K_GROUPED_GEMM);
    case GROUP: return kernel && moe_kernel_cost[k] == MOE_COST_GROUPED;
    case MODE: return kernel && k == MOE_K_LIMIT;
    case DRAW_SEED: return kernel && k == MOE_K_LIMIT && (op->mode & MOE_LIMIT_ORDER) == MOE_LIMIT_RANDOM;
    case LOW:
    case HIGH: return kernel && op->needs;
    case TIMES: return kernel && k == MOE_K_SCALE;
    case DIVISOR: return kernel && (aux || k == MOE_K_SCALE);
    case FACTOR: return kernel && (aux || k == MOE_K_CLIP || k == MOE_K_SGD || k == MOE_K_ADAMW);
    default: return kernel && k == MOE_K_ADAMW;
    }
}

struct mutation {
    enum mutation_field field;
    int rank, place;   /* place in reads, writes or dims */
    int before, after; /* expressions, shifts, ...: nothing was changed where they are equal */
    struct moe_block *block;
    struct moe_op *op;
};

static inline void mutation_set(struct mutation_draws *d, struct mutation *m, int *member, int n)
{
    m->before = *member;
    *member = m->after = mutation_draw(d, n);
}

/* A shift by one, or none, either way. */
static inline void mutation_move(struct mutation_draws *d, struct mutation *m, int *member)
{
    m->before = *member;
    *member = m->after = mutation_draw(d, 3) - 1;
}

static inline void mutation_flip(struct mutation *m, bool *member)
{
    m->before = *member;
    m->after = *member ^= 1;
}

/* Members that are buffers, or how they are read and written. */
static inline void mutation_change_buffers(struct mutation_draws *d, const struct moe_schedule *s,
                                           struct mutation *m)
{
    bool reads = m->field == READ_BUFFER || m->field == READ_SHIFT || m->field == READ_MICRO;
    m->place = mutation_draw(d, reads ? m->op->n_reads : m->op->n_writes);
    struct moe_ref *ref = reads ? &m->op->reads[m->place] : &m->op->writes[m->place];
    switch (m->field) {
    case READ_BUFFER:
    case WRITE_BUFFER: mutation_set(d, m, &ref->buffer, s->n_buffers); break;
    case READ_SHIFT:
    case WRITE_SHIFT: mutation_move(d, m, &ref->shift); break;
    case READ_MICRO:
    case WRITE_MICRO: mutation_move(d, m, &ref->micro); break;
    default: mutation_flip(m, &ref->accumulate); break;
    }
}

/* Of one of the parts. */
static inline void mutation_change_range(struct mutation_draws *d, const struct moe_schedule *s,
                                         struct mutation *m)
{
    int n = 0, i = -1;
    while (mutation_range(m->op, &i)) n++;
    n = mutation_draw(d, n);
    m->place = -1;
    struct moe_ref *ref;
    do ref = mutation_range(m->op, &m->place);
    while (n--);
    mutation_set(d, m, m->field == BEGIN ? &ref->begin : &ref->n, s->n_exprs);
}

static inline void mutation_change(struct mutation_draws *d, const struct moe_schedule *s, struct mutation *m)
{
    struct moe_op *op = m->op;
    int n;
    switch (m->field) {
    case KERNEL:
        n = (int)op->kernel;
        mutation_set(d, m, &n, MOE_K_COUNT);
        op->kernel = (enum moe_kernel)n;
        break;
    case COLLECTIVE:
        n = (int)op->collective;
        mutation_set(d, m, &n, MOE_COLLECTIVE_COUNT);
        op->collective = (enum moe_collective)n;
        break;
    case TYPE:
        n = (int)op->type;
        mutation_set(d, m, &n, MOE_TYPE_COUNT);
        op->type = (enum moe_type)n;
        break;
    case COMM: mutation_set(d, m, &op->comm, s->n_comms); break;
    case STREAM: mutation_set(d, m, &op->stream, MOE_STREAM_COUNT); break;
    case WAITS:
        n = mutation_draw(d, MOE_STREAM_COUNT);
        m->before = (int)op->waits;
        op->waits &= ~(1u << n);
        m->after = (int)op->waits;
        break;
    case SEND: mutation_set(d, m, &op->send, s->n_exprs); break;
    case RECV: mutation_set(d, m, &op->recv, s->n_exprs); break;
    case DIM:
        m->place = mutation_draw(d, op->n_dims);
        mutation_set(d, m, &op->dims[m->place], s->n_exprs);
        break;
    case BEGIN:
    case LENGTH: mutation_change_range(d, s, m); break;
    case TRANS_A: mutation_flip(m, &op->trans_a); break;
    case TRANS_B: mutation_flip(m, &op->trans_b); break;
    case GROUP: mutation_set(d, m, &op->group, s->n_symbols); break;
    case REDUCTION:
        n = (int)op->reduction;
        mutation_set(d, m, &n, MOE_REDUCTION_COUNT);
        op->reduction = (enum moe_reduction)n;
        break;
    case MODE: mutation_set(d, m, &op->mode, 2 * MOE_LIMIT_PAD); break;
    case DRAW_SEED:
        op->seed++;
        m->after = 1;
        break;
    case LOW: mutation_set(d, m, &op->low, s->n_exprs); break;
    case HIGH: mutation_set(d, m, &op->high, s->n_exprs); break;
    case DIVISOR: mutation_set(d, m, &op->divisor, s->n_exprs); break;
    case TIMES: mutation_set(d, m, &op->times, s->n_exprs); break;
    case FACTOR:
        op->factor *= mutation_draw(d, 2) ? 0.5 : -1;
        m->after = 1;
        break;
    case DECAY:
        op->decay += mutation_draw(d, 2) ? 0.1 : 0.2; /* also where there was none */
        m->after = 1;
        break;
    default: mutation_change_buffers(d, s, m); break;
    }
}

/* Changes one member of one operation of one rank, or (everywhere) of all ranks that issue the same list. */
static inline struct mutation mutation_one(struct mutation_draws *d, struct moe_schedule *s, bool everywhere)
{
    struct mutation m = {.rank = mutation_draw(d, s->n_ranks)};
    struct moe_role *role = everywhere ? &s->roles[s->role_of[m.rank]] : moe_schedule_split_role(s, m.rank);
    int n = 0;
    for (int b = 0; b < role->n_blocks; b++) n += role->blocks[b].n_ops;
    n = mutation_draw(d, n);
    for (m.block = role->blocks; n >= m.block->n_ops; m.block++) n -= m.block->n_ops;
    m.op = &m.block->ops[n];
    do m.field = (enum mutation_field)mutation_draw(d, FIELD_COUNT);
    while (!mutation_applies(m.op, m.field));
    mutation_change(d, s, &m);
    return m;
}

#endif
