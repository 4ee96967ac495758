"""A collective at torch's dispatcher: seen before it runs, and described for the comparison of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, repeat
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.c10d_operators import (
    OPERATIONS,
    Operator,
    answered_locally,
    noting_reductions,
    operator_named,
    reduction_kind,
)
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall

# -- Sees each operation of torch.distributed before it runs --
# Torch calls its process groups through operators of its dispatcher: from Python, from DDP's reducer, from
# autograd's threads, for functional collectives, and in inference mode. A kernel in front of those of
# the backends sees them all, whatever the backend. Process groups that are written in Python are called
# past the dispatcher.

#: Operators that only two ranks take part in.
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")

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
        """How it reduces, such as ``sum``; ``None`` where it does not."""
        given = self._argument("reduce_op")
        return None if given is None else reduction_kind(given)

    @property
    def group_root(self) -> int | None:
        """The one rank, in the group, that sends to all or receives from all."""
        root: int | None = self._argument("root_rank")
        return root

    @property
    def group_peer(self) -> int | None:
        """The other rank, in the group, of a send or receive; ``None`` where any may send."""
        peer: int | None = self._argument("dst", self._argument("src"))
        return peer

    @property
    def splits(self) -> tuple[Sequence[int], Sequence[int]]:
        """Rows of each rank in output and input of ``all_to_all_single``; empty for equal parts."""
        return self._argument("output_split_sizes", ()), self._argument("input_split_sizes", ())

    @property
    def timeout(self) -> float | None:
        """Longest wait for the other ranks that the caller has asked for [s]."""
        milliseconds = self._argument("timeout", -1)
        return milliseconds / 1000 if milliseconds > 0 else None

    def flat_tensors(self) -> list[Tensor]:
        """Return all tensors, in their order."""
        flat: list[Tensor] = []
        for given in self.tensors:
            _flatten(given, flat)
        return flat

    def _argument(self, name: str, default: Any = None) -> Any:
        return self.operator.argument(self._args, name, default)


def _flatten(given: Any, flat: list[Tensor]) -> None:
    if isinstance(given, Tensor):
        flat.append(given)
    elif given is not None:
        for part in given:
            _flatten(part, flat)


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
        self._noting = ExitStack()
        if set(self._operators) - set(POINT_TO_POINT):
            self._noting.enter_context(noting_reductions())
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
        self._noting.close()


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
# A tensor that stands for one rank, next to a list with one tensor per rank, is left out where the list says
# the same. What a rank alone gives (the list of a root) is left out where it fits what all ranks give;
# where it does not fit, it is shown, and so differs from the others.


class GroupIdentity(NamedTuple):
    """A process group as reports name it."""

    title: str
    ranks: Sequence[int]  # by their numbers in the default group, in the order of this one
    rank: int  # this one, in the group


class Description(NamedTuple):
    """One collective as this rank calls it."""

    call: CollectiveCall  # without number and call site
    sent: tuple[int, ...] = ()  # elements for each rank: must be as many as the receiver expects
    expected: tuple[int, ...] = ()  # elements from each rank


def signature(call: DispatchedCall) -> Hashable:
    """Return what the description of a call depends on, cheaper than the description."""
    splits = map(tuple, call.splits)
    return call.operator.name, call.reduce_op, call.group_root, *splits, *map(_kinds, call.tensors)


def _kinds(given: Any) -> Hashable:
    if isinstance(given, Tensor):
        return _kind(given)
    return None if given is None else tuple(map(_kinds, given))


def description(call: DispatchedCall, group: GroupIdentity) -> Description:
    """Return what must be equal on all ranks, and what must fit pairwise."""
    name, size = call.operator.name, len(group.ranks)
    sent: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    if name.startswith("alltoall"):
        outputs, inputs = _exchanged(call, size)
        sent, expected = tuple(inputs), tuple(outputs)
    shown = _compared_tensors(name, call.tensors, group)
    dtypes = [_dtype(tensor) for tensor in shown]
    root = call.group_root
    described = CollectiveCall(
        operation=call.operation,
        group=group.title,
        dtypes=tuple(dtypes if len(set(dtypes)) > 1 else dtypes[:1]),
        shapes=() if sent else tuple(tuple(tensor.shape) for tensor in shown),
        reduce_op=call.reduce_op,
        root=None if root is None else group.ranks[root],
    )
    return Description(described, sent, expected)


def uncompared(call: DispatchedCall, group: GroupIdentity) -> CollectiveCall:
    """Return the description of an operation that is recorded only, such as a send."""
    tensors = call.flat_tensors() if call.operator.name in POINT_TO_POINT else []
    peer = call.group_peer
    return CollectiveCall(
        operation=call.operation,
        group=group.title,
        dtypes=tuple(dict.fromkeys(map(_dtype, tensors))),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        root=None if peer is None else group.ranks[peer],
    )


# -- which tensors of each operator are compared ---------------------------------------------------------


def _compared_tensors(name: str, given: Sequence[Any], group: GroupIdentity) -> list[Tensor]:
    if name in _RULES:
        rule, of_rank, of_all = _RULES[name]
        pairs = zip(_as_list(given[of_rank]), chain(_as_list(given[of_all]), repeat(())), strict=False)
        return [tensor for one, every in pairs for tensor in rule(one, every, group)]
    if name == "barrier":
        return []
    if name.startswith("alltoall"):  # dtypes alone are compared, and sizes in pairs
        return [tensor for tensors in given for tensor in _as_list(tensors)]
    return list(given[1 if name == "allgather_coalesced_" else 0])


def _list(one: Tensor, parts: Sequence[Tensor], group: GroupIdentity) -> list[Tensor]:
    """A list with a part per rank, and the part of this one; parts may differ if all ranks give the same list."""
    own, kinds = _kind(one), [_kind(part) for part in parts]
    if len(kinds) != len(group.ranks) or kinds[group.rank] != own:
        return [one, *parts]
    return [one] if all(kind == own for kind in kinds) else list(parts)


def _list_of_root(one: Tensor, parts: Sequence[Tensor], group: GroupIdentity) -> list[Tensor]:
    """The list is there on the root alone, and its parts must be equal."""
    return [one, *(part for part in parts if _kind(part) != _kind(one))]


def _gathered_whole(part: Tensor, whole: Tensor, group: GroupIdentity) -> list[Tensor]:
    return [part] if _are_parts(part, whole, group) else [whole, part]


def _scattered_whole(part: Tensor, whole: Tensor, group: GroupIdentity) -> list[Tensor]:
    return [whole] if _are_parts(part, whole, group) else [whole, part]


def _are_parts(part: Tensor, whole: Tensor, group: GroupIdentity) -> bool:
    """Return whether a tensor holds such parts of all ranks, one after another."""
    together = (len(group.ranks) * (part.shape[0] if part.dim() else 1), *part.shape[1:])
    return whole.shape == together and _kind(whole)[1:] == _kind(part)[1:]


# Of each operator the rule, which argument has the tensor of one rank, and which that of all.
_RULES: dict[str, tuple[Callable[..., list[Tensor]], int, int]] = {
    "allgather_": (_list, 1, 0),
    "reduce_scatter_": (_list, 0, 1),
    "gather_": (_list_of_root, 1, 0),
    "scatter_": (_list_of_root, 0, 1),
    "_allgather_base_": (_gathered_whole, 1, 0),
    "allgather_into_tensor_coalesced_": (_gathered_whole, 1, 0),
    "_reduce_scatter_base_": (_scattered_whole, 0, 1),
    "reduce_scatter_tensor_coalesced_": (_scattered_whole, 0, 1),
}


def _exchanged(call: DispatchedCall, size: int) -> tuple[list[int], list[int]]:
    """Return the elements from and for each rank."""
    if call.operator.name == "alltoall_":
        return [t.numel() for t in call.tensors[0]], [t.numel() for t in call.tensors[1]]
    outputs, inputs = (
        _elements(tensor, splits, size) for tensor, splits in zip(call.tensors, call.splits, strict=True)
    )
    return outputs, inputs


def _elements(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    if splits:
        return [rows * prod(tensor.shape[1:]) for rows in splits]
    return [tensor.numel() // size] * size


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device.type, tensor.layout


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided:
        name += f" {str(tensor.layout).removeprefix('torch.')}"
    return name if tensor.device.type == "cpu" else f"{name} on {tensor.device.type}"


def _as_list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors
