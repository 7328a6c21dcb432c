/* job - which rank of how many this process is, and where ranks meet, as its launcher tells it. */
#ifndef MOE_JOB_H
#define MOE_JOB_H

#include "sim/base.h"

enum moe_launcher { MOE_LAUNCHED_ALONE, MOE_LAUNCHED_BY_ENV, MOE_LAUNCHED_BY_MPI, MOE_LAUNCHED_BY_SLURM };
enum { MOE_HOST = 256 }; /* bytes of a host's name, the closing zero included */

/* host, port: where rank 0 listens for the others (tcp_store.h); "" and 0 where MPI tells them, or where
 * there are none. */
struct moe_job {
    enum moe_launcher launcher;
    int rank, size;
    char host[MOE_HOST];
    int port;
};

/* Reads, and the first that is there holds:
 *   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT   torchrun, or by hand. The agent of torchrun that says
 *                        TORCHELASTIC_USE_AGENT_STORE=True listens at MASTER_PORT itself: then the next port
 *   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE   mpirun of Open MPI; with MASTER_ADDR and MASTER_PORT where
 *                        both are there, else MPI tells where rank 0 is
 *   SLURM_PROCID, SLURM_NTASKS   srun. Host: MASTER_ADDR, else the first of SLURM_STEP_NODELIST, else
 *                        SLURM_LAUNCH_NODE_IPADDR; port: MASTER_PORT, else 20000 to 31999 by SLURM_JOB_ID and
 *                        SLURM_STEP_ID
 *   PMI_RANK, PMI_SIZE   mpiexec of MPICH: as Open MPI
 * and otherwise it is alone. A job of one rank needs no host and port. Which GPU a rank takes is the
 * device's.
 *
 * look: getenv, or what a test says instead.
 * Errors: MOE_EUSAGE, with the variable, its value, and what was expected.
 * Source: torch/distributed/elastic (environment of workers), srun(1), Open MPI 4.1 mpirun(1). */
int moe_job_find(char *(*look)(const char *name), struct moe_job *out);

#endif
