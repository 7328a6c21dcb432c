/* report.c - see report.h. The page's frame is page.html, in which @name@ stands for a part written here; the
 * figures are drawn by the .gp files. All are read from MOESIM_REPORTS_DIR at run time.
 *
 * Everything is written into a scratch folder inside the target and moved when complete. */
#include "reports/report.h"

#include "reports/summary.h"
#include "sim/schedule.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

enum { MAX_PHASES = 12 }; /* pairs of bars; the CSV has all */

/* A figure: NAME.csv, and NAME.svg and NAME.png that `script` makes of it. `data` is where `of` says in
 * struct moe_summary. */
struct figure {
    const char *name, *script;
    size_t of;
    /* Writes the CSV. Result: its rows; without any there is no figure. */
    int (*csv)(const struct moe_summary *m, const void *data, FILE *f);
    /* Writes the arguments of the script that follow the name; NULL: none. */
    void (*args)(const struct moe_summary *m, const void *data, FILE *f);
    const char *absent; /* what the page says instead */
};

struct page {
    const struct moe_summary *m;
    const char *dir; /* the scratch folder */
    unsigned drawn;  /* bit i: figures[i] */
    FILE *out;
    int err;
};

/* ---- files ---- */

static char *join(const char *dir, const char *name, const char *suffix)
{
    char *path;
    int n = asprintf(&path, "%s/%s%s", dir, name, suffix);
    moe_assert(n >= 0);
    return path;
}

static int open_file(const char *dir, const char *name, const char *suffix, const char *mode, FILE **out)
{
    char *path = join(dir, name, suffix);
    *out = fopen(path, mode);
    int err = *out ? MOE_OK : moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    free(path);
    return err;
}

static int close_written(FILE *f, const char *dir)
{
    bool bad = ferror(f);
    if (fclose(f) == 0 && !bad) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: not written: %s", dir, strerror(errno));
}

static int remove_file(const char *dir, const char *name, const char *suffix)
{
    char *path = join(dir, name, suffix);
    int err = MOE_OK;
    if (unlink(path) < 0 && errno != ENOENT) err = moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    free(path);
    return err;
}

/* ---- figures: the data ---- */

static int write_matrix(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_matrix *x = data;
    const bool moves = x == &m->traffic;
    fprintf(f, "step,%s,%s,%s\n", x->from, x->to, moves ? "rows,relative,bytes" : "tokens,relative");
    for (int i = 0; i < x->n_from * x->n_to; i++) {
        fprintf(f, "%" PRId64 ",%d,%d,%" PRId64 ",%.6g", x == &m->first.tokens ? m->first.step : m->last.step,
                i / x->n_to, i % x->n_to, x->count[i], x->relative[i]);
        if (moves) fprintf(f, ",%" PRId64, x->count[i] * m->row_bytes);
        fputc('\n', f);
    }
    return x->n_from * x->n_to;
}

static int write_bars(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_bars *b = data;
    const bool ranked = b == &m->simulated;
    fprintf(f, "bar,step");
    for (int i = 0; i < b->n_parts; i++) fprintf(f, ",%s", b->parts[i]);
    fputs(ranked ? ",dropped,to_best" : "", f);
    for (int n = 0; n < b->n; n++) {
        const struct moe_bar *bar = &b->bars[n];
        fputs("\n\"", f);
        for (const char *c = bar->name; *c; c++) fputc(*c == '"' ? '\'' : *c, f);
        fprintf(f, "\",%.3f", bar->step_us);
        for (int i = 0; i < b->n_parts; i++) fprintf(f, ",%.3f", bar->part_us[i]);
        if (ranked) fprintf(f, ",%.9g,%.6g", bar->dropped, bar->kept_us / b->bars[0].kept_us);
    }
    fputc('\n', f);
    return b->n;
}

static int write_phases(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_phases *all = data;
    (void)m;
    fputs("phase,measured_us,predicted_us,error_pct,share_pct\n", f);
    for (int i = 0; i < all->n; i++) {
        const struct moe_phase *p = &all->items[i];
        fprintf(f, "\"%s\",%.3f,%.3f,%.2f,%.2f\n", p->name, p->measured_us, p->predicted_us, p->error_pct,
                p->share_pct);
    }
    return all->n;
}

/* Factors are eighths: exact numbers. The worst layer of the last step is another one for each factor. */
static int write_drop(const struct moe_summary *m, const void *data, FILE *f)
{
    enum { FROM = 4, TO = 24 };
    (void)data;
    fprintf(f, "capacity,step %" PRId64 " (first),step %" PRId64 " (last),its worst layer\n", m->first.step,
            m->last.step);
    for (int i = FROM; i <= TO; i++) {
        double worst = 0;
        for (int l = 0; l < m->scenario->layers; l++)
            worst = fmax(worst, moe_dropped_share(m->last.routing, l, i / 8.0));
        fprintf(f, "%.3f,%.4f,%.4f,%.4f\n", i / 8.0, 100 * moe_dropped_share(m->first.routing, -1, i / 8.0),
                100 * moe_dropped_share(m->last.routing, -1, i / 8.0), 100 * worst);
    }
    return TO - FROM + 1;
}

/* ---- figures: how they are drawn ---- */

/* Both steps have the same scale. */
static void matrix_args(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_matrix *x = data;
    const bool moves = x == &m->traffic;
    fprintf(f, " %d %d %.6f '%s' '%s' '%s'", x->n_from, x->n_to,
            moves ? x->max : fmax(m->first.tokens.max, m->last.tokens.max), x->from, x->to,
            moves ? "rows" : "relative");
}

static const char *unit_of(const struct moe_bars *b, double *unit_us)
{
    double max_us = 0;
    for (int i = 0; i < b->n_shown; i++) max_us = fmax(max_us, fmax(b->bars[i].step_us, b->bars[i].kept_us));
    return moe_time_unit(max_us, unit_us);
}

static void bar_args(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_bars *b = data;
    double unit_us;
    const char *unit = unit_of(b, &unit_us);
    fprintf(f, " %d %d %.0f '%s' %d", b->n_shown, b->n_parts, unit_us, unit, b == &m->simulated);
}

/* Without the step, beside which its phases would be short. */
static void phase_args(const struct moe_summary *m, const void *data, FILE *f)
{
    const struct moe_phases *all = data;
    double max_us = 0, unit_us;
    (void)m;
    for (int i = 1; i < all->n; i++)
        max_us = fmax(max_us, fmax(all->items[i].measured_us, all->items[i].predicted_us));
    const char *unit = moe_time_unit(max_us, &unit_us);
    fprintf(f, " %d %.0f '%s'", all->n - 1 < MAX_PHASES ? all->n - 1 : MAX_PHASES, unit_us, unit);
}

#define OF(member) offsetof(struct moe_summary, member)
static const struct figure figures[] = {
    {"load_first", "heat", OF(first.tokens), write_matrix, matrix_args, NULL},
    {"load_last", "heat", OF(last.tokens), write_matrix, matrix_args, NULL},
    {"traffic", "heat", OF(traffic), write_matrix, matrix_args, NULL},
    {"dropped", "lines", OF(last), write_drop, NULL, NULL},
    {"measured_us", "bars", OF(measured), write_bars, bar_args, NULL},
    {"simulated_us", "bars", OF(simulated), write_bars, bar_args,
     "Nothing simulated yet: <code>moesim compare</code> adds results."},
    {"predicted_us", "pairs", OF(phases), write_phases, phase_args,
     "Not validated: hand the table of <code>moesim validate -o</code> to <code>moesim report "
     "--validate</code>."},
};

static const void *data_of(const struct figure *figure, const struct moe_summary *m)
{
    return (const char *)m + figure->of;
}

/* Writes and draws each figure that has data. The script draws the SVG and says `height`; the PNG is the same
 * at twice the size. */
static int draw(struct page *p, int (*gnuplot)(const char *script, const char *dir))
{
    FILE *gp, *csv;
    MOE_TRY(open_file(p->dir, "figures", ".gp", "w", &gp));
    for (int i = 0; i < COUNT(figures); i++) {
        const struct figure *g = &figures[i];
        MOE_TRY(open_file(p->dir, g->name, ".csv", "w", &csv));
        int rows = g->csv(p->m, data_of(g, p->m), csv);
        MOE_TRY(close_written(csv, p->dir));
        if (!rows) {
            MOE_TRY(remove_file(p->dir, g->name, ".csv"));
            continue;
        }
        p->drawn |= 1u << i;
        fprintf(gp, "call '" MOESIM_REPORTS_DIR "/%s.gp' '%s'", g->script, g->name);
        if (g->args) g->args(p->m, data_of(g, p->m), gp);
        fprintf(gp,
                "\nset terminal pngcairo size 1320, 2 * height noenhanced font 'DejaVu Sans,13' "
                "fontscale 1.5 linewidth 2\nset output '%s.png'\nreplot\n",
                g->name);
    }
    MOE_TRY(close_written(gp, p->dir));
    return gnuplot("figures.gp", p->dir);
}

/* ---- parts of the page ---- */

static void put_text(FILE *out, const char *text)
{
    for (; *text; text++) {
        const char *entity = *text == '<' ? "&lt;" : *text == '>' ? "&gt;" : *text == '&' ? "&amp;" : NULL;
        if (entity)
            fputs(entity, out);
        else
            fputc(*text, out);
    }
}

/* An SVG without what only stands in the way inside a page: the XML head, gnuplot's titles, its unused point
 * symbols, whose ids would occur once per figure. */
static void put_figure(struct page *p, int i)
{
    char *line = NULL;
    size_t size = 0;
    bool inside = false, symbols = false;
    FILE *f;
    if (!(p->drawn & 1u << i)) {
        fprintf(p->out, "<p>%s</p>\n", figures[i].absent);
        return;
    }
    int err = open_file(p->dir, figures[i].name, ".svg", "r", &f);
    if (err < 0) {
        p->err = err;
        return;
    }
    while (getline(&line, &size, f) >= 0) {
        if (strncmp(line, "<svg", 4) == 0) inside = true;
        if (strncmp(line, "<defs>", 6) == 0) symbols = true;
        bool title = strncmp(line, "<title>", 7) == 0 || strncmp(line, "<desc>", 6) == 0;
        if (strstr(line, "id=\"gnuplot_canvas\""))
            fputs("<g>\n", p->out);
        else if (inside && !symbols && !title && *line != '\n')
            fputs(line, p->out);
        if (strncmp(line, "</defs>", 7) == 0) symbols = false;
    }
    free(line);
    fclose(f);
}

/* Of ranked ones no parts, for which there is no room beside the words. */
static void put_table(struct page *p, const struct moe_bars *b)
{
    double unit_us;
    const char *unit = unit_of(b, &unit_us);
    const bool ranked = b == &p->m->simulated;
    const int n_parts = ranked ? 0 : b->n_parts;
    if (!b->n) return;
    fprintf(p->out, "<div class=\"wide\"><table>\n<tr><th>%s</th><th class=\"n\">step</th>", unit);
    for (int i = 0; i < n_parts; i++) fprintf(p->out, "<th class=\"n\">%s</th>", b->parts[i]);
    fputs(ranked ? "<th class=\"n\">dropped</th><th>against the best</th>" : "", p->out);
    for (int n = 0; n < b->n_shown; n++) {
        const struct moe_bar *bar = &b->bars[n];
        fputs("</tr>\n<tr><td>", p->out);
        put_text(p->out, bar->name);
        fprintf(p->out, "</td><td class=\"n\">%.3f</td>", bar->step_us / unit_us);
        for (int i = 0; i < n_parts; i++)
            fprintf(p->out, "<td class=\"n\">%.3f</td>", bar->part_us[i] / unit_us);
        if (!ranked) continue;
        fprintf(p->out, "<td class=\"n\">%.1f %%</td><td>", 100 * bar->dropped);
        moe_write_against_best(b, n, p->out);
        fputs("</td>", p->out);
    }
    fputs("</tr>\n</table></div>\n", p->out);
    if (b->n_shown < b->n) fprintf(p->out, "<p class=\"note\">%d more in the CSV.</p>\n", b->n - b->n_shown);
}

static void put_findings(struct page *p)
{
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    moe_assert(f);
    moe_summary_findings(p->m, f);
    fclose(f);
    for (char *rest = text, *line; (line = strsep(&rest, "\n")) && *line;) {
        fputs("<li>", p->out);
        put_text(p->out, line);
        fputs("</li>\n", p->out);
    }
    free(text);
}

static void put_facts(struct page *p)
{
    const struct moe_summary *m = p->m;
    const struct moe_scenario *sc = m->scenario;
    const char *const fact[][2] = {{"dispatcher", sc->dispatcher},
                                   {"capacity rule", sc->capacity.rule},
                                   {"bytes of data", m->data_bytes},
                                   {"seed", m->seed},
                                   {"moesim", m->version}};
    int64_t tokens = 0;
    for (int r = 0; r < sc->ranks; r++) tokens += sc->tokens[r];
    fprintf(p->out,
            "<table>\n<tr><th>model</th><td>%" PRId64 " layers, hidden %" PRId64 ", %" PRId64
            " heads, %" PRId64 " experts of ffn %" PRId64 ", top-%" PRId64 ", %s</td></tr>\n"
            "<tr><th>ranks</th><td>%" PRId64 ", experts split over %" PRId64 "</td></tr>\n"
            "<tr><th>tokens a step</th><td>%" PRId64 "</td></tr>\n"
            "<tr><th>steps</th><td>%" PRId64 " of %" PRId64 " complete</td></tr>\n"
            "<tr><th>loss</th><td>%.4f nats a byte in step %" PRId64 ", %.4f in step %" PRId64 "</td></tr>\n",
            sc->layers, sc->hidden, sc->heads, sc->experts, sc->ffn, sc->top_k, moe_type_text[sc->dtype],
            sc->ranks, sc->expert_parallel, tokens, m->info.steps_complete, m->info.steps_asked,
            m->info.first_loss, m->info.first_step, m->info.last_loss, m->info.last_step);
    for (int i = 0; i < COUNT(fact); i++) {
        fprintf(p->out, "<tr><th>%s</th><td>", fact[i][0]);
        put_text(p->out, fact[i][1] ? fact[i][1] : "not recorded");
        fputs("</td></tr>\n", p->out);
    }
    fputs("</table>\n", p->out);
}

/* A figure's name stands for the figure. */
static void put_part(struct page *p, const char *name)
{
    const struct moe_summary *m = p->m;
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"first_step", m->first.step},
                   {"last_step", m->last.step},
                   {"median_step", m->median_step},
                   {"row_bytes", m->row_bytes}};
    for (int i = 0; i < COUNT(numbers); i++)
        if (!strcmp(name, numbers[i].name)) fprintf(p->out, "%" PRId64, numbers[i].value);
    for (int i = 0; i < COUNT(figures); i++)
        if (!strcmp(name, figures[i].name)) put_figure(p, i);
    if (!strcmp(name, "findings")) put_findings(p);
    if (!strcmp(name, "facts")) put_facts(p);
    if (!strcmp(name, "measured_table")) put_table(p, &m->measured);
    if (!strcmp(name, "simulated_table")) put_table(p, &m->simulated);
}

/* In the frame, every second piece between @ is a name. */
static int write_page(struct page *p)
{
    FILE *frame;
    char *piece = NULL;
    size_t size = 0;
    bool is_name = false;
    MOE_TRY(open_file(MOESIM_REPORTS_DIR, "page", ".html", "r", &frame));
    int err = open_file(p->dir, "index", ".html", "w", &p->out);
    for (; err == MOE_OK && getdelim(&piece, &size, '@', frame) > 0; is_name = !is_name) {
        piece[strcspn(piece, "@")] = 0;
        if (is_name)
            put_part(p, piece);
        else
            fputs(piece, p->out);
    }
    if (err == MOE_OK) err = close_written(p->out, p->dir);
    free(piece);
    fclose(frame);
    return p->err < 0 ? p->err : err;
}

/* ---- all of it ---- */

/* A figure that is not there must not leave an older one behind. */
static int publish(const char *from_dir, const char *to_dir, const char *name, const char *suffix)
{
    char *from = join(from_dir, name, suffix), *to = join(to_dir, name, suffix);
    int err = MOE_OK;
    if (rename(from, to) < 0)
        err = errno == ENOENT ? remove_file(to_dir, name, suffix)
                              : moe_fail(MOE_EFAILED, "%s: %s", to, strerror(errno));
    free(from);
    free(to);
    return err;
}

static void remove_folder(const char *path)
{
    DIR *folder = opendir(path);
    for (struct dirent *file; folder && (file = readdir(folder));) unlinkat(dirfd(folder), file->d_name, 0);
    if (folder) closedir(folder);
    rmdir(path);
}

static int write_all(struct page *p, const char *dir, int (*gnuplot)(const char *script, const char *dir))
{
    MOE_TRY(draw(p, gnuplot));
    MOE_TRY(write_page(p));
    for (int i = 0; i < COUNT(figures); i++) {
        MOE_TRY(publish(p->dir, dir, figures[i].name, ".csv"));
        MOE_TRY(publish(p->dir, dir, figures[i].name, ".png"));
    }
    return publish(p->dir, dir, "index", ".html");
}

int moe_report(const char *store_path, const char *phases_path, const char *dir, FILE *findings,
               int (*gnuplot)(const char *script, const char *dir))
{
    struct moe_summary m;
    char *folder = join(dir, ".report-XXXXXX", "");
    struct page p = {.m = &m, .dir = folder};
    int err;
    MOE_TRY_GOTO(moe_summary_load(store_path, &m));
    if (phases_path) MOE_TRY_GOTO(moe_summary_load_phases(phases_path, &m));
    if ((mkdir(dir, 0777) < 0 && errno != EEXIST) || !mkdtemp(folder))
        MOE_TRY_GOTO(moe_fail(MOE_EFAILED, "%s: %s", dir, strerror(errno)));
    err = write_all(&p, dir, gnuplot);
    remove_folder(folder);
    if (err >= 0) moe_summary_findings(&m, findings);
done:
    moe_summary_free(&m);
    free(folder);
    return err;
}
