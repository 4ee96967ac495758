"""The mpirun that is installed, its command line, and what becomes of its output."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from lightning_lockstep._system import run_program
from lightning_lockstep.errors import ConfigurationError, LaunchError

# -- Which mpirun to use, and the command line and environment with which it starts ranks --

_VERSION = 20  # how long mpirun may take to say what it is [s]
# Variables that ranks on other hosts need as they are here; mpirun passes the rest of its variables.
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
    """Return the mpirun to use: the given one, the one next to this Python, or the first in ``PATH``."""
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
    variables: Sequence[str] = (),  # names that ranks on other hosts get with the usual ones
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


# -- Passes on what mpirun prints, each line with its rank, to streams that may be closed, full or on a full disk --

#: How long a full pipe may take to be read on, once the ranks have ended or been told to [s].
PATIENCE = 5.0
_LOOK_EVERY = 0.5  # [s]
# How `--output tag` of Open MPI and `-l` of MPICH mark a line.
_TAGGED = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<\w+>:)? ?(.*)$", re.DOTALL)


class _Stream(threading.Thread):
    """Passes one stream on, past Python's buffer, whose lock a blocked write would hold when this process exits."""

    # It goes on reading when it can no longer write, so that the ranks go on too; that is said once.

    def __init__(
        self, name: str, source: IO[bytes], target: TextIO | None, say: Callable[[str], None]
    ) -> None:
        super().__init__(daemon=True)
        self._what, self._source, self._target, self._say = name, source, target, say
        self._said = False
        self._ending: float | None = None  # since when it waits no longer than PATIENCE
        self._moved = 0.0  # when something was last written, by the monotonic clock [s]
        self._descriptor: int | None = None
        if isinstance(target, io.TextIOWrapper):  # not what a program has put in its place
            with suppress(OSError, ValueError):
                self._descriptor = target.fileno()

    def run(self) -> None:
        for line in self._source:
            text = line.decode(errors="replace").replace("\0", "")
            mark = ""
            if tagged := _TAGGED.match(text):
                mark, text = f"[rank {tagged[1]}] ", tagged[2]
            if text.strip():
                self.write(mark + text)

    def write(self, text: str) -> None:
        """Write ``text``; wait while a pipe is full, unless the ranks are ending. Never raises."""
        if self._target is None:
            return
        try:
            if self._descriptor is None:
                self._target.write(text)
                self._target.flush()
            else:
                self._write(text.encode(self._target.encoding, errors="replace"), self._descriptor)
        except (OSError, ValueError) as error:
            # A disk may have room again; a pipe whose reader is gone stays so.
            if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
                self._target = None
            if not self._said:
                self._said = True
                self._say(
                    f"lightning-lockstep: {self._what} cannot be written to ({error}). The ranks go on; what they"
                    " print there is lost.\n"
                )

    def _write(self, data: bytes, descriptor: int) -> None:
        while data:
            while not select.select([], [descriptor], [], _LOOK_EVERY)[1]:
                if self.is_stuck():
                    raise TimeoutError(errno.ETIMEDOUT, "it is full and is not read")
            # A pipe that is ready takes this much without blocking.
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
            self._moved = time.monotonic()

    def expect_end(self) -> None:
        self._ending = self._ending or time.monotonic()

    def is_stuck(self) -> bool:
        """Return whether the ranks are ending and nothing has been written for longer than :data:`PATIENCE`."""
        return self._ending is not None and time.monotonic() - max(self._moved, self._ending) > PATIENCE


class OutputRelay:
    """Relays standard output and standard error of one mpirun, each in a separate thread."""

    def __init__(self, out: tuple[IO[bytes], TextIO | None], err: tuple[IO[bytes], TextIO | None]) -> None:
        self._err = _Stream("standard error", *err, self.say)
        self._streams = (_Stream("standard output", *out, self.say), self._err)
        for stream in self._streams:
            stream.start()

    def say(self, text: str) -> None:
        """Print something of our own to standard error."""
        self._err.write(text)

    def expect_end(self) -> None:
        """Have the ranks wait no more for a stream that is full, since they have been told to end."""
        for stream in self._streams:
            stream.expect_end()

    def finish(self) -> None:
        """Wait until everything has been passed on, as long as it is taken."""
        self.expect_end()
        for stream in self._streams:
            while stream.is_alive() and not stream.is_stuck():
                stream.join(0.1)
            stream.join(1.0)  # it may still be saying so
