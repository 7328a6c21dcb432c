/* checkpoint.c - see checkpoint.h. */
#include "runtime/checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC 0x736b6365686d6f65u /* also tells the byte order */
enum { VERSION = 1 };

struct header {
    uint64_t magic;
    uint32_t version;
    int32_t n_ranks;
    int64_t steps;
    uint64_t model; /* hash over the tensors, the same on any layout */
    int64_t bytes;  /* of the file */
};

struct key {
    char name[MOE_NAME];
    int32_t layer, expert; /* global expert; 0 for what is whole */
    int64_t bytes;
};

struct piece {
    struct key key;
    char *content; /* on the host, in the execution */
    bool found;
};

/* What persists on this rank. */
struct pieces {
    struct piece *all;
    int n, cap;
    uint64_t model;
};

/* The communicator that splits a tensor that persists, or -1. The optimizer's state is split like the
 * parameter that the same operation updates. */
static int shard_of(const struct moe_schedule *s, const struct moe_role *role, int buffer)
{
    for (int p = 0; p < s->n_params; p++)
        if (s->params[p].buffer == buffer) return s->params[p].shard;
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            for (int i = 1; i < op->n_writes; i++)
                if (op->writes[i].buffer == buffer) return shard_of(s, role, op->writes[0].buffer);
        }
    return -1;
}

static int add_tensor(struct pieces *pieces, struct moe_execution *x, int buffer, int layer)
{
    const struct moe_schedule *s = moe_execute_schedule(x);
    const int rank = moe_execute_rank(x), shard = shard_of(s, &s->roles[s->role_of[rank]], buffer);
    const struct moe_comm *comm = shard < 0 ? NULL : &s->comms[shard];
    const int members = comm ? moe_group_size(comm, comm->group_of[rank]) : 1;
    const int n_experts = comm ? s->n_experts / members : 1,
              first = comm ? comm->index_of[rank] * n_experts : 0;
    const struct moe_buffer *b = &s->buffers[buffer];
    int64_t n;
    char *content = moe_execute_param(x, buffer, layer, &n);
    if (!content) return MOE_EFAILED;
    const uint64_t facts[] = {moe_hash_name(b->name), (uint64_t)layer, b->type, (uint64_t)(n * members)};
    for (int i = 0; i < 4; i++) pieces->model = moe_hash64(pieces->model ^ facts[i]);
    const int64_t bytes = n / n_experts * moe_type_bytes[b->type];
    for (int e = 0; e < n_experts; e++) {
        pieces->all = moe_grow(pieces->all, &pieces->cap, pieces->n + 1, sizeof *pieces->all);
        struct piece *piece = &pieces->all[pieces->n++];
        *piece = (struct piece){.key = {.layer = layer, .expert = first + e, .bytes = bytes}};
        moe_copy_name(piece->key.name, b->name);
        piece->content = content + e * bytes;
    }
    return MOE_OK;
}

/* What shapes the model without shaping a tensor: the heads and the sequences of its attention. */
static void add_attention(struct pieces *pieces, const struct moe_schedule *s, int rank)
{
    const struct moe_role *role = &s->roles[s->role_of[rank]];
    for (int b = 0; b < role->n_blocks; b++)
        for (int o = 0; o < role->blocks[b].n_ops; o++) {
            const struct moe_op *op = &role->blocks[b].ops[o];
            for (int i = 2; op->kind == MOE_KERNEL && op->kernel == MOE_K_ATTENTION && i < op->n_dims; i++)
                pieces->model = moe_hash64(
                    pieces->model ^ (uint64_t)moe_eval(s, (struct moe_env){0}, op->dims[i], rank, 0, 0));
        }
}

static int list_pieces(struct pieces *out, struct moe_execution *x)
{
    const struct moe_schedule *s = moe_execute_schedule(x);
    *out = (struct pieces){.model = (uint64_t)s->n_experts};
    add_attention(out, s, moe_execute_rank(x));
    for (int b = 0; b < s->n_buffers; b++) {
        const enum moe_buffer_role role = s->buffers[b].role;
        for (int i = 0; i < s->buffers[b].slots; i++)
            if (role == MOE_BUF_PARAM || role == MOE_BUF_STATE) MOE_TRY(add_tensor(out, x, b, i));
    }
    return MOE_OK;
}

static int set_path(char path[PATH_MAX], const char *prefix, int rank, const char *suffix)
{
    if (snprintf(path, PATH_MAX, "%s.ckpt%d%s", prefix, rank, suffix) < PATH_MAX) return MOE_OK;
    return moe_fail(MOE_EUSAGE, "the path of the checkpoint is too long");
}

/* ---- save ---- */

static int write_pieces(const char *path, const struct pieces *pieces, struct header header)
{
    FILE *file = fopen(path, "wb");
    if (!file) return moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    header.bytes = sizeof header;
    for (int i = 0; i < pieces->n; i++)
        header.bytes += (int64_t)sizeof(struct key) + pieces->all[i].key.bytes;
    bool good = fwrite(&header, sizeof header, 1, file) == 1;
    for (int i = 0; good && i < pieces->n; i++) {
        const struct piece *p = &pieces->all[i];
        good = fwrite(&p->key, sizeof p->key, 1, file) == 1 &&
               fwrite(p->content, 1, (size_t)p->key.bytes, file) == (size_t)p->key.bytes;
    }
    good = good && fflush(file) == 0 && fsync(fileno(file)) == 0; /* before it gets its name */
    int error = good ? 0 : errno;
    if (fclose(file) != 0 && !error) error = errno;
    return error ? moe_fail(MOE_EFAILED, "%s: %s", path, strerror(error)) : MOE_OK;
}

int moe_checkpoint_save(const char *prefix, struct moe_execution *x)
{
    char path[PATH_MAX], beside[PATH_MAX];
    struct pieces pieces;
    MOE_TRY(set_path(path, prefix, moe_execute_rank(x), ""));
    MOE_TRY(set_path(beside, prefix, moe_execute_rank(x), ".new"));
    int err = list_pieces(&pieces, x);
    const struct header header = {MAGIC, VERSION, moe_execute_schedule(x)->n_ranks, moe_execute_steps(x),
                                  pieces.model};
    if (err >= 0) err = write_pieces(beside, &pieces, header);
    if (err >= 0 && rename(beside, path) != 0) err = moe_fail(MOE_EFAILED, "%s: %s", path, strerror(errno));
    if (err < 0) remove(beside);
    free(pieces.all);
    return err;
}

/* ---- load ---- */

static int check_header(const char *path, const struct header *h, const struct header *first, int64_t bytes)
{
    if (bytes < (int64_t)sizeof *h || h->magic != MAGIC)
        return moe_fail(MOE_EINPUT, "%s: no moesim checkpoint", path);
    if (h->version != VERSION)
        return moe_fail(MOE_EINPUT, "%s: checkpoint version %" PRIu32 ", this program reads %d", path,
                        h->version, VERSION);
    if (h->model != first->model)
        return moe_fail(MOE_EINPUT,
                        "%s: of another model: tensors, heads, sequence, dtype or optimizer differ", path);
    if (h->n_ranks != first->n_ranks || h->steps != first->steps)
        return moe_fail(MOE_EINPUT, "%s: %d ranks after %lld steps, rank 0 saved %d ranks after %lld", path,
                        h->n_ranks, (long long)h->steps, first->n_ranks, (long long)first->steps);
    if (h->bytes != bytes)
        return moe_fail(MOE_EINPUT, "%s: truncated: %lld bytes, expected %lld", path, (long long)bytes,
                        (long long)h->bytes);
    return MOE_OK;
}

static struct piece *find(const struct pieces *pieces, const struct key *key)
{
    for (int i = 0; i < pieces->n; i++) {
        const struct key *k = &pieces->all[i].key;
        if (k->layer == key->layer && k->expert == key->expert && !strncmp(k->name, key->name, MOE_NAME))
            return &pieces->all[i];
    }
    return NULL;
}

/* Takes what this rank needs and has not yet. */
static int read_pieces(const char *path, FILE *file, const struct pieces *pieces, int64_t bytes)
{
    struct key key;
    while (ftello(file) < bytes) {
        bool good = fread(&key, sizeof key, 1, file) == 1;
        struct piece *p = good ? find(pieces, &key) : NULL;
        if (p && !p->found)
            good = key.bytes == p->key.bytes &&
                   fread(p->content, 1, (size_t)key.bytes, file) == (size_t)key.bytes;
        else if (good)
            good = key.bytes >= 0 && key.bytes <= bytes && fseeko(file, (off_t)key.bytes, SEEK_CUR) == 0;
        if (!good) return moe_fail(MOE_EINPUT, "%s: broken at byte %lld", path, (long long)ftello(file));
        if (p) p->found = true;
    }
    return MOE_OK;
}

/* first: header of the first file; its n_ranks is 0 until then. */
static int read_file(const char *path, const struct pieces *pieces, struct header *first)
{
    FILE *file = fopen(path, "rb");
    if (!file) return moe_fail(MOE_EINPUT, "%s: %s", path, strerror(errno));
    struct header h = {0};
    int err = fseeko(file, 0, SEEK_END) < 0 ? moe_fail(MOE_EINPUT, "%s: %s", path, strerror(errno)) : MOE_OK;
    const int64_t bytes = ftello(file);
    rewind(file);
    if (err >= 0 && fread(&h, sizeof h, 1, file) == 1 && !first->n_ranks) {
        first->n_ranks = h.n_ranks;
        first->steps = h.steps;
    }
    if (err >= 0) err = check_header(path, &h, first, bytes);
    if (err >= 0) err = read_pieces(path, file, pieces, bytes);
    fclose(file);
    return err;
}

int moe_checkpoint_load(const char *prefix, struct moe_execution *x)
{
    char path[PATH_MAX];
    struct pieces pieces;
    int err = list_pieces(&pieces, x), rank = 0;
    struct header first = {.model = pieces.model};
    do {
        if (err >= 0) err = set_path(path, prefix, rank, "");
        if (err >= 0) err = read_file(path, &pieces, &first);
    } while (err >= 0 && ++rank < first.n_ranks);
    for (int i = 0; err >= 0 && i < pieces.n; i++)
        if (!pieces.all[i].found)
            err = moe_fail(MOE_EINPUT, "%s: no file holds %s of layer %d, expert %d", prefix,
                           pieces.all[i].key.name, pieces.all[i].key.layer, pieces.all[i].key.expert);
    if (err >= 0) moe_execute_set_steps(x, first.steps);
    free(pieces.all);
    return err;
}
