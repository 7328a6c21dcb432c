/* Do two dispatchers train the same bits, and what about a rank or an expert without tokens? Started by
 * mpirun with 4 ranks.
 *
 *   dispatchers [few]               the table of tests/cases/starved_rank, or where the last rank has 15 rows
 *   dispatchers A.yaml B.yaml [N]   two scenarios, N (3) steps of them
 *
 * Both runs of a pair start from one seed and train on the same tokens. A verdict says of the step in which
 * they part: do experts get the same rows in the same order; does a sum have another shape; which gradient
 * differs first, in the order in which the backward pass wrote them; and by how many units in the last
 * place.
 *
 * The table's experts are 8 of a hidden size of 256, two on each rank, top-2, 32 tokens a rank; three steps,
 * of which the second gives the last rank so many rows, all of one expert and all from rank 0.
 *   fixed tree       every pair is equal, whatever starves: row order is the same, sums of two have one
 *                    result
 *   tree by rows     weighed at home a dot product is one of 64; on the expert's rank, of the rows there. So
 *                    a rank with 1 to 15 of them makes another tree, a rank with 0 has none, and 16 are
 *                    enough
 *   bfloat16         the same, but that a sum of floats rounded to 8 bits hides most of its last bits
 *   top-4            sums of four terms: in groups by rank, or all at home
 *   peers reversed   the same rows in another order: other sums in the gradients of experts, and only there
 * Products of experts are those of BLAS, but in the last: there the place of a row in a product decides its
 * bits too. It fails when one of these does not hold, or when what differs first is not a gradient of
 * probabilities. */
#include "tests/bench/dispatchers.h"

#include "tests/mpi/parity.h"

#include <stdlib.h>
#include <string.h>

static const char *const rows_text[] = {"same", "other order", "other"};

/* ---- a scenario of the table ---- */

enum { RANKS = 4, LAYERS = 2, EXPERTS = 8, TOKENS = 32, STEPS = 3, FORCED_STEP = 1, FREE = -1 };

struct setting {
    const char *dtype;
    int top_k;
    bool by_rows;
    int rows; /* of the last rank in the forced step; FREE: nothing is forced */
};
struct way {
    const char *name, *keys;
    int plant;
};
static const struct way home = {"alltoall home", "dispatcher: alltoall\napply_probs: home\n"},
                        away = {"alltoall expert", "dispatcher: alltoall\napply_probs: expert\n"},
                        gather = {"allgather", "dispatcher: allgather\n"},
                        plain = {"alltoall home", "dispatcher: alltoall\napply_probs: home\n",
                                 PLAIN_PRODUCTS},
                        turned = {"peers reversed", "dispatcher: alltoall\napply_probs: home\n",
                                  PLAIN_PRODUCTS | PLANT_PEERS};

/* Choices of a rank's tokens: the last expert gets none, the one before `rows` of rank 0, others the rest. */
static int write_counts(char *out, size_t size, const struct setting *set)
{
    int n = 0;
    for (int l = 0; l < LAYERS; l++) {
        n += snprintf(out + n, size - (size_t)n, "%s[", l ? ", " : "");
        for (int r = 0; r < RANKS; r++) {
            int mine = r ? 0 : set->rows, left = TOKENS * set->top_k - mine, others = EXPERTS - 2;
            n += snprintf(out + n, size - (size_t)n, "%s[", r ? ", " : "");
            for (int e = 0; e < others; e++)
                n += snprintf(out + n, size - (size_t)n, "%d, ", left / others + (e < left % others));
            n += snprintf(out + n, size - (size_t)n, "%d, 0]", mine);
        }
        n += snprintf(out + n, size - (size_t)n, "]");
    }
    return n;
}

static struct run *train(struct moe_communicator *world, const struct setting *set, const struct way *way)
{
    char counts[1024], text[2048];
    struct moe_scenario *sc;
    counts[write_counts(counts, sizeof counts, set)] = 0;
    int n =
        snprintf(text, sizeof text,
                 "model: {layers: %d, hidden: 256, ffn: 32, experts: %d, top_k: %d}\n"
                 "layout: {ranks: %d, expert_parallel: %d}\ntokens_per_rank: %d\ndtype: %s\n%srow_dot: %s\n",
                 LAYERS, EXPERTS, set->top_k, RANKS, RANKS, TOKENS, set->dtype, way->keys,
                 set->by_rows ? "by_rows" : "fixed");
    if (set->rows != FREE)
        snprintf(text + n, sizeof text - (size_t)n, "routing: {counts: [%s], step: %d}\n", counts,
                 FORCED_STEP);
    if (moe_scenario_parse("dispatchers", text, &sc) < 0) parity_die(world, MOE_EINPUT);
    struct run *r = run_open(sc, world, STEPS, way->plant);
    moe_scenario_free(sc);
    return r;
}

/* ---- verdicts ---- */

/* Numbers in order as integers without gaps. */
static int64_t bits_of(enum moe_type type, const void *p, int64_t i)
{
    int64_t bits = 0;
    if (type == MOE_BF16)
        return ((const int16_t *)p)[i] < 0 ? INT16_MIN - ((const int16_t *)p)[i] : ((const int16_t *)p)[i];
    if (type == MOE_F32)
        return ((const int32_t *)p)[i] < 0 ? (int64_t)INT32_MIN - ((const int32_t *)p)[i]
                                           : ((const int32_t *)p)[i];
    memcpy(&bits, (const char *)p + i * 8, 8);
    return bits < 0 ? INT64_MIN - bits : bits;
}

/* Units in the last place between two tensors, the most of any element. */
static int64_t distance(enum moe_type type, const void *a, const void *b, int64_t n)
{
    uint64_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t x = bits_of(type, a, i), y = bits_of(type, b, i);
        uint64_t d = x > y ? (uint64_t)x - (uint64_t)y : (uint64_t)y - (uint64_t)x;
        if (d > most) most = d;
    }
    return most > INT64_MAX ? INT64_MAX : (int64_t)most;
}

static const struct tensor *same_tensor(const struct step *in, const struct tensor *t)
{
    for (int i = 0; i < in->n_tensors; i++) {
        const struct tensor *o = &in->tensors[i];
        if (!strcmp(o->name, t->name) && o->slot == t->slot && o->pass == t->pass && o->n == t->n) return o;
    }
    return NULL;
}

static enum rows_verdict compare_rows(const struct expert_rows *x, const struct expert_rows *y, int n)
{
    enum rows_verdict v = SAME_ROWS;
    for (int i = 0; i < n; i++) {
        if (x[i].n != y[i].n || x[i].in_any != y[i].in_any) return OTHER_ROWS;
        if (x[i].in_order != y[i].in_order) v = OTHER_ORDER;
    }
    return v;
}

/* Rows that share a block of a row sum: what chooses its tree (kernels/ref.h). */
static int64_t height(int64_t rows)
{
    int64_t p = rows > 0;
    while (p && 2 * p <= rows && p < 16) p *= 2;
    return p;
}

/* Dot products of no rows have no tree. */
static bool other_tree(const struct run *a, const struct run *b, const struct step *x, const struct step *y)
{
    bool other = false;
    for (int i = 0; i < a->s->n_layers * a->s->n_ranks; i++) {
        int64_t p = height(x->dots[i]), q = height(y->dots[i]);
        other |= (a->dot_by_rows || b->dot_by_rows) && p && q && p != q;
    }
    return other;
}

/* What a step shows. far [n_tensors, 2]: of each tensor the most units on any rank, and how far from the last
 * rank the first one is where it differs. */
static void add_step(const struct run *a, const struct run *b, int i, const int64_t *far,
                     struct comparison *c)
{
    const struct step *x = &a->steps[i], *y = &b->steps[i];
    const int E = a->s->n_experts;
    struct difference *d = &c->gradient;
    for (int t = 0; t < x->n_tensors; t++) {
        const struct tensor *p = &x->tensors[t];
        const int before = (p->slot - 1) * E; /* the layer whose output it is */
        if (p->pass == MOE_FORWARD) {
            if (before >= 0 && c->forward_equal && !c->rows)
                c->rows = compare_rows(&x->rows[before], &y->rows[before], E);
            c->forward_equal &= !far[2 * t];
            continue;
        }
        if (far[2 * t] > 0 && !d->any) {
            *d = (struct difference){true, .step = i, .layer = p->layer, .ulps = far[2 * t], .n = d->n};
            d->rank = a->s->n_ranks - (int)far[2 * t + 1];
            moe_copy_name(d->name, p->name);
        }
        d->n += far[2 * t] > 0 && p->of_param;
    }
    for (int t = 0; t < x->n_tensors; t++) d->n_compared += x->tensors[t].of_param && far[2 * t] >= 0;
}

/* Those of the same experts, wherever they are. */
static int64_t compare_tensors(struct moe_communicator *world, const struct run *a, const struct run *b,
                               const struct tensor *p, const struct tensor *q)
{
    if (p->shard < 0) return distance(p->type, p->content, q->content, p->n);
    void *there = content_at(world, b, q, a->s->comms[p->shard].index_of[world->rank]);
    int64_t far = distance(p->type, p->content, there, p->n);
    free(there);
    return far;
}

struct comparison compare_runs(struct moe_communicator *world, const struct run *a, const struct run *b)
{
    struct comparison c = {.forward_equal = true};
    for (int i = 0; i < a->n_steps && !c.gradient.any && c.forward_equal; i++) {
        const struct step *x = &a->steps[i], *y = &b->steps[i];
        int64_t *far = moe_alloc((size_t)x->n_tensors * 2, sizeof *far);
        for (int t = 0; t < x->n_tensors; t++) {
            const struct tensor *p = &x->tensors[t], *q = same_tensor(y, p);
            far[2 * t] = q ? compare_tensors(world, a, b, p, q) : -1;
            far[2 * t + 1] = far[2 * t] > 0 ? world->size - world->rank : 0;
        }
        most_of_all(world, far, (int64_t)x->n_tensors * 2);
        c.gradient.n_compared = 0;
        c.other_tree |= other_tree(a, b, x, y);
        add_step(a, b, i, far, &c);
        free(far);
    }
    return c;
}

/* ---- the table ---- */

static void print_head(void)
{
    printf("%-32s %-11s %-7s %-10s %-8s %s\n%-32s %-11s %-7s %-10s %-8s %-10s %4s %5s %4s %s\n", "",
           "experts'", "forward", "row", "equal", "first that differs", "", "rows", "pass", "sums", "grads",
           "gradient", "step", "layer", "rank", "ulps");
}

static void print_row(const char *a, const char *b, const struct comparison *c)
{
    const struct difference *d = &c->gradient;
    char pair[64], equal[32];
    snprintf(pair, sizeof pair, "%s, %s", a, b);
    snprintf(equal, sizeof equal, "%d of %d", d->n_compared - d->n, d->n_compared);
    printf("%-32s %-11s %-7s %-10s %-8s", pair, rows_text[c->rows], c->forward_equal ? "equal" : "differs",
           c->other_tree ? "other tree" : "same tree", equal);
    if (d->any) printf(" %-10s %4d %5d %4d %4lld", d->name, d->step, d->layer, d->rank, (long long)d->ulps);
    printf("\n");
}

/* What must be: see the head of this file. */
static bool is_expected(const struct setting *set, const struct way *b, const struct comparison *c)
{
    const struct difference *d = &c->gradient;
    if (b->plant & PLANT_PEERS)
        return c->rows == OTHER_ORDER && c->forward_equal && !strcmp(d->name, "d_w2") &&
               d->layer == LAYERS - 1;
    if (set->top_k > 2) return c->rows == SAME_ROWS && !c->forward_equal && d->any;
    if (c->rows != SAME_ROWS || !c->forward_equal) return false;
    if (!c->other_tree) return !d->any;
    /* A single row, or one that is rounded to bf16, may come out the same in the last layer, or in both. */
    bool must = !strcmp(set->dtype, "float32") && set->rows >= 8;
    if (!d->any) return !must;
    return !strcmp(d->name, "d_prob") && d->step == FORCED_STEP && (!must || d->layer == LAYERS - 1);
}

static void print_setting(struct moe_communicator *world, const struct setting *set)
{
    if (world->rank) return;
    printf("%s, top-%d, row sums by %s; ", set->dtype, set->top_k,
           set->by_rows ? "number of rows" : "a fixed tree");
    if (set->rows == FREE)
        printf("routers choose\n");
    else
        printf("the last rank gets %d rows\n", set->rows);
}

/* Did the last experts get the rows that they should? */
static bool is_forced(const struct run *r, const struct setting *set)
{
    const struct expert_rows *last = &r->steps[FORCED_STEP].rows[LAYERS * EXPERTS - 1];
    return set->rows == FREE || (last[0].n == 0 && last[-1].n == set->rows);
}

static int compare_pair(struct moe_communicator *world, const struct setting *set, const struct way *a,
                        const struct run *x, const struct way *b, const struct run *y)
{
    struct comparison c = compare_runs(world, x, y);
    bool moves = !strcmp(a->name, home.name) && strcmp(b->name, turned.name) != 0,
         few = set->rows > 0 && set->rows < 16;
    bool right =
        is_expected(set, b, &c) && is_forced(x, set) && c.other_tree == (moves && few && set->by_rows);
    if (world->rank == 0) {
        print_row(a->name, b->name, &c);
        if (!right) printf("  ^ not as expected\n");
    }
    return !right;
}

/* Each way once, and each two of them. */
static int compare_ways(struct moe_communicator *world, const struct setting *set,
                        const struct way *const ways[], int n)
{
    struct run *r[3];
    int bad = 0;
    print_setting(world, set);
    for (int i = 0; i < n; i++) r[i] = train(world, set, ways[i]);
    for (int i = 0; i < n; i++)
        for (int j = i + 1; j < n; j++) bad += compare_pair(world, set, ways[i], r[i], ways[j], r[j]);
    for (int i = 0; i < n; i++) run_close(r[i]);
    return bad;
}

static int table(struct moe_communicator *world, bool few)
{
    static const char *const types[] = {"float32", "bfloat16"};
    static const int rows[] = {FREE, 15, 0, 16, 8, 1}; /* half of them where little depends on it */
    static const struct way *const ways[] = {&home, &gather, &away}, *const orders[] = {&plain, &turned};
    const struct setting wide = {"float64", 2, false, FREE}, four = {"float32", 4, false, FREE};
    int bad = 0;
    for (int type = 0; type < 2; type++)
        for (int by = 0; by < 2; by++)
            for (int i = few; i < (few ? 2 : by && !type ? 6 : 3); i++)
                bad += compare_ways(world, &(struct setting){types[type], 2, by, rows[i]}, ways, 3);
    bad += compare_ways(world, &wide, orders, 2);
    return bad + compare_ways(world, &four, ways, 2);
}

/* The last expert in the forced step, where the last rank has 15 rows or none; and in what a user may have.
 * */
static int empty_expert(struct moe_communicator *world)
{
    static const struct {
        struct way way;
        int rows;
        enum gradient_verdict expected;
    } cases[] = {{{"alltoall", "dispatcher: alltoall\n"}, 15, PRESENT_AND_ZERO},
                 {{"alltoall", "dispatcher: alltoall\n"}, 0, PRESENT_AND_ZERO},
                 {{"allgather", "dispatcher: allgather\n"}, 15, PRESENT_AND_ZERO},
                 {{"allgather", "dispatcher: allgather\n"}, 0, PRESENT_AND_ZERO},
                 {{"its operation is left out", "dispatcher: alltoall\n", PLANT_ABSENT}, 0, ABSENT},
                 {{"its kernel skips it", "dispatcher: alltoall\n", PLANT_SKIP}, 0, UNINITIALISED}};
    int bad = 0;
    if (world->rank == 0) printf("\ngradient of an expert without rows    rows of its rank  verdict\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct setting set = {"float32", 2, false, cases[i].rows};
        struct run *r = train(world, &set, &cases[i].way);
        enum gradient_verdict v = expert_gradient(r, world, FORCED_STEP, EXPERTS - 1);
        if (world->rank == 0) printf("%-40s %13d  %s\n", cases[i].way.name, cases[i].rows, gradient_text[v]);
        if (world->rank == 0 && v != cases[i].expected) printf("  ^ not as expected\n");
        bad += v != cases[i].expected;
        run_close(r);
    }
    return bad;
}

static void compare_files(struct moe_communicator *world, const char *a, const char *b, int n_steps)
{
    const char *const path[] = {a, b};
    struct run *r[2];
    for (int i = 0; i < 2; i++) {
        struct moe_scenario *sc;
        if (moe_scenario_load(path[i], &sc) < 0) parity_die(world, MOE_EINPUT);
        r[i] = run_open(sc, world, n_steps, 0);
        moe_scenario_free(sc);
    }
    struct comparison c = compare_runs(world, r[0], r[1]);
    if (world->rank == 0) print_row("A", "B", &c);
    run_close(r[0]);
    run_close(r[1]);
}

int main(int argc, char **argv)
{
    struct moe_communicator *world;
    int bad = 0;
    if (moe_communicator_here()->open(NULL, 60, &world) < 0) return 1;
    const bool few = argc == 2 && !strcmp(argv[1], "few");
    if ((argc == 2 && !few) || argc > 4) {
        if (world->rank == 0) fprintf(stderr, "usage: dispatchers [few | A.yaml B.yaml [STEPS]]\n");
        world->table->close(world);
        return moe_exit_code(MOE_EUSAGE);
    }
    if (world->rank == 0) print_head();
    if (argc > 2)
        compare_files(world, argv[1], argv[2], argc > 3 ? atoi(argv[3]) : STEPS);
    else
        bad = table(world, few) + empty_expert(world);
    world->table->close(world);
    return bad ? moe_exit_code(MOE_EVERDICT) : 0;
}
