"""The mpirun that is installed, the command line with which it starts ranks, and the hosts of a hostfile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lightning_lockstep._system import NOT_EXECUTABLE, NOT_FOUND, OUT_OF_TIME, run_program
from lightning_lockstep._text import plain_table
from lightning_lockstep.distributed.rendezvous import addresses_of, is_own
from lightning_lockstep.errors import ConfigurationError, LaunchError

_VERSION = 20  # how long mpirun may take to say what it is [s]
# Variables that ranks on other hosts need as they are here; mpirun passes the rest of its variables.
_PASSED_ON = (
    *("PATH", "PYTHON", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_", "MKL_"),
    *("LOCKSTEP_", "HYDRA_", "HF_", "CUDA_"),
)
_EXPECTED = "Expected lines such as 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."


@dataclass(frozen=True, kw_only=True)
class MPIRunSettings:
    """How to start ranks; see :class:`LockstepMPIStrategy` for the meaning."""

    hostfile: str | Path | None = None
    mpirun: str | None = None
    mpirun_args: tuple[str, ...] = ()
    ssh_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.hostfile is not None and not Path(self.hostfile).is_file():
            raise ConfigurationError(f"hostfile={str(self.hostfile)!r}: there is no such file. {_EXPECTED}")


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
    """Return the mpirun to use: the given one, the one next to this Python, or the first in ``PATH``."""
    beside = Path(sys.prefix, "bin", "mpirun")
    path = settings.mpirun or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if path is None:
        return None
    answer = run_program([path, "--version"], _VERSION)
    if answer.returncode in (NOT_FOUND, NOT_EXECUTABLE, OUT_OF_TIME):
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
    variables: Sequence[str] = (),  # names that ranks on other hosts get with the usual ones
) -> list[str]:
    """Return the command that starts the ranks, up to the program."""
    size = str(num_processes * num_nodes)
    if mpirun.kind == "hydra":
        command = [mpirun.path, "-l", "-n", size, "-ppn", str(num_processes)]
        command += ["-f", str(settings.hostfile)] if settings.hostfile else []
        return [*command, *settings.mpirun_args]
    command = [mpirun.path, "-n", size, "--tag-output", "--bind-to", "none"]
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


# -- The hosts of a hostfile, looked at before anything starts --
# Each must accept ssh without a password, and let mpirun start a process there. What else is wrong, mpirun says itself.

_CONNECT = 6  # longest wait for ssh to connect [s]
_ANSWER = 46  # longest wait for a host to answer [s]
_MPIRUN = 40  # longest wait for `mpirun hostname` [s]


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a hostfile of Open MPI (``node1 slots=4``) or MPICH (``node1:4``)."""
    try:
        lines = [line.split("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: it cannot be read ({error}). {_EXPECTED}") from error
    hosts = [_without_slots(words[0]) for words in lines if words]
    if wrong := [host for host in hosts if host.startswith("-")]:  # mpirun would take them for options
        raise LaunchError(f"hostfile {path}: {wrong[0]!r} is not the name of a host. {_EXPECTED}")
    return hosts


def _without_slots(word: str) -> str:
    """Return the host of ``host:slots``; an address of IPv6 has colons itself, and slots only after brackets."""
    if word.startswith("["):
        return word[1:].partition("]")[0]
    name, _, count = word.partition(":")
    return word if ":" in count else name


def check_hosts(settings: MPIRunSettings, mpirun: MPIRun, *, num_nodes: int) -> list[str]:
    """Make sure that ranks can be started on the hosts of the hostfile, if there is one; return these hosts."""
    if settings.hostfile is None:
        if num_nodes > 1:
            raise LaunchError(
                f"num_nodes={num_nodes} was given, but no hostfile: expected hostfile=... with {num_nodes} hosts, or"
                " ranks that are started by mpirun or srun."
            )
        return []
    hosts = read_hostfile(Path(settings.hostfile))[:num_nodes]
    faults = ssh_faults(hosts, settings.ssh_args)
    if any(faults):
        rows = [(host, fault or "ready") for host, fault in zip(hosts, faults, strict=True)]
        raise LaunchError(f"Not every host is ready to run ranks:\n\n{plain_table(('host', 'what to do'), rows)}")
    if fault := mpirun_fault(hosts, mpirun, settings):
        raise LaunchError(fault)
    return hosts


def is_this_host(name: str) -> bool:
    """Return whether a host of a hostfile is the one on which this process runs, to which no ssh is needed."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    return any(map(is_own, addresses_of(name)))


def ssh_faults(hosts: Sequence[str], ssh_args: Sequence[str]) -> list[str]:
    """Try ssh to all hosts at once; return what to do about each, nothing for one that answers."""
    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        return list(pool.map(lambda host: _ssh_fault(host, ssh_args), hosts))


def _ssh_fault(host: str, ssh_args: Sequence[str]) -> str:
    if is_this_host(host):
        return ""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"]
    answer = run_program(["ssh", *options, *ssh_args, "--", host, "true"], _ANSWER)
    if answer.succeeded:
        return ""
    errors = [line for line in answer.error.splitlines() if line.strip()]
    why = f"no answer within {_ANSWER} s" if answer.timed_out else errors[-1] if errors else "no output"
    return f"`{shlex.join(['ssh', *ssh_args, host, 'true'])}` must work without asking anything: {why}"


def mpirun_fault(hosts: Sequence[str], mpirun: MPIRun, settings: MPIRunSettings) -> str:
    """Let mpirun print the name of every host from there; return what is wrong, if anything is."""
    names, count = ",".join(hosts), str(len(hosts))
    command = [mpirun.path, "-hosts", names, "-ppn", "1", "-n", count, "hostname"]
    if mpirun.kind == "open_mpi":
        command = [mpirun.path, "-H", names, "--prefix", mpirun.prefix, "-n", count, "--map-by", "ppr:1:node"]
        command += [*_ssh(settings.ssh_args), "hostname"]
    answer = run_program(command, _MPIRUN, mpirun_environ(settings))
    if answer.timed_out:
        return (
            f"`{' '.join(command)}` gave no answer within {_MPIRUN} s, though ssh works: the hosts must reach"
            " each other on all ports, not only ssh's. Open the firewall between them."
        )
    if answer.returncode or len(answer.output.split()) < len(hosts):
        output = "\n".join(line for line in (answer.output + answer.error).splitlines() if line.strip("- "))
        return f"`{' '.join(command)}` failed with exit code {answer.returncode}:\n\n{output[-1500:]}"
    return ""
