/* yaml.c - see yaml.h.
 *
 * Nodes are made from libyaml's events by recursion, at most MAX_DEPTH deep. MAX_NODES bounds the memory and
 * MAX_KEYS the search for repeated keys, whatever the input. */
#include "sim/yaml.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { MAX_BYTES = 16000000, MAX_NODES = 1000000, MAX_KEYS = 1000, MAX_DEPTH = 32 };

struct reader {
    yaml_parser_t parser;
    yaml_event_t event; /* the current one */
    const char *file, *text;
    int n_nodes;
};

static int refuse(const struct reader *r, const char *what)
{
    return moe_fail(MOE_EINPUT, "%s:%zu: %s", r->file, r->event.start_mark.line + 1, what);
}

static int next_event(struct reader *r)
{
    const yaml_parser_t *p = &r->parser;
    yaml_event_delete(&r->event);
    if (yaml_parser_parse(&r->parser, &r->event)) return MOE_OK;
    size_t line = p->problem_mark.line + 1;
    if (p->error == YAML_READER_ERROR) { /* wrong encoding: libyaml knows the byte only */
        line = 1;
        for (size_t i = 0; i < p->problem_offset; i++) line += r->text[i] == '\n';
    }
    return moe_fail(MOE_EINPUT, "%s:%zu: %s", r->file, line, p->problem ? p->problem : "out of memory");
}

static int copy_scalar(const struct reader *r, char **out)
{
    const char *value = (const char *)r->event.data.scalar.value;
    size_t length = r->event.data.scalar.length;
    if (strlen(value) != length) return refuse(r, "a zero byte in a text");
    *out = moe_alloc(length + 1, 1);
    memcpy(*out, value, length);
    return MOE_OK;
}

/* The data of all four events that stand for a node begin with the anchor; an alias has one, and the others
 * go on with the tag. */
static int check_plain(const struct reader *r)
{
    if (r->event.data.scalar.anchor) return refuse(r, "anchors are not supported");
    return r->event.data.scalar.tag ? refuse(r, "tags are not supported") : MOE_OK;
}

static int read_key(struct reader *r, struct moe_yaml *map, int i)
{
    MOE_TRY(check_plain(r));
    if (r->event.type != YAML_SCALAR_EVENT) return refuse(r, "a key that is no single word");
    if (i >= MAX_KEYS) return refuse(r, "over 1,000 keys in a mapping");
    map->key_line[i] = (int)r->event.start_mark.line + 1;
    MOE_TRY(copy_scalar(r, &map->key[i]));
    for (int j = 0; j < i; j++) {
        if (strcmp(map->key[j], map->key[i]) != 0) continue;
        return moe_fail(MOE_EINPUT, "%s:%d: key '%s' is already in line %d", r->file, map->key_line[i],
                        map->key[i], map->key_line[j]);
    }
    return next_event(r);
}

static int read_node(struct reader *r, struct moe_yaml *node, int depth);

static int read_children(struct reader *r, struct moe_yaml *node, int depth)
{
    int cap_item = 0, cap_key = 0, cap_line = 0;
    if (depth == MAX_DEPTH) return refuse(r, "nested over 32 levels deep");
    for (;;) {
        MOE_TRY(next_event(r));
        if (r->event.type == YAML_SEQUENCE_END_EVENT || r->event.type == YAML_MAPPING_END_EVENT)
            return MOE_OK;
        int i = node->n++; /* counted first: what is here so far is freed when reading fails */
        node->item = moe_grow(node->item, &cap_item, node->n, sizeof *node->item);
        if (node->kind == MOE_YAML_MAP) {
            node->key = moe_grow(node->key, &cap_key, node->n, sizeof *node->key);
            node->key_line = moe_grow(node->key_line, &cap_line, node->n, sizeof *node->key_line);
            MOE_TRY(read_key(r, node, i));
        }
        MOE_TRY(read_node(r, &node->item[i], depth + 1));
    }
}

/* Fills a zeroed node from the current event and those that belong to it. */
static int read_node(struct reader *r, struct moe_yaml *node, int depth)
{
    const yaml_event_t *e = &r->event;
    node->file = r->file;
    node->line = (int)e->start_mark.line + 1;
    MOE_TRY(check_plain(r));
    if (++r->n_nodes > MAX_NODES) return refuse(r, "over 1,000,000 values");
    if (e->type == YAML_SCALAR_EVENT) return copy_scalar(r, &node->text);
    node->kind = e->type == YAML_MAPPING_START_EVENT ? MOE_YAML_MAP : MOE_YAML_LIST;
    return read_children(r, node, depth);
}

static int read_document(struct reader *r, struct moe_yaml *root)
{
    MOE_TRY(next_event(r)); /* start of the stream */
    MOE_TRY(next_event(r));
    if (r->event.type == YAML_STREAM_END_EVENT) return refuse(r, "an empty document");
    MOE_TRY(next_event(r));
    MOE_TRY(read_node(r, root, 0));
    if (root->kind == MOE_YAML_SCALAR && !*root->text) return refuse(r, "an empty document");
    MOE_TRY(next_event(r)); /* end of the document */
    MOE_TRY(next_event(r));
    return r->event.type == YAML_STREAM_END_EVENT ? MOE_OK : refuse(r, "a second document");
}

int moe_yaml_parse(const char *file, const char *text, size_t bytes, struct moe_yaml **out)
{
    struct moe_yaml *root = moe_alloc(1, sizeof *root);
    root->file = strcpy(moe_alloc(strlen(file) + 1, 1), file);
    struct reader r = {.file = root->file, .text = text};
    int err;
    *out = NULL;
    if (bytes >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) { /* a byte order mark, which UTF-8 may begin with */
        r.text = text += 3;
        bytes -= 3;
    }
    moe_assert(yaml_parser_initialize(&r.parser)); /* fails only without memory */
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, bytes);
    if (bytes > MAX_BYTES)
        err = moe_fail(MOE_EINPUT, "%s: over 16 MB", file);
    else if (memmem(text, bytes, "%TAG", 4)) /* libyaml compares each with all before it */
        err = moe_fail(MOE_EINPUT, "%s: %%TAG is not supported", file);
    else
        err = read_document(&r, root);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    if (err < 0) {
        moe_yaml_free(root);
        return err;
    }
    *out = root;
    return MOE_OK;
}

int moe_yaml_load(const char *file, struct moe_yaml **out)
{
    int err;
    *out = NULL;
    FILE *f = fopen(file, "rb");
    if (!f) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", file, strerror(errno));
    char *text = moe_alloc(MAX_BYTES + 1, 1);
    size_t bytes = fread(text, 1, MAX_BYTES + 1, f);
    if (ferror(f))
        err = moe_fail(MOE_EINPUT, "%s: cannot be read: %s", file, strerror(errno));
    else
        err = moe_yaml_parse(file, text, bytes, out);
    free(text);
    fclose(f);
    return err;
}

static void free_content(struct moe_yaml *node)
{
    for (int i = 0; i < node->n; i++) {
        if (node->key) free(node->key[i]);
        free_content(&node->item[i]);
    }
    free(node->text);
    free(node->item);
    free(node->key);
    free(node->key_line);
}

void moe_yaml_free(struct moe_yaml *root)
{
    if (!root) return;
    free((char *)root->file);
    free_content(root);
    free(root);
}

/* The readers of one value each: text to *at. Their messages do not name the place: moe_yaml_read does. */

static int read_int(const char *text, const struct moe_key *key, int64_t *at)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || isspace((unsigned char)*text) || (double)value < key->min ||
        (double)value > key->max)
        return moe_fail(MOE_EINPUT, "expected an integer from %.0f to %.0f, not '%s'", key->min, key->max,
                        text);
    *at = value;
    return MOE_OK;
}

static int read_real(const char *text, const struct moe_key *key, double *at)
{
    char *end;
    double value = moe_decimal(text, &end);
    if (end == text || *end || !(value >= key->min && value <= key->max))
        return moe_fail(MOE_EINPUT, "expected a number from %g to %g, not '%s'", key->min, key->max, text);
    *at = value;
    return MOE_OK;
}

static int read_quantity(const char *text, const struct moe_key *key, double *at)
{
    double value;
    MOE_TRY(moe_parse_quantity(text, key->unit, &value));
    if (value == 0 && key->min >= 0) return moe_fail(MOE_EINPUT, "expected more than 0, not '%s'", text);
    if (key->max > 0 && value > key->max * (1 + 1e-12))
        return moe_fail(MOE_EINPUT, "'%s' is too much for it", text);
    *at = value;
    return MOE_OK;
}

static int read_text(const char *text, char *at)
{
    if (!*text) return moe_fail(MOE_EINPUT, "expected a text");
    if (strlen(text) >= MOE_NAME)
        return moe_fail(MOE_EINPUT, "'%s' is over %d bytes long", text, MOE_NAME - 1);
    moe_copy_name(at, text);
    return MOE_OK;
}

static int read_choice(const char *text, const struct moe_key *key, int *at)
{
    char all[256] = "";
    int n = 0;
    for (; key->choices[n]; n++) {
        if (strcmp(key->choices[n], text) == 0) {
            *at = n;
            return MOE_OK;
        }
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", n ? ", " : "", key->choices[n]);
    }
    const char *nearest = moe_nearest(text, key->choices, n);
    return moe_fail(MOE_EINPUT, "expected one of %s, not '%s'%s%s%s", all, text,
                    nearest ? " (did you mean '" : "", nearest ? nearest : "", nearest ? "'?)" : "");
}

static int read_value(const struct moe_yaml *node, const struct moe_key *key, void *at)
{
    if (key->kind == MOE_KEY_NODE) {
        *(const struct moe_yaml **)at = node;
        return MOE_OK;
    }
    if (node->kind != MOE_YAML_SCALAR)
        return moe_fail(MOE_EINPUT, "expected one value, not a list or a mapping");
    switch (key->kind) {
    case MOE_KEY_INT: return read_int(node->text, key, at);
    case MOE_KEY_REAL: return read_real(node->text, key, at);
    case MOE_KEY_QUANTITY: return read_quantity(node->text, key, at);
    case MOE_KEY_TEXT: return read_text(node->text, at);
    default: return read_choice(node->text, key, at);
    }
}

static int unknown_key(const struct moe_yaml *map, int i, const struct moe_key *keys, int n)
{
    const char **names = moe_alloc((size_t)n, sizeof *names);
    for (int k = 0; k < n; k++) names[k] = keys[k].name;
    const char *nearest = moe_nearest(map->key[i], names, n);
    free(names);
    return moe_fail(MOE_EINPUT, "%s:%d: unknown key '%.*s'%s%s%s", map->file, map->key_line[i], MOE_NAME,
                    map->key[i], nearest ? " (did you mean '" : "", nearest ? nearest : "",
                    nearest ? "'?)" : "");
}

static int read_pair(const struct moe_yaml *map, int i, const struct moe_key *keys, int n, void *out)
{
    for (int k = 0; k < n; k++) {
        if (strcmp(keys[k].name, map->key[i]) != 0) continue;
        if (read_value(&map->item[i], &keys[k], (char *)out + keys[k].offset) == MOE_OK) return MOE_OK;
        return moe_fail(MOE_EINPUT, "%s:%d: %s: %s", map->file, map->key_line[i], keys[k].name, moe_error());
    }
    return unknown_key(map, i, keys, n);
}

static bool has_key(const struct moe_yaml *map, const char *name)
{
    for (int i = 0; i < map->n; i++)
        if (strcmp(map->key[i], name) == 0) return true;
    return false;
}

int moe_yaml_read(const struct moe_yaml *map, const struct moe_key *keys, int n, void *out)
{
    if (map->kind != MOE_YAML_MAP)
        return moe_fail(MOE_EINPUT, "%s:%d: expected a mapping (key: value)", map->file, map->line);
    for (int i = 0; i < map->n; i++) MOE_TRY(read_pair(map, i, keys, n, out));
    for (int k = 0; k < n; k++)
        if (keys[k].required && !has_key(map, keys[k].name))
            return moe_fail(MOE_EINPUT, "%s:%d: key '%s' is missing", map->file, map->line, keys[k].name);
    return MOE_OK;
}
