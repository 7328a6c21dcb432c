/* checkpoint - how a framework stores the parameters of experts and finds them again, as a user writes it.
 *
 *   checkpoint:
 *     save: {names: global, by: owners, files: one}
 *     load: {names: global, expert_parallel: 4, absent: stop}
 *
 *   names   global: an expert is called by its number in the model; local: by its number on the rank
 *   by      owners: the first of the ranks that hold an expert; all of them; first: the first rank of a
 *           stage alone
 *   files   one for all ranks; ranks: one for each rank that splits the experts, and it reads that of its own
 *           place; merged: these, afterwards put together by name
 *   expert_parallel   of the job that loads, on as many ranks; the default is that of the layout
 *   absent  what becomes of an expert that is not found: stop, initial (it keeps its initial values), zero
 *
 * These are the defaults (but for expert_parallel), with which every expert is found by any number of ranks.
 * check says which expert is lost, or loaded in place of another (class C15); nothing else reads this:
 * capture's own checkpoints (--save, --load) are right. */
#ifndef MOE_CHECKPOINT_KEYS_H
#define MOE_CHECKPOINT_KEYS_H

#include "sim/base.h"

struct moe_yaml;

enum moe_stored_names { MOE_NAMES_GLOBAL, MOE_NAMES_LOCAL };
enum moe_stored_by { MOE_SAVED_BY_OWNERS, MOE_SAVED_BY_ALL, MOE_SAVED_BY_FIRST };
enum moe_stored_files { MOE_FILES_ONE, MOE_FILES_RANKS, MOE_FILES_MERGED };

struct moe_checkpoint_keys {
    bool given;
    int save_names, by, files, load_names, absent; /* enums above; enum moe_absent */
    int64_t expert_parallel;                       /* of the job that loads; 0: the same */
    int line;                                      /* of the file where that is said */
};

/* Errors: MOE_EINPUT "file:line: ..." for unknown keys and words. */
int moe_checkpoint_read(const struct moe_yaml *node, struct moe_checkpoint_keys *out);

#endif
