"""What a rank asks whose collective does not complete."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_lockstep.distributed.guard.calls.recorded import Outstanding

__all__ = ["Question"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Why a rank asks where the others are."""

    rank: int
    outstanding: Outstanding | None
    seconds: float
    raised: str = ""
