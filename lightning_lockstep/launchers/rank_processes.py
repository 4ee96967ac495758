"""Processes of ranks: waited for together, signals passed on to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from types import FrameType
from typing import Any

from lightning_lockstep._text import ranks_in_words, say
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.errors import LaunchError

# -- Passes signals on to the ranks from the process that has started them and is no rank itself --

_PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
#: Signals that ask the ranks to end.
ASKS_TO_END = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
# `timeout` and schedulers send a signal to a process and at the same time to its group [s].
_SAME = 1.0
# Ranks that were asked to end may have a large checkpoint to write [s].
_LIMIT = 600.0


class SignalForwarding:
    """While it is entered, signals that would end this process go to its ranks, and this process goes on."""

    # SIGTERM and SIGHUP ask the ranks to end. When one of these comes again, or the ranks have not ended
    # after 10 minutes, they are ended by force. A signal that this process ignores, as under ``nohup``, is
    # left alone.

    def __init__(
        self, send: Callable[[int], None], force: Callable[[], None], *, limit: float = _LIMIT
    ) -> None:
        self._send, self._force, self._limit = send, force, limit  # limit: [s]
        self.asked: signal.Signals | None = None  # the first that asked the ranks to end
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in _PASSED_ON:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler in C
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """End the ranks by force if they have not ended in time; to be called now and then."""
        if self.asked is not None and time.monotonic() - self._since > self._limit:
            self._force()

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number not in ASKS_TO_END:
            self._send(number)
        elif self.asked is None:
            self.asked, self._since = signal.Signals(number), time.monotonic()
            self._send(number)
        elif time.monotonic() - self._since > _SAME:
            self._force()


# -- Forked ranks of one launch: started together, waited for, and ended together when one ends badly --

_PERIOD = 0.1  # how often the parent does its work between two ends of ranks [s]
_SETTLE = 0.5  # within this time after the first, another bad end may have been the cause [s]
_CTRL_C = (
    2.0  # how long ranks that have got an interrupt by themselves may take before they get it from here [s]
)
_SAY_AFTER = 60.0  # after how long it is said which ranks still run when rank 0 has ended [s]


@dataclass(frozen=True)
class BadEnd:
    """A rank that failed by itself."""

    rank: int
    pid: int
    returncode: int  # negative for a signal
    since: float  # when this was noticed, by the monotonic clock [s]


class RankProcesses:
    """Runs one function in several processes that are copies of this one."""

    def __init__(
        self,
        run: Callable[[int], None],  # called in each with its number
        *,
        number: int,
        grace_period: float,  # for the others once one has failed; half of it until they are asked to end [s]
        between: Callable[[], None],  # called again and again while they run
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.processes = [context.Process(target=run, args=(rank,)) for rank in range(number)]
        self._grace_period, self._between = grace_period, between
        self._ended: dict[int, int] = {}
        self.bad: list[BadEnd] = []
        self._signalled = False

    def start(self) -> None:
        try:
            for process in self.processes:
                process.start()
        except OSError as error:
            started = sum(process.pid is not None for process in self.processes)
            self.kill()
            raise LaunchError(
                f"Rank {started} of {len(self.processes)} could not be started: {error}. Each rank begins as a copy of"
                " this process: expected enough memory and processes for all. Give a smaller number of ranks."
            ) from error

    def wait(self) -> list[BadEnd]:
        """Wait for all to end, and end the others when one has failed."""
        said = time.monotonic() + _SAY_AFTER
        while self.running():
            connection.wait([self.processes[rank].sentinel for rank in self.running()], timeout=_PERIOD)
            self._look()
            self._between()
            if self.bad:
                self._end_others()
            elif 0 not in self._ended:
                said = time.monotonic() + _SAY_AFTER
            elif time.monotonic() > said:
                said = float("inf")
                say(
                    f"lightning-lockstep: rank 0 has ended; waiting for {ranks_in_words(self.running())}."
                    " Interrupt to end the wait and terminate what still runs."
                )
        self._look()  # at those that have ended since
        self._between()
        # One of them may be the cause of all.
        return [end for end in self.bad if end.since - self.bad[0].since < _SETTLE]

    def running(self) -> list[int]:
        """Return the numbers of those that have been started and still run."""
        return [rank for rank, process in enumerate(self.processes) if process.pid and process.is_alive()]

    def has_ended(self, rank: int) -> bool:
        return self.processes[rank].exitcode is not None

    def interrupt(self) -> None:
        """End all after an interrupt, which may have reached them too or not; what they say is still shown."""
        try:
            for patience, number in ((_CTRL_C, signal.SIGINT), (self._grace_period, signal.SIGKILL)):
                self._wait_at_most(patience)
                self._send(number)
        finally:  # also when the user interrupts once more
            self.kill()

    def kill(self) -> None:
        """End all that still run, at once."""
        self._send(signal.SIGKILL)
        for process in self.processes:
            if process.pid:
                process.join()

    def _look(self) -> None:
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            if code is None or rank in self._ended:
                continue
            self._ended[rank] = code
            if code != 0 and not self._signalled:
                self.bad.append(BadEnd(rank, process.pid or 0, code, time.monotonic()))

    def _end_others(self) -> None:
        for patience, number in (
            (self._grace_period / 2, signal.SIGTERM),
            (self._grace_period / 2, signal.SIGKILL),
        ):
            self._wait_at_most(patience)
            self._send(number)
        self._wait_at_most(self._grace_period)

    def _wait_at_most(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            connection.wait([self.processes[rank].sentinel for rank in self.running()], timeout=_PERIOD)
            self._look()
            self._between()

    def _send(self, number: int) -> None:
        self._signalled = True  # who ends badly from now on does so because of that
        for rank in self.running():
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, number)


def end_with_parent() -> None:
    """End this rank when the process that has started it has ended; that waits for its ranks otherwise."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        end_now(
            1, "\nlightning-lockstep: the process that started the ranks has exited; this rank exits too.\n"
        )

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()
