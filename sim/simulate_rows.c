/* simulate_rows.c - see simulate_rows.h. */
#include "sim/simulate_rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int find_row(struct moe_sim_result *out, const struct moe_block *block, const struct moe_op *op)
{
    char label[2 * MOE_NAME] = "";
    snprintf(label, sizeof label, "%.20s %s %s", block->name, moe_pass_text[block->pass], op->name);
    for (int i = 0; i < out->n_rows; i++)
        if (!strcmp(out->rows[i].op, label)) return i;
    out->rows = moe_grow(out->rows, &out->cap_rows, out->n_rows + 1, sizeof *out->rows);
    struct moe_sim_row *row = &out->rows[out->n_rows];
    *row = (struct moe_sim_row){.kind = op->kind};
    memcpy(row->op, label, sizeof label);
    return out->n_rows++;
}

int *moe_rows_at(const struct moe_rows *rows, int role, int block, int op)
{
    return &rows->of[((size_t)role * (size_t)rows->max_blocks + (size_t)block) * (size_t)rows->max_ops +
                     (size_t)op];
}

/* Blocks are written in the order in which they first run. */
void moe_rows_make(struct moe_rows *rows, const struct moe_schedule *s, struct moe_sim_result *out)
{
    *rows = (struct moe_rows){0};
    for (int i = 0; i < s->n_roles; i++) {
        if (s->roles[i].n_blocks > rows->max_blocks) rows->max_blocks = s->roles[i].n_blocks;
        for (int b = 0; b < s->roles[i].n_blocks; b++)
            if (s->roles[i].blocks[b].n_ops > rows->max_ops) rows->max_ops = s->roles[i].blocks[b].n_ops;
    }
    rows->of = moe_alloc((size_t)s->n_roles * (size_t)rows->max_blocks * (size_t)rows->max_ops, sizeof(int));
    for (int i = 0; i < s->n_roles; i++) {
        const struct moe_role *role = &s->roles[i];
        for (int b = 0; b < role->n_blocks; b++) {
            int instances = 0;
            for (int n = 0; n < role->n_instances; n++) instances += role->itinerary[n].block == b;
            for (int o = 0; o < role->blocks[b].n_ops; o++) {
                int row = *moe_rows_at(rows, i, b, o) =
                    find_row(out, &role->blocks[b], &role->blocks[b].ops[o]);
                if (out->rows[row].instances < instances) out->rows[row].instances = instances;
            }
        }
    }
}
