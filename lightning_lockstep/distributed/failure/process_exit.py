"""How a process ends: what runs and is written out before, what is printed last, and what is not waited for.

How this process is to end is kept in one object, :data:`exit_plan`; what is printed of an error, in the
:class:`ExitReport` that the error carries. An end that Python does not make itself is made by :func:`end_now`:

=========================================== ===================================================================
who                                         what it does
=========================================== ===================================================================
Python, in an orderly end                   functions of :mod:`atexit` run
:meth:`ExitPlan.force_exit_at_shutdown`     when Python exits: functions of :mod:`atexit` run, but nothing that waits
                                            for a dead peer. If the program has caught the failure, it exits with
                                            its own code. Another Ctrl-C meanwhile ends it at once
:func:`end_now`, from any thread            by force: only what :func:`on_flush` holds is written
an exception that nobody catches            its text is printed; if the process does not end in time, as above
=========================================== ===================================================================
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning_lockstep._system import on_ctrl_c
from lightning_lockstep._text import SAVED, say
from lightning_lockstep.distributed.failure.tracebacks import format_error

_log = logging.getLogger(__name__)
# How long what is held back may take to be written before an end by force [s].
_LAST_WRITES = 10.0
_LATE = "\nlightning-lockstep: ended by force: its exit handlers and threads did not finish in time.\n"

# -- Before the end --


_flushers: dict[Callable[[], None], None] = {}  # in the order in which they came


def on_flush(flusher: Callable[[], None]) -> Callable[[], None]:
    """Have ``flusher`` called before this process ends by force; functions of :mod:`atexit` are not."""
    # It may be called on any thread, more than once, and may wait a second for another rank. Returns what removes it.
    _flushers[flusher] = None
    return lambda: _flushers.pop(flusher, None)


def _log_errors(function: Callable[..., object], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        _log.exception("%r failed; what it should have written may be missing", function)


def flush_everything() -> None:
    """Write out what is held back, the newest first, then flush standard streams and log handlers; never raises."""
    for flusher in reversed(list(_flushers)):
        _log_errors(flusher)
    for stream in (*logging.getLogger().handlers, sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def drop_what_nobody_reads() -> None:
    """Discard what is left in a standard stream that nobody reads: otherwise Python would exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203 - each stream by itself
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        except (ValueError, AttributeError):
            pass  # it is closed, or there is none


# -- After a while --

_Call = tuple[float, Callable[..., object], tuple[Any, ...]]


class _Clock:
    """Calls functions later, on one thread that is started early: after a failure Python may start none."""

    def __init__(self, name: str) -> None:
        self._process, self._name = 0, name

    def start(self) -> None:
        """Start the thread unless this process has it; raises RuntimeError if no thread can be started."""
        if self._process != os.getpid():  # a forked process has no threads but the one that has forked it
            self._given: queue.SimpleQueue[_Call] = queue.SimpleQueue()
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._process = os.getpid()

    def after(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function later; at once if there is no thread and none can be started."""
        try:
            self.start()
        except RuntimeError:
            function(*args)
        else:
            self._given.put((time.monotonic() + seconds, function, args))

    def _run(self) -> None:
        calls: list[_Call] = []
        while True:
            try:
                wait = max(0.0, calls[0][0] - time.monotonic()) if calls else None
                calls = sorted([*calls, self._given.get(timeout=wait)], key=lambda call: call[0])
            except queue.Empty:  # noqa: PERF203 - each by itself
                _, function, args = calls.pop(0)
                _log_errors(function, *args)


#: Of this process: one ends it, the other one ends what it waits in, which may block.
clock, interrupt_clock = _Clock("lockstep-clock"), _Clock("lockstep-interrupt")

# -- How this process ends --


@dataclass
class ExitReport:
    """What is printed of an error that nobody catches, and how this process then ends."""

    text: str = ""  # printed last
    exit_code: int | None = None  # None: Python's own
    deadline: float | None = None  # how long it may take to end by itself, once the error is printed [s]
    headline: str = ""  # of the failure: printed again if other lines follow
    # Whether the text, or nothing, is printed in place of the error; else below it. Torch's hook would put this rank's
    # number in front of every line of another one's traceback.
    replaces: bool = False


class _ForcedExit(NamedTuple):
    exit_code: int
    message: str  # to standard error, before what is registered for the exit runs
    unless_caught: bool  # a program that has caught the failure ends as it would have without


class ExitPlan:
    """How this process is to end, as far as that is settled."""

    def __init__(self) -> None:
        self.expected_exit_code: int | None = None  # on which all ranks have agreed, so that it is no failure
        # The file of a failure for the process that has started this rank, which then prints the report.
        self.note: Path | None = None
        # Whether the failure was returned to the process this one works for; then nothing ends this one by force.
        self.failure_returned = False
        # Called before an end by force, to end the ranks that this one has started.
        self.on_force: Callable[[], None] | None = None
        # How this process is to end because of a failure, once Python begins to exit, without waiting for other ranks.
        self.forced_exit: _ForcedExit | None = None
        self._last_said = ""  # the report that is to be the last of the run's output
        self.lines_followed = False  # whether other lines of the run were printed after it

    def __reduce__(self) -> str:
        return "exit_plan"  # that of the process that unpickles it: a sweep sends objects that refer to it to workers

    @property
    def ends_with_error(self) -> bool:
        """Whether this process is about to end because of an exception that nobody caught."""
        # Set by Python before it prints the exception; a SystemExit leaves no trace.
        return hasattr(sys, "last_value")

    def force_exit_at_shutdown(self, exit_code: int, text: str = "", *, unless_caught: bool = False) -> None:
        """Have this process, once Python begins to exit, end without the destructors that wait for dead peers."""
        if self.forced_exit is None:
            self.forced_exit = _ForcedExit(exit_code, text, unless_caught)
            atexit.register(self._leave)

    def cancel_forced_exit(self) -> None:
        """Take :meth:`force_exit_at_shutdown` back: the program has caught the failure and goes on."""
        self._set_last_said("")
        self.forced_exit = None
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        # Do not import Lightning for this: a process that has not imported it has no process group either.
        if "lightning_lockstep._lightning" in sys.modules:
            from lightning_lockstep._lightning import _destroy_dist_connection

            atexit.unregister(_destroy_dist_connection)
        forced = self.forced_exit
        if forced is None or (forced.unless_caught and not self.ends_with_error):
            self.cancel_forced_exit()
            return

        def end_at_once(*_: object) -> None:
            # It takes no lock and writes nothing, because what it interrupts may hold any lock.
            if self.on_force is not None:
                self.on_force()
            os._exit(forced.exit_code)

        # end_now() calls the functions of atexit that were registered before this one; they may wait for long.
        with on_ctrl_c(end_at_once):
            self.say_last(forced.message)
            end_now(forced.exit_code, by_force=False)

    # -- the last line --

    def say_last(self, text: str) -> None:
        """Print the report of a failure to standard error, once; its first line comes again if others follow it."""
        if text and text != self._last_said:
            say(text)
            self._set_last_said(text)

    def repeat_headline(self) -> None:
        """Print the failure's headline and file once more if other lines have followed its report."""
        if self._last_said and self.lines_followed:
            self.lines_followed = False
            lines = [line for line in self._last_said.splitlines() if line]
            say("\n" + "\n".join([lines[0], *[line for line in lines[-1:] if line.startswith(SAVED)]]))

    def _set_last_said(self, text: str) -> None:
        self._last_said, self.lines_followed = text, False

    # -- an exception that nobody catches --

    def install_excepthook(self) -> None:
        """Install the hook that prints uncaught exceptions; again if a library has set its own hook since."""
        # A hook of the program or of another library (but torch's) goes on to print what we do not print ourselves.
        usual = sys.excepthook
        if getattr(usual, "__lockstep__", False):
            return

        def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
            report = _nearest_report(value)
            try:
                self._show(usual, kind, value, trace)
            finally:
                # A thread that is no daemon, or a blocking function of :mod:`atexit`, could hold it forever.
                if report.deadline is not None:
                    clock.after(report.deadline, end_now, report.exit_code or 1, _LATE)

        hook.__lockstep__ = True  # type: ignore[attr-defined]
        sys.excepthook = hook

    def _show(self, usual: Any, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        own = exit_report_of(value)
        if own.replaces:
            if own.exit_code is not None and own.deadline is None:
                self.force_exit_at_shutdown(own.exit_code)
            self.say_last(own.text)
            return
        below = _report_below(value)
        if _is_standard(usual) and not issubclass(kind, KeyboardInterrupt):
            say(_formatted(value, below.text))
        else:
            usual(kind, value, trace)
            if below.text:
                say(below.text)
        headline = below.headline or f"lightning-lockstep: this rank failed: {kind.__name__}: {value}"
        self._set_last_said(f"{headline}\n{below.text}")


exit_plan = ExitPlan()


def end_now(exit_code: int, message: str | Callable[[], str] = "", *, by_force: bool = True) -> NoReturn:
    """End this process, from any thread; ``message``, or what it returns, is printed last."""
    # Unless by force, functions of atexit (log handlers, trackers) run before. Python's own exit loses the exit code.
    if not by_force:
        flush_everything()
        atexit._run_exitfuncs()
    elif exit_plan.on_force is not None:
        exit_plan.on_force()
    last = threading.Thread(target=_print_last, args=(message,), name="lockstep-last", daemon=True)
    try:
        last.start()
    except RuntimeError:  # Python is exiting and starts no thread any more
        _print_last(message)
    else:
        last.join(_LAST_WRITES)  # no longer: perhaps nobody reads the stream
    os._exit(exit_code)


def _print_last(message: str | Callable[[], str]) -> None:
    text = message if isinstance(message, str) else message()
    flush_everything()
    exit_plan.say_last(text)
    exit_plan.repeat_headline()


# -- What is printed of an error --

# An error carries its report with it: exceptions cannot be referred to weakly, and a table of them would keep those
# alive that the program has caught, with their tracebacks and the model.
_ATTRIBUTE = "__lockstep_exit_report__"


def exit_report_of(error: BaseException) -> ExitReport:
    return getattr(error, _ATTRIBUTE, None) or ExitReport()


def set_exit_report(error: BaseException, report: ExitReport) -> None:
    exit_plan.install_excepthook()
    setattr(error, _ATTRIBUTE, report)


def error_to_bytes(error: BaseException) -> bytes:
    """Return ``error`` for another process that this one works for, which then prints what this one would."""
    report = replace(exit_report_of(error), deadline=None)
    if not report.replaces:
        report = ExitReport(_formatted(error, _report_below(error).text), replaces=True)
    try:
        sent = pickle.dumps((error, report))
        pickle.loads(sent)
    except Exception:  # whatever the constructor of a user's class makes of its pickle
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), report))
    return sent


def error_from_bytes(sent: bytes) -> BaseException:
    error, report = pickle.loads(sent)
    set_exit_report(error, report)
    assert isinstance(error, BaseException)
    return error


def _nearest_report(error: BaseException | None) -> ExitReport:
    """Return the report of an error, or of one that it followed: saving after a failure may fail too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, _ATTRIBUTE):
            return exit_report_of(error)
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ExitReport()


def _report_below(error: BaseException) -> ExitReport:
    """Return the report whose text is printed below an error: its own, or that of one that it followed."""
    near = _nearest_report(error)
    return ExitReport() if near.replaces else near


def _formatted(error: BaseException, below: str) -> str:
    """Return an error as it is printed, with a text below it: after an empty line, unless that names a file."""
    apart = below if not below or below.startswith((SAVED, "\n")) else f"\n{below}"
    return "\n".join(filter(None, [format_error(error).rstrip("\n"), apart]))


def _is_standard(hook: Any) -> bool:
    """Return whether a hook is Python's own or torch's, which puts the rank before each line."""
    return hook is sys.__excepthook__ or str(getattr(hook, "__module__", "")).startswith("torch.")
