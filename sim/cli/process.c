/* process.c - see cli.h. */
#include "sim/cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

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

/* A process group of its own: a terminal's Ctrl-C reaches it through pass_on only, so once. */
static int spawn(const char *const argv[], const char *package, const char *dir, pid_t *pid)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t reset;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, 2, 1);
    if (dir) posix_spawn_file_actions_addchdir_np(&files, dir);
    posix_spawnattr_init(&attributes);
    sigemptyset(&reset);
    sigaddset(&reset, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &reset);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    int error = posix_spawnp(pid, argv[0], &files, &attributes, (char *const *)argv, environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (error == ENOENT) return moe_fail(MOE_EMISSING, "%s: not found (package %s)", argv[0], package);
    return error ? moe_fail(MOE_EFAILED, "%s: %s", argv[0], strerror(error)) : MOE_OK;
}

int moe_program_run(const char *const argv[], const char *package, const char *dir)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction before[3], action = {.sa_handler = pass_on};
    pid_t pid;
    int status = 0;
    passed_on = child = 0;
    for (int i = 0; i < 3; i++) {
        sigaction(signals[i], NULL, &before[i]);
        if (before[i].sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL); /* else: nohup */
    }
    int err = spawn(argv, package, dir, &pid);
    if (err == MOE_OK) {
        child = pid;
        if (passed_on) kill(pid, SIGTERM); /* it came before the handler knew the child */
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        child = 0;
    }
    for (int i = 0; i < 3; i++) sigaction(signals[i], &before[i], NULL);
    if (err < 0) return err;
    if (passed_on) return MOE_EXIT_INTERRUPTED;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

int moe_program_gnuplot(const char *script, const char *dir)
{
    int code = moe_program_run((const char *[]){"gnuplot", script, NULL}, "gnuplot-nox", dir);
    if (code == MOE_EXIT_INTERRUPTED) raise(SIGINT); /* the end of this program too */
    return code > 0 ? moe_fail(MOE_EFAILED, "gnuplot %s failed (exit code %d)", script, code) : code;
}
