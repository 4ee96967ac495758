"""How every wait of a rank is ended once its attempt has failed: a collective, a sleep, a lock, the join of a thread.

gloo cannot be told to give up: a rank waits in C++ until its peer answers, or the connection breaks. So the connections
with other ranks are shut down, as they are when a process ends; nccl is told to abort; and an error is raised in the
thread that trains. A process that a rank forks, such as a loader's worker, gives these connections back, or they would
stand for as long as it lives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from traceback import walk_stack
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_lockstep.distributed.process_group import process_groups
from lightning_lockstep.distributed.rendezvous import addresses_of

# -- Connections with other ranks --

#: This end's address and port, and the other end's, as texts such as ``10.0.0.1:4000``.
Connection = tuple[str, str]
#: Host name and id of the process of a rank.
Process = tuple[str, int]


def connections(pid: int | None = None) -> dict[Connection, int]:
    """Return the TCP connections of a process of this host, by default this one, with their descriptors."""
    with suppress(psutil.Error):
        return {
            (_text(one.laddr), _text(one.raddr)): one.fd
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED
        }
    return {}


def connections_with(ranks: Collection[Process], kept_ports: Collection[int] = ()) -> list[int]:
    """Return the descriptors of this process's connections with ranks, but for those with such a port at an end."""
    here, addresses = socket.gethostname(), set[str]()
    theirs = {end for host, pid in ranks if host == here and pid != os.getpid() for end in connections(pid)}
    for host in {host for host, _ in ranks if host not in ("", here)}:
        addresses.update(addresses_of(host))
    return [
        number
        for (own, other), number in connections().items()
        if ((other, own) in theirs or other.rpartition(":")[0] in addresses)
        and not {int(end.rpartition(":")[2]) for end in (own, other)} & set(kept_ports)
    ]


def end_connections(descriptors: Collection[int]) -> None:
    for number in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def abort_devices() -> None:
    """Abort what nccl does in any process group, which ends every wait for it, and the use of the group."""
    for group in process_groups():
        if type(group) is dist.ProcessGroup:
            with suppress(RuntimeError):
                backend: Any = group._get_backend(torch.device("cuda"))
                backend.abort()


_not_for_forks: set[tuple[int, int]] = set()  # descriptors, each with the number of its socket


def keep_from_forks(descriptors: Collection[int]) -> None:
    """Have processes that this one forks from now on give these connections back."""
    _not_for_forks.clear()
    for number in descriptors:
        with suppress(OSError):  # it has just been closed
            _not_for_forks.add((number, os.fstat(number).st_ino))


def _give_back() -> None:
    for number, node in _not_for_forks:
        with suppress(OSError), open(os.devnull, "r+b") as nothing:
            if os.fstat(number).st_ino == node:
                os.dup2(nothing.fileno(), number)  # C++ keeps a descriptor that it may close
    _not_for_forks.clear()


os.register_at_fork(after_in_child=_give_back)


def _text(address: Any) -> str:
    return f"{address.ip.removeprefix('::ffff:')}:{address.port}"


# -- Raises an error in the thread that trains, also while that thread sleeps or waits for a lock --

# The system ignores this signal by default, so it does no harm if no handler is installed.
_SIGNAL = signal.SIGURG
_OURS = __name__.rpartition(".")[0]


def deals_with_errors(frame: FrameType | None) -> bool:
    """Return whether a frame, or what called it, is in the failure protocol, which raises errors by itself."""
    frames = () if frame is None else walk_stack(frame)
    return any(one.f_globals.get("__name__", "").startswith(_OURS) for one, _ in frames)


class Interrupt:
    """Raises an error in the thread that trains."""

    # If the thread is in a call of C, the error is raised when that call returns. Outside the main thread this holds
    # for sleeps and locks too, because Python runs handlers of signals in the main thread alone.

    def __init__(self, pending: Callable[[], BaseException | None]) -> None:
        self._pending = pending  # returns what is to be raised, if anything still is
        self._thread = threading.current_thread()
        self._by_signal = False
        self._before: Any = None
        self._process = os.getpid()

    def install(self) -> None:
        """Raise errors in the calling thread from now on; handle the signal that wakes it, if it is the main thread."""
        self._thread = threading.current_thread()
        if self._thread is threading.main_thread() and not self._by_signal:
            self._before = signal.signal(_SIGNAL, self._woken)
            self._by_signal = True

    def remove(self) -> None:
        """Restore the earlier handler of the signal; only the main thread can."""
        if self._by_signal and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._before)
            self._by_signal = False

    def raise_soon(self) -> None:
        """Raise what is pending in the thread that trains; another thread calls this, and it returns at once."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        if self._by_signal and self._thread is threading.main_thread():
            signal.pthread_kill(ident.value, _SIGNAL)
        elif not deals_with_errors(sys._current_frames().get(ident.value)) and (error := self._pending()):
            # Python raises only a class in another thread: the instance of this one is ``error``.
            kind = type(error)
            members = {"__new__": lambda cls: error, "__module__": kind.__module__}
            raised = type(kind.__name__, (kind,), members)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(raised))

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        # The failure protocol raises errors by itself.
        if os.getpid() != self._process or deals_with_errors(frame) or _is_at_exit(frame):
            return
        if error := self._pending():
            raise error


def _is_at_exit(frame: FrameType | None) -> bool:
    """Return whether the program has ended and the main thread is in a function that Python calls at exit."""
    # Python would only print "Exception ignored in atexit callback" for an error that is raised there.
    return frame is not None and all(one.f_code.co_name != "<module>" for one, _ in walk_stack(frame))
