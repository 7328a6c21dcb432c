/* lower.c - see lower.h. */
#include "sim/lower/lower.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct moe_dispatcher dispatchers[] = {
    {"alltoall", moe_alltoall, .pads = true},
    {"allgather", moe_allgather, .only = MOE_PROBS_AT_EXPERT},
    {"deepep", moe_deepep, .dropless = true, .once = true, .only = MOE_PROBS_AT_EXPERT},
    {"deepep_low_latency", moe_deepep_low_latency, .dropless = true, .bounded = true,
     .only = MOE_PROBS_AT_HOME},
    {"nvlink_one_sided", moe_nvlink_one_sided, .dropless = true, .once = true, .bounded = true,
     .only = MOE_PROBS_AT_EXPERT},
    {"gshard", moe_alltoall, .pads = true, .always_pads = true, .only = MOE_PROBS_AT_HOME},
};
#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))

struct model {
    const struct moe_scenario *sc;
    const struct moe_dispatcher *dispatcher;
    const struct moe_capacity_rule *rule;
    struct moe_layer layer;
    struct moe_ref stream, attended; /* [T, H] residual stream before a layer, and after its attention */
    struct moe_ref normed;           /* [T, H] behind the last norm */
    struct moe_ref emb, router, gain, moe_gain, last_gain, wqkv, wo; /* parameters */
    struct moe_ref token, target, loss, aux, logits, prediction;
    struct moe_lower_aux balance;
    int V, one, dp_tokens; /* dp_tokens: of a micro-batch, on all ranks of a stage */
};

static struct moe_ref param(struct moe_builder *b, const struct model *m, const char *name, int extent,
                            enum moe_where where, struct moe_param like)
{
    int buffer = moe_new_param(b, name, m->layer.type, like.per_layer ? m->layer.n_layers : 1, extent, like);
    b->s->buffers[buffer].where = b->s->buffers[b->s->buffers[buffer].grad].where = where;
    return moe_ref(buffer);
}

/* Initial values keep rows at a norm of about sqrt(H) behind each norm; the outputs of a
 * layer start small. */
static void make_params(struct moe_builder *b, struct model *m, const struct moe_groups *groups)
{
    struct moe_layer *y = &m->layer;
    const struct moe_scenario *sc = m->sc;
    double by_hidden = 1 / sqrt((double)sc->hidden), depth = 1 / sqrt(2.0 * (double)sc->layers);
    int HH = moe_mul(b, y->H, y->H), e = moe_const(b, sc->experts / sc->expert_parallel);
    int dp = moe_group_size(&b->s->comms[groups->dp], 0), mean = moe_mul(b, groups->tokens, moe_const(b, dp));
    struct moe_param shared = {.replicas = groups->dp,
                               .shard = -1,
                               .divisor = sc->loss == MOE_PER_TOKEN ? groups->world_tokens : mean,
                               .clips = sc->clip_norm > 0};
    struct moe_param gain = shared, layer = shared, expert = shared;
    shared.init_std = layer.init_std = expert.init_std = by_hidden;
    gain.init_mean = 1;
    layer.per_layer = expert.per_layer = true;
    expert.replicas = groups->edp;
    expert.shard = groups->ep;
    shared.replicas = groups->copies;
    m->emb = param(b, m, "embedding", moe_mul(b, m->V, y->H), MOE_WHERE_ENDS, shared);
    m->last_gain = param(b, m, "last_gain", y->H, MOE_WHERE_LAST, gain);
    gain.per_layer = true;
    if (sc->heads) {
        m->gain = param(b, m, "attention_gain", y->H, MOE_WHERE_ALL, gain);
        m->wqkv = param(b, m, "wqkv", moe_mul(b, moe_const(b, 3), HH), MOE_WHERE_ALL, layer);
        layer.init_std = by_hidden * depth;
        m->wo = param(b, m, "wo", HH, MOE_WHERE_ALL, layer);
        layer.init_std = by_hidden;
    }
    m->moe_gain = param(b, m, "moe_gain", y->H, MOE_WHERE_ALL, gain);
    m->router = param(b, m, "router", moe_mul(b, y->H, y->E), MOE_WHERE_ALL, layer);
    int HF = moe_mul(b, y->H, y->F);
    y->w1 = param(b, m, "w1", moe_mul(b, e, moe_mul(b, moe_const(b, 2), HF)), MOE_WHERE_ALL, expert);
    expert.init_std = depth / sqrt((double)sc->ffn);
    y->w2 = param(b, m, "w2", moe_mul(b, e, HF), MOE_WHERE_ALL, expert);
}

static struct moe_ref buffer(struct moe_builder *b, const char *name, enum moe_buffer_role role,
                             enum moe_type type, int slots, int extent)
{
    return moe_ref(moe_new_buffer(b, name, role, type, slots, extent));
}

struct moe_ref moe_rows(struct moe_builder *b, const struct moe_layer *m, const char *name, int n, int width)
{
    return buffer(b, name, MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n, width));
}

void moe_lower_move_by(enum moe_transport by, struct moe_builder *b, const struct moe_layer *m,
                       const char *name, struct moe_ref from, int send, struct moe_ref to, int recv)
{
    const struct moe_buffer *source = &b->s->buffers[from.buffer];
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLTOALL,
                        .transport = by,
                        .comm = m->ep_comm,
                        .type = source->type,
                        .stream = MOE_STREAM_COMM,
                        .send = send,
                        .recv = recv,
                        .needs_grad = source->role == MOE_BUF_ACTIVATION,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

void moe_lower_probs_moved(struct moe_builder *b, const struct moe_layer *m, int n)
{
    struct moe_block *block = &b->s->roles[b->role].blocks[b->block];
    for (int i = block->n_ops - n; i < block->n_ops && m->probs_detached; i++) block->ops[i].needs_grad = 0;
}

static void make_buffers(struct moe_builder *b, struct model *m)
{
    struct moe_layer *y = &m->layer;
    int TH = moe_mul(b, y->T, y->H), TK = moe_mul(b, y->T, y->K);
    m->token = buffer(b, "token", MOE_BUF_INPUT, MOE_I32, 1, y->T);
    m->target = buffer(b, "target", MOE_BUF_INPUT, MOE_I32, 1, y->T);
    m->loss = buffer(b, "loss", MOE_BUF_OUTPUT, y->type, 1, m->one);
    b->s->buffers[m->token.buffer].where = MOE_WHERE_FIRST;
    b->s->buffers[m->target.buffer].where = b->s->buffers[m->loss.buffer].where = MOE_WHERE_LAST;
    m->stream = buffer(b, "stream", MOE_BUF_ACTIVATION, y->type, y->n_layers + 1, TH);
    m->normed = buffer(b, "normed", MOE_BUF_ACTIVATION, y->type, 1, TH);
    m->prediction = buffer(b, "prediction", MOE_BUF_ACTIVATION, y->type, 1, moe_mul(b, y->T, m->V));
    m->attended = m->sc->heads ? moe_rows(b, y, "attended", y->T, y->H) : m->stream;
    y->x = moe_rows(b, y, "moe_in", y->T, y->H);
    y->y = moe_rows(b, y, "moe_out", y->T, y->H);
    m->logits = moe_rows(b, y, "logits", y->T, y->E);
    y->prob = moe_rows(b, y, "prob", y->T, y->E);
    y->expert = buffer(b, "expert", MOE_BUF_INDEX, MOE_I32, y->n_layers, TK);
    y->slot = buffer(b, "row_of_choice", MOE_BUF_INDEX, MOE_I32, y->n_layers, TK);
    y->counts = buffer(b, "counts", MOE_BUF_COUNTS, MOE_I64, y->n_layers, y->E);
    y->n_rows = TK;
}

/* ---- one layer ---- */

/* `n` operations for each of `count`. */
static int times(struct moe_builder *b, int count, int n)
{
    return moe_mul(b, count, moe_const(b, n));
}

struct moe_ref moe_lower_experts(struct moe_builder *b, const struct moe_layer *m, struct moe_ref rows, int n,
                                 int group)
{
    int e = moe_const(b, m->n_experts / m->ep_size), two_f = moe_mul(b, moe_const(b, 2), m->F);
    struct moe_ref h = moe_rows(b, m, "h", n, two_f), a = moe_rows(b, m, "a", n, m->F);
    struct moe_ref out = moe_rows(b, m, "expert_out", n, m->H);
    struct moe_op first = {.name = "expert_in",
                           .kernel = MOE_K_GROUPED_GEMM,
                           .type = m->type,
                           .needs_grad = 3,
                           .group = group,
                           MOE_READS(rows, m->w1),
                           MOE_WRITES(h),
                           MOE_SIZES(e, two_f, m->H)};
    struct moe_op second = {.name = "expert_out",
                            .kernel = MOE_K_GROUPED_GEMM,
                            .type = m->type,
                            .needs_grad = 3,
                            .group = group,
                            MOE_READS(a, m->w2),
                            MOE_WRITES(out),
                            MOE_SIZES(e, m->H, m->F)};
    moe_lower_row_limits(b, m, n, group, &first, &second);
    moe_emit(b, first);
    moe_emit(b, (struct moe_op){.name = "swiglu",
                                .kernel = MOE_K_SWIGLU,
                                .type = m->type,
                                .needs_grad = 1,
                                .flops = times(b, moe_mul(b, n, m->F), MOE_SIGMOID_FLOPS),
                                MOE_READS(h),
                                MOE_WRITES(a),
                                MOE_SIZES(n, m->F)});
    moe_emit(b, second);
    return out;
}

struct moe_ref moe_lower_received(struct moe_builder *b, const struct moe_layer *m,
                                  const struct moe_received *in)
{
    int e = moe_const(b, m->n_experts / m->ep_size), n = moe_sum(b, in->of_expert),
        choices = moe_mul(b, in->n, m->K);
    struct moe_ref slot =
        moe_ref(moe_new_buffer(b, "local_row_of_choice", MOE_BUF_INDEX, MOE_I32, m->n_layers, choices));
    struct moe_ref rows = moe_rows(b, m, "rows", n, m->H), partial = moe_rows(b, m, "partial", in->n, m->H);
    struct moe_ref expert = in->expert;
    struct moe_op select = {.name = "select",
                            .kernel = MOE_K_SELECT,
                            .type = MOE_I32,
                            MOE_READS(in->expert),
                            MOE_WRITES(slot),
                            MOE_SIZES(in->n, e, m->K, moe_mul(b, moe_place(b, m->ep_comm), e))};
    if (in->own_probs) {
        expert = moe_ref(moe_new_buffer(b, "local_expert", MOE_BUF_INDEX, MOE_I32, m->n_layers, choices));
        select.writes[select.n_writes++] = expert;
    }
    moe_emit(b, select);
    moe_emit(b, (struct moe_op){.name = "permute",
                                .kernel = MOE_K_PERMUTE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(in->x, slot),
                                MOE_WRITES(rows),
                                MOE_SIZES(in->n, m->H, m->K, n)});
    struct moe_ref done = moe_lower_experts(b, m, rows, n, in->of_expert);
    moe_emit(b, (struct moe_op){.name = "unpermute",
                                .kernel = MOE_K_COMBINE,
                                .type = m->type,
                                .mode = m->row_dot,
                                .needs_grad = 3,
                                MOE_READS(done, in->prob, expert, slot),
                                MOE_WRITES(partial),
                                MOE_SIZES(in->n, m->H, m->K, in->own_probs ? e : m->E, n)});
    return partial;
}

static void emit_norm(struct moe_builder *b, const struct model *m, const char *name, struct moe_ref x,
                      struct moe_ref gain, struct moe_ref y)
{
    struct moe_op op = {.kernel = MOE_K_RMSNORM,
                        .type = m->layer.type,
                        .needs_grad = 3,
                        .flops = times(b, moe_mul(b, m->layer.T, m->layer.H), 4),
                        MOE_READS(x, gain),
                        MOE_WRITES(y),
                        MOE_SIZES(m->layer.T, m->layer.H)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

static void emit_gemm(struct moe_builder *b, const struct model *m, const char *name, struct moe_ref x,
                      struct moe_ref w, struct moe_ref y, int width)
{
    struct moe_op op = {.kernel = MOE_K_GEMM,
                        .type = m->layer.type,
                        .needs_grad = 3,
                        MOE_READS(x, w),
                        MOE_WRITES(y),
                        MOE_SIZES(m->layer.T, width, m->layer.H)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

static void emit_add(struct moe_builder *b, const struct model *m, const char *name, struct moe_ref x,
                     struct moe_ref y, struct moe_ref sum)
{
    struct moe_op op = {.kernel = MOE_K_ADD,
                        .type = m->layer.type,
                        .needs_grad = 3,
                        MOE_READS(x, y),
                        MOE_WRITES(sum),
                        MOE_SIZES(moe_mul(b, m->layer.T, m->layer.H))};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

static void lower_attention(struct moe_builder *b, const struct model *m)
{
    const struct moe_layer *y = &m->layer;
    int three_h = moe_mul(b, moe_const(b, 3), y->H), S = moe_const(b, m->sc->sequence);
    int A = moe_const(b, m->sc->heads), TS = moe_mul(b, y->T, moe_min(b, y->T, S));
    struct moe_ref normed = moe_rows(b, y, "attention_in", y->T, y->H),
                   qkv = moe_rows(b, y, "qkv", y->T, three_h);
    struct moe_ref heads = moe_rows(b, y, "heads", y->T, y->H),
                   out = moe_rows(b, y, "attention_out", y->T, y->H);
    emit_norm(b, m, "attention_norm", m->stream, m->gain, normed);
    emit_gemm(b, m, "qkv", normed, m->wqkv, qkv, three_h);
    moe_emit(b,
             (struct moe_op){
                 .name = "attention",
                 .kernel = MOE_K_ATTENTION,
                 .type = y->type,
                 .needs_grad = 1,
                 /* half the pairs, those up to itself: two products of H terms, and a weight for each head */
                 .flops = moe_mul(b, TS, moe_add(b, times(b, y->H, 2), times(b, A, MOE_SOFTMAX_FLOPS / 2))),
                 MOE_READS(qkv),
                 MOE_WRITES(heads),
                 MOE_SIZES(y->T, y->H, A, S)});
    emit_gemm(b, m, "attention_out", heads, m->wo, out, y->H);
    emit_add(b, m, "attention_residual", m->stream, out, m->attended);
}

static void lower_layer(struct moe_builder *b, struct model *m)
{
    struct moe_layer *y = &m->layer;
    struct moe_capacity capacity = m->sc->capacity;
    capacity.pad = (capacity.pad && m->dispatcher->pads) || m->dispatcher->always_pads;
    if (m->sc->heads) lower_attention(b, m);
    emit_norm(b, m, "moe_norm", m->attended, m->moe_gain, y->x);
    emit_gemm(b, m, "router", y->x, m->router, m->logits, y->E);
    moe_emit(b, (struct moe_op){.name = "topk",
                                .kernel = MOE_K_TOPK,
                                .type = y->type,
                                .needs_grad = 1,
                                MOE_READS(m->logits),
                                .flops = times(b, moe_mul(b, y->T, y->E), MOE_SOFTMAX_FLOPS),
                                MOE_WRITES(y->prob, y->expert, y->slot, y->counts),
                                MOE_SIZES(y->T, y->E, y->K)});
    double aux = m->sc->aux_loss.coefficient;
    if (aux > 0) moe_lower_aux_loss(b, y, &m->balance, aux, m->aux);
    struct moe_layer left = *y; /* what the rule lets leave; the next stage starts anew */
    m->rule->limit(b, &left, &capacity);
    moe_assert(left.padded_rows || !m->dispatcher->always_pads);
    m->dispatcher->forward(b, &left);
    emit_add(b, m, "moe_residual", m->attended, y->y, moe_next(m->stream));
}

/* ---- the step ---- */

static void lower_head(struct moe_builder *b, const struct model *m)
{
    const struct moe_layer *y = &m->layer;
    emit_norm(b, m, "last_norm", m->stream, m->last_gain, m->normed);
    moe_emit(b, (struct moe_op){.name = "predict",
                                .kernel = MOE_K_GEMM,
                                .type = y->type,
                                .needs_grad = 3,
                                .trans_b = true,
                                MOE_READS(m->normed, m->emb),
                                MOE_WRITES(m->prediction),
                                MOE_SIZES(y->T, m->V, y->H)});
    moe_emit(b, (struct moe_op){.name = "loss",
                                .kernel = MOE_K_XENT,
                                .type = y->type,
                                .flops = times(b, moe_mul(b, y->T, m->V), MOE_SOFTMAX_FLOPS),
                                MOE_READS(m->prediction, m->target),
                                MOE_WRITES(moe_grad_out(b, m->prediction), m->loss),
                                MOE_SIZES(y->T, m->V)});
}

/* The gradients of layers, latest first, and then all others begin at zero: micro-batches add to them. */
static void lower_clear(struct moe_builder *b)
{
    const struct moe_role *role = &b->s->roles[b->role];
    for (int of_layers = 1; of_layers >= 0; of_layers--) {
        int block = moe_new_block(b, of_layers ? "layer" : "embedding", MOE_FORWARD, of_layers);
        for (int i = 0; i < b->s->n_params; i++) {
            const struct moe_param p = b->s->params[i];
            const struct moe_buffer grad = b->s->buffers[p.grad];
            if (p.buffer < 0 || p.per_layer != of_layers || !moe_lower_is_held(b, &p)) continue;
            struct moe_op op = {
                .kernel = MOE_K_ZERO, .type = grad.type, MOE_WRITES(moe_ref(p.grad)), MOE_SIZES(grad.extent)};
            snprintf(op.name, sizeof op.name, "clear_%.32s", p.name);
            moe_emit(b, op);
        }
        if (!of_layers) moe_run_block(b, block, 0);
        for (int layer = role->end_layer - 1; layer >= role->first_layer && of_layers; layer--)
            moe_run_block(b, block, layer);
    }
}

/* Blocks of a stage. What may be written by the other stream comes before what reads it, so that waits
 * follow. */
static void lower_stage(struct moe_builder *b, struct model *m, struct moe_lower_pipe *pipe,
                        struct moe_lower_sync *sync)
{
    const struct moe_layer *y = &m->layer;
    pipe->embed = pipe->head = pipe->d_head = pipe->d_embed = -1;
    if (b->s->n_micro > 1) lower_clear(b);
    moe_lower_pipe_before(b, pipe);
    if (pipe->stage == 0) {
        pipe->embed = moe_new_block(b, "embedding", MOE_FORWARD, false);
        moe_emit(b, (struct moe_op){.name = "embed",
                                    .kernel = MOE_K_EMBED,
                                    .type = y->type,
                                    .needs_grad = 2,
                                    MOE_READS(m->token, m->emb),
                                    MOE_WRITES(m->stream),
                                    MOE_SIZES(y->T, y->H, m->V)});
    }
    pipe->layer = moe_new_block(b, "layer", MOE_FORWARD, true);
    lower_layer(b, m);
    if (pipe->stage == pipe->n_stages - 1) {
        pipe->head = moe_new_block(b, "head", MOE_FORWARD, false);
        lower_head(b, m);
    }
    moe_lower_pipe_between(b, pipe);
    if (pipe->stage == pipe->n_stages - 1) {
        pipe->d_head = moe_new_block(b, "head", MOE_BACKWARD, false);
        moe_emit_backward(b, pipe->head);
    }
    pipe->d_layer = moe_new_block(b, "layer", MOE_BACKWARD, true);
    moe_emit_backward(b, pipe->layer);
    if (m->sc->empty_rank) {
        int rows = moe_lower_empty(b, pipe->layer, pipe->d_layer, m->sc->empty_rank);
        sync->rows = m->sc->empty_rank == MOE_EMPTY_SKIPS_WEIGHTS ? rows : MOE_UNSET;
    }
    pipe->early = m->sc->overlap_grad_reduce ? moe_lower_sync_early(b, sync) : -1;
    for (int layer = y->n_layers - 1; layer >= 0; layer--)
        pipe->full[layer] = m->sc->overlap_grad_reduce ? moe_lower_sync_bucket(b, sync, layer) : -1;
    if (pipe->stage == 0) {
        pipe->d_embed = moe_new_block(b, "embedding", MOE_BACKWARD, false);
        moe_emit_backward(b, pipe->embed);
    }
    moe_lower_pipe_after(b, pipe);
    moe_lower_pipe_run(b, pipe, m->sc->pipeline);
    moe_lower_sync(b, sync);
}

/* Stages differ where the ends do, and in their layers: each is a role. */
static void lower_stages(struct moe_builder *b, struct model *m, struct moe_lower_pipe *pipe,
                         struct moe_lower_sync *sync)
{
    int n = pipe->n_stages, each = (int)m->sc->layers / n;
    for (pipe->stage = 0; pipe->stage < n; pipe->stage++) {
        if (pipe->stage) moe_new_role(b);
        b->s->roles[b->role].first_layer = pipe->stage * each;
        b->s->roles[b->role].end_layer = (pipe->stage + 1) * each;
        lower_stage(b, m, pipe, sync);
    }
    for (int r = 0; r < b->s->n_ranks; r++) b->s->role_of[r] = r / (b->s->n_ranks / n);
}

/* Ranks that run as many micro-batches share a role. */
static void lower_batches(struct moe_builder *b, struct model *m, struct moe_lower_pipe *pipe,
                          struct moe_lower_sync *sync)
{
    int role = -1;
    for (pipe->n_micro = 1; pipe->n_micro <= m->sc->micro_batches; pipe->n_micro++) {
        bool any = false;
        for (int r = 0; r < b->s->n_ranks; r++) any |= m->sc->batches[r] == pipe->n_micro;
        if (!any) continue;
        if (++role) moe_new_role(b);
        b->s->roles[b->role].end_layer = (int)m->sc->layers;
        b->s->roles[b->role].n_micro = pipe->n_micro;
        lower_stage(b, m, pipe, sync);
        for (int r = 0; r < b->s->n_ranks; r++)
            if (m->sc->batches[r] == pipe->n_micro) b->s->role_of[r] = role;
    }
}

static void lower_roles(struct moe_builder *b, struct model *m, struct moe_lower_sync *sync)
{
    struct moe_lower_pipe pipe;
    moe_lower_pipe_open(b, m->stream, moe_mul(b, m->layer.T, m->layer.H), (int)m->sc->pipeline_parallel,
                        &pipe);
    pipe.n_micro = b->s->n_micro;
    pipe.full = moe_alloc((size_t)m->layer.n_layers, sizeof *pipe.full);
    (m->sc->batches ? lower_batches : lower_stages)(b, m, &pipe, sync);
    free(pipe.full);
}

/* Tokens; every stage sees those of the first. */
static void make_sizes(struct moe_builder *b, struct model *m, struct moe_groups *groups)
{
    struct moe_symbol local = {.scope = MOE_SCOPE_RANK, .comm = -1}, global = local;
    int micro = moe_const(b, m->sc->micro_batches);
    global.scope = MOE_SCOPE_GLOBAL;
    m->layer.T = moe_sym(b, moe_new_symbol(b, "tokens", -1, false, local));
    m->dp_tokens = moe_sym(b, moe_new_symbol(b, "tokens_of_world", -1, false, global));
    if (m->sc->pipeline_parallel > 1)
        m->dp_tokens = moe_ceil(b, m->dp_tokens, moe_const(b, m->sc->pipeline_parallel), 1);
    groups->tokens = b->s->n_micro > 1 ? moe_mul(b, m->layer.T, micro) : m->layer.T;
    groups->world_tokens = b->s->n_micro > 1 ? moe_mul(b, m->dp_tokens, micro) : m->dp_tokens;
    m->layer.stage_comm = groups->dp;
    if (m->sc->batches) groups->world_tokens = moe_const(b, moe_scenario_tokens(m->sc));
}

static int lower(const struct moe_scenario *sc, const struct moe_dispatcher *dispatcher,
                 const struct moe_capacity_rule *rule, struct moe_schedule **out)
{
    struct moe_builder b;
    struct model m = {.sc = sc, .dispatcher = dispatcher, .rule = rule};
    struct moe_layer *y = &m.layer;
    struct moe_groups groups = {0};
    struct moe_lower_sync sync;
    moe_builder_open(&b, (int)sc->ranks, sc->tokens);
    b.s->n_layers = y->n_layers = (int)sc->layers;
    b.s->n_experts = y->n_experts = (int)sc->experts;
    b.s->top_k = (int)sc->top_k;
    b.s->n_micro = (int)sc->micro_batches;
    y->ep_size = (int)sc->expert_parallel;
    y->type = (enum moe_type)sc->dtype;
    y->limits = &sc->limits;
    y->probs_detached = sc->probs_detached;
    b.s->creation = (enum moe_creation)sc->creation;
    y->probs_at_expert = sc->apply_probs == MOE_PROBS_AT_EXPERT;
    y->row_dot = sc->row_dot;
    moe_lower_comms(&b, sc, &groups);
    y->ep_comm = sc->expert_group_unset ? 0 : groups.ep;
    make_sizes(&b, &m, &groups);
    y->H = moe_const(&b, sc->hidden);
    y->F = moe_const(&b, sc->ffn);
    y->K = moe_const(&b, sc->top_k);
    y->E = moe_const(&b, sc->experts);
    m.V = moe_const(&b, MOE_VOCAB);
    if (dispatcher->bounded && moe_limits_most(y->limits))
        y->most_tokens = moe_const(&b, moe_limits_most(y->limits));
    m.one = moe_const(&b, 1);
    make_params(&b, &m, &groups);
    make_buffers(&b, &m);
    moe_lower_claims(&b, y, &sc->padding);
    if (y->most_tokens) moe_lower_users(&b, y);
    if (sc->expert_group_unset) moe_lower_unset_group(&b, y);
    if (sc->aux_loss.coefficient > 0) {
        m.aux = buffer(&b, "aux_loss", MOE_BUF_OUTPUT, y->type, y->n_layers, m.one);
        moe_lower_aux_open(&b, sc, &groups, y->T, m.dp_tokens, &m.balance);
    }
    int err = moe_lower_checkpoint(&b, sc);
    if (err >= 0) err = moe_lower_sync_open(&b, sc, &groups, &sync);
    if (err >= 0) {
        lower_roles(&b, &m, &sync);
        moe_sync_free(&sync.order);
    }
    *out = moe_builder_close(&b);
    if (err < 0) {
        moe_schedule_free(*out);
        *out = NULL;
    }
    return err;
}

/* The row of this name. */
static int find(const char *name)
{
    const char *names[COUNT(dispatchers)];
    char hint[MOE_HINT];
    for (int i = 0; i < COUNT(dispatchers); i++) {
        names[i] = dispatchers[i].name;
        if (!strcmp(names[i], name)) return i;
    }
    return moe_fail(MOE_EINPUT, "unknown dispatcher '%s'%s", name,
                    moe_hint(name, names, COUNT(dispatchers), hint));
}

int moe_dispatcher_check(const char *name)
{
    int i = find(name);
    return i < 0 ? i : MOE_OK;
}

int moe_dispatcher_bounds(const char *name, const char *key)
{
    char all[MOE_HINT] = "";
    for (int i = 0; i < COUNT(dispatchers); i++) {
        size_t used = strlen(all);
        if (!dispatchers[i].bounded) continue;
        if (!strcmp(dispatchers[i].name, name)) return MOE_OK;
        snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", dispatchers[i].name);
    }
    return moe_fail(MOE_EINPUT, "key '%s' belongs to dispatcher %s, not %s", key, all, name);
}

int moe_lower_with(const struct moe_scenario *sc, const struct moe_dispatcher *dispatcher,
                   struct moe_schedule **out)
{
    const struct moe_capacity_rule *rule;
    int err = moe_capacity_rule(sc->capacity.rule, &rule);
    if (err < 0) return moe_fail(err, "%s: %s", sc->name, moe_error());
    if (dispatcher->dropless && rule->limit != moe_limit_dropless)
        return moe_fail(MOE_EINPUT, "%s: dispatcher %s does not go with capacity rule %s, expected dropless",
                        sc->name, dispatcher->name, rule->name);
    if (dispatcher->only && sc->apply_probs && sc->apply_probs != (int)dispatcher->only)
        return moe_fail(MOE_EINPUT, "%s: dispatcher %s does not go with apply_probs %s, expected %s",
                        sc->name, dispatcher->name, moe_apply_probs_text[sc->apply_probs],
                        moe_apply_probs_text[dispatcher->only]);
    if (sc->expert_group_unset && (!dispatcher->always_pads || sc->experts % sc->ranks))
        return moe_fail(
            MOE_EINPUT,
            "%s: expert_group unset: all ranks must be able to split the experts' rows in equal parts, "
            "expected dispatcher gshard, and experts (%lld) a multiple of ranks (%lld)",
            sc->name, (long long)sc->experts, (long long)sc->ranks);
    if (sc->empty_rank == MOE_EMPTY_SKIPS_WEIGHTS && (sc->micro_batches > 1 || sc->distributed.on))
        return moe_fail(MOE_EINPUT,
                        "%s: empty_rank skip_weights goes with one micro-batch and without a "
                        "distributed_optimizer",
                        sc->name);
    bool moves_probs = (dispatcher->only ? (int)dispatcher->only : sc->apply_probs) == MOE_PROBS_AT_EXPERT;
    if (sc->probs_detached && !moves_probs)
        return moe_fail(
            MOE_EINPUT,
            "%s: probs_gradient lost: dispatcher %s weighs rows at home, where probabilities are; "
            "expected one that can weigh them at the experts, and apply_probs: expert",
            sc->name, dispatcher->name);
    if (dispatcher->once && sc->counts)
        return moe_fail(
            MOE_EINPUT,
            "%s: routing.counts do not say how many tokens go to a rank, which dispatcher %s needs, "
            "expected skew and seed",
            sc->name, dispatcher->name);
    return lower(sc, dispatcher, rule, out);
}

bool moe_lower_sends_once(const char *name)
{
    int i = find(name);
    return i >= 0 && dispatchers[i].once;
}

int moe_lower(const struct moe_scenario *sc, struct moe_schedule **out)
{
    int i = find(sc->dispatcher);
    if (i < 0) return moe_fail(i, "%s: %s", sc->name, moe_error());
    return moe_lower_with(sc, &dispatchers[i], out);
}
