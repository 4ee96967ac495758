"""Tensors of different shapes, and whole structures of them, gathered from all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, islice
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from lightning_lockstep._text import listed
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall, call_site, mismatch_report
from lightning_lockstep.distributed.process_group import process_group_exists
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError

# The ranks first compare what they give and learn each other's shapes. Then one all-gather moves all tensors of all
# ranks, as rows of bytes padded to the longest: bytes pass every backend unchanged, whatever it knows of bfloat16,
# bool or complex numbers. In backward, one all-to-all sends each rank the gradients of its own tensors, which it sums.

_Tensors = TypeVar("_Tensors")  # a tensor, or containers of tensors

# Lists of :func:`gathered_entries` that are open: each collective with gradients adds one of its entries.
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
        CollectiveMismatchError: Dtypes, numbers of dimensions, kinds of device or structures differ; on every rank,
            before data moves.
        ConfigurationError: ``group`` is not a group of this rank, or every rank gives something else than tensors.

    Ranks: all of the group, together; an all-gather of 1 KiB per rank, and one of the data (memory: group size times
    the largest rank's data). In backward all again, through at least one entry: an all-to-all. Calls are undone in
    reverse order. Under DDP every rank's loss uses the same parameters before and after the gather.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"group={group!r}: expected a process group of torch.distributed that this rank belongs to, or None for"
            " all ranks. Call gather_uneven on the ranks of the group alone."
        )
    ours = group or (dist.group.WORLD if process_group_exists() else None)
    leaves, structure = pytree.tree_flatten_with_path(tensor)
    at_places = {pytree.keystr(path): _nothing_of(leaf) if _gives_nothing else leaf for path, leaf in leaves}
    # In an order that does not depend on that of a dict.
    given = dict(sorted(at_places.items(), key=lambda item: (len(item[0]), item[0])))
    fault = next(filter(None, (_fault(place, leaf) for place, leaf in given.items())), "")
    if ours is None or dist.get_world_size(ours) == 1:
        if fault:
            raise ConfigurationError(fault)
        return [tensor]
    of_ranks = _compared(fault, {} if fault else given, ours)
    shapes = [[one.shape for one in tensors.values()] for tensors in of_ranks]
    wanted = [any(tensors[place].wants_gradient for tensors in of_ranks) for place in given]
    # The anchor makes every rank take part in backward, whichever of them requires gradients.
    anchor = torch.empty(0, requires_grad=any(wanted))
    parts = _GatherUneven.apply(ours, shapes, wanted, anchor, *given.values())  # type: ignore[no-untyped-call]
    if any(wanted):
        for entries in _asked:
            entries.append(parts[wanted.index(True)])
    found = iter(parts)
    by_place = [{place: next(found) for place in given} for _ in of_ranks]
    return [pytree.tree_unflatten([of_rank[place] for place in at_places], structure) for of_rank in by_place]


@contextmanager
def giving_nothing() -> Iterator[None]:
    """Let this rank give no rows in the gathers of the body, because it has no sample."""
    global _gives_nothing
    _gives_nothing = True
    try:
        yield
    finally:
        _gives_nothing = False


_gives_nothing = False


def _nothing_of(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) and leaf.ndim else leaf


@contextmanager
def gathered_entries() -> Iterator[list[Tensor]]:
    """Keep an entry of each gather with gradients in the body, for a rank that must join their backward."""
    entries: list[Tensor] = []
    _asked.append(entries)
    try:
        yield entries
    finally:
        _asked.pop()


# -- What each rank gives, brought together and compared before data moves --

# What every rank sends at first: the length of its description, and its beginning [bytes].
_FIRST, _LENGTH = 1024, 8


class _Described(NamedTuple):
    dtype: str  # and device
    shape: tuple[int, ...]
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Described:
        name, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
        wants = torch.is_grad_enabled() and tensor.requires_grad
        return cls(name if device == "cpu" else f"{name} on {device}", tuple(tensor.shape), wants)


def _fault(place: str, leaf: object) -> str:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
        return ""
    what = f"a tensor of {leaf.layout} on {leaf.device.type}" if isinstance(leaf, Tensor) else repr(leaf)[:80]
    return (
        f"gather_uneven was given {what}{f' at {place}' if place else ''}: expected a dense tensor, or dicts, lists"
        " and tuples of them. Turn numbers into tensors with torch.tensor(), and leave out anything else."
    )


def _compared(fault: str, given: dict[str, Tensor], group: dist.ProcessGroup) -> list[dict[str, _Described]]:
    """Return the tensors of every rank by their places; raises the same on all if they do not fit together."""
    own = {place: _Described.of(tensor) for place, tensor in given.items()}
    told = [json.loads(data) for data in _gathered(json.dumps([fault, call_site(), own]).encode(), group)]
    faults, sites, tensors = zip(*told, strict=True)
    if all(faults):
        raise ConfigurationError(fault)
    everyone = [{place: _Described(*one) for place, one in of_rank.items()} for of_rank in tensors]
    kinds = [{place: (one.dtype, len(one.shape)) for place, one in of_rank.items()} for of_rank in everyone]
    places = dict.fromkeys(place for of_rank in kinds for place in of_rank)
    wrong = [place for place in places if len({of_rank.get(place) for of_rank in kinds}) > 1]
    if not wrong and not any(faults):
        return everyone
    is_missing = any(place not in of_rank for place in wrong for of_rank in kinds)
    where = "" if is_missing else listed(list(filter(None, wrong)), 8)
    calls = [
        CollectiveCall(
            operation=f"gather_uneven at {where}" if where else "gather_uneven",
            group="world" if group is dist.group.WORLD else group.group_name,
            dtypes=tuple(of_rank[place].dtype for place in wrong if place in of_rank),
            shapes=tuple(tuple(of_rank[place].shape) for place in wrong if place in of_rank),
            site=site,
            note=own_fault or (_in_words(list(of_rank)) if is_missing else ""),
            uneven=True,
        )
        for own_fault, site, of_rank in zip(faults, sites, everyone, strict=True)
    ]
    ranks = dist.get_process_group_ranks(group)
    raise CollectiveMismatchError(mismatch_report(dict(zip(ranks, calls, strict=True))))


def _in_words(places: Sequence[str]) -> str:
    if not places:
        return "no tensors"
    return f"{len(places)} tensors at {listed(places, 8)}" if any(places) else "a tensor"


def _gathered(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank: by one collective if they are few, else by two."""
    framed, width = len(data).to_bytes(_LENGTH, "little") + data, _FIRST
    while True:
        padded = bytearray(framed[:width].ljust(width, b"\0"))
        row = torch.frombuffer(padded, dtype=torch.uint8).to(carrying_device(group))
        rows = [one.tobytes() for one in all_gather_rows(row, group).cpu().numpy()]
        lengths = [_LENGTH + int.from_bytes(one[:_LENGTH], "little") for one in rows]
        if max(lengths) <= width:
            return [one[_LENGTH:length] for one, length in zip(rows, lengths, strict=True)]
        width = max(lengths)


# -- Rows of bytes, and the two collectives that move them --

# Torch 2.13 has a new name for it.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _GatherUneven(torch.autograd.Function):
    """The gather as one node of autograd, so that all tensors share one collective in backward too."""

    # Autograd fills in zeros for entries that a rank has no use for.

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
        longest = max(sum(_sizes(ctx.like, of_rank)) for of_rank in shapes)
        rows = all_gather_rows(_row(own, carrying_device(group, own), longest), group)
        parts = [part for row, of_rank in zip(rows, shapes, strict=True) for part in _tensors(row, ctx.like, of_rank)]
        ctx.mark_non_differentiable(*compress(parts, [not one for one in wanted] * len(shapes)))
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        like = list(compress(ctx.like, ctx.wanted))
        device, rank, size = carrying_device(ctx.group, like), dist.get_rank(ctx.group), len(ctx.shapes)
        shapes = [list(compress(of_rank, ctx.wanted)) for of_rank in ctx.shapes]
        given = iter(compress(gradients, ctx.wanted * size))
        rows = [_row(list(islice(given, len(like))), device) for _ in shapes]
        lengths = [len(row) for row in rows]
        received = rows[0].new_empty(size * lengths[rank])
        if any(lengths):
            dist.all_to_all_single(received, torch.cat(rows), [lengths[rank]] * size, lengths, group=ctx.group)
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
    """Return the rows of all ranks, ``(group size, n)``, each of ``n`` values."""
    size = dist.get_world_size(group)
    rows = row.new_empty(size * len(row))
    if len(row):
        _all_gather_single(rows, row, group=group)
    return rows.view(size, len(row))
