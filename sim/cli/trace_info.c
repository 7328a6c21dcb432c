/* trace_info.c - moesim trace info: what a capture holds. */
#include "sim/cli/cli.h"
#include "traces/store.h"

#include <math.h>
#include <stdlib.h>

/* Keys of the run that are shown. */
static const struct {
    const char *name;
    bool number;
} keys[] = {{"seed", true}, {"data_bytes", true}, {"data_hash", false}, {"version", false}};
enum { KEY_COUNT = sizeof keys / sizeof *keys };

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *info_json(const char *path, const struct moe_store_info *i)
{
    return json_pack("{s:o, s:i, s:i, s:i, s:i, s:I, s:I, s:b, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:I}",
                     "file", moe_json_text(path), "ranks", i->n_ranks, "layers", i->n_layers, "experts",
                     i->n_experts, "top_k", i->top_k, "steps_asked", (json_int_t)i->steps_asked,
                     "steps_complete", (json_int_t)i->steps_complete, "complete", i->complete, "first_step",
                     (json_int_t)i->first_step, "last_step", (json_int_t)i->last_step, "first_loss_nats",
                     number(i->first_loss), "last_loss_nats", number(i->last_loss), "median_step_us",
                     number(i->median_step_us), "routings", (json_int_t)i->n_routing, "operations",
                     (json_int_t)i->n_ops, "results", (json_int_t)i->n_results);
}

/* A capture counts the layers of every micro-batch, an import without scenario those that it found. */
static int set_layers(struct moe_store *store, const struct moe_store_info *info, json_t *out)
{
    char *text;
    struct moe_scenario *sc = NULL;
    MOE_TRY(moe_store_get(store, "scenario", &text));
    if (text && moe_scenario_parse("scenario", text, &sc) == MOE_OK &&
        sc->layers * sc->micro_batches == info->n_layers) {
        json_object_set_new(out, "layers", json_integer(sc->layers));
        json_object_set_new(out, "micro_batches", json_integer(sc->micro_batches));
    }
    moe_scenario_free(sc);
    free(text);
    return MOE_OK;
}

int moe_print_trace(const char *path, const char *schema, bool json)
{
    struct moe_store *store;
    struct moe_store_info info;
    json_t *root = json ? json_pack("{s:s}", "schema", schema) : json_object();
    int err;
    MOE_TRY_GOTO(moe_store_open(path, MOE_STORE_READ, &store));
    MOE_TRY_GOTO(moe_store_info(store, &info));
    json_object_update_new(root, info_json(path, &info));
    MOE_TRY_GOTO(set_layers(store, &info, root));
    for (int k = 0; k < KEY_COUNT; k++) {
        char *value;
        MOE_TRY_GOTO(moe_store_get(store, keys[k].name, &value));
        json_t *shown = !value           ? json_null()
                        : keys[k].number ? json_integer(strtoll(value, NULL, 10))
                                         : moe_json_text(value);
        json_object_set_new(root, keys[k].name, shown);
        free(value);
    }
    (json ? moe_print_json : moe_print_fields)(json_incref(root));
done:
    json_decref(root);
    moe_store_close(store);
    return err;
}

int moe_cli_trace_info(const struct moe_args *args)
{
    return moe_print_trace(args->input, "moesim.trace.info/1", args->json);
}
