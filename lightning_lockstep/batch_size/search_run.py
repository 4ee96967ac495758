"""A whole search on all ranks: what it refuses, its trials by real steps, and the size found."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._text import ranks_in_words, say, size_in_words
from lightning_lockstep.batch_size.loaders import BatchLoaders, SearchRefusedError, in_fit, loop_of
from lightning_lockstep.batch_size.memory import (
    MemoryLimit,
    limit_of_trials,
    parse_bytes,
    ranks_that_are_full,
    release_memory,
    return_freed_memory,
)
from lightning_lockstep.batch_size.search import SizeSearch, Trial
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.ddp_reducer import untouched_buckets
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.capabilities import missing_capabilities
from lightning_lockstep.steps.isolated_step import isolated, run_step, step_arguments
from lightning_lockstep.steps.snapshot import Gradients, ModuleAttributes, restored, whole_run

# -- What is refused before any trial --


def _engine_trials(trainer: Trainer) -> Any:
    """Return what makes the steps of a trial if the strategy has an engine, else ``None``."""
    return getattr(trainer.strategy, "engine_trials", None)


def refuse_strategy(trainer: Trainer) -> None:
    """Raise if a trial on one rank alone is not possible, with the reason."""
    if (trials := _engine_trials(trainer)) is not None:
        refuse_fixed_sizes(trainer, "AutoBatchSize is to choose the batch size")
        reasons = [trials.why_not_possible()]
    else:
        reasons = missing_capabilities(trainer.strategy, "step_alone", "sees_out_of_memory")
    if why := next(filter(None, reasons), None):
        raise SearchRefusedError(
            f"no batch size can be tried with {type(trainer.strategy).__name__}: {why}. Set the batch size yourself,"
            " as found with strategy='lockstep_ddp' or on a single device, or use find_executable_batch_size around the"
            " whole run."
        )


def refuse_fixed_sizes(trainer: Trainer, what: str, *, accumulates: bool = False) -> None:
    """Raise if the configuration of an engine fixes a size that is to be changed."""
    trials = _engine_trials(trainer)
    if trials is not None and (why := trials.why_fixed(accumulates=accumulates)):
        raise SearchRefusedError(f"{what}, and {why}.")


def refuse_split(trainer: Trainer) -> None:
    """Raise if an engine makes the steps, which cannot be run again in parts."""
    if _engine_trials(trainer) is not None:
        raise SearchRefusedError(
            f"on_oom='split' is not possible with {type(trainer.strategy).__name__}: it reduces gradients while the"
            " backward runs, so a batch that ended half way cannot be finished in parts. Write on_oom='raise'; the"
            " search for a batch size works."
        )


# -- One trial of a batch size --
# It runs the module itself, not its distributed wrapper, so no gradient is reduced and no rank can leave another in a
# collective. If the strategy has an engine, the engine also makes the steps of a trial. Collectives are answered at
# once, with tensors of the size that the real answer would have.

_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class TrialRunner:
    """Tries batch sizes by real steps on this rank alone, and agrees with the other ranks on each."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        loaders: BatchLoaders,
        *,
        steps: int,  # of a trial; the optimizer's state takes memory from the second step on
        memory_limit: str | int | float | None,
        accumulates: bool,  # whether the run may accumulate, although the Trainer does not say so yet
    ) -> None:
        self._trainer, self._module, self._loaders = trainer, module, loaders
        self._steps, self._accumulates = steps, accumulates
        self._kind = loop_of(trainer)
        self._engine = _engine_trials(trainer)
        self._engine_state: Any = None
        self.done: list[Trial] = []
        hosts = current_communicator().gather(current_communicator().host)
        self.limit = limit_of_trials(
            trainer.strategy.root_device,
            given=None if memory_limit is None else parse_bytes(memory_limit),
            local_ranks=hosts.count(current_communicator().host),
            owed=untouched_buckets(trainer.strategy.model),
        )
        self.on_cpu = self.limit.device.type == "cpu"
        # Once oneDNN has run out of memory for the code of a convolution in a thread, that thread can run no
        # new convolution. So trials of convolutions do not run in the thread that trains.
        self._compiles = self.on_cpu and any(isinstance(one, _CONVOLUTIONS) for one in module.modules())

    def preserved(self) -> AbstractContextManager[None]:
        parts = whole_run(
            self._module,
            self._trainer.strategy.optimizers if self._kind == "fit" and self._engine is None else (),
            scaler=getattr(self._trainer.precision_plugin, "scaler", None),
            generators=self._loaders.generators(),
            tensors=self._engine is None,
        )
        if self._engine is not None:
            self._engine_state = self._engine.state()  # after `whole_run` has taken the gradients away
            parts.append(self._engine_state)
        return restored(*parts)

    def run(self, size: int) -> Trial:
        """Try ``size``, agree on how it went, and say so."""
        # Attributes that a trial sets must not take memory in the next one, and the next one must not read them.
        gradients, attributes = Gradients(self._module), ModuleAttributes(self._module)
        with self._alone() as passes:
            failure = self.limit.attempt(lambda: self._steps_of(size, passes), in_thread=self._compiles)
        if self._engine_state is not None:
            self._engine_state.restore_structure()
        attributes.restore()
        gradients.restore()  # also the flags of an optimizer that was toggled when memory ran out
        release_memory(collect=failure is not None)
        full = ranks_that_are_full(failure, f"the step with batch size {size}")
        self.done.append(trial := Trial(size, not full, full))
        reason = next(iter(full.values()), "")[:90]
        how = f"out of memory on {ranks_in_words(full)} ({reason})" if full else "fits"
        say_on_main(f"batch size trial {len(self.done)}: {size:>6} per rank, {how}")
        return trial

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Isolate the steps of the body from the run; yield how many batches make an optimizer step."""
        apart: Any = nullcontext(1)
        if self._engine is not None:
            apart = self._engine.alone(accumulates=self._accumulates and self._kind == "fit")
        with isolated(self._trainer, self._module, plain_module=self._engine is None), apart as passes:
            yield passes

    def _steps_of(self, size: int, passes: int) -> None:
        self._loaders.hold(size)  # a step may read the batch size
        for index in range(self._steps * passes):
            batch = self._trainer.precision_plugin.convert_input(self._loaders.batch(size))
            batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            if self._kind == "fit":
                arguments = step_arguments(self._module.training_step, batch, index)
                step = partial(run_step, self._trainer, self._module, arguments, index, accumulate=passes)
            else:
                step = partial(self._evaluate, batch, index)
            try:
                step()
            except UnansweredCollectiveError as error:
                raise BatchSizeError(
                    f"no batch size can be tried, because a trial runs on each rank alone: {error} Give the batch size"
                    " yourself, or use find_executable_batch_size around the whole run."
                ) from error

    def _evaluate(self, batch: Any, index: int) -> None:
        name = _STEPS[self._kind]
        step = getattr(self._trainer.strategy, name)
        self._module.eval()
        with torch.no_grad():
            step(*step_arguments(getattr(self._module, name), batch, index))


# -- A whole search on all ranks: try, agree, repeat --


@dataclass(frozen=True)
class SearchResult:
    size: int  # that the run uses [samples per rank and micro-batch]
    largest: int  # that fitted in a trial, before the margin
    accumulate: int  # micro-batches per optimizer step
    ranks: int
    trials: Sequence[Trial]
    seconds: float  # that the search took
    reason: str  # why it ended there

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one optimizer step."""
        return self.size * self.accumulate * self.ranks


def largest_to_try(
    trainer: Trainer,
    loaders: BatchLoaders,
    max_val: int,
    global_batch: int | None,
    as_configured: bool,  # `global_batch` is that of the configuration, not an argument
) -> tuple[int, str]:
    """Return the largest size of a search, and why it tries none above it. Ranks: all, together; a reduction."""
    communicator = current_communicator()
    most, why = max_val, f"it is max_val={max_val}"
    if global_batch is not None:
        share = math.ceil(global_batch / communicator.world_size)
        if share <= most:
            most, why = share, f"it is a rank's share of the global batch of {global_batch}"
            if as_configured:
                why += ", as configured; global_batch_size= asks for another, or for the 'largest' that fits"
    samples = int(communicator.all_reduce(torch.tensor(loaders.samples), "min"))
    if global_batch is None and in_fit(trainer):
        samples = max(1, samples // trainer.accumulate_grad_batches)
    return (samples, "it is all the data of a rank") if samples < most else (most, why)


def run_search(search: SizeSearch, trials: TrialRunner, margin: float) -> tuple[int, str]:
    """Search on all ranks together; return the size that is to be used, and why the search ended."""
    # On CPUs freed memory goes back at once, so that a size needs the same memory whatever was tried before. The run
    # keeps that setting if a trial ran out of memory.
    if trials.on_cpu:
        return_freed_memory()
    gc.freeze()  # so that a collection does not go through all objects from before the search
    try:
        with trials.preserved():
            while not (proposal := search.propose()).stop:
                search.record(trials.run(proposal.size))
            if not proposal.size:
                raise BatchSizeError(_nothing_fits(search, proposal.reason, trials.limit))
            return _with_margin(search, trials, margin), proposal.reason
    finally:
        gc.unfreeze()
        if trials.on_cpu and search.high is None:
            return_freed_memory(32 * 2**20)  # as glibc does by itself after a while


def _with_margin(search: SizeSearch, trials: TrialRunner, margin: float) -> int:
    """Return the largest size that fits less the margin, or a smaller one, that a trial has confirmed."""
    smaller = first = max(1, int(search.low * (1 - margin)))
    if search.low >= search.max_val or smaller == search.low:
        return search.low  # the margin is nothing, or no larger size was to be tried: the limit need not be near
    while smaller >= 1:
        if trials.run(smaller).fits:
            return smaller
        # Fragmentation or another process has taken memory that was free, so a smaller size is tried.
        smaller = int(smaller * min(1 - margin, 0.9))
    raise BatchSizeError(
        f"batch size {first} did not fit, nor did any below it, although {search.low} had fitted just before: is"
        " another program using the memory?"
    )


def _nothing_fits(search: SizeSearch, reason: str, limit: MemoryLimit) -> str:
    smallest = min(trial.size for trial in search.trials)
    if smallest > 1:
        return f"no batch size fits ({reason}); the smallest tried was {smallest}"
    text = "1 does not fit: one sample needs more memory than there is."
    if limit.size is not None:
        text += f" A rank may take {size_in_words(limit.size)} ({limit.source}), Python and its libraries included."
    return text


def say_on_main(text: str) -> None:
    """Print a line on rank 0 alone."""
    if current_communicator().is_main:
        say(text)
