"""The ranks that a process has started: waited for, told to end, killed, and how each of them ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from lightning_lockstep._text import ranks_in_words, say
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.errors import LaunchError

# -- Passes signals on to the ranks from the process that has started them and is no rank itself --

#: Signals that ask the ranks to end.
ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (*ASKS_TO_END, signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and schedulers send a signal to a process and at the same time to its group [s].
_SAME = 1.0
# Ranks that were asked to end may have a large checkpoint to write [s].
_LIMIT = 600.0


class SignalForwarding:
    """While it is entered, signals that would end this process go to its ranks, and this process goes on."""

    # SIGTERM and SIGHUP ask the ranks to end. When one of these comes again, or the ranks have not ended
    # after 10 minutes, they are ended by force. A signal that this process ignores, as under ``nohup``, is
    # left alone.

    def __init__(self, send: Callable[[int], None], force: Callable[[], None]) -> None:
        self._send, self._force = send, force
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
        if self.asked is not None and time.monotonic() - self._since > _LIMIT:
            self._force()

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number not in ASKS_TO_END:
            self._send(number)
        elif self.asked is None:
            self.asked, self._since = signal.Signals(number), time.monotonic()
            self._send(number)
        elif time.monotonic() - self._since > _SAME:
            self._force()


# -- Processes of ranks on this host, of multiprocessing or of the program that is run again --

_LOOK_EVERY = 0.1  # [s]; a system call for each process
_SETTLE = 0.5  # within this time after the first, another bad end may have been the cause [s]
_CTRL_C = 2.0  # how long ranks that a terminal's Ctrl-C has reached may take before they get it from here [s]
#: After how long the ranks are named that should have ended and have not [s].
SAY_AFTER = 30.0
_KILLED = 5.0  # how long the operating system may take to end a killed process [s]


@dataclass(frozen=True)
class BadEnd:
    """A rank that failed by itself, by its number among those started here."""

    rank: int
    pid: int
    returncode: int  # negative for a signal
    since: float  # when this was noticed, by the monotonic clock [s]


class RankProcesses:
    """The ranks of one launch."""

    def __init__(
        self,
        *,
        first: int = 0,  # number of the first one
        is_orderly: Callable[[int], bool] = lambda code: code == 0,
        between: Callable[[], None] = lambda: None,  # called again and again while they are waited for
    ) -> None:
        self.first, self._is_orderly, self._between = first, is_orderly, between
        self.processes: list[Any] = []
        self.bad: list[BadEnd] = []  # in the order in which they were noticed
        self._ended: set[int] = set()
        self._stopping = False  # who ends badly from then on does so because of that

    def start(self, start: Callable[[int], Any], number: int) -> None:
        """Start as many, each by its number."""
        try:
            for rank in range(self.first, self.first + number):
                self.processes.append(start(rank))
        except OSError as error:
            self.kill()
            raise LaunchError(
                f"Rank {self.first + len(self.processes)} of {self.first + number} could not be started: {error}."
                " Expected enough memory and processes for all ranks of this host. Give a smaller number of ranks."
            ) from error

    def running(self) -> list[int]:
        """Return the numbers of those that still run."""
        return [rank for rank, process in self._numbered() if exit_code(process) is None]

    def look(self) -> None:
        """Take note of those that have ended."""
        for rank, process in self._numbered():
            code = exit_code(process)
            if code is None or rank in self._ended:
                continue
            self._ended.add(rank)
            if not self._stopping and not self._is_orderly(code):
                self.bad.append(BadEnd(rank, process.pid, code, time.monotonic()))

    def wait(self, seconds: float = float("inf")) -> None:
        """Wait until all have ended, or for so long."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
            self.look()
            self._between()

    def say_who_runs(self) -> None:
        """Say which ranks are waited for, as nothing else is to be seen of it."""
        if busy := self.running():
            pids = ", ".join(str(process.pid) for rank, process in self._numbered() if rank in busy)
            say(
                f"lightning-lockstep: waiting for {ranks_in_words(busy)} of this host to end (process {pids}): a thread"
                " of the program may still run there. Ctrl-C terminates them."
            )

    def wait_or_stop(self, grace_period: float) -> list[BadEnd]:
        """Wait for all, pass signals on to them, and end the others when one has failed; return the first that did."""
        with SignalForwarding(self.send, partial(self.send, signal.SIGKILL)) as signals:
            while self.running():
                self.wait(_LOOK_EVERY)
                signals.check()
                if self.bad:
                    self._stop((grace_period / 2, signal.SIGTERM), (grace_period / 2, signal.SIGKILL))
        self.look()  # at those that have ended since
        self._between()
        # One of them may be the cause of all.
        return [end for end in self.bad if end.since - self.bad[0].since < _SETTLE]

    def interrupt(self, grace_period: float) -> None:
        """End all after an interrupt, which may have reached them too or not; what they say is still shown."""
        try:
            self._stop((_CTRL_C, signal.SIGINT), (grace_period, signal.SIGKILL))
        finally:  # also when the user interrupts once more
            self.kill()

    def send(self, number: int) -> None:
        """Send a signal to all that still run."""
        for _, process in self._numbered():
            if exit_code(process) is None:
                with suppress(ProcessLookupError):
                    process.kill() if number == signal.SIGKILL else os.kill(process.pid, number)

    def kill(self) -> None:
        """End all that still run, at once."""
        self._stopping = True
        self.send(signal.SIGKILL)
        self.wait(_KILLED)

    def _stop(self, *steps: tuple[float, int]) -> None:
        """Wait for so long, then send the signal, one step after the other."""
        for patience, number in steps:
            self.wait(patience)
            self._stopping = True
            self.send(number)
        self.wait(_KILLED)

    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.processes, self.first))


def exit_code(process: Any) -> int | None:
    """Return the exit code of a process of multiprocessing or subprocess, or ``None`` while it runs."""
    code: int | None = process.exitcode if isinstance(process, BaseProcess) else process.poll()
    return code


def end_with_parent(parent_lives: Callable[[], bool], until: Callable[[], bool] = lambda: False) -> None:
    """End this rank when the process that has started it has ended, ``until`` others watch that."""

    def watch() -> None:
        while not until():
            if not parent_lives():
                text = "the process that started this rank has exited; this rank exits too."
                end_now(1, f"\nlightning-lockstep: {text}\n")
            time.sleep(1.0)

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()
