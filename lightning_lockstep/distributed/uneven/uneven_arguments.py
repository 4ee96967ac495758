"""What each rank gives to a collective whose shapes may differ, brought together and compared before data moves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall, mismatch_report
from lightning_lockstep.distributed.uneven.packed_tensors import all_gather_rows, carrying_device
from lightning_lockstep.errors import CollectiveMismatchError, ConfigurationError

__all__ = ["Arguments", "compared_arguments"]

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
    """Return the arguments of every rank of the group; raises on all alike where they do not fit together."""
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
