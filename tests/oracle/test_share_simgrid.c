/* moe_share against SimGrid: random flows of random sizes, all started at once, until the last one ends.
 * Compared are completion times, so every solve between two completions counts. SEED= in the environment
 * draws other cases. */
#include "sim/share.h"
#include "tests/oracle/simgrid_share.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { CASES = 200, LINKS = 24, FLOWS = 64, PATH = 5 };

struct instance {
    int n_links, n_flows;
    double cap[LINKS], bytes[FLOWS], rate[FLOWS]; /* rate: a flow's own, or 0 */
    int first[FLOWS + 1], path[FLOWS * PATH];
};

/* 8 to 64 flows over 2 to 5 of 6 to 24 links of 1 to 100 GB/s, 1 MB to 1 GB each; half of them have a rate of
 * their own, 0.03 to 10 GB/s. */
static void draw(struct instance *x, uint64_t seed, uint64_t stream)
{
    uint64_t at = 0;
#define DRAW(n) ((int)(moe_uniform(seed, stream, at++) * (n)))
#define DRAW_LOG(low, high) ((low)*pow((double)(high) / (low), moe_uniform(seed, stream, at++)))
    memset(x, 0, sizeof *x);
    x->n_links = 6 + DRAW(LINKS - 5);
    x->n_flows = 8 + DRAW(FLOWS - 7);
    for (int l = 0; l < x->n_links; l++) x->cap[l] = DRAW_LOG(1e9, 1e11);
    for (int f = 0; f < x->n_flows; f++) {
        int *path = x->path + x->first[f], n = 2 + DRAW(PATH - 1);
        for (int i = 0; i < n; i++) {
            path[i] = DRAW(x->n_links);
            for (int j = 0; j < i; j++)
                if (path[j] == path[i]) {
                    i--; /* again */
                    break;
                }
        }
        x->first[f + 1] = x->first[f] + n;
        x->bytes[f] = round(DRAW_LOG(1e6, 1e9));
        if (DRAW(2)) x->rate[f] = DRAW_LOG(3e7, 1e10);
    }
#undef DRAW
#undef DRAW_LOG
}

/* Solves, goes on to the next completion, takes the flow out, again. Returns the number of links that hold
 * flows back at first. */
static int fluid(const struct instance *x, double *finish_s)
{
    struct moe_share s;
    double left[FLOWS], now = 0;
    int n_levels = 0;
    moe_share_init(&s, x->n_links, x->cap);
    for (int f = 0; f < x->n_flows; f++) {
        left[f] = x->bytes[f];
        finish_s[f] = 0;
        int path[PATH + 1], n_path = x->first[f + 1] - x->first[f];
        memcpy(path, x->path + x->first[f], (size_t)n_path * sizeof *path);
        if (x->rate[f] > 0) path[n_path++] = moe_share_add_limit(&s, x->rate[f]);
        moe_share_add(&s, n_path, path);
    }
    for (int n = 0; n < x->n_flows; n++) {
        double step = INFINITY, rate[FLOWS];
        int next = -1;
        moe_share_solve(&s);
        for (int l = 0; n == 0 && l < x->n_links; l++) n_levels += s.link[l].level > 0;
        for (int f = 0; f < x->n_flows; f++) {
            if (finish_s[f] > 0) continue;
            rate[f] = s.link[s.flow[f].server].level;
            if (left[f] / rate[f] < step) step = left[next = f] / rate[f];
        }
        now += step;
        for (int f = 0; f < x->n_flows; f++)
            if (!(finish_s[f] > 0)) left[f] = fmax(0, left[f] - rate[f] * step);
        finish_s[next] = now;
        moe_share_remove(&s, next);
    }
    moe_share_free(&s);
    return n_levels;
}

static void ask_simgrid(const struct instance *x, double *shared)
{
    pid_t child = fork();
    if (child == 0) {
        simgrid_share(x->n_links, x->cap, x->n_flows, x->first, x->path, x->bytes, x->rate, shared);
        _exit(0); /* neither the tests nor SimGrid's leaks go on here */
    }
    int status = -1;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    assert_int_equal(status, 0);
}

static void completion_times_agree(void **state)
{
    (void)state;
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : 1;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    double *simgrid =
        mmap(NULL, FLOWS * sizeof *simgrid, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(simgrid, MAP_FAILED);
    double worst = 0;
    int n_levels = 0;
    for (uint64_t stream = 0, n = 0; n < CASES; stream++) {
        struct instance x;
        double finish_s[FLOWS];
        draw(&x, seed, stream);
        int levels = fluid(&x, finish_s);
        if (levels < 3) continue;
        n++;
        n_levels += levels;
        memset(simgrid, 0, FLOWS * sizeof *simgrid);
        ask_simgrid(&x, simgrid);
        for (int f = 0; f < x.n_flows; f++) {
            worst = fmax(worst, fabs(finish_s[f] - simgrid[f]) / simgrid[f]);
            if (!(worst <= 1e-6))
                fail_msg("case %llu, flow %d of %d: %.17g s, SimGrid %.17g s", (unsigned long long)stream, f,
                         x.n_flows, finish_s[f], simgrid[f]);
        }
    }
    print_message("%d cases, %.1f levels each, largest difference %.1e\n", CASES, (double)n_levels / CASES,
                  worst);
    munmap(simgrid, FLOWS * sizeof *simgrid);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(completion_times_agree)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
