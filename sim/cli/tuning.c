/* tuning.c - the tables of NCCL's logs (measured.h) that moesim calibrate uses. */
#include "sim/cli/measured.h"
#include "traces/measured_tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int add_table(const struct moe_tuning_table *from, struct moe_nccl_tables *to)
{
    for (int i = 0; i < from->n; i++) {
        const struct moe_tuning_cost *c = &from->cost[i];
        MOE_TRY(moe_nccl_tables_add(to, from->ranks, c->op, c->algorithm, c->protocol, c->latency_s,
                                    c->rate_Bps));
    }
    return MOE_OK;
}

/* said: out, where each table that is used is from */
static int add_file(const char *path, const struct moe_topo *t, struct moe_cli_tuning *out, FILE *said)
{
    struct moe_tuning found;
    const char *slash = strrchr(path, '/');
    int err = MOE_OK;
    MOE_TRY(moe_tuning_read(path, &found));
    for (int i = 0; i < found.n; i++) {
        const struct moe_tuning_table *from = &found.tables[i];
        if (from->ranks < 2 || from->ranks > t->gpus_per_node || from->nodes > 1 || !from->n)
            out->n_unusable++;
        else if (moe_nccl_table_of(&out->tables, from->ranks))
            out->n_repeated++;
        else {
            fprintf(said, "%s%s:%d, %d GPUs", out->tables.n ? "; " : "", slash ? slash + 1 : path, from->line,
                    from->ranks);
            MOE_TRY_GOTO(add_table(from, &out->tables));
        }
    }
done:
    moe_tuning_free(&found);
    return err;
}

int moe_cli_tuning_load(const struct moe_args *args, const struct moe_topo *t, struct moe_cli_tuning *out)
{
    size_t bytes;
    int err = MOE_OK;
    *out = (struct moe_cli_tuning){0};
    FILE *said = open_memstream(&out->said, &bytes);
    if (args->tuning) MOE_TRY_GOTO(add_file(args->tuning, t, out, said));
    if (args->tuning && !out->tables.n)
        MOE_TRY_GOTO(moe_fail(MOE_EINPUT,
                              "%s: no tuning table of one node of %s (%d others), expected lines of "
                              "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING",
                              args->tuning, t->name, out->n_unusable));
    for (int i = 0; i < args->n_inputs; i++) MOE_TRY_GOTO(add_file(args->inputs[i], t, out, said));
done:
    fclose(said);
    if (out->tables.n) return err;
    free(out->said);
    out->said = NULL;
    return err;
}

void moe_cli_tuning_free(struct moe_cli_tuning *t)
{
    moe_nccl_tables_free(&t->tables);
    free(t->said);
    *t = (struct moe_cli_tuning){0};
}
