/* main.c - moesim-capture: trains the scenario's model for real on the ranks it was started with, and
 * records. */
#include "runtime/checkpoint.h"
#include "runtime/gpu.h"
#include "runtime/record.h"
#include "sim/lower/lower.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_INTERRUPTED = 130 };

static const char usage[] =
    "usage: moesim-capture --scenario FILE --data FILE -o PATH [options]\n"
    "Trains the scenario's model on this machine and records every step into PATH.rankN.\n"
    "Started by `moesim capture`, or by mpirun with as many ranks as the scenario has.\n"
    "  --scenario FILE    model, layout and tokens (YAML)\n"
    "  --data FILE        any file: its bytes are the tokens\n"
    "  -o, --output PATH  trace store of rank N is PATH.rankN\n"
    "  --steps N          training steps (20)\n"
    "  --seed S           initial parameters and batches (1)\n"
    "  --load PREFIX      go on from this checkpoint (PREFIX.ckptN), of any expert-parallel size\n"
    "  --save PREFIX      write a checkpoint after the last step\n"
    "  --device NAME      cpu, with MPI and OpenBLAS, or cuda, with NCCL and cuBLAS on a GPU a rank (cpu)\n"
    "  --timeout SECONDS  how long a collective may take (60)\n"
    "  --no-agreement     do not ask in the first step whether members agree on each collective\n"
    "  --tensors[=values] keep a fingerprint of every parameter and gradient of every step, or their values "
    "too\n"
    "  --poison           fill buffers that nobody wrote with NaN before every step\n"
    "  --help             this text\n";

struct options {
    const char *scenario, *data, *output, *load, *save;
    int64_t steps, seed, timeout_s;
    enum moe_tensors tensors;
    bool cuda, no_agreement, poison, help;
};

/* What is open while capturing; closed in reverse. */
struct capture {
    struct moe_communicator *world;
    struct moe_scenario *scenario;
    struct moe_schedule *s;
    struct moe_data data;
    struct moe_device *device;
    struct moe_recorder *recorder;
    struct moe_execute_options execute;
    struct moe_execution *x;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int signal_number)
{
    (void)signal_number;
    interrupted = 1;
}

static int read_number(const char *name, const char *text, int64_t min, int64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10);
    if (end == text || *end || errno || *out < min)
        return moe_fail(MOE_EUSAGE, "--%s %s: expected a whole number from %lld", name, text, (long long)min);
    return MOE_OK;
}

static int read_tensors(const char *text, enum moe_tensors *out)
{
    *out = text ? MOE_TENSORS_WHOLE : MOE_TENSORS_HASHED;
    if (!text || !strcmp(text, "values")) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "--tensors=%s: expected values, or nothing", text);
}

static int read_device(const char *text, bool *cuda)
{
    static const char *const names[] = {"cpu", "cuda"};
    char hint[MOE_HINT];
    *cuda = !strcmp(text, "cuda");
    if (*cuda || !strcmp(text, "cpu")) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "--device %s: unknown%s", text, moe_hint(text, names, 2, hint));
}

static int read_options(int argc, char **argv, struct options *o)
{
    static const struct option names[] = {
        {"scenario", required_argument, NULL, 'c'}, {"data", required_argument, NULL, 'd'},
        {"output", required_argument, NULL, 'o'},   {"steps", required_argument, NULL, 'n'},
        {"seed", required_argument, NULL, 's'},     {"timeout", required_argument, NULL, 't'},
        {"device", required_argument, NULL, 'g'},   {"load", required_argument, NULL, 'l'},
        {"save", required_argument, NULL, 'w'},     {"no-agreement", no_argument, NULL, 'a'},
        {"tensors", optional_argument, NULL, 'f'},  {"poison", no_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},           {0}};
    *o = (struct options){.steps = 20, .seed = 1, .timeout_s = 60};
    for (int c; (c = getopt_long(argc, argv, ":o:", names, NULL)) != -1;) {
        switch (c) {
        case 'c': o->scenario = optarg; break;
        case 'd': o->data = optarg; break;
        case 'o': o->output = optarg; break;
        case 'n': MOE_TRY(read_number("steps", optarg, 1, &o->steps)); break;
        case 's': MOE_TRY(read_number("seed", optarg, 0, &o->seed)); break;
        case 't': MOE_TRY(read_number("timeout", optarg, 1, &o->timeout_s)); break;
        case 'g': MOE_TRY(read_device(optarg, &o->cuda)); break;
        case 'l': o->load = optarg; break;
        case 'w': o->save = optarg; break;
        case 'a': o->no_agreement = true; break;
        case 'f': MOE_TRY(read_tensors(optarg, &o->tensors)); break;
        case 'p': o->poison = true; break;
        case 'h': o->help = true; return MOE_OK;
        case ':': return moe_fail(MOE_EUSAGE, "%s: expected a value (--help shows all)", argv[optind - 1]);
        default:
            if (optopt && optopt != 'h' && optopt != 'a' && optopt != 'p') /* --help=x */
                return moe_fail(MOE_EUSAGE, "unknown option -%c (--help shows all)", optopt);
            return moe_fail(MOE_EUSAGE, "unknown option %s (--help shows all)", argv[optind - 1]);
        }
    }
    if (optind < argc) return moe_fail(MOE_EUSAGE, "unexpected '%s' (--help shows all)", argv[optind]);
    if (!o->scenario || !o->data || !o->output)
        return moe_fail(MOE_EUSAGE, "--scenario, --data and -o are required (--help shows all)");
    return MOE_OK;
}

/* Signals reach ranks at different times; they must stop after the same step. */
static int agree_to_stop(struct moe_communicator *world, double timeout_s, bool *stop)
{
    const char own = interrupted != 0;
    char *all = moe_alloc((size_t)world->size, 1);
    const int err = world->table->gather(world, &own, all, 1, timeout_s);
    if (err < 0) return moe_fail(err, "between steps: %s", moe_error()); /* `all` may still be written to */
    for (int r = 0; r < world->size; r++) *stop |= all[r] != 0;
    free(all);
    return MOE_OK;
}

static int train(struct capture *c, const struct options *o, bool *stopped)
{
    const int rank = c->world->rank;
    const int64_t tokens = c->s->tokens[rank], window = c->data.window, begin = moe_execute_steps(c->x),
                  end = begin + o->steps;
    const int n_micro = c->s->n_micro;
    int64_t first = 0, all = 0; /* of a micro-batch: before this rank, and in its stage */
    /* A rank begins with a window of its own: a sequence never spans two texts. */
    for (int r = 0; r < c->s->n_ranks; r++) {
        const int64_t wide = (c->s->tokens[r] + window - 1) / window * window;
        if (c->s->role_of[r] != c->s->role_of[rank]) continue;
        all += wide;
        if (r < rank) first += wide;
    }
    int32_t *token = moe_alloc((size_t)(tokens * n_micro), sizeof *token),
            *target = moe_alloc((size_t)(tokens * n_micro), sizeof *target);
    int err = MOE_OK;
    for (int64_t step = begin; step < end && !*stopped; step++) {
        double loss;
        for (int m = 0; m < n_micro; m++)
            moe_data_batch(&c->data, (uint64_t)o->seed, step, m * all + first, tokens, token + m * tokens,
                           target + m * tokens);
        const int64_t entry_ns = moe_now_ns();
        MOE_TRY_GOTO(moe_execute_step(c->x, token, target, &loss));
        const int64_t wall_ns = moe_now_ns() - entry_ns;
        MOE_TRY_GOTO(moe_recorder_step(c->recorder, c->x, step, loss, wall_ns));
        if (!isfinite(loss)) {
            err = moe_fail(MOE_EFAILED, "step %lld: the loss is %g (a lower learning_rate may help)",
                           (long long)step, loss);
            goto done;
        }
        MOE_TRY_GOTO(agree_to_stop(c->world, (double)o->timeout_s, stopped));
    }
done:
    free(token);
    free(target);
    return err;
}

static int capture(struct capture *c, const struct options *o, bool *stopped)
{
    MOE_TRY(moe_scenario_load(o->scenario, &c->scenario));
    MOE_TRY(moe_scenario_check_capture(c->scenario, o->load || o->save));
    MOE_TRY(moe_lower(c->scenario, &c->s));
    MOE_TRY(moe_data_load(o->data, c->scenario->sequence, &c->data));
    c->execute = (struct moe_execute_options){.timeout_s = (double)o->timeout_s,
                                              .agree_steps = o->no_agreement ? 0 : 1,
                                              .seed = (uint64_t)o->seed,
                                              .poison = o->poison,
                                              .forced = c->scenario->counts,
                                              .forced_step = c->scenario->counts_step,
                                              .observe = moe_recorder_observe,
                                              .observe_reads = o->tensors != 0};
    MOE_TRY(moe_execute_open(c->s, c->device, c->world, &c->execute, &c->x));
    if (o->load) MOE_TRY(moe_checkpoint_load(o->load, c->x));
    struct moe_run run = {c->s,     &c->data,          c->scenario->text, MOESIM_VERSION,
                          o->steps, (uint64_t)o->seed, o->tensors,        o->poison};
    MOE_TRY(moe_recorder_open(o->output, &run, c->world->rank, &c->recorder));
    c->execute.ctx = c->recorder;
    MOE_TRY(moe_recorder_begin(c->recorder, c->x, moe_execute_steps(c->x)));
    MOE_TRY(train(c, o, stopped));
    return o->save ? moe_checkpoint_save(o->save, c->x) : MOE_OK;
}

static int open_world(struct capture *c, const struct options *o)
{
    const double timeout_s = (double)o->timeout_s;
    const struct moe_gpu_module *gpu;
    if (!o->cuda) {
        MOE_TRY(moe_device_cpu.open(&c->device));
        return moe_communicator_here()->open(c->device, timeout_s, &c->world);
    }
    MOE_TRY(moe_gpu_open(&gpu));
    if (!gpu->comm) return moe_fail(MOE_EMISSING, "the GPU part was built without NCCL");
    MOE_TRY(gpu->device->open(&c->device));
    return gpu->comm->open(c->device, timeout_s, &c->world);
}

int main(int argc, char **argv)
{
    struct options o;
    struct capture c = {0};
    bool stopped = false;
    int rank = -1;
    int err = read_options(argc, argv, &o);
    if (err >= 0 && o.help) return fputs(usage, stdout) < 0;
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (err >= 0) err = open_world(&c, &o);
    if (err >= 0) {
        rank = c.world->rank;
        err = capture(&c, &o, &stopped);
    }
    const char *started = getenv("OMPI_COMM_WORLD_RANK"); /* all say the same, and are told apart */
    if (err == MOE_EMISSING && rank < 0 && started) rank = atoi(started);
    if (err < 0 && rank >= 0) fprintf(stderr, "moesim-capture: rank %d: %s\n", rank, moe_error());
    if (err < 0 && rank < 0) fprintf(stderr, "moesim-capture: %s\n", moe_error());
    moe_recorder_close(c.recorder);
    /* Others hear of it, with its reason, before anything that may take long or say something else. */
    if (err < 0 && c.world && c.world->size > 1) c.world->table->abort(c.world, moe_exit_code(err));
    moe_execute_close(c.x);
    moe_data_free(&c.data);
    moe_schedule_free(c.s);
    moe_scenario_free(c.scenario);
    if (c.world) c.world->table->close(c.world);
    if (c.device) c.device->table->close(c.device);
    return err < 0 ? moe_exit_code(err) : stopped ? EXIT_INTERRUPTED : 0;
}
