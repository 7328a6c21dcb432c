/* accuracy_simulated.c - see accuracy_study.h: an operation's time by the whole way that a scenario takes. */
#include "sim/lower/lower.h"
#include "sim/simulate.h"
#include "tests/bench/accuracy_study.h"

#include <math.h>
#include <string.h>

struct seen {
    const char *op;
    int n;
    double own_s; /* of n ranks */
};

static void see(void *ctx, const struct moe_sim_seen *seen)
{
    struct seen *x = ctx;
    if (seen->block->pass != MOE_FORWARD || strcmp(seen->op->name, x->op) != 0) return;
    x->n++;
    x->own_s += (double)seen->own * 1e-12;
}

double accuracy_simulated_s(struct moe_topo *t, const char *dispatcher, int ranks, int64_t tokens,
                            int experts, int top_k, double row_bytes, const char *op)
{
    const int each = 2; /* bytes of an element */
    char text[512];
    struct moe_scenario *sc;
    struct moe_schedule *s;
    struct moe_sim_result out;
    struct seen x = {.op = op};
    moe_assert(fmod(row_bytes, each) == 0);
    snprintf(text, sizeof text,
             "model: {layers: 1, hidden: %.0f, ffn: 1, experts: %d, top_k: %d}\nlayout: {ranks: %d}\n"
             "tokens_per_rank: %lld\ndtype: bfloat16\ndispatcher: %s\nrouting: {seed: 1}\n",
             row_bytes / each, experts, top_k, ranks, (long long)tokens, dispatcher);
    int err = moe_scenario_parse("accuracy", text, &sc);
    if (err >= 0) err = moe_lower(sc, &s);
    if (err < 0) accuracy_stop(err);
    struct moe_routing *r = moe_scenario_routing(sc);
    err = moe_simulate_seen(s, r, t, see, &x, &out);
    if (err < 0) accuracy_stop(err);
    moe_assert(x.n == ranks);
    moe_sim_free(&out);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return x.own_s / x.n;
}
