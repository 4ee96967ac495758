"""The collectives that a rank has called lately, whoever has recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall

__all__ = ["Arrival", "CallRecorder", "Outstanding", "RecordedCall"]


class Arrival(NamedTuple):
    """When this rank has called a collective."""

    group: str  # as `CollectiveCall.group` has it
    number: int  # from 1; the same on every rank of the group
    time: float  # [s since 1970, by this host's clock]


class Outstanding(NamedTuple):
    """A collective that this rank has called and that is not complete."""

    group: str  # as `CollectiveCall.group` has it
    number: int  # from 1


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective that this rank has called."""

    call: CollectiveCall
    started: float  # [s since 1970, by this host's clock]
    done: bool

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data, as JSON can hold it."""
        return {"call": self.call.to_data(), "started": self.started, "done": self.done}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RecordedCall:
        """Return what :meth:`to_data` has described, also after a way through JSON."""
        call = CollectiveCall.from_data(data["call"])
        return cls(call=call, started=float(data["started"]), done=bool(data["done"]))


class CallRecorder(Protocol):
    """Knows which collectives this rank has called; any thread may ask it while the main thread waits in one."""

    @property
    def is_recording(self) -> bool:
        """Whether it has recorded anything yet."""
        ...

    def outstanding(self) -> Sequence[Outstanding]:
        """Return the oldest incomplete collective of each group that has one; cheap enough to ask every second."""
        ...

    def calls(self, *, sites: bool = True) -> Sequence[RecordedCall]:
        """Return the last calls of all groups, oldest first; ``sites``: with call sites, even if slow."""
        ...

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """Return when this rank has called its last ones, oldest first, from ``since`` on [s since 1970]."""
        ...
