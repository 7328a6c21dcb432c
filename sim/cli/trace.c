/* trace.c - moesim trace merge, export, import: traces as files. */
#include "sim/cli/cli.h"
#include "traces/format.h"
#include "traces/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int moe_check_replaceable(const char *path)
{
    char partial[PATH_MAX];
    snprintf(partial, sizeof partial, "%s.partial", path);
    const char *const replaced[] = {path, partial};
    for (int i = 0; i < 2; i++)
        if (access(replaced[i], F_OK) == 0 && !moe_store_probe(replaced[i]))
            return moe_fail(MOE_EINPUT, "%s: exists and is no trace store; not replaced", replaced[i]);
    return MOE_OK;
}

/* 0: this file says nothing, its rank was killed at once. */
static int ranks_of(const char *part, int *out)
{
    struct moe_store *store;
    struct moe_store_info info;
    char *key = NULL;
    int err;
    MOE_TRY_GOTO(moe_store_open(part, MOE_STORE_READ, &store));
    MOE_TRY_GOTO(moe_store_info(store, &info));
    MOE_TRY_GOTO(moe_store_get(store, "ranks", &key));
    if (!key && info.n_ranks > 0) /* which counts the ranks of this file */
        MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "%s: no run key 'ranks', expected the number of rank files", part));
    *out = info.n_ranks;
done:
    free(key);
    moe_store_close(store);
    return err;
}

/* As the first rank file says that says it. */
static int count_ranks(const char *prefix, int *out)
{
    *out = 0;
    for (int r = 0; *out == 0; r++) {
        char *part = moe_store_part(prefix, r);
        int err = ranks_of(part, out);
        free(part);
        MOE_TRY(err);
    }
    return MOE_OK;
}

int moe_cli_trace_merge(const struct moe_args *args)
{
    const char *output = args->output ? args->output : args->input;
    int ranks;
    MOE_TRY(moe_check_replaceable(output));
    MOE_TRY(count_ranks(args->input, &ranks));
    MOE_TRY(moe_store_merge(args->input, ranks, output));
    return moe_print_trace(output, "moesim.trace.merge/1", args->json);
}

int moe_cli_trace_export(const struct moe_args *args)
{
    const struct moe_format *format;
    int n_files;
    int64_t n_routings;
    MOE_TRY(moe_format_find(args->format, &format));
    MOE_TRY(moe_format_export(format, args->input, args->step, args->output, &n_files, &n_routings));
    json_t *root = args->json ? json_pack("{s:s}", "schema", "moesim.trace.export/1") : json_object();
    json_object_set_new(root, "output", moe_json_text(args->output));
    json_object_set_new(root, "files", json_integer(n_files));
    json_object_set_new(root, "routings", json_integer(n_routings));
    (args->json ? moe_print_json : moe_print_fields)(root);
    return MOE_OK;
}

int moe_cli_trace_import(const struct moe_args *args)
{
    const struct moe_format *format;
    MOE_TRY(moe_format_find(args->format, &format));
    MOE_TRY(moe_check_replaceable(args->output));
    MOE_TRY(moe_format_import(format, args->inputs, args->n_inputs, args->output));
    return moe_print_trace(args->output, "moesim.trace.import/1", args->json);
}
