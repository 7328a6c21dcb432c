/* cuda - the kernels of ref.h on a GPU: one function each, which queues work on a stream and returns.
 *
 * moe_cuda_NAME means what moe_ref_NAME (ref.h) means, with the same arguments in the same order, device
 * pointers, and `type` in place of a name for each type. Rows and arrays of reals are of that type; where
 * nothing is real it is not looked at. The sources (kernels/NAME.cu) are CUDA C++, and compile for the host
 * too (cuda.cuh), which is how machines without GPUs test them.
 *
 * Numbers: float and double are computed as ref.h says, with sums in another but fixed order; choices (top-k,
 * ties, slots, counts) are those of ref.h exactly. bf16 is read as float, computed as float and rounded once
 * where it is written; where an output is added to, the sum is rounded once. moe_cuda_combine too rounds a
 * token once, after its sum over k (moe_combine_unsort_bf16), not each product and sum as the CPU runtime
 * does. The same arguments give the same bits, always; moe_cuda_combine_scatter alone does not, and exists to
 * be measured against.
 *
 * Result of all: 0, or the cudaError_t of the launch. Work for 0 elements queues nothing (but outputs that
 * are sums become 0). An index outside its range is not used: the first is noted in the queue's fault, and
 * outputs are then not defined.
 * Cost: of each in bytes, beside its kernel (kernels/NAME.cu), with the time that a device of 4.8 TB/s (H200:
 * NVIDIA data sheet) needs at least for them. */
#ifndef MOE_CUDA_H
#define MOE_CUDA_H

#include "kernels/ref.h"

#include <stddef.h>

enum moe_cuda_type { MOE_CUDA_F32, MOE_CUDA_F64, MOE_CUDA_BF16 };

/* The first index out of range that any kernel met since the host cleared it: in memory that host and device
 * see (page-locked and mapped). */
struct moe_cuda_fault {
    int set; /* 0: none */
    int64_t index, n;
};

/* Where work is queued.
 *   stream           a cudaStream_t
 *   workspace        device memory, 256-byte aligned, that only work on this stream uses
 *   workspace_bytes  MOE_CUDA_WORKSPACE_BYTES at least; attention needs moe_cuda_attention_bytes
 *   fault            as above */
struct moe_cuda_queue {
    void *stream;
    void *workspace;
    size_t workspace_bytes;
    struct moe_cuda_fault *fault;
};

#define MOE_CUDA_WORKSPACE_BYTES ((size_t)8 << 20)

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_CUDA(name, ...)                                                                                  \
    int moe_cuda_##name(const struct moe_cuda_queue *q, enum moe_cuda_type type, __VA_ARGS__)

/* embed.cu */
MOE_CUDA(embed, int64_t T, int64_t H, int64_t V, const int32_t *token, const void *emb, void *x);
MOE_CUDA(embed_bwd, int64_t T, int64_t H, int64_t V, const int32_t *token, const void *dx, void *demb,
         bool add);

/* rmsnorm.cu */
MOE_CUDA(rmsnorm, int64_t T, int64_t H, const void *x, const void *gain, void *y);
MOE_CUDA(rmsnorm_bwd, int64_t T, int64_t H, const void *x, const void *gain, const void *dy, void *dx,
         void *dgain, bool add_x, bool add_gain);

/* attention.cu */
MOE_CUDA(attention, int64_t T, int64_t H, int64_t A, int64_t S, const void *qkv, void *o);
MOE_CUDA(attention_bwd, int64_t T, int64_t H, int64_t A, int64_t S, const void *qkv, const void *dout,
         void *dqkv, bool add);
size_t moe_cuda_attention_bytes(int64_t T, int64_t H, int64_t A, int64_t S); /* either, for any type */

/* elementwise.cu */
MOE_CUDA(add, int64_t n, const void *a, const void *b, void *y);
MOE_CUDA(add_bwd, int64_t n, const void *dy, void *da, void *db, bool add_a, bool add_b);
MOE_CUDA(zero, int64_t n, void *y);
MOE_CUDA(scale, int64_t n, double divisor, const void *g, void *out);
MOE_CUDA(copy, int64_t n, const void *x, void *y);
MOE_CUDA(sgd, int64_t n, double factor, const void *param, const void *grad, void *out);

/* adamw.cu */
MOE_CUDA(sqnorm, int64_t n, const void *g, double *norm, bool add);
MOE_CUDA(clip, int64_t n, double limit, const void *g, const double *norm, const double *other_norm,
         void *out);
MOE_CUDA(adamw, int64_t n, double rate, double decay, int64_t step, const void *param, const void *grad,
         const void *m, const void *v, void *param_out, void *m_out, void *v_out);

/* router.cu. topk_sigmoid: prob is 1 / (1 + exp(-logit)) of each expert by itself, else as topk. */
MOE_CUDA(topk, int64_t T, int64_t E, int64_t K, const void *logits, void *prob, int32_t *expert,
         int32_t *slot, int64_t *counts);
MOE_CUDA(topk_sigmoid, int64_t T, int64_t E, int64_t K, const void *logits, void *prob, int32_t *expert,
         int32_t *slot, int64_t *counts);
MOE_CUDA(topk_bwd, int64_t T, int64_t E, const void *prob, const void *dprob, void *dlogits, bool add);
MOE_CUDA(topk_sigmoid_bwd, int64_t T, int64_t E, const void *prob, const void *dprob, void *dlogits,
         bool add);
MOE_CUDA(normalize, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert, void *gate);
MOE_CUDA(normalize_bwd, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert,
         const void *dgate, void *dprob, bool add);
MOE_CUDA(aux_loss, int64_t T, int64_t E, double factor, const void *prob, const int64_t *all_counts,
         void *loss);
MOE_CUDA(aux_loss_bwd, int64_t T, int64_t E, double factor, const int64_t *all_counts, void *dprob, bool add);

/* limit.cu */
MOE_CUDA(largest, int64_t E, const int64_t *counts, int64_t *largest);
MOE_CUDA(set, int64_t value, int64_t *y);
MOE_CUDA(limit, int64_t T, int64_t E, int64_t K, int64_t C, int64_t G, enum moe_ref_order order, bool pad,
         uint64_t seed, const void *prob, const int32_t *expert, int32_t *slot, int32_t *kept_expert,
         int64_t *kept, int64_t *arrive);
MOE_CUDA(select, int64_t T, int64_t e, int64_t K, int64_t f, const int32_t *expert, int32_t *slot,
         int32_t *local);
MOE_CUDA(spread, int64_t T, int64_t E, int64_t K, int64_t P, const int32_t *expert, int32_t *slot,
         int64_t *tokens_for);

/* permute.cu. Rows are at most INT32_MAX, choices too. */
MOE_CUDA(align, int64_t T, int64_t E, int64_t K, int64_t A, const int32_t *expert, const int32_t *slot,
         const int64_t *counts, int32_t *aligned_slot, int64_t *aligned);
MOE_CUDA(permute, int64_t T, int64_t H, int64_t K, int64_t n, const void *x, const int32_t *slot, void *rows);
MOE_CUDA(permute_bwd, int64_t T, int64_t H, int64_t K, int64_t n, const void *drows, const int32_t *slot,
         void *dx, bool add);
MOE_CUDA(sort_rows, int64_t P, int64_t e, int64_t H, const void *rows, const int64_t *counts, void *sorted,
         bool add);
MOE_CUDA(unsort_rows, int64_t P, int64_t e, int64_t H, const void *sorted, const int64_t *counts, void *rows,
         bool add);

/* combine.cu */
MOE_CUDA(take, int64_t T, int64_t E, int64_t K, const void *prob, const int32_t *expert, void *taken);
MOE_CUDA(take_bwd, int64_t T, int64_t E, int64_t K, const int32_t *expert, const void *dtaken, void *dprob,
         bool add);
MOE_CUDA(weigh, int64_t n, int64_t H, const void *rows, const void *weight, void *y);
MOE_CUDA(weigh_bwd, int64_t n, int64_t H, const void *rows, const void *weight, const void *dy, bool by_rows,
         void *drows, void *dweight);
MOE_CUDA(combine, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows, const void *prob,
         const int32_t *expert, const int32_t *slot, void *y);
MOE_CUDA(combine_bwd, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows,
         const void *prob, const int32_t *expert, const int32_t *slot, const void *dy, bool by_rows,
         void *drows, void *dprob);
/* As combine, by an atomic addition to y of each product, in whatever order rows come; of type: float,
 * double, or bf16 by compare-and-exchange, which then rounds every sum. */
MOE_CUDA(combine_scatter, int64_t T, int64_t H, int64_t K, int64_t E, int64_t n, const void *rows,
         const void *prob, const int32_t *expert, const int32_t *slot, void *y);

/* swiglu.cu */
MOE_CUDA(swiglu, int64_t rows, int64_t F, const void *h, void *a);
MOE_CUDA(swiglu_bwd, int64_t rows, int64_t F, const void *h, const void *da, void *dh, bool add);

/* xent.cu */
MOE_CUDA(xent, int64_t T, int64_t V, const void *logits, const int32_t *target, void *dlogits, void *loss);

#ifdef __cplusplus
}
#endif

#endif
