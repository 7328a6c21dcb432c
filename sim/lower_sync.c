/* lower_sync.c - the gradient sum, its scaling, the clipping and the update, after the whole backward pass.
 *
 * For each parameter: all-reduce over the ranks that hold a copy, division by the tokens of the world. Then,
 * when asked for, the norm of the whole gradient: shared parameters count once, the experts' part is summed
 * over the ranks that split them; every gradient is clipped by the same norm. Then the update. What only one
 * rank holds has nothing to sum. */
#include "sim/lower.h"

#include <stdio.h>
#include <stdlib.h>

static const double weight_decay =
    0.1; /* Brown et al. 2020, appendix B: the usual value for language models */

struct sync {
    const struct moe_scenario *sc;
    int ep_comm, shared_norm, expert_norm; /* communicator; buffers */
};

/* Appends "verb_param"; type and size are the gradient's. */
static void emit_for(struct moe_builder *b, const struct moe_param *p, const char *verb, struct moe_op op)
{
    const struct moe_buffer *grad = &b->s->buffers[p->grad];
    snprintf(op.name, sizeof op.name, "%s_%.32s", verb, p->name);
    op.type = grad->type;
    if (op.kind == MOE_COLLECTIVE)
        op.send = op.recv = grad->extent;
    else
        op.dims[op.n_dims++] = grad->extent;
    moe_emit(b, op);
}

static bool is_shared(const struct moe_schedule *s, int comm)
{
    return s->comms[comm].n_groups < s->n_ranks;
}

static void emit_sum(struct moe_builder *b, const struct sync *sync, const struct moe_param *p)
{
    (void)sync;
    struct moe_ref grad = moe_ref(p->grad);
    if (is_shared(b->s, p->replicas))
        emit_for(b, p, "sum",
                 (struct moe_op){.kind = MOE_COLLECTIVE,
                                 .collective = MOE_ALLREDUCE,
                                 .comm = p->replicas,
                                 .stream = MOE_STREAM_COMM,
                                 MOE_READS(grad),
                                 MOE_WRITES(grad)});
    emit_for(
        b, p, "scale",
        (struct moe_op){.kernel = MOE_K_SCALE, .divisor = p->divisor, MOE_READS(grad), MOE_WRITES(grad)});
}

static void emit_norm(struct moe_builder *b, const struct sync *sync, const struct moe_param *p)
{
    struct moe_ref norm = moe_ref(p->shard < 0 ? sync->shared_norm : sync->expert_norm);
    norm.accumulate = true;
    emit_for(b, p, "norm",
             (struct moe_op){.kernel = MOE_K_SQNORM, MOE_READS(moe_ref(p->grad)), MOE_WRITES(norm)});
}

static void emit_clip(struct moe_builder *b, const struct sync *sync, const struct moe_param *p)
{
    struct moe_ref grad = moe_ref(p->grad);
    emit_for(b, p, "clip",
             (struct moe_op){.kernel = MOE_K_CLIP,
                             .factor = sync->sc->clip_norm,
                             MOE_READS(grad, moe_ref(sync->shared_norm), moe_ref(sync->expert_norm)),
                             MOE_WRITES(grad)});
}

static void emit_update(struct moe_builder *b, const struct sync *sync, const struct moe_param *p)
{
    struct moe_ref param = moe_ref(p->buffer), grad = moe_ref(p->grad);
    struct moe_op op = {
        .kernel = MOE_K_SGD, .factor = sync->sc->learning_rate, MOE_READS(param, grad), MOE_WRITES(param)};
    if (sync->sc->optimizer == MOE_ADAMW) {
        const struct moe_buffer like = b->s->buffers[p->buffer]; /* a copy: new buffers move the array */
        char name[MOE_NAME + 2];
        struct moe_ref state[2];
        for (int i = 0; i < 2; i++) {
            snprintf(name, sizeof name, "%c_%s", "mv"[i], p -> name);
            state[i] = moe_ref(moe_new_buffer(b, name, MOE_BUF_STATE, like.type, like.slots, like.extent));
            op.reads[op.n_reads++] = state[i];
            op.writes[op.n_writes++] = state[i];
        }
        op.kernel = MOE_K_ADAMW;
        op.decay = p->init_mean == 0 ? weight_decay : 0; /* gains are not pulled to zero */
    }
    emit_for(b, p, "update", op);
}

typedef void (*emitter)(struct moe_builder *b, const struct sync *sync, const struct moe_param *p);

/* One block for the parameters of layers, run for each layer, and one for the others. */
static void lower_pass(struct moe_builder *b, const struct sync *sync, enum moe_pass pass, emitter emit)
{
    for (int of_layers = 1; of_layers >= 0; of_layers--) {
        int block = moe_new_block(b, of_layers ? "layer" : "embedding", pass, of_layers);
        for (int i = 0; i < b->s->n_params; i++) {
            struct moe_param p = b->s->params[i];
            if (p.per_layer == of_layers && p.buffer >= 0) emit(b, sync, &p);
        }
        for (int layer = of_layers ? b->s->n_layers - 1 : 0; layer >= 0; layer--)
            moe_run_block(b, block, layer);
    }
}

static void lower_clipping(struct moe_builder *b, struct sync *sync)
{
    int *key = moe_alloc((size_t)b->s->n_ranks, sizeof *key);
    for (int r = 0; r < b->s->n_ranks; r++) key[r] = r;
    sync->shared_norm = moe_new_norm(b, "shared_norm", moe_new_comm(b, "alone", b->s->n_ranks, key));
    free(key);
    sync->expert_norm = moe_new_norm(b, "expert_norm", sync->ep_comm);
    int one = moe_const(b, 1);
    struct moe_ref shared = moe_ref(sync->shared_norm), expert = moe_ref(sync->expert_norm);
    moe_run_block(b, moe_new_block(b, "norm", MOE_CLIPPING, false), 0);
    moe_emit(b, (struct moe_op){.name = "zero_shared",
                                .kernel = MOE_K_ZERO,
                                .type = MOE_F64,
                                MOE_WRITES(shared),
                                MOE_SIZES(one)});
    moe_emit(b, (struct moe_op){.name = "zero_expert",
                                .kernel = MOE_K_ZERO,
                                .type = MOE_F64,
                                MOE_WRITES(expert),
                                MOE_SIZES(one)});
    lower_pass(b, sync, MOE_CLIPPING, emit_norm);
    if (is_shared(b->s, sync->ep_comm)) {
        moe_run_block(b, moe_new_block(b, "norm", MOE_CLIPPING, false), 0);
        moe_emit(b, (struct moe_op){.name = "sum_expert_norm",
                                    .kind = MOE_COLLECTIVE,
                                    .collective = MOE_ALLREDUCE,
                                    .comm = sync->ep_comm,
                                    .type = MOE_F64,
                                    .stream = MOE_STREAM_COMM,
                                    .send = one,
                                    .recv = one,
                                    MOE_READS(expert),
                                    MOE_WRITES(expert)});
    }
    lower_pass(b, sync, MOE_CLIPPING, emit_clip);
}

void moe_lower_sync(struct moe_builder *b, const struct moe_scenario *sc, int ep_comm)
{
    struct sync sync = {.sc = sc, .ep_comm = ep_comm};
    lower_pass(b, &sync, MOE_SYNC, emit_sum);
    if (sc->clip_norm > 0) lower_clipping(b, &sync);
    lower_pass(b, &sync, MOE_UPDATE, emit_update);
}
