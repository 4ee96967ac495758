"""`guard="verify"`: every collective compared between the ranks before it runs."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import stores_of_groups, timeout_of
from lightning_lockstep._text import say
from lightning_lockstep.distributed.guard.call_description import (
    POINT_TO_POINT,
    Description,
    DispatchedCall,
    Finish,
    GroupIdentity,
    Hook,
    description,
    signature,
    uncompared,
)
from lightning_lockstep.distributed.guard.companion import CallHistory, Companion, Entry, GroupHistory
from lightning_lockstep.distributed.guard.records import (
    Arrival,
    CollectiveCall,
    Outstanding,
    RecordedCall,
    compares_calls,
    fingerprint,
    group_titles,
    mismatch_report,
)
from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError

# -- The sends and receives of this rank, which torch's flight recorder does not have over gloo --


class MessageRecorder:
    """Notes sends and receives with their handles, until they have been waited for."""

    def __init__(self) -> None:
        self._history = CallHistory(1)
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[GroupIdentity, GroupHistory]] = (
            weakref.WeakKeyDictionary()
        )
        self._hook: Hook | None = None

    def start(self) -> None:
        """Note them from now on; a second call is harmless."""
        if self._hook is None:
            self._hook = Hook(self._before, operators=POINT_TO_POINT)

    def stop(self) -> None:
        """Note nothing more; a second call is harmless."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._groups.clear()

    def messages(self) -> Sequence[RecordedCall]:
        """See :meth:`CallHistory.messages`."""
        return self._history.messages()

    def _before(self, call: DispatchedCall) -> Finish:
        known = self._groups.get(call.group)
        if known is None:
            name = call.group.group_name
            title, ranks = group_titles().get(name, (name, tuple(range(call.group.size()))))
            known = GroupIdentity(title, ranks, call.group.rank()), self._history.of_group()
            self._groups[call.group] = known
        identity, history = known
        return history.uncounted(uncompared(call, identity)).started


# -- Compares what the ranks of a group call, before each collective runs --

# A monitored barrier finds out by itself, and sooner than a comparison would, who has not arrived.
_RECORDED_ONLY = {*POINT_TO_POINT, "monitored_barrier_"}
_CACHED = 10_000
_SHOWN = 8  # tensors of one call
_HASH_BITS = 40  # so that the sum over all pairs of thousands of ranks stays below 2^63


class CallVerifier:
    """Raises on every rank of a group where its ranks are about to call different collectives."""

    # Compared are operation, reduction, root, dtypes, shapes, and for an all-to-all what each rank sends with
    # what the receiver expects. After an error the group can be used as before. Sends, receives and monitored
    # barriers are recorded only. It also is a
    # :class:`~lightning_lockstep.distributed.guard.records.CallRecorder`.
    #
    # Each collective waits until all ranks of its group have called it, asynchronous ones too. So ranks that
    # call asynchronous collectives of several groups in different orders, or that are to send or receive
    # between two collectives that others have called already, wait for each other until the group's timeout.

    def __init__(self, *, history: int = 64) -> None:
        if history < 1:
            raise ConfigurationError(f"history={history}: expected the number of calls to keep, at least 1.")
        self._history = CallHistory(history)
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupVerifier | None] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._hook: Hook | None = None
        self._said: set[str] = set()

    def start(self) -> None:
        """Compare from now on; a second call is harmless."""
        # On all ranks between the same two collectives: one that compares waits for one that does not.
        if self._hook is None:
            self._hook = Hook(self._before)
            self._look_for_unseen_groups()

    def stop(self) -> None:
        """Compare no more, and close the connections that were made for it; a second call is harmless."""
        # On all ranks between the same two collectives, once none is outstanding.
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._groups.clear()

    @property
    def is_recording(self) -> bool:
        """Whether it is at work."""
        return self._hook is not None

    def outstanding(self) -> Sequence[Outstanding]:
        """See :meth:`CallRecorder.outstanding`; a collective that waits in the comparison is outstanding."""
        return self._history.outstanding()

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        """See :meth:`CallRecorder.calls`; sends and receives have the number 0."""
        return self._history.calls()

    def messages(self) -> Sequence[RecordedCall]:
        """See :meth:`CallHistory.messages`."""
        return self._history.messages()

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """See :meth:`CallRecorder.arrivals`."""
        calls = [one for one in self._history.calls() if one.call.number and one.started >= since]
        return [Arrival(one.call.group, one.call.number, one.started) for one in calls]

    def _before(self, call: DispatchedCall) -> Finish | None:
        try:
            group = self._groups[call.group]
        except KeyError:
            group = self._made(call.group)
        return None if group is None else group.called(call)

    def _made(self, group: dist.ProcessGroup) -> _GroupVerifier | None:
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._verifier(group)
            verifier = self._groups[group]
        self._look_for_unseen_groups()
        return verifier

    def _verifier(self, group: dist.ProcessGroup) -> _GroupVerifier | None:
        if group.size() < 2 or compares_calls(group):
            return None
        known = group_titles().get(group.group_name)
        store = stores_of_groups().get(group)
        if known is None or store is None:
            self._cannot_see(group, "torch.distributed has no store for this group")
            return None
        if dist.get_backend(group) == "fake":
            self._cannot_see(group, "the backend 'fake' has no other ranks")
            return None
        title, ranks = known
        identity = GroupIdentity(title, ranks, group.rank())
        return _GroupVerifier(identity, store, _timeout(group), self._history)

    def _look_for_unseen_groups(self) -> None:
        if not process_group_exists():
            return
        for group in stores_of_groups():
            foreign = isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup
            if foreign and group.size() > 1 and not compares_calls(group):
                self._cannot_see(group, f"its class {type(group).__name__} is written in Python")

    def _cannot_see(self, group: dist.ProcessGroup, why: str) -> None:
        name = group.group_name
        title = group_titles().get(name, (name, ()))[0]
        if title not in self._said:
            self._said.add(title)
            if group.rank() == 0:
                say(
                    f"lightning-lockstep: guard='verify' does not compare the collectives of process group {title!r}:"
                    f" {why}"
                )


class _Known(NamedTuple):
    """What was worked out for a call, for the next one like it."""

    description: Description
    fingerprint: int
    pairs: int | None  # adds up to 0 over all ranks where what is sent is what is expected


class _GroupVerifier:
    def __init__(
        self, identity: GroupIdentity, store: dist.Store, timeout: float, history: CallHistory
    ) -> None:
        self._identity, self._store, self._timeout = identity, store, timeout
        self._calls = history.of_group()
        self._known: dict[Hashable, _Known] = {}
        self._companion: Companion | None = None
        # Held until the backend has the operation: threads must give it those of one group as they were compared.
        self._lock = threading.RLock()

    def called(self, call: DispatchedCall) -> Finish:
        """Compare a call; return what to call once the backend has it."""
        if call.operator.name in _RECORDED_ONLY:
            return self._calls.uncounted(uncompared(call, self._identity)).started
        self._lock.acquire()
        entry = None
        try:
            known = self._looked_up(call)
            entry = self._calls.collective(known.description.call)
            self._compare(known, entry, call.timeout)
        except BaseException:
            if entry is not None:
                entry.done = True
            self._lock.release()
            raise

        def finish(work: dist.Work | None) -> None:
            entry.started(work)
            self._lock.release()

        return finish

    def _looked_up(self, call: DispatchedCall) -> _Known:
        key = signature(call)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _CACHED:
                self._known.clear()
            described = description(call, self._identity)
            pairs = _pairs(described, self._identity.rank) if described.sent else None
            known = _Known(described, fingerprint(described.call.compared()), pairs)
            self._known[key] = known
        return known

    def _compare(self, known: _Known, entry: Entry, timeout: float | None) -> None:
        companion = self._companion
        if companion is None:
            size = len(self._identity.ranks)
            companion = Companion(
                self._store, self._identity.rank, size, timeout=min(timeout or self._timeout, self._timeout)
            )
            self._companion = companion
        if not companion.all_equal(known.fingerprint, timeout=timeout):
            raise self._mismatch(companion, entry.described)
        if known.pairs is not None and not companion.sum_is_zero(known.pairs, timeout=timeout):
            sent, expected = list(known.description.sent), list(known.description.expected)
            note = f"sends {sent}, expects {expected} elements"
            raise self._mismatch(companion, replace(entry.described, note=note))

    def _mismatch(self, companion: Companion, call: CollectiveCall) -> CollectiveMismatchError:
        texts = companion.exchange(json.dumps(call.to_data()).encode())
        calls = [CollectiveCall.from_data(json.loads(text)) for text in texts]
        by_rank = dict(zip(self._identity.ranks, calls, strict=True))
        return CollectiveMismatchError(mismatch_report(_in_short(by_rank)))


def _pairs(described: Description, rank: int) -> int:
    def one(sender: int, receiver: int, elements: int) -> int:
        return fingerprint((sender, receiver, elements)) & ((1 << _HASH_BITS) - 1)

    sent = sum(one(rank, other, elements) for other, elements in enumerate(described.sent))
    return sent - sum(one(other, rank, elements) for other, elements in enumerate(described.expected))


def _in_short(calls: Mapping[int, CollectiveCall]) -> Mapping[int, CollectiveCall]:
    """Return the calls with those tensors alone that differ, where they are alike but for some of many tensors."""
    counts = {len(call.shapes) for call in calls.values()}
    if len({call.title for call in calls.values()}) > 1 or len(counts) > 1 or max(counts) <= _SHOWN:
        return calls
    count = counts.pop()
    kinds = {
        rank: list(
            zip(call.dtypes * count if len(call.dtypes) == 1 else call.dtypes, call.shapes, strict=True)
        )
        for rank, call in calls.items()
    }
    wrong = [i for i in range(count) if len({of_rank[i] for of_rank in kinds.values()}) > 1]
    where = ", ".join(map(str, wrong[:_SHOWN])) + (", ..." if len(wrong) > _SHOWN else "")
    return {
        rank: replace(
            call,
            operation=f"{call.title} of {count} tensors, at {where}",
            reduce_op=None,
            root=None,
            dtypes=tuple(kinds[rank][i][0] for i in wrong),
            shapes=tuple(kinds[rank][i][1] for i in wrong),
        )
        for rank, call in calls.items()
    }


def _timeout(group: dist.ProcessGroup) -> float:
    """Return how long the operations of a group wait for other ranks [s]."""
    timeout = timeout_of(group)
    return float((dist.default_pg_timeout if timeout is None else timeout).total_seconds())
