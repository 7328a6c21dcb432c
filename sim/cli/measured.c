/* measured.c - see measured.h. */
#include "sim/cli/measured.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *const moe_band_text[MOE_BAND_TEXTS] = {"<64K", "64K-2M", ">=2M", ">=64K", "all"};

enum { MOST_RANKS = 1024 }; /* all-to-alls of more are millions of flows */

/* Types as nccl-tests and others write them: bytes, and whether they are floating point. */
static const struct type {
    const char *name;
    int bytes;
    bool is_float;
} types[] = {
    {"half", 2, true},    {"bfloat16", 2, true}, {"float", 4, true},     {"double", 8, true},
    {"int8", 1, false},   {"uint8", 1, false},   {"int32", 4, false},    {"uint32", 4, false},
    {"int64", 8, false},  {"uint64", 8, false},  {"float16", 2, true},   {"float32", 4, true},
    {"float64", 8, true}, {"fp16", 2, true},     {"fp32", 4, true},      {"bf16", 2, true},
    {"f8e4m3", 1, false}, {"f8e5m2", 1, false},  {"fp8_e4m3", 1, false}, {"fp8_e5m2", 1, false},
    {"char", 1, false},   {"int", 4, false},     {"fp8", 1, false},
};
enum { N_TYPES = sizeof types / sizeof *types, DEFAULT_TYPE = 2 /* of nccl-tests */ };

bool moe_in_band(int64_t bytes, int band)
{
    int at = moe_nccl_band(bytes);
    return band == MOE_BAND_ALL || at == band || (band == MOE_BAND_FROM_64K && at > 0);
}

const char *moe_cli_file_names(const struct moe_args *args, char out[PATH_MAX])
{
    size_t n = 0;
    for (int i = 0; i < args->n_inputs && n < PATH_MAX; i++) {
        const char *slash = strrchr(args->inputs[i], '/');
        n += (size_t)snprintf(out + n, PATH_MAX - n, "%s%s", i ? ", " : "",
                              slash ? slash + 1 : args->inputs[i]);
    }
    return out;
}

static enum moe_collective find_kind(const char *op)
{
    int kind = 0;
    while (strcmp(moe_collective_text[kind], op) != 0) kind++;
    return (enum moe_collective)kind;
}

/* Of what is only moved the type does not matter. */
static int find_type(const char *path, const struct moe_measured_row *row, const struct type **out)
{
    const char *names[N_TYPES];
    char hint[MOE_HINT];
    *out = &types[DEFAULT_TYPE];
    if (!*row->type) return MOE_OK;
    for (int i = 0; i < N_TYPES; i++) {
        *out = &types[i];
        names[i] = types[i].name;
        if (!strcasecmp(names[i], row->type)) return MOE_OK;
    }
    *out = &types[DEFAULT_TYPE];
    if (find_kind(row->op) == MOE_ALLTOALL || find_kind(row->op) == MOE_ALLGATHER) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s:%d: unknown type '%s'%s", path, row->line, row->type,
                    moe_hint(row->type, names, N_TYPES, hint));
}

static bool is_laid_out(const struct moe_measured_row *row, const struct moe_topo *t)
{
    int64_t nodes = (row->ranks + t->gpus_per_node - 1) / t->gpus_per_node;
    return row->ranks > 1 && row->ranks <= MOST_RANKS && (!row->nodes || row->nodes == nodes);
}

static int add(const char *path, const struct moe_measured_row *said, const struct moe_topo *t,
               struct moe_cli_rows *out)
{
    const struct type *type;
    if (said->host_time) return out->n_host++, MOE_OK;
    if (!is_laid_out(said, t)) return out->n_elsewhere++, MOE_OK;
    MOE_TRY(find_type(path, said, &type));
    if (!*out->machine) moe_copy_name(out->machine, said->machine);
    if (*said->machine && strcmp(said->machine, out->machine) != 0)
        return moe_fail(MOE_EINPUT, "%s:%d: machine '%s' beside '%s', expected rows of one machine", path,
                        said->line, said->machine, out->machine);
    struct moe_nccl_case c = {find_kind(said->op), said->ranks, said->bytes, type->bytes, type->is_float};
    out->row = moe_grow(out->row, &out->cap, out->n + 1, sizeof *out->row);
    out->row[out->n++] = (struct moe_cli_row){*said, {c, said->time_s}};
    return MOE_OK;
}

static void warn_of_rows_apart(const struct moe_cli_rows *rows)
{
    static const double most_times = 2; /* half and int8 that are only moved differ by less */
    int n = 0;
    for (int i = 0; i < rows->n; i++) {
        double least_s = INFINITY, most_s = 0;
        bool first = true;
        for (int j = 0; j < rows->n && first; j++) {
            const struct moe_nccl_row *row = &rows->row[j].nccl;
            if (!moe_nccl_same(&row->c, &rows->row[i].nccl.c)) continue;
            first = j >= i;
            least_s = fmin(least_s, row->time_s);
            most_s = fmax(most_s, row->time_s);
        }
        n += most_s > most_times * least_s;
    }
    if (n)
        fprintf(stderr,
                "moesim: warning: the rows of %d points differ by more than 2 times; are all of one "
                "machine?\n",
                n);
}

int moe_cli_rows_load(const struct moe_args *args, const struct moe_topo *t, struct moe_cli_rows *out)
{
    struct moe_row_choice choice;
    *out = (struct moe_cli_rows){0};
    MOE_TRY(moe_measured_parse_rows(args->rows, &choice));
    for (int i = 0; i < args->n_inputs; i++) {
        struct moe_measured m;
        int err = moe_measured_read(args->inputs[i], args->op, &m);
        for (int r = 0; r < m.n && err >= 0; r++)
            if (moe_row_chosen(&choice, &m.rows[r])) err = add(args->inputs[i], &m.rows[r], t, out);
        out->n_skipped += m.n_skipped;
        out->n_wrong += m.n_wrong;
        moe_measured_free(&m);
        MOE_TRY(err);
    }
    warn_of_rows_apart(out);
    if (out->n) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s: no row left of --rows %s (%d of the host's time, %d laid out otherwise)",
                    args->input, args->rows, out->n_host, out->n_elsewhere);
}

void moe_cli_rows_free(struct moe_cli_rows *rows)
{
    free(rows->row);
}

void moe_cli_rows_print_left_out(const struct moe_cli_rows *rows)
{
    if (rows->n_host) printf("left out: %d rows of the host's time alone\n", rows->n_host);
    if (rows->n_elsewhere)
        printf("left out: %d rows of one GPU or of nodes filled otherwise\n", rows->n_elsewhere);
    if (rows->n_wrong) printf("left out: %d rows whose results were wrong (#wrong)\n", rows->n_wrong);
    if (rows->n_skipped) printf("left out: %d lines that are no such measurement\n", rows->n_skipped);
}
