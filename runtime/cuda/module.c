/* module.c - see gpu.h: what the GPU part exports. */
#include "runtime/cuda/cuda_device.h"
#include "runtime/gpu.h"

const struct moe_gpu_module moe_gpu_module = {
    .version = MOE_GPU_VERSION,
    .device = &moe_device_cuda,
#ifdef MOESIM_NCCL
    .comm = &moe_comm_nccl,
#endif
    .count = moe_cuda_count,
};
