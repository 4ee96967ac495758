"""Collectives answered on one rank alone, for a step that is run apart from the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lockstep.distributed.c10d_operators import (
    operator_named,
    reduction_kind,
    while_answered_locally,
)
from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveError

# -- What a collective gives where every rank of the group holds what this rank holds --

# Types of these are not among those that torch states.
_OBJECT_FUNCTIONS = {"broadcast_object_list", "scatter_object_list"}


class UnansweredCollectiveError(CollectiveError):
    """A step that runs on one rank alone called for data that only another rank has."""


@dataclass(frozen=True, kw_only=True)
class LocalCall:
    operation: str  # in ``torch.distributed.ProcessGroup``
    rank: int  # in the group
    size: int
    tensors: Sequence[Any]  # what it writes to first: tensors, lists of them or lists of those
    reduction: Any = None  # a ``ReduceOp`` or what the dispatcher makes of it; None: it does not reduce
    root: int = 0  # in the group
    splits: Sequence[Any] = (None, None)  # rows for and of each rank; empty or None: equal ones

    def unanswered(self, why: str) -> UnansweredCollectiveError:
        return UnansweredCollectiveError(
            f"{self.operation} cannot be answered in a step that runs on one rank alone: {why}."
        )


def _all_reduce(call: LocalCall) -> None:
    for tensor in call.tensors[0]:
        _reduce_in_place(call, tensor)


def _reduce(call: LocalCall) -> None:
    if call.rank == call.root:
        _all_reduce(call)


def _broadcast(call: LocalCall) -> None:
    # A tensor stays as it is: it often holds this rank's own values of the same kind (a permutation, a mask).
    if call.rank != call.root and _sends_objects():
        raise call.unanswered(f"what rank {call.root} of the group sends is not known here")


def _all_gather(call: LocalCall) -> None:
    for places, source in zip(*call.tensors, strict=True):
        for place in places:
            _copy(call, place, source)


def _all_gather_single(call: LocalCall) -> None:
    for output, source in zip(*map(_listed, call.tensors), strict=True):
        for place in _parts(output, call.size):
            _copy(call, place, source)


def _gather(call: LocalCall) -> None:
    if call.rank == call.root:
        _all_gather(call)


def _scatter(call: LocalCall) -> None:
    outputs, inputs = call.tensors
    for index, place in enumerate(outputs):
        if call.rank == call.root:
            _copy(call, place, inputs[index][call.rank])
        else:
            place.data.zero_()  # often uninitialised memory, as in torch.distributed.nn on gloo


def _reduce_scatter(call: LocalCall) -> None:
    for place, sources in zip(*call.tensors, strict=True):
        _copy(call, place, sources[call.rank])
        _reduce_in_place(call, place)


def _reduce_scatter_single(call: LocalCall) -> None:
    for place, source in zip(*map(_listed, call.tensors), strict=True):
        _copy(call, place, _parts(source, call.size)[call.rank])
        _reduce_in_place(call, place)


def _all_to_all(call: LocalCall) -> None:
    places, sources = call.tensors
    source = sources[call.rank].data.clone()  # the outputs may be the inputs
    for place in places:
        _copy(call, place, source)


def _all_to_all_single(call: LocalCall) -> None:
    parts = [
        tensor.data.split(list(sizes)) if sizes else tensor.data.tensor_split(call.size)
        for tensor, sizes in zip(call.tensors, call.splits, strict=True)
    ]
    _all_to_all(LocalCall(operation=call.operation, rank=call.rank, size=call.size, tensors=parts))


def _barrier(call: LocalCall) -> None:
    """Nobody is waited for."""


def _point_to_point(call: LocalCall) -> None:
    raise call.unanswered("the other rank takes no part in it")


#: How each operator of torch's ``c10d`` is answered, in place.
ANSWERS: dict[str, Callable[[LocalCall], None]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather,
    "_allgather_base_": _all_gather_single,
    "allgather_into_tensor_coalesced_": _all_gather_single,
    "gather_": _gather,
    "scatter_": _scatter,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_single,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_single,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
    "send": _point_to_point,
    "recv_": _point_to_point,
    "recv_any_source_": _point_to_point,
}


def _copy(call: LocalCall, place: Tensor, source: Tensor) -> None:
    if place.numel() != source.numel():
        raise call.unanswered(
            f"it was given room for {place.numel()} values of another rank, but this rank's own tensor, which stands"
            f" for that rank's, has {source.numel()}"
        )
    # `data` has a separate version: a backend does not raise the version of what it writes to, either.
    place.data.copy_(source.data.reshape(place.shape))


def _reduce_in_place(call: LocalCall, tensor: Tensor) -> None:
    # What torch 2.9 does not tell is taken for a sum, which DDP and most steps ask for.
    kind = ("sum" if call.reduction is None else reduction_kind(call.reduction)) or "sum"
    values = tensor.data
    if kind == "sum" and values.dtype is not torch.bool:
        values.mul_(call.size)
    elif kind == "product":
        values.pow_(call.size)
    elif kind == "bxor" and call.size % 2 == 0:
        values.zero_()
    elif kind == "premul_sum":
        raise call.unanswered("the factor of PREMUL_SUM is not known here")
    # An average, minimum, maximum, bitwise and, bitwise or of equal tensors is the tensor.


def _listed(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _parts(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.data.view(-1).tensor_split(count)


def _sends_objects() -> bool:
    """Return whether this is part of torch's own broadcast or scatter of objects."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _OBJECT_FUNCTIONS and frame.f_globals is vars(dist.distributed_c10d):
            return True
    return False


# -- Collectives answered on this rank alone, for a step that one rank runs without the others --
# Torch calls its process groups through the dispatcher, from Python, from autograd, from compiled code and
# for functional collectives; so the kernels of the ``c10d`` operators are replaced, and whatever does
# not communicate runs exactly as before. A process group that is written in Python (the backend ``mpi4py``)
# is called past the dispatcher; there the methods are replaced.

_KEYS = ("CPU", "CUDA", "XPU", "PrivateUse1", "SparseCPU", "SparseCUDA")
# Methods of a process group that are not named as their operator, by its name.
_OTHER_METHODS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "recv_anysource": "recv_any_source_",
}


@dataclass
class LocalAnswers:
    """What :func:`local_collectives` answered."""

    count: int = 0  # of collectives so far


@contextmanager
def local_collectives() -> Iterator[LocalAnswers]:
    """Answer every collective of ``torch.distributed`` on this rank, as if every rank held what this rank holds."""
    # A gather gives copies of this rank's tensor, a sum gives it times the number of ranks. A broadcast leaves the
    # tensor of a receiving rank as it is; what another rank would scatter is zeros. This holds for the whole process,
    # other threads included. What only another rank knows raises UnansweredCollectiveError: a send or receive, objects
    # from another rank, sizes that differ.
    answers = LocalAnswers()
    with ExitStack() as stack:
        stack.enter_context(while_answered_locally())
        if process_group_exists() and dist.get_world_size() > 1:
            stack.enter_context(_replaced_kernels(answers))
            for group in list(dist.distributed_c10d._world.pg_map):
                if type(group) is not dist.ProcessGroup:
                    stack.enter_context(_replaced_methods(group, answers))
        yield answers


@contextmanager
def _replaced_kernels(answers: LocalAnswers) -> Iterator[None]:
    with torch.library._scoped_library("c10d", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name in ANSWERS:
                kernel = _kernel(name, answers)
                for key in _KEYS:
                    if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
                        library.impl(name, kernel, key)
        yield


def _kernel(name: str, answers: LocalAnswers) -> Callable[..., Any]:
    """Return a kernel of an operator; its schema says which values are given and returned."""
    operator = operator_named(name)

    def kernel(*args: Any) -> Any:
        given = partial(operator.argument, args)
        group = dist.ProcessGroup.unbox(given("process_group"))
        splits = given("output_split_sizes"), given("input_split_sizes")
        reduction, root = given("reduce_op"), given("root_rank", 0)
        tensors = args[: operator.tensors]
        _answer(name, answers, group, tensors, reduction=reduction, root=root, splits=splits)
        if not operator.returned:
            return None
        work = _finished(args[0]).boxed()
        return work if operator.returned == 1 else (args[0], work)

    return kernel


@contextmanager
def _replaced_methods(group: Any, answers: LocalAnswers) -> Iterator[None]:
    names = {_method_name(name): name for name in ANSWERS} | _OTHER_METHODS
    methods = {method: partial(_method, name, answers, group) for method, name in names.items()}
    attributes = vars(group)
    before = {name: value for name, value in attributes.items() if name in methods}
    attributes.update(methods)
    try:
        yield
    finally:
        for method in methods:
            del attributes[method]
        attributes.update(before)


def _method(name: str, answers: LocalAnswers, group: Any, *args: Any, opts: Any = None) -> Any:
    """Answer a method of a process group that is written in Python."""
    tensors, options = args[: operator_named(name).tensors], args[-1] if args and opts is None else opts
    splits = args[2:4] if name == "alltoall_base_" else (None, None)
    reduction, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", 0)
    _answer(name, answers, group, tensors, reduction=reduction, root=root, splits=splits)
    return _finished(tensors[0] if tensors else [])


def _answer(name: str, answers: LocalAnswers, group: Any, tensors: Any, **options: Any) -> None:
    answers.count += 1
    size = group.size()
    call = LocalCall(operation=_method_name(name), rank=group.rank(), size=size, tensors=tensors, **options)
    ANSWERS[name](call)


def _method_name(name: str) -> str:
    return name.removesuffix("_")


def _finished(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
