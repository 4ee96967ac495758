"""The backend ``mpi4py``: MPI collectives for an ordinary build of torch."""
