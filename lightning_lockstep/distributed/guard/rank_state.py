"""Where a rank is: what its main thread does, which collective it waits in, for whom."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from lightning_lockstep.distributed.failure.record import folded_stack, own_place
from lightning_lockstep.distributed.guard.activity import (
    OURS,
    Activity,
    Connection,
    UnresponsiveRank,
    connections,
    is_rank_of,
)
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall, nearest_site, site_text
from lightning_lockstep.distributed.guard.records import (
    WORLD,
    CallRecorder,
    Outstanding,
    RecordedCall,
    group_titles,
)
from lightning_lockstep.distributed.side_channel.channel import SideChannel

# -- What the thread that trains is doing, asked from another thread --
# That is the main thread of the process, unless the fit was started in another one, as Ray Train does.

# Modules of Python inside of which nobody says from outside whether a thread moves: data may, and an import may wait
# for the one by which torch finds call sites for us.
_UNKNOWN = ("socket", "ssl", "importlib._bootstrap")
_C10D = "torch.distributed.distributed_c10d"


class Position(NamedTuple):
    """Where a thread is."""

    site: str  # nearest place in the user's own program
    stack: tuple[str, ...]  # lines, the innermost frame last, as in a traceback
    # Of torch.distributed, such as ``broadcast``; empty: it is in none.
    function: str = ""
    arguments: Mapping[str, str] = {}  # of that function, what reports show: ``op``, ``src``, ``dst``
    group: str = ""  # what reports call the process group it was given; empty: not known


def position(thread: threading.Thread) -> Position:
    """Return where a thread is now."""
    return _position([(one, one.f_lineno or 0) for one in _frames(_frame_of(thread))])


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
    if not inside:
        return Position(site, stack)
    return Position(site, stack, inside[-1].f_code.co_name, _arguments(inside[-1]), _group(inside[-1]))


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _arguments(frame: FrameType) -> dict[str, str]:
    found = {name: frame.f_locals.get(name) for name in ("op", "src", "dst")}
    return {name: str(value).lower().rpartition(".")[2] for name, value in found.items() if value is not None}


def _group(frame: FrameType) -> str:
    group = frame.f_locals.get("group", "")
    if group is None:
        return WORLD
    title, _ = group_titles().get(getattr(group, "group_name", ""), ("", ()))
    return title


def _may_move_unseen() -> bool:
    """Return whether a thread is where nobody says whether it moves; what trains may wait for that one."""
    ours = {one.ident for one in threading.enumerate() if one.name.startswith(OURS)}
    return any(
        # One that accepts connections waits forever, as that of multiprocessing does.
        frame.f_globals.get("__name__") in _UNKNOWN and frame.f_code.co_name != "accept"
        for ident, frame in sys._current_frames().items()
        if ident not in ours
    )


# -- What a rank asks whose collective does not complete, and what each rank says of itself then --

# Calls of each rank that are compared.
_COMPARED = 100


@dataclass(frozen=True, kw_only=True)
class DiagnosisRequest:
    """Why a rank asks where the others are."""

    rank: int  # that asks
    outstanding: Outstanding | None  # what it waits in; None: the backend has raised, and nothing is open
    seconds: float  # how long it has waited
    raised: str = ""  # by the backend, if it has


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
    where: Mapping[str, Any] = field(default_factory=dict)  # epoch, step, batch and stage of its Trainer
    moves: bool = False  # its process computes, reads or writes, rather than waits or sleeps
    raised: bool = False  # its last collective has raised an error, at ``position``
    connections: tuple[Connection, ...] = ()
    ports: tuple[int, ...] = ()  # at one end of connections that are not the backend's

    def to_data(self) -> dict[str, Any]:
        """Return the state as plain data, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RankState:
        """Return the state that :meth:`to_data` has described, also after a way through JSON."""
        state: RankState = from_plain(cls, data)
        return state

    def calls_of(self, group: str) -> dict[int, CollectiveCall]:
        """Return the last collectives of a group by their numbers."""
        return self._calls_by_group.get(group, {})

    @functools.cached_property  # asked for once for each pair of ranks
    def _calls_by_group(self) -> Mapping[str, dict[int, CollectiveCall]]:
        found: dict[str, dict[int, CollectiveCall]] = {}
        for one in self.calls:
            if one.call.number:
                found.setdefault(one.call.group, {})[one.call.number] = one.call
        return found

    def last_call(self, group: str) -> CollectiveCall | None:
        """Return the last collective of a group, if it is known."""
        return next(reversed(self.calls_of(group).values()), None)

    def has_called(self, wanted: Outstanding) -> bool:
        """Return whether this rank has called a collective, complete or not."""
        if any(one.group == wanted.group and one.number >= wanted.number for one in self.outstanding):
            return True
        last = self.last_call(wanted.group)
        return last is not None and last.number >= wanted.number

    def call(self, wanted: Outstanding) -> CollectiveCall:
        """Return what this rank has called as a collective, with what its main thread knows of it."""
        recorded = self.calls_of(wanted.group).get(wanted.number)
        if recorded is None:
            recorded = CollectiveCall(operation="(not recorded)", group=wanted.group, number=wanted.number)
        recorded = replace(recorded, where=self.where)
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


def from_plain(kind: Any, data: Any) -> Any:
    """Return a ``kind`` of what `asdict` has made of one, also after a way through JSON."""
    # Dataclasses, named tuples, tuples and mappings in one another, as their type hints say.
    return data if data is None else _maker(kind)(data)


@functools.cache  # rank 0 makes the states of all ranks, a hundred calls in each
def _maker(kind: Any) -> Callable[[Any], Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:  # optional
        return functools.partial(from_plain, inner[0])
    if origin is tuple and inner[-1] is ...:
        make = _maker(inner[0])
        return tuple if make is _as_it_is else lambda data: tuple(map(make, data))
    if origin is tuple:
        return lambda data: tuple(map(from_plain, inner, data))
    if origin is Mapping:
        return lambda data: {key: from_plain(inner[1], value) for key, value in data.items()}
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, tuple)):
        makers = {name: _maker(hint) for name, hint in get_type_hints(kind).items()}
        if issubclass(kind, tuple):
            return lambda data: kind(*(make(one) for make, one in zip(makers.values(), data, strict=True)))
        to_make = {name: make for name, make in makers.items() if make is not _as_it_is}
        return lambda data: kind(
            **{**data, **{name: make(data[name]) for name, make in to_make.items() if name in data}}
        )
    return _as_it_is


def _as_it_is(data: Any) -> Any:
    return data


# -- Looks at this rank --


class RankObserver:
    """Sees what this rank does; all its methods belong to the guard's thread."""

    def __init__(
        self,
        channel: SideChannel,
        recorders: Sequence[CallRecorder],
        *,
        window: float,  # how far back it counts that the process moves [s]
        store_port: int,  # of the store at which the ranks have met
    ) -> None:
        self._channel, self._recorders = channel, tuple(recorders)
        self.activity = Activity(window, is_rank_of(channel))
        self._ports = (channel.port, store_port)  # of connections that are not the backend's
        self.trains = threading.current_thread()
        self.raised_at: Position | None = None  # where its last collective has raised an error
        self._sites = threading.Thread(target=self._load_sites, name="lockstep-guard-sites", daemon=True)
        self._knows_sites = self._loads = False

    @property
    def is_recording(self) -> bool:
        return any(recorder.is_recording for recorder in self._recorders)

    @property
    def position(self) -> Position:
        return position(self.trains)

    def outstanding(self) -> list[Outstanding]:
        return [one for recorder in self._recorders for one in recorder.outstanding()]

    def ages(self, longest: float) -> dict[Outstanding, float]:
        """Return how long ago each incomplete collective was called [s], at most ``longest`` whatever the clock did."""
        now = time.time()
        return {
            Outstanding(one.call.group, one.call.number): min(max(now - one.started, 0.0), longest)
            for one in self._calls(sites=False)
            if not one.done
        }

    def _calls(self, *, sites: bool) -> list[RecordedCall]:
        return [call for recorder in self._recorders for call in recorder.calls(sites=sites)]

    def load_sites(self) -> None:
        """Let torch begin to load what it needs to say where calls came from, which takes seconds; once."""
        if self._sites.ident is None:
            self._sites.start()

    def _load_sites(self) -> None:
        self._calls(sites=True)
        self._knows_sites = True

    def stop(self, timeout: float) -> None:
        """Wait until nothing of this is inside of torch any more."""
        if self._sites.is_alive():
            self._sites.join(timeout)

    def state(self, sites: bool = False) -> RankState:
        """Return where this rank is; ``sites``: with all call sites, even if they must be loaded first."""
        place = self.raised_at or self.position  # before the look: it reads the program's files
        loaded, self._loads = self._loads, self._sites.is_alive()
        self.activity.look(loads=loaded or self._loads)
        calls = self._calls(sites=sites or self._knows_sites)
        return RankState(
            rank=self._channel.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            groups=dict(group_titles().values()),
            outstanding=tuple(self.outstanding()),
            calls=tuple(calls[-_COMPARED:]),
            seconds_since_call=time.time() - max(call.started for call in calls) if calls else None,
            position=place,
            where=own_place(batches=True),
            raised=self.raised_at is not None,
            moves=self.activity.moves or _may_move_unseen(),
            connections=tuple(connections()),
            ports=self._ports,
        )


# -- Which rank waits for which, by what each has said of itself --


class WaitingRanks:
    """Who waits for whom."""

    def __init__(self, states: Mapping[int, RankState], silent: Mapping[int, UnresponsiveRank]) -> None:
        self._states, self._silent = states, silent
        self._missing = functools.cache(self._ranks_that_have_not_called)  # as a rule all wait in the same

    def is_waiting(self, rank: int) -> bool:
        """Return whether a rank is in a collective that is not complete."""
        return rank in self._states and bool(self._states[rank].outstanding)

    def waiting(self) -> list[int]:
        return [rank for rank in sorted(self._states) if self.is_waiting(rank)]

    def waits_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank waits for: those that have not called what it has called."""
        state = self._states.get(rank)
        if state is None:
            return set()
        missing: set[int] = set()
        for outstanding in state.outstanding:
            missing |= self._missing(outstanding) - {rank}
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
        going_on |= {rank for rank, one in self._silent.items() if one.is_moving}
        while True:
            more = {rank for rank in self.waiting() if rank not in going_on and self._follows(rank, going_on)}
            if not more:
                return (set(self._states) | set(self._silent)) - going_on
            going_on |= more

    def _follows(self, rank: int, going_on: set[int]) -> bool:
        """Return whether a rank that waits goes on once others do."""
        waits = self.waits_for(rank)
        return bool(waits) and waits <= going_on

    def _ranks_that_have_not_called(self, wanted: Outstanding) -> set[int]:
        there = members(self._states, wanted.group)
        return {
            rank for rank in there if rank not in self._states or not self._states[rank].has_called(wanted)
        }
