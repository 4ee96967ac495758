"""Runs a Python program on ranks of an MPI job and brings back what each has found."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning_lockstep
from tests.harness import ScriptOutcome, costs, run_script
from tests.harness.children import CHILD_SITE
from tests.harness.ranks import forks_of_launched_ranks

__all__ = ["mpi_command", "mpi_environ", "run_program", "why_no"]

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent


def _mpich_prefix() -> Path | None:
    given = os.environ.get("LOCKSTEP_TEST_MPICH")
    for prefix in (given, str(ROOT / ".venv-mpich")):
        if prefix and Path(prefix, "bin", "mpiexec.hydra").exists():
            return Path(prefix)
    return None


def why_no(kind: str) -> str | None:
    """Return why this machine cannot run ranks with an MPI, or ``None`` when it can."""
    if kind == "mpich":
        return (
            None
            if _mpich_prefix()
            else "no environment with the wheel of MPICH: see LOCKSTEP_TEST_MPICH in docs/mpi.md"
        )
    beside = Path(sys.prefix, "bin", "mpirun")
    return (
        None if beside.exists() or shutil.which("mpirun") else "there is no mpirun: install the extra [mpi]"
    )


def mpi_command(kind: str, ranks: int) -> list[str]:
    """Return the command that starts ``ranks`` Pythons, up to the arguments of Python."""
    costs.starts_mpi()
    if kind == "mpich":
        prefix = _mpich_prefix()
        forks_of_launched_ranks(str(prefix / "bin" / "python"))
        return [str(prefix / "bin" / "mpiexec.hydra"), "-n", str(ranks), str(prefix / "bin" / "python")]
    beside = Path(sys.prefix, "bin", "mpirun")
    mpirun = str(beside) if beside.exists() else "mpirun"
    return [mpirun, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), sys.executable]


#: The package under test: that of the source tree, or the installed wheel's.
PACKAGE = Path(lightning_lockstep.__file__).parent


@functools.cache
def _path_to_package() -> str:
    """Return a folder with the package and the tests, and nothing else: another environment finds them there."""
    folder = tempfile.mkdtemp(prefix="lockstep-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, PACKAGE.name).symlink_to(PACKAGE)
    Path(folder, "tests").symlink_to(ROOT / "tests")
    return folder


def mpi_environ() -> dict[str, str]:
    """Return the environment for such a job."""
    return {
        "PYTHONPATH": os.pathsep.join([_path_to_package(), str(CHILD_SITE)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # a rank that waits spins, and other tests run beside
    }


def run_program(
    kind: str,
    ranks: int,
    program: str,
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> tuple[ScriptOutcome, dict[int, dict[str, Any]]]:
    """Run ``program`` (a file beside this one) on ranks."""
    # Returns: how it ended, and by rank what the program wrote to ``<folder>/<rank>.json``.
    # A rank that waits spins, and would take the cores from tests beside it.
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    command = [*nice, *mpi_command(kind, ranks), str(HERE / program), str(folder), *arguments]
    outcome = run_script(command, env={**mpi_environ(), **(environ or {})}, timeout=timeout)
    found = {}
    for rank in range(ranks):
        file = folder / f"{rank}.json"
        if file.exists():
            found[rank] = json.loads(file.read_text())
    return outcome, found
