"""What checks may ask of a machine, real or imitated. They ask nothing else, so that every case can be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_lockstep._processes import Completed

__all__ = ["Completed", "Limits", "Machine", "Probed", "Python"]


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
        """Run a probe, a module of ``lightning_lockstep.doctor.probes``, in a process of its own.

        Args:
            name: Of its module.
            arguments: Of its command line.
            timeout: Longest time [s].
        """
