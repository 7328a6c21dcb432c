/* format_megatron.c - see format.h: router traces of Megatron-LM.
 *
 * A file router_trace_rankR.jsonl per rank, a line per (step, layer):
 *   {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 4, "topk":
 * 2, "top_indices": [[4, 9], [2, 4], [3, 7], [14, 7]]} with "mtp_idx" after "topk" in block "mtp". Several
 * lines of a (step, layer) are micro-batches. A layer is known by its place among the model's blocks, so
 * dense layers leave gaps; the store numbers the layers from 0 and keeps their names in the run key
 * "megatron_layers". Fields that are not above are ignored.
 *
 * Source: Megatron-LM, megatron/core/transformer/moe/router_trace.py. */
#include "traces/format.h"
#include "traces/store.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* A layer's name in one number, in the order of the model: decoder, then MTP heads. */
static int64_t name_of(int64_t mtp_idx, int64_t layer)
{
    return (mtp_idx + 1) << 32 | layer;
}

static int mtp_of(int64_t name)
{
    return (int)(name >> 32) - 1;
}

struct names {
    int n, cap;
    int64_t *items; /* ascending */
};

/* The place of a name, or where it belongs. */
static int place_of(const struct names *s, int64_t name)
{
    int i = 0;
    while (i < s->n && s->items[i] < name) i++;
    return i;
}

/* ---- export ---- */

/* "3 4 mtp0.1" */
static int load_names(struct moe_store *store, struct names *s)
{
    char *text;
    MOE_TRY(moe_store_get(store, "megatron_layers", &text));
    for (const char *p = text ? text : ""; *p; p += strcspn(p, " "), p += strspn(p, " ")) {
        int mtp = -1, layer = 0;
        if (sscanf(p, "mtp%9d.%9d", &mtp, &layer) < 2) layer = atoi(p);
        s->items = moe_grow(s->items, &s->cap, s->n + 1, sizeof *s->items);
        s->items[s->n++] = name_of(mtp, layer);
    }
    free(text);
    return MOE_OK;
}

static void write_layer(FILE *f, const struct moe_routed *r, const struct moe_routed_layer *l, int64_t name)
{
    int mtp = mtp_of(name);
    fprintf(f,
            "{\"step\": %lld, \"stage\": \"pre_dispatch\", \"block\": \"%s\", \"layer\": %d, \"rank\": %d,"
            " \"num_tokens\": %lld, \"topk\": %d, ",
            (long long)r->step, mtp < 0 ? "decoder" : "mtp", (int)name, r->rank, (long long)l->n_tokens,
            r->top_k);
    if (mtp >= 0) fprintf(f, "\"mtp_idx\": %d, ", mtp);
    fputs("\"top_indices\": [", f);
    for (int64_t t = 0; t < l->n_tokens; t++)
        for (int k = 0; k < r->top_k; k++)
            fprintf(f, "%s%d%s",
                    k   ? ", "
                    : t ? ", ["
                        : "[",
                    l->ids[t * r->top_k + k], k + 1 < r->top_k ? "" : "]");
    fputs("]}\n", f);
}

static int write_step(struct moe_export *e)
{
    const struct moe_routed *r = &e->routed;
    struct names names = {0};
    char file[64];
    snprintf(file, sizeof file, "router_trace_rank%d.jsonl", r->rank);
    MOE_TRY(moe_export_begin(e, file));
    MOE_TRY(load_names(e->store, &names));
    for (int l = 0; l < r->n_layers; l++) {
        int layer = r->layers[l].layer;
        write_layer(e->file, r, &r->layers[l], layer < names.n ? names.items[layer] : layer);
    }
    free(names.items);
    return MOE_OK;
}

/* ---- import ---- */

struct record {
    int64_t step, name, rank, n_tokens, top_k;
    int32_t *ids;
};

static int read_ids(const json_t *rows, struct record *out)
{
    if (json_array_size(rows) != (size_t)out->n_tokens)
        return moe_fail(MOE_EINPUT, "top_indices has %zu rows, expected num_tokens %lld",
                        json_array_size(rows), (long long)out->n_tokens);
    /* Before the memory: a short line may promise many ids. */
    for (int64_t t = 0; t < out->n_tokens; t++) {
        size_t n = json_array_size(json_array_get(rows, (size_t)t));
        if (n != (size_t)out->top_k)
            return moe_fail(MOE_EINPUT, "token %lld: %zu of topk %lld experts", (long long)t, n,
                            (long long)out->top_k);
    }
    out->ids = moe_alloc((size_t)(out->n_tokens * out->top_k), sizeof *out->ids);
    for (int64_t i = 0; i < out->n_tokens * out->top_k; i++) {
        const json_t *row = json_array_get(rows, (size_t)(i / out->top_k));
        const json_t *id = json_array_get(row, (size_t)(i % out->top_k));
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > UINT16_MAX)
            return moe_fail(MOE_EINPUT, "token %lld: expected experts from 0 to 65535",
                            (long long)(i / out->top_k));
        out->ids[i] = (int32_t)json_integer_value(id);
    }
    return MOE_OK;
}

/* out->ids is to be freed, on errors too. */
static int read_record(const char *line, size_t n, struct record *out)
{
    enum { LIMIT = 999999999 }; /* as many digits as load_names reads */
    json_error_t error;
    json_int_t step = 0, layer = 0, mtp = -1, rank = 0, tokens = 0, top_k = 0;
    const char *block = "decoder";
    json_t *rows = NULL, *root = json_loadb(line, n, 0, &error);
    *out = (struct record){0};
    if (!root) return moe_fail(MOE_EINPUT, "not JSON: %s", error.text);
    int err = json_unpack_ex(root, &error, 0, "{s:I, s?s, s:I, s?I, s:I, s:I, s:I, s:o}", "step", &step,
                             "block", &block, "layer", &layer, "mtp_idx", &mtp, "rank", &rank, "num_tokens",
                             &tokens, "topk", &top_k, "top_indices", &rows);
    bool decoder = !strcmp(block, "decoder");
    if (err < 0)
        err = moe_fail(MOE_EINPUT, "%s", error.text);
    else if (!decoder && strcmp(block, "mtp") != 0)
        err = moe_fail(MOE_EINPUT, "block is '%.40s', expected decoder or mtp", block);
    else if (!decoder && (mtp < 0 || mtp > LIMIT))
        err = moe_fail(MOE_EINPUT, "block is 'mtp', expected mtp_idx, the number of the head from 0");
    else if (step < 0 || layer < 0 || layer > LIMIT || rank < 0 || rank > LIMIT || tokens < 0 ||
             tokens > LIMIT || top_k < 1 || top_k > UINT16_MAX)
        err = moe_fail(MOE_EINPUT, "a step, layer, rank, num_tokens or topk that cannot be");
    else {
        *out = (struct record){step, name_of(decoder ? -1 : mtp, layer), rank, tokens, top_k};
        err = read_ids(rows, out);
    }
    json_decref(root);
    return err;
}

struct reading {
    struct moe_import *in;
    struct names names;
    struct moe_routed routed; /* the step in hand, */
    const char *path;
    int line, first_line; /* which began here */
};

/* First pass: which layers there are. */
static int find_layer(struct reading *r, const struct record *record)
{
    struct names *s = &r->names;
    int place = place_of(s, record->name);
    if (place < s->n && s->items[place] == record->name) return MOE_OK;
    s->items = moe_grow(s->items, &s->cap, ++s->n, sizeof *s->items);
    memmove(s->items + place + 1, s->items + place, (size_t)(s->n - 1 - place) * sizeof *s->items);
    s->items[place] = record->name;
    return MOE_OK;
}

/* An error is one of its first line. */
static int end_step(struct reading *r)
{
    int err = r->routed.n_layers ? moe_import_add(r->in, &r->routed) : MOE_OK;
    if (err < 0) r->line = r->first_line;
    return err;
}

/* Second pass: lines of a step follow each other. */
static int add_record(struct reading *r, const struct record *record)
{
    struct moe_routed *to = &r->routed;
    if (record->step != to->step || record->rank != to->rank) MOE_TRY(end_step(r));
    if (to->n_layers == 0) {
        to->step = record->step;
        to->rank = (int)record->rank;
        r->first_line = r->line;
    }
    return moe_routed_add(to, place_of(&r->names, record->name), record->n_tokens, (int)record->top_k,
                          record->ids);
}

static int read_file(struct reading *r, int (*fn)(struct reading *r, const struct record *record))
{
    char *line = NULL;
    size_t cap = 0;
    int64_t bytes;
    int err = MOE_OK;
    MOE_TRY(moe_import_size(r->path, &bytes));
    FILE *f = fopen(r->path, "r");
    if (!f) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", r->path, strerror(errno));
    r->line = 0;
    for (ssize_t n; err >= 0 && (n = getline(&line, &cap, f)) >= 0;) {
        struct record record;
        r->line++;
        err = read_record(line, (size_t)n, &record);
        if (err >= 0) err = fn(r, &record);
        free(record.ids);
    }
    if (err >= 0 && ferror(f)) err = moe_fail(MOE_EINPUT, "%s", strerror(errno));
    if (err >= 0) err = end_step(r);
    if (err < 0) err = moe_fail(err, "%s:%d: %s", r->path, r->line, moe_error());
    free(line);
    fclose(f);
    return err;
}

static int put_names(struct moe_store *store, const struct names *s)
{
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    for (int i = 0; i < s->n; i++) {
        int mtp = mtp_of(s->items[i]);
        fputs(i ? " " : "", f);
        if (mtp >= 0) fprintf(f, "mtp%d.", mtp);
        fprintf(f, "%d", (int)s->items[i]);
    }
    fclose(f);
    int err = moe_store_put(store, "megatron_layers", text);
    free(text);
    return err;
}

static int read_files(struct moe_import *in, const char *const *files, int n_files)
{
    struct reading r = {.in = in};
    int err = MOE_OK;
    for (int i = 0; i < 2 * n_files && err >= 0; i++) {
        r.path = files[i % n_files];
        err = read_file(&r, i < n_files ? find_layer : add_record);
    }
    if (err >= 0) err = put_names(in->store, &r.names);
    moe_routed_clear(&r.routed);
    free(r.names.items);
    return err;
}

const struct moe_format moe_format_megatron = {
    .name = "megatron", .suffix = ".jsonl", .write = write_step, .read = read_files};
