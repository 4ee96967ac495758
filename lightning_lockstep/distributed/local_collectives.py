"""Collectives as torch's dispatcher sees them, and answered on one rank alone, for a step apart from the others.

Each rank is assumed to hold what this one holds: a gather gives copies of this rank's tensor, a sum gives it times the
number of ranks, a broadcast leaves the tensor of a receiving rank as it is. What steps and their backwards call is
answered. Anything else, objects of another rank and sizes that differ raise :class:`UnansweredCollectiveError`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveError

# -- The operators of torch's `c10d`, by which torch.distributed calls its process groups through the dispatcher --

#: What torch.distributed calls the operation of each operator.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}


class Operator:
    """One operator, as its schema describes it."""

    def __init__(self, name: str) -> None:
        self.name = name  # in ``c10d``, such as ``allreduce_``
        self.overload: Any = getattr(torch.ops.c10d, name).default
        schema = self.overload._schema  # the names and the number of what it is given and returns
        # Where each argument is, by its name in the schema; those before the process group are tensors.
        self.positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
        self.returned = len(schema.returns)  # the last value is the work handle

    def argument_or(self, args: Sequence[Any], name: str, default: Any = None) -> Any:
        """Return an argument by its name, or ``default`` if it was left out or the operator does not have it."""
        position = self.positions.get(name)
        return default if position is None or position >= len(args) else args[position]


_Kind: Any = dist.ReduceOp.RedOpType


def reduction_kind(given: Any) -> str | None:
    """Return how a collective reduces, such as ``sum``; ``None`` in a kernel of torch 2.9, where Python cannot ask."""
    op = given if isinstance(given, _Kind) else getattr(given, "op", None)
    if op is None:  # the dispatcher's class has no methods in torch 2.9
        return None
    kind = op if isinstance(op, _Kind) else _Kind(op())
    return str(kind.name).lower()


# -- Collectives that this rank answers alone --

# Torch calls its process groups through the dispatcher: from Python, from autograd, from compiled code and for
# functional collectives. So the kernels of the ``c10d`` operators are replaced, and whatever does not communicate runs
# exactly as before. The process group of the backend ``mpi4py`` is written in Python and called past the dispatcher;
# it calls :func:`answer` itself.
_KEYS = ("CPU", "CUDA", "XPU", "PrivateUse1", "SparseCPU", "SparseCUDA")
# Torch puts these around what it does for them.
_OBJECT_FUNCTIONS = {unwrap(one).__code__ for one in (dist.broadcast_object_list, dist.scatter_object_list)}


class UnansweredCollectiveError(CollectiveError):
    """A step that runs on one rank alone called for data that only another rank has."""


def _unanswered(operation: str, why: str) -> UnansweredCollectiveError:
    return UnansweredCollectiveError(
        f"{operation.removesuffix('_')} cannot be answered in a step that runs on one rank alone: {why}."
    )


# The operators that were answered so far, of all threads; the innermost list is last.
_answers: list[list[str]] = []


def answered_locally() -> bool:
    """Return whether collectives are answered on this rank now, so that no other rank takes part in them."""
    return bool(_answers)


@contextmanager
def local_collectives() -> Iterator[list[str]]:
    """Answer every collective of ``torch.distributed`` on this rank, in all threads; yields the operators answered."""
    answers: list[str] = []
    _answers.append(answers)
    try:
        with torch.library._scoped_library("c10d", "IMPL") as library:
            if process_group_exists() and dist.get_world_size() > 1:
                _replace_kernels(library)
            yield answers
    finally:
        _answers.pop()


def _replace_kernels(library: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
        for name in OPERATIONS:
            kernel = _kernel(name)
            for key in _KEYS:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
                    library.impl(name, kernel, key)


def _kernel(name: str) -> Callable[..., Any]:
    """Return a kernel of an operator; its schema says which values are given and returned."""
    operator = Operator(name)

    def kernel(*args: Any) -> Any:
        given = partial(operator.argument_or, args)
        work = answer(
            name,
            dist.ProcessGroup.unbox(given("process_group")),
            args[: operator.positions["process_group"]],
            reduction=given("reduce_op"),
            root=given("root_rank", 0),
            splits=(given("output_split_sizes"), given("input_split_sizes")),
        )
        if not operator.returned:
            return None
        return work.boxed() if operator.returned == 1 else (args[0], work.boxed())

    return kernel


def answer(
    name: str,  # of the operator
    group: dist.ProcessGroup,
    tensors: Sequence[Any],  # what it writes to first: tensors, lists of them or lists of those
    *,
    reduction: Any = None,  # a ``ReduceOp`` or what the dispatcher makes of it
    root: int = 0,  # in the group
    splits: Sequence[Any] = (None, None),  # rows for and of each rank; none or empty: equal ones
) -> Any:
    """Answer one collective in place, and return a work handle that is complete."""
    _answers[-1].append(name)
    for targets, source in _copies(name, group.rank(), group.size(), tensors, root, splits):
        for target in targets:
            if target.numel() != source.numel():
                raise _unanswered(
                    name,
                    f"it was given room for {target.numel()} values of another rank, but this rank's own tensor, which"
                    f" stands for that rank's, has {source.numel()}",
                )
            # `data` has a separate version: a backend does not raise the version of what it writes to, either.
            target.data.copy_(source.data.reshape(target.shape))
    if "reduce" in name:
        _reduce(name, tensors[0], group.size(), reduction)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors[0] if tensors else [])
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def _copies(
    name: str, rank: int, size: int, tensors: Sequence[Any], root: int, splits: Sequence[Any]
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield the tensors to which an operation copies, and what it copies to each of them."""
    match name:
        case "allgather_" | "_allgather_base_" | "allgather_into_tensor_coalesced_":
            for whole, own in _pairs(tensors):
                yield _parts(whole, size), own
        case "reduce_scatter_" | "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            for own, whole in _pairs(tensors):
                yield [own], _parts(whole, size)[rank]
        # The backwards of gathers call these two: those of gather_uneven, and over some backends of all_gather.
        case "alltoall_" | "alltoall_base_":
            outputs, inputs = (_parts(one, size, rows) for one, rows in zip(tensors, splits, strict=True))
            yield outputs, inputs[rank].data.clone()  # the outputs may be the inputs
        case "scatter_" if rank == root:
            yield tensors[0], tensors[1][0][rank]
        case "scatter_":
            for own in tensors[0]:
                own.data.zero_()  # it often is uninitialised memory
        case "broadcast_" if rank != root and _sends_objects():
            raise _unanswered(name, f"what rank {root} of the group sends is not known here")
        # A tensor that is broadcast often holds this rank's own values of the same kind (a permutation, a mask).
        case "broadcast_" | "allreduce_" | "allreduce_coalesced_" | "barrier" | "monitored_barrier_":
            pass
        case _:
            raise _unanswered(name, "what another rank would send or receive is not known here")


def _reduce(name: str, tensors: Any, size: int, reduction: Any) -> None:
    # Torch 2.9 does not tell how it reduces: then it is taken for a sum, which DDP and most steps ask for.
    kind = ("sum" if reduction is None else reduction_kind(reduction)) or "sum"
    if kind not in ("sum", "avg", "min", "max"):
        raise _unanswered(name, f"its operation is {kind}")
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        # An average, minimum or maximum of equal tensors is the tensor.
        if kind == "sum" and tensor.dtype is not torch.bool:
            tensor.data.mul_(size)


def _pairs(tensors: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Return each output with its input; an operation has one of each, or lists of them."""
    return [(tensors[0], tensors[1])] if isinstance(tensors[0], Tensor) else zip(*tensors, strict=True)


def _parts(given: Any, size: int, rows: Sequence[int] | None = None) -> Sequence[Tensor]:
    """Return the part of each rank: an entry of a list; of a tensor its number of rows, by default equal parts."""
    if not isinstance(given, Tensor):
        return list(given)
    return torch.split(given.data, list(rows)) if rows else given.data.view(-1).tensor_split(size)


def _sends_objects() -> bool:
    """Return whether this is part of torch's own broadcast or scatter of objects."""
    return any(frame.f_code in _OBJECT_FUNCTIONS for frame, _ in walk_stack(None))


# -- Who waits for a collective, and how long --


def watch_waits(begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call ``begins`` and ``ends`` around each wait of this thread for a collective; return what stops this."""
    # Only DDP's reducer, in C++, waits without this method.
    classes: list[Any] = [cls for cls in (dist.Work, *dist.Work.__subclasses__()) if "wait" in vars(cls)]
    changed, own = [(cls, cls.wait) for cls in classes], threading.current_thread()

    def timed(wait: Callable[..., Any], work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        # Other Python threads wait for something else. Torch's, which run a backward on a GPU, are Dummy-1 and so on.
        thread = threading.current_thread()
        if thread is not own and not thread.name.startswith("Dummy"):
            return wait(work, *args, **kwargs)
        begins()
        try:
            return wait(work, *args, **kwargs)
        finally:
            ends()

    for cls, wait in changed:
        cls.wait = lambda work, *args, _wait=wait, **kwargs: timed(_wait, work, *args, **kwargs)

    def end() -> None:
        for cls, wait in changed:
            cls.wait = wait

    return end
