/* device_world - a miniature model, whose calls are all kernels there are: tables of tensors and of calls,
 * which hold every kernel and which one is whose backward, in worlds of several shapes. Experts take one row
 * of three tokens, and drop others. Shared by the tests of devices. */
#ifndef MOE_TEST_DEVICE_WORLD_H
#define MOE_TEST_DEVICE_WORLD_H

#include "kernels/bf16.h"
#include "kernels/ref.h"
#include "runtime/device.h"

#include <stdlib.h>
#include <string.h>

#define LENGTH(a) (int)(sizeof(a) / sizeof *(a))

/* ---- worlds ---- */

struct shape {
    int64_t T, H, E, K, F, V, P;
    double bias; /* added to the logits of the last expert */
};

static const struct shape shapes[] = {
    {.T = 5, .H = 3, .E = 4, .K = 2, .F = 2, .V = 7, .P = 2},             /* plain */
    {.T = 0, .H = 3, .E = 4, .K = 2, .F = 2, .V = 7, .P = 2},             /* no tokens */
    {.T = 1, .H = 1, .E = 1, .K = 1, .F = 1, .V = 1, .P = 1},             /* smallest */
    {.T = 6, .H = 2, .E = 6, .K = 1, .F = 3, .V = 4, .P = 3, .bias = 10}, /* all tokens to one expert */
    {.T = 4, .H = 5, .E = 3, .K = 3, .F = 1, .V = 5, .P = 1},             /* K = E */
    {.T = 3, .H = 4, .E = 8, .K = 2, .F = 4, .V = 2, .P = 4},             /* at least two empty experts */
};

enum { GROUP = 3 }; /* tokens that share a capacity of 1; rows, when each expert is padded to it: */
#define PADDED(s) ((s)->E * ((s)->T ? ((s)->T + GROUP - 1) / GROUP : 1))
#define WIDTH(s) (4 * (s)->H) /* of attention: two heads, each even */

/* clang-format off */
/*    name    elements; each has a gradient of the same size, D before its name */
#define REALS(X) \
    X(EMB,    s->V * s->H) \
    X(X,      s->T * s->H) \
    X(GAIN,   s->H) \
    X(QKV,    s->T * 3 * WIDTH(s)) \
    X(HEADS,  s->T * WIDTH(s)) \
    X(GATE,   s->H * s->E) \
    X(LOGITS, s->T * s->E) \
    X(PROB,   s->T * s->E) \
    X(SHARE,  s->T * s->E) \
    X(ROWS,   s->T * s->K * s->H) \
    X(SORTED, s->T * s->K * s->H) \
    X(SENT,   PADDED(s) * s->H) \
    X(UP,     s->E * s->H * 2 * s->F) \
    X(HIDDEN, s->T * s->K * 2 * s->F) \
    X(ACT,    s->T * s->K * s->F) \
    X(TAKEN,  s->T * s->K) \
    X(Y,      s->T * s->H) \
    X(SUM,    s->T * s->H) \
    X(SCORES, s->T * s->V) \
    X(LOSS,   1)
/*    name         elements     its own type */
#define FIXED(X) \
    X(TOKEN,       s->T,        MOE_I32) \
    X(TARGET,      s->T,        MOE_I32) \
    X(EXPERT,      s->T * s->K, MOE_I32) \
    X(SLOT,        s->T * s->K, MOE_I32) \
    X(COUNTS,      s->E,        MOE_I64) \
    X(KEPT_EXPERT, s->T * s->K, MOE_I32) \
    X(KEPT_SLOT,   s->T * s->K, MOE_I32) \
    X(KEPT,        s->E,        MOE_I64) \
    X(PEER_SLOT,   s->T * s->P, MOE_I32) \
    X(TOKENS_FOR,  s->P,        MOE_I64) \
    X(ONE,         1,           MOE_I64) \
    X(NORM,        1,           MOE_F64)
/*    name  value */
#define DIMS(X) \
    X(T, s->T) X(H, s->H) X(E, s->E) X(K, s->K) X(F, s->F) X(V, s->V) X(P, s->P) \
    X(LOCAL, s->E / s->P) X(LAST, s->E - s->E / s->P) X(2F, 2 * s->F) X(N, s->T * s->K) \
    X(GATES, s->H * s->E) X(TE, s->T * s->E) X(TH, s->T * s->H) \
    X(WIDTH, WIDTH(s)) X(HEADS, 2) X(SEQUENCE, 2) \
    X(CAPACITY, 1) X(GROUP, GROUP) X(PADDED, PADDED(s))
/* clang-format on */

#define X(name, ...) name, D##name,
#define Y(name, ...) name,
enum tensor { NONE, REALS(X) FIXED(Y) TENSOR_COUNT };
#undef X
#undef Y
#define X(name, ...) [name] = D##name,
static const enum tensor gradient_of[TENSOR_COUNT] = {REALS(X)};
#undef X
#define X(name, elements, type) [name] = type,
static const enum moe_type fixed_type[TENSOR_COUNT] = {FIXED(X)}; /* MOE_F32 (0): as the call computes */
#undef X
#define X(name, value) D_##name,
enum dim { DIMS(X) };
#undef X

static inline int64_t elements(enum tensor i, const struct shape *s)
{
#define X(name, count) [name] = count, [D##name] = count,
#define Y(name, count, type) [name] = count,
    const int64_t n[TENSOR_COUNT] = {REALS(X) FIXED(Y)};
#undef X
#undef Y
    return n[i];
}

static inline int64_t dim_value(enum dim i, const struct shape *s)
{
#define X(name, value) value,
    const int64_t n[] = {DIMS(X)};
#undef X
    return n[i];
}

/* back: the forward call is so many rows above (0: this call itself). add: bit w: writes[w] may accumulate.
 * free: bit r: integers of reads[r] may be anything. */
struct call {
    enum moe_kernel kernel;
    enum dim dims[MOE_DIMS];
    enum tensor in[MOE_REFS], out[MOE_REFS];
    int back, mode;
    uint32_t add, free;
    bool trans_a, trans_b;
};

/* clang-format off */
#define LIMIT_DIMS {D_T, D_E, D_K, D_CAPACITY, D_GROUP, D_P}
#define LIMIT_OUT {KEPT_SLOT, KEPT_EXPERT, KEPT}
static const struct call calls[] = {
    {MOE_K_EMBED, {D_T, D_H, D_V}, {TOKEN, EMB}, {X}},
    {MOE_K_EMBED_BWD, {D_T, D_H, D_V}, {TOKEN, DX}, {DEMB}, .back = 1, .add = 1},
    {MOE_K_RMSNORM, {D_T, D_H}, {X, GAIN}, {Y}},
    {MOE_K_RMSNORM_BWD, {D_T, D_H}, {X, GAIN, DY}, {DX, DGAIN}, .back = 1, .add = 3},
    {MOE_K_ATTENTION, {D_T, D_WIDTH, D_HEADS, D_SEQUENCE}, {QKV}, {HEADS}},
    {MOE_K_ATTENTION_BWD, {D_T, D_WIDTH, D_HEADS, D_SEQUENCE}, {QKV, DHEADS}, {DQKV}, .back = 1, .add = 1},
    {MOE_K_ADD, {D_TH}, {X, Y}, {SUM}},
    {MOE_K_ADD_BWD, {D_TH}, {DSUM}, {DX, DY}, .back = 1, .add = 3},
    {MOE_K_GEMM, {D_T, D_E, D_H}, {X, GATE}, {LOGITS}, .add = 1},
    {MOE_K_GEMM, {D_T, D_H, D_E}, {DLOGITS, GATE}, {DX}, .trans_b = true, .back = 1, .add = 1},
    {MOE_K_GEMM, {D_H, D_E, D_T}, {X, DLOGITS}, {DGATE}, .trans_a = true, .back = 2, .add = 1},
    {MOE_K_GEMM, {D_T, D_V, D_H}, {X, EMB}, {SCORES}, .trans_b = true, .add = 1},
    {MOE_K_GEMM, {D_T, D_H, D_V}, {DSCORES, EMB}, {DX}, .back = 1, .add = 1},
    {MOE_K_GEMM, {D_V, D_H, D_T}, {DSCORES, X}, {DEMB}, .trans_a = true, .back = 2, .add = 1},
    {MOE_K_TOPK, {D_T, D_E, D_K}, {LOGITS}, {PROB, EXPERT, SLOT, COUNTS}},
    {MOE_K_TOPK_BWD, {D_T, D_E, D_K}, {PROB, DPROB}, {DLOGITS}, .back = 1, .add = 1},
    {MOE_K_LIMIT, LIMIT_DIMS, {PROB, EXPERT, COUNTS}, {KEPT_SLOT, KEPT_EXPERT, KEPT, KEPT},
     .mode = MOE_LIMIT_PAD, .free = 4},
    {MOE_K_LIMIT, LIMIT_DIMS, {PROB, EXPERT, COUNTS}, LIMIT_OUT, .mode = MOE_LIMIT_BY_POSITION, .free = 4},
    {MOE_K_LIMIT, LIMIT_DIMS, {PROB, EXPERT, COUNTS}, LIMIT_OUT, .mode = MOE_LIMIT_BY_CHOICE, .free = 4},
    {MOE_K_LIMIT, LIMIT_DIMS, {PROB, EXPERT, COUNTS}, LIMIT_OUT, .mode = MOE_LIMIT_RANDOM, .free = 4},
    {MOE_K_LARGEST, {D_E}, {COUNTS}, {ONE}, .free = 1},
    {MOE_K_SET, {D_T}, {NONE}, {ONE}},
    {MOE_K_NORMALIZE, {D_T, D_E, D_K}, {PROB, KEPT_EXPERT}, {SHARE}},
    {MOE_K_NORMALIZE_BWD, {D_T, D_E, D_K}, {PROB, KEPT_EXPERT, DSHARE}, {DPROB}, .back = 1, .add = 1},
    {MOE_K_AUX_LOSS, {D_T, D_E}, {PROB, COUNTS}, {LOSS}, .free = 2},
    {MOE_K_AUX_LOSS_BWD, {D_T, D_E}, {COUNTS}, {DPROB}, .back = 1, .add = 1, .free = 1},
    {MOE_K_SELECT, {D_T, D_LOCAL, D_K, D_LAST}, {EXPERT}, {SLOT}, .free = 1},
    {MOE_K_SELECT, {D_T, D_LOCAL, D_K, D_LAST}, {EXPERT}, {SLOT, KEPT_EXPERT}, .free = 1},
    {MOE_K_SPREAD, {D_T, D_E, D_K, D_P}, {EXPERT}, {PEER_SLOT, TOKENS_FOR}},
    {MOE_K_PERMUTE, {D_T, D_H, D_K, D_PADDED}, {X, KEPT_SLOT}, {SENT}},
    {MOE_K_PERMUTE_BWD, {D_T, D_H, D_K, D_PADDED}, {DSENT, KEPT_SLOT}, {DX}, .back = 1, .add = 1},
    {MOE_K_PERMUTE_BWD, {D_T, D_H, D_K, D_PADDED}, {SENT, KEPT_SLOT}, {Y}, .add = 1},
    {MOE_K_PERMUTE, {D_T, D_H, D_K, D_PADDED}, {DY, KEPT_SLOT}, {DSENT}, .back = 1},
    {MOE_K_SORT_ROWS, {D_P, D_LOCAL, D_H}, {ROWS, COUNTS}, {SORTED}, .add = 1},
    {MOE_K_UNSORT_ROWS, {D_P, D_LOCAL, D_H}, {DSORTED, COUNTS}, {DROWS}, .back = 1, .add = 1},
    {MOE_K_UNSORT_ROWS, {D_P, D_LOCAL, D_H}, {SORTED, COUNTS}, {ROWS}, .add = 1},
    {MOE_K_SORT_ROWS, {D_P, D_LOCAL, D_H}, {DROWS, COUNTS}, {DSORTED}, .back = 1, .add = 1},
    {MOE_K_GROUPED_GEMM, {D_E, D_2F, D_H}, {SORTED, UP}, {HIDDEN}, .add = 1},
    {MOE_K_GROUPED_GEMM, {D_E, D_H, D_2F}, {DHIDDEN, UP}, {DSORTED}, .trans_b = true, .back = 1, .add = 1},
    {MOE_K_GROUPED_WGRAD, {D_E, D_2F, D_H}, {SORTED, DHIDDEN}, {DUP}, .back = 2, .add = 1},
    {MOE_K_SWIGLU, {D_N, D_F}, {HIDDEN}, {ACT}},
    {MOE_K_SWIGLU_BWD, {D_N, D_F}, {HIDDEN, DACT}, {DHIDDEN}, .back = 1, .add = 1},
    {MOE_K_TAKE, {D_T, D_E, D_K}, {PROB, KEPT_EXPERT}, {TAKEN}},
    {MOE_K_TAKE_BWD, {D_T, D_E, D_K}, {KEPT_EXPERT, DTAKEN}, {DPROB}, .back = 1, .add = 1},
    {MOE_K_WEIGH, {D_N, D_H}, {ROWS, TAKEN}, {SORTED}},
    {MOE_K_WEIGH_BWD, {D_N, D_H}, {ROWS, TAKEN, DSORTED}, {DROWS, DTAKEN}, .back = 1},
    {MOE_K_WEIGH_BWD, {D_N, D_H}, {ROWS, TAKEN, DSORTED}, {DROWS, DTAKEN}, .back = 2,
     .mode = MOE_DOT_BY_ROWS},
    {MOE_K_COMBINE, {D_T, D_H, D_K, D_E, D_PADDED}, {SENT, PROB, KEPT_EXPERT, KEPT_SLOT}, {Y}},
    {MOE_K_COMBINE_BWD, {D_T, D_H, D_K, D_E, D_PADDED}, {SENT, PROB, KEPT_EXPERT, KEPT_SLOT, DY},
     {DSENT, DPROB}, .back = 1},
    {MOE_K_COMBINE_BWD, {D_T, D_H, D_K, D_E, D_PADDED}, {SENT, PROB, KEPT_EXPERT, KEPT_SLOT, DY},
     {DSENT, DPROB}, .back = 2, .mode = MOE_DOT_BY_ROWS},
    {MOE_K_XENT, {D_T, D_V}, {SCORES, TARGET}, {DSCORES, LOSS}},
    {MOE_K_ZERO, {D_GATES}, {NONE}, {DGATE}}, {MOE_K_COPY, {D_GATES}, {DGATE}, {GATE}},
    {MOE_K_SCALE, {D_GATES}, {DGATE}, {DGATE}},
    {MOE_K_SGD, {D_GATES}, {GATE, DGATE}, {GATE}},
    {MOE_K_SQNORM, {D_GATES}, {DGATE}, {NORM}, .add = 1},
    {MOE_K_CLIP, {D_GATES}, {DGATE, NORM, NORM}, {DGATE}},
    /* the second moment must not be negative: a probability will do */
    {MOE_K_ADAMW, {D_TE}, {LOGITS, DPROB, LOGITS, PROB}, {LOGITS, LOGITS, PROB}},
};
/* clang-format on */

static inline enum moe_type type_of(enum tensor i, enum moe_type type)
{
    return fixed_type[i] ? fixed_type[i] : type;
}

static inline bool is_integer(enum tensor i)
{
    return fixed_type[i] == MOE_I32 || fixed_type[i] == MOE_I64;
}

static inline size_t tensor_bytes(enum tensor i, const struct shape *s, enum moe_type type)
{
    return (size_t)elements(i, s) * (size_t)moe_type_bytes[type_of(i, type)];
}

static inline double get(const void *reals, enum moe_type type, int64_t i)
{
    return type == MOE_F64 ? ((const double *)reals)[i] : ((const float *)reals)[i];
}

static inline void set(void *reals, enum moe_type type, int64_t i, double value)
{
    if (type == MOE_F64)
        ((double *)reals)[i] = value;
    else
        ((float *)reals)[i] = (float)value;
}

/* Random tensors in [-1, 1) that float holds (prob apart), a routing of TOPK and LIMIT,
 * DLOSS = 1, NORM = 2. */
static inline void make_world(const struct shape *s, enum moe_type type, void *data[TENSOR_COUNT])
{
    for (enum tensor i = 0; i < TENSOR_COUNT; i++) {
        data[i] = moe_alloc(1, tensor_bytes(i, s, type));
        for (int64_t j = 0; !fixed_type[i] && j < elements(i, s); j++)
            set(data[i], type, j, (float)(2 * moe_uniform(1, i, (uint64_t)j) - 1));
    }
    set(data[DLOSS], type, 0, 1);
    set(data[NORM], MOE_F64, 0, 2);
    for (int64_t t = 0; t < s->T; t++) {
        ((int32_t *)data[TOKEN])[t] = (int32_t)(moe_uniform(2, TOKEN, (uint64_t)t) * (double)s->V);
        ((int32_t *)data[TARGET])[t] = (int32_t)(moe_uniform(2, TARGET, (uint64_t)t) * (double)s->V);
        int64_t last = (t + 1) * s->E - 1;
        set(data[LOGITS], type, last, get(data[LOGITS], type, last) + s->bias);
    }
    int64_t *arrive = moe_alloc((size_t)s->E, sizeof *arrive);
    if (type == MOE_F64) {
        moe_ref_topk_f64(s->T, s->E, s->K, data[LOGITS], data[PROB], data[EXPERT], data[SLOT], data[COUNTS]);
        moe_ref_limit_f64(s->T, s->E, s->K, 1, GROUP, MOE_REF_BY_PROB, true, 0, data[PROB], data[EXPERT],
                          data[KEPT_SLOT], data[KEPT_EXPERT], data[KEPT], arrive);
    } else {
        moe_ref_topk_f32(s->T, s->E, s->K, data[LOGITS], data[PROB], data[EXPERT], data[SLOT], data[COUNTS]);
        moe_ref_limit_f32(s->T, s->E, s->K, 1, GROUP, MOE_REF_BY_PROB, true, 0, data[PROB], data[EXPERT],
                          data[KEPT_SLOT], data[KEPT_EXPERT], data[KEPT], arrive);
    }
    free(arrive);
}

/* The world with every real as bf16, and as float with the same value. */
static inline void round_world(const struct shape *s, void *const data[], void *half[], void *wide[])
{
    for (enum tensor i = 0; i < TENSOR_COUNT; i++) {
        half[i] = moe_alloc(1, tensor_bytes(i, s, MOE_BF16));
        wide[i] = moe_alloc(1, tensor_bytes(i, s, MOE_F32));
        if (fixed_type[i]) {
            memcpy(half[i], data[i], tensor_bytes(i, s, MOE_BF16));
            memcpy(wide[i], data[i], tensor_bytes(i, s, MOE_F32));
        }
        for (int64_t j = 0; !fixed_type[i] && j < elements(i, s); j++) {
            moe_bf16 x = ((moe_bf16 *)half[i])[j] = moe_bf16_from_float(((float *)data[i])[j]);
            ((float *)wide[i])[j] = moe_bf16_to_float(x);
        }
    }
}

static inline void free_all(int n, void *p[])
{
    for (int i = 0; i < n; i++) free(p[i]);
}

static inline void make_outputs(const struct call *c, const struct shape *s, enum moe_type type, int fill,
                                void *out[MOE_REFS])
{
    for (int i = 0; i < MOE_REFS; i++) {
        size_t bytes = tensor_bytes(c->out[i], s, type);
        out[i] = moe_alloc(1, bytes);
        memset(out[i], fill, bytes);
    }
}

/* One call. accumulating: the write that adds, or -1. Tensors without elements are NULL. host: `data` as the
 * host sees it, for the rows of groups. */
static inline void make_launch(const struct call *c, const struct shape *s, enum moe_type type,
                               void *const data[], void *const host[], void *const out[], int accumulating,
                               struct moe_op *op, struct moe_launch *launch)
{
    *op = (struct moe_op){.kind = MOE_KERNEL, .kernel = c->kernel, .type = type, .trans_a = c->trans_a};
    op->trans_b = c->trans_b;
    op->mode = c->mode;
    op->factor = 0.125;
    op->decay = 0.5;
    *launch = (struct moe_launch){.op = op, .rows = host[COUNTS], .divisor = 3, .step = 2};
    for (int i = 0; i < MOE_DIMS; i++) launch->dims[i] = dim_value(c->dims[i], s);
    for (; c->in[op->n_reads]; op->n_reads++)
        launch->in[op->n_reads] = elements(c->in[op->n_reads], s) ? data[c->in[op->n_reads]] : NULL;
    for (; c->out[op->n_writes]; op->n_writes++)
        launch->out[op->n_writes] = elements(c->out[op->n_writes], s) ? out[op->n_writes] : NULL;
    if (accumulating >= 0) op->writes[accumulating].accumulate = true;
}

#endif
