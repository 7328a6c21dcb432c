/* cuda_gemm [--rows N] [--hidden H] [--ffn F] [--experts E] [--runs R] - what multiplying experts in one
 * grouped call costs against one product of the same work: N rows spread unevenly over E experts, [rows,H] x
 * [H,F], bf16 and float32, by the GPU part as a capture calls it. Prints the ratio for all rows alike, for
 * rows that fall evenly from most to none, and for all rows at one expert. */
#include "runtime/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RUNS = 101, SKIPPED = 77 };

static struct {
    int64_t N, H, F, E, runs;
} shape = {32768, 7168, 2048, 64, 25};

static struct moe_device *d;

static void check(int err)
{
    if (err >= 0) return;
    fprintf(stderr, "cuda_gemm: %s\n", moe_error());
    exit(moe_exit_code(err));
}

static int rising(const void *a, const void *b)
{
    return (*(const int64_t *)a > *(const int64_t *)b) - (*(const int64_t *)a < *(const int64_t *)b);
}

/* Median nanoseconds of a launch, after one that is not counted. */
static double time_of(const struct moe_launch *l)
{
    int64_t ns[MOST_RUNS];
    for (int64_t i = -1; i < shape.runs; i++) {
        check(d->table->mark(d, MOE_STREAM_COMPUTE, 0));
        check(d->table->run(d, l, MOE_STREAM_COMPUTE));
        check(d->table->mark(d, MOE_STREAM_COMPUTE, 1));
        check(d->table->sync(d, MOE_STREAM_COMPUTE));
        if (i >= 0) check(d->table->elapsed(d, 0, 1, &ns[i]));
    }
    qsort(ns, (size_t)shape.runs, sizeof *ns, rising);
    return (double)ns[shape.runs / 2];
}

static void *zeros(size_t n)
{
    void *p;
    check(d->table->alloc(d, n, &p));
    void *host = moe_alloc(n, 1);
    check(d->table->copy(d, p, host, n, MOE_STREAM_COMPUTE));
    free(host);
    return p;
}

static void compare(enum moe_type type)
{
    const size_t each = (size_t)moe_type_bytes[type];
    void *A = zeros((size_t)(shape.N * shape.H) * each), *C = zeros((size_t)(shape.N * shape.F) * each),
         *B = zeros((size_t)(shape.E * shape.H * shape.F) * each);
    const struct moe_op dense = {
        .kind = MOE_KERNEL, .kernel = MOE_K_GEMM, .type = type, .n_reads = 2, .n_writes = 1};
    struct moe_op grouped = dense;
    grouped.kernel = MOE_K_GROUPED_GEMM;
    struct moe_launch l = {.op = &dense, .in = {A, B}, .out = {C}, .dims = {shape.N, shape.F, shape.H}};
    const double alone = time_of(&l), flops = 2.0 * (double)shape.N * (double)shape.F * (double)shape.H;
    printf("%-8s dense %9.1f us %8.1f TFLOP/s", moe_type_text[type], alone / 1e3, flops / alone / 1e3);
    int64_t *rows = moe_alloc((size_t)shape.E, sizeof *rows);
    static const char *const names[] = {"alike", "falling", "one"};
    for (int how = 0; how < 3; how++) {
        int64_t left = shape.N;
        for (int64_t e = shape.E - 1; e >= 0; e--) {
            const int64_t falling = 2 * shape.N * (shape.E - e) / (shape.E * (shape.E + 1));
            rows[e] = how == 0 ? shape.N / shape.E : how == 1 ? falling : 0;
            left -= rows[e];
        }
        rows[0] += left;
        l.op = &grouped;
        l.rows = rows;
        memcpy(l.dims, (int64_t[]){shape.E, shape.F, shape.H}, 3 * sizeof *l.dims);
        printf("   %s %.2f of its time", names[how], time_of(&l) / alone);
    }
    printf("\n");
    free(rows);
    d->table->free(d, A);
    d->table->free(d, B);
    d->table->free(d, C);
}

int main(int argc, char **argv)
{
    const struct {
        const char *name;
        int64_t *to;
    } keys[] = {{"--rows", &shape.N},
                {"--hidden", &shape.H},
                {"--ffn", &shape.F},
                {"--experts", &shape.E},
                {"--runs", &shape.runs}};
    const size_t n_keys = sizeof keys / sizeof *keys;
    const struct moe_gpu_module *gpu;
    for (int i = 1; i < argc; i += 2) {
        size_t k = 0;
        while (k < n_keys && strcmp(argv[i], keys[k].name)) k++;
        if (k == n_keys || i + 1 == argc || (*keys[k].to = atoll(argv[i + 1])) < 1 ||
            shape.runs > MOST_RUNS) {
            fprintf(stderr, "usage: cuda_gemm [--rows N] [--hidden H] [--ffn F] [--experts E] [--runs R]\n");
            return 2;
        }
    }
    if (moe_gpu_open(&gpu) < 0) {
        printf("skip: no GPU: %s\n", moe_error());
        return SKIPPED;
    }
    check(gpu->device->open(&d));
    printf("%lld rows x %lld x %lld, %lld experts\n", (long long)shape.N, (long long)shape.H,
           (long long)shape.F, (long long)shape.E);
    compare(MOE_BF16);
    compare(MOE_F32);
    d->table->close(d);
    return 0;
}
