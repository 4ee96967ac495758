"""Who the ranks of a run are while processes of it are lost: the first process publishes it, each rank follows.

A generation is a list of members, in the order of their ranks; the end of a process by a signal makes the next one. The
first process, which is no rank, hosts the store in which this stands:

======================= ===========================================================================================
``members/<n>``         generation n: its members, and whose end made it; or that this ends the run
``ready/<n>/<member>``  this member connects next; its process id
``done/<n>/<call>/...`` this member has come to the end of a call of a Trainer
``again/<n>``           the members could not connect, though all of them live
``history``             what rank 0 says of the losses so far
======================= ===========================================================================================

A thread of each rank waits for the next generation, and ends what this rank waits for: its connections with the others,
and those with the store that are of the generation that is over.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore

from lightning_lockstep.distributed.failure.interrupt import (
    Interrupt,
    connections,
    connections_with,
    end_connections,
)
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.process_group import host_rendezvous, rendezvous_store, use_store
from lightning_lockstep.errors import RankFailedError

_HOST = "127.0.0.1"
_FOREVER = timedelta(days=3650)
# How often a rank asks the store whether others have come [s].
_ASK_EVERY = 0.005
# How often it looks for the next generation [s].
_LOOK_EVERY = 0.02


@dataclass(frozen=True)
class Generation:
    """The members of a run, in the order of their ranks, until the next one is lost."""

    number: int
    members: tuple[int, ...]
    lost: tuple[FailureRecord, ...] = ()  # since the generation before
    ends: bool = False  # because of `lost` the run ends
    since: float = 0.0  # when the first process has seen that [s since 1970]


class HostedMembers:
    """The store, in the first process."""

    def __init__(self) -> None:
        self.port = host_rendezvous(_HOST)
        self._store = rendezvous_store(0, 1, address=_HOST, port=self.port)
        self.current = Generation(-1, ())

    def publish(
        self, members: Collection[int], lost: Sequence[FailureRecord] = (), *, ends: bool = False
    ) -> None:
        """Let the next generation begin, or the run end."""
        number = self.current.number + 1
        self.current = Generation(number, tuple(members), tuple(lost), ends, time.time())
        told = [self.current.members, [one.to_json() for one in lost], ends, self.current.since]
        self._store.set(f"members/{number}", json.dumps(told))

    def could_not_connect(self) -> bool:
        """Return whether a member of this generation says so."""
        return self._store.check([f"again/{self.current.number}"])

    def has_met(self) -> bool:
        """Return whether the members of this generation have come together."""
        return self._store.check([f"ready/{self.current.number}/{one}" for one in self.current.members])

    def history(self) -> list[dict[str, Any]]:
        """Return what rank 0 has said of the losses."""
        found: list[dict[str, Any]] = []
        return json.loads(self._store.get("history")) if self._store.check(["history"]) else found


class Membership:
    """What a rank knows of the members, itself included. Ranks: one object in each process."""

    def __init__(self, me: int, port: int) -> None:
        self.me, self.address, self.port = me, _HOST, port
        self.current: Generation | None = None  # with which this rank has connected, or tries to
        self.newest: Generation | None = None
        self.connecting = False  # in this time an error may be raised anywhere
        self.over = False  # all members have decided to end
        self.history: list[dict[str, Any]] = []
        # Called on another thread with what ends the generation of this rank.
        self.on_news: Callable[[Generation], None] = lambda generation: None
        self._all: list[Generation] = []
        self._met = -1  # the generation with which this rank has shared a state last
        self._calls = 0
        self._processes: list[tuple[str, int]] = []
        self._news = threading.Condition()
        self._ending = threading.Lock()  # held while connections are ended: none of the next generation are
        before = set(connections())
        self._store, self._watched = self._client(), self._client()
        self._kept = set(connections()) - before  # these stand for the whole run
        self._interrupt = Interrupt(lambda: self._error() if self.goes_on and self.current else None)
        self._leaves = False
        self._thread = threading.Thread(target=self._watch, name="lockstep-members", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def _client(self) -> TCPStore:
        return TCPStore(self.address, self.port, is_master=False, timeout=_FOREVER, wait_for_workers=False)

    @property
    def outdated(self) -> bool:
        """Whether a member of this generation is lost."""
        met = -1 if self.current is None else self.current.number
        return self.newest is not None and self.newest.number > met

    @property
    def goes_on(self) -> bool:
        """Whether this rank begins again with the members that are left."""
        return self.outdated and not self.over and self.newest is not None and not self.newest.ends

    def lost(self) -> tuple[list[FailureRecord], float]:
        """Return what is known of the members that are lost since this rank last shared a state, and since when."""
        met = -1 if self.current is None else self.current.number
        new = [one for one in self._all if self._met < one.number <= met and one.lost]
        return [record for one in new for record in one.lost], new[0].since if new else 0.0

    def has_met(self) -> None:
        """Note that this rank has shared a state with the members of its generation."""
        self.connecting, self._met = False, -1 if self.current is None else self.current.number

    def check(self) -> None:
        """Raise if a member of this generation is lost."""
        if self.outdated:
            raise self._error()

    def _error(self) -> RankFailedError:
        record = self.newest.lost[-1] if self.newest is not None and self.newest.lost else None
        return RankFailedError("" if record is None else record.report(), record)

    def wait_for_news(self, seconds: float) -> bool:
        """Wait until a member of this generation is known to be lost; return whether one is."""
        with self._news:
            return self._news.wait_for(lambda: self.outdated, seconds)

    # -- the meeting of a generation's members, and the end of a call

    def meet(self) -> None:
        """Wait until all members of the newest generation are ready to connect. Ranks: all members."""
        self._interrupt.install()
        self.connecting = True
        self.wait_for_news(_FOREVER.total_seconds())
        newest = self.newest
        assert newest is not None
        if newest.ends:
            raise self._error()
        with self._ending:
            self.current = newest
        self._store.set(f"ready/{newest.number}/{self.me}", str(os.getpid()))
        keys = [f"ready/{newest.number}/{member}" for member in newest.members]
        while not self._store.check(keys):
            self.check()
            time.sleep(_ASK_EVERY)
        self._processes = [(socket.gethostname(), int(self._store.get(key))) for key in keys]
        self.check()
        # A connection of its own, which can be ended with all that waits for it.
        use_store(self.address, self.port, PrefixStore(f"group/{newest.number}", self._client()))

    def could_not_connect(self) -> None:
        """Ask for another try of the same members."""
        self._store.set(f"again/{-1 if self.current is None else self.current.number}", "1")

    def begin_call(self) -> None:
        """Count the calls of a Trainer. Ranks: all members, alike."""
        self._calls += 1

    def finish_call(self) -> None:
        """Wait until all members that are left have come to the end of the call, or raise. Ranks: all members."""
        assert self.current is not None
        number, pause = self.current.number, _ASK_EVERY
        self._store.set(f"done/{number}/{self._calls}/{self.me}", "1")
        while True:
            newest = self.newest or self.current
            left = [member for member in self.current.members if member in newest.members]
            if newest.ends or self._store.check([f"done/{number}/{self._calls}/{one}" for one in left]):
                return
            # If a member has broken off, all go to the end of the call once more.
            later = [f"ready/{n}/{one}" for n in range(number + 1, newest.number + 1) for one in left]
            if any(self._store.check([key]) for key in later):
                self.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def say(self, history: list[dict[str, Any]]) -> None:
        """Leave what the first process prints of the losses. Ranks: rank 0."""
        self._store.set("history", json.dumps(history))

    def end_run(self, record: FailureRecord, propagation: FailurePropagation | None) -> NoReturn:
        """Raise what ends the run, on which all members have decided. Ranks: all members."""
        self.over = True
        if propagation is not None:
            propagation.end_run(record)
            propagation.check()
        raise RankFailedError(record.report(), record)

    # -- the thread that waits for the next generation

    def _leave(self) -> None:
        # C++ aborts a process whose thread comes back from it after Python has ended.
        self._leaves = True
        self._thread.join()

    def _watch(self) -> None:
        number = 0
        while not self._leaves:
            try:
                if not self._watched.check([f"members/{number}"]):
                    time.sleep(_LOOK_EVERY)
                    continue
                members, lost, ends, since = json.loads(self._watched.get(f"members/{number}"))
            except RuntimeError:
                text = "the process that started this rank has exited; this rank exits too."
                end_now(1, f"\nlightning-lockstep: {text}\n")
            records = tuple(map(FailureRecord.from_json, lost))
            with self._news:
                self.newest = Generation(number, tuple(members), records, ends, since)
                self._all.append(self.newest)
                self._news.notify_all()
            with self._ending:
                if self.current is not None and self.current.number < number:
                    self.on_news(self.newest)
                    self._end_waits()
            number += 1

    def _end_waits(self) -> None:
        """End what this rank waits for in C++, and in Python while it connects."""
        if self.connecting:
            self._interrupt.raise_soon()
        place = f"{self.address}:{self.port}"
        of_store = [fd for ends, fd in connections().items() if ends[1] == place and ends not in self._kept]
        end_connections([*connections_with(self._processes, {self.port}), *of_store])

    def interrupt(self) -> None:
        """Raise in the thread that trains if it has not noticed yet that a member is lost."""
        if self.outdated:
            self._interrupt.raise_soon()
