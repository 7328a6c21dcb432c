/* report.c - see report.h. The page's frame is page.html, in which @name@ stands for a part written here; the
 * figures are heat.gp and bars.gp. All three are read from MOESIM_REPORTS_DIR at run time.
 *
 * Everything is written into a scratch folder inside the target and moved when complete. */
#include "reports/report.h"

#include "reports/summary.h"
#include "sim/schedule.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_BARS = 17 }; /* in figures and tables; the CSV has all */

struct page {
    const struct moe_summary *m;
    const char *dir; /* the scratch folder */
    FILE *out;
    int err;
};

/* Moved to the target in this order, the page last; what follows is thrown away. */
static const char *const results[] = {"load_first.csv", "load_last.csv", "measured_us.csv",
                                      "simulated_us.csv", "index.html"};
static const char *const scratch[] = {"figures.gp", "load_first.svg", "load_last.svg", "measured_us.svg",
                                      "simulated_us.svg"};
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

/* ---- files ---- */

static char *join(const char *dir, const char *name)
{
    char *path;
    int n = asprintf(&path, "%s/%s", dir, name);
    moe_assert(n >= 0);
    return path;
}

static int open_file(const char *dir, const char *name, const char *mode, FILE **out)
{
    char *path = join(dir, name);
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

static int write_load(const struct page *p, const char *name, const struct moe_load *load)
{
    const int64_t E = p->m->scenario->experts;
    FILE *f;
    MOE_TRY(open_file(p->dir, name, "w", &f));
    fprintf(f, "step,layer,expert,tokens,relative\n");
    for (int64_t i = 0; i < p->m->scenario->layers * E; i++)
        fprintf(f, "%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%.6g\n", load->step, i / E, i % E,
                load->tokens[i], load->relative[i]);
    return close_written(f, p->dir);
}

static int write_bars(const struct page *p, const char *name, const struct moe_bars *b)
{
    FILE *f;
    MOE_TRY(open_file(p->dir, name, "w", &f));
    fprintf(f, "bar,step");
    for (int i = 0; i < b->n_parts; i++) fprintf(f, ",%s", b->parts[i]);
    for (int n = 0; n < b->n; n++) {
        fputs("\n\"", f);
        for (const char *c = b->bars[n].name; *c; c++) fputc(*c == '"' ? '\'' : *c, f);
        fprintf(f, "\",%.3f", b->bars[n].step_us);
        for (int i = 0; i < b->n_parts; i++) fprintf(f, ",%.3f", b->bars[n].part_us[i]);
    }
    fputc('\n', f);
    return close_written(f, p->dir);
}

/* ---- figures ---- */

static int shown(const struct moe_bars *b)
{
    return b->n < MAX_BARS ? b->n : MAX_BARS;
}

static const char *unit_of(const struct moe_bars *b, double *unit_us)
{
    double max_us = 0;
    for (int i = 0; i < shown(b); i++) max_us = fmax(max_us, b->bars[i].step_us);
    return moe_time_unit(max_us, unit_us);
}

static void call_heat(FILE *f, const struct moe_summary *m, const char *name)
{
    const int64_t n = m->scenario->layers * m->scenario->experts;
    double top = 2; /* at least, so that a balanced routing looks balanced */
    for (int64_t i = 0; i < n; i++) top = fmax(top, fmax(m->first.relative[i], m->last.relative[i]));
    fprintf(f, "call '" MOESIM_REPORTS_DIR "/heat.gp' '%s' %" PRId64 " %" PRId64 " %.6f\n", name,
            m->scenario->layers, m->scenario->experts, top);
}

static void call_bars(FILE *f, const char *name, const struct moe_bars *b)
{
    double unit_us;
    const char *unit = unit_of(b, &unit_us);
    if (b->n)
        fprintf(f, "call '" MOESIM_REPORTS_DIR "/bars.gp' '%s' %d %d %.0f '%s'\n", name, shown(b), b->n_parts,
                unit_us, unit);
}

static int draw(const struct page *p, int (*gnuplot)(const char *script, const char *dir))
{
    FILE *f;
    MOE_TRY(open_file(p->dir, "figures.gp", "w", &f));
    call_heat(f, p->m, "load_first");
    call_heat(f, p->m, "load_last");
    call_bars(f, "measured_us", &p->m->measured);
    call_bars(f, "simulated_us", &p->m->simulated);
    MOE_TRY(close_written(f, p->dir));
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
static void put_svg(struct page *p, const char *name)
{
    char *line = NULL;
    size_t size = 0;
    bool inside = false, symbols = false;
    FILE *f;
    int err = open_file(p->dir, name, "r", &f);
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

static void put_bars(struct page *p, const char *svg, const struct moe_bars *b)
{
    double unit_us;
    const char *unit = unit_of(b, &unit_us);
    if (!b->n) {
        fputs("<p>Nothing simulated yet: <code>moesim compare</code> adds results.</p>\n", p->out);
        return;
    }
    put_svg(p, svg);
    fprintf(p->out, "<div class=\"wide\"><table>\n<tr><th>%s</th><th class=\"n\">step</th>", unit);
    for (int i = 0; i < b->n_parts; i++) fprintf(p->out, "<th class=\"n\">%s</th>", b->parts[i]);
    for (int n = 0; n < shown(b); n++) {
        fputs("</tr>\n<tr><td>", p->out);
        put_text(p->out, b->bars[n].name);
        fprintf(p->out, "</td><td class=\"n\">%.3f</td>", b->bars[n].step_us / unit_us);
        for (int i = 0; i < b->n_parts; i++)
            fprintf(p->out, "<td class=\"n\">%.3f</td>", b->bars[n].part_us[i] / unit_us);
    }
    fputs("</tr>\n</table></div>\n", p->out);
    if (shown(b) < b->n) fprintf(p->out, "<p class=\"note\">%d more in the CSV.</p>\n", b->n - shown(b));
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
    fprintf(p->out,
            "<table>\n<tr><th>model</th><td>%" PRId64 " layers, hidden %" PRId64 ", %" PRId64
            " experts of ffn %" PRId64 ", top-%" PRId64 ", %s</td></tr>\n",
            sc->layers, sc->hidden, sc->experts, sc->ffn, sc->top_k, moe_type_text[sc->dtype]);
    int64_t tokens = 0;
    for (int r = 0; r < sc->ranks; r++) tokens += sc->tokens[r];
    fprintf(p->out,
            "<tr><th>ranks</th><td>%" PRId64 ", experts split over %" PRId64 "</td></tr>\n"
            "<tr><th>tokens a step</th><td>%" PRId64 "</td></tr>\n<tr><th>dispatcher</th><td>",
            sc->ranks, sc->expert_parallel, tokens);
    put_text(p->out, sc->dispatcher);
    fprintf(p->out, "</td></tr>\n<tr><th>steps</th><td>%" PRId64 " of %" PRId64 " complete</td></tr>\n",
            m->info.steps_complete, m->info.steps_asked);
    fprintf(p->out,
            "<tr><th>loss</th><td>%.4f nats a byte in step %" PRId64 ", %.4f in step %" PRId64 "</td></tr>\n",
            m->info.first_loss, m->info.first_step, m->info.last_loss, m->info.last_step);
    const char *const key[] = {"bytes of data", "seed", "moesim"};
    const char *const value[] = {m->data_bytes, m->seed, m->version};
    for (int i = 0; i < COUNT(key); i++) {
        fprintf(p->out, "<tr><th>%s</th><td>", key[i]);
        put_text(p->out, value[i] ? value[i] : "not recorded");
        fputs("</td></tr>\n", p->out);
    }
    fputs("</table>\n", p->out);
}

static void put_part(struct page *p, const char *name)
{
    const struct moe_summary *m = p->m;
    if (!strcmp(name, "findings"))
        put_findings(p);
    else if (!strcmp(name, "facts"))
        put_facts(p);
    else if (!strcmp(name, "measured_us.svg"))
        put_bars(p, name, &m->measured);
    else if (!strcmp(name, "simulated_us.svg"))
        put_bars(p, name, &m->simulated);
    else if (!strcmp(name, "first_step"))
        fprintf(p->out, "%" PRId64, m->first.step);
    else if (!strcmp(name, "last_step"))
        fprintf(p->out, "%" PRId64, m->last.step);
    else if (!strcmp(name, "median_step"))
        fprintf(p->out, "%" PRId64, m->median_step);
    else
        put_svg(p, name);
}

static int write_page(struct page *p)
{
    FILE *frame;
    char *text = NULL;
    size_t size = 0;
    MOE_TRY(open_file(MOESIM_REPORTS_DIR, "page.html", "r", &frame));
    ssize_t n = getdelim(&text, &size, 0, frame);
    fclose(frame);
    int err = n < 0 ? moe_fail(MOE_EFAILED, MOESIM_REPORTS_DIR "/page.html: not readable") : MOE_OK;
    if (err == MOE_OK) err = open_file(p->dir, "index.html", "w", &p->out);
    if (err == MOE_OK) {
        bool is_name = false;
        for (char *rest = text, *piece; (piece = strsep(&rest, "@")); is_name = !is_name) {
            if (is_name)
                put_part(p, piece);
            else
                fputs(piece, p->out);
        }
        err = close_written(p->out, p->dir);
    }
    free(text);
    return p->err < 0 ? p->err : err;
}

/* ---- all of it ---- */

static int publish(const char *from, const char *to)
{
    int err = MOE_OK;
    for (int i = 0; i < COUNT(results) && err == MOE_OK; i++) {
        char *before = join(from, results[i]), *after = join(to, results[i]);
        if (rename(before, after) < 0) err = moe_fail(MOE_EFAILED, "%s: %s", after, strerror(errno));
        free(before);
        free(after);
    }
    return err;
}

static void remove_files(const char *dir, const char *const *names, int n)
{
    for (int i = 0; i < n; i++) {
        char *path = join(dir, names[i]);
        unlink(path);
        free(path);
    }
}

static int write_all(struct page *p, const char *dir, int (*gnuplot)(const char *script, const char *dir))
{
    MOE_TRY(write_load(p, "load_first.csv", &p->m->first));
    MOE_TRY(write_load(p, "load_last.csv", &p->m->last));
    MOE_TRY(write_bars(p, "measured_us.csv", &p->m->measured));
    MOE_TRY(write_bars(p, "simulated_us.csv", &p->m->simulated));
    MOE_TRY(draw(p, gnuplot));
    MOE_TRY(write_page(p));
    return publish(p->dir, dir);
}

int moe_report(const char *store_path, const char *dir, FILE *findings,
               int (*gnuplot)(const char *script, const char *dir))
{
    struct moe_summary m;
    char *folder = join(dir, ".report-XXXXXX");
    struct page p = {.m = &m, .dir = folder};
    int err;
    MOE_TRY_GOTO(moe_summary_load(store_path, &m));
    if ((mkdir(dir, 0777) < 0 && errno != EEXIST) || !mkdtemp(folder))
        MOE_TRY_GOTO(moe_fail(MOE_EFAILED, "%s: %s", dir, strerror(errno)));
    err = write_all(&p, dir, gnuplot);
    remove_files(folder, results, COUNT(results));
    remove_files(folder, scratch, COUNT(scratch));
    rmdir(folder);
    if (err >= 0) moe_summary_findings(&m, findings);
done:
    moe_summary_free(&m);
    free(folder);
    return err;
}
