"""Which rank of a notebook this process is, if it is one."""

from __future__ import annotations

__all__ = ["become_rank", "notebook_rank"]

_rank: int | None = None


def become_rank(rank: int) -> None:
    """Note that this process is a rank that a notebook has started."""
    global _rank
    _rank = rank


def notebook_rank() -> int | None:
    """Return the number of this rank, or ``None`` in a process that no notebook has started."""
    return _rank
