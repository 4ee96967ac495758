"""A whole search on all ranks: its options, its trials by real steps, the size found, and what is printed."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep._system import write_report
from lightning_lockstep._text import counted, ranks_in_words, say, size_in_words
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
from lightning_lockstep.distributed.c10d_operators import untouched_buckets
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError
from lightning_lockstep.errors import BatchSizeError, ConfigurationError
from lightning_lockstep.steps.capabilities import missing_capabilities
from lightning_lockstep.steps.isolated import isolated, run_step, step_arguments
from lightning_lockstep.steps.snapshot import (
    Gradients,
    ModuleAttributes,
    Snapshot,
    whole_run,
)

# -- The settings of AutoBatchSize, checked together --


@dataclass(frozen=True, kw_only=True)
class AutoBatchSizeSettings:
    """The arguments of :class:`AutoBatchSize`, checked; see there."""

    mode: Literal["binsearch", "off"] = "binsearch"
    steps_per_trial: int = 2
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192
    memory_limit: str | int | float | None = None
    global_batch_size: int | Literal["largest"] | None = None
    on_oom: Literal["raise", "split"] = "raise"
    loss_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        faults = Faults()
        faults.fields(self)
        faults.number("margin", self.margin, what="a share of the size found", least=0, below=1)
        faults.check(
            bool(self.batch_arg_name), "batch_arg_name", self.batch_arg_name, "the name of an attribute"
        )
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            faults.whole(name, getattr(self, name))
        size = self.global_batch_size
        is_right = size in (None, "largest") or (is_whole(size) and size >= 1)
        expected = "samples in one optimizer step, a whole number from 1; 'largest', what fits; or None, as configured"
        faults.check(is_right, "global_batch_size", size, expected)
        if self.memory_limit is not None:
            try:
                parse_bytes(self.memory_limit)
            except ConfigurationError as error:
                faults.texts += error.faults
        faults.raise_all()


# -- What is refused before any trial --


def _engine_trials(trainer: Trainer) -> Any:
    """Return what makes the steps of a trial if the strategy has an engine, else ``None``."""
    return getattr(trainer.strategy, "engine_trials", None)


def refuse_strategy(trainer: Trainer) -> None:
    """Raise if a trial on one rank alone is not possible, with the reason."""
    if (trials := _engine_trials(trainer)) is not None:
        refuse_fixed_sizes(trainer, "AutoBatchSize is to choose the batch size")
        if why := trials.why_not_possible():
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


# -- One trial of a batch size: real steps on a real batch, on this rank alone, then one message to the others --
#
# A trial runs the module itself, not its distributed wrapper, so no gradient is reduced and no rank can leave another
# in a collective. If the strategy has an engine, the engine also makes the steps of a trial. Collectives are answered
# at once, with tensors of the size that the real answer would have. After each trial the ranks agree on how it went.

_STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class TrialRunner:
    """Runs trials of one loop."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        place: BatchLoaders,
        *,
        steps: int,  # of a trial; only from the second on the optimizer's state takes memory from the beginning
        limit: MemoryLimit,
        accumulates: bool,  # whether the run may accumulate, although the Trainer does not say so yet
    ) -> None:
        self._trainer, self._module, self._place = trainer, module, place
        self._steps, self._limit, self._accumulates = steps, limit, accumulates
        self._kind = loop_of(trainer)
        self._engine = _engine_trials(trainer)
        self._engine_state: Any = None
        # If oneDNN has once had no memory for the code of a convolution in a thread, that thread can run no new
        # convolution any more. So trials of convolutions do not run in the thread that trains.
        convolves = any(isinstance(one, _CONVOLUTIONS) for one in module.modules())
        self._compiles = limit.device.type == "cpu" and convolves

    def preserved(self) -> Snapshot:
        """Return the state of the run, to be restored after the trials."""
        if self._engine is not None:
            others = whole_run(self._module, generators=self._place.generators(), tensors=False)
            self._engine_state = self._engine.state()  # after `whole_run` has taken the gradients away
            return Snapshot(others, self._engine_state)
        return whole_run(
            self._module,
            self._trainer.strategy.optimizers if self._kind == "fit" else (),
            scaler=getattr(self._trainer.precision_plugin, "scaler", None),
            generators=self._place.generators(),
        )

    def run(self, size: int) -> Trial:
        """Try ``size`` and agree on how it went."""
        # Attributes that a trial sets must not take memory in the next one, and the next one must not read them.
        gradients, attributes = Gradients(self._module), ModuleAttributes(self._module)
        with self._alone() as passes:
            failure = self._limit.attempt(lambda: self._steps_of(size, passes), in_thread=self._compiles)
        if self._engine_state is not None:
            self._engine_state.restore_structure()
        attributes.restore()
        gradients.restore()  # also the flags of an optimizer that was toggled when memory ran out
        release_memory(collect=failure is not None)
        full = ranks_that_are_full(failure, f"the step with batch size {size}")
        return Trial(size, not full, full)

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Isolate the steps of the body from the run; yield how many batches make an optimizer step."""
        with isolated(self._trainer, self._module, by_module=self._engine is None):
            if self._engine is None:
                yield 1
                return
            with self._engine.alone(accumulates=self._accumulates and self._kind == "fit") as passes:
                yield passes

    def _steps_of(self, size: int, passes: int) -> None:
        self._place.hold(size)  # a step may read it
        for index in range(self._steps * passes):
            batch = self._trainer.precision_plugin.convert_input(self._place.batch(size))
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
        step = getattr(self._trainer.strategy, f"{_STEPS[self._kind]}")
        self._module.eval()
        with torch.no_grad():
            step(*step_arguments(getattr(self._module, _STEPS[self._kind]), batch, index))


# -- The largest size to try --


def largest_to_try(
    trainer: Trainer, place: BatchLoaders, max_val: int, global_batch: int | None, as_configured: bool
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
    samples = int(communicator.all_reduce(torch.tensor(place.samples), "min"))
    if global_batch is None and in_fit(trainer):
        samples = max(1, samples // trainer.accumulate_grad_batches)
    return (samples, "it is all the data of a rank") if samples < most else (most, why)


# -- A whole search on all ranks: try, agree, repeat --


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

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


def run_search(
    trainer: Trainer,
    module: LightningModule,
    place: BatchLoaders,
    settings: AutoBatchSizeSettings,
    *,
    # Samples of all ranks in an optimizer step, for which batches of the size found are accumulated; None: any number.
    global_batch: int | None,
    as_configured: bool,  # the user has not given it
) -> SearchResult:
    """Search on all ranks together until an answer is found."""
    began, communicator = time.perf_counter(), current_communicator()
    most, why_none_above = largest_to_try(trainer, place, settings.max_val, global_batch, as_configured)
    limit = _limit_of_run(trainer, settings.memory_limit)
    search = SizeSearch(
        settings.init_val, max_val=most, why_none_above=why_none_above, max_trials=settings.max_trials
    )
    runner = TrialRunner(
        trainer,
        module,
        place,
        steps=settings.steps_per_trial,
        limit=limit,
        accumulates=global_batch is not None,
    )
    trials: list[Trial] = []

    def tried(size: int) -> Trial:
        trial = runner.run(size)
        trials.append(trial)
        reason = next(iter(trial.reasons.values()), "")
        how = "fits" if trial.fits else f"out of memory on {ranks_in_words(trial.reasons)} ({reason[:90]})"
        say_once(f"batch size trial {len(trials)}: {size:>6} per rank, {how}")
        return trial

    # On CPU a size must need the same memory whatever was tried before. If a trial ran out of memory, the run itself
    # keeps this setting.
    on_cpu = limit.device.type == "cpu"
    if on_cpu:
        return_freed_memory()
    gc.freeze()  # so that a collection does not go through all objects from before the search
    try:
        with runner.preserved():
            while not (proposal := search.propose()).stop:
                search.record(tried(proposal.size))
            if not proposal.size:
                raise BatchSizeError(_nothing_fits(search, proposal.reason, limit))
            size = _with_margin(search, proposal.size, settings.margin, tried)
    finally:
        gc.unfreeze()
        if on_cpu and search.high is None:
            return_freed_memory(32 * 2**20)  # as glibc does by itself after a while
    return SearchResult(
        size=size,
        largest=search.low,
        accumulate=trainer.accumulate_grad_batches,
        ranks=communicator.world_size,
        trials=tuple(trials),
        seconds=time.perf_counter() - began,
        reason=proposal.reason,
    )


def _limit_of_run(trainer: Trainer, memory_limit: str | int | float | None) -> MemoryLimit:
    """Return how much memory this rank may take in trials."""
    communicator = current_communicator()
    hosts = communicator.gather(communicator.host)
    return limit_of_trials(
        trainer.strategy.root_device,
        given=None if memory_limit is None else parse_bytes(memory_limit),
        local_ranks=hosts.count(communicator.host),
        owed=untouched_buckets(trainer.strategy.model),
    )


def _with_margin(search: SizeSearch, size: int, margin: float, tried: Callable[[int], Trial]) -> int:
    """Return the size that is smaller than ``size`` by the margin, after trying it too."""
    smaller = max(1, int(size * (1 - margin)))
    if size >= search.max_val or smaller == size:
        return size  # no larger size was to be tried, so the memory limit need not be near
    first = smaller
    while smaller >= 1:
        if tried(smaller).fits:
            return smaller
        # Fragmentation or another process has taken memory that was free, so a smaller size is tried.
        smaller = int(smaller * min(1 - margin, 0.9))
    raise BatchSizeError(
        f"batch size {first} did not fit, nor did any below it, although {size} had fitted just before: is another"
        " program using the memory?"
    )


def _nothing_fits(search: SizeSearch, reason: str, limit: MemoryLimit) -> str:
    smallest = min(trial.size for trial in search.trials)
    if smallest > 1:
        return f"no batch size fits ({reason}); the smallest tried was {smallest}"
    # On CPU most of the memory may be the interpreter's: a network of 10 kB is in a process of 400 MiB.
    most = (
        ""
        if limit.size is None
        else f" A rank may take {size_in_words(limit.size)} ({limit.source}), in which Python, its libraries, data,"
        " model and optimizer count too. Raise that if the machine has more."
    )
    return (
        f"1 does not fit: one sample needs more memory than there is.{most} Use a smaller model, a lower precision,"
        " activation checkpointing, or a strategy that shards or offloads the optimizer."
    )


# -- What a search prints and writes: a line for each trial, two at the end, and a file --


def say_once(text: str) -> None:
    """Print a line on rank 0 alone."""
    if current_communicator().is_main:
        say(text)


def keep_result(trainer: Trainer, folder: Path | None, result: SearchResult) -> None:
    """Print how the search ended, and write what one for a fit has found; on rank 0 alone."""
    numbers = f"  batch size {result.size} per rank"
    if in_fit(trainer):
        ranks = counted(result.ranks, "rank")
        numbers += f" x {result.accumulate} accumulated x {ranks} = {result.global_batch} per optimizer step"
        if folder is not None and current_communicator().is_main:
            write_report(folder / "batch_size.json", json.dumps(asdict(result), indent=2) + "\n")
    say_once(
        f"AutoBatchSize: {len(result.trials)} trials in {result.seconds:.1f} s, {result.reason}\n{numbers}"
    )
