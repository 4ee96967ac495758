"""How ranks compare under `verify`: a group beside the user's, sockets within a host, the history of calls."""

from __future__ import annotations

import array
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.records import CollectiveCall, Outstanding, RecordedCall, call_site

# -- Sockets between the ranks of a group that are all on one host, by which they agree on a number sooner
# than over gloo
#
# Every rank has one to the first of the group, which compares. They are Unix sockets in a folder that only
# this user can enter, and that is gone once all are connected.

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


# -- A small gloo group beside a process group, over which its ranks compare what they are about to call --
# Ranks of one host compare over sockets instead, in half the time (``host_sockets.py``).
#
# It is built by the ranks of the group alone, and torch.distributed does not know of it: what is sent over
# it goes past torch's dispatcher, and is not seen by whoever watches that.

_PREFIX = "lightning_lockstep/verify"
_ARRIVED = "arrived"


class Companion:
    """Compares numbers and exchanges texts between the ranks of a group; used by one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: float) -> None:
        # A connection of its own, so that nobody else has to wait for the store meanwhile.
        own = dist.PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store)
        number = _wait_for_all(own, size, timeout)  # DistStoreError: not all came in time
        self._size, self._timeout = size, timeout  # of each comparison, too [s]
        # Torch states no types for its methods.
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(str(number), own), rank, size, timedelta(seconds=timeout)
        )
        self._memory = array.array("q", [0, 0])  # faster to read and fill than a tensor
        self._tensors = [torch.frombuffer(self._memory, dtype=torch.int64)]
        self._max, self._sum = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._max.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._sum.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
        self._unset = self._max.timeout
        self._sockets = self._host_sockets(rank)

    def all_equal(self, number: int, *, timeout: float | None = None) -> bool:
        """Return whether all ranks, which all ask, have the same number, of 63 bits at most."""
        if self._sockets is not None:
            return self._sockets.all_equal(number, timeout=self._timeout if timeout is None else timeout)
        memory = self._memory
        memory[0], memory[1] = number, -number
        self._reduce(self._max, timeout)
        return memory[0] == -memory[1]

    def sum_is_zero(self, number: int, *, timeout: float | None = None) -> bool:
        """Return whether the numbers of all ranks add up to 0; the sum must have at most 63 bits."""
        if self._sockets is not None:
            return self._sockets.sum_is_zero(number, timeout=self._timeout if timeout is None else timeout)
        self._memory[0] = number
        self._reduce(self._sum, timeout)
        return self._memory[0] == 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in the order of the group."""
        lengths = [int(row.item()) for row in self._gather(torch.tensor([len(data)]))]
        framed = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        rows = self._gather(framed)
        return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def _host_sockets(self, rank: int) -> HostSockets | None:
        """Return sockets to the other ranks where all are on one host, and all of them could connect."""
        hosts = set(self.exchange(host_identity().encode()))
        if len(hosts) > 1 or hosts == {b""}:
            return None
        made = None
        with suppress(OSError):
            made = HostSockets(rank, self._size, lambda path: self.exchange(path)[0])
        self._memory[0] = 0 if made is not None else 1
        self._reduce(self._sum, None)
        return made if self._memory[0] == 0 else None

    def _reduce(self, options: Any, timeout: float | None) -> None:
        options.timeout = self._unset if timeout is None else timedelta(seconds=timeout)
        self._group.allreduce(self._tensors, options).wait()

    def _gather(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self._size)]
        self._group.allgather([rows], [own]).wait()
        return rows


def _wait_for_all(store: dist.Store, size: int, timeout: float) -> int:
    """Wait until all ranks are here, and return how many companions were made over this store before."""
    # The ranks are counted rather than named: a group may be made anew with the name of an earlier one, and
    # have the same store. Nobody can arrive for the next companion before all have arrived for this one. It
    # is Python that waits, so that a signal is noticed.
    arrived = store.add(_ARRIVED, 1)
    number = (arrived - 1) // size
    deadline, pause = time.monotonic() + timeout, 0.001
    while arrived < (number + 1) * size:
        if time.monotonic() > deadline:
            missing = (number + 1) * size - arrived
            raise dist.DistStoreError(
                f"Timed out after {timeout:g} s: {missing} of {size} ranks have not called the first collective of"
                " their process group."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        arrived = store.add(_ARRIVED, 0)
    return number


# -- What this rank has called lately, kept while it calls on and read from any thread --

# Sends and receives whose handles are kept though nobody has waited for them: a handle holds the tensor.
_OPEN_MESSAGES = 64


class Entry:
    __slots__ = ("_call", "_number", "_site", "_started", "_work", "done")

    def __init__(self, call: CollectiveCall, number: int) -> None:
        self._call, self._number = call, number  # from 1; 0: not counted
        self._started, self._site = time.time(), call_site()
        self._work: Any = None
        self.done = False

    @property
    def described(self) -> CollectiveCall:
        """The call with its number and call site."""
        return replace(self._call, number=self._number, site=self._site)

    @property
    def key(self) -> Outstanding:
        return Outstanding(self._call.group, self._number)

    def recorded(self) -> RecordedCall:
        return RecordedCall(call=self.described, started=self._started, done=self.done)

    def started(self, work: Any) -> None:
        """Note that the backend has it; ``work`` is ``None`` where there is nothing to wait for."""
        if work is None or work.is_completed() or (self._number and not _tells_completion(work)):
            self.done = True
        else:
            self._work = work

    def settle(self) -> bool:
        """Return whether it is complete; lets go of the work handle, and so of the tensors, once it is."""
        if self._work is not None and self._work.is_completed():
            self.done, self._work = True, None
        return self.done


def _tells_completion(work: Any) -> bool:
    """Return whether the handle of a collective ever says that it is complete."""
    # Gloo's reduce-scatter is an all-reduce whose result is copied by the ``wait`` of a handle that never
    # does.
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


class CallHistory:
    """The last calls of each group."""

    # A work handle, which holds the tensors of its operation, is kept until the operation is complete and the
    # history is next written or read.

    def __init__(self, length: int) -> None:
        self._length = length  # calls per group
        self._lock = threading.Lock()  # never held while anything is waited for
        self._groups: weakref.WeakSet[GroupHistory] = weakref.WeakSet()
        self._open: list[Entry] = []

    def of_group(self) -> GroupHistory:
        """Return where the calls of one more group go; they are forgotten with it."""
        group = GroupHistory(self, self._length)
        with self._lock:
            self._groups.add(group)
        return group

    def append(self, entry: Entry, entries: deque[Entry]) -> None:
        """Add a call to those of a group."""
        with self._lock:
            self._settle()
            entries.append(entry)
            self._open.append(entry)
            messages = [one for one in self._open if not one.key.number]
            if len(messages) > _OPEN_MESSAGES:
                self._open.remove(messages[0])

    def outstanding(self) -> list[Outstanding]:
        """Return the oldest incomplete collective of each group that has one."""
        with self._lock:
            self._settle()
            keys = [entry.key for entry in self._open]
        oldest: dict[str, Outstanding] = {}
        for key in sorted(key for key in keys if key.number):
            oldest.setdefault(key.group, key)
        return list(oldest.values())

    def messages(self) -> list[RecordedCall]:
        """Return the sends and receives that are not known to be complete, oldest first."""
        # The handles of gloo say so only once they have been waited for.
        with self._lock:
            self._settle()
            return [entry.recorded() for entry in self._open if not entry.key.number]

    def calls(self) -> list[RecordedCall]:
        """Return the last calls of all groups, oldest first."""
        with self._lock:
            self._settle()
            entries: Iterable[Entry] = [entry for group in self._groups for entry in group.entries]
        return sorted((entry.recorded() for entry in entries), key=lambda recorded: recorded.started)

    def _settle(self) -> None:
        self._open = [entry for entry in self._open if not entry.settle()]


class GroupHistory:
    """The last calls of one group, and how many collectives it has called."""

    def __init__(self, history: CallHistory, length: int) -> None:
        self._history = history
        self.entries: deque[Entry] = deque(maxlen=length)
        self.count = 0  # collectives so far

    def collective(self, call: CollectiveCall) -> Entry:
        self.count += 1
        return self._noted(Entry(call, self.count))

    def uncounted(self, call: CollectiveCall) -> Entry:
        """Note an operation that not all ranks take part in."""
        return self._noted(Entry(call, 0))

    def _noted(self, entry: Entry) -> Entry:
        self._history.append(entry, self.entries)
        return entry
