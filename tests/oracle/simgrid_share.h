/* simgrid_share - SimGrid's answer to what moe_share and a fluid loop around it compute. */
#ifndef SIMGRID_SHARE_H
#define SIMGRID_SHARE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Completion times when all flows start at 0 and share links by max-min fairness.
 *   cap       [L]          capacity of a link, bytes/s
 *   first     [F + 1]      flow f crosses links path[first[f] .. first[f+1]-1]
 *   path      [first[F]]
 *   bytes     [F]          whole numbers
 *   rate      [F]          a flow's own, 0: as the links allow; a link that only it crosses
 *   finish_s  [F]          out
 * SimGrid's engine cannot be made twice: one call per process. */
void simgrid_share(int n_links, const double *cap, int n_flows, const int *first, const int *path,
                   const double *bytes, const double *rate, double *finish_s);

#ifdef __cplusplus
}
#endif

#endif
