/* findings.c - see summary.h: from numbers to words. */
#include "reports/summary.h"

#include "sim/cost/calibrate.h"

#include <math.h>

enum { LISTED_LAYERS = 8 };

const char *moe_time_unit(double max_us, double *unit_us)
{
    /* From 999.5 on, three digits would round to 1000. */
    *unit_us = max_us < 999.5 ? 1 : max_us < 999.5e3 ? 1e3 : 1e6;
    return *unit_us < 2 ? "us" : *unit_us < 2e3 ? "ms" : "s";
}

static void write_time(FILE *out, double us, bool with_sign)
{
    double unit_us;
    const char *unit = moe_time_unit(fabs(us), &unit_us);
    fprintf(out, with_sign ? "%+.3g %s" : "%.3g %s", us / unit_us, unit);
}

static int largest(const double *value, int n)
{
    int top = 0;
    for (int i = 1; i < n; i++)
        if (value[i] > value[top]) top = i;
    return top;
}

static void write_routing(const struct moe_summary *m, FILE *out)
{
    const struct moe_matrix *first = &m->first.tokens, *last = &m->last.tokens;
    const int layers = last->n_from, E = last->n_to, top = largest(last->relative, layers * E);
    fprintf(out, "Routing: in step %lld, expert %d of layer %d gets %.2f times the mean load",
            (long long)m->last.step, top % E, top / E, last->relative[top]);
    if (layers > 1) fprintf(out, " (max/mean by layer:");
    for (int l = 0; layers > 1 && l < layers && l < LISTED_LAYERS; l++)
        fprintf(out, " %.2f%s", last->relative[l * E + largest(last->relative + l * E, E)],
                l + 1 < layers ? "," : ")");
    if (layers > LISTED_LAYERS) fprintf(out, " ...)");
    if (m->first.step < m->last.step)
        fprintf(out, "; in step %lld the highest was %.2f times", (long long)m->first.step,
                first->relative[largest(first->relative, layers * E)]);
    fprintf(out, ". A capacity factor of 1 would drop %.1f %% of its rows, one of 1.25 %.1f %%.\n",
            100 * moe_dropped_share(m->last.routing, -1, 1),
            100 * moe_dropped_share(m->last.routing, -1, 1.25));
}

void moe_write_against_best(const struct moe_bars *b, int i, FILE *out)
{
    const struct moe_bar *bar = &b->bars[i], *best = &b->bars[0];
    double more_us[MOE_BAR_PARTS] = {0};
    for (int p = 0; p < b->n_parts; p++) more_us[p] = bar->part_us[p] - best->part_us[p];
    int part = largest(more_us, b->n_parts);
    if (bar->kept_us <= best->kept_us) {
        fprintf(out, i ? "as fast" : "the best");
        return;
    }
    fprintf(out, "%.2f times as long%s; what decides is %s (", bar->kept_us / best->kept_us,
            bar->dropped != best->dropped ? " for as many kept tokens" : "", b->parts[part]);
    write_time(out, more_us[part], true);
    fprintf(out, ", all else ");
    write_time(out, bar->kept_us - best->kept_us - more_us[part], true);
    fprintf(out, ")");
}

/* The best, those as fast, the first slower one and the last. */
static void write_simulated(const struct moe_bars *b, FILE *out)
{
    int next = 1;
    if (!b->n) return;
    const struct moe_bar *best = &b->bars[0];
    fprintf(out, b->n > 1 ? "Simulated: %s is the best of %d: " : "Simulated: %s needs ", best->name, b->n);
    write_time(out, best->step_us, false);
    fprintf(out, " a step, most of it %s (%.0f %%)", b->parts[largest(best->part_us, b->n_parts)],
            100 * best->part_us[largest(best->part_us, b->n_parts)] / best->step_us);
    while (next < b->n && b->bars[next].kept_us <= best->kept_us) next++;
    if (next > 1) fprintf(out, "; as fast: %s", b->bars[1].name);
    if (next > 2) fprintf(out, " and %d more", next - 2);
    for (int i = next; i < b->n; i = i == next && i < b->n - 1 ? b->n - 1 : b->n) {
        fprintf(out, "; %s, %s, needs ", b->bars[i].name, i == next ? "the next" : "the last");
        write_time(out, b->bars[i].step_us, false);
        fprintf(out, ", ");
        moe_write_against_best(b, i, out);
    }
    fprintf(out, ".\n");
}

/* Nothing counts where every phase is short. */
static void write_validated(const struct moe_phases *all, FILE *out)
{
    if (!all->n_counted) return;
    const struct moe_phase *worst = all->items + all->worst;
    fprintf(out, "%s: of the %d phases of %d %% of the step or more ",
            all->fitted ? "Fitted, not predicted" : "Validated", all->n_counted, MOE_COUNTED_PCT);
    fprintf(out, "the median prediction is %.1f %% off, the furthest (%s) ", all->median_error_pct,
            worst->name);
    if (isfinite(worst->error_pct))
        fprintf(out, "%+.1f %%", worst->error_pct);
    else
        fprintf(out, "was not measured at all");
    fprintf(out, "; the step %+.1f %%.\n", all->items[0].error_pct);
}

static void write_measured(const struct moe_summary *m, FILE *out)
{
    const struct moe_bar *mean = &m->measured.bars[0];
    const int n = m->measured.n_parts; /* the last three: collectives, waiting, rest */
    fprintf(out, "Measured: a step takes ");
    write_time(out, mean->step_us, false);
    fprintf(out, " here (median of %lld), of which collectives are %.0f %% and waiting for others %.0f %%",
            (long long)m->info.steps_complete, 100 * mean->part_us[n - 3] / mean->step_us,
            100 * mean->part_us[n - 2] / mean->step_us);
    if (isfinite(m->info.first_loss) && isfinite(m->info.last_loss))
        fprintf(out, "; the loss went from %.3f to %.3f nats a byte", m->info.first_loss, m->info.last_loss);
    fprintf(out, ".\n");
}

void moe_summary_findings(const struct moe_summary *m, FILE *out)
{
    write_routing(m, out);
    write_simulated(&m->simulated, out);
    write_measured(m, out);
    write_validated(&m->phases, out);
}
