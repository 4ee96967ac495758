"""What is printed of an exception that ends this process because nobody caught it.

Nothing else in the package replaces ``sys.excepthook``. An exception says itself, by attributes that these functions
set, what is printed instead of it or after it; all others are printed as usual.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_lockstep._text import say
from lightning_lockstep.distributed.failure.process_exit import (
    end_now,
    leave_without_waiting,
    say_last,
    was_last,
)
from lightning_lockstep.errors import RankFailedError


def fold_tracebacks() -> None:
    """Have Python print exceptions that nobody caught as :func:`.folded.format_error` formats them."""
    # A hook that the program or another library has set, but for torch's, stays.
    _install_hook()


@contextmanager
def keep_hook() -> Iterator[None]:
    """In this context another library may set a hook that prints by itself; one of ours or torch's is put back."""
    before = sys.excepthook
    try:
        yield
    finally:
        if before is not sys.__excepthook__:
            sys.excepthook = before


def keep_quiet(error: BaseException) -> None:
    """Keep Python from printing ``error`` when it ends this process: another rank prints the report."""
    print_instead(error, "")


def show_plainly(error: RankFailedError, exit_code: int | None = None) -> None:
    """Have Python print the report alone when ``error`` ends this process, without this rank's own stack."""
    # Torch's hook would put this rank's number in front of every line of the other one's traceback. Without
    # ``exit_code`` the process ends with Python's own, 1.
    print_instead(error, f"\nlightning-lockstep: {error}\n", exit_code)


def print_also(error: BaseException, text: str) -> None:
    """Have Python print ``text`` after ``error`` when it ends this process: what another rank raised."""
    error.__lockstep_more__ = text  # type: ignore[attr-defined]
    _install_hook()


def print_last(error: BaseException, headline: str) -> None:
    """Have Python print ``headline``, which names rank, place and error, below the traceback of ``error``."""
    error.__lockstep_headline__ = headline  # type: ignore[attr-defined]
    _install_hook()


def error_to_bytes(error: BaseException) -> bytes:
    """Return ``error`` for another process that this one works for, which then prints what this one would."""
    text, exit_code = getattr(error, "__lockstep_text__", (_usual_text(error), None))
    try:
        sent = pickle.dumps((error, text, exit_code))
        pickle.loads(sent)
    except Exception:  # whatever the constructor of a user's class makes of its pickle
        replaced = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((replaced, text, exit_code))
    return sent


def error_from_bytes(sent: bytes) -> BaseException:
    """Return the error of which a process that works for this one has made bytes."""
    error, text, exit_code = pickle.loads(sent)
    print_instead(error, text, exit_code)
    assert isinstance(error, BaseException)
    return error


def _formatted(error: BaseException) -> str:
    # Not above: it imports torch and Lightning, which a program that looks at its command line does without.
    from lightning_lockstep.distributed.failure.record import format_error

    return format_error(error)


def _usual_text(error: BaseException) -> str:
    parts = (_formatted(error), _headline(error), getattr(error, "__lockstep_more__", ""))
    return "\n\n".join(part.strip("\n") for part in parts if part)


def end_within(
    error: BaseException,
    seconds: float,  # how long it may take to end by itself [s]
    exit_code: int,
    *,
    on_force: Callable[[], None] | None = None,  # called before it is ended
) -> None:
    """If nobody catches ``error``, end this process by force a while after Python has printed it."""
    # A thread that is no daemon, or a blocking function of :mod:`atexit`, could hold it for ever.
    global _on_force
    _on_force = on_force  # not kept by the error, which may be pickled
    error.__lockstep_end__ = seconds, exit_code  # type: ignore[attr-defined]
    _install_hook()


_on_force: Callable[[], None] | None = None


def _start_countdown(seconds: float, exit_code: int) -> None:
    try:
        threading.Thread(
            target=_count_down, args=(seconds, exit_code), name="lockstep-end", daemon=True
        ).start()
    except RuntimeError:  # no memory is left for a thread, and so nothing that could end this process later
        if _on_force is not None:
            _on_force()
        end_now(exit_code, "")


def _count_down(seconds: float, exit_code: int) -> None:
    time.sleep(seconds)
    if _on_force is not None:
        _on_force()
    end_now(
        exit_code,
        "\nlightning-lockstep: ended by force: its exit handlers and threads did not finish in time.\n",
    )


def on_uncaught(function: Callable[[], None]) -> None:
    """Have ``function`` called after Python has printed an exception that nobody caught, perhaps twice."""
    # Not for one whose printing :func:`keep_quiet` or :func:`show_plainly` has replaced.
    _after_uncaught.append(function)
    _install_hook()


_after_uncaught: list[Callable[[], None]] = []


def print_instead(error: BaseException, text: str, exit_code: int | None = None) -> None:
    """Have Python print ``text`` instead of ``error`` when it ends this process."""
    error.__lockstep_text__ = text, exit_code  # type: ignore[attr-defined]
    _install_hook()


def _install_hook() -> None:
    """Put our hook in front, again where another library has put its own there meanwhile."""
    usual = sys.excepthook
    if getattr(usual, "__lockstep__", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        try:
            show(kind, value, trace)
        finally:
            if (limit := _said_of(value, "__lockstep_end__")) is not None:
                _start_countdown(*limit)
            from lightning_lockstep.distributed.failure.record import forget_note_of_another

            forget_note_of_another(_said_of(value, "__lockstep_noted__"))

    def show(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if (instead := getattr(value, "__lockstep_text__", None)) is not None:
            text, exit_code = instead
            if exit_code is not None:
                leave_without_waiting(exit_code)
            say_last(text)
            return
        headline = _headline(value)
        try:
            if _is_standard(usual) and not issubclass(kind, KeyboardInterrupt):
                say(_formatted(value).rstrip("\n") + (f"\n\n{headline}" if headline else ""))
            else:
                usual(kind, value, trace)
                if headline:
                    say(headline)
            was_last(headline or f"lightning-lockstep: this rank failed: {kind.__name__}: {value}")
            say_last(getattr(value, "__lockstep_more__", ""))
        finally:
            for function in _after_uncaught:
                function()

    hook.__lockstep__ = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _headline(error: BaseException) -> str:
    return str(_said_of(error, "__lockstep_headline__") or "")


def _said_of(error: BaseException | None, name: str) -> Any:
    """Return an attribute of an error or of the one that it followed, as where saving after it fails too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (said := getattr(error, name, None)) is not None:
            return said
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_standard(hook: Any) -> bool:
    """Return whether a hook is Python's own or torch's, which puts the rank before each line."""
    return hook is sys.__excepthook__ or str(getattr(hook, "__module__", "")).startswith("torch.")
