"""One size tried by real steps, and the largest size that the data allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_lockstep._lightning import CombinedLoader, LightningModule, Trainer
from lightning_lockstep._text import counted
from lightning_lockstep.batch_size.loaders import (
    BatchLoaders,
    SearchRefusedError,
    loop_of,
    samples_of_rank,
)
from lightning_lockstep.batch_size.memory import (
    Failure,
    MemoryMeter,
    MemoryUse,
    attempt,
    limited_memory,
    release_memory,
)
from lightning_lockstep.batch_size.search import Trial
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.capabilities import EngineState, EngineTrials, HasEngineTrials
from lightning_lockstep.steps.isolated import isolated, run_step, step_arguments
from lightning_lockstep.steps.snapshot import (
    Gradients,
    ModuleAttributes,
    Snapshot,
    whole_run,
    without_tensors,
)

# -- The largest batch size with which a run can go on: what loaders and limits leave of an epoch --
# Memory is another matter. A loader that cannot be made with a size, an epoch without a full batch under
# ``drop_last``, or less than one batch under ``limit_train_batches=0.1`` would end the run after the
# search.

_LIMITS = {"fit": "limit_train_batches", "validate": "limit_val_batches"}


def largest_to_try(
    trainer: Trainer,
    place: BatchLoaders,
    *,
    max_val: int,
    within_shard: bool,  # no more than the data that every rank gets
    global_batch: int | None,  # samples of all ranks in an optimizer step
    as_configured: bool,  # nobody has said how many
) -> tuple[int, str]:
    """Return the largest size that a search may try, and why none above it."""
    communicator = current_communicator()
    most, why = max_val, f"it is max_val={max_val}"
    if global_batch is not None:
        share = math.ceil(global_batch / communicator.world_size)
        if share <= most:
            most, why = share, f"it is a rank's share of the global batch of {global_batch}"
            if as_configured:
                why += ", as configured; global_batch_size= asks for another, or for the 'largest' that fits"
    if within_shard:
        samples = int(communicator.all_reduce(torch.tensor(place.samples), "min"))
        if samples < most:
            most, why = samples, "it is all data of a rank (limit=None repeats samples)"
    with place.former_size():
        runnable, reason = largest_runnable(
            lambda size: _why_not_runnable(trainer, place, size), most=most, communicator=communicator
        )
    return runnable, reason or why


def largest_runnable(
    why_not: Callable[[int], str], *, most: int, communicator: Communicator
) -> tuple[int, str]:
    """Return the largest size that every rank can run, and why none above it (empty: ``most`` can be run)."""

    def agreed(size: int) -> str:
        reason = why_not(size)
        reasons = communicator.agree(bool(reason), reason).reasons
        return next((f"{text} (rank {rank})" for rank, text in sorted(reasons.items())), "")

    reason = agreed(most)
    if not reason:
        return most, ""
    # Where a size can be run, all below it can.
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        text = agreed(middle)
        if text:
            high, reason = middle, text
        else:
            low = middle
    if not low:
        raise SearchRefusedError(f"no batch size can be run here, not even 1: {reason}")
    return low, reason


def _why_not_runnable(trainer: Trainer, place: BatchLoaders, size: int) -> str:
    """Return why a run with that size could not begin on this rank, or nothing."""
    fn = loop_of(trainer)
    try:
        loaders = place.made_with(size)
        fault = _fault_of(trainer, loaders, _LIMITS.get(fn, f"limit_{fn}_batches"))
        if not fault and fn == "fit":
            fault = _fault_of_validation(trainer, place, [_batches(trainer, loader) for loader in loaders])
        return fault
    except Exception as error:  # a loader's hook refuses the size in its own way
        return str(error) or type(error).__name__


def batches_fault(length: int, limit: int | float, name: str) -> str:
    """Return why a loop cannot go over a loader of ``length`` batches, or nothing."""
    if limit == 0:
        return ""
    if length == 0:
        return "drop_last=True leaves no full batch in an epoch"
    if isinstance(limit, float) and int(length * limit) == 0:
        return f"{name}={limit} of {counted(length, 'batch', 'batches')} is less than one"
    return ""


def _fault_of(trainer: Trainer, loaders: Sequence[DataLoader[Any]], name: str) -> str:
    limit = getattr(trainer, name)
    return next(filter(None, (batches_fault(_batches(trainer, each), limit, name) for each in loaders)), "")


def _batches(trainer: Trainer, loader: DataLoader[Any], size: int | None = None) -> int:
    samples, size = samples_of_rank(trainer, loader), size or int(loader.batch_size or 1)
    return samples // size if loader.drop_last else -(-samples // size)


def _fault_of_validation(trainer: Trainer, place: BatchLoaders, lengths: Sequence[int]) -> str:
    """What Lightning would say of the validation inside a fit, whose loaders may be made with the same attribute."""
    limit, interval = trainer.limit_val_batches, trainer.val_check_interval
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    if limit == 0 or not source.is_defined():
        return ""
    taken = trainer.limit_train_batches
    batches = min(min(each, taken) if isinstance(taken, int) else int(each * taken) for each in lengths)
    if isinstance(interval, int) and interval > batches and trainer.check_val_every_n_epoch is not None:
        return f"val_check_interval={interval} is more than the {counted(batches, 'batch', 'batches')} of an epoch"
    if place.in_attribute and source.is_module() and isinstance(limit, float) and limit < 1:
        loaders = [each for each in CombinedLoader(source.dataloader()).flattened if _has_length(each)]
        return _fault_of(trainer, [each for each in loaders if _batches(trainer, each)], "limit_val_batches")
    return ""


def steps_per_epoch(trainer: Trainer, place: BatchLoaders, size: int) -> int:
    """Return the optimizer steps of a training epoch in batches of ``size``."""
    limit, batches = trainer.limit_train_batches, _batches(trainer, place.loaders[0], size)
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    return -(-batches // trainer.accumulate_grad_batches)


def _has_length(loader: object) -> bool:
    return isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")


# -- One trial of a batch size: real steps on a real batch, on this rank alone, then one message to the
# others
#
# A trial runs on the module itself, not on its distributed wrapper, so no gradient is reduced and no rank
# can leave another in a collective. Where an engine makes the steps, it makes those of a trial too. What is
# sent to other ranks is answered on the spot, with tensors of the size that the real answer would have.
# After each trial the ranks agree on how it went.

_FITS, _FULL, _BROKEN = 0.0, 1.0, 2.0
_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_ONE_VALUE = "Expected more than 1 value per channel"


class TrialRunner:
    """Runs trials of one loop."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        place: BatchLoaders,
        *,
        steps: int,  # of a trial; the second is the first with the optimizer's state in place
        meter: MemoryMeter | None,
        accumulates: bool,  # the run may, though the Trainer does not say so yet
    ) -> None:
        self._trainer, self._module, self._place = trainer, module, place
        self._steps, self._meter, self._accumulates = steps, meter, accumulates
        self._kind = loop_of(trainer)
        strategy = trainer.strategy
        self._engine: EngineTrials | None = (
            strategy.engine_trials if isinstance(strategy, HasEngineTrials) else None
        )
        self._engine_state: EngineState | None = None

    def preserved(self) -> Snapshot:
        """Return the state of the run, to put back once sizes have been tried."""
        if self._engine is not None:
            others = without_tensors(self._module, generators=self._place.generators())
            self._engine_state = self._engine.state()  # with no gradients any more
            return Snapshot(others, self._engine_state)
        return whole_run(
            self._module,
            self._trainer.strategy.optimizers if self._kind == "fit" else (),
            scaler=getattr(self._trainer.precision_plugin, "scaler", None),
            generators=self._place.generators(),
        )

    def run(self, size: int) -> Trial:
        """Try ``size`` and agree on how it went."""
        # What a trial leaves in attributes of the module must not be memory of the next one, nor what that one reads.
        gradients, attributes = Gradients(self._module), ModuleAttributes(self._module)
        used = None
        with self._alone() as passes:
            if self._meter is not None:
                self._meter.start()
            with limited_memory(self._meter):
                failure = attempt(lambda: self._steps_of(size, passes))
            if self._meter is not None:
                used = self._meter.stop()
                over = 0.0 if used.peak is None or not self._meter.judges else used.peak - used.limit
                if failure is None and over > 0:
                    failure = Failure(f"the peak was {over / 2**20:.0f} MiB above the limit", True)
        if self._engine_state is not None:
            self._engine_state.restore_structure()
        attributes.restore()
        gradients.restore()  # and the flags of an optimizer that was toggled when memory ran out
        release_memory(collect=failure is not None)
        return _agreed(size, failure, used)

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Keep steps of the body from the run; yields how many batches make an optimizer step."""
        with isolated(self._trainer, self._module, by_module=self._engine is None):
            if self._engine is None:
                yield 1
                return
            with self._engine.alone(accumulates=self._accumulates and self._kind == "fit") as passes:
                yield passes

    def _steps_of(self, size: int, passes: int) -> None:
        self._place.hold(size)  # a step may read it
        for index in range(self._steps * passes):
            batch = self._on_device(self._place.batch(size))
            if self._kind == "fit":
                arguments = step_arguments(self._module.training_step, batch, index)
                step = partial(run_step, self._trainer, self._module, arguments, index, accumulate=passes)
            else:
                step = partial(self._evaluate, batch, index)
            try:
                step()
            except UnansweredCollectiveError as error:
                raise BatchSizeError(
                    f"no batch size can be tried, since a trial runs on each rank alone: {error} Give the batch size"
                    " yourself, or use find_executable_batch_size around the whole run."
                ) from error

    def _on_device(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _evaluate(self, batch: Any, index: int) -> None:
        step = getattr(self._trainer.strategy, f"{_STEPS[self._kind]}")
        self._module.eval()
        with torch.no_grad():
            step(*step_arguments(getattr(self._module, _STEPS[self._kind]), batch, index))


def _agreed(size: int, failure: Failure | None, used: MemoryUse | None) -> Trial:
    """Return how a trial went on all ranks; raises on all where a step failed for another reason than memory."""
    communicator = current_communicator()
    state = _FITS if failure is None else _FULL if failure.out_of_memory else _BROKEN
    limit = float("inf") if used is None else used.limit
    # A peak that one rank could not read is read on none: the maximum would be of the others only.
    peak = float("inf") if used is None or used.peak is None else used.peak
    outcome = torch.tensor([state, peak, -limit], dtype=torch.float64)
    worst, peak, limit = communicator.all_reduce(outcome, "max").tolist()
    read, bound = None if peak == float("inf") else peak, None if used is None else -limit
    if worst == _FITS:
        return Trial(size, True, read, bound)
    said = communicator.gather((state, failure.summary if failure is not None else ""))
    reasons = {rank: text for rank, (how, text) in enumerate(said) if how == worst}
    if worst == _FULL:
        return Trial(size, False, read, bound, reasons)
    if all(_ONE_VALUE in text for text in reasons.values()):
        raise BatchSizeError(
            f"batch size {size} cannot be trained with batch norm, which needs more than one value per"
            " channel. Let the search begin higher (init_val=2) or, where 2 does not fit, use group norm."
        )
    if failure is not None and failure.error is not None:
        raise failure.error
    rank, text = min(reasons.items())
    raise BatchSizeError(
        f"the step failed on rank {rank} with batch size {size}, so every rank stops: {text}"
    )
