/* simgrid_share - SimGrid's answer to what moe_share and a fluid loop around it compute. */
#ifndef SIMGRID_SHARE_H
#define SIMGRID_SHARE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Completion times when all flows start at 0 and share links by max-min fairness. Arguments as for moe_share,
 * and: bytes    [F] whole numbers finish_s [F] out SimGrid's engine cannot be made twice: one call per
 * process. */
void simgrid_share(int n_links, const double *cap, int n_flows, const int *first, const int *path,
                   const double *limit, const double *bytes, double *finish_s);

#ifdef __cplusplus
}
#endif

#endif
