/* gpu.c - see gpu.h. */
#include "runtime/gpu.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char name[] = "libmoesim_cuda.so";

/* Beside the program. */
static int default_path(char *out, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    if (n < 0) return moe_fail(MOE_EMISSING, "no GPU part: cannot read /proc/self/exe");
    out[n] = '\0';
    char *end = strrchr(out, '/');
    const size_t room = size - (size_t)(end + 1 - out);
    if (!end || room < sizeof name)
        return moe_fail(MOE_EMISSING, "no GPU part: the program's path is too long");
    memcpy(end + 1, name, sizeof name);
    return MOE_OK;
}

static int load(const struct moe_gpu_module **out)
{
    char path[PATH_MAX];
    const char *given = getenv("MOESIM_GPU_MODULE");
    if (given && strlen(given) >= sizeof path)
        return moe_fail(MOE_EMISSING, "MOESIM_GPU_MODULE: the path is too long");
    if (given)
        snprintf(path, sizeof path, "%s", given);
    else
        MOE_TRY(default_path(path, sizeof path));
    if (access(path, R_OK) != 0)
        return moe_fail(MOE_EMISSING, "no GPU part: %s was not built (cmake --preset cuda)", path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return moe_fail(MOE_EMISSING, "no GPU part: %s", dlerror());
    const struct moe_gpu_module *module = dlsym(library, "moe_gpu_module");
    if (!module || module->version != MOE_GPU_VERSION)
        return moe_fail(MOE_EMISSING, "no GPU part: %s is of another version of moesim", path);
    *out = module;
    return MOE_OK;
}

int moe_gpu_open(const struct moe_gpu_module **out)
{
    static const struct moe_gpu_module *module;
    if (!module) MOE_TRY(load(&module));
    MOE_TRY(module->count());
    *out = module;
    return MOE_OK;
}
