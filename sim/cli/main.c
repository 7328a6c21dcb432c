/* main.c - the moesim command: one table of commands, one of options; see cli.h. */
#include "sim/cli/cli.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum command_id {
    CAPTURE,
    CHECK,
    SIMULATE,
    COMPARE,
    CALIBRATE,
    VALIDATE,
    TRACE_INFO,
    TRACE_MERGE,
    TRACE_EXPORT,
    TRACE_IMPORT,
    REPORT,
    COMMAND_COUNT
};
#define ON(command) (1u << (command))
#define ON_ALL (ON(COMMAND_COUNT) - 1)
#define READERS (ON(CHECK) | ON(SIMULATE) | ON(COMPARE))
#define MODELS (ON(CALIBRATE) | ON(VALIDATE))
#define FORMATS (ON(TRACE_EXPORT) | ON(TRACE_IMPORT))

static const struct command {
    const char *name, *operand, *summary;
    int (*run)(const struct moe_args *args);
} commands[] = {
    [CAPTURE] = {"capture", "SCENARIO", "train the scenario's model for real on this machine, and record it",
                 moe_cli_capture},
    [CHECK] = {"check", "SCENARIO|TRACE",
               "prove that a step is right, or say what hangs, drops or mis-scales", moe_cli_check},
    [SIMULATE] = {"simulate", "SCENARIO|TRACE", "predict how long a step takes, and where the time goes",
                  moe_cli_simulate},
    [COMPARE] = {"compare", "SCENARIO|TRACE", "simulate variants; name the best, and why", moe_cli_compare},
    [CALIBRATE] = {"calibrate", "TRACE|FILE...",
                   "fit the numbers of this host to a capture, or those of a machine to measured collectives",
                   moe_cli_calibrate},
    [VALIDATE] = {"validate", "TRACE|FILE...",
                  "predict the steps of a capture, or collectives; compare with what was measured",
                  moe_cli_validate},
    [TRACE_INFO] = {"trace info", "TRACE", "what a capture holds", moe_cli_trace_info},
    [TRACE_MERGE] = {"trace merge", "PREFIX",
                     "one trace of PREFIX.rank0, PREFIX.rank1, ... of a killed capture", moe_cli_trace_merge},
    [TRACE_EXPORT] = {"trace export", "TRACE", "write a trace's routing in a format of others",
                      moe_cli_trace_export},
    [TRACE_IMPORT] = {"trace import", "FILE...", "make a trace of routing in a format of others",
                      moe_cli_trace_import},
    [REPORT] = {"report", "RUN.db", "one HTML page of a capture and its comparison", moe_cli_report},
};

enum kind { FLAG, TEXT, NUMBER, LIST, OPTIONAL /* a flag that may have the value `argument` */ };

static const struct option {
    const char *name;
    char letter; /* or 0 */
    const char *argument, *help;
    unsigned commands, required; /* ON(...) */
    enum kind kind;
    size_t offset;
    int64_t min, fallback; /* NUMBER; a fallback >= min is said in the help */
    const char *text;      /* TEXT: fallback, said too */
} options[] = {
#define AT(member) offsetof(struct moe_args, member)
    {"ranks", 'n', "RANKS", "ranks to start: as many as the scenario has", ON(CAPTURE), 0, NUMBER, AT(ranks),
     1, 0},
    {"data", 0, "FILE", "any file: its bytes are the tokens", ON(CAPTURE), ON(CAPTURE), TEXT, AT(data)},
    {"steps", 0, "N", "training steps", ON(CAPTURE), 0, NUMBER, AT(steps), 1, 20},
    {"seed", 0, "S", "of the initial parameters and the batches", ON(CAPTURE), 0, NUMBER, AT(seed), 0, 1},
    {"timeout", 0, "S", "seconds that a collective may take", ON(CAPTURE), 0, NUMBER, AT(timeout_s), 1, 60},
    {"device", 0, "NAME", "cpu (MPI, OpenBLAS), or cuda (NCCL, cuBLAS): a GPU a rank", ON(CAPTURE), 0, TEXT,
     AT(device), .text = "cpu"},
    {"no-agreement", 0, NULL, "do not ask in the first step whether members agree on each collective",
     ON(CAPTURE), 0, FLAG, AT(no_agreement)},
    {"unchecked", 0, NULL,
     "run it although check finds errors: it may hang until --timeout, or train wrongly", ON(CAPTURE), 0,
     FLAG, AT(unchecked)},
    {"tensors", 0, "values",
     "keep a fingerprint of every parameter and gradient of every step, or all values", ON(CAPTURE), 0,
     OPTIONAL, AT(tensors)},
    {"poison", 0, NULL, "fill buffers that nobody wrote with NaN before every step", ON(CAPTURE), 0, FLAG,
     AT(poison)},
    {"stress", 0, NULL,
     "print the smallest tokens and routing that break it (not with deepep, nvlink_one_sided)", ON(CHECK), 0,
     FLAG, AT(stress)},
    {"against", 0, "B.db", "another run of the model and batches: what differs first, and by how much",
     ON(CHECK), 0, TEXT, AT(against)},
    {"save", 0, "PREFIX", "write a checkpoint after the last step: PREFIX.ckptN", ON(CAPTURE), 0, TEXT,
     AT(save)},
    {"load", 0, "PREFIX", "go on from this checkpoint", ON(CAPTURE), 0, TEXT, AT(load)},
    {"topology", 0, "T", "the machine: a name of topologies/ or a file",
     ON(SIMULATE) | ON(COMPARE) | ON(VALIDATE), ON(VALIDATE), TEXT, AT(topology)},
    {"topology", 0, "BASE", "FILE... are measured collectives of this machine, whose block nccl to write",
     ON(CALIBRATE), 0, TEXT, AT(topology)},
    {"rows", 0, "ROWS", "which of them, as in *@2,4+allgather@8", MODELS, 0, TEXT, AT(rows), .text = "*@*"},
    {"op", 0, "OP", "the collective of logs that do not say it", MODELS, 0, TEXT, AT(op)},
    {"tuning", 0, "LOG", "NCCL's log of TUNING: what it runs, and numbers that the rows do not tell",
     ON(CALIBRATE), 0, TEXT, AT(tuning)},
    {"like", 0, NULL, "FILE... are topologies of other machines: take the means of their numbers",
     ON(CALIBRATE), 0, FLAG, AT(like)},
    {"plot", 0, "FILE.svg", "figure to draw: measured collectives and the fit", ON(CALIBRATE), 0, TEXT,
     AT(plot)},
    {"cores", 0, "N", "cores that the ranks shared: those of this host", ON(CALIBRATE), 0, NUMBER, AT(cores),
     1, 0},
    {"name", 0, "NAME", "of the topology", ON(CALIBRATE), 0, TEXT, AT(name), .text = "this_host"},
    {"max-step-error", 0, "PCT", "exit with 5 when the step is further off", ON(VALIDATE), 0, NUMBER,
     AT(max_step_error), 0, -1},
    {"max-phase-error", 0, "PCT", "the same for every phase of 5 % of the step or more", ON(VALIDATE), 0,
     NUMBER, AT(max_phase_error), 0, -1},
    {"max-error", 0, "PCT", "the same for the median of each collective from 64 KiB on", ON(VALIDATE), 0,
     NUMBER, AT(max_error), 0, -1},
    {"vary", 0, "KEY=A,B",
     "what to compare; may be repeated; keys: topology, dispatcher, capacity (a factor, a\n"
     "                            rule, or RULE:FACTOR), ep (expert_parallel), rank_order (consecutive, "
     "strided)",
     ON(COMPARE), ON(COMPARE), LIST, AT(vary)},
    {"threads", 0, "N", "variants at a time: as many as there are cores", ON(COMPARE), 0, NUMBER, AT(threads),
     1, 0},
    {"step", 0, "N", "step of the trace (its last complete one)", READERS, 0, NUMBER, AT(step), 0, -1},
    {"routing", 0, "TRACE", "route as this trace does, which may be an imported one", READERS, 0, TEXT,
     AT(routing)},
    {"format", 0, "FORMAT", "megatron (router trace, JSONL) or npy (expert ids, NumPy)", FORMATS, FORMATS,
     TEXT, AT(format)},
    {"step", 0, "N", "step to write: all complete ones", ON(TRACE_EXPORT), 0, NUMBER, AT(step), 0, -1},
    {"output", 'o', "RUN.db", "the trace store to write", ON(CAPTURE) | ON(TRACE_IMPORT),
     ON(CAPTURE) | ON(TRACE_IMPORT), TEXT, AT(output)},
    {"output", 'o', "RUN.db", "the trace store to write: PREFIX", ON(TRACE_MERGE), 0, TEXT, AT(output)},
    {"output", 'o', "DIR|FILE", "folder to write, or the only file", ON(TRACE_EXPORT), ON(TRACE_EXPORT), TEXT,
     AT(output)},
    {"output", 'o', "RESULTS.db", "store whose results to replace; may be the trace", ON(COMPARE), 0, TEXT,
     AT(output)},
    {"output", 'o', "TOPOLOGY.yaml", "topology to write", ON(CALIBRATE), ON(CALIBRATE), TEXT, AT(output)},
    {"output", 'o', "TABLE.csv", "table to write: phases, or rows", ON(VALIDATE), 0, TEXT, AT(output)},
    {"validate", 0, "PHASES.csv", "what moesim validate wrote with -o: predicted against measured",
     ON(REPORT), 0, TEXT, AT(phases)},
    {"output", 'o', "DIR", "folder to write", ON(REPORT), ON(REPORT), TEXT, AT(output)},
    {"json", 0, NULL, "print JSON", ON_ALL & ~ON(REPORT), 0, FLAG, AT(json)},
    {"help", 'h', NULL, "this text", ON_ALL, 0, FLAG, AT(help)},
};
enum { OPTION_COUNT = sizeof options / sizeof *options };

/* Is it the first of the two words of a command's name? */
static bool begins(const char *word, const char *name)
{
    size_t n = strlen(word);
    return !strncmp(word, name, n) && name[n] == ' ';
}

static bool is_group(const char *word)
{
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (begins(word, commands[c].name)) return true;
    return false;
}

static bool asks_for_help(const char *word)
{
    return !strcmp(word, "--help") || !strcmp(word, "-h");
}

/* Of the commands that begin with this word; NULL: of all. */
static void print_help(const char *group)
{
    printf("usage: moesim %s%sCOMMAND ...\n", group ? group : "", group ? " " : "");
    puts("Predicts, checks and measures the communication of mixture-of-experts training.\n");
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (!group || begins(group, commands[c].name))
            printf("  %-12s %s\n", commands[c].name, commands[c].summary);
    puts("\nmoesim COMMAND --help lists its options; moesim --version the version.\n"
         "Exit codes: 0 done, 1 failed, 2 wrong command line, 3 wrong input, 4 a facility is missing,\n"
         "5 a verdict failed, 130 interrupted.");
}

static void print_command_help(enum command_id id)
{
    const struct command *c = &commands[id];
    printf("usage: moesim %s %s", c->name, c->operand);
    for (int i = 0; i < OPTION_COUNT; i++)
        if (options[i].required & ON(id)) printf(" --%s %s", options[i].name, options[i].argument);
    printf(" [options]\n%s\n\n", c->summary);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = &options[i];
        if (!(o->commands & ON(id))) continue;
        const bool optional = o->kind == OPTIONAL;
        int used = printf("  %c%c  --%s%s%s%s", o->letter ? '-' : ' ', o->letter ? o->letter : ' ', o->name,
                          optional ? "[=" : " ", o->argument ? o->argument : "", optional ? "]" : "");
        printf("%*s%s", used < 28 ? 28 - used : 1, "", o->help);
        if (o->kind == NUMBER && o->fallback >= o->min) printf(" (%lld)", (long long)o->fallback);
        if (o->text) printf(" (%s)", o->text);
        putchar('\n');
    }
    if (id != CHECK) return;
    moe_print_verdicts_help();
}

/* ---- parsing ---- */

/* Of one word, or two when there are commands that begin with the first. */
static int unknown_command(int argc, char **argv)
{
    const char *names[COMMAND_COUNT];
    char word[2 * MOE_NAME], hint[MOE_HINT];
    bool group = is_group(argv[1]), two = group && argc > 2;
    int n = 0;
    snprintf(word, sizeof word, "%s%s%s", argv[1], two ? " " : "", two ? argv[2] : "");
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (!group || begins(argv[1], commands[c].name)) names[n++] = commands[c].name;
    bool tell = group || moe_nearest(word, names, n);
    return moe_fail(MOE_EUSAGE, "unknown command '%s'%s (moesim --help lists all)", word,
                    tell ? moe_hint(word, names, n, hint) : "");
}

/* Finds the command in the first words; *used out: how many they are. */
static int find_command(int argc, char **argv, int *used)
{
    const char *names[COMMAND_COUNT];
    char word[2 * MOE_NAME];
    for (int c = 0; c < COMMAND_COUNT; c++) {
        names[c] = commands[c].name;
        bool two = strchr(names[c], ' ') && argc > 2;
        snprintf(word, sizeof word, "%s%s%s", argv[1], two ? " " : "", two ? argv[2] : "");
        *used = two ? 3 : 2;
        if (!strcmp(word, names[c])) return c;
    }
    return unknown_command(argc, argv);
}

/* The option called `name` [length] of a command; a letter is the name of length 1. */
static int find_option(enum command_id id, const char *name, size_t length, const struct option **out)
{
    const char *names[OPTION_COUNT];
    char word[MOE_NAME];
    int n = 0;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = *out = &options[i];
        if (!(o->commands & ON(id))) continue;
        if (length == 1 ? o->letter == *name : strlen(o->name) == length && !strncmp(o->name, name, length))
            return MOE_OK;
        names[n++] = o->name;
    }
    snprintf(word, sizeof word, "%.*s", (int)length, name);
    const char *nearest = moe_nearest(word, names, n);
    return moe_fail(MOE_EUSAGE, "unknown option '%s'%s%s (--help lists all)", word,
                    nearest ? ", did you mean --" : "", nearest ? nearest : "");
}

static int set_option(const struct option *o, const char *value, struct moe_args *args)
{
    void *at = (char *)args + o->offset;
    char *end;
    switch (o->kind) {
    case FLAG: *(bool *)at = true; return MOE_OK;
    case OPTIONAL:
    case TEXT: *(const char **)at = value; return MOE_OK;
    case NUMBER:
        errno = 0;
        *(int64_t *)at = strtoll(value, &end, 10);
        if (end != value && !*end && !errno && *(int64_t *)at >= o->min) return MOE_OK;
        return moe_fail(MOE_EUSAGE, "--%s %s: expected a whole number from %lld", o->name, value,
                        (long long)o->min);
    case LIST:
        if (args->n_vary == MOE_MAX_VARY) return moe_fail(MOE_EUSAGE, "--%s: too many", o->name);
        args->vary[args->n_vary++] = value;
    }
    return MOE_OK;
}

/* Reads argv[*i], an option, and its value: "--name value", "--name=value", "-x value" or "-xvalue". */
static int read_option(enum command_id id, char **argv, int *i, struct moe_args *args)
{
    const struct option *o;
    bool is_long = argv[*i][1] == '-';
    const char *name = argv[*i] + 1 + is_long;
    size_t length = is_long ? strcspn(name, "=") : 1;
    const char *value = is_long && !name[length] ? NULL : name[length] ? name + length + is_long : NULL;
    MOE_TRY(find_option(id, name, length, &o));
    if (o->kind == FLAG && value) return moe_fail(MOE_EUSAGE, "--%s takes no value", o->name);
    if (o->kind == OPTIONAL) {
        if (value && strcmp(value, o->argument) != 0)
            return moe_fail(MOE_EUSAGE, "--%s=%s: expected %s, or no value", o->name, value, o->argument);
        return set_option(o, value ? value : "", args);
    }
    if (o->kind != FLAG && !value && !(value = argv[++*i]))
        return moe_fail(MOE_EUSAGE, "--%s: expected %s (--help lists all)", o->name, o->argument);
    return set_option(o, value, args);
}

static int read_args(enum command_id id, char **argv, struct moe_args *args)
{
    bool words_only = false, many = strstr(commands[id].operand, "...");
    for (int i = 0; i < OPTION_COUNT; i++)
        if (options[i].kind == NUMBER)
            *(int64_t *)((char *)args + options[i].offset) = options[i].fallback;
        else if (options[i].text)
            *(const char **)((char *)args + options[i].offset) = options[i].text;
    for (int i = 0; argv[i] && !args->help; i++) {
        if (!words_only && !strcmp(argv[i], "--"))
            words_only = true;
        else if (!words_only && argv[i][0] == '-' && argv[i][1])
            MOE_TRY(read_option(id, argv, &i, args));
        else if (args->n_inputs > 0 && !many)
            return moe_fail(MOE_EUSAGE, "unexpected '%s' (--help lists all)", argv[i]);
        else
            argv[args->n_inputs++] = argv[i]; /* in place: what was there is read */
    }
    args->inputs = (const char *const *)argv;
    args->input = argv[0];
    if (args->help) return MOE_OK;
    if (args->n_inputs == 0) return moe_fail(MOE_EUSAGE, "expected %s (see --help)", commands[id].operand);
    for (int i = 0; i < OPTION_COUNT; i++)
        if (options[i].required & ON(id) && !*(char **)((char *)args + options[i].offset))
            return moe_fail(MOE_EUSAGE, "--%s %s is required (see --help)", options[i].name,
                            options[i].argument);
    return MOE_OK;
}

/* *name out: of the command, for the error. */
static int run(int argc, char **argv, const char **name)
{
    struct moe_args args = {0};
    int used;
    if (argc < 2) return moe_fail(MOE_EUSAGE, "expected a command (moesim --help lists all)");
    if (asks_for_help(argv[1]) || !strcmp(argv[1], "help")) return print_help(NULL), MOE_OK;
    if (is_group(argv[1]) && argc > 2 && asks_for_help(argv[2])) return print_help(argv[1]), MOE_OK;
    if (!strcmp(argv[1], "--version")) return puts("moesim " MOESIM_VERSION), MOE_OK;
    int id = find_command(argc, argv, &used);
    if (id < 0) return id;
    *name = commands[id].name;
    MOE_TRY(read_args(id, argv + used, &args));
    if (args.help) return print_command_help(id), MOE_OK;
    return commands[id].run(&args);
}

int main(int argc, char **argv)
{
    const char *name = NULL;
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error like a full disk */
    signal(SIGCHLD, SIG_DFL); /* a parent may have left it ignored: exit codes would be lost */
    int code = run(argc, argv, &name);
    if (code >= 0 && (fflush(stdout) || ferror(stdout)))
        code = moe_fail(MOE_EFAILED, "standard output: %s", strerror(errno));
    if (code < 0) fprintf(stderr, "moesim%s%s: %s\n", name ? " " : "", name ? name : "", moe_error());
    return code < 0 ? moe_exit_code(code) : code;
}
