/* Max-min fair rates: systems solved by hand, and the property that defines them on random systems. */
#include "sim/share.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LINKS = 40, FLOWS = 200, PATH = MOE_SHARE_PATH };

struct instance {
    int n_links, n_flows;
    double cap[LINKS];
    int n_shared;                             /* the links after these are limits */
    int first[FLOWS + 1], path[FLOWS * PATH]; /* flow f: path[first[f]] to path[first[f + 1] - 1] */
    double rate[FLOWS];
};

static double rate_of(const struct moe_share *s, int flow)
{
    return s->link[s->flow[flow].server].level;
}

/* All flows at once, in a system of their own. */
static void share(int n_shared, int n_links, const double *cap, int n_flows, const int *first,
                  const int *path, double *rate)
{
    struct moe_share s;
    moe_share_init(&s, n_shared, cap);
    for (int l = n_shared; l < n_links; l++) assert_int_equal(moe_share_add_limit(&s, cap[l]), l);
    for (int f = 0; f < n_flows; f++)
        assert_int_equal(moe_share_add(&s, first[f + 1] - first[f], path + first[f]), f);
    moe_share_solve(&s);
    for (int f = 0; f < n_flows; f++) rate[f] = rate_of(&s, f);
    moe_share_free(&s);
}

static void solve(struct instance *x)
{
    share(x->n_shared, x->n_links, x->cap, x->n_flows, x->first, x->path, x->rate);
}

static void assert_rates(const double *rate, const double *expected, int n)
{
    for (int f = 0; f < n; f++)
        if (!(fabs(rate[f] - expected[f]) <= 1e-12 * expected[f]))
            fail_msg("flow %d: %.17g, expected %.17g", f, rate[f], expected[f]);
}

/* Links A = 10, B = 4; flow 0 on A, 1 on A and B, 2 on B. Levels at the start: A 10 / 2 = 5, B 4 / 2 = 2. B
 * fills first: flows 1 and 2 get 2. A has 10 - 2 = 8 left for flow 0. */
static void worked_example(void **state)
{
    (void)state;
    double rate[3];
    share(2, 2, (double[]){10, 4}, 3, (int[]){0, 1, 3, 4}, (int[]){0, 0, 1, 1}, rate);
    assert_rates(rate, (double[]){8, 2, 2}, 3);
}

/* A parking lot: flow 0 on A = 6, B = 9, C = 4; flows 1, 2, 3 on one each. Levels 3, 4.5, 2: C fills, flows 0
 * and 3 get 2. Left: A 6 - 2 = 4 for flow 1, B 9 - 2 = 7 for flow 2. Link D has no flow. */
static void long_path_takes_its_slowest_link(void **state)
{
    (void)state;
    double rate[4];
    share(4, 4, (double[]){6, 9, 4, 1}, 4, (int[]){0, 3, 4, 5, 6}, (int[]){0, 1, 2, 0, 1, 2}, rate);
    assert_rates(rate, (double[]){2, 4, 7, 2}, 4);
}

/* Four levels: A = 3, B = 10, C = 30, D = 100; flow f crosses links f to D, flow 4 only D.
 * Levels: A 3 / 1, B 10 / 2, C 30 / 3, D 100 / 5 = 20. A: flow 0 gets 3. B has 7 for flow 1. C has 30 - 10 =
 * 20 for flow 2. D has 100 - 30 = 70 for flows 3 and 4: 35 each. */
static void four_levels(void **state)
{
    (void)state;
    double rate[5];
    share(4, 4, (double[]){3, 10, 30, 100}, 5, (int[]){0, 4, 7, 9, 10, 11},
          (int[]){0, 1, 2, 3, 1, 2, 3, 2, 3, 3, 3}, rate);
    assert_rates(rate, (double[]){3, 7, 20, 35, 35}, 5);
}

/* A flow's own cap is a link of its own. Link A of 10; caps 4 and 1, two flows without. 10 / 4 = 2.5: flow 1
 * stops at 1; (10 - 1) / 3 = 3, below flow 0's cap of 4: A fills, the others get 3. With A = 15: (15 - 1) / 3
 * = 4.67, flow 0 stops at 4, the others get 5. */
static void flow_caps(void **state)
{
    (void)state;
    double rate[4];
    share(3, 3, (double[]){10, 4, 1}, 4, (int[]){0, 2, 4, 5, 6}, (int[]){0, 1, 0, 2, 0, 0}, rate);
    assert_rates(rate, (double[]){3, 1, 3, 3}, 4);
    share(3, 3, (double[]){15, 4, 1}, 4, (int[]){0, 2, 4, 5, 6}, (int[]){0, 1, 0, 2, 0, 0}, rate);
    assert_rates(rate, (double[]){4, 1, 5, 5}, 4);
}

/* A limit is the cap of each of its flows. Link A of 10 with flows 0, 1 and 2, limit of 3 for flows 1, 2 and
 * 3: 10 / 3 is above it, so flows 1, 2 and 3 get 3, and flow 0 the other 4. */
static void limits(void **state)
{
    (void)state;
    double rate[4];
    share(1, 2, (double[]){10, 3}, 4, (int[]){0, 1, 3, 5, 6}, (int[]){0, 0, 1, 1, 0, 1}, rate);
    assert_rates(rate, (double[]){4, 3, 3, 3}, 4);
}

/* The limit of 3 holds flow 0 of link A = 10, and when that is gone, as a limit of 4, flow 1. */
static void limit_is_used_again(void **state)
{
    (void)state;
    struct moe_share s;
    moe_share_init(&s, 1, (double[]){10});
    int l = moe_share_add_limit(&s, 3), f = moe_share_add(&s, 2, (int[]){0, l});
    moe_share_solve(&s);
    assert_true(rate_of(&s, f) == 3);
    moe_share_remove(&s, f);
    moe_share_solve(&s);
    moe_share_set_limit(&s, l, 4);
    f = moe_share_add(&s, 2, (int[]){0, l});
    moe_share_solve(&s);
    assert_true(rate_of(&s, f) == 4);
    moe_share_free(&s);
}

static void zero_flows(void **state)
{
    (void)state;
    struct moe_share s;
    moe_share_init(&s, 2, (double[]){1, 2});
    moe_share_solve(&s);
    assert_int_equal(s.n_changed + s.n_moved, 0);
    moe_share_free(&s);
}

/* A = 3.4 with caps 0.3, 0.7 and three flows without: 2.4 / 3 = 0.8 each, one of them also on B = 2.4, which
 * has two more: 0.8 each. In doubles 3.4 - 0.3 - 0.7 is not 2.4, yet the links fill together: flows that end
 * together must not end apart. */
static void rounding_does_not_split_a_tie(void **state)
{
    (void)state;
    double rate[7];
    share(4, 4, (double[]){3.4, 2.4, 0.3, 0.7}, 7, (int[]){0, 2, 4, 5, 6, 8, 9, 10},
          (int[]){0, 2, 0, 3, 0, 0, 0, 1, 1, 1}, rate);
    assert_rates(rate, (double[]){0.3, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8}, 7);
    for (int f = 3; f < 7; f++) assert_true(rate[f] == rate[2]);
}

/* A random system; every second one has few different capacities, so that levels tie. */
static void draw(struct instance *x, uint64_t seed, uint64_t stream)
{
    uint64_t at = 0;
#define DRAW(n) ((int)(moe_uniform(seed, stream, at++) * (n)))
    bool tie = stream % 2;
    x->n_links = 1 + DRAW(LINKS);
    x->n_flows = 1 + DRAW(FLOWS);
    x->n_shared = x->n_links - DRAW(1 + x->n_links / 3);
    for (int l = 0; l < x->n_links; l++)
        x->cap[l] = 1e9 * (tie ? 1 + DRAW(3) : exp(7 * moe_uniform(seed, stream, at++)));
    for (int f = 0; f < x->n_flows; f++) {
        int *path = x->path + x->first[f], n = 0;
        for (int tries = 1 + DRAW(PATH); tries > 0; tries--) {
            int link = DRAW(x->n_links);
            bool seen = false;
            for (int i = 0; i < n; i++) seen |= path[i] == link;
            if (!seen) path[n++] = link;
        }
        x->first[f + 1] = x->first[f] + n;
    }
#undef DRAW
}

/* The property of share.h: no link overfull, no flow above a limit, and a bottleneck for each flow. */
static void assert_fair(const struct instance *x)
{
    double sum[LINKS] = {0}, fastest[LINKS] = {0};
    for (int f = 0; f < x->n_flows; f++)
        for (int i = x->first[f]; i < x->first[f + 1]; i++) {
            sum[x->path[i]] += x->rate[f];
            fastest[x->path[i]] = fmax(fastest[x->path[i]], x->rate[f]);
        }
    for (int l = x->n_shared; l < x->n_links; l++) sum[l] = fastest[l];
    for (int l = 0; l < x->n_links; l++) assert_true(sum[l] <= x->cap[l] * (1 + 1e-9));
    for (int f = 0; f < x->n_flows; f++) {
        assert_true(x->rate[f] > 0);
        bool held = false;
        for (int i = x->first[f]; i < x->first[f + 1]; i++) {
            int l = x->path[i];
            bool limit = l >= x->n_shared;
            held |= limit ? x->rate[f] >= x->cap[l] * (1 - 1e-9)
                          : sum[l] >= x->cap[l] * (1 - 1e-9) && x->rate[f] >= fastest[l] * (1 - 1e-9);
        }
        assert_true(held);
    }
}

/* The same system with flows in another order, and links under other numbers. */
static void assert_order_does_not_matter(const struct instance *x, uint64_t seed, uint64_t stream)
{
    struct instance y = {.n_links = x->n_links, .n_shared = x->n_shared, .n_flows = x->n_flows};
    int flow[FLOWS], shift = (int)(moe_uniform(seed, stream, 0) * x->n_shared);
    for (int f = 0; f < x->n_flows; f++) {
        int other = (int)(moe_uniform(seed, stream, 1 + (uint64_t)f) * (f + 1));
        flow[f] = flow[other];
        flow[other] = f;
    }
    memcpy(y.cap, x->cap, sizeof y.cap);
    for (int l = 0; l < x->n_shared; l++) y.cap[(l + shift) % x->n_shared] = x->cap[l];
    for (int f = 0; f < x->n_flows; f++) {
        y.first[f + 1] = y.first[f];
        for (int i = x->first[flow[f]]; i < x->first[flow[f] + 1]; i++) {
            int l = x->path[i];
            y.path[y.first[f + 1]++] = l < x->n_shared ? (l + shift) % x->n_shared : l;
        }
    }
    solve(&y);
    for (int f = 0; f < x->n_flows; f++) assert_rates(&y.rate[f], &x->rate[flow[f]], 1);
}

static uint64_t read_seed(void)
{
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static void random_systems_are_fair(void **state)
{
    (void)state;
    uint64_t seed = read_seed();
    for (uint64_t i = 0; i < 2000; i++) {
        struct instance x = {0};
        draw(&x, seed, i);
        solve(&x);
        assert_fair(&x);
        assert_order_does_not_matter(&x, seed + 1, i);
    }
}

/* What a reader knows that only looks at changed and moved. */
struct reader {
    int server[FLOWS];
    double level[LINKS];
};

static void read_news(struct reader *r, const struct moe_share *s)
{
    for (int i = 0; i < s->n_changed; i++) {
        const struct moe_share_link *k = &s->link[s->changed[i]];
        assert_true(r->level[s->changed[i]] == k->was);
        r->level[s->changed[i]] = k->level;
    }
    for (int i = 0; i < s->n_moved; i++) r->server[s->moved[i]] = s->flow[s->moved[i]].server;
}

/* Flows of a random system come and go, one to four at a time, first mostly in, then mostly out, some while a
 * change is not solved yet: the rates are always those of a system made anew of the present flows. */
static void come_and_go(uint64_t seed, uint64_t stream)
{
    struct instance x = {0};
    struct reader r = {0};
    struct moe_share s;
    int place[FLOWS], steps = 0; /* place: of a flow of x, -1: it is out */
    draw(&x, seed, stream);
    moe_share_init(&s, x.n_shared, x.cap);
    for (int l = x.n_shared; l < x.n_links; l++) moe_share_add_limit(&s, x.cap[l]);
    for (int f = 0; f < x.n_flows; f++) place[f] = -1;
    for (uint64_t at = 0; steps < 3 * x.n_flows; at += 2) {
        int f = (int)(moe_uniform(seed + 1, stream, at) * x.n_flows);
        double dice = moe_uniform(seed + 1, stream, at + 1);
        if (place[f] < 0 && dice < (steps < x.n_flows ? 1 : 0.3)) {
            place[f] = moe_share_add(&s, x.first[f + 1] - x.first[f], x.path + x.first[f]);
        } else if (place[f] >= 0 && dice < (steps < x.n_flows ? 0.3 : 1)) {
            moe_share_remove(&s, place[f]);
            place[f] = -1;
        }
        if (dice < 0.4) continue;
        moe_share_solve(&s);
        read_news(&r, &s);
        steps++;
        struct instance y = {.n_links = x.n_links, .n_shared = x.n_shared};
        int here[FLOWS];
        memcpy(y.cap, x.cap, sizeof y.cap);
        for (f = 0; f < x.n_flows; f++) {
            if (place[f] < 0) continue;
            int n = x.first[f + 1] - x.first[f];
            memcpy(y.path + y.first[y.n_flows], x.path + x.first[f], (size_t)n * sizeof *y.path);
            here[y.n_flows++] = place[f];
            y.first[y.n_flows] = y.first[y.n_flows - 1] + n;
        }
        solve(&y);
        for (f = 0; f < y.n_flows; f++) {
            assert_true(fabs(rate_of(&s, here[f]) - y.rate[f]) <= 1e-9 * y.rate[f]);
            assert_true(rate_of(&s, here[f]) == r.level[r.server[here[f]]]);
        }
    }
    moe_share_free(&s);
}

static void flows_come_and_go(void **state)
{
    (void)state;
    uint64_t seed = read_seed();
    for (uint64_t i = 0; i < 60; i++) come_and_go(seed, i);
}

/* Links 0 and 1, joined by flow 1, and link 2. What happens on link 2 leaves the others alone; once flows 0
 * to 2 are gone, links 0 and 1 are no longer one part. */
static void other_parts_are_left_alone(void **state)
{
    (void)state;
    struct moe_share s;
    moe_share_init(&s, 3, (double[]){10, 4, 5});
    moe_share_add(&s, 1, (int[]){0});
    moe_share_add(&s, 2, (int[]){0, 1});
    moe_share_add(&s, 1, (int[]){1});
    moe_share_solve(&s);
    uint32_t before = s.flow[0].solve;
    int other = moe_share_add(&s, 1, (int[]){2});
    moe_share_solve(&s);
    assert_int_equal(s.flow[0].solve, before);
    assert_int_equal(s.flow[other].solve, before + 1);
    for (int f = 0; f < 3; f++) moe_share_remove(&s, f);
    moe_share_solve(&s);
    int a = moe_share_add(&s, 1, (int[]){0});
    moe_share_solve(&s);
    before = s.flow[a].solve;
    moe_share_add(&s, 1, (int[]){1});
    moe_share_solve(&s);
    assert_int_equal(s.flow[a].solve, before);
    moe_share_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worked_example),
        cmocka_unit_test(long_path_takes_its_slowest_link),
        cmocka_unit_test(four_levels),
        cmocka_unit_test(flow_caps),
        cmocka_unit_test(limits),
        cmocka_unit_test(limit_is_used_again),
        cmocka_unit_test(zero_flows),
        cmocka_unit_test(rounding_does_not_split_a_tie),
        cmocka_unit_test(random_systems_are_fair),
        cmocka_unit_test(flows_come_and_go),
        cmocka_unit_test(other_parts_are_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
