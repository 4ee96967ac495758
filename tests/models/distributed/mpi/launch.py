"""Calls a function on the ranks of an MPI job and brings back what it returned on each."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import lightning_lockstep
from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import detect_environment
from tests.harness import ScriptOutcome, costs, run_script
from tests.harness.children import CHILD_SITE
from tests.harness.ranks import forks_of_launched_ranks

__all__ = ["meet", "mpi_command", "mpi_environ", "run_mpi", "run_mpi_raw", "why_no"]

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
    return None if beside.exists() or shutil.which("mpirun") else "there is no mpirun: install the extra [mpi]"


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
    for name in ("tests", "benchmarks"):
        Path(folder, name).symlink_to(ROOT / name)
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


def run_mpi(
    n: int,  # number of ranks
    function: Callable[..., Any],  # at the top level of a module
    *args: Any,
    kind: str = "open_mpi",
    timeout: float = 240.0,
) -> list[Any]:
    """Call ``function(*args)`` on the ranks of an MPI job, and return what it returned on each."""
    outcome, found = run_mpi_raw(n, function, *args, kind=kind, timeout=timeout)
    assert outcome.returncode == 0 and len(found) == n, outcome.output
    return found


def run_mpi_raw(
    n: int, function: Callable[..., Any], *args: Any, kind: str = "open_mpi", timeout: float = 240.0
) -> tuple[ScriptOutcome, list[Any]]:
    """As ``run_mpi``, for ranks that may fail: return how the job ended, and what those that returned have returned."""
    # A rank that waits spins, and would take the cores from tests beside it.
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    with tempfile.TemporaryDirectory(prefix="mpi-") as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        command = [*nice, *mpi_command(kind, n), str(Path(__file__).with_name("call.py")), folder]
        outcome = run_script(command, env=mpi_environ(), timeout=timeout)
        values = [Path(folder, f"{rank}.value") for rank in range(n)]
        return outcome, [pickle.loads(value.read_bytes()) for value in values if value.exists()]


def meet(seconds: float = 60.0) -> tuple[int, int]:
    """Open the default group over mpi4py, whose operations may take ``seconds``; return (rank, world size)."""
    register_mpi_backend()
    env = detect_environment(mpi=True)
    rank, size = env.global_rank(), env.world_size()
    store = dist.TCPStore(env.main_address, env.main_port, size, False, multi_tenant=True)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("mpi4py", rank=rank, world_size=size, store=store, timeout=limit)
    return rank, size
