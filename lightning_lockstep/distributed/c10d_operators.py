"""The operators of torch's ``c10d``, by which torch.distributed calls its process groups through the dispatcher."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_lockstep._doors.torch_internals import ALL_GATHER_BASE, REDUCE_SCATTER_BASE, schema_of

__all__ = ["OPERATIONS", "Operator", "answered_locally", "operator_named", "while_answered_locally"]

#: What torch.distributed calls the operation of each operator.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    ALL_GATHER_BASE: "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    REDUCE_SCATTER_BASE: "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}

_local = 0  # how many contexts answer collectives on this rank alone
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator, as its schema describes it."""

    name: str  # in ``c10d``, such as ``allreduce_``
    operation: str  # what torch.distributed calls it
    overload: Any
    positions: dict[str, int]  # of each argument, by its name in the schema
    tensors: int  # how many of the first arguments are tensors, lists of them or lists of those
    returned: int  # how many values it returns; the last one is the work handle

    def argument(self, args: Sequence[Any], name: str, default: Any = None) -> Any:
        """Return an argument by its name, ``default`` where it was left out or the operator has none such."""
        position = self.positions.get(name)
        return default if position is None or position >= len(args) else args[position]


@functools.cache
def operator_named(name: str) -> Operator:
    overload = getattr(torch.ops.c10d, name).default
    schema = schema_of(overload)
    positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
    return Operator(
        name=name,
        operation=OPERATIONS[name],
        overload=overload,
        positions=positions,
        tensors=positions["process_group"],
        returned=len(schema.returns),
    )


@contextmanager
def while_answered_locally() -> Iterator[None]:
    """Let :func:`answered_locally` be true in the body, for all threads."""
    global _local
    with _lock:
        _local += 1
    try:
        yield
    finally:
        with _lock:
            _local -= 1


def answered_locally() -> bool:
    """Return whether collectives are answered on this rank now, so that no other rank takes part in them."""
    return _local > 0
