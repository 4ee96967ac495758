"""AutoBatchSize: the largest batch that fits, on any number of ranks, and a run that survives a larger one."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import asdict
from typing import Any, Literal, cast

from lightning_lockstep._lightning import BatchSizeFinder, LightningModule, Trainer
from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep._system import write_report
from lightning_lockstep._text import counted
from lightning_lockstep._trainer import faults_as_lightnings
from lightning_lockstep.batch_size.loaders import BatchLoaders, SearchRefusedError, in_fit
from lightning_lockstep.batch_size.memory import parse_bytes
from lightning_lockstep.batch_size.recovery import BatchSplitting
from lightning_lockstep.batch_size.search import SizeSearch
from lightning_lockstep.batch_size.search_run import (
    SearchResult,
    TrialRunner,
    largest_to_try,
    refuse_fixed_sizes,
    refuse_split,
    refuse_strategy,
    run_search,
    say_on_main,
)
from lightning_lockstep.callbacks.effective_batch_size import EffectiveBatchSize
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.rank_supervisor import current_job, folder_of_run
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import RandomState, restored


class AutoBatchSize(BatchSizeFinder, EndsWithRun):
    """Finds the largest batch size that fits on every rank, before a fit, validate, test or predict.

    A fit keeps its global batch, and divides it into micro-batches that fit; evaluations take the largest that fits.
    During a trial every attribute named ``batch_arg_name`` holds the size that is tried; afterwards it holds the size
    found, or its old value if the search raises. Without ``global_batch_size`` it and ``accumulate_grad_batches`` have
    their old values again when the run has ended.

    It replaces Lightning's ``BatchSizeFinder`` and has the same arguments (up to ``max_val``), hooks,
    ``scale_batch_size`` and ``optimal_batch_size``.

    Args:
        mode: ``binsearch`` grows eightfold until a size does not fit, then halves the ratio between that and the
            largest that fitted, until they are within 2 %; ``off`` does not search.
        steps_per_trial: Optimizer steps of a trial; at least 2 to see the optimizer's state in place.
        init_val: First size to try.
        max_trials: Maximum number of sizes to try.
        batch_arg_name: Attribute of the module, its hparams, the data module or its hparams that the loader
            is made with. Not used when a DataLoader is passed to ``fit()``.
        margin: Fraction by which the result stays below the largest size that fits (0 to 1); not applied
            if the data or ``max_val`` were the limit.
        max_val: Largest size to try. No size larger than the data of one rank is tried.
        memory_limit: Maximum memory of a rank, in bytes or as ``"4GiB"``. By default what the device has free;
            on CPU the control group's limit or the host's memory, divided by the ranks of the host.
        global_batch_size: Samples of all ranks in one optimizer step of a fit, by gradient accumulation (see
            :class:`EffectiveBatchSize`). ``None`` keeps what is configured; ``"largest"`` takes all that fits, as
            Lightning's does, with a warning if an epoch then has fewer optimizer steps.
        on_oom: When memory runs out in a training step later: ``raise``; ``split`` runs that batch again in
            micro-batches under the same optimizer step.
        loss_reduction: How the training step's loss adds up over samples, for ``split``.

    Attributes:
        result: What the last search found, or ``None``.
        optimal_batch_size: Samples per rank that the last search found; first ``init_val``, ``None`` in fast_dev_run.
        batches_split: Batches of this fit that were split on any rank, up to the last end of an epoch.

    Raises:
        ConfigurationError: An argument cannot be used; the message lists every error. It is a
            ``MisconfigurationException`` too.
        BatchSizeError: No size fits, or a search is not possible here, which is a ``MisconfigurationException`` too.
            (On every rank, at the start.)

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.BatchSizeFinder.html

    Ranks: add it on every rank. A search begins with three messages; a
        trial costs one all-reduce of 4 bytes on the CPU. During training nothing is sent unless memory runs
        out; the cost per step is one ``try`` and one look at the gradients.
    """

    SUPPORTED_MODES: tuple[str, ...] = ("binsearch", "off")  # type: ignore[assignment]

    def __init__(
        self,
        mode: Literal["binsearch", "off"] = "binsearch",
        steps_per_trial: int = 2,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        memory_limit: str | int | float | None = None,
        global_batch_size: int | Literal["largest"] | None = None,
        on_oom: Literal["raise", "split"] = "raise",
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        mode = cast(Any, str(mode).lower())  # as Lightning does
        faults = Faults()
        faults.choice("mode", mode, self.SUPPORTED_MODES)
        faults.choice("on_oom", on_oom, ("raise", "split"))
        faults.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        faults.number("margin", margin, what="a share of the size found", least=0, below=1)
        faults.check(bool(batch_arg_name), "batch_arg_name", batch_arg_name, "the name of an attribute")
        faults.whole("steps_per_trial", steps_per_trial)
        faults.whole("init_val", init_val)
        faults.whole("max_trials", max_trials)
        faults.whole("max_val", max_val)
        is_size = is_whole(global_batch_size) and global_batch_size >= 1
        expected = "samples in one optimizer step, a whole number from 1; 'largest', what fits; or None, as configured"
        is_right = is_size or global_batch_size in (None, "largest")
        faults.check(is_right, "global_batch_size", global_batch_size, expected)
        if memory_limit is not None:
            try:
                parse_bytes(memory_limit)
            except ConfigurationError as error:
                faults.texts += error.faults
        with faults_as_lightnings():
            faults.raise_all()
        EndsWithRun.__init__(self)
        super().__init__(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self.mode, self.steps_per_trial, self.margin = mode, steps_per_trial, margin
        self.init_val, self.max_val, self.max_trials = init_val, max_val, max_trials
        self.batch_arg_name = batch_arg_name
        self.memory_limit, self.global_batch_size = memory_limit, global_batch_size
        self.on_oom, self.loss_reduction = on_oom, loss_reduction
        self.result: SearchResult | None = None
        self.batches_split = 0
        # What divides the global batch of a fit: a callback of the Trainer, or one of its own.
        self._keeper: EffectiveBatchSize | None = None
        self._splitting: BatchSplitting | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        """Refuse a strategy under which no size can be tried. Ranks: all ranks; nothing is sent."""
        if self.on_oom != "raise":
            refuse_split(trainer)
        searches = self.mode != "off" and not getattr(trainer, "fast_dev_run", False)
        if searches:
            refuse_strategy(trainer)
        self._keeper, given = None, self.global_batch_size
        if stage != "fit":
            return
        if isinstance(given, int) or (searches and given is None):
            what = f"AutoBatchSize(global_batch_size={given}) sets the accumulation"
            refuse_fixed_sizes(trainer, what, accumulates=True)
        asking = [one for one in getattr(trainer, "callbacks", ()) if isinstance(one, EffectiveBatchSize)]
        if asking and given not in (None, asking[0].global_batch_size):
            raise SearchRefusedError(
                f"AutoBatchSize(global_batch_size={given!r}) and EffectiveBatchSize ask for global batches of"
                f" {given} and {asking[0].global_batch_size}: expected one size. Give it to one of them."
            )
        self._keeper = asking[0] if asking else None
        if self._keeper is None and isinstance(given, int):
            self._keeper = EffectiveBatchSize(given, batch_arg_name=self.batch_arg_name)
            self._keeper.setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and guard the steps to come. Ranks: all, together."""
        super().on_fit_start(trainer, pl_module)
        if self.mode == "off" and self._keeper is not None:
            self._keeper.on_fit_start(trainer, pl_module)
        if self.on_oom != "raise":
            refuse_strategy(trainer)
            self.batches_split = 0
            splitting = BatchSplitting(trainer, pl_module, loss_reduction=self.loss_reduction)
            self.at_end.callback(splitting.close)
            self.at_end.enter_context(replaced(self, _splitting=splitting))

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and let the run go on with what is found, unless ``mode`` is ``off``.

        The hooks that come before a loop call this. A subclass may call it elsewhere, as in ``on_train_epoch_start``.

        Raises:
            BatchSizeError: No size fits, or a search is not possible here.

        Ranks: all, together.
        """
        if self.mode == "off":
            return
        self.optimal_batch_size = self.result = None
        if getattr(trainer, "fast_dev_run", False):
            say_on_main("AutoBatchSize: no search under fast_dev_run")
            return
        refuse_strategy(trainer)
        place, keeper = self._place(trainer, pl_module), self._keeper
        began = time.perf_counter()
        with place.former_size(on_error_only=True):
            global_batch = None if keeper is None else keeper.global_batch_size
            as_configured = self.global_batch_size is None and keeper not in getattr(trainer, "callbacks", ())
            most, why = largest_to_try(trainer, place, self.max_val, global_batch, as_configured)
            search = SizeSearch(self.init_val, max_val=most, why_none_above=why, max_trials=self.max_trials)
            trials = TrialRunner(
                trainer,
                pl_module,
                place,
                steps=self.steps_per_trial,
                memory_limit=self.memory_limit,
                accumulates=keeper is not None,
            )
            size, reason = run_search(search, trials, self.margin)
            took = time.perf_counter() - began
            if keeper is not None:
                keeper.divide(trainer, place, largest=size)
            else:
                _warn_of_fewer_steps(trainer, place, size)
                place.apply(size)
        self.optimal_batch_size = place.size
        self.result = SearchResult(
            size=place.size,
            largest=search.low,
            accumulate=trainer.accumulate_grad_batches,
            ranks=trainer.world_size,
            trials=tuple(trials.done),
            seconds=took,
            reason=reason,
        )
        _tell(trainer, self.result)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the batches split over all ranks, and log a new number. Ranks: all, together; one gather an epoch."""
        if self._splitting is None:
            return
        communicator, before = current_communicator(), self.batches_split
        self.batches_split = sum(communicator.gather(self._splitting.recovered))
        if self.batches_split > before and communicator.is_main:
            for logger in trainer.loggers:
                logger.log_metrics({"batches_split": float(self.batches_split)}, step=trainer.global_step)

    def _place(self, trainer: Trainer, module: LightningModule) -> BatchLoaders:
        """Return where the batch size is kept; if none is asked for, a fit keeps its global batch as configured."""
        # A hook that makes a loader may read the accumulation. A keeper sets its own later, from the size found.
        accumulate = trainer.accumulate_grad_batches if self._keeper is None else 1
        with restored(RandomState()), replaced(trainer, accumulate_grad_batches=accumulate):
            place = BatchLoaders(trainer, module, self.batch_arg_name)
        if len(place.loaders) > 1 and not in_fit(trainer):
            raise SearchRefusedError(
                f"there are {len(place.loaders)} loaders; one size for all of them would fit the largest batch"
                " only. Pass one loader at a time."
            )
        if self._keeper is None and self.global_batch_size is None:
            # The user has not asked for another size, so it is restored after the run and does not affect the next one.
            self.at_end.enter_context(place.former_size())
            if in_fit(trainer):
                total = min(place.size * trainer.world_size, place.samples_of_all) * accumulate
                self._keeper = EffectiveBatchSize(total, batch_arg_name=self.batch_arg_name)
                self.at_end.enter_context(replaced(trainer, accumulate_grad_batches=accumulate))
        return place


def _warn_of_fewer_steps(trainer: Trainer, place: BatchLoaders, size: int) -> None:
    if in_fit(trainer) and size > place.size and current_communicator().is_main:
        total = place.size * trainer.accumulate_grad_batches * trainer.world_size
        warnings.warn(
            f"batch size {size} per rank instead of {place.size}: an epoch has fewer optimizer steps, and the learning"
            f" rate stays as it is. The size that fits need not be one that trains well."
            f" AutoBatchSize(global_batch_size={total}) keeps the steps.",
            stacklevel=3,
        )


def _tell(trainer: Trainer, result: SearchResult) -> None:
    """Print how the search ended, and write what one for a fit has found; on rank 0 alone."""
    numbers = f"  batch size {result.size} per rank"
    if in_fit(trainer):
        ranks = counted(result.ranks, "rank")
        numbers += f" x {result.accumulate} accumulated x {ranks} = {result.global_batch} per optimizer step"
        job = current_job()
        folder = folder_of_run(trainer, None if job is None else job[0])
        if folder is not None and current_communicator().is_main:
            write_report(folder / "batch_size.json", json.dumps(asdict(result), indent=2) + "\n")
    trials = f"{len(result.trials)} trials in {result.seconds:.1f} s"
    say_on_main(f"AutoBatchSize: {trials}, {result.reason}\n{numbers}")
