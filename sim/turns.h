/* turns - processes of a host take turns on its cores.
 *
 * A rank that has work holds a core of its node, or waits for one in a queue. While others wait, a rank that
 * has held its core for a slice goes to the end of the queue in the middle of its work; without others it
 * goes on. It keeps the core between two pieces of work, until it leaves. Worked example: 1 core, slice 4;
 * ranks 0 and 1 come at 0 with 6 and 3 of work: rank 0 runs 0-4 and 7-9, rank 1 runs 4-7. Sizes met: 1 to 64
 * ranks. */
#ifndef MOE_TURNS_H
#define MOE_TURNS_H

#include "sim/base.h"

struct moe_turn {
    enum { MOE_TURN_AWAY, MOE_TURN_QUEUED, MOE_TURN_HOLDS } state;
    bool working;         /* else it holds the core between two pieces of work */
    moe_ps since;         /* since when it holds the core */
    moe_ps resumed, left; /* work that was left then */
    int next;             /* in the queue of its node, or -1 */
};

struct moe_turns {
    int n_ranks, per_node;
    moe_ps slice, now;
    struct moe_turn *rank; /* [n_ranks] */
    struct moe_turn_node {
        int idle;        /* cores */
        int first, last; /* queue, first -1: empty */
    } * node;
    int n_ended, *ended; /* [n_ranks] ranks whose work ended, in their order */
};

/* Nodes of per_node ranks, each with `cores` > 0; slice > 0: in turns of 0 nobody works. */
void moe_turns_init(struct moe_turns *t, int n_ranks, int per_node, int cores, moe_ps slice);
void moe_turns_free(struct moe_turns *t); /* what it holds */

/* A rank has `work` to do; it had none. Work of 0 ends as soon as the rank has a core.
 * Time never goes back. */
void moe_turns_work(struct moe_turns *t, moe_ps now, int rank, moe_ps work);
/* A rank without work gives up its core, if it has one. */
void moe_turns_leave(struct moe_turns *t, moe_ps now, int rank);

/* When the next work ends or the next turn is over, INT64_MAX: never. Cost, also of
 * moe_turns_end: O(ranks). */
moe_ps moe_turns_next(const struct moe_turns *t);
/* Goes on to `now`, the value of moe_turns_next: ended [n_ended]. */
void moe_turns_end(struct moe_turns *t, moe_ps now);

#endif
