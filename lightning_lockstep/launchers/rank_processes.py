"""What ties ranks to the process that has started them: it sees them end, signals reach them, they end with it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from lightning_lockstep.distributed.failure.process_exit import end_now, exit_plan

#: Signals that ask the ranks to end.
ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = signal.SIGUSR1, signal.SIGUSR2
# `timeout` and schedulers send a signal to a process and at the same time to its group [s].
_SAME = 1.0
# How often a rank looks whether the process that has started it lives [s].
_LOOK_EVERY = 0.25
# How long the operating system may take to end a killed process [s].
_KILLED = 5.0


class RankProcesses:
    """Processes that this one has started, each a rank that runs the same program again."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # by the number of the rank
        self.stopping = False  # True: a rank that ends badly from then on was stopped
        exit_plan.on_force = self.kill  # they end before a forced end of this process

    def start(
        self,
        variables: Mapping[int, Mapping[str, str]],  # of each rank alone, by its number
        command: tuple[list[str], str | None, Mapping[str, str]],  # see `rank_command`
        environ: Mapping[str, str],
        **options: Any,
    ) -> None:
        """Start ranks on this node; ``options`` are those of ``Popen``."""
        program, folder, of_program = command
        try:
            for number, own in variables.items():
                whole = {**environ, **of_program, **own}
                self.processes[number] = subprocess.Popen(program, env=whole, cwd=folder, **options)
        except OSError:  # memory or processes have run out
            self.kill()
            raise

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, or for this long."""
        deadline = time.monotonic() + seconds
        for process in list(self.processes.values()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def send(self, number: int) -> None:
        """Send a signal to all that still run."""
        for process in list(self.processes.values()):  # other threads may add or remove some
            process.send_signal(number)  # nothing for one that has ended

    def kill(self) -> None:
        """End all that still run, at once."""
        self.stopping = True
        self.send(signal.SIGKILL)
        self.wait(_KILLED)


class SignalForwarding:
    """While it is entered, signals that would end this process go to its ranks, and this process goes on."""

    # SIGTERM and SIGHUP ask the ranks to end; when one of these comes again, they are ended by force. A signal
    # that this process ignores, as under ``nohup``, is left alone.

    def __init__(
        self,
        send: Callable[[int], None],
        force: Callable[[], None],
        asks: tuple[signal.Signals, ...] = ASKS_TO_END,
    ) -> None:
        self._send, self._force, self._asks = send, force, asks
        self.asked: signal.Signals | None = None  # the first that asked the ranks to end
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (*self._asks, *_PASSED_ON):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler in C
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if number not in self._asks:
            self._send(number)
        elif self.asked is None:
            self.asked, self._since = signal.Signals(number), time.monotonic()
            self._send(number)
        elif time.monotonic() - self._since > _SAME:
            self._force()


def end_with_parent(parent_lives: Callable[[], bool], unless: Callable[[], bool] = lambda: False) -> None:
    """End this rank when the process that has started it has ended, ``unless`` it is dealt with otherwise."""

    def watch() -> None:
        while parent_lives():
            time.sleep(_LOOK_EVERY)
        if not unless():
            text = "the process that started this rank has exited; this rank exits too."
            end_now(1, f"\nlightning-lockstep: {text}\n")

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()
