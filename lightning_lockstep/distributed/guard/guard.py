"""The guard of a run: its parts, and how its errors reach the main thread."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from lightning_lockstep._system import write_report
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import is_broken_collective
from lightning_lockstep.distributed.guard.rank_state import MainThreadErrors, RankState, position_of_error
from lightning_lockstep.distributed.guard.records import FlightRecorder, GroupRecorders
from lightning_lockstep.distributed.guard.verdict import Verdict
from lightning_lockstep.distributed.guard.verify import CallVerifier, MessageRecorder
from lightning_lockstep.distributed.guard.watch import CollectiveWatch, GuardSettings
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import CollectiveError, ConfigurationError, LockstepError

# -- A last word before C++ ends this process --
# gloo throws in a thread of its own when a peer sends more than was expected; nobody can catch that, and
# the C++ library aborts the process. It calls a function before, which may be set.

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None
_kept: list[object] = []  # what C++ holds a pointer to must live


def before_terminate(function: Callable[[], None] | None) -> bool:
    """Have ``function`` called, in whichever thread that is, before C++ aborts this process over an error."""
    # It may wait, and may end the process; ``None``: nothing is called any more. Returns whether that is
    # possible here.
    global _function
    _function = function
    return bool(_kept) or (function is not None and _install())


def _install() -> bool:
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET)
    except (OSError, AttributeError):  # another C++ library
        return False
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    process = os.getpid()

    def handler() -> None:
        if _function is not None and os.getpid() == process:
            with suppress(Exception):
                _function()
        _Handler(before)()

    pointer = _Handler(handler)
    before = set_terminate(ctypes.cast(pointer, ctypes.c_void_p))
    _kept.append(pointer)
    return True


# -- The guard of a run: which of its parts are at work, and how an error of theirs reaches the main thread

#: Name of the file with what each rank has said of itself.
REPORT = "guard-report.json"
# How long the other ranks may take to say where they are when a collective has failed here [s].
_EXPLAIN_FOR = 15.0


class CollectiveGuard:
    """Watches the collectives of this rank, and brings errors of the watch to the main thread."""

    def __init__(
        self, channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
    ) -> None:
        self.settings, self._propagation = settings, propagation
        self.folder: Callable[[], Path | None] = lambda: None  # for the report; None: none is written
        self._verifier = CallVerifier() if settings.guard == "verify" else None
        self._messages = self._verifier or MessageRecorder()
        self._errors = MainThreadErrors(_deals_with_errors)
        self.watch = CollectiveWatch(
            channel,
            [self._verifier or FlightRecorder(), GroupRecorders()],
            settings,
            messages=self._messages.messages,
            conclude=self._conclude,
            report=self._report,
            has_failed=lambda: propagation.failed,
            has_raised=propagation.has_raised,
            store_port=int(os.environ.get("MASTER_PORT") or 0),
        )

    @property
    def error(self) -> CollectiveError | None:
        """The error that all ranks raise, once there is one; its process groups cannot be used any more."""
        return self.watch.error

    def start(self) -> None:
        """Begin to watch, and to verify if that is wanted; on all ranks between the same two collectives."""
        self._messages.start()
        self.follow()
        self.watch.start()
        self._propagation.explain = self.explain
        before_terminate(self._before_terminate)

    def follow(self) -> None:
        """Take the calling thread for the one that trains, which is watched and gets the errors."""
        self._errors.install()
        self.watch.follow(threading.current_thread())

    def stop(self) -> None:
        """Stop watching and verifying; on all ranks between the same two collectives."""
        self._messages.stop()
        self.watch.stop()
        self._errors.remove()
        before_terminate(None)
        if self._propagation.explain == self.explain:
            self._propagation.explain = None

    def explain(self, error: BaseException) -> BaseException | None:
        """Return the error that all ranks raise in place of one raised here, if there is a reason."""
        # In the main thread; where a collective has failed, the others are asked, for some seconds at most.
        self._errors.take()
        if self.error is None and is_broken_collective(error) and not isinstance(error, LockstepError):
            self.watch.explain(
                str(error),
                _EXPLAIN_FOR,
                at=position_of_error(error),
                unless=lambda: self._propagation.failed,
            )
        return None if isinstance(error, LockstepError) else self.error

    def _conclude(self, error: CollectiveError) -> None:
        self._errors.raise_soon(error)
        threading.Thread(
            target=self._end_if_stuck, args=(error,), name="lockstep-guard-end", daemon=True
        ).start()

    def _end_if_stuck(self, error: CollectiveError) -> None:
        """End this process if the main thread never gets the error, as in a call of C that does not return."""
        time.sleep(self._propagation.grace_period)
        if self._errors.take() is not None:
            self._end(error)

    def _before_terminate(self) -> None:
        """C++ is about to abort this process: let all ranks know why, if the records say so."""
        error = self.watch.explain("a thread of the backend ended the process", _EXPLAIN_FOR)
        if error is not None:
            self._end(error)

    def _end(self, error: CollectiveError) -> None:
        prints = self._propagation.prints_report and not self._propagation.parent_prints
        text = f"\nlightning-lockstep: {type(error).__name__}: {error}\n"
        # The other ranks raise it now; those that print nothing themselves ask this one first.
        time.sleep(min(2.5, self._propagation.grace_period / 4))
        if self._propagation.on_force is not None:
            self._propagation.on_force()
        end_now(1, text if prints else "")

    def _report(self, verdict: Verdict, states: Mapping[int, RankState]) -> None:
        folder = self.folder()
        if folder is None:
            return
        content = {
            "error": type(verdict.error()).__name__,
            "text": verdict.text,
            "ranks": [state.to_data() for state in states.values()],
        }
        write_report(folder / REPORT, json.dumps(content, indent=1))


def _deals_with_errors(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return bool(name.startswith("lightning_lockstep.distributed.failure"))


class _GuardOfChannel:
    """The guard of one side channel, which its fits share, and how many fits have asked for it."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel, self._fits = channel, 0
        self.guard: CollectiveGuard | None = None

    def check_alike(self, settings: GuardSettings) -> None:
        """Raise unless all ranks have the same guard: one that compares would wait for one that does not."""
        self._fits += 1
        first = self._channel.claim(f"guard/{self._fits}", settings.guard)
        if first != settings.guard:
            raise ConfigurationError(
                f"guard={settings.guard!r} on rank {self._channel.rank}, and {first!r} on another rank: expected the"
                " same on all. Give every rank the same strategy, and the same LOCKSTEP_DEBUG in its environment."
            )


def guard_on(
    channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
) -> CollectiveGuard | None:
    """Return the guard of a run, at work, or ``None``; for every rank, in the thread that trains."""
    kept = channel.get_or_create(_GuardOfChannel)
    kept.check_alike(settings)
    if kept.guard is not None and kept.guard.settings == settings:
        kept.guard.follow()
        return kept.guard
    if kept.guard is not None:
        kept.guard.stop()
        kept.guard = None
    if settings.guard == "off" or channel.world_size == 1:
        return None
    kept.guard = CollectiveGuard(channel, propagation, settings)
    kept.guard.start()
    # A rank that has come to its end answers no questions: the next one collects, and names it.
    channel.before_close(kept.guard.stop)
    return kept.guard
