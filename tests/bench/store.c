/* How fast the trace store takes routing, and how large it gets: 2^20 tokens x top-8 x 16 layers in 16 steps
 * of 4 ranks, against a plain file of the same bytes that write(2) and fsync put beside it.
 * Usage: bench_store FOLDER; the files are removed. */
#include "traces/store.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 1 << 20, TOP_K = 8, LAYERS = 16, STEPS = 16, RANKS = 4, T = TOKENS / STEPS / RANKS };
static const double blob_bytes = 2.0 * TOKENS * TOP_K * LAYERS;

static void must(bool ok, const char *what)
{
    if (ok) return;
    perror(what);
    exit(1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double write_store(const char *path, const int32_t *ids)
{
    struct moe_store *s;
    double start_s = now_s();
    must(moe_store_open(path, MOE_STORE_CREATE, &s) == MOE_OK, moe_error());
    for (int step = 0; step < STEPS; step++) {
        must(moe_store_begin(s) == MOE_OK, moe_error());
        for (int i = 0; i < LAYERS * RANKS; i++)
            must(moe_store_add_routing(s, step, i % LAYERS, i / LAYERS, T, TOP_K, ids) == MOE_OK,
                 moe_error());
        must(moe_store_commit(s) == MOE_OK, moe_error());
    }
    moe_store_close(s);
    return now_s() - start_s;
}

static double write_plain(const char *path, const int32_t *ids)
{
    const size_t n = (size_t)T * TOP_K * 2;
    double start_s = now_s();
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    must(fd >= 0, path);
    for (int i = 0; i < STEPS * LAYERS * RANKS; i++) must(write(fd, ids, n) == (ssize_t)n, path);
    must(fsync(fd) == 0 && close(fd) == 0, path);
    return now_s() - start_s;
}

int main(int argc, char **argv)
{
    must(argc == 2 && chdir(argv[1]) == 0, "usage: bench_store FOLDER");
    int32_t *ids = moe_alloc((size_t)T * TOP_K, sizeof *ids);
    for (int i = 0; i < T * TOP_K; i++) ids[i] = (int32_t)(256 * moe_uniform(1, 0, (uint64_t)i));
    struct stat st;
    for (int i = 0; i < 3; i++) {
        double plain_s = write_plain("plain", ids), store_s = write_store("store.db", ids);
        must(stat("store.db", &st) == 0, "store.db");
        printf("store %.0f MB/s, plain write and fsync %.0f MB/s; %.1f MB on disk, %.4f bytes a byte\n",
               blob_bytes / store_s * 1e-6, blob_bytes / plain_s * 1e-6, (double)st.st_size * 1e-6,
               (double)st.st_size / blob_bytes);
    }
    unlink("plain");
    unlink("store.db");
    free(ids);
    return 0;
}
