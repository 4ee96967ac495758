"""Fits with each communication hook over mpi4py."""

import functools
import json
import os
import sys
import warnings
from pathlib import Path

from lightning_lockstep import LockstepMPIStrategy
from tests.models.strategies.communication_hooks import fits_with_hooks

warnings.simplefilter("ignore")


def main():
    found = fits_with_hooks(functools.partial(LockstepMPIStrategy, backend="mpi4py", grace_period=5.0))
    Path(sys.argv[1], f"{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
