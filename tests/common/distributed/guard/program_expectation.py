"""What must become of a random program, worked out from the programs of its ranks alone."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from tests.common.distributed.guard.program_model import DTYPES, Program, Step

__all__ = ["Call", "Expected", "Guard", "calls_of", "expected"]

End = Literal["completes", "mismatch", "stall", "failed"]
Guard = Literal["watch", "verify"]

# How torch's flight recorder names operations; the reduce-scatter of gloo is an all-reduce of the whole.
_RECORDED = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "all_reduce",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as it is recorded; an all-gather of objects is two."""

    operation: str  # its recorded name; under ``verify`` that of torch.distributed
    dtype: str = ""  # its dtype; empty where it has no tensors
    shape: tuple[int, ...] = ()  # its shape
    root: int | None = None  # the one rank that sends or receives, if there is one
    is_length: bool = False  # whether it gathers the lengths of objects

    @property
    def wire(self) -> tuple[str, int | None, int]:
        """What the bytes that are sent depend on: gloo completes what is alike in this, whatever it means."""
        return self.operation, self.root, prod(self.shape) * DTYPES.get(self.dtype, 0)

    @property
    def compared(self) -> tuple[object, ...]:
        """What must be alike under ``verify``, which leaves sizes in an all-to-all to the ranks."""
        if self.operation == "all_to_all_single":
            return self.operation, self.dtype
        return self.operation, self.root, self.dtype, self.shape

    @property
    def visible(self) -> tuple[object, ...]:
        """What a record of a call tells, at least while it is open."""
        if self.operation == "scatter":  # none but the root records tensors
            return self.operation, self.root
        return self.operation, self.root, self.dtype, () if self.operation == "all_to_all" else self.shape


@dataclass(frozen=True)
class _Enter:
    group: int
    number: int
    call: Call


@dataclass(frozen=True)
class _Wait:
    group: int
    number: int


_Event = _Enter | _Wait | None  # None: for ever


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What may become of a program."""

    ends: Collection[End]  # the ends that are right
    rank: int | None = None  # the rank that must be named
    unfinished: Collection[int] = ()  # the ranks that cannot finish, and so must raise
    # whether the records do not show what is wrong, so that C++ may abort a rank over it
    unseen: bool = False
    # the ranks that compare what differs before it runs; the others hear of it as a failure
    disagree: Collection[int] = ()


def expected(program: Program, guard: Guard = "watch") -> Expected:
    """Return what must become of a program under a guard."""
    one = program.divergence
    if one is None:
        return Expected(ends=("completes",))
    others = [rank for rank in range(program.world_size) if rank != one.rank]
    # Nobody diagnoses anything if rank 0 is stopped, until it counts as lost after the silence limit.
    if one.kind in ("kill", "raise") or (one.kind == "stop" and one.rank == 0):
        return Expected(ends=("failed",), rank=one.rank, unfinished=others)
    if one.kind in ("sleep", "poll", "stop"):
        return Expected(ends=("stall",), rank=one.rank, unfinished=others)
    run = _Run(program, guard)
    stuck = run.stuck()
    if run.disagreement is not None:
        disagree = program.groups[run.disagreement]
        return Expected(ends=("mismatch",), rank=one.rank, unfinished=sorted(stuck), disagree=disagree)
    if not stuck:
        if (
            run.had_wrong_length
        ):  # torch makes room for objects of a length that another operation has made up
            return Expected(ends=("completes", "mismatch", "stall", "failed"), rank=one.rank, unseen=True)
        # Whether a short message passes depends on which rank forwards it.
        ends: tuple[End, ...] = ("completes", "mismatch") if run.had_short_message else ("completes",)
        return Expected(ends=ends, rank=one.rank)
    unfinished = sorted(stuck)
    if run.unlike_scatter or run.had_wrong_length:
        return Expected(
            ends=("mismatch", "stall", "failed"), rank=one.rank, unfinished=unfinished, unseen=True
        )
    if len(stuck) < program.world_size:  # some have left, and their connections have ended
        return Expected(ends=("mismatch", "stall", "failed"), rank=one.rank, unfinished=unfinished)
    groups = {event.group for event in stuck.values() if isinstance(event, _Enter | _Wait)}
    seen = any(_differs(program, guard, group, stuck) for group in groups)
    return Expected(
        ends=("mismatch",) if seen else ("mismatch", "stall"), rank=one.rank, unfinished=unfinished
    )


def calls_of(program: Program, rank: int, group: int, guard: Guard = "watch") -> list[Call]:
    """Return what a rank calls in a group, in order, were nothing ever to wait."""
    events = _events(program, rank, guard)
    return [event.call for event in events if isinstance(event, _Enter) and event.group == group]


def _differs(program: Program, guard: Guard, group: int, stuck: dict[int, _Event]) -> bool:
    """Return whether the ranks of a group have called different things under one number by the time they are stuck."""
    made = []
    for rank in program.groups[group]:
        events = _events(program, rank, guard)
        position = _Run(program, guard).position_of(rank)
        done = events if rank not in stuck else events[: position + 1]
        made.append([e.call.visible for e in done if isinstance(e, _Enter) and e.group == group])
    return any(len(set(calls)) > 1 for calls in zip(*made, strict=False))


def _events(program: Program, rank: int, guard: Guard) -> list[_Event]:
    """Return what a rank does one after the other, as far as others have to do with it."""
    # Under ``verify`` a call waits for the others before it begins, an asynchronous one too.
    events: list[_Event] = []
    numbers = dict.fromkeys(range(len(program.groups)), 0)
    waits: list[tuple[int, _Wait]] = []
    for index, step in enumerate(program.steps_of(rank)):
        if step.operation in ("sleep", "poll", "stop", "kill", "raise"):
            events.append(None)
        for call in _calls(step, guard):
            numbers[step.group] += 1
            events.append(_Enter(step.group, numbers[step.group], call))
            wait = _Wait(step.group, numbers[step.group])
            if step.waited_after:
                waits.append((index + step.waited_after, wait))
            if not step.waited_after or guard == "verify":
                events.append(wait)
        events += [wait for due, wait in waits if due <= index]
        waits = [one for one in waits if one[0] > index]
    return [*events, *(wait for _, wait in waits)]


def _calls(step: Step, guard: Guard) -> Iterator[Call]:
    if step.operation == "barrier":
        yield Call(operation="barrier")
    elif step.operation == "all_gather_object":
        yield Call(operation="all_gather", dtype="int64", shape=(1,), is_length=True)
        yield Call(operation="all_gather", dtype="uint8", shape=(len(pickle.dumps("x" * step.shape[0])),))
    elif step.operation not in ("message", "sleep", "poll", "stop", "kill", "raise"):
        recorded = _RECORDED if guard == "watch" else {}
        name = recorded.get(step.operation, step.operation)
        yield Call(operation=name, dtype=step.dtype, shape=step.shape, root=step.root)


class _Run:
    """Lets the ranks go on as far as they get: a collective completes once all have called it alike."""

    # Alike is what gloo takes for it; under ``verify`` what is compared.

    def __init__(self, program: Program, guard: Guard) -> None:
        self._program, self._guard = program, guard
        self._ranks = range(program.world_size)
        self._events = [_events(program, rank, guard) for rank in self._ranks]
        self._at = [0] * program.world_size
        self._entered: dict[tuple[int, int], dict[int, Call]] = {}
        self.had_short_message = self.had_wrong_length = self.unlike_scatter = False
        self.disagreement: int | None = None
        while any(self._advance(rank) for rank in self._ranks):
            pass

    def position_of(self, rank: int) -> int:
        """Return the index of the event at which a rank stands in the end."""
        return self._at[rank]

    def stuck(self) -> dict[int, _Event]:
        """Return the ranks that have not come to the end, and what each stands at."""
        return {
            rank: self._events[rank][self._at[rank]]
            for rank in self._ranks
            if self._at[rank] < len(self._events[rank])
        }

    def _advance(self, rank: int) -> bool:
        start = self._at[rank]
        while self._at[rank] < len(self._events[rank]) and self._passes(
            rank, self._events[rank][self._at[rank]]
        ):
            self._at[rank] += 1
        return self._at[rank] > start

    def _passes(self, rank: int, event: _Event) -> bool:
        if isinstance(event, _Enter):
            self._entered.setdefault((event.group, event.number), {})[rank] = event.call
            return True
        if isinstance(event, _Wait):
            calls = self._entered[event.group, event.number]
            return set(calls) == set(self._program.groups[event.group]) and self._completes(
                event.group, calls
            )
        return False

    def _completes(self, group: int, calls: dict[int, Call]) -> bool:
        if self._guard == "verify":
            if len({call.compared for call in calls.values()}) > 1:
                self.disagreement = group
            elif len({call.shape for call in calls.values()}) > 1:  # gloo may abort a rank over it
                self.had_wrong_length = True
            return self.disagreement != group
        alike = len({call.wire for call in calls.values()}) == 1
        if alike and len({call.visible for call in calls.values()}) > 1:
            self.had_wrong_length |= any(call.is_length for call in calls.values())
        return alike or self._is_short(calls)

    def _is_short(self, calls: dict[int, Call]) -> bool:
        """Return whether ranks differ in sizes alone, and none receives more than it has room for."""
        # gloo lets a message be shorter than its buffer. Of operations without a root, each rank also sends.
        operation, root = calls[min(calls)].wire[:2]
        if root is None or len({call.wire[:2] for call in calls.values()}) > 1:
            return False
        sizes = {rank: call.wire[2] for rank, call in calls.items()}
        at_root, others = sizes.pop(root), sizes.values()
        sends = operation in ("broadcast", "scatter")
        self.unlike_scatter |= operation == "scatter" and len(set(sizes.values()) | {at_root}) > 1
        short = all(at_root <= size if sends else at_root >= size for size in others)
        self.had_short_message |= short
        return short
