"""Which rank this process is, as Slurm, MPI, torchrun or the Trainer's plugins say."""
