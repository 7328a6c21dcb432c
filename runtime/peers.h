/* peers - what the ranks of a job tell each other beside the library that moves their data: where they are,
 * and why one stopped. Rank 0 keeps it (tcp_store.h); a job of one rank has nobody to tell, and the same
 * calls. */
#ifndef MOE_PEERS_H
#define MOE_PEERS_H

#include "runtime/communicator.h"
#include "runtime/job.h"

struct moe_peers;

/* All ranks meet at rank 0. mpi: tells where that is, by one gather, when the job does not; else NULL.
 * timeout_s: how long others may take to come, and rank 0 to answer any later question.
 * Errors: MOE_EPEER with the address; MOE_EFAILED when rank 0 cannot listen there. */
int moe_peers_open(const struct moe_job *job, struct moe_communicator *mpi, double timeout_s,
                   struct moe_peers **out);
/* Says goodbye; rank 0 stays until all have, or for grace_s. NULL: nothing to do. */
void moe_peers_close(struct moe_peers *p, double grace_s);

/* Rank 0's value [bytes] of that name comes to all, which wait for it for the timeout of open. */
int moe_peers_share(struct moe_peers *p, const char *name, void *value, size_t bytes);

/* This rank has come to `place`, below 2 * MOE_NAME bytes: for moe_peers_missing. */
int moe_peers_arrive(struct moe_peers *p, const char *place);
/* Which of the ranks [n] are elsewhere: "rank 2 has not come", "ranks 2,3 have not come", or "" where all are
 * here or rank 0 does not answer. Result: out, cut at size. Cost: a question a rank. */
void moe_peers_missing(struct moe_peers *p, const char *place, const int *ranks, int n, char *out,
                       size_t size);
/* As in communicator.h; also ends when one of them has stopped, and says why. */
void moe_peers_blame(struct moe_peers *p, const int *ranks, int n, const char *label, double grace_s,
                     char *out, size_t size);

/* Tells all that this rank stops, and why; the first rank of a job that does so is heard. A process that ends
 * without goodbye is told of by rank 0. */
void moe_peers_stop(struct moe_peers *p, const char *why);
/* MOE_EPEER when one has: "rank 2 stopped: WHY". Asks rank 0 at most every 50 ms. Cost of asking: a request
 * of tcp_store.h, so below a thousandth of the time. */
int moe_peers_check(struct moe_peers *p);
/* This rank will say and ask nothing more; waits until all others have said so too, or for grace_s. Result:
 * did all? */
bool moe_peers_leave(struct moe_peers *p, double grace_s);

#endif
