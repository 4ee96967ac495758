#!/bin/bash
# Train over MPI on a Slurm cluster: 2 nodes, 4 ranks each. Submit with `sbatch examples/slurm_mpi.sh`.
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4      # ranks of a node; the same on every node
#SBATCH --cpus-per-task=8        # CPU threads of a rank
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@120        # two minutes early all ranks stop after the same batch, and the job is requeued
#SBATCH --requeue
#SBATCH --open-mode=append       # what the next attempt prints comes below

set -euo pipefail

# The MPI of the cluster and the environment with lightning-lockstep; put your own names here.
module load openmpi 2>/dev/null || true
source "${VENV:-$HOME/venv}/bin/activate"

# mpi4py must load the MPI library that srun talks to, not the one of a wheel.
if [[ -n "${EBROOTOPENMPI:-}" ]]; then
    export MPI4PY_LIBMPI="$EBROOTOPENMPI/lib/libmpi.so"
fi

# pmix for Open MPI; pmi2 for MPICH, Intel MPI and MVAPICH. `srun --mpi=list` shows what yours has.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --mpi="${MPI_KIND:-pmix}" --cpu-bind=cores --kill-on-bad-exit \
    lockstep-train strategy=mpi callbacks=stop_together ckpt_path=auto data.global_batch_size=512 "$@"
