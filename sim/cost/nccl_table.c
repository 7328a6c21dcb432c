/* nccl_table.c - see nccl_table.h. */
#include "sim/cost/nccl_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int find(const char *what, const char *word, const char *const *names, int n, int *out)
{
    char hint[MOE_HINT];
    for (*out = 0; *out < n; ++*out)
        if (!strcmp(word, names[*out])) return MOE_OK;
    return moe_fail(MOE_EINPUT, "'%.40s' is no %s%s", word, what, moe_hint(word, names, n, hint));
}

int moe_nccl_tables_add(struct moe_nccl_tables *t, int ranks, const char *collective, const char *algorithm,
                        const char *protocol, double latency_s, double rate_Bps)
{
    int c, a, p, i = 0;
    MOE_TRY(find("collective", collective, moe_collective_text, MOE_COLLECTIVE_COUNT, &c));
    MOE_TRY(find("algorithm", algorithm, moe_algorithm_text, MOE_ALGORITHM_COUNT, &a));
    MOE_TRY(find("protocol", protocol, moe_protocol_text, MOE_PROTOCOL_COUNT, &p));
    if (ranks < 2) return moe_fail(MOE_EINPUT, "%d GPUs, expected 2 or more", ranks);
    if (!(latency_s >= 0 && isfinite(latency_s) && rate_Bps > 0 && isfinite(rate_Bps)))
        return moe_fail(MOE_EINPUT, "expected a latency of 0 us or more, and a rate above 0 GB/s");
    while (i < t->n && t->table[i].ranks != ranks) i++;
    if (i == t->n) {
        t->table = moe_grow(t->table, &t->cap, ++t->n, sizeof *t->table);
        t->table[i].ranks = ranks;
    }
    t->table[i].cost[c][a][p].latency_s = latency_s;
    t->table[i].cost[c][a][p].rate_Bps = rate_Bps;
    return MOE_OK;
}

const struct moe_nccl_table *moe_nccl_table_of(const struct moe_nccl_tables *t, int ranks)
{
    for (int i = 0; i < t->n; i++)
        if (t->table[i].ranks == ranks) return &t->table[i];
    return NULL;
}

static int parse_cost(const char *text, struct moe_nccl_tables *out)
{
    int ranks, end = 0;
    char collective[MOE_NAME], algorithm[MOE_NAME], protocol[MOE_NAME];
    double us, GBps;
    if (sscanf(text, " %7d %47[a-z] %47[a-z]/%47[a-z0-9] %lf us %lf GB/s %n", &ranks, collective, algorithm,
               protocol, &us, &GBps, &end) != 6 ||
        !end || (text[end] && text[end] != ','))
        return moe_fail(MOE_EINPUT, "'%.*s', expected as in 8 allreduce ring/ll 15 us 80.6 GB/s",
                        (int)(strcspn(text, ",") < 60 ? strcspn(text, ",") : 60), text);
    return moe_nccl_tables_add(out, ranks, collective, algorithm, protocol, us * 1e-6, GBps * 1e9);
}

int moe_nccl_tables_parse(const char *text, struct moe_nccl_tables *out)
{
    *out = (struct moe_nccl_tables){0};
    for (const char *at = text;; at++) {
        at += strspn(at, " ");
        int err = parse_cost(at, out);
        if (err < 0) {
            moe_nccl_tables_free(out);
            return err;
        }
        at += strcspn(at, ",");
        if (!*at) return MOE_OK;
    }
}

void moe_nccl_tables_write(const struct moe_nccl_tables *t, FILE *f)
{
    const char *between = "";
    for (int i = 0; i < t->n; i++)
        for (int c = 0; c < MOE_COLLECTIVE_COUNT; c++)
            for (int a = 0; a < MOE_ALGORITHM_COUNT; a++)
                for (int p = 0; p < MOE_PROTOCOL_COUNT; p++) {
                    double rate_Bps = t->table[i].cost[c][a][p].rate_Bps;
                    if (!(rate_Bps > 0)) continue;
                    fprintf(f, "%s%d %s %s/%s %.6g us %.6g GB/s", between, t->table[i].ranks,
                            moe_collective_text[c], moe_algorithm_text[a], moe_protocol_text[p],
                            1e6 * t->table[i].cost[c][a][p].latency_s, rate_Bps / 1e9);
                    between = ", ";
                }
}

void moe_nccl_tables_free(struct moe_nccl_tables *t)
{
    free(t->table);
    *t = (struct moe_nccl_tables){0};
}

bool moe_nccl_table_ring(const struct moe_nccl_table *t, enum moe_protocol protocol, double *base_s,
                         double *step_s, double *wire_Bps)
{
    double n = t->ranks, rate_Bps = t->cost[MOE_ALLREDUCE][MOE_ALGORITHM_RING][protocol].rate_Bps,
           once_s = t->cost[MOE_ALLGATHER][MOE_ALGORITHM_RING][protocol].latency_s,
           twice_s = t->cost[MOE_ALLREDUCE][MOE_ALGORITHM_RING][protocol].latency_s;
    *base_s = 2 * once_s - twice_s;
    *step_s = (twice_s - once_s) / (n - 1);
    *wire_Bps = rate_Bps * 2 * (n - 1) / n;
    return t->cost[MOE_ALLGATHER][MOE_ALGORITHM_RING][protocol].rate_Bps > 0 && rate_Bps > 0 && *base_s > 0 &&
           *step_s > 0;
}
