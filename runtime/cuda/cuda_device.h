/* cuda_device - what the files of the GPU module share: the device behind the table, and errors. */
#ifndef MOE_CUDA_DEVICE_H
#define MOE_CUDA_DEVICE_H

#include "runtime/communicator.h"

#include <cuda_runtime_api.h>

extern const struct moe_device_table moe_device_cuda;
extern const struct moe_communicator_table moe_comm_nccl; /* with MOESIM_NCCL */

/* The CUDA stream of MOE_STREAM_*: compute, and communication, which has the higher priority. */
cudaStream_t moe_cuda_stream(struct moe_device *d, int stream);

/* MOE_OK for cudaSuccess, else MOE_EFAILED: "CALL: what CUDA says (name)". */
int moe_cuda_check(cudaError_t code, const char *call);

/* GPUs that can be used, at least 1; or MOE_EMISSING with why there is none. */
int moe_cuda_count(void);

#endif
