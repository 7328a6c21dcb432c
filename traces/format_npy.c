/* format_npy.c - see format.h: NumPy arrays of expert ids.
 *
 * A file routed_experts_stepS_rankR.npy per step and rank, [tokens, layers, top_k], as np.save writes what
 * vLLM and others return. Read are also [tokens, top_k], of one layer, and other widths of integers. A file
 * whose name does not end in "stepS_rankR.npy" is step 0 of the rank that is its place among the files. An
 * array has no place for the layers' numbers: only steps with all layers of the run are written.
 *
 * Source: NEP 1 and numpy.lib.format, versions 1 to 3. */
#include "traces/format.h"
#include "traces/store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char magic[6] = {'\x93', 'N', 'U', 'M', 'P', 'Y'};

/* ---- export ---- */

enum { HEADER = 118 }; /* with what is before it, 128 bytes; what np.save makes of the largest shape, too */

static int write_step(struct moe_export *e)
{
    const struct moe_routed *r = &e->routed;
    const size_t L = (size_t)r->n_layers, T = (size_t)r->layers[0].n_tokens, K = (size_t)r->top_k;
    char name[64], header[HEADER];
    int32_t highest = 0;
    snprintf(name, sizeof name, "routed_experts_step%lld_rank%d.npy", (long long)r->step, r->rank);
    if (r->n_layers != e->n_layers || r->layers[L - 1].layer != e->n_layers - 1) /* they ascend from 0 */
        return moe_fail(MOE_EINPUT, "%s: has %d layers up to layer %d, expected each of the run's %d", name,
                        r->n_layers, r->layers[L - 1].layer, e->n_layers);
    for (size_t l = 0; l < L; l++)
        if (r->layers[l].n_tokens != r->layers[0].n_tokens)
            return moe_fail(MOE_EINPUT, "%s: layers of %lld and %lld tokens do not fit in one array", name,
                            (long long)r->layers[0].n_tokens, (long long)r->layers[l].n_tokens);
    MOE_TRY(moe_export_begin(e, name));
    unsigned char *data = moe_alloc(T * L * K, 2), *p = data;
    for (size_t t = 0; t < T; t++)
        for (size_t l = 0; l < L; l++)
            for (size_t k = 0; k < K; k++) {
                int32_t id = r->layers[l].ids[t * K + k];
                if (id > highest) highest = id;
                *p++ = (unsigned char)id;
                *p++ = (unsigned char)(id >> 8);
            }
    fwrite(magic, 1, sizeof magic, e->file);
    fwrite((char[4]){1, 0, HEADER, 0}, 1, 4, e->file); /* version, length */
    snprintf(header, sizeof header, "{'descr': '<%c2', 'fortran_order': False, 'shape': (%zu, %zu, %zu), }",
             highest > INT16_MAX ? 'u' : 'i', T, L, K);
    fprintf(e->file, "%-*s\n", HEADER - 1, header);
    fwrite(data, 1, (size_t)(p - data), e->file);
    free(data);
    return MOE_OK;
}

/* ---- import ---- */

struct array {
    size_t T, L, K, width; /* width: bytes an id */
    bool is_signed;
};

/* What follows 'key': in the header, or "". */
static const char *value_of(const char *header, const char *key)
{
    const char *p = strstr(header, key);
    return p ? p + strlen(key) + strspn(p + strlen(key), " ") : "";
}

/* header: the text, "{'descr': ...}". data_bytes: of the file. */
static int read_header(const char *header, size_t data_bytes, struct array *out)
{
    char order = 0, kind = 0, width = 0;
    unsigned long long d[3];
    const char *shape = value_of(header, "'shape':");
    if (sscanf(value_of(header, "'descr':"), "'%c%c%c'", &order, &kind, &width) < 3 || !strchr("iu", kind) ||
        !strchr("1248", width) || !strchr(width == '1' ? "|<" : "<", order))
        return moe_fail(MOE_EINPUT, "expected little-endian integers of 1 to 8 bytes");
    if (strncmp(value_of(header, "'fortran_order':"), "False", 5) != 0)
        return moe_fail(MOE_EINPUT, "expected C order");
    int n = sscanf(shape, "(%19llu, %19llu, %19llu)", &d[0], &d[1], &d[2]), end = 0;
    sscanf(shape, n == 2 ? "(%*u, %*u)%n" : "(%*u, %*u, %*u)%n", &end);
    if (n < 2 || end == 0)
        return moe_fail(MOE_EINPUT, "expected an array [tokens, layers, top_k] or [tokens, top_k]");
    *out = (struct array){d[0], n == 3 ? d[1] : 1, d[n - 1], (size_t)(width - '0'), kind == 'i'};
    if (out->L < 1 || out->L > UINT16_MAX || out->K < 1 || out->K > UINT16_MAX ||
        out->T > INT32_MAX / out->K || data_bytes != out->T * out->L * out->K * out->width)
        return moe_fail(MOE_EINPUT,
                        "%zu bytes of data do not fit its shape (%zu tokens, %zu layers, top-%zu)",
                        data_bytes, out->T, out->L, out->K);
    return MOE_OK;
}

static int read_id(const struct array *a, const unsigned char *p, int32_t *out)
{
    uint64_t id = 0;
    for (size_t i = 0; i < a->width; i++) id |= (uint64_t)p[i] << 8 * i;
    bool negative = a->is_signed && p[a->width - 1] & 0x80;
    if (negative || id > UINT16_MAX) return moe_fail(MOE_EINPUT, "expected experts from 0 to 65535");
    *out = (int32_t)id;
    return MOE_OK;
}

static int read_data(const struct array *a, const unsigned char *data, struct moe_routed *r)
{
    int32_t *ids = moe_alloc(a->T * a->K, sizeof *ids);
    int err = MOE_OK;
    for (size_t l = 0; l < a->L && err >= 0; l++) {
        for (size_t i = 0; i < a->T * a->K && err >= 0; i++) {
            size_t t = i / a->K, k = i % a->K;
            err = read_id(a, data + ((t * a->L + l) * a->K + k) * a->width, &ids[i]);
            if (err < 0) moe_fail(err, "token %zu, layer %zu: %s", t, l, moe_error());
        }
        if (err >= 0) err = moe_routed_add(r, (int)l, (int64_t)a->T, (int)a->K, ids);
    }
    free(ids);
    return err;
}

/* bytes [n + 1], zero at the end */
static int read_array(unsigned char *bytes, size_t n, struct moe_routed *r)
{
    struct array a = {0};
    if (n < 12 || memcmp(bytes, magic, sizeof magic) != 0 || bytes[6] < 1 || bytes[6] > 3)
        return moe_fail(MOE_EINPUT, "not a .npy file of version 1 to 3");
    size_t length = (size_t)bytes[8] | (size_t)bytes[9] << 8, start = 10;
    if (bytes[6] > 1) length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24, start = 12;
    if (length < 1 || length > n - start || bytes[start + length - 1] != '\n')
        return moe_fail(MOE_EINPUT, "its header has no end");
    bytes[start + length - 1] = '\0';
    MOE_TRY(read_header((const char *)bytes + start, n - start - length, &a));
    return read_data(&a, bytes + start + length, r);
}

/* Of "...stepS_rankR.npy"; else they stay. */
static void read_name(const char *path, struct moe_routed *r)
{
    const char *slash = strrchr(path, '/'), *p = slash ? slash : path;
    long long step;
    int rank, end = 0;
    for (; (p = strstr(p, "step")); p++)
        if (sscanf(p, "step%18lld_rank%9d.npy%n", &step, &rank, &end) == 2 && end > 0 && !p[end]) {
            r->step = step;
            r->rank = rank;
        }
}

static int read_file(struct moe_import *in, const char *path, struct moe_routed *r)
{
    int64_t n;
    MOE_TRY(moe_import_size(path, &n));
    FILE *f = fopen(path, "r");
    if (!f) return moe_fail(MOE_EINPUT, "%s: cannot be read: %s", path, strerror(errno));
    unsigned char *bytes = moe_alloc((size_t)n + 1, 1);
    int err = MOE_OK;
    if (fread(bytes, 1, (size_t)n, f) != (size_t)n) err = moe_fail(MOE_EINPUT, "%s", strerror(errno));
    if (err >= 0) err = read_array(bytes, (size_t)n, r);
    if (err >= 0) err = moe_import_add(in, r);
    free(bytes);
    fclose(f);
    return err < 0 ? moe_fail(err, "%s: %s", path, moe_error()) : MOE_OK;
}

static int read_files(struct moe_import *in, const char *const *files, int n_files)
{
    int err = MOE_OK;
    for (int i = 0; i < n_files && err >= 0; i++) {
        struct moe_routed r = {.rank = i};
        read_name(files[i], &r);
        if (r.step < 0 || r.rank < 0)
            err = moe_fail(MOE_EINPUT, "%s: is step %lld of rank %d, expected 0 and more", files[i],
                           (long long)r.step, r.rank);
        else
            err = read_file(in, files[i], &r);
        moe_routed_clear(&r);
    }
    return err;
}

const struct moe_format moe_format_npy = {
    .name = "npy", .suffix = ".npy", .write = write_step, .read = read_files};
