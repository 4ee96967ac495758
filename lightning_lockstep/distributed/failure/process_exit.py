"""How a process ends: what it writes out, what it prints, and what it does not wait for."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_lockstep._environment import ended_folder
from lightning_lockstep._lightning import _destroy_dist_connection
from lightning_lockstep.distributed.failure.flushing import run_flushers
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.errors import RankFailedError

__all__ = [
    "expect_exit",
    "expected_exit",
    "flush_everything",
    "keep_quiet",
    "leave_without_waiting",
    "leaving",
    "show_plainly",
    "note_exit_for_mpirun",
    "write_torchelastic_error",
]


def keep_quiet(error: BaseException) -> None:
    """Keep Python from printing ``error`` when it ends this process: another rank shows the report.

    Ranks: any rank, alone.
    """
    _show_instead(error, "")


def show_plainly(error: RankFailedError) -> None:
    """Make Python print the report alone when ``error`` ends this process, without this rank's own stack.

    Torch's hook would put this rank's number in front of every line of the other one's traceback.

    Ranks: any rank, alone.
    """
    _show_instead(error, f"\nlightning-lockstep: {error}\n")


def _show_instead(error: BaseException, text: str) -> None:
    error.__lockstep_text__ = text  # type: ignore[attr-defined]
    usual = sys.excepthook
    if getattr(usual, "__lockstep__", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        instead = getattr(value, "__lockstep_text__", None)
        if instead is None:
            usual(kind, value, trace)
        elif instead:
            sys.stderr.write(instead)

    hook.__lockstep__ = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def flush_everything() -> None:
    """Write out what is held back, then flush standard streams and log handlers; never raises."""
    run_flushers()
    for handler in list(logging.getLogger().handlers):
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


_expected_exit: int | None = None


def expect_exit(exit_code: int) -> None:
    """Note that all ranks have agreed to end with this exit code, so that it is no failure.

    Ranks: every rank, alike, at the point where all leave.
    """
    global _expected_exit
    _expected_exit = exit_code


def expected_exit() -> int | None:
    """Return the exit code with which all ranks have agreed to end, or ``None``."""
    return _expected_exit


_leaving = False


def leaving() -> bool:
    """Return whether this process is on its way out after a failure."""
    return _leaving


def leave_without_waiting(exit_code: int) -> None:
    """End this process, once Python begins to exit, without the destructors that would wait for the dead."""
    global _leaving
    if _leaving:
        return
    _leaving = True

    def leave() -> None:
        atexit.unregister(leave)
        atexit.unregister(_destroy_dist_connection)
        atexit._run_exitfuncs()  # those registered before us: log handlers, experiment trackers
        flush_everything()
        os._exit(exit_code)

    atexit.register(leave)


def note_exit_for_mpirun() -> None:
    """Have the launcher of this host's ranks told, at this process's end, if it ends in good order.

    Ranks: every rank, for itself, once.
    """
    folder = ended_folder()

    def tell() -> None:
        if not leaving() and not hasattr(sys, "last_value"):
            with suppress(OSError):
                Path(folder or "", str(os.getpid())).touch()

    if folder is not None:
        atexit.register(tell)


def write_torchelastic_error(record: FailureRecord) -> None:
    """Write the error file that ``torchrun`` reads, so that its closing summary has the traceback.

    Every rank writes what the first one said, since the agent sums up whichever it sees end first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    content = {
        "message": {
            "message": record.headline(),
            "extraInfo": {"py_callstack": record.traceback, "timestamp": str(int(time.time()))},
        }
    }
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
