"""What a check may ask of a machine, and this one."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from lightning_lockstep._system import Completed, run_program
from lightning_lockstep._text import exit_in_words

# -- What checks may ask of a machine, real or imitated. They ask nothing else, so that every case can be
# recorded


@dataclass(frozen=True)
class Probed:
    """What a probe has printed. A probe is a process of its own that may import torch, DeepSpeed or mpi4py."""

    facts: Mapping[str, Any] = field(default_factory=dict)  # empty where the probe failed
    error: str = ""  # why it failed, in one line


@dataclass(frozen=True)
class Python:
    """The Python that runs the doctor, and would run the training."""

    executable: str
    version: str
    include: str  # folder of its headers
    site_packages: str
    packages: Mapping[str, str]  # version by distribution, in lower case with ``-`` between words
    folders: Mapping[str, str] = field(default_factory=dict)  # by distribution; else ``site_packages``

    def folder_of(self, package: str) -> str:
        return self.folders.get(package, self.site_packages)


@dataclass(frozen=True)
class Limits:
    """What processes here may use."""

    cores: int  # that this process may use
    host_cores: int
    memory: int  # most that processes here can have [bytes]
    memory_limited_by: str  # what sets that, in words
    host_memory: int  # [bytes]
    open_files: int | None  # of one process; None: no limit
    shared_memory: int | None  # size of ``/dev/shm`` [bytes]; None: there is none
    locked_memory: int | None  # of one process [bytes]; None: no limit


class Machine(Protocol):
    """A machine as checks see it. No method raises for what is not there, cannot be read or prints nonsense."""

    @property
    def host(self) -> str:
        """Its host name."""

    @property
    def is_imitated(self) -> bool:
        """Whether its answers are recorded, so that nothing can be started on it."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Its environment variables."""

    @property
    def python(self) -> Python:
        """Its Python."""

    @property
    def limits(self) -> Limits:
        """What processes on it may use."""

    def run(self, command: Sequence[str], timeout: float = 10.0) -> Completed:
        """Run a program and wait for it; nothing of it is left when its time is over.

        Args:
            command: Program and arguments.
            timeout: Longest time [s].
        """

    def which(self, program: str) -> str | None:
        """Return the path under which ``PATH`` finds a program, ``None`` if it does not.

        Args:
            program: Its name, or a path.
        """

    def read_text(self, path: str, *, whole: bool = False) -> str | None:
        """Return what a file holds, ``None`` if it cannot be read; undecodable bytes are replaced.

        Args:
            path: Absolute.
            whole: Read it to its end; by default only its first million characters, since what is larger was not meant.
        """

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder.

        Args:
            path: Absolute.
        """

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern, sorted.

        Args:
            pattern: Absolute, with ``*`` within one name.
        """

    def real_path(self, path: str) -> str:
        """Return a path with all links followed.

        Args:
            path: Absolute.
        """

    def probe(self, name: str, *arguments: str, timeout: float = 60.0) -> Probed:
        """Run a probe of ``lightning_lockstep.doctor.probes`` in a process of its own.

        Args:
            name: Of its function.
            arguments: Of its command line.
            timeout: Longest time [s].
        """


# -- What the doctor uses to run programs: of :mod:`lightning_lockstep._system`, and the last line of an
# output

# MPI frames its messages with such lines.
_RULE = " -*="


def last_line(text: str) -> str:
    """Return the last line of a text that is neither blank nor a rule, the empty string if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip(_RULE)]
    return lines[-1] if lines else ""


# -- Lines that install packages of a machine's system --


def has_dnf(machine: Machine) -> bool:
    """Return whether a system has packages of Red Hat's kind, rather than Debian's."""
    return machine.which("apt-get") is None and machine.which("dnf") is not None


def system_install(machine: Machine, debian: str, red_hat: str) -> str:
    """Return the line that installs packages."""
    return f"sudo dnf install {red_hat}" if has_dnf(machine) else f"sudo apt-get install {debian}"


# -- Devices on the PCI bus of a machine --


def pci_devices(machine: Machine, vendor: str) -> list[str]:  # vendor: such as ``0x10de``
    """Return the folders in which the kernel describes the devices of a vendor."""
    files = machine.glob("/sys/bus/pci/devices/*/vendor")
    return [
        path.removesuffix("/vendor") for path in files if (machine.read_text(path) or "").strip() == vendor
    ]


# -- The machine on which the doctor runs --

_SHARED_MEMORY = "/dev/shm"
# A file of /proc or of a toolkit is small; what is larger was not meant [characters].
_MOST = 1_000_000


class ThisMachine:
    """The real machine; see :class:`lightning_lockstep.doctor.machine.Machine` for the methods."""

    is_imitated = False

    @cached_property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    @cached_property
    def python(self) -> Python:
        paths = sysconfig.get_paths()
        version = ".".join(map(str, sys.version_info[:3]))
        packages, folders = _packages(sys.path)
        return Python(sys.executable, version, paths["include"], paths["purelib"], packages, folders)

    @cached_property
    def limits(self) -> Limits:
        import psutil

        from lightning_lockstep._system import memory_limit, usable_cores

        memory, limited_by = memory_limit()
        return Limits(
            cores=len(usable_cores()),
            host_cores=os.cpu_count() or 1,
            memory=memory,
            memory_limited_by=limited_by,
            host_memory=int(psutil.virtual_memory().total),
            open_files=_limit(resource.RLIMIT_NOFILE),
            shared_memory=_size(_SHARED_MEMORY),
            locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        )

    def run(self, command: Sequence[str], timeout: float = 10.0) -> Completed:
        """Run a program; its messages are in English."""
        return run_program(command, timeout, {**os.environ, "LC_ALL": "C"})

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def read_text(self, path: str, *, whole: bool = False) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(-1 if whole else _MOST)
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        try:
            return Path(path).exists()
        except (OSError, ValueError):
            return False

    def glob(self, pattern: str) -> list[str]:
        return sorted(str(path) for path in Path("/").glob(pattern.lstrip("/")))

    def real_path(self, path: str) -> str:
        return os.path.realpath(path)

    def probe(self, name: str, *arguments: str, timeout: float = 60.0) -> Probed:
        """Run a probe; the last line of its output is a JSON object."""
        module = "host" if name in ("build_tools", "shared_memory") else "libraries"
        command = [sys.executable, "-m", f"lightning_lockstep.doctor.probes.{module}", name, *arguments]
        done = run_program(command, timeout, {**os.environ, "PYTHONUNBUFFERED": "1"})
        if done.timed_out:
            return Probed(error=f"it did not end within {timeout:.0f} s{_after(done)}")
        try:
            facts = json.loads(last_line(done.output))
        except ValueError:
            facts = None
        if isinstance(facts, dict) and done.succeeded:
            return Probed(facts)
        return Probed(error=last_line(done.error) or f"it failed: {exit_in_words(done.returncode)}")


def _after(done: Completed) -> str:
    line = last_line(done.error)
    return f" (its last line: {line})" if line else ""


def _packages(search_path: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return version and folder of each distribution, by the names of its files; to read all metadata takes long."""
    packages: dict[str, str] = {}
    folders: dict[str, str] = {}
    for folder in search_path:
        with suppress(OSError):
            for name in sorted(path.name for path in Path(folder).iterdir()):
                if match := re.fullmatch(r"([^-]+)-([^-]+)(-.*)?\.(dist|egg)-info", name):
                    # The first on sys.path is the one that is imported.
                    package = re.sub(r"[-_.]+", "-", match[1]).lower()
                    packages.setdefault(package, match[2])
                    folders.setdefault(package, str(Path(folder).absolute()))
    return packages, folders


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None
