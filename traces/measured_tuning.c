/* measured_tuning.c - see measured_tuning.h. A table is whole once every block has its three collectives and,
 * in blocks, NVLS has had its turn; what is of a later block (PAT) may be missing. */
#include "traces/measured_tuning.h"

#include "traces/measured.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { OPS = 3, ALGORITHMS = 5, PROTOCOLS = 3, MOST_COLUMNS = 32 };
static const char *const algorithm_text[ALGORITHMS] = {"tree", "ring", "nvls", "nvlstree", "pat"},
                         *const protocol_text[PROTOCOLS] = {"ll", "ll128", "simple"};
static const char *const op_text[OPS] = {"allgather", "reducescatter", "allreduce"};

/* A thread and the table that it prints. */
struct thread {
    uint64_t name;
    int ranks, nodes;
    bool open, blocks, nvls;
    int n_algorithms, n_columns, n_ops;                  /* of the block */
    int algorithm[MOST_COLUMNS], protocol[MOST_COLUMNS]; /* of a column; -1: not one of ours */
    double broadcast[PROTOCOLS];                         /* rates of rings, GB/s */
    struct moe_tuning_table table;
};

struct reader {
    int n, cap;
    struct thread *threads;
    struct moe_tuning *out;
};

/* ---- words ---- */

/* The next cell of a row, which a '|' ends, without the spaces around it; NULL: there is none. */
static char *cell(char **at)
{
    char *start = *at, *end = strchr(start, '|');
    if (!end) return NULL;
    *at = end + 1;
    start += strspn(start, " \t");
    while (end > start && strchr(" \t", end[-1])) end--;
    *end = '\0';
    return start;
}

static int find(const char *word, const char *const *names, int n)
{
    int i = 0;
    while (i < n && strcasecmp(word, names[i]) != 0) i++;
    return i < n ? i : -1;
}

/* "Ring/    LL" and "  16.6/   1.2" */
static char *behind_slash(char *text)
{
    char *slash = strchr(text, '/');
    if (!slash) return NULL;
    for (char *end = slash; end > text && end[-1] == ' ';) *--end = '\0';
    *slash++ = '\0';
    return slash + strspn(slash, " ");
}

/* ---- tables ---- */

static int cut_short(const struct thread *t, int *line)
{
    *line = t->table.line;
    return moe_fail(MOE_EINPUT,
                    "NCCL's tuning table is cut short, expected AllGather, ReduceScatter and AllReduce of "
                    "every algorithm");
}

/* Which number of ranks has such rates of its rings? A printed rate is half of its last digit off at most. */
static int ranks_of(const struct thread *t)
{
    static const double off = 0.05;
    for (int p = PROTOCOLS - 1; p > 0; p--) /* not LL: older releases count it otherwise */
        for (int i = 0; i < t->table.n; i++) {
            const struct moe_tuning_cost *c = &t->table.cost[i];
            double once = t->broadcast[p], gather = c->rate_Bps / 1e9;
            if (c->op != op_text[0] || c->algorithm != algorithm_text[1] || c->protocol != protocol_text[p] ||
                !(once > off))
                continue;
            double least = (gather - off) / (once + off), most = (gather + off) / (once - off);
            if (!(least > 1)) return 0;
            double ranks = ceil(most / (most - 1)), last = floor(least / (least - 1));
            return ranks == last && ranks <= MOE_MEASURED_RANKS ? (int)ranks : 0;
        }
    return 0;
}

static int end_table(struct reader *r, struct thread *t, int *line)
{
    if (!t->open) return MOE_OK;
    t->open = false;
    if (t->n_ops != OPS || (t->blocks && !t->nvls)) return cut_short(t, line);
    t->table.ranks = t->ranks ? t->ranks : ranks_of(t);
    t->table.nodes = t->nodes;
    struct moe_tuning *out = r->out;
    out->tables = moe_grow(out->tables, &out->cap, out->n + 1, sizeof *out->tables);
    out->tables[out->n++] = t->table;
    return MOE_OK;
}

static int begin_table(struct reader *r, struct thread *t, bool blocks, int *line)
{
    int at = *line;
    MOE_TRY(end_table(r, t, line));
    t->open = true;
    t->blocks = blocks;
    t->nvls = false;
    memset(t->broadcast, 0, sizeof t->broadcast);
    t->table = (struct moe_tuning_table){.line = at};
    return MOE_OK;
}

static void begin_block(struct thread *t)
{
    t->n_algorithms = t->n_columns = t->n_ops = 0;
}

static int too_many(void)
{
    return moe_fail(MOE_EINPUT, "NCCL's tuning table has more than %d columns", MOST_COLUMNS);
}

/* "Latency/AlgBw |    Tree/    LL | ..." */
static int read_heading(struct reader *r, struct thread *t, char *at, int *line)
{
    MOE_TRY(begin_table(r, t, false, line));
    begin_block(t);
    for (char *name; (name = cell(&at)); t->n_columns++) {
        char *protocol = behind_slash(name);
        if (t->n_columns == MOST_COLUMNS) return too_many();
        t->algorithm[t->n_columns] = find(name, algorithm_text, ALGORITHMS);
        t->protocol[t->n_columns] = protocol ? find(protocol, protocol_text, PROTOCOLS) : -1;
    }
    return MOE_OK;
}

/* "Algorithm |   Tree   |   Ring   | ...": of a new table when it begins with a tree */
static int read_algorithms(struct reader *r, struct thread *t, char *at, int *line)
{
    char *name = cell(&at);
    if (!name) return t->open ? cut_short(t, line) : MOE_OK;
    if (!t->open || find(name, algorithm_text, 1) == 0)
        MOE_TRY(begin_table(r, t, true, line));
    else if (t->n_ops != OPS)
        return cut_short(t, line);
    begin_block(t);
    for (; name; name = cell(&at), t->n_algorithms++) {
        if (PROTOCOLS * (t->n_algorithms + 1) > MOST_COLUMNS) return too_many();
        int algorithm = find(name, algorithm_text, ALGORITHMS);
        for (int p = 0; p < PROTOCOLS; p++) t->algorithm[PROTOCOLS * t->n_algorithms + p] = algorithm;
        t->nvls |= algorithm == 2;
    }
    return MOE_OK;
}

/* "Protocol | LL | LL128 | Simple | ...": of three algorithms, even where there is one */
static int read_protocols(struct thread *t, char *at)
{
    int n = PROTOCOLS * t->n_algorithms;
    char *name;
    for (; t->n_columns < n && (name = cell(&at)); t->n_columns++)
        t->protocol[t->n_columns] = find(name, protocol_text, PROTOCOLS);
    if (t->n_columns == n) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%d protocols in NCCL's tuning table, expected %d of %d algorithms",
                    t->n_columns, n, t->n_algorithms);
}

static int wrong_cell(const char *text)
{
    return moe_fail(MOE_EINPUT, "'%.40s' in NCCL's tuning table, expected LATENCY/RATE, as in 16.6/ 1.2",
                    text);
}

/* op -1: a broadcast, that tells the number of ranks */
static int read_costs(struct thread *t, const char *name, int op, char *at)
{
    int n = 0;
    for (char *text; (text = cell(&at)); n++) {
        double us, rate;
        char *second = strchr(text, '/');
        if (!second) return wrong_cell(text);
        second = behind_slash(text);
        if (!moe_measured_number(text, &us) || !moe_measured_number(second, &rate)) return wrong_cell(text);
        if (!(us >= 0 && us < 1e9 && rate >= 0 && rate < 1e9)) return wrong_cell(text);
        if (n >= t->n_columns || t->algorithm[n] < 0 || t->protocol[n] < 0 || rate == 0) continue;
        if (op < 0 && t->algorithm[n] == 1) t->broadcast[t->protocol[n]] = rate;
        if (op < 0 || t->table.n == MOE_TUNING_COSTS) continue;
        t->table.cost[t->table.n++] =
            (struct moe_tuning_cost){op_text[op], algorithm_text[t->algorithm[n]],
                                     protocol_text[t->protocol[n]], us * 1e-6, rate * 1e9};
    }
    if (n != t->n_columns)
        return moe_fail(MOE_EINPUT, "%d values of %s in NCCL's tuning table, expected %d", n, name,
                        t->n_columns);
    t->n_ops += op >= 0;
    return MOE_OK;
}

/* ---- lines ---- */

/* By the word "host:pid:tid" before "[device] NCCL INFO". */
static struct thread *thread_of(struct reader *r, const char *line, const char *mark)
{
    char word[256];
    const char *end = mark;
    while (end > line && end[-1] == ' ') end--;
    if (end > line && end[-1] == ']')
        while (end > line && end[-1] != '[') end--;
    end -= end > line;
    while (end > line && end[-1] == ' ') end--;
    const char *start = end;
    while (start > line && start[-1] != ' ') start--;
    snprintf(word, sizeof word, "%.*s", (int)(end - start < 255 ? end - start : 255), start);
    uint64_t name = moe_hash_name(word);
    int i = 0;
    while (i < r->n && r->threads[i].name != name) i++;
    if (i == r->n) {
        r->threads = moe_grow(r->threads, &r->cap, ++r->n, sizeof *r->threads);
        r->threads[i].name = name;
    }
    return &r->threads[i];
}

static int read_line(struct reader *r, char *text, int *line)
{
    static const char mark[] = "NCCL INFO";
    char *at = strstr(text, mark), *name;
    if (!at) return MOE_OK;
    char *size = strstr(at, " nRanks ");
    if (size) {
        struct thread *t = thread_of(r, text, at);
        int ranks, nodes;
        if (sscanf(size, " nRanks %7d nNodes %7d", &ranks, &nodes) != 2 || nodes < 1 || ranks < nodes)
            return MOE_OK;
        t->ranks = ranks;
        t->nodes = nodes;
        return MOE_OK;
    }
    if (!strchr(at, '|')) return MOE_OK;
    struct thread *t = thread_of(r, text, at);
    at += sizeof mark - 1;
    name = cell(&at);
    if (!strcmp(name, "Latency/AlgBw")) return read_heading(r, t, at, line);
    if (!strcmp(name, "Algorithm")) return read_algorithms(r, t, at, line);
    if (!t->open) return MOE_OK;
    if (!strcmp(name, "Protocol")) return read_protocols(t, at);
    if (!strcmp(name, "Broadcast")) return read_costs(t, name, -1, at);
    int op = find(name, op_text, OPS);
    return op < 0 ? MOE_OK : read_costs(t, name, op, at);
}

int moe_tuning_read(const char *path, struct moe_tuning *out)
{
    struct reader r = {.out = out};
    char *text = NULL;
    size_t bytes;
    int err = MOE_OK, line = 0, at = 0;
    *out = (struct moe_tuning){0};
    MOE_TRY(moe_measured_load(path, &text, &bytes));
    for (size_t i = 0; i < bytes; i++)
        if (!text[i]) text[i] = ' ';
    char *rest = text;
    for (char *p; (p = moe_measured_line(&rest));) {
        at = ++line;
        MOE_TRY_GOTO(read_line(&r, p, &at));
    }
    for (int i = 0; i < r.n; i++) MOE_TRY_GOTO(end_table(&r, &r.threads[i], &at));
done:
    free(text);
    free(r.threads);
    if (err >= 0) return MOE_OK;
    moe_tuning_free(out);
    return moe_fail(err, "%s:%d: %s", path, at, moe_error());
}

void moe_tuning_free(struct moe_tuning *t)
{
    free(t->tables);
    *t = (struct moe_tuning){0};
}
