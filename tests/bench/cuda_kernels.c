/* cuda_kernels [--tokens T] [--hidden H] [--experts E] [--top-k K] [--ffn F] [--runs N] - how near to the
 * memory's limit the kernels of an MoE layer are, and what the two ways to combine cost.
 *
 * bf16. Per kernel: bytes that it has to move, its time, its rate, and the ratio of that to the rate of a
 * copy kernel of as many bytes as the permuted rows, measured in the same run. Then combine (unsort and sum)
 * against scatter-add: time, memory of the sums, and error against sums in double. On the host (no GPU) the
 * figures say nothing about a GPU; that it runs is what is checked. */
#include "tests/cuda/fixture.h"

struct shape {
    int64_t T, H, E, K, F, runs;
};

struct layer {
    struct shape s;
    const struct moe_cuda_queue *q;
    void *x, *rows, *y, *logits, *prob, *h, *a, *gain, *drows, *dprob;
    int32_t *expert, *slot;
    int64_t *counts;
    int err;
};

#define BENCH(name, ...)                                                                                     \
    static void run_##name(void *ctx)                                                                        \
    {                                                                                                        \
        struct layer *l = ctx;                                                                               \
        const struct shape *s = &l->s;                                                                       \
        const int64_t n = s->T * s->K;                                                                       \
        (void)n;                                                                                             \
        l->err |= moe_cuda_##name(l->q, MOE_CUDA_BF16, __VA_ARGS__);                                         \
    }
BENCH(copy, n * s->H, l->rows, l->drows)
BENCH(topk, s->T, s->E, s->K, l->logits, l->prob, l->expert, l->slot, l->counts)
BENCH(permute, s->T, s->H, s->K, n, l->x, l->slot, l->rows)
BENCH(permute_bwd, s->T, s->H, s->K, n, l->rows, l->slot, l->y, false)
BENCH(combine, s->T, s->H, s->K, s->E, n, l->rows, l->prob, l->expert, l->slot, l->y)
BENCH(combine_scatter, s->T, s->H, s->K, s->E, n, l->rows, l->prob, l->expert, l->slot, l->y)
BENCH(combine_bwd, s->T, s->H, s->K, s->E, n, l->rows, l->prob, l->expert, l->slot, l->x, false, l->drows,
      l->dprob)
BENCH(swiglu, n, s->F, l->h, l->a)
BENCH(rmsnorm, s->T, s->H, l->x, l->gain, l->y)

static double rate(struct layer *l, const char *name, void (*run)(void *), double bytes, double copy)
{
    const double ns = fixture_time_ns(run, l, (int)l->s.runs), gbps = bytes / ns;
    printf("%-16s %9.1f MB %10.1f us %9.1f GB/s", name, bytes / 1e6, ns / 1e3, gbps);
    if (copy > 0)
        printf(" %6.2f of copy\n", gbps / copy);
    else
        printf("\n");
    return gbps;
}

/* Of y [T,H] against the weighted sums in double: the root of the mean square. */
static double error(const struct layer *l)
{
    const struct shape *s = &l->s;
    double sum = 0;
    for (int64_t t = 0; t < s->T; t++)
        for (int64_t h = 0; h < s->H; h++) {
            double exact = 0;
            for (int64_t i = t * s->K; i < (t + 1) * s->K; i++)
                exact += fixture_at(MOE_CUDA_BF16, l->prob, t * s->E + l->expert[i]) *
                         fixture_at(MOE_CUDA_BF16, l->rows, l->slot[i] * s->H + h);
            const double d = fixture_at(MOE_CUDA_BF16, l->y, t * s->H + h) - exact;
            sum += d * d;
        }
    return sqrt(sum / (double)(s->T * s->H));
}

static void compare_combines(struct layer *l)
{
    void (*const run[])(void *) = {run_combine, run_combine_scatter};
    double ns[2], off[2];
    for (int i = 0; i < 2; i++) {
        ns[i] = fixture_time_ns(run[i], l, (int)l->s.runs);
        fixture_wait_right();
        off[i] = error(l);
    }
    printf("\ncombine against scatter-add: %.3f of its time, error %.3g against %.3g: %.2f times smaller; "
           "neither "
           "needs memory beside y\n",
           ns[0] / ns[1], off[0], off[1], off[1] / off[0]);
}

static int read_shape(int argc, char **argv, struct shape *s)
{
    const struct {
        const char *name;
        int64_t *to;
    } keys[] = {{"--tokens", &s->T}, {"--hidden", &s->H}, {"--experts", &s->E},
                {"--top-k", &s->K},  {"--ffn", &s->F},    {"--runs", &s->runs}};
    for (int i = 1; i < argc; i += 2) {
        size_t k = 0;
        while (k < sizeof keys / sizeof *keys && strcmp(argv[i], keys[k].name)) k++;
        if (k == sizeof keys / sizeof *keys || i + 1 == argc || (*keys[k].to = atoll(argv[i + 1])) < 1)
            return 2;
    }
    return s->K > s->E || s->runs > FIXTURE_MOST_RUNS ? 2 : 0;
}

static void *ints(int64_t n, size_t bytes)
{
    return fixture_alloc((size_t)n * bytes);
}

static void open_layer(struct layer *l)
{
    const struct shape *s = &l->s;
    const int64_t n = s->T * s->K;
    l->q = fixture_queue(0);
    l->x = fixture_random(MOE_CUDA_BF16, s->T * s->H, 1, -1, 1);
    l->rows = fixture_random(MOE_CUDA_BF16, n * s->H, 2, -1, 1);
    l->drows = fixture_random(MOE_CUDA_BF16, n * s->H, 3, -1, 1);
    l->y = fixture_random(MOE_CUDA_BF16, s->T * s->H, 4, -1, 1);
    l->logits = fixture_random(MOE_CUDA_BF16, s->T * s->E, 5, -4, 4);
    l->prob = fixture_random(MOE_CUDA_BF16, s->T * s->E, 6, 0, 1);
    l->dprob = fixture_random(MOE_CUDA_BF16, s->T * s->E, 7, 0, 1);
    l->h = fixture_random(MOE_CUDA_BF16, n * 2 * s->F, 8, -4, 4);
    l->a = fixture_random(MOE_CUDA_BF16, n * s->F, 9, -1, 1);
    l->gain = fixture_random(MOE_CUDA_BF16, s->H, 10, 0, 2);
    l->expert = ints(n, sizeof *l->expert);
    l->slot = ints(n, sizeof *l->slot);
    l->counts = ints(s->E, sizeof *l->counts);
}

static void close_layer(struct layer *l)
{
    void *const all[] = {l->x, l->rows, l->drows, l->y,      l->logits, l->prob,  l->dprob,
                         l->h, l->a,    l->gain,  l->expert, l->slot,   l->counts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fixture_free(all[i]);
}

int main(int argc, char **argv)
{
    struct layer l = {.s = {4096, 7168, 256, 8, 2048, 25}};
    const struct shape *s = &l.s;
    if (read_shape(argc, argv, &l.s)) {
        fprintf(stderr, "usage: cuda_kernels [--tokens T] [--hidden H] [--experts E] [--top-k K] [--ffn F] "
                        "[--runs N (odd, 101 at most)]\n");
        return 2;
    }
    fixture_open();
    open_layer(&l);
    const double n = (double)(s->T * s->K), H = (double)s->H, T = (double)s->T, E = (double)s->E,
                 F = (double)s->F, each = 2, choices = 8 * n;
    printf("%lld tokens x %lld, %lld of %lld experts, ffn %lld, bf16\n", (long long)s->T, (long long)s->H,
           (long long)s->K, (long long)s->E, (long long)s->F);
    const double copy = rate(&l, "copy", run_copy, 2 * n * H * each, 0);
    rate(&l, "topk", run_topk, 2 * T * E * each + choices, copy);
    rate(&l, "permute", run_permute, (T + n) * H * each + choices / 2, copy);
    rate(&l, "permute_bwd", run_permute_bwd, (T + n) * H * each + choices / 2, copy);
    rate(&l, "combine", run_combine, (T + n) * H * each + choices + n * each, copy);
    rate(&l, "combine_bwd", run_combine_bwd, (T + 2 * n) * H * each + choices + (n + T * E) * each, copy);
    rate(&l, "swiglu", run_swiglu, 3 * n * F * each, copy);
    rate(&l, "rmsnorm", run_rmsnorm, 2 * T * H * each, copy);
    compare_combines(&l);
    fixture_wait_right();
    close_layer(&l);
    if (l.err) fprintf(stderr, "cuda_kernels: a launch failed\n");
    return l.err != 0;
}
