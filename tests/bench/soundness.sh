#!/bin/sh
# Neither false alarms nor misses of check, with execution as the oracle (soundness.c), in one mpirun.
# Usage: soundness.sh BENCH_SOUNDNESS [OPTIONS of soundness.c]; RANKS (8) and MPIEXEC (mpirun) from the
# environment. What kernels and the MPI library say of wrong schedules is kept apart, and shown when the job
# broke.
set -u
bench=$1
shift
said=$(mktemp)
trap 'rm -f "$said"' EXIT
export OPENBLAS_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 \
    OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_btl=self,vader OMPI_MCA_pml=ob1
# Open MPI 4.1 copies a large message at once from its sender's memory, past the end of a receive of another
# size; in pieces it is cut off.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" # what a failed run may still write to is kept
"${MPIEXEC:-mpirun}" -n "${RANKS:-8}" "$bench" "$@" 2> "$said"
code=$?
[ $code -eq 0 ] || [ $code -eq 5 ] || tail -20 "$said" >&2
exit $code
