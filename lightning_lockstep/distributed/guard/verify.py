"""`guard="verify"`: the ranks of a group compare each collective before it runs."""

from __future__ import annotations

import array
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_lockstep._text import plain_table, ranks_in_words
from lightning_lockstep.distributed.guard.collective_call import (
    CollectiveCall,
    batch_number,
    batch_of_call,
    call_site,
    fingerprint,
    mismatch,
)
from lightning_lockstep.distributed.guard.rank_state import CallRecorder, RecordedCall, group_titles
from lightning_lockstep.distributed.local_collectives import (
    OPERATIONS,
    Operator,
    answered_locally,
    reduction_kind,
)
from lightning_lockstep.errors import CollectiveMismatchError

# -- One operation at torch's dispatcher: a kernel that runs before those of the backends sees all calls --

_KEY = "BackendSelect"  # the last dispatch key before those of the backends
#: The operators that are compared. Only two ranks take part in sends and receives; a monitored barrier finds out by
#: itself, and sooner than a comparison would, which rank has not arrived.
COMPARED = tuple(set(OPERATIONS) - {"send", "recv_", "recv_any_source_", "monitored_barrier_"})


class _DispatchedCall:
    """One call of an operator, as torch's dispatcher was given it."""

    __slots__ = ("_args", "operator", "reduce_op", "root", "tensors")

    def __init__(self, operator: Operator, args: Sequence[Any]) -> None:
        self.operator, self._args = operator, args
        given = self._argument("reduce_op")
        # ``None`` if it does not reduce, or if torch 2.9 does not tell how.
        self.reduce_op = None if given is None else reduction_kind(given)
        self.root: int | None = self._argument("root_rank")  # in the group; sends to all or receives from all
        # What this rank alone gives or gets, whose shape is equal on all ranks: in a gather the second argument.
        tensors = [] if operator.name == "barrier" else args[1 if "gather" in operator.name else 0]
        self.tensors: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else tensors

    def _argument(self, name: str, default: Any = None) -> Any:
        return self.operator.argument_or(self._args, name, default)

    @property
    def timeout(self) -> float | None:
        """The longest wait for the other ranks that the caller has given [s], or ``None``."""
        milliseconds = self._argument("timeout", -1)
        return milliseconds / 1000 if milliseconds > 0 else None

    def signature(self) -> Hashable:
        """Return what the description depends on, which is cheaper to make than the description."""
        kinds = ((one.shape, one.dtype, one.device.type, one.layout) for one in self.tensors)
        return self.operator.name, self.reduce_op, self.root, *kinds

    def description(self, group: str, ranks: Sequence[int]) -> CollectiveCall:
        """Return what must be equal on all ranks of a group, without number and call site."""
        dtypes = [_dtype(tensor) for tensor in self.tensors]
        chosen = self.operator.name.startswith("alltoall")  # the ranks may choose how much they send
        return CollectiveCall(
            operation=OPERATIONS[self.operator.name],
            group=group,
            dtypes=tuple(dtypes if len(set(dtypes)) > 1 else dtypes[:1]),
            shapes=() if chosen else tuple(tuple(tensor.shape) for tensor in self.tensors),
            reduce_op=self.reduce_op,
            root=None if self.root is None else ranks[self.root],
        )


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        name += f" {str(tensor.layout).removeprefix('torch.')}"
    return name if tensor.device.type == "cpu" else f"{name} on {tensor.device.type}"


# -- A second gloo group for a process group, over which its ranks compare what they are about to call --
# Only the ranks of the group build it, and torch.distributed does not know about it, so its operations bypass torch's
# dispatcher, and nothing that watches the dispatcher sees them. Its TCP connections belong to this process like those
# of the backend, and the guard ends them together with those once it has found out why a rank does not come.

_PREFIX = "lightning_lockstep/verify"


class ComparisonGroup:
    """Compares numbers and exchanges bytes between the ranks of a group; used by one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: float) -> None:
        # A separate connection, so that other users of the store do not wait for this one.
        own = dist.PrefixStore(_PREFIX, store.clone() if hasattr(store, "clone") else store)
        number = _wait_for_all(own, rank, size, timeout)
        self._rank, self._size = rank, size
        self._timeout = 0.0  # the one in the options [s]
        # Torch has no type hints for its methods.
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(str(number), own), rank, size, timedelta(seconds=timeout)
        )
        self._memory = array.array("q", [0, 0])  # faster to read and fill than a tensor
        self._tensors = [torch.frombuffer(self._memory, dtype=torch.int64)]
        self._greatest = dist.AllreduceOptions()
        self._greatest.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

    def all_equal(self, number: int, timeout: float) -> bool:
        """Return whether all ranks have the same number, of 63 bits at most; all ranks must call this."""
        # Gloo's send and recv, on the calling thread, look cheaper, but often take 2 to 4 ms if there are no more cores
        # than ranks; its all-gather takes longer from 4 ranks on.
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

    def _gathered(self, row: bytes) -> list[bytes]:  # rows have the same length on every rank
        rows = [bytearray(len(row)) for _ in range(self._size)]
        own, *places = (torch.frombuffer(one, dtype=torch.uint8) for one in (bytearray(row), *rows))
        self._gloo.allgather([places], [own]).wait()
        return list(map(bytes, rows))


def _wait_for_all(store: dist.Store, rank: int, size: int, timeout: float) -> int:
    """Wait until all ranks have arrived, and return for how many such groups they did so before over this store."""
    # Each rank counts its groups, because one that is made anew may have the name and the store of an earlier one. A
    # rank that comes again after a timeout arrives for the same group. Python waits, so that signals are handled.
    number = store.add(f"groups/{rank}", 0)
    arrivals = [f"arrived/{number}/{one}" for one in range(size)]
    store.set(arrivals[rank], "")
    deadline, pause = time.monotonic() + timeout, 0.001
    while not store.check(arrivals):
        if time.monotonic() > deadline:
            missing = sum(not store.check([one]) for one in arrivals)
            raise dist.DistStoreError(
                f"Timed out after {timeout:g} s: {missing} of {size} ranks have not called the first collective of"
                " their process group."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    store.add(f"groups/{rank}", 1)
    return number


# -- Compares what the ranks of a group call, before each collective runs --

_CACHED = 10_000  # at most this many descriptions of calls
_SHOWN = 8  # at most this many rows of parameters


class CallVerifier(CallRecorder):
    """Raises on every rank of a group if its ranks are about to call different collectives."""

    # It compares operation, reduction, root, dtypes, shapes of what this rank gives or gets, and the batch of a fit.
    # After a mismatch the group can be used as before. It knows each group's last call: the earlier ones were equal.
    #
    # Each collective, an asynchronous one too, waits until all ranks of its group have called it. So ranks wait for
    # each other until the group's timeout if they call asynchronous collectives of several groups in different orders,
    # or if one is to send or receive between two collectives that another one has called already.

    def __init__(self) -> None:
        self._groups = weakref.WeakKeyDictionary[dist.ProcessGroup, "_GroupVerifier | None"]()
        self._making = threading.Lock()
        self._library: Any = None  # torch's registration of the kernels

    def start(self) -> None:
        """Compare from now on; call this, and :meth:`stop`, on all ranks between the same two collectives."""
        # Otherwise a rank that compares would wait for one that does not.
        if self._library is None:
            self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            for name in COMPARED:
                self._library.impl(name, self._kernel(name), _KEY, with_keyset=True)

    def stop(self) -> None:
        """Compare nothing from now on; a second call does nothing."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            with self._making:
                self._groups.clear()

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        with self._making:  # the guard's thread asks, while another one may add a group
            found = [group.last for group in self._groups.values() if group is not None]
        return [one.recorded() for one in found if one is not None]

    def _kernel(self, name: str) -> Callable[..., Any]:
        operator = Operator(name)
        redispatch = operator.overload.redispatch
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keyset: Any, *args: Any) -> Any:
            boxed = operator.argument_or(args, "process_group")
            group = None if answered_locally() else self._group_of(boxed)
            if group is None:
                return redispatch(keyset & after, *args)
            # Held until the backend has the call: it must get the calls of a group in the order they were compared.
            with group.lock:
                last, work = group.compare(_DispatchedCall(operator, args)), None
                try:
                    result = redispatch(keyset & after, *args)
                    if operator.returned:
                        work = dist.Work.unbox(result if operator.returned == 1 else result[-1])
                    return result
                finally:
                    last.note(work)

        return kernel

    def _group_of(self, boxed: Any) -> _GroupVerifier | None:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(boxed)
        with self._making:
            if group not in self._groups:
                self._groups[group] = _verifier_of(group)
            return self._groups[group]


def _verifier_of(group: dist.ProcessGroup) -> _GroupVerifier | None:
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    if type(group) is not dist.ProcessGroup or group.size() < 2 or store is None:
        return None
    return _GroupVerifier(group, store)


@dataclass
class _LastCall:
    """The last call of a group, in which this rank may be waiting."""

    call: CollectiveCall
    called: float  # [s since 1970]
    work: dist.Work | None = None  # once the backend has the call, until it is done
    done: bool = False

    def recorded(self) -> RecordedCall:
        if self.work is not None:
            self.note(self.work)
        return RecordedCall(call=self.call, started=self.called, done=self.done)

    def note(self, work: dist.Work | None) -> None:
        """Note the handle that the backend has returned; ``None`` if there is nothing to wait for."""
        self.done = work is None or work.is_completed() or not _tells_completion(work)
        self.work = None if self.done else work  # it holds the tensors


def _tells_completion(work: dist.Work) -> bool:
    """Return whether the handle of a collective ever says that it is complete."""
    # The handle of gloo's reduce-scatter never does: its ``wait`` copies the result of an all-reduce.
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


class _GroupVerifier:
    """Compares the calls of one group; used by the thread that holds its lock."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        default = group.group_name, tuple(range(group.size()))
        self._title, self._ranks = group_titles().get(group.group_name, default)
        self._store, self._rank = store, group.rank()
        # Only the backends of a group know how long its operations wait for other ranks.
        timeouts = (getattr(group._get_backend(one).options, "_timeout", None) for one in group._device_types)
        self._timeout = next(filter(None, timeouts), dist.default_pg_timeout).total_seconds()
        self._count = 0  # of calls so far
        self.last: _LastCall | None = None
        # The description and the hash of each kind of call, by its signature, for the next call like it.
        self._known: dict[Hashable, tuple[CollectiveCall, int]] = {}
        self._comparison: ComparisonGroup | None = None
        self.lock = threading.RLock()

    def compare(self, call: _DispatchedCall) -> _LastCall:
        """Raise on all ranks unless all have made the same call; return the record of this call."""
        key = call.signature()
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _CACHED:
                self._known.clear()
            described = call.description(self._title, self._ranks)
            known = self._known[key] = described, fingerprint(described.compared())
        batch, timeout = batch_of_call(), call.timeout or self._timeout
        self._count += 1
        here = replace(known[0], number=self._count, site=call_site())
        self.last = last = _LastCall(here, time.time())
        try:
            if self._comparison is None:
                self._comparison = ComparisonGroup(self._store, self._rank, len(self._ranks), timeout=timeout)
            if not self._comparison.all_equal(known[1] ^ batch_number(batch), timeout):
                raise mismatch(self._ranks, self._comparison.exchange(replace(here, batch=batch).to_bytes()))
        except BaseException:
            last.note(None)
            raise
        return last


# -- The parameters of the ranks, compared before DDP makes its buckets of them --


def parameters_in_words(module: nn.Module) -> list[str]:
    """Return for each parameter what must be equal on all ranks, in the order in which DDP reduces gradients."""

    def shape(parameter: Any) -> object:
        if is_lazy(parameter):
            return "of unknown shape"
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    return [
        f"{name} {shape(p)} {str(p.dtype).removeprefix('torch.')} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in module.named_parameters()
    ]


def verify_parameters(module: nn.Module, gather: Callable[[Any], list[Any]], *, buffers: bool = False) -> None:
    """Raise on all ranks if their parameters, or the order of these, differ; all call this, and it gathers a number."""
    # DDP compares shapes only: if two of one shape change places, it adds the gradients of one to the other's.
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
        " on all ranks, and freeze the same ones: no loop over a set, and nothing that depends on the rank."
    )
