"""What is known of a rank that does not answer."""

from __future__ import annotations

import socket
from typing import NamedTuple

import psutil

from lightning_lockstep.distributed.guard.connections import Connection, connections
from lightning_lockstep.distributed.side_channel.base import SideChannel

__all__ = ["Silence", "silence_of"]


class Silence(NamedTuple):
    """What is known of a rank that does not answer.

    Attributes:
        reason: Why it does not.
        host: Name of its host; empty where that is not known.
        has_ended: Whether its process is known to have ended.
        has_left: Whether its program has come to its end, without an error.
        is_stopped: Whether its process is known to be stopped.
        connections: Its TCP connections, as far as this rank can see them.
    """

    reason: str
    host: str = ""
    has_ended: bool = False
    has_left: bool = False
    is_stopped: bool = False
    connections: tuple[Connection, ...] = ()


def silence_of(channel: SideChannel, rank: int, *, has_failed: bool) -> Silence:
    """Return what this rank knows of one that does not answer: more where both run on one host.

    Args:
        channel: The side channel of the run.
        rank: The one that does not answer.
        has_failed: Whether it, or another rank, is known to have failed, if it has left.

    Ranks: any rank, alone; nothing is sent.
    """
    host, pid = channel.process_of(rank)
    if channel.has_closed(rank):
        said = "it has come to the end of its program"
        return Silence(said, host, has_ended=has_failed, has_left=not has_failed)
    if host != socket.gethostname() or not pid:
        place = f" (process {pid} on host {host})" if pid else ""
        return Silence(f"it is stopped, has ended or cannot be reached{place}", host)
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return Silence(f"its process {pid} has ended", host, has_ended=True)
    is_stopped = status == psutil.STATUS_STOPPED
    what = "is stopped, by a signal or a debugger" if is_stopped else "does not answer"
    there = tuple(connections(pid))
    return Silence(f"its process {pid} {what}", host, is_stopped=is_stopped, connections=there)
