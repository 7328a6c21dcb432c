/* measured_json.c - see measured.h: what nccl-tests writes with -J.
 *
 * Messages of the parser are not passed on: they quote the file, and it holds the environment. */
#include "traces/measured.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* NaN is written as the string "nan". */
static double number(const json_t *value)
{
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static int read_devices(const json_t *config, int *ranks, int *nodes)
{
    const json_t *list = json_object_get(config, "devices");
    struct moe_measured_devices d = {.per_process =
                                         moe_measured_per_process(number(json_object_get(config, "nthreads")),
                                                                  number(json_object_get(config, "ngpus")))};
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *device = json_array_get(list, i);
        const char *host = json_string_value(json_object_get(device, "hostname"));
        moe_measured_add_device(&d, number(json_object_get(device, "rank")),
                                (int)json_integer_value(json_object_get(device, "group")), host ? host : "");
    }
    moe_measured_count(&d, ranks, nodes);
    free(d.items);
    return *ranks ? MOE_OK : moe_fail(MOE_EINPUT, "no devices in config, expected rank, group and hostname");
}

static void read_result(const json_t *result, struct moe_measured_row row, const char *op,
                        struct moe_measured *out)
{
    static const char *const blocks[] = {"out_of_place", "in_place"};
    const char *type = json_string_value(json_object_get(result, "type"));
    double us[2];
    bool wrong = false;
    for (int i = 0; i < 2; i++) {
        const json_t *block = json_object_get(result, blocks[i]), *time = json_object_get(block, "cpu_time");
        row.host_time |= time != NULL;
        us[i] = number(time ? time : json_object_get(block, "time"));
        wrong |= number(json_object_get(block, "nwrong")) > 0;
    }
    if (type) moe_copy_name(row.type, type);
    if (wrong)
        out->n_wrong++;
    else
        moe_measured_add(out, row, op, number(json_object_get(result, "size")), us);
}

static int read_report(const json_t *root, const char *op, struct moe_measured *out)
{
    enum { OLDEST = 1, NEWEST = 3 };
    const json_t *version = json_object_get(root, "version"), *results = json_object_get(root, "results");
    const char *program = json_string_value(json_array_get(json_object_get(root, "args"), 0));
    const char *said = program ? moe_measured_program(program) : NULL;
    struct moe_measured_row row = {0};
    if (!json_is_integer(version) || !json_is_array(results))
        return moe_fail(MOE_EINPUT, "no version or no results, expected what nccl-tests -J writes");
    if (json_integer_value(version) < OLDEST || json_integer_value(version) > NEWEST)
        return moe_fail(MOE_EINPUT, "version %lld of nccl-tests' JSON, expected %d to %d",
                        (long long)json_integer_value(version), OLDEST, NEWEST);
    if (said) op = said;
    if (!op)
        return moe_fail(MOE_EINPUT,
                        "times of an unknown collective, expected NAME_perf as the first of args, or"
                        " its name as an option");
    MOE_TRY(read_devices(json_object_get(root, "config"), &row.ranks, &row.nodes));
    for (size_t i = 0; i < json_array_size(results); i++) {
        row.line = (int)i + 1;
        read_result(json_array_get(results, i), row, op, out);
    }
    return MOE_OK;
}

int moe_measured_read_json(const char *text, size_t bytes, const char *op, struct moe_measured *out,
                           int *line)
{
    json_error_t error;
    json_t *root = json_loadb(text, bytes, 0, &error);
    if (!root) {
        *line = error.line;
        return json_error_code(&error) == json_error_premature_end_of_input
                   ? moe_fail(MOE_EINPUT, "JSON without its end, as nccl-tests leaves it when it fails")
                   : moe_fail(MOE_EINPUT, "wrong JSON at column %d", error.column);
    }
    int err = read_report(root, op, out);
    json_decref(root);
    return err;
}
