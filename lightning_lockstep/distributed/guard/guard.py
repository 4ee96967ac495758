"""The guard of a run: its parts, the flight recorder of torch that it reads, how its errors reach the main thread."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from lightning_lockstep._doors.torch_internals import flight_recorders
from lightning_lockstep._system import write_report
from lightning_lockstep.distributed.failure.process_exit import end_now
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import is_broken_collective
from lightning_lockstep.distributed.guard.rank_state import MainThreadErrors, RankState, position_of_error
from lightning_lockstep.distributed.guard.records import (
    BACKWARD,
    Arrival,
    CollectiveCall,
    GroupRecorders,
    Outstanding,
    RecordedCall,
    group_titles,
    nearest_site,
)
from lightning_lockstep.distributed.guard.verdict import Verdict
from lightning_lockstep.distributed.guard.verify import CallVerifier, MessageRecorder
from lightning_lockstep.distributed.guard.watch import CollectiveWatch, GuardSettings
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import CollectiveError, ConfigurationError, LockstepError

# -- A last word before C++ ends this process --
# gloo throws in a thread of its own when a peer sends more than was expected; nobody can catch that, and
# the C++ library aborts the process. It calls a function before, which may be set.

# std::set_terminate of the C++ library that torch is linked with.
_LIBRARY, _SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"
_Handler = ctypes.CFUNCTYPE(None)
_function: Callable[[], None] | None = None
_kept: list[object] = []  # what C++ holds a pointer to must live


def before_terminate(function: Callable[[], None] | None) -> bool:
    """Have ``function`` called, in whichever thread that is, before C++ aborts this process over an error."""
    # It may wait, and may end the process; ``None``: nothing is called any more. Returns whether that is
    # possible here.
    global _function
    _function = function
    return bool(_kept) or (function is not None and _install())


def _install() -> bool:
    try:
        set_terminate = getattr(ctypes.CDLL(_LIBRARY), _SET)
    except (OSError, AttributeError):  # another C++ library
        return False
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    process = os.getpid()

    def handler() -> None:
        if _function is not None and os.getpid() == process:
            with suppress(Exception):
                _function()
        _Handler(before)()

    pointer = _Handler(handler)
    before = set_terminate(ctypes.cast(pointer, ctypes.c_void_p))
    _kept.append(pointer)
    return True


# -- The collectives of a rank as torch's own flight recorder has them --
# Torch keeps the last calls of every process group of gloo and nccl in a ring, in C++, also those that
# DDP's reducer makes. What it does not record: sends and receives over gloo, the reduction, the root, and
# process groups that are written in Python.
# https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

#: Calls that the ring holds; below 1 MiB with their stacks.
_CALLS = 512
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
    """Reads torch's flight recorder; see :class:`~lightning_lockstep.distributed.guard.records.CallRecorder`.

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
        """See :meth:`CallRecorder.outstanding`; about 0.1 ms."""
        # A group in which anything was called or completed since the last time this was asked is left out.
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
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    return CollectiveCall(
        operation=operation,
        group=group,
        number=_number(entry),
        dtypes=tuple(dict.fromkeys(_DTYPES.get(name, name.lower()) for name in entry["input_dtypes"])),
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        site=nearest_site(frames, BACKWARD if frames else ""),
    )


def _dumps(**options: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    # Torch keeps one ring for process groups of the CPU and, in a build with CUDA, another for nccl.
    for name, dump in flight_recorders():
        yield name, pickle.loads(dump(**options))


# -- When this rank has called its last collectives, over whatever backend --


class ArrivalReader:
    """Reads the collectives that this rank calls from now on: those of gloo, nccl and ``mpi4py``."""

    def __init__(self) -> None:
        self._recorder, self._groups = FlightRecorder(), GroupRecorders()
        self.seconds = 0.0  # how long the last `read` took

    def read(self, since: float) -> Sequence[Arrival]:
        """Return the last calls of all groups that exist, oldest first, from ``since`` on [s since 1970]."""
        began = time.perf_counter()
        found = [*self._recorder.arrivals(since)]
        found += self._groups.arrivals(since)
        found.sort(key=lambda arrival: arrival.time)
        self.seconds = time.perf_counter() - began
        return found


# -- The guard of a run: which of its parts are at work, and how an error of theirs reaches the main thread

#: Name of the file with what each rank has said of itself.
REPORT = "guard-report.json"
# How long the other ranks may take to say where they are when a collective has failed here [s].
_EXPLAIN_FOR = 15.0


class CollectiveGuard:
    """Watches the collectives of this rank, and brings errors of the watch to the main thread."""

    def __init__(
        self, channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
    ) -> None:
        self.settings, self._propagation = settings, propagation
        self.folder: Callable[[], Path | None] = lambda: None  # for the report; None: none is written
        self._verifier = CallVerifier() if settings.guard == "verify" else None
        self._messages = self._verifier or MessageRecorder()
        self._errors = MainThreadErrors(_deals_with_errors)
        self.watch = CollectiveWatch(
            channel,
            [self._verifier or FlightRecorder(), GroupRecorders()],
            settings,
            messages=self._messages.messages,
            conclude=self._conclude,
            report=self._report,
            has_failed=lambda: propagation.failed,
            has_raised=propagation.has_raised,
            store_port=int(os.environ.get("MASTER_PORT") or 0),
        )

    @property
    def error(self) -> CollectiveError | None:
        """The error that all ranks raise, once there is one; its process groups cannot be used any more."""
        return self.watch.error

    def start(self) -> None:
        """Begin to watch, and to verify if that is wanted; on all ranks between the same two collectives."""
        self._messages.start()
        self.follow()
        self.watch.start()
        self._propagation.explain = self.explain
        before_terminate(self._before_terminate)

    def follow(self) -> None:
        """Take the calling thread for the one that trains, which is watched and gets the errors."""
        self._errors.install()
        self.watch.follow(threading.current_thread())

    def stop(self) -> None:
        """Stop watching and verifying; on all ranks between the same two collectives."""
        self._messages.stop()
        self.watch.stop()
        self._errors.remove()
        before_terminate(None)
        if self._propagation.explain == self.explain:
            self._propagation.explain = None

    def explain(self, error: BaseException) -> BaseException | None:
        """Return the error that all ranks raise in place of one raised here, if there is a reason."""
        # In the main thread; where a collective has failed, the others are asked, for some seconds at most.
        self._errors.take()
        if self.error is None and is_broken_collective(error) and not isinstance(error, LockstepError):
            self.watch.explain(
                str(error),
                _EXPLAIN_FOR,
                at=position_of_error(error),
                unless=lambda: self._propagation.failed,
            )
        return None if isinstance(error, LockstepError) else self.error

    def _conclude(self, error: CollectiveError) -> None:
        self._errors.raise_soon(error)
        threading.Thread(
            target=self._end_if_stuck, args=(error,), name="lockstep-guard-end", daemon=True
        ).start()

    def _end_if_stuck(self, error: CollectiveError) -> None:
        """End this process if the main thread never gets the error, as in a call of C that does not return."""
        time.sleep(self._propagation.grace_period)
        if self._errors.take() is not None:
            self._end(error)

    def _before_terminate(self) -> None:
        """C++ is about to abort this process: let all ranks know why, if the records say so."""
        error = self.watch.explain("a thread of the backend ended the process", _EXPLAIN_FOR)
        if error is not None:
            self._end(error)

    def _end(self, error: CollectiveError) -> None:
        prints = self._propagation.prints_report and not self._propagation.parent_prints
        text = f"\nlightning-lockstep: {type(error).__name__}: {error}\n"
        # The other ranks raise it now; those that print nothing themselves ask this one first.
        time.sleep(min(2.5, self._propagation.grace_period / 4))
        if self._propagation.on_force is not None:
            self._propagation.on_force()
        end_now(1, text if prints else "")

    def _report(self, verdict: Verdict, states: Mapping[int, RankState]) -> None:
        folder = self.folder()
        if folder is None:
            return
        content = {
            "error": type(verdict.error()).__name__,
            "text": verdict.text,
            "ranks": [state.to_data() for state in states.values()],
        }
        write_report(folder / REPORT, json.dumps(content, indent=1))


def _deals_with_errors(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return bool(name.startswith("lightning_lockstep.distributed.failure"))


class _GuardOfChannel:
    """The guard of one side channel, which its fits share, and how many fits have asked for it."""

    def __init__(self, channel: SideChannel) -> None:
        self._channel, self._fits = channel, 0
        self.guard: CollectiveGuard | None = None

    def check_alike(self, settings: GuardSettings) -> None:
        """Raise unless all ranks have the same guard: one that compares would wait for one that does not."""
        self._fits += 1
        first = self._channel.claim(f"guard/{self._fits}", settings.guard)
        if first != settings.guard:
            raise ConfigurationError(
                f"guard={settings.guard!r} on rank {self._channel.rank}, and {first!r} on another rank: expected the"
                " same on all. Give every rank the same strategy, and the same LOCKSTEP_DEBUG in its environment."
            )


def guard_on(
    channel: SideChannel, propagation: FailurePropagation, settings: GuardSettings
) -> CollectiveGuard | None:
    """Return the guard of a run, at work, or ``None``; for every rank, in the thread that trains."""
    kept = channel.get_or_create(_GuardOfChannel)
    kept.check_alike(settings)
    if kept.guard is not None and kept.guard.settings == settings:
        kept.guard.follow()
        return kept.guard
    if kept.guard is not None:
        kept.guard.stop()
        kept.guard = None
    if settings.guard == "off" or channel.world_size == 1:
        return None
    kept.guard = CollectiveGuard(channel, propagation, settings)
    kept.guard.start()
    # A rank that has come to its end answers no questions: the next one collects, and names it.
    channel.before_close(kept.guard.stop)
    return kept.guard
