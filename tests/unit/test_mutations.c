/* test_mutations - single random changes of what one rank issues: check tells each that changes the result.
 *
 * Drawn uniformly over ranks, operations and the members that an operation of its kind computes with (a
 * kernel has no communicator, SORT no factor). A change that cannot matter is not expected to be told: same
 * value   the expression evaluates as before on the rank, from what is known at the start of a step same slot
 * the shift of a buffer with one slot in order     another stream, or one wait less, when all operations on
 * one slot of which one writes are still in order: the closure of host order, streams and waits, computed
 * here pair by pair no reader    N of LIMIT (but at random) and K of TOPK_BWD, that no kernel looks at
 * (kernels/ref.h) */
#include "sim/check.h"
#include "tests/fixture.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

enum { SEED = 20, DRAWS = 1500 };
/* clang-format off */
#define FIELDS(X) \
    X(KERNEL) X(COLLECTIVE) X(COMM) X(TYPE) X(STREAM) X(WAITS) X(SEND) X(RECV) X(READ_BUFFER) X(READ_SHIFT) \
    X(WRITE_BUFFER) X(WRITE_SHIFT) X(ACCUMULATE) X(DIM) X(TRANS_A) X(TRANS_B) X(GROUP) X(MODE) X(DIVISOR) \
    X(FACTOR) X(DECAY)
/* clang-format on */
#define X(name) name,
enum field { FIELDS(X) FIELD_COUNT };
#undef X
#define X(name) #name,
static const char *const field_text[] = {FIELDS(X)};
#undef X

static uint64_t drawn;
static int draw(int n) /* 0 .. n - 1 */
{
    return (int)(moe_uniform(SEED, 0, drawn++) * n);
}

/* Does an operation of this kind compute with the member? */
static bool applies(const struct moe_op *op, enum field f)
{
    enum moe_kernel k = op->kernel;
    bool kernel = op->kind == MOE_KERNEL, collective = op->kind == MOE_COLLECTIVE;
    bool aux = k == MOE_K_AUX_LOSS || k == MOE_K_AUX_LOSS_BWD;
    switch (f) {
    case WAITS: return op->waits != 0;
    case READ_BUFFER:
    case READ_SHIFT: return op->n_reads > 0;
    case WRITE_BUFFER:
    case WRITE_SHIFT: return op->n_writes > 0;
    case STREAM:
    case TYPE: return kernel || collective;
    case COLLECTIVE:
    case COMM:
    case SEND:
    case RECV: return collective;
    case KERNEL:
    case DIM: return kernel;
    case ACCUMULATE: return kernel && op->n_writes > 0;
    case TRANS_A: return kernel && k == MOE_K_GEMM;
    case TRANS_B: return kernel && (k == MOE_K_GEMM || k == MOE_K_GROUPED_GEMM);
    case GROUP: return kernel && moe_kernel_cost[k] == MOE_COST_GROUPED;
    case MODE: return kernel && k == MOE_K_LIMIT;
    case DIVISOR: return kernel && (aux || k == MOE_K_SCALE);
    case FACTOR: return kernel && (aux || k == MOE_K_CLIP || k == MOE_K_SGD || k == MOE_K_ADAMW);
    default: return kernel && k == MOE_K_ADAMW;
    }
}

struct change {
    enum field field;
    int rank, place;   /* place in reads, writes or dims */
    int before, after; /* expressions, shifts, ... */
    struct moe_block *block;
    struct moe_op *op;
};

static void set(struct change *m, int *member, int n)
{
    m->before = *member;
    *member = m->after = draw(n);
}

static void mutate(const struct moe_schedule *s, struct change *m)
{
    struct moe_op *op = m->op;
    int n;
    switch (m->field) {
    case KERNEL:
        n = (int)op->kernel;
        set(m, &n, MOE_K_COUNT);
        op->kernel = (enum moe_kernel)n;
        break;
    case COLLECTIVE:
        n = (int)op->collective;
        set(m, &n, MOE_COLLECTIVE_COUNT);
        op->collective = (enum moe_collective)n;
        break;
    case TYPE:
        n = (int)op->type;
        set(m, &n, MOE_TYPE_COUNT);
        op->type = (enum moe_type)n;
        break;
    case COMM: set(m, &op->comm, s->n_comms); break;
    case STREAM: set(m, &op->stream, MOE_STREAM_COUNT); break;
    case WAITS:
        n = draw(MOE_STREAM_COUNT);
        m->before = (int)op->waits;
        op->waits &= ~(1u << n);
        m->after = (int)op->waits;
        break;
    case SEND: set(m, &op->send, s->n_exprs); break;
    case RECV: set(m, &op->recv, s->n_exprs); break;
    case READ_BUFFER: set(m, &op->reads[m->place = draw(op->n_reads)].buffer, s->n_buffers); break;
    case WRITE_BUFFER: set(m, &op->writes[m->place = draw(op->n_writes)].buffer, s->n_buffers); break;
    case READ_SHIFT:
        n = draw(op->n_reads);
        m->place = n;
        set(m, &op->reads[n].shift, 3);
        op->reads[n].shift = --m->after;
        break;
    case WRITE_SHIFT:
        n = draw(op->n_writes);
        m->place = n;
        set(m, &op->writes[n].shift, 3);
        op->writes[n].shift = --m->after;
        break;
    case ACCUMULATE:
        n = draw(op->n_writes);
        m->place = n;
        m->before = op->writes[n].accumulate;
        m->after = op->writes[n].accumulate ^= 1;
        break;
    case DIM:
        m->place = draw(op->n_dims);
        set(m, &op->dims[m->place], s->n_exprs);
        break;
    case TRANS_A:
        op->trans_a ^= 1;
        m->after = 1;
        break;
    case TRANS_B:
        op->trans_b ^= 1;
        m->after = 1;
        break;
    case GROUP: set(m, &op->group, s->n_symbols); break;
    case MODE: set(m, &op->mode, 4); break;
    case DIVISOR: set(m, &op->divisor, s->n_exprs); break;
    case FACTOR:
        op->factor *= draw(2) ? 0.5 : -1;
        m->after = 1;
        break;
    default:
        m->before = op->decay == 0;
        op->decay = draw(2) ? 0.1 : 0.2;
        m->after = op->decay != 0.1 || m->before;
        break;
    }
}

/* ---- changes that cannot matter ---- */

static int64_t at_start(void *ctx, int symbol, int rank, int layer, int index)
{
    const struct moe_schedule *s = ctx;
    if (s->symbols[symbol].buffer >= 0) return MOE_UNKNOWN;
    return moe_symbol_initial(s, (struct moe_env){at_start, ctx}, symbol, rank, layer, index);
}

static bool same_value(struct moe_schedule *s, const struct change *m)
{
    struct moe_env env = {at_start, s};
    bool one = m->field == DIM || m->field == DIVISOR;
    for (int i = 0; i < (one ? 1 : 2); i++) { /* groups of 2; those of all 4 sum what is one number */
        int64_t a = moe_eval(s, env, m->before, m->rank, 0, i), b = moe_eval(s, env, m->after, m->rank, 0, i);
        if (a != b || a == MOE_UNKNOWN) return false;
    }
    return true;
}

enum { MOST = 1024 };
static struct {
    const struct moe_op *op;
    int layer;
    bool before[MOST]; /* which are done when this one starts */
} run[MOST];

static bool touches(const struct moe_schedule *s, int i, struct moe_ref ref, int layer, bool writes)
{
    const struct moe_op *op = run[i].op;
    for (int k = 0; k < (writes ? op->n_writes : op->n_reads); k++) {
        struct moe_ref r = writes ? op->writes[k] : op->reads[k];
        if (r.buffer == ref.buffer && moe_slot(s, r, run[i].layer) == moe_slot(s, ref, layer)) return true;
    }
    return false;
}

static void order_after(int i, int j)
{
    run[j].before[i] = true;
    for (int k = 0; k < i; k++) run[j].before[k] |= run[i].before[k];
}

static void close_order(int n)
{
    for (int j = 0; j < n; j++) {
        const struct moe_op *op = run[j].op;
        bool sync = op->kind == MOE_HOST_SYNC;
        memset(run[j].before, 0, sizeof run[j].before);
        for (int i = 0; i < j; i++) {
            bool host = run[i].op->kind == MOE_HOST_SYNC;
            if (host || (!sync && run[i].op->stream == op->stream) || (op->waits >> run[i].op->stream & 1))
                order_after(i, j);
        }
    }
}

static bool in_order(const struct moe_schedule *s, int rank)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    int n = 0;
    for (int k = 0; k < role->n_instances; k++) {
        const struct moe_block *b = &role->blocks[role->itinerary[k].block];
        for (int o = 0; o < b->n_ops; o++, n++) {
            assert_true(n < MOST);
            run[n].op = &b->ops[o];
            run[n].layer = role->itinerary[k].layer;
        }
    }
    close_order(n);
    for (int j = 0; j < n; j++)
        for (int k = 0; k < run[j].op->n_reads + run[j].op->n_writes; k++) {
            bool writes = k >= run[j].op->n_reads;
            struct moe_ref ref = writes ? run[j].op->writes[k - run[j].op->n_reads] : run[j].op->reads[k];
            for (int i = 0; i < j; i++)
                if (!run[j].before[i] && (touches(s, i, ref, run[j].layer, true) ||
                                          (writes && touches(s, i, ref, run[j].layer, false))))
                    return false;
        }
    return true;
}

static bool no_reader(const struct change *m)
{
    return m->field == DIM && ((m->op->kernel == MOE_K_LIMIT && m->place == 5) ||
                               (m->op->kernel == MOE_K_TOPK_BWD && m->place == 2));
}

static bool cannot_matter(struct moe_schedule *s, const struct change *m)
{
    const struct moe_op *op = m->op;
    switch (m->field) {
    case SEND:
    case RECV:
    case DIVISOR: return same_value(s, m);
    case DIM: return same_value(s, m) || no_reader(m);
    case READ_SHIFT: return s->buffers[op->reads[m->place].buffer].slots == 1;
    case WRITE_SHIFT: return s->buffers[op->writes[m->place].buffer].slots == 1;
    case STREAM:
    case WAITS: return in_order(s, m->rank);
    default: return false;
    }
}

/* ---- the draws ---- */

struct count {
    int told, malformed, equal, missed;
};

static struct count totals[FIELD_COUNT];

static void try_one(const struct moe_scenario *sc, const struct moe_routing *r, bool everywhere)
{
    struct moe_schedule *s = fixture_schedule(sc);
    struct change m = {.rank = draw(s->n_ranks)};
    struct moe_role *role = everywhere ? &s->roles[0] : moe_schedule_split_role(s, m.rank);
    int n = 0;
    for (int b = 0; b < role->n_blocks; b++) n += role->blocks[b].n_ops;
    n = draw(n);
    for (m.block = role->blocks; n >= m.block->n_ops; m.block++) n -= m.block->n_ops;
    m.op = &m.block->ops[n];
    do m.field = (enum field)draw(FIELD_COUNT);
    while (!applies(m.op, m.field));
    mutate(s, &m);
    struct count *c = &totals[m.field];
    if (m.before != m.after) {
        if (moe_schedule_check(s) < 0)
            c->malformed++;
        else {
            struct moe_verdicts v;
            moe_check(s, r, &v);
            bool equal = cannot_matter(s, &m);
            if (v.n)
                c->told++;
            else if (equal)
                c->equal++;
            else {
                c->missed++;
                print_message("missed: rank %d %s %s: %s %d: %d -> %d\n", m.rank, m.block->name, m.op->name,
                              field_text[m.field], m.place, m.before, m.after);
            }
            if (v.n && equal && !no_reader(&m))
                fail_msg("%s of %s is told, which cannot matter: %s", field_text[m.field], m.op->name,
                         v.item[0].text);
            moe_verdicts_free(&v);
        }
    }
    moe_schedule_free(s);
}

static struct count print_totals(void)
{
    struct count all = {0};
    for (int f = 0; f < FIELD_COUNT; f++) {
        const struct count *c = &totals[f];
        print_message("%-13s malformed %4d  told %4d  cannot matter %4d  missed %4d\n", field_text[f],
                      c->malformed, c->told, c->equal, c->missed);
        all.malformed += c->malformed;
        all.told += c->told;
        all.equal += c->equal;
        all.missed += c->missed;
    }
    print_message("seed %d: %d of %d told\n", SEED, all.told + all.malformed,
                  all.told + all.malformed + all.missed);
    memset(totals, 0, sizeof totals);
    return all;
}

static const char *const variants[] = {
    "",
    "dispatcher: allgather",
    "dispatcher: deepep",
    "capacity: {rule: megatron, factor: 1.0}",
    "capacity: {rule: megatron, factor: 1.0, pad: true}",
    "capacity: {rule: megatron, factor: 1.25, drop: position}\ndispatcher: allgather"};

static int missed(bool everywhere)
{
    drawn = 0;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        struct moe_scenario *sc = fixture_scenario(4, 2, "6", variants[i]);
        struct moe_routing *r = fixture_routing(sc);
        for (int n = 0; n < DRAWS; n++) try_one(sc, r, everywhere);
        moe_routing_free(r);
        moe_scenario_free(sc);
    }
    return print_totals().missed;
}

static void test_on_one_rank(void **state)
{
    (void)state;
    assert_int_equal(missed(false), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_on_one_rank)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
