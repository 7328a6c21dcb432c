/* test_device_cuda - the device "cuda" on the doubles of the CUDA runtime and cuBLAS, with kernels on the
 * host: every call against the host as a device, streams and marks, copies, memory, faults. MOE_DOUBLE_SEED
 * chooses the order in which what is queued runs. */
#include "runtime/cuda/device_internal.h"
#include "runtime/gpu.h"
#include "tests/unit/device_world.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

extern const struct moe_gpu_module moe_gpu_module;

static struct moe_device *cpu, *gpu;

static const struct moe_device_table *table(void)
{
    return moe_gpu_module.device;
}

static void right(int err)
{
    if (err < 0) fail_msg("%s", moe_error());
}

static void must_say(int err, int expected, const char *text)
{
    assert_int_equal(err, expected);
    if (!strstr(moe_error(), text)) fail_msg("'%s' does not say '%s'", moe_error(), text);
}

static void *alloc(size_t bytes)
{
    void *p = NULL;
    right(table()->alloc(gpu, bytes, &p));
    assert_non_null(p);
    assert_int_equal((uintptr_t)p % 256, 0);
    return p;
}

static void copy(void *to, const void *from, size_t bytes, int stream)
{
    right(table()->copy(gpu, to, from, bytes, stream));
}

/* ---- every call, against the host ---- */

/* Kernels that only move or choose, or whose elements are each the same few operations; and dot products
 * whose order is told: the same bits. */
static bool is_exact(const struct call *c)
{
    static const bool exact[MOE_K_COUNT] = {
        [MOE_K_EMBED] = true,    [MOE_K_ADD] = true,  [MOE_K_ADD_BWD] = true,   [MOE_K_LIMIT] = true,
        [MOE_K_LARGEST] = true,  [MOE_K_SET] = true,  [MOE_K_SELECT] = true,    [MOE_K_SPREAD] = true,
        [MOE_K_PERMUTE] = true,  [MOE_K_TAKE] = true, [MOE_K_SORT_ROWS] = true, [MOE_K_UNSORT_ROWS] = true,
        [MOE_K_TAKE_BWD] = true, [MOE_K_ZERO] = true, [MOE_K_SCALE] = true,     [MOE_K_COPY] = true,
        [MOE_K_SGD] = true,
    };
    return exact[c->kernel] || c->mode == MOE_DOT_BY_ROWS;
}

/* How far an element may be from that of the host. Numbers of these worlds, and what is between them and a
 * result, are below 64 (inputs below 1, one logit an expert's 11; sums of 24 terms at most; the gradient of a
 * norm and a step of ADAMW divide by as little as 1/316 and 1/50: below 512); a result is at most 128
 * roundings away from them (the longest: the gradient of attention, rotated, of heads of 10 in sequences of
 * 2). Each side makes them. bf16: computed as float, and rounded on each side; by the host, of COMBINE,
 * product by product and sum by sum. */
static double bound(const struct call *c, enum moe_type type, double value)
{
    const enum moe_kernel k = c->kernel;
    const double largest = k == MOE_K_RMSNORM_BWD || k == MOE_K_ADAMW ? 512 : 64, half = 0x1p-8;
    const double computed = 2 * 128 * largest * (type == MOE_F64 ? DBL_EPSILON / 2 : FLT_EPSILON / 2);
    if (type != MOE_BF16) return is_exact(c) ? 0 : computed;
    if (k == MOE_K_COMBINE) return computed + half * (2 * 3 + 1) * 3; /* K is 3 at most, a sum below 3 */
    return is_exact(c) ? 0 : computed + 2 * half * (fabs(value) + computed);
}

static double element(const void *p, enum moe_type type, int64_t i)
{
    switch (type) {
    case MOE_F64: return ((const double *)p)[i];
    case MOE_BF16: return (double)moe_bf16_to_float(((const moe_bf16 *)p)[i]);
    case MOE_I32: return ((const int32_t *)p)[i];
    case MOE_I64: return (double)((const int64_t *)p)[i];
    default: return (double)((const float *)p)[i];
    }
}

static void compare(const struct call *c, const struct shape *s, enum moe_type type, int w, int accumulating,
                    const void *got, const void *want)
{
    const enum moe_type t = type_of(c->out[w], type);
    for (int64_t i = 0; i < elements(c->out[w], s); i++) {
        double g = element(got, t, i), e = element(want, t, i);
        if (g == e || (isnan(g) && isnan(e))) continue;
        if (!is_integer(c->out[w]) && fabs(g - e) <= bound(c, t, e)) continue;
        fail_msg("%s %s (call %d, shape %d, adding to %d) write %d element %d: %.17g, expected %.17g",
                 moe_kernel_text[c->kernel], moe_type_text[type], (int)(c - calls), (int)(s - shapes),
                 accumulating, w, (int)i, g, e);
    }
}

/* The world on the device, and one call there and on the host, on alternating streams. */
static void check_call(const struct call *c, const struct shape *s, enum moe_type type, void *host[],
                       void *device[], int accumulating)
{
    const int stream = (int)(c - calls) % MOE_STREAM_COUNT;
    void *want[MOE_REFS], *got[MOE_REFS], *on_device[MOE_REFS] = {0};
    struct moe_op op;
    struct moe_launch launch;
    make_outputs(c, s, type, 0x3e, want);
    make_outputs(c, s, type, 0x3e, got);
    for (int w = 0; c->out[w]; w++) {
        on_device[w] = alloc(tensor_bytes(c->out[w], s, type));
        copy(on_device[w], got[w], tensor_bytes(c->out[w], s, type), stream);
    }
    make_launch(c, s, type, device, host, on_device, accumulating, &op, &launch);
    right(table()->run(gpu, &launch, stream));
    make_launch(c, s, type, host, host, want, accumulating, &op, &launch);
    right(moe_device_cpu.run(cpu, &launch, stream));
    for (int w = 0; c->out[w]; w++) {
        copy(got[w], on_device[w], tensor_bytes(c->out[w], s, type), stream);
        compare(c, s, type, w, accumulating, got[w], want[w]);
        table()->free(gpu, on_device[w]);
    }
    free_all(MOE_REFS, want);
    free_all(MOE_REFS, got);
}

static void check_world(const struct shape *s, enum moe_type type, void *host[])
{
    void *device[TENSOR_COUNT];
    for (enum tensor i = 0; i < TENSOR_COUNT; i++) {
        device[i] = alloc(tensor_bytes(i, s, type));
        copy(device[i], host[i], tensor_bytes(i, s, type), MOE_STREAM_COMPUTE);
    }
    right(table()->sync(gpu, MOE_STREAM_COMPUTE));
    for (const struct call *c = calls; c < calls + LENGTH(calls); c++) {
        check_call(c, s, type, host, device, -1);
        for (int w = 0; c->out[w]; w++)
            if (c->add >> w & 1) check_call(c, s, type, host, device, w);
    }
    for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) right(table()->sync(gpu, stream));
    for (enum tensor i = 0; i < TENSOR_COUNT; i++) table()->free(gpu, device[i]);
}

/* Where memory is opened for every piece of work, or threads of a GPU are threads, a few will do. */
static bool is_slow(void)
{
#ifdef __SANITIZE_THREAD__
    return true;
#else
    return getenv("MOE_DOUBLE_PROTECT") != NULL;
#endif
}

static void test_calls(void **state)
{
    (void)state;
    const int n = is_slow() ? 1 : LENGTH(shapes);
    for (const struct shape *s = shapes; s < shapes + n; s++) {
        void *host[TENSOR_COUNT], *half[TENSOR_COUNT], *wide[TENSOR_COUNT];
        make_world(s, MOE_F64, host);
        check_world(s, MOE_F64, host);
        free_all(TENSOR_COUNT, host);
        make_world(s, MOE_F32, host);
        check_world(s, MOE_F32, host);
        round_world(s, host, half, wide);
        check_world(s, MOE_BF16, half);
        free_all(TENSOR_COUNT, half);
        free_all(TENSOR_COUNT, wide);
        free_all(TENSOR_COUNT, host);
    }
}

/* More choices than a launch makes by itself: the host's are what the device gets. */
static void test_forced(void **state)
{
    (void)state;
    const int32_t forced[] = {5, 0, 3, 2}; /* of 5 tokens with 2 choices each */
    const struct shape *s = &shapes[0];
    const struct call *c = calls;
    void *host[TENSOR_COUNT], *want[MOE_REFS], *out[MOE_REFS] = {0}, *logits;
    struct moe_op op;
    struct moe_launch launch;
    while (c->kernel != MOE_K_TOPK) c++;
    make_world(s, MOE_F32, host);
    make_outputs(c, s, MOE_F32, 0, want);
    make_launch(c, s, MOE_F32, host, host, want, -1, &op, &launch);
    launch.forced = forced;
    right(moe_device_cpu.run(cpu, &launch, MOE_STREAM_COMPUTE));
    logits = alloc(tensor_bytes(LOGITS, s, MOE_F32));
    copy(logits, host[LOGITS], tensor_bytes(LOGITS, s, MOE_F32), MOE_STREAM_COMPUTE);
    for (int w = 0; c->out[w]; w++) launch.out[w] = out[w] = alloc(tensor_bytes(c->out[w], s, MOE_F32));
    launch.in[0] = logits;
    right(table()->run(gpu, &launch, MOE_STREAM_COMPUTE));
    for (int w = 0; c->out[w]; w++) {
        void *got = moe_alloc(1, tensor_bytes(c->out[w], s, MOE_F32));
        copy(got, out[w], tensor_bytes(c->out[w], s, MOE_F32), MOE_STREAM_COMPUTE);
        compare(c, s, MOE_F32, w, -1, got, want[w]);
        free(got);
        table()->free(gpu, out[w]);
    }
    table()->free(gpu, logits);
    free_all(TENSOR_COUNT, host);
    free_all(MOE_REFS, want);
}

/* Attention is run with the workspace that it asks for, also where that is more than every stream has. */
static void test_workspace(void **state)
{
    (void)state;
    const struct moe_cuda_queue *q = &((struct moe_cuda *)gpu)->streams[MOE_STREAM_COMM].queue;
    int64_t T = 1;
    while (moe_cuda_attention_bytes(T, 64, 1, T) <= MOE_CUDA_WORKSPACE_BYTES && T < 4096) T *= 2;
    const size_t bytes = (size_t)(3 * T * 64) * sizeof(float);
    float *host = moe_alloc(1, bytes);
    void *qkv = alloc(bytes), *o = alloc(bytes);
    struct moe_op op = {
        .kind = MOE_KERNEL, .kernel = MOE_K_ATTENTION, .n_dims = 4, .n_reads = 1, .n_writes = 1};
    struct moe_launch launch = {.op = &op, .dims = {T, 64, 1, T}, .in = {qkv}, .out = {o}};
    copy(qkv, host, bytes, MOE_STREAM_COMM);
    right(table()->run(gpu, &launch, MOE_STREAM_COMM));
    right(table()->sync(gpu, MOE_STREAM_COMM));
    assert_true(q->workspace_bytes >= moe_cuda_attention_bytes(T, 64, 1, T));
    table()->free(gpu, qkv), table()->free(gpu, o);
    free(host);
}

/* ---- streams ---- */

/* y [1] = value, on the stream. */
static void set_to(int64_t value, int64_t *y, int stream)
{
    struct moe_op op = {.kind = MOE_KERNEL, .kernel = MOE_K_SET, .type = MOE_I64, .n_dims = 1, .n_writes = 1};
    struct moe_launch launch = {.op = &op, .dims = {value}, .out = {y}};
    right(table()->run(gpu, &launch, stream));
}

/* What the communication stream copies of x, which the compute stream sets before and after it. */
static int64_t seen_between(bool ordered)
{
    int64_t *x = alloc(8), *y = alloc(8), none = 0, seen = -1;
    copy(x, &none, 8, MOE_STREAM_COMPUTE);
    right(table()->sync(gpu, MOE_STREAM_COMPUTE));
    set_to(1, x, MOE_STREAM_COMPUTE);
    if (ordered) right(table()->order(gpu, MOE_STREAM_COMM, MOE_STREAM_COMPUTE));
    copy(y, x, 8, MOE_STREAM_COMM);
    if (ordered) right(table()->order(gpu, MOE_STREAM_COMPUTE, MOE_STREAM_COMM));
    set_to(2, x, MOE_STREAM_COMPUTE);
    right(table()->sync(gpu, MOE_STREAM_COMPUTE));
    copy(&seen, y, 8, MOE_STREAM_COMM);
    table()->free(gpu, x);
    table()->free(gpu, y);
    return seen;
}

static void test_order(void **state)
{
    (void)state;
    int late = 0;
    for (int i = 0; i < 50; i++) assert_int_equal(seen_between(true), 1);
    for (int i = 0; i < 50; i++) late += seen_between(false) != 1;
    assert_int_not_equal(late, 0); /* the double does run them in other orders */
}

static void wait_for(int slot)
{
    int done = 0;
    for (int looks = 0; !done && looks < 1000; looks++) {
        done = table()->done(gpu, slot);
        right(done);
    }
    assert_int_equal(done, 1);
}

/* A slot is done when what was issued before it is, and can be marked again. */
static void test_marks(void **state)
{
    (void)state;
    int64_t *x = alloc(8), ns, first;
    int open = 0;
    for (int round = 0; round < 20; round++) {
        right(table()->mark(gpu, MOE_STREAM_COMPUTE, 40));
        for (int i = 0; i < 5; i++) set_to(round, x, MOE_STREAM_COMPUTE);
        right(table()->mark(gpu, MOE_STREAM_COMPUTE, 0));
        open += table()->done(gpu, 0) == 0;
        set_to(-1, alloc(8), MOE_STREAM_COMM); /* after "not yet", which is no error, a launch is right */
        wait_for(0);
        assert_int_equal(table()->done(gpu, 40), 1);
        right(table()->elapsed(gpu, 40, 0, &ns));
        right(table()->elapsed(gpu, 40, 40, &first));
        assert_true(ns >= 0 && ns < 1000000000 && first == 0);
        int64_t seen;
        copy(&seen, x, 8, MOE_STREAM_COMPUTE);
        assert_int_equal(seen, round);
    }
    assert_int_not_equal(open, 0);
    table()->free(gpu, x);
}

/* ---- copies and memory ---- */

static unsigned char byte_of(size_t i, int stream)
{
    return (unsigned char)(moe_hash64(i ^ (uint64_t)stream << 40) >> 56);
}

/* More than the staging memory holds, from one host buffer that changes after every copy. */
static void test_staging(void **state)
{
    (void)state;
    enum { ALL = 11 << 20, PIECE = 377777 };
    char *device[MOE_STREAM_COUNT], *host = moe_alloc(1, ALL), *back = moe_alloc(1, ALL);
    for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) device[stream] = alloc(ALL);
    for (size_t at = 0; at < ALL; at += PIECE)
        for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) {
            size_t n = ALL - at < PIECE ? ALL - at : PIECE;
            for (size_t i = 0; i < n; i++) host[i] = (char)byte_of(at + i, stream);
            copy(device[stream] + at, host, n, stream);
        }
    for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) {
        copy(back, device[stream], ALL, stream);
        for (size_t i = 0; i < ALL; i++)
            if ((unsigned char)back[i] != byte_of(i, stream)) fail_msg("stream %d byte %zu", stream, i);
    }
    /* at once, and at odd places */
    for (size_t i = 0; i < ALL; i++) host[i] = (char)byte_of(i, 7);
    copy(device[0] + 3, host, ALL - 3, MOE_STREAM_COMM);
    memset(host, 0, ALL);
    copy(device[1] + 1, device[0] + 3, ALL - 3, MOE_STREAM_COMM);
    copy(back, device[1] + 1, ALL - 3, MOE_STREAM_COMM);
    for (size_t i = 0; i < ALL - 3; i++) assert_int_equal((unsigned char)back[i], byte_of(i, 7));
    copy(back, host, 0, MOE_STREAM_COMM);
    for (int stream = 0; stream < MOE_STREAM_COUNT; stream++) table()->free(gpu, device[stream]);
    free(host), free(back);
}

/* Sizes that no test before asked for. */
static void test_memory(void **state)
{
    (void)state;
    char *large = alloc(2000000), *near = alloc(1900000), *small;
    assert_true(large + 2000000 <= near || near + 1900000 <= large);
    table()->free(gpu, large);
    table()->free(gpu, NULL);
    small = alloc(1600000);
    assert_ptr_not_equal(small, large); /* more than an eighth would be lost */
    table()->free(gpu, near);
    assert_ptr_equal(alloc(1890000), near); /* the smallest that will do */
    assert_ptr_equal(alloc(1890000), large);
    table()->free(gpu, near), table()->free(gpu, large);
    assert_ptr_equal(alloc(2000000), large);
    table()->free(gpu, large), table()->free(gpu, small);
    table()->free(gpu, alloc(0));
    /* No memory: what is cached is given back, and then there is; or it is an error. */
    void *other = NULL, *kept = alloc(8);
    setenv("MOE_DOUBLE_FAIL", "malloc:1:2", 1);
    right(table()->alloc(gpu, 5000000, &other));
    unsetenv("MOE_DOUBLE_FAIL");
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* a launch asks for it */
    assert_ptr_not_equal(alloc(2000000), large);
    set_to(1, kept, MOE_STREAM_COMPUTE);
    right(table()->sync(gpu, MOE_STREAM_COMPUTE));
    must_say(table()->alloc(gpu, (size_t)1 << 50, &other), MOE_EFAILED,
             "no GPU memory for a buffer of 1125899906842624");
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

/* ---- what goes wrong ---- */

/* Token `token` of 4, on the compute stream. */
static void embed(int32_t token, const int32_t *on_device, const float *emb, float *x)
{
    struct moe_op op = {.kind = MOE_KERNEL, .kernel = MOE_K_EMBED, .n_dims = 3, .n_reads = 2, .n_writes = 1};
    struct moe_launch launch = {.op = &op, .dims = {1, 2, 4}, .in = {on_device, emb}, .out = {x}};
    copy((void *)on_device, &token, sizeof token, MOE_STREAM_COMPUTE);
    right(table()->run(gpu, &launch, MOE_STREAM_COMPUTE));
}

/* Each on a GPU that was just opened: the first index is reported by whatever waits, from then on always. */
static void test_index_out_of_range(void **state)
{
    (void)state;
    for (int by = 0; by < 3; by++) {
        int32_t *token = alloc(4);
        float *emb = alloc(32), *x = alloc(8), host[8] = {0};
        int done = 0;
        copy(emb, host, sizeof host, MOE_STREAM_COMPUTE);
        embed(3, token, emb, x);
        right(table()->sync(gpu, MOE_STREAM_COMPUTE));
        embed(-3, token, emb, x);
        right(table()->mark(gpu, MOE_STREAM_COMPUTE, 0));
        if (by == 0)
            done = table()->sync(gpu, MOE_STREAM_COMPUTE);
        else if (by == 1)
            done = table()->copy(gpu, host, x, 8, MOE_STREAM_COMPUTE);
        while (by == 2 && !done) done = table()->done(gpu, 0);
        must_say(done, MOE_EFAILED, "a kernel met index -3 outside [0, 4)");
        must_say(table()->sync(gpu, MOE_STREAM_COMPUTE), MOE_EFAILED, "index -3 outside [0, 4)");
        table()->close(gpu);
        right(table()->open(&gpu));
    }
}

/* In a process of its own, since a device with an error stays so. */
static void fails(const char *plan, void (*body)(char *said), const char *text)
{
    int pipe_of[2], status;
    char said[512] = "";
    assert_int_equal(pipe(pipe_of), 0);
    pid_t child = fork();
    if (child == 0) {
        setenv("MOE_DOUBLE_FAIL", plan, 1);
        body(said);
        status = (int)write(pipe_of[1], said, sizeof said);
        _exit(status != sizeof said);
    }
    close(pipe_of[1]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(read(pipe_of[0], said, sizeof said), sizeof said);
    close(pipe_of[0]);
    if (!strstr(said, text)) fail_msg("%s: '%s' does not say '%s'", plan, said, text);
}

static void fail_in_kernel(char *said)
{
    set_to(1, alloc(8), MOE_STREAM_COMPUTE);
    int err = table()->sync(gpu, MOE_STREAM_COMPUTE);
    snprintf(said, 512, "%d %s", err, moe_error());
    table()->close(gpu);
}

static void fail_in_mark(char *said)
{
    int done = 0;
    set_to(1, alloc(8), MOE_STREAM_COMPUTE);
    right(table()->mark(gpu, MOE_STREAM_COMPUTE, 0));
    while (!done) done = table()->done(gpu, 0);
    snprintf(said, 512, "%d %s", done, moe_error());
}

static void fail_in_copy(char *said)
{
    int64_t x;
    void *on_device = alloc(8);
    int err = table()->copy(gpu, &x, on_device, 8, MOE_STREAM_COMM);
    snprintf(said, 512, "%d %s", err, moe_error());
}

static void fail_in_gemm(char *said)
{
    struct moe_op op = {.kind = MOE_KERNEL, .kernel = MOE_K_GEMM, .n_dims = 3, .n_reads = 2, .n_writes = 1};
    struct moe_launch launch = {.op = &op, .dims = {1, 1, 1}, .in = {alloc(4), alloc(4)}, .out = {alloc(4)}};
    int err = table()->run(gpu, &launch, MOE_STREAM_COMPUTE);
    if (err >= 0) err = table()->sync(gpu, MOE_STREAM_COMPUTE);
    snprintf(said, 512, "%d %s", err, moe_error());
}

/* Two experts of a row each, with matrices of side x side: the second product fails, if there are two. */
static void fail_in_second(char *said, enum moe_type type, int64_t side)
{
    const int64_t rows[] = {1, 1};
    struct moe_op op = {
        .kind = MOE_KERNEL, .kernel = MOE_K_GROUPED_GEMM, .type = type, .n_dims = 3, .n_reads = 2};
    op.n_writes = 1;
    struct moe_launch launch = {.op = &op, .dims = {2, side, side}, .rows = rows};
    launch.in[0] = alloc((size_t)(2 * side * 8));
    launch.out[0] = alloc((size_t)(2 * side * 8));
    launch.in[1] = alloc((size_t)(2 * side * side * 8));
    int err = table()->run(gpu, &launch, MOE_STREAM_COMPUTE);
    if (err >= 0) err = table()->sync(gpu, MOE_STREAM_COMPUTE);
    snprintf(said, 512, "%s", err < 0 ? "one by one" : "at once");
}

static void fail_f32(char *said)
{
    fail_in_second(said, MOE_F32, 3);
}

static void fail_bf16(char *said)
{
    fail_in_second(said, MOE_BF16, 8);
}

static void fail_bf16_unaligned(char *said)
{
    fail_in_second(said, MOE_BF16, 3);
}

/* Experts are multiplied at once, unless told otherwise, or where bf16 is not aligned. */
static void test_grouped(void **state)
{
    (void)state;
    const char *way = getenv("MOESIM_GROUPED") || CUBLAS_VERSION < 120500 ? "one by one" : "at once";
    fails("gemm:2:700", fail_f32, way);
    fails("gemm:2:700", fail_bf16, way);
    fails("gemm:2:700", fail_bf16_unaligned, "one by one");
}

static void test_failures(void **state)
{
    (void)state;
    fails("kernel:1:700", fail_in_kernel,
          "-1 cudaStreamSynchronize: an illegal memory access was encountered (cudaErrorIllegalAddress)");
    fails("kernel:1:719", fail_in_mark,
          "-1 cudaEventQuery: unspecified launch failure (cudaErrorLaunchFailure)");
    fails("copy:1:214", fail_in_copy, "(cudaErrorECCUncorrectable)");
    fails("gemm:1:700", fail_in_gemm, "(cudaErrorIllegalAddress)");
}

/* The GPU of a rank, and none. */
static void test_choice(void **state)
{
    (void)state;
    struct moe_device *d = NULL;
    setenv("MOE_DOUBLE_GPUS", "2", 1);
    assert_int_equal(moe_gpu_module.count(), 2);
    setenv("LOCAL_RANK", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0", 1); /* LOCAL_RANK counts first */
    must_say(table()->open(&d), MOE_EMISSING, "LOCAL_RANK=2: there is no GPU 2: this host has 2");
    setenv("LOCAL_RANK", "one", 1);
    must_say(table()->open(&d), MOE_EINPUT, "LOCAL_RANK=one: expected");
    unsetenv("LOCAL_RANK");
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
    right(table()->open(&d));
    int used = -1;
    assert_int_equal(cudaGetDevice(&used), cudaSuccess);
    assert_int_equal(used, 1);
    table()->close(d);
    unsetenv("OMPI_COMM_WORLD_LOCAL_RANK");
    setenv("SLURM_LOCALID", "7", 1);
    must_say(table()->open(&d), MOE_EMISSING, "SLURM_LOCALID=7: there is no GPU 7");
    unsetenv("SLURM_LOCALID");
    setenv("MOE_DOUBLE_GPUS", "0", 1);
    must_say(moe_gpu_module.count(), MOE_EMISSING, "no NVIDIA GPU");
    must_say(table()->open(&d), MOE_EMISSING, "no NVIDIA GPU");
    setenv("MOE_DOUBLE_GPUS", "-1", 1);
    must_say(moe_gpu_module.count(), MOE_EMISSING, "no NVIDIA driver, or one too old for CUDA 1");
    unsetenv("MOE_DOUBLE_GPUS");
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
}

static void test_streams(void **state)
{
    (void)state;
    int compute, comm;
    assert_int_equal(cudaStreamGetPriority(moe_cuda_stream(gpu, MOE_STREAM_COMPUTE), &compute), cudaSuccess);
    assert_int_equal(cudaStreamGetPriority(moe_cuda_stream(gpu, MOE_STREAM_COMM), &comm), cudaSuccess);
    assert_true(comm < compute); /* the lower number is the higher priority */
}

static int open_both(void **state)
{
    (void)state;
    return moe_device_cpu.open(&cpu) || table()->open(&gpu);
}

static int close_both(void **state)
{
    (void)state;
    moe_device_cpu.close(cpu);
    table()->close(gpu);
    table()->close(NULL);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failures), /* first: the double counts MOE_DOUBLE_FAIL once a process */
        cmocka_unit_test(test_grouped),
        cmocka_unit_test(test_order), /* then what is many launches, with few blocks of memory */
        cmocka_unit_test(test_marks),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_forced),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_staging),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_index_out_of_range),
        cmocka_unit_test(test_choice),
    };
    return cmocka_run_group_tests(tests, open_both, close_both);
}
