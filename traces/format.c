/* format.c - see format.h: the table, and what all formats share. */
#include "traces/format.h"

#include "traces/store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct moe_format *const formats[] = {&moe_format_megatron, &moe_format_npy};
enum { FORMAT_COUNT = sizeof formats / sizeof *formats };

int moe_format_find(const char *name, const struct moe_format **out)
{
    const char *names[FORMAT_COUNT];
    for (int i = 0; i < FORMAT_COUNT; i++) {
        *out = formats[i];
        names[i] = formats[i]->name;
        if (!strcmp(name, names[i])) return MOE_OK;
    }
    char hint[MOE_HINT];
    return moe_fail(MOE_EUSAGE, "--format %s: unknown format%s", name,
                    moe_hint(name, names, FORMAT_COUNT, hint));
}

/* "a/b" or "a.partial", to be freed */
static char *joined(const char *a, const char *b)
{
    char *out;
    int n = asprintf(&out, "%s%s", a, b);
    moe_assert(n >= 0);
    return out;
}

/* ---- a step of a rank ---- */

int moe_routed_add(struct moe_routed *r, int layer, int64_t n_tokens, int top_k, const int32_t *ids)
{
    int l = 0;
    while (l < r->n_layers && r->layers[l].layer != layer) l++;
    if (r->n_layers == 0) r->top_k = top_k;
    if (r->top_k != top_k)
        return moe_fail(MOE_EINPUT, "layer %d: top-%d, expected top-%d", layer, top_k, r->top_k);
    if (l == r->n_layers) {
        r->layers = moe_grow(r->layers, &r->cap, ++r->n_layers, sizeof *r->layers);
        r->layers[l] = (struct moe_routed_layer){.layer = layer};
    }
    struct moe_routed_layer *to = &r->layers[l];
    if (n_tokens > INT32_MAX / top_k - to->n_tokens)
        return moe_fail(MOE_EINPUT, "layer %d: more than %d ids", layer, INT32_MAX);
    size_t old = (size_t)to->n_tokens * (size_t)top_k, more = (size_t)n_tokens * (size_t)top_k;
    to->ids = moe_grow(to->ids, &to->cap, (int)(old + more), sizeof *to->ids);
    if (more) memcpy(to->ids + old, ids, more * sizeof *ids);
    to->n_tokens += n_tokens;
    return MOE_OK;
}

void moe_routed_clear(struct moe_routed *r)
{
    for (int l = 0; l < r->n_layers; l++) free(r->layers[l].ids);
    free(r->layers);
    *r = (struct moe_routed){.step = r->step, .rank = r->rank};
}

/* ---- export ---- */

static int end_file(struct moe_export *e)
{
    if (!e->file) return MOE_OK;
    bool bad = ferror(e->file) != 0;
    bad |= fclose(e->file) != 0;
    e->file = NULL;
    return bad ? moe_fail(MOE_EFAILED, "%s: %s", e->names[e->n_files - 1], strerror(errno)) : MOE_OK;
}

static bool is_file(const struct moe_export *e)
{
    size_t n = strlen(e->path), suffix = strlen(e->format->suffix);
    return n > suffix && !strcmp(e->path + n - suffix, e->format->suffix);
}

int moe_export_begin(struct moe_export *e, const char *name)
{
    if (e->file && !strcmp(name, e->name)) return MOE_OK;
    MOE_TRY(end_file(e));
    snprintf(e->name, sizeof e->name, "%s", name);
    if (is_file(e) && e->n_files > 0)
        return moe_fail(MOE_EUSAGE, "%s: one file is not enough, expected a folder", e->path);
    if (!is_file(e) && mkdir(e->path, 0777) == 0) e->made = true;
    char *folder = joined(e->path, "/");
    e->names = moe_grow(e->names, &e->cap, e->n_files + 1, sizeof *e->names);
    e->names[e->n_files] = is_file(e) ? joined(e->path, "") : joined(folder, name);
    free(folder);
    char *partial = joined(e->names[e->n_files++], ".partial");
    e->file = fopen(partial, "w");
    free(partial);
    return e->file ? MOE_OK : moe_fail(MOE_EFAILED, "%s: %s", e->names[e->n_files - 1], strerror(errno));
}

/* The layers of a step of a rank come one after the other: the next one writes them. */
static int gather(void *ctx, int64_t step, int layer, int rank)
{
    struct moe_export *e = ctx;
    struct moe_routed *r = &e->routed;
    int64_t n_tokens;
    int top_k;
    int32_t *ids;
    if (r->n_layers > 0 && (r->step != step || r->rank != rank)) {
        MOE_TRY(e->format->write(e));
        moe_routed_clear(r);
    }
    MOE_TRY(moe_store_routing(e->store, step, layer, rank, &n_tokens, &top_k, &ids));
    if (!ids) /* the row's keys are no whole numbers */
        return moe_fail(MOE_EINPUT, "step %lld of the trace has no routing for layer %d, rank %d",
                        (long long)step, layer, rank);
    r->step = step;
    r->rank = rank;
    int err = moe_routed_add(r, layer, n_tokens, top_k, ids);
    free(ids);
    e->n_routings++;
    return err;
}

/* Names the files, or removes them. */
static int finish(struct moe_export *e, int err)
{
    int ended = end_file(e), n_named = 0;
    if (err >= 0) err = ended;
    for (int i = 0; i < e->n_files; i++) {
        char *partial = joined(e->names[i], ".partial");
        if (err >= 0 && rename(partial, e->names[i]) < 0)
            err = moe_fail(MOE_EFAILED, "%s: %s", e->names[i], strerror(errno));
        if (err >= 0)
            n_named++;
        else
            unlink(partial);
        free(partial);
    }
    for (int i = 0; i < e->n_files; i++) {
        if (err < 0 && i < n_named) unlink(e->names[i]);
        free(e->names[i]);
    }
    if (err < 0 && e->made) rmdir(e->path);
    free(e->names);
    moe_routed_clear(&e->routed);
    return err;
}

int moe_format_export(const struct moe_format *format, const char *trace, int64_t step, const char *path,
                      int *n_files, int64_t *n_routings)
{
    struct moe_export e = {.format = format, .path = path};
    struct moe_store_info info = {0};
    MOE_TRY(moe_store_open(trace, MOE_STORE_READ, &e.store));
    int err = moe_store_info(e.store, &info);
    e.n_layers = info.n_layers;
    if (err >= 0)
        err = moe_store_each_routing(e.store, step < 0 ? 0 : step, step < 0 ? INT64_MAX : step, gather, &e);
    char number[24] = "";
    if (step >= 0) snprintf(number, sizeof number, " %lld", (long long)step);
    if (err >= 0 && e.n_routings == 0)
        err = moe_fail(MOE_EINPUT, "%s: no complete step%s with routing", trace, number);
    if (err >= 0) err = format->write(&e);
    *n_files = e.n_files;
    *n_routings = e.n_routings;
    err = finish(&e, err);
    moe_store_close(e.store);
    return err;
}

/* ---- import ---- */

int moe_import_size(const char *path, int64_t *bytes)
{
    struct stat st;
    if (stat(path, &st) < 0) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return moe_fail(MOE_EINPUT, "%s: not a regular file", path);
    *bytes = st.st_size;
    return MOE_OK;
}

static int add_layer(struct moe_import *in, const struct moe_routed *r, const struct moe_routed_layer *l)
{
    int64_t n_tokens;
    int top_k;
    int32_t *there;
    MOE_TRY(moe_store_routing(in->store, r->step, l->layer, r->rank, &n_tokens, &top_k, &there));
    free(there);
    if (there)
        return moe_fail(MOE_EINPUT, "step %lld of rank %d is there twice", (long long)r->step, r->rank);
    for (int64_t i = 0; i < l->n_tokens * r->top_k; i++)
        if (l->ids[i] >= in->n_experts) in->n_experts = l->ids[i] + 1;
    if (l->layer >= in->n_layers) in->n_layers = l->layer + 1;
    return moe_store_add_routing(in->store, r->step, l->layer, r->rank, l->n_tokens, r->top_k, l->ids);
}

int moe_import_add(struct moe_import *in, struct moe_routed *r)
{
    if (in->n_layers == 0) in->top_k = r->top_k;
    if (in->top_k != r->top_k)
        return moe_fail(MOE_EINPUT, "step %lld of rank %d: top-%d, expected top-%d", (long long)r->step,
                        r->rank, r->top_k, in->top_k);
    for (int l = 0; l < r->n_layers; l++) MOE_TRY(add_layer(in, r, &r->layers[l]));
    moe_routed_clear(r);
    return MOE_OK;
}

static int put_run(const struct moe_import *in)
{
    const char *const key[] = {"layers", "experts", "top_k"};
    const int value[] = {in->n_layers, in->n_experts, in->top_k};
    for (int i = 0; i < 3; i++) {
        char text[16];
        snprintf(text, sizeof text, "%d", value[i]);
        MOE_TRY(moe_store_put(in->store, key[i], text));
    }
    return moe_store_add_routed(in->store);
}

int moe_format_import(const struct moe_format *format, const char *const *files, int n_files,
                      const char *path)
{
    struct moe_import in = {0};
    char *partial = joined(path, ".partial");
    int err;
    MOE_TRY_GOTO(moe_store_open(partial, MOE_STORE_BUILD, &in.store));
    MOE_TRY_GOTO(moe_store_begin(in.store));
    MOE_TRY_GOTO(format->read(&in, files, n_files));
    if (in.n_layers == 0) MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "%s: no routing", files[0]));
    MOE_TRY_GOTO(put_run(&in));
    MOE_TRY_GOTO(moe_store_commit(in.store));
    moe_store_close(in.store);
    in.store = NULL;
    err = moe_store_rename(partial, path);
done:
    moe_store_close(in.store);
    if (err < 0) moe_store_remove(partial);
    free(partial);
    return err;
}
