"""What a rank asks whose collective does not complete."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_lockstep.distributed.guard.calls.recorded import Outstanding

__all__ = ["Question"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Why a rank asks where the others are.

    Attributes:
        rank: The rank that asks.
        outstanding: The collective that it waits in; ``None`` for a send or receive.
        seconds: How long it has waited.
        raised: What the backend has raised, if it has.
    """

    rank: int
    outstanding: Outstanding | None
    seconds: float
    raised: str = ""
