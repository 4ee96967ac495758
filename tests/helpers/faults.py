"""Faults a test provokes inside a rank started by ``run_ranks``."""

from __future__ import annotations

import os
import signal


def on_rank(rank: int | None) -> bool:
    """Whether this process is that rank (``None``: every rank)."""
    return rank is None or int(os.environ["RANK"]) == rank


def raise_on(rank: int | None, error: BaseException | None = None) -> None:
    """Raise on that rank alone (default ``RuntimeError('fault provoked on rank N')``)."""
    if on_rank(rank):
        raise error or RuntimeError(f"fault provoked on rank {os.environ['RANK']}")


def kill_self(sig: int = signal.SIGKILL, rank: int | None = None) -> None:
    """Send a signal to this process on that rank: a rank that dies without a word."""
    if on_rank(rank):
        os.kill(os.getpid(), sig)


def stop_self(rank: int | None = None) -> None:
    """Stop this process on that rank (SIGSTOP): alive for the kernel, silent for its peers."""
    kill_self(signal.SIGSTOP, rank)
