/* combine.c - see combine.h. A function that adds one row knows its types; what walks over
 * the rows does not. */
#include "kernels/combine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct job {
    const struct moe_combine *c;
    void (*row)(const struct job *j, int64_t i, int64_t from); /* choice i, whose row begins at `from` */
    void (*part)(const struct job *j, int64_t first, int64_t end);
    const float *rows32;
    const moe_bf16 *rows16; /* one of the two */
    float *sum32, *apart32;
    moe_bf16 *sum16, *apart16;
};

/* ---- threads ---- */

static int64_t checked(const char *what, int64_t index, int64_t n)
{
    if (index < 0 || index >= n) {
        fprintf(stderr, "moesim: bug: combine: %s %lld is not in [0, %lld)\n", what, (long long)index,
                (long long)n);
        abort();
    }
    return index;
}

struct share {
    const struct job *job;
    pthread_barrier_t *all_here; /* a thread that began earlier would be done before the last begins */
    int64_t first, end;
};

static void *run_share(void *arg)
{
    const struct share *s = arg;
    pthread_barrier_wait(s->all_here);
    s->job->part(s->job, s->first, s->end);
    return NULL;
}

/* part(0..n-1), by n_threads at the same time. */
static void run(const struct job *j, int64_t n)
{
    int P = j->c->n_threads;
    if (P <= 1) {
        j->part(j, 0, n);
        return;
    }
    pthread_t *threads = calloc((size_t)P, sizeof *threads);
    struct share *shares = calloc((size_t)P, sizeof *shares);
    pthread_barrier_t all_here;
    int err = threads && shares ? pthread_barrier_init(&all_here, NULL, (unsigned)P) : -1;
    for (int i = 0; i < P && !err; i++) {
        shares[i] = (struct share){j, &all_here, n * i / P, n * (i + 1) / P};
        err = pthread_create(&threads[i], NULL, run_share, &shares[i]);
    }
    if (err) { /* those that began wait for the others, who will not come */
        fprintf(stderr, "moesim: combine: no %d threads\n", P);
        abort();
    }
    for (int i = 0; i < P; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&all_here);
    free(shares);
    free(threads);
}

/* The rows that arrive at places first..end-1, one after the other. */
static void arrive(const struct job *j, int64_t first, int64_t end)
{
    const struct moe_combine *c = j->c;
    for (int64_t a = first; a < end; a++) {
        int64_t i = checked("arrival", c->arrival[a], c->T * c->K);
        if (c->slot[i] != -1) j->row(j, i, checked("slot", c->slot[i], c->n) * c->H);
    }
}

/* ---- scatter-add ---- */

static moe_bf16 add_bf16(moe_bf16 a, moe_bf16 b)
{
    return moe_bf16_from_float(moe_bf16_to_float(a) + moe_bf16_to_float(b));
}

/* The new sum goes in only where the old one still stands, bit for bit, so that NaN ends the loop too.
 * Nothing else is told by a sum: the order of other memory does not matter until the threads are joined. */
static void race_f32(float *to, float value)
{
    float old, sum;
    __atomic_load(to, &old, __ATOMIC_RELAXED);
    do sum = old + value;
    while (!__atomic_compare_exchange(to, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static void race_bf16(moe_bf16 *to, moe_bf16 value)
{
    moe_bf16 old = __atomic_load_n(to, __ATOMIC_RELAXED), sum;
    do sum = add_bf16(old, value);
    while (!__atomic_compare_exchange_n(to, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

static void add_row_f32(const struct job *j, int64_t i, int64_t from)
{
    int64_t H = j->c->H;
    const float *row = j->rows32 + from;
    float *to = j->sum32 + i / j->c->K * H, w = j->c->weight[i];
    if (j->c->n_threads > 1)
        for (int64_t h = 0; h < H; h++) race_f32(&to[h], w * row[h]);
    else
        for (int64_t h = 0; h < H; h++) to[h] += w * row[h];
}

static void add_row_wide(const struct job *j, int64_t i, int64_t from)
{
    int64_t H = j->c->H;
    const moe_bf16 *row = j->rows16 + from;
    float *to = j->sum32 + i / j->c->K * H, w = j->c->weight[i];
    if (j->c->n_threads > 1)
        for (int64_t h = 0; h < H; h++) race_f32(&to[h], w * moe_bf16_to_float(row[h]));
    else
        for (int64_t h = 0; h < H; h++) to[h] += w * moe_bf16_to_float(row[h]);
}

static void add_row_bf16(const struct job *j, int64_t i, int64_t from)
{
    int64_t H = j->c->H;
    const moe_bf16 *row = j->rows16 + from;
    moe_bf16 *to = j->sum16 + i / j->c->K * H;
    float w = j->c->weight[i];
    if (j->c->n_threads > 1)
        for (int64_t h = 0; h < H; h++) race_bf16(&to[h], moe_bf16_from_float(w * moe_bf16_to_float(row[h])));
    else
        for (int64_t h = 0; h < H; h++)
            to[h] = add_bf16(to[h], moe_bf16_from_float(w * moe_bf16_to_float(row[h])));
}

static void scatter(struct job *j)
{
    j->part = arrive;
    run(j, j->c->T * j->c->K);
}

void moe_combine_scatter_f32(const struct moe_combine *c, const float *rows, float *y, bool add)
{
    if (!add) memset(y, 0, (size_t)(c->T * c->H) * sizeof *y);
    scatter(&(struct job){.c = c, .row = add_row_f32, .rows32 = rows, .sum32 = y});
}

void moe_combine_scatter_bf16(const struct moe_combine *c, const moe_bf16 *rows, moe_bf16 *y, bool add)
{
    if (!add) memset(y, 0, (size_t)(c->T * c->H) * sizeof *y);
    scatter(&(struct job){.c = c, .row = add_row_bf16, .rows16 = rows, .sum16 = y});
}

void moe_combine_scatter_wide(const struct moe_combine *c, const moe_bf16 *rows, float *sum, moe_bf16 *y,
                              bool add)
{
    for (int64_t i = 0; i < c->T * c->H; i++) sum[i] = add ? moe_bf16_to_float(y[i]) : 0;
    scatter(&(struct job){.c = c, .row = add_row_wide, .rows16 = rows, .sum32 = sum});
    for (int64_t i = 0; i < c->T * c->H; i++) y[i] = moe_bf16_from_float(sum[i]);
}

/* ---- unsort + weighted sum ---- */

static void place_row_f32(const struct job *j, int64_t i, int64_t from)
{
    memcpy(j->apart32 + i * j->c->H, j->rows32 + from, (size_t)j->c->H * sizeof(float));
}

static void place_row_bf16(const struct job *j, int64_t i, int64_t from)
{
    memcpy(j->apart16 + i * j->c->H, j->rows16 + from, (size_t)j->c->H * sizeof(moe_bf16));
}

static void sum_f32(const struct job *j, int64_t first, int64_t end)
{
    int64_t H = j->c->H, K = j->c->K;
    for (int64_t i = first * K; i < end * K; i++) {
        if (j->c->slot[i] == -1) continue;
        const float *row = j->apart32 + i * H;
        float *to = j->sum32 + i / K * H, w = j->c->weight[i];
        for (int64_t h = 0; h < H; h++) to[h] += w * row[h];
    }
}

/* Some elements of a token at a time, whose float sums need no memory. */
static void sum_bf16(const struct job *j, int64_t first, int64_t end)
{
    enum { BLOCK = 128 };
    int64_t H = j->c->H, K = j->c->K;
    for (int64_t t = first; t < end; t++)
        for (int64_t from = 0; from < H; from += BLOCK) {
            int64_t n = H - from < BLOCK ? H - from : BLOCK;
            moe_bf16 *to = j->sum16 + t * H + from;
            float sum[BLOCK];
            for (int64_t h = 0; h < n; h++) sum[h] = moe_bf16_to_float(to[h]);
            for (int64_t i = t * K; i < (t + 1) * K; i++) {
                if (j->c->slot[i] == -1) continue;
                const moe_bf16 *row = j->apart16 + i * H + from;
                float w = j->c->weight[i];
                for (int64_t h = 0; h < n; h++) sum[h] += w * moe_bf16_to_float(row[h]);
            }
            for (int64_t h = 0; h < n; h++) to[h] = moe_bf16_from_float(sum[h]);
        }
}

/* No row is summed before all are in their places. */
static void unsort(struct job *j, void (*sum)(const struct job *j, int64_t first, int64_t end))
{
    j->part = arrive;
    run(j, j->c->T * j->c->K);
    j->part = sum;
    run(j, j->c->T);
}

void moe_combine_unsort_f32(const struct moe_combine *c, const float *rows, float *apart, float *y, bool add)
{
    if (!add) memset(y, 0, (size_t)(c->T * c->H) * sizeof *y);
    unsort(&(struct job){.c = c, .row = place_row_f32, .rows32 = rows, .apart32 = apart, .sum32 = y},
           sum_f32);
}

void moe_combine_unsort_bf16(const struct moe_combine *c, const moe_bf16 *rows, moe_bf16 *apart, moe_bf16 *y,
                             bool add)
{
    if (!add) memset(y, 0, (size_t)(c->T * c->H) * sizeof *y);
    unsort(&(struct job){.c = c, .row = place_row_bf16, .rows16 = rows, .apart16 = apart, .sum16 = y},
           sum_bf16);
}
