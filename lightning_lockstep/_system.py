"""The host: cores and memory, programs run with a deadline, Ctrl-C, files written whole."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import psutil

from lightning_lockstep._text import say

# -- What this process may use of its host: cores, CPU time and memory, with the limits of its control group --

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@cache  # pinning narrows the affinity of this process; later calls must still see what it began with
def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores this process may use, fewer if a control group limits its CPU time."""
    cores, limit = sorted(os.sched_getaffinity(0)), cpu_limit()
    return tuple(cores if limit is None else cores[: max(1, int(limit))])


def cpu_limit() -> float | None:
    """Return the CPU time limit of this process's control group [cores], or ``None`` if there is none."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        with suppress(OSError, ValueError):  # absent, or "max" for no limit
            quota, period = (folder / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                limits.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def memory_limit() -> tuple[int, str]:
    """Return the most memory that the processes here can have [bytes], and what sets that limit."""
    limits = [(int(psutil.virtual_memory().total), "memory of this host")]
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append((int((folder / name).read_text()), "memory of this control group"))
    return min(limits)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that bind this process, version 1 and 2, its own one first."""
    # A container usually sees its own group at the root of the mount, whatever path the kernel reports.
    groups = []
    with suppress(OSError):
        groups = _OWN_CGROUP.read_text().splitlines()
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
    yield _CGROUPS
    yield _CGROUPS / controller


# -- Programs that are run with a deadline, and of which nothing stays behind --

NOT_FOUND, NOT_EXECUTABLE, OUT_OF_TIME = 127, 126, 124
# More than this of an output is not read: no tool that is run here says more [bytes].
_MOST = 1_000_000

# The groups of the programs that run now, and what is held until one that is being started is among them.
_groups: set[int] = set()
_starting = threading.Lock()


@dataclass(frozen=True)
class Completed:
    returncode: int  # 127: no such program; 126: it cannot be run; 124: its time was over
    output: str = ""  # what it wrote to standard output
    error: str = ""  # what it wrote to standard error

    @property
    def succeeded(self) -> bool:
        return self.returncode == 0

    @property
    def timed_out(self) -> bool:
        return self.returncode == OUT_OF_TIME


def run_program(command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> Completed:
    """Run a program in its own group and wait ``timeout`` [s] for it; what it has started ends with it."""
    # Files, not pipes: a pipe is only at its end when the last process that a program has left behind is.
    with memory_file() as output, memory_file() as errors:
        try:
            with _starting:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=None if environment is None else dict(environment),
                    start_new_session=True,
                )
                _groups.add(process.pid)
        except (FileNotFoundError, NotADirectoryError):
            return Completed(NOT_FOUND, "", f"{command[0]}: not found")
        except (OSError, ValueError) as error:  # not executable, another architecture, a null in an argument
            return Completed(NOT_EXECUTABLE, "", str(error))
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = OUT_OF_TIME
        finally:
            end_group(process.pid)
            process.wait()
            _groups.discard(process.pid)
        return Completed(returncode, text_of(output, _MOST), text_of(errors, _MOST))


def end_programs() -> None:
    """End all programs of :func:`run_program`, each a group that outlives this process, which has to end next."""
    _starting.acquire(timeout=1.0)  # and never released: nothing is started any more
    for pid in list(_groups):
        end_group(pid)


def end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def memory_file() -> IO[bytes]:
    """Return an empty file that needs no disk, which may be full or read-only."""
    return open(os.memfd_create("lockstep"), "w+b")


def text_of(file: IO[bytes], most: int = -1) -> str:  # most [bytes]; -1: all
    """Return what has been written to a file, from its beginning; who writes to it may go on meanwhile."""
    size = os.fstat(file.fileno()).st_size
    # Not read(), which moves the place where the other process writes next.
    return os.pread(file.fileno(), size if most < 0 else min(most, size), 0).decode("utf-8", "replace")


def shell_exit_code(returncode: int) -> int:  # of Popen: negative for a signal
    """Return the exit code that a shell reports for a process: 128 + n if signal n has ended it."""
    return 128 - returncode if returncode < 0 else returncode


# -- Ctrl-C: a second one, or one that Python would not see --


@contextmanager
def on_ctrl_c(handler: Callable[..., object] | int) -> Iterator[None]:
    """Handle Ctrl-C in another way in the body, if it would raise KeyboardInterrupt in the calling thread."""
    usual = signal.getsignal(signal.SIGINT)
    may_set = threading.current_thread() is threading.main_thread() and usual is signal.default_int_handler
    if may_set:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if may_set:
            signal.signal(signal.SIGINT, usual)


# -- Files that a run writes, such as reports: whole or not at all; a run goes on if one cannot be written --


def write_whole(path: Path, content: str | bytes) -> str | None:
    """Write a file next to its place and move it there, so that whoever looks finds all of it."""
    # Returns why that was not possible, such as ``No space left on device``; what stood there before stays.
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        return error.strerror or str(error)
    return None


def write_report(path: Path, content: str | bytes) -> bool:
    """Write a report into a run's folder for whoever looks there later; print why and return false if it cannot."""
    why = write_whole(path, content)
    if why is not None:
        say(f"lightning-lockstep: {path.name} could not be written to {path.parent}: {why}.")
    return why is None
