/* cpu_bf16.c - see cpu_kernels.h. */
#include "runtime/cpu_kernels.h"

#include "kernels/bf16.h"

#include <stdlib.h>
#include <string.h>

static float rounded(float x)
{
    return moe_bf16_to_float(moe_bf16_from_float(x));
}

static int64_t sum(const int64_t *x, int64_t n)
{
    int64_t all = 0;
    for (int64_t i = 0; i < n; i++) all += x[i];
    return all;
}

/* Elements of an operand. */
static int64_t extent(const struct moe_kernel_shape *k, const struct moe_operand *o,
                      const struct moe_launch *launch)
{
    int64_t n = o->times;
    for (int i = 0; i < o->n_dims; i++) n *= launch->dims[o->dims[i]];
    if (o->by_rows) n *= sum(launch->rows, launch->dims[0]);
    for (int i = 0; o->by_total && i < k->n_reads; i++)
        if (k->reads[i].kind == MOE_OPERAND_COUNT) n *= sum(launch->in[i], extent(k, &k->reads[i], launch));
    return n;
}

/* [n] floats, zero where `from` is NULL. */
static float *widen(const moe_bf16 *from, int64_t n)
{
    float *to = moe_alloc((size_t)n + 1, sizeof *to);
    for (int64_t i = 0; from && i < n; i++) to[i] = moe_bf16_to_float(from[i]);
    return to;
}

/* COMBINE, where products and sums are stored one by one. */
static void combine(const int64_t *d, const void *const *in, float *y)
{
    const float *rows = in[0], *prob = in[1];
    const int32_t *expert = in[2], *slot = in[3];
    memset(y, 0, (size_t)(d[0] * d[1]) * sizeof *y);
    for (int64_t i = 0; i < d[0] * d[2]; i++)
        for (int64_t h = 0; h < d[1] && slot[i] != -1; h++) {
            float *at = &y[i / d[2] * d[1] + h];
            moe_assert(expert[i] >= 0 && expert[i] < d[3] && slot[i] >= 0 && slot[i] < d[4]);
            *at = rounded(*at + rounded(prob[i / d[2] * d[3] + expert[i]] * rows[slot[i] * d[1] + h]));
        }
}

void moe_cpu_run_bf16(const struct moe_kernel_shape *shapes, const struct moe_launch *launch)
{
    const struct moe_kernel_shape *k = &shapes[launch->op->kernel];
    struct moe_op op = *launch->op;
    struct moe_launch wide = *launch;
    float *in[MOE_REFS] = {0}, *out[MOE_REFS] = {0};
    op.type = MOE_F32;
    wide.op = &op;
    for (int i = 0; i < op.n_reads; i++)
        if (k->reads[i].type == MOE_TYPE_COUNT)
            wide.in[i] = in[i] = widen(launch->in[i], extent(k, &k->reads[i], launch));
    /* With what is there, so that poison shows where the kernel writes nothing. */
    for (int i = 0; i < op.n_writes; i++)
        if (k->writes[i].type == MOE_TYPE_COUNT)
            wide.out[i] = out[i] = widen(launch->out[i], extent(k, &k->writes[i], launch));
    if (op.kernel == MOE_K_COMBINE)
        combine(wide.dims, wide.in, out[0]);
    else
        moe_cpu_run_f32(&wide);
    for (int i = 0; i < op.n_writes; i++) {
        moe_bf16 *to = launch->out[i];
        int64_t n = out[i] ? extent(k, &k->writes[i], launch) : 0;
        for (int64_t e = 0; e < n; e++) to[e] = moe_bf16_from_float(out[i][e]);
    }
    for (int i = 0; i < MOE_REFS; i++) {
        free(in[i]);
        free(out[i]);
    }
}
