"""What a user may set on the collective guard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_lockstep._settings import Faults

__all__ = ["GuardSettings"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of the guard of a run."""

    # watch: find out why a collective does not complete.
    guard: Literal["off", "watch", "verify"] = "watch"  # verify: also compare before each collective
    stall_timeout: float = 60.0  # how long one may take before the ranks compare where they are [s]
    guard_history: int = 0  # how many of the last calls of each rank a report lists

    def __post_init__(self) -> None:
        faults = Faults()
        self.check(faults)
        faults.raise_all()

    def check(self, faults: Faults) -> None:
        """Add to ``faults`` what is wrong; a class with further settings checks those too."""
        faults.choice("guard", self.guard, ("off", "watch", "verify"))
        faults.number("stall_timeout", self.stall_timeout, what="seconds", above=0, such_as=60)
        faults.whole("guard_history", self.guard_history, least=0)
