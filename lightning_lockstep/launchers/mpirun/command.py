"""Which mpirun to use, and the command line and environment with which it starts ranks."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_lockstep._processes import run_program
from lightning_lockstep.errors import ConfigurationError, LaunchError

__all__ = [
    "MPIRun",
    "MPIRunSettings",
    "find_mpirun",
    "hostname_command",
    "mpirun_command",
    "mpirun_environ",
    "mpirun_of",
]

_VERSION = 20  # how long mpirun may take to say what it is [s]
# Variables that ranks on other hosts need as they are here; mpirun passes the rest of its own.
_PASSED_ON = (
    *("PATH", "PYTHON", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_", "MKL_"),
    *("LOCKSTEP_", "HYDRA_", "HF_", "CUDA_"),
)


@dataclass(frozen=True, kw_only=True)
class MPIRunSettings:
    """How to start ranks; see :class:`LockstepMPIStrategy` for the meaning."""

    hostfile: str | Path | None = None
    mpirun: str | None = None
    mpirun_args: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()
    grace_period: float = 10.0

    def __post_init__(self) -> None:
        if self.hostfile is not None and not Path(self.hostfile).is_file():
            raise ConfigurationError(
                f"hostfile={str(self.hostfile)!r}: there is no such file. Expected one host per line, such as"
                " 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
            )


@dataclass(frozen=True)
class MPIRun:
    path: str
    kind: str  # ``open_mpi`` or ``hydra`` (MPICH, Intel MPI, MVAPICH)
    version: str  # the first line of what it prints about itself

    @property
    def prefix(self) -> str:
        """The folder in which its MPI is installed."""
        return str(Path(self.path).resolve().parent.parent)


def find_mpirun(settings: MPIRunSettings) -> MPIRun | None:
    """Return the mpirun to use: the given one, the one beside this Python, or the first in ``PATH``."""
    beside = Path(sys.prefix, "bin", "mpirun")
    path = settings.mpirun or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if path is None:
        return None
    answer = run_program([path, "--version"], _VERSION)
    if answer.is_missing or answer.is_unusable or answer.timed_out:
        why = f"no answer within {_VERSION} s" if answer.timed_out else answer.error.strip()
        raise LaunchError(f"mpirun={path!r} cannot be run: {why}")
    return mpirun_of(path, answer.output + answer.error)


def mpirun_of(path: str, output: str) -> MPIRun:
    """Return an mpirun by what it prints about itself."""
    kind = "open_mpi" if re.search(r"Open MPI|OpenRTE|PRRTE", output) else "hydra"
    return MPIRun(path, kind, next((line for line in output.splitlines() if line.strip()), ""))


def mpirun_command(
    mpirun: MPIRun,
    settings: MPIRunSettings,
    *,
    num_processes: int,  # per node
    num_nodes: int,
    variables: Sequence[str] = (),  # names of those that ranks on other hosts get beside the usual ones
) -> list[str]:
    """Return the command that starts the ranks, up to the program."""
    size = str(num_processes * num_nodes)
    if mpirun.kind == "hydra":
        command = [mpirun.path, "-l", "-n", size, "-ppn", str(num_processes)]
        command += ["-f", str(settings.hostfile)] if settings.hostfile else []
        return [*command, *settings.mpirun_args]
    command = [mpirun.path, "-n", size, "--output", "tag", "--bind-to", "none"]
    mapping = f"ppr:{num_processes}:node"
    if settings.hostfile:
        command += ["--hostfile", str(settings.hostfile), "--map-by", mapping, "--prefix", mpirun.prefix]
        # A host that is lost without a message is noticed within seconds, not within two hours.
        for name, value in (("time", 5), ("intvl", 3), ("probes", 3)):
            command += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
        command += _ssh(settings.ssh_args)
        # By name only: the values are not for the process table.
        for name in sorted({*variables, *(name for name in os.environ if name.startswith(_PASSED_ON))}):
            command += ["-x", name]
    else:
        command += ["--map-by", f"{mapping}:OVERSUBSCRIBE"]
    return [*command, *settings.mpirun_args]


def hostname_command(mpirun: MPIRun, hosts: Sequence[str], ssh_args: Sequence[str]) -> list[str]:
    """Return the command that prints the name of every host from there."""
    names, count = ",".join(hosts), str(len(hosts))
    if mpirun.kind == "hydra":
        return [mpirun.path, "-hosts", names, "-ppn", "1", "-n", count, "hostname"]
    command = [mpirun.path, "-H", names, "--prefix", mpirun.prefix, "-n", count, "--map-by", "ppr:1:node"]
    return [*command, *_ssh(ssh_args), "hostname"]


def mpirun_environ(settings: MPIRunSettings) -> dict[str, str]:
    """Return the environment for mpirun and, through it, for the ranks."""
    environ = dict(os.environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Whoever runs this program as root has decided so; mpirun would ask once more.
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if settings.ssh_args:
        environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(settings.ssh_args)
    environ.setdefault("PYTHONUNBUFFERED", "1")
    # When rank 0 has exited, torch's store prints stacks in C++ on every other rank, below the report.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return environ


def _ssh(ssh_args: Sequence[str]) -> list[str]:
    return ["--prtemca", "plm_ssh_args", " ".join(ssh_args)] if ssh_args else []
