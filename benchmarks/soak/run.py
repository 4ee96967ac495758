"""Starts one run, lets its fault happen and notes what came of it."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak.outcome import MemoryWatch, Observed, observe
from benchmarks.soak.outside import act
from benchmarks.soak.plan import LAUNCHES, WITH_MPI, Plan
from tests.harness import start_script
from tests.harness.slurm import Slurm, why_no_slurm
from tests.models.distributed.mpi.launch import mpi_command, mpi_environ, why_no

__all__ = ["LIMIT", "launches_here", "perform"]

# In tables, since the tests that call such a function by name are put one after the other; most runs are not under MPI.
_MPI_COMMANDS = {launch: functools.partial(mpi_command, launch) for launch in ("open_mpi", "mpich")}
_MPI_ENVIRON = dict.fromkeys(WITH_MPI, mpi_environ)
PROGRAM = Path(__file__).with_name("program.py")
#: A run that takes longer hangs, and is killed [s].
LIMIT = 100.0


def launches_here() -> dict[str, str | None]:
    """Return for every way of starting ranks why this machine does not have it, or ``None``."""
    kinds = {"mpirun": "open_mpi", "open_mpi": "open_mpi", "mpich": "mpich"}
    reasons = {launch: why_no(kinds[launch]) if launch in kinds else None for launch in LAUNCHES}
    return {**reasons, "srun": why_no_slurm()}


def perform(plan: Plan, limit: float = LIMIT, slurm: Slurm | None = None) -> Observed:
    """Do one run in a folder of its own, and return what came of it; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        _prepare(plan, folder)
        command, environment = _command(plan, folder), _environment(plan, folder, slurm)
        started = time.time()
        with start_script(command, env=environment, cwd=folder / "cwd") as script:
            memory, trouble = MemoryWatch(script), ""
            try:
                act(plan, script, folder)
            except AssertionError as error:
                trouble = str(error)
            outcome = script.finish(limit)
        return observe(folder, outcome, started, memory.end(), trouble)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(plan: Plan, folder: Path) -> None:
    for name in ("cwd", "notes", "tmp", "full"):
        (folder / name).mkdir()
    (folder / "full" / "metrics.csv").symlink_to("/dev/full")
    (folder / "file").touch()
    plan.write(folder / "plan.json")


def _command(plan: Plan, folder: Path) -> list[str]:
    program = [str(PROGRAM), str(folder)]
    if plan.launch in _MPI_COMMANDS:
        return [*_MPI_COMMANDS[plan.launch](plan.ranks), *program]
    if plan.launch == "torchrun":
        # What torchrun does with a rank that it cannot end lasts 30 s otherwise.
        options = ["--standalone", "--nproc-per-node", str(plan.ranks), "--shutdown-timeout", "3"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *program]
    if plan.launch == "srun":
        # One Ctrl-C ends it, as it ends the other launchers; each rank has a node of its own.
        options = ["--kill-on-bad-exit", "--quit-on-interrupt", f"-N{plan.ranks}", "--ntasks-per-node=1"]
        return ["srun", *options, sys.executable, *program]
    return [sys.executable, *program]


def _environment(plan: Plan, folder: Path, slurm: Slurm | None) -> dict[str, str]:
    own = {"TMPDIR": str(folder / "tmp")}
    if slurm is not None and plan.launch == "srun":
        return slurm.environment(**own)
    if plan.launch not in _MPI_ENVIRON:
        return own
    of_mpi = _MPI_ENVIRON[plan.launch]()
    if plan.launch == "mpirun":
        # The program finds the package without this, and is forked where it needs no path of its own.
        of_mpi = {name: value for name, value in of_mpi.items() if name.startswith("OMPI_")}
    return {**of_mpi, **own}
