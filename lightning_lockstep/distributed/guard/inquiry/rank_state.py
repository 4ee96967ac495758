"""What one rank says when it is asked where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall
from lightning_lockstep.distributed.guard.calls.recorded import Outstanding, RecordedCall
from lightning_lockstep.distributed.guard.ending.connections import Connection
from lightning_lockstep.distributed.guard.threads.main_thread import Position

__all__ = ["MESSAGES", "RankState", "members"]

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
