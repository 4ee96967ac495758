"""A collective at torch's dispatcher: seen before it runs, and described for the comparison of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.c10d_operators import (
    OPERATIONS,
    Operator,
    answered_locally,
    operator_named,
    reduction_kind,
)
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall

# -- Sees each operation of torch.distributed before it runs --
# Torch calls its process groups through operators of its dispatcher: from Python, from DDP's reducer, from
# autograd's threads, for functional collectives, and in inference mode. A kernel in front of those of
# the backends sees them all, whatever the backend. Process groups that are written in Python are called
# past the dispatcher.

_KEY = "BackendSelect"  # the last one before those of the backends


class DispatchedCall:
    """One operation as torch's dispatcher was given it; what costs time is worked out when asked for."""

    __slots__ = ("_args", "group", "operator")

    def __init__(self, operator: Operator, args: Sequence[Any]) -> None:
        self.operator, self._args = operator, args
        self.group: dist.ProcessGroup = dist.ProcessGroup.unbox(self._argument("process_group"))

    @property
    def operation(self) -> str:
        """Its name in torch.distributed, such as ``all_reduce``."""
        return self.operator.operation

    @property
    def tensors(self) -> Sequence[Any]:
        """What it writes to first: tensors, lists of them or lists of those."""
        return self._args[: self.operator.tensors]

    @property
    def reduce_op(self) -> str | None:
        """How it reduces, such as ``sum``; ``None`` if it does not, or torch 2.9 does not say."""
        given = self._argument("reduce_op")
        return None if given is None else reduction_kind(given)

    @property
    def group_root(self) -> int | None:
        """The one rank, in the group, that sends to all or receives from all."""
        root: int | None = self._argument("root_rank")
        return root

    @property
    def timeout(self) -> float | None:
        """Longest wait for the other ranks that the caller has asked for [s]."""
        milliseconds = self._argument("timeout", -1)
        return milliseconds / 1000 if milliseconds > 0 else None

    def _argument(self, name: str, default: Any = None) -> Any:
        return self.operator.argument(self._args, name, default)


#: Called once the backend has been given the operation, with its work handle; ``None`` where there is none, as when an
#: exception was raised.
Finish: TypeAlias = Callable[["dist.Work | None"], None]
#: Called before each operation, in its thread; may raise in its place, may return what to call afterwards.
Observer: TypeAlias = "Callable[[DispatchedCall], Finish | None]"

_lock = threading.Lock()
_observers: dict[str, tuple[Observer, ...]] = {}  # by operator
_libraries: dict[str, Any] = {}  # torch's registration of each kernel


class Hook:
    """Lets an observer see the operations of this process until it is removed."""

    # It is silent while collectives are answered on this rank alone (``local_collectives``). Several hooks
    # may be there at once. Put in place and remove them while no operation is being called.

    def __init__(self, observer: Observer, *, operators: Iterable[str] = tuple(OPERATIONS)) -> None:
        self._observer, self._operators = observer, tuple(operators)
        with _lock:
            for name in self._operators:
                _observers[name] = (*_observers.get(name, ()), observer)
                if name not in _libraries:
                    _libraries[name] = library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
                    library.impl(name, _kernel(name), _KEY, with_keyset=True)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove it; again is harmless."""
        with _lock:
            for name in self._operators:
                left = list(_observers[name])
                left.remove(self._observer)
                _observers[name] = tuple(left)
                if not left:
                    _libraries.pop(name)._destroy()
            self._operators = ()


def _kernel(name: str) -> Callable[..., Any]:
    operator = operator_named(name)
    redispatch = operator.overload.redispatch
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: Any, *args: Any) -> Any:
        if answered_locally():
            return redispatch(keyset & after, *args)
        call, finishes, work = DispatchedCall(operator, args), [], None
        try:
            for observer in _observers[name]:
                finish = observer(call)
                if finish is not None:
                    finishes.append(finish)
            result = redispatch(keyset & after, *args)
            if operator.returned:
                work = dist.Work.unbox(result if operator.returned == 1 else result[-1])
            return result
        finally:
            for finish in finishes:
                finish(work)

    return kernel


# -- What must be equal on all ranks of a group when they call a collective --


class GroupIdentity(NamedTuple):
    """A process group as reports name it."""

    title: str
    ranks: Sequence[int]  # by their numbers in the default group, in the order of this one
    rank: int  # this one, in the group


# Which argument of an operator has what each rank alone gives or gets, with the same shape on all of them; it is the
# first one of the others. How much a rank sends to another in an all-to-all the ranks may choose.
_OWN_TENSORS = {
    "allgather_": 1,
    "allgather_coalesced_": 1,
    "_allgather_base_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "gather_": 1,
}


def signature(call: DispatchedCall) -> Hashable:
    """Return what the description of a call depends on, cheaper than the description."""
    return call.operator.name, call.reduce_op, call.group_root, *map(_kind, _compared_tensors(call))


def description(call: DispatchedCall, group: GroupIdentity) -> CollectiveCall:
    """Return what must be equal on all ranks, without number and call site."""
    shown = _compared_tensors(call)
    dtypes = [_dtype(tensor) for tensor in shown]
    root = call.group_root
    return CollectiveCall(
        operation=call.operation,
        group=group.title,
        dtypes=tuple(dtypes if len(set(dtypes)) > 1 else dtypes[:1]),
        shapes=() if _may_differ(call) else tuple(tuple(tensor.shape) for tensor in shown),
        reduce_op=call.reduce_op,
        root=None if root is None else group.ranks[root],
    )


def _may_differ(call: DispatchedCall) -> bool:
    return call.operator.name.startswith("alltoall")


def _compared_tensors(call: DispatchedCall) -> list[Tensor]:
    if call.operator.name == "barrier":
        return []
    given = call.tensors[_OWN_TENSORS.get(call.operator.name, 0)]
    return [given] if isinstance(given, Tensor) else list(given)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device.type, tensor.layout


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        name += f" {str(tensor.layout).removeprefix('torch.')}"
    return name if tensor.device.type == "cpu" else f"{name} on {tensor.device.type}"
