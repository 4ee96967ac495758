"""Evaluations on the ranks of an MPI job; each rank writes down what it gets."""

import pickle
import sys
from pathlib import Path

import torch

from tests.models.loaders.evaluation import evaluations


def main() -> None:
    """Evaluate on the ranks that mpirun has started."""
    folder, ranks = sys.argv[1], int(sys.argv[2])
    found = evaluations("mpi", ranks)
    assert torch.distributed.get_backend() == "mpi4py"
    Path(folder, f"{torch.distributed.get_rank()}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
