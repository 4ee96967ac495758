"""A fit under mpirun in which rank 1 is slow; rank 0 writes down what the monitor has said."""

import json
import sys
from pathlib import Path

import torch

from lightning_lockstep import LockstepMPIStrategy
from tests.common.stragglers.fits import fit


def main() -> None:
    """Fit on the ranks that mpirun has started."""
    found = fit(1, "data", strategy=LockstepMPIStrategy(backend="auto"), devices="auto")
    found["backend"] = torch.distributed.get_backend()
    Path(sys.argv[1], f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
