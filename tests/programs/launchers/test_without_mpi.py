"""The MPI strategy if no MPI library can be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness import run_script

BROKEN = """
import sys
import lightning
import lightning_lockstep
from lightning_lockstep import LockstepMPIStrategy
trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1,
strategy=LockstepMPIStrategy())
assert "mpi4py" not in sys.modules, sorted(m for m in sys.modules if "mpi4py" in m)
print("unaffected")
from lightning_lockstep.distributed.mpi.backend import start_runtime
from lightning_lockstep.errors import LaunchError
try:
    start_runtime()
except LaunchError as error:
    print("LaunchError", error)
"""


def test_a_broken_mpi_library_affects_nobody_who_does_not_use_it(tmp_path: Path) -> None:
    """mpi4py is installed, but no libmpi can be loaded."""
    environ = {"MPI4PY_LIBMPI": str(tmp_path / "no" / "libmpi.so"), "MPI4PY_MPIABI": "openmpi"}
    done = run_script([sys.executable, "-c", BROKEN], env=environ, timeout=120)
    assert "unaffected" in done.stdout, done.stderr
    assert "LaunchError mpi4py is installed, but it cannot load an MPI library" in done.stdout, (
        done.stdout + done.stderr
    )
