/* Measured times of collectives: the three sources in their variants, what is refused, and that no bytes make
 * the readers crash; then the files that others published. */
#include "tests/unit/store_run.h"
#include "traces/measured.h"

static char data[1024]; /* the folder of foreign files */

static struct moe_measured read_file(const char *path, const char *op)
{
    struct moe_measured m;
    if (moe_measured_read(path, op, &m) < 0) fail_msg("%s", moe_error());
    return m;
}

static struct moe_measured read_text(const char *text, const char *op)
{
    write_all("measured", text, strlen(text));
    return read_file("measured", op);
}

static void refused(const char *text, const char *op, const char *message)
{
    struct moe_measured m;
    write_all("measured", text, strlen(text));
    assert_int_equal(moe_measured_read("measured", op, &m), MOE_EINPUT);
    if (strncmp(moe_error(), message, strlen(message)) != 0)
        fail_msg("'%s' does not begin '%s'", moe_error(), message);
    assert_null(m.rows);
}

static void assert_row(const struct moe_measured *m, int i, const char *op, const char *type, int ranks,
                       int nodes, int64_t bytes, double us, int line)
{
    assert_true(i < m->n);
    const struct moe_measured_row *r = &m->rows[i];
    assert_string_equal(r->op, op);
    assert_string_equal(r->type, type);
    assert_int_equal(r->ranks, ranks);
    assert_int_equal(r->nodes, nodes);
    assert_int_equal(r->bytes, bytes);
    assert_true(fabs(r->time_s - us * 1e-6) < 1e-15);
    assert_int_equal(r->line, line);
}

/* ---- CSV ---- */

static void test_csv(void **state)
{
    (void)state;
    struct moe_measured m = read_text("\xef\xbb\xbf# op,bytes: a note\n"
                                      "op,dtype,num_gpus,size_bytes,time_us\r\n"
                                      "\r\n"
                                      "all_gather,half,2,512,8.980\r\n"
                                      "ncclAllReduce,int8,4,1.024e3,9\n"
                                      "broadcast,half,2,512,8.980\n"
                                      "alltoall,half,2,512,0\n"
                                      "alltoall,half,2,512,nan\n"
                                      "alltoall,half,2,512,-1\n"
                                      "alltoall,half,2,512,1e999\n"
                                      "alltoall,half,2,0,8\n"
                                      "alltoall,half,2,1.5,8\n"
                                      "alltoall,half,2,1e300,8\n"
                                      "alltoall,half,2,512,\n"
                                      "# another\n"
                                      "reduce_scatter_perf,half,8,4096,1e1",
                                      NULL);
    assert_int_equal(m.n, 3);
    assert_int_equal(m.n_skipped, 9);
    assert_string_equal(m.file, "measured");
    assert_row(&m, 0, "allgather", "half", 2, 0, 512, 8.98, 4);
    assert_row(&m, 1, "allreduce", "int8", 4, 0, 1024, 9, 5);
    assert_row(&m, 2, "reducescatter", "half", 8, 0, 4096, 10, 16);
    moe_measured_free(&m);
    moe_measured_free(&m);
}

static void test_csv_other_names(void **state)
{
    (void)state;
    struct moe_measured m =
        read_text("ip_time_us , Machine,OP,gpus,nodes,type,bytes,oop_time_us\n"
                  "1,\"2x p4de, 4x\"\"100G\"\"\",all_reduce,16,2,\"\"\"a\"\",b\",8,164.3\n"
                  "2.5,\"a,b\"c, \"All-To-All\" ,16,,?, 16 ,N/A\n",
                  NULL);
    assert_int_equal(m.n, 2);
    assert_row(&m, 0, "allreduce", "\"a\",b", 16, 2, 8, 164.3, 2);
    assert_row(&m, 1, "alltoall", "?", 16, 0, 16, 2.5, 3);
    assert_string_equal(m.rows[0].machine, "2x p4de, 4x\"100G\"");
    moe_measured_free(&m);
    m = read_text("op,gpus,bytes,ip_time_us\nalltoall,2,8,3\n", NULL);
    assert_row(&m, 0, "alltoall", "", 2, 0, 8, 3, 2);
    moe_measured_free(&m);
    static const char zeros[] = "op,gpus,bytes,time_us\nother\0,2,8,3\nalltoall,2,8,3\n";
    write_all("measured", zeros, sizeof zeros - 1);
    m = read_file("measured", NULL);
    assert_row(&m, 0, "alltoall", "", 2, 0, 8, 3, 3);
    moe_measured_free(&m);
}

static void test_csv_wrong(void **state)
{
    (void)state;
#define CSV "# note\nop,num_gpus,nodes,size_bytes,time_us\n"
    refused("", NULL, "measured: no measurement (0 rows skipped), expected some of alltoall, ");
    refused(CSV, NULL, "measured: no measurement (0 ");
    refused(
        "op;gpus;bytes;time_us\nalltoall;2;8;3\n", NULL,
        "measured: no measurement (0 rows skipped), expected some of alltoall, allgather, reducescatter or "
        "allreduce, as CSV of op,size_bytes,num_gpus,time_us, or as nccl-tests");
    refused(CSV "alltoall,2,1,8,0\n", NULL, "measured: no measurement (1 ");
    refused(CSV "alltoall,2,1,8\n", NULL, "measured:3: 4 columns, expected 5");
    refused(CSV "alltoall,2,1,8,9,10\n", NULL, "measured:3: 6 columns, expected 5");
    refused(CSV "alltoall,2,1,8,\"9\n", NULL, "measured:3: a quote without an end");
    refused(CSV "alltoall,2,1,8,9 us\n", NULL, "measured:3: '9 us' in column time_us, expected a number");
    refused(CSV "alltoall,2,1,8,0x9\n", NULL, "measured:3: '0x9' in column time_us, expected a number");
    refused(CSV "alltoall,2,1,8M,9\n", NULL, "measured:3: '8M' in column size_bytes, expected a number");
    refused(CSV "alltoall,,1,8,9\n", NULL, "measured:3: '' in column num_gpus, expected a number of ranks");
    refused(CSV "alltoall,2.5,1,8,9\n", NULL, "measured:3: '2.5' in column num_gpus, expected a number of");
    refused(CSV "alltoall,2,3,8,9\n", NULL, "measured:3: '3' in column nodes, expected a number from 1 to");
    refused("num_gpus,size_bytes,time_us\n", NULL, "measured:1: no column op, expected op, size_bytes (or ");
    refused("op,size_bytes,time_us\n", NULL, "measured:1: no column num_gpus, expected");
    refused("op,gpus,time_us\n", NULL, "measured:1: no column size_bytes, expected");
    refused("op,gpus,bytes\n", NULL, "measured:1: no column time_us, expected");
    struct moe_measured m;
    assert_int_equal(moe_measured_read("nowhere", NULL, &m), MOE_EINPUT);
    assert_int_equal(moe_measured_read(".", NULL, &m), MOE_EINPUT);
    assert_int_equal(moe_measured_read("measured", "all_gathr", &m), MOE_EUSAGE);
    assert_string_equal(moe_error(), "unknown collective 'all_gathr', did you mean allgather");
}

/* ---- logs ---- */

#define DEVICES                                                                                              \
    "# Collective test starting: alltoall_perf\n"                                                            \
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20\n"                  \
    "# Using devices\n"                                                                                      \
    "#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3\n"                \
    "#  Rank  1 Group  0 Pid   6900 on node-b device  0 [0000:05:00] NVIDIA H100 80GB HBM3\n"
#define NAMES "#  size  count  type  redop  root  "
#define BLOCK "time   algbw   busbw  #wrong  "
#define TABLE NAMES BLOCK BLOCK "\n#   (B)    (elements)   (us)  (GB/s)\n"

static void test_log_variants(void **state)
{
    (void)state;
#define OLD "time   algbw   busbw  error  "
#define PER_ITER "time  algbw  busbw  #wrong  i_min  i_max  i_p99  i_cv%  "
#define SIDE "time  algbw  busbw  sidebw  #wrong  "
#define CPU "cputime  algbw  busbw  #wrong  "
    static const struct {
        const char *header, *row;
        double us;
        bool host_time;
    } variants[] = {
        {NAMES BLOCK BLOCK, "64  16  float  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  N/A", 12.5, false},
        {NAMES BLOCK BLOCK, "64  16  float  none  -1  1.3e+07  0.1  0.2  0  13.5  0.1  0.2  0", 1.3e7, false},
        {NAMES BLOCK BLOCK "timestamp",
         "64  16  float  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0  2025-10-28 12:00:01", 12.5, false},
        {NAMES BLOCK BLOCK, "64  16  float  none  -1                              13.5  0.1  0.2  0", 13.5,
         false},
        {NAMES BLOCK BLOCK, "64  16  float  none  -1  0.00  0.1  0.2  0  13.5  0.1  0.2  0", 13.5, false},
        {NAMES BLOCK BLOCK, "64  16  float  none  -1  nan  nan  inf  0  13.5  0.1  0.2  0", 13.5, false},
        {NAMES BLOCK BLOCK, "64  16  float  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0", 12.5, false},
        {NAMES CPU CPU, "64  16  float  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0", 12.5, true},
        {NAMES PER_ITER PER_ITER "timestamp",
         "64  16  float  none  -1  12.5  1  2  0  3  4  5  6  13.5  1  2  0  3  4  5  6  2025-10-28 12:00:01",
         12.5, false},
        {NAMES PER_ITER PER_ITER, "64  16  float  none  -1          13.5  1  2  0  3  4  5  6", 13.5, false},
        {NAMES SIDE SIDE, "64  16  float  none  -1  12.5  1  2  3  0  13.5  1  2  3  0", 12.5, false},
        {"# size count type " OLD OLD, "64  16  float  12.5  0.1  0.2  1e-07  13.5  0.1  0.2  0e+00", 12.5,
         false},
        {"# size count type redop " OLD OLD, "64  16  float  sum  12.5  0.1  0.2  1e-07  13.5  0.1  0.2  N/A",
         12.5, false},
        /* older versions leave the redop of an all-to-all empty */
        {"# size count type redop " OLD OLD, "64  16  float         12.5  0.1  0.2  1e-07  13.5  0.1  0.2  0",
         12.5, false},
        {"size count type redop root " BLOCK BLOCK, "64 16 float none -1 12.5 0 0 0 13.5 0 0 0\r", 12.5,
         false},
    };
    char text[4096];
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        snprintf(text, sizeof text, DEVICES "%s\n%s\n", variants[i].header, variants[i].row);
        struct moe_measured m = read_text(text, NULL);
        assert_int_equal(m.n, 1);
        assert_int_equal(m.n_skipped, 0);
        assert_row(&m, 0, "alltoall", "float", 2, 2, 64, variants[i].us, 7);
        assert_int_equal(m.rows[0].host_time, variants[i].host_time);
        moe_measured_free(&m);
    }
}

/* What stands between rows, and rows that it tore. */
static void test_log_between(void **state)
{
    (void)state;
    struct moe_measured m = read_text(
        DEVICES TABLE "node-a:6899:6899 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via P2P/CUMEM\n"
                      "NCCL version 2.28.9+cuda13.0\n"
                      "[1,0]<stdout>:  64  16  float  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0\n"
                      "[host@1,0]<stdout>:\n"
                      "128  32  float  none  -1node-a:6899:6899 [0] NCCL INFO threadThresholds 8/8/64\n"
                      "  15.5  0.1  0.2  0  16.5  0.1  0.2  0\n"
                      "256  64  float  none  -1  17.5  0.1  0.2  0  18.5  0.1\n"
                      "256  64  float  none  -1  17.5  0.1  0.2  0node-a:6899:6899 [0] NCCL INFO comm\n"
                      "512  128  float  none  -1  0.00  0.1  0.2  0  0.00  0.1  0.2  0\n"
                      "# 1024  256  float  none  -1  19.5  0.1  0.2  0  20.5  0.1  0.2  0\n"
                      "9999999999999999999999  1  float  none  -1  1  1  1  0  1  1  1  0\n"
                      "2048  512  bfloat16  none  -1  21.5  0.1  0.2  0  22.5  0.1  0.2  0\n"
                      "4096  1024  bfloat16  none  -1  23.5  0.1  0.2  0  24.5  0.1  0.2  7\n"
                      "8192  2048  bfloat16  none  -1                     25.5  0.1  0.2  8\n"
                      "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 70.742\n",
        "allgather");
    assert_int_equal(m.n, 2);
    assert_row(&m, 0, "alltoall", "float", 2, 2, 64, 12.5, 10);
    assert_row(&m, 1, "alltoall", "bfloat16", 2, 2, 2048, 21.5, 19);
    assert_int_equal(m.n_skipped, 5);
    assert_int_equal(m.n_wrong, 2);
    moe_measured_free(&m);
}

#define ROW(size) #size "  16  half  none  -1  12.5  0.1  0.2  0  13.5  0.1  0.2  0\n"
/* clang-format off */
static const char runs[] =
    "+ mpirun -np 2 build/all_gather_perf -b 8 -g 2\n"
    "# nThread 1 nGpus 2 minBytes 8 maxBytes 8\n"
    "#   Rank  0 Pid   1 on a device  0 [0x07] Tesla V100\n"
    "#   Rank  1 Pid   1 on a device  1 [0x0a] Tesla V100\n"
    "#   Rank  2 Pid   1 on b device  0 [0x07] Tesla V100\n" /* only the first of its process */
    "Rank 5 on its own\n"
    TABLE ROW(1) "# Avg bus bandwidth    : 1\n"
    /* broadcast is none of ours, and its number of ranks is not asked for */
    "# Collective test starting: broadcast_perf\n# nThread 1 nGpus 1 minBytes 8\n"
    TABLE ROW(2) "# Collective test concluded: broadcast_perf\n"
    /* began, and did not get to its table */
    "# Collective test starting: alltoall_perf\n# nThread 1 nGpus 1 minBytes 8\n"
    "#  Rank  0 Group  0 Pid 1 on a device  0 [0000:04:00] V100\n"
    "#  Rank  7 Group  0 Pid 8 on h device  0 [0000:04:00] V100\n"
    /* two groups: the first one's times are printed */
    "# Collective test starting: reduce_scatter_perf\n# nThread 1 nGpus 1 minBytes 8\n"
    "#  Rank  0 Group  0 Pid 1 on a device  0 [0000:04:00] V100\n"
    "#  Rank  1 Group  1 Pid 2 on a device  1 [0000:05:00] V100\n"
    "#  Rank  2 Group  0 Pid 3 on b device  0 [0000:04:00] V100\n"
    "#  Rank  3 Group  1 Pid 4 on c device  1 [0000:05:00] V100\n"
    "#  Rank  4 Group  0 Pid 5 on b device  0 [0000:04:00] V100\n"
    TABLE ROW(3) "# Collective test concluded: reduce_scatter_perf\n"
    /* does not say its name */
    "# nThread 2 nGpus 4 minBytes 8\n"
    "#  Rank  0 Group  0 Pid 1 on a device  0 [0000:04:00] V100\n"
    TABLE ROW(4);
/* clang-format on */

static void test_log_runs(void **state)
{
    (void)state;
    struct moe_measured m = read_text(runs, "all-reduce");
    assert_int_equal(m.n, 3);
    assert_int_equal(m.n_skipped, 1);
    assert_row(&m, 0, "allgather", "half", 4, 2, 1, 12.5, 9);
    assert_row(&m, 1, "reducescatter", "half", 3, 2, 3, 12.5, 30);
    assert_row(&m, 2, "allreduce", "half", 8, 1, 4, 12.5, 36);
    moe_measured_free(&m);
    refused(runs, NULL, "measured:36: times of an unknown collective, expected NAME_perf above them, or ");
}

static void test_log_wrong(void **state)
{
    (void)state;
    refused("alltoall_perf\n" TABLE ROW(8), NULL,
            "measured:4: times of an unknown number of ranks, expected");
    refused(DEVICES TABLE, NULL, "measured: no measurement (0 rows skipped)");
    refused(DEVICES ROW(8), NULL, "measured: no measurement (0 rows skipped)"); /* in what unit? */
    refused("# bytes  N  type  time  algbw  busbw  res  time  algbw  busbw  res\n" ROW(8), NULL,
            "measured: no measurement"); /* of 2018: milliseconds */
    refused("just text, of no kind\n", NULL, "measured: no measurement");
}

/* ---- JSON ---- */

#define CONFIG(threads, gpus, devices)                                                                       \
    "\"config\": {\"nthreads\": " #threads ", \"ngpus\": " #gpus ", \"blocking_collectives\": \"false\","    \
    " \"devices\": [" devices "]}, "
#define DEVICE(rank, group, host)                                                                            \
    "{\"rank\": " #rank ", \"group\": " #group ", \"pid\": 1, \"hostname\": \"" host "\", \"device\": 0}"
#define HEAD(version)                                                                                        \
    "{\"version\": " #version ", \"args\": [\"./alltoall_perf\"], \"env\": [\"KEY=secret\"], "
#define TIME(us) "{\"time\": " #us ", \"alg_bw\": 0.0, \"bus_bw\": 0.0, \"nwrong\": null}"
#define CPU_TIME(us) "{\"cpu_time\": " #us ", \"alg_bw\": 0.0, \"bus_bw\": 0.0, \"nwrong\": 0.0}"
#define WRONG_TIME(us) "{\"time\": " #us ", \"alg_bw\": 0.0, \"bus_bw\": 0.0, \"nwrong\": 3}"
#define RESULT(size, out, in)                                                                                \
    "{\"size\": " #size ", \"count\": 1, \"type\": \"float\", \"root\": \"    -1\", \"out_of_place\": " out  \
    ", \"in_place\": " in "}"
#define ONE CONFIG(1, 1, DEVICE(0, 0, "a"))

/* clang-format off */
static const char report[] =
    HEAD(2) CONFIG(2, 4, DEVICE(0, 0, "a") "," DEVICE(8, 0, "b") "," DEVICE(16, 1, "c"))
    "\"results\": [" RESULT(64, TIME(38.5), TIME(37.5)) ","
    RESULT(128, "null", TIME(39.5)) ","
    RESULT(256, TIME("nan"), TIME(40)) ","
    RESULT(512, TIME("nan"), "null") ","
    RESULT(1024, CPU_TIME(5), CPU_TIME(6)) ", 7,"
    RESULT(0, TIME(1), TIME(1)) "," RESULT(2048, TIME(1), WRONG_TIME(2))
    "], \"average_bus_bandwidith\": {\"bandwidith\": \"nan\", \"okay\": \"unchecked\"}}\n";
static const char unnamed[] =
    "{\"version\": 1, \"args\": []," ONE "\"results\": [" RESULT(64, TIME(1), "null") "]}";
static const char other[] =
    "{\"version\": 3, \"args\": [\"gather_perf.sh\"]," ONE "\"results\": [" RESULT(64, TIME(1), "null") "]}";
/* clang-format on */

static void test_json(void **state)
{
    (void)state;
    struct moe_measured m = read_text(report, "allgather");
    assert_int_equal(m.n, 4);
    assert_int_equal(m.n_skipped, 3);
    assert_int_equal(m.n_wrong, 1);
    assert_row(&m, 0, "alltoall", "float", 16, 2, 64, 38.5, 1);
    assert_row(&m, 1, "alltoall", "float", 16, 2, 128, 39.5, 2);
    assert_row(&m, 2, "alltoall", "float", 16, 2, 256, 40, 3);
    assert_row(&m, 3, "alltoall", "float", 16, 2, 1024, 5, 5);
    assert_false(m.rows[2].host_time);
    assert_true(m.rows[3].host_time);
    moe_measured_free(&m);
    m = read_text(unnamed, "all_gather");
    assert_row(&m, 0, "allgather", "float", 1, 1, 64, 1, 1);
    moe_measured_free(&m);
}

static void test_json_wrong(void **state)
{
    (void)state;
    refused("{", NULL, "measured:1: JSON without its end, as nccl-tests leaves it when it fails");
    refused(HEAD(4) ONE "\"results\": []}", NULL, "measured: version 4 of nccl-tests' JSON, expected 1 to 3");
    refused("{\"schemaVersion\": 1, \"results\": []}", NULL, "measured: no version or no results, expected");
    refused(HEAD(3) "\"results\": {}}", NULL, "measured: no version or no results, expected");
    refused(HEAD(3) "\"results\": []}", NULL, "measured: no devices in config, expected");
    refused(HEAD(3) CONFIG(1, 1, DEVICE(-1, 0, "a")) "\"results\": []}", NULL, "measured: no devices in");
    refused(HEAD(3) CONFIG(1, 1, DEVICE(null, 0, "a")) "\"results\": []}", NULL, "measured: no devices in");
    refused(HEAD(3) ONE "\"results\": []}", NULL, "measured: no measurement (0 rows skipped)");
    refused(other, NULL, "measured: no measurement (1 rows skipped)");
    refused(unnamed, NULL, "measured: times of an unknown collective, expected");
    /* The parser would quote what is before the wrong byte. */
    refused("{\n\"env\": [\"KEY=secret\xff\"]}", NULL, "measured:2: wrong JSON at column ");
    assert_null(strstr(moe_error(), "secret"));
}

/* ---- which rows ---- */

static void test_rows(void **state)
{
    (void)state;
    static const struct {
        const char *text, *op;
        int ranks;
        bool chosen;
    } cases[] = {
        {"*@2,4+allgather@8", "alltoall", 2, true},
        {"*@2,4+allgather@8", "alltoall", 4, true},
        {"*@2,4+allgather@8", "alltoall", 8, false},
        {"*@2,4+allgather@8", "allgather", 8, true},
        {"*@*", "allreduce", 7, true},
        {"All_Reduce@*", "allreduce", 7, true},
        {"All_Reduce@*", "allgather", 7, false},
        {"alltoall@16777216", "alltoall", 16777216, true},
    };
    struct moe_row_choice choice;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct moe_measured_row row = {.ranks = cases[i].ranks};
        moe_copy_name(row.op, cases[i].op);
        if (moe_measured_parse_rows(cases[i].text, &choice) < 0) fail_msg("%s", moe_error());
        assert_int_equal(moe_row_chosen(&choice, &row), cases[i].chosen);
    }
    static const char *const wrong[][2] = {
        {"", "'': expected COLLECTIVE@RANKS, as in *@2,4+allgather@8"},
        {"allgather", "'allgather': expected COLLECTIVE@RANKS, as in *@2,4+allgather@8"},
        {"*@2+allgather", "'allgather': expected COLLECTIVE@RANKS, as in *@2,4+allgather@8"},
        {"*@2+", "'': expected COLLECTIVE@RANKS, as in *@2,4+allgather@8"},
        {"allgater@2", "unknown collective 'allgater', did you mean allgather"},
        {"@2", "unknown collective '', known: alltoall, allgather, reducescatter, allreduce"},
        {"*@", "'': expected numbers of ranks, as in 2,4, or *"},
        {"*@2,", "'': expected numbers of ranks, as in 2,4, or *"},
        {"*@-2", "'-2': expected numbers of ranks, as in 2,4, or *"},
        {"*@0", "'0': expected numbers of ranks, as in 2,4, or *"},
        {"*@99999999999999999999", "'99999999999999999999': expected numbers of ranks, as in 2,4, or *"},
        {"*@2 ", "' ': expected + and another term, or the end"},
        {"*@*,2", "',2': expected + and another term, or the end"},
        {"*@1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", "more than 16 numbers of ranks"},
        {"*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1+*@1", "more than 16 terms"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(moe_measured_parse_rows(wrong[i][0], &choice), MOE_EUSAGE);
        assert_string_equal(moe_error(), wrong[i][1]);
    }
}

/* ---- any bytes ---- */

static void read_any(const char *bytes, size_t n)
{
    struct moe_measured m;
    write_all("measured", bytes, n);
    int err = moe_measured_read("measured", "alltoall", &m);
    assert_true(err == MOE_OK || err == MOE_EINPUT);
    assert_true((err == MOE_OK) == (m.n > 0));
    for (int i = 0; i < m.n; i++) {
        const struct moe_measured_row *r = &m.rows[i];
        assert_non_null(moe_measured_op(r->op));
        assert_true(r->ranks >= 1 && r->ranks <= MOE_MEASURED_RANKS && r->nodes >= 0 && r->nodes <= r->ranks);
        assert_true(r->bytes >= 1 && r->time_s > 0 && isfinite(r->time_s) && r->line >= 1);
    }
    moe_measured_free(&m);
}

static void test_mutations(void **state)
{
    (void)state;
    static const char csv[] = CSV "alltoall,2,1,8,9\n\"all_gather\",4,,16,1e1\r\n";
    static const char *const texts[] = {csv, runs, report};
    for (uint64_t t = 0; t < 3; t++) {
        size_t n = strlen(texts[t]);
        char *copy = moe_alloc(n, 1);
        for (size_t cut = 0; cut < n; cut++) read_any(texts[t], cut);
        for (uint64_t i = 0; i < 2000; i++) {
            static const char likely[] = "\0\n\r\",{}[]:#-0e9\xff";
            uint64_t seed = moe_hash64(10000 * t + i), flips = 1 + seed % 4;
            memcpy(copy, texts[t], n);
            for (uint64_t k = 0; k < flips; k++) {
                uint64_t h = moe_hash64(seed + k);
                copy[h % n] = h >> 60 ? likely[(h >> 32) % sizeof likely] : (char)(h >> 32);
            }
            read_any(copy, n);
        }
        free(copy);
    }
}

/* Lines of a megabyte, and what is quadratic when read carelessly. */
static void test_long(void **state)
{
    (void)state;
    enum { BYTES = 1 << 20 };
    static const char *const units[] = {"a",
                                        "_perf",
                                        " 8",
                                        ",",
                                        "\"",
                                        "<stdout>:",
                                        "#",
                                        "[",
                                        "{\"a\":",
                                        "1,",
                                        "Rank 1 on a device\n",
                                        "8 8 f 8\n",
                                        " 8 8 f",
                                        "\r",
                                        "@"};
    static const char *const starts[] = {"", DEVICES TABLE, CSV, "{\"version\":"};
    char *text = moe_alloc(BYTES + 4096, 1);
    for (int s = 0; s < 4; s++)
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            size_t n = strlen(starts[s]), unit = strlen(units[u]);
            memcpy(text, starts[s], n);
            for (; n < BYTES; n += unit) memcpy(text + n, units[u], unit);
            read_any(text, n);
        }
    free(text);
}

/* ---- what others published ---- */

static struct moe_measured published(const char *name)
{
    char path[1200];
    snprintf(path, sizeof path, "%s/%s", data, name);
    return read_file(path, NULL);
}

static void test_published_csv(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int n;
    } files[] = {
        {"measured/nccl_a100_sxm.csv", 504},
        {"measured/nccl_b200_sxm.csv", 504},
        {"measured/nccl_gb200.csv", 336},
        {"measured/nccl_h100_sxm.csv", 504},
        {"measured/nccl_l40s.csv", 504},
        {"measured/nccltests_aws_2xp3dn_v100.csv", 19},
        {"measured/nccltests_aws_p4de_p5.csv", 93},
        {"measured/nccltests_coreweave_h100_gb200.csv", 22},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        struct moe_measured m = published(files[i].name);
        if (m.n != files[i].n || m.n_skipped != 0)
            fail_msg("%s: %d rows, %d skipped", files[i].name, m.n, m.n_skipped);
        moe_measured_free(&m);
    }
    struct moe_measured m = published("measured/nccl_h100_sxm.csv");
    assert_row(&m, 0, "allgather", "half", 2, 0, 512, 5.435, 2);
    moe_measured_free(&m);
    m = published("measured/nccltests_aws_p4de_p5.csv");
    assert_row(&m, 0, "allreduce", "float", 16, 2, 8, 164.3, 6);
    moe_measured_free(&m);
}

static void test_published_nccl_tests(void **state)
{
    (void)state;
    struct moe_measured m = published("examples/nccl_tests_a3mega_2x8_h100_old_format.md");
    assert_int_equal(m.n, 31);
    assert_int_equal(m.n_skipped, 0);
    assert_row(&m, 0, "allreduce", "float", 16, 2, 8, 135.8, 33);
    assert_row(&m, 30, "allreduce", "float", 16, 2, 8589934592, 47535, 63);
    moe_measured_free(&m);
    m = published("examples/synthetic/nccl_tests_v3.json");
    assert_int_equal(m.n, 1);
    assert_row(&m, 0, "alltoall", "float", 8, 1, 1048576, 38.1, 1);
    moe_measured_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_csv),         TEST(test_csv_other_names),
        TEST(test_csv_wrong),   TEST(test_log_variants),
        TEST(test_log_between), TEST(test_log_runs),
        TEST(test_log_wrong),   TEST(test_json),
        TEST(test_json_wrong),  TEST(test_rows),
        TEST(test_mutations),   TEST(test_long),
    };
    const struct CMUnitTest of_others[] = {TEST(test_published_csv), TEST(test_published_nccl_tests)};
    const char *folder = getenv("MOESIM_DATA");
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (failed) return failed;
    snprintf(data, sizeof data, "%s", folder ? folder : "");
    if (!exists(data)) {
        puts("skip: no measured files (MOESIM_DATA)");
        return 77;
    }
    return cmocka_run_group_tests(of_others, NULL, NULL);
}
