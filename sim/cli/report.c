/* report.c - moesim report: the page about a trace store. */
#include "reports/report.h"

#include "sim/cli/cli.h"

int moe_cli_report(const struct moe_args *args)
{
    return moe_report(args->input, args->phases, args->output, stdout, moe_program_gnuplot);
}
