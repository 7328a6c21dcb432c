/* Time and memory of check by layout: 1,024 ranks and 60 layers, each rank with tokens and counts of its own;
 * experts split over 64 ranks or over as many as a stage has, one stage or 4 with 4 micro-batches, every
 * dispatcher; with gradients summed (`whole`), or with a distributed optimizer (`parts`). `right`: as it was
 * lowered. `fault`: in the last layer that it runs, one rank sends twice what the others expect, or updates
 * its part of a parameter by elements of the gradient's bucket that begin one too late; verdicts follow their
 * line. Each line comes from a process of its own; times are user CPU time of check alone, memory is the peak
 * with schedule and routing. Exits with 1 when what is right has a verdict, or the fault has none, or one of
 * another class, rank or layer. Usage: check_scale [RANKS LAYERS], multiples of 16 and of 4. */
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
    bool parts; /* of a distributed optimizer */
};
struct fault {
    int check_class, rank, layer;
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
            "dispatcher: %s\n%stokens_per_rank: [",
            y->layers, y->ranks, TOP_K, y->ranks, y->ep, y->stages, y->micro, y->dispatcher,
            y->parts ? "distributed_optimizer: {}\n" : "");
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

/* An expression: another one combined with a number. */
static int new_expr(struct moe_schedule *s, enum moe_expr_op op, int of, int64_t number)
{
    s->exprs = moe_grow(s->exprs, &s->cap_exprs, s->n_exprs + 2, sizeof *s->exprs);
    s->exprs[s->n_exprs] = (struct moe_expr){MOE_EXPR_CONST, .value = number};
    s->exprs[s->n_exprs + 1] = (struct moe_expr){op, .a = of, .b = s->n_exprs};
    s->n_exprs += 2;
    return s->n_exprs - 1;
}

/* The rank runs the last forward pass of its list as a block of its own, whose first data sent is twice as
 * much. */
static struct fault break_sending(struct moe_schedule *s)
{
    int rank = s->n_ranks - 3; /* of the last stage */
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
    block->ops[op].send = new_expr(s, MOE_EXPR_MUL, block->ops[op].send, 2);
    role->itinerary[last].block = role->n_blocks++;
    return (struct fault){1, rank, role->itinerary[last].layer % moe_layers_each(s)};
}

/* The first update of the last layer by which the rank changes part of a parameter; NULL: it owns none. A
 * distributed optimizer updates each layer in a block of its own. */
static struct moe_op *update_of(const struct moe_schedule *s, const struct moe_role *role, int rank)
{
    for (int i = 0; i < role->n_instances; i++) {
        const struct moe_block *block = &role->blocks[role->itinerary[i].block];
        bool last = block->per_layer && role->itinerary[i].layer == role->end_layer - 1;
        for (int o = 0; o < block->n_ops && last && block->pass == MOE_UPDATE; o++) {
            struct moe_op *op = &block->ops[o];
            if (op->kernel == MOE_K_ADAMW && op->reads[1].n &&
                moe_eval(s, (struct moe_env){0}, op->reads[1].n, rank, 0, 0) > 0)
                return op;
        }
    }
    return NULL;
}

/* The last rank that owns anything of the last layer takes what lies one element further. */
static struct fault break_part(struct moe_schedule *s)
{
    int rank = s->n_ranks - 1;
    while (!update_of(s, &s->roles[s->role_of[rank]], rank)) rank--;
    const struct moe_role *role = moe_schedule_split_role(s, rank);
    struct moe_ref *from = &update_of(s, role, rank)->reads[1];
    from->begin = new_expr(s, MOE_EXPR_ADD, from->begin, 1);
    return (struct fault){4, rank, role->end_layer - 1};
}

/* Are the verdicts of the fault, and of nothing else? */
static bool is_found(const struct moe_verdicts *v, struct fault fault)
{
    bool found = v->n > 0;
    for (int i = 0; i < v->n; i++)
        found &= v->item[i].check_class == fault.check_class && v->item[i].n_ranks == 1 &&
                 v->item[i].ranks[0] == fault.rank && v->item[i].n_layers == 1 &&
                 v->item[i].layers[0] == fault.layer;
    return found;
}

static int print_line(const struct layout *y, bool fault)
{
    struct moe_schedule *s;
    struct moe_verdicts v;
    struct rusage usage;
    struct moe_scenario *sc = read_scenario(y);
    if (moe_lower(sc, &s) < 0) moe_bug(__FILE__, __LINE__, moe_error());
    struct moe_routing *r = route(y);
    struct fault planted = {0};
    if (fault) planted = (y->parts ? break_part : break_sending)(s);
    double start_s = user_s();
    moe_check(s, r, &v);
    double check_s = user_s() - start_s;
    getrusage(RUSAGE_SELF, &usage);
    bool right = fault ? is_found(&v, planted) : v.n == 0;
    printf("%5d %6d %5d %6d %5d %-9s %-5s %-6s %8.2f %8.1f %8d%s\n", y->ranks, y->layers, y->ep, y->stages,
           y->micro, y->dispatcher, y->parts ? "parts" : "whole", fault ? "fault" : "right", check_s,
           (double)usage.ru_maxrss / 1024, v.n, right ? "" : "  UNEXPECTED");
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
    static const struct {
        const char *dispatcher;
        bool parts;
    } steps[] = {{"alltoall", false}, {"allgather", false}, {"deepep", false}, {"alltoall", true}};
    enum { N = sizeof steps / sizeof *steps };
    int ranks = argc == 3 ? atoi(argv[1]) : 1024, layers = argc == 3 ? atoi(argv[2]) : 60, failed = 0;
    if ((argc != 1 && argc != 3) || ranks < 16 || ranks % 16 || layers < 4 || layers % 4) {
        fprintf(stderr, "usage: check_scale [RANKS LAYERS], multiples of 16 and of 4\n");
        return 2;
    }
    printf("ranks layers    ep stages micro dispatch  sync  case    check s  mem MiB verdicts\n");
    for (int stages = 1; stages <= 4; stages += 3)
        for (int wide = 0; wide < 2; wide++)
            for (int d = 0; d < N; d++)
                for (int fault = 0; fault < 2; fault++) {
                    int ep = wide ? ranks / stages : ranks / 16;
                    struct layout y = {ranks,         layers, ep, stages, stages, steps[d].dispatcher,
                                       steps[d].parts};
                    failed |= print_apart(&y, fault);
                }
    return failed;
}
