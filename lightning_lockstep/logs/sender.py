"""From a logger to what takes its lines to rank 0, also before the ranks are connected."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_lockstep.distributed.failure.flushing import on_flush
from lightning_lockstep.distributed.side_channel.opening import (
    current_group,
    known_rank,
    side_channel_if_open,
)
from lightning_lockstep.logs.collector import LineSender, sender_on
from lightning_lockstep.logs.lines import Said, line_of, record_of

__all__ = ["connected", "hand_over", "tell_level"]


Work = Callable[["LineSender | _SayHere"], None]


def connected() -> LineSender | None:
    """Return the sender of the process group that exists now, as fast as can be."""
    global _cached
    group = current_group()
    if group is None:
        return None
    if _cached is not None and _cached[0] is group:
        sender = _cached[1]
        if sender.channel.usable and sender.process == os.getpid():
            return sender
    found = _sender()
    _cached = None if found is None else (group, found)
    return found


def _sender(*, open_if_easy: bool = True) -> LineSender | None:
    """Return what takes this rank's lines, or ``None`` while the ranks are not connected."""
    known = known_rank()
    if known is None:
        return None
    # Rank 0 can open the channel by itself; another rank would have to ask the store first.
    channel = side_channel_if_open(open_if_easy=open_if_easy and known[0] == 0)
    if channel is None or not channel.usable:
        return None
    sender = sender_on(channel)
    if sender.process != os.getpid():
        return None  # a forked worker has the object but not its threads
    _hand_kept_lines_to(sender)
    return sender


def hand_over(work: Work, *, open_if_easy: bool = True) -> bool:
    """Give ``work`` the sender now, or when rank 0 has opened the channel; return whether that can happen."""
    global _waiter
    sender = _sender(open_if_easy=open_if_easy)
    if sender is not None:
        work(sender)
        return True
    known = known_rank()
    if known is None or known[1] == 1 or side_channel_if_open() is not None:
        return False
    _kept_back.append(work)
    if known[0] != 0 and (_waiter is None or not _waiter.is_alive()):
        _waiter = threading.Thread(target=_look_for_channel, name="lockstep-log-open", daemon=True)
        _waiter.start()
    if side_channel_if_open() is not None:
        _sender()  # opened while this line was put aside, and perhaps nobody looks again
    return True


def _look_for_channel() -> None:
    while known_rank() is not None and side_channel_if_open(open_if_easy=True) is None:
        time.sleep(0.05)
    _sender()


class _SayHere:
    """Stands in for the sender of a run whose rank 0 never opened the channel."""

    def send(self, said: Said, **_: Any) -> None:
        known = known_rank()
        line = line_of(said, rank=known[0] if known else 0, host=socket.gethostname(), turn=0)
        logging.getLogger(line.place.logger).handle(record_of(line))

    send_once = send

    def tell_level(self, logger: str, level: int) -> None:
        """Nobody is there to be told."""


def _say_kept_lines() -> None:
    if known_rank() is not None and side_channel_if_open() is not None:
        _sender()
    _hand_kept_lines_to(_SayHere())


def _hand_kept_lines_to(sender: LineSender | _SayHere) -> None:
    if not _kept_back:
        return
    # In their order, and before whatever this thread says next, whichever thread has come first.
    with _handing_over:
        while _kept_back:
            _kept_back.popleft()(sender)


def tell_level(logger: logging.Logger) -> None:
    """Tell rank 0 that this rank says nothing below the level of ``logger``, if the ranks are connected.

    Ranks: any rank, alone; one message for each level that a logger has had.
    """
    known = known_rank()
    if known is not None and known[1] > 1:
        level = logger.getEffectiveLevel()
        hand_over(lambda sender: sender.tell_level(logger.name, level), open_if_easy=False)


# Lines said while rank 0 had not opened the channel yet; they go out with the first one after that.
_kept_back: deque[Work] = deque(maxlen=10_000)
_handing_over = threading.RLock()
_waiter: threading.Thread | None = None
_cached: tuple[object, LineSender] | None = None
on_flush(_say_kept_lines)
atexit.register(_say_kept_lines)
