"""How a process ends: what runs and is written out before, what is printed last, and what is not waited for.

Nothing else in a run calls ``os._exit``, registers with :mod:`atexit` (processes of the doctor do) or replaces
``sys.excepthook``. What is settled of the end of this process is in one object, :data:`outcome`.

============================================ ==================================================================
an orderly end                               functions given to :func:`at_exit` run
:meth:`Outcome.force_exit_at_shutdown`       as above once Python exits, but nothing that waits for a dead peer;
                                             where the program has caught the failure, with its own exit code
:func:`end_after_exit_functions`             the same now, without going back to the program
:func:`end_now`                              by force, from any thread: only what :func:`on_flush` holds is written
an exception that nobody catches             what its :class:`ErrorOutcome` says is printed, and the time it names
                                             begins, after which the process is ended by force
============================================ ==================================================================
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lightning_lockstep._text import SAVED, say
from lightning_lockstep.errors import RankFailedError

_log = logging.getLogger(__name__)
# How long what is held back may take to be written before an end by force [s].
_LAST_WRITES = 10.0

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


# ------------------------------------------------------------------ how this process ends


class Outcome:
    """How this process ends, as far as that is settled."""

    def __init__(self) -> None:
        self.expected_exit_code: int | None = None  # on which all ranks have agreed, so that it is no failure
        # To the process that this one works for: nothing ends this one by force.
        self.failure_returned = False
        # Of an exit that waits for nobody, once Python begins to exit.
        self.forced_exit_code: int | None = None
        # A note on how this process ends that stands for one error: another one that ends it takes the note away.
        self.note_of_error: tuple[ErrorOutcome, Path] | None = None
        self._forced_exit: Callable[[], None] | None = None
        self._reports_in_progress: list[object] = []
        # The report that is to be the last of the run's output, and whether anything was printed since.
        self._last_said, self._printed_since = "", False
        self._on_force: Callable[[], None] | None = None

    @property
    def forced_exit_pending(self) -> bool:
        """Whether this process is about to end because of a failure."""
        return self._forced_exit is not None

    @property
    def ends_with_error(self) -> bool:
        """Whether this process is about to end because of an exception that nobody caught."""
        # Set by Python before it prints the exception; a SystemExit leaves no trace.
        return hasattr(sys, "last_value")

    def force_exit_at_shutdown(
        self,
        exit_code: int,
        message: str = "",  # to standard error, before what is registered for the exit runs
        *,
        unless_caught: bool = False,  # a program that has caught the failure ends as it would have without
    ) -> None:
        """Have this process, once Python begins to exit, end without the destructors that wait for dead peers."""
        if self._forced_exit is not None:
            return

        def leave() -> None:
            atexit.unregister(leave)
            # Not imported here: what has not imported Lightning has no process group either.
            if "lightning_lockstep._lightning" in sys.modules:
                from lightning_lockstep._lightning import _destroy_dist_connection

                atexit.unregister(_destroy_dist_connection)
            if unless_caught and not self.ends_with_error:
                self.cancel_forced_exit()
                return
            self.say_last(message)
            end_after_exit_functions(exit_code)  # of these functions, those registered before this one

        self._forced_exit, self.forced_exit_code = leave, exit_code
        at_exit(leave)

    def cancel_forced_exit(self) -> None:
        """Take :meth:`force_exit_at_shutdown` back: the program has caught the failure and goes on."""
        self._was_last("")
        if self._forced_exit is not None:
            atexit.unregister(self._forced_exit)
            self._forced_exit = self.forced_exit_code = None

    # -- the last line

    def say_last(self, text: str) -> None:
        """Print the report of a failure to standard error, once; its first line comes again if others follow it."""
        if text and text != self._last_said:
            say(text)
            self._was_last(text)

    def printed_a_line(self) -> None:
        """Note that a line of the run was printed, perhaps after the report of its failure."""
        self._printed_since = True

    def repeat_headline(self) -> None:
        """Let the last lines name the failure and its file where lines that were under way came after its report."""
        if self._last_said and self._printed_since:
            self._printed_since = False
            lines = [line for line in self._last_said.splitlines() if line]
            say("\n" + "\n".join([lines[0], *[line for line in lines[-1:] if line.startswith(SAVED)]]))

    def _was_last(self, text: str) -> None:
        self._last_said, self._printed_since = text, False

    # -- reports that hold a forced end

    @contextmanager
    def writing_report(self) -> Iterator[None]:
        """Have a forced end that another rank's failure brings about wait for the body, which writes a report."""
        report = object()
        self._reports_in_progress.append(report)
        try:
            yield
        finally:
            self._reports_in_progress.remove(report)

    def wait_for_reports(self, timeout: float) -> None:
        """Wait, up to ``timeout`` [s], until nothing writes a report in this process."""
        deadline = time.monotonic() + timeout
        while self._reports_in_progress and time.monotonic() < deadline:
            time.sleep(0.05)

    # -- an exception that nobody catches

    def install_excepthook(self) -> None:
        """Have Python print exceptions as they are to be printed, again where a library has set its own hook."""
        # A hook that the program or another library has set, but for torch's, stays in charge of what has no outcome.
        usual = sys.excepthook
        if getattr(usual, "__lockstep__", False):
            return

        def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
            of_error = _nearest_outcome(value)
            try:
                self._show(usual, kind, value, trace)
            finally:
                if of_error is not None and of_error.deadline is not None:
                    self._start_countdown(*of_error.deadline)
                if self.note_of_error is not None and self.note_of_error[0] is not of_error:
                    with suppress(OSError):
                        self.note_of_error[1].unlink()

        hook.__lockstep__ = True  # type: ignore[attr-defined]
        sys.excepthook = hook

    def _show(self, usual: Any, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        own = getattr(value, _ATTRIBUTE, ErrorOutcome())
        if own.instead is not None:
            if own.exit_code is not None:
                self.force_exit_at_shutdown(own.exit_code)
            self.say_last(own.instead)
            return
        below = _nearest_outcome(value) or own
        if _is_standard(usual) and not issubclass(kind, KeyboardInterrupt):
            say(_formatted(value).rstrip("\n") + (f"\n\n{below.headline}" if below.headline else ""))
        else:
            usual(kind, value, trace)
            if below.headline:
                say(below.headline)
        self.say_last(own.after)
        if below.saved:
            say(below.saved)
        reminder = below.headline or own.reminder
        reminder = reminder or f"lightning-lockstep: this rank failed: {kind.__name__}: {value}"
        self._was_last(own.after or f"{reminder}\n{below.saved}")

    def end_within(
        self,
        error: BaseException,
        seconds: float,  # how long it may take to end by itself [s]
        exit_code: int,
        *,
        on_force: Callable[[], None] | None = None,  # called before it is ended
    ) -> None:
        """If nobody catches ``error``, end this process by force a while after Python has printed it."""
        # A thread that is no daemon, or a blocking function of :mod:`atexit`, could hold it forever.
        self._on_force = on_force  # not kept by the error, which may be pickled
        outcome_of(error).deadline = seconds, exit_code

    def _start_countdown(self, seconds: float, exit_code: int) -> None:
        late = "\nlightning-lockstep: ended by force: its exit handlers and threads did not finish in time.\n"
        timer = threading.Timer(seconds, self._end_by_force, (exit_code, late))
        timer.name, timer.daemon = "lockstep-end", True
        try:
            timer.start()
        except RuntimeError:
            # No memory is left for a thread, and so nothing that could end this process later.
            self._end_by_force(exit_code, "")

    def _end_by_force(self, exit_code: int, message: str) -> None:
        if self._on_force is not None:
            self._on_force()
        end_now(exit_code, message)


outcome = Outcome()


def end_now(exit_code: int, message: str | Callable[[], str] = "") -> NoReturn:
    """End this process by force, from any thread; ``message``, or what it returns, is printed last."""
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
    outcome.say_last(text)
    outcome.repeat_headline()


def end_after_exit_functions(exit_code: int) -> NoReturn:
    """End this process after what is registered for its exit (log handlers, experiment trackers) has run."""
    flush_everything()
    atexit._run_exitfuncs()
    flush_everything()
    outcome.repeat_headline()
    os._exit(exit_code)  # Python's own exit would not keep the code


# ------------------------------------------------------------------ what is printed of an error

# Exceptions of Python cannot be referred to weakly, and one that a program has caught must not be held: its traceback
# holds the model. So an error carries its outcome with it.
_ATTRIBUTE = "__lockstep_outcome__"


@dataclass
class ErrorOutcome:
    """What becomes of this process if nobody catches an error."""

    instead: str | None = None  # printed in place of it; "": nothing, another rank prints the report
    headline: str = ""  # printed below it: rank, place and error
    reminder: str = ""  # the same, printed only where other lines follow the error
    after: str = ""  # printed after it: what another rank has raised
    saved: str = ""  # printed last: the file in which it is kept
    exit_code: int | None = None  # where something else is printed; None: Python's own, 1
    deadline: tuple[float, int] | None = None  # seconds until the process is ended by force, with which code


def outcome_of(error: BaseException) -> ErrorOutcome:
    """Return what becomes of this process if nobody catches ``error``, to be settled."""
    outcome.install_excepthook()
    of_error: ErrorOutcome | None = getattr(error, _ATTRIBUTE, None)
    if of_error is None:
        of_error = ErrorOutcome()
        setattr(error, _ATTRIBUTE, of_error)
    return of_error


def print_instead(error: BaseException, text: str, exit_code: int | None = None) -> None:
    """Have Python print ``text`` instead of ``error`` when it ends this process."""
    of_error = outcome_of(error)
    of_error.instead, of_error.exit_code = text, exit_code


def keep_quiet(error: BaseException) -> None:
    """Keep Python from printing ``error`` when it ends this process: another rank prints the report."""
    print_instead(error, "")


def show_plainly(error: RankFailedError, exit_code: int | None = None) -> None:
    """Have Python print the report alone when ``error`` ends this process, without this rank's own stack."""
    # Torch's hook would put this rank's number in front of every line of the other one's traceback.
    print_instead(error, f"\nlightning-lockstep: {error}\n", exit_code)


def error_to_bytes(error: BaseException) -> bytes:
    """Return ``error`` for another process that this one works for, which then prints what this one would."""
    own: ErrorOutcome | None = getattr(error, _ATTRIBUTE, None)
    if own is None or own.instead is None:
        below = _nearest_outcome(error) or ErrorOutcome()
        parts = (_formatted(error), below.headline, own.after if own else "", below.saved)
        own = ErrorOutcome("\n\n".join(part.strip("\n") for part in parts if part))
    try:
        sent = pickle.dumps((error, own.instead, own.exit_code))
        pickle.loads(sent)
    except Exception:  # whatever the constructor of a user's class makes of its pickle
        replaced = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((replaced, own.instead, own.exit_code))
    return sent


def error_from_bytes(sent: bytes) -> BaseException:
    """Return the error of which a process that works for this one has made bytes."""
    error, text, exit_code = pickle.loads(sent)
    print_instead(error, text, exit_code)
    assert isinstance(error, BaseException)
    return error


def _nearest_outcome(error: BaseException | None) -> ErrorOutcome | None:
    """Return the outcome of an error, or of the one that it followed, as where saving after it fails too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (found := getattr(error, _ATTRIBUTE, None)) is not None:
            return found  # type: ignore[no-any-return]
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _formatted(error: BaseException) -> str:
    # Not above: it imports torch and Lightning, which a program that looks at its command line does without.
    from lightning_lockstep.distributed.failure.record import format_error

    return format_error(error)


def _is_standard(hook: Any) -> bool:
    """Return whether a hook is Python's own or torch's, which puts the rank before each line."""
    return hook is sys.__excepthook__ or str(getattr(hook, "__module__", "")).startswith("torch.")
