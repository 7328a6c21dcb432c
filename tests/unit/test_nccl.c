/* NCCL's channels on one node: times by hand, and the fit that finds made-up numbers again. */
#include "sim/cost/calibrate_nccl.h"
#include "sim/topology.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { P = MOE_NCCL_N_PARAMS };

#define ASSERT_NEAR(value, expected)                                                                         \
    do {                                                                                                     \
        double value_ = (value), expected_ = (expected);                                                     \
        if (!(fabs(value_ - expected_) <= 1e-9 * fabs(expected_)))                                           \
            fail_msg("%s: %.12g, expected %.12g", #value, value_, expected_);                                \
    } while (0)

/* 12 channels of 30 GB/s, as on H100, and round numbers. */
static struct moe_nccl round_numbers(void)
{
    struct moe_nccl p = {.release = moe_nccl_release("2.30.7"),
                         .arch = 90,
                         .ring_channels = 12,
                         .ring_Bps = 30e9,
                         .nvlink = true};
    assert_non_null(p.release);
    p.ll_base_s = 5e-6;
    p.ll_step_s = 1e-6;
    p.ll_Bps = 8e9;
    p.ll128_Bps = 10e9;
    p.simple_base_s = 12e-6;
    p.simple_sync_s = 4e-6;
    p.simple_Bps = 32e9;
    p.block_s = 2e-6;
    p.p2p_base_s = 2e-6;
    p.p2p_part_s = 0.1e-6;
    p.p2p_Bps = 20e9;
    p.port_Bps = 400e9;
    return p;
}

/* ---- times by hand ---- */

/* Of 8 ranks 32 channels leave 4 to a peer, one for each 64 KiB. Launch: 5 + 0.5 + 2 (2 - 2/8) = 9 us. */
static void pairs(void **state)
{
    (void)state;
    struct moe_nccl p = round_numbers();
    struct moe_nccl_part part = moe_nccl_pair(&p, 8, 16384, false);
    ASSERT_NEAR(part.delay_s, 9e-6); /* LL: up to 16 KiB of a channel */
    assert_true(part.wire == 1 && part.rate_Bps == 5.6e9 && part.tail_s == 0);
    /* Simple: 2 us, and 0.1 us for each part of 8 peers; a first chunk of all of it is 0.4 of it longer; what
     * the own part costs is 0.3 of a peer's, of 7. */
    part = moe_nccl_pair(&p, 8, 16385, false);
    ASSERT_NEAR(part.delay_s, 11.8e-6);
    ASSERT_NEAR(part.wire, 1.4 * (1 + 0.3 / 7));
    ASSERT_NEAR(part.rate_Bps, 20e9 * (1 + 0.3 / 7));
    /* 8 MiB on 4 channels: the first 512 KiB of 2 MiB. Its own part crosses no port. */
    part = moe_nccl_pair(&p, 8, 8 << 20, true);
    ASSERT_NEAR(part.delay_s, 14.2e-6);
    ASSERT_NEAR(part.wire, 1.1);
    ASSERT_NEAR(part.rate_Bps, 80e9);
    /* Between 2 ranks: 16 channels; 5 + 0.5 + 2 (2 - 1) + 2 + 0.1 x 16 x 2 us. 64 KiB need one channel. */
    ASSERT_NEAR(moe_nccl_pair(&p, 2, 64 << 20, false).delay_s, 12.7e-6);
    ASSERT_NEAR(moe_nccl_pair(&p, 2, 64 << 10, false).delay_s, 9.7e-6);
    ASSERT_NEAR(moe_nccl_pair(&p, 2, (64 << 10) + 1, false).delay_s, 9.9e-6);
    /* All-to-all of 8, 64 MiB: 7.3 x 8 MiB x 1.1 through the port, which is longer than 8 MiB x 1.1 / 80. */
    struct moe_nccl_case c = {MOE_ALLTOALL, 8, 64 << 20, 2, true};
    ASSERT_NEAR(moe_nccl_s(&p, &c), 14.2e-6 + 7.3 * 8388608 * 1.1 / 400e9);
    p.port_Bps = 900e9;
    ASSERT_NEAR(moe_nccl_s(&p, &c), 14.2e-6 + 8388608 * 1.1 / 80e9);
}

static double ring_s(const struct moe_nccl *p, struct moe_nccl_case c, enum moe_algorithm algorithm,
                     enum moe_protocol protocol)
{
    struct moe_nccl_ring ring = moe_nccl_ring(p, &c);
    if (ring.algorithm != algorithm || ring.protocol != protocol)
        fail_msg("%lld B: %s/%s", (long long)c.bytes, moe_algorithm_text[ring.algorithm],
                 moe_protocol_text[ring.protocol]);
    return moe_nccl_s(p, &c);
}

static void rings_of_lines(void **state)
{
    (void)state;
    struct moe_nccl p = round_numbers();
    const enum moe_algorithm R = MOE_ALGORITHM_RING;
    /* LL, 8 KiB of 8: one channel, x = 1024. 5 + 7 x 1 us; 7168 x 2 at 16 GB/s; the last x / 8. */
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_ALLGATHER, 8, 8192, 2, true}, R, MOE_PROTOCOL_LL),
                12e-6 + 0.896e-6 + 0.128e-6);
    /* 64 KiB: two channels, whose second launch is half waited for: 0.5 x 2 (1 - 1/2). x = 4096. Steps that
     * add up write once: twice the rate. Bytes are added up at 80 GB/s in each of the 7 steps. */
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_REDUCESCATTER, 8, 65536, 1, false}, R, MOE_PROTOCOL_LL),
                12.5e-6 + 57344 * 2 / 64e9 + 4096 / 8e9 + 7 * 4096 / 80e9);
    /* All-reduce adds up for 7 steps and hands on for 7; the launch counts once. */
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_ALLREDUCE, 8, 8192, 2, true}, R, MOE_PROTOCOL_LL),
                12e-6 + 0.448e-6 + 7e-6 + 0.896e-6 + 0.128e-6);
    /* LL128, 8 MiB: 1638 x 5120 B, so all 24 channels; NCCL's 1.9 us a step; 16 bytes for 15. */
    double x = 8388608 / 8.0 / 24;
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_ALLGATHER, 8, 8 << 20, 2, true}, R, MOE_PROTOCOL_LL128),
                5e-6 + (1 - 1 / 24.0) * 1e-6 + 7 * 1.9e-6 + 7 * x / 10e9 + x / 10e9);
    /* Through a narrow port all channels' lines go one after the other, with their flags. */
    p.port_Bps = 20e9;
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_ALLGATHER, 8, 8 << 20, 2, true}, R, MOE_PROTOCOL_LL128),
                5e-6 + (1 - 1 / 24.0) * 1e-6 + 7 * (1.9e-6 + 24 * x * 16 / 15 / 20e9) + x / 10e9);
    ASSERT_NEAR(ring_s(&p, (struct moe_nccl_case){MOE_REDUCESCATTER, 8, 65536, 2, true}, R, MOE_PROTOCOL_LL),
                12.5e-6 + 57344 * 2 / 20e9 + 4096 / 8e9);
}

static void rings_of_chunks(void **state)
{
    (void)state;
    struct moe_nccl p = round_numbers();
    const enum moe_algorithm R = MOE_ALGORITHM_RING;
    /* 64 MiB of 8 on 24 channels; NCCL's 3.4 us a step. A step takes 4 us + x / 32 in a channel, 14.9 us, but
     * all channels' x at 400 GB/s, 21 us: the port. */
    double x = 67108864 / 8.0 / 24;
    struct moe_nccl_case c = {MOE_ALLGATHER, 8, 64 << 20, 2, true};
    ASSERT_NEAR(ring_s(&p, c, R, MOE_PROTOCOL_SIMPLE), 12e-6 + 7 * (3.4e-6 + 24 * x / 400e9) + x / 32e9);
    /* A wider one leaves it to the channels. */
    p.port_Bps = 900e9;
    ASSERT_NEAR(ring_s(&p, c, R, MOE_PROTOCOL_SIMPLE), 12e-6 + 7 * (3.4e-6 + 4e-6 + x / 32e9) + x / 32e9);
    /* The last block is added up at 32 GB/s, bytes at 24. */
    c.kind = MOE_REDUCESCATTER;
    p.simple_Bps = 20e9;
    ASSERT_NEAR(ring_s(&p, c, R, MOE_PROTOCOL_SIMPLE), 12e-6 + 7 * (7.4e-6 + x / 20e9) + x / 32e9);
    c.type_bytes = 1;
    c.is_float = false;
    ASSERT_NEAR(ring_s(&p, c, R, MOE_PROTOCOL_SIMPLE), 12e-6 + 7 * (7.4e-6 + x / 20e9) + x / 24e9);
    /* All-reduce of what switches do not add up: 14 steps. */
    c.kind = MOE_ALLREDUCE;
    ASSERT_NEAR(ring_s(&p, c, R, MOE_PROTOCOL_SIMPLE), 12e-6 + 14 * (7.4e-6 + x / 20e9) + x / 24e9);
}

/* Switches: 0.85 of the port's n / (n + 1); the pipeline fills with 16 chunks a GPU, which are 64 KiB below
 * 64 times that many of 128 KiB, 32 below 8 times, 16 below twice that many of theirs. */
static void switches(void **state)
{
    (void)state;
    struct moe_nccl p = round_numbers();
    static const struct {
        int64_t bytes;
        int chunk;
    } at[] = {
        {1073741824, 131072}, {1073741820, 65536}, {67108864, 65536}, {67108862, 32768}, {16777216, 32768},
    };
    double rate_Bps = 0.85 * 400e9 * 8 / 9;
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct moe_nccl_case c = {MOE_ALLREDUCE, 8, at[i].bytes, 2, true};
        ASSERT_NEAR(ring_s(&p, c, MOE_ALGORITHM_NVLS, MOE_PROTOCOL_SIMPLE),
                    12e-6 + 25e-6 + (128.0 * at[i].chunk + (double)at[i].bytes) / rate_Bps);
    }
    struct moe_nccl_case two = {MOE_ALLREDUCE, 2, 64 << 20, 2, true};
    assert_int_equal(moe_nccl_ring(&p, &two).algorithm, MOE_ALGORITHM_RING);
    /* An algorithm that no fitted row ran may be far off. */
    struct moe_nccl_case c = {MOE_ALLREDUCE, 8, 64 << 20, 2, true};
    p.error[MOE_NCCL_RING][2] = 0.1;
    ASSERT_NEAR(moe_nccl_error(&p, &c), 0.3);
    p.fitted = moe_nccl_bit(&p, &c);
    ASSERT_NEAR(moe_nccl_error(&p, &c), 0.1);
}

/* ---- the fit ---- */

enum { MOST = 400 };

/* Rows of 2 and 4 GPUs and all-gathers of 8, every second power of two, of half and int8 where that differs;
 * or only of one kind. */
static int make_rows(const struct moe_nccl *p, int only, struct moe_nccl_row *row)
{
    int n = 0;
    for (int kind = 0; kind < MOE_COLLECTIVE_COUNT; kind++)
        for (int ranks = 2; ranks <= 8 && (only < 0 || kind == only); ranks *= 2)
            for (int64_t bytes = 512; bytes <= 512 << 20; bytes *= 4)
                for (int type = 2; type >= 1; type--) {
                    bool moved = kind == MOE_ALLTOALL || kind == MOE_ALLGATHER;
                    if ((ranks == 8 && kind != MOE_ALLGATHER) || (type == 1 && moved)) continue;
                    row[n].c =
                        (struct moe_nccl_case){(enum moe_collective)kind, ranks, bytes, type, type == 2};
                    row[n].time_s = moe_nccl_s(p, &row[n].c);
                    row[n++].port_most_Bps = 0;
                    assert_true(n < MOST);
                }
    return n;
}

/* Numbers up to a factor of 1.6 around where a fit starts; the port less. */
static struct moe_nccl made_up(uint64_t seed)
{
    struct moe_nccl p = round_numbers();
    moe_nccl_start(&p);
    for (int i = 0; i < P; i++)
        *moe_nccl_param(&p, i) *= exp(0.94 * (moe_uniform(seed, 0, (uint64_t)i) - 0.5));
    p.port_Bps = 300e9 + 100e9 * moe_uniform(seed, 1, 0);
    return p;
}

/* Median error of the fit for times of 8 GPUs, none of which it saw but all-gathers. */
static double error_of(const struct moe_nccl *fit, const struct moe_nccl *truth)
{
    double error[MOST];
    int n = 0;
    for (int kind = 0; kind < MOE_COLLECTIVE_COUNT; kind++)
        for (int64_t bytes = 512; bytes <= 512 << 20; bytes *= 2) {
            struct moe_nccl_case c = {(enum moe_collective)kind, 8, bytes, 1, false};
            error[n++] = fabs(log(moe_nccl_s(fit, &c) / moe_nccl_s(truth, &c)));
        }
    return moe_quantile(error, n, 0.5);
}

static void numbers_are_found_again(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        struct moe_nccl_row row[MOST];
        struct moe_nccl truth = made_up(seed), facts = round_numbers();
        struct moe_nccl_fit fit;
        int n = make_rows(&truth, -1, row);
        assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
        for (int i = 0; i < P; i++) {
            double found = *moe_nccl_param(&fit.value, i), is = *moe_nccl_param(&truth, i);
            if (fit.told[i] && fabs(log(found / is)) > 0.2)
                fail_msg("seed %d, %s: %g, expected %g", (int)seed, moe_nccl_text[i], found, is);
        }
        if (error_of(&fit.value, &truth) > 0.01)
            fail_msg("seed %d: %g", (int)seed, error_of(&fit.value, &truth));
        assert_true(fit.without_size < 0.02 && fit.without_ranks < 0.02 && fit.median < 0.01);
        assert_true(fit.residual[MOE_NCCL_P2P][0] < 0.01 && fit.residual[MOE_NCCL_RING][2] < 0.01);
    }
}

/* 5 % of noise, and every 15th row three times as long. */
static void noise_and_outliers(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        struct moe_nccl_row row[MOST];
        struct moe_nccl truth = made_up(seed), facts = round_numbers();
        struct moe_nccl_fit fit;
        int n = make_rows(&truth, -1, row);
        for (int i = 0; i < n; i++) {
            double noise = 0;
            for (int k = 0; k < 12; k++) noise += moe_uniform(seed, 2, (uint64_t)(12 * i + k)) - 0.5;
            row[i].time_s *= exp(0.05 * noise) * (i % 15 == 7 ? 3 : 1);
        }
        assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
        if (error_of(&fit.value, &truth) > 0.05)
            fail_msg("seed %d: %g", (int)seed, error_of(&fit.value, &truth));
        for (int class = 0; class < MOE_NCCL_CLASSES; class ++)
            for (int band = 0; band < MOE_NCCL_BANDS; band++)
                assert_true(fit.value.error[class][band] > 0.05 && fit.value.error[class][band] < 0.3);
        for (int i = 0; i < P; i++) assert_true(!fit.told[i] || fit.spread[i] > 0);
    }
}

/* Of all-gathers alone nothing of pairs is told: it stays where it starts, and so does its interval. */
static void what_is_not_told(void **state)
{
    (void)state;
    struct moe_nccl_row row[MOST];
    struct moe_nccl truth = made_up(1), facts = round_numbers(), start = facts;
    struct moe_nccl_fit fit;
    int n = make_rows(&truth, MOE_ALLGATHER, row);
    moe_nccl_start(&start);
    assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
    for (int i = 0; i < P; i++) {
        double *at = moe_nccl_param(&fit.value, i);
        bool pairs_only =
            at == &fit.value.p2p_base_s || at == &fit.value.p2p_part_s || at == &fit.value.p2p_Bps;
        if (pairs_only) {
            assert_true(!fit.told[i] && isinf(fit.spread[i]));
            ASSERT_NEAR(*at, *moe_nccl_param(&start, i));
        }
        if (at == &fit.value.ll_base_s || at == &fit.value.port_Bps) assert_true(fit.told[i]);
    }
    assert_true(isnan(fit.residual[MOE_NCCL_P2P][0]) && fit.value.error[MOE_NCCL_P2P][0] == 0);
    assert_true(fit.value.error[MOE_NCCL_RING][0] > 0);
    assert_int_equal(fit.value.fitted & moe_nccl_bit(&truth, &row[0].c), moe_nccl_bit(&truth, &row[0].c));
    assert_int_equal(moe_nccl_calibrate(&facts, row, P - 1, &fit), MOE_EINPUT);
    /* Sizes of one number of GPUs can be left out, numbers cannot. */
    int n_all = make_rows(&truth, MOE_REDUCESCATTER, row);
    for (int i = n = 0; i < n_all; i++)
        if (row[i].c.ranks == 2) row[n++] = row[i];
    assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
    assert_true(isnan(fit.without_ranks) && !isnan(fit.without_size));
}

/* All-gathers, and two all-to-alls that are far off each other: they tell numbers of pairs no better than by
 * a factor of two, so these stay. Twenty that agree tell them. */
static void doubtful_rows(void **state)
{
    (void)state;
    for (int agree = 0; agree <= 1; agree++) {
        struct moe_nccl_row row[MOST];
        struct moe_nccl truth = made_up(1), facts = round_numbers(), start = facts;
        struct moe_nccl_fit fit;
        int n = make_rows(&truth, MOE_ALLGATHER, row);
        moe_nccl_start(&start);
        for (int i = 0; i < (agree ? 20 : 2); i++, n++) {
            row[n].c = (struct moe_nccl_case){MOE_ALLTOALL, 2, 256 << (10 + i / 2), 2, true};
            row[n].time_s = moe_nccl_s(&truth, &row[n].c) * (agree ? 1 : i ? 3 : 0.5);
            row[n].port_most_Bps = 0;
        }
        assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
        for (int i = 0; i < P; i++) {
            double *at = moe_nccl_param(&fit.value, i);
            if (at != &fit.value.p2p_Bps) continue;
            assert_true(fit.told[i] == agree && isfinite(fit.spread[i]));
            if (!agree) ASSERT_NEAR(*at, *moe_nccl_param(&start, i));
        }
    }
}

/* A bus that leaves each GPU less than its port: the port is not told, the rest is. */
static void behind_a_bus(void **state)
{
    (void)state;
    struct moe_nccl_row row[MOST];
    struct moe_nccl truth = made_up(2), facts = round_numbers();
    struct moe_nccl_fit fit;
    int n = make_rows(&truth, -1, row);
    for (int i = 0; i < n; i++) {
        struct moe_nccl slow = truth;
        slow.port_Bps = row[i].port_most_Bps = 200e9 / row[i].c.ranks;
        row[i].time_s = moe_nccl_s(&slow, &row[i].c);
    }
    assert_int_equal(moe_nccl_calibrate(&facts, row, n, &fit), MOE_OK);
    for (int i = 0; i < P; i++)
        if (moe_nccl_param(&fit.value, i) == &fit.value.port_Bps) assert_false(fit.told[i]);
    assert_true(fabs(log(fit.value.ll_base_s / truth.ll_base_s)) < 0.02);
    assert_true(fit.residual[MOE_NCCL_RING][2] < 0.01);
}

/* ---- NCCL's tuning tables ---- */

/* As written by hand: all-gathers of 8 with LL to 1 MB, where 10 us + 1 MB / 50 GB/s and 20 us + 1 MB / 100
 * GB/s are the same 30 us, then Simple. Launch of LL 2 x 10 - 17 = 3 us, a step (17 - 10) / 7 = 1 us; on the
 * wire 2 x 7/8 of 28 = 49 GB/s, 49/24 of a channel. */
static const char by_hand[] = "8 allreduce ring/ll 17 us 28 GB/s, 8 allreduce ring/simple 34 us 80 GB/s, "
                              "8 allgather ring/ll 10 us 50 GB/s, 8 allgather ring/simple 20 us 100 GB/s";

static struct moe_nccl_tables tables(const char *text)
{
    struct moe_nccl_tables t;
    if (moe_nccl_tables_parse(text, &t) < 0) fail_msg("%s", moe_error());
    return t;
}

static void tables_are_text(void **state)
{
    (void)state;
    char *text;
    size_t bytes;
    struct moe_nccl_tables t = tables(by_hand);
    FILE *f = open_memstream(&text, &bytes);
    moe_nccl_tables_write(&t, f);
    fclose(f);
    assert_string_equal(text, by_hand);
    assert_int_equal(t.n, 1);
    assert_true(moe_nccl_table_of(&t, 8) == t.table && !moe_nccl_table_of(&t, 4));
    free(text);
    moe_nccl_tables_free(&t);
    static const char *const wrong[][2] = {
        {"", "'', expected as in 8 allreduce ring/ll 15 us 80.6 GB/s"},
        {"8 allgather ring/ll 10 50 GB/s", "'8 allgather ring/ll 10 50 GB/s', expected as in 8 "},
        {"8 allgather ring/ll 10 us 50 GB/s 8", "'8 allgather ring/ll 10 us 50 GB/s 8', expected as"},
        {"8 allgather ring/ll 10 us 50 GB/s,", "'', expected as in 8 "},
        {"8 allgathe ring/ll 10 us 50 GB/s", "'allgathe' is no collective, did you mean allgather"},
        {"8 allgather rings/ll 10 us 50 GB/s", "'rings' is no algorithm, did you mean ring"},
        {"8 allgather ring/ll12 10 us 50 GB/s", "'ll12' is no protocol, did you mean ll128"},
        {"1 allgather ring/ll 10 us 50 GB/s", "1 GPUs, expected 2 or more"},
        {"8 allgather ring/ll 10 us 0 GB/s", "expected a latency of 0 us or more, and a rate above 0"},
        {"8 allgather ring/ll -1 us 5 GB/s", "expected a latency of 0 us or more, and a rate above 0"},
        {"8 allgather ring/ll inf us 5 GB/s", "expected a latency of 0 us or more, and a rate above 0"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(moe_nccl_tables_parse(wrong[i][0], &t), MOE_EINPUT);
        if (strncmp(moe_error(), wrong[i][1], strlen(wrong[i][1])) != 0)
            fail_msg("'%s' does not begin '%s'", moe_error(), wrong[i][1]);
        assert_true(!t.n && !t.table);
    }
}

static void the_table_says_what_runs(void **state)
{
    (void)state;
    struct moe_nccl p = round_numbers();
    struct moe_nccl_case c = {MOE_ALLGATHER, 8, 1100000, 2, true};
    enum moe_protocol of_8 = moe_nccl_ring(&p, &c).protocol;
    assert_int_not_equal(of_8, MOE_PROTOCOL_SIMPLE);
    c.ranks = 4;
    enum moe_protocol of_4 = moe_nccl_ring(&p, &c).protocol;
    assert_int_not_equal(of_4, MOE_PROTOCOL_SIMPLE);
    c.ranks = 8;
    c.bytes = 900000;
    p.tables = tables(by_hand);
    assert_int_equal(moe_nccl_ring(&p, &c).protocol, MOE_PROTOCOL_LL);
    c.bytes = 1100000;
    assert_int_equal(moe_nccl_ring(&p, &c).protocol, MOE_PROTOCOL_SIMPLE);
    c.ranks = 4; /* there is no table of 4, and of two nodes neither */
    assert_int_equal(moe_nccl_ring(&p, &c).protocol, of_4);
    c.ranks = 8;
    assert_true(fabs(moe_nccl_far(&p, &c, 2, 8, 50e9).latency_s - 20e-6) > 1e-9);
    /* Switches add up where they can, whatever the table says: not bytes. */
    moe_nccl_tables_free(&p.tables);
    p.tables = tables("8 allreduce nvls/simple 25 us 300 GB/s, 8 allreduce ring/simple 56 us 200 GB/s, "
                      "8 allreduce pat/simple 1 us 900 GB/s");
    c = (struct moe_nccl_case){MOE_ALLREDUCE, 8, 1 << 20, 2, true};
    assert_int_equal(moe_nccl_ring(&p, &c).algorithm, MOE_ALGORITHM_NVLS);
    c.is_float = false;
    assert_int_equal(moe_nccl_ring(&p, &c).algorithm, MOE_ALGORITHM_RING);
    moe_nccl_tables_free(&p.tables);
}

static int place(const char *key)
{
    int i = 0;
    while (strcmp(moe_nccl_text[i], key) != 0) i++;
    return i;
}

static void assert_prior(const struct moe_nccl *p, const char *key, double expected)
{
    double value = 0, spread = 0;
    assert_true(moe_nccl_prior(p, place(key), &value, &spread) && spread > 0);
    ASSERT_NEAR(value, expected);
}

/* Rows of 8 MiB and more tell numbers of Simple, as they do without a table, to the bit. Those of LL are the
 * table's, and so is what is predicted of 1 KiB: 3 us, 7 steps of 1 us, and x = 128 B, 8 times at 49/24 GB/s.
 * With rows of all sizes the table changes nothing of them. */
static void priors_of_a_table(void **state)
{
    (void)state;
    for (int all = 0; all <= 1; all++) {
        struct moe_nccl_row row[MOST];
        struct moe_nccl truth = made_up(1), facts = round_numbers();
        struct moe_nccl_fit plain, fit;
        int kept = 0;
        for (int ranks = 2; ranks <= 4; ranks *= 2)
            for (int64_t bytes = all ? 512 : 8 << 20; bytes <= 512 << 20; bytes *= 2, kept++) {
                row[kept] = (struct moe_nccl_row){.c = {MOE_ALLGATHER, ranks, bytes, 2, true}};
                row[kept].time_s = moe_nccl_s(&truth, &row[kept].c);
            }
        assert_int_equal(moe_nccl_calibrate(&facts, row, kept, &plain), MOE_OK);
        facts.tables = tables(by_hand);
        assert_prior(&facts, "ll_base", 3e-6);
        assert_prior(&facts, "ll_step", 1e-6);
        assert_prior(&facts, "ll_channel", 49e9 / 24);
        assert_prior(&facts, "simple_base", 6e-6);
        assert_prior(&facts, "port", 0.94 * 80e9 * 14 / 8);
        double value, spread;
        assert_false(moe_nccl_prior(&facts, place("ll128_channel"), &value, &spread));
        assert_false(moe_nccl_prior(&facts, place("block"), &value, &spread));
        assert_int_equal(moe_nccl_calibrate(&facts, row, kept, &fit), MOE_OK);
        for (const char *const *key = (const char *const[]){"ll_base", "ll_step", "ll_channel", NULL}; *key;
             key++) {
            int i = place(*key);
            assert_true(fit.told[i] == all && fit.prior[i] == !all && fit.spread[i] < 1);
            if (!all)
                ASSERT_NEAR(*moe_nccl_param(&fit.value, i),
                            (moe_nccl_prior(&facts, i, &value, &spread), value));
        }
        struct moe_nccl_case small = {MOE_ALLGATHER, 8, 1024, 2, true}, large = small;
        large.bytes = 64 << 20;
        large.ranks = 4;
        assert_true(moe_nccl_s(&fit.value, &large) == moe_nccl_s(&plain.value, &large));
        double small_s = moe_nccl_s(&fit.value, &small);
        if (all)
            assert_true(small_s == moe_nccl_s(&plain.value, &small));
        else
            ASSERT_NEAR(small_s, 10e-6 + 8 * 128 / (49e9 / 24));
        moe_nccl_tables_free(&facts.tables);
    }
}

/* What nccl_tuning.h says of a shipped machine, as its log would. */
static void add_model(struct moe_nccl *p, int ranks)
{
    static const enum moe_collective kinds[] = {MOE_ALLGATHER, MOE_ALLREDUCE};
    struct moe_nccl_graph ring = {p->ring_channels, p->ring_Bps, p->ring_Bps};
    struct moe_nccl_machine m = {.release = p->release,
                                 .arch = p->arch,
                                 .nodes = 1,
                                 .ranks_per_node = ranks,
                                 .ring = ring,
                                 .tree = ring,
                                 .nvlink = p->nvlink};
    for (int k = 0; k < 2; k++)
        for (int r = 0; r < MOE_PROTOCOL_COUNT; r++) {
            double latency_s, rate_Bps;
            if (!moe_nccl_estimate(&m, kinds[k], MOE_ALGORITHM_RING, (enum moe_protocol)r, &latency_s,
                                   &rate_Bps))
                continue;
            assert_int_equal(moe_nccl_tables_add(&p->tables, ranks, moe_collective_text[kinds[k]], "ring",
                                                 moe_protocol_text[r], latency_s, rate_Bps),
                             MOE_OK);
        }
}

/* The spreads of priors are what the fitted machines show: of what their rows told, not of starts. */
static void priors_are_so_far_off(void **state)
{
    (void)state;
    static const char *const machines[] = {"a100_sxm", "h100_sxm", "b200_sxm", "gb200", "l40s"};
    double sum[P] = {0}, said[P] = {0};
    int n[P] = {0};
    for (int k = 0; k < 5; k++) {
        struct moe_topo *t;
        if (moe_topo_load(machines[k], &t) < 0) fail_msg("%s", moe_error());
        struct moe_nccl *p = &t->nccl, start = *p;
        add_model(p, (int)t->gpus_per_node);
        moe_nccl_start(&start);
        for (int i = 0; i < P; i++) {
            double value, is = *moe_nccl_param(p, i), before = *moe_nccl_param(&start, i);
            if (!moe_nccl_prior(p, i, &value, &said[i]) || fabs(is / before - 1) < 1e-4) continue;
            sum[i] += pow(log(is / value), 2);
            n[i]++;
        }
        moe_topo_free(t);
    }
    for (int i = 0, n_said = 0; i < P; i++) {
        if (said[i] > 0 && !(n[i] > 1 && fabs(sqrt(sum[i] / n[i]) / said[i] - 1) < 0.02))
            fail_msg("%s: %.3f of %d machines, but %.3f is said", moe_nccl_text[i], sqrt(sum[i] / n[i]), n[i],
                     said[i]);
        n_said += said[i] > 0;
        if (i == P - 1) assert_int_equal(n_said, 6);
    }
}

/* Of what is only moved the fastest type stays, in the place of the first; sums are kept apart by type. */
static void rows_are_merged(void **state)
{
    (void)state;
    struct moe_nccl_row row[] = {
        {.c = {MOE_ALLTOALL, 4, 1024, 2, true}, .time_s = 9},
        {.c = {MOE_ALLREDUCE, 4, 1024, 2, true}, .time_s = 5},
        {.c = {MOE_ALLTOALL, 4, 1024, 1, false}, .time_s = 7},
        {.c = {MOE_ALLREDUCE, 4, 1024, 1, false}, .time_s = 4},
        {.c = {MOE_ALLTOALL, 8, 1024, 1, false}, .time_s = 3},
        {.c = {MOE_ALLREDUCE, 4, 1024, 2, true}, .time_s = 6},
    };
    assert_int_equal(moe_nccl_merge(row, 6), 4);
    static const double expected[] = {7, 5, 4, 3};
    for (int i = 0; i < 4; i++) assert_true(row[i].time_s == expected[i]);
    double values[] = {4, 1, 3, 2};
    assert_true(moe_quantile(values, 4, 0.5) == 2.5 && moe_quantile(values, 4, 1) == 4);
    ASSERT_NEAR(moe_quantile(values, 4, 0.9), 3.7);
    assert_true(isnan(moe_quantile(values, 0, 0.5)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs),
        cmocka_unit_test(rings_of_lines),
        cmocka_unit_test(rings_of_chunks),
        cmocka_unit_test(switches),
        cmocka_unit_test(numbers_are_found_again),
        cmocka_unit_test(noise_and_outliers),
        cmocka_unit_test(what_is_not_told),
        cmocka_unit_test(doubtful_rows),
        cmocka_unit_test(behind_a_bus),
        cmocka_unit_test(tables_are_text),
        cmocka_unit_test(the_table_says_what_runs),
        cmocka_unit_test(priors_of_a_table),
        cmocka_unit_test(priors_are_so_far_off),
        cmocka_unit_test(rows_are_merged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
