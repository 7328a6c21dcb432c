/* test_captured - verdicts about runs, of stores that are written by hand and right but for one change. */
#include "sim/check/captured.h"
#include "tests/unit/store_run.h"

/* Four ranks, two layers, two experts: ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1. Two steps. */
enum { RANKS = 4, LAYERS = 2, STEPS = 2, N = 8 };

/* Elements of a tensor: a function of the tensor, the same on every rank. */
static void fill(float v[N], int64_t step, int role, int place, int layer, int expert)
{
    const uint64_t stream = (uint64_t)(((step * 8 + role) * 64 + place) * 64 + 8 * layer + expert + 1);
    for (int i = 0; i < N; i++) v[i] = (float)moe_uniform(5, stream, (uint64_t)i) - 0.5f;
}

static struct moe_store_tensor row_of(const float v[N])
{
    struct moe_store_tensor t = {.layer = -1, .expert = -1, .element_bytes = 4, .n = N, .hash = N};
    for (int i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], 4);
        t.hash = moe_hash64(t.hash ^ bits);
        t.sum += (double)v[i];
        t.sum_squares += (double)v[i] * (double)v[i];
    }
    return t;
}

static void add(struct moe_store *s, const char *name, int64_t step, int rank, int role, int place, int layer,
                int expert, const float v[N], bool whole)
{
    struct moe_store_tensor t = row_of(v);
    t.step = step;
    t.rank = rank;
    t.role = (enum moe_tensor_role)role;
    t.place = place;
    t.layer = layer;
    t.expert = expert;
    moe_copy_name(t.name, name);
    if (whole) t.content = v;
    assert_int_equal(moe_store_add_tensor(s, &t), MOE_OK);
}

static void add_all(struct moe_store *s, int64_t step, int rank, int role, bool whole)
{
    const bool gradient = role == MOE_TENSOR_GRADIENT || role == MOE_TENSOR_CLIPPED;
    float v[N];
    fill(v, step, role, 0, 0, 0);
    add(s, "embedding", step, rank, role, gradient ? 9 : 0, -1, -1, v, whole);
    for (int layer = 0; layer < LAYERS; layer++) {
        const int place = gradient ? 8 - 2 * layer : 1 + 2 * layer;
        fill(v, step, role, 1, layer, 0);
        add(s, "router", step, rank, role, place, layer, -1, v, whole);
        fill(v, step, role, 2, layer, rank % 2);
        add(s, "w1", step, rank, role, place + 1, layer, rank % 2, v, whole);
    }
}

/* Expert 1 has a token of every rank in each layer, expert 0 none in step 1. */
static void write_run(const char *path, bool whole)
{
    struct moe_store *s = open_store(path, MOE_STORE_CREATE);
    static const char *const run[][2] = {{"layers", "2"}, {"experts", "2"}, {"top_k", "1"},
                                         {"steps", "2"},  {"seed", "7"},    {"ranks", "4"}};
    assert_int_equal(moe_store_begin(s), MOE_OK);
    for (int i = 0; i < 6; i++) assert_int_equal(moe_store_put(s, run[i][0], run[i][1]), MOE_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        assert_int_equal(moe_store_add_rank(s, &(struct moe_store_rank){rank, 2, 1}), MOE_OK);
        add_all(s, 0, rank, MOE_TENSOR_INITIAL, whole);
        for (int step = 0; step < STEPS; step++) {
            const int32_t ids[] = {step ? 1 : 0, 1};
            for (int layer = 0; layer < LAYERS; layer++)
                assert_int_equal(moe_store_add_routing(s, step, layer, rank, 2, 1, ids), MOE_OK);
            for (int role = MOE_TENSOR_GRADIENT; role < MOE_TENSOR_ROLE_COUNT; role++)
                add_all(s, step, rank, role, whole);
            assert_int_equal(moe_store_add_step(s, step, rank, 1, 1), MOE_OK);
        }
    }
    assert_int_equal(moe_store_commit(s), MOE_OK);
    moe_store_close(s);
}

static struct moe_captured *load(const char *path, struct moe_store **s)
{
    struct moe_captured *c;
    *s = open_store(path, MOE_STORE_READ);
    if (moe_captured_load(*s, &c) < 0) fail_msg("%s", moe_error());
    return c;
}

/* A verdict is expected; text: of its label and text, a part of each. */
struct expected {
    const char *change;
    int check_class;
    enum moe_severity severity;
    int64_t step;
    const char *op, *text;
    unsigned ranks; /* a bit each */
};

static unsigned rank_bits(const struct moe_verdict *v)
{
    unsigned bits = 0;
    for (int i = 0; i < v->n_ranks; i++) bits |= 1u << v->ranks[i];
    return bits;
}

static void must_be(const struct moe_verdict *v, const struct expected *e)
{
    if (v->check_class != e->check_class || v->severity != e->severity || v->step != e->step ||
        !v->captured || strcmp(v->op, e->op) != 0 || !strstr(v->text, e->text) || rank_bits(v) != e->ranks)
        fail_msg("%s: C%d %s, ranks %x, step %lld: %s: %s; expected C%d %s, ranks %x: %s: %s", e->change,
                 v->check_class, moe_severity_text[v->severity], rank_bits(v), (long long)v->step, v->op,
                 v->text, e->check_class, moe_severity_text[e->severity], e->ranks, e->op, e->text);
}

/* Later steps hold what a fault makes of them: they are changed too, and nothing of them is said. */
static const struct expected alone[] = {
    {"UPDATE tensor SET presence = 'uninitialised', n_nonfinite = 3 WHERE step = 1 AND role = 'gradient' AND "
     "name"
     " = 'w1' AND layer = 1 AND rank = 2",
     6, MOE_SEVERITY_ERROR, 1, "step 1 gradient of layer 1 w1 of expert 0",
     "uninitialised on rank 2: 3 of 8 elements are what buffers are filled with that nobody wrote; its "
     "expert had 0"
     " tokens in this step; 19 of 20 tensors",
     4},
    {"UPDATE tensor SET n_nonfinite = 1 WHERE step >= 0 AND role = 'parameter' AND name = 'router'", 6,
     MOE_SEVERITY_ERROR, 0, "step 0 updated layer 0 router",
     "not finite on rank 0: 1 of 8 elements are infinite or no number; 12 of 20 tensors of this step and "
     "stage are"
     " well; so it is with 7 other tensors",
     15},
    {"UPDATE tensor SET presence = 'none', sum = 0, sum_squares = 0, hash = 8 WHERE step = 0 AND role = "
     "'gradient'"
     " AND name = 'w1' AND layer = 0 AND rank = 1",
     6, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 0 w1 of expert 1",
     "absent: no operation of rank 1 computed it in this step; its expert had 4 tokens", 2},
    {"UPDATE tensor SET sum_squares = 4 * sum_squares, hash = 1 WHERE role = 'initial' AND name = "
     "'embedding' AND"
     " rank = 3",
     16, MOE_SEVERITY_ERROR, 0, "step 0 initial embedding", "copies begin different: norm", 15},
    {"UPDATE tensor SET sum_squares = 4 * sum_squares, hash = 1 WHERE role = 'initial' AND name = 'w1' AND "
     "layer ="
     " 1 AND rank = 3",
     16, MOE_SEVERITY_ERROR, 0, "step 0 initial layer 1 w1 of expert 1", "copies begin different: norm", 10},
    {"UPDATE tensor SET hash = 77 WHERE role IN ('initial', 'parameter') AND name = 'w1'", 16,
     MOE_SEVERITY_ERROR, 0, "step 0 initial layer 0 w1 of expert 0", "experts 0,1 begin as copies of one",
     15},
    {"UPDATE tensor SET hash = 77 WHERE role = 'parameter' AND name = 'w1' AND layer = 0 AND step = 1", 16,
     MOE_SEVERITY_ERROR, 1, "step 1 updated layer 0 w1 of expert 0", "experts 0,1 have become copies of one",
     15},
    {"UPDATE tensor SET hash = 77 WHERE role <> 'initial' AND name = 'w1';"
     "UPDATE tensor SET hash = rank WHERE role = 'parameter' AND name = 'router'",
     4, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 w1 of expert 0",
     "experts 0,1 have the same gradient", 15},
    {"UPDATE tensor SET sum_squares = (1 + rank) * sum_squares, hash = rank WHERE role <> 'initial' AND name "
     "= "
     "'router'",
     4, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "copies differ: norm", 15},
    {"UPDATE tensor SET sum_squares = (1 + rank) * sum_squares, hash = rank + expert WHERE step = 1 AND role "
     "IN"
     " ('clipped', 'parameter')",
     5, MOE_SEVERITY_ERROR, 1, "step 1 clipped gradient of layer 1 router", "rank 0 by the factor", 15},
    {"UPDATE tensor SET sum_squares = 4 * sum_squares, hash = 1 WHERE step = 1 AND role = 'parameter' AND "
     "name ="
     " 'router' AND layer = 1 AND rank = 0",
     16, MOE_SEVERITY_ERROR, 1, "step 1 updated layer 1 router", "copies part here: norm", 15},
    {"UPDATE tensor SET sum_squares = (1 + 1e-7) * sum_squares, hash = 1 WHERE step = 1 AND role = "
     "'gradient' AND"
     " name = 'router' AND layer = 1 AND rank = 0",
     4, MOE_SEVERITY_POSSIBLE, 1, "step 1 gradient of layer 1 router", "by no more than rounding", 15},
    {"UPDATE tensor SET presence = 'bucketed' WHERE role = 'gradient' AND name = 'router';"
     "UPDATE tensor SET n_nonfinite = 1 WHERE step = 0 AND role = 'gradient' AND name = 'embedding' AND rank "
     "= 0",
     6, MOE_SEVERITY_ERROR, 0, "step 0 gradient of embedding", "no number; 11 of 12 tensors", 1},
    {"DELETE FROM tensor WHERE step = 1 AND role = 'gradient' AND rank = 1 AND name = 'router'", 6,
     MOE_SEVERITY_ERROR, 1, "step 1 clipped gradient of layer 1 router",
     "no row of its gradient on rank 1 in this step; so it is with 1 other tensor", 2},
    {"DELETE FROM tensor WHERE step = 0 AND role = 'clipped' AND expert = 1", 6, MOE_SEVERITY_ERROR, 0,
     "step 0 gradient of layer 1 w1 of expert 1", "no row of its clipped gradient on rank 1", 10},
    {"DELETE FROM tensor WHERE step = 0 AND role = 'parameter' AND name = 'embedding'", 6, MOE_SEVERITY_ERROR,
     0, "step 0 gradient of embedding", "no row of its updated value on rank 0", 15},
};

static void test_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++) {
        struct moe_store *s;
        struct moe_verdicts out = {0};
        write_run("run.db", false);
        sql("run.db", alone[i].change);
        struct moe_captured *c = load("run.db", &s);
        assert_int_equal(moe_check_captured(c, &out), MOE_OK);
        if (out.n != 1) fail_msg("%s: %d verdicts", alone[i].change, out.n);
        must_be(&out.item[0], &alone[i]);
        moe_verdicts_free(&out);
        moe_captured_free(c);
        moe_store_close(s);
    }
}

/* Copies that differ by rounding, in step 0, hide no error in step 1, and are said once. */
static void test_after_rounding(void **state)
{
    struct moe_store *s;
    struct moe_verdicts out = {0};
    (void)state;
    write_run("run.db", false);
    sql("run.db",
        "UPDATE tensor SET sum_squares = (1 + 1e-7) * sum_squares, hash = 1 WHERE rank = 0 AND name ="
        " 'router' AND role <> 'initial';"
        "UPDATE tensor SET n_nonfinite = 1 WHERE step = 1 AND role = 'parameter' AND name = 'w1'");
    struct moe_captured *c = load("run.db", &s);
    assert_int_equal(moe_check_captured(c, &out), MOE_OK);
    assert_int_equal(out.n, 2);
    must_be(&out.item[0], &(struct expected){"rounding", 4, MOE_SEVERITY_POSSIBLE, 0,
                                             "step 0 gradient of layer 1 router", "by no more", 15});
    must_be(&out.item[1], &(struct expected){"after it", 6, MOE_SEVERITY_ERROR, 1,
                                             "step 1 updated layer 0 w1 of expert 0", "not finite", 15});
    moe_verdicts_free(&out);
    moe_captured_free(c);
    moe_store_close(s);
}

/* What is right says nothing: as it is, with gradients of experts that are zero, with constants, and without
 * the rows of a rank that was killed. */
static void test_no_alarm(void **state)
{
    static const char *const change[] = {
        "SELECT 1",
        "UPDATE tensor SET presence = 'zero', hash = 5, sum = 0, sum_squares = 0 WHERE role <> 'parameter' "
        "AND role"
        " <> 'initial' AND name = 'w1'",
        "UPDATE tensor SET hash = 5, sum = 4, sum_squares = 2 WHERE role = 'initial' AND name = 'w1'",
        "DELETE FROM tensor WHERE rank = 2 AND step = 1",
        "DELETE FROM tensor WHERE role = 'clipped'",
        "UPDATE tensor SET presence = 'bucketed', hash = 8, sum = 0, sum_squares = 0 WHERE role IN "
        "('gradient', "
        "'clipped')",
        "DELETE FROM tensor",
    };
    (void)state;
    for (size_t i = 0; i < sizeof change / sizeof *change; i++) {
        struct moe_store *s;
        struct moe_verdicts out = {0};
        write_run("run.db", false);
        sql("run.db", change[i]);
        struct moe_captured *c = load("run.db", &s);
        assert_int_equal(moe_check_captured(c, &out), MOE_OK);
        if (out.n) fail_msg("%s: %s: %s", change[i], out.item[0].op, out.item[0].text);
        assert_int_equal(moe_captured_rows(c) == 0, i == sizeof change / sizeof *change - 1);
        moe_captured_free(c);
        moe_store_close(s);
    }
}

/* ---- against another run ---- */

/* Changes run.db; then compares it with right.db. The last of n verdicts is C9. */
static const struct {
    const char *change;
    int n;
    struct expected first, last;
} pairs[] = {
    {"SELECT 1",
     1,
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1",
      "all 49 tensors up to here are the same", 10},
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1", "", 10}},
    {"DELETE FROM tensor WHERE role = 'clipped' AND step = 0",
     1,
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1",
      "the same to the bit; 0 tensors are in this run alone, 7 in the other alone", 10},
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1", "all 42 tensors", 10}},
    {"UPDATE tensor SET presence = 'bucketed', hash = 8, sum = 0, sum_squares = 0 WHERE role = 'gradient';"
     "UPDATE tensor SET name = 'gate' WHERE name = 'router' AND layer = 0",
     1,
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1",
      "; 5 tensors are in this run alone, 19 in the other alone", 10},
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 updated layer 1 w1 of expert 1", "all 30 tensors", 10}},
    {"UPDATE tensor SET sum_squares = 9 * sum_squares, sum = 3 * sum, hash = hash + 1 WHERE role = "
     "'gradient' AND"
     " name = 'w1'",
     2,
     {NULL, 3, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 w1 of expert 0",
      "3 times that of the other run, and so of experts alone; so it is with 3 other tensors", 15},
     {NULL, 9, MOE_SEVERITY_NOTE, 0, "step 0 gradient of layer 1 w1 of expert 0", "0 of them by more", 5}},
    {"UPDATE tensor SET sum_squares = sum_squares / 16, sum = sum / 4, hash = hash + 1 WHERE role = "
     "'gradient'",
     2,
     {NULL, 3, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router",
      "1/4 times that of the other run; so", 15},
     {NULL, 9, MOE_SEVERITY_NOTE, 0, "step 0 gradient of layer 1 router", "", 15}},
    {"UPDATE tensor SET sum_squares = 2.05 * sum_squares, hash = hash + 1 WHERE role = 'gradient' AND name ="
     " 'router'",
     2,
     {NULL, 4, MOE_SEVERITY_POSSIBLE, 0, "step 0 gradient of layer 1 router",
      "about the square root of 2:", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "2 of them by more", 15}},
    {"UPDATE tensor SET sum_squares = 3 * sum_squares, hash = hash + 1 WHERE role = 'gradient'",
     1, /* no group of 4 ranks has 3 */
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "7 of them by more", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "", 15}},
    {"UPDATE tensor SET sum_squares = sum_squares / 3.9, hash = hash + 1 WHERE role = 'gradient' AND name ="
     " 'router'",
     2,
     {NULL, 4, MOE_SEVERITY_POSSIBLE, 0, "step 0 gradient of layer 1 router",
      "one over the square root of 4:", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "", 15}},
    {"UPDATE tensor SET sum_squares = 4 * sum_squares, hash = hash + 1 WHERE role = 'gradient' AND name = "
     "'w1'",
     2, /* twice the norm, but not the sum */
     {NULL, 4, MOE_SEVERITY_POSSIBLE, 0, "step 0 gradient of layer 1 w1 of expert 0",
      "about the square root of 4:", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 w1 of expert 0", "4 of them by more", 5}},
    {"UPDATE tensor SET sum_squares = sum_squares * (1 + 1e-6), hash = hash + 1 WHERE step = 1", /* 8 units */
     1,
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 gradient of layer 1 router", "0 of them by more", 15},
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 gradient of layer 1 router", "", 15}},
    {"UPDATE tensor SET sum_squares = 1.001 * sum_squares, hash = hash + 1 WHERE step = 1 AND role = "
     "'parameter'",
     1,
     {NULL, 9, MOE_SEVERITY_ERROR, 1, "step 1 updated embedding", "7 of them by more than rounding", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 1, "step 1 updated embedding", "42 up to it", 15}},
    {"UPDATE tensor SET sum_squares = 1.5 * sum_squares, hash = hash + rank WHERE role = 'gradient' AND name "
     "="
     " 'router' AND rank > 1",
     1,
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router", "on rank 2, norm", 12},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 gradient of layer 1 router",
      "in this stage 2 differ, 2 of them by more than rounding or a factor; 12 up to it", 12}},
    {"UPDATE tensor SET sum_squares = sum_squares * (1 + 1e-6), hash = hash + rank WHERE step = 1 AND rank = "
     "1;"
     "UPDATE tensor SET sum_squares = 4 * sum_squares, sum = 2 * sum, hash = hash + rank WHERE step = 1 AND "
     "role ="
     " 'gradient' AND rank = 3",
     2,
     {NULL, 3, MOE_SEVERITY_ERROR, 1, "step 1 gradient of layer 1 router",
      "2 times that of the other run; so it is with 4 other tensors", 8},
     {NULL, 9, MOE_SEVERITY_NOTE, 1, "step 1 gradient of layer 1 router", "on rank 1, norm", 10}},
    {"UPDATE tensor SET sum_squares = 4 * sum_squares, hash = hash + 1 WHERE role = 'initial'",
     1,
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 initial embedding", "the runs begin with other parameters", 15},
     {NULL, 9, MOE_SEVERITY_ERROR, 0, "step 0 initial embedding", "", 15}},
};

static int compare(const char *run, const char *other, struct moe_verdicts *out)
{
    struct moe_store *s[2];
    struct moe_captured *c[2] = {load(run, &s[0]), load(other, &s[1])};
    int err = moe_check_against(c[0], c[1], out);
    for (int i = 0; i < 2; i++) {
        moe_captured_free(c[i]);
        moe_store_close(s[i]);
    }
    return err;
}

static void test_against(void **state)
{
    (void)state;
    write_run("right.db", false);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        struct moe_verdicts out = {0};
        struct expected first = pairs[i].first, last = pairs[i].last;
        first.change = last.change = pairs[i].change;
        write_run("run.db", false);
        sql("run.db", pairs[i].change);
        assert_int_equal(compare("run.db", "right.db", &out), MOE_OK);
        if (out.n != pairs[i].n) fail_msg("%s: %d verdicts", pairs[i].change, out.n);
        must_be(&out.item[0], &first);
        must_be(&out.item[out.n - 1], &last);
        moe_verdicts_free(&out);
    }
}

/* A copy that only the other run has differs from those of this one. */
static void test_other_copies(void **state)
{
    struct moe_verdicts out = {0};
    (void)state;
    write_run("run.db", false);
    write_run("right.db", false);
    sql("run.db", "DELETE FROM tensor WHERE rank > 1");
    sql("right.db",
        "UPDATE tensor SET sum_squares = 7.3, hash = 3 WHERE rank = 3 AND step = 1 AND name = 'w1'");
    assert_int_equal(compare("run.db", "right.db", &out), MOE_OK);
    assert_int_equal(out.n, 1);
    must_be(&out.item[0], &(struct expected){"rank 3", 9, MOE_SEVERITY_ERROR, 1,
                                             "step 1 gradient of layer 1 w1 of expert 1",
                                             "on rank 1, other run's rank 3, norm", 2});
    moe_verdicts_free(&out);
}

/* An error that is known explains what differs. */
static void test_explained(void **state)
{
    struct moe_verdicts out = {.n = 1, .cap = 1, .item = moe_alloc(1, sizeof *out.item)};
    (void)state;
    write_run("right.db", false);
    write_run("run.db", false);
    sql("run.db", "UPDATE tensor SET sum_squares = 7.3, hash = 3 WHERE step = 1 AND role = 'parameter'");
    assert_int_equal(compare("run.db", "right.db", &out), MOE_OK);
    assert_int_equal(out.n, 2);
    assert_int_equal(out.item[1].severity, MOE_SEVERITY_NOTE);
    moe_verdicts_free(&out);
}

/* Writes a run in which element 3 of the router's gradient of layer 0 in step 1 is moved by so many units. */
static void write_moved(const char *path, int units)
{
    float v[N];
    uint32_t bits;
    write_run(path, true);
    sql(path, "DELETE FROM tensor WHERE step = 1 AND role = 'gradient' AND name = 'router' AND layer = 0");
    fill(v, 1, MOE_TENSOR_GRADIENT, 1, 0, 0);
    memcpy(&bits, &v[3], 4);
    bits += (uint32_t)units;
    memcpy(&v[3], &bits, 4);
    struct moe_store *s = open_store(path, MOE_STORE_WRITE);
    for (int rank = 0; rank < RANKS; rank++)
        add(s, "router", 1, rank, MOE_TENSOR_GRADIENT, 8, 0, -1, v, true);
    moe_store_close(s);
}

/* With content, units in the last place are counted, and the norm of the difference decides. 2^22 units are a
 * quarter of the element, or more. */
static void test_units(void **state)
{
    static const struct {
        int units;
        enum moe_severity severity;
    } cases[] = {{1, MOE_SEVERITY_NOTE}, {100, MOE_SEVERITY_NOTE}, {1 << 22, MOE_SEVERITY_ERROR}};
    (void)state;
    write_run("right.db", true);
    for (int i = 0; i < 3; i++) {
        struct moe_verdicts out = {0};
        char text[64];
        snprintf(text, sizeof text, "by up to %d units in the last place (element 3: ", cases[i].units);
        write_moved("run.db", cases[i].units);
        assert_int_equal(compare("run.db", "right.db", &out), MOE_OK);
        assert_int_equal(out.n, 1);
        const struct expected e = {text, 9, cases[i].severity, 1, "step 1 gradient of layer 0 router",
                                   text, 15};
        must_be(&out.item[0], &e);
        moe_verdicts_free(&out);
    }
}

/* From the smallest number below zero over both zeros to the smallest one above: they are neighbours. */
static void test_units_at_zero(void **state)
{
    float v[N] = {0, 0, 0, 0, 0, 0, 0, 1};
    (void)state;
    for (int run = 0; run < 2; run++) {
        const char *path = run ? "right.db" : "run.db";
        v[0] = run ? -1e-45f : 1e-45f;
        write_run(path, false);
        sql(path, "DELETE FROM tensor");
        struct moe_store *s = open_store(path, MOE_STORE_WRITE);
        add(s, "router", 0, 0, MOE_TENSOR_GRADIENT, 0, 0, -1, v, true);
        moe_store_close(s);
    }
    struct moe_verdicts out = {0};
    assert_int_equal(compare("run.db", "right.db", &out), MOE_OK);
    assert_int_equal(out.n, 1);
    assert_non_null(
        strstr(out.item[0].text, "by up to 2 units in the last place (element 0: 1.40129846e-45,"));
    moe_verdicts_free(&out);
}

static void test_not_comparable(void **state)
{
    static const char *const change[][2] = {
        {"UPDATE run SET value = '8' WHERE key = 'seed'", "seed is 8, in the other run 7, expected the same"},
        {"UPDATE tensor SET name = 'other_' || name", "no tensor of a step in common"},
    };
    (void)state;
    write_run("right.db", false);
    for (int i = 0; i < 2; i++) {
        struct moe_verdicts out = {0};
        write_run("run.db", false);
        sql("run.db", change[i][0]);
        assert_int_equal(compare("run.db", "right.db", &out), MOE_EINPUT);
        assert_non_null(strstr(moe_error(), change[i][1]));
        moe_verdicts_free(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_alone),   TEST(test_after_rounding), TEST(test_no_alarm),
        TEST(test_against), TEST(test_other_copies),   TEST(test_explained),
        TEST(test_units),   TEST(test_units_at_zero),  TEST(test_not_comparable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
