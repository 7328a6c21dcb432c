/* test_mutations - single random changes of what one rank issues: check tells each that changes the result.
 *
 * Drawn uniformly over ranks, operations and the members that an operation of its kind computes with (a
 * kernel has no communicator, SORT no factor). A change that cannot matter is not expected to be told:
 *   same value   the expression evaluates as before on the rank, from what is known at the start of a step
 *   same slot    the shift of a buffer with one slot
 *   in order     another stream, or one wait less, when all operations on one slot of which one writes are
 *                still in order, or touch parts of it that do not meet on the rank: the closure of host
 *                order, streams and waits, computed here pair by pair
 *   need holds   low of a capacity rule is not above high
 *   no reader    N of LIMIT (but at random), that no kernel looks at (kernels/ref.h)
 *   zero         adding to what was set to zero, and to which at most parts without elements were added, or
 *                replacing it
 *   nothing      of an operation on the part of a bucket that a rank owns, where it owns nothing */
#include "sim/check/check.h"
#include "tests/fixture.h"
#include "tests/mutation.h"

#include <stdarg.h>
#include <stddef.h>

#include <setjmp.h>

#include <cmocka.h>

enum { SEED = 20, DRAWS = 1500 };
static struct mutation_draws draws = {.seed = SEED};

/* ---- changes that cannot matter ---- */

static int64_t at_start(void *ctx, int symbol, int rank, int layer, int index)
{
    const struct moe_schedule *s = ctx;
    if (s->symbols[symbol].buffer >= 0) return MOE_UNKNOWN;
    return moe_symbol_initial(s, (struct moe_env){at_start, ctx}, symbol, rank, layer, index);
}

static bool same_value(struct moe_schedule *s, const struct mutation *m)
{
    struct moe_env env = {at_start, s};
    bool one = m->field == DIM || m->field == DIVISOR || m->field == BEGIN || m->field == LENGTH;
    for (int i = 0; i < (one ? 1 : 2); i++) { /* groups of 2; those of all 4 sum what is one number */
        int64_t a = moe_eval(s, env, m->before, m->rank, 0, i), b = moe_eval(s, env, m->after, m->rank, 0, i);
        if (a != b || a == MOE_UNKNOWN) return false;
    }
    return true;
}

/* A factor: one that is not there is 1. */
static int64_t value_at_start(struct moe_schedule *s, const struct mutation *m, int expr)
{
    return expr ? moe_eval(s, (struct moe_env){at_start, s}, expr, m->rank, 0, 0) : 1;
}

/* What the capacity rule needs. */
static bool holds_at_start(struct moe_schedule *s, const struct mutation *m)
{
    int64_t low = value_at_start(s, m, m->op->low), high = value_at_start(s, m, m->op->high);
    return low != MOE_UNKNOWN && high != MOE_UNKNOWN && low <= high;
}

enum { MOST = 1024 };
static struct {
    const struct moe_op *op;
    int layer;
    bool before[MOST]; /* which are done when this one starts */
} run[MOST];

/* Have two references to one slot an element in common? */
static bool meet(const struct moe_schedule *s, int rank, struct moe_ref a, struct moe_ref b)
{
    struct moe_env env = {at_start, (void *)s};
    if (!a.n || !b.n) return true;
    int64_t from_a = moe_eval(s, env, a.begin, rank, 0, 0), n_a = moe_eval(s, env, a.n, rank, 0, 0),
            from_b = moe_eval(s, env, b.begin, rank, 0, 0), n_b = moe_eval(s, env, b.n, rank, 0, 0);
    return n_a && n_b && from_a < from_b + n_b && from_b < from_a + n_a;
}

static bool touches(const struct moe_schedule *s, int rank, int i, struct moe_ref ref, int layer, bool writes)
{
    const struct moe_op *op = run[i].op;
    for (int k = 0; k < (writes ? op->n_writes : op->n_reads); k++) {
        struct moe_ref r = writes ? op->writes[k] : op->reads[k];
        if (r.buffer == ref.buffer && moe_slot(s, r, run[i].layer) == moe_slot(s, ref, layer) &&
            meet(s, rank, r, ref))
            return true;
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
                if (!run[j].before[i] && (touches(s, rank, i, ref, run[j].layer, true) ||
                                          (writes && touches(s, rank, i, ref, run[j].layer, false))))
                    return false;
        }
    return true;
}

/* The rank owns nothing of what the operation works on; after another range that is not as before. */
static bool owns_nothing(struct moe_schedule *s, const struct mutation *m)
{
    struct moe_env env = {at_start, s};
    int i = -1;
    for (struct moe_ref *ref = mutation_range(m->op, &i); ref; ref = mutation_range(m->op, &i)) {
        int n = m->field == LENGTH && i == m->place ? m->before : ref->n;
        if (moe_eval(s, env, n, m->rank, 0, 0) == 0) return true;
    }
    return false;
}

/* Whenever the operation runs, its slot was set to zero, and only parts without elements were added since. */
static bool adds_to_zero(const struct moe_schedule *s, const struct mutation *m)
{
    const struct moe_role *role = &s->roles[s->role_of[m->rank]];
    struct moe_env env = {at_start, (void *)s};
    bool zero = false, runs = false;
    for (int k = 0; k < role->n_instances; k++) {
        const struct moe_block *b = &role->blocks[role->itinerary[k].block];
        for (int o = 0; o < b->n_ops; o++) {
            const struct moe_op *op = &b->ops[o];
            if (op == m->op && !zero) return false;
            runs |= op == m->op;
            bool nothing = op->n_reads && op->reads[0].n &&
                           moe_eval(s, env, op->reads[0].n, m->rank, role->itinerary[k].layer, 0) == 0;
            for (int w = 0; w < op->n_writes; w++)
                if (moe_same_slot(s, op->writes[w], m->op->writes[m->place]))
                    zero = (op->kind == MOE_KERNEL && op->kernel == MOE_K_ZERO) || (zero && nothing);
        }
    }
    return runs;
}

static bool no_reader(const struct mutation *m)
{
    return m->field == DIM && m->op->kernel == MOE_K_LIMIT && m->place == 5;
}

static bool cannot_matter(struct moe_schedule *s, const struct mutation *m)
{
    const struct moe_op *op = m->op;
    if (owns_nothing(s, m)) return true;
    switch (m->field) {
    case BEGIN:
    case LENGTH:
    case SEND:
    case RECV:
    case DIVISOR: return same_value(s, m);
    case DIM: return same_value(s, m) || no_reader(m);
    case ACCUMULATE: return s->buffers[op->writes[m->place].buffer].slots == 1 && adds_to_zero(s, m);
    case TIMES: return value_at_start(s, m, m->before) == value_at_start(s, m, m->after);
    case READ_SHIFT: return s->buffers[op->reads[m->place].buffer].slots == 1;
    case WRITE_SHIFT: return s->buffers[op->writes[m->place].buffer].slots == 1;
    case READ_MICRO: return !s->buffers[op->reads[m->place].buffer].per_micro;
    case WRITE_MICRO: return !s->buffers[op->writes[m->place].buffer].per_micro;
    case STREAM:
    case WAITS: return in_order(s, m->rank);
    case LOW:
    case HIGH: return holds_at_start(s, m);
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
    struct mutation m = mutation_one(&draws, s, everywhere);
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
                              mutation_field_text[m.field], m.place, m.before, m.after);
            }
            if (v.n && equal && !no_reader(&m) && !owns_nothing(s, &m))
                fail_msg("%s of %s is told, which cannot matter: %s", mutation_field_text[m.field],
                         m.op->name, v.item[0].text);
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
        print_message("%-13s malformed %4d  told %4d  cannot matter %4d  missed %4d\n",
                      mutation_field_text[f], c->malformed, c->told, c->equal, c->missed);
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
    "dispatcher: deepep_low_latency",
    "dispatcher: nvlink_one_sided",
    "capacity: {rule: megatron, factor: 1.0}",
    "capacity: {rule: megatron, factor: 1.0, pad: true}",
    "capacity: {rule: megatron, factor: 1.25, drop: position}\ndispatcher: allgather",
    "distributed_optimizer: {bucket_size: 300}\noverlap_grad_reduce: true"};

static int missed(bool everywhere)
{
    draws.n = 0;
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

/* ---- changes on all ranks ---- */

static int errors_of(const struct moe_schedule *s, const struct moe_scenario *sc, int check_class)
{
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    int n = 0;
    assert_int_equal(moe_schedule_check(s), MOE_OK);
    moe_check(s, r, &v);
    for (int i = 0; i < v.n; i++) n += v.item[i].check_class == check_class;
    assert_int_equal(n, v.n);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    return n;
}

/* A rate is one for all parameters; a decay is one for all layers of a parameter, here on two stages. */
static void test_settings(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_layout(2, 2, 1, "pipeline_parallel: 2, micro_batches: 2", "4", "");
    for (int i = 0; i < 2; i++) {
        struct moe_schedule *s = fixture_schedule(sc);
        assert_int_equal(errors_of(s, sc, 0), 0);
        struct moe_op *op = fixture_op(&s->roles[1], MOE_UPDATE, "update_w1");
        *(i ? &op->factor : &op->decay) *= 2;
        assert_int_equal(errors_of(s, sc, 16), 1);
        struct moe_routing *r = fixture_routing(sc);
        struct moe_verdicts v;
        moe_check(s, r, &v);
        assert_string_equal(v.item[0].op, "layer 1 update update_w1");
        assert_non_null(strstr(v.item[0].text, "on rank 0"));
        moe_verdicts_free(&v);
        moe_routing_free(r);
        moe_schedule_free(s);
    }
    moe_scenario_free(sc);
}

/* A limit of 0 is a limit like others. */
static void test_clip_to_nothing(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(2, 1, "4", "clip_norm: 1.0");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_role *role = moe_schedule_split_role(s, 0);
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++)
            if (role->blocks[b].ops[o].kernel == MOE_K_CLIP) role->blocks[b].ops[o].factor = 0;
    struct moe_routing *r = fixture_routing(sc);
    struct moe_verdicts v;
    moe_check(s, r, &v);
    assert_true(v.n > 0);
    for (int i = 0; i < v.n; i++)
        assert_non_null(strstr(v.item[i].text, "clips to a norm of 1, rank 0 to 0"));
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* In groups of one rank all collectives copy, and a group of the same ranks does as well. */
static void test_groups_of_one(void **state)
{
    (void)state;
    struct moe_scenario *sc = fixture_scenario(2, 1, "4", "");
    struct moe_schedule *s = fixture_schedule(sc);
    struct moe_op *op = fixture_op(&s->roles[0], MOE_FORWARD, "dispatch");
    int alone = 1; /* of ep, which has one rank a group */
    while (alone == op->comm || s->comms[alone].n_groups < 2) alone++;
    op->collective = MOE_ALLGATHER;
    op->comm = alone;
    assert_int_equal(errors_of(s, sc, 0), 0);
    moe_schedule_free(s);
    moe_scenario_free(sc);
}

/* Of a rule that draws tokens, the seed is part of what is computed: on one rank another is told. */
static void test_seed_of_a_rule(void **state)
{
    (void)state;
    struct moe_scenario *sc = NULL;
    if (moe_scenario_parse("seed.yaml",
                           "model: {layers: 2, hidden: 8, ffn: 6, experts: 8, top_k: 1, heads: 0}\n"
                           "layout: {ranks: 2, expert_parallel: 2}\ntokens_per_rank: 6\n"
                           "capacity: {rule: deepspeed, factor: 1.0, random_tokens: true}\n",
                           &sc) < 0)
        fail_msg("%s", moe_error());
    for (int differs = 0; differs < 2; differs++) {
        struct moe_schedule *s = fixture_schedule(sc);
        struct moe_role *role = moe_schedule_split_role(s, 1);
        for (int b = 0; b < role->n_blocks; b++)
            for (int o = 0; o < role->blocks[b].n_ops; o++)
                if (role->blocks[b].ops[o].kernel == MOE_K_LIMIT)
                    role->blocks[b].ops[o].seed += (uint64_t)differs;
        assert_int_equal(errors_of(s, sc, 8), differs);
        moe_schedule_free(s);
    }
    moe_scenario_free(sc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_on_one_rank), cmocka_unit_test(test_settings),
                                       cmocka_unit_test(test_groups_of_one),
                                       cmocka_unit_test(test_clip_to_nothing),
                                       cmocka_unit_test(test_seed_of_a_rule)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
