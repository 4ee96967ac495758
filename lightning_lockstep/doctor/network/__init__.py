"""Ranks here, or those of torchrun, mpirun or srun, that test step by step what a run needs of the network."""
