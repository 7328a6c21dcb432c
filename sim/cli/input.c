/* input.c - see cli.h. */
#include "sim/cli/cli.h"
#include "traces/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A trace keeps the text of its scenario. */
static int load_scenario(struct moe_store *store, const char *path, struct moe_scenario **out)
{
    char *text;
    MOE_TRY(moe_store_get(store, "scenario", &text));
    if (!text)
        return moe_fail(MOE_EINPUT, "%s: holds no scenario, give one: SCENARIO --routing %s", path, path);
    int err = moe_scenario_parse(path, text, out);
    free(text);
    return err;
}

static int check_fits(const struct moe_input *in, const char *path)
{
    const struct moe_schedule *s = in->schedule;
    const struct moe_routing *r = in->routing;
    if (r->n_ranks != s->n_ranks || r->n_layers != s->n_layers * s->n_micro || r->n_experts != s->n_experts ||
        r->top_k != s->top_k)
        return moe_fail(MOE_EINPUT, "%s: its routing is not of %d ranks, %d layers, %d experts top-%d", path,
                        s->n_ranks, s->n_layers, s->n_experts, s->top_k);
    for (int i = 0; i < s->n_ranks; i++)
        if (r->tokens[i] != s->tokens[i])
            return moe_fail(MOE_EINPUT, "%s: rank %d routed %lld tokens; the scenario says %lld", path, i,
                            (long long)r->tokens[i], (long long)s->tokens[i]);
    return MOE_OK;
}

/* Routing from the trace, and the scenario when there is none yet. */
static int load_trace(const struct moe_args *args, const char *path, struct moe_input *in)
{
    struct moe_store *store;
    struct moe_store_info info;
    int err;
    MOE_TRY(moe_store_open(path, MOE_STORE_READ, &store));
    if (!in->scenario) MOE_TRY_GOTO(load_scenario(store, path, &in->scenario));
    MOE_TRY_GOTO(moe_store_info(store, &info));
    in->step = args->step < 0 ? info.last_step : args->step;
    err = moe_routing_load(store, in->step, &in->routing);
    if (err < 0) MOE_TRY_GOTO(moe_fail_in(path, err));
    MOE_TRY_GOTO(moe_lower(in->scenario, &in->schedule));
    MOE_TRY_GOTO(check_fits(in, path));
done:
    moe_store_close(store);
    return err;
}

/* A pipe is not probed: what is read of it is gone. */
bool moe_input_is_trace(const char *path)
{
    struct stat st;
    const char *suffix = strrchr(path, '.');
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) &&
           ((suffix && !strcmp(suffix, ".db")) || moe_store_probe(path));
}

int moe_input_check_merged(const char *path)
{
    const char *end = strrchr(path, '.');
    char *part = moe_store_part(path, 0);
    int rank, at = 0, err = MOE_OK;
    if (access(path, F_OK) < 0 && moe_store_probe(part))
        err = moe_fail(MOE_EINPUT, "%s: not there, but files of its ranks are; run moesim trace merge %s",
                       path, path);
    else if (end && sscanf(end, ".rank%d%n", &rank, &at) == 1 && !end[at] && moe_store_probe(path))
        err = moe_fail(MOE_EINPUT, "%s: the file of one rank; run moesim trace merge %.*s", path,
                       (int)(end - path), path);
    free(part);
    return err;
}

int moe_input_load(const struct moe_args *args, struct moe_input *in)
{
    *in = (struct moe_input){.step = -1};
    MOE_TRY(moe_input_check_merged(args->input));
    if (args->routing) MOE_TRY(moe_input_check_merged(args->routing));
    const char *trace = args->routing ? args->routing : moe_input_is_trace(args->input) ? args->input : NULL;
    if (trace != args->input) MOE_TRY(moe_scenario_load(args->input, &in->scenario));
    if (trace) {
        MOE_TRY(load_trace(args, trace, in));
    } else {
        const struct moe_scenario *sc = in->scenario;
        if (args->step >= 0) return moe_fail(MOE_EUSAGE, "--step: %s is not a trace", args->input);
        MOE_TRY(moe_lower(sc, &in->schedule));
        in->routing = moe_scenario_routing(sc);
    }
    in->topology = args->topology ? args->topology : in->scenario->topology;
    in->tokens = moe_scenario_tokens(in->scenario);
    return MOE_OK;
}

void moe_input_free(struct moe_input *in)
{
    moe_scenario_free(in->scenario);
    moe_schedule_free(in->schedule);
    moe_routing_free(in->routing);
}

static const char *plural(int64_t n)
{
    return n == 1 ? "" : "s";
}

void moe_input_print(const struct moe_input *in)
{
    const struct moe_scenario *sc = in->scenario;
    printf("%lld rank%s, expert parallel %lld, %lld layer%s, %lld expert%s top-%lld, %lld token%s a step; ",
           (long long)sc->ranks, plural(sc->ranks), (long long)sc->expert_parallel, (long long)sc->layers,
           plural(sc->layers), (long long)sc->experts, plural(sc->experts), (long long)sc->top_k,
           (long long)in->tokens, plural(in->tokens));
    if (in->step >= 0)
        printf("routing of step %lld\n", (long long)in->step);
    else if (sc->counts)
        printf("routing by counts\n");
    else
        printf("routing drawn with skew %g, seed %lld\n", sc->skew, (long long)sc->seed);
}

json_t *moe_input_json(const struct moe_input *in)
{
    const struct moe_scenario *sc = in->scenario;
    json_t *routing = in->step >= 0 ? json_pack("{s:I}", "step", (json_int_t)in->step)
                      : sc->counts  ? json_pack("{s:s}", "counts", "given")
                                    : json_pack("{s:f, s:I}", "skew", sc->skew, "seed", (json_int_t)sc->seed);
    return json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:o}", "name", moe_json_text(sc->name),
                     "ranks", (json_int_t)sc->ranks, "expert_parallel", (json_int_t)sc->expert_parallel,
                     "layers", (json_int_t)sc->layers, "experts", (json_int_t)sc->experts, "top_k",
                     (json_int_t)sc->top_k, "tokens", (json_int_t)in->tokens, "dispatcher", sc->dispatcher,
                     "routing", routing);
}
