"""What calls of ranks must have in common, as far as their records tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lightning_lockstep.distributed.guard.calls.call_report import ALL_TO_ALL, CollectiveCall

__all__ = ["as_far_as_known", "comparison_key", "odd_ones"]

# Operations whose shapes may differ between ranks, by the names that backends give them.
_OWN_SHAPES = {*ALL_TO_ALL, "scatter", "send", "recv"}


def as_far_as_known(calls: Mapping[int, CollectiveCall]) -> dict[int, CollectiveCall]:
    """Return the calls without what peers in the same operation have not told.

    The main thread of a rank that has gone on tells no reduction and no root any more; and in a scatter none but the
    root records tensors. Roots that differ between those who tell them stay.
    """
    no_reduction = {call.operation for call in calls.values() if call.reduce_op is None}
    no_root = {call.operation for call in calls.values() if call.root is None}
    several_roots = {
        name for name in no_root if len({c.root for c in calls.values() if c.operation == name} - {None}) > 1
    }
    no_tensors = {
        call.operation for call in calls.values() if call.operation == "scatter" and not call.shapes
    }
    return {
        rank: replace(
            call,
            reduce_op=None if call.operation in no_reduction else call.reduce_op,
            root=None if call.operation in no_root - several_roots else call.root,
            dtypes=() if call.operation in no_tensors else call.dtypes,
            shapes=() if call.operation in no_tensors else call.shapes,
        )
        for rank, call in calls.items()
    }


def comparison_key(call: CollectiveCall, *, exactly: bool) -> tuple[str, ...]:
    """Return what must be equal on all ranks of a call; less, where it is complete (not ``exactly``)."""
    own_shapes = call.operation in _OWN_SHAPES
    if exactly:
        columns = call.compared()
        return columns[:2] if own_shapes else columns
    sizes = "" if own_shapes else str([_count(shape) for shape in call.shapes])
    return call.operation, ",".join(call.dtypes), sizes


def _count(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def odd_ones(calls: Mapping[int, CollectiveCall]) -> tuple[int, ...]:
    """Return the ranks that did not call what most of them did."""
    keys = {rank: (*call.compared(), call.group, call.number) for rank, call in calls.items()}
    compared = list(keys.values())
    usual = max(compared, key=compared.count)
    return tuple(rank for rank, key in keys.items() if key != usual)
