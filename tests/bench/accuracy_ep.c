/* accuracy_ep.c - libraries of expert parallelism: DeepEP, kernels of one NVLink domain. See accuracy.h.
 *
 * Intervals come from fitted rows alone: mostly from how far off these are when they are left out. */
#include "tests/bench/accuracy_study.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- DeepEP ---- */

static double normal_s(const struct study *s, const double *member, const struct row *row,
                       struct moe_plan *plan)
{
    struct moe_deepep_normal p;
    memcpy(&p, member, sizeof p);
    if (!plan) return moe_deepep_normal_s(&p, s->topo, &row->deepep);
    moe_deepep_normal_plan(&p, s->topo, &row->deepep, plan);
    return 0;
}

static double low_latency_s(const struct study *s, const double *member, const struct row *row,
                            struct moe_plan *plan)
{
    struct moe_deepep_low_latency p;
    memcpy(&p, member, sizeof p);
    if (!plan) return moe_deepep_low_latency_s(&p, s->topo, &row->deepep);
    moe_deepep_low_latency_plan(&p, s->topo, &row->deepep, plan);
    return 0;
}

static const char *const deepep_op[] = {"dispatch", "combine"}, *const deepep_type[] = {"fp8", "bf16"};

static struct row *deepep_row(struct study *s, struct moe_deepep_case c, bool low_latency)
{
    struct row *row = study_add(s);
    row->deepep = c;
    row->dtype = deepep_type[c.combine];
    row->ranks = c.ranks;
    row->key = c.tokens;
    row->bytes = c.tokens * llround(moe_deepep_row_bytes(&c, low_latency));
    moe_copy_name(row->name, deepep_op[c.combine]);
    return row;
}

/* The table of one commit gives GB/s of the slowest link, as that counts tokens: with the own node, and each
 * once for a node, or on one node once for a rank. */
void accuracy_deepep_h800(struct accuracy *a)
{
    struct study s = study_new("h800", "dgx_h100");
    struct accuracy_csv *csv = accuracy_csv_read("deepep_v1_normal.csv");
    s.topo->intra_Bps = 160e9;
    s.table = moe_deepep_normal_param;
    s.n_members = MOE_DEEPEP_NORMAL_PARAMS;
    s.time_s = normal_s; /* all members 0: of latencies and copies nothing is known */
    for (int i = 0; i < csv->n_rows; i++) {
        if (strcmp(accuracy_csv_text(csv, i, "commit"), "3b1045d")) continue;
        for (int combine = 0; combine < 2; combine++) {
            struct moe_deepep_case c = {
                combine, (int)accuracy_csv_number(csv, i, "ep"), 4096, 7168, 256, 8, 4, 0};
            double nodes, ranks,
                rate = accuracy_csv_number(csv, i, combine ? "combine_GBps" : "dispatch_GBps");
            struct row *row = deepep_row(&s, c, false);
            moe_deepep_spread(&c, 8, &nodes, &ranks);
            row->time_s =
                4096 * (c.ranks == 8 ? ranks : nodes) * moe_deepep_row_bytes(&c, false) / (rate * 1e9);
            row->fitted = c.ranks <= 16;
            snprintf(row->band, sizeof row->band, "EP %d", c.ranks);
        }
    }
    study_fit_member(&s, MEMBER(moe_deepep_normal, nvlink_Bps), 0, 0);
    study_fit_member(&s, MEMBER(moe_deepep_normal, serial), 0, 0);
    s.most[0] = 160e9;
    s.least[0] = 80e9;
    s.start[0] = 120e9;
    double param[MOE_REGRESS_PARAMS], squares = 0;
    study_fit(&s, param);
    study_print(&s, param);
    for (int i = 0; i < s.n_fitted; i++) squares += pow(study_error(&s, param, &s.row[i]), 2);
    for (int i = s.n_fitted; i < s.n;
         i++) /* Student's t, as many degrees of freedom as rows over parameters */
        s.row[i].half = 1.886 * sqrt(squares / (s.n_fitted - s.n_params));
    study_report(&s, param, a);
    for (int i = s.n_fitted; i < s.n; i++) accuracy_line(a, "h800", s.row[i].name, s.row[i].band, 15);
    accuracy_csv_free(csv);
    study_free(&s);
}

/* Rows with so many nodes, one of the two operations. */
static void add_normal_rows(struct study *s, const struct accuracy_csv *csv, bool combine, int nodes,
                            bool (*may_fit)(const struct moe_deepep_case *c))
{
    char sms[MOE_NAME], transmit[MOE_NAME], notify[MOE_NAME];
    snprintf(sms, sizeof sms, "%s_sms", deepep_op[combine]);
    snprintf(transmit, sizeof transmit, "%s_transmit_us", deepep_op[combine]);
    snprintf(notify, sizeof notify, "%s_notify_us", deepep_op[combine]);
    for (int i = 0; i < csv->n_rows; i++) {
        struct moe_deepep_case c = {combine,
                                    8 * (int)accuracy_csv_number(csv, i, "node_num"),
                                    (int64_t)accuracy_csv_number(csv, i, "num_token"),
                                    (int)accuracy_csv_number(csv, i, "hidden_size"),
                                    (int)accuracy_csv_number(csv, i, "num_experts"),
                                    (int)accuracy_csv_number(csv, i, "num_topk"),
                                    4,
                                    (int)accuracy_csv_number(csv, i, sms)};
        if (c.ranks != 8 * nodes) continue;
        struct row *row = deepep_row(s, c, false);
        row->time_s = 1e-6 * (accuracy_csv_number(csv, i, transmit) + accuracy_csv_number(csv, i, notify));
        row->fitted = may_fit(&c);
        snprintf(row->band, sizeof row->band, "%d SMs", c.sms);
    }
}

/* Fits the parameters that rows of one size tell, or else all. */
static void normal(struct accuracy *a, const char *machine, double nvlink_Bps, const struct accuracy_csv *csv,
                   bool combine, int nodes, bool (*may_fit)(const struct moe_deepep_case *c), bool one_size)
{
    struct study s = study_new(machine, "dgx_h100");
    if (nvlink_Bps > 0) s.topo->intra_Bps = nvlink_Bps;
    s.table = moe_deepep_normal_param;
    s.n_members = MOE_DEEPEP_NORMAL_PARAMS;
    s.time_s = normal_s;
    add_normal_rows(&s, csv, combine, nodes, may_fit);
    study_fit_member(&s, MEMBER(moe_deepep_normal, start_s), 0, 0);
    study_fit_member(&s, MEMBER(moe_deepep_normal, sm_Bps), 0, 0);
    study_fit_member(&s, MEMBER(moe_deepep_normal, serial), 0, 0);
    if (!one_size) study_fit_member(&s, MEMBER(moe_deepep_normal, row_Bps), 0, 0);
    if (!one_size) study_fit_member(&s, MEMBER(moe_deepep_normal, message_s), 0, 0);
    double param[MOE_REGRESS_PARAMS];
    study_fit(&s, param);
    study_print(&s, param);
    /* Of a normal error with this median; so that outliers do not count. */
    double half = 1.2816 * 1.4826 * study_left_out(&s, 0, NULL, 0.5);
    for (int i = s.n_fitted; i < s.n; i++) s.row[i].half = half;
    study_report(&s, param, a);
    study_free(&s);
}

static bool every_other_sms(const struct moe_deepep_case *c)
{
    return c->sms == 4 || c->sms == 12 || c->sms == 24;
}

void accuracy_deepep_h100_sms(struct accuracy *a)
{
    struct accuracy_csv *csv = accuracy_csv_read("deepep_normal_h100_sxm.csv");
    for (int combine = 0; combine < 2; combine++) {
        normal(a, "h100_sxm", 0, csv, combine, 2, every_other_sms, true);
        accuracy_line(a, "h100_sxm", deepep_op[combine], "8 SMs", 0);
        accuracy_line(a, "h100_sxm", deepep_op[combine], "16 SMs", 0);
        accuracy_line(a, "h100_sxm", deepep_op[combine], "20 SMs", 0);
        accuracy_line(a, "h100_sxm", deepep_op[combine], NULL, 15);
    }
    accuracy_csv_free(csv);
}

static bool most_experts(const struct moe_deepep_case *c)
{
    return c->experts == 256 && (c->sms == 8 || c->sms == 24);
}

static bool three_models(const struct moe_deepep_case *c)
{
    return (c->hidden == 2048 && c->top_k == 8 && c->experts == 128) ||
           (c->hidden == 7168 && c->top_k == 8 && c->experts == 256) ||
           (c->hidden == 6144 && c->top_k == 2 && c->experts == 8);
}

void accuracy_deepep_node(struct accuracy *a)
{
    struct accuracy_csv *h100 = accuracy_csv_read("deepep_normal_h100_sxm_intranode.csv"),
                        *b200 = accuracy_csv_read("deepep_normal_b200_sxm.csv");
    for (int combine = 0; combine < 2; combine++) {
        normal(a, "h100_sxm", 0, h100, combine, 1, most_experts, false);
        normal(a, "b200_sxm", 721.8e9, b200, combine, 1, three_models, false);
        accuracy_line(a, "h100_sxm", deepep_op[combine], NULL, 15);
        accuracy_line(a, "b200_sxm", deepep_op[combine], NULL, 15);
    }
    accuracy_csv_free(h100);
    accuracy_csv_free(b200);
}

static int by_number(const void *a, const void *b)
{
    return (*(const int64_t *)a > *(const int64_t *)b) - (*(const int64_t *)a < *(const int64_t *)b);
}

/* On one node all rows, on two every other count of tokens may be fitted. */
static void choose_low_latency(struct study *s)
{
    int64_t *tokens = moe_alloc((size_t)s->n, sizeof *tokens);
    int n = 0, different = 0;
    for (int i = 0; i < s->n; i++)
        if (s->row[i].ranks == 16) tokens[n++] = s->row[i].key;
    qsort(tokens, (size_t)n, sizeof *tokens, by_number);
    for (int i = 0; i < n; i++)
        if (!different || tokens[i] != tokens[different - 1]) tokens[different++] = tokens[i];
    for (int i = 0; i < s->n; i++) {
        struct row *row = &s->row[i];
        row->fitted = row->ranks == 8;
        for (int k = 0; k < different && row->ranks == 16; k += 2) row->fitted |= row->key == tokens[k];
    }
    free(tokens);
}

/* Beyond the nodes that were fitted errors grow as a random walk does with each doubling, and the latencies
 * of other nodes and of their experts, which two counts of experts hardly tell apart, may be all the one or
 * all the other. */
static double low_latency_half(const struct study *s, const double *param, double fitted,
                               const struct row *row)
{
    int remote = s->param[0][MEMBER(moe_deepep_low_latency, remote_s)] - 1,
        expert = s->param[0][MEMBER(moe_deepep_low_latency, expert_s)] - 1;
    double t = study_time_s(s, param, row), either = 0, doublings = fmax(0, log2(row->ranks / 16.0));
    const double experts = 128; /* of the other node, where most rows are fitted */
    for (int all = 0; all < 2; all++) {
        double other[MOE_REGRESS_PARAMS];
        memcpy(other, param, sizeof other);
        other[remote] = all ? param[remote] + param[expert] * experts : 0;
        other[expert] = all ? 0 : param[expert] + param[remote] / experts;
        either = fmax(either, fabs(log(study_time_s(s, other, row) / t)));
    }
    return sqrt(fitted * fitted * (1 + doublings) + either * either);
}

static void low_latency(struct accuracy *a, const struct accuracy_csv *csv, bool combine, study_time *time_s)
{
    struct study s = study_new("h100_sxm", "dgx_h100");
    s.table = moe_deepep_low_latency_param;
    s.n_members = MOE_DEEPEP_LOW_LATENCY_PARAMS;
    s.time_s = time_s;
    for (int i = 0; i < csv->n_rows; i++) {
        struct moe_deepep_case c = {combine,
                                    8 * (int)accuracy_csv_number(csv, i, "node_num"),
                                    (int64_t)accuracy_csv_number(csv, i, "num_token"),
                                    (int)accuracy_csv_number(csv, i, "hidden_size"),
                                    (int)accuracy_csv_number(csv, i, "num_experts"),
                                    (int)accuracy_csv_number(csv, i, "num_topk"),
                                    0,
                                    0};
        struct row *row = deepep_row(&s, c, true);
        snprintf(row->name, sizeof row->name, "%s %d nodes", deepep_op[combine], c.ranks / 8);
        moe_copy_name(row->band, c.tokens < 16   ? "1 to 15 tokens"
                                 : c.tokens < 64 ? "16 to 63"
                                                 : "64 and more");
        row->time_s = 1e-6 * accuracy_csv_number(csv, i, combine ? "combine_avg_t_us" : "dispatch_avg_t_us");
    }
    choose_low_latency(&s);
    for (int m = 0; m < s.n_members; m++) study_fit_member(&s, m, 0, 0);
    double param[MOE_REGRESS_PARAMS];
    study_fit(&s, param);
    study_print(&s, param);
    study_expect(&s, param, 0, (const double *)&s.topo->low_latency.kernel[combine]);
    double half = study_left_out(&s, 0, NULL, 0.8);
    for (int i = s.n_fitted; i < s.n; i++) s.row[i].half = low_latency_half(&s, param, half, &s.row[i]);
    study_report(&s, param, a);
    study_free(&s);
}

static void low_latency_part(struct accuracy *a, study_time *time_s)
{
    static const char *const band[] = {"1 to 15 tokens", "16 to 63", "64 and more"};
    struct accuracy_csv *csv = accuracy_csv_read("deepep_lowlatency_h100_sxm.csv");
    for (int combine = 0; combine < 2; combine++) {
        low_latency(a, csv, combine, time_s);
        for (int nodes = 2; nodes <= 8; nodes += 6) {
            char op[MOE_NAME];
            snprintf(op, sizeof op, "%s %d nodes", deepep_op[combine], nodes);
            for (int b = 0; b < 3; b++) accuracy_line(a, "h100_sxm", op, band[b], 0);
            accuracy_line(a, "h100_sxm", op, NULL, 20);
        }
    }
    accuracy_csv_free(csv);
}

void accuracy_deepep_lowlatency(struct accuracy *a)
{
    low_latency_part(a, low_latency_s);
}

/* ---- one NVLink domain ---- */

static double onesided_s(const struct study *s, const double *member, const struct row *row,
                         struct moe_plan *plan)
{
    struct moe_onesided p;
    memcpy(&p, member, sizeof p);
    if (!plan) return moe_onesided_s(&p, s->topo, &row->onesided);
    moe_onesided_plan(&p, s->topo, &row->onesided, plan);
    return 0;
}

/* NVFP4: half a byte and a byte of scale for 16; combine gives back BF16, but in low precision. */
static double onesided_row_bytes(enum moe_onesided_op op, const char *dtype, double hidden)
{
    double fp4 = hidden / 2 + hidden / 16;
    if (op == MOE_ONESIDED_TWO_PREPARE) return 0;
    if (op == MOE_ONESIDED_TWO_COMBINE_LOW) return fp4;
    if (op == MOE_ONESIDED_TWO_COMBINE || op == MOE_ONESIDED_ONE_COMBINE || !strcmp(dtype, "bfloat16"))
        return 2 * hidden;
    return !strcmp(dtype, "fp8") ? hidden : fp4;
}

static const char *const token_band[] = {"1 to 127 tokens", "128 to 1023", "1024 and more"};

static int token_band_of(int64_t tokens)
{
    return tokens < 128 ? 0 : tokens < 1024 ? 1 : 2;
}

/* Rows of operations first to last. */
static struct study onesided_study(const struct accuracy_csv *csv, int first, int last)
{
    static const char *const kernels[] = {"NVLinkTwoSided", "NVLinkTwoSided", "NVLinkTwoSided",
                                          "NVLinkTwoSided", "NVLinkOneSided", "NVLinkOneSided"},
                             *const ops[] = {"alltoall_prepare",  "alltoall_dispatch",
                                             "alltoall_combine",  "alltoall_combine_low_precision",
                                             "alltoall_dispatch", "alltoall_combine"};
    struct study s = study_new("gb200", "gb200_nvl72");
    s.table = moe_onesided_param;
    s.n_members = MOE_ONESIDED_PARAMS;
    for (int i = 0; i < csv->n_rows; i++) {
        const char *kernel = accuracy_csv_text(csv, i, "kernel"), *name = accuracy_csv_text(csv, i, "op");
        int op = first;
        while (op <= last && (strcmp(kernel, kernels[op]) || strcmp(name, ops[op]))) op++;
        if (op > last) continue;
        struct row *row = study_add(&s);
        row->op = op;
        row->dtype = accuracy_csv_text(csv, i, "dtype");
        row->onesided = (struct moe_onesided_case){
            (int)accuracy_csv_number(csv, i, "ep_size"), (int)accuracy_csv_number(csv, i, "topk"),
            (int64_t)accuracy_csv_number(csv, i, "num_tokens"),
            onesided_row_bytes((enum moe_onesided_op)op, row->dtype,
                               accuracy_csv_number(csv, i, "hidden_size"))};
        row->ranks = row->onesided.ranks;
        row->key = row->ranks;
        row->bytes = llround((double)row->onesided.tokens * row->onesided.row_bytes);
        row->time_s = 1e-6 * accuracy_csv_number(csv, i, "time_us");
        row->fitted = row->ranks < 16;
        moe_copy_name(row->name, moe_onesided_op_text[op]);
        moe_copy_name(row->band, token_band[token_band_of(row->onesided.tokens)]);
    }
    return s;
}

/* Fits one of the kernels: latencies of each operation, one link, one pair. */
static struct study fit_kernel(const struct accuracy_csv *csv, bool one_sided, study_time *time_s,
                               double *param)
{
    int first = one_sided ? MOE_ONESIDED_ONE_DISPATCH : MOE_ONESIDED_TWO_PREPARE,
        last = one_sided ? MOE_ONESIDED_ONE_COMBINE : MOE_ONESIDED_TWO_COMBINE_LOW;
    struct study s = onesided_study(csv, first, last);
    s.time_s = time_s;
    for (int op = first; op <= last; op++) {
        study_fit_member(&s, MEMBER(moe_onesided, start_s), op, op);
        study_fit_member(&s, one_sided ? MEMBER(moe_onesided, target_s) : MEMBER(moe_onesided, token_s), op,
                         op);
    }
    study_fit_member(&s, MEMBER(moe_onesided, row_s), first, last);
    study_fit_member(&s, MEMBER(moe_onesided, link_Bps), first, last);
    if (!one_sided) {
        study_fit_member(&s, MEMBER(moe_onesided, target_s), first, last);
        study_fit_member(&s, MEMBER(moe_onesided, pair_Bps), first, last);
    }
    study_fit(&s, param);
    return s;
}

/* Kernels `first` (1: one-sided) and on. */
static void nvlink_part(struct accuracy *a, int first, study_time *time_s)
{
    struct accuracy_csv *csv = accuracy_csv_read("nvlink_alltoall_gb200.csv");
    for (int one_sided = first; one_sided < 2; one_sided++) {
        double param[MOE_REGRESS_PARAMS];
        struct study s = fit_kernel(csv, one_sided, time_s, param);
        study_print(&s, param);
        for (int k = 0; k < 2 && one_sided; k++)
            study_expect(&s, param, MOE_ONESIDED_ONE_DISPATCH + k,
                         (const double *)&s.topo->one_sided.kernel[k]);
        for (int i = s.n_fitted; i < s.n; i++) /* the step from 4 ranks to 8 is like that from 8 to 16 */
            s.row[i].half = study_left_out(&s, 8, s.row[i].band, 0.8);
        study_report(&s, param, a);
        study_free(&s);
    }
    for (int op = first ? MOE_ONESIDED_ONE_DISPATCH : 0; op < MOE_ONESIDED_OP_COUNT; op++) {
        for (int b = 0; b < 3 && op != MOE_ONESIDED_TWO_PREPARE; b++)
            accuracy_line(a, "gb200", moe_onesided_op_text[op], token_band[b], 0);
        accuracy_line(a, "gb200", moe_onesided_op_text[op], NULL, 15);
    }
    accuracy_csv_free(csv);
}

void accuracy_nvlink_gb200(struct accuracy *a)
{
    nvlink_part(a, 0, onesided_s);
}

/* ---- in simulated steps ---- */

/* A plan that takes what a simulated step says. */
static double wait_for(double time_s, struct moe_plan *plan)
{
    moe_plan_add(plan, (struct moe_sent){.delay_s = time_s, .after = -1});
    return 0;
}

/* As many experts on each rank: rows of 288 experts on 64 ranks are simulated with 256. */
static double low_latency_simulated_s(const struct study *s, const double *member, const struct row *row,
                                      struct moe_plan *plan)
{
    const struct moe_deepep_case *c = &row->deepep;
    if (!plan) return low_latency_s(s, member, row, NULL);
    memcpy(&s->topo->low_latency.kernel[c->combine], member, sizeof(struct moe_deepep_low_latency));
    return wait_for(accuracy_simulated_s(s->topo, "deepep_low_latency", c->ranks, c->tokens,
                                         c->experts - c->experts % c->ranks, c->top_k,
                                         moe_deepep_row_bytes(c, true), c->combine ? "combine" : "dispatch"),
                    plan);
}

/* Balanced: a token goes to different ranks, so there is an expert a rank. */
static double onesided_simulated_s(const struct study *s, const double *member, const struct row *row,
                                   struct moe_plan *plan)
{
    const struct moe_onesided_case *c = &row->onesided;
    bool combine = row->op == MOE_ONESIDED_ONE_COMBINE;
    if (!plan) return onesided_s(s, member, row, NULL);
    memcpy(&s->topo->one_sided.kernel[combine], member, sizeof(struct moe_onesided));
    return wait_for(accuracy_simulated_s(s->topo, "nvlink_one_sided", c->ranks, c->tokens, c->ranks,
                                         c->top_k < c->ranks ? c->top_k : c->ranks, c->row_bytes,
                                         combine ? "combine" : "dispatch_tokens"),
                    plan);
}

void accuracy_ep_simulated(struct accuracy *a)
{
    FILE *out = a->out;
    a->out = NULL; /* it has these rows already */
    low_latency_part(a, low_latency_simulated_s);
    nvlink_part(a, 1, onesided_simulated_s);
    a->out = out;
}

/* ---- NCCL's all-to-all of few CTAs ---- */

static double lsa_s(const struct study *s, const double *member, const struct row *row, struct moe_plan *plan)
{
    struct moe_lsa p;
    (void)s;
    memcpy(&p, member, sizeof p);
    if (!plan) return moe_lsa_s(&p, &row->lsa);
    moe_lsa_plan(&p, &row->lsa, plan);
    return 0;
}

static double sendrecv_s(const struct study *s, const double *member, const struct row *row,
                         struct moe_plan *plan)
{
    struct moe_sendrecv p;
    (void)s;
    memcpy(&p, member, sizeof p);
    if (!plan) return moe_sendrecv_s(&p, &row->lsa);
    moe_sendrecv_plan(&p, &row->lsa, plan);
    return 0;
}

/* Median over types of what nccl-tests measured. */
static double measured_s(const struct accuracy_csv *csv, const char *op, int gpus, int64_t bytes)
{
    double time_s[8];
    int n = 0;
    for (int i = 0; i < csv->n_rows && n < 8; i++)
        if (!strcmp(accuracy_csv_text(csv, i, "op"), op) && accuracy_csv_number(csv, i, "num_gpus") == gpus &&
            (int64_t)accuracy_csv_number(csv, i, "size_bytes") == bytes)
            time_s[n++] = 1e-6 * accuracy_csv_number(csv, i, "time_us");
    if (!n)
        accuracy_stop(moe_fail(MOE_EINPUT, "%s: no %s of %lld bytes on %d GPUs", csv->path, op,
                               (long long)bytes, gpus));
    return accuracy_quantile(time_s, n, 0.5);
}

/* Of 2 GPUs below 32 KiB: their all-reduce takes two steps, all-gather one. Rows of 4 are held out. */
static double hop_s(const struct accuracy_csv *csv)
{
    double step_s[6];
    for (int i = 0; i < 6; i++)
        step_s[i] = measured_s(csv, "all_reduce", 2, 512 << i) - measured_s(csv, "all_gather", 2, 512 << i);
    return accuracy_quantile(step_s, 6, 0.5);
}

/* Of the 16 channels with which 2 GPUs exchange half of a large all-to-all. */
static double channel_Bps(const struct accuracy_csv *csv)
{
    const int64_t bytes = 1 << 28;
    double more_s = measured_s(csv, "alltoall", 2, 2 * bytes) - measured_s(csv, "alltoall", 2, bytes);
    return (double)bytes / 2 / 16 / more_s;
}

double accuracy_error_of_ranks(void)
{
    struct accuracy_csv *csv = accuracy_csv_read("nvlink_alltoall_gb200.csv");
    double *error = NULL;
    int n = 0, cap = 0;
    for (int one_sided = 0; one_sided < 2; one_sided++) {
        double param[MOE_REGRESS_PARAMS];
        struct study s = fit_kernel(csv, one_sided, onesided_s, param);
        for (int i = 0; i < s.n_fitted; i++) {
            if (s.row[i].ranks != 8) continue;
            error = moe_grow(error, &cap, n + 1, sizeof *error);
            error[n++] = s.row[i].left_out;
        }
        study_free(&s);
    }
    double found = accuracy_quantile(error, n, 0.8) / log(2);
    free(error);
    accuracy_csv_free(csv);
    return found;
}

static void add_custom_rows(struct study *s, const struct accuracy_csv *csv, const char *name, int barriers)
{
    char column[MOE_NAME];
    snprintf(column, sizeof column, "%s_us", name);
    for (int i = 0; i < csv->n_rows; i++) {
        struct row *row = study_add(s);
        row->lsa = (struct moe_lsa_case){(int)accuracy_csv_number(csv, i, "gpus"), 4, barriers,
                                         (int64_t)accuracy_csv_number(csv, i, "bytes_per_pair")};
        row->dtype = "";
        row->ranks = row->lsa.ranks;
        row->key = row->lsa.bytes;
        row->bytes = row->ranks * row->lsa.bytes;
        row->time_s = 1e-6 * accuracy_csv_number(csv, i, column);
        row->fitted = row->ranks == 8;
        moe_copy_name(row->name, name);
        snprintf(row->band, sizeof row->band, "%d GPUs", row->ranks);
    }
}

static void custom(struct accuracy *a, struct study *s, double of_ranks)
{
    double param[MOE_REGRESS_PARAMS];
    study_fit(s, param);
    study_print(s, param);
    double fitted = study_left_out(s, 0, NULL, 0.8);
    for (int i = s->n_fitted; i < s->n; i++)
        s->row[i].half = hypot(fitted, of_ranks * log(s->row[i].ranks / 8.0));
    study_report(s, param, a);
    study_free(s);
}

void accuracy_custom_gb200(struct accuracy *a)
{
    static const char *const name[] = {"nccl", "lsa_simple", "lsa_poison"};
    struct accuracy_csv *csv = accuracy_csv_read("nccl_custom_alltoall_gb200.csv"),
                        *nccl = accuracy_csv_read("nccl_gb200.csv");
    double of_ranks = accuracy_error_of_ranks();
    struct study s = study_new("gb200", "gb200_nvl72");
    s.table = moe_sendrecv_param;
    s.n_members = MOE_SENDRECV_PARAMS;
    s.time_s = sendrecv_s;
    s.value[0][MEMBER(moe_sendrecv, hop_s)] = hop_s(nccl);
    study_fit_member(&s, MEMBER(moe_sendrecv, start_s), 0, 0);
    study_fit_member(&s, MEMBER(moe_sendrecv, channel_Bps), 0, 0);
    add_custom_rows(&s, csv, name[0], 0);
    custom(a, &s, of_ranks);
    s = study_new("gb200", "gb200_nvl72");
    s.table = moe_lsa_param;
    s.n_members = MOE_LSA_PARAMS;
    s.time_s = lsa_s;
    s.value[0][MEMBER(moe_lsa, channel_Bps)] = channel_Bps(nccl);
    study_fit_member(&s, MEMBER(moe_lsa, start_s), 0, 0);
    study_fit_member(&s, MEMBER(moe_lsa, signal_s), 0, 0);
    add_custom_rows(&s, csv, name[1], 2);
    add_custom_rows(&s, csv, name[2], 1);
    custom(a, &s, of_ranks);
    for (int i = 0; i < 3; i++) {
        accuracy_line(a, "gb200", name[i], "32 GPUs", 20);
        accuracy_line(a, "gb200", name[i], "64 GPUs", 20);
    }
    accuracy_csv_free(csv);
    accuracy_csv_free(nccl);
}
