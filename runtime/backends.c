/* backends.c - see communicator.h: which communicators are built in, and which of them this process needs. */
#include "runtime/communicator.h"

#include <stdlib.h>
#include <string.h>

static const struct moe_communicator_table *const built_in[] = {
    &moe_comm_self,
#ifdef MOESIM_MPI
    &moe_comm_mpi,
#endif
};

/* What the launchers of Open MPI, PMIx (srun) and MPICH tell the processes that they start. */
static const char *const launched[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"};

const struct moe_communicator_table *moe_communicator_find(const char *name)
{
    for (size_t i = 0; i < sizeof built_in / sizeof *built_in; i++)
        if (strcmp(built_in[i]->name, name) == 0) return built_in[i];
    return NULL;
}

const struct moe_communicator_table *moe_communicator_here(void)
{
    const struct moe_communicator_table *mpi = moe_communicator_find("mpi");
    for (size_t i = 0; i < sizeof launched / sizeof *launched; i++)
        if (mpi && getenv(launched[i])) return mpi;
    return &moe_comm_self;
}
