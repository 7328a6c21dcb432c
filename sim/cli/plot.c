/* plot.c - measured.h's figure, drawn by gnuplot in a scratch folder beside its place. */
#include "sim/cli/measured.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int order(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

static int by_line(const void *a, const void *b)
{
    const struct moe_nccl_case *x = &((const struct moe_nccl_row *)a)->c,
                               *y = &((const struct moe_nccl_row *)b)->c;
    if (x->kind != y->kind) return order(x->kind, y->kind);
    if (x->ranks != y->ranks) return order(x->ranks, y->ranks);
    if (x->type_bytes != y->type_bytes) return order(x->type_bytes, y->type_bytes);
    return x->is_float != y->is_float ? x->is_float - y->is_float : order(x->bytes, y->bytes);
}

/* A block of data for each collective and number of GPUs, a blank line between the types. */
static void write_data(FILE *f, const struct moe_nccl_row *row, int n, const struct moe_nccl *p)
{
    for (int i = 0; i < n; i++) {
        const struct moe_nccl_case *c = &row[i].c, *last = i ? &row[i - 1].c : NULL;
        bool same = last && last->kind == c->kind && last->ranks == c->ranks;
        if (!same) fprintf(f, "%s$gpus%d_%d << EOD\n", last ? "EOD\n" : "", c->kind, c->ranks);
        if (same && (last->type_bytes != c->type_bytes || last->is_float != c->is_float)) fputc('\n', f);
        fprintf(f, "%lld %.4f %.4f\n", (long long)c->bytes, row[i].time_s * 1e6, moe_nccl_s(p, c) * 1e6);
    }
    fputs("EOD\n", f);
}

static void write_script(FILE *f, const struct moe_nccl_row *row, int n, const struct moe_nccl *p)
{
    static const char *const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7"};
    int colour = 0;
    write_data(f, row, n, p);
    fputs("set terminal svg size 960, 720 dynamic noenhanced font 'DejaVu Sans,12'\n"
          "set output 'plot.svg'\nset multiplot layout 2, 2\nset logscale x 2\nset logscale y 10\n"
          "set key top left Left reverse\nset grid lc rgb '#e4e4e4' lt 1\n"
          "set xtics ('1 KiB' 1024, '64 KiB' 65536, '4 MiB' 4194304, '256 MiB' 268435456, '16 GiB' "
          "17179869184)\n"
          "set ylabel 'us; circles measured, lines fitted'\n",
          f);
    for (int i = 0; i < n; i++) {
        const struct moe_nccl_case *c = &row[i].c, *last = i ? &row[i - 1].c : NULL;
        bool panel = !last || last->kind != c->kind;
        if (!panel && last->ranks == c->ranks) continue;
        colour = panel ? 0 : (colour + 1) % 4;
        if (panel) fprintf(f, "\nset title '%s'\nplot ", moe_collective_text[c->kind]);
        fprintf(f,
                "%s$gpus%d_%d using 1:2 with points pt 6 ps 0.5 lc rgb '%s' notitle, '' using 1:3 with lines "
                "lw 1.5 lc rgb '%s' title '%d GPUs'",
                panel ? "" : ", ", c->kind, c->ranks, colours[colour], colours[colour], c->ranks);
    }
    fputs("\nunset multiplot\nset output\n", f);
}

int moe_cli_plot_rows(const char *path, const struct moe_nccl_row *row, int n, const struct moe_nccl *p)
{
    char dir[PATH_MAX], script[PATH_MAX + 16], drawn[PATH_MAX + 16];
    struct moe_nccl_row *sorted = moe_alloc((size_t)n, sizeof *sorted);
    if (snprintf(dir, sizeof dir, "%s.XXXXXX", path) >= PATH_MAX || !mkdtemp(dir)) {
        free(sorted);
        return moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    }
    snprintf(script, sizeof script, "%s/plot.gp", dir);
    snprintf(drawn, sizeof drawn, "%s/plot.svg", dir);
    memcpy(sorted, row, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, by_line);
    FILE *f = fopen(script, "w");
    int err = MOE_OK;
    if (f) write_script(f, sorted, n, p);
    if (!f || ferror(f) | fclose(f))
        err = moe_fail(MOE_EFAILED, "%s: not written: %s", script, strerror(errno));
    if (err >= 0) err = moe_program_gnuplot("plot.gp", dir);
    if (err >= 0 && rename(drawn, path) < 0) err = moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    unlink(script);
    unlink(drawn);
    rmdir(dir);
    free(sorted);
    return err;
}
