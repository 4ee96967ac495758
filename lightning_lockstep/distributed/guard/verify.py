"""`guard="verify"`: every collective compared between the ranks of its group before it runs."""

from __future__ import annotations

import array
import json
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_lockstep._text import plain_table, ranks_in_words, say
from lightning_lockstep.distributed.c10d_operators import (
    OPERATIONS,
    parameters_in_words,
)
from lightning_lockstep.distributed.failure.record import own_place
from lightning_lockstep.distributed.guard.call_description import (
    DispatchedCall,
    Finish,
    GroupIdentity,
    Hook,
    description,
    signature,
)
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_number,
    batch_of_call,
    call_site,
    fingerprint,
    mismatch_report,
)
from lightning_lockstep.distributed.guard.records import (
    Outstanding,
    RecordedCall,
    compares_calls,
    group_titles,
)
from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveMismatchError


def _identity(group: dist.ProcessGroup) -> GroupIdentity:
    name = group.group_name
    title, ranks = group_titles().get(name, (name, tuple(range(group.size()))))
    return GroupIdentity(title, ranks, group.rank())


# -- A second gloo group of a process group, over which its ranks compare what they are about to call --
# It is built by the ranks of the group alone, and torch.distributed does not know of it: what is sent over
# it goes past torch's dispatcher, and is not seen by whoever watches that. Its connections are TCP
# connections of this process like those of the backend, and are ended with them when the guard has found
# out why a rank does not come.

_PREFIX = "lightning_lockstep/verify"
_ARRIVED = "arrived"


class ComparisonGroup:
    """Compares numbers and exchanges texts between the ranks of a group; used by one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: float) -> None:
        # A separate connection, so that nobody else has to wait for the store meanwhile.
        own = dist.PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store)
        number = _wait_for_all(own, size, timeout)  # DistStoreError: not all came in time
        self._rank, self._size = rank, size
        self._timeout = 0.0  # that the options have [s]
        # Torch states no types for its methods.
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(str(number), own), rank, size, timedelta(seconds=timeout)
        )
        self._memory = array.array("q", [0, 0])  # faster to read and fill than a tensor
        self._tensors = [torch.frombuffer(self._memory, dtype=torch.int64)]
        self._greatest = dist.AllreduceOptions()
        self._greatest.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

    def all_equal(self, number: int, timeout: float) -> bool:
        """Return whether all ranks, which all ask, have the same number, of 63 bits at most."""
        # Gloo's send and recv, on the calling thread, look cheaper, but often take 2 to 4 ms where there are no more
        # cores than ranks; its all-gather takes longer from 4 ranks on.
        memory = self._memory
        memory[0], memory[1] = number, -number
        if timeout != self._timeout:
            self._timeout, self._greatest.timeout = timeout, timedelta(seconds=timeout)
        self._gloo.allreduce(self._tensors, self._greatest).wait()
        return memory[0] == -memory[1]

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in the order of the group."""
        lengths = [int.from_bytes(row, "little") for row in self._gathered(len(data).to_bytes(8, "little"))]
        rows = self._gathered(data.ljust(max(*lengths, 1), b"\0"))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _gathered(self, row: bytes) -> list[bytes]:  # as long on every rank
        rows = [bytearray(len(row)) for _ in range(self._size)]
        own, *places = (torch.frombuffer(one, dtype=torch.uint8) for one in (bytearray(row), *rows))
        self._gloo.allgather([places], [own]).wait()
        return list(map(bytes, rows))


def _wait_for_all(store: dist.Store, size: int, timeout: float) -> int:
    """Wait until all ranks are here, and return how many such groups were made over this store before."""
    # The ranks are counted rather than named: a group may be made anew with the name of an earlier one, and
    # have the same store. Nobody can arrive for the next one before all have arrived for this one. It is
    # Python that waits, so that a signal is noticed.
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


# -- Compares what the ranks of a group call, before each collective runs --

#: The operators that are compared. Only two ranks take part in sends and receives; a monitored barrier finds out by
#: itself, and sooner than a comparison would, who has not arrived.
COMPARED = tuple(set(OPERATIONS) - {"send", "recv_", "recv_any_source_", "monitored_barrier_"})
_CACHED = 10_000
_SHOWN = 8  # tensors of one call, and rows of parameters


class CallVerifier:
    """Raises on every rank of a group where its ranks are about to call different collectives."""

    # Compared are operation, reduction, root, dtypes, shapes of what this rank gives or gets, and the batch of a fit.
    # After an error the group can be used as before. It also is a
    # :class:`~lightning_lockstep.distributed.guard.records.CallRecorder` that knows the last call of each group: which
    # of its ranks have made an earlier one alike has been compared.
    #
    # Each collective waits until all ranks of its group have called it, asynchronous ones too. So ranks that
    # call asynchronous collectives of several groups in different orders, or that are to send or receive
    # between two collectives that others have called already, wait for each other until the group's timeout.

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupVerifier | None] = (
            weakref.WeakKeyDictionary()
        )
        self._making = threading.Lock()
        self._hook: Hook | None = None
        self._said: set[str] = set()

    def start(self) -> None:
        """Compare from now on; on all ranks between the same two collectives, as :meth:`stop`."""
        # One that compares waits for one that does not.
        if self._hook is None:
            self._hook = Hook(self._before, operators=COMPARED)
        self._look_for_unseen_groups()

    def stop(self) -> None:
        """Compare nothing more; a second call is harmless."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._groups.clear()

    @property
    def is_recording(self) -> bool:
        return self._hook is not None

    def outstanding(self) -> Sequence[Outstanding]:
        calls = [one.call for one in self.calls() if not one.done]
        return [Outstanding(call.group, call.number) for call in calls]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        with self._making:  # the thread that asks is not the one that makes groups
            found = [group.last for group in self._groups.values() if group is not None]
        return sorted((one.recorded() for one in found if one is not None), key=lambda one: one.started)

    def _before(self, call: DispatchedCall) -> Finish | None:
        with self._making:
            if call.group not in self._groups:
                self._groups[call.group] = self._made(call.group)
            group = self._groups[call.group]
        return None if group is None else group.called(call)

    def _made(self, group: dist.ProcessGroup) -> _GroupVerifier | None:
        self._look_for_unseen_groups()
        if group.size() < 2 or compares_calls(group):
            return None
        _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
        if store is None:
            self._cannot_see(group, "torch.distributed has no store for this group")
            return None
        if dist.get_backend(group) == "fake":
            self._cannot_see(group, "the backend 'fake' has no other ranks")
            return None
        # Only the backends of a group know its timeout.
        timeouts = (getattr(group._get_backend(one).options, "_timeout", None) for one in group._device_types)
        timeout = next(filter(None, timeouts), dist.default_pg_timeout)
        return _GroupVerifier(_identity(group), store, timeout.total_seconds())

    def _look_for_unseen_groups(self) -> None:
        if not process_group_exists():
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            foreign = isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup
            if foreign and group.size() > 1 and not compares_calls(group):
                self._cannot_see(group, f"its class {type(group).__name__} is written in Python")

    def _cannot_see(self, group: dist.ProcessGroup, why: str) -> None:
        title = _identity(group).title
        if title not in self._said:
            self._said.add(title)
            if group.rank() == 0:
                say(
                    f"lightning-lockstep: guard='verify' does not compare the collectives of process group {title!r}:"
                    f" {why}"
                )


class _LastCall:
    """The last call of a group, which it may wait in."""

    def __init__(self, call: CollectiveCall, number: int) -> None:
        self._call = replace(call, number=number, site=call_site())
        self._called = time.time()
        self._work: dist.Work | None = None
        self._done = False

    def recorded(self) -> RecordedCall:
        work = self._work
        if work is not None and work.is_completed():
            self._done, self._work = True, None  # the handle holds the tensors
        return RecordedCall(call=self._call, started=self._called, done=self._done)

    def started(self, work: dist.Work | None) -> None:
        """Note that the backend has it; ``work`` is ``None`` if there is nothing to wait for."""
        if work is None or work.is_completed() or not _tells_completion(work):
            self._done = True
        else:
            self._work = work


def _tells_completion(work: dist.Work) -> bool:
    """Return whether the handle of a collective ever says that it is complete."""
    # Gloo's reduce-scatter is an all-reduce whose result is copied by the ``wait`` of a handle that never does.
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


class _GroupVerifier:
    """Compares the calls of one group."""

    def __init__(
        self,
        identity: GroupIdentity,
        store: dist.Store,
        timeout: float,  # how long operations of the group wait for other ranks [s]
    ) -> None:
        self._identity, self._store, self._timeout = identity, store, timeout
        self._count = 0  # of calls so far
        self.last: _LastCall | None = None
        # What was worked out for a call, for the next one like it: its description, and a number for it.
        self._known: dict[Hashable, tuple[CollectiveCall, int]] = {}
        self._comparison: ComparisonGroup | None = None
        # Held until the backend has the operation: threads must give it those of one group as they were compared.
        self._lock = threading.RLock()

    def called(self, call: DispatchedCall) -> Finish:
        """Compare a call; return what to call once the backend has it."""
        self._lock.acquire()
        last = None
        try:
            described, number = self._looked_up(call)
            batch = batch_of_call()
            self._count += 1
            self.last = last = _LastCall(described, self._count)
            if not self._agree(number ^ batch_number(batch), call.timeout or self._timeout):
                raise self._mismatch(replace(last.recorded().call, batch=batch))
        except BaseException:
            if last is not None:
                last.started(None)
            self._lock.release()
            raise

        def finish(work: dist.Work | None) -> None:
            last.started(work)
            self._lock.release()

        return finish

    def _looked_up(self, call: DispatchedCall) -> tuple[CollectiveCall, int]:
        key = signature(call)
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _CACHED:
                self._known.clear()
            described = description(call, self._identity)
            known = self._known[key] = described, fingerprint(described.compared())
        return known

    def _agree(self, number: int, timeout: float) -> bool:
        if self._comparison is None:
            size = len(self._identity.ranks)
            self._comparison = ComparisonGroup(self._store, self._identity.rank, size, timeout=timeout)
        return self._comparison.all_equal(number, timeout)

    def _mismatch(self, call: CollectiveCall) -> CollectiveMismatchError:
        assert self._comparison is not None
        call = replace(call, where=own_place(batches=True))
        texts = self._comparison.exchange(json.dumps(call.to_data()).encode())
        calls = [CollectiveCall.from_data(json.loads(text)) for text in texts]
        by_rank = dict(zip(self._identity.ranks, calls, strict=True))
        return CollectiveMismatchError(mismatch_report(_in_short(by_rank)))


def _in_short(calls: Mapping[int, CollectiveCall]) -> Mapping[int, CollectiveCall]:
    """Return the calls with those tensors alone that differ, where they are equal but for some of many tensors."""
    counts = {len(call.shapes) for call in calls.values()}
    if len({call.title for call in calls.values()}) > 1 or len(counts) > 1 or max(counts) <= _SHOWN:
        return calls
    count = counts.pop()
    kinds = {
        rank: list(
            zip(call.dtypes * (count // len(call.dtypes)), call.shapes, strict=True)
        )  # one dtype, or all
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


# -- The parameters of the ranks, compared before DDP makes its buckets of them --


def verify_parameters(
    module: nn.Module, gather: Callable[[Any], list[Any]], *, buffers: bool = False
) -> None:
    """Raise on all ranks where they have other parameters, or another order; all call it: a gather of a number each."""
    # DDP compares shapes only: where two of one shape change places, it adds the gradients of one to the other's.
    own, what = parameters_in_words(module), "parameters whose gradients DistributedDataParallel is to reduce"
    if buffers:
        own += [f"{name} {tuple(b.shape)} {str(b.dtype)[6:]} buffer" for name, b in module.named_buffers()]
        what = "parameters and buffers that one model has on all of them,"
    if len(set(gather(fingerprint(tuple(own))))) == 1:
        return
    rows = [
        (number, ranks_in_words(rank for rank, one in enumerate(texts) if one == text), text)
        for number, texts in enumerate(zip_longest(*gather(own), fillvalue="-"))
        if len(set(texts)) > 1
        for text in dict.fromkeys(texts)
    ]
    more = f"\n  and {len(rows) - _SHOWN} more rows" if len(rows) > _SHOWN else ""
    raise CollectiveMismatchError(
        f"ranks disagree on the {what} in this order\n\n"
        f"{plain_table(('parameter', 'ranks', 'have'), rows[:_SHOWN])}{more}\n\nMake the same modules in the same order"
        " on all ranks, and freeze the same ones: no loop over a set, and nothing that goes by the rank."
    )
