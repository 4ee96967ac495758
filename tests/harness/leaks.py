"""What a test must not leave behind: environment, threads, process groups, processes, files, cwd."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from tests.harness.patience import wait_until

_IGNORED_FILES = {".pytest_cache", "__pycache__", ".coverage", ".mypy_cache", ".ruff_cache"}
# A fit without a logger that fails on purpose leaves its record here, as users are told.
_IGNORED_FILES |= {"failure.json"}
# pytest's own; PYTEST_CURRENT_TEST changes with every phase of a test.
_IGNORED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "COLUMNS",
    "LINES",
    # scikit-learn sets both when it is imported, whichever test comes first.
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    # torch sets it when its compiler is imported.
    "TORCHINDUCTOR_CACHE_DIR",
    # torch-xla sets these when it is imported.
    "GRPC_VERBOSITY",
    "PJRT_DEVICE",
    "PJRT_DYNAMIC_PLUGINS",
    "TF_CPP_MIN_LOG_LEVEL",
    "XLA_FLAGS",
}
# tqdm's monitor belongs to the progress bar class and lives as long as the process.
_IGNORED_THREADS = {"TMonitor"}


@dataclasses.dataclass(frozen=True)
class LeakCheck:
    """The state before a test; ``leaks()`` compares it with the state after."""

    environment: dict[str, str]
    threads: frozenset[int]
    processes: frozenset[int]
    cwd: str
    files: frozenset[str]
    process_group: bool

    @classmethod
    def now(cls) -> LeakCheck:
        """Take the state of this process."""
        cwd = os.getcwd()
        return cls(
            environment=dict(os.environ),
            threads=frozenset(id(thread) for thread in threading.enumerate()),
            processes=frozenset(process.pid for process in psutil.Process().children()),
            cwd=cwd,
            files=frozenset(_files(cwd)),
            process_group=_has_process_group(),
        )

    def leaks(self, allowed: Iterable[str] = (), patience: float = 2.0) -> list[str]:
        """Return a line for each leak; `allowed` has kinds of them, and env:NAME for one variable."""
        allowed = set(allowed)
        checks: dict[str, Callable[[], list[str]]] = {
            "env": lambda: self._environment_leaks(allowed),
            "threads": lambda: _wait_until_empty(self._thread_leaks, patience),
            "process_group": self._process_group_leaks,
            "processes": lambda: _wait_until_empty(self._process_leaks, patience),
            "cwd": self._cwd_leaks,
            "files": self._file_leaks,
        }
        return [leak for kind, check in checks.items() if kind not in allowed for leak in check()]

    def restore(self) -> None:
        """Put back what can be put back, so that one leak does not fail every later test."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.cwd)
        if not self.process_group and _has_process_group():
            sys.modules["torch.distributed"].destroy_process_group()
        if "lightning_lockstep._lightning" in sys.modules:
            _restore_data_classes()

    def _environment_leaks(self, allowed: set[str]) -> list[str]:
        leaks = []
        for name in sorted({*self.environment, *os.environ} - _IGNORED_VARIABLES):
            before, after = self.environment.get(name), os.environ.get(name)
            if before != after and f"env:{name}" not in allowed:
                leaks.append(f"environment variable {name}: {before!r} before, {after!r} after")
        return leaks

    def _thread_leaks(self) -> list[str]:
        return [
            f"thread {thread.name!r} is still running"
            for thread in threading.enumerate()
            if id(thread) not in self.threads
            and thread.name not in _IGNORED_THREADS
            # A thread that only C++ knows (autograd's) gets a dummy object when it first calls Python.
            and not isinstance(thread, threading._DummyThread)
            and type(thread).__name__ not in _IGNORED_THREADS
        ]

    def _process_group_leaks(self) -> list[str]:
        leaked = _has_process_group() and not self.process_group
        return ["torch.distributed is still initialised"] if leaked else []

    def _process_leaks(self) -> list[str]:
        from tests.harness.ranks import server_pids

        children = psutil.Process().children()
        return [
            f"process {child.pid} is still there: {_command(child)}"
            for child in children
            if child.pid not in self.processes and child.pid not in server_pids() and not _is_tracker(child)
        ]

    def _cwd_leaks(self) -> list[str]:
        after = os.getcwd()
        return [] if after == self.cwd else [f"working folder changed to {after}"]

    def _file_leaks(self) -> list[str]:
        new = sorted(set(_files(self.cwd)) - self.files)
        return [f"file left in the working folder: {name}" for name in new]


def _files(folder: str) -> set[str]:
    return {entry.name for entry in Path(folder).iterdir()} - _IGNORED_FILES


def _has_process_group() -> bool:
    # Looked up, not imported: a test that never used torch should not pay for it.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


def _restore_data_classes() -> None:
    """Take away what Lightning leaves in torch's classes when a program's loader hook raises."""
    from torch.utils.data import BatchSampler, DataLoader

    classes: list[type] = [DataLoader, BatchSampler]
    for cls in classes:
        classes += cls.__subclasses__()
        for name in ("__init__", "__setattr__", "__delattr__"):
            method = own = vars(cls).get(name)
            while getattr(own, "__globals__", {}).get("__name__", "").endswith("fabric.utilities.data"):
                own = own.__wrapped__  # type: ignore[union-attr]
            if own is not method:
                setattr(cls, name, own)
            if f"__old{name}" in vars(cls):
                delattr(cls, f"__old{name}")


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return "gone meanwhile"


def _is_tracker(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker is started once and lives as long as this process."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _wait_until_empty(find: Callable[[], list[str]], patience: float) -> list[str]:
    return [] if wait_until(lambda: not find(), patience) else find()
