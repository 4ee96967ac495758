#!/bin/bash
# Train with DDP on a Slurm cluster: 2 nodes, 4 ranks each. Submit with `sbatch examples/slurm_ddp.sh`.
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4      # ranks of a node; the same on every node
#SBATCH --cpus-per-task=8        # CPU threads of a rank
#SBATCH --time=02:00:00
#SBATCH --signal=USR1@120        # two minutes early all ranks stop after the same batch, and the job is requeued
#SBATCH --requeue
#SBATCH --open-mode=append       # what the next attempt prints comes below

set -euo pipefail

# The environment with lightning-lockstep; put your own name here.
source "${VENV:-$HOME/venv}/bin/activate"

# For several hosts on a network that others share: see docs/security.md.
LOCKSTEP_JOB_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export LOCKSTEP_JOB_TOKEN

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit lockstep-train strategy=ddp callbacks=stop_together ckpt_path=auto "$@"
