/* simulate.c - moesim simulate: the time of a step, and where it goes. */
#include "sim/check/check.h"
#include "sim/cli/cli.h"
#include "sim/values.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 12 }; /* operations listed as text */

#define PART(name) #name, offsetof(struct moe_sim_result, name)
const struct moe_part moe_parts[MOE_PARTS] = {
    {"compute", PART(compute_us)},
    {"exposed collectives", PART(exposed_us)},
    {"waiting for others", PART(waiting_us)},
    {"host and idle", PART(host_us)},
};

double moe_part_us(const struct moe_sim_result *r, int part)
{
    return *(const double *)((const char *)r + moe_parts[part].offset);
}

double moe_step_us(const struct moe_sim_result *r)
{
    return (double)r->step / 1e6;
}

int moe_predict(const struct moe_schedule *s, const struct moe_routing *r, const char *topology,
                struct moe_sim_result *out)
{
    struct moe_topo *t;
    *out = (struct moe_sim_result){0};
    if (!*topology) return moe_fail(MOE_EUSAGE, "no topology, expected --topology or one in the scenario");
    MOE_TRY(moe_topo_load(topology, &t));
    int err = moe_simulate(s, r, t, out);
    moe_topo_free(t);
    return err < 0 ? moe_fail(err, "%s: %s", topology, moe_error()) : err;
}

void moe_result_json(const struct moe_sim_result *r, json_t *object)
{
    json_object_set_new(object, "step_us", json_real(moe_step_us(r)));
    json_object_set_new(object, "step_low_us", moe_json_known(moe_step_us(r) * exp(-r->step_error)));
    json_object_set_new(object, "step_high_us", moe_json_known(moe_step_us(r) * exp(r->step_error)));
    for (int p = 0; p < MOE_PARTS; p++)
        json_object_set_new(object, moe_parts[p].key, json_real(moe_part_us(r, p)));
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++) {
        char key[MOE_NAME];
        snprintf(key, sizeof key, "%s_bytes", moe_link_class_text[c]);
        for (char *p = key; *p; p++)
            if (*p == ' ' || *p == '-') *p = '_';
        json_object_set_new(object, key, json_integer(r->bytes[c]));
    }
}

static json_t *operations_json(const struct moe_sim_row *rows, int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:f, s:f, s:I}", "operation", rows[i].op,
                                              "kind", moe_op_kind_text[rows[i].kind], "times",
                                              rows[i].instances, "own_us", rows[i].own_us, "waiting_us",
                                              rows[i].wait_us, "sent_bytes", (json_int_t)rows[i].bytes));
    return list;
}

/* A step that does not end has verdicts and no times. */
static void print_json(const struct moe_sim_result *r, const struct moe_input *in,
                       const struct moe_verdicts *verdicts, bool ends)
{
    json_t *root = json_pack("{s:s, s:o, s:o, s:o}", "schema", "moesim.simulate/1", "input",
                             moe_input_json(in), "topology", moe_json_text(in->topology), "verdicts",
                             moe_verdicts_json(verdicts, in->scenario));
    if (!ends) {
        json_object_set_new(root, "error", moe_json_text(moe_error()));
        moe_print_json(root);
        return;
    }
    moe_result_json(r, root);
    json_object_set_new(root, "collectives_us", json_real(r->comm_us));
    json_object_set_new(root, "events", json_integer(r->events));
    struct moe_kept kept = moe_values_kept(in->schedule, in->routing);
    json_object_set_new(root, "chosen_rows", json_integer(kept.chosen));
    json_object_set_new(root, "dropped_rows", json_integer(kept.dropped));
    json_object_set_new(root, "padded_rows", json_integer(kept.padded));
    json_object_set_new(root, "operations", operations_json(r->rows, r->n_rows));
    moe_print_json(root);
}

/* ---- text ---- */

static int by_time(const void *a, const void *b)
{
    const struct moe_sim_row *x = a, *y = b;
    double x_us = x->own_us + x->wait_us, y_us = y->own_us + y->wait_us;
    return x_us != y_us ? (x_us < y_us) - (x_us > y_us) : strcmp(x->op, y->op);
}

static void print_text(struct moe_sim_result *r, const struct moe_input *in)
{
    double step_us = moe_step_us(r), hidden_us = r->comm_us - r->exposed_us, rest_us = 0;
    double per_us = step_us > 0 ? 1 / step_us : 0;
    printf("%s on %s\n", in->scenario->name, in->topology);
    moe_input_print(in);
    printf("\n%-20s %12.1f us  %.0f tokens/s\n", "step", step_us, 1e6 * per_us * (double)in->tokens);
    if (!isnan(r->step_error))
        printf("  80 %% of such steps  %12.1f to %.1f us\n", step_us * exp(-r->step_error),
               step_us * exp(r->step_error));
    for (int p = 0; p < MOE_PARTS; p++)
        printf("  %-18s %12.1f us  %5.1f %%\n", moe_parts[p].text, moe_part_us(r, p),
               100 * per_us * moe_part_us(r, p));
    printf("%-20s %12.1f us  %5.1f %% of it behind compute\n\n", "all collectives", r->comm_us,
           hidden_us > 0 ? 100 * hidden_us / r->comm_us : 0);
    struct moe_kept kept = moe_values_kept(in->schedule, in->routing);
    double per_row = kept.chosen ? 100 / (double)kept.chosen : 0;
    if (kept.dropped || kept.padded)
        printf("capacity: %.1f %% of the rows dropped, %.1f %% padded\n\n", per_row * (double)kept.dropped,
               per_row * (double)kept.padded);
    puts("carried by links");
    for (int c = 0; c < MOE_LINK_CLASS_COUNT; c++)
        printf("  %-18s %12.3f MB\n", moe_link_class_text[c], (double)r->bytes[c] / 1e6);
    putchar('\n');
    qsort(r->rows, (size_t)r->n_rows, sizeof *r->rows, by_time);
    int listed = r->n_rows < LONGEST ? r->n_rows : LONGEST;
    moe_print_rows(operations_json(r->rows, listed));
    for (int i = listed; i < r->n_rows; i++) rest_us += r->rows[i].own_us + r->rows[i].wait_us;
    if (listed < r->n_rows)
        printf("and %d shorter ones, together %.1f us (--json lists all)\n", r->n_rows - listed, rest_us);
}

int moe_cli_simulate(const struct moe_args *args)
{
    struct moe_input in;
    struct moe_sim_result r = {0};
    struct moe_verdicts verdicts = {0};
    char *wrong = NULL;
    int err;
    MOE_TRY_GOTO(moe_input_load(args, &in));
    moe_check(in.schedule, in.routing, &verdicts);
    err = moe_predict(in.schedule, in.routing, in.topology, &r);
    if (args->json && (err >= 0 || err == MOE_EVERDICT)) print_json(&r, &in, &verdicts, err >= 0);
    if (err < 0) goto done;
    if (!args->json) print_text(&r, &in);
    wrong = moe_first_error(&verdicts, in.scenario);
    if (wrong) fprintf(stderr, "moesim simulate: warning: %s: %s (run moesim check)\n", args->input, wrong);
done:
    free(wrong);
    moe_verdicts_free(&verdicts);
    moe_sim_free(&r);
    moe_input_free(&in);
    return err;
}
