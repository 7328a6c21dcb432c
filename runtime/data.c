/* data.c - see data.h. */
#include "runtime/data.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int moe_data_load(const char *path, int64_t window, struct moe_data *out)
{
    *out = (struct moe_data){.window = window, .hash = 0xcbf29ce484222325u};
    FILE *file = fopen(path, "rb");
    if (!file) return moe_fail(MOE_EINPUT, "%s: %s", path, strerror(errno));
    int cap = 0;
    size_t got;
    do {
        out->bytes = moe_grow(out->bytes, &cap, (int)out->n + (1 << 16), 1);
        got = fread(out->bytes + out->n, 1, 1 << 16, file);
        for (size_t i = 0; i < got; i++) out->hash = (out->hash ^ out->bytes[out->n++]) * 0x100000001b3u;
    } while (got && out->n < INT32_MAX / 4);
    int err = ferror(file) ? moe_fail(MOE_EINPUT, "%s: %s", path, strerror(errno)) : MOE_OK;
    if (!err && !feof(file)) err = moe_fail(MOE_EINPUT, "%s: larger than 512 MiB", path);
    if (!err && out->n < window + 1)
        err = moe_fail(MOE_EINPUT, "%s: %lld bytes, expected at least %lld", path, (long long)out->n,
                       (long long)window + 1);
    fclose(file);
    return err;
}

void moe_data_free(struct moe_data *d)
{
    free(d->bytes);
}

void moe_data_batch(const struct moe_data *d, uint64_t seed, int64_t step, int64_t first, int64_t n,
                    int32_t *token, int32_t *target)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t which = (first + i) / d->window, offset = (first + i) % d->window;
        double start = moe_uniform(seed, (uint64_t)step, (uint64_t)which) * (double)(d->n - d->window);
        const unsigned char *at = d->bytes + (int64_t)start + offset;
        token[i] = at[0];
        target[i] = at[1];
    }
}
