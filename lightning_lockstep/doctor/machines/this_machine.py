"""The machine on which the doctor runs."""

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
from functools import cached_property
from pathlib import Path

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.machines.machine import Completed, Limits, Probed, Python
from lightning_lockstep.doctor.machines.processes import last_line, run_program

__all__ = ["ThisMachine"]

_SHARED_MEMORY = "/dev/shm"
# A file of /proc or of a toolkit is small; what is larger was not meant [characters].
_MOST = 1_000_000


class ThisMachine:
    """The real machine; see :class:`lightning_lockstep.doctor.machines.machine.Machine` for the methods."""

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
        command = [sys.executable, "-m", f"lightning_lockstep.doctor.probes.{name}", *arguments]
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
