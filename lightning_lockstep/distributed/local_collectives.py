"""Collectives answered on one rank alone, for a step that is run apart from the others.

Every rank is taken to hold what this one holds: a gather gives copies of this rank's tensor, a sum gives it times the
number of ranks, a broadcast leaves the tensor of a receiving rank as it is. Answered is what steps and their backwards
call. Anything else, objects of another rank and sizes that differ raise :class:`UnansweredCollectiveError`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.c10d_operators import (
    OPERATIONS,
    local_answers,
    operator_named,
    reduction_kind,
)
from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveError

# Torch calls its process groups through the dispatcher, from Python, from autograd, from compiled code and
# for functional collectives; so the kernels of the ``c10d`` operators are replaced, and whatever does
# not communicate runs exactly as before. The process group of the backend ``mpi4py``, which is written in Python, is
# called past the dispatcher, and asks :func:`answer` itself.
_KEYS = ("CPU", "CUDA", "XPU", "PrivateUse1", "SparseCPU", "SparseCUDA")
# Types of these are not among those that torch states.
_OBJECT_FUNCTIONS = {"broadcast_object_list", "scatter_object_list"}


class UnansweredCollectiveError(CollectiveError):
    """A step that runs on one rank alone called for data that only another rank has."""


def _unanswered(operation: str, why: str) -> UnansweredCollectiveError:
    return UnansweredCollectiveError(
        f"{operation.removesuffix('_')} cannot be answered in a step that runs on one rank alone: {why}."
    )


@dataclass
class LocalAnswers:
    """What :func:`local_collectives` answered."""

    count: int = 0  # of collectives so far


@contextmanager
def local_collectives() -> Iterator[LocalAnswers]:
    """Answer every collective of ``torch.distributed`` on this rank, in all threads of the process."""
    answers = LocalAnswers()
    local_answers.append(answers)
    try:
        if process_group_exists() and dist.get_world_size() > 1:
            with _replaced_kernels():
                yield answers
        else:
            yield answers
    finally:
        local_answers.pop()


@contextmanager
def _replaced_kernels() -> Iterator[None]:
    with torch.library._scoped_library("c10d", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name in OPERATIONS:
                for key in _KEYS:
                    if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
                        library.impl(name, _kernel(name), key)
        yield


def _kernel(name: str) -> Callable[..., Any]:
    """Return a kernel of an operator; its schema says which values are given and returned."""
    operator = operator_named(name)

    def kernel(*args: Any) -> Any:
        given = partial(operator.argument, args)
        work = answer(
            name,
            dist.ProcessGroup.unbox(given("process_group")),
            args[: operator.tensors],
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
    root: int | None = 0,  # in the group
    splits: Sequence[Any] = (),  # rows for and of each rank; none or empty: equal ones
) -> Any:
    """Answer one collective in place, and return a work handle that is complete."""
    local_answers[-1].count += 1
    for place, source in _copies(
        name, group.rank(), group.size(), tensors, root or 0, splits or (None, None)
    ):
        if place.numel() != source.numel():
            raise _unanswered(
                name,
                f"it was given room for {place.numel()} values of another rank, but this rank's own tensor, which"
                f" stands for that rank's, has {source.numel()}",
            )
        # `data` has a separate version: a backend does not raise the version of what it writes to, either.
        place.data.copy_(source.data.reshape(place.shape))
    if "reduce" in name:
        _reduce(name, _listed(tensors[0]), group.size(), reduction)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors[0] if tensors else [])
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def _copies(
    name: str, rank: int, size: int, tensors: Sequence[Any], root: int, splits: Sequence[Any]
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of tensors of which an operation copies the second to the first."""
    match name:
        case "allgather_" | "_allgather_base_" | "allgather_into_tensor_coalesced_":
            pairs = zip(*map(_listed, tensors), strict=True)
            return [(place, source) for whole, source in pairs for place in _parts(whole, size)]
        case "reduce_scatter_" | "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            return [
                (place, _parts(whole, size)[rank])
                for place, whole in zip(*map(_listed, tensors), strict=True)
            ]
        # In the backward of gathers: of gather_uneven, and by backend of torch.distributed.nn.
        case "alltoall_" | "alltoall_base_":
            places, sources = (_parts(one, size, rows) for one, rows in zip(tensors, splits, strict=True))
            own = sources[rank].data.clone()  # the outputs may be the inputs
            return [(place, own) for place in places]
        case "scatter_" if rank == root:
            return [(place, sources[rank]) for place, sources in zip(*tensors, strict=True)]
        case "scatter_":
            for place in tensors[0]:
                place.data.zero_()  # often uninitialised memory
        case "broadcast_" if rank != root and _sends_objects():
            raise _unanswered(name, f"what rank {root} of the group sends is not known here")
        # A tensor that is broadcast often holds this rank's own values of the same kind (a permutation, a mask).
        case "broadcast_" | "allreduce_" | "allreduce_coalesced_" | "barrier" | "monitored_barrier_":
            pass
        case _:
            raise _unanswered(name, "what another rank would send or receive is not known here")
    return []


def _reduce(name: str, tensors: Sequence[Tensor], size: int, reduction: Any) -> None:
    # What torch 2.9 does not tell is taken for a sum, which DDP and most steps ask for.
    kind = ("sum" if reduction is None else reduction_kind(reduction)) or "sum"
    if kind not in ("sum", "avg", "min", "max"):
        raise _unanswered(name, f"its operation is {kind}")
    for tensor in tensors:
        if kind == "sum" and tensor.dtype is not torch.bool:
            tensor.data.mul_(size)
        # An average, minimum or maximum of equal tensors is the tensor.


def _listed(tensors: Any) -> Sequence[Any]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _parts(given: Any, size: int, rows: Sequence[int] | None = None) -> Sequence[Any]:
    """Return the part of each rank: of a list its entries, of a tensor so many rows, by default equally many values."""
    if not isinstance(given, Tensor):
        return list(given)
    return torch.split(given.data, list(rows)) if rows else given.data.view(-1).tensor_split(size)


def _sends_objects() -> bool:
    """Return whether this is part of torch's own broadcast or scatter of objects."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _OBJECT_FUNCTIONS and frame.f_globals is vars(dist.distributed_c10d):
            return True
    return False
