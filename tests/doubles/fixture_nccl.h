/* fixture_nccl - what the tests of the double of NCCL share: 4 ranks, their failures counted together. */
#ifndef MOE_TEST_FIXTURE_NCCL_H
#define MOE_TEST_FIXTURE_NCCL_H

#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4 };

static int me, failures;
static cudaStream_t one, two;

#define expect(cond) ((cond) ? (void)0 : not_so(__FILE__, __LINE__, #cond))
static void not_so(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: rank %d: not so: %s (NCCL: %s)\n", file, line, me, what, ncclGetLastError(NULL));
    failures++;
}

static inline void open_all(void)
{
    MPI_Init(NULL, NULL);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    expect(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking) == cudaSuccess);
    expect(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking) == cudaSuccess);
}

/* Result: the exit code, the same on all ranks. */
static inline int close_all(void)
{
    int all;
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (!me) printf("%d failures\n", all);
    MPI_Finalize();
    return all > 0;
}

static inline void *device(size_t bytes)
{
    void *p = NULL;
    expect(cudaMalloc(&p, bytes) == cudaSuccess);
    return p;
}

/* cudaMemcpy to the device may return before the bytes have come there. */
static inline void put(void *to, const void *from, size_t bytes)
{
    expect(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    expect(cudaDeviceSynchronize() == cudaSuccess);
}

static inline void *device_copy(const void *from, size_t bytes)
{
    void *p = device(bytes);
    put(p, from, bytes);
    return p;
}

static inline void read_back(void *to, const void *from, size_t bytes)
{
    expect(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
}

static inline ncclUniqueId shared_id(void)
{
    ncclUniqueId id;
    if (!me) expect(ncclGetUniqueId(&id) == ncclSuccess);
    MPI_Bcast(&id, (int)sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    return id;
}

static inline ncclComm_t new_world(void)
{
    ncclComm_t c = NULL;
    expect(ncclCommInitRank(&c, RANKS, shared_id(), me) == ncclSuccess && c);
    return c;
}

/* Polls until it is no longer in progress. */
static inline ncclResult_t polled(ncclComm_t c)
{
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress && ncclCommGetAsyncError(c, &state) == ncclSuccess) continue;
    return state;
}

/* Is the stream complete within this time? */
static inline bool completes(cudaStream_t stream, double s)
{
    const double end = MPI_Wtime() + s;
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady && MPI_Wtime() < end) state = cudaStreamQuery(stream);
    return state == cudaSuccess;
}

#endif
