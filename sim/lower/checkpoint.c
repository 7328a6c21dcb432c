/* checkpoint.c - see checkpoint.h, and lower.h for what it makes of a schedule. */
#include "sim/lower/checkpoint.h"

#include "sim/lower/lower.h"
#include "sim/yaml.h"

#include <stddef.h>
#include <string.h>

static const char *const names[] = {"global", "local", NULL};
static const char *const writers[] = {"owners", "all", "first", NULL};
static const char *const files[] = {"one", "ranks", "merged", NULL};
static const char *const absences[] = {"stop", "initial", "zero", NULL};

struct draft {
    const struct moe_yaml *save, *load;
};
#define FIELD(member) offsetof(struct moe_checkpoint_keys, member)
static const struct moe_key keys[] = {
    {"save", MOE_KEY_NODE, offsetof(struct draft, save)},
    {"load", MOE_KEY_NODE, offsetof(struct draft, load)},
};
static const struct moe_key save_keys[] = {
    {"names", MOE_KEY_CHOICE, FIELD(save_names), .choices = names},
    {"by", MOE_KEY_CHOICE, FIELD(by), .choices = writers},
    {"files", MOE_KEY_CHOICE, FIELD(files), .choices = files},
};
static const struct moe_key load_keys[] = {
    {"names", MOE_KEY_CHOICE, FIELD(load_names), .choices = names},
    {"expert_parallel", MOE_KEY_INT, FIELD(expert_parallel), .min = 1, .max = 16384},
    {"absent", MOE_KEY_CHOICE, FIELD(absent), .choices = absences},
};
#define COUNT(keys) ((int)(sizeof(keys) / sizeof *(keys)))

int moe_checkpoint_read(const struct moe_yaml *node, struct moe_checkpoint_keys *out)
{
    struct draft d = {0};
    out->given = true;
    MOE_TRY(moe_yaml_read(node, keys, COUNT(keys), &d));
    if (d.save) MOE_TRY(moe_yaml_read(d.save, save_keys, COUNT(save_keys), out));
    if (d.load) MOE_TRY(moe_yaml_read(d.load, load_keys, COUNT(load_keys), out));
    for (int i = 0; d.load && i < d.load->n; i++)
        if (!strcmp(d.load->key[i], "expert_parallel")) out->line = d.load->key_line[i];
    return MOE_OK;
}

/* Where a rank stands when `split` ranks split the experts of a stage; stages are alike. */
struct place {
    int part, copy;
};
static struct place place_of(const struct moe_scenario *sc, int rank, int split)
{
    int each = (int)(sc->ranks / sc->pipeline_parallel), i = rank % each, copies = each / split;
    if (sc->rank_order == MOE_STRIDED) return (struct place){i / copies, i % copies};
    return (struct place){i % split, i / split};
}

static struct moe_stored entry(const struct moe_scenario *sc, int rank, struct place p, int local, int split,
                               int by_name)
{
    const struct moe_checkpoint_keys *k = &sc->checkpoint;
    int expert = p.part * (int)sc->experts / split + local, part = k->files == MOE_FILES_RANKS ? p.part : 0;
    return (struct moe_stored){
        .rank = rank, .expert = expert, .file = part, .name = by_name == MOE_NAMES_GLOBAL ? expert : local};
}

int moe_lower_checkpoint(struct moe_builder *b, const struct moe_scenario *sc)
{
    const struct moe_checkpoint_keys *k = &sc->checkpoint;
    struct moe_checkpoint *out = &b->s->checkpoint;
    int split = (int)sc->expert_parallel, later = k->expert_parallel ? (int)k->expert_parallel : split;
    long long each = sc->ranks / sc->pipeline_parallel, E = sc->experts;
    if (!k->given) return MOE_OK;
    if (later > each)
        return moe_fail(
            MOE_EINPUT,
            "%s:%d: checkpoint.load.expert_parallel: expected at most the ranks of a stage, %lld, "
            "which the job that loads has too, not %d",
            sc->name, k->line, each, later);
    if (each % later || E % later)
        return moe_fail(MOE_ELAYOUT, "%s:%d: checkpoint.load.expert_parallel %d does not divide %s %lld",
                        sc->name, k->line, later, each % later ? "the ranks of a stage," : "experts",
                        each % later ? each : E);
    out->absent = (enum moe_absent)k->absent;
    out->saved = moe_alloc((size_t)(sc->ranks * E / split), sizeof *out->saved);
    out->loaded = moe_alloc((size_t)(sc->ranks * E / later), sizeof *out->loaded);
    for (int r = 0; r < sc->ranks; r++) {
        struct place p = place_of(sc, r, split), q = place_of(sc, r, later);
        bool saves =
            k->by == MOE_SAVED_BY_ALL || (p.copy == 0 && (k->by == MOE_SAVED_BY_OWNERS || p.part == 0));
        for (int i = 0; i < E / split && saves; i++)
            out->saved[out->n_saved++] = entry(sc, r, p, i, split, k->save_names);
        for (int i = 0; i < E / later; i++)
            out->loaded[out->n_loaded++] = entry(sc, r, q, i, later, k->load_names);
    }
    return MOE_OK;
}
