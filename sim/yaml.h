/* yaml - a YAML file as a tree that remembers line numbers, and a table-driven reader of its mappings.
 *
 * Files met: scenarios and topologies, 20 to 200 lines. One document; anchors and tags are refused. */
#ifndef MOE_YAML_H
#define MOE_YAML_H

#include "sim/base.h"

enum moe_yaml_kind { MOE_YAML_SCALAR, MOE_YAML_LIST, MOE_YAML_MAP };

struct moe_yaml {
    enum moe_yaml_kind kind;
    int line;              /* 1-based */
    const char *file;      /* owned by the root */
    char *text;            /* SCALAR */
    int n;                 /* LIST, MAP: children */
    struct moe_yaml *item; /* [n] values */
    char **key;            /* [n] MAP */
    int *key_line;         /* [n] MAP */
};

/* Reads a file, or text under the name `file` (for messages); a byte order mark
 * before it is left out. Result: *out, to be freed with moe_yaml_free.
 * Errors: MOE_EINPUT "file:line: ..." for what libyaml refuses, a repeated key, an anchor, a tag, a zero
 * byte, an empty or a second document, over 32 levels, 1,000 keys in a mapping or 1,000,000 values; "file:
 * ..." when it cannot be read, is over 16 MB, or has a %TAG. Then *out is NULL. */
int moe_yaml_load(const char *file, struct moe_yaml **out);
int moe_yaml_parse(const char *file, const char *text, size_t bytes, struct moe_yaml **out);
void moe_yaml_free(struct moe_yaml *root);

enum moe_key_kind {
    MOE_KEY_INT,      /* int64_t at offset; within [min, max] */
    MOE_KEY_REAL,     /* double, a plain number within [min, max] */
    MOE_KEY_QUANTITY, /* double, a number with a unit; above 0 unless min < 0, at most max */
    MOE_KEY_TEXT,     /* char[MOE_NAME] */
    MOE_KEY_CHOICE,   /* int: place in the NULL-ended list `choices` */
    MOE_KEY_NODE,     /* const struct moe_yaml *: the value itself, read by the caller; borrowed */
};

/* One key of a mapping. Absent optional keys leave the member untouched (fill defaults first). */
struct moe_key {
    const char *name;
    enum moe_key_kind kind;
    size_t offset;
    bool required;
    double min, max;            /* INT, REAL; QUANTITY: max, 0: none */
    enum moe_unit unit;         /* QUANTITY */
    const char *const *choices; /* CHOICE */
};

/* Reads mapping `map` into the struct at `out` by `keys` [n].
 * Errors: MOE_EINPUT, one line "file:line: ..." for a node that is no mapping, an unknown key (with the
 * nearest known one), a missing required key, a value of the wrong kind, out of range,
 * without its unit, or none of the choices (with the nearest one). */
int moe_yaml_read(const struct moe_yaml *map, const struct moe_key *keys, int n, void *out);

#endif
