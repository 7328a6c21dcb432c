/* accuracy_compute.c - matrix products and experts (sim/cost/gemm.h) against measured times of a GPU.
 *
 * Shapes are sorted by their sizes; the 1st, 3rd, ... are fitted, the others predicted. Intervals are
 * quantiles of what two halves of the fitted rows are off when each is predicted from the other, by band.
 *
 * experts: balanced rows alone are fitted. Token i's choice j goes to expert (i + j s) mod E, s = ceil(E /
 * K); with fewer than s tokens T: (floor(i s / T) + j s) mod E. Rank 0 is measured. The library chose its
 * tiles for the largest power of two of tokens that is not above T.
 *
 * skew: how many times as long a power law takes as balanced tokens, both of one shape, above 1,024 tokens;
 * predicted with the parameters of experts: no skewed row is fitted. Rows do not say what each expert got,
 * but how that was drawn (ai-dynamo/aiconfigurator, collector/helper.py as it was when these rows of
 * TensorRT-LLM 1.3.0rc10 came, before its change 876): shares x of the experts have a density of x^-a between
 * 1 and 0.8 T; counts are T K x / sum(x), rounded. What an expert has over T goes to that with the fewest
 * rows until it has T, then to the next; what rounding left one by one to those with the fewest, from each of
 * which, or if it has none from that with the most, what is too much is taken. The rank with most rows is
 * measured. A time is the mean of 5 draws (collector/trtllm/collect_moe_v3.py). Predicted is the median of 20
 * such means, draws of moe_uniform, seed 7;
 * the interval comes from their quantiles and from what balanced rows above 1,024 tokens are off. Errors are
 * in points: 100 times the difference of the two ratios, which --csv writes as us and --out does not.
 *
 * What is left is mostly how the measured library was tuned, which no row says. A shape's slowdown is 9
 * points (median) off the middle of the measured ones at EP / 2 and 2 EP, and 13 of those with fewer and more
 * tokens. 76 of 768 rows have a time over twice the predicted one, 56 of them in sweeps of 4, 6 or 12 local
 * experts; without the 76 the median is 8.6. The collector keeps a file of tiles for hidden, ffn and local
 * experts, and loads any whose name begins alike instead of tuning (4 finds that of 48, 6 of 64, 12 of 128),
 * which would explain those of 7,168 hidden. The balanced rows of EP 64 that are held out are 3 shapes, 2 of
 * them slow ones (4 and 6 local experts); those that are fitted, 3 without any. */
#include "tests/bench/accuracy.h"

#include "sim/cost/gemm.h"
#include "sim/cost/regress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Source: data sheets of H100 SXM and A100 80 GB SXM; shared memory: 128 B a clock and SM, where it
 * multiplies 4,096 and 2,048 FLOP. */
static const struct moe_gpu h100 = {132, 227 << 10, 989.4e12, 3.35e12, 989.4e12 / 32},
                            a100 = {108, 163 << 10, 312e12, 2.039e12, 312e12 / 16};

static double number(const struct accuracy_csv *csv, int row, const char *column, double least)
{
    double value = accuracy_csv_number(csv, row, column);
    if (value >= least && value <= 1e9) return value;
    fprintf(stderr, "bench_accuracy: %s:%d: %s %g, expected %g to 1e9\n", csv->path, csv->line[row + 1],
            column, value, least);
    exit(moe_exit_code(MOE_EINPUT));
}

static int64_t whole(const struct accuracy_csv *csv, int row, const char *column)
{
    return (int64_t)number(csv, row, column, 1);
}

static double time_s(const struct accuracy_csv *csv, int row)
{
    return number(csv, row, "time_us", 1e-6) * 1e-6;
}

/* ---- parameters ---- */

struct param {
    const char *key, *unit;
    double size, start, least, most;
};
#define X(member, key, unit, size, start, least, most, rows)                                                 \
    {key, unit, size, (start) * (size), (least) * (size), (most) * (size)},
static const struct param gemm_params[] = {MOE_GEMM_PARAMS(X)}, grouped_params[] = {MOE_GROUPED_PARAMS(X)};
#undef X

/* param [n]: with which `predict` is nearest to measured [n_rows]. */
static void fit(const struct param *list, int n, int n_rows, const double *measured,
                void (*predict)(void *ctx, const double *param, double *out), void *ctx, double *param)
{
    double start[MOE_REGRESS_PARAMS], least[MOE_REGRESS_PARAMS], most[MOE_REGRESS_PARAMS];
    for (int i = 0; i < n; i++) {
        start[i] = list[i].start;
        least[i] = list[i].least;
        most[i] = list[i].most;
    }
    struct moe_regress r = {.n_rows = n_rows,
                            .n_params = n,
                            .measured = measured,
                            .start = start,
                            .least = least,
                            .most = most,
                            .predict = predict,
                            .ctx = ctx};
    moe_regress_fit(&r, NULL, param);
}

static void print_params(const char *machine, const char *op, const struct param *list, int n,
                         const double *param)
{
    printf("%-12s %-22s", machine, op);
    for (int i = 0; i < n; i++)
        printf("%s %s %.3g %s", i ? "," : "", list[i].key, param[i] / list[i].size, list[i].unit);
    printf("\n");
}

/* ---- intervals ---- */

enum { BANDS = 4 };

/* Quantiles of measured / predicted, logarithms, by band. */
struct interval {
    int n[BANDS], cap[BANDS];
    double *off[BANDS];
};

static void interval_add(struct interval *v, int band, double measured, double predicted)
{
    v->off[band] = moe_grow(v->off[band], &v->cap[band], v->n[band] + 1, sizeof *v->off[band]);
    v->off[band][v->n[band]++] = log(measured / predicted);
}

static double interval_at(const struct interval *v, int band, double q)
{
    return v->n[band] ? accuracy_quantile(v->off[band], v->n[band], q) : 0;
}

static void interval_free(struct interval *v)
{
    for (int i = 0; i < BANDS; i++) free(v->off[i]);
}

static int band_of(double value, const double *edges, int n)
{
    int band = 0;
    while (band < n && value >= edges[band]) band++;
    return band;
}

/* ---- products ---- */

struct gemm_row {
    int64_t m, n, k;
    double time_s;
};

/* Every step-th row, from the first on. */
struct gemm_rows {
    const struct moe_gpu *gpu;
    const struct gemm_row *row;
    int n, step;
};

static int by_shape(const void *a, const void *b)
{
    const struct gemm_row *x = a, *y = b;
    if (x->m != y->m) return x->m < y->m ? -1 : 1;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return (x->k > y->k) - (x->k < y->k);
}

static struct gemm_row *gemm_read(const char *file, int *n)
{
    struct accuracy_csv *csv = accuracy_csv_read(file);
    struct gemm_row *rows = moe_alloc((size_t)csv->n_rows, sizeof *rows);
    *n = csv->n_rows;
    for (int i = 0; i < csv->n_rows; i++)
        rows[i] =
            (struct gemm_row){whole(csv, i, "m"), whole(csv, i, "n"), whole(csv, i, "k"), time_s(csv, i)};
    qsort(rows, (size_t)csv->n_rows, sizeof *rows, by_shape);
    accuracy_csv_free(csv);
    return rows;
}

static double gemm_s(const struct moe_gpu *gpu, const double *param, const struct gemm_row *row)
{
    struct moe_gemm p;
    memcpy(&p, param, sizeof p);
    return moe_gemm_s(gpu, &p, row->m, row->n, row->k, 2);
}

static void gemm_predict(void *ctx, const double *param, double *out)
{
    const struct gemm_rows *r = ctx;
    for (int i = 0; i < r->n; i++) out[i] = gemm_s(r->gpu, param, &r->row[(size_t)i * (size_t)r->step]);
}

static void gemm_fit(const struct moe_gpu *gpu, const struct gemm_row *rows, int n, int step, double *param)
{
    struct gemm_rows r = {gpu, rows, (n + step - 1) / step, step};
    double *measured = moe_alloc((size_t)r.n, sizeof *measured);
    for (int i = 0; i < r.n; i++) measured[i] = rows[(size_t)i * (size_t)step].time_s;
    fit(gemm_params, MOE_GEMM_N_PARAMS, r.n, measured, gemm_predict, &r, param);
    free(measured);
}

static const double gemm_edges_s[] = {5e-6, 30e-6, 300e-6};
static const char *const gemm_bands[] = {"<5us", "<30us", "<300us", "longer"};

static void gemm(struct accuracy *a, const char *machine, const char *file, const struct moe_gpu *gpu)
{
    double param[MOE_GEMM_N_PARAMS], other[MOE_GEMM_N_PARAMS];
    struct interval off = {0};
    int n;
    struct gemm_row *rows = gemm_read(file, &n);
    for (int fold = 0; fold < 4; fold += 2) { /* of rows 0, 4, ... and 2, 6, ... */
        gemm_fit(gpu, rows + 2 - fold, n - 2 + fold, 4, other);
        for (int i = fold; i < n; i += 4) {
            double s = gemm_s(gpu, other, &rows[i]);
            interval_add(&off, band_of(s, gemm_edges_s, 3), rows[i].time_s, s);
        }
    }
    gemm_fit(gpu, rows, n, 2, param);
    for (int i = 1; i < n; i += 2) {
        double s = gemm_s(gpu, param, &rows[i]);
        int band = band_of(s, gemm_edges_s, 3);
        accuracy_row(a, machine, "gemm", "bfloat16", 1, 0, gemm_bands[band], rows[i].time_s, s,
                     s * exp(interval_at(&off, band, 0.1)), s * exp(interval_at(&off, band, 0.9)));
    }
    accuracy_line(a, machine, "gemm", NULL, 10);
    for (int i = 0; i < BANDS; i++) accuracy_line(a, machine, "gemm", gemm_bands[i], 0);
    print_params(machine, "gemm", gemm_params, MOE_GEMM_N_PARAMS, param);
    interval_free(&off);
    free(rows);
}

void accuracy_gemm_h100(struct accuracy *a)
{
    gemm(a, "h100_sxm", "gemm_h100_sxm.csv", &h100);
}

void accuracy_gemm_a100(struct accuracy *a)
{
    gemm(a, "a100_sxm", "gemm_a100_sxm.csv", &a100);
}

/* ---- experts ---- */

enum { MEASURED = 3 }; /* distributions */
static const char *const distributions[MEASURED] = {"balanced", "power_law_1.01", "power_law_1.2"};
static const double exponents[MEASURED] = {0, 1.01, 1.2};

struct expert_row {
    int64_t tokens, hidden, ffn, top_k, n_experts, ep;
    double time_s[MEASURED];
    int64_t *rows, *tuned; /* [n_experts / ep] balanced */
};

static struct moe_experts_case experts_case(const struct expert_row *r)
{
    return (struct moe_experts_case){.tokens = r->tokens,
                                     .hidden = r->hidden,
                                     .ffn = r->ffn,
                                     .top_k = (int)r->top_k,
                                     .n_experts = (int)r->n_experts,
                                     .n_local = (int)(r->n_experts / r->ep),
                                     .rows = r->rows,
                                     .tuned = r->tuned,
                                     .type_bytes = 2};
}

static int by_sizes(const void *a, const void *b)
{
    const struct expert_row *x = a, *y = b;
    const int64_t left[] = {x->tokens, x->hidden, x->ffn, x->top_k, x->n_experts, x->ep},
                  right[] = {y->tokens, y->hidden, y->ffn, y->top_k, y->n_experts, y->ep};
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (left[i] != right[i]) return left[i] < right[i] ? -1 : 1;
    return 0;
}

/* The rows of rank 0's experts. */
static int64_t *balanced(const struct expert_row *r, int64_t tokens)
{
    int64_t E = r->n_experts, K = r->top_k, stride = (E + K - 1) / K, n = E / r->ep;
    int64_t *rows = moe_alloc((size_t)n, sizeof *rows);
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t j = 0; j < K; j++) {
            int64_t e = ((tokens >= stride ? i : i * stride / tokens) + j * stride) % E;
            if (e < n) rows[e]++;
        }
    return rows;
}

/* One for each shape that was measured with balanced rows, with the times of all distributions, sorted. */
static struct expert_row *experts_read(const char *file, int *n)
{
    struct accuracy_csv *csv = accuracy_csv_read(file);
    struct expert_row *rows = moe_alloc((size_t)csv->n_rows, sizeof *rows);
    int kept = 0;
    for (int i = 0; i < csv->n_rows; i++) {
        const char *distribution = accuracy_csv_text(csv, i, "distribution");
        struct expert_row *r = &rows[i];
        r->tokens = whole(csv, i, "num_tokens");
        r->hidden = whole(csv, i, "hidden_size");
        r->ffn = whole(csv, i, "inter_size");
        r->top_k = whole(csv, i, "topk");
        r->ep = whole(csv, i, "ep_size");
        r->n_experts = (int64_t)number(csv, i, "num_experts", (double)(r->ep > r->top_k ? r->ep : r->top_k));
        for (int d = 0; d < MEASURED; d++)
            if (!strcmp(distribution, distributions[d])) r->time_s[d] = time_s(csv, i);
    }
    qsort(rows, (size_t)csv->n_rows, sizeof *rows, by_sizes);
    for (int i = 0; i < csv->n_rows; i++) {
        struct expert_row *last = &rows[kept ? kept - 1 : 0];
        if (!kept || by_sizes(last, &rows[i])) {
            rows[kept++] = rows[i];
            continue;
        }
        for (int d = 0; d < MEASURED; d++) last->time_s[d] = fmax(last->time_s[d], rows[i].time_s[d]);
    }
    *n = 0;
    for (int i = 0; i < kept; i++)
        if (rows[i].time_s[0] > 0) rows[(*n)++] = rows[i];
    for (int i = 0; i < *n; i++) {
        int64_t tuned = 1;
        while (2 * tuned <= rows[i].tokens) tuned *= 2;
        rows[i].rows = balanced(&rows[i], rows[i].tokens);
        rows[i].tuned = balanced(&rows[i], tuned);
    }
    accuracy_csv_free(csv);
    return rows;
}

static void experts_free(struct expert_row *rows, int n)
{
    for (int i = 0; i < n; i++) {
        free(rows[i].rows);
        free(rows[i].tuned);
    }
    free(rows);
}

static double experts_s(const double *param, const struct moe_experts_case *c)
{
    struct moe_grouped p;
    memcpy(&p, param, sizeof p);
    return moe_experts_s(&h100, &p, c);
}

/* Every step-th row, from the first on. */
struct expert_rows {
    const struct expert_row *row;
    int n, step;
};

static void experts_predict(void *ctx, const double *param, double *out)
{
    const struct expert_rows *r = ctx;
    for (int i = 0; i < r->n; i++) {
        struct moe_experts_case c = experts_case(&r->row[i * r->step]);
        out[i] = experts_s(param, &c);
    }
}

static void experts_fit(const struct expert_row *rows, int n, int step, double *param)
{
    struct expert_rows r = {rows, (n + step - 1) / step, step};
    double *measured = moe_alloc((size_t)r.n, sizeof *measured);
    for (int i = 0; i < r.n; i++) measured[i] = rows[i * step].time_s[0];
    fit(grouped_params, MOE_GROUPED_N_PARAMS, r.n, measured, experts_predict, &r, param);
    free(measured);
}

/* Bands of tokens. Those of skew are the last. */
static const double expert_edges[] = {16, 1025};
enum { EXPERT_SKEWED = 2 };

/* off: of fitted rows, each predicted from the other half of them. */
static void experts_off(const struct expert_row *rows, int n, struct interval *off)
{
    for (int fold = 0; fold < 4; fold += 2) { /* of rows 0, 4, ... and 2, 6, ... */
        double param[MOE_GROUPED_N_PARAMS];
        experts_fit(rows + 2 - fold, n - 2 + fold, 4, param);
        for (int i = fold; i < n; i += 4) {
            struct moe_experts_case c = experts_case(&rows[i]);
            int band = band_of((double)c.tokens, expert_edges, 2);
            interval_add(off, band, rows[i].time_s[0], experts_s(param, &c));
        }
    }
}

enum { EXPERTS_BAR = 12, SKEW_BAR = 10 }; /* of the medians of all rows */

/* A line for each EP, and one that says where the median is over the bar, which that of all rows hides. */
static void lines_by_ep(struct accuracy *a, const char *op, double bar)
{
    char over[MOE_NAME] = "", band[MOE_NAME];
    for (int ep = 1; ep <= 64; ep *= 2) {
        snprintf(band, sizeof band, "ep %d", ep);
        if (accuracy_line(a, "h100_sxm", op, band, 0) <= bar) continue;
        size_t n = strlen(over);
        snprintf(over + n, sizeof over - n, "%s %d", *over ? "," : "", ep);
    }
    if (*over) printf("  over the bar of %.0f by themselves: ep%s\n", bar, over);
}

void accuracy_experts_h100(struct accuracy *a)
{
    double param[MOE_GROUPED_N_PARAMS];
    struct interval off = {0};
    char band[MOE_NAME];
    int n;
    struct expert_row *rows = experts_read("moe_experts_h100_sxm.csv", &n);
    experts_off(rows, n, &off);
    experts_fit(rows, n, 2, param);
    for (int i = 1; i < n; i += 2) {
        struct moe_experts_case c = experts_case(&rows[i]);
        double s = experts_s(param, &c);
        int at = band_of((double)c.tokens, expert_edges, 2);
        snprintf(band, sizeof band, "ep %d", (int)rows[i].ep);
        accuracy_row(a, "h100_sxm", "experts", "bfloat16", (int)rows[i].ep, 0, band, rows[i].time_s[0], s,
                     s * exp(interval_at(&off, at, 0.1)), s * exp(interval_at(&off, at, 0.9)));
    }
    accuracy_line(a, "h100_sxm", "experts", NULL, EXPERTS_BAR);
    lines_by_ep(a, "experts", EXPERTS_BAR);
    print_params("h100_sxm", "experts", grouped_params, MOE_GROUPED_N_PARAMS, param);
    interval_free(&off);
    experts_free(rows, n);
}

/* ---- skew ---- */

/* A measured time is the mean of MEAN_OF draws. */
enum { SEED = 7, DRAWS = 100, MEAN_OF = 5, MEANS = DRAWS / MEAN_OF };

struct drawn {
    int64_t count;
    int expert;
};

static int by_count(const void *a, const void *b)
{
    const struct drawn *x = a, *y = b;
    if (x->count != y->count) return x->count < y->count ? -1 : 1;
    return x->expert - y->expert;
}

/* order [E]: experts with the fewest rows first. */
static void sort_by_count(const int64_t *count, int64_t E, struct drawn *order)
{
    for (int64_t e = 0; e < E; e++) order[e] = (struct drawn){count[e], (int)e};
    qsort(order, (size_t)E, sizeof *order, by_count);
}

/* No expert keeps more rows than there are tokens; then there are `all`. As the head of this file says. */
static void level(int64_t *count, const struct expert_row *r, int64_t all)
{
    int64_t E = r->n_experts, T = r->tokens, over = 0;
    struct drawn *order = moe_alloc((size_t)E, sizeof *order);
    for (int64_t e = 0; e < E; e++) {
        over += count[e] > T ? count[e] - T : 0;
        count[e] = count[e] > T ? T : count[e];
    }
    sort_by_count(count, E, order);
    for (int64_t i = 0; over; i++) {
        int64_t *own = &count[order[i].expert], more = over < T - *own ? over : T - *own;
        *own += more;
        over -= more;
    }
    for (int64_t e = 0; e < E; e++) all -= count[e];
    sort_by_count(count, E, order);
    for (int64_t i = 0; all; i++) {
        int64_t *own = &count[order[i % E].expert];
        if (all > 0 && *own == T) continue;
        if (all < 0 && *own == 0) { /* from that with the most */
            own = count;
            for (int64_t e = 1; e < E; e++)
                if (count[e] > *own) own = &count[e];
        }
        *own += all > 0 ? 1 : -1;
        all += all > 0 ? -1 : 1;
    }
    free(order);
}

/* count [n_experts]: rows of each expert. Returns the first of the rank with the most. */
static int64_t *power_law(const struct expert_row *r, double exponent, uint64_t stream, int64_t *count)
{
    int64_t E = r->n_experts, n_local = E / r->ep, most = 0, chosen = r->tokens * r->top_k, *found = count;
    double *share = moe_alloc((size_t)E, sizeof *share), sum = 0, b = 1 - exponent;
    double low = 1, high = pow(0.8 * (double)r->tokens, b);
    for (int64_t e = 0; e < E; e++) {
        share[e] = pow((high - low) * moe_uniform(SEED, stream, (uint64_t)e) + low, 1 / b);
        sum += share[e];
    }
    for (int64_t e = 0; e < E; e++) count[e] = (int64_t)rint(share[e] / sum * (double)chosen);
    level(count, r, chosen);
    for (int64_t rank = 0; rank < r->ep; rank++) {
        int64_t all = 0;
        for (int64_t e = 0; e < n_local; e++) all += count[rank * n_local + e];
        if (all <= most) continue;
        most = all;
        found = count + rank * n_local;
    }
    free(share);
    return found;
}

/* Quantiles of the slowdown in means of MEAN_OF draws, 10, 50 and 90 %. stream: of the first draw. */
static void slowdown(const struct expert_row *r, const double *param, double exponent, uint64_t stream,
                     double quantile[3])
{
    int64_t *count = moe_alloc((size_t)r->n_experts, sizeof *count);
    struct moe_experts_case c = experts_case(r);
    double even_s = experts_s(param, &c), mean[MEANS] = {0};
    for (int i = 0; i < MEANS * MEAN_OF; i++) {
        c.rows = power_law(r, exponent, stream++, count);
        mean[i / MEAN_OF] += experts_s(param, &c) / even_s / MEAN_OF;
    }
    free(count);
    for (int i = 0; i < 3; i++) quantile[i] = accuracy_quantile(mean, MEANS, 0.1 + 0.4 * i);
}

void accuracy_skew_h100(struct accuracy *a)
{
    double param[MOE_GROUPED_N_PARAMS];
    struct interval off = {0};
    char band[MOE_NAME];
    int n;
    struct expert_row *rows = experts_read("moe_experts_h100_sxm.csv", &n);
    experts_off(rows, n, &off);
    experts_fit(rows, n, 2, param);
    a->ratios = true;
    double even = (interval_at(&off, EXPERT_SKEWED, 0.9) - interval_at(&off, EXPERT_SKEWED, 0.1)) /
                  sqrt(2); /* of two */
    for (int i = 0; i < n; i++)
        for (int d = 1; d < MEASURED && rows[i].tokens > 1024; d++) {
            if (!(rows[i].time_s[d] > 0)) continue;
            double q[3], measured = rows[i].time_s[d] / rows[i].time_s[0];
            slowdown(&rows[i], param, exponents[d], (uint64_t)(i * MEASURED + d) * DRAWS, q);
            double low = exp(-hypot(log(q[1] / q[0]), even)), high = exp(hypot(log(q[2] / q[1]), even));
            snprintf(band, sizeof band, "ep %d", (int)rows[i].ep);
            accuracy_row(a, "h100_sxm", distributions[d], "bfloat16", (int)rows[i].ep, 0, band,
                         measured * 1e-6, q[1] * 1e-6, q[1] * low * 1e-6, q[1] * high * 1e-6);
        }
    accuracy_line(a, "h100_sxm", NULL, NULL, SKEW_BAR);
    for (int d = 1; d < MEASURED; d++) accuracy_line(a, "h100_sxm", distributions[d], NULL, 0);
    lines_by_ep(a, NULL, SKEW_BAR);
    interval_free(&off);
    experts_free(rows, n);
}
