"""One trial of a batch size: real steps on a real batch, on this rank alone, then one message to the others.

A trial runs on the module itself, not on its distributed wrapper, so no gradient is reduced and no rank can
leave another in a collective. Where an engine makes the steps, it makes those of a trial too. What is sent to other
ranks is answered on the spot, with tensors of the size that the real answer would have. After each trial the ranks
agree on how it went.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._lightning.internals import before_batch_transfer
from lightning_lockstep.batch_size.loaders import BatchLoaders
from lightning_lockstep.batch_size.memory.limits import limited_memory
from lightning_lockstep.batch_size.memory.meter import MemoryMeter, MemoryUse
from lightning_lockstep.batch_size.memory.out_of_memory import Failure, attempt, release_memory
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.local.collectives import UnansweredCollectiveError
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.engines import EngineState, EngineTrials, HasEngineTrials
from lightning_lockstep.steps.isolated import isolated, run_step
from lightning_lockstep.steps.module_attributes import ModuleAttributes
from lightning_lockstep.steps.snapshot import Gradients, Snapshot, whole_run, without_tensors

__all__ = ["TrialOutcome", "TrialRunner", "step_arguments"]

_FITS, _FULL, _BROKEN = 0.0, 1.0, 2.0
_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_ONE_VALUE = "Expected more than 1 value per channel"


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial went, the same on every rank."""

    size: int
    fits: bool  # on every rank
    peak: float | None  # the most of any rank [bytes]; None: could not be read
    limit: float | None  # the least of any rank [bytes]
    reasons: dict[int, str]  # what ran out, by rank


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
        communicator: Communicator,
        accumulates: bool = False,  # the run may, though the Trainer does not say so yet
    ) -> None:
        self._trainer, self._module, self._place = trainer, module, place
        self._steps, self._meter, self._communicator = steps, meter, communicator
        self._kind = trainer.state.fn.value if trainer.state.fn is not None else "fit"
        self._accumulates = accumulates
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

    def run(self, size: int) -> TrialOutcome:
        """Try ``size`` and agree on how it went."""
        # What a trial leaves in attributes of the module must not be memory of the next one, nor what that one reads.
        gradients, attributes = Gradients(self._module), ModuleAttributes(self._module)
        with self._alone() as passes:
            if self._meter is not None:
                self._meter.start()
            with limited_memory(self._meter):
                failure = attempt(lambda: self._steps_of(size, passes))
            used = self._meter.stop() if self._meter is not None else None
        if failure is None and used is not None:
            failure = self._over_the_limit(used)
        if self._engine_state is not None:
            self._engine_state.restore_structure()
        attributes.restore()
        gradients.restore()  # and the flags of an optimizer that was toggled when memory ran out
        release_memory(collect=failure is not None)
        return self._agree(size, failure, used)

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Keep steps of the body from the run; yields how many batches make an optimizer step."""
        with isolated(self._trainer, self._module, by_module=self._engine is None):
            if self._engine is None:
                yield 1
                return
            with self._engine.alone(accumulates=self._accumulates and self._kind == "fit") as passes:
                yield passes

    def _over_the_limit(self, used: MemoryUse) -> Failure | None:
        over = self._meter is not None and self._meter.judges and used.peak is not None
        if not over or used.peak is None or used.peak <= used.limit:
            return None
        return Failure(f"the peak was {(used.peak - used.limit) / 2**20:.0f} MiB above the limit", True)

    def _agree(self, size: int, failure: Failure | None, used: MemoryUse | None) -> TrialOutcome:
        state = _FITS if failure is None else _FULL if failure.out_of_memory else _BROKEN
        limit = float("inf") if used is None else used.limit
        # A peak that one rank could not read is read on none: the maximum would be of the others only.
        peak = float("inf") if used is None or used.peak is None else used.peak
        outcome = torch.tensor([state, peak, -limit], dtype=torch.float64)
        worst, peak, limit = self._communicator.all_reduce(outcome, "max").tolist()
        read = None if peak == float("inf") else peak
        bound = None if used is None else -limit
        if worst == _FITS:
            return TrialOutcome(size, True, read, bound, {})
        said = self._communicator.gather((state, failure.summary if failure is not None else ""))
        if worst == _BROKEN:
            self._raise_alike(
                size, failure, {rank: text for rank, (how, text) in enumerate(said) if how == _BROKEN}
            )
        reasons = {rank: text for rank, (how, text) in enumerate(said) if how == _FULL}
        return TrialOutcome(size, False, read, bound, reasons)

    def _raise_alike(self, size: int, failure: Failure | None, said: dict[int, str]) -> None:
        rank, text = min(said.items())
        if all(_ONE_VALUE in each for each in said.values()):
            raise BatchSizeError(
                f"batch size {size} cannot be trained with batch norm, which needs more than one value per"
                " channel. Let the search begin higher (init_val=2) or, where 2 does not fit, use group norm."
            )
        if failure is not None and failure.error is not None:
            raise failure.error
        raise BatchSizeError(
            f"the step failed on rank {rank} with batch size {size}, so every rank stops: {text}"
        )

    def _steps_of(self, size: int, passes: int) -> None:
        self._place.attributes.set(size)  # a step may read it
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
        batch = before_batch_transfer(self._module, batch)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _evaluate(self, batch: Any, index: int) -> None:
        step = getattr(self._trainer.strategy, f"{_STEPS[self._kind]}")
        self._module.eval()
        with torch.no_grad():
            step(*step_arguments(getattr(self._module, _STEPS[self._kind]), batch, index))


def step_arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """Return the arguments of a step: the batch, and its index where the step takes it."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise BatchSizeError(
            "a step that takes dataloader_iter fetches its own batches; none can be made for it"
        )
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return [batch, index] if several else [batch]
