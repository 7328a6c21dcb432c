/* findings.c - see summary.h: from numbers to words. */
#include "reports/summary.h"

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

static double top_of_layer(const struct moe_summary *m, const struct moe_load *load, int layer)
{
    return load->relative[layer * m->scenario->experts + load->top[layer]];
}

static int top_layer(const struct moe_summary *m, const struct moe_load *load)
{
    int top = 0;
    for (int l = 1; l < m->scenario->layers; l++)
        if (top_of_layer(m, load, l) > top_of_layer(m, load, top)) top = l;
    return top;
}

static void write_routing(const struct moe_summary *m, FILE *out)
{
    const int layer = top_layer(m, &m->last), layers = (int)m->scenario->layers;
    fprintf(out, "Routing: in step %lld, expert %d of layer %d gets %.2f times the mean load",
            (long long)m->last.step, m->last.top[layer], layer, top_of_layer(m, &m->last, layer));
    if (layers > 1) fprintf(out, " (max/mean by layer:");
    for (int l = 0; layers > 1 && l < layers && l < LISTED_LAYERS; l++)
        fprintf(out, " %.2f%s", top_of_layer(m, &m->last, l), l + 1 < layers ? "," : ")");
    if (layers > LISTED_LAYERS) fprintf(out, " ...)");
    if (m->first.step < m->last.step)
        fprintf(out, "; in step %lld the highest was %.2f times", (long long)m->first.step,
                top_of_layer(m, &m->first, top_layer(m, &m->first)));
    fprintf(out, ".\n");
}

static int largest(const double *part_us, int n)
{
    int top = 0;
    for (int i = 1; i < n; i++)
        if (part_us[i] > part_us[top]) top = i;
    return top;
}

/* The fastest result, and the next one, or -1; the first of equals. */
static void rank_results(const struct moe_bars *b, int *best, int *second)
{
    *best = 0;
    *second = -1;
    for (int i = 1; i < b->n; i++) {
        if (b->bars[i].step_us < b->bars[*best].step_us) {
            *second = *best;
            *best = i;
        } else if (*second < 0 || b->bars[i].step_us < b->bars[*second].step_us) {
            *second = i;
        }
    }
}

static void write_simulated(const struct moe_bars *b, FILE *out)
{
    int i, j;
    if (!b->n) return;
    rank_results(b, &i, &j);
    const struct moe_bar *best = &b->bars[i], *second = j < 0 ? NULL : &b->bars[j];
    fprintf(out, "Simulated: %s %s ", best->name, second ? "is the fastest:" : "needs");
    write_time(out, best->step_us, false);
    fprintf(out, " a step");
    if (!second) {
        int part = largest(best->part_us, b->n_parts);
        fprintf(out, ", most of it %s (%.0f %%).\n", b->parts[part],
                100 * best->part_us[part] / best->step_us);
        return;
    }
    double more_us[MOE_BAR_PARTS] = {0}, total_us = second->step_us - best->step_us;
    for (int p = 0; p < b->n_parts; p++) more_us[p] = second->part_us[p] - best->part_us[p];
    fprintf(out, "; %s, the next of %d, needs ", second->name, b->n);
    write_time(out, second->step_us, false);
    int part = largest(more_us, b->n_parts);
    if (total_us > 0) {
        fprintf(out, ", %.2f times as long; what decides is %s (", second->step_us / best->step_us,
                b->parts[part]);
        write_time(out, more_us[part], true);
        fprintf(out, ", all else ");
        write_time(out, total_us - more_us[part], true);
        fprintf(out, ")");
    }
    fprintf(out, ".\n");
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
}
