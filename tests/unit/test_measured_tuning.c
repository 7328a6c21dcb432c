/* NCCL's tuning tables in logs: the layouts of three releases by hand, interleaved and repeated tables, what
 * is refused, and that no bytes make the reader crash. */
#include "tests/unit/store_run.h"
#include "traces/measured_tuning.h"

static struct moe_tuning read_text(const char *text)
{
    struct moe_tuning t;
    write_all("nccl.log", text, strlen(text));
    if (moe_tuning_read("nccl.log", &t) < 0) fail_msg("%s", moe_error());
    return t;
}

static void refused(const char *text, const char *message)
{
    struct moe_tuning t;
    write_all("nccl.log", text, strlen(text));
    assert_int_equal(moe_tuning_read("nccl.log", &t), MOE_EINPUT);
    if (strncmp(moe_error(), message, strlen(message)) != 0)
        fail_msg("'%s' does not begin '%s'", moe_error(), message);
    assert_true(!t.tables && !t.n);
}

/* us and GB/s; rate 0: it is not there */
static void assert_cost(const struct moe_tuning_table *t, const char *op, const char *algorithm,
                        const char *protocol, double us, double rate)
{
    for (int i = 0; i < t->n; i++) {
        const struct moe_tuning_cost *c = &t->cost[i];
        if (strcmp(c->op, op) || strcmp(c->algorithm, algorithm) || strcmp(c->protocol, protocol)) continue;
        assert_true(fabs(c->latency_s - us * 1e-6) < 1e-15 && fabs(c->rate_Bps - rate * 1e9) < 1);
        return;
    }
    assert_true(rate == 0);
}

/* Times and tags before, as mpirun and NCCL put them, do not matter; the word before "[0]"
 * names the thread. */
#define A "[1,0]<stdout>:n1:10:20 [0] NCCL INFO "
#define B "[2025-01-01 00:00:00] n2:11:21 [0] NCCL INFO "

/* ---- 2.5: no number of threads, no space behind a rate ---- */

/* Broadcast 120, all-gather 160 GB/s: n / (n - 1) = 4/3, so 4 GPUs. */
static const char old[] =
    A "Latency/AlgBw | Tree/    LL | Tree/ LL128 | Tree/Simple | Ring/    LL | "
      "Ring/ LL128 | Ring/Simple |\n" A
      "    Broadcast |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    4.6/ 40.0|   10.0/  "
      "0.0|   12.4/120.0|\n" A
      "       Reduce |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    4.6/ 40.0|   10.0/  "
      "0.0|   12.4/120.0|\n" A
      "    AllGather |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    5.5/ 53.3|   15.0/  "
      "0.0|   18.6/160.0|\n" A
      "ReduceScatter |    0.0/  0.0|    0.0/  0.0|    0.0/  0.0|    5.5/ 53.3|   15.0/  "
      "0.0|   18.6/160.0|\n" A
      "    AllReduce |    9.2/ 12.0|   18.0/  0.0|   30.0/ 50.0|    7.3/ 26.7|   25.0/  "
      "0.0|   28.8/ 80.0|\n";

static void layout_of_2_5(void **state)
{
    (void)state;
    struct moe_tuning t = read_text(old);
    assert_int_equal(t.n, 1);
    assert_int_equal(t.tables[0].line, 1);
    assert_int_equal(t.tables[0].ranks, 4);
    assert_int_equal(t.tables[0].nodes, 0);
    assert_int_equal(t.tables[0].n, 2 + 2 + 4);
    assert_cost(&t.tables[0], "allgather", "ring", "ll", 5.5, 53.3);
    assert_cost(&t.tables[0], "reducescatter", "ring", "simple", 18.6, 160);
    assert_cost(&t.tables[0], "allreduce", "tree", "ll", 9.2, 12);
    assert_cost(&t.tables[0], "allreduce", "ring", "ll128", 25, 0);
    moe_tuning_free(&t);
    moe_tuning_free(&t);
}

/* ---- 2.12: CollNet, and the number of threads ---- */

static void layout_of_2_12(void **state)
{
    (void)state;
    struct moe_tuning t =
        read_text("n:1:2 [0] NCCL INFO Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |    Tree/Simple |    "
                  "Ring/    LL |"
                  "    Ring/ LL128 |    Ring/Simple | CollNet/    LL | CollNet/ LL128 | CollNet/Simple |\n"
                  "n:1:2 [0] NCCL INFO  Max NThreads |            512 |            640 |            512 |    "
                  "        512 |"
                  "            640 |            256 |            512 |            640 |            512 |\n"
                  "n:1:2 [0] NCCL INFO     Broadcast |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |    "
                  " 6.3/   0.8 |"
                  "    14.0/   0.0 |    18.0/   3.0 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |\n"
                  "n:1:2 [0] NCCL INFO     AllGather |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |    "
                  "33.3/   0.8 |"
                  "    52.0/   0.0 |   105.6/   3.2 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |\n"
                  "n:1:2 [0] NCCL INFO ReduceScatter |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |    "
                  "33.3/   0.8 |"
                  "    52.0/   0.0 |   105.6/   3.2 |     0.0/   0.0 |     0.0/   0.0 |     0.0/   0.0 |\n"
                  "n:1:2 [0] NCCL INFO     AllReduce |    15.0/   0.3 |    30.0/   0.0 |   117.0/   1.2 |    "
                  "60.0/   0.4 |"
                  "    90.0/   0.0 |   202.8/   1.6 |     4.4/   0.1 |     4.4/   0.0 |    10.7/   1.0 |\n");
    assert_int_equal(t.n, 1);
    assert_int_equal(t.tables[0].ranks, 0); /* 3.2 and 3.0 are too coarse: 11 to 31 GPUs */
    assert_cost(&t.tables[0], "allreduce", "ring", "simple", 202.8, 1.6);
    assert_int_equal(t.tables[0].n, 2 + 2 + 4); /* CollNet is left out */
    moe_tuning_free(&t);
}

/* ---- 2.18 and 2.29: blocks ---- */

#define HEAD(p, a, b, c)                                                                                     \
    p "  Algorithm   |                 " a " |               " b " |             " c " |\n" p                \
      "  Protocol    |   LL |   LL128 |   Simple |   LL |  LL128 |  Simple |   LL |   LL128 |  Simple |\n" p \
      " Max NThreads |  512 |     640 |      512 |  512 |    640 |     256 |    0 |       0 |     640 |\n"
#define NONE " 0.0/ 0.0 | 0.0/ 0.0 | 0.0/ 0.0 |"
#define RINGS(p, name, costs) p name " |" NONE costs NONE "\n"
#define FIRST(p, once, gather, reduce)                                                                       \
    HEAD(p, "Tree", "Ring", "CollNetDirect")                                                                 \
    RINGS(p, "    Broadcast", once)                                                                          \
    RINGS(p, "       Reduce", once)                                                                          \
    RINGS(p, "    AllGather", gather) RINGS(p, "ReduceScatter", gather) RINGS(p, "    AllReduce", reduce)
#define SECOND(p)                                                                                            \
    HEAD(p, "CollNetChain", "NVLS", "NVLSTree")                                                              \
    p "    AllGather |" NONE " 0.0/ 0.0 | 0.0/ 0.0 | 25.0/ 315.0 |" NONE "\n" p "ReduceScatter |" NONE       \
      " 0.0/ 0.0 | 0.0/ 0.0 | 25.0/ 315.0 |" NONE "\n" p "    AllReduce |" NONE                              \
      " 0.0/ 0.0 | 0.0/ 0.0 | 25.0/ 281.0 |" NONE "\n"
#define EIGHT(p)                                                                                             \
    FIRST(p, " 7.2/ 141.0 | 15.9/ 331.2 | 11.8/ 360.0 |", " 10.8/ 161.1 | 27.3/ 378.5 | 32.2/ 411.4 |",      \
          " 15.0/ 80.6 | 40.6/ 189.3 | 56.0/ 205.7 |")
#define TWO(p)                                                                                               \
    FIRST(p, " 7.2/ 141.0 | 15.9/ 331.2 | 11.8/ 360.0 |", " 7.2/ 282.0 | 15.9/ 662.4 | 11.8/ 720.0 |",       \
          " 7.8/ 141.0 | 17.8/ 331.2 | 15.2/ 360.0 |")
/* 2.23 and later: protocols of three algorithms above one */
#define PAT(p)                                                                                               \
    p "  Algorithm   |              PAT |\n" p                                                               \
      "  Protocol    |   LL |  LL128 |  Simple |   LL |   LL128 |  Simple |   LL |   LL128 |  Simple |\n" p  \
      " Max NThreads |  0 |  0 |   0 |\n" p "    Broadcast |" NONE "\n" p "       Reduce |" NONE "\n" p      \
      "    AllGather | 0.0/ 0.0 | 0.0/ 0.0 | 17.6/ 3.6 |\n" p                                                \
      "ReduceScatter | 0.0/ 0.0 | 0.0/ 0.0 | 17.6/ 3.6 |\n" p "    AllReduce |" NONE "\n"

static void layout_in_blocks(void **state)
{
    (void)state;
    struct moe_tuning t = read_text("NCCL version 2.18.3+cuda12.2\n" EIGHT(A) SECOND(A));
    assert_int_equal(t.n, 1);
    assert_int_equal(t.tables[0].line, 2);
    assert_int_equal(t.tables[0].ranks, 8);
    assert_int_equal(t.tables[0].n, 3 * 3 + 3);
    assert_cost(&t.tables[0], "allgather", "ring", "ll128", 27.3, 378.5);
    assert_cost(&t.tables[0], "reducescatter", "nvls", "simple", 25, 315);
    assert_cost(&t.tables[0], "allreduce", "nvls", "simple", 25, 281);
    assert_cost(&t.tables[0], "allreduce", "ring", "simple", 56, 205.7);
    moe_tuning_free(&t);
    t = read_text(EIGHT(A) SECOND(A) PAT(A));
    assert_int_equal(t.n, 1);
    assert_int_equal(t.tables[0].n, 3 * 3 + 3 + 2);
    assert_cost(&t.tables[0], "allgather", "pat", "simple", 17.6, 3.6);
    moe_tuning_free(&t);
}

/* Two ranks' lines in turns, a rank of two communicators, and what INIT says: it counts for the tables below
 * it of its thread alone. Other lines with bars do not matter. */
static void several_communicators(void **state)
{
    (void)state;
    struct moe_tuning t = read_text(
        B "comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n" HEAD(
            A, "Tree", "Ring", "CollNetDirect") EIGHT(B) RINGS(A, "    Broadcast",
                                                               " 7.2/ 141.0 | 15.9/ "
                                                               "331.2 | 11.8/ 360.0 |")
            RINGS(A, "    AllGather", " 7.2/ 282.0 | 15.9/ 662.4 | 11.8/ 720.0 |") A
        "threadThresholds 8/8/64 | 64/8/64 | 512 | 512\n" RINGS(A, "ReduceScatter",
                                                                " 7.2/ 282.0 | 15.9/ 662.4 | 11.8/ 720.0 |")
            RINGS(A, "    AllReduce", " 7.8/ 141.0 | 17.8/ 331.2 | 15.2/ 360.0 |") SECOND(B) SECOND(A)
                EIGHT(A) SECOND(A) A "AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n");
    assert_int_equal(t.n, 3); /* in the order of their ends */
    assert_int_equal(t.tables[0].ranks, 2);
    assert_int_equal(t.tables[0].line, 2);
    assert_int_equal(t.tables[0].nodes, 0);
    assert_int_equal(t.tables[1].ranks, 16);
    assert_int_equal(t.tables[1].nodes, 2);
    assert_int_equal(t.tables[2].ranks, 8);
    assert_cost(&t.tables[0], "allreduce", "nvls", "simple", 25, 281);
    moe_tuning_free(&t);
    t = read_text("no table\nn:1:2 [0] NCCL INFO AllReduce | 1/2 |\n"); /* no heading above it */
    assert_true(!t.n && !t.tables);
}

static void wrong_tables(void **state)
{
    (void)state;
#define SHORT(line)                                                                                          \
    "nccl.log:" line ": NCCL's tuning table is cut short, expected AllGather, ReduceScatter and"
    refused("first\n" EIGHT(A), SHORT("2")); /* no NVLS: there is a second block */
    refused(EIGHT(A) HEAD(A, "CollNetChain", "NVLS", "NVLSTree"), SHORT("1"));
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") EIGHT(A), SHORT("1"));
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") SECOND(A), SHORT("1"));
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") RINGS(A, "AllReduce", " 1.0/ 2.0 | 1.0/ 2.0 |")
                SECOND(A),
            "nccl.log:4: 8 values of AllReduce in NCCL's tuning table, expected 9");
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") A "AllReduce | 1.0/ 2.0 | x/y |",
            "nccl.log:4: 'x' in NCCL's tuning table, expected LATENCY/RATE, as in 16.6/ 1.2");
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") A "AllReduce | 1.0 |", "nccl.log:4: '1.0' in NCCL's");
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") A "AllReduce | -1.0/ 2.0 |", "nccl.log:4: '-1.0' in");
    refused(HEAD(A, "Tree", "Ring", "CollNetDirect") A "AllReduce | 1.0/ nan |", "nccl.log:4: '1.0' in");
    refused(A "Algorithm | Tree | Ring |\n" A "Protocol | LL | LL128 | Simple |\n",
            "nccl.log:2: 3 protocols in NCCL's tuning table, expected 6 of 2 algorithms");
    struct moe_tuning t;
    assert_int_equal(moe_tuning_read("absent.log", &t), MOE_EINPUT);
    assert_null(strchr(moe_error(), '\n'));
}

/* ---- any bytes ---- */

static int read_any(const char *bytes, size_t n)
{
    struct moe_tuning t;
    write_all("nccl.log", bytes, n);
    int err = moe_tuning_read("nccl.log", &t), n_tables = t.n;
    assert_true(err == MOE_OK || err == MOE_EINPUT);
    assert_true(err == MOE_OK || (!strncmp(moe_error(), "nccl.log:", 9) && !strchr(moe_error(), '\n')));
    for (int i = 0; i < t.n; i++) {
        const struct moe_tuning_table *x = &t.tables[i];
        assert_true(x->line >= 1 && x->ranks >= 0 && x->ranks != 1 && x->n <= MOE_TUNING_COSTS);
        for (int k = 0; k < x->n; k++) assert_true(x->cost[k].latency_s >= 0 && x->cost[k].rate_Bps > 0);
    }
    moe_tuning_free(&t);
    return err < 0 ? -1 : n_tables;
}

/* A log that ends anywhere has the tables that are whole, or is refused: between the end of the first block
 * and that of the second always. */
static void every_prefix(void **state)
{
    (void)state;
    static const char blocks[] = EIGHT(A) SECOND(A) PAT(A), first[] = EIGHT(A);
    static const char two[] = EIGHT(A) SECOND(A);
    for (size_t n = 0; n < sizeof blocks; n++) {
        int got = read_any(blocks, n);
        if (n >= sizeof first - 1 && n < sizeof two - 3) assert_int_equal(got, -1);
        if (n == sizeof two - 1 || n == sizeof blocks - 1) assert_int_equal(got, 1);
    }
    for (size_t n = 0; n < sizeof old; n++) {
        int got = read_any(old, n);
        if (n > 100 && n < sizeof old - 3) assert_int_equal(got, -1);
    }
}

static void mutations(void **state)
{
    (void)state;
    static const char text[] = TWO(A) SECOND(A) EIGHT(B) SECOND(B) PAT(B);
    char *copy = moe_alloc(sizeof text, 1);
    for (uint64_t i = 0; i < 3000; i++) {
        static const char likely[] = "\0\n\r|/-. 0e9[]\xff";
        uint64_t seed = moe_hash64(i), flips = 1 + seed % 4;
        memcpy(copy, text, sizeof text);
        for (uint64_t k = 0; k < flips; k++) {
            uint64_t h = moe_hash64(seed + k);
            copy[h % sizeof text] = h >> 60 ? likely[(h >> 32) % sizeof likely] : (char)(h >> 32);
        }
        read_any(copy, sizeof text - 1);
    }
    free(copy);
    char *many = moe_alloc(1 << 16, 1); /* columns without end */
    strcpy(many, "a [0] NCCL INFO Latency/AlgBw |");
    for (size_t n = strlen(many); n + 12 < 1 << 16; n += 10) memcpy(many + n, "Tree/ LL |", 10);
    refused(many, "nccl.log:1: NCCL's tuning table has more than 32 columns");
    memcpy(many, "a [0] NCCL INFO     Algorithm |", 31);
    refused(many, "nccl.log:1: NCCL's tuning table has more than 32 columns");
    free(many);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, enter_folder, leave_folder)
        TEST(layout_of_2_5), TEST(layout_of_2_12), TEST(layout_in_blocks), TEST(several_communicators),
        TEST(wrong_tables),  TEST(every_prefix),   TEST(mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
