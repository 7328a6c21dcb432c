/* base.c - see base.h. */
#include "sim/base.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char last_error[1024];

int moe_fail(enum moe_err err, const char *format, ...)
{
    char text[sizeof last_error]; /* the arguments may hold moe_error() itself */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *p = text; *p; p++) /* names of files and keys may hold any */
        if (iscntrl((unsigned char)*p)) *p = '?';
    memcpy(last_error, text, sizeof last_error);
    return err;
}

const char *moe_error(void)
{
    return last_error;
}

int moe_exit_code(int err)
{
    switch (err) {
#define X(name, value, exit, text)                                                                           \
    case value: return exit;
        MOE_ERRORS(X)
#undef X
    }
    return 1;
}

void moe_bug(const char *file, int line, const char *what)
{
    fprintf(stderr, "moesim: bug: %s:%d: %s\n", file, line, what);
    abort();
}

void *moe_alloc(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (!p) {
        fprintf(stderr, "moesim: out of memory: %zu x %zu bytes\n", n, size);
        exit(1);
    }
    return p;
}

void *moe_grow(void *items, int *cap, int need, size_t size)
{
    if (need <= *cap) return items;
    int64_t wide = *cap ? *cap : 8;
    while (wide < need) wide *= 2;
    moe_assert(wide <= INT32_MAX);
    void *p = realloc(items, (size_t)wide * size);
    if (!p) {
        fprintf(stderr, "moesim: out of memory: %lld x %zu bytes\n", (long long)wide, size);
        exit(1);
    }
    memset((char *)p + (size_t)*cap * size, 0, (size_t)(wide - *cap) * size);
    *cap = (int)wide;
    return p;
}

void moe_copy_name(char out[MOE_NAME], const char *name)
{
    snprintf(out, MOE_NAME, "%s", name);
}

uint64_t moe_hash_name(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return h;
}

uint64_t moe_stream(uint64_t seed, uint64_t stream)
{
    return moe_hash64(moe_hash64(seed) ^ stream);
}

double moe_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    return moe_uniform_at(moe_stream(seed, stream), index);
}

static const struct suffix {
    const char *text;
    enum moe_unit unit;
    double factor;
} suffixes[] = {
    {"B/s", MOE_UNIT_BPS, 1},         {"kB/s", MOE_UNIT_BPS, 1e3},       {"MB/s", MOE_UNIT_BPS, 1e6},
    {"GB/s", MOE_UNIT_BPS, 1e9},      {"TB/s", MOE_UNIT_BPS, 1e12},      {"Gb/s", MOE_UNIT_BPS, 1e9 / 8},
    {"s", MOE_UNIT_SECONDS, 1},       {"ms", MOE_UNIT_SECONDS, 1e-3},    {"us", MOE_UNIT_SECONDS, 1e-6},
    {"ns", MOE_UNIT_SECONDS, 1e-9},   {"FLOP/s", MOE_UNIT_FLOPS, 1},     {"MFLOP/s", MOE_UNIT_FLOPS, 1e6},
    {"GFLOP/s", MOE_UNIT_FLOPS, 1e9}, {"TFLOP/s", MOE_UNIT_FLOPS, 1e12}, {"PFLOP/s", MOE_UNIT_FLOPS, 1e15},
    {"B", MOE_UNIT_BYTES, 1},         {"kB", MOE_UNIT_BYTES, 1e3},       {"MB", MOE_UNIT_BYTES, 1e6},
    {"GB", MOE_UNIT_BYTES, 1e9},      {"TB", MOE_UNIT_BYTES, 1e12},      {"GiB", MOE_UNIT_BYTES, 0x1p30},
    {"MiB", MOE_UNIT_BYTES, 0x1p20},  {"KiB", MOE_UNIT_BYTES, 0x1p10},   {"%", MOE_UNIT_SHARE, 0.01},
};

double moe_decimal(const char *text, char **end)
{
    const char *digits = text + strspn(text, " \t\n\v\f\r+-");
    double value = strtod(text, end);
    if (digits[0] == '0' && tolower((unsigned char)digits[1]) == 'x') *end = (char *)text;
    return value;
}

int moe_parse_quantity(const char *text, enum moe_unit unit, double *out)
{
#define X(name, example, meaning) example,
    static const char *const example[] = {MOE_UNITS(X)};
#undef X
    char *end;
    double number = moe_decimal(text, &end);
    if (end == text || !isfinite(number))
        return moe_fail(MOE_EINPUT, "'%s' is not a quantity (write 50 %s)", text, example[unit]);
    if (number < 0) return moe_fail(MOE_EINPUT, "'%s' is negative", text);
    while (*end == ' ') end++;
    if (!*end) return moe_fail(MOE_EINPUT, "no unit in '%s' (write %g %s)", text, number, example[unit]);
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        if (suffixes[i].unit != unit || strcmp(suffixes[i].text, end) != 0) continue;
        *out = number * suffixes[i].factor;
        if (!isfinite(*out)) return moe_fail(MOE_EINPUT, "'%s' is out of range", text);
        return MOE_OK;
    }
    return moe_fail(MOE_EINPUT, "unknown unit '%s' in '%s' (write %g %s)", end, text, number, example[unit]);
}

moe_ps moe_time(double amount, double rate)
{
    moe_assert(rate > 0);
    double ps = amount / rate * 1e12;
    return ps < 0x1p62 ? llround(ps) : INT64_MAX / 2;
}

static int edit_distance(const char *a, const char *b)
{
    int row[MOE_NAME + 1];
    int na = (int)strnlen(a, MOE_NAME), nb = (int)strnlen(b, MOE_NAME);
    for (int j = 0; j <= nb; j++) row[j] = j;
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[nb];
}

const char *moe_nearest(const char *word, const char *const *names, int n)
{
    const char *nearest = NULL, *longer = NULL;
    int best = (int)(strnlen(word, MOE_NAME) + 1) / 2, n_longer = 0;
    for (int i = 0; i < n; i++) {
        int d = edit_distance(word, names[i]);
        if (*word && !strncmp(word, names[i], strlen(word)) && n_longer++ == 0) longer = names[i];
        if (d < best) {
            best = d;
            nearest = names[i];
        }
    }
    return n_longer == 1 ? longer : nearest;
}

const char *moe_hint(const char *word, const char *const *names, int n, char out[MOE_HINT])
{
    const char *nearest = moe_nearest(word, names, n);
    int used = snprintf(out, MOE_HINT, "%s%s", nearest ? ", did you mean " : "", nearest ? nearest : "");
    for (int i = 0; i < n && !nearest && used < MOE_HINT; i++)
        used += snprintf(out + used, (size_t)(MOE_HINT - used), "%s%s", i ? ", " : ", known: ", names[i]);
    return out;
}
