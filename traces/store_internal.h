/* store_internal - what store.c (connection, rows) and store_file.c (files, merge) share; nobody else
 * includes it. */
#ifndef MOE_STORE_INTERNAL_H
#define MOE_STORE_INTERNAL_H

#include "traces/store.h"

#include <sqlite3.h>

#define MOE_STORE_APPLICATION_ID 1836017011 /* "moes" */
#define MOE_STORE_VERSION 1

/* Runs statements. first: the first column of the first row as text, to be freed, NULL without a row; may be
 * NULL. Errors: MOE_EINPUT for a broken or foreign file, MOE_EFAILED for the rest. */
int moe_store_exec(struct moe_store *s, const char *sql, char **first);

char *moe_store_join(const char *path, const char *suffix); /* path and suffix in one, to be freed */
/* Errors: MOE_EINPUT when the file is no store that this program reads, or is shorter
 * than its header says. */
int moe_store_check_file(const char *path);

#endif
