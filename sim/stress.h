/* stress - routings and tokens that a configuration was not thought for; for each class of error the smallest
 * that was found to show it.
 *
 * Every layer gets the same. Routings of a rank: each expert as many rows as the others; all to the first
 * experts; all to the experts of one rank; none to the first expert; none to the experts of the first rank;
 * every other rank to a few experts. Tokens of a rank: 1, 2, 3, 4, 6, 9, ... up to those of the scenario; as
 * many on all ranks, one less on the last, or one alone on it (a short last batch). Sizes at which evenly
 * spread rows on all ranks break what they do not at the scenario's own do not count for that class: too
 * small for it, not adverse. Ties are not tried: counts do not tell them.
 *
 * Each that breaks is made smaller: its size by bisection, then by single steps (of up to 64, for what holds
 * at multiples alone); tokens of single ranks in the same way, down to none where the loss allows it; ranks
 * that need no such routing get one that is spread evenly. No token can be taken from one rank of the result,
 * and no rank be evened out, without losing the error, where the search came to its end.
 * Cost: at most 2^19 / (ranks * layers * micro-batches) checks, from 60 to 3,000 of them, so that a large
 * scenario is not searched to the end; what is not is said. */
#ifndef MOE_STRESS_H
#define MOE_STRESS_H

#include "sim/check/check.h"
#include "sim/scenario.h"

struct moe_stressed {
    uint32_t classes;    /* bits of those that it is the smallest of */
    const char *routing; /* of the adverse ranks, in words */
    int n_adverse;
    const int *adverse; /* [n_adverse] ranks that route so, ascending; the rows of others are spread evenly */
    int64_t tokens;     /* of a micro-batch, on all ranks of a stage */
    bool complete;      /* the search for these classes came to its end */
    int64_t too_small;  /* the most tokens a rank at which a class was not counted: broken spread evenly; 0 */
    const struct moe_scenario *scenario; /* the one given, with other tokens and counts */
    const struct moe_verdicts *verdicts;
};

/* Calls found for the smallest of each class, ascending; once for classes that share it. Smaller: fewer
 * tokens, then fewer adverse ranks. *n_tried: out, checks. Errors: those of moe_lower with counts. */
int moe_stress(const struct moe_scenario *sc, void (*found)(void *ctx, const struct moe_stressed *s),
               void *ctx, int *n_tried);

#endif
