/* gpu - the CUDA device and the NCCL communicator, which live in a module of their own.
 *
 * libmoesim_cuda.so is looked for beside the program, or where MOESIM_GPU_MODULE says, and opened when a GPU
 * is asked for: a program that does not ask needs no toolkit, driver or GPU to start. */
#ifndef MOE_GPU_H
#define MOE_GPU_H

#include "runtime/communicator.h"

/* What the module exports, under the name moe_gpu_module. version: MOE_GPU_VERSION of its build. */
enum { MOE_GPU_VERSION = 1 };
struct moe_gpu_module {
    int version;
    const struct moe_device_table *device;     /* "cuda" */
    const struct moe_communicator_table *comm; /* "nccl"; NULL when it was built without */
    /* Number of GPUs that can be used, or why there is none: MOE_EMISSING. */
    int (*count)(void);
};

/* Opens the module, once; it stays open. Result: *out, with at least one GPU. Errors: MOE_EMISSING, with the
 * reason: not built, no driver, no GPU. */
int moe_gpu_open(const struct moe_gpu_module **out);

#endif
