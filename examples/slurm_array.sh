#!/bin/bash
# One run per seed on a Slurm cluster, 2 ranks each. Submit with `sbatch --array=1-4 examples/slurm_array.sh`.
#SBATCH --job-name=lockstep-seeds
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

source "${VENV:-$HOME/venv}/bin/activate"
# Tasks that start in the same second have separate run folders.
srun --kill-on-bad-exit lockstep-train strategy=ddp seed="$SLURM_ARRAY_TASK_ID" ckpt_path=auto "$@"
