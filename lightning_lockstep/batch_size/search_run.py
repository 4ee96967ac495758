"""A whole search on all ranks: try, agree, repeat, report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_lockstep._lightning import Trainer
from lightning_lockstep._text import size_in_words
from lightning_lockstep.batch_size.memory.malloc import keep_freed_memory, return_freed_memory
from lightning_lockstep.batch_size.memory.meter import CPUMeter, MemoryMeter, meter_for, parse_bytes
from lightning_lockstep.batch_size.refused import SearchRefusedError
from lightning_lockstep.batch_size.report import trial_line
from lightning_lockstep.batch_size.search import SizeSearch, Trial
from lightning_lockstep.batch_size.trial import TrialOutcome, TrialRunner
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.ddp.reducer import untouched_buckets
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.capabilities import missing_capabilities
from lightning_lockstep.steps.engines import HasEngineTrials

__all__ = ["Found", "fingerprint_of", "meter_of_run", "refuse_fixed_sizes", "refuse_strategy", "run_search"]

# On CPU a malloc that keeps freed blocks needs up to about half as much again as what is in use.
_SHARE_WITH_KEPT_BLOCKS = 0.6


@dataclass(frozen=True)
class Found:
    """The answer of a search."""

    size: int  # the largest that was run and fits, with the margin
    reason: str  # why it ended there
    tight: bool  # memory on CPU is short, so the process goes on returning freed blocks at once


def refuse_strategy(trainer: Trainer) -> None:
    """Raise where a trial on one rank alone is not possible, with the reason."""
    if isinstance(trainer.strategy, HasEngineTrials):
        refuse_fixed_sizes(trainer, "AutoBatchSize is to choose the batch size")
        if why := trainer.strategy.engine_trials.why_not_possible():
            raise SearchRefusedError(
                f"no batch size can be tried with {type(trainer.strategy).__name__}: {why}."
                " Set the batch size yourself."
            )
        return
    for why in missing_capabilities(trainer.strategy, "step_alone", "sees_out_of_memory"):
        raise SearchRefusedError(
            f"no batch size can be tried with {type(trainer.strategy).__name__}: {why}. Search with"
            " strategy='lockstep_ddp' or on a single device and set the batch size, or use"
            " find_executable_batch_size around the whole run."
        )


def refuse_fixed_sizes(trainer: Trainer, what: str, *, accumulates: bool = False) -> None:
    """Raise where the configuration of an engine says a size that is to be changed."""
    if not isinstance(trainer.strategy, HasEngineTrials):
        return
    trials = trainer.strategy.engine_trials
    why = trials.why_size_is_fixed() or (trials.why_accumulation_is_fixed() if accumulates else "")
    if why:
        raise SearchRefusedError(f"{what}, and {why}.")


def meter_of_run(
    trainer: Trainer, memory_limit: str | int | float | None, communicator: Communicator
) -> MemoryMeter | None:
    """Return what reads the memory of this rank in trials, or ``None`` where that cannot be read."""
    hosts = communicator.gather(communicator.host)
    return meter_for(
        trainer.strategy.root_device,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        local_ranks=hosts.count(communicator.host),
        owed=untouched_buckets(trainer.strategy.model),
    )


def run_search(
    search: SizeSearch,
    runner: TrialRunner,
    *,
    meter: MemoryMeter | None,
    margin: float,  # share (0 to 1) by which the answer stays below the largest size that fitted
    communicator: Communicator,
    say: Callable[[str], None],  # takes a line for people
) -> Found:
    """Search on all ranks together until an answer is found."""
    headroom = None
    if meter is not None:
        left = torch.tensor(meter.headroom, dtype=torch.float64)
        headroom = float(communicator.all_reduce(left, "min"))

    def report(outcome: TrialOutcome) -> None:
        if communicator.is_main:
            say(trial_line(len(search.trials), search.trials[-1], outcome.reasons))

    with runner.preserved(), _cheap_collections(), _steady_malloc(meter) as malloc:
        while not (proposal := search.propose()).stop:
            outcome = runner.run(proposal.size)
            search.record(outcome.size, outcome.fits, peak=outcome.peak, limit=outcome.limit)
            report(outcome)
        if not proposal.size:
            raise BatchSizeError(_nothing_fits(search, proposal.reason, headroom))
        size = _with_margin(search, runner, proposal.size, margin, report)
        malloc.tight = isinstance(meter, CPUMeter) and _is_short(search, size)
    return Found(size, proposal.reason, malloc.tight)


@dataclass
class _Malloc:
    tight: bool = False


@contextmanager
def _steady_malloc(meter: MemoryMeter | None) -> Iterator[_Malloc]:
    """On CPU, let a size need the same whatever was tried before; the run goes on so where memory is short."""
    malloc = _Malloc()
    if not isinstance(meter, CPUMeter):
        yield malloc
        return
    return_freed_memory()
    try:
        yield malloc
    finally:
        if not malloc.tight:
            keep_freed_memory()


def _is_short(search: SizeSearch, size: int) -> bool:
    trial = next(trial for trial in reversed(search.trials) if trial.size == size)
    return trial.peak is None or trial.limit is None or trial.peak > _SHARE_WITH_KEPT_BLOCKS * trial.limit


def _with_margin(
    search: SizeSearch, runner: TrialRunner, size: int, margin: float, report: Callable[[TrialOutcome], None]
) -> int:
    """Return the size below ``size`` by the margin, after it was run too."""
    smaller = max(1, int(size * (1 - margin)))
    if size >= search.max_val or smaller == size:
        return size  # nothing larger was ever going to be run: the memory limit is not near
    first = smaller
    while smaller >= 1:
        outcome = runner.run(smaller)
        search.trials.append(Trial(smaller, outcome.fits, outcome.peak, outcome.limit))
        report(outcome)
        if outcome.fits:
            return smaller
        # Fragmentation or another process took what was free before: a size must fit when it is tried again.
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
        f"1 does not fit: model and optimizer alone take {size_in_words(limit - headroom)} of"
        f" {size_in_words(limit)} before the first step, and one sample needs more than the"
        f" {size_in_words(headroom)} left. Use a smaller model, a lower precision, activation"
        " checkpointing, or a strategy that shards or offloads the optimizer."
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
    """Return what the answer of a search depends on, as plain values."""
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
