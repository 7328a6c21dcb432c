/* launch.c - see device_internal.h: a launch as a call of a kernel, or of cuBLAS. */
#include "runtime/cuda/device_internal.h"
#include "runtime/kernel_calls.h"
#include "sim/kernel_shapes.h"

#include <stdlib.h>

int moe_cuda_workspace(struct moe_cuda *c, int stream, size_t bytes, const struct moe_cuda_queue **out)
{
    struct moe_cuda_queue *q = &c->streams[stream].queue;
    *out = q;
    if (q->workspace && bytes <= q->workspace_bytes) return MOE_OK;
    const size_t at_least = 2 * q->workspace_bytes, n = bytes > at_least ? bytes : at_least;
    MOE_TRY(moe_cuda_pool_take(&c->pool, n, &q->workspace));
    q->workspace_bytes = n;
    return MOE_OK;
}

/* Kernels of integers alone are the same in all types. */
static enum moe_cuda_type type_of(const struct moe_op *op)
{
    return op->type == MOE_F64 ? MOE_CUDA_F64 : op->type == MOE_BF16 ? MOE_CUDA_BF16 : MOE_CUDA_F32;
}

static size_t workspace_bytes(const struct moe_launch *launch)
{
    const int64_t *d = launch->dims;
    const bool attention = launch->op->kernel == MOE_K_ATTENTION || launch->op->kernel == MOE_K_ATTENTION_BWD;
    return attention ? moe_cuda_attention_bytes(d[0], d[1], d[2], d[3]) : 0;
}

/* Choices that were made elsewhere, in place of those of TOPK. */
static int force(struct moe_cuda *c, const struct moe_launch *launch, int stream)
{
    const int64_t T = launch->dims[0], E = launch->dims[1], K = launch->dims[2];
    struct moe_cuda_stream *s = &c->streams[stream];
    int32_t *expert = moe_alloc((size_t)(T * K), sizeof *expert),
            *slot = moe_alloc((size_t)(T * K), sizeof *slot);
    int64_t *counts = moe_alloc((size_t)E, sizeof *counts);
    const void *from[] = {expert, slot, counts};
    const size_t bytes[] = {(size_t)(T * K) * sizeof *expert, (size_t)(T * K) * sizeof *slot,
                            (size_t)E * sizeof *counts};
    int err = MOE_OK;
    moe_ref_force_f32(T, E, K, launch->forced, expert, slot, counts);
    for (int i = 0; i < 3 && err >= 0; i++)
        err = moe_cuda_to_device(&s->staging, s->stream, launch->out[1 + i], from[i], bytes[i]);
    free(expert), free(slot), free(counts);
    return err;
}

static int run_topk(struct moe_cuda *c, const struct moe_launch *launch, const struct moe_cuda_queue *q,
                    int stream)
{
    const int64_t *d = launch->dims;
    void *const *out = launch->out;
    int code = moe_cuda_topk(q, type_of(launch->op), d[0], d[1], d[2], launch->in[0], out[0], out[1], out[2],
                             out[3]);
    MOE_TRY(moe_cuda_check((cudaError_t)code, "topk"));
    return launch->forced ? force(c, launch, stream) : MOE_OK;
}

int moe_cuda_run(struct moe_device *device, const struct moe_launch *launch, int stream)
{
    struct moe_cuda *c = (struct moe_cuda *)device;
    const struct moe_op *op = launch->op;
    const enum moe_cuda_type type = type_of(op);
    const int64_t *d = launch->dims;
    const void *const *in = launch->in;
    void *const *out = launch->out;
    const bool by_rows = op->mode == MOE_DOT_BY_ROWS;
    const bool add = op->writes[0].accumulate, add1 = op->writes[1].accumulate;
    const struct moe_cuda_queue *q;
    int code = 0;
    for (int i = 0; i < op->n_writes; i++)
        moe_assert(!op->writes[i].accumulate || (moe_kernel_adds(op->kernel) >> i & 1));
    moe_assert(stream >= 0 && stream < MOE_STREAM_COUNT);
    MOE_TRY(moe_cuda_workspace(c, stream, workspace_bytes(launch), &q));
    switch (op->kernel) {
#define RUN(NAME, name, ...)                                                                                 \
    case MOE_K_##NAME: code = moe_cuda_##name(q, type, __VA_ARGS__); break;
        MOE_KERNEL_CALLS(RUN)
#undef RUN
    case MOE_K_TOPK: return run_topk(c, launch, q, stream);
    case MOE_K_GEMM:
    case MOE_K_GROUPED_GEMM:
    case MOE_K_GROUPED_WGRAD: return moe_cuda_products(c, launch, type, stream);
    case MOE_K_COUNT: moe_assert(!"a kernel");
    }
    return moe_cuda_check((cudaError_t)code, moe_kernel_text[op->kernel]);
}
