/* process.c - see cli.h. */
#include "sim/cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* For the handler; one program runs at a time. */
static volatile sig_atomic_t child, passed_on;

static void pass_on(int signal_number)
{
    (void)signal_number;
    int saved = errno;
    passed_on = 1;
    if (child) kill(child, SIGTERM);
    errno = saved;
}

const char *moe_program_beside(const char *name, char out[PATH_MAX])
{
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
    char *slash = strrchr(out, '/');
    if (!slash) return name;
    snprintf(slash + 1, (size_t)(out + PATH_MAX - slash - 1), "%s", name);
    return access(out, X_OK) == 0 ? out : name;
}

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { SIGNALS = sizeof signals / sizeof *signals };

/* In the child: becomes the program, or tells `failed` why not. A process group of its own: a terminal's
 * Ctrl-C reaches it through pass_on only, so once. It ends with its parent, however that ends. */
static void become(const char *const argv[], const char *dir, pid_t parent, int output, int failed)
{
    struct sigaction action;
    sigset_t none;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1); /* it has ended before it could be asked for */
    for (int i = 0; i < SIGNALS; i++)
        if (sigaction(signals[i], NULL, &action) == 0 && action.sa_handler == pass_on)
            signal(signals[i], SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int input = open("/dev/null", O_RDONLY);
    if (input >= 0 && dup2(input, 0) == 0 && dup2(output, 1) == 1 && dup2(output, 2) == 2 &&
        (!dir || chdir(dir) == 0))
        execvp(argv[0], (char *const *)argv);
    if (write(failed, &errno, sizeof errno) < 0) _exit(126);
    _exit(127);
}

static int spawn(const char *const argv[], const char *package, const char *dir, int output, pid_t *pid)
{
    int failed[2], error = 0;
    sigset_t all, before;
    const pid_t self = getpid();
    if (pipe2(failed, O_CLOEXEC) < 0) return moe_fail(MOE_EFAILED, "%s: %s", argv[0], strerror(errno));
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before); /* none may reach pass_on in the child, which knows none */
    *pid = fork();
    if (*pid == 0) become(argv, dir, self, output, failed[1]);
    if (*pid < 0) error = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    close(failed[1]);
    if (*pid > 0 && read(failed[0], &error, sizeof error) > 0) waitpid(*pid, NULL, 0);
    close(failed[0]);
    if (error == ENOENT) return moe_fail(MOE_EMISSING, "%s: not found (package %s)", argv[0], package);
    return error ? moe_fail(MOE_EFAILED, "%s: %s", argv[0], strerror(error)) : MOE_OK;
}

/* Until the program and all that it started have closed their output. */
static void listen_to(int output, void (*hear)(void *ctx, char *line), void *ctx)
{
    FILE *f = fdopen(output, "r");
    char *line = NULL;
    size_t cap = 0;
    while (getline(&line, &cap, f) >= 0) {
        line[strcspn(line, "\n")] = 0;
        hear(ctx, line);
    }
    free(line);
    fclose(f);
}

int moe_program_run(const char *const argv[], const char *package, const char *dir,
                    void (*hear)(void *ctx, char *line), void *ctx)
{
    struct sigaction before[SIGNALS], action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    pid_t pid = -1;
    int status = 0, output[2] = {-1, 2};
    if (hear && pipe2(output, O_CLOEXEC) < 0)
        return moe_fail(MOE_EFAILED, "%s: %s", argv[0], strerror(errno));
    passed_on = child = 0;
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &before[i]);
        if (before[i].sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL); /* else: nohup */
    }
    int err = spawn(argv, package, dir, output[1], &pid);
    if (hear) close(output[1]);
    if (err == MOE_OK) {
        child = pid;
        if (passed_on) kill(pid, SIGTERM); /* it came before the handler knew the child */
        if (hear) listen_to(output[0], hear, ctx);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        child = 0;
    } else if (hear) {
        close(output[0]);
    }
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], NULL);
    if (err < 0) return err;
    if (passed_on) return MOE_EXIT_INTERRUPTED;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int moe_program_gnuplot(const char *script, const char *dir)
{
    int code = moe_program_run((const char *[]){"gnuplot", script, NULL}, "gnuplot-nox", dir, NULL, NULL);
    if (code == MOE_EXIT_INTERRUPTED) raise(SIGINT); /* the end of this program too */
    return code > 0 ? moe_fail(MOE_EFAILED, "gnuplot %s failed (exit code %d)", script, code) : code;
}
