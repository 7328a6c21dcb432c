/* limit.c - what capacity rules are made of (lower.h): counts agreed on, rows limited, probabilities
 * normalised; and the rule `dropless`. */
#include "sim/lower/lower.h"

static struct moe_ref number(struct moe_builder *b, const struct moe_layer *m, const char *name)
{
    return moe_ref(moe_new_buffer(b, name, MOE_BUF_INDEX, MOE_I64, m->n_layers, moe_const(b, 1)));
}

/* What the host makes of a number on the device: the largest of the group when they agree,
 * then a host sync. */
static int read_number(struct moe_builder *b, const struct moe_layer *m, const char *name, struct moe_ref own,
                       bool agree)
{
    struct moe_ref known = own;
    char text[MOE_NAME + 8] = "group_";
    int one = moe_const(b, 1);
    if (agree) {
        moe_copy_name(text + 6, name);
        known = number(b, m, text);
        struct moe_op op = {.kind = MOE_COLLECTIVE,
                            .collective = MOE_ALLREDUCE,
                            .reduction = MOE_REDUCE_MAX,
                            .comm = m->ep_comm,
                            .type = MOE_I64,
                            .stream = MOE_STREAM_COMM,
                            .send = one,
                            .recv = one,
                            MOE_READS(own),
                            MOE_WRITES(known)};
        moe_copy_name(op.name, text);
        moe_emit(b, op);
    }
    struct moe_op sync = {.kind = MOE_HOST_SYNC, MOE_READS(known)};
    char what[MOE_NAME + 8] = "read_";
    moe_copy_name(what + 5, name);
    moe_copy_name(sync.name, what);
    moe_emit(b, sync);
    struct moe_symbol y = {.scope = MOE_SCOPE_RANK, .comm = -1, .rows = 1, .cols = 1};
    /* A sum has the same value whatever peer is asked about. */
    return moe_sum(b, moe_new_symbol(b, agree ? text : name, known.buffer, false, y));
}

int moe_lower_largest(struct moe_builder *b, const struct moe_layer *m, bool agree)
{
    struct moe_ref own = number(b, m, "largest_count");
    moe_emit(b, (struct moe_op){.name = "largest_count",
                                .kernel = MOE_K_LARGEST,
                                .type = MOE_I64,
                                MOE_READS(m->counts),
                                MOE_WRITES(own),
                                MOE_SIZES(m->E)});
    return read_number(b, m, "largest_count", own, agree);
}

int moe_lower_most_tokens(struct moe_builder *b, const struct moe_layer *m)
{
    struct moe_ref own = number(b, m, "own_tokens");
    moe_emit(
        b, (struct moe_op){
               .name = "own_tokens", .kernel = MOE_K_SET, .type = MOE_I64, MOE_WRITES(own), MOE_SIZES(m->T)});
    return read_number(b, m, "most_tokens", own, true);
}

int moe_lower_group(struct moe_builder *b, const struct moe_capacity *capacity, int tokens)
{
    return capacity->group_tokens ? moe_min(b, moe_const(b, capacity->group_tokens), tokens) : tokens;
}

/* Number of the rank's first token. */
static int first_token(struct moe_builder *b, const struct moe_layer *m)
{
    struct moe_symbol y = {.scope = MOE_SCOPE_BEFORE, .comm = m->stage_comm};
    return moe_sym(b, moe_new_symbol(b, "tokens_before", -1, false, y));
}

void moe_lower_limit(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity,
                     struct moe_limiting limit)
{
    /* A rank without tokens pads all the same, as one group. */
    int C = limit.capacity, one = moe_const(b, 1), G = moe_max(b, moe_lower_group(b, capacity, m->T), one);
    int first = limit.order == MOE_LIMIT_RANDOM ? first_token(b, m) : moe_const(b, 0);
    int n_groups = moe_max(b, moe_ceil(b, m->T, G, 1), one), TK = moe_mul(b, m->T, m->K);
    struct moe_ref slot =
        moe_ref(moe_new_buffer(b, "kept_row_of_choice", MOE_BUF_INDEX, MOE_I32, m->n_layers, TK));
    struct moe_ref expert =
        moe_ref(moe_new_buffer(b, "kept_expert", MOE_BUF_INDEX, MOE_I32, m->n_layers, TK));
    struct moe_ref kept = moe_ref(moe_new_buffer(b, "kept", MOE_BUF_INDEX, MOE_I64, m->n_layers, m->E));
    struct moe_op op = {.name = "limit",
                        .kernel = MOE_K_LIMIT,
                        .type = m->type,
                        .mode = limit.order | (capacity->pad ? MOE_LIMIT_PAD : 0),
                        .seed = (uint64_t)capacity->seed,
                        .low = limit.low,
                        .high = limit.high,
                        .needs = limit.needs,
                        MOE_READS(m->prob, m->expert, m->counts),
                        MOE_WRITES(slot, expert, kept),
                        MOE_SIZES(m->T, m->E, m->K, C, G, first)};
    if (capacity->pad) {
        m->padded_arrive =
            moe_ref(moe_new_buffer(b, "padded_arrive", MOE_BUF_INDEX, MOE_I64, m->n_layers, m->E));
        op.writes[op.n_writes++] = m->padded_arrive;
    }
    moe_emit(b, op);
    m->expert = expert;
    m->slot = slot;
    m->counts = kept;
    m->n_rows_from_counts = !capacity->pad;
    if (capacity->pad) {
        m->padded_rows = moe_mul(b, C, n_groups);
        m->n_rows = moe_mul(b, m->padded_rows, m->E);
        return;
    }
    struct moe_symbol y = {.scope = MOE_SCOPE_RANK, .comm = -1, .rows = 1, .cols = m->n_experts};
    m->n_rows = moe_sym(b, moe_new_symbol(b, "kept_rows", kept.buffer, true, y));
}

void moe_lower_normalize(struct moe_builder *b, struct moe_layer *m)
{
    struct moe_ref gate = moe_rows(b, m, "gate", m->T, m->E);
    moe_emit(b, (struct moe_op){.name = "normalize",
                                .kernel = MOE_K_NORMALIZE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(m->prob, m->expert),
                                MOE_WRITES(gate),
                                MOE_SIZES(m->T, m->E, m->K)});
    m->prob = gate;
}

void moe_limit_dropless(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity)
{
    if (!capacity->pad) return; /* everything leaves as it was chosen */
    moe_lower_limit(
        b, m, capacity,
        (struct moe_limiting){.capacity = moe_lower_largest(b, m, true), .order = MOE_LIMIT_BY_POSITION});
}
