/* sync_check.c - what a list of gradient_sync must keep to, beside its words (sync.c). */
#include "sim/lower/lower.h"

#include <string.h>

/* A norm is summed once: all steps that measure into it name one group. */
static int check_norms(const struct moe_builder *b, const struct moe_scenario *sc)
{
    for (int experts = 0; experts < 2; experts++) {
        const struct moe_sync_step *first = NULL;
        for (int i = 0; i < sc->sync.n; i++) {
            const struct moe_sync_step *step = &sc->sync.step[i];
            if (!moe_sync_measures(b->s, step, experts)) continue;
            if (!first) first = step;
            if (first->over != step->over)
                return moe_fail(
                    MOE_EINPUT, "%s:%d: gradient_sync: the norm of %s goes over %s, on line %d over %s",
                    sc->name, step->line, experts ? "experts" : "shared parameters",
                    moe_sync_group_text[step->over], first->line, moe_sync_group_text[first->over]);
        }
    }
    return MOE_OK;
}

/* A parameter is shared out once, and gathered from where it was. */
static int check_shares(const struct moe_builder *b, const struct moe_scenario *sc)
{
    for (int i = 0; i < sc->sync.n; i++) {
        const struct moe_sync_step *step = &sc->sync.step[i];
        bool shared_out = false;
        for (int k = 0; k < i; k++) {
            const struct moe_sync_step *before = &sc->sync.step[k];
            if (before->act != MOE_SYNC_REDUCE_SCATTER) continue;
            shared_out |= !strcmp(before->of, step->of);
            for (int p = 0; p < b->s->n_params && step->act == MOE_SYNC_REDUCE_SCATTER; p++)
                if (moe_sync_is_of(before, &b->s->params[p]) && moe_sync_is_of(step, &b->s->params[p]))
                    return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: line %d reduce-scatters %s already",
                                    sc->name, step->line, before->line, b->s->params[p].name);
        }
        if (step->act == MOE_SYNC_ALL_GATHER && !shared_out)
            return moe_fail(MOE_EINPUT,
                            "%s:%d: gradient_sync: all_gather of %s: no reduce_scatter of %s before it",
                            sc->name, step->line, step->of, step->of);
    }
    return MOE_OK;
}

/* A product of numbers and sizes of groups, below 2^62; tokens where each rank has as many micro-batches. */
static int check_factors(const struct moe_scenario *sc, const struct moe_sync_step *step, int n,
                         const struct moe_factor *factor)
{
    double product = 1;
    for (int i = 0; i < n; i++) {
        if (factor[i].kind == MOE_FACTOR_NUMBER) product *= (double)factor[i].number;
        if (factor[i].kind == MOE_FACTOR_GROUP) product *= (double)sc->ranks; /* at most */
        if (factor[i].kind == MOE_FACTOR_TOKENS && sc->batches)
            return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: tokens do not go with a list of micro_batches",
                            sc->name, step->line);
    }
    if (product < 0x1p62) return MOE_OK;
    return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: the product of its factors is above 2^62", sc->name,
                    step->line);
}

int moe_sync_check(const struct moe_builder *b, const struct moe_scenario *sc)
{
    const char *names[64] = {"all", "shared", "experts"};
    int n = 3;
    for (int i = 0; i < b->s->n_params && n < 64; i++)
        if (b->s->params[i].buffer >= 0) names[n++] = b->s->params[i].name;
    for (int i = 0; i < sc->sync.n; i++) {
        const struct moe_sync_step *step = &sc->sync.step[i];
        char hint[MOE_HINT];
        int k = 0;
        while (k < n && strcmp(names[k], step->of)) k++;
        if (k == n)
            return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: unknown parameter '%s'%s", sc->name,
                            step->line, step->of, moe_hint(step->of, names, n, hint));
        MOE_TRY(check_factors(sc, step, step->n_by, step->by));
        MOE_TRY(check_factors(sc, step, step->n_times, step->times));
        if (step->act == MOE_SYNC_REDUCE_SCATTER && sc->empty_rank == MOE_EMPTY_SKIPS_WEIGHTS)
            return moe_fail(MOE_EINPUT, "%s:%d: empty_rank skip_weights does not go with reduce_scatter",
                            sc->name, step->line);
        if (step->act == MOE_SYNC_CLIP && !(sc->clip_norm > 0))
            return moe_fail(MOE_EINPUT, "%s:%d: gradient_sync: clip needs a clip_norm above 0", sc->name,
                            step->line);
    }
    MOE_TRY(check_shares(b, sc));
    return check_norms(b, sc);
}
