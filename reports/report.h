/* report - one HTML page that stands by itself, about one trace store: what was captured and what was
 * simulated on its routing. METRICS.md explains each number. */
#ifndef MOE_REPORT_H
#define MOE_REPORT_H

#include <stdio.h>

/* Writes dir/index.html, with the figures in it, and the data of each figure as CSV beside it. dir is created
 * when missing; each file appears whole or not at all.
 *
 *   phases_path  what moesim validate -o wrote of this store, or NULL
 *   findings     gets the findings of the page as plain text, one a line
 *   gnuplot      runs gnuplot on the file `script` with `dir` as working directory and returns MOE_OK, or a
 *                negative enum moe_err after moe_fail: this folder starts no process itself
 *
 * Errors: those of moe_summary_load and moe_summary_load_phases; MOE_EFAILED for what cannot be written;
 * those of gnuplot. */
int moe_report(const char *store_path, const char *phases_path, const char *dir, FILE *findings,
               int (*gnuplot)(const char *script, const char *dir));

#endif
