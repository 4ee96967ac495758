"""What a rank asks whose collective does not complete."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_lockstep.distributed.guard.calls.recorded import Outstanding

__all__ = ["Question"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Why a rank asks where the others are."""

    rank: int  # that asks
    outstanding: Outstanding | None  # what it waits in; None: a send or receive
    seconds: float  # how long it has waited
    raised: str = ""  # by the backend, if it has
