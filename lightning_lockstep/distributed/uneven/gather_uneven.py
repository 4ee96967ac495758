"""Tensors whose shapes differ between the ranks, gathered on every rank, with gradients.

The ranks first compare what they give and learn each other's shapes. Then one all-gather moves all tensors of all
ranks, as rows of bytes padded to the longest. In backward, one all-to-all sends each rank the gradients of its own
tensors, which it sums: half precision is added up in float32 and rounded once, in rank order on every backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_lockstep._doors.torch_internals import tree_flatten_with_names, tree_unflatten
from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall, call_site
from lightning_lockstep.distributed.process_group import current_group, process_group_exists
from lightning_lockstep.distributed.uneven.packed_tensors import (
    Layout,
    all_gather_rows,
    carrying_device,
    exchange_rows,
)
from lightning_lockstep.distributed.uneven.uneven_arguments import Arguments, compared_arguments
from lightning_lockstep.errors import ConfigurationError

__all__ = ["gather_uneven", "gathered_entries"]

# What is kept of each call with gradients, for whoever asks at the moment.
_asked: list[list[Tensor]] = []


def gather_uneven(tensor: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather a tensor of every rank on every rank; the lengths of its dimensions may differ between the ranks.

    Args:
        tensor: A tensor of any shape, or tensors in dicts, lists, tuples and named tuples, nested as you like.
            Dtypes, numbers of dimensions, kinds of device and the places in the containers are the same on every
            rank. May be empty, strided, without dimensions, of any dense dtype.
        group: The process group; by default all ranks of the run.

    Returns:
        One entry per rank, in the order of the group, on the device of this rank's tensor and in the containers of
        this rank. Each is memory of its own. Without other ranks, ``[tensor]``, the same object.

        Where a tensor requires a gradient on some rank, its entries do on every rank, and each rank gets the sum
        over the ranks of the gradients of its own tensor, once.

    Raises:
        CollectiveMismatchError: Dtypes, numbers of dimensions, kinds of device or structures differ, or autograd is
            off on some ranks; on every rank alike, before data moves.
        ConfigurationError: ``group`` is not a group of this rank, or every rank gives something else than tensors.

    Ranks: all of the group, together; an all-gather of 1 KiB per rank, and one of the data (memory: group size times
    the largest rank's data). In backward all again, through at least one entry: an all-to-all. Calls are undone in
    reverse order. Under DDP every rank's loss uses the same parameters before and after the gather.
    """
    ours = _process_group(group)
    given = _Given.of(tensor)
    if ours is None or dist.get_world_size(ours) == 1:
        if given.fault:
            raise ConfigurationError(given.fault)
        return [tensor]
    everyone = compared_arguments(_described(given, ours), ours)
    plan = _Plan.of(given.tensors, everyone, ours)
    if any(plan.differentiable):
        # The anchor makes every rank take part in backward, whichever of them requires gradients.
        parts = _GatherUneven.apply(plan, torch.empty(0, requires_grad=True), *given.tensors)  # type: ignore[no-untyped-call]
        for entries in _asked:
            entries.append(parts[plan.differentiable.index(True)])
    else:
        parts = plan.gather(given.tensors)
    count = len(given.tensors)
    return [given.rebuilt(parts[rank * count : (rank + 1) * count]) for rank in range(len(everyone))]


@contextmanager
def gathered_entries() -> Iterator[list[Tensor]]:
    """Keep an entry of each gather with gradients in the body, for a rank that must join their backward."""
    entries: list[Tensor] = []
    _asked.append(entries)
    try:
        yield entries
    finally:
        _asked.pop()


@dataclass(frozen=True)
class _Given:
    """The tensors of an argument, ordered by their places, which are the same on every rank."""

    tensors: list[Tensor]
    places: tuple[str, ...]
    order: list[int]  # the position of each in the containers
    spec: Any  # how to put them back into the containers
    fault: str

    @classmethod
    def of(cls, value: Any) -> _Given:
        entries, spec = tree_flatten_with_names(value)
        places = [place for place, _ in entries]
        # Dicts may differ in order.
        order = sorted(range(len(places)), key=lambda i: (len(places[i]), places[i]))
        leaves = [entries[i][1] for i in order]
        faults = [_fault(places[i], entries[i][1]) for i in order]
        dense = [leaf for leaf, fault in zip(leaves, faults, strict=True) if not fault]
        return cls(dense, tuple(places[i] for i in order), order, spec, next(filter(None, faults), ""))

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors in the containers of the argument."""
        by_position = dict(zip(self.order, tensors, strict=True))
        return tree_unflatten([by_position[i] for i in range(len(tensors))], self.spec)


def _fault(place: str, leaf: object) -> str:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
        return ""
    what = f"a tensor of {leaf.layout} on {leaf.device.type}" if isinstance(leaf, Tensor) else repr(leaf)[:80]
    return (
        f"gather_uneven was given {what}{f' at {place}' if place else ''}: expected a dense tensor, or dicts, lists and"
        " tuples of them. Turn numbers into tensors by torch.tensor(), and leave out what is none."
    )


def _process_group(group: Any) -> dist.ProcessGroup | None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"group={group!r}: expected a process group of torch.distributed that this rank belongs to, or None for"
            " all ranks. Call gather_uneven on the ranks of the group alone."
        )
    if group is not None or process_group_exists():
        return group or dist.group.WORLD
    run = current_group()
    if run is not None and run.world_size > 1:
        raise ConfigurationError(
            f"gather_uneven needs a process group of torch.distributed, and the {run.world_size} ranks of this run"
            " have none: expected one from the strategy or torch.distributed.init_process_group()."
        )
    return None


def _described(given: _Given, group: dist.ProcessGroup) -> Arguments:
    call = CollectiveCall(
        operation="gather_uneven",
        group="world" if group is dist.group.WORLD else group.group_name,
        dtypes=tuple(_dtype(tensor) for tensor in given.tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in given.tensors),
        site=call_site(),
        note=given.fault,
        uneven=True,
    )
    return Arguments(
        call=call,
        places=given.places,
        requires_grad=tuple(tensor.requires_grad for tensor in given.tensors),
        grad_enabled=torch.is_grad_enabled(),
    )


def _dtype(tensor: Tensor) -> str:
    name, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    return name if device == "cpu" else f"{name} on {device}"


@dataclass(frozen=True)
class _Plan:
    """What all ranks give, and who gets which gradients."""

    group: dist.ProcessGroup
    layouts: list[Layout]  # of each rank
    gradients: list[Layout]  # of each rank, of those that are differentiable
    differentiable: list[bool]  # the same on every rank
    carrier: torch.device
    devices: list[torch.device]

    @classmethod
    def of(cls, own: Sequence[Tensor], everyone: Sequence[Arguments], group: dist.ProcessGroup) -> _Plan:
        dtypes = [tensor.dtype for tensor in own]
        differentiable = [
            any(arguments.requires_grad[i] and arguments.grad_enabled for arguments in everyone)
            for i in range(len(own))
        ]
        return cls(
            group=group,
            layouts=[Layout(dtypes, arguments.call.shapes) for arguments in everyone],
            gradients=[
                Layout(_where(differentiable, dtypes), _where(differentiable, arguments.call.shapes))
                for arguments in everyone
            ],
            differentiable=differentiable,
            carrier=carrying_device(group, own),
            devices=[tensor.device for tensor in own],
        )

    def gather(self, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of rank 0, then those of rank 1, and so on, each with memory of its own."""
        longest = max(layout.nbytes for layout in self.layouts)
        row = torch.zeros(longest, dtype=torch.uint8, device=self.carrier)
        self.layouts[dist.get_rank(self.group)].pack(own, row)
        rows = all_gather_rows(row, self.group)
        return tuple(
            torch.empty_like(part, device=device).copy_(part)
            for layout, received in zip(self.layouts, rows, strict=True)
            for part, device in zip(layout.unpack(received), self.devices, strict=True)
        )

    def summed(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sum over the ranks of each own tensor's gradients, from those of what `gather` gave."""
        lengths = [layout.nbytes for layout in self.gradients]
        rows = torch.zeros(sum(lengths), dtype=torch.uint8, device=self.carrier)
        count = len(self.differentiable)
        for rank, (layout, row) in enumerate(zip(self.gradients, torch.split(rows, lengths), strict=True)):
            layout.pack(_where(self.differentiable, gradients[rank * count : (rank + 1) * count]), row)
        received = exchange_rows(rows, lengths, self.group)
        sums = iter(part.sum(0) for part in self.gradients[dist.get_rank(self.group)].unpack(received))
        return [
            next(sums).to(device) if wanted else None
            for wanted, device in zip(self.differentiable, self.devices, strict=True)
        ]


class _GatherUneven(torch.autograd.Function):
    """The gather of a plan as one node of autograd, so that all tensors share one collective in backward too."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, anchor: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        parts = plan.gather(own)
        ctx.mark_non_differentiable(
            *_where([not one for one in plan.differentiable] * len(plan.layouts), parts)
        )
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.plan.summed(gradients)


def _where(wanted: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for keep, value in zip(wanted, values, strict=True) if keep]
