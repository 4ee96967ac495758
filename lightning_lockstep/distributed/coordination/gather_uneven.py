"""Tensors of different shapes, and whole structures of them, gathered from all ranks; tensors sent as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_lockstep._text import listed
from lightning_lockstep.distributed.coordination.communicator import Communicator, ReduceOperation
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall, call_site, mismatch_report
from lightning_lockstep.distributed.process_group import current_group, process_group_exists
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError

# The ranks first compare what they give and learn each other's shapes. Then one all-gather moves all
# tensors of all ranks, as rows of bytes padded to the longest: bytes go through every backend unchanged,
# whatever it knows of bfloat16, bool or complex numbers. In backward, one all-to-all sends each rank the
# gradients of its own tensors, which it sums.

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
    everyone = _compared(_Arguments.of(given, ours), ours)
    shapes = [arguments.call.shapes for arguments in everyone]
    wanted = [
        any(wishes) for wishes in zip(*(arguments.requires_grad for arguments in everyone), strict=True)
    ]
    # The anchor makes every rank take part in backward, whichever of them requires gradients.
    anchor = torch.empty(0, requires_grad=any(wanted))
    parts = _GatherUneven.apply(ours, shapes, wanted, anchor, *given.tensors)  # type: ignore[no-untyped-call]
    if any(wanted):
        for entries in _asked:
            entries.append(parts[wanted.index(True)])
    count = len(wanted)
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
    places: list[str]  # such as ``['logits'][0]``
    order: list[int]  # the position of each in the containers
    spec: Any  # how to put them back into the containers
    fault: str

    @classmethod
    def of(cls, value: Any) -> _Given:
        entries, spec = pytree.tree_flatten_with_path(value)
        places = [pytree.keystr(path) for path, _ in entries]
        # Dicts may differ in order.
        order = sorted(range(len(places)), key=lambda i: (len(places[i]), places[i]))
        places, leaves = [places[i] for i in order], [entries[i][1] for i in order]
        fault = next(filter(None, map(_fault, places, leaves)), "")
        return cls([] if fault else leaves, places, order, spec, fault)

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


# -- What each rank gives, brought together and compared before data moves

# What every rank sends at first: the length of its description, and as much of it as fits [bytes].
_FIRST, _LENGTH = 1024, 8


class _Arguments(NamedTuple):
    """The arguments of one rank."""

    call: CollectiveCall  # its note is what is wrong with the arguments, if anything is
    places: list[str]
    requires_grad: list[bool]
    autograd: str  # whether it records, in words

    @classmethod
    def of(cls, given: _Given, group: dist.ProcessGroup) -> _Arguments:
        records = torch.is_grad_enabled()
        call = CollectiveCall(
            operation="gather_uneven",
            group="world" if group is dist.group.WORLD else group.group_name,
            dtypes=tuple(_dtype(tensor) for tensor in given.tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in given.tensors),
            site=call_site(),
            note=given.fault,
            uneven=True,
        )
        wishes = [records and tensor.requires_grad for tensor in given.tensors]
        words = "autograd records" if records else "autograd is off (torch.no_grad)"
        return cls(call, given.places, wishes, words)


def _dtype(tensor: Tensor) -> str:
    name, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    return name if device == "cpu" else f"{name} on {device}"


def _compared(own: _Arguments, group: dist.ProcessGroup) -> list[_Arguments]:
    """Return the arguments of every rank of the group; raises the same on all if they do not fit together."""
    sent = json.dumps([own.call.to_data(), *own[1:]]).encode()
    received = [json.loads(data) for data in _gathered(sent, group)]
    everyone = [_Arguments(CollectiveCall.from_data(call), *rest) for call, *rest in received]
    if all(arguments.call.note for arguments in everyone):
        raise ConfigurationError(own.call.note)
    calls = _differing(everyone)
    if calls:
        ranks = dist.get_process_group_ranks(group)
        raise CollectiveMismatchError(mismatch_report(dict(zip(ranks, calls, strict=True))))
    return everyone


def _gathered(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank: by one collective if they are few, else by two."""
    framed, width, lengths = len(data).to_bytes(_LENGTH, "little") + data, _FIRST, [0]
    while True:
        padded = bytearray(framed[:width].ljust(width, b"\0"))
        row = torch.frombuffer(padded, dtype=torch.uint8).to(_carrying_device(group))
        rows = [one.tobytes() for one in _all_gather(row, group).cpu().numpy()]
        lengths = [_LENGTH + int.from_bytes(one[:_LENGTH], "little") for one in rows]
        if max(lengths) <= width:
            return [one[_LENGTH:length] for one, length in zip(rows, lengths, strict=True)]
        width = max(lengths)


def _differing(everyone: Sequence[_Arguments]) -> list[CollectiveCall]:
    """Return the calls to show if the arguments do not fit together, else nothing."""
    calls = [arguments.call for arguments in everyone]
    if any(call.note for call in calls):
        return calls
    notes: list[str] = []
    if any(arguments.places != everyone[0].places for arguments in everyone):
        notes = [_in_words(arguments.places) for arguments in everyone]
    elif any(any(arguments.requires_grad) for arguments in everyone):
        notes = [arguments.autograd for arguments in everyone]
    if len(set(notes)) > 1:
        return [replace(call, note=note) for call, note in zip(calls, notes, strict=True)]
    # Those tensors alone whose dtypes or numbers of dimensions differ.
    kinds = zip(*(zip(call.dtypes, map(len, call.shapes), strict=True) for call in calls), strict=True)
    wrong = [len(set(of_ranks)) > 1 for of_ranks in kinds]
    where = listed(list(filter(None, compress(everyone[0].places, wrong))), 8)
    return [
        replace(
            call,
            operation=f"gather_uneven at {where}" if where else "gather_uneven",
            dtypes=tuple(compress(call.dtypes, wrong)),
            shapes=tuple(compress(call.shapes, wrong)),
        )
        for call in calls
        if any(wrong)
    ]


def _in_words(places: Sequence[str]) -> str:
    if not places:
        return "no tensors"
    return f"{len(places)} tensors at {listed(places, 8)}" if any(places) else "a tensor"


# -- Rows of bytes, and the two collectives that move them --

# Torch 2.13 has a new name for it.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _GatherUneven(torch.autograd.Function):
    """The gather as one node of autograd, so that all tensors share one collective in backward too."""

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        shapes: Sequence[Sequence[tuple[int, ...]]],  # of each rank's tensors
        wanted: Sequence[bool],  # which of the tensors some rank needs gradients of
        anchor: Tensor,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes, ctx.wanted = group, shapes, wanted
        ctx.like = [tensor.new_empty(0) for tensor in own]
        ctx.set_materialize_grads(False)
        longest = max(sum(_sizes(ctx.like, of_rank)) for of_rank in shapes)
        rows = _all_gather(_row(own, _carrying_device(group, own), longest), group)
        parts = [
            part
            for row, of_rank in zip(rows, shapes, strict=True)
            for part in _tensors(row, ctx.like, of_rank)
        ]
        ctx.mark_non_differentiable(*compress(parts, [not one for one in wanted] * len(shapes)))
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        like = list(compress(ctx.like, ctx.wanted))
        device, rank, size = _carrying_device(ctx.group, like), dist.get_rank(ctx.group), len(ctx.shapes)
        shapes = [list(compress(of_rank, ctx.wanted)) for of_rank in ctx.shapes]
        given = iter(compress(gradients, ctx.wanted * size))
        rows = []  # for each rank
        for of_rank in shapes:
            of_parts = [(next(given), one, shape) for one, shape in zip(like, of_rank, strict=True)]
            rows.append(
                _row([one.new_zeros(shape) if g is None else g for g, one, shape in of_parts], device)
            )
        lengths = [len(row) for row in rows]
        received = rows[0].new_empty(size * lengths[rank])
        if any(lengths):
            dist.all_to_all_single(
                received, torch.cat(rows), [lengths[rank]] * size, lengths, group=ctx.group
            )
        of_ranks = [_tensors(row, like, shapes[rank]) for row in received.view(size, -1)]
        # Half precision is added up in float32 and rounded once, in rank order on every backend.
        sums = iter([torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)])
        return None, None, None, None, *(next(sums) if wanted else None for wanted in ctx.wanted)


def _sizes(like: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [prod(shape) * one.dtype.itemsize for one, shape in zip(like, shapes, strict=True)]


def _row(tensors: Sequence[Tensor], device: torch.device, length: int = 0) -> Tensor:
    """Return the values of tensors, one after the other, as bytes, with zeros up to a length behind them."""
    plain = [tensor.detach().to(device).resolve_conj().resolve_neg() for tensor in tensors]
    # A tensor of one value is contiguous whatever its strides are, but is viewed as bytes only with those of a row.
    flat = [tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in plain]
    rows = [values.view(torch.uint8) for values in flat]
    rest = max(0, length - sum(map(len, rows)))
    return torch.cat([*rows, torch.zeros(rest, dtype=torch.uint8, device=device)])


def _tensors(row: Tensor, like: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the tensors of a row, each with its own memory, with the dtypes and devices of others."""
    sizes = _sizes(like, shapes)
    parts = torch.split(row[: sum(sizes)], sizes)
    return [
        part.clone().view(one.dtype).view(shape).to(one.device)
        for part, one, shape in zip(parts, like, shapes, strict=True)
    ]


def _carrying_device(group: dist.ProcessGroup, tensors: Sequence[Tensor] = ()) -> torch.device:
    """Return the device on which a group carries tensors: that of one of them, else the CPU, if it can."""
    # Their kinds of device are the same on every rank.
    carried = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    for tensor in tensors:
        if tensor.device.type != "cpu" and tensor.device.type in carried:
            return tensor.device
    if "cpu" in carried:
        return torch.device("cpu")
    return torch.device(carried[0], torch.get_device_module(carried[0]).current_device())


def _all_gather(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks, ``(group size, n)``, each of ``n`` bytes."""
    size = dist.get_world_size(group)
    rows = row.new_empty(size * len(row))
    if len(row):
        _all_gather_single(rows, row, group=group)
    return rows.view(size, len(row))


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
