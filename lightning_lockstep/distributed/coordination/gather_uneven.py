"""Tensors of different shapes, and whole structures of them, gathered from all ranks; tensors sent as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_lockstep.distributed.coordination.communicator import Communicator, ReduceOperation
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall, call_site, mismatch_report
from lightning_lockstep.distributed.process_group import current_group, process_group_exists
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError

# -- Tensors of any dtype and shape, side by side in one row of bytes, and the two collectives that move
# such rows
#
# Bytes go through every backend unchanged, whatever it knows of bfloat16, bool or complex numbers, and one
# collective moves any number of tensors.

# Each tensor begins at a multiple of it, so that its bytes can be viewed as its dtype [bytes].
_ALIGNMENT = 16
# Torch 2.13 has a new name for it.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Layout:
    """Where tensors lie in a row of bytes."""

    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Length of the row [bytes]."""
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes())

    def pack(self, tensors: Sequence[Tensor | None], row: Tensor) -> None:
        """Copy tensors into a row, ``(nbytes,)`` or longer; ``None`` leaves its place as it is."""
        for tensor, place in zip(tensors, self.unpack(row), strict=True):
            if tensor is not None:
                place.copy_(tensor)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Return each tensor as a view of a row, ``(nbytes,)`` or longer; of ``n`` rows ``(n, *shape)``."""
        return list(self._views(rows))

    def _views(self, rows: Tensor) -> Iterator[Tensor]:
        start = 0
        for dtype, shape, size in zip(self.dtypes, self.shapes, self._sizes(), strict=True):
            whole = (*rows.shape[:-1], *shape)
            if size:
                yield rows[..., start : start + size].view(dtype).view(whole)
            else:
                yield rows.new_empty(whole, dtype=dtype)
            start += -(-size // _ALIGNMENT) * _ALIGNMENT

    def _sizes(self) -> list[int]:
        return [prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]


def carrying_device(group: dist.ProcessGroup, tensors: Sequence[Tensor] = ()) -> torch.device:
    """Return the device on which a group carries tensors: that of one of them, else the CPU, if it can."""
    # Their kinds of device are the same on every rank.
    carried = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.device.type in carried:
            return tensor.device
    if "cpu" in carried:
        return torch.device("cpu")
    return torch.device(carried[0], torch.get_device_module(carried[0]).current_device())


def all_gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, ``(group size, n)``, each of ``n`` bytes."""
    size = dist.get_world_size(group)
    rows = row.new_empty(size * len(row))
    if len(row):
        _all_gather_single(rows, row, group=group)
    return rows.view(size, len(row))


def exchange_rows(
    rows: Tensor,  # one after another, rank 0's first
    lengths: Sequence[int],  # of each rank's row, the same on every rank
    group: dist.ProcessGroup,
) -> Tensor:
    """Send each rank a row, of any length, and return what each rank has sent to this one."""
    size, own = dist.get_world_size(group), lengths[dist.get_rank(group)]
    received = rows.new_empty(size * own)
    if any(lengths):
        dist.all_to_all_single(received, rows, [own] * size, list(lengths), group=group)
    return received.view(size, own)


# -- What each rank gives to a collective whose shapes may differ, brought together and compared before data
# moves

# What every rank sends at first: the length of its description, and as much of it as fits [bytes].
_FIRST, _LENGTH = 1024, 8
_SHOWN_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of one rank."""

    call: CollectiveCall  # its note is what is wrong with the arguments, if anything is
    places: tuple[str, ...]  # of the tensors in the containers, such as ``['logits'][0]``
    requires_grad: tuple[bool, ...]
    grad_enabled: bool  # autograd records

    def encoded(self) -> bytes:
        data = [self.call.to_data(), self.places, self.requires_grad, self.grad_enabled]
        return json.dumps(data).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Arguments:
        call, places, requires_grad, grad_enabled = json.loads(data)
        return cls(
            call=CollectiveCall.from_data(call),
            places=tuple(places),
            requires_grad=tuple(requires_grad),
            grad_enabled=grad_enabled,
        )


def compared_arguments(own: Arguments, group: dist.ProcessGroup) -> list[Arguments]:
    """Return the arguments of every rank of the group; raises the same on all where they do not fit together."""
    everyone = [Arguments.decoded(data) for data in _gathered(own.encoded(), group)]
    if all(arguments.call.note for arguments in everyone):
        raise ConfigurationError(own.call.note)
    ranks = dist.get_process_group_ranks(group)
    calls = _differing(dict(zip(ranks, everyone, strict=True)))
    if calls:
        raise CollectiveMismatchError(mismatch_report(calls))
    return everyone


def _gathered(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    rows = _gathered_rows(data, _FIRST, group)
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    if max(lengths) > _FIRST - _LENGTH:
        rows = _gathered_rows(data, _LENGTH + max(lengths), group)
    return [row[_LENGTH : _LENGTH + length] for row, length in zip(rows, lengths, strict=True)]


def _gathered_rows(data: bytes, width: int, group: dist.ProcessGroup) -> list[bytes]:
    framed = bytearray((len(data).to_bytes(_LENGTH, "little") + data)[:width].ljust(width, b"\0"))
    row = torch.frombuffer(framed, dtype=torch.uint8).to(carrying_device(group))
    rows: list[bytes] = [one.tobytes() for one in all_gather_rows(row, group).cpu().numpy()]
    return rows


def _differing(everyone: Mapping[int, Arguments]) -> dict[int, CollectiveCall]:
    """Return the calls to show where the arguments do not fit together, else nothing."""
    calls = {rank: arguments.call for rank, arguments in everyone.items()}
    if any(call.note for call in calls.values()):
        return calls
    if len({arguments.places for arguments in everyone.values()}) > 1:
        return _noted(everyone, {rank: _in_words(arguments.places) for rank, arguments in everyone.items()})
    modes = {rank: arguments.grad_enabled for rank, arguments in everyone.items()}
    wanted = any(any(arguments.requires_grad) for arguments in everyone.values() if arguments.grad_enabled)
    if wanted and not all(modes.values()):
        words = {True: "autograd records", False: "autograd is off (torch.no_grad)"}
        return _noted(everyone, {rank: words[mode] for rank, mode in modes.items()})
    return _unlike(calls, next(iter(everyone.values())).places)


def _unlike(calls: Mapping[int, CollectiveCall], places: Sequence[str]) -> dict[int, CollectiveCall]:
    """Return the calls with those tensors alone whose dtypes or numbers of dimensions differ, else nothing."""
    kinds = [list(zip(call.dtypes, map(len, call.shapes), strict=True)) for call in calls.values()]
    wrong = [i for i, of_ranks in enumerate(zip(*kinds, strict=True)) if len(set(of_ranks)) > 1]
    where = _listed([places[i] for i in wrong])
    return {
        rank: replace(
            call,
            operation=f"{call.operation} at {where}" if where else call.operation,
            dtypes=tuple(call.dtypes[i] for i in wrong),
            shapes=tuple(call.shapes[i] for i in wrong),
        )
        for rank, call in calls.items()
        if wrong
    }


def _noted(everyone: Mapping[int, Arguments], notes: Mapping[int, str]) -> dict[int, CollectiveCall]:
    return {rank: replace(arguments.call, note=notes[rank]) for rank, arguments in everyone.items()}


def _in_words(places: Sequence[str]) -> str:
    if not places:
        return "no tensors"
    return f"tensors at {_listed(places)}" if _listed(places) else "a tensor"


def _listed(places: Sequence[str]) -> str:
    return ", ".join(places[:_SHOWN_PLACES]) + (", ..." if len(places) > _SHOWN_PLACES else "")


# -- Tensors whose shapes differ between the ranks, gathered on every rank, with gradients --
# The ranks first compare what they give and learn each other's shapes. Then one all-gather moves all
# tensors of all ranks, as rows of bytes padded to the longest. In backward, one all-to-all sends each rank
# the gradients of its own tensors, which it sums: half precision is added up in float32 and rounded once,
# in rank order on every backend.

_Tensors = TypeVar("_Tensors")  # a tensor, or containers of tensors

# What is kept of each call with gradients, for whoever asks at the moment.
_asked: list[list[Tensor]] = []


def gather_uneven(tensor: _Tensors, *, group: dist.ProcessGroup | None = None) -> list[_Tensors]:
    """Gather a tensor of every rank on every rank; the lengths of its dimensions may differ between the ranks.

    Args:
        tensor: A tensor of any shape, or tensors in dicts, lists, tuples and named tuples, nested as you like.
            Dtypes, numbers of dimensions, kinds of device and the places in the containers are the same on every
            rank. May be empty, strided, without dimensions, of any dense dtype.
        group: The process group; by default all ranks of the run.

    Returns:
        One entry per rank, in the order of the group, on the device of this rank's tensor and in the containers of
        this rank. Each has its own memory. Without other ranks, ``[tensor]``, the same object.

        Where a tensor requires a gradient on some rank, its entries do on every rank, and each rank gets the sum
        over the ranks of the gradients of its own tensor, once.

    Raises:
        CollectiveMismatchError: Dtypes, numbers of dimensions, kinds of device or structures differ, or autograd is
            off on some ranks; on every rank, before data moves.
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
        entries, spec = pytree.tree_flatten_with_path(value)
        places = [pytree.keystr(path) for path, _ in entries]
        # Dicts may differ in order.
        order = sorted(range(len(places)), key=lambda i: (len(places[i]), places[i]))
        leaves = [entries[i][1] for i in order]
        faults = [_fault(places[i], entries[i][1]) for i in order]
        dense = [leaf for leaf, fault in zip(leaves, faults, strict=True) if not fault]
        return cls(dense, tuple(places[i] for i in order), order, spec, next(filter(None, faults), ""))

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors in the containers of the argument."""
        by_position = dict(zip(self.order, tensors, strict=True))
        return pytree.tree_unflatten([by_position[i] for i in range(len(tensors))], self.spec)


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
        """Return the tensors of rank 0, then those of rank 1, and so on, each with its own memory."""
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


# -- Tensors that travel between hosts: copied to the CPU, sent as the bytes they are, and copied back --
# For devices between which no process group of torch sends (XLA): what has to arrive exactly, and rarely.
# Gradients go from device to device.


@dataclass(frozen=True)
class _OfDevice:
    """A tensor that was on a device, under way."""

    on_cpu: Tensor


def broadcast_object(
    communicator: Communicator,
    obj: Any,  # ignored on other ranks
    source: int,
    device: torch.device,  # of this rank, for tensors that were on a device there
) -> Any:
    """Return the object of rank ``source`` on every rank."""

    def lift(tensor: Tensor) -> Any:
        return tensor if tensor.device.type == "cpu" else _OfDevice(tensor.detach().cpu())

    sent = apply_to_collection(obj, Tensor, lift) if communicator.rank == source else None
    received = communicator.broadcast(sent, source)
    return apply_to_collection(received, _OfDevice, lambda one: one.on_cpu.to(device))


def gather_tensor(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensor of every rank, in rank order; sizes may differ: torchmetrics' ``dist_sync_fn``."""
    return [one.to(tensor.device) for one in gather_uneven(tensor.detach().cpu(), group=group)]


def reduce_tensor(communicator: Communicator, tensor: Tensor, op: ReduceOperation) -> Tensor:
    """Return a tensor reduced over all ranks, on its device; 16 bits and means of integers in float32."""
    value = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    of_16_bits = value.is_floating_point() and value.itemsize < 4
    if of_16_bits or value.dtype is torch.bool or (op == "mean" and not value.is_floating_point()):
        value = value.float() if value.dtype is not torch.bool or op == "mean" else value.int()
    reduced = communicator.all_reduce(value, op)
    return reduced.to(tensor.device, tensor.dtype if of_16_bits else None)
