/* Flows over time, solved by hand on a node of 4 GPUs: 1000 B/us up and down, device copies at 2000 B/us. */
#include "sim/network.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>

#include <cmocka.h>

enum { US = 1000000 }; /* ps */

static struct moe_topo machine(int n_ranks)
{
    struct moe_topo t = {
        .gpus_per_node = 4, .nics_per_node = 4, .memory_Bps = 4e9, .intra_Bps = 1e9, .nic_Bps = 1e8};
    moe_topo_build(&t, n_ranks);
    return t;
}

static void close_machine(struct moe_topo *t, struct moe_network *net)
{
    moe_network_free(net);
    free(t->link_Bps);
    free(t->link_class);
}

/* One flow at once, as the links allow. */
static void add(struct moe_network *net, moe_ps now, int from, int to, int64_t bytes, int tag)
{
    moe_network_add(net, now, 1, &(struct moe_sent){.from = from, .to = to, .bytes = bytes, .after = -1},
                    tag);
    moe_network_end(net, now); /* starts it */
}

/* Asserts that the next flows to end do so at `time`: those with these tags, in this order. */
static void expect_end(struct moe_network *net, moe_ps time, int n, const int *tag)
{
    assert_int_equal(moe_network_next(net), time);
    moe_network_end(net, time);
    assert_int_equal(net->n_ended, n);
    for (int i = 0; i < n; i++) assert_int_equal(net->ended[i].tag, tag[i]);
}
#define EXPECT_END(net, time, ...)                                                                           \
    expect_end(net, time, sizeof((int[]){__VA_ARGS__}) / sizeof(int), (int[]){__VA_ARGS__})

static void test_empty(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    assert_true(moe_network_next(&net) == MOE_NEVER);
    add(&net, 5 * US, 0, 1, 1000, 7);
    EXPECT_END(&net, 6 * US, 7);
    assert_true(moe_network_next(&net) == MOE_NEVER);
    close_machine(&t, &net);
}

/* Two flows leave GPU 0, 500 B/us each. The one of 1000 B ends at 2 us; the other has then moved 1000 of 3000
 * B and goes on alone at 1000 B/us: 2 + 2 = 4 us. */
static void test_shared_link(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    add(&net, 0, 0, 1, 1000, 1);
    add(&net, 0, 0, 2, 3000, 2);
    EXPECT_END(&net, 2 * US, 1);
    EXPECT_END(&net, 4 * US, 2);
    close_machine(&t, &net);
}

/* Alone, flow 1 of 4000 B moves 1000 B by 1 us; then flow 2 joins on the same link: 500 B/us each. Flow 2 of
 * 500 B ends at 2 us, when flow 1 has 2500 B left: 2 + 2.5 = 4.5 us. */
static void test_late_start(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    add(&net, 0, 0, 1, 4000, 1);
    assert_int_equal(moe_network_next(&net), 4 * US);
    add(&net, 1 * US, 0, 2, 500, 2);
    EXPECT_END(&net, 2 * US, 2);
    EXPECT_END(&net, 9 * US / 2, 1);
    close_machine(&t, &net);
}

/* Flows 1 and 2 have links of their own and end together, in the order of their start; flow 3 goes on. */
static void test_equal_ends(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    add(&net, 0, 2, 3, 9000, 3);
    add(&net, 0, 0, 1, 1000, 1);
    add(&net, 0, 1, 0, 1000, 2);
    EXPECT_END(&net, 1 * US, 1, 2);
    EXPECT_END(&net, 9 * US, 3);
    close_machine(&t, &net);
}

/* A copy on the device runs at half the memory rate, 2000 B/us, whatever else its GPU sends. */
static void test_local_copy(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    add(&net, 0, 0, 1, 3000, 1);
    add(&net, 0, 0, 0, 4000, 2);
    add(&net, 0, 1, 1, 2000, 3);
    EXPECT_END(&net, 1 * US, 3);
    EXPECT_END(&net, 2 * US, 2);
    assert_int_equal(moe_network_next(&net), 3 * US);
    assert_int_equal(net.share.flow[0].solve, 1); /* copies do not make the others be solved again */
    EXPECT_END(&net, 3 * US, 1);
    close_machine(&t, &net);
}

/* 33,333 B at 3200 B/us take 10,416,562.5 ps, rounded up once, when the rate is set: not again and again
 * with what is left while flows between other GPUs come and go, which would lose the half sooner or later. */
static void test_unconcerned_flow_keeps_its_end(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    for (int l = 0; l < t.n_links; l++) t.link_Bps[l] = 3.2e9;
    moe_network_init(&net, &t);
    add(&net, 0, 1, 0, 33333, 1);
    for (int i = 0; i < 100; i++) {
        add(&net, 7 * i, 2, 3, 100000, 2);
        assert_int_equal(moe_network_next(&net), 10416563);
    }
    EXPECT_END(&net, 10416563, 1);
    close_machine(&t, &net);
}

/* A flow counts once for each class that it crosses, though it crosses two links of it; a copy for none. With
 * kind shared, between nodes: GPU, bus, NIC, NIC, bus, GPU. */
static void test_bytes_of_classes(void **state)
{
    (void)state;
    struct moe_topo t = machine(8);
    struct moe_network net;
    moe_network_init(&net, &t);
    add(&net, 0, 0, 1, 10, 0);
    add(&net, 0, 0, 4, 200, 0);
    add(&net, 0, 2, 2, 3000, 0);
    assert_int_equal(net.bytes[MOE_LINK_INTRA], 10);
    assert_int_equal(net.bytes[MOE_LINK_BUS], 0);
    assert_int_equal(net.bytes[MOE_LINK_NIC], 200);
    moe_network_free(&net);
    t.intra_kind = MOE_INTRA_SHARED;
    t.bus_Bps = 1e9;
    moe_topo_build(&t, 8);
    moe_network_init(&net, &t);
    add(&net, 0, 0, 1, 10, 0);
    add(&net, 0, 0, 4, 200, 0);
    assert_int_equal(net.bytes[MOE_LINK_INTRA], 210);
    assert_int_equal(net.bytes[MOE_LINK_BUS], 210);
    assert_int_equal(net.bytes[MOE_LINK_NIC], 200);
    close_machine(&t, &net);
}

/* Checks that no link carries more than its capacity, and adds what flows move until `next` to moved [tag];
 * rate [tag] is at which rate. */
static void carry(const struct moe_network *net, moe_ps next, double *moved, double *rate)
{
    for (int l = 0; l < net->share.n_links; l++) {
        const struct moe_share_link *k = &net->share.link[l];
        double load = 0;
        for (int e = 0; e < k->n; e++) {
            int place = k->flow[e].flow, server = net->share.flow[place].server;
            int tag = net->flow[net->travel[place].flow].tag;
            load += rate[tag] = net->share.link[server].level;
            if (server == l) moved[tag] += rate[tag] * 1e-12 * (double)(next - net->now);
        }
        assert_true(load <= k->cap * (1 + 1e-9));
    }
}

/* Flow 1 of 6000 B has a rate of its own of 300 B/us, and half of 1000 B/us would be more: it takes 20 us.
 * Flow 2 has what is left, 700 B/us. A copy at 500 B/us, below its link, takes 4000 / 500 = 8 us. */
static void test_rates_of_their_own(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    struct moe_sent plan[] = {{0, 1, 6000, .rate_Bps = 3e8, .after = -1},
                              {0, 2, 7000, .after = -1},
                              {0, 0, 4000, .rate_Bps = 5e8, .after = -1}};
    moe_network_init(&net, &t);
    moe_network_add(&net, 0, 3, plan, 1);
    moe_network_end(&net, moe_network_next(&net));
    EXPECT_END(&net, 8 * US, 1);
    EXPECT_END(&net, 10 * US, 1);
    EXPECT_END(&net, 20 * US, 1);
    /* Four at 300 B/us would be more than the link has: 250 B/us each. Then two: 300 B/us each again. */
    struct moe_sent many[] = {{0, 1, 1000, .rate_Bps = 3e8, .after = -1},
                              {0, 2, 1000, .rate_Bps = 3e8, .after = -1},
                              {0, 3, 1600, .rate_Bps = 3e8, .after = -1},
                              {0, 1, 1600, .rate_Bps = 3e8, .after = -1}};
    moe_network_add(&net, 20 * US, 4, many, 2);
    moe_network_end(&net, moe_network_next(&net));
    assert_int_equal(net.n_limits, 2); /* one for each rate, not for each flow */
    EXPECT_END(&net, 24 * US, 2, 2);
    EXPECT_END(&net, 26 * US, 2, 2);
    close_machine(&t, &net);
}

/* N flows at once, 10 from each rank, all of different rates, each with a limit of its own, made while those
 * before it are on their way: flow i, of (N - i) b bytes at b B/us, ends N - i us after the start. The limits
 * of a round serve other rates in the next, that which has just ended too, but not in that very instant. */
static void test_limits_are_used_again(void **state)
{
    (void)state;
    enum { N = 40 };
    struct moe_topo t = machine(4);
    struct moe_network net;
    moe_network_init(&net, &t);
    for (int round = 0; round < 3; round++) {
        moe_ps start = net.now;
        for (int i = 0; i < N; i++) {
            int B_us = 1 + i / 4 + 10 * round;
            struct moe_sent sent = {i % 4, (i + 1) % 4, (N - i) * B_us, .rate_Bps = 1e6 * B_us, .after = -1};
            moe_network_add(&net, start, 1, &sent, i);
            moe_network_end(&net, start);
            moe_network_next(&net);
        }
        for (int i = N - 1; i >= 0; i--) EXPECT_END(&net, start + (N - i) * (moe_ps)US, i);
        assert_int_equal(net.n_limits, N);
    }
    assert_true(moe_network_next(&net) == MOE_NEVER);
    close_machine(&t, &net);
}

/* Flow 0 starts at 2 us and takes 1 us; flow 1 follows it by 0.5 us, flow 2 of no bytes follows that by 3 us,
 * and flow 3, which follows nothing, has a link of its own. */
static void test_flows_follow_others(void **state)
{
    (void)state;
    struct moe_topo t = machine(4);
    struct moe_network net;
    struct moe_sent plan[] = {{0, 1, 1000, .delay_s = 2e-6, .after = -1},
                              {1, 2, 1000, .delay_s = 0.5e-6, .after = 0},
                              {2, 2, 0, .delay_s = 3e-6, .after = 1},
                              {3, 0, 9000, .after = -1}};
    moe_network_init(&net, &t);
    moe_network_add(&net, US, 4, plan, 0);
    for (int i = 0; i < 4; i++) {
        const moe_ps end[] = {4 * US, 11 * US / 2, 17 * US / 2, 10 * US};
        moe_ps next;
        do {
            moe_network_end(&net, next = moe_network_next(&net));
        } while (!net.n_ended); /* one starts */
        assert_int_equal(next, end[i]);
        assert_int_equal(net.n_ended, 1);
        assert_int_equal(net.ended->from, i);
    }
    assert_true(moe_network_next(&net) == MOE_NEVER);
    assert_int_equal(net.bytes[MOE_LINK_INTRA], 11000);
    close_machine(&t, &net);
}

/* All pairs of 16 ranks, every size different, some later than others. The busiest link gives a lower bound;
 * what a flow has moved when it ends is its size. */
static void test_random_all_pairs(void **state)
{
    (void)state;
    struct moe_topo t = machine(16);
    struct moe_network net;
    moe_network_init(&net, &t);
    double *bytes = moe_alloc((size_t)t.n_links, sizeof *bytes), bound_s = 0;
    double size[256], moved[256] = {0}, rate[256] = {0};
    int started = 0, ended = 0;
    while (ended < 256) {
        for (int some = 0; some < 40 && started < 256; some++, started++) {
            int path[MOE_PATH_MAX], a = started / 16, b = started % 16, n = moe_topo_path(&t, a, b, path);
            size[started] = (double)(1 + moe_hash64((uint64_t)started) % 100000);
            add(&net, net.now, a, b, (int64_t)size[started], started);
            for (int i = 0; i < n; i++) bytes[path[i]] += size[started];
        }
        moe_ps next = moe_network_next(&net);
        assert_true(next >= net.now && next != MOE_NEVER);
        moe_ps first = MOE_NEVER;
        for (int l = 0; l < net.share.n_links; l++)
            if (net.clock[l].end < first) first = net.clock[l].end;
        assert_int_equal(next, first);
        carry(&net, next, moved, rate);
        moe_network_end(&net, next);
        ended += net.n_ended;
        for (int f = 0; f < net.n_ended; f++) { /* to within the half picosecond that an end is rounded to */
            int tag = net.ended[f].tag;
            assert_true(fabs(moved[tag] - size[tag]) < rate[tag] * 0.6e-12);
        }
    }
    for (int l = 0; l < t.n_links; l++)
        if (bytes[l] / t.link_Bps[l] > bound_s) bound_s = bytes[l] / t.link_Bps[l];
    assert_true(moe_network_next(&net) == MOE_NEVER);
    assert_true((double)net.now >= bound_s * 1e12 - 1);
    assert_true((double)net.now <= 2 * bound_s * 1e12);
    free(bytes);
    close_machine(&t, &net);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_shared_link),
        cmocka_unit_test(test_late_start),
        cmocka_unit_test(test_equal_ends),
        cmocka_unit_test(test_local_copy),
        cmocka_unit_test(test_unconcerned_flow_keeps_its_end),
        cmocka_unit_test(test_bytes_of_classes),
        cmocka_unit_test(test_rates_of_their_own),
        cmocka_unit_test(test_limits_are_used_again),
        cmocka_unit_test(test_flows_follow_others),
        cmocka_unit_test(test_random_all_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
