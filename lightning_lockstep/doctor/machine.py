"""The machine that checks ask, and nothing else, so that tests can imitate it: files, programs, Python, limits."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lightning_lockstep._system import Completed, memory_limit, run_program, usable_cores
from lightning_lockstep._text import exit_in_words

T = TypeVar("T")


@dataclass(frozen=True)
class Probed:
    """What a probe has printed. A probe is a separate process that may import torch, DeepSpeed or mpi4py."""

    facts: Mapping[str, Any] = field(default_factory=dict)  # empty if the probe failed
    error: str = ""  # why it failed, in one line

    def entries(self, name: str, kind: type[T]) -> list[T]:
        """Return the entries of a fact that is a list; none if another version of a library gives no list."""
        value = self.facts.get(name)
        return [entry for entry in value if isinstance(entry, kind)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Python:
    """The Python that runs the doctor, and would run the training."""

    executable: str
    version: str
    packages: Mapping[str, str]  # version by distribution, in lower case with ``-`` between words
    folders: Mapping[str, str]  # in which each distribution is installed
    headers: str  # the folder for those of C


@dataclass(frozen=True)
class Limits:
    cores: int  # that this process may use
    host_cores: int
    memory: int  # most that processes here can have [bytes]
    memory_limited_by: str  # what sets that, in words
    host_memory: int  # [bytes]
    open_files: int | None  # of one process; None: no limit
    shared_memory: int | None  # free in ``/dev/shm`` [bytes]; None: there is none


# A file of /proc or of a toolkit is small; what is larger was not meant [characters].
_MOST = 1_000_000


class Machine:
    """A machine as checks see it. No method raises for what is not there, cannot be read or prints nonsense."""

    @cached_property
    def environment(self) -> Mapping[str, str]:
        return os.environ

    @cached_property
    def python(self) -> Python:
        version = ".".join(map(str, sys.version_info[:3]))
        return Python(sys.executable, version, *_packages(sys.path), sysconfig.get_paths()["include"])

    @cached_property
    def limits(self) -> Limits:
        memory, limited_by = memory_limit()
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        shared_memory = None
        with suppress(OSError):
            shared_memory = shutil.disk_usage("/dev/shm").free
        return Limits(
            cores=len(usable_cores()),
            host_cores=os.cpu_count() or 1,
            memory=memory,
            memory_limited_by=limited_by,
            host_memory=int(psutil.virtual_memory().total),
            open_files=None if open_files == resource.RLIM_INFINITY else open_files,
            shared_memory=shared_memory,
        )

    def run(self, command: Sequence[str], timeout: float = 10.0) -> Completed:
        """Run a program for at most ``timeout`` [s], messages in English; nothing of it is left after that."""
        return run_program(command, timeout, {**os.environ, "LC_ALL": "C"})

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def read_text(self, path: str) -> str | None:
        """Return the beginning of a file, ``None`` if it cannot be read; undecodable bytes are replaced."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_MOST)
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # noqa: PTH110 - that of Path raises without permission

    def age(self, path: str) -> float | None:
        """Return how long ago a file was written [s], ``None`` if there is none."""
        with suppress(OSError):
            return max(0.0, time.time() - Path(path).stat().st_mtime)
        return None

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match an absolute pattern, sorted."""
        return sorted(str(path) for path in Path("/").glob(pattern.lstrip("/")))

    def real_path(self, path: str) -> str:
        return os.path.realpath(path)

    def probe(self, name: str, *arguments: str, timeout: float = 60.0) -> Probed:
        """Run a function of ``doctor.probes.facts``, whose last line is a JSON object, for ``timeout`` [s]."""
        command = [sys.executable, "-m", "lightning_lockstep.doctor.probes.facts", name, *arguments]
        done = run_program(command, timeout, {**os.environ, "PYTHONUNBUFFERED": "1"})
        last = last_line(done.error)
        if done.timed_out:
            shown = f" (its last line: {last})" if last else ""
            return Probed(error=f"it did not end within {timeout:.0f} s{shown}")
        with suppress(ValueError):
            facts = json.loads(last_line(done.output))
            if isinstance(facts, dict) and done.succeeded:
                return Probed(facts)
        return Probed(error=last or f"it failed: {exit_in_words(done.returncode)}")


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


# -- What several checks read and advise --

#: Lines that bring more shared memory.
MORE_SHARED_MEMORY = (
    "ls -lS /dev/shm  # what fills it: programs that were killed leave files there",
    "# if it is too small, in a container: docker run --shm-size=8g (or --ipc=host); elsewhere:",
    "sudo mount -o remount,size=8G /dev/shm",
)


def last_line(text: str) -> str:
    """Return the last line of a text that is neither blank nor a rule, the empty string if there is none."""
    # MPI frames its messages with such rules.
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=")]
    return lines[-1] if lines else ""


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version, such as ``(2, 9, 0)`` of ``2.9.0+cu128``; empty if none."""
    # Tools print more kinds than packaging's Version reads. A longer number is none of a version.
    match = re.match(r"\s*[vV]?(\d{1,9}(?:\.\d{1,9})*)(?!\d)", version or "", re.ASCII)
    return tuple(map(int, match[1].split("."))) if match else ()


def major(version: str | None) -> int:
    """Return the first number of a version, 0 if there is none."""
    return next(iter(release(version)), 0)


def short(version: str | None, parts: int = 2) -> str:
    """Return the first numbers of a version, such as ``2.9`` of ``2.9.0+cu128``; empty if there are none."""
    return ".".join(map(str, release(version)[:parts]))


def system_install(debian: str, red_hat: str) -> str:
    """Return the line that installs packages of the system."""
    return f"sudo apt-get install {debian}  # or: sudo dnf install {red_hat}"


def pci_devices(machine: Machine, vendor: str) -> list[str]:  # vendor: such as ``0x10de``
    """Return the folders in which the kernel describes the devices of a vendor."""
    folders = map(os.path.dirname, machine.glob("/sys/bus/pci/devices/*/vendor"))
    return [path for path in folders if (machine.read_text(f"{path}/vendor") or "").strip() == vendor]
