/* lower.c - see lower.h. */
#include "sim/lower.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct moe_dispatcher dispatchers[] = {
    {"alltoall", moe_alltoall},
};
enum { N_DISPATCHERS = sizeof dispatchers / sizeof *dispatchers };

struct model {
    const struct moe_scenario *sc;
    struct moe_layer layer;
    int emb, router;         /* parameters */
    int token, target, loss; /* buffers */
    int logits, prediction;  /* of the router [T, E], of the head [T, V] */
    int V, one;
};

/* Expert-parallel groups are consecutive ranks; a rank's experts are replicated at stride expert_parallel. */
static void make_comms(struct moe_builder *b, const struct moe_scenario *sc, int *ep, int *edp)
{
    int n = (int)sc->ranks, size = (int)sc->expert_parallel;
    int *key = moe_alloc((size_t)n, sizeof *key);
    for (int r = 0; r < n; r++) key[r] = r / size;
    *ep = moe_new_comm(b, "ep", n / size, key);
    for (int r = 0; r < n; r++) key[r] = r % size;
    *edp = moe_new_comm(b, "edp", size, key);
    free(key);
}

/* Initial values give x a norm of about 1 and the router logits a spread of about 1. */
static void make_params(struct moe_builder *b, struct model *m, int edp)
{
    struct moe_layer *y = &m->layer;
    const struct moe_scenario *sc = m->sc;
    struct moe_symbol everywhere = {.scope = MOE_SCOPE_GLOBAL, .comm = -1};
    int all_tokens = moe_sym(b, moe_new_symbol(b, "tokens_of_world", -1, false, everywhere));
    struct moe_param shared = {.replicas = 0, .shard = -1, .divisor = all_tokens};
    struct moe_param expert = {.replicas = edp, .shard = y->ep_comm, .divisor = all_tokens, .init_std = 1,
                               .per_layer = true};
    int e = moe_const(b, sc->experts / sc->expert_parallel), two_f = moe_mul(b, moe_const(b, 2), y->F);
    shared.init_std = 1 / sqrt((double)sc->hidden);
    m->emb = moe_new_param(b, "embedding", y->type, 1, moe_mul(b, m->V, y->H), shared);
    shared.init_std = 1;
    shared.per_layer = true;
    m->router = moe_new_param(b, "router", y->type, y->n_layers, moe_mul(b, y->H, y->E), shared);
    y->w1 =
        moe_ref(moe_new_param(b, "w1", y->type, y->n_layers, moe_mul(b, e, moe_mul(b, y->H, two_f)), expert));
    expert.init_std = 1 / sqrt((double)(sc->ffn * sc->hidden));
    y->w2 =
        moe_ref(moe_new_param(b, "w2", y->type, y->n_layers, moe_mul(b, e, moe_mul(b, y->F, y->H)), expert));
}

static void make_buffers(struct moe_builder *b, struct model *m)
{
    struct moe_layer *y = &m->layer;
    int TH = moe_mul(b, y->T, y->H), TE = moe_mul(b, y->T, y->E), TK = moe_mul(b, y->T, y->K);
    m->token = moe_new_buffer(b, "token", MOE_BUF_INPUT, MOE_I32, 1, y->T);
    m->target = moe_new_buffer(b, "target", MOE_BUF_INPUT, MOE_I32, 1, y->T);
    m->loss = moe_new_buffer(b, "loss", MOE_BUF_OUTPUT, y->type, 1, m->one);
    m->prediction = moe_new_buffer(b, "prediction", MOE_BUF_ACTIVATION, y->type, 1, moe_mul(b, y->T, m->V));
    m->logits = moe_new_buffer(b, "logits", MOE_BUF_ACTIVATION, y->type, y->n_layers, TE);
    y->x = moe_ref(moe_new_buffer(b, "x", MOE_BUF_ACTIVATION, y->type, y->n_layers + 1, TH));
    y->y = moe_next(y->x);
    y->prob = moe_ref(moe_new_buffer(b, "prob", MOE_BUF_ACTIVATION, y->type, y->n_layers, TE));
    y->expert = moe_ref(moe_new_buffer(b, "expert", MOE_BUF_INDEX, MOE_I32, y->n_layers, TK));
    y->slot = moe_ref(moe_new_buffer(b, "slot", MOE_BUF_INDEX, MOE_I32, y->n_layers, TK));
    y->counts = moe_ref(moe_new_buffer(b, "counts", MOE_BUF_COUNTS, MOE_I64, y->n_layers, y->E));
}

struct moe_ref moe_lower_experts(struct moe_builder *b, const struct moe_layer *m, struct moe_ref rows, int n,
                                 int group)
{
    int e = moe_const(b, m->n_experts / m->ep_size), two_f = moe_mul(b, moe_const(b, 2), m->F);
    struct moe_ref h =
        moe_ref(moe_new_buffer(b, "h", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n, two_f)));
    struct moe_ref a =
        moe_ref(moe_new_buffer(b, "a", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n, m->F)));
    struct moe_ref out = moe_ref(
        moe_new_buffer(b, "expert_out", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n, m->H)));
    moe_emit(b, (struct moe_op){.name = "expert_in",
                                .kernel = MOE_K_GROUPED_GEMM,
                                .type = m->type,
                                .needs_grad = 3,
                                .group = group,
                                MOE_READS(rows, m->w1),
                                MOE_WRITES(h),
                                MOE_SIZES(e, two_f, m->H)});
    moe_emit(b, (struct moe_op){.name = "swiglu",
                                .kernel = MOE_K_SWIGLU,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(h),
                                MOE_WRITES(a),
                                MOE_SIZES(n, m->F)});
    moe_emit(b, (struct moe_op){.name = "expert_out",
                                .kernel = MOE_K_GROUPED_GEMM,
                                .type = m->type,
                                .needs_grad = 3,
                                .group = group,
                                MOE_READS(a, m->w2),
                                MOE_WRITES(out),
                                MOE_SIZES(e, m->H, m->F)});
    return out;
}

static void lower_layer(struct moe_builder *b, const struct model *m, const struct moe_dispatcher *dispatcher)
{
    const struct moe_layer *y = &m->layer;
    struct moe_ref logits = moe_ref(m->logits);
    moe_emit(b, (struct moe_op){.name = "router",
                                .kernel = MOE_K_GEMM,
                                .type = y->type,
                                .needs_grad = 3,
                                MOE_READS(y->x, moe_ref(m->router)),
                                MOE_WRITES(logits),
                                MOE_SIZES(y->T, y->E, y->H)});
    moe_emit(b, (struct moe_op){.name = "topk",
                                .kernel = MOE_K_TOPK,
                                .type = y->type,
                                .needs_grad = 1,
                                MOE_READS(logits),
                                MOE_WRITES(y->prob, y->expert, y->slot, y->counts),
                                MOE_SIZES(y->T, y->E, y->K)});
    dispatcher->forward(b, y);
}

static void lower_head(struct moe_builder *b, const struct model *m)
{
    const struct moe_layer *y = &m->layer;
    struct moe_ref prediction = moe_ref(m->prediction);
    moe_emit(b, (struct moe_op){.name = "predict",
                                .kernel = MOE_K_GEMM,
                                .type = y->type,
                                .needs_grad = 3,
                                .trans_b = true,
                                MOE_READS(y->x, moe_ref(m->emb)),
                                MOE_WRITES(prediction),
                                MOE_SIZES(y->T, m->V, y->H)});
    moe_emit(b, (struct moe_op){.name = "loss",
                                .kernel = MOE_K_XENT,
                                .type = y->type,
                                MOE_READS(prediction, moe_ref(m->target)),
                                MOE_WRITES(moe_grad_out(b, prediction), moe_ref(m->loss)),
                                MOE_SIZES(y->T, m->V)});
}

static void lower_step(struct moe_builder *b, const struct model *m, const struct moe_dispatcher *dispatcher)
{
    const struct moe_layer *y = &m->layer;
    int n = y->n_layers;
    int embed = moe_new_block(b, "embedding", MOE_FORWARD, false);
    moe_emit(b, (struct moe_op){.name = "embed",
                                .kernel = MOE_K_EMBED,
                                .type = y->type,
                                .needs_grad = 2,
                                MOE_READS(moe_ref(m->token), moe_ref(m->emb)),
                                MOE_WRITES(y->x),
                                MOE_SIZES(y->T, y->H, m->V)});
    int layer = moe_new_block(b, "layer", MOE_FORWARD, true);
    lower_layer(b, m, dispatcher);
    int head = moe_new_block(b, "head", MOE_FORWARD, false);
    lower_head(b, m);
    int d_head = moe_new_block(b, "head", MOE_BACKWARD, false);
    moe_emit_backward(b, head);
    int d_layer = moe_new_block(b, "layer", MOE_BACKWARD, true);
    moe_emit_backward(b, layer);
    int d_embed = moe_new_block(b, "embedding", MOE_BACKWARD, false);
    moe_emit_backward(b, embed);
    moe_run_block(b, embed, 0);
    for (int l = 0; l < n; l++) moe_run_block(b, layer, l);
    moe_run_block(b, head, n); /* its x is the slot after the last layer's input */
    moe_run_block(b, d_head, n);
    for (int l = n - 1; l >= 0; l--) moe_run_block(b, d_layer, l);
    moe_run_block(b, d_embed, 0);
}

struct moe_schedule *moe_lower_with(const struct moe_scenario *sc, const struct moe_dispatcher *dispatcher)
{
    struct moe_builder b;
    struct model m = {.sc = sc};
    struct moe_layer *y = &m.layer;
    int edp;
    moe_builder_open(&b, (int)sc->ranks, sc->tokens);
    b.s->n_layers = y->n_layers = (int)sc->layers;
    b.s->n_experts = y->n_experts = (int)sc->experts;
    b.s->top_k = (int)sc->top_k;
    y->ep_size = (int)sc->expert_parallel;
    y->type = (enum moe_type)sc->dtype;
    make_comms(&b, sc, &y->ep_comm, &edp);
    struct moe_symbol local = {.scope = MOE_SCOPE_RANK, .comm = -1};
    y->T = moe_sym(&b, moe_new_symbol(&b, "tokens", -1, false, local));
    y->H = moe_const(&b, sc->hidden);
    y->F = moe_const(&b, sc->ffn);
    y->K = moe_const(&b, sc->top_k);
    y->E = moe_const(&b, sc->experts);
    m.V = moe_const(&b, MOE_VOCAB);
    m.one = moe_const(&b, 1);
    make_params(&b, &m, edp);
    make_buffers(&b, &m);
    lower_step(&b, &m, dispatcher);
    moe_lower_sync(&b, sc->learning_rate);
    return moe_builder_close(&b);
}

int moe_lower(const struct moe_scenario *sc, struct moe_schedule **out)
{
    const char *names[N_DISPATCHERS];
    for (int i = 0; i < N_DISPATCHERS; i++) {
        names[i] = dispatchers[i].name;
        if (strcmp(sc->dispatcher, names[i]) != 0) continue;
        *out = moe_lower_with(sc, &dispatchers[i]);
        return MOE_OK;
    }
    const char *nearest = moe_nearest(sc->dispatcher, names, N_DISPATCHERS);
    return moe_fail(MOE_EINPUT, "%s: unknown dispatcher '%s'%s%s", sc->name, sc->dispatcher,
                    nearest ? ", did you mean " : "; known: ", nearest ? nearest : names[0]);
}
