/* capture.c - moesim capture: starts the ranks, waits for them, and merges what they recorded.
 *
 * RUN.db.rankN belong to the capture that runs; RUN.db changes only when they are merged into it. */
#include "sim/cli/cli.h"
#include "traces/format.h"
#include "traces/store.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Open MPI as root, and with several ranks a core on one host. What the user set holds. */
static const struct {
    const char *name, *value;
    bool root, crowded; /* needed only then */
} environment[] = {
    {"OMPI_ALLOW_RUN_AS_ROOT", "1", .root = true},
    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", .root = true},
    {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
    {"OMPI_MCA_orte_execute_quiet", "1"}, /* a rank says itself why it failed */
    {"OMPI_MCA_mpi_yield_when_idle", "1", .crowded = true},
    {"OMPI_MCA_hwloc_base_binding_policy", "none", .crowded = true},
    {"OMPI_MCA_btl", "self,vader", .crowded = true},
    {"OMPI_MCA_pml", "ob1", .crowded = true},
    {"OPENBLAS_NUM_THREADS", "1"},
};

static void set_environment(int64_t ranks)
{
    bool crowded = 2 * ranks > sysconf(_SC_NPROCESSORS_ONLN);
    for (size_t i = 0; i < sizeof environment / sizeof *environment; i++)
        if ((!environment[i].root || geteuid() == 0) && (!environment[i].crowded || crowded))
            setenv(environment[i].name, environment[i].value, 0);
}

static int check_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%.*s.", slash ? (int)(slash - path) + 1 : 0, path);
    if (access(folder, W_OK | X_OK) == 0) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: no folder to write to: %s", path, strerror(errno));
}

static int check_readable(const char *path)
{
    if (access(path, R_OK) == 0) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno));
}

/* The file of a rank belongs to a capture that runs, or holds what one recorded before it was killed. */
static int check_parts(const char *output, int ranks)
{
    int err = MOE_OK;
    for (int r = 0; err == MOE_OK && r < ranks; r++) {
        char *part = moe_store_part(output, r);
        if (access(part, F_OK) == 0)
            err = moe_fail(MOE_EINPUT, "%s: exists; merge it with moesim trace merge, or remove it", part);
        free(part);
    }
    return err;
}

/* Ranks would say of each what they all read. */
static int check_data(const char *path, int64_t sequence)
{
    int64_t bytes;
    MOE_TRY(check_readable(path));
    MOE_TRY(moe_import_size(path, &bytes));
    if (bytes > sequence) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s: %lld bytes, expected at least %lld: a sequence and one more", path,
                    (long long)bytes, (long long)sequence + 1);
}

/* The routing that a scenario draws stands for that of the model. Ranks that disagree crash or hang. */
static int check_scenario(const struct moe_args *args, int *ranks, int64_t *sequence)
{
    struct moe_input in;
    int err = MOE_OK;
    MOE_TRY_GOTO(moe_input_load(args, &in));
    if (in.step >= 0) MOE_TRY_GOTO(moe_fail(MOE_EINPUT, "%s: a trace, expected a scenario", args->input));
    *ranks = (int)in.scenario->ranks;
    *sequence = in.scenario->sequence;
    if (args->ranks && args->ranks != *ranks)
        MOE_TRY_GOTO(
            moe_fail(MOE_EUSAGE, "-n %lld: %s has %d ranks", (long long)args->ranks, args->input, *ranks));
    MOE_TRY_GOTO(moe_scenario_check_capture(in.scenario, args->save || args->load));
    if (!args->unchecked) err = moe_check_input(args, &in);
done:
    moe_input_free(&in);
    return err;
}

static int check_device(const char *name)
{
    static const char *const names[] = {"cpu", "cuda"};
    char hint[MOE_HINT];
    for (int i = 0; i < 2; i++)
        if (strcmp(name, names[i]) == 0) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "--device %s: unknown%s", name, moe_hint(name, names, 2, hint));
}

/* Before anything starts: one line instead of one from every rank. */
static int check_files(const struct moe_args *args, int ranks, int64_t sequence)
{
    MOE_TRY(check_device(args->device));
    char checkpoint[PATH_MAX];
    MOE_TRY(check_folder(args->output));
    MOE_TRY(moe_check_replaceable(args->output));
    MOE_TRY(check_parts(args->output, ranks));
    MOE_TRY(check_data(args->data, sequence));
    if (args->save) MOE_TRY(check_folder(args->save));
    if (!args->load) return MOE_OK;
    snprintf(checkpoint, sizeof checkpoint, "%s.ckpt0", args->load);
    return check_readable(checkpoint);
}

/* What ranks said of their ends, each text once. */
struct said {
    char *text;
    int n, cap, *rank; /* rising */
};
struct heard {
    int n, cap;
    struct said *said;
};

/* Ranks refuse the same thing in the same words: those are kept, others are passed on. */
static void hear(void *ctx, char *line)
{
    struct heard *h = ctx;
    int rank, at = 0, i = 0;
    if (sscanf(line, "moesim-capture: rank %d: %n", &rank, &at) < 1 || !at) {
        fprintf(stderr, "%s\n", line);
        return;
    }
    while (i < h->n && strcmp(h->said[i].text, line + at) != 0) i++;
    if (i == h->n) {
        h->said = moe_grow(h->said, &h->cap, ++h->n, sizeof *h->said);
        h->said[i] = (struct said){.text = strdup(line + at)};
    }
    struct said *s = &h->said[i];
    s->rank = moe_grow(s->rank, &s->cap, s->n + 1, sizeof *s->rank);
    int place = s->n++;
    for (; place > 0 && s->rank[place - 1] > rank; place--) s->rank[place] = s->rank[place - 1];
    s->rank[place] = rank;
}

static void repeat(struct heard *h)
{
    for (int i = 0; i < h->n; i++) {
        struct said *s = &h->said[i];
        fprintf(stderr, "moesim-capture: rank%s ", s->n == 1 ? "" : "s");
        moe_print_numbers(s->rank, s->n, stderr);
        fprintf(stderr, ": %s\n", s->text);
        free(s->text);
        free(s->rank);
    }
    free(h->said);
}

/* Result: that of moe_program_run. */
static int run_ranks(const struct moe_args *args, int64_t ranks)
{
    char program[PATH_MAX], number[4][24];
    const int64_t value[4] = {ranks, args->steps, args->seed, args->timeout_s};
    for (int i = 0; i < 4; i++) snprintf(number[i], sizeof number[i], "%lld", (long long)value[i]);
    const char *const checkpoint[][2] = {{"--save", args->save}, {"--load", args->load}};
    enum { ALWAYS = 18 };
    /* clang-format off */
    const char *argv[ALWAYS + 2 * 2 + 3 + 1] = {
        "mpirun", "-n", number[0],
        moe_program_beside("moesim-capture", program), "--scenario", args->input, "--data", args->data,
        "--output", args->output, "--steps", number[1], "--seed", number[2], "--timeout", number[3],
        "--device", args->device};
    /* clang-format on */
    int n = ALWAYS;
    for (int i = 0; i < 2; i++) {
        if (!checkpoint[i][1]) continue;
        argv[n++] = checkpoint[i][0];
        argv[n++] = checkpoint[i][1];
    }
    if (args->tensors) argv[n++] = *args->tensors ? "--tensors=values" : "--tensors";
    if (args->poison) argv[n++] = "--poison";
    if (args->no_agreement) argv[n++] = "--no-agreement";
    struct heard heard = {0};
    const bool alone = ranks == 1;
    if (!alone) set_environment(ranks);
    int code = moe_program_run(alone ? argv + 3 : argv, alone ? "moesim" : "openmpi-bin", NULL, hear, &heard);
    repeat(&heard);
    return code;
}

static void remove_parts(const char *output, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        char *part = moe_store_part(output, r);
        moe_store_remove(part);
        free(part);
    }
}

/* Did every rank commit something? */
static bool all_recorded(const char *output, int ranks)
{
    bool found = true;
    for (int r = 0; found && r < ranks; r++) {
        struct moe_store *store;
        struct moe_store_info info;
        char *part = moe_store_part(output, r);
        found = moe_store_open(part, MOE_STORE_WRITE, &store) == MOE_OK &&
                moe_store_info(store, &info) == MOE_OK && info.n_ops > 0;
        moe_store_close(store);
        free(part);
    }
    return found;
}

int moe_cli_capture(const struct moe_args *args)
{
    int ranks;
    int64_t sequence;
    MOE_TRY(check_scenario(args, &ranks, &sequence));
    MOE_TRY(check_files(args, ranks, sequence));
    int code = run_ranks(args, ranks);
    if (code < 0) return code;
    bool kept = code == 0 || all_recorded(args->output, ranks);
    if (kept) {
        MOE_TRY(moe_store_merge(args->output, ranks, args->output));
        MOE_TRY(moe_print_trace(args->output, "moesim.capture/1", args->json));
    } else {
        remove_parts(args->output, ranks);
    }
    if (code == 0 || code == MOE_EXIT_INTERRUPTED) return code;
    /* The program's own exit codes are those of moe_exit_code, its enum moe_err without the sign. */
    return moe_fail(code <= -MOE_EVERDICT ? -code : MOE_EFAILED,
                    "moesim-capture failed (exit code %d); %s %s", code, args->output,
                    kept ? "holds what all ranks recorded" : "is as it was");
}
