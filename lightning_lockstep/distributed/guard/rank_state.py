"""Where a rank is: what its main thread does, which collective it waits in, for whom."""

from __future__ import annotations

import ctypes
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from lightning_lockstep.distributed.failure.record import folded_stack
from lightning_lockstep.distributed.guard.activity import Connection
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall, nearest_site, site_text
from lightning_lockstep.distributed.guard.records import WORLD, Outstanding, RecordedCall, group_titles

# -- What a rank asks whose collective does not complete --


@dataclass(frozen=True, kw_only=True)
class Question:
    """Why a rank asks where the others are."""

    rank: int  # that asks
    outstanding: Outstanding | None  # what it waits in; None: a send or receive
    seconds: float  # how long it has waited
    raised: str = ""  # by the backend, if it has


# -- What the thread that trains is doing, asked from another thread, and a way to raise an error in it --
# That is the main thread of the process, unless the fit was started in another one, as Ray Train does.

# Ignored by default, so that it does no harm where no handler is installed.
_SIGNAL = signal.SIGURG
#: Stands for the function of a main thread that waits by a handle.
WAIT = "wait"
_C10D = "torch.distributed.distributed_c10d"


class Position(NamedTuple):
    """Where a thread is."""

    site: str  # nearest place in the user's own program
    stack: tuple[str, ...]  # lines, the innermost frame last, as in a traceback
    # Of torch.distributed, such as ``broadcast``; ``wait``: it waits by a handle; empty: it is in none.
    function: str = ""
    arguments: Mapping[str, str] = {}  # of that function, what reports show: ``op``, ``src``, ``dst``
    group: str = ""  # what reports call the process group it was given; empty: not known


def position(thread: threading.Thread) -> Position:
    """Return where a thread is now."""
    return _position([(one, one.f_lineno) for one in _frames(_frame_of(thread))])


def position_of_error(error: BaseException) -> Position:
    """Return where an error was raised."""
    places, traceback = [], error.__traceback__
    while traceback is not None:
        places.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _position(places[::-1])


def _position(places: Sequence[tuple[FrameType, int]]) -> Position:
    """Return what is shown of frames and their lines, innermost first."""
    named = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in places]
    stack = tuple(folded_stack(named[::-1]))
    site = nearest_site(named, site_text(*named[0]) if named else "")
    inside = [frame for frame, _ in places if frame.f_globals.get("__name__") == _C10D]
    if inside:
        # Functions that send and receive objects do so by others, which tell more.
        frame = next((one for one in inside if one.f_code.co_name in ("send", "recv")), inside[-1])
        return Position(site, stack, frame.f_code.co_name, _arguments(frame), _group(frame))
    return Position(site, stack, WAIT if places and _calls_wait(places[0][0]) else "")


def _calls_wait(frame: FrameType) -> bool:
    """Return whether the innermost function is in a call of C by the name ``wait``, as that of a work handle."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval
    return name == WAIT


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _arguments(frame: FrameType) -> dict[str, str]:
    found = {name: frame.f_locals.get(name) for name in ("op", "src", "dst", "group_src", "group_dst")}
    return {name: str(value).lower().rpartition(".")[2] for name, value in found.items() if value is not None}


def _group(frame: FrameType) -> str:
    group = frame.f_locals.get("group", "")
    if group is None:
        return WORLD
    title, _ = group_titles().get(getattr(group, "group_name", ""), ("", ()))
    return title


def waits_for_import(thread: threading.Thread) -> bool:
    """Return whether a thread is in Python's import system, perhaps since another one imports the same."""
    frame = _frame_of(thread)
    return frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap"


class MainThreadErrors:
    """Raises an error in the thread that trains from another thread, also while that sleeps or waits for a lock.

    In a call of C it gets the error when that call returns. So it does in all that waits, if it is not the main thread:
    Python runs handlers of signals in that one alone.
    """

    def __init__(self, is_critical: Callable[[FrameType], bool]) -> None:
        self._is_critical = is_critical  # at such a frame nothing is raised: that deals with errors itself
        self._pending: BaseException | None = None
        self._thread = threading.current_thread()
        self._by_signal = False
        self._before: Any = None
        self._process = os.getpid()

    def install(self) -> None:
        """Take the calling thread for the one that trains; begin to handle the signal that wakes it."""
        self._thread = threading.current_thread()
        if self._thread is threading.main_thread() and not self._by_signal:
            self._before = signal.signal(_SIGNAL, self._woken)
            self._by_signal = True

    def remove(self) -> None:
        """Give the signal back; in the main thread."""
        if self._by_signal and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._before)
            self._by_signal = False

    def raise_soon(self, error: BaseException) -> None:
        """Raise ``error`` in the thread that trains; called in another one, returns at once."""
        self._pending = error
        ident = ctypes.c_ulong(self._thread.ident or 0)
        if self._by_signal and self._thread is threading.main_thread():
            signal.pthread_kill(ident.value, _SIGNAL)
        elif not self._is_left_to(_frame_of(self._thread)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(self._class_that_makes(error)))

    def take(self) -> BaseException | None:
        """Return the error that was to be raised and has not been, once."""
        error, self._pending = self._pending, None
        return error

    def _class_that_makes(self, error: BaseException) -> type[BaseException]:
        """Return a class of which Python, which is given no more than a class, makes ``error`` itself."""

        def make(cls: type[BaseException]) -> BaseException:
            self.take()
            return error

        kind = type(error)
        return type(kind.__name__, (kind,), {"__new__": make, "__module__": kind.__module__})

    def _is_left_to(self, frame: FrameType | None) -> bool:
        """Return whether the code at a frame, or what has called it, asks for the error itself."""
        return any(self._is_critical(one) for one in _frames(frame))

    def _woken(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        if self._pending is None or os.getpid() != self._process or self._is_left_to(frame):
            return
        error = self.take()
        if error is not None:
            raise error


# -- What one rank says when it is asked where it is --

#: Functions of torch.distributed by which one rank waits for one other.
MESSAGES = ("send", "recv")
# What is sent of a state as it is.
_PLAIN = ("rank", "host", "pid", "seconds_since_call", "moves", "transfers", "raised")


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Where one rank is."""

    rank: int
    host: str = ""
    pid: int = 0
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks of each group that it is in
    outstanding: tuple[Outstanding, ...] = ()  # the oldest incomplete collective of each group that has one
    calls: tuple[RecordedCall, ...] = ()  # the last ones of all groups, oldest first
    seconds_since_call: float | None = None  # since the last one, by this host's clock; None: there is none
    position: Position = field(default_factory=lambda: Position("", ()))  # of its main thread
    # Sends and receives of which its main thread waits for one, by a handle; their roots are the peers.
    awaited: tuple[CollectiveCall, ...] = ()
    moves: bool = False  # its program computes, reads or writes, rather than waits or sleeps
    transfers: bool = False  # bytes move on its TCP connections
    raised: bool = False  # its last collective has raised an error, at ``position``
    connections: tuple[Connection, ...] = ()
    ports: tuple[int, ...] = ()  # at one end of connections that are not the backend's

    def to_data(self) -> dict[str, Any]:
        """Return the state as plain data, as JSON can hold it."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "groups": {name: list(ranks) for name, ranks in self.groups.items()},
            "outstanding": [list(one) for one in self.outstanding],
            "calls": [call.to_data() for call in self.calls],
            "position": list(self.position),
            "awaited": [call.to_data() for call in self.awaited],
            "connections": [list(one) for one in self.connections],
            "ports": list(self.ports),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RankState:
        """Return the state that :meth:`to_data` has described, also after a way through JSON."""
        site, stack, function, arguments, group = data["position"]
        return cls(
            **{name: data[name] for name in _PLAIN},
            groups={name: tuple(ranks) for name, ranks in data["groups"].items()},
            outstanding=tuple(Outstanding(*one) for one in data["outstanding"]),
            calls=tuple(RecordedCall.from_data(call) for call in data["calls"]),
            position=Position(site, tuple(stack), function, dict(arguments), group),
            awaited=tuple(CollectiveCall.from_data(call) for call in data["awaited"]),
            connections=tuple((here, there) for here, there in data["connections"]),
            ports=tuple(data["ports"]),
        )

    def calls_of(self, group: str) -> dict[int, CollectiveCall]:
        """Return the last collectives of a group by their numbers; sends and receives have none."""
        return {
            one.call.number: one.call for one in self.calls if one.call.group == group and one.call.number
        }

    def last_call(self, group: str) -> CollectiveCall | None:
        """Return the last collective of a group, if it is known."""
        return next(reversed(self.calls_of(group).values()), None)

    def has_called(self, wanted: Outstanding) -> bool:
        """Return whether this rank has called a collective, complete or not."""
        if any(one.group == wanted.group and one.number >= wanted.number for one in self.outstanding):
            return True
        last = self.last_call(wanted.group)
        return last is not None and last.number >= wanted.number

    def peers(self) -> set[int]:
        """Return the ranks with one of which this one is in the middle of sending or receiving, if it is."""
        if self.position.function not in MESSAGES:
            return {call.root for call in self.awaited if call.root is not None}
        name = "dst" if self.position.function == "send" else "src"
        given = self.position.arguments.get(name, "")
        if given.isdecimal():
            return {int(given)}
        in_group = self.position.arguments.get(f"group_{name}", "")
        ranks = self.groups.get(self.position.group, ())
        return {ranks[int(in_group)]} if in_group.isdecimal() and int(in_group) < len(ranks) else set()

    def is_in_message(self) -> bool:
        """Return whether this rank is in the middle of sending or receiving."""
        return self.position.function in MESSAGES or bool(self.awaited)

    def call(self, wanted: Outstanding) -> CollectiveCall:
        """Return what this rank has called as a collective, with what its main thread knows of it."""
        recorded = self.calls_of(wanted.group).get(wanted.number)
        if recorded is None:
            recorded = CollectiveCall(operation="(not recorded)", group=wanted.group, number=wanted.number)
        if wanted not in self.outstanding and not (self.raised and self._is_last(wanted)):
            return recorded
        known = {"site": recorded.site or self.position.site}
        names = (recorded.operation, recorded.operation.removeprefix("_"))
        is_of_group = self.position.group in ("", wanted.group)
        function = self.position.function
        if is_of_group and (function in names or function.removesuffix("_object_list") in names):
            known["site"] = self.position.site or recorded.site
            return _with_arguments(recorded, self.position.arguments, **known)
        return _with_arguments(recorded, {}, **known)

    def _is_last(self, wanted: Outstanding) -> bool:
        last = self.last_call(wanted.group)
        return last is not None and last.number == wanted.number

    def message(self) -> CollectiveCall:
        """Return the send or receive that this rank is in."""
        if self.position.function in MESSAGES:
            peer = next(iter(self.peers()), None)
            titles = [_message_title(self.position.function, peer)]
        else:
            titles = [_message_title(call.operation, call.root) for call in self.awaited]
        return CollectiveCall(operation=" or ".join(dict.fromkeys(titles)), group="", site=self.position.site)


def _message_title(operation: str, peer: int | None) -> str:
    whom = "any rank" if peer is None else str(peer)
    return f"send to {whom}" if operation == "send" else f"receive from {whom}"


def _with_arguments(call: CollectiveCall, arguments: Mapping[str, str], *, site: str) -> CollectiveCall:
    data = call.to_data()
    root = arguments.get("src", arguments.get("dst", ""))
    if root.isdecimal() and call.operation in ("broadcast", "reduce", "gather", "scatter"):
        data["root"] = int(root)
    if "op" in arguments and "reduce" in call.operation:
        data["reduce_op"] = arguments["op"]
    return CollectiveCall.from_data({**data, "site": site})


def members(states: Mapping[int, RankState], group: str) -> Sequence[int]:
    """Return the ranks of a group, from any rank that belongs to it."""
    return next((state.groups[group] for state in states.values() if group in state.groups), ())


# -- Which rank waits for which, by what each has said of itself --


class WaitingRanks:
    """Who waits for whom."""

    def __init__(
        self, states: Mapping[int, RankState], silent: Mapping[int, str], running: Collection[int] = ()
    ) -> None:
        self._states, self._silent, self._running = states, silent, running

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank is in a collective that is not complete, or in a send or receive."""
        state = self._states.get(rank)
        return state is not None and (bool(state.outstanding) or state.is_in_message())

    def waiting(self) -> list[int]:
        return [rank for rank in sorted(self._states) if self.is_waiting(rank)]

    def waits_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank waits for: those that have not called what it has called."""
        state = self._states.get(rank)
        if state is None:
            return set()
        missing: set[int] = set()
        for outstanding in state.outstanding:
            there = members(self._states, outstanding.group)
            missing |= {
                other for other in there if other != rank and not self._has_called(other, outstanding)
            }
        if not state.outstanding and state.is_in_message():
            missing |= state.peers()
        return missing

    def reached_from(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for, and those that they wait for, and so on."""
        found: set[int] = set()
        to_visit = [rank]
        while to_visit:
            new = self.waits_for(to_visit.pop()) - found
            found |= new
            to_visit += sorted(new)
        return sorted(found)

    def stuck(self) -> set[int]:
        """Return the ranks that will not go on by themselves: all but those that move, or wait for such alone."""
        going_on = {rank for rank, state in self._states.items() if state.moves and not self.is_waiting(rank)}
        going_on |= set(self._running)
        while True:
            more = {rank for rank in self.waiting() if rank not in going_on and self._follows(rank, going_on)}
            if not more:
                return (set(self._states) | set(self._silent)) - going_on
            going_on |= more

    def _follows(self, rank: int, going_on: set[int]) -> bool:
        """Return whether a rank that waits goes on once others do."""
        waits = self.waits_for(rank)
        if not self._states[rank].outstanding:
            return bool(waits & going_on)  # which of several sends and receives it waits for is not known
        return bool(waits) and waits <= going_on

    def _has_called(self, rank: int, wanted: Outstanding) -> bool:
        return rank in self._states and self._states[rank].has_called(wanted)
