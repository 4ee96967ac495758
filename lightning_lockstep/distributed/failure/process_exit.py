"""How a process ends: what runs and is written out before, what is printed, and what is not waited for.

Nothing else in a run calls ``os._exit`` or registers with :mod:`atexit` (processes of the doctor do). What is printed
of an exception that nobody catches is decided in :mod:`~lightning_lockstep.distributed.failure.uncaught`.

====================================== ======================================================================
an orderly end                         functions given to :func:`at_exit` run
:func:`leave_without_waiting`          as above once Python exits, but nothing that waits for a dead peer; where the
                                       program has caught the failure, with its own exit code
:func:`end_after_exit_functions`       the same now, without going back to the program
:func:`end_now`                        by force, from any thread: only what :func:`on_flush` holds is written
====================================== ======================================================================
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

from lightning_lockstep._text import say

_log = logging.getLogger(__name__)

# ------------------------------------------------------------------ before the end


def at_exit(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Have ``function(*args)`` called when Python exits, the newest first; returns it, so it may decorate."""
    return atexit.register(function, *args)


_flushers: list[Callable[[], None]] = []


def on_flush(flusher: Callable[[], None]) -> Callable[[], None]:
    """Have ``flusher`` called before this process ends by force, which nothing at exit survives."""
    # It may be called on any thread and more than once, and must wait for another rank for a second at most.
    # Returns a function that takes it off the list again.
    _flushers.append(flusher)

    def remove() -> None:
        with suppress(ValueError):
            _flushers.remove(flusher)

    return remove


def run_flushers() -> None:
    """Call every flusher, the newest first; one that fails is logged and does not stop the others."""
    for flusher in reversed(list(_flushers)):
        _run_flusher(flusher)


def _run_flusher(flusher: Callable[[], None]) -> None:
    try:
        flusher()
    except Exception:
        _log.exception("flushing %r failed; the output that it held back is lost", flusher)


def flush_everything() -> None:
    """Write out what is held back, then flush standard streams and log handlers; never raises."""
    run_flushers()
    for handler in list(logging.getLogger().handlers):
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def drop_what_nobody_reads() -> None:
    """Send what is left in a standard stream that nobody reads to nowhere: Python would exit with 120 because of it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            _drop_if_unread(stream)


def _drop_if_unread(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# ------------------------------------------------------------------ the end itself


def end_now(exit_code: int, message: str = "") -> NoReturn:
    """End this process by force, from any thread; ``message`` is printed last, to standard error."""
    last = threading.Thread(target=_print_last, args=(message,), name="lockstep-last", daemon=True)
    try:
        last.start()
    except RuntimeError:  # Python is exiting and starts no thread any more
        _print_last(message)
    else:
        last.join(_LAST_WRITES)  # no longer: perhaps nobody reads the stream
    os._exit(exit_code)


def _print_last(message: str) -> None:
    flush_everything()
    say_last(message)
    repeat_headline()


def say_last(text: str) -> None:
    """Print the report of a failure to standard error, once; its first line comes again if others follow it."""
    if text and text != _last_said:
        say(text)
        was_last(text)


def was_last(text: str) -> None:
    """Note that the report of a failure was printed, which begins with ``text``."""
    global _last_said, _said_since
    _last_said, _said_since = text, False


def repeat_headline() -> None:
    """Let the last line name the failure where lines that were under way came after its report."""
    global _said_since
    if _last_said and _said_since:
        _said_since = False
        say("\n" + next(line for line in _last_said.splitlines() if line))


def printed_a_line() -> None:
    """Note that a line of the run was printed, perhaps after the report of its failure."""
    global _said_since
    _said_since = True


# The report that is to be the last of the run's output, and whether anything was printed since.
_last_said, _said_since = "", False
# How long what is held back may take to be written before an end by force [s].
_LAST_WRITES = 10.0


def end_after_exit_functions(exit_code: int) -> NoReturn:
    """End this process after what is registered for its exit (log handlers, experiment trackers) has run."""
    flush_everything()
    atexit._run_exitfuncs()
    flush_everything()
    repeat_headline()
    os._exit(exit_code)  # Python's own exit would not keep the code


_leaving: Callable[[], None] | None = None
_leaving_code: int | None = None


def leaving() -> bool:
    """Return whether this process is about to end because of a failure."""
    return _leaving is not None


def leaving_code() -> int | None:
    """Return the exit code with which this process is about to end because of a failure, or ``None``."""
    return _leaving_code


def ends_with_error() -> bool:
    """Return whether this process is about to end because of an exception that nobody caught."""
    return hasattr(
        sys, "last_value"
    )  # set by Python before it prints the exception; a SystemExit leaves no trace


def leave_without_waiting(
    exit_code: int,
    message: str = "",  # to standard error, before what is registered for the exit runs
    *,
    unless_caught: bool = False,  # a program that has caught the failure ends as it would have without
) -> None:
    """Have this process, once Python begins to exit, end without the destructors that wait for dead peers."""
    global _leaving, _leaving_code
    if _leaving is not None:
        return

    def leave() -> None:
        atexit.unregister(leave)
        # Not imported here: what has not imported Lightning has no process group either.
        if "lightning_lockstep._doors.lightning" in sys.modules:
            from lightning_lockstep._doors.lightning import _destroy_dist_connection

            atexit.unregister(_destroy_dist_connection)
        if unless_caught and not ends_with_error():
            stay()
            return
        say_last(message)
        end_after_exit_functions(exit_code)  # of these functions, those registered before this one

    _leaving, _leaving_code = leave, exit_code
    at_exit(leave)


def stay() -> None:
    """Take :func:`leave_without_waiting` back: the program has caught the failure and goes on."""
    global _leaving, _leaving_code
    was_last("")
    if _leaving is not None:
        atexit.unregister(_leaving)
        _leaving = _leaving_code = None


_returned = False


def return_failure() -> None:
    """Do not end this process by force any more: it has returned the failure to the process it works for."""
    global _returned
    _returned = True


def failure_returned() -> bool:
    return _returned


_writing: list[object] = []


@contextmanager
def writing_report() -> Iterator[None]:
    """Have a forced end that another rank's failure brings about wait for the body, which writes a report."""
    report = object()
    _writing.append(report)
    try:
        yield
    finally:
        _writing.remove(report)


def wait_for_reports(timeout: float) -> None:
    """Wait, up to ``timeout`` [s], until nothing writes a report in this process."""
    deadline = time.monotonic() + timeout
    while _writing and time.monotonic() < deadline:
        time.sleep(0.05)


_expected_exit: int | None = None


def expect_exit(exit_code: int) -> None:
    """Note that all ranks have agreed to end with this exit code, so that it is no failure."""
    global _expected_exit
    _expected_exit = exit_code


def expected_exit() -> int | None:
    """Return the exit code with which all ranks have agreed to end, or ``None``."""
    return _expected_exit
