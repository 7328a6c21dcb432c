/* claims.c - see internal.h: what must hold before the step begins, and in what order groups are created. */
#include "sim/check/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void check_claim(struct moe_checker *c, int rank, const struct moe_claim *claim)
{
    int64_t low = moe_eval(c->s, c->host, claim->low, rank, 0, 0),
            high = moe_eval(c->s, c->host, claim->high, rank, 0, 0);
    if (moe_eval_exceeds(c->s, c->host, claim->low, rank, 0, 0) ||
        moe_eval_exceeds(c->s, c->host, claim->high, rank, 0, 0))
        moe_check_verdict(c, claim->check_class, rank, moe_check_named(claim->of, -1),
                          "%s: one of the two exceeds 64 bits", claim->why);
    else if (claim->exact && low != high)
        moe_check_verdict(c, claim->check_class, rank, moe_check_named(claim->of, -1),
                          "%s, so on rank %d: %" PRId64 ", expected %" PRId64, claim->why, rank, low, high);
    else if (low > high)
        moe_check_verdict(c, claim->check_class, rank, moe_check_named(claim->of, -1),
                          "%s, so on rank %d: %" PRId64 " is above %" PRId64, claim->why, rank, low, high);
}

/* A stream that is captured cannot be waited for. */
static void check_graph(struct moe_checker *c, int role)
{
    const struct moe_role *y = &c->s->roles[role];
    for (int n = 0; n < y->n_instances && c->s->graph; n++) {
        struct moe_here h = {.block_id = y->itinerary[n].block, .layer = y->itinerary[n].layer};
        h.block = &y->blocks[h.block_id];
        for (int o = 0; o < h.block->n_ops; o++) {
            h.op = &h.block->ops[o];
            if (h.op->kind != MOE_HOST_SYNC || h.block->pass > MOE_BACKWARD) continue;
            for (int r = 0; r < c->s->n_ranks; r++)
                if (c->s->role_of[r] == role)
                    moe_check_verdict(c, 10, r, moe_check_label(&h),
                                      "waits for the device, which cannot be captured in a CUDA graph");
        }
    }
}

void moe_check_claims(struct moe_checker *c)
{
    for (int i = 0; i < c->s->n_claims; i++)
        for (int r = 0; r < c->s->n_ranks; r++) check_claim(c, r, &c->s->claims[i]);
    for (int role = 0; role < c->s->n_roles; role++) check_graph(c, role);
}

/* What is broadcast before the first step is the receiver's own tensor. */
void moe_check_start(struct moe_checker *c)
{
    for (int i = 0; i < c->s->n_params; i++) {
        const struct moe_param *p = &c->s->params[i];
        if (!p->broadcast || p->shard < 0) continue;
        const struct moe_comm *over = &c->s->comms[p->broadcast_comm], *split = &c->s->comms[p->shard];
        for (int r = 0; r < c->s->n_ranks; r++) {
            int from = over->members[over->first[over->group_of[r]]];
            if (split->index_of[from] == split->index_of[r]) continue;
            moe_check_verdict(c, 16, r,
                              moe_check_about(moe_check_named("broadcast", -1), "", p, p->broadcast_line),
                              "begins as a copy of that of another rank, which holds other experts of it, "
                              "so on rank %d: of rank %d",
                              r, from);
        }
    }
}

/* ---- creation of groups ---- */

/* The i-th group of a communicator that a rank creates; -1: it has created all that it does. */
static int created(const struct moe_checker *c, const struct moe_comm *comm, int rank, int i)
{
    int own = comm->group_of[rank];
    if (i == 0) return own;
    if (c->s->creation == MOE_CREATE_OWN || i >= comm->n_groups) return -1;
    return i - (i <= own);
}

/* "{0,2}" */
static void describe(const struct moe_comm *comm, int group, char out[64])
{
    int at = snprintf(out, 64, "{"), from = comm->first[group], end = comm->first[group + 1];
    for (int i = from; i < end && at < 50; i++)
        at += snprintf(out + at, 64 - (size_t)at, "%s%d", i > from ? "," : "", comm->members[i]);
    snprintf(out + at, 64 - (size_t)at, at < 50 ? "}" : "...}");
}

/* All ranks enter each creation, so that their lists must be equal; those that only members enter are made in
 * the order of communicators, in which no two ranks can wait for each other. Where every rank is a group by
 * itself nobody waits for another, whichever it creates first; frameworks that do without such a group, and
 * the groups of one rank that norms are summed over here, are no other case. */
void moe_check_creation(struct moe_checker *c)
{
    const struct moe_schedule *s = c->s;
    char here[64], there[64];
    if (s->creation == MOE_CREATE_ALL || s->creation == MOE_CREATE_OWN_LOCALLY) return;
    for (int i = 1; i < s->n_comms; i++) {
        const struct moe_comm *comm = &s->comms[i];
        for (int r = 1; r < s->n_ranks && comm->n_groups < s->n_ranks; r++)
            for (int n = 0; n <= comm->n_groups; n++) {
                int a = created(c, comm, 0, n), b = created(c, comm, r, n);
                if (a == b) continue;
                describe(comm, a, here);
                describe(comm, b, there);
                moe_check_verdict(
                    c, 13, r, moe_check_named(comm->name, -1),
                    "enters the creation of group %s where rank 0 enters that of %s: creation is "
                    "collective over all ranks",
                    there, here);
                return; /* whoever waits there creates nothing more */
            }
    }
}
