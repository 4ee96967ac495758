"""What is known of a rank that does not answer."""

from __future__ import annotations

import socket
import time
from collections import defaultdict, deque
from typing import NamedTuple

import psutil

from lightning_lockstep.distributed.guard.ending.connections import Connection, connections
from lightning_lockstep.distributed.side_channel.base import SideChannel

__all__ = ["Silence", "SilentRanks"]

# So much of one core counts as computing, and so far back it counts [s].
_BUSY_SHARE, _WINDOW = 0.05, 10.0
# How far apart two looks at a process are, at least, for the second to say what it does [s].
_APART = 0.2


class Silence(NamedTuple):
    """What is known of a rank that does not answer."""

    reason: str
    host: str = ""  # empty: not known
    has_ended: bool = False  # its process
    has_left: bool = False  # its program has come to its end, without an error
    is_stopped: bool = False  # its process
    # Its process runs, though no thread of Python's can answer: as while C computes and keeps Python's lock.
    is_moving: bool = False
    connections: tuple[Connection, ...] = ()  # as far as this rank can see them


class SilentRanks:
    """Looks at ranks that do not answer: more closely at those on this host."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel
        self._spent: dict[int, deque[tuple[float, float]]] = defaultdict(deque)

    def look(self, rank: int, *, has_failed: bool) -> Silence:
        """Return what is known of a rank that does not answer; to be called now and then while it does not.

        ``has_failed``: if it has left, it or another rank is known to have failed.
        """
        host, pid = self._channel.process_of(rank)
        if self._channel.has_closed(rank):
            said = "it has come to the end of its program"
            return Silence(said, host, has_ended=has_failed, has_left=not has_failed)
        if host != socket.gethostname() or not pid:
            place = f" (process {pid} on host {host})" if pid else ""
            if self._channel.answers(rank):
                return Silence(f"it runs, and does not answer{place}", host, is_moving=True)
            return Silence(f"it is stopped, has ended or cannot be reached{place}", host)
        try:
            process = psutil.Process(pid)
            status, times = process.status(), process.cpu_times()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_DEAD
        if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
            return Silence(f"its process {pid} has ended", host, has_ended=True)
        there = tuple(connections(pid))
        if status == psutil.STATUS_STOPPED:
            what = f"its process {pid} is stopped, by a signal or a debugger"
            return Silence(what, host, is_stopped=True, connections=there)
        if self._computes(pid, times.user + times.system) or status == psutil.STATUS_DISK_SLEEP:
            return Silence(f"its process {pid} computes", host, is_moving=True, connections=there)
        return Silence(f"its process {pid} does not answer", host, connections=there)

    def _computes(self, pid: int, spent: float) -> bool:
        now, looks = time.monotonic(), self._spent[pid]
        looks.append((now, spent))
        while looks[0][0] < now - _WINDOW:
            looks.popleft()
        began, before = looks[0]
        return now - began > _APART and (spent - before) / (now - began) > _BUSY_SHARE
