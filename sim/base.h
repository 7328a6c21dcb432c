/* base - errors, memory, units, seeds: what every other file stands on.
 *
 * Dimensions, one meaning everywhere: T tokens on a rank, H hidden, F expert ffn, E experts, K experts per
 * token, R ranks, N nodes, L layers or links, V vocabulary; the lower-case letter is the index.
 * Ownership: const means borrowed until the call returns; what _new/_load/_open returns you give back once to
 * _free/_close; _free(NULL) is fine. Bugs abort (moe_assert), out of memory exits: neither is ever returned.
 */
#ifndef MOE_BASE_H
#define MOE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* clang-format off */
/*        name     value exit  meaning */
#define MOE_ERRORS(X) \
        X(OK,       0,   0, "done") \
        X(EFAILED, -1,   1, "the outside world failed: disk, process, library") \
        X(EUSAGE,  -2,   2, "wrong command line") \
        X(EINPUT,  -3,   3, "wrong input: file, line and what was expected are in moe_error()") \
        X(EMISSING,-4,   4, "a facility is missing: no MPI, no gnuplot, no GPU") \
        X(EVERDICT,-5,   5, "a verdict or a threshold failed") \
        X(EPEER,   -6,   1, "a peer did not answer in time, or answered with other sizes") \
        X(ELAYOUT, -7,   3, "wrong input: sizes of a layout do not go together; a verdict of check")
/* clang-format on */
#define X(name, value, exit, text) MOE_##name = value,
enum moe_err { MOE_ERRORS(X) };
#undef X

enum { MOE_NAME = 48 }; /* bytes of every name field, the closing zero included */

typedef int64_t moe_ps; /* time: integer picoseconds; 9.2e18 ps = 106 days */

/* Records one line "file:line: what, expected what" for moe_error() and returns err, so that callers write
 * `return moe_fail(MOE_EINPUT, ...)`. The text is kept per thread; the last one wins.
 * Control bytes become '?'. */
int moe_fail(enum moe_err err, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *moe_error(void);
int moe_exit_code(int err); /* the documented exit code of an enum moe_err */

#define MOE_TRY(call)                                                                                        \
    do {                                                                                                     \
        int moe_try_err_ = (call);                                                                           \
        if (moe_try_err_ < 0) return moe_try_err_;                                                           \
    } while (0)
/* The same for functions with something to release: sets `err` and goes to `done`. */
#define MOE_TRY_GOTO(call)                                                                                   \
    do {                                                                                                     \
        err = (call);                                                                                        \
        if (err < 0) goto done;                                                                              \
    } while (0)

_Noreturn void moe_bug(const char *file, int line, const char *what);
#define moe_assert(cond)                                                                                     \
    ((cond) ? (void)0                                                                                        \
            : moe_bug(__FILE__, __LINE__, #cond)) /* also in release builds                        \
                                                             */

/* Zeroed memory for n items of `size` bytes; never NULL (n = 0 gives a valid pointer); exits when there is
 * none. Release with free(). */
void *moe_alloc(size_t n, size_t size);
/* Makes room for `need` items: returns items (moved, *cap doubled until it holds them, new part zeroed). */
void *moe_grow(void *items, int *cap, int need, size_t size);
void moe_copy_name(char out[MOE_NAME], const char *name); /* cuts at MOE_NAME - 1 bytes */

/* A fixed-seed generator that is a function of its arguments, so that the value of element i does not depend
 * on how a tensor is split over ranks. Source: splitmix64 finaliser (Steele, Lea, Flood, OOPSLA 2014). */
static inline uint64_t moe_hash64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
uint64_t moe_hash_name(const char *name);                           /* FNV-1a, 64 bit */
double moe_uniform(uint64_t seed, uint64_t stream, uint64_t index); /* in [0, 1) */
/* The same in two steps, for many values of a stream: moe_uniform_at(moe_stream(seed, stream), index). */
uint64_t moe_stream(uint64_t seed, uint64_t stream);
static inline double moe_uniform_at(uint64_t begun, uint64_t index)
{
    return (double)(moe_hash64(begun + index) >> 11) * 0x1p-53;
}

/* clang-format off */
/*        unit       accepted suffixes are listed in base.c; the value is stored in this unit */
#define MOE_UNITS(X) \
        X(BPS,    "GB/s",    "bytes per second; GB = 10^9") \
        X(SECONDS,"us",      "seconds") \
        X(FLOPS,  "TFLOP/s", "floating-point operations per second") \
        X(BYTES,  "GB",      "bytes") \
        X(SHARE,  "%",       "parts of one")
/* clang-format on */
#define X(name, example, text) MOE_UNIT_##name,
enum moe_unit { MOE_UNITS(X) MOE_UNIT_COUNT };
#undef X

/* strtod without hexadecimal numbers, which nobody means: then *end is text. */
double moe_decimal(const char *text, char **end);

/* Reads "450 GB/s" as 4.5e11. A bare number, an unknown suffix, a negative or non-finite value is MOE_EINPUT
 * and the message says what was expected ("no unit in '50' (write 50 GB/s)"), without the place: the caller
 * that knows file and line prefixes them. Result: *out in the unit's base. */
int moe_parse_quantity(const char *text, enum moe_unit unit, double *out);

/* Time of `amount` (bytes, operations) at `rate` per second, rounded to the nearest ps, INT64_MAX / 2 at
 * most; rate > 0. Never less for a larger amount. The one place where a rate becomes a time. */
moe_ps moe_time(double amount, double rate);

/* The only name in names[n] that begins with word, or else that with the smallest edit distance to it; NULL
 * when none is closer than half the word's length: for "unknown key 'hiden' (did you mean 'hidden'?)". Cost:
 * O(n * length^2). */
const char *moe_nearest(const char *word, const char *const *names, int n);

/* What to say behind an unknown word: ", did you mean NEAREST", or ", known: A, B, ..." (cut when it is
 * long). Result: out. */
enum { MOE_HINT = 8 * MOE_NAME };
const char *moe_hint(const char *word, const char *const *names, int n, char out[MOE_HINT]);

#endif
