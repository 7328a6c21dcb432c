/* kernel_shapes.c - see kernel_shapes.h. */
#include "sim/kernel_shapes.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define FACTOR MOE_USES_FACTOR
#define DIVISOR MOE_USES_DIVISOR
#define NONE MOE_K_COUNT
static const struct {
    const char *text;
    enum moe_kernel backward; /* undoes it where it is differentiated: schedule.h, autograd.c */
    uint32_t uses;
} rows[MOE_K_COUNT] = {
    [MOE_K_EMBED] = {"T H V: token:input[T] emb[VH] > x[TH]", MOE_K_EMBED_BWD, 0},
    [MOE_K_EMBED_BWD] = {"T H V: token:input[T] dx[TH] > +demb[VH]", NONE, 0},
    [MOE_K_RMSNORM] = {"T H: x[TH] gain[H] > y[TH]", MOE_K_RMSNORM_BWD, 0},
    [MOE_K_RMSNORM_BWD] = {"T H: x[TH] gain[H] dy[TH] > +dx[TH] +dgain[H]", NONE, 0},
    [MOE_K_ATTENTION] = {"T H A S: qkv[3TH] > o[TH]", MOE_K_ATTENTION_BWD, 0},
    [MOE_K_ATTENTION_BWD] = {"T H A S: qkv[3TH] do[TH] > +dqkv[3TH]", NONE, 0},
    [MOE_K_ADD] = {"n: a[n] b[n] > ~y[n]", MOE_K_ADD_BWD, 0},
    [MOE_K_ADD_BWD] = {"n: dy[n] > +da[n] +db[n]", NONE, 0},
    [MOE_K_GEMM] = {"m n k: A[mk] B[kn] > +C[mn]", MOE_K_GEMM, MOE_USES_TRANS},
    [MOE_K_TOPK] = {"T E K: logits[TE] > prob[TE] expert:index[TK] slot:index[TK] counts:routed[E]",
                    MOE_K_TOPK_BWD, 0},
    [MOE_K_TOPK_BWD] = {"T E: prob[TE] dprob[TE] > +dlogits[TE]", NONE, 0},
    [MOE_K_LIMIT] = {"T E K C G N: prob[TE] expert:index[TK] counts:count[E]"
                     " > slot:index[TK] kept_expert:index[TK] "
                     "kept:count[E] arrive?:count[E]", NONE, MOE_USES_MODE},
    [MOE_K_LARGEST] = {"E: counts:count[E] > largest:count[1]", NONE, 0},
    [MOE_K_SET] = {"v: > y:count[1]", NONE, 0},
    [MOE_K_NORMALIZE] = {"T E K: prob[TE] expert:index[TK] > gate[TE]", MOE_K_NORMALIZE_BWD, 0},
    [MOE_K_NORMALIZE_BWD] = {"T E K: prob[TE] expert:index[TK] dgate[TE] > +dprob[TE]", NONE, 0},
    [MOE_K_AUX_LOSS] = {"T E: prob[TE] all_counts:count[E]"
                        " > loss:output[1]", MOE_K_AUX_LOSS_BWD, FACTOR | DIVISOR},
    [MOE_K_AUX_LOSS_BWD] = {"T E: all_counts:count[E] > +dprob[TE]", NONE, FACTOR | DIVISOR},
    [MOE_K_SELECT] = {"T e K f: expert:index[TK] > slot:index[TK] local?:index[TK]", NONE, 0},
    [MOE_K_SPREAD] = {"T E K P: expert:index[TK] > slot:index[TP] tokens_for:count[P]", NONE, 0},
    [MOE_K_PERMUTE] = {"T H K n: x:moved[TH] slot:index[TK] > rows:moved[nH]", MOE_K_PERMUTE_BWD, 0},
    [MOE_K_PERMUTE_BWD] = {"T H K n: drows[nH] slot:index[TK] > +dx[TH]", MOE_K_PERMUTE, 0},
    [MOE_K_SORT_ROWS] = {"P e H: rows[#H] counts:count[Pe] > +sorted[#H]", MOE_K_UNSORT_ROWS, 0},
    [MOE_K_UNSORT_ROWS] = {"P e H: dsorted[#H] counts:count[Pe] > +drows[#H]", MOE_K_SORT_ROWS, 0},
    [MOE_K_GROUPED_GEMM] = {"e n k: A[*k] B[ekn] > +C[*n]", MOE_K_GROUPED_GEMM, MOE_USES_TRANS},
    [MOE_K_GROUPED_WGRAD] = {"e n k: A[*k] dC[*n] > +dB[ekn]", NONE, 0},
    [MOE_K_SWIGLU] = {"r F: h[2rF] > a[rF]", MOE_K_SWIGLU_BWD, 0},
    [MOE_K_SWIGLU_BWD] = {"r F: h[2rF] da[rF] > +dh[2rF]", NONE, 0},
    [MOE_K_TAKE] = {"T E K: prob[TE] expert:index[TK] > taken[TK]", MOE_K_TAKE_BWD, 0},
    [MOE_K_TAKE_BWD] = {"T E K: expert:index[TK] dtaken[TK] > +dprob[TE]", NONE, 0},
    [MOE_K_WEIGH] = {"n H: rows[nH] weight[n] > y[nH]", MOE_K_WEIGH_BWD, 0},
    [MOE_K_WEIGH_BWD] = {"n H: rows[nH] weight[n] dy[nH] > drows[nH] dweight[n]", NONE, MOE_USES_MODE},
    [MOE_K_COMBINE] = {"T H K E n: rows[nH] prob[TE] expert:index[TK] slot:index[TK]"
                       " > y[TH]", MOE_K_COMBINE_BWD, 0},
    [MOE_K_COMBINE_BWD] = {"T H K E n: rows[nH] prob[TE] expert:index[TK] slot:index[TK] dy[TH]"
                           " > drows[nH] dprob[TE]",
                           NONE, MOE_USES_MODE},
    [MOE_K_XENT] = {"T V: logits[TV] target:input[T] > dlogits[TV] loss:output[1]", NONE, 0},
    [MOE_K_ZERO] = {"n: > y:any[n]", NONE, 0},
    [MOE_K_SCALE] = {"n: g[n] > ~y[n]", NONE, DIVISOR},
    [MOE_K_COPY] = {"n: x:held[n] > y:held[n]", NONE, 0},
    [MOE_K_SQNORM] = {"n: g[n] > +norm:norm[1]", NONE, 0},
    [MOE_K_CLIP] = {"n: g[n] norm:norm[1] other:norm[1] > ~y[n]", NONE, FACTOR},
    [MOE_K_SGD] = {"n: param:param[n] grad[n] > param:param[n]", NONE, FACTOR},
    [MOE_K_ADAMW] = {"n: param:param[n] grad[n] m:state[n] v:state[n]"
                     " > param:param[n] m:state[n] v:state[n]", NONE,
                     FACTOR | MOE_USES_DECAY},
};
/* clang-format on */

#define X(name, text, type) text,
static const char *const kind_text[] = {MOE_OPERANDS(X)};
#undef X
#define X(name, text, type) type,
static const enum moe_type kind_type[] = {MOE_OPERANDS(X)};
#undef X

static void parse_extent(const struct moe_kernel_shape *k, const char *text, struct moe_operand *o)
{
    o->times = 1;
    for (; *text != ']'; text++) {
        const char *dim = memchr(k->dim, *text, (size_t)k->n_dims);
        if (*text == '*')
            o->by_rows = true;
        else if (*text == '#')
            o->by_total = true;
        else if (isdigit((unsigned char)*text))
            o->times *= *text - '0';
        else if (dim)
            o->dims[o->n_dims++] = (int)(dim - k->dim);
        else
            moe_bug(__FILE__, __LINE__, text);
    }
}

static struct moe_operand parse_operand(const struct moe_kernel_shape *k, const char *word)
{
    struct moe_operand o = {0};
    o.adds = *word == '+';
    o.in_place = *word == '~';
    word += o.adds || o.in_place;
    size_t n = strcspn(word, "?:[");
    moe_assert(n > 0 && n < sizeof o.name);
    memcpy(o.name, word, n);
    word += n;
    o.optional = *word == '?';
    word += o.optional;
    const char *extent = strchr(word, '[');
    moe_assert(extent);
    if (*word == ':') {
        word++;
        while (o.kind < MOE_OPERAND_KIND_COUNT &&
               (strncmp(kind_text[o.kind], word, (size_t)(extent - word)) != 0 ||
                kind_text[o.kind][extent - word]))
            o.kind++;
        moe_assert(o.kind < MOE_OPERAND_KIND_COUNT);
    }
    o.type = kind_type[o.kind];
    parse_extent(k, extent + 1, &o);
    return o;
}

static void parse_row(const char *text, struct moe_kernel_shape *k)
{
    char copy[256], *rest = NULL;
    moe_assert(text && strlen(text) < sizeof copy);
    strcpy(copy, text);
    bool in_dims = true, writes = false;
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        if (in_dims) {
            k->dim[k->n_dims++] = *word;
            in_dims = word[1] != ':';
        } else if (*word == '>') {
            writes = true;
        } else {
            *(writes ? &k->writes[k->n_writes++] : &k->reads[k->n_reads++]) = parse_operand(k, word);
        }
    }
    k->free_dims = (1u << k->n_dims) - 1;
    for (int i = 0; i < k->n_reads + k->n_writes; i++) {
        const struct moe_operand *o = i < k->n_reads ? &k->reads[i] : &k->writes[i - k->n_reads];
        for (int d = 0; d < o->n_dims; d++) k->free_dims &= ~(1u << o->dims[d]);
    }
}

struct moe_kernel_shape *moe_kernel_shapes(void)
{
    struct moe_kernel_shape *k = moe_alloc(MOE_K_COUNT, sizeof *k);
    for (int i = 0; i < MOE_K_COUNT; i++) {
        parse_row(rows[i].text, &k[i]);
        k[i].backward = rows[i].backward;
        k[i].uses = rows[i].uses;
    }
    return k;
}

uint32_t moe_kernel_adds(enum moe_kernel kernel)
{
    uint32_t mask = 0;
    int write = -1;
    for (const char *p = strchr(rows[kernel].text, '>') + 1; *p; p++) {
        if (*p == ' ') write++;
        if (*p == '+') mask |= 1u << write;
    }
    return mask;
}

/* LIMIT writes what arrives where it pads, and only there. */
bool moe_kernel_has_lists(const struct moe_kernel_shape *k, const struct moe_op *op, int *least)
{
    int most = k->n_writes;
    *least = most;
    while (*least > 0 && k->writes[*least - 1].optional) --*least;
    if (op->kernel == MOE_K_LIMIT && op->mode & MOE_LIMIT_PAD)
        *least = most;
    else if (op->kernel == MOE_K_LIMIT)
        most = *least;
    return op->n_dims == k->n_dims && op->n_reads == k->n_reads && op->n_writes >= *least &&
           op->n_writes <= most;
}

enum moe_type moe_kernel_type(const struct moe_kernel_shape *k)
{
    for (int i = 0; i < k->n_reads + k->n_writes; i++)
        if ((i < k->n_reads ? k->reads[i].type : k->writes[i - k->n_reads].type) == MOE_TYPE_COUNT)
            return MOE_TYPE_COUNT;
    return k->writes[0].type;
}

const char *moe_kernel_overlap(const struct moe_schedule *s, const struct moe_kernel_shape *k,
                               const struct moe_op *op, int w, const char **other)
{
    const struct moe_operand *o = &k->writes[w];
    for (int i = 0; i < op->n_reads; i++) {
        bool same = moe_same_slot(s, op->reads[i], op->writes[w]), named = !strcmp(k->reads[i].name, o->name);
        *other = k->reads[i].name;
        if (named && !same) return "is not what it reads as";
        if (same && !named && !(o->in_place && i == 0)) return "is also read, as";
    }
    for (int i = 0; i < w; i++)
        if (moe_same_slot(s, op->writes[i], op->writes[w])) {
            *other = k->writes[i].name;
            return "is also written, as";
        }
    return NULL;
}
