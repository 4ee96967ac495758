"""Collectives answered on this rank alone, for a step that one rank runs without the others.

Torch calls its process groups through the dispatcher, from Python, from autograd, from compiled code and for functional
collectives alike; so the kernels of the ``c10d`` operators are replaced, and whatever does not communicate runs exactly
as before. A process group that is written in Python (the backend ``mpi4py``) is called past the dispatcher; there the
methods are replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_lockstep._doors.torch_internals import (
    ALL_GATHER_BASE,
    REDUCE_SCATTER_BASE,
    finished_work,
    has_kernel,
    scoped_library,
    stores_of_groups,
)
from lightning_lockstep.distributed.c10d_operators import operator_named, while_answered_locally
from lightning_lockstep.distributed.local.answers import ANSWERS, LocalCall, UnansweredCollectiveError
from lightning_lockstep.distributed.local.reduction_kinds import noting_reductions
from lightning_lockstep.distributed.process_group import process_group_exists

__all__ = ["LocalAnswers", "UnansweredCollectiveError", "local_collectives"]

_KEYS = ("CPU", "CUDA", "XPU", "PrivateUse1", "SparseCPU", "SparseCUDA")
# Methods of a process group that are not named as their operator, by its name.
_OTHER_METHODS = {
    "all_gather_single": ALL_GATHER_BASE,
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_single": REDUCE_SCATTER_BASE,
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
    """Answer every collective of ``torch.distributed`` on this rank, as if every rank held what this rank holds.

    A gather gives copies of this rank's tensor, a sum gives it times the number of ranks. A broadcast leaves the tensor
    of a receiving rank as it is; what another rank would scatter is zeros. This holds for the whole process, other
    threads included. What only another rank knows raises :class:`UnansweredCollectiveError`: a send or
    receive, objects from another rank, sizes that differ.
    """
    answers = LocalAnswers()
    with ExitStack() as stack:
        stack.enter_context(while_answered_locally())
        if process_group_exists() and dist.get_world_size() > 1:
            stack.enter_context(noting_reductions())
            stack.enter_context(_replaced_kernels(answers))
            for group in stores_of_groups():
                if type(group) is not dist.ProcessGroup:
                    stack.enter_context(_replaced_methods(group, answers))
        yield answers


@contextmanager
def _replaced_kernels(answers: LocalAnswers) -> Iterator[None]:
    with scoped_library("c10d") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name in ANSWERS:
                kernel = _kernel(name, answers)
                for key in _KEYS:
                    if has_kernel(f"c10d::{name}", key):
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
    return finished_work(future)
