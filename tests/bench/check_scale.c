/* Time and memory of check by layout: 1,024 ranks and 60 layers, each rank with tokens and counts of its own;
 * experts split over 64 ranks or over as many as a stage has, one stage or 4 with 4 micro-batches, every
 * dispatcher. `right`: as it was lowered. `fault`: one rank sends twice what the others expect in the last
 * layer that it runs; the verdict follows its line. Each line comes from a process of its own; times are user
 * CPU time of check alone, memory is the peak with schedule and routing. Exits with 1 when what is right has
 * a verdict, or the fault has none of its rank, operation and layer. Usage: check_scale [RANKS LAYERS],
 * multiples of 16 and of 4. */
#include "sim/check/check.h"
#include "sim/lower/lower.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOP_K = 8 };

struct layout {
    int ranks, layers, ep, stages, micro;
    const char *dispatcher;
};

static double user_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec;
}

/* The same on the ranks of a pipeline. */
static int tokens_of(const struct layout *y, int rank)
{
    return 48 + rank % (y->ranks / y->stages) % 37;
}

static struct moe_scenario *read_scenario(const struct layout *y)
{
    struct moe_scenario *sc;
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    fprintf(f,
            "model: {layers: %d, hidden: 7168, ffn: 2048, experts: %d, top_k: %d, heads: 128, sequence: 16}\n"
            "layout: {ranks: %d, expert_parallel: %d, pipeline_parallel: %d, micro_batches: %d}\n"
            "dispatcher: %s\ntokens_per_rank: [",
            y->layers, y->ranks, TOP_K, y->ranks, y->ep, y->stages, y->micro, y->dispatcher);
    for (int r = 0; r < y->ranks; r++) fprintf(f, "%s%d", r ? ", " : "", tokens_of(y, r));
    fprintf(f, "]\n");
    fclose(f);
    if (moe_scenario_parse("check_scale", text, &sc) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    free(text);
    return sc;
}

/* Each token goes to TOP_K experts at a stride of its own, so that counts differ by layer and rank. Only
 * ranks of the layer's stage have any. */
static struct moe_routing *route(const struct layout *y)
{
    int E = y->ranks, each = y->ranks / y->stages, of_stage = y->layers / y->stages;
    struct moe_routing *r = moe_routing_new(y->layers * y->micro, y->ranks, E, TOP_K);
    for (int rank = 0; rank < y->ranks; rank++) r->tokens[rank] = tokens_of(y, rank);
    for (int l = 0; l < r->n_layers; l++)
        for (int i = 0; i < each; i++) {
            int rank = l % y->layers / of_stage * each + i;
            int32_t expert[128 * TOP_K];
            for (int t = 0; t < tokens_of(y, rank); t++)
                for (int k = 0; k < TOP_K; k++)
                    expert[t * TOP_K + k] = (31 * l + 17 * rank + 3 * t * t + k * (E / TOP_K)) % E;
            moe_routing_add(r, l, rank, tokens_of(y, rank), expert);
        }
    return r;
}

/* The rank runs the last forward pass of its list as a block of its own, whose first data sent is twice as
 * much. */
static int break_last_layer(struct moe_schedule *s, int rank)
{
    struct moe_role *role = moe_schedule_split_role(s, rank);
    int last = role->n_instances - 1, op = 0;
    while (role->blocks[role->itinerary[last].block].pass != MOE_FORWARD ||
           !role->blocks[role->itinerary[last].block].per_layer)
        last--;
    int forward = role->itinerary[last].block;
    role->blocks = realloc(role->blocks, ((size_t)role->n_blocks + 1) * sizeof *role->blocks);
    moe_assert(role->blocks);
    struct moe_block *block = &role->blocks[role->n_blocks];
    *block = role->blocks[forward];
    block->ops = moe_alloc((size_t)block->n_ops, sizeof *block->ops);
    memcpy(block->ops, role->blocks[forward].ops, (size_t)block->n_ops * sizeof *block->ops);
    while (block->ops[op].kind != MOE_COLLECTIVE || block->ops[op].type == MOE_I64) op++;
    s->exprs = moe_grow(s->exprs, &s->cap_exprs, s->n_exprs + 2, sizeof *s->exprs);
    s->exprs[s->n_exprs] = (struct moe_expr){MOE_EXPR_CONST, .value = 2};
    s->exprs[s->n_exprs + 1] = (struct moe_expr){MOE_EXPR_MUL, .a = block->ops[op].send, .b = s->n_exprs};
    block->ops[op].send = s->n_exprs + 1;
    s->n_exprs += 2;
    role->itinerary[last].block = role->n_blocks++;
    return role->itinerary[last].layer % moe_layers_each(s);
}

/* Is it the one verdict that the fault deserves? */
static bool is_found(const struct moe_verdicts *v, int rank, int layer)
{
    return v->n == 1 && v->item[0].check_class == 1 && v->item[0].n_ranks == 1 &&
           v->item[0].ranks[0] == rank && v->item[0].n_layers == 1 && v->item[0].layers[0] == layer;
}

static int print_line(const struct layout *y, bool fault)
{
    struct moe_schedule *s;
    struct moe_verdicts v;
    struct rusage usage;
    struct moe_scenario *sc = read_scenario(y);
    if (moe_lower(sc, &s) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    struct moe_routing *r = route(y);
    int odd = y->ranks - 3; /* of the last stage */
    int layer = fault ? break_last_layer(s, odd) : 0;
    double start_s = user_s();
    moe_check(s, r, &v);
    double check_s = user_s() - start_s;
    getrusage(RUSAGE_SELF, &usage);
    bool right = fault ? is_found(&v, odd, layer) : v.n == 0;
    printf("%5d %6d %5d %6d %5d %-9s %-6s %8.2f %8.1f %8d%s\n", y->ranks, y->layers, y->ep, y->stages,
           y->micro, y->dispatcher, fault ? "fault" : "right", check_s, (double)usage.ru_maxrss / 1024, v.n,
           right ? "" : "  UNEXPECTED");
    for (int i = 0; i < v.n; i++)
        printf("      C%d rank %d: %s: %s\n", v.item[i].check_class, v.item[i].ranks[0], v.item[i].op,
               v.item[i].text);
    moe_verdicts_free(&v);
    moe_routing_free(r);
    moe_schedule_free(s);
    moe_scenario_free(sc);
    return right ? 0 : 1;
}

/* In a process of its own, so that its peak is its own. */
static int print_apart(const struct layout *y, bool fault)
{
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int wrong = print_line(y, fault);
        fflush(stdout);
        _exit(wrong);
    }
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    static const char *const dispatchers[] = {"alltoall", "allgather", "deepep"};
    int ranks = argc == 3 ? atoi(argv[1]) : 1024, layers = argc == 3 ? atoi(argv[2]) : 60, failed = 0;
    if ((argc != 1 && argc != 3) || ranks < 16 || ranks % 16 || layers < 4 || layers % 4) {
        fprintf(stderr, "usage: check_scale [RANKS LAYERS], multiples of 16 and of 4\n");
        return 2;
    }
    printf("ranks layers    ep stages micro dispatch  case    check s  mem MiB verdicts\n");
    for (int stages = 1; stages <= 4; stages += 3)
        for (int wide = 0; wide < 2; wide++)
            for (int d = 0; d < 3; d++)
                for (int fault = 0; fault < 2; fault++) {
                    int ep = wide ? ranks / stages : ranks / 16;
                    struct layout y = {ranks, layers, ep, stages, stages, dispatchers[d]};
                    failed |= print_apart(&y, fault);
                }
    return failed;
}
