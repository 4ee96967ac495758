"""Sees each operation of torch.distributed before it runs.

Torch calls its process groups through operators of its dispatcher: from Python, from DDP's reducer, from autograd's
threads, for functional collectives and in inference mode alike. A kernel in front of those of the backends sees them
all, whatever the backend. Process groups that are written in Python are called past the dispatcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep._doors.torch_internals import destroy_library, keys_after
from lightning_lockstep.distributed.c10d_operators import (
    OPERATIONS,
    Operator,
    answered_locally,
    operator_named,
)
from lightning_lockstep.distributed.local.reduction_kinds import noting_reductions, reduction_kind

__all__ = ["POINT_TO_POINT", "DispatchedCall", "Finish", "Hook", "Observer"]

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
    """Lets an observer see the operations of this process until it is removed.

    It is silent while collectives are answered on this rank alone (``local_collectives``). Several hooks may be there
    at once. Put in place and remove them while no operation is being called.
    """

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
                    destroy_library(_libraries.pop(name))
            self._operators = ()
        self._noting.close()


def _kernel(name: str) -> Callable[..., Any]:
    operator = operator_named(name)
    redispatch = operator.overload.redispatch
    after = keys_after(_KEY)

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
