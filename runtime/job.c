/* job.c - see job.h. */
#include "runtime/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef char *(*look_up)(const char *name);

/* Ports that SLURM's numbers choose from: below those that systems give to whoever asks for any. */
enum { FIRST_PORT = 20000, PORTS = 12000 };

static const char *text_of(look_up look, const char *name)
{
    const char *text = look(name);
    return text && *text ? text : NULL;
}

static int number(look_up look, const char *name, long long least, long long most, long long *out)
{
    const char *text = text_of(look, name);
    char *end;
    if (!text) return moe_fail(MOE_EUSAGE, "%s is not set: expected %lld to %lld", name, least, most);
    *out = strtoll(text, &end, 10);
    if (*end || end == text || *out < least || *out > most)
        return moe_fail(MOE_EUSAGE, "%s=%s: expected a number from %lld to %lld", name, text, least, most);
    return MOE_OK;
}

static int numbers(look_up look, const char *rank, const char *size, struct moe_job *out)
{
    long long r = 0, n = 0;
    MOE_TRY(number(look, size, 1, 1 << 24, &n));
    MOE_TRY(number(look, rank, 0, n - 1, &r));
    out->rank = (int)r;
    out->size = (int)n;
    return MOE_OK;
}

/* text: the variable's whole value, for the message. */
static int copy_host(const char *name, const char *text, const char *from, size_t n, char *to)
{
    if (n < 1 || n >= MOE_HOST)
        return moe_fail(MOE_EUSAGE, "%s=%s: expected a host of up to %d bytes", name, text, MOE_HOST - 1);
    memcpy(to, from, n);
    to[n] = 0;
    return MOE_OK;
}

static int master(look_up look, struct moe_job *out)
{
    const char *host = text_of(look, "MASTER_ADDR"), *agent = look("TORCHELASTIC_USE_AGENT_STORE");
    const bool taken = agent && !strcmp(agent, "True");
    long long port = 0;
    if (!host)
        return moe_fail(MOE_EUSAGE, "MASTER_ADDR is not set: expected the host of rank 0, for %d ranks",
                        out->size);
    MOE_TRY(copy_host("MASTER_ADDR", host, host, strlen(host), out->host));
    MOE_TRY(number(look, "MASTER_PORT", 1, taken ? 65534 : 65535, &port));
    out->port = (int)port + taken;
    return MOE_OK;
}

static int by_env(look_up look, struct moe_job *out)
{
    MOE_TRY(numbers(look, "RANK", "WORLD_SIZE", out));
    return out->size > 1 ? master(look, out) : MOE_OK;
}

static int by_mpi(look_up look, const char *rank, const char *size, struct moe_job *out)
{
    MOE_TRY(numbers(look, rank, size, out));
    const bool told = out->size > 1 && text_of(look, "MASTER_ADDR") && text_of(look, "MASTER_PORT");
    return told ? master(look, out) : MOE_OK;
}

/* "rack[1,3]gpu[003-010,014],cpu1": rack1gpu003. */
static int first_node(const char *name, const char *list, char *out)
{
    char host[MOE_HOST];
    size_t n = 0;
    for (const char *at = list; *at && *at != ',' && n < sizeof host; at++) {
        if (*at != '[') {
            host[n++] = *at;
            continue;
        }
        const char *close = strchr(at, ']');
        if (!close)
            return moe_fail(MOE_EUSAGE, "%s=%s: expected a list of nodes, '[' is not closed", name, list);
        for (at++; *at != '-' && *at != ',' && at < close && n < sizeof host; at++) host[n++] = *at;
        at = close;
    }
    return copy_host(name, list, host, n, out);
}

static int slurm_port(look_up look, struct moe_job *out)
{
    long long port = 0, job = 0, step = 0;
    if (text_of(look, "MASTER_PORT")) {
        MOE_TRY(number(look, "MASTER_PORT", 1, 65535, &port));
    } else {
        MOE_TRY(number(look, "SLURM_JOB_ID", 0, UINT32_MAX, &job));
        if (text_of(look, "SLURM_STEP_ID")) MOE_TRY(number(look, "SLURM_STEP_ID", 0, UINT32_MAX, &step));
        port = FIRST_PORT + (job * 7 + step) % PORTS; /* steps of a job may run side by side */
    }
    out->port = (int)port;
    return MOE_OK;
}

static int by_slurm(look_up look, struct moe_job *out)
{
    static const char *const names[] = {"MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"};
    MOE_TRY(numbers(look, "SLURM_PROCID", "SLURM_NTASKS", out));
    if (out->size == 1) return MOE_OK;
    MOE_TRY(slurm_port(look, out));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = text_of(look, names[i]);
        if (text && i == 1) return first_node(names[i], text, out->host);
        if (text) return copy_host(names[i], text, text, strlen(text), out->host);
    }
    return moe_fail(MOE_EUSAGE,
                    "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set: expected the host of rank 0");
}

int moe_job_find(char *(*look)(const char *name), struct moe_job *out)
{
    *out = (struct moe_job){.size = 1};
    if (text_of(look, "RANK")) {
        out->launcher = MOE_LAUNCHED_BY_ENV;
        return by_env(look, out);
    }
    if (text_of(look, "OMPI_COMM_WORLD_RANK")) {
        out->launcher = MOE_LAUNCHED_BY_MPI;
        return by_mpi(look, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", out);
    }
    if (text_of(look, "SLURM_PROCID")) {
        out->launcher = MOE_LAUNCHED_BY_SLURM;
        return by_slurm(look, out);
    }
    if (text_of(look, "PMI_RANK")) {
        out->launcher = MOE_LAUNCHED_BY_MPI;
        return by_mpi(look, "PMI_RANK", "PMI_SIZE", out);
    }
    return MOE_OK;
}
