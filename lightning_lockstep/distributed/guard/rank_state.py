"""Where a rank is: which collectives it has called, which it waits in, what the thread that trains does."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.failure.tracebacks import folded_stack
from lightning_lockstep.distributed.guard.collective_call import (
    BACKWARD,
    CollectiveCall,
    nearest_site,
    site_text,
)
from lightning_lockstep.distributed.process_group import process_groups
from lightning_lockstep.distributed.side_channel.channel import SideChannel

# -- The last collectives of a rank, in one form for all recorders --


class Outstanding(NamedTuple):
    """A collective that this rank has called and that is not complete."""

    group: str  # the same as `CollectiveCall.group`
    number: int  # counted from 1


class RecordedCall(NamedTuple):
    call: CollectiveCall
    started: float  # [s since 1970, by this host's clock]
    done: bool


class CallRecorder(Protocol):
    """Knows which collectives this rank has called; any thread may ask it while the main thread waits in one."""

    # Returns the oldest incomplete collective of each group that has one; cheap enough to call every second.
    def outstanding(self) -> Sequence[Outstanding]:
        calls = [one.call for one in self.calls(sites=False) if not one.done]
        return [Outstanding(call.group, call.number) for call in calls]

    # Returns the last calls of all groups, each group's oldest first; with call sites if ``sites``, even if it is slow.
    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]: ...


# -- The titles of process groups in reports, which are the same on all of their ranks --

#: The title of the default process group.
WORLD = "world"


def group_title(name: str, ranks: Sequence[int]) -> str:
    """Return the title of a group in reports, such as ``1 (ranks 0, 2)``, with its ranks in the default group."""
    return f"{name} (ranks {', '.join(map(str, ranks))})"


def group_titles() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return title and ranks of each process group that this rank belongs to, by the name of the group in torch."""
    titles: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in process_groups():
        with suppress(KeyError):  # another thread is making or destroying it
            name, ranks = group.group_name, tuple(dist.get_process_group_ranks(group))
            titles[name] = (WORLD if group is dist.group.WORLD else group_title(name, ranks), ranks)
    return titles


# -- Torch's own flight recorder --
# Torch keeps the last calls of all process groups of gloo and nccl in a ring buffer in C++, also those of DDP's
# reducer. It does not record sends and receives over gloo, the reduction, the root, and calls of process groups that
# are written in Python.
# https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

# How many calls the ring holds; with their stacks they take less than 1 MiB.
_CALLS = 512
# The environment variable by which a user sets the size of the ring; 0 means that there is none.
_RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"


def size_flight_recorder() -> None:
    """Start torch's flight recorder with a ring of a few hundred calls, unless the user has set its size."""
    # Torch reads the size once, when it first needs the recorder: call this before the first process group.
    if _RECORDER_SIZE in os.environ:
        return
    os.environ[_RECORDER_SIZE] = str(_CALLS)
    try:
        for _ in _dumps(includeCollectives=False):
            pass
    finally:
        del os.environ[_RECORDER_SIZE]


class FlightRecorder(CallRecorder):
    """Reads torch's flight recorder."""

    # It leaves out calls of process groups that no longer exist, and calls made before this object, because torch
    # gives a group that is made anew the name of the old one.

    def __init__(self) -> None:
        self._since = time.time_ns()
        # For each group with an incomplete call, by ring and torch's ID of the group there: the numbers of the last
        # call that was enqueued and of the last one that completed, at the last look.
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def outstanding(self) -> Sequence[Outstanding]:
        # A group is left out if a call of it was enqueued or completed since the last look; to see that takes 0.1 ms.
        # The calls of the others are read: they complete in any order, so two numbers do not tell which is incomplete.
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for ring, dump in _dumps(includeCollectives=False):
            for number, status in dump.get("pg_status", {}).items():
                called, done = status["last_enqueued_collective"], status["last_completed_collective"]
                if called > max(done, 0):
                    counts[ring, number] = called, done
        still = {group for group, count in counts.items() if self._counts.get(group) == count}
        self._counts = counts
        oldest: dict[tuple[str, str], Outstanding] = {}
        for ring, title, entry in self._entries(stacks=False) if still else ():
            group = ring, str(entry["pg_id"])
            if group in still and not _is_done(entry) and not entry["is_p2p"]:
                oldest.setdefault(group, Outstanding(title, int(entry["collective_seq_id"])))
        return list(oldest.values())

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        # The first time with sites takes seconds, because torch imports its compiler for them.
        return [_recorded(entry, title) for _, title, entry in self._entries(stacks=sites)]

    def _entries(self, *, stacks: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Return the entries of the rings, each with the name of its ring and the title of its group."""
        titles = group_titles()
        for ring, dump in _dumps(includeCollectives=True, includeStackTraces=stacks):
            for entry in dump.get("entries", ()):  # the oldest first
                name = entry["process_group"][0]
                if entry["time_created_ns"] >= self._since and name in titles:
                    yield ring, titles[name][0], entry


def _dumps(**options: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    # Torch keeps one ring for process groups of the CPU and, in a build with CUDA, another for nccl.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            yield name, pickle.loads(dump(**options))


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _recorded(entry: Mapping[str, Any], group: str) -> RecordedCall:
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    call = CollectiveCall(
        operation=entry["profiling_name"].rpartition(":")[2],
        group=group,
        number=0 if entry["is_p2p"] else int(entry["collective_seq_id"]),
        dtypes=tuple(dict.fromkeys(map(_dtype, entry["input_dtypes"]))),
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        site=nearest_site(frames, BACKWARD if frames else ""),
    )
    return RecordedCall(call=call, started=entry["time_created_ns"] / 1e9, done=_is_done(entry))


def _dtype(name: str) -> str:
    """Return the name in Python of a dtype that torch names as in C++, such as ``float32`` for ``Float``."""
    kind: Any = getattr(torch, f"{name}Tensor", None)
    return name.lower() if kind is None else str(kind.dtype).removeprefix("torch.")


def group_recorders() -> list[CallRecorder]:
    """Return the groups that record their own calls because torch does not, as those of the backend ``mpi4py`` do."""
    return [group for group in process_groups() if hasattr(group, "outstanding")]


class GatherRecorder(CallRecorder):
    """Reads the watched gathers of the side channel, each call as a group of its own."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel = channel

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the titles of the last calls, and the ranks."""
        return {one.call.group: tuple(range(self._channel.world_size)) for one in self.calls()}

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        return [
            RecordedCall(
                call=CollectiveCall(operation="gather", group=f"{gather.name} {one.key}", number=1),
                started=one.began,
                done=not one.waits,
            )
            for gather in self._channel.watched
            for one in list(gather.last)
        ]


# -- What the thread that trains is doing, asked from another thread --
# It is the main thread of the process, unless the fit was started in another one, as in Ray Train.

_C10D = "torch.distributed.distributed_c10d"


class Position(NamedTuple):
    site: str  # the nearest place in the user's own program
    stack: Sequence[str]  # lines, the innermost frame last, as in a traceback
    # The function of torch.distributed that it is in, such as ``broadcast``; empty if it is in none.
    function: str = ""
    arguments: Mapping[str, str] = {}  # of that function, those that reports show: ``op``, ``src``, ``dst``
    group: str = ""  # title of the process group that the function was given; empty if not known


def position(thread: threading.Thread) -> Position:
    """Return where a thread is now."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    return _position([] if frame is None else [*walk_stack(frame)])


def position_of_error(error: BaseException) -> Position:
    return _position([*walk_tb(error.__traceback__)][::-1])


def _position(places: Sequence[tuple[FrameType, int]]) -> Position:
    """Return the position of frames and their lines, innermost first."""
    named = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in places]
    stack = tuple(folded_stack(named[::-1]))
    site = nearest_site(named, site_text(*named[0]) if named else "")
    inside = [frame for frame, _ in places if frame.f_globals.get("__name__") == _C10D]
    if not inside:
        return Position(site, stack)
    called, given = inside[-1].f_code.co_name, inside[-1].f_locals
    arguments = {name: given[name] for name in ("op", "src", "dst") if given.get(name) is not None}
    texts = {name: str(value).lower().rpartition(".")[2] for name, value in arguments.items()}
    group = given.get("group", "")
    name = getattr(group, "group_name", "")
    title = WORLD if group is None else group_titles().get(name, ("", ()))[0]
    return Position(site, stack, called, texts, title)


# -- The question of a rank whose collective does not complete, and the state that each rank then reports --


class DiagnosisRequest(NamedTuple):
    """The question of a rank: why does a collective not complete?"""

    rank: int  # the one that asks
    outstanding: Outstanding | None  # what it waits in; None if the backend has raised and nothing is open
    seconds: float  # how long it has waited
    raised: str = ""  # the text of the backend's error, if it has raised one


@dataclass(frozen=True, kw_only=True)
class RankState:
    rank: int
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)  # ranks of each group that it is in
    outstanding: tuple[Outstanding, ...] = ()  # the oldest incomplete collective of each group that has one
    calls: tuple[RecordedCall, ...] = ()  # the last ones of all groups, oldest first
    seconds_since_call: float | None = None  # since its last call, by its host's clock; None without one
    position: Position = field(default_factory=lambda: Position("", ()))  # of the thread that trains
    where: Mapping[str, Any] = field(default_factory=dict)  # epoch, step, batch and stage of its Trainer
    moves: bool = False  # whether its process computes, reads or writes
    raised: bool = False  # whether its last collective has raised an error, at ``position``

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RankState:
        """Return the state from the data of ``asdict``, also if JSON has made lists of its tuples."""
        calls = tuple(RecordedCall(CollectiveCall.from_data(call), *rest) for call, *rest in data["calls"])
        waits = tuple(Outstanding(*one) for one in data["outstanding"])
        position = Position(*data["position"])
        return cls(**{**data, "calls": calls, "outstanding": waits, "position": position})

    @functools.cached_property  # because it is read for each pair of ranks
    def calls_of(self) -> Mapping[str, dict[int, CollectiveCall]]:
        """The last collectives of each group by their numbers."""
        found: dict[str, dict[int, CollectiveCall]] = defaultdict(dict)
        for one in self.calls:
            if one.call.number:
                found[one.call.group][one.call.number] = one.call
        return found

    def last_call(self, group: str) -> CollectiveCall | None:
        return next(reversed(self.calls_of[group].values()), None)

    def has_called(self, wanted: Outstanding) -> bool:
        """Return whether this rank has called a collective, complete or not."""
        if any(one.group == wanted.group and one.number >= wanted.number for one in self.outstanding):
            return True
        last = self.last_call(wanted.group)
        return last is not None and last.number >= wanted.number

    def call(self, wanted: Outstanding) -> CollectiveCall:
        """Return this rank's call of a collective, with what the position of its thread adds to the record."""
        recorded = self.calls_of[wanted.group].get(wanted.number)
        if recorded is None:
            recorded = CollectiveCall(operation="(not recorded)", group=wanted.group, number=wanted.number)
        recorded = replace(recorded, where=self.where)
        last = self.last_call(wanted.group)
        is_last = last is not None and last.number == wanted.number
        if wanted not in self.outstanding and not (self.raised and is_last):
            return recorded
        _, _, function, arguments, group = self.position
        functions = {function, function.removesuffix("_object_list")}
        names = {recorded.operation, recorded.operation.removeprefix("_")}
        if group not in ("", wanted.group) or not functions & names:
            return replace(recorded, site=recorded.site or self.position.site)
        known: dict[str, Any] = {"site": self.position.site or recorded.site}
        root = arguments.get("src", arguments.get("dst", ""))
        if root.isdecimal() and recorded.operation in ("broadcast", "reduce", "gather", "scatter"):
            known["root"] = int(root)
        if "op" in arguments and "reduce" in recorded.operation:
            known["reduce_op"] = arguments["op"]
        return replace(recorded, **known)


class UnresponsiveRank(NamedTuple):
    reason: str
    has_ended: bool = False  # whether its process has ended
    has_left: bool = False  # whether its program has ended without an error
    is_stopped: bool = False  # whether its process is stopped
    # Whether its process runs although it does not answer, for example while code in C computes and holds the GIL.
    is_moving: bool = False
