/* calibrate.c - moesim calibrate: the numbers of this host, fitted to a capture, as a topology. */
#include "sim/cli/steps.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static json_t *numbers_json(const struct moe_fit *fit)
{
    json_t *list = json_array();
    for (int i = 0; i < MOE_FIT_COUNT; i++)
        json_array_append_new(list,
                              json_pack("{s:s, s:f, s:f, s:s}", "number", moe_fitted_text[i], "value",
                                        fit->value[i] / moe_fitted_size[i], "spread",
                                        fit->spread[i] / moe_fitted_size[i], "unit", moe_fitted_unit[i]));
    return list;
}

static json_t *residuals_json(const struct moe_fit *fit)
{
    json_t *list = json_array();
    for (int c = 0; c < MOE_CLASS_COUNT; c++)
        json_array_append_new(list, json_pack("{s:s, s:i, s:f}", "class", moe_op_class_text[c], "samples",
                                              fit->class_samples[c], "median_error_pct",
                                              100 * fit->class_error[c]));
    return list;
}

/* Writes "key: value unit". */
static void put(FILE *f, const struct moe_fit *fit, enum moe_fitted number, const char *key)
{
    fprintf(f, "  %s: %.6g %s\n", key, fit->value[number] / moe_fitted_size[number], moe_fitted_unit[number]);
}

static int write_topology(const struct moe_args *args, const struct moe_capture *c, const struct moe_fit *fit,
                          int64_t cores)
{
    FILE *f = fopen(args->output, "w");
    if (!f) return moe_fail(MOE_EFAILED, "%s: %s", args->output, strerror(errno));
    fprintf(f, "# The host of a capture, for ranks that are processes on its cores.\n");
    fprintf(f, "name: %.*s\ngpus_per_node: 1024\ngpu:\n", MOE_NAME - 1, args->name);
    put(f, fit, MOE_FIT_MATMUL, "matmul_float32");
    put(f, fit, MOE_FIT_MATMUL, "matmul_float64");
    put(f, fit, MOE_FIT_MEMORY, "memory");
    put(f, fit, MOE_FIT_LAUNCH, "launch");
    put(f, fit, MOE_FIT_HOST_SYNC, "host_sync");
    fprintf(f,
            "  source: >-\n    Fitted by moesim calibrate to %d samples of %d steps of a capture of %lld "
            "ranks.\n",
            fit->n_samples, c->steps.n, (long long)c->in.scenario->ranks);
    fprintf(f,
            "    matmul of the type that was not captured is assumed: the same.\nintra:\n  kind: switch\n");
    put(f, fit, MOE_FIT_BANDWIDTH, "bandwidth");
    put(f, fit, MOE_FIT_LATENCY, "latency");
    fprintf(f, "  source: as for gpu\ninter:\n  nics_per_node: 1\n");
    put(f, fit, MOE_FIT_BANDWIDTH, "bandwidth");
    put(f, fit, MOE_FIT_LATENCY, "latency");
    fprintf(f, "  source: assumed, as intra; there is one host\nhost:\n  cores: %lld\n", (long long)cores);
    put(f, fit, MOE_FIT_SLICE, "slice");
    put(f, fit, MOE_FIT_SCALAR, "scalar");
    put(f, fit, MOE_FIT_CALL, "call");
    fprintf(f, "  source: cores counted, the rest as for gpu\n");
    if (fclose(f) != 0) return moe_fail(MOE_EFAILED, "%s: %s", args->output, strerror(errno));
    return MOE_OK;
}

int moe_cli_calibrate(const struct moe_args *args)
{
    struct moe_capture c;
    struct moe_fit fit;
    int64_t cores = args->cores ? args->cores : sysconf(_SC_NPROCESSORS_ONLN);
    int err;
    MOE_TRY_GOTO(moe_capture_load(args, &c));
    MOE_TRY_GOTO(moe_calibrate(&c.steps, cores, &fit));
    MOE_TRY_GOTO(write_topology(args, &c, &fit, cores));
    if (args->json) {
        moe_print_json(json_pack("{s:s, s:I, s:i, s:i, s:o, s:o}", "schema", "moesim.calibrate/1", "cores",
                                 (json_int_t)cores, "steps", c.steps.n, "samples", fit.n_samples, "numbers",
                                 numbers_json(&fit), "residuals", residuals_json(&fit)));
    } else {
        printf("%s: %d numbers fitted to %d samples of %d steps of %lld; %lld cores\n\n", args->output,
               MOE_FIT_COUNT, fit.n_samples, c.steps.n, (long long)c.n_complete, (long long)cores);
        moe_print_rows(numbers_json(&fit));
        putchar('\n');
        moe_print_rows(residuals_json(&fit));
    }
done:
    moe_capture_free(&c);
    return err;
}
