/* stress - routings and tokens that a configuration was not thought for; for each class of error the smallest
 * that shows it.
 *
 * Every layer gets the same. Routings: each expert as many rows as the others; all to the first experts; all
 * to the experts of one rank; none to the first expert; none to the experts of the first rank; every other
 * rank to a few experts. Tokens of a rank: 1, 2, 3, 4, 6, 9, ... up to those of the scenario; as many on all
 * ranks, one less on the last, or one alone on it (a short last batch). Sizes at which evenly
 * spread rows break what they do not at the scenario's own are left out: too small for it, not adverse. Ties
 * are not tried: counts do not tell them. Cost: that of a check for each of up to 18 of them and size. */
#ifndef MOE_STRESS_H
#define MOE_STRESS_H

#include "sim/check/check.h"
#include "sim/scenario.h"

struct moe_stressed {
    const char *routing, *tokens;        /* in words */
    const struct moe_scenario *scenario; /* the one given, with other tokens and counts */
    const struct moe_verdicts *verdicts;
};

/* Calls found for each that shows a class that none before did. *n_tried: out. Errors: those of moe_lower
 * with counts. */
int moe_stress(const struct moe_scenario *sc, void (*found)(void *ctx, const struct moe_stressed *s),
               void *ctx, int *n_tried);

#endif
