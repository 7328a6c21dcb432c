/* verdict.c - see internal.h: one verdict for what is the same on other ranks, in other layers and of other
 * parameters. */
#include "sim/check/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_class(int number)
{
    int i = 0;
    while (i < moe_check_n_classes && moe_check_classes[i].number != number) i++;
    return i < moe_check_n_classes;
}

void moe_verdict_free(struct moe_verdict *v)
{
    for (int i = 0; i < v->n_params; i++) free(v->params[i]);
    free(v->params);
    free(v->ranks);
    free(v->layers);
    free(v->text);
    free(v->cause);
}

void moe_verdicts_free(struct moe_verdicts *v)
{
    for (int i = 0; i < v->n; i++) moe_verdict_free(&v->item[i]);
    free(v->item);
    *v = (struct moe_verdicts){0};
}

void moe_check_insert(int number, int *n, int **list)
{
    int from = 0, to = *n; /* where it belongs */
    while (from < to) {
        int middle = from + (to - from) / 2;
        if ((*list)[middle] < number)
            from = middle + 1;
        else
            to = middle;
    }
    if (from < *n && (*list)[from] == number) return;
    *list = realloc(*list, ((size_t)*n + 1) * sizeof **list);
    moe_assert(*list);
    memmove(*list + from + 1, *list + from, (size_t)(*n - from) * sizeof **list);
    (*list)[from] = number;
    ++*n;
}

/* Length of a text without the rank that it names as an example. */
static int without_example(const char *text)
{
    const char *example = strstr(text, ", one of rank");
    if (!example) example = strstr(text, ", so on rank");
    return (int)(example ? (size_t)(example - text) : strlen(text));
}

static void add_param(struct moe_verdict *v, const char *name)
{
    for (int i = 0; i < v->n_params; i++)
        if (!strcmp(v->params[i], name)) return;
    v->params = moe_grow(v->params, &v->cap_params, v->n_params + 1, sizeof *v->params);
    v->params[v->n_params++] = strdup(name);
}

static struct moe_verdict *add_verdict(struct moe_checker *c, int check_class, enum moe_severity severity,
                                       int rank, struct moe_label at, const char *format, va_list args)
    __attribute__((format(printf, 6, 0)));
static struct moe_verdict *add_verdict(struct moe_checker *c, int check_class, enum moe_severity severity,
                                       int rank, struct moe_label at, const char *format, va_list args)
{
    char text[512], cause[512 + sizeof at.key + 16];
    moe_assert(is_class(check_class));
    vsnprintf(text, sizeof text, format, args);
    snprintf(cause, sizeof cause, "%d %d %s: %.*s", check_class, at.line, at.param ? at.of : at.key,
             without_example(text), text);
    int i = 0;
    while (i < c->out->n && strcmp(c->out->item[i].cause, cause) != 0) i++;
    if (i == c->out->n) {
        c->out->item = moe_grow(c->out->item, &c->out->cap, ++c->out->n, sizeof *c->out->item);
        c->out->item[i] = (struct moe_verdict){.check_class = check_class,
                                               .severity = severity,
                                               .line = at.line,
                                               .of = at.of,
                                               .text = strdup(text),
                                               .cause = strdup(cause)};
        snprintf(c->out->item[i].op, sizeof c->out->item[i].op, "%s", at.text);
    }
    struct moe_verdict *v = &c->out->item[i];
    moe_check_insert(rank, &v->n_ranks, &v->ranks);
    if (at.layer >= 0) moe_check_insert(at.layer, &v->n_layers, &v->layers);
    if (at.param) add_param(v, at.param);
    return v;
}

struct moe_verdict *moe_check_verdict(struct moe_checker *c, int check_class, int rank, struct moe_label at,
                                      const char *format, ...)
{
    va_list args;
    va_start(args, format);
    struct moe_verdict *v = add_verdict(c, check_class, MOE_SEVERITY_ERROR, rank, at, format, args);
    va_end(args);
    return v;
}

struct moe_verdict *moe_check_possible(struct moe_checker *c, int check_class, int rank, struct moe_label at,
                                       const char *format, ...)
{
    va_list args;
    va_start(args, format);
    struct moe_verdict *v = add_verdict(c, check_class, MOE_SEVERITY_POSSIBLE, rank, at, format, args);
    va_end(args);
    return v;
}

struct moe_label moe_check_label(const struct moe_here *h)
{
    if (!h->op) return moe_check_named("the end of its step", -1);
    const struct moe_block *b = h->block;
    struct moe_label label = {.layer = !b->per_layer ? -1
                                       : b->stride   ? h->layer % b->stride
                                                     : h->layer,
                              .line = h->op->line};
    moe_op_label(b, h->op, h->layer, label.text);
    int length =
        snprintf(label.key, sizeof label.key, "%.20s %s %s", b->name, moe_pass_text[b->pass], h->op->name);
    moe_assert(length > 0); /* what does not fit is cut */
    return label;
}

struct moe_label moe_check_named(const char *name, int layer)
{
    struct moe_label label = {.layer = layer};
    snprintf(label.key, sizeof label.key, "%s", name);
    if (layer < 0)
        snprintf(label.text, sizeof label.text, "%s", name);
    else
        snprintf(label.text, sizeof label.text, "layer %d %.40s", layer, name);
    return label;
}

struct moe_label moe_check_about(struct moe_label at, const char *of, const struct moe_param *p, int line)
{
    at.of = of;
    at.param = p->name;
    at.line = line;
    return at;
}

/* "w1", or "each of 7 parameters (first attention_gain, wqkv, wo)". */
static void name_params(const struct moe_verdict *v, FILE *out)
{
    enum { SHOWN = 3 };
    if (v->n_params > 1) fprintf(out, "each of %d parameters (first ", v->n_params);
    for (int i = 0; i < v->n_params && i < SHOWN; i++) fprintf(out, "%s%s", i ? ", " : "", v->params[i]);
    if (v->n_params > 1) fputc(')', out);
}

void moe_check_name_params(struct moe_verdicts *verdicts)
{
    for (int i = 0; i < verdicts->n; i++) {
        struct moe_verdict *v = &verdicts->item[i];
        char *text;
        size_t size;
        if (!v->n_params) continue;
        FILE *f = open_memstream(&text, &size);
        moe_assert(f);
        fputs(v->of, f);
        name_params(v, f);
        fprintf(f, " %s", v->text);
        fclose(f);
        free(v->text);
        v->text = text;
    }
}
