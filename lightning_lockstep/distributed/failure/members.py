"""Who the ranks of a run are while processes of it are lost: the first process publishes it, each rank follows.

A generation is a list of members, in the order of their ranks. The next one begins when a process ends by a signal,
when a spare process is ready to take a place, or when a member asks for another try. The first process, which is not a
rank, hosts the store in which this stands:

======================= ===========================================================================================
``members/<n>``         generation n: its members, and whose end made it; or that this ends the run
``ready/<n>/<member>``  this member connects next; its host, process id and addresses
``done/<n>/<call>/<m>`` this member has reached the end of a call of a Trainer
``waits/<member>``      this process has reached a call of a Trainer
``first_call``          "over", or "joins" while others join, before the end of the script's first call of a Trainer
``asks/<n>``            why the run is to end; empty if the members could not connect, though all of them live
``lost/<n>``            what the members of generation n, which have gone on, say of the losses before it
======================= ===========================================================================================

A thread of each rank waits for the next generation. It then ends what this rank waits in, by closing its connections
with other members, and those with the store that belong to the generation that is over.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_lockstep._settings import MEMBER, launcher_pid
from lightning_lockstep.distributed.failure.interrupt import (
    Interrupt,
    connections,
    connections_with,
    end_connections,
)
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import FailureRecord, is_broken_collective
from lightning_lockstep.distributed.process_group import use_store
from lightning_lockstep.distributed.rendezvous import addresses_here
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import CollectiveStallError, LaunchError, RankFailedError

_FIRST_CALL = "first_call"
_FOREVER = timedelta(days=3650)
_CONNECT_WITHIN = timedelta(minutes=5)  # to the store
# How often a rank looks whether others have come, or are lost [s].
_LOOK_EVERY = 0.02
# How long a rank whose collective has broken waits for the news that a member is lost [s].
_NEWS_WITHIN = 5.0
# How many times members that all live try to connect.
_TRIES = 5


@dataclass(frozen=True)
class Generation:
    """The members of a run, in the order of their ranks, until another member is lost."""

    number: int = -1  # until the first one is known
    members: tuple[int, ...] = ()
    lost: tuple[FailureRecord, ...] = ()  # since the generation before
    ends: bool = False  # because of `lost` the run ends
    since: float = 0.0  # when the first process has seen that [s since 1970]


class HostedMembers:
    """What the first process writes in the store, and reads there."""

    def __init__(self, store: Store) -> None:
        self._store, self.current = store, Generation()

    def publish(self, members: Collection[int], lost: Sequence[FailureRecord] = (), *, ends: bool = False) -> None:
        """Let the next generation begin, or the run end."""
        self.current = Generation(self.current.number + 1, tuple(members), tuple(lost), ends=ends, since=time.time())
        self._store.set(f"members/{self.current.number}", json.dumps(asdict(self.current), default=str))

    def has_begun(self) -> bool:
        return self._store.check(["members/0"])

    def request(self) -> str | None:
        """Return why a member asks for the end of the run, or "" if it asks for another try; None if none asks."""
        key = f"asks/{self.current.number}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def has_met(self) -> bool:
        return all(self._store.check([f"ready/{self.current.number}/{one}"]) for one in self.current.members)

    def has_reached_trainer(self, number: int) -> bool:
        """Return whether a process that is no member yet has reached a call of a Trainer."""
        return self._store.check([f"waits/{number}"])

    def hold_first_call(self) -> bool:
        """Keep the members within the first call of a Trainer, so that others may join; return whether they are."""
        return _claim_first_call(self._store, b"joins")

    def free_first_call(self) -> None:
        """Let the members reach the end of the first call of a Trainer."""
        if self._store.check([_FIRST_CALL]) and self._store.get(_FIRST_CALL) == b"joins":
            self._store.delete_key(_FIRST_CALL)

    def reported_losses(self) -> list[dict[str, Any]]:
        return _reported_losses(self._store, self.current.number)


def _end_process(why: str) -> NoReturn:
    end_now(1, f"\nlightning-lockstep: {why}\n")


def _claim_first_call(store: Store, state: bytes) -> bool:
    """Set what the first call of a Trainer is, unless it is something else; return whether it is that now."""
    return bool(store.compare_set(_FIRST_CALL, "", state.decode()) == state)


def _ends_of_calls(channel: SideChannel) -> Gather:
    return Gather(channel, "the end of a call", watched=True)


def _reported_losses(store: Store, until: int) -> list[dict[str, Any]]:
    return [json.loads(store.get(key)) for n in range(1, until + 1) if store.check([key := f"lost/{n}"])]


class Membership:
    """What a rank knows of the members, itself included. Ranks: one object in each process."""

    def __init__(self, me: int, address: str, port: int) -> None:
        self.me, self.address, self.port = me, address, port
        self.current = Generation()  # with which this rank has connected, or tries to
        self.newest = Generation()
        self._connecting = self._is_connected = False
        self._tries = 0  # to connect, that have failed one after the other
        # The attempt over the group of this generation, which a loss ends.
        self.propagation: Callable[[], FailurePropagation | None] = lambda: None
        self._lost: list[tuple[Generation, FailureRecord]] = []
        self._calls = 0
        self._processes: list[tuple[str, int]] = []
        self._news = threading.Condition()
        # Held while connections are ended: none of the next generation are.
        self._ending_connections = threading.Lock()
        before = set(connections())
        self._store = self._client()
        self._kept = set(connections()) - before  # this connection lasts for the whole run
        self._interrupt = Interrupt(lambda: self.error() if self._connecting and self.outdated else None)
        self._stops_following = False
        self._thread = threading.Thread(target=self._follow, name="lockstep-members", daemon=True)
        self._thread.start()
        atexit.register(self._stop_following)

    def _client(self) -> TCPStore:
        store = TCPStore(self.address, self.port, timeout=_CONNECT_WITHIN, wait_for_workers=False)
        store.set_timeout(_FOREVER)
        return store

    @property
    def outdated(self) -> bool:
        """Whether a newer generation is published."""
        return self.newest.number > self.current.number

    def lost_since(self, number: int) -> list[tuple[Generation, FailureRecord]]:
        """Return who was lost after a generation, up to that of this rank."""
        return [(one, lost) for one, lost in self._lost if number < one.number <= self.current.number]

    def error(self) -> RankFailedError:
        record = self._lost[-1][1] if self._lost else None
        return RankFailedError("" if record is None else record.report(), record)

    def check(self) -> None:
        if self.outdated:
            raise self.error()

    def _wait_for_news(self, seconds: float) -> bool:
        """Wait until a member of this generation is known to be lost; return whether one is."""
        with self._news:
            return self._news.wait_for(lambda: self.outdated, seconds)

    # -- the meeting of a generation's members, and the end of a call --

    def __enter__(self) -> None:
        """Wait until all members of the newest generation are ready to connect, in the body. Ranks: all members."""
        # If another one is lost meanwhile, the body raises, anywhere. The context is no generator: the interrupt raises
        # in any code but that of this module, so not while the context is left.
        self._is_connected = False
        self._interrupt.install()
        self._store.set(f"waits/{self.me}", "")
        with self._news:  # a spare process is no member until it takes a place
            self._news.wait_for(lambda: self.outdated and (self.newest.ends or self.me in self.newest.members))
        newest = self.newest
        if newest.ends:
            raise self.error()
        with self._ending_connections:
            self.current = newest
        number, members = newest.number, newest.members
        here = socket.gethostname()
        self._store.set(f"ready/{number}/{self.me}", json.dumps([here, os.getpid(), *addresses_here()]))
        keys = [f"ready/{number}/{member}" for member in members]
        while not self._store.check(keys):
            self.check()
            time.sleep(_LOOK_EVERY)
        # Those on other hosts by their addresses, because not every host knows the names of the others.
        ready = [json.loads(self._store.get(key)) for key in keys]
        self._processes = [
            (address, pid) for host, pid, *addresses in ready for address in ([here] if host == here else addresses)
        ]
        # A connection of its own, which can be ended with all that waits for it.
        use_store(self.address, self.port, PrefixStore(f"group/{number}", self._client()))
        self._connecting = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connecting, self._is_connected = False, kind is None

    def send_request(self, why_it_ends: str = "") -> None:
        """Ask for another try of the same members, or for the end of the run, and wait for it. Ranks: any, alone."""
        self._store.set(f"asks/{self.current.number}", why_it_ends)
        self._wait_for_news(_FOREVER.total_seconds())

    def ends_attempt(self, error: BaseException) -> bool:
        """Wait for news if an error may come from a lost member; return whether it does. Ranks: any, alone."""
        propagation, was_connected = self.propagation(), self._is_connected
        record = None if propagation is None else propagation.attempt.record
        # Not Ctrl-C, nor the program's own wish to end, nor an exception of a rank, which would come again.
        if not isinstance(error, Exception) or (record is not None and not record.ended):
            return False
        own = LaunchError, CollectiveStallError, RankFailedError
        is_broken = isinstance(error, own) or is_broken_collective(error)
        may_be = is_broken or not was_connected
        self._tries = 0 if was_connected else self._tries + 1
        has_news = self._wait_for_news(_NEWS_WITHIN if may_be else 0.0)
        if not has_news and is_broken and 0 < self._tries < _TRIES:
            self.send_request()
        return self.outdated

    def finish_call(self) -> None:
        """Wait until all members that are left have reached the end of a call, or raise. Ranks: all members."""
        number, propagation, main = self.current.number, self.propagation(), self.current.members[0]
        done = f"done/{number}/{self._calls}"
        self._store.set(f"{done}/{self.me}", "1")
        with ExitStack() as stack:
            if propagation is not None:  # else this member alone is left
                gather = propagation.channel.get_or_create(_ends_of_calls)
                stack.enter_context(gather.waiting(self._calls))
            while True:
                newest = self.newest
                left = [member for member in self.current.members if member in newest.members]
                all_done = self._store.check([f"{done}/{one}" for one in {main, *left}])
                if newest.ends or (all_done and (self._calls or _claim_first_call(self._store, b"over"))):
                    self._calls += 1
                    return
                # All go to the end of the call once more in three cases: all are done, but others join, for whom the
                # first call is kept open; rank 0 is lost before it was done, and it alone saves then; a member has
                # broken off the call.
                main_is_lost = main not in left and not (all_done or self._store.check([f"{done}/{main}"]))
                rejoins = [f"ready/{n}/{one}" for n in range(number + 1, newest.number + 1) for one in left]
                if all_done or main_is_lost or any(self._store.check([key]) for key in rejoins):
                    self.check()
                record = None if propagation is None else propagation.attempt.record
                # Not for the end of a member that the others outlive.
                if propagation and record and not (record.ended and self._wait_for_news(_NEWS_WITHIN)):
                    propagation.check()
                time.sleep(_LOOK_EVERY)

    def report_loss(self, event: dict[str, Any]) -> None:
        """Say what was lost before this generation, now that it has gone on. Ranks: any, alone."""
        self._store.set(f"lost/{self.current.number}", json.dumps(event))

    def reported_losses(self) -> list[dict[str, Any]]:
        return _reported_losses(self._store, self.current.number)

    # -- the thread that follows the members --

    def _stop_following(self) -> None:
        # C++ aborts a process whose thread comes back from it after Python has ended.
        self._stops_following = True
        self._thread.join()

    def _follow(self) -> None:
        parent = launcher_pid()
        while not self._stops_following:
            try:
                is_new = self._store.check([key := f"members/{self.newest.number + 1}"])
                published = json.loads(self._store.get(key)) if is_new else {}
                is_alone = parent is not None and os.getppid() != parent
            except RuntimeError:
                is_alone = True
            if is_alone:
                _end_process("the process that started this rank has exited; this rank exits too.")
            left_out = is_new and not published["ends"] and self.me not in published["members"]
            if left_out and self.me in self.newest.members:
                _end_process("the others go on without this host, which did not answer; this rank exits.")
            if is_new:
                lost = tuple(FailureRecord(**one) for one in published.pop("lost"))
                members = tuple(published.pop("members"))
                with self._news:
                    self.newest = Generation(**published, members=members, lost=lost)
                    self._lost += [(self.newest, one) for one in lost]
                    self._news.notify_all()
            with self._ending_connections:
                propagation, is_over = self.propagation(), self.outdated and self.current.members
                # Again and again, because the attempt, or a connection, may begin after the news.
                if is_over and self._lost and propagation is not None:
                    propagation.attempt.outlive(self._lost[-1][1])
                if is_over and (is_new or self._connecting):
                    self._end_waits()
            time.sleep(_LOOK_EVERY)

    def _end_waits(self) -> None:
        """End what this rank waits for in C++, and in Python while it connects."""
        if self._connecting:
            self._interrupt.raise_soon()
        of_store = [
            fd for ends, fd in connections().items() if ends[1].endswith(f":{self.port}") and ends not in self._kept
        ]
        end_connections([*connections_with(self._processes, {self.port}), *of_store])


_membership: Membership | None = None


def current_membership() -> Membership | None:
    """Return what this process knows of the members of its run, if it was started as one."""
    global _membership
    if _membership is None and MEMBER in os.environ and launcher_pid() is not None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _membership = Membership(int(os.environ[MEMBER]), address, port)
    return _membership
