/* Max-min fair rates: systems solved by hand, and the property that defines them on random systems. */
#include "sim/share.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LINKS = 40, FLOWS = 200, PATH = 6 };

struct instance {
    int n_links, n_flows;
    double cap[LINKS], limit[FLOWS];
    int first[FLOWS + 1], path[FLOWS * PATH];
    double rate[FLOWS];
};

static void solve(struct instance *x)
{
    moe_share(x->n_links, x->cap, x->n_flows, x->first, x->path, x->limit, x->rate);
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
    moe_share(2, (double[]){10, 4}, 3, (int[]){0, 1, 3, 4}, (int[]){0, 0, 1, 1}, NULL, rate);
    assert_rates(rate, (double[]){8, 2, 2}, 3);
}

/* A parking lot: flow 0 on A = 6, B = 9, C = 4; flows 1, 2, 3 on one each. Levels 3, 4.5, 2: C fills, flows 0
 * and 3 get 2. Left: A 6 - 2 = 4 for flow 1, B 9 - 2 = 7 for flow 2. Link D has no flow. */
static void long_path_takes_its_slowest_link(void **state)
{
    (void)state;
    double rate[4];
    moe_share(4, (double[]){6, 9, 4, 1}, 4, (int[]){0, 3, 4, 5, 6}, (int[]){0, 1, 2, 0, 1, 2}, NULL, rate);
    assert_rates(rate, (double[]){2, 4, 7, 2}, 4);
}

/* Four levels: A = 3, B = 10, C = 30, D = 100; flow f crosses links f to D, flow 4 only D.
 * Levels: A 3 / 1, B 10 / 2, C 30 / 3, D 100 / 5 = 20. A: flow 0 gets 3. B has 7 for flow 1. C has 30 - 10 =
 * 20 for flow 2. D has 100 - 30 = 70 for flows 3 and 4: 35 each. */
static void four_levels(void **state)
{
    (void)state;
    double rate[5];
    moe_share(4, (double[]){3, 10, 30, 100}, 5, (int[]){0, 4, 7, 9, 10, 11},
              (int[]){0, 1, 2, 3, 1, 2, 3, 2, 3, 3, 3}, NULL, rate);
    assert_rates(rate, (double[]){3, 7, 20, 35, 35}, 5);
}

/* One link of 10; caps 4, 1, none, 100. 10 / 4 = 2.5: flow 1 stops at 1; (10 - 1) / 3 = 3, below flow 0's cap
 * of 4: the link fills, the others get 3. With a link of 15: (15 - 1) / 3 = 4.67, flow 0 stops at 4, the
 * others get 5. */
static void flow_caps(void **state)
{
    (void)state;
    double rate[4], limit[] = {4, 1, INFINITY, 100};
    moe_share(1, (double[]){10}, 4, (int[]){0, 1, 2, 3, 4}, (int[]){0, 0, 0, 0}, limit, rate);
    assert_rates(rate, (double[]){3, 1, 3, 3}, 4);
    moe_share(1, (double[]){15}, 4, (int[]){0, 1, 2, 3, 4}, (int[]){0, 0, 0, 0}, limit, rate);
    assert_rates(rate, (double[]){4, 1, 5, 5}, 4);
}

/* A cap that equals the level, 6 / 3: everyone gets 2, the link is full. A cap above all that the link can
 * give changes nothing: 6 / 2. */
static void cap_at_the_level(void **state)
{
    (void)state;
    double rate[3];
    moe_share(1, (double[]){6}, 3, (int[]){0, 1, 2, 3}, (int[]){0, 0, 0}, (double[]){INFINITY, 2, INFINITY},
              rate);
    assert_rates(rate, (double[]){2, 2, 2}, 3);
    moe_share(1, (double[]){6}, 2, (int[]){0, 1, 2}, (int[]){0, 0}, (double[]){7, INFINITY}, rate);
    assert_rates(rate, (double[]){3, 3}, 2);
}

/* A flow without links runs at its cap and takes nothing from the others: link 10 for flows 0 and 2. */
static void flow_without_links(void **state)
{
    (void)state;
    double rate[3];
    moe_share(1, (double[]){10}, 3, (int[]){0, 1, 1, 2}, (int[]){0, 0}, (double[]){INFINITY, 80, INFINITY},
              rate);
    assert_rates(rate, (double[]){5, 80, 5}, 3);
}

static void zero_flows(void **state)
{
    (void)state;
    double rate[1] = {-1};
    moe_share(2, (double[]){1, 2}, 0, (int[]){0}, (int[]){0}, NULL, rate);
    assert_true(rate[0] == -1);
    moe_share(0, NULL, 0, (int[]){0}, NULL, NULL, NULL);
}

/* A = 3.4 with caps 0.3, 0.7 and three flows without: 2.4 / 3 = 0.8 each. B = 2.4 with three flows: 0.8 each.
 * In doubles 3.4 - 0.3 - 0.7 is not 2.4, yet the links fill together: flows that end together must not end
 * apart. */
static void rounding_does_not_split_a_tie(void **state)
{
    (void)state;
    double rate[8], limit[8] = {0.3, 0.7};
    for (int f = 2; f < 8; f++) limit[f] = INFINITY;
    moe_share(2, (double[]){3.4, 2.4}, 8, (int[]){0, 1, 2, 3, 4, 5, 6, 7, 8}, (int[]){0, 0, 0, 0, 0, 1, 1, 1},
              limit, rate);
    assert_rates(rate, (double[]){0.3, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8}, 8);
    for (int f = 3; f < 8; f++) assert_true(rate[f] == rate[2]);
}

/* A random system; every second one has few different capacities and caps, so that levels tie. */
static void draw(struct instance *x, uint64_t seed, uint64_t stream)
{
    uint64_t at = 0;
#define DRAW(n) ((int)(moe_uniform(seed, stream, at++) * (n)))
    bool tie = stream % 2;
    x->n_links = 1 + DRAW(LINKS);
    x->n_flows = 1 + DRAW(FLOWS);
    for (int l = 0; l < x->n_links; l++)
        x->cap[l] = 1e9 * (tie ? 1 + DRAW(3) : exp(7 * moe_uniform(seed, stream, at++)));
    for (int f = 0; f < x->n_flows; f++) {
        int *path = x->path + x->first[f], n = 0;
        for (int tries = DRAW(PATH + 1); tries > 0; tries--) {
            int link = DRAW(x->n_links);
            bool seen = false;
            for (int i = 0; i < n; i++) seen |= path[i] == link;
            if (!seen) path[n++] = link;
        }
        x->first[f + 1] = x->first[f] + n;
        double limit = 1e7 * (tie ? 1 << DRAW(8) : exp(9 * moe_uniform(seed, stream, at++)));
        x->limit[f] = n && DRAW(3) ? INFINITY : limit;
    }
#undef DRAW
}

/* The property of share.h: no link overfull, and for each flow its own cap or a bottleneck. */
static void assert_fair(const struct instance *x)
{
    double sum[LINKS] = {0}, fastest[LINKS] = {0};
    for (int f = 0; f < x->n_flows; f++)
        for (int i = x->first[f]; i < x->first[f + 1]; i++) {
            sum[x->path[i]] += x->rate[f];
            fastest[x->path[i]] = fmax(fastest[x->path[i]], x->rate[f]);
        }
    for (int l = 0; l < x->n_links; l++) assert_true(sum[l] <= x->cap[l] * (1 + 1e-9));
    for (int f = 0; f < x->n_flows; f++) {
        assert_true(x->rate[f] > 0 && x->rate[f] <= x->limit[f]);
        bool held = x->rate[f] == x->limit[f];
        for (int i = x->first[f]; i < x->first[f + 1]; i++) {
            int l = x->path[i];
            held |= sum[l] >= x->cap[l] * (1 - 1e-9) && x->rate[f] >= fastest[l] * (1 - 1e-9);
        }
        assert_true(held);
    }
}

/* The same system with flows in another order, and links under other numbers. */
static void assert_order_does_not_matter(const struct instance *x, uint64_t seed, uint64_t stream)
{
    struct instance y = {.n_links = x->n_links, .n_flows = x->n_flows};
    int flow[FLOWS], shift = (int)(moe_uniform(seed, stream, 0) * x->n_links);
    for (int f = 0; f < x->n_flows; f++) {
        int other = (int)(moe_uniform(seed, stream, 1 + (uint64_t)f) * (f + 1));
        flow[f] = flow[other];
        flow[other] = f;
    }
    for (int l = 0; l < x->n_links; l++) y.cap[(l + shift) % x->n_links] = x->cap[l];
    for (int f = 0; f < x->n_flows; f++) {
        y.limit[f] = x->limit[flow[f]];
        y.first[f + 1] = y.first[f];
        for (int i = x->first[flow[f]]; i < x->first[flow[f] + 1]; i++)
            y.path[y.first[f + 1]++] = (x->path[i] + shift) % x->n_links;
    }
    solve(&y);
    for (int f = 0; f < x->n_flows; f++) assert_rates(&y.rate[f], &x->rate[flow[f]], 1);
}

static void random_systems_are_fair(void **state)
{
    (void)state;
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < 3000; i++) {
        struct instance x = {0};
        draw(&x, seed, i);
        solve(&x);
        assert_fair(&x);
        assert_order_does_not_matter(&x, seed + 1, i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worked_example),
        cmocka_unit_test(long_path_takes_its_slowest_link),
        cmocka_unit_test(four_levels),
        cmocka_unit_test(flow_caps),
        cmocka_unit_test(cap_at_the_level),
        cmocka_unit_test(flow_without_links),
        cmocka_unit_test(zero_flows),
        cmocka_unit_test(rounding_does_not_split_a_tie),
        cmocka_unit_test(random_systems_are_fair),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
