/* gradient_sync.c - from gradients to updates, in the order that the scenario says (sync.h).
 *
 * Steps that follow each other and go parameter by parameter make one block for the parameters of layers, run
 * for each layer, and one for the others. A norm is two sums of squares, one of the shared parameters and one
 * of the experts'; every gradient is clipped by both. What only one rank holds has nothing to sum. What a
 * reduce_scatter shares out goes bucket by bucket up to the norms, and then layer by layer. */
#include "sim/lower/buckets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double weight_decay =
    0.1; /* Brown et al. 2020, appendix B: the usual value for language models */

/* Appends "verb_param"; type and size are the gradient's. */
static void emit_for(struct moe_builder *b, const struct moe_target *t, const char *verb, struct moe_op op)
{
    const struct moe_buffer *grad = &b->s->buffers[t->p.grad];
    if (t->named && t->layer >= 0)
        snprintf(op.name, sizeof op.name, "%s_%.24s_%d", verb, t->p.name, t->layer);
    else
        snprintf(op.name, sizeof op.name, "%s_%.32s", verb, t->p.name);
    op.type = grad->type;
    if (op.kind == MOE_COLLECTIVE)
        op.send = op.recv = grad->extent;
    else
        op.dims[op.n_dims++] = t->n;
    moe_emit(b, op);
}

/* All of a parameter, where the backward pass leaves its gradient. */
static struct moe_target whole_of(const struct moe_builder *b, const struct moe_param *p)
{
    struct moe_ref grad = moe_ref(p->grad);
    return (struct moe_target){*p, -1, grad, grad, moe_ref(p->buffer), .n = b->s->buffers[p->grad].extent};
}

static bool is_shared(const struct moe_schedule *s, int comm)
{
    return comm >= 0 && s->comms[comm].n_groups < s->n_ranks;
}

bool moe_sync_is_of(const struct moe_sync_step *step, const struct moe_param *p)
{
    return !strcmp(step->of, "all") || !strcmp(step->of, p->shard < 0 ? "shared" : "experts") ||
           !strcmp(step->of, p->name);
}

int moe_sync_comm(const struct moe_lower_sync *sync, int group)
{
    const int comms[MOE_GROUP_COUNT] = {[MOE_GROUP_WORLD] = 0,
                                        [MOE_GROUP_DP] = sync->groups.dp,
                                        [MOE_GROUP_EP] = sync->groups.ep,
                                        [MOE_GROUP_EDP] = sync->groups.edp,
                                        [MOE_GROUP_PP] = sync->groups.pp,
                                        [MOE_GROUP_TIED] = sync->groups.tied,
                                        [MOE_GROUP_EP_PP] = sync->groups.ep_pp,
                                        [MOE_GROUP_SP] = sync->groups.sp,
                                        [MOE_GROUP_ACROSS_SP] = sync->groups.across_sp};
    return comms[group];
}

/* Ranks of a group; its groups are alike. */
static int size_of(const struct moe_builder *b, const struct moe_lower_sync *sync, int group)
{
    int comm = moe_sync_comm(sync, group);
    return comm < 0 ? 1 : moe_group_size(&b->s->comms[comm], 0);
}

static int product(struct moe_builder *b, const struct moe_lower_sync *sync, int n,
                   const struct moe_factor *factor)
{
    int64_t number = 1;
    int out = MOE_UNSET;
    for (int i = 0; i < n; i++) {
        if (factor[i].kind == MOE_FACTOR_NUMBER) number *= factor[i].number;
        if (factor[i].kind == MOE_FACTOR_GROUP) number *= size_of(b, sync, (int)factor[i].number);
        if (factor[i].kind < MOE_FACTOR_TOKENS) continue;
        int tokens = factor[i].kind == MOE_FACTOR_TOKENS ? sync->groups.tokens : sync->groups.world_tokens;
        out = out ? moe_mul(b, out, tokens) : tokens;
    }
    if (!out) return moe_const(b, number);
    return number == 1 ? out : moe_mul(b, out, moe_const(b, number));
}

static void emit_sum(struct moe_builder *b, const struct moe_target *t, int comm, int when)
{
    if (!is_shared(b->s, comm)) return;
    emit_for(b, t, "sum",
             (struct moe_op){.kind = MOE_COLLECTIVE,
                             .collective = MOE_ALLREDUCE,
                             .comm = comm,
                             .when = when,
                             .stream = MOE_STREAM_COMM,
                             MOE_READS(t->whole),
                             MOE_WRITES(t->whole)});
}

static void emit_scale(struct moe_builder *b, const struct moe_target *t, int divisor, int times)
{
    emit_for(b, t, "scale",
             (struct moe_op){.kernel = MOE_K_SCALE,
                             .divisor = divisor,
                             .times = times,
                             MOE_READS(t->own),
                             MOE_WRITES(t->own)});
}

bool moe_lower_is_held(const struct moe_builder *b, const struct moe_param *p)
{
    const struct moe_role *role = &b->s->roles[b->role];
    enum moe_where where = b->s->buffers[p->buffer].where;
    bool first = role->first_layer == 0, last = role->end_layer == b->s->n_layers;
    return where == MOE_WHERE_ALL || (where != MOE_WHERE_LAST && first) || (where != MOE_WHERE_FIRST && last);
}

/* The embedding counts where tokens enter. */
static bool is_second_copy(const struct moe_builder *b, const struct moe_param *p)
{
    return b->s->buffers[p->buffer].where == MOE_WHERE_ENDS && b->s->roles[b->role].first_layer > 0;
}

static void emit_norm(struct moe_builder *b, const struct moe_lower_sync *sync, const struct moe_target *t)
{
    if (is_second_copy(b, &t->p)) return;
    struct moe_ref norm = moe_ref(t->p.shard < 0 ? sync->shared_norm : sync->expert_norm);
    norm.accumulate = true;
    emit_for(b, t, "norm", (struct moe_op){.kernel = MOE_K_SQNORM, MOE_READS(t->own), MOE_WRITES(norm)});
}

static void emit_clip(struct moe_builder *b, const struct moe_lower_sync *sync, const struct moe_target *t)
{
    emit_for(b, t, "clip",
             (struct moe_op){.kernel = MOE_K_CLIP,
                             .factor = sync->sc->clip_norm,
                             MOE_READS(t->own, moe_ref(sync->shared_norm), moe_ref(sync->expert_norm)),
                             MOE_WRITES(t->own)});
}

/* The optimizer's state of a whole parameter. */
static struct moe_ref new_state(struct moe_builder *b, const struct moe_param *p, char which)
{
    const struct moe_buffer like = b->s->buffers[p->buffer]; /* a copy: new buffers move the array */
    char name[MOE_NAME + 2];
    snprintf(name, sizeof name, "%c_%s", which, p->name);
    int buffer = moe_new_buffer(b, name, MOE_BUF_STATE, like.type, like.slots, like.extent);
    b->s->buffers[buffer].where = like.where;
    return moe_ref(buffer);
}

static void emit_update(struct moe_builder *b, const struct moe_lower_sync *sync, const struct moe_target *t)
{
    struct moe_op op = {.kernel = MOE_K_SGD,
                        .factor = sync->sc->learning_rate,
                        MOE_READS(t->value, t->own),
                        MOE_WRITES(t->value)};
    if (sync->sc->optimizer == MOE_ADAMW) {
        for (int i = 0; i < 2; i++) {
            struct moe_ref state = t->state[i].n ? t->state[i] : new_state(b, &t->p, "mv"[i]);
            op.reads[op.n_reads++] = state;
            op.writes[op.n_writes++] = state;
        }
        op.kernel = MOE_K_ADAMW;
        op.decay = t->p.init_mean == 0 ? weight_decay : 0; /* gains are not pulled to zero */
    }
    emit_for(b, t, "update", op);
}

static bool sums(const struct moe_sync_step *step)
{
    return step->act == MOE_SYNC_SUM || step->act == MOE_SYNC_AVERAGE;
}

/* Does the stage that is being written carry out the step? */
static bool is_on(const struct moe_builder *b, const struct moe_sync_step *step)
{
    const struct moe_role *role = &b->s->roles[b->role];
    return step->on == MOE_ON_ALL ||
           (step->on == MOE_ON_FIRST ? role->first_layer == 0 : role->end_layer == b->s->n_layers);
}

static bool reduces(const struct moe_sync_step *step)
{
    return sums(step) || step->act == MOE_SYNC_REDUCE_SCATTER;
}

static void emit_step(struct moe_builder *b, const struct moe_lower_sync *sync,
                      const struct moe_sync_step *step, const struct moe_target *t)
{
    struct moe_factor group = {MOE_FACTOR_GROUP, step->over};
    if (!moe_sync_is_of(step, &t->p) || !is_on(b, step)) return;
    b->line = step->line;
    if (sums(step)) emit_sum(b, t, moe_sync_comm(sync, step->over), t->p.shard < 0 ? MOE_UNSET : sync->rows);
    switch (step->act) {
    case MOE_SYNC_AVERAGE: emit_scale(b, t, product(b, sync, 1, &group), MOE_UNSET); break;
    case MOE_SYNC_DIVIDE:
        emit_scale(b, t, product(b, sync, step->n_by, step->by),
                   step->n_times ? product(b, sync, step->n_times, step->times) : MOE_UNSET);
        break;
    case MOE_SYNC_NORM: emit_norm(b, sync, t); break;
    case MOE_SYNC_CLIP: emit_clip(b, sync, t); break;
    case MOE_SYNC_UPDATE: emit_update(b, sync, t); break;
    default: break;
    }
    b->line = 0;
}

static const enum moe_pass pass_of[MOE_SYNC_ACT_COUNT] = {[MOE_SYNC_SUM] = MOE_SYNC,
                                                          [MOE_SYNC_AVERAGE] = MOE_SYNC,
                                                          [MOE_SYNC_DIVIDE] = MOE_SYNC,
                                                          [MOE_SYNC_NORM] = MOE_CLIPPING,
                                                          [MOE_SYNC_CLIP] = MOE_CLIPPING,
                                                          [MOE_SYNC_UPDATE] = MOE_UPDATE,
                                                          [MOE_SYNC_REDUCE_SCATTER] = MOE_SYNC,
                                                          [MOE_SYNC_ALL_GATHER] = MOE_UPDATE};

static int new_block(struct moe_builder *b, const struct moe_lower_sync *sync, int step, const char *name,
                     bool of_layer)
{
    return moe_new_block(b, name, pass_of[sync->order.step[step].act], of_layer);
}

static bool is_bucketed(const struct moe_lower_sync *sync, const struct moe_param *p)
{
    for (int i = 0; i < sync->order.n; i++)
        if (sync->order.step[i].act == MOE_SYNC_REDUCE_SCATTER && moe_sync_is_of(&sync->order.step[i], p))
            return true;
    return false;
}

/* Appends what steps from..to-1 do to each parameter of layers, or to each other one, to a new block. */
static int lower_steps(struct moe_builder *b, const struct moe_lower_sync *sync, int from, int to,
                       bool of_layers)
{
    int block = new_block(b, sync, from, of_layers ? "layer" : "embedding", of_layers);
    for (int i = 0; i < b->s->n_params; i++) {
        const struct moe_param p = b->s->params[i]; /* a copy: updates add buffers */
        if (p.per_layer != of_layers || p.buffer < 0 || !moe_lower_is_held(b, &p) || is_bucketed(sync, &p))
            continue;
        const struct moe_target t = whole_of(b, &p);
        for (int step = from; step < to; step++) emit_step(b, sync, &sync->order.step[step], &t);
    }
    return block;
}

/* ---- what is shared out in buckets ---- */

static void reduce_bucket(struct moe_builder *b, const struct moe_lower_sync *sync, int bucket)
{
    b->line = sync->order.step[sync->buckets->bucket[bucket].step].line;
    moe_bucket_reduce(b, sync->buckets, bucket);
    b->line = 0;
}

static void lower_bucket(struct moe_builder *b, const struct moe_lower_sync *sync, int bucket, int from,
                         int to)
{
    for (int step = from; step < to; step++) {
        if (sync->order.step[step].act == MOE_SYNC_REDUCE_SCATTER) {
            if (sync->buckets->bucket[bucket].step == step) reduce_bucket(b, sync, bucket);
            continue;
        }
        for (int i = 0; i < sync->buckets->n_placed; i++) {
            if (sync->buckets->placed[i].bucket != bucket) continue;
            const struct moe_target t = moe_bucket_target(b, sync->buckets, i, false);
            emit_step(b, sync, &sync->order.step[step], &t);
        }
    }
}

/* Is the bucket reduced behind its layer's backward pass, by the steps before n_early? */
static bool is_early(const struct moe_lower_sync *sync, int bucket)
{
    return sync->n_early && sync->buckets->bucket[bucket].complete >= 0;
}

/* Steps that take one tensor after the other, in a block of each layer and one for the others; the embedding
 * comes first there, at the same place on both stages. */
static void lower_parts(struct moe_builder *b, const struct moe_lower_sync *sync, int from, int to)
{
    const struct moe_role role = b->s->roles[b->role];
    for (int layer = role.end_layer - 1; layer >= role.first_layer - 1; layer--) {
        int of = layer >= role.first_layer ? layer : -1, block = -1;
        for (int i = 0; i < sync->buckets->n_placed; i++) {
            const struct moe_placed *placed = &sync->buckets->placed[i];
            if (placed->layer != of) continue;
            const struct moe_target t = moe_bucket_target(b, sync->buckets, i, true);
            for (int k = from; k < to; k++) {
                const struct moe_sync_step *step = &sync->order.step[k];
                if (!moe_sync_is_of(step, &t.p) || (is_early(sync, placed->bucket) && k < sync->n_early))
                    continue;
                if (block < 0) {
                    block = new_block(b, sync, from, of < 0 ? "embedding" : "layer", of >= 0);
                    moe_run_block(b, block, of < 0 ? 0 : of);
                }
                emit_step(b, sync, step, &t);
            }
        }
    }
}

/* What was shared out by a reduce_scatter of the same parameters. */
static void lower_gathers(struct moe_builder *b, const struct moe_lower_sync *sync, int from, int to)
{
    moe_run_block(b, new_block(b, sync, from, "buckets", false), 0);
    for (int step = from; step < to; step++) {
        b->line = sync->order.step[step].line;
        for (int k = 0; k < sync->buckets->n; k++)
            if (!strcmp(sync->order.step[sync->buckets->bucket[k].step].of, sync->order.step[step].of))
                moe_bucket_gather(b, sync->buckets, k, moe_sync_comm(sync, sync->order.step[step].over));
    }
    b->line = 0;
}

/* The steps between reductions, and the reductions, of what is not done yet. */
static void lower_buckets(struct moe_builder *b, const struct moe_lower_sync *sync, int from, int to)
{
    for (int step = from, end; step < to && sync->buckets->n; step = end + 1) {
        for (end = step; end < to && sync->order.step[end].act != MOE_SYNC_REDUCE_SCATTER;) end++;
        lower_parts(b, sync, step, end);
        if (end == to) break;
        moe_run_block(b, new_block(b, sync, end, "buckets", false), 0);
        for (int k = 0; k < sync->buckets->n; k++)
            if (sync->buckets->bucket[k].step == end && !sync->buckets->bucket[k].reduced)
                reduce_bucket(b, sync, k);
    }
}

int moe_lower_sync_bucket(struct moe_builder *b, struct moe_lower_sync *sync, int layer)
{
    int block = -1;
    for (int k = 0; k < sync->buckets->n && sync->n_early; k++) {
        if (sync->buckets->bucket[k].complete != layer) continue;
        if (block < 0) block = new_block(b, sync, 0, "buckets", false);
        lower_bucket(b, sync, k, 0, sync->n_early);
    }
    return block;
}

/* The parameters of layers, latest first, then the others; what is in buckets. */
static void lower_pass(struct moe_builder *b, const struct moe_lower_sync *sync, int from, int to)
{
    int early = sync->n_early > from ? sync->n_early : from;
    if (early < to) {
        int block = lower_steps(b, sync, early, to, true);
        const struct moe_role role = b->s->roles[b->role];
        for (int layer = role.end_layer - 1; layer >= role.first_layer; layer--)
            moe_run_block(b, block, layer);
    }
    moe_run_block(b, lower_steps(b, sync, from, to, false), 0);
    lower_buckets(b, sync, from, to);
}

/* Is a step of any of the experts' parameters, or of the shared ones? */
static bool is_of_kind(const struct moe_schedule *s, const struct moe_sync_step *step, bool experts)
{
    for (int p = 0; p < s->n_params; p++)
        if (s->params[p].buffer >= 0 && (s->params[p].shard >= 0) == experts &&
            moe_sync_is_of(step, &s->params[p]))
            return true;
    return false;
}

/* The ranks that a norm must cover: one of each stage that splits the parameters as a reduce_scatter over
 * `shares` left them. Where parameters of a kind are shared out over several groups no one sum covers all. */
static int norm_over(const struct moe_builder *b, const struct moe_lower_sync *sync, bool experts, int alone)
{
    const struct moe_groups *y = &sync->groups;
    int shares = MOE_GROUP_NONE;
    for (int i = 0; i < sync->order.n; i++) {
        const struct moe_sync_step *step = &sync->order.step[i];
        if (step->act == MOE_SYNC_REDUCE_SCATTER && is_of_kind(b->s, step, experts)) shares = step->over;
    }
    switch (shares) {
    case MOE_GROUP_NONE: return experts ? y->ep_pp : y->pp >= 0 ? y->pp : alone;
    case MOE_GROUP_EP: return experts ? 0 : y->ep_pp;
    case MOE_GROUP_EDP: return experts || y->pp >= 0 ? 0 : y->edp;
    default: return 0;
    }
}

/* Both norms exist as soon as one is asked for: what clips reads both. */
static void make_norms(struct moe_builder *b, struct moe_lower_sync *sync)
{
    if (sync->shared_norm) return;
    int *key = moe_alloc((size_t)b->s->n_ranks, sizeof *key), alone = -1;
    for (int r = 0; r < b->s->n_ranks; r++) key[r] = r;
    if (sync->groups.pp < 0) alone = moe_new_comm(b, "alone", b->s->n_ranks, key);
    free(key);
    sync->shared_norm = moe_new_norm(b, "shared_norm", norm_over(b, sync, false, alone));
    sync->expert_norm = moe_new_norm(b, "expert_norm", norm_over(b, sync, true, alone));
}

static void emit_zero(struct moe_builder *b, const struct moe_lower_sync *sync, const char *name, int norm)
{
    struct moe_op op = {
        .kernel = MOE_K_ZERO, .type = MOE_F64, MOE_WRITES(moe_ref(norm)), MOE_SIZES(sync->one)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

static void emit_norm_sum(struct moe_builder *b, const struct moe_lower_sync *sync, const char *name,
                          int comm, int norm)
{
    struct moe_ref ref = moe_ref(norm);
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLREDUCE,
                        .comm = comm,
                        .type = MOE_F64,
                        .stream = MOE_STREAM_COMM,
                        .send = sync->one,
                        .recv = sync->one,
                        MOE_READS(ref),
                        MOE_WRITES(ref)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
}

bool moe_sync_measures(const struct moe_schedule *s, const struct moe_sync_step *step, bool experts)
{
    return step->act == MOE_SYNC_NORM && is_of_kind(s, step, experts);
}

/* The last step by which this stage measures parameters of a kind; -1: none. */
static int last_norm(const struct moe_builder *b, const struct moe_lower_sync *sync, bool experts)
{
    int i = sync->order.n - 1;
    for (; i >= 0; i--)
        if (is_on(b, &sync->order.step[i]) && moe_sync_measures(b->s, &sync->order.step[i], experts)) break;
    return i;
}

/* Norms start at 0 before the first step that measures, take every gradient's squares, and are summed behind
 * the last one. */
static void lower_norms(struct moe_builder *b, struct moe_lower_sync *sync, int from, int to)
{
    bool first = true;
    for (int i = 0; i < from; i++) first &= sync->order.step[i].act != MOE_SYNC_NORM;
    make_norms(b, sync);
    if (first) {
        moe_run_block(b, moe_new_block(b, "norm", MOE_CLIPPING, false), 0);
        emit_zero(b, sync, "zero_shared", sync->shared_norm);
        emit_zero(b, sync, "zero_expert", sync->expert_norm);
    }
    lower_pass(b, sync, from, to);
    int block = -1;
    for (int experts = 0; experts < 2; experts++) {
        int last = last_norm(b, sync, experts);
        int comm = last < 0 ? -1 : moe_sync_comm(sync, sync->order.step[last].over);
        if (last < from || last >= to || !sync->order.step[last].over || !is_shared(b->s, comm)) continue;
        if (block < 0) moe_run_block(b, block = moe_new_block(b, "norm", MOE_CLIPPING, false), 0);
        b->line = sync->order.step[last].line;
        emit_norm_sum(b, sync, experts ? "sum_expert_norm" : "sum_shared_norm", comm,
                      experts ? sync->expert_norm : sync->shared_norm);
        b->line = 0;
    }
}

/* Steps that go parameter by parameter together. */
static int kind_of(const struct moe_sync_step *step)
{
    return reduces(step) ? MOE_SYNC_DIVIDE : step->act;
}

/* Of the stage that is being written, when they are asked for first. */
static void make_buckets(struct moe_builder *b, struct moe_lower_sync *sync)
{
    if (sync->buckets) return;
    sync->buckets = moe_alloc(1, sizeof *sync->buckets);
    moe_buckets_make(b, sync, sync->buckets);
}

void moe_lower_sync(struct moe_builder *b, struct moe_lower_sync *sync)
{
    make_buckets(b, sync);
    for (int from = 0, to; from < sync->order.n; from = to) {
        int kind = kind_of(&sync->order.step[from]);
        for (to = from + 1; to < sync->order.n && kind_of(&sync->order.step[to]) == kind; to++) continue;
        if (kind == MOE_SYNC_NORM) {
            lower_norms(b, sync, from, to);
            continue;
        }
        if (kind == MOE_SYNC_ALL_GATHER) {
            lower_gathers(b, sync, from, to);
            continue;
        }
        if (kind == MOE_SYNC_CLIP) make_norms(b, sync);
        lower_pass(b, sync, from, to);
    }
    moe_buckets_free(sync->buckets);
    free(sync->buckets);
    sync->buckets = NULL;
}

int moe_lower_sync_early(struct moe_builder *b, struct moe_lower_sync *sync)
{
    make_buckets(b, sync);
    for (int i = 0; i < sync->order.n && kind_of(&sync->order.step[i]) == MOE_SYNC_DIVIDE; i++)
        if (reduces(&sync->order.step[i])) sync->n_early = i + 1;
    return sync->n_early ? lower_steps(b, sync, 0, sync->n_early, true) : -1;
}

/* Parameters that are broadcast, each once, among ranks that all have it. */
static int read_broadcasts(struct moe_builder *b, const struct moe_scenario *sc,
                           const struct moe_lower_sync *sync)
{
    for (int i = 0; i < sc->sync.n; i++) {
        const struct moe_sync_step *step = &sc->sync.step[i];
        if (step->act != MOE_SYNC_BROADCAST) continue;
        if (step->over == MOE_GROUP_WORLD && sc->pipeline_parallel > 1)
            return moe_fail(MOE_EINPUT,
                            "%s:%d: gradient_sync: broadcast over world: stages of a pipeline have other "
                            "parameters, expected dp",
                            sc->name, step->line);
        for (int p = 0; p < b->s->n_params; p++) {
            struct moe_param *param = &b->s->params[p];
            if (param->buffer < 0 || !moe_sync_is_of(step, param)) continue;
            if (param->broadcast)
                return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: %s is broadcast already", sc->name,
                                step->line, param->name);
            param->broadcast = true;
            param->broadcast_comm = moe_sync_comm(sync, step->over);
            param->broadcast_line = step->line;
        }
    }
    return MOE_OK;
}

int moe_lower_sync_open(struct moe_builder *b, const struct moe_scenario *sc, const struct moe_groups *groups,
                        struct moe_lower_sync *out)
{
    static const struct moe_sync_step own_mean = {
        .act = MOE_SYNC_DIVIDE, .of = "all", .n_by = 1, .by = {{MOE_FACTOR_TOKENS, 0}}};
    bool mean = sc->loss == MOE_MEAN_OF_RANKS;
    struct moe_sync_order written = sc->sync;
    b->s->sync_line = sc->sync.line;
    MOE_TRY(moe_sync_check(b, sc));
    if (!sc->sync.n) moe_sync_default(mean, sc->clip_norm > 0, sc->distributed.on, &written);
    *out = (struct moe_lower_sync){.sc = sc, .groups = *groups, .one = moe_const(b, 1)};
    out->order.step = moe_alloc((size_t)written.n + mean, sizeof *written.step);
    if (mean) out->order.step[out->order.n++] = own_mean;
    for (int i = 0; i < written.n; i++)
        if (written.step[i].act != MOE_SYNC_BROADCAST) out->order.step[out->order.n++] = written.step[i];
    if (!sc->sync.n) moe_sync_free(&written);
    int err = read_broadcasts(b, sc, out);
    if (err < 0) moe_sync_free(&out->order);
    return err;
}
