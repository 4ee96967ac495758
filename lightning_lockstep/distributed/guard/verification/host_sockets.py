"""Sockets between the ranks of a group that are all on one host, by which they agree on a number sooner than over gloo.

Every rank has one to the first of the group, which compares. They are Unix sockets in a folder that only this user can
enter, and that is gone once all are connected.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

__all__ = ["HostSockets", "end_host_sockets", "host_identity"]

_NUMBER = struct.Struct("q")
_YES, _NO = b"\1", b"\0"
# How long the first rank and the others wait for each other while they connect [s].
_CONNECT = 10.0


def host_identity() -> str:
    """Return what ranks have in common that can reach each other by a path: kernel, host name and temporary folder."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {socket.gethostname()} {tempfile.gettempdir()} {os.getuid()}"
    return ""


class HostSockets:
    """The sockets of one rank; used by one thread at a time."""

    def __init__(
        self,
        rank: int,
        size: int,
        tell: Callable[[bytes], bytes],  # called by all: returns what the first rank has given
    ) -> None:
        self._rank, self._timeout = rank, 0.0  # in the group; [s]
        self._peers: list[socket.socket] = []
        if rank == 0:
            self._peers = _accept_all(size - 1, tell)
        else:
            path = tell(b"")
            if not path:
                raise OSError("the first rank of the group could make no socket")
            self._peers = [_connected(path.decode())]
        _all.add(self)

    def all_equal(self, number: int, *, timeout: float) -> bool:
        """Return whether all ranks have the same number."""
        return self._agreed(number, timeout, lambda numbers: all(one == number for one in numbers))

    def sum_is_zero(self, number: int, *, timeout: float) -> bool:
        """Return whether the numbers of all ranks add up to 0."""
        return self._agreed(number, timeout, lambda numbers: number + sum(numbers) == 0)

    def end(self) -> None:
        """End all waits of this rank, and of the others for it."""
        for peer in self._peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _agreed(self, number: int, timeout: float, decide: Callable[[Sequence[int]], bool]) -> bool:
        if timeout != self._timeout:
            self._set_timeout(timeout)
        if self._rank > 0:
            peer = self._peers[0]
            peer.send(_NUMBER.pack(number))
            return self._received(peer, 1) == _YES
        numbers = [_NUMBER.unpack(self._received(peer, _NUMBER.size))[0] for peer in self._peers]
        answer = _YES if decide(numbers) else _NO
        for peer in self._peers:
            peer.send(answer)
        return answer == _YES

    def _received(self, peer: socket.socket, size: int) -> bytes:
        try:
            data = peer.recv(size)
        except BlockingIOError as error:
            raise dist.DistNetworkError(f"Timed out waiting {self._timeout:g} s for another rank") from error
        if not data:
            raise ConnectionError("Connection closed by peer")
        return data

    def _set_timeout(self, timeout: float) -> None:
        # By the kernel: a timeout of Python's would ask twice, whether there is data and for the data.
        seconds = max(timeout, 1e-3)
        parts = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for peer in self._peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, parts)
        self._timeout = timeout


def end_host_sockets() -> None:
    """End all waits at sockets of this process."""
    for one in list(_all):
        one.end()


def _accept_all(count: int, tell: Callable[[bytes], bytes]) -> list[socket.socket]:
    listener, folder, path = None, "", b""
    peers: list[socket.socket] = []
    try:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="lockstep-verify-")  # mode 0700
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"{folder}/s")
            listener.listen(count)
            path = listener.getsockname().encode()
        tell(path)
        if listener is None or not path:
            raise OSError("no socket could be made in the temporary folder")
        listener.settimeout(_CONNECT)
        while len(peers) < count:
            peer, _ = listener.accept()
            peer.settimeout(None)
            peers.append(peer)
        return peers
    finally:
        if listener is not None:
            listener.close()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _connected(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_CONNECT)
        peer.connect(path)
        peer.settimeout(None)
    except OSError:
        peer.close()
        raise
    return peer


_all: weakref.WeakSet[HostSockets] = weakref.WeakSet()
