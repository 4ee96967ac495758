"""Fits under mpirun, one in step and others not; rank 0 writes down what was said of each."""

import json
import sys
from pathlib import Path

import torch

from lightning_lockstep import LockstepMPIStrategy
from tests.common.replicas.fits import Case, fit


def main() -> None:
    """Fit on the ranks that mpirun has started."""
    found = {}
    cases = {
        "healthy": Case(options={"audit_every_n_steps": 4}),
        "skipped": Case(fault="skipped step"),
        "device": Case(fault="device", options={"audit_every_n_steps": 4}),
    }
    for name, case in cases.items():
        found[name] = fit(case, plain_strategy=LockstepMPIStrategy(backend="auto"), devices="auto")
    found["backend"] = {"name": torch.distributed.get_backend()}
    Path(sys.argv[1], f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
