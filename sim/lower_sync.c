/* lower_sync.c - the gradient sum, its scaling and the update, after the whole backward pass.
 *
 * For each parameter: all-reduce over the ranks that hold a copy, division by the tokens of the world, SGD. A
 * parameter that only one rank holds has nothing to sum. */
#include "sim/lower.h"

#include <stdio.h>

static struct moe_op for_param(const struct moe_param *p, const char *verb, struct moe_op op)
{
    snprintf(op.name, sizeof op.name, "%s_%.32s", verb, p->name);
    return op;
}

static bool is_shared(const struct moe_schedule *s, const struct moe_param *p)
{
    return s->comms[p->replicas].n_groups < s->n_ranks;
}

static void emit_sum(struct moe_builder *b, const struct moe_param *p)
{
    struct moe_ref grad = moe_ref(p->grad);
    const struct moe_buffer *buffer = &b->s->buffers[p->grad];
    if (is_shared(b->s, p))
        moe_emit(b, for_param(p, "sum",
                              (struct moe_op){.kind = MOE_COLLECTIVE,
                                              .collective = MOE_ALLREDUCE,
                                              .comm = p->replicas,
                                              .type = buffer->type,
                                              .stream = MOE_STREAM_COMM,
                                              .send = buffer->extent,
                                              .recv = buffer->extent,
                                              MOE_READS(grad),
                                              MOE_WRITES(grad)}));
    moe_emit(b, for_param(p, "scale",
                          (struct moe_op){.kernel = MOE_K_SCALE,
                                          .type = buffer->type,
                                          .divisor = p->divisor,
                                          MOE_READS(grad),
                                          MOE_WRITES(grad),
                                          MOE_SIZES(buffer->extent)}));
}

static void emit_update(struct moe_builder *b, const struct moe_param *p, double learning_rate)
{
    struct moe_ref param = moe_ref(p->buffer), grad = moe_ref(p->grad);
    const struct moe_buffer *buffer = &b->s->buffers[p->grad];
    moe_emit(b, for_param(p, "update",
                          (struct moe_op){.kernel = MOE_K_SGD,
                                          .type = buffer->type,
                                          .factor = learning_rate,
                                          MOE_READS(param, grad),
                                          MOE_WRITES(param),
                                          MOE_SIZES(buffer->extent)}));
}

/* One block per pass for the parameters of layers (run for each layer), one for the others. */
static void lower_pass(struct moe_builder *b, enum moe_pass pass, bool of_layers, double learning_rate)
{
    struct moe_schedule *s = b->s;
    int block = moe_new_block(b, of_layers ? "layer" : "embedding", pass, of_layers);
    for (int i = 0; i < s->n_params; i++) {
        struct moe_param p = s->params[i];
        if (p.per_layer != of_layers) continue;
        if (pass == MOE_SYNC)
            emit_sum(b, &p);
        else
            emit_update(b, &p, learning_rate);
    }
    for (int layer = of_layers ? s->n_layers - 1 : 0; layer >= 0; layer--) moe_run_block(b, block, layer);
}

void moe_lower_sync(struct moe_builder *b, double learning_rate)
{
    lower_pass(b, MOE_SYNC, true, learning_rate);
    lower_pass(b, MOE_SYNC, false, learning_rate);
    lower_pass(b, MOE_UPDATE, true, learning_rate);
    lower_pass(b, MOE_UPDATE, false, learning_rate);
}
