/* output.c - see cli.h. */
#include "sim/cli/cli.h"
#include "traces/store.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

json_t *moe_json_known(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *moe_json_text(const char *text)
{
    json_t *value = json_string(text);
    if (value) return value;
    char *copy = strdup(text);
    for (char *p = copy; *p; p++)
        if (*p & 0x80) *p = '?';
    value = json_string(copy);
    free(copy);
    return value;
}

int moe_fail_in(const char *path, int err)
{
    size_t n = strlen(path);
    if (!strncmp(moe_error(), path, n) && moe_error()[n] == ':') return err;
    return moe_fail(err, "%s: %s", path, moe_error());
}

void moe_print_json(json_t *root)
{
    moe_assert(root);
    json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(12));
    putchar('\n');
    json_decref(root);
}

/* ---- files ---- */

int moe_output_check(const struct moe_args *args, const char *option, const char *path)
{
    struct stat output, input;
    if (stat(path, &output) < 0) return MOE_OK;
    for (int i = -2; i < args->n_inputs; i++) {
        const char *read = i == -2 ? args->topology : i == -1 ? args->tuning : args->inputs[i];
        if (read && stat(read, &input) == 0 && input.st_dev == output.st_dev && input.st_ino == output.st_ino)
            return moe_fail(MOE_EUSAGE, "%s %s: is what is read (%s)", option, path, read);
    }
    if (S_ISREG(output.st_mode) && moe_store_probe(path))
        return moe_fail(MOE_EUSAGE, "%s %s: is a trace store; not replaced", option, path);
    return MOE_OK;
}

/* Where the file is written; true: beside its place, not to what is there and no file, as
 * a pipe or a link. */
static bool writes_beside(const char *path, char out[PATH_MAX])
{
    struct stat st;
    bool beside = lstat(path, &st) < 0 || S_ISREG(st.st_mode);
    snprintf(out, PATH_MAX, "%s%s", path, beside ? ".partial" : "");
    return beside;
}

int moe_output_open(const char *path, FILE **out)
{
    char written[PATH_MAX];
    *out = fopen(written, writes_beside(path, written) ? "wx" : "w");
    if (*out) return MOE_OK;
    return moe_fail(MOE_EFAILED, "%s: %s", errno == EEXIST ? written : path, strerror(errno));
}

int moe_output_close(const char *path, FILE *f)
{
    char written[PATH_MAX];
    bool beside = writes_beside(path, written), bad = ferror(f);
    if (fclose(f) == 0 && !bad && (!beside || rename(written, path) == 0)) return MOE_OK;
    int err = moe_fail(MOE_EFAILED, "%s: not written: %s", path, strerror(errno));
    if (beside) unlink(written);
    return err;
}

/* ---- text ---- */

enum { CELL = 128 };

/* "1,234,567.8" */
static void group_digits(char cell[CELL])
{
    char *first = cell + (*cell == '-');
    for (int n = (int)strspn(first, "0123456789") - 3; n > 0; n -= 3) {
        memmove(first + n + 1, first + n, strlen(first + n) + 1);
        first[n] = ',';
    }
}

static void write_cell(char cell[CELL], const json_t *value)
{
    double real = json_is_real(value) ? json_real_value(value) : NAN;
    if (json_is_string(value))
        snprintf(cell, CELL, "%s", json_string_value(value));
    else if (json_is_integer(value))
        snprintf(cell, CELL, "%lld", (long long)json_integer_value(value));
    else if (json_is_boolean(value))
        snprintf(cell, CELL, "%s", json_is_true(value) ? "yes" : "no");
    else
        snprintf(cell, CELL, isfinite(real) ? "%.3f" : "-", real);
    if (json_is_number(value)) group_digits(cell);
}

void moe_print_fields(json_t *object)
{
    const char *key;
    json_t *value;
    char cell[CELL];
    json_object_foreach(object, key, value)
    {
        write_cell(cell, value);
        printf("%-16s  %s\n", key, cell);
    }
    json_decref(object);
}

/* Pads a cell: numbers to the right, text to the left, the last column not at all. */
static void print_cell(const char *cell, int width, bool right, bool last)
{
    printf("%*s%s", right ? width : last ? 0 : -width, cell, last ? "\n" : "  ");
}

static int longest(int a, int b)
{
    return a > b ? a : b;
}

void moe_print_rows(json_t *list)
{
    enum { COLUMNS = 16 };
    int width[COLUMNS] = {0}, n = (int)json_object_size(json_array_get(list, 0));
    const char *key;
    json_t *row, *value;
    size_t i;
    char cell[CELL];
    moe_assert(n <= COLUMNS);
    for (int pass = 0; pass < 3; pass++) /* widths, heads, rows */
        json_array_foreach(list, i, row)
        {
            int c = 0;
            json_object_foreach(row, key, value)
            {
                bool right = !json_is_string(value), last = c == n - 1;
                write_cell(cell, value);
                if (pass == 0) width[c] = longest(width[c], longest((int)strlen(cell), (int)strlen(key)));
                if (pass == 1 && i == 0) print_cell(key, width[c], right, last);
                if (pass == 2) print_cell(cell, width[c], right, last);
                c++;
            }
        }
    json_decref(list);
}
