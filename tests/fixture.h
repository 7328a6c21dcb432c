/* fixture - schedules that several tests start from. */
#ifndef MOE_TEST_FIXTURE_H
#define MOE_TEST_FIXTURE_H

#include "sim/lower/lower.h"
#include "sim/routing.h"
#include "sim/values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Hidden 8, ffn 6, 8 experts top-2, 2 heads, sequences of 4; layout, more: extra YAML of the layout, or NULL,
 * and extra lines; `tokens` is a number or a YAML list. */
static inline struct moe_scenario *fixture_layout(int layers, int ranks, int ep, const char *layout,
                                                  const char *tokens, const char *more)
{
    char text[1536];
    snprintf(text, sizeof text,
             "model: {layers: %d, hidden: 8, ffn: 6, experts: 8, top_k: 2, heads: 2, sequence: 4}\n"
             "layout: {ranks: %d, expert_parallel: %d%s%s}\ntokens_per_rank: %s\n%s\n",
             layers, ranks, ep, layout ? ", " : "", layout ? layout : "", tokens, more);
    struct moe_scenario *sc = NULL;
    if (moe_scenario_parse("fixture.yaml", text, &sc) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    return sc;
}

/* 2 layers, one stage. */
static inline struct moe_scenario *fixture_scenario(int ranks, int ep, const char *tokens, const char *more)
{
    return fixture_layout(2, ranks, ep, NULL, tokens, more);
}

static inline struct moe_schedule *fixture_schedule(const struct moe_scenario *sc)
{
    struct moe_schedule *s = NULL;
    if (moe_lower(sc, &s) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    return s;
}

static inline struct moe_routing *fixture_routing(const struct moe_scenario *sc)
{
    return moe_scenario_routing(sc);
}

/* The operation called `name` of the block with this pass in a role; aborts when there is none. */
static inline struct moe_op *fixture_op(struct moe_role *role, enum moe_pass pass, const char *name)
{
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops && role->blocks[b].pass == pass; o++)
            if (!strcmp(role->blocks[b].ops[o].name, name)) return &role->blocks[b].ops[o];
    moe_bug(__FILE__, __LINE__, name);
}

static inline struct moe_block *fixture_block(struct moe_role *role, const struct moe_op *op)
{
    for (int b = 0; b < role->n_blocks; b++)
        if (op >= role->blocks[b].ops && op < role->blocks[b].ops + role->blocks[b].n_ops)
            return &role->blocks[b];
    moe_bug(__FILE__, __LINE__, op->name);
}

/* A new expression at the end of the pool. */
static inline int fixture_expr(struct moe_schedule *s, struct moe_expr e)
{
    s->exprs = moe_grow(s->exprs, &s->cap_exprs, s->n_exprs + 1, sizeof *s->exprs);
    s->exprs[s->n_exprs] = e;
    return s->n_exprs++;
}

/* One fault on one rank, of the four kinds that a user makes; returns the name of the
 * operation it touches. */
static inline const char *fixture_mutate(struct moe_schedule *s, const char *fault, int rank)
{
    struct moe_role *role = moe_schedule_split_role(s, rank);
    if (!strcmp(fault, "drop")) {
        struct moe_op *op = fixture_op(role, MOE_FORWARD, "dispatch");
        moe_block_delete(fixture_block(role, op), op->id);
        return "dispatch";
    }
    if (!strcmp(fault, "drop_sum")) {
        struct moe_op *op = fixture_op(role, MOE_SYNC, "sum_router");
        moe_block_delete(fixture_block(role, op), op->id);
        return "sum_router";
    }
    if (!strcmp(fault, "size")) { /* sends half of what the others expect */
        struct moe_op *op = fixture_op(role, MOE_FORWARD, "dispatch");
        int hidden = s->exprs[op->send].b;
        int half = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = s->exprs[hidden].value / 2});
        op->send = fixture_expr(s, (struct moe_expr){MOE_EXPR_MUL, .a = s->exprs[op->send].a, .b = half});
        return "dispatch";
    }
    if (!strcmp(fault, "group")) { /* sums over the ranks with the same experts instead of all */
        fixture_op(role, MOE_SYNC, "sum_router")->comm = 2;
        return "sum_router";
    }
    if (!strcmp(fault, "scale")) {
        struct moe_op *op = fixture_op(role, MOE_SYNC, "scale_router");
        op->divisor = fixture_expr(s, (struct moe_expr){MOE_EXPR_CONST, .value = 7});
        return "scale_router";
    }
    moe_bug(__FILE__, __LINE__, fault);
}

/* The dispatcher of a user who tries something: rows go out, come home, and go out again, before they are
 * used. Right, and slow. Written forward only; copied from nowhere in the library but built from its
 * operations. */
static inline struct moe_ref toy_move(struct moe_builder *b, const struct moe_layer *m, const char *name,
                                      struct moe_ref from, int send, int recv, int rows)
{
    struct moe_ref to =
        moe_ref(moe_new_buffer(b, name, MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, rows, m->H)));
    struct moe_op op = {.kind = MOE_COLLECTIVE,
                        .collective = MOE_ALLTOALL,
                        .comm = m->ep_comm,
                        .type = m->type,
                        .stream = MOE_STREAM_COMM,
                        .send = send,
                        .recv = recv,
                        .needs_grad = 1,
                        MOE_READS(from),
                        MOE_WRITES(to)};
    moe_copy_name(op.name, name);
    moe_emit(b, op);
    return to;
}

static inline void toy_forward(struct moe_builder *b, const struct moe_layer *m)
{
    int e = m->n_experts / m->ep_size, P = moe_const(b, m->ep_size), e_expr = moe_const(b, e);
    struct moe_ref got =
        moe_ref(moe_new_buffer(b, "got", MOE_BUF_INDEX, MOE_I64, m->n_layers, moe_const(b, m->n_experts)));
    struct moe_symbol y = {.scope = MOE_SCOPE_PEER, .comm = m->ep_comm, .rows = m->ep_size, .cols = e};
    int to = moe_new_symbol(b, "to", m->counts.buffer, true, y),
        from = moe_new_symbol(b, "from", got.buffer, true, y);
    y.scope = MOE_SCOPE_EXPERT;
    int group = moe_new_symbol(b, "group", got.buffer, false, y);
    int there = moe_mul(b, moe_sym(b, to), m->H), here = moe_mul(b, moe_sym(b, from), m->H);
    int n_home = m->n_rows, n_away = moe_sum(b, from);
    struct moe_ref sent = moe_ref(
        moe_new_buffer(b, "sent", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n_home, m->H)));
    struct moe_ref rows = moe_ref(
        moe_new_buffer(b, "rows", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n_away, m->H)));
    struct moe_ref leaving = moe_ref(
        moe_new_buffer(b, "leaving", MOE_BUF_ACTIVATION, m->type, m->n_layers, moe_mul(b, n_away, m->H)));
    moe_emit(b, (struct moe_op){.name = "tell",
                                .kind = MOE_COLLECTIVE,
                                .collective = MOE_ALLTOALL,
                                .type = MOE_I64,
                                .comm = m->ep_comm,
                                .stream = MOE_STREAM_COMM,
                                .send = e_expr,
                                .recv = e_expr,
                                MOE_READS(m->counts),
                                MOE_WRITES(got)});
    moe_emit(b, (struct moe_op){.name = "learn", .kind = MOE_HOST_SYNC, MOE_READS(m->counts, got)});
    moe_emit(b, (struct moe_op){.name = "permute",
                                .kernel = MOE_K_PERMUTE,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(m->x, m->slot),
                                MOE_WRITES(sent),
                                MOE_SIZES(m->T, m->H, m->K, n_home)});
    struct moe_ref out = toy_move(b, m, "out", sent, there, here, n_away);
    struct moe_ref home = toy_move(b, m, "home", out, here, there, n_home);
    struct moe_ref again = toy_move(b, m, "out_again", home, there, here, n_away);
    moe_emit(b, (struct moe_op){.name = "sort",
                                .kernel = MOE_K_SORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(again, got),
                                MOE_WRITES(rows),
                                MOE_SIZES(P, e_expr, m->H)});
    struct moe_ref done = moe_lower_experts(b, m, rows, n_away, group);
    moe_emit(b, (struct moe_op){.name = "unsort",
                                .kernel = MOE_K_UNSORT_ROWS,
                                .type = m->type,
                                .needs_grad = 1,
                                MOE_READS(done, got),
                                MOE_WRITES(leaving),
                                MOE_SIZES(P, e_expr, m->H)});
    struct moe_ref back = toy_move(b, m, "back", leaving, here, there, n_home);
    moe_emit(b, (struct moe_op){.name = "unpermute",
                                .kernel = MOE_K_COMBINE,
                                .type = m->type,
                                .needs_grad = 3,
                                MOE_READS(back, m->prob, m->expert, m->slot),
                                MOE_WRITES(m->y),
                                MOE_SIZES(m->T, m->H, m->K, m->E, n_home)});
}
static const struct moe_dispatcher toy_dispatcher = {"toy", toy_forward, .pads = false};

/* As moe_lower_with, which only fails for names that the fixtures do not use. */
static inline struct moe_schedule *fixture_lower(const struct moe_scenario *sc,
                                                 const struct moe_dispatcher *d)
{
    struct moe_schedule *s = NULL;
    if (moe_lower_with(sc, d, &s) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    return s;
}

#endif
