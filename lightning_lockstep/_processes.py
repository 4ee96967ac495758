"""Programs that are run with a deadline, and of which nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["NOT_FOUND", "Completed", "end_group", "end_programs", "memory_file", "run_program", "text_of"]

NOT_FOUND, NOT_EXECUTABLE, OUT_OF_TIME = 127, 126, 124
# More than this of an output is not read: no tool that is run here says so much [bytes].
_MOST = 1_000_000

# The groups of the programs that run now; sets change in one step, so that threads need no lock.
_groups: set[int] = set()


@dataclass(frozen=True)
class Completed:
    """A program that has run."""

    returncode: int  # 127: no such program; 126: it cannot be run; 124: its time was over
    output: str = ""  # what it wrote to standard output
    error: str = ""  # what it wrote to standard error

    @property
    def succeeded(self) -> bool:
        """Whether it ended with 0."""
        return self.returncode == 0

    @property
    def is_missing(self) -> bool:
        """Whether there is no such program."""
        return self.returncode == NOT_FOUND

    @property
    def is_unusable(self) -> bool:
        """Whether there is such a file, which is no program that can be run here."""
        return self.returncode == NOT_EXECUTABLE

    @property
    def timed_out(self) -> bool:
        """Whether it was ended because its time was over."""
        return self.returncode == OUT_OF_TIME


def run_program(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> Completed:
    """Run a program in its own group and wait ``timeout`` [s] for it; what it has started ends with it."""
    # Files, not pipes: a pipe is only at its end when the last process that a program has left behind is.
    with memory_file() as output, memory_file() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except (FileNotFoundError, NotADirectoryError):
            return Completed(NOT_FOUND, "", f"{command[0]}: not found")
        except (OSError, ValueError) as error:  # not executable, another architecture, a null in an argument
            return Completed(NOT_EXECUTABLE, "", str(error))
        _groups.add(process.pid)
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
    """End all programs that :func:`run_program` runs now: a group of its own each, which outlives this process."""
    for pid in list(_groups):
        end_group(pid)


def end_group(pid: int) -> None:
    """End all processes of the group that ``pid`` leads, at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def memory_file() -> IO[bytes]:
    """Return an empty file that needs no disk, which may be full or read-only."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("lockstep"), "w+b")
    return tempfile.TemporaryFile()


def text_of(file: IO[bytes], most: int = -1) -> str:  # most [bytes]; -1: all
    """Return what has been written to a file, from its beginning; who writes to it may go on meanwhile."""
    size = os.fstat(file.fileno()).st_size
    # Not read(), which moves the place where the other process writes next.
    return os.pread(file.fileno(), size if most < 0 else min(most, size), 0).decode("utf-8", "replace")
