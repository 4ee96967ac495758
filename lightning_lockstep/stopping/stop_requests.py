"""What asks for a stop: a breakpoint, a file, a signal, a time limit."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.stop_agreement import (
    StepAgreement,
    StopDecision,
    stop_agreement,
)
from lightning_lockstep.distributed.process_group import current_group

# -- The two functions with which user code asks all ranks to leave, and finds out that they do --

_log = logging.getLogger(__name__)

_process = os.getpid()
_active: StepAgreement | None = None
_early_requests: list[str] = []
_lock = threading.RLock()


def set_breakpoint(reason: str = "a breakpoint was set") -> None:
    """Ask all ranks to leave their training loop together, after the same batch.

    Can be called anywhere in the main process of a rank: in a ``training_step``, a callback, a dataset without
    workers, another thread. In a fit, the callback :class:`StopTogether` acts on it; in your own loop,
    :func:`check_breakpoint` does.

    Args:
        reason: Why; every rank receives it, with the number of this one.

    Ranks: any rank, alone. One message to rank 0; does not wait. Before the ranks are connected the
    request is kept until they are.
    """
    if os.getpid() != _process and _active is not None and _active.channel.world_size > 1:
        _log.warning(
            "set_breakpoint(%r) was called in a worker process, which has no link to the other ranks, and has"
            " no effect there; call it in the rank's own process",
            reason,
        )
        return
    with _lock:
        if _active is not None and _is_current(_active):
            _active.request(str(reason))
        else:
            _early_requests.append(str(reason))


def check_breakpoint(*, reset: bool = False) -> StopDecision | None:
    """Return the breakpoint on which all ranks have agreed, or ``None``.

    After a ``fit`` with :class:`StopTogether`, or during one, it only returns the decision. In your own loop it
    is the point at which all ranks leave: call it on every rank after every batch.

        for batch in loader:
            ...
            if check_breakpoint():
                break

    Args:
        reset: Forget the breakpoint once it was returned, so that the ranks can agree on another one. Pass the
            same value on every rank.

    Returns:
        Who asked and why, equal on every rank, from the agreed batch on; ``None`` before.

    Ranks: every rank, after every batch. Costs about a microsecond without a request.
    """
    agreement = _active
    if agreement is None or not _is_current(agreement):
        agreement = connect()
    decision = agreement.decision
    if decision is None and not agreement.in_fit:
        decision = agreement.passed()
    if decision is not None and reset and not agreement.in_fit:
        agreement.start_over()
    return decision


def connect() -> StepAgreement:  # on every rank, the first time
    """Return the agreement of the current process group, and pass on what was requested before it existed."""
    global _active, _process
    agreement = stop_agreement(current_communicator().side_channel)
    with _lock:
        _active, _process = agreement, os.getpid()
        while _early_requests:
            agreement.request(_early_requests.pop(0))
    return agreement


def _is_current(agreement: StepAgreement) -> bool:
    group, channel = current_group(), agreement.channel
    return channel.usable and channel.world_size == (1 if group is None else group.world_size)


# -- What can request a stop from outside of the program: a signal, and a file --

Request = Callable[[str], None]
_LOOK_EVERY = 1.0  # between two looks for a file [s]


class SignalWatch:
    """Takes signals over from Lightning while a fit runs; made before Lightning sets its own handlers."""

    # Lightning answers a SIGTERM with a broadcast from inside the handler, which pairs up with whatever
    # collective the other ranks are in. This handler only makes a request, and calls the user's own.

    def __init__(self, numbers: Sequence[signal.Signals], request: Request) -> None:
        self._request = request  # must be safe in a signal handler
        self._of_user = {number: signal.getsignal(number) for number in numbers}
        self._before: dict[signal.Signals, Any] = {}
        self._received: set[signal.Signals] = set()

    def install(self) -> None:
        """Take over, unless that is done already or this is not the main thread."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in self._of_user:
            self._before[number] = signal.signal(number, self._arrived)

    def restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, handler)
        self._before.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        known = signal.Signals(number)
        if known not in self._received:  # schedulers repeat themselves
            self._received.add(known)
            self._request(f"received {known.name}")
        handler = self._of_user[known]
        if callable(handler):
            handler(number, frame)


class StopFile:
    """A file that asks for a stop once it exists."""

    def __init__(self, path: Path, request: Request) -> None:
        self.path, self._request, self.seen = path, request, False
        self._looked = -math.inf

    def look(self) -> None:
        """Look for the file, if it was not found and the last look was a while ago; after each batch."""
        if self.seen or time.monotonic() - self._looked < _LOOK_EVERY:
            return
        self._looked = time.monotonic()
        # Network disks answer EACCES, EIO or ESTALE for a while, which counts as no file, and `Path.exists` raises.
        self.seen = os.path.exists(self.path)  # noqa: PTH110
        if self.seen:
            self._request(f"found the stop file {self.path}")

    def remove(self) -> None:
        """Remove the file if this process saw it, so that the resumed run does not stop again."""
        if self.seen:
            with suppress(OSError):
                self.path.unlink()
