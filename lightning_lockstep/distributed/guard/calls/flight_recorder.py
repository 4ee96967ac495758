"""The collectives of a rank as torch's own flight recorder has them.

Torch keeps the last calls of every process group of gloo and nccl in a ring, in C++, also those that DDP's reducer
makes. What it does not record: sends and receives over gloo, the reduction, the root, and process groups that are
written in Python. https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from lightning_lockstep._doors.torch_internals import flight_recorders
from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall, is_library_file, site_text
from lightning_lockstep.distributed.guard.calls.group_names import group_titles
from lightning_lockstep.distributed.guard.calls.recorded import Arrival, Outstanding, RecordedCall

__all__ = ["FlightRecorder", "size_flight_recorder"]

#: Calls that the ring holds; below 1 MiB with their stacks.
_CALLS = 512
_AUTOGRAD = f"{os.sep}torch{os.sep}autograd{os.sep}"
_SIZE = "TORCH_FR_BUFFER_SIZE"

#: A process group: the ring that has its calls, and torch's number of it there.
_Group: TypeAlias = tuple[str, str]

# Torch's names of dtypes in C++.
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
    """Let torch's flight recorder begin, with a ring of a few hundred calls unless the user has set its size.

    Torch reads the size once, when it first needs the recorder: to be called before the first process group.
    """
    if _SIZE in os.environ:
        return
    os.environ[_SIZE] = str(_CALLS)
    try:
        for _ in _dumps(includeCollectives=False):
            pass
    finally:
        del os.environ[_SIZE]


class FlightRecorder:
    """Reads torch's flight recorder; see :class:`~lightning_lockstep.distributed.guard.calls.recorded.CallRecorder`.

    Only calls of process groups that exist, and that were made after this object, are returned: torch gives a group
    that is made anew the name of the old one.
    """

    def __init__(self) -> None:
        self._since = time.time_ns()
        # Of each process group with an incomplete call: how many were called, which completed last.
        self._counts: dict[_Group, tuple[int, int]] = {}
        # Of those whose counts have stayed: the oldest incomplete call.
        self._oldest: dict[_Group, Outstanding | None] = {}

    @property
    def is_recording(self) -> bool:
        """Whether torch has recorded anything yet; never, where its size was set to 0 or a release has no recorder."""
        return any(dump.get("pg_status") for _, dump in _dumps(includeCollectives=False))

    def outstanding(self) -> Sequence[Outstanding]:
        """See :meth:`CallRecorder.outstanding`; about 0.1 ms.

        A group in which anything was called or completed since the last time this was asked is left out.
        """
        counts: dict[_Group, tuple[int, int]] = {}
        for ring, dump in _dumps(includeCollectives=False):
            for number, status in dump.get("pg_status", {}).items():
                called, done = status["last_enqueued_collective"], status["last_completed_collective"]
                if called > max(done, 0):
                    counts[ring, number] = called, done
        # Calls complete in any order, so the counts alone do not tell; where they stay, the calls are looked at, once.
        still = [group for group, count in counts.items() if self._counts.get(group) == count]
        self._counts = counts
        if any(group not in self._oldest for group in still):
            self._oldest = self._oldest_incomplete()
        self._oldest = {group: self._oldest.get(group) for group in still}
        return [one for one in self._oldest.values() if one is not None]

    def _oldest_incomplete(self) -> dict[_Group, Outstanding | None]:
        titles, found = group_titles(), dict[_Group, Outstanding | None]()
        for ring, entry in self._entries(stacks=False):
            name = entry["process_group"][0]
            if not _is_done(entry) and not entry["is_p2p"] and name in titles:
                one = Outstanding(titles[name][0], _number(entry))
                found.setdefault((ring, str(entry["pg_id"])), one)
        return found

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        """See :meth:`CallRecorder.calls`."""
        titles = group_titles()
        # The first time with sites takes seconds, since torch imports its compiler for it.
        return [
            RecordedCall(
                call=_call(entry, titles[entry["process_group"][0]][0]),
                started=entry["time_created_ns"] / 1e9,
                done=_is_done(entry),
            )
            for _, entry in self._entries(stacks=sites)
            if entry["process_group"][0] in titles
        ]

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """Return when this rank has called its last collectives, without what else is known of them, oldest first.

        Takes 5 to 7 ms for 512 calls, half as long as :meth:`calls`, in which no other thread of Python runs.
        """
        titles = group_titles()
        return [
            Arrival(titles[name][0], entry["collective_seq_id"], entry["time_created_ns"] / 1e9)
            for _, entry in self._entries(stacks=False)
            if entry["time_created_ns"] >= since * 1e9
            and not entry["is_p2p"]
            and (name := entry["process_group"][0]) in titles
        ]

    def _entries(self, *, stacks: bool) -> list[tuple[str, dict[str, Any]]]:
        """Return what the rings hold, oldest first, each with the name of its ring."""
        entries = [
            (ring, entry)
            for ring, dump in _dumps(includeCollectives=True, includeStackTraces=stacks)
            for entry in dump.get("entries", ())
            if entry["time_created_ns"] >= self._since
        ]
        return sorted(entries, key=lambda one: one[1]["time_created_ns"])


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _number(entry: Mapping[str, Any]) -> int:
    return 0 if entry["is_p2p"] else int(entry["collective_seq_id"])  # sends and receives are not compared


def _call(entry: Mapping[str, Any], group: str) -> CollectiveCall:
    operation = entry["profiling_name"].rpartition(":")[2]
    return CollectiveCall(
        operation=operation,
        group=group,
        number=_number(entry),
        dtypes=tuple(dict.fromkeys(_DTYPES.get(name, name.lower()) for name in entry["input_dtypes"])),
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        site=_site(entry.get("frames", ())),
    )


def _site(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        if _AUTOGRAD in frame["filename"]:
            return "backward"
        if not is_library_file(frame["filename"]):
            return site_text(frame["filename"], frame["line"], frame["name"])
    return "backward" if frames else ""


def _dumps(**options: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    # Torch keeps one ring for process groups of the CPU and, in a build with CUDA, another for nccl.
    for name, dump in flight_recorders():
        yield name, pickle.loads(dump(**options))
