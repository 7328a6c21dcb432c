/* measured_log.c - see measured.h: what nccl-tests prints.
 *
 * Line by line; what a line is, its first words say, so that whatever others print between is left out. A row
 * is printed in pieces, so that another line may stand in its middle: neither half has the right number of
 * words. */
#include "traces/measured.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 40 }; /* of a row: 5, 16 and 2 of a timestamp */

struct words {
    int n; /* MOST_WORDS + 1: more */
    char *item[MOST_WORDS];
};

/* The run that a row belongs to. */
struct run {
    const char *op;   /* NULL: not said; "": another collective */
    const char *next; /* the same of the run after it */
    bool used;        /* by a table; devices that follow are of another run */
    struct moe_measured_devices devices;
    int ranks, nodes;
    int n_names, n_values; /* of a row: words before the times, and from there; 0 before a header */
    int half;              /* values of a block: out of place, in place */
    int wrong;             /* which of them is #wrong; 0: there is none */
    bool redop, host_time; /* a column redop, which older versions leave empty */
};

static struct words split(char *p)
{
    struct words w = {0};
    static const char space[] = " \t\r";
    for (p += strspn(p, space); *p && w.n <= MOST_WORDS; p += strspn(p, space)) {
        if (w.n < MOST_WORDS) w.item[w.n] = p;
        w.n++;
        p += strcspn(p, space);
        if (*p) *p++ = '\0';
    }
    return w;
}

static double number(const char *word)
{
    double value;
    return moe_measured_number(word, &value) ? value : NAN;
}

static bool is_value(const char *word)
{
    double value;
    return !strcmp(word, "N/A") || moe_measured_number(word, &value);
}

static void begin_run(struct run *r)
{
    if (!r->used) return;
    free(r->devices.items);
    *r = (struct run){.op = r->next};
}

/* "# Collective test starting: all_reduce_perf", or the command itself */
static void read_op(struct run *r, const char *line)
{
    const char *op = strstr(line, "concluded") ? NULL : moe_measured_program(line);
    if (op && r->used)
        r->next = op;
    else if (op)
        r->op = op;
}

/* "nThread 1 nGpus 8 minBytes ..." */
static bool is_config(const struct words *w)
{
    return w->n >= 4 && !strcmp(w->item[0], "nThread") && !strcmp(w->item[2], "nGpus");
}

static void read_config(struct run *r, const struct words *w)
{
    begin_run(r);
    r->devices.n = 0; /* of a run that did not get to its table */
    r->devices.per_process = moe_measured_per_process(number(w->item[1]), number(w->item[3]));
}

/* "Rank  0 Group  0 Pid  6899 on HOST device  0 [0000:04:00] NVIDIA H100"; older ones
 * without group or pid. */
static bool read_device(struct run *r, const struct words *w)
{
    int group = 0;
    if (w->n < 5 || w->n > MOST_WORDS || strcmp(w->item[0], "Rank") != 0) return false;
    for (int i = 2; i + 2 < w->n; i += 2) {
        if (!strcmp(w->item[i], "Group")) group = (int)strtol(w->item[i + 1], NULL, 10);
        if (strcmp(w->item[i], "on") != 0 || strcmp(w->item[i + 2], "device") != 0) continue;
        begin_run(r);
        moe_measured_add_device(&r->devices, number(w->item[1]), group, w->item[i + 1]);
        return true;
    }
    return false;
}

/* "size count type redop root time algbw busbw #wrong time algbw busbw #wrong timestamp" */
static bool read_header(struct run *r, const struct words *w)
{
    int time[2], n_times = 0, n = w->n;
    bool any_host = false;
    if (n < 5 || n > MOST_WORDS || strcmp(w->item[0], "size") != 0 || strcmp(w->item[1], "count") != 0 ||
        strcmp(w->item[2], "type") != 0)
        return false;
    if (!strcmp(w->item[n - 1], "timestamp")) n--;
    for (int i = 3; i < n && n_times < 2; i++) {
        bool host = !strcmp(w->item[i], "cputime");
        if (!host && strcmp(w->item[i], "time") != 0) continue;
        any_host |= host;
        time[n_times++] = i;
    }
    if (n_times < 2 || n - time[1] != time[1] - time[0]) return false;
    r->n_names = time[0];
    r->n_values = n - time[0];
    r->half = time[1] - time[0];
    r->wrong = r->half;
    while (--r->wrong && strcmp(w->item[time[0] + r->wrong], "#wrong") != 0) continue;
    r->redop = !strcmp(w->item[3], "redop");
    r->host_time = any_host;
    if (!r->used) moe_measured_count(&r->devices, &r->ranks, &r->nodes);
    r->used = true;
    return true;
}

/* "2025-10-28 12:00:01" behind a row */
static int without_timestamp(const struct words *w)
{
    const char *date = w->n >= 2 ? w->item[w->n - 2] : "", *time = w->n >= 2 ? w->item[w->n - 1] : "";
    bool there = strlen(date) == 10 && date[4] == '-' && strlen(time) == 8 && time[2] == ':';
    return there ? w->n - 2 : w->n;
}

/* out of place, in place; false when the words are not those of a row. *wrong: some results are */
static bool read_times(const struct run *r, const struct words *w, double us[2], bool *wrong)
{
    int n = without_timestamp(w), first = r->n_names;
    if (r->redop && is_value(w->item[3])) first--;
    bool whole = n == first + r->n_values;
    if (!whole && n != first + r->half) return false;
    for (int i = first; i < n; i++)
        if (!is_value(w->item[i])) return false;
    us[0] = whole ? number(w->item[first]) : NAN;
    us[1] = number(w->item[whole ? first + r->half : first]);
    *wrong = false;
    for (int i = first; i < n && r->wrong; i += r->half) *wrong |= number(w->item[i + r->wrong]) > 0;
    return true;
}

static int read_row(const struct run *r, const struct words *w, const char *op, struct moe_measured *out,
                    int line)
{
    double bytes = number(w->item[0]), us[2];
    bool wrong;
    struct moe_measured_row row = {
        .ranks = r->ranks, .nodes = r->nodes, .host_time = r->host_time, .line = line};
    if (isnan(bytes) || isnan(number(w->item[1])) || !isalpha((unsigned char)w->item[2][0])) return MOE_OK;
    if (r->op) op = r->op;
    if (w->n > MOST_WORDS || !read_times(r, w, us, &wrong)) {
        out->n_skipped++;
        return MOE_OK;
    }
    if (!op)
        return moe_fail(MOE_EINPUT,
                        "times of an unknown collective, expected NAME_perf above them, or its name"
                        " as an option");
    if (*op && r->ranks == 0)
        return moe_fail(MOE_EINPUT,
                        "times of an unknown number of ranks, expected lines '# Rank  0 ... on HOST"
                        " device  0 ...' above them");
    moe_copy_name(row.type, w->item[2]);
    if (wrong)
        out->n_wrong++;
    else
        moe_measured_add(out, row, op, bytes, us);
    return MOE_OK;
}

static int read_line(struct run *r, char *p, const char *op, struct moe_measured *out, int line)
{
    static const char tag[] = "<stdout>:"; /* of mpirun: "[1,0]<stdout>:" */
    char *tagged = strstr(p, tag), *start = tagged ? tagged + sizeof tag - 1 : p;
    read_op(r, start);
    start += strspn(start, " \t");
    bool comment = *start == '#';
    struct words w = split(start + strspn(start, "# \t")); /* a # may be lost on the way, as in Markdown */
    if (is_config(&w))
        read_config(r, &w);
    else if (!read_device(r, &w) && !read_header(r, &w) && !comment && r->n_names && w.n > 3)
        return read_row(r, &w, op, out, line);
    return MOE_OK;
}

int moe_measured_read_log(char *text, const char *op, struct moe_measured *out, int *line)
{
    struct run run = {0};
    int err = MOE_OK;
    for (char *p; err >= 0 && (p = moe_measured_line(&text));) err = read_line(&run, p, op, out, ++*line);
    free(run.devices.items);
    return err;
}
