/* soundness - neither false alarms nor misses of check, with execution as the oracle, in one job of real
 * ranks.
 *
 *   mpirun -n 8 bench_soundness [--scenarios N] [--mutations N] [--alike N] [--seed S] [--first K]
 *
 * scenarios   random valid ones (soundness_scenario.c) run on their ranks, in host order or another that the
 *             streams allow (soundness_order.c); gradients, norms, updated parameters and losses are compared
 *             with those of one rank that has all tokens. Those that are equal must have no error of check.
 * mutations   one random change (tests/mutation.h) of one operation of one rank in such a scenario, run on
 *             real ranks: as it is, with members that ask each other first (runtime/agree.h), and where that
 *             ends well in both extreme orders of the streams. Compared with the run without the change.
 *             Those that hang, fail or compute other results must have an error of check, those that are
 *             equal none, but what a rule explains (soundness_explain.c). For each equal one false verdicts
 *             are planted: no rule may explain them.
 * alike       the same, where all ranks that issue the same list have the change. Off by default: after
 *             thousands of failed runs in one job Open MPI may stall in MPI_Comm_create_group.
 * Case K of a kind is a function of S and K: `--first K --mutations 1` repeats it alone and prints its YAML.
 * Exit code 5 with any false alarm, or any miss, that no rule explains, or a
 * planted one that is. */
#include "tests/bench/soundness.h"
#include "tests/fixture.h"

#include <fcntl.h>
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_RANKS = 8 };
static const char *const kind_text[] = {"scenarios", "mutations", "alike"};
static const double wait_s = 300, valid_timeout_s = 60, wrong_timeout_s = 0.5, sure_timeout_s = 10;

static struct moe_communicator *world; /* never used by a case: it outlives each */
static int64_t seed = 1;

/* ---- what all ranks tell each other ---- */

static void gather(enum moe_type type, const void *in, int64_t n, void *out, const int64_t *recv)
{
    const struct moe_op op = {.kind = MOE_COLLECTIVE, .collective = MOE_ALLGATHER, .type = type};
    int err = world->table->start(world, &(struct moe_transfer){&op, in, out, &n, recv});
    if (err >= 0) err = world->table->wait(world, wait_s);
    if (err < 0) moe_bug(__FILE__, __LINE__, moe_error());
}

static int64_t largest(int64_t mine)
{
    int64_t all[MOST_RANKS], one[MOST_RANKS], most = mine;
    for (int r = 0; r < world->size; r++) one[r] = 1;
    gather(MOE_I64, &mine, 1, all, one);
    for (int r = 0; r < world->size; r++)
        if (all[r] > most) most = all[r];
    return most;
}

/* Of numbers from 0 on, whose bits are in their order; NaN is above. */
static double largest_double(double mine)
{
    int64_t bits;
    memcpy(&bits, &mine, sizeof bits);
    bits = largest(bits & INT64_MAX);
    memcpy(&mine, &bits, sizeof mine);
    return mine;
}

static double sum_double(double mine)
{
    double all[MOST_RANKS], sum = 0;
    int64_t one[MOST_RANKS];
    for (int r = 0; r < world->size; r++) one[r] = 1;
    gather(MOE_F64, &mine, 1, all, one);
    for (int r = 0; r < world->size; r++) sum += all[r];
    return sum;
}

/* The routing that really happened: what the ranks of a run chose. */
static struct moe_routing *routing_of(const struct moe_schedule *s, const struct run *run)
{
    int n_layers = s->n_layers * s->n_micro, buffer = 0;
    int64_t counts[MOST_RANKS] = {0}, from[MOST_RANKS + 1] = {0}, n;
    while (strcmp(s->buffers[buffer].name, "expert") != 0) buffer++;
    for (int r = 0; r < world->size; r++) {
        counts[r] = r < s->n_ranks ? s->tokens[r] * s->top_k * n_layers : 0;
        from[r + 1] = from[r] + counts[r];
    }
    int32_t *mine = moe_alloc((size_t)counts[world->rank], sizeof *mine),
            *all = moe_alloc((size_t)from[world->size], sizeof *all);
    for (int layer = 0; layer < n_layers && run; layer++) {
        const int32_t *chosen = moe_execute_buffer(run->x, buffer, layer, &n);
        if (chosen) memcpy(mine + counts[world->rank] / n_layers * layer, chosen, (size_t)n * sizeof *mine);
    }
    gather(MOE_I32, mine, counts[world->rank], all, counts);
    struct moe_routing *r = moe_routing_new(n_layers, s->n_ranks, s->n_experts, s->top_k);
    int n_stages = moe_n_stages(s), each = s->n_ranks / n_stages;
    for (int rank = 0; rank < s->n_ranks; rank++) {
        r->tokens[rank] = s->tokens[rank];
        for (int layer = 0; layer < n_layers; layer++) {
            int stage = layer % s->n_layers / (s->n_layers / n_stages), of = stage * each + rank % each;
            moe_routing_add(r, layer, rank, s->tokens[rank], all + from[of] + counts[of] / n_layers * layer);
        }
    }
    free(mine);
    free(all);
    return r;
}

/* ---- one case ---- */

static struct moe_scenario *parse(const char *text)
{
    struct moe_scenario *sc = NULL;
    if (moe_scenario_parse("scenario.yaml", text, &sc) < 0) {
        fprintf(stderr, "%s", text);
        moe_bug(__FILE__, __LINE__, moe_error());
    }
    return sc;
}

static void open_scene(struct draws *d, bool telling, struct scene *y)
{
    scenario_draw(d, world->size < MOST_RANKS ? world->size : MOST_RANKS, telling, y->text, y->alone);
    y->sc = parse(y->text);
    y->sc1 = parse(y->alone);
    y->s = fixture_schedule(y->sc);
}

static void close_scene(struct scene *y)
{
    moe_schedule_free(y->s);
    moe_scenario_free(y->sc);
    moe_scenario_free(y->sc1);
}

/* Of tokens that are the same, rounding says who is more probable: many ranks would keep others than one. */
static bool picks(const struct moe_scenario *sc)
{
    return strcmp(sc->capacity.rule, "dropless") != 0;
}

static int next_id(void)
{
    static int id = 0;
    return ++id;
}

/* Errors that check finds; text: the first ones, with their classes. */
static int errors_of(const struct moe_schedule *s, const struct moe_routing *r, char text[TEXT])
{
    struct moe_verdicts v;
    int n = 0;
    size_t used = 0;
    moe_check(s, r, &v);
    *text = 0;
    for (int i = 0; i < v.n; i++) {
        if (v.item[i].severity != MOE_SEVERITY_ERROR) continue;
        n++;
        if (used < TEXT)
            used += (size_t)snprintf(text + used, TEXT - used, "  C%d %s: %s\n", v.item[i].check_class,
                                     v.item[i].op, v.item[i].text);
    }
    moe_verdicts_free(&v);
    return n;
}

static void print_indented(const char *text)
{
    for (const char *p = text, *end; *p; p = end + 1) {
        end = strchr(p, '\n');
        printf("    %.*s\n", (int)(end - p), p);
    }
}

/* ---- valid scenarios ---- */

static struct {
    int run, equal, alarms, failed;
    double most, most_params;
} valid;

static void say_valid(const struct scene *y, int64_t number, const char *what, const char *more)
{
    printf("scenario %lld of seed %lld: %s\n%s", (long long)number, (long long)seed, what, more);
    print_indented(y->text);
}

static void try_scenario(int64_t number)
{
    struct draws d = {.seed = moe_hash64((uint64_t)seed * KIND_COUNT + SCENARIOS) + (uint64_t)number};
    struct scene y;
    char text[TEXT];
    open_scene(&d, false, &y);
    struct moe_schedule *s1 = fixture_schedule(y.sc1);
    struct how how = {1, valid_timeout_s, .agree = draw(&d, 2), .distinct = picks(y.sc)};
    int order = draw(&d, 3);
    struct moe_schedule *s = fixture_schedule(y.sc);
    if (order < 2) order_streams(s, order);
    struct run *many = run_steps(s, next_id(), how), *one = NULL;
    double gradients = 0, params = 0, loss = many ? many->loss : 0;
    bool failed = largest(many ? many->end : END_EQUAL) > END_EQUAL;
    if (many && !failed) {
        one = run_steps(s1, 0, (struct how){1, valid_timeout_s, .alone = true, .distinct = how.distinct});
        gradients = one->end == END_EQUAL ? run_difference(many, one, world->rank, &params) : NAN;
    }
    gradients = largest_double(gradients);
    params = largest_double(params);
    struct moe_routing *r = failed ? fixture_routing(y.sc) : routing_of(y.s, many);
    double losses = sum_double(loss), expected = one ? one->loss : 0;
    if (world->rank == 0) {
        bool equal = !failed && gradients <= run_bound(y.s, MOE_BUF_GRAD) &&
                     params <= run_bound(y.s, MOE_BUF_PARAM) &&
                     fabs(losses - expected) <= run_bound(y.s, MOE_BUF_GRAD) * expected;
        int errors = errors_of(y.s, r, text);
        valid.run++;
        valid.equal += equal;
        valid.failed += failed;
        if (!(gradients <= valid.most)) valid.most = gradients;
        if (!(params <= valid.most_params)) valid.most_params = params;
        if (errors)
            valid.alarms++, say_valid(&y, number, equal ? "false alarm" : "alarm, and other results", text);
        if (!equal && !errors) {
            snprintf(text, sizeof text, "  gradients %.3g, parameters %.3g, loss %.17g for %.17g%s%s\n",
                     gradients, params, losses, expected, failed ? ", " : "",
                     failed && many ? many->error : "");
            say_valid(&y, number, "not what one rank computes, and no error of check", text);
        }
    }
    moe_routing_free(r);
    run_close(many, failed);
    run_close(one, false);
    moe_schedule_free(s);
    moe_schedule_free(s1);
    close_scene(&y);
}

/* ---- mutations ---- */

static struct {
    int malformed, same;       /* not a schedule; nothing changed: others are drawn */
    int ends[END_COUNT][2][2]; /* how it ended, asked before, told */
    int alarms[RULE_COUNT], misses[RULE_COUNT];
    int unlike; /* asking made a good end of a bad one, or else */
    int planted, excused;
} tally[KIND_COUNT];

/* The worst of all ranks. */
static struct outcome run_steps_of(const struct trial *t, const struct moe_schedule *s, struct how how)
{
    struct outcome out = {END_EQUAL, ""};
    how.distinct = picks(t->scene.sc);
    struct run *run = run_steps(s, next_id(), how);
    if (run) out.end = run_compare(run, t->after[how.n_steps - 1], t->before);
    enum end worst = (enum end)largest(out.end);
    if (run && out.end == worst) snprintf(out.error, sizeof out.error, "%s", run->error);
    run_close(run, worst > END_DIFFERS);
    out.end = worst;
    return out;
}

/* What is equal to the bit after a step must stay so: the optimizer's state counts from
 * the second step on. */
static struct outcome execute(const struct trial *t, double timeout_s, bool agree)
{
    struct outcome out = run_steps_of(t, t->s, (struct how){1, timeout_s, .agree = agree});
    return out.end == END_EQUAL ? run_steps_of(t, t->s, (struct how){2, timeout_s, .agree = agree}) : out;
}

/* What ends well in host order must do so in any order that its streams allow. */
static void execute_in_orders(struct trial *t)
{
    for (int first = 0; first < MOE_STREAM_COUNT && t->o[0].end <= END_ROUNDED; first++) {
        struct mutation_draws changes = t->changes;
        struct moe_schedule *s = fixture_schedule(t->scene.sc);
        mutation_one(&changes, s, t->kind == ALIKE);
        order_streams(s, first);
        struct outcome out = run_steps_of(t, s, (struct how){2, sure_timeout_s});
        if (out.end > END_ROUNDED) {
            t->o[0] = out;
            t->o[0].end = END_RACED;
        }
        moe_schedule_free(s);
    }
    for (int r = 0; r < t->s->n_ranks && t->o[0].end <= END_ROUNDED; r++)
        if (order_races(t->s, r, t->o[0].error, sizeof t->o[0].error)) t->o[0].end = END_RACED;
}

static void say(const struct trial *t, const struct outcome *o, const char *what, enum rule rule,
                const char *text)
{
    const struct mutation *m = &t->m;
    printf("%s %lld of seed %lld: %s: rank %d %s %s %s: %s %d: %d -> %d; ran: %s %s\n  %s\n",
           kind_text[t->kind], (long long)t->number, (long long)seed, what, m->rank, m->block->name,
           moe_pass_text[m->block->pass], m->op->name, mutation_field_text[m->field], m->place, m->before,
           m->after, end_text[o->end], o->error, rule_text[rule]);
    printf("%s", text);
    if (rule != RULE_NONE) return;
    print_indented(t->scene.text);
}

/* On the rank that was changed, after two steps without the change, in every slot. */
static bool reads_the_same(const struct trial *t)
{
    const struct moe_schedule *s = t->scene.s;
    int64_t n_a, n_b;
    if (t->m.field != READ_BUFFER || world->rank != t->m.rank || !t->after[1]) return false;
    if (s->buffers[t->m.before].slots != s->buffers[t->m.after].slots) return false;
    for (int slot = 0; slot < s->buffers[t->m.before].slots; slot++) {
        if (!moe_holds(s, t->m.before, slot, world->rank)) continue;
        const void *a = moe_execute_buffer(t->after[1]->x, t->m.before, slot, &n_a),
                   *b = moe_execute_buffer(t->after[1]->x, t->m.after, slot, &n_b);
        size_t bytes = (size_t)moe_type_bytes[s->buffers[t->m.before].type];
        if (!a || !b || n_a != n_b || memcmp(a, b, (size_t)n_a * bytes) != 0) return false;
    }
    return s->buffers[t->m.before].type == s->buffers[t->m.after].type;
}

static void judge(const struct trial *t)
{
    char text[TEXT];
    int errors = errors_of(t->s, t->r, text);
    bool wrong = t->o[0].end > END_ROUNDED, wrong_asked = t->o[1].end > END_ROUNDED;
    bool unlike = wrong != wrong_asked && t->o[0].end != END_RACED;
    enum rule rule = RULE_NONE;
    for (int asked = 0; asked < 2; asked++) tally[t->kind].ends[t->o[asked].end][asked][errors > 0]++;
    if (wrong && !errors) {
        rule = explain_miss(t);
        tally[t->kind].misses[rule]++;
        say(t, &t->o[0], "miss", rule, "");
    }
    if (!wrong && errors) {
        rule = explain_alarm(t);
        tally[t->kind].alarms[rule]++;
        say(t, &t->o[0], "false alarm", rule, text);
    }
    if (!wrong) tally[t->kind].excused += explain_planted(t, &tally[t->kind].planted);
    if (unlike && rule != RULE_MIXED) {
        tally[t->kind].unlike++;
        say(t, &t->o[1], "unlike when asked before", RULE_NONE, text);
    }
}

static void change(struct trial *t, struct mutation_draws *changes)
{
    for (;;) {
        t->s = fixture_schedule(t->scene.sc);
        t->changes = *changes;
        t->m = mutation_one(changes, t->s, t->kind == ALIKE);
        bool same = t->m.before == t->m.after, malformed = !same && moe_schedule_check(t->s) < 0;
        tally[t->kind].same += same;
        tally[t->kind].malformed += malformed;
        if (!same && !malformed) return;
        moe_schedule_free(t->s);
    }
}

static void try_mutation(enum kind kind, int64_t number)
{
    struct draws d = {.seed = moe_hash64((uint64_t)seed * KIND_COUNT + kind) + (uint64_t)number};
    struct mutation_draws changes = {.seed = moe_hash64(d.seed)};
    struct trial t = {.kind = kind, .number = number};
    char text[TEXT];
    open_scene(&d, true, &t.scene);
    change(&t, &changes);
    if (world->rank == 0) /* for those that break the job */
        fprintf(stderr, "%s %lld: rank %d %s: %s\n", kind_text[kind], (long long)number, t.m.rank,
                t.m.op->name, mutation_field_text[t.m.field]);
    bool distinct = picks(t.scene.sc);
    t.before = run_steps(t.scene.s, next_id(), (struct how){0, valid_timeout_s});
    for (int i = 0; i < 2; i++) {
        t.after[i] =
            run_steps(t.scene.s, next_id(), (struct how){i + 1, valid_timeout_s, .distinct = distinct});
        if (largest(t.after[i] ? t.after[i]->end : END_EQUAL) > END_EQUAL)
            moe_bug(__FILE__, __LINE__, t.scene.text);
    }
    t.r = routing_of(t.scene.s, t.after[0]);
    for (int asked = 0; asked < 2; asked++) {
        t.o[asked] = execute(&t, wrong_timeout_s, asked);
        if (t.o[asked].end == END_NO_ANSWER && largest(world->rank == 0 && !errors_of(t.s, t.r, text)))
            t.o[asked] = execute(&t, sure_timeout_s, asked); /* a busy machine is no hang */
    }
    execute_in_orders(&t);
    t.same = largest(reads_the_same(&t));
    if (world->rank == 0) judge(&t);
    run_close(t.before, false);
    for (int i = 0; i < 2; i++) run_close(t.after[i], false);
    moe_routing_free(t.r);
    moe_schedule_free(t.s);
    close_scene(&t.scene);
}

/* ---- the job ---- */

/* All ranks are on one host: rank 0 makes a file, and says which process and descriptor it is. */
static void open_shared(void)
{
    int64_t mine[2] = {0}, all[2 * MOST_RANKS], two[MOST_RANKS];
    char path[64];
    for (int r = 0; r < world->size; r++) two[r] = 2;
    int file = memfd_create("soundness", 0);
    if (file < 0 || ftruncate(file, 4096) < 0) moe_bug(__FILE__, __LINE__, "memfd_create");
    mine[0] = getpid();
    mine[1] = file;
    gather(MOE_I64, mine, 2, all, two);
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)all[0], (long long)all[1]);
    int shared = open(path, O_RDWR);
    if (shared < 0) moe_bug(__FILE__, __LINE__, path);
    run_open_machine(shared);
    largest(0); /* rank 0 keeps it open until all have */
    close(file);
    close(shared);
}

/* ---- report ---- */

static int report_valid(void)
{
    if (!valid.run) return 0;
    printf(
        "scenarios: %d run, %d equal to one rank (gradients within %.2g, parameters %.2g), %d false alarms\n",
        valid.run, valid.equal, valid.most, valid.most_params, valid.alarms);
    return valid.alarms + valid.run - valid.equal;
}

static int report_mutations(enum kind kind, int n)
{
    int wrong = 0, told = 0, equal = 0;
    if (!n) return 0;
    printf("%s: %d run; drawn besides: %d malformed, %d that change nothing\n", kind_text[kind], n,
           tally[kind].malformed, tally[kind].same);
    printf("  %-28s %8s %8s %16s\n", "the run", "error", "none", "asked before");
    for (int e = 0; e < END_COUNT; e++) {
        int(*row)[2] = tally[kind].ends[e];
        printf("  %-28s %8d %8d %8d %8d\n", end_text[e], row[0][1], row[0][0], row[1][1], row[1][0]);
        if (e > END_ROUNDED)
            wrong += row[0][0] + row[0][1], told += row[0][1];
        else
            equal += row[0][0] + row[0][1];
    }
    int alarms = 0;
    for (int rule = 0; rule < RULE_COUNT; rule++) {
        alarms += tally[kind].alarms[rule];
        if (tally[kind].alarms[rule] + tally[kind].misses[rule])
            printf("  %d alarms, %d misses: %s\n", tally[kind].alarms[rule], tally[kind].misses[rule],
                   rule_text[rule]);
    }
    printf("  told %d of %d wrong ones (%.2f %%), %d alarms of %d equal ones, asking before changed %d\n",
           told, wrong, wrong ? 100.0 * told / wrong : 100, alarms, equal, tally[kind].unlike);
    printf("  planted in equal ones: %d false verdicts, %d excused\n", tally[kind].planted,
           tally[kind].excused);
    return tally[kind].alarms[RULE_NONE] + tally[kind].misses[RULE_NONE] + tally[kind].unlike +
           tally[kind].excused;
}

static int64_t option(int argc, char **argv, const char *name, int64_t otherwise)
{
    for (int i = 1; i + 1 < argc; i += 2)
        if (!strcmp(argv[i], name)) return strtoll(argv[i + 1], NULL, 10);
    return otherwise;
}

int main(int argc, char **argv)
{
    const int64_t n[KIND_COUNT] = {option(argc, argv, "--scenarios", 1000),
                                   option(argc, argv, "--mutations", 1000), option(argc, argv, "--alike", 0)};
    int64_t first = option(argc, argv, "--first", 0), begin = moe_now_ns();
    seed = option(argc, argv, "--seed", 1);
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    open_shared();
    int bad = 0;
    for (int64_t i = first; i < first + n[SCENARIOS]; i++) try_scenario(i);
    if (world->rank == 0) bad += report_valid();
    for (int kind = MUTATIONS; kind < KIND_COUNT; kind++) {
        for (int64_t i = first; i < first + n[kind]; i++) try_mutation((enum kind)kind, i);
        if (world->rank == 0) bad += report_mutations((enum kind)kind, (int)n[kind]);
    }
    if (world->rank == 0)
        printf("soundness: %s; seed %lld, %d ranks, %.0f s\n", bad ? "FAILED" : "passed", (long long)seed,
               world->size, 1e-9 * (double)(moe_now_ns() - begin));
    bad = (int)largest(bad);
    world->table->close(world);
    return bad ? 5 : 0;
}
