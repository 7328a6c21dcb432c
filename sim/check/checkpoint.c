/* checkpoint.c - see internal.h: is every expert stored once, and does every rank find what it asks for?
 *
 * Entries are sorted by file and name; of several ranks that write one name the last leaves its expert there,
 * so they must hold the same one. Cost: O(entries * log entries). */
#include "sim/check/internal.h"

#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b)
{
    const struct moe_stored *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->name != y->name) return x->name < y->name ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The first entry of what a rank asks for, or NULL. */
static const struct moe_stored *find(const struct moe_stored *saved, int n, const struct moe_stored *asked)
{
    int low = 0;
    while (n > 0) {
        const struct moe_stored *at = &saved[low + n / 2];
        bool before = at->file != asked->file ? at->file < asked->file : at->name < asked->name;
        if (before) low += n / 2 + 1;
        n = before ? n - n / 2 - 1 : n / 2;
    }
    return &saved[low];
}

static bool same_name(const struct moe_stored *a, const struct moe_stored *b)
{
    return a->file == b->file && a->name == b->name;
}

/* What is lost on saving: entries that follow one of the same name and another expert. Result: none are; else
 * what is loaded follows from it. The first is named, with how many there are. */
static bool check_saved(struct moe_checker *c, const struct moe_stored *saved, int n)
{
    const struct moe_stored *first = NULL;
    int lost = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 1; i < n; i++) {
            const struct moe_stored *a = &saved[i - 1], *b = &saved[i];
            if (!same_name(a, b) || a->expert == b->expert) continue;
            if (!first) first = a;
            lost += pass == 0;
            if (pass)
                moe_check_verdict(
                    c, 15, b->rank, moe_check_named("checkpoint save", -1),
                    "experts %d and %d, of ranks %d and %d, are stored under one name: of %d experts "
                    "one is lost",
                    first->expert, first[1].expert, first->rank, first[1].rank, lost);
        }
    return !lost;
}

/* The same of what ranks ask for; absent: and do not find, or find another. */
static void check_loaded(struct moe_checker *c, const struct moe_stored *saved, bool absent)
{
    static const char *const becomes[] = {[MOE_ABSENT_STOPS] = "the load stops",
                                          [MOE_ABSENT_KEEPS_INITIAL] = "it keeps its initial values",
                                          [MOE_ABSENT_IS_ZERO] = "it is filled with zeros"};
    const struct moe_checkpoint *k = &c->s->checkpoint;
    const struct moe_stored *first = NULL, *got = NULL;
    int n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < k->n_loaded; i++) {
            const struct moe_stored *asked = &k->loaded[i], *found = find(saved, k->n_saved, asked);
            bool there = found < saved + k->n_saved && same_name(found, asked);
            if (there == absent || (there && found->expert == asked->expert)) continue;
            if (!first) first = asked, got = found;
            n += pass == 0;
            if (pass && absent)
                moe_check_verdict(c, 15, asked->rank, moe_check_named("checkpoint load", -1),
                                  "%d experts are not found, as expert %d of rank %d under its name (%d): %s",
                                  n, first->expert, first->rank, first->name, becomes[k->absent]);
            else if (pass)
                moe_check_verdict(
                    c, 15, asked->rank, moe_check_named("checkpoint load", -1),
                    "%d experts are others than were asked for: rank %d gets expert %d for expert %d", n,
                    first->rank, got->expert, first->expert);
        }
}

void moe_check_checkpoint(struct moe_checker *c)
{
    const struct moe_checkpoint *k = &c->s->checkpoint;
    if (!k->n_saved) return;
    struct moe_stored *saved = moe_alloc((size_t)k->n_saved, sizeof *saved);
    memcpy(saved, k->saved, (size_t)k->n_saved * sizeof *saved);
    qsort(saved, (size_t)k->n_saved, sizeof *saved, by_name);
    if (check_saved(c, saved, k->n_saved)) {
        check_loaded(c, saved, true);
        check_loaded(c, saved, false);
    }
    free(saved);
}
