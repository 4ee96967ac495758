"""An overflow in a step that gathers, on two ranks of an MPI job; writes down what each rank raised."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from lightning_lockstep import LockstepMPIStrategy
from tests.programs.overflow.test_communicating_step import outcomes


def main() -> None:
    folder, rank = sys.argv[1], os.environ["OMPI_COMM_WORLD_RANK"]
    found = outcomes(["in place"], folder, LockstepMPIStrategy)
    found["backend"] = dist.get_backend()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
