/* lower_megatron.c - the capacity rule `megatron`: each rank keeps at most C rows of its own for each expert.
 *
 * C = ceil(T * K / E * factor) in double, from the rank's own tokens, no agreement with other ranks
 * (founding_cases.md A.0b 1; vectors in tests/unit/test_capacity.c). Above C rows the most probable stay, or
 * the first. Padded: every expert gets exactly C rows of each rank, the rest zero. Probabilities are not
 * renormalised. */
#include "sim/lower.h"

void moe_limit_megatron(struct moe_builder *b, struct moe_layer *m, const struct moe_capacity *capacity)
{
    /* Tokens that share a capacity: the rank's, or a fixed number when a run is cut into parts. */
    int G = capacity->group_tokens ? moe_const(b, capacity->group_tokens) : m->T;
    int C = moe_ceil(b, moe_mul(b, G, m->K), m->E, capacity->factor);
    int n_groups = moe_ceil(b, m->T, G, 1), TK = moe_mul(b, m->T, m->K), P = moe_const(b, m->ep_size);
    struct moe_ref slot = moe_ref(moe_new_buffer(b, "kept_slot", MOE_BUF_INDEX, MOE_I32, m->n_layers, TK));
    struct moe_ref expert =
        moe_ref(moe_new_buffer(b, "kept_expert", MOE_BUF_INDEX, MOE_I32, m->n_layers, TK));
    struct moe_ref kept = moe_ref(moe_new_buffer(b, "kept", MOE_BUF_INDEX, MOE_I64, m->n_layers, m->E));
    struct moe_op op = {.name = "limit",
                        .kernel = MOE_K_LIMIT,
                        .type = m->type,
                        .mode = (capacity->by_position ? MOE_LIMIT_BY_POSITION : 0) |
                                (capacity->pad ? MOE_LIMIT_PAD : 0),
                        MOE_READS(m->prob, m->expert, m->counts),
                        MOE_WRITES(slot, expert, kept),
                        MOE_SIZES(m->T, m->E, m->K, C, G, P)};
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
