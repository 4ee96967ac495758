"""A whole search on all ranks: try, agree, repeat, report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_lockstep.callbacks._batch_report import gib, trial_line
from lightning_lockstep.callbacks._trial import TrialRunner
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.memory import MemoryMeter, SizeSearch, Trial, memory_wall

__all__ = ["fingerprint_of", "run_search"]


def run_search(
    search: SizeSearch,
    runner: TrialRunner,
    *,
    meter: MemoryMeter | None,
    margin: float,
    communicator: Communicator,
    say: Callable[[str], None],
) -> tuple[int, str]:
    """Search until an answer is found.

    Args:
        search: Decides what to try.
        runner: Tries it.
        meter: Knows the limit of this rank.
        margin: Share by which the answer stays below the largest size that fitted (0 to 1), where a size
            that does not fit is near.
        communicator: Of all ranks.
        say: Takes a line for people.

    Returns:
        (largest size that was run and fits, with the margin; why it ended there).

    Raises:
        BatchSizeError: Not even the smallest size fits.

    Ranks: all, together; see :meth:`TrialRunner.run`.
    """
    headroom = None
    if meter is not None:
        left = torch.tensor(meter.headroom, dtype=torch.float64)
        headroom = float(communicator.all_reduce(left, "min"))
    with runner.preserved(), memory_wall(meter), _cheap_collections():
        while not (proposal := search.propose()).stop:
            outcome = runner.run(proposal.size)
            search.record(outcome.size, outcome.fits, peak=outcome.peak, limit=outcome.limit)
            if communicator.is_main:
                say(trial_line(len(search.trials), search.trials[-1], outcome.reasons))
        if not proposal.size:
            raise BatchSizeError(_nothing_fits(search, proposal.reason, headroom))
        size = _with_margin(search, runner, proposal.size, margin)
    return size, proposal.reason


def _with_margin(search: SizeSearch, runner: TrialRunner, size: int, margin: float) -> int:
    """Return the size below ``size`` by the margin, after it was run too."""
    smaller = max(1, int(size * (1 - margin)))
    if size >= search.max_val or smaller == size:
        return size  # nothing larger was ever going to be run: the wall is not near
    first = smaller
    while smaller >= 1:
        outcome = runner.run(smaller)
        search.trials.append(Trial(smaller, outcome.fits, outcome.peak, outcome.limit))
        if outcome.fits:
            return smaller
        # A heap in pieces, or a neighbour, took what was there before: a size must fit when it is asked again.
        smaller = int(smaller * min(1 - margin, 0.9))
    raise BatchSizeError(
        f"batch size {first} did not fit though {size} did just before, nor did any below it"
    )


def _nothing_fits(search: SizeSearch, reason: str, headroom: float | None) -> str:
    smallest = min(search.trials, key=lambda trial: trial.size)
    if smallest.size > 1:
        return f"no batch size fits ({reason}); the smallest tried was {smallest.size}"
    limit = smallest.limit
    if limit is None or headroom is None:
        return "1 does not fit: model and optimizer alone take all the memory there is"
    return (
        f"1 does not fit: model and optimizer alone take {gib(limit - headroom)} of {gib(limit)} before the first"
        f" step, and one sample needs more than the {gib(headroom)} left. Use a smaller model, a lower precision,"
        " activation checkpointing, or a strategy that shards or offloads the optimizer."
    )


@contextmanager
def _cheap_collections() -> Iterator[None]:
    """Keep the collector from going through all that existed before the search, again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def fingerprint_of(trainer: Any, module: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the answer of a search depends on, as plain values.

    Ranks: any rank, alone; the same on all.
    """
    parameters = list(module.parameters())
    return {
        "loop": trainer.state.fn.value if trainer.state.fn is not None else "fit",
        "ranks": trainer.world_size,
        "device": trainer.strategy.root_device.type,
        "precision": str(trainer.precision),
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.strategy.optimizers],
        **settings,
    }
