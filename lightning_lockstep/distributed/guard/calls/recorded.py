"""The collectives that a rank has called lately, whoever has recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall

__all__ = ["Arrival", "CallRecorder", "Outstanding", "RecordedCall"]


class Arrival(NamedTuple):
    """When this rank has called a collective."""

    group: str
    number: int
    time: float


class Outstanding(NamedTuple):
    """A collective that this rank has called and that is not complete."""

    group: str
    number: int


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One collective that this rank has called."""

    call: CollectiveCall
    started: float
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
        """Return the last calls of all groups, oldest first."""
        ...

    def arrivals(self, since: float) -> Sequence[Arrival]:
        """Return when this rank has called its last collectives, oldest first."""
        ...
