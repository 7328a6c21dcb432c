/* calibrate.c - moesim calibrate: the numbers of this host, fitted to a capture, as a topology. */
#include "sim/cli/measured.h"
#include "sim/cli/steps.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const double busy = 1.3; /* crowding; a quiet host shows 1.0 to 1.15 */

enum { MOST_CORES = 1024 }; /* of a topology */

static const char undetermined[] = "not determined by this capture";

static json_t *numbers_json(const struct moe_fit *fit)
{
    json_t *list = json_array();
    for (int i = 0; i < MOE_FIT_COUNT; i++)
        json_array_append_new(list, json_pack("{s:s, s:f, s:f, s:s, s:s}", "number", moe_fitted_text[i],
                                              "value", fit->value[i] / moe_fitted_size[i], "spread",
                                              fit->spread[i] / moe_fitted_size[i], "unit", moe_fitted_unit[i],
                                              "source", fit->determined[i] ? "fitted" : undetermined));
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

static int write_topology(const struct moe_args *args, const struct moe_capture *c, const struct moe_fit *fit,
                          int64_t cores)
{
    const struct moe_topo t = moe_fit_topo(fit->value, cores);
    FILE *f;
    MOE_TRY(moe_output_open(args->output, &f));
    fprintf(f,
            "# The host of a capture: ranks are processes on its cores.\n"
            "name: %s\ngpus_per_node: %lld\n"
            "gpu:\n"
            "  matmul_float32: %.6g GFLOP/s\n  matmul_float64: %.6g GFLOP/s\n  memory: %.6g GB/s\n"
            "  launch: %.6g us\n  host_sync: %.6g us\n"
            "  source: >-\n"
            "    fitted by moesim calibrate from capture %s of %lld ranks: %d samples of %d steps.\n"
            "    assumed: matmul of the type that was not captured is the same.\n",
            args->name, (long long)t.gpus_per_node, t.matmul_float32_flops / 1e9,
            t.matmul_float64_flops / 1e9, t.memory_Bps / 1e9, t.launch_s * 1e6, t.host_sync_s * 1e6, c->id,
            (long long)c->in.scenario->ranks, fit->n_samples, c->steps.n);
    for (int i = 0; i < MOE_FIT_COUNT; i++)
        if (!fit->determined[i]) fprintf(f, "    %s: %s.\n", moe_fitted_text[i], undetermined);
    fprintf(f,
            "intra:\n  kind: switch\n  bandwidth: %.6g GB/s\n  latency: %.6g us\n  source: as for gpu\n"
            "inter:\n  nics_per_node: 1\n  bandwidth: %.6g GB/s\n  latency: %.6g us\n"
            "  source: \"assumed: as intra, there is one host\"\n",
            t.intra_Bps / 1e9, t.intra_latency_s * 1e6, t.nic_Bps / 1e9, t.inter_latency_s * 1e6);
    fprintf(f,
            "host:\n  cores: %lld\n  slice: %.6g us\n  scalar: %.6g GFLOP/s\n  call: %.6g us\n"
            "  source: cores counted, the rest as for gpu\n",
            (long long)t.cores, t.slice_s * 1e6, t.scalar_flops / 1e9, t.call_s * 1e6);
    return moe_output_close(args->output, f);
}

/* A plain YAML text, as long as a name may be; "-" would be a list. */
static int check_name(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    if (n > 0 && n < MOE_NAME && !name[n] && *name != '-') return MOE_OK;
    return moe_fail(MOE_EUSAGE, "--name %s: expected up to %d letters, digits, _ or -, no - first", name,
                    MOE_NAME - 1);
}

static int count_cores(int64_t asked, int64_t *out)
{
    int64_t here = sysconf(_SC_NPROCESSORS_ONLN);
    *out = asked ? asked : here < 1 ? 1 : here < MOST_CORES ? here : MOST_CORES;
    if (*out <= MOST_CORES) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "--cores %lld: expected 1 to %d", (long long)asked, MOST_CORES);
}

static int check_trace(const struct moe_args *args)
{
    if (args->n_inputs > 1 || args->op || args->plot || args->like || args->tuning)
        return moe_fail(MOE_EUSAGE, "without --topology BASE: expected one trace, and no option of measured "
                                    "collectives");
    if (access(args->input, R_OK) < 0 || moe_input_is_trace(args->input)) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s: not a trace; measured collectives need --topology BASE", args->input);
}

int moe_cli_calibrate(const struct moe_args *args)
{
    struct moe_capture c;
    struct moe_fit fit;
    int64_t cores;
    int err;
    MOE_TRY(check_name(args->name));
    if (args->topology) return moe_cli_calibrate_nccl(args);
    MOE_TRY(check_trace(args));
    MOE_TRY(count_cores(args->cores, &cores));
    MOE_TRY(moe_output_check(args, "-o", args->output));
    MOE_TRY_GOTO(moe_capture_load(args, &c));
    err = moe_calibrate(&c.steps, cores, &fit);
    if (err < 0) MOE_TRY_GOTO(moe_fail_in(args->input, err));
    MOE_TRY_GOTO(write_topology(args, &c, &fit, cores));
    if (args->json) {
        moe_print_json(json_pack("{s:s, s:I, s:i, s:i, s:o, s:o}", "schema", "moesim.calibrate/1", "cores",
                                 (json_int_t)cores, "steps", c.steps.n, "samples", fit.n_samples, "numbers",
                                 numbers_json(&fit), "residuals", residuals_json(&fit)));
    } else {
        printf("%s: %d numbers fitted to %d samples, medians of %d steps of %lld; %lld cores\n\n",
               args->output, MOE_FIT_COUNT, fit.n_samples, c.steps.n, (long long)c.n_complete,
               (long long)cores);
        moe_print_rows(numbers_json(&fit));
        putchar('\n');
        moe_print_rows(residuals_json(&fit));
        if (fit.value[MOE_FIT_CROWDING] > busy)
            puts("\nother programs kept the host busy: capture again when it is quiet");
    }
done:
    moe_capture_free(&c);
    return err;
}
