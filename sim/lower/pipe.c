/* pipe.c - the stages of a pipeline: what they pass on, and in which order they work (lower.h).
 *
 * A transfer joins two neighbours, who both issue it for the same layer of the same micro-batch: that of what
 * goes forward, if anything does. In both directions at once, what comes back belongs to an earlier
 * micro-batch: as many before as the stages behind the first of the two. */
#include "sim/lower/lower.h"

#include <stdlib.h>

enum { FORWARD, BACKWARD, BOTH };

static int first_layer(const struct moe_builder *b)
{
    return b->s->roles[b->role].first_layer;
}

static int end_layer(const struct moe_builder *b)
{
    return b->s->roles[b->role].end_layer;
}

void moe_lower_pipe_open(struct moe_builder *b, struct moe_ref stream, int n, int n_stages,
                         struct moe_lower_pipe *out)
{
    int n_ranks = b->s->n_ranks, each = n_ranks / n_stages, *key = moe_alloc((size_t)n_ranks, sizeof *key);
    *out = (struct moe_lower_pipe){.n_stages = n_stages, .stream = stream, .n = n};
    for (int odd = 0; odd < 2 && n_stages > 1 + odd; odd++) {
        /* Stages 0 and 1, 2 and 3; or 1 and 2, 3 and 4: the others are alone. */
        for (int r = 0; r < n_ranks; r++) key[r] = (r / each + odd) / 2 * each + r % each;
        out->comm[odd] =
            moe_new_comm(b, odd ? "pipe_odd" : "pipe_even", (n_stages + 1 + odd) / 2 * each, key);
    }
    free(key);
    if (n_stages > 1)
        out->nothing = moe_ref(moe_new_buffer(b, "nothing", MOE_BUF_STATE, b->s->buffers[stream.buffer].type,
                                              1, moe_const(b, 0)));
}

/* A block with the transfer between this stage and the next, or the one before. */
static int transfer(struct moe_builder *b, const struct moe_lower_pipe *pipe, bool to_next, int direction)
{
    static const char *const name[] = {"pass_on", "pass_back", "pass_both"};
    int lower = to_next ? pipe->stage : pipe->stage - 1;
    if (lower < 0 || lower == pipe->n_stages - 1) return -1;
    int comm = pipe->comm[lower % 2];
    int block = moe_new_block(b, "pipe", direction == BACKWARD ? MOE_BACKWARD : MOE_FORWARD, false);
    bool sends = direction == BOTH || to_next == (direction == FORWARD),
         receives = direction == BOTH || to_next == (direction == BACKWARD);
    struct moe_ref act = pipe->stream, grad = moe_grad_in(b, pipe->stream);
    if (direction == BOTH) grad.micro = lower + 1 - pipe->n_stages;
    int other = moe_mul(b, pipe->n, moe_other(b, comm)), none = moe_const(b, 0);
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLTOALL,
                        .comm = comm,
                        .type = b->s->buffers[act.buffer].type,
                        .stream = MOE_STREAM_COMM,
                        .send = sends ? other : none,
                        .recv = receives ? other : none,
                        MOE_READS(!sends    ? pipe->nothing
                                  : to_next ? act
                                            : grad),
                        MOE_WRITES(!receives ? pipe->nothing
                                   : to_next ? grad
                                             : act)};
    moe_copy_name(op.name, name[direction]);
    moe_emit(b, op);
    return block;
}

void moe_lower_pipe_before(struct moe_builder *b, struct moe_lower_pipe *pipe)
{
    pipe->previous[FORWARD] = transfer(b, pipe, false, FORWARD);
}

void moe_lower_pipe_between(struct moe_builder *b, struct moe_lower_pipe *pipe)
{
    for (int direction = FORWARD; direction <= BOTH; direction++)
        pipe->next[direction] = transfer(b, pipe, true, direction);
}

void moe_lower_pipe_after(struct moe_builder *b, struct moe_lower_pipe *pipe)
{
    pipe->previous[BACKWARD] = transfer(b, pipe, false, BACKWARD);
    pipe->previous[BOTH] = transfer(b, pipe, false, BOTH);
}

/* ---- the order ---- */

static void run(struct moe_builder *b, int block, int micro, int layer)
{
    if (block >= 0) moe_run_block(b, block, moe_layer_of_micro(b->s, micro, layer));
}

/* Passes to (or from) the next stage: the activations of a micro-batch, the gradient of one, or both. */
static void run_next(struct moe_builder *b, const struct moe_lower_pipe *pipe, int direction, int micro)
{
    run(b, pipe->next[direction], micro, end_layer(b));
}

static void run_previous(struct moe_builder *b, const struct moe_lower_pipe *pipe, int direction, int micro)
{
    run(b, pipe->previous[direction], micro, first_layer(b));
}

static void run_forward(struct moe_builder *b, const struct moe_lower_pipe *pipe, int micro)
{
    run(b, pipe->embed, micro, 0);
    for (int l = first_layer(b); l < end_layer(b); l++) run(b, pipe->layer, micro, l);
    run(b, pipe->head, micro, end_layer(b)); /* its stream is the slot behind the last layer's input */
}

static void run_backward(struct moe_builder *b, const struct moe_lower_pipe *pipe, int micro)
{
    run(b, pipe->d_head, micro, end_layer(b));
    for (int l = end_layer(b) - 1; l >= first_layer(b); l--) {
        run(b, pipe->d_layer, micro, l);
        if (micro == pipe->n_micro - 1) run(b, pipe->early, 0, l);
        if (micro == pipe->n_micro - 1) run(b, pipe->full[l], 0, 0);
    }
    run(b, pipe->d_embed, micro, 0);
}

static void run_gpipe(struct moe_builder *b, const struct moe_lower_pipe *pipe)
{
    for (int i = 0; i < pipe->n_micro; i++) {
        run_previous(b, pipe, FORWARD, i);
        run_forward(b, pipe, i);
        run_next(b, pipe, FORWARD, i);
    }
    for (int i = 0; i < pipe->n_micro; i++) {
        run_next(b, pipe, BACKWARD, i);
        run_backward(b, pipe, i);
        run_previous(b, pipe, BACKWARD, i);
    }
}

static void run_1f1b(struct moe_builder *b, const struct moe_lower_pipe *pipe)
{
    int M = pipe->n_micro, behind = pipe->n_stages - 1 - pipe->stage, ahead = behind < M ? behind : M;
    for (int i = 0; i < ahead; i++) {
        run_previous(b, pipe, FORWARD, i);
        run_forward(b, pipe, i);
        run_next(b, pipe, FORWARD, i);
    }
    if (ahead < M) run_previous(b, pipe, FORWARD, ahead);
    for (int i = ahead; i < M; i++) {
        run_forward(b, pipe, i);
        run_next(b, pipe, BOTH, i);
        run_backward(b, pipe, i - ahead);
        if (i + 1 < M)
            run_previous(b, pipe, BOTH, i + 1);
        else
            run_previous(b, pipe, BACKWARD, i - ahead);
    }
    for (int i = M - ahead; i < M; i++) {
        run_next(b, pipe, BACKWARD, i);
        run_backward(b, pipe, i);
        run_previous(b, pipe, BACKWARD, i);
    }
}

void moe_lower_pipe_run(struct moe_builder *b, const struct moe_lower_pipe *pipe, int order)
{
    (order == MOE_GPIPE ? run_gpipe : run_1f1b)(b, pipe);
}
