"""What a rank has called lately, in one form whatever has recorded it: torch, a backend in Python, or this package."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.guard.collective_call import (
    BACKWARD,
    CollectiveCall,
    nearest_site,
)
from lightning_lockstep.distributed.process_group import process_group_exists

# -- The record of a call, and what every recorder tells of those that it has --


class Outstanding(NamedTuple):
    """A collective that this rank has called and that is not complete."""

    group: str  # as `CollectiveCall.group` has it
    number: int  # from 1


class Arrival(NamedTuple):
    """When this rank has called a collective."""

    group: str  # as `CollectiveCall.group` has it
    number: int  # from 1; the same on every rank of the group
    time: float  # [s since 1970, by this host's clock]


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective that this rank has called."""

    call: CollectiveCall
    started: float  # [s since 1970, by this host's clock]
    done: bool

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RecordedCall:
        """Return what :meth:`to_data` has described, also after a way through JSON."""
        return cls(**{**data, "call": CollectiveCall.from_data(data["call"])})


class CallRecorder(Protocol):
    """Knows which collectives this rank has called; any thread may ask it while the main thread waits in one."""

    @property
    def is_recording(self) -> bool: ...  # whether it has recorded anything yet

    # The oldest incomplete collective of each group that has one; cheap enough to ask every second.
    def outstanding(self) -> Sequence[Outstanding]: ...

    # The last calls of all groups, oldest first; ``sites``: with call sites, even if slow.
    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]: ...


# -- What process groups are called in reports, the same on all of their ranks --

#: The default process group.
WORLD = "world"


def group_title(name: str, ranks: Sequence[int]) -> str:
    """Return what a group is called in reports, such as ``1 (ranks 0, 2)``; ranks as in the default group."""
    return f"{name} (ranks {', '.join(map(str, ranks))})"


def group_titles() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return title and ranks of each process group that this rank belongs to, by its name in torch."""
    if not process_group_exists():
        return {}
    world = dist.group.WORLD
    titles: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group, ranks_of in dict(dist.distributed_c10d._world.pg_group_ranks).items():
        if not isinstance(group, dist.ProcessGroup):
            continue
        ranks = tuple(sorted(ranks_of, key=ranks_of.__getitem__))
        name: str = group.group_name
        titles[name] = (WORLD if group is world else group_title(name, ranks), ranks)
    return titles


def compares_calls(group: object) -> bool:
    """Return whether a process group compares the calls of its ranks itself, so that nobody else needs to."""
    # A backend says so by an attribute ``compares_calls`` of its process groups.
    return bool(getattr(group, "compares_calls", False))


# -- Torch's own flight recorder --
# Torch keeps the last calls of every process group of gloo and nccl in a ring, in C++, also those that
# DDP's reducer makes. What it does not record: sends and receives over gloo, the reduction, the root, and
# process groups that are written in Python.
# https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

# Calls that the ring holds; below 1 MiB with their stacks.
_CALLS = 512
_SIZE = "TORCH_FR_BUFFER_SIZE"

# Torch's names of dtypes in C++; the others are those of Python with a capital letter.
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def size_flight_recorder() -> None:
    """Let torch's recorder begin, with a ring of a few hundred calls unless the user has set its size."""
    # Torch reads the size once, when it first needs the recorder: call this before the first process group.
    if _SIZE in os.environ:
        return
    os.environ[_SIZE] = str(_CALLS)
    try:
        for _ in _dumps(includeCollectives=False):
            pass
    finally:
        del os.environ[_SIZE]


class FlightRecorder:
    """Reads torch's flight recorder; a :class:`CallRecorder`."""

    # Left out are calls of process groups that no longer exist, and those made before this object: torch
    # gives a group that is made anew the name of the old one.

    def __init__(self) -> None:
        self._since = time.time_ns()
        # Of each group with an incomplete call, by ring and torch's number of it there: how many were called, and which
        # completed last, at the last look.
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        # The oldest incomplete call of those whose counts stay; None: there is none.
        self._oldest: dict[tuple[str, str], Outstanding | None] = {}

    @property
    def is_recording(self) -> bool:
        # Never, where the size of the ring was set to 0 or a release has no recorder.
        return any(dump.get("pg_status") for _, dump in _dumps(includeCollectives=False))

    def outstanding(self) -> Sequence[Outstanding]:
        # 0.1 ms: a group in which anything was called or completed since the last look is left out. Calls complete in
        # any order, so the counts alone do not tell which one is incomplete: where they stay, the calls are read once.
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        for ring, dump in _dumps(includeCollectives=False):
            for number, status in dump.get("pg_status", {}).items():
                called, done = status["last_enqueued_collective"], status["last_completed_collective"]
                if called > max(done, 0):
                    counts[ring, number] = called, done
        still = {group for group, count in counts.items() if self._counts.get(group) == count}
        self._counts = counts
        if not still <= set(self._oldest):
            self._oldest = {}
            for ring, title, entry in self._entries(stacks=False):
                if not _is_done(entry) and not entry["is_p2p"]:
                    one = Outstanding(title, int(entry["collective_seq_id"]))
                    self._oldest.setdefault((ring, str(entry["pg_id"])), one)
        self._oldest = {group: self._oldest.get(group) for group in still}
        return [one for one in self._oldest.values() if one is not None]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        # The first time with sites takes seconds, since torch imports its compiler for it.
        return [_recorded(entry, title) for _, title, entry in self._entries(stacks=sites)]

    def arrivals(self, since: float) -> Sequence[Arrival]:
        # 5 to 7 ms for 512 calls, half as long as `calls`, in which no other thread of Python runs.
        return [
            Arrival(title, entry["collective_seq_id"], entry["time_created_ns"] / 1e9)
            for _, title, entry in self._entries(stacks=False)
            if entry["time_created_ns"] >= since * 1e9 and not entry["is_p2p"]
        ]

    def _entries(self, *, stacks: bool) -> list[tuple[str, str, dict[str, Any]]]:
        """Return what the rings hold, oldest first, each with the name of its ring and the title of its group."""
        titles = group_titles()
        entries = [
            (ring, titles[name][0], entry)
            for ring, dump in _dumps(includeCollectives=True, includeStackTraces=stacks)
            for entry in dump.get("entries", ())
            if entry["time_created_ns"] >= self._since and (name := entry["process_group"][0]) in titles
        ]
        return sorted(entries, key=lambda one: one[2]["time_created_ns"])


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
        dtypes=tuple(dict.fromkeys(_DTYPES.get(name, name.lower()) for name in entry["input_dtypes"])),
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        site=nearest_site(frames, BACKWARD if frames else ""),
    )
    return RecordedCall(call=call, started=entry["time_created_ns"] / 1e9, done=_is_done(entry))


# -- The recorders of process groups that are written in Python, such as those of the backend ``mpi4py`` --


class GroupRecorders:
    """All of them as one: torch's recorder does not see such groups, and each has a ``call_recorder``."""

    @property
    def is_recording(self) -> bool:
        return any(recorder.is_recording for recorder in _group_recorders())

    def outstanding(self) -> Sequence[Outstanding]:
        return [one for recorder in _group_recorders() for one in recorder.outstanding()]

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        calls = [call for recorder in _group_recorders() for call in recorder.calls(sites=sites)]
        return sorted(calls, key=lambda one: one.started)

    def arrivals(self, since: float) -> Sequence[Arrival]:
        arrivals = [one for recorder in _group_recorders() for one in recorder.arrivals(since)]
        return sorted(arrivals, key=lambda one: one.time)


def _group_recorders() -> list[Any]:
    if not process_group_exists():
        return []
    groups = list(dist.distributed_c10d._world.pg_map)  # a copy: another thread may be making a group
    return [group.call_recorder for group in groups if hasattr(group, "call_recorder")]


class ArrivalReader:
    """Reads when this rank calls its collectives from now on, over whatever backend."""

    def __init__(self) -> None:
        self._recorders = (FlightRecorder(), GroupRecorders())
        self.seconds = 0.0  # how long the last `read` took

    def read(self, since: float) -> Sequence[Arrival]:
        """Return the last calls of all groups that exist, oldest first, from ``since`` on [s since 1970]."""
        began = time.perf_counter()
        found = [one for recorder in self._recorders for one in recorder.arrivals(since)]
        found.sort(key=lambda arrival: arrival.time)
        self.seconds = time.perf_counter() - began
        return found
